"""The splat benchmark's problems: settings of published models on a real rig, the data, and what is right."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any

import torch

Tensor = torch.Tensor

#: Points that the float64 reference lifts at a time.
REFERENCE_POINTS = 1 << 18


@dataclass(frozen=True)
class Setting:
    """One row of the table of settings; the cameras are those of ``kernops.geometric.nuscenes_rig()``.

    Attributes:
        doc: one sentence, shown above the results.
        image: (H, W) of the network's input.
        scale: of the camera's image before the crop; None: the whole image is squeezed into the input.
        top: rows that are cut off at the top after scaling.
        features: (h, w) of the feature map.
        depth: first depth, end (not included) and step, in metres.
        channels: C.
        xbound, ybound, zbound: lower bound, upper bound and step of the grid, in metres.
    """

    doc: str
    image: tuple[int, int]
    scale: float | None
    top: int
    features: tuple[int, int]
    depth: tuple[float, float, float]
    channels: int
    xbound: tuple[float, float, float] = (-51.2, 51.2, 0.8)
    ybound: tuple[float, float, float] = (-51.2, 51.2, 0.8)
    zbound: tuple[float, float, float] = (-5.0, 3.0, 8.0)


_BEVDET: dict[str, Any] = {"image": (256, 704), "scale": 0.44, "top": 140, "features": (16, 44), "channels": 80}

SETTINGS: dict[str, Setting] = {
    "lss100": Setting(
        "six cameras, 1024×1024, features 64×64, D=100, C=64, 128×128 cells",
        image=(1024, 1024), scale=None, top=0, features=(64, 64), depth=(1.0, 51.0, 0.5), channels=64,
    ),
    "bevdet59": Setting(
        "six cameras, 704×256, features 16×44, D=59, C=80, 128×128 cells", depth=(1.0, 60.0, 1.0), **_BEVDET
    ),
    "bevdet118": Setting(
        "six cameras, 704×256, features 16×44, D=118, C=80, 128×128 cells", depth=(1.0, 60.0, 0.5), **_BEVDET
    ),
}  # fmt: skip


@dataclass(frozen=True)
class SplatConfig:
    """What is measured; all of it goes into the JSON file.

    Attributes:
        setting: a key of ``SETTINGS``.
        dtype: ``"float16"``, ``"bfloat16"``, ``"float32"`` or ``"float64"``, of depth and features.
        backward: whether gradients are computed too.
        device: ``"cpu"`` or ``"cuda"``.
        backend: back end of kernops.
        case: the same for all; tells these configurations from those of ``problem.Config``.
    """

    setting: str
    dtype: str = "float32"
    backward: bool = False
    device: str = "cpu"
    backend: str = "auto"
    case: str = "splat"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> SplatConfig:
        known = {f.name for f in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})


@dataclass(frozen=True)
class Geometry:
    """Where points fall: ``cells`` int32 (B, N, D, h, w) in a grid of ``shape`` (B, Z, Y, X), -1 for those that fall
    outside, and what kernops makes them from (the peers need the cells alone)."""

    cells: Tensor
    shape: tuple[int, int, int, int]
    rig: Any = None
    frustum: Any = None
    grid: Any = None


@dataclass(frozen=True)
class Problem:
    """One problem, the same for every contender.

    Attributes:
        depth: probabilities, (B, N, D, h, w).
        feat: features, (B, N, h, w, C), channels last.
        grad: the cotangent of the result, one row a cell, (B·Z·Y·X, C).
    """

    config: SplatConfig
    geometry: Geometry
    depth: Tensor
    feat: Tensor
    grad: Tensor

    @property
    def n_cells(self) -> int:
        b, z, y, x = self.geometry.shape
        return b * z * y * x

    @property
    def channels(self) -> int:
        return self.feat.shape[-1]

    @cached_property
    def ranks(self) -> Ranks:
        return make_ranks(self.geometry.cells)

    def sizes(self) -> dict[str, int]:
        """Numbers that a table of results should carry."""
        starts = self.ranks.starts
        return {
            "points": self.geometry.cells.numel(),
            "kept": len(self.ranks.cells),
            "cells": len(starts),
            "longest": int(self.ranks.lengths.max()) if len(starts) else 0,
            "frustum_bytes": self.geometry.cells.numel() * self.channels * self.feat.element_size(),
        }


@dataclass(frozen=True)
class Ranks:
    """The kept points sorted by cell, as the public implementations prepare them once for each calibration.

    Attributes:
        points: int64 (kept,), numbers of the points in ``depth.flatten()``.
        pixels: int64 (kept,), their rows in the features seen as (B·N·h·w, C).
        cells: int64 (kept,), their cells; ascending.
        starts, lengths: int32 (intervals,), the stretch of each cell that is not empty.
    """

    points: Tensor
    pixels: Tensor
    cells: Tensor
    starts: Tensor
    lengths: Tensor

    @cached_property
    def targets(self) -> Tensor:
        """int32 (intervals,): the cell of each interval."""
        return self.cells[self.starts.long()].int()


def make_ranks(cells: Tensor) -> Ranks:
    """Sort the points of ``cells`` (B, N, D, h, w), those with -1 left out; points of a cell keep their order."""
    flat = cells.reshape(-1).long()
    points = (flat >= 0).nonzero()[:, 0]
    sorted_cells, order = flat[points].sort(stable=True)
    points = points[order]
    depths, rows = cells.shape[2], cells.shape[3] * cells.shape[4]
    pixels = points // (depths * rows) * rows + points % rows
    lengths = sorted_cells.unique_consecutive(return_counts=True)[1]
    starts = lengths.cumsum(0) - lengths
    return Ranks(points, pixels, sorted_cells, starts.int(), lengths.int())


def make_geometry(setting: Setting, device: str, backend: str = "auto") -> Geometry:
    """The rig, frustum and grid of a setting, and the cells that kernops finds for them."""
    from kernops.geometric import BEVGrid, SplatPlan, frustum, nuscenes_rig

    cameras = nuscenes_rig()
    if setting.scale is None:
        rig = cameras.resized(setting.image).to(device)
    else:
        rig = cameras.resized(setting.image, scale=setting.scale, crop=(setting.top, 0)).to(device)
    points = frustum(setting.image, setting.features, setting.depth)
    grid = BEVGrid(setting.xbound, setting.ybound, setting.zbound)
    plan = SplatPlan(rig, points, grid, variant="atomic", backend=backend, device=device)
    return Geometry(plan.cells, plan.shape, rig, points, grid)


def make_problem(config: SplatConfig, geometry: Geometry | None = None, seed: int = 0) -> Problem:
    """Depth is the softmax of normal logits, features and cotangent are normal; the same in every process."""
    setting = SETTINGS[config.setting]
    geometry = geometry or make_geometry(setting, config.device, config.backend)
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, config.dtype)

    def put(numbers: Tensor) -> Tensor:
        return numbers.to(dtype).to(config.device)

    b, n, d, h, w = geometry.cells.shape
    logits = torch.randn(b, n, d, h, w, generator=generator)
    feat = torch.randn(b, n, h, w, setting.channels, generator=generator)
    z, y, x = geometry.shape[1:]
    grad = torch.randn(b * z * y * x, setting.channels, generator=generator)
    return Problem(config, geometry, put(logits.double().softmax(2)), put(feat), put(grad))


def reference(problem: Problem) -> dict[str, Tensor]:
    """Value and, where asked for, gradients by depth and features, in float64 with the inputs as given."""
    ranks, feat, depth = problem.ranks, problem.feat.double().flatten(0, 3), problem.depth.double().flatten()
    grad = problem.grad.double()
    found = {"value": grad.new_zeros(problem.n_cells, problem.channels)}
    if problem.config.backward:
        found.update(depth=torch.zeros_like(depth), feat=torch.zeros_like(feat))
    for first in range(0, len(ranks.cells), REFERENCE_POINTS):
        part = slice(first, first + REFERENCE_POINTS)
        points, pixels, cells = ranks.points[part], ranks.pixels[part], ranks.cells[part]
        rows, weights = feat[pixels], depth[points, None]
        found["value"].index_add_(0, cells, weights * rows)
        if problem.config.backward:
            found["depth"][points] = (rows * grad[cells]).sum(1)
            found["feat"].index_add_(0, pixels, weights * grad[cells])
    return found


def errors(problem: Problem, got: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """What a contender's results lack.

    ``error``: relative L2 of the value; ``error_max``: the largest, over cells, of the largest difference in a cell by
    the largest exact component there (infinite where a cell that must be zero is not); ``error_NAME``: relative L2 of
    the gradient by NAME.
    """
    value, want = rows_of(got["value"], problem), exact["value"]
    difference = (value.double() - want).abs().amax(1)
    size = want.abs().amax(1)
    by_cell = torch.where(difference == 0, 0.0, difference / size)
    found = {"error": relative_l2(value, want), "error_max": float(by_cell.max())}
    for name in got.keys() - {"value"}:
        if name == "points":  # the gradient of a lifted point is that of its cell
            found["error_points"] = relative_l2(got[name], problem.grad[problem.ranks.cells])
        else:
            found[f"error_{name}"] = relative_l2(got[name].reshape(exact[name].shape), exact[name])
    return found


def relative_l2(got: Tensor, want: Tensor) -> float:
    got, want = got.detach().double(), want.double()
    return float((got - want).norm() / want.norm())


def rows_of(value: Tensor, problem: Problem) -> Tensor:
    """A result as (B·Z·Y·X, C): as it is, or from kernops' (B, C, Z, Y, X)."""
    if value.ndim == 5:
        value = value.permute(0, 2, 3, 4, 1)
    return value.detach().reshape(problem.n_cells, problem.channels)
