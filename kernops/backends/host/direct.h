// Sum, Min and MinArgMin of a formula with few components, or of one whose components share no work: the state of C
// components is updated pair by pair.
#pragma once

#include "driver.h"
#include "lanes.h"

namespace kn {

/// The same state with 64-bit indices, counted from column `first` on.
template <template <class, class, int> class State, class T, class I, int C>
State<T, int64_t, C> widened(const State<T, I, C>& s, int64_t) {
    State<T, int64_t, C> w;
    memcpy(&w, &s, sizeof w);  // no index in it
    return w;
}
template <class T, class I, int C>
MinArgMin<T, int64_t, C> widened(const MinArgMin<T, I, C>& s, int64_t first) {
    MinArgMin<T, int64_t, C> w;
    for (int c = 0; c < C; ++c) w.best[c] = s.best[c], w.arg[c] = s.arg[c] < 0 ? -1 : first + s.arg[c];
    return w;
}

template <class State>
struct HasIndex {
    static constexpr bool value = false;
};
template <class T, class I, int C>
struct HasIndex<MinArgMin<T, I, C>> {
    static constexpr bool value = true;
};

template <class T, class F, class S, template <class, class, int> class State>
struct Direct {
    typedef T Real;
    typedef F Formula;
    static constexpr int R = S::R, U = S::U, BLOCKS = S::BLOCKS, TILE = S::TILE, C = S::C, L = LANES<T>;
    static constexpr int CELLS = (F::DIM + C - 1) / C, WORK = S::WORK;
    typedef typename Simd<T>::Int Int;
    typedef State<Pack<T, R>, Pack<Int, R>, C> Lanes;
    typedef State<T, int64_t, C> Cell;
    typedef Layout<T, F, U> Blocks;

    /// First component of cell q. The last cell may overlap the one before.
    KN_FN static int component(int q) { return smaller(q * C, F::DIM - C); }

    static constexpr int FLUSH = larger(1, SPAN / (TILE * U));  // tiles
    static KN_SLOW void flush(Lanes& state) { state.flush(); }

    static size_t scratch(int64_t blocks) { return blocks * sizeof(Lanes); }

    /// Folds `count` blocks of columns into the state; `left` columns remain from the first on, `at` is its number.
    template <bool MASKED>
    KN_FN static void sweep(Lanes& state, const T* rows, const T* columns, int64_t count, int64_t left, int64_t at, int c0) {
        Vec<Int> lane = iota<Int>(Int(at));
        for (int64_t block = 0; block < count; ++block) {
            Pack<T, R * U> value[C];
            evaluate<T, F, S, C>(rows, columns + block * Blocks::STRIDE, value, [&](const auto& x, const auto& y, auto* v) {
                F::template pair<C>(x, y, c0, v);
            });
            KN_UNROLL(16)
            for (int u = 0; u < U; ++u) {
                Pack<T, R> v[C];
                Pack<Int, R> j;
                KN_UNROLL(16)
                for (int r = 0; r < R; ++r) j.v[r] = lane;
                lane = lane + Int(L);
                KN_UNROLL(64)
                for (int c = 0; c < C; ++c) {
                    v[c] = part<R>(value[c], u);
                    if (MASKED) v[c] = select(same_mask<T, R>(columns_mask<T>(left, u)), v[c], Lanes::neutral(c));
                }
                state.update(v, j);
            }
        }
    }

    static KN_SLOW void tile(Lanes& state, const T* rows, const T* columns, int64_t count, int64_t left, int64_t at, int c0) {
        Lanes local;
        resume(local, state);
        const int64_t full = smaller(count, left / Blocks::WIDTH);
        sweep<false>(local, rows, columns, full, left, at, c0);
        if (full < count)
            sweep<true>(local, rows, columns + full * Blocks::STRIDE, 1, left - full * Blocks::WIDTH,
                        at + full * Blocks::WIDTH, c0);
        save(state, local);
    }

    template <class Give>
    static void compute(const Piece<T>& piece, void* scratch, const Give& give) {
        Lanes* const state = static_cast<Lanes*>(scratch);
        for (int q = 0; q < CELLS; ++q) {
            for (int64_t k = 0; k < piece.blocks; ++k) state[k].init();
            for (int64_t block = 0; block < piece.column_blocks; block += TILE)
                for (int64_t k = 0; k < piece.blocks; ++k) {
                    const int64_t count = smaller<int64_t>(TILE, piece.column_blocks - block);
                    tile(state[k], piece.rows + k * R * F::ROWS, piece.columns + block * Blocks::STRIDE, count,
                         piece.width - block * Blocks::WIDTH, block * Blocks::WIDTH, component(q));
                    if ((block / TILE + 1) % FLUSH == 0 || block + count == piece.column_blocks) flush(state[k]);
                }
            for (int64_t k = 0; k < piece.blocks; ++k) {
                merge_lanes<T>(state[k]);
                for (int r = 0; r < R; ++r)
                    give(k, r, q, widened(lane_zero<State<T, Int, C>, T, R>(state[k], r), piece.first));
            }
        }
    }

    template <class Row>
    static void write(const Row& x, int64_t place, int q, const Cell& cell, void* const* out) {
        T* const value = static_cast<T*>(out[0]) + place * F::OUT;
        if (F::OUT != F::DIM) {  // one component, which the row factor widens
            for (int c = 0; c < F::OUT; ++c) value[c] = F::finish(x, c, cell.value(0));
            return;
        }
        for (int c = 0; c < C; ++c) *result<T, F>(out, place, component(q) + c) = F::finish(x, component(q) + c, cell.value(c));
        if constexpr (HasIndex<Cell>::value)
            for (int c = 0; c < C; ++c) static_cast<int64_t*>(out[1])[place * F::OUT + component(q) + c] = cell.arg[c];
    }
};

}  // namespace kn
