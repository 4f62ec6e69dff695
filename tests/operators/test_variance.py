"""Variances that conditioning leaves, and what is said of their errors, against Cholesky's decomposition in float64."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from kernops import kernels
from kernops.operators import ConvergenceWarning, KernelOperator, NotPositiveDefiniteError, posterior_variance
from kernops.operators.variance import COLUMNS

from .cases import rand

Tensor = torch.Tensor
N, M, LENGTH = 400, 150, 0.4


def problem(noise: float, dtype: torch.dtype = torch.float64, d: int = 2) -> tuple[Any, Any, Tensor, Tensor]:
    """Operator, across, prior, and the exact variances of these very points."""
    x, new = rand(N, d, seed=1).to(dtype), rand(M, d, seed=2).to(dtype)
    kernel = 2.0 * kernels.RBF(LENGTH)
    operator, across = KernelOperator(kernel, x).add_diagonal(noise), KernelOperator(kernel, new, x)
    a, b = x.double(), new.double()
    near, far = (2 * torch.exp(-(p[:, None] - a).square().sum(-1) / (2 * LENGTH**2)) for p in (a, b))
    factor = torch.linalg.cholesky(near + noise * torch.eye(N).double())
    half = torch.linalg.solve_triangular(factor, far.T, upper=False)
    return operator, across, torch.full((M,), 2.0, dtype=dtype), 2 - half.square().sum(0)


@pytest.mark.parametrize(
    "preconditioner", [("pivoted_cholesky", 8), ("pivoted_cholesky", 60), ("nystrom", 20), ("cholesky",), None]
)
@pytest.mark.parametrize("accuracy", [1e-1, 1e-3, 1e-5])
def test_variances_are_as_accurate_as_they_say(preconditioner, accuracy, monkeypatch):
    monkeypatch.setitem(COLUMNS, "cpu", 64)
    operator, across, prior, want = problem(1e-3)
    made = preconditioner and operator.preconditioner(*preconditioner)
    found = posterior_variance(operator, across, prior, accuracy=accuracy, preconditioner=made, method="cg")
    error = (found.value - want) / want
    assert error.abs().max() - 1e-9 <= found.error <= accuracy and error.min() > -1e-9  # the error has a sign
    assert found.iterations > 0 and found.value.shape == (M,)


def test_no_more_products_than_variances_need(monkeypatch):
    """One for each iteration of the slowest column, and none for residuals."""
    operator, across, prior, _ = problem(1e-1)
    made = operator.preconditioner(rank=100)
    counted: list[int] = []
    product = KernelOperator._matmul

    def watched(self, v):
        counted.append(1)
        return product(self, v)

    monkeypatch.setattr(KernelOperator, "_matmul", watched)
    found = posterior_variance(operator, across[:64, :], prior[:64], accuracy=1e-2, preconditioner=made, method="cg")
    assert len(counted) == found.iterations <= 2


ROUNDED = [(noise, d, "pivoted_cholesky") for noise in (1e-2, 1e-4, 1e-6) for d in (1, 2, 3)]
ROUNDED += [(noise, 2, "cholesky") for noise in (1e-2, 1e-4)]


@pytest.mark.parametrize(("noise", "d", "preconditioner"), ROUNDED)
def test_what_rounding_spoils_is_told(noise, d, preconditioner):
    """In float32 with little noise no residual tells it: the entries of the matrix are rounded."""
    operator, across, prior, want = problem(noise, torch.float32, d)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = posterior_variance(operator, across, prior, accuracy=1e-2, method="cg", preconditioner=preconditioner)
    told = [w for w in told if issubclass(w.category, ConvergenceWarning)]  # not that a factor broke down
    error = float(((found.value.double() - want) / want).abs().max())
    assert error <= max(found.error, 1e-2) or min(error, found.error) > 1
    assert bool(told) == (found.error > 2e-2)
    assert noise > 1e-5 or told


def test_cholesky_and_bad_input():
    operator, across, prior, want = problem(1e-2)
    found = posterior_variance(operator, across, prior)
    torch.testing.assert_close(found.value, want, rtol=1e-8, atol=1e-10)
    assert found.error == found.iterations == 0
    with pytest.raises(ValueError, match="must have shapes"):
        posterior_variance(operator, across, prior[:3])
    with pytest.raises(ValueError, match="accuracy must be > 0"):
        posterior_variance(operator, across, prior, accuracy=0.0)
    with pytest.raises(ValueError, match="symmetric"):
        posterior_variance(KernelOperator("rbf", rand(M, 2), rand(M, 2)), across, prior)
    bad = KernelOperator(kernels.custom(lambda x, y: (x - y).square().sum(-1)), rand(N, 2, seed=1))
    with pytest.raises(NotPositiveDefiniteError):
        posterior_variance(bad, across, prior, method="cg", preconditioner=None)
    with pytest.warns(ConvergenceWarning, match="some variances are known to"):
        posterior_variance(*problem(1e-6)[:3], method="cg", preconditioner=None, max_iter=3)
