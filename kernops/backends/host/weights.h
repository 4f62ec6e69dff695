// What a point weighs: its depth value, or the exponential of its logit minus the pixel's log-sum-exp, times a given weight.
//
// Points lie plane by plane: point p is in the plane of depth p / pixels % depths of image p / (depths * pixels).
#pragma once

#include "driver.h"
#include "rows.h"

namespace kn {

/// The words of a call: weights of all points. `lse` and `weight` may be null.
struct WeightCall {
    const void *depth, *weight;
    const void* lse;  // of each pixel, in the number type of the computation
    int64_t images, depths, pixels;
    void* out;
    int64_t threads;
};

/// Calls f(image, first pixel, number of pixels) for groups of at most `size` pixels.
template <class F>
void each_pixels(int64_t threads, int64_t images, int64_t pixels, int64_t size, const F& f) {
    const int64_t groups = (pixels + size - 1) / size;
    parallel(threads, images * groups, [&](int64_t item, int64_t) {
        const int64_t first = item % groups * size;
        f(item / groups, first, smaller(size, pixels - first));
    });
}

constexpr int64_t PIXELS = 256;  // pixels of a piece of work

template <class T>
struct Weights {
    typedef Real<T> R;
    static constexpr int L = LANES<R>;

    static int run(const WeightCall& call) {
        const T* const depth = static_cast<const T*>(call.depth);
        const T* const weight = static_cast<const T*>(call.weight);
        const R* const lse = static_cast<const R*>(call.lse);
        R* const out = static_cast<R*>(call.out);
        const int64_t work = call.images * call.depths * call.pixels * (call.lse ? 4 : 1);
        const int64_t threads = larger<int64_t>(1, smaller(call.threads, work / THREAD_WORK));
        each_pixels(threads, call.images, call.pixels, PIXELS, [&](int64_t image, int64_t first, int64_t count) {
            const int64_t pixel = image * call.pixels + first;
            const int64_t point = image * call.depths * call.pixels + first;
            for (int64_t k = 0; k < count; k += L) {
                const int64_t lanes = smaller<int64_t>(L, count - k);
                const Vec<R> whole = lse ? some(lse + pixel + k, lanes) : Vec<R>{};
                for (int64_t d = 0; d < call.depths; ++d) {
                    const int64_t p = point + d * call.pixels + k;
                    Vec<R> w = some(depth + p, lanes);
                    if (lse) w = exp(w - whole);
                    if (weight) w *= some(weight + p, lanes);
                    memcpy(out + p, &w, lanes * sizeof(R));
                }
            }
        });
        return 0;
    }

    /// The first `count` lanes from an address on; the others are 0.
    template <class From>
    KN_FN static Vec<R> some(const From* p, int64_t count) {
        if (count == L) return read<L>(p);
        Vec<R> v = {};
        for (int64_t j = 0; j < count; ++j) v[j] = read_one(p + j);
        return v;
    }
};

/// The words of a call: log of the sum of the exponentials over the depths of each pixel.
struct LseCall {
    const void* logits;
    int64_t images, depths, pixels;
    void* out;
    int64_t threads;
};

template <class T>
int log_sum_exp(const LseCall& call) {
    typedef Real<T> R;
    constexpr int L = LANES<R>;
    R* const out = static_cast<R*>(call.out);
    const int64_t work = call.images * call.depths * call.pixels * 4;
    const int64_t threads = larger<int64_t>(1, smaller(call.threads, work / THREAD_WORK));
    each_pixels(threads, call.images, call.pixels, PIXELS, [&](int64_t image, int64_t first, int64_t count) {
        const T* const logits = static_cast<const T*>(call.logits) + image * call.depths * call.pixels + first;
        for (int64_t k = 0; k < count; k += L) {
            const int64_t lanes = smaller<int64_t>(L, count - k);
            const auto at = [&](int64_t d) { return Weights<T>::some(logits + d * call.pixels + k, lanes); };
            Vec<R> most = splat<Vec<R>>(-KN_INF), sum = {};
            for (int64_t d = 0; d < call.depths; ++d) most = max_(most, at(d));
            most = select(lt(abs(most), splat<Vec<R>>(KN_INF)), most, Vec<R>{});  // infinite, NaN: the sum says it
            for (int64_t d = 0; d < call.depths; ++d) sum += exp(at(d) - most);
            Vec<R> lse = log(sum) + most;
            // An infinite logit is one of infinity / infinity, for all depths of the pixel.
            lse = select(eq(lse, splat<Vec<R>>(KN_INF)), splat<Vec<R>>(KN_NAN), lse);
            memcpy(out + image * call.pixels + first + k, &lse, lanes * sizeof(R));
        }
    });
    return 0;
}

}  // namespace kn
