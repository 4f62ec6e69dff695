// Long sums over components, and formulas that contain them.
//
// A squared distance or a dot product in many dimensions is a matrix product in disguise: for R rows and U vectors of
// columns, the R * U sums stay in registers, and a component reads R + U vectors for R * U of them. That takes nearly all
// registers, so the sums are written to a small table, and the rest of the formula reads them there, E rows at a time.
//
// Squared distances are sums of squared differences: |x|^2 - 2 x.y + |y|^2 would lose all digits of points that are near one
// another and far from the origin. products.h says for which pairs it does not, and which reductions use it for those.
//
// The formula F provides, besides what `emit` writes,
//   SUMS                     number of its long sums; 0: none, and then nothing here makes a difference
//   LENGTH[q]                components of sum q
//   summand<q, V>(x, y, d)   component d of what is summed
// and reads sum q as y.sum(q).
#pragma once

#include "products.h"

namespace kn {

/// Row r of a block of R rows, and vector u of a block of U vectors of columns.
template <class T, int R>
struct OneRow {
    const T* p;
    KN_FN Vec<T> operator[](int s) const { return fill_from(p + s * R); }
};
template <class T, int U>
struct OneVector {
    const T* p;
    KN_FN Vec<T> operator[](int s) const { return load(p + s * U * LANES<T>); }
};

/// Sum number Q of all pairs of a block: to[u * R + r] is for row r and vector u.
template <class T, class F, int R, int U, int Q>
KN_SLOW void contract(const T* rows, const T* columns, T* to) {
    typedef Vec<T> V;
    for (int first = 0; first < F::LENGTH[Q]; first += PANEL) {
        const int last = smaller(first + PANEL, int(F::LENGTH[Q]));
        V sum[R * U];
        KN_UNROLL(32)
        for (int p = 0; p < R * U; ++p) sum[p] = V{};
        KN_UNROLL(2)
        for (int d = first; d < last; ++d) {
            KN_UNROLL(16)
            for (int r = 0; r < R; ++r) {
                KN_UNROLL(16)
                for (int u = 0; u < U; ++u)
                    sum[u * R + r] += F::template summand<Q, V>(OneRow<T, R>{rows + r}, OneVector<T, U>{columns + u * LANES<T>}, d);
            }
        }
        KN_UNROLL(32)
        for (int p = 0; p < R * U; ++p) {
            T* const place = to + p * LANES<T>;
            store(place, first ? V(load(place) + sum[p]) : sum[p]);
        }
    }
}
/// The same sums, of some pairs only: those of number p[0 .. N - 1] of a block.
template <class T, class F, int R, int U, int Q, int N>
KN_SLOW void contract_some(const T* rows, const T* columns, const int* p, T* to) {
    typedef Vec<T> V;
    const T *x[N], *y[N];
    V total[N];
    KN_UNROLL(16)
    for (int k = 0; k < N; ++k) x[k] = rows + p[k] % R, y[k] = columns + p[k] / R * LANES<T>;
    for (int first = 0; first < F::LENGTH[Q]; first += PANEL) {
        const int last = smaller(first + PANEL, int(F::LENGTH[Q]));
        V sum[N];
        KN_UNROLL(16)
        for (int k = 0; k < N; ++k) sum[k] = V{};
        KN_UNROLL(2)
        for (int d = first; d < last; ++d) {
            KN_UNROLL(16)
            for (int k = 0; k < N; ++k)
                sum[k] += F::template summand<Q, V>(OneRow<T, R>{x[k]}, OneVector<T, U>{y[k]}, d);
        }
        KN_UNROLL(16)
        for (int k = 0; k < N; ++k) total[k] = first ? V(total[k] + sum[k]) : sum[k];
    }
    KN_UNROLL(16)
    for (int k = 0; k < N; ++k) store(to + p[k] * LANES<T>, total[k]);
}
template <class T, class F, int R, int U, int Q = 0>
KN_FN void contract_all(const T* rows, const T* columns, T* sums) {
    if constexpr (Q < F::SUMS) {
        contract<T, F, R, U, Q>(rows, columns, sums + Q * R * U * LANES<T>);
        contract_all<T, F, R, U, Q + 1>(rows, columns, sums);
    }
}

/// As contract_all, where the one sum is a squared distance that may be computed from products. STRIDE is that from a tile
/// of columns to the next, which the blocks of rows fetch ahead, each its part.
template <class T, class F, int R, int U, int64_t STRIDE>
KN_FN void contract_far(const T* rows, const T* columns, T* sums) {
    constexpr int L = LANES<T>;
    T& patience = const_cast<T&>(rows[(F::NROW + Moved<F>::PATIENT) * R]);  // the thread's own memory
    if (patience <= 0) return contract_all<T, F, R, U>(rows, columns, sums);
    const T* const moved = columns + F::NCOL * U * L;
    const uint64_t near = distances<T, F, R, U>(rows + F::NROW * R, moved, moved + STRIDE, sums);
    patience = smaller(T(patience + T(0.125)), T(PATIENCE));
    if (!near) return;
    patience -= 1;
    alignas(64) T exact[R * U * L];
    contract_all<T, F, R, U>(rows, columns, exact);
    for (int p = 0; p < R * U; ++p) {
        const Vec<T> s = load(sums + p * L);
        store(sums + p * L, select(is_nan(s), load(exact + p * L), s));
    }
}

/// What the rest of a formula reads of E rows of a block of R, and of one vector of a block of U: packs of E pieces.
template <class T, int E, int R>
struct SomeRows {
    const T* p;
    KN_FN Pack<T, E> operator[](int s) const {
        Pack<T, E> x;
        KN_UNROLL(16)
        for (int k = 0; k < E; ++k) x.v[k] = fill(p[s * R + k]);
        return x;
    }
};
template <class T, int E, int R, int U>
struct SummedVector {
    const T *p, *sums;
    KN_FN Pack<T, E> operator[](int s) const {
        const Vec<T> one = load(p + s * U * LANES<T>);
        Pack<T, E> y;
        KN_UNROLL(16)
        for (int k = 0; k < E; ++k) y.v[k] = one;
        return y;
    }
    KN_FN Pack<T, E> sum(int q) const {
        Pack<T, E> z;
        KN_UNROLL(16)
        for (int k = 0; k < E; ++k) z.v[k] = load(sums + (q * R * U + k) * LANES<T>);
        return z;
    }
};

/// N numbers of all pairs of a block. `formula(x, y, v)` computes them into v[0 .. N - 1], packs of as many pieces as
/// x[s] and y[s] are.
template <class T, class F, class S, int N, class Formula>
KN_FN void evaluate(const T* rows, const T* columns, Pack<T, S::R * S::U>* out, const Formula& formula) {
    constexpr int R = S::R, U = S::U, E = S::E, L = LANES<T>;
    if constexpr (F::SUMS == 0) {
        formula(RowSlots<T, R, U>{rows}, ColumnSlots<T, R, U>{columns}, out);
    } else {
        alignas(64) T sums[F::SUMS * R * U * L];
        if constexpr (F::PRODUCT > 0)
            contract_far<T, F, R, U, S::TILE * Layout<T, F, U>::STRIDE>(rows, columns, sums);
        else
            contract_all<T, F, R, U>(rows, columns, sums);
        KN_UNROLL(1)
        for (int p = 0; p < R * U; p += E) {
            Pack<T, E> v[N];
            formula(SomeRows<T, E, R>{rows + p % R}, SummedVector<T, E, R, U>{columns + p / R * L, sums + p * L}, v);
            KN_UNROLL(64)
            for (int n = 0; n < N; ++n) {
                KN_UNROLL(16)
                for (int k = 0; k < E; ++k) out[n].v[p + k] = v[n].v[k];
            }
        }
    }
}

}  // namespace kn
