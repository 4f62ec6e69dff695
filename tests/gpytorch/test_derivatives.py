"""Kernels of derivatives against GPyTorch's dense ones: matrices, gradients, compositions, entries, models."""

from __future__ import annotations

import pickle
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal
from gpytorch.kernels import Kernel
from linear_operator import to_linear_operator
from linear_operator.operators import SumLinearOperator

from kernops import gpytorch as ours
from tests.helpers.backends import need

from .cases import both, rand, same
from .test_composition import pair
from .test_kernels import results
from .test_models import within
from .test_second_derivatives import curvature

Tensor = torch.Tensor
M, N, D = 5, 4, 2
X, Y = rand(M, D, seed=1), rand(N, D, seed=2)


#: Name -> ((ours, GPyTorch's), rows for each point).
KERNELS: dict[str, tuple[Any, int]] = {
    "RBFKernelGrad": (same("RBFKernelGrad"), 1 + D),
    "Matern52KernelGrad": (same("Matern52KernelGrad"), 1 + D),
    "PolynomialKernelGrad": (same("PolynomialKernelGrad", power=3), 1 + D),
    "RBFKernelGradGrad": (same("RBFKernelGradGrad"), 1 + 2 * D),
}
ARD = [name for name in KERNELS if "Polynomial" not in name]


class OfAll(torch.nn.Module):
    """GPyTorch's kernel of second derivatives, which raises an error for points of two numbers: parts of the matrix of
    all points with themselves stand for those."""

    def __init__(self, kernel: Kernel, size: int) -> None:
        super().__init__()
        self.kernel, self.size = kernel, size

    def forward(self, x: Tensor, y: Tensor | None = None, diag: bool = False) -> Any:
        if diag:
            return self.kernel(x).to_dense().diagonal(dim1=-1, dim2=-2)
        if y is None:
            return self.kernel(x)
        batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
        points = torch.cat([t.expand(*batch, *t.shape[-2:]) for t in (x, y)], -2)
        matrix = self.kernel(points).to_dense()
        rows = x.shape[-2] * self.size
        return to_linear_operator(matrix[..., :rows, rows:])


def agree(kernels: tuple[Kernel, Kernel], size: int, x: Tensor, y: Tensor) -> None:
    mine, reference = kernels
    of_all: Any = OfAll(reference, size) if size == 1 + 2 * D else reference
    for got, want in zip(results(mine, x, y), results(of_all, x, y), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)  # GPyTorch's distances are at least 1e-15, squared


@pytest.mark.parametrize("name", KERNELS)
def test_values_and_gradients(name):
    makers, size = KERNELS[name]
    agree(both(makers), size, X, Y)


@pytest.mark.parametrize("name", ARD)
def test_one_length_for_each_feature_of_some(name):
    makers, size = KERNELS[name]
    agree(both(makers, ard_num_dims=D, active_dims=torch.tensor([3, 1])), size, rand(M, 4, seed=1), rand(N, 4, seed=2))


@pytest.mark.parametrize("name", KERNELS)
def test_batches_of_kernels_and_of_points(name):
    makers, size = KERNELS[name]
    kernels = both(makers, batch_shape=torch.Size([2]))
    agree(kernels, size, rand(2, M, D, seed=1), rand(2, N, D, seed=2))
    mine = kernels[0](X, Y).to_dense()  # GPyTorch's asks for points with the kernel's batch
    for k in range(2):
        torch.testing.assert_close(mine[k], kernels[0][k](X, Y).to_dense())


def test_second_derivatives_of_as_many_points():
    """Where GPyTorch's own have a value, and where they have none."""
    mine, reference = both(KERNELS["RBFKernelGradGrad"][0], ard_num_dims=D)
    torch.testing.assert_close(mine(X[:N], Y).to_dense(), reference(X[:N], Y).to_dense())
    with pytest.raises(RuntimeError, match="must match the size"):
        reference(X, Y).to_dense()


