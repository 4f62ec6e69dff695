// Products of warps (sm_80): a warp multiplies H times 16 of the block's 128 rows with a tile, or with parts of it one after
// the other. The next chunk of a tile is brought to shared memory meanwhile.
#pragma once

namespace kn {

/// The address from which a lane loads a 16 x 16 block of halves: rows of an operand at `point`, step `step`.
template <class G, bool ROWS>
KN_FN unsigned block_address(unsigned chunk, int step, int point) {
    // matrices 0 .. 3: for rows, points 0-7 and 8-15 of components 0-7, then of 8-15; for columns the other order
    const int lane = threadIdx.x % 32, matrix = lane / 8;
    const int upper_points = ROWS ? matrix % 2 : matrix / 2, upper_k = ROWS ? matrix / 2 : matrix % 2;
    return chunk + Panels<G>::offset(step, 0, point) + Panels<G>::offset(0, upper_k * 8, upper_points * 8 + lane % 8);
}

/// Rows of a warp that stay in registers, as there is one step of components only.
template <class G>
struct KeptRows {
    static constexpr bool KEPT = Panels<G>::TIGHT && Panels<G>::STEPS == 1;
    unsigned at[KEPT ? G::H : 1][4];

    KN_FN void load(unsigned rows, int row) {
        KN_UNROLL_ALL
        for (int h = 0; h < G::H; ++h) load_matrices(at[h], block_address<G, true>(rows, 0, row + h * 16));
    }
};

/// The products of a warp's rows with N / 4 times eight columns of a tile are added to `s`.
template <class G, int N>
KN_FN void add_products(float (&s)[G::H][N], const KeptRows<G>& rows, unsigned columns, int first) {
    KN_UNROLL_ALL
    for (int k = 0; k < N; k += 8) {
        unsigned b[4];
        load_matrices(b, block_address<G, false>(columns, 0, first + 2 * k));
        KN_UNROLL_ALL
        for (int h = 0; h < G::H; ++h) {
            multiply(s[h] + k, rows.at[h], b[0], b[1]);
            multiply(s[h] + k + 4, rows.at[h], b[2], b[3]);
        }
    }
}

/// The products of H times 16 rows, from `row` on, with N / 4 times eight columns of a tile, one chunk of components, are
/// added to `s`.
template <class G, int H, int N>
KN_FN void add_products(float (&s)[H][N], unsigned rows, unsigned columns, int row, int first) {
    typedef Panels<G> P;
    constexpr int STEPS = P::STEPS;
#pragma unroll(P::CHUNKS == 1 ? 3 : 1)
    for (int part = 0; part < (P::TIGHT ? 1 : 3); ++part) {  // high x high, high x low, low x high
#pragma unroll(P::CHUNKS == 1 ? 2 : 1)
        for (int step = 0; step < STEPS; ++step) {
            unsigned a[H][4];
            KN_UNROLL_ALL
            for (int h = 0; h < H; ++h)
                load_matrices(a[h], block_address<G, true>(rows, step + (part == 2 ? STEPS : 0), row + h * 16));
            KN_UNROLL_ALL
            for (int k = 0; k < N; k += 8) {
                unsigned b[4];
                load_matrices(b, block_address<G, false>(columns, step + (part == 1 ? STEPS : 0), first + 2 * k));
                KN_UNROLL_ALL
                for (int h = 0; h < H; ++h) {
                    multiply(s[h] + k, a[h], b[0], b[1]);
                    multiply(s[h] + k + 4, a[h], b[2], b[3]);
                }
            }
        }
    }
}

template <int H, int N>
KN_FN void clear(float (&s)[H][N]) {
    KN_UNROLL_ALL
    for (int h = 0; h < H; ++h)
        KN_UNROLL_ALL
        for (int k = 0; k < N; ++k) s[h][k] = 0;
}

/// Shared memory: the panel (all of it, or a chunk in each stage), then two stages of a tile's chunk and its numbers.
template <class G>
struct Stages {
    typedef Panels<G> P;
    static constexpr bool RESIDENT = G::RESIDENT;
    static constexpr int PANEL = RESIDENT ? P::HALVES_BYTES : 0;
    static constexpr int NUMBERS = P::CHUNK_BYTES, RHS = NUMBERS + P::NUMBERS_BYTES, ROWS = RHS + P::RHS_BYTES;
    static constexpr int BYTES = ROWS + (RESIDENT ? 0 : P::CHUNK_BYTES), BARRIERS = PANEL + 2 * BYTES;
};

/// Brings chunks of a tile, and of the panel, to one of two stages of shared memory while the other is used: by bulk copies
/// where there are such, else by all threads.
template <class G>
struct Loader {
    typedef Panels<G> P;
    typedef Stages<G> St;
    const char *rows, *columns;  // the panel, the split's first tile
    unsigned base;
    int piece;  // of the components

#if __CUDA_ARCH__ >= 900
    KN_FN unsigned full(int stage) const { return base + St::BARRIERS + stage * 8; }
    KN_FN void open() const {
        if (threadIdx.x == 0) {
            barrier_init(full(0), 1), barrier_init(full(1), 1);
            barriers_ready();
        }
        __syncthreads();
    }
    KN_FN void expect(int stage, unsigned bytes) const {
        if (threadIdx.x == 0) barrier_expect(full(stage), bytes);
    }
    KN_FN void copy(unsigned to, const char* from, unsigned bytes, int stage) const {
        if (threadIdx.x == 0) copy_bulk(to, from, bytes, full(stage));
    }
    KN_FN void started() const {}
    KN_FN void await(int stage, unsigned parity) const { barrier_wait(full(stage), parity); }
    KN_FN void await_first() const { await(0, 0); }
#else
    KN_FN void open() const {}
    KN_FN void expect(int, unsigned) const {}
    KN_FN void copy(unsigned to, const char* from, unsigned bytes, int) const {
#pragma unroll 1  // or all addresses would be computed before the loop over tiles, and take registers from it
        for (unsigned k = threadIdx.x * 16; k < bytes; k += G::THREADS * 16) copy16(to + k, from + k);
    }
    KN_FN void started() const { end_copies(); }
    KN_FN void await(int, unsigned) const {
        await_copies<1>();
        __syncthreads();
    }
    KN_FN void await_first() const {
        await_copies<0>();
        __syncthreads();
    }
#endif
    /// @param whole whether the resident panel comes along
    KN_FN void fetch(int tile, int chunk, int stage, bool whole) const {
        const bool last = chunk == P::CHUNKS - 1;
        const unsigned at = base + St::PANEL + stage * St::BYTES;
        const char* from = columns + static_cast<long long>(tile) * P::TILE_BYTES;
        expect(stage, P::CHUNK_BYTES * (St::RESIDENT ? 1 : 2) + (last ? P::NUMBERS_BYTES + P::RHS_BYTES : 0) + (whole ? St::PANEL : 0));
        if (whole) copy(base, rows, St::PANEL, stage);
        copy(at, from + chunk * P::CHUNK_BYTES, P::CHUNK_BYTES, stage);
        if (!St::RESIDENT) copy(at + St::ROWS, rows + chunk * P::CHUNK_BYTES, P::CHUNK_BYTES, stage);
        if (!last) return;
        from += P::HALVES_BYTES;
        copy(at + St::NUMBERS, from, P::NUMBERS_BYTES, stage);
        if (G::WIDE) copy(at + St::RHS, from + P::NUMBERS_BYTES + piece * P::RHS_BYTES, P::RHS_BYTES, stage);
    }
};

/// The products of a warp's rows with a tile at hand: in shared memory, or where chunks come one after the other, their sum.
template <class G>
struct Products {
    static constexpr bool WHOLE = Panels<G>::CHUNKS > 1, KEPT = KeptRows<G>::KEPT;
    static constexpr int N = G::SUB * 4;
    unsigned rows, columns;
    int row;  // the warp's first
    KeptRows<G> kept;
    float sum[WHOLE ? G::H : 1][WHOLE ? N : 1];

