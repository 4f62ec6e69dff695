"""Input that is wrong, or odd: a clear error, or a right answer with a warning that says what was done."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_diabetes
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.gaussian_process import GaussianProcessRegressor as Reference
from sklearn.gaussian_process import kernels as gp

from kernops.estimators import GaussianProcessClassifier, GaussianProcessRegressor, KernelRidge
from kernops.operators import NotPositiveDefiniteError, NumericalWarning

X, Y = load_diabetes(return_X_y=True)
X, Y = X[:60, :3] * 10, Y[:60] / 100
LABELS = (Y > 1.3).astype(int)
SIGMOID = gp.PairwiseKernel(metric="sigmoid", gamma=5.0)


def regressor(kernel: Any = None, **more: Any) -> Any:
    return GaussianProcessRegressor(gp.RBF() if kernel is None else kernel, optimizer=None, **more)


def classifier(kernel: Any = None, **more: Any) -> Any:
    return GaussianProcessClassifier(gp.RBF() if kernel is None else kernel, optimizer=None, **more)


def ridge(**more: Any) -> Any:
    return KernelRidge(**{"kernel": "rbf", "alpha": 0.1, **more})


KINDS: dict[str, tuple[Any, np.ndarray]] = {
    "GaussianProcessRegressor": (regressor, Y),
    "GaussianProcessClassifier": (classifier, LABELS),
    "KernelRidge": (ridge, Y),
}
each = pytest.mark.parametrize("name", KINDS)
solvers = pytest.mark.parametrize("solver", ["cholesky", "cg"])


# --- for all ------------------------------------------------------------------------------------------------------
@each
@solvers
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite(name: str, solver: str, value: float) -> None:
    make, y = KINDS[name]
    model = make(solver=solver)
    broken = X.copy()
    broken[3, 1] = value
    with pytest.raises(ValueError, match="NaN|infinity"):
        model.fit(broken, y)
    if name != "GaussianProcessClassifier":
        with pytest.raises(ValueError, match="NaN|infinity"):
            model.fit(X, np.where(np.arange(60) == 3, value, Y))
    model.fit(X, y)
    with pytest.raises(ValueError, match="NaN|infinity"):
        model.predict(broken)


@each
def test_predictions_before_fit(name: str) -> None:
    make, _ = KINDS[name]
    if name == "GaussianProcessRegressor":  # scikit-learn's prior
        mean, std = make().predict(X, return_std=True)
        assert not mean.any() and (std == 1).all()
        with pytest.raises(AttributeError, match="log_marginal_likelihood_value_"):
            make().log_marginal_likelihood()
    else:
        with pytest.raises(NotFittedError, match="not fitted yet"):
            make().predict(X)


@each
@solvers
def test_more_features_and_none(name: str, solver: str) -> None:
    make, y = KINDS[name]
    model = make(solver=solver).fit(X, y)
    with pytest.raises(ValueError, match="X has 2 features, but .* is expecting 3 features"):
        model.predict(X[:, :2])
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        make().fit(X, y[:50])
    with pytest.raises(ValueError, match="0 sample"):
        make().fit(X[:0], y[:0])


@each
@solvers
@pytest.mark.parametrize("types", [(np.float32, np.float64), (np.int64, np.float32)], ids=str)
def test_two_dtypes(name: str, solver: str, types: tuple[type, type]) -> None:
    """Queries of another dtype than the samples' are converted, and answered in their own."""
    make, y = KINDS[name]
    scaled = np.round(X * 4)
    noise = {"kernel": gp.RBF() + gp.WhiteKernel(0.1)} if name == "GaussianProcessRegressor" else {}
    want = make(solver=solver, **noise).fit(scaled, y).predict(scaled)
    got = make(solver=solver, **noise).fit(scaled.astype(types[0]), y).predict(scaled.astype(types[1]))
    np.testing.assert_allclose(got, want, atol=2e-3 if solver == "cg" else 1e-4)


@each
@solvers
def test_a_device_that_is_not_there(name: str, solver: str) -> None:
    make, y = KINDS[name]
    with pytest.raises((ValueError, RuntimeError), match="device|CUDA"):
        make(solver=solver, device="cuda:99").fit(X, y)


