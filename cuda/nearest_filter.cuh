// The steps of the search of nearest points (nearest_data.cuh) with products: every row with every column of a range.
//
// A block has 128 rows and goes through tiles of 128 columns. Chunks of 64 coordinates come to shared memory ahead of time,
// as they lie in global memory. Rows of up to RESIDENT chunks stay there, longer ones come again for each tile.
//
// What multiplies is a type `Products`, of which there are two (nearest_products.cuh, nearest_hopper.cuh):
//   THREADS                  threads of a block
//   M, N                     a warp has 16 M rows times 8 N columns of the pairs
//   first_row, first_column  where they begin
//   multiply<STEPS>(sum, rows, columns, steps)   adds the products of a chunk
//   Pipe                     brings what a step needs:
//     begin()                  before all else, by all threads
//     copies()                 whether this thread calls the next three
//     claim(step)              before the copies of a step: until nobody needs what was where they go
//     copy<BYTES>(to, from, step)   begins a copy for a step
//     brought(step, any)       after the copies of a step, or where it has none
//     wait(step)               until the copies of a step are there
//     done(step)               a thread needs what the copies of a step brought no longer
// Lane l has rows 16 m + l / 4 (+ 8) and columns 8 n + 2 (l % 4) (+ 1): sum[m][n][c] is row c / 2, column c % 2 of them.
#pragma once

namespace kn {

/// Where everything is in shared memory.
template <class G>
struct FilterMemory {
    static constexpr int CHUNKS = nearest::chunks<G>(), CHUNK = nearest::CHUNK, QUEUE = 64;
    static constexpr bool RESIDENT = CHUNKS <= G::RESIDENT;
    static constexpr int STAGE = RESIDENT ? CHUNK : 2 * CHUNK;  // columns, then rows
    static constexpr int NUMBERS = nearest::COLUMNS * sizeof(Pair);
    static constexpr int FIXED = RESIDENT ? CHUNKS * CHUNK : 0;
    static constexpr int TESTS = nearest::ROWS * sizeof(Pair), QUEUES = G::Products::THREADS / 32 * QUEUE * sizeof(unsigned[2]);
    static constexpr int BARRIERS = 128;
    static constexpr int SIZE = FIXED + G::STAGES * (STAGE + NUMBERS) + TESTS + QUEUES + BARRIERS;
    static_assert(G::SHARED == SIZE, "the schedule and the kernel agree");

    unsigned char* memory;
    KN_FN unsigned char* rows(int stage, int chunk) const {
        return RESIDENT ? memory + chunk * CHUNK : memory + stage * STAGE + CHUNK;
    }
    KN_FN unsigned char* columns(int stage) const { return memory + FIXED + stage * STAGE; }
    KN_FN unsigned char* numbers(int stage) const { return memory + FIXED + G::STAGES * STAGE + stage * NUMBERS; }
    KN_FN Pair* tests() const { return reinterpret_cast<Pair*>(numbers(G::STAGES)); }
    KN_FN unsigned char* queues() const { return numbers(G::STAGES) + TESTS; }
    KN_FN unsigned char* barriers() const { return queues() + QUEUES; }
};

/// The steps that a block goes through, one chunk of one tile each.
template <class G, bool SAMPLE>
struct FilterSteps {
    typedef FilterMemory<G> Memory;
    const typename G::Arguments& a;
    Memory memory;
    typename G::Products::template Pipe<G::STAGES, G::AHEAD> pipe;
    long long block, first_tile;  // of all batch elements
    int count;                    // steps

    /// Begins to bring what a step needs, if there is such a step.
    KN_FN void bring(int step) const {
        if (!pipe.copies()) return;
        if (step < count) {
            const int tile = step / Memory::CHUNKS, chunk = step % Memory::CHUNKS, stage = step % G::STAGES;
            pipe.claim(step);
            if (Memory::RESIDENT && step == 0)
                pipe.template copy<Memory::FIXED>(memory.memory, a.rows + block * Memory::FIXED, step);
            const long long column = (first_tile + tile) * Memory::CHUNKS + chunk;
            pipe.template copy<Memory::CHUNK>(memory.columns(stage), a.columns + column * Memory::CHUNK, step);
            if (!Memory::RESIDENT)
                pipe.template copy<Memory::CHUNK>(memory.rows(stage, 0),
                                                  a.rows + (block * Memory::CHUNKS + chunk) * Memory::CHUNK, step);
            if (chunk == 0) {
                const long long first = (first_tile + tile) * nearest::COLUMNS;
                const void* from = SAMPLE ? static_cast<const void*>(a.column_up + first) : a.column_low + first;
                pipe.template copy<SAMPLE ? Memory::NUMBERS / 2 : Memory::NUMBERS>(
                    memory.numbers(tile % G::STAGES), static_cast<const unsigned char*>(from), step);
            }
        }
        pipe.brought(step, step < count);
    }
};

/// The largest result of each row in each group: 64 columns of each tile, every fourth pair of them.
template <class G>
struct Sample {
    static constexpr bool SAMPLE = true;
    static constexpr int M = G::Products::M, N = G::Products::N;
    float best[2 * M][N / 8];

