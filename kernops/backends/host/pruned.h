// The K nearest points in few dimensions, without a look at most of the pairs: the same points, distances and order among
// equals as by comparing all.
//
// ROWS queries that lie together go down the tree of the points, the nearest box first. A box is left out for a query where
// it is farther than the K-th nearest point so far; or as far, and all indices within are higher than that point's.
#pragma once

#include "ranked.h"
#include "tree.h"

namespace kn {

/// The words of a call.
template <class T>
struct PrunedCall {
    Matrix<T> x, y;     // queries and points, fewer than 2^31 - 1 each
    T* value;           // squared distances and indices, K for each query
    int64_t* index;
    int64_t threads;
    double most;  // the share of the pairs whose work is worth it: give up where a sample of the queries takes more
};

template <class T, int D, int K>
class Pruned {
    typedef typename Simd<T>::Int Int;
    typedef Vec<T> V;
    typedef Tree<T, D> Points;
    typedef Ordered<T, D> Queries;
    typedef typename Points::Boxes Boxes;
    static constexpr int L = LANES<T>;
    typedef typename Ranking<T, K>::type Best;

    /// Queries on their way down.
    struct Group {
        T x[D][ROWS], lower[D], upper[D], centre[D];
        T limit[ROWS];  // the squared distance of the K-th nearest so far, and its index
        Int limit_index[ROWS];
        int64_t count, work;  // queries; roughly what they cost, see below
        Best best[ROWS];

        void start(const Point<T, D>* p, int64_t n) {
            count = n, work = 0;
            for (int64_t q = 0; q < ROWS; ++q) {
                for (int d = 0; d < D; ++d) x[d][q] = p[smaller(q, n - 1)].x[d];
                limit[q] = T(q < n ? KN_INF : -KN_INF);  // nothing is near enough for those past the end
                limit_index[q] = NO_INDEX;
                best[q].start();
            }
            for (int d = 0; d < D; ++d) {
                lower[d] = upper[d] = x[d][0];
                for (int64_t q = 1; q < n; ++q) lower[d] = smaller(lower[d], x[d][q]), upper[d] = larger(upper[d], x[d][q]);
                centre[d] = T(0.5) * lower[d] + T(0.5) * upper[d];
            }
        }
        T farthest() const {
            T most = limit[0];
            for (int64_t q = 1; q < ROWS; ++q) most = larger(most, limit[q]);
            return most;
        }
    };

    /// Bit k says whether the group as a whole comes near enough to box k; `toward[k]` is that box's distance from its centre.
    static unsigned near_boxes(const Group& g, const Boxes& boxes, T (&toward)[FAN]) {
        const V limit = fill(g.farthest());
        unsigned pass = 0;
        for (int64_t k = 0; k < FAN; k += L) {
            V apart[D], away[D];
            KN_UNROLL(16)
            for (int d = 0; d < D; ++d) {
                const V lower = load(boxes.lower[d] + k), upper = load(boxes.upper[d] + k);
                apart[d] = gap(fill(g.lower[d]), fill(g.upper[d]), lower, upper);
                away[d] = gap(fill(g.centre[d]), fill(g.centre[d]), lower, upper);
            }
            pass |= (bits_le(squared_norm<D>(apart), limit) & ((1u << L) - 1)) << k;
            store(toward + k, squared_norm<D>(away));
        }
        return pass;
    }
    /// Bit q says whether something in box k may be a neighbour of query q.
    static unsigned near_rows(const Group& g, const Boxes& boxes, int k) {
        const Vec<Int> first = fill(Int(boxes.first_index[k]));
        unsigned pass = 0;
        for (int64_t q = 0; q < ROWS; q += L) {
            V apart[D];
            KN_UNROLL(16)
            for (int d = 0; d < D; ++d) {
                const V x = load(g.x[d] + q);
                apart[d] = gap(x, x, fill(boxes.lower[d][k]), fill(boxes.upper[d][k]));
            }
            const V bound = squared_norm<D>(apart), limit = load(g.limit + q);
            const Vec<Int> lower = lt(first, load(g.limit_index + q));
            pass |= bits(or_(lt(bound, limit), and_(eq(bound, limit), lower))) << q;
        }
        return pass;
    }
    /// Looks at a block for the queries whose bits are set.
    static void look(Group& g, const Points& tree, int64_t block, unsigned rows) {
        const T* const y = tree.coordinates(block);
        const int32_t* const index = tree.indices(block);
        for (; rows; rows &= rows - 1) {
            const int q = __builtin_ctz(rows);
            g.work += LOOK_WORK;
            const V limit = fill(g.limit[q]);
            T value[BLOCK];
            unsigned pass = 0;
            KN_UNROLL(16)
            for (int64_t k = 0; k < BLOCK; k += L) {
                V t[D];
                KN_UNROLL(16)
                for (int d = 0; d < D; ++d) t[d] = fill(g.x[d][q]) - load(y + d * BLOCK + k);
                const V s = squared_norm<D>(t);
                store(value + k, s);
                pass |= (bits_le(s, limit) & ((1u << L) - 1)) << k;
            }
            if (!pass) continue;
            Best& best = g.best[q];
            g.work += __builtin_popcount(pass);
            best.take(value, index, pass);
            g.limit[q] = best.worst(), g.limit_index[q] = best.worst_index();
        }
    }
    /// Nodes FAN node .. FAN node + FAN - 1 of a level and all below, the nearest first.
    static void visit(Group& g, const Points& tree, int level, int64_t node) {
        const Boxes& boxes = tree.boxes(level, node);
        T toward[FAN];
        const int64_t children = smaller(FAN, tree.nodes(level) - node * FAN);
        unsigned pass = near_boxes(g, boxes, toward) & ((1u << children) - 1);
        int order[FAN], count = 0;
        for (; pass; pass &= pass - 1) {
            const int k = __builtin_ctz(pass);
            int to = count++;
            for (; to > 0 && toward[k] < toward[order[to - 1]]; --to) order[to] = order[to - 1];
            order[to] = k;
        }
        for (int i = 0; i < count; ++i) {
            const unsigned rows = near_rows(g, boxes, order[i]);
            g.work += BOX_WORK;
            if (!rows) continue;
            if (level == 0)
                look(g, tree, node * FAN + order[i], rows);
            else
                visit(g, tree, level - 1, node * FAN + order[i]);
        }
    }

