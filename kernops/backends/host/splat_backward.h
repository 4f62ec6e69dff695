// Derivatives of a splat, pixel by pixel: no two threads write to the same place, and a run of points of one pixel in one
// cell is one product and one sum.
#pragma once

#include "weights.h"

namespace kn {

/// The words of a call. Cells outside of 0 ... buckets - 1 are dropped points.
struct BackwardCall {
    const void* grad;  // of cell c at number c * grad_step
    int64_t grad_step, buckets;
    const void* values;  // of pixel r at number r * step
    int64_t step, channels;
    const int32_t* cells;
    const void* weights;  // of points, in the number type of the computation; where grad_values is wanted
    int64_t images, depths, pixels;
    void *grad_weights, *grad_values;  // either may be null; the first in the number type of the computation
    int64_t threads;
};

template <class T>
class Backward {
    typedef Real<T> R;
    static constexpr int64_t GROUP = 16;  // pixels whose planes are read together: a cache line of cells

public:
    static int run(const BackwardCall& call) {
        const Rows<T> rows(call.channels);
        const int64_t work = call.images * call.depths * call.pixels * (4 + call.channels / 4);
        const int64_t threads =
            larger<int64_t>(1, smaller(smaller(call.threads, Crew<int>::MOST), work / THREAD_WORK));
        const size_t own = scratch(rows, call.depths);
        Buffer buffer(threads * own);
        if (!buffer.get()) return 1;
        const int64_t pieces = (call.pixels + PIXELS - 1) / PIXELS;
        parallel(threads, call.images * pieces, [&](int64_t piece, int64_t thread) {
            const int64_t first = piece % pieces * PIXELS, end = smaller(first + PIXELS, call.pixels);
            const Backward backward(call, rows, buffer.get() + thread * own);
            for (int64_t k = first; k < end; k += GROUP) backward.group(piece / pieces, k, smaller(GROUP, end - k));
        });
        return 0;
    }

private:
    const BackwardCall& call_;
    const Rows<T>& rows_;
    const T** row_;  // the runs of a pixel: the cell's row, the sum of weights, the product, the first depth
    R *weight_, *product_;
    int32_t* start_;
    R *sum_, *one_;                 // rows
    int32_t* cells_;                // of a group, plane by plane
    R *weights_, *grad_weights_;    // of a group, plane by plane

    static size_t scratch(const Rows<T>& rows, int64_t depths) {
        const size_t bytes = (depths + 1) * (sizeof(T*) + 2 * sizeof(R) + sizeof(int32_t)) +
                             2 * rows.length() * sizeof(R) + GROUP * depths * (sizeof(int32_t) + 2 * sizeof(R));
        return round_up(bytes + 9 * 64, 4096);
    }
    Backward(const BackwardCall& call, const Rows<T>& rows, char* memory) : call_(call), rows_(rows) {
        const auto take = [&](size_t bytes) {
            char* const at = memory;
            memory += round_up(bytes, 64);
            return at;
        };
        row_ = reinterpret_cast<const T**>(take((call.depths + 1) * sizeof(T*)));
        weight_ = reinterpret_cast<R*>(take((call.depths + 1) * sizeof(R)));
        product_ = reinterpret_cast<R*>(take((call.depths + 1) * sizeof(R)));
        start_ = reinterpret_cast<int32_t*>(take((call.depths + 1) * sizeof(int32_t)));
        sum_ = reinterpret_cast<R*>(take(rows.length() * sizeof(R)));
        one_ = reinterpret_cast<R*>(take(rows.length() * sizeof(R)));
        cells_ = reinterpret_cast<int32_t*>(take(GROUP * call.depths * sizeof(int32_t)));
        weights_ = reinterpret_cast<R*>(take(GROUP * call.depths * sizeof(R)));
        grad_weights_ = reinterpret_cast<R*>(take(GROUP * call.depths * sizeof(R)));
    }

    void group(int64_t image, int64_t first, int64_t count) const {
        const int64_t point = image * call_.depths * call_.pixels + first;
        for (int64_t d = 0; d < call_.depths; ++d)
            memcpy(cells_ + d * GROUP, call_.cells + point + d * call_.pixels, count * sizeof(int32_t));
        const R* const weights = static_cast<const R*>(call_.weights) + point;
        for (int64_t d = 0; call_.grad_values && d < call_.depths; ++d)
            memcpy(weights_ + d * GROUP, weights + d * call_.pixels, count * sizeof(R));
        if (call_.grad_weights) memset(grad_weights_, 0, GROUP * call_.depths * sizeof(R));
        for (int64_t k = 0; k < count; ++k) pixel(image * call_.pixels + first + k, k);
        if (!call_.grad_weights) return;
        R* const out = static_cast<R*>(call_.grad_weights) + point;
        for (int64_t d = 0; d < call_.depths; ++d)
            memcpy(out + d * call_.pixels, grad_weights_ + d * GROUP, count * sizeof(R));
    }

    void pixel(int64_t number, int64_t k) const {
        int64_t runs = 0;
        int32_t before = -1;
        for (int64_t d = 0; d < call_.depths; ++d) {
            const int32_t cell = cells_[d * GROUP + k];
            if (uint32_t(cell) < uint64_t(call_.buckets)) {
                if (cell != before) {
                    row_[runs] = static_cast<const T*>(call_.grad) + cell * call_.grad_step;
                    weight_[runs] = 0, start_[runs] = int32_t(d), ++runs;
                }
                if (call_.grad_values) weight_[runs - 1] += weights_[d * GROUP + k];
            }
            before = cell;
        }
        if (call_.grad_weights) {
            rows_.spread(one_, static_cast<const T*>(call_.values) + number * call_.step);
            rows_.dot(product_, row_, one_, runs);
            for (int64_t r = 0; r < runs; ++r) {
                const int32_t cell = cells_[start_[r] * GROUP + k];
                for (int64_t d = start_[r]; d < call_.depths && cells_[d * GROUP + k] == cell; ++d)
                    grad_weights_[d * GROUP + k] = product_[r];
            }
        }
        if (call_.grad_values) {
            memset(sum_, 0, rows_.length() * sizeof(R));
            rows_.add(sum_, row_, weight_, runs);
            rows_.store(static_cast<T*>(call_.grad_values) + number * call_.channels, sum_);
        }
    }
};

}  // namespace kn
