"""The pure torch back end: formulas evaluated tile by tile with torch functions, on every device that torch knows.

It is the reference of the tests, and what runs where no compiler is to be had. It evaluates the formulas as they were
written, with ``Op.ref``, so that it shares neither hoisting nor code generation with the compiled back ends.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from ..formula.graph import CAT_I, CAT_J, Node, topological
from ..formula.ops import OPS
from ..formula.plan import Plan
from .layout import compact, own_axes, pair_view

Tensor = torch.Tensor
Inputs = Sequence["Tensor | float | None"]

#: Numbers in the largest intermediate of a tile: small enough for a CPU's cache, large enough to keep a GPU busy.
TILE_NUMBERS = {"cpu": 1 << 19, "other": 1 << 24}
MIN_COLUMNS = 256


def available(device: torch.device) -> str | None:
    """None: this back end runs everywhere."""
    return None


def reads(plan: Plan, dtype: torch.dtype) -> bool:
    """Whether tensors of this type can be reduced as they are."""
    return dtype.itemsize >= 4


@torch.no_grad()
def run(plan: Plan, tensors: Inputs, m: int, n: int, batch: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Compute ``plan`` (see :func:`kernops.backends.reduce` for the contract)."""
    first = next(t for t in tensors if isinstance(t, Tensor))
    tensors = tensors if batch else compact(tensors)
    width = max(node.dim for node in topological(*plan.roots))
    budget = max(1, TILE_NUMBERS.get(first.device.type, TILE_NUMBERS["other"]) // width)
    outs = _by_batch(plan, tensors, m, n, batch, budget)
    if plan.first:
        parts = outs[0].split([dim for _, dim in plan.outputs], -1)
        return tuple(part.clone(memory_format=torch.contiguous_format) for part in parts)
    return outs


def _by_batch(plan: Plan, tensors: Inputs, m: int, n: int, batch: tuple[int, ...], budget: int) -> tuple[Tensor, ...]:
    """Halve the largest batch axis until a tile of all batch elements fits the budget."""
    count = math.prod(batch)
    if count > 1 and count * min(n, MIN_COLUMNS) > budget:
        axis = max(range(len(batch)), key=batch.__getitem__)
        half = batch[axis] // 2
        parts = []
        for start, length in ((0, half), (half, batch[axis] - half)):
            part = [_narrow_batch(plan, k, t, len(batch) - axis, start, length) for k, t in enumerate(tensors)]
            parts.append(_by_batch(plan, part, m, n, (*batch[:axis], length, *batch[axis + 1 :]), budget))
        return tuple(torch.cat(outs, dim=axis) for outs in zip(*parts))
    columns = min(n, max(MIN_COLUMNS, math.isqrt(budget // count)))
    rows = max(1, min(m, budget // (count * columns)))
    blocks = [_rows(plan, tensors, i, min(rows, m - i), n, columns, batch) for i in range(0, m, rows)]
    row_axis = len(batch)
    return tuple(torch.cat(outs, dim=row_axis) if len(outs) > 1 else outs[0] for outs in zip(*blocks))


def _cats(plan: Plan) -> dict[int, int]:
    return {v.params[1]: v.params[0] for v in plan.variables}  # type: ignore[misc]


def _narrow_batch(plan: Plan, k: int, tensor: Tensor | float | None, from_right: int, start: int, length: int):
    """Tensor k cut along the batch axis that is number ``from_right`` from the right."""
    if not isinstance(tensor, Tensor) or k not in _cats(plan):
        return tensor
    axis = tensor.ndim - own_axes(_cats(plan)[k]) - from_right
    if axis < 0 or tensor.shape[axis] == 1:
        return tensor
    return tensor.narrow(axis, start, length)


def _rows(plan: Plan, tensors: Inputs, i: int, rows: int, n: int, columns: int, batch: tuple[int, ...]):
    """The results of one block of rows: a state folded over tiles of columns."""
    first = next(t for t in tensors if isinstance(t, Tensor))
    cats = _cats(plan)
    state = STATES[plan.core](plan)
    for j in range(0, n, columns):
        cols = min(columns, n - j)

        def leaf(var: Node, j: int = j, cols: int = cols) -> Tensor:
            t = tensors[var.params[1]]  # type: ignore[index]
            if not isinstance(t, Tensor):
                return torch.full((1,), float(t), dtype=first.dtype, device=first.device)  # type: ignore[arg-type]
            cat = cats[var.params[1]]  # type: ignore[index]
            if cat == CAT_I:
                t = t.narrow(-2, i, rows)
            elif cat == CAT_J:
                t = t.narrow(-2, j, cols)
            return pair_view(t, cat)

        values = evaluate(plan.roots, leaf, first)
        shape = (*batch, rows, cols)
        state.update(*(v.expand(*shape, r.dim) for v, r in zip(values, plan.roots)), j)
    return state.results()


def evaluate(roots: tuple[Node, ...], leaf: Callable[[Node], Tensor], like: Tensor) -> list[Tensor]:
    """The values of ``roots``, given those of the variables, in the dtype and on the device of ``like``."""
    value: dict[Node, Tensor] = {}
    order = topological(*roots)
    uses = Counter(a for node in order for a in node.args)
    uses.update(roots)
    for node in order:
        if node.is_var:
            value[node] = leaf(node)
        elif node.value is not None:
            value[node] = torch.full((1,), node.value, dtype=like.dtype, device=like.device)
        else:
            value[node] = OPS[node.op].ref(torch, *(value[a] for a in node.args), *node.params)
        for a in node.args:  # free each intermediate after its last use: a tile of every node would not be O(M + N)
            uses[a] -= 1
            if uses[a] == 0:
                del value[a]
    return [value[r] for r in roots]


# States: the torch counterparts of cuda/reductions.cuh. ``update`` receives values (*B, rows, columns, dim) of the
# columns from number j on; ``results`` returns the core's outputs.


class _Compensated:
    """A running sum kept as hi + lo (Neumaier)."""

    def __init__(self) -> None:
        self.hi: Tensor | None = None
        self.lo: Tensor | None = None

    def add(self, x: Tensor) -> None:
        if self.hi is None:
            self.hi, self.lo = x, torch.zeros_like(x)
            return
        s = self.hi + x
        e = torch.where(self.hi.abs() >= x.abs(), (self.hi - s) + x, (x - s) + self.hi)
        assert self.lo is not None
        self.lo = torch.where(torch.isfinite(s), self.lo + e, torch.zeros_like(e))
        self.hi = s

    def scale(self, factor: Tensor) -> None:
        if self.hi is not None and self.lo is not None:
            self.hi, self.lo = self.hi * factor, self.lo * factor

    def value(self) -> Tensor:
        assert self.hi is not None and self.lo is not None
        return self.hi + self.lo


class _Sum:
    def __init__(self, plan: Plan) -> None:
        self.total = _Compensated()

    def update(self, f: Tensor, j: int) -> None:
        self.total.add(f.sum(-2))

    def results(self) -> tuple[Tensor, ...]:
        return (self.total.value(),)


class _ExpSum:
    """log of the sum of exp(f), and sums weighted by exp(f)."""

    def __init__(self, plan: Plan) -> None:
        self.top: Tensor | None = None
        self.sum, self.weighted = _Compensated(), _Compensated()

    def update(self, f: Tensor, *rest) -> None:
        weight = rest[0] if len(rest) == 2 else None
        tile_top = f.amax(-2)
        top = tile_top if self.top is None else torch.maximum(self.top, tile_top)
        if self.top is not None:
            factor = self._ratio(self.top, top)
            self.sum.scale(factor)
            self.weighted.scale(factor)
        p = self._ratio(f, top.unsqueeze(-2))
        p = torch.where(f == -math.inf, torch.zeros_like(p), p)
        self.sum.add(p.sum(-2))
        if weight is not None:
            self.weighted.add((p * weight).sum(-2))
        self.top = top

    @staticmethod
    def _ratio(a: Tensor, top: Tensor) -> Tensor:
        return torch.where(a == top, torch.ones_like(a), torch.exp(a - top))

    def lse(self) -> Tensor:
        assert self.top is not None
        return self.top + torch.log(self.sum.value())


class _LogSumExp(_ExpSum):
    def results(self) -> tuple[Tensor, ...]:
        return (self.lse(),)


class _SumSoftMaxWeight(_ExpSum):
    def results(self) -> tuple[Tensor, ...]:
        return self.weighted.value() / self.sum.value(), self.lse()


class _Min:
    def __init__(self, plan: Plan) -> None:
        self.best: Tensor | None = None

    def update(self, f: Tensor, j: int) -> None:
        tile = f.amin(-2)
        self.best = tile if self.best is None else torch.minimum(self.best, tile)

    def results(self) -> tuple[Tensor, ...]:
        assert self.best is not None
        return (self.best,)


class _KMin:
    """The K smallest values and their columns; a stable sort keeps the lowest column first among equals."""

    def __init__(self, plan: Plan) -> None:
        self.k = max(plan.k, 1)
        self.values: Tensor | None = None
        self.index: Tensor | None = None

    def update(self, f: Tensor, j: int) -> None:
        index = torch.arange(j, j + f.shape[-2], device=f.device).unsqueeze(-1).expand(f.shape)
        if self.values is not None and self.index is not None:
            f = torch.cat([self.values, f], -2)
            index = torch.cat([self.index, index], -2)
        order = f.sort(dim=-2, stable=True).indices.narrow(-2, 0, min(self.k, f.shape[-2]))  # NaN sorts last
        self.values, self.index = f.gather(-2, order), index.gather(-2, order)

    def results(self) -> tuple[Tensor, ...]:
        assert self.values is not None and self.index is not None
        index = torch.where(self.values.isnan(), -1, self.index)
        missing = self.k - self.values.shape[-2]
        pad = torch.nn.functional.pad
        return (pad(self.values, (0, 0, 0, missing), value=math.nan), pad(index, (0, 0, 0, missing), value=-1))


class _MinArgMin(_KMin):
    def results(self) -> tuple[Tensor, ...]:
        value, index = super().results()
        return value.squeeze(-2), index.squeeze(-2)


STATES: dict[str, type] = {
    "Sum": _Sum,
    "LogSumExp": _LogSumExp,
    "SumSoftMaxWeight": _SumSoftMaxWeight,
    "Min": _Min,
    "MinArgMin": _MinArgMin,
    "KMin": _KMin,
}
