"""How a reduction runs on a CPU, as data, and the C++ source that instantiates the host templates with it.

A step evaluates the formula for R rows against U SIMD vectors of columns. More pieces at once hide the latency of
dependent instructions and reuse what is loaded, until registers run out. Everything is chosen by one pure function of
the plan and a few facts about the machine; nothing depends on sizes but the variants for very few rows or columns.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache

from ..formula.graph import CAT_COL, PAIR, Node, rewrite, topological, var
from ..formula.ops import OPS
from ..formula.plan import Plan
from .contraction import HostEmitter, SumsEmitter, contraction, squares, sums_text
from .emit import emit, pair_text
from .products import products_text

#: Core -> template for formulas with few components, in the header of that name.
_KERNELS = {
    "Sum": ("direct", "Direct<{types}, kn::Sum>"),
    "Min": ("direct", "Direct<{types}, kn::Min>"),
    "MinArgMin": ("direct", "Direct<{types}, kn::MinArgMin>"),
    "LogSumExp": ("staged", "LogSums<{types}>"),
    "SumSoftMaxWeight": ("staged", "Staged<{types}, true>"),
    "KMin": ("neighbors", "Neighbors<{types}>"),
}
_STAGED_SUM = ("staged", "Staged<{types}, false>")

#: Bytes of columns (of few and of many components) and of row terms that one thread works on for a while: a part of the
#: L1, L2, L2 cache.
TILE_BYTES, WIDE_TILE_BYTES, ROW_BYTES = 1 << 15, 1 << 19, 1 << 17
#: Bytes of columns, and as many of rows, that long sums are computed of for a while: both in the L2 cache.
SUMMED_BYTES = 1 << 18
#: A loop over more components than this is not unrolled; the accumulators of its R * U pieces must hide its latency.
LONG = 64
#: A formula of more operations than this is one piece: loads are no longer what takes time, and copies of the text
#: would compile for long (16 ops with their second derivatives: 10 s with four rows, 1.6 s with one).
MANY_NODES = 100
#: A formula of no more operations, one function among them, leaves registers for more vectors of columns: as many
#: pieces as it takes to hide the latency of all. The most sums of a step, and how many vectors then.
LIGHT, LIGHT_VECTORS = 24, ((4, 3), (16, 2))
#: Vectors that are summed plainly (SPAN in host/lanes.h).
SPAN = 64
#: Number of a column slot from which on it is a number shared by the components of a pair.
_SHARED = 1 << 24


@dataclass(frozen=True)
class Machine:
    """What matters of the machine: bytes of a SIMD vector, number of vector registers, and whether additions have units
    of their own beside those of multiply-add."""

    vector_bytes: int = 64
    registers: int = 32
    adders: bool = False


@dataclass(frozen=True)
class Schedule:
    """One instantiation.

    Attributes:
        header, kernel: header and template.
        rows, vectors: R rows against U vectors of columns at a time.
        epilogue: rows of these that what follows long sums is computed for at a time.
        chunk: components that are reduced at a time.
        blocks: most blocks of R rows that take turns at a tile of columns.
        tile: blocks of U vectors in a tile.
        work: rough number of operations of a pair.
    """

    header: str
    kernel: str
    rows: int
    vectors: int
    epilogue: int
    chunk: int
    blocks: int
    tile: int
    work: int


@lru_cache(maxsize=1024)
def schedule(plan: Plan, itemsize: int, machine: Machine = Machine(), few: str = "") -> Schedule:
    """The schedule of a plan; ``few="rows"`` is the variant that takes one row at a time, against more columns, and
    ``few="columns"`` that of no more columns at a time than it must."""
    program = plan.program
    dim, width = program.pair[-1].dim, max(1, program.n_col)
    header, kernel = _KERNELS[plan.core]
    room = machine.registers // 2  # vectors that hold states
    whole = program.pair[-1].op == "Concat" and dim <= room  # a part of it would choose a piece for each component
    if plan.core == "Sum" and dim > room // 4 and not whole and _shared(program.pair[-1]):
        header, kernel = _STAGED_SUM
    staged = header == "staged" and plan.core != "LogSumExp"
    chunk = _chunk(plan, dim, room, staged)
    rows, vectors, epilogue = _pieces(plan, chunk, room, staged, few)
    block_bytes = vectors * machine.vector_bytes * width
    row_bytes = rows * max(1, program.n_row) * itemsize
    tile = max(1, min(SPAN if plan.core == "KMin" else SPAN // vectors, TILE_BYTES // block_bytes))
    blocks = max(1, min(32 // rows, ROW_BYTES // row_bytes))
    if contraction(plan).sums:
        tile = max(1, min(64 // vectors, SUMMED_BYTES // block_bytes))
        blocks = max(1, min(96 // rows, SUMMED_BYTES // row_bytes))
        if squares(plan)[0]:  # rows are four times as small then, and columns are rounded for each group of them
            blocks = max(1, min(384 // rows, 5 * SUMMED_BYTES // row_bytes))
    if staged:
        tile = max(8, min(64 // vectors, WIDE_TILE_BYTES // block_bytes))
    return Schedule(header, kernel, rows, vectors, epilogue, chunk, blocks, tile, _work(plan))


def _chunk(plan: Plan, dim: int, room: int, staged: bool) -> int:
    """How many components are reduced at a time. A last chunk that overlaps another is waste, and so is each reload."""
    if plan.core in ("LogSumExp", "KMin"):
        return 1
    if dim <= (room // 4 if staged else room):
        return dim
    return room // 4


def _pieces(plan: Plan, chunk: int, room: int, staged: bool, few: str) -> tuple[int, int, int]:
    """R rows and U vectors of columns of a step, of which E rows at a time after long sums."""
    stored = sum(int(n) for n in re.findall(r"\bV \w+\[(\d+)\]", _pair_text(plan)))
    heavy = stored > 2 * LONG or len(_pair_nodes(plan)) > MANY_NODES
    states = chunk * (2 if plan.core == "MinArgMin" else 1)
    if contraction(plan).sums:
        rows, vectors = (4, room // 4) if staged else (6, 4) if room >= 16 else (4, 2)
        rows = 1 if few == "rows" or (staged and heavy) else next(r for r in (rows, 4, 2, 1) if r * states <= 2 * room)
        return rows, vectors, 1 if heavy else rows
    if heavy:  # vectors of the pair that are kept in memory for each piece, or many instructions for it
        return 1, 1, 1
    if few == "rows":
        return 1, max(1, min(4, room // chunk)), 1
    rows = next((r for r in (4, 2) if r * states <= room + room // 2), 1)
    wide = plan.core == "KMin" or any(
        n.args and n.args[0].dim > LONG and n.dim < n.args[0].dim for n in _pair_nodes(plan)
    )
    vectors = 2 if wide and rows * 2 * chunk <= room else 1
    if plan.core in ("Sum", "LogSumExp") and not staged and not wide and not few and room >= 16 and _is_light(plan):
        vectors = next((v for most, v in LIGHT_VECTORS if rows * states <= most), 1)
    return rows, vectors, rows


def _pair_nodes(plan: Plan) -> list[Node]:
    return topological(*contraction(plan).pair)


def _is_function(node: Node) -> bool:
    return "kn::" in (OPS[node.op].text or "")


def _is_light(plan: Plan) -> bool:
    nodes = [n for n in _pair_nodes(plan) if n.args]
    return len(nodes) <= LIGHT and sum(n.dim for n in nodes if _is_function(n)) <= 1


def _work(plan: Plan) -> int:
    return sum(n.dim * (8 if _is_function(n) else 1) for n in _pair_nodes(plan) if n.args) + plan.dim + 2


def candidates(plan: Plan, itemsize: int, machine: Machine = Machine(), few: str = "") -> tuple[Schedule, ...]:
    """Schedules that are worth a measurement, the one of :func:`schedule` first. They differ in what stays in which
    cache, and in how many rows and columns a step takes."""
    s = schedule(plan, itemsize, machine, few)
    others = [replace(s, tile=2 * s.tile), replace(s, tile=max(1, s.tile // 2)), replace(s, blocks=2 * s.blocks)]
    if s.rows > 1 and not contraction(plan).sums:
        rows = s.rows // 2
        others.append(replace(s, rows=rows, vectors=2 * s.vectors, epilogue=min(rows, s.epilogue)))
    return tuple(dict.fromkeys((s, *others)))


# --- source -----------------------------------------------------------------------------------------------------------
def source(plan: Plan, itemsize: int, machine: Machine, few: str = "", tuned: Schedule | None = None) -> str:
    """A translation unit that exports ``int kernops_run(const int64_t*)`` (its argument: see host/problem.h).

    ``tuned`` stands for the schedule of a measurement; else it is that of :func:`schedule`.
    """
    s = tuned or schedule(plan, itemsize, machine, few)
    real = {4: "float", 8: "double"}[itemsize]
    kinds = {v.params[1]: v.params[0] for v in plan.variables}
    columns = {v.params[1] for v in topological(*plan.program.col_terms) if v.is_var}
    table = [(str(kinds.get(k, -1)), str(int(k in columns))) for k in range(plan.n_vars)] + [("-1", "0")]
    return f"""#include "host/{s.header}.h"
{_fixed_unrolling(emit(plan, HostEmitter), s.chunk)}
namespace kn {{
struct Host : Formula {{
  static constexpr int KIND[] = {{{", ".join(kind for kind, _ in table)}}};
  static constexpr bool COLUMN[] = {{{", ".join(column for _, column in table)}}};
{products_text(plan, machine.adders)}{_fixed_unrolling(_summed(plan), s.chunk)}
{_fixed_unrolling(_stages(plan), s.chunk) if s.header == "staged" else ""}}};
struct Schedule {{
  static constexpr int R = {s.rows}, U = {s.vectors}, E = {s.epilogue}, C = {s.chunk};
  static constexpr int BLOCKS = {s.blocks}, TILE = {s.tile}, WORK = {s.work};
}};
}}  // namespace kn
extern "C" __attribute__((visibility("default"))) int kernops_run(const int64_t* words) {{
  return kn::run<kn::{s.kernel.format(types=f"{real}, kn::Host, kn::Schedule")}>(words);
}}
"""


def _fixed_unrolling(text: str, chunk: int) -> str:
    """GCC does not unroll by a template's parameter."""
    return text.replace("KN_UNROLL(C)", f"KN_UNROLL({chunk})")


