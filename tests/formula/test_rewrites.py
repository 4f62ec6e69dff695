"""What is known of signs, and the rewrites that depend on what a term stands beside."""

from __future__ import annotations

import pytest
import torch

from kernops import formula as _fill_the_table  # noqa: F401
from kernops.backends import reduce
from kernops.formula import signs
from kernops.formula.graph import CAT_I, CAT_J, CAT_SCALAR, Node, topological, var
from kernops.formula.ops import OPS, add, apply, div, lowered, mul, neg, sub
from kernops.formula.plan import make_plan
from kernops.formula.signs import sign_of
from kernops.formula.simplify import simplify

X, Y, S = var(CAT_I, 0, 3), var(CAT_J, 1, 3), var(CAT_SCALAR, 2, 1)
D = lowered(apply("SqDist", X, Y))


def _values(name: str) -> torch.Tensor:
    low, high = OPS[name].domain[0] if OPS[name].domain else (-2.0, 2.0)
    some = torch.linspace(low, high, 401, dtype=torch.float64)
    return torch.cat((some, torch.tensor([0.0, -0.0], dtype=torch.float64)))


@pytest.mark.parametrize("name", sorted(signs._NEVER_NEGATIVE))
def test_ops_that_are_never_negative(name: str) -> None:
    op = OPS[name]
    assert op.arity <= 2
    a, b = _values(name), _values(name).flip(0)
    if op.scalar:
        value = op.ref(torch, *(a, b)[: op.arity])
        assert not (value < 0).any()


@pytest.mark.parametrize("name", sorted(signs._LIKE_THEIR_ARGUMENT))
def test_ops_that_have_their_arguments_sign(name: str) -> None:
    op = OPS[name]
    assert op.arity == 1
    if op.scalar:
        a = _values(name)
        value = op.ref(torch, a)
        assert not (value[a >= 0] < 0).any() and not (value[a <= 0] > 0).any()


@pytest.mark.parametrize(
    ("node", "want"),
    [
        (D, 1), (neg(D), -1), (mul(-0.5, D), -1), (mul(S, D), 0), (mul(mul(-2.0, D), apply("Sqrt", D)), -1),
        (add(1.0, D), 1), (sub(D, 1.0), 0), (sub(-1.0, D), -1), (div(D, -2.0), -1), (div(-2.0, D), 0), (X, 0),
        (neg(apply("Abs", X)), -1), (apply("PowInt", X, params=(4,)), 1), (apply("PowInt", X, params=(3,)), 0),
    ],
)  # fmt: skip
def test_signs(node: Node, want: int) -> None:
    assert sign_of(node) == want


def test_signs_of_deep_formulas_are_not_looked_for() -> None:
    deep = D
    for _ in range(50):
        deep = add(deep, mul(deep, deep))
    assert sign_of(deep) == 0  # and not after 3^50 steps


def ops_of(node: Node) -> set[str]:
    return {n.op for n in topological(simplify(lowered(node)))}


@pytest.mark.parametrize(
    ("node", "rough"),
    [
        (sub(1.0, apply("Log1p", D)), "LogTermOfNormal"), (add(apply("Log1p", D), 1.0), "LogTermOfNormal"),
        (sub(apply("Log", add(1.0, D)), 2.0), "LogTerm"), (add(3.0, mul(-3.0, apply("Log1p", D))), "LogTermOfNormal"),
        (add(0.9, apply("Log1p", D)), None), (add(1.0, mul(1.5, apply("Log1p", D))), None),
        (apply("Log1p", D), None), (mul(2.0, apply("Log1p", D)), None),
        (sub(1.0, apply("Log1p", apply("SqNorm2", X))), None),
        (add(S, apply("Log1p", D)), None), (sub(1.0, apply("Sqrt", apply("Log1p", D))), None),
    ],
)  # fmt: skip
def test_logarithms_beside_numbers_of_their_size(node: Node, rough: str | None) -> None:
    """Only where their error is small against what they are added to, and only for pairs."""
    found = ops_of(node) & {"Log", "Log1p", "LogTerm", "LogTermOfNormal"}
    if rough is None:
        assert not found & {"LogTerm", "LogTermOfNormal"}
    else:
        assert found == {rough}


B = var(CAT_J, 3, 1)
R = apply("Sqrt", D)
DECAY = apply("Exp2", neg(R))


