// The survey of the data that comes before sums by the matrix units (`halves.cuh` says what it decides): a centre, the sizes of
// points, and how many pairs of a sample are near.
#pragma once

namespace kn {

/// The centre: mean of a sample of columns. A block of 256 threads for 32 components of a batch element; clears the survey.
template <class G>
KN_FN void centre(const typename G::Arguments& a) {
    typedef Panels<G> P;
    constexpr int GROUPS = (P::LENGTH + 31) / 32;
    __shared__ float part[8][32];
    const long long item = a.first + blockIdx.x, batch = item / GROUPS;
    const int group = static_cast<int>(item % GROUPS), lane = threadIdx.x % 32, row = threadIdx.x / 32;
    const int d = group * 32 + lane;
    Survey* survey = P::survey(a, batch);
    const long long count = a.n < P::SAMPLE ? a.n : P::SAMPLE;
    const double step = static_cast<double>(a.n) / static_cast<double>(count);
    In<G> in(a, batch);
    float sum = 0;
    if (G::F::SQUARE && d < P::LENGTH)
#pragma unroll 16
        for (long long s = row; s < count; s += 8) {
            in.index = static_cast<long long>(static_cast<double>(s) * step);
            sum += G::F::template right<float>(in, d);
        }
    part[row][lane] = sum;
    __syncthreads();
    if (row == 0 && d < P::LENGTH) {
        KN_UNROLL_ALL
        for (int k = 1; k < 8; ++k) sum += part[k][lane];
        P::centre(survey)[d] = sum / static_cast<float>(count);
    }
    if (group == 0 && threadIdx.x == 0) {
        survey->largest = survey->norm = survey->slope = survey->near = survey->far = 0;
        survey->largest_row = survey->tiny = 0;
        survey->mode = EXACT;
    }
}

/// @return the sum over the LANES threads, side by side, that work on one item; all threads of the warp take part
template <int LANES>
KN_FN float sum_of_lanes(float v) {
    KN_UNROLL_ALL
    for (int offset = LANES / 2; offset; offset /= 2) v += __shfl_xor_sync(0xffffffffu, v, offset);
    return v;
}

/// What threads found out about points and pairs of a batch element: bits of floats, and a count.
struct Found {
    unsigned largest, largest_row, norm, slope, near;
};

/// Raises a maximum of all blocks. Most read only: writes to one place queue up.
KN_FN void raise(unsigned* most, unsigned value) {
    if (value > *const_cast<volatile unsigned*>(most)) atomicMax(most, value);
}

template <class G>
KN_FN void report(Survey* s, const Found& f) {
    raise(&s->largest, f.largest), raise(&s->norm, f.norm);
    if (!G::F::SQUARE) raise(&s->largest_row, f.largest_row);
    if (G::F::EXPONENT) raise(&s->slope, f.slope);
    if (f.near) atomicAdd(&s->near, f.near);
}

/// Looks at a row, a column or a pair of the sample, LANES threads for each; all threads of a warp take part.
/// @param real whether it counts
template <class G>
KN_FN Found look(const typename G::Arguments& a, long long batch, long long k, int lane, bool real) {
    typedef Panels<G> P;
    constexpr int LANES = P::LANES;
    constexpr bool PAIRS = P::SURVEYED > 0;
    const bool is_pair = PAIRS && k >= a.m + a.n, is_row = !is_pair && k < a.m;
    Found f = {0, 0, 0, 0, 0};
    float norm = 0, square = 0, both = 0;
    if (!is_pair) {
        const CentredPoint<G> p(a, batch, is_row ? k : k - a.m, is_row);
        for (int d = lane; d < P::LENGTH; d += LANES) {
            const float v = p(d);
            f.largest = max(f.largest, size_bits(v));
            norm += v * v;
        }
        if (G::F::EXPONENT && k == 0 && lane == 0) {
            const float s = P::slope(a, batch);
            f.slope = s <= 0 ? size_bits(s) : __float_as_uint(static_cast<float>(KN_INF));
        }
    } else {
        const long long q = k - a.m - a.n;
        const unsigned hash = static_cast<unsigned>(q) * 2654435761u;
        const CentredPoint<G> x(a, batch, q * a.m / P::PAIRS, true), y(a, batch, static_cast<long long>(hash) * a.n >> 32, false);
        for (int d = lane; d < P::LENGTH; d += LANES) {
            const float u = x(d), v = y(d), w = u - v;
            square += w * w, both += u * u + v * v;
        }
    }
    f.norm = size_bits(sum_of_lanes<LANES>(norm));
    if (PAIRS) {
        square = sum_of_lanes<LANES>(square), both = sum_of_lanes<LANES>(both);
        f.near = real && is_pair && lane == 0 && !(square >= P::NEARBY * both);
    }
    if (is_row) f.largest_row = f.largest;
    if (is_row && !G::F::SQUARE) f.largest = 0;
    return f;
}

/// The survey: LANES threads for each row, each column and each pair of a sample, ROUNDS of them one after the other.
/// @param a `total` is the number of points and pairs of all batch elements
template <class G>
KN_FN void survey(const typename G::Arguments& a) {
    typedef Panels<G> P;
    constexpr int LANES = P::LANES, GROUPS = G::ITEM_THREADS / LANES, EACH = GROUPS * P::ROUNDS;
    const long long each = a.m + a.n + P::SURVEYED, begin = (a.first + blockIdx.x) * EACH;
    const long long end = begin + EACH < a.total ? begin + EACH : a.total, batch = begin / each;
    const bool together = batch == (end - 1) / each;  // one batch element in the block, as nearly always
    const int lane = threadIdx.x % LANES;
    __shared__ Found block;
    if (threadIdx.x == 0) block = {0, 0, 0, 0, 0};
    __syncthreads();
    Found mine = {0, 0, 0, 0, 0};
#pragma unroll 2
    for (int round = 0; round < P::ROUNDS; ++round) {
        const long long number = begin + round * GROUPS + threadIdx.x / LANES;
        const bool real = number < end;
        const long long item = real ? number : end - 1;  // every lane must shuffle
        const long long own = together ? batch : item / each;
        const Found f = look<G>(a, own, item - own * each, lane, real);
        if (!together) {
            report<G>(P::survey(a, own), f);
            continue;
        }
        mine.largest = max(mine.largest, f.largest), mine.largest_row = max(mine.largest_row, f.largest_row);
        mine.norm = max(mine.norm, f.norm), mine.slope = max(mine.slope, f.slope);
        mine.near += f.near;
    }
    if (!together) return;
    const unsigned all = 0xffffffffu;
    mine.largest = __reduce_max_sync(all, mine.largest), mine.largest_row = __reduce_max_sync(all, mine.largest_row);
    mine.norm = __reduce_max_sync(all, mine.norm), mine.slope = __reduce_max_sync(all, mine.slope);
    if (mine.near) atomicAdd(&block.near, mine.near);
    if (threadIdx.x % 32 == 0) {
        atomicMax(&block.largest, mine.largest), atomicMax(&block.largest_row, mine.largest_row);
        atomicMax(&block.norm, mine.norm), atomicMax(&block.slope, mine.slope);
    }
    __syncthreads();
    if (threadIdx.x == 0) report<G>(P::survey(a, batch), block);
}

/// How the result is computed. @return a Mode
template <class G>
KN_FN int choose_mode(const typename G::Arguments& a, const Survey* s) {
    typedef Panels<G> P;
    const float norm = __uint_as_float(s->norm), slope = __uint_as_float(s->slope);
    if (!(__uint_as_float(max(s->largest, s->largest_row)) < 1e15f) || !(norm < 1e30f)) return PLAIN;
    if (!G::F::SQUARE) return s->tiny ? PLAIN : EXACT;
    if (G::F::EXPONENT && !(slope < static_cast<float>(KN_INF))) return PLAIN;  // a positive slope, or NaN
    if (G::F::MOMENT && s->near > P::MANY_NEARBY) return PLAIN;
    if (G::F::EXPONENT && slope * 2 * norm <= P::FARTHEST && s->far <= (a.m + a.n) / 16) return EXACT;
    if (P::TIGHT || G::F::MOMENT || s->near > P::MANY_NEAR || s->tiny > (a.m + a.n) / 1024) return PLAIN;
    return NEAR;
}

}  // namespace kn
