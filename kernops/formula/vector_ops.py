"""Rows of the table of ops: functions of whole vectors.

A few primitives with an emission rule each, and composites that are written with primitives (``lower``), from which
their derivatives follow.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from .graph import Node
from .ops import Op, add, apply, as_node, broadcast, check_whole, const, mul, neg, power, register, sub, total

ANY = (-2.0, 2.0)
POSITIVE = (0.2, 3.0)


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


def _linear(name: str):
    """The forward derivative of a linear op of one argument: the op itself."""
    return lambda node, tangents: apply(name, tangents[0], params=node.params)


def _primitive(name, arity, doc, ref, dim, emit, vjp, jvp, methods=(), aliases=(), params=(), domain=None,
               examples=()):  # fmt: skip
    register(
        Op(name, arity, doc, ref, dim=dim, emit=emit, vjp=vjp, jvp=jvp, methods=methods, aliases=aliases,
           params=params, domain=domain or (ANY,) * arity, examples=examples)
    )  # fmt: skip


# --- sums and extrema of a vector -----------------------------------------------------------------------------------
_primitive("Sum", 1, "sum of the components", lambda t, a: a.sum(-1, keepdim=True), lambda args, p: 1, "sum",
           lambda node, g: (broadcast(g, node.args[0].dim),), lambda node, ts: total(ts[0]))  # fmt: skip


def _extremum_vjp(arg: str):
    def vjp(node: Node, g: Node) -> tuple[Node]:
        a = node.args[0]
        return (mul(g, apply("OneHot", apply(arg, a), params=(a.dim,))),)

    return vjp


def _extremum_jvp(arg: str):
    def jvp(node: Node, tangents: tuple) -> Node:
        a = node.args[0]
        return total(mul(apply("OneHot", apply(arg, a), params=(a.dim,)), tangents[0]))

    return jvp


def _no_vjp(node: Node, g: Node) -> tuple:
    return (None,) * len(node.args)


for _name, _word, _torch in (("Max", "largest", "amax"), ("Min", "smallest", "amin")):
    _primitive(_name, 1, f"{_word} component; NaN if one is NaN",
               lambda t, a, f=_torch: getattr(t, f)(a, -1, keepdim=True), lambda args, p: 1, _name.lower(),
               _extremum_vjp("Arg" + _name), _extremum_jvp("Arg" + _name))  # fmt: skip
    _primitive("Arg" + _name, 1, f"index of the {_word} component, the lowest of equals",
               lambda t, a, f="arg" + _name.lower(): getattr(t, f)(a, -1, keepdim=True).to(a.dtype),
               lambda args, p: 1, "arg" + _name.lower(), _no_vjp, lambda node, ts: None)  # fmt: skip


# --- moving components ----------------------------------------------------------------------------------------------
def _extract_dim(args, params):
    start, length = params
    check_whole("Extract", "start", start, 0)
    check_whole("Extract", "length", length, 1)
    _check(start + length <= args[0].dim,
           f"Extract: components {start}..{start + length - 1} are outside a vector of dimension {args[0].dim}")  # fmt: skip
    return length


def _pad_dim(args, params):
    start, dim = params
    check_whole("ExtractT", "start", start, 0)
    _check(isinstance(dim, int) and start + args[0].dim <= dim,
           f"ExtractT: {args[0].dim} components from {start} on do not fit in dimension {dim!r}")  # fmt: skip
    return dim


def _one_hot_dim(args, params):
    check_whole("OneHot", "dim", params[0], 1)
    _check(args[0].dim == 1, f"OneHot takes a scalar; got dimension {args[0].dim}")
    return params[0]


def _broadcast_dim(args, params):
    check_whole("Broadcast", "dim", params[0], 1)
    _check(args[0].dim == 1, f"Broadcast takes a scalar; got dimension {args[0].dim}")
    return params[0]


def _pad_ref(t, a, start, dim):
    return t.nn.functional.pad(a, (start, dim - start - a.shape[-1]))


def _concat_ref(t, a, b):
    lead = t.broadcast_shapes(a.shape[:-1], b.shape[:-1])
    return t.cat([a.expand(*lead, a.shape[-1]), b.expand(*lead, b.shape[-1])], -1)


_primitive("Extract", 1, "components start .. start + length - 1", lambda t, a, s, n: a[..., s : s + n],
           _extract_dim, "extract",
           lambda node, g: (apply("ExtractT", g, params=(node.params[0], node.args[0].dim)),),
           _linear("Extract"), methods=("extract",), params=("start", "length"),
           examples=(((3,), (1, 2)), ((3,), (0, 3)), ((1,), (0, 1))))  # fmt: skip
_primitive("ExtractT", 1, "the vector placed at start in a zero vector of dimension dim", _pad_ref, _pad_dim, "pad",
           lambda node, g: (apply("Extract", g, params=(node.params[0], node.args[0].dim)),),
           _linear("ExtractT"), methods=("extract_t",), params=("start", "dim"),
           examples=(((3,), (1, 5)), ((3,), (0, 3)), ((1,), (2, 4))))  # fmt: skip
_primitive("Concat", 2, "the components of a, then those of b", _concat_ref, lambda args, p: args[0].dim + args[1].dim,
           "concat",
           lambda node, g: (apply("Extract", g, params=(0, node.args[0].dim)),
                            apply("Extract", g, params=(node.args[0].dim, node.args[1].dim))),
           lambda node, ts: apply("Concat", *(broadcast(const(0.0) if t is None else t, a.dim)
                                              for a, t in zip(node.args, ts))),
           examples=(((3, 3), ()), ((1, 3), ()), ((2, 1), ())))  # fmt: skip
_primitive("OneHot", 1, "1 at the index that the (rounded) scalar names, 0 elsewhere",
           lambda t, a, n: (t.round(a) == t.arange(n, device=a.device)).to(a.dtype), _one_hot_dim, "onehot",
           _no_vjp, lambda node, ts: None, methods=("one_hot",), params=("dim",), domain=((-0.4, 3.0),),
           examples=(((1,), (3,)), ((1,), (1,))))  # fmt: skip
_primitive("Broadcast", 1, "a scalar repeated", lambda t, a, n: a.expand(*a.shape[:-1], n), _broadcast_dim, "broadcast",
           lambda node, g: (total(g),), _linear("Broadcast"), params=("dim",),
           examples=(((1,), (3,)), ((1,), (1,))))  # fmt: skip


# --- contraction ----------------------------------------------------------------------------------------------------
def einsum_parts(params: tuple) -> tuple[str, str, str, dict[str, int]]:
    """``(letters of a, letters of b, letters of the result, size of each letter)`` of an ``Einsum`` node's params."""
    spec, sizes = params
    inputs, out = spec.split("->")
    a, b = inputs.split(",")
    letters = list(dict.fromkeys(a + b))
    return a, b, out, dict(zip(letters, sizes))


