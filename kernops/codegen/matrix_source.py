"""The CUDA source of a reduction on matrix units: the formula's struct, and the templates instantiated with it."""

from __future__ import annotations

from fractions import Fraction

from ..formula.plan import Plan
from .instantiate import HEADERS, ITEM_THREADS, RESULTS, _bool, scalar_text
from .matrix import Form, emit_matrix
from .matrix_schedule import POINTS, MatrixSchedule

MATRIX_HEADERS = ("mma.cuh", "halves.cuh", "survey.cuh", "matrix.cuh", "matrix_warps.cuh", "matrix_groups.cuh",
                  "matrix_rhs.cuh", "matrix_wide.cuh")  # fmt: skip
#: Threads of a block of the kernels that have more than one thread an item.
BLOCKS = {"centre": 256, "pack_rhs": POINTS}


def kernels(s: MatrixSchedule, form: Form) -> tuple[str, ...]:
    """Names of the kernels, in the order of their launch."""
    main = "matrix" + ("_wide" if form.wide else "") + ("_groups" if s.groups else "")
    last = () if not s.partial else ("finish_wide",) if form.wide else ("merge",)
    return ("centre", "survey", "pack", *(("pack_rhs",) if form.wide else ()), main, *last)


def compiled(s: MatrixSchedule, form: Form) -> tuple[str, ...]:
    """Names of the kernels that ``source`` holds: the last even where it is not needed, so that it serves more."""
    return tuple(dict.fromkeys((*kernels(s, form), "finish_wide" if form.wide else "merge")))


def threads(name: str, s: MatrixSchedule) -> int:
    """Threads of a block of a kernel."""
    return 256 // s.sixteens if name.startswith("matrix") else BLOCKS.get(name, ITEM_THREADS)


def surveyors(s: MatrixSchedule, form: Form) -> Fraction:
    """Threads of the survey for a point: ``Panels::LANES`` for ``Panels::ROUNDS`` of them."""
    return Fraction(1) if s.tight else Fraction(8 if form.length < 32 else 32, 8)


def packers(s: MatrixSchedule) -> int:
    """Threads that pack a point: ``Panels::PACKERS``."""
    return 1 if s.tight else 4


def sampled(s: MatrixSchedule, form: Form) -> int:
    """Pairs that the survey looks at: ``Panels::PAIRS``, if near pairs matter."""
    return 4096 if form.square and (not s.tight or form.rhs is not None and form.rhs.moment) else 0


def source(plan: Plan, form: Form, s: MatrixSchedule, batch_dims: int, stored: str = "T") -> str:
    """A translation unit with a kernel ``kn_<name>`` for each of ``compiled(s, form)``; sizes are not part of it.

    ``stored`` as for :func:`kernops.codegen.instantiate.source`.
    """

    def least(name: str) -> int:  # blocks that registers must leave room for
        return s.per_multiprocessor if name.startswith("matrix") else 1

    state = "Sum<float, I, C>" if form.wide else f"{plan.core}<float, I, C>"
    return "\n".join([
        *(["#define KN_WGMMA"] if s.groups else []),
        *(f'#include "{h}"' for h in (*HEADERS, *MATRIX_HEADERS)),
        emit_matrix(plan, form),
        "namespace kn {",
        "struct G {",
        f"    typedef Formula F; typedef float T; typedef {'long long' if s.long_index else 'int'} I;",
        f"    typedef {stored} E;",
        f"    static constexpr int THREADS = {256 // s.sixteens}, R = 2, Q = 4, TILE = {POINTS},",
        f"                         C = {s.width}, CHUNKS = {s.pieces},",
        f"                         BATCH = {max(1, batch_dims)}, LANES = {s.lanes}, ITEM_THREADS = {ITEM_THREADS};",
        f"    static constexpr int STEPS = {s.steps}, SUB = {s.sub}, H = {s.sixteens}, STAGES = {s.stages},",
        f"                         SOFT = {s.soft};",
        f"    static constexpr bool TURNS = {_bool(s.turns)};",
        "    static constexpr bool ROWS_IN_MEMORY = false, COLS_IN_MEMORY = false, MATRIX = true;",
        f"    static constexpr bool TIGHT = {_bool(s.tight)}, RESIDENT = {_bool(s.resident)},",
        f"                          WIDE = {_bool(form.wide)};",
        f"    typedef {state} State;",
        f"    typedef kn::{RESULTS['Sum' if form.wide else plan.core]}<State> Results;",
        "    typedef kn::Arguments<F::NVARS, BATCH> Arguments;",
        f"    KN_FN static bool scalar(int k) {{ return {scalar_text(plan)}; }}",
        "};",
        "}  // namespace kn",
        *(f'extern "C" __global__ void __launch_bounds__({threads(name, s)}, {least(name)}) '
          f"kn_{name}(const __grid_constant__ kn::G::Arguments a) {{ kn::{name}<kn::G>(a); }}"
          for name in compiled(s, form)),
        "",
    ])  # fmt: skip
