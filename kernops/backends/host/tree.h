// Points in the order of a balanced k-d tree, and the boxes around runs of them.
//
// The order is made by cutting a range in two at its median along the axis on which it is widest, again and again. (Unlike
// Morton keys the cuts follow the data: an outlier or a cluster costs no resolution.) Runs of BLOCK points are the leaves;
// FAN runs make one of the next level. Cuts fall on multiples of whole runs, so that each run of a level is one part of
// space. Points compare by coordinate and then by index: the order is one and the same for any number of threads.
#pragma once

#include "driver.h"

namespace kn {

constexpr int64_t ROWS = 16;   // queries that go down the tree together
constexpr int64_t BLOCK = 32;  // points of a leaf
constexpr int64_t FAN = 16;    // children of a node

/// A matrix in memory.
template <class T>
struct Matrix {
    const T* base;
    int64_t rows, row_step, step;
    KN_FN T at(int64_t i, int d) const { return base[i * row_step + d * step]; }
};

template <class T, int D>
struct Point {
    T x[D];
    int32_t index;

    KN_FN bool before(const Point& o, int axis) const {
        return bool((x[axis] < o.x[axis]) | ((x[axis] == o.x[axis]) & (index < o.index)));
    }
};

// --- the order --------------------------------------------------------------------------------------------------------
/// Where a range of n > ROWS points is cut: near the middle, at a multiple of the largest run that is shorter than it.
inline int64_t cut_of(int64_t n) {
    int64_t run = n > BLOCK ? BLOCK : ROWS;
    while (run >= BLOCK && run * FAN < n) run *= FAN;
    return (n / 2 + run / 2) / run * run;
}

constexpr int64_t SAMPLE = 64;

/// The axis on which a sample of the points is widest.
template <class T, int D>
int widest(const Point<T, D>* p, int64_t n) {
    const int64_t step = larger<int64_t>(1, n / SAMPLE);
    T lower[D], upper[D];
    for (int d = 0; d < D; ++d) lower[d] = upper[d] = p[0].x[d];
    for (int64_t k = step; k < n; k += step)
        for (int d = 0; d < D; ++d) {
            lower[d] = smaller(lower[d], p[k].x[d]);
            upper[d] = larger(upper[d], p[k].x[d]);
        }
    int axis = 0;
    T width = -1;  // Inf - Inf is NaN, and never wider
    for (int d = 0; d < D; ++d)
        if (upper[d] - lower[d] > width) axis = d, width = upper[d] - lower[d];
    return axis;
}

/// Puts the `rank` first points along an axis before the others.
template <class T, int D>
void select_first(Point<T, D>* p, int64_t n, int64_t rank, int axis) {
    typedef Point<T, D> P;
    while (rank > 0 && rank < n) {
        // The pivot has that rank in a sample, so that one of the two parts is short as a rule.
        P sample[SAMPLE];
        const int64_t count = smaller(SAMPLE, larger<int64_t>(1, n / 16)), step = n / count;
        for (int64_t k = 0; k < count; ++k) {
            const P one = p[k * step + step / 2];
            int64_t to = k;
            for (; to > 0 && one.before(sample[to - 1], axis); --to) sample[to] = sample[to - 1];
            sample[to] = one;
        }
        const P pivot = sample[rank * count / n];
        int64_t first = 0;  // points before the pivot; no branch depends on the data
        for (int64_t k = 0; k < n; ++k) {
            const P one = p[k];
            p[k] = p[first];
            p[first] = one;
            first += one.before(pivot, axis);
        }
        if (first >= rank) {
            n = first;
        } else if (first > 0) {
            p += first, n -= first, rank -= first;
        } else {  // the pivot is the first of all
            for (int64_t k = 0; k < n; ++k)
                if (p[k].index == pivot.index) {
                    p[k] = p[0];
                    p[0] = pivot;
                    break;
                }
            ++p, --n, --rank;
        }
    }
}

template <class T, int D>
int64_t cut(Point<T, D>* p, int64_t n) {
    const int64_t left = cut_of(n);
    select_first(p, n, left, widest(p, n));
    return left;
}
template <class T, int D>
void order(Point<T, D>* p, int64_t n) {
    while (n > ROWS) {
        const int64_t left = cut(p, n);
        order(p, left);
        p += left, n -= left;
    }
}

/// The points of a matrix without those that have NaN, in the order of the tree.
template <class T, int D>
class Ordered {
    typedef Point<T, D> P;

public:
    explicit Ordered(const Matrix<T>& from) : buffer_(from.rows * sizeof(P)), count_(0) {
        if (!points()) return;
        for (int64_t i = 0; i < from.rows; ++i) {
            P& one = points()[count_];
            bool valid = true;
            for (int d = 0; d < D; ++d) one.x[d] = from.at(i, d), valid &= one.x[d] == one.x[d];
            one.index = int32_t(i);
            count_ += valid;
        }
    }
    void sort(int64_t threads) {
        struct Range {
            P* p;
            int64_t n;
        } ranges[PARTS];
        threads = larger<int64_t>(1, smaller(threads, count_ / 4096));
        ranges[0] = {points(), count_};
        int64_t parts = 1;
        for (; parts < PARTS && threads > 1; parts *= 2)
            parallel(threads, parts, [&](int64_t k, int64_t) {
                Range& a = ranges[k];
                const int64_t left = a.n > ROWS ? cut(a.p, a.n) : a.n;
                ranges[k + parts] = {a.p + left, a.n - left};
                a.n = left;
            });
        parallel(threads, parts, [&](int64_t k, int64_t) { order(ranges[k].p, ranges[k].n); });
    }
    P* points() const { return reinterpret_cast<P*>(buffer_.get()); }
    int64_t count() const { return count_; }

private:
    static constexpr int64_t PARTS = 64;
    Buffer buffer_;
    int64_t count_;
};

// --- boxes ------------------------------------------------------------------------------------------------------------
/// The sum of squares of D numbers: of differences and of gaps alike, rounded in the same way. Rounding keeps order, so that
/// a box is never farther by these numbers than a point within it.
template <int D, class V>
KN_FN V squared_norm(const V (&t)[D]) {
    V s = splat<V>(0.0);
    KN_UNROLL(16)
    for (int d = 0; d < D; ++d) s = s + t[d] * t[d];
    return s;
}
/// The distance between two intervals; 0 where infinite ends make it NaN.
template <class V>
KN_FN V gap(V a_lower, V a_upper, V b_lower, V b_upper) {
    return greater(greater(b_lower - a_upper, a_lower - b_upper), splat<V>(0.0));
}

/// Blocks of points with boxes around them, boxes around FAN of those, and so on until FAN or fewer are left.
template <class T, int D>
class Tree {
public:
    static constexpr int MOST = 9;  // levels for 2^31 points
    /// FAN boxes that lie side by side: lower ends and upper ends by axis.
    struct Boxes {
        T lower[D][FAN], upper[D][FAN];
        int32_t first_index[FAN];  // the lowest index within
    };

