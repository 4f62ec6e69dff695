// Right-hand sides, packed for the second product of `matrix_wide.cuh`, and what becomes of it: sums, and the scales of
// their rows.
#pragma once

namespace kn {

/// Right-hand sides of a column, of a component: weights of differences, their products with the column's vector, others.
template <class G>
KN_FN float right_hand_side(const CentredPoint<G>& p, int c) {
    typedef typename G::F F;
    if (F::MOMENT && c == F::WEIGHT_AT) return F::template weight<float>(p.in);
    if (F::MOMENT && c >= F::MOMENT_AT && c < F::MOMENT_AT + F::LENGTH)
        return F::template weight<float>(p.in) * p(c - F::MOMENT_AT);
    return c < F::DIM ? F::template rhs<float>(p.in, c) : 0;
}

/// Packs the right-hand sides, a block of 128 threads for eight components of a tile: for every sixteen columns, a lane's
/// upper halves of four columns, then the lower; after those of all components the scales that undo theirs.
template <class G>
KN_FN void pack_rhs(const typename G::Arguments& a) {
    typedef Panels<G> P;
    constexpr int TILES = G::C / 8, EIGHTS = TILES * G::CHUNKS;
    __shared__ unsigned largest[4][8];
    const long long item = a.first + blockIdx.x, all = item / EIGHTS, batch = all / P::tiles(a), tile = all - batch * P::tiles(a);
    const int eight = static_cast<int>(item - all * EIGHTS), place = threadIdx.x;
    const long long j = tile * P::POINTS + place;
    const CentredPoint<G> p(a, batch, j < a.n ? j : 0, false);
    float v[8];
    KN_UNROLL_ALL
    for (int k = 0; k < 8; ++k) {
        v[k] = j < a.n ? right_hand_side(p, eight * 8 + k) : 0;
        const unsigned top = __reduce_max_sync(0xffffffffu, size_bits(v[k]));
        if (place % 32 == 0) largest[place / 32][k] = top;
    }
    __syncthreads();
    char* to = P::tile(a, batch, tile) + P::HALVES_BYTES + P::NUMBERS_BYTES + eight / TILES * P::RHS_BYTES;
    float* scales = reinterpret_cast<float*>(to + P::RHS_BYTES) - G::C + eight % TILES * 8;
    to += ((place / 16 * TILES + eight % TILES) * 32 + place % 8 / 2) * 16 + place % 16 / 8 * 4 + place % 2 * 2;
    KN_UNROLL_ALL
    for (int k = 0; k < 8; ++k) {
        const unsigned top = max(max(largest[0][k], largest[1][k]), max(largest[2][k], largest[3][k]));
        const int exponent = max(20, static_cast<int>(top >> 23));  // biased; 2^14 .. 2^15 is the largest after scaling
        // of numbers far below the largest, halves keep too few digits: many of them are for the plain kernels
        const bool lost = size_bits(v[k]) && static_cast<int>(size_bits(v[k]) >> 23) + 20 < exponent;
        const unsigned many = __ballot_sync(0xffffffffu, lost);
        if (place % 32 == 0 && __popc(many) >= 8) raise(&P::survey(a, batch)->norm, 0x7f800000u);
        const float w = v[k] * __int_as_float((268 - exponent) << 23), h = float_of(half_of(w));
        store_half(to + k * 64, h);
        store_half(to + k * 64 + 8, w - h);
        if (place == 0) scales[k] = __int_as_float(max(1, exponent - 14) << 23);
    }
}

/// @return 2^e for a whole number e; 0 or infinite beyond a float's range
KN_FN float power_of_two(float e) {
    const int biased = static_cast<int>(e) + 127;
    return __int_as_float((biased < 1 ? 0 : biased > 254 ? 255 : biased) << 23);
}

/// Sums of C components of a thread's two rows: of every eight, components 2 (lane % 4) and the next.
/// @tparam KAHAN whether there are registers to compensate the sum; at most a few thousand numbers are added otherwise
/// @tparam APART whether products with lower halves are added up on their own: the unit has more to do at once
template <int TILES, bool KAHAN, bool APART>
struct WideSums {
    float part[4 * TILES], low[APART ? 4 * TILES : 1], sum[4 * TILES], rest[KAHAN ? 4 * TILES : 1];

