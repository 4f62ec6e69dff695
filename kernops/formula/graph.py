"""The graph of a formula: immutable nodes, each built once.

A node stands for a vector of ``dim`` components that may depend on the row i, on the column j, on both or on neither.
Two nodes built from the same operation, arguments and parameters are the same object, so that equality is identity,
caches can be keyed by nodes, and a shared sub-expression is computed once.
"""

from __future__ import annotations

import hashlib
import numbers
import threading
import weakref
from collections.abc import Container
from typing import Any

Param = int | float | str | tuple

#: Dependence kinds are bit masks: P = neither, I = rows, J = columns, PAIR = both.
P, I, J, PAIR = 0, 1, 2, 3

#: Categories of variables. The first three are KeOps' codes; a scalar is one number passed by value.
#: Row and column slots are the hoisted terms that a back end has computed once per row or column (see ``plan``).
CAT_I, CAT_J, CAT_P, CAT_SCALAR, CAT_ROW, CAT_COL = range(6)
_KIND_OF_CAT = (I, J, P, P, I, J)
_PREFIX_OF_CAT = ("Vi", "Vj", "Pm", "Scalar", "Row", "Col")

#: Characters after which ``str`` gives up on a formula.
LONGEST_TEXT = 1_000_000

_interned: weakref.WeakValueDictionary[tuple, Node] = weakref.WeakValueDictionary()
_lock = threading.RLock()  # building a composite op builds others


class Node:
    """One operation applied to other nodes. Build nodes with :func:`make` or with the functions of ``ops``.

    Attributes:
        op: name of the operation, a key of the table of ops, or ``"Var"`` / ``"Const"`` for a leaf.
        args: the nodes that the operation is applied to.
        params: static parameters (an index, a dimension, a constant's value).
        dim: number of components of the value.
        kind: dependence on rows and columns (``P``, ``I``, ``J`` or ``PAIR``).
    """

    __slots__ = ("op", "args", "params", "dim", "kind", "_digest", "__weakref__")
    op: str
    args: tuple[Node, ...]
    params: tuple[Any, ...]
    dim: int
    kind: int
    _digest: Any  # str, None until it is asked for

    def __init__(self) -> None:
        raise TypeError("nodes are built by kernops.formula.graph.make, not by calling Node")

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a formula is immutable; cannot set {name!r}")

    @property
    def digest(self) -> str:
        """A hash of the whole formula that is the same in every process (used as a cache key)."""
        if self._digest is None:
            for node in topological(self):  # bottom-up, so that no recursion runs deep
                if node._digest is None:
                    text = repr((node.op, node.params, [a._digest for a in node.args]))
                    object.__setattr__(node, "_digest", hashlib.sha256(text.encode()).hexdigest()[:32])
        return self._digest

    @property
    def is_var(self) -> bool:
        return self.op == "Var"

    @property
    def value(self) -> float | None:
        """The number, for a constant; None for anything else."""
        return self.params[0] if self.op == "Const" else None  # type: ignore[return-value]

    def __repr__(self) -> str:
        return f"<formula {text(self, 500)} of dimension {self.dim}>"

    def __str__(self) -> str:
        return text(self)

    def __reduce__(self) -> tuple:
        place: dict[Node, int] = {}
        for node in topological(self):  # flat, because pickle would go down the arguments by recursion
            place[node] = len(place)
        return _restore, (tuple((n.op, tuple(place[a] for a in n.args), n.params) for n in place),)

    def __copy__(self) -> Node:
        return self

    def __deepcopy__(self, memo: dict) -> Node:
        return self


def _leaf_text(node: Node) -> str | None:
    if node.op == "Const":
        return f"Const({node.params[0]!r})"
    if node.op == "Var":
        cat, ind, dim = node.params
        name = _PREFIX_OF_CAT[cat]  # type: ignore[index]
        return f"{name}({ind})" if cat == CAT_SCALAR else f"{name}({ind},{dim})"
    return None


def _param_text(p: Param) -> str:
    if isinstance(p, str):
        return f'"{p}"'
    return f"Ind({','.join(map(repr, p))})" if isinstance(p, tuple) else repr(p)


def text(root: Node, limit: int = LONGEST_TEXT) -> str:
    """The canonical text of ``root``, cut after ``limit`` characters with an ellipsis, which does not parse.

    The text writes a shared node out wherever it is used, so that it can be exponentially longer than the graph.
    """
    pieces: list[str] = []
    length = 0
    stack: list[Node | str] = [root]
    while stack and length <= limit:
        item = stack.pop()
        if isinstance(item, Node):
            leaf = _leaf_text(item)
            if leaf is None:
                parts: list[Node | str] = [*item.args, *map(_param_text, item.params)]
                commas: list[Node | str] = [x for part in parts for x in (",", part)]
                stack.extend([")", *reversed(commas[1:]), "(", item.op])
                continue
            item = leaf
        pieces.append(item)
        length += len(item)
    whole = "".join(pieces)
    return whole if length <= limit else whole[:limit] + "…"


def _restore(recipe: tuple) -> Node:
    """The node that was pickled: its graph is listed arguments first, each argument by its place in the list."""
    nodes: list[Node] = []
    for op, args, params in recipe:
        nodes.append(make(op, tuple(nodes[k] for k in args), params))
    return nodes[-1]


def _plain(p: Any) -> Param:
    """A parameter as a Python value: 3 and numpy.int64(3) must not give different texts."""
    if type(p) is int:
        return p
    if isinstance(p, numbers.Integral):
        return int(p)
    if isinstance(p, tuple):
        return tuple(map(_plain, p))
    if isinstance(p, (float, str)):
        return p
    raise TypeError(f"a parameter of an operation is an integer, a number, a string or a tuple of these; got {p!r}")


