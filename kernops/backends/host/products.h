// Squared distances in many dimensions from products, for sums that weigh all pairs: |x - y|^2 is computed as A + B - 2 P.
//
// A product of vectors takes one multiplication and addition for a component where a difference and its square take a
// subtraction more. With n the number of components, u the unit of rounding, N = |x|^2 + |y|^2:
//
//     plain    P = sum x_d y_d,                             A = |x|^2,                      B = |y|^2
//     PAIRED   P = sum (x_d + y_d+1) (x_d+1 + y_d), d even  A = sum (x_d + x_d+1)^2,        B = sum (y_d + y_d+1)^2
//
// (S. Winograd, A new algorithm for inner product, IEEE Transactions on Computers C-17, 1968). PAIRED takes half the
// multiplications, and two additions for each: three instructions for two components, which is fastest where additions have
// units of their own. Each P sums at most n terms, whose sizes sum up to N at most: 2 |x_d y_d| <= x_d^2 + y_d^2, and
// 2 |(x_d + y_d+1) (x_d+1 + y_d)| <= (x_d + y_d+1)^2 + (x_d+1 + y_d)^2, which is at most twice these four squares. Summed in
// panels, P is off by (PANEL + n / PANEL + 3) u N at most, and A + B - 2 P by
//
//     (2 PANEL + 2 n / PANEL + 18) u N,
//
// rounding of the moved points, below, included.
// Differences give the square of a distance within (PANEL + n / PANEL + 3) u of itself. So products do nearly as well for
// pairs with A + B - 2 P > NEAR N, and all others, with those whose N may overflow or underflow, are computed from
// differences: the error is relative to the distance, however near two points are and however far from the origin. To
// keep N small, points are moved so that a sample of the columns has mean 0; differences are those of the points as they are.
// Blocks of rows that are near to many columns run out of patience and use differences alone.
//
// The formula F provides
//   PRODUCT                      components of the one sum that is taken so; 0: none
//   PRODUCT_ROW, PRODUCT_COLUMN  slots where its vectors begin
//   PAIRED                       as above
//   ROWS, COLUMNS                slots of rows and columns with those below
#pragma once

#include "problem.h"

