// Products of warpgroups (sm_90a): two of them, each with 64 of the block's 128 rows, share what bulk copies bring.
#pragma once

#ifdef KN_WGMMA
namespace kn {

/// Shared memory: the panel (all of it, or a chunk in each stage), stages of a tile's chunk, numbers, barriers, counters.
template <class G>
struct Ring {
    typedef Panels<G> P;
    static constexpr bool RESIDENT = G::RESIDENT;
    static constexpr int STAGES = G::STAGES, SLOTS = STAGES + 1;  // of halves; of numbers, which are read for longer
    static constexpr int PANEL = RESIDENT ? P::HALVES_BYTES : 0;
    static constexpr int STAGE = (RESIDENT ? 1 : 2) * P::CHUNK_BYTES;  // columns, then rows
    static constexpr int NUMBERS = PANEL + STAGES * STAGE, SLOT = P::NUMBERS_BYTES + P::RHS_BYTES,
                         BARRIERS = NUMBERS + SLOTS * SLOT;
    static constexpr int COUNTERS = BARRIERS + (STAGES + 1) * 8;
};

/// The chunks of a block's columns, one after the other, through the ring. Tiles beyond the last are the last again.
/// The warp that is the last to be done with a stage starts the copy of what comes there next: nobody waits for that.
template <class G>
struct Reader {
    typedef Panels<G> P;
    typedef Ring<G> R;
    const char *rows, *columns;  // the panel, the split's first tile
    unsigned base;
    int piece, tiles, rounds;  // of the components; tiles of the split; chunks that are read
    int number, stage, slot;  // of the chunk at hand
    unsigned parity;

