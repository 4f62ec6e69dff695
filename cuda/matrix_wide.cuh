// Many right-hand sides: the kernel's values of a block of pairs are one operand of a second product, with the right-hand
// sides as the other. A warp's results of the first product are laid out as the unit wants its left operand.
//
// Both operands are split into two halves, so that values keep 22 bits: upper x upper + upper x lower + lower x upper. A half
// ends at 2^-24, so each row has a scale, a power of two that brings its largest value W so far to 2^12 .. 2^16, and so has
// each component of the right-hand sides of a tile, to 2^14 .. 2^15. A term is then off by at most 2^-21 of itself, plus 2^-25
// of W's scale, which is 2^-37 of the row's largest value: n columns lose at most n 2^-37 of that, and a row of tiny values is
// as accurate as any other. (Right-hand sides likewise: 2^-39 of the tile's largest.)
//
// Values that outgrow their row's scale become infinite as halves, and so does what the unit computes of them. That is looked
// for after every tile; then the scale is lowered, and the tile is computed anew. The unit adds at most 128 columns before
// its result is added to a compensated sum.
#pragma once

namespace kn {

/// The scalar of the formula for two rows times two columns; 0 for columns that do not exist.
template <class G, bool FULL>
KN_FN void weigh(const MatrixRows<G>& rows, const float* s, float* v, const float* numbers, int column, int left) {
    typedef typename MatrixRows<G>::V V;
    const QuadColumns<V> y{numbers + column, {{s[0], s[1], s[2], s[3]}}};
    V out[1];
    G::F::template pair<1, V>(QuadRows<V, MatrixRows<G>::NROW>{rows.x}, y, 0, out);
    KN_UNROLL_ALL
    for (int q = 0; q < 4; ++q) v[q] = FULL || column + q % 2 < left ? out[0].v[q] : 0;
}

/// Adds the products of the kernel's values, from results of the first product for N / 4 times eight columns from `first` on,
/// with the right-hand sides.
template <class G, bool FULL, int H, int N, class Sums>
KN_FN void add_wide(const Warp<G, H>& warp, const RowScales<G> (&scales)[H], Sums (&sums)[H], const float (&s)[H][N],
                    const float* numbers, int first, int left) {
    constexpr int TILES = G::C / 8;
    constexpr bool APART = sizeof(sums[0].low) > sizeof(float);
    const int lane = threadIdx.x % 32;
    const float* rhs = numbers + Panels<G>::NUMBERS_BYTES / 4;
    KN_UNROLL_ALL
    for (int k = 0; k < N; k += 8) {
        unsigned high[H][4], low[H][4];
        KN_UNROLL_ALL
        for (int h = 0; h < H; ++h) {
            float v[8];
            KN_UNROLL_ALL
            for (int q = 0; q < 8; q += 4)
                weigh<G, FULL>(warp.rows[h], s[h] + k + q, v + q, numbers, first + 2 * (k + q) + lane % 4 * 2, left);
            if (!G::F::EXPONENT) {
                KN_UNROLL_ALL
                for (int q = 0; q < 8; ++q) v[q] *= scales[h].factor[q / 2 % 2];
            }
            KN_UNROLL_ALL
            for (int q = 0; q < 4; ++q) split_halves(v[2 * q], v[2 * q + 1], high[h][q], low[h][q]);
        }
        Vec<unsigned, 4> b[TILES];
        KN_UNROLL_ALL
        for (int tile = 0; tile < TILES; ++tile)
            b[tile] = *reinterpret_cast<const Vec<unsigned, 4>*>(rhs + (((first / 16 + k / 8) * TILES + tile) * 32 + lane) * 4);
        KN_UNROLL_ALL
        for (int kind = 0; kind < 3; ++kind)  // one after the other, as each waits for the last to the same sums
            KN_UNROLL_ALL
            for (int tile = 0; tile < TILES; ++tile)
                KN_UNROLL_ALL
                for (int h = 0; h < H; ++h) {
                    float* to = (APART && kind ? sums[h].low : sums[h].part) + 4 * tile;
                    multiply(to, kind == 2 ? low[h] : high[h], b[tile].v[kind == 1 ? 2 : 0], b[tile].v[kind == 1 ? 3 : 1]);
                }
    }
}

/// The largest |value| of the rows, without their scales.
template <class G, int H, int N>
KN_FN void find_tops(const Warp<G, H>& warp, const RowScales<G> (&scales)[H], const float (&s)[H][N], const float* numbers,
                     int first, int left, float (&top)[H][2]) {
    KN_UNROLL_ALL
    for (int h = 0; h < H; ++h)
        KN_UNROLL_ALL
        for (int k = 0; k < N; k += 4) {
            float t[4], v[4];
            KN_UNROLL_ALL
            for (int q = 0; q < 4; ++q) t[q] = G::F::EXPONENT ? s[h][k + q] - scales[h].exponent[q / 2] : s[h][k + q];
            weigh<G, false>(warp.rows[h], t, v, numbers, first + 2 * k + threadIdx.x % 32 % 4 * 2, left);
            KN_UNROLL_ALL
            for (int q = 0; q < 4; ++q) top[h][q / 2] = greater(top[h][q / 2], abs(v[q]));
        }
}

/// The products of a warp's tight rows with columns from `first` on, to which the unit adds the rows' scales.
template <class G, int H, int N>
KN_FN void shifted_products(const Products<G>& p, float (&s)[H][N], int first) {
    typedef Panels<G> P;
    const unsigned columns = block_address<G, false>(p.columns, 0, 0) + first * (P::BLOCK / 8);
    KN_UNROLL_ALL
    for (int step = 0; step < P::STEPS; ++step) {
        unsigned rows[H][4];
        KN_UNROLL_ALL
        for (int h = 0; h < H; ++h) {
            if constexpr (Products<G>::KEPT) {
                KN_UNROLL_ALL
                for (int q = 0; q < 4; ++q) rows[h][q] = p.kept.at[h][q];
            } else {
                load_matrices(rows[h], block_address<G, true>(p.rows, step, p.row + h * 16));
            }
        }
        KN_UNROLL_ALL
        for (int k = 0; k < N; k += 8) {
            unsigned b[4];
            load_matrices(b, columns + step * P::STEP_BYTES + 2 * k * (P::BLOCK / 8));
            KN_UNROLL_ALL
            for (int h = 0; h < H; ++h) {
                if (step == 0) {
                    multiply_new(s[h] + k, rows[h], b[0], b[1]);
                    multiply_new(s[h] + k + 4, rows[h], b[2], b[3]);
                } else {
                    multiply(s[h] + k, rows[h], b[0], b[1]);
                    multiply(s[h] + k + 4, rows[h], b[2], b[3]);
                }
            }
        }
    }
}

/// Writes new scales of tight rows into the panel, of which they are the warp's own.
template <class G, int H>
KN_FN void shift_rows(Products<G>& p, const RowScales<G> (&scales)[H]) {
    typedef Panels<G> P;
    extern __shared__ __align__(128) unsigned char shared[];
    const int lane = threadIdx.x % 32;
    char* const step = reinterpret_cast<char*>(shared) + (p.rows - shared_address(shared));
    __syncwarp();
    KN_UNROLL_ALL
    for (int h = 0; h < H; ++h)
        KN_UNROLL_ALL
        for (int r = 0; r < 2; ++r)
            if (lane % 4 == 0)
                store_half(step + P::offset(P::SHIFT / 16, P::SHIFT % 16, p.row + h * 16 + r * 8 + lane / 4), scales[h].exponent[r]);
    __syncwarp();
    if constexpr (Products<G>::KEPT) p.kept.load(p.rows, p.row);
}

/// The sums of a warp, and what is done with a tile, however its first products come.
template <class G, int H>
struct WideRows {
    typedef Panels<G> P;
    static constexpr int TILES = G::C / 8, SCALES = (P::NUMBERS_BYTES + P::RHS_BYTES) / 4 - G::C;
    const Warp<G, H> warp;
    WideSums<TILES, P::CHUNKS == 1, H * TILES < 4> sums[H];
    RowScales<G> scales[H];

