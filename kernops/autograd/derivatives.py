"""Derivatives of differentiable reductions as plans: which sums to compute, of what, and whose gradient each one is.

All of this is done once for a plan and a choice of inputs; the results are cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ..formula.graph import CAT_I, CAT_J, CAT_P, CAT_SCALAR, Node, const, rewrite, swap_axes, var, variables
from ..formula.ops import apply
from ..formula.plan import Plan, make_plan
from ..formula.reductions import CORES, gradient_formulas

#: Device -> up to how many components several gradients are computed in one pass, in which they could share the
#: exponential; where nothing is said, a pass for each. On a CPU one pass was measured to take twice as long (N = 4000,
#: D = 3), since the code for a concatenation evaluates all of its parts for each component.
FUSED_WIDTH: dict[str, int] = {}


@dataclass(frozen=True)
class Pass:
    """One reduction that computes several derivatives.

    Attributes:
        plan: the sum.
        inputs: which operands of the derivative are the plan's tensors.
        swapped: whether rows and columns are exchanged.
        parts: of each part of the result the number of its variable (or output), its dimension, and whether its rows
            are to be summed up.
    """

    plan: Plan
    inputs: tuple[int, ...]
    swapped: bool
    parts: tuple[tuple[int, int, bool], ...]


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


Part = tuple[Node, int, int]  # a formula, the number of its variable or output, and that one's category


def _pass(group: Sequence[Part]) -> Pass:
    """The pass that computes some parts."""
    root, _, cat = group[0]
    for f, _, _ in group[1:]:
        root = apply("Concat", root, f)
    swapped = cat == CAT_J
    if swapped:
        root = swap_axes(root)
    parts = tuple((k, f.dim, c == CAT_P) for f, k, c in group)
    used = variables(root)
    inputs = tuple(v.params[1] for v in used)
    root = rewrite(root, {v: var(v.params[0], k, v.dim) for k, v in enumerate(used)})  # type: ignore[arg-type]
    return Pass(make_plan("Sum", root, n_vars=len(inputs)), inputs, swapped, parts)  # type: ignore[arg-type]


def _passes(wanted: Sequence[Part], width: int) -> tuple[Pass, ...]:
    """Passes for all parts: those over the same axis together, as long as they have at most ``width`` components."""
    groups: list[list[Part]] = []
    for part in sorted(wanted, key=lambda p: p[2] == CAT_J):
        group = groups[-1] if groups else []
        same = group and (group[0][2] == CAT_J) == (part[2] == CAT_J)
        if same and sum(f.dim for f, _, _ in group) + part[0].dim <= width:
            group.append(part)
        else:
            groups.append([part])
    return tuple(map(_pass, groups))


def _row_vars(first: int, plan: Plan) -> tuple[Node, ...]:
    """Row variables for the outputs of ``plan`` or for their cotangents, numbered from ``first`` on."""
    names = CORES[plan.core].outputs
    return tuple(var(CAT_I, first + k, 1 if name == "lse" else plan.dim) for k, name in enumerate(names))


@lru_cache(maxsize=4096)
def gradient_passes(plan: Plan, wanted: tuple[int, ...], given: tuple[bool, ...], device: str) -> tuple[Pass, ...]:
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
    parts = [(f, v.params[1], v.params[0]) for v, f in zip(vs, found) if f is not None]
    return _passes(parts, FUSED_WIDTH.get(device, 0))  # type: ignore[arg-type]


@lru_cache(maxsize=4096)
def tangent_passes(plan: Plan, moving: tuple[int, ...], device: str) -> tuple[Pass, ...]:
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
    return _passes([(f, k, CAT_I) for k, f in enumerate(found) if f is not None], FUSED_WIDTH.get(device, 0))


@lru_cache(maxsize=4096)
def pair_plan(plan: Plan) -> Plan:
    """The formula of ``plan`` alone, all of whose variables are rows: row r is the pair number r."""
    rows = {v: var(CAT_I, v.params[1], v.dim) for v in plan.variables if v.params[0] != CAT_SCALAR}  # type: ignore[arg-type]
    return make_plan("Sum", rewrite(plan.formula, rows), n_vars=plan.n_vars)
