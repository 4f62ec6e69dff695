// The K smallest values of a row and their columns, in increasing order, ties to the lowest column. NaN is never chosen;
// places that nothing fills hold NaN and -1.
//
// Columns come in increasing order, so a new value goes behind its equals and is refused if it equals the last of K.
// The test `!(v >= bound) && v == v` admits everything but NaN while the list is not full, because bound is NaN then.
#pragma once

namespace kn {

/// The K places of a result, or of a split's partial list.
template <class T>
struct Places {
    T* value;
    long long* index;
    int step;

    KN_FN void put(int place, T v, long long j) const { value[place * step] = v, index[place * step] = j; }
    KN_FN void copy(int to, int from) const { put(to, value[from * step], index[from * step]); }
    /// @return whether a place comes after (v, j) in the order of the result
    KN_FN bool after(int place, T v, long long j) const {
        const T u = value[place * step];
        return u > v || (u == v && index[place * step] > j);
    }
};

/// A sorted list in registers, for small K, and a queue in front of it. Few lanes of a warp find a column that belongs in
/// their list at the same time, and an insertion takes long: so columns wait in shared memory until some lane has no room
/// for another group, and are then inserted by all lanes together.
template <class G, class T, class I, int K>
struct KList {
    static constexpr int C = 1, IN = 1, SIZE = G::Q + 4;
    static constexpr bool WHOLE_WARPS = true;  // lanes vote
    static constexpr unsigned ALL = 0xffffffffu;
    T best[K];
    I arg[K];
    int row, count;  // which of the thread's rows this is; columns that wait

    KN_FN void fill(T v, int r) {
        row = r, count = 0;
        KN_UNROLL_ALL
        for (int k = 0; k < K; ++k) best[k] = v, arg[k] = -1;
    }
    KN_FN void open(const Places<T>&, int r) { fill(T(KN_NAN), r); }
    KN_FN void close(int r) { fill(T(-KN_INF), r); }  // there is no such row: nothing is admitted
    KN_FN void store(const Places<T>& p) {
#pragma unroll 1
        for (int k = 0; k < count; ++k) admit(k);
        KN_UNROLL_ALL
        for (int k = 0; k < K; ++k) p.put(k, best[k], arg[k]);
    }
    KN_FN T bound() const { return best[K - 1]; }

    /// Place k of this row's queue, behind the tile: places of all rows and threads, values before columns.
    KN_FN T& value_of(int k) const { return reinterpret_cast<T*>(queues())[at(k)]; }
    KN_FN I& column_of(int k) const {
        return reinterpret_cast<I*>(queues() + G::R * SIZE * G::THREADS * sizeof(T))[at(k)];
    }
    KN_FN int at(int k) const { return (row * SIZE + k) * G::THREADS + threadIdx.x; }
    KN_FN static unsigned char* queues() {
        extern __shared__ __align__(16) unsigned char shared[];
        return shared + (G::COLS_IN_MEMORY ? 0 : G::TILE * (G::F::NCOL | 1) * sizeof(T));
    }
    /// Folds Q columns in: nearly all groups are refused by one comparison with the smallest of them, and a vote.
    template <bool FULL, int Q>
    KN_FN void fold(const T (&v)[Q][1], I j, int valid) {
        T least = v[0][0];
        KN_UNROLL_ALL
        for (int q = 1; q < Q; ++q)
            if (FULL || q < valid) least = lesser(least, v[q][0]);
        if (!__any_sync(ALL, !(least >= bound()))) return;
        KN_UNROLL_ALL
        for (int q = 0; q < Q; ++q)
            if ((FULL || q < valid) && !(v[q][0] >= bound()) && v[q][0] == v[q][0])
                value_of(count) = v[q][0], column_of(count) = j + q, ++count;
        if (!__any_sync(ALL, count > SIZE - Q)) return;
#pragma unroll 1
        for (int k = 0; __any_sync(ALL, k < count); ++k)
            if (k < count) admit(k);
        count = 0;
    }
    KN_FN void admit(int k) {
        const T v = value_of(k);
        if (!(v >= bound())) insert(v, column_of(k));
    }
    KN_FN void insert(T v, I j) {
        KN_UNROLL_ALL
        for (int k = K - 1; k >= 0; --k) {
            const bool here = !(best[k] <= v);                    // v goes to place k or before it
            const bool before = k > 0 && !(best[k ? k - 1 : 0] <= v);
            best[k] = here ? (before ? best[k ? k - 1 : 0] : v) : best[k];
            arg[k] = here ? (before ? arg[k ? k - 1 : 0] : j) : arg[k];
        }
    }
    KN_FN void flush() {}
};

// --- a heap in global memory, the largest (value, column) on top -------------------------------------------------------

/// (v, j) replaces the top of a heap. @return the new top
template <class T>
KN_SLOW T heap_sink(Places<T> p, int size, T v, long long j) {
    int place = 0;
    for (int child = 1; child < size; child = 2 * place + 1) {
        if (child + 1 < size && p.after(child + 1, p.value[child * p.step], p.index[child * p.step])) ++child;
        if (!p.after(child, v, j)) break;
        p.copy(place, child);
        place = child;
    }
    p.put(place, v, j);
    return p.value[0];
}

/// (v, j) is added to a heap. @return the new top
template <class T>
KN_SLOW T heap_rise(Places<T> p, int size, T v, long long j) {
    int place = size;
    for (int parent = (place - 1) / 2; place > 0 && !p.after(parent, v, j); parent = (place - 1) / 2) {
        p.copy(place, parent);
        place = parent;
    }
    p.put(place, v, j);
    return p.value[0];
}

/// A heap becomes a sorted list of K places, the last K - size of them empty.
template <class T>
KN_SLOW void heap_sort(Places<T> p, int size, int K) {
    for (int last = size - 1; last > 0; --last) {
        const T v = p.value[last * p.step];
        const long long j = p.index[last * p.step];
        p.copy(last, 0);
        heap_sink(p, last, v, j);
    }
    for (int k = size; k < K; ++k) p.put(k, T(KN_NAN), -1);
}

/// For large K: the list is a heap while columns come in, and sorted when the range is done.
template <class T, class I, int K>
struct KHeap {
    static constexpr int C = 1, IN = 1;
    static constexpr bool WHOLE_WARPS = false;
    Places<T> places;
    int count;
    T top;

