"""One test table for every op: cases made from the rows of ``OPS``, and what float64 torch says about each.

A case applies one op to arguments that depend on rows, columns, both or neither, and asks for its value, a derivative
(reverse mode), a second derivative and a forward-mode derivative, each contracted with random vectors to one number per
pair. The numbers of many cases are summed over columns in one reduction, so that compiled back ends compile rarely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import torch

from kernops import formula as _fill_the_table  # noqa: F401
from kernops.formula.autodiff import jvp, vjp
from kernops.formula.graph import CAT_I, CAT_J, CAT_P, Node, check, relabel, var, variables
from kernops.formula.ops import OPS, Op, add, apply, const, mul, total
from kernops.formula.plan import make_plan

from .program import compute

Tensor = torch.Tensor

M, N = 4, 6
MAX_DIM = 24
#: Where the arguments of an op come from: rows i, columns j, parameters p, or x, the mean of a row's and a column's.
SOURCES = {1: ("x", "i", "j", "p"), 2: ("ij", "xx", "px", "ji", "xj", "ii"), 3: ("ijp", "xxx", "jpi", "iix")}


#: Where torch's own float64 derivatives are less accurate: torch.polygamma(1, a) is right to nine digits.
TORCH_ERROR = {"Lgamma": 1e-9, "Digamma": 1e-9}


@dataclass(frozen=True)
class Case:
    op: str
    dims: tuple[int, ...]
    params: tuple
    sources: str

    def __str__(self) -> str:
        return f"{self.op}-{'x'.join(map(str, self.dims))}-{self.sources}"


def examples(op: Op) -> list[tuple[tuple[int, ...], tuple]]:
    """The row's own examples, or the default ones."""
    if op.examples:
        return list(op.examples)
    if op.params:
        raise ValueError(f"the row of {op.name} has params, so it needs examples")
    broadcast = [tuple(1 if k == one else 3 for k in range(op.arity)) for one in range(op.arity)]
    return [((3,) * op.arity, ()), *((d, ()) for d in broadcast), ((1,) * op.arity, ())]


def cases(op: Op) -> list[Case]:
    """Every example and every source of arguments at least once."""
    shapes, sources = examples(op), SOURCES[op.arity]
    count = max(len(shapes), len(sources))
    return [Case(op.name, *shapes[k % len(shapes)], sources[k % len(sources)]) for k in range(count)]


def few_cases(op: Op) -> list[Case]:
    """One case per example, all arguments dependent on the pair: for compiled back ends, where cases cost seconds."""
    return [Case(op.name, dims, params, "x" * op.arity) for dims, params in examples(op)[:2]]


# Variables: one for each category, place in the argument list and dimension. Three more hold the random vectors.
_CATS = {"i": CAT_I, "j": CAT_J, "p": CAT_P}
_KEYS = [*product("ijp", range(3), range(1, MAX_DIM + 1)), ("j", 3, MAX_DIM), ("p", 3, MAX_DIM), ("p", 4, MAX_DIM)]
_NUMBER = {key: k for k, key in enumerate(_KEYS)}
_WEIGHT, _ALONG, _AGAIN = _KEYS[-3:]


def _var(key: tuple) -> Node:
    return var(_CATS[key[0]], _NUMBER[key], key[2])


@lru_cache(maxsize=2)
def data(dtype: torch.dtype) -> dict[tuple, Tensor]:
    """A tensor for every variable: arguments in (0, 1), random vectors in (-1, 1).

    A first argument has the middle of its interval somewhere, which is 0 for most ops: the derivatives of Where and
    Heaviside have terms that exist only there.
    """
    g = torch.Generator().manual_seed(1234)
    rows = {"i": (M,), "j": (N,), "p": ()}
    tensors = {key: torch.rand(*rows[key[0]], key[2], generator=g, dtype=torch.float64) for key in _KEYS}
    for source, row in (("i", 1), ("j", 2)):
        for dim in range(1, MAX_DIM + 1):
            tensors[source, 0, dim][row, 0] = 0.5
    for key in (_WEIGHT, _ALONG, _AGAIN):
        tensors[key] = 2 * tensors[key] - 1
    return {key: t.to(dtype) for key, t in tensors.items()}


def _argument_keys(case: Case) -> list[list[tuple]]:
    """The variables from which each argument is made."""
    return [[(s, k, d) for s in source.replace("x", "ij")]
            for k, (source, d) in enumerate(zip(case.sources, case.dims))]  # fmt: skip


def _head(key: tuple, dim: int) -> Node:
    return apply("Extract", _var(key), params=(0, dim))


# --- the formulas ---------------------------------------------------------------------------------------------------
def formula_of(case: Case) -> Node:
    args = []
    for keys, (low, high) in zip(_argument_keys(case), OPS[case.op].domain):
        z = _var(keys[0]) if len(keys) == 1 else mul(0.5, add(_var(keys[0]), _var(keys[1])))
        args.append(add(low, mul(high - low, z)))
    return check(apply(case.op, *args, params=case.params))


def outputs_of(case: Case, vector: bool) -> list[Node]:
    """Value, first derivative, second derivative, forward derivative; the value as a vector if ``vector`` is set."""
    f = formula_of(case)
    weight = _head(_WEIGHT, f.dim)
    wrt = [_var(key) for key in dict.fromkeys(k for keys in _argument_keys(case) for k in keys)]
    along, again = ({v: _head(key, v.dim) for v in wrt} for key in (_ALONG, _AGAIN))
    first = _contract(vjp([(f, weight)], wrt), wrt, along)
    second = _contract(vjp([(first, const(1.0))], wrt), wrt, again)
    df = jvp(f, again)
    forward = const(0.0) if df is None else total(mul(df, weight))
    value = f if vector else total(mul(f, weight))
    return [check(node) for node in (value, first, second, forward)]


