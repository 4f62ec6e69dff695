"""GaussianProcessRegressor against scikit-learn."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from sklearn import gaussian_process as reference
from sklearn.base import clone
from sklearn.datasets import load_diabetes
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import kernels as gp
from sklearn.model_selection import GridSearchCV

from kernops.estimators import GaussianProcessRegressor
from kernops.operators import NotPositiveDefiniteError, NumericalWarning, choice, preconditioning

X, Y = load_diabetes(return_X_y=True)
X, Y = X[:150, :4] * 10, Y[:150]
TARGETS = np.stack([Y, Y**0.5 + X[:, 0]], axis=1)
NEW = X[:20] + 0.1

KERNELS: dict[str, Callable[[], gp.Kernel]] = {
    "RBF": lambda: gp.ConstantKernel() * gp.RBF([1.0] * 4) + gp.WhiteKernel(0.5),
    "Matern": lambda: gp.Matern(1.0, nu=1.5) + gp.WhiteKernel(0.5),
    "composite": lambda: gp.RationalQuadratic(1.0, 0.5) * gp.DotProduct(1.0) + gp.WhiteKernel(0.5),
    "periodic": lambda: 2.0 * gp.RBF(2.0) * gp.ExpSineSquared(1.0, 5.0) + gp.WhiteKernel(0.5),
}
#: What the Cholesky path has to agree to; conjugate gradients with a preconditioner of full rank do nearly as well.
TOLERANCE = {"cholesky": 1e-6, "cg": 1e-4}


@pytest.fixture(autouse=True)
def no_preconditioner_of_full_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that conjugate gradients have something to do for 150 points."""
    monkeypatch.setattr(choice, "RANK_TIMES_POINTS", 0)


def both(solver: str, kernel: Any, y: np.ndarray = Y, probes: int = 200, **options: Any) -> tuple[Any, Any]:
    theirs = reference.GaussianProcessRegressor(kernel, **options).fit(X, y)
    own: dict[str, Any] = {"solver": solver, "tol": 1e-9, "n_probes": probes, "rank": 140, "random_state": 0}
    ours = GaussianProcessRegressor(kernel, **own, **options).fit(X, y)
    return ours, theirs


