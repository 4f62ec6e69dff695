// What is done with whole points and rows, without arithmetic of a kind: sorting, runs, copies, and the cells of a frustum.
// To be compiled without contraction of floating-point expressions: every operation of `cells` is rounded by itself, so
// that all devices agree on a point's cell.
#pragma once

#include "buckets.h"

namespace kn {

/// The words of a call: the stable order of numbers by bucket. At most 2^31 - 1 numbers and buckets.
struct SortCall {
    const int32_t* bucket;
    int64_t n, buckets;
    int32_t *order, *starts;
    int64_t threads;
};
inline int sort(const SortCall& call) {
    const Numbered numbers = {call.bucket, call.buckets};
    return counting_sort(numbers, call.n, call.buckets, call.threads, call.order, call.starts);
}

/// The words of a call: the runs of a frustum's points by cell.
struct RunsCall {
    const int32_t* cell;
    int64_t n, depths, pixels, buckets;
    const int32_t* permutation;
    Run* items;
    int32_t* starts;
    int64_t threads;
};
inline int runs(const RunsCall& call) {
    const Runs source = {{call.cell, call.buckets}, call.permutation, call.depths, call.pixels};
    return counting_sort(source, call.n, call.buckets, call.threads, call.items, call.starts);
}

/// The words of a call: a row for each bucket, of zeros for negative ones. `bytes` of a row, `step` from one to the next.
struct GatherCall {
    const char* rows;
    int64_t step, bytes;
    const int32_t* bucket;
    int64_t n;
    char* out;
    int64_t threads;
};
inline int gather(const GatherCall& call) {
    constexpr int64_t PIECE = 1024;
    const int64_t threads = larger<int64_t>(1, smaller(call.threads, call.n * (16 + call.bytes / 16) / THREAD_WORK));
    parallel(threads, (call.n + PIECE - 1) / PIECE, [&](int64_t piece, int64_t) {
        for (int64_t k = piece * PIECE; k < smaller(call.n, (piece + 1) * PIECE); ++k)
            if (call.bucket[k] < 0)
                memset(call.out + k * call.bytes, 0, call.bytes);
            else
                memcpy(call.out + k * call.bytes, call.rows + call.bucket[k] * call.step, call.bytes);
    });
    return 0;
}

/// The words of a call: the cell of each point, or -1.
struct CellsCall {
    const double* projection;  // of each image, 3 by 4
    const double *u, *v, *d;
    int64_t batch, cameras, depths, rows, columns;
    double lower[3], step[3];
    int64_t counts[3];  // along x, y, z
    int64_t truncate;   // round toward zero, not down
    int32_t* cell;
    int64_t threads;
};
/// The cells of a row of pixels at one depth; rays[a] are the coordinates of each pixel's ray at depth 1.
inline void cells_of_row(const CellsCall& call, const double* projection, const double* const* rays, double depth,
                         int32_t first, int32_t* cell) {
    const double least = call.truncate ? -0x1.fffffffffffffp-1 : 0.0;  // the smallest number that becomes 0
    const double nx = double(call.counts[0]), ny = double(call.counts[1]), nz = double(call.counts[2]);
    const int32_t width = int32_t(call.counts[0]), height = int32_t(call.counts[1]);
    const double tx = projection[3], ty = projection[7], tz = projection[11];
    const double lx = call.lower[0], ly = call.lower[1], lz = call.lower[2];
    const double sx = call.step[0], sy = call.step[1], sz = call.step[2];
    for (int64_t k = 0; k < call.columns; ++k) {
        const double x = (depth * rays[0][k] + tx - lx) / sx;
        const double y = (depth * rays[1][k] + ty - ly) / sy;
        const double z = (depth * rays[2][k] + tz - lz) / sz;
        const bool inside = (x >= least) & (x < nx) & (y >= least) & (y < ny) & (z >= least) & (z < nz);
        const int32_t i = int32_t(inside ? x : 0.0), j = int32_t(inside ? y : 0.0), l = int32_t(inside ? z : 0.0);
        cell[k] = inside ? ((first + l) * height + j) * width + i : -1;
    }
}
inline int cells(const CellsCall& call) {
    const int64_t images = call.batch * call.cameras, work = images * call.depths * call.rows * call.columns * 8;
    const int64_t threads = larger<int64_t>(1, smaller(smaller(call.threads, Crew<int>::MOST), work / THREAD_WORK));
    const size_t own = round_up(3 * call.columns * sizeof(double), 64);
    Buffer buffer(threads * own);
    if (!buffer.get()) return 1;
    parallel(threads, images * call.rows, [&](int64_t item, int64_t thread) {
        const int64_t image = item / call.rows, row = item % call.rows;
        const double* const projection = call.projection + 12 * image;
        double* const ray = reinterpret_cast<double*>(buffer.get() + thread * own);
        double* const rays[3] = {ray, ray + call.columns, ray + 2 * call.columns};
        for (int a = 0; a < 3; ++a) {
            const double* const p = projection + 4 * a;
            const double down = p[1] * call.v[row];
            for (int64_t k = 0; k < call.columns; ++k) rays[a][k] = p[0] * call.u[k] + down + p[2];
        }
        for (int64_t d = 0; d < call.depths; ++d)
            cells_of_row(call, projection, rays, call.d[d], int32_t(image / call.cameras * call.counts[2]),
                         call.cell + ((image * call.depths + d) * call.rows + row) * call.columns);
    });
    return 0;
}

}  // namespace kn
