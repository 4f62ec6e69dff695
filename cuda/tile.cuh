// The tiled reduction: a block owns THREADS * R rows and walks over its range of columns, a few tiles in shared memory at a
// time; every thread folds R rows times Q columns into R states. If the columns are split, the states go to scratch and
// `merge.cuh` folds them together, in a fixed order: the same call gives the same bits.
#pragma once

namespace kn {

/// Which result a thread works on.
struct Where {
    long long batch, row, split;
    int chunk, c0;  // components c0 .. c0 + C - 1
    int place;      // which of the thread's rows it is
};

/// Number of a partial result: the splits of one row lie side by side.
template <class G>
KN_FN long long partial_number(const typename G::Arguments& a, const Where& w) {
    return ((w.batch * G::CHUNKS + w.chunk) * a.m + w.row) * a.splits + w.split;
}

/// Writes the values of a state to the result.
/// @param x the slots of the row, read by Formula::finish
template <class G, class S, class X>
KN_FN void write_values(const typename G::Arguments& a, const Where& w, const X& x, const S& state) {
    typedef typename G::T T;
    typedef typename G::E E;
    constexpr int DIM = G::F::DIM, OUT = G::F::OUT;
    static_assert(OUT == DIM || DIM == 1, "only a scalar is widened by a row factor");
    static_assert(OUT == DIM || G::F::FIRST == OUT, "what is widened is one result");
    constexpr int FIRST = G::F::FIRST;  // components of the first result; the others are a second one
    const long long place = w.batch * a.m + w.row;
    E* out = static_cast<E*>(a.value) + place * FIRST;
    if constexpr (OUT > DIM) {
        const T value = state.value(0);
        KN_UNROLL(OUT)
        for (int c = 0; c < OUT; ++c) narrow(G::F::template finish<T>(x, c, value), out[c]);
    } else {
        KN_UNROLL_ALL
        for (int c = 0; c < G::C; ++c)
            // the last chunk overlaps the one before it where C does not divide DIM
            if (G::CHUNKS == 1 || w.c0 + c >= w.chunk * G::C) {
                E* to = out + w.c0 + c;
                if (FIRST < OUT && w.c0 + c >= FIRST)
                    to = static_cast<E*>(a.second) + place * (OUT - FIRST) + (w.c0 + c - FIRST);
                narrow(G::F::template finish<T>(x, w.c0 + c, state.value(c)), *to);
            }
    }
}

// --- what becomes of a state: specialised where the values alone are not the result ----------------------------------

template <class State>
struct Results {
    static constexpr bool WHOLE_WARPS = false;  // whether threads that have no row must fold, too

