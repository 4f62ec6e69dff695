// Lower bounds of squared distances, from coordinates rounded to bytes: most columns are no neighbours by far, and the
// instruction that multiplies bytes does four times the work of one that multiplies float32.
//
// For a group of rows, let c be their mean and P the projection to the cube c +- 127 s. A projection to a convex set takes no
// two points further apart: |x - y| >= |P x - P y|. With both rounded to multiples of s from c, P x to c + s a and P y to
// c + s b, let s e and s f be the lengths of what rounding has taken away. Then
//
//     |x - y| >= s (|a - b| - e - f),
//
// but for a few roundings of float32 in each coordinate, for which SLACK stands. Any s is right; a small one rounds less and
// projects more away.
//
// |a - b|^2 is an integer and computed exactly. A column whose bound is above the row's limit, by more than the rounding
// of a sum of squares, is passed over; all others are computed from differences. So the neighbours and their distances are
// the same, bit for bit, as without all this; only the time depends on how much of the data lies near the rows.
#pragma once

#include "contract.h"

#if defined(KN_AVX512) && defined(__AVX512VNNI__)
#define KN_BYTES_PRODUCT 1
#endif

namespace kn {

/// The distances of float32 points that a formula's KMin is about: of SQUARES components from slot ROW_POINT of a row and
/// from slot COLUMN_POINT of a column; SQUARES is 0 where it is about something else.
template <class T, class F>
struct HasBytes {
#if defined(KN_BYTES_PRODUCT)
    static constexpr bool value = sizeof(T) == 4 && F::SQUARES > 0;
#else
    static constexpr bool value = false;
#endif
};

#if defined(KN_BYTES_PRODUCT)
/// Adds to each 32-bit lane the products of its four bytes, of a without sign and of b with sign.
KN_FN i32 add_products(i32 sum, i32 a, i32 b) {
#if defined(__clang__)
    return __builtin_ia32_vpdpbusd512(sum, a, b);
#else
    return __builtin_ia32_vpdpbusd_v16si(sum, a, b);
#endif
}

template <class F, class S>
class Bytes {
public:
    static constexpr int R = S::R, U = S::U, TILE = S::TILE, L = LANES<float>, D = F::SQUARES, QUADS = (D + 3) / 4;
    static constexpr int64_t ROWS_STRIDE = int64_t(QUADS + 2) * R;     // numbers of a block of rows
    static constexpr int64_t STRIDE = int64_t(QUADS + 1) * U * L;  // numbers of a block of columns
    static_assert(D <= 16384, "sums of products of bytes must fit 32 bits");
    static constexpr double SLACK = 1e-3, ROUNDING = 1e-4;

    static size_t bytes(int64_t blocks) {
        return round_up(sizeof(float) * D, 64) + round_up(blocks * ROWS_STRIDE * 4, 64) + TILE * STRIDE * 4;
    }
    /// @param useful whether there are enough rows to round columns for
    Bytes(char* memory, const float* rows, int64_t blocks, bool useful) {
        centre_ = reinterpret_cast<float*>(memory);
        rows_ = reinterpret_cast<int32_t*>(memory + round_up(sizeof(float) * D, 64));
        columns_ = reinterpret_cast<int32_t*>(
            reinterpret_cast<char*>(rows_) + round_up(blocks * ROWS_STRIDE * 4, 64));
        on_ = useful && find_cube(rows, blocks);
        for (int64_t k = 0; on_ && k < blocks; ++k) round_rows(rows + k * R * F::ROWS, rows_ + k * ROWS_STRIDE);
    }
    bool on() const { return on_; }
    void stop() { on_ = false; }

    /// Begins a tile of columns; then rounds its blocks, to number `at` of the tile.
    void begin_tile() { off_ = f32{}; }
    KN_SLOW void round_columns(const float* columns, int64_t at) {
        int32_t* const to = columns_ + at * STRIDE;
        for (int u = 0; u < U; ++u) {
            i32 norm = i32{}, sum = i32{};  // |b|^2 and 128 sum(b)
            f32 off = f32{};
            for (int q = 0; q < QUADS; ++q) {
                i32 word = i32{}, size = i32{};
                KN_UNROLL(4)
                for (int e = 0; e < 4; ++e) {
                    const int d = q * 4 + e;
                    if (d >= D) break;
                    f32 lost;
                    const i32 b = rounded(load(columns + ((F::COLUMN_POINT + d) * U + u) * L), d, lost);
                    off += lost * lost;
                    word |= (b & 255) << (8 * e);
                    size |= select(lt(b, i32{}), -b, b) << (8 * e);
                }
                norm = add_products(norm, size, size);
                sum = add_products(sum, fill(int32_t(0x80808080)), word);
                store(to + (q * U + u) * L, word);
            }
            store(to + (QUADS * U + u) * L, norm + sum + sum);
            off_ = greater(off, off_);
        }
    }

