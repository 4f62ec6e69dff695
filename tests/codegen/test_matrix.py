"""Formulas taken apart for the matrix units, and their schedule, without a GPU."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernops import formula as _fill_the_table  # noqa: F401
from kernops.codegen.matrix import CORES, SUM, _slots, emit_matrix, matrix_form
from kernops.codegen.matrix_schedule import (
    LEAST_ROWS,
    POINTS,
    RESERVED,
    TIGHT,
    MatrixSchedule,
    build,
    matrix_schedule,
)
from kernops.codegen.schedule import Device
from kernops.formula.graph import CAT_COL, CAT_I, CAT_J, CAT_P, CAT_ROW, CAT_SCALAR, Node, const, topological, var
from kernops.formula.ops import OPS, add, apply, div, mul, neg, sub, total
from kernops.formula.plan import Plan, make_plan

H100 = Device(132, 232448, (9, 0))
DEVICES = {"sm_80": Device(108, 166912, (8, 0)), "sm_86": Device(84, 101376, (8, 6)), "sm_90": H100,
           "sm_100": Device(148, 232448, (10, 0))}  # fmt: skip


def points(d: int) -> tuple[Node, Node, Node]:
    x, y = var(CAT_I, 0, d), var(CAT_J, 1, d)
    return x, y, apply("SqDist", x, y)


def gaussian(d: int, e: int = 1) -> Plan:
    return make_plan("Sum", mul(apply("Exp", neg(points(d)[2])), var(CAT_J, 2, e)))


def gradient(d: int) -> Plan:
    x, y, squares = points(d)
    return make_plan("Sum", mul(mul(apply("Exp", neg(squares)), var(CAT_J, 2, 1)), sub(x, y)))


X, Y, S = points(20)
B, G, P, LONG_P = var(CAT_J, 2, 1), var(CAT_SCALAR, 3, 1), var(CAT_P, 4, 1), var(CAT_P, 5, 20)
I1 = var(CAT_I, 6, 1)
DISTANCE = apply("Sqrt", S)
DOT = total(mul(X, Y))


@pytest.mark.parametrize(
    ("root", "square", "has_slope", "pure"),
    [
        (mul(apply("Exp", neg(S)), B), True, True, True),
        (mul(apply("Exp", mul(neg(G), S)), B), True, True, True),
        (mul(apply("Exp", neg(div(S, mul(P, P)))), B), True, True, True),
        (mul(mul(B, apply("Exp", sub(1.0, S))), P), True, True, False),
        (mul(apply("Exp", S), B), True, False, False),  # grows without bound
        (mul(apply("Exp", add(B, neg(S))), 2.0), True, True, False),
        (mul(apply("Exp", mul(neg(I1), S)), B), True, False, False),  # a slope of each row's own
        (mul(apply("Exp", mul(neg(B), S)), B), True, False, False),
        (mul(apply("Exp", neg(DISTANCE)), B), True, False, False),
        (mul(mul(add(1.0, DISTANCE), apply("Exp", neg(DISTANCE))), B), True, False, False),
        (mul(mul(S, apply("Exp", neg(S))), B), True, False, False),
        (add(apply("Exp", neg(S)), S), True, False, False),
        (add(apply("Exp", neg(S)), apply("Exp", neg(mul(2.0, S)))), True, False, False),
        (mul(mul(add(DOT, 1.0), add(DOT, 1.0)), B), False, False, False),
        (mul(apply("Exp", DOT), B), False, False, False),
        (mul(apply("Log1p", S), apply("Abs", B)), True, False, False),
    ],
    ids=str,
)
def test_forms(root: Node, square: bool, has_slope: bool, pure: bool) -> None:
    plan = make_plan("Sum", root)
    form = matrix_form(plan)
    assert form is not None and form.length == 20 and form.square == square
    assert (form.exponent is not None, form.pure) == (has_slope, pure)
    assert SUM in topological(*form.program.pair)
    assert all(n.dim == 1 for n in topological(*form.program.pair))
    text = emit_matrix(plan, form)
    assert "y.sum(0)" in text and f"LENGTH = {form.length};" in text


@pytest.mark.parametrize(
    "plan",
    [
        make_plan("KMin", S, k=5),
        make_plan("MinArgMin", S),
        make_plan("Sum", apply("Exp", neg(total(apply("Abs", sub(X, Y)))))),  # no product
        make_plan("Sum", mul(S, DOT)),  # two sums
        make_plan("Sum", mul(apply("Exp", neg(S)), mul(var(CAT_I, 3, 20), Y))),  # a vector of pairs
        make_plan("Sum", apply("Exp", neg(apply("WeightedSqDist", LONG_P, X, Y)))),
        make_plan("Sum", mul(apply("Step", DOT), B)),  # jumps
        make_plan("Sum", mul(apply("Step", sub(1.0, S)), B)),
        make_plan(
            "Sum", mul(apply("Exp", neg(apply("SqDist", apply("Normalize", X), Y))), B)
        ),  # a norm for each component
        make_plan("Sum", total(mul(var(CAT_J, 0, 20), var(CAT_J, 1, 20)))),
    ],
    ids=lambda p: f"{p.core} {p.formula}"[:60],
)
def test_what_does_not_fit_is_refused(plan: Plan) -> None:
    assert matrix_form(plan) is None
    assert matrix_schedule(plan, 10**5, 10**5, 1, 4, H100) is None


def test_two_results() -> None:
    """A value and its derivative by a parameter, as the first pass of a training step computes them."""
    f = mul(apply("Exp", neg(mul(P, S))), B)
    plan = make_plan("Sum", apply("Concat", f, mul(f, S)), first=1)
    form = matrix_form(plan)
    assert form is not None and not form.wide
    assert "FIRST = 1;" in emit_matrix(plan, form)
    wide = mul(apply("Exp", neg(S)), var(CAT_J, 2, 8))
    for first in (0, 3):
        plan = make_plan("Sum", wide, first=first)
        form = matrix_form(plan)
        assert form is not None and form.wide and f"FIRST = {first or 8};" in emit_matrix(plan, form)


def test_values_with_differences_share_the_weights() -> None:
    """A value and its gradient by x: right-hand sides b and b y, of which b weighs both; by y: b is the last."""
    x, y, squares = points(3)
    f = mul(apply("Exp", neg(squares)), B)
    form = matrix_form(make_plan("Sum", apply("Concat", f, mul(mul(f, -2.0), sub(x, y))), first=1))
    assert form is not None and form.pure and form.rhs is not None
    assert (form.rhs.moment, form.rhs.at, form.rhs.weight, form.rhs.weight_at, form.rhs.count) == (1, 1, B, 0, 4)
    form = matrix_form(make_plan("Sum", apply("Concat", mul(f, sub(y, x)), f)))
    assert form is not None and form.rhs is not None
    assert (form.rhs.moment, form.rhs.at, form.rhs.weight, form.rhs.weight_at, form.rhs.count) == (-1, 0, B, 3, 4)
    other = mul(apply("Exp", neg(squares)), var(CAT_J, 6, 1))
    form = matrix_form(make_plan("Sum", apply("Concat", mul(f, sub(y, x)), other)))
    assert form is not None and form.rhs is not None and (form.rhs.weight_at, form.rhs.count) == (4, 5)
    different = mul(apply("Exp", neg(mul(2.0, squares))), B)
    assert matrix_form(make_plan("Sum", apply("Concat", mul(f, sub(y, x)), different))) is None
    assert matrix_form(make_plan("Sum", mul(f, mul(sub(y, x), sub(y, x))))) is None


LEAVES = (var(CAT_J, 2, 1), var(CAT_SCALAR, 3, 1), var(CAT_P, 4, 1), var(CAT_I, 5, 1), const(0.7), const(-1.0))


def random_plan(seed: int) -> Plan:
    """An exponent that is linear in a squared distance, in one of the reductions, with factors and weights."""
    r = random.Random(seed)
    x, y, exponent = points(5)
    for _ in range(r.randint(0, 4)):
        leaf = r.choice(LEAVES)
        ways = (add, lambda a, b: add(b, a), sub, lambda a, b: sub(b, a), mul, lambda a, b: mul(b, a), div)
        exponent = r.choice([*ways, lambda a, _: neg(a)])(exponent, leaf)
    core = r.choice(CORES)
    if core == "LogSumExp":
        return make_plan(core, exponent)
    if core == "SumSoftMaxWeight":
        squares = points(5)[2]
        weights = (LEAVES[0], squares, mul(squares, LEAVES[3]), apply("Sqrt", squares))
        return make_plan(core, exponent, r.choice(weights))
    root = apply("Exp", exponent)
    for _ in range(r.randint(0, 2)):
        vectors = [var(CAT_J, 6, 4), sub(x, y), var(CAT_J, 7, 2)] if root.dim == 1 else []
        root = mul(root, r.choice([*LEAVES, *vectors]))
    if r.random() < 0.3:  # a value and a derivative in one pass
        weighted = mul(apply("Exp", exponent), r.choice(LEAVES))
        root = apply("Concat", *r.sample([root, mul(weighted, sub(x, y)), weighted], 2))
    return make_plan(core, root)


def evaluate(root: Node, values: dict[Node, torch.Tensor]) -> torch.Tensor:
    found = dict(values)
    for node in topological(root):
        if node.op == "Const":
            found[node] = torch.tensor([node.params[0]], dtype=torch.float64)
        elif node not in found:
            found[node] = OPS[node.op].ref(torch, *(found[a] for a in node.args), *node.params)
    return found[root]


def test_forms_mean_what_their_formulas_mean() -> None:
    """For one pair: the form's terms and epilogue, with slope · sum for the sum, against the formula itself."""
    slopes = 0
    for seed in range(1800):
        plan = random_plan(seed)
        form = matrix_form(plan)
        if form is None:
            continue
        torch.manual_seed(seed)
        values = {v: torch.rand(v.dim, dtype=torch.float64) + 0.2 for v in plan.variables}
        slots = {
            slot: evaluate(term, values)
            for cat, terms in ((CAT_ROW, form.program.row_terms), (CAT_COL, form.program.col_terms))
            for slot, term in _slots(cat, terms).items()
        }
        difference = evaluate(form.left, values) - evaluate(form.right, values)
        total_ = (difference**2).sum(-1, keepdim=True)
        if form.exponent is not None:
            slopes += 1
            total_ = total_ * evaluate(form.exponent, slots)
        got = [evaluate(root, {**slots, SUM: total_}) for root in form.program.pair]
        if form.wide:
            rhs = form.rhs
            assert rhs is not None
            columns = evaluate(rhs.columns, values).clone()
            if rhs.moment:
                assert rhs.weight is not None
                columns[rhs.at : rhs.at + form.length] = rhs.moment * difference * evaluate(rhs.weight, values)
                if rhs.weight_at < columns.numel():
                    torch.testing.assert_close(columns[[rhs.weight_at]], evaluate(rhs.weight, values))
            got[0] = got[0] * columns
        if form.program.factor is not None:
            got[0] = got[0] * evaluate(form.program.factor, slots)
        for found, root in zip(got, plan.roots):
            want = evaluate(root, values)
            torch.testing.assert_close(found.expand_as(want), want, rtol=1e-9, atol=0, msg=f"{seed}: {plan.formula}")
    assert slopes > 300


