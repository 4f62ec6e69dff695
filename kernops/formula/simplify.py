"""Rewrites of a lowered formula that change what is computed per pair, not the result beyond rounding."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from functools import partial

from .graph import PAIR, I, J, Node, P, const, make, topological
from .ops import OPS, add, apply, broadcast, concat, div, mul, neg, sub, total
from .signs import sign_of

#: Numbers up to this, and their inverses, may leave a root or its square, which others could make overflow, or vanish,
#: where the formula as written does not.
MODEST = 1000.0


def simplify(root: Node) -> Node:
    """Scalars pulled out of sums over components, exponentials brought to base 2 where that absorbs a factor, and
    logarithms no more accurate than what is added to them."""
    new: dict[Node, Node] = {}
    for node in topological(root):
        args = tuple(new[a] for a in node.args)
        args = _without_broadcasts(node, args)
        rule = _RULES.get(node.op)
        out = rule(*args) if rule else None
        new[node] = out or (node if args == node.args else make(node.op, args, node.params))
    return new[root]


def _without_broadcasts(node: Node, args: tuple[Node, ...]) -> tuple[Node, ...]:
    """Elementwise ops broadcast by themselves, as long as one argument has the full dimension."""
    if node.op not in OPS or not OPS[node.op].scalar:
        return args
    bare = tuple(a.args[0] if a.op == "Broadcast" else a for a in args)
    return bare if any(a.dim == node.dim for a in bare) else args


def _sum_of_product(a: Node) -> Node | None:
    """sum(s · v) = s · sum(v) for a scalar s; likewise sum(v / s) and sum(-v)."""
    steps: list[Callable[[Node], Node]] = []
    while a.dim > 1:
        if a.op == "Neg":
            steps.append(neg)
            a = a.args[0]
        elif a.op == "Div" and a.args[1].dim == 1:
            steps.append(partial(_divided_by, a.args[1]))
            a = a.args[0]
        elif a.op == "Mul" and 1 in (a.args[0].dim, a.args[1].dim):
            s, a = sorted(a.args, key=lambda n: n.dim)
            steps.append(partial(mul, s))
        else:
            break
    if not steps:
        return None
    out = total(a)
    for step in reversed(steps):
        out = step(out)
    return out


def _root_of_multiple(a: Node) -> Node | None:
    """sqrt(c · s) = sqrt(c) · sqrt(s) for a number c > 0, which then meets the other numbers around it."""
    if a.kind == PAIR and a.op == "Mul":
        for c, s in (a.args, a.args[::-1]):
            if c.value is not None and 1 / MODEST <= c.value <= MODEST:
                return mul(math.sqrt(c.value), apply("Sqrt", s))
    return None


def _square_of_root(a: Node) -> Node | None:
    """The square of a root, or of a multiple of one, is there already."""
    if a.op == "Sqrt" and sign_of(a.args[0]) > 0:
        return a.args[0]
    if a.kind == PAIR and a.op == "Mul":
        for c, s in (a.args, a.args[::-1]):
            if c.value is not None and 1 / MODEST <= abs(c.value) <= MODEST:
                square = _square_of_root(s)
                return None if square is None else mul(c.value * c.value, square)
    return None


def _divided_by(s: Node, a: Node) -> Node:
    return div(a, s)


def _exp_to_exp2(a: Node) -> Node | None:
    """exp(c · s) = exp2((c · log2 e) · s), where c is known before the pair is."""
    if a.kind != PAIR:
        return None
    scaled = _scaled(a, math.log2(math.e))
    return None if scaled is None else apply("Exp2", scaled)


def _scaled(a: Node, factor: float, depth: int = 8) -> Node | None:
    """``factor * a`` where the product can be absorbed by a term that is not computed per pair.

    Not looked for below ``depth`` products: a graph can have exponentially many paths.
    """
    if depth == 0:
        return None
    if a.op == "Neg":
        inner = _scaled(a.args[0], -factor, depth - 1)
        return inner if inner is not None else mul(-factor, a.args[0])
    if a.op == "Mul":
        for c, s in (a.args, a.args[::-1]):
            if c.kind != PAIR and c.dim == 1:
                return mul(mul(factor, c), s)
        for s, t in (a.args, a.args[::-1]):
            inner = _scaled(s, factor, depth - 1)
            if inner is not None:
                return mul(inner, t)
    if a.op == "Div" and a.args[1].kind != PAIR and a.args[1].dim == 1:
        return mul(div(factor, a.args[1]), a.args[0])
    return None


def _sum(a: Node, b: Node) -> Node | None:
    found = _beside_number(add, a, b)
    return _common_factor(a, b) if found is None else found


def _difference_with_number(a: Node, b: Node) -> Node | None:
    return _beside_number(sub, a, b)


def _beside_number(op: Callable[[Node, Node], Node], a: Node, b: Node) -> Node | None:
    """A logarithm beside a number of its size need not be accurate where it is near 0."""
    if a.value is not None:
        term = _rough(b, abs(a.value))
        return None if term is None else op(a, term)
    if b.value is not None:
        term = _rough(a, abs(b.value))
        return None if term is None else op(term, b)
    return None


#: A logarithm -> the same with an error of 2^-22 of 1 + |log|.
_ROUGH: dict[str, Callable[[Node], Node]] = {
    "Log": lambda a: apply("LogTerm", a),
    "Log1p": lambda a: apply("LogTermOfNormal", add(1.0, a)),
}


def _rough(a: Node, size: float) -> Node | None:
    """``a``, a logarithm of pairs or a multiple of one, as a term of a sum with a number of that size."""
    if a.op == "Neg":
        term = _rough(a.args[0], size)
        return None if term is None else neg(term)
    if a.op == "Mul":
        for c, t in (a.args, a.args[::-1]):
            if c.value:
                term = _rough(t, size / abs(c.value))
                return None if term is None else mul(c, term)
    return _ROUGH[a.op](*a.args) if a.op in _ROUGH and a.kind == PAIR and size >= 1 else None


def _common_factor(a: Node, b: Node) -> Node | None:
    """f · s ± f · t = f · (s ± t) for a factor f that is computed per pair, where s and t are not.

    So the derivatives of a distance by what both of its points are divided by become one: of (x / l - y / l), which is
    there already. ``row_factor`` then takes the division by l out of the sum.
    """
    minus, f, s = _bare(a)[0], *_pair_and_other(_bare(a)[1])
    plus, g, t = _bare(b)[0], *_pair_and_other(_bare(b)[1])
    if f is None or g is None or s is None or t is None:
        return None
    (of_f, f), (of_s, s), (of_g, g), (of_t, t) = map(_bare, (f, s, g, t))
    if f is not g or s.dim != t.dim:
        return None
    minus, plus = minus ^ of_f ^ of_s, plus ^ of_g ^ of_t
    divisor = s.args[1] if s.op == t.op == "Div" and s.args[1] is t.args[1] else None
    if divisor is not None:
        s, t = s.args[0], t.args[0]
    if minus != plus and s.kind == J:  # rows first, as in a distance
        s, t, minus, plus = t, s, plus, minus
    out = sub(s, t) if minus != plus else add(s, t)
    out = mul(f, out if divisor is None else div(out, divisor))
    return neg(out) if minus else out


def _bare(a: Node) -> tuple[bool, Node]:
    """Whether ``a`` is a negative, and of what."""
    return (True, a.args[0]) if a.op == "Neg" else (False, a)


def _pair_and_other(a: Node) -> tuple[Node | None, Node | None]:
    """The factors of a product of which one depends on the pair and the other does not."""
    if a.op == "Mul":
        for f, s in (a.args, a.args[::-1]):
            if f.kind == PAIR and s.kind != PAIR and s.value is None:
                return f, s
    return None, None


_RULES: dict[str, Callable[..., Node | None]] = {
    "Sum": _sum_of_product,
    "Sqrt": _root_of_multiple,
    "Square": _square_of_root,
    "Exp": _exp_to_exp2,
    "Add": _sum,
    "Sub": _difference_with_number,
}


def row_factor(root: Node) -> tuple[Node | None, Node]:
    """``(factor, rest)`` with root = factor · rest and a factor that does not depend on the column; for sums."""
    if root.op == "Concat":
        return _factor_of_pieces(root)
    rows: list[Node] = []
    rest: list[Node] = []
    _split_product(root, rows, rest)
    if not rows:
        return None, root
    cols = [n for n in rest if n.kind != PAIR]
    pairs = [n for n in rest if n.kind == PAIR] + ([_product(cols)] if cols else [])
    return _product(rows), _product(pairs) if pairs else const(1.0)


def weighed_terms(root: Node) -> Node:
    """b · (s + t) · f = (b · s + b · t) · f for a column's number b, a term s that does not depend on the row, and f.

    b · s is then computed once per column, b · t + b · s in one instruction, and what is left is one product that a sum
    takes in as it is: an instruction less for a pair. Powers of a distance times an exponential, as Matérn's, are such.
    """
    rows: list[Node] = []
    factors: list[Node] = []
    _split_product(root, rows, factors)
    cols = [n for n in factors if n.kind != PAIR]
    sums = [
        n for n in factors if n.kind == PAIR and n.op in ("Add", "Sub") and _holds_column(n) and factors.count(n) == 1
    ]
    if rows or len(cols) != 1 or not sums or len(factors) < 3 or any(n.dim > 1 for n in factors):
        return root
    others = [n for n in factors if n is not sums[0] and n is not cols[0]]
    return _product([*others, _weighed(sums[0], cols[0])])


def _terms(a: Node, depth: int = 8) -> list[Node]:
    """What ``a`` is the sum of, each perhaps with the other sign."""
    if a.op not in ("Add", "Sub", "Neg") or a.kind != PAIR or not depth:
        return [a]
    return [term for t in a.args for term in _terms(t, depth - 1)]


def _holds_column(a: Node) -> bool:
    """Whether a term of the sum ``a`` does not depend on the row, and none is a number of the row.

    x - y, as it is, has no error where x and y are close; the difference of b · x and b · y has that of two products.
    """
    kinds = {t.kind for t in _terms(a)}
    return not kinds.isdisjoint((P, J)) and I not in kinds


def _weighed(a: Node, b: Node, depth: int = 8) -> Node:
    """b · a, where what does not depend on the row takes b, if there is such a part."""
    if a.kind not in (P, J) and depth:
        if a.op in ("Add", "Sub") and _holds_column(a):
            return (add if a.op == "Add" else sub)(*(_weighed(t, b, depth - 1) for t in a.args))
        if a.op == "Neg":
            return neg(_weighed(a.args[0], b, depth - 1))
        if a.op == "Mul":
            for c, s in (a.args, a.args[::-1]):
                if c.kind in (P, J):
                    return _weighed(s, mul(b, c), depth - 1)
            for c, s in (a.args, a.args[::-1]):
                if _holds_column(c):
                    return mul(_weighed(c, b, depth - 1), s)
    return mul(b, a)


def _factor_of_pieces(root: Node) -> tuple[Node | None, Node]:
    """Each piece of a concatenation has a factor of its own."""
    whole = pieces(root, ("Concat",))
    found = [row_factor(piece) for piece in whole]
    if all(factor is None for factor, _ in found):
        return None, root
    factors = [broadcast(const(1.0) if f is None else f, a.dim) for (f, _), a in zip(found, whole)]
    return concat(*factors), concat(*(broadcast(rest, a.dim) for (_, rest), a in zip(found, whole)))


def pieces(root: Node, ops: tuple[str, ...] = ("Concat", "Broadcast")) -> list[Node]:
    """What ``root`` is put together of by ``ops``, in order."""
    found, stack = [], [root]
    while stack:
        node = stack.pop()
        if node.op in ops:
            stack.extend(reversed(node.args))
        else:
            found.append(node)
    return found


def _product(factors: list[Node]) -> Node:
    """The product, scalars first so that they are multiplied once and not per component."""
    first, *others = sorted(factors, key=lambda n: n.dim)
    for n in others:
        first = mul(first, n)
    return first


def _split_product(root: Node, rows: list[Node], rest: list[Node]) -> None:
    uses = Counter(a for n in topological(root) for a in n.args)
    stack = [root]
    while stack:
        node = stack.pop()
        if node.kind in (P, I):
            rows.append(node)
        elif uses[node] > 1:  # computed anyway; and x = x · x, repeated, has 2ⁿ factors
            rest.append(node)
        elif node.op == "Mul":
            stack.extend(reversed(node.args))
        elif node.op == "Neg":
            rows.append(const(-1.0))
            stack.append(node.args[0])
        elif node.op == "Div" and node.args[1].kind in (P, I):
            rows.append(div(1.0, node.args[1]))
            stack.append(node.args[0])
        else:
            rest.append(node)
