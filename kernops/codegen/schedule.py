"""How a reduction runs on a GPU, as data: one pure function from facts to a :class:`Schedule`; needs no GPU to test.

The kernel (``cuda/tile.cuh``) gives each thread R rows and folds Q columns at a time into R states of C components. The
choice of R, Q and C minimises a model of the cycles that a multiprocessor spends per pair:

* every instruction of a warp takes a quarter of a cycle (four schedulers), twice that in float64;
* every number of a column that a thread reads from its tile serves R rows, every number of a row that does not fit in
  registers serves Q columns, and a warp reads one number a cycle;
* what one chunk of C components shares with the next (a distance, say) is computed anew for each chunk, and the tile is
  loaded anew;
* registers are limited, and few warps a multiprocessor hide latencies badly.

The constants are rough on purpose: they only have to rank the candidates. Everything else follows from sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from .balance import choices, plain_pairs
from .facts import Facts

THREADS = 128
#: Few rows: the columns are split until there are FEW_BLOCKS a multiprocessor, into ranges of MIN_SPAN at least. Long
#: ranges are split further, so that the last wave of blocks, partly idle, is one of many; not if the results have many
#: components, for which the scratch would be large, and less for states larger than a sum's. Lists of K start anew in
#: each split, and are long to merge.
FEW_BLOCKS, MIN_SPAN = 8, 64
MANY_BLOCKS, MANY_BLOCKS_OF_SUMS, LONG_SPAN, FEW_COMPONENTS = 24, 80, 2048, 4
LIST_BLOCKS, LIST_SPAN = 2, 256
#: Pairs of so few instructions are short against what a list costs to fill anew.
SHORT = 32
#: So few columns are not split: a second kernel takes longer to launch than they take.
FEW_COLUMNS = 1024
#: A thread gets R rows only if there are R times so many of them: else more and shorter blocks are better.
ROWS_FOR_EACH = 5000
#: Row slots up to this number are kept in registers.
FEW_SLOTS = 20
#: Words of registers for row slots at most.
ROW_WORDS = 64
MAX_REGISTERS = 200
#: Longest list that is kept in a thread's registers, places of all lists of a thread, and places of a list's queue
#: beyond those of the columns that a thread takes at a time (cuda/kmin.cuh).
REGISTER_LIST, MOST_PLACES, QUEUE = 16, 32, 4
#: Longest list that a warp keeps, 32 places in two registers of a lane; words of lists, and of numbers computed at a
#: time, that a lane has registers for. A warp gets R rows only if there are R times so many of them.
WARP_LIST, LIST_WORDS, PAIR_WORDS, WARP_ROWS_FOR_EACH = 512, 32, 32, 2048
#: With more rows than these, or more slots of a row, threads keep short lists faster than warps do.
FEW_ROWS_OF_LISTS, FEW_SLOTS_OF_LISTS = 30_000, 8
#: Shared memory of a block that still leaves room for other blocks on the multiprocessor.
TILE_BYTES = 24 << 10
#: Tiles that are brought to shared memory at a time, at most, if that still leaves room for so many blocks: their warps
#: hide what others wait for.
MOST_TILES, ROOM_FOR = 4, 11
#: Of kernels whose threads need at most so many registers by the model: others have none to spare for another loop,
#: and wait less often, since they do more for each column.
LIGHT = 104
#: With at most so many, the compiler is told to leave room for so many blocks: else it spares registers for more, and
#: puts the uses of one unit side by side for want of them.
FEW_REGISTERS, BLOCKS_EACH = 98, 6
#: Threads that merge the splits of a row: many for few rows, whose splits are many, and few where rows keep a GPU busy.
LANES, LANES_OF_MANY_ROWS, MANY_ROWS = 16, 4, 8192
#: Instructions that are written out for all pairs of a thread; more take long to compile and gain nothing.
MAX_CODE = 640
MAX_GRID = 2**31 - 1


@dataclass(frozen=True)
class State:
    """Words of registers and instructions of an update, each as (fixed, per component)."""

    words: tuple[int, int]
    update: tuple[int, int]


STATES = {
    "Sum": State((0, 3), (0, 1)),
    "LogSumExp": State((0, 6), (0, 8)),
    "SumSoftMaxWeight": State((6, 4), (8, 1)),
    "Min": State((0, 1), (0, 3)),
    "MinArgMin": State((0, 2), (0, 5)),
    "KMin": State((4, 0), (3, 0)),  # of a heap; a list in registers takes two words a place
}


@dataclass(frozen=True)
class Device:
    """What the schedule needs to know of a GPU: multiprocessors, bytes of shared memory of a block, arch (9, 0)."""

    multiprocessors: int
    shared: int
    arch: tuple[int, int]


@dataclass(frozen=True)
class Schedule:
    """How a reduction runs; the fields above the line are compiled in, those below are passed at run time.

    Attributes:
        threads, rows, cols: threads of a block; R rows a thread; Q columns at a time.
        tile, tiles: columns between two flushes; number of such tiles in shared memory.
        chunk, chunks: components of the result that a block computes; number of such chunks.
        rows_in_memory, cols_in_memory: whether slots are packed into global scratch first.
        unroll: longest loop that is unrolled in full.
        plain: of the rows times columns of a thread, pairs whose powers of 2 are left to the plain cores.
        blocks_each: blocks that registers shall leave room for on a multiprocessor; 0 leaves it to the compiler.
        list: for KMin, whether a list is kept by a ``"warp"`` (``rows``, ``cols`` are then those of a warp and of a
            lane), or by a thread in ``"registers"`` or as a ``"heap"``; else empty.
        lanes: threads that merge the splits of a row.
        long_index: whether a column's index needs 64 bits.
        row_blocks: blocks that cover the rows of one batch element.
        splits, span: the columns are cut into ``splits`` ranges of ``span``.
        blocks: blocks of the whole call.
        shared: bytes of shared memory of a block: of its tiles, and of the queues before lists in registers.
        scratch: numbers (or pairs of a number and an index, for KMin) of partial results.
        packed_rows, packed_cols: numbers of packed slots.
    """

    threads: int
    rows: int
    cols: int
    tile: int
    tiles: int
    chunk: int
    chunks: int
    rows_in_memory: bool
    cols_in_memory: bool
    unroll: int
    plain: int
    blocks_each: int
    list: str
    lanes: int
    long_index: bool
    # ---
    row_blocks: int
    splits: int
    span: int
    blocks: int
    shared: int
    scratch: int
    packed_rows: int
    packed_cols: int


# --- the model -------------------------------------------------------------------------------------------------------
def _up(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


@dataclass(frozen=True)
class Shape:
    """A candidate: rows and columns of a thread, components of a block, where row slots live."""

    rows: int
    cols: int
    chunk: int
    rows_in_memory: bool


def _state_words(f: Facts, chunk: int) -> int:
    if f.core == "KMin" and f.k <= REGISTER_LIST:
        return 2 * f.k + 1
    fixed, each = STATES[f.core].words
    return fixed + each * chunk


def registers(f: Facts, s: Shape, itemsize: int) -> int:
    """A rough count of the registers of a thread; column slots are loaded well before they are used."""
    words = s.rows * _state_words(f, s.chunk) + s.rows * s.cols * (1 + f.stored)
    words += s.cols * ((2 if s.rows_in_memory else min(f.fixed.cols, 12)) + s.chunk * f.each.cols)
    words += s.rows * (2 if s.rows_in_memory else f.n_row)
    return 28 + words * itemsize // 4


def cycles(f: Facts, s: Shape, itemsize: int) -> float:
    """The model's cycles of a multiprocessor for one pair and all components, for a warp of pairs."""
    words, chunks, pairs = itemsize // 4, _up(f.dim, s.chunk), s.rows * s.cols
    update_fixed, update_each = STATES[f.core].update
    issue: float = f.fixed.instructions + update_fixed + s.chunk * (f.each.instructions + update_each)
    issue = issue * words + (8 + 4 * s.rows_in_memory) / pairs
    read: float = (f.fixed.cols + s.chunk * f.each.cols) / s.rows
    if s.rows_in_memory:
        read += 2 * (f.fixed.rows + s.chunk * f.each.rows) / s.cols  # half of them come from the L2 cache
    need = registers(f, s, itemsize)
    warps = 65536 / (need * 32)
    latency = 1 + max(0, 16 - warps) / 24 + 0.5 / pairs
    if chunks > 1:
        latency *= 1.25  # measured: another pass over the columns costs more than the model says
    load = 1.5 * f.n_col / (s.rows * THREADS)  # of a tile, for all rows of the block
    # instructions and reads overlap, though not perfectly
    return chunks * (max(issue / 4, read * words) + 0.1 * min(issue / 4, read * words) + load * words) * latency