@pytest.mark.parametrize(
    ("node", "want"),
    [
        (apply("Sqrt", mul(4.0, D)), mul(2.0, R)), (apply("Sqrt", mul(D, 9.0)), mul(3.0, R)),
        (apply("Sqrt", mul(-4.0, D)), None), (apply("Sqrt", mul(1e30, D)), None), (apply("Sqrt", mul(S, D)), None),
        (apply("Square", R), D), (apply("Square", mul(-3.0, R)), mul(9.0, D)),
        (apply("Square", apply("Sqrt", mul(S, D))), None),  # not a number where S is negative
        (apply("Square", mul(1e-30, D)), None), (apply("Square", mul(2.0, S)), None),
        (apply("Square", mul(256.0, apply("Abs", sub(X, Y)))), None),  # whose own square may vanish
    ],
)  # fmt: skip
def test_numbers_in_roots_and_squares(node: Node, want: Node | None) -> None:
    """Numbers come out of them, unless the square could overflow or vanish where the formula does not."""
    assert simplify(lowered(node)) is (node if want is None else want)


@pytest.mark.parametrize(
    ("node", "columns", "shared"),
    [
        (mul(mul(add(1.0, R), DECAY), B), 1, True), (mul(mul(add(1.0, mul(2.0, R)), DECAY), B), 2, True),
        (mul(mul(add(add(1.0, mul(2.0, R)), mul(3.0, D)), DECAY), B), 3, True),
        (mul(mul(sub(mul(R, sub(0.5, D)), 1.0), DECAY), neg(B)), 2, True),
        (mul(mul(add(S, R), DECAY), B), 2, True),
        (mul(mul(add(1.0, R), add(1.0, R)), B), 1, False),  # a factor twice: nothing would be saved
        (mul(mul(R, DECAY), B), 1, False),
    ],
)  # fmt: skip
def test_sums_take_the_weight_of_their_column(node: Node, columns: int, shared: bool) -> None:
    """Numbers of a column, besides its point; and the same values, in float64, as the formula as written."""
    plan = make_plan("Sum", node)
    assert plan.program.n_col - X.dim == columns
    assert (
        plan.program.pair[0].op == "Mul" and any(a.op in ("Add", "Sub") for a in plan.program.pair[0].args)
    ) == shared
    g = torch.Generator().manual_seed(0)
    x, y = (torch.rand(k, 3, generator=g, dtype=torch.float64) for k in (5, 7))
    tensors: list = [x, y, -1.5, torch.randn(7, 1, generator=g, dtype=torch.float64)]
    (got,) = reduce(plan, tensors, 5, 7)
    s = ((x[:, None] - y[None]) ** 2).sum(-1)
    torch.testing.assert_close(got, _dense(node, s, tensors).sum(1, keepdim=True), rtol=1e-13, atol=1e-13)


X1, Y1 = var(CAT_I, 0, 1), var(CAT_J, 1, 1)
NEAR = apply("Exp2", neg(apply("Square", sub(X1, Y1))))


@pytest.mark.parametrize(
    "difference",
    [
        sub(X1, Y1), neg(sub(Y1, X1)), mul(Y1, sub(X1, Y1)), sub(sub(X1, Y1), 0.25), add(1.0, mul(2.0, sub(X1, Y1))),
        mul(apply("Sin", sub(X1, Y1)), sub(Y1, X1)),
    ],
)  # fmt: skip
def test_differences_of_points_take_no_weight(difference: Node) -> None:
    """x - y is exact for points that are close, wherever they are; b x - b y would not be."""
    g = torch.Generator().manual_seed(0)
    x, y = (1000 + torch.rand(k, 1, generator=g) for k in (9, 11))
    b = torch.rand(11, 1, generator=g) + 0.5
    node = mul(mul(difference, NEAR), B)
    (got,) = reduce(make_plan("Sum", node, n_vars=4), [x, y, None, b], 9, 11)
    values = {X1: x.double(), Y1: y.double().T, B: b.double().T}
    terms = _value(node, values)
    errors = (got.double() - terms.sum(1, keepdim=True)).abs() / terms.abs().sum(1, keepdim=True)
    assert errors.max() < 3e-7


def _value(node: Node, values: dict[Node, torch.Tensor]) -> torch.Tensor:
    if node.value is not None:
        return torch.tensor(node.value, dtype=torch.float64)
    if node in values:
        return values[node]
    return OPS[node.op].ref(torch, *(_value(a, values) for a in node.args))


def _dense(node: Node, s: torch.Tensor, tensors: list) -> torch.Tensor:
    """The formula as written, for all pairs."""
    if node is D:
        return s
    if node.value is not None:
        return torch.tensor(node.value, dtype=torch.float64)
    if node.is_var:
        return torch.tensor(tensors[2], dtype=torch.float64) if node is S else tensors[3].T
    return OPS[node.op].ref(torch, *(_dense(a, s, tensors) for a in node.args))
