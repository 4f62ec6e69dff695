"""The plan of a splat: which point goes to which cell, and in which order the sums are formed."""

from __future__ import annotations

import copy
import math
import operator
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from .arguments import VARIANTS
from .buckets import check_integer, finished, moved
from .cells import arguments, truncates
from .kernels import Level, choose
from .levels import FIELDS, MOST, Shape, flatten, histogram, levels_of, points_in_order, runs, split, tiles, unflatten

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .diagnostics import Report
    from .frustum import Frustum
    from .grid import BEVGrid
    from .rig import CameraRig

Tensor = torch.Tensor


def choose_variant(cached: bool) -> str:
    """The variant that ``"auto"`` stands for.

    On an H200 a cached ``"cumsum"`` plan was the fastest or within 5 % of it from 7,000 to 2.5 million points and from
    1,000 to 40,000 cells; bucketing takes several times as long as a splat, so that ``"atomic"``, which does without,
    is twice as fast where it comes with every call. On a CPU it is the same. Sizes do not change that, so they are not
    asked for. Only with some 2,000 points a cell ``"histogram"`` was twice as fast on the GPU as both; but its plans
    cannot be refreshed in a CUDA graph, so it has to be asked for.

    Args:
        cached: whether the plan is used many times.

    Returns:
        ``"cumsum"``, or ``"atomic"`` for a plan that is used once.

    Example:
        >>> choose_variant(True), choose_variant(False)
        ('cumsum', 'atomic')
    """
    return "cumsum" if cached else "atomic"


