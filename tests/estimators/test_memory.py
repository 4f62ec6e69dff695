"""What happens where memory is short: clear errors, smaller tiles, or conjugate gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_diabetes
from sklearn.gaussian_process import kernels as gp

from kernops.estimators import GaussianProcessClassifier, GaussianProcessRegressor, KernelRidge
from kernops.operators import KernelOperator, NumericalWarning, OutOfMemoryError
from kernops.solvers.problems import size_of

X, Y = load_diabetes(return_X_y=True)
X, Y = X[:120, :4] * 10, Y[:120] / 100
LABELS = (Y > 1.3).astype(int)
NEW = X[:30] + 0.1
KERNEL = 2.0 * gp.RBF(1.0) + gp.WhiteKernel(0.5)

MODELS: dict[str, tuple[Any, np.ndarray]] = {
    "GaussianProcessRegressor": (GaussianProcessRegressor(KERNEL, optimizer=None), Y),
    "GaussianProcessClassifier": (GaussianProcessClassifier(KERNEL, optimizer=None), LABELS),
    "KernelRidge": (KernelRidge(kernel="rbf"), Y),
}


def full(*args: Any, **options: Any) -> Any:
    raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")


def full_of_numpy(*args: Any, **options: Any) -> Any:
    raise MemoryError("Unable to allocate 1.00 GiB for an array")


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """No room for a matrix of all samples."""
    monkeypatch.setattr(torch.linalg, "cholesky_ex", full)
    monkeypatch.setattr("kernops.estimators._kernel_ridge._solve_symmetric", full_of_numpy)


@pytest.mark.parametrize("name", MODELS)
def test_says_how_much_was_needed_and_what_needs_less(name: str, no_room: None) -> None:
    model, y = MODELS[name]
    with pytest.raises(OutOfMemoryError, match=r"120 .*needs \d+ kB or more of float64 on cpu.*solver='cg'") as caught:
        clone(model).set_params(solver="cholesky").fit(X, y)
    assert isinstance(caught.value, MemoryError) and isinstance(caught.value, torch.cuda.OutOfMemoryError)
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("name", MODELS)
def test_goes_on_with_conjugate_gradients_where_nothing_else_was_asked_for(name: str, no_room: None) -> None:
    model, y = MODELS[name]
    with pytest.warns(NumericalWarning, match=r"need memory for a few vectors only; they are used"):
        found = clone(model).fit(X, y)
    want = clone(model).set_params(solver="cg").fit(X, y)
    assert np.array_equal(found.predict(NEW), want.predict(NEW)) and found.n_iter_ == want.n_iter_


def test_explains_where_conjugate_gradients_run_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KernelOperator, "_matmul", full)
    with pytest.raises(OutOfMemoryError, match=r"120 samples by conjugate gradients needs .*smaller n_probes or rank"):
        GaussianProcessRegressor(KERNEL, optimizer=None, solver="cg").fit(X, Y)


def narrow(monkeypatch: pytest.MonkeyPatch, most: int) -> list[int]:
    """Room for matrices of so many queries with all samples only; returns a list of the numbers asked for."""
    asked: list[int] = []
    whole: Callable[[KernelOperator], torch.Tensor] = KernelOperator.to_dense

    def to_dense(self: KernelOperator) -> torch.Tensor:
        queries, samples = self.shape
        if samples != len(X) or queries >= len(X):
            return whole(self)
        asked.append(queries)
        return full() if queries > most else whole(self)

    monkeypatch.setattr(KernelOperator, "to_dense", to_dense)
    return asked


@pytest.mark.parametrize("options", [{}, {"solver": "cg", "tol": 1e-9}], ids=["cholesky", "cg"])
def test_predictions_succeed_in_tiles(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    regressor = GaussianProcessRegressor(KERNEL, optimizer=None, **options).fit(X, Y)
    classifier = GaussianProcessClassifier(KERNEL, optimizer=None, **options).fit(X, LABELS)

    def answers() -> list[np.ndarray]:
        return [
            regressor.predict(NEW, return_std=True)[1],
            regressor.predict(NEW, return_cov=True)[1],
            classifier.predict_proba(NEW),
        ]

    want = answers()
    asked = narrow(monkeypatch, 9)
    for got, w in zip(answers(), want):
        np.testing.assert_allclose(got, w, rtol=1e-6, atol=1e-9)
    assert max(asked) == 30 and asked.count(8) >= 3
    narrow(monkeypatch, 0)
    with pytest.raises(OutOfMemoryError, match=r"a variance needs .*kB or more for a single query"):
        regressor.predict(NEW, return_std=True)


def test_a_covariance_that_is_too_large_names_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    model = GaussianProcessRegressor(KERNEL, optimizer=None).fit(X, Y)
    monkeypatch.setattr(np, "zeros", full_of_numpy)
    with pytest.raises(OutOfMemoryError, match="a covariance of 30 queries needs 7.2 kB. return_std needs 240 bytes"):
        model.predict(NEW, return_cov=True)


def test_other_errors_are_not_explained_away(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **options: Any) -> Any:
        raise RuntimeError("an internal assert failed")

    model = GaussianProcessRegressor(KERNEL, optimizer=None)
    model.fit(X, Y)
    monkeypatch.setattr(KernelOperator, "to_dense", broken)
    for call in (lambda: model.predict(NEW, return_std=True), lambda: model.fit(X, Y)):
        with pytest.raises(RuntimeError, match="an internal assert failed"):
            call()


def test_operators_say_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = KernelOperator("rbf", torch.rand(50, 2), gamma=1.0).add_diagonal(0.1)
    monkeypatch.setattr(torch.linalg, "cholesky_ex", full)
    with pytest.raises(OutOfMemoryError, match="decomposition of 50 x 50 needs 20 kB or more of float32 .*method='cg'"):
        operator.solve(torch.ones(50))


@pytest.mark.parametrize(
    ("count", "text"), [(12, "12 bytes"), (1500, "1.5 kB"), (8e9, "8 GB"), (7.2e13, "72 TB"), (2.5e6, "2.5 MB")]
)
def test_sizes(count: float, text: str) -> None:
    assert size_of(count) == text
