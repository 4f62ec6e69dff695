// Reductions whose pairs meet in one sum over components: the sums by the matrix units (`halves.cuh` packs the points), the
// rest of the formula on their results, in the registers in which the unit leaves them.
//
// A block owns a panel of 128 rows and walks over its range of columns, a tile of 128 at a time; a warp owns 16 rows.
// Thread l of a warp holds rows l / 4 and l / 4 + 8 and, of every eight columns, 2 (l % 4) and the next; the four threads of a
// row merge their states at the end, in a fixed order.
#pragma once

namespace kn {

template <bool CONDITION, class A, class B>
struct Choose {
    typedef A Type;
};
template <class A, class B>
struct Choose<false, A, B> {
    typedef B Type;
};

/// exp2 by plain cores, for some of the pairs, as the exponential unit is the bottleneck; 2^-126 for what is less.
KN_FN float soft_exp2(float a) {
    const float b = greater(a, -126.0f), t = b + 12582912.0f;  // rounds to a whole number in the lowest bits
    return __int_as_float(__float_as_int(plain_exp2_of_fraction(b - (t - 12582912.0f))) + (__float_as_int(t) << 23));
}

/// Four pairs, two rows times two columns; if `soft`, the last takes its exponential from the plain cores.
struct Quad {
    float v[4];
    bool soft;
};
template <>
struct Splat<Quad> {
    KN_FN static Quad of(double x) { return {{float(x), float(x), float(x), float(x)}, false}; }
};
KN_FN Quad operator*(const Quad& a, const Quad& b) {
    return {{a.v[0] * b.v[0], a.v[1] * b.v[1], a.v[2] * b.v[2], a.v[3] * b.v[3]}, false};
}
KN_FN Quad operator+(const Quad& a, const Quad& b) {
    return {{a.v[0] + b.v[0], a.v[1] + b.v[1], a.v[2] + b.v[2], a.v[3] + b.v[3]}, false};
}
KN_FN Quad operator-(const Quad& a) { return {{-a.v[0], -a.v[1], -a.v[2], -a.v[3]}, a.soft}; }
KN_FN Quad exp2(const Quad& a) {
    return {{exp2(a.v[0]), exp2(a.v[1]), exp2(a.v[2]), a.soft ? soft_exp2(a.v[3]) : exp2(a.v[3])}, false};
}

/// What Formula::pair reads of the rows and columns of four pairs.
template <class V, int NROW>
struct QuadRows {
    const float (&x)[2][NROW];
    KN_FN V operator[](int s) const { return {{x[0][s], x[0][s], x[1][s], x[1][s]}}; }
};
template <class V>
struct QuadColumns {
    const float* numbers;  // of the first of the two columns
    V sums;
    KN_FN V operator[](int s) const {
        const auto y = *reinterpret_cast<const Vec<float, 2>*>(numbers + s * 128);
        return {{y.v[0], y.v[1], y.v[0], y.v[1]}};
    }
    KN_FN V sum(int) const { return sums; }
};

/// The rows of a thread, and what turns the unit's results into sums.
template <class G>
struct MatrixRows {
    typedef Panels<G> P;
    static constexpr int NROW = G::F::NROW ? G::F::NROW : 1;
    // pairs are evaluated with a Quad where the formula is a product with one exponential of the sum alone
    typedef typename Choose<(G::SOFT > 0), Quad, Pack<float, 4>>::Type V;
    const typename G::Arguments& a;
    long long batch, row[2];  // the second and even the first may lie beyond the last row
    // The sum, times the slope if there is one, is `per` times the unit's result plus norm[r] plus `slope` times the column's norm.
    float x[2][NROW], norm[2], per, slope, least_norm;
    int mode;

