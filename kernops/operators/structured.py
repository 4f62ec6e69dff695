"""Operators made of others, and of small tensors."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch

from ..backends.layout import broadcast
from .base import LinearOperator

Tensor = torch.Tensor


class DenseOperator(LinearOperator):
    """A tensor (*B, M, N) as an operator.

    Args:
        matrix: the tensor.
        symmetric: whether it is symmetric; it is not looked at.
    """

    def __init__(self, matrix: Tensor, symmetric: bool = False) -> None:
        if not isinstance(matrix, Tensor) or matrix.ndim < 2 or not matrix.is_floating_point():
            raise TypeError(f"matrix must be a tensor of floating-point numbers (..., M, N); got {matrix!r}")
        if symmetric and matrix.shape[-1] != matrix.shape[-2]:
            raise ValueError(f"a matrix of shape {tuple(matrix.shape)} cannot be symmetric")
        self.matrix, self.symmetric = matrix, symmetric
        self.shape, self.dtype, self.device = tuple(matrix.shape), matrix.dtype, matrix.device

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.matrix,)

    def with_tensors(self, tensors: Sequence[Tensor]) -> LinearOperator:
        return DenseOperator(tensors[0], self.symmetric)

    def _matmul(self, v: Tensor) -> Tensor:
        return self.matrix @ v

    def _transposed(self) -> LinearOperator:
        return DenseOperator(self.matrix.mT)

    def _diagonal(self) -> Tensor:
        return self.matrix.diagonal(dim1=-2, dim2=-1)

    def _elements(self, i: Tensor, j: Tensor) -> Tensor:
        return self.matrix[..., i, j]

    def _columns(self, index: Tensor) -> Tensor:
        return self.matrix.index_select(-1, index)

    def to_dense(self) -> Tensor:
        return self.matrix


class DiagonalOperator(LinearOperator):
    """A diagonal matrix.

    Args:
        values: the diagonal (*B, N).
    """

    symmetric = True

    def __init__(self, values: Tensor) -> None:
        if not isinstance(values, Tensor) or values.ndim < 1 or not values.is_floating_point():
            raise TypeError(f"values must be a tensor of floating-point numbers (..., N); got {values!r}")
        self.values = values
        self.shape = (*values.shape, values.shape[-1])
        self.dtype, self.device = values.dtype, values.device

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.values,)

    def with_tensors(self, tensors: Sequence[Tensor]) -> LinearOperator:
        return DiagonalOperator(tensors[0])

    def _matmul(self, v: Tensor) -> Tensor:
        return self.values[..., None] * v

    def _transposed(self) -> LinearOperator:
        return self

    def _diagonal(self) -> Tensor:
        return self.values

    def _elements(self, i: Tensor, j: Tensor) -> Tensor:
        return torch.where(i == j, self.values[..., i], 0.0)

    def _split(self) -> tuple[LinearOperator | None, Tensor | None]:
        return None, self.values

    def to_dense(self) -> Tensor:
        """The matrix as a tensor (*B, N, N)."""
        return torch.diag_embed(self.values)


class _Composite(LinearOperator):
    """An operator whose tensors are those of its parts."""

    parts: tuple[LinearOperator, ...]

    def _agree(self, what: str) -> None:
        first = self.parts[0]
        self.dtype, self.device = first.dtype, first.device
        for p in self.parts[1:]:
            if p.dtype != first.dtype or p.device != first.device:
                raise ValueError(
                    f"{what}: operators must have one dtype and device; got {first.dtype} on {first.device} and "
                    f"{p.dtype} on {p.device}"
                )

    def _rebuild(self, parts: Sequence[LinearOperator]) -> LinearOperator:
        raise NotImplementedError

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(t for p in self.parts for t in p.tensors)

    def with_tensors(self, tensors: Sequence[Tensor]) -> LinearOperator:
        parts, start = [], 0
        for p in self.parts:
            count = len(p.tensors)
            parts.append(p.with_tensors(tensors[start : start + count]))
            start += count
        return self._rebuild(parts)


class SumOperator(_Composite):
    """The sum of operators of one shape; batch shapes broadcast."""

    def __init__(self, *parts: LinearOperator) -> None:
        self.parts = tuple(q for p in parts for q in (p.parts if isinstance(p, SumOperator) else (p,)))
        self._agree("a sum")
        sizes = {p.shape[-2:] for p in self.parts}
        if len(sizes) > 1:
            raise ValueError(f"operators of shapes {' and '.join(map(str, sorted(sizes)))} cannot be added")
        self.shape = (*broadcast([p.batch for p in self.parts]), *self.parts[0].shape[-2:])
        self.symmetric = all(p.symmetric for p in self.parts)

    def _rebuild(self, parts: Sequence[LinearOperator]) -> LinearOperator:
        return SumOperator(*parts)

    def _matmul(self, v: Tensor) -> Tensor:
        return _total(p._matmul(v) for p in self.parts)

    def _bilinear(self, u: Tensor, v: Tensor, needed: Sequence[bool]) -> list[Tensor | None]:
        out: list[Tensor | None] = []
        for p in self.parts:
            out += p._bilinear(u, v, needed[len(out) : len(out) + len(p.tensors)])
        return out

    def _transposed(self) -> LinearOperator:
        return SumOperator(*(p.T for p in self.parts))

    def _diagonal(self) -> Tensor:
        return _total(p._diagonal() for p in self.parts).expand(self.shape[:-1])

    def _row(self, index: Tensor) -> Tensor:
        return _total(p._row(index) for p in self.parts)

    def _columns(self, index: Tensor) -> Tensor:
        return _total(p._columns(index) for p in self.parts).expand(*self.shape[:-1], len(index))

    def _principal(self, index: Tensor) -> Tensor:
        return _total(p._principal(index) for p in self.parts).expand(*self.batch, len(index), len(index))

    def _elements(self, i: Tensor, j: Tensor) -> Tensor:
        return _total(p._elements(i, j) for p in self.parts)

    def _block(self, rows: Tensor, columns: Tensor) -> LinearOperator:
        return SumOperator(*(p._block(rows, columns) for p in self.parts))

    def _split(self) -> tuple[LinearOperator | None, Tensor | None]:
        pairs = [p._split() for p in self.parts]
        rest = [a for a, _ in pairs if a is not None]
        diagonals = [d for _, d in pairs if d is not None]
        return (SumOperator(*rest) if rest else None), (_total(diagonals) if diagonals else None)

    def to_dense(self) -> Tensor:
        """The matrix as a tensor (*B, M, N)."""
        return _total(p.to_dense() for p in self.parts).expand(self.shape)


def _total(parts: Any) -> Tensor:
    out = None
    for p in parts:
        out = p if out is None else out + p
    assert out is not None
    return out


class ScaledOperator(_Composite):
    """An operator times a number, a tensor of one, or a tensor of the shape of its batch."""

    def __init__(self, operator: LinearOperator, factor: float | Tensor) -> None:
        self.parts = (operator,)
        self._agree("a product")
        if isinstance(factor, Tensor):
            operator._need_like("the factor", factor)
            if factor.numel() == 1 and factor.ndim <= max(1, len(operator.batch)):
                factor = factor.reshape(())
            if factor.ndim and tuple(factor.shape) != operator.batch:
                raise ValueError(
                    f"an operator of batch shape {operator.batch} is scaled by a number or by a tensor of that shape; "
                    f"got shape {tuple(factor.shape)} (A @ B is the product of operators)"
                )
        self.factor = factor if isinstance(factor, (Real, Tensor)) else float(factor)
        self.shape, self.symmetric = operator.shape, operator.symmetric

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        own = (self.factor,) if isinstance(self.factor, Tensor) else ()
        return (*super().tensors, *own)

    def with_tensors(self, tensors: Sequence[Tensor]) -> LinearOperator:
        count = len(self.parts[0].tensors)
        factor = tensors[count] if isinstance(self.factor, Tensor) else self.factor
        return ScaledOperator(self.parts[0].with_tensors(tensors[:count]), factor)

    def _times(self, t: Tensor, axes: int) -> Tensor:
        f = self.factor
        return t * (f.reshape(*f.shape, *[1] * axes) if isinstance(f, Tensor) and f.ndim else f)

    def _matmul(self, v: Tensor) -> Tensor:
        return self._times(self.parts[0]._matmul(v), 2)

    def _transposed(self) -> LinearOperator:
        return ScaledOperator(self.parts[0].T, self.factor)

    def _diagonal(self) -> Tensor:
        return self._times(self.parts[0]._diagonal(), 1)

    def _row(self, index: Tensor) -> Tensor:
        return self._times(self.parts[0]._row(index), 1)

    def _columns(self, index: Tensor) -> Tensor:
        return self._times(self.parts[0]._columns(index), 2)

    def _principal(self, index: Tensor) -> Tensor:
        return self._times(self.parts[0]._principal(index), 2)

    def _elements(self, i: Tensor, j: Tensor) -> Tensor:
        return self._times(self.parts[0]._elements(i, j), 1)

    def _block(self, rows: Tensor, columns: Tensor) -> LinearOperator:
        return ScaledOperator(self.parts[0]._block(rows, columns), self.factor)

    def _split(self) -> tuple[LinearOperator | None, Tensor | None]:
        rest, diagonal = self.parts[0]._split()
        scaled = None if rest is None else ScaledOperator(rest, self.factor)
        return scaled, (None if diagonal is None else self._times(diagonal, 1))

    def to_dense(self) -> Tensor:
        """The matrix as a tensor (*B, M, N)."""
        return self._times(self.parts[0].to_dense(), 2)


class ProductOperator(_Composite):
    """A B, never multiplied out."""

    symmetric = False

    def __init__(self, a: LinearOperator, b: LinearOperator) -> None:
        self.parts = (a, b)
        self._agree("a product")
        if a.shape[-1] != b.shape[-2]:
            raise ValueError(f"operators of shapes {a.shape} and {b.shape} cannot be multiplied")
        self.shape = (*broadcast([a.batch, b.batch]), a.shape[-2], b.shape[-1])

    def _rebuild(self, parts: Sequence[LinearOperator]) -> LinearOperator:
        return ProductOperator(*parts)

    def _matmul(self, v: Tensor) -> Tensor:
        return self.parts[0]._matmul(self.parts[1]._matmul(v))

    def _transposed(self) -> LinearOperator:
        return ProductOperator(self.parts[1].T, self.parts[0].T)

    def _columns(self, index: Tensor) -> Tensor:
        return self.parts[0]._matmul(self.parts[1]._columns(index)).expand(*self.shape[:-1], len(index))

    def _diagonal(self) -> Tensor:
        return self.to_dense().diagonal(dim1=-2, dim2=-1)

    def to_dense(self) -> Tensor:
        """The matrix as a tensor (*B, M, N)."""
        return self.parts[0].to_dense() @ self.parts[1].to_dense()


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
