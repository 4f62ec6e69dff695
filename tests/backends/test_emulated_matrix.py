"""Sums on matrix units, without a GPU: survey, packing and the kernels of warps run on the processor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch

from kernops.backends import cuda
from kernops.codegen import matrix_schedule
from kernops.codegen.matrix import matrix_form
from kernops.codegen.schedule import Device
from kernops.formula.graph import CAT_I, CAT_J, CAT_SCALAR, Node, var
from kernops.formula.ops import add, apply, mul, neg, sub, total
from kernops.formula.plan import Plan, make_plan
from tests.helpers import emulated_cuda
from tests.helpers.emulated_cuda import Emulation, emulate_reductions

pytestmark = pytest.mark.skipif(emulated_cuda.missing() is not None, reason=str(emulated_cuda.missing()))

Tensor = torch.Tensor
EXACT, NEAR, PLAIN = range(3)
#: Of compute capability 8.6, whose blocks have less shared memory than the emulation.
DEVICE = Device(3, 101376, (8, 6))


@pytest.fixture(autouse=True)
def emulation(monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulation]:
    emulation = emulate_reductions(monkeypatch)
    yield emulation


@dataclass(frozen=True)
class Case:
    """A plan over x (m, D), y (n, D), b (n, E), and the same in float64 torch."""

    name: str
    plan: Plan
    d: int
    e: int
    dense: Callable[[Tensor, Tensor, Tensor], Tensor]

    def __str__(self) -> str:
        return f"{self.name} D={self.d} E={self.e}"


def squares(x: Tensor, y: Tensor) -> Tensor:
    return ((x[:, None] - y[None]) ** 2).sum(-1)


def case(name: str, d: int, e: int = 1) -> Case:
    x, y, b = var(CAT_I, 0, d), var(CAT_J, 1, d), var(CAT_J, 2, e)
    s = mul(1 / d, apply("SqDist", x, y))
    dot, r = add(1.0, mul(1 / d, total(mul(x, y)))), apply("Extract", x, params=(0, 1))

    def of(k: Node) -> Plan:
        return make_plan("Sum", mul(k, b))

    def differences(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return x * w.sum(1, keepdim=True) - w @ y

    plan, dense = {
        "gaussian": lambda: (of(apply("Exp", neg(s))), lambda x, y, b: torch.exp(-squares(x, y) / d) @ b),
        "laplacian": lambda: (of(apply("Exp", neg(apply("Sqrt", s)))),
                              lambda x, y, b: torch.exp(-(squares(x, y) / d).sqrt()) @ b),
        "growing": lambda: (of(apply("Exp", mul(var(CAT_SCALAR, 3, 1), s))), None),
        "soft minimum": lambda: (make_plan("LogSumExp", mul(2.0, sub(b, s))),
                                 lambda x, y, b: (2 * (b[:, 0] - squares(x, y) / d)).logsumexp(1, keepdim=True)),
        "softmax": lambda: (make_plan("SumSoftMaxWeight", neg(s), b),
                            lambda x, y, b: torch.softmax(-squares(x, y) / d, 1) @ b),
        "polynomial": lambda: (of(mul(dot, dot)), lambda x, y, b: (1 + x @ y.T / d) ** 2 @ b),
        "gradient": lambda: (make_plan("Sum", mul(mul(apply("Exp", neg(s)), b), sub(x, y))),
                             lambda x, y, b: differences(torch.exp(-squares(x, y) / d) * b[:, 0], x, y)),
        "value and gradient": lambda: (
            make_plan("Sum", apply("Concat", (f := mul(apply("Exp", neg(s)), b)), mul(f, sub(y, x))), first=1),
            lambda x, y, b: torch.cat([(w := torch.exp(-squares(x, y) / d) * b[:, 0]).sum(1, keepdim=True),
                                       -differences(w, x, y)], 1)),
        "gradient by columns": lambda: (
            make_plan("Sum", apply("Concat", mul(mul(apply("Exp", neg(s)), b), mul(r, sub(x, y))),
                                   mul(apply("Exp", neg(s)), b))),
            lambda x, y, b: torch.cat([x[:, :1] * differences(w := torch.exp(-squares(x, y) / d) * b[:, 0], x, y),
                                       w.sum(1, keepdim=True)], 1)),
        "two exponentials": lambda: (  # the second of a column's number, which is no factor
            make_plan("Sum", mul(apply("Exp", neg(s)), apply("Exp", mul(apply("Extract", x, params=(0, 1)), b)))),
            lambda x, y, b: (torch.exp(-squares(x, y) / d) * torch.exp(x[:, :1] * b[:, 0])).sum(1, keepdim=True)),
        "absolute products": lambda: (of(apply("Abs", total(mul(x, y)))), lambda x, y, b: (x @ y.T).abs() @ b),
        "laplacian's gradient": lambda: (
            make_plan("Sum", mul(mul(apply("Exp", neg(apply("Sqrt", s))), b), sub(x, y))), None),
    }[name]()  # fmt: skip
    return Case(name, plan, d, e, dense)  # type: ignore[arg-type]


def run(c: Case, tensors: list, batch: tuple[int, ...] = ()) -> tuple[Tensor, list[int]]:
    """The result of the matrix kernels alone, and what they decided for each batch element."""
    m, n = tensors[0].shape[-2], tensors[1].shape[-2]
    form = matrix_form(c.plan)
    assert form is not None
    s = matrix_schedule.build(c.plan, form, m, n, math.prod(batch), DEVICE)
    assert s is not None
    launch = cuda._matrix_launch((c.plan, torch.float32, "cpu", m, n, (math.prod(batch),)), s)
    steps = cuda.collapse(batch, cuda._steps(c.plan, tensors, batch))[1] if batch else None
    results = launch.results(batch)
    survey = torch.zeros(launch.survey, dtype=torch.uint8)
    launch.submit(launch._words(tensors, steps), results, survey.data_ptr())
    step = launch.survey_step
    whole = torch.cat(results, -1) if c.plan.first else results[0]
    return whole, [int(survey[k : k + step].view(torch.int32)[5]) for k in range(0, launch.survey, step)]


def data(c: Case, m: int, n: int, offset: float = 0.0) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    x, y = (torch.randn(size, c.d, generator=g) + offset for size in (m, n))
    return [x, y, torch.randn(n, c.e, generator=g)]


def error(got: Tensor, c: Case, tensors: list[Tensor]) -> float:
    want = c.dense(*(t.double() for t in tensors[:3]))
    return float((got.double() - want).norm() / want.norm())


CASES = [
    *(case("gaussian", d, e) for d, e in ((3, 1), (7, 3), (3, 16), (11, 5), (16, 1), (64, 1), (40, 16), (150, 1))),
    case("gaussian", 150, 9),
    case("laplacian", 16), case("laplacian", 40, 5), case("soft minimum", 5), case("soft minimum", 16),
    case("softmax", 20, 2), case("polynomial", 20), case("gradient", 16),
    case("gradient", 3), case("value and gradient", 3), case("gradient by columns", 3), case("value and gradient", 20),
]  # fmt: skip


@pytest.mark.parametrize("c", [c for c in CASES if c.plan.core == "Sum" or c.d > 11], ids=str)
def test_values(c: Case) -> None:
    """Tight points and points in two parts, chunks, wide results, moments; rows and columns that fill no tile."""
    for m, n, offset in ((130, 300, 0.0), (100, 257, 1e4)):
        if c.name != "polynomial" or not offset:
            tensors = data(c, m, n, offset)
            got, modes = run(c, tensors)
            assert modes == [NEAR if c.name == "laplacian" else EXACT] and error(got, c, tensors) < 2e-6


@pytest.mark.parametrize("c", [case("gaussian", 3, 9), case("gaussian", 40, 5), case("laplacian", 16, 5)], ids=str)
def test_rows_whose_values_grow(c: Case) -> None:
    """Rows of tiny values until the last columns bring some that are millions of times as large."""
    far, spread = {3: (2.2, 0.2), 40: (2.2, 1.0)}[c.d] if c.name == "gaussian" else (18.0, 20.0)
    x, y, b = data(c, 130, 300)
    x, y = far + spread * x, spread * y - far
    y[160:] += 2 * far
    got, modes = run(c, [x, y, b])
    assert modes != [PLAIN]
    want, early = (c.dense(x.double(), y[:k].double(), b[:k].double()) for k in (300, 160))
    assert (early.norm(dim=1) / want.norm(dim=1)).median() < 1e-6
    assert ((got.double() - want).norm(dim=1) / want.norm(dim=1)).max() < 2e-5
    got, modes = run(c, [x, y.flip(0), b.flip(0)])  # and the other way round
    assert error(got, c, [x, y, b]) < 2e-6


def test_right_hand_sides_of_very_different_sizes() -> None:
    c = case("gaussian", 3, 9)
    x, y, b = data(c, 130, 300)
    b = b * torch.logspace(-30, 30, 9)
    b[128:256, 0] *= 1e-6
    b[:, 4] = 0
    got, _ = run(c, [x, y, b])
    want = c.dense(x.double(), y.double(), b.double())
    assert (got[:, 4] == 0).all()
    keep = torch.arange(9) != 4
    assert ((got.double() - want).norm(dim=0) / want.norm(dim=0))[keep].max() < 2e-6


def test_near_pairs_are_computed_anew() -> None:
    c = case("laplacian", 32)
    x, y, b = data(c, 130, 300)
    y[:100] = x[:100] + 1e-4 * y[:100]
    got, modes = run(c, [x, y, b])
    assert modes == [NEAR] and error(got, c, [x, y, b]) < 2e-6


def test_large_columns_make_no_others_near() -> None:
    c = case("laplacian", 32)
    x, y, b = data(c, 130, 300)
    y[::50] *= 5
    got, modes = run(c, [x, y, b])
    assert modes == [NEAR] and error(got, c, [x, y, b]) < 2e-6


def test_what_is_left_to_the_plain_kernels() -> None:
    for name in ("laplacian", "polynomial"):  # a point that dwarfs the others
        c = case(name, 32)
        x, y, b = data(c, 130, 300)
        x[3] *= 1e6
        assert run(c, [x, y, b])[1] == [PLAIN]
    for which, bad in ((0, math.nan), (1, math.inf), (2, math.inf)):
        c = case("gaussian", 32)
        tensors = data(c, 130, 300)
        tensors[which][5, 0] = bad
        assert run(c, tensors)[1] == [PLAIN]
    c = case("growing", 32)
    assert run(c, [*data(c, 130, 300), 0.1])[1] == [PLAIN]
    assert run(c, [*data(c, 130, 300), -0.1])[1] != [PLAIN]
    c = case("laplacian's gradient", 32)  # differences of sums that near pairs would dominate
    assert run(c, data(c, 130, 300))[1] == [PLAIN]


@pytest.mark.parametrize("d", [3, 16])
def test_numbers_of_columns_that_are_no_factors(d: int) -> None:
    """Where there is no column, exp(x 0) = 1 must not count."""
    c = case("two exponentials", d)
    tensors = data(c, 130, 300)
    got, modes = run(c, tensors)
    assert modes == [EXACT] and error(got, c, tensors) < 2e-6


@pytest.mark.parametrize("name", ["gradient", "value and gradient"])
@pytest.mark.parametrize("d", [3, 20])
def test_moments_of_tight_clusters_are_left_to_the_plain_kernels(name: str, d: int) -> None:
    """Differences of sums lose all digits that the radius of a cluster has less than its distance from the centre."""
    c = case(name, d)
    x, y, b = data(c, 130, 300)
    for radius, mode in ((1e-3, PLAIN), (0.3, EXACT)):
        where = 2 * torch.sign(x[:, :1]), 2 * torch.sign(y[:, :1])
        tensors = [where[0] + radius * x, where[1] + radius * y, b]
        got, modes = run(c, tensors)
        assert modes == [mode]
        assert mode == PLAIN or error(got, c, tensors) < 2e-6


@pytest.mark.parametrize("d", [3, 40])
def test_right_hand_sides_of_very_different_sizes_in_a_tile(d: int) -> None:
    c = case("gaussian", d, 9)
    x, y, b = data(c, 130, 300)
    b = b.abs() * 1e-13
    b[0], y[0] = 1, y[0] + 3
    got, modes = run(c, [x, y, b])
    assert modes == [PLAIN]
    b[1:] = 0  # none is lost
    got, modes = run(c, [x, y, b])
    assert modes != [PLAIN] and error(got, c, [x, y, b]) < 2e-6


def test_a_row_of_values_that_are_all_tiny_leaves_the_others_to_the_matrix_units() -> None:
    c = case("gaussian", 40, 5)
    x, y, b = data(c, 130, 300)
    x[5] += 20  # kernel values of some 2^-500
    got, modes = run(c, [x, y, b])
    assert modes != [PLAIN] and error(got, c, [x, y, b]) < 2e-6 and (got[5] == 0).all()


@pytest.mark.parametrize("factor", [1e-21, 1e-25])
def test_products_of_points_whose_norm_is_no_number(factor: float) -> None:
    c = case("absolute products", 20)
    x, y, b = data(c, 130, 300)
    x[7] *= factor
    assert run(c, [x, y, b])[1] == [PLAIN]
    x, y, b = data(c, 130, 300)
    got, modes = run(c, [x * 1e-20, y, b])
    assert modes == [PLAIN] or error(got, c, [x * 1e-20, y, b]) < 2e-6


def test_products_of_very_different_sizes() -> None:
    c = case("polynomial", 32)
    x, y, b = data(c, 130, 300)
    tensors = [1e-6 * x, 1e3 * y, b]
    got, modes = run(c, tensors)
    assert modes == [EXACT] and error(got, c, tensors) < 2e-6


def test_batch_elements_decide_for_themselves() -> None:
    c = case("gaussian", 20)
    g = torch.Generator().manual_seed(1)
    x, y, b = (
        torch.randn(3, 130, 20, generator=g),
        torch.randn(1, 200, 20, generator=g),
        torch.randn(3, 200, 1, generator=g),
    )
    x[1] += 1000
    x[2, 4, 4] = math.nan
    got, modes = run(c, [x, y, b], (3,))
    assert modes[0] == EXACT and modes[2] == PLAIN
    assert error(got[0], c, [x[0], y[0], b[0]]) < 2e-6
