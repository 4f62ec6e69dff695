"""How the nearest points in many dimensions are found on the matrix units of a GPU, as data (``cuda/nearest_*.cuh``).

Half-precision products prove of nearly all columns that they are not among the nearest; the others are compared by
differences.
All choices are functions of sizes, to be read and tested without a GPU; only their ratios were measured.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache

from .schedule import Device

#: Which instructions multiply: the struct of the kernels, its header, threads of a block, and chunks of columns that
#: may be in shared memory at a time, more of them if there is room.
PRODUCTS = {
    "warp": ("WarpProducts", "nearest_products.cuh", 128, (3, 2)),
    "group": ("GroupProducts", "nearest_hopper.cuh", 256, (4, 3, 2)),
}
MOST_AHEAD = 2  # steps whose chunks are under way
#: In the order of inclusion, after math.cuh; the header of the products comes before the filter.
_FIRST = ("nearest_ptx.cuh", "nearest_data.cuh", "nearest_list.cuh", "nearest_pack.cuh")
_LAST = ("nearest_filter.cuh", "nearest_rank.cuh")
HEADERS = (*_FIRST, *(header for _, header, *_ in PRODUCTS.values()), *_LAST)
#: In the order of their launch; those from ``SLAB_KERNELS`` on for each slab of rows.
KERNELS = (
    "nearest_centre", "nearest_scale", "nearest_pack", "nearest_sample", "nearest_threshold", "nearest_list",
    "nearest_rank", "nearest_list_again", "nearest_rank_again", "nearest_rest",
)  # fmt: skip
SLAB_KERNELS = 3
#: The kernels with products; all others have blocks of ``ITEM_THREADS``.
FILTERS, ITEM_THREADS = ("nearest_sample", "nearest_list", "nearest_list_again"), 256
#: Blocks at a time on a multiprocessor, for which registers must suffice, where the compiler would count on more.
AT_A_TIME = {**dict.fromkeys((*FILTERS, "nearest_rest"), 2), "nearest_rank": 4, "nearest_rank_again": 4}
#: Oldest architecture whose matrix unit has the instructions.
OLDEST = (8, 0)
#: Fewer coordinates are compared directly in less time; the bounds are proved for up to so many.
FEWEST_COORDINATES, MOST_COORDINATES = 12, 8192
MOST_NEIGHBOURS = 64
MOST_COLUMNS = 2**31 - 2**16
#: Fewer coordinates of pairs, or rows, take less time directly than ten kernels take to start.
FEWEST_PRODUCTS, FEWEST_ROWS = 1 << 31, 512
#: Bytes of packed columns of all batch elements: they are packed for each, also where they are the same.
MOST_PACKED = 1 << 30
#: The sample is one column in so many: with more, products take less time, and lists are longer. The first with which
#: the sample has a tile for each segment. Measured: 4, 5 and 6 take about the same time.
PARTS = (4, 3, 2)
#: A row's groups in the sample, for each neighbour: with fewer, neighbours share one more often, and lists are longer.
GROUPS_EACH, GROUPS_OF_SEGMENT = 4, 8
ROWS = COLUMNS = 128  # of a block; of a tile
CHUNK = ROWS * 128  # bytes of 64 coordinates of 128 points
QUEUE_BYTES, BARRIER_BYTES = 512, 128  # of a warp's queue of columns for the lists; of a block's barriers
RESERVED = 1024  # bytes of shared memory that a block takes beside its own
RESIDENT = 2  # chunks of rows that stay in shared memory
WAVES = 8  # blocks of the list step for each that runs at a time: the last, partly idle wave is one of so many
SLAB_BYTES = 256 << 20  # of lists that are there at a time


@dataclass(frozen=True)
class Nearest:
    """How one search runs; the fields above the line are compiled in, those below are passed at run time.

    Attributes:
        dim, k: coordinates; neighbours.
        vec: floats that are read at once.
        parts, groups: the sample is one column in ``parts``; groups of it that a row has.
        room, space: entries of a list; numbers of scratch for a row.
        products: a key of ``PRODUCTS``.
        rest_blocks: blocks that compare rows with all columns.
        resident, stages: chunks of rows that stay in shared memory; chunks of columns there.
        ahead, shared: chunks under way; bytes of shared memory of a block.
        row_blocks: blocks of rows of a batch element.
        part, tiles, sample_tiles: columns of a part; tiles of all parts, and of the sample, of a batch element.
        sample_segments, segments: pieces that the tiles are cut into.
        slab: blocks of rows, of all batch elements, that lists are made for at a time.
    """

    dim: int
    k: int
    vec: int
    parts: int
    groups: int
    room: int
    space: int
    products: str
    rest_blocks: int
    resident: int
    stages: int
    ahead: int
    shared: int
    # ---
    row_blocks: int
    part: int
    tiles: int
    sample_tiles: int
    sample_segments: int
    segments: int
    slab: int


def _up(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def room(k: int, parts: int) -> int:
    """Entries of a list, of which most are filled only where many columns are about equally far."""
    # The k nearest of the sample are parts * k of all in the mean, and a little more; the deviation is parts * sqrt(k).
    return _up(3 * parts * k + 128, 32) * 32


def stages(dim: int, products: str, device: Device) -> int:
    """Chunks of columns that a block has in shared memory: the most with which two blocks, or else one, have room.

    0 if there is no room.
    """
    for blocks in (2, 1):
        for count in PRODUCTS[products][3]:
            if blocks * (shared_bytes(dim, products, count) + RESERVED) <= device.shared + RESERVED:
                return count
    return 0


def shared_bytes(dim: int, products: str, stages: int) -> int:
    """Bytes of shared memory of a block of the kernels with products, as ``FilterMemory`` lays it out."""
    chunks, warps = _up(dim, 64), PRODUCTS[products][2] // 32
    resident = chunks <= RESIDENT
    stage = (CHUNK if resident else 2 * CHUNK) + 8 * COLUMNS
    fixed = (chunks * CHUNK if resident else 0) + 8 * ROWS + BARRIER_BYTES
    return fixed + stages * stage + QUEUE_BYTES * warps


@lru_cache(maxsize=4096)
def schedule(dim: int, k: int, m: int, n: int, batch: int, device: Device, aligned: bool = True) -> Nearest | None:
    """How to find the ``k`` nearest of ``n`` float32 points for each of ``m``, of each of ``batch`` batch elements.

    Args:
        dim: number of coordinates.
        k: number of neighbours.
        m, n, batch: numbers of rows and columns of a batch element, and of those.
        device: what it runs on.
        aligned: whether four coordinates can be read at once, if their number allows it.

    Returns:
        ``None`` where comparing all pairs directly is the better way, or the only one.
    """
    groups = max(8 * GROUPS_OF_SEGMENT, _up(GROUPS_EACH * k, GROUPS_OF_SEGMENT) * GROUPS_OF_SEGMENT)
    sample_segments = groups // GROUPS_OF_SEGMENT
    products = "group" if device.arch == (9, 0) else "warp"
    if not (FEWEST_COORDINATES <= dim <= MOST_COORDINATES and 1 <= k <= MOST_NEIGHBOURS and n <= MOST_COLUMNS):
        return None
    count = stages(dim, products, device)
    if device.arch < OLDEST or not count:
        return None
    parts = next((p for p in PARTS if _up(_up(n, p), COLUMNS) >= sample_segments), 0)
    if m < FEWEST_ROWS or m * n * batch * dim < FEWEST_PRODUCTS or not parts:
        return None
    part = _up(n, parts)
    row_blocks, tiles = _up(m, ROWS), _up(part * parts, COLUMNS)
    if batch > 1 and batch * tiles * COLUMNS * _up(dim, 64) * 128 > MOST_PACKED:
        return None
    space = max(room(k, parts), groups)
    slab = min(batch * row_blocks, max(1, SLAB_BYTES // (4 * space * ROWS)))
    at_a_time = AT_A_TIME["nearest_list"] * device.multiprocessors
    return Nearest(
        dim=dim,
        k=k,
        vec=4 if aligned and dim % 4 == 0 else 1,
        parts=parts,
        groups=groups,
        room=room(k, parts),
        space=space,
        products=products,
        rest_blocks=at_a_time,
        resident=RESIDENT,
        stages=count,
        ahead=min(MOST_AHEAD, count - 1),
        shared=shared_bytes(dim, products, count),
        row_blocks=row_blocks,
        part=part,
        tiles=tiles,
        sample_tiles=_up(part, COLUMNS),
        sample_segments=sample_segments,
        segments=max(1, min(_up(WAVES * at_a_time, slab), tiles // 8)),
        slab=slab,
    )


@lru_cache(maxsize=256)
def source(s: Nearest, batch_dims: int) -> str:
    """A translation unit with the kernels of ``KERNELS``; the sizes are not part of it."""
    products, header, *_ = PRODUCTS[s.products]
    constants = {
        "DIM": s.dim, "K": s.k, "VEC": s.vec, "PARTS": s.parts, "GROUPS": s.groups, "ROOM": s.room, "SPACE": s.space,
        "REST_BLOCKS": s.rest_blocks, "RESIDENT": s.resident, "STAGES": s.stages, "AHEAD": s.ahead, "SHARED": s.shared,
        "BATCH": max(1, batch_dims),
    }  # fmt: skip
    return "\n".join([
        *(f'#include "{h}"' for h in ("math.cuh", *_FIRST, header, *_LAST)),
        "namespace kn {",
        f"typedef NearestArguments<{constants['BATCH']}> NearestCall;",
        "struct G {",
        f"    typedef NearestCall Arguments; typedef {products} Products;",
        f"    static constexpr int {', '.join(f'{name} = {value}' for name, value in constants.items())};",
        "};",
        "}  // namespace kn",
        *(f'extern "C" __global__ void __launch_bounds__({threads(s, name)}, {AT_A_TIME.get(name, 1)}) '
          f"kn_{name}(const __grid_constant__ kn::NearestCall a) {{ kn::{name}<kn::G>(a); }}"
          for name in KERNELS),
        "",
    ])  # fmt: skip


def threads(s: Nearest, kernel: str) -> int:
    """Threads of a block."""
    return PRODUCTS[s.products][2] if kernel in FILTERS else ITEM_THREADS


def scratch(s: Nearest, batch: int) -> dict[str, int]:
    """Bytes of each piece of scratch, in the order of the arguments."""
    rows, columns, chunks = batch * s.row_blocks * ROWS, batch * s.tiles * COLUMNS, _up(s.dim, 64)
    listed = s.slab * ROWS
    return {
        "centre": 4 * batch * s.dim, "scale": 8 * batch, "rows": rows * chunks * 128, "columns": columns * chunks * 128,
        "row_numbers": 8 * rows, "column_up": 4 * columns, "column_low": 8 * columns, "lists": 4 * listed * s.space,
        "counts": 4 * listed, "again": 4 * s.slab, "tests": 8 * listed, "rest": 4 * (1 + s.rest_blocks),
        "rest_rows": 4 * listed, "part_value": 32 * s.rest_blocks * s.k,
        "part_index": 32 * s.rest_blocks * s.k,
    }  # fmt: skip


def blocks(s: Nearest, batch: int, slab: int) -> dict[str, int]:
    """Blocks of each kernel, for so many blocks of rows in a slab."""
    points = batch * (s.row_blocks * ROWS + s.tiles * COLUMNS)
    listed, a_warp_each = slab * s.segments, slab * ROWS // 8
    return {
        "nearest_centre": batch * _up(s.dim, 32), "nearest_scale": batch, "nearest_pack": _up(points, 8),
        "nearest_sample": slab * s.sample_segments, "nearest_threshold": a_warp_each, "nearest_list": listed,
        "nearest_rank": a_warp_each, "nearest_list_again": listed, "nearest_rank_again": a_warp_each,
        "nearest_rest": s.rest_blocks,
    }  # fmt: skip


def layout(batch_dims: int) -> struct.Struct:
    """``NearestArguments`` of ``cuda/nearest_data.cuh``."""
    dims = max(1, batch_dims)
    points = "Q" + "q" * (dims + 2)
    return struct.Struct("=" + points * 2 + "q" * (dims + 12) + "Q" * 18)
