// The second pass of a reduction whose columns were split: folds the states of each row together, in a fixed order.
#pragma once

namespace kn {

/// @return the state of the lane `offset` above this one
template <class S>
KN_FN S shuffle_down(const S& state, int offset) {
    static_assert(sizeof(S) % sizeof(int) == 0, "states are moved in words");
    constexpr int WORDS = sizeof(S) / sizeof(int);
    int words[WORDS];
    memcpy(words, &state, sizeof(S));
    KN_UNROLL_ALL
    for (int k = 0; k < WORDS; ++k) words[k] = __shfl_down_sync(0xffffffffu, words[k], offset);
    S other;
    memcpy(&other, words, sizeof(S));
    return other;
}

/// LANES threads merge the splits of one row and chunk, each every LANES-th of them, then among themselves.
/// @param a the call's arguments; `total` is the number of rows times chunks times batch elements
template <class G>
KN_FN void merge(const typename G::Arguments& a) {
    typedef typename G::T T;
    typedef typename G::State State;
    static_assert(32 % G::LANES == 0, "the lanes of a row lie in one warp");
    const long long thread = (a.first + blockIdx.x) * blockDim.x + threadIdx.x;
    const long long item = thread / G::LANES < a.total ? thread / G::LANES : a.total - 1;  // every lane must shuffle
    const int lane = static_cast<int>(thread % G::LANES);
    if (!G::MATRIX && !__any_sync(0xffffffffu, !is_done(a, item / a.m / G::CHUNKS))) return;
    const State* partial = static_cast<const State*>(a.partial) + item * a.splits;
    State state;
    state.init();
#pragma unroll 2
    for (long long s = lane; s < a.splits; s += G::LANES) state.merge(partial[s]);
    KN_UNROLL_ALL
    for (int offset = G::LANES / 2; offset; offset /= 2) state.merge(shuffle_down(state, offset));
    if (lane || thread / G::LANES >= a.total) return;
    if (!G::MATRIX && is_done(a, item / a.m / G::CHUNKS)) return;

    Where w;
    w.split = 0;
    w.row = item % a.m;
    const long long rest = item / a.m;
    w.chunk = static_cast<int>(rest % G::CHUNKS);
    w.batch = rest / G::CHUNKS;
    w.c0 = G::CHUNKS == 1 ? 0 : w.chunk * G::C < G::F::DIM - G::C ? w.chunk * G::C : G::F::DIM - G::C;
    if constexpr (G::ROWS_IN_MEMORY) {
        const long long block = w.row / Layout<G>::ROWS;
        const T* first = Layout<G>::row(a, w.batch * a.row_blocks + block, static_cast<int>(w.row % Layout<G>::ROWS));
        G::Results::template write<G>(a, w, RowSlots<T, Layout<G>::SLOT>{first}, state);
    } else {
        T x[G::F::NROW ? G::F::NROW : 1];
        In<G> in(a, w.batch);
        in.index = w.row;
        G::F::template row<T>(in, &x[0]);
        G::Results::template write<G>(a, w, RowSlots<T, 1>{x}, state);
    }
}

}  // namespace kn
