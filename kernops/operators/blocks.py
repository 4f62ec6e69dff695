"""Operators of blocks: along a diagonal, Kronecker products with a small dense factor, chosen rows and columns."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..backends.layout import broadcast
from .base import LinearOperator
from .structured import DenseOperator, _Composite, _total

Tensor = torch.Tensor


class BlockDiagonalOperator(_Composite):
    """Square operators along the diagonal, zeros elsewhere.

    Args:
        blocks: square operators, of any sizes; batch shapes broadcast.
    """

    def __init__(self, *blocks: LinearOperator) -> None:
        if not blocks or not all(isinstance(b, LinearOperator) for b in blocks):
            raise TypeError("blocks must be operators, at least one")
        for b in blocks:
            b._need_square("BlockDiagonalOperator")
        self.parts = blocks
        self._agree("a block-diagonal operator")
        self.sizes = [b.shape[-1] for b in blocks]
        n = sum(self.sizes)
        self.shape = (*broadcast([b.batch for b in blocks]), n, n)
        self.symmetric = all(b.symmetric for b in blocks)

    def _rebuild(self, parts: Sequence[LinearOperator]) -> LinearOperator:
        return BlockDiagonalOperator(*parts)

    def _join(self, parts: Sequence[Tensor], axis: int) -> Tensor:
        batch = broadcast([tuple(p.shape[:axis]) for p in parts])
        return torch.cat([p.expand(*batch, *p.shape[axis:]) for p in parts], axis)

    def _matmul(self, v: Tensor) -> Tensor:
        pieces = v.split(self.sizes, -2)
        return self._join([b._matmul(p) for b, p in zip(self.parts, pieces)], -2)

    def _transposed(self) -> LinearOperator:
        return BlockDiagonalOperator(*(b.T for b in self.parts))

    def _diagonal(self) -> Tensor:
        return self._join([b._diagonal() for b in self.parts], -1)

    def _row(self, index: Tensor) -> Tensor:
        rows, start = [], 0
        for b, size in zip(self.parts, self.sizes):
            own = index - start
            row = b._row(own.clamp(0, size - 1))
            rows.append(torch.where(((own >= 0) & (own < size))[..., None], row, 0.0))
            start += size
        return self._join(rows, -1)

    def _columns(self, index: Tensor) -> Tensor:
        return self._join([torch.where(mine, b._columns(own), 0.0) for b, own, mine in self._shares(index)], -2)

    def _principal(self, index: Tensor) -> Tensor:
        shares = self._shares(index)
        return _total(torch.where(mine & mine[:, None], b._principal(own), 0.0) for b, own, mine in shares)

    def _shares(self, index: Tensor) -> list[tuple[LinearOperator, Tensor, Tensor]]:
        """Blocks that have rows, the numbers (S,) as each counts them, and which of these are its own."""
        shares, start = [], 0
        for b, size in zip(self.parts, self.sizes):
            own = index - start
            if size:
                shares.append((b, own.clamp(0, size - 1), (own >= 0) & (own < size)))
            start += size
        return shares

    def _split(self) -> tuple[LinearOperator | None, Tensor | None]:
        pairs = [b._split() for b in self.parts]
        if any(rest is None for rest, _ in pairs) or all(d is None for _, d in pairs):
            return self, None
        zeros = [torch.zeros(b.shape[-1], dtype=self.dtype, device=self.device) for b in self.parts]
        diagonal = self._join([z if d is None else d for z, (_, d) in zip(zeros, pairs)], -1)
        return BlockDiagonalOperator(*(rest for rest, _ in pairs if rest is not None)), diagonal

    def to_dense(self) -> Tensor:
        """The matrix as a tensor (*B, N, N)."""
        rows, start = [], 0
        for b, size in zip(self.parts, self.sizes):
            after = self.shape[-1] - start - size
            rows.append(torch.nn.functional.pad(b.to_dense(), (start, after)))
            start += size
        return self._join(rows, -2)


class KroneckerOperator(_Composite):
    """A ⊗ T for an operator A (*B, M, N) and a small dense T (*B, R, S): entry (i R + k, j S + l) is A_ij T_kl.

    The covariance of R tasks at the same points, with the tasks of a point next to one another.

    Args:
        operator: A.
        small: T, a tensor; it is multiplied as it is.
        symmetric: whether T is symmetric; None for a comparison with its transpose.
    """

    def __init__(self, operator: LinearOperator, small: Tensor, symmetric: bool | None = None) -> None:
        if not isinstance(small, Tensor) or small.ndim < 2:
            raise TypeError("small must be a tensor of shape (..., R, S)")
        if symmetric is None:
            symmetric = small.shape[-1] == small.shape[-2] and bool(torch.equal(small, small.mT))
        self.parts = (operator, DenseOperator(small, symmetric))
        self._agree("a Kronecker product")
        self.small = small
        r, s = small.shape[-2:]
        m, n = operator.shape[-2:]
        self.shape = (*broadcast([operator.batch, tuple(small.shape[:-2])]), m * r, n * s)
        self.symmetric = operator.symmetric and symmetric

    def _rebuild(self, parts: Sequence[LinearOperator]) -> LinearOperator:
        operator, small = parts
        return KroneckerOperator(operator, small.to_dense(), small.symmetric)

    def _matmul(self, v: Tensor) -> Tensor:
        (r, s), e = self.small.shape[-2:], v.shape[-1]
        n = self.parts[0].shape[-1]
        batch = tuple(v.shape[:-2])
        inner = self.small[..., None, :, :] @ v.reshape(*batch, n, s, e)
        out = self.parts[0]._matmul(inner.flatten(-2))
        return out.reshape(*out.shape[:-2], out.shape[-2] * r, e)

    def _transposed(self) -> LinearOperator:
        return KroneckerOperator(self.parts[0].T, self.small.mT, self.parts[1].symmetric)

    def _diagonal(self) -> Tensor:
        return _outer(self.parts[0]._diagonal(), self.parts[1]._diagonal())

    def _elements(self, i: Tensor, j: Tensor) -> Tensor:
        r, s = self.small.shape[-2:]
        large = self.parts[0]._elements(torch.div(i, r, rounding_mode="floor"), torch.div(j, s, rounding_mode="floor"))
        return large * self.small[..., i % r, j % s]

    def _row(self, index: Tensor) -> Tensor:
        r = self.small.shape[-2]
        which = torch.div(index, r, rounding_mode="floor")
        row = self.parts[0]._row(which)
        small = self.small.expand(*index.shape, *self.small.shape[-2:])
        own = small.gather(-2, (index % r)[..., None, None].expand(*index.shape, 1, small.shape[-1]))
        return _outer(row, own[..., 0, :])

    def _columns(self, index: Tensor) -> Tensor:
        s = self.small.shape[-1]
        large = self.parts[0]._columns(torch.div(index, s, rounding_mode="floor"))
        return (large[..., :, None, :] * self.small[..., None, :, index % s]).flatten(-3, -2)

    def _principal(self, index: Tensor) -> Tensor:
        r, s = self.small.shape[-2:]
        if r != s:  # a row and a column of one number belong to different ones of A
            return super()._principal(index)
        k = index % s
        return self.parts[0]._principal(torch.div(index, s, rounding_mode="floor")) * self.small[..., k[:, None], k]

    def to_dense(self) -> Tensor:
        """The matrix as a tensor (*B, M R, N S)."""
        a = self.parts[0].to_dense()
        out = a[..., :, None, :, None] * self.small[..., None, :, None, :]
        return out.reshape(*out.shape[:-4], *self.shape[-2:])


def _outer(a: Tensor, b: Tensor) -> Tensor:
    return (a[..., :, None] * b[..., None, :]).flatten(-2)


class SelectedOperator(_Composite):
    """Rows and columns of an operator, by their numbers."""

    def __init__(self, operator: LinearOperator, rows: Tensor, columns: Tensor) -> None:
        self.parts, self.rows, self.columns = (operator,), rows, columns
        self._agree("a selection")
        self.shape = (*operator.batch, len(rows), len(columns))
        same = len(rows) == len(columns) and bool(torch.equal(rows, columns))
        self.symmetric = operator.symmetric and same

    def _rebuild(self, parts: Sequence[LinearOperator]) -> LinearOperator:
        return SelectedOperator(parts[0], self.rows, self.columns)

    def _matmul(self, v: Tensor) -> Tensor:
        full = v.new_zeros(*v.shape[:-2], self.parts[0].shape[-1], v.shape[-1])
        return self.parts[0]._matmul(full.index_add(-2, self.columns, v)).index_select(-2, self.rows)

    def _transposed(self) -> LinearOperator:
        return SelectedOperator(self.parts[0].T, self.columns, self.rows)

    def _diagonal(self) -> Tensor:
        return self.parts[0]._elements(self.rows, self.columns)

    def _elements(self, i: Tensor, j: Tensor) -> Tensor:
        return self.parts[0]._elements(self.rows[i], self.columns[j])

    def _row(self, index: Tensor) -> Tensor:
        return self.parts[0]._row(self.rows[index]).index_select(-1, self.columns)

    def _columns(self, index: Tensor) -> Tensor:
        return self.parts[0]._columns(self.columns[index]).index_select(-2, self.rows)

    def _principal(self, index: Tensor) -> Tensor:
        if not self.symmetric:
            return super()._principal(index)
        return self.parts[0]._principal(self.rows[index])

    def to_dense(self) -> Tensor:
        """The matrix as a tensor (*B, M, N)."""
        return self.parts[0].to_dense().index_select(-2, self.rows).index_select(-1, self.columns)
