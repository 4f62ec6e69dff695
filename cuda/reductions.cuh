// The streaming states of the reductions, shared by the CUDA and the host C++ back ends.
//
// A state is templated on a value type V and an index type I. On a GPU, V is float or double and every function below
// is scalar; on a CPU, V is a SIMD vector, and one state holds one partial reduction per lane. The driver that includes
// this file provides, in namespace kn and for every V it uses:
//
//   exp, log, abs, select(mask, a, b), lt(a, b), eq(a, b), is_nan(a), or_(m, n), and_(m, n), splat<V>(double)
//
// and the macros KN_FN (qualifier of an always-inlined function), KN_INF and KN_NAN (double constants).
//
// Every state has
//   C            number of independent components
//   IN           number of values that one update reads
//   neutral(k)   the k-th input that leaves a state as it is (used to pad the end of a tile)
//   init()       the identity
//   update(v, j) folds in the IN values v of column j
//   flush()      ends a tile: what was summed plainly is added to the compensated total
//   merge(o)     folds in another flushed state whose columns all come after, or are interleaved with, this one's
// Nothing here depends on how columns are grouped into tiles beyond rounding.
#pragma once

namespace kn {

// Adds x to the unevaluated sum hi + lo (Neumaier's variant of Kahan summation). An infinite or NaN total has no
// meaningful low part, and Inf - Inf would turn it into NaN, so there the low part is dropped.
template <class V>
KN_FN void add_compensated(V& hi, V& lo, const V& x) {
    const V s = hi + x;
    const auto big = lt(abs(hi), abs(x));
    const V e = select(big, (x - s) + hi, (hi - s) + x);
    lo = select(eq(s - s, splat<V>(0)), lo + e, splat<V>(0));
    hi = s;
}

// sum_j F_c
template <class V, class I, int C_>
struct Sum {
    static constexpr int C = C_, IN = C_;
    V part[C], hi[C], lo[C];

    KN_FN static V neutral(int) { return splat<V>(0); }
    KN_FN void init() {
        for (int c = 0; c < C; ++c) part[c] = hi[c] = lo[c] = splat<V>(0);
    }
    KN_FN void update(const V* v, I) {
        for (int c = 0; c < C; ++c) part[c] = part[c] + v[c];
    }
    KN_FN void flush() {
        for (int c = 0; c < C; ++c) {
            add_compensated(hi[c], lo[c], part[c]);
            part[c] = splat<V>(0);
        }
    }
    KN_FN void merge(const Sum& o) {
        for (int c = 0; c < C; ++c) {
            add_compensated(hi[c], lo[c], o.hi[c]);
            lo[c] = lo[c] + o.lo[c];
        }
    }
    KN_FN V value(int c) const { return hi[c] + lo[c]; }
};

// A sum of exponentials s·exp(m) together with W weighted sums w·exp(m), never overflowing.
template <class V, int W>
struct ExpSum {
    V m, s, slo, w[W + 1], wlo[W + 1];  // W + 1: an array of length 0 is not C++

    KN_FN void init() {
        m = splat<V>(-KN_INF);
        s = slo = splat<V>(0);
        for (int k = 0; k < W; ++k) w[k] = wlo[k] = splat<V>(0);
    }
    // Empties the sum, but keeps in m what the exponents may be like.
    KN_FN void restart(const V& top) {
        init();
        m = top;
    }
    // exp(a - top), where top >= a; equal infinities count as difference 0.
    KN_FN static V ratio(const V& a, const V& top) {
        return select(eq(a, top), splat<V>(1), exp(a - top));
    }
    KN_FN void add(const V& f, const V* weight) {
        const auto grows = or_(lt(m, f), is_nan(f));
        const V e = select(eq(f, m), splat<V>(1), exp(splat<V>(0) - abs(f - m)));
        const V old = select(grows, e, splat<V>(1)), now = select(grows, splat<V>(1), e);
        m = select(grows, f, m);
        s = s * old + now;
        for (int k = 0; k < W; ++k) w[k] = w[k] * old + now * weight[k];
    }
    KN_FN void merge(const ExpSum& o) {
        const V top = select(or_(lt(m, o.m), is_nan(o.m)), o.m, m);
        const V a = ratio(m, top), b = ratio(o.m, top);
        m = top;
        s = s * a;
        slo = slo * a + o.slo * b;
        add_compensated(s, slo, o.s * b);
        for (int k = 0; k < W; ++k) {
            w[k] = w[k] * a;
            wlo[k] = wlo[k] * a + o.wlo[k] * b;
            add_compensated(w[k], wlo[k], o.w[k] * b);
        }
    }
};

// log sum_j exp(F_c), each component on its own
template <class V, class I, int C_>
struct LogSumExp {
    static constexpr int C = C_, IN = C_;
    ExpSum<V, 0> part[C], total[C];

