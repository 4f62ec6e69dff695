"""The cell of every point of a frustum, in operations that are rounded one by one: the same cells on every device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from .frustum import Frustum
    from .grid import BEVGrid
    from .rig import CameraRig

Tensor = torch.Tensor
Triple = tuple[float, float, float]

#: How a coordinate in cells becomes an index: "floor" is right; "trunc" rounds toward zero, as the public
#: implementations do, so that points up to one cell below the lower end of an axis land in its first cell.
ROUNDINGS = ("floor", "trunc")

#: Points whose coordinates are in memory at once.
BLOCK = 1 << 20


class Arguments(NamedTuple):
    """What :func:`frustum_cells` takes, in its order."""

    projection: Tensor
    u: Tensor
    v: Tensor
    d: Tensor
    lower: Triple
    step: Triple
    counts: tuple[int, int, int]
    trunc: bool


def arguments(
    rig: CameraRig,
    frustum: Frustum,
    grid: BEVGrid,
    rounding: str = "floor",
    device: torch.device | str | None = None,
) -> Arguments:
    """The arguments of :func:`frustum_cells` for a rig, on a device (the rig's if none is given).

    What is on that device already is not copied; with the rig and the frustum on it, a GPU is not waited for.

    Raises:
        ValueError: ``rounding`` is not one of "floor" and "trunc", or the rig and the frustum are for images of
            different sizes.

    Example:
        >>> from kernops.geometric import BEVGrid, frustum, nuscenes_rig
        >>> rig = nuscenes_rig().resized(scale=0.44, crop=(140, 0))
        >>> points = frustum((256, 704), (16, 44), dbound=(1.0, 60.0, 1.0))
        >>> grid = BEVGrid((-51.2, 51.2, 0.8), (-51.2, 51.2, 0.8), (-5.0, 3.0, 8.0))
        >>> int((frustum_cells(*arguments(rig, points, grid)) >= 0).sum())
        139087
    """
    trunc = truncates(rounding)
    if rig.image_size != frustum.image_size:
        raise ValueError(
            f"the rig is for images (H, W) of {rig.image_size}, the frustum for {frustum.image_size}; "
            "CameraRig.resized gives the rig of a resized and cropped image"
        )
    points = frustum.to(rig.device if device is None else device)
    projection = rig.projection().to(points.u.device)
    return Arguments(projection, points.u, points.v, points.d, grid.lower, grid.step, grid.counts, trunc)


def truncates(rounding: str) -> bool:
    """Whether a rounding is toward zero; an error if it is none of :data:`ROUNDINGS`."""
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding must be {' or '.join(map(repr, ROUNDINGS))}; got {rounding!r}")
    return rounding == "trunc"


@torch.no_grad()
def frustum_cells(
    projection: Tensor,
    u: Tensor,
    v: Tensor,
    d: Tensor,
    lower: Triple,
    step: Triple,
    counts: tuple[int, int, int],
    trunc: bool,
) -> Tensor:
    """The cell of every point of every camera's frustum. A GPU is not waited for.

    In float64, with every product, sum and quotient rounded on its own, axis a of the ego frame is computed as::

        q = (P[a, 0] · u + P[a, 1] · v) + P[a, 2]
        e = d · q + T[a]
        f = (e - lower[a]) / step[a]

    and the index along the axis is floor(f), or f rounded toward zero. No more than :data:`BLOCK` points, or one depth
    of one camera, have their coordinates in memory at once.

    Args:
        projection: [P | T] of each camera, float64 (B, N, 3, 4), as :meth:`CameraRig.projection` gives it.
        u, v, d: float64 (w,), (h,), (D,): the columns, rows and depths of the frustum.
        lower, step: lower ends of the grid and sizes of its cells along x, y, z.
        counts: numbers of cells (X, Y, Z).
        trunc: round toward zero, and not down.

    Returns:
        int32 (B, N, D, h, w): ((b·Z + z)·Y + y)·X + x, or -1 where a point is outside the grid or not finite.

    Raises:
        TypeError: a tensor is not float64.
        ValueError: a shape is wrong, the tensors are on different devices, or there are 2**31 or more points or cells.
    """
    _check(projection, u, v, d)
    batch, cameras = projection.shape[:2]
    shape = (batch, cameras, len(d), len(v), len(u))
    _check_sizes(batch, shape, counts)
    cells = torch.empty(shape, dtype=torch.int32, device=u.device)
    for b, n, depths, coordinates in in_cells(projection, u, v, d, lower, step):
        cells[b, n, depths] = numbers(b, rounded(coordinates, trunc), counts)
    return cells


@torch.no_grad()
def cells_like_points(points: Tensor, grid: BEVGrid, rounding: str = "floor") -> Tensor:
    """The cell of each of your own points, for instance of the ``geom`` of Lift-Splat-Shoot's ``get_geometry``.

    Args:
        points: (B, …, 3), coordinates x, y, z in the frame of the grid, in metres; any floating-point dtype. They are
            placed in float64: a point within float32's accuracy of a border may go to the other side than with float32.
        grid: the grid.
        rounding: "floor", or "trunc" (toward zero) as the public implementations do.

    Returns:
        int32 (B, …): ((b·Z + z)·Y + y)·X + x, or -1 where a point is outside the grid or not finite.

    Raises:
        TypeError: the points are not of a floating-point dtype.
        ValueError: their shape or ``rounding`` is wrong, or the cells of all samples are 2**31 or more.

    Example:
        >>> from kernops.geometric import BEVGrid
        >>> grid = BEVGrid((0.0, 4.0, 1.0), (0.0, 2.0, 1.0), (-1.0, 1.0, 2.0))
        >>> cells_like_points(torch.tensor([[[3.5, 1.5, 0.0], [-0.5, 0.5, 0.0]]]), grid).tolist()
        [[7, -1]]
        >>> cells_like_points(torch.tensor([[[3.5, 1.5, 0.0], [-0.5, 0.5, 0.0]]]), grid, "trunc").tolist()
        [[7, 0]]
    """
    trunc = truncates(rounding)
    if not isinstance(points, Tensor) or not points.dtype.is_floating_point:
        raise TypeError(f"points must be a floating-point tensor; got {getattr(points, 'dtype', type(points))}")
    if points.ndim < 2 or points.shape[-1] != 3:
        raise ValueError(f"points must have shape (B, …, 3); got {tuple(points.shape)}")
    _check_sizes(points.shape[0], points.shape[:-1], grid.counts)
    cells = torch.empty(points.shape[:-1], dtype=torch.int32, device=points.device)
    for b, (here, out) in enumerate(zip(points, cells)):
        flat, target = here.reshape(-1, 3), out.view(-1)
        for block in _blocks(len(flat), BLOCK):
            axes = flat[block].to(torch.float64).unbind(-1)
            coordinates = tuple(_place(e, lower, step) for e, lower, step in zip(axes, grid.lower, grid.step))
            target[block] = numbers(b, rounded(coordinates, trunc), grid.counts)
    return cells


def in_cells(
    projection: Tensor, u: Tensor, v: Tensor, d: Tensor, lower: Triple, step: Triple
) -> Iterator[tuple[int, int, slice, tuple[Tensor, ...]]]:
    """Coordinates in cells, a block at a time: ``(b, n, depths, (x, y, z))``, the last three (depths, h, w) each."""
    for b, of_sample in enumerate(projection):
        for n, camera in enumerate(of_sample):
            rays = [(p[0] * u + (p[1] * v)[:, None]) + p[2] for p in camera]
            for depths in _blocks(len(d), max(1, BLOCK // max(1, len(u) * len(v)))):
                far = d[depths, None, None]
                yield (
                    b,
                    n,
                    depths,
                    tuple(_place(far * ray + p[3], a, size) for ray, p, a, size in zip(rays, camera, lower, step)),
                )


def _place(e: Tensor, lower: float, step: float) -> Tensor:
    # A divisor that is a tensor of e's device: torch replaces division by a number with a product on a GPU.
    return (e - lower) / torch.full((), step, dtype=e.dtype, device=e.device)


def rounded(coordinates: tuple[Tensor, ...], trunc: bool) -> list[Tensor]:
    """Indices along the axes, still in float64."""
    return [torch.trunc(f) if trunc else torch.floor(f) for f in coordinates]


def numbers(b: int, indices: list[Tensor], counts: tuple[int, int, int]) -> Tensor:
    """Numbers of cells, computed in float64 where they are exact, with -1 outside the grid: int32."""
    x, y, z = indices
    inside = torch.ones_like(x, dtype=torch.bool)
    for index, count in zip(indices, counts):
        inside &= (index >= 0) & (index < count)
    number = ((b * counts[2] + z) * counts[1] + y) * counts[0] + x
    return torch.where(inside, number, -1.0).to(torch.int32)


def _blocks(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def _check(projection: Tensor, u: Tensor, v: Tensor, d: Tensor) -> None:
    named = {"projection": projection, "u": u, "v": v, "d": d}
    for name, tensor in named.items():
        if tensor.dtype != torch.float64:
            raise TypeError(f"{name} must be float64; got {tensor.dtype}")
        if tensor.device != u.device:
            raise ValueError(f"all tensors must be on one device; got {name} on {tensor.device} and u on {u.device}")
        if name != "projection" and tensor.ndim != 1:
            raise ValueError(f"{name} must have one axis; got shape {tuple(tensor.shape)}")
    if projection.ndim != 4 or projection.shape[2:] != (3, 4):
        raise ValueError(f"projection must have shape (B, N, 3, 4); got {tuple(projection.shape)}")


def _check_sizes(batch: int, shape: tuple[int, ...], counts: tuple[int, int, int]) -> None:
    points, cells = torch.Size(shape).numel(), batch * counts[0] * counts[1] * counts[2]
    for what, number in (("points", points), ("cells", cells)):
        if number >= 2**31:
            raise ValueError(f"{number} {what}; fewer than 2**31 are accepted")


# --- 3x3 matrices -----------------------------------------------------------------------------------------------------
def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of (…, 3, 3) and (…, 3, k): (a₀b₀ + a₁b₁) + a₂b₂, where a GPU's matrix product is free to fuse."""
    terms = a[..., None] * b[..., None, :, :]
    return (terms[..., 0, :] + terms[..., 1, :]) + terms[..., 2, :]


def inverse(m: Tensor) -> Tensor:
    """Adjugate over determinant of (…, 3, 3); a GPU is not waited for, as ``torch.linalg.inv`` does."""
    tiled = m.repeat(*[1] * (m.ndim - 2), 2, 2)  # so that indices modulo 3 are slices
    one, two = slice(1, 4), slice(2, 5)
    cofactors = tiled[..., one, one] * tiled[..., two, two] - tiled[..., one, two] * tiled[..., two, one]
    terms = m[..., 0, :] * cofactors[..., 0, :]
    determinant = (terms[..., 0] + terms[..., 1]) + terms[..., 2]
    return cofactors.mT / determinant[..., None, None]
