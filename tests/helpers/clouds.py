"""Clouds of queries and points that try a search which leaves points out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Array = np.ndarray
Cloud = Callable[[np.random.Generator, int, int], Array]


def _clusters(rng: np.random.Generator, n: int, dim: int) -> Array:
    centres = 100 * np.random.default_rng(1).normal(size=(20, dim))
    return centres[rng.integers(20, size=n)] + 0.1 * rng.normal(size=(n, dim))


def _copies(rng: np.random.Generator, n: int, dim: int) -> Array:
    return np.random.default_rng(1).normal(size=(8, dim))[rng.integers(8, size=n)]


def _lines(rng: np.random.Generator, n: int, dim: int) -> Array:
    start, direction = np.random.default_rng(1).normal(size=(2, 10, dim))
    line = rng.integers(10, size=n)
    return start[line] + rng.normal(size=(n, 1)) * direction[line]


def _sphere(rng: np.random.Generator, n: int, dim: int) -> Array:
    points = rng.normal(size=(n, dim))
    return points / np.linalg.norm(points, axis=1, keepdims=True)


def _outliers(rng: np.random.Generator, n: int, dim: int) -> Array:
    points = rng.normal(size=(n, dim))
    points[::50] *= 10.0 ** rng.integers(1, 15, size=(len(points[::50]), 1))
    return points


def _infinite(rng: np.random.Generator, n: int, dim: int) -> Array:
    points = rng.normal(size=(n, dim))
    flat = points.reshape(-1)
    flat[::37], flat[::41], flat[::43] = np.inf, -np.inf, np.nan
    return points


def _normal(rng: np.random.Generator, n: int, dim: int) -> Array:
    return rng.normal(size=(n, dim))


#: Name -> queries, points.
CLOUDS: dict[str, tuple[Cloud, Cloud]] = {
    "normal": (_normal, _normal),
    "clusters": (_clusters, _clusters),
    "far-apart queries": (lambda *a: 1e4 * _normal(*a), _normal),
    "queries far away": (lambda *a: _normal(*a) + 1e7, _normal),  # where float32 distances tie
    "one point": (lambda rng, n, dim: np.ones((n, dim)), lambda rng, n, dim: np.ones((n, dim))),
    "copies": (_copies, _copies),
    "lines": (_lines, _lines),
    "offset": (lambda *a: _normal(*a) + 1000, lambda *a: _normal(*a) + 1000),
    "integers": (lambda rng, n, dim: rng.integers(0, 6, (n, dim)).astype(float),) * 2,
    "centre of a sphere": (lambda *a: 1e-3 * _normal(*a), _sphere),
    "outliers": (_outliers, _outliers),
    "infinite": (_infinite, _infinite),
}


def cloud(name: str, m: int, n: int, dim: int, dtype: str = "float64") -> tuple[Array, Array]:
    """``m`` queries and ``n`` points."""
    queries, points = CLOUDS[name]
    rng = np.random.default_rng(m + n + dim)
    return queries(rng, m, dim).astype(dtype), points(rng, n, dim).astype(dtype)