    KN_FN unsigned full(int at) const { return base + R::BARRIERS + at * 8; }
    KN_FN void fetch(int k, int at) const {
        const int tile = k / P::CHUNKS, chunk = k % P::CHUNKS;
        const char* from = columns + static_cast<long long>(tile < tiles ? tile : tiles - 1) * P::TILE_BYTES;
        const bool last = chunk == P::CHUNKS - 1;
        const unsigned to = base + R::PANEL + at * R::STAGE;
        barrier_expect(full(at), R::STAGE + (last ? R::SLOT : 0));
        copy_bulk(to, from + chunk * P::CHUNK_BYTES, P::CHUNK_BYTES, full(at));
        if (!R::RESIDENT) copy_bulk(to + P::CHUNK_BYTES, rows + chunk * P::CHUNK_BYTES, P::CHUNK_BYTES, full(at));
        if (last) {
            const unsigned slot_at = base + R::NUMBERS + tile % R::SLOTS * R::SLOT;
            from += P::HALVES_BYTES;
            copy_bulk(slot_at, from, P::NUMBERS_BYTES, full(at));
            from += P::NUMBERS_BYTES + piece * P::RHS_BYTES;
            if (G::WIDE) copy_bulk(slot_at + P::NUMBERS_BYTES, from, P::RHS_BYTES, full(at));
        }
    }
    /// One thread of the block, before all others begin.
    KN_FN void open() const {
        for (int at = 0; at <= R::STAGES; ++at) barrier_init(full(at), 1);
        barriers_ready();
        if (R::RESIDENT) {
            barrier_expect(full(R::STAGES), R::PANEL);
            for (int chunk = 0; chunk < P::CHUNKS; ++chunk)
                copy_bulk(base + chunk * P::CHUNK_BYTES, rows + chunk * P::CHUNK_BYTES, P::CHUNK_BYTES, full(R::STAGES));
        }
        for (int at = 0; at < R::STAGES && at < rounds; ++at) fetch(at, at);
    }
    KN_FN unsigned await() const {
        barrier_wait(full(stage), parity);
        return base + R::PANEL + stage * R::STAGE;
    }
    KN_FN void release() {
        extern __shared__ __align__(128) unsigned char shared[];
        if (threadIdx.x % 32 == 0) {
            __threadfence_block();
            const int done = atomicAdd(reinterpret_cast<int*>(shared + R::COUNTERS) + stage, 1);
            if (done % 8 == 7 && number + R::STAGES < rounds) {
                __threadfence_block();
                fetch(number + R::STAGES, stage);
            }
        }
        ++number;
        if (++stage == R::STAGES) stage = 0, parity ^= 1;
    }
    KN_FN const float* numbers() {
        extern __shared__ __align__(128) unsigned char shared[];
        const float* at = reinterpret_cast<const float*>(shared + R::NUMBERS + slot * R::SLOT);
        if (++slot == R::SLOTS) slot = 0;
        return at;
    }
};

/// Starts the products of a warpgroup's 64 rows with a tile, one chunk of components.
template <class G>
KN_FN void start_products(float (&s)[64], unsigned rows, unsigned columns) {
    typedef Panels<G> P;
    constexpr int STEPS = P::STEPS;
    pin(s);
    products_begin();
    KN_UNROLL_ALL
    for (int part = 0; part < 3; ++part) {
#pragma unroll 4
        for (int step = 0; step < STEPS; ++step) {
            const unsigned a = rows + (step + (part == 2 ? STEPS : 0)) * P::STEP_BYTES;
            const unsigned b = columns + (step + (part == 1 ? STEPS : 0)) * P::STEP_BYTES;
            multiply_group(s, matrix_at(a, P::BLOCK, P::BLOCK_K), matrix_at(b, P::BLOCK, P::BLOCK_K), part + step > 0);
        }
    }
    products_commit();
}

/// Calls `use(sums, numbers, first, j0, left)` for each tile, with one warpgroup's rows. The units are kept busy while sums are
/// used by another block on the multiprocessor, or with TURNS by the other warpgroup: the two multiply in turns.
template <class G, class Use>
KN_FN void consume(const typename G::Arguments& a, Reader<G> reader, long long from, Use use) {
    typedef Panels<G> P;
    typedef Ring<G> R;
    const int group = threadIdx.x / 128;
    const unsigned own = group * 8 * P::BLOCK;  // the warpgroup's rows in a step
    const auto sums = [&](float (&s)[64], int tile) {
        const long long j0 = (from + tile) * P::POINTS;
        use(s, reader.numbers(), 0, j0, a.n - j0 < P::POINTS ? static_cast<int>(a.n - j0) : P::POINTS);
    };
    const auto start = [&](float (&s)[64], int chunk) {
        const unsigned at = reader.await();
        const unsigned rows = R::RESIDENT ? reader.base + chunk * P::CHUNK_BYTES : at + P::CHUNK_BYTES;
        if (G::TURNS) await_turn(group);
        start_products<G>(s, rows + own, at);
        if (G::TURNS) pass_turn(group);
    };
    const auto finish = [&](float (&s)[64]) {
        products_await();
        pin(s);
        reader.release();
    };
    if (R::RESIDENT) barrier_wait(reader.full(R::STAGES), 0);
    if (G::TURNS && group == 1) pass_turn(group);  // the other begins
    float s[64];
#pragma unroll 1
    for (int tile = 0; tile < reader.tiles; ++tile) {
        if constexpr (P::CHUNKS == 1) {
            start(s, 0);
            finish(s);
        } else {
            float t[64];
            KN_UNROLL_ALL
            for (int k = 0; k < 64; ++k) s[k] = 0;
#pragma unroll 1
            for (int chunk = 0; chunk < P::CHUNKS; ++chunk) {
                start(t, chunk);
                finish(t);
                KN_UNROLL_ALL
                for (int k = 0; k < 64; ++k) s[k] += t[k];
            }
        }
        sums(s, tile);
    }
}

/// Opens a block of two warpgroups. @return its way through the columns
template <class G>
KN_FN Reader<G> open_reader(const typename G::Arguments& a, const Where& w, long long panel) {
    typedef Panels<G> P;
    typedef Ring<G> R;
    extern __shared__ __align__(128) unsigned char shared[];
    const long long from = w.split * a.span / P::POINTS, all = P::tiles(a);
    const int tiles = static_cast<int>(from + a.span / P::POINTS < all ? a.span / P::POINTS : all - from);
    const int rounds = tiles * P::CHUNKS;
    const Reader<G> reader{P::panel(a, w.batch, panel), P::tile(a, w.batch, from), shared_address(shared), w.chunk, tiles,
                           rounds, 0, 0, 0, 0};
    if (threadIdx.x < R::STAGES) reinterpret_cast<int*>(shared + R::COUNTERS)[threadIdx.x] = 0;
    if (threadIdx.x == 0) reader.open();
    __syncthreads();
    return reader;
}

/// The reduction, two warpgroups a block.
template <class G>
KN_FN void matrix_groups(const typename G::Arguments& a) {
    typedef Panels<G> P;
    long long panel;
    const Where w = matrix_block<G>(a, panel);
    const MatrixRows<G> rows(a, w.batch, panel, threadIdx.x / 32);
    if (is_plain<G>(a, w, panel, rows.mode)) return;
    const Reader<G> reader = open_reader<G>(a, w, panel);
    typename G::State state[2];
    state[0].init(), state[1].init();
    int done = 0;
    consume<G>(a, reader, w.split * a.span / P::POINTS, [&](float (&s)[64], const float* numbers, int, long long j0, int left) {
        epilogue<G>(rows, s, numbers, 0, j0, left, state);
        if (++done % 2 == 0) state[0].flush(), state[1].flush();
    });
    state[0].flush(), state[1].flush();
    deliver_rows<G>(rows, w, state);
}

}  // namespace kn
#endif
