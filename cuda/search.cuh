// The K nearest columns in few dimensions without a look at most of them: the same columns, values and order among equals
// as by comparing all pairs.
//
// A warp searches for one row. It goes down the levels of boxes (boxes.cuh), each lane having a box, the nearest first.
// A box is looked into if its lower bound is less than the value of the K-th column so far, or equal to it and a column
// within has a lower number. Columns come in no order, so equals are put in order by number. Rows are taken in the order
// of their keys: those that run at the same time read the same boxes.
//
// A trial with some of the rows counts how much is looked at. If it is too much, the search does nothing and the kernels of
// the tiled reduction, launched after it, do everything; else they do nothing. The host does not wait for it.
#pragma once

namespace kn {

/// The least of the lanes' numbers.
KN_FN unsigned warp_least_key(unsigned key) {
#if __CUDA_ARCH__ >= 800
    return __reduce_min_sync(0xffffffffu, key);
#else
    KN_UNROLL_ALL
    for (int offset = 16; offset; offset /= 2) {
        const unsigned other = __shfl_xor_sync(0xffffffffu, key, offset);
        key = other < key ? other : key;
    }
    return key;
#endif
}

/// The coordinates of a point, or their differences.
template <class T, int D>
struct Point {
    T x[D];
    KN_FN Pack<T, 1> operator[](int s) const { return {{x[s]}}; }
};

/// The value of a pair. Not inlined, so that values and lower bounds are computed by the very same instructions.
template <class G>
KN_SLOW typename G::T pair_value(Point<typename G::T, G::D> x, Point<typename G::T, G::D> y) {
    Pack<typename G::T, 1> v[1];
    G::F::template pair<1, Pack<typename G::T, 1>>(x, y, 0, v);
    return v[0].v[0];
}

/// A lower bound of the values of a row x with all columns y in a box: the value for the gap between the row and the box.
///
/// It needs no margin for rounding. Along an axis let the box lie above the row, x < lower <= y; below it, all is the same.
/// The gap is g = fl(lower - x). Subtraction is rounded to nearest, hence monotonic: g <= fl(y - x) = |t|, where t is the
/// difference that the formula squares. It squares exactly g for the pair (g, 0), because fl(g - 0) = g. What follows,
/// squares and sums, fused or not, in an order that is the same because the instructions are, is rounded to nearest and
/// monotonic in each |t|. So the bound is not greater than the value; and for a box of equal points it is their value, so
/// that equals are told by their numbers. A gap of NaN, of infinite coordinates, counts as 0; such pairs are never chosen.
template <class G>
KN_FN typename G::T lower_bound(const Point<typename G::T, G::D>& row, const Box<typename G::T, G::D>& box) {
    typedef typename G::T T;
    Point<T, G::D> gap, zero;
    KN_UNROLL_ALL
    for (int d = 0; d < G::D; ++d)
        gap.x[d] = greater(greater(box.lower[d] - row.x[d], row.x[d] - box.upper[d]), T(0)), zero.x[d] = T(0);
    return pair_value<G>(gap, zero);
}

/// The search for one row.
template <class G>
struct RowSearch {
    typedef typename G::T T;
    static constexpr int D = G::D;
    static constexpr unsigned NONE = 0xffffffffu;

    const Boxes<G> boxes;
    const T* points;
    const int* index;
    Point<T, D> row;
    WarpList<T, int, G::K> list;
    long long work;  // boxes looked at

    KN_FN RowSearch(const typename G::Search& s, long long batch, const Point<T, D>& x)
        : boxes(s, batch), row(x), work(0) {
        points = static_cast<const T*>(s.points) + batch * s.blocks * (D * FAN);
        index = s.index + batch * s.blocks * FAN;
        list.open();
    }
    /// A column for each lane.
    KN_FN void look(int block) {
        const int lane = threadIdx.x % 32;
        const T* const first = points + static_cast<long long>(block) * (D * FAN) + lane;
        Point<T, D> y;
        KN_UNROLL_ALL
        for (int d = 0; d < D; ++d) y.x[d] = first[d * FAN];
        const int column = index[static_cast<long long>(block) * FAN + lane];
        const T value = pair_value<G>(row, y);
        list.take(list.admits(value, column), value, column);
    }
    /// The boxes of a level within a box of the level above, or all of the uppermost level.
    template <int LEVEL>
    KN_FN void visit(int node, long long most_work) {
        const int lane = threadIdx.x % 32, child = node * FAN + lane;
        const bool exists = child < boxes.count[LEVEL];
        const int box = boxes.first[LEVEL] + (exists ? child : 0);
        const T away = lower_bound<G>(row, boxes.at(box));
        const int lowest = boxes.lowest[box];
        // In the order of the bounds, roughly, and different in each lane.
        const unsigned order = (__float_as_uint(static_cast<float>(away)) & ~31u) | lane;
        bool waits = exists;
        while (work < most_work) {
            const unsigned least = warp_least_key(waits && list.admits(away, lowest) ? order : NONE);
            if (least == NONE) return;
            const int chosen = least % 32;
            if (lane == chosen) waits = false;
            ++work;
            if constexpr (LEVEL == 0) {
                look(node * FAN + chosen);
            } else {
                visit<LEVEL - 1>(node * FAN + chosen, most_work);
            }
        }
    }
};

/// One warp a row.
/// @tparam TRIAL whether to search for some rows only, and to count
template <class G, bool TRIAL>
KN_FN void search_rows(const typename G::Search& s) {
    typedef typename G::T T;
    constexpr int D = G::D, K = G::K;
    if (!TRIAL && s.work && *s.work > s.all_work) return;
    const long long warp = ((s.a.first + blockIdx.x) * blockDim.x + threadIdx.x) / 32, number = TRIAL ? warp * s.stride : warp;
    if (number >= s.batches * s.a.m) return;
    const long long batch = number / s.a.m;
    In<G> in(s.a, batch);
    in.index = s.order[1][number];
    Point<T, D> x;
    bool valid = true;
    KN_UNROLL_ALL
    for (int d = 0; d < D; ++d) x.x[d] = in.at(G::ROWS, d), valid = valid && x.x[d] == x.x[d];
    const long long most_work = TRIAL ? s.most_work : 0x7fffffffffffffff;
    RowSearch<G> search(s, batch, x);
    if (valid) search.template visit<G::LEVELS - 1>(0, most_work);  // else the list stays empty
    if (!TRIAL) {
        const long long at = (batch * s.a.m + in.index) * K;
        search.list.store(Places<T>{static_cast<T*>(s.a.value) + at, static_cast<long long*>(s.a.second) + at, 1});
    } else if (threadIdx.x % 32 == 0) {
        const long long work = search.work < most_work ? search.work : s.boxes;
        atomicAdd(reinterpret_cast<unsigned long long*>(s.work), static_cast<unsigned long long>(work));
    }
}

/// A kernel of the tiled reduction, after a search: it has something to do if the trial found too much work.
template <class G, class Kernel>
KN_FN void otherwise(const typename G::Search& s, const Kernel& kernel) {
    if (*s.work > s.all_work) kernel(s.a);
}

}  // namespace kn
