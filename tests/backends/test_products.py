"""Squared distances from products on the CPU: as near the exact ones as those from differences, whatever the points.

One-hot weights pick pairs out of a sum, so that single distances can be held against exact ones (of differences of the
float32 numbers in float64, and of float64 numbers in rational arithmetic).
"""

from __future__ import annotations

import platform
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from kernops.backends import cpu, reduce
from kernops.codegen.host_schedule import Machine
from kernops.codegen.products import FEWEST, products
from kernops.formula.graph import CAT_I, CAT_J, Node, var
from kernops.formula.ops import apply, mul, neg
from kernops.formula.plan import make_plan

F32, F64 = torch.float32, torch.float64
REASON = cpu.available(torch.device("cpu"))
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
M, N, DIM = 150, 200, 97  # an odd number of components: the last has no partner
PICKED = torch.tensor([0, 7, 66, N - 1])

VARIANTS = ["paired", "plain"]
if platform.machine() == "x86_64":
    VARIANTS.append("narrow")


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both forms of products, and vectors of 16 bytes without multiply-add."""
    name, machine = cpu._cpu()
    machine = replace(machine, adders=request.param != "plain")
    if request.param == "narrow":
        machine = Machine(16, 16, True)
        monkeypatch.setattr(cpu, "_NATIVE", {"x86_64": "-march=x86-64"})
    monkeypatch.setattr(cpu, "_cpu", lambda: (name, machine))
    monkeypatch.setattr(cpu, "_bindings", {})
    return request.param


def _sqdist(dim: int = DIM) -> Node:
    return apply("SqDist", var(CAT_I, 0, dim), var(CAT_J, 1, dim))


def _rand(*shape: int, seed: int = 0, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def _points(kind: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = _rand(M, DIM, dtype=dtype), _rand(N, DIM, seed=1, dtype=dtype)
    if kind == "offset":
        return x + 1000, y + 1000
    if kind == "near":  # a pair of points in a hundred nearly the same, one exactly
        x[7], x[8], x[9] = y[7], y[66] * (1 + 2**-20), y[66] + 1e-3
        return x + 100, y + 100
    if kind == "clusters":  # far from one another, each a billionth as wide: all pairs of some rows are near
        y[100:] = y[100:] * 2**-10 + 50
        return torch.cat([x[:75], y[100:175] + 2**-12]), y
    if kind == "sizes":
        return x * torch.logspace(-6, 6, M, dtype=dtype)[:, None], y * torch.logspace(6, -6, N, dtype=dtype)[:, None]
    return x, y


def _picked(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Squared distances of all rows to the columns ``PICKED``."""
    weights = torch.zeros(len(y), len(PICKED), dtype=x.dtype)
    weights[PICKED, range(len(PICKED))] = 1
    plan = make_plan("Sum", mul(_sqdist(x.shape[1]), var(CAT_J, 2, len(PICKED))))
    assert products(plan)[0] == x.shape[1]
    return reduce(plan, [x, y, weights], len(x), len(y), "cpu")[0]


def _exact(x: torch.Tensor, y: torch.Tensor) -> np.ndarray:
    if x.dtype == F32:
        return ((x.double()[:, None] - y.double()[PICKED]) ** 2).sum(-1).numpy()
    rows = [[Fraction(v) for v in row] for row in x.tolist()]
    columns = [[Fraction(v) for v in row] for row in y[PICKED].tolist()]
    return np.array([[float(sum((a - b) ** 2 for a, b in zip(r, c))) for c in columns] for r in rows])


@pytest.mark.parametrize("kind", ["plain", "offset", "near", "clusters", "sizes"])
def test_each_distance_is_right_relative_to_itself(variant: str, kind: str) -> None:
    for dtype in (F32, F64) if variant == "paired" else (F32,):
        x, y = _points(kind, dtype)
        got, want = _picked(x, y).double().numpy(), _exact(x, y)
        unit = torch.finfo(dtype).eps
        assert np.array_equal(got == 0, want == 0)
        assert (np.abs(got - want)[want > 0] / want[want > 0]).max() < 16 * unit


