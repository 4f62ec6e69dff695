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