class SplatPlan:
    """Where the points of all cameras go: made once for a calibration, used by every :func:`splat`.

    Variants are ways to the same sums:

    * ``"cumsum"``: points sorted by cell, each cell summed at once. Deterministic: the same call gives the same bits.
    * ``"atomic"``: nothing is sorted; every point adds to its cell. For geometry that changes with every call. On a GPU
      the order of the additions, and so the last bits, may differ from call to call.
    * ``"histogram"``: each column of each image sums what it has for the cells it sees, then cells add their columns.
      Deterministic.
    * ``"auto"``: see :func:`choose_variant`.

    Making a plan waits for a GPU; using and refreshing it does not (but see :meth:`refresh`). It can be pickled.

    Args:
        rig: the cameras.
        frustum: what the network samples; for images of the rig's size.
        grid: the cells.
        variant: ``"auto"``, ``"cumsum"``, ``"atomic"`` or ``"histogram"``.
        rounding: ``"floor"``, or ``"trunc"`` for models trained with implementations that round toward zero.
        backend: ``"auto"``, ``"cuda"``, ``"cpu"`` or ``"tiled"``.
        device: where to put the plan; None: where the rig is.
        cached: whether the plan will be used more than once or twice; ``variant="auto"`` looks at it.

    Attributes:
        cells: int32 (B, N, D, h, w): ((b·Z + z)·Y + y)·X + x of each point, -1 where it is dropped.
        shape: (B, Z, Y, X).
        variant: what ``"auto"`` became.
        backend: as it was given.
        rig, frustum, grid, rounding: as they were given; None in a plan that was made from cells.

    Raises:
        ValueError: an unknown variant or rounding, a frustum for other images than the rig's, or more than 2^31 - 2^13
            points or cells.
        TypeError: ``rig``, ``frustum`` or ``grid`` is something else.
        RuntimeError: the back end that was asked for cannot run here.

    Example:
        >>> from kernops.geometric import BEVGrid, SplatPlan, frustum, nuscenes_rig
        >>> rig = nuscenes_rig().resized(scale=0.44, crop=(140, 0))
        >>> grid = BEVGrid((-51.2, 51.2, 0.8), (-51.2, 51.2, 0.8), (-5.0, 3.0, 8.0))
        >>> plan = SplatPlan(rig, frustum((256, 704), (16, 44), dbound=(1.0, 60.0, 1.0)), grid)
        >>> plan.shape, plan.n_points, plan.n_kept
        ((1, 1, 128, 128), 249216, 139087)
    """

    def __init__(
        self,
        rig: CameraRig,
        frustum: Frustum,
        grid: BEVGrid,
        *,
        variant: str = "auto",
        rounding: str = "floor",
        backend: str = "auto",
        device: torch.device | str | None = None,
        cached: bool = True,
    ) -> None:
        truncates(rounding)
        _check_kinds(rig, frustum, grid)
        where = torch.empty(0, device=rig.device if device is None else device).device
        batch, cameras = rig.shape
        _check_points((batch, cameras, *frustum.shape))
        _check_grid((batch, *grid.shape))
        self.rig: CameraRig | None = rig
        self.frustum: Frustum | None = frustum.to(_with_float64(where))
        self.grid: BEVGrid | None = grid
        self.rounding: str | None = rounding
        kernels = choose(backend, where)
        cells = self._cells_of(rig, kernels, where)
        self._seen: CameraRig | str | None = _fingerprint(rig)
        self._make(kernels, cells, (batch, *grid.shape), variant, backend, cached)

    @classmethod
    def from_cells(
        cls, cells: Tensor, shape: Sequence[int], *, variant: str = "auto", backend: str = "auto", cached: bool = True
    ) -> SplatPlan:
        """A plan for points whose cells you have computed.

        Args:
            cells: integers (B, N, D, h, w): ((b·Z + z)·Y + y)·X + x of each point, negative where it is dropped.
            shape: (B, Z, Y, X).
            variant, backend, cached: as for a plan from a rig.

        Raises:
            TypeError: ``cells`` is not an integer tensor, or ``shape`` is not four integers.
            ValueError: a cell is not one of its own sample's, shapes disagree, or there are 2^31 points or cells, or
                more.

        Example:
            >>> import torch
            >>> plan = SplatPlan.from_cells(torch.tensor([[3, -1], [3, 0]]).reshape(1, 1, 2, 1, 2), (1, 1, 2, 2))
            >>> plan.n_points, plan.n_kept
            (4, 3)
        """
        size = _shape4(shape)
        check_integer("cells", cells)
        if cells.ndim != 5 or cells.shape[0] != size[0]:
            raise ValueError(
                f"cells must have shape (B, N, D, h, w) with the B = {size[0]} of shape; got {tuple(cells.shape)}"
            )
        _check_points(tuple(cells.shape))
        _check_grid(size)
        _check_cells(cells, size)
        plan = cls.__new__(cls)
        plan.rig = plan.frustum = plan.grid = plan.rounding = plan._seen = None
        own = torch.where(cells < 0, -1, cells.long()).to(torch.int32).contiguous()
        plan._make(choose(backend, cells.device), own, size, variant, backend, cached)
        return plan

    def _make(self, kernels: ModuleType, cells: Tensor, shape: Shape, variant: str, backend: str, cached: bool) -> None:
        n_cells = math.prod(shape)
        if variant == "auto":
            variant = choose_variant(cached)
        if variant not in VARIANTS:
            raise ValueError(f"variant must be 'auto', {', '.join(map(repr, VARIANTS))}; got {variant!r}")
        self.cells, self.shape, self.variant, self.backend = cells, shape, variant, backend
        self._points: list[Tensor] | None = None
        self._order: list[Tensor] = []  # the bucket of each cell, and the cell of each bucket
        self._flat: list[Tensor] = []
        if variant != "atomic" and cells.numel() and n_cells:
            self._order = list(tiles(shape, cells.device))
            if variant == "histogram":
                levels: tuple[Level, ...] = histogram(kernels, cells, n_cells, self._order, None)
            else:
                level = runs(kernels, cells, n_cells, self._order)
                levels = levels_of(level, int(level.starts.diff().max()))
            self._flat = flatten(kernels, levels)
        finished(self)

    def _cells_of(self, rig: CameraRig, kernels: ModuleType, device: torch.device) -> Tensor:
        assert self.frustum is not None and self.grid is not None and self.rounding is not None
        where = _with_float64(device)
        given = arguments(rig, self.frustum, self.grid, self.rounding, where)
        found: Tensor = (kernels if where == device else choose("tiled", where)).frustum_cells(*given)
        return found.to(device)

    # --- what it is ---------------------------------------------------------------------------------------------------
    @property
    def device(self) -> torch.device:
        """Where the plan is."""
        return self.cells.device

    @property
    def levels(self) -> tuple[Level, ...]:
        """The passes that form the sums; none for "atomic"."""
        return unflatten(self._flat, math.prod(self.shape))

    @property
    def calibration(self) -> str | None:
        """``rig.calibration`` of the rig that the cells are of; None in a plan that was made from cells."""
        return self._seen if self._seen is None or isinstance(self._seen, str) else self._seen.calibration

    @property
    def n_points(self) -> int:
        """The number of points, B·N·D·h·w."""
        return self.cells.numel()

    @property
    def n_kept(self) -> int:
        """The number of points that fall into a cell. Counted when asked for, which waits for a GPU."""
        return int((self.cells >= 0).sum())

    def __repr__(self) -> str:
        batch, cameras, depths, height, width = self.cells.shape
        return (
            f"SplatPlan({batch} x {cameras} cameras of {depths} x {height} x {width} points to (B, Z, Y, X) = "
            f"{self.shape}, {self.variant}, on {self.device})"
        )

    def report(self) -> Report:
        """What falls where, with a warning where it looks wrong: see :func:`kernops.geometric.diagnostics.report`."""
        from .diagnostics import report

        return report(self)

    def plot(self, ax: Any = None) -> Any:
        """A picture of the points per cell: see :func:`kernops.geometric.diagnostics.plot`."""
        from .diagnostics import plot

        return plot(self, ax)

    # --- changes ------------------------------------------------------------------------------------------------------
    def to(self, device: torch.device | str) -> SplatPlan:
        """The plan on another device; itself if it is there."""
        other: SplatPlan = moved(self, device)
        if other is not self and other.frustum is not None:
            other.frustum = other.frustum.to(_with_float64(other.device))
        return other

    def refresh(self, rig: CameraRig) -> None:
        """Make it the plan of another calibration of the same cameras, in the memory that it has.

        A GPU is not waited for if the rig is on it, and the call can be captured in a CUDA graph. Not so for
        ``"histogram"``, which counts the pairs of image columns and cells first.

        Args:
            rig: with as many samples and cameras, and images of the same size.

        Raises:
            ValueError: the numbers of samples or cameras or the image size differ, or the plan was made from cells.
            RuntimeError: a "histogram" plan has no room for the pairs of columns and cells (it has an eighth more than
                it was made with), or is refreshed while a CUDA graph is captured.
        """
        from .rig import CameraRig

        if not isinstance(rig, CameraRig):
            raise TypeError(f"rig must be a CameraRig; got {type(rig).__name__}")
        if self.frustum is None:
            raise ValueError("a plan that was made from cells has no frustum to refresh; make a new one from new cells")
        if tuple(rig.shape) != tuple(self.cells.shape[:2]):
            raise ValueError(
                f"rig has (B, N) = {tuple(rig.shape)} samples and cameras, the plan {tuple(self.cells.shape[:2])}"
            )
        kernels = choose(self.backend, self.device)
        cells = self._cells_of(rig, kernels, self.device)
        fresh = self._fresh_levels(kernels, cells)
        for k, (old, new) in enumerate(zip(self._flat, fresh)):
            if old.shape == new.shape:
                old.copy_(new)
            else:  # how the work is shared out, of another device or back end
                self._flat[k] = new
        if self._points is not None:
            for old, new in zip(self._points, points_in_order(kernels, cells, math.prod(self.shape))):
                old.copy_(new)
        self.cells.copy_(cells)
        self.rig, self._seen = rig, _fingerprint(rig)

    def _fresh_levels(self, kernels: ModuleType, cells: Tensor) -> list[Tensor]:
        if not self._flat:
            return []
        n_cells = math.prod(self.shape)
        if self.variant == "histogram":
            if cells.is_cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("refresh of a 'histogram' plan waits for the GPU: it cannot be captured in a graph")
            capacity = self._flat[1].numel() - 1
            return flatten(kernels, histogram(kernels, cells, n_cells, self._order, capacity))
        level = runs(kernels, cells, n_cells, self._order)
        return flatten(kernels, split(level) if len(self._flat) > FIELDS else (level,))

    def by_point(self) -> list[Tensor]:
        """The levels of a sum over single points, which :func:`splat_features` needs; kept once made."""
        if self._points is not None:
            return self._points
        points = points_in_order(choose(self.backend, self.device), self.cells, math.prod(self.shape))
        if self.cells.is_cuda and torch.cuda.is_current_stream_capturing():
            return points  # they hold nothing until the graph is replayed, and belong to it
        self._points = points
        finished(self)
        return points

    def __copy__(self) -> SplatPlan:
        """A copy of its own: with shared tensors, a refresh of one would change the other."""
        return copy.deepcopy(self)