    explicit Tree(const Ordered<T, D>& points)
        : count_(points.count()), blocks_((count_ + BLOCK - 1) / BLOCK), levels_(0), boxes_count_(0),
          memory_(blocks_ * (BLOCK * (D * sizeof(T) + sizeof(int32_t)))), boxes_(count_boxes() * sizeof(Boxes)) {}
    bool there() const { return memory_.get() && boxes_.get(); }

    void fill(const Ordered<T, D>& points, int64_t threads) {
        constexpr int64_t STEP = 8;  // nodes of an item
        const int64_t parents = (blocks_ + FAN - 1) / FAN;
        threads = larger<int64_t>(1, smaller(threads, count_ / 16384));
        parallel(threads, (parents + STEP - 1) / STEP, [&](int64_t item, int64_t) {
            for (int64_t k = item * STEP * FAN; k < smaller((item + 1) * STEP * FAN, blocks_); ++k)
                pack(points.points() + k * BLOCK, smaller(BLOCK, count_ - k * BLOCK), k);
        });
        for (int level = 1; level < levels_; ++level)
            for (int64_t k = 0; k < nodes(level); ++k) surround(level, k);
    }

    int levels() const { return levels_; }
    int64_t nodes(int level) const { return nodes_[level]; }
    /// The boxes of nodes FAN k .. FAN k + FAN - 1 of a level.
    Boxes& boxes(int level, int64_t k) const { return reinterpret_cast<Boxes*>(boxes_.get())[start_[level] + k]; }
    /// The coordinates [axis][point] and the indices of a block; points past the end are NaN.
    T* coordinates(int64_t block) const { return reinterpret_cast<T*>(memory_.get()) + block * D * BLOCK; }
    int32_t* indices(int64_t block) const {
        return reinterpret_cast<int32_t*>(memory_.get() + blocks_ * D * BLOCK * sizeof(T)) + block * BLOCK;
    }

private:
    int64_t count_boxes() {
        for (int64_t n = blocks_;; n = (n + FAN - 1) / FAN) {
            nodes_[levels_] = n, start_[levels_++] = boxes_count_;
            boxes_count_ += larger<int64_t>(1, (n + FAN - 1) / FAN);
            if (n <= FAN) return boxes_count_;
        }
    }
    void pack(const Point<T, D>* p, int64_t n, int64_t block) {
        T* const x = coordinates(block);
        int32_t* const index = indices(block);
        Boxes& all = boxes(0, block / FAN);
        const int64_t at = block % FAN;
        int32_t first = p[0].index;
        for (int64_t k = 0; k < BLOCK; ++k) {
            for (int d = 0; d < D; ++d) x[d * BLOCK + k] = k < n ? p[k].x[d] : T(KN_NAN);
            index[k] = k < n ? p[k].index : -1;
            if (k < n) first = smaller(first, p[k].index);
        }
        all.first_index[at] = first;
        for (int d = 0; d < D; ++d) {
            T lower = p[0].x[d], upper = lower;
            for (int64_t k = 1; k < n; ++k) lower = smaller(lower, p[k].x[d]), upper = larger(upper, p[k].x[d]);
            all.lower[d][at] = lower, all.upper[d][at] = upper;
        }
    }
    void surround(int level, int64_t node) {
        const Boxes& from = boxes(level - 1, node);
        Boxes& to = boxes(level, node / FAN);
        const int64_t at = node % FAN, children = smaller(FAN, nodes(level - 1) - node * FAN);
        int32_t first = from.first_index[0];
        for (int64_t k = 1; k < children; ++k) first = smaller(first, from.first_index[k]);
        to.first_index[at] = first;
        for (int d = 0; d < D; ++d) {
            T lower = from.lower[d][0], upper = from.upper[d][0];
            for (int64_t k = 1; k < children; ++k)
                lower = smaller(lower, from.lower[d][k]), upper = larger(upper, from.upper[d][k]);
            to.lower[d][at] = lower, to.upper[d][at] = upper;
        }
    }

    const int64_t count_, blocks_;
    int levels_;
    int64_t boxes_count_, nodes_[MOST], start_[MOST];
    Buffer memory_, boxes_;
};

}  // namespace kn
