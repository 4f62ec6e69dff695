"""Every core on the GPU against float64 torch: sizes, chunks, splits, scratch layouts, both dtypes."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.problems import (
    CORES,
    Problem,
    agree,
    dense,
    distances,
    error,
    gaussian,
    gradient,
    inputs,
    polynomial,
    run,
    softmax,
)

DTYPES = [torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("p", CORES, ids=str)
def test_cores(p: Problem, dtype: torch.dtype) -> None:
    for m, n in ((1, 41), (130, 300), (257, 1000), (5000, 700)):
        values = inputs(p, m, n, dtype)
        agree(p, run(p, values, m, n), values)


@pytest.mark.parametrize("p", [gaussian(3), softmax(3, 5), distances("MinArgMin", 3), distances("KMin", 3, 5)], ids=str)
def test_sizes(p: Problem) -> None:
    """Around the borders of warps, blocks, groups, tiles and splits."""
    for m in (1, 2, 31, 33, 127, 129, 512, 513):
        for n in (1, 2, 3, 5, 63, 64, 65, 127, 255, 257, 511, 1025):
            if p.plan.k <= n:
                values = inputs(p, m, n, torch.float32)
                agree(p, run(p, values, m, n), values)


@pytest.mark.parametrize("p", [gaussian(3), gaussian(3, 5), distances("LogSumExp", 3), distances("KMin", 3, 10),
                               distances("KMin", 3, 40), distances("MinArgMin", 3)], ids=str)  # fmt: skip
def test_few_rows_and_many_columns(p: Problem) -> None:
    for m, n in ((1, 1_000_003), (3, 300_000), (70, 100_000)):
        values = inputs(p, m, n, torch.float32)
        agree(p, run(p, values, m, n), values)


@pytest.mark.parametrize("p", [gaussian(3), distances("KMin", 3, 10), distances("MinArgMin", 2)], ids=str)
def test_many_rows_and_few_columns(p: Problem) -> None:
    values = inputs(p, 1_000_003, 20, torch.float32)
    agree(p, run(p, values, 1_000_003, 20), values)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d", [1, 2, 4, 8, 17, 20, 21, 31, 32, 33, 64, 100, 256, 511, 1000, 4096])
def test_dimensions(d: int, dtype: torch.dtype) -> None:
    for p in (gaussian(d), distances("MinArgMin", d), gradient(d)):
        m, n = (37, 45) if d > 500 else (150, 260)
        values = inputs(p, m, n, dtype)
        agree(p, run(p, values, m, n), values)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("e", [1, 2, 3, 7, 16, 33, 100, 512])
def test_right_hand_sides(e: int, dtype: torch.dtype) -> None:
    for p in (gaussian(3, e), softmax(3, e), gaussian(30, e)):
        values = inputs(p, 300, 420, dtype)
        agree(p, run(p, values, 300, 420), values)


@pytest.mark.parametrize("k", [1, 2, 3, 10, 16, 17, 33, 100, 300])
def test_numbers_of_neighbours(k: int) -> None:
    p = distances("KMin", 3, k)
    for m, n in ((200, 300), (5, 50_000), (5000, 400)):
        values = inputs(p, m, n, torch.float32)
        agree(p, run(p, values, m, n), values)


def test_same_bits_twice() -> None:
    for p in CORES:
        values = inputs(p, 1000, 20_000, torch.float32)
        first, second = run(p, values, 1000, 20_000), run(p, values, 1000, 20_000)
        assert all(torch.equal(a, b) for a, b in zip(first, second)), p


def test_whole_numbers_are_summed_exactly() -> None:
    p = polynomial(5)
    x, y = (t.round() for t in inputs(p, 5000, 3000, torch.float32))
    want = 3000 + x.double() @ y.double().sum(0)[:, None]
    assert torch.equal(run(p, [x, y], 5000, 3000)[0].double(), want)


def test_large_sum_is_accurate() -> None:
    """M = N = 10^6 in three dimensions, checked on a sample of rows in float64."""
    p, n = gaussian(3), 1_000_000
    x, y, b = inputs(p, n, n, torch.float32)
    for weights in (b, b.abs()):
        (got,) = run(p, [x, y, weights], n, n)
        rows = torch.arange(0, n, n // 100, device="cuda")
        want = torch.cat([dense(p, [x[r], y, weights])[0] for r in rows.split(10)])
        assert error(got[rows], want) < 1e-6


def test_more_than_two_to_the_31_pairs() -> None:
    """Indices of the nearest of 50,000 x 60,000 pairs, and of a planted one, far beyond the 2^31st pair."""
    p, m, n = distances("KMin", 3, 4), 50_000, 60_000
    x, y = inputs(p, m, n, torch.float32)
    x[-1] = y[-1]
    value, index = run(p, [x, y], m, n)
    assert index[-1, 0, 0] == n - 1 and value[-1, 0, 0] == 0
    rows = torch.arange(0, m, 997, device="cuda")
    want = torch.cdist(x[rows].double(), y.double()).square().topk(4, largest=False)
    assert error(value[rows, :, 0], want.values) < 1e-6
    assert (index[rows, :, 0] == want.indices).float().mean() > 0.999
