"""GaussianProcessClassifier against scikit-learn, and its iterative path against the exact one."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import joblib
import numpy as np
import pytest
import torch
from sklearn import gaussian_process as reference
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_digits, load_iris
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import kernels as gp

from kernops.estimators import GaussianProcessClassifier
from kernops.operators import NotPositiveDefiniteError, NumericalWarning, choice

X, Y = load_breast_cancer(return_X_y=True)
X = ((X - X.mean(axis=0)) / X.std(axis=0))[:, :10]
NEW = X[200:240]
X, Y = X[:200], Y[:200]
IRIS, SPECIES = load_iris(return_X_y=True)

KERNELS: dict[str, gp.Kernel] = {
    "RBF": gp.ConstantKernel(2.0) * gp.RBF([3.0] * 10),
    "Matern and noise": 4.0 * gp.Matern(5.0, nu=1.5) + gp.WhiteKernel(0.2),
    "composite": gp.RationalQuadratic(2.0, 0.5) * gp.DotProduct(1.0) + gp.ConstantKernel(0.5),
    "confident": 1e4 * gp.RBF(6.0),
}
#: Accurate enough for the limits below, by iteration.
ITERATIVE: dict[str, Any] = {"solver": "cg", "tol": 1e-7, "n_probes": 20, "random_state": 0}


@pytest.fixture(autouse=True)
def no_preconditioner_of_full_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that conjugate gradients have something to do for 200 points."""
    monkeypatch.setattr(choice, "RANK_TIMES_POINTS", 0)


def close(got: Any, want: Any, tol: float) -> None:
    np.testing.assert_allclose(got, want, rtol=tol, atol=tol * np.abs(want).max())


@pytest.mark.parametrize("name", KERNELS)
def test_exact_answers_are_scikit_learns(name: str) -> None:
    theirs = reference.GaussianProcessClassifier(KERNELS[name], optimizer=None).fit(X, Y)
    ours = GaussianProcessClassifier(KERNELS[name], optimizer=None).fit(X, Y)
    close(ours.predict_proba(NEW), theirs.predict_proba(NEW), 1e-6)
    assert np.array_equal(ours.predict(NEW), theirs.predict(NEW))
    for got, want in zip(ours.latent_mean_and_variance(NEW), theirs.latent_mean_and_variance(NEW)):
        close(got, want, 1e-6)
    assert ours.log_marginal_likelihood() == pytest.approx(theirs.log_marginal_likelihood(), rel=1e-6)
    theta = ours.kernel_.theta + 0.3
    (value, gradient), (v, g) = (e.log_marginal_likelihood(theta, eval_gradient=True) for e in (ours, theirs))
    assert value == pytest.approx(v, rel=1e-6) and value == ours.log_marginal_likelihood(theta)
    close(gradient, g, 1e-6)
    for attribute in ("pi_", "W_sr_", "L_"):
        close(getattr(ours.base_estimator_, attribute), getattr(theirs.base_estimator_, attribute), 1e-6)


@pytest.mark.parametrize("name", KERNELS)
def test_iterative_answers_are_the_exact_ones(name: str) -> None:
    exact = GaussianProcessClassifier(KERNELS[name], optimizer=None).fit(X, Y)
    ours = GaussianProcessClassifier(KERNELS[name], optimizer=None, **ITERATIVE).fit(X, Y)
    assert ours.residual_ <= 1e-7 and 4 <= ours.n_iter_ <= 30 and not hasattr(ours.base_estimator_, "L_")
    close(ours.predict_proba(NEW), exact.predict_proba(NEW), 1e-4)
    for got, want in zip(ours.latent_mean_and_variance(NEW), exact.latent_mean_and_variance(NEW)):
        close(got, want, 1e-4)
    theta = exact.kernel_.theta + 0.1
    (value, gradient), (v, g) = (e.log_marginal_likelihood(theta, eval_gradient=True) for e in (ours, exact))
    assert value == pytest.approx(v, rel=1e-3)
    close(gradient, g, 2e-2)
    assert ours.base_estimator_.log_marginal_likelihood_error_ < 0.1


