// Inclusive prefix sums inside each bucket, for items that are sorted by bucket, forwards or backwards.
//
// Items are cut into chunks of one size. First the part of each chunk that belongs to a bucket which goes on in the next
// one is summed up; with the chunks before added, it is where the next chunk starts. The cut does not depend on threads.
#pragma once

#include "buckets.h"
#include "rows.h"

namespace kn {

/// The words of a call.
struct RunningCall {
    const void* values;  // row r begins at number r * step
    int64_t step, channels;
    const int32_t *order, *starts;  // items of bucket s: order[starts[s]] ... order[starts[s + 1] - 1]
    int64_t buckets, reverse;
    void* out;
    int64_t format, threads;
};

template <class T>
class Running {
    typedef Real<T> R;
    static constexpr int64_t CHUNK = 2048;

public:
    static int run(const RunningCall& call) {
        const Running r(call);
        const int64_t chunks = (r.total_ + CHUNK - 1) / CHUNK, length = r.rows_.length();
        const int64_t work = r.total_ * (8 + call.channels / 2);
        const int64_t threads = larger<int64_t>(1, smaller(call.threads, work / THREAD_WORK));
        Buffer buffer((chunks + 1) * length * sizeof(R));  // the sum that each chunk starts from
        if (!buffer.get()) return 1;
        R* const carry = reinterpret_cast<R*>(buffer.get());
        memset(carry, 0, (chunks + 1) * length * sizeof(R));
        parallel(threads, chunks - 1, [&](int64_t k, int64_t) { r.sum_end(k * CHUNK, carry + (k + 1) * length); });
        for (int64_t k = 1; k < chunks; ++k)
            if (r.start(r.bucket(k * CHUNK)) < (k - 1) * CHUNK)
                for (int64_t j = 0; j < length; ++j) carry[k * length + j] += carry[(k - 1) * length + j];
        parallel(threads, chunks, [&](int64_t k, int64_t) {
            with_format(call.format, call.out, [&](auto* out) { r.compute(k * CHUNK, carry + k * length, out); });
        });
        return 0;
    }

private:
    explicit Running(const RunningCall& call)
        : call_(call), rows_(call.channels), values_(static_cast<const T*>(call.values)),
          total_(call.starts[call.buckets]) {}

    // Places and buckets are counted from the end where sums run backwards.
    int64_t item(int64_t place) const { return call_.order[call_.reverse ? total_ - 1 - place : place]; }
    int64_t start(int64_t s) const {
        return call_.reverse ? total_ - call_.starts[call_.buckets - s] : call_.starts[s];
    }
    /// The bucket of a place.
    int64_t bucket(int64_t place) const {
        int64_t low = 0, high = call_.buckets;  // start(low) <= place < start(high)
        while (high - low > 1) {
            const int64_t middle = (low + high) / 2;
            (start(middle) <= place ? low : high) = middle;
        }
        return low;
    }
    /// The sum of a chunk's items of the bucket that the next chunk begins with; 0 where it begins with a new one.
    void sum_end(int64_t begin, R* sum) const {
        const R one = 1;
        for (int64_t place = larger(begin, start(bucket(begin + CHUNK))); place < begin + CHUNK; ++place) {
            const T* const row = values_ + item(place) * call_.step;
            rows_.add(sum, &row, &one, 1);
        }
    }
    template <class Out>
    void compute(int64_t begin, R* sum, Out* out) const {
        const int64_t end = smaller(begin + CHUNK, total_);
        int64_t s = bucket(begin);
        for (int64_t place = begin; place < end; ++place) {
            if (place == start(s + 1)) {
                while (place == start(s + 1)) ++s;
                memset(sum, 0, rows_.length() * sizeof(R));
            }
            const int64_t row = item(place);
            rows_.add_and_store(out + row * call_.channels, sum, values_ + row * call_.step);
        }
    }

    const RunningCall& call_;
    const Rows<T> rows_;
    const T* const values_;
    const int64_t total_;
};

}  // namespace kn
