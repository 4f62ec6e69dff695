"""Square roots and eigenpairs, and their derivatives, against torch.linalg.eigh."""

from __future__ import annotations

import pytest
import torch

from kernops import kernels
from kernops.operators import ConvergenceWarning, KernelOperator, NotPositiveDefiniteError
from kernops.operators import spectral as spectral_module
from tests.operators.cases import OPERATORS, XB, N, X, Y, kernel, rand
from tests.operators.test_algebra import SQUARE, close
from tests.operators.test_solve import cloud


def dense_root(a):
    values, vectors = torch.linalg.eigh(a)
    return vectors @ torch.diag_embed(values.clamp(min=0).sqrt()) @ vectors.mT


@pytest.mark.parametrize("name", SQUARE)
def test_square_roots(name):
    operator, want = OPERATORS[name]()
    b = rand(want.shape[-1], 2, seed=1)
    close(operator.sqrt_matmul(b, tol=1e-12), dense_root(want) @ b, 1e-8)
    close(operator.sqrt_matmul(b[:, 0], tol=1e-12), (dense_root(want) @ b)[..., 0], 1e-8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_samples_have_the_covariance(dtype):
    operator = cloud(80, dtype)
    samples = operator.sqrt_matmul(torch.eye(80, dtype=dtype), tol=1e-6)  # the covariance of standard normal columns
    close(samples @ samples.mT, operator.to_dense(), 1e-6 if dtype == torch.float64 else 1e-3)


def test_derivatives_of_square_roots(monkeypatch):
    ell = torch.tensor([0.5, 0.7, 0.9]).double().requires_grad_()
    x, b = X[:8].clone().requires_grad_(), rand(8, 3, seed=2).requires_grad_()

    def root(ell, x, b):
        return KernelOperator(kernels.RBF(ell) + kernels.White(0.1), x).sqrt_matmul(b, tol=1e-13)

    assert torch.autograd.gradcheck(root, (ell, x, b), fast_mode=True)
    whole = root(ell, x, b)
    monkeypatch.setattr(spectral_module, "KRYLOV_NUMBERS", 1)  # one column at a time
    close(root(ell, x, b), whole, 1e-9)
    (g,) = torch.autograd.grad(whole.sum(), b, create_graph=True)
    with pytest.raises(NotImplementedError, match="sqrt_matmul has first derivatives only"):
        torch.autograd.grad(g.sum(), ell)


def test_derivatives_of_square_roots_in_small_krylov_spaces():
    """Where the spaces are much smaller than N."""
    x, b, g = rand(150, 1, seed=3), rand(150, 1, seed=4), rand(150, 1, seed=5)

    def operator(ell):
        return KernelOperator(kernels.RBF(ell) + kernels.White(0.2), x)

    ell, h = torch.tensor(0.5).double().requires_grad_(), 1e-5
    (got,) = torch.autograd.grad((operator(ell).sqrt_matmul(b, tol=1e-8) * g).sum(), ell)
    up, down = ((dense_root(operator(s).to_dense()) @ b * g).sum() for s in (0.5 + h, 0.5 - h))
    torch.testing.assert_close(got, (up - down) / (2 * h), rtol=1e-5, atol=1e-8)


def test_square_roots_that_are_none():
    with pytest.raises(NotPositiveDefiniteError, match="no square root: it has an eigenvalue of at most -"):
        (kernel() - 5 * kernel()).sqrt_matmul(rand(N))
    with pytest.warns(ConvergenceWarning, match="after 10 products, above tol=1e-06"):
        cloud(100).sqrt_matmul(rand(100), tol=1e-6, max_iter=10)
    singular = KernelOperator(kernels.Linear(), X)  # of rank 3
    close(singular.sqrt_matmul(singular.sqrt_matmul(X, tol=1e-12), tol=1e-12), singular @ X, 1e-9)


# --- eigenpairs ---------------------------------------------------------------------------------------------------
@pytest.fixture(params=["dense", "Lanczos"])
def method(request, monkeypatch):
    monkeypatch.setattr(spectral_module, "SMALL", 2000 if request.param == "dense" else 0)


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("name", ["kernel", "kernel of a batch", "Kronecker", "block-diagonal"])
def test_eigenpairs(name, largest, method):
    operator, want = OPERATORS[name]()
    values, vectors = operator.eigsh(4, largest=largest)
    exact = torch.linalg.eigvalsh(want)
    close(values, exact[..., -4:].flip(-1) if largest else exact[..., :4], 1e-8)
    close(operator @ vectors, vectors * values[..., None, :], 1e-6)
    close(vectors.mT @ vectors, torch.eye(4).expand(*operator.batch, 4, 4), 1e-9)


def test_eigenpairs_of_more_points(monkeypatch):
    monkeypatch.setattr(spectral_module, "SMALL", 0)
    for dtype, tol in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        operator = cloud(400, dtype)
        values, vectors = operator.eigsh(10)
        close(values, torch.linalg.eigvalsh(operator.to_dense().double())[-10:].flip(0), tol * 50)
        assert ((operator @ vectors - vectors * values).norm(dim=0) < 2 * tol * 50 * values[0]).all()
    with pytest.warns(ConvergenceWarning, match="is left after 2 products"):
        cloud(400).eigsh(10, max_iter=2)


def test_derivatives_of_eigenpairs(method):
    ell = torch.tensor([0.5, 0.7, 0.9]).double().requires_grad_()
    x = X[:9].clone().requires_grad_()

    def pairs(ell, x, largest=True):
        operator = KernelOperator(kernels.RBF(ell) + kernels.White(0.1), x)
        values, vectors = operator.eigsh(3, largest=largest, tol=1e-12)
        return values, vectors @ (vectors.mT @ X[:9]), vectors[:, :1] @ vectors[:, :1].mT

    assert torch.autograd.gradcheck(pairs, (ell, x), fast_mode=True)
    assert torch.autograd.gradcheck(lambda ell, x: pairs(ell, x, largest=False), (ell, x), fast_mode=True)
    (g,) = torch.autograd.grad(pairs(ell, x)[0].sum(), ell, create_graph=True)
    with pytest.raises(NotImplementedError, match="eigsh has first derivatives only"):
        torch.autograd.grad(g.sum(), x)


BAD = {
    "k": (lambda: kernel().eigsh(0), "k must be a whole number from 1 to N = 12; got 0"),
    "too many": (lambda: kernel().eigsh(13), "from 1 to N = 12"),
    "not symmetric": (lambda: KernelOperator(kernels.RBF(), X, X + 1).eigsh(1), "known to be symmetric"),
    "half": (lambda: kernel(X.half()).eigsh(1), "float32 or float64"),
    "root of a rectangle": (lambda: KernelOperator(kernels.RBF(), X, Y).sqrt_matmul(Y), "needs a square operator"),
    "tol": (lambda: kernel().sqrt_matmul(X, tol=-1), "tol must be >= 0"),
    "NaN": (lambda: kernel(X * torch.nan).eigsh(2), "the operator has NaN or infinite entries"),
    "a root of NaN": (lambda: kernel(X * torch.nan).sqrt_matmul(X), "the operator has NaN or infinite entries"),
    "NaN to be multiplied": (lambda: kernel().sqrt_matmul(X * torch.nan), "b has NaN or infinite entries"),
    "no product": (lambda: kernel().sqrt_matmul(X, max_iter=0), "max_iter must be a whole number >= 1; got 0"),
    "no column": (lambda: kernel(XB).sqrt_matmul(X[:, :0]), "at least one row and one column"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name):
    call, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        call()
