// KMin: the K smallest values of each component of each row, and their columns. Equal values: the lowest column first.
// NaN is never among them; places that nothing fills hold NaN and column -1.
//
// All values of a step are compared with the rows' K-th smallest so far; few pass, and those are sorted in one at a time.
// In sorted data each column might be nearer than all before it, and pass. So columns are visited in several passes, a coarse
// sample first: after it only columns among the nearest 32 K or so pass, in whatever order they come. For squared distances
// of many components, bounds (bytes.h) show of most columns that they would not, and then their values are not computed.
#pragma once

#include "bytes.h"
#include "driver.h"
#include "lanes.h"

namespace kn {

constexpr int LONGEST_LIST = 256;  // more neighbours are kept in a heap
constexpr int64_t THINNING = 32;     // one block in so many belongs to an earlier pass; a power of two

/// Whether (a, i) comes before (b, j).
template <class T, class Int>
KN_FN bool before(T a, Int i, T b, Int j) {
    return a < b || (a == b && i < j);
}

/// The smallest K, sorted.
template <class T, int K>
struct List {
    typedef typename Simd<T>::Int Int;
    static constexpr int L = LANES<T>, VECTORS = (K + L - 1) / L;
    // Element 0 stands before everything; the elements after the K-th are what fell out.
    T value[1 + VECTORS * L];
    Int column[1 + VECTORS * L];
    int count;

    void init() {
        count = 0;
        value[0] = T(-KN_INF), column[0] = -1;
    }
    bool full() const { return count == K; }
    T worst() const { return value[K]; }
    Int worst_column() const { return column[K]; }
    void fill(T v, Int j) {
        int k = ++count;
        for (; k > 1 && before(v, j, value[k - 1], column[k - 1]); --k) value[k] = value[k - 1], column[k] = column[k - 1];
        value[k] = v, column[k] = j;
    }
    /// For a full list and what comes before its worst.
    KN_FN void insert(T v, Int j) {
        const Vec<T> x = kn::fill(v);
        const Vec<Int> at = kn::fill(j);
        for (int k = VECTORS - 1; k >= 0; --k) {
            const Vec<T> here = load(value + 1 + k * L), prior = load(value + k * L);
            const Vec<Int> here_at = load(column + 1 + k * L), prior_at = load(column + k * L);
            const Vec<Int> shift = or_(lt(x, prior), and_(eq(x, prior), lt(at, prior_at)));
            const Vec<Int> place = or_(lt(x, here), and_(eq(x, here), lt(at, here_at)));
            if (!any(place)) break;
            store(value + 1 + k * L, select(shift, prior, select(place, x, here)));
            store(column + 1 + k * L, select(shift, prior_at, select(place, at, here_at)));
        }
    }
    void sort() {}
    T sorted_value(int k) const { return value[1 + k]; }
    Int sorted_column(int k) const { return column[1 + k]; }
};

/// The smallest K as a heap, the worst on top.
template <class T, int K>
struct Heap {
    typedef typename Simd<T>::Int Int;
    T value[K];
    Int column[K];
    int count;

    void init() { count = 0; }
    bool full() const { return count == K; }
    T worst() const { return value[0]; }
    Int worst_column() const { return column[0]; }
    void fill(T v, Int j) {
        int k = count++;
        for (; k > 0 && before(value[(k - 1) / 2], column[(k - 1) / 2], v, j); k = (k - 1) / 2) move(k, (k - 1) / 2);
        value[k] = v, column[k] = j;
    }
    void insert(T v, Int j) { sink(v, j, K); }
    void sort() {
        for (int size = count - 1; size > 0; --size) {
            const T v = value[size];
            const Int j = column[size];
            move(size, 0);
            sink(v, j, size);
        }
    }
    T sorted_value(int k) const { return value[k]; }
    Int sorted_column(int k) const { return column[k]; }

private:
    void move(int to, int from) { value[to] = value[from], column[to] = column[from]; }
    /// Puts (v, j) in place of the top of a heap of `size`.
    void sink(T v, Int j, int size) {
        int k = 0;
        for (int child; (child = 2 * k + 1) < size; k = child) {
            if (child + 1 < size && before(value[child], column[child], value[child + 1], column[child + 1])) ++child;
            if (!before(v, j, value[child], column[child])) break;
            move(k, child);
        }
        value[k] = v, column[k] = j;
    }
};

/// v <= next_below(x) says that v < x (and, where x is -Inf, that it may be).
KN_FN float next_below(float x) { return x == -__builtin_inff() ? x : __builtin_nextafterf(x, -__builtin_inff()); }
KN_FN double next_below(double x) { return x == -__builtin_inf() ? x : __builtin_nextafter(x, -__builtin_inf()); }

template <class T, class F, class S>
struct Neighbors {
    typedef T Real;
    typedef F Formula;
    static constexpr int R = S::R, U = S::U, BLOCKS = S::BLOCKS, TILE = S::TILE, K = F::K, L = LANES<T>;
    static constexpr int CELLS = F::DIM, WORK = S::WORK;
    typedef typename Simd<T>::Int Int;
    typedef Layout<T, F, U> Blocks;
    template <bool SHORT, int N>
    struct Choice {
        typedef List<T, N> type;
    };
    template <int N>
    struct Choice<false, N> {
        typedef Heap<T, N> type;
    };
    typedef typename Choice<(K <= LONGEST_LIST), K>::type Best;

