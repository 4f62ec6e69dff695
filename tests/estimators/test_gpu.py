"""The estimators and neighbours on a GPU give what they give on a CPU."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from kernops.estimators import KernelDensity, KernelRidge, KNeighborsClassifier, NearestNeighbors
from kernops.neighbors import METRICS, knn

pytestmark = pytest.mark.gpu
X, Y = load_digits(return_X_y=True)
X = X[:600] / 16 + np.random.default_rng(0).normal(scale=1e-3, size=(600, 64))
Y = Y[:600]


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNOPS_BACKEND", "auto")


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("estimator", "method"),
    [
        (NearestNeighbors(), lambda m, x: m.kneighbors(x)[0]),
        (KNeighborsClassifier(weights="distance"), lambda m, x: m.predict_proba(x)),
        (KernelDensity(bandwidth=0.5), lambda m, x: m.score_samples(x)),
        (KernelDensity(kernel="cosine", bandwidth=4.0), lambda m, x: m.score_samples(x)),
        (KernelRidge(kernel="rbf", solver="cg"), lambda m, x: m.predict(x)),
        (KernelRidge(kernel="matern52"), lambda m, x: m.predict(x)),
    ],
    ids=lambda v: str(v) if hasattr(v, "get_params") else "",
)
def test_answers_are_those_of_the_cpu(estimator: Any, method: Any, dtype: type) -> None:
    x = X.astype(dtype)
    answers = [method(estimator.set_params(device=d).fit(x[:500], Y[:500]), x[500:]) for d in ("cpu", "cuda", "auto")]
    for answer in answers:
        assert answer.dtype == dtype
    tolerance = 1e-9 if dtype is np.float64 else 1e-4
    np.testing.assert_allclose(answers[1], answers[0], rtol=tolerance, atol=tolerance)
    np.testing.assert_array_equal(answers[2], answers[1])


def test_a_model_fitted_on_a_gpu_is_unpickled_for_a_cpu() -> None:
    model = KernelRidge(kernel="rbf", solver="cg", device="cuda").fit(X, Y)
    again = pickle.loads(pickle.dumps(model)).set_params(device="cpu")
    np.testing.assert_allclose(again.predict(X), model.predict(X), rtol=1e-9)


@pytest.mark.parametrize("metric", [m for m in METRICS if m not in ("haversine", "seuclidean", "mahalanobis")])
def test_metrics(metric: str) -> None:
    x, y = torch.as_tensor(X[:50, :5]), torch.as_tensor(X[:, :5])
    distances, indices = knn(x.cuda(), y.cuda(), 6, metric)
    expected, places = knn(x, y, 6, metric, backend="tiled")
    assert distances.is_cuda
    torch.testing.assert_close(distances.cpu(), expected, rtol=1e-12, atol=1e-14)
    if metric != "hamming":  # which has ties everywhere, and rounding breaks them
        assert torch.equal(indices.cpu(), places)


def test_large_offsets_and_many_points() -> None:
    x = torch.rand(70_000, 3, device="cuda") * 50 + 1e5
    distances, indices = knn(x, x, 4, "sqeuclidean")  # 4.9e9 pairs: more than 2³²
    assert torch.equal(distances[:, 0], torch.zeros_like(distances[:, 0]))
    some = torch.arange(69_000, 69_200, device="cuda")
    table = ((x[some, None].double() - x.double()) ** 2).sum(-1)
    torch.testing.assert_close(table.gather(1, indices[some]), table.topk(4, largest=False).values, rtol=1e-6, atol=0)