    static void write(const PrunedCall<T>& call, Best& best, int64_t i) {
        best.sort();
        for (int k = 0; k < K; ++k) {
            const bool there = best.index(k) != NO_INDEX;
            call.value[i * K + k] = there ? best.value(k) : T(KN_NAN);
            call.index[i * K + k] = there ? best.index(k) : -1;
        }
    }
    static void search(const PrunedCall<T>& call, const Queries& queries, const Points& tree, int64_t group, Group& g) {
        const Point<T, D>* const p = queries.points() + group * ROWS;
        g.start(p, smaller(ROWS, queries.count() - group * ROWS));
        visit(g, tree, tree.levels() - 1, 0);
        for (int64_t q = 0; q < g.count; ++q) write(call, g.best[q], p[q].index);
    }
    static bool same(const Matrix<T>& a, const Matrix<T>& b) {
        return a.base == b.base && a.rows == b.rows && a.row_step == b.row_step && a.step == b.step;
    }
    /// Rows with NaN have no neighbours.
    static void write_none(const PrunedCall<T>& call) {
        for (int64_t i = 0; i < call.x.rows; ++i) {
            bool valid = true;
            for (int d = 0; d < D; ++d) valid &= call.x.at(i, d) == call.x.at(i, d);
            for (int k = 0; !valid && k < K; ++k) call.value[i * K + k] = T(KN_NAN), call.index[i * K + k] = -1;
        }
    }

public:
    /// @return 0; 1 where memory ran out; 2 where it gave up.
    static int run(const PrunedCall<T>& call) {
        const FlushSubnormals flush;
        Ordered<T, D> points(call.y);
        const bool shared = same(call.x, call.y);
        Ordered<T, D> others(shared ? Matrix<T>{call.x.base, 0, 0, 0} : call.x);
        if (!points.points() || !others.points()) return 1;
        points.sort(call.threads);
        if (!shared) others.sort(call.threads);
        const Queries& queries = shared ? points : others;
        Points tree(points);
        if (!tree.there()) return 1;
        tree.fill(points, call.threads);
        if (queries.count() < call.x.rows) write_none(call);

        const int64_t groups = (queries.count() + ROWS - 1) / ROWS;
        const int64_t threads = larger<int64_t>(1, smaller(smaller<int64_t>(call.threads, Crew<int>::MOST), groups / 8));
        const size_t own = round_up(sizeof(Group), 4096);
        Buffer scratch(threads * own);
        if (!scratch.get()) return 1;
        const auto search_one = [&](int64_t k, int64_t thread) {
            Group& g = *reinterpret_cast<Group*>(scratch.get() + thread * own);
            search(call, queries, tree, k, g);
            return g.work;
        };
        if (call.most < 1) {  // what the sample is and costs does not depend on threads
            const int64_t sample = larger<int64_t>(1, smaller(groups / 64, PROBES));
            int64_t work = 0;
            parallel(threads, smaller(sample, groups), [&](int64_t k, int64_t thread) {
                __atomic_fetch_add(&work, search_one(k * groups / sample, thread), __ATOMIC_RELAXED);
            });
            if (double(work * BLOCK) > call.most * double(LOOK_WORK * sample * ROWS) * double(points.count())) return 2;
        }
        parallel(threads, (groups + STEP - 1) / STEP, [&](int64_t item, int64_t thread) {
            for (int64_t k = item * STEP; k < smaller(groups, (item + 1) * STEP); ++k) search_one(k, thread);
        });
        return 0;
    }

private:
    static constexpr int64_t PROBES = 64, STEP = 8;  // groups of a sample, and of an item
    // What it costs to look at a block for one query, and to try a box on the queries of a group, where 1 is an insertion.
    static constexpr int64_t LOOK_WORK = 2, BOX_WORK = 3;
};

}  // namespace kn
