"""Exact neighbours against tables of distances by SciPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import cdist
from sklearn.metrics.pairwise import haversine_distances

from kernops.backends import pruned
from kernops.neighbors import METRIC_NAMES, METRICS, knn
from tests.helpers.backends import need
from tests.helpers.clouds import cloud

RNG = np.random.default_rng(0)
X, Y = RNG.random((30, 4)), RNG.random((50, 4))


def chosen(table: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k smallest of each row of a table, the lowest index first among equals."""
    places = np.argsort(table, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(table, places, axis=1), places


#: metric, its parameters, and its table by other means; every row of METRICS has a line
CASES: list[tuple[str, dict[str, Any], Any]] = [
    ("euclidean", {}, cdist(X, Y)),
    ("sqeuclidean", {}, cdist(X, Y, "sqeuclidean")),
    ("manhattan", {}, cdist(X, Y, "cityblock")),
    ("chebyshev", {}, cdist(X, Y, "chebyshev")),
    ("minkowski", {"p": 1}, cdist(X, Y, "minkowski", p=1)),
    ("minkowski", {"p": 0.5}, cdist(X, Y, "minkowski", p=0.5)),
    ("minkowski", {"p": 3}, cdist(X, Y, "minkowski", p=3)),
    ("minkowski", {"p": 2.5}, cdist(X, Y, "minkowski", p=2.5)),
    ("minkowski", {"p": np.inf}, cdist(X, Y, "chebyshev")),
    ("cosine", {}, cdist(X, Y, "cosine")),
    ("correlation", {}, cdist(X, Y, "correlation")),
    ("canberra", {}, cdist(X, Y, "canberra")),
    ("braycurtis", {}, cdist(X, Y, "braycurtis")),
    ("seuclidean", {"V": Y.var(axis=0)}, cdist(X, Y, "seuclidean", V=Y.var(axis=0))),
    ("mahalanobis", {"VI": np.linalg.inv(np.cov(Y.T))}, cdist(X, Y, "mahalanobis", VI=np.linalg.inv(np.cov(Y.T)))),
]


@pytest.mark.parametrize("backend", ["tiled", "auto"])
@pytest.mark.parametrize(
    ("metric", "params", "table"), CASES, ids=lambda v: str(v) if isinstance(v, (str, dict)) else ""
)
def test_metrics(metric: str, params: dict[str, Any], table: np.ndarray, backend: str) -> None:
    distances, indices = knn(X, Y, 6, metric, metric_params=params, backend=backend)
    expected, places = chosen(table, 6)
    np.testing.assert_allclose(distances, expected, rtol=1e-12, atol=1e-14)
    assert np.array_equal(indices, places)
    assert indices.dtype == np.int64


def test_metrics_of_other_data() -> None:
    whole = RNG.integers(0, 3, (20, 6)).astype(float)
    np.testing.assert_allclose(knn(whole, whole, 5, "hamming")[0], chosen(cdist(whole, whole, "hamming"), 5)[0])
    places = RNG.uniform(-1, 1, (20, 2)) * [np.pi / 2, np.pi]
    np.testing.assert_allclose(
        knn(places, places, 5, "haversine")[0], chosen(haversine_distances(places), 5)[0], atol=1e-7
    )
    products, indices = knn(X, Y, 5, "inner_product")
    np.testing.assert_allclose(products, -chosen(-X @ Y.T, 5)[0])
    assert np.array_equal(indices, chosen(-X @ Y.T, 5)[1])


def test_every_metric_is_tested() -> None:
    assert {c[0] for c in CASES} | {"hamming", "haversine", "inner_product"} == set(METRICS)
    assert all(METRICS[name].name == name for name in METRICS)
    assert set(METRIC_NAMES.values()) == set(METRICS)


@given(st.integers(1, 7), st.integers(1, 9), st.integers(1, 3), st.data())
@settings(max_examples=60, deadline=None)
def test_ties_go_to_the_lowest_index(m: int, n: int, dim: int, data: st.DataObject) -> None:
    coordinates = st.lists(st.integers(-1, 1), min_size=dim, max_size=dim)
    x = np.array(data.draw(st.lists(coordinates, min_size=m, max_size=m)), dtype=np.float64)
    y = np.array(data.draw(st.lists(coordinates, min_size=n, max_size=n)), dtype=np.float64)
    k = data.draw(st.integers(1, n))
    expected, places = chosen(cdist(x, y, "sqeuclidean"), k)
    distances, indices = knn(x, y, k, "sqeuclidean", backend="tiled")
    assert np.array_equal(distances, expected)
    assert np.array_equal(indices, places)


@given(st.integers(2, 9), st.integers(1, 2), st.data())
@settings(max_examples=60, deadline=None)
def test_a_point_is_not_its_own_neighbour(n: int, dim: int, data: st.DataObject) -> None:
    coordinates = st.lists(st.integers(0, 1), min_size=dim, max_size=dim)
    x = np.array(data.draw(st.lists(coordinates, min_size=n, max_size=n)), dtype=np.float64)
    table = cdist(x, x, "cityblock")
    np.fill_diagonal(table, np.inf)
    expected, places = chosen(table, n - 1)
    distances, indices = knn(x, x, n - 1, "manhattan", exclude_self=True, backend="tiled")
    assert np.array_equal(distances, expected)
    assert np.array_equal(indices, places)


@pytest.mark.parametrize("backend", ["tiled", "auto"])
def test_nan_is_never_a_neighbour(backend: str) -> None:
    x, y = X.copy(), Y.copy()
    x[3, 1] = y[::5, 2] = np.nan
    distances, indices = knn(x, y, 45, backend=backend)
    expected, places = chosen(np.where(np.isnan(cdist(x, y)), np.inf, cdist(x, y)), 45)
    valid = np.isfinite(expected)
    assert np.array_equal(indices, np.where(valid, places, -1))
    assert np.array_equal(np.isnan(distances), ~valid)
    np.testing.assert_allclose(distances[valid], expected[valid])


@pytest.mark.parametrize("backend", ["tiled", "auto"])
@pytest.mark.parametrize("offset", [1e3, 1e5])
def test_float32_far_from_the_origin(offset: float, backend: str) -> None:
    x = (RNG.random((400, 3)) * 50 + offset).astype(np.float32)
    _, indices = knn(x, x, 8, backend=backend)
    table = cdist(x.astype(np.float64), x.astype(np.float64), "sqeuclidean")
    found = np.take_along_axis(table, indices, axis=1)
    np.testing.assert_allclose(found, chosen(table, 8)[0], rtol=1e-6)


def test_batches_broadcast() -> None:
    x, y = torch.rand(3, 1, 7, 2), torch.rand(4, 9, 2)
    distances, indices = knn(x, y, 3)
    assert distances.shape == indices.shape == (3, 4, 7, 3)
    for a in range(3):
        for b in range(4):
            expected, places = torch.cdist(x[a, 0], y[b]).topk(3, largest=False)
            torch.testing.assert_close(distances[a, b], expected)
            assert torch.equal(indices[a, b], places)


def test_arrays_of_any_layout(tmp_path: Path) -> None:
    expected = knn(X, Y, 4)
    np.save(tmp_path / "y.npy", Y)
    mapped = np.load(tmp_path / "y.npy", mmap_mode="r")
    for x, y in ((X[::-1].copy()[::-1], np.asfortranarray(Y)), (X, mapped), (torch.as_tensor(X), torch.as_tensor(Y))):
        distances, indices = knn(x, y, 4)
        assert type(distances) is type(indices) is (torch.Tensor if isinstance(x, torch.Tensor) else np.ndarray)
        np.testing.assert_array_equal(distances, expected[0])
        np.testing.assert_array_equal(indices, expected[1])


@pytest.mark.parametrize("metric", ["euclidean", "sqeuclidean", "manhattan", "cosine"])
def test_distances_have_gradients(metric: str) -> None:
    x, y = (torch.as_tensor(a).clone().requires_grad_() for a in (X[:6], Y[:8]))
    assert torch.autograd.gradcheck(lambda a, b: knn(a, b, 3, metric, backend="tiled")[0], (x, y))
    assert torch.autograd.gradgradcheck(lambda a, b: knn(a, b, 3, metric, backend="tiled")[0], (x, y))


def test_gradient_at_distance_0_is_0() -> None:
    x = torch.as_tensor(X).clone().requires_grad_()
    knn(x, x.detach(), 1)[0].sum().backward()
    assert torch.equal(x.grad, torch.zeros_like(x))  # type: ignore[arg-type]


def test_a_function_of_two_lazy_tensors_is_a_metric() -> None:
    distances, indices = knn(X, Y, 4, lambda x, y, w: (w * (x - y).abs()).sum(-1), metric_params={"w": 2.0})
    expected, places = chosen(2 * cdist(X, Y, "cityblock"), 4)
    np.testing.assert_allclose(distances, expected)
    assert np.array_equal(indices, places)


# --- algorithms -------------------------------------------------------------------------------------------------------
@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What pruned searches gave."""
    need("cpu")
    results: list[Any] = []
    nearest = pruned.nearest

    def spy(*arguments: Any) -> Any:
        results.append(nearest(*arguments))
        return results[-1]

    monkeypatch.setattr(pruned, "nearest", spy)
    return results


@pytest.mark.parametrize("metric", ["euclidean", "sqeuclidean"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_algorithms_agree(metric: str, dtype: str, searches: list[Any]) -> None:
    x, y = cloud("normal", 6000, 6000, 3, dtype)
    brute = knn(x, y, 4, metric, algorithm="brute")
    assert not searches
    for algorithm in ("auto", "pruned"):
        distances, indices = knn(x, y, 4, metric, algorithm=algorithm)
        assert np.array_equal(distances, brute[0])
        assert distances.dtype == x.dtype
        assert np.array_equal(indices, brute[1])
    assert len(searches) == 2


def test_a_pruned_search_in_transformed_code(searches: list[Any]) -> None:
    x, y = torch.rand(3, 40, 2), torch.rand(50, 2)
    got = torch.func.vmap(lambda a: knn(a, y, 3, algorithm="pruned")[1])(x)
    assert torch.equal(got, knn(x, y, 3, algorithm="brute")[1])
    assert searches


def test_pruned_searches_have_batches_and_gradients(searches: list[Any]) -> None:
    x, y = torch.rand(3, 1, 7, 2, dtype=torch.float64), torch.rand(4, 9, 2, dtype=torch.float64)
    for got, want in zip(knn(x, y, 3, algorithm="pruned"), knn(x, y, 3, algorithm="brute")):
        assert torch.equal(got, want)
    inputs = (x.requires_grad_(), y.requires_grad_())
    assert torch.autograd.gradcheck(lambda a, b: knn(a, b, 3, algorithm="pruned")[0], inputs)
    small = (x[0, 0].detach().requires_grad_(), y[0].detach().requires_grad_())
    assert torch.autograd.gradgradcheck(lambda a, b: knn(a, b, 3, algorithm="pruned")[0], small)
    assert searches


def test_a_pruned_search_leaves_the_point_itself_out(searches: list[Any]) -> None:
    _, y = cloud("integers", 1, 2000, 3)
    got, want = (knn(y, y, 3, exclude_self=True, algorithm=algorithm) for algorithm in ("pruned", "brute"))
    assert np.array_equal(got[1], want[1])
    assert np.array_equal(got[0], want[0])
    assert len(searches) == 1


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"n_neighbors": 51}, ValueError, r"n_neighbors must be in 1 .. 50, the number of points; got 51"),
    ({"n_neighbors": 0}, ValueError, "n_neighbors must be in 1 .. 50"),
    ({"n_neighbors": 2.0}, TypeError, "n_neighbors must be an integer; got 2.0"),
    ({"X": Y, "n_neighbors": 50, "exclude_self": True}, ValueError, "1 .. 49, .* without the point itself; got 50"),
    ({"X": X[:, :3]}, ValueError, "equally many features; got 3 and 4"),
    ({"X": X[0]}, ValueError, r"X must have shape \(..., points, features\); got \(4,\)"),
    ({"X": X.astype(int)}, TypeError, "X must be of dtype .*float64; got .*int64"),
    ({"X": X.tolist()}, TypeError, "X must be .*array.*; got list"),
    ({"X": X.astype(np.float32)}, ValueError, "one kind and dtype.*float32.*float64"),
    ({"X": torch.as_tensor(X)}, ValueError, "one kind and dtype.*torch.*numpy"),
    ({"Y": Y[:0], "n_neighbors": 1}, ValueError, "n_neighbors must be in 1 .. 0"),
    ({"metric": "euclid"}, ValueError, "metric must be one of .*euclidean.*, or a callable; got 'euclid'"),
    ({"metric": "haversine"}, ValueError, "'haversine' is for 2 features; got 4"),
    ({"metric": "seuclidean"}, TypeError, "'seuclidean' needs metric_params with 'V'"),
    ({"metric_params": {"p": 3}}, TypeError, "'euclidean' takes no parameters; got 'p'"),
    ({"metric": "minkowski", "metric_params": {"p": 0}}, ValueError, "p must be a number > 0; got 0"),
    ({"metric": lambda x, y: x - y}, ValueError, "metric must return one number a pair; got vectors of dimension 4"),
    ({"algorithm": "kd_tree"}, ValueError, "algorithm must be one of 'auto', 'brute', 'pruned'; got 'kd_tree'"),
    ({"algorithm": "pruned", "metric": "cosine"}, ValueError, "squared distances of two variables; got"),
    ({"algorithm": "pruned", "backend": "tiled"}, ValueError, "of the cpu and cuda back ends; this is tiled"),
    ({"backend": "gpu"}, ValueError, "backend.*'tiled'.*got 'gpu'"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD, ids=lambda v: str(v)[:40] if isinstance(v, dict) else "")
def test_bad_input(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        knn(**{"X": X, "Y": Y, "n_neighbors": 4, **change})


def test_no_query_gives_no_answer() -> None:
    distances, indices = knn(X[:0], Y, 3)
    assert distances.shape == indices.shape == (0, 3)
