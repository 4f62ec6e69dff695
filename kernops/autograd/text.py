"""Formulas and plans as text that a compiled graph can carry and another process can read.

``str(formula)`` writes a shared sub-expression once for each use, and a derivative of a derivative shares so much that
this can grow exponentially. Here each node is one line of a list, arguments by number, so that the text is as long as
the graph is large.
"""

from __future__ import annotations

import json
from functools import lru_cache

from ..formula.graph import Node, make, topological
from ..formula.plan import Plan, make_plan


@lru_cache(maxsize=1024)
def formula_text(*roots: Node) -> str:
    """The text from which :func:`read_formula` makes ``roots`` again."""
    order = topological(*roots)
    number = {node: k for k, node in enumerate(order)}
    nodes = [[n.op, [number[a] for a in n.args], *n.params] for n in order]
    return json.dumps([nodes, [number[r] for r in roots]], separators=(",", ":"))


@lru_cache(maxsize=1024)
def read_formula(text: str) -> tuple[Node, ...]:
    """The formulas in ``text``; raises ``ValueError`` where it is not one that :func:`formula_text` writes."""
    return _roots(*json.loads(text))


def _roots(lines: list, roots: list[int]) -> tuple[Node, ...]:
    nodes: list[Node] = []
    for op, args, *params in lines:
        nodes.append(make(op, tuple(nodes[a] for a in args), _tuples(params)))
    return tuple(nodes[r] for r in roots)


def _tuples(x: list) -> tuple:
    return tuple(_tuples(y) if isinstance(y, list) else y for y in x)


@lru_cache(maxsize=1024)
def plan_text(plan: Plan) -> str:
    """The text from which :func:`read_plan` makes ``plan`` again."""
    how = "" if (plan.algorithm, plan.first) == ("auto", 0) else f",{json.dumps(plan.algorithm)},{plan.first}"
    return f"[{json.dumps(plan.core)},{plan.k},{plan.n_vars},{formula_text(*plan.roots)}{how}]"


@lru_cache(maxsize=1024)
def read_plan(text: str) -> Plan:
    core, k, n_vars, formulas, *how = json.loads(text)
    algorithm, first = how or ("auto", 0)
    return make_plan(core, *_roots(*formulas), k=k, n_vars=n_vars, algorithm=algorithm, first=first)
