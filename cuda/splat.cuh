// The splat without a sort, its derivatives, and the softmax over depths.
//
// Points lie as (cameras, depths, rows, columns), values as (cameras, rows, columns, C), cells as points. Beyond what
// rows.cuh asks for, G has
//   U        type of the numbers of the result
//   SOFTMAX, WEIGHTED   what the weights of points are made of (rows.cuh)
//   THREADS  of a block of `splat_atomic`;  DEPTHS  depths that a group of it keeps sums for;  ROWS  of an image that it
//            holds in shared memory at a time
//   UNROLL   rows that a warp of `splat_backward` loads at once;  BY_DEPTH, BY_VALUES  which derivatives it computes
#pragma once

#include "rows.cuh"

namespace kn {

constexpr int STRIP = 8;  // 32 bytes of float: what memory moves at least

/// Arguments of the kernels of this file; 8-byte fields only: kernops/geometric/kernels/cuda.py packs them.
struct SplatArguments {
    const void* values;  // (cameras, rows, columns, C)
    const int* cells;    // (cameras, depths, rows, columns); -1: dropped
    const void* grad;    // (cells, C): of splat_backward
    void* out;           // (cells, C) of the wide type, zero before splat_atomic; grad_depth of splat_backward
    void* grad_values;   // of splat_backward
    long long cameras, depths, rows, columns, channels, slabs;
    Scale scale;
};

template <class A, int N>
KN_FN void add_atomically(A* to, const A (&v)[N]) {
#if __CUDA_ARCH__ >= 900
    if (sizeof(A) == 4 && N % 4 == 0) {
        KN_UNROLL_ALL
        for (int i = 0; i < N; i += 4)
            asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to + i), "f"(float(v[i])),
                         "f"(float(v[(i + 1) % N])), "f"(float(v[(i + 2) % N])), "f"(float(v[(i + 3) % N])) : "memory");
        return;
    }
#endif
    KN_UNROLL_ALL
    for (int i = 0; i < N; ++i) atomicAdd(to + i, v[i]);
}

/// A block takes STRIP columns of an image and some depths; a group takes one column and DEPTHS depths and walks down
/// the rows. A level camera sees the same cell all the way down, so that one addition to memory serves many points; it
/// comes when the cell changes.
template <class G>
KN_FN void splat_atomic(const SplatArguments& a) {
    typedef typename G::T T;
    typedef typename Wide<T>::type A;
    constexpr int GROUPS = G::THREADS / G::LANES, PARTS = GROUPS / STRIP, OWN = PARTS * G::DEPTHS, ROWS = G::ROWS;
    constexpr int SLAB = G::LANES * G::CHUNKS * G::VEC;
    static_assert(GROUPS % STRIP == 0, "every column of the strip has the same number of groups");
    struct Point {
        A weight;
        int cell;
    };
    __shared__ Point points[OWN][ROWS][STRIP];

    const long long hw = a.rows * a.columns;
    const int strips = static_cast<int>((a.columns + STRIP - 1) / STRIP), parts = static_cast<int>((a.depths + OWN - 1) / OWN);
    long long block = blockIdx.x;
    const int slab = static_cast<int>(block % a.slabs) * SLAB;
    block /= a.slabs;
    const int first_depth = static_cast<int>(block % parts) * OWN;
    block /= parts;
    const int first_column = static_cast<int>(block % strips) * STRIP;
    const long long camera = block / strips;
    const int group = threadIdx.x / G::LANES, column = group % STRIP, own = group / STRIP * G::DEPTHS;
    const int channels = static_cast<int>(a.channels);
    const bool inside = first_column + column < a.columns;
    const RowReader<G> image(static_cast<const T*>(a.values) + (camera * hw + first_column + (inside ? column : 0)) * channels,
                             slab, channels);

    Share<G> sum[G::DEPTHS];
    int current[G::DEPTHS];
    KN_UNROLL_ALL
    for (int k = 0; k < G::DEPTHS; ++k) sum[k].zero(), current[k] = -1;
    const auto flush = [&](Share<G>& s, int cell) {
        KN_UNROLL_ALL
        for (int k = 0; k < G::CHUNKS; ++k) {
            const int c = Share<G>::channel(slab, k);
            if (c < channels) add_atomically(static_cast<A*>(a.out) + static_cast<long long>(cell) * channels + c, s.v[k]);
        }
        s.zero();
    };
    for (int first_row = 0; first_row < a.rows; first_row += ROWS) {
        const int rows = a.rows - first_row < ROWS ? static_cast<int>(a.rows) - first_row : ROWS;
        for (int k = threadIdx.x; k < OWN * ROWS * STRIP; k += G::THREADS) {
            const int c = k % STRIP, r = k / STRIP % ROWS, d = k / (STRIP * ROWS);
            Point point = {A(0), -1};
            if (r < rows && first_depth + d < a.depths && first_column + c < a.columns) {
                const long long pixel = (first_row + r) * a.columns + first_column + c;
                const long long p = (camera * a.depths + first_depth + d) * hw + pixel;
                point.cell = a.cells[p];
                if (point.cell >= 0) point.weight = a.scale.template of<G>(p, static_cast<int>(camera * hw + pixel));
            }
            points[d][r][c] = point;
        }
        __syncthreads();
        if (inside)
#pragma unroll 2
            for (int r = 0; r < rows; ++r) {
                Share<G> value;
                value.read(image, (first_row + r) * static_cast<int>(a.columns));
                KN_UNROLL_ALL
                for (int k = 0; k < G::DEPTHS; ++k) {
                    const Point point = points[own + k][r][column];
                    if (point.cell != current[k]) {
                        if (current[k] >= 0) flush(sum[k], current[k]);
                        current[k] = point.cell;
                    }
                    if (point.cell >= 0) sum[k].add(point.weight, value);
                }
            }
        __syncthreads();
    }
    KN_UNROLL_ALL
    for (int k = 0; k < G::DEPTHS; ++k)
        if (current[k] >= 0) flush(sum[k], current[k]);
}

