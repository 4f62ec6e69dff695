"""What falls where: counts of a plan's points, plain warnings where they look like a wrong frame, and a picture."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from .cells import arguments, in_cells, numbers, rounded

if TYPE_CHECKING:
    from .frustum import Frustum
    from .grid import BEVGrid
    from .rig import CameraRig

Tensor = torch.Tensor

#: The ways of missing the grid, in the order of a report's lines.
SIDES = ("below x", "above x", "below y", "above y", "below z", "above z", "not finite")

# From where on numbers look like a mistake. The nuScenes rig keeps half of its points on the usual grids, its cameras
# stand within 2 m of the origin and look all around, along the horizon.
_LOW_SHARE = 0.05
_NEARLY_ALL = 0.98
_FAR_CAMERA = 30.0  # metres
_SAME_WAY = math.cos(math.radians(15))
_UPRIGHT = math.cos(math.radians(30))


class Plan(Protocol):
    """What a plan must have to be reported on."""

    @property
    def cells(self) -> Tensor:
        """int32 (B, N, D, h, w): the cell of each point, negative where it is dropped."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, Z, Y, X)."""

    @property
    def rig(self) -> CameraRig | None: ...

    @property
    def frustum(self) -> Frustum | None: ...

    @property
    def grid(self) -> BEVGrid | None: ...

    @property
    def rounding(self) -> str | None: ...


@dataclass(frozen=True)
class Report:
    """Counts of a plan; ``str(report)`` is a table.

    Attributes:
        points: number of points of the frustums, B·N·D·h·w.
        kept: points that fall into a cell.
        dropped: side -> number of points outside on that side, for the names of :data:`SIDES`. A point that is outside
            on two sides counts in both. None for a plan that was made from cells.
        cameras: names of the cameras.
        kept_per_camera: B rows of N: points of the camera that fall into a cell.
        points_per_camera: D·h·w.
        cells: number of cells, B·Z·Y·X.
        empty_cells: cells without a point.
        median, p99, maximum: of the number of points in a cell, over the cells that are not empty; 0 if all are.
        current: whether the cells are those of the plan's rig as it is now; None for a plan that was made from cells.
        warnings: plain sentences where the numbers look like a mistake.
    """

    points: int
    kept: int
    dropped: dict[str, int] | None
    cameras: tuple[str, ...]
    kept_per_camera: tuple[tuple[int, ...], ...]
    points_per_camera: int
    cells: int
    empty_cells: int
    median: float
    p99: float
    maximum: int
    current: bool | None
    warnings: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        rows = [("points", f"{self.points:,}", "")]
        rows += [("kept", f"{self.kept:,}", _percent(self.kept, self.points))]
        lost = self.points - self.kept
        rows += [("dropped", f"{lost:,}", _percent(lost, self.points))]
        for side, number in (self.dropped or {}).items():
            rows += [(f"  {side}", f"{number:,}", _percent(number, self.points))]
        of_camera = len(self.kept_per_camera) * self.points_per_camera
        for name, *kept in zip(self.cameras, *self.kept_per_camera):
            rows += [(f"kept of {name}", f"{sum(kept):,}", _percent(sum(kept), of_camera))]
        rows += [("cells", f"{self.cells:,}", "")]
        rows += [("  empty", f"{self.empty_cells:,}", _percent(self.empty_cells, self.cells))]
        for name, value in (("median", self.median), ("99th percentile", self.p99), ("maximum", self.maximum)):
            rows += [(f"  points per occupied cell, {name}", f"{value:,.10g}", "")]
        widths = [max(len(row[k]) for row in rows) for k in range(3)]
        lines = [f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}".rstrip() for a, b, c in rows]
        return "\n".join(lines + [f"warning: {sentence}" for sentence in self.warnings])


