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
            Vec<Int> here[VECTORS];  // all bits where x comes before what is there: a 1 for each place from its own on
            KN_UNROLL(4)
            for (int k = 0; k < VECTORS; ++k) here[k] = or_(lt(x, v[k]), and_(eq(x, v[k]), lt(at, i[k])));
            KN_UNROLL(4)
            for (int k = VECTORS - 1; k >= 0; --k) {
                const bool top = k == 0;
                const Vec<Int> further = shifted<Int>(here[k], top ? Vec<Int>{} : here[top ? 0 : k - 1]);
                const Vec<T> from = select(further, shifted<T>(v[k], v[top ? 0 : k - 1]), x);
                const Vec<Int> from_at = select(further, shifted<Int>(i[k], i[top ? 0 : k - 1]), at);
                v[k] = select(here[k], from, v[k]), i[k] = select(here[k], from_at, i[k]);
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
