// Reductions in stages, for formulas of many components that share work, and for sums of exponentials.
//
// A tile of columns is taken in stages, for a few row blocks at a time:
//   1. the numbers of each pair that the components share go to a small table in the cache;
//   2. (exponentials) the table's exponents F become exp(F - m), where m is the largest of the row so far;
//   3. the components are summed C at a time, so that C sums of R rows stay in registers.
// Thus a kernel with 512 right-hand sides is evaluated once, and an exponential needs no choice per pair.
//
// The formula F provides, besides what `emit` writes,
//   SHARED                        numbers that a pair's components share
//   shared<V>(x, y, z)            computes them into z[0 .. SHARED - 1]; for SumSoftMaxWeight z[0] is the exponent
//   components<C>(x, y, z, c0, v) components c0 .. c0 + C - 1, given the shared numbers
#pragma once

#include "driver.h"
#include "lanes.h"

namespace kn {

/// Reads back the shared numbers of R rows and one of U vectors of columns.
template <class T, int R, int U>
struct SharedSlots {
    const T* p;
    KN_FN Pack<T, R> operator[](int s) const {
        Pack<T, R> z;
        KN_UNROLL(16)
        for (int k = 0; k < R; ++k) z.v[k] = load(p + (s * R * U + k) * LANES<T>);
        return z;
    }
};
template <class T, int P>
KN_FN void store_pack(T* p, const Pack<T, P>& v) {
    KN_UNROLL(16)
    for (int k = 0; k < P; ++k) store(p + k * LANES<T>, v.v[k]);
}

/// The largest exponent of each of R rows so far, and the sum of exp(F - largest).
template <class T, int R>
struct Exponents {
    typedef Pack<T, R> V;
    T top[R];
    Sum<V, Pack<typename Simd<T>::Int, R>, 1> sum;

    void init() {
        for (int r = 0; r < R; ++r) top[r] = T(-KN_INF);
        sum.init();
    }

    /// Raises `top` to what a tile holds; @return whether it rose, and then by which factor older sums shrink.
    bool raise(const V& tile, V& factor) {
        bool rose = false;
        factor = splat<V>(1);
        for (int r = 0; r < R; ++r) {
            Vec<T> v = tile.v[r];
            for (int by = LANES<T> / 2; by > 0; by /= 2) v = greater(rotated<T>(v, by), v);
            const T most = v[0];
            if (most > top[r]) {
                factor.v[r] = fill(exp(top[r] - most));
                top[r] = most;
                rose = true;
            }
        }
        if (rose) scale(sum, factor);
        return rose;
    }

    template <class State>
    static void scale(State& s, const V& factor) {
        for (int c = 0; c < State::C; ++c)
            s.part[c] = s.part[c] * factor, s.hi[c] = s.hi[c] * factor, s.lo[c] = s.lo[c] * factor;
    }

