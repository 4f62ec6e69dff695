"""The tiled reductions of plain cores, without a GPU: their kernels run on the processor."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kernops import formula as _fill_the_table  # noqa: F401
from kernops.backends import cuda, nvrtc
from kernops.backends.launch import reciprocal
from kernops.codegen import matrix_schedule
from kernops.codegen.facts import facts
from kernops.codegen.matrix import matrix_form
from kernops.codegen.schedule import Device, schedule
from kernops.formula.graph import CAT_I, CAT_J, Node, var
from kernops.formula.ops import add, apply, div, mul, neg, sub
from kernops.formula.plan import Plan, make_plan
from tests.helpers import emulated_cuda
from tests.helpers.emulated_cuda import Emulation, emulate_reductions

pytestmark = pytest.mark.skipif(emulated_cuda.missing() is not None, reason=str(emulated_cuda.missing()))

Tensor = torch.Tensor
DEVICE = Device(3, 232448, (9, 0))
X, Y, B = var(CAT_I, 0, 3), var(CAT_J, 1, 3), var(CAT_J, 2, 1)
NAN, INF = math.nan, math.inf


@pytest.fixture(autouse=True)
def emulation(monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulation]:
    yield emulate_reductions(monkeypatch)


def run(plan: Plan, tensors: list[Tensor], **changes: Any) -> tuple[Tensor, ...]:
    """The results of the kernels, with these changes to the schedule."""
    m, n, dtype = len(tensors[0]), len(tensors[1]), tensors[0].dtype
    s = schedule(facts(plan), m, n, 1, max(4, dtype.itemsize), DEVICE)
    launch = cuda._built((plan, dtype, "cpu", m, n, (1,)), replace(s, **changes))
    results = launch.results(())
    launch.submit(launch._words(tensors, None), results)
    return results


def data(m: int = 150, n: int = 700, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(size, d, generator=g).to(dtype) for size, d in ((m, 3), (n, 3), (n, 1))]


def squares(x: Tensor, y: Tensor) -> Tensor:
    return ((x[:, None] - y[None]) ** 2).sum(-1)


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


S, R = apply("SqDist", X, Y), apply("Sqrt", apply("SqDist", X, Y))
KERNELS: dict[str, tuple[Node, Callable[[Tensor], Tensor]]] = {
    "laplacian": (apply("Exp", neg(R)), lambda s: s.sqrt().neg().exp()),
    "matern": (mul(add(1.0, R), apply("Exp", neg(R))), lambda s: (1 + s.sqrt()) * s.sqrt().neg().exp()),
    "growing": (apply("Exp", mul(0.3, R)), lambda s: (0.3 * s.sqrt()).exp()),
    "logarithm": (apply("Abs", sub(1.0, apply("Log1p", S))), lambda s: (1 - s.log1p()).abs()),
    "logarithm alone": (apply("Log1p", S), lambda s: s.log1p()),
    "two logarithms": (sub(apply("Log", add(1.0, S)), 2.0), lambda s: (1 + s).log() - 2),
    "quotient": (div(1.0, add(1.0, S)), lambda s: 1 / (1 + s)),
    "quotient of pairs": (div(R, add(1.0, S)), lambda s: s.sqrt() / (1 + s)),
    "gradient": (apply("Rsqrt0", S), lambda s: s.rsqrt()),
}  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
def test_sums(name: str) -> None:
    """With and without powers of 2 by plain cores; several tiles at a time, of which the last is not full."""
    node, dense = KERNELS[name]
    plan = make_plan("Sum", mul(node, B))
    tensors = data()
    want = dense(squares(*(t.double() for t in tensors[:2]))) @ tensors[2].double()
    variants = ({}, {"plain": 0}, {"plain": 5, "tiles": 1}) if facts(plan).powers else ({},)
    for changes in variants:
        assert error(run(plan, tensors, **changes)[0], want) < 1e-6, changes


def test_powers_of_2_by_plain_cores_at_the_ends_of_the_range() -> None:
    plan = make_plan("Sum", apply("Exp2", add(var(CAT_I, 0, 1), var(CAT_J, 1, 1))))
    below = make_plan("Sum", apply("Exp2", neg(apply("Abs", add(var(CAT_I, 0, 1), var(CAT_J, 1, 1))))))
    values = torch.tensor([-INF, -1e30, -4e6, -1000.0, -127.0, -126.0, -125.3, -1.5, -0.0, 1e-9, 0.7, 120.0, INF, NAN])
    for p, of in ((plan, values.double()), (below, values.double().abs().neg())):
        got = run(p, [values[:, None], torch.zeros(1, 1)], plain=8)[0][:, 0]
        many = run(p, [values[:, None], torch.zeros(16, 1)], plain=8)[0][:, 0]
        want = torch.exp2(of)
        for found, expected in ((got, want), (many, 16 * want)):
            torch.testing.assert_close(found.double(), expected, rtol=3e-7, atol=1e-36, equal_nan=True)


def test_coefficients() -> None:
    """The polynomials in the header, by Horner's rule in float32."""
    text = (nvrtc.HEADERS / "math.cuh").read_text(encoding="utf-8")

    def evaluate(name: str, last: str, at: np.ndarray) -> np.ndarray:
        body = text[text.index(f"float {name}") : text.index(last, text.index(f"float {name}"))]
        terms = re.findall(r"(?:p =|return) (?:p \* [fx] ([+-]) )?([\d.e-]+)f;", body)
        assert len(terms) in (6, 8)
        p = np.zeros_like(at)
        for sign, c in terms:
            p = (p.astype(np.float64) * at + np.float32(float(sign + c))).astype(np.float32)
        return p

    f = np.linspace(-0.5, 0.5, 100_001).astype(np.float32)
    p = evaluate("plain_exp2_of_fraction", "}", f)
    assert np.abs(p / np.exp2(f.astype(np.float64)) - 1).max() < 2.0**-22
    x = np.linspace(-0.35, 0.5, 100_002).astype(np.float32)
    p = evaluate("log_near", "return", x).astype(np.float64)
    square = (x * x).astype(np.float64)
    log = (p * square + x).astype(np.float32)
    assert np.abs(log / np.log1p(x.astype(np.float64)) - 1).max() < 2.0**-21.5


