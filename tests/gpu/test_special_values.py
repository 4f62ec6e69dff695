"""Ties, NaN, infinities and the ends of ranges on the GPU."""

from __future__ import annotations

import math

import pytest
import torch

from kernops.backends import reduce
from kernops.formula.graph import CAT_J, var
from kernops.formula.plan import make_plan
from tests.gpu.problems import distances, run

NAN, INF = math.nan, math.inf
KS = [1, 3, 20]


def column(values: list[float] | torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.as_tensor(values, dtype=dtype, device="cuda")[:, None]


def of_columns(core: str, y: torch.Tensor, k: int = 0, rows: int = 3) -> tuple[torch.Tensor, ...]:
    """The columns themselves, reduced for a few rows that are all alike; the result of one."""
    outs = reduce(make_plan(core, var(CAT_J, 0, 1), k=k), [y], rows, len(y), backend="cuda")
    assert all(torch.equal(o[0].nan_to_num(7e7), o[-1].nan_to_num(7e7)) for o in outs)
    return tuple(o[0, ..., 0].cpu() for o in outs)


@pytest.mark.parametrize("n", [50, 100_000])  # with one split and with many
def test_ties_go_to_the_lowest_index(n: int) -> None:
    y = column(torch.arange(n) % 7)
    value, index = of_columns("MinArgMin", y)
    assert value == 0 and index == 0
    for k in KS:
        value, index = of_columns("KMin", y, k)
        assert torch.equal(index, torch.sort(torch.arange(n) % 7, stable=True).indices[:k]), k


@pytest.mark.parametrize("n", [40, 100_000])
def test_nan_is_never_chosen_but_propagates(n: int) -> None:
    y = torch.arange(n, dtype=torch.float32).flip(0)
    y[-2:] = NAN
    y = column(y)
    assert torch.equal(of_columns("MinArgMin", y)[1], torch.tensor(n - 3))
    for k in KS:
        assert torch.equal(of_columns("KMin", y, k)[1], torch.arange(n - 3, n - 3 - k, -1))
    for core in ("Min", "Sum", "LogSumExp"):
        assert of_columns(core, y)[0].isnan(), core


@pytest.mark.parametrize("n", [30, 100_000])
def test_places_that_nothing_fills(n: int) -> None:
    y = torch.full((n,), NAN)
    value, index = of_columns("MinArgMin", column(y))
    assert value.isnan() and index == -1
    y[5], y[n - 1] = INF, 2.0
    for k in KS:
        value, index = of_columns("KMin", column(y), k)
        assert index.tolist() == [n - 1, 5, *[-1] * k][:k]
        assert torch.equal(value.nan_to_num(-1, posinf=9), torch.tensor([2.0, 9.0, *[-1.0] * k])[:k])


@pytest.mark.parametrize("n", [30, 100_000])
def test_infinities(n: int) -> None:
    low = torch.full((n,), -INF)
    assert of_columns("LogSumExp", column(low))[0] == -INF
    low[n - 1] = 3.0
    assert of_columns("LogSumExp", column(low))[0] == 3.0
    assert of_columns("LogSumExp", column([-INF, INF, 0.0]))[0] == INF
    for core in ("Sum", "Min"):
        assert of_columns(core, column([1.0, -INF, 2.0]))[0] == -INF
    assert of_columns("Sum", column([INF, 1.0] * 600))[0] == INF
    assert of_columns("Sum", column([INF, -INF]))[0].isnan()


def test_softmax_of_large_scores() -> None:
    s, w = var(CAT_J, 0, 1), var(CAT_J, 1, 2)
    scores = column([1e4, -1e4, 1e4, 0.0])
    weights = torch.tensor([[1.0, 2.0], [9.0, 9.0], [3.0, 6.0], [9.0, 9.0]], device="cuda")
    value, lse = reduce(make_plan("SumSoftMaxWeight", s, w), [scores, weights], 2, 4, backend="cuda")
    torch.testing.assert_close(value[1].cpu(), torch.tensor([2.0, 4.0]))
    assert lse[0, 0].item() == pytest.approx(1e4 + math.log(2))


def test_no_rows_or_no_columns() -> None:
    empty, full = torch.zeros(0, 3, device="cuda"), torch.zeros(4, 3, device="cuda")
    for core, identity in (("Min", INF), ("LogSumExp", -INF)):
        p = distances(core, 3)
        assert run(p, [full, empty], 4, 0)[0].tolist() == [[identity]] * 4
        assert run(p, [empty, full], 0, 4)[0].shape == (0, 1)


@pytest.mark.parametrize("value", [1, 3])
def test_identical_columns_do_not_slow_down_or_loop(value: int) -> None:
    y = column(torch.full((200_000,), float(value)))
    assert of_columns("KMin", y, 20)[1].tolist() == list(range(20))
