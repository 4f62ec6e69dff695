"""What holds for every schedule, whatever the plan, the sizes and the GPU; and that hard plans get a sensible one."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernops import formula as _fill_the_table  # noqa: F401
from kernops.codegen import schedule as module
from kernops.codegen.facts import INSTRUCTIONS, Facts, Work, facts
from kernops.codegen.instantiate import compiled, kernels, source
from kernops.codegen.schedule import (
    MAX_REGISTERS,
    STATES,
    THREADS,
    Device,
    Shape,
    cycles,
    registers,
    schedule,
    shape,
)
from kernops.formula.graph import CAT_I, CAT_J, CAT_P, Node, var
from kernops.formula.ops import apply, mul, neg, sub
from kernops.formula.plan import Plan, make_plan

H200, T4, SMALL = Device(132, 232448, (9, 0)), Device(40, 65536, (7, 5)), Device(1, 101376, (8, 6))

works = st.builds(Work, st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 5000))


@st.composite
def any_facts(draw: st.DrawFn) -> Facts:
    core = draw(st.sampled_from(sorted(STATES)))
    return Facts(
        core=core,
        k=draw(st.integers(1, 3000)) if core == "KMin" else 0,
        dim=draw(st.one_of(st.integers(1, 40), st.integers(1, 5000))),
        n_row=draw(st.one_of(st.integers(0, 40), st.integers(0, 5000))),
        n_col=draw(st.one_of(st.integers(0, 40), st.integers(0, 5000))),
        fixed=draw(works),
        each=draw(works),
        rolled=draw(st.integers(0, 500)),
        stored=draw(st.integers(0, 300)),
        slow=draw(st.booleans()),
        row_by_component=draw(st.booleans()),
        special=draw(st.integers(2, 5)),
        powers=draw(st.integers(0, 2)),
    )


sizes = st.one_of(st.integers(1, 300), st.integers(1, 10**6), st.integers(1, 2**34))
devices = st.sampled_from([H200, T4, SMALL])


@given(any_facts(), sizes, sizes, st.integers(1, 10**6), st.sampled_from([4, 8]), devices)
def test_invariants(f: Facts, m: int, n: int, batch: int, itemsize: int, device: Device) -> None:
    s = schedule(f, m, n, batch, itemsize, device)
    assert s == schedule(f, m, n, batch, itemsize, device)
    # rows, columns and components are covered, and no block is without any
    owners = s.threads // 32 if s.list == "warp" else s.threads  # of rows
    assert (s.row_blocks - 1) * owners * s.rows < m <= s.row_blocks * owners * s.rows
    assert (s.splits - 1) * s.span < n <= s.splits * s.span
    assert (s.chunks - 1) * s.chunk < f.dim <= s.chunks * s.chunk and s.chunk <= f.dim
    assert s.blocks == s.row_blocks * s.splits * s.chunks * batch
    # groups of columns never cross the border of a tile or split
    step = 32 * s.cols if s.list == "warp" else s.cols
    assert s.tile % step == 0 and s.span % s.cols == 0
    assert all(x & (x - 1) == 0 for x in (s.rows, s.cols))
    # a tile fits; packed columns are used where none would
    queues = s.threads * s.rows * (s.cols + module.QUEUE) * (itemsize + (8 if s.long_index else 4))
    tile = s.shared - (queues if s.list == "registers" else 0)
    assert s.shared <= device.shared and s.cols_in_memory == (tile == 0)
    if not s.cols_in_memory:
        assert tile == s.tiles * s.tile * (f.n_col | 1) * itemsize
        assert s.tiles == 1 or tile * module.ROOM_FOR <= device.shared
    assert s.tiles == 1 or not (s.cols_in_memory or s.list)
    assert 0 <= s.plain <= s.rows * s.cols // 2 and (s.plain == 0 or f.powers > 0 and itemsize == 4)
    assert s.cols_in_memory or s.packed_cols == 0
    assert not s.cols_in_memory or s.packed_cols >= batch * n * f.n_col
    # registers are indexed by constants only
    assert s.rows_in_memory or (f.n_row <= 64 and not (s.chunks > 1 and f.row_by_component))
    assert not s.rows_in_memory or s.packed_rows >= batch * m * f.n_row
    assert 1 <= s.unroll <= 64
    assert (s.scratch > 0) == (s.splits > 1)
    assert s.long_index == (n >= 2**31)


@given(any_facts(), sizes, sizes, devices)
def test_scratch_is_bounded(f: Facts, m: int, n: int, device: Device) -> None:
    """The states of splits are as many as there are rows, or as fit on the device a fixed number of times."""
    s = schedule(f, m, n, 1, 4, device)
    one = s.row_blocks * s.chunks
    many = module.MANY_BLOCKS_OF_SUMS if f.core == "Sum" else module.MANY_BLOCKS
    assert s.splits == 1 or s.blocks <= device.multiprocessors * many + one


@given(any_facts(), st.sampled_from([4, 8]), st.sampled_from([1, 2, 4]))
def test_the_best_shape_is_chosen(f: Facts, itemsize: int, most_rows: int) -> None:
    best = shape(f, itemsize, most_rows)
    assert best.rows <= most_rows
    for other in module._candidates(f, itemsize, most_rows):
        assert cycles(f, best, itemsize) <= cycles(f, other, itemsize)
    assert registers(f, best, itemsize) <= MAX_REGISTERS or best.rows == best.cols == best.chunk == 1


@given(any_facts(), sizes, sizes, st.sampled_from([4, 8]), devices)
def test_lists_of_warps_fit_in_registers(f: Facts, m: int, n: int, itemsize: int, device: Device) -> None:
    s = schedule(f, m, n, 1, itemsize, device)
    if s.list != "warp":
        return
    words, slots = itemsize // 4, -(-f.k // 32)
    assert f.core == "KMin" and s.chunk == 1 and not s.rows_in_memory and not s.cols_in_memory
    assert s.rows * slots * (words + 1) <= max(module.LIST_WORDS, 16 * (words + 1))
    assert s.rows * f.n_row * words <= module.ROW_WORDS and f.n_col * s.cols * words <= module.ROW_WORDS
    assert not (f.dim > 1 and f.row_by_component)


@pytest.mark.parametrize(("k", "m", "place"), [
    (10, 10_000, "warp"), (10, 100_000, "registers"), (17, 100_000, "warp"), (512, 100_000, "warp"),
    (513, 1000, "heap"),
])  # fmt: skip
def test_who_keeps_the_lists(k: int, m: int, place: str) -> None:
    assert schedule(facts(gaussian(3, core="KMin", k=k)), m, 100_000, 1, 4, H200).list == place
    assert schedule(facts(gaussian(12, core="KMin", k=k)), m, 100_000, 1, 4, H200).list != "warp" or k > 16
    assert schedule(facts(gaussian(100, core="KMin", k=k)), m, 100_000, 1, 4, H200).list != "warp"


@pytest.mark.parametrize("bad", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_nothing_to_do_is_an_error(bad: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        schedule(facts(gaussian(3)), *bad, itemsize=4, device=H200)


# --- facts of real plans ----------------------------------------------------------------------------------------------
def gaussian(d: int, e: int = 1, core: str = "Sum", k: int = 0) -> Plan:
    f: Node = neg(apply("SqDist", var(CAT_I, 0, d), var(CAT_J, 1, d)))
    b = var(CAT_J, 2, e)
    if core == "SumSoftMaxWeight":
        return make_plan(core, f, b)
    return make_plan(core, mul(apply("Exp", f), b) if core == "Sum" else f, k=k)


def gradient(d: int) -> Plan:
    x, y = var(CAT_I, 0, d), var(CAT_J, 1, d)
    return make_plan("Sum", mul(mul(apply("Exp", neg(apply("SqDist", x, y))), var(CAT_J, 2, 1)), mul(-2.0, sub(x, y))))


def test_facts_of_a_gaussian() -> None:
    f = facts(gaussian(5, 7))
    assert (f.n_row, f.n_col, f.dim, f.stored, f.slow, f.row_by_component) == (5, 12, 7, 0, False, False)
    assert (f.fixed.rows, f.fixed.cols, f.each.cols) == (5, 5, 1)
    # five differences, five squares (the sum is fused), a scaling and an exponential; a product for each component
    assert f.fixed.instructions == 5 + 5 + 1 + INSTRUCTIONS["Exp2"] and f.each.instructions == 1


def test_facts_of_a_gradient() -> None:
    f = facts(gradient(9))
    assert f.row_by_component and (f.each.rows, f.each.cols) == (1, 1)


def test_slow_functions_are_noticed() -> None:
    x, y = var(CAT_I, 0, 1), var(CAT_J, 1, 1)
    assert facts(make_plan("Sum", apply("Lgamma", sub(x, y)))).slow
    # of the row alone, they run once a row
    assert not facts(make_plan("Sum", mul(apply("Lgamma", x), apply("Exp", sub(x, y))))).slow


@pytest.mark.parametrize("d", [1, 3, 16, 64, 300, 4096])
@pytest.mark.parametrize("itemsize", [4, 8])
def test_any_dimension(d: int, itemsize: int) -> None:
    for plan in (gaussian(d), gradient(d), gaussian(3, d), gaussian(d, core="KMin", k=10)):
        s = schedule(facts(plan), 20_000, 30_000, 1, itemsize, H200)
        words = s.rows * plan.program.n_row * itemsize // 4
        assert s.rows_in_memory or words <= 64, "rows would not fit in registers"


def test_large_problems_get_several_rows_a_thread_and_small_ones_many_blocks() -> None:
    f = facts(gaussian(3))
    large, small, row = (schedule(f, m, 100_000, 1, 4, H200) for m in (100_000, 2000, 1))
    assert large.rows > 1 and large.rows * large.cols >= 8
    assert small.rows == 1 and small.blocks >= 4 * H200.multiprocessors
    assert row.splits >= 4 * H200.multiprocessors
    assert schedule(f, 10, 10, 1, 4, H200).splits == 1


@pytest.mark.parametrize("core", sorted(STATES))
def test_source_names_everything_that_it_compiles(core: str) -> None:
    plan = gaussian(3, 2, core, k=5 if core == "KMin" else 0)
    s = schedule(facts(plan), 500, 50_000, 1, 4, H200)
    text = source(plan, s, 4, 0)
    for name in compiled(s):
        assert f"kn_{name}(" in text
    assert set(kernels(s)) <= set(compiled(s)) and s.splits > 1
    assert f"THREADS = {THREADS}" in text
    # sizes are arguments, not source: another size of the same shape runs the same code
    assert text == source(plan, schedule(facts(plan), 501, 50_001, 1, 4, H200), 4, 0)


def test_scalars_are_told_from_tensors() -> None:
    from kernops.formula.graph import CAT_SCALAR

    x, y, p, s = var(CAT_I, 0, 1), var(CAT_J, 1, 1), var(CAT_P, 2, 1), var(CAT_SCALAR, 3, 1)
    plan = make_plan("Sum", mul(mul(p, s), apply("Exp", sub(x, y))))
    assert "return k == 3;" in source(plan, schedule(facts(plan), 9, 9, 1, 4, H200), 4, 0)


def test_a_shape_says_where_rows_live() -> None:
    assert shape(facts(gaussian(3)), 4, 4).rows_in_memory is False
    assert shape(facts(gaussian(300)), 4, 4).rows_in_memory is True
    assert dataclasses.is_dataclass(Shape)
