// The steps of the search of nearest points (nearest_data.cuh) without products: thresholds, and exact distances.
#pragma once

namespace kn {

namespace nearest {
constexpr int REST_ROWS = 8;
constexpr int NO_BOUND = -1, DONE = -2;  // instead of a list's length

/// Components d, d + 1, ... of a point.
KN_FN void read(const float* p, long long component, int d, float (&to)[1]) { to[0] = p[d * component]; }
KN_FN void read(const float* p, long long, int d, float (&to)[4]) {
    const Sixteen s = *reinterpret_cast<const Sixteen*>(p + d);
    KN_UNROLL_ALL
    for (int k = 0; k < 4; ++k) to[k] = __uint_as_float(s.word[k]);
}

/// Where a row of the blocks that lists are made for lies: the batch element and its number there.
struct RowPlace {
    long long element, row;
};
template <class G>
KN_FN RowPlace place_of_row(const typename G::Arguments& a, long long local) {
    const unsigned block = static_cast<unsigned>(a.first_block + local / ROWS), each = static_cast<unsigned>(a.row_blocks);
    return {block / each, block % each * static_cast<long long>(ROWS) + local % ROWS};
}

/// A warp's row of the launch.
KN_FN long long row_of_launch() { return blockIdx.x * static_cast<long long>(ITEM_THREADS / 32) + threadIdx.x / 32; }

template <class G>
KN_FN void write_row(const typename G::Arguments& a, const RowPlace& at, const WarpList<G::K>& list) {
    const long long first = (at.element * a.m + at.row) * G::K;
    list.write(a.value + first, a.index + first);
}
}  // namespace nearest

/// Sets what the results of a row's nearest columns must reach, for all whose values are at most `bound`.
template <class G>
KN_FN void set_test(const typename G::Arguments& a, long long local, double bound, const RowNumbers& numbers, double scale) {
    using namespace nearest;
    constexpr double EPS = epsilon<G>(), GAMMA = gamma<G>(), TINY = G::DIM * 0x1p-149;
    const float tau = above(scale * sqrt((bound + TINY) / (1 - GAMMA)) + numbers.error);
    const double square = numbers.square, tau2 = static_cast<double>(tau) * tau;
    a.tests[local] = {tau, below((square - tau2 - EPS * (square + tau2)) / 2, square + tau2)};
}

/// Nothing passes the test of this row.
template <class G>
KN_FN void shut_test(const typename G::Arguments& a, long long local) {
    a.tests[local] = {0, static_cast<float>(KN_INF)};
}

/// A warp finds a first bound for a row.
template <class G>
KN_FN void nearest_threshold(const typename G::Arguments& a) {
    using namespace nearest;
    const long long local = row_of_launch();
    const int lane = threadIdx.x % 32;
    if (blockIdx.x == 0)
        for (int k = threadIdx.x; k < 1 + G::REST_BLOCKS; k += ITEM_THREADS) a.rest[k] = 0;
    if (local >= a.blocks * ROWS) return;
    const RowPlace at = place_of_row<G>(a, local);
    const RowNumbers numbers = a.row_numbers[a.first_block * ROWS + local];
    WarpList<G::K> list;
    list.clear();
    for (int first = 0; first < G::GROUPS; first += 32) {
        const int group = first + lane;
        const bool is = group < G::GROUPS;
        list.offer(is ? -a.maxima[local * G::SPACE + group] : 0, is ? group : NONE);
    }
    const float worst = list.last_value();
    if (lane) return;
    if (local % ROWS == 0) a.again[local / ROWS] = 0;
    constexpr double EPS = epsilon<G>(), GAMMA = gamma<G>(), TINY = G::DIM * 0x1p-149;
    const double square = numbers.square, scale = a.scale[at.element];
    const double r2 = (1 + ETA) * (square * (1 + EPS + 0x1p-22) + 2.0 * worst);
    const double distance = (sqrt(r2 > 0 ? r2 : 0) + numbers.error) / scale;
    // No place of the list is empty, and the K nearest columns have values that are finite.
    const bool good = numbers.error >= 0 && -worst > NEVER / 2 && distance * distance < 3e38;
    a.counts[local] = good ? 0 : NO_BOUND;
    if (good && at.row < a.m) {
        set_test<G>(a, local, (1 + GAMMA) * distance * distance + TINY, numbers, scale);
    } else {
        shut_test<G>(a, local);
    }
}

/// 32 coordinates of 32 columns and of a row, in shared memory: they come in the order of memory, and each lane then reads
/// those of its own column. What is beyond the last coordinate is zero, so that it adds nothing.
template <class G>
struct Gathered {
    static constexpr int WIDTH = 32, STEP = WIDTH + 1;  // an odd step: the lanes' columns lie in different banks
    float column[32 * STEP], row[WIDTH];

