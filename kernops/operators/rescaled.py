"""An operator whose rows and columns are multiplied by numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..backends.layout import broadcast
from .base import LinearOperator
from .structured import _Composite

Tensor = torch.Tensor


class RescaledOperator(_Composite):
    """D A E for an operator A and diagonal matrices D and E: entry (i, j) is d_i A_ij e_j.

    Weights of samples (D = E = W^½), and what Laplace's approximation is made of, are such matrices.

    Args:
        operator: A, (*B, M, N).
        rows: the diagonal d of D, (*B, M).
        columns: the diagonal e of E, (*B, N); None for ``rows``, which keeps a symmetric operator symmetric.

    Raises:
        TypeError: a diagonal is no tensor.
        ValueError: shapes, dtypes or devices do not fit.

    Example:
        >>> from kernops.kernels import RBF
        >>> from kernops.operators import KernelOperator, RescaledOperator
        >>> K = KernelOperator(RBF(), torch.zeros(2, 1))
        >>> RescaledOperator(K, torch.tensor([1.0, 2.0])).to_dense()
        tensor([[1., 2.],
                [2., 4.]])
    """

    def __init__(self, operator: LinearOperator, rows: Tensor, columns: Tensor | None = None) -> None:
        self.parts = (operator,)
        self._agree("a rescaled operator")
        given = [("rows", rows, operator.shape[-2]), ("columns", columns, operator.shape[-1])]
        for name, t, size in given if columns is not None else given[:1]:
            if not isinstance(t, Tensor):
                raise TypeError(f"{name} must be a tensor of shape (..., {size}); got {type(t).__name__}")
            operator._need_like(name, t)
            if t.ndim < 1 or t.shape[-1] != size:
                raise ValueError(f"{name} must have shape (..., {size}); got {tuple(t.shape)}")
        if columns is None:
            operator._need_square("a rescaled operator without columns of its own")
        self.rows, self.columns = rows, columns
        batch = broadcast([operator.batch, *(tuple(t.shape[:-1]) for t in self._diagonals)])
        self.shape = (*batch, *operator.shape[-2:])
        self.symmetric = operator.symmetric and columns is None

    @property
    def _diagonals(self) -> tuple[Tensor, ...]:
        return (self.rows,) if self.columns is None else (self.rows, self.columns)

    @property
    def _right(self) -> Tensor:
        return self._diagonals[-1]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (*super().tensors, *self._diagonals)

    def with_tensors(self, tensors: Sequence[Tensor]) -> LinearOperator:
        count = len(self.parts[0].tensors)
        return RescaledOperator(self.parts[0].with_tensors(tensors[:count]), *tensors[count:])

    def _matmul(self, v: Tensor) -> Tensor:
        return self.rows[..., None] * self.parts[0]._matmul(self._right[..., None] * v)

    def _transposed(self) -> LinearOperator:
        return RescaledOperator(self.parts[0].T, self._right, self.rows)

    def _diagonal(self) -> Tensor:
        return (self.rows * self.parts[0]._diagonal() * self._right).expand(self.shape[:-1])

    def _row(self, index: Tensor) -> Tensor:
        own = self.rows.expand(*index.shape, self.shape[-2]).gather(-1, index[..., None])
        return own * self.parts[0]._row(index) * self._right

    def _columns(self, index: Tensor) -> Tensor:
        return self.rows[..., None] * self.parts[0]._columns(index) * self._right[..., None, index]

    def _principal(self, index: Tensor) -> Tensor:
        return self.rows[..., index, None] * self.parts[0]._principal(index) * self._right[..., None, index]

    def _elements(self, i: Tensor, j: Tensor) -> Tensor:
        return self.rows[..., i] * self.parts[0]._elements(i, j) * self._right[..., j]

    def _block(self, rows: Tensor, columns: Tensor) -> LinearOperator:
        same = self.symmetric and rows.shape == columns.shape and bool(torch.equal(rows, columns))
        right = None if same else self._right[..., columns]
        return RescaledOperator(self.parts[0]._block(rows, columns), self.rows[..., rows], right)

    def _split(self) -> tuple[LinearOperator | None, Tensor | None]:
        rest, diagonal = self.parts[0]._split()
        scaled = None if rest is None else RescaledOperator(rest, self.rows, self.columns)
        return scaled, (None if diagonal is None else self.rows * diagonal * self._right)

    def to_dense(self) -> Tensor:
        """The matrix as a tensor (*B, M, N)."""
        return (self.rows[..., None] * self.parts[0].to_dense() * self._right[..., None, :]).expand(self.shape)

    def _dense_into(self, out: Tensor) -> None:
        if not self.parts[0].batch == self.batch == tuple(out.shape[:-2]):
            return super()._dense_into(out)
        self.parts[0]._dense_into(out)
        out.mul_(self.rows[..., None]).mul_(self._right[..., None, :])
