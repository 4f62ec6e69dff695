"""What Gaussian processes by conjugate gradients say of solutions that are not accurate, and where they need not."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize
from scipy.optimize import OptimizeResult
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import kernels as gp

from kernops.estimators import GaussianProcessClassifier, GaussianProcessRegressor
from kernops.kernels import RBF
from kernops.operators import ConvergenceWarning as ResidualWarning
from kernops.operators import KernelOperator, NumericalWarning
from kernops.solvers.problems import without_warnings

RANDOM = np.random.RandomState(0)
X, NEW = RANDOM.rand(250, 2), RANDOM.rand(140, 2)  # more queries than are computed at once
Y = np.sin(5 * X[:, 0]) + X[:, 1]
LABELS = np.mean(Y) < Y


def fitted(alpha: float, kernel: Any = None, **options: Any) -> GaussianProcessRegressor:
    options = {"optimizer": None, "solver": "cg", "device": "cpu", "random_state": 0, **options}
    return GaussianProcessRegressor(kernel or gp.RBF(0.5), alpha=alpha, **options).fit(X, Y)


@pytest.mark.parametrize(("rank", "preconditioner"), [(15, "auto"), (30, "nystrom")])
def test_covariances_are_as_accurate_as_deviations(rank: int, preconditioner: str) -> None:
    """Deviations are a thousandth of the kernel's: what is of the order of a residual would be larger than they are."""
    want = fitted(1e-4, solver="cholesky").predict(NEW, return_cov=True)[1]
    model = fitted(1e-4, rank=rank, preconditioner=preconditioner)
    std = np.sqrt(np.diag(want))
    assert std.min() < 3e-3
    got = model.predict(NEW, return_cov=True)[1]
    assert np.array_equal(got, got.T)
    np.testing.assert_allclose(np.sqrt(np.diag(got)), model.predict(NEW, return_std=True)[1], rtol=1e-6)
    np.testing.assert_allclose(np.sqrt(np.diag(got)), std, rtol=1e-3)
    assert (np.abs(got - want) / np.outer(std, std)).max() < 1e-3
    assert np.linalg.eigvalsh(got)[0] > -1e-9 * np.linalg.eigvalsh(want)[-1]
    samples = model.sample_y(NEW, 2000).std(axis=1)
    np.testing.assert_allclose(samples, std, rtol=0.1)


def test_covariances_that_are_not_accurate_are_told() -> None:
    model = fitted(1e-4, rank=10).set_params(max_iter=3)
    for call in (lambda: model.predict(NEW, return_cov=True), lambda: model.sample_y(NEW)):
        with pytest.warns(ConvergenceWarning, match="standard deviations are not known"):
            call()


def test_likelihoods_of_systems_that_were_not_solved_are_told() -> None:
    """The targets are eigenvectors: their system is solved in two iterations, those of the determinant are not."""
    _, vectors = np.linalg.eigh(gp.RBF(0.2)(X))
    y = 20 * vectors[:, -1] + 10 * vectors[:, -2]
    options: dict[str, Any] = {"alpha": 1e-3, "tol": 1e-2, "preconditioner": None, "optimizer": None, "solver": "cg"}
    with pytest.warns(ConvergenceWarning, match="log marginal likelihood comes from systems that") as told:
        model = GaussianProcessRegressor(gp.RBF(0.2), max_iter=4, random_state=0, **options).fit(X, y)
    assert model.residual_ < 1e-2 and len(told) == 1 and told[0].filename == __file__
    exact = GaussianProcessRegressor(gp.RBF(0.2), alpha=1e-3, optimizer=None, solver="cholesky").fit(X, y)
    error = abs(model.log_marginal_likelihood_value_ - exact.log_marginal_likelihood_value_)
    assert error > 5 * model.log_marginal_likelihood_error_  # which is why it has to be told


def test_kept_likelihoods_are_told_after_a_search_and_by_classifiers() -> None:
    kernel = gp.ConstantKernel() * gp.RBF(0.3)
    with pytest.warns(ConvergenceWarning, match="GaussianProcessRegressor: the log marginal likelihood comes from"):
        fitted(1e-4, kernel, optimizer=lambda f, theta, bounds: (theta, f(theta)[0]), preconditioner=None, max_iter=5)
    with pytest.warns(ConvergenceWarning, match="GaussianProcessClassifier: the log marginal likelihood comes from"):
        GaussianProcessClassifier(100.0 * gp.RBF(0.2), optimizer=None, solver="cg", preconditioner=None, max_iter=3,
                                  max_iter_predict=5, random_state=0).fit(X, LABELS)  # fmt: skip


