"""The table of contenders of the Gaussian process benchmark."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .flights import FEATURES, flights
from .gp import ALPHA, RIDGE_ITERATIONS, GPConfig, Problem, Tensor

Found = dict[str, Any]

#: Iterations of the search for the parameters of ``regressor``.
STEPS = 10
#: Bytes for each pair that scikit-learn stores: the kernel and its decomposition, and derivatives by parameters.
DENSE_BYTES = {"regressor": (3 + 10) * 8, "ridge": 2 * 8}


@dataclass(frozen=True)
class Contender:
    """One row of the table.

    Attributes:
        build: ``build(problem)`` gives what is timed; it returns numbers, and vectors to compare.
        tasks: what it does.
        modules: what must be importable.
        check: ``check(problem)`` gives more numbers, outside of the clock.
        note: shown in the table.
        slow: whether a prediction from many points takes minutes.
        small: points of a first run on a GPU, which compiles: enough for the kernels that many points take.
    """

    name: str
    build: Callable[[Problem], Callable[[], Found]]
    tasks: tuple[str, ...]
    modules: tuple[str, ...] = ()
    check: Callable[[Problem], Found] = lambda problem: {}
    note: str = ""
    slow: bool = False
    small: int = 2000

    def missing(self, config: GPConfig, full: bool) -> str:
        """Why this contender cannot take part, in words; empty where it can."""
        for module in self.modules:
            if importlib.util.find_spec(module) is None:
                return "not installed"
        if config.task not in self.tasks:
            return f"does not do {config.task}"
        if self.slow and config.task == "predict" and config.n > 20_000 and not full:
            return "takes a minute or more; asked for by --full"
        if self.name == "sklearn" and DENSE_BYTES[config.task] * config.n**2 > _memory() / 2:
            return f"would store {DENSE_BYTES[config.task] * config.n**2 / 1e9:.0f} GB"
        return ""


def _memory() -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


# --- kernops ----------------------------------------------------------------------------------------------------------
def _operator(problem: Problem, length: Tensor, variance: Any, noise: Any) -> Any:
    from kernops.kernels import RBF
    from kernops.operators import KernelOperator

    backend = None if problem.config.backend == "auto" else problem.config.backend
    return KernelOperator(variance * RBF(length), problem.x, backend=backend).add_diagonal(noise)


def _settings(config: GPConfig, operator: Any) -> dict[str, Any]:
    preconditioner = operator.preconditioner(rank=config.rank) if config.rank else "auto"
    return {"tol": config.tol, "method": "cg", "preconditioner": preconditioner, "return_report": True}


def _likelihood(problem: Problem) -> Callable[[], Found]:
    config, x = problem.config, problem.x
    start = [problem.length.log(), x.new_zeros(()), x.new_tensor(problem.noise).log()]
    leaves = [t.clone().requires_grad_() for t in start]

    def call() -> Found:
        length, variance, noise = (t.exp() for t in leaves)
        operator = _operator(problem, length, variance, noise)
        fit, logdet, report = operator.inv_quad_logdet(problem.y, n_probes=config.probes, **_settings(config, operator))
        loss = (fit + logdet) / (2 * config.n) + 0.5 * math.log(2 * math.pi)
        torch.autograd.grad(loss, leaves)
        return {"loss": float(loss.detach()), **_report(report)}

    return call


def _report(report: Any) -> Found:
    return {
        "iterations": report.iterations,
        "residual": float(report.residual.max()),
        "rank": report.rank,
        "preconditioner": report.preconditioner,
    }


def _predict(problem: Problem) -> Callable[[], Found]:
    from kernops.kernels import RBF
    from kernops.operators import KernelOperator, posterior_variance

    config = problem.config
    backend = None if config.backend == "auto" else config.backend

    @torch.no_grad()
    def call() -> Found:
        operator = _operator(problem, problem.length, 1.0, problem.noise)
        made = operator.preconditioner("auto", config.rank or None, columns=config.queries)
        across = KernelOperator(RBF(problem.length), problem.queries, problem.x, backend=backend)
        settings = {"method": "cg", "preconditioner": made}
        weights, report = operator.solve(problem.y, tol=config.tol, return_report=True, **settings)
        prior = torch.ones_like(problem.queries[:, 0])
        spread = posterior_variance(operator, across, prior, accuracy=config.tol, **settings)
        found = {"mean": across @ weights, "variance": spread.value, **_report(report)}
        return {**found, "iterations": spread.iterations}

    return call


def _kernops(problem: Problem) -> Callable[[], Found]:
    return {"likelihood": _likelihood, "predict": _predict, "regressor": _flights(_ours), "ridge": _ridge(True)}[
        problem.config.task
    ](problem)


# --- GPyTorch with KeOps ----------------------------------------------------------------------------------------------
def _model(problem: Problem) -> tuple[Any, Any, Any]:
    """``(model, likelihood, mll)`` with the parameters of the data."""
    import gpytorch
    from gpytorch.kernels.keops import RBFKernel

    class Model(gpytorch.models.ExactGP):
        def __init__(self, likelihood: Any) -> None:
            super().__init__(problem.x, problem.y, likelihood)
            self.mean_module = gpytorch.means.ZeroMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(RBFKernel(ard_num_dims=problem.config.d))

        def forward(self, x: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = Model(likelihood).to(problem.x)
    likelihood.noise = problem.noise
    model.covar_module.outputscale = 1.0
    model.covar_module.base_kernel.lengthscale = problem.length[None]
    return model, likelihood, gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)


@contextlib.contextmanager
def _as_ours(config: GPConfig) -> Iterator[None]:
    """GPyTorch's settings brought to those of a configuration."""
    import gpytorch

    from kernops.operators.choice import default_rank

    s = gpytorch.settings
    with contextlib.ExitStack() as stack:
        for setting, value in (
            (s.num_trace_samples, config.probes),
            (s.max_preconditioner_size, config.rank or default_rank(config.n, torch.device(config.device))),
            (s.cg_tolerance, config.tol),
            (s.eval_cg_tolerance, config.tol),
            (s.max_cholesky_size, min(800, config.n - 1)),
        ):
            stack.enter_context(setting(value))
        yield