def _einsum_dim(args, params):
    spec, sizes = params
    _check(isinstance(spec, str) and re.fullmatch("[a-zA-Z]*,[a-zA-Z]*->[a-zA-Z]*", spec) is not None,
           f"Einsum: the contraction must read like 'ij,j->i'; got {spec!r}")  # fmt: skip
    a, b, out, size = einsum_parts(params)
    for letters in (a, b, out):  # the derivative of a diagonal would need a letter twice in the result
        _check(len(set(letters)) == len(letters), f"Einsum {spec!r}: a letter occurs twice in {letters!r}")
    _check(all((x in a) + (x in b) + (x in out) >= 2 for x in a + b + out),
           f"Einsum {spec!r}: each letter must occur in two of the three places")  # fmt: skip
    _check(isinstance(sizes, tuple) and len(sizes) == len(set(a + b)), f"Einsum: sizes {sizes!r} do not fit {spec!r}")
    for n in sizes:
        check_whole("Einsum", "a size", n, 1)
    for arg, letters in zip(args, (a, b)):
        _check(arg.dim == math.prod(size[x] for x in letters),
               f"Einsum {spec!r}: a vector of dimension {arg.dim} is not of shape "
               f"{tuple(size[x] for x in letters)}")  # fmt: skip
    return math.prod(size[x] for x in out)


def _einsum_ref(t, a, b, spec, sizes):
    la, lb, out, size = einsum_parts((spec, sizes))
    a = a.reshape(*a.shape[:-1], *(size[x] for x in la))
    b = b.reshape(*b.shape[:-1], *(size[x] for x in lb))
    res = t.einsum(f"...{la},...{lb}->...{out}", a, b)
    return res.reshape(*res.shape[: res.ndim - len(out)], math.prod(size[x] for x in out))


def einsum(spec: str, a: Node, b: Node, size: dict[str, int]) -> Node:
    """``Einsum(a, b)`` with the size of each letter given by name."""
    letters = dict.fromkeys(spec.split("->")[0].replace(",", ""))
    return apply("Einsum", a, b, params=(spec, tuple(size[x] for x in letters)))