# --- lengths and the like -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("make", [regressor, classifier])
@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (gp.RBF(0.0), "length_scale of RBF must be finite and > 0; got 0.0"),
        (gp.RBF(-2.0), "length_scale of RBF must be finite and > 0; got -2.0"),
        (gp.Matern([1.0, np.nan, 1.0]), r"length_scale of Matern must be finite and > 0; got \[1.0, nan, 1.0\]"),
        (gp.RBF([1.0, 2.0]), "length_scale of RBF must be one number or one for each of 3 features; got 2"),
        (-1.0 * gp.RBF(), "constant_value of Constant must be finite and > 0; got -1.0"),
        (gp.RBF() + gp.WhiteKernel(-0.1), "noise_level of White must be finite and > 0; got -0.1"),
        (gp.ExpSineSquared(periodicity=0.0), "periodicity of Periodic must be finite and > 0; got 0.0"),
    ],
    ids=str,
)
def test_parameters_of_kernels(make: Any, kernel: Any, message: str) -> None:
    y = Y if make is regressor else LABELS
    with pytest.raises(ValueError, match=message):
        make(kernel).fit(X, y)


@pytest.mark.parametrize("make", [regressor, classifier])
def test_features_that_a_kernel_is_not_defined_for(make: Any) -> None:
    with pytest.raises(ValueError, match="kernel 'chi2' is of features >= 0; X has -"):
        make(gp.RBF() * gp.PairwiseKernel(metric="chi2")).fit(X, Y if make is regressor else LABELS)


@solvers
@pytest.mark.parametrize("length", [0.0, -1.0, np.nan])
def test_lengths_of_kernel_ridge(solver: str, length: float) -> None:
    with pytest.raises(ValueError, match="length_scale of kernel 'matern32' must be finite and > 0; got"):
        ridge(solver=solver, kernel="matern32", kernel_params={"length_scale": length}).fit(X, Y)


@each
@pytest.mark.parametrize("alpha", ["a", [[]], {}, np.inf, np.nan, None], ids=str)
def test_noise_that_is_no_number(name: str, alpha: Any) -> None:
    if name != "GaussianProcessClassifier":
        make, y = KINDS[name]
        with pytest.raises((TypeError, ValueError), match="alpha must be a number"):
            make(alpha=alpha).fit(X, y)


@each
def test_tolerances_are_finite(name: str) -> None:
    make, y = KINDS[name]
    with pytest.raises(ValueError, match="tol of .* must be a number > 0; got inf"):
        make(tol=np.inf).fit(X, y)


@solvers
def test_targets_whose_likelihood_is_no_number(solver: str) -> None:
    """Squares of 1e300 are infinite: no optimizer is told of NaN and goes there, and predictions are what they are."""
    kernel = gp.RBF() + gp.WhiteKernel(0.1)
    want = Reference(kernel, optimizer=None).fit(X, Y).predict(X)
    for optimizer in ("fmin_l_bfgs_b", None):
        model = GaussianProcessRegressor(kernel, solver=solver, optimizer=optimizer, tol=1e-8)
        with pytest.warns(ConvergenceWarning, match="log marginal likelihood of the kernel is (-inf|nan)"):
            model.fit(X, 1e300 * Y)
        np.testing.assert_allclose(model.predict(X) / 1e300, want, rtol=1e-5)


# --- matrices that are singular, or worse -------------------------------------------------------------------------
def test_equal_rows_without_noise() -> None:
    twice, y = np.concatenate([X, X[:9]]), np.concatenate([Y, Y[:9]])
    with pytest.warns(NumericalWarning, match=r"singular.*; .*e-.* was added to its diagonal"):
        model = regressor(alpha=0.0).fit(twice, y)
    np.testing.assert_allclose(model.predict(X), Y, atol=1e-3)
    with warnings.catch_warnings(record=True) as said:  # what has a solution is solved; a likelihood has none
        warnings.simplefilter("always")
        iterative = regressor(0.1 * gp.RBF(0.3), alpha=0.0, solver="cg", rank=10, tol=1e-6).fit(twice, y)
    assert ["log marginal likelihood comes from systems" in str(w.message) for w in said] == [True]
    np.testing.assert_allclose(iterative.predict(X), Y, atol=1e-3)
    with pytest.warns(ConvergenceWarning, match=r"stopped after .* at a relative residual of .*larger alpha"):
        regressor(alpha=0.0, solver="cg", rank=10).fit(twice, y + np.arange(69) / 9)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_searches_through_singular_kernels_end(dtype: str) -> None:
    """Equal rows, with targets that are equal or not, and no noise: nothing of that is NaN in the input."""
    twice = np.concatenate([X[:20], X[:20]])
    for more in (0.0, 1.0):
        y = np.concatenate([Y[:20], Y[:20] + more])
        kernel = gp.ConstantKernel() * gp.RBF()
        model = GaussianProcessRegressor(kernel, alpha=0.0, solver="cg", dtype=dtype, random_state=0)
        with pytest.warns(ConvergenceWarning, match="log marginal likelihood comes from systems"):
            model.fit(twice, y)
        assert np.isfinite(model.predict(X)).all()
        if not more:
            np.testing.assert_allclose(model.predict(X[:20]), Y[:20], atol=1e-2)


