// Numbers as they lie in memory, and the vectors that they are computed with: float16 and bfloat16 are widened to float
// when they are read and rounded to the nearest (to the even one of two) when they are written. The integer arithmetic for
// float16 runs on any CPU; where there is an instruction, reading uses it.
#pragma once

#include "vec.h"

namespace kn {

struct Float16 {
    uint16_t bits;
};
struct BFloat16 {
    uint16_t bits;
};

/// The number type that a format is computed in.
template <class T>
struct RealOf {
    typedef T R;
};
template <>
struct RealOf<Float16> {
    typedef float R;
};
template <>
struct RealOf<BFloat16> {
    typedef float R;
};
template <class T>
using Real = typename RealOf<T>::R;

/// N numbers, and unsigned integers of the same width; plain ones for N = 1.
template <class R, int N>
struct Wide {
    typedef R V __attribute__((vector_size(N * sizeof(R))));
    typedef uint32_t U __attribute__((vector_size(N * sizeof(uint32_t))));
    typedef uint16_t H __attribute__((vector_size(N * sizeof(uint16_t))));
};
template <class R>
struct Wide<R, 1> {
    typedef R V;
    typedef uint32_t U;
    typedef uint16_t H;
};
template <class To, class From>
KN_FN To same_bits(const From& from) {
    static_assert(sizeof(To) == sizeof(From), "one type must be as large as the other");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
/// x in every one of N lanes.
template <int N, class R>
KN_FN typename Wide<R, N>::V all_lanes(R x) {
    return x - typename Wide<R, N>::V{};  // minus, for -0 + 0 is 0
}

// --- the bits of halves -----------------------------------------------------------------------------------------------
/// Bits of a format, in 32-bit integers (U, one or a vector), to a float (F) and back.
template <class T>
struct Halves;
template <>
struct Halves<BFloat16> {
    template <class F, class U>
    KN_FN static F widened(U bits) {
        return same_bits<F>(bits << 16);
    }
    template <class U, class F>
    KN_FN static U rounded(F x) {
        const U bits = same_bits<U>(x);
        const U nearest = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
        return (bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16 | 0x40u) : nearest;  // NaN stays NaN
    }
};
template <>
struct Halves<Float16> {
    template <class F, class U>
    KN_FN static F widened(U bits) {
        const U low = (bits & 0x7fffu) << 13;
        const U normal = low + (112u << 23), special = low + (224u << 23);  // from a bias of 15 to one of 127
        const U tiny = same_bits<U>(same_bits<F>(U(low + (113u << 23))) - 0x1p-14f);
        const U some = low < (1u << 23) ? tiny : normal;
        return same_bits<F>(U((low >= (31u << 23) ? special : some) | (bits & 0x8000u) << 16));
    }
    template <class U, class F>
    KN_FN static U rounded(F x) {
        const U bits = same_bits<U>(x), low = bits & 0x7fffffffu;
        const U normal = (low - (112u << 23) + 0xfffu + (low >> 13 & 1u)) >> 13;  // one that overflows becomes infinite
        const U tiny = same_bits<U>(same_bits<F>(low) + 0.5f) - (126u << 23);  // the sum's last place is 2^-24
        const U some = low < (113u << 23) ? tiny : normal;
        const U large = low > (255u << 23) ? ((low >> 13 & 0x3ffu) | 0x7e00u) : (low & 0u) + 0x7c00u;
        return (low >= (143u << 23) ? large : some) | (bits >> 16 & 0x8000u);
    }
};

// --- reading and writing N numbers ------------------------------------------------------------------------------------
/// `read<N>(p)`: the N numbers from p on. `write<N>(p, v)` puts N numbers there. No address need be aligned.
template <class T, int N>
struct Access {
    typedef typename Wide<T, N>::V V;
    KN_FN static V read(const T* p) {
        V v;
        memcpy(&v, p, sizeof v);
        return v;
    }
    KN_FN static void write(T* p, const V& v) { memcpy(p, &v, sizeof v); }
};
template <class T, int N>
struct HalfAccess {
    typedef typename Wide<float, N>::V V;
    typedef typename Wide<float, N>::U U;
    typedef typename Wide<float, N>::H H;
    KN_FN static V read(const T* p) {
        if constexpr (N < 4) {
            float v[N];
            for (int k = 0; k < N; ++k) v[k] = Halves<T>::template widened<float>(uint32_t(p[k].bits));
            return same_bits<V>(v);
        } else {
            H half;
            memcpy(&half, p, sizeof half);
            return Halves<T>::template widened<V>(__builtin_convertvector(half, U));
        }
    }
    KN_FN static void write(T* p, const V& v) {
        if constexpr (N < 4) {
            float x[N];
            memcpy(x, &v, sizeof x);
            for (int k = 0; k < N; ++k) p[k].bits = uint16_t(Halves<T>::template rounded<uint32_t>(x[k]));
        } else {
            const H half = __builtin_convertvector(Halves<T>::template rounded<U>(v), H);
            memcpy(p, &half, sizeof half);
        }
    }
};
template <int N>
struct Access<BFloat16, N> : HalfAccess<BFloat16, N> {};
template <int N>
struct Access<Float16, N> : HalfAccess<Float16, N> {
#if defined(__F16C__)
    typedef typename Wide<float, N>::V V;
    struct Bytes {
        char byte[2 * N];
    };
    KN_FN static V read(const Float16* p) {
        if constexpr (N >= 4 && N * sizeof(float) <= KN_BYTES) {
            V v;
            asm("vcvtph2ps %1, %0" : "=v"(v) : "m"(*reinterpret_cast<const Bytes*>(p)));
            return v;
        } else {
            return HalfAccess<Float16, N>::read(p);
        }
    }
#endif
};

/// Formats as calls name them.
enum Format { FLOAT16, BFLOAT16, FLOAT32, FLOAT64 };
/// f(p) with p as a pointer to numbers of a format.
template <class F>
KN_FN void with_format(int64_t format, void* p, const F& f) {
    if (format == FLOAT16) f(static_cast<Float16*>(p));
    if (format == BFLOAT16) f(static_cast<BFloat16*>(p));
    if (format == FLOAT32) f(static_cast<float*>(p));
    if (format == FLOAT64) f(static_cast<double*>(p));
}

template <int N, class T>
KN_FN typename Wide<Real<T>, N>::V read(const T* p) {
    return Access<T, N>::read(p);
}
template <int N, class T, class V>
KN_FN void write(T* p, const V& v) {
    Access<T, N>::write(p, v);
}
template <class T>
KN_FN Real<T> read_one(const T* p) {
    return Access<T, 1>::read(p);
}
template <class T>
KN_FN void write_one(T* p, Real<T> x) {
    Access<T, 1>::write(p, x);
}

}  // namespace kn
