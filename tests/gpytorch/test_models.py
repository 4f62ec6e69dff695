"""Gaussian processes of GPyTorch with our kernels and with its own: likelihoods, gradients, predictions, samples."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal

from kernops import gpytorch as ours

from .cases import rand

pytestmark = [
    pytest.mark.filterwarnings("ignore:A not p.d."),  # decompositions of GPyTorch's dense matrices
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
]
Tensor = torch.Tensor
N, D, NEW = 60, 2, 9
X = torch.rand(N, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Z = torch.rand(NEW, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = (6 * X[:, 0]).sin() + X[:, 1] + 0.1 * rand(N, seed=2)


class Model(gpytorch.models.ExactGP):
    def __init__(self, x: Tensor, y: Tensor, kernel: Any, tasks: int = 1, batch: tuple[int, ...] = ()) -> None:
        shape = torch.Size(batch)
        likelihood = gpytorch.likelihoods.GaussianLikelihood(batch_shape=shape)
        mean = gpytorch.means.ConstantMean(batch_shape=shape)
        if tasks > 1:
            likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(num_tasks=tasks)
            mean = gpytorch.means.MultitaskMean(mean, num_tasks=tasks)
        super().__init__(x, y, likelihood)
        self.mean_module, self.covar_module, self.tasks = mean, kernel, tasks

    def forward(self, x: Tensor) -> MultivariateNormal:
        kind = MultitaskMultivariateNormal if self.tasks > 1 else MultivariateNormal
        return kind(self.mean_module(x), self.covar_module(x))


Make = Callable[[Any], Any]
#: Name -> (kernel made of the kernels of a module, targets, further arguments of the model).
MODELS: dict[str, tuple[Make, Tensor, dict[str, Any]]] = {
    "RBF": (lambda k: k.ScaleKernel(k.RBFKernel(ard_num_dims=D)), Y, {}),
    "Matern": (lambda k: k.ScaleKernel(k.MaternKernel(nu=1.5)), Y, {}),
    "sum": (lambda k: k.ScaleKernel(k.RBFKernel()) + k.ScaleKernel(k.LinearKernel()) + k.PeriodicKernel(), Y, {}),
    "product": (lambda k: k.ScaleKernel(k.RBFKernel() * k.RQKernel(active_dims=[0])), Y, {}),
    "tasks": (lambda k: k.MultitaskKernel(k.RBFKernel(), num_tasks=2), torch.stack([Y, -2 * Y + 1], -1), {"tasks": 2}),
    "batch": (
        lambda k: k.ScaleKernel(k.RBFKernel(batch_shape=torch.Size([2])), batch_shape=torch.Size([2])),
        torch.stack([Y, Y.cos()]),
        {"batch": (2,)},
    ),
}
#: Conjugate gradients with a preconditioner and random vectors. linear_operator's stagnate below this tolerance.
ITERATIVE = (
    gpytorch.settings.max_cholesky_size(0),
    gpytorch.settings.cg_tolerance(1e-5),
    gpytorch.settings.eval_cg_tolerance(1e-5),
    gpytorch.settings.max_cg_iterations(500),
    gpytorch.settings.min_preconditioning_size(10),
    gpytorch.settings.max_preconditioner_size(15),
    gpytorch.settings.num_trace_samples(20),
)


def models(name: str) -> tuple[Model, Model]:
    """A model of ours, and the same with GPyTorch's kernel, with the parameters of the first."""
    make, y, settings = MODELS[name]
    x = X.expand(*settings.get("batch", ()), N, D)
    mine, dense = (Model(x, y, make(k), **settings).double() for k in (ours, gpytorch.kernels))
    for k, p in enumerate(mine.parameters()):
        p.data = rand(*p.shape, seed=k) * 0.3
    dense.load_state_dict(mine.state_dict())
    return mine, dense


def within(settings: tuple = ()) -> ExitStack:
    stack = ExitStack()
    for s in settings:
        stack.enter_context(s)
    return stack


def likelihood(model: Model, x: Tensor | None = None) -> Tensor:
    """The marginal log likelihood; of the points ``x``, that gradients are asked by, for the model's own."""
    model.train()
    if x is not None:
        model.set_train_data(x, strict=False)
    torch.manual_seed(0)  # the same random vectors for both models
    (points,), y = model.train_inputs, model.train_targets
    return gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)(model(points), y).sum()


#: By conjugate gradients without the sum, of which GPyTorch decomposes a part, at random, so that its vectors are
#: others, and without tasks, where its own are never iterative.
LIKELIHOODS = [(n, s) for n in MODELS for s in ((), ITERATIVE) if not s or n not in ("sum", "tasks")]


@pytest.mark.parametrize(("name", "settings"), LIKELIHOODS, ids=[f"{n} {'cg' if s else ''}" for n, s in LIKELIHOODS])
def test_likelihoods_and_their_gradients(name, settings):
    """Equal to GPyTorch's, by parameters and by training points; with the same random vectors where there are any."""
    found = []
    for model in models(name):
        x = model.train_inputs[0].clone().requires_grad_()
        with within(settings):
            value = likelihood(model, x)
            found.append((value, *torch.autograd.grad(value, [x, *model.parameters()])))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["RBF", "sum", "tasks"])
