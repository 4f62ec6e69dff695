"""Sums, products, multiples and Kronecker products: one formula where that is possible, and GPyTorch's numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import gpytorch
import pytest
import torch
from linear_operator.operators import DiagLinearOperator, KroneckerProductLinearOperator, LinearOperator

from kernops import gpytorch as ours
from kernops.gpytorch.factors import MOST_FACTORS
from kernops.kernels import RBF, White
from kernops.operators import KernelOperator
from tests.helpers.backends import need

from .cases import D, rand
from .test_kernels import agree

Tensor = torch.Tensor
M, N = 8, 5
#: The first two features are positions, the last is the number of a task.
TASKS = torch.arange(M + N, dtype=torch.float64) % 3
POINTS = torch.cat([rand(M + N, 2, seed=1), TASKS[:, None]], -1)
X, Y = POINTS[:M], POINTS[M:]

#: Name -> (a kernel made of the kernels of a module, whether its matrix is one formula of ours).
COMPOSED: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "scaled": (lambda k: k.ScaleKernel(k.RBFKernel()), True),
    "scaled in batches": (lambda k: k.ScaleKernel(k.RBFKernel(), batch_shape=torch.Size([2])), True),
    "batches scaled": (lambda k: k.ScaleKernel(k.RBFKernel(batch_shape=torch.Size([2]))), True),
    "sum": (lambda k: k.ScaleKernel(k.RBFKernel()) + k.MaternKernel(nu=1.5) + k.ConstantKernel(), True),
    "sum of sums": (lambda k: (k.RBFKernel() + k.CosineKernel()) + (k.RQKernel() + k.RBFKernel()), True),
    "by features": (lambda k: k.RBFKernel(active_dims=[0, 1]) + k.MaternKernel(active_dims=[2, 0]), True),
    "product": (lambda k: k.ScaleKernel(k.RBFKernel()) * k.PeriodicKernel(active_dims=[0]), True),
    "product of a sum": (lambda k: (k.RBFKernel() + k.PolynomialKernel(power=2)) * k.RQKernel(), True),
    "sum of products": (lambda k: k.RBFKernel() * k.RQKernel() + k.CosineKernel() * k.ConstantKernel(), True),
    "sum with a linear one": (lambda k: k.RBFKernel() + k.LinearKernel(), False),
    "linear one first": (lambda k: k.ScaleKernel(k.LinearKernel()) + k.RBFKernel(), False),
    "product with a linear one": (lambda k: k.ScaleKernel(k.LinearKernel()) * k.RBFKernel(), True),
    "product of a sum with a linear one": (lambda k: (k.RBFKernel() + k.LinearKernel()) * k.RQKernel(), True),
    "tasks by number": (lambda k: k.RBFKernel(active_dims=[0, 1]) * k.IndexKernel(3, rank=2, active_dims=[2]), True),
    "several tasks": (lambda k: k.MultitaskKernel(k.RBFKernel(), num_tasks=2, rank=1), False),
    "coregionalisation": (lambda k: k.LCMKernel([k.RBFKernel(), k.RQKernel()], num_tasks=2), False),
    "with one of GPyTorch's": (lambda k: k.RBFKernel() + gpytorch.kernels.RBFKernel(), False),
    "times one of GPyTorch's": (lambda k: k.RBFKernel() * gpytorch.kernels.RBFKernel(), False),
    "batch of sums": (lambda k: k.ScaleKernel(k.RBFKernel(batch_shape=torch.Size([2, 1])) + k.RQKernel()), True),
}


def pair(make: Callable[[Any], Any]) -> tuple[Any, Any]:
    mine, reference = make(ours).double(), make(gpytorch.kernels).double()
    for k, p in enumerate(mine.parameters()):
        p.data = rand(*p.shape, seed=k) * 0.5
    reference.load_state_dict(mine.state_dict())
    return mine, reference


@pytest.mark.parametrize("name", COMPOSED)
def test_composed_kernels(name):
    make, one_formula = COMPOSED[name]
    kernels = pair(make)
    agree(kernels, X, Y)
    matrices = kernels[0](X).evaluate_kernel(), kernels[0](X, Y).evaluate_kernel()
    assert all(isinstance(m, ours.KernopsLinearOperator) for m in matrices) == one_formula


@pytest.mark.parametrize("name", [k for k in COMPOSED if "GPyTorch" not in k])
def test_products_with_vectors_store_no_matrix(name):
    kernel = pair(COMPOSED[name][0])[0]
    dense = kernel(X, Y).to_dense()
    b = rand(dense.shape[-1], 4, seed=9)
    never = AssertionError("a matrix was made dense")
    with patch.object(ours.KernopsLinearOperator, "to_dense", side_effect=never):
        got = kernel(X, Y) @ b
        square = kernel(X) @ torch.ones(kernel(X).shape[-1], 1, dtype=torch.float64)
    torch.testing.assert_close(got, dense @ b)
    torch.testing.assert_close(square, kernel(X).to_dense().sum(-1, keepdim=True))


def test_points_are_shared_by_the_parts():
    """So that a sum reads them once, and gradients by points that are rows and columns take one pass."""
    kernel = pair(COMPOSED["sum of products"][0])[0]
    assert sum(t.shape == X.shape for t in kernel(X).evaluate_kernel().representation()) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", ["AdditiveStructureKernel", "ProductStructureKernel"])
def test_structure_kernels(kind):
    x, y = rand(M, D, seed=3), rand(N, D, seed=4)
    mine, reference = pair(lambda k: getattr(k, kind)(k.ScaleKernel(k.RBFKernel(ard_num_dims=D)), num_dims=D))
    with gpytorch.settings.fast_computations(covar_root_decomposition=False):
        torch.testing.assert_close(mine(x).to_dense(), reference(x).to_dense(), rtol=1e-5, atol=1e-5)
    parts = [ours.ScaleKernel(ours.RBFKernel()).double() for _ in range(D)]
    for d, part in enumerate(parts):
        part.outputscale = mine.base_kernel.outputscale.detach()
        part.base_kernel.lengthscale = mine.base_kernel.base_kernel.lengthscale[..., d].detach()
    each = [part(x[:, [d]], y[:, [d]]).to_dense() for d, part in enumerate(parts)]
    want = torch.stack(each).sum(0) if "Additive" in kind else torch.stack(each).prod(0)
    torch.testing.assert_close(mine(x, y).to_dense(), want)
    assert isinstance(mine(x, y).evaluate_kernel(), ours.KernopsLinearOperator)


def test_a_sum_over_a_large_batch():
    kernel = ours.RBFKernel(batch_shape=torch.Size([20])).double()
    kernel.lengthscale = torch.linspace(0.5, 2.0, 20).double()[:, None, None]
    matrix = kernel(X).evaluate_kernel()
    torch.testing.assert_close(matrix.sum(-3).to_dense(), matrix.to_dense().sum(-3))


def test_several_tasks_are_a_kronecker_product():
    kernel = pair(COMPOSED["several tasks"][0])[0]
    matrix = kernel(X).evaluate_kernel()
    assert isinstance(matrix, KroneckerProductLinearOperator)
    assert any(isinstance(part, ours.KernopsLinearOperator) for part in matrix.linear_ops)


@pytest.mark.parametrize("swap", [False, True])
def test_products_of_matrices_above_the_limit_for_decompositions(swap):
    """``k(x).mul(tasks(i))``, as GPyTorch's examples write it, is exact where linear_operator's are of low rank."""
    x, tasks = rand(40, 2, seed=6), torch.arange(40)[:, None] % 3
    kernels: list[tuple[Any, Tensor]] = [(ours.RBFKernel(), x), (ours.IndexKernel(num_tasks=3, rank=2), tasks)]
    a, b = (k.double()(t) for k, t in (reversed(kernels) if swap else kernels))
    rhs = rand(40, 2, seed=7)
    settings = gpytorch.settings
    with settings.max_cholesky_size(5), settings.max_root_decomposition_size(5):
        products = a.mul(b), a * b
        for product in products:
            assert isinstance(product, ours.KernopsLinearOperator)
            torch.testing.assert_close(product @ rhs, (a.to_dense() * b.to_dense()) @ rhs)
    new = ours.RBFKernel().double()(x[:7], x)
    torch.testing.assert_close((new * new) @ rhs, new.to_dense() ** 2 @ rhs)


def test_products_with_a_matrix_of_high_rank():
    """Exact as well, though dense."""
    x = rand(40, MOST_FACTORS + 3, seed=6)
    kernel = (ours.LinearKernel(active_dims=range(2, MOST_FACTORS + 3)) * ours.RBFKernel(active_dims=[0, 1])).double()
    linear, smooth = (k(x).to_dense() for k in kernel.kernels)
    rhs = rand(40, 2, seed=7)
    with gpytorch.settings.max_cholesky_size(5), gpytorch.settings.max_root_decomposition_size(5):
        for product in (kernel(x), kernel.kernels[0](x) * kernel.kernels[1](x), kernel.kernels[1](x) * linear):
            torch.testing.assert_close(product @ rhs, (linear * smooth) @ rhs)


def test_operators_with_a_diagonal():
    """Elementwise products with diagonal matrices, and operators of kernops with noise."""
    operator = KernelOperator(RBF(0.7) + White(0.2), X)
    matrix = ours.as_linear_operator(operator)
    assert isinstance(matrix, LinearOperator)
    torch.testing.assert_close(matrix.to_dense(), operator.to_dense())
    bare = ours.as_linear_operator(KernelOperator(RBF(0.7), X))
    assert isinstance(bare, ours.KernopsLinearOperator)
    values = rand(M, seed=5)
    torch.testing.assert_close((bare * DiagLinearOperator(values)).to_dense(), torch.diag(values))
    with pytest.raises(TypeError, match="operator must be a KernelOperator; got Tensor"):
        ours.as_linear_operator(operator.to_dense())  # type: ignore[arg-type]


def test_multiples():
    matrix = ours.RBFKernel().double()(rand(2, M, D), Y[:, :D]).evaluate_kernel()
    dense = matrix.to_dense()
    factor = rand(2, 1, 1, seed=6)
    for product in (
        matrix * 3,
        3.0 * matrix,
        matrix * torch.tensor(3.0),
        matrix.mul(torch.full((1, 1, 1), 3.0).double()),
    ):
        assert isinstance(product, ours.KernopsLinearOperator)
        torch.testing.assert_close(product.to_dense(), 3 * dense)
    torch.testing.assert_close((matrix * factor).to_dense(), factor * dense)
    torch.testing.assert_close((matrix * rand(M, N)).to_dense(), rand(M, N) * dense)
    with pytest.raises(ValueError, match="the factor must have the operator's dtype torch.float64; got torch.float32"):
        matrix * factor.float()


def test_the_compiled_back_end(monkeypatch):
    need("cpu")
    monkeypatch.setenv("KERNOPS_BACKEND", "cpu")
    mine, reference = pair(lambda k: k.ScaleKernel(k.RBFKernel()) + k.PeriodicKernel())
    found = []
    for kernel in (mine, reference):
        x = X.clone().requires_grad_()
        value = (kernel(x) @ rand(M, 3, seed=4)).square().sum()
        found.append([value, *torch.autograd.grad(value, [x, *kernel.parameters()])])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)
