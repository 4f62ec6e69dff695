// The vocabulary of formulas for one CUDA thread: scalar functions of float and double, comparisons and choices.
//
// Every text of the table of ops (kernops/formula/scalar_ops.py) is written with these names. `pack.cuh` lifts them to
// blocks of pairs. Nothing here or in the other headers includes a system header, because NVRTC finds none.
//
// Accuracy: float `exp2` is the hardware's approximation (relative error 2^-22), which flushes results below 2^-126 to
// zero; float `sqrt` has an error of at most 2^-23. All others are CUDA's library functions at full accuracy.
#pragma once

#define KN_FN __device__ __forceinline__
#define KN_SLOW __device__ __noinline__
#define KN_INF (__longlong_as_double(0x7ff0000000000000LL))
#define KN_NAN (__longlong_as_double(0x7ff8000000000000LL))

// KN_UNROLL(n) before a loop of length n: unrolled in full up to KN_UNROLL_CAP, so that arrays indexed by its variable
// can live in registers; longer loops by 8. The cap is set by the generated source: many pairs a thread, short loops.
#ifndef KN_UNROLL_CAP
#define KN_UNROLL_CAP 64
#endif
#define KN_TEXT_(x) #x
#define KN_TEXT(x) KN_TEXT_(x)
#define KN_UNROLL(n) _Pragma(KN_TEXT(unroll kn::unroll_factor(n)))
#define KN_UNROLL_ALL _Pragma("unroll")

namespace kn {

__device__ constexpr int unroll_factor(int n) { return n <= KN_UNROLL_CAP ? n : 8; }

/// `splat<V>(x)`: the number x as a value of type V.
template <class V>
struct Splat {
    KN_FN static V of(double x) { return V(x); }
};
template <class V>
KN_FN V splat(double x) {
    return Splat<V>::of(x);
}

/// @return index limited to 0 .. n - 1.
KN_FN int within(int index, int n) { return index < 0 ? 0 : index < n ? index : n - 1; }

// --- comparisons and choices (of floats, doubles and integers) --------------------------------------------------------
#define KN_COMPARISONS(T)                                                   \
    KN_FN bool lt(T a, T b) { return a < b; }                               \
    KN_FN bool le(T a, T b) { return a <= b; }                              \
    KN_FN bool eq(T a, T b) { return a == b; }                              \
    KN_FN T select(bool mask, T a, T b) { return mask ? a : b; }
KN_COMPARISONS(float)
KN_COMPARISONS(double)
KN_COMPARISONS(int)
KN_COMPARISONS(long long)
#undef KN_COMPARISONS

KN_FN bool or_(bool a, bool b) { return a || b; }
KN_FN bool and_(bool a, bool b) { return a && b; }
KN_FN bool is_nan(float a) { return a != a; }
KN_FN bool is_nan(double a) { return a != a; }

// --- CUDA's own functions -----------------------------------------------------------------------------------------
#define KN_UNARY(name, f, d)                      \
    KN_FN float name(float a) { return ::f(a); }  \
    KN_FN double name(double a) { return ::d(a); }
#define KN_BINARY(name, f, d)                                  \
    KN_FN float name(float a, float b) { return ::f(a, b); }   \
    KN_FN double name(double a, double b) { return ::d(a, b); }
KN_UNARY(exp, expf, exp)
KN_UNARY(expm1, expm1f, expm1)
KN_UNARY(log, logf, log)
KN_UNARY(log2, log2f, log2)
KN_UNARY(log1p, log1pf, log1p)
KN_UNARY(rsqrt, rsqrtf, rsqrt)
KN_UNARY(sin, sinf, sin)
KN_UNARY(cos, cosf, cos)
KN_UNARY(tan, tanf, tan)
KN_UNARY(asin, asinf, asin)
KN_UNARY(acos, acosf, acos)
KN_UNARY(atan, atanf, atan)
KN_UNARY(sinh, sinhf, sinh)
KN_UNARY(cosh, coshf, cosh)
KN_UNARY(tanh, tanhf, tanh)
KN_UNARY(erf, erff, erf)
KN_UNARY(erfc, erfcf, erfc)
KN_UNARY(floor, floorf, floor)
KN_UNARY(round, rintf, rint)
KN_UNARY(abs, fabsf, fabs)
KN_BINARY(atan2, atan2f, atan2)
KN_BINARY(fmod, fmodf, fmod)
KN_BINARY(lesser, fminf, fmin)  // of a number and NaN: the number
KN_BINARY(greater, fmaxf, fmax)
KN_BINARY(copysign, copysignf, copysign)
#undef KN_UNARY
#undef KN_BINARY

KN_FN double exp2(double a) { return ::exp2(a); }
KN_FN float exp2(float a) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(a));
    return r;
}

/// exp(a) for a term of a sum that holds a term of size 1, where a <= 0: small against that sum's rounding error.
KN_FN double exp_of_term(double a) { return ::exp(a); }
KN_FN float exp_of_term(float a) { return exp2(a * 1.4426950408889634f); }

