"""Reverse- and forward-mode derivatives of formulas. A derivative is a formula again, so every order exists."""

from __future__ import annotations

from .graph import Node, topological
from .ops import OPS, Op, add, as_node, broadcast, lowered, mul, total


def partial_derivatives(node: Node) -> tuple[Node | None, ...]:
    """The elementwise derivatives of a scalar op by its arguments."""
    partials = OPS[node.op].partials
    if partials is None:
        raise ValueError(f"{node.op} has no derivative in the table of ops")
    return tuple(None if p is None else as_node(p) for p in partials(*node.args, *node.params))


def _fit(g: Node, dim: int) -> Node:
    """The cotangent ``g`` brought to dimension ``dim``: the adjoint of broadcasting, or broadcasting itself."""
    return total(g) if dim == 1 else broadcast(g, dim)


def _pull(node: Node, g: Node) -> tuple[Node | None, ...]:
    """The cotangents of the arguments of ``node``, whose own cotangent is ``g``."""
    op = OPS[node.op]
    if op.vjp is not None:
        return op.vjp(node, g)
    return tuple(None if p is None else _fit(mul(g, p), a.dim) for p, a in zip(partial_derivatives(node), node.args))


def _push(node: Node, tangents: tuple[Node | None, ...]) -> Node | None:
    """The tangent of ``node`` given those of its arguments."""
    op = OPS[node.op]
    if op.jvp is not None:
        return op.jvp(node, tangents)
    out: Node | None = None
    for p, t in zip(partial_derivatives(node), tangents):
        if p is not None and t is not None:
            term = mul(p, t)
            out = term if out is None else add(out, term)
    return out if out is None or out.dim == node.dim else broadcast(out, node.dim)


def expanded(root: Node) -> Node:
    """``root`` as it is differentiated: composites that do not know their derivative are what they are made of."""
    return lowered(root, keep=_knows_derivative)


def _knows_derivative(op: Op) -> bool:
    return op.partials is not None


def vjp(pairs: list[tuple[Node, Node]], wrt: list[Node]) -> list[Node | None]:
    """Cotangents of the variables ``wrt`` of ``sum <formula, cotangent>`` over ``pairs``; ``None`` where it is zero."""
    roots = [(expanded(f), g) for f, g in pairs]
    order = topological(*(f for f, _ in roots))
    wanted = set(wrt)
    reaches = set()  # the nodes below which some variable of interest lies
    for node in order:
        if node in wanted or any(a in reaches for a in node.args):
            reaches.add(node)
    cotangent: dict[Node, Node] = {}

    def accumulate(node: Node, g: Node) -> None:
        cotangent[node] = add(cotangent[node], g) if node in cotangent else g

    for f, g in roots:
        if g.dim not in (1, f.dim):
            raise ValueError(f"a cotangent of dimension {g.dim} does not fit a formula of dimension {f.dim}")
        accumulate(f, broadcast(g, f.dim))
    for node in reversed(order):
        if node not in cotangent or node not in reaches or not node.args:
            continue
        for arg, part in zip(node.args, _pull(node, cotangent[node])):
            if part is not None and arg in reaches:
                accumulate(arg, part)
    return [cotangent.get(v) for v in wrt]


def jvp(root: Node, tangents: dict[Node, Node]) -> Node | None:
    """The derivative of ``root`` along ``tangents`` (variable -> tangent); ``None`` where it is zero."""
    for v, t in tangents.items():
        if t.dim not in (1, v.dim):
            raise ValueError(f"a tangent of dimension {t.dim} does not fit {v} of dimension {v.dim}")
    root = expanded(root)
    tangent: dict[Node, Node | None] = {}
    for node in topological(root):
        if node in tangents:
            tangent[node] = broadcast(tangents[node], node.dim)
        elif any(tangent[a] is not None for a in node.args):
            tangent[node] = _push(node, tuple(tangent[a] for a in node.args))
        else:
            tangent[node] = None
    return tangent[root]