    /// Sets a state up; w.row is -1 if this thread has no such row.
    template <class G>
    KN_FN static void begin(const typename G::Arguments&, const Where&, State& state) {
        state.init();
    }
    /// Folds Q columns into a state.
    /// @param v v[q] are the values of column j + q
    /// @param valid number of columns that exist, if not FULL
    template <bool FULL, class T, class I, int Q, int IN>
    KN_FN static void fold(State& state, const T (&v)[Q][IN], I j, int valid) {
        KN_UNROLL_ALL
        for (int q = 0; q < Q; ++q)
            if (FULL || q < valid) state.update(v[q], j + q);
    }
    /// Writes the result of a row.
    template <class G, class X>
    KN_FN static void write(const typename G::Arguments& a, const Where& w, const X& x, State& state) {
        write_values<G>(a, w, x, state);
    }
    /// Keeps the state of a split for the second pass.
    template <class G>
    KN_FN static void save(const typename G::Arguments& a, const Where& w, State& state) {
        static_cast<State*>(a.partial)[partial_number<G>(a, w)] = state;
    }
};

/// For MinArgMin: the indices are a second result.
template <class State>
struct IndexResults : Results<State> {
    template <class G, class X>
    KN_FN static void write(const typename G::Arguments& a, const Where& w, const X& x, State& state) {
        write_values<G>(a, w, x, state);
        long long* out = static_cast<long long*>(a.second) + (w.batch * a.m + w.row) * G::F::DIM + w.c0;
        KN_UNROLL_ALL
        for (int c = 0; c < G::C; ++c) out[c] = state.arg[c];
    }
};

// --- the kernel ---------------------------------------------------------------------------------------------------------

/// The values of the pairs that are evaluated at once, those from row r0 and column q0 of the thread's on.
template <class G, class V, class X, int IN>
KN_FN void pair_values(const X& x, const typename G::T* group, int r0, int q0, int c0, typename G::T (&v)[G::R][G::Q][IN]) {
    constexpr int COLS = Packs<G>::COLS;
    V out[IN];
    G::F::template pair<G::C, V>(x.template at<V>(r0), Columns<G, V>{group, q0}, c0, out);
    KN_UNROLL_ALL
    for (int k = 0; k < Packs<G>::PAIRS * IN; ++k) v[r0 + k / IN / COLS][q0 + k / IN % COLS][k % IN] = out[k % IN].v[k / IN];
}

/// Folds one group of columns into the states of a thread.
/// @param group the slots of the columns
/// @param j index of the first of them
template <class G, bool FULL, class X>
KN_FN void fold_group(const X& x, const typename G::T* group, int c0, typename G::State (&state)[G::R], typename G::I j,
                      int valid) {
    constexpr int IN = G::State::IN, ROWS = Packs<G>::ROWS, COLS = Packs<G>::COLS;
    typename G::T v[G::R][G::Q][IN];
    KN_UNROLL_ALL
    for (int q0 = 0; q0 < G::Q; q0 += COLS) {
        KN_UNROLL_ALL
        for (int r0 = 0; r0 < G::R; r0 += ROWS) {
            if (G::PLAIN && Packs<G>::is_soft(q0 * G::R + r0))
                pair_values<G, typename Packs<G>::Soft>(x, group, r0, q0, c0, v);
            else
                pair_values<G, typename Packs<G>::V>(x, group, r0, q0, c0, v);
        }
    }
    KN_UNROLL_ALL
    for (int r = 0; r < G::R; ++r) G::Results::template fold<FULL>(state[r], v[r], j, valid);
}

template <class G, class X>
KN_FN void fold_tile(const X& x, const typename G::T* groups, int c0, typename G::State (&state)[G::R], typename G::I j,
                     int count) {
    const int rest = count % G::Q;
#pragma unroll 1
    for (int left = opaque(count / G::Q); left > 0; --left, j += G::Q, groups += Layout<G>::GROUP)
        fold_group<G, true>(x, groups, c0, state, j, G::Q);
    if (G::Q > 1 && rest) fold_group<G, false>(x, groups, c0, state, j, rest);
    KN_UNROLL_ALL
    for (int r = 0; r < G::R; ++r) state[r].flush();
}

/// Folds a range of columns, tile by tile. Several tiles are brought to shared memory at once: to wait for them costs more than
/// to read them.
template <class G, class X>
KN_FN void fold_range(const typename G::Arguments& a, In<G>& in, const Where& w, const X& x,
                      typename G::State (&state)[G::R], long long from, long long to, bool has_rows) {
    typedef typename G::T T;
    typedef typename G::I I;
    constexpr int SPAN = G::TILE * G::TILES;
    extern __shared__ __align__(16) unsigned char shared[];
    T* tiles = reinterpret_cast<T*>(shared);
    for (long long j0 = from; j0 < to; j0 += SPAN) {
        const int count = to - j0 < SPAN ? static_cast<int>(to - j0) : SPAN;
        const T* groups = tiles;
        if constexpr (G::COLS_IN_MEMORY) {
            groups = Layout<G>::cols(a, w.batch) + Layout<G>::col(j0);
        } else {
            __syncthreads();
            for (int jj = threadIdx.x; jj < count; jj += G::THREADS) {
                in.index = j0 + jj;
                G::F::template col<T>(in, Slots<T, G::Q>{tiles + Layout<G>::col(jj)});
            }
            __syncthreads();
        }
        if (!G::Results::WHOLE_WARPS && !has_rows) continue;
        if constexpr (G::TILES == 1) {
            fold_tile<G>(x, groups, w.c0, state, I(j0), count);
        } else {
#pragma unroll 1
            for (int t = 0; t < count; t += G::TILE)
                fold_tile<G>(x, groups + Layout<G>::col(t), w.c0, state, I(j0 + t), count - t < G::TILE ? count - t : G::TILE);
        }
    }
}

/// The slots of one row, as Formula::finish reads them.
template <class T, int STEP>
struct RowSlots {
    const T* first;
    KN_FN T operator[](int s) const { return first[static_cast<long long>(s) * STEP]; }
};

template <class G, class X>
KN_FN void deliver(const typename G::Arguments& a, const Where& w, const X& x, typename G::State& state) {
    if (a.splits == 1) {
        G::Results::template write<G>(a, w, x, state);
    } else {
        G::Results::template save<G>(a, w, state);
    }
}

/// @param a the call's arguments; blocks are numbered rows fastest, then splits, chunks, batch elements
template <class G>
KN_FN void reduce(const typename G::Arguments& a) {
    typedef typename G::T T;
    typedef typename G::State State;
    typedef typename G::F F;
    constexpr int R = G::R;
    static_assert(G::C <= F::DIM && G::CHUNKS * G::C >= F::DIM, "the chunks cover the components");
    static_assert(State::C == G::C, "a state holds the components of one chunk");

    const BlockNumber number(a);
    const long long row_block = number.row_block;
    Where w;
    w.split = number.split;
    w.chunk = G::CHUNKS == 1 ? 0 : static_cast<int>(number.rest % G::CHUNKS);
    w.c0 = G::CHUNKS == 1 ? 0 : w.chunk * G::C < F::DIM - G::C ? w.chunk * G::C : F::DIM - G::C;
    w.batch = number.rest / G::CHUNKS;
    if (is_done(a, w.batch)) return;

    const long long row = row_block * Layout<G>::ROWS + threadIdx.x;  // row r of this thread is row + r * THREADS
    const long long from = w.split * a.span, to = from + a.span < a.n ? from + a.span : a.n;
    In<G> in(a, w.batch);
    State state[R];
    KN_UNROLL_ALL
    for (int r = 0; r < R; ++r) {
        w.row = row + r * G::THREADS < a.m ? row + r * G::THREADS : -1;
        w.place = r;
        G::Results::template begin<G>(a, w, state[r]);
    }
    if constexpr (G::ROWS_IN_MEMORY) {
        const T* first = Layout<G>::row(a, w.batch * a.row_blocks + row_block, threadIdx.x);
        fold_range<G>(a, in, w, RowMemory<G>{first}, state, from, to, row < a.m);
        KN_UNROLL_ALL
        for (int r = 0; r < R; ++r) {
            w.row = row + r * G::THREADS;
            if (w.row < a.m) deliver<G>(a, w, RowSlots<T, Layout<G>::SLOT>{first + r}, state[r]);
        }
    } else {
        T x[R][F::NROW ? F::NROW : 1];
        KN_UNROLL_ALL
        for (int r = 0; r < R; ++r) {
            in.index = row + r * G::THREADS < a.m ? row + r * G::THREADS : a.m - 1;
            F::template row<T>(in, &x[r][0]);
        }
        fold_range<G>(a, in, w, RowRegisters<G>{x, 0}, state, from, to, row < a.m);
        KN_UNROLL_ALL
        for (int r = 0; r < R; ++r) {
            in.index = w.row = row + r * G::THREADS;
            if (w.row >= a.m) continue;
            F::template row<T>(in, &x[r][0]);  // anew: what only the factor reads takes no registers from the pairs
            deliver<G>(a, w, RowSlots<T, 1>{x[r]}, state[r]);
        }
    }
}

}  // namespace kn
