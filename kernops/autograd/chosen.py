"""Derivatives of minima: the formula once more, on the columns that were chosen.

A minimum's value comes from the back end, its derivatives from the chosen pairs alone: torch gathers the variables of
each pair (and knows how to differentiate that), each pair is a row, and a sum over one column evaluates the formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..backends import Input
from ..formula.graph import CAT_I, CAT_J, CAT_SCALAR
from ..formula.plan import make_plan
from .derivatives import Call, call_of, pair_plan

Tensor = torch.Tensor
Outs = tuple[Tensor, ...]
Reducer = Callable[[Call, Sequence[Input]], Outs]


def reduce_chosen(call: Call, tensors: Sequence[Input], plain: Reducer, reduce: Reducer) -> Outs:
    """The outputs of a minimum, its value differentiable; ``plain`` computes without derivatives, ``reduce`` with."""
    plan = call.plan
    bare = [t.detach() if isinstance(t, Tensor) else t for t in tensors]
    value, *rest = plain(call, bare)
    if call.n == 0:  # only Min has a value there; the sum over no column gives it gradients of zero
        (again,) = reduce(call.of(make_plan("Sum", plan.formula, n_vars=plan.n_vars)), tensors)
        return (_Attach.apply(value, again),)  # type: ignore[no-untyped-call]
    if rest:
        index = rest[0]
    else:  # Min propagates NaN and MinArgMin steps over it: the value of the one, the index of the other
        index = plain(call.of(make_plan("MinArgMin", plan.formula, n_vars=plan.n_vars)), bare)[1]
    found = (index >= 0) & (value == value)
    per_row = math.prod(index.shape[len(call.batch) + 1 :])
    pairs = _pairs(call, tensors, index, found, per_row)
    (again,) = reduce(call_of(pair_plan(plan), call.m * per_row, 1, call.backend, call.batch, call.width), pairs)
    again = again.reshape(*index.shape, plan.dim)  # row r of the pairs is one component of one minimum
    again = again.squeeze(-1) if plan.dim == 1 else again.diagonal(dim1=-2, dim2=-1)
    again = torch.where(found, again, 0.0)
    return (_Attach.apply(value, again), *rest)  # type: ignore[no-untyped-call]


def _pairs(call: Call, tensors: Sequence[Input], index: Tensor, found: Tensor, per_row: int) -> list[Input]:
    """The variables of each pair that was chosen, (*B, pairs, D); 0 where none was, so that no NaN comes in or out."""
    index, found = (t.reshape(*call.batch, call.m, per_row) for t in (index, found))
    pairs: list[Input] = list(tensors)
    for v in call.plan.variables:
        cat, k, dim = v.params
        t: Any = tensors[k]  # type: ignore[index]
        if cat == CAT_SCALAR:
            continue
        if cat == CAT_J:
            t = _columns(t, index, call.batch)
        elif cat == CAT_I:
            t = t.unsqueeze(-2)
        else:
            t = t[..., None, None, :]
        t = torch.where(found[..., None], t, 0.0)
        pairs[k] = t.reshape(*call.batch, call.m * per_row, dim)  # type: ignore[index]
    return pairs


def _columns(t: Tensor, index: Tensor, batch: tuple[int, ...]) -> Tensor:
    """Rows ``index`` (*B, M, R) of ``t`` (*b, N, D). (Indexing, whose gradient is deterministic also on a GPU.)"""
    index = index.clamp(min=0)
    n, dim = t.shape[-2:]
    if math.prod(t.shape[:-2]) > 1:
        t = t.expand(*batch, n, dim)
        first = torch.arange(math.prod(batch), device=t.device) * n
        index = index + first.reshape(*batch, 1, 1)
    return t.reshape(-1, dim)[index]


class _Attach(torch.autograd.Function):
    """The value of one tensor with the derivatives of another."""

    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, again: Tensor) -> Tensor:  # type: ignore[override]
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor]:  # type: ignore[override]
        return None, g

    @staticmethod
    def jvp(ctx: Any, value: Tensor | None, again: Tensor | None) -> Tensor | None:  # type: ignore[override]
        return again
