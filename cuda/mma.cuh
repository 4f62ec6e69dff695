// The matrix units and what feeds them: PTX of sm_80, and of sm_90a where KN_WGMMA is defined.
#pragma once

namespace kn {

KN_FN unsigned shared_address(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }

// --- sm_80: products of a warp -----------------------------------------------------------------------------------------
/// Four 8 x 8 matrices of halves: lane l gives the address of row l % 8 of matrix l / 8, and gets two halves of row l / 4.
KN_FN void load_matrices(unsigned (&r)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

/// d += a b for a 16 x 16, b 16 x 8, of halves. Lane l holds d at rows l / 4 and l / 4 + 8, columns 2 (l % 4) and + 1.
KN_FN void multiply(float* d, const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// d = a b, likewise.
KN_FN void multiply_new(float* d, const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%10, %10, %10, %10};"
                 : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}

/// @return blockIdx.x, read anew: the compiler does not keep it, or what is computed from it, since the last time
KN_FN unsigned block_number() {
    unsigned n;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(n));
    return n;
}

/// Starts to copy 16 bytes to shared memory.
KN_FN void copy16(unsigned to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
KN_FN void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
KN_FN void await_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

#if __CUDA_ARCH__ >= 900
// --- sm_90: bulk copies, barriers that count bytes -----------------------------------------------------------------------
KN_FN void barrier_init(unsigned barrier, unsigned arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
/// Makes initialised barriers visible to bulk copies.
KN_FN void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
KN_FN void barrier_arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
KN_FN void barrier_expect(unsigned barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
KN_FN void barrier_wait(unsigned barrier, unsigned parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra over;\n"
        "bra again;\n"
        "over:\n"
        "}" ::"r"(barrier), "r"(parity) : "memory");
}
/// Copies to shared memory; the bytes, a multiple of 16, are counted by the barrier.
KN_FN void copy_bulk(unsigned to, const void* from, unsigned bytes, unsigned barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

#endif

#ifdef KN_WGMMA
// --- sm_90a: products of a warpgroup ---------------------------------------------------------------------------------------
/// Describes a matrix in shared memory that consists of 8 x 8 blocks of halves, 128 bytes each: blocks that follow each
/// other in the direction of rows (columns) of the operand lie `next` bytes apart, in that of the sum `next_k` bytes.
KN_FN unsigned long long matrix_at(unsigned address, unsigned next, unsigned next_k) {
    return static_cast<unsigned long long>((address & 0x3ffff) >> 4) | static_cast<unsigned long long>(next_k >> 4) << 16 |
           static_cast<unsigned long long>(next >> 4) << 32;
}

KN_FN void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
KN_FN void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
KN_FN void products_await() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

/// Two warpgroups take turns: `group` waits for its own; then it is the other's.
KN_FN void await_turn(int group) { asm volatile("bar.sync %0, 256;" ::"r"(group + 1) : "memory"); }
KN_FN void pass_turn(int group) { asm volatile("bar.arrive %0, 256;" ::"r"(2 - group) : "memory"); }

/// Keeps the compiler from moving uses of results across this point.
template <int N>
KN_FN void pin(float (&d)[N]) {
    KN_UNROLL_ALL
    for (int k = 0; k < N; ++k) asm volatile("" : "+f"(d[k])::"memory");
}

#define KN_R8(d, k) \
    "+f"(d[k]), "+f"(d[k + 1]), "+f"(d[k + 2]), "+f"(d[k + 3]), "+f"(d[k + 4]), "+f"(d[k + 5]), "+f"(d[k + 6]), "+f"(d[k + 7])

/// d (+)= a b for a 64 x 16, b 16 x 128, of halves in shared memory; starts, and is done after products_await. Each warp
/// of the four holds 16 rows of d, eight columns after eight, laid out as by `multiply`.
KN_FN void multiply_group(float (&d)[64], unsigned long long a, unsigned long long b, int add) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, "
        "%25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, p, 1, 1, 0, 0;\n"
        "}\n"
        : KN_R8(d, 0), KN_R8(d, 8), KN_R8(d, 16), KN_R8(d, 24), KN_R8(d, 32), KN_R8(d, 40), KN_R8(d, 48), KN_R8(d, 56)
        : "l"(a), "l"(b), "r"(add));
}
#undef KN_R8
#endif

}  // namespace kn
