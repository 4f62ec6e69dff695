// What one call is given, and how its work is cut: batch elements, groups of rows, ranges of columns.
//
// The words of a call (64 bits each; kernops/backends/cpu.py writes them):
//   m, n, number of batch axes, threads, address of output 0, address of output 1 (or 0), the size of each batch axis;
//   then for every variable: its address (for a scalar: its value as a double), a stride in elements for each batch axis,
//   the stride of rows and that of components.
#pragma once

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "pack.h"

namespace kn {

/// Reads component d of variable k for one row, column and batch element: what the formula's row and column terms see.
template <class T, int NVARS>
struct Inputs {
    const T* base[NVARS + 1];
    int64_t step[NVARS + 1];
    KN_FN T at(int k, int64_t d) const { return base[k][d * step[k]]; }
};

/// The variables of a call. `KIND[k]` is the category of variable k (0: rows, 1: columns, 2: parameter, 3: scalar,
/// -1: not used), `COLUMN[k]` whether a column term reads it.
template <class T, class F>
struct Problem {
    static constexpr int NVARS = F::NVARS;
    int64_t m, n, batches, threads;
    void* out[2];
    int axes;
    const int64_t* size;
    T scalar[NVARS + 1];
    const T* base[NVARS + 1];
    const int64_t* batch_step[NVARS + 1];
    int64_t row_step[NVARS + 1], step[NVARS + 1];
    int64_t packings;  // batch elements that differ in some column term

    explicit Problem(const int64_t* a) {
        m = a[0], n = a[1], axes = int(a[2]), threads = a[3];
        memcpy(out, a + 4, sizeof out);
        size = a + 6;
        batches = 1;
        for (int d = 0; d < axes; ++d) batches *= size[d];
        a = size + axes;
        for (int k = 0; k < NVARS; ++k, a += axes + 3) {
            batch_step[k] = a + 1, row_step[k] = a[axes + 1], step[k] = a[axes + 2];
            if (F::KIND[k] == 3) {
                double x;
                memcpy(&x, a, sizeof x);
                scalar[k] = T(x), base[k] = scalar + k;
            } else {
                memcpy(&base[k], a, sizeof(void*));
            }
        }
        packings = 1;
        for (int d = 0; d < axes; ++d)
            if (in_columns(d)) packings *= size[d];
    }
    bool in_columns(int axis) const {
        for (int k = 0; k < NVARS; ++k)
            if (F::COLUMN[k] && batch_step[k][axis] != 0) return true;
        return false;
    }
    /// The inputs of batch element b, at row 0 and column 0.
    Inputs<T, NVARS> inputs(int64_t b) const {
        Inputs<T, NVARS> in;
        for (int k = 0; k < NVARS; ++k) in.base[k] = base[k], in.step[k] = step[k];
        for (int d = axes - 1; d >= 0; --d) {
            const int64_t at = b % size[d];
            b /= size[d];
            for (int k = 0; k < NVARS; ++k)
                if (F::KIND[k] >= 0) in.base[k] += at * batch_step[k][d];
        }
        return in;
    }
    /// Moves inputs of row or column 0 to number `at`, where `kind` is 0 for rows and 1 for columns.
    KN_FN void move(Inputs<T, NVARS>& in, int kind, int64_t at) const {
        for (int k = 0; k < NVARS; ++k)
            if (F::KIND[k] == kind) in.base[k] += at * row_step[k];
    }
    /// Which packing batch element b uses, and a batch element that has packing number q.
    int64_t packing_of(int64_t b) const {
        int64_t q = 0, weight = 1;
        for (int d = axes - 1; d >= 0; --d) {
            if (in_columns(d)) q += weight * (b % size[d]), weight *= size[d];
            b /= size[d];
        }
        return q;
    }
    int64_t batch_of(int64_t q) const {
        int64_t b = 0, weight = 1;
        for (int d = axes - 1; d >= 0; --d) {
            if (in_columns(d)) b += weight * (q % size[d]), q /= size[d];
            weight *= size[d];
        }
        return b;
    }
};

constexpr size_t LARGE_PAGE = size_t(1) << 21;
/// Memory that is aligned to cache lines and freed at the end of its scope. Much of it is asked for in large pages, whose
/// first touch and whose addresses cost less.
class Buffer {
public:
    explicit Buffer(size_t bytes) {
        if (posix_memalign(&data_, bytes >= LARGE_PAGE ? LARGE_PAGE : 64, bytes ? bytes : 1)) data_ = nullptr;
#if defined(MADV_HUGEPAGE)
        if (data_ && bytes >= LARGE_PAGE) madvise(data_, bytes, MADV_HUGEPAGE);
#endif
    }
    ~Buffer() { free(data_); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    char* get() const { return static_cast<char*>(data_); }

private:
    void* data_;
};

constexpr size_t round_up(size_t x, size_t to) { return (x + to - 1) / to * to; }
template <class T>
constexpr KN_FN T smaller(T a, T b) { return a < b ? a : b; }
template <class T>
constexpr KN_FN T larger(T a, T b) { return a < b ? b : a; }

// --- terms of rows and columns ----------------------------------------------------------------------------------------
/// Column terms lie in blocks of U vectors of columns: [block][slot][column], so that a sweep over columns reads memory
/// in order. The stride of blocks is an odd number of cache lines, lest many blocks share a few lines of the cache.
template <class T, class F, int U>
struct Layout {
    static constexpr int WIDTH = U * LANES<T>;  // columns of a block
    static constexpr int64_t LINES = int64_t(F::COLUMNS) * WIDTH * sizeof(T) / 64;
    static constexpr int64_t STRIDE = int64_t(F::COLUMNS) * WIDTH + (LINES >= 32 && LINES % 2 == 0 ? 64 / sizeof(T) : 0);
    static int64_t blocks(int64_t columns) { return (columns + WIDTH - 1) / WIDTH; }
};

/// What a formula reads: x[s] for the slots of R rows, y[s] for those of U vectors of columns, as packs of R * U pieces.
template <class T, int R, int U>
struct RowSlots {
    const T* p;
    KN_FN Pack<T, R * U> operator[](int s) const {
        Pack<T, R * U> x;
        KN_UNROLL(16)
        for (int k = 0; k < R * U; ++k) x.v[k] = fill(p[s * R + k % R]);
        return x;
    }
};
template <class T, int R, int U>
struct ColumnSlots {
    const T* p;
    KN_FN Pack<T, R * U> operator[](int s) const {
        Pack<T, R * U> y;
        KN_UNROLL(16)
        for (int k = 0; k < R * U; ++k) y.v[k] = load(p + (s * U + k / R) * LANES<T>);
        return y;
    }
};
/// One of R rows, for `finish`.
template <class T, int R>
struct RowNumbers {
    const T* p;
    KN_FN T operator[](int s) const { return p[s * R]; }
};

/// Lanes of vector u of a block that are columns, where `left` columns remain from the start of the block on.
template <class T>
KN_FN Vec<typename Simd<T>::Int> columns_mask(int64_t left, int u) {
    typedef typename Simd<T>::Int Int;
    return lt(iota<Int>(Int(u * LANES<T>)), fill(Int(smaller<int64_t>(left, 1 << 20))));
}
template <class T, int R>
KN_FN MaskFor<T, R> same_mask(Vec<typename Simd<T>::Int> m) {
    MaskFor<T, R> r;
    KN_UNROLL(16)
    for (int k = 0; k < R; ++k) r.m[k] = m;
    return r;
}

}  // namespace kn
