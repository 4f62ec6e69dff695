"""Which algorithm finds nearest neighbours: a function of sizes alone, to be read and tested without data."""

from __future__ import annotations

#: More features are not pruned unless asked for, and this many are not pruned at all: boxes in many dimensions are all
#: about equally near.
FEW_FEATURES, MOST_FEATURES = 8, 16
#: Work on one query or point before the search, to put it in order, counted in pairs of brute force.
POINT_PAIRS = 650
#: That work is to be at most this share of brute force, lest little is won by pruning and much lost without success.
SHARE = 0.25
#: A search that looks at more than this share of the pairs is slower than brute force (0.8 where it looks at all).
WORTH = 0.6
#: Indices have 31 bits, and the highest of them stands for none.
MOST_POINTS = 2**31 - 2


def pruning_pays(m: int, n: int, dim: int, k: int) -> bool:
    """Whether to prune the search of the ``k`` nearest of ``n`` points for ``m`` queries, if the data let it.

    Args:
        m, n: numbers of queries and points.
        dim: number of features.
        k: neighbours of each query.
    """
    few = 1 <= dim <= FEW_FEATURES and max(m, n) <= MOST_POINTS
    return few and POINT_PAIRS * (m + n) <= SHARE * m * n and 8 * k <= n
