// Points in an order that keeps near ones together, and boxes around runs of them: what a pruned search (search.cuh) needs.
//
// The order is that of Morton keys. They are made of ranks and not of coordinates: the rank among a sorted sample of the
// set, and between two of the sample in proportion. So neither clusters nor points far away cost resolution. Points that
// have a NaN come last.
//
// A configuration G has, beside what data.cuh says:
//   D             number of coordinates
//   ROWS, COLS    numbers of the variables that hold the rows' and the columns' points
//   Key           long long or int, the type of a key
//   Search        kn::SearchArguments of its Arguments
//   K             columns that are searched for each row
//   LEVELS        of boxes: those of the lowest are around FAN columns each, all others around FAN boxes of the level below
#pragma once

namespace kn {

constexpr int TABLE = 1024, TABLE_THREADS = TABLE / 2;  // numbers of a sorted sample
constexpr int FAN = 32;                                 // one for each lane of a warp

/// Arguments of the kernels of a pruned search. Eight-byte fields only: kernops/backends/pruned_cuda.py packs them.
template <class A>
struct SearchArguments {
    A a;
    void* tables;               // (2, batch, D, TABLE) numbers: sorted samples of columns and of rows
    void* keys[2];              // (batch, n) and (batch, m): of columns and of rows
    const long long* order[2];  // (batch, n) and (batch, m): columns and rows by their keys
    void* points;               // (batch, blocks, D, FAN) numbers: the columns in order, NaN after the last
    int* index;                 // (batch, blocks, FAN): their numbers
    void* corners;              // (batch, 2 D, boxes) numbers: lower, then upper corners, the lowest level first
    int* lowest;                // (batch, boxes): the lowest number of a column within
    long long batches, blocks, boxes;  // of a batch element: boxes of the lowest level, and of all levels
    long long stride, most_work;       // of a trial: every how many rows, and the work that one may cause
    long long* work;                   // what the rows of a trial caused; null without trial
    long long all_work;                // if that is more, all pairs are compared instead
};

/// One set of points: columns or rows.
template <class G>
struct PointSet {
    typedef typename G::T T;
    int which;
    long long count;  // of a batch element

