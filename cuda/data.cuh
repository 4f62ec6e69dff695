// What a kernel is given and where its rows and columns lie: arguments, tensors, packed scratch, tiles.
//
// A kernel is compiled for one configuration G, a struct that the generated source defines:
//   F              the formula (kernops/codegen/emit.py)
//   T, I           number type (float, double) and type of a column's index (int, long long)
//   E              number type of tensors and results in memory: T, or a half type where T is float
//   State          the streaming state of the reduction (reductions.cuh, kmin.cuh), of C components
//   Results        how states are set up, fed and written (tile.cuh, expsum.cuh, kmin.cuh)
//   Arguments      kn::Arguments for the formula's variables and BATCH
//   THREADS, R     threads of a block; rows of a thread: a block owns THREADS * R rows
//   Q              columns that a thread folds in at once
//   TILE, TILES    columns between two flushes; number of such tiles that are brought to shared memory at a time
//   PLAIN          pairs of a thread's R * Q whose exponentials are left to the plain cores
//   C, CHUNKS      components of the result that one block computes; number of such chunks
//   BATCH          number of batch dimensions, at least 1
//   LANES          threads that merge the splits of one row
//   ROWS_IN_MEMORY, COLS_IN_MEMORY   whether row (column) slots are read from packed scratch in global memory
//   scalar(k)      whether variable k is a number and not a tensor
#pragma once

namespace kn {

/// Arguments of every kernel of a call, passed by value. Eight-byte fields only: kernops/backends/cuda.py packs them.
template <int VARS, int BATCH>
struct Arguments {
    static_assert(BATCH >= 1, "a call without batch dimensions has one of size 1");
    struct Variable {
        union {
            const void* data;
            double number;
        };
        long long batch[BATCH], row, component;  // strides in elements
    };
    Variable variable[VARS ? VARS : 1];
    long long batch[BATCH];  // sizes
    long long m, n;          // rows and columns of one batch element
    long long row_blocks;    // blocks that cover the rows of one batch element
    long long splits, span;  // the columns are split into `splits` ranges of `span`
    unsigned long long per_row_block, per_split;  // reciprocals of `row_blocks` and `splits`, see `quotient`
    long long first;         // number of the first block of this launch
    long long total;         // number of work items of the launch (not of `reduce`)
    void* value;             // results
    void* second;            // log of the sum of exponentials, or indices
    void* partial;           // states of splits, or values of their lists
    void* partial_index;     // indices of the splits' lists
    void* rows;              // packed row slots
    void* cols;              // packed column slots
    void* survey;            // what was found about the data, if a faster kernel was tried before this one; else null
    long long survey_bytes;  // of one batch element
};

/// How the matrix units compute a batch element (halves.cuh); PLAIN: not, but the plain kernels do.
enum Mode { EXACT = 0, NEAR = 1, PLAIN = 2 };

/// What was found about the data of a batch element; the centre follows.
struct Survey {
    unsigned largest;    // |component| after centring, as the bits of a float
    unsigned norm;       // squared norm, likewise
    unsigned slope;      // |slope| of the exponent, likewise; infinite where a slope is positive
    unsigned near, far;  // near pairs in the sample; points that are far for their slope
    int mode;
    unsigned largest_row;  // `largest` of the rows alone, where products are summed
    unsigned tiny;         // points whose numbers the scale makes so small that their lower halves lose digits
};

/// @return whether the result of a batch element is there already
template <class A>
KN_FN bool is_done(const A& a, long long batch) {
    if (!a.survey) return false;
    return reinterpret_cast<const Survey*>(static_cast<const char*>(a.survey) + batch * a.survey_bytes)->mode != PLAIN;
}

/// Number of a block, taken apart: row blocks fastest, then splits, then the rest.
/// A division takes hundreds of cycles while the unit that begins it is busy with exponentials.
struct BlockNumber {
    long long row_block, split, rest;

    template <class A>
    KN_FN BlockNumber(const A& a) {
        const long long number = a.first + blockIdx.x, ranges = quotient(number, a.row_blocks, a.per_row_block);
        row_block = number - ranges * a.row_blocks;
        rest = quotient(ranges, a.splits, a.per_split);
        split = ranges - rest * a.splits;
    }
    /// n / d by the reciprocal floor(2^64 / d) + 1, or 0 for d = 1. With n, d < 2^32 the product exceeds 2^64 n / d by less than
    /// 2^32, and a quotient that is not whole lies at least 2^-32 below the next whole number.
    KN_FN static long long quotient(long long n, long long d, unsigned long long reciprocal) {
        if (reciprocal == 0) return n;
        return n >> 32 ? n / d : static_cast<long long>(__umul64hi(static_cast<unsigned long long>(n), reciprocal));
    }
};

/// The tensors at one row or column: what Formula::row and Formula::col read.
template <class G>
struct In {
    typedef typename G::T T;
    typedef typename G::E E;
    const typename G::Arguments& a;
    const E* base[G::F::NVARS ? G::F::NVARS : 1];
    long long index;

