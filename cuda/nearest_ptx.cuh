// What the search of nearest points in many dimensions needs of PTX: half precision, the matrix unit, and copies to shared
// memory that go on in the background. sm_80 and later. The tests have the same functions in C++
// (tests/helpers/emulated_cuda/nearest_ptx.h).
#pragma once

namespace kn {

/// The dynamic shared memory of a kernel, SIZE bytes.
#define KN_DYNAMIC_SHARED(name, SIZE) extern __shared__ __align__(1024) unsigned char name[]

/// 16 bytes that are moved at once.
struct alignas(16) Sixteen {
    unsigned word[4];
};

/// @return the bits of the half nearest to x, ties to even
KN_FN unsigned short half_of(float x) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
KN_FN float of_half(unsigned short bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}

KN_FN unsigned shared_address(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }

/// Four matrices of 8 x 8 halves; lane l gives the address of row l % 8 of matrix l / 8, and gets of each matrix two
/// neighbouring numbers, of row l / 4 from column 2 (l % 4).
KN_FN void load_matrices(unsigned (&to)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row))
                 : "memory");
}

/// sum += a b for a of 16 x 16 and b of 16 x 8 halves. Lane l has rows l / 4 and l / 4 + 8 and columns 2 (l % 4), + 1 of sum.
KN_FN void multiply_add(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// Begins to copy 16 bytes of global memory to shared memory.
KN_FN void copy_begin(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
/// Ends a group of copies.
KN_FN void copy_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// Waits for all groups of this thread but the latest N.
template <int N>
KN_FN void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

}  // namespace kn