def test_wide_results() -> None:
    form = matrix_form(gaussian(20, 16))
    assert form is not None and form.rhs is not None and form.rhs.moment == 0 and form.rhs.count == 16
    for d in (3, 20):
        form = matrix_form(gradient(d))
        assert form is not None and form.rhs is not None
        assert form.rhs.moment == 1 and form.rhs.weight is B and form.rhs.count == d + 1
    form = matrix_form(gaussian(20, 3))
    assert form is not None and not form.wide
    assert matrix_form(gradient(2)) is None  # a few components are summed pair by pair


def of_core(core: str, d: int, e: int) -> Plan:
    squares = points(d)[2]
    if core == "SumSoftMaxWeight":
        return make_plan(core, neg(squares), var(CAT_J, 2, min(e, 3)))
    return make_plan(core, neg(squares)) if core == "LogSumExp" else gaussian(d, e)


sizes = st.integers(1, 3_000_000)


@settings(max_examples=300)
@given(st.sampled_from(CORES), st.integers(2, 5000), st.sampled_from([1, 3, 4, 16, 40, 65, 1024]), sizes, sizes,
       st.integers(1, 4), st.sampled_from(sorted(DEVICES)))  # fmt: skip
def test_schedules_cover_the_work_and_fit(core: str, d: int, e: int, m: int, n: int, batch: int, name: str) -> None:
    device, plan = DEVICES[name], of_core(core, d, e)
    form = matrix_form(plan)
    assert form is not None
    if form.length <= TIGHT and form.exponent is None:
        return
    s = build(plan, form, m, n, batch, device)
    if s is None:
        return
    assert s == build(plan, form, m, n, batch, device)
    assert s.row_blocks * POINTS >= m > (s.row_blocks - 1) * POINTS
    assert s.splits * s.span >= n > (s.splits - 1) * s.span and s.span % POINTS == 0
    assert s.blocks == s.row_blocks * s.splits * s.pieces * batch
    assert s.shared <= device.shared - RESERVED and s.per_multiprocessor * s.shared <= device.shared
    assert s.steps * s.chunks * 16 >= (3 * d + 6 if s.tight else d)
    assert s.width * s.pieces >= (form.rhs.count if form.rhs else plan.dim)
    assert s.groups == (name == "sm_90" and not s.tight)
    if s.chunks > 1:
        assert s.sub == 16  # a tile is finished as a whole


