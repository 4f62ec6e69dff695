// Rows of C numbers of type T, read and written by a group of neighbouring threads, computed with in type A.
//
// A configuration G says how a group shares a row:
//   T       type of the numbers in memory: float, double, kn::Half or kn::Bfloat
//   VEC     numbers that a thread moves at once, at most 16 bytes; C is a multiple of it
//   LANES   threads of a group, a power of two up to 32
//   CHUNKS  pieces of VEC numbers that each thread has of a row: a block covers LANES * CHUNKS * VEC channels, a slab
#pragma once

#include "numbers.cuh"

namespace kn {

/// Numbers moved by one instruction.
template <class T, int VEC>
struct alignas(VEC * sizeof(T)) Packet {
    static_assert((VEC & (VEC - 1)) == 0 && VEC * sizeof(T) <= 16, "a packet is a power of two of numbers, 16 bytes at most");
    T v[VEC];
};

/// Where this thread's shares of the rows of a matrix lie.
template <class G>
struct RowReader {
    const char* first[G::CHUNKS];  // of row 0
    int stride;                    // bytes from row to row

    KN_FN RowReader(const void* matrix, int slab, int channels) : stride(channels * static_cast<int>(sizeof(typename G::T))) {
        KN_UNROLL_ALL
        for (int k = 0; k < G::CHUNKS; ++k) {
            const int c = slab + (k * G::LANES + static_cast<int>(threadIdx.x) % G::LANES) * G::VEC;
            first[k] = static_cast<const char*>(matrix) + (c < channels ? c : channels - G::VEC) * static_cast<int>(sizeof(typename G::T));
        }
    }
};

/// This thread's share of a row, to compute with.
template <class G>
struct Share {
    typedef typename G::T T;
    typedef typename Wide<T>::type A;
    A v[G::CHUNKS][G::VEC];

