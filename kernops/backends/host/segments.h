// Sums of the rows of each bucket, for items that are sorted by bucket.
//
// Work is cut into chunks of as many events, where an event is an item or the end of a bucket; so neither long buckets nor
// many empty ones make a chunk long. What a chunk adds to a bucket that other chunks share is kept beside, and those parts
// are added in order afterwards. The cut depends on the items alone: any number of threads gives the same bits.
#pragma once

#include "buckets.h"
#include "rows.h"

namespace kn {

constexpr int64_t CHUNK = 2048;  // events of a chunk
constexpr int64_t WINDOW = 128;  // items whose rows and weights are looked up at a time

/// What items are: a row; a run of points of a pixel, whose row has the sum of their weights; a row and where its weight is.
enum Items { ROWS, RUNS, PAIRS };
struct Pair {
    int32_t place, row;
};

/// Bucket s has its items at starts[s] ... starts[s + 1] - 1, and its events from starts[s] + s on.
struct Chunks {
    const int32_t* starts;
    int64_t buckets, events, count;

    Chunks(const int32_t* s, int64_t n) : starts(s), buckets(n), events(s[n] + n), count((events + CHUNK - 1) / CHUNK) {}
    int64_t first_event(int64_t chunk) const { return smaller(chunk * CHUNK, events); }
    /// The bucket of an event, or the number of buckets.
    int64_t bucket(int64_t event) const {
        int64_t low = 0, high = buckets;  // starts[low] + low <= event < starts[high + 1] + high + 1
        while (low < high) {
            const int64_t middle = (low + high + 1) / 2;
            if (starts[middle] + middle <= event)
                low = middle;
            else
                high = middle - 1;
        }
        return low;
    }
};

/// The words of a call: sums of the rows of each bucket.
struct SumCall {
    const void* values;   // row r begins at number r * step
    int64_t step, channels;
    const int32_t* items;
    int64_t kind;          // one of Items
    const int32_t* starts;
    int64_t buckets;
    const int32_t* targets;  // the row of the result for each bucket, or null
    const void* weights;     // of points, in the number type of the computation
    int64_t depths, pixels;  // RUNS: points lie plane by plane; pixels of an image
    void* out;
    int64_t format;  // of the result
    int64_t threads;
};

template <class T>
class Sums {
    typedef Real<T> R;

public:
    static int run(const SumCall& call) {
        const Chunks chunks(call.starts, call.buckets);
        const Sums sums(call, chunks);
        const int64_t work = chunks.events * (8 + call.channels / 4);
        const int64_t threads =
            larger<int64_t>(1, smaller(smaller(call.threads, Crew<int>::MOST), work / THREAD_WORK));
        const int64_t length = sums.rows_.length(), own = round_up(length * sizeof(R), 64) / sizeof(R);
        Buffer windows(threads * own * sizeof(R)), parts(size_t(2 * chunks.count) * length * sizeof(R)),
            shared(chunks.count * sizeof(Shared));
        if (!windows.get() || !parts.get() || !shared.get()) return 1;
        R* const part = reinterpret_cast<R*>(parts.get());
        Shared* const share = reinterpret_cast<Shared*>(shared.get());
        parallel(threads, chunks.count, [&](int64_t chunk, int64_t thread) {
            R* const of_window = reinterpret_cast<R*>(windows.get()) + thread * own;
            sums.compute(chunk, part + 2 * chunk * length, part + (2 * chunk + 1) * length, of_window, share[chunk]);
        });
        for (int64_t chunk = 0; chunk < chunks.count; ++chunk) {
            if (share[chunk].open < 0) continue;
            R* const sum = part + (2 * chunk + 1) * length;
            int64_t next = chunk;
            do {
                sums.rows_.add_sum(sum, part + 2 * ++next * length);
            } while (!share[next].ends);
            sums.store(share[chunk].open, sum);
        }
        return 0;
    }

private:
    struct Shared {
        int64_t open;  // the bucket that begins in this chunk and ends in a later one, or -1
        int64_t ends;  // whether the bucket that began in an earlier chunk ends in this one
    };
    struct Window {  // items begin <= k < end
        int64_t begin, end;
        const T* row[WINDOW];
        R weight[WINDOW];
        void clear() {
            for (int64_t k = 0; k < WINDOW; ++k) weight[k] = 1;
        }
    };

