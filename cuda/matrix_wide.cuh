// Many right-hand sides: the kernel's values of a block of pairs are one operand of a second product, with the right-hand
// sides as the other. A warp's results of the first product are laid out as the unit wants its left operand, if the columns
// of every eight are taken in the order 0 2 4 6 1 3 5 7; `pack_rhs` has put the right-hand sides in that order.
//
// Both operands are split into two numbers of 11 bits with a float's range (TF32), so that values of any size keep their
// relative accuracy: upper x upper + upper x lower + lower x upper, off by 2^-20 of each term. The unit adds at most
// 128 terms before its result is added to a compensated sum.
#pragma once

namespace kn {

/// Sums of C components of a thread's two rows: of every eight, components 2 (lane % 4) and the next.
/// @tparam KAHAN whether there are registers to compensate the sum; at most a few thousand numbers are added otherwise
template <int TILES, bool KAHAN>
struct WideSums {
    float part[4 * TILES], sum[4 * TILES], rest[KAHAN ? 4 * TILES : 1];

    KN_FN void init() {
        KN_UNROLL_ALL
        for (int k = 0; k < 4 * TILES; ++k) part[k] = sum[k] = rest[KAHAN ? k : 0] = 0;
    }
    KN_FN void flush() {
        KN_UNROLL_ALL
        for (int k = 0; k < 4 * TILES; ++k) {
            if constexpr (KAHAN) {
                const float y = part[k] - rest[k], t = sum[k] + y;
                rest[k] = (t - sum[k]) - y, sum[k] = t;
            } else {
                sum[k] += part[k];
            }
            part[k] = 0;
        }
    }
};

/// A number's upper 11 bits, and the rest.
KN_FN void split_tf32(const float* v, unsigned (&high)[4], unsigned (&low)[4]) {
    const int order[4] = {0, 2, 1, 3};  // of four pairs, as the unit reads them
    KN_UNROLL_ALL
    for (int q = 0; q < 4; ++q) {
        high[q] = __float_as_uint(v[order[q]]) & 0xffffe000u;
        low[q] = __float_as_uint(v[order[q]] - __uint_as_float(high[q]));
    }
}

/// Adds the products of `p`, four pairs of each eight columns, with the right-hand sides at `rhs`.
template <int TILES, bool KAHAN, int H, int N>
KN_FN void add_wide(WideSums<TILES, KAHAN> (&sums)[H], const float (&p)[H][N], const float* rhs) {
    KN_UNROLL_ALL
    for (int k = 0; k < N; k += 4) {
        unsigned high[H][4], low[H][4];
        KN_UNROLL_ALL
        for (int h = 0; h < H; ++h) split_tf32(p[h] + k, high[h], low[h]);
        KN_UNROLL_ALL
        for (int tile = 0; tile < TILES; ++tile) {
            const auto b = *reinterpret_cast<const Vec<unsigned, 4>*>(rhs + ((k / 4 * TILES + tile) * 32 + threadIdx.x % 32) * 4);
            KN_UNROLL_ALL
            for (int h = 0; h < H; ++h) {
                multiply_tf32(sums[h].part + 4 * tile, low[h], b.v[0], b.v[1]);
                multiply_tf32(sums[h].part + 4 * tile, high[h], b.v[2], b.v[3]);
                multiply_tf32(sums[h].part + 4 * tile, high[h], b.v[0], b.v[1]);
            }
        }
    }
}

/// The scalar of the formula for the pairs at hand; 0 for columns that do not exist.
template <class G, int N>
KN_FN void weigh(const MatrixRows<G>& rows, float (&s)[N], const float* numbers, int first, int left) {
    typedef typename MatrixRows<G>::V V;
    const int lane = threadIdx.x % 32;
    KN_UNROLL_ALL
    for (int k = 0; k < N; k += 4) {
        const int column = first + 2 * k + lane % 4 * 2;
        const QuadColumns<V> y{numbers + column, {{s[k], s[k + 1], s[k + 2], s[k + 3]}}};
        V out[1];
        G::F::template pair<1, V>(QuadRows<V, MatrixRows<G>::NROW>{rows.x}, y, 0, out);
        KN_UNROLL_ALL
        for (int q = 0; q < 4; ++q) s[k + q] = column + q % 2 < left ? out[0].v[q] : 0;
    }
}

/// With one split and no moment the results are written, else the sums are saved.
template <class G, class Sums>
KN_FN void deliver_wide(const MatrixRows<G>& rows, const Where& w, const Sums& sums) {
    typedef typename G::F F;
    const auto& a = rows.a;
    KN_UNROLL_ALL
    for (int k = 0; k < G::C / 2; ++k) {
        const int r = k / 2 % 2, c = w.c0 + k / 4 * 8 + threadIdx.x % 4 * 2 + k % 2;
        const long long row = rows.row[r];
        const float value = sums.sum[k];
        if (row >= a.m) continue;
        check_finite<G>(a, w, value);
        if (a.splits == 1 && !F::MOMENT) {
            if (c < F::DIM)
                static_cast<float*>(a.value)[(w.batch * a.m + row) * F::OUT + c] = F::template finish<float>(rows.x[r], c, value);
        } else {
            static_cast<float*>(a.partial)[((w.batch * a.m + row) * a.splits + w.split) * (G::C * G::CHUNKS) + c] = value;
        }
    }
}

/// The reduction by warps, each with H times 16 rows.
template <class G>
KN_FN void matrix_wide(const typename G::Arguments& a) {
    typedef Panels<G> P;
    constexpr int H = G::H, TILES = G::C / 8, SUMS = G::SUB * 4;
    long long panel;
    const Where w = matrix_block<G>(a, panel);
    if (is_plain<G>(a, w, panel, choose_mode<G>(a, P::survey(a, w.batch)))) return;
    const Warp<G, H> warp(a, w.batch, panel);
    WideSums<TILES, P::CHUNKS == 1> sums[H];
    KN_UNROLL_ALL
    for (int h = 0; h < H; ++h) sums[h].init();
    walk_tiles<G>(a, w, panel, [&](float (&s)[H][SUMS], const float* numbers, int first, int, long long j0, int left) {
        KN_UNROLL_ALL
        for (int h = 0; h < H; ++h) {
            finish_sums<G>(warp.rows[h], s[h], numbers, first, j0);
            weigh<G>(warp.rows[h], s[h], numbers, first, left);
        }
        add_wide(sums, s, numbers + P::NUMBERS_BYTES / 4 + first / 8 * TILES * 128);
        if (first + G::SUB * 8 < 128) return;
        KN_UNROLL_ALL
        for (int h = 0; h < H; ++h) sums[h].flush();
    });
    KN_UNROLL_ALL
    for (int h = 0; h < H; ++h) deliver_wide(warp.rows[h], w, sums[h]);
}

#ifdef KN_WGMMA
/// The reduction, two warpgroups a block.
template <class G>
KN_FN void matrix_wide_groups(const typename G::Arguments& a) {
    typedef Panels<G> P;
    long long panel;
    const Where w = matrix_block<G>(a, panel);
    const Warp<G, 1> warp(a, w.batch, panel);
    if (is_plain<G>(a, w, panel, warp.rows[0].mode)) return;
    const Reader<G> reader = open_reader<G>(a, w, panel);
    WideSums<G::C / 8, P::CHUNKS == 1> sums[1];
    sums[0].init();
    consume<G>(a, reader, w.split * a.span / P::POINTS, [&](float (&s)[64], const float* numbers, int, long long j0, int left) {
        finish_sums<G>(warp.rows[0], s, numbers, 0, j0);
        weigh<G>(warp.rows[0], s, numbers, 0, left);
        add_wide(sums, reinterpret_cast<float (&)[1][64]>(s), numbers + P::NUMBERS_BYTES / 4);
        sums[0].flush();
    });
    deliver_wide(warp.rows[0], w, sums[0]);
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
    const long long place = item / F::DIM, batch = place / a.m, row = place - batch * a.m;
    const float* partial = static_cast<const float*>(a.partial) + place * a.splits * STRIDE;
    float sum = 0, low = 0, weight = 0, weight_low = 0;
    for (long long s = 0; s < a.splits; ++s) {
        add_compensated(sum, low, partial[s * STRIDE + c]);
        if (F::MOMENT) add_compensated(weight, weight_low, partial[s * STRIDE + F::DIM]);
    }
    sum += low, weight += weight_low;
    const CentredPoint<G> p(a, batch, row, true);
    if (F::MOMENT) sum = F::MOMENT * (p(c) * weight - sum);
    float x[F::NROW ? F::NROW : 1];
    F::template row<float>(p.in, &x[0]);
    static_cast<float*>(a.value)[place * F::OUT + c] = F::template finish<float>(&x[0], c, sum);
}

}  // namespace kn