# --- checks -----------------------------------------------------------------------------------------------------------
def _fingerprint(rig: CameraRig) -> CameraRig | str:
    """The hash of a rig on the CPU; of one on a GPU, which would have to be waited for, a copy to hash when asked."""
    return rig.calibration if rig.device.type == "cpu" else rig.to(rig.device)


def _with_float64(device: torch.device) -> torch.device:
    """Where cells of a plan on ``device`` are computed: MPS has no float64."""
    return torch.device("cpu") if device.type == "mps" else device


def _shape4(shape: Sequence[int]) -> Shape:
    try:
        batch, z, y, x = (operator.index(n) for n in shape)
    except (TypeError, ValueError):
        raise TypeError(f"shape must be four integers (B, Z, Y, X); got {shape!r}") from None
    if min(batch, z, y, x) < 0:
        raise ValueError(f"shape must not be negative; got {(batch, z, y, x)}")
    return batch, z, y, x


def _check_points(shape: tuple[int, ...]) -> None:
    if math.prod(shape) > MOST:
        raise ValueError(f"(B, N, D, h, w) = {shape} are {math.prod(shape)} points; at most {MOST} are accepted")


def _check_grid(shape: Shape) -> None:
    if math.prod(shape) > MOST:
        raise ValueError(f"(B, Z, Y, X) = {shape} are {math.prod(shape)} cells; at most {MOST} are accepted")


def _check_kinds(rig: object, frustum: object, grid: object) -> None:
    from .frustum import Frustum
    from .grid import BEVGrid
    from .rig import CameraRig

    for name, value, kind in (("rig", rig, CameraRig), ("frustum", frustum, Frustum), ("grid", grid, BEVGrid)):
        if not isinstance(value, kind):
            raise TypeError(f"{name} must be a {kind.__name__}; got {type(value).__name__}")


def _check_cells(cells: Tensor, shape: Shape) -> None:
    """ValueError unless every cell is one of its own sample's. Waits for the device once."""
    if cells.numel() == 0:
        return
    each = math.prod(shape[1:])
    cells = cells.flatten(1)
    first = torch.arange(shape[0], device=cells.device, dtype=torch.int64)[:, None] * each
    wrong = (cells >= 0) & ((cells < first) | (cells >= first + each))
    if bool(wrong.any()):
        sample, point = (int(k) for k in wrong.nonzero()[0])
        raise ValueError(
            f"cells of sample {sample} must be in [{sample * each}, {(sample + 1) * each}), or negative where a point "
            f"is dropped: ((b·Z + z)·Y + y)·X + x with (B, Z, Y, X) = {shape}; got {int(cells[sample, point])}"
        )
