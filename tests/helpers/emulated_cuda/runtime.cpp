// Blocks of threads as fibers of one thread, and checks of what they touch.
//
// Kernels are compiled with the calls of GCC's address sanitizer for kernels (`__asan_load4` and so on) and of its
// sanitizer of undefined behaviour; both are answered here, without shadow memory: an address is right if it lies in a
// tensor of the call, in a variable of the library, or on the fiber's own stack.
#include "intrinsics.h"

#undef alignas
#include <link.h>
#include <sys/mman.h>

#include <stdarg.h>
#include <stdio.h>

#include <map>
#include <utility>
#include <vector>

uint3 threadIdx, blockIdx, blockDim, gridDim;

extern "C" void emulated_switch(void** save, void* load);
asm(R"(
.text
.type emulated_switch, @function
emulated_switch:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
)");

namespace emulated {
namespace {

constexpr size_t STACK = 128 << 10;
constexpr int MOST_THREADS = 1024;

enum State { READY, AT_WARP, AT_BLOCK, DONE };

struct Fiber {
    void* stack_pointer;
    State state;
    Operation operation;
    unsigned turns;
};

struct Variable {
    char* end;
    bool shared;
    int library;
};

Fiber fibers[MOST_THREADS];
constexpr int MOST_GIVEN = 32;  // bytes
alignas(16) char gathered[2][MOST_THREADS * MOST_GIVEN];  // likewise
Bits given[2][MOST_THREADS];  // by the parity of a warp's turns: a lane may be one operation ahead of another
char* stacks;
void* scheduler;
unsigned current;
void (*body)();
const Call* now;
const Range* latest;
const char* stack_begin;
std::map<char*, Variable>& variables = *new std::map<char*, Variable>;  // of all libraries; they may end after this one
std::vector<std::pair<char*, size_t>> shared;  // those of the kernel that runs: begin, size
char problem[512];  // empty: none

/// A linear congruential generator, of which the upper bits are good.
struct Random {
    Bits state;
    unsigned below(unsigned n) {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        return static_cast<unsigned>(state >> 33) % n;
    }
    void shuffle(std::vector<unsigned>& numbers) {
        for (unsigned k = numbers.size(); k > 1; --k) std::swap(numbers[k - 1], numbers[below(k)]);
    }
};

std::vector<unsigned> first_numbers(long long n) {
    std::vector<unsigned> numbers(n);
    for (long long k = 0; k < n; ++k) numbers[k] = static_cast<unsigned>(k);
    return numbers;
}

[[noreturn]] void leave() {
    emulated_switch(&fibers[current].stack_pointer, scheduler);
    __builtin_unreachable();
}

void describe(const char* format, ...) {
    char text[400];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    snprintf(problem, sizeof problem, "%s (block %u, thread %u)", text, blockIdx.x, current);
}

void wait(State state, Operation operation) {
    fibers[current].state = state;
    fibers[current].operation = operation;
    emulated_switch(&fibers[current].stack_pointer, scheduler);
}

void enter() {
    body();
    fibers[current].state = DONE;
    leave();
}

void prepare(int threads) {
    for (int t = 0; t < threads; ++t) {
        void** top = reinterpret_cast<void**>(stacks + (t + 1) * STACK - 64);
        *--top = nullptr;  // where `enter` would return to, and the alignment of a call
        *--top = reinterpret_cast<void*>(enter);
        for (int i = 0; i < 6; ++i) *--top = nullptr;
        fibers[t] = {top, READY, SYNC, 0};
    }
    for (const auto& [begin, size] : shared) memset(begin, 0xff, size);  // NaN, -1
}

int count(int low, int high, State state) {
    int n = 0;
    for (int t = low; t < high; ++t) n += fibers[t].state == state;
    return n;
}

/// Runs a warp until it waits for other warps or ends, or now and then to its next operation.
/// @return whether it came forward
bool run_warp(int warp, Random& random) {
    const int low = warp * 32, high = low + 32;
    if (count(low, high, READY) == 0) return false;
    for (;;) {
        const int first = random.below(32), step = random.below(16) * 2 + 1;
        for (int k = 0; k < 32; ++k) {
            current = low + (first + k * step) % 32;
            if (fibers[current].state != READY) continue;
            threadIdx.x = current;
            stack_begin = stacks + current * STACK;
            emulated_switch(&scheduler, fibers[current].stack_pointer);
            if (*problem) return true;
        }
        const int waiting = count(low, high, AT_WARP);
        if (waiting == 0) return true;
        int same = 0;
        for (int t = low; t < high; ++t)
            same += fibers[t].state == AT_WARP && fibers[t].operation == fibers[low].operation;
        if (same < 32) {
            describe("%d lanes of warp %d are at an operation of the warp that the others are not at", waiting, warp);
            return true;
        }
        for (int t = low; t < high; ++t) fibers[t].state = READY;
        if (random.below(4) == 0) return true;
    }
}

void run_block(int threads, Random& random) {
    prepare(threads);
    std::vector<unsigned> warps = first_numbers(threads / 32);
    while (count(0, threads, DONE) < threads) {
        random.shuffle(warps);
        bool forward = false;
        for (const unsigned w : warps) {
            forward |= run_warp(w, random);
            if (*problem) return;
        }
        if (forward) continue;
        const int waiting = count(0, threads, AT_BLOCK);
        if (waiting != threads) {
            describe("%d of %d threads wait for the block; the others ended", waiting, threads);
            return;
        }
        for (int t = 0; t < threads; ++t) fibers[t].state = READY;
    }
}

bool holds(const char* begin, const char* end, const char* p, size_t n) { return p >= begin && p + n <= end; }

/// Whether a kernel may touch n bytes at p.
void check(const char* p, size_t n, const char* what) {
    if (holds(stack_begin, stack_begin + STACK, p, n)) return;
    if (latest && holds(latest->begin, latest->end, p, n)) return;
    auto next = variables.upper_bound(const_cast<char*>(p));
    if (next != variables.begin()) {
        const auto& [begin, variable] = *--next;
        if (holds(begin, variable.end, p, n)) return;
    }
    if (holds(gathered[0], gathered[2], p, n)) return;
    const Range* nearest = nullptr;
    for (const Range* r = now->ranges; r < now->ranges + now->n_ranges; ++r) {
        if (holds(r->begin, r->end, p, n)) {
            latest = r;
            return;
        }
        if (p + 4096 > r->begin && p < r->end + 4096) nearest = r;
    }
    for (const uint3* index : {&threadIdx, &blockIdx, &blockDim, &gridDim})
        if (holds(reinterpret_cast<const char*>(index), reinterpret_cast<const char*>(index + 1), p, n)) return;
    if (nearest)
        describe("%s of %zu bytes at byte %td of a tensor of %td", what, n, p - nearest->begin,
                 nearest->end - nearest->begin);
    else
        describe("%s of %zu bytes outside of all tensors and variables", what, n);
    leave();
}

/// What the compiler tells handlers of undefined behaviour begins with the place in the source.
struct Place {
    const char* file;
    unsigned line, column;
};

[[noreturn]] void undefined(const void* data, const char* what) {
    const Place& place = *static_cast<const Place*>(data);
    describe("%s at %s:%u:%u", what, place.file, place.line, place.column);
    leave();
}

void join(unsigned mask, Operation operation) {
    if (mask != 0xffffffffu) {
        describe("the mask of a warp's operation is %#x", mask);
        leave();
    }
    wait(AT_WARP, operation);
}

Bits* turn() { return given[fibers[current].turns++ & 1]; }

}  // namespace

const char* launch(const Call& call, void* arguments, long long size, void (*kernel)()) {
    *problem = 0;
    if (call.size != size || call.threads % 32 || call.threads > MOST_THREADS) {
        snprintf(problem, sizeof problem, "%lld bytes of arguments, not %lld; or a block of %lld threads", call.size,
                 size, call.threads);
        return problem;
    }
    if (!stacks)
        stacks = static_cast<char*>(mmap(nullptr, STACK * MOST_THREADS, PROT_READ | PROT_WRITE,
                                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    memcpy(arguments, call.arguments, size);
    const int library = variables.at(static_cast<char*>(arguments)).library;
    shared.clear();
    for (const auto& [begin, variable] : variables)
        if (variable.shared && variable.library == library) shared.emplace_back(begin, variable.end - begin);
    now = &call, latest = nullptr, body = kernel;
    gridDim = {static_cast<unsigned>(call.blocks), 1, 1}, blockDim = {static_cast<unsigned>(call.threads), 1, 1};
    Random random = {call.seed};
    std::vector<unsigned> blocks = first_numbers(call.blocks);
    random.shuffle(blocks);
    for (const unsigned block : blocks) {
        blockIdx.x = block;
        run_block(static_cast<int>(call.threads), random);
        if (*problem) return problem;
    }
    return nullptr;
}

void block_barrier() { wait(AT_BLOCK, SYNC); }

Bits exchange(unsigned mask, Operation operation, Bits value, int from) {
    Bits* const values = turn();
    values[current] = value;
    join(mask, operation);
    return values[current / 32 * 32 + from];
}

unsigned ballot(unsigned mask, bool value) {
    Bits* const values = turn();
    values[current] = value;
    join(mask, BALLOT);
    unsigned lanes = 0;
    for (int k = 0; k < 32; ++k) lanes |= static_cast<unsigned>(values[current / 32 * 32 + k]) << k;
    return lanes;
}

unsigned match(unsigned mask, int value) {
    Bits* const values = turn();
    values[current] = static_cast<unsigned>(value);
    join(mask, MATCH);
    unsigned lanes = 0;
    for (int k = 0; k < 32; ++k) lanes |= static_cast<unsigned>(values[current / 32 * 32 + k] == values[current]) << k;
    return lanes;
}

const void* gather_bytes(const void* mine, int size) {
    if (size > MOST_GIVEN) {
        describe("a lane gives %d bytes", size);
        leave();
    }
    char* const of_warp = gathered[fibers[current].turns++ & 1] + current / 32 * 32 * MOST_GIVEN;
    memcpy(of_warp + current % 32 * size, mine, size);
    join(0xffffffffu, GATHER);
    return of_warp;
}

}  // namespace emulated

// --- what the compiler calls -----------------------------------------------------------------------------------------
#define ACCESS(n)                                                                        \
    void __asan_load##n(const char* p) { emulated::check(p, n, "a load"); }              \
    void __asan_store##n(const char* p) { emulated::check(p, n, "a store"); }            \
    void __asan_load##n##_noabort(const char* p) { emulated::check(p, n, "a load"); }    \
    void __asan_store##n##_noabort(const char* p) { emulated::check(p, n, "a store"); }
#define OVERFLOW(name)                                                                                               \
    void __ubsan_handle_##name##_overflow_abort(const void* data) { emulated::undefined(data, "overflow: " #name); }

extern "C" {

/// The compiler's description of a variable of static storage.
struct Global {
    char* begin;
    size_t size, padded;
    const char* name;
    const char* module;
    size_t dynamic;
    void* place;
    size_t indicator;
};

/// Whether an address in a library can be written to.
static bool writable(const char* p) {
    const auto holds = [](dl_phdr_info* library, size_t, void* address) {
        for (int k = 0; k < library->dlpi_phnum; ++k) {
            const auto& part = library->dlpi_phdr[k];
            const size_t at = reinterpret_cast<size_t>(address) - library->dlpi_addr - part.p_vaddr;
            if (part.p_type == PT_LOAD && at < part.p_memsz) return part.p_flags & PF_W ? 1 : 2;
        }
        return 0;
    };
    return dl_iterate_phdr(holds, const_cast<char*>(p)) == 1;
}

void __asan_register_globals(const Global* globals, size_t n) {
    static int library = 0;
    ++library;
    for (const Global* g = globals; g < globals + n; ++g) {
        // literals start with *
        const bool constant = g->name[0] == '*' || !strcmp(g->name, "emulated_arguments") || !writable(g->begin);
        emulated::variables[g->begin] = {g->begin + g->size, !constant, library};
    }
}
void __asan_unregister_globals(const Global* globals, size_t n) {
    for (const Global* g = globals; g < globals + n; ++g) emulated::variables.erase(g->begin);
}
void __asan_handle_no_return() {}
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
void __asan_loadN(const char* p, size_t n) { emulated::check(p, n, "a load"); }
void __asan_storeN(const char* p, size_t n) { emulated::check(p, n, "a store"); }
void __asan_loadN_noabort(const char* p, size_t n) { emulated::check(p, n, "a load"); }
void __asan_storeN_noabort(const char* p, size_t n) { emulated::check(p, n, "a store"); }

void __ubsan_handle_out_of_bounds_abort(const void* data) { emulated::undefined(data, "an index beyond its array"); }
void __ubsan_handle_type_mismatch_v1_abort(const void* data, const void*) {
    emulated::undefined(data, "a misaligned address");
}
OVERFLOW(add)
OVERFLOW(sub)
OVERFLOW(mul)
OVERFLOW(negate)
OVERFLOW(divrem)
}