COMPOSED: dict[str, Callable[[Any], Any]] = {
    "scaled": lambda k: k.ScaleKernel(k.RBFKernelGrad()),
    "scaled in batches": lambda k: k.ScaleKernel(
        k.RBFKernelGrad(batch_shape=torch.Size([2])), batch_shape=torch.Size([2])
    ),
    "sum": lambda k: k.ScaleKernel(k.RBFKernelGrad()) + k.Matern52KernelGrad() + k.PolynomialKernelGrad(power=2),
    "second derivatives": lambda k: k.ScaleKernel(k.RBFKernelGradGrad()) + k.RBFKernelGradGrad(ard_num_dims=D),
}


@pytest.mark.parametrize("name", COMPOSED)
def test_composed_kernels_are_one_formula(name):
    mine, reference = pair(COMPOSED[name])
    x = X.expand(2, M, D) if "batches" in name else X
    size = 1 + 2 * D if "second" in name else 1 + D
    agree((mine, reference), size, x, x[..., :N, :] + 0.3)
    for matrix in (mine(x).evaluate_kernel(), mine(x, x + 0.1).evaluate_kernel()):
        assert isinstance(matrix, ours.DerivativesLinearOperator)


def test_elementwise_products_are_gpytorchs():
    """Of matrices: not the covariances of the derivatives of a product."""
    mine, reference = pair(lambda k: k.ScaleKernel(k.RBFKernelGrad()) * k.PolynomialKernelGrad(power=2))
    agree((mine, reference), 1 + D, X, Y)
    assert isinstance(mine(X).evaluate_kernel(), ours.KernopsLinearOperator)


def test_sums_with_other_matrices():
    """One of GPyTorch's, and one of ours with a row for each of the rows: sums of two operators."""
    mine, reference = pair(lambda k: k.RBFKernelGrad() + gpytorch.kernels.Matern52KernelGrad())
    agree((mine, reference), 1 + D, X, Y)
    left = ours.RBFKernelGrad().double()(X).evaluate_kernel()
    right = ours.RBFKernel().double()(rand(M * (1 + D), 3)).evaluate_kernel()
    for total in (left + right, right + left):
        assert isinstance(total, SumLinearOperator)
        torch.testing.assert_close(total.to_dense(), left.to_dense() + right.to_dense())


@pytest.mark.parametrize("name", COMPOSED)
def test_products_with_vectors_store_no_matrix(name):
    """Also with right-hand sides that do not fill groups, and with more than one pass takes."""
    mine, _ = pair(COMPOSED[name])
    for other in (None, Y):
        matrix = mine(X, other).evaluate_kernel()
        dense = matrix.to_dense()
        with patch.object(ours.DerivativesLinearOperator, "to_dense", side_effect=AssertionError("made dense")):
            for width in (1, 3, 4, 11):
                v = rand(dense.shape[-1], width, seed=9)
                torch.testing.assert_close(matrix @ v, dense @ v)
                u = rand(dense.shape[-2], width, seed=8)
                torch.testing.assert_close(matrix.mT @ u, dense.mT @ u)
            torch.testing.assert_close(matrix @ v[:, 0], dense @ v[:, 0])


@pytest.mark.parametrize("width", [2, 9])
@pytest.mark.parametrize("square", [True, False])
@pytest.mark.parametrize("name", ["scaled", "scaled in batches"])
def test_gradients_of_products(name, square, width):
    """By points, of which rows and columns may be the same, by parameters and by right-hand sides."""
    kernel, _ = pair(COMPOSED[name])
    found = []
    for dense in (False, True):
        x, v = X.clone().requires_grad_(), rand((M if square else N) * (1 + D), width, seed=3).requires_grad_()
        y = None if square else Y.clone().requires_grad_()
        matrix = kernel(x, y).evaluate_kernel()
        value = ((matrix.to_dense() if dense else matrix) @ v).sin().sum()
        found.append(torch.autograd.grad(value, [x, v, *([] if square else [y]), *kernel.parameters()]))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", ["RBFKernelGrad", "Matern52KernelGrad"])
