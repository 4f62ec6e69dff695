"""Covariances of derivatives, of any kernel that has them, against torch's derivatives of the definitions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernops import kernels as k
from kernops.operators import DerivativesOperator, KernelOperator
from tests.helpers.backends import ON_CPU, need

from .cases import ELL, KERNELS, Y, distances, rand, squares, with_derivatives

Tensor = torch.Tensor
X = rand(3, 3, seed=5)

#: Kernels with derivatives -> the highest order.
SMOOTH = {
    **dict.fromkeys(["RBF", "RBF of one length", "Matern 7/2", "RationalQuadratic", "Polynomial", "Cauchy"], 2),
    **dict.fromkeys(["Linear", "DotProduct", "Constant", "composed"], 2),
    "Matern 3/2": 1,
}
#: Those of the table of cases, but what torch cannot differentiate as it is written there.
DEFINITIONS = {
    **{name: definition for name, (_, definition) in KERNELS.items()},
    "Matern 7/2": lambda x, y: (1 + (r := 7**0.5 * distances(x, y, ELL)) + 0.4 * r**2 + r**3 / 15) * (-r).exp(),
    "composed": lambda x, y: (2 * (-squares(x, y, ELL) / 2).exp() + (0.01 + x @ y.mT) / (1 + squares(x, y))) ** 2 + 0.5,
}
CASES = [(name, order) for name, most in SMOOTH.items() for order in range(1, most + 1)]


@pytest.mark.parametrize(("name", "order"), CASES)
def test_kernels(name, order):
    """Entries and products; of points with themselves the matrix is positive semi-definite, as it is if it is whole."""
    operator = DerivativesOperator(KERNELS[name][0], X, Y, order=order)
    want = with_derivatives(DEFINITIONS[name], X, Y, order)
    scale = want.abs().max().item()
    torch.testing.assert_close(operator.to_dense(), want, rtol=1e-9, atol=1e-9 * scale)
    v = rand(want.shape[1], 3, seed=1) - 0.5
    torch.testing.assert_close(operator @ v, want @ v, rtol=1e-9, atol=1e-9 * scale)
    own = DerivativesOperator(KERNELS[name][0], X, order=order)
    dense = own.to_dense()
    torch.testing.assert_close(dense, dense.mT, rtol=1e-12, atol=1e-12 * scale)
    torch.testing.assert_close(own.diagonal(), dense.diagonal())
    values = torch.linalg.eigvalsh(dense)
    assert values[0] > -1e-12 * values[-1] and own.diagonal().min() >= 0


@pytest.mark.parametrize("nu", [1.5, 2.5, 3.5, 4.5])
def test_matern_where_points_meet(nu):
    """Var ∂f = ν/(ν - 1) / ℓ², and for ν > 2 Var ∂²f = 3 ν²/((ν - 1) (ν - 2)) / ℓ⁴, from the spectral density's
    moments."""
    x = torch.zeros(1, 2, dtype=torch.float64)
    found = DerivativesOperator(k.Matern(0.7, nu=nu), x).to_dense()
    first = nu / (nu - 1) / 0.7**2
    torch.testing.assert_close(found, torch.tensor([1.0, first, first]).double().diag())
    if nu > 2:
        found = DerivativesOperator(k.Matern(0.7, nu=nu), x, order=2).to_dense()
        second = nu**2 / ((nu - 1) * (nu - 2)) / 0.7**4
        want = torch.tensor([1.0, first, first, 3 * second, 3 * second]).double().diag()
        want[0, 3:] = want[3:, 0] = -first
        want[3, 4] = want[4, 3] = second
        torch.testing.assert_close(found, want)


def test_a_general_matern():
    """The mixture of Gaussians by itself, at ν = 40.1: near the squared exponential, whose length is nearly its own."""
    found = DerivativesOperator(k.Matern(1.0, nu=40.1), X, Y).to_dense()
    near = DerivativesOperator(k.Matern(1.0, nu=39.1), X, Y).to_dense()
    far = DerivativesOperator(k.RBF(1.0), X, Y).to_dense()
    assert (found - near).abs().max() < 0.05 * (found - far).abs().max() < 0.01


@pytest.mark.parametrize("backend", ON_CPU)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_back_ends(backend, dtype):
    """More right-hand sides than a pass takes, and points whose components a compiled loop takes in parts."""
    need(backend)
    x, y = (rand(n, 5, seed=n).to(dtype) for n in (9, 17))
    want = with_derivatives(lambda a, b: (-squares(a, b, 0.8) / 2).exp(), x[:2].double(), y.double())
    v = (rand(17 * 6, 5, seed=1) - 0.5).to(dtype)
    found = DerivativesOperator(k.RBF(0.8), x, y, backend=backend) @ v
    tol = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(found[:12].double(), want @ v.double(), rtol=tol, atol=10 * tol)


@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
def test_gradients_of_all_orders(batch):
    ell = torch.tensor([0.7], dtype=torch.float64).expand(*batch, 1).clone().requires_grad_()
    x, y = rand(*batch, 2, 2, seed=1).requires_grad_(), rand(3, 2, seed=2).requires_grad_()
    v = (rand(9, 2, seed=3) - 0.5).requires_grad_()

    def product(x: Tensor, y: Tensor, ell: Tensor, v: Tensor) -> Tensor:
        return DerivativesOperator(k.RBF(ell), x, y) @ v

    assert torch.autograd.gradcheck(product, (x, y, ell, v))
    assert torch.autograd.gradgradcheck(product, (x, y, ell, v))
    dense = DerivativesOperator(k.RBF(ell), x, y)
    u = rand(*dense.shape[:-1], 2, seed=4)
    wanted = torch.autograd.grad((u * (dense.to_dense() @ v)).sum(), dense.tensors)
    for got, want in zip(dense._bilinear(u, v.detach(), [True] * len(dense.tensors)), wanted, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_of_halves(dtype):
    x = rand(4, 2, seed=1).to(dtype).requires_grad_()
    operator = DerivativesOperator(k.RBF(), x)
    one = torch.ones(12, 1, dtype=dtype)
    got, none = operator._bilinear(one, one, [True, True])  # of rows and of columns
    z = x.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(DerivativesOperator(k.RBF(), z).to_dense().sum(), z)
    assert none is None and got is not None and got.dtype == dtype
    torch.testing.assert_close(got.double(), want, rtol=0.02, atol=0.05)


def test_a_solver_and_a_determinant_of_many_rows():
    x = rand(60, 2, seed=2)
    A = DerivativesOperator(k.RBF(0.5), x).add_diagonal(0.05)
    dense, b = A.to_dense(), rand(180, seed=3)
    found, report = A.solve(b, method="cg", tol=1e-9, return_report=True)
    assert report.converged
    torch.testing.assert_close(found, torch.linalg.solve(dense, b), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(A.logdet(method="cg"), torch.logdet(dense), rtol=0, atol=0.5)


def test_sizes_of_nothing():
    operator = DerivativesOperator(k.RBF(), rand(2, 3), rand(0, 3))
    assert torch.equal(operator @ torch.zeros(0, 2).double(), torch.zeros(8, 2).double())
    assert operator.T.shape == (0, 8) and (operator.T @ torch.zeros(8).double()).shape == (0,)


@pytest.mark.parametrize(
    "name", ["Matern 1/2", "Matern 0.7", "Periodic", "Cosine", "Laplacian", "PiecewisePolynomial", "custom"]
)
def test_kernels_without_derivatives(name):
    with pytest.raises(ValueError, match="differentiable where two points meet; got|got nu = 0.[57]$"):
        DerivativesOperator(KERNELS[name][0], X)


def test_what_does_not_fit():
    with pytest.raises(ValueError, match="need Matérn's nu > 2; got nu = 1.5"):
        DerivativesOperator(k.Matern(nu=1.5), X, order=2)
    with pytest.raises(ValueError, match="need Matérn's nu = 2.5, 3.5 or the like, or nu >= 8; got nu = 2.0"):
        DerivativesOperator(0.5 * k.Matern(nu=2.0).restrict([0]) + k.RBF(), X, order=2)
    wrong: Any = (0, 3, True, 1.5)
    for order in wrong:
        with pytest.raises(ValueError, match=f"order must be 1 or 2; got {order}"):
            DerivativesOperator(k.RBF(), X, order=order)
    with pytest.raises(ValueError, match="leave out White and use add_diagonal"):
        DerivativesOperator(k.RBF() + k.White(0.1), X)
    with pytest.raises(ValueError, match="points of one number of features"):
        DerivativesOperator(k.custom(lambda x, y: (-(x[:1] - y).sqnorm2()).exp()), X, Y[:, :1])
    with pytest.raises(ValueError, match="only functions of sums over components.*got Sum"):
        DerivativesOperator(k.custom(lambda x, y: (x * (x * y).sum(-1)).sum(-1).exp()), X)
    with pytest.raises(ValueError, match=r"v must have shape \(12,\) or \(..., 12, E\); got \(3, 1\)"):
        DerivativesOperator(k.RBF(), X) @ torch.ones(3, 1).double()
    with pytest.raises(TypeError, match="float64|tensor"):
        DerivativesOperator(k.RBF(), X.numpy())  # type: ignore[arg-type]
    plain = DerivativesOperator(k.RBF(), X) + KernelOperator(k.RBF(), rand(12, 2))
    assert plain.shape == (12, 12)
