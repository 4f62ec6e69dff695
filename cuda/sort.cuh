// Stable sort of items by bucket, in passes over digits of 8 bits, the lowest first. A pass is three launches:
//   count    how often each digit occurs in each tile of TILE items;
//   scan     exclusive prefix sums of those counts along the tiles, and each digit's total;
//   scatter  every item to its place: items of lower digits, those of its digit in earlier tiles and in its own tile.
// Items with a negative bucket are left out in the first pass; later passes read the number of those that remain from
// the device. Nothing depends on the order in which blocks run.
#pragma once

#include "math.cuh"

namespace kn {

constexpr int SORT_THREADS = 256, SORT_ROUNDS = 16, DIGITS = 256;
constexpr int SORT_WARPS = SORT_THREADS / 32, WARP_ITEMS = 32 * SORT_ROUNDS, TILE_ITEMS = SORT_THREADS * SORT_ROUNDS;

/// Arguments of the three kernels and of `bucket_starts`; 8-byte fields only.
struct SortArguments {
    const int* keys;       // bucket of each item
    const int* items;      // null in the first pass: item k is k
    int* keys_out;
    int* items_out;
    int* counts;           // (DIGITS, tiles)
    int* totals;           // (DIGITS)
    const int* remaining;  // null in the first pass: number of items that remain
    long long n, tiles, shift;
};

KN_FN long long sort_length(const SortArguments& a) { return a.remaining ? *a.remaining : a.n; }

/// The digit of an item, or -1 where there is no item or it is left out.
KN_FN int digit_of(const SortArguments& a, long long k, long long n, int& key) {
    if (k >= n) return -1;
    key = a.keys[k];
    return key < 0 ? -1 : (key >> a.shift) & (DIGITS - 1);
}

KN_FN void sort_count(const SortArguments& a) {
    __shared__ int count[DIGITS];
    count[threadIdx.x] = 0;
    __syncthreads();
    const long long n = sort_length(a), first = static_cast<long long>(blockIdx.x) * TILE_ITEMS;
    KN_UNROLL_ALL
    for (int r = 0; r < SORT_ROUNDS; ++r) {
        int key;
        const int digit = digit_of(a, first + r * SORT_THREADS + threadIdx.x, n, key);
        if (digit >= 0) atomicAdd(&count[digit], 1);
    }
    __syncthreads();
    a.counts[threadIdx.x * a.tiles + blockIdx.x] = count[threadIdx.x];
}

/// Inclusive prefix sum over the threads of a block; `scratch` holds a number for each warp.
KN_FN int block_prefix(int value, int* scratch) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    KN_UNROLL_ALL
    for (int offset = 1; offset < 32; offset *= 2) {
        const int below = __shfl_up_sync(0xffffffffu, value, offset);
        if (lane >= offset) value += below;
    }
    if (lane == 31) scratch[warp] = value;
    __syncthreads();
    for (int w = 0; w < warp; ++w) value += scratch[w];
    __syncthreads();
    return value;
}

/// One block a digit.
KN_FN void sort_scan(const SortArguments& a) {
    __shared__ int scratch[SORT_WARPS];
    __shared__ int carried;
    int* const row = a.counts + blockIdx.x * a.tiles;
    int carry = 0;
    for (long long base = 0; base < a.tiles; base += SORT_THREADS) {
        const long long k = base + threadIdx.x;
        const int own = k < a.tiles ? row[k] : 0, sum = block_prefix(own, scratch) + carry;
        if (k < a.tiles) row[k] = sum - own;
        if (threadIdx.x == SORT_THREADS - 1) carried = sum;
        __syncthreads();
        carry = carried;
    }
    if (threadIdx.x == 0) a.totals[blockIdx.x] = carry;
}

KN_FN void sort_scatter(const SortArguments& a) {
    __shared__ int place[SORT_WARPS][DIGITS];  // counts of a warp's items, then where its next item of a digit goes
    __shared__ int scratch[SORT_WARPS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, digit = threadIdx.x;
    KN_UNROLL_ALL
    for (int w = 0; w < SORT_WARPS; ++w) place[w][digit] = 0;
    __syncthreads();

    const long long n = sort_length(a);
    const long long first = static_cast<long long>(blockIdx.x) * TILE_ITEMS + warp * WARP_ITEMS + lane;
    int key[SORT_ROUNDS], rank[SORT_ROUNDS];
    KN_UNROLL_ALL
    for (int r = 0; r < SORT_ROUNDS; ++r) {  // a warp's items in their order: equal digits are ranked by round and lane
        const int d = digit_of(a, first + r * 32, n, key[r]);
        const unsigned same = __match_any_sync(0xffffffffu, d);
        const int before = __popc(same & ((1u << lane) - 1));
        rank[r] = -1;
        if (d >= 0) rank[r] = place[warp][d] + before;
        __syncwarp();
        if (d >= 0 && before == 0) place[warp][d] += __popc(same);
        __syncwarp();
    }
    __syncthreads();
    const int total = a.totals[digit];
    int at = block_prefix(total, scratch) - total + a.counts[digit * a.tiles + blockIdx.x];
    KN_UNROLL_ALL
    for (int w = 0; w < SORT_WARPS; ++w) {
        const int count = place[w][digit];
        place[w][digit] = at;
        at += count;
    }
    __syncthreads();
    KN_UNROLL_ALL
    for (int r = 0; r < SORT_ROUNDS; ++r) {
        if (rank[r] < 0) continue;
        const int to = place[warp][(key[r] >> a.shift) & (DIGITS - 1)] + rank[r];
        const long long k = first + r * 32;
        a.keys_out[to] = key[r];
        a.items_out[to] = a.items ? a.items[k] : static_cast<int>(k);
    }
}

/// Arguments of bucket_starts; 8-byte fields only.
struct StartArguments {
    const int* keys;    // sorted
    const int* totals;  // of the digits of a pass: their sum is the number of items
    int* starts;        // (buckets + 1)
    int* remaining;     // or null: the number of items is written there
    long long buckets;  // 0: only that number is wanted
};

/// Where each bucket begins among the sorted items, by bisection.
KN_FN void bucket_starts(const StartArguments& a) {
    __shared__ int scratch[SORT_WARPS];
    __shared__ int number;
    const int sum = block_prefix(a.totals[threadIdx.x], scratch);
    if (threadIdx.x == DIGITS - 1) {
        number = sum;
        if (a.remaining && blockIdx.x == 0) *a.remaining = sum;
    }
    __syncthreads();
    const long long bucket = static_cast<long long>(blockIdx.x) * SORT_THREADS + threadIdx.x;
    if (!a.starts || bucket > a.buckets) return;
    int low = 0, high = number;
    while (low < high) {
        const int middle = low + (high - low) / 2;
        if (a.keys[middle] < bucket)
            low = middle + 1;
        else
            high = middle;
    }
    a.starts[bucket] = low;
}

}  // namespace kn
