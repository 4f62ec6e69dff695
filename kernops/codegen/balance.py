"""How a GPU's exponential unit and its plain cores share the powers of 2 of a formula, so that none waits.

The unit delivers 16 results a cycle in each multiprocessor. A formula with two of its functions for each pair, such as
exp(-|x - y|), keeps it busy longer than all else does the plain cores. These can compute powers of 2, too, by a
polynomial (``plain_exp2`` in ``cuda/math.cuh``); for how many of a thread's pairs they do is chosen here.
"""

from __future__ import annotations

from .facts import Facts
from .floors import EXP, FMA, PLAIN_POWER, gpu

#: Instructions of a pair besides those of its formula: reads of the tile, and the loop.
OVERHEAD = 0.8
#: The unit's share of time in which it counts as busy, as what waits for it comes in bursts: on an H200 this picks the
#: fastest share, or the next to it, for exp(-r) in 2, 3 and 5 dimensions, for Matern's kernel of 3/2 in 1, 2, 3 and 5
#: and of 5/2 in three, for exp(-r²) in one and for exp(-r²) / r in three.
BUSY = 0.95
#: Most slots of a column with which a thread evaluates one pair after the other (``Packs`` in cuda/data.cuh).
FEW_SLOTS = 8


#: Which pairs of 16, by their number: those of three are within a hundredth of the fastest of some 200 sets that were
#: tried for Matern's kernel of 3/2 on an H200, those of five within one of some 100 for the Laplacian. The compiler's
#: order of instructions depends on it, and with it up to a tenth of the time. Others are spread evenly.
OF_SIXTEEN = {3: (8, 11, 14), 5: (5, 9, 10, 12, 15)}


def bits(plain: int, pairs: int) -> int:
    """The set of ``plain`` of so many pairs, of which pair p is bit p."""
    if pairs == 16 and plain in OF_SIXTEEN:
        return sum(1 << p for p in OF_SIXTEEN[plain])
    return sum(1 << p for p in range(pairs) if (p + 1) * plain // pairs != p * plain // pairs)


def choices(pairs: int) -> tuple[int, ...]:
    """Numbers of pairs to choose from: odd ones. Spread evenly, 4 or 8 of 16 pairs would all be of one of two rows, and
    even numbers were not faster."""
    return (0, *range(1, pairs // 2 + 1, 2))


def plain_pairs(f: Facts, pairs: int, instructions: float, arch: tuple[int, int]) -> int:
    """Of so many pairs that a thread folds at a time, those whose powers of 2 the plain cores compute.

    Args:
        f: facts of a plan in float32.
        pairs: of a thread at a time.
        instructions: of a pair, the update of its state included, and those of the exponential unit.
        arch: the GPU's compute capability.
    """
    if not f.powers or f.n_col > FEW_SLOTS:
        return 0
    rates = gpu(arch).per_cycle

    def cycles(plain: int) -> float:
        """Of a multiprocessor, for a pair: those of the unit that takes longer."""
        share = plain / pairs * f.powers
        return max(
            (f.special - share) / (BUSY * rates[EXP]), (instructions + OVERHEAD + PLAIN_POWER * share) / rates[FMA]
        )

    return min(choices(pairs), key=cycles)
