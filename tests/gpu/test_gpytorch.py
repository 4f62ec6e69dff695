"""GPyTorch's models with our kernels on a GPU: against its dense kernels there, and in float64 in main memory."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch

gpytorch = pytest.importorskip("gpytorch")

from kernops import gpytorch as ours  # noqa: E402

Tensor = torch.Tensor
DEVICE = "cuda"
N, D, NEW = 3000, 3, 50


def data(device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Points, targets and new points."""
    g = torch.Generator().manual_seed(0)
    x = torch.rand(N + NEW, D, generator=g, dtype=torch.float64)
    y = torch.sin(6 * x.sum(-1)) + 0.1 * torch.randn(N + NEW, generator=g, dtype=torch.float64)
    return x[:N].to(device, dtype), y[:N].to(device, dtype), x[N:].to(device, dtype)


class Model(gpytorch.models.ExactGP):  # type: ignore[name-defined]
    def __init__(self, kernels: Any, device: str, dtype: torch.dtype) -> None:
        x, y, self.new = data(device, dtype)
        super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood())
        self.mean_module = gpytorch.means.ConstantMean()
        base = kernels.ScaleKernel(kernels.RBFKernel(ard_num_dims=D)) + kernels.MaternKernel(nu=1.5)
        self.covar_module = kernels.ScaleKernel(base)
        self.to(device, dtype)
        self.likelihood.noise = 0.1
        for kernel in base.kernels:
            getattr(kernel, "base_kernel", kernel).lengthscale = 0.4

    def forward(self, x: Tensor) -> Any:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    def score(self) -> list[Tensor]:
        """The marginal log likelihood and its gradient."""
        torch.manual_seed(0)
        self.train()
        value = gpytorch.mlls.ExactMarginalLogLikelihood(self.likelihood, self)(
            self(self.train_inputs[0]), self.train_targets
        )
        return [value, *torch.autograd.grad(value, list(self.parameters()))]

    def predicted(self) -> tuple[Tensor, Tensor]:
        self.eval()
        with torch.no_grad():
            out = self(self.new)
            return out.mean, out.variance


def iterative() -> ExitStack:
    stack, settings = ExitStack(), gpytorch.settings
    for s in (
        settings.max_cholesky_size(0),
        settings.cg_tolerance(1e-4),
        settings.eval_cg_tolerance(1e-4),
        settings.min_preconditioning_size(100),
        settings.max_preconditioner_size(100),
        settings.max_cg_iterations(500),
    ):
        stack.enter_context(s)
    return stack


def near(got: Tensor, want: Tensor, tol: float) -> None:
    got, want = got.detach().cpu().double(), want.detach().cpu().double()
    assert got.isfinite().all() and (got - want).norm() <= tol * (1e-3 + want.norm())


@pytest.mark.parametrize(("dtype", "tol"), [(torch.float64, 1e-3), (torch.float32, 1e-2)])
def test_likelihood_and_predictions(dtype, tol):
    """The likelihood and gradient of dense kernels, with the same random vectors; the exact predictions."""
    exact = Model(gpytorch.kernels, "cpu", torch.float64)
    with gpytorch.settings.max_cholesky_size(N + NEW):
        value = exact.score()[0]
        mean, variance = exact.predicted()
    with iterative():
        model = Model(ours, DEVICE, dtype)
        mine, dense = model.score(), Model(gpytorch.kernels, DEVICE, dtype).score()
        m, v = model.predicted()
    assert mine[0].device.type == DEVICE and abs(mine[0].item() - value.item()) < 0.02
    for got, want in zip(mine, dense, strict=True):
        near(got, want, tol)
    near(m, mean, tol)
    near(v, variance, 5 * tol)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_products_entries_and_gradients(dtype):
    """Of one matrix: right-hand sides of 200 columns, rows, a batch, and gradients by everything."""
    tol = 1e-10 if dtype == torch.float64 else 1e-4
    made = []
    for kernels, device, t in ((ours, DEVICE, dtype), (gpytorch.kernels, "cpu", torch.float64)):
        x, _, new = (a.requires_grad_() for a in data(device, t))
        kernel = kernels.ScaleKernel(kernels.MaternKernel(nu=2.5, ard_num_dims=D)) * kernels.RBFKernel()
        kernel.to(device, t)
        v = torch.linspace(-1, 1, N * 200, dtype=torch.float64).cos().reshape(N, 200).to(device, t)
        matrix = kernel(new, x)
        out = matrix @ v
        grads = torch.autograd.grad(out.square().mean(), [x, new, *kernel.parameters()])
        rows = torch.arange(0, NEW, 7, device=device)
        made.append([out, matrix[rows, 5:40].to_dense(), matrix[rows, rows + 3], kernel(x).diagonal(), *grads])
    for got, want in zip(*made, strict=True):
        assert got.device.type == DEVICE
        near(got, want, tol)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_kernels_of_derivatives(dtype):
    """Right-hand sides in one group and in several, of one matrix and of a sum, and gradients by everything."""
    tol = 1e-10 if dtype == torch.float64 else 1e-4
    made = []
    for kernels, device, t in ((ours, DEVICE, dtype), (gpytorch.kernels, "cpu", torch.float64)):
        x, _, new = (a.requires_grad_() for a in data(device, t))
        kernel = kernels.ScaleKernel(kernels.RBFKernelGrad(ard_num_dims=D)) + kernels.Matern52KernelGrad()
        kernel.to(device, t)
        v = torch.linspace(-1, 1, N * (D + 1) * 9, dtype=torch.float64).cos().reshape(-1, 9).to(device, t)
        matrix = kernel(new, x)
        out = matrix @ v
        grads = torch.autograd.grad(out.square().mean(), [x, new, *kernel.parameters()])
        rows = torch.arange(0, NEW * (D + 1), 7, device=device)
        entries = [matrix[3:9, 5:40].to_dense(), matrix[rows, rows + 3], kernel(x, diag=True)]
        made.append([out, matrix @ v[:, :1], *entries, *grads])
    for got, want in zip(*made, strict=True):
        assert got.device.type == DEVICE
        near(got, want, tol)
