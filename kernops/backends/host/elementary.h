// Exponentials and logarithms of SIMD vectors, within 2 units in the last place (tests/backends/test_vector_math.py
// measures them). What they share: x is reduced to a small r and a whole number n, a minimax polynomial gives the function
// of r, and n goes into the exponent bits. Coefficients are from Remez' algorithm in 50 digits; those of the double
// logarithm are FreeBSD's. Products that must be exact for the reduction are so with and without fused multiply-add.
// Results below the smallest normal number may come out as 0.
//
// With AVX-512 one instruction looks numbers up in a table that is a register, and exponentials are most of the work of
// many kernels. There x = n + k/E + f, with E powers 2^(k/E) in the table and |f| <= 1/(2E): half the polynomial will do.
#pragma once

#include "vec.h"

namespace kn {

// --- building blocks --------------------------------------------------------------------------------------------------
/// c[0] + x (c[1] + x (c[2] + ...)).
template <class V, class T>
KN_FN V horner(V x, T last) {
    return splat<V>(last);
}
template <class V, class T, class... Rest>
KN_FN V horner(V x, T first, Rest... rest) {
    return horner(x, rest...) * x + T(first);
}

/// The nearest whole number, as a number; |x| must be below 2^22 (float) or 2^51 (double).
KN_FN f32 nearest(f32 x) { return (x + 12582912.0f) - 12582912.0f; }
KN_FN f64 nearest(f64 x) { return (x + 6755399441055744.0) - 6755399441055744.0; }

/// From a whole number to bits and back, for |n| below 2^22 (float) or 2^51 (double).
KN_FN i32 integer(f32 n) { return (i32)(n + 12582912.0f) - (i32)splat<f32>(12582912.0); }
KN_FN i64 integer(f64 n) { return (i64)(n + 6755399441055744.0) - (i64)splat<f64>(6755399441055744.0); }
KN_FN f32 number(i32 n) { return __builtin_convertvector(n, f32); }
KN_FN f64 number(i64 n) { return (f64)(n + (i64)splat<f64>(6755399441055744.0)) - 6755399441055744.0; }

#if defined(KN_AVX512)
#define KN_ASM1(name, V, text)                      \
    KN_FN V name(V a) {                             \
        V r;                                        \
        asm(text " %1, %0" : "=v"(r) : "v"(a));     \
        return r;                                   \
    }
#define KN_ASM2(name, V, text)                                  \
    KN_FN V name(V a, V b) {                                    \
        V r;                                                    \
        asm(text " %2, %1, %0" : "=v"(r) : "v"(a), "v"(b));     \
        return r;                                               \
    }
KN_ASM1(whole, f32, "vrndscaleps $8,")
KN_ASM1(whole, f64, "vrndscalepd $8,")
KN_ASM2(times_power, f32, "vscalefps")  // a 2^floor(b), overflow and underflow included
KN_ASM2(times_power, f64, "vscalefpd")
KN_ASM1(in_steps, f32, "vrndscaleps $64,")  // the nearest multiple of 1/E, for any number
KN_ASM1(in_steps, f64, "vrndscalepd $48,")
KN_FN f32 counted(f32 x) { return x + 0x1.8p19f; }  // E x, rounded, in the lowest bits, where |x| is below 2^18
KN_FN f64 counted(f64 x) { return x + 0x1.8p49; }   // (2^48)
/// 2^(k/E) for each k, the lowest bits of `at`.
KN_FN f32 looked_up(f32 at) {
    const f32 table = {1.0f,        1.0442737f, 1.0905077f, 1.1387886f, 1.1892071f, 1.2418578f, 1.2968396f, 1.3542556f,
                       1.41421356f, 1.4768262f, 1.5422108f, 1.6104903f, 1.6817929f, 1.7562522f, 1.8340081f, 1.9152066f};
    f32 r;
    asm("vpermps %1, %2, %0" : "=v"(r) : "v"(table), "v"(at));
    return r;
}
KN_FN f64 looked_up(f64 at) {
    const f64 table = {1.0,                1.0905077326652577, 1.189207115002721,  1.2968395546510096,
                       1.4142135623730951, 1.5422108254079407, 1.681792830507429,  1.8340080864093424};
    f64 r;
    asm("vpermpd %1, %2, %0" : "=v"(r) : "v"(table), "v"(at));
    return r;
}
#else
KN_FN f32 whole(f32 x) { return nearest(x); }
KN_FN f64 whole(f64 x) { return nearest(x); }
/// a 2^n for a whole number n, where the result is a normal number and 0.5 < a < 2.
KN_FN f32 times_power(f32 a, f32 n) { return (f32)((i32)a + (integer(n) << 23)); }
KN_FN f64 times_power(f64 a, f64 n) { return (f64)((i64)a + (integer(n) << 52)); }
#endif

/// x limited to [low, high]; NaN stays.
template <class V>
KN_FN V limited(V x, double low, double high) {
    return greater(splat<V>(low), lesser(splat<V>(high), x));
}

/// `value`, but 0 where x < low, Inf where x > high, and NaN where x is.
template <class V>
KN_FN V with_limits(V value, V x, double low, double high) {
#if defined(KN_AVX512)
    return value;  // times_power did it
#else
    value = select(lt(x, splat<V>(low)), splat<V>(0), value);
    return select(le(x, splat<V>(high)), value, x + splat<V>(KN_INF));
#endif
}

// --- exponentials -----------------------------------------------------------------------------------------------------
#if defined(KN_AVX512)
// For an infinity f is NaN, of which times_power makes the infinity, or 0.
KN_FN f32 exp2(f32 x) {
    const f32 n = in_steps(x), s = looked_up(counted(x)), f = x - n;
    const f32 p = horner(f, 0.6931471824645996f, 0.24023428559303284f, 0.055502135306596756f);
    return times_power(s * f * p + s, n);
}
KN_FN f64 exp2(f64 x) {
    const f64 n = in_steps(x), s = looked_up(counted(x)), f = x - n;
    const f64 p = horner(f, 0.6931471805599453, 0.24022650695911515, 0.05550410866480237, 0.009618129085186819,
                         0.0013333558238914495, 0.00015404521805637372, 1.5251844481657182e-05);
    return times_power(s * f * p + s, n);
}
#else
KN_FN f32 exp2(f32 x) {
    const f32 t = limited(x, -127.0, 129.0), n = nearest(t), f = t - n;
    const f32 p = horner(f, 0.6931472420692444f, 0.24022652208805084f, 0.055503103882074356f, 0.009617692790925503f,
                         0.0013406643411144614f, 0.00015594677824992687f);
    return with_limits(times_power(f * p + 1.0f, n), x, -126.0, 0x1.fffffep6);
}
KN_FN f64 exp2(f64 x) {
    const f64 t = limited(x, -1080.0, 1025.0), n = nearest(t), f = t - n;
    const f64 p = horner(f, 0.6931471805599457, 0.24022650695910097, 0.05550410866478989, 0.009618129107606656,
                         0.001333355815352479, 0.00015403530442152264, 1.5252727333419887e-05, 1.3215442321266968e-06,
                         1.0180657997699249e-07, 7.07264116889576e-09, 4.078080894921898e-10);
    return with_limits(times_power(f * p + 1.0, n), x, -1022.0, 0x1.fffffffffffffp9);
}
#endif

/// x = n log 2 + r for a whole n and |r| <= log(2) / 2, with exp(r) = 1 + r + r^2 p, for x within [low, high].
template <class V>
struct ExpParts {
    V n, r, p;
};
KN_FN ExpParts<f32> exp_parts(f32 x) {
    const f32 n = whole(x * 1.44269504088896341f);
    const f32 r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    return {n, r, horner(r, 0.5f, 0.1666666567325592f, 0.04166629537940025f, 0.008333497680723667f,
                         0.0013944758102297783f, 0.00019790243823081255f)};
}
KN_FN ExpParts<f64> exp_parts(f64 x) {
    const f64 n = whole(x * 1.44269504088896340736);
    const f64 r = (x - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
    return {n, r, horner(r, 0.5, 0.16666666666666682, 0.04166666666666609, 0.008333333333316918,
                         0.0013888888889117266, 0.00019841269896681018, 2.4801586924603528e-05, 2.7557234558725907e-06,
                         2.755758279615263e-07, 2.511214451030673e-08, 2.0826536240580786e-09)};
}
#if defined(KN_AVX512)
KN_FN f32 exp_near(f32 x) {
    const f32 t = counted(x * 1.44269504088896341f), n = t - 0x1.8p19f, s = looked_up(t);
    const f32 f = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    return times_power(s * f * horner(f, 1.0f, 0.5000162124633789f, 0.16666074097156525f) + s, n);
}
KN_FN f64 exp_near(f64 x) {
    const f64 t = counted(x * 1.44269504088896340736), n = t - 0x1.8p49, s = looked_up(t);
    const f64 f = (x - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
    const f64 p = horner(f, 1.0, 0.5000000000000301, 0.16666666666660898, 0.041666666569443345, 0.008333333391138453,
                         0.001388978283265952, 0.0001984011295759651);
    return times_power(s * f * p + s, n);
}
#else
KN_FN f32 exp_near(f32 x) {
    const f32 n = whole(x * 1.44269504088896341f), r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    const f32 p = horner(r, 0.4999999403953552f, 0.1666651964187622f, 0.04166839271783829f, 0.008368780836462975f,
                         0.0013814467238262296f);
    return times_power(r * r * p + r + 1.0f, n);
}
KN_FN f64 exp_near(f64 x) {
    const ExpParts<f64> e = exp_parts(x);
    return times_power(e.r * e.r * e.p + e.r + 1.0, e.n);
}
#endif
KN_FN f32 exp(f32 x) { return with_limits(exp_near(limited(x, -104.0, 89.0)), x, -87.3365402f, 88.7228317f); }
KN_FN f64 exp(f64 x) { return with_limits(exp_near(limited(x, -746.0, 710.0)), x, -708.396418532264, 709.782712893384); }
/// exp(x) for x <= 0.
KN_FN f32 exp_below(f32 x) { return with_limits(exp_near(greater(splat<f32>(-104), x)), x, -87.3365402f, 1.0); }
KN_FN f64 exp_below(f64 x) { return with_limits(exp_near(greater(splat<f64>(-746), x)), x, -708.396418532264, 1.0); }

/// exp(x) - 1 = (2^n - 1) + 2^n (r + r^2 p), for x up to high.
template <class V>
KN_FN V expm1_near(V x, double low, double high) {
    const ExpParts<V> e = exp_parts(limited(x, low, high));
    const V s = times_power(splat<V>(1), e.n);
    const V near = s * (e.r * e.r * e.p + e.r) + (s - splat<V>(1));
    return select(eq(x, near), x, near);  // the sign of zero
}
template <class V>
KN_FN V expm1_by(V x, double low, double high) {
    const V near = expm1_near(x, low, high);
    const auto far = lt(splat<V>(high), x);
    return any(far) ? select(far, exp(x), near) : near;
}
KN_FN f32 expm1(f32 x) { return expm1_by(x, -40.0, 80.0); }
KN_FN f64 expm1(f64 x) { return expm1_by(x, -60.0, 700.0); }

// --- logarithms -------------------------------------------------------------------------------------------------------
/// x = 2^e (1 + f) with 1 + f between sqrt(1/2) and sqrt(2), for x > 0, subnormal ones too.
template <class V>
struct LogParts {
    V e, f;
};
KN_FN LogParts<f32> log_parts(f32 x) {
    const i32 tiny = lt(x, splat<f32>(0x1p-126));
    const i32 u = (i32)select(tiny, x * 0x1p24f, x), root = (i32)splat<f32>(0.70710678118654752440);
    const i32 n = (u - root) >> 23;
    return {number(n) - select(tiny, splat<f32>(24), splat<f32>(0)), (f32)(u - (n << 23)) - 1.0f};
}
KN_FN LogParts<f64> log_parts(f64 x) {
    typedef uint64_t u64 __attribute__((vector_size(KN_BYTES)));
    const i64 tiny = lt(x, splat<f64>(0x1p-1022));
    const i64 u = (i64)select(tiny, x * 0x1p54, x), root = (i64)splat<f64>(0.70710678118654752440);
    const i64 n = (i64)((u64)(u - root + (int64_t(1) << 62)) >> 52) - (1 << 10);  // no arithmetic shift before AVX-512
    return {number(n) - select(tiny, splat<f64>(54), splat<f64>(0)), (f64)(u - (n << 52)) - 1.0};
}
/// `value`, the logarithm of a positive number, with what becomes of 0, Inf, NaN and negative numbers.
template <class V>
KN_FN V log_limits(V value, V x) {
    value = select(lt(x, splat<V>(KN_INF)), value, x);
    value = select(eq(x, splat<V>(0)), splat<V>(-KN_INF), value);
    return select(lt(x, splat<V>(0)), splat<V>(KN_NAN), value);
}
/// log(1 + f) - f, for f of log_parts.
KN_FN f32 log_tail(f32 f) {
    const f32 p = horner(f, 0.3333331346511841f, -0.25000008940696716f, 0.2000211924314499f, -0.1666799634695053f,
                         0.14219552278518677f, -0.1240558847784996f, 0.11888162046670914f, -0.11675652116537094f,
                         0.06746642291545868f);
    return f * f * (f * p - 0.5f);
}
/// log(1 + f) - f + f^2 / 2, for f of log_parts.
KN_FN f64 log_tail(f64 f) {
    const f64 s = f / (2.0 + f), z = s * s;
    const f64 r = z * horner(z, 6.666666666666735130e-01, 3.999999999940941908e-01, 2.857142874366239149e-01,
                             2.222219843214978396e-01, 1.818357216161805012e-01, 1.531383769920937332e-01,
                             1.479819860511658591e-01);
    return s * (0.5 * f * f + r);
}
KN_FN f32 log(f32 x) {
    const LogParts<f32> a = log_parts(x);
    return log_limits(a.e * 0.693359375f + (a.f + (log_tail(a.f) + a.e * -2.12194440e-4f)), x);
}
KN_FN f64 log(f64 x) {
    const LogParts<f64> a = log_parts(x);
    const f64 half = 0.5 * a.f * a.f;
    const f64 small = (half - (log_tail(a.f) + a.e * 1.90821492927058770002e-10)) - a.f;
    return log_limits(a.e * 6.93147180369123816490e-01 - small, x);
}
KN_FN f32 log2(f32 x) {
    const LogParts<f32> a = log_parts(x);
    const f32 t = log_tail(a.f), c = splat<f32>(0.44269504088896340736);  // log2(e) - 1
    return log_limits(a.e + (a.f + (t + (a.f * c + t * c))), x);
}
KN_FN f64 log2(f64 x) {  // FreeBSD's: the leading part of log(1 + f) cut to 32 bits, its product with log2(e) exact
    const LogParts<f64> a = log_parts(x);
    const f64 half = 0.5 * a.f * a.f, whole_part = a.f - half;
    const f64 hi = (f64)((i64)whole_part & int64_t(0xffffffff00000000));
    const f64 lo = (a.f - hi) - half + log_tail(a.f);
    const f64 main = hi * 1.44269504072144627571e+00;
    const f64 rest = (lo + hi) * 1.67517131648865118353e-10 + lo * 1.44269504072144627571e+00;
    const f64 sum = a.e + main;
    return log_limits(sum + (rest + ((a.e - sum) + main)), x);
}
/// log(1 + x), with the rounding error of 1 + x made good.
template <class V>
KN_FN V log1p_by(V x) {
    const V one = splat<V>(1), u = one + x;
    const V lost = (x - (u - one)) / u;
    const V sum = log(u);
    return select(le(abs(sum), splat<V>(1e30)), select(eq(u, one), x, sum + lost), sum);
}
KN_FN f32 log1p(f32 x) { return log1p_by(x); }
KN_FN f64 log1p(f64 x) { return log1p_by(x); }

// --- hyperbolic tangent -----------------------------------------------------------------------------------------------
/// With t = exp(2|x|) - 1: t / (t + 2) near 0, and 1 - 2 / (t + 2) elsewhere.
template <class V>
KN_FN V tanh_by(V x, double high) {
    const V t = expm1_near(splat<V>(2) * abs(x), 0.0, high), one = splat<V>(1);
    const V d = t + splat<V>(2), two = splat<V>(2);
    const auto far = lt(one, t);
    const V q = select(far, two, t) / d;
    return copysign(select(far, one - q, q), x);
}
KN_FN f32 tanh(f32 x) { return tanh_by(x, 40.0); }
KN_FN f64 tanh(f64 x) { return tanh_by(x, 60.0); }

}  // namespace kn