@solvers
def test_equal_rows_in_kernel_ridge(solver: str) -> None:
    twice, y = np.concatenate([X, X[:9]]), np.concatenate([Y, Y[:9]])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = ridge(alpha=0.0, gamma=10.0, solver=solver, tol=1e-8).fit(twice, y)
    assert [str(w.message)[:15] for w in said] == (["Singular matrix"] if solver == "cholesky" else [])
    np.testing.assert_allclose(model.predict(X), Y, atol=1e-5)


@solvers
def test_a_kernel_that_is_not_positive_definite(solver: str) -> None:
    with pytest.raises(NotPositiveDefiniteError, match="larger add_diagonal"):
        regressor(SIGMOID, solver=solver).fit(10 * X, Y)
    with pytest.raises(NotPositiveDefiniteError, match="larger add_diagonal"):
        classifier(1e4 * SIGMOID, solver=solver).fit(10 * X, LABELS)
    said = "Singular matrix" if solver == "cholesky" else "is not positive definite"
    with pytest.warns(UserWarning, match=said):
        ridge(kernel="sigmoid", gamma=50.0, alpha=1e-3, solver=solver).fit(10 * X, Y)


# --- small and constant data --------------------------------------------------------------------------------------
@solvers
def test_constant_targets(solver: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for value in (0.0, 3.0):
            y = np.full(60, value)
            model = regressor(gp.RBF() + gp.WhiteKernel(), solver=solver, normalize_y=True).fit(X, y)
            mean, std = model.predict(X, return_std=True)
            theirs = Reference(gp.RBF() + gp.WhiteKernel(), optimizer=None, normalize_y=True).fit(X, y)
            np.testing.assert_allclose(mean, value)
            np.testing.assert_allclose(std, theirs.predict(X, return_std=True)[1], rtol=1e-3)
            assert np.isfinite(model.log_marginal_likelihood_value_)
        assert not ridge(solver=solver).fit(X, np.zeros(60)).predict(X).any()
    with pytest.raises(ValueError, match="two classes or more; got 1 class"):
        classifier(solver=solver).fit(X, np.zeros(60))


@solvers
def test_constant_features(solver: str) -> None:
    """All points equal: a matrix of ones."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = regressor(gp.RBF() + gp.WhiteKernel(0.5), solver=solver).fit(np.ones((60, 2)), Y)
        np.testing.assert_allclose(model.predict(np.ones((1, 2))), Y.sum() / 60.5, rtol=1e-3)
        model = ridge(alpha=0.5, solver=solver).fit(np.ones((60, 2)), Y)
        np.testing.assert_allclose(model.predict(np.ones((1, 2))), Y.sum() / 60.5, rtol=1e-5)


@solvers
def test_one_point(solver: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mean, std = regressor(alpha=0.25, solver=solver).fit(X[:1], Y[:1]).predict(X[:1], return_std=True)
        np.testing.assert_allclose([mean[0], std[0]], [Y[0] / 1.25, (1 - 1 / 1.25) ** 0.5], rtol=1e-6)
        np.testing.assert_allclose(ridge(alpha=0.25, solver=solver).fit(X[:1], Y[:1]).predict(X[:1]), Y[0] / 1.25)


def test_rank_above_the_number_of_points() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kind in ("pivoted_cholesky", "nystrom"):
            model = regressor(gp.RBF() + gp.WhiteKernel(0.1), solver="cg", rank=10_000, preconditioner=kind)
            want = clone(model).set_params(solver="cholesky").fit(X, Y)
            got = model.fit(X, Y)
            for g, w in zip(got.predict(X, return_std=True), want.predict(X, return_std=True)):
                np.testing.assert_allclose(g, w, rtol=1e-3)


def test_warnings_name_the_line_of_the_caller() -> None:
    pytest.importorskip("sklearn.callback")  # whose wrapper of fit is a frame of its own
    twice, y = np.concatenate([X, X[:9]]), np.concatenate([Y, Y[:9] + 1])
    calls = [
        lambda: ridge(alpha=1e-9, solver="cg", max_iter=2).fit(X, Y),
        lambda: ridge(alpha=0.0, gamma=10.0, solver="cholesky").fit(twice, y),
        lambda: regressor(alpha=0.0, solver="cg", rank=10).fit(twice, y),
        lambda: classifier(1e4 * gp.RBF(2.0), max_iter_predict=2).fit(X, LABELS),
    ]
    for call in calls:
        with pytest.warns(UserWarning) as said:
            call()
        assert {w.filename for w in said} == {__file__}


@pytest.mark.parametrize("make", [GaussianProcessRegressor, GaussianProcessClassifier])
@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda theta: theta, "must return a theta of 2 finite numbers; got 0.0"),
        (lambda theta: None, "must return the best theta and its value; got None"),
        (lambda theta: (theta, "small"), "must return the best theta and its value; got"),
        (lambda theta: (theta[:1], 0.0), r"must return a theta of 2 finite numbers; got \[0.\]"),
        (lambda theta: (theta * np.nan, 0.0), r"must return a theta of 2 finite numbers; got \[nan nan\]"),
    ],
    ids=["no value", "nothing", "letters", "too few", "NaN"],
)
def test_optimizers_that_return_something_else(make: Any, returned: Any, message: str) -> None:
    model = make(1.0 * gp.RBF(), optimizer=lambda objective, theta, bounds: returned(theta))
    with pytest.raises((TypeError, ValueError), match=message):
        model.fit(X, LABELS)


# --- what happens around fit --------------------------------------------------------------------------------------
@each
@solvers
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_fit_where_torch_records_no_gradients(name: str, solver: str, mode: Any) -> None:
    make, y = KINDS[name]
    options = {} if name == "KernelRidge" else {"kernel": gp.RBF() + gp.WhiteKernel(0.1), "random_state": 0}
    make = make if name == "KernelRidge" else type(make())
    with mode():
        model = make(solver=solver, **options).fit(X, y)
        got = model.predict(X)
        if options:
            model.log_marginal_likelihood(model.kernel_.theta, eval_gradient=True)
    assert np.array_equal(got, make(solver=solver, **options).fit(X, y).predict(X))
    assert torch.is_grad_enabled()


def test_parameters_that_change_after_fit() -> None:
    """What was found stays, as with scikit-learn; a new fit leaves nothing of the old one."""
    for solver, other in (("cholesky", "cg"), ("cg", "cholesky")):
        model = regressor(alpha=0.1, solver=solver, tol=1e-8).fit(X, Y)
        want = model.predict(X, return_std=True)
        model.set_params(alpha=np.ones(3), solver=other)
        np.testing.assert_allclose(model.predict(X, return_std=True), want, rtol=1e-6)
        model.set_params(alpha=0.1).fit(X, Y)
        assert hasattr(model, "L_") == (other == "cholesky")
        np.testing.assert_allclose(model.predict(X, return_std=True), want, rtol=1e-6)


@each
def test_a_fit_that_fails_leaves_no_mixture(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, y = KINDS[name]
    model = make(alpha=0.1) if name != "GaussianProcessClassifier" else make()
    model.fit(X, y)

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        for function in ("_system", "_laplace", "_solve"):
            of = type(model.base_estimator_ if name == "GaussianProcessClassifier" else model)
            if hasattr(of, function):
                patch.setattr(of, function, interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.fit(X + 1, y)
    with pytest.raises(NotFittedError, match="not fitted yet"):
        model.predict(X)
    want = make(alpha=0.1) if name != "GaussianProcessClassifier" else make()
    assert np.array_equal(model.fit(X + 1, y).predict(X), want.fit(X + 1, y).predict(X))
