"""Nearest neighbours in many dimensions on matrix units: bit for bit what comparing all pairs gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernops.backends import cuda, nearest, reduce
from kernops.codegen import nearest as sizes
from kernops.formula.graph import CAT_I, CAT_J, var
from kernops.formula.ops import apply
from kernops.formula.plan import Plan, make_plan

Tensor = torch.Tensor
N = 12_000


def plan(dim: int, k: int) -> Plan:
    squares = apply("SqDist", var(CAT_I, 0, dim), var(CAT_J, 1, dim))
    return make_plan("KMin" if k else "MinArgMin", squares, k=k)


def cloud(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).cuda()


@pytest.fixture
def agree(monkeypatch: pytest.MonkeyPatch) -> Callable[[Plan, Tensor, Tensor], None]:
    def compare(p: Plan, x: Tensor, y: Tensor) -> None:
        m, n = x.shape[-2], y.shape[-2]
        batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
        cuda._launches.clear()
        got = reduce(p, [x, y], m, n, "cuda", batch)
        assert any(isinstance(launch, nearest.Search) for launch in cuda._launches.values())
        with monkeypatch.context() as patch:
            cuda._launches.clear()
            patch.setattr(nearest, "search", lambda *given: None)
            want = reduce(p, [x, y], m, n, "cuda", batch)
            cuda._launches.clear()
        torch.testing.assert_close(got[0], want[0], rtol=0, atol=0, equal_nan=True)
        assert torch.equal(got[1], want[1])

    return compare


@pytest.mark.parametrize("dim, k", [(16, 1), (33, 10), (64, 10), (64, 0), (100, 33), (130, 64), (1000, 10)])
def test_dimensions_and_neighbours(agree: Callable, dim: int, k: int) -> None:
    agree(plan(dim, k), cloud(0, N, dim), cloud(1, N + 5000, dim))


def test_clouds_anywhere_and_of_any_size(agree: Callable) -> None:
    p, x, y = plan(64, 10), cloud(2, N, 64), cloud(3, N, 64)
    for move, scale in ((1000, 1), (1e4, 1), (0, 1e-6), (0, 1e6), (0, 1e-30), (0, 1e30)):
        agree(p, scale * (x + move), scale * (y + move))
    agree(p, x, y + 50)


def test_against_float64(agree: Callable) -> None:
    x, y = cloud(4, N, 64) + 1000, cloud(5, N, 64) + 1000
    got = reduce(plan(64, 10), [x, y], N, N, "cuda")[1][:500, :, 0]
    squares = torch.cdist(x[:500].double(), y.double(), compute_mode="donot_use_mm_for_euclid_dist")
    assert torch.equal(got.sort(1).values, squares.topk(10, largest=False).indices.sort(1).values)


def test_many_equal_points_and_clusters(agree: Callable) -> None:
    p, x, y, centres = plan(64, 10), cloud(6, N, 64), cloud(7, N, 64), cloud(8, 60, 64).repeat(N // 60, 1)
    agree(p, torch.ones_like(x), torch.ones_like(y))
    agree(p, x, y[:120].repeat(100, 1))
    agree(p, torch.cat([x[: N // 2], 0 * x[N // 2 :]]), torch.cat([y[: N // 2], 0 * y[N // 2 :]]))
    for size in (0.3, 0.1, 0.01, 0.001):
        agree(p, centres + size * x, centres + size * y)


def test_numbers_that_are_none_or_huge(agree: Callable) -> None:
    x, y = cloud(9, N, 64), cloud(10, N, 64)
    y[7, 3], x[5, 2], x[9, 1], y[11, 0], x[12, 3] = 1e30, 1e6, torch.nan, torch.inf, torch.inf
    y[::50, 2] = torch.nan
    agree(plan(64, 10), x, y)
    agree(plan(64, 10), x, torch.full_like(y, torch.nan))


def test_layouts_batches_and_slabs(agree: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    p = plan(64, 10)
    agree(p, cloud(11, 64, N).T, cloud(12, N, 130)[:, 1:65])
    scales = torch.tensor([1, 1e-3, 1e3], device="cuda")[:, None, None, None]
    monkeypatch.setattr(sizes, "SLAB_BYTES", 1 << 22)
    sizes.schedule.cache_clear()
    agree(p, cloud(13, 3, 2, 5000, 64) * scales, cloud(14, 2, 7000, 64))
    sizes.schedule.cache_clear()


def test_nothing_waits_for_the_device() -> None:
    p, x, y = plan(64, 10), cloud(15, N, 64), cloud(16, N, 64)
    want = reduce(p, [x, y], N, N, "cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = reduce(p, [x, y], N, N, "cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = reduce(p, [x, y], N, N, "cuda")
    for k in range(2):
        x.copy_(cloud(15 + 10 * k, N, 64))
        graph.replay()
    want_other = reduce(p, [x, y], N, N, "cuda")
    assert all(torch.equal(a, b) for a, b in zip((*want, *want_other), (*again, *captured)))