@pytest.mark.parametrize("solver", TOLERANCE)
@pytest.mark.parametrize("name", KERNELS)
def test_predictions_are_scikit_learns(name: str, solver: str) -> None:
    ours, theirs = both(solver, KERNELS[name](), optimizer=None, normalize_y=True)
    tol = TOLERANCE[solver]
    for option in ({}, {"return_std": True}, {"return_cov": True}):
        got, want = (e.predict(NEW, **option) for e in (ours, theirs))
        for g, w in zip(got, want) if option else [(got, want)]:
            np.testing.assert_allclose(g, w, rtol=tol, atol=tol * np.abs(w).max())
    np.testing.assert_allclose(ours.alpha_, theirs.alpha_, rtol=tol, atol=tol)
    assert (ours.n_iter_ == 1) == (solver == "cholesky") and ours.residual_ < 1e-8
    if solver == "cholesky":
        np.testing.assert_allclose(ours.L_, theirs.L_, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(ours.sample_y(NEW, 3, 1), theirs.sample_y(NEW, 3, 1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("solver", TOLERANCE)
@pytest.mark.parametrize("name", KERNELS)
def test_likelihoods_are_scikit_learns(name: str, solver: str) -> None:
    ours, theirs = both(solver, KERNELS[name](), optimizer=None, normalize_y=True, probes=1500)
    tol = 1e-6 if solver == "cholesky" else 1e-3
    assert ours.log_marginal_likelihood() == pytest.approx(theirs.log_marginal_likelihood(), rel=tol)
    theta = ours.kernel_.theta + 0.1
    (value, gradient), (v, g) = (e.log_marginal_likelihood(theta, eval_gradient=True) for e in (ours, theirs))
    assert value == pytest.approx(v, rel=tol) and value == ours.log_marginal_likelihood(theta)
    np.testing.assert_allclose(gradient, g, rtol=tol, atol=tol * np.abs(g).max())
    ours.log_marginal_likelihood(theta, clone_kernel=False)
    np.testing.assert_allclose(ours.kernel_.theta, theta)


@pytest.mark.parametrize("solver", TOLERANCE)
def test_optimized_kernels_are_scikit_learns(solver: str) -> None:
    ours, theirs = both(solver, KERNELS["Matern"](), normalize_y=True)
    np.testing.assert_allclose(ours.kernel_.theta, theirs.kernel_.theta, atol=1e-3 if solver == "cholesky" else 0.05)
    assert ours.log_marginal_likelihood_value_ == pytest.approx(theirs.log_marginal_likelihood_value_, rel=1e-3)
    np.testing.assert_allclose(ours.predict(NEW), theirs.predict(NEW), rtol=1e-3 if solver == "cholesky" else 2e-2)


@pytest.mark.parametrize("solver", TOLERANCE)
@pytest.mark.parametrize("alpha", [0.3, np.linspace(0.1, 1, 150)], ids=["number", "each"])
def test_targets_and_noise(solver: str, alpha: Any) -> None:
    kernel = gp.ConstantKernel() * gp.RBF(1.0)
    ours, theirs = both(solver, kernel, TARGETS, optimizer=None, alpha=alpha, normalize_y=True)
    tol = TOLERANCE[solver]
    for option in ({"return_std": True}, {"return_cov": True}):
        for g, w in zip(*(e.predict(NEW, **option) for e in (ours, theirs))):
            assert g.shape == w.shape
            np.testing.assert_allclose(g, w, rtol=tol, atol=tol * np.abs(w).max())
    assert ours.log_marginal_likelihood() == pytest.approx(theirs.log_marginal_likelihood(), rel=1e-3)
    assert ours.sample_y(NEW, 4).shape == theirs.sample_y(NEW, 4).shape == (20, 2, 4)
    one = both(solver, kernel, Y[:, None], optimizer=None, alpha=alpha)
    assert one[0].predict(NEW).shape == one[1].predict(NEW).shape


def test_the_prior() -> None:
    for options in ({}, {"kernel": gp.RBF(0.5) + gp.WhiteKernel(0.2), "n_targets": 2}):
        ours, theirs = GaussianProcessRegressor(**options), reference.GaussianProcessRegressor(**options)
        for option in ({}, {"return_std": True}, {"return_cov": True}):
            got, want = (e.predict(NEW, **option) for e in (ours, theirs))
            for g, w in zip(got, want) if option else [(got, want)]:
                np.testing.assert_allclose(g, w, rtol=1e-12)
    np.testing.assert_allclose(
        GaussianProcessRegressor().sample_y(NEW, 2), reference.GaussianProcessRegressor().sample_y(NEW, 2), rtol=1e-6
    )


def test_restarts_optimizers_and_seeds() -> None:
    kernel = gp.RBF(1.0, (0.1, 10.0)) + gp.WhiteKernel(0.5, (1e-3, 1e1))
    options: dict[str, Any] = {"normalize_y": True, "random_state": 0}
    plain = GaussianProcessRegressor(kernel, **options).fit(X, Y)
    again = GaussianProcessRegressor(kernel, n_restarts_optimizer=2, **options).fit(X, Y)
    assert again.log_marginal_likelihood_value_ >= plain.log_marginal_likelihood_value_ - 1e-6
    seen = []

    def optimizer(objective, theta, bounds):
        seen.append((objective(theta), objective(theta, eval_gradient=False), bounds))
        return theta + 0.1, objective(theta + 0.1, eval_gradient=False)

    mine = GaussianProcessRegressor(kernel, optimizer=optimizer, **options).fit(X, Y)
    ((value, gradient), same, bounds) = seen[0]
    assert value == same and gradient.shape == (2,) and bounds.shape == (2, 2)
    np.testing.assert_allclose(mine.kernel_.theta, kernel.theta + 0.1)
    first, second = (GaussianProcessRegressor(kernel, solver="cg", **options).fit(X, Y) for _ in range(2))
    assert np.array_equal(first.kernel_.theta, second.kernel_.theta)
    assert np.array_equal(first.predict(NEW), pickle.loads(pickle.dumps(second)).predict(NEW))
    assert clone(first).get_params() == second.get_params()


@pytest.mark.parametrize("options", [{"solver": "cholesky"}, {"solver": "cg"}, {"solver": "cg", "dtype": "float64"},
                                     {"solver": "cg", "preconditioner": "nystrom"},
                                     {"solver": "cg", "preconditioner": None, "alpha": 0.1}], ids=str)  # fmt: skip
def test_float32(options: dict[str, Any]) -> None:
    theirs = reference.GaussianProcessRegressor(KERNELS["RBF"](), alpha=options.get("alpha", 1e-10), optimizer=None)
    want = theirs.fit(X, Y / 100).predict(NEW, return_std=True)
    ours = GaussianProcessRegressor(KERNELS["RBF"](), optimizer=None, **options)
    got = ours.fit(X.astype(np.float32), Y / 100).predict(NEW.astype(np.float32), return_std=True)
    for g, w in zip(got, want):
        assert g.dtype == np.float32
        np.testing.assert_allclose(g, w, rtol=1e-3)


@pytest.mark.parametrize("solver", TOLERANCE)
@pytest.mark.parametrize("metric", ["linear", "cosine", "rbf", "polynomial"])
def test_kernels_of_pairs(metric: str, solver: str) -> None:
    """Also those that their only hyper-parameter does nothing for."""
    kernel = gp.PairwiseKernel(metric=metric, gamma=0.5, gamma_bounds=(1e-3, 1.0))
    ours, theirs = both(solver, kernel, Y / 100, alpha=0.5)
    np.testing.assert_allclose(ours.kernel_.theta, theirs.kernel_.theta, atol=1e-3)
    np.testing.assert_allclose(ours.predict(NEW), theirs.predict(NEW), rtol=1e-3)


def test_the_kernel_that_is_not_given() -> None:
    """It is optimized, as by scikit-learn from 1.9 on; before, that took a kernel."""
    ours, theirs = both("cholesky", None, alpha=0.5), both("cholesky", gp.ConstantKernel() * gp.RBF(), alpha=0.5)
    np.testing.assert_allclose(ours[0].kernel_.theta, theirs[1].kernel_.theta, atol=1e-4)
    assert ours[0].log_marginal_likelihood_value_ == pytest.approx(theirs[1].log_marginal_likelihood_value_)


def test_parameters_out_of_a_grid_of_arrays() -> None:
    grid = {"normalize_y": np.array([True, False]), "solver": np.array(["cg"]), "rank": np.array([20, 30]),
            "alpha": np.array([0.5], dtype=np.float32), "n_probes": np.array([5])}  # fmt: skip
    search = GridSearchCV(
        GaussianProcessRegressor(KERNELS["Matern"](), optimizer=None), grid, cv=2, error_score="raise"
    )
    assert search.fit(X, Y).best_params_["normalize_y"]


def test_bad_input() -> None:
    twice = np.concatenate([X, X[:5]])
    y = np.concatenate([Y, Y[:5]])
    with pytest.warns(NumericalWarning, match="was added to its diagonal"):
        model = GaussianProcessRegressor(gp.RBF(1.0), alpha=0, optimizer=None).fit(twice, y)
    assert np.abs(model.predict(X[:5]) - Y[:5]).max() < 1
    noisy = gp.RBF() + gp.WhiteKernel()
    constant = GaussianProcessRegressor(noisy, normalize_y=True, optimizer=None).fit(X, np.full(150, 3.0))
    np.testing.assert_allclose(constant.predict(NEW), 3.0)
    assert GaussianProcessRegressor().fit(X[:1], Y[:1]).predict(X[:1]) == pytest.approx(Y[0])
    with pytest.raises(ValueError, match="NaN"):
        GaussianProcessRegressor().fit(np.where(X > 0.9, np.nan, X) * np.nan, Y)
    with pytest.raises(TypeError, match="CompoundKernel has no translation"):
        GaussianProcessRegressor(gp.CompoundKernel([gp.RBF(), gp.RBF()]), optimizer=None).fit(X, Y)
    with pytest.raises(NotPositiveDefiniteError):
        GaussianProcessRegressor(gp.PairwiseKernel(metric="sigmoid"), optimizer=None).fit(10 * X, Y)
    with pytest.warns(
        ConvergenceWarning, match="GaussianProcessRegressor stopped after 2 iterations at a relative residual"
    ):
        GaussianProcessRegressor(gp.RBF(0.3), alpha=0.01, optimizer=None, solver="cg", max_iter=2,
                                 preconditioner=None).fit(X, Y)  # fmt: skip
    with pytest.raises(RuntimeError, match="At most one of return_std or return_cov"):
        model.predict(X, return_std=True, return_cov=True)
    with pytest.raises(ValueError, match="needs a theta"):
        model.log_marginal_likelihood(eval_gradient=True)
    with pytest.raises(ValueError, match="n_targets is 3, but y has 1"):
        GaussianProcessRegressor(n_targets=3).fit(X, Y)
    with pytest.raises(ValueError, match="alpha must be a number or one for each of 150 samples"):
        GaussianProcessRegressor(alpha=[0.1, 0.2]).fit(X, Y)
    with pytest.raises(ValueError, match="alpha must be a number >= 0"):
        GaussianProcessRegressor(alpha=-1.0).fit(X, Y)
    with pytest.raises(ValueError, match="finite bounds"):
        GaussianProcessRegressor(gp.RBF(1.0, (1e-5, np.inf)), n_restarts_optimizer=1).fit(X, Y)


def test_more_queries_than_are_computed_at_once() -> None:
    ours = GaussianProcessRegressor(KERNELS["RBF"](), optimizer=None).fit(X, Y)
    many = np.concatenate([NEW] * 30)
    std = ours.predict(many, return_std=True)[1]
    np.testing.assert_allclose(std.reshape(30, 20), np.tile(ours.predict(NEW, return_std=True)[1], (30, 1)))
    covariance = ours.predict(many, return_cov=True)[1]
    np.testing.assert_allclose(np.sqrt(np.diag(covariance)), std)


def test_nothing_is_warned_of_where_all_is_well() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GaussianProcessRegressor(KERNELS["RBF"](), normalize_y=True, solver="cg").fit(X, Y).predict(
            NEW, return_std=True
        )


def test_restarts_begin_where_those_of_scikit_learn_do():
    X = np.random.RandomState(0).rand(10, 1)
    found: list[list[np.ndarray]] = []
    for kind in (GaussianProcessRegressor, reference.GaussianProcessRegressor):
        starts: list[np.ndarray] = []

        def optimizer(objective, start, bounds, starts=starts):
            starts.append(start.copy())
            return start, objective(start)[0]

        kind(gp.RBF() + gp.WhiteKernel(), random_state=0, n_restarts_optimizer=2, optimizer=optimizer).fit(X, X[:, 0])
        found.append(starts)
    np.testing.assert_allclose(found[0], found[1])


@pytest.mark.parametrize("kernel", ["rbf", 3])
def test_kernels_are_those_of_scikit_learn(kernel):
    with pytest.raises(TypeError, match=r"kernel must be a kernel of sklearn\.gaussian_process\.kernels"):
        GaussianProcessRegressor(kernel).fit([[0.0]], [0.0])


def test_many_queries_take_the_quickest_preconditioner(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name keeps it, and deviations are those of the exact matrix in each case."""
    monkeypatch.setattr(preconditioning, "default_rank", lambda n, device: 10)
    made: list[str] = []
    of = preconditioning.make_preconditioner

    def watched(*arguments: Any) -> Any:
        found = of(*arguments)
        made.append(found.kind)
        return found

    monkeypatch.setattr(preconditioning, "make_preconditioner", watched)
    kernel, many = KERNELS["RBF"](), np.concatenate([NEW] * 3)
    want = GaussianProcessRegressor(kernel, optimizer=None).fit(X, Y).predict(many, return_std=True)[1]
    for name, kind in (("auto", "cholesky"), ("pivoted_cholesky", "pivoted_cholesky"), ("cholesky", "cholesky")):
        model = GaussianProcessRegressor(kernel, optimizer=None, solver="cg", preconditioner=name, tol=1e-6)
        model.fit(X, Y)
        made.clear()
        std = model.predict(many, return_std=True)[1]
        assert made == [kind]
        np.testing.assert_allclose(std, want, rtol=1e-5)


def test_likelihoods_are_not_by_the_stored_matrix() -> None:
    """Of whose gradient its few random vectors say little; predictions are."""
    rng = np.random.default_rng(0)
    x, y = rng.random((300, 2)), rng.standard_normal(300)
    settings = {"solver": "cg", "optimizer": None, "n_probes": 10, "random_state": 0}
    kernel = gp.ConstantKernel(1.0) * gp.RBF(0.3) + gp.WhiteKernel(0.1)
    exact = GaussianProcessRegressor(kernel, solver="cholesky", optimizer=None).fit(x, y)
    found = GaussianProcessRegressor(kernel, preconditioner="cholesky", **settings).fit(x, y)
    _, want = exact.log_marginal_likelihood(exact.kernel_.theta, eval_gradient=True)
    _, got = found.log_marginal_likelihood(found.kernel_.theta, eval_gradient=True)
    assert np.abs(got - want).max() < 0.02 * np.abs(want).max()
    np.testing.assert_allclose(found.predict(x, return_std=True)[1], exact.predict(x, return_std=True)[1], rtol=1e-3)