    /// The largest f of the tile's columns.
    double end_tile() const {
        float most = 0;
        for (int k = 0; k < L; ++k) most = larger(most, off_[k]);
        return __builtin_sqrt(double(most));
    }
    /// The largest |a - b|^2 - |a|^2 of a column of the tile that may be within `limit` of row r of block k.
    int32_t bound(int64_t k, int r, float limit, double off) const {
        // Squares below the smallest normal number have come out as 0.
        const double within = __builtin_sqrt((limit > 0 ? double(limit) : 0.0) * (1 + ROUNDING) + D * 1.2e-38);
        float row_off;
        memcpy(&row_off, rows_ + k * ROWS_STRIDE + (QUADS + 1) * R + r, sizeof row_off);
        const double most = within / step_ + off + row_off + SLACK * __builtin_sqrt(double(D));
        if (!(most < 254 * __builtin_sqrt(double(D)))) return 0x7fffffff;
        return int32_t(most * most) + 1 - rows_[k * ROWS_STRIDE + QUADS * R + r];
    }
    /// Bit u * R + r says whether vector u of a block of columns holds a column that may be near row r of block k.
    KN_SLOW unsigned near(int64_t k, int64_t at, const int32_t* bounds) const {
        const int32_t *const x = rows_ + k * ROWS_STRIDE, *const y = columns_ + at * STRIDE;
        i32 sum[R * U];
        KN_UNROLL(32)
        for (int p = 0; p < R * U; ++p) sum[p] = i32{};
        KN_UNROLL(1)
        for (int q = 0; q < QUADS; ++q) {
            KN_UNROLL(16)
            for (int r = 0; r < R; ++r) {
                KN_UNROLL(16)
                for (int u = 0; u < U; ++u)
                    sum[u * R + r] = add_products(sum[u * R + r], fill(x[q * R + r]), load(y + (q * U + u) * L));
            }
        }
        unsigned found = 0;
        KN_UNROLL(32)
        for (int p = 0; p < R * U; ++p) {
            const i32 rest = load(y + (QUADS * U + p / R) * L) - (sum[p] + sum[p]);
            found |= unsigned(any(le(rest, fill(bounds[p % R])))) << p;
        }
        return found;
    }

private:
    float* centre_;
    int32_t *rows_;     // [block][4 components, and at the end |a|^2, then e][row]
    int32_t *columns_;  // [block][4 components, and at the end |b|^2 + 256 sum(b)][column]
    f32 off_;           // the largest squares of f so far
    double step_;
    float inverse_;
    bool on_;

    /// Three standard deviations of the widest component, or all of it where that is less; numbers that are none left out.
    bool find_cube(const float* rows, int64_t blocks) {
        float widest = 0;
        for (int d = 0; d < D; ++d) {
            double count = 0, sum = 0, squares = 0, most = 0;
            const auto each = [&](const auto& use) {
                for (int64_t k = 0; k < blocks; ++k)
                    for (int r = 0; r < R; ++r) {
                        const float x = rows[(k * F::ROWS + F::ROW_POINT + d) * R + r];
                        if (x - x == 0) use(double(x));
                    }
            };
            each([&](double x) { count += 1, sum += x; });
            const double mean = count > 0 ? sum / count : 0;
            each([&](double x) {
                squares += (x - mean) * (x - mean);
                most = larger(most, __builtin_fabs(x - mean));
            });
            centre_[d] = float(mean);
            widest = larger(widest, float(smaller(most, 3 * __builtin_sqrt(squares / larger(count, 1.0)))));
        }
        step_ = double(widest) / 127;
        inverse_ = float(1 / step_);
        return step_ > 1e-30 && step_ < 1e30;
    }
    void round_rows(const float* rows, int32_t* to) const {
        float off[R];
        for (int r = 0; r < R; ++r) to[QUADS * R + r] = 0, off[r] = 0;
        for (int q = 0; q < QUADS; ++q)
            for (int r = 0; r < R; ++r) {
                uint32_t word = 0;
                for (int d = q * 4; d < smaller(q * 4 + 4, int(D)); ++d) {
                    f32 lost;
                    const int32_t a = rounded(fill(rows[(F::ROW_POINT + d) * R + r]), d, lost)[0];
                    off[r] += lost[0] * lost[0];
                    to[QUADS * R + r] += a * a;
                    word |= uint32_t(a + 128) << (8 * (d % 4));
                }
                to[q * R + r] = int32_t(word);
            }
        for (int r = 0; r < R; ++r) off[r] = __builtin_sqrtf(off[r]);
        memcpy(to + (QUADS + 1) * R, off, sizeof off);
    }
    /// Component d as a whole number of steps from the centre, -127 .. 127, and what that takes away.
    KN_FN i32 rounded(f32 x, int d, f32& lost) const {
        const f32 limit = fill(127.0f), steps = (x - fill_from(centre_ + d)) * fill(inverse_);
        const f32 inside = lesser(greater(steps, -limit), limit);
        // Added to 1.5 * 2^23, a small number is rounded to the nearest integer, in the lowest bits.
        const f32 shifted = inside + fill(12582912.0f);
        lost = inside - (shifted - fill(12582912.0f));
        return (i32)shifted - fill(int32_t(0x4b400000));
    }
};
#endif

}  // namespace kn
