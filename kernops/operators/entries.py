"""Single entries of a kernel's matrix, as formulas of fewer rows and columns."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from ..formula.graph import CAT_I, CAT_J, Node, rewrite, var, variables
from ..lazy import LazyTensor
from ..lazy.engine import request
from ..lazy.options import backend_for

Tensor = torch.Tensor


@lru_cache(maxsize=1024)
def _all_rows(f: Node) -> Node:
    """``f`` with its columns as rows: row r is the pair number r."""
    return rewrite(f, {v: var(CAT_I, v.params[1], v.dim) for v in variables(f) if v.params[0] == CAT_J})  # type: ignore[arg-type]


def at_pairs(lazy: LazyTensor, count: int) -> Tensor:
    """The kernel of row r with column r, (*B, count)."""
    frame = lazy.frame
    cats = tuple(CAT_I if c == CAT_J else c for c in frame.cats)
    pairs = LazyTensor(_all_rows(lazy.formula), frame.replace(cats=cats, m=count, n=None))
    return sum_over_columns(pairs, count, 1, frame.batch)[..., 0].expand(*frame.batch, count)


def sum_over_columns(lazy: LazyTensor, m: int, n: int, batch: tuple[int, ...]) -> Tensor:
    """The sum over j of a formula for m rows and n columns, (*batch, m, 1)."""
    frame = lazy.frame.settled().replace(m=m, n=n, batch=batch)
    assert frame.space is not None
    if m == 0 or 0 in batch:
        return torch.zeros(*batch, m, 1, dtype=frame.space.dtype, device=frame.space.device)
    req = request("Sum", lazy.formula, None, 0, len(frame.tensors), False)
    return req(frame, backend_for(frame.backend, frame.space.device))


def selected(lazy: LazyTensor, rows: Tensor, columns: Tensor) -> LazyTensor:
    frame = lazy.frame
    made: dict[tuple[int, int], Tensor] = {}

    def select(t: Any, cat: int) -> Any:
        if cat not in (CAT_I, CAT_J):
            return t
        index = rows if cat == CAT_I else columns
        key = (id(t), id(index))  # what rows and columns share, they still share
        if key not in made:
            made[key] = t.index_select(-2, index)
        return made[key]

    tensors = tuple(select(t, c) for t, c in zip(frame.tensors, frame.cats))
    return LazyTensor(lazy.formula, frame.replace(tensors=tensors, m=len(rows), n=len(columns)))


def at_rows(t: Tensor, index: Tensor) -> Tensor:
    """Row ``index`` (*B,) of each matrix of t (*b, N, D), (*B, 1, D)."""
    if index.ndim == 0:
        return t.index_select(-2, index.reshape(1))
    t = t.expand(*index.shape, *t.shape[-2:])
    return t.gather(-2, index[..., None, None].expand(*index.shape, 1, t.shape[-1]))
