// Sums of segments: out[target of s] = sum over k in [starts[s], starts[s + 1]) of weight(item k) * values[row of item k].
//
// One launch writes every row of the result, empty segments included, without atomics. Segment s counts as its length
// plus COST, and the blocks cut that total evenly at segment boundaries, so that neither many empty segments nor a few full
// ones hold a block up; within a block the warps cut the items evenly. Where they cut is found beforehand, by
// `segment_work`. A warp walks its segments one after the other. One that ends inside a segment leaves its share in shared
// memory, and the warp in which the segment ends adds the shares in order: the same call gives the same bits. Segments much
// longer than a block's share are cut beforehand (kernops/geometric/buckets.py).
//
// Large blocks walk neighbouring segments at once: in a splat these have features in common, which then come from the
// multiprocessor's own cache.
//
// G, beyond what rows.cuh asks for:
//   U        type of the numbers of the result
//   KIND     ROWS: an item is a row;  RUNS: first point and number of points, consecutive depths of a pixel, whose pixel
//            is the row;  PAIRS: a point and a row
//   SOFTMAX, WEIGHTED   what the weights of points are made of (rows.cuh)
//   WARPS    of a block;  UNROLL  rows that a group loads at once
#pragma once

#include "rows.cuh"

namespace kn {

enum Kind { ROWS, RUNS, PAIRS };

/// Arguments of segment_sum; 8-byte fields only: kernops/geometric/kernels/cuda.py packs them.
struct SegmentArguments {
    const void* values;
    const int* items;
    const int* starts;
    const int* targets;  // or null: segment s is row s of the result
    const int* work;     // of segment_work
    void* out;
    long long channels, slabs;
    Scale scale;
};

/// Arguments of segment_work; 8-byte fields only.
struct WorkArguments {
    const int* starts;
    int* work;
    long long segments;
};

/// First of the segments [low, high), or `high`, before which `wanted` items lie or more, where a segment's start counts
/// as COST items. All threads of a warp call it.
template <int COST>
KN_FN int first_segment(const int* starts, long long low, long long high, long long wanted) {
    while (low < high) {
        const long long step = (high - low + 31) / 32, probe = low + (threadIdx.x % 32 + 1) * step - 1;
        const bool before = probe < high && starts[probe] + COST * probe < wanted;
        const int count = __popc(__ballot_sync(0xffffffffu, before));
        const long long end = low + (count + 1) * step - 1;
        low += count * step;
        high = end < high ? end : high;
    }
    return static_cast<int>(low);
}

/// The last of the segments [low, high) that starts at or before an item: the one that holds it.
KN_FN int segment_of(const int* starts, int low, int high, int item) {
    while (high - low > 1) {
        const int middle = low + (high - low) / 2;
        if (starts[middle] <= item)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/// Cuts the segments for blocks of WARPS warps, one block each. A block's numbers: its first segment and the end of its
/// last one, the first item and the end of its last one, and for each warp the segment that its first item lies in.
template <int WARPS, int COST>
KN_FN void segment_work(const WorkArguments& a) {
    __shared__ int range[2];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int* const work = a.work + static_cast<long long>(blockIdx.x) * (4 + WARPS);
    if (warp < 2) {
        const long long total = a.starts[a.segments] + COST * a.segments, span = (total + gridDim.x - 1) / gridDim.x;
        const int found = first_segment<COST>(a.starts, 0, a.segments, (blockIdx.x + warp) * span);
        if (lane == 0) range[warp] = found;
    }
    __syncthreads();
    const int begin = range[0], end = range[1], first = a.starts[begin], last = a.starts[end];
    const long long low = first + static_cast<long long>(warp) * ((last - first + WARPS - 1) / WARPS);
    if (threadIdx.x == 0) work[0] = begin, work[1] = end, work[2] = first, work[3] = last;
    const int segment = first_segment<0>(a.starts, begin, end, low + 1) - 1;
    if (lane == 0) work[4 + warp] = segment;
}

/// An item as it comes from memory, with the depths of its first two points.
template <class G>
struct Item {
    typedef typename G::T T;
    typedef typename Wide<T>::type A;
    int2 item;
    T depth[2];

    KN_FN void fetch(const SegmentArguments& a, int k) {
        if (G::KIND == ROWS)
            item.x = a.items[k];
        else
            item = reinterpret_cast<const int2*>(a.items)[k];
    }
    /// Loads that nothing waits for yet.
    KN_FN void fetch_depths(const Scale& s) {
        if (G::KIND == ROWS) return;
        const T* const p = static_cast<const T*>(s.depth) + item.x;
        depth[0] = p[0];
        if (G::KIND == RUNS && item.y > 1) depth[1] = p[s.image.divisor];
    }
    KN_FN void finish(const Scale& s, int& row, A& weight) const {
        if (G::KIND == ROWS) {
            row = item.x;
            weight = A(1);
            return;
        }
        row = G::KIND == RUNS ? s.pixel(item.x) : item.y;
        weight = s.template of<G>(item.x, row, depth[0]);
        if (G::KIND == PAIRS || item.y < 2) return;
        weight += s.template of<G>(item.x + static_cast<long long>(s.image.divisor), row, depth[1]);
#pragma unroll 1
        for (int d = 2; d < item.y; ++d)
            weight += s.template of<G>(item.x + static_cast<long long>(d) * s.image.divisor, row);
    }
};

template <class G>
KN_FN void segment_sum(const SegmentArguments& a) {
    typedef typename G::T T;
    typedef typename G::U U;
    typedef typename Wide<T>::type A;
    constexpr int SLAB = G::LANES * G::CHUNKS * G::VEC, GROUPS = 32 / G::LANES;  // groups of a warp
    struct alignas(2 * sizeof(A)) Entry {
        A weight;
        int row;
    };
    __shared__ Entry entries[G::WARPS][32];
    __shared__ alignas(16) A head[G::WARPS * SLAB];  // of a segment that began in an earlier warp and ends in this one
    __shared__ alignas(16) A tail[G::WARPS * SLAB];  // of a segment that goes on in the next warp

    const int channels = static_cast<int>(a.channels), slabs = static_cast<int>(a.slabs);
    const int slab = blockIdx.x % slabs * SLAB, warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / G::LANES;
    const int* const work = a.work + static_cast<long long>(blockIdx.x / slabs) * (4 + G::WARPS);
    const int begin = work[0], end = work[1], first = work[2], last = work[3];
    int segment = work[4 + warp];
    if (begin >= end) return;
    const int each = (last - first + G::WARPS - 1) / G::WARPS;
    const int low = first + warp * each, high = low + each < last ? low + each : last;
    const auto row_of = [&](int target) { return static_cast<U*>(a.out) + static_cast<long long>(target) * channels; };
    const auto target_of = [&](int s) { return a.targets ? a.targets[s] : s; };

    Item<G> item, next;
    if (low + lane < high) item.fetch(a, low + lane);
    if (low + 32 + lane < high) next.fetch(a, low + 32 + lane);
    const RowReader<G> rows(a.values, slab, channels);
    Share<G> sum;
    sum.zero();
    for (int s = begin + 32 * warp; s < end; s += 32 * G::WARPS) {
        const bool empty = s + lane < end && a.starts[s + lane] == a.starts[s + lane + 1];
        for (unsigned left = __ballot_sync(0xffffffffu, empty); left; left &= left - 1)
            if (group == 0) sum.write(row_of(target_of(s + __ffs(left) - 1)), slab, channels);
    }
    if (low + lane < high) item.fetch_depths(a.scale);

    int headed = -1;  // row of the result that `head` belongs to
    int began = 0;    // where that segment begins
    if (low < high) {
        int start = a.starts[segment], stop = a.starts[segment + 1], target = target_of(segment);
        const auto close = [&]() {
            sum.add_groups();
            if (start < low) {
                headed = target;
                began = start;
                if (group == 0) sum.write(head + warp * SLAB - slab, slab, slab + SLAB);
            } else if (group == 0) {
                sum.write(row_of(target), slab, channels);
            }
            sum.zero();
            start = stop;
            while (++segment < end && (stop = a.starts[segment + 1]) == start) {}
            if (segment < end)
                target = target_of(segment);
            else
                stop = high + 1;
        };
        for (int base = low; base < high; base += 32) {
            const int count = high - base < 32 ? high - base : 32;
            Entry entry = {A(0), 0};
            if (lane < count) item.finish(a.scale, entry.row, entry.weight);
            entries[warp][lane] = entry;
            __syncwarp();
            item = next;
            if (base + 64 + lane < high) next.fetch(a, base + 64 + lane);
            if (base + 32 + lane < high) item.fetch_depths(a.scale);
            for (int at = 0; at < count;) {
                // With one group a step may hold several segments; with more, the groups share out the items of one.
                const int until = GROUPS > 1 && stop - base < count ? stop - base : count;
                for (; at < until; at += GROUPS * G::UNROLL) {
                    Share<G> value[G::UNROLL];
                    A weight[G::UNROLL];
                    KN_UNROLL_ALL
                    for (int u = 0; u < G::UNROLL; ++u) {
                        const Entry e = entries[warp][(at + u * GROUPS + group) & 31];
                        weight[u] = e.weight;
                        value[u].read(rows, e.row);
                    }
                    if (GROUPS == 1 && at + G::UNROLL <= count && base + at + G::UNROLL < stop) {
                        KN_UNROLL_ALL
                        for (int u = 0; u < G::UNROLL; ++u) sum.add(weight[u], value[u]);
                    } else {
                        KN_UNROLL_ALL
                        for (int u = 0; u < G::UNROLL; ++u) {
                            if (at + u * GROUPS + group < until) sum.add(weight[u], value[u]);
                            if (GROUPS == 1 && at + u < count && base + at + u + 1 == stop) close();
                        }
                    }
                }
                at = until;
                if (GROUPS > 1 && base + until == stop) close();
            }
            __syncwarp();
        }
        if (start < high) {  // the segment goes on in the next warp
            sum.add_groups();
            if (group == 0) sum.write(tail + warp * SLAB - slab, slab, slab + SLAB);
        }
    }
    __syncthreads();
    if (headed < 0 || group) return;
    sum.zero();
    Share<G> piece;
    for (int w = (began - first) / each; w < warp; ++w) {
        piece.read(tail + w * SLAB - slab, slab, slab + SLAB);
        sum.add(piece);
    }
    piece.read(head + warp * SLAB - slab, slab, slab + SLAB);
    sum.add(piece);
    sum.write(row_of(headed), slab, channels);
}

// --- prefix sums inside segments ---------------------------------------------------------------------------------------

/// Arguments of the two kernels of prefix sums; 8-byte fields only.
struct PrefixArguments {
    const void* values;  // of type T
    const int* order;    // item at each place, or null: place k holds item k
    const int* starts;
    const void* carry;   // sums of the wide type that each piece hands to the next, or null
    void* out;
    long long segments, channels, slabs, length;  // length: places of a piece; a group has one
};

template <class G, class F>
KN_FN void walk(const PrefixArguments& a, long long low, long long high, int slab, Share<G>& sum, const F& at) {
    typedef typename G::T T;
    const int channels = static_cast<int>(a.channels);
    for (long long k = low; k < high; k += G::UNROLL) {
        Share<G> value[G::UNROLL];
        long long row[G::UNROLL];
        KN_UNROLL_ALL
        for (int u = 0; u < G::UNROLL; ++u) {
            if (k + u >= high) continue;
            row[u] = a.order ? a.order[k + u] : k + u;
            value[u].read(static_cast<const T*>(a.values) + row[u] * channels, slab, channels);
        }
        KN_UNROLL_ALL
        for (int u = 0; u < G::UNROLL; ++u) {
            if (k + u >= high) break;
            at(k + u, row[u], value[u]);
        }
    }
}

/// What each piece hands to the next: the sum over its places in the segment of its last place. One row a piece.
template <class G>
KN_FN void prefix_carry(const PrefixArguments& a) {
    typedef typename Wide<typename G::T>::type A;
    constexpr int SLAB = G::LANES * G::CHUNKS * G::VEC;
    const long long unit = (static_cast<long long>(blockIdx.x) * G::THREADS + threadIdx.x) / G::LANES;
    const long long piece = unit / a.slabs, total = a.starts[a.segments];
    const int slab = static_cast<int>(unit % a.slabs) * SLAB;
    const long long low = piece * a.length, high = low + a.length;
    if (high > total) return;  // the last piece hands nothing on
    const int s = segment_of(a.starts, 0, static_cast<int>(a.segments), static_cast<int>(high - 1));
    Share<G> sum;
    sum.zero();
    walk<G>(a, a.starts[s] > low ? a.starts[s] : low, high, slab, sum,
            [&](long long, long long, const Share<G>& value) { sum.add(value); });
    sum.write(static_cast<A*>(a.out) + piece * a.channels, slab, static_cast<int>(a.channels));
}

/// Writes the inclusive prefix sums of each piece, which begins with what the piece before hands on.
template <class G>
KN_FN void prefix_write(const PrefixArguments& a) {
    typedef typename Wide<typename G::T>::type A;
    constexpr int SLAB = G::LANES * G::CHUNKS * G::VEC;
    const long long unit = (static_cast<long long>(blockIdx.x) * G::THREADS + threadIdx.x) / G::LANES;
    const long long piece = unit / a.slabs, total = a.starts[a.segments];
    const int slab = static_cast<int>(unit % a.slabs) * SLAB, channels = static_cast<int>(a.channels);
    const long long low = piece * a.length, high = low + a.length < total ? low + a.length : total;
    if (low >= high) return;
    int s = segment_of(a.starts, 0, static_cast<int>(a.segments), static_cast<int>(low));
    Share<G> sum;
    sum.zero();
    if (a.carry && a.starts[s] < low)
        sum.read(static_cast<const A*>(a.carry) + (piece - 1) * a.channels, slab, channels);
    long long stop = a.starts[s + 1];
    walk<G>(a, low, high, slab, sum, [&](long long k, long long row, const Share<G>& value) {
        if (k == stop) {
            do stop = a.starts[++s + 1];
            while (stop == k);
            sum.zero();
        }
        sum.add(value);
        sum.write(static_cast<typename G::U*>(a.out) + row * a.channels, slab, channels);
    });
}

}  // namespace kn