    /// @param own where this lane's column begins
    KN_FN void bring(const typename G::Arguments& a, const float* x, const float* own, int d0) {
        const int lane = threadIdx.x % 32;
        row[lane] = d0 + lane < G::DIM ? x[(d0 + lane) * a.x.component] : 0;
        constexpr int LANES = WIDTH / G::VEC;  // that read a column together
        KN_UNROLL_ALL
        for (int c0 = 0; c0 < 32; c0 += 32 / LANES) {
            const int c = c0 + lane / LANES, d = lane % LANES * G::VEC;
            const auto from = reinterpret_cast<const float*>(__shfl_sync(0xffffffffu, reinterpret_cast<size_t>(own), c));
            float part[G::VEC] = {};
            if (d0 + d < G::DIM) nearest::read(from, a.y.component, d0 + d, part);
            KN_UNROLL_ALL
            for (int k = 0; k < G::VEC; ++k) column[c * STEP + d + k] = part[k];
        }
        __syncwarp();
    }
    /// @return `sum` and the squares of this lane's differences, added one after the other
    KN_FN float add(float sum) const {
        const int lane = threadIdx.x % 32;
        KN_UNROLL_ALL
        for (int k = 0; k < WIDTH; ++k) {
            const float t = row[k] - column[lane * STEP + k];
            sum = fmaf(t, t, sum);
        }
        __syncwarp();
        return sum;
    }
};

/// Offers a row's list of columns, with distances computed from differences.
template <class G>
KN_FN void offer_listed(const typename G::Arguments& a, const nearest::RowPlace& at, long long local, int count,
                        WarpList<G::K>& list) {
    using namespace nearest;
    __shared__ Gathered<G> of_warps[ITEM_THREADS / 32];
    Gathered<G>& gathered = of_warps[threadIdx.x / 32];
    const int lane = threadIdx.x % 32;
    const float* const x = points_of<G>(a, a.x, at.element) + at.row * a.x.row;
    const float* const y = points_of<G>(a, a.y, at.element);
    const unsigned* const columns = a.lists + local * G::SPACE;
    for (int first = 0; first < count; first += 32) {
        const bool is = first + lane < count;
        const int j = static_cast<int>(column_at<G>(a, columns[is ? first + lane : first]));
        float v = 0;
#pragma unroll 1
        for (int d0 = 0; d0 < G::DIM; d0 += Gathered<G>::WIDTH) {
            gathered.bring(a, x, y + j * a.y.row, d0);
            v = gathered.add(v);
        }
        list.offer(v, is ? j : NONE);
    }
}

/// A warp puts a row's list in order. Of a list that is incomplete, the K-th value is a bound as well, and a better one: the
/// first time, the row gets another list with that.
template <class G, bool FIRST>
KN_FN void rank_rows(const typename G::Arguments& a) {
    using namespace nearest;
    const long long local = row_of_launch();
    if (local >= a.blocks * ROWS) return;
    const RowPlace at = place_of_row<G>(a, local);
    if (at.row >= a.m) return;
    const int lane = threadIdx.x % 32, count = a.counts[local];
    if (!FIRST && count == DONE) return;
    const bool whole = count >= 0 && count <= G::ROOM;
    WarpList<G::K> list;
    list.clear();
    if (whole || (FIRST && count > G::ROOM)) offer_listed<G>(a, at, local, whole ? count : G::ROOM, list);
    if (whole) write_row<G>(a, at, list);
    const float worst = list.last_value();
    if (lane) return;
    if (!FIRST && !whole) a.rest_rows[atomicAdd(a.rest, 1)] = static_cast<int>(local);
    if (!FIRST) return;
    if (!whole && worst < 3e38f) {
        a.counts[local] = 0, a.again[local / ROWS] = 1;
        set_test<G>(a, local, worst, a.row_numbers[a.first_block * ROWS + local], a.scale[at.element]);
    } else {
        a.counts[local] = whole ? DONE : NO_BOUND;
        shut_test<G>(a, local);
    }
}

template <class G>
KN_FN void nearest_rank(const typename G::Arguments& a) {
    rank_rows<G, true>(a);
}
template <class G>
KN_FN void nearest_rank_again(const typename G::Arguments& a) {
    rank_rows<G, false>(a);
}

/// 32 coordinates of as many columns as a block has threads, and of a row for each warp, in shared memory.
template <class G>
struct Compared {
    static constexpr int WIDTH = 32, STEP = WIDTH + 1, R = nearest::REST_ROWS;
    float column[nearest::ITEM_THREADS * STEP];
    alignas(16) float row[WIDTH][R];
    float value[R][nearest::ITEM_THREADS];