    /// @param room registers for those that are not there yet
    /// @return those with columns from `first` on, to be changed at will
    KN_FN float (&take(float (&room)[G::H][N], int first))[G::H][N] {
        if constexpr (WHOLE) {
            return sum;
        } else {
            clear(room);
            if constexpr (KEPT)
                add_products<G>(room, kept, columns, first);
            else
                add_products<G>(room, rows, columns, row, first);
            return room;
        }
    }
};

/// Walks over the tiles of a split, prefetching the next chunk, and calls `use(products, numbers, tile, j0, left)`.
template <class G, class Use>
KN_FN void walk_tiles(const typename G::Arguments& a, const Where& w, long long panel, Use use) {
    typedef Panels<G> P;
    typedef Stages<G> St;
    static_assert(P::CHUNKS == 1 || G::SUB == 16, "a tile whose chunks come one after the other is finished as a whole");
    extern __shared__ __align__(128) unsigned char shared[];
    const unsigned base = shared_address(shared);
    const long long from = w.split * a.span / P::POINTS, all = P::tiles(a);
    const int tiles = static_cast<int>(from + a.span / P::POINTS < all ? a.span / P::POINTS : all - from);
    const Loader<G> loader{P::panel(a, w.batch, panel), P::tile(a, w.batch, from), base, w.chunk};
    loader.open();
    loader.fetch(0, 0, 0, St::RESIDENT);
    loader.started();
    Products<G> products;
    products.row = threadIdx.x / 32 * 16 * G::H;
    if constexpr (Products<G>::KEPT) {
        loader.await_first();
        products.kept.load(base, products.row);
    }
    for (int tile = 0; tile < tiles; ++tile) {
        if constexpr (P::CHUNKS > 1) clear(products.sum);
#pragma unroll 1
        for (int chunk = 0; chunk < P::CHUNKS; ++chunk) {
            const unsigned number = tile * P::CHUNKS + chunk, stage = number % 2, parity = number / 2 % 2;
            const bool last = chunk == P::CHUNKS - 1;
            if (!last || tile + 1 < tiles) loader.fetch(last ? tile + 1 : tile, last ? 0 : chunk + 1, stage ^ 1, false);
            loader.started();
            loader.await(stage, parity);
            const unsigned at = base + St::PANEL + stage * St::BYTES;
            products.rows = St::RESIDENT ? base + chunk * P::CHUNK_BYTES : at + St::ROWS, products.columns = at;
            const float* numbers = reinterpret_cast<const float*>(shared + (at - base) + St::NUMBERS);
            const long long j0 = (from + tile) * P::POINTS;
            const int left = a.n - j0 < P::POINTS ? static_cast<int>(a.n - j0) : P::POINTS;
            if constexpr (P::CHUNKS > 1) {
                float t[G::H][G::SUB * 4];
                clear(t);
                add_products<G>(t, products.rows, products.columns, products.row, 0);
                KN_UNROLL_ALL
                for (int h = 0; h < G::H; ++h)
                    KN_UNROLL_ALL
                    for (int k = 0; k < G::SUB * 4; ++k) products.sum[h][k] += t[h][k];
            }
            if (last) use(products, numbers, tile, j0, left);
            __syncthreads();
        }
    }
}

/// The reduction by warps, each with H times 16 rows.
template <class G>
KN_FN void matrix(const typename G::Arguments& a) {
    constexpr int H = G::H, SUMS = G::SUB * 4;
    long long panel;
    const Where w = matrix_block<G>(a, panel);
    if (is_plain<G>(a, w, panel, choose_mode<G>(a, Panels<G>::survey(a, w.batch)))) return;
    const Warp<G, H> warp(a, w.batch, panel);
    typename G::State state[H][2];
    KN_UNROLL_ALL
    for (int h = 0; h < H; ++h) state[h][0].init(), state[h][1].init();
    walk_tiles<G>(a, w, panel, [&](Products<G>& products, const float* numbers, int tile, long long j0, int left) {
#pragma unroll(G::SOFT == 0 ? 1 : Products<G>::KEPT && G::C == 1 ? 4 : 2)
        for (int first = 0; first < Panels<G>::POINTS; first += G::SUB * 8) {
            float room[H][SUMS];
            auto& s = products.take(room, first);
            KN_UNROLL_ALL
            for (int h = 0; h < H; ++h) epilogue<G>(warp.rows[h], s[h], numbers, first, j0, left, state[h]);
        }
        if (tile % 4 != 3) return;
        KN_UNROLL_ALL
        for (int h = 0; h < H; ++h) state[h][0].flush(), state[h][1].flush();
    });
    // what tells where the results belong is found anew, so that it takes no registers in between
    const Where to = matrix_block<G>(a, panel);
    const Warp<G, H> last(a, to.batch, panel);
    KN_UNROLL_ALL
    for (int h = 0; h < H; ++h) {
        state[h][0].flush(), state[h][1].flush();
        deliver_rows<G>(last.rows[h], to, state[h]);
    }
}

}  // namespace kn
