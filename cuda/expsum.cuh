// Sums of exponentials, Q columns at a time: their largest exponent is found first, so that the running sum is scaled once
// for all of them and each column costs one exponential. The states themselves are in reductions.cuh.
#pragma once

namespace kn {

/// Folds Q terms into a sum of exponentials.
/// @param f exponents
/// @param weight weight[q][k], k < W, of term q
template <bool FULL, class T, int W, int Q, int WEIGHTS>
KN_FN void add_terms(ExpSum<T, W>& sum, const T (&f)[Q], const T (&weight)[Q][WEIGHTS], int valid) {
    T top = sum.m;
    KN_UNROLL_ALL
    for (int q = 0; q < Q; ++q)
        if (FULL || q < valid) top = greater(top, f[q]);
    if (!(abs(top) < T(KN_INF))) {  // nothing but -inf so far, or +inf: rare, and the rules are in ExpSum::add
        KN_UNROLL_ALL
        for (int q = 0; q < Q; ++q)
            if (FULL || q < valid) sum.add(f[q], weight[q]);
        return;
    }
    const T old = exp_of_term(sum.m - top);  // 0 if nothing but -inf was there
    sum.m = top;
    sum.s = sum.s * old;
    KN_UNROLL_ALL
    for (int k = 0; k < W; ++k) sum.w[k] = sum.w[k] * old;
    KN_UNROLL_ALL
    for (int q = 0; q < Q; ++q) {
        if (!FULL && q >= valid) break;
        const T e = exp_of_term(f[q] - top);  // NaN for NaN, and the sum stays NaN
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
        if (w.chunk == 0) static_cast<typename G::T*>(a.second)[w.batch * a.m + w.row] = state.lse();
    }
};

}  // namespace kn