def test_the_iterative_likelihood_is_near_the_exact_one(name):
    mine, dense = models(name)
    exact = likelihood(dense)
    with within(ITERATIVE):
        assert abs(likelihood(mine) - exact) < 0.02


def predict(model: Model, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance of the predictions, and the gradient of both by the new points."""
    model.eval()
    x = x.clone().requires_grad_()
    torch.manual_seed(0)
    out = model(x)
    mean, variance = out.mean, out.variance
    return mean, variance, torch.autograd.grad((mean + 2 * variance).sum(), x)[0]


@pytest.mark.parametrize("settings", [(), ITERATIVE], ids=["cholesky", "iterative"])
@pytest.mark.parametrize("name", MODELS)
def test_predictions(name, settings):
    mine, dense = models(name)
    x = Z.expand(*MODELS[name][2].get("batch", ()), NEW, D)
    with within(settings):
        found = predict(mine, x)
    near = 1e-3 if settings else 1e-6
    for got, want in zip(found, predict(dense, x), strict=True):
        torch.testing.assert_close(got, want, rtol=near, atol=near)


@pytest.mark.parametrize("name", ["RBF", "sum", "batch"])
def test_love(name):
    """Variances from Lanczos' decomposition, whole here, agree with the exact ones."""
    mine, dense = models(name)
    x = Z.expand(*MODELS[name][2].get("batch", ()), NEW, D)
    love = (gpytorch.settings.fast_pred_var(), gpytorch.settings.max_root_decomposition_size(N))
    with within((*love, *ITERATIVE)), torch.no_grad():
        found = mine.eval()(x)
    with torch.no_grad():
        exact = dense.eval()(x)
    torch.testing.assert_close(found.mean, exact.mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.variance, exact.variance, rtol=1e-3, atol=1e-5)


def test_samples():
    """Of the prior and of the posterior, also with their covariance from LOVE."""
    mine, dense = models("RBF")
    torch.manual_seed(0)
    with torch.no_grad(), gpytorch.settings.fast_pred_var(), gpytorch.settings.fast_pred_samples():
        samples = mine.eval()(Z).rsample(torch.Size([4000]))
        exact = dense.eval()(Z)
        prior = mine.train()(X).rsample(torch.Size([4000]))
    torch.testing.assert_close(samples.mean(0), exact.mean, atol=0.02, rtol=0.02)
    torch.testing.assert_close(samples.T.cov(), exact.covariance_matrix, atol=0.02, rtol=0.1)
    covariance = dense.covar_module(X).to_dense()
    torch.testing.assert_close(prior.T.cov(), covariance, atol=0.12 * covariance.max().item(), rtol=0.1)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_new_observations():
    """``get_fantasy_model``: as a model of all observations predicts."""
    mine, dense = models("RBF")
    for model in (mine, dense):
        model.eval()(Z)
    new, values = rand(3, D, seed=7), rand(3, seed=8)
    got = mine.get_fantasy_model(new, values)(Z)
    want = dense.get_fantasy_model(new, values)(Z)
    torch.testing.assert_close(got.mean, want.mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got.variance, want.variance, rtol=1e-5, atol=1e-6)


def test_tasks_by_number():
    """Observations of one task each: GPyTorch's example of a Hadamard product, by conjugate gradients."""
    task = torch.arange(N, dtype=torch.float64)[:, None] % 3
    x = torch.cat([X, task], -1)
    make = lambda k: k.RBFKernel(active_dims=[0, 1]) * k.IndexKernel(num_tasks=3, rank=2, active_dims=[2])  # noqa: E731
    torch.manual_seed(0)
    mine, dense = (Model(x, Y, make(k)).double() for k in (ours, gpytorch.kernels))
    dense.load_state_dict(mine.state_dict())
    new = torch.cat([Z, torch.ones(NEW, 1)], -1)
    with within(ITERATIVE):
        found = predict(mine, new)
    for got, want in zip(found, predict(dense, new), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    exact = likelihood(dense)
    with within(ITERATIVE):
        assert abs(likelihood(mine) - exact) < 0.03


def test_training():
    """The same steps, parameter by parameter, and a better fit."""
    losses = []
    both = models("RBF")
    for model in both:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for _ in range(15):
            optimizer.zero_grad()
            loss = -likelihood(model)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[14] < losses[0] - 0.1
    for got, want in zip(*(m.state_dict().values() for m in both), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_a_deep_kernel():
    """Points that a network makes: the gradient by points that are rows and columns reaches its weights."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(D, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).double()
    grads = []
    for model in models("RBF"):
        torch.manual_seed(1)
        with within(ITERATIVE):
            matrix = model.covar_module(network(X)).add_jitter(0.1)
            fit, logdet = matrix.inv_quad_logdet(Y[:, None], logdet=True)
        grads.append(torch.autograd.grad(fit + logdet, list(network.parameters())))
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