def _candidates(f: Facts, itemsize: int, most_rows: int) -> Iterator[Shape]:
    lists = f.core == "KMin"  # of one component each
    chunks = {1} if lists else {min(f.dim, c) for c in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)}
    if not lists:
        chunks |= {_up(f.dim, _up(f.dim, c)) for c in chunks}  # of equal length
    for rows, cols, chunk, memory in product((1, 2, 4), (1, 2, 4, 8), sorted(chunks), (False, True)):
        s = Shape(rows, cols, chunk, memory)
        if rows <= most_rows and cols * itemsize <= 32 and (_may_pack if memory else _may_keep)(f, s, itemsize):
            code = (f.rolled if memory else f.fixed.instructions) + chunk * f.each.instructions
            small = registers(f, s, itemsize) <= MAX_REGISTERS and rows * cols * code <= MAX_CODE
            small = small and not (lists and f.k <= REGISTER_LIST and rows * f.k > MOST_PLACES)
            few = rows * cols * itemsize <= 4 * (2 if f.slow else 32 if memory else 16)  # more take long to compile
            if (small and few) or rows == cols == chunk == 1:
                yield s


def _may_keep(f: Facts, s: Shape, itemsize: int) -> bool:
    """Whether row slots may live in registers: indexed by constants, in loops that are unrolled, and not too many."""
    if s.chunk < f.dim and f.row_by_component:
        return False
    if f.core == "KMin" and f.k > REGISTER_LIST and s.rows > 1:
        return False  # a thread inserts into one heap at a time, while its other rows wait
    # measured: two rows and more columns are faster than four rows, for every core
    return s.rows <= 2 and s.rows * f.n_row * itemsize <= 4 * ROW_WORDS


