// Rows and columns for the matrix units: every number in two halves, packed as the units read them, and a survey of the
// data that says whether sums computed so are exact enough.
//
// With x and y the vectors of a sum, moved so that a sample of y has mean 0 (only for squared distances, which do not
// change) and scaled by a power of two, x = xh + xl + rx with xh, xl of 11 bits each: |xl| <= 2^-11 |x|, |rx| <= 2^-22 |x|
// (component by component; FLOOR, 2^-32 of the largest component, is added to that). The products xh yh + xh yl + xl yh leave
// out xl yl, x ry and rx y: at most 3 * 2^-22 |x||y|, by Cauchy and Schwarz. The unit adds 16 products at a time (8 before
// sm_90: ADDS) to its sum and may cut off one unit in the last place each time: 2^-22 |x||y| for each of the 3 STEPS ADDS times,
// since no partial sum exceeds |x||y| (1 + 2^-10). That the unit keeps so many digits is what tests of the hardware found,
// not what its maker says. So a product is off by at most (3 + 3 STEPS ADDS) 2^-22 |x||y|, and
//
//   S = |x|^2 + |y|^2 - 2 x y   by at most   EPSILON (|x|^2 + |y|^2),   EPSILON = (5 + 3 STEPS ADDS) 2^-22,
//
// where 2 * 2^-22 covers the norms and the sum of the three terms in float; chunks are added as floats, 2^-24 each. The floor
// adds at most FLOOR (|x| + |y|) sqrt(LENGTH) <= EPSILON (|x|^2 + |y|^2) + FLOOR^2 LENGTH / EPSILON. What this means for the result:
//   EXACT   the formula reads S only as an exponent slope S + ...: the kernel is off by |slope| EPSILON (|x|^2 + |y|^2) ln 2.
//           Used if |slope| (|x|^2 + |y|^2) is at most FAR for nearly all pairs and at most FARTHEST for all.
//   NEAR    S is off by at most 2^-16 of itself, because pairs with S < NEARNESS (|x|^2 + |y|^2 + FLOOR^2 LENGTH / EPSILON^2), NEARNESS = 2^16 EPSILON, are computed anew
//           from direct differences. Not for moments, whose terms are differences of sums.
//   PLAIN   neither, for data that is not finite, has many near pairs, or a few points that dwarf the others, and for exponents
//           that grow with S: the plain kernel computes the result.
// A formula that reads products takes them as they are (EXACT) if no point is below 2^-10 of the largest of its side: a product in
// float is off by as many |x||y| 2^-23.
//
// TIGHT points, of few components, are scaled by the root of |slope| instead; the norms are split into three halves each and
// lie beside the components, so that the unit's sum is the exponent itself: x y' = slope S. Here a half's floor of 2^-25
// counts as an error of the exponent, where it is small.
#pragma once

namespace kn {

template <class G>
struct Panels {
    typedef typename G::F F;
    static constexpr int LENGTH = F::LENGTH, POINTS = 128;  // of a panel of rows, and of a tile of columns
    static constexpr bool TIGHT = G::TIGHT;  // whether halves and norms lie side by side, in one part
    static constexpr int PARTS = TIGHT ? 1 : 2;
    // steps of 16 components: of a part, and of a part's chunk
    static constexpr int ALL_STEPS = ((TIGHT ? 3 * LENGTH + 6 : LENGTH) + 15) / 16, STEPS = G::STEPS;
    static constexpr int CHUNKS = (ALL_STEPS + STEPS - 1) / STEPS;
    static constexpr int STEP_BYTES = 16 * 2 * POINTS, BLOCK_K = STEP_BYTES / 2, BLOCK = 128;
    static constexpr int CHUNK_BYTES = PARTS * STEPS * STEP_BYTES, HALVES_BYTES = CHUNKS * CHUNK_BYTES;
    // columns: halves, then the numbers that the epilogue reads, slot by slot, then norms
    static constexpr int NUMBERS_BYTES = (F::NCOL + 1) * POINTS * 4,
                         RHS_BYTES = G::WIDE ? 512 * POINTS / 8 * (G::C / 8) : 0,  // see matrix_wide.cuh; of a chunk of C components
                         TILE_BYTES = HALVES_BYTES + NUMBERS_BYTES + RHS_BYTES * (G::WIDE ? G::CHUNKS : 1);
    static constexpr int PANEL_BYTES = HALVES_BYTES + POINTS * 4;  // rows: halves, then norms
    static constexpr int SURVEY_BYTES = (sizeof(Survey) + LENGTH * 4 + 15) / 16 * 16;
    static constexpr int SAMPLE = 256, PAIRS = 4096;  // columns for the centre; pairs that are looked at
    static constexpr int LANES = TIGHT ? 1 : LENGTH < 32 ? 8 : 32;  // threads that work on a point
#if __CUDA_ARCH__ >= 900
    static constexpr int ADDS = 1;  // how often a unit adds to its sum for 16 products
#else
    static constexpr int ADDS = 2;
#endif
    static constexpr float TINY = 9.5367431640625e-7f;  // (2^-10)^2
    static constexpr float FAR = 24, FARTHEST = 160, EPSILON = (5 + (TIGHT ? 1 : 3) * STEPS * ADDS) * 2.384185791015625e-7f;
    static constexpr float NEARNESS = 65536 * EPSILON;
    static constexpr int MANY_NEAR = PAIRS / 256;