    /// @param sixteen number of the sixteen rows in the panel
    KN_FN MatrixRows(const typename G::Arguments& args, long long b, long long block, int sixteen) : a(args), batch(b) {
        Survey* s = P::survey(a, b);
        mode = choose_mode<G>(a, s);
        const float scale = P::scale(s, true), other = P::scale(s, false);
        slope = G::F::EXPONENT ? P::slope(a, b) : 1;
        per = slope / scale / other;
        const float floor = __uint_as_float(s->largest) * 2.3283064365386963e-10f / P::EPSILON;  // 2^-32
        least_norm = floor * floor * P::LENGTH;
        const float* norms = reinterpret_cast<const float*>(P::panel(a, b, block) + P::HALVES_BYTES);
        In<G> in(a, b);
        KN_UNROLL_ALL
        for (int r = 0; r < 2; ++r) {
            const int place = sixteen * 16 + threadIdx.x % 32 / 4 + r * 8;
            row[r] = block * P::POINTS + place;
            in.index = row[r] < a.m ? row[r] : a.m - 1;
            G::F::template row<float>(in, &x[r][0]);
            norm[r] = slope * norms[place];
        }
    }
};

/// The rows of a warp: H times 16.
template <class G, int H>
struct Warp;
template <class G>
struct Warp<G, 1> {
    MatrixRows<G> rows[1];
    KN_FN Warp(const typename G::Arguments& a, long long b, long long block) : rows{{a, b, block, int(threadIdx.x / 32)}} {}
};
template <class G>
struct Warp<G, 2> {
    MatrixRows<G> rows[2];
    KN_FN Warp(const typename G::Arguments& a, long long b, long long block)
        : rows{{a, b, block, int(threadIdx.x / 32 * 2)}, {a, b, block, int(threadIdx.x / 32 * 2 + 1)}} {}
};

/// Keeps the compiler from moving reads and writes across this point, where it would have no registers for so many at once.
KN_FN void keep_order() { asm volatile("" ::: "memory"); }

/// The squared distance of one pair, from differences; for the few that need it.
template <class G>
KN_FN float direct_square(const MatrixRows<G>& rows, long long row, long long column) {
    In<G> x(rows.a, rows.batch), y(rows.a, rows.batch);
    x.index = row < rows.a.m ? row : rows.a.m - 1;
    y.index = column < rows.a.n ? column : rows.a.n - 1;
    float square = 0;
#pragma unroll 4
    for (int d = 0; d < Panels<G>::LENGTH; ++d) {
        const float w = G::F::template left<float>(x, d) - G::F::template right<float>(y, d);
        square += w * w;
    }
    return square;
}

/// Turns N results of the unit, for columns of a tile from `first` on, into sums.
/// @param shift what is added to those of a row, if they are exponents
template <class G, int N>
KN_FN void finish_sums(const MatrixRows<G>& rows, float (&s)[N], const float* numbers, int first, long long j0,
                       const float (&shift)[2]) {
    typedef Panels<G> P;
    const int lane = threadIdx.x % 32;
    if constexpr (P::TIGHT) return;  // it is what the unit computed
    if constexpr (!G::F::SQUARE) {
        KN_UNROLL_ALL
        for (int k = 0; k < N; ++k) s[k] *= rows.per;
    } else {
        const float* norms = numbers + G::F::NCOL * 128;
        const float add[2] = {G::F::EXPONENT ? shift[0] : 0, G::F::EXPONENT ? shift[1] : 0};
        const float norm[2] = {rows.norm[0] + add[0], rows.norm[1] + add[1]};
        KN_UNROLL_ALL
        for (int k = 0; k < N; k += 4) {
            const auto y = *reinterpret_cast<const Vec<float, 2>*>(norms + first + 2 * k + lane % 4 * 2);
            KN_UNROLL_ALL
            for (int q = 0; q < 4; ++q) s[k + q] = s[k + q] * rows.per + (y.v[q % 2] * rows.slope + norm[q / 2]);
        }
        if (rows.mode != NEAR) return;
        // A slope is negative: near pairs have the largest exponents, but the smallest squares.
        float most[2] = {static_cast<float>(-KN_INF), static_cast<float>(-KN_INF)}, near[2];
        const float sign = G::F::EXPONENT ? 1 : -1;
        KN_UNROLL_ALL
        for (int k = 0; k < N; ++k) most[k / 2 % 2] = greater(most[k / 2 % 2], sign * s[k]);
        const auto four = *reinterpret_cast<const Vec<float, 4>*>(norms + lane * 4);
        const float here = greater(greater(four.v[0], four.v[1]), greater(four.v[2], four.v[3]));
        const float column = __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(here))) * rows.slope;
        KN_UNROLL_ALL
        for (int r = 0; r < 2; ++r) near[r] = sign * (P::NEARNESS * (rows.norm[r] + column + rows.slope * rows.least_norm) + add[r]);
        if (most[0] <= near[0] && most[1] <= near[1]) return;
        // By the column's own norm: one that is large must not make its neighbours near.
        unsigned long long found = 0;
        KN_UNROLL_ALL
        for (int k = 0; k < N; k += 4) {
            keep_order();
            const auto y = *reinterpret_cast<const Vec<float, 2>*>(norms + first + 2 * k + lane % 4 * 2);
            KN_UNROLL_ALL
            for (int q = 0; q < 4; ++q) {
                const float bound = rows.norm[q / 2] + rows.slope * (y.v[q % 2] + rows.least_norm);
                found |= static_cast<unsigned long long>(!(sign * (s[k + q] - add[q / 2]) <= sign * P::NEARNESS * bound)) << (k + q);
            }
        }
#pragma unroll 1
        while (found) {
            const int k = __ffsll(found) - 1;
            found &= found - 1;
            const long long column_of = j0 + first + 2 * (k & ~3) + lane % 4 * 2 + k % 2;
            const float value = rows.slope * direct_square(rows, rows.row[0] + k / 2 % 2 * 8, column_of) + (k / 2 % 2 ? add[1] : add[0]);
            KN_UNROLL_ALL
            for (int q = 0; q < N; ++q) s[q] = q == k ? value : s[q];
        }
    }
}

