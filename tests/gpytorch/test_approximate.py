"""GPyTorch's approximate models, which take matrices apart: with our kernels they compute what they do with its own."""

from __future__ import annotations

from typing import Any

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.variational import CholeskyVariationalDistribution, VariationalStrategy

from kernops import gpytorch as ours

from .cases import rand
from .test_models import NEW, D, Model, X, Y, Z, likelihood, within

Tensor = torch.Tensor
INDUCING = rand(8, D, seed=3) * 0.3 + 0.5


class Variational(gpytorch.models.ApproximateGP):
    def __init__(self, kernels: Any) -> None:
        distribution = CholeskyVariationalDistribution(len(INDUCING))
        super().__init__(VariationalStrategy(self, INDUCING, distribution, learn_inducing_locations=True))
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = kernels.ScaleKernel(kernels.MaternKernel(nu=2.5, ard_num_dims=D))
        self.double()

    def forward(self, x: Tensor) -> MultivariateNormal:
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def test_variational():
    """The bound of a sparse variational model with its gradients, by inducing points too, and predictions."""
    found = []
    for kernels in (ours, gpytorch.kernels):
        torch.manual_seed(0)
        model, noise = Variational(kernels), gpytorch.likelihoods.GaussianLikelihood().double()
        model(X)  # which starts the variational distribution
        bound = gpytorch.mlls.VariationalELBO(noise, model, num_data=len(X))(model(X), Y)
        grads = torch.autograd.grad(bound, list(model.parameters()))
        model.eval()
        out = model(Z)
        found.append((bound, *grads, out.mean, out.variance))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def sparse(kernels: Any) -> Any:
    noise = gpytorch.likelihoods.GaussianLikelihood()
    return lambda: kernels.InducingPointKernel(kernels.ScaleKernel(kernels.RBFKernel()), INDUCING.clone(), noise)


def on_a_grid(kernels: Any) -> Any:
    return lambda: gpytorch.kernels.GridInterpolationKernel(
        kernels.ScaleKernel(kernels.RBFKernel()), grid_size=12, grid_bounds=((-0.1, 1.1),) * D
    )


@pytest.mark.filterwarnings("ignore:Sparse invariant checks", "ignore:The last_dim_is_batch", "ignore:torch.sparse")
@pytest.mark.parametrize("make", [sparse, on_a_grid])
def test_matrices_of_low_rank(make):
    """Regression with inducing points, and with interpolation on a grid."""
    found = []
    for kernels in (ours, gpytorch.kernels):
        model = Model(X, Y, make(kernels)()).double()
        with within((gpytorch.settings.deterministic_probes(False),)):
            value = likelihood(model)
            grads = torch.autograd.grad(value, list(model.parameters()))
        with torch.no_grad():
            out = model.eval()(Z)
            found.append((value, *grads, out.mean, out.variance))
    assert found[0][-1].shape == (NEW,)
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
