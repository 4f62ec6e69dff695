"""The estimators and neighbours on a GPU give what they give on a CPU."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.gaussian_process.kernels import RBF, WhiteKernel

from kernops.estimators import (
    GaussianProcessClassifier,
    GaussianProcessRegressor,
    KernelDensity,
    KernelRidge,
    KNeighborsClassifier,
    NearestNeighbors,
)
from kernops.neighbors import METRICS, knn
from kernops.operators import OutOfMemoryError

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


KERNEL = 4.0 * RBF(2.0)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("solver", ["cholesky", "cg"])
def test_classifiers(solver: str, dtype: type) -> None:
    """Odd digits against even ones: the mode, probabilities, the likelihood and its gradient."""
    x, odd = X.astype(dtype), Y % 2
    options: dict[str, Any] = {"optimizer": None, "random_state": 0, "n_probes": 50}
    exact = GaussianProcessClassifier(KERNEL, device="cpu", **options).fit(x[:400], odd[:400])
    model = GaussianProcessClassifier(KERNEL, device="cuda", solver=solver, rank=400, **options)
    model.fit(x[:400], odd[:400])
    np.testing.assert_allclose(model.predict_proba(x[400:]), exact.predict_proba(x[400:]), atol=2e-3)
    theta = exact.kernel_.theta + 0.1
    (value, gradient), (v, g) = (e.log_marginal_likelihood(theta, eval_gradient=True) for e in (model, exact))
    assert value == pytest.approx(v, rel=1e-3)
    np.testing.assert_allclose(gradient, g, atol=1e-2 * np.abs(g).max())
    again = pickle.loads(pickle.dumps(model)).set_params(device="cpu")
    np.testing.assert_allclose(again.predict_proba(x[400:]), model.predict_proba(x[400:]), atol=1e-4)


@pytest.mark.parametrize("kind", [GaussianProcessClassifier, GaussianProcessRegressor])
def test_processes_of_many_samples(kind: Any) -> None:
    """Twenty thousand: a dense matrix of them would take 1.6 GB and more, the iterations a tenth of that."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (21_000, 3)).astype(np.float32)
    f = 3 * np.sin(3 * x[:, 0]) + 6 * x[:, 1] * x[:, 2]
    y = rng.random(len(x)) < 1 / (1 + np.exp(-f)) if kind is GaussianProcessClassifier else f + rng.normal(size=len(x))
    torch.cuda.reset_peak_memory_stats()
    kernel = 4.0 * RBF([0.7] * 3) + WhiteKernel(1.0 if kind is GaussianProcessRegressor else 1e-3)
    model = kind(kernel, optimizer=None, random_state=0, device="cuda").fit(x[:20_000], y[:20_000])
    if kind is GaussianProcessClassifier:
        found, want = model.predict_proba(x[20_000:])[:, 1], 1 / (1 + np.exp(-f[20_000:]))
        assert np.sqrt(np.mean((found - want) ** 2)) < 0.03
    else:
        found, std = model.predict(x[20_000:], return_std=True)
        assert np.sqrt(np.mean((found - f[20_000:]) ** 2)) < 0.15 and (std > 0.99).all() and (std < 1.1).all()
    assert torch.cuda.max_memory_allocated() < 400e6


def test_short_memory_of_a_gpu_is_explained() -> None:
    """Asked for a matrix that does not fit: 300,000 samples by Cholesky's decomposition."""
    x = np.zeros((300_000, 1))
    with pytest.raises(OutOfMemoryError, match=r"needs .* TB or more of float64 on cuda.*are free.*solver='cg'"):
        GaussianProcessRegressor(KERNEL, optimizer=None, solver="cholesky", device="cuda").fit(x, x[:, 0])


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