def _may_pack(f: Facts, s: Shape, itemsize: int) -> bool:
    """Whether row slots may be packed into memory: that takes a pass of its own, so few of them are kept at hand."""
    return f.n_row > FEW_SLOTS or (s.chunk < f.dim and f.row_by_component)


@lru_cache(maxsize=1024)
def shape(f: Facts, itemsize: int, most_rows: int) -> Shape:
    """The best candidate; of equals, the first."""
    return min(_candidates(f, itemsize, most_rows), key=lambda s: cycles(f, s, itemsize))


def warp_shape(f: Facts, itemsize: int, m: int) -> Shape | None:
    """Rows of a warp and columns of a lane where warps keep the lists, or None where threads must."""
    words = itemsize // 4
    if f.core != "KMin" or f.k > WARP_LIST or max(f.n_row, f.n_col) > FEW_SLOTS or f.slow:
        return None
    if f.dim > 1 and f.row_by_component:
        return None
    if f.k <= REGISTER_LIST and (m > FEW_ROWS_OF_LISTS or f.n_row > FEW_SLOTS_OF_LISTS):
        return None
    slots = _up(f.k, 32)
    rows = cols = 1
    most = min(4, max(1, m // WARP_ROWS_FOR_EACH))
    while 2 * rows <= most and 2 * rows * slots * (words + 1) <= LIST_WORDS and 2 * rows * f.n_row * words <= ROW_WORDS:
        rows *= 2
    pair = rows * words * (1 + f.stored)
    while cols < 4 and 2 * cols * pair <= PAIR_WORDS and 2 * cols * f.n_col * words <= ROW_WORDS:
        cols *= 2
    return Shape(rows, cols, 1, False)


def tile_of(n_col: int, cols: int, itemsize: int, shared: int) -> tuple[int, int]:
    """``(columns of a tile, bytes)``; 0 bytes where a tile would not fit in shared memory."""
    slots = n_col | 1  # as cuda/data.cuh lays groups of columns out
    for tile in (256, 128, 64):
        if tile * slots * itemsize <= min(TILE_BYTES, shared):
            return tile, tile * slots * itemsize
    tile = max(32, cols)
    size = tile * slots * itemsize
    return (tile, size) if size <= shared // 2 else (256, 0)


def _tiles(size: int, device: Device) -> int:
    """Tiles of so many bytes to bring to shared memory at a time."""
    return next((k for k in range(MOST_TILES, 1, -1) if k * size <= device.shared // ROOM_FOR), 1)


def _plain(f: Facts, s: Shape, itemsize: int, device: Device) -> int:
    """Pairs of a thread whose powers of 2 are left to the plain cores."""
    if itemsize != 4 or f.core == "KMin" or s.rows_in_memory:
        return 0
    update_fixed, update_each = STATES[f.core].update
    issued = f.fixed.instructions + update_fixed + s.chunk * (f.each.instructions + update_each) - f.fused - f.powers
    return plain_pairs(f, s.rows * s.cols, issued, device.arch)


def merge_lanes(rows: int) -> int:
    """Threads that merge the splits of one of so many rows."""
    return LANES if rows < MANY_ROWS else LANES_OF_MANY_ROWS


def _split(columns: int, blocks: int, f: Facts, device: Device) -> tuple[int, int]:
    """``(splits, span)`` of so many columns, where so many blocks would run without."""

    def wanted(blocks_each: int, span: int) -> int:
        return min(_up(device.multiprocessors * blocks_each, blocks), columns // span)

    if f.core == "KMin":
        few = f.fixed.instructions < SHORT
        splits = wanted(LIST_BLOCKS if few else 3 * LIST_BLOCKS, max(LIST_SPAN, 32 * f.k))
    else:
        splits = wanted(FEW_BLOCKS, MIN_SPAN)
        if f.dim <= FEW_COMPONENTS:
            many = MANY_BLOCKS_OF_SUMS if f.core == "Sum" else MANY_BLOCKS
            splits = max(splits, wanted(many, LONG_SPAN))
    splits = max(1, splits) if columns > FEW_COLUMNS else 1
    span = _up(_up(columns, splits), 32) * 32  # whole groups of columns
    return _up(columns, span), span


def _most_rows(m: int) -> int:
    return min(4, 1 << max(1, m // ROWS_FOR_EACH).bit_length() - 1)


def candidates(f: Facts, m: int, n: int, batch: int, itemsize: int, device: Device, count: int) -> tuple[Schedule, ...]:
    """The ``count`` schedules of which the model thinks best, that of :func:`schedule` first.

    Where the plain cores help the exponential unit, that one with other shares comes after them.
    """
    found = sorted(_candidates(f, itemsize, _most_rows(m)), key=lambda s: cycles(f, s, itemsize))
    best, *others = (schedule(f, m, n, batch, itemsize, device, s) for s in found[:count])
    shares = [k for k in choices(best.rows * best.cols) if k != best.plain] if best.plain else []
    return best, *others, *(replace(best, plain=k) for k in shares)


def schedule(f: Facts, m: int, n: int, batch: int, itemsize: int, device: Device, s: Shape | None = None) -> Schedule:
    """How to reduce ``n`` columns for each of ``m`` rows of each of ``batch`` batch elements.

    Pure and deterministic. ``itemsize`` is 4 or 8 bytes; ``s`` is another candidate than the best.
    """
    if min(m, n, batch) < 1:
        raise ValueError(f"m, n and batch must be at least 1; got {m}, {n}, {batch}")
    warp = warp_shape(f, itemsize, m)
    s = warp or s or shape(f, itemsize, _most_rows(m))
    place = "" if f.core != "KMin" else "warp" if warp else "registers" if f.k <= REGISTER_LIST else "heap"
    chunks = _up(f.dim, s.chunk)
    row_blocks = _up(m, (THREADS // 32 if warp else THREADS) * s.rows)
    splits, span = _split(n, row_blocks * chunks * batch, f, device)
    index = 8 if n > 2**31 - 1 else 4
    queues = THREADS * s.rows * (s.cols + QUEUE) * (itemsize + index) if place == "registers" else 0
    tile, shared = tile_of(f.n_col, s.cols, itemsize, device.shared - queues)
    in_memory = shared == 0 and f.n_col > 0
    need = registers(f, s, itemsize) if itemsize == 4 and not s.rows_in_memory and f.core != "KMin" else MAX_REGISTERS
    tiles = _tiles(shared, device) if need <= LIGHT and not in_memory else 1
    results = batch * chunks * m * splits if splits > 1 else 0
    return Schedule(
        threads=THREADS,
        rows=s.rows,
        cols=s.cols,
        tile=tile,
        tiles=tiles,
        chunk=s.chunk,
        chunks=chunks,
        rows_in_memory=s.rows_in_memory,
        cols_in_memory=in_memory,
        unroll=64 if not s.rows_in_memory else min(64, max(8, 64 // (s.rows * s.cols), s.chunk, f.stored)),
        plain=_plain(f, s, itemsize, device),
        blocks_each=BLOCKS_EACH if need <= FEW_REGISTERS else 1 if f.core == "KMin" else 0,
        list=place,
        lanes=merge_lanes(batch * chunks * m),
        long_index=index == 8,
        row_blocks=row_blocks,
        splits=splits,
        span=span,
        blocks=row_blocks * splits * chunks * batch,
        shared=shared * tiles + queues,
        scratch=results * (f.k if f.core == "KMin" else _saved(f.core, s.chunk)),
        packed_rows=batch * row_blocks * THREADS * s.rows * f.n_row if s.rows_in_memory else 0,
        packed_cols=batch * _up(n, s.cols) * s.cols * (f.n_col | 1) if in_memory else 0,
    )


def _saved(core: str, chunk: int) -> int:
    """Numbers that a saved state takes at most: sizeof in cuda/reductions.cuh, where an index counts as three."""
    return {
        "Sum": 3 * chunk,
        "LogSumExp": 10 * chunk,
        "SumSoftMaxWeight": 2 * (3 + 2 * (chunk + 1)),
        "Min": chunk,
        "MinArgMin": 4 * chunk,
    }[core]
