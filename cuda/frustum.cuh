// The cells that the points of a frustum fall into, and runs: consecutive depths of a pixel that stay in one cell.
#pragma once

#include "rows.cuh"

namespace kn {

/// Arguments of frustum_cells; 8-byte fields only.
struct FrustumArguments {
    const double* projection;  // (cameras, 3, 4): [P | T] of each camera of each batch element
    const double* u;           // column of the image of each column of features, in pixels
    const double* v;           // row of the image of each row
    const double* d;           // depths, in the units of the grid
    int* cells;                // (cameras, depths, rows, columns)
    double lower[3], step[3];
    long long count[3];        // cells along x, y, z
    long long points, cameras, depths, rows, columns;  // cameras: of one batch element
    long long truncate;        // round toward zero, as the public implementations do; else down
};

/// One thread a point. Every product and sum is rounded by itself, in the order of kernops/geometric/cells.py, so that
/// all back ends agree to the last bit on the cell of a point.
KN_FN void frustum_cells(const FrustumArguments& a) {
    const long long point = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (point >= a.points) return;
    const unsigned p = static_cast<unsigned>(point);  // points are fewer than 2^31
    const unsigned columns = static_cast<unsigned>(a.columns), rows = static_cast<unsigned>(a.rows);
    const unsigned line = p / columns, plane = line / rows, camera = plane / static_cast<unsigned>(a.depths);
    const double u = a.u[p - line * columns], v = a.v[line - plane * rows];
    const double depth = a.d[plane - camera * static_cast<unsigned>(a.depths)];
    const double* m = a.projection + camera * 12;
    long long cell = camera / static_cast<unsigned>(a.cameras);  // the batch element
    bool inside = true;
    KN_UNROLL_ALL
    for (int axis = 2; axis >= 0; --axis) {
        const double* row = m + 4 * axis;
        const double q = __dadd_rn(__dadd_rn(__dmul_rn(row[0], u), __dmul_rn(row[1], v)), row[2]);
        const double e = __dadd_rn(__dmul_rn(depth, q), row[3]);
        double f = __ddiv_rn(__dsub_rn(e, a.lower[axis]), a.step[axis]);
        f = a.truncate ? trunc(f) : floor(f);
        inside = inside && f >= 0 && f < static_cast<double>(a.count[axis]);  // false for a NaN
        cell = cell * a.count[axis] + (inside ? static_cast<int>(f) : 0);
    }
    a.cells[point] = inside ? static_cast<int>(cell) : -1;
}

/// Arguments of run_keys and run_items; 8-byte fields only.
struct RunArguments {
    const int* cells;        // (cameras, depths, pixels)
    const int* permutation;  // or null: bucket of each cell
    int* keys;               // of run_keys: bucket of a run at its first point, -1 elsewhere
    const int* first;        // of run_items: first point of each run, sorted
    const int* starts;       // of run_items: its last number is the number of runs
    int2* items;
    long long points, buckets;
    Divider frustum, image;
};

/// @return number of the depth of a point
KN_FN int depth_of(const RunArguments& a, int point) {
    return a.image.of(point - a.frustum.of(point) * a.frustum.divisor);
}

KN_FN void run_keys(const RunArguments& a) {
    const long long p = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (p >= a.points) return;
    const int cell = a.cells[p];
    const bool begins = cell >= 0 && (depth_of(a, static_cast<int>(p)) == 0 || a.cells[p - a.image.divisor] != cell);
    a.keys[p] = !begins ? -1 : a.permutation ? a.permutation[cell] : cell;
}

KN_FN void run_items(const RunArguments& a) {
    const long long k = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (k >= a.starts[a.buckets]) return;
    const int p = a.first[k], cell = a.cells[p], depths = a.frustum.divisor / a.image.divisor;
    int length = 1;
    for (int d = depth_of(a, p) + 1; d < depths && a.cells[p + static_cast<long long>(length) * a.image.divisor] == cell; ++d)
        ++length;
    a.items[k] = make_int2(p, length);
}

}  // namespace kn
