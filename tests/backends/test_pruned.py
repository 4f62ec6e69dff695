"""The pruned search gives what comparing all pairs gives: the same points, distances and order among equals."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial import cKDTree

from kernops import LazyTensor, Vi, Vj
from kernops.autograd.text import plan_text, read_plan
from kernops.backends import cpu, pruned, reduce
from kernops.codegen.search import worth
from kernops.formula.graph import CAT_I, CAT_J, var
from kernops.formula.ops import apply
from kernops.formula.plan import ALGORITHMS, Plan, make_plan
from tests.helpers.clouds import CLOUDS, cloud

REASON = cpu.available(torch.device("cpu"))
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

Tensors = tuple[torch.Tensor, ...]


def found(x: np.ndarray | torch.Tensor, y: np.ndarray | torch.Tensor, k: int) -> Tensors:
    result = pruned.nearest(torch.as_tensor(x), torch.as_tensor(y), k)
    assert result is not None
    return result


def plan_of(dim: int, k: int, algorithm: str) -> Plan:
    return make_plan("KMin", apply("SqDist", var(CAT_I, 0, dim), var(CAT_J, 1, dim)), k=k, algorithm=algorithm)


def brute(x: np.ndarray, y: np.ndarray, k: int) -> Tensors:
    values, index = reduce(
        plan_of(x.shape[1], k, "brute"), [torch.as_tensor(x), torch.as_tensor(y)], len(x), len(y), "cpu"
    )
    return values.squeeze(-1), index.squeeze(-1)


def assert_same(got: Tensors, want: Tensors) -> None:
    assert torch.equal(got[1], want[1])
    torch.testing.assert_close(got[0], want[0], rtol=0, atol=0, equal_nan=True)


def table(x: np.ndarray, y: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k nearest from a table of squared distances in float64; the lowest index first among equals."""
    with np.errstate(invalid="ignore", over="ignore"):
        squares = ((x[:, None].astype(np.float64) - y.astype(np.float64)) ** 2).sum(-1)
    order = np.argsort(squares, axis=1, kind="stable")[:, :k]  # NaN last
    squares = np.take_along_axis(squares, order, axis=1)
    return squares, np.where(np.isnan(squares), -1, order)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("dim", [1, 3, 8])
@pytest.mark.parametrize("name", CLOUDS)
def test_is_brute_force_to_the_last_bit(name: str, dim: int, dtype: str) -> None:
    x, y = cloud(name, 900, 3000, dim, dtype)
    assert_same(found(x, y, 7), brute(x, y, 7))


@pytest.mark.parametrize("name", CLOUDS)
def test_against_a_table_in_float64(name: str) -> None:
    x, y = cloud(name, 200, 700, 3)
    squares, order = table(x, y, 7)
    values, index = found(x, y, 7)
    np.testing.assert_allclose(values, squares, rtol=1e-13)
    if name in ("one point", "integers", "normal", "clusters", "lines"):  # elsewhere rounding makes and breaks ties
        assert np.array_equal(index, order)


def test_recall_of_float32_far_from_the_origin() -> None:
    x, y = cloud("offset", 2000, 5000, 3, "float32")
    truth, _ = cKDTree(y.astype(np.float64)).query(x.astype(np.float64), 10)
    _, index = found(x, y, 10)
    distances = np.linalg.norm(x[:, None].astype(np.float64) - y.astype(np.float64)[index.numpy()], axis=-1)
    assert (distances <= truth[:, -1:] * (1 + 1e-7)).all()
    assert (np.diff(np.sort(index.numpy(), axis=1), axis=1) > 0).all()


# From a list in registers over one in memory to a heap, and as many as there are points.
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("k", [1, 16, 17, 40, 70, 300])
def test_any_number_of_neighbours(k: int, dtype: str) -> None:
    for name in ("normal", "integers", "infinite"):
        x, y = cloud(name, 50, max(k, 300), 2, dtype)
        assert_same(found(x, y, k), brute(x, y, k))


@given(st.integers(1, 70), st.integers(3, 140), st.integers(0, 2**32 - 1), st.sampled_from([2, 4, 1000]))
@settings(max_examples=100, deadline=None)
def test_any_sizes_and_many_ties(m: int, n: int, seed: int, sides: int) -> None:
    rng = np.random.default_rng(seed)
    x, y = (rng.integers(0, sides, (count, 2)).astype(float) for count in (m, n))
    squares, order = table(x, y, 3)
    values, index = found(x, y, 3)
    assert np.array_equal(values, squares)
    assert np.array_equal(index, order)


@pytest.mark.parametrize("n", [16 * 32 - 1, 16 * 32, 16 * 32 + 1, 16 * 16 * 32 + 1])  # where a level is full
def test_sizes_of_whole_levels(n: int) -> None:
    x, y = cloud("normal", 100, n, 2)
    squares, order = table(x, y, 3)
    values, index = found(x, y, 3)
    np.testing.assert_allclose(values, squares, rtol=1e-13)
    assert np.array_equal(index, order)


@pytest.mark.parametrize("name", ["normal", "copies", "infinite"])
def test_any_number_of_threads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = cloud(name, 9000, 20000, 3, "float32")
    results = []
    for threads in ("1", "2", "7"):
        monkeypatch.setenv("KERNOPS_NUM_THREADS", threads)
        results.append(found(x, y, 7))
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


@pytest.mark.parametrize("name", CLOUDS)
def test_points_that_are_the_queries(name: str) -> None:
    _, y = cloud(name, 1, 2000, 3, "float32")
    assert_same(found(y, y, 7), found(y.copy(), y, 7))


