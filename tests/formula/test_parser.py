"""Formula strings: both dialects, canonical text, and what the parser says about mistakes."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kernops.formula.graph import CAT_I, CAT_J, CAT_P, CAT_SCALAR, Node, const, make, var
from kernops.formula.ops import OPS, apply
from kernops.formula.parser import parse, parse_alias
from tests.helpers.cases import examples

X, Y, P, B = var(CAT_I, 0, 3), var(CAT_J, 1, 3), var(CAT_P, 2, 3), var(CAT_J, 3, 1)
ALIASES = {"X": X, "Y": Y, "P": P, "B": B}


def p(text: str) -> Node:
    return parse(text, ALIASES)


# --- canonical text ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", OPS)
def test_every_op_reads_back_as_itself(name):
    for dims, params in examples(OPS[name]):
        node = make(name, tuple(var(CAT_I, k, d) for k, d in enumerate(dims)), params)
        assert parse(str(node)) is node


@pytest.mark.parametrize(
    "value", [0.0, -0.0, 1.0, -1.5, 1e-300, 1e22, 0.1, 2**53 + 1.0, float("inf"), float("-inf"), float("nan")]
)
def test_constants_read_back(value):
    assert parse(str(const(value))) is const(value)


def test_leaves_read_back():
    for leaf in (X, Y, P, var(CAT_SCALAR, 4, 1), var(4, 0, 2), var(5, 7, 1)):
        assert parse(str(leaf)) is leaf


leaves = st.sampled_from([X, Y, P, B, var(CAT_SCALAR, 4, 1), const(0.0), const(1.0), const(-2.5)])
SCALAR_OPS = [op for op in OPS.values() if op.scalar and not op.params]


def combine(children):
    def build(op, args):
        return apply(op.name, *args[: op.arity])

    return st.builds(build, st.sampled_from(SCALAR_OPS), st.lists(children, min_size=3, max_size=3))


@settings(max_examples=60, deadline=None)
@given(st.recursive(leaves, combine, max_leaves=12))
def test_random_formulas_read_back(node):
    assert parse(str(node)) is node


def test_no_formula_is_too_deep():
    node: Node = X
    for _ in range(3000):
        node = apply("Sin", node)
    assert parse(str(node)) is node
    assert parse("(" * 3000 + "X" + ")" * 3000, ALIASES) is X
    assert parse("-" * 3001 + "X", ALIASES) is p("-X")
    assert parse("X" + "+X" * 3000, ALIASES).dim == 3


# --- KeOps' dialect ----------------------------------------------------------------------------------------------
SAME = {
    "Exp(-SqDist(X,Y)) * B": "Mul(Exp(Neg(SqDist(X,Y))), B)",
    "X + Y * P": "Add(X, Mul(Y, P))",
    "X - Y - P": "Sub(Sub(X, Y), P)",
    "X / Y / P": "Div(Div(X, Y), P)",
    "X * Y + P": "Add(Mul(X, Y), P)",
    "-X ** 2": "Neg(Square(X))",
    "(-X) ** 2": "Square(Neg(X))",
    "X ** Y ** P": "Pow(X, Pow(Y, P))",
    "X ** -Y": "Pow(X, Neg(Y))",
    "X ** -1 * Y": "Mul(Inv(X), Y)",
    "X ** 0.5": "Sqrt(X)",
    "X ** -0.5": "Rsqrt(X)",
    "X ** 3": "PowInt(X, 3)",
    "X ** 1.7": "Pow(X, Const(1.7))",
    "- - X": "X",
    "2 * 3 * X": "Mul(Const(6.0), X)",
    "X | Y": "Dot(X, Y)",
    "X | Y + P": "Dot(X, Add(Y, P))",
    "X < Y": "Less(X, Y)",
    "X >= Y": "LessEqual(Y, X)",
    "X + Y == P": "Equal(Add(X, Y), P)",
    "X != Y": "NotEqual(X, Y)",
    "Mult(X, Y)": "Mul(X, Y)",
    "Subtract(X, Minus(Y))": "Sub(X, Neg(Y))",
    "Divide(X, Y)": "Div(X, Y)",
    "Scalprod(X, Y)": "Dot(X, Y)",
    "Powf(X, B)": "Pow(X, B)",
    "Pow(X, 3)": "PowInt(X, 3)",
    "Pow(X, 2)": "Square(X)",
    "Pow(X, -1)": "Inv(X)",
    "IntCst(3) * X": "Mul(Const(3.0), X)",
    "RatCst(1, 4) * X": "Mul(Const(0.25), X)",
    "IntInv(4) * X": "Mul(Const(0.25), X)",
    "Zero(3)": "Broadcast(Const(0.0), 3)",
    "SumT(B, 3)": "Broadcast(B, 3)",
    "ClampInt(X, -1, 2)": "Clamp(X, Const(-1.0), Const(2.0))",
    "Clamp(X, 0, 1)": "Clamp(X, Const(0.0), Const(1.0))",
    "Mod(X, B, 0)": "Mod(X, B)",
    "Mod(X, B, P)": "Add(Mod(Sub(X, P), B), P)",
    "Round(X, 0)": "Round(X)",
    "Round(X, 2)": "Div(Round(Mul(Const(100.0), X)), Const(100.0))",
    "WeightedSqDist(P, X, Y)": "WeightedSqDist(P, X, Y)",
    "SqNormIso(B, X)": "WeightedSqNorm(B, X)",
    "TensorDot(X, Y, Ind(3), Ind(3), Ind(0), Ind(0))": "TensorDot(X, Y, [3], [3], [0], [0])",
    "TensorDot(X, Y, 3, 3, [], [])": "TensorDot(X, Y, Ind(3), Ind(3), Ind(), Ind())",
    "Elem(X, 1)": "Elem(X,1)",
    "Grad(X * Y, X, P)": "Mul(P, Y)",
    "Diff(X * Y, X, P)": "Mul(Y, P)",
    "Grad(Y, X, P)": "Zero(3)",
    "Factorize(X, Y) + AutoFactorize(X)": "Add(X, X)",
    "Var(0,3,0) - Vi(0,3)": "Sub(X, X)",
    "1e-3*X - .5*Y + 2.": "Add(Sub(Mul(Const(0.001), X), Mul(Const(0.5), Y)), Const(2.0))",
    "  X+\tY\n": "Add(X,Y)",
    "+X": "X",
    "(((X)))": "X",
    "TraceOperator(X * Y, X)": "TraceOperator(Mul(X,Y),X)",
}


@pytest.mark.parametrize("text", SAME)
def test_meaning(text):
    assert p(text) is p(SAME[text])


MISTAKES = {
    "": (0, "a value is expected; found the end"),
    "X +": (3, "a value is expected; found the end"),
    "X * / Y": (4, "a value is expected; found '/'"),
    "X Y": (2, "an operator is expected; found 'Y'"),
    "(X": (0, "'(' is never closed"),
    "Exp(X": (0, "'(' is never closed"),
    "X)": (1, "an operator is expected; found ')'"),
    "(X]": (2, "')' is expected; found ']'"),
    "X, Y": (1, "an operator is expected; found ','"),
    "(X, Y)": (2, "here no function is open"),
    "Exp()": (0, "Exp takes 1 formula(s); got 0"),
    "Exp(X, Y)": (0, "Exp takes 1 formula(s); got 2"),
    "Exp(X,)": (6, "a value is expected; found ')'"),
    "Elem(X)": (0, "Elem takes 1 formula(s) and the parameters index; got 1"),
    "Elem(X, Y)": (8, "Elem takes a literal here"),
    "Elem(X, 3)": (0, "outside a vector of dimension 3"),
    "Expp(X)": (0, "unknown function 'Expp'; did you mean 'Exp'?"),
    "exp(X)": (0, "did you mean 'Exp'?"),
    "2 + Zzz": (4, "unknown variable 'Zzz'; known: B, P, X, Y"),
    "Exp + 1": (0, "Exp is a function"),
    "X - Exp(Y - Concat(X, Y))": (10, "Sub: dimensions must be equal or 1; got 3, 6"),
    "X $ Y": (2, "unexpected character '$'"),
    "X ; Y": (2, "unexpected character ';'"),
    "__import__('os')": (0, "unknown function '__import__'"),
    "X.real": (1, "unexpected character '.'"),
    "X + 'a'": (4, "a formula is expected; found 'a'"),
    "[1] + X": (0, "a formula is expected; found (1,)"),
    "Pow(X)": (0, "Pow takes (formula, whole number) or (formula, formula); got 1 argument(s)"),
    "Round(X, 0.5)": (0, "Round takes (formula, whole number) or (formula)"),
    "Ind(X)": (4, "Ind takes whole numbers"),
    "Const(X)": (0, "Const takes one number"),
    "Vi(3)": (0, "Vi takes 2 whole number(s); got 1"),
    "Var(0,3,5)": (0, "needs cat = 0 (i), 1 (j) or 2 (parameter); got 5"),
    "Vi(0,0)": (0, "dim must be an integer >= 1; got 0"),
    "Grad(X, X * Y, P)": (0, "needs a variable to differentiate by"),
}


@pytest.mark.parametrize("text", MISTAKES)
def test_mistakes_are_shown_where_they_are(text):
    position, message = MISTAKES[text]
    with pytest.raises(ValueError) as caught:
        p(text)
    first, line, mark = str(caught.value).split("\n")
    assert first.startswith(f"formula, position {position}: ") and message in first
    assert line == f"    {text}" and mark.index("^") == 4 + position


@pytest.mark.parametrize("text", ["BSpline(X, B, 2)", "SoftDTW_SqDist(X, Y, B)", "ComplexExp(X)"])
def test_not_yet(text):
    with pytest.raises(NotImplementedError, match="not available yet"):
        p(text)


ALIASES_READ = {
    "X = Vi(3)": ("X", (0, 5, 3)),
    "X=Vj(0,3)": ("X", (1, 0, 3)),
    "Pm(2)": (None, (2, 5, 2)),
    " x_1 = Var( 4 , 2 , 1 ) ": ("x_1", (1, 4, 2)),
    "y = Vy(3)": ("y", (1, 5, 3)),
}


@pytest.mark.parametrize("text", ALIASES_READ)
def test_aliases(text):
    name, (cat, ind, dim) = ALIASES_READ[text]
    assert parse_alias(text, 5) == (name, var(cat, ind, dim))


@pytest.mark.parametrize(
    "text", ["X = Vk(3)", "X = Vi(3", "X = Vi(a)", "1X = Vi(3)", "X = Vi(1,2,3)", "X = Vi()", "X = Var(3)", ""]
)
def test_aliases_that_are_none(text):
    with pytest.raises(ValueError, match="alias"):
        parse_alias(text, 0)
