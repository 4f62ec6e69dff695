// Products of halves with the instructions of sm_90a (nearest_filter.cuh says what is asked for): four warps together have
// 64 rows and 128 columns, and the matrix unit reads both from shared memory, where their rows of 128 bytes lie as `place`
// (nearest_data.cuh) says. The tests have all this in C++ (tests/helpers/emulated_cuda/nearest_hopper.h).
#pragma once

namespace kn {

/// How the matrix unit finds 128 bytes of each row of a chunk: groups of 8 rows lie 1024 bytes apart, with the 16 bytes of a
/// row in the order that `place` gives them. One more is 16 bytes further.
typedef unsigned long long ChunkAt;
KN_FN ChunkAt chunk_at(const unsigned char* chunk) {
    return (shared_address(chunk) & 0x3ffff) >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

// Barriers of eight bytes in shared memory. A phase ends when as many threads have arrived as `barrier_init` was told, and
// all bytes that were expected are there.
KN_FN void barrier_init(void* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
/// Before other threads and the copies use what this thread has set up, and before a barrier of the block.
KN_FN void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
KN_FN void barrier_expect(void* barrier, int bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}
KN_FN void barrier_arrive(void* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
/// Waits for the end of a phase, of which every other has parity 1, the first one 0.
KN_FN void barrier_wait(void* barrier, int parity) {
    unsigned over;
    do {
        asm volatile(
            "{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\tselp.u32 %0, 1, 0, p;\n\t}"
            : "=r"(over)
            : "r"(shared_address(barrier)), "r"(parity)
            : "memory");
    } while (!over);
}
KN_FN void bulk_copy(void* to, const void* from, int bytes, void* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}

KN_FN void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
/// Begins sum += the products of 16 coordinates, number `step` of a chunk.
KN_FN void products_add(float (&sum)[16][4], ChunkAt rows, ChunkAt columns, int step) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, "
        "%8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, "
        "%40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, "
        "%56, %57, %58, %59, %60, %61, %62, %63}, "
        "%64, %65, 1, 1, 1, 0, 0;"
        : "+f"(sum[0][0]), "+f"(sum[0][1]), "+f"(sum[0][2]), "+f"(sum[0][3]),
          "+f"(sum[1][0]), "+f"(sum[1][1]), "+f"(sum[1][2]), "+f"(sum[1][3]),
          "+f"(sum[2][0]), "+f"(sum[2][1]), "+f"(sum[2][2]), "+f"(sum[2][3]),
          "+f"(sum[3][0]), "+f"(sum[3][1]), "+f"(sum[3][2]), "+f"(sum[3][3]),
          "+f"(sum[4][0]), "+f"(sum[4][1]), "+f"(sum[4][2]), "+f"(sum[4][3]),
          "+f"(sum[5][0]), "+f"(sum[5][1]), "+f"(sum[5][2]), "+f"(sum[5][3]),
          "+f"(sum[6][0]), "+f"(sum[6][1]), "+f"(sum[6][2]), "+f"(sum[6][3]),
          "+f"(sum[7][0]), "+f"(sum[7][1]), "+f"(sum[7][2]), "+f"(sum[7][3]),
          "+f"(sum[8][0]), "+f"(sum[8][1]), "+f"(sum[8][2]), "+f"(sum[8][3]),
          "+f"(sum[9][0]), "+f"(sum[9][1]), "+f"(sum[9][2]), "+f"(sum[9][3]),
          "+f"(sum[10][0]), "+f"(sum[10][1]), "+f"(sum[10][2]), "+f"(sum[10][3]),
          "+f"(sum[11][0]), "+f"(sum[11][1]), "+f"(sum[11][2]), "+f"(sum[11][3]),
          "+f"(sum[12][0]), "+f"(sum[12][1]), "+f"(sum[12][2]), "+f"(sum[12][3]),
          "+f"(sum[13][0]), "+f"(sum[13][1]), "+f"(sum[13][2]), "+f"(sum[13][3]),
          "+f"(sum[14][0]), "+f"(sum[14][1]), "+f"(sum[14][2]), "+f"(sum[14][3]),
          "+f"(sum[15][0]), "+f"(sum[15][1]), "+f"(sum[15][2]), "+f"(sum[15][3])
        : "l"(rows + 2 * step), "l"(columns + 2 * step));
}
/// Waits for all that were begun.
KN_FN void products_end(float (&sum)[16][4]) {
    asm volatile("wgmma.commit_group.sync.aligned;\n\twgmma.wait_group.sync.aligned 0;"
        : "+f"(sum[0][0]), "+f"(sum[0][1]), "+f"(sum[0][2]), "+f"(sum[0][3]),
          "+f"(sum[1][0]), "+f"(sum[1][1]), "+f"(sum[1][2]), "+f"(sum[1][3]),
          "+f"(sum[2][0]), "+f"(sum[2][1]), "+f"(sum[2][2]), "+f"(sum[2][3]),
          "+f"(sum[3][0]), "+f"(sum[3][1]), "+f"(sum[3][2]), "+f"(sum[3][3]),
          "+f"(sum[4][0]), "+f"(sum[4][1]), "+f"(sum[4][2]), "+f"(sum[4][3]),
          "+f"(sum[5][0]), "+f"(sum[5][1]), "+f"(sum[5][2]), "+f"(sum[5][3]),
          "+f"(sum[6][0]), "+f"(sum[6][1]), "+f"(sum[6][2]), "+f"(sum[6][3]),
          "+f"(sum[7][0]), "+f"(sum[7][1]), "+f"(sum[7][2]), "+f"(sum[7][3]),
          "+f"(sum[8][0]), "+f"(sum[8][1]), "+f"(sum[8][2]), "+f"(sum[8][3]),
          "+f"(sum[9][0]), "+f"(sum[9][1]), "+f"(sum[9][2]), "+f"(sum[9][3]),
          "+f"(sum[10][0]), "+f"(sum[10][1]), "+f"(sum[10][2]), "+f"(sum[10][3]),
          "+f"(sum[11][0]), "+f"(sum[11][1]), "+f"(sum[11][2]), "+f"(sum[11][3]),
          "+f"(sum[12][0]), "+f"(sum[12][1]), "+f"(sum[12][2]), "+f"(sum[12][3]),
          "+f"(sum[13][0]), "+f"(sum[13][1]), "+f"(sum[13][2]), "+f"(sum[13][3]),
          "+f"(sum[14][0]), "+f"(sum[14][1]), "+f"(sum[14][2]), "+f"(sum[14][3]),
          "+f"(sum[15][0]), "+f"(sum[15][1]), "+f"(sum[15][2]), "+f"(sum[15][3])
        :: "memory");
}

struct GroupProducts {
    static constexpr int THREADS = 256, M = 1, N = 16;

    KN_FN static int first_row() { return threadIdx.x / 32 * 16; }
    KN_FN static int first_column() { return 0; }

    /// One thread starts copies of the bulk engine. A step's copies end in a phase of its stage's barrier `full`; all warps
    /// end a phase of its barrier `free` when they are done with it.
    template <int STAGES, int AHEAD>
    struct Pipe {
        static_assert(AHEAD < STAGES && 2 * STAGES * 8 <= 128, "a stage is free before it is filled, and barriers fit");
        unsigned char* barriers;
        KN_FN unsigned char* full(int step) const { return barriers + step % STAGES * 8; }
        KN_FN unsigned char* free(int step) const { return barriers + (STAGES + step % STAGES) * 8; }
        KN_FN void begin() const {
            if (threadIdx.x == 0) {
                KN_UNROLL_ALL
                for (int k = 0; k < STAGES; ++k) barrier_init(full(k), 1), barrier_init(free(k), THREADS / 32);
                barriers_ready();
            }
            __syncthreads();
        }
        KN_FN bool copies() const { return threadIdx.x == 0; }
        KN_FN void claim(int step) const {
            if (step >= STAGES) barrier_wait(free(step), (step / STAGES - 1) & 1);
        }
        template <int BYTES>
        KN_FN void copy(unsigned char* to, const unsigned char* from, int step) const {
            barrier_expect(full(step), BYTES);
            bulk_copy(to, from, BYTES, full(step));
        }
        KN_FN void brought(int step, bool any) const {
            if (any) barrier_arrive(full(step));
        }
        KN_FN void wait(int step) const { barrier_wait(full(step), step / STAGES & 1); }
        KN_FN void done(int step) const {
            __syncwarp();
            if (threadIdx.x % 32 == 0) barrier_arrive(free(step));
        }
    };

    /// @param rows, columns a chunk of the block's
    /// @param steps of 16 coordinates, at most STEPS
    template <int STEPS>
    KN_FN static void multiply(float (&sum)[1][16][4], const unsigned char* rows, const unsigned char* columns, int steps) {
        const ChunkAt y = chunk_at(columns);
        const ChunkAt x = chunk_at(rows + __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0) * 64 * 128);
        products_begin();
        KN_UNROLL_ALL
        for (int s = 0; s < STEPS; ++s) {
            if (s >= steps) break;
            products_add(sum[0], x, y, s);
        }
        products_end(sum[0]);
    }
};

}  // namespace kn