    /// @return number of the first channel of this thread's chunk k, in the slab that begins at channel `slab`
    KN_FN static int channel(int slab, int k) {
        return slab + (k * G::LANES + static_cast<int>(threadIdx.x) % G::LANES) * G::VEC;
    }
    KN_FN void zero() {
        KN_UNROLL_ALL
        for (int k = 0; k < G::CHUNKS; ++k)
            KN_UNROLL_ALL
            for (int i = 0; i < G::VEC; ++i) v[k][i] = A(0);
    }
    template <class U>
    KN_FN void read(const U* row, int slab, int channels) {
        constexpr int P = piece<U>();
        KN_UNROLL_ALL
        for (int k = 0; k < G::CHUNKS; ++k) {
            const int c = channel(slab, k);
            KN_UNROLL_ALL
            for (int i = 0; i < G::VEC; i += P) {
                Packet<U, P> p = {};
                if (c < channels) p = *reinterpret_cast<const Packet<U, P>*>(row + c + i);
                KN_UNROLL_ALL
                for (int j = 0; j < P; ++j) v[k][i + j] = widen(p.v[j]);
            }
        }
    }
    template <class U>
    KN_FN void write(U* row, int slab, int channels) const {
        constexpr int P = piece<U>();
        KN_UNROLL_ALL
        for (int k = 0; k < G::CHUNKS; ++k) {
            const int c = channel(slab, k);
            if (c >= channels) continue;
            KN_UNROLL_ALL
            for (int i = 0; i < G::VEC; i += P) {
                Packet<U, P> p;
                KN_UNROLL_ALL
                for (int j = 0; j < P; ++j) narrow(v[k][i + j], p.v[j]);
                *reinterpret_cast<Packet<U, P>*>(row + c + i) = p;
            }
        }
    }
    /// Reads without asking whether a channel exists: threads that have none read the last ones, and never write.
    KN_FN void read(const RowReader<G>& rows, int row) {
        KN_UNROLL_ALL
        for (int k = 0; k < G::CHUNKS; ++k) {
            const auto p = *reinterpret_cast<const Packet<T, G::VEC>*>(rows.first[k] + static_cast<long long>(row) * rows.stride);
            KN_UNROLL_ALL
            for (int i = 0; i < G::VEC; ++i) v[k][i] = widen(p.v[i]);
        }
    }
    /// @return numbers of type U that one instruction moves
    template <class U>
    KN_FN static constexpr int piece() {
        return G::VEC * sizeof(U) > 16 ? 16 / sizeof(U) : G::VEC;
    }
    KN_FN void add(const Share& other) {
        KN_UNROLL_ALL
        for (int k = 0; k < G::CHUNKS; ++k)
            KN_UNROLL_ALL
            for (int i = 0; i < G::VEC; ++i) v[k][i] += other.v[k][i];
    }
    KN_FN void add(A weight, const Share& other) {
        KN_UNROLL_ALL
        for (int k = 0; k < G::CHUNKS; ++k)
            KN_UNROLL_ALL
            for (int i = 0; i < G::VEC; ++i) v[k][i] += weight * other.v[k][i];
    }
    /// Adds up what the groups of a warp have of the same row; each has the sum after it.
    KN_FN void add_groups() {
        KN_UNROLL_ALL
        for (int offset = G::LANES; offset < 32; offset *= 2)
            KN_UNROLL_ALL
            for (int k = 0; k < G::CHUNKS; ++k)
                KN_UNROLL_ALL
                for (int i = 0; i < G::VEC; ++i) v[k][i] += __shfl_xor_sync(0xffffffffu, v[k][i], offset);
    }
    /// This thread's part of the dot product with another row.
    KN_FN A dot(const Share& other, int slab, int channels) const {
        A sum = A(0);
        KN_UNROLL_ALL
        for (int k = 0; k < G::CHUNKS; ++k) {
            A part = A(0);
            KN_UNROLL_ALL
            for (int i = 0; i < G::VEC; ++i) part += v[k][i] * other.v[k][i];
            if (channel(slab, k) < channels) sum += part;
        }
        return sum;
    }
};

/// Division of numbers below 2^31 by one that the host prepared: floor(n / d) = (n * multiplier >> 32) >> shift.
struct Divider {
    int divisor, multiplier, shift, pad;
    KN_FN int of(int n) const {
        if (divisor == 1) return n;
        return static_cast<int>(__umulhi(static_cast<unsigned>(n), static_cast<unsigned>(multiplier)) >> shift);
    }
};

/// The weights of points: depth, or exp(depth - lse of its pixel), times another tensor.
/// 8-byte fields only: kernops/geometric/kernels/cuda.py packs them.
struct Scale {
    const void* depth;   // (B N, D, h w)
    const void* weight;  // like depth, or null
    const void* lse;     // a number of the wide type for each pixel, or null
    Divider frustum;     // by D h w: points of a camera
    Divider image;       // by h w: pixels of a camera

    /// @return number of the pixel of a point
    KN_FN int pixel(int point) const {
        const int camera = frustum.of(point), rest = point - camera * frustum.divisor;
        return camera * image.divisor + rest - image.of(rest) * image.divisor;
    }
    /// @return weight of a point of a pixel, given its depth. G::SOFTMAX and G::WEIGHTED say what there is.
    template <class G>
    KN_FN typename Wide<typename G::T>::type of(long long point, int pixel, typename G::T depth_of_point) const {
        typedef typename G::T T;
        typedef typename Wide<T>::type A;
        A w = widen(depth_of_point);
        if (G::SOFTMAX) w = exp(w - static_cast<const A*>(lse)[pixel]);
        if (G::WEIGHTED) w *= widen(static_cast<const T*>(weight)[point]);
        return w;
    }
    template <class G>
    KN_FN typename Wide<typename G::T>::type of(long long point, int pixel) const {
        return of<G>(point, pixel, static_cast<const typename G::T*>(depth)[point]);
    }
};

}  // namespace kn