@pytest.mark.parametrize("core", ["LogSumExp", "SumSoftMaxWeight"])
def test_sums_of_exponentials(core: str) -> None:
    """Exponents that grow from column to column, that lie far below the first, and of any size."""
    f, w = add(var(CAT_I, 0, 1), var(CAT_J, 1, 1)), var(CAT_J, 2, 1)
    plan = make_plan(core, f, w if core == "SumSoftMaxWeight" else None)
    n = 1000
    g = torch.Generator().manual_seed(3)
    rows = torch.tensor([[0.0], [1e4], [-3e4]])
    for y in (torch.linspace(-300, 300, n), torch.linspace(300, -300, n), torch.randn(n, generator=g), torch.zeros(n)):
        b = torch.randn(n, 1, generator=g)
        tensors = [rows, y[:, None], b][: plan.n_vars]
        exponents = (rows + y[None, :]).double()  # rounded to float32, as the kernel rounds them
        got = run(plan, tensors)
        lse = exponents.logsumexp(1, keepdim=True)
        torch.testing.assert_close(got[-1].double(), lse, rtol=3e-7, atol=2e-6)
        if core == "SumSoftMaxWeight":
            assert error(got[0], exponents.softmax(1) @ b.double()) < 2e-6


def test_sums_of_exponentials_that_are_not_finite() -> None:
    plan = make_plan("LogSumExp", add(var(CAT_I, 0, 1), var(CAT_J, 1, 1)))
    cases = {
        (-INF,) * 40: -INF,
        (*(-INF,) * 39, 3.0): 3.0,
        (0.0, INF, -INF, 1.0): INF,
        (*(1.0,) * 30, INF, *(2.0,) * 30): INF,
        (0.0, NAN): NAN,
        (NAN, *(5.0,) * 40): NAN,
        (INF, NAN): NAN,
        (*(1.0,) * 700, 600.0): 600.0,
    }
    for values, want in cases.items():
        got = run(plan, [torch.zeros(2, 1), torch.tensor(values)[:, None]])[0]
        torch.testing.assert_close(got, torch.full((2, 1), want), equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("core", ["Sum", "LogSumExp", "SumSoftMaxWeight", "Min"])
def test_half_types_are_computed_in_float32(core: str, dtype: torch.dtype) -> None:
    """Kernels that read and write half types give the bits of float32 between two conversions."""
    f = mul(apply("Exp", neg(S)), var(CAT_J, 2, 2)) if core == "Sum" else neg(S)
    plan = make_plan(core, f, B if core == "SumSoftMaxWeight" else None)
    x, y, b = data(dtype=dtype)
    tensors = [x, y, torch.cat((b, -b), 1) if core == "Sum" else b][: plan.n_vars]
    got = run(plan, tensors)
    assert cuda.reads(plan, dtype) and all(t.dtype == dtype for t in got)
    for half, single in zip(got, run(plan, [t.float() for t in tensors])):
        assert torch.equal(half, single.to(dtype))


@pytest.mark.parametrize("e", [1, 16])
def test_half_types_on_matrix_units(e: int) -> None:
    plan = make_plan("Sum", mul(apply("Exp", neg(S)), var(CAT_J, 2, e)))
    form = matrix_form(plan)
    assert form is not None
    x, y, _ = data(m=130, n=300, dtype=torch.bfloat16)
    tensors = [x, y, torch.randn(300, e, generator=torch.Generator().manual_seed(1)).bfloat16()]
    s = matrix_schedule.build(plan, form, 130, 300, 1, Device(3, 101376, (8, 6)))
    assert s is not None
    found = []
    for given in (tensors, [t.float() for t in tensors]):
        launch = cuda._matrix_launch((plan, given[0].dtype, "cpu", 130, 300, (1,)), s)
        results = launch.results(())
        survey = torch.zeros(launch.survey, dtype=torch.uint8)
        launch.submit(launch._words(given, None), results, survey.data_ptr())
        found.append(results[0])
    assert found[0].dtype == torch.bfloat16 and torch.equal(found[0], found[1].bfloat16())


def test_minima_with_indices_convert_half_types() -> None:
    for core, k in (("MinArgMin", 0), ("KMin", 3)):
        assert not cuda.reads(make_plan(core, S, k=k), torch.float16)


def test_quotients_by_reciprocals() -> None:
    """``BlockNumber::quotient``, for the numbers of blocks that it takes."""
    for d in (1, 2, 3, 7, 391, 65_536, 782_001, 2**31 - 1, 2**32 - 1):
        r = reciprocal(d) % 2**64
        assert -(2**63) <= reciprocal(d) < 2**63
        for n in {
            0,
            1,
            d - 1,
            d,
            d + 1,
            2 * d - 1,
            7 * d,
            7 * d - 1,
            2**32 - 1,
            (2**32 - 1) // d * d,
            (2**32 - 1) // d * d - 1,
        }:
            if 0 <= n < 2**32:
                assert (n if r == 0 else n * r >> 64) == n // d, (n, d)
