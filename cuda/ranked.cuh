// The K smallest values of a row and their columns, in a list that a whole warp keeps: a value is put in its place by one
// vote and one shuffle. Lists of up to 32 places cost two registers a lane, so that a warp has those of several rows.
//
// In `reduce_lists`, the configuration of which has a WarpList as its State, a warp takes R rows and 32 Q columns at a
// time, Q for each lane. The bounds of the rows refuse nearly all columns by one comparison and a vote.
#pragma once

namespace kn {

/// What an empty place of a list holds beside an infinite value: it comes after all columns.
template <class I>
KN_FN I no_column() {
    return static_cast<I>(~0ull >> (65 - 8 * sizeof(I)));
}

// The next number below another; of -Inf, NaN, so that nothing is less than or equal to it.
KN_FN float next_below(float v) {
    const unsigned bits = __float_as_uint(v);
    return __uint_as_float(v > 0.0f ? bits - 1 : v == 0.0f ? 0x80000001u : bits + 1);
}
KN_FN double next_below(double v) {
    const long long bits = __double_as_longlong(v);
    return __longlong_as_double(v > 0.0 ? bits - 1 : v == 0.0 ? static_cast<long long>(0x8000000000000001ull) : bits + 1);
}

/// The K smallest values of a warp and their columns, sorted, equals by column: place k is in lane k % 32.
template <class T, class I, int K>
struct WarpList {
    static constexpr int SLOTS = (K + 31) / 32;
    static constexpr bool WHOLE_WARPS = true;
    static constexpr unsigned ALL = 0xffffffffu;
    T value[SLOTS];
    I column[SLOTS];
    T bound;  // of the last place, the same in all lanes
    I bound_column;

