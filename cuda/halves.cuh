// Rows and columns for the matrix units: every number in two halves, packed as the units read them, and what a survey of the
// data (`survey.cuh`) must find for sums computed so to be exact enough.
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
    static constexpr int SHIFT = 3 * LENGTH + 6;  // of tight points: the component in which a row can add to its exponents
    static_assert(!TIGHT || SHIFT < 16 * ALL_STEPS, "there is a component left");
    static constexpr int CHUNKS = (ALL_STEPS + STEPS - 1) / STEPS;
    static constexpr int STEP_BYTES = 16 * 2 * POINTS, BLOCK_K = STEP_BYTES / 2, BLOCK = 128;
    static constexpr int CHUNK_BYTES = PARTS * STEPS * STEP_BYTES, HALVES_BYTES = CHUNKS * CHUNK_BYTES;
    // columns: halves, then the numbers that the epilogue reads, slot by slot, then norms
    static constexpr int NUMBERS_BYTES = (F::NCOL + 1) * POINTS * 4,
                         RHS_BYTES = G::WIDE ? POINTS / 16 * 512 * (G::C / 8) + 4 * G::C : 0,  // see matrix_rhs.cuh; of a chunk of C components
                         TILE_BYTES = HALVES_BYTES + NUMBERS_BYTES + RHS_BYTES * (G::WIDE ? G::CHUNKS : 1);
    static constexpr int PANEL_BYTES = HALVES_BYTES + POINTS * 4;  // rows: halves, then norms
    static constexpr int SURVEY_BYTES = (sizeof(Survey) + LENGTH * 4 + 15) / 16 * 16;
    static constexpr int SAMPLE = 256, PAIRS = 4096;  // columns for the centre; pairs that are looked at
    static constexpr int LANES = TIGHT ? 1 : LENGTH < 32 ? 8 : 32, PACKERS = TIGHT ? 1 : 4;  // threads that survey, pack a point
    static constexpr int ROUNDS = TIGHT ? 1 : 8;  // points that such threads survey, one after the other
#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000
    static constexpr int ADDS = 1;  // how often a unit adds to its sum for 16 products
#else
    static constexpr int ADDS = 2;
#endif
    static constexpr float TINY = 9.5367431640625e-7f;  // (2^-10)^2
    static constexpr float FAR = 24, FARTHEST = 160, EPSILON = (5 + (TIGHT ? 1 : 3) * STEPS * ADDS) * 2.384185791015625e-7f;
    static constexpr float NEARNESS = 65536 * EPSILON;
    // Share of the norms below which a pair of the sample counts as near; where many are, moments lose their digits.
    static constexpr float NEARBY = F::MOMENT ? 2.44140625e-4f : NEARNESS;
    static constexpr int MANY_NEARBY = PAIRS / 16;
    static constexpr int MANY_NEAR = PAIRS / 256, SURVEYED = F::SQUARE && (F::MOMENT || !TIGHT) ? PAIRS : 0;  // pairs of the survey

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
/// Splits two numbers into halves, those of `a` the lower of each pair.
KN_FN void split_halves(float a, float b, unsigned& high, unsigned& low) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(high) : "f"(b), "f"(a));
    a -= float_of(high & 0xffffu), b -= float_of(high >> 16);
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(low) : "f"(b), "f"(a));
}
KN_FN unsigned size_bits(float v) { return __float_as_uint(v) & 0x7fffffffu; }  // NaN counts as larger than all
/// Two numbers as halves, the first in the lower bits.
KN_FN unsigned halves_of(float x, float y) { return half_of(x) | half_of(y) << 16; }

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

/// Eight numbers, whose halves lie side by side.
struct Octet {
    float v[8];
    KN_FN void store(char* at) const {
        Vec<unsigned, 4> all;
        KN_UNROLL_ALL
        for (int k = 0; k < 4; ++k) all.v[k] = halves_of(v[2 * k], v[2 * k + 1]);
        *reinterpret_cast<Vec<unsigned, 4>*>(at) = all;
    }
};

/// Packs a tight point. @return its squared norm
template <class G>
KN_FN float pack_tight(const CentredPoint<G>& p, char* to, int place, float scale, bool real) {
    typedef Panels<G> P;
    constexpr int LENGTH = P::LENGTH, OCTETS = 2 * P::ALL_STEPS;
    const bool is_row = p.row;
    float norm = 0, scaled_norm = 0;
    Octet all[OCTETS] = {};
    KN_UNROLL_ALL
    for (int d = 0; d < LENGTH; ++d) {
        const float v = p(d), w = v * scale, f = is_row ? 1.0f : 2.0f, h = float_of(half_of(w)), l = w - h;
        norm += v * v, scaled_norm += w * w;
        const float parts[3] = {f * h, f * (is_row ? h : l), f * (is_row ? l : h)};
        KN_UNROLL_ALL
        for (int k = 0; k < 3; ++k) all[(k * LENGTH + d) / 8].v[(k * LENGTH + d) % 8] = parts[k];
    }
    const float n1 = float_of(half_of(scaled_norm)), n2 = float_of(half_of(scaled_norm - n1)), n3 = scaled_norm - n1 - n2;
    const float parts[6] = {is_row ? -n1 : 1, is_row ? -n2 : 1, is_row ? -n3 : 1, is_row ? 1 : -n1, is_row ? 1 : -n2,
                            is_row ? 1 : -n3};
    KN_UNROLL_ALL
    for (int k = 0; k < 6; ++k) all[(3 * LENGTH + k) / 8].v[(3 * LENGTH + k) % 8] = parts[k];
    all[P::SHIFT / 8].v[P::SHIFT % 8] = is_row ? 0 : 1;
    KN_UNROLL_ALL
    for (int o = 0; o < OCTETS; ++o) {
        if (!real) all[o] = {};
        all[o].store(to + P::offset(o / 2, o % 2 * 8, place));
    }
    return norm;
}

