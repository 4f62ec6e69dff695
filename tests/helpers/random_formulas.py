"""Random formulas made of every op of the table, for hypothesis."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from kernops.backends.layout import pair_view
from kernops.backends.tiled import evaluate
from kernops.formula.graph import CAT_I, CAT_J, CAT_P, CAT_SCALAR, Node, topological, var
from kernops.formula.ops import OPS, Op, add, apply, const, mul

M, N = 3, 4
DIMS = (1, 2, 3)
#: Two variables of each category and dimension, and two scalars.
VARIABLES = [
    var(cat, k, dim)
    for k, (cat, dim) in enumerate([(c, d) for c in (CAT_I, CAT_J, CAT_P) for d in DIMS] * 2 + [(CAT_SCALAR, 1)] * 2)
]
TENSORS: list[torch.Tensor | float] = []
_g = torch.Generator().manual_seed(11)
for _v in VARIABLES:
    _shape = {CAT_I: (M, _v.dim), CAT_J: (N, _v.dim), CAT_P: (_v.dim,), CAT_SCALAR: ()}[_v.params[0]]  # type: ignore[index]
    _t = 2 * torch.rand(_shape, generator=_g, dtype=torch.float64) - 1
    TENSORS.append(float(_t) if _v.params[0] == CAT_SCALAR else _t)

SCALAR_OPS = sorted(n for n, op in OPS.items() if op.scalar and not op.params)
#: Vector ops that take vectors of one dimension (or one of 1), and the few that take none but their own.
VECTOR_OPS = ["Sum", "Max", "Min", "SqNorm2", "Dot", "SqDist", "Concat", "WeightedSqNorm", "TensorProd", "Norm2"]
#: Ops with a restricted domain get arguments squeezed into it; the others do in part, so that plain products and
#: exponentials, which have rules of their own, occur too.
_ALL = (-2.0, 2.0)


def _squeeze(node: Node, interval: tuple[float, float]) -> Node:
    low, high = interval
    return add(low, mul(high - low, apply("Sigmoid", node)))


@st.composite
def formulas(draw: st.DrawFn, dim: int | None = None, depth: int = 3) -> Node:
    """A formula of depth at most ``depth`` and of dimension ``dim`` (any if None)."""
    dim = draw(st.sampled_from(DIMS)) if dim is None else dim
    kinds = ["product", "kernel", "scalar", "scalar", "vector"] + ["leaf"] * (depth < 2)
    kind = draw(st.sampled_from(kinds)) if depth else "leaf"
    below = depth - 1
    if kind == "leaf":
        choices = [v for v in VARIABLES if v.dim in (1, dim)]
        leaf = draw(st.sampled_from(choices) | st.floats(-2, 2, width=16).map(const))
        return leaf if leaf.dim == dim else apply("Broadcast", leaf, params=(dim,))
    if kind == "product":  # what row_factor and the rule of sums of products take apart
        ops = draw(st.lists(st.sampled_from(["Mul", "Mul", "Neg", "Div"]), min_size=1, max_size=3))
        out = draw(formulas(dim, below))
        for op in ops:
            other = draw(formulas(draw(st.sampled_from([1, dim])), below - 1 if below else 0))
            args = {"Neg": (out,), "Div": (out, _squeeze(other, (0.5, 2.0)))}.get(op, (out, other))
            out = apply(op, *(args if draw(st.booleans()) or op != "Mul" else args[::-1]))
        return out
    if kind == "kernel":  # exp(-c · d): the rule of base 2
        d = apply("SqDist", draw(formulas(None, below)), draw(formulas(1, below)))
        scale = draw(st.sampled_from([const(0.5), *(_squeeze(v, (0.3, 1.0)) for v in VARIABLES if v.dim == 1)]))
        return _fit(apply("Exp", draw(st.sampled_from([
            mul(scale, apply("Neg", d)), apply("Neg", mul(d, scale)), apply("Div", apply("Neg", d), scale),
            apply("Neg", apply("Mul", apply("Mul", d, scale), scale)), apply("Neg", d),
        ]))), dim)  # fmt: skip
    if kind == "vector":
        name, inner = draw(st.sampled_from(VECTOR_OPS)), draw(st.sampled_from(DIMS))
    else:
        name, inner = draw(st.sampled_from(SCALAR_OPS)), dim
    return _fit(apply(name, *_arguments(draw, OPS[name], inner, below)), dim)


def _arguments(draw: st.DrawFn, op: Op, dim: int, depth: int) -> list[Node]:
    args = []
    for k in range(op.arity):
        own = dim if k == op.arity - 1 else draw(st.sampled_from([1, dim]))
        arg = draw(formulas(own, depth))
        free = op.domain[k] == _ALL and op.name not in ("Exp", "Exp2", "Expm1", "Sinh", "Cosh", "Square")
        args.append(arg if free and draw(st.booleans()) else _squeeze(arg, op.domain[k]))
    return args


def _fit(node: Node, dim: int) -> Node:
    if node.dim == 1:
        return apply("Broadcast", node, params=(dim,)) if dim > 1 else node
    if node.dim < dim:
        node = apply("Concat", node, node)
    return apply("Extract", node, params=(node.dim - dim, dim))


def dense(f: Node, tensors=TENSORS) -> torch.Tensor:
    """The value of ``f`` for every pair, (M, N, dim), by the references of the table."""
    return dense_all((f,), tensors)[0].expand(M, N, f.dim)


def dense_all(roots: tuple[Node, ...], tensors=TENSORS) -> list[torch.Tensor]:
    def leaf(v: Node) -> torch.Tensor:
        t = tensors[v.params[1]]
        return pair_view(t, v.params[0]) if isinstance(t, torch.Tensor) else torch.full((1,), t, dtype=torch.float64)

    return evaluate(roots, leaf, torch.zeros(1, dtype=torch.float64))


def largest(f: Node, tensors=TENSORS) -> float:
    """The largest number that occurs anywhere in the evaluation of ``f``; NaN or infinity if there is one."""
    return float(torch.stack([v.abs().max() for v in dense_all(tuple(topological(f)), tensors)]).max())