def _einsum_vjp(node: Node, g: Node) -> tuple[Node, Node]:
    la, lb, out, size = einsum_parts(node.params)
    a, b = node.args
    return einsum(f"{out},{lb}->{la}", g, b, size), einsum(f"{la},{out}->{lb}", a, g, size)


def _einsum_jvp(node: Node, tangents: tuple) -> Node | None:
    a, b = node.args
    parts = [apply("Einsum", *pair, params=node.params)
             for pair in ((tangents[0], b), (a, tangents[1])) if None not in pair]  # fmt: skip
    return add(*parts) if len(parts) == 2 else parts[0]


_primitive("Einsum", 2, "contraction of two vectors read as arrays in C order, as in numpy.einsum", _einsum_ref,
           _einsum_dim, "einsum", _einsum_vjp, _einsum_jvp, params=("spec", "sizes"),
           examples=(((6, 3), ("ij,j->i", (2, 3))), ((6, 6), ("ij,jk->ki", (2, 3, 2))), ((3, 3), ("i,i->", (3,))),
                     ((1, 3), (",i->i", (3,))), ((3, 6), ("ijk,jl->lik", (1, 3, 1, 2)))))  # fmt: skip


# --- composites -----------------------------------------------------------------------------------------------------
def _composite(name, arity, doc, ref, lower, methods=(), aliases=(), params=(), domain=None, examples=(),
               partials=None):  # fmt: skip
    register(
        Op(name, arity, doc, ref, lower=lower, methods=methods, aliases=aliases, params=params,
           domain=domain or (ANY,) * arity, examples=examples, partials=partials)
    )  # fmt: skip


def _same_dim(name: str, a: Node, b: Node) -> None:
    _check(a.dim == b.dim or 1 in (a.dim, b.dim), f"{name}: dimensions must be equal or 1; got {a.dim} and {b.dim}")


def _dot(a: Node, b: Node) -> Node:
    _same_dim("Dot", a, b)
    return total(mul(a, b))


def _sqdist(a: Node, b: Node) -> Node:
    _same_dim("SqDist", a, b)
    return total(power(sub(a, b), 2))


def _weighted_sqnorm(s: Node, a: Node) -> Node:
    """sᵀa² for one or dim weights, aᵀSa for dim² weights."""
    if s.dim == 1:
        return mul(s, total(power(a, 2)))
    if s.dim == a.dim:
        return total(mul(s, power(a, 2)))
    _check(s.dim == a.dim**2,
           f"WeightedSqNorm: for vectors of dimension {a.dim} the weights have dimension 1, {a.dim} or {a.dim**2}; "
           f"got {s.dim}")  # fmt: skip
    n = a.dim
    return total(mul(a, einsum("ij,j->i", s, a, {"i": n, "j": n})))


def _weighted_sqnorm_ref(t, s, a):
    n = a.shape[-1]
    if n > 1 and s.shape[-1] == n * n:
        return t.einsum("...ij,...i,...j->...", s.reshape(*s.shape[:-1], n, n), a, a)[..., None]
    return (s * a * a).sum(-1, keepdim=True)