    /// @param batch number of the batch element, in C order
    KN_FN In(const typename G::Arguments& args, long long batch) : a(args), index(0) {
        KN_UNROLL_ALL
        for (int k = 0; k < G::F::NVARS; ++k) base[k] = static_cast<const E*>(a.variable[k].data);
        KN_UNROLL_ALL
        for (int b = G::BATCH - 1; b >= 0; --b) {
            const long long rest = b ? batch / a.batch[b] : 0, at = batch - rest * a.batch[b];
            batch = rest;
            KN_UNROLL_ALL
            for (int k = 0; k < G::F::NVARS; ++k) base[k] += at * a.variable[k].batch[b];
        }
    }
    KN_FN T at(int k, int d) const {
        if (G::scalar(k)) return T(a.variable[k].number);
        return widen(base[k][index * a.variable[k].row + d * a.variable[k].component]);
    }
};

/// Where Formula::row and Formula::col write: slot s lies STEP numbers after slot s - 1.
template <class T, int STEP>
struct Slots {
    T* first;
    KN_FN T& operator[](int s) const { return first[static_cast<long long>(s) * STEP]; }
};

/// N numbers that are moved in as few instructions as possible.
template <class T, int N>
struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Vec {
    static_assert((N & (N - 1)) == 0, "vectors have a power of two of components");
    T v[N];
};

// Loads that stay where they are written. A plain load of row slots would be hoisted out of the loop over columns, all
// of them at once, and spill.
KN_FN void load_here(const float* p, Vec<float, 1>& r) { asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(r.v[0]) : "l"(p)); }
KN_FN void load_here(const float* p, Vec<float, 2>& r) {
    asm volatile("ld.global.nc.v2.f32 {%0, %1}, [%2];" : "=f"(r.v[0]), "=f"(r.v[1]) : "l"(p));
}
KN_FN void load_here(const float* p, Vec<float, 4>& r) {
    asm volatile("ld.global.nc.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(r.v[0]), "=f"(r.v[1]), "=f"(r.v[2]), "=f"(r.v[3])
                 : "l"(p));
}
KN_FN void load_here(const double* p, Vec<double, 1>& r) { asm volatile("ld.global.nc.f64 %0, [%1];" : "=d"(r.v[0]) : "l"(p)); }
KN_FN void load_here(const double* p, Vec<double, 2>& r) {
    asm volatile("ld.global.nc.v2.f64 {%0, %1}, [%2];" : "=d"(r.v[0]), "=d"(r.v[1]) : "l"(p));
}
template <class T, int N>
KN_FN void load_here(const T* p, Vec<T, N>& r) {
    Vec<T, N / 2> low, high;
    load_here(p, low);
    load_here(p + N / 2, high);
    KN_UNROLL_ALL
    for (int k = 0; k < N / 2; ++k) r.v[k] = low.v[k], r.v[N / 2 + k] = high.v[k];
}

/// Geometry of packed rows and columns.
template <class G>
struct Layout {
    typedef typename G::T T;
    static constexpr int NROW = G::F::NROW, NCOL = G::F::NCOL;
    static constexpr int ROWS = G::THREADS * G::R;  // of a block
    // Columns lie in groups of Q: slot 0 of Q columns, slot 1 of Q columns, ... An odd number of slots keeps the groups
    // that the threads of a warp fill at once in different banks.
    static constexpr int GROUP = (NCOL | 1) * G::Q;
    // Rows lie as their thread reads them: block, slot, thread, row of the thread.
    static constexpr int SLOT = ROWS;

    static_assert(sizeof(typename G::Arguments) == 8 * ((G::F::NVARS ? G::F::NVARS : 1) * (G::BATCH + 3) + G::BATCH + 17),
                  "the arguments are eight-byte fields without gaps");
    static_assert(G::TILE % G::Q == 0, "a tile holds whole groups");
    static_assert(G::THREADS % 32 == 0 && G::THREADS <= 1024, "a block holds whole warps");

    /// @param block number of the row block, counted over all batch elements
    /// @param row number of the row in the block; row = r * THREADS + t is row r of thread t
    /// @return address of slot 0 of a row
    KN_FN static T* row(const typename G::Arguments& a, long long block, int row) {
        return static_cast<T*>(a.rows) + block * (NROW * static_cast<long long>(SLOT)) +
               (row % G::THREADS) * G::R + row / G::THREADS;
    }
    /// @return address of the first group of columns of a batch element
    KN_FN static T* cols(const typename G::Arguments& a, long long batch) {
        return static_cast<T*>(a.cols) + batch * ((a.n + G::Q - 1) / G::Q) * GROUP;
    }
    /// @return offset of slot 0 of column j from the first group
    template <class Index>
    KN_FN static Index col(Index j) {
        return j / G::Q * GROUP + j % G::Q;
    }
};

