// The rest of the vocabulary of formulas (every `text` of kernops/formula/scalar_ops.py), for numbers and for SIMD vectors:
// sine and cosine of vectors, what is a few instructions, and the C library's functions taken lane by lane.
#pragma once

#include "elementary.h"

namespace kn {

// --- numbers: the C library -------------------------------------------------------------------------------------------
#define KN_UNARY(name, builtin)                                       \
    KN_FN float name(float a) { return __builtin_##builtin##f(a); }   \
    KN_FN double name(double a) { return __builtin_##builtin(a); }
#define KN_BINARY(name, builtin)                                                  \
    KN_FN float name(float a, float b) { return __builtin_##builtin##f(a, b); }   \
    KN_FN double name(double a, double b) { return __builtin_##builtin(a, b); }
KN_UNARY(exp, exp)
KN_UNARY(exp2, exp2)
KN_UNARY(expm1, expm1)
KN_UNARY(log, log)
KN_UNARY(log2, log2)
KN_UNARY(log1p, log1p)
KN_UNARY(sqrt, sqrt)
KN_UNARY(sin, sin)
KN_UNARY(cos, cos)
KN_UNARY(tan, tan)
KN_UNARY(asin, asin)
KN_UNARY(acos, acos)
KN_UNARY(atan, atan)
KN_UNARY(sinh, sinh)
KN_UNARY(cosh, cosh)
KN_UNARY(tanh, tanh)
KN_UNARY(erf, erf)
KN_UNARY(erfc, erfc)
KN_UNARY(lgamma, lgamma)
KN_UNARY(floor, floor)
KN_UNARY(round, rint)
KN_BINARY(pow, pow)
KN_BINARY(atan2, atan2)
KN_BINARY(fmod, fmod)
#undef KN_UNARY
#undef KN_BINARY

// --- lane by lane -----------------------------------------------------------------------------------------------------
/// f of every lane.
template <class T, class F>
KN_FN Vec<T> by_lane(Vec<T> a, F f) {
    T x[LANES<T>];
    store(x, a);
    for (int k = 0; k < LANES<T>; ++k) x[k] = f(x[k]);
    return load(x);
}
template <class T, class F>
KN_FN Vec<T> by_lane(Vec<T> a, Vec<T> b, F f) {
    T x[LANES<T>], y[LANES<T>];
    store(x, a), store(y, b);
    for (int k = 0; k < LANES<T>; ++k) x[k] = f(x[k], y[k]);
    return load(x);
}
#define KN_BY_LANE1(name)                                                                                       \
    inline KN_SLOW f32 name(f32 a) { return by_lane<float>(a, [](float x) { return name(x); }); }               \
    inline KN_SLOW f64 name(f64 a) { return by_lane<double>(a, [](double x) { return name(x); }); }
#define KN_BY_LANE2(name)                                                                                       \
    inline KN_SLOW f32 name(f32 a, f32 b) { return by_lane<float>(a, b, [](float x, float y) { return name(x, y); }); } \
    inline KN_SLOW f64 name(f64 a, f64 b) { return by_lane<double>(a, b, [](double x, double y) { return name(x, y); }); }
KN_BY_LANE1(tan)
KN_BY_LANE1(asin)
KN_BY_LANE1(acos)
KN_BY_LANE1(atan)
KN_BY_LANE1(sinh)
KN_BY_LANE1(cosh)
KN_BY_LANE1(erf)
KN_BY_LANE1(erfc)
KN_BY_LANE1(lgamma)
KN_BY_LANE2(atan2)
KN_BY_LANE2(fmod)

// --- one or a few instructions ----------------------------------------------------------------------------------------
#if KN_BYTES >= 32
#define KN_INSTRUCTION(name, V, text, otherwise)    \
    KN_FN V name(V a) {                             \
        V r;                                        \
        asm(text " %1, %0" : "=v"(r) : "v"(a));     \
        return r;                                   \
    }
#else
#define KN_INSTRUCTION(name, V, text, otherwise) \
    KN_FN V name(V a) { return otherwise; }
#endif
#if defined(KN_AVX512)
#define KN_ROUNDING(type) "vrndscale" type
#else
#define KN_ROUNDING(type) "vround" type
#endif
KN_INSTRUCTION(sqrt, f32, "vsqrtps", by_lane<float>(a, [](float x) { return sqrt(x); }))
KN_INSTRUCTION(sqrt, f64, "vsqrtpd", by_lane<double>(a, [](double x) { return sqrt(x); }))
KN_INSTRUCTION(floor, f32, KN_ROUNDING("ps") " $9,", by_lane<float>(a, [](float x) { return floor(x); }))
KN_INSTRUCTION(floor, f64, KN_ROUNDING("pd") " $9,", by_lane<double>(a, [](double x) { return floor(x); }))
KN_INSTRUCTION(round, f32, KN_ROUNDING("ps") " $8,", by_lane<float>(a, [](float x) { return round(x); }))
KN_INSTRUCTION(round, f64, KN_ROUNDING("pd") " $8,", by_lane<double>(a, [](double x) { return round(x); }))

template <class V>
KN_FN V inv(V a) {
    return splat<V>(1) / a;
}
template <class V>
KN_FN V rsqrt(V a) {
    return splat<V>(1) / sqrt(a);
}
/// 1 / sqrt(a), and 0 at 0.
template <class V>
KN_FN V rsqrt0(V a) {
    return select(eq(a, splat<V>(0)), splat<V>(0), rsqrt(a));
}
// What GPUs compute faster where an argument or the use of the result allows it.
template <class V>
KN_FN V exp2_of_negative(V a) {
    return exp2(a);
}
template <class V>
KN_FN V log_of_term(V a) {
    return log(a);
}
template <class V>
KN_FN V log_of_normal_term(V a) {
    return log(a);
}
/// -1, 0 or 1; 0 for NaN, as torch has it.
template <class V>
KN_FN V sign(V a) {
    const V zero = splat<V>(0), one = splat<V>(1);
    return select(lt(zero, a), one, select(lt(a, zero), splat<V>(-1), zero));
}
/// a - b floor(a / b): the remainder with the sign of b.
template <class V>
KN_FN V mod(V a, V b) {
    const V r = fmod(a, b), zero = splat<V>(0);
    const auto shift = or_(and_(lt(r, zero), lt(zero, b)), and_(lt(zero, r), lt(b, zero)));
    return select(shift, r + b, r);
}
/// a to the power n.
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

// --- sine and cosine --------------------------------------------------------------------------------------------------
/// x, which the compiler may not merge into a fused multiply-add.
KN_FN f64 rounded(f64 x) {
#if defined(__x86_64__)
    asm("" : "+v"(x));
#elif defined(__aarch64__)
    asm("" : "+w"(x));
#endif
    return x;
}
/// c - a b with one rounding, where the machine can.
#if defined(__FMA__)
KN_FN f32 minus_product(f32 c, f32 a, f32 b) {
    asm("vfnmadd231ps %2, %1, %0" : "+v"(c) : "v"(a), "v"(b));
    return c;
}
KN_FN f64 minus_product(f64 c, f64 a, f64 b) {
    asm("vfnmadd231pd %2, %1, %0" : "+v"(c) : "v"(a), "v"(b));
    return c;
}
#elif defined(__aarch64__)
KN_FN f32 minus_product(f32 c, f32 a, f32 b) {
    asm("fmls %0.4s, %1.4s, %2.4s" : "+w"(c) : "w"(a), "w"(b));
    return c;
}
KN_FN f64 minus_product(f64 c, f64 a, f64 b) {
    asm("fmls %0.2d, %1.2d, %2.2d" : "+w"(c) : "w"(a), "w"(b));
    return c;
}
#else
template <class V>
KN_FN V minus_product(V c, V a, V b) {
    return c - a * b;
}
#endif
/// x = n pi/2 + r + tail, with |r| <= pi/4. The constants are pi/2 cut in three: with fused multiply-add r comes out right
/// to the last bits for |x| up to `limit`.
KN_FN f32 quarter_turns(f32 x) { return nearest(x * 0.636619772367581343f); }
KN_FN f64 quarter_turns(f64 x) { return nearest(x * 0.636619772367581343); }
KN_FN void reduce_angle(f32 x, f32 n, f32& r, f32& tail) {
    r = minus_product(minus_product(x, n, splat<f32>(1.5707963705062866)), n, splat<f32>(-4.371138828673793e-08));
    r = minus_product(r, n, splat<f32>(-1.7151245100058819e-15));
    tail = f32{};
}
KN_FN void reduce_angle(f64 x, f64 n, f64& r, f64& tail) {
    const f64 second = splat<f64>(6.123233995736766e-17);
    const f64 a = minus_product(x, n, splat<f64>(1.5707963267948966));  // exact
    const f64 b = rounded(n * second), lost = minus_product(b, n, second);
    r = a - b;
    const f64 back = r - a;  // a - b = r + ((a - (r - back)) - (b + back)), whichever of the two is larger
    tail = ((a - (r - back)) - (b + back)) + minus_product(lost, n, splat<f64>(-1.4973849048591698e-33));
}
/// The sine and the cosine on [-pi/4, pi/4].
KN_FN f32 small_sin(f32 r, f32 tail) {
    const f32 z = r * r;
    return r + r * z * horner(z, -0.1666666716337204f, 0.008333329111337662f, -0.00019839327433146536f, 2.71823728326126e-06f);
}
KN_FN f32 small_cos(f32 r, f32 tail) {
    const f32 z = r * r;
    return 1.0f + z * (z * horner(z, 0.04166664555668831f, -0.001388736185617745f, 2.4437729734927416e-05f) - 0.5f);
}
KN_FN f64 small_sin(f64 r, f64 tail) {  // FreeBSD's
    const f64 z = r * r, v = z * r;
    const f64 p = horner(z, 8.33333333332248946124e-03, -1.98412698298579493134e-04, 2.75573137070700676789e-06,
                         -2.50507602534068634195e-08, 1.58969099521155010221e-10);
    return r - ((z * (0.5 * tail - v * p) - tail) + v * 1.66666666666666324348e-01);
}
KN_FN f64 small_cos(f64 r, f64 tail) {  // FreeBSD's
    const f64 z = r * r;
    const f64 p = z * horner(z, 4.16666666666666019037e-02, -1.38888888888741095749e-03, 2.48015872894767294178e-05,
                             -2.75573143513906633035e-07, 2.08757232129817482790e-09, -1.13596475577881948265e-11);
    const f64 half = 0.5 * z, w = 1.0 - half;
    return w + (((1.0 - w) - half) + (z * p - r * tail));
}
/// sin(x + turn pi/2), where every lane of |x| is at most the limit.
template <class V>
KN_FN V sin_near(V x, int turn) {
    const V n = quarter_turns(x);
    V r, tail;
    reduce_angle(x, n, r, tail);
    const auto q = integer(n) + turn;
    const auto odd = lt(0 - (q & 1), q & 0), flip = lt(0 - (q & 2), q & 0);
    const V s = select(odd, small_cos(r, tail), small_sin(r, tail));
    return select(flip, -s, s);
}
#if defined(KN_FMA)
constexpr double SIN_LIMIT_F32 = 65536.0, SIN_LIMIT_F64 = 1048576.0;
#else
constexpr double SIN_LIMIT_F32 = -1.0, SIN_LIMIT_F64 = -1.0;  // the C library does it all
#endif
inline KN_SLOW f32 sin_far(f32 a) { return by_lane<float>(a, [](float x) { return sin(x); }); }
inline KN_SLOW f64 sin_far(f64 a) { return by_lane<double>(a, [](double x) { return sin(x); }); }
inline KN_SLOW f32 cos_far(f32 a) { return by_lane<float>(a, [](float x) { return cos(x); }); }
inline KN_SLOW f64 cos_far(f64 a) { return by_lane<double>(a, [](double x) { return cos(x); }); }
#define KN_WAVE(name, V, turn, limit)                                                    \
    KN_FN V name(V x) {                                                                  \
        const auto near = le(abs(x), splat<V>(limit));                                   \
        return any(eq(near, near & 0)) ? name##_far(x) : sin_near(x, turn);              \
    }
KN_WAVE(sin, f32, 0, SIN_LIMIT_F32)
KN_WAVE(sin, f64, 0, SIN_LIMIT_F64)
KN_WAVE(cos, f32, 1, SIN_LIMIT_F32)
KN_WAVE(cos, f64, 1, SIN_LIMIT_F64)
#undef KN_WAVE

// --- powers -----------------------------------------------------------------------------------------------------------
inline KN_SLOW f32 pow_far(f32 a, f32 b) { return by_lane<float>(a, b, [](float x, float y) { return pow(x, y); }); }
inline KN_SLOW f64 pow(f64 a, f64 b) { return by_lane<double>(a, b, [](double x, double y) { return pow(x, y); }); }
/// In double precision, half of the lanes at a time; unusual arguments go to the C library.
inline KN_SLOW f32 pow(f32 a, f32 b) {
    typedef float half __attribute__((vector_size(KN_BYTES / 2)));
    const f32 zero = {}, inf = splat<f32>(KN_INF);
    const i32 usual = and_(and_(lt(zero, a), lt(a, inf)), lt(abs(b), inf));
    if (any(eq(usual, usual & 0))) return pow_far(a, b);
    half x[2], y[2];
    memcpy(x, &a, sizeof x), memcpy(y, &b, sizeof y);
    for (int k = 0; k < 2; ++k)
        x[k] = __builtin_convertvector(
            exp2(__builtin_convertvector(y[k], f64) * log2(__builtin_convertvector(x[k], f64))), half);
    memcpy(&a, x, sizeof a);
    return a;
}

// --- the gamma function's relatives -----------------------------------------------------------------------------------
/// Derivative of lgamma, in double precision. Poles as in torch: -Inf at 0, +Inf at -0, NaN at negative whole numbers.
inline KN_SLOW double digamma(double x) {
    if (x == 0) return copysign(KN_INF, -x);
    double result = 0;
    if (x < 0) {
        if (x == floor(x)) return KN_NAN;
        const double pi = 3.14159265358979323846;
        result = -pi / tan(pi * (x - floor(x)));  // reflection
        x = 1 - x;
    }
    for (; x < 10; x += 1) result -= 1 / x;
    if (x == KN_INF) return x;
    const double z = 1 / (x * x);  // the asymptotic series, with Bernoulli numbers B_2k / 2k
    const double series = z * (1.0 / 12 - z * (1.0 / 120 - z * (1.0 / 252 - z * (1.0 / 240 - z * (1.0 / 132 -
                          z * (691.0 / 32760 - z * (1.0 / 12)))))));
    return result + (log(x) - 0.5 / x - series);
}
/// n-th derivative of digamma for a > 0 and n >= 1: (-1)^(n+1) n! zeta(n + 1, a), by Euler and Maclaurin's formula.
template <int n>
inline KN_SLOW double polygamma(double a) {
    static_assert(n >= 1, "polygamma<0> is digamma");
    if (!(a >= 0)) return KN_NAN;
    if (a == KN_INF) return 0;
    // (2k)! / B_2k
    const double scale[] = {12.0, -720.0, 30240.0, -1209600.0, 47900160.0, -1892437580.3183791606, 74724249600.0,
                            -2950130727918.164224, 116467828143500.67249, -4597978722407472.6105};
    double sum = 0, x = a;
    for (; x < 10 + n / 2; x += 1) sum += powi<-n - 1>(x);
    const double last = powi<-n - 1>(x);
    sum += last * x / n + 0.5 * last;
    double term = last;
    for (int k = 0; k < 10; ++k) {
        term *= (n + 1 + 2 * k) / x;
        sum += term / scale[k];
        term *= (n + 2 + 2 * k) / x;
    }
    double factorial = n % 2 ? 1 : -1;
    for (int k = 2; k <= n; ++k) factorial *= k;
    return factorial * sum;
}
KN_FN float digamma(float a) { return float(digamma(double(a))); }
template <int n>
KN_FN float polygamma(float a) {
    return float(polygamma<n>(double(a)));
}
KN_BY_LANE1(digamma)
template <int n>
inline KN_SLOW f32 polygamma(f32 a) {
    return by_lane<float>(a, [](float x) { return polygamma<n>(x); });
}
template <int n>
inline KN_SLOW f64 polygamma(f64 a) {
    return by_lane<double>(a, [](double x) { return polygamma<n>(x); });
}

}  // namespace kn