/// Packs a point, every PACKERS-th octet of its components from `lane` on. @return what they add to its squared norm
/// @param size becomes that of the largest number packed
template <class G>
KN_FN float pack_octets(const CentredPoint<G>& p, char* to, int place, int lane, float scale, bool real, unsigned& size) {
    typedef Panels<G> P;
    constexpr int STEPS = P::STEPS;
    const float f = scale * (p.row || !G::F::SQUARE ? 1 : -2);
    float norm = 0;
    for (int o = lane; o < 2 * P::CHUNKS * STEPS; o += P::PACKERS) {
        Octet high, low;
        KN_UNROLL_ALL
        for (int k = 0; k < 8; ++k) {
            const float v = real && o * 8 + k < P::LENGTH ? p(o * 8 + k) : 0.0f, w = v * f;
            high.v[k] = float_of(half_of(w)), low.v[k] = w - high.v[k];
            norm += v * v, size = max(size, size_bits(w));
        }
        char* at = to + o / (2 * STEPS) * P::CHUNK_BYTES + P::offset(o / 2 % STEPS, o % 2 * 8, place);
        high.store(at), low.store(at + STEPS * P::STEP_BYTES);
    }
    return norm;
}

/// Adds the number of a block's threads for which `given` holds; one of them writes.
template <class G>
KN_FN void count_in_block(unsigned* to, bool given) {
    __shared__ unsigned warps[G::ITEM_THREADS / 32];
    const unsigned found = __ballot_sync(0xffffffffu, given);
    __syncthreads();  // of the count before
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = __popc(found);
    __syncthreads();
    if (threadIdx.x) return;
    unsigned sum = 0;
    KN_UNROLL_ALL
    for (int k = 0; k < G::ITEM_THREADS / 32; ++k) sum += warps[k];
    if (sum) atomicAdd(to, sum);
}

/// Packs the points of all batch elements, PACKERS threads for each; those beyond the last are zeros. A block has points of
/// one panel or tile.
template <class G>
KN_FN void pack(const typename G::Arguments& a) {
    typedef Panels<G> P;
    constexpr int EACH = G::ITEM_THREADS / P::PACKERS;  // points of a block; eight of a warp, whose octets lie side by side
    const int thread = threadIdx.x, lane = P::TIGHT ? 0 : thread % 32 / 8;
    const long long item = (a.first + blockIdx.x) * EACH + (P::TIGHT ? thread : thread / 32 * 8 + thread % 8);
    const long long m = a.row_blocks * P::POINTS, each = m + P::tiles(a) * P::POINTS;
    const long long batch = item / each, k = item - batch * each;
    const bool is_row = k < m;
    const long long index = is_row ? k : k - m;
    const bool real = index < (is_row ? a.m : a.n);
    const int place = static_cast<int>(index % P::POINTS);
    Survey* s = P::survey(a, batch);
    char* to = is_row ? P::panel(a, batch, index / P::POINTS) : P::tile(a, batch, index / P::POINTS);
    const CentredPoint<G> p(a, batch, real ? index : 0, is_row);
    float norm;
    unsigned size = 0;
    if constexpr (P::TIGHT) {
        norm = pack_tight<G>(p, to, place, __fsqrt_rn(__uint_as_float(s->slope)), real);
    } else {
        norm = pack_octets<G>(p, to, place, lane, P::scale(s, is_row), real, size);
        norm += __shfl_xor_sync(0xffffffffu, norm, 8);
        norm += __shfl_xor_sync(0xffffffffu, norm, 16);
        size = max(size, __shfl_xor_sync(0xffffffffu, size, 8));
        size = max(size, __shfl_xor_sync(0xffffffffu, size, 16));
    }
    const float largest = __uint_as_float(G::F::SQUARE || !is_row ? s->largest : s->largest_row);
    const bool mine = real && lane == 0;
    const bool far = mine && G::F::EXPONENT && __uint_as_float(s->slope) * norm > P::FAR / 2;
    const bool tiny = mine && !P::TIGHT && size > 0 && norm <= P::TINY * largest * largest;  // both may be 0
    count_in_block<G>(&s->far, far);
    if (!P::TIGHT) count_in_block<G>(&s->tiny, tiny);
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
    }
}

}  // namespace kn