// --- what Formula::pair reads: x[s] and y[s] are packs of pairs, rows slowest --------------------------------------------

/// The pairs that are evaluated at once. All R * Q pairs of a thread, so that every slot that is read serves many; but
/// where there are few slots, one pair after the other, so that the exponentials of one, which have a slow unit of their
/// own, come between the sums and products of the next.
template <class G>
struct Packs {
    static constexpr bool ONE = !G::ROWS_IN_MEMORY && G::F::NCOL <= 8;
    static constexpr int ROWS = ONE ? 1 : G::R, COLS = ONE ? 1 : G::Q, PAIRS = ROWS * COLS;
    typedef Pack<typename G::T, PAIRS> V;
    typedef Pack<typename G::T, PAIRS, true> Soft;
    /// @return whether pair p, evaluated alone, is one of those that leave exponentials to the plain cores: bits of PLAIN
    KN_FN static bool is_soft(int p) { return ONE && (G::PLAIN >> p & 1); }
};

/// The slots of a thread's rows, in registers. @tparam V a pack of pairs, here and below
template <class G, class V = typename Packs<G>::V>
struct RowRegisters {
    const typename G::T (&x)[G::R][G::F::NROW ? G::F::NROW : 1];
    int first;  // number in the thread of the pack's first row
    KN_FN V operator[](int s) const {
        V v;
        KN_UNROLL_ALL
        for (int k = 0; k < Packs<G>::PAIRS; ++k) v.v[k] = x[first + k / Packs<G>::COLS][s];
        return v;
    }
    template <class W>
    KN_FN RowRegisters<G, W> at(int row) const {
        return {x, row};
    }
};

/// The slots of a thread's rows, in packed scratch.
template <class G, class V = typename Packs<G>::V>
struct RowMemory {
    const typename G::T* first;  // slot 0 of row 0 of this thread
    KN_FN V operator[](int s) const {
        Vec<typename G::T, G::R> x;
        load_here(first + s * Layout<G>::SLOT, x);
        V v;
        KN_UNROLL_ALL
        for (int k = 0; k < Packs<G>::PAIRS; ++k) v.v[k] = x.v[k / Packs<G>::COLS];
        return v;
    }
    template <class W>
    KN_FN RowMemory<G, W> at(int) const {
        return {first};
    }
};

/// The slots of a group of columns.
template <class G, class V = typename Packs<G>::V>
struct Columns {
    const typename G::T* group;
    int first;  // number in the group of the pack's first column
    KN_FN V operator[](int s) const {
        const auto y = *reinterpret_cast<const Vec<typename G::T, G::Q>*>(group + s * G::Q);
        V v;
        KN_UNROLL_ALL
        for (int k = 0; k < Packs<G>::PAIRS; ++k) v.v[k] = y.v[first + k % Packs<G>::COLS];
        return v;
    }
};

// --- packing ---------------------------------------------------------------------------------------------------------

/// Computes the row slots of every row, one thread a row; rows beyond the last repeat it.
template <class G>
KN_FN void pack_rows(const typename G::Arguments& a) {
    const long long item = (a.first + blockIdx.x) * blockDim.x + threadIdx.x;
    if (item >= a.total) return;
    const long long block = item / Layout<G>::ROWS, batch = block / a.row_blocks;
    if (is_done(a, batch)) return;
    const long long i = item - batch * a.row_blocks * Layout<G>::ROWS;
    In<G> in(a, batch);
    in.index = i < a.m ? i : a.m - 1;
    G::F::template row<typename G::T>(in, Slots<typename G::T, Layout<G>::SLOT>{
        Layout<G>::row(a, block, static_cast<int>(item % Layout<G>::ROWS))});
}

/// Computes the column slots of every column, one thread a column.
template <class G>
KN_FN void pack_cols(const typename G::Arguments& a) {
    const long long item = (a.first + blockIdx.x) * blockDim.x + threadIdx.x;
    if (item >= a.total) return;
    const long long batch = item / a.n;
    if (is_done(a, batch)) return;
    In<G> in(a, batch);
    in.index = item - batch * a.n;
    G::F::template col<typename G::T>(
        in, Slots<typename G::T, G::Q>{Layout<G>::cols(a, batch) + Layout<G>::col(in.index)});
}

}  // namespace kn
