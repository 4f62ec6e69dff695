"""Nearest neighbours on the GPU: the pruned search gives what comparing all pairs gives, bit for bit, and is quick."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import pytest
import torch

from kernops import LazyTensor, Vi, Vj
from kernops.backends import reduce
from kernops.formula.graph import CAT_I, CAT_J, var
from kernops.formula.ops import apply
from kernops.formula.plan import make_plan
from kernops.neighbors import knn
from tests.helpers.clouds import CLOUDS, cloud

Tensor = torch.Tensor
Outs = tuple[Tensor, Tensor]
DTYPES = ["float32", "float64"]
#: What a search that leaves columns out must not be slow on.
HARD = ["clusters", "far-apart queries", "copies", "lines"]


def nearest(x: Tensor, y: Tensor, k: int, algorithm: str) -> Outs:
    plan = make_plan(
        "KMin", apply("SqDist", var(CAT_I, 0, x.shape[-1]), var(CAT_J, 1, x.shape[-1])), k=k, algorithm=algorithm
    )
    value, index = reduce(plan, [x, y], x.shape[-2], y.shape[-2], "cuda")
    return value.squeeze(-1), index.squeeze(-1)


def assert_same(got: Outs, want: Outs) -> None:
    assert torch.equal(got[1], want[1])
    assert torch.equal(got[0].nan_to_num(-1), want[0].nan_to_num(-1))


def clouds(name: str, m: int, n: int, dim: int, dtype: str = "float32") -> tuple[Tensor, Tensor]:
    return tuple(torch.as_tensor(t).cuda() for t in cloud(name, m, n, dim, dtype))  # type: ignore[return-value]


def table(x: Tensor, y: Tensor, k: int) -> Outs:
    squares = ((x[:, None].double() - y.double()) ** 2).sum(-1)
    value, index = torch.sort(squares, dim=-1, stable=True)
    return value[:, :k], index[:, :k]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 3, 8])
@pytest.mark.parametrize("name", CLOUDS)
def test_is_brute_force_to_the_last_bit(name: str, dim: int, dtype: str) -> None:
    x, y = clouds(name, 900, 5000, dim, dtype)
    assert_same(nearest(x, y, 7, "pruned"), nearest(x, y, 7, "brute"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["normal", "clusters", "far-apart queries", "lines", "offset", "integers", "copies"])
def test_values_of_float64_torch(name: str, dtype: str) -> None:
    x, y = clouds(name, 500, 4000, 3, dtype)
    want = table(x, y, 10)
    for algorithm in ("pruned", "brute"):
        value, index = nearest(x, y, 10, algorithm)
        torch.testing.assert_close(value.double(), want[0], rtol=1e-5 if dtype == "float32" else 1e-12, atol=0)
        if dtype == "float64" and name in ("normal", "integers", "copies", "clusters"):
            assert torch.equal(index, want[1])


def test_recall_far_from_the_origin() -> None:
    """Float32 points at offset 1000: every neighbour is among the nearest in float64."""
    x, y = clouds("offset", 2000, 50_000, 3)
    for algorithm in ("pruned", "brute"):
        _, index = nearest(x, y, 10, algorithm)
        bound = torch.cat([table(part, y, 10)[0][:, -1:] for part in x.split(250)])
        own = ((x[:, None].double() - y[index].double()) ** 2).sum(-1)
        assert (own <= bound * (1 + 1e-6)).all()
        assert (index.sort(-1).values.diff(dim=-1) > 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 2, 10, 31, 32, 33, 50, 64, 100, 300])
def test_numbers_of_neighbours(k: int, dtype: str) -> None:
    for name in ("normal", "integers", "infinite", "one point"):
        x, y = clouds(name, 300, 2000, 2, dtype)
        assert_same(nearest(x, y, k, "pruned"), nearest(x, y, k, "brute"))


def test_few_rows_or_few_columns() -> None:
    for m, n in ((1, 1), (1, 70_000), (3, 33), (70_000, 1), (2000, 31), (5, 1025)):
        x, y = clouds("integers", m, n, 3)
        assert_same(nearest(x, y, 1, "pruned"), nearest(x, y, 1, "brute"))


def test_ties_go_to_the_lowest_index() -> None:
    x, y = torch.zeros(500, 3, device="cuda"), torch.ones(100_000, 3, device="cuda")
    for algorithm in ("pruned", "brute", "auto"):
        value, index = nearest(x, y, 20, algorithm)
        assert torch.equal(index, torch.arange(20, device="cuda").expand(500, 20)) and (value == 3).all()


def test_nan_is_nobodys_neighbour() -> None:
    x, y = clouds("normal", 400, 3000, 3)
    x[7, 1] = y[::2, 0] = math.nan
    for algorithm in ("pruned", "brute"):
        value, index = nearest(x, y, 40, algorithm)
        assert (index[7] == -1).all() and value[7].isnan().all()
        others = torch.cat([index[:7], index[8:]])
        assert (others % 2 == 1).all()
    y[50:] = math.nan
    assert_same(nearest(x, y, 40, "pruned"), nearest(x, y, 40, "brute"))


@pytest.mark.parametrize("batch", [((3, 1), (2,)), ((2,), (2,)), ((), (4,))])
def test_batches(batch: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    x, y = torch.rand(*batch[0], 70, 2, device="cuda"), torch.rand(*batch[1], 1500, 2, device="cuda")
    got, want = (nearest(x, y, 5, algorithm) for algorithm in ("pruned", "brute"))
    assert got[0].shape == (*torch.broadcast_shapes(*batch), 70, 5)
    assert_same(got, want)


def test_through_the_front_ends() -> None:
    x, y = clouds("clusters", 60_000, 60_000, 3)  # enough for auto to try
    lazy: LazyTensor = Vi(x).sqdist(Vj(y))
    value, index = lazy.Kmin_argKmin(7, dim=1)
    assert_same((value, index), nearest(x, y, 7, "brute"))
    assert torch.equal(lazy.argmin(dim=1), index[:, :1])
    assert torch.equal(lazy.argKmin(7, dim=0), nearest(y, x, 7, "brute")[1])
    distances, found = knn(x, y, 7, algorithm="pruned")
    assert torch.equal(found, index)
    torch.testing.assert_close(distances, value.sqrt())
    assert torch.equal(knn(x, x, 3, exclude_self=True)[1], knn(x, x, 3, exclude_self=True, algorithm="brute")[1])


def test_says_what_it_does_not_take() -> None:
    x = torch.zeros(2000, 17, device="cuda")
    with pytest.raises(ValueError, match="at most 16 features"):
        nearest(x, x, 2, "pruned")
    with pytest.raises(ValueError, match="at most 512 neighbours on a GPU; got 600"):
        nearest(x[:, :3], x[:, :3], 600, "pruned")
    product = make_plan("KMin", apply("Dot", var(CAT_I, 0, 2), var(CAT_J, 1, 2)), k=2, algorithm="pruned")
    with pytest.raises(ValueError, match="'pruned' is for squared distances"):
        reduce(product, [x[:, :2], x[:, :2]], 2000, 2000, "cuda")


def test_same_bits_and_nothing_waits() -> None:
    x, y = clouds("normal", 60_000, 60_000, 3)
    want = nearest(x, y, 10, "auto")
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = nearest(x, y, 10, "auto")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same(again, want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = nearest(x, y, 10, "auto")
    x.copy_(clouds("centre of a sphere", 60_000, 60_000, 3)[0])  # other data, perhaps another way of computing it
    y.copy_(clouds("centre of a sphere", 60_000, 60_000, 3)[1])
    graph.replay()
    assert_same(captured, nearest(x, y, 10, "brute"))


def test_memory_is_linear() -> None:
    x, y = clouds("normal", 200_000, 200_000, 3)
    nearest(x, y, 10, "pruned")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    nearest(x, y, 10, "pruned")
    assert torch.cuda.max_memory_allocated() - before < 400_000 * 160 + (16 << 20)


# --- speed ------------------------------------------------------------------------------------------------------------
def milliseconds(call: Callable[[], object], repeats: int = 5) -> float:
    call()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


@pytest.mark.parametrize("k", [10, 50])
@pytest.mark.parametrize("name", [*HARD, "normal"])
def test_auto_is_not_slower_than_brute_force(name: str, k: int) -> None:
    x, y = clouds(name, 100_000, 100_000, 3)
    auto, brute = (milliseconds(lambda a=a: nearest(x, y, k, a)) for a in ("auto", "brute"))  # type: ignore[misc]
    print(f"{name}, k = {k}: auto {auto:.2f} ms, brute force {brute:.2f} ms")
    assert auto < 1.1 * brute


def test_the_loss_is_bounded_where_nothing_can_be_left_out() -> None:
    x, y = clouds("centre of a sphere", 100_000, 100_000, 3)
    auto, brute = (milliseconds(lambda a=a: nearest(x, y, 10, a)) for a in ("auto", "brute"))  # type: ignore[misc]
    assert auto < 1.2 * brute