def make(op: str, args: tuple[Node, ...] = (), params: tuple[Param, ...] = ()) -> Node:
    """The node ``op(*args, *params)``; raises ``ValueError`` where dimensions or parameters do not fit."""
    key = (op, args, params)
    if op == "Const":  # 0.0 == -0.0 and 1 == True == 1.0, but they are different constants
        key = (op, repr(float(params[0])), ())  # type: ignore[arg-type,assignment]
    node = _interned.get(key)
    if node is not None:
        return node
    with _lock:
        node = _interned.get(key)
        if node is None:
            params = _plain(params)  # type: ignore[assignment]
            node = _build(op, args, params)
            _interned[key if op == "Const" else (op, args, params)] = node
    return node


def _build(op: str, args: tuple[Node, ...], params: tuple[Param, ...]) -> Node:
    if op == "Var":
        cat, _, dim = params
        kind = _KIND_OF_CAT[cat]  # type: ignore[index]
    elif op == "Const":
        params, dim, kind = (float(params[0]),), 1, P  # type: ignore[arg-type]
    else:
        from .ops import result_dim  # the table imports this module; only a miss comes here

        dim, kind = result_dim(op, args, params), P
        for a in args:
            kind |= a.kind
    node = object.__new__(Node)
    for name, value in zip(("op", "args", "params", "dim", "kind", "_digest"), (op, args, params, dim, kind, None)):
        object.__setattr__(node, name, value)
    return node


def var(cat: int, ind: int, dim: int) -> Node:
    """Variable number ``ind`` of category ``cat`` (``CAT_I``, ``CAT_J``, ``CAT_P``, ``CAT_SCALAR``) or a slot."""
    if cat not in range(len(_KIND_OF_CAT)):
        raise ValueError(f"cat must be 0 (i), 1 (j), 2 (parameter) or 3 (scalar); got {cat!r}")
    if not (isinstance(ind, numbers.Integral) and ind >= 0):
        raise ValueError(f"ind must be an integer >= 0; got {ind!r}")
    if not (isinstance(dim, numbers.Integral) and dim >= 1):
        raise ValueError(f"dim must be an integer >= 1; got {dim!r}")
    if cat == CAT_SCALAR and dim != 1:
        raise ValueError(f"a scalar has dim 1; got {dim!r}")
    return make("Var", (), (cat, ind, dim))


def const(value: float) -> Node:
    """A number that is part of the formula, kept in double precision."""
    return make("Const", (), (float(value),))


def topological(*roots: Node, skip: Container[Node] = ()) -> list[Node]:
    """Every node below ``roots``, each once, arguments before what uses them, but not ``skip`` and what is below."""
    order: list[Node] = []
    entered: set[Node] = set()
    left: set[Node] = set()
    stack = [r for r in reversed(roots) if r not in skip]
    while stack:
        node = stack[-1]
        if node not in entered:
            entered.add(node)
            stack.extend(a for a in reversed(node.args) if a not in entered and a not in skip)
            continue
        stack.pop()
        if node not in left:  # it can have been pushed for several that use it
            left.add(node)
            order.append(node)
    return order


def variables(*roots: Node) -> list[Node]:
    """The variables below ``roots``, ordered by number."""
    return sorted((n for n in topological(*roots) if n.is_var), key=lambda n: n.params[1])  # type: ignore[arg-type,return-value]


def rewrite(root: Node, replace: dict[Node, Node]) -> Node:
    """``root`` with every node that is a key of ``replace`` exchanged for its value."""
    new: dict[Node, Node] = {}
    for node in topological(root):
        if node in replace:
            new[node] = replace[node]
        elif any(new[a] is not a for a in node.args):
            new[node] = make(node.op, tuple(new[a] for a in node.args), node.params)
        else:
            new[node] = node
    return new[root]


def relabel(root: Node, numbers: tuple[int, ...]) -> Node:
    """``root`` with variable number k renamed to ``numbers[k]``."""
    return rewrite(root, {v: var(v.params[0], numbers[v.params[1]], v.dim) for v in variables(root)})  # type: ignore[arg-type,index]


def swap_axes(root: Node) -> Node:
    """``root`` with rows and columns exchanged, so that a reduction over i becomes one over j."""
    other = {CAT_I: CAT_J, CAT_J: CAT_I}
    return rewrite(root, {v: var(other.get(v.params[0], v.params[0]), v.params[1], v.dim) for v in variables(root)})  # type: ignore[arg-type]


def check(root: Node) -> Node:
    """Verify every node below ``root`` against the table of ops; returns ``root``.

    Tests call it after each rewrite, so that a bad rewrite fails where it is made and not as a C++ error.
    """
    from .ops import result_dim

    cats: dict[tuple, tuple] = {}
    for node in topological(root):
        if make(node.op, node.args, node.params) is not node:
            raise AssertionError(f"{node!r} is not the interned node of its own key")
        if node.op == "Var":
            slot = node.params[0] if node.params[0] in (CAT_ROW, CAT_COL) else None
            if cats.setdefault((slot, node.params[1]), node.params) != node.params:
                raise AssertionError(f"variable {node.params[1]!r} is used with two categories or dimensions")
        elif node.op != "Const":
            kind = P
            for a in node.args:
                kind |= a.kind
            if node.kind != kind or node.dim != result_dim(node.op, node.args, node.params):
                raise AssertionError(f"{node!r} has kind {node.kind}, dim {node.dim}, unlike its arguments")
    return root
