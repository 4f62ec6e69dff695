// The vocabulary of formulas for one CUDA thread: scalar functions of float and double, comparisons and choices.
//
// Every text of the table of ops (kernops/formula/scalar_ops.py) is written with these names. `pack.cuh` lifts them to
// blocks of pairs. Nothing here or in the other headers includes a system header, because NVRTC finds none.
//
// Accuracy of float: `exp2` (relative error 2^-22) and `sqrt` (2^-23) are the hardware's approximations, which take subnormal
// numbers for zero and give zero for results below 2^-126. So are the functions `pair_...`, which take the place of those
// without this word where a formula is computed for pairs. All others are CUDA's library functions at full accuracy.
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

// --- the unit of special functions, one instruction each ----------------------------------------------------------------
#define KN_UNIT(name, instruction)                       \
    KN_FN float name(float a) {                          \
        float r;                                         \
        asm(instruction " %0, %1;" : "=f"(r) : "f"(a));  \
        return r;                                        \
    }
KN_UNIT(unit_exp2, "ex2.approx.ftz.f32")
KN_UNIT(unit_log2, "lg2.approx.ftz.f32")
KN_UNIT(unit_log2_of_all, "lg2.approx.f32")  // subnormal numbers, too: three instructions more
KN_UNIT(unit_sqrt, "sqrt.approx.ftz.f32")
KN_UNIT(unit_rsqrt, "rsqrt.approx.ftz.f32")
KN_UNIT(unit_reciprocal, "rcp.approx.ftz.f32")
#undef KN_UNIT

// --- exponentials -----------------------------------------------------------------------------------------------------
KN_FN double exp2(double a) { return ::exp2(a); }
KN_FN float exp2(float a) { return unit_exp2(a); }

/// exp(a) for a term of a sum that holds a term of size 1, where a is not large: small against that sum's rounding error.
KN_FN double exp_of_term(double a) { return ::exp(a); }
KN_FN float exp_of_term(float a) { return exp2(a * 1.4426950408889634f); }

/// exp2(a) for a <= 0 or NaN.
template <class T>
KN_FN T exp2_of_negative(T a) {
    return exp2(a);
}

/// exp2(f) for |f| <= 1/2 by plain cores: relative error 2^-22.
KN_FN float plain_exp2_of_fraction(float f) {
    // of all polynomials with the value 1 at 0 the one whose largest relative error on [-1/2, 1/2] is least
    float p = 1.32646528e-3f;
    p = p * f + 9.67151113e-3f;
    p = p * f + 5.55073395e-2f;
    p = p * f + 2.40222424e-1f;
    p = p * f + 6.93147004e-1f;
    return p * f + 1.0f;
}
/// exp2(a) for a <= 0 or NaN by plain cores, where the unit is what all wait for.
KN_FN float plain_exp2_of_negative(float a) {
    const float b = max_(a, -127.0f);
    const float t = b + 12583039.0f;  // 3 2^22 + 127: its last bits are the nearest whole number, as an exponent
    return plain_exp2_of_fraction(b - (t - 12583039.0f)) * __int_as_float(__float_as_int(t) << 23);
}
/// exp2 by plain cores; infinite from 127.5 on.
KN_FN float plain_exp2(float a) { return plain_exp2_of_negative(min_(a, 128.0f)); }
KN_FN double plain_exp2_of_negative(double a) { return exp2(a); }
KN_FN double plain_exp2(double a) { return exp2(a); }

// --- logarithms of pairs ----------------------------------------------------------------------------------------------
/// The logarithm of u, where x = u - 1 and `log2_u` is the unit's: relative error 2^-21. The unit's error of 2^-22 is small
/// against 1, but not against a logarithm near 0; there a polynomial takes its place.
KN_FN float log_near(float x, float log2_u) {
    // of all polynomials x - x^2 (1/2 - ...) of this degree the one whose largest relative error on [-0.35, 0.5] is least
    float p = 8.606243133544922e-2f;
    p = p * x - 1.5207608044147491e-1f;
    p = p * x + 1.5408533811569214e-1f;
    p = p * x - 1.646697223186493e-1f;
    p = p * x + 1.989770233631134e-1f;
    p = p * x - 2.5004082918167114e-1f;
    p = p * x + 3.333585262298584e-1f;
    p = p * x - 5.000000596046448e-1f;
    return abs(x - 0.075f) <= 0.425f ? p * (x * x) + x : log2_u * 0.6931471805599453f;
}
KN_FN float pair_log(float a) { return log_near(a - 1.0f, unit_log2_of_all(a)); }
KN_FN float pair_log2(float a) {
    const float power = unit_log2_of_all(a);
    return abs(a - 1.075f) <= 0.425f ? log_near(a - 1.0f, power) * 1.4426950408889634f : power;
}
KN_FN float pair_log1p(float a) { return log_near(a, unit_log2(1.0f + a)); }
KN_FN double pair_log(double a) { return log(a); }
KN_FN double pair_log2(double a) { return log2(a); }
KN_FN double pair_log1p(double a) { return log1p(a); }

/// log(a) where a number of size 1 or more is added: an error of 2^-22 of 1 + |log| is small against the sum's rounding error.
/// The second is for numbers that are not subnormal.
template <class T>
KN_FN T log_of_term(T a) {
    return log(a);
}
template <class T>
KN_FN T log_of_normal_term(T a) {
    return log(a);
}
KN_FN float pair_log_of_term(float a) { return unit_log2_of_all(a) * 0.6931471805599453f; }
KN_FN float pair_log_of_normal_term(float a) { return unit_log2(a) * 0.6931471805599453f; }
KN_FN double pair_log_of_term(double a) { return log(a); }
KN_FN double pair_log_of_normal_term(double a) { return log(a); }

// --- roots and quotients ------------------------------------------------------------------------------------------------
KN_FN double sqrt(double a) { return ::sqrt(a); }
KN_FN float sqrt(float a) { return unit_sqrt(a); }
KN_FN float pair_rsqrt(float a) { return unit_rsqrt(a); }
KN_FN double pair_rsqrt(double a) { return rsqrt(a); }
/// 1 / sqrt(a), and 0 at 0; of pairs, where `sqrt` takes a for 0.
template <class T>
KN_FN T rsqrt0(T a) {
    return a == T(0) ? T(0) : rsqrt(a);
}
template <class T>
KN_FN T pair_rsqrt0(T a) {
    const T r = pair_rsqrt(a);
    return abs(r) == T(KN_INF) ? T(0) : r;
}

template <class T>
KN_FN T inv(T a) {
    return T(1) / a;
}
KN_FN float pair_inv(float a) { return unit_reciprocal(a); }
KN_FN double pair_inv(double a) { return inv(a); }
/// a / b, with an error of 2 units in the last place; of subnormal numbers, too.
KN_FN float pair_quotient(float a, float b) {
    float r;
    asm("div.full.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
KN_FN double pair_quotient(double a, double b) { return a / b; }

/// The same number, of which the compiler does not know how it was computed, so that it is not computed again.
KN_FN int opaque(int a) {
    asm volatile("" : "+r"(a));
    return a;
}

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
        return inv(powi<-n>(a));
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