def _contract(cotangents: Sequence[Node | None], wrt: list[Node], vectors: dict[Node, Node]) -> Node:
    out = const(0.0)
    for g, v in zip(cotangents, wrt):
        if g is not None:
            assert g.dim == v.dim, f"the cotangent of {v} has dimension {g.dim}"
            out = add(out, total(mul(g, vectors[v])))
    return out


# --- the references -------------------------------------------------------------------------------------------------
def expected_of(case: Case, vector: bool) -> list[Tensor]:
    """The same by torch.autograd on the op's reference, for every pair in float64, summed over columns: (M, dim)."""
    op, tensors = OPS[case.op], data(torch.float64)
    spread = {"i": lambda t: t[:, None].expand(M, N, -1), "j": lambda t: t[None].expand(M, N, -1),
              "p": lambda t: t.expand(M, N, -1)}  # fmt: skip
    leaves = {key: spread[key[0]](tensors[key]).clone().requires_grad_()
              for keys in _argument_keys(case) for key in keys}  # fmt: skip
    args = []
    for keys, (low, high) in zip(_argument_keys(case), op.domain):
        z = torch.stack([leaves[key] for key in keys]).mean(0)
        args.append(low + (high - low) * z)
    f = op.ref(torch, *args, *case.params)
    w, u, r = (spread[key[0]](tensors[key]) for key in (_WEIGHT, _ALONG, _AGAIN))
    value = (f * w[..., : f.shape[-1]]).sum(-1, keepdim=True)
    first = _directional(value, leaves, u)
    second = _directional(first, leaves, r)
    forward = _directional(value, leaves, r)
    return [t.detach().sum(1) for t in (f if vector else value, first, second, forward)]


def _directional(value: Tensor, leaves: dict[tuple, Tensor], vector: Tensor) -> Tensor:
    out = torch.zeros_like(value)
    if value.requires_grad:
        grads = torch.autograd.grad(value.sum(), list(leaves.values()), create_graph=True, allow_unused=True)
        for key, g in zip(leaves, grads):
            if g is not None:
                out = out + (g * vector[..., : key[2]]).sum(-1, keepdim=True)
    return out


# --- the comparison -------------------------------------------------------------------------------------------------
KINDS = ("value", "first derivative", "second derivative", "forward derivative")


def _concatenated(outs: list[Node]) -> Node:
    root = outs[0]
    for node in outs[1:]:
        root = apply("Concat", root, node)
    return root


def choice(outs: list[Node], which: Node) -> Node:
    """The one of the scalars ``outs`` whose number ``which`` is. Compilers digest it better than one long vector."""
    root: Node | None = None
    for k, node in enumerate(outs):
        term = apply("Where", apply("Equal", which, float(k)), node, 0.0)
        root = term if root is None else apply("Add", root, term)
    assert root is not None
    return root


def check_cases(
    group: Sequence[Case], backend: str, device: str = "cpu", dtype: torch.dtype = torch.float64, vector: bool = False
) -> None:
    """Assert that ``backend`` gives what torch says for every case. ``"program"`` interprets the hoisted program.

    All cases go into one reduction: of one long vector, if ``vector`` is set, in which the value of an op is its own
    vector; else of a scalar formula, each row of which computes one of the numbers.
    """
    outs = [node for case in group for node in outputs_of(case, vector)]
    root = check(_concatenated(outs) if vector else choice(outs, var(CAT_I, len(_KEYS), 1)))
    used = [int(v.params[1]) for v in variables(root)]
    numbers = [0] * (len(_KEYS) + 1)
    for place, k in enumerate(used):
        numbers[k] = place
    copies = 1 if vector else len(outs)
    values = data(dtype)
    tensors = [values[_KEYS[k]] if k < len(_KEYS) else torch.arange(copies).repeat_interleave(M).to(dtype)[:, None]
               for k in used]  # fmt: skip
    tensors = [t.repeat(copies, 1) if t.shape[:-1] == (M,) and k < len(_KEYS) else t for k, t in zip(used, tensors)]
    plan = make_plan("Sum", relabel(root, tuple(numbers)))
    (got,) = compute(plan, [t.to(device) for t in tensors], M * copies, N, backend)
    assert got.shape == (M * copies, root.dim) and got.dtype == dtype
    got = got.double().cpu()
    results = got.split([n.dim for n in outs], -1) if vector else got.split(M)
    want = [t for case in group for t in expected_of(case, vector)]
    wrong = []
    for k, (g, w) in enumerate(zip(results, want)):
        scale = 1 + w.abs().max().item()
        tolerance = TORCH_ERROR.get(group[k // 4].op, 1e-11) if dtype == torch.float64 else 2e-5
        if not torch.allclose(g, w.expand_as(g), rtol=0, atol=tolerance * scale):
            wrong.append(f"{group[k // 4]} {group[k // 4].params}, {KINDS[k % 4]}: error {(g - w).abs().max():.3g} "
                         f"where values reach {scale - 1:.3g}")  # fmt: skip
    assert not wrong, f"{backend} {dtype}:\n" + "\n".join(wrong)
