// SIMD vectors of the host, with the compilers' vector extensions: nothing here depends on an instruction set beyond
// speed. `f32` and `f64` fill one register; comparisons give masks, vectors of integers of the same width that are 0 or -1.
// Every function exists for the scalar types too, for row and column terms are computed one number at a time.
#pragma once

#include <stdint.h>
#include <string.h>

#define KN_FN inline __attribute__((always_inline))
#define KN_SLOW __attribute__((noinline))
#define KN_INF __builtin_inf()
#define KN_NAN __builtin_nan("")

// KN_UNROLL(n) before a loop. GCC does not take a template's parameter there: the generated source replaces KN_UNROLL(C).
#define KN_TEXT(...) #__VA_ARGS__
#if defined(__clang__)
#define KN_UNROLL(n) _Pragma(KN_TEXT(clang loop unroll_count(n)))
#else
#define KN_UNROLL(n) _Pragma(KN_TEXT(GCC unroll n))
#endif

#if defined(__AVX512F__) && defined(__AVX512DQ__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define KN_AVX512 1
#define KN_BYTES 64
#elif defined(__AVX2__)
#define KN_BYTES 32
#else
#define KN_BYTES 16
#endif
#if defined(__FMA__) || defined(__aarch64__)
#define KN_FMA 1
#endif