def _mat_vec(m: Node, v: Node) -> Node:
    _check(m.dim % v.dim == 0, f"MatVecMult: dimension {m.dim} is not rows × {v.dim}")
    return einsum("ij,j->i", m, v, {"i": m.dim // v.dim, "j": v.dim})


def _vec_mat(v: Node, m: Node) -> Node:
    _check(m.dim % v.dim == 0, f"VecMatMult: dimension {m.dim} is not {v.dim} × columns")
    return einsum("i,ij->j", v, m, {"i": v.dim, "j": m.dim // v.dim})


def _norm2(a: Node) -> Node:
    return apply("Sqrt", total(power(a, 2)))


def _tensordot(a: Node, b: Node, *params: tuple[int, ...]) -> Node:
    """KeOps' TensorDot: shapes of a and b, and the axes of each that are contracted with one another."""
    shape_a, shape_b, axes_a, axes_b = params
    _check(a.dim == math.prod(shape_a), f"TensorDot: dimension {a.dim} is not of shape {shape_a}")
    _check(b.dim == math.prod(shape_b), f"TensorDot: dimension {b.dim} is not of shape {shape_b}")
    _check(len(axes_a) == len(axes_b), f"TensorDot: {len(axes_a)} axes of a against {len(axes_b)} of b")
    letters = [chr(97 + k) for k in range(len(shape_a) + len(shape_b))]
    la, lb = letters[: len(shape_a)], letters[len(shape_a) :]
    for i, j in zip(axes_a, axes_b):
        _check(0 <= i < len(shape_a) and 0 <= j < len(shape_b) and shape_a[i] == shape_b[j],
               f"TensorDot: axis {i} of {shape_a} cannot be contracted with axis {j} of {shape_b}")  # fmt: skip
        lb[j] = la[i]
    out = [x for x in la if x not in lb] + [x for x in lb if x not in la]
    size = {**dict(zip(la, shape_a)), **dict(zip(lb, shape_b))}
    return einsum(f"{''.join(la)},{''.join(lb)}->{''.join(out)}", a, b, size)


def _kron(a: Node, b: Node, shape_a: tuple[int, ...], shape_b: tuple[int, ...]) -> Node:
    """Kronecker product of two arrays with equally many axes."""
    _check(len(shape_a) == len(shape_b), f"Kron: shapes {shape_a} and {shape_b} must have equally many axes")
    la = "".join(chr(97 + k) for k in range(len(shape_a)))
    lb = "".join(chr(110 + k) for k in range(len(shape_b)))
    out = "".join(x + y for x, y in zip(la, lb))
    return einsum(f"{la},{lb}->{out}", a, b, {**dict(zip(la, shape_a)), **dict(zip(lb, shape_b))})


def matern_coefficients(p: int) -> list[float]:
    """Coefficients of the polynomial of Matérn's function of ν = p + 1/2, that of the highest power first."""
    check_whole("Matern", "p", p, 0)
    return [math.comb(p, i) * math.factorial(p + i) / math.factorial(2 * p) * 2.0 ** (p - i) for i in range(p + 1)]


def polynomial(r: Node, coefficients: Sequence[float]) -> Node:
    """The polynomial of r with these coefficients, that of the highest power first."""
    out: Node | float = coefficients[0]
    for c in coefficients[1:]:
        out = add(mul(out, r), c)
    return as_node(out)


def _matern(a: Node, p: int) -> Node:
    r = apply("Sqrt", a)
    return mul(polynomial(r, matern_coefficients(p)), apply("Exp", neg(r)))


def _matern_partials(a: Node, p: int) -> tuple[Node]:
    """The derivative is such a function again. That of what it is made of would be a difference of two terms that
    nearly cancel near a = 0, and its own derivative would be wrong there, where that of a root is taken as 0."""
    if p == 0:
        return (mul(-0.5, mul(apply("Rsqrt0", a), apply("Matern", a, params=(0,)))),)
    return (mul(-0.5 / (2 * p - 1), apply("Matern", a, params=(p - 1,))),)


def _matern_ref(t, a, p):
    r, out = t.sqrt(a), 0.0
    for c in matern_coefficients(p):
        out = out * r + c
    return out * t.exp(-r)


def _rows(t, m, n, transpose=False):
    shape = (n, m.shape[-1] // n) if transpose else (m.shape[-1] // n, n)
    return m.reshape(*m.shape[:-1], *shape)


def _tensordot_ref(t, a, b, shape_a, shape_b, axes_a, axes_b):
    lead = t.broadcast_shapes(a.shape[:-1], b.shape[:-1])
    a = a.expand(*lead, a.shape[-1]).reshape(-1, *shape_a)
    b = b.expand(*lead, b.shape[-1]).reshape(-1, *shape_b)
    res = t.stack([t.tensordot(x, y, dims=(list(axes_a), list(axes_b))) for x, y in zip(a, b)])
    return res.reshape(*lead, -1)


def _kron_ref(t, a, b, shape_a, shape_b):
    lead = t.broadcast_shapes(a.shape[:-1], b.shape[:-1])
    a = a.expand(*lead, a.shape[-1]).reshape(-1, *shape_a)
    b = b.expand(*lead, b.shape[-1]).reshape(-1, *shape_b)
    return t.stack([t.kron(x, y) for x, y in zip(a, b)]).reshape(*lead, -1)


_composite("Dot", 2, "scalar product", lambda t, a, b: (a * b).sum(-1, keepdim=True), _dot, aliases=("Scalprod",))
_composite("SqNorm2", 1, "squared Euclidean norm", lambda t, a: (a * a).sum(-1, keepdim=True),
           lambda a: total(power(a, 2)), ("sqnorm2",))  # fmt: skip
_composite("Norm2", 1, "Euclidean norm; its derivative at 0 is 0",
           lambda t, a: t.linalg.vector_norm(a, dim=-1, keepdim=True), _norm2, ("norm2", "norm"), domain=(POSITIVE,))  # fmt: skip
_composite("Normalize", 1, "the vector divided by its Euclidean norm",
           lambda t, a: a / t.linalg.vector_norm(a, dim=-1, keepdim=True),
           lambda a: mul(a, apply("Rsqrt", total(power(a, 2)))), ("normalize",), domain=(POSITIVE,))  # fmt: skip
_composite("SqDist", 2, "squared Euclidean distance", lambda t, a, b: ((a - b) ** 2).sum(-1, keepdim=True), _sqdist,
           ("sqdist",))  # fmt: skip
_composite("WeightedSqNorm", 2, "Σ s_k a_k² for one or dim weights s, aᵀSa for dim² weights", _weighted_sqnorm_ref,
           _weighted_sqnorm, examples=(((3, 3), ()), ((1, 3), ()), ((9, 3), ()), ((1, 1), ())))  # fmt: skip
_composite("WeightedSqDist", 3, "weighted squared norm of a - b, the weights first",
           lambda t, s, a, b: _weighted_sqnorm_ref(t, s, a - b), lambda s, a, b: _weighted_sqnorm(s, sub(a, b)),
           examples=(((3, 3, 3), ()), ((1, 3, 3), ()), ((9, 3, 1), ()), ((1, 1, 1), ())))  # fmt: skip
_composite("Elem", 1, "one component", lambda t, a, k: a[..., k : k + 1],
           lambda a, k: apply("Extract", a, params=(k, 1)), ("elem",), params=("index",),
           examples=(((3,), (1,)), ((1,), (0,))))  # fmt: skip
_composite("ElemT", 1, "a scalar placed at index in a zero vector of dimension dim",
           lambda t, a, dim, k: _pad_ref(t, a, k, dim), lambda a, dim, k: apply("ExtractT", a, params=(k, dim)),
           ("elemT",), params=("dim", "index"), examples=(((1,), (3, 1)), ((1,), (1, 0))))  # fmt: skip
_composite("MatVecMult", 2, "matrix (in C order) times vector",
           lambda t, m, v: (_rows(t, m, v.shape[-1]) @ v[..., None])[..., 0], _mat_vec, ("matvecmult",),
           examples=(((6, 3), ()), ((6, 2), ()), ((3, 1), ()), ((1, 1), ())))  # fmt: skip
_composite("VecMatMult", 2, "vector times matrix (in C order)",
           lambda t, v, m: (v[..., None, :] @ _rows(t, m, v.shape[-1], True))[..., 0, :], _vec_mat, ("vecmatmult",),
           examples=(((3, 6), ()), ((2, 6), ()), ((1, 3), ()), ((1, 1), ())))  # fmt: skip
_composite("TensorProd", 2, "outer product, in C order", lambda t, a, b: (a[..., :, None] * b[..., None, :]).flatten(-2),
           lambda a, b: einsum("i,j->ij", a, b, {"i": a.dim, "j": b.dim}), ("tensorprod",))  # fmt: skip
_composite("TensorDot", 2, "contraction of axes of two arrays in C order, as numpy.tensordot", _tensordot_ref, _tensordot,
           params=("shape_a", "shape_b", "axes_a", "axes_b"),
           examples=(((6, 6), ((2, 3), (3, 2), (1,), (0,))), ((6, 12), ((2, 3), (2, 2, 3), (0, 1), (1, 2))),
                     ((3, 2), ((3,), (2,), (), ())), ((3, 3), ((3,), (3,), (0,), (0,)))))  # fmt: skip  # fmt: skip
_composite("Kron", 2, "Kronecker product of two arrays in C order", _kron_ref, _kron, params=("shape_a", "shape_b"),
           examples=(((4, 6), ((2, 2), (2, 3))), ((3, 2), ((3,), (2,)))))  # fmt: skip
_composite("Matern", 1, "Matérn's function of ν = p + 1/2 of r = √a: a polynomial of degree p times exp(-r)", _matern_ref,
           _matern, params=("p",), domain=(POSITIVE,), partials=_matern_partials,
           examples=(((3,), (2,)), ((1,), (0,)), ((3,), (1,)), ((1,), (4,))))  # fmt: skip