/// Folds the sums of N / 4 times eight columns, from `first` on, into the states of the thread's two rows.
template <class G, bool FULL, int N>
KN_FN void fold_sums(const MatrixRows<G>& rows, const float (&s)[N], const float* numbers, int first, long long j0, int left,
                     typename G::State (&state)[2]) {
    typedef typename MatrixRows<G>::V V;
    constexpr int IN = G::State::IN, Q = 4;  // columns that are folded at once
    const int lane = threadIdx.x % 32;
    KN_UNROLL_ALL
    for (int k0 = 0; k0 < N; k0 += 2 * Q) {
        float v[2][Q][IN];
        KN_UNROLL_ALL
        for (int k = k0; k < k0 + 2 * Q; k += 4) {
            V out[IN];
            V sums{{s[k], s[k + 1], s[k + 2], s[k + 3]}};
            if constexpr (G::SOFT > 0) sums.soft = k / 4 % (8 / G::SOFT) == 0;
            const QuadColumns<V> y{numbers + first + 2 * k + lane % 4 * 2, sums};
            G::F::template pair<G::C, V>(QuadRows<V, MatrixRows<G>::NROW>{rows.x}, y, 0, out);
            KN_UNROLL_ALL
            for (int c = 0; c < IN; ++c)
                KN_UNROLL_ALL
                for (int q = 0; q < 4; ++q) {
                    const bool valid = FULL || first + 2 * k + lane % 4 * 2 + q % 2 < left;
                    v[q / 2][(k - k0) / 2 + q % 2][c] = valid ? out[c].v[q] : G::State::neutral(c);
                }
        }
        KN_UNROLL_ALL
        for (int r = 0; r < 2; ++r)
            G::Results::template fold<true>(state[r], v[r], static_cast<typename G::I>(0), Q);
    }
}

/// The epilogue of N / 4 times eight columns of a tile.
/// @param left columns of the tile that exist
template <class G, int N>
KN_FN void epilogue(const MatrixRows<G>& rows, float (&s)[N], const float* numbers, int first, long long j0, int left,
                    typename G::State (&state)[2]) {
    finish_sums<G>(rows, s, numbers, first, j0, {0, 0});
    // columns beyond the last are packed with zeros, one of which is a factor of what is summed
    constexpr bool NOTHING = G::SOFT > 0 && G::F::NCOL > 0;
    if (NOTHING || left >= 128)
        fold_sums<G, true>(rows, s, numbers, first, j0, left, state);
    else
        fold_sums<G, false>(rows, s, numbers, first, j0, left, state);
}

/// Which panel and columns a block works on; blocks are numbered panels fastest, then splits, batch elements.
template <class G>
KN_FN Where matrix_block(const typename G::Arguments& a, long long& panel) {
    Where w;
    long long number = a.first + block_number();
    panel = number % a.row_blocks;
    number /= a.row_blocks;
    w.split = number % a.splits;
    number /= a.splits;
    w.chunk = static_cast<int>(number % G::CHUNKS), w.c0 = w.chunk * G::C, w.row = -1;
    w.batch = number / G::CHUNKS;
    return w;
}

/// Tells the plain kernels, which come after, whether the result is theirs.
/// @return whether it is
template <class G>
KN_FN bool is_plain(const typename G::Arguments& a, const Where& w, long long panel, int mode) {
    if (panel == 0 && w.split == 0 && w.chunk == 0 && threadIdx.x == 0) atomicMax(&Panels<G>::survey(a, w.batch)->mode, mode);
    return mode == PLAIN;
}

/// Leaves a batch element to the plain kernels if a value is not finite: split numbers do not obey IEEE's rules for those.
template <class G>
KN_FN void check_finite(const typename G::Arguments& a, const Where& w, float value) {
    if (!(abs(value) < static_cast<float>(KN_INF))) atomicMax(&Panels<G>::survey(a, w.batch)->mode, static_cast<int>(PLAIN));
}

/// Merges the states of the threads of a row and writes or saves them.
template <class G>
KN_FN void deliver_rows(const MatrixRows<G>& rows, Where w, typename G::State (&state)[2]) {
    KN_UNROLL_ALL
    for (int r = 0; r < 2; ++r) {
        state[r].merge(shuffle_down(state[r], 2));
        state[r].merge(shuffle_down(state[r], 1));
        w.row = rows.row[r];
        if (threadIdx.x % 4 || w.row >= rows.a.m) continue;
        KN_UNROLL_ALL
        for (int c = 0; c < G::C; ++c) check_finite<G>(rows.a, w, state[r].value(c));
        deliver<G>(rows.a, w, RowSlots<float, 1>{rows.x[r]}, state[r]);
    }
}

}  // namespace kn
