"""Problems of Gaussian processes: their data, and what is exact."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

Tensor = torch.Tensor

#: What is timed.
TASKS = {
    "likelihood": "one marginal likelihood and its gradient by length scales, variance and noise",
    "predict": "mean and variance of new points, from the data on",
    "regressor": "GaussianProcessRegressor: fit, then mean and standard deviation of flights of other days",
    "ridge": "KernelRidge: fit of 30 iterations of conjugate gradients, and prediction",
}
#: Length scale of every dimension by the square root of their number; it differs by up to a tenth between them.
LENGTH = 0.25
NOISE = 0.1  # variance, beside that of the function, 1
WAVES = 512  # of which the function is made
#: Iterations of ``ridge``, and its regularization.
RIDGE_ITERATIONS, ALPHA = 30, 1.0


@dataclass(frozen=True)
class GPConfig:
    """What is measured; all of it goes into the JSON file.

    Attributes:
        task: a key of ``TASKS``.
        n, d: points to learn from, and their dimensions.
        queries: new points.
        probes, rank, tol: of likelihoods: random vectors, rank of the preconditioner (0 for the default of kernops),
            tolerance of conjugate gradients.
        dtype, device, backend: as for the other benchmarks.
    """

    task: str
    n: int
    d: int = 3
    queries: int = 1000
    probes: int = 10
    rank: int = 0
    tol: float = 0.01
    dtype: str = "float32"
    device: str = "cpu"
    backend: str = "auto"
    case: str = "gp"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> GPConfig:
        known = {f.name for f in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})


@dataclass(frozen=True)
class Problem:
    """Points ``x`` (n, d) and noisy values ``y`` (n,) of a function that is drawn from the prior, and new points.

    The length scales (d,) and the variance of the noise are those that the data were made with.
    """

    config: GPConfig
    x: Tensor
    y: Tensor
    queries: Tensor
    length: Tensor
    noise: float = NOISE


def make_problem(config: GPConfig, seed: int = 0) -> Problem:
    """Points that are uniform in the unit cube, and a function with the covariance of an RBF kernel.

    The function is a sum of waves of random frequencies (Rahimi and Recht, Random features for large-scale kernel
    machines, 2007).
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    d = config.d
    length = LENGTH * math.sqrt(d) * (1 + 0.1 * torch.arange(d, dtype=torch.float64) / d)
    x, queries = uniform(config.n, d), uniform(config.queries, d)
    frequencies, phases, heights = normal(d, WAVES) / length[:, None], 2 * math.pi * uniform(WAVES), normal(WAVES)
    parts = [torch.cos(part @ frequencies + phases) @ heights for part in x.split(10_000)]
    y = torch.cat(parts) * math.sqrt(2 / WAVES) + math.sqrt(NOISE) * normal(config.n)
    like = {"dtype": getattr(torch, config.dtype), "device": config.device}
    return Problem(config, x.to(**like), y.to(**like), queries.to(**like), length.to(**like))


# --- what is exact ----------------------------------------------------------------------------------------------------
#: Bytes that the exact solution may take: on a CPU it would take long before it takes much.
MOST_BYTES = {"cpu": 1 << 30, "cuda": 80 << 30}


def exact(problem: Problem) -> dict[str, Any]:
    """In float64, by Cholesky's decomposition: the loss, or mean and variance; nothing where there are too many points.

    The loss is the negative logarithm of the marginal likelihood, divided by the number of points.
    """
    n, task = problem.config.n, problem.config.task
    if task == "regressor" or 3 * 8 * n * n > MOST_BYTES[problem.config.device]:
        return {}
    x, y, queries = problem.x.double(), problem.y.double(), problem.queries.double()
    length, noise = problem.length.double(), problem.noise
    if task == "ridge":
        length, noise = length.mean(), ALPHA
    factor = _kernel(x, x, length)
    factor.diagonal().add_(noise)
    torch.linalg.cholesky(factor, out=factor)
    half = torch.linalg.solve_triangular(factor, y[:, None], upper=False)
    if task == "likelihood":
        fit, logdet = half.square().sum(), 2 * factor.diagonal().log().sum()
        return {"loss": float((fit + logdet) / (2 * n) + 0.5 * math.log(2 * math.pi))}
    columns = torch.linalg.solve_triangular(factor, _kernel(x, queries, length), upper=False)
    return {"mean": (columns.T @ half)[:, 0], "variance": 1 - columns.square().sum(0)}


def _kernel(a: Tensor, b: Tensor, length: Tensor) -> Tensor:
    """The RBF kernel, by blocks of rows."""
    out = a.new_empty(len(a), len(b))
    for start in range(0, len(a), 4096):
        rows = slice(start, start + 4096)
        torch.exp(torch.cdist(a[rows] / length, b / length).square_().mul_(-0.5), out=out[rows])
    return out


def accuracy(problem: Problem, found: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """What of a result goes into the table: numbers as they are, vectors as their relative errors.

    Of the variance, which would hide an error where it is large, the error is of the standard deviation, at worst and
    relative to the deviation itself.
    """
    out: dict[str, Any] = {k: v for k, v in found.items() if isinstance(v, (int, float, str))}
    if "loss" in reference:
        out["loss_error"] = abs(found["loss"] - reference["loss"])
    if "mean" in reference:
        want, got = reference["mean"], found["mean"].double().to(reference["mean"].device)
        out["mean_error"] = float((got - want).norm() / want.norm())
    if "mean" in reference and "variance" in found:
        ratio = (found["variance"].double().clamp(min=0) / reference["variance"]).sqrt()
        out["std_error"] = float((ratio - 1).abs().max())
    return out
