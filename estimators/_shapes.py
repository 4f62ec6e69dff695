"""The kernels of density estimation: one table, one row each."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..formula.graph import Node
from ..formula.ops import apply, div, mul, neg, power, sub

Radii = Callable[[np.random.RandomState, int, int], np.ndarray]


def _log_area(dim: int) -> float:
    """log of the area of the unit sphere in ``dim`` dimensions."""
    return math.log(2) + 0.5 * dim * math.log(math.pi) - math.lgamma(0.5 * dim)


def _log_volume(dim: int) -> float:
    """log of the volume of the unit ball."""
    return _log_area(dim) - math.log(dim)


def _log_cosine_moment(dim: int) -> float:
    """log of ∫₀¹ r^(dim-1) cos(πr/2) dr.

    By the cosine's series, whose terms shrink fast and hardly cancel in any dimension. (scikit-learn's recursion over
    dim holds in odd dimensions only, and cancels in high ones.)
    """
    term, terms = 1.0, []
    for k in range(0, 40, 2):
        terms.append(term / (dim + k))
        term *= -((math.pi / 2) ** 2) / ((k + 1) * (k + 2))
    return math.log(math.fsum(terms))


def _cosine_radii(rng: np.random.RandomState, n: int, dim: int) -> np.ndarray:
    """Radii of density r^(dim-1) cos(πr/2), by rejection from r^(dim-1) (1 - r): at least 2 of 3 are taken."""
    radii: list[np.ndarray] = []
    while sum(map(len, radii)) < n:
        r = rng.beta(dim, 2, size=n)
        taken = rng.uniform(size=n) * (math.pi / 2) * (1 - r) <= np.cos(math.pi / 2 * r)
        radii.append(r[taken])
    return np.concatenate(radii)[:n]


@dataclass(frozen=True)
class Shape:
    """One kernel of density estimation.

    Attributes:
        value: ``value(distance, h)``, the kernel, 1 at distance 0.
        log_mass: ``log_mass(dim)``, log of the kernel's integral for h = 1 and the Euclidean distance.
        radii: ``radii(rng, n, dim)``, distances of n samples from their centre for h = 1; ``None`` where samples are
            drawn as scikit-learn draws them, so that a seed gives the same ones.
        log: ``log(distance, h)`` for kernels that are positive everywhere: far from all data the sum of values
            underflows, and its logarithm is computed directly.
    """

    value: Callable[[Node, Node], Node]
    log_mass: Callable[[int], float]
    radii: Radii | None
    log: Callable[[Node, Node], Node] | None = None


def _gaussian_log(d: Node, h: Node) -> Node:
    square = d.args[0] if d.op == "Sqrt" else power(d, 2)
    return mul(div(-0.5, power(h, 2)), square)


def _exponential_log(d: Node, h: Node) -> Node:
    return neg(div(d, h))


def _cosine(d: Node, h: Node) -> Node:
    return apply("Where", apply("Less", d, h), apply("Cos", div(mul(math.pi / 2, d), h)), 0.0)


SHAPES: dict[str, Shape] = {
    "gaussian": Shape(lambda d, h: apply("Exp", _gaussian_log(d, h)), lambda dim: dim / 2 * math.log(2 * math.pi), None,
                      _gaussian_log),
    "tophat": Shape(lambda d, h: apply("Less", d, h), _log_volume, None),
    "epanechnikov": Shape(lambda d, h: apply("ReLU", sub(1.0, power(div(d, h), 2))),
                          lambda dim: _log_volume(dim) + math.log(2 / (dim + 2)),
                          lambda rng, n, dim: np.sqrt(rng.beta(dim / 2, 2, size=n))),
    "exponential": Shape(lambda d, h: apply("Exp", _exponential_log(d, h)),
                         lambda dim: _log_area(dim) + math.lgamma(dim),
                         lambda rng, n, dim: rng.gamma(dim, size=n), _exponential_log),
    "linear": Shape(lambda d, h: apply("ReLU", sub(1.0, div(d, h))), lambda dim: _log_volume(dim) - math.log(dim + 1),
                    lambda rng, n, dim: rng.beta(dim, 2, size=n)),
    "cosine": Shape(_cosine, lambda dim: _log_area(dim) + _log_cosine_moment(dim), _cosine_radii),
}  # fmt: skip