    KN_FN Sample(const typename G::Arguments&, const FilterMemory<G>&, long long) {
        KN_UNROLL_ALL
        for (int r = 0; r < 2 * M; ++r)
            KN_UNROLL_ALL
            for (int half = 0; half < N / 8; ++half) best[r][half] = nearest::NEVER;
    }
    /// @param numbers -up of the tile's columns
    KN_FN void start(float (&sum)[M][N][4], const unsigned char* numbers) const {
        const Pair* pairs = reinterpret_cast<const Pair*>(numbers) + G::Products::first_column() / 2 + threadIdx.x % 4;
        KN_UNROLL_ALL
        for (int n = 0; n < N; ++n) {
            const Pair up = pairs[4 * n];
            KN_UNROLL_ALL
            for (int r = 0; r < 2 * M; ++r) sum[r / 2][n][r % 2 * 2] = up.first, sum[r / 2][n][r % 2 * 2 + 1] = up.second;
        }
    }
    KN_FN void take(const typename G::Arguments&, const float (&sum)[M][N][4], unsigned) {
        KN_UNROLL_ALL
        for (int r = 0; r < 2 * M; ++r)
            KN_UNROLL_ALL
            for (int c = 0; c < 2 * N; ++c) {
                float& most = best[r][c / 16];
                most = greater(most, sum[r / 2][c / 2][r % 2 * 2 + c % 2]);
            }
    }
    /// @param first the block's first row, in scratch
    KN_FN void finish(const typename G::Arguments& a, long long first, unsigned segment) const {
        const int lane = threadIdx.x % 32;
        KN_UNROLL_ALL
        for (int r = 0; r < 2 * M; ++r)
            KN_UNROLL_ALL
            for (int half = 0; half < N / 8; ++half) {
                const long long row = first + G::Products::first_row() + r / 2 * 16 + r % 2 * 8 + lane / 4;
                const int group = segment * 8 + (G::Products::first_column() / 64 + half) * 4 + lane % 4;
                a.maxima[row * G::SPACE + group] = best[r][half];
            }
    }
};

/// The columns whose result reaches a row's least. A warp keeps those that it finds in a queue, since each takes the time
/// of an addition in global memory until its place in a list is known.
template <class G>
struct Lists {
    static constexpr bool SAMPLE = false;
    static constexpr int M = G::Products::M, N = G::Products::N;
    static constexpr int WORDS = M * N / 8, ROWS_OF_WORD = 16 / N;  // 32 bits for the pairs of one row or two
    struct alignas(8) Hit {
        unsigned position, row;
    };
    Pair* tests;  // tau and least of the warp's rows, in shared memory: registers are scarce
    Hit* queue;
    int queued;
    int* counts;  // of the warp's rows
    unsigned* lists;

    KN_FN Lists(const typename G::Arguments& a, const FilterMemory<G>& memory, long long first_of_block)
        : tests(memory.tests() + G::Products::first_row()),
          queue(reinterpret_cast<Hit*>(memory.queues()) + threadIdx.x / 32 * FilterMemory<G>::QUEUE), queued(0) {
        const long long first = first_of_block + G::Products::first_row();
        counts = a.counts + first, lists = a.lists + first * G::SPACE;
        // Warps that have the same rows write the same.
        for (int r = threadIdx.x % 32; r < 16 * M; r += 32) tests[r] = a.tests[first + r];
        __syncwarp();
    }
    KN_FN static unsigned row(int r) { return r / 2 * 16 + r % 2 * 8 + threadIdx.x % 32 / 4; }

