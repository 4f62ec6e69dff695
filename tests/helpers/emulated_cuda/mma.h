// What cuda/mma.cuh has in PTX for warps, in C++. Copies in the background are done at once.
#pragma once

namespace kn {

KN_FN unsigned shared_address(const void* p) {
    return static_cast<unsigned>(static_cast<const unsigned char*>(p) - emulated_shared);
}

KN_FN unsigned block_number() { return blockIdx.x; }

KN_FN void load_matrices(unsigned (&to)[4], unsigned address) {
    struct Row {
        unsigned pairs[4];
    } mine;
    memcpy(&mine, emulated_shared + address, sizeof mine);
    const Row* const all = emulated::gather(mine);
    const int lane = threadIdx.x % 32;
    for (int k = 0; k < 4; ++k) to[k] = all[8 * k + lane / 4].pairs[lane % 4];
}

struct Operands {
    unsigned a[4], b[2];
};

KN_FN double emulated_half(unsigned bits) {
    _Float16 h;
    const unsigned short low = static_cast<unsigned short>(bits);
    memcpy(&h, &low, 2);
    return static_cast<float>(h);
}

KN_FN void multiply(float* d, const unsigned (&a)[4], unsigned b0, unsigned b1) {
    const Operands* const all = emulated::gather(Operands{{a[0], a[1], a[2], a[3]}, {b0, b1}});
    const int lane = threadIdx.x % 32;
    for (int q = 0; q < 4; ++q) {  // rows lane / 4 and + 8, columns 2 (lane % 4) and + 1
        double sum = d[q];
        for (int k = 0; k < 16; ++k) {
            const int holder = k % 8 / 2, shift = k % 2 * 16;
            sum += emulated_half(all[lane / 4 * 4 + holder].a[k / 8 * 2 + q / 2] >> shift) *
                   emulated_half(all[(lane % 4 * 2 + q % 2) * 4 + holder].b[k / 8] >> shift);
        }
        d[q] = static_cast<float>(sum);
    }
}

KN_FN void multiply_new(float* d, const unsigned (&a)[4], unsigned b0, unsigned b1) {
    for (int q = 0; q < 4; ++q) d[q] = 0;
    multiply(d, a, b0, b1);
}

KN_FN void copy16(unsigned to, const void* from) {
    struct alignas(16) Sixteen {
        unsigned word[4];
    };
    *reinterpret_cast<Sixteen*>(emulated_shared + to) = *static_cast<const Sixteen*>(from);
}
KN_FN void end_copies() {}
template <int LEFT>
KN_FN void await_copies() {}

}  // namespace kn
