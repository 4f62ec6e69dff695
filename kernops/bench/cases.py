"""The table of cases: what is computed, written once for symbolic libraries and once for blocks of rows in torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .problem import REFERENCE_NUMBERS, Config, Data, Tensor

Squares = Callable[[Tensor, Tensor], Tensor]
#: ``(formula, aliases, reduction, further arguments)`` of a Genred.
Genred = tuple[str, tuple[str, ...], str, dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        doc: one sentence, shown above the table of results.
        lazy: ``lazy(squared distance as a LazyTensor, config, data, options)``, the result.
        genred: the same as a formula string.
        uses_b: whether the formula has right-hand sides.
        block: ``block(squared distances (rows, n), config, b)``, the same in torch for a block of rows.
        error: ``error(result rows, reference data, config)``, by name.
        differentiable: whether ``--backward`` makes sense.
        estimator: ``estimator(library, algorithm, config, data)``, the call with an estimator of ``kernops.estimators``
            or of ``sklearn.neighbors``; None where there is none.
    """

    name: str
    doc: str
    lazy: Callable[[Any, Config, Data, dict[str, Any]], Tensor]
    genred: Callable[[Config], Genred]
    block: Callable[[Tensor, Config, Tensor], Tensor]
    error: Callable[[list[Tensor], Data, Config], dict[str, float]]
    uses_b: bool = False
    differentiable: bool = True
    estimator: Callable[[Any, str, Config, Data], Callable[[], Tensor]] | None = None


# Squared distances between blocks of points, as one would write them in torch. "matmul" loses digits to cancellation,
# and the table of results shows how many.
def _direct(x: Tensor, y: Tensor) -> Tensor:
    return ((x[:, None, :] - y[None, :, :]) ** 2).sum(-1)


def _cdist(x: Tensor, y: Tensor) -> Tensor:
    return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist") ** 2


def _matmul(x: Tensor, y: Tensor) -> Tensor:
    norms = (x * x).sum(1)[:, None] + (y * y).sum(1)[None, :]
    return torch.addmm(norms, x, y.T, alpha=-2)


SQUARES: dict[str, Squares] = {"matmul": _matmul, "cdist": _cdist, "direct": _direct}


def evaluate_rows(case: Case, squares: Squares, config: Config, data: Data, rows: int) -> list[Tensor]:
    """The case in torch, ``rows`` rows at a time: the value, then the gradients asked for.

    Each block is differentiated before the next one is computed, so that memory stays that of a block.
    """
    values: list[Tensor] = []
    x_gradients: list[Tensor] = []
    others = [name for name in config.backward if name != "x"]
    sums = [torch.zeros_like(t) for t in data.wanted("".join(others))]
    for start in range(0, data.x.shape[0], rows):
        x = data.x[start : start + rows]
        if "x" in config.backward:
            x = x.detach().requires_grad_()
        value = case.block(squares(x, data.y), config, data.b)
        values.append(value.detach())
        if config.backward:
            wanted = ([x] if "x" in config.backward else []) + data.wanted("".join(others))
            found = list(torch.autograd.grad(value, wanted, data.g[start : start + rows]))
            if "x" in config.backward:
                x_gradients.append(found.pop(0))
            for total, part in zip(sums, found):
                total += part
    gradients = dict(zip(others, sums))
    if x_gradients:
        gradients["x"] = torch.cat(x_gradients)
    return [torch.cat(values), *(gradients[name] for name in config.backward)]