def report(plan: Plan) -> Report:
    """Count what a plan keeps and drops. Waits for a GPU that the plan is on.

    Args:
        plan: a ``SplatPlan``. Sides are counted from its rig, frustum and grid, in blocks, if it has them.

    Returns:
        A :class:`Report`.

    Example:
        >>> from kernops.geometric import BEVGrid, SplatPlan, frustum, nuscenes_rig
        >>> grid = BEVGrid((-51.2, 51.2, 0.8), (-51.2, 51.2, 0.8), (-5.0, 3.0, 8.0))
        >>> rig = nuscenes_rig().resized(scale=0.44, crop=(140, 0))
        >>> report(SplatPlan(rig, frustum((256, 704), (16, 44), dbound=(1.0, 60.0, 1.0)), grid)).kept
        139087
    """
    cameras = plan.cells.shape[1]
    kept = (plan.cells >= 0).flatten(2).sum(-1).tolist()
    occupancy = _occupancy(plan).cpu().numpy()
    occupied = occupancy[occupancy > 0]
    dropped, current = _examined(plan)
    counts = Report(
        points=plan.cells.numel(),
        kept=sum(map(sum, kept)),
        dropped=dropped,
        cameras=plan.rig.names if plan.rig is not None else tuple(f"camera {n}" for n in range(cameras)),
        kept_per_camera=tuple(map(tuple, kept)),
        points_per_camera=math.prod(plan.cells.shape[2:]),
        cells=occupancy.size,
        empty_cells=occupancy.size - occupied.size,
        median=float(np.median(occupied)) if occupied.size else 0.0,
        p99=float(np.percentile(occupied, 99)) if occupied.size else 0.0,
        maximum=int(occupied.max()) if occupied.size else 0,
        current=current,
    )
    return replace(counts, warnings=tuple(sentence for check in _CHECKS for sentence in check(plan, counts)))


def plot(plan: Plan, ax: Any = None) -> Any:
    """Draw how many points fall into each cell, seen from above, and where the cameras are.

    Samples and heights are added up. Axes are in metres if the plan has a grid, else in cells.

    Args:
        plan: a ``SplatPlan``.
        ax: axes of matplotlib to draw on; None: a new figure.

    Returns:
        The axes.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib import pyplot
        from matplotlib.colors import LogNorm
    except ImportError as error:
        raise ImportError("plot needs matplotlib, which is not installed: pip install matplotlib") from error
    if ax is None:
        ax = pyplot.subplots()[1]
    seen = _occupancy(plan).sum((0, 1)).cpu().numpy()
    height, width = seen.shape
    extent = (0.0, width, 0.0, height) if plan.grid is None else (*plan.grid.xbound[:2], *plan.grid.ybound[:2])
    picture = ax.imshow(
        np.ma.masked_equal(seen, 0),  # empty cells stay blank
        origin="lower",
        extent=extent,
        norm=LogNorm(1, max(2, seen.max())),
        interpolation="nearest",
    )
    ax.figure.colorbar(picture, ax=ax, label="points in a cell")
    unit = "cells" if plan.grid is None else "m"
    ax.set(xlabel=f"x ({unit})", ylabel=f"y ({unit})", title=f"{seen.sum():,} of {plan.cells.numel():,} points kept")
    if plan.grid is not None and plan.rig is not None:
        places = plan.rig.poses()[..., 3].flatten(0, 1).cpu().numpy()
        ax.plot(places[:, 0], places[:, 1], "r^", markersize=4, label="cameras")
        ax.set(xlim=extent[:2], ylim=extent[2:])
        ax.legend(loc="upper right")
    return ax


# --- counting ---------------------------------------------------------------------------------------------------------
def _occupancy(plan: Plan) -> Tensor:
    """Number of points in each cell, (B, Z, Y, X)."""
    kept = plan.cells[plan.cells >= 0].long()
    return torch.bincount(kept, minlength=math.prod(plan.shape)).view(plan.shape)


def _examined(plan: Plan) -> tuple[dict[str, int] | None, bool | None]:
    """Points outside on each side, and whether the cells are the rig's: computed anew, a block at a time."""
    if plan.rig is None or plan.frustum is None or plan.grid is None:
        return None, None
    given = arguments(plan.rig, plan.frustum, plan.grid, plan.rounding or "floor")
    totals = torch.zeros(len(SIDES), dtype=torch.int64, device=given.u.device)
    current = True
    for b, n, depths, coordinates in in_cells(*given[:6]):
        indices = rounded(coordinates, given.trunc)
        finite = torch.stack(indices).isfinite().all(0)
        sides = [finite & out for i, count in zip(indices, given.counts) for out in (i < 0, i >= count)]
        totals += torch.stack([side.sum() for side in (*sides, ~finite)])
        cells = plan.cells[b, n, depths]
        current = current and torch.equal(numbers(b, indices, given.counts).to(cells.device), cells)
    return dict(zip(SIDES, totals.tolist())), current


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else ""


# --- warnings: each check gives the sentences that it has to say ------------------------------------------------------
def _few_kept(plan: Plan, counts: Report) -> Iterator[str]:
    if not counts.points:
        return
    if not counts.kept:
        yield f"All {counts.points:,} points are dropped: a splat gives zeros everywhere."
    elif counts.kept < _LOW_SHARE * counts.points:
        share = f"Only {100 * counts.kept / counts.points:.2g} % of the points are kept"
        yield f"{share}: do the grid and the poses use one frame and one unit (metres)?"