def _gpytorch(settings: Callable[[GPConfig], Any]) -> Callable[[Problem], Callable[[], Found]]:
    def build(problem: Problem) -> Callable[[], Found]:
        model, likelihood, mll = _model(problem)
        leaves = list(model.parameters())

        def loss() -> Found:
            with settings(problem.config), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model.train()
                value = -mll(model(problem.x), problem.y)
                torch.autograd.grad(value, leaves)
            return {"loss": float(value.detach())}

        def predict() -> Found:
            with settings(problem.config), warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")
                model.train()  # forgets what it has cached
                model.eval()
                found = model(problem.queries)
                return {"mean": found.mean, "variance": found.variance}

        return {"likelihood": loss, "predict": predict}[problem.config.task]

    return build


def _residual(settings: Callable[[GPConfig], Any]) -> Callable[[Problem], Found]:
    """The residual of a solution for y, which a likelihood does not tell."""

    def check(problem: Problem) -> Found:
        if problem.config.task != "likelihood":
            return {}
        model, likelihood, _ = _model(problem)
        with settings(problem.config), warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            matrix = likelihood(model.train()(problem.x)).lazy_covariance_matrix
            solved = matrix.solve(problem.y[:, None])
            left = _operator(problem, problem.length, 1.0, problem.noise) @ solved - problem.y[:, None]
        return {"residual": float(left.norm() / problem.y.norm())}

    return check


def _as_it_is(config: GPConfig) -> Any:
    return contextlib.nullcontext()


# --- estimators -------------------------------------------------------------------------------------------------------
def _ours() -> Any:
    from kernops.estimators import GaussianProcessRegressor

    return GaussianProcessRegressor


def _theirs() -> Any:
    from sklearn.gaussian_process import GaussianProcessRegressor

    return GaussianProcessRegressor


#: Whose regressor it is -> where it comes from.
LIBRARIES: dict[str, Callable[[], Any]] = {"kernops": _ours, "scikit-learn": _theirs}


