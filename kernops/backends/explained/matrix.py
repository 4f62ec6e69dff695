"""What the templates for the matrix units of a GPU tell."""

from __future__ import annotations

from dataclasses import asdict

from ...codegen import matrix_source
from ...codegen.floors import EXP, FMA, MATRIX, plain, special
from ...codegen.matrix import Form, matrix_form
from ...codegen.matrix_schedule import MatrixSchedule, matrix_schedule
from . import Lines, Problem, Told, count
from .cuda import place, registers_of


def matrix(p: Problem) -> Told | None:
    """The templates of sums on matrix units; None where plain cores do the work."""
    device, rates = place(p.device)
    s = matrix_schedule(p.plan, p.m, p.n, p.batch, p.itemsize, device)
    form = matrix_form(p.plan)
    if s is None or form is None:
        return None
    return Told(
        template=f"matrix: sums by the matrix unit, the rest on its results (cuda/{_file(form, s)})",
        schedule=_lines(form, s),
        reasons=tuple(_reasons(form, s)),
        rates=rates,
        work=_work(p, form, s),
        compiled=lambda: registers_of(matrix_source.source(p.plan, form, s, int(p.batch > 1)), device.arch),
        values=asdict(s),
    )


def _file(form: Form, s: MatrixSchedule) -> str:
    return "matrix_wide.cuh" if form.wide else "matrix_groups.cuh" if s.groups else "matrix_warps.cuh"


def _work(p: Problem, form: Form, s: MatrixSchedule) -> dict[str, float]:
    """What a pair needs of the units; the sum over components is no work of the plain cores."""
    summed = 3 if form.square else 2  # instructions of a component that ``plain`` counts
    rest = max(1, plain(p.plan) - summed * form.length - (p.plan.dim - 1 if form.wide else 0))
    products = 16 * s.steps * s.chunks * (1 if s.tight else 3)
    second = 3 * s.width if form.wide else 0
    exps = special(p.plan) * (1 - s.soft / 32)
    return {EXP: exps * s.pieces, FMA: rest * s.pieces, MATRIX: (products + second) * s.pieces}


def _lines(form: Form, s: MatrixSchedule) -> Lines:
    kernels = matrix_source.kernels(s, form)
    main = next(name for name in kernels if name.startswith("matrix"))
    lines = [
        ("kernels", ", ".join(f"kn_{name}" for name in kernels)),
        ("threads of a block", f"{matrix_source.threads(main, s)}, {s.per_multiprocessor} blocks a multiprocessor"),
        ("tile", "128 rows, 128 columns"),
        ("a number", "three products of halves" if s.tight else "two halves, three products"),
        ("steps of 16 components", f"{s.steps}, in {count(s.chunks, 'chunk')}"),
        ("rows of a block", "stay in shared memory" if s.resident else "come with each chunk"),
        ("shared memory", f"{s.shared:,} bytes, {count(s.stages, 'stage')}"),
        ("components of the result", f"{s.width}, in {count(s.pieces, 'pass')}"),
        ("splits of the columns", f"{s.splits}, of {s.span:,} columns"),
        ("blocks", f"{s.blocks:,}"),
        ("scratch", f"{s.survey + s.rows + s.cols + s.partial:,} bytes: packed points, survey, partial results"),
    ]
    return tuple(lines)


def _reasons(form: Form, s: MatrixSchedule) -> list[str]:
    what = "a squared distance" if form.square else "a scalar product"
    said = [f"matrix units: the pairs meet in {what} of {form.length} components, and there are many pairs"]
    said.append("warpgroups multiply from shared memory (sm_90a)" if s.groups else "warps multiply from registers")
    if s.groups and not s.turns:
        said.append("two blocks a multiprocessor: one multiplies while the other is at the rest of the formula")
    if s.turns:
        said.append("one block a multiprocessor, as shared memory or registers do not suffice for two; its warpgroups "
                    "multiply in turns")  # fmt: skip
    if s.soft:
        said.append("every fourth exponential is a polynomial: the exponential unit is what the kernel waits for")
    if form.wide:
        said.append("the right-hand sides are a second product, of the kernel's values in two halves each")
    if form.exponent is not None:
        said.append("the sum is an exponent: its error is bounded by the norms, which a survey of the data looks at")
    elif form.square:
        said.append("pairs that are near each other are computed anew from differences")
    said.append("data that is not finite or too clustered, as the survey tells, is left to the plain template")
    return said
