"""How a pruned search runs on a GPU: what holds whatever the sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernops import formula as _fill_the_table  # noqa: F401
from kernops.codegen.facts import facts
from kernops.codegen.schedule import Device, schedule
from kernops.codegen.searching import FAN, TRIALS, after_sort, before_sort, scratch, searching, source
from kernops.formula.graph import CAT_I, CAT_J, var
from kernops.formula.ops import apply
from kernops.formula.plan import make_plan

H200 = Device(132, 232448, (9, 0))
sizes = st.one_of(st.integers(1, 300), st.integers(1, 10**6), st.integers(1, 2**31 - 2))


@given(st.integers(1, 512), st.integers(1, 16), sizes, sizes, st.integers(1, 1000))
def test_levels_and_steps(k: int, dim: int, m: int, n: int, batch: int) -> None:
    s = searching(k, dim, m, n, batch, True)
    assert s == searching(k, dim, m, n, batch, True)
    below = n
    for count in s.levels:  # every box is full but the last of a level
        assert (count - 1) * FAN < below <= count * FAN
        below = count
    assert s.levels[-1] <= FAN and len(s.levels) <= 6
    names = [step.name for step in (*before_sort(s, m, n), *after_sort(s))]
    assert names[:3] == ["sample_tables", "point_keys", "pack_points"] and names[-2:] == ["try_search", "search"]
    assert all(step.blocks > 0 and step.threads % 32 == 0 for step in (*before_sort(s, m, n), *after_sort(s)))
    assert "try_search" not in [step.name for step in after_sort(searching(k, dim, m, n, batch, False))]


@given(st.integers(1, 16), sizes, sizes, st.integers(1, 1000))
def test_trials_are_few_and_cheap(dim: int, m: int, n: int, batch: int) -> None:
    s = searching(10, dim, m, n, batch, True)
    tried = -(-s.rows // s.stride)
    assert min(s.rows, TRIALS) <= tried < 2 * TRIALS + 1
    assert s.most_work <= sum(s.levels) / 16 + 1
    assert 0 <= s.all_work < tried * sum(s.levels)


@given(st.integers(1, 16), sizes, sizes)
def test_memory_is_linear(dim: int, m: int, n: int) -> None:
    """Copies of the columns, and boxes of two numbers a coordinate for every 32 of them; nothing for the rows."""
    words = sum(scratch(searching(10, dim, m, n, 1, True), 4)) / 4
    assert words <= (n + 31) * (dim + 1) + (n / 31 + 200) * (2 * dim + 1) + 2 * dim * 1024 + 2


@pytest.mark.parametrize("trial", [True, False])
def test_source_has_the_kernels(trial: bool) -> None:
    plan = make_plan("KMin", apply("SqDist", var(CAT_I, 0, 3), var(CAT_J, 1, 3)), k=5)
    s = searching(5, 3, 50_000, 50_000, 1, trial)
    text = source(plan, schedule(facts(plan), 50_000, 50_000, 1, 4, H200), s, 4, 1)
    for step in (*before_sort(s, 50_000, 50_000), *after_sort(s)):
        assert f"kn_{step.name}(" in text
    assert ("kn_reduce(" in text) == trial
    # sizes are arguments, not source
    other = searching(5, 3, 50_001, 50_001, 1, trial)
    assert text == source(plan, schedule(facts(plan), 50_001, 50_001, 1, 4, H200), other, 4, 1)
