"""Levels: the passes that form the sums of a plan, and how points and cells are put in order for them."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch

from .kernels import Level

Tensor = torch.Tensor
Shape = tuple[int, int, int, int]

#: A bucket longer than LONG items is summed in pieces of PIECE items, and the pieces' sums are added: with one piece a
#: multiprocessor has nothing to share with the others, and shorter ones cost a second pass that is not worth it.
LONG, PIECE = 16384, 4096
#: Items or buckets at most: numbers a little beyond the last one must fit into 32 bits.
MOST = 2**31 - 2**13
#: Cells of a square of TILE x TILE are summed one after the other: neighbours get features from the same pixels, which
#: are in the cache of the core or multiprocessor then.
TILE = 8
#: One part in SPARE more room for (image column, cell) pairs than a "histogram" plan needs when it is made.
SPARE = 8


# --- as a list of tensors ---------------------------------------------------------------------------------------------
FIELDS = 4  # tensors of a level


def flatten(kernels: ModuleType, levels: Sequence[Level]) -> list[Tensor]:
    """Items, starts, targets and work of each level; an empty tensor for targets that are None."""
    flat: list[Tensor] = []
    for level in levels:
        targets = level.starts.new_empty(0) if level.targets is None else level.targets
        flat += [level.items, level.starts, targets, kernels.segment_work(level.starts)]
    return flat


def unflatten(flat: Sequence[Tensor], n_out: int) -> tuple[Level, ...]:
    """The levels again; ``n_out`` is of the last, in the others each segment has its own row."""
    levels: list[Level] = []
    for items, starts, targets, work in zip(*(flat[k::FIELDS] for k in range(FIELDS))):
        last = len(levels) == len(flat) // FIELDS - 1
        rows = n_out if last else starts.shape[0] - 1
        levels.append(Level(items, starts, targets if targets.shape[0] else None, rows, work))
    return tuple(levels)


# --- long segments ----------------------------------------------------------------------------------------------------
def levels_of(level: Level, longest: int) -> tuple[Level, ...]:
    """The passes that sum these segments: a second one, which adds pieces, if the longest has LONG items or more."""
    return (level,) if longest < LONG else split(level)


def split(level: Level) -> tuple[Level, ...]:
    """The same sums in pieces of PIECE items, and the sums of the pieces.

    Every segment has at least one piece, so that there are at most as many as segments and whole pieces together:
    the shapes depend on the shapes of ``level`` alone, and the device is not waited for.
    """
    starts, n_items = level.starts, level.items.shape[0]
    segments = starts.numel() - 1
    capacity = segments + n_items // PIECE
    if capacity > MOST:
        return (level,)
    pieces = ((starts.diff() + (PIECE - 1)) // PIECE).clamp_(min=1)
    ends = torch.zeros_like(starts)
    torch.cumsum(pieces, 0, dtype=torch.int32, out=ends[1:])
    number = torch.arange(capacity, dtype=torch.int32, device=starts.device)
    segment = (torch.searchsorted(ends, number, right=True) - 1).clamp_(max=segments - 1)
    begin = starts[segment] + (number - ends[segment]) * PIECE
    begin = torch.where(number < ends[-1], begin, starts[-1])
    first = Level(level.items, torch.cat((begin, starts[-1:])), None, capacity)
    return first, Level(number, ends, level.targets, level.n_out)


# --- of points and cells ----------------------------------------------------------------------------------------------
def tiles(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    """The bucket of each cell and the cell of each bucket, int32: tile by tile, row by row in a tile."""
    batch, z, y, x = shape
    row, column = torch.arange(y, device=device)[:, None], torch.arange(x, device=device)
    tile = (row // TILE) * (-(-x // TILE)) + column // TILE
    within = (row % TILE) * TILE + column % TILE
    in_order = torch.argsort((tile * TILE**2 + within).reshape(-1))
    layers = torch.arange(batch * z, device=device)[:, None] * (y * x)
    cell_of = (layers + in_order).reshape(-1)
    bucket_of = torch.empty_like(cell_of)
    bucket_of[cell_of] = torch.arange(cell_of.numel(), device=device)
    return bucket_of.int(), cell_of.int()


def runs(kernels: ModuleType, cells: Tensor, n_cells: int, order: list[Tensor]) -> Level:
    bucket_of, cell_of = order
    items, starts = kernels.make_runs(cells, n_cells, bucket_of)
    return Level(items, starts, cell_of, n_cells)


def histogram(
    kernels: ModuleType, cells: Tensor, n_cells: int, order: list[Tensor], capacity: int | None
) -> tuple[Level, Level]:
    """Sums by (image column, cell), and of these by cell, with room for ``capacity`` pairs (None: some to spare)."""
    bucket_of, cell_of = order
    batch, cameras, _, _, width = cells.shape
    camera = torch.arange(batch * cameras, device=cells.device).reshape(batch, cameras, 1, 1, 1)
    column = camera * width + torch.arange(width, device=cells.device)
    pair = torch.where(cells < 0, -1, column * n_cells + bucket_of[cells.clamp(min=0).long()])
    found, number = torch.unique(pair, return_inverse=True)
    dropped = int(found[0] < 0)
    found = found[dropped:]
    if capacity is None:
        capacity = found.numel() + found.numel() // SPARE + SPARE
    elif found.numel() > capacity:
        raise RuntimeError(
            f"refresh: the new calibration has {found.numel()} pairs of image columns and cells, and this 'histogram' "
            f"plan room for {capacity}; make a new plan"
        )
    items, starts = kernels.make_runs((number - dropped).int(), capacity, None)
    buckets = cells.new_full((capacity,), -1)
    buckets[: found.numel()] = (found % n_cells).int()
    rows, ends = kernels.bucket_sort(buckets, n_cells)
    return Level(items, starts, None, capacity), Level(rows, ends, cell_of, n_cells)


def points_in_order(kernels: ModuleType, cells: Tensor, n_cells: int) -> list[Tensor]:
    if cells.numel() == 0 or n_cells == 0:
        return []
    order, starts = kernels.bucket_sort(cells.reshape(-1), n_cells)
    return flatten(kernels, split(Level(order, starts, None, n_cells)))