def test_large_kernels_do_not_amplify_residuals() -> None:
    """A small gradient is not a mode yet. scikit-learn's Newton method overshoots here, and ends where it did."""
    kernel = 1e5 * gp.RBF(2.0)
    theirs = reference.GaussianProcessClassifier(kernel, optimizer=None).fit(X[:, :4], Y)
    exact = GaussianProcessClassifier(kernel, optimizer=None).fit(X[:, :4], Y)
    own = exact.base_estimator_
    np.testing.assert_allclose(own._weights, Y - own.pi_, atol=1e-9)  # what defines the mode
    latent = kernel(X[:, :4]) @ own._weights
    np.testing.assert_allclose(1 / (1 + np.exp(-latent)), own.pi_, atol=1e-9)
    assert exact.log_marginal_likelihood_value_ > theirs.log_marginal_likelihood_value_ + 1
    ours = GaussianProcessClassifier(kernel, optimizer=None, solver="cg", tol=1e-3).fit(X[:, :4], Y)
    np.testing.assert_allclose(ours.predict_proba(NEW[:, :4]), exact.predict_proba(NEW[:, :4]), atol=1e-3)


def test_gradients_by_probes_are_unbiased() -> None:
    """Among them the part that the mode contributes, which is several times the accuracy that is tested here."""
    kernel = gp.ConstantKernel(10.0) * gp.RBF(1.5)
    exact = GaussianProcessClassifier(kernel, optimizer=None).fit(X[:80], Y[:80])
    _, want = exact.log_marginal_likelihood(exact.kernel_.theta, eval_gradient=True)
    found = []
    for seed in range(12):
        ours = GaussianProcessClassifier(kernel, optimizer=None, **{**ITERATIVE, "random_state": seed, "rank": 20})
        found.append(ours.fit(X[:80], Y[:80]).log_marginal_likelihood(exact.kernel_.theta, eval_gradient=True)[1])
    spread = np.std(found, axis=0, ddof=1) / len(found) ** 0.5
    assert (np.abs(np.mean(found, axis=0) - want) < 4 * spread).all()
    assert (spread < 0.02 * np.abs(want).max()).all()


def test_gradients_are_those_of_differences() -> None:
    model = GaussianProcessClassifier(KERNELS["Matern and noise"], optimizer=None).fit(X, Y)
    theta = model.kernel_.theta
    _, gradient = model.log_marginal_likelihood(theta, eval_gradient=True)
    steps = 1e-5 * np.eye(len(theta))
    differences = [model.log_marginal_likelihood(theta + s) - model.log_marginal_likelihood(theta - s) for s in steps]
    np.testing.assert_allclose(gradient, np.array(differences) / 2e-5, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {**ITERATIVE, "tol": 1e-4}], ids=["cholesky", "cg"])
def test_optimized_kernels_are_scikit_learns(options: dict[str, Any]) -> None:
    kernel = gp.ConstantKernel(9.0, constant_value_bounds="fixed") * gp.RBF(1.0)
    theirs = reference.GaussianProcessClassifier(kernel).fit(X[:100, :4], Y[:100])
    ours = GaussianProcessClassifier(kernel, **options).fit(X[:100, :4], Y[:100])
    tol = 0.05 if options else 1e-3
    np.testing.assert_allclose(ours.kernel_.theta, theirs.kernel_.theta, atol=tol)
    assert ours.log_marginal_likelihood_value_ == pytest.approx(theirs.log_marginal_likelihood_value_, rel=1e-3)
    np.testing.assert_allclose(ours.predict_proba(NEW[:, :4]), theirs.predict_proba(NEW[:, :4]), atol=tol / 5)


