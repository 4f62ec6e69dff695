"""A function and its derivatives at a point as one vector: what covariances of derivatives are made of.

The jet of f of order n at a vector v is (f, ∂f/∂v_1 … ∂f/∂v_d, ∂²f/∂v_1² … ∂²f/∂v_d², …), without mixed derivatives.
For functions of sums over components, such as a distance or a scalar product, all of a jet costs O(d).
"""

from __future__ import annotations

import math
from collections.abc import Collection

from .autodiff import expanded, partial_derivatives
from .graph import PAIR, Node, const, text, topological
from .ops import OPS, add, apply, broadcast, concat, div, mul, total

#: Ops that can be differentiated as often as one likes where they have a value; ``Matern`` of p can 2p times.
SMOOTH = {
    *("Add", "Sub", "Mul", "Div", "Neg", "Inv", "Square", "PowInt", "Pow", "Sum", "Broadcast", "Matern"),
    *("Exp", "Exp2", "Expm1", "Log", "Log2", "Log1p", "Sigmoid", "Softplus", "Erf", "Erfc"),
    *("Sin", "Cos", "Tan", "Sinh", "Cosh", "Tanh", "Atan"),
}

#: A sum of products of scalars with vectors: vector -> scalar.
Terms = dict[Node, Node]


def components(dim: int, order: int) -> int:
    """The length of a jet."""
    return 1 + order * dim


def check_smooth(f: Node, wrt: Collection[Node], order: int) -> None:
    """Raise ``ValueError`` unless ``f`` is known to have derivatives of this order by each of two points ``wrt``.

    Where two points meet, those of roots and absolute values are a convention, which is right for first ones alone.
    """
    moving: set[Node] = set(wrt)
    for node in topological(expanded(f)):
        if moving.isdisjoint(node.args):
            continue
        moving.add(node)
        if node.op not in SMOOTH:
            what = f"{node.op} in {text(f, 200)}"
            raise ValueError(f"the kernel must be differentiable where two points meet; got {what}")
        if node.op == "Matern" and node.params[0] < order:
            nu = node.params[0] + 0.5
            raise ValueError(f"derivatives of order {order} need Matérn's nu > {order}; got nu = {nu}")


def jet(f: Node, wrt: Collection[Node], order: int) -> Node:
    """The jet of a scalar, which moves with all of the variables ``wrt`` at once.

    Raises:
        ValueError: ``f`` is no function of sums over components, each of which reads one component of ``wrt``.
    """
    (dim,) = {v.dim for v in wrt}
    parts = [f]
    for _ in range(order):
        terms = _derivative(parts[-1], wrt)
        parts.append(_total([mul(s, broadcast(v, dim)) for v, s in terms.items()], dim))
    return concat(*parts)


def applied(f: Node, wrt: Collection[Node], coefficients: Node, order: int) -> Node:
    """The scalar product of ``coefficients``, a vector or a part of one, with a scalar's jet; raises as ``jet``."""
    (dim,) = {v.dim for v in wrt}
    out = [mul(apply("Elem", coefficients, params=(0,)), f)]
    last = f
    for k in range(order):
        terms = _derivative(last, wrt)
        weights = apply("Extract", coefficients, params=(1 + k * dim, dim))
        out += [mul(s, _sum_of_products(weights, v)) for v, s in terms.items()]
        last = _total([mul(s, broadcast(v, dim)) for v, s in terms.items()], dim)
    return _total(out, 1)


def _total(terms: list[Node], dim: int) -> Node:
    out: Node | None = None
    for t in terms:
        out = t if out is None else add(out, t)
    return broadcast(const(0.0), dim) if out is None else out


def _derivative(f: Node, wrt: Collection[Node]) -> Terms:
    """Component a of the derivative is that of component a of ``f`` by component a of ``wrt``, as terms."""
    out = _componentwise(f, wrt)
    return {} if out is None else _terms(out)


