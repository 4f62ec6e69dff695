"""Cases of sums by bucket and of splats, and what they are in float64, by NumPy's ``add.at`` and plain loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from kernops.geometric.kernels import Scale, choose

Tensor = torch.Tensor
Array = np.ndarray

BACKENDS = ("tiled", "cpu", "cuda")
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
VARIANTS = ("cumsum", "atomic", "histogram")


# --- where a test runs ------------------------------------------------------------------------------------------------
class At(NamedTuple):
    """A back end and the device that it is tested on."""

    backend: str
    device: torch.device

    @property
    def kernels(self) -> Any:
        return choose(self.backend, self.device)

    def tensor(self, array: Any, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(np.asarray(array)).to(self.device, dtype)


def at(backend: str, device: str | None = None) -> At:
    """The place; skips the test where the back end cannot run, with its own reason."""
    where = torch.device(device or ("cuda:0" if backend == "cuda" else "cpu"))
    if where.type == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    try:
        choose(backend, where)
    except RuntimeError as error:
        pytest.skip(str(error))
    return At(backend, where)


# --- closeness --------------------------------------------------------------------------------------------------------
def close(got: Tensor, want: Array, terms: Array | float, dtype: torch.dtype | None = None, factor: float = 32) -> None:
    """``got`` is ``want`` up to the rounding of its dtype and of sums in float32 (float64) of ``terms``.

    Args:
        terms: what the sums of the terms' absolute values are.
        dtype: in which the terms are rounded, if it is not the accumulator.
        factor: how many roundings of ``terms`` to allow.
    """
    assert tuple(got.shape) == np.shape(want)
    info = torch.finfo(got.dtype)
    wide = torch.finfo(dtype or (torch.float64 if got.dtype == torch.float64 else torch.float32))
    allowed = info.eps * np.abs(want) + factor * wide.eps * terms + info.tiny * info.eps
    error = np.abs(got.detach().double().cpu().numpy() - want)
    assert not np.isnan(error).any()
    worst = (error - allowed).max(initial=-1.0)
    assert worst <= 0, f"{worst + 0:g} beyond what is allowed; the largest error is {error.max():g}"


# --- labels -----------------------------------------------------------------------------------------------------------
LABELS: dict[str, Callable[[np.random.Generator], tuple[Array, int]]] = {
    "few": lambda rng: (rng.integers(-1, 5, 40), 5),
    "empty buckets": lambda rng: (rng.choice([-1, 3, 17, 90], 200), 100),
    "all left out": lambda rng: (np.full(33, -1), 4),
    "one item": lambda rng: (np.array([2]), 3),
    "one bucket": lambda rng: (np.zeros(77, int), 1),
    "each its own": lambda rng: (rng.permutation(300), 300),
    "sorted, with a long one": lambda rng: (np.repeat([0, 1, 2, 5], [3, 40_000, 1, 100]), 6),
    "many": lambda rng: (rng.integers(-1000, 9000, 60_000).clip(-7), 9000),
}


def labels(name: str) -> tuple[Array, int]:
    return LABELS[name](np.random.default_rng(len(name)))


def sorted_order(buckets: Array) -> Array:
    """The kept items, by bucket and in their own order in each."""
    order = np.argsort(buckets, kind="stable")
    return order[buckets[order] >= 0]


def starts_of(buckets: Array, n_buckets: int) -> Array:
    counts = np.bincount(buckets[buckets >= 0], minlength=n_buckets)
    return np.concatenate([[0], np.cumsum(counts)])


def bucket_sums(values: Array, buckets: Array, n_buckets: int) -> Array:
    out = np.zeros((n_buckets, *values.shape[1:]))
    np.add.at(out, buckets[buckets >= 0], values[buckets >= 0])
    return out


def bucket_cumsums(values: Array, buckets: Array, n_buckets: int, reverse: bool = False) -> Array:
    out, running = np.zeros(values.shape), np.zeros((n_buckets, *values.shape[1:]))
    for k in range(len(buckets))[:: -1 if reverse else 1]:
        if buckets[k] >= 0:
            running[buckets[k]] += values[k]
            out[k] = running[buckets[k]]
    return out


# --- splats -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Case:
    """Sizes of a splat, and how its cells lie: "rays" has runs of depths in one cell, as real frustums do."""

    name: str
    points: tuple[int, int, int, int, int]  # B, N, D, h, w
    grid: tuple[int, int, int]  # Z, Y, X
    channels: int
    kind: str = "rays"

    def __str__(self) -> str:
        return self.name

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (self.points[0], *self.grid)

    def cells(self) -> Array:
        rng = np.random.default_rng(math.prod(self.points) + self.channels)
        batch, cameras, depths, height, width = self.points
        each = math.prod(self.grid)
        if self.kind == "rays":
            steps = rng.random((batch, cameras, depths, height, width)) < 0.4
            walk = np.cumsum(steps, 2) + rng.integers(0, each, (batch, cameras, 1, height, width))
            cells = np.where(rng.random(walk.shape) < 0.2, -1, walk % each)
        elif self.kind == "random":
            cells = rng.integers(-each // 3, each, self.points).clip(-1)
        else:
            cells = np.full(self.points, {"none": -1, "one": each - 1}[self.kind])
        first = np.arange(batch).reshape(-1, 1, 1, 1, 1) * each
        return np.where(cells < 0, -1, cells + first).astype(np.int32)


CASES = (
    Case("batch 2, Z 4, not square", (2, 3, 5, 3, 7), (4, 9, 17), 5),
    Case("one channel", (1, 2, 6, 4, 4), (1, 8, 8), 1),
    Case("LSS-like", (1, 6, 20, 8, 11), (1, 24, 20), 64),
    Case("C = 80, random cells", (2, 1, 9, 4, 6), (1, 10, 12), 80, "random"),
    Case("C = 35", (1, 2, 4, 3, 5), (2, 5, 6), 35, "random"),
    Case("one point", (1, 1, 1, 1, 1), (1, 3, 2), 3, "one"),
    Case("nothing kept", (1, 2, 3, 4, 5), (1, 4, 4), 8, "none"),
    Case("all in one cell", (1, 2, 41, 16, 18), (1, 4, 4), 6, "one"),
)


def pixel_of(points: tuple[int, ...]) -> Array:
    """The pixel of every point, by its five indices."""
    b, n, _, r, c = np.indices(points)
    return ((b * points[1] + n) * points[3] + r) * points[4] + c


def softmax(logits: Array) -> Array:
    e = np.exp(logits - logits.max(2, keepdims=True))
    return e / e.sum(2, keepdims=True)


class Splat(NamedTuple):
    """A splat, and its gradients by depth (or logits), features and weight."""

    out: Array
    depth: Array
    feat: Array
    weight: Array


def splat(
    case: Case, cells: Array, depth: Array, feat: Array, weight: Array | None, logits: bool, grad: Array,
    magnitude: bool = False,
) -> Splat:  # fmt: skip
    """In float64. With ``magnitude``: sums of the terms' absolute values instead, to measure errors by."""
    size = np.abs if magnitude else np.asarray
    p = softmax(depth) if logits else size(depth)
    factor = np.ones(case.points) if weight is None else size(weight)
    rows, g = size(feat).reshape(-1, case.channels), size(grad).reshape(-1, case.channels)
    kept, pixel = cells >= 0, pixel_of(case.points)
    w = p * factor
    out = np.zeros((math.prod(case.shape), case.channels))
    np.add.at(out, cells[kept], w[kept][:, None] * rows[pixel[kept]])
    by_feat = np.zeros_like(rows)
    np.add.at(by_feat, pixel[kept], w[kept][:, None] * g[cells[kept]])
    by_w = np.zeros(case.points)
    by_w[kept] = (g[cells[kept]] * rows[pixel[kept]]).sum(-1)
    by_depth, by_weight = by_w * factor, by_w * p
    if logits:
        mean = (p * by_depth).sum(2, keepdims=True)
        by_depth = p * (by_depth + mean if magnitude else by_depth - mean)
    return Splat(out.reshape(*case.shape, case.channels), by_depth, by_feat.reshape(feat.shape), by_weight)


class Inputs(NamedTuple):
    """Values of a case that its dtype holds exactly, as float64 arrays."""

    depth: Array
    feat: Array
    weight: Array
    grad: Array


def inputs(case: Case, dtype: torch.dtype) -> Inputs:
    batch, cameras, _, height, width = case.points
    generator = torch.Generator().manual_seed(case.channels)
    shapes = (case.points, (batch, cameras, height, width, case.channels), case.points, (*case.shape, case.channels))
    made = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    return Inputs(*(t.double().numpy() for t in made))


def scale(place: At, case: Case, values: Inputs, weighted: bool, logits: bool, dtype: torch.dtype) -> Scale:
    """``Scale`` of mode "runs" for the inputs of a case, with the logsumexp of NumPy."""
    lse = None
    if logits:
        sums = np.log(np.exp(values.depth).sum(2)).reshape(-1)
        lse = place.tensor(sums, torch.float64 if dtype == torch.float64 else torch.float32)
    weight = place.tensor(values.weight, dtype) if weighted else None
    return Scale(
        "runs", place.tensor(values.depth, dtype), weight, lse, case.points[2], case.points[3] * case.points[4]
    )
