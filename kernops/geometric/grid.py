"""The grid of cells that a splat writes to, in the bounds that the field's configurations use."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .frustum import numbers

Bound = tuple[float, float, float]

#: How far from a whole number of cells the bounds may be, in cells: decimal fractions are not exact in binary.
_TOLERANCE = 1e-6


@dataclass(frozen=True)
class BEVGrid:
    """Cells of a bird's-eye-view grid in the ego frame (x forward, y left, z up), in metres.

    Args:
        xbound, ybound, zbound: (lower, upper, step) of an axis, as ``grid_conf`` of Lift-Splat-Shoot has them. Cell k
            of an axis holds lower + k·step <= coordinate < lower + (k + 1)·step.

    Raises:
        TypeError: a bound is not three numbers.
        ValueError: a bound is not finite, its step is not positive, its upper end is not above the lower one, or the
            two ends are not a whole number of steps apart.

    Example:
        >>> grid = BEVGrid(xbound=(-51.2, 51.2, 0.8), ybound=(-25.6, 25.6, 0.8), zbound=(-5.0, 3.0, 8.0))
        >>> grid.shape
        (1, 64, 128)
        >>> grid.lower
        (-51.2, -25.6, -5.0)

    Source: J. Philion and S. Fidler, "Lift, Splat, Shoot", ECCV 2020, section 3.2.
    """

    xbound: Bound
    ybound: Bound
    zbound: Bound

    def __post_init__(self) -> None:
        for name in ("xbound", "ybound", "zbound"):
            object.__setattr__(self, name, _checked(name, getattr(self, name)))
        x, y, z = self.counts
        if x * y * z >= 2**31:
            raise ValueError(f"the grid has {x} x {y} x {z} = {x * y * z} cells; fewer than 2**31 are accepted")

    @property
    def lower(self) -> Bound:
        """Lower ends of the x, y and z range."""
        return (self.xbound[0], self.ybound[0], self.zbound[0])

    @property
    def step(self) -> Bound:
        """Sizes of a cell along x, y and z."""
        return (self.xbound[2], self.ybound[2], self.zbound[2])

    @property
    def counts(self) -> tuple[int, int, int]:
        """Numbers of cells (X, Y, Z)."""
        return (_cells(self.xbound), _cells(self.ybound), _cells(self.zbound))

    @property
    def shape(self) -> tuple[int, int, int]:
        """(Z, Y, X): the order of the axes of a splat's result."""
        x, y, z = self.counts
        return (z, y, x)

    def cell_centers(
        self, *, dtype: torch.dtype = torch.float64, device: torch.device | str | None = None
    ) -> torch.Tensor:
        """Centres (x, y, z) of all cells in the ego frame, in metres: (Z, Y, X, 3), on the CPU unless told otherwise.

        Example:
            >>> grid = BEVGrid((0.0, 4.0, 1.0), (0.0, 2.0, 1.0), (-1.0, 1.0, 2.0))
            >>> grid.cell_centers()[0, 1, 3].tolist()
            [3.5, 1.5, 0.0]
        """
        x, y, z = (
            lower + (torch.arange(count, dtype=torch.float64, device="cpu") + 0.5) * step
            for lower, step, count in zip(self.lower, self.step, self.counts)
        )
        zz, yy, xx = torch.meshgrid(z, y, x, indexing="ij")
        return torch.stack((xx, yy, zz), -1).to(device=device, dtype=dtype)


def _cells(bound: Bound) -> int:
    lower, upper, step = bound
    return round((upper - lower) / step)


def _checked(name: str, bound: object) -> Bound:
    lower, upper, step = numbers(name, bound, "three numbers (lower, upper, step)", 3)
    given = f"{name}=({lower:g}, {upper:g}, {step:g})"
    if not all(map(math.isfinite, (lower, upper, step))):
        raise ValueError(f"{given} must be finite")
    if step <= 0:
        raise ValueError(f"{given}: the step must be positive")
    if upper <= lower:
        raise ValueError(f"{given}: the upper end must be above the lower end")
    cells = (upper - lower) / step
    if cells >= 2**31:
        raise ValueError(f"{given}: the ends are {cells:.10g} steps apart; fewer than 2**31 are accepted")
    if max(1, round(cells)) - cells > _TOLERANCE or cells - round(cells) > _TOLERANCE:
        accepted = [f"{lower + k * step:.10g}" for k in (math.floor(cells), math.ceil(cells)) if k]
        raise ValueError(
            f"{given}: the ends are {cells:.10g} steps apart, which must be a whole number; the nearest accepted upper "
            f"{'ends are' if len(accepted) > 1 else 'end is'} {' and '.join(accepted)}"
        )
    return lower, upper, step