def test_rows_and_components_with_strides() -> None:
    x, y = cloud("normal", 500, 700, 3)
    want = found(x, y, 7)
    assert_same(found(np.asfortranarray(x), np.repeat(y, 2, axis=0)[::2], 7), want)
    wide = torch.as_tensor(np.repeat(x, 3, axis=1))[:, ::3]
    assert_same(found(wide, y, 7), want)
    one = torch.as_tensor(x[:1]).expand(500, 3)
    assert_same(found(one, y, 7), found(np.repeat(x[:1], 500, axis=0), y, 7))


def test_nothing_to_find() -> None:
    x, y = cloud("normal", 20, 30, 3)
    values, index = found(x, np.full_like(y, np.nan), 7)
    assert values.isnan().all()
    assert (index == -1).all()
    assert found(x[:0], y, 7)[1].shape == (0, 7)


def test_is_given_up_where_it_looks_at_nearly_all() -> None:
    for name, worth_it in (("normal", True), ("copies", True), ("lines", True), ("centre of a sphere", False)):
        x, y = (torch.as_tensor(t) for t in cloud(name, 4000, 8000, 3, "float32"))
        assert (pruned.nearest(x, y, 7, (), worth(8000, 3, 7)) is not None) == worth_it


# --- as an algorithm of reductions ------------------------------------------------------------------------------------
Searches = list[Any]


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> Searches:
    """What pruned searches gave."""
    results: Searches = []
    nearest = pruned.nearest

    def spy(*arguments: Any) -> Any:
        results.append(nearest(*arguments))
        return results[-1]

    monkeypatch.setattr(pruned, "nearest", spy)
    return results


FORMULAS: dict[str, Callable[[LazyTensor, LazyTensor], LazyTensor]] = {
    "(x - y)²": lambda x, y: ((x - y) ** 2).sum(-1),
    "(y - x)²": lambda x, y: ((y - x) ** 2).sum(-1),
    "sqdist": lambda x, y: x.sqdist(y),
    "sqnorm2": lambda x, y: (x - y).sqnorm2(),
}


@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("dim", [1, 3])
def test_minima_of_squared_distances_are_pruned(formula: str, dim: int, searches: Searches) -> None:
    x, y = (torch.as_tensor(t) for t in cloud("normal", 5500, 6000, dim, "float32"))
    lazy = FORMULAS[formula](Vi(x), Vj(y))
    values, index = lazy.Kmin_argKmin(7, dim=1)
    assert_same((values, index), brute(x.numpy(), y.numpy(), 7))
    value, first = lazy.min_argmin(dim=1)
    assert_same((value, first), (values[:, :1], index[:, :1]))
    assert_same((lazy.argKmin(7, dim=0),) * 2, (brute(y.numpy(), x.numpy(), 7)[1],) * 2)
    assert len(searches) == 3


def test_other_minima_are_not(searches: Searches) -> None:
    x, y = (torch.as_tensor(t) for t in cloud("normal", 5500, 6000, 3, "float32"))
    squares = Vi(x).sqdist(Vj(y))
    (2 * squares).argKmin(7, dim=1)
    (Vi(x) - Vj(y)).abs().sum(-1).argKmin(7, dim=1)
    (Vi(x[:, :1]) - Vj(y)).sqnorm2().argKmin(7, dim=1)  # one component against three
    Vi(x[:50]).sqdist(Vj(y)).argKmin(7, dim=1)
    squares.max(dim=1)
    assert not searches


def test_what_is_given_up_is_compared(searches: Searches) -> None:
    x, y = cloud("centre of a sphere", 5500, 6000, 3, "float32")
    got = Vi(torch.as_tensor(x)).sqdist(Vj(torch.as_tensor(y))).Kmin_argKmin(7, dim=1)
    assert searches == [None]
    assert_same(got, brute(x, y, 7))


@pytest.mark.parametrize("batch", [(3, 2), (2,), ()])
def test_batches(batch: tuple[int, ...]) -> None:
    x, y = torch.rand(*batch[:1], *[1] * len(batch[1:]), 40, 2), torch.rand(*batch[1:], 50, 2)
    plans = (plan_of(2, 3, algorithm) for algorithm in ("pruned", "brute"))
    got, want = (reduce(plan, [x, y], 40, 50, "cpu") for plan in plans)
    assert got[0].shape == (*batch, 40, 3, 1)
    assert_same(got, want)


def test_says_what_it_does_not_take() -> None:
    x = torch.zeros(4, 17)
    with pytest.raises(
        ValueError, match="at most 16 features and 2147483646 rows and columns; got 17 features, 4 rows"
    ):
        reduce(plan_of(17, 2, "pruned"), [x, x], 4, 4, "cpu")
    with pytest.raises(ValueError, match="'pruned' is of the cpu and cuda back ends; this is tiled"):
        reduce(plan_of(2, 2, "pruned"), [x[:, :2], x[:, :2]], 4, 4, "tiled")
    product = make_plan("KMin", apply("Dot", var(CAT_I, 0, 2), var(CAT_J, 1, 2)), k=2, algorithm="pruned")
    with pytest.raises(ValueError, match="'pruned' is for squared distances of two variables; got Dot"):
        reduce(product, [x[:, :2], x[:, :2]], 4, 4, "cpu")
    with pytest.raises(ValueError, match="algorithm must be one of 'auto', 'brute', 'pruned'; got 'tree'"):
        plan_of(2, 2, "tree")


def test_plans_keep_their_algorithm() -> None:
    for algorithm in ALGORITHMS:
        plan = plan_of(2, 3, algorithm)
        assert read_plan(plan_text(plan)) is plan
        assert pickle.loads(pickle.dumps(plan)) is plan
