// Sums of exponentials, Q columns at a time. What is subtracted from the exponents need not be the largest of them: any that
// keeps the terms in range does. So it is kept from one group of columns to the next, and a column costs one exponential and
// no comparison. The states themselves are in reductions.cuh.
#pragma once

namespace kn {

/// Folds Q terms into a sum of exponentials whose m is at least the largest exponent so far, or not far below it.
/// @param f exponents
/// @param weight weight[q][k], k < W, of term q
template <bool FULL, class T, int W, int Q, int WEIGHTS>
KN_FN void add_terms(ExpSum<T, W>& sum, const T (&f)[Q], const T (&weight)[Q][WEIGHTS], int valid) {
    T s = sum.s, w[W + 1];
    KN_UNROLL_ALL
    for (int k = 0; k < W; ++k) w[k] = sum.w[k];
    KN_UNROLL_ALL
    for (int q = 0; q < Q; ++q) {
        if (!FULL && q >= valid) break;
        const T e = exp_of_term(f[q] - sum.m);
        s = s + e;
        KN_UNROLL_ALL
        for (int k = 0; k < W; ++k) w[k] = w[k] + e * weight[q][k];
    }
    if (s <= T(1024)) {  // a tile has no more columns than 256
        sum.s = s;
        KN_UNROLL_ALL
        for (int k = 0; k < W; ++k) sum.w[k] = w[k];
        return;
    }
    // a first group, larger exponents, or infinities; NaN stays NaN
    T top = sum.m;
    KN_UNROLL_ALL
    for (int q = 0; q < Q; ++q)
        if (FULL || q < valid) top = greater(top, f[q]);
    const T old = sum.m == top ? T(1) : exp_of_term(sum.m - top);
    sum.m = top, sum.s = sum.s * old;
    KN_UNROLL_ALL
    for (int k = 0; k < W; ++k) sum.w[k] = sum.w[k] * old;
    KN_UNROLL_ALL
    for (int q = 0; q < Q; ++q) {
        if (!FULL && q >= valid) break;
        const T e = f[q] == top ? T(1) : exp_of_term(f[q] - top);
        sum.s = sum.s + e;
        KN_UNROLL_ALL
        for (int k = 0; k < W; ++k) sum.w[k] = sum.w[k] + e * weight[q][k];
    }
}

/// For LogSumExp.
template <class State>
struct ExpResults : Results<State> {
    template <bool FULL, class T, class I, int Q, int IN>
    KN_FN static void fold(State& state, const T (&v)[Q][IN], I, int valid) {
        KN_UNROLL_ALL
        for (int c = 0; c < IN; ++c) {
            T f[Q], none[Q][1];
            KN_UNROLL_ALL
            for (int q = 0; q < Q; ++q) f[q] = v[q][c], none[q][0] = T(0);
            add_terms<FULL>(state.part[c], f, none, valid);
        }
    }
};

/// For SumSoftMaxWeight. The log of the sum is the same for all chunks: the first one writes it.
template <class State>
struct SoftmaxResults : Results<State> {
    template <bool FULL, class T, class I, int Q, int IN>
    KN_FN static void fold(State& state, const T (&v)[Q][IN], I, int valid) {
        T f[Q], weight[Q][IN - 1];
        KN_UNROLL_ALL
        for (int q = 0; q < Q; ++q) {
            f[q] = v[q][0];
            KN_UNROLL_ALL
            for (int k = 1; k < IN; ++k) weight[q][k - 1] = v[q][k];
        }
        add_terms<FULL>(state.part, f, weight, valid);
    }
    template <class G, class X>
    KN_FN static void write(const typename G::Arguments& a, const Where& w, const X& x, State& state) {
        write_values<G>(a, w, x, state);
        if (w.chunk == 0) narrow(state.lse(), static_cast<typename G::E*>(a.second)[w.batch * a.m + w.row]);
    }
};

}  // namespace kn
