"""Which sums are set apart from the formula of a pair, and how the schedule of the CPU then cuts its work."""

from __future__ import annotations

import pytest

from kernops import formula as _fill_the_table  # noqa: F401
from kernops.codegen.contraction import BOUNDED, LONG_SUM, contraction, squares
from kernops.codegen.host_schedule import SUMMED_BYTES, Machine, schedule
from kernops.formula.graph import CAT_I, CAT_J, Node, topological, var
from kernops.formula.ops import apply, mul, neg, sub
from kernops.formula.plan import Plan, make_plan

MACHINES = [Machine(64, 32), Machine(32, 16), Machine(16, 32)]


def _points(dim: int) -> tuple[Node, Node]:
    return var(CAT_I, 0, dim), var(CAT_J, 1, dim)


def _gaussian(dim: int, width: int = 1) -> Plan:
    return make_plan("Sum", mul(apply("Exp", neg(apply("SqDist", *_points(dim)))), var(CAT_J, 2, width)))


def test_short_sums_stay_where_they_are() -> None:
    plan = _gaussian(LONG_SUM - 1)
    assert contraction(plan).sums == ()
    assert contraction(plan).pair == plan.program.pair


def test_a_long_sum_is_a_variable_of_the_rest() -> None:
    plan = _gaussian(64)
    (total,) = contraction(plan).sums
    assert total.op == "Sum" and total.args[0].dim == 64
    assert total not in topological(*contraction(plan).pair)


def test_sums_of_functions_stay_where_they_are() -> None:
    x, y = _points(64)
    assert not contraction(make_plan("Sum", apply("Sum", apply("Exp", neg(mul(x, y)))))).sums
    assert len(contraction(make_plan("Sum", mul(apply("Dot", x, y), apply("SqDist", x, y)))).sums) == 2


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("itemsize", [4, 8])
def test_blocks_fit_registers_and_caches(machine: Machine, itemsize: int) -> None:
    x, y = _points(500)
    gradient = make_plan("Sum", mul(apply("Exp", neg(apply("SqDist", x, y))), sub(x, y)))
    nearest = make_plan("MinArgMin", apply("SqDist", x, y))
    for plan in (_gaussian(12), _gaussian(64), _gaussian(784), _gaussian(30, 4), _gaussian(30, 100), gradient, nearest):
        for few in ("", "rows", "columns"):
            s = schedule(plan, itemsize, machine, few)
            assert s.rows * s.vectors + s.vectors + 1 <= machine.registers
            assert s.rows % s.epilogue == 0
            assert s.blocks == 1 or s.blocks * s.rows * plan.program.n_row * itemsize <= SUMMED_BYTES
            assert s.rows == 1 or few != "rows"


def test_a_row_more_than_a_register_holds_costs_no_blocking() -> None:
    """As many sums of a block as there are registers for: what this is all about."""
    s = schedule(_gaussian(64), 4, Machine(64, 32))
    assert (s.rows, s.vectors, s.epilogue) == (6, 4, 6)
    s = schedule(_gaussian(64), 4, Machine(32, 16))
    assert (s.rows, s.vectors, s.epilogue) == (4, 2, 4)


def test_bounds_are_for_the_squared_distances_of_neighbours_alone() -> None:
    x, y = _points(64)
    assert squares(make_plan("KMin", apply("SqDist", x, y), k=3)) == (64, 0, 0)
    assert squares(make_plan("KMin", apply("SqDist", y, x), k=3)) == (64, 0, 0)
    assert squares(make_plan("KMin", apply("SqDist", *_points(BOUNDED[0] - 1)), k=3)) == (0, 0, 0)
    assert squares(make_plan("KMin", neg(apply("SqDist", x, y)), k=3)) == (0, 0, 0)
    assert squares(make_plan("KMin", apply("Sum", apply("Square", apply("Add", x, y))), k=3)) == (0, 0, 0)
    assert squares(make_plan("Min", apply("SqDist", x, y))) == (0, 0, 0)