/// Sums over the lanes of a warp of N numbers each. A lane ends up with the sum number `which`; N is a power of two.
template <int N, class A>
KN_FN A add_lanes(A (&v)[N], int& which) {
    int offset = 16;
    which = 0;
    KN_UNROLL_ALL
    for (int half = N / 2; half; half /= 2, offset /= 2) {  // a lane keeps one half and gives the other away
        const bool upper = threadIdx.x & offset;
        which += upper ? half : 0;
        KN_UNROLL_ALL
        for (int i = 0; i < half; ++i)
            v[i] = (upper ? v[i + half] : v[i]) + __shfl_xor_sync(0xffffffffu, upper ? v[i] : v[i + half], offset);
    }
    for (; offset; offset /= 2) v[0] += __shfl_xor_sync(0xffffffffu, v[0], offset);
    return v[0];
}

/// Derivatives of the splat by the weights of points (grad . values of the pixel, 0 where dropped) and by the values of
/// pixels (sum over depths of weight * grad of the cell). A block takes STRIP neighbouring pixels, a warp one of them:
/// nothing is added in memory.
template <class G>
KN_FN void splat_backward(const SplatArguments& a) {
    typedef typename G::T T;
    typedef typename Wide<T>::type A;
    constexpr int SLAB = 32 * G::CHUNKS * G::VEC, DEPTHS = 32;
    static_assert(G::LANES == 32, "a warp has a row");
    struct alignas(2 * sizeof(A)) Point {
        A weight;
        int cell;
    };
    __shared__ Point points[STRIP][DEPTHS + 1];  // of the block, then of each warp those that are kept
    __shared__ A dots[STRIP][DEPTHS + 1];

    const long long hw = a.rows * a.columns;
    const int strips = static_cast<int>((a.columns + STRIP - 1) / STRIP);
    const int row = static_cast<int>(blockIdx.x % a.rows), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int first_column = static_cast<int>(blockIdx.x / a.rows % strips) * STRIP;
    const long long camera = blockIdx.x / a.rows / strips;
    const int channels = static_cast<int>(a.channels), depths = static_cast<int>(a.depths);
    const int mine = threadIdx.x % STRIP;  // column of the strip that this thread moves points of
    const bool moves = first_column + mine < a.columns, inside = first_column + warp < a.columns;
    const long long line = row * a.columns + first_column, pixel = camera * hw + line + warp;

    for (int slab = 0; slab < channels; slab += SLAB) {  // beyond the first slab, the dot products are added up
        Share<G> value, total;
        const RowReader<G> grads(a.grad, slab, channels);
        value.read(static_cast<const T*>(a.values) + pixel * channels, slab, G::BY_DEPTH && inside ? channels : 0);
        total.zero();
        for (int base = 0; base < depths; base += DEPTHS) {
            const int depth = base + threadIdx.x / STRIP;
            const long long p = (camera * depths + depth) * hw + line + mine;
            Point point = {A(0), -1};
            if (moves && depth < depths) {
                point.cell = a.cells[p];
                if (G::BY_VALUES && point.cell >= 0) point.weight = a.scale.template of<G>(p, static_cast<int>(camera * hw + line + mine));
            }
            points[mine][threadIdx.x / STRIP] = point;
            __syncthreads();
            point = points[warp][lane];
            const unsigned kept = __ballot_sync(0xffffffffu, point.cell >= 0);
            const int count = __popc(kept), rank = __popc(kept & ((1u << lane) - 1));
            __syncwarp();
            if (point.cell >= 0) points[warp][rank] = point;
            __syncwarp();
            for (int j = 0; j < count; j += G::UNROLL) {
                Share<G> grad[G::UNROLL];
                A weight[G::UNROLL], dot[G::UNROLL];
                KN_UNROLL_ALL
                for (int u = 0; u < G::UNROLL; ++u) {
                    const Point at = points[warp][j + u < count ? j + u : j];
                    weight[u] = at.weight;
                    grad[u].read(grads, at.cell);
                }
                KN_UNROLL_ALL
                for (int u = 0; u < G::UNROLL; ++u) {
                    if (G::BY_VALUES && j + u < count) total.add(weight[u], grad[u]);
                    if (G::BY_DEPTH) dot[u] = value.dot(grad[u], slab, channels);
                }
                if (G::BY_DEPTH) {
                    int which;
                    const A sum = add_lanes<G::UNROLL>(dot, which);
                    if (lane % (32 / G::UNROLL) == 0 && j + which < count) dots[warp][j + which] = sum;
                }
            }
            if (G::BY_DEPTH) {
                __syncwarp();
                const A dot = point.cell >= 0 ? dots[warp][rank] : A(0);
                __syncwarp();
                dots[warp][lane] = dot;
                __syncthreads();
                if (moves && depth < depths) {
                    A* const to = static_cast<A*>(a.out) + p;
                    *to = slab ? *to + dots[mine][threadIdx.x / STRIP] : dots[mine][threadIdx.x / STRIP];
                }
            }
            __syncthreads();
        }
        if (G::BY_VALUES && inside) total.write(static_cast<T*>(a.grad_values) + pixel * channels, slab, channels);
    }
}

