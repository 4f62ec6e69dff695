"""Formulas built for expressions, each once: in steady state an expression costs look-ups in these tables only.

Everything here maps numbers, names and nodes to nodes, and touches no data. ``torch.compile`` does not look inside.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from ..autograd.tracing import traceable
from ..formula import functions
from ..formula.graph import CAT_SCALAR, Node, Param, const, relabel, swap_axes, var, variables
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


@traceable
@lru_cache(maxsize=1 << 14)
def build(op: str, params: tuple[Param, ...], *args: Node) -> Node:
    """``op(*args, *params)``."""
    builder = BUILDERS.get(op)
    return apply(op, *args, params=params) if builder is None else builder(*args, *params)


@traceable
@lru_cache(maxsize=1 << 14)
def moved(f: Node, numbers: tuple[int, ...]) -> Node:
    """``f`` with its variables renumbered."""
    return relabel(f, numbers)


@traceable
@lru_cache(maxsize=1 << 14)
def joined(op: str, f: Node, g: Node, numbers: tuple[int, ...] | None) -> Node:
    """``op(f, g)`` with the variables of ``g`` renumbered, unless ``numbers`` is None."""
    return build(op, (), f, g if numbers is None else moved(g, numbers))


@traceable
@lru_cache(maxsize=1 << 12)
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


@traceable
@lru_cache(maxsize=1 << 11)
def _constant(x: float) -> Node:
    return const(x)


@traceable
@lru_cache(maxsize=8)
def _zero(text: str) -> Node:
    """0.0 or -0.0, which a cache keyed by numbers takes for the same."""
    return const(float(text))


@traceable
@lru_cache(maxsize=1 << 12)
def variable(cat: int, dim: int, number: int = 0) -> Node:
    """Variable number ``number``."""
    return var(cat, number, dim)


@traceable
@lru_cache(maxsize=1 << 12)
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