    KN_FN void init() {
        KN_UNROLL_ALL
        for (int k = 0; k < 4 * TILES; ++k) sum[k] = rest[KAHAN ? k : 0] = 0;
    }
    KN_FN void begin() {
        KN_UNROLL_ALL
        for (int k = 0; k < 4 * TILES; ++k) part[k] = low[APART ? k : 0] = 0;
    }
    /// @param scales of the components
    KN_FN void flush(const float* scales) {
        KN_UNROLL_ALL
        for (int k = 0; k < 4 * TILES; ++k) {
            const auto scale = *reinterpret_cast<const Vec<float, 2>*>(scales + k / 4 * 8 + threadIdx.x % 4 * 2);
            const float p = APART ? part[k] + low[k] : part[k];
            if constexpr (KAHAN) {
                const float y = p * scale.v[k % 2] - rest[k], t = sum[k] + y;
                rest[k] = (t - sum[k]) - y, sum[k] = t;
            } else {
                sum[k] += p * scale.v[k % 2];
            }
        }
    }
    /// Multiplies the sums of rows by powers of two; exponents are positive only while the sums are 0, and infinity times 0 is not.
    KN_FN void scale(const float (&exponent)[2]) {
        const float by[2] = {power_of_two(lesser(exponent[0], 127.0f)), power_of_two(lesser(exponent[1], 127.0f))};
        KN_UNROLL_ALL
        for (int k = 0; k < 4 * TILES; ++k) {
            sum[k] *= by[k / 2 % 2];
            if (KAHAN) rest[k] *= by[k / 2 % 2];
        }
    }
    /// @return 0, or NaN if a value was too large for a half
    KN_FN float overflow() const { return part[0] * 0.0f + part[2] * 0.0f; }
};

/// The scales of a thread's two rows, as exponents of 2. Where the kernel is an exponential of its sum (EXPONENT) they are
/// added to that sum, else values are multiplied.
template <class G>
struct RowScales {
    static constexpr int TOP = 13;  // a row's largest value is below 2^TOP when its scale is chosen
    static constexpr float MOST = G::F::EXPONENT ? 138 : 120;
    float exponent[2], factor[2];
    bool fresh;

    KN_FN void init() { exponent[0] = exponent[1] = 0, factor[0] = factor[1] = 1, fresh = true; }
    /// Lowers the scales, or chooses the first, for values of this size.
    /// @param top largest |value| of the thread's pairs, without a scale
    /// @param moved by how much the exponents change
    /// @return whether one of the warp's scales changes
    KN_FN bool lower(const float (&top)[2], float (&moved)[2]) {
        KN_UNROLL_ALL
        for (int r = 0; r < 2; ++r) {
            unsigned bits = size_bits(top[r]);
            bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, 1));
            bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, 2));
            const float wanted = lesser(static_cast<float>(TOP + 126 - max(1, static_cast<int>(bits >> 23))), MOST);
            const float now = fresh ? wanted : lesser(wanted, exponent[r]);
            moved[r] = now - exponent[r];
            exponent[r] = now, factor[r] = power_of_two(now);
        }
        fresh = false;
        return __any_sync(0xffffffffu, moved[0] != 0 || moved[1] != 0);
    }
    /// @return a sum of row r without its scale, in two steps as the scale can exceed a float's range
    KN_FN float unscaled(int r, float sum) const {
        const float most = lesser(exponent[r], 64.0f);
        return sum * power_of_two(-most) * power_of_two(most - exponent[r]);
    }
};

}  // namespace kn