def test_scratch_is_linear_in_the_points() -> None:
    """Two halves of every component, padded, and the partial results of a few splits."""
    for d, e in itertools.product((3, 64, 1000), (1, 16, 1024)):
        plan = gaussian(d, e)
        form = matrix_form(plan)
        assert form is not None
        for n in (10**4, 10**5, 10**6):
            s = build(plan, form, n, n, 1, H100)
            assert s is not None and s.splits * min(n, 10**5) <= 2 * 10**6
            assert s.rows <= n * (4 * d + 100) * 1.3 and s.cols <= n * (4 * d + 8 * e + 200) * 1.3
            assert s.partial <= n * s.splits * 4 * (3 if e == 1 else e)


@pytest.mark.parametrize(
    ("plan", "m", "n", "wanted"),
    [
        (gaussian(64), 10**5, 10**5, True),
        (gaussian(64), 10**4, 10**4, True),
        (gaussian(64), 1000, 1000, False),  # the survey would take longer
        (gaussian(64), LEAST_ROWS - 1, 10**7, False),  # a panel would be mostly empty
        (gaussian(3), 10**5, 10**5, True),
        (gaussian(3), 10**4, 10**4, False),
        (gaussian(3, 16), 10**4, 10**4, True),
        (make_plan("Sum", mul(apply("Sqrt", points(3)[2]), B)), 10**5, 10**5, False),
        (make_plan("Sum", mul(apply("Sqrt", points(16)[2]), B)), 10**5, 10**5, True),
    ],
)
def test_when_it_is_used(plan: Plan, m: int, n: int, wanted: bool) -> None:
    s = matrix_schedule(plan, m, n, 1, 4, H100)
    assert isinstance(s, MatrixSchedule) == wanted
    assert matrix_schedule(plan, m, n, 1, 8, H100) is None  # double precision
    assert matrix_schedule(plan, m, n, 1, 4, Device(40, 65536, (7, 5))) is None


