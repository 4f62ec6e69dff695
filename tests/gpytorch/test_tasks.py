"""Several tasks for each point: above GPyTorch's limit for decompositions no matrix of all points is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal
from linear_operator.operators import KroneckerProductLinearOperator

from kernops import gpytorch as ours
from kernops.gpytorch.tasks import TasksLinearOperator

from .cases import rand
from .test_models import Model, within

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")
Tensor = torch.Tensor
N, NEW = 40, 6
X = torch.rand(N, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Z = torch.rand(NEW, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.stack([(6 * X[:, 0]).sin(), X[:, 1] - X[:, 0]], -1) + 0.1 * rand(N, 2)
ITERATIVE = (
    gpytorch.settings.max_cholesky_size(0),
    gpytorch.settings.cg_tolerance(1e-4),
    gpytorch.settings.eval_cg_tolerance(1e-4),
    gpytorch.settings.max_cg_iterations(200),
    gpytorch.settings.num_trace_samples(60),
)
NOISES: dict[str, dict[str, Any]] = {
    "of each task": {},
    "one": {"has_task_noise": False},
    "correlated": {"rank": 1},
}
KERNELS: dict[str, Callable[[Any], Any]] = {
    "tasks": lambda k: k.MultitaskKernel(k.RBFKernel(), num_tasks=2, rank=1),
    "coregionalisation": lambda k: k.LCMKernel([k.RBFKernel(), k.MaternKernel()], num_tasks=2, rank=1),
}


def pair(name: str, noise: str) -> tuple[Model, Model]:
    made = []
    for kernels in (ours, gpytorch.kernels):
        model = Model(X, Y, KERNELS[name](kernels), tasks=2)
        model.likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(num_tasks=2, **NOISES[noise])
        made.append(model.double())
    mine, reference = made
    for k, p in enumerate(mine.parameters()):
        p.data = rand(*p.shape, seed=k) * 0.3
    reference.load_state_dict(mine.state_dict())
    return mine, reference


def results(model: Model) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    model.train()
    score = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    value = score(model(X), Y)
    grads = torch.autograd.grad(value, list(model.parameters()))
    out = model.eval()(Z)
    return out.mean, out.variance, value, grads


@pytest.mark.parametrize(("name", "noise"), [("tasks", k) for k in NOISES] + [("coregionalisation", "of each task")])
def test_large_models_store_no_matrix(name, noise):
    """Likelihoods, their gradients and predictions are near the exact ones."""
    mine, reference = pair(name, noise)
    dense = ours.KernopsLinearOperator.to_dense

    def small(matrix: Any) -> Tensor:
        assert min(matrix.shape[-2:]) < N, "the matrix of all points was made dense"
        return dense(matrix)

    with within(ITERATIVE), patch.object(ours.KernopsLinearOperator, "to_dense", small):
        mean, variance, value, grads = results(mine)
    want_mean, want_variance, want, want_grads = results(reference)
    torch.testing.assert_close(mean, want_mean, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(variance, want_variance, rtol=1e-2, atol=1e-3)
    assert abs(value - want) < 0.03
    for got, g in zip(grads, want_grads, strict=True):
        torch.testing.assert_close(got, g, rtol=0.1, atol=0.03)


@pytest.mark.parametrize("noise", NOISES)
def test_small_models_are_exact(noise):
    """By linear_operator's decompositions of Kronecker products."""
    found = map(results, pair("tasks", noise))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_which_products_are_ours():
    mine = ours.MultitaskKernel(ours.RBFKernel() + ours.LinearKernel(), num_tasks=2).double()(X).evaluate_kernel()
    dense = ours.MultitaskKernel(gpytorch.kernels.RBFKernel(), num_tasks=2).double()(X).evaluate_kernel()
    assert type(mine) is TasksLinearOperator and type(dense) is KroneckerProductLinearOperator


def test_a_matrix_without_noise():
    """Its determinant and solves, by the factors where they are small."""
    matrix = ours.MultitaskKernel(ours.RBFKernel(), num_tasks=2, rank=2).double()(20 * X[:12]).evaluate_kernel()
    b = rand(24, 2, seed=4)
    want = (b * torch.linalg.solve(matrix.to_dense(), b)).sum(), torch.logdet(matrix.to_dense())
    for got, w in zip(matrix.inv_quad_logdet(b, logdet=True), want, strict=True):
        torch.testing.assert_close(got, w, rtol=1e-5, atol=1e-5)
    torch.manual_seed(0)
    with within(ITERATIVE):
        for got, w in zip(matrix.inv_quad_logdet(b, logdet=True), want, strict=True):
            torch.testing.assert_close(got, w, rtol=0.02, atol=0.5)


def test_predictions_of_tasks_are_multitask_distributions():
    mine, _ = pair("tasks", "one")
    assert isinstance(mine.eval()(Z), MultitaskMultivariateNormal)
