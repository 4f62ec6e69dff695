// The nearest points in many dimensions: what the kernels are given, and the bounds that they rely on.
//
// For every row x the K columns y are wanted whose distances V, computed in float32 from differences, are smallest. Nearly
// all columns are passed over because a product of half-precision numbers, from the matrix unit, proves that they are
// not among them; the distances of the others are computed. Five steps, each a kernel or two:
//
//   pack       moves points by a centre c and scales them by s, a power of two; rounds them to halves a (of x), b (of y)
//   sample     the matrix unit goes through a share of the columns, in groups; the largest bound of each group is kept
//   threshold  K groups have a column that is this near: with that, what the bound of any of the K nearest must reach
//   list       the matrix unit goes through all columns and lists those whose bound reaches it
//   rank       computes the distances of the listed ones and puts them in order; ties go to the lower column
//
// Rows with longer lists than there is room for have the last two steps again, with a bound from the distances of what was
// listed. What is left then (many columns equally far), and rows or thresholds that are not finite, are compared with every
// column, by `rest`. These kernels end at once where there is nothing for them to do.
//
// The bounds. Let u = 2^-24 and D the number of coordinates, |x - y| etc. lengths of real vectors.
//
// (1) V is a sum of squares of differences, in any order, with fused or separate rounding: for gamma = 1.01 (D + 3) u and
//     tiny = D 2^-149 (of squares below the normal range), while nothing overflows,
//         (1 - gamma) |x - y|^2 - tiny <= V <= (1 + gamma) |x - y|^2 + tiny.
// (2) With P the projection to the cube [-LIMIT, LIMIT]^D, which takes no two points further apart, and e (f) at least the
//     length of P s (x - c) - a (of P s (y - c) - b), for any c and s,
//         |a - b| <= s |x - y| + e + f,   and, where P changes neither,   s |x - y| <= |a - b| + e + f.
// (3) The matrix unit multiplies halves exactly. It adds C and the products, 16 at a time or fewer, after it has cut all
//     of them off at 2^-23 of the largest or below, and cuts off the sum likewise: 24 cuts for 16 products if it takes 4 at
//     a time, each of at most 2^-23 of the largest number that can occur, |C| + |a||b|. So what comes out differs from
//     C + a.b, for C before it was rounded, by at most eps (|C| + |a||b|) with eps = 1.01 * 25 * 2^-23 for each 16 products.
//     Published tests of these units say that they take 8 or 16 at a time from sm_80 on and keep a bit more at least: less
//     than half of that. By |a||b| <= (|a|^2 + |b|^2) / 2 this is a term of the row plus one of the column, so that it costs
//     nothing per pair.
//
// sample: with C = -up, where up = |b|^2 / 2 + f^2 / (2 eta) + eps (|b|^2 + f^2 / eta) and 2 |a - b| f <= eta |a - b|^2 +
//     f^2 / eta, a pair whose result is q has
//         (|a - b| + f)^2 <= (1 + eta) (|a|^2 (1 + eps) - 2 q) = r^2,   so   s |x - y| <= r + e.
//     Let q be the K-th largest of the groups' maxima. Then K columns have V <= (1 + gamma) ((r + e) / s)^2 + tiny = T, and
//     if that is below overflow, the K nearest have, too.
// list: a column with V <= T has s |x - y| <= s sqrt((T + tiny) / (1 - gamma)), so |a - b| <= tau + f for tau = that + e.
//     Squared, and with C = tau f - low where low = (|b|^2 - f^2) / 2 - eps (|b|^2 + f^2), its result is at least
//         (|a|^2 - tau^2 - eps (|a|^2 + tau^2)) / 2 = least.
//
// What belongs to a row or column alone is computed in float64 and then moved by a part in 2^22 to the safe side, more than
// all its roundings. A column that is not finite gets b = 0 and an up and low that no threshold lets through: its V is
// infinite or NaN, above every T that is finite.
#pragma once