def test_sizes_must_be_positive() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        matrix_schedule(gaussian(64), 0, 5, 1, 4, H100)


# --- the bound of cuda/halves.cuh ------------------------------------------------------------------------------------
def split(v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    high = v.astype(np.float16)
    return high, (v - high.astype(np.float32)).astype(np.float16)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 128), st.integers(0, 2**32 - 1), st.sampled_from([1e-6, 1.0, 1e6]), st.floats(-1, 1),
       st.booleans())  # fmt: skip
def test_squares_of_split_points_obey_the_bound(d: int, seed: int, size: float, near: float, heavy: bool) -> None:
    """What is dropped and rounded, in exact sums of the products: below the first five of EPSILON."""
    g = np.random.default_rng(seed)
    draw = g.standard_cauchy if heavy else g.standard_normal
    x = (size * draw((20, d))).astype(np.float32)
    y = (near * x + size * 0.1 * draw((20, d))).astype(np.float32)
    largest = max(np.abs(x).max(), np.abs(y).max())
    scale = np.float32(2.0 ** (7 - np.floor(np.log2(largest))))
    (xh, xl), (yh, yl) = split(x * scale), split(y * scale)
    xh, xl, yh, yl = (v.astype(np.float64) for v in (xh, xl, yh, yl))
    product = xh @ yh.T + xh @ yl.T + xl @ yh.T
    nx, ny = ((v.astype(np.float64) ** 2).sum(1).astype(np.float32).astype(np.float64) for v in (x, y))
    got = nx[:, None] + ny[None] - 2 * product / np.float64(scale) ** 2
    want = ((x[:, None].astype(np.float64) - y[None]) ** 2).sum(-1)
    floor = d * (2.0**-24 / np.float64(scale)) * 2 * largest * 2  # of the lower halves
    assert (np.abs(got - want) <= 5 * 2.0**-22 * (nx[:, None] + ny[None]) + floor).all()
