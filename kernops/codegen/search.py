"""Which algorithm finds nearest neighbours: functions of sizes alone, to be read and tested without data.

The figures were measured on two cores with AVX-512; only their ratios matter.
"""

from __future__ import annotations

import math

#: More features are not pruned unless asked for, and more than these not at all: boxes in many dimensions are all about
#: equally near.
FEW_FEATURES, MOST_FEATURES = 8, 16
#: Indices have 31 bits, and the highest of them stands for none.
MOST_POINTS = 2**31 - 2
#: Work on a query or a point before the search, which puts it in order, counted in pairs of brute force.
POINT_PAIRS = 650


def pruning_pays(m: int, n: int, dim: int, k: int) -> bool:
    """Whether to try to prune the search of the ``k`` nearest of ``n`` points for ``m`` queries.

    Args:
        m, n: numbers of queries and points.
        dim: number of features.
        k: neighbours of each query.
    """
    if not 1 <= dim <= FEW_FEATURES or max(m, n) > MOST_POINTS or 8 * k > n:
        return False
    # The order is in vain where the search is given up. In few dimensions that is rare, in more it must cost little.
    share = 0.25 if dim <= 4 else 0.1
    return POINT_PAIRS * (m + n) <= share * m * n


def worth(n: int, dim: int, k: int) -> float:
    """The share of pairs of which a pruned search can take the work in the time of brute force.

    Args:
        n: number of points.
        dim: number of features.
        k: neighbours of each query.
    """
    # Nanoseconds a pair: the arithmetic and, for brute force, insertions, which become rare in a long row.
    brute = 0.03 * dim + 250 * k / n
    # Both insert about as often as in a row of random order; half of a pair's work each, by blocks of 32.
    insertions = 16 * k * (1 + math.log(n / k)) / n
    return min(0.5 + insertions, brute / (0.25 + 0.03 * dim))


# --- on a GPU ---------------------------------------------------------------------------------------------------------
#: Most neighbours: lists are in registers (cuda/ranked.cuh).
MOST_NEIGHBOURS_ON_GPU = 512
#: Pairs of brute force that take as long as the launches and the sort of a pruned search; more where the trial is more
#: likely to refuse.
FIXED_PAIRS, FIXED_PAIRS_OF_MORE_FEATURES = 2e9, 8e9


def pruning_pays_on_gpu(m: int, n: int, batch: int, dim: int, k: int) -> bool:
    """Whether to try to prune the search of the ``k`` nearest of ``n`` points for ``m`` queries on a GPU.

    The trial, the cost of which is bounded, then decides with the data.

    Args:
        m, n: numbers of queries and points of one batch element.
        batch: number of batch elements.
        dim: number of features.
        k: neighbours of each query.
    """
    if not 1 <= dim <= FEW_FEATURES or max(m, n) > MOST_POINTS or k > MOST_NEIGHBOURS_ON_GPU or 32 * k > n:
        return False
    return m * n * batch >= (FIXED_PAIRS if dim <= 4 else FIXED_PAIRS_OF_MORE_FEATURES)


def worth_on_gpu(dim: int) -> float:
    """The share of boxes that a query may look at on average in a pruned search that is faster than brute force.

    A look took 0.24 ns on an H200 with all its multiprocessors at work, brute force 0.006 ns and 0.003 ns more for each
    feature for the 32 columns of a box. A fifth is left for what a trial cannot see.
    """
    return 0.8 * (0.006 + 0.003 * dim) / 0.24
