// The first step of the search of nearest points (nearest_data.cuh): a centre and a scale from samples, and the halves.
#pragma once

namespace kn {

namespace nearest {
constexpr int SAMPLE = 63;        // points of a sample
constexpr int CENTRE_WIDTH = 32;  // coordinates of a block

/// Which of a sample's values comes at a share of their order, found by the thread that has it: exactly one.
/// @param step from value to value
/// @return whether it is value `mine`; never for one that is not finite
KN_FN bool is_quantile(const float* values, int step, int mine, int share, int shares) {
    const float v = values[mine * step];
    int before = 0, all = 0;
    for (int s = 0; s < SAMPLE; ++s) {
        const float w = values[s * step];
        before += finite(w) && (w < v || (w == v && s < mine));
        all += finite(w);
    }
    return finite(v) && before == (all - 1) * share / shares;
}
}  // namespace nearest

/// The median of each coordinate of a sample of columns: one value, however wild, moves it little.
/// A block takes CENTRE_WIDTH coordinates of a batch element.
template <class G>
KN_FN void nearest_centre(const typename G::Arguments& a) {
    using namespace nearest;
    constexpr int GROUPS = (G::DIM + CENTRE_WIDTH - 1) / CENTRE_WIDTH, STEP = CENTRE_WIDTH + 1;
    __shared__ float values[SAMPLE * STEP];
    const long long element = blockIdx.x / GROUPS;
    const int first = static_cast<int>(blockIdx.x % GROUPS) * CENTRE_WIDTH;
    const float* y = points_of<G>(a, a.y, element);
    for (int k = threadIdx.x; k < SAMPLE * CENTRE_WIDTH; k += ITEM_THREADS) {
        const int s = k / CENTRE_WIDTH, d = first + k % CENTRE_WIDTH;
        const long long j = s * (a.n - 1) / (SAMPLE - 1);
        values[s * STEP + k % CENTRE_WIDTH] = d < G::DIM ? y[j * a.y.row + d * a.y.component] : 0;
    }
    if (threadIdx.x < CENTRE_WIDTH && first + threadIdx.x < G::DIM) a.centre[element * G::DIM + first + threadIdx.x] = 0;
    __syncthreads();
    for (int k = threadIdx.x; k < SAMPLE * CENTRE_WIDTH; k += ITEM_THREADS) {
        const int s = k / CENTRE_WIDTH, d = k % CENTRE_WIDTH;
        if (first + d < G::DIM && is_quantile(values + d, STEP, s, 1, 2))
            a.centre[element * G::DIM + first + d] = values[s * STEP + d];
    }
}

/// The scale of a batch element: what takes a usual coordinate of x - c or y - c, whichever is larger, to about 16, far
/// from LIMIT and from the smallest halves. A block takes one batch element.
template <class G>
KN_FN void nearest_scale(const typename G::Arguments& a) {
    using namespace nearest;
    __shared__ float norms[2][SAMPLE], usual[2], largest[2];
    const long long element = blockIdx.x;
    const int lane = threadIdx.x % 32;
    const float* const centre = a.centre + element * G::DIM;
    for (int k = threadIdx.x / 32; k < 2 * SAMPLE; k += ITEM_THREADS / 32) {
        const auto& points = k < SAMPLE ? a.x : a.y;
        const int s = k % SAMPLE;
        const float* p = points_of<G>(a, points, element) + s * ((k < SAMPLE ? a.m : a.n) - 1) / (SAMPLE - 1) * points.row;
        double sum = 0;
        for (int d = lane; d < G::DIM; d += 32) {
            const double z = static_cast<double>(p[d * points.component]) - centre[d];
            sum += z * z;
        }
        sum = warp_sum(sum);
        if (lane == 0) norms[k / SAMPLE][s] = static_cast<float>(sqrt(sum));
    }
    if (threadIdx.x < 2) usual[threadIdx.x] = largest[threadIdx.x] = 0;
    __syncthreads();
    for (int k = threadIdx.x; k < 2 * SAMPLE; k += ITEM_THREADS) {
        const float* of = norms[k / SAMPLE];
        if (is_quantile(of, 1, k % SAMPLE, 3, 4)) usual[k / SAMPLE] = of[k % SAMPLE];
        if (is_quantile(of, 1, k % SAMPLE, 1, 1)) largest[k / SAMPLE] = of[k % SAMPLE];
    }
    __syncthreads();
    if (threadIdx.x) return;
    float norm = greater(usual[0], usual[1]);
    if (norm == 0) norm = greater(largest[0], largest[1]);
    double scale = 1;
    const double square = static_cast<double>(norm) * norm / G::DIM;
    if (square > 0) {
        const int exponent = static_cast<int>(__double_as_longlong(square) >> 52) - 1023;
        scale = __longlong_as_double(static_cast<long long>(1023 + 4 - (exponent >> 1)) << 52);
    }
    a.scale[element] = scale;
}

/// A warp packs a row or a column. Rows come first, then columns by their positions, of one batch element after the other.
template <class G>
KN_FN void nearest_pack(const typename G::Arguments& a) {
    using namespace nearest;
    const long long item = blockIdx.x * static_cast<long long>(ITEM_THREADS / 32) + threadIdx.x / 32;
    if (item >= a.packed) return;
    const int lane = threadIdx.x % 32;
    const long long all_rows = a.elements * a.row_blocks * ROWS;
    const bool is_row = item < all_rows;
    const long long place_of = is_row ? item : item - all_rows;
    const unsigned each = static_cast<unsigned>(is_row ? a.row_blocks : a.tiles);  // blocks or tiles of a batch element
    const unsigned element = static_cast<unsigned>(place_of / 128) / each;
    const long long position = place_of - element * 128LL * each;
    const long long number = is_row ? position : column_at<G>(a, position);
    const bool exists = number < (is_row ? a.m : a.n);
    const auto& points = is_row ? a.x : a.y;
    const float* const p = points_of<G>(a, points, element) + (exists ? number * points.row : 0);
    const float* const centre = a.centre + static_cast<long long>(element) * G::DIM;
    const double scale = a.scale[element];
    const int at = static_cast<int>(place_of % 128);
    unsigned char* const to = (is_row ? a.rows : a.columns) + place_of / 128 * (chunks<G>() * static_cast<long long>(CHUNK));

    double square = 0, error = 0, size = 0, worst = 0;  // worst: 0, or NaN where a coordinate is not finite
    bool clamped = false;
    for (int d0 = 2 * lane; d0 < chunks<G>() * WIDTH; d0 += 64) {
        unsigned both = 0;
        KN_UNROLL_ALL
        for (int k = 0; k < 2; ++k) {
            const int d = d0 + k;
            double z = exists && d < G::DIM ? (static_cast<double>(p[d * points.component]) - centre[d]) * scale : 0;
            worst += z - z;
            if (!(z <= LIMIT)) z = LIMIT, clamped = true;
            if (z < -LIMIT) z = -LIMIT, clamped = true;
            const unsigned short half = half_of(static_cast<float>(z));
            const double rounded = of_half(half);
            square += rounded * rounded, error += (z - rounded) * (z - rounded), size += z * z;
            both |= static_cast<unsigned>(half) << (16 * k);
        }
        *reinterpret_cast<unsigned*>(to + d0 / WIDTH * CHUNK + place(at, d0 % WIDTH / 8) + d0 % 8 * 2) = both;
    }
    square = warp_sum(square), error = warp_sum(error), size = warp_sum(size), worst = warp_sum(worst);
    clamped = __ballot_sync(0xffffffffu, clamped) != 0;
    const bool usable = exists && worst == 0;
    if (exists && !usable) {  // zeros, so that the matrix unit sees finite numbers only
        for (int d0 = 2 * lane; d0 < chunks<G>() * WIDTH; d0 += 64)
            *reinterpret_cast<unsigned*>(to + d0 / WIDTH * CHUNK + place(at, d0 % WIDTH / 8) + d0 % 8 * 2) = 0;
    }
    if (lane) return;
    // of the rounding to halves, and of that of z itself
    const float length = above(sqrt(error) + sqrt(size) * 0x1p-50);
    if (is_row) {
        a.row_numbers[item] = {usable ? static_cast<float>(square) : 0, usable && !clamped ? length : -1};
        return;
    }
    constexpr double EPS = epsilon<G>();
    const double f = static_cast<double>(length) * length;
    const double up = square / 2 + f / (2 * ETA) + EPS * (square + f / ETA);
    a.column_up[place_of] = usable && !clamped ? below(-up, up) : NEVER;
    const double low = (square - f) / 2 - EPS * (square + f);
    a.column_low[place_of] = {usable ? -below(low, square + f) : NEVER, usable ? length : 0};
}

}  // namespace kn
