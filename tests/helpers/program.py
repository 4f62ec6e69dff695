"""A hoisted program interpreted with torch: what a compiled back end must do with it, without a compiler."""

from __future__ import annotations

import torch

from kernops.backends import reduce, validate
from kernops.backends.layout import pair_view
from kernops.backends.tiled import STATES, evaluate
from kernops.formula.graph import CAT_COL, CAT_I, CAT_J, CAT_ROW, Node, check
from kernops.formula.plan import Plan

Tensor = torch.Tensor


def compute(plan: Plan, tensors, m: int, n: int, backend: str) -> tuple[Tensor, ...]:
    """``backends.reduce``, with ``"program"`` as one more back end."""
    if backend != "program":
        return reduce(plan, tensors, m, n, backend)
    return run_program(plan, tensors, m, n, validate(plan, tensors, m, n))


def run_program(plan: Plan, tensors, m: int, n: int, batch: tuple[int, ...] = ()) -> tuple[Tensor, ...]:
    """What ``backends.reduce`` returns, computed from ``plan.program``."""
    program = plan.program
    like = next(t for t in tensors if isinstance(t, Tensor))
    rows = _slots(program.row_terms, tensors, CAT_J, like)
    cols = _slots(program.col_terms, tensors, CAT_I, like)
    for node in program.pair:
        check(node)

    def slot(v: Node) -> Tensor:
        cat, offset, dim = v.params
        assert cat in (CAT_ROW, CAT_COL), f"the pair formula reads {v}, which is not a slot"
        return (rows if cat == CAT_ROW else cols)[..., offset : offset + dim]

    state = STATES[plan.core](plan)
    values = evaluate(program.pair, slot, like)
    state.update(*(v.expand(*batch, m, n, p.dim) for v, p in zip(values, program.pair)), 0)
    outs = state.results()
    if program.factor is not None:
        (factor,) = evaluate((program.factor,), slot, like)
        outs = ((outs[0] * factor.expand(*batch, m, 1, -1)[..., 0, :]).expand(*batch, m, plan.dim),)
    return outs


def _slots(terms: tuple[Node, ...], tensors, forbidden: int, like: Tensor) -> Tensor:
    """The terms of all rows (or columns), one after the other on the last axis."""

    def leaf(v: Node) -> Tensor:
        cat, k, _ = v.params
        assert cat != forbidden, f"a hoisted term reads {v}"
        t = tensors[k]
        return pair_view(t, cat) if isinstance(t, Tensor) else torch.full((1,), float(t), dtype=like.dtype)

    for term in terms:
        check(term)
    values = evaluate(terms, leaf, like)
    shape = torch.broadcast_shapes((1, 1), *(v.shape[:-1] for v in values))
    return torch.cat([v.expand(*shape, t.dim) for v, t in zip(values, terms)] + [like.new_zeros(*shape, 0)], -1)
