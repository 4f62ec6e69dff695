"""What adapters for other libraries ask of a kernel's matrix: gradients of bilinear forms, and single entries."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch

from ..autograd.function import pull_back_sum
from ..formula.graph import CAT_I, CAT_J, Node, rewrite, var, variables
from ..lazy import LazyTensor
from ..lazy.arrays import space_of
from ..lazy.engine import request
from ..lazy.frame import Frame
from ..lazy.options import backend_for
from .entries import sum_over_columns
from .kernel import WIDTHS, KernelOperator

if TYPE_CHECKING:
    from .derivatives import DerivativesOperator

    Matrix: TypeAlias = KernelOperator | DerivativesOperator

Tensor = torch.Tensor
Grads = list[Tensor | None]

#: Components of gradients that are computed together at most: each pass computes the products u_i·v_j of all pairs
#: anew, which are most of its work. None of them is a product of matrices, that matrix units would do apart.
FUSED = 16


def bilinear_gradients(operator: Matrix, u: Tensor, v: Tensor, wanted: Collection[int]) -> Grads:
    """The gradient of Σ uᵀ K v, over the columns of u and v, by the data of the kernel; K v is not computed.

    Where rows and columns are the same points and K is symmetric, Σ_j (u_i·v_j + v_i·u_j) dk(x_i, x_j)/dx_i is the
    whole gradient by x_i: one sum over j, which derivatives by parameters share.

    Args:
        operator: K (*B, M, N), without an added diagonal.
        u, v: (*B', M, E) and (*B', N, E).
        wanted: numbers of the variables in ``operator.lazy.frame`` whose gradients are needed.

    Returns:
        One for each variable: ``None`` where it is not wanted, or K does not depend on it. The gradient of a tensor
        that is a variable of rows and one of columns is the sum of both.
    """
    frame = operator.lazy.frame
    if u.dtype.itemsize == 2:
        full = bilinear_gradients(_in_float32(operator), u.float(), v.float(), wanted)
        return [g if g is None else g.to(u.dtype) for g in full]
    total: Grads = [None] * len(frame.tensors)
    if 0 in u.shape or 0 in v.shape:
        return total
    batch = torch.broadcast_shapes(u.shape[:-2], v.shape[:-2])
    u, v = (t.detach().expand(*batch, *t.shape[-2:]) for t in (u, v))
    twins = _twins(frame, wanted) if operator.symmetric else set()
    if twins:
        u, v = torch.cat([u, v], -1), torch.cat([v, u], -1)
        wanted = set(wanted) - twins
    for start in range(0, u.shape[-1], WIDTHS[-1]):
        part = slice(start, start + WIDTHS[-1])
        for k, g in enumerate(_part(operator, u[..., part], v[..., part], wanted)):
            if g is not None:
                g = g / 2 if twins and frame.cats[k] not in (CAT_I, CAT_J) else g
                total[k] = g if total[k] is None else total[k] + g  # type: ignore[operator]
    return total


def _in_float32(operator: Matrix) -> Matrix:
    frame = operator.lazy.frame
    made: dict[int, Tensor] = {}  # rows and columns that are one tensor stay one
    tensors = tuple(made.setdefault(id(t), t.float()) if isinstance(t, Tensor) else t for t in frame.tensors)
    space = space_of("torch", torch.float32, operator.device)
    return operator._remade(LazyTensor(operator.lazy.formula, frame.replace(tensors=tensors, space=space)))


def _twins(frame: Frame, wanted: Collection[int]) -> set[int]:
    """The wanted variables of columns, if rows and columns are the same tensors and gradients by both are wanted."""
    found: dict[int, dict[int, int]] = {CAT_I: {}, CAT_J: {}}
    tensors = frame.tensors  # kept, so that no other tensor gets the identity of one
    for k in wanted:
        if frame.cats[k] in found:
            found[frame.cats[k]][id(tensors[k])] = k
    same = found[CAT_I].keys() == found[CAT_J].keys()
    return set(found[CAT_J].values()) if same else set()


def _part(operator: Matrix, u: Tensor, v: Tensor, wanted: Collection[int]) -> Grads:
    product, u = operator._weighted(u, v)
    frame = product.frame
    assert frame.space is not None and frame.m is not None and frame.n is not None
    plan = request("Sum", product.formula, None, 0, len(frame.tensors), False).plan
    backend = backend_for(frame.backend, frame.space.device)
    found = pull_back_sum(plan, frame.tensors, u, wanted, frame.m, frame.n, backend, FUSED)
    return found[: len(operator.lazy.frame.tensors)]


def entries(operator: KernelOperator, rows: Tensor, columns: Tensor, batch: Sequence[Tensor]) -> Tensor:
    """Entries of K by their numbers, as a tensor is indexed with tensors: one number for each of the broadcast indices.

    Args:
        operator: K (*B, M, N), without an added diagonal.
        rows, columns: numbers of rows and columns, of shapes that broadcast.
        batch: numbers in each of the batch axes.

    Returns:
        The entries, of the indices' shape; differentiable.
    """
    if not operator.batch and rows.ndim == columns.ndim == 2 and rows.shape[1] == columns.shape[0] == 1:
        return operator._block(rows[:, 0], columns[0]).to_dense()  # without a copy of the points for each entry
    frame = operator.lazy.frame
    shape = torch.broadcast_shapes(rows.shape, columns.shape, *(b.shape for b in batch))
    values, cats = list(frame.tensors), list(frame.cats)
    for k, (t, cat) in enumerate(zip(frame.tensors, frame.cats)):
        if cat in (CAT_I, CAT_J):
            t = _picked(t, operator.batch, batch, rows if cat == CAT_I else columns)
        elif isinstance(t, Tensor) and t.ndim > 1:
            t = t.expand(*operator.batch, t.shape[-1])[tuple(batch)]
        else:
            continue
        values[k], cats[k] = t.expand(*shape, t.shape[-1]).reshape(-1, t.shape[-1]), CAT_I
    moved = {v: var(cats[v.params[1]], v.params[1], v.dim) for v in variables(operator.lazy.formula)}
    formula: Node = rewrite(operator.lazy.formula, moved)
    count = shape.numel()
    pairs = frame.replace(tensors=tuple(values), cats=tuple(cats), m=count, n=None, batch=())
    return sum_over_columns(LazyTensor(formula, pairs), count, 1, ())[..., 0].expand(count).reshape(shape)


def _picked(t: Tensor, shape: Sequence[int], batch: Sequence[Tensor], index: Tensor) -> Tensor:
    if t.ndim == 2:
        return t[index]
    return t.expand(*shape, *t.shape[-2:])[(*batch, index)]
