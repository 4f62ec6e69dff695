// Pack<T, P>: P SIMD vectors that a formula treats as one value.
//
// A thread evaluates its formula for a block of R rows times U vectors of columns at once, with all R * U vectors in one
// Pack (piece u * R + r is row r, vector u). A loop over the components of a vector inside the formula then reads R + U
// vectors for R * U, as a matrix product does, and the chains of dependent instructions of different pieces overlap.
#pragma once

#include "functions.h"

namespace kn {

#define KN_PIECES KN_UNROLL(16) for (int p = 0; p < P; ++p)

template <class T, int P>
struct Pack {
    Vec<T> v[P];
};
/// P masks for pieces whose numbers are as wide as Int.
template <class Int, int P>
struct Mask {
    Vec<Int> m[P];
};
template <class T, int P>
using MaskFor = Mask<typename Simd<T>::Int, P>;

template <class T, int P>
struct Splat<Pack<T, P>> {
    KN_FN static Pack<T, P> of(double x) {
        const Vec<T> one = splat<Vec<T>>(x);
        Pack<T, P> r;
        KN_PIECES r.v[p] = one;
        return r;
    }
};

#define KN_LIFT1(name, expression)                   \
    template <class T, int P>                        \
    KN_FN Pack<T, P> name(const Pack<T, P>& a) {     \
        Pack<T, P> r;                                \
        KN_PIECES r.v[p] = expression;               \
        return r;                                    \
    }
#define KN_LIFT2(name, expression)                                          \
    template <class T, int P>                                               \
    KN_FN Pack<T, P> name(const Pack<T, P>& a, const Pack<T, P>& b) {       \
        Pack<T, P> r;                                                       \
        KN_PIECES r.v[p] = expression;                                      \
        return r;                                                           \
    }
#define KN_TEST2(name)                                                      \
    template <class T, int P>                                               \
    KN_FN MaskFor<T, P> name(const Pack<T, P>& a, const Pack<T, P>& b) {    \
        MaskFor<T, P> r;                                                    \
        KN_PIECES r.m[p] = name(a.v[p], b.v[p]);                            \
        return r;                                                           \
    }
#define KN_LOGIC2(name)                                                         \
    template <class Int, int P>                                                 \
    KN_FN Mask<Int, P> name(const Mask<Int, P>& a, const Mask<Int, P>& b) {     \
        Mask<Int, P> r;                                                         \
        KN_PIECES r.m[p] = name(a.m[p], b.m[p]);                                \
        return r;                                                               \
    }
#define KN_NAMED1(name) KN_LIFT1(name, name(a.v[p]))
#define KN_NAMED2(name) KN_LIFT2(name, name(a.v[p], b.v[p]))

KN_LIFT1(operator-, -a.v[p])
KN_LIFT2(operator+, a.v[p] + b.v[p])
KN_LIFT2(operator-, a.v[p] - b.v[p])
KN_LIFT2(operator*, a.v[p] * b.v[p])
KN_LIFT2(operator/, a.v[p] / b.v[p])

KN_NAMED1(exp)
KN_NAMED1(exp2)
KN_NAMED1(expm1)
KN_NAMED1(log)
KN_NAMED1(log2)
KN_NAMED1(log1p)
KN_NAMED1(sqrt)
KN_NAMED1(rsqrt)
KN_NAMED1(sin)
KN_NAMED1(cos)
KN_NAMED1(tan)
KN_NAMED1(asin)
KN_NAMED1(acos)
KN_NAMED1(atan)
KN_NAMED1(sinh)
KN_NAMED1(cosh)
KN_NAMED1(tanh)
KN_NAMED1(erf)
KN_NAMED1(erfc)
KN_NAMED1(lgamma)
KN_NAMED1(digamma)
KN_NAMED1(floor)
KN_NAMED1(round)
KN_NAMED1(abs)
KN_NAMED1(sign)
KN_NAMED2(pow)
KN_NAMED2(mod)
KN_NAMED2(atan2)
KN_NAMED2(min_)
KN_NAMED2(max_)
KN_NAMED2(lesser)
KN_NAMED2(greater)

KN_TEST2(lt)
KN_TEST2(le)
KN_TEST2(eq)
KN_LOGIC2(or_)
KN_LOGIC2(and_)

template <class T, int P>
KN_FN MaskFor<T, P> is_nan(const Pack<T, P>& a) {
    MaskFor<T, P> r;
    KN_PIECES r.m[p] = is_nan(a.v[p]);
    return r;
}
template <int n, class T, int P>
KN_FN Pack<T, P> polygamma(const Pack<T, P>& a) {
    Pack<T, P> r;
    KN_PIECES r.v[p] = polygamma<n>(a.v[p]);
    return r;
}
template <class T, int P>
KN_FN Pack<T, P> select(const MaskFor<T, P>& mask, const Pack<T, P>& a, const Pack<T, P>& b) {
    Pack<T, P> r;
    KN_PIECES r.v[p] = select(mask.m[p], a.v[p], b.v[p]);
    return r;
}
template <class Int, int P>
KN_FN bool any(const Mask<Int, P>& mask) {
    Vec<Int> all = mask.m[0];
    KN_PIECES all = all | mask.m[p];
    return any(all);
}

/// The rows' pieces of vector u of columns.
template <int R, class T, int P>
KN_FN Pack<T, R> part(const Pack<T, P>& a, int u) {
    Pack<T, R> r;
    KN_UNROLL(16)
    for (int k = 0; k < R; ++k) r.v[k] = a.v[u * R + k];
    return r;
}

#undef KN_LIFT1
#undef KN_LIFT2
#undef KN_TEST2
#undef KN_LOGIC2
#undef KN_NAMED1
#undef KN_NAMED2

}  // namespace kn
