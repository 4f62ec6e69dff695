// CUDA's words for kernels that run on the processor, each thread of a block as a fiber (runtime.cpp).
//
// What a kernel reads and writes is checked: see `Call`.
#pragma once

#include <math.h>
#include <string.h>

#define __device__
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __shared__ static
#define alignas(n) __attribute__((aligned(n)))  // C++'s own may not follow `static`

namespace emulated {

typedef unsigned long long Bits;
enum Operation { SYNC, SHUFFLE, SHUFFLE_XOR, SHUFFLE_UP, SHUFFLE_DOWN, BALLOT, MATCH, GATHER };

/// Memory that a kernel may touch.
struct Range {
    const char* begin;
    const char* end;
};

/// A launch. Beside the ranges, a kernel may touch its variables, the shared ones included, and nothing else.
struct Call {
    const char* arguments;
    long long size, blocks, threads;
    const Range* ranges;
    long long n_ranges;
    unsigned long long seed;  // of the order in which blocks, warps and lanes run
};

/// @return null, or what went wrong
const char* launch(const Call& call, void* arguments, long long size, void (*kernel)());

void block_barrier();
/// Waits for the lanes of the warp, all of which must call it with the same operation.
/// @return what lane `from` gave
Bits exchange(unsigned mask, Operation operation, Bits given, int from);
unsigned ballot(unsigned mask, bool given);
unsigned match(unsigned mask, int given);
/// @return what the lanes of the warp gave, `size` bytes each, one after the other; good until the operation after the next
const void* gather_bytes(const void* given, int size);

template <class T>
inline T shuffle(unsigned mask, Operation operation, T given, int from) {
    static_assert(sizeof(T) <= sizeof(Bits), "8 bytes at most");
    Bits bits = 0;
    memcpy(&bits, &given, sizeof given);
    bits = exchange(mask, operation, bits, from);
    memcpy(&given, &bits, sizeof given);
    return given;
}
template <class T>
inline const T* gather(const T& given) {
    return static_cast<const T*>(gather_bytes(&given, sizeof given));
}

}  // namespace emulated

struct uint3 {
    unsigned x, y, z;
};
extern uint3 threadIdx, blockIdx, blockDim, gridDim;

struct __attribute__((aligned(8))) int2 {
    int x, y;
};
static inline int2 make_int2(int x, int y) { return {x, y}; }

static inline void __syncthreads() { emulated::block_barrier(); }
static inline void __threadfence() {}
static inline void __syncwarp() { emulated::exchange(0xffffffffu, emulated::SYNC, 0, 0); }
template <class T>
static inline T __shfl_sync(unsigned mask, T value, int from) {
    return emulated::shuffle(mask, emulated::SHUFFLE, value, from & 31);
}
template <class T>
static inline T __shfl_xor_sync(unsigned mask, T value, int offset) {
    return emulated::shuffle(mask, emulated::SHUFFLE_XOR, value, (threadIdx.x % 32) ^ offset);
}
template <class T>
static inline T __shfl_up_sync(unsigned mask, T value, int offset) {
    const int lane = threadIdx.x % 32;
    return emulated::shuffle(mask, emulated::SHUFFLE_UP, value, lane < offset ? lane : lane - offset);
}
template <class T>
static inline T __shfl_down_sync(unsigned mask, T value, int offset) {
    const int lane = threadIdx.x % 32;
    return emulated::shuffle(mask, emulated::SHUFFLE_DOWN, value, lane + offset > 31 ? lane : lane + offset);
}
static inline bool __any_sync(unsigned mask, bool value) { return emulated::ballot(mask, value) != 0; }
static inline unsigned __ballot_sync(unsigned mask, bool value) { return emulated::ballot(mask, value); }
static inline unsigned __match_any_sync(unsigned mask, int value) { return emulated::match(mask, value); }
/// Shared memory of a size that the launch says: more than any needs.
static __attribute__((aligned(16))) unsigned char emulated_shared[128 << 10];

template <class T>
static inline T atomicAdd(T* to, T value) {
    const T before = *to;
    *to += value;
    return before;
}

template <class To, class From>
static inline To emulated_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "the same bits");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
static inline double __longlong_as_double(long long bits) { return emulated_bits<double>(bits); }
static inline long long __double_as_longlong(double number) { return emulated_bits<long long>(number); }
static inline float __uint_as_float(unsigned bits) { return emulated_bits<float>(bits); }
static inline unsigned __float_as_uint(float number) { return emulated_bits<unsigned>(number); }
static inline unsigned __umulhi(unsigned a, unsigned b) {
    return static_cast<unsigned>(static_cast<emulated::Bits>(a) * b >> 32);
}
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
static inline int __popc(unsigned a) { return __builtin_popcount(a); }
static inline int __ffs(unsigned a) { return __builtin_ffs(static_cast<int>(a)); }
static inline float __int_as_float(int bits) { return emulated_bits<float>(bits); }
static inline int __float_as_int(float number) { return emulated_bits<int>(number); }
/// An instruction of the unit of special functions, by its name.
static inline float emulated_unit(const char* instruction, float a) {
    switch (instruction[0]) {
        case 'e': return exp2f(a);
        case 'l': return log2f(a);
        case 's': return sqrtf(a);
    }
    return instruction[1] == 'c' ? 1 / a : 1 / sqrtf(a);  // rcp, rsqrt
}
static inline float __fsqrt_rn(float a) { return sqrtf(a); }
static inline int __ffsll(unsigned long long a) { return __builtin_ffsll(static_cast<long long>(a)); }
static inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
template <class T>
static inline T atomicMax(T* to, T value) {
    const T before = *to;
    if (value > before) *to = value;
    return before;
}
static inline bool __all_sync(unsigned mask, bool value) { return emulated::ballot(mask, value) == mask; }
static inline unsigned __reduce_max_sync(unsigned, unsigned value) {
    const unsigned* const all = emulated::gather(value);
    unsigned most = 0;
    for (int k = 0; k < 32; ++k) most = max(most, all[k]);
    return most;
}
static inline double __dadd_rn(double a, double b) { return a + b; }
static inline double __dsub_rn(double a, double b) { return a - b; }
static inline double __dmul_rn(double a, double b) { return a * b; }
static inline double __ddiv_rn(double a, double b) { return a / b; }
#define rsqrtf emulated_rsqrtf  // some C libraries have it too
#define rsqrt emulated_rsqrt
static inline float rsqrtf(float a) { return 1 / sqrtf(a); }
static inline double rsqrt(double a) { return 1 / sqrt(a); }
