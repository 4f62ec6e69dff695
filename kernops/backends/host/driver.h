// Runs a kernel over batch elements, groups of rows and ranges of columns, on several threads.
//
// How the work is cut depends on shapes alone, never on the number of threads, and every piece is computed by one thread in
// a fixed order: the same call gives the same bits. Threads are started for a call and end with it (10 microseconds each):
// no pool has to survive a fork, none spins beside torch's.
#pragma once

#include <pthread.h>

#include "contract.h"

namespace kn {

/// Address of component c of result number `place`: of the first result, or of the second one if there are two.
template <class T, class F>
KN_FN T* result(void* const* out, int64_t place, int c) {
    if (F::FIRST == F::OUT || c < F::FIRST) return static_cast<T*>(out[0]) + place * F::FIRST + c;
    return static_cast<T*>(out[1]) + place * (F::OUT - F::FIRST) + (c - F::FIRST);
}

// --- threads ----------------------------------------------------------------------------------------------------------
/// Calls `work(item, thread)` for every item, on up to `threads` threads.
template <class Work>
class Crew {
public:
    Crew(const Work& work, int64_t items) : work_(work), items_(items), next_(0) {}
    void run(int64_t threads) {
        threads = smaller<int64_t>(smaller(threads, items_), MOST);
        pthread_t handle[MOST];
        Member member[MOST];
        pthread_attr_t attr;
        int64_t started = 1;
        if (threads > 1 && !pthread_attr_init(&attr)) {
            pthread_attr_setstacksize(&attr, size_t(16) << 20);
            for (; started < threads; ++started) {  // where no more threads can be had, those that are there do the work
                member[started] = {this, started};
                if (pthread_create(&handle[started], &attr, enter, &member[started])) break;
            }
            pthread_attr_destroy(&attr);
        }
        take(0);
        for (int64_t k = 1; k < started; ++k) pthread_join(handle[k], nullptr);
    }

    static constexpr int64_t MOST = 256;

private:
    struct Member {
        Crew* crew;
        int64_t thread;
    };
    static void* enter(void* member) {
        static_cast<Member*>(member)->crew->take(static_cast<Member*>(member)->thread);
        return nullptr;
    }
    void take(int64_t thread) {
        for (;;) {
            const int64_t item = __atomic_fetch_add(&next_, 1, __ATOMIC_RELAXED);
            if (item >= items_) return;
            work_(item, thread);
        }
    }
    const Work& work_;
    const int64_t items_;
    int64_t next_;
};
template <class Work>
void parallel(int64_t threads, int64_t items, const Work& work) {
    Crew<Work>(work, items).run(threads);
}

/// While one lives, results below the smallest normal number come out as 0, in this thread and in those that it starts.
/// Kernels of far points are made of such numbers, and arithmetic with them is some twenty times slower.
class FlushSubnormals {
#if defined(__SSE2__)
public:
    FlushSubnormals() : before_(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(before_ | 0x8000); }
    ~FlushSubnormals() { __builtin_ia32_ldmxcsr(before_); }

private:
    FlushSubnormals(const FlushSubnormals&);
    const unsigned before_;
#else
public:
    FlushSubnormals() {}
    ~FlushSubnormals() {}
#endif
};

// --- how work is cut --------------------------------------------------------------------------------------------------
constexpr int64_t PIECES = 64;                    // pieces that a large call is cut into at least
constexpr int64_t PACKED_BYTES = int64_t(1) << 26;  // column terms of different batch elements kept at once
constexpr int64_t THREAD_WORK = 400000;           // elementary operations worth the start of a thread

/// Cuts M rows by N columns by a batch.
template <int R, int BLOCKS, int WIDTH>
struct Cut {
    int64_t blocks;       // row blocks (of R rows) in a group
    int64_t groups;       // groups of rows
    int64_t column_blocks, splits, split_blocks;  // ranges of columns, in blocks of WIDTH columns

