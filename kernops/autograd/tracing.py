"""Building formulas in code that ``torch.compile`` traces.

Dynamo follows Python code line by line, and the interning of nodes (locks, weak references) is not for it. A function
decorated with :func:`traceable` is called by Dynamo as a whole, while it traces, and its result is a constant of the
compiled code. Dynamo passes plain constants in and out of such functions, so that a formula that comes to life inside
the traced code is represented there by a :class:`TracedNode`, which holds the formula as text.

A formula from outside the traced code (of a LazyTensor made before, say) goes in by its ``id``: Dynamo reads that as a
constant and guards it, and every version of torch since 2.5 does.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, TypeVar, cast

from torch.compiler import is_dynamo_compiling

from ..formula import graph, ops, plan
from ..formula.graph import Node
from ..formula.plan import Plan
from .text import formula_text, plan_text, read_formula, read_plan

F = TypeVar("F", bound=Callable[..., Any])

_NODE, _PLAN, _ID, _FLOAT, _TUPLE = "node", "plan", "id", "float", "tuple"


class TracedNode:
    """A formula inside traced code; it has the attributes of a ``Node`` that describe it, and no arguments."""

    def __init__(self, text: str, op: str, params: tuple, dim: int, kind: int, value: float | None) -> None:
        self.text = text
        self.op = op
        self.params = params
        self.dim = dim
        self.kind = kind
        self.value = value
        self.is_var = op == "Var"


class TracedPlan:
    """A plan inside traced code."""

    def __init__(self, text: str, core: str, k: int, n_vars: int, dim: int, variables: tuple) -> None:
        self.text = text
        self.core = core
        self.k = k
        self.n_vars = n_vars
        self.dim = dim
        self.variables = variables


# Constants are the numbers, strings and tuples that Dynamo knows. What is none of these travels as a tuple whose first
# item says what it is; tuples do too.


def _pack(x: Any) -> Any:
    """An argument as a constant. Dynamo traces this."""
    if isinstance(x, TracedNode):
        return (_NODE, x.text)
    if isinstance(x, TracedPlan):
        return (_PLAN, x.text)
    if isinstance(x, Node):
        return (_ID, id(x))
    if isinstance(x, Plan):
        return (_PLAN, x.core, _pack(x.formula), _pack(x.weight), x.k, x.n_vars, x.algorithm, x.first)
    if isinstance(x, (tuple, list)):
        return (_TUPLE, *[_pack(y) for y in x])
    if isinstance(x, bool):
        return x
    if isinstance(x, int):
        return operator.index(x)  # a size that Dynamo keeps symbolic becomes a number
    if isinstance(x, float):
        return (_FLOAT, x.hex())  # likewise
    return x


def _unpack(x: Any) -> Any:
    if not isinstance(x, tuple):
        return x
    tag, *rest = x
    if tag == _NODE:
        return read_formula(rest[0])[0]
    if tag == _PLAN:
        return read_plan(rest[0]) if len(rest) == 1 else plan.make_plan(rest[0], *map(_unpack, rest[1:]))
    if tag == _ID:
        return next(n for n in list(graph._interned.values()) if id(n) == rest[0])
    return float.fromhex(rest[0]) if tag == _FLOAT else tuple(map(_unpack, rest))


def _pack_result(x: Any) -> Any:
    if isinstance(x, Node):
        return (_NODE, formula_text(x), x.op, x.params, x.dim, x.kind, x.value)
    if isinstance(x, Plan):
        variables = tuple(map(_pack_result, x.variables))
        return (_PLAN, plan_text(x), x.core, x.k, x.n_vars, x.dim, variables)
    return (_TUPLE, *map(_pack_result, x)) if isinstance(x, (tuple, list)) else x


def _unpack_result(x: Any) -> Any:
    """What the traced code gets. Dynamo traces this."""
    if not isinstance(x, tuple):
        return x
    if x[0] == _NODE:
        return TracedNode(*x[1:])
    if x[0] == _PLAN:
        return TracedPlan(x[1], x[2], x[3], x[4], x[5], tuple([TracedNode(*v[1:]) for v in x[6]]))
    return tuple([_unpack_result(y) for y in x[1:]])


def resolve(x: Any) -> Any:
    """``x`` with formulas and plans of traced code exchanged for the real ones, for use outside."""
    if type(x) is TracedNode:
        return read_formula(x.text)[0]
    if type(x) is TracedPlan:
        return read_plan(x.text)
    return type(x)(map(resolve, x)) if type(x) in (tuple, list) else x


_TRACED = frozenset((TracedNode, TracedPlan))


def traceable(function: F) -> F:
    """``function``, which builds formulas or asks about them, made callable in code that ``torch.compile`` traces.

    Arguments and results may be formulas, plans, numbers, strings, ``None``, and tuples of these (a list arrives as a
    tuple). It must depend on its arguments alone. Outside of traced code it is called as it is.
    """

    # Dynamo of torch 2.5 stores the result under this function's name among the globals of the user's module.
    def __kernops_constant__(args: tuple, names: tuple, values: tuple) -> Any:
        kwargs = dict(zip(names, map(_unpack, values)))
        return _pack_result(function(*map(_unpack, args), **kwargs))

    # What torch.compiler.assume_constant_result does after importing all of Dynamo, which takes a second.
    __kernops_constant__._dynamo_marked_constant = True  # type: ignore[attr-defined]

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            packed = tuple([_pack(a) for a in args])
            values = tuple([_pack(v) for v in kwargs.values()])
            return _unpack_result(__kernops_constant__(packed, tuple(kwargs.keys()), values))
        for a in args:
            if type(a) in _TRACED:  # it left a compiled function as part of a LazyTensor
                return function(*resolve(args), **kwargs)
        return function(*args, **kwargs)

    return cast(F, call)


def cached(maxsize: int) -> Callable[[F], F]:
    """``functools.lru_cache`` that stands aside in traced code, where Dynamo would warn about it."""

    def decorate(function: F) -> F:
        stored = lru_cache(maxsize)(function)

        @wraps(function)
        def call(*args: Any) -> Any:
            return function(*args) if is_dynamo_compiling() else stored(*args)

        call.cache_clear = stored.cache_clear  # type: ignore[attr-defined]
        return cast(F, call)

    return decorate


def remembered(maxsize: int) -> Callable[[F], F]:
    """:func:`traceable`, and each result is kept: a call that was made before costs one look-up.

    Beyond ``maxsize`` results all are forgotten. No result may be ``None``.
    """

    def decorate(function: F) -> F:
        traced = traceable(function)
        known: dict[tuple, Any] = {}

        @wraps(function)
        def call(*args: Any) -> Any:
            if is_dynamo_compiling():
                return traced(*args)
            found = known.get(args)
            return missed(resolve(args)) if found is None else found

        def missed(args: tuple) -> Any:
            found = known.get(args)
            if found is None:
                if len(known) >= maxsize:
                    known.clear()
                found = known[args] = function(*args)
            return found

        call.known = known  # type: ignore[attr-defined]
        return cast(F, call)

    return decorate


var, const, make = traceable(graph.var), traceable(graph.const), traceable(graph.make)
swap_axes, relabel = traceable(graph.swap_axes), traceable(graph.relabel)
apply, add, sub, mul = traceable(ops.apply), traceable(ops.add), traceable(ops.sub), traceable(ops.mul)
div, neg, power = traceable(ops.div), traceable(ops.neg), traceable(ops.power)
total, broadcast = traceable(ops.total), traceable(ops.broadcast)
make_plan = traceable(plan.make_plan)


@traceable
def seen(x: Any) -> Any:
    """A formula or plan as traced code sees it, wherever it was made."""
    return x
