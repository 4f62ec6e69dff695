"""Nearest neighbours on a GPU, without one: the kernels run on the processor and give what a table of pairs gives."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

import pytest
import torch

from kernops.backends import cuda, pruned_cuda
from kernops.codegen import instantiate
from kernops.codegen import schedule as scheduling
from kernops.codegen.facts import facts
from kernops.codegen.schedule import Device, schedule
from kernops.codegen.searching import searching
from kernops.formula.graph import CAT_I, CAT_J, var
from kernops.formula.ops import apply
from kernops.formula.plan import make_plan
from tests.helpers import emulated_cuda
from tests.helpers.clouds import CLOUDS, cloud
from tests.helpers.emulated_cuda import Emulation, emulate_reductions

pytestmark = pytest.mark.skipif(emulated_cuda.missing() is not None, reason=str(emulated_cuda.missing()))

Tensor = torch.Tensor
Outs = tuple[Tensor, Tensor]
DEVICE = Device(3, 232448, (9, 0))


@pytest.fixture(autouse=True)
def emulation(monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulation]:
    emulation = emulate_reductions(monkeypatch)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # and so fills what `torch.empty` returns with NaN and the largest integer
    yield emulation
    torch.use_deterministic_algorithms(before)


def plan_of(dim: int, k: int):
    formula = apply("SqDist", var(CAT_I, 0, dim), var(CAT_J, 1, dim))
    return make_plan("KMin", formula, k=k) if k else make_plan("MinArgMin", formula)


def start(x: Tensor, y: Tensor, k: int, prepare: Callable) -> Outs:
    """What the launch of ``prepare(key, schedule)`` gives."""
    batch = x.shape[:-2]
    m, n, d = x.shape[-2], y.shape[-2], x.shape[-1]
    sizes = (math.prod(batch),)
    plan = plan_of(d, k)
    brute = schedule(facts(plan), m, n, sizes[0], x.element_size(), DEVICE)
    launch = prepare((plan, x.dtype, "cpu", m, n, sizes), brute)
    steps = [(t.stride(0), *t.stride()[-2:]) for t in (x, y)] if batch else None
    value, index = launch([x, y], steps, tuple(batch))
    return value.squeeze(-1), index.squeeze(-1)


def pruned(x: Tensor, y: Tensor, k: int, **changed: object) -> Outs:
    batch = math.prod(x.shape[:-2])
    s = searching(k or 1, x.shape[-1], x.shape[-2], y.shape[-2], batch, bool(changed))
    s = dataclasses.replace(s, **changed)  # type: ignore[arg-type]
    return start(x, y, k, lambda key, brute: pruned_cuda.prepare(key, brute, s))


def compared(x: Tensor, y: Tensor, k: int, **changed: object) -> Outs:
    """By comparing all pairs; ``changed`` in the schedule."""

    def prepare(key: tuple, brute):
        brute = dataclasses.replace(brute, **changed)
        text = instantiate.source(key[0], brute, x.element_size(), 1)
        return cuda._launch(key, brute, {name: (text, name) for name in instantiate.kernels(brute)})  # type: ignore[misc]

    return start(x, y, k, prepare)


def table(x: Tensor, y: Tensor, k: int) -> Outs:
    """From a table of all pairs, summed in the order of the formula; there is no fused operation here nor there."""
    squares = torch.zeros(*x.shape[:-1], y.shape[-2], dtype=x.dtype)
    for d in range(x.shape[-1]):
        difference = x[..., :, None, d] - y[..., None, :, d]
        squares = squares + difference * difference
    value, index = torch.sort(squares, dim=-1, stable=True)
    value, index = value[..., : k or 1], index[..., : k or 1]
    index = torch.where(value.isnan(), -1, index)
    return (value, index) if k else (value[..., 0], index[..., 0])


def assert_same(got: Outs, want: Outs) -> None:
    assert torch.equal(got[1], want[1])
    torch.testing.assert_close(got[0], want[0], rtol=0, atol=0, equal_nan=True)


def clouds(name: str, m: int, n: int, dim: int, dtype: str = "float32") -> tuple[Tensor, Tensor]:
    x, y = cloud(name, m, n, dim, dtype)
    return torch.as_tensor(x), torch.as_tensor(y)


@pytest.mark.parametrize("name", CLOUDS)
def test_against_a_table(name: str) -> None:
    for dim, k, dtype in ((3, 7, "float32"), (2, 40, "float64"), (1, 0, "float32")):
        x, y = clouds(name, 120, 900, dim, dtype)
        want = table(x, y, k)
        assert_same(pruned(x, y, k), want)
        assert_same(compared(x, y, k), want)


@pytest.mark.parametrize(("k", "constants", "place"), [
    (7, {"FEW_ROWS_OF_LISTS": 0}, "registers"), (40, {"WARP_LIST": 0, "REGISTER_LIST": 16}, "heap"),
])  # fmt: skip
@pytest.mark.parametrize("name", ["normal", "copies", "integers", "infinite", "offset"])
def test_lists_of_threads(
    name: str, k: int, constants: dict[str, int], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one row a thread and with two, whole blocks and parts of them."""
    for constant, value in constants.items():
        monkeypatch.setattr(scheduling, constant, value)
    for m, rows in ((150, 1), (300, 2)):
        x, y = clouds(name, m, 700, 3)
        monkeypatch.setattr(scheduling, "ROWS_FOR_EACH", m // rows)
        s = schedule(facts(plan_of(3, k)), m, 700, 1, 4, DEVICE)
        assert s.list == place and s.rows in (1, rows)
        assert_same(compared(x, y, k), table(x, y, k))


@pytest.mark.parametrize("n", [1, 31, 32, 33, 1024, 1025, 32 * 1024 + 1])  # where a level is full
def test_sizes_of_whole_levels(n: int) -> None:
    k = min(n, 3)
    x, y = clouds("integers", 33, n, 2)
    assert_same(pruned(x, y, k), table(x, y, k))


@pytest.mark.parametrize("k", [1, 31, 32, 33, 64, 100, 300])
def test_numbers_of_neighbours(k: int) -> None:
    x, y = clouds("normal", 9, 400, 2)
    x[3], y[::3] = math.nan, y[0]
    assert_same(pruned(x, y, k), table(x, y, k))
    assert_same(compared(x, y, k), table(x, y, k))
    y[5:] = math.nan  # fewer than k are left
    assert_same(pruned(x, y, k), table(x, y, k))
    assert_same(compared(x, y, k), table(x, y, k))


def test_rows_that_are_the_columns_and_strides() -> None:
    _, y = clouds("copies", 1, 300, 3)
    assert_same(pruned(y, y, 5), table(y, y, 5))
    wide = torch.cat([y, y], 1)[:, ::2]
    assert_same(pruned(wide, y, 5), table(wide, y, 5))


def test_batches() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(3, 40, 2), torch.randn(3, 1100, 2)
    assert_same(pruned(x, y, 4), table(x, y, 4))
    one = y[:1].expand(3, -1, -1)
    assert_same(pruned(x, one, 4), table(x, one, 4))


@pytest.mark.parametrize("all_work", [-1, 10**9])
def test_a_trial_decides_who_does_the_work(all_work: int) -> None:
    """Both ways give the same; ``stride`` and ``most_work`` leave rows of the trial incomplete."""
    for k in (4, 40):
        x, y = clouds("normal", 300, 1500, 3)
        assert_same(pruned(x, y, k, trial=True, all_work=all_work, stride=7, most_work=3), table(x, y, k))


@pytest.mark.parametrize("splits", [1, 2, 5])
def test_columns_may_be_split(splits: int) -> None:
    x, y = clouds("integers", 20, 1200, 2)
    span = -(-1200 // splits // 32) * 32
    changes = {"splits": splits, "span": span, "scratch": 20 * splits * 6 if splits > 1 else 0}
    got = compared(x, y, 6, **changes, row_blocks=5, blocks=5 * splits, rows=1)
    assert_same(got, table(x, y, 6))


def test_infinite_and_negative_values() -> None:
    """Values of any sign, through lists of warps."""
    plan = make_plan("KMin", var(CAT_J, 0, 1), k=20)
    y = torch.cat([torch.full((30,), math.inf), torch.arange(-5.0, 5.0), torch.full((9,), -math.inf)])[:, None]
    s = schedule(facts(plan), 2, 49, 1, 4, DEVICE)
    text = instantiate.source(plan, s, 4, 1)
    launch = cuda._launch((plan, y.dtype, "cpu", 2, 49, (1,)), s, {k: (text, k) for k in instantiate.kernels(s)})  # type: ignore[misc]
    value, index = launch([y], None, ())
    assert s.list == "warp"
    order = torch.sort(y[:, 0], stable=True)
    assert torch.equal(index[1, :, 0], order.indices[:20]) and torch.equal(value[1, :, 0], order.values[:20])
