"""Gradients of gradients, through products with matrices that are not stored: as through dense ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gpytorch
import pytest
import torch

from kernops import gpytorch as ours

from .cases import rand
from .test_models import Z, models, within

Tensor = torch.Tensor
X, Y, COLUMNS = rand(7, 2, seed=1), rand(9, 2, seed=2), rand(9, 2, seed=3)


def curvature(matrix: Callable[[Tensor, Tensor], Any], sources: list[Tensor], parameters: list[Tensor]) -> list[Tensor]:
    """The gradient of a squared gradient of a function, not linear, of the product with vectors."""
    made = matrix(*sources)
    value = (made @ COLUMNS.repeat(made.shape[-1] // len(COLUMNS), 1)).square().sum()
    wanted = [*sources, *parameters]
    first = torch.autograd.grad(value, wanted, create_graph=True)
    return list(torch.autograd.grad(sum((g.square().sum() for g in first), torch.zeros(())), wanted))


#: Not those of GPyTorch's distances, which it cannot differentiate twice.
KERNELS: dict[str, Callable[[Any], Any]] = {
    "RBF": lambda k: k.ScaleKernel(k.RBFKernel(ard_num_dims=2)),
    "rational": lambda k: k.RQKernel(),
    "sum": lambda k: k.RBFKernel() + k.PolynomialKernel(power=2),
    "product": lambda k: k.RBFKernel() * k.LinearKernel(),
}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("square", [False, True])
def test_products(name, square):
    """By points, where they are rows and columns too, and by parameters."""
    kernel, reference = (KERNELS[name](k).double() for k in (ours, gpytorch.kernels))
    reference.load_state_dict(kernel.state_dict())
    found = []
    for k, dense in ((kernel, False), (reference, True)):
        sources = [Y.clone().requires_grad_()] if square else [X.clone().requires_grad_(), Y.clone().requires_grad_()]
        made = lambda *x, k=k, dense=dense: k(*x).to_dense() if dense else k(*x).evaluate_kernel()  # noqa: E731
        found.append(curvature(made, sources, list(k.parameters())))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_products_of_several_tasks():
    """Also where linear_operator's own Kronecker products drop terms."""
    kernel = ours.MultitaskKernel(ours.RBFKernel(), num_tasks=2, rank=1).double()
    for k, p in enumerate(kernel.parameters()):
        p.data = rand(*p.shape, seed=k)

    def dense(x: Tensor, y: Tensor) -> Tensor:
        return torch.kron(kernel.data_covar_module(x, y).to_dense(), kernel.task_covar_module.covar_matrix.to_dense())

    found = []
    for made in (lambda x, y: kernel(x, y).evaluate_kernel(), dense):
        found.append(curvature(made, [X.clone().requires_grad_(), Y.clone().requires_grad_()], [*kernel.parameters()]))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("eager", [0, 512])
def test_the_hessian_of_a_prediction(eager):
    """Of mean and variance by new points; GPyTorch makes small matrices dense first, and large ones not."""
    settings = (gpytorch.settings.max_eager_kernel_size(eager), gpytorch.settings.detach_test_caches(False))
    found = []
    for model in models("RBF"):
        model.eval()

        def score(x: Tensor, model: Any = model) -> Tensor:
            out = model(x)
            return out.mean.sum() + out.variance.sum()

        with within(settings):
            found.append(torch.autograd.functional.hessian(score, Z[:2]))
    assert found[1].abs().max() > 1
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)