    /// @param x the row of this thread's warp
    /// @param y the first of `count` columns
    KN_FN void bring(const typename G::Arguments& a, const float* x, const float* y, int count, int d0) {
        constexpr int LANES = WIDTH / G::VEC;  // that read a column together
        const int lane = threadIdx.x % 32, d = threadIdx.x % LANES * G::VEC;
        row[lane][threadIdx.x / 32] = d0 + lane < G::DIM ? x[(d0 + lane) * a.x.component] : 0;
        KN_UNROLL_ALL
        for (int c0 = 0; c0 < nearest::ITEM_THREADS; c0 += nearest::ITEM_THREADS / LANES) {
            const int c = c0 + threadIdx.x / LANES;
            float part[G::VEC] = {};
            if (c < count && d0 + d < G::DIM) nearest::read(y + c * a.y.row, a.y.component, d0 + d, part);
            KN_UNROLL_ALL
            for (int k = 0; k < G::VEC; ++k) column[c * STEP + d + k] = part[k];
        }
    }
    /// Adds the squares of the differences of this thread's column from the rows, one after the other.
    KN_FN void add(float (&sum)[R]) const {
#pragma unroll 8
        for (int d = 0; d < WIDTH; ++d) {
            const float y = column[threadIdx.x * STEP + d];
            KN_UNROLL_ALL
            for (int r = 0; r < R; ++r) {
                const float t = row[d][r] - y;
                sum[r] = fmaf(t, t, sum[r]);
            }
        }
    }
};

/// A warp offers the list of its row what all threads of the block have found for columns `first` to `last` of a batch
/// element.
/// @param x the row of this thread's warp
/// @param mine whether the warp wants them
template <class G>
KN_FN void compare_all(const typename G::Arguments& a, const float* x, bool mine, long long element, long long first,
                       long long last, WarpList<G::K>& list) {
    using namespace nearest;
    __shared__ Compared<G> memory;
    const float* const y = points_of<G>(a, a.y, element);
#pragma unroll 1
    for (long long j0 = first; j0 < last; j0 += ITEM_THREADS) {
        const int count = last - j0 < ITEM_THREADS ? static_cast<int>(last - j0) : ITEM_THREADS;
        float sum[REST_ROWS] = {};
#pragma unroll 1
        for (int d0 = 0; d0 < G::DIM; d0 += Compared<G>::WIDTH) {
            __syncthreads();  // all are done with what was there
            memory.bring(a, x, y + j0 * a.y.row, count, d0);
            __syncthreads();
            memory.add(sum);
        }
        KN_UNROLL_ALL
        for (int r = 0; r < REST_ROWS; ++r) memory.value[r][threadIdx.x] = sum[r];
        __syncthreads();
        if (!mine) continue;
#pragma unroll 1
        for (int k = threadIdx.x % 32; k < ITEM_THREADS; k += 32)
            list.offer(memory.value[threadIdx.x / 32][k], k < count ? static_cast<int>(j0 + k) : NONE);
    }
}

/// The rows whose lists are incomplete are compared with all columns, REST_ROWS at a time. Where there are fewer such groups
/// than blocks, blocks share a group's columns, and the last of them to be done merges what they found.
template <class G>
KN_FN void nearest_rest(const typename G::Arguments& a) {
    using namespace nearest;
    constexpr int R = REST_ROWS, K = G::K;
    static_assert(R == ITEM_THREADS / 32, "each warp has a row's list");
    __shared__ int ticket;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int all = a.rest[0], groups = (all + R - 1) / R;
    const int share = groups && groups < G::REST_BLOCKS ? G::REST_BLOCKS / groups : 1;  // blocks of a group
    for (int item = blockIdx.x; item < groups * share; item += G::REST_BLOCKS) {
        const int group = item / share, part = item % share;
        const unsigned each = (static_cast<unsigned>(a.n) + share - 1) / share;
        const long long from = each * static_cast<long long>(part), to = from + each < a.n ? from + each : a.n;
        WarpList<K> list;
        list.clear();
        const int number = group * R + warp < all ? group * R + warp : all - 1;
        const RowPlace place = place_of_row<G>(a, a.rest_rows[number]);
        const float* const x = points_of<G>(a, a.x, place.element) + place.row * a.x.row;
        for (int r = 0; r < R;) {  // once for each batch element that neighbouring rows belong to
            const auto element_of = [&](int k) {
                return place_of_row<G>(a, a.rest_rows[group * R + k < all ? group * R + k : all - 1]).element;
            };
            const long long element = element_of(r);
            const int begin = r;
            while (r < R && element_of(r) == element) ++r;
            compare_all<G>(a, x, warp >= begin && warp < r, element, from, to, list);
        }
        bool last = true;
        if (share > 1) {
            const int size = R * K, at = (item * R + warp) * K;
            list.save(a.part_value + at, a.part_index + at);
            __threadfence();
            __syncthreads();
            if (threadIdx.x == 0) ticket = atomicAdd(a.rest + 1 + group, 1);
            __syncthreads();
            last = ticket == share - 1;
            if (last) {
                __threadfence();
                list.clear();
                for (int p = 0; p < share; ++p)
                    for (int k = 0; k < K; k += 32) {
                        const int at = (group * share + p) * size + warp * K + k + lane;
                        const bool is = k + lane < K;
                        const float v = is ? static_cast<const volatile float*>(a.part_value)[at] : 0;
                        list.offer(v, is ? static_cast<const volatile int*>(a.part_index)[at] : NONE);
                    }
            }
        }
        if (last && group * R + warp < all) write_row<G>(a, place, list);
    }
}

}  // namespace kn
