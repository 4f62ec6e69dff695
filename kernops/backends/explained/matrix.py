"""What the CUDA back end's template for matrix units tells."""

from __future__ import annotations

from dataclasses import asdict

from ...codegen import matrix_source
from ...codegen.floors import EXP, FMA, MATRIX, plain, special
from ...codegen.matrix import Form, matrix_form
from ...codegen.matrix_schedule import POINTS, SOFT_STEPS, MatrixSchedule, matrix_schedule
from . import Lines, Problem, Told, count
from .cuda import place, registers_of

#: Products of half precision for one of split numbers: high by high, high by low, low by high.
SPLIT = 3
#: Share of the exponentials that plain cores leave to the exponential unit where they help it (``SOFT``), and what
#: instructions one takes them.
HARD_SHARE, SOFT_INSTRUCTIONS = 0.75, 9


def matrix(p: Problem) -> Told | None:
    """Sums whose pairs meet in one squared distance or dot product; None where plain cores compute the pairs."""
    device, rates = place(p.device)
    s = matrix_schedule(p.plan, p.m, p.n, p.batch, p.itemsize, device)
    form = matrix_form(p.plan)
    if s is None or form is None:
        return None
    return Told(
        template="matrix: products of split numbers on matrix units, the rest on their results (cuda/matrix*.cuh)",
        schedule=_lines(s, form),
        reasons=tuple(_reasons(s, form)),
        rates=rates,
        work=_work(p, s, form),
        compiled=lambda: registers_of(matrix_source.source(p.plan, form, s, int(p.batch > 1)), device.arch),
        values=asdict(s),
    )


def _work(p: Problem, s: MatrixSchedule, form: Form) -> dict[str, float]:
    """What a pair needs: products of its sum and, for a wide result, of its value with the right-hand sides."""
    products = 16 * s.steps * s.chunks * (1 if s.tight else SPLIT) + (SPLIT * s.width * s.pieces if form.wide else 0)
    exps, others = float(special(p.plan)), float(plain(p.plan, form.program.pair))
    if s.soft:
        others += (1 - HARD_SHARE) * exps * SOFT_INSTRUCTIONS
        exps *= HARD_SHARE
    return {MATRIX: products, EXP: exps, FMA: others}


def _lines(s: MatrixSchedule, form: Form) -> Lines:
    width = f"{s.width}, in {count(s.pieces, 'piece')}" if form.wide else str(s.width)
    lines = [
        ("kernels", ", ".join(f"kn_{name}" for name in matrix_source.kernels(s, form))),
        ("multiplied by", "warpgroups (wgmma)" if s.groups else "warps (mma.sync)"),
        ("components of the sum", f"{form.length}, as {count(s.chunks, 'chunk')} of {16 * s.steps}"),
        ("rows, columns of a block", f"{POINTS}, {POINTS} at a time; rows {'stay' if s.resident else 'come again'}"),
        ("shared memory", f"{s.shared:,} bytes, {count(s.stages, 'stage')}"),
        ("components of a result", width),
        ("splits of the columns", f"{s.splits}, of {s.span:,} columns"),
        ("blocks", f"{s.blocks:,}, {s.per_multiprocessor} of a multiprocessor"),
        ("scratch", f"{s.survey + s.rows + s.cols + s.partial:,} bytes"),
    ]
    return tuple(lines)


def _reasons(s: MatrixSchedule, form: Form) -> list[str]:
    what = "squared differences" if form.square else "products"
    parts = "in one part together with the norms, so that one product gives the exponent"
    if not s.tight:
        parts = f"in two parts of half precision, of which {SPLIT} products make one that loses little"
    said = [
        f"pairs meet in one sum of {form.length} {what}, and are many enough to repay packing; numbers are {parts}",
        "a survey of the data decides on the device whether split numbers are exact enough; what is not, the plain "
        "kernels compute, which otherwise return at once",
    ]
    if form.wide:
        said.append("the values of the pairs are multiplied with the right-hand sides on the matrix unit, too")
    if s.soft:
        said.append(
            f"at most {SOFT_STEPS} steps of products: the exponential unit takes longest, and plain cores help it"
        )
    if s.splits > 1:
        said.append(f"{s.splits} splits of the columns keep the device busy to the end")
    return said