    /// Replaces the exponents z[0] of `count` blocks, `stride` numbers apart, by exp(F - top), and adds them up.
    /// Where a row's largest is infinite, only equals of it count.
    template <int U, bool STORE>
    KN_SLOW void exponentiate(T* z, int64_t count, int64_t stride) {
        V base;
        bool infinite = false;
        for (int r = 0; r < R; ++r) {
            base.v[r] = fill(top[r] == T(-KN_INF) ? T(0) : top[r]);
            infinite = infinite || top[r] == T(KN_INF);
        }
        V part = splat<V>(0);
        if (!infinite)
            for (int64_t block = 0; block < count; ++block)
                part = part + each<U, STORE, false>(z + block * stride, base);
        else
            for (int64_t block = 0; block < count; ++block)
                part = part + each<U, STORE, true>(z + block * stride, base);
        sum.part[0] = part;
        sum.flush();
    }
    template <int U, bool STORE, bool EQUALS>
    KN_FN static V each(T* z, const V& base) {
        V total;
        KN_UNROLL(16)
        for (int u = 0; u < U; ++u) {
            V e;
            KN_UNROLL(16)
            for (int r = 0; r < R; ++r) {
                const Vec<T> f = load(z + (u * R + r) * LANES<T>);
                e.v[r] = exp_below(f - base.v[r]);
                if (EQUALS) e.v[r] = select(eq(f, base.v[r]), fill(T(1)), e.v[r]);
            }
            if (STORE) store_pack(z + u * R * LANES<T>, e);
            total = u ? total + e : e;
        }
        return total;
    }
};

/// Stage 1 for exponents: computes z of `count` blocks and the largest z[0] of each lane.
/// Lanes past the last column get the exponent -Inf.
template <class T, class F, class S, class Blocks, int SHARED, class Formula>
KN_FN Pack<T, S::R> tabulate(const T* rows, const T* columns, int64_t count, int64_t left, T* z, const Formula& formula) {
    constexpr int R = S::R, U = S::U, P = R * U;
    typedef Pack<T, R> V;
    V top = splat<V>(-KN_INF);
    const auto one = [&](int64_t block, bool masked) __attribute__((always_inline)) {
        Pack<T, P> value[SHARED];
        evaluate<T, F, S, SHARED>(rows, columns + block * Blocks::STRIDE, value, formula);
        KN_UNROLL(16)
        for (int u = 0; u < U; ++u) {
            V f = part<R>(value[0], u);
            if (masked) {
                f = select(same_mask<T, R>(columns_mask<T>(left - block * Blocks::WIDTH, u)), f, splat<V>(-KN_INF));
                for (int r = 0; r < R; ++r) value[0].v[u * R + r] = f.v[r];
            }
            top = greater(f, top);
        }
        KN_UNROLL(16)
        for (int s = 0; s < SHARED; ++s) store_pack(z + (block * SHARED + s) * P * LANES<T>, value[s]);
    };
    const int64_t full = smaller(count, left / Blocks::WIDTH);
    for (int64_t block = 0; block < full; ++block) one(block, false);
    if (full < count) one(full, true);
    return top;
}

// --- log sum exp ------------------------------------------------------------------------------------------------------
/// Each component on its own.
template <class T, class F, class S>
struct LogSums {
    typedef T Real;
    typedef F Formula;
    static constexpr int R = S::R, U = S::U, BLOCKS = S::BLOCKS, TILE = S::TILE;
    static constexpr int CELLS = F::DIM, WORK = S::WORK;
    typedef LogSumExp<T, int64_t, 1> Cell;
    typedef Layout<T, F, U> Blocks;
    typedef Exponents<T, R> State;
    static constexpr int64_t STRIDE = int64_t(R) * U * LANES<T>;

    static size_t scratch(int64_t blocks) { return round_up(blocks * sizeof(State), 64) + TILE * STRIDE * sizeof(T); }

    static KN_SLOW Pack<T, R> table(const T* rows, const T* columns, int64_t count, int64_t left, T* z, int c) {
        return tabulate<T, F, S, Blocks, 1>(rows, columns, count, left, z, [&](const auto& x, const auto& y, auto* v) {
            F::template pair<1>(x, y, c, v);
        });
    }

    template <class Give>
    static void compute(const Piece<T>& piece, char* scratch, const Give& give) {
        State* const state = reinterpret_cast<State*>(scratch);
        T* const z = reinterpret_cast<T*>(scratch + round_up(piece.blocks * sizeof(State), 64));
        for (int c = 0; c < F::DIM; ++c) {
            for (int64_t k = 0; k < piece.blocks; ++k) state[k].init();
            for (int64_t block = 0; block < piece.column_blocks; block += TILE) {
                const int64_t count = smaller<int64_t>(TILE, piece.column_blocks - block);
                for (int64_t k = 0; k < piece.blocks; ++k) {
                    const Pack<T, R> most = table(piece.rows + k * R * F::ROWS, piece.columns + block * Blocks::STRIDE,
                                                  count, piece.width - block * Blocks::WIDTH, z, c);
                    Pack<T, R> factor;
                    state[k].raise(most, factor);
                    state[k].template exponentiate<U, false>(z, count, STRIDE);
                }
            }
            for (int64_t k = 0; k < piece.blocks; ++k) {
                merge_lanes<T>(state[k].sum);
                for (int r = 0; r < R; ++r) {
                    Cell cell;
                    cell.init();
                    cell.total[0].m = state[k].top[r];
                    cell.total[0].s = state[k].sum.hi[0].v[r][0], cell.total[0].slo = state[k].sum.lo[0].v[r][0];
                    give(k, r, c, cell);
                }
            }
        }
    }

