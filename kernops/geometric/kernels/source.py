"""The CUDA source of the kernels of buckets and splats: how a row is shared out, and the lines that instantiate it.

Pure functions of sizes and types: tests compile what they return for every architecture without a GPU.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

#: The headers of this source, beside math.cuh.
HEADERS = ("numbers.cuh", "rows.cuh", "segments.cuh", "sort.cuh", "frustum.cuh", "splat.cuh")
#: Names of torch's dtypes -> the type in memory, the type to compute with, bytes of each.
TYPES = {
    "float16": ("kn::Half", "float", 2, 4), "bfloat16": ("kn::Bfloat", "float", 2, 4),
    "float32": ("float", "float", 4, 4), "float64": ("double", "double", 8, 8),
}  # fmt: skip
PACKET = 16  # bytes that a thread moves at once
STRIP = 8  # neighbouring columns of an image that a block takes (cuda/splat.cuh)
COST = 8  # items that opening a segment is worth (cuda/segments.cuh)
SLAB_BYTES = 512  # of a row in the wide type, at most: a block keeps two slabs for each warp in shared memory
MOST_NUMBERS = 16  # of a row that a thread of `share` holds: beyond, registers run out
FEW_PACKETS = 16  # a row of so few packets is not spread over a whole warp
SORT_THREADS, SORT_TILE, DIGIT_BITS = 256, 4096, 8  # cuda/sort.cuh


#: Structs of the headers -> how their fields are packed, and bytes of what follows: a Scale, or two Dividers.
LAYOUTS = {
    "SortArguments": (struct.Struct("=7Q3q"), 0),
    "StartArguments": (struct.Struct("=4Qq"), 0),
    "FrustumArguments": (struct.Struct("=5Q6d9q"), 0),
    "RunArguments": (struct.Struct("=6Q2q"), 32),
    "WorkArguments": (struct.Struct("=2Qq"), 0),
    "SegmentArguments": (struct.Struct("=6Q2q"), 56),
    "PrefixArguments": (struct.Struct("=5Q4q"), 0),
    "SplatArguments": (struct.Struct("=5Q6q"), 56),
}  # fmt: skip


def pack(name: str, *numbers: float) -> bytes:
    """The bytes of a struct, without what follows."""
    return LAYOUTS[name][0].pack(*numbers)


@dataclass(frozen=True)
class Shape:
    """How a group of threads shares a row (``cuda/rows.cuh`` says what the names mean)."""

    vec: int
    lanes: int
    chunks: int
    slabs: int

    @property
    def numbers(self) -> int:
        """Numbers of a row that a thread holds."""
        return self.vec * self.chunks


def packet(channels: int, itemsize: int, alignment: int) -> int:
    """Numbers that a thread moves at once: 16 bytes, but at most 4, which are as many registers."""
    if channels * max(itemsize, 4) >= 1 << 31:
        raise ValueError(f"rows of {channels} channels are too long: fewer than 2^31 bytes are accepted")
    vec = max(1, min(4, min(PACKET, alignment) // itemsize))
    while channels % vec:
        vec //= 2
    return vec


class Weights(NamedTuple):
    """What the weights of points are made of beside their depths (``cuda/rows.cuh``); names as there."""

    SOFTMAX: int
    WEIGHTED: int


PLAIN = Weights(0, 0)


@lru_cache(maxsize=1024)
def share(channels: int, itemsize: int, alignment: int, lanes: int) -> Shape:
    """The shape for rows of so many channels.

    Args:
        channels: of a row.
        itemsize: bytes of a number in memory.
        alignment: bytes that every row's address is a multiple of.
        lanes: threads of a group that are wished for. A few lanes with several packets each keep more loads in flight
            than many lanes with one, and need fewer shuffles for a dot product.
    """
    vec = packet(channels, itemsize, alignment)
    units = max(1, -(-channels // vec))
    best = None
    for k in range(6):
        for chunks in range(1, max(1, MOST_NUMBERS // vec) + 1):
            width = chunks << k
            slabs = -(-units // width)
            waste = slabs * width / units
            # Idle threads first, where they are many; then slabs (each reads all items again), then the wish.
            rank = (int(3 * waste), slabs, abs(k - lanes.bit_length() + 1), waste)
            if best is None or rank < best[0]:
                best = rank, Shape(vec, 1 << k, chunks, slabs)
    assert best is not None
    return best[1]


@lru_cache(maxsize=1024)
def spread(channels: int, itemsize: int, alignment: int, few: int = FEW_PACKETS) -> Shape:
    """The shape that spreads a row over a whole warp: the fewest numbers a thread that still give one load a row.

    Rows of up to ``few`` packets are left to groups of threads instead, so that a warp reads several at once.
    """
    most = packet(channels, itemsize, alignment)
    if channels // most <= few:
        return Shape(most, 1 << max(0, channels // most - 1).bit_length(), 1, 1)
    vec = 1
    while vec < most and -(-channels // vec) > 32:
        vec *= 2
    slabs = -(-channels * max(4, itemsize) // SLAB_BYTES)
    chunks = -(-channels // (32 * vec * slabs))
    return Shape(vec, 32, chunks, -(-channels // (32 * vec * chunks)))


def _unit(header: str, members: str, kernels: dict[str, tuple[str, str, int | str]], g: str = "<kn::G>") -> str:
    """A translation unit: name -> (template, arguments' type, launch bounds)."""
    lines = [f'#include "{header}"']
    for name in dict.fromkeys(arguments for _, arguments, _ in kernels.values()):
        layout, rest = LAYOUTS[name]
        lines.append(f'static_assert(sizeof(kn::{name}) == {layout.size + rest}, "packed as cuda.py does");')
    if members:
        lines.append(f"namespace kn {{ struct G {{ {members} }}; }}")
    lines += [
        f'extern "C" __global__ void __launch_bounds__({threads}) '
        f"kn_{name}(const __grid_constant__ kn::{arguments} a) {{ kn::{template}{g if members else ''}(a); }}"
        for name, (template, arguments, threads) in kernels.items()
    ]
    return "\n".join(lines) + "\n"


def _members(types: str, **numbers: int | str) -> str:
    fields = ", ".join(f"{name} = {value}" for name, value in numbers.items())
    return f"{types} static constexpr int {fields};"


#: Warps of a block of `segment_sum`, blocks that a multiprocessor shall hold: half of all threads, 64 registers each.
SUM_WARPS, SUM_BLOCKS = 16, 2
BACKWARD_THREADS = 256


def ahead(dtype: str, s: Shape) -> int:
    """Rows that a group loads at once: 4, or as many as leave a thread within 64 registers.

    Fewer would leave memory idle, unless the other groups of the warp load rows as well.
    """
    registers = s.numbers * TYPES[dtype][3] // 4
    most = 4 if registers <= 2 or dtype != "float64" and registers <= 4 else 2 if registers <= 8 else 1
    return max(1, min(most, s.lanes // 4))


@lru_cache(maxsize=1024)
def segments(dtype: str, out: str, kind: str, s: Shape, weights: Weights = PLAIN) -> str:
    """``segment_sum`` for values of one dtype and results of another; ``kind`` is "rows", "runs" or "pairs"."""
    members = _members(
        f"typedef {TYPES[dtype][0]} T; typedef {TYPES[out][0]} U; static constexpr kn::Kind KIND = kn::{kind.upper()};",
        VEC=s.vec, LANES=s.lanes, CHUNKS=s.chunks, WARPS=SUM_WARPS, UNROLL=ahead(dtype, s), **weights._asdict(),
    )  # fmt: skip
    bounds = f"{32 * SUM_WARPS}, {SUM_BLOCKS}"
    return _unit("segments.cuh", members, {"segment_sum": ("segment_sum", "SegmentArguments", bounds)})


@lru_cache(maxsize=1024)
def work() -> str:
    """``segment_work``."""
    kernel = f"segment_work<{SUM_WARPS}, {COST}>", "WorkArguments", 32 * SUM_WARPS
    return _unit("segments.cuh", "", {"segment_work": kernel})


@lru_cache(maxsize=1024)
def prefixes(dtype: str, out: str, s: Shape) -> str:
    """``prefix_carry`` and ``prefix_write``."""
    members = _members(
        f"typedef {TYPES[dtype][0]} T; typedef {TYPES[out][0]} U;",
        VEC=s.vec, LANES=s.lanes, CHUNKS=s.chunks, THREADS=256, UNROLL=4 if s.numbers <= 8 else 2,
    )  # fmt: skip
    return _unit("segments.cuh", members, {n: (n, "PrefixArguments", 256) for n in ("prefix_carry", "prefix_write")})


def atomic_threads(s: Shape) -> int:
    return max(128, STRIP * s.lanes)


def atomic_depths(s: Shape) -> int:
    """Depths that a group keeps sums for."""
    return 4 if s.numbers <= 8 else 2


def atomic_rows(dtype: str, s: Shape) -> int:
    """Rows of an image whose points a block holds in shared memory: 8 or 16 bytes for a weight and a cell."""
    columns = STRIP * (atomic_threads(s) // s.lanes // STRIP * atomic_depths(s))
    return min(16, (32 << 10) // (columns * 2 * TYPES[dtype][3]))


@lru_cache(maxsize=1024)
def atomic(dtype: str, s: Shape, weights: Weights = PLAIN) -> str:
    """``splat_atomic``."""
    members = _members(
        f"typedef {TYPES[dtype][0]} T;",
        VEC=s.vec, LANES=s.lanes, CHUNKS=s.chunks, THREADS=atomic_threads(s), DEPTHS=atomic_depths(s),
        ROWS=atomic_rows(dtype, s), **weights._asdict(),
    )  # fmt: skip
    text = _unit("splat.cuh", members, {"splat_atomic": ("splat_atomic", "SplatArguments", atomic_threads(s))})
    return text + f'static_assert(kn::STRIP == {STRIP}, "as source.py says");\n'


@lru_cache(maxsize=1024)
def backward(dtype: str, s: Shape, by_depth: bool, by_values: bool, weights: Weights = PLAIN) -> str:
    """``splat_backward``, of what is asked for; ``s`` spreads a row over all 32 lanes of a warp."""
    members = _members(
        f"typedef {TYPES[dtype][0]} T; static constexpr bool BY_DEPTH = {int(by_depth)}, BY_VALUES = {int(by_values)};",
        VEC=s.vec, LANES=s.lanes, CHUNKS=s.chunks, UNROLL=max(2, ahead(dtype, s)), **weights._asdict(),
    )  # fmt: skip
    # Blocks of a multiprocessor: as many as do not make it spill.
    blocks = 5 if by_depth and s.numbers * TYPES[dtype][3] <= 8 else 3
    kernel = "splat_backward", "SplatArguments", f"{BACKWARD_THREADS}, {blocks}"
    return _unit("splat.cuh", members, {"splat_backward": kernel})


@lru_cache(maxsize=1024)
def softmax(dtype: str) -> str:
    """``depth_lse``."""
    return _unit("splat.cuh", "", {"depth_lse": (f"depth_lse<{TYPES[dtype][0]}>", "SplatArguments", 256)})


@lru_cache(maxsize=1024)
def sort() -> str:
    """The kernels of a sort by bucket."""
    names = ("sort_count", "sort_scan", "sort_scatter")
    kernels = {n: (n, "SortArguments", SORT_THREADS) for n in names}
    same = f"kn::SORT_THREADS == {SORT_THREADS} && kn::TILE_ITEMS == {SORT_TILE} && kn::DIGITS == {1 << DIGIT_BITS}"
    text = _unit("sort.cuh", "", {**kernels, "bucket_starts": ("bucket_starts", "StartArguments", SORT_THREADS)})
    return text + f'static_assert({same}, "as source.py says");\n'


@lru_cache(maxsize=1024)
def points() -> str:
    """The kernels of cells and runs."""
    runs = {n: (n, "RunArguments", 256) for n in ("run_keys", "run_items")}
    return _unit("frustum.cuh", "", {"frustum_cells": ("frustum_cells", "FrustumArguments", 256), **runs})
