"""Formulas built for expressions, each once: in steady state an expression costs look-ups in these tables only.

Everything here maps numbers, names and nodes to nodes, and touches no data. ``torch.compile`` does not look inside.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from ..autograd.tracing import is_dynamo_compiling, remembered
from ..formula import functions
from ..formula.graph import CAT_J, CAT_SCALAR, Node, Param, const, relabel, swap_axes, var, variables
from ..formula.ops import add, apply, broadcast, div, mul, neg, sub

#: Functions that simplify, or that no single row of the table of ops is. All others are ``apply``.
BUILDERS: dict[str, Callable[..., Node]] = {
    "Add": add,
    "Sub": sub,
    "Mul": mul,
    "Div": div,
    "Neg": neg,
    "Power": functions.power_of,
    "ModOffset": functions.mod,
    "Round": functions.rounded,
    "Sinc": functions.sinc,
    "TensorDot": functions.tensordot,
    "DifferenceMatrix": functions.difference_matrix,
    "Grad": functions.grad,
    "Diff": functions.diff,
    "GradMatrix": functions.grad_matrix,
    "Divergence": functions.divergence,
    "Laplacian": functions.laplacian,
    "TraceOperator": functions.trace,
    "Broadcast": broadcast,
    "Pair": functions.pair,
    "Half": functions.half,
    "VectorMean": functions.vector_mean,
    "VectorVar": functions.vector_var,
}

SCALAR = var(CAT_SCALAR, 0, 1)
ZERO = const(0.0)
_LARGEST_CONSTANT = 256


@remembered(1 << 14)
def build(op: str, params: tuple[Param, ...], *args: Node) -> Node:
    """``op(*args, *params)``."""
    builder = BUILDERS.get(op)
    return apply(op, *args, params=params) if builder is None else builder(*args, *params)


@remembered(1 << 14)
def moved(f: Node, numbers: tuple[int, ...]) -> Node:
    """``f`` with its variables renumbered."""
    return relabel(f, numbers)


@remembered(1 << 14)
def joined(op: str, f: Node, g: Node, numbers: tuple[int, ...] | None) -> Node:
    """``op(f, g)`` with the variables of ``g`` renumbered, unless ``numbers`` is None."""
    return build(op, (), f, g if numbers is None else moved(g, numbers))


@remembered(1 << 12)
def swapped(f: Node) -> Node:
    """``f`` with rows and columns exchanged."""
    return swap_axes(f)


def constant(x: float) -> Node | None:
    """The constant for a number that may become part of a formula; ``None`` for one that is to be passed by value.

    Small whole numbers and halves (2, 0.5, -1.5) are part of what is computed; others, such as a bandwidth, vary from
    call to call and must not cost a compilation each.
    """
    if not (-_LARGEST_CONSTANT <= x <= _LARGEST_CONSTANT and 2 * x % 1 == 0):
        return None
    return _constant(x) if x else _zero(repr(x))


@remembered(1 << 11)
def _constant(x: float) -> Node:
    return const(x)


@remembered(8)
def _zero(text: str) -> Node:
    """0.0 or -0.0, which a cache keyed by numbers takes for the same."""
    return const(float(text))


def with_number(op: str, f: Node, x: float, first: bool) -> Node | None:
    """``op(f, x)``, or ``op(x, f)`` if x comes ``first``; ``None`` where x may not become part of a formula."""
    traced = is_dynamo_compiling()
    node = None if traced else _with_numbers.get((op, f, x, first))
    if node is not None:
        return node
    number = constant(x)
    if number is None:
        return None
    node = build(op, (), number, f) if first else build(op, (), f, number)
    if x and not traced:  # 0.0 and -0.0 are one key
        if len(_with_numbers) >= _MOST_KEPT:
            _with_numbers.clear()
        _with_numbers[op, f, x, first] = node
    return node


_with_numbers: dict[tuple[str, Node, float, bool], Node] = {}
_MOST_KEPT = 1 << 14


@remembered(1 << 12)
def variable(cat: int, dim: int, number: int = 0) -> Node:
    """Variable number ``number``."""
    return var(cat, number, dim)


@remembered(1 << 12)
def weighted(f: Node, dim: int, number: int) -> Node:
    """``f`` times variable ``number``, a vector of each column."""
    return build("Mul", (), f, variable(CAT_J, dim, number))


@remembered(1 << 12)
def numbers_of(f: Node) -> tuple[int, ...]:
    """Numbers of the variables that occur."""
    return tuple(v.params[1] for v in variables(f))  # type: ignore[misc]


def whole(name: str, what: str, value: Any) -> int:
    """``value`` as a Python int, if it is a whole number of any library."""
    if isinstance(value, bool):
        raise TypeError(f"{name}: {what} must be a whole number; got {value!r}")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: {what} must be a whole number; got {type(value).__name__}") from None
