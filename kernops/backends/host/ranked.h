// The K smallest of the numbers offered to a query, with their indices: the lowest index first among equals.
// A list that is not full holds infinities of index NO_INDEX, after which every number comes that is not NaN.
#pragma once

#include "neighbors.h"

namespace kn {

constexpr int32_t NO_INDEX = 0x7fffffff;

/// A sorted list of at most four vectors, which stay in registers while a block's numbers are put in.
template <class T, int K>
class Ranked {
    typedef typename Simd<T>::Int Int;
    static constexpr int L = LANES<T>, VECTORS = (K + L - 1) / L;
    Vec<T> value_[VECTORS];
    Vec<Int> index_[VECTORS];

    /// Lane k is lane k - 1 of `here`, lane 0 the last one of `prior`.
    template <class S>
    static KN_FN Vec<S> shifted(Vec<S> here, Vec<S> prior) {
        const Vec<Int> first = eq(iota<Int>(0), fill(Int(0)));
        return select(first, rotated<S>(prior, L - 1), rotated<S>(here, L - 1));
    }

public:
    static constexpr bool FITS = VECTORS <= 4;

    void start() {
        for (int k = 0; k < VECTORS; ++k) value_[k] = fill(T(KN_INF)), index_[k] = fill(Int(NO_INDEX));
    }
    /// Offers the numbers whose bits are set.
    KN_FN void take(const T* value, const int32_t* index, unsigned pass) {
        Vec<T> v[VECTORS];
        Vec<Int> i[VECTORS];
        KN_UNROLL(4)
        for (int k = 0; k < VECTORS; ++k) v[k] = value_[k], i[k] = index_[k];
        for (; pass; pass &= pass - 1) {
            const int one = __builtin_ctz(pass);
            const Vec<T> x = fill(value[one]);
            const Vec<Int> at = fill(Int(index[one]));
            KN_UNROLL(4)
            for (int k = VECTORS - 1; k >= 0; --k) {  // what x comes before moves up; both tests wait for nothing else
                const Vec<T> prior = shifted<T>(v[k], k ? v[k ? k - 1 : 0] : fill(T(-KN_INF)));
                const Vec<Int> prior_at = shifted<Int>(i[k], i[k ? k - 1 : 0]);
                const Vec<Int> here = or_(lt(x, v[k]), and_(eq(x, v[k]), lt(at, i[k])));
                const Vec<Int> below = or_(lt(x, prior), and_(eq(x, prior), lt(at, prior_at)));
                v[k] = select(here, select(below, prior, x), v[k]);
                i[k] = select(here, select(below, prior_at, at), i[k]);
            }
        }
        KN_UNROLL(4)
        for (int k = 0; k < VECTORS; ++k) value_[k] = v[k], index_[k] = i[k];
    }
    void sort() {}
    T value(int k) const { return value_[k / L][k % L]; }
    Int index(int k) const { return index_[k / L][k % L]; }
    T worst() const { return value(K - 1); }
    Int worst_index() const { return index(K - 1); }
};

/// Longer lists: those of `neighbors.h`.
template <class T, int K, class Best>
class Listed {
    typedef typename Simd<T>::Int Int;
    Best best_;

public:
    void start() {
        best_.init();
        for (int k = 0; k < K; ++k) best_.fill(T(KN_INF), Int(NO_INDEX));
    }
    void take(const T* value, const int32_t* index, unsigned pass) {
        for (; pass; pass &= pass - 1) {
            const int k = __builtin_ctz(pass);
            const Int at = Int(index[k]);
            if (before(value[k], at, best_.worst(), best_.worst_column())) best_.insert(value[k], at);
        }
    }
    void sort() { best_.sort(); }
    T value(int k) const { return best_.sorted_value(k); }
    Int index(int k) const { return best_.sorted_column(k); }
    T worst() const { return best_.worst(); }
    Int worst_index() const { return best_.worst_column(); }
};

/// The list for K numbers.
template <class T, int K, int KIND = Ranked<T, K>::FITS ? 0 : K <= LONGEST_LIST ? 1 : 2>
struct Ranking {
    typedef Ranked<T, K> type;
};
template <class T, int K>
struct Ranking<T, K, 1> {
    typedef Listed<T, K, List<T, K>> type;
};
template <class T, int K>
struct Ranking<T, K, 2> {
    typedef Listed<T, K, Heap<T, K>> type;
};

}  // namespace kn