namespace kn {

/// Components that are summed plainly; sums of so many are then added up, which keeps the rounding errors of a sum of
/// thousands of components as small as those of hundreds.
constexpr int PANEL = 256;
constexpr double NEAR = 0.25;
constexpr int PATIENCE = 4;            // blocks near to a block of rows, above one in eight, before it gives up
constexpr int64_t PRODUCT_POINTS = 128;  // rows and columns from which on moved points are worth their making
constexpr int CENTRE_POINTS = 256;     // of the sample for the centre

/// Where moved points lie, after the slots of the formula: components (an even number), A or B, N. Of rows, then, patience,
/// and from which share of the next columns on, 0 to 1, the block of rows fetches them ahead.
template <class F>
struct Moved {
    static constexpr int EVEN = (F::PRODUCT + 1) / 2 * 2;
    static constexpr int SQUARE = EVEN, NORM = EVEN + 1, PATIENT = EVEN + 2, AHEAD = EVEN + 3, SLOTS = EVEN + 4;
};

template <class T>
struct NormLimits;
template <>
struct NormLimits<float> {
    static constexpr double LEAST = 1e-28, MOST = 1e30;
};
template <>
struct NormLimits<double> {
    static constexpr double LEAST = 1e-280, MOST = 1e300;
};

/// Writes a point less the centre, and its numbers, `step` apart.
template <class F, class T>
void move_point(const T* point, const T* centre, T* to, int64_t step) {
    typedef Moved<F> M;
    double square = 0, norm = 0;
    T before = 0;
    for (int d = 0; d < M::EVEN; ++d) {
        const T v = d < F::PRODUCT ? T(point[d] - centre[d]) : T(0);
        to[d * step] = v;
        norm += double(v) * double(v);
        if (d % 2) square += (double(before) + double(v)) * (double(before) + double(v));
        before = v;
    }
    to[M::SQUARE * step] = T(F::PAIRED ? square : norm);
    // NaN: compared with it, no pair is far enough.
    to[M::NORM * step] = norm < NormLimits<T>::MOST ? T(norm * NEAR + NormLimits<T>::LEAST) : T(KN_NAN);
}

/// The mean of a sample of the columns of a batch element.
template <class T, class F>
void find_centre(const Problem<T, F>& p, int64_t b, T* centre) {
    const Inputs<T, F::NVARS> origin = p.inputs(b);
    const int64_t count = smaller<int64_t>(p.n, CENTRE_POINTS);
    T slot[F::NCOL + 1];
    for (int d = 0; d < F::PRODUCT; ++d) centre[d] = 0;
    for (int64_t k = 0; k < count; ++k) {
        Inputs<T, F::NVARS> in = origin;
        p.move(in, 1, k * p.n / count);
        F::template col<T>(in, slot);
        for (int d = 0; d < F::PRODUCT; ++d) centre[d] += slot[F::PRODUCT_COLUMN + d] / T(count);
    }
    for (int d = 0; d < F::PRODUCT; ++d)
        if (!(centre[d] - centre[d] == 0)) centre[d] = 0;  // whatever the centre, sums are right
}

// --- terms of rows and columns, and moved points behind them if there is a centre ----------------------------------------
/// The column terms of blocks `first` .. `last` - 1 of the columns of batch element b. Columns past the end repeat the last.
template <class T, class F, int U>
void pack_columns(const Problem<T, F>& p, int64_t b, int64_t first, int64_t last, const T* centre, T* to) {
    typedef Layout<T, F, U> Blocks;
    const Inputs<T, F::NVARS> origin = p.inputs(b);
    T slot[F::NCOL + 1];
    for (int64_t block = first; block < last; ++block) {
        T* out = to + block * Blocks::STRIDE;
        for (int k = 0; k < Blocks::WIDTH; ++k) {
            Inputs<T, F::NVARS> in = origin;
            p.move(in, 1, smaller(block * Blocks::WIDTH + k, p.n - 1));
            F::template col<T>(in, slot);
            for (int s = 0; s < F::NCOL; ++s) out[s * Blocks::WIDTH + k] = slot[s];
            if constexpr (F::PRODUCT > 0)
                if (centre)
                    move_point<F>(slot + F::PRODUCT_COLUMN, centre, out + F::NCOL * Blocks::WIDTH + k, Blocks::WIDTH);
        }
    }
}
/// The row terms of R rows from row i on, as [slot][row]. Rows past the end repeat the last.
/// @param ahead the share of the next columns that rows before these fetch (see Moved)
template <int R, class T, class F>
void pack_rows(const Problem<T, F>& p, const Inputs<T, F::NVARS>& origin, int64_t i, const T* centre, T ahead, T* to) {
    T slot[F::NROW + 1];
    for (int r = 0; r < R; ++r) {
        Inputs<T, F::NVARS> in = origin;
        p.move(in, 0, smaller(i + r, p.m - 1));
        F::template row<T>(in, slot);
        for (int s = 0; s < F::NROW; ++s) to[s * R + r] = slot[s];
        if constexpr (F::PRODUCT > 0) {
            to[(F::NROW + Moved<F>::PATIENT) * R + r] = centre ? T(PATIENCE) : T(0);
            to[(F::NROW + Moved<F>::AHEAD) * R + r] = ahead;
            if (centre) move_point<F>(slot + F::PRODUCT_ROW, centre, to + F::NROW * R + r, R);
        }
    }
}

// --- products ---------------------------------------------------------------------------------------------------------
// y + the number at p. Two forms of the same, for the units of additions and for those of products.
#if defined(KN_AVX512)
KN_FN f32 added(const float* p, f32 y, f32) {
    f32 r;
    asm("vaddps %1%{1to16%}, %2, %0" : "=v"(r) : "m"(*p), "v"(y));
    return r;
}
KN_FN f64 added(const double* p, f64 y, f64) {
    f64 r;
    asm("vaddpd %1%{1to8%}, %2, %0" : "=v"(r) : "m"(*p), "v"(y));
    return r;
}
KN_FN f32 added_by_product(const float* p, f32 y, f32 one) {
    asm("vfmadd213ps %1%{1to16%}, %2, %0" : "+v"(y) : "m"(*p), "v"(one));
    return y;
}
KN_FN f64 added_by_product(const double* p, f64 y, f64 one) {
    asm("vfmadd213pd %1%{1to8%}, %2, %0" : "+v"(y) : "m"(*p), "v"(one));
    return y;
}
#else
template <class T>
KN_FN Vec<T> added(const T* p, Vec<T> y, Vec<T>) {
    return fill_from(p) + y;
}
template <class T>
KN_FN Vec<T> added_by_product(const T* p, Vec<T> y, Vec<T>) {
    return fill_from(p) + y;
}
#endif

/// P of all pairs of a block: to[u * R + r] is for row r and vector u, from moved rows and columns. Meanwhile the memory from
/// `ahead` on is fetched to the cache, a line for every two components.
template <class T, class F, int R, int U>
KN_SLOW void multiply(const T* rows, const T* columns, const char* ahead, T* to) {
    typedef Vec<T> V;
    constexpr int L = LANES<T>;
    V one = splat<V>(1);
    for (int first = 0; first < Moved<F>::EVEN; first += PANEL) {
        const int last = smaller(first + PANEL, int(Moved<F>::EVEN));
        V sum[R * U];
        KN_UNROLL(32)
        for (int p = 0; p < R * U; ++p) sum[p] = V{};
        KN_UNROLL(1)
        for (int d = first; d < last; d += 2) {
            const T *const x = rows + d * R, *const y = columns + d * U * L;
            __builtin_prefetch(ahead + d * 32, 0, 2);
            KN_UNROLL(16)
            for (int u = 0; u < U; ++u) {
                const V y0 = load(y + u * L), y1 = load(y + (U + u) * L);
                KN_UNROLL(16)
                for (int r = 0; r < R; ++r) {
                    V& s = sum[u * R + r];
                    if constexpr (F::PAIRED) {
                        const V a = added(x + r, y1, one);
                        s += a * (r % 2 ? added(x + R + r, y0, one) : added_by_product(x + R + r, y0, one));
                    } else {
                        s += fill_from(x + r) * y0;
                        s += fill_from(x + R + r) * y1;
                    }
                }
            }
        }
        KN_UNROLL(32)
        for (int p = 0; p < R * U; ++p) {
            T* const place = to + p * L;
            store(place, first ? V(load(place) + sum[p]) : sum[p]);
        }
    }
}

/// Squared distances of all pairs of a block from products. Bit p of the result says whether piece p holds a pair too near
/// for that.
template <class T, class F, int R, int U>
KN_SLOW uint64_t distances(const T* rows, const T* columns, const T* next, T* to) {
    typedef Vec<T> V;
    typedef Moved<F> M;
    constexpr int L = LANES<T>;
    static_assert(R * U <= 64, "a bit for each piece");
    const int64_t from = int64_t(rows[M::AHEAD * R] * T(M::EVEN * U)) * L;
    multiply<T, F, R, U>(rows, columns, reinterpret_cast<const char*>(next + from), to);
    uint64_t near = 0;
    KN_UNROLL(1)
    for (int p = 0; p < R * U; ++p) {
        const int r = p % R, u = p / R;
        const V sum = fill_from(rows + M::SQUARE * R + r) + load(columns + (M::SQUARE * U + u) * L);
        const V least = fill_from(rows + M::NORM * R + r) + load(columns + (M::NORM * U + u) * L);
        const V s = sum - (load(to + p * L) + load(to + p * L));
        const auto far = lt(least, s);
        store(to + p * L, select(far, s, splat<V>(KN_NAN)));
        near |= uint64_t(any(eq(far, far ^ far))) << p;
    }
    return near;
}

}  // namespace kn
