// What cuda/nearest_hopper.cuh has in PTX, in C++: each thread computes its own results.
#pragma once

namespace kn {

typedef const unsigned char* ChunkAt;
KN_FN ChunkAt chunk_at(const unsigned char* chunk) { return chunk; }

KN_FN void products_begin() {}
KN_FN void products_add(float (&sum)[16][4], ChunkAt rows, ChunkAt columns, int step) {
    const auto number = [step](const unsigned char* chunk, int row, int k) {
        const unsigned char* const eight = chunk + nearest::place(row, 2 * step + k / 8);
        return of_half(reinterpret_cast<const unsigned short*>(eight)[k % 8]);
    };
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 % 4 * 16 + lane / 4;
    for (int n = 0; n < 16; ++n)
        for (int c = 0; c < 4; ++c)
            for (int k = 0; k < 16; ++k)
                sum[n][c] += number(rows, first + c / 2 * 8, k) * number(columns, 8 * n + lane % 4 * 2 + c % 2, k);
}
KN_FN void products_end(float (&sum)[16][4]) {}

struct GroupProducts {
    static constexpr int THREADS = 256, M = 1, N = 16;

    KN_FN static int first_row() { return threadIdx.x / 32 * 16; }
    KN_FN static int first_column() { return 0; }

    /// One thread copies at once; a barrier for each step stands for those of the copies.
    template <int STAGES, int AHEAD>
    struct Pipe {
        unsigned char* barriers;
        KN_FN void begin() const {}
        KN_FN bool copies() const { return threadIdx.x == 0; }
        KN_FN void claim(int) const {}
        template <int BYTES>
        KN_FN void copy(unsigned char* to, const unsigned char* from, int) const {
            for (int at = 0; at < BYTES; at += 16) copy_begin(to + at, from + at);
        }
        KN_FN void brought(int, bool) const {}
        KN_FN void wait(int) const { __syncthreads(); }
        KN_FN void done(int) const {}
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