    Sums(const SumCall& call, const Chunks& chunks)
        : call_(call), chunks_(chunks), rows_(call.channels), values_(static_cast<const T*>(call.values)),
          weights_(static_cast<const R*>(call.weights)), pixels_(larger<int64_t>(1, call.pixels)),
          points_(larger<int64_t>(1, call.pixels * call.depths)), lines_(smaller<int64_t>(8, (call.channels * sizeof(T) + 63) / 64)) {}

    /// `head` gets the chunk's part of a bucket that began before; `sum` holds what is being added up and, at the end, the
    /// chunk's part of a bucket that does not end in it. Both are sums of the sums of windows: rounding errors stay small.
    void compute(int64_t chunk, R* head, R* sum, R* of_window, Shared& shared) const {
        const int64_t begin = chunks_.first_event(chunk), end = chunks_.first_event(chunk + 1);
        const int64_t first = chunks_.bucket(begin), last = chunks_.bucket(end);
        Window window;
        window.clear();
        window.begin = window.end = begin - first;
        shared.open = -1, shared.ends = 0;
        for (int64_t s = first, item = begin - first; s <= last && s < chunks_.buckets; ++s) {
            const int64_t until = smaller<int64_t>(call_.starts[s + 1], end - last);
            sum_items(item, until, end - last, sum, of_window, window);
            item = until;
            if (call_.starts[s] + s < begin) {
                memcpy(head, sum, rows_.length() * sizeof(R));
                shared.ends = s < last;
            } else if (s < last) {
                store(s, sum);
            } else if (call_.starts[s] + s < end) {
                shared.open = s;
            }
        }
    }

    /// sum = the sum of the items from `item` to `until`; the chunk's end at `stop`.
    void sum_items(int64_t item, int64_t until, int64_t stop, R* sum, R* of_window, Window& window) const {
        R* to = sum;
        memset(sum, 0, rows_.length() * sizeof(R));
        while (item < until) {
            if (item == window.end) {
                window.begin = item, window.end = smaller(item + WINDOW, stop);
                look_up(item, window.end - item, window);
            }
            const int64_t at = item - window.begin, count = smaller(until, window.end) - item;
            rows_.add(to, window.row + at, window.weight + at, count);
            if (to == of_window) rows_.add_sum(sum, of_window);
            to = of_window;
            item += count;
            if (item < until) memset(of_window, 0, rows_.length() * sizeof(R));
        }
    }

    void look_up(int64_t first, int64_t count, Window& window) const {
        if (call_.kind == ROWS) look_up(call_.items + first, count, window);
        if (call_.kind == RUNS) look_up(reinterpret_cast<const Run*>(call_.items) + first, count, window);
        if (call_.kind == PAIRS) look_up(reinterpret_cast<const Pair*>(call_.items) + first, count, window);
    }
    template <class Item>
    void look_up(const Item* item, int64_t count, Window& window) const {
        for (int64_t k = 0; k < count; ++k) window.row[k] = values_ + row(item[k]) * call_.step;
        const int64_t lines = lines_;
        for (int64_t k = 0; k < count; ++k) {
            const char* const line = reinterpret_cast<const char*>(window.row[k]);
            for (int64_t q = 0; q < lines; ++q) __builtin_prefetch(line + 64 * q);
            weigh(item[k], window.weight[k]);
        }
    }
    int64_t row(int32_t item) const { return item; }
    int64_t row(const Pair& pair) const { return pair.row; }
    int64_t row(const Run& run) const {  // the pixel
        const uint32_t p = run.first, image = points_(p), within = p - image * uint32_t(call_.depths * call_.pixels);
        return image * call_.pixels + (within - pixels_(within) * uint32_t(call_.pixels));
    }
    void weigh(int32_t, R&) const {}
    void weigh(const Pair& pair, R& weight) const { weight = weights_[pair.place]; }
    void weigh(const Run& run, R& weight) const {
        const R* const w = weights_ + run.first;
        R sum = w[0];
        for (int64_t k = 1; k < run.length; ++k) sum += w[k * call_.pixels];
        weight = sum;
    }

    void store(int64_t bucket, const R* sum) const {
        const int64_t number = (call_.targets ? call_.targets[bucket] : bucket) * call_.channels;
        with_format(call_.format, call_.out, [&](auto* out) { rows_.store(out + number, sum); });
    }

    const SumCall& call_;
    const Chunks& chunks_;
    const Rows<T> rows_;
    const T* const values_;
    const R* const weights_;
    const Divisor pixels_, points_;
    const int64_t lines_;  // cache lines of a row that are fetched ahead
};

}  // namespace kn
