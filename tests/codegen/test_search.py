"""When a search of neighbours is pruned."""

from __future__ import annotations

import pytest

from kernops.codegen.search import MOST_POINTS, pruning_pays, pruning_pays_on_gpu, worth, worth_on_gpu


@pytest.mark.parametrize("dim", [1, 3, 8])
@pytest.mark.parametrize(("m", "n"), [(14_000, 14_000), (100_000, 100_000), (8000, 100_000), (10**6, 7000)])
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


def test_more_dimensions_ask_for_more_points() -> None:
    assert pruning_pays(6000, 6000, 4, 10)
    assert not pruning_pays(6000, 6000, 5, 10)
    assert not pruning_pays(9000, 9000, 5, 10)


def test_brute_force_is_hardest_to_beat_in_long_rows_of_few_features() -> None:
    assert 0.2 < worth(10**6, 2, 10) < worth(10**6, 3, 10) < worth(20_000, 3, 10) < 0.6
    assert 0.4 < worth(10**6, 8, 10) < 0.6
    assert worth(6000, 3, 100) > 1  # most of the work is insertions, the same for both


def test_more_points_never_speak_against_it() -> None:
    pays = [pruning_pays(n, 20_000, 3, 10) for n in range(0, 20_000, 500)]
    assert pays == sorted(pays)


@pytest.mark.parametrize(
    ("m", "n", "batch", "dim", "k", "pays"),
    [
        (100_000, 100_000, 1, 3, 10, True),
        (100_000, 100_000, 1, 8, 10, True),
        (50_000, 50_000, 1, 3, 512, True),
        (50_000, 50_000, 1, 5, 10, False),  # the trial is more likely to refuse, and costs as much
        (10_000, 10_000, 1, 3, 10, False),  # launches take longer than brute force
        (10_000, 10_000, 30, 3, 10, True),
        (100_000, 100_000, 1, 9, 10, False),
        (100_000, 100_000, 1, 3, 513, False),
        (10**6, 10_000, 1, 3, 500, False),
        (10**6, MOST_POINTS + 1, 1, 3, 10, False),
    ],
)
def test_on_a_gpu(m: int, n: int, batch: int, dim: int, k: int, pays: bool) -> None:
    assert pruning_pays_on_gpu(m, n, batch, dim, k) == pays


def test_worth_on_a_gpu_grows_with_the_work_of_a_pair() -> None:
    shares = [worth_on_gpu(dim) for dim in range(1, 17)]
    assert shares == sorted(shares) and shares[0] > 0.02 and shares[-1] < 0.25