    struct Cell {
        T value[K];
        int64_t column[K];

        void merge(const Cell& o) {
            Cell all;
            for (int k = 0, a = 0, b = 0; k < K; ++k) {
                // -1 marks the end of either
                const bool mine = o.column[b] < 0 || (column[a] >= 0 && before(value[a], column[a], o.value[b], o.column[b]));
                all.value[k] = mine ? value[a] : o.value[b], all.column[k] = mine ? column[a] : o.column[b];
                ++(mine ? a : b);
            }
            *this = all;
        }
    };
    struct Rows {
        T limit[R];  // a value up to it may come before the worst of the row's best
        bool full;   // whether that holds for all rows; else every value must be looked at
        int vain;    // blocks of columns that lower bounds had nothing to say about, less others
        Best best[R];
    };

    static constexpr bool BYTES = HasBytes<T, F>::value;  // whether lower bounds are to be had
    struct NoBounds {
        static size_t bytes(int64_t) { return 0; }
        NoBounds(char*, const T*, int64_t, bool) {}
        bool on() const { return false; }
    };
#if defined(KN_BYTES_PRODUCT)
    template <bool, class G>
    struct BoundsOf {
        typedef Bytes<G, S> type;
    };
    template <class G>
    struct BoundsOf<false, G> {
        typedef NoBounds type;
    };
    typedef typename BoundsOf<BYTES, F>::type Bounds;
#else
    typedef NoBounds Bounds;
#endif
    static constexpr int64_t BOUNDED_ROWS = 24;  // of a group, that make it worth while to round columns
    static constexpr int MOST_VAIN = 32;         // blocks; then bounds are no more asked for

    static size_t scratch(int64_t blocks) {
        return round_up(blocks * sizeof(Rows), 64) + round_up(sizeof(Cell), 64) + Bounds::bytes(blocks);
    }

    /// The limit of a full row, for columns from `next` on: an equal of the worst comes before it in a lower column only.
    static void set_limit(Rows& s, int r, Int next) {
        const T worst = s.best[r].worst();
        s.limit[r] = s.best[r].worst_column() > next ? worst : next_below(worst);
    }
    /// Looks at the values of a step: `count` columns from `at` on.
    static KN_SLOW void take(Rows& s, const Pack<T, R * U>& v, Int at, int count) {
        bool full = true;
        for (int r = 0; r < R; ++r) {
            Best& best = s.best[r];
            const bool filling = !best.full();
            bool seen = filling;
            for (int u = 0; u < U; ++u) {
                const Vec<T> here = v.v[u * R + r];
                unsigned pass = filling ? ~0u : bits_le(here, kn::fill(s.limit[r]));
                pass &= (1u << L) - 1;
                if (count < (u + 1) * L) pass &= (1u << larger(0, count - u * L)) - 1;
                if (!pass) continue;
                seen = true;
                T value[L];
                store(value, here);
                for (; pass; pass &= pass - 1) {
                    const int k = __builtin_ctz(pass);
                    const Int j = at + Int(u * L + k);
                    if (best.full()) {
                        if (before(value[k], j, best.worst(), best.worst_column())) best.insert(value[k], j);
                    } else if (value[k] == value[k]) {
                        best.fill(value[k], j);
                    }
                }
            }
            if (seen && best.full()) set_limit(s, r, at + Int(Blocks::WIDTH));
            full = full && best.full();
        }
        s.full = full;
    }

    /// The values of the pairs that lower bounds leave over, +Inf for all others. @return whether there are any.
    template <class Bounds>
    static KN_FN bool left_over(Rows& s, const Bounds& bounds, int64_t k, int64_t at, const int32_t* bound, const T* rows,
                                const T* columns, Pack<T, R * U>& v) {
        unsigned found = bounds.near(k, at, bound);
        if (__builtin_popcount(found) > FEW) {
            ++s.vain;
            values(rows, columns, 0, v);
            return true;
        }
        s.vain -= s.vain > 0;
        if (!found) return false;
        v = splat<Pack<T, R * U>>(KN_INF);
        while (found) {
            int p[AT_ONCE];
            for (int k = 0; k < AT_ONCE; ++k) {
                p[k] = found ? __builtin_ctz(found) : p[k - 1];
                found &= found - (found != 0);
            }
            contract_some<T, F, R, U, 0, AT_ONCE>(rows, columns, p, reinterpret_cast<T*>(v.v));
        }
        return true;
    }
    static constexpr int AT_ONCE = 4;      // pairs: as many sums as hide the latency of one
    static constexpr int FEW = R * U / 2;  // so many pairs take as long on their own as the whole block does
    KN_FN static void values(const T* rows, const T* columns, int c, Pack<T, R * U>& v) {
        evaluate<T, F, S, 1>(rows, columns, &v,
                             [&](const auto& x, const auto& y, auto* to) { F::template pair<1>(x, y, c, to); });
    }

