"""Reductions with their dense counterparts, which torch evaluates and differentiates in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from kernops.autograd import reduce
from kernops.formula.graph import CAT_I, CAT_J, CAT_P, CAT_SCALAR, Node, check, var
from kernops.formula.ops import add, apply, div, mul, neg, sub
from kernops.formula.plan import Plan, make_plan

Tensor = torch.Tensor


@dataclass(frozen=True)
class Formula:
    """A formula twice.

    Attributes:
        cats, dims: categories and dimensions of its variables.
        node: builds it from the variables' nodes.
        dense: the same with torch, from tensors that broadcast over pairs, (..., M, N, D).
    """

    cats: tuple[int, ...]
    dims: tuple[int, ...]
    node: Callable[..., Node]
    dense: Callable[..., Tensor]
    numbers: dict[int, float] = field(default_factory=dict)

    def build(self) -> Node:
        return check(self.node(*(var(c, k, d) for k, (c, d) in enumerate(zip(self.cats, self.dims)))))

    def data(self, m: int = 4, n: int = 5, batches: tuple[tuple[int, ...], ...] | None = None, seed: int = 0,
             dtype: torch.dtype = torch.float64) -> list[Any]:  # fmt: skip
        """Random values of the variables; all positive, and no two alike."""
        generator = torch.Generator().manual_seed(seed)
        values: list[Any] = []
        for k, (cat, dim) in enumerate(zip(self.cats, self.dims)):
            if cat == CAT_SCALAR:
                values.append(self.numbers[k])
                continue
            own = {CAT_I: (m, dim), CAT_J: (n, dim)}.get(cat, (dim,))
            lead = batches[k] if batches else ()
            values.append(0.3 + torch.rand(*lead, *own, generator=generator, dtype=torch.float64).to(dtype))
        return values

    def pairs(self, values: list[Any]) -> Tensor:
        """The table of values, (..., M, N, D)."""
        wide = []
        for cat, t in zip(self.cats, values):
            if cat == CAT_I:
                t = t.unsqueeze(-2)
            elif cat == CAT_J:
                t = t.unsqueeze(-3)
            elif cat == CAT_P:
                t = t[..., None, None, :]
            wide.append(t)
        return self.dense(*wide)


def _norm(t: Tensor) -> Tensor:
    return t.pow(2).sum(-1, keepdim=True).sqrt()


FORMULAS: dict[str, Formula] = {
    "gauss": Formula(
        (CAT_I, CAT_J, CAT_J, CAT_P), (3, 3, 2, 1),
        lambda x, y, b, s: mul(apply("Exp", neg(mul(s, apply("SqDist", x, y)))), b),
        lambda x, y, b, s: (-s * ((x - y) ** 2).sum(-1, keepdim=True)).exp() * b,
    ),
    "laplace": Formula(
        (CAT_I, CAT_J, CAT_SCALAR), (2, 2, 1),
        lambda x, y, s: apply("Exp", neg(div(apply("Norm2", sub(x, y)), s))),
        lambda x, y, s: (-_norm(x - y) / s).exp(),
        {2: 0.7},
    ),
    "vector": Formula(
        (CAT_J, CAT_P, CAT_I), (3, 6, 3),
        lambda y, a, x: add(apply("MatVecMult", a, mul(x, y)),
                            div(apply("Sin", apply("Dot", x, y)), apply("Elem", y, params=(1,)))),
        lambda y, a, x: ((a.unflatten(-1, (2, 3)) @ (x * y).unsqueeze(-1)).squeeze(-1)
                         + (x * y).sum(-1, keepdim=True).sin() / y[..., 1:2]),
    ),
    "rows": Formula(  # the column does not matter to one factor, nor the row to another
        (CAT_I, CAT_J, CAT_P), (2, 2, 2),
        lambda x, y, p: mul(mul(apply("Log", x), y), p),
        lambda x, y, p: x.log() * y * p,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Reduction:
    """A core with its dense counterpart, which gives the values of the outputs that have derivatives."""

    core: str
    dense: Callable[[Tensor, Tensor | None], tuple[Tensor, ...]]
    k: int = 0


def _smallest(k: int) -> Callable:
    return lambda f, w: (f.sort(dim=-2).values.narrow(-2, 0, k),)


def _softmax(f: Tensor, w: Tensor | None) -> tuple[Tensor, ...]:
    assert w is not None
    return (torch.softmax(f, -2) * w).sum(-2), f.logsumexp(-2)


REDUCTIONS: dict[str, Reduction] = {
    "Sum": Reduction("Sum", lambda f, w: (f.sum(-2),)),
    "LogSumExp": Reduction("LogSumExp", lambda f, w: (f.logsumexp(-2),)),
    "SumSoftMaxWeight": Reduction("SumSoftMaxWeight", _softmax),
    "Min": Reduction("Min", lambda f, w: (f.amin(-2),)),
    "MinArgMin": Reduction("MinArgMin", lambda f, w: (f.amin(-2),)),
    "KMin": Reduction("KMin", _smallest(3), 3),
}
SMOOTH = ("Sum", "LogSumExp", "SumSoftMaxWeight")
MINIMA = ("Min", "MinArgMin", "KMin")


@dataclass(frozen=True)
class Case:
    """A reduction of a formula. A weighted one reduces the formula's first component, weighted by the formula."""

    reduction: str
    formula: str

    @property
    def plan(self) -> Plan:
        row, f = REDUCTIONS[self.reduction], FORMULAS[self.formula].build()
        if row.core == "SumSoftMaxWeight":
            return make_plan(row.core, apply("Elem", f, params=(0,)), f)
        return make_plan(row.core, f, k=row.k)

    def data(self, **kwargs: Any) -> list[Any]:
        return FORMULAS[self.formula].data(**kwargs)

    def sizes(self, values: list[Any]) -> tuple[int, int]:
        cats = FORMULAS[self.formula].cats
        m, n = (next(t.shape[-2] for c, t in zip(cats, values) if c == cat) for cat in (CAT_I, CAT_J))
        return m, n

    def ours(self, values: list[Any], backend: str = "tiled") -> tuple[Tensor, ...]:
        """The outputs that have derivatives."""
        outs = reduce(self.plan, values, *self.sizes(values), backend)
        return tuple(o for o in outs if o.is_floating_point())

    def dense(self, values: list[Any]) -> tuple[Tensor, ...]:
        f = FORMULAS[self.formula].pairs(values)
        weighted = self.reduction == "SumSoftMaxWeight"
        return REDUCTIONS[self.reduction].dense(f[..., :1] if weighted else f, f if weighted else None)


CASES = [Case(r, f) for r in REDUCTIONS for f in FORMULAS]
