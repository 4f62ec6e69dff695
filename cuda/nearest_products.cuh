// Products of halves with the instructions of sm_80 and later (nearest_filter.cuh says what is asked for): a warp has
// 64 x 64 pairs, so that what it reads from shared memory serves many.
#pragma once

namespace kn {

struct WarpProducts {
    static constexpr int THREADS = 128, M = 4, N = 8;

    KN_FN static int first_row() { return threadIdx.x / 64 * 64; }
    KN_FN static int first_column() { return threadIdx.x / 32 % 2 * 64; }

    /// Every thread copies a share, 16 bytes at a time; the copies of a step are a group.
    template <int STAGES, int AHEAD>
    struct Pipe {
        static_assert(AHEAD == STAGES - 1, "a barrier for each step keeps the warps together");
        unsigned char* unused;
        KN_FN void begin() const {}
        KN_FN bool copies() const { return true; }
        KN_FN void claim(int) const {}
        template <int BYTES>
        KN_FN void copy(unsigned char* to, const unsigned char* from, int) const {
            KN_UNROLL_ALL
            for (int at = 0; at < BYTES; at += THREADS * 16)
                if (BYTES - at >= THREADS * 16 || threadIdx.x * 16 < BYTES - at)
                    copy_begin(to + at + threadIdx.x * 16, from + at + threadIdx.x * 16);
        }
        KN_FN void brought(int, bool) const { copy_group(); }
        KN_FN void wait(int) const {
            copy_wait<AHEAD - 1>();
            __syncthreads();
        }
        KN_FN void done(int) const {}
    };

    /// @param rows, columns a chunk of the block's
    /// @param steps of 16 coordinates, at most STEPS
    template <int STEPS>
    KN_FN static void multiply(float (&sum)[4][8][4], const unsigned char* rows, const unsigned char* columns, int steps) {
        const int lane = threadIdx.x % 32;
        rows += first_row() * 128, columns += first_column() * 128;
        const int row = lane % 16, row_eight = lane / 16;
        const int column = lane / 16 * 8 + lane % 8, column_eight = lane / 8 % 2;
        KN_UNROLL_ALL
        for (int s = 0; s < STEPS; ++s) {
            if (s >= steps) break;
            unsigned x[4][4];
            KN_UNROLL_ALL
            for (int k = 0; k < 4; ++k) load_matrices(x[k], rows + k * 16 * 128 + nearest::place(row, 2 * s + row_eight));
            KN_UNROLL_ALL
            for (int pair = 0; pair < 4; ++pair) {
                unsigned y[4];
                load_matrices(y, columns + pair * 16 * 128 + nearest::place(column, 2 * s + column_eight));
                KN_UNROLL_ALL
                for (int k = 0; k < 4; ++k) {
                    multiply_add(sum[k][2 * pair], x[k], y[0], y[1]);
                    multiply_add(sum[k][2 * pair + 1], x[k], y[2], y[3]);
                }
            }
        }
    }
};

}  // namespace kn
