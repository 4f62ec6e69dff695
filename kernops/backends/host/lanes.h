// From a state of SIMD vectors to states of single numbers: the lanes of each row are merged with one another.
// A state of `reductions.cuh` is nothing but packs of R vectors, of numbers or of integers of the same width, one after
// the other; so its lanes can be turned as a whole and picked without knowing what they mean.
#pragma once

#include "../../cuda/reductions.cuh"
#include "pack.h"

namespace kn {

/// What `update` changes of a state goes to a local copy and back; the rest stays where it is. (The local copy of all would
/// not be kept in registers.)
template <class V, class I, int C>
KN_FN void resume(Sum<V, I, C>& local, const Sum<V, I, C>& state) {
    KN_UNROLL(64)
    for (int c = 0; c < C; ++c) local.part[c] = state.part[c];
}
template <class V, class I, int C>
KN_FN void save(Sum<V, I, C>& state, const Sum<V, I, C>& local) {
    KN_UNROLL(64)
    for (int c = 0; c < C; ++c) state.part[c] = local.part[c];
}
template <class State>
KN_FN void resume(State& local, const State& state) {
    local = state;
}
template <class State>
KN_FN void save(State& state, const State& local) {
    state = local;
}
/// Vectors of columns that are summed plainly before they go to the compensated total.
constexpr int SPAN = 64;

/// `state` with every lane moved by `by` places, cyclically.
template <class T, class State>
KN_FN State rotated_state(const State& state, int by) {
    constexpr int COUNT = sizeof(State) / sizeof(Vec<T>);
    Vec<T> v[COUNT];
    memcpy(v, &state, sizeof v);
    for (int k = 0; k < COUNT; ++k) v[k] = rotated<T>(v[k], by);
    State r;
    memcpy(&r, v, sizeof v);
    return r;
}

/// Merges all lanes: every lane of the result holds the whole (or, for a sum, lane 0 does).
template <class T, class State>
KN_SLOW void merge_lanes(State& state) {
    for (int by = LANES<T> / 2; by > 0; by /= 2) {
        const State other = rotated_state<T>(state, by);
        state.merge(other);
    }
}

/// The vector whose lane k is the sum of the lanes of v[k]; v is used up.
template <class T>
KN_FN Vec<T> sum_lanes(Vec<T>* v) {
    typedef typename Simd<T>::Int Int;
    KN_UNROLL(8)
    for (int half = LANES<T> / 2; half > 0; half /= 2) {
        const Vec<Int> upper = lt(fill(Int(0)), iota<Int>(0) & Int(half));
        KN_UNROLL(16)
        for (int k = 0; k < half; ++k)  // lanes without the bit `half` sum up v[k], the others v[k + half]
            v[k] = select(upper, v[k + half], v[k]) + exchanged<T>(select(upper, v[k], v[k + half]), half);
    }
    return v[0];
}

/// Lane 0 of row r of a state of packs of R rows, as a state of numbers.
template <class Scalar, class T, int R, class State>
KN_FN Scalar lane_zero(const State& state, int r) {
    constexpr int COUNT = sizeof(State) / sizeof(Vec<T>) / R;
    static_assert(sizeof(Scalar) == COUNT * sizeof(T), "a state of numbers must mirror the state of vectors");
    T v[COUNT];
    const T* all = reinterpret_cast<const T*>(&state);
    for (int k = 0; k < COUNT; ++k) memcpy(&v[k], all + (k * R + r) * LANES<T>, sizeof(T));
    Scalar s;
    memcpy(&s, v, sizeof s);
    return s;
}

}  // namespace kn