    /// Every `stride`-th block of first .. last - 1, but not every `done`-th (a power of two, or 0 for none), for block k of
    /// rows.
    static KN_SLOW void tile(Rows& s, const Piece<T>& piece, const Bounds& bounds, double off, int64_t k,
                             int64_t first, int64_t last, int64_t stride, int64_t done, int c) {
        const T* const rows = piece.rows + k * R * F::ROWS;
        int32_t bound[R];
        bool known = false;  // the bounds for the limits as they are
        for (int64_t block = first, at = 0; block < last; block += stride, ++at) {
            if (done && !(block & (done - 1))) continue;
            const T* const columns = piece.columns + block * Blocks::STRIDE;
            Pack<T, R * U> v;
            if constexpr (BYTES) {
                if (bounds.on() && s.full && s.vain < MOST_VAIN) {
                    for (int r = 0; r < R && !known; ++r) bound[r] = bounds.bound(k, r, s.limit[r], off);
                    known = true;
                    if (!left_over(s, bounds, k, at, bound, rows, columns, v)) continue;
                } else {
                    values(rows, columns, c, v);
                }
            } else {
                values(rows, columns, c, v);
            }
            unsigned pass = 0;
            KN_UNROLL(16)
            for (int r = 0; r < R; ++r) {
                Vec<T> least = fill(T(KN_INF));
                KN_UNROLL(16)
                for (int u = 0; u < U; ++u) least = lesser(v.v[u * R + r], least);
                pass |= bits_le(least, fill(s.limit[r]));
            }
            if (__builtin_expect(pass != 0 || !s.full, 0)) {
                const Pack<T, R * U> copy = v;  // so that v itself need not lie in memory
                take(s, copy, Int(block * Blocks::WIDTH),
                     int(smaller<int64_t>(Blocks::WIDTH, piece.width - block * Blocks::WIDTH)));
                known = false;
            }
        }
    }

    template <class Give>
    static void compute(const Piece<T>& piece, char* scratch, const Give& give) {
        Rows* const state = reinterpret_cast<Rows*>(scratch);
        Cell& cell = *reinterpret_cast<Cell*>(scratch + round_up(piece.blocks * sizeof(Rows), 64));
        Bounds bounds(scratch + round_up(piece.blocks * sizeof(Rows), 64) + round_up(sizeof(Cell), 64), piece.rows,
                      piece.blocks, piece.blocks * R >= BOUNDED_ROWS && piece.width > 64 * K);
        int64_t coarsest = 1;
        while (coarsest * THINNING < piece.column_blocks) coarsest *= THINNING;
        for (int c = 0; c < F::DIM; ++c) {
            for (int64_t k = 0; k < piece.blocks; ++k) {
                state[k].full = false, state[k].vain = 0;
                for (int r = 0; r < R; ++r) state[k].best[r].init(), state[k].limit[r] = T(KN_NAN);
            }
            for (int64_t stride = coarsest; stride > 0; stride /= THINNING) {
                const int64_t done = stride == coarsest ? 0 : stride * THINNING, step = TILE * stride;
                for (int64_t k = 0; k < piece.blocks; ++k)
                    for (int r = 0; r < R; ++r)
                        if (state[k].best[r].full()) set_limit(state[k], r, 0);
                for (int64_t first = 0; first < piece.column_blocks; first += step) {
                    const int64_t last = smaller(first + step, piece.column_blocks);
                    double off = 0;
                    if constexpr (BYTES) {
                        bounds.begin_tile();
                        for (int64_t block = first, at = 0; bounds.on() && block < last; block += stride, ++at)
                            if (!(done && !(block & (done - 1))))
                                bounds.round_columns(piece.columns + block * Blocks::STRIDE, at);
                        off = bounds.end_tile();
                    }
                    for (int64_t k = 0; k < piece.blocks; ++k)
                        tile(state[k], piece, bounds, off, k, first, last, stride, done, c);
                    if constexpr (BYTES) {
                        bool asked = false;
                        for (int64_t k = 0; k < piece.blocks; ++k) asked = asked || state[k].vain < MOST_VAIN;
                        if (!asked) bounds.stop();
                    }
                }
            }
            for (int64_t k = 0; k < piece.blocks; ++k)
                for (int r = 0; r < R; ++r) {
                    Best& best = state[k].best[r];
                    best.sort();
                    for (int i = 0; i < K; ++i) {
                        const bool there = i < best.count;
                        cell.value[i] = there ? best.sorted_value(i) : T(KN_NAN);
                        cell.column[i] = there ? piece.first + best.sorted_column(i) : -1;
                    }
                    give(k, r, c, cell);
                }
        }
    }

    template <class Row>
    static void write(const Row&, int64_t place, int c, const Cell& cell, void* const* out) {
        for (int64_t i = 0; i < K; ++i) {
            const int64_t to = (place * K + i) * F::DIM + c;
            static_cast<T*>(out[0])[to] = cell.value[i];
            static_cast<int64_t*>(out[1])[to] = cell.column[i];
        }
    }
};

}  // namespace kn
