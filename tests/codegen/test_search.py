"""When a search of neighbours is pruned."""

from __future__ import annotations

import pytest

from kernops.codegen.search import MOST_POINTS, pruning_pays


@pytest.mark.parametrize("dim", [1, 3, 8])
@pytest.mark.parametrize(("m", "n"), [(10_000, 10_000), (100_000, 100_000), (3000, 100_000), (10**6, 5000)])
def test_many_points_in_few_dimensions(m: int, n: int, dim: int) -> None:
    assert pruning_pays(m, n, dim, 10)


@pytest.mark.parametrize(
    ("m", "n", "dim", "k"),
    [
        (10_000, 10_000, 9, 10),
        (10_000, 10_000, 0, 10),
        (100, 10**6, 3, 10),  # too few queries to put the points in order for
        (10**6, 100, 3, 10),
        (10_000, 10_000, 3, 5000),
        (0, 10_000, 3, 1),
        (MOST_POINTS + 1, 10_000, 3, 1),
    ],
)
def test_where_all_pairs_are_compared(m: int, n: int, dim: int, k: int) -> None:
    assert not pruning_pays(m, n, dim, k)


def test_more_points_never_speak_against_it() -> None:
    pays = [pruning_pays(n, 20_000, 3, 10) for n in range(0, 20_000, 500)]
    assert pays == sorted(pays)