    /// @param numbers -low and f of the tile's columns
    KN_FN void start(float (&sum)[M][N][4], const unsigned char* numbers) const {
        float tau[2 * M];
        KN_UNROLL_ALL
        for (int r = 0; r < 2 * M; ++r) tau[r] = tests[row(r)].first;
        const Sixteen* pairs = reinterpret_cast<const Sixteen*>(numbers) + G::Products::first_column() / 2 + threadIdx.x % 4;
        KN_UNROLL_ALL
        for (int n = 0; n < N; ++n) {
            const Sixteen two = pairs[4 * n];
            KN_UNROLL_ALL
            for (int r = 0; r < 2 * M; ++r)
                KN_UNROLL_ALL
                for (int c = 0; c < 2; ++c)
                    sum[r / 2][n][r % 2 * 2 + c] =
                        fmaf(tau[r], __uint_as_float(two.word[2 * c + 1]), __uint_as_float(two.word[2 * c]));
        }
    }
    /// @param position of the warp's first column
    KN_FN void take(const typename G::Arguments&, const float (&sum)[M][N][4], unsigned position) {
        unsigned hits[WORDS] = {}, any = 0;
        KN_UNROLL_ALL
        for (int r = 0; r < 2 * M; ++r) {
            const float least = tests[row(r)].second;
            KN_UNROLL_ALL
            for (int c0 = 0; c0 < 2 * N; c0 += 16) {
                float most = sum[r / 2][c0 / 2][r % 2 * 2];
                KN_UNROLL_ALL
                for (int c = 1; c < 16; ++c) most = greater(most, sum[r / 2][(c0 + c) / 2][r % 2 * 2 + c % 2]);
                if (most < least) continue;
                any = 1;
                unsigned& word = hits[r / ROWS_OF_WORD];
                KN_UNROLL_ALL
                for (int c = 0; c < 16; ++c)
                    if (sum[r / 2][(c0 + c) / 2][r % 2 * 2 + c % 2] >= least)
                        word |= 1u << (r % ROWS_OF_WORD * 2 * N + c0 + c);
            }
        }
        if (!__ballot_sync(0xffffffffu, any != 0)) return;
        KN_UNROLL_ALL
        for (int w = 0; w < WORDS; ++w) push(hits[w], w * ROWS_OF_WORD, position + threadIdx.x % 4 * 2);
    }
    /// Every lane gives the columns that it has found of the rows from number r on.
    /// @param position of the lane's first column
    KN_FN void push(unsigned hits, int r, unsigned position) {
        const unsigned lower = (1u << threadIdx.x % 32) - 1;
#pragma unroll 1
        for (unsigned have; (have = __ballot_sync(0xffffffffu, hits != 0)) != 0; hits &= hits - 1) {
            const unsigned bit = __ffs(hits) - 1, c = bit % (2 * N), next = bit / (2 * N) * 8;  // rows lie 8 apart
            if (hits) queue[queued + __popc(have & lower)] = {position + c / 2 * 8 + c % 2, row(r) + next};
            queued += __popc(have);
            if (queued > FilterMemory<G>::QUEUE - 32) flush();
        }
    }
    /// Moves what is queued to the lists. A row whose list is full gets a test that nothing passes: many equal points would
    /// make all threads wait for one address.
    KN_FN void flush() {
        __syncwarp();
#pragma unroll 1
        for (int k = threadIdx.x % 32; k < queued; k += 32) {
            const Hit hit = queue[k];
            const int at = atomicAdd(counts + hit.row, 1);
            if (at < G::ROOM)
                lists[hit.row * static_cast<long long>(G::SPACE) + at] = hit.position;
            else
                tests[hit.row] = {0, static_cast<float>(KN_INF)};
        }
        __syncwarp();
        queued = 0;
    }
    KN_FN void finish(const typename G::Arguments&, long long, unsigned) { flush(); }
};

/// @tparam Task Sample or Lists
template <class G, class Task>
KN_FN void nearest_filter(const typename G::Arguments& a, long long tiles, long long segments) {
    typedef FilterMemory<G> Memory;
    typedef typename G::Products Products;
    constexpr int LAST = nearest::steps<G>() - 4 * (Memory::CHUNKS - 1);  // steps of 16 coordinates in the last chunk
    KN_DYNAMIC_SHARED(shared, G::SHARED);
    const Memory memory = {shared};
    const unsigned blocks = static_cast<unsigned>(a.blocks), segment = blockIdx.x / blocks;
    const long long local = blockIdx.x % blocks, block = a.first_block + local;
    const long long from = tiles * segment / segments, to = tiles * (segment + 1) / segments;
    const long long element = static_cast<unsigned>(block) / static_cast<unsigned>(a.row_blocks);
    const int count = static_cast<int>((to - from) * Memory::CHUNKS);
    const FilterSteps<G, Task::SAMPLE> steps = {a, memory, {memory.barriers()}, block, element * a.tiles + from, count};
    steps.pipe.begin();
    KN_UNROLL_ALL
    for (int step = 0; step < G::AHEAD; ++step) steps.bring(step);

    Task task(a, memory, local * nearest::ROWS);
    int step = 0;
    for (long long tile = from; tile < to; ++tile) {
        float sum[Products::M][Products::N][4];
#pragma unroll 1
        for (int chunk = 0; chunk < opaque(Memory::CHUNKS); ++chunk, ++step) {
            const int stage = step % G::STAGES;
            steps.pipe.wait(step);
            steps.bring(step + G::AHEAD);
            if (chunk == 0) task.start(sum, memory.numbers(static_cast<int>(tile - from) % G::STAGES));
            Products::template multiply<Memory::CHUNKS == 1 ? LAST : 4>(
                sum, memory.rows(stage, chunk), memory.columns(stage), chunk == Memory::CHUNKS - 1 ? LAST : 4);
            steps.pipe.done(step);
        }
        task.take(a, sum, static_cast<unsigned>(tile * nearest::COLUMNS + Products::first_column()));
    }
    task.finish(a, local * nearest::ROWS, segment);
}

template <class G>
KN_FN void nearest_sample(const typename G::Arguments& a) {
    nearest_filter<G, Sample<G>>(a, a.sample_tiles, a.sample_segments);
}
template <class G>
KN_FN void nearest_list(const typename G::Arguments& a) {
    nearest_filter<G, Lists<G>>(a, a.tiles, a.segments);
}
/// For the rows whose first lists were incomplete.
template <class G>
KN_FN void nearest_list_again(const typename G::Arguments& a) {
    if (a.again[blockIdx.x % static_cast<unsigned>(a.blocks)]) nearest_filter<G, Lists<G>>(a, a.tiles, a.segments);
}

}  // namespace kn
