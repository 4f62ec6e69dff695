"""When and how a reduction runs on matrix units, as data: one pure function; needs no GPU to test."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from ..formula.graph import topological
from ..formula.plan import Plan
from .matrix import Form, matrix_form
from .schedule import Device, merge_lanes

#: Of a panel of rows and of a tile of columns.
POINTS = 128
#: Fewest components that are packed in two parts. Points of at most TIGHT components lie with their norms in one part,
#: if the formula is an exponential of their distance.
TIGHT = 11
#: Components in sixteens that one product sums before its result is added as floats: the unit cuts its sums off.
MOST_STEPS, CHUNK_STEPS = 8, (6, 5, 4, 3, 2, 1)
#: Pairs times components below which the survey and the packing take longer than they save.
LEAST_WORK, LEAST_PAIRS, LEAST_ROWS, LEAST_COLUMNS = 2**30, 2**26, 64, 512
#: Tight points gain less, of scalar results and of a value with up to three derivatives.
LEAST_TIGHT_PAIRS, LEAST_MOMENT_PAIRS, FEW_DERIVATIVES = 2**31, 2**28, 4
#: Components of the result that a block computes by the second product.
WIDE = (8, 16, 32, 64)
#: Blocks of tight points that share a multiprocessor, by the most components that each sums; up to NARROW components, a
#: warp finishes few columns at once for the sake of registers, and so of blocks.
TIGHT_BLOCKS, NARROW = ((8, 6), (16, 4), (32, 2)), 16
#: Tiles whose sums are added plainly, where no registers are left to compensate them.
MOST_TILES = 512
#: By whether points are tight: tiles that a split costs, and how near the best number of splits is near enough.
SPLITS = {False: (3, 1.02), True: (2, 1.005)}
#: Bytes of scratch of all batch elements: points are packed for each, also where they are the same.
MOST_SCRATCH = 2 << 30
RESERVED = 1 << 10  # bytes of shared memory that a block has besides its own
#: With more steps the matrix unit takes longer than the exponential unit. Of 32 exponentials, by warps and by
#: warpgroups, those that plain cores compute: measured, as what waits for what is beyond a model.
SOFT_STEPS, SOFT_WARPS, SOFT_GROUPS = 3, 8, 2
SOFT_OPS = {"Mul", "Neg", "Exp2", "Var", "Const"}


@dataclass(frozen=True)
class MatrixSchedule:
    """How a reduction runs on matrix units; the fields above the line are compiled in.

    Attributes:
        tight: points and norms in one part.
        steps: of 16 components, of a part's chunk; 1 to 8.
        chunks: of a part.
        resident: whether a block keeps its rows in shared memory.
        groups: whether warpgroups multiply (sm_90a), else warps.
        turns: whether the two warpgroups of a block multiply in turns.
        per_multiprocessor: blocks that share a multiprocessor, for which registers are limited.
        stages: chunks in shared memory.
        sub, sixteens: times eight columns, and times sixteen rows, that a warp finishes at once.
        soft: how many of 32 exponentials are polynomials.
        width, pieces: components of the result of a block; number of such pieces.
        lanes, long_index: as in ``Schedule``.
        row_blocks, tiles: panels of rows, tiles of columns.
        splits, span: the columns are cut into ``splits`` ranges of ``span``, a multiple of 128.
        blocks, shared: of the main kernel.
        survey, rows, cols, partial: bytes of scratch.
    """

    tight: bool
    steps: int
    chunks: int
    resident: bool
    groups: bool
    turns: bool
    per_multiprocessor: int
    stages: int
    sub: int
    sixteens: int
    soft: int
    width: int
    pieces: int
    lanes: int
    long_index: bool
    # ---
    row_blocks: int
    tiles: int
    splits: int
    span: int
    blocks: int
    shared: int
    survey: int
    rows: int
    cols: int
    partial: int


def _up(a: int, b: int) -> int:
    return -(-a // b)


def matrix_schedule(plan: Plan, m: int, n: int, batch: int, itemsize: int, device: Device) -> MatrixSchedule | None:
    """How to reduce ``n`` columns for ``m`` rows by matrix units; None where plain cores are to do it.

    Pure and deterministic; arguments as for :func:`kernops.codegen.schedule.schedule`.
    """
    if min(m, n, batch) < 1:
        raise ValueError(f"m, n and batch must be at least 1; got {m}, {n}, {batch}")
    form = matrix_form(plan) if itemsize == 4 and device.arch >= (8, 0) else None
    if form is None or not _worth(form, plan.dim, m, n, batch):
        return None
    s = build(plan, form, m, n, batch, device)
    return None if s is None or batch > 1 and s.rows + s.cols + s.partial > MOST_SCRATCH else s


def _worth(form: Form, dim: int, m: int, n: int, batch: int) -> bool:
    if m < LEAST_ROWS or n < LEAST_COLUMNS:
        return False
    pairs = m * n * batch
    if form.length <= TIGHT:
        if not form.square or form.exponent is None:
            return False
        if form.rhs is None:
            return pairs >= LEAST_TIGHT_PAIRS
        return pairs >= (LEAST_MOMENT_PAIRS if form.rhs.moment and dim <= FEW_DERIVATIVES else LEAST_PAIRS)
    return pairs >= LEAST_PAIRS and pairs * (form.length + (8 * dim if form.wide else 0)) >= LEAST_WORK


def build(plan: Plan, form: Form, m: int, n: int, batch: int, device: Device) -> MatrixSchedule | None:
    """The schedule, whether or not it is worth it; None if no variant fits the device."""
    tight = form.length <= TIGHT
    groups = device.arch == (9, 0) and not tight
    numbers = 4 * POINTS * (form.program.n_col + 1)
    room = device.shared - RESERVED
    found = _fitting(plan, form, groups, numbers, room)
    if found is None:
        return None
    width, rhs, steps, chunks, resident, stages, shared = found
    pieces = 1 if form.rhs is None else _up(form.rhs.count, width)
    row_blocks, tiles = _up(m, POINTS), _up(n, POINTS)
    light = plan.core == "Sum" and not form.wide  # whose states leave registers for two blocks
    several = _blocks_each(device, tight, groups, light, width, shared)
    fewest = _up(tiles, MOST_TILES) if form.wide and chunks > 1 else 1
    splits, span = _split(row_blocks * pieces * batch, tiles, device.multiprocessors * several, fewest, *SPLITS[tight])
    halves = chunks * (1 if tight else 2) * steps * 32 * POINTS
    moment = form.rhs is not None and form.rhs.moment != 0
    saved = 0 if splits == 1 and not moment else batch * m * splits * 4 * (
        width * pieces if form.wide else _saved(plan.core, width))  # fmt: skip
    return MatrixSchedule(
        tight=tight,
        steps=steps,
        chunks=chunks,
        resident=resident,
        groups=groups,
        turns=groups and several == 1,
        per_multiprocessor=several,
        stages=stages,
        sub=16 if not tight else 2 if form.wide and width <= NARROW else 4,
        sixteens=2 if tight and width <= 32 else 1,
        soft=_soft(plan, form, steps * chunks, groups),
        width=width,
        pieces=pieces,
        lanes=merge_lanes(batch * m),
        long_index=n > 2**31 - 1,
        row_blocks=row_blocks,
        tiles=tiles,
        splits=splits,
        span=span,
        blocks=row_blocks * splits * pieces * batch,
        shared=shared,
        survey=batch * _up(32 + 4 * form.length, 16) * 16,
        rows=batch * row_blocks * (halves + 4 * POINTS),
        cols=batch * tiles * (halves + numbers + rhs * pieces),
        partial=saved,
    )


def _soft(plan: Plan, form: Form, steps: int, groups: bool) -> int:
    """Where the exponential unit is what a kernel waits for, plain cores had better help it.

    The kernel then takes numbers of columns for factors, which are 0 where there is no column: none may be an exponent.
    """
    nodes = topological(*form.program.pair)
    simple = form.pure and all(x.op in SOFT_OPS for x in nodes) and sum(x.op == "Exp2" for x in nodes) == 1
    helped = simple and plan.core == "Sum" and not form.wide and steps <= SOFT_STEPS
    return (SOFT_GROUPS if groups else SOFT_WARPS) if helped else 0


def _blocks_each(device: Device, tight: bool, groups: bool, light: bool, width: int, shared: int) -> int:
    """Blocks that share a multiprocessor: several, if the registers of a thread suffice for what it sums."""
    newest = device.arch[0] >= 10  # whose compiler needs more registers
    if tight and light:
        wanted = 5 if width == 1 and not newest else 4
    elif tight:
        wanted = next((blocks for most, blocks in TIGHT_BLOCKS if width <= most), 1)
        wanted = min(wanted, 5) if newest else wanted
    else:
        wanted = 2 if groups and light else 1
    return max(1, min(wanted, (device.shared - RESERVED) // shared))


def _fitting(
    plan: Plan, form: Form, groups: bool, numbers: int, room: int
) -> tuple[int, int, int, int, bool, int, int] | None:
    """Components of a block, bytes of their right-hand sides, and the best of ``_variants`` that fits with them."""
    tight = form.length <= TIGHT
    widths: list[int] = [form.program.pair[-1].dim]
    if form.rhs is not None:
        components = form.rhs.count
        pieces = _up(components, WIDE[-1] if tight else WIDE[-2])
        best = next(w for w in WIDE if w * pieces >= components)
        widths = [w for w in reversed(WIDE) if w <= best]  # less, with more pieces, where shared memory is too small
    for width in widths:
        rhs = 32 * POINTS * (width // 8) + 4 * width if form.wide else 0
        variant = next(_variants(form.length, tight, groups, numbers, rhs, room), None)
        if variant is not None:
            return width, rhs, *variant
    return None


@lru_cache(maxsize=1024)
def _layouts(length: int, tight: bool) -> tuple[tuple[int, int, bool], ...]:
    """``(steps, chunks, resident)``, the best first."""
    if tight:
        return ((_up(3 * length + 6, 16), 1, True),)
    whole = _up(length, 16)
    chunked = sorted(CHUNK_STEPS, key=lambda s: _up(whole, s) * (3 * s + 2))  # products, and a wait for each chunk
    few = [(whole, 1, True)] if whole <= MOST_STEPS else []
    return (*few, *((s, _up(whole, s), True) for s in chunked), *((s, _up(whole, s), False) for s in chunked))


def _variants(
    length: int, tight: bool, groups: bool, numbers: int, rhs: int, room: int
) -> Iterator[tuple[int, int, bool, int, int]]:
    """``(steps, chunks, resident, stages, bytes of shared memory)`` of what fits."""
    for steps, chunks, resident in _layouts(length, tight):
        chunk = (1 if tight else 2) * steps * 32 * POINTS
        panel = chunk * chunks if resident else 0
        stage = chunk * (1 if resident else 2)
        if groups:
            bytes_of = {k: panel + k * stage + (k + 1) * (numbers + rhs) + 8 * (k + 1) + 4 * k for k in (4, 3, 2)}
            limit = room // 2 if bytes_of[2] <= room // 2 else room  # two blocks rather than more stages
            fits = [k for k, size in bytes_of.items() if size <= limit]
            if fits:
                yield steps, chunks, resident, fits[0], bytes_of[fits[0]]
        elif panel + 2 * (stage + numbers + rhs) + 16 <= room:
            yield steps, chunks, resident, 2, panel + 2 * (stage + numbers + rhs) + 16


def _split(blocks: int, tiles: int, slots: int, fewest: int, cost_of_one: int, near: float) -> tuple[int, int]:
    """``(splits, span)`` that keep the device busy to the end; at least ``fewest``. The last two as in ``SPLITS``.

    Blocks that began together do not end together: the last of them runs alone for about half of its time. As splits
    take memory, there are no more than bring it close to the best.
    """

    def cost(splits: int) -> float:
        each = _up(tiles, splits)
        return (_up(blocks * _up(tiles, each), slots) + 0.5) * (each + cost_of_one)

    most = max(1, min(64, tiles // 4))
    costs = {splits: cost(splits) for splits in range(1, most + 1)}
    least = min(costs.values())
    each = _up(tiles, max(fewest, next(splits for splits, found in costs.items() if found <= near * least)))
    return _up(tiles, each), each * POINTS


def _saved(core: str, components: int) -> int:
    """Numbers of a saved state: sizeof in cuda/reductions.cuh."""
    return {"Sum": 3 * components, "LogSumExp": 10 * components, "SumSoftMaxWeight": 2 * (3 + 2 * (components + 1))}[
        core
    ]
