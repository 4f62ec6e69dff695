"""Small problems for every core, with what float64 torch says about them from the full table of pairs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from kernops import formula as _fill_the_table  # noqa: F401
from kernops.backends import reduce
from kernops.formula.graph import CAT_I, CAT_J, CAT_P, CAT_SCALAR, Node, var
from kernops.formula.ops import add, apply, mul, neg, sub
from kernops.formula.plan import Plan, make_plan

Tensor = torch.Tensor


@dataclass(frozen=True)
class Problem:
    """A plan, the categories and dimensions of its variables, and the reduced values of all pairs.

    ``pairs`` maps tensors of shape (..., M, 1, D), (..., 1, N, D) and (..., 1, 1, D) to (..., M, N, dim); for a
    weighted core to a pair of those.
    """

    name: str
    plan: Plan
    cats: tuple[tuple[int, int], ...]  # category and dimension of each variable
    pairs: Callable[..., Any] = field(compare=False)

    def __str__(self) -> str:
        return self.name


def sqdist(x: Tensor, y: Tensor) -> Tensor:
    return ((x - y) ** 2).sum(-1, keepdim=True)


def _vars(cats: tuple[tuple[int, int], ...]) -> list[Node]:
    return [var(cat, k, dim) for k, (cat, dim) in enumerate(cats)]


def problem(name: str, core: str, cats: tuple, build: Callable, pairs: Callable, k: int = 0) -> Problem:
    built = build(*_vars(cats))
    f, w = built if isinstance(built, tuple) else (built, None)
    return Problem(name, make_plan(core, f, w, k=k, n_vars=len(cats)), cats, pairs)


def gaussian(d: int, e: int = 1) -> Problem:
    """sum_j exp(-|x_i - y_j|^2 / d) b_j"""
    return problem(
        f"gaussian D={d} E={e}", "Sum", ((CAT_I, d), (CAT_J, d), (CAT_J, e)),
        lambda x, y, b: mul(apply("Exp", mul(-1 / d, apply("SqDist", x, y))), b),
        lambda x, y, b: torch.exp(-sqdist(x, y) / d) * b,
    )  # fmt: skip


def gradient(d: int) -> Problem:
    """The gradient of a Gaussian sum by x."""

    def kernel(x: Node, y: Node) -> Node:
        return apply("Exp", mul(-1 / d, apply("SqDist", x, y)))

    return problem(
        f"gradient D={d}", "Sum", ((CAT_I, d), (CAT_J, d), (CAT_J, 1), (CAT_I, 1)),
        lambda x, y, b, g: mul(mul(mul(g, kernel(x, y)), b), mul(-2 / d, sub(x, y))),
        lambda x, y, b, g: g * torch.exp(-sqdist(x, y) / d) * b * (-2 / d) * (x - y),
    )  # fmt: skip


def with_parameters() -> Problem:
    """A vector parameter, a number, and a row factor that widens the result."""

    def distance(x: Node, y: Node, p: Node, s: Node) -> Node:
        return apply("WeightedSqDist", mul(s, apply("Abs", p)), x, y)

    return problem(
        "parameters", "Sum", ((CAT_I, 3), (CAT_J, 3), (CAT_P, 3), (CAT_SCALAR, 1), (CAT_I, 4)),
        lambda x, y, p, s, v: mul(v, apply("Exp", neg(distance(x, y, p, s)))),
        lambda x, y, p, s, v: v * torch.exp(-(s * p.abs() * (x - y) ** 2).sum(-1, keepdim=True)),
    )  # fmt: skip


def distances(core: str, d: int, k: int = 0, dim: int = 1) -> Problem:
    """|x_i - y_j|^2, or for dim > 1 the products of the components of x and y, reduced by any core."""
    cats = (CAT_I, d), (CAT_J, d)
    name = f"{core} D={d} K={k} dim={dim}"
    if dim == 1:
        return problem(name, core, cats, lambda x, y: apply("SqDist", x, y), lambda x, y: sqdist(x, y), k)
    assert dim == d
    return problem(name, core, cats, lambda x, y: mul(x, y), lambda x, y: x * y, k)


def softmax(d: int, e: int) -> Problem:
    return problem(
        f"softmax D={d} E={e}", "SumSoftMaxWeight", ((CAT_I, d), (CAT_J, d), (CAT_J, e)),
        lambda x, y, w: (neg(apply("SqDist", x, y)), w), lambda x, y, w: (-sqdist(x, y), w),
    )  # fmt: skip


def polynomial(d: int) -> Problem:
    """Sums of whole numbers: exact in float32 for small inputs."""
    return problem(f"dot D={d}", "Sum", ((CAT_I, d), (CAT_J, d)), lambda x, y: add(1.0, apply("Dot", x, y)),
                   lambda x, y: 1 + (x * y).sum(-1, keepdim=True))  # fmt: skip


# --- data and references ----------------------------------------------------------------------------------------------
def inputs(p: Problem, m: int, n: int, dtype: torch.dtype, batches: tuple[tuple[int, ...], ...] | None = None,
           seed: int = 0) -> list[Any]:  # fmt: skip
    """Random values on the GPU; variable k has the batch shape ``batches[k]``."""
    g = torch.Generator("cuda").manual_seed(seed)
    rows = {CAT_I: (m,), CAT_J: (n,), CAT_P: ()}
    values: list[Any] = []
    for k, (cat, dim) in enumerate(p.cats):
        if cat == CAT_SCALAR:
            values.append(0.7)
        else:
            shape = (*(batches[k] if batches else ()), *rows[cat], dim)
            values.append(torch.randn(shape, generator=g, device="cuda", dtype=torch.float64).to(dtype))
    return values


def spread(p: Problem, values: list[Tensor | float]) -> list[Tensor | float]:
    """The variables in float64, shaped to broadcast over pairs."""
    at = {CAT_I: (slice(None), None), CAT_J: (None, slice(None)), CAT_P: (None, None)}
    wide = slice(None)
    return [v if isinstance(v, float) else v.double()[(..., *at[c], wide)] for v, (c, _) in zip(values, p.cats)]


def dense(p: Problem, values: list[Tensor | float]) -> tuple[Tensor, ...]:
    """The outputs by float64 torch, from the full table."""
    f = p.pairs(*spread(p, values))
    if p.plan.core == "SumSoftMaxWeight":
        f, w = f
        return (torch.softmax(f, -2) * w).sum(-2), torch.logsumexp(f, -2)
    if p.plan.core == "KMin":
        best = torch.sort(f, dim=-2, stable=True)
        nan = torch.isnan(best.values)
        return (best.values[..., : p.plan.k, :], torch.where(nan, -1, best.indices)[..., : p.plan.k, :])
    if p.plan.core == "MinArgMin":
        value, index = torch.sort(f, dim=-2, stable=True)
        return value[..., 0, :], torch.where(torch.isnan(value), -1, index)[..., 0, :]
    return (getattr(f, {"Sum": "sum", "LogSumExp": "logsumexp", "Min": "amin"}[p.plan.core])(-2),)


def run(p: Problem, values: list[Tensor | float], m: int, n: int) -> tuple[Tensor, ...]:
    return reduce(p.plan, values, m, n, backend="cuda")


def error(got: Tensor, want: Tensor) -> float:
    """Relative error in the Euclidean norm."""
    return ((got.double() - want).norm() / want.norm().clamp_min(1e-300)).item()


TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-13}


def agree(p: Problem, got: tuple[Tensor, ...], values: list[Tensor | float]) -> None:
    """Assert that results are what float64 torch says; indices are judged by the values that they point at."""
    want = dense(p, values)
    assert len(got) == len(want)
    dtype = got[0].dtype
    for g, w in zip(got, want):
        assert g.shape == w.shape, f"{p}: shape {tuple(g.shape)}, expected {tuple(w.shape)}"
        if g.dtype == torch.int64:
            f = p.pairs(*spread(p, values))
            there = torch.gather(f, -2, g if p.plan.k else g[..., None, :])
            there = there if p.plan.k else there[..., 0, :]
            assert (g >= 0).all() and error(there, want[0]) < TOLERANCE[dtype], f"{p}: indices"
            if p.plan.k > 1:
                assert (torch.sort(g, -2).values.diff(dim=-2) > 0).all(), f"{p}: an index occurs twice"
        else:
            assert g.dtype == dtype and torch.isfinite(g).all(), f"{p}: unwritten or not finite"
            assert error(g, w) < TOLERANCE[dtype], f"{p} {dtype}: error {error(g, w):.3g}"


CORES = [
    gaussian(3), gaussian(1, 2), gaussian(3, 16), gaussian(3, 19), gaussian(16), gaussian(65), gaussian(2, 130),
    gradient(3), gradient(40), with_parameters(), polynomial(5), softmax(3, 1), softmax(3, 5), softmax(2, 40),
    *(distances(c, 3) for c in ("LogSumExp", "Min", "MinArgMin")),
    *(distances(c, 7, dim=7) for c in ("LogSumExp", "Min", "MinArgMin")),
    *(distances("KMin", 3, k) for k in (1, 5, 16, 17, 40)), *(distances("KMin", 2, k, dim=2) for k in (3, 30)),
]  # fmt: skip