def test_an_error_that_is_not_known() -> None:
    assert np.isnan(fitted(0.1, n_probes=1).log_marginal_likelihood_error_)
    assert fitted(0.1, n_probes=2).log_marginal_likelihood_error_ > 0
    assert fitted(0.1, n_probes=1, solver="cholesky").log_marginal_likelihood_error_ == 0
    classifier = GaussianProcessClassifier(optimizer=None, solver="cg", n_probes=1).fit(X, LABELS)
    assert np.isnan(classifier.base_estimator_.log_marginal_likelihood_error_)


@pytest.mark.parametrize(("start", "at", "probes", "told"), [
    ("far", None, 10, True), ("far", None, 1, True), ("far", "bound", 10, False), ("optimum", None, 10, False)
])  # fmt: skip
def test_line_searches_that_fail_far_from_the_optimum_are_told(
    monkeypatch: pytest.MonkeyPatch, start: str, at: str | None, probes: int, told: bool
) -> None:
    """The noise of the data is 0.1; a gradient that leads out of the bounds, and one of an optimum, are no reason."""

    def fails(objective: Any, theta: np.ndarray, bounds: np.ndarray, **_: Any) -> OptimizeResult:
        value, gradient = objective(theta)
        return OptimizeResult(x=theta, fun=value, jac=gradient, status=2, message="ABNORMAL", nit=0, nfev=1)

    noise = {"far": 1.0, "optimum": 0.1}[start]
    kernel = gp.RBF(0.5, "fixed") + gp.WhiteKernel(noise, (noise, 1e3) if at == "bound" else (1e-5, 1e5))
    y = Y + 0.1**0.5 * np.random.RandomState(1).randn(len(X))
    if start == "optimum":  # by exact likelihoods
        kernel = GaussianProcessRegressor(kernel, solver="cholesky").fit(X, y).kernel_
    monkeypatch.setattr(optimize, "minimize", fails)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", ConvergenceWarning)
        GaussianProcessRegressor(kernel, solver="cg", n_probes=probes, random_state=0).fit(X, y)
    assert sum("stopped in a line search where the gradient is" in str(each.message) for each in seen) == told


def hopeless() -> None:
    """Equal points without noise: ``NumericalWarning`` by Cholesky's decomposition."""
    KernelOperator(RBF(1.0), torch.zeros(5, 1).double()).solve(torch.ones(5).double())


def test_silence_is_of_one_thread_and_ends() -> None:
    """Whatever order threads begin and end in, which filters of ``warnings`` do not stand."""
    steps = {name: threading.Event() for name in ("first", "second", "left")}

    def first() -> None:
        with without_warnings():
            steps["first"].set()
            assert steps["second"].wait(10)
        steps["left"].set()

    def second() -> None:
        assert steps["first"].wait(10)
        with without_warnings():
            steps["second"].set()
            assert steps["left"].wait(10)

    before = list(warnings.filters)
    threads = [threading.Thread(target=work) for work in (first, second)]
    for thread in threads:
        thread.start()
    assert steps["second"].wait(10)
    with pytest.warns(NumericalWarning):  # this thread is not silent while others are
        hopeless()
    for thread in threads:
        thread.join()
    with pytest.warns(NumericalWarning):
        hopeless()
    with warnings.catch_warnings(), without_warnings():
        warnings.simplefilter("error")
        hopeless()
    assert list(warnings.filters) == before


def test_fit_leaves_the_filters_of_warnings_alone() -> None:
    seen: list[Any] = []

    def optimizer(objective: Any, theta: np.ndarray, bounds: np.ndarray) -> tuple[np.ndarray, float]:
        seen.append(list(warnings.filters))
        value = objective(theta)[0]
        with pytest.warns(NumericalWarning):  # of the optimizer's own
            hopeless()
        return theta, value

    with pytest.warns(ConvergenceWarning) as told:
        before = list(warnings.filters)
        fitted(1e-4, optimizer=optimizer, preconditioner=None, max_iter=5)
    assert seen == [before] and not any(issubclass(each.category, ResidualWarning) for each in told)