@pytest.mark.parametrize("square", [False, True])
def test_second_derivatives(name, square):
    """The reference is of derivatives that torch takes of the kernel, and of constants where a point meets itself."""
    kernel = both(KERNELS[name][0])[0]
    ell = lambda: kernel.lengthscale  # noqa: E731

    def value(x: Tensor, y: Tensor) -> Tensor:
        t = ((x - y) / ell()[0]).square().sum()
        r = (5 * t).sqrt() if "Matern" in name else t
        return (1 + r + r * r / 3) * (-r).exp() if "Matern" in name else (-t / 2).exp()

    def block(x: Tensor, y: Tensor) -> Tensor:
        def lower(x: Tensor) -> Tensor:
            return torch.cat([value(x, y)[None], torch.func.grad(value, 1)(x, y)])

        return torch.cat([lower(x)[None], torch.func.jacfwd(lower)(x).mT])

    def alone() -> Tensor:
        return torch.cat([torch.ones(1), (5 / 3 if "Matern" in name else 1) / ell()[0].expand(D).square()]).diag()

    def dense(x: Tensor, y: Tensor | None = None) -> Tensor:
        blocks = [[alone() if y is None and i == j else block(a, b) for j, b in enumerate(x if y is None else y)]
                  for i, a in enumerate(x)]  # fmt: skip
        return torch.cat([torch.cat(row, 1) for row in blocks], 0)

    points = rand(3, D, seed=1), rand(3, D, seed=2)
    sources = points[:1] if square else points
    found = [
        curvature(made, [s.clone().requires_grad_() for s in sources], list(kernel.parameters()))
        for made in (lambda *x: kernel(*x).evaluate_kernel(), dense)
    ]
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)


# --- entries ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("other", [None, Y])
def test_parts(other):
    """Whole points, which stay of the kind, and any other rows and columns."""
    kernel, _ = pair(COMPOSED["sum"])
    matrix = kernel(X, other).evaluate_kernel()
    dense = matrix.to_dense()
    whole = (slice(3, 9), slice(6, None)), (slice(0, 3), slice(None)), (slice(None), slice(-3, None))
    parts = (slice(1, 8), slice(None)), (slice(0, 6, 3), slice(2, 5)), (torch.tensor([4, 0, 4]), slice(0, 3))
    for index, kind in [(i, ours.DerivativesLinearOperator) for i in whole] + [
        (i, ours.KernopsLinearOperator) for i in parts
    ]:
        part = matrix[index]
        assert type(part) is kind
        torch.testing.assert_close(part.to_dense(), dense[index])
        v = rand(part.shape[-1], 2)
        torch.testing.assert_close(part @ v, dense[index] @ v)
    assert matrix[6:3, :].shape == (0, dense.shape[-1])
    i, j = torch.tensor([0, 5, 11]), torch.tensor([3, 4, 8])
    torch.testing.assert_close(matrix[i, j], dense[i, j])
    torch.testing.assert_close(matrix[4, 7], dense[4, 7])
    torch.testing.assert_close(matrix[2], dense[2])


def test_parts_of_batches():
    kernel, _ = pair(COMPOSED["scaled in batches"])
    matrix = kernel(X).evaluate_kernel()
    dense = matrix.to_dense()
    i = torch.tensor([1, 0, 1])
    torch.testing.assert_close(matrix[1].to_dense(), dense[1])
    torch.testing.assert_close(matrix[1, 2:5, 3:].to_dense(), dense[1, 2:5, 3:])
    torch.testing.assert_close(matrix[i, i + 4, i + 7], dense[i, i + 4, i + 7])
    torch.testing.assert_close(matrix.diagonal(dim1=-1, dim2=-2), dense.diagonal(dim1=-1, dim2=-2))
    torch.testing.assert_close(matrix.sum(-3).to_dense(), dense.sum(-3))
    torch.testing.assert_close(matrix.unsqueeze(0).expand(3, 2, -1, -1).to_dense(), dense.expand(3, 2, -1, -1))


