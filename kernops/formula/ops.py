"""The table of ops: everything kernops knows about an operation is one row of it.

``scalar_ops`` and ``vector_ops`` fill the table; adding an op means adding a row there and nothing else. Back ends,
derivatives, tests, the front end's methods and the documentation loop over ``OPS``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .graph import Node, Param, const, make, topological

Partials = Callable[..., "tuple[Node | float | None, ...]"]


@dataclass(frozen=True)
class Op:
    """One row of the table.

    Attributes:
        name: canonical name, as in formula strings (KeOps' name where KeOps has the op).
        arity: number of arguments.
        doc: one sentence, shown in the reference.
        ref: ``ref(torch, *tensors, *params)``, the reference on tensors whose last axis is the vector.
        text: C expression of one component, ``{0}``, ``{1}`` ... standing for the arguments (scalar ops only).
        partials: ``partials(*args, *params)``, the elementwise derivative by each argument, as formulas; ``None`` is
            zero (scalar ops, and composite ones whose derivative is better than that of what they are made of).
        dim: ``dim(args, params)``, the dimension of the result; raises ``ValueError`` (ops with params, vector ops).
        emit: name of the code generator's rule (vector ops only).
        vjp: ``vjp(node, g)``, the cotangent of each argument (vector ops only).
        jvp: ``jvp(node, tangents)`` where a tangent may be ``None`` (vector ops only).
        lower: ``lower(*args, *params)``, the op written with simpler ones (composite ops only).
        domain: interval of each argument from which tests draw.
        examples: ``(dimensions of the arguments, params)`` that tests try; by default all of dimension 3, one of them
            of dimension 1, and all of dimension 1.
        methods: names of the methods of ``LazyTensor`` that are this op.
        aliases: other names in formula strings.
        params: names of the static parameters that follow the arguments.
    """

    name: str
    arity: int
    doc: str
    ref: Callable[..., Any]
    text: str | None = None
    partials: Partials | None = None
    dim: Callable[[tuple[Node, ...], tuple[Param, ...]], int] | None = None
    emit: str | None = None
    vjp: Callable[[Node, Node], tuple[Node | None, ...]] | None = None
    jvp: Callable[[Node, tuple[Node | None, ...]], Node | None] | None = None
    lower: Callable[..., Node] | None = None
    domain: tuple[tuple[float, float], ...] = ()
    examples: tuple[tuple[tuple[int, ...], tuple[Param, ...]], ...] = ()
    methods: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    params: tuple[str, ...] = field(default=())

    @property
    def scalar(self) -> bool:
        """Whether the op acts on each component alone."""
        return self.text is not None


OPS: dict[str, Op] = {}
#: Formula-string name -> canonical name.
NAMES: dict[str, str] = {}


def register(op: Op) -> Op:
    """Add a row to the table."""
    for name in (op.name, *op.aliases):
        if name in NAMES:
            raise ValueError(f"op name {name!r} is taken by {NAMES[name]!r}")
        NAMES[name] = op.name
    OPS[op.name] = op
    return op


def result_dim(name: str, args: tuple[Node, ...], params: tuple[Param, ...]) -> int:
    """The dimension of ``name(*args, *params)``, after checking that the op accepts them."""
    op = OPS.get(name)
    if op is None:
        raise ValueError(f"unknown operation {name!r}; known: {', '.join(sorted(OPS))}")
    if len(args) != op.arity:
        raise ValueError(f"{name} takes {op.arity} argument(s); got {len(args)}")
    if len(params) != len(op.params):
        raise ValueError(f"{name} takes the parameters ({', '.join(op.params)}); got {params!r}")
    if op.lower is not None:
        return op.lower(*args, *params).dim
    if op.dim is not None:
        return op.dim(args, params)
    return broadcast_dim(name, args)


def broadcast_dim(name: str, args: tuple[Node, ...]) -> int:
    """The common dimension of ``args``, of which some may be 1."""
    dims = {a.dim for a in args} - {1}
    if len(dims) > 1:
        raise ValueError(f"{name}: dimensions must be equal or 1; got {', '.join(str(a.dim) for a in args)}")
    return dims.pop() if dims else 1


def check_whole(name: str, what: str, value: object, low: int) -> None:
    """Raise ``ValueError`` unless ``value``, a parameter of op ``name``, is an integer >= ``low``."""
    if not (isinstance(value, int) and value >= low):
        raise ValueError(f"{name}: {what} must be a whole number >= {low}; got {value!r}")


def as_node(x: Node | float) -> Node:
    return x if isinstance(x, Node) else const(x)


# Building with the obvious simplifications. Derivatives are written with these, so that they come out small.
# ``x * 0`` is not simplified: it is NaN where x is not finite.


def apply(name: str, *args: Node | float, params: tuple[Param, ...] = ()) -> Node:
    return make(name, tuple(as_node(a) for a in args), params)


def add(a: Node | float, b: Node | float) -> Node:
    a, b = as_node(a), as_node(b)
    if a.value is not None and b.value is not None:
        return const(a.value + b.value)
    if a.value == 0:
        return b
    return a if b.value == 0 else make("Add", (a, b))


def sub(a: Node | float, b: Node | float) -> Node:
    a, b = as_node(a), as_node(b)
    if a.value is not None and b.value is not None:
        return const(a.value - b.value)
    if b.value == 0:
        return a
    return neg(b) if a.value == 0 else make("Sub", (a, b))


def mul(a: Node | float, b: Node | float) -> Node:
    a, b = as_node(a), as_node(b)
    if a.value is not None and b.value is not None:
        return const(a.value * b.value)
    if b.value is not None:
        a, b = b, a
    if a.value == 1:
        return b
    if a.value == -1:
        return neg(b)
    if a.value is not None and b.op == "Mul" and b.args[0].value is not None:
        factor = a.value * b.args[0].value
        if 1e-30 < abs(factor) < 1e30:  # two factors can be finite in float32 where their product is not
            return mul(factor, b.args[1])
    return make("Mul", (a, b))


def div(a: Node | float, b: Node | float) -> Node:
    a, b = as_node(a), as_node(b)
    if a.value is not None and b.value not in (None, 0):
        return const(a.value / b.value)  # type: ignore[operator]
    if b.value == 1:
        return a
    return make("Inv", (b,)) if a.value == 1 else make("Div", (a, b))


def neg(a: Node | float) -> Node:
    a = as_node(a)
    if a.value is not None:
        return const(-a.value)
    return a.args[0] if a.op == "Neg" else make("Neg", (a,))


def power(a: Node | float, n: int) -> Node:
    """``a`` to a whole power."""
    a = as_node(a)
    special: dict[int, Callable[[], Node]] = {
        0: lambda: broadcast(const(1.0), a.dim),
        1: lambda: a,
        2: lambda: make("Square", (a,)),
        -1: lambda: make("Inv", (a,)),
    }
    return special[n]() if n in special else make("PowInt", (a,), (n,))


def total(a: Node) -> Node:
    """The sum of the components of ``a``."""
    return a if a.dim == 1 else make("Sum", (a,))


def broadcast(a: Node, dim: int) -> Node:
    """``a`` repeated to dimension ``dim``."""
    return a if a.dim == dim else make("Broadcast", (a,), (dim,))


def concat(*parts: Node) -> Node:
    """All components, one part after the other; halved rather than chained, to keep the graph shallow."""
    if len(parts) == 1:
        return parts[0]
    half = len(parts) // 2
    return make("Concat", (concat(*parts[:half]), concat(*parts[half:])))


def lowered(root: Node, keep: Callable[[Op], bool] = lambda op: False) -> Node:
    """``root`` with every composite op written out, but those to ``keep``; without, what code generators see."""
    new: dict[Node, Node] = {}
    _lower(root, new, keep)
    return new[root]


def _lower(root: Node, new: dict[Node, Node], keep: Callable[[Op], bool]) -> None:
    """Enter ``root`` and all below it into ``new``, the table of what is lowered already."""
    for node in topological(root, skip=new):
        args = tuple(new[a] for a in node.args)
        op = OPS.get(node.op)
        if op is None or op.lower is None or keep(op):
            new[node] = node if args == node.args else make(node.op, args, node.params)
        else:
            new.update((a, a) for a in args)
            inner = op.lower(*args, *node.params)
            _lower(inner, new, keep)  # composites are made of simpler ones: as deep as the table, not as the formula
            new[node] = new[inner]