def _reference(case: Case, config: Config, data: Data) -> list[Tensor]:
    """The case in float64 with direct differences."""
    rows = max(1, REFERENCE_NUMBERS // (data.y.shape[0] * config.d))
    return evaluate_rows(case, _direct, config, data, rows)


def _relative_l2(got: list[Tensor], data: Data, config: Config) -> dict[str, float]:
    """Relative L2 error of the value, and of the gradient by x (that of y and b would need all rows)."""
    by_x = Config.from_json({**config.to_json(), "backward": "x" if "x" in config.backward else ""})
    want = _reference(CASES[config.case], by_x, data)
    names = ["error", "error_grad_x"]
    got = [got[0]] + ([got[1 + config.backward.index("x")]] if by_x.backward else [])
    return {name: float((a.double() - b).norm() / b.norm()) for name, a, b in zip(names, got, want)}


def _recall(got: list[Tensor], data: Data, config: Config) -> dict[str, float]:
    """Share of the returned columns that are among the k nearest in float64; ties count, repeated columns do not."""
    index = got[0].long()
    hits = 0.0
    rows = max(1, REFERENCE_NUMBERS // (data.y.shape[0] * config.d))
    for start in range(0, len(index), rows):
        block = index[start : start + rows]
        squares = _direct(data.x[start : start + rows], data.y)
        bound = squares.kthvalue(config.k, dim=1, keepdim=True).values
        good = squares.gather(1, block.clamp_min(0)) <= bound
        order = block.sort(1).values
        repeated = (order[:, 1:] == order[:, :-1]).sum()
        hits += float((good & (block >= 0)).sum() - repeated)
    return {"recall": hits / index.numel()}


def _points(config: Config) -> tuple[str, ...]:
    return (f"X=Vi({config.d})", f"Y=Vj({config.d})")


def _density_error(got: list[Tensor], data: Data, config: Config) -> dict[str, float]:
    """Relative L2 error of the density whose logarithm is given."""
    (want,) = _reference(CASES[config.case], config, data)
    return {"error": float((got[0].double().exp() - want.exp()).norm() / want.exp().norm())}


#: Width of the kernel of density estimation.
BANDWIDTH = 0.2
_SCALE = -0.5 / BANDWIDTH**2


def _log_mass(config: Config) -> float:
    """log of what a sum of kernels is divided by to be a density."""
    return math.log(config.n) + config.d * math.log(math.sqrt(2 * math.pi) * BANDWIDTH)


def _log_kernel(squares: Any, config: Config) -> Any:
    return _SCALE * squares - _log_mass(config)


def _fit_neighbours(library: Any, algorithm: str, config: Config, data: Data) -> Callable[[], Tensor]:
    x, y = data.x.numpy(), data.y.numpy()

    def call() -> Tensor:
        model = library.NearestNeighbors(n_neighbors=config.k, algorithm=algorithm, n_jobs=-1).fit(y)
        return torch.from_numpy(model.kneighbors(x, return_distance=False))

    return call


def _fit_density(library: Any, algorithm: str, config: Config, data: Data) -> Callable[[], Tensor]:
    x, y = data.x.numpy(), data.y.numpy()
    algorithm = "auto" if algorithm == "brute" else algorithm  # scikit-learn's has trees only

    def call() -> Tensor:
        model = library.KernelDensity(bandwidth=BANDWIDTH, algorithm=algorithm, rtol=config.rtol).fit(y)
        return torch.from_numpy(model.score_samples(x)).unsqueeze(1)

    return call


def _weighted(name: str, doc: str, lazy: Callable[[Any], Any], text: str, block: Callable[[Tensor], Tensor]) -> Case:
    """A sum over j of a function of the squared distance times b_j, given three times: for a ``LazyTensor`` of squared
    distances, as a formula with ``D2`` for them, for a torch tensor of them."""
    return Case(
        name,
        f"a_i = Σ_j {doc} b_j",
        lazy=lambda squares, config, data, options: lazy(squares).__matmul__(data.b, **options),
        genred=lambda config: (
            f"({text.replace('D2', 'SqDist(X,Y)')})*B", (*_points(config), f"B=Vj({config.rhs})"), "Sum", {}
        ),
        block=lambda squares, config, b: block(squares) @ b,
        error=_relative_l2,
        uses_b=True,
    )  # fmt: skip


def _softmax(squares: Any, config: Config, data: Data, options: dict[str, Any]) -> Tensor:
    return (-squares).sumsoftmaxweight(type(squares)(data.b[None, :, :]), dim=1, **options)  # type: ignore[no-any-return]


def _matern32(r: Any) -> Any:
    return (1 + r) * (-r).exp()


def _log1p(squares: Any) -> Any:
    return squares.log1p() if hasattr(squares, "log1p") else (1 + squares).log()  # PyKeOps has none


ROOT_3 = math.sqrt(3)

CASES: dict[str, Case] = {
    case.name: case
    for case in (
        _weighted("gaussian", "exp(-|x_i - y_j|²)", lambda s: (-s).exp(), "Exp(-D2)", lambda s: s.neg().exp()),
        _weighted("laplacian", "exp(-|x_i - y_j|)", lambda s: (-s.sqrt()).exp(), "Exp(-Sqrt(D2))",
                  lambda s: s.clamp_min(0).sqrt().neg().exp()),
        _weighted("matern32", "(1 + √3 r) exp(-√3 r), r = |x_i - y_j|,",
                  lambda s: _matern32(ROOT_3 * s.sqrt()),
                  "(IntCst(1) + Sqrt(IntCst(3)*D2))*Exp(-Sqrt(IntCst(3)*D2))",
                  lambda s: _matern32(ROOT_3 * s.clamp_min(0).sqrt())),
        _weighted("user", "|1 - log(1 + |x_i - y_j|²)|", lambda s: (1 - _log1p(s)).abs(),
                  "Abs(IntCst(1) - Log(IntCst(1) + D2))", lambda s: (1 - s.log1p()).abs()),
        Case(
            "logsumexp",
            "a_i = log Σ_j exp(-|x_i - y_j|²)",
            lazy=lambda squares, config, data, options: (-squares).logsumexp(dim=1, **options),
            genred=lambda config: ("-SqDist(X,Y)", _points(config), "LogSumExp", {}),
            block=lambda squares, config, b: squares.neg().logsumexp(1, keepdim=True),
            error=_relative_l2,
        ),
        Case(
            "softmax",
            "a_i = Σ_j softmax_j(-|x_i - y_j|²) b_j",
            lazy=_softmax,
            genred=lambda config: ("-SqDist(X,Y)", (*_points(config), f"B=Vj({config.rhs})"), "SumSoftMaxWeight",
                                   {"formula2": "B"}),
            block=lambda squares, config, b: squares.neg().softmax(1) @ b,
            error=_relative_l2,
            uses_b=True,
        ),
        Case(
            "argkmin",
            "the k nearest y_j of every x_i",
            lazy=lambda squares, config, data, options: squares.argKmin(config.k, dim=1, **options),
            genred=lambda config: ("SqDist(X,Y)", _points(config), "ArgKMin", {"opt_arg": config.k}),
            block=lambda squares, config, b: squares.topk(config.k, dim=1, largest=False).indices,
            error=_recall,
            differentiable=False,
            estimator=_fit_neighbours,
        ),
        Case(
            "kde",
            f"log of the density at x_i, by Gaussian kernels of width {BANDWIDTH} at every y_j",
            lazy=lambda squares, config, data, options: _log_kernel(squares, config).logsumexp(dim=1, **options),
            genred=lambda config: (f"{_SCALE!r}*SqDist(X,Y) - {_log_mass(config)!r}", _points(config), "LogSumExp", {}),
            block=lambda squares, config, b: _log_kernel(squares, config).logsumexp(1, keepdim=True),
            error=_density_error,
            differentiable=False,
            estimator=_fit_density,
        ),
    )
}  # fmt: skip
