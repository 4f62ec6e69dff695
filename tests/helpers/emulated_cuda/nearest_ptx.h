// What cuda/nearest_ptx.cuh has in PTX, in C++. Copies in the background are done at once, so that a missing wait goes
// unnoticed; what a wait too many would hide does not exist.
#pragma once

// The compiler makes no known variable of one with a larger alignment.
#define KN_DYNAMIC_SHARED(name, SIZE) static unsigned char name[SIZE] __attribute__((aligned(16)))

namespace kn {

struct alignas(16) Sixteen {
    unsigned word[4];
};

KN_FN unsigned short half_of(float x) {
    const _Float16 h = x;
    unsigned short bits;
    memcpy(&bits, &h, 2);
    return bits;
}
KN_FN float of_half(unsigned short bits) {
    _Float16 h;
    memcpy(&h, &bits, 2);
    return h;
}

KN_FN void load_matrices(unsigned (&to)[4], const void* row) {
    struct Row {
        unsigned pairs[4];
    } mine;
    memcpy(&mine, row, sizeof mine);
    const Row* const all = emulated::gather(mine);
    const int lane = threadIdx.x % 32;
    for (int k = 0; k < 4; ++k) to[k] = all[8 * k + lane / 4].pairs[lane % 4];
}

KN_FN void multiply_add(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    struct Operands {
        unsigned a[4], b[2];
    };
    const Operands* const all = emulated::gather(Operands{{a[0], a[1], a[2], a[3]}, {b0, b1}});
    const int lane = threadIdx.x % 32;
    for (int k = 0; k < 16; ++k) {
        // Coordinate k of rows lane / 4 and + 8 and of columns 2 (lane % 4) and + 1.
        const int holder = k % 8 / 2, shift = k % 2 * 16;
        for (int r = 0; r < 2; ++r) {
            const float x = of_half(all[lane / 4 * 4 + holder].a[k / 8 * 2 + r] >> shift);
            for (int c = 0; c < 2; ++c) {
                const float y = of_half(all[(lane % 4 * 2 + c) * 4 + holder].b[k / 8] >> shift);
                sum[2 * r + c] += x * y;
            }
        }
    }
}

KN_FN void copy_begin(void* to, const void* from) { *static_cast<Sixteen*>(to) = *static_cast<const Sixteen*>(from); }
KN_FN void copy_group() {}
template <int N>
KN_FN void copy_wait() {}

}  // namespace kn
