"""``torch.ops.kernops.reduce``: a reduction as an operator, for what looks into a program instead of running it.

``torch.compile`` and ``torch.export`` put this operator into their graphs. Its plan travels as text, which any process
can read, and its numbers apart from its tensors. Outside of traced code ``reduce`` does not come here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import backends
from ..backends import Input
from ..formula.graph import CAT_SCALAR, Node
from ..formula.plan import Plan
from . import function
from .text import plan_text, read_plan
from .tracing import TracedNode, TracedPlan, seen

Tensor = torch.Tensor
Outs = tuple[Tensor, ...]

_library = torch.library.Library("kernops", "FRAGMENT")
_library.define(
    "reduce(Tensor?[] tensors, float[] numbers, str plan, SymInt m, SymInt n, str backend) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _arguments(variables: Sequence[Node | TracedNode], tensors: Sequence[Input]) -> tuple[list[Any], list[Any]]:
    """Tensors (None elsewhere) and numbers. Dynamo traces this."""
    numbers = [tensors[v.params[1]] for v in variables if v.params[0] == CAT_SCALAR]
    return [t if isinstance(t, Tensor) else None for t in tensors], numbers


def call_operator(plan: Plan, tensors: Sequence[Input], m: int, n: int, backend: str) -> Outs:
    arguments = _arguments(plan.variables, tensors)
    return tuple(torch.ops.kernops.reduce(*arguments, plan_text(plan), m, n, backend))


def call_traced(plan: Plan | TracedPlan, tensors: Sequence[Input], m: int, n: int, backend: str) -> Outs:
    """The call as Dynamo traces it."""
    traced = seen(plan)
    tensor_list, numbers = _arguments(traced.variables, tensors)
    return tuple(torch.ops.kernops.reduce(tensor_list, numbers, traced.text, m, n, backend))


def _plan_and_operands(tensors: list, numbers: list, text: str) -> tuple[Plan, list[Input]]:
    plan = read_plan(text)
    operands = list(tensors)
    scalars = [v.params[1] for v in plan.variables if v.params[0] == CAT_SCALAR]
    for k, number in zip(scalars, numbers):
        operands[k] = number  # type: ignore[index]
    return plan, operands


def _compute(tensors: list, numbers: list, text: str, m: int, n: int, backend: str) -> list[Tensor]:
    plan, operands = _plan_and_operands(tensors, numbers, text)
    return list(backends.reduce(plan, operands, m, n, backend))


def _record(tensors: list, numbers: list, text: str, m: int, n: int, backend: str) -> list[Tensor]:
    if function.records(tensors):
        return list(function.differentiable(*_plan_and_operands(tensors, numbers, text), m, n, backend))
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.kernops.reduce(tensors, numbers, text, m, n, backend)  # type: ignore[no-any-return]


def _fake(tensors: list, numbers: list, text: str, m: int, n: int, backend: str) -> list[Tensor]:
    """Results of the right shape."""
    plan, operands = _plan_and_operands(tensors, numbers, text)
    batch = backends.validate(plan, operands, m, n)
    like = next(t for t in tensors if t is not None)
    outs = []
    for name, dim in plan.outputs:
        shape = (*batch, m, *((plan.k,) if plan.k else ()), dim)
        outs.append(like.new_empty(shape, dtype=torch.int64 if name == "index" else like.dtype))
    return outs


def _transform(tensors: list, numbers: list, text: str, m: int, n: int, backend: str) -> list[Tensor]:
    """Under ``torch.func``, before it takes the call apart: for a library's operator it has no derivatives."""
    return list(function.differentiable(*_plan_and_operands(tensors, numbers, text), m, n, backend))


_library.impl("reduce", _compute, "CompositeExplicitAutograd")
_library.impl("reduce", _record, "Autograd")
torch.library.register_fake("kernops::reduce", _fake, lib=_library)
_library.impl("reduce", _transform, "FuncTorchDynamicLayerFrontMode")