def flights_kernel() -> Any:
    """Where the search for the parameters of flights starts.

    No length scale may be shorter than 0.3, a month of the year: what single days had in common, their weather, is of
    no use for other days.
    """
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

    kernel = ConstantKernel(0.2, (1e-2, 1e2)) * RBF([3.0] * len(FEATURES), (0.3, 1e2))
    return kernel + WhiteKernel(0.9, (1e-2, 1e1))


def few_steps(objective: Callable[[np.ndarray], tuple], theta: np.ndarray, bounds: np.ndarray) -> tuple:
    """An optimizer as both libraries take them: ``STEPS`` iterations of L-BFGS-B.

    The first step of L-BFGS-B is the gradient itself, which of many samples leads into a corner of the bounds; divided
    by its length it does not.
    """
    from scipy.optimize import minimize

    first = objective(theta)
    scale = 1 / max(float(np.linalg.norm(first[1])), 1e-300)

    def scaled(at: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = first if np.array_equal(at, theta) else objective(at)
        return value * scale, gradient * scale

    found = minimize(scaled, theta, method="L-BFGS-B", jac=True, bounds=bounds, options={"maxiter": STEPS})
    return found.x, found.fun / scale


def _flights(library: Callable[[], Any]) -> Callable[[Problem], Callable[[], Found]]:
    def build(problem: Problem) -> Callable[[], Found]:
        data, kernel = flights(problem.config.n, problem.config.queries), flights_kernel()
        device = {"device": problem.config.device} if library is _ours else {}

        def call() -> Found:
            model = library()(kernel, optimizer=few_steps, normalize_y=True, random_state=0, **device)
            mean, std = model.fit(data.x, data.y).predict(data.x_test, return_std=True)
            inside = np.abs(mean - data.y_test) <= 1.6449 * std
            found = {"rmse": float(np.sqrt(np.mean((mean - data.y_test) ** 2))), "coverage": float(inside.mean())}
            if library is _ours:
                found.update(iterations=model.n_iter_, residual=model.residual_)
            return found

        return call

    return build


def _ridge(ours: bool) -> Callable[[Problem], Callable[[], Found]]:
    def build(problem: Problem) -> Callable[[], Found]:
        config = problem.config
        x, y, queries = (t.cpu().numpy() for t in (problem.x, problem.y, problem.queries))
        gamma = float(0.5 / problem.length.mean() ** 2)
        more: dict[str, Any] = {}
        if ours:
            more = {"tol": 1e-12, "max_iter": RIDGE_ITERATIONS, "solver": "cg", "device": config.device}
        library = importlib.import_module("kernops.estimators" if ours else "sklearn.kernel_ridge")

        def call() -> Found:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # so few iterations are not meant to converge
                model = library.KernelRidge(alpha=ALPHA, kernel="rbf", gamma=gamma, **more).fit(x, y)
            found: Found = {"mean": torch.from_numpy(model.predict(queries))}
            return {**found, "iterations": model.n_iter_, "residual": float(model.residual_)} if ours else found

        return call

    return build


def _sklearn(problem: Problem) -> Callable[[], Found]:
    return {"regressor": _flights(_theirs), "ridge": _ridge(False)}[problem.config.task](problem)


OPERATORS, ESTIMATORS = ("likelihood", "predict"), ("regressor", "ridge")
CONTENDERS: dict[str, Contender] = {
    c.name: c
    for c in (
        Contender("kernops", _kernops, (*OPERATORS, *ESTIMATORS), small=20_000),
        Contender("gpytorch-keops", _gpytorch(_as_ours), OPERATORS, ("gpytorch", "pykeops"), _residual(_as_ours),
                  "the same settings", slow=True),
        Contender("gpytorch-keops-default", _gpytorch(_as_it_is), OPERATORS, ("gpytorch", "pykeops"),
                  _residual(_as_it_is), "its own settings: rank 15, tolerance 1", slow=True),
        Contender("sklearn", _sklearn, ESTIMATORS, ("sklearn",)),
    )
}  # fmt: skip
