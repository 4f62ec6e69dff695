"""A small splat problem, and what is right for it, point by point."""

from __future__ import annotations

import torch

from kernops.bench import splat
from kernops.bench.splat import Geometry, Problem, Setting, SplatConfig

TINY = Setting("a small one", image=(90, 160), scale=0.1, top=0, features=(3, 5), depth=(1.0, 9.0, 2.0), channels=6,
               xbound=(-8.0, 8.0, 2.0), ybound=(-6.0, 6.0, 3.0), zbound=(-4.0, 4.0, 4.0))  # fmt: skip


def small_problem(seed: int = 0, **config) -> Problem:
    """Random cells: two samples, two levels, two fifths of the points outside, cells without and with many points."""
    generator = torch.Generator().manual_seed(seed)
    b, n, d, h, w, (z, y, x) = 2, 2, 5, 3, 4, (2, 3, 5)
    cells = torch.randint(0, z * y * x, (b, n, d, h, w), generator=generator, dtype=torch.int32)
    cells = torch.where(torch.rand(cells.shape, generator=generator) < 0.3, 7, cells)
    cells += torch.arange(b, dtype=torch.int32).view(-1, 1, 1, 1, 1) * (z * y * x)
    cells[torch.rand(cells.shape, generator=generator) < 0.4] = -1
    geometry = Geometry(cells, (b, z, y, x))
    return splat.make_problem(SplatConfig("tiny", **{"dtype": "float64", **config}), geometry)


def loops(problem: Problem) -> dict[str, torch.Tensor]:
    """Value and gradients, point by point."""
    depth, feat, grad = problem.depth.double(), problem.feat.double(), problem.grad.double()
    value = torch.zeros_like(grad)
    by_depth, by_feat = torch.zeros_like(depth), torch.zeros_like(feat)
    for index in (problem.geometry.cells >= 0).nonzero().tolist():
        cell = int(problem.geometry.cells[tuple(index)])
        b, n, d, h, w = index
        value[cell] += depth[b, n, d, h, w] * feat[b, n, h, w]
        by_depth[b, n, d, h, w] = grad[cell] @ feat[b, n, h, w]
        by_feat[b, n, h, w] += depth[b, n, d, h, w] * grad[cell]
    return {"value": value, "depth": by_depth, "feat": by_feat}