    KN_FN static V neutral(int) { return splat<V>(-KN_INF); }
    KN_FN void init() {
        for (int c = 0; c < C; ++c) part[c].init(), total[c].init();
    }
    KN_FN void update(const V* v, I) {
        for (int c = 0; c < C; ++c) part[c].add(v[c], nullptr);
    }
    KN_FN void flush() {
        for (int c = 0; c < C; ++c) total[c].merge(part[c]), part[c].restart(total[c].m);
    }
    KN_FN void merge(const LogSumExp& o) {
        for (int c = 0; c < C; ++c) total[c].merge(o.total[c]);
    }
    KN_FN V value(int c) const { return total[c].m + log(total[c].s + total[c].slo); }
};

// sum_j exp(F) G_c / sum_j exp(F), with scalar F = v[0] and weights G = v[1 .. C]; also log sum_j exp(F)
template <class V, class I, int C_>
struct SumSoftMaxWeight {
    static constexpr int C = C_, IN = C_ + 1;
    ExpSum<V, C_> part, total;

    KN_FN static V neutral(int k) { return k == 0 ? splat<V>(-KN_INF) : splat<V>(0); }
    KN_FN void init() { part.init(), total.init(); }
    KN_FN void update(const V* v, I) { part.add(v[0], v + 1); }
    KN_FN void flush() { total.merge(part), part.restart(total.m); }
    KN_FN void merge(const SumSoftMaxWeight& o) { total.merge(o.total); }
    // Where all F are -inf, s counts columns and padding alike: there is no softmax.
    KN_FN V value(int c) const {
        return select(eq(total.m, splat<V>(-KN_INF)), splat<V>(KN_NAN),
                      (total.w[c] + total.wlo[c]) / (total.s + total.slo));
    }
    KN_FN V lse() const { return total.m + log(total.s + total.slo); }
};

// min_j F_c; a NaN anywhere gives NaN
template <class V, class I, int C_>
struct Min {
    static constexpr int C = C_, IN = C_;
    V best[C];

    KN_FN static V neutral(int) { return splat<V>(KN_INF); }
    KN_FN void init() {
        for (int c = 0; c < C; ++c) best[c] = splat<V>(KN_INF);
    }
    KN_FN void update(const V* v, I) {
        for (int c = 0; c < C; ++c) best[c] = select(or_(lt(v[c], best[c]), is_nan(v[c])), v[c], best[c]);
    }
    KN_FN void flush() {}
    KN_FN void merge(const Min& o) { update(o.best, I()); }
    KN_FN V value(int c) const { return best[c]; }
};

// min_j F_c and the lowest j that attains it. NaN is never chosen; where nothing can be, the value is NaN, the index -1.
template <class V, class I, int C_>
struct MinArgMin {
    static constexpr int C = C_, IN = C_;
    V best[C];
    I arg[C];

    KN_FN static V neutral(int) { return splat<V>(KN_NAN); }
    KN_FN void init() {
        for (int c = 0; c < C; ++c) best[c] = splat<V>(KN_NAN), arg[c] = splat<I>(-1);
    }
    KN_FN void update(const V* v, I j) {
        for (int c = 0; c < C; ++c) take(c, v[c], j, or_(lt(v[c], best[c]), is_nan(best[c])));
    }
    KN_FN void flush() {}
    KN_FN void merge(const MinArgMin& o) {
        for (int c = 0; c < C; ++c) {
            const auto lower = and_(eq(o.best[c], best[c]), lt(o.arg[c], arg[c]));
            take(c, o.best[c], o.arg[c], or_(or_(lt(o.best[c], best[c]), lower), is_nan(best[c])));
        }
    }
    template <class M>
    KN_FN void take(int c, const V& v, const I& j, const M& better) {
        best[c] = select(better, v, best[c]);
        // while nothing was found (best still NaN) the index stays -1
        arg[c] = select(and_(better, eq(v, v)), j, arg[c]);
    }
    KN_FN V value(int c) const { return best[c]; }
};

}  // namespace kn