    template <class Row>
    static void write(const Row& x, int64_t place, int c, const Cell& cell, void* const* out) {
        static_cast<T*>(out[0])[place * F::OUT + c] = F::finish(x, c, cell.value(0));
    }
};

// --- sums of many components, weighted by exponentials or not ---------------------------------------------------------
template <class T, class F, class S, bool SOFTMAX>
struct Staged {
    typedef T Real;
    typedef F Formula;
    static constexpr int R = S::R, U = S::U, BLOCKS = S::BLOCKS, TILE = S::TILE, C = S::C, P = R * U, L = LANES<T>;
    static constexpr int CELLS = (F::DIM + C - 1) / C, WORK = S::WORK;
    static constexpr int SUMS = R * C, GROUPS = (SUMS + L - 1) / L;  // sums of a cell, and the vectors that hold them
    /// The compensated sums of a cell, as [component][row].
    struct Totals {
        Vec<T> hi[GROUPS], lo[GROUPS];
    };
    template <bool, class V, class I>
    struct CellOf {
        typedef Sum<V, I, C> type;
    };
    template <class V, class I>
    struct CellOf<true, V, I> {
        typedef SumSoftMaxWeight<V, I, C> type;
    };
    typedef typename CellOf<SOFTMAX, T, int64_t>::type Cell;
    typedef Layout<T, F, U> Blocks;
    static constexpr int64_t STRIDE = int64_t(F::SHARED) * P * L;  // numbers of the table for a block of columns

    KN_FN static int component(int q) { return smaller(q * C, F::DIM - C); }

    struct Scratch {
        Totals* totals;              // [row block][cell]
        Exponents<T, R>* exponents;  // [row block]
        T* z;                        // [row block][block of columns][shared number][piece]
        size_t bytes;
        Scratch(char* base, int64_t blocks) {
            const size_t a = round_up(blocks * CELLS * sizeof(Totals), 64);
            const size_t b = a + round_up(blocks * sizeof(Exponents<T, R>), 64);
            totals = reinterpret_cast<Totals*>(base);
            exponents = reinterpret_cast<Exponents<T, R>*>(base + a);
            z = reinterpret_cast<T*>(base + b);
            bytes = b + blocks * TILE * STRIDE * sizeof(T);
        }
    };
    static size_t scratch(int64_t blocks) { return Scratch(nullptr, blocks).bytes; }

    static KN_SLOW Pack<T, R> table(const T* rows, const T* columns, int64_t count, int64_t left, T* z) {
        return tabulate<T, F, S, Blocks, F::SHARED>(rows, columns, count, left, z,
                                                    [](const auto& x, const auto& y, auto* v) { F::shared(x, y, v); });
    }

    template <bool MASKED>
    KN_FN static void sweep(Pack<T, R>* sum, const T* rows, const T* columns, const T* z, int64_t count, int64_t left, int c0) {
        const SomeRows<T, R, R> x{rows};
        for (int64_t block = 0; block < count; ++block) {
            KN_UNROLL(2)
            for (int u = 0; u < U; ++u) {  // one vector at a time: a cell's sums take most registers
                const SummedVector<T, R, R, U> y{columns + block * Blocks::STRIDE + u * L, nullptr};
                const SharedSlots<T, R, U> shared{z + block * STRIDE + u * R * L};
                Pack<T, R> value[C];
                F::template components<C, Pack<T, R>>(x, y, shared, c0, value);
                KN_UNROLL(64)
                for (int c = 0; c < C; ++c) {
                    Pack<T, R> v = SOFTMAX ? value[c] * shared[0] : value[c];
                    if (MASKED) v = select(same_mask<T, R>(columns_mask<T>(left, u)), v, splat<Pack<T, R>>(0));
                    sum[c] = sum[c] + v;
                }
            }
        }
    }
    /// Stage 3 for one cell of one row block.
    static KN_SLOW void tile(Totals& totals, const T* rows, const T* columns, const T* z, int64_t count, int64_t left, int c0) {
        Pack<T, R> sum[C];
        KN_UNROLL(64)
        for (int c = 0; c < C; ++c) sum[c] = splat<Pack<T, R>>(0);
        const int64_t full = smaller(count, left / Blocks::WIDTH);
        sweep<false>(sum, rows, columns, z, full, left, c0);
        if (full < count)
            sweep<true>(sum, rows, columns + full * Blocks::STRIDE, z + full * STRIDE, 1, left - full * Blocks::WIDTH, c0);
        for (int g = 0; g < GROUPS; ++g) {
            Vec<T> v[L];
            for (int k = 0; k < L; ++k)
                v[k] = g * L + k < SUMS ? sum[smaller(g * L + k, SUMS - 1) / R].v[(g * L + k) % R] : Vec<T>{};
            add_compensated(totals.hi[g], totals.lo[g], sum_lanes<T>(v));
        }
    }