/// The same number, of which the compiler does not know how it was computed, so that it is not computed again.
KN_FN int opaque(int a) {
    asm volatile("" : "+r"(a));
    return a;
}

KN_FN double sqrt(double a) { return ::sqrt(a); }
KN_FN float sqrt(float a) {
    float r;
    asm("sqrt.approx.f32 %0, %1;" : "=f"(r) : "f"(a));
    return r;
}

// --- minimum and maximum that hand NaN on -----------------------------------------------------------------------------
KN_FN double min_(double a, double b) { return a < b || a != a ? a : b; }
KN_FN double max_(double a, double b) { return a > b || a != a ? a : b; }
#if __CUDA_ARCH__ >= 800
KN_FN float min_(float a, float b) {
    float r;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
KN_FN float max_(float a, float b) {
    float r;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
#else
KN_FN float min_(float a, float b) { return a < b || a != a ? a : b; }
KN_FN float max_(float a, float b) { return a > b || a != a ? a : b; }
#endif

// --- written here -----------------------------------------------------------------------------------------------------
/// -1, 0 or 1; 0 for NaN, as torch has it.
template <class T>
KN_FN T sign(T a) {
    return T(T(0) < a) - T(a < T(0));
}

/// a - b floor(a / b): the remainder with the sign of b.
template <class T>
KN_FN T mod(T a, T b) {
    const T r = fmod(a, b);
    return r != T(0) && (r < T(0)) != (b < T(0)) ? r + b : r;
}

KN_SLOW float pow(float a, float b) { return ::powf(a, b); }
KN_SLOW double pow(double a, double b) { return ::pow(a, b); }
KN_SLOW float lgamma(float a) { return ::lgammaf(a); }
KN_SLOW double lgamma(double a) { return ::lgamma(a); }

/// a to the power n, for any V with a product and a quotient.
template <int n, class V>
KN_FN V powi(const V& a) {
    if constexpr (n < 0) {
        return splat<V>(1) / powi<-n>(a);
    } else if constexpr (n == 0) {
        return splat<V>(1);
    } else if constexpr (n == 1) {
        return a;
    } else {
        const V half = powi<n / 2>(a);
        if constexpr (n % 2 == 0) {
            return half * half;
        } else {
            return half * half * a;
        }
    }
}

/// Derivative of lgamma. Poles as in torch: -inf at 0, +inf at -0, NaN at negative whole numbers.
template <class T>
KN_SLOW T digamma(T a) {
    const T pi = T(3.14159265358979323846);
    T x = a, result = T(0);
    if (x == T(0)) return copysign(T(KN_INF), -x);
    if (x < T(0)) {
        if (x == floor(x)) return T(KN_NAN);
        result = -pi / tan(pi * (x - floor(x)));  // reflection
        x = T(1) - x;
    }
    for (; x < T(10); x = x + T(1)) result = result - T(1) / x;
    if (x == T(KN_INF)) return x;
    const T z = T(1) / (x * x);  // the asymptotic series, with Bernoulli numbers B_2k / 2k
    const T series = z * (T(1.0 / 12) - z * (T(1.0 / 120) - z * (T(1.0 / 252) - z * (T(1.0 / 240) - z * (T(1.0 / 132) -
                     z * (T(691.0 / 32760) - z * T(1.0 / 12)))))));
    return result + (log(x) - T(0.5) / x - series);
}

/// n-th derivative of digamma for a > 0 and n >= 1: (-1)^(n+1) n! zeta(n + 1, a), by Euler and Maclaurin's formula.
template <int n, class T>
KN_SLOW T polygamma_scalar(T a) {
    static_assert(n >= 1, "polygamma<0> is digamma");
    if (a < T(0)) return T(KN_NAN);
    if (a == T(KN_INF)) return T(0);
    // (2k)! / B_2k
    const double scale[] = {12.0, -720.0, 30240.0, -1209600.0, 47900160.0, -1892437580.3183791606, 74724249600.0,
                            -2950130727918.164224, 116467828143500.67249, -4597978722407472.6105};
    T sum = T(0), x = a;
    for (; x < T(10 + n / 2); x = x + T(1)) sum = sum + powi<-n - 1>(x);
    const T last = powi<-n - 1>(x);
    sum = sum + last * x / T(n) + T(0.5) * last;
    T term = last;
    KN_UNROLL_ALL
    for (int k = 0; k < 10; ++k) {
        term = term * T(n + 1 + 2 * k) / x;
        sum = sum + term / T(scale[k]);
        term = term * T(n + 2 + 2 * k) / x;
    }
    double factorial = n % 2 ? 1.0 : -1.0;
    KN_UNROLL_ALL
    for (int k = 2; k <= n; ++k) factorial *= k;
    return T(factorial) * sum;
}
template <int n>
KN_FN float polygamma(float a) {
    return polygamma_scalar<n>(a);
}
template <int n>
KN_FN double polygamma(double a) {
    return polygamma_scalar<n>(a);
}

}  // namespace kn