    Cut(int64_t m, int64_t n, int64_t batches) {
        const int64_t rows = (m + R - 1) / R;
        blocks = larger<int64_t>(1, smaller<int64_t>(BLOCKS, rows * batches / PIECES));
        groups = (rows + blocks - 1) / blocks;
        column_blocks = (n + WIDTH - 1) / WIDTH;
        splits = 1;
        if (batches * groups < PIECES / 4) {
            const int64_t least = larger<int64_t>(1, 4096 / WIDTH);  // blocks in a range
            splits = larger<int64_t>(1, smaller<int64_t>(PIECES / (batches * groups), column_blocks / least));
        }
        const int64_t most = (int64_t(1) << 30) / WIDTH;  // columns are counted in 32 bits within a range
        splits = larger(splits, (column_blocks + most - 1) / most);
        split_blocks = (column_blocks + splits - 1) / splits;
        splits = (column_blocks + split_blocks - 1) / split_blocks;
    }
};

/// What a kernel is given to do: rows row .. row + R * blocks - 1 of one batch element against a range of columns.
template <class T>
struct Piece {
    const T* rows;     // row terms, [row block][slot][row]
    const T* columns;  // column terms, from the range's first block on
    int64_t blocks;    // row blocks
    int64_t column_blocks;
    int64_t width;     // columns of the range
    int64_t first;     // the range's first column
};

/// Computes a call with kernel K, a class of static members:
///   Real, Formula, R, U, BLOCKS, CELLS, WORK    number type, formula; rows and column vectors of a step, row blocks of a
///                                               group; Cells of a row; rough number of operations of a pair
///   Cell            a reduction's state for a row, with merge(const Cell&)
///   scratch(blocks) bytes of working memory
///   compute(piece, scratch, give)               calls give(row block, row in block, cell number, Cell&) for each result
///   write(row slots, place, cell number, cell, outputs)
/// @return 0, or 1 where memory ran out.
template <class K>
int run(const int64_t* words) {
    typedef typename K::Real T;
    typedef typename K::Formula F;
    typedef typename K::Cell Cell;
    typedef Layout<T, F, K::U> Blocks;
    constexpr int R = K::R;
    const FlushSubnormals flush;
    const Problem<T, F> p(words);
    const Cut<R, K::BLOCKS, Blocks::WIDTH> cut(p.m, p.n, p.batches);
    const int64_t packing = cut.column_blocks * Blocks::STRIDE;  // numbers in a packing
    // All packings at once, or, where that is much memory, those of a few batch elements at a time.
    const int64_t room = larger<int64_t>(1, PACKED_BYTES / larger<int64_t>(1, packing * sizeof(T)));
    const bool all = p.packings <= larger<int64_t>(room, 1);
    const int64_t wave = all ? p.batches : smaller(room, p.batches);

    const double pairs = double(p.m) * double(p.n) * double(p.batches);
    const int64_t useful = 1 + int64_t(smaller(pairs * K::WORK / LANES<T> / THREAD_WORK, 1e6));
    const int64_t pieces = cut.groups * cut.splits;
    const int64_t threads = larger<int64_t>(
        1, smaller(smaller<int64_t>(p.threads, Crew<int>::MOST), smaller(useful, wave * pieces)));
    const size_t row_bytes = round_up(size_t(cut.blocks) * R * F::ROWS * sizeof(T), 64);
    const size_t own_bytes = round_up(row_bytes + K::scratch(cut.blocks), 4096);

    Buffer columns(size_t(all ? p.packings : wave) * packing * sizeof(T));
    Buffer scratch(threads * own_bytes);
    Buffer partial(cut.splits > 1 ? size_t(p.batches) * p.m * cut.splits * K::CELLS * sizeof(Cell) : 0);
    Buffer centre(F::PRODUCT * size_t(all ? p.packings : wave) * sizeof(T));
    if (!columns.get() || !scratch.get() || !partial.get() || !centre.get()) return 1;
    T* const packed = reinterpret_cast<T*>(columns.get());
    const bool moved = F::PRODUCT > 0 && p.m >= PRODUCT_POINTS && p.n >= PRODUCT_POINTS;
    T* const centres = moved ? reinterpret_cast<T*>(centre.get()) : nullptr;
    Cell* const cells = reinterpret_cast<Cell*>(partial.get());

    for (int64_t start = 0; start < p.batches; start += wave) {
        const int64_t here = smaller(wave, p.batches - start);
        {
            const int64_t count = all ? p.packings : here;
            for (int64_t q = 0; moved && q < count; ++q)
                find_centre(p, all ? p.batch_of(q) : start + q, centres + q * F::PRODUCT);
            const int64_t step = larger<int64_t>(1, 16384 / (F::COLUMNS + 1) / Blocks::WIDTH);  // blocks of an item
            const int64_t items = (cut.column_blocks + step - 1) / step;
            const auto fill_columns = [&](int64_t item, int64_t) {
                const int64_t q = item / items, block = item % items * step;
                pack_columns<T, F, K::U>(p, all ? p.batch_of(q) : start + q, block,
                                         smaller(block + step, cut.column_blocks),
                                         moved ? centres + q * F::PRODUCT : nullptr, packed + q * packing);
            };
            parallel(smaller(threads, 1 + count * packing / 65536), count * items, fill_columns);
        }
        const auto compute = [&](int64_t item, int64_t thread) {
            const int64_t b = start + item / pieces, split = item % cut.splits;
            const int64_t row_block = item % pieces / cut.splits * cut.blocks;
            char* const own = scratch.get() + thread * own_bytes;
            T* const rows = reinterpret_cast<T*>(own);
            const int64_t blocks = smaller(cut.blocks, (p.m + R - 1) / R - row_block);
            const Inputs<T, F::NVARS> in = p.inputs(b);
            const int64_t q = all ? p.packing_of(b) : b - start;
            for (int64_t k = 0; k < blocks; ++k)
                pack_rows<R>(p, in, (row_block + k) * R, moved ? centres + q * F::PRODUCT : nullptr,
                             T(double(k) / double(blocks)), rows + k * R * F::ROWS);
            const int64_t first = split * cut.split_blocks;
            Piece<T> piece;
            piece.rows = rows;
            piece.columns = packed + q * packing + first * Blocks::STRIDE;
            piece.blocks = blocks;
            piece.column_blocks = smaller(cut.split_blocks, cut.column_blocks - first);
            piece.first = first * Blocks::WIDTH;
            piece.width = smaller(piece.column_blocks * Blocks::WIDTH, p.n - piece.first);
            K::compute(piece, own + row_bytes, [&](int64_t k, int r, int number, const Cell& cell) {
                const int64_t i = (row_block + k) * R + r;
                if (i >= p.m) return;
                const int64_t place = b * p.m + i;
                if (cut.splits > 1)
                    cells[(place * cut.splits + split) * K::CELLS + number] = cell;
                else
                    K::write(RowNumbers<T, R>{rows + k * R * F::ROWS + r}, place, number, cell, p.out);
            });
        };
        parallel(threads, here * pieces, compute);
    }
    if (cut.splits > 1) {
        T* const row = reinterpret_cast<T*>(scratch.get());
        for (int64_t place = 0; place < p.batches * p.m; ++place) {
            pack_rows<1>(p, p.inputs(place / p.m), place % p.m, static_cast<const T*>(nullptr), T(0), row);
            Cell* const mine = cells + place * cut.splits * K::CELLS;
            for (int number = 0; number < K::CELLS; ++number) {
                for (int64_t s = 1; s < cut.splits; ++s) mine[number].merge(mine[s * K::CELLS + number]);
                K::write(RowNumbers<T, 1>{row}, place, number, mine[number], p.out);
            }
        }
    }
    return 0;
}

}  // namespace kn
