"""Derivatives of differentiable reductions as plans: which sums to compute, of what, and whose gradient each one is.

All of this is done once for a plan and a choice of inputs; the results are cached.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..formula.graph import CAT_I, CAT_J, CAT_P, CAT_SCALAR, Node, const, rewrite, swap_axes, var, variables
from ..formula.plan import Plan, make_plan
from ..formula.reductions import CORES, gradient_formulas


@dataclass(frozen=True)
class Pass:
    """The reduction that computes one derivative.

    Each has a pass of its own: one for several, of their concatenation, was measured to take twice as long on a CPU
    (N = 4000, D = 3), since the code for a concatenation evaluates all of its parts for each component.

    Attributes:
        plan: the sum.
        inputs: which operands of the derivative are the plan's tensors.
        swapped: whether rows and columns are exchanged.
        number: number of the variable, or of the output, that the derivative belongs to.
        over_rows: whether the rows of the result are to be summed up.
    """

    plan: Plan
    inputs: tuple[int, ...]
    swapped: bool
    number: int
    over_rows: bool


class Call:
    """What a reduction is told beside its tensors. One object, so that functorch takes it for a leaf."""

    __slots__ = ("plan", "m", "n", "backend", "batch")

    def __init__(self, plan: Plan, m: int, n: int, backend: str, batch: tuple[int, ...]) -> None:
        self.plan, self.m, self.n, self.backend, self.batch = plan, m, n, backend, batch

    def of(self, plan: Plan) -> Call:
        """The same for another plan."""
        return Call(plan, self.m, self.n, self.backend, self.batch)

    def derivative(self, step: Pass) -> Call:
        m, n = (self.n, self.m) if step.swapped else (self.m, self.n)
        return Call(step.plan, m, n, self.backend, self.batch)


def _pass(root: Node, number: int, cat: int) -> Pass:
    """The pass for a formula whose sum is the derivative by a variable of category ``cat``."""
    swapped = cat == CAT_J
    if swapped:
        root = swap_axes(root)
    used = variables(root)
    inputs = tuple(v.params[1] for v in used)
    root = rewrite(root, {v: var(v.params[0], k, v.dim) for k, v in enumerate(used)})  # type: ignore[arg-type]
    return Pass(make_plan("Sum", root, n_vars=len(inputs)), inputs, swapped, number, cat == CAT_P)  # type: ignore[arg-type]


def _row_vars(first: int, plan: Plan) -> tuple[Node, ...]:
    """Row variables for the outputs of ``plan`` or for their cotangents, numbered from ``first`` on."""
    names = CORES[plan.core].outputs
    return tuple(var(CAT_I, first + k, 1 if name == "lse" else plan.dim) for k, name in enumerate(names))


@lru_cache(maxsize=4096)
def gradient_passes(plan: Plan, wanted: tuple[int, ...], given: tuple[bool, ...]) -> tuple[Pass, ...]:
    """What to compute for the gradient by the variables with numbers ``wanted``.

    The operands are the plan's tensors, the outputs' cotangents (of which those ``given`` exist), the outputs.
    """
    count = len(given)
    gs, outs = _row_vars(plan.n_vars, plan), _row_vars(plan.n_vars + count, plan)
    core, formula, weight = plan.core, plan.formula, plan.weight
    if core == "SumSoftMaxWeight" and not given[0]:  # the gradient of the logarithm alone
        core, weight, gs, outs = "LogSumExp", None, gs[1:], outs[1:]
    else:
        gs = tuple(g if there else const(0.0) for g, there in zip(gs, given))
    vs = [v for v in plan.variables if v.params[1] in wanted]
    found = gradient_formulas(core, formula, weight, outs, gs, vs)
    return tuple(_pass(f, v.params[1], v.params[0]) for v, f in zip(vs, found) if f is not None)  # type: ignore[arg-type]


@lru_cache(maxsize=4096)
def tangent_passes(plan: Plan, moving: tuple[int, ...]) -> tuple[Pass, ...]:
    """What to compute for the outputs' tangents where the variables with numbers ``moving`` have tangents.

    The operands are the plan's tensors, their tangents, the outputs.
    """
    rule = CORES[plan.core].tangents
    assert rule is not None
    tangents = {
        v: var(v.params[0], plan.n_vars + v.params[1], v.dim)  # type: ignore[operator,arg-type]
        for v in plan.variables
        if v.params[1] in moving and v.params[0] != CAT_SCALAR
    }
    found = rule(plan.formula, plan.weight, _row_vars(2 * plan.n_vars, plan), tangents)
    return tuple(_pass(f, k, CAT_I) for k, f in enumerate(found) if f is not None)


@lru_cache(maxsize=4096)
def pair_plan(plan: Plan) -> Plan:
    """The formula of ``plan`` alone, all of whose variables are rows: row r is the pair number r."""
    rows = {v: var(CAT_I, v.params[1], v.dim) for v in plan.variables if v.params[0] != CAT_SCALAR}  # type: ignore[arg-type]
    return make_plan("Sum", rewrite(plan.formula, rows), n_vars=plan.n_vars)