def _componentwise(root: Node, wrt: Collection[Node]) -> Node | None:
    """The same as a formula, of one component where all are equal; ``None`` where it is zero."""
    root = expanded(root)
    slope: dict[Node, Node | None] = {}
    #: Whether component a reads no other component than a of ``wrt``.
    apart: dict[Node, bool] = {}
    for node in topological(root):
        moving = [a for a in node.args if slope[a] is not None]
        whole = any(a.dim == 1 and node.dim > 1 or not apart[a] for a in moving)
        apart[node] = not whole and node.op != "Sum"
        if node in wrt:
            slope[node] = const(1.0)
        elif not moving:
            slope[node] = None
        elif node.op == "Sum" and apart[node.args[0]] or node.op == "Broadcast":
            slope[node] = slope[node.args[0]]
        elif OPS[node.op].partials is not None:
            slope[node] = _chained(partial_derivatives(node), [slope[a] for a in node.args])
        else:
            what = f"{node.op} in {text(root, 200)}"
            raise ValueError(f"only functions of sums over components, such as distances, have a jet; got {what}")
    return slope[root]


def _chained(partials: tuple[Node | None, ...], slopes: list[Node | None]) -> Node | None:
    out: Node | None = None
    for p, t in zip(partials, slopes):
        if p is not None and t is not None:
            out = mul(p, t) if out is None else add(out, mul(p, t))
    return out


# --- sums of products -------------------------------------------------------------------------------------------------
def _terms(f: Node) -> Terms:
    """``f``, with what scalars multiply the same vector added."""
    out: Terms = {}
    for factors in _products(f):
        number = math.prod(p.value for p in factors if p.value is not None)
        others = [p for p in factors if p.value is None]
        vector = _product([p for p in others if p.dim > 1])
        scalar = mul(number, _product([p for p in others if p.dim == 1]))
        out[vector] = add(out[vector], scalar) if vector in out else scalar
    return out


def _products(f: Node) -> list[list[Node]]:
    """The factors of each of the products whose sum ``f`` is, so that no vector among them has a scalar of the pair."""
    if not _mixed(f):
        return [_factors(f)]
    if f.op == "Neg":
        return [[const(-1.0), *factors] for factors in _products(f.args[0])]
    if f.op == "Div":
        return [[*factors, div(1.0, f.args[1])] for factors in _products(f.args[0])]
    first, second = map(_products, f.args)
    if f.op == "Mul":
        return [[*a, *b] for a in first for b in second]
    return first + (second if f.op == "Add" else [[const(-1.0), *factors] for factors in second])


def _mixed(f: Node) -> bool:
    """Whether ``f`` is a vector made by arithmetic of a scalar that is computed for each pair."""
    if f.dim == 1 or f.kind != PAIR or f.op not in ("Add", "Sub", "Mul", "Neg", "Div"):
        return False
    if f.op == "Div" and f.args[1].dim > 1 and f.args[1].kind == PAIR:
        return False
    return any(a.dim == 1 and a.kind == PAIR or _mixed(a) for a in f.args)


def _factors(f: Node) -> list[Node]:
    """What ``f`` is the product of."""
    if f.op == "Mul":
        return [p for a in f.args for p in _factors(a)]
    if f.op == "Neg":
        return [const(-1.0), *_factors(f.args[0])]
    if f.op == "Div" and f.args[1].kind != PAIR:
        return [*_factors(f.args[0]), div(1.0, f.args[1])]
    return [f]


def _product(factors: list[Node]) -> Node:
    """The product: first of what is not computed for each pair."""
    out = const(1.0)
    for p in sorted(factors, key=lambda n: n.kind == PAIR):
        out = mul(out, p)
    return out


def _sum_of_products(a: Node, b: Node) -> Node:
    """Σ a b of a vector and a product of vectors, or a number for all of its components."""
    return mul(b, total(a)) if b.dim == 1 else total(_product([a, *_factors(b)]))
