"""Exact nearest neighbours on arrays, in any metric that is one formula, without the table of distances."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

import torch

from .autograd import reduce
from .backends.tiled import evaluate
from .formula.graph import CAT_I, Node, var
from .formula.ops import add, apply, div, mul, power, sub, total
from .formula.plan import make_plan
from .kernels import Slots, ratio_or_0, unit
from .lazy.arrays import give_back, to_tensor

Finish = Callable[..., Node]


@dataclass(frozen=True)
class Metric:
    """One row of the table.

    Attributes:
        name: the name used in messages and in the documentation.
        rank: ``rank(x, y, **params)``: a formula that puts neighbours in order, the nearest smallest.
        doc: the distance in one line.
        finish: ``finish(rank, **params)``: the distance, given the value of ``rank``; ``None`` where they are the same.
            It runs on the few chosen pairs only.
        params: name -> default; ``None`` where there is none and the caller must give it.
        aliases: other names.
        static: parameters that shape the formula itself, so that each value is compiled on its own.
        dim: number of features that the metric is for, if only one is possible.
        free: whether it takes parameters of any name (a user's function).
    """

    name: str
    rank: Callable[..., Node]
    doc: str
    finish: Finish | None = None
    params: Mapping[str, float | None] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    static: tuple[str, ...] = ()
    dim: int | None = None
    free: bool = False


# --- rows -------------------------------------------------------------------------------------------------------------
def _difference(x: Node, y: Node) -> Node:
    return apply("Abs", sub(x, y))


def _minkowski(x: Node, y: Node, p: float) -> Node:
    if p == math.inf:
        return _chebyshev(x, y)
    d = _difference(x, y)
    return total(power(d, int(p)) if float(p).is_integer() else apply("Pow", d, float(p)))


def _minkowski_root(rank: Node, p: float) -> Node:
    roots: dict[float, Callable[[], Node]] = {1: lambda: rank, 2: lambda: apply("Sqrt", rank), math.inf: lambda: rank}
    return roots[p]() if p in roots else apply("Pow", rank, 1.0 / p)


def _chebyshev(x: Node, y: Node) -> Node:
    d = _difference(x, y)
    return d if d.dim == 1 else apply("Max", d)


def _centred(x: Node) -> Node:
    return sub(x, div(total(x), float(x.dim)))


def _cosine(x: Node, y: Node) -> Node:
    return sub(1.0, apply("Dot", unit(x), unit(y)))


def _half_chord(x: Node, y: Node) -> Node:
    """sin² of half the angle between two points of the sphere, given as (latitude, longitude) in radians."""
    lat_x, lon_x, lat_y, lon_y = (apply("Elem", v, params=(k,)) for v in (x, y) for k in (0, 1))
    sin2 = lambda a: power(apply("Sin", mul(0.5, a)), 2)  # noqa: E731
    return add(sin2(sub(lat_x, lat_y)), mul(mul(apply("Cos", lat_x), apply("Cos", lat_y)), sin2(sub(lon_x, lon_y))))


def _canberra(x: Node, y: Node) -> Node:
    return total(ratio_or_0(_difference(x, y), add(apply("Abs", x), apply("Abs", y))))


def _bray_curtis(x: Node, y: Node) -> Node:
    return div(total(_difference(x, y)), total(apply("Abs", add(x, y))))


def _root(rank: Node, **params: Any) -> Node:
    return apply("Sqrt", rank)


METRICS: dict[str, Metric] = {
    m.name: m
    for m in (
        Metric("euclidean", lambda x, y: apply("SqDist", x, y), "√Σ(x - y)²", _root, aliases=("l2",)),
        Metric("sqeuclidean", lambda x, y: apply("SqDist", x, y), "Σ(x - y)²"),
        Metric("manhattan", lambda x, y: total(_difference(x, y)), "Σ|x - y|", aliases=("l1", "cityblock")),
        Metric("chebyshev", _chebyshev, "max |x - y|", aliases=("linf", "infinity")),
        Metric("minkowski", _minkowski, "(Σ|x - y|^p)^(1/p)", _minkowski_root, {"p": 2.0}, static=("p",)),
        Metric("cosine", _cosine, "1 - cosine of the angle between x and y"),
        Metric("correlation", lambda x, y: _cosine(_centred(x), _centred(y)), "1 - correlation of x and y"),
        Metric("inner_product", lambda x, y: mul(-1.0, apply("Dot", x, y)),
               "x·y, where the largest is the nearest", lambda rank: mul(-1.0, rank), aliases=("ip", "dot")),
        Metric("haversine", _half_chord, "angle between two points of the sphere, (latitude, longitude) in radians",
               lambda rank: mul(2.0, apply("Asin", apply("Sqrt", rank))), dim=2),
        Metric("canberra", _canberra, "Σ|x - y| / (|x| + |y|)"),
        Metric("braycurtis", _bray_curtis, "Σ|x - y| / Σ|x + y|"),
        Metric("hamming", lambda x, y: div(total(apply("NotEqual", x, y)), float(x.dim)), "share of unequal features"),
        Metric("seuclidean", lambda x, y, V: apply("WeightedSqDist", apply("Inv", V), x, y), "√Σ(x - y)²/V", _root,
               {"V": None}),
        Metric("mahalanobis", lambda x, y, VI: apply("WeightedSqDist", VI, x, y), "√(x - y)ᵀ VI (x - y)", _root,
               {"VI": None}),
    )
}  # fmt: skip
#: Every accepted name -> canonical name.
METRIC_NAMES: dict[str, str] = {n: m.name for m in METRICS.values() for n in (m.name, *m.aliases)}


def lookup(metric: str | Callable[..., Any]) -> Metric:
    """The row of a metric's name; a function of two LazyTensors becomes a row of its own."""
    if callable(metric):
        return Metric(getattr(metric, "__name__", "metric"), metric, "a user's formula", free=True)
    if not isinstance(metric, str) or metric not in METRIC_NAMES:
        raise ValueError(f"metric must be one of {', '.join(sorted(METRIC_NAMES))}, or a callable; got {metric!r}")
    return METRICS[METRIC_NAMES[metric]]


# --- search -----------------------------------------------------------------------------------------------------------
def knn(
    X: Any,
    Y: Any,
    n_neighbors: int,
    metric: str | Callable[..., Any] = "euclidean",
    *,
    metric_params: Mapping[str, Any] | None = None,
    exclude_self: bool = False,
    backend: str = "auto",
    algorithm: str = "auto",
) -> tuple[Any, Any]:
    """The nearest rows of ``Y`` for every row of ``X``, exactly.

    Args:
        X: queries (*B, M, D), a NumPy, torch or CuPy array of floats.
        Y: points (*B, N, D) of the same kind and dtype; batch dimensions broadcast.
        n_neighbors: how many, at most N.
        metric: a name of ``METRICS``, or a function of two LazyTensors, as ``lambda x, y: (x - y).abs().sum(-1)``.
        metric_params: the metric's own parameters: ``p`` of minkowski, ``V`` of seuclidean, ``VI`` of mahalanobis.
        exclude_self: row i of ``Y`` is never a neighbour of row i of ``X`` (for ``knn(X, X, k, exclude_self=True)``).
        backend: where to compute, see :func:`kernops.backends.reduce`.
        algorithm: ``"brute"`` compares all pairs. ``"pruned"`` leaves out boxes of points that are too far away: for
            euclidean distances, squared or not, in at most 16 dimensions, on the cpu back end and, for at most 512
            neighbours, the cuda back end. ``"auto"`` prunes in at most 8 dimensions, where there are points enough and
            a sample of the queries says that it pays. The results are the same to the last bit.

    Distances of torch tensors have gradients, to any order.

    Returns:
        ``(distances, indices)``, (*B, M, n_neighbors) each, the nearest first, the lowest index first among equals. A
        row with NaN is nobody's neighbour and has none: its distances are NaN, its indices -1.

    Raises:
        ValueError: shapes, kinds, dtypes or devices do not fit, ``n_neighbors`` is not in 1 .. N, there is no such
            metric or algorithm, or it cannot be pruned.
        TypeError: something is not an array of floats or not an integer, or the metric lacks a parameter.
    """
    row = lookup(metric)
    x, y, kind = _tensors(X, Y)
    take = n_neighbors + bool(exclude_self)
    _check(row, x, y, n_neighbors, exclude_self)
    params = complete(row, metric_params or {})
    slots = Slots()
    if row.free:
        formula = slots.of_function("metric", row.rank, x, y, params)
    else:
        formula = row.rank(slots.rows(x), slots.columns(y), **slots.parameters(params, x, row.static))
    plan = make_plan("KMin", formula, k=take, algorithm=algorithm)
    values, index = reduce(plan, slots.values, x.shape[-2], y.shape[-2], backend)
    values, index = values.squeeze(-1), index.squeeze(-1)
    if exclude_self:
        values, index = _without_self(values, index)
    return give_back((finished(row, values, params, backend), index), kind)


def _tensors(X: Any, Y: Any) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Both arrays as tensors, and their kind."""
    (x, space), (y, other) = to_tensor(X, "X"), to_tensor(Y, "Y")
    if space != other:
        words = (f"a {s.kind} array of {s.dtype_name} on {s.device}" for s in (space, other))
        raise ValueError("X and Y must be of one kind and dtype, on one device; got {} and {}".format(*words))
    return x, y, space.kind


def _check(row: Metric, x: torch.Tensor, y: torch.Tensor, n_neighbors: int, exclude_self: bool) -> None:
    for name, t in (("X", x), ("Y", y)):
        if t.ndim < 2:
            raise ValueError(f"{name} must have shape (..., points, features); got {tuple(t.shape)}")
    if x.shape[-1] != y.shape[-1]:
        raise ValueError(f"X and Y must have equally many features; got {x.shape[-1]} and {y.shape[-1]}")
    if row.dim not in (None, x.shape[-1]):
        raise ValueError(f"metric {row.name!r} is for {row.dim} features; got {x.shape[-1]}")
    if not isinstance(n_neighbors, Integral) or isinstance(n_neighbors, bool):
        raise TypeError(f"n_neighbors must be an integer; got {n_neighbors!r}")
    most = y.shape[-2] - bool(exclude_self)
    if not 1 <= n_neighbors <= most:
        of = "the number of points without the point itself" if exclude_self else "the number of points"
        raise ValueError(f"n_neighbors must be in 1 .. {most}, {of}; got {n_neighbors}")


def complete(row: Metric, given: Mapping[str, Any]) -> dict[str, Any]:
    """``given`` with the metric's defaults; raises ``TypeError`` for parameters that are missing or not its own."""
    params = {**row.params, **given}
    unknown, missing = sorted(set(given) - set(row.params)), [k for k, v in params.items() if v is None]
    if unknown and not row.free:
        takes = ", ".join(row.params) or "no parameters"
        raise TypeError(f"metric {row.name!r} takes {takes}; got {', '.join(map(repr, unknown))}")
    if missing:
        raise TypeError(f"metric {row.name!r} needs metric_params with {', '.join(map(repr, missing))}")
    if "p" in row.static and not (isinstance(params["p"], Real) and float(params["p"]) > 0):
        raise ValueError(f"p must be a number > 0; got {params['p']!r}")
    return params


def distance(row: Metric, x: Node, y: Node, params: Mapping[str, Any]) -> Node:
    """The formula of the distance itself."""
    rank = row.rank(x, y, **params)
    return rank if row.finish is None else row.finish(rank, **{k: v for k, v in params.items() if k in row.static})


def finished(row: Metric, ranks: torch.Tensor, params: Mapping[str, Any], backend: str) -> torch.Tensor:
    """Distances, given the values of the metric's ``rank``."""
    if row.finish is None:
        return ranks
    static = {k: v for k, v in params.items() if k in row.static}
    formula = row.finish(var(CAT_I, 0, ranks.shape[-1]), **static)
    if ranks.requires_grad:  # by formula, because torch's derivative of the root at distance 0 is infinite
        return reduce(make_plan("Sum", formula), [ranks], ranks.shape[-2], 1, backend)[0]
    return evaluate((formula,), lambda _: ranks, ranks)[0]


def _without_self(values: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One column less: without the row's own index, or, where other rows at distance 0 came first, without the last."""
    keep = index != torch.arange(index.shape[-2], device=index.device).unsqueeze(-1)
    keep[..., -1] &= ~keep.all(-1)
    shape = (*index.shape[:-1], index.shape[-1] - 1)
    return values[keep].reshape(shape), index[keep].reshape(shape)
