"""How the exponential unit and the plain cores share powers of 2."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kernops import formula as _fill_the_table  # noqa: F401
from kernops.codegen.balance import BUSY, bits, choices, plain_pairs
from kernops.codegen.facts import facts
from kernops.codegen.floors import EXP, FMA, PLAIN_POWER, gpu
from kernops.codegen.schedule import Device, candidates, schedule
from kernops.formula.graph import CAT_I, CAT_J, Node, var
from kernops.formula.ops import apply, mul, neg
from kernops.formula.plan import Plan, make_plan

HOPPER, AMPERE = Device(132, 232448, (9, 0)), Device(108, 166912, (8, 0))


def squares(d: int) -> Node:
    return apply("SqDist", var(CAT_I, 0, d), var(CAT_J, 1, d))


def weighted(kernel: Node) -> Plan:
    return make_plan("Sum", mul(kernel, var(CAT_J, 2, 1)))


def laplacian(d: int) -> Plan:
    return weighted(apply("Exp", neg(apply("Sqrt", squares(d)))))


def gaussian(d: int) -> Plan:
    return weighted(apply("Exp", neg(squares(d))))


def plain(plan: Plan, itemsize: int = 4, device: Device = HOPPER) -> int:
    return schedule(facts(plan), 100_000, 100_000, 1, itemsize, device).plain


def test_facts() -> None:
    f = facts(laplacian(3))
    assert (f.special, f.powers) == (2, 1)
    assert (facts(gaussian(3)).special, facts(make_plan("LogSumExp", neg(squares(3)))).powers) == (1, 0)


def test_the_unit_is_relieved_where_it_is_what_takes_longest() -> None:
    assert plain(laplacian(3)) > 0 and plain(gaussian(1)) > 0
    assert plain(gaussian(3)) == plain(laplacian(8)) == 0  # where the plain cores have enough to do
    assert plain(make_plan("Sum", apply("Sqrt", squares(1)))) == 0  # no power of 2
    assert plain(laplacian(3), itemsize=8) == 0
    assert plain(laplacian(3), device=AMPERE) == 0  # half as many plain cores for the same unit
    assert plain(make_plan("KMin", apply("Exp", neg(apply("Sqrt", squares(1)))), k=3)) == 0


@pytest.mark.parametrize("instructions", [4, 7, 10, 13, 20])
def test_no_other_share_is_faster(instructions: float) -> None:
    f = replace(facts(laplacian(3)), special=2, powers=1)
    rates, pairs = gpu((9, 0)).per_cycle, 16

    def cycles(k: int) -> float:
        issued = instructions + 0.8 + PLAIN_POWER * k / pairs
        return max((2 - k / pairs) / (BUSY * rates[EXP]), issued / rates[FMA])

    chosen = plain_pairs(f, pairs, instructions, (9, 0))
    assert cycles(chosen) == min(cycles(k) for k in choices(pairs))


@pytest.mark.parametrize("pairs", [2, 4, 8, 16])
def test_the_set_of_pairs_has_their_number(pairs: int) -> None:
    for plain in choices(pairs):
        chosen = [p for p in range(pairs) if bits(plain, pairs) >> p & 1]
        assert len(chosen) == plain and bits(plain, pairs) < 1 << pairs
        assert plain < 3 or {p % 2 for p in chosen} == {0, 1}, "both of a thread's rows have some"


def test_other_shares_are_tried_where_schedules_are_measured() -> None:
    def shares(plan: Plan) -> list[int]:
        return [s.plain for s in candidates(facts(plan), 100_000, 100_000, 1, 4, HOPPER, count=2)]

    first, second, *others = shares(laplacian(3))
    assert first == plain(laplacian(3)) and sorted((first, *others)) == list(choices(16))
    assert shares(gaussian(3)) == [0, 0]
