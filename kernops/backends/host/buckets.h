// Items grouped by an integer bucket: a stable counting sort, for numbers and for runs of equal cells along depth.
//
// Items are cut into as many pieces as there are threads, each with its own counts. The result is the one stable order, so
// it does not depend on the cut.
#pragma once

#include "driver.h"

namespace kn {

/// Division of a non-negative 32-bit integer by one that is known only at run time: floor(n / d) = n m >> shift with
/// m = ceil(2^shift / d), exact for n < 2^31 where 2^shift >= 2^31 d.
struct Divisor {
    uint64_t multiplier;
    int shift;
    explicit Divisor(int64_t d) : shift(31) {
        while ((int64_t(1) << (shift - 31)) < d) ++shift;
        multiplier = uint64_t(((__uint128_t(1) << shift) + d - 1) / d);
    }
    KN_FN uint32_t operator()(uint32_t n) const { return uint32_t(n * multiplier >> shift); }
};

/// A stable counting sort of what `source` gives, into `starts` (one more than buckets) and `items`.
///   source.each(begin, end, f)   calls f(bucket, p) in rising order for the items among begin <= p < end
///   source.item(p)               what is written for p
/// @return 0, or 1 where memory ran out.
template <class Item, class Source>
int counting_sort(const Source& source, int64_t n, int64_t buckets, int64_t threads, Item* items, int32_t* starts) {
    const int64_t useful = smaller(n / 65536, 4 * n / (buckets + 1));  // counts are cleared and added up, too
    const int64_t pieces = larger<int64_t>(1, smaller(smaller(threads, Crew<int>::MOST), useful));
    Buffer buffer(size_t(pieces) * buckets * sizeof(uint32_t));
    if (!buffer.get()) return 1;
    uint32_t* const counts = reinterpret_cast<uint32_t*>(buffer.get());
    const auto first = [&](int64_t piece) { return n / pieces * piece + smaller(piece, n % pieces); };
    parallel(threads, pieces, [&](int64_t piece, int64_t) {
        uint32_t* const own = counts + piece * buckets;
        memset(own, 0, buckets * sizeof(uint32_t));
        source.each(first(piece), first(piece + 1), [&](uint32_t bucket, int64_t) { ++own[bucket]; });
    });
    uint32_t place = 0;
    for (int64_t b = 0; b < buckets; ++b) {
        starts[b] = int32_t(place);
        for (int64_t piece = 0; piece < pieces; ++piece) {
            const uint32_t count = counts[piece * buckets + b];
            counts[piece * buckets + b] = place;
            place += count;
        }
    }
    starts[buckets] = int32_t(place);
    parallel(threads, pieces, [&](int64_t piece, int64_t) {
        uint32_t* const next = counts + piece * buckets;
        source.each(first(piece), first(piece + 1),
                    [&](uint32_t bucket, int64_t p) { items[next[bucket]++] = source.item(p); });
    });
    return 0;
}

/// Calls f(k) for begin <= k < end, in order, where `test` says so: a bit for each lane from k on, or for k alone.
template <class Test, class F>
KN_FN void each_where(int64_t begin, int64_t end, const Test& test, const F& f) {
    int64_t k = begin;
    for (; k + LANES<int32_t> <= end; k += LANES<int32_t>)
        for (unsigned left = test.lanes(k); left; left &= left - 1) f(k + __builtin_ctz(left));
    for (; k < end; ++k)
        if (test.one(k)) f(k);
}

/// Numbers by their bucket; those whose bucket is negative, or not below `buckets`, are left out.
struct Numbered {
    const int32_t* bucket;
    int64_t buckets;

    unsigned lanes(int64_t k) const {
        const i32 b = load(bucket + k);
        return bits(and_(le(splat<i32>(0), b), lt(b, fill(int32_t(buckets)))));
    }
    bool one(int64_t k) const { return bucket[k] >= 0 && bucket[k] < buckets; }
    template <class F>
    void each(int64_t begin, int64_t end, const F& f) const {
        each_where(begin, end, *this, [&](int64_t k) { f(uint32_t(bucket[k]), k); });
    }
    int32_t item(int64_t k) const { return int32_t(k); }
};

/// A run of points of one pixel in one cell, at consecutive depths. Point p lies in the plane of depth p / pixels % depths.
struct Run {
    int32_t first, length;
};
struct Runs {
    Numbered cells;
    const int32_t* permutation;  // cell -> bucket, or null
    int64_t depths, pixels;

    struct Opening {  // of a run in a plane that follows another one of the same image
        const Numbered& cells;
        int64_t pixels;
        unsigned lanes(int64_t k) const {
            return cells.lanes(k) & ~bits(eq(load(cells.bucket + k), load(cells.bucket + k - pixels)));
        }
        bool one(int64_t k) const { return cells.one(k) && cells.bucket[k] != cells.bucket[k - pixels]; }
    };
    template <class F>
    void each(int64_t begin, int64_t end, const F& f) const {
        const auto open = [&](int64_t p) {
            const int32_t cell = cells.bucket[p];
            f(uint32_t(permutation ? permutation[cell] : cell), p);
        };
        for (int64_t p = begin; p < end;) {
            const int64_t plane = p / pixels, stop = smaller(end, (plane + 1) * pixels);
            if (plane % depths == 0)
                each_where(p, stop, cells, open);
            else
                each_where(p, stop, Opening{cells, pixels}, open);
            p = stop;
        }
    }
    Run item(int64_t p) const {
        const int64_t left = depths - p / pixels % depths;
        const int32_t* const cell = cells.bucket + p;
        int64_t length = 1;
        while (length < left && cell[length * pixels] == *cell) ++length;
        return {int32_t(p), int32_t(length)};
    }
};

}  // namespace kn