/// Log of the sum of exponentials over the depths of a pixel. A block takes 32 pixels; each of its warps takes every
/// LSE_WARPS-th depth of them.
constexpr int LSE_WARPS = 8;

template <class T>
KN_FN void depth_lse(const SplatArguments& a) {
    typedef typename Wide<T>::type A;
    __shared__ A largests[LSE_WARPS][32], sums[LSE_WARPS][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const long long hw = a.rows * a.columns, pixel = static_cast<long long>(blockIdx.x) * 32 + lane;
    const bool here = pixel < a.cameras * hw;
    const long long camera = here ? pixel / hw : 0;
    const T* const logits = static_cast<const T*>(a.values) + camera * a.depths * hw + (here ? pixel - camera * hw : 0);
    A largest = A(-KN_INF), sum = A(0);
    const auto add = [&](A x, A count) {  // `count` terms of exp(x)
        if (x > largest) {
            sum = sum * exp(largest - x) + count;
            largest = x;
        } else {  // a NaN comes here, be it x or the count of a warp that has seen nothing else
            sum += x == A(-KN_INF) && count == count ? A(0) : count * exp(x - largest);
        }
    };
#pragma unroll 4
    for (long long d = warp; d < a.depths; d += LSE_WARPS) add(widen(logits[d * hw]), A(1));
    largests[warp][lane] = largest;
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp || !here) return;
    for (int w = 1; w < LSE_WARPS; ++w) add(largests[w][lane], sums[w][lane]);
    // An infinite logit is one of infinity / infinity, for all depths of the pixel.
    static_cast<A*>(a.out)[pixel] = largest == A(KN_INF) ? A(KN_NAN) : largest + log(sum);
}

}  // namespace kn
