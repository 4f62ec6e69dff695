"""Which preconditioner is chosen, by numbers alone; and that estimates of it follow what it costs."""

from __future__ import annotations

import pytest
import torch

from kernops.operators.choice import FEWEST, HIGHEST, RATES, choose, default_rank, free_memory, iterations

GB = float(1 << 30)
#: Traces that were left, and their decay, on an H200 in the benchmark's problems (20,000 x 32, 50,000 x 9, 20,000 x 3).
ROUGH, MIDDLE, SMOOTH = (100, 8.4e4, 0.3), (250, 2.8e4, 1.0), (100, 17.0, 4.0)


@pytest.mark.parametrize(
    ("n", "columns", "free", "left", "want"),
    [
        (20_000, 1000, 130 * GB, ROUGH, ("cholesky", 20_000)),
        (50_000, 1000, 130 * GB, MIDDLE, ("pivoted_cholesky", 2000)),
        (20_000, 1000, 130 * GB, SMOOTH, ("pivoted_cholesky", 100)),
        (20_000, 1000, 4 * GB, ROUGH, ("pivoted_cholesky", 800)),  # 1.6 GB are more than a quarter of that
        (20_000, FEWEST - 1, 130 * GB, ROUGH, ("pivoted_cholesky", 100)),  # few right-hand sides
        (200_000, 1000, 130 * GB, ROUGH, ("pivoted_cholesky", 6400)),  # 160 GB do not fit
    ],
)
def test_on_a_gpu(n, columns, free, left, want):
    rank, rest, decay = left
    found = choose(n, columns, "cuda", 4, free, rank, rest, decay)
    assert (found.kind, found.rank) == want
    assert found.nbytes <= free / 4 or found.rank == rank


def test_on_a_processor_tables_stay_small():
    rank, rest, decay = ROUGH
    for n in (2500, 5000, 10_000, 20_000, 100_000):
        for itemsize in (4, 8):
            found = choose(n, 1000, "cpu", itemsize, 16 * GB, rank, rest, decay)
            assert found.nbytes <= RATES["cpu"].most or found.rank == rank
    assert choose(2500, 1000, "cpu", 4, 16 * GB, rank, rest, decay).kind == "cholesky"
    assert choose(20_000, 1000, "cpu", 4, 16 * GB, 400, rest, decay).rank == 400
    assert choose(2500, 1000, "cpu", 4, 0.0, rank, rest, decay).rank == rank  # nothing is free


def test_more_right_hand_sides_never_ask_for_less():
    rank, rest, decay = MIDDLE
    for n in (5000, 20_000, 60_000):
        ranks = [choose(n, e, "cuda", 4, 130 * GB, rank, rest, decay).rank for e in (1, 32, 128, 512, 2048, 10_000)]
        assert ranks == sorted(ranks) and ranks[0] == rank


def test_unknown_devices_and_empty_rests_keep_the_default():
    rank, rest, decay = ROUGH
    assert choose(20_000, 1000, "mps", 4, 130 * GB, rank, rest, decay).rank == rank
    assert choose(20_000, 1000, "cuda", 4, 130 * GB, rank, 0.0, decay).rank == rank
    assert choose(10**6, 10**5, "cuda", 4, 1000 * GB, rank, 1e9, 0.0).rank <= HIGHEST
    assert free_memory(torch.device("cpu")) > 0 and free_memory(torch.device("meta")) == 0


def test_iterations_fall_with_the_rank():
    """As the numbers beside ``ITERATIONS`` say."""
    counts = [iterations(r, 250, 2.82e4, 1.0) for r in (250, 1000, 2000, 4000)]
    assert counts == sorted(counts, reverse=True) and 20 < counts[0] < 45 and counts[-1] < 4
    assert iterations(100, 100, 0.0, 1.0) == iterations(400, 100, 0.0, 1.0)


def test_default_ranks():
    sizes = (10, 2000, 10_000, 20_000, 50_000, 300_000, 10**6)
    assert [default_rank(n, torch.device("cuda")) for n in sizes] == [10, 750, 150, 100, 250, 1500, 2000]
    assert [default_rank(n, torch.device("cpu")) for n in sizes] == [10, 750, 200, 400, 500, 500, 500]