    KN_FN void open() {
        KN_UNROLL_ALL
        for (int s = 0; s < SLOTS; ++s) value[s] = T(KN_INF), column[s] = no_column<I>();
        bound = T(KN_INF), bound_column = no_column<I>();
    }
    /// @return the largest value that a column of a higher number than all before may have to be admitted
    KN_FN T limit() const { return bound_column == no_column<I>() ? T(KN_INF) : next_below(bound); }
    /// @return whether (v, j) comes before the last place; never for NaN
    KN_FN bool admits(T v, I j) const { return v < bound || (v == bound && j < bound_column); }
    /// Puts (v, j), the same in all lanes, in its place, and what is behind one place further.
    KN_FN void insert(T v, I j) {
        const int lane = threadIdx.x % 32, neighbour = (lane + 31) % 32;
        T prior[SLOTS];  // what is one place further to the front, but for lane 0
        I prior_column[SLOTS];
        KN_UNROLL_ALL
        for (int s = 0; s < SLOTS; ++s)
            prior[s] = __shfl_sync(ALL, value[s], neighbour), prior_column[s] = __shfl_sync(ALL, column[s], neighbour);
        KN_UNROLL_ALL
        for (int s = SLOTS - 1; s >= 0; --s) {
            T p = prior[s];
            I p_column = prior_column[s];
            if (lane == 0) p = s ? prior[s ? s - 1 : 0] : T(-KN_INF), p_column = s ? prior_column[s ? s - 1 : 0] : I(-1);
            const bool behind = v < value[s] || (v == value[s] && j < column[s]);
            const bool prior_behind = v < p || (v == p && j < p_column);
            value[s] = prior_behind ? p : behind ? v : value[s];
            column[s] = prior_behind ? p_column : behind ? j : column[s];
        }
    }
    KN_FN void update_bound() {
        bound = __shfl_sync(ALL, value[SLOTS - 1], (K - 1) % 32);
        bound_column = __shfl_sync(ALL, column[SLOTS - 1], (K - 1) % 32);
    }
    /// Each lane has a column; those that are wanted are put in the list. @return whether there are any
    KN_FN bool take(bool wanted, T v, I j) {
        unsigned which = __ballot_sync(ALL, wanted);
        if (!which) return false;
#pragma unroll 1
        for (; which; which &= which - 1) {
            const int from = __ffs(which) - 1;
            insert(__shfl_sync(ALL, v, from), __shfl_sync(ALL, j, from));
        }
        update_bound();
        return true;
    }
    template <class P>
    KN_FN void store(const P& result) const {
        KN_UNROLL_ALL
        for (int s = 0; s < SLOTS; ++s) {
            const int place = 32 * s + static_cast<int>(threadIdx.x % 32);
            const bool empty = column[s] == no_column<I>();
            if (place < K) result.put(place, empty ? T(KN_NAN) : value[s], empty ? -1 : static_cast<long long>(column[s]));
        }
    }
};

// --- what Formula::pair reads: packs of R rows times Q columns, rows slowest ----------------------------------------------

/// The slots of the warp's rows, the same in all lanes.
template <class G>
struct WarpRows {
    const typename G::T (&x)[G::R][G::F::NROW ? G::F::NROW : 1];
    KN_FN Pack<typename G::T, G::R * G::Q> operator[](int s) const {
        Pack<typename G::T, G::R * G::Q> v;
        KN_UNROLL_ALL
        for (int k = 0; k < G::R * G::Q; ++k) v.v[k] = x[k / G::Q][s];
        return v;
    }
};

/// The slots of the lane's columns, which are 32 apart in the tile.
template <class G>
struct LaneColumns {
    const typename G::T* first;
    KN_FN Pack<typename G::T, G::R * G::Q> operator[](int s) const {
        typename G::T y[G::Q];
        KN_UNROLL_ALL
        for (int q = 0; q < G::Q; ++q) y[q] = first[s * G::TILE + 32 * q];
        Pack<typename G::T, G::R * G::Q> v;
        KN_UNROLL_ALL
        for (int k = 0; k < G::R * G::Q; ++k) v.v[k] = y[k % G::Q];
        return v;
    }
};

/// Takes 32 Q columns into the lists of the warp's rows.
/// @param limit the lists' limits
/// @param j number of the lane's first column
/// @param left columns from j on, if not FULL
template <class G, bool FULL>
KN_FN void take_columns(const WarpRows<G>& x, const typename G::T* first, int c0, typename G::State (&list)[G::R],
                        typename G::T (&limit)[G::R], typename G::I j, int left) {
    typedef typename G::T T;
    constexpr int R = G::R, Q = G::Q;
    Pack<T, R * Q> v[1];
    G::F::template pair<1, Pack<T, R * Q>>(x, LaneColumns<G>{first}, c0, v);
    T least[R];
    bool hit = false;
    KN_UNROLL_ALL
    for (int r = 0; r < R; ++r) {
        KN_UNROLL_ALL
        for (int q = 0; q < Q; ++q) {
            T& value = v[0].v[r * Q + q];
            if (!FULL && 32 * q >= left) value = T(KN_NAN);
            least[r] = q ? lesser(least[r], value) : value;
        }
        hit = hit || least[r] <= limit[r];
    }
    if (!__any_sync(0xffffffffu, hit)) return;
    KN_UNROLL_ALL
    for (int r = 0; r < R; ++r) {
        if (!__any_sync(0xffffffffu, least[r] <= limit[r])) continue;
        KN_UNROLL_ALL
        for (int q = 0; q < Q; ++q) {
            const T value = v[0].v[r * Q + q];
            if (list[r].take(value <= limit[r], value, j + 32 * q)) limit[r] = list[r].limit();
        }
    }
}

/// The tiled reduction for lists of warps; blocks are numbered as those of `reduce`.
template <class G>
KN_FN void reduce_lists(const typename G::Arguments& a) {
    typedef typename G::T T;
    typedef typename G::I I;
    typedef typename G::F F;
    constexpr int R = G::R, WARPS = G::THREADS / 32, STEP = 32 * G::Q;
    static_assert(G::C == 1 && G::TILE % STEP == 0, "one component, and whole steps in a tile");
    extern __shared__ __align__(16) unsigned char shared[];
    T* const tile = reinterpret_cast<T*>(shared);

    const BlockNumber number(a);
    const long long row_block = number.row_block;
    Where w;
    w.split = number.split;
    w.chunk = w.c0 = static_cast<int>(number.rest % G::CHUNKS);
    w.batch = number.rest / G::CHUNKS;
    const long long row = (row_block * WARPS + threadIdx.x / 32) * R;
    const long long from = w.split * a.span, to = from + a.span < a.n ? from + a.span : a.n;

    In<G> in(a, w.batch);
    T x[R][F::NROW ? F::NROW : 1];
    typename G::State list[R];
    T limit[R];
    KN_UNROLL_ALL
    for (int r = 0; r < R; ++r) {
        in.index = row + r < a.m ? row + r : a.m - 1;
        F::template row<T>(in, &x[r][0]);
        list[r].open();
        limit[r] = list[r].limit();
    }
    for (long long j0 = from; j0 < to; j0 += G::TILE) {
        const int count = to - j0 < G::TILE ? static_cast<int>(to - j0) : G::TILE;
        __syncthreads();
        for (int jj = threadIdx.x; jj < count; jj += G::THREADS) {
            in.index = j0 + jj;
            F::template col<T>(in, Slots<T, G::TILE>{tile + jj});
        }
        __syncthreads();
        if (row >= a.m) continue;
        const int lane = threadIdx.x % 32, whole = count / STEP * STEP;
#pragma unroll 1
        for (int k = 0; k < whole; k += STEP)
            take_columns<G, true>(WarpRows<G>{x}, tile + k + lane, w.c0, list, limit, I(j0 + k + lane), 0);
        if (whole < count)
            take_columns<G, false>(WarpRows<G>{x}, tile + whole + lane, w.c0, list, limit, I(j0 + whole + lane),
                                   count - whole - lane);
    }
    KN_UNROLL_ALL
    for (int r = 0; r < R; ++r) {
        w.row = row + r;
        if (w.row < a.m) list[r].store(G::Results::template places<G>(a, w, a.splits == 1));
    }
}

}  // namespace kn
