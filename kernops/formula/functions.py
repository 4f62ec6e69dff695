"""Functions of formulas that are written with rows of the table of ops: KeOps' functions that have no row of their own.

The front end's methods and formula strings use the same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .autodiff import jvp, vjp
from .graph import Node, const, rewrite
from .ops import add, apply, broadcast, concat, div, mul, power, sub, total
from .vector_ops import einsum


def zeros(dim: int) -> Node:
    """The zero vector."""
    return broadcast(const(0.0), dim)


def ones(dim: int) -> Node:
    return broadcast(const(1.0), dim)


def basis(dim: int) -> list[Node]:
    """The unit vectors of a space of dimension ``dim``."""
    return [apply("ExtractT", const(1.0), params=(k, dim)) for k in range(dim)]


def whole_power(a: Node, n: int) -> Node:
    """``a`` to a whole power, of the dimension of ``a`` also for n = 0."""
    return ones(a.dim) if n == 0 else power(a, n)


def power_of(a: Node, b: Node) -> Node:
    """``a`` to the power ``b``, by the cheapest op that computes it."""
    n = b.value
    if n is not None and n.is_integer() and abs(n) < 2**31:
        return whole_power(a, int(n))
    root = {0.5: "Sqrt", -0.5: "Rsqrt"}.get(n) if n is not None else None
    if root is not None:
        return apply(root, a)
    return apply("Exp2", b) if a.value == 2 else apply("Pow", a, b)


def mod(a: Node, modulus: Node, offset: Node) -> Node:
    """``a - modulus · floor((a - offset) / modulus)``, which lies in [offset, offset + modulus)."""
    return add(apply("Mod", sub(a, offset), modulus), offset)


def rounded(a: Node, digits: int) -> Node:
    """``a`` rounded to ``digits`` decimals."""
    if digits == 0:
        return apply("Round", a)
    scale = 10.0 ** abs(digits)
    up, down = (mul, div) if digits > 0 else (div, mul)
    return down(apply("Round", up(a, scale)), const(scale))


def sinc(a: Node) -> Node:
    """sin(πa) / (πa), and 1 at 0."""
    return apply("SinXDivX", mul(3.141592653589793, a))


def pair(a: Node, b: Node) -> Node:
    """The components of a, then those of b, a scalar repeated to the dimension of the other."""
    dim = max(a.dim, b.dim)
    return apply("Concat", broadcast(a, dim), broadcast(b, dim))


def half(a: Node, which: int) -> Node:
    """The first (0) or the second (1) half of the components."""
    if a.op == "Concat" and a.args[0].dim == a.args[1].dim:
        return a.args[which]
    return apply("Extract", a, params=(which * (a.dim // 2), a.dim // 2))


def difference_matrix(a: Node, b: Node) -> Node:
    """The components ``a_k - b_l``, l running fastest."""
    return sub(apply("TensorProd", a, ones(b.dim)), apply("TensorProd", ones(a.dim), b))


def tensordot(
    a: Node, b: Node, shape_a: Sequence[int], shape_b: Sequence[int], axes_a: Sequence[int], axes_b: Sequence[int],
    order: Sequence[int] | None = None,
) -> Node:  # fmt: skip
    """``numpy.tensordot`` of two arrays in C order; axis k of the result moves to place ``order[k]``."""
    shapes = tuple(tuple(int(n) for n in seq) for seq in (shape_a, shape_b, axes_a, axes_b))
    product = apply("TensorDot", a, b, params=shapes)
    if order is None:
        return product
    keep = [n for k, n in enumerate(shapes[0]) if k not in shapes[2]]
    keep += [n for k, n in enumerate(shapes[1]) if k not in shapes[3]]
    if sorted(order) != list(range(len(keep))):
        raise ValueError(f"TensorDot: order must be a permutation of {len(keep)} axes; got {tuple(order)}")
    letters = [chr(97 + k) for k in range(len(keep))]
    moved = "".join(letters[k] for k in sorted(range(len(keep)), key=order.__getitem__))
    size = dict(zip(letters, keep)) | {"z": 1}
    return einsum(f"{''.join(letters)}z,z->{moved}", product, const(1.0), size)


def vector_mean(a: Node) -> Node:
    """The mean of the components."""
    return div(total(a), float(a.dim))


def vector_var(a: Node, correction: float = 0.0) -> Node:
    """The sum of squared deviations of the components from their mean, divided by their number less ``correction``."""
    return div(total(power(sub(a, vector_mean(a)), 2)), max(a.dim - correction, 0.0))


# --- derivatives inside formulas ------------------------------------------------------------------------------------
def _variable(name: str, v: Node) -> Node:
    if not v.is_var:
        raise ValueError(f"{name} needs a variable to differentiate by; got the expression {v}")
    return v


def grad(f: Node, v: Node, g: Node) -> Node:
    """The derivative of <f, g> by the variable ``v``."""
    return vjp([(f, g)], [_variable("Grad", v)])[0] or zeros(v.dim)


def diff(f: Node, v: Node, u: Node) -> Node:
    """The derivative of ``f`` when the variable ``v`` moves along ``u``."""
    if u.dim not in (1, v.dim):
        raise ValueError(f"Diff: a direction for a variable of dimension {v.dim} has that dimension; got {u.dim}")
    tangent = jvp(f, {_variable("Diff", v): broadcast(u, v.dim)})
    return zeros(f.dim) if tangent is None else broadcast(tangent, f.dim)


def grad_matrix(f: Node, v: Node) -> Node:
    """The gradients of all components of ``f`` by ``v``, one after the other."""
    return concat(*(grad(f, v, e) for e in basis(f.dim)))


def _sum_of_components(parts: list[Node]) -> Node:
    """Component k of part k, summed; a part of dimension 1 counts whole."""
    terms = [p if p.dim == 1 else apply("Extract", p, params=(k, 1)) for k, p in enumerate(parts)]
    out = terms[0]
    for t in terms[1:]:
        out = add(out, t)
    return out


def divergence(f: Node, v: Node) -> Node:
    """The sum of the derivatives of component k of ``f`` by component k of ``v``."""
    if f.dim != v.dim:
        raise ValueError(f"Divergence: formula and variable must have one dimension; got {f.dim} and {v.dim}")
    return _sum_of_components([diff(f, v, e) for e in basis(v.dim)])


def laplacian(f: Node, v: Node) -> Node:
    """The divergence of the gradient of a scalar."""
    if f.dim != 1:
        raise ValueError(f"Laplacian is that of a scalar; got a formula of dimension {f.dim}")
    return divergence(grad(f, v, const(1.0)), v)


def trace(f: Node, v: Node) -> Node:
    """The trace of ``f``, which is linear in the variable ``v``; the sum of its row where ``f`` is a scalar."""
    _variable("TraceOperator", v)
    if f.dim not in (1, v.dim):
        raise ValueError(f"TraceOperator: the formula's dimension must be 1 or {v.dim}; got {f.dim}")
    return _sum_of_components([rewrite(f, {v: e}) for e in basis(v.dim)])


@dataclass(frozen=True)
class Function:
    """A function of formula strings; ``kinds`` has a letter per argument: f formula, i whole number, t tuple."""

    kinds: str
    build: Callable[..., Node]


def _weighted(s: Node, a: Node) -> Node:
    return apply("WeightedSqNorm", s, a)


#: Name -> its forms. The forms of one name are told apart by their number of arguments, then by what is a literal.
FUNCTIONS: dict[str, tuple[Function, ...]] = {
    "IntCst": (Function("i", lambda n: const(float(n))),),
    "RatCst": (Function("ii", lambda p, q: const(p / q)),),
    "IntInv": (Function("i", lambda n: const(1.0 / n)),),
    "Zero": (Function("i", zeros),),
    "SumT": (Function("fi", broadcast),),
    "Pow": (Function("fi", whole_power), Function("ff", lambda a, b: apply("Pow", a, b))),
    "Round": (Function("fi", rounded), Function("f", lambda a: apply("Round", a))),
    "Mod": (Function("fff", mod), Function("ff", lambda a, n: apply("Mod", a, n))),
    "ClampInt": (Function("fii", lambda a, lo, hi: apply("Clamp", a, float(lo), float(hi))),),
    "TensorDot": (
        Function("fftttt", tensordot),
        Function("ffttttt", tensordot),
    ),
    "SqNormIso": (Function("ff", _weighted),),
    "SqNormDiag": (Function("ff", _weighted),),
    "SymSqNorm": (Function("ff", _weighted),),
    "DifferenceMatrix": (Function("ff", difference_matrix),),
    "Grad": (Function("fff", grad),),
    "Diff": (Function("fff", diff),),
    "GradMatrix": (Function("ff", grad_matrix),),
    "Divergence": (Function("ff", divergence),),
    "Laplacian": (Function("ff", laplacian),),
    "TraceOperator": (Function("ff", trace),),
    "Factorize": (Function("ff", lambda f, g: f),),  # equal parts of a graph are one node: nothing is left to factorize
    "AutoFactorize": (Function("f", lambda f: f),),
}

#: Functions of KeOps that are known and not available.
NOT_YET = ("BSpline", "SoftDTW_SqDist", "Softmax")

INFIX: dict[str, Callable[[Node, Node], Node]] = {
    "+": add,
    "-": sub,
    "*": mul,
    "/": div,
    "**": power_of,
    "|": lambda a, b: apply("Dot", a, b),
    "==": lambda a, b: apply("Equal", a, b),
    "!=": lambda a, b: apply("NotEqual", a, b),
    "<": lambda a, b: apply("Less", a, b),
    "<=": lambda a, b: apply("LessEqual", a, b),
    ">": lambda a, b: apply("Less", b, a),
    ">=": lambda a, b: apply("LessEqual", b, a),
}