def _pair_text(plan: Plan) -> str:
    return pair_text(contraction(plan).pair, SumsEmitter)


def _summed(plan: Plan) -> str:
    """What host/contract.h and host/bytes.h ask of a formula, and ``pair`` as it is after the long sums."""
    if not contraction(plan).sums:
        return sums_text(plan)
    return f"""{sums_text(plan)}
  template <int C, class V, class X, class Y> KN_FN static void pair(const X& x, const Y& y, int c0, V* out) {{
{_pair_text(plan)}
  }}
"""


class _StagedEmitter(SumsEmitter):
    """Reads the numbers that a pair's components share from ``z``."""

    def _compute(self, node: Node, index: int | str) -> str:
        if node.is_var and node.params[0] == CAT_COL and _SHARED <= node.params[1] < 2 * _SHARED:  # type: ignore[operator]
            return f"z[{node.params[1] - _SHARED}]"  # type: ignore[operator]
        return super()._compute(node, index)


def _shared(root: Node) -> list[Node]:
    """The largest scalar parts of ``root`` that depend on the pair."""
    found: dict[Node, None] = {}
    stack = [root]
    while stack:
        node = stack.pop()
        if node.dim > 1:
            stack.extend(node.args)
        elif node.args and node.kind == PAIR:
            found[node] = None
    return list(found)


def _stages(plan: Plan) -> str:
    """The members of a formula that host/staged.h asks for."""
    *exponent, root = plan.program.pair
    shared = _shared(root)
    slots: dict[Node, Node] = {n: var(CAT_COL, _SHARED + len(exponent) + k, 1) for k, n in enumerate(shared)}
    numbers = [rewrite(n, contraction(plan).slots) for n in (*exponent, *shared)]
    first = SumsEmitter(tuple(numbers))
    for k, node in enumerate(numbers):
        first.line(f"z[{k}] = {first.component(node, 0)};")
    rest = rewrite(root, slots)
    second = _StagedEmitter((rest,))
    second.write(rest, 0)
    return f"""  static constexpr int SHARED = {len(numbers)};
  template <class V, class X, class Y> KN_FN static void shared(const X& x, const Y& y, V* z) {{
{first.text()}
  }}
  template <int C, class V, class X, class Y, class Z>
  KN_FN static void components(const X& x, const Y& y, const Z& z, int c0, V* out) {{
{second.text()}
  }}
"""