    KN_FN WideRows(const typename G::Arguments& a, long long batch, long long panel) : warp(a, batch, panel) {
        KN_UNROLL_ALL
        for (int h = 0; h < H; ++h) sums[h].init(), scales[h].init();
    }
    /// @param find find(top): the largest |value| of each row
    /// @param move move(moved): exponents of scales change
    /// @param add adds the products of all pairs of the tile
    template <class Find, class Move, class Add>
    KN_FN void fold(const float* numbers, Find find, Move move, Add add) {
        bool again = scales[0].fresh;
#pragma unroll 1
        for (int attempt = 0; attempt < 3; ++attempt) {
            if (again) {
                float top[H][2] = {}, moved[H][2];
                find(top);
                bool changed = false;
                KN_UNROLL_ALL
                for (int h = 0; h < H; ++h) {
                    if (scales[h].lower(top[h], moved[h])) changed = true;
                    sums[h].scale(moved[h]);
                }
                if (attempt && !changed) break;  // it is infinite indeed
                move(moved);
            }
            KN_UNROLL_ALL
            for (int h = 0; h < H; ++h) sums[h].begin();
            add();
            float overflow = 0;
            KN_UNROLL_ALL
            for (int h = 0; h < H; ++h) overflow += sums[h].overflow();
            again = __any_sync(0xffffffffu, overflow != 0);
            if (!again) break;
        }
        KN_UNROLL_ALL
        for (int h = 0; h < H; ++h) sums[h].flush(numbers + SCALES);
    }
    /// @param fill fill(s, first): results of the first product of columns from `first` on, with the rows' scales
    /// @param move move(moved): exponents of scales change
    template <int N, class Fill, class Move>
    KN_FN void fold_parts(const float* numbers, int left, Fill fill, Move move) {
        const auto find = [&](float (&top)[H][2]) {
#pragma unroll 1
            for (int first = 0; first < P::POINTS; first += 2 * N) {
                float s[H][N];
                fill(s, first);
                find_tops(warp, scales, s, numbers, first, left, top);
            }
        };
        const auto add = [&] {
            if (left >= P::POINTS)
                add_parts<true, N>(numbers, left, fill);
            else
                add_parts<false, N>(numbers, left, fill);
        };
        fold(numbers, find, move, add);
    }
    template <bool FULL, int N, class Fill>
    KN_FN void add_parts(const float* numbers, int left, Fill fill) {
        // With few rows the first products of the next columns are computed while the second ones of these are waited for.
        constexpr bool AHEAD = H == 1;
        float next[H][N];
        if (AHEAD) fill(next, 0);
#pragma unroll 1
        for (int first = 0; first < P::POINTS; first += 2 * N) {
            __syncwarp();  // keeps the compiler from unrolling this, for which there are no registers
            float s[H][N];
            if (AHEAD) {
                KN_UNROLL_ALL
                for (int k = 0; k < H * N; ++k) s[k / N][k % N] = next[k / N][k % N];
                fill(next, first + 2 * N < P::POINTS ? first + 2 * N : 0);
            } else {
                fill(s, first);
            }
            add_wide<G, FULL>(warp, scales, sums, s, numbers, first, left);
        }
    }
    /// @param s finished results of the first product of a whole tile, with the rows' scales
    KN_FN void fold_whole(float (&s)[H][64], const float* numbers, int left) {
        const auto move = [&](const float (&moved)[H][2]) {
            if (!G::F::EXPONENT) return;
            KN_UNROLL_ALL
            for (int h = 0; h < H; ++h)
                KN_UNROLL_ALL
                for (int k = 0; k < 64; ++k) s[h][k] += moved[h][k / 2 % 2];
        };
        const auto add = [&] {
            if (left >= P::POINTS)
                add_wide<G, true>(warp, scales, sums, s, numbers, 0, left);
            else
                add_wide<G, false>(warp, scales, sums, s, numbers, 0, left);
        };
        fold(numbers, [&](float (&top)[H][2]) { find_tops(warp, scales, s, numbers, 0, left, top); }, move, add);
    }
};

/// Writes a component of a row's result.
template <class G>
KN_FN void write_wide(const typename G::Arguments& a, long long place, int c, float value) {
    constexpr int FIRST = G::F::FIRST, OTHERS = G::F::OUT - FIRST;
    typedef typename G::E E;
    E* to = static_cast<E*>(a.value) + place * FIRST + c;
    if (OTHERS && c >= FIRST) to = static_cast<E*>(a.second) + place * OTHERS + c - FIRST;
    narrow(value, *to);
}

/// With one split and no moment the results are written, else the sums are saved.
template <class G, int H>
KN_FN void deliver_wide(const WideRows<G, H>& all, const Where& w) {
    typedef typename G::F F;
    KN_UNROLL_ALL
    for (int hr = 0; hr < 2 * H; ++hr) {
        keep_order();
        const int h = hr / 2, r = hr % 2;
        const MatrixRows<G>& rows = all.warp.rows[h];
        const auto& a = rows.a;
        const long long row = rows.row[r], place = w.batch * a.m + row;
        if (row >= a.m) continue;
        float* partial = static_cast<float*>(a.partial) + (place * a.splits + w.split) * (G::C * G::CHUNKS) + w.c0;
        KN_UNROLL_ALL
        for (int k = 0; k < G::C / 4; ++k) {
            const int c = k / 2 * 8 + threadIdx.x % 4 * 2 + k % 2;
            const float value = all.scales[h].unscaled(r, all.sums[h].sum[k / 2 * 4 + r * 2 + k % 2]);
            check_finite<G>(a, w, value);
            if (a.splits > 1 || F::MOMENT)
                partial[c] = value;
            else if (w.c0 + c < F::DIM)
                write_wide<G>(a, place, w.c0 + c, F::template finish<float>(rows.x[r], w.c0 + c, value));
        }
    }
}

/// The reduction by warps, each with H times 16 rows.
template <class G>
KN_FN void matrix_wide(const typename G::Arguments& a) {
    typedef Panels<G> P;
    constexpr int H = G::H, N = G::SUB * 4;
    long long panel;
    const Where w = matrix_block<G>(a, panel);
    if (is_plain<G>(a, w, panel, choose_mode<G>(a, P::survey(a, w.batch)))) return;
    WideRows<G, H> rows(a, w.batch, panel);
    walk_tiles<G>(a, w, panel, [&](Products<G>& products, const float* numbers, int, long long j0, int left) {
        if constexpr (P::TIGHT) {
            const auto fill = [&](float (&s)[H][N], int first) { shifted_products(products, s, first); };
            rows.template fold_parts<N>(numbers, left, fill, [&](const float (&)[H][2]) { shift_rows(products, rows.scales); });
        } else {
            float room[H][N];
            auto& s = products.take(room, 0);
            KN_UNROLL_ALL
            for (int h = 0; h < H; ++h) finish_sums<G>(rows.warp.rows[h], s[h], numbers, 0, j0, rows.scales[h].exponent);
            rows.fold_whole(s, numbers, left);
        }
    });
    deliver_wide(rows, w);
}

#ifdef KN_WGMMA
/// The reduction, two warpgroups a block.
template <class G>
KN_FN void matrix_wide_groups(const typename G::Arguments& a) {
    typedef Panels<G> P;
    long long panel;
    const Where w = matrix_block<G>(a, panel);
    if (is_plain<G>(a, w, panel, choose_mode<G>(a, P::survey(a, w.batch)))) return;
    WideRows<G, 1> rows(a, w.batch, panel);
    const Reader<G> reader = open_reader<G>(a, w, panel);
    consume<G>(a, reader, w.split * a.span / P::POINTS, [&](float (&s)[64], const float* numbers, int, long long j0, int left) {
        finish_sums<G>(rows.warp.rows[0], s, numbers, 0, j0, rows.scales[0].exponent);
        rows.fold_whole(reinterpret_cast<float (&)[1][64]>(s), numbers, left);
    });
    deliver_wide(rows, w);
}
#endif

/// The second pass: one thread for each component of each row adds the splits and finishes.
/// @param a `total` is the number of results
template <class G>
KN_FN void finish_wide(const typename G::Arguments& a) {
    typedef typename G::F F;
    constexpr int STRIDE = G::C * G::CHUNKS;
    const long long item = (a.first + blockIdx.x) * blockDim.x + threadIdx.x;
    if (item >= a.total) return;
    const int c = static_cast<int>(item % F::DIM);
    const bool moment = F::MOMENT && c >= F::MOMENT_AT && c < F::MOMENT_AT + F::LENGTH;
    const long long place = item / F::DIM, batch = place / a.m, row = place - batch * a.m;
    const float* partial = static_cast<const float*>(a.partial) + place * a.splits * STRIDE;
    float sum = 0, low = 0, weight = 0, weight_low = 0;
    for (long long s = 0; s < a.splits; ++s) {
        add_compensated(sum, low, partial[s * STRIDE + c]);
        if (moment) add_compensated(weight, weight_low, partial[s * STRIDE + F::WEIGHT_AT]);
    }
    sum += low, weight += weight_low;
    const CentredPoint<G> p(a, batch, row, true);
    if (moment) sum = F::MOMENT * (p(c - F::MOMENT_AT) * weight - sum);
    float x[F::NROW ? F::NROW : 1];
    F::template row<float>(p.in, &x[0]);
    write_wide<G>(a, place, c, F::template finish<float>(&x[0], c, sum));
}

}  // namespace kn