    KN_FN PointSet(const typename G::Search& s, int w) : which(w), count(w ? s.a.m : s.a.n) {}
    KN_FN T at(const In<G>& in, int d) const { return which ? in.at(G::ROWS, d) : in.at(G::COLS, d); }
    KN_FN T* table(const typename G::Search& s, long long batch, int d) const {
        return static_cast<T*>(s.tables) + ((which * s.batches + batch) * G::D + d) * TABLE;
    }
};

/// One block a sample: sorted by a bitonic network.
template <class G>
KN_FN void sample_tables(const typename G::Search& s) {
    typedef typename G::T T;
    __shared__ T table[TABLE];
    if (s.work && blockIdx.x == 0 && threadIdx.x == 0) *s.work = 0;
    const long long number = s.a.first + blockIdx.x;
    const int d = static_cast<int>(number % G::D);
    const long long batch = number / G::D % s.batches;
    const PointSet<G> set(s, static_cast<int>(number / G::D / s.batches));
    In<G> in(s.a, batch);
    for (int k = threadIdx.x; k < TABLE; k += TABLE_THREADS) {
        in.index = k * set.count / TABLE;
        const T v = set.at(in, d);
        table[k] = v == v ? v : T(KN_INF);
    }
    for (int size = 2; size <= TABLE; size *= 2) {
        for (int apart = size / 2; apart; apart /= 2) {
            __syncthreads();
            const int k = static_cast<int>(threadIdx.x) / apart * (2 * apart) + static_cast<int>(threadIdx.x) % apart;
            const T low = table[k], high = table[k + apart];
            if ((low > high) == ((k & size) == 0)) table[k] = high, table[k + apart] = low;
        }
    }
    __syncthreads();
    for (int k = threadIdx.x; k < TABLE; k += TABLE_THREADS) set.table(s, batch, d)[k] = table[k];
}

/// The place of a coordinate in a sorted sample, of 30 bits: 10 for its rank, 20 for where it lies between two.
template <class T>
KN_FN unsigned place_of(const T* table, T c) {
    constexpr int LAST = TABLE - 2;  // one less than all, so that ranks are below TABLE
    int low = 0, high = LAST + 1;    // how many of the sample are not above c
    while (low < high) {
        const int middle = (low + high) / 2;
        if (table[middle] <= c) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    T part;
    if (low == 0 || low == LAST + 1) {  // outside of the sample, however far
        const T away = (low ? c - table[LAST] : table[0] - c) / (table[LAST] - table[0]);
        const T near = T(1) / (T(1) + away);
        part = low ? T(1) - near : near;
    } else {
        part = (c - table[low - 1]) / (table[low] - table[low - 1]);
    }
    // NaN, where there are infinities or equals, becomes 0
    const unsigned between = static_cast<unsigned>(lesser(greater(part, T(0)), T(0.999999)) * T(1 << 20));
    return static_cast<unsigned>(low) << 20 | between;
}

/// One thread a point; columns come first.
template <class G>
KN_FN void point_keys(const typename G::Search& s) {
    typedef typename G::T T;
    typedef typename G::Key Key;
    constexpr int ALL = static_cast<int>(sizeof(Key)) * 8 - 1, BITS = ALL / G::D < 30 ? ALL / G::D : 30;
    const long long item = (s.a.first + blockIdx.x) * blockDim.x + threadIdx.x, columns = s.batches * s.a.n;
    if (item >= s.a.total) return;
    const PointSet<G> set(s, item >= columns);
    const long long at = item - (set.which ? columns : 0), batch = at / set.count;
    In<G> in(s.a, batch);
    in.index = at - batch * set.count;
    unsigned place[G::D];
    bool valid = true;
    KN_UNROLL_ALL
    for (int d = 0; d < G::D; ++d) {
        const T c = set.at(in, d);
        valid = valid && c == c;
        place[d] = place_of(set.table(s, batch, d), c) << 2;  // the highest bit first
    }
    unsigned long long key = 0;
    for (int b = 0; b < BITS; ++b)
        KN_UNROLL_ALL
        for (int d = 0; d < G::D; ++d) key = key << 1 | place[d] >> 31, place[d] <<= 1;
    static_cast<Key*>(s.keys[set.which])[at] = static_cast<Key>(valid ? key : ~0ull >> (64 - ALL));
}

// --- boxes -------------------------------------------------------------------------------------------------------------

template <class T>
KN_FN T warp_least(T v) {
    KN_UNROLL_ALL
    for (int offset = 16; offset; offset /= 2) v = lesser(v, __shfl_xor_sync(0xffffffffu, v, offset));
    return v;
}
template <class T>
KN_FN T warp_greatest(T v) {
    KN_UNROLL_ALL
    for (int offset = 16; offset; offset /= 2) v = greater(v, __shfl_xor_sync(0xffffffffu, v, offset));
    return v;
}
KN_FN int warp_lowest(int v) {
    KN_UNROLL_ALL
    for (int offset = 16; offset; offset /= 2) {
        const int other = __shfl_xor_sync(0xffffffffu, v, offset);
        v = other < v ? other : v;
    }
    return v;
}

/// A box around points; one around none is inside out and infinitely far from everything.
template <class T, int D>
struct Box {
    T lower[D], upper[D];

    KN_FN void clear() {
        KN_UNROLL_ALL
        for (int d = 0; d < D; ++d) lower[d] = T(KN_INF), upper[d] = T(-KN_INF);
    }
    KN_FN void add(const T (&low)[D], const T (&high)[D]) {
        KN_UNROLL_ALL
        for (int d = 0; d < D; ++d) lower[d] = lesser(lower[d], low[d]), upper[d] = greater(upper[d], high[d]);
    }
    /// The box around those of all lanes.
    KN_FN void join_lanes() {
        KN_UNROLL_ALL
        for (int d = 0; d < D; ++d) lower[d] = warp_least(lower[d]), upper[d] = warp_greatest(upper[d]);
    }
};

/// The boxes of one batch element.
template <class G>
struct Boxes {
    typedef typename G::T T;
    static constexpr int D = G::D;
    T* corners;
    int* lowest;
    int all;
    int first[G::LEVELS], count[G::LEVELS];  // of each level

    KN_FN Boxes(const typename G::Search& s, long long batch) : all(static_cast<int>(s.boxes)) {
        corners = static_cast<T*>(s.corners) + batch * 2 * D * s.boxes, lowest = s.lowest + batch * s.boxes;
        int before = 0, n = static_cast<int>(s.blocks);
        KN_UNROLL_ALL
        for (int level = 0; level < G::LEVELS; ++level) first[level] = before, count[level] = n, before += n, n = (n + FAN - 1) / FAN;
    }
    KN_FN Box<T, D> at(long long k) const {
        Box<T, D> box;
        KN_UNROLL_ALL
        for (int d = 0; d < D; ++d) {
            box.lower[d] = corners[static_cast<long long>(d) * all + k];
            box.upper[d] = corners[static_cast<long long>(D + d) * all + k];
        }
        return box;
    }
    /// Box k is the one around the boxes or points of all lanes.
    KN_FN void put(long long k, Box<T, D>& box, int low) const {
        box.join_lanes();
        low = warp_lowest(low);
        if (threadIdx.x % 32) return;
        KN_UNROLL_ALL
        for (int d = 0; d < D; ++d) {
            corners[static_cast<long long>(d) * all + k] = box.lower[d];
            corners[static_cast<long long>(D + d) * all + k] = box.upper[d];
        }
        lowest[k] = low;
    }
};

/// One warp a box of the lowest level: the columns within are copied side by side.
template <class G>
KN_FN void pack_points(const typename G::Search& s) {
    typedef typename G::T T;
    constexpr int D = G::D;
    const int lane = threadIdx.x % 32;
    const long long number = ((s.a.first + blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    if (number >= s.batches * s.blocks) return;
    const long long batch = number / s.blocks, block = number - batch * s.blocks, place = block * FAN + lane;
    const bool exists = place < s.a.n;
    In<G> in(s.a, batch);
    in.index = s.order[0][batch * s.a.n + (exists ? place : s.a.n - 1)];
    const int column = static_cast<int>(in.index);
    T y[D];
    bool valid = exists;
    KN_UNROLL_ALL
    for (int d = 0; d < D; ++d) {
        y[d] = exists ? in.at(G::COLS, d) : T(KN_NAN);
        valid = valid && y[d] == y[d];
        static_cast<T*>(s.points)[(number * D + d) * FAN + lane] = y[d];
    }
    s.index[number * FAN + lane] = column;
    Box<T, D> box;
    box.clear();
    if (valid) box.add(y, y);
    Boxes<G>(s, batch).put(block, box, valid ? column : no_column<int>());
}

/// One warp a box of an upper level, LEVEL.
template <class G, int LEVEL>
KN_FN void pack_boxes(const typename G::Search& s) {
    const long long number = ((s.a.first + blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    if (number >= s.a.total) return;
    const long long each = s.a.total / s.batches, batch = number / each, node = number - batch * each;
    const Boxes<G> boxes(s, batch);
    const long long child = node * FAN + threadIdx.x % 32;
    Box<typename G::T, G::D> box;
    box.clear();
    int lowest = no_column<int>();
    if (child < boxes.count[LEVEL - 1])
        box = boxes.at(boxes.first[LEVEL - 1] + child), lowest = boxes.lowest[boxes.first[LEVEL - 1] + child];
    boxes.put(boxes.first[LEVEL] + node, box, lowest);
}

}  // namespace kn
