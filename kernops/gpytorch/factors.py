"""Matrices of low rank as what they are products of: what an elementwise product with a kernel can read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from linear_operator.operators import (
    ConstantMulLinearOperator,
    InterpolatedLinearOperator,
    LowRankRootLinearOperator,
    MatmulLinearOperator,
    RootLinearOperator,
)

Tensor = torch.Tensor
Factors = tuple[Tensor, Tensor | None]

#: The highest rank: a pair costs a dot product of so many numbers.
MOST_FACTORS = 128


def low_rank(matrix: Any) -> Factors | None:
    """A (*B, M, R) and B (*B, N, R) with A Bᵀ = ``matrix``, B = ``None`` for A; ``None`` if it is not known to be so.

    R is at most ``MOST_FACTORS``. Known are roots (linear kernels), products of two matrices, and matrices of tasks
    that are looked up for each point (``IndexKernel``).
    """
    rule = RULES.get(type(matrix))
    return None if rule is None else rule(matrix)


def _of_root(matrix: Any) -> Factors | None:
    return (matrix.root.to_dense(), None) if matrix.root.shape[-1] <= MOST_FACTORS else None


def _of_product(matrix: Any) -> Factors | None:
    left, right = matrix.left_linear_op, matrix.right_linear_op
    return (left.to_dense(), right.to_dense().mT) if left.shape[-1] <= MOST_FACTORS else None


def _of_lookup(matrix: Any) -> Factors | None:
    base = matrix.base_linear_op
    if max(base.shape[-2:]) > MOST_FACTORS:
        return None
    dense = base.to_dense()
    columns = torch.eye(dense.shape[-1], dtype=dense.dtype, device=dense.device).expand(*dense.shape[:-2], -1, -1)
    rows = _looked_up(dense, matrix.left_interp_indices, matrix.left_interp_values)
    return rows, _looked_up(columns, matrix.right_interp_indices, matrix.right_interp_values)


def _looked_up(table: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """Σ_k values[..., m, k] table[..., index[..., m, k], :]."""
    batch = torch.broadcast_shapes(table.shape[:-2], index.shape[:-2])
    m, count = index.shape[-2:]
    flat = index.expand(*batch, m, count).reshape(*batch, m * count, 1)
    table = table.expand(*batch, *table.shape[-2:])
    found = table.gather(-2, flat.expand(*batch, m * count, table.shape[-1])).unflatten(-2, (m, count))
    return (found * values[..., None]).sum(-2)


def _of_multiple(matrix: Any) -> Factors | None:
    factors = low_rank(matrix.base_linear_op)
    if factors is None:
        return None
    left, right = factors
    return matrix.expanded_constant * left, left if right is None else right


RULES: dict[type, Callable[[Any], Factors | None]] = {
    RootLinearOperator: _of_root,
    LowRankRootLinearOperator: _of_root,
    MatmulLinearOperator: _of_product,
    InterpolatedLinearOperator: _of_lookup,
    ConstantMulLinearOperator: _of_multiple,
}
