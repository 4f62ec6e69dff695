// The K smallest (value, index) that a warp was offered, in order: place p is held by lane p % 32. The order in which they
// were offered does not matter. NaN is never taken.
#pragma once

namespace kn {

template <int K>
struct WarpList {
    static constexpr int HELD = (K + 31) / 32;  // places of a lane
    float value[HELD];
    int index[HELD];  // nearest::NONE where a place is empty

    KN_FN void clear() {
        KN_UNROLL_ALL
        for (int h = 0; h < HELD; ++h) value[h] = static_cast<float>(KN_INF), index[h] = nearest::NONE;
    }
    /// @return whether (v, j) comes before (w, k)
    KN_FN static bool before(float v, int j, float w, int k) { return v < w || (v == w && j < k); }

    /// @return the value of the last place, infinite while it is empty
    KN_FN float last_value() const { return __shfl_sync(0xffffffffu, value[HELD - 1], (K - 1) % 32); }

    /// Every lane offers one; those with index NONE do not.
    KN_FN void offer(float v, int j) {
        constexpr unsigned ALL = 0xffffffffu;
        const float last = last_value();
        const int last_index = __shfl_sync(ALL, index[HELD - 1], (K - 1) % 32);
        const bool is = j != nearest::NONE && before(v, j, last, last_index);
        for (unsigned good = __ballot_sync(ALL, is); good; good &= good - 1) {
            const int from = __ffs(good) - 1;
            insert(__shfl_sync(ALL, v, from), __shfl_sync(ALL, j, from));
        }
    }

    /// @param v, j the same in all lanes
    KN_FN void insert(float v, int j) {
        constexpr unsigned ALL = 0xffffffffu;
        int place = 0;
        KN_UNROLL_ALL
        for (int h = 0; h < HELD; ++h) place += __popc(__ballot_sync(ALL, before(value[h], index[h], v, j)));
        KN_UNROLL_ALL
        for (int h = HELD - 1; h >= 0; --h) {
            const int mine = static_cast<int>(threadIdx.x % 32) + 32 * h;
            float from = __shfl_up_sync(ALL, value[h], 1);
            int from_index = __shfl_up_sync(ALL, index[h], 1);
            if (h > 0) {  // the first lane's comes from the last
                const float carry = __shfl_sync(ALL, value[h ? h - 1 : 0], 31);
                const int carry_index = __shfl_sync(ALL, index[h ? h - 1 : 0], 31);
                if (threadIdx.x % 32 == 0) from = carry, from_index = carry_index;
            }
            value[h] = mine < place ? value[h] : mine == place ? v : from;
            index[h] = mine < place ? index[h] : mine == place ? j : from_index;
        }
    }
    /// Writes the K places as they are.
    KN_FN void save(float* values, int* indices) const {
        KN_UNROLL_ALL
        for (int h = 0; h < HELD; ++h) {
            const int place = threadIdx.x % 32 + 32 * h;
            if (place < K) values[place] = value[h], indices[place] = index[h];
        }
    }
    /// Writes the K places; NaN and -1 to empty ones.
    template <class Index>
    KN_FN void write(float* values, Index* indices) const {
        KN_UNROLL_ALL
        for (int h = 0; h < HELD; ++h) {
            const int place = threadIdx.x % 32 + 32 * h;
            if (place >= K) continue;
            const bool empty = index[h] == nearest::NONE;
            values[place] = empty ? static_cast<float>(KN_NAN) : value[h];
            indices[place] = empty ? -1 : index[h];
        }
    }
};

}  // namespace kn