def _one_side(plan: Plan, counts: Report) -> Iterator[str]:
    for side, number in (counts.dropped or {}).items():
        if not number or number < _NEARLY_ALL * counts.points:
            continue
        share = "All" if number == counts.points else f"{100 * number / counts.points:.0f} % of the"
        if side == "not finite":
            yield f"{share} points are not finite: are there NaN or infinite entries in the calibration?"
            continue
        where, axis = side.split()
        lower, upper, _ = getattr(plan.grid, f"{axis}bound")
        place = f"{where} the {axis} range [{lower:g}, {upper:g})"
        yield f"{share} points lie {place}: are the poses sensor-to-ego, in metres?"


def _one_cell(plan: Plan, counts: Report) -> Iterator[str]:
    if counts.kept > 1 and counts.cells > 1 and counts.maximum == counts.kept:
        yield f"All {counts.kept:,} kept points fall into one cell: are the grid, the depths and the poses in one unit?"


def _missing_cameras(plan: Plan, counts: Report) -> Iterator[str]:
    yield from _over_samples(
        [
            [f"Not one point of {name} is kept" for name, kept in zip(counts.cameras, row) if counts.kept and not kept]
            for row in counts.kept_per_camera
        ],
        "is its pose in the frame of the others?",
    )


def _changed(plan: Plan, counts: Report) -> Iterator[str]:
    if counts.current is False:
        yield "The cells are not those of the plan's rig as it is now: plan.refresh(rig) brings them up to date."


def _far(plan: Plan, counts: Report) -> Iterator[str]:
    if plan.rig is None:
        return
    distances = torch.linalg.vector_norm(plan.rig.poses()[..., 3], dim=-1).tolist()
    yield from _over_samples(
        [
            [
                f"{n} stands {r:.4g} m from the ego frame's origin"
                for n, r in zip(counts.cameras, row)
                if r > _FAR_CAMERA
            ]
            for row in distances
        ],
        "is its pose sensor-to-ego (and not to the world), in metres?",
    )


def _directions(plan: Plan, counts: Report) -> Iterator[str]:
    if plan.rig is None:
        return
    axes = torch.nn.functional.normalize(plan.rig.poses()[..., 2], dim=-1)
    mean = torch.nn.functional.normalize(axes.mean(1, keepdim=True), dim=-1)
    one_way = ((axes * mean).sum(-1) > _SAME_WAY).all(1).tolist()
    yield from _over_samples(
        [
            [f"All {len(counts.cameras)} cameras look one way"] * (found and len(counts.cameras) > 2)
            for found in one_way
        ],
        "are the poses sensor-to-ego, and not ego-to-sensor?",
    )
    upright = (axes[..., 2].abs() > _UPRIGHT).all(1).tolist()
    yield from _over_samples(
        [["All cameras look straight up or down"] * found for found in upright],
        "do the poses turn the camera frame (x right, y down, z forward) into the ego frame (z up)?",
    )


def _twice(plan: Plan, counts: Report) -> Iterator[str]:
    if plan.rig is None:
        return
    names, found = counts.cameras, []
    for poses in plan.rig.poses().flatten(2).tolist():
        first = [poses.index(pose) for pose in poses]
        found.append([f"{names[m]} and {names[n]} have the same pose" for n, m in enumerate(first) if m < n])
    yield from _over_samples(found, "is one camera given twice?")


def _principal_points(plan: Plan, counts: Report) -> Iterator[str]:
    if plan.rig is None:
        return
    height, width = plan.rig.image_size
    found: list[list[str]] = []
    for row in plan.rig.pixel_matrix()[..., :2, 2].tolist():  # the image of the optical axis (0, 0, 1)
        found.append([])
        for name, (u, v) in zip(counts.cameras, row):
            if not (0 <= u <= width and 0 <= v <= height):
                place = f"at column {u:.0f}, row {v:.0f}, outside {height} x {width} pixels"
                found[-1].append(f"The optical axis of {name} meets its image {place}")
    yield from _over_samples(
        found, "are the intrinsics of another image size, or is a resize or crop missing in post_rots and post_trans?"
    )


def _over_samples(found: list[list[str]], question: str) -> Iterator[str]:
    """Each sentence once, with the samples that it holds for unless it holds for all."""
    for sentence in dict.fromkeys(s for of_sample in found for s in of_sample):
        samples = [str(b) for b, of_sample in enumerate(found) if sentence in of_sample]
        where = "" if len(samples) == len(found) else f" in sample {', '.join(samples)}"
        yield f"{sentence}{where}: {question}"


_CHECKS: tuple[Callable[[Plan, Report], Iterator[str]], ...] = (
    *(_few_kept, _one_side, _one_cell, _missing_cameras),
    *(_changed, _far, _directions, _twice, _principal_points),
)
