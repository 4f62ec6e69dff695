"""What the iterative path of GaussianProcessRegressor costs in accuracy: the same kernel and data as scikit-learn."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from sklearn import gaussian_process as reference
from sklearn.datasets import load_diabetes, load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import kernels as gp

from kernops.estimators import GaussianProcessRegressor
from kernops.operators import preconditioning

Problem = tuple[np.ndarray, np.ndarray, Any, int]


def diabetes() -> Problem:
    X, y = load_diabetes(return_X_y=True)
    return X * 10, y, gp.ConstantKernel(1.0) * gp.RBF([3.0] * 10) + gp.WhiteKernel(0.5), 400


def digits() -> Problem:
    X, y = load_digits(return_X_y=True)
    return X / 16, y.astype(float), gp.ConstantKernel(2.0) * gp.RBF(2.0) + gp.WhiteKernel(0.05), 1500


def carbon_dioxide() -> Problem:
    """A trend, seasons that change slowly, and what is neither, at 1,500 times of 62 years."""
    random = np.random.RandomState(0)
    t = random.uniform(1958, 2020, 1550)
    since = t - 1958
    y = 315 + 1.5 * since * (1 + 0.01 * since) + 3 * np.sin(2 * np.pi * t) + 0.8 * np.sin(4 * np.pi * t)
    y = y + 0.5 * np.sin(2 * np.pi * t / 3.7) + 0.3 * random.randn(len(t))
    kernel = (
        gp.ConstantKernel(4.0) * gp.RBF(40.0)
        + gp.ConstantKernel(0.1) * gp.RBF(100.0) * gp.ExpSineSquared(1.0, 1.0, periodicity_bounds="fixed")
        + gp.ConstantKernel(0.01) * gp.RationalQuadratic(1.0, 1.0)
        + gp.WhiteKernel(1e-3)
    )
    return (t - 1990)[:, None], y, kernel, 1500


def carbon_dioxide_of_few() -> Problem:
    return (*carbon_dioxide()[:3], 300)


PROBLEMS = [
    pytest.param(diabetes, {}, id="diabetes"),
    pytest.param(carbon_dioxide_of_few, {"rank": 200}, id="carbon dioxide of few"),
    pytest.param(carbon_dioxide, {}, id="carbon dioxide", marks=pytest.mark.slow),
    pytest.param(digits, {}, id="digits", marks=pytest.mark.slow),
]


def compared(problem: Callable[[], Problem], most: int = 1500, **options: Any) -> tuple[Any, Any, np.ndarray]:
    X, y, kernel, n = problem()
    n = min(n, most)
    theirs = reference.GaussianProcessRegressor(kernel, optimizer=None, normalize_y=True).fit(X[:n], y[:n])
    ours = GaussianProcessRegressor(
        kernel, optimizer=None, normalize_y=True, solver="cg", random_state=0, **options
    ).fit(X[:n], y[:n])
    return ours, theirs, X[n : n + 50]


@pytest.mark.parametrize(("problem", "options"), PROBLEMS)
def test_means_deviations_likelihoods_and_gradients(problem: Callable[[], Problem], options: dict[str, Any]) -> None:
    ours, theirs, new = compared(problem, **options)
    (mean, std), (m, s) = (e.predict(new, return_std=True) for e in (ours, theirs))
    np.testing.assert_allclose(mean, m, rtol=1e-4, atol=1e-4 * np.abs(m).max())
    np.testing.assert_allclose(std, s, rtol=1e-3)
    theta = theirs.kernel_.theta
    (value, gradient), (v, g) = (e.log_marginal_likelihood(theta, eval_gradient=True) for e in (ours, theirs))
    assert value == pytest.approx(v, rel=1e-3) == ours.log_marginal_likelihood_value_
    assert np.linalg.norm(gradient - g) <= 1e-3 * np.linalg.norm(g)
    assert np.abs(gradient - g).max() <= 1e-3 * np.abs(g).max()


@pytest.mark.parametrize("preconditioner", ["pivoted_cholesky", "nystrom", None])
def test_deviations_that_are_small_beside_the_kernel(preconditioner: str | None) -> None:
    """They are differences of numbers thousands of times as large; a tolerance for solutions alone would not do."""
    ours, theirs, new = compared(carbon_dioxide, 200, rank=10, preconditioner=preconditioner)
    want = theirs.predict(new, return_std=True)[1]
    np.testing.assert_allclose(ours.predict(new, return_std=True)[1], want, rtol=1e-3)


def test_deviations_that_are_not_accurate_are_told() -> None:
    ours, theirs, new = compared(carbon_dioxide, 200, rank=10)
    want = theirs.predict(new, return_std=True)[1]
    ours.set_params(max_iter=3)
    with pytest.warns(ConvergenceWarning, match=r"standard deviations are not known .*they may be too large"):
        std = ours.predict(new, return_std=True)[1]
    assert (std > 0.999 * want).all() and (std > 2 * want).any()  # the error has a sign


def test_a_rank_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    made = preconditioning.make_preconditioner

    def watched(operator: Any, kind: str, rank: int | None, seed: int, columns: int) -> Any:
        seen.append(rank)
        return made(operator, kind, rank, seed, columns)

    monkeypatch.setattr(preconditioning, "make_preconditioner", watched)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compared(diabetes, rank=17)[0].predict(np.zeros((1, 10)), return_std=True)
    assert set(seen) == {17}
