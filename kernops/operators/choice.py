"""Which preconditioner is the quickest for so many right-hand sides: an estimate by a few measured rates."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

#: Rank of a preconditioner, where none is asked for: at least the first. More for few points, where it costs little and
#: makes determinants more accurate: the second divided by their number. And more for many, whose products cost so much
#: more than a preconditioner does, on a processor above all: one for so many points, up to the last. That is less on a
#: processor, whose memory the tables of a higher rank would fill.
RANK, RANK_TIMES_POINTS = 100, 1_500_000
POINTS_OF_RANK, MOST_RANK = {"cpu": 50, "other": 200}, {"cpu": 500, "other": 2000}
#: Fewer right-hand sides than this are solved for with the default: they are quick in any case, and whoever solves for
#: a vector expects memory for vectors.
FEWEST = 32
#: Highest rank that is considered, and its share of the points: beyond it, a decomposition of the whole is not far.
HIGHEST, HIGHEST_SHARE = 8192, 1 / 4
#: Conjugate gradients take about so many iterations times the root of the condition number, for variances to a
#: thousandth: 40, 8, 4, 2 were counted at ranks of 250, 1000, 2000, 4000 (50,000 points, 9 dimensions), and 34, 28, 13,
#: 8 at 100, 500, 1000, 2000 (20,000, 32), where the estimate of ``iterations`` is 27, 7, 4, 3 and 72, 24, 14, 8.
ITERATIONS = 2.5
#: Applications of Cholesky's factor: one, and a second where that of float32 lost digits, as it seldom does.
APPLIED = 1.25


@dataclass(frozen=True)
class Rates:
    """What a device does in a second, and what memory may be used; of the rates only their ratios matter.

    Attributes:
        product: multiplications and additions of a product with many columns, 2 N² for each.
        pairs: entries of the kernel that are stored.
        low: multiplications and additions of a product with a table (N, rank), 8 N rank for each column and iteration.
        vectors: numbers of vectors (N) that an iteration's updates read and write.
        making: multiplications and additions of a decomposition of low rank, 6 N rank².
        column: seconds for each column of that, most of them of the host.
        factor: multiplications and additions of Cholesky's decomposition, N³/3.
        triangular: the same of two triangular solutions, 2 N² for each column.
        share: of the memory that is free.
        most: bytes.
    """

    product: float
    pairs: float
    low: float
    vectors: float
    making: float
    column: float
    factor: float
    triangular: float
    share: float
    most: float


#: Measured in float32: on an H200, and on two cores of a server's processor (beside other work, which halved all of
#: them), where memory that is not taken for tables is what this package is for. In float64, and for points so far apart
#: that matrix units are too inexact for them, products take longer, and what is chosen is not the best, but better.
RATES = {
    "cuda": Rates(85e12, 3e10, 45e12, 3e11, 50e12, 1.2e-4, 40e12, 35e12, 1 / 4, float("inf")),
    "cpu": Rates(60e9, 4e7, 90e9, 1e9, 90e9, 1.5e-3, 60e9, 60e9, 1 / 16, 128 << 20),
}
#: Updates of an iteration, in vectors.
UPDATES = 20
#: Tables (N, rank) that are stored at once while one of low rank is made.
TABLES = 4


@dataclass(frozen=True)
class Choice:
    """A preconditioner, and what is expected of it.

    Attributes:
        kind, rank: of ``make_preconditioner``.
        iterations, seconds: expected, all in all; the seconds are those of the device that the rates are of.
        nbytes: that are stored at once.
    """

    kind: str
    rank: int
    iterations: float
    seconds: float
    nbytes: float


def choose(
    n: int, columns: int, device: str, itemsize: int, free: float, rank: int, rest: float, decay: float
) -> Choice:  # fmt: skip
    """The preconditioner that is expected to be the quickest for a matrix K + D with a diagonal D that was added.

    The candidates are pivoted Cholesky decompositions of ``rank``, which is made already, and of twice, four times ...
    as much; and Cholesky's factor of the stored matrix. A higher rank takes time to make and to apply, and saves
    iterations; the factor leaves one.

    Args:
        n: points.
        columns: right-hand sides, all in all.
        device: ``"cuda"``, ``"cpu"`` or another type, for which nothing is known and the default is kept.
        itemsize: bytes of a number.
        free: bytes of memory that are free, of which a share is used.
        rank: columns of L, the pivoted Cholesky decomposition that is made.
        rest: trace of D^-½ (K - L Lᵀ) D^-½, what L leaves.
        decay: p, if the trace of what is left falls with the rank r like r⁻ᵖ.

    Example:
        >>> choose(20_000, 1000, "cuda", 4, 100e9, rank=100, rest=8e4, decay=0.3).kind
        'cholesky'
        >>> choose(50_000, 1000, "cuda", 4, 100e9, rank=250, rest=3e4, decay=1.0).rank
        2000
        >>> choose(20_000, 1000, "cuda", 4, 1e9, rank=100, rest=10.0, decay=3.0).rank
        100
    """
    r = RATES.get(device)
    if r is None or columns < FEWEST or rank < 1:
        return Choice("pivoted_cholesky", rank, iterations(rank, rank, rest, decay), 0.0, 0.0)
    room = min(r.share * free, r.most)
    product = 2.0 * n * n * columns / r.product + UPDATES * n * columns / r.vectors
    found = []
    other = rank
    while other == rank or (other <= min(HIGHEST, HIGHEST_SHARE * n) and TABLES * n * other * itemsize <= room):
        count = iterations(other, rank, rest, decay)
        each = product + 8.0 * n * other * columns / r.low
        made = 0.0 if other == rank else 6.0 * n * other**2 / r.making + other * (n / r.pairs + r.column)
        found.append(Choice("pivoted_cholesky", other, count, made + count * each, TABLES * n * other * itemsize))
        other *= 2
    if itemsize * n * n <= room:
        made = n * n / r.pairs + n**3 / 3 / r.factor
        each = product + 2.0 * n * n * columns / r.triangular
        found.append(Choice("cholesky", n, APPLIED, made + APPLIED * each, itemsize * n * n))
    return min(found, key=lambda c: c.seconds)


def iterations(rank: int, made: int, rest: float, decay: float) -> float:
    """Iterations that are expected at ``rank``, from the trace ``rest`` that a rank of ``made`` leaves, and its decay.

    The condition number is one plus the largest eigenvalue of what is left, which is taken for the trace spread over
    as many directions as L has.
    """
    left = rest * (max(made, 1) / max(rank, 1)) ** max(decay, 0.0)
    return ITERATIONS * (1 + left / max(rank, 1)) ** 0.5


def default_rank(n: int, device: torch.device) -> int:
    """The rank of a preconditioner for ``n`` rows, where none is asked for."""
    each, most = (table.get(device.type, table["other"]) for table in (POINTS_OF_RANK, MOST_RANK))
    return min(n, max(RANK, RANK_TIMES_POINTS // max(n, 1), min(n // each, most)))


def free_memory(device: torch.device) -> float:
    """Bytes of memory that are free on a device; 0 where that is not known."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    if device.type != "cpu":
        return 0.0
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, OSError, ValueError):  # not on Windows
        return 0.0