namespace kn {

typedef float f32 __attribute__((vector_size(KN_BYTES)));
typedef double f64 __attribute__((vector_size(KN_BYTES)));
typedef int32_t i32 __attribute__((vector_size(KN_BYTES)));
typedef int64_t i64 __attribute__((vector_size(KN_BYTES)));

/// From a number type to its vector, and to the integers of its width.
template <class T>
struct Simd;
template <>
struct Simd<float> {
    typedef f32 V;
    typedef int32_t Int;
};
template <>
struct Simd<double> {
    typedef f64 V;
    typedef int64_t Int;
};
template <>
struct Simd<int32_t> {
    typedef i32 V;
    typedef int32_t Int;
};
template <>
struct Simd<int64_t> {
    typedef i64 V;
    typedef int64_t Int;
};
template <class T>
using Vec = typename Simd<T>::V;
template <class T>
constexpr int LANES = KN_BYTES / sizeof(T);

/// The mask type of a vector type. (Vector types are no templates: these tables stand for what could be deduced.)
template <class V>
struct MaskOf;
template <>
struct MaskOf<f32> {
    typedef i32 M;
};
template <>
struct MaskOf<f64> {
    typedef i64 M;
};
template <>
struct MaskOf<i32> {
    typedef i32 M;
};
template <>
struct MaskOf<i64> {
    typedef i64 M;
};

// --- making and moving ------------------------------------------------------------------------------------------------
/// `splat<V>(x)`: the number x in every lane.
template <class V>
struct Splat {
    KN_FN static V of(double x) { return V(x); }
};
template <>
struct Splat<f32> {
    KN_FN static f32 of(double x) { return float(x) - f32{}; }
};
template <>
struct Splat<f64> {
    KN_FN static f64 of(double x) { return x - f64{}; }
};
template <>
struct Splat<i32> {
    KN_FN static i32 of(double x) { return int32_t(x) - i32{}; }
};
template <>
struct Splat<i64> {
    KN_FN static i64 of(double x) { return int64_t(x) - i64{}; }
};
template <class V>
KN_FN V splat(double x) {
    return Splat<V>::of(x);
}

/// `x` in every lane, without a change of type.
template <class T>
KN_FN Vec<T> fill(T x) {
    return x - Vec<T>{};  // minus, for -0 + 0 is 0
}
/// The number at `p` in every lane. Of the instructions for it, those for integers leave the arithmetic units free.
#if defined(KN_AVX512)
KN_FN f32 fill_from(const float* p) {
    f32 v;
    asm("vpbroadcastd %1, %0" : "=v"(v) : "m"(*p));
    return v;
}
KN_FN f64 fill_from(const double* p) {
    f64 v;
    asm("vpbroadcastq %1, %0" : "=v"(v) : "m"(*p));
    return v;
}
#else
template <class T>
KN_FN Vec<T> fill_from(const T* p) {
    return fill(*p);
}
#endif
template <class T>
KN_FN Vec<T> load(const T* p) {
    Vec<T> v;
    memcpy(&v, p, sizeof v);
    return v;
}
template <class T>
KN_FN void store(T* p, Vec<T> v) {
    memcpy(p, &v, sizeof v);
}
/// start, start + 1, ...
template <class T>
KN_FN Vec<T> iota(T start) {
    Vec<T> v;
    for (int k = 0; k < LANES<T>; ++k) v[k] = start + T(k);
    return v;
}

/// @return index limited to 0 .. n - 1.
KN_FN int within(int index, int n) { return index < 0 ? 0 : index < n ? index : n - 1; }

// --- comparisons and choices ------------------------------------------------------------------------------------------
#define KN_COMPARISONS(V, M, MASK)                                    \
    KN_FN M lt(V a, V b) { return (M)(a < b); }                       \
    KN_FN M le(V a, V b) { return (M)(a <= b); }                      \
    KN_FN M eq(V a, V b) { return (M)(a == b); }                      \
    KN_FN M is_nan(V a) { return (M)(a != a); }                       \
    KN_FN V select(MASK mask, V a, V b) { return mask ? a : b; }
KN_COMPARISONS(float, bool, bool)
KN_COMPARISONS(double, bool, bool)
KN_COMPARISONS(int32_t, bool, bool)
KN_COMPARISONS(int64_t, bool, bool)
KN_COMPARISONS(f32, i32, i32)
KN_COMPARISONS(f64, i64, i64)
KN_COMPARISONS(i32, i32, i32)
KN_COMPARISONS(i64, i64, i64)
#undef KN_COMPARISONS

KN_FN bool or_(bool a, bool b) { return a || b; }
KN_FN i32 or_(i32 a, i32 b) { return a | b; }
KN_FN i64 or_(i64 a, i64 b) { return a | b; }
KN_FN bool and_(bool a, bool b) { return a && b; }
KN_FN i32 and_(i32 a, i32 b) { return a & b; }
KN_FN i64 and_(i64 a, i64 b) { return a & b; }

/// Bit k of the result says whether lane k of the mask is set.
#if defined(KN_AVX512)
KN_FN unsigned bits(i32 m) { return (uint16_t)__builtin_ia32_cvtd2mask512(m); }
KN_FN unsigned bits(i64 m) {
    typedef long long wide __attribute__((vector_size(64)));
    return (uint8_t)__builtin_ia32_cvtq2mask512((wide)m);
}
#elif KN_BYTES == 32
KN_FN unsigned bits(i32 m) { return __builtin_ia32_movmskps256((f32)m); }
KN_FN unsigned bits(i64 m) { return __builtin_ia32_movmskpd256((f64)m); }
#elif defined(__SSE2__)
KN_FN unsigned bits(i32 m) { return __builtin_ia32_movmskps((f32)m); }
KN_FN unsigned bits(i64 m) { return __builtin_ia32_movmskpd((f64)m); }
#else
template <class M>
KN_FN unsigned bits(M m) {
    unsigned r = 0;
    for (unsigned k = 0; k < sizeof m / sizeof m[0]; ++k) r |= unsigned(m[k] & 1) << k;
    return r;
}
#endif
template <class M>
KN_FN bool any(M m) {
    return bits(m) != 0;
}
/// bits(le(a, b)). GCC would turn its comparison into a vector and back.
#if defined(KN_AVX512) && !defined(__clang__)
KN_FN unsigned bits_le(f32 a, f32 b) { return (uint16_t)__builtin_ia32_cmpps512_mask(a, b, 18, -1, 4); }
KN_FN unsigned bits_le(f64 a, f64 b) { return (uint8_t)__builtin_ia32_cmppd512_mask(a, b, 18, -1, 4); }
#else
template <class V>
KN_FN unsigned bits_le(V a, V b) {
    return bits(le(a, b));
}
#endif

#if defined(__clang__)
template <class T, class M>
KN_FN Vec<T> shuffled(Vec<T> v, M lane) {
    Vec<T> r;
    for (int k = 0; k < LANES<T>; ++k) r[k] = v[lane[k]];
    return r;
}
#else
template <class T, class M>
KN_FN Vec<T> shuffled(Vec<T> v, M lane) {
    return __builtin_shuffle(v, lane);
}
#endif
/// The vector whose lane k is lane k + by (cyclically) of v, and the one whose lane k is lane k ^ by.
template <class T>
KN_FN Vec<T> rotated(Vec<T> v, int by) {
    typedef typename Simd<T>::Int Int;
    return shuffled<T>(v, (iota<Int>(Int(by)) & Int(LANES<T> - 1)));
}
template <class T>
KN_FN Vec<T> exchanged(Vec<T> v, int by) {
    typedef typename Simd<T>::Int Int;
    return shuffled<T>(v, (iota<Int>(0) ^ Int(by)));
}

// --- minimum and maximum ----------------------------------------------------------------------------------------------
/// `lesser(a, b)` is the smaller of a and b, `greater(a, b)` the larger; b where one is NaN.
#if defined(__GNUC__) && !defined(__clang__) && KN_BYTES >= 32  // GCC makes two instructions of it
#define KN_EXTREMUM(name, V, mnemonic, choice)                                \
    KN_FN V name(V a, V b) {                                                  \
        V r;                                                                  \
        asm(mnemonic " %2, %1, %0" : "=v"(r) : "v"(a), "vm"(b));              \
        return r;                                                             \
    }
#else
#define KN_EXTREMUM(name, V, mnemonic, choice) \
    KN_FN V name(V a, V b) { return choice ? a : b; }
#endif
KN_EXTREMUM(lesser, f32, "vminps", a < b)
KN_EXTREMUM(lesser, f64, "vminpd", a < b)
KN_EXTREMUM(greater, f32, "vmaxps", a > b)
KN_EXTREMUM(greater, f64, "vmaxpd", a > b)
#undef KN_EXTREMUM
/// As `lesser` and `greater`, but NaN where one is NaN.
template <class V>
KN_FN V min_(V a, V b) {
    return select(or_(lt(a, b), is_nan(a)), a, b);
}
template <class V>
KN_FN V max_(V a, V b) {
    return select(or_(lt(b, a), is_nan(a)), a, b);
}

// --- bits of floating-point numbers -----------------------------------------------------------------------------------
KN_FN float abs(float a) { return __builtin_fabsf(a); }
KN_FN double abs(double a) { return __builtin_fabs(a); }
KN_FN f32 abs(f32 a) { return (f32)((i32)a & 0x7fffffff); }
KN_FN f64 abs(f64 a) { return (f64)((i64)a & 0x7fffffffffffffff); }
KN_FN float copysign(float a, float b) { return __builtin_copysignf(a, b); }
KN_FN double copysign(double a, double b) { return __builtin_copysign(a, b); }
KN_FN f32 copysign(f32 a, f32 b) { return (f32)(((i32)a & 0x7fffffff) | ((i32)b & ~0x7fffffff)); }
KN_FN f64 copysign(f64 a, f64 b) { return (f64)(((i64)a & 0x7fffffffffffffff) | ((i64)b & ~0x7fffffffffffffff)); }

}  // namespace kn
