// Rows of channels: sums of weighted rows, products of rows with one row, for any number of channels.
//
// A row is taken as VECTORS vectors of the same width; the last one ends at the last channel and so may overlap the one
// before. Nothing is read or written outside of a row. Sums are kept vector by vector (a channel of the overlap twice).
#pragma once

#include "formats.h"
#include "problem.h"

namespace kn {

constexpr int MOST_VECTORS = 8;  // vectors of a row that are summed at a time: they hide the latency of an addition

/// The sum of N lanes.
template <class R, int N>
KN_FN R sum_of(const typename Wide<R, N>::V& v) {
    if constexpr (N == 1) {
        return v;
    } else {
        typename Wide<R, N / 2>::V half[2];
        memcpy(half, &v, sizeof half);
        return sum_of<R, N / 2>(half[0] + half[1]);
    }
}

/// Adds weight[k] * row[k] to a sum for k < count. One block of V vectors of N channels: `first` is the first channel of
/// the block, `last` that of its last vector.
template <class T, int N, int V>
KN_SLOW void add_block(Real<T>* sum, const T* const* row, const Real<T>* weight, int64_t count, int64_t first,
                       int64_t last) {
    typedef Real<T> R;
    typename Wide<R, N>::V s[V];
    KN_UNROLL(8)
    for (int v = 0; v < V; ++v) s[v] = read<N>(sum + v * N);
    for (int64_t k = 0; k < count; ++k) {
        const auto w = all_lanes<N>(weight[k]);
        const T* const p = row[k] + first;
        KN_UNROLL(8)
        for (int v = 0; v < V - 1; ++v) s[v] += w * read<N>(p + v * N);
        s[V - 1] += w * read<N>(row[k] + last);
    }
    KN_UNROLL(8)
    for (int v = 0; v < V; ++v) write<N>(sum + v * N, s[v]);
}

/// product[k] += the product of row[k] with one row. `one` lies as sums do; lanes of the last vector that are in the one
/// before, too, are left out by `use` (bits of ones or zeros).
template <class T, int N, int V>
KN_SLOW void dot_block(Real<T>* product, const T* const* row, const Real<T>* one, const Real<T>* use, int64_t count,
                       int64_t first, int64_t last) {
    typedef Real<T> R;
    typedef typename Wide<R, N>::V Lanes;
    typedef typename Wide<typename Simd<R>::Int, N>::V Bits;
    Lanes x[V];
    KN_UNROLL(8)
    for (int v = 0; v < V; ++v) x[v] = read<N>(one + v * N);
    const Bits mask = same_bits<Bits>(read<N>(use));
    for (int64_t k = 0; k < count; ++k) {
        const T* const p = row[k] + first;
        Lanes s = same_bits<Lanes>(Bits(same_bits<Bits>(Lanes(x[V - 1] * read<N>(row[k] + last))) & mask));
        KN_UNROLL(8)
        for (int v = 0; v < V - 1; ++v) s += x[v] * read<N>(p + v * N);
        product[k] += sum_of<R, N>(s);
    }
}

/// How rows of `channels` numbers of format T are taken, and the functions for it.
template <class T>
struct Rows {
    typedef Real<T> R;
    typedef void (*Add)(R*, const T* const*, const R*, int64_t, int64_t, int64_t);
    typedef void (*Dot)(R*, const T* const*, const R*, const R*, int64_t, int64_t, int64_t);

    int64_t channels, width, vectors, blocks;

    explicit Rows(int64_t c) : channels(c), width(LANES<R>) {
        while (width > c && width > 1) width /= 2;
        vectors = (c + width - 1) / width;
        blocks = (vectors + MOST_VECTORS - 1) / MOST_VECTORS;
        choose<LANES<R>>();
    }
    /// Numbers of a sum.
    int64_t length() const { return vectors * width; }
    /// First channel of vector v.
    int64_t channel(int64_t v) const { return smaller(v * width, channels - width); }

    void add(R* sum, const T* const* row, const R* weight, int64_t count) const {
        each_block([&](int64_t v, int64_t n) {
            add_[n](sum + v * width, row, weight, count, v * width, channel(v + n - 1));
        });
    }
    void add_sum(R* sum, const R* more) const {
        for (int64_t k = 0; k < length(); ++k) sum[k] += more[k];
    }
    /// product[k] = the product of row[k] with `one`.
    void dot(R* product, const T* const* row, const R* one, int64_t count) const {
        R use[LANES<R>];
        memset(product, 0, count * sizeof(R));
        each_block([&](int64_t v, int64_t n) {
            const int64_t twice = (v + n - 1) * width - channel(v + n - 1);
            memset(use, 0xff, sizeof use);
            memset(use, 0, twice * sizeof(R));
            dot_[n](product, row, one + v * width, use, count, v * width, channel(v + n - 1));
        });
    }
    /// From a row in memory to how sums lie, and back.
    void spread(R* sum, const T* row) const {
        for (int64_t v = 0; v < vectors; ++v)
            for (int64_t j = 0; j < width; ++j) sum[v * width + j] = read_one(row + channel(v) + j);
    }
    template <class Out>
    void store(Out* row, const R* sum) const {
        if (width == LANES<R>)
            for (int64_t v = 0; v < vectors; ++v) write_as<LANES<R>>(row + channel(v), sum + v * width);
        else
            for (int64_t v = 0; v < vectors; ++v)
                for (int64_t j = 0; j < width; ++j) write_as<1>(row + channel(v) + j, sum + v * width + j);
    }
    /// Adds a row to a sum and writes it.
    template <class Out>
    void add_and_store(Out* out, R* sum, const T* row) const {
        if (width == LANES<R>)
            for (int64_t v = 0; v < vectors; ++v)
                add_and_write<LANES<R>>(out + channel(v), sum + v * width, row + channel(v));
        else
            for (int64_t v = 0; v < vectors; ++v)
                for (int64_t j = channel(v); j < channel(v) + width; ++j)
                    add_and_write<1>(out + j, sum + v * width + (j - channel(v)), row + j);
    }

private:
    Add add_[MOST_VECTORS + 1];
    Dot dot_[MOST_VECTORS + 1];

    template <class Work>
    KN_FN void each_block(const Work& work) const {
        for (int64_t b = 0; b < blocks; ++b) {
            const int64_t v = b * vectors / blocks;
            work(v, (b + 1) * vectors / blocks - v);
        }
    }
    template <int N, class Out>
    KN_FN static void write_as(Out* to, const R* from) {
        typedef typename Wide<Real<Out>, N>::V To;
        const auto v = read<N>(from);
        if constexpr (sizeof(Real<Out>) == sizeof(R))
            write<N>(to, v);
        else if constexpr (N == 1)
            write<N>(to, Real<Out>(v));
        else
            write<N>(to, __builtin_convertvector(v, To));
    }
    template <int N, class Out>
    KN_FN static void add_and_write(Out* out, R* sum, const T* row) {
        write<N>(sum, read<N>(sum) + read<N>(row));
        write_as<N>(out, sum);
    }
    template <int N>
    void choose() {
        if (width < N) {
            if constexpr (N > 1) choose<N / 2>();
            return;
        }
        set<N, 1>();
        set<N, 2>();  // fewer channels than a full vector has are one or two
        if constexpr (N == LANES<R>) {
            set<N, 3>(), set<N, 4>(), set<N, 5>(), set<N, 6>(), set<N, 7>(), set<N, 8>();
        }
    }
    template <int N, int V>
    void set() {
        add_[V] = add_block<T, N, V>;
        dot_[V] = dot_block<T, N, V>;
    }
};

}  // namespace kn
