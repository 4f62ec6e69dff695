"""Derivatives of differentiable reductions as plans: which sums to compute, of what, and whose gradient each one is.

All of this is done once for a plan and a choice of inputs; the results are cached.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from ..formula.graph import CAT_I, CAT_J, CAT_P, CAT_SCALAR, Node, const, rewrite, swap_axes, var, variables
from ..formula.ops import concat
from ..formula.plan import Plan, make_plan
from ..formula.reductions import CORES, gradient_formulas

#: Derivatives over the same axis share what is computed for a pair (a distance, its exponential), as long as they have
#: at most so many components together: more would not stay in registers. On a GPU more are computed one by one, each a
#: product of matrices for its matrix units.
FUSED_WIDTH = {"cuda": 4, "other": 8}


def fused_width(device: torch.device) -> int:
    return FUSED_WIDTH.get(device.type, FUSED_WIDTH["other"])


@dataclass(frozen=True, eq=False)
class Part:
    """Some components of a result.

    Attributes:
        number: number of the variable, or of the output, that they are the derivative by, or of.
        start, dim: the components.
        over_rows: whether their rows are to be summed up.
    """

    number: int
    start: int
    dim: int
    over_rows: bool


@dataclass(frozen=True, eq=False)
class Pass:
    """The reduction that computes one derivative, or several together.

    Attributes:
        plan: the sum.
        apart: the same with a result for each of two parts.
        inputs: which operands of the derivative are the plan's tensors.
        swapped: whether rows and columns are exchanged.
        parts: what the components of the result are.
        sizes: their dimensions.
    """

    plan: Plan
    apart: Plan
    inputs: tuple[int, ...]
    swapped: bool
    parts: tuple[Part, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Slopes:
    """A scalar sum together with its derivatives by variables of the row: one pass over the pairs.

    Attributes:
        plan: the sum, and the derivatives as a second result.
        parts: the derivatives, as components of that. Times the cotangent of their row, they are gradients.
        numbers: the variables.
    """

    plan: Plan
    parts: tuple[Part, ...]
    numbers: frozenset[int]


class Step:
    """A pass of a call, ready to run.

    Attributes:
        inputs: which operands of the derivative it is given.
        whole, apart: the call of ``Pass.plan`` and that of ``Pass.apart``.
        parts, sizes: as in ``Pass``.
    """

    __slots__ = ("inputs", "whole", "apart", "parts", "sizes")

    def __init__(self, call: Call, one: Pass) -> None:
        m, n = (call.n, call.m) if one.swapped else (call.m, call.n)
        self.inputs, self.parts, self.sizes = one.inputs, one.parts, one.sizes
        self.whole, self.apart = (
            call_of(plan, m, n, call.backend, call.batch, call.width) for plan in (one.plan, one.apart)
        )


class Call:
    """What a reduction is told beside its tensors. One object, so that functorch takes it for a leaf.

    Build it with :func:`call_of`, so that what follows from it is found once.

    Attributes:
        width: the ``fused_width`` of its device.
        rule: the core.
        direct: whether autograd may take it as it is: one result, derivatives, and no numbers among its tensors.
        values, gradients: what was found by the methods of these names.
    """

    __slots__ = (
        *("plan", "m", "n", "backend", "batch", "width", "rule", "direct", "values", "gradients", "__weakref__"),
    )

    def __init__(self, plan: Plan, m: int, n: int, backend: str, batch: tuple[int, ...], width: int) -> None:
        self.plan, self.m, self.n, self.backend, self.batch, self.width = plan, m, n, backend, batch, width
        self.rule = CORES[plan.core]
        self.direct = not plan.first and self.rule.cotangents is not None and len(plan.tensors) == plan.n_vars
        self.values: dict[tuple[bool, ...], tuple[Slopes | None, Call]] = {}
        self.gradients: dict[Asked, tuple[Step, ...]] = {}

    def of(self, plan: Plan) -> Call:
        """The same for another plan."""
        return call_of(plan, self.m, self.n, self.backend, self.batch, self.width)

    def steps(self, passes: Sequence[Pass]) -> tuple[Step, ...]:
        """The calls that passes ask for."""
        return tuple([Step(self, one) for one in passes])

    def find_values(self, needed: tuple[bool, ...]) -> tuple[Slopes | None, Call]:
        """The slopes that are found on the way, and the call for both, where gradients by the ``needed`` ones of a
        ``Function``'s inputs may be asked for: this call and the tensors."""
        both = slopes(self.plan, needed[1:], self.width)
        found = self.values[needed] = both, self if both is None else self.of(both.plan)
        return found

    def find_gradients(self, asked: Asked) -> tuple[Step, ...]:
        """What to compute for the gradients by the needed inputs but for those that are known already."""
        needed, given, known = asked
        numbers: Collection[int] = () if known is None else known.numbers
        wanted = tuple([k for k, need in enumerate(needed[1:]) if need and k not in numbers])
        passes = gradient_passes(self.plan, wanted, given, self.width) if wanted else ()
        found = self.gradients[asked] = self.steps(passes)
        return found