@pytest.mark.parametrize("multi_class", ["one_vs_rest", "one_vs_one"])
def test_several_classes(multi_class: str) -> None:
    labels = np.array(["setosa", "versicolor", "virginica"])[SPECIES]
    options: dict[str, Any] = {"kernel": 2.0 * gp.RBF(1.0), "optimizer": None, "multi_class": multi_class}
    theirs = reference.GaussianProcessClassifier(**options).fit(IRIS[::2], labels[::2])
    with joblib.parallel_config("threading"):
        ours = GaussianProcessClassifier(**options, n_jobs=2).fit(IRIS[::2], labels[::2])
    assert np.array_equal(ours.predict(IRIS), theirs.predict(IRIS)) and list(ours.classes_) == list(theirs.classes_)
    assert ours.n_classes_ == 3 and ours.kernel_ == theirs.kernel_
    theta = ours.kernel_.theta + 0.1
    for t in (None, theta, theta[:2]):
        assert ours.log_marginal_likelihood(t) == pytest.approx(theirs.log_marginal_likelihood(t), rel=1e-6)
    with pytest.raises(NotImplementedError, match="two classes only"):
        ours.log_marginal_likelihood(theta, eval_gradient=True)
    with pytest.raises(ValueError, match="theta must have 2 or 6 entries; got 3"):
        ours.log_marginal_likelihood(theta[:3])
    with pytest.raises(ValueError, match="two classes only; got 3"):
        ours.latent_mean_and_variance(IRIS)
    if multi_class == "one_vs_rest":
        close(ours.predict_proba(IRIS), theirs.predict_proba(IRIS), 1e-6)
    else:
        with pytest.raises(ValueError, match="has no probabilities"):
            ours.predict_proba(IRIS)


def test_digits_in_float32() -> None:
    """Even against odd, a problem with a slowly decaying spectrum."""
    images, digits = load_digits(return_X_y=True)
    images, odd = (images / 16)[:500], digits[:500] % 2
    kernel = 4.0 * gp.RBF(2.0)
    theirs = reference.GaussianProcessClassifier(kernel, optimizer=None).fit(images[:400], odd[:400])
    ours = GaussianProcessClassifier(kernel, optimizer=None, solver="cg").fit(
        images[:400].astype(np.float32), odd[:400]
    )
    found = ours.predict_proba(images[400:].astype(np.float32))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, theirs.predict_proba(images[400:]), atol=2e-3)
    assert ours.score(images[400:], odd[400:]) == theirs.score(images[400:], odd[400:]) > 0.85


