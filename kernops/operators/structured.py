"""Operators of stored numbers, and sums, multiples and products of others."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from numbers import Real
from typing import Any

import torch

from ..backends.layout import broadcast
from .base import LinearOperator
from .derived import Derived

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
        self._set(values, values.shape[-1])

    def _set(self, values: Tensor, n: int) -> None:
        self.given, self._values = values, Derived.diagonal(values, n)
        self.shape = (*values.shape[:-1], n, n)
        self.dtype, self.device = values.dtype, values.device

    @classmethod
    def _of(cls, diagonal: Tensor, n: int) -> DiagonalOperator:
        """That of one number, of (*B, 1) or of (*B, N)."""
        new = object.__new__(cls)
        new._set(diagonal, n)
        return new

    @property
    def values(self) -> Tensor:
        """The diagonal (*B, N), a view of what was given."""
        return self._values.value

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

    def _dense_into(self, out: Tensor) -> None:
        kernel, diagonal = self._split()
        if kernel is None or diagonal is None or (type(kernel) is SumOperator and len(kernel.parts) > 1):
            return super()._dense_into(out)
        (kernel.parts[0] if type(kernel) is SumOperator else kernel)._dense_into(out)
        out.diagonal(dim1=-2, dim2=-1).add_(diagonal)


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
        held: Any
        if isinstance(factor, Tensor):
            operator._need_like("the factor", factor)
            one = factor.numel() == 1 and factor.ndim <= max(1, len(operator.batch))
            if not one and factor.ndim and tuple(factor.shape) != operator.batch:
                raise ValueError(
                    f"an operator of batch shape {operator.batch} is scaled by a number or by a tensor of that shape; "
                    f"got shape {tuple(factor.shape)} (A @ B is the product of operators)"
                )
            held = Derived(partial(torch.reshape, factor, () if one else factor.shape), (factor,))
        else:
            held = factor if isinstance(factor, Real) else float(factor)
        self._factor = held
        self.shape, self.symmetric = operator.shape, operator.symmetric

    @property
    def factor(self) -> Any:
        """The number, or tensor of one number () or of the batch's shape."""
        return self._factor.value if isinstance(self._factor, Derived) else self._factor

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

    def _dense_into(self, out: Tensor) -> None:
        self.parts[0]._dense_into(out)
        f = self.factor
        out.mul_(f[..., None, None] if isinstance(f, Tensor) else f)


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
