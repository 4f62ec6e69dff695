"""Loops over components in host C++: how much text a compiler is given for formulas of many components."""

from __future__ import annotations

import re

import pytest

from kernops.codegen.host_schedule import Machine, source
from kernops.formula.graph import CAT_I, CAT_J, Node, var
from kernops.formula.ops import add, apply, div, mul, neg, sub
from kernops.formula.plan import make_plan

MACHINES = (Machine(64, 32, True), Machine(32, 16))
#: Calls of functions of a step for each row and vector of columns; g++ 12 took 5 s for 64, and 12 s for 256.
MOST_CALLS = 48
LOOP = re.compile(r"^( *)KN_UNROLL\((\d+)\)\n\1for \(int \w+ = 0; \w+ < (\d+); .*\{\n((?:\1 .*\n)*)", re.M)
FUNCTIONS = re.compile(r"kn::(?:log|exp|sin|cos|tanh|erf|pow|atan2|digamma|lgamma|inv)\w*\(")


def points(d: int) -> tuple[Node, Node]:
    return var(CAT_I, 0, d), var(CAT_J, 1, d)


def f(name: str, *args: Node) -> Node:
    return apply(name, *args)


def of_components(d: int) -> dict[str, Node]:
    x, y = points(d)
    near = f("Abs", sub(x, y))
    log = f("Log1p", near)
    return {
        "sum": f("Sum", log),
        "vector": log,
        "two sums": mul(f("Exp", neg(f("Sum", log))), f("Sum", f("Sin", sub(x, y)))),
        "chain": f("Sum", f("Tanh", f("Exp", f("Sin", log)))),
        "largest": f("Max", f("Erf", sub(x, y))),
        "normalised": div(log, add(f("Sum", log), f("Max", f("Sin", sub(x, y))))),
        "two arguments": f("Sum", f("LogAddExp", x, y)),
    }


def written_out(text: str) -> int:
    """The most functions that one member of a formula has, its loops written out as far as they are to be unrolled."""
    members = (LOOP.findall(member) for member in text.split("KN_FN static"))
    return max(sum(int(n) * len(FUNCTIONS.findall(body)) for _, n, _, body in loops) for loops in members)


@pytest.mark.parametrize("name", of_components(64))
@pytest.mark.parametrize("reduction", ["Sum", "LogSumExp", "Min"])
def test_loops_of_functions_stay_loops(name: str, reduction: str) -> None:
    """Unrolled in full they gained nothing, and took a compiler up to 12 s, 0.6 to 1 s as loops."""
    for d in (20, 48, 64):
        plan = make_plan(reduction, of_components(d)[name])
        for machine in MACHINES:
            for itemsize in (4, 8):
                text = source(plan, itemsize, machine)
                assert FUNCTIONS.search(text) and written_out(text) <= MOST_CALLS


def test_short_and_light_loops_are_unrolled() -> None:
    x, y = points(3)
    for root in (f("Exp", neg(f("SqDist", x, y))), f("Sum", f("Log1p", f("Abs", sub(x, y))))):
        assert "KN_UNROLL(3)" in source(make_plan("Sum", root), 4, MACHINES[0])
    x, y = points(10)
    assert "KN_UNROLL(10)" in source(make_plan("Sum", f("Sum", f("Abs", sub(x, y)))), 4, MACHINES[0])