    KN_FN T bound() const { return top; }
    KN_FN void insert(T v, I j) {
        if (count == K) {
            top = heap_sink(places, K, v, static_cast<long long>(j));
        } else {
            const T t = heap_rise(places, count, v, static_cast<long long>(j));
            if (++count == K) top = t;
        }
    }
    KN_FN void flush() {}
    /// Folds Q columns in: one comparison with the smallest of them refuses nearly all groups.
    template <bool FULL, int Q>
    KN_FN void fold(const T (&v)[Q][1], I j, int valid) {
        T least = v[0][0];
        KN_UNROLL_ALL
        for (int q = 1; q < Q; ++q)
            if (FULL || q < valid) least = lesser(least, v[q][0]);
        if (least >= bound()) return;
        KN_UNROLL_ALL
        for (int q = 0; q < Q; ++q)
            if ((FULL || q < valid) && !(v[q][0] >= bound()) && v[q][0] == v[q][0]) insert(v[q][0], j + q);
    }
    KN_FN void open(const Places<T>& p, int) { places = p, count = 0, top = T(KN_NAN); }
    KN_FN void close(int) { count = K, top = T(-KN_INF); }  // there is no such row: nothing may be written
    KN_FN void store(const Places<T>&) { heap_sort(places, count, K); }
};

/// What becomes of lists.
template <class List>
struct ListResults {
    static constexpr bool WHOLE_WARPS = List::WHOLE_WARPS;

    template <bool FULL, class T, class I, int Q>
    KN_FN static void fold(List& list, const T (&v)[Q][1], I j, int valid) {
        list.template fold<FULL>(v, j, valid);
    }
    /// @param result whether the places of the result are asked for, or those of a split's partial list
    template <class G>
    KN_FN static Places<typename G::T> places(const typename G::Arguments& a, const Where& w, bool result) {
        typedef typename G::T T;
        constexpr int K = G::F::K, DIM = G::F::DIM;
        if (result) {
            const long long at = (w.batch * a.m + w.row) * K * DIM + w.c0;
            return {static_cast<T*>(a.value) + at, static_cast<long long*>(a.second) + at, DIM};
        }
        const long long at = partial_number<G>(a, w) * K;
        return {static_cast<T*>(a.partial) + at, static_cast<long long*>(a.partial_index) + at, 1};
    }
    template <class G>
    KN_FN static void begin(const typename G::Arguments& a, const Where& w, List& list) {
        if (w.row < 0) {
            list.close(w.place);
        } else {
            list.open(places<G>(a, w, a.splits == 1), w.place);
        }
    }
    template <class G, class X>
    KN_FN static void write(const typename G::Arguments& a, const Where& w, const X&, List& list) {
        list.store(places<G>(a, w, true));
    }
    template <class G>
    KN_FN static void save(const typename G::Arguments& a, const Where& w, List& list) {
        list.store(places<G>(a, w, false));
    }
};

/// @return how many of the K sorted values come before v (and those equal to it, if `ties`); NaN comes last
template <class T>
KN_FN int count_before(const T* list, int K, T v, bool ties) {
    int low = 0, high = K;
    while (low < high) {
        const int middle = (low + high) / 2;
        const T u = list[middle];
        if (u < v || (ties && u == v)) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

/// The second pass: one thread for each element of each partial list finds its place in the merged list, if it has one.
/// @param a the call's arguments; `total` is the number of elements of all partial lists
template <class G>
KN_FN void merge_lists(const typename G::Arguments& a) {
    typedef typename G::T T;
    constexpr int K = G::F::K;
    const long long item = (a.first + blockIdx.x) * blockDim.x + threadIdx.x;
    if (item >= a.total) return;
    const long long list = item / K, row = list / a.splits;
    const int k = static_cast<int>(item - list * K);
    const T* lists = static_cast<const T*>(a.partial) + row * a.splits * K;
    const T v = static_cast<const T*>(a.partial)[item];

    Where w;
    w.split = list - row * a.splits;
    w.row = row % a.m;
    const long long rest = row / a.m;
    w.chunk = w.c0 = static_cast<int>(rest % G::CHUNKS);
    w.batch = rest / G::CHUNKS;
    const Places<T> p = G::Results::template places<G>(a, w, true);
    if (v != v) {  // place k of the result is empty if the first list leaves it empty and all lists together do
        if (w.split) return;
        long long filled = 0;
        for (long long s = 0; s < a.splits && filled <= k; ++s) filled += count_before(lists + s * K, K, T(KN_INF), true);
        if (filled <= k) p.put(k, T(KN_NAN), -1);
        return;
    }
    long long place = k;
    for (long long s = 0; s < a.splits && place < K; ++s)
        if (s != w.split) place += count_before(lists + s * K, K, v, s < w.split);
    if (place < K) p.put(static_cast<int>(place), v, static_cast<const long long*>(a.partial_index)[item]);
}

}  // namespace kn
