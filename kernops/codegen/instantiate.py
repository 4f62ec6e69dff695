"""The CUDA source of a scheduled plan: the formula's struct, and a few lines that instantiate the templates with it."""

from __future__ import annotations

from ..formula.graph import CAT_SCALAR
from ..formula.plan import Plan
from .balance import bits
from .emit import emit
from .schedule import Schedule

#: In the order of inclusion; the formula comes after the vocabulary.
HEADERS = (
    "math.cuh", "numbers.cuh", "pack.cuh", "reductions.cuh", "data.cuh", "tile.cuh", "merge.cuh", "expsum.cuh",
    "kmin.cuh", "ranked.cuh", "boxes.cuh", "search.cuh",
)  # fmt: skip
#: Threads of a block of the kernels that have one work item a thread.
ITEM_THREADS = 128

#: Core -> what becomes of its states.
RESULTS = {
    "Sum": "Results", "Min": "Results", "MinArgMin": "IndexResults", "LogSumExp": "ExpResults",
    "SumSoftMaxWeight": "SoftmaxResults", "KMin": "ListResults",
}  # fmt: skip
_LISTS = {"registers": "KList<G, T, I, K>", "heap": "KHeap<T, I, K>", "warp": "WarpList<T, I, K>"}


def kernels(s: Schedule) -> tuple[str, ...]:
    """Names of the kernels of a schedule, in the order of their launch; that of :func:`main_kernel` is always there."""
    merge = "merge_lists" if s.list else "merge"
    main = main_kernel(s)
    wanted = (s.rows_in_memory, "pack_rows"), (s.cols_in_memory, "pack_cols"), (True, main), (s.splits > 1, merge)
    return tuple(name for wants, name in wanted if wants)


def main_kernel(s: Schedule) -> str:
    """Name of the kernel that looks at all pairs."""
    return "reduce_lists" if s.list == "warp" else "reduce"


def compiled(s: Schedule) -> tuple[str, ...]:
    """Names of the kernels that ``source`` holds: the merge even without splits, so that it serves more calls."""
    return tuple(dict.fromkeys((*kernels(s), "merge_lists" if s.list else "merge")))


def source(plan: Plan, s: Schedule, itemsize: int, batch_dims: int, stored: str = "T") -> str:
    """A translation unit with a kernel ``kn_<name>`` for each of ``compiled(s)``.

    ``stored`` is the C++ type of numbers in memory, if not that of the arithmetic one of ``STORED``.
    Sizes are not part of it, so that it serves all calls of the same shape of schedule.
    """
    return "\n".join([
        preamble(plan, s, itemsize, batch_dims, stored),
        *(f'extern "C" __global__ void __launch_bounds__({bounds(s, name)}) '
          f"kn_{name}(const __grid_constant__ kn::G::Arguments a) {{ kn::{name}<kn::G>(a); }}" for name in compiled(s)),
        "",
    ])  # fmt: skip


def bounds(s: Schedule, name: str) -> str:
    """Launch bounds of a kernel."""
    if name != main_kernel(s):
        return str(ITEM_THREADS)
    # with lists, the compiler spills so that more blocks might fit, unless it is told that one is enough
    return f"{s.threads}, {s.blocks_each}" if s.blocks_each else str(s.threads)


def preamble(plan: Plan, s: Schedule, itemsize: int, batch_dims: int, stored: str = "T") -> str:
    """The beginning of a translation unit: the headers, the formula, and the configuration ``kn::G``."""
    return "\n".join([
        f"#define KN_UNROLL_CAP {s.unroll}",
        *(f'#include "{h}"' for h in HEADERS),
        emit(plan),
        "namespace kn {",
        "struct G {",
        f"    typedef Formula F; typedef {TYPES[itemsize]} T; typedef {'long long' if s.long_index else 'int'} I;",
        f"    typedef {stored} E;",
        f"    static constexpr int THREADS = {s.threads}, R = {s.rows}, Q = {s.cols},",
        f"                         PLAIN = {bits(s.plain, s.rows * s.cols)},  // a set of pairs",
        f"                         TILE = {s.tile}, TILES = {s.tiles}, C = {s.chunk}, CHUNKS = {s.chunks},",
        f"                         BATCH = {max(1, batch_dims)}, LANES = {s.lanes};",
        f"    static constexpr bool ROWS_IN_MEMORY = {_bool(s.rows_in_memory)};",
        f"    static constexpr bool COLS_IN_MEMORY = {_bool(s.cols_in_memory)}, MATRIX = false;",
        "    static constexpr int K = F::K;",
        f"    typedef {_LISTS.get(s.list, f'{plan.core}<T, I, C>')} State;",
        f"    typedef kn::{RESULTS[plan.core]}<State> Results;",
        "    typedef kn::Arguments<F::NVARS, BATCH> Arguments;",
        f"    KN_FN static bool scalar(int k) {{ return {scalar_text(plan)}; }}",
        "};",
        "}  // namespace kn",
    ])  # fmt: skip


def scalar_text(plan: Plan) -> str:
    """The C++ condition that variable k is a number."""
    return " || ".join(f"k == {v.params[1]}" for v in plan.variables if v.params[0] == CAT_SCALAR) or "false"


TYPES = {4: "float", 8: "double"}
#: Name of a dtype -> the C++ type of its numbers in memory, where they are not computed with.
STORED = {"float16": "Half", "bfloat16": "Bfloat"}


def _bool(value: bool) -> str:
    return "true" if value else "false"