namespace kn {

/// Arguments of every kernel of a call, passed by value; 8-byte fields only: kernops/backends/nearest.py packs them.
template <int BATCH>
struct NearestArguments {
    struct Points {
        const float* data;
        long long batch[BATCH], row, component;  // strides in elements
    };
    Points x, y;
    long long batch[BATCH];   // sizes
    long long elements;       // of the batch
    long long m, n;           // rows and columns of a batch element
    long long row_blocks;     // of ROWS rows, of a batch element
    long long part, tiles;    // columns of a part of a batch element; tiles of COLUMNS columns of one
    long long sample_tiles;   // the first of them
    long long sample_segments, segments;  // pieces of them that a block goes through
    long long first_block, blocks;        // the blocks of rows, of all batch elements, that lists are made for
    long long packed;         // points to be packed
    float* centre;            // (elements, DIM)
    double* scale;            // (elements)
    unsigned char* rows;      // halves
    unsigned char* columns;
    struct RowNumbers* row_numbers;
    float* column_up;         // -up
    struct Pair* column_low;  // -low, f
    float* maxima;            // (rows of the blocks, SPACE), the same memory as:
    unsigned* lists;          // (rows of the blocks, SPACE): columns' positions
    int* counts;              // lengths of the lists; more than ROOM: incomplete
    int* again;               // of a block of rows: whether some lists are made again
    struct Pair* tests;       // tau, least
    int* rest;                // number of rows for `rest`, then a ticket for each of its blocks
    int* rest_rows;           // those rows
    float* part_value;        // lists of parts of `rest`
    int* part_index;
    float* value;             // (elements, m, K)
    long long* index;         // (elements, m, K)
};

struct alignas(8) Pair {
    float first, second;
};

/// Of a row: |a|^2 and e. e is negative for a row that goes to `rest`.
struct alignas(8) RowNumbers {
    float square, error;
};

/// Geometry. A configuration G has DIM coordinates, K neighbours, BATCH batch dimensions, PARTS, GROUPS groups of the
/// sample, ROOM in a list, SPACE numbers of scratch for a row, RESIDENT, STAGES, SHARED (kernops/codegen/nearest.py).
namespace nearest {
constexpr int ROWS = 128, COLUMNS = 128;  // of a block; of a tile
constexpr int WIDTH = 64;                 // coordinates of a chunk: rows of 128 bytes
constexpr int CHUNK = ROWS * 128;         // bytes of a chunk of 128 points
constexpr int ITEM_THREADS = 256;         // of the kernels without products
constexpr float LIMIT = 32768;
constexpr double ETA = 1.0 / 1024;
constexpr float NEVER = -1.5e38f;         // below every result of the matrix unit that can be reached
constexpr int NONE = 0x7fffffff;

template <class G>
KN_FN constexpr int chunks() {
    return (G::DIM + WIDTH - 1) / WIDTH;
}
template <class G>
KN_FN constexpr int steps() {
    return (G::DIM + 15) / 16;
}
template <class G>
KN_FN constexpr double epsilon() {
    return 1.01 * 25 * steps<G>() / (1 << 23);
}
template <class G>
KN_FN constexpr double gamma() {
    return 1.01 * (G::DIM + 3) / (1 << 24);
}

/// @return offset in a chunk of the 16 bytes with number `eight` of row `row`: ones of neighbouring rows, or of the same
///     row, lie in different banks
KN_FN int place(int row, int eight) { return row * 128 + ((eight ^ (row & 7)) << 4); }

/// Columns lie in PARTS parts: number 0, PARTS, 2 PARTS, ... first, so that the first tiles are a sample.
/// @return the column at a position, which may be beyond the last
template <class G>
KN_FN long long column_at(const typename G::Arguments& a, long long position) {
    const unsigned part = static_cast<unsigned>(position) / static_cast<unsigned>(a.part);
    return part < G::PARTS ? (position - part * a.part) * G::PARTS + part : a.n;
}

/// @return the first point of a batch element
template <class G, class P>
KN_FN const float* points_of(const typename G::Arguments& a, const P& points, long long element) {
    const float* p = points.data;
    KN_UNROLL_ALL
    for (int b = G::BATCH - 1; b >= 0; --b) {
        const long long rest = b ? element / a.batch[b] : 0;
        p += (element - rest * a.batch[b]) * points.batch[b];
        element = rest;
    }
    return p;
}

/// A number a part in 2^22 and more above (below) x, for x >= 0 (of any sign, where `size` >= |x|).
KN_FN float above(double x) { return static_cast<float>(x * (1 + 1.0 / (1 << 22)) + 0x1p-100); }
KN_FN float below(double x, double size) { return static_cast<float>(x - size / (1 << 22) - 0x1p-100); }

KN_FN bool finite(double x) { return x - x == 0; }

template <class T>
KN_FN T warp_sum(T x) {
    KN_UNROLL_ALL
    for (int offset = 16; offset; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
}
}  // namespace nearest

}  // namespace kn
