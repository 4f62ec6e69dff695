"""What every operator can do: algebra, products and indices; its linear algebra is in ``methods``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch

from ..backends.layout import broadcast
from ..solvers.implicit import pull_back
from .indices import numbers, read
from .methods import LinearAlgebra

Tensor = torch.Tensor


class LinearOperator(LinearAlgebra, ABC):
    """A matrix (*B, M, N) that is known by its products, and by what it is made of.

    Operators are immutable, and differentiable in the tensors that they were made of. ``+``, ``-``, ``*`` (with a
    number, a tensor of one, or of the batch's shape) and ``@`` give operators again; ``A @ v`` and ``A.matmul(v)`` for
    a tensor v give a tensor.

    Attributes:
        shape: (*B, M, N).
        dtype, device: of the tensors.
        symmetric: whether the matrix is known to be symmetric: what ``solve``, ``logdet`` and the like need.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    symmetric: bool
    __array_ufunc__ = None  # else NumPy's numbers would make an array of what they are multiplied with

    # --- what a class of operators defines ------------------------------------------------------------------------
    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """What the operator is made of, and can be differentiated by."""

    @abstractmethod
    def with_tensors(self, tensors: Sequence[Tensor]) -> LinearOperator:
        """The same operator of other tensors, of the same shapes."""

    @abstractmethod
    def _matmul(self, v: Tensor) -> Tensor:
        """The product with v (*B', N, E), whose batch shape broadcasts with ours."""

    @abstractmethod
    def _transposed(self) -> LinearOperator: ...

    @abstractmethod
    def _diagonal(self) -> Tensor:
        """The diagonal (*B, N) of a square matrix."""

    @abstractmethod
    def to_dense(self) -> Tensor:
        """The matrix as a tensor (*B, M, N)."""

    def _row(self, index: Tensor) -> Tensor:
        """Row ``index`` of each symmetric matrix, (*B', N) for an index (*B',) to whose shape B broadcasts."""
        one = torch.zeros(*index.shape, self.shape[-1], dtype=self.dtype, device=self.device)
        return self._matmul(one.scatter_(-1, index[..., None], 1.0)[..., None])[..., 0]

    def _split(self) -> tuple[LinearOperator | None, Tensor | None]:
        """A positive semi-definite part and a diagonal (*B, N), whose sum the operator is."""
        return self, None

    def _elements(self, i: Tensor, j: Tensor) -> Tensor:
        """The elements at rows ``i`` and columns ``j``, (S,) each: (*B, S)."""
        one = torch.zeros(self.shape[-1], len(j), dtype=self.dtype, device=self.device)
        one[j, torch.arange(len(j), device=self.device)] = 1.0
        columns = self._matmul(one)
        return columns.gather(-2, i.expand(*columns.shape[:-2], 1, len(i)))[..., 0, :]

    def _columns(self, index: Tensor) -> Tensor:
        """The columns (*B, M, S) of numbers (S,): by rows where these are known without a product."""
        if self.symmetric and type(self)._row is not LinearOperator._row:
            each = index.reshape(-1, *[1] * len(self.batch)).expand(-1, *self.batch)
            return self._row(each).movedim(0, -1)
        one = torch.zeros(self.shape[-1], len(index), dtype=self.dtype, device=self.device)
        return self._matmul(one.scatter_(0, index[None], 1.0)).expand(*self.shape[:-1], len(index))

    def _principal(self, index: Tensor) -> Tensor:
        """The elements (*B, S, S) at these rows and columns, of numbers (S,)."""
        return self._columns(index).index_select(-2, index)

    def _dense_into(self, out: Tensor) -> None:
        """Write the symmetric matrix into ``out`` (*B, N, N), of which nothing is differentiated.

        Classes that need no second table for it say so.
        """
        out.copy_(self.to_dense())

    def _block(self, rows: Tensor, columns: Tensor) -> LinearOperator:
        """The rows and columns of these numbers."""
        from .blocks import SelectedOperator

        return SelectedOperator(self, rows, columns)

    def _bilinear(self, u: Tensor, v: Tensor, needed: Sequence[bool]) -> list[Tensor | None]:
        """The gradient of Σ uᵀ A v, over the columns of u and v, by each of ``tensors`` where it is ``needed``.

        Not to be differentiated. Classes that know it without the product A v say so.
        """

        def product(tensors: Sequence[Any], v: Tensor) -> tuple[Tensor]:
            return (self.with_tensors(tensors)._matmul(v),)

        return pull_back(product, self.tensors, v, (u,), needed)

    # --- what follows from that -----------------------------------------------------------------------------------
    @property
    def batch(self) -> tuple[int, ...]:
        """The batch shape *B."""
        return self.shape[:-2]

    @property
    def T(self) -> LinearOperator:
        """The transposed operator."""
        return self if self.symmetric else self._transposed()

    mT = T

    def matmul(self, v: Tensor) -> Tensor:
        """The product with a vector (N,), or with vectors (..., N, E): (..., M) or (..., M, E).

        Raises:
            TypeError: v is no tensor.
            ValueError: v has another number of rows, dtype or device than the operator has columns, dtype and device.
        """
        v, vector = self._vectors("v", v, self.shape[-1])
        out = self._matmul(v)
        return out[..., 0] if vector else out

    def rmatmul(self, v: Tensor) -> Tensor:
        """The transposed product: ``A.T @ v`` for v (M,) or (..., M, E)."""
        return self.T.matmul(v)

    def __matmul__(self, other: Any) -> Any:
        if isinstance(other, LinearOperator):
            from .structured import ProductOperator

            return ProductOperator(self, other)
        return self.matmul(other)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """``v @ A`` and ``2 * A`` of tensors."""
        name = getattr(func, "__name__", "").strip("_")
        if len(args) == 2 and isinstance(args[1], cls) and not isinstance(args[0], cls):
            v, operator = args
            if name in ("matmul", "rmatmul"):
                out = operator.T.matmul(v if v.ndim == 1 else v.mT)
                return out if v.ndim == 1 else out.mT
            if name in ("mul", "rmul"):
                return operator * v
        raise TypeError(f"torch.{name} does not take an operator; use its methods, or to_dense()")

    def diagonal(self) -> Tensor:
        """The diagonal, (*B, N)."""
        self._need_square("diagonal")
        return self._diagonal()

    def trace(self) -> Tensor:
        """The sum of the diagonal, (*B,): exact, in O(N)."""
        self._need_square("trace")
        return self._diagonal().sum(-1)

    def __mul__(self, other: Any) -> LinearOperator:
        from .structured import ScaledOperator

        if isinstance(other, (Real, Tensor)) and not isinstance(other, bool):
            return ScaledOperator(self, other)  # type: ignore[arg-type]
        return NotImplemented

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> LinearOperator:
        return self * (1.0 / other)

    def __neg__(self) -> LinearOperator:
        return self * -1.0

    def __add__(self, other: Any) -> LinearOperator:
        from .structured import SumOperator

        if isinstance(other, LinearOperator):
            return SumOperator(self, other)
        if isinstance(other, Real):
            raise TypeError("a number cannot be added to an operator: add_diagonal(number), or a Constant kernel")
        return NotImplemented

    def __radd__(self, other: Any) -> LinearOperator:
        """``sum`` of operators begins with 0."""
        return self if isinstance(other, Real) and other == 0 else self + other

    def __sub__(self, other: Any) -> LinearOperator:
        return self + (-other)

    def add_diagonal(self, diagonal: float | Tensor) -> LinearOperator:
        """A + D.

        Args:
            diagonal: a number or a tensor of one, for D = diagonal · I; or a tensor (*B, N), or (*B, 1) for a number
                that each matrix of a batch has for itself.

        Raises:
            ValueError: the operator is not square, or the diagonal does not fit.
        """
        from .structured import DiagonalOperator

        return self + DiagonalOperator._of(self._diagonal_like(diagonal), self.shape[-1])

    def _diagonal_like(self, diagonal: float | Tensor) -> Tensor:
        """A tensor of one number, of (*B, 1) or of (*B, N)."""
        self._need_square("add_diagonal")
        if isinstance(diagonal, Real) and not isinstance(diagonal, bool):
            diagonal = torch.tensor(float(diagonal), dtype=self.dtype, device=self.device)
        if not isinstance(diagonal, Tensor):
            raise TypeError(f"diagonal must be a number or a tensor; got {type(diagonal).__name__}")
        self._need_like("diagonal", diagonal)
        n = self.shape[-1]
        if diagonal.ndim and diagonal.shape[-1] not in (1, n):
            raise ValueError(f"diagonal must be a number or have shape (..., {n}); got {tuple(diagonal.shape)}")
        return diagonal

    # --- indexing -------------------------------------------------------------------------------------------------
    def __getitem__(self, key: Any) -> Any:
        """Rows and columns, ``A[rows, columns]``, also ``A[..., rows, columns]``; the batch axes stay.

        A slice, or numbers beside a slice (a tensor, an array or a list, or a mask), keeps its axis: an operator. One
        number takes one row or column: a tensor. Two tensors of numbers (S,) are elements, (*B, S), as with tensors.
        """
        sizes = self.shape[-2:]
        rows, columns = (read(k, size, self.device) for k, size in zip(self._key(key), sizes))
        if isinstance(rows, Tensor) and isinstance(columns, Tensor):
            if rows.shape != columns.shape:
                raise ValueError(f"two lists of indices must have one shape; got {(len(rows),)}, {(len(columns),)}")
            return self._elements(rows, columns)
        if rows == slice(None) and columns == slice(None):
            return self
        i, j = (numbers(k, size, self.device) for k, size in zip((rows, columns), sizes))
        one_row, one_column = (isinstance(k, int) for k in (rows, columns))
        if one_row and one_column:
            return self._elements(i, j)[..., 0]
        block = self._block(i, j)
        if one_row or one_column:
            return block.to_dense().squeeze(-2 if one_row else -1)
        return block

    def _key(self, key: Any) -> tuple[Any, Any]:
        key = key if isinstance(key, tuple) else (key,)
        lead = len(self.batch)
        if key and key[0] is Ellipsis:
            key = key[1:]
        elif lead:
            if len(key) < lead or any(not (isinstance(k, slice) and k == slice(None)) for k in key[:lead]):
                raise ValueError(f"an operator of batch shape {self.batch} is indexed as A[..., rows, columns]")
            key = key[lead:]
        if len(key) > 2:
            raise ValueError(f"an operator has rows and columns; got {len(key)} indices")
        rows, columns = [*key, slice(None), slice(None)][:2]
        return rows, columns

    # --- checks ---------------------------------------------------------------------------------------------------
    def _vectors(self, name: str, v: Any, rows: int) -> tuple[Tensor, bool]:
        """An argument as vectors (..., rows, E), and whether it was a single vector."""
        if not isinstance(v, Tensor):
            raise TypeError(
                f"{name} must be a torch tensor; got {type(v).__name__} (kernops.scipy.aslinearoperator takes arrays)"
            )
        self._need_like(name, v)
        vector = v.ndim == 1
        if v.ndim == 0 or v.shape[-1 if vector else -2] != rows:
            raise ValueError(f"{name} must have shape ({rows},) or (..., {rows}, E); got {tuple(v.shape)}")
        try:
            broadcast([self.batch, tuple(v.shape[:-2])])
        except ValueError:
            raise ValueError(
                f"{name}: batch shapes {self.batch} of the operator and {tuple(v.shape[:-2])} do not broadcast"
            ) from None
        return v[:, None] if vector else v, vector

    def _need_like(self, name: str, t: Tensor) -> None:
        if t.dtype != self.dtype:
            raise ValueError(f"{name} must have the operator's dtype {self.dtype}; got {t.dtype}")
        if t.device != self.device:
            raise ValueError(f"{name} must be on the operator's device {self.device}; got {t.device}")

    def _need_square(self, what: str) -> None:
        if self.shape[-1] != self.shape[-2]:
            raise ValueError(f"{what} needs a square operator; this one has shape {self.shape}")

    def _need_symmetric(self, what: str) -> None:
        self._need_square(what)
        if not self.symmetric:
            raise ValueError(
                f"{what} needs an operator that is known to be symmetric, such as KernelOperator(kernel, x) of points "
                "with themselves"
            )

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{type(self).__name__} of shape {self.shape}, {dtype}, {self.device}"

    def __len__(self) -> int:
        return self.shape[0]

    __iter__ = None  # else Python would try A[0], A[1], ...
