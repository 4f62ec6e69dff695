"""NearestNeighbors and KNeighborsClassifier against scikit-learn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn import neighbors as reference
from sklearn.datasets import load_digits, load_iris

from kernops.estimators import KNeighborsClassifier, NearestNeighbors
from kernops.neighbors import knn

X_DIGITS, Y_DIGITS = load_digits(return_X_y=True)
X_DIGITS, Y_DIGITS = X_DIGITS[:500], Y_DIGITS[:500]
# Values of one hundred whole numbers are equally far from many others; with noise there are no ties to be resolved.
X_DIGITS = X_DIGITS + np.random.default_rng(0).normal(scale=1e-3, size=X_DIGITS.shape)
METRICS: list[dict[str, Any]] = [
    {},
    {"p": 1},
    {"p": 3.5},
    {"metric": "chebyshev"},
    {"metric": "cosine"},
    {"metric": "seuclidean", "metric_params": {"V": X_DIGITS.var(axis=0) + 1}},
]


@pytest.mark.parametrize("options", METRICS, ids=str)
def test_neighbours_are_scikit_learns(options: dict[str, Any]) -> None:
    ours = NearestNeighbors(n_neighbors=7, **options).fit(X_DIGITS[:400])
    theirs = reference.NearestNeighbors(n_neighbors=7, algorithm="brute", **options).fit(X_DIGITS[:400])
    for queries in (None, X_DIGITS[400:]):
        distances, indices = ours.kneighbors(queries)
        expected, places = theirs.kneighbors(queries)
        assert np.array_equal(indices, places)
        np.testing.assert_allclose(distances, expected, rtol=1e-7, atol=1e-7)
    assert ours.effective_metric_ == theirs.effective_metric_
    assert ours.n_samples_fit_ == 400


def test_compiled_back_end_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    tiled = NearestNeighbors(n_neighbors=7).fit(X_DIGITS)
    expected = tiled.kneighbors()
    monkeypatch.setenv("KERNOPS_BACKEND", "auto")
    distances, indices = tiled.kneighbors()
    assert np.array_equal(indices, expected[1])
    np.testing.assert_allclose(distances, expected[0], rtol=1e-12)


def test_a_function_of_two_lazy_tensors_is_a_metric() -> None:
    ours = NearestNeighbors(metric=lambda x, y: (x - y).abs().sum(-1)).fit(X_DIGITS)
    theirs = reference.NearestNeighbors(p=1).fit(X_DIGITS)
    np.testing.assert_allclose(ours.kneighbors()[0], theirs.kneighbors()[0])


@pytest.mark.parametrize("mode", ["connectivity", "distance"])
def test_graph_is_scikit_learns(mode: str) -> None:
    ours = NearestNeighbors(n_neighbors=4).fit(X_DIGITS).kneighbors_graph(mode=mode)
    theirs = reference.NearestNeighbors(n_neighbors=4).fit(X_DIGITS).kneighbors_graph(mode=mode)
    assert type(ours) is type(theirs)
    assert ours.shape == theirs.shape
    assert abs(ours - theirs).max() < 1e-6
    with pytest.raises(ValueError, match='mode.*got "weights"'):
        NearestNeighbors().fit(X_DIGITS).kneighbors_graph(mode="weights")


def test_a_sample_is_not_its_own_neighbour_even_among_copies() -> None:
    X = np.zeros((6, 2))
    indices = NearestNeighbors(n_neighbors=5).fit(X).kneighbors(return_distance=False)
    assert [list(row) for row in indices] == [[j for j in range(6) if j != i] for i in range(6)]


def test_all_pairs_are_compared_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def spy(*arguments: Any, algorithm: str, **options: Any) -> Any:
        asked.append(algorithm)
        return knn(*arguments, algorithm=algorithm, **options)

    monkeypatch.setattr("kernops.estimators._neighbors.knn", spy)
    for algorithm in ("auto", "brute", "kd_tree", "ball_tree"):
        NearestNeighbors(algorithm=algorithm).fit(X_DIGITS[:50]).kneighbors()
    assert asked == ["auto", "brute", "auto", "auto"]


@pytest.mark.parametrize(
    ("queries", "k", "message"),
    [
        (None, 10, "Expected n_neighbors < n_samples_fit, but n_neighbors = 10, n_samples_fit = 10"),
        (X_DIGITS[:3], 11, "Expected n_neighbors <= n_samples_fit, but n_neighbors = 11"),
        (X_DIGITS[:3], 0, "Expected n_neighbors > 0. Got 0"),
    ],
)
def test_says_how_many_neighbours_there_are(queries: Any, k: int, message: str) -> None:
    model = NearestNeighbors().fit(X_DIGITS[:10])
    with pytest.raises(ValueError, match=message):
        model.kneighbors(queries, k)


@pytest.mark.parametrize(
    "weights", ["uniform", "distance", lambda d: np.exp(-d)], ids=["uniform", "distance", "callable"]
)
@pytest.mark.parametrize("k", [1, 3, 6])
def test_votes_are_scikit_learns(weights: Any, k: int) -> None:
    ours = KNeighborsClassifier(k, weights=weights).fit(X_DIGITS[:400], Y_DIGITS[:400])
    # By a tree, whose distance of a sample to itself is 0; scikit-learn's brute force gives about 1e-7.
    theirs = reference.KNeighborsClassifier(k, weights=weights, algorithm="kd_tree").fit(X_DIGITS[:400], Y_DIGITS[:400])
    for queries in (X_DIGITS[400:], X_DIGITS[390:410]):  # the second holds training samples, at distance 0
        assert np.array_equal(ours.predict(queries), theirs.predict(queries))
        np.testing.assert_allclose(ours.predict_proba(queries), theirs.predict_proba(queries), atol=1e-9)
    assert ours.score(X_DIGITS[400:], Y_DIGITS[400:]) == theirs.score(X_DIGITS[400:], Y_DIGITS[400:])


def iris_without_ties() -> tuple[np.ndarray, np.ndarray]:
    X, y = load_iris(return_X_y=True)
    return X + np.random.default_rng(0).normal(scale=1e-4, size=X.shape), y


def test_leaves_one_out_without_queries() -> None:
    X, y = iris_without_ties()
    ours = KNeighborsClassifier(5).fit(X, y)
    table = np.linalg.norm(X[:, None] - X, axis=-1)
    np.fill_diagonal(table, np.inf)
    near = y[np.argsort(table, axis=1)[:, :5]]
    expected = np.array([np.bincount(row, minlength=3).argmax() for row in near])
    assert np.array_equal(ours.predict(None), expected)
    assert ours.score(None, y) == np.mean(expected == y)


def test_several_outputs_and_labels_of_any_kind() -> None:
    X, y = iris_without_ties()
    names = np.array(["setosa", "versicolor", "virginica"])[y]
    both = np.stack([names, (X[:, 0] > 5.8).astype(str)], axis=1)
    ours, theirs = KNeighborsClassifier().fit(X, both), reference.KNeighborsClassifier().fit(X, both)
    assert np.array_equal(ours.predict(X), theirs.predict(X))
    for a, b in zip(ours.predict_proba(X), theirs.predict_proba(X)):
        np.testing.assert_allclose(a, b)
    assert [list(c) for c in ours.classes_] == [list(c) for c in theirs.classes_]


def test_weights_that_are_all_zero_are_an_error() -> None:
    model = KNeighborsClassifier(weights=np.zeros_like).fit(X_DIGITS, Y_DIGITS)
    with pytest.raises(ValueError, match="zero weights"):
        model.predict(X_DIGITS[:5])