#: Which of a ``Function``'s inputs need gradients, which cotangents there are, and the slopes that are known.
Asked = tuple[tuple[bool, ...], tuple[bool, ...], Slopes | None]
_call = lru_cache(maxsize=4096)(Call)


def call_of(plan: Plan, m: int, n: int, backend: str, batch: tuple[int, ...], width: int) -> Call:
    """The call, the same object for the same request."""
    try:
        return _call(plan, m, n, backend, batch, width)
    except TypeError:  # the sizes of a traced program are symbols, which cannot be looked up
        return Call(plan, m, n, backend, batch, width)


Derivative = tuple[Node, int, int]  # a formula, the number of its variable or output, and that one's category


def _parts(found: Sequence[Derivative]) -> tuple[Part, ...]:
    parts, start = [], 0
    for f, number, cat in found:
        parts.append(Part(number, start, f.dim, cat == CAT_P))
        start += f.dim
    return tuple(parts)


def _pass(found: Sequence[Derivative]) -> Pass:
    """The pass for derivatives over the same axis."""
    root = concat(*(f for f, _, _ in found))
    swapped = found[0][2] == CAT_J
    if swapped:
        root = swap_axes(root)
    used = variables(root)
    inputs = tuple(v.params[1] for v in used)
    root = rewrite(root, {v: var(v.params[0], k, v.dim) for k, v in enumerate(used)})  # type: ignore[arg-type]
    parts = _parts(found)
    first = parts[0].dim if len(parts) == 2 else 0
    whole, apart = (make_plan("Sum", root, n_vars=len(inputs), first=f) for f in (0, first))
    return Pass(whole, apart, inputs, swapped, parts, tuple(p.dim for p in parts))  # type: ignore[arg-type]


def _passes(found: Sequence[Derivative], width: int) -> tuple[Pass, ...]:
    """Few passes for some derivatives, those with more than ``width`` components in passes of their own."""
    groups: list[list[Derivative]] = []
    for one in sorted(found, key=lambda d: d[2] == CAT_J):
        group = groups[-1] if groups else []
        same = group and (group[0][2] == CAT_J) == (one[2] == CAT_J)
        if same and sum(f.dim for f, _, _ in group) + one[0].dim <= width:
            group.append(one)
        else:
            groups.append([one])
    return tuple(map(_pass, groups))


def _row_vars(first: int, plan: Plan) -> tuple[Node, ...]:
    """Row variables for the outputs of ``plan`` or for their cotangents, numbered from ``first`` on."""
    names = CORES[plan.core].outputs
    return tuple(var(CAT_I, first + k, 1 if name == "lse" else plan.dim) for k, name in enumerate(names))


@lru_cache(maxsize=4096)
def gradient_passes(plan: Plan, wanted: tuple[int, ...], given: tuple[bool, ...], width: int) -> tuple[Pass, ...]:
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
    return _passes([(f, v.params[1], v.params[0]) for v, f in zip(vs, found) if f is not None], width)  # type: ignore[misc]


@lru_cache(maxsize=4096)
def slopes(plan: Plan, moving: tuple[bool, ...], width: int) -> Slopes | None:
    """The sum with its derivatives by those of the ``moving`` variables that the row has; ``None`` if that is no gain.

    For a scalar sum of row i the gradient by x_i is the cotangent g_i times Σ_j dF/dx_i, which needs no g. That takes
    a pass less than computing it in the backward pass, for at most ``width - 1`` numbers a row in memory.
    """
    if plan.core != "Sum" or plan.dim != 1:
        return None
    vs = [v for v in plan.variables if moving[v.params[1]] and v.params[0] in (CAT_I, CAT_P)]  # type: ignore[index]
    formulas = gradient_formulas(plan.core, plan.formula, None, (), (const(1.0),), vs)
    found = [(f, v.params[1], v.params[0]) for v, f in zip(vs, formulas) if f is not None]
    if not found or 1 + sum(f.dim for f, _, _ in found) > width:
        return None
    whole = concat(plan.formula, *(f for f, _, _ in found))
    numbers = frozenset(number for _, number, _ in found)
    return Slopes(make_plan("Sum", whole, n_vars=plan.n_vars, first=1), _parts(found), numbers)  # type: ignore[arg-type]


@lru_cache(maxsize=4096)
def tangent_passes(plan: Plan, moving: tuple[int, ...], width: int) -> tuple[Pass, ...]:
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
    return _passes([(f, k, CAT_I) for k, f in enumerate(found) if f is not None], width)


@lru_cache(maxsize=4096)
def pair_plan(plan: Plan) -> Plan:
    """The formula of ``plan`` alone, all of whose variables are rows: row r is the pair number r."""
    rows = {v: var(CAT_I, v.params[1], v.dim) for v in plan.variables if v.params[0] != CAT_SCALAR}  # type: ignore[arg-type]
    return make_plan("Sum", rewrite(plan.formula, rows), n_vars=plan.n_vars)
