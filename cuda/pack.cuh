// Pack<T, N>: N numbers that a formula treats as one value.
//
// A pack is SOFT if its exponentials are left to the plain cores, where the unit for them is what all wait for.
//
// A thread evaluates its formula for a block of R rows times Q columns at once, with R * Q pairs in one Pack. A loop over
// the components of a vector inside the formula then reads R + Q numbers for R * Q pairs, as a matrix product does.
// All loops are unrolled and all arrays live in registers.
#pragma once

namespace kn {

template <class T, int N, bool SOFT = false>
struct Pack {
    static_assert(N >= 1, "a pack holds at least one number");
    T v[N];
};

/// N truth values.
template <int N>
struct Mask {
    bool m[N];
};

template <class T, int N, bool S>
struct Splat<Pack<T, N, S>> {
    KN_FN static Pack<T, N, S> of(double x) {
        Pack<T, N, S> r;
        KN_UNROLL_ALL
        for (int k = 0; k < N; ++k) r.v[k] = T(x);
        return r;
    }
};

#define KN_MAP1(name, expression)                        \
    template <class T, int N, bool S>                    \
    KN_FN Pack<T, N, S> name(const Pack<T, N, S>& a) {   \
        Pack<T, N, S> r;                                 \
        KN_UNROLL_ALL                                    \
        for (int k = 0; k < N; ++k) r.v[k] = expression; \
        return r;                                        \
    }
#define KN_MAP2(name, expression)                                              \
    template <class T, int N, bool S>                                          \
    KN_FN Pack<T, N, S> name(const Pack<T, N, S>& a, const Pack<T, N, S>& b) { \
        Pack<T, N, S> r;                                                       \
        KN_UNROLL_ALL                                                          \
        for (int k = 0; k < N; ++k) r.v[k] = expression;                       \
        return r;                                                              \
    }
#define KN_TEST2(name)                                                   \
    template <class T, int N, bool S>                                    \
    KN_FN Mask<N> name(const Pack<T, N, S>& a, const Pack<T, N, S>& b) { \
        Mask<N> r;                                                       \
        KN_UNROLL_ALL                                                    \
        for (int k = 0; k < N; ++k) r.m[k] = name(a.v[k], b.v[k]);       \
        return r;                                                        \
    }
#define KN_LOGIC2(name)                                            \
    template <int N>                                               \
    KN_FN Mask<N> name(const Mask<N>& a, const Mask<N>& b) {       \
        Mask<N> r;                                                 \
        KN_UNROLL_ALL                                              \
        for (int k = 0; k < N; ++k) r.m[k] = name(a.m[k], b.m[k]); \
        return r;                                                  \
    }
#define KN_LIFT1(name) KN_MAP1(name, name(a.v[k]))
#define KN_LIFT2(name) KN_MAP2(name, name(a.v[k], b.v[k]))

KN_MAP1(operator-, -a.v[k])
KN_MAP2(operator+, a.v[k] + b.v[k])
KN_MAP2(operator-, a.v[k] - b.v[k])
KN_MAP2(operator*, a.v[k] * b.v[k])
KN_MAP2(operator/, pair_quotient(a.v[k], b.v[k]))

KN_LIFT1(exp)
KN_MAP1(exp2, S ? plain_exp2(a.v[k]) : exp2(a.v[k]))
KN_MAP1(exp2_of_negative, S ? plain_exp2_of_negative(a.v[k]) : exp2(a.v[k]))
KN_LIFT1(expm1)
KN_MAP1(log, pair_log(a.v[k]))
KN_MAP1(log2, pair_log2(a.v[k]))
KN_MAP1(log1p, pair_log1p(a.v[k]))
KN_MAP1(log_of_term, pair_log_of_term(a.v[k]))
KN_MAP1(log_of_normal_term, pair_log_of_normal_term(a.v[k]))
KN_LIFT1(sqrt)
KN_MAP1(rsqrt, pair_rsqrt(a.v[k]))
KN_MAP1(rsqrt0, pair_rsqrt0(a.v[k]))
KN_MAP1(inv, pair_inv(a.v[k]))
KN_LIFT1(sin)
KN_LIFT1(cos)
KN_LIFT1(tan)
KN_LIFT1(asin)
KN_LIFT1(acos)
KN_LIFT1(atan)
KN_LIFT1(sinh)
KN_LIFT1(cosh)
KN_LIFT1(tanh)
KN_LIFT1(erf)
KN_LIFT1(erfc)
KN_LIFT1(lgamma)
KN_LIFT1(digamma)
KN_LIFT1(floor)
KN_LIFT1(round)
KN_LIFT1(abs)
KN_LIFT1(sign)
KN_LIFT2(pow)
KN_LIFT2(mod)
KN_LIFT2(atan2)
KN_LIFT2(min_)
KN_LIFT2(max_)

KN_TEST2(lt)
KN_TEST2(le)
KN_TEST2(eq)
KN_LOGIC2(or_)
KN_LOGIC2(and_)

template <class T, int N, bool S>
KN_FN Mask<N> is_nan(const Pack<T, N, S>& a) {
    Mask<N> r;
    KN_UNROLL_ALL
    for (int k = 0; k < N; ++k) r.m[k] = is_nan(a.v[k]);
    return r;
}

#undef KN_MAP1
#undef KN_MAP2
#undef KN_TEST2
#undef KN_LOGIC2
#undef KN_LIFT1
#undef KN_LIFT2

template <class T, int N, bool S>
KN_FN Pack<T, N, S> select(const Mask<N>& mask, const Pack<T, N, S>& a, const Pack<T, N, S>& b) {
    Pack<T, N, S> r;
    KN_UNROLL_ALL
    for (int k = 0; k < N; ++k) r.v[k] = mask.m[k] ? a.v[k] : b.v[k];
    return r;
}

template <int n, class T, int N, bool S>
KN_FN Pack<T, N, S> polygamma(const Pack<T, N, S>& a) {
    Pack<T, N, S> r;
    KN_UNROLL_ALL
    for (int k = 0; k < N; ++k) r.v[k] = polygamma<n>(a.v[k]);
    return r;
}

}  // namespace kn