    template <class Give>
    static void compute(const Piece<T>& piece, char* scratch, const Give& give) {
        const Scratch s(scratch, piece.blocks);
        for (int64_t k = 0; k < piece.blocks; ++k) s.exponents[k].init();
        memset(s.totals, 0, piece.blocks * CELLS * sizeof(Totals));
        for (int64_t block = 0; block < piece.column_blocks; block += TILE)
            columns(piece, s, piece.columns + block * Blocks::STRIDE, smaller<int64_t>(TILE, piece.column_blocks - block),
                    piece.width - block * Blocks::WIDTH);
        for (int64_t k = 0; k < piece.blocks; ++k) {
            if (SOFTMAX) merge_lanes<T>(s.exponents[k].sum);
            for (int q = 0; q < CELLS; ++q)
                for (int r = 0; r < R; ++r) give(k, r, q, cell(s.totals[k * CELLS + q], s.exponents[k], r));
        }
    }
    static void columns(const Piece<T>& piece, const Scratch& s, const T* columns, int64_t count, int64_t left) {
        for (int64_t k = 0; k < piece.blocks; ++k) {
            T* const z = s.z + k * TILE * STRIDE;
            const Pack<T, R> most = table(piece.rows + k * R * F::ROWS, columns, count, left, z);
            if (!SOFTMAX) continue;
            Pack<T, R> factor;
            if (s.exponents[k].raise(most, factor)) scale(s.totals + k * CELLS, factor);
            s.exponents[k].template exponentiate<U, true>(z, count, STRIDE);
        }
        for (int q = 0; q < CELLS; ++q)
            for (int64_t k = 0; k < piece.blocks; ++k)
                tile(s.totals[k * CELLS + q], piece.rows + k * R * F::ROWS, columns, s.z + k * TILE * STRIDE, count, left,
                     component(q));
    }
    static KN_SLOW void scale(Totals* totals, const Pack<T, R>& factor) {
        for (int q = 0; q < CELLS; ++q)
            for (int k = 0; k < SUMS; ++k)
                totals[q].hi[k / L][k % L] *= factor.v[k % R][0], totals[q].lo[k / L][k % L] *= factor.v[k % R][0];
    }
    static Cell cell(const Totals& totals, const Exponents<T, R>& e, int r) {
        Cell cell;
        cell.init();
        if constexpr (SOFTMAX) {
            cell.total.m = e.top[r];
            cell.total.s = e.sum.hi[0].v[r][0], cell.total.slo = e.sum.lo[0].v[r][0];
        }
        for (int c = 0; c < C; ++c) {
            const T hi = totals.hi[(c * R + r) / L][(c * R + r) % L], lo = totals.lo[(c * R + r) / L][(c * R + r) % L];
            if constexpr (SOFTMAX)
                cell.total.w[c] = hi, cell.total.wlo[c] = lo;
            else
                cell.hi[c] = hi, cell.lo[c] = lo;
        }
        return cell;
    }

    template <class Row>
    static void write(const Row& x, int64_t place, int q, const Cell& cell, void* const* out) {
        for (int c = 0; c < C; ++c) *result<T, F>(out, place, component(q) + c) = F::finish(x, component(q) + c, cell.value(c));
        if constexpr (SOFTMAX)
            if (q == 0) static_cast<T*>(out[1])[place] = cell.lse();
    }
};

}  // namespace kn
