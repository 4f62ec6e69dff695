"""Long sums over components on the CPU: squared distances and dot products in many dimensions, and what uses them.

Reference values are those of the torch back end in float64.
"""

from __future__ import annotations

import math
import platform

import pytest
import torch

from kernops.backends import cpu, reduce
from kernops.codegen.contraction import squares
from kernops.codegen.host_schedule import Machine
from kernops.formula.graph import CAT_I, CAT_J, CAT_P, Node, var
from kernops.formula.ops import apply, mul, neg, sub
from kernops.formula.plan import Plan, make_plan
from kernops.lazy import LazyTensor

F32, F64 = torch.float32, torch.float64
REASON = cpu.available(torch.device("cpu"))
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


def _rand(*shape: int, seed: int = 0, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def _sqdist(dim: int) -> Node:
    return apply("SqDist", var(CAT_I, 0, dim), var(CAT_J, 1, dim))


def _dot(dim: int) -> Node:
    return apply("Dot", var(CAT_I, 0, dim), var(CAT_J, 1, dim))


def _kernel(dim: int) -> Node:
    return apply("Exp", mul(-1.0 / dim, _sqdist(dim)))


def _laplacian(dim: int) -> Node:
    difference = sub(var(CAT_I, 0, dim), var(CAT_J, 1, dim))
    return apply("Exp", mul(-1.0 / dim, apply("Sum", apply("Abs", difference))))


def _plan(core: str, dim: int, width: int = 1) -> Plan:
    if core == "Sum":
        return make_plan("Sum", mul(_kernel(dim), var(CAT_J, 2, width)))
    if core == "SumSoftMaxWeight":
        return make_plan(core, mul(-1.0 / dim, _sqdist(dim)), var(CAT_J, 2, width))
    return make_plan(core, mul(1.0 / dim, _sqdist(dim)), k=5 if core == "KMin" else 0, n_vars=3)


def _check(plan: Plan, tensors: list[torch.Tensor], m: int, n: int, rtol: float, batch: tuple[int, ...] = ()) -> None:
    got = reduce(plan, tensors, m, n, "cpu", batch)
    for g, w in zip(got, reduce(plan, [t.double() for t in tensors], m, n, "tiled", batch)):
        if g.is_floating_point():
            torch.testing.assert_close(g.double(), w, rtol=rtol, atol=rtol, equal_nan=True)
        else:
            assert torch.equal(g, w)


CORES = ["Sum", "Min", "MinArgMin", "LogSumExp", "SumSoftMaxWeight", "KMin"]


@pytest.mark.parametrize("core", CORES)
def test_sizes_around_those_of_blocks(core: str) -> None:
    for dtype, dim, rtol in ((F32, 33, 1e-5), (F64, 64, 1e-13)):
        for m, n in ((1, 7), (5, 63), (6, 64), (7, 65), (200, 130), (13, 20_011)):
            tensors = [_rand(m, dim, dtype=dtype), _rand(n, dim, seed=1, dtype=dtype), _rand(n, 1, seed=2, dtype=dtype)]
            _check(_plan(core, dim), tensors, m, n, rtol)


@pytest.mark.parametrize("dim", [11, 12, 13, 65, 255, 257, 784])
def test_dimensions(dim: int) -> None:
    m, n = 38, 301
    tensors = [_rand(m, dim), _rand(n, dim, seed=1), _rand(n, 1, seed=2)]
    for core in ("Sum", "KMin"):
        _check(_plan(core, dim), tensors, m, n, 1e-5)


@pytest.mark.parametrize("core", ["Sum", "SumSoftMaxWeight"])
@pytest.mark.parametrize("width", [2, 4, 5, 33])
def test_right_hand_sides(core: str, width: int) -> None:
    """Few are summed pair by pair, many in stages."""
    m, n, dim = 45, 700, 20
    _check(_plan(core, dim, width), [_rand(m, dim), _rand(n, dim, seed=1), _rand(n, width, seed=2)], m, n, 1e-5)


def _formulas(dim: int) -> dict[str, Node]:
    w, x, y = var(CAT_P, 3, dim), var(CAT_I, 0, dim), var(CAT_J, 1, dim)
    cosine = mul(_dot(dim), apply("Rsqrt", apply("SqNorm2", y)))
    half = apply("Sum", apply("Square", sub(apply("Extract", x, params=(3, 15)), apply("Extract", y, params=(1, 15)))))
    return {
        "polynomial": apply("Square", mul(1.0 / dim, _dot(dim))),
        "cosine": cosine,
        "laplacian": _laplacian(dim),
        "two sums": mul(_laplacian(dim), mul(1.0 / dim, _dot(dim))),
        "weights": apply("Exp", mul(-1.0 / dim, apply("WeightedSqDist", apply("Square", w), x, y))),
        "some components": apply("Exp", neg(half)),
        "a sum alone": _sqdist(dim),
    }


@pytest.mark.parametrize("name", _formulas(20))
def test_formulas(name: str) -> None:
    m, n, dim = 29, 400, 20
    plan = make_plan("Sum", mul(_formulas(dim)[name], var(CAT_J, 2, 1)), n_vars=4)
    _check(plan, [_rand(m, dim), _rand(n, dim, seed=1), _rand(n, 1, seed=2), _rand(dim, seed=3)], m, n, 2e-5)


def test_a_long_formula_after_a_sum() -> None:
    """It is evaluated one row at a time, alone and as the weight of components."""
    m, n, dim = 31, 200, 24
    f = mul(1.0 / dim, _sqdist(dim))
    for k in range(40):
        f = apply("Sin", mul(1.0 + 0.01 * k, apply("Add", f, 0.1 * k)))
    for width in (1, 9):
        plan = make_plan("Sum", mul(f, var(CAT_J, 2, width)))
        tensors = [_rand(m, dim, dtype=F64), _rand(n, dim, seed=1, dtype=F64), _rand(n, width, seed=2, dtype=F64)]
        _check(plan, tensors, m, n, 1e-11)


# --- precision --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dim", [64, 784])
def test_neighbours_far_from_the_origin(dim: int) -> None:
    """At offset 1000, |x|² + |y|² - 2xy has no digit of these distances left; every neighbour is found all the same."""
    m, n, k = 100, 2000, 10
    x, y = _rand(m, dim) + 1000, _rand(n, dim, seed=1) + 1000
    y[n // 2 : n // 2 + 200] = y[:200]  # equals: the lowest index comes first
    got = reduce(make_plan("KMin", _sqdist(dim), k=k), [x, y], m, n, "cpu")
    want = ((x.double()[:, None] - y.double()[None]) ** 2).sum(-1).sort(dim=1, stable=True)
    torch.testing.assert_close(got[0][..., 0].double(), want.values[:, :k], rtol=1e-6, atol=0)
    assert torch.equal(got[1][..., 0], want.indices[:, :k])


def test_a_gaussian_far_from_the_origin() -> None:
    m, n, dim = 50, 3000, 64
    x, y, b = _rand(m, dim) / 8 + 1000, _rand(n, dim, seed=1) / 8 + 1000, _rand(n, 1, seed=2).abs()
    got = reduce(make_plan("Sum", mul(apply("Exp", neg(_sqdist(dim))), var(CAT_J, 2, 1))), [x, y, b], m, n, "cpu")[0]
    want = torch.exp(-((x.double()[:, None] - y.double()[None]) ** 2).sum(-1)) @ b.double()
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=0)


def test_thousands_of_components_round_like_hundreds() -> None:
    """Partial sums of 256 components: a plain sum of 100 000 equals would be off by 1e-4."""
    dim = 100_000
    x, y = torch.full((3, dim), 0.1), torch.zeros(5, dim)
    value = reduce(make_plan("Min", _sqdist(dim)), [x, y], 3, 5, "cpu")[0]
    want = dim * float(x[0, 0].double() ** 2)
    assert abs(float(value[0, 0]) / want - 1) < 3e-6


def test_not_finite() -> None:
    m, n, dim = 20, 300, 64
    x, y, b = _rand(m, dim), _rand(n, dim, seed=1), _rand(n, 1, seed=2)
    y[5, 63], y[77, 0], y[200, 31] = math.nan, math.inf, -math.inf
    x[3, 17] = math.nan
    for core in ("Min", "MinArgMin", "LogSumExp", "KMin"):
        _check(_plan(core, dim), [x, y, b], m, n, 1e-5)
    y[5, 63] = 0.0
    _check(_plan("Sum", dim), [x, y, b], m, n, 1e-5)


# --- batches, gradients, threads, machines ----------------------------------------------------------------------------
@pytest.mark.parametrize("core", ["Sum", "KMin"])
def test_batches(core: str) -> None:
    m, n, dim = 11, 90, 40
    x, y, b = _rand(3, 1, m, dim), _rand(2, n, dim, seed=1), _rand(n, 1, seed=2)
    _check(_plan(core, dim), [x, y, b], m, n, 1e-5, (3, 2))


def test_gradients() -> None:
    """Of first and second order, in every variable: sums of vectors with a long sum in their weight."""
    m, n, dim = 17, 150, 48

    def values(dtype: torch.dtype, backend: str) -> list[torch.Tensor]:
        x, y = (t.to(dtype).requires_grad_() for t in (_rand(m, dim) / 7, _rand(n, dim, seed=1) / 7))
        b = _rand(n, 2, seed=2).to(dtype).requires_grad_()
        squares = ((LazyTensor(x[:, None]) - LazyTensor(y[None])) ** 2).sum(-1)
        value = (-squares).exp().__matmul__(b, backend=backend)
        first = torch.autograd.grad((value**2).sum(), (x, y, b), create_graph=True)
        second = torch.autograd.grad(torch.stack([(g**2).sum() for g in first]).sum(), (x, y, b))
        return [value, *first, *second]

    for dtype, rtol in ((F32, 2e-5), (F64, 1e-12)):
        for got, want in zip(values(dtype, "cpu"), values(F64, "tiled")):
            torch.testing.assert_close(got.double(), want, rtol=rtol, atol=rtol * float(want.detach().abs().max()))


def test_the_number_of_threads_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    m, n, dim = 700, 900, 64
    tensors = [_rand(m, dim), _rand(n, dim, seed=1), _rand(n, 1, seed=2)]
    for core in ("Sum", "KMin"):
        found = []
        for threads in ("1", "3"):
            monkeypatch.setenv("KERNOPS_NUM_THREADS", threads)
            found.append(reduce(_plan(core, dim), tensors, m, n, "cpu"))
        assert all(torch.equal(a, b) for a, b in zip(*found))


@pytest.mark.parametrize("machine", [Machine(16, 32), Machine(32, 16), Machine(16, 16)])
def test_schedules_of_other_machines(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever block of pairs they choose, it is right; here it runs with this machine's vectors."""
    monkeypatch.setattr(cpu, "_cpu", lambda: ("another", machine))
    monkeypatch.setattr(cpu, "_bindings", {})
    m, n, dim = 27, 210, 37
    for core, width in (("Sum", 1), ("Sum", 7), ("KMin", 1), ("SumSoftMaxWeight", 3)):
        tensors = [_rand(m, dim), _rand(n, dim, seed=1), _rand(n, width, seed=2)]
        _check(_plan(core, dim, width), tensors, m, n, 1e-5)


# --- neighbours by bounds ---------------------------------------------------------------------------------------------
def _clouds(dim: int, n: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    x, y = _rand(2000, dim), _rand(n, dim, seed=1)
    outlier, odd, flat = y.clone(), y.clone(), y.clone()
    outlier[7], outlier[30] = 1e20, -1e4
    odd[::97, 3], odd[5], odd[6, 0] = math.nan, math.inf, -math.inf
    flat[:, 1:] = 0
    centres = 30 * _rand(20, dim, seed=2)
    return {
        "normal": (x, y),
        "far from the origin": (x + 1000, y + 1000),
        "clusters": (centres.repeat(100, 1) + 0.01 * x, centres.repeat(n // 20, 1) + 0.01 * y),
        "sorted clusters": (
            centres.repeat_interleave(100, 0) + 0.01 * x,
            centres.repeat_interleave(n // 20, 0) + 0.01 * y,
        ),  # fmt: skip
        "far apart": (x - 5, y + 5),
        "outliers": (x, outlier),
        "not finite": (torch.cat([x[:1900], odd[:100]]), odd),
        "duplicates": (x, y[: n // 40].repeat(40, 1)),
        "one point": (x[:1].repeat(2000, 1), y),
        "a line": (x * flat[0].ne(0), flat),
        "tiny": (x * 1e-18, y * 1e-18),
        "subnormal squares": (x * 1e-21, y * 1e-21),
        "huge": (x * 1e18, y * 1e18),
        "one component is wide": (x * torch.cat([torch.full((1,), 100.0), torch.ones(dim - 1)]), y),
    }


@pytest.mark.parametrize("name", _clouds(24, 120))
def test_bounds_change_no_bit(name: str) -> None:
    """As the same distances give that no bounds are known for: a product with 1 that is not folded."""
    for dim in (24, 67):
        n = 6000
        x, y = _clouds(dim, n)[name]
        n = len(y)
        one = torch.ones(1)
        for k in (1, 10):
            got = reduce(make_plan("KMin", _sqdist(dim), k=k, n_vars=3), [x, y, one], len(x), n, "cpu")
            plain = make_plan("KMin", mul(var(CAT_P, 2, 1), _sqdist(dim)), k=k)
            want = reduce(plain, [x, y, one], len(x), n, "cpu")
            assert not squares(plain)[0]
            assert torch.equal(got[1], want[1])
            assert torch.equal(got[0].nan_to_num(-1), want[0].nan_to_num(-1))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="instructions of x86-64")
@pytest.mark.parametrize(("arch", "machine"), [("x86-64", Machine(16, 16)), ("haswell", Machine(32, 16))])
def test_processors_without_products_of_bytes(arch: str, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    if arch == "haswell" and not torch.cpu._is_avx2_supported():
        pytest.skip("no AVX2 here")
    monkeypatch.setattr(cpu, "_NATIVE", {"x86_64": f"-march={arch}"})
    monkeypatch.setattr(cpu, "_cpu", lambda: (arch, machine))
    monkeypatch.setattr(cpu, "_bindings", {})
    m, n, dim = 130, 700, 40
    for core in ("Sum", "KMin"):
        _check(_plan(core, dim), [_rand(m, dim), _rand(n, dim, seed=1), _rand(n, 1, seed=2)], m, n, 1e-5)