# --- models -----------------------------------------------------------------------------------------------------------
class Model(gpytorch.models.ExactGP):
    """That of GPyTorch's examples of derivatives in two dimensions."""

    def __init__(self, x: Tensor, y: Tensor, kernels: Any) -> None:
        super().__init__(x, y, gpytorch.likelihoods.MultitaskGaussianLikelihood(num_tasks=1 + D))
        self.mean_module = gpytorch.means.ConstantMeanGrad()
        self.covar_module = kernels.ScaleKernel(kernels.RBFKernelGrad(ard_num_dims=D))

    def forward(self, x: Tensor) -> MultitaskMultivariateNormal:
        return MultitaskMultivariateNormal(self.mean_module(x), self.covar_module(x))


TRAIN = torch.rand(20, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
TEST = torch.rand(4, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
VALUES = torch.stack([(3 * TRAIN[:, 0]).sin() * TRAIN[:, 1], 3 * (3 * TRAIN[:, 0]).cos() * TRAIN[:, 1],
                      (3 * TRAIN[:, 0]).sin()], -1) + 0.1 * rand(20, 1 + D)  # fmt: skip
ITERATIVE = (
    gpytorch.settings.max_cholesky_size(0),
    gpytorch.settings.cg_tolerance(3e-5),
    gpytorch.settings.eval_cg_tolerance(3e-5),
    gpytorch.settings.max_cg_iterations(300),
    gpytorch.settings.min_preconditioning_size(10),
    gpytorch.settings.max_preconditioner_size(20),
    gpytorch.settings.num_trace_samples(20),
)


def outcome(model: Model) -> list[Tensor]:
    """Predictions, their gradient by the new points, the likelihood, and its gradients."""
    torch.manual_seed(0)
    model.train()
    score = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    value = score(model(TRAIN), VALUES)
    grads = torch.autograd.grad(value, list(model.parameters()))
    x = TEST.clone().requires_grad_()
    out = model.eval()(x)
    moved = torch.autograd.grad((out.mean + out.variance).sum(), x)
    return [out.mean, out.variance, *moved, value, *grads]


def models() -> tuple[Model, Model]:
    mine, reference = (Model(TRAIN, VALUES, k).double() for k in (ours, gpytorch.kernels))
    for k, p in enumerate(mine.parameters()):
        p.data = rand(*p.shape, seed=k) * 0.3 - 0.5
    reference.load_state_dict(mine.state_dict())
    return mine, reference


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_a_model_is_gpytorchs():
    for got, want in zip(*map(outcome, models()), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_a_large_model_stores_no_matrix():
    """By conjugate gradients, with the same random vectors as GPyTorch's; and near the exact numbers."""
    mine, reference = models()
    exact = outcome(reference)
    dense = ours.DerivativesLinearOperator.to_dense

    def small(matrix: Any) -> Tensor:
        assert min(matrix.shape[-2:]) < len(TRAIN), "the matrix of all points was made dense"
        return dense(matrix)

    with within(ITERATIVE), patch.object(ours.DerivativesLinearOperator, "to_dense", small):
        found = outcome(mine)
    with within(ITERATIVE):
        want = outcome(reference)
    for got, w in zip(found, want, strict=True):
        torch.testing.assert_close(got, w, rtol=1e-3, atol=1e-4)
    for got, w in zip(found[:3], exact[:3], strict=True):
        torch.testing.assert_close(got, w, rtol=1e-3, atol=1e-3)
    assert abs(found[3] - exact[3]) < 0.05


# --- the rest ---------------------------------------------------------------------------------------------------------
def test_memory_grows_with_the_points_alone(monkeypatch):
    """Of 3,000 points: the matrix would take 576 MB. What the process may still take is far less."""
    need("cpu")
    monkeypatch.setenv("KERNOPS_BACKEND", "cpu")
    kernel = ours.ScaleKernel(ours.RBFKernelGrad())
    points = torch.rand(3000, 3, generator=torch.Generator().manual_seed(0))

    def product(x: Tensor) -> tuple[Tensor, Tensor | None]:
        matrix, ones = kernel(x).evaluate_kernel(), torch.ones(4 * len(x), 1)
        with torch.no_grad():
            return matrix @ ones, matrix._bilinear_derivative(ones, ones)[-1]

    product(points[:10])  # compiles
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + 150_000_000, before[1]))
    try:
        with pytest.raises(RuntimeError, match="alloc"):
            torch.ones(12000, 12000)
        out, slope = product(points)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert slope is not None
    x = points.double()
    row = (ours.RBFKernelGrad().double()(x[:1], x).to_dense() * kernel.outputscale.double()).sum(-1)
    torch.testing.assert_close(out[:4, 0].double(), row, rtol=1e-4, atol=1e-3)


def test_the_compiled_back_end(monkeypatch):
    """Groups of right-hand sides, and gradients, in both precisions."""
    need("cpu")
    monkeypatch.setenv("KERNOPS_BACKEND", "cpu")
    mine, reference = pair(COMPOSED["scaled"])
    for dtype, near in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
        found = []
        for kernel, made in ((mine, lambda k: k.evaluate_kernel()), (reference, lambda k: k.to_dense())):
            x = X.to(dtype).requires_grad_() if kernel is mine else X.clone().requires_grad_()
            kernel = kernel.to(x.dtype)
            value = (made(kernel(x)) @ rand(M * (1 + D), 5, seed=4).to(x.dtype)).square().sum()
            found.append([value, *torch.autograd.grad(value, [x, *kernel.parameters()])])
        for got, want in zip(*found, strict=True):
            torch.testing.assert_close(got.double(), want, rtol=near, atol=near)


@pytest.mark.parametrize("name", KERNELS)
def test_state_dicts_are_gpytorchs(name):
    mine, reference = both(KERNELS[name][0], batch_shape=torch.Size([2]))
    assert list(mine.state_dict()) == list(reference.state_dict())
    assert isinstance(mine, type(reference))
    x = X.expand(2, M, D)
    assert torch.equal(pickle.loads(pickle.dumps(mine))(x).to_dense(), mine(x).to_dense())
    matrix = mine(x).evaluate_kernel()
    assert torch.equal(pickle.loads(pickle.dumps(matrix)).to_dense(), matrix.to_dense())


def test_a_matrix_has_kernops_own_solvers():
    kernel = ours.RBFKernelGrad().double()
    matrix = kernel(X).evaluate_kernel()
    b = rand(M * (1 + D))
    got = matrix.operator.add_diagonal(0.1).solve(b)
    want = torch.linalg.solve(matrix.to_dense() + 0.1 * torch.eye(len(b), dtype=b.dtype), b)
    torch.testing.assert_close(got, want)
    again = ours.as_linear_operator(matrix.operator)
    assert type(again) is ours.DerivativesLinearOperator
    torch.testing.assert_close(again.to_dense(), matrix.to_dense())


def test_what_does_not_fit():
    kernel = ours.RBFKernelGrad()
    with pytest.raises(ValueError, match="float64.*float32|float32.*float64"):
        kernel(X, Y).to_dense()
    with pytest.raises(ValueError, match="RBFKernelGrad: last_dim_is_batch must be False"):
        kernel.forward(X.float(), X.float(), last_dim_is_batch=True)
    with pytest.raises(RuntimeError, match="same number of dimensions"):
        kernel(X.float(), Y[:, :1].float()).to_dense()
    kernel.lengthscale = 0.0
    with pytest.raises(ValueError, match="lengthscale of RBFKernelGrad must be finite and > 0"):
        kernel(X.float()).to_dense()
