"""scikit-learn's own checks of estimators, without exceptions."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.base import BaseEstimator, ClassifierMixin, clone
from sklearn.datasets import load_iris
from sklearn.gaussian_process.kernels import RBF, WhiteKernel
from sklearn.utils.estimator_checks import parametrize_with_checks

from kernops.estimators import (
    GaussianProcessClassifier,
    GaussianProcessRegressor,
    KernelDensity,
    KernelRidge,
    KNeighborsClassifier,
    NearestNeighbors,
)

ESTIMATORS: list[BaseEstimator] = [
    NearestNeighbors(),
    KNeighborsClassifier(),
    KNeighborsClassifier(weights="distance", metric="manhattan"),
    KernelDensity(),
    KernelDensity(kernel="epanechnikov", bandwidth="scott"),
    KernelRidge(),
    KernelRidge(kernel="rbf", solver="cg", tol=1e-2),
    GaussianProcessRegressor(),
    GaussianProcessRegressor(RBF() + WhiteKernel(), solver="cg", optimizer=None, random_state=0),
    GaussianProcessClassifier(),
    GaussianProcessClassifier(RBF(), solver="cg", tol=1e-2, rank=20, optimizer=None, random_state=0),
]


@parametrize_with_checks(ESTIMATORS)
def test_scikit_learns_checks(estimator: Any, check: Any) -> None:
    check(estimator)


def answers(estimator: Any, X: Any) -> np.ndarray:
    for name in ("predict", "score_samples"):
        if hasattr(estimator, name):
            return getattr(estimator, name)(X)
    return estimator.kneighbors(X)[0]


@pytest.fixture(params=ESTIMATORS, ids=str)
def fitted(request: pytest.FixtureRequest) -> Any:
    X, y = load_iris(return_X_y=True)
    estimator = clone(request.param)
    if "tol" in estimator.get_params():
        estimator.set_params(tol=1e-6)
    return estimator.fit(X, y)


def test_survives_pickle_and_clone(fitted: Any) -> None:
    X, _ = load_iris(return_X_y=True)
    again = pickle.loads(pickle.dumps(fitted))
    assert np.array_equal(answers(again, X), answers(fitted, X))
    assert clone(fitted).get_params() == fitted.get_params()


def test_takes_data_frames(fitted: Any) -> None:
    X, y = load_iris(return_X_y=True, as_frame=True)
    assert isinstance(X, pd.DataFrame)
    framed = clone(fitted).fit(X, y)
    assert list(framed.feature_names_in_) == list(X.columns)
    assert np.array_equal(answers(framed, X), answers(fitted, X.to_numpy()))
    with pytest.raises(ValueError, match="feature names"):
        answers(framed, X[X.columns[::-1]])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_computes_in_the_dtype_of_the_data(fitted: Any, dtype: type) -> None:
    X, y = load_iris(return_X_y=True)
    out = answers(clone(fitted).fit(X.astype(dtype), y), X.astype(dtype))
    if not isinstance(fitted, ClassifierMixin):  # whose answers are labels
        assert out.dtype == dtype
    np.testing.assert_allclose(out, answers(fitted, X), atol=1e-3)


@pytest.mark.parametrize("device", ["gpu", 3.5, "cuda:99"])
def test_names_an_unknown_device(fitted: Any, device: Any) -> None:
    X, _ = load_iris(return_X_y=True)
    with pytest.raises((ValueError, RuntimeError), match="device|CUDA"):
        answers(fitted.set_params(device=device), X)


BAD: list[tuple[BaseEstimator, type[Exception], str]] = [
    (NearestNeighbors(n_neighbors=0), ValueError, "n_neighbors .* must be an integer >= 1; got 0"),
    (NearestNeighbors(n_neighbors=2.5), TypeError, "n_neighbors .* must be an integer >= 1; got 2.5"),
    (NearestNeighbors(metric="euclid"), ValueError, "metric .* must be one of .*'euclidean'.*; got 'euclid'"),
    (NearestNeighbors(algorithm="lsh"), ValueError, "algorithm .* one of .*'kd_tree'.*; got 'lsh'"),
    (NearestNeighbors(p=-1), ValueError, "p of .* must be a number > 0"),
    (KNeighborsClassifier(weights="gauss"), ValueError, "weights .* or a callable; got 'gauss'"),
    (KernelDensity(bandwidth=0), ValueError, "bandwidth .* a number > 0 or one of 'scott', 'silverman'; got 0"),
    (KernelDensity(bandwidth="ruppert"), ValueError, "bandwidth .*; got 'ruppert'"),
    (KernelDensity(kernel="box"), ValueError, "kernel .* 'tophat'.*; got 'box'"),
    (KernelRidge(kernel="rbff"), ValueError, "kernel .* 'rbf'.*; got 'rbff'"),
    (KernelRidge(alpha=-1.0), ValueError, "alpha must be a number >= 0 .*; got -1.0"),
    (KernelRidge(alpha=[1.0, 2.0]), ValueError, "alpha must be .* one for each of 1 targets; got shape"),
    (KernelRidge(tol=0), ValueError, "tol .* must be a number > 0"),
    (KernelRidge(max_iter=0), ValueError, "max_iter .* an integer >= 1 or None; got 0"),
    (KernelRidge(solver="lu"), ValueError, "solver .* 'cholesky'.*; got 'lu'"),
    (KernelRidge(kernel="rbf", kernel_params={"length": 1.0}), TypeError, "'rbf' takes gamma; got 'length'"),
    (GaussianProcessRegressor(optimizer="adam"), ValueError, "optimizer .* 'fmin_l_bfgs_b'.*; got 'adam'"),
    (GaussianProcessRegressor(n_probes=0), ValueError, "n_probes .* an integer >= 1; got 0"),
    (GaussianProcessRegressor(dtype="float16"), ValueError, "dtype .* 'float32', 'float64'; got 'float16'"),
    (GaussianProcessRegressor(preconditioner="jacobi"), ValueError, "preconditioner .* 'cholesky'; got 'jacobi'"),
    (GaussianProcessRegressor(rank=0), ValueError, "rank .* an integer >= 1 or None; got 0"),
    (GaussianProcessRegressor(verbose=3), ValueError, "verbose .* one of 0, 1, 2, .*; got 3"),
    (GaussianProcessClassifier(max_iter_predict=0), ValueError, "max_iter_predict .* an integer >= 1; got 0"),
    (GaussianProcessClassifier(multi_class="softmax"), ValueError, "multi_class .* 'one_vs_one'; got 'softmax'"),
    (GaussianProcessClassifier("rbf"), TypeError, r"kernel must be a kernel of sklearn.*; got 'rbf'"),
    (GaussianProcessClassifier(RBF(-1.0)), ValueError, "length_scale of RBF must be finite and > 0; got -1.0"),
    (GaussianProcessRegressor(RBF([1.0, 0.0])), ValueError, r"length_scale of RBF must be .* > 0; got \[1.0, 0"),
    (GaussianProcessRegressor(RBF([1.0, 2.0])), ValueError, "one number or one for each of 4 features; got 2"),
    (KernelRidge(verbose="yes"), ValueError, "verbose .* one of 0, 1, 2, .*; got 'yes'"),
]


@pytest.mark.parametrize(
    ("estimator", "error", "message"), BAD, ids=lambda v: str(v) if isinstance(v, BaseEstimator) else ""
)
def test_names_a_bad_parameter(estimator: Any, error: type[Exception], message: str) -> None:
    X, y = load_iris(return_X_y=True)
    with pytest.raises(error, match=message):
        estimator.fit(X, y)