def test_pickles_carry_numbers_only_and_work_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that says cuda is loaded where there is none; its parameter is what has to be changed."""
    for options in ({}, {**ITERATIVE, "tol": 1e-4}):
        model = GaussianProcessClassifier(KERNELS["RBF"], optimizer=None, **options).fit(X, Y)
        want = model.predict_proba(NEW)
        assert not any(isinstance(v, torch.Tensor) for v in vars(model.base_estimator_).values())
        again = pickle.loads(pickle.dumps(model.set_params(device="cuda")))
        if not torch.cuda.is_available():
            with pytest.raises(ValueError, match="no CUDA device here; use 'auto' or 'cpu'"):
                again.predict(NEW)
        np.testing.assert_array_equal(again.set_params(device="cpu").predict_proba(NEW), want)


def test_warm_starts_save_steps() -> None:
    model = GaussianProcessClassifier(KERNELS["confident"], optimizer=None, warm_start=True)
    assert model.fit(X, Y).n_iter_ == clone(model).set_params(warm_start=False).fit(X, Y).n_iter_ > 5
    assert model.base_estimator_.fit(X, Y).n_iter_ <= 2
    cold = clone(model).set_params(warm_start=False).fit(X, Y)
    assert cold.n_iter_ > 5
    close(model.predict_proba(NEW), cold.predict_proba(NEW), 1e-6)
    model.base_estimator_._last = np.zeros(3)  # of other data
    assert model.base_estimator_.fit(X, Y).n_iter_ > 5 and not hasattr(model.base_estimator_, "_recent")


def test_too_few_steps_are_reported() -> None:
    with pytest.warns(ConvergenceWarning, match=r"stopped at a relative residual of .*: 2 steps were not enough"):
        GaussianProcessClassifier(KERNELS["confident"], optimizer=None, max_iter_predict=2).fit(X, Y)


@pytest.mark.parametrize("options", [{}, {"solver": "cg"}], ids=["cholesky", "cg"])
def test_bad_input(options: dict[str, Any]) -> None:
    model = GaussianProcessClassifier(KERNELS["RBF"], optimizer=None, **options)
    with pytest.raises(ValueError, match="two classes or more; got 1 class: 1"):
        model.fit(X, np.ones(200, dtype=int))
    with pytest.raises(ValueError, match="NaN"):
        model.fit(np.where(X > 2, np.nan, X), Y)
    with pytest.raises(ValueError, match="infinity"):
        model.fit(np.where(X > 2, np.inf, X), Y)
    with pytest.raises(ValueError, match="Unknown label type"):
        model.fit(X, X[:, 0])
    indefinite = GaussianProcessClassifier(1e3 * gp.PairwiseKernel(metric="sigmoid"), optimizer=None, **options)
    with pytest.raises(NotPositiveDefiniteError):
        indefinite.fit(10 * X, Y)
    with pytest.raises(TypeError, match="CompoundKernel has no translation"):
        GaussianProcessClassifier(gp.CompoundKernel([gp.RBF(), gp.RBF()]), **options).fit(X, Y)
    with pytest.raises(ValueError, match="finite bounds"):
        GaussianProcessClassifier(gp.RBF(1.0, (1e-5, np.inf)), n_restarts_optimizer=1, **options).fit(X, Y)


@pytest.mark.parametrize("options", [{}, {"solver": "cg", "rank": 300}], ids=["cholesky", "cg"])
def test_odd_input(options: dict[str, Any]) -> None:
    """Equal rows, rows of both classes, two samples, constant features and a rank above their number: no warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        twice = np.concatenate([X[:60], X[:60]])
        labels = np.concatenate([Y[:60], Y[:60]])
        labels[60:65] = 1 - labels[60:65]
        kernel = 4.0 * gp.RBF(3.0)
        theirs = reference.GaussianProcessClassifier(kernel, optimizer=None).fit(twice, labels)
        ours = GaussianProcessClassifier(kernel, optimizer=None, **options).fit(twice, labels)
        np.testing.assert_allclose(ours.predict_proba(NEW), theirs.predict_proba(NEW), atol=1e-3)
        two = GaussianProcessClassifier(gp.RBF(), optimizer=None, **options).fit(X[[0, 21]], [0, 1])
        assert list(two.predict(X[[0, 21]])) == [0, 1]
        same = GaussianProcessClassifier(gp.RBF(), optimizer=None, **options).fit(np.zeros((6, 2)), [0, 1] * 3)
        np.testing.assert_allclose(same.predict_proba(np.zeros((1, 2))), 0.5, atol=1e-6)


def test_a_kernel_without_parameters_has_an_empty_gradient() -> None:
    kernel = gp.RBF(2.0, length_scale_bounds="fixed")
    for options in ({}, {"solver": "cg"}):
        model = GaussianProcessClassifier(kernel, **options).fit(X, Y)
        value, gradient = model.log_marginal_likelihood(np.zeros(0), eval_gradient=True)
        assert value == model.log_marginal_likelihood() and gradient.shape == (0,)


def test_an_indefinite_step_of_the_optimizer_is_left_again() -> None:
    """Where Cholesky's decomposition fails, the likelihood is that of an impossible kernel."""
    kernel = gp.PairwiseKernel(metric="sigmoid", gamma=1.0) + gp.ConstantKernel(0.1)
    model = GaussianProcessClassifier(gp.RBF(), optimizer=None).fit(10 * X, Y)
    model.base_estimator_.kernel_ = kernel
    value, gradient = model.base_estimator_.log_marginal_likelihood(np.array([9.0, 0.0]), eval_gradient=True)
    assert value == -np.inf and np.array_equal(gradient, np.zeros(2))


def test_no_warnings_where_all_is_well() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", NumericalWarning)
        warnings.simplefilter("error", ConvergenceWarning)
        GaussianProcessClassifier(KERNELS["RBF"], solver="cg", optimizer=None).fit(X, Y).predict_proba(NEW)