    /// @return offset in a chunk of component k of the step of a point
    KN_FN static unsigned offset(int step, int k, int point) {
        return step * STEP_BYTES + k / 8 * BLOCK_K + point / 8 * BLOCK + point % 8 * 16 + k % 8 * 2;
    }
    KN_FN static Survey* survey(const typename G::Arguments& a, long long batch) {
        return reinterpret_cast<Survey*>(static_cast<char*>(a.survey) + batch * SURVEY_BYTES);
    }
    KN_FN static float* centre(Survey* s) { return reinterpret_cast<float*>(s + 1); }
    KN_FN static long long tiles(const typename G::Arguments& a) { return (a.n + POINTS - 1) / POINTS; }
    KN_FN static char* panel(const typename G::Arguments& a, long long batch, long long block) {
        return static_cast<char*>(a.rows) + (batch * a.row_blocks + block) * PANEL_BYTES;
    }
    KN_FN static char* tile(const typename G::Arguments& a, long long batch, long long number) {
        return static_cast<char*>(a.cols) + (batch * tiles(a) + number) * TILE_BYTES;
    }
    /// @return the power of two that brings the largest component to 2^7 .. 2^8
    KN_FN static float scale(const Survey* s, bool row) {
        const int exponent = static_cast<int>((F::SQUARE || !row ? s->largest : s->largest_row) >> 23);  // biased
        return __int_as_float((exponent < 8 ? 254 : 261 - exponent) << 23);
    }
    /// @return the slope of the exponent, which is the same for all rows of a batch element
    KN_FN static float slope(const typename G::Arguments& a, long long batch) {
        In<G> in(a, batch);
        float x[F::NROW ? F::NROW : 1];
        F::template row<float>(in, &x[0]);
        return F::template slope<float>(&x[0]);
    }
};

KN_FN unsigned half_of(float x) {
    unsigned short h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
    return h;
}
KN_FN float float_of(unsigned h) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(static_cast<unsigned short>(h)));
    return x;
}
KN_FN void store_half(char* at, float x) { *reinterpret_cast<unsigned short*>(at) = static_cast<unsigned short>(half_of(x)); }

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
    In<G> in(a, batch);
    float sum = 0;
    if (G::F::SQUARE && d < P::LENGTH)
        for (long long s = row; s < count; s += 8) {
            in.index = s * a.n / count;
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

/// A point: component d of a row or column, centred.
template <class G>
struct CentredPoint {
    In<G> in;
    const float* centre;
    bool row;

    KN_FN CentredPoint(const typename G::Arguments& a, long long batch, long long index, bool is_row)
        : in(a, batch), centre(Panels<G>::centre(Panels<G>::survey(a, batch))), row(is_row) {
        in.index = index;
    }
    KN_FN float operator()(int d) const {
        const float v = row ? G::F::template left<float>(in, d) : G::F::template right<float>(in, d);
        return G::F::SQUARE ? v - centre[d] : v;
    }
};

/// @return the sum over the LANES threads, side by side, that work on one item; all threads of the warp take part
template <int LANES>
KN_FN float sum_of_lanes(float v) {
    KN_UNROLL_ALL
    for (int offset = LANES / 2; offset; offset /= 2) v += __shfl_xor_sync(0xffffffffu, v, offset);
    return v;
}
KN_FN unsigned size_bits(float v) { return __float_as_uint(v) & 0x7fffffffu; }  // NaN counts as larger than all

/// The survey: LANES threads for each row, each column and each pair of a sample. One batch element after the other.
/// @param a `total` is the number of points and pairs of all batch elements
template <class G>
KN_FN void survey(const typename G::Arguments& a) {
    typedef Panels<G> P;
    constexpr int LANES = P::LANES, PAIRS = G::F::SQUARE && !P::TIGHT ? P::PAIRS : 0;
    const long long thread = (a.first + blockIdx.x) * blockDim.x + threadIdx.x, each = a.m + a.n + PAIRS;
    const long long number = thread / LANES, item = number < a.total ? number : a.total - 1;  // every lane must shuffle
    const int lane = static_cast<int>(thread % LANES);
    const long long batch = item / each, k = item - batch * each;
    const bool is_pair = k >= a.m + a.n, is_row = !is_pair && k < a.m;
    unsigned largest = 0, slope = 0;
    float norm = 0, square = 0, both = 0;
    if (!is_pair) {
        const CentredPoint<G> p(a, batch, is_row ? k : k - a.m, is_row);
        for (int d = lane; d < P::LENGTH; d += LANES) {
            const float v = p(d);
            largest = max(largest, size_bits(v));
            norm += v * v;
        }
        if (G::F::EXPONENT && k == 0 && lane == 0) {
            const float s = P::slope(a, batch);
            slope = s <= 0 ? size_bits(s) : __float_as_uint(static_cast<float>(KN_INF));
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
    norm = sum_of_lanes<LANES>(norm);
    if (PAIRS) {
        square = sum_of_lanes<LANES>(square), both = sum_of_lanes<LANES>(both);
        if (is_pair && lane == 0 && !(square >= P::NEARNESS * both) && number < a.total)
            atomicAdd(&P::survey(a, batch)->near, 1u);
    }
    Survey* s = P::survey(a, batch);
    const unsigned all = 0xffffffffu;
    const long long first = __shfl_sync(all, batch, 0);
    unsigned largest_row = is_row ? largest : 0, norm_bits = size_bits(norm);
    if (!G::F::SQUARE && is_row) largest = 0;
    if (__all_sync(all, batch == first)) {  // one batch element in the warp, as nearly always
        largest = __reduce_max_sync(all, largest), largest_row = __reduce_max_sync(all, largest_row);
        norm_bits = __reduce_max_sync(all, norm_bits), slope = __reduce_max_sync(all, slope);
        if (threadIdx.x % 32) return;
    }
    atomicMax(&s->largest, largest);
    if (!G::F::SQUARE) atomicMax(&s->largest_row, largest_row);
    atomicMax(&s->norm, norm_bits);
    if (G::F::EXPONENT) atomicMax(&s->slope, slope);
}

/// How the result is computed. @return a Mode
template <class G>
KN_FN int choose_mode(const typename G::Arguments& a, const Survey* s) {
    typedef Panels<G> P;
    const float norm = __uint_as_float(s->norm), slope = __uint_as_float(s->slope);
    if (!(__uint_as_float(max(s->largest, s->largest_row)) < 1e15f) || !(norm < 1e30f)) return PLAIN;
    if (!G::F::SQUARE) return s->tiny ? PLAIN : EXACT;
    if (G::F::EXPONENT && !(slope < static_cast<float>(KN_INF))) return PLAIN;  // a positive slope, or NaN
    if (G::F::EXPONENT && slope * 2 * norm <= P::FARTHEST && s->far <= (a.m + a.n) / 16) return EXACT;
    if (P::TIGHT || G::F::MOMENT || s->near > P::MANY_NEAR || s->tiny > (a.m + a.n) / 1024) return PLAIN;
    return NEAR;
}

/// @return x rounded to the 11 bits that the matrix unit reads of a number in TF32
KN_FN float tf32_of(float x) {
    unsigned r;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(x));
    return __uint_as_float(r);
}

/// The right-hand sides of a column, as the second product of `matrix_wide.cuh` reads them: for every chunk of components,
/// eight columns and eight components, a lane's numbers of two columns, each in an upper and a lower part.
template <class G>
KN_FN void pack_rhs(const CentredPoint<G>& p, float* to, int place, int lane, bool real) {
    typedef Panels<G> P;
    constexpr int TILES = G::C / 8;
    for (int c = lane; c < G::C * G::CHUNKS; c += P::LANES) {
        float v = 0;
        if (real && c < G::F::DIM) v = G::F::MOMENT ? p(c) : G::F::template rhs<float>(p.in, c);
        if (real && G::F::MOMENT && c == G::F::DIM) v = 1;
        const float high = tf32_of(v), low = v - high;
        float* at = to + c / G::C * (P::RHS_BYTES / 4) +
                    ((place / 8 * TILES + c % G::C / 8) * 32 + c % 8 * 4 + place % 8 / 2) * 4 + place % 2;
        at[0] = high, at[2] = abs(v) < static_cast<float>(KN_INF) ? low : 0;
    }
}

/// Packs the points of all batch elements, LANES threads for each; those beyond the last are zeros.
/// @param a `total` is the number of points, with padding, of all batch elements
template <class G>
KN_FN void pack(const typename G::Arguments& a) {
    typedef Panels<G> P;
    constexpr int LANES = P::LANES, LENGTH = P::LENGTH;
    const long long thread = (a.first + blockIdx.x) * blockDim.x + threadIdx.x;
    const long long m = a.row_blocks * P::POINTS, each = m + P::tiles(a) * P::POINTS;
    const long long number = thread / LANES, item = number < a.total ? number : a.total - 1;
    const int lane = static_cast<int>(thread % LANES);
    const long long batch = item / each, k = item - batch * each;
    const bool is_row = k < m;
    const long long index = is_row ? k : k - m;
    const bool real = index < (is_row ? a.m : a.n);
    const int place = static_cast<int>(index % P::POINTS);
    Survey* s = P::survey(a, batch);
    char* to = is_row ? P::panel(a, batch, index / P::POINTS) : P::tile(a, batch, index / P::POINTS);
    const float scale = P::TIGHT ? __fsqrt_rn(__uint_as_float(s->slope)) : P::scale(s, is_row);
    const CentredPoint<G> p(a, batch, real ? index : 0, is_row);
    float norm = 0, scaled_norm = 0;
    if constexpr (P::TIGHT) {
        char* chunk = to;
        const auto put = [&](int c, float v) { store_half(chunk + P::offset(c / 16, c % 16, place), real ? v : 0.0f); };
        KN_UNROLL(LENGTH)
        for (int d = 0; d < LENGTH; ++d) {
            const float v = p(d), w = v * scale, f = is_row ? 1.0f : 2.0f, h = float_of(half_of(w)), l = w - h;
            norm += v * v, scaled_norm += w * w;
            put(d, f * h), put(LENGTH + d, f * (is_row ? h : l)), put(2 * LENGTH + d, f * (is_row ? l : h));
        }
        const float n1 = float_of(half_of(scaled_norm)), n2 = float_of(half_of(scaled_norm - n1)), n3 = scaled_norm - n1 - n2;
        const float parts[6] = {is_row ? -n1 : 1, is_row ? -n2 : 1, is_row ? -n3 : 1, is_row ? 1 : -n1, is_row ? 1 : -n2,
                                is_row ? 1 : -n3};
        KN_UNROLL_ALL
        for (int c = 0; c < 6; ++c) put(3 * LENGTH + c, parts[c]);
        KN_UNROLL_ALL
        for (int c = 3 * LENGTH + 6; c < 16 * P::ALL_STEPS; ++c) put(c, 0);
    } else {
        for (int d = lane; d < P::CHUNKS * P::STEPS * 16; d += LANES) {
            float v = 0;
            if (real && d < LENGTH) v = p(d);
            const float w = v * scale * (is_row || !G::F::SQUARE ? 1 : -2), h = float_of(half_of(w));
            char* chunk = to + d / (16 * P::STEPS) * P::CHUNK_BYTES;
            const int step = d / 16 % P::STEPS;
            store_half(chunk + P::offset(step, d % 16, place), h);
            store_half(chunk + P::offset(P::STEPS + step, d % 16, place), w - h);
            norm += v * v;
        }
        norm = sum_of_lanes<LANES>(norm);
    }
    if (G::F::EXPONENT && lane == 0 && real && number < a.total && __uint_as_float(s->slope) * norm > P::FAR / 2)
        atomicAdd(&s->far, 1u);
    const float largest = __uint_as_float(G::F::SQUARE || !is_row ? s->largest : s->largest_row);
    if (!P::TIGHT && lane == 0 && real && number < a.total && norm > 0 && norm < P::TINY * largest * largest)
        atomicAdd(&s->tiny, 1u);
    float* numbers = reinterpret_cast<float*>(to + P::HALVES_BYTES);
    if (lane == 0 && is_row) numbers[place] = real ? norm : 0;
    if (!is_row) {
        if (lane == 0) {
            if (real)
                G::F::template col<float>(p.in, Slots<float, P::POINTS>{numbers + place});
            else
                for (int c = 0; c < G::F::NCOL; ++c) numbers[c * P::POINTS + place] = 0;
            numbers[G::F::NCOL * P::POINTS + place] = real ? norm : 0;
        }
        if constexpr (G::WIDE) pack_rhs<G>(p, reinterpret_cast<float*>(to + P::HALVES_BYTES + P::NUMBERS_BYTES), place, lane, real);
    }
}

}  // namespace kn
