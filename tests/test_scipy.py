"""SciPy's solvers on matrices of kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse import linalg
from sklearn.gaussian_process import kernels as gp

from kernops import Vi, Vj, kernels
from kernops.operators import KernelOperator
from kernops.scipy import aslinearoperator

RNG = np.random.default_rng(0)
X, Y = RNG.random((40, 2)), RNG.random((25, 2))
B = RNG.random(40)
K = gp.RBF(0.4)(X) + 0.1 * np.eye(40)
WHITE = kernels.RBF(0.4) + kernels.White(0.1)


@pytest.fixture(autouse=True)
def tiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNOPS_BACKEND", "tiled")


FORMS: dict[str, Any] = {
    "kernel and points": lambda: aslinearoperator(WHITE, X),
    "scikit-learn": lambda: aslinearoperator(gp.RBF(0.4) + gp.WhiteKernel(0.1), X, backend="tiled"),
    "operator": lambda: aslinearoperator(KernelOperator(WHITE, torch.as_tensor(X).requires_grad_())),
    "LazyTensor": lambda: aslinearoperator((-(D2 := ((Vi(X) - Vj(X)) ** 2).sum(-1)) / 0.32).exp() + 0.1 * (D2 == 0)),
    "torch": lambda: aslinearoperator(WHITE, torch.as_tensor(X)),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_solvers(form):
    a = FORMS[form]()
    assert isinstance(a, linalg.LinearOperator) and a.shape == (40, 40) and a.dtype == np.float64
    np.testing.assert_allclose(a @ B, K @ B)
    np.testing.assert_allclose(a.matmat(X), K @ X)
    np.testing.assert_allclose(a.rmatvec(B), K @ B)
    np.testing.assert_allclose((2 * a + a.T) @ B[:, None], 3 * K @ B[:, None])
    x, info = linalg.cg(a, B, rtol=1e-10)
    assert info == 0
    np.testing.assert_allclose(x, np.linalg.solve(K, B), rtol=1e-6)
    np.testing.assert_allclose(
        np.sort(linalg.eigsh(a, k=3, return_eigenvectors=False)), np.linalg.eigvalsh(K)[-3:], rtol=1e-10
    )


def test_rectangles():
    a = aslinearoperator(gp.Matern(0.5, nu=1.5), X, Y)
    want = gp.Matern(0.5, nu=1.5)(X, Y)
    np.testing.assert_allclose(a @ Y, want @ Y)
    np.testing.assert_allclose(a.T @ X, want.T @ X)
    np.testing.assert_allclose(a.rmatmat(X), want.T @ X)
    singular = linalg.svds(a, k=2, return_singular_vectors=False)
    np.testing.assert_allclose(np.sort(singular), np.linalg.svd(want)[1][1::-1], rtol=1e-8)
    solution = linalg.lsqr(a, B)[0]
    assert solution.shape == (25,)


def test_float32_is_kept():
    a = aslinearoperator(WHITE, X.astype(np.float32))
    assert a.dtype == np.float32 and (a @ B).dtype == np.float32
    np.testing.assert_allclose(a @ B, K @ B, rtol=1e-5)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: aslinearoperator(WHITE, X[None]), ValueError, r"no batch dimensions; this one has shape \(1, 40"),
        (lambda: aslinearoperator(WHITE, X.astype(np.float16)), ValueError, "in float32 and"),
        (lambda: aslinearoperator(KernelOperator(WHITE, torch.ones(3, 1)), X), TypeError, "has its points already"),
        (lambda: aslinearoperator(WHITE), TypeError, "x must be a torch tensor"),
        (lambda: aslinearoperator(WHITE, "X"), TypeError, "x must be a torch tensor, a NumPy array"),
        (lambda: aslinearoperator(3, X), TypeError, "kernel must be a kernel of kernops.kernels"),
    ],
)  # fmt: skip
def test_bad_arguments(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_complex_vectors_go_part_by_part():
    points = np.random.default_rng(0).random((30, 2))
    adapter = aslinearoperator(kernels.RBF(), points)
    v = np.random.default_rng(1).random(30) * (1 + 2j)
    dense = adapter @ np.eye(30)
    np.testing.assert_allclose(adapter @ v, dense @ v)