def test_points_that_are_none_and_sizes_without_squares(variant: str) -> None:
    """What differences give."""
    x, y = _rand(M, DIM), _rand(N, DIM, seed=1)
    x[0, 5], x[1, 5], x[2, 5] = torch.inf, -torch.inf, torch.nan
    x[4], x[5], x[6] = 1e18, 1e20, y[0] * 1e-22
    want = ((x[:, None] - y[PICKED]) ** 2).sum(-1)
    want[~torch.isfinite(want)] = torch.nan  # times the zeros of one-hot weights
    torch.testing.assert_close(_picked(x, y), want, rtol=3e-6, atol=0, equal_nan=True)
    tiny = _picked(x[8:] * 1e-18, y * 1e-18)[:, 0]
    torch.testing.assert_close(tiny, ((x[8:] - y[0]) ** 2).sum(-1) * 1e-36, rtol=1e-5, atol=DIM * 2e-38)
    # A column at infinity is far from all points but those that are there too.
    y[7, 5] = torch.inf
    plan = make_plan("Sum", mul(apply("Exp", mul(-0.01, _sqdist())), var(CAT_J, 2, 1)))
    tensors = [x, y, _rand(N, 1, seed=2)]
    for tensors[1][66, 6] in (0.0, torch.nan):
        want = reduce(plan, [t.double() for t in tensors], M, N, "tiled")[0]
        assert torch.isnan(want[0]) and (torch.isnan(want[8:]).all() or torch.isfinite(want[8:]).all())
        got = reduce(plan, tensors, M, N, "cpu")[0].double()
        torch.testing.assert_close(got, want, rtol=3e-6, atol=3e-6, equal_nan=True)


@pytest.mark.parametrize("core", ["Sum", "LogSumExp", "SumSoftMaxWeight"])
def test_reductions(variant: str, core: str) -> None:
    """Also in batches, whose elements have centres of their own, and with gradients' many components."""
    dim = 130
    formula = mul(-0.5 / dim, _sqdist(dim))
    weight = var(CAT_J, 2, 3) if core == "SumSoftMaxWeight" else None
    formula = mul(apply("Exp", formula), var(CAT_J, 2, 3)) if core == "Sum" else formula
    plan = make_plan(core, formula, weight, n_vars=3)
    assert products(plan)[0] == dim
    shift = torch.tensor([0.0, 300.0])[:, None, None]
    x, y = _rand(2, M, dim) + shift, _rand(2, N, dim, seed=1) + shift
    tensors = [x, y, _rand(N, 3, seed=2)]
    got = reduce(plan, tensors, M, N, "cpu", (2,))
    for g, w in zip(got, reduce(plan, [t.double() for t in tensors], M, N, "tiled", (2,))):
        torch.testing.assert_close(g.double(), w, rtol=3e-6, atol=3e-6)


def test_rows_of_tiny_values_keep_their_digits() -> None:
    """exp of an exponent near -80 is off by as many units as the exponent has, no more."""
    x, y, b = 0.64 * _rand(M, DIM), 0.64 * _rand(N, DIM, seed=1), _rand(N, 1, seed=2).abs()
    plan = make_plan("Sum", mul(apply("Exp", neg(_sqdist())), var(CAT_J, 2, 1)))
    got = reduce(plan, [x, y, b], M, N, "cpu")[0].double()
    want = reduce(plan, [x.double(), y.double(), b.double()], M, N, "tiled")[0]
    assert float(want.min()) > 1e-36 and float(want.max()) < 1e-15
    assert float(((got - want) / want).abs().max()) < 2e-5


def test_what_is_computed_from_products() -> None:
    x, y = var(CAT_I, 0, FEWEST), var(CAT_J, 1, FEWEST)
    square, b = apply("SqDist", x, y), var(CAT_J, 2, 1)
    assert products(make_plan("Sum", mul(apply("Exp", neg(square)), b))) == (FEWEST, 0, 1)
    few = mul(apply("Exp", neg(_sqdist(FEWEST - 1))), b)
    jump = mul(apply("Step", apply("Sub", square, b)), b)
    two = mul(apply("Exp", neg(square)), apply("Dot", x, y))
    for plan in (make_plan("Sum", few), make_plan("Sum", jump), make_plan("Sum", two), make_plan("Min", square),
                 make_plan("KMin", square, k=3), make_plan("MinArgMin", square)):  # fmt: skip
        assert products(plan) == (0, 0, 0)
