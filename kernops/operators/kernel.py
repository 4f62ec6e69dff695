"""The matrix of a kernel, evaluated where it is needed and never stored."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from numbers import Real
from typing import Any

import torch

from ..formula.graph import CAT_I, CAT_J, var
from ..kernels.constructors import as_kernel
from ..lazy import LazyTensor
from ..lazy.arrays import to_tensor
from ..lazy.frame import Frame, broadcast, merge
from ..lazy.views import source
from .base import LinearOperator
from .derived import Derived
from .entries import at_pairs, at_rows, selected, sum_over_columns

Tensor = torch.Tensor

#: Numbers of columns that a product is computed for: others are filled up, so that few sizes are compiled.
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
#: Numbers that a dense matrix' derivative may need at once.
DENSE_NUMBERS = 1 << 24
#: Numbers of a dense matrix that are computed at once where they are copied into a table: enough to keep a GPU busy,
#: and on a processor few beside the table.
ROWS_NUMBERS = {"cpu": 1 << 20, "other": 1 << 26}
#: Columns of a dense matrix that a processor computes as one product with unit vectors: the kernels' lanes run over
#: columns, so that a sum of one term wastes all but one of them, and more unit vectors are more zeros to add. On a GPU
#: it is the columns' terms, computed once and not for each column, that make it quicker: 20,000 points of 32 dimensions
#: take 12 ms instead of 90, those of 9 a quarter more.
UNITS = 16


class KernelOperator(LinearOperator):
    """The matrix K_ij = k(x_i, y_j) of a kernel, with a diagonal added where it is square; memory O(M + N).

    Args:
        kernel: a kernel of ``kernops.kernels``, a scikit-learn kernel object, the name of a row of
            ``kernops.kernels.KERNELS``, a function of two LazyTensors that returns one, or a LazyTensor of one number a
            pair that has its data already.
        x: points of the rows (*B, M, D), a tensor; None for a LazyTensor.
        y: points of the columns (*B, N, D); None for x itself, which makes the operator symmetric.
        symmetric: whether the matrix is symmetric; None says so where y is None, and for a LazyTensor of as many rows
            as columns that are made of the same tensors.
        backend: ``"auto"``, ``"cuda"``, ``"cpu"`` or ``"tiled"``.
        params: parameters of a kernel that is given by name or as a function.

    Raises:
        TypeError: the points are no tensors of floating-point numbers, or the kernel is none.
        ValueError: shapes, dtypes or devices do not fit, or a parameter of the kernel is out of its range.

    Example:
        >>> from kernops.kernels import RBF, White
        >>> from kernops.operators import KernelOperator
        >>> x = torch.linspace(0, 1, 3, dtype=torch.float64)[:, None]
        >>> K = KernelOperator(2.0 * RBF(length_scale=0.5) + White(0.1), x)
        >>> K @ torch.ones(3, dtype=torch.float64)
        tensor([3.5837, 4.5261, 3.5837], dtype=torch.float64)
    """

    def __init__(
        self,
        kernel: Any,
        x: Tensor | None = None,
        y: Tensor | None = None,
        *,
        symmetric: bool | None = None,
        backend: str | None = None,
        **params: Any,
    ) -> None:
        diagonal: Derived | None = None
        if isinstance(kernel, LazyTensor):
            if x is not None or y is not None or params:
                raise TypeError("a LazyTensor has its points and parameters already; x, y and params must not be given")
            lazy = kernel
            m, n = (1 if k is None else k for k in (lazy.frame.m, lazy.frame.n))
            symmetric = m == n and _same_points(lazy.frame) if symmetric is None else symmetric
        else:
            kernel = as_kernel(kernel, **params)
            x, y = _points("x", x), x if y is None else _points("y", y)
            symmetric = y is x if symmetric is None else symmetric
            m, n = x.shape[-2], y.shape[-2]
            lazy = _with_points(kernel.formula(_rows(x), _columns(y)), x, y)
            if y is x:
                own = kernel.own(_rows(x), _columns(x))
                diagonal = None if own is None else _computed(at_pairs, _with_points(own, x, x), x.shape[-2])
        self._set(lazy, (m, n), diagonal, bool(symmetric))
        if backend is not None:
            self.lazy.backend = backend

    def _set(self, lazy: LazyTensor, size: tuple[int, ...], diagonal: Derived | None, symmetric: bool) -> None:
        m, n = size
        if lazy.is_complex or lazy.formula.dim != 1:
            raise ValueError(f"a kernel must be one real number a pair; got a LazyTensor of shape {lazy.shape}")
        frame = lazy.frame.settled()
        if frame.space is None:
            raise ValueError("the kernel has no data")
        if frame.space.kind != "torch":
            raise TypeError(f"an operator is made of torch tensors; got data of {frame.space.kind}")
        if symmetric and m != n:
            raise ValueError(f"an operator of {m} rows and {n} columns cannot be symmetric")
        self.lazy = LazyTensor(lazy.formula, frame)
        batch = frame.batch
        if diagonal is not None:
            batch = broadcast(batch, tuple(diagonal.value.shape[:-1]), "add_diagonal")
        self.shape = (*batch, m, n)
        self.dtype, self.device = frame.space.dtype, frame.space.device
        self._added = diagonal
        self.symmetric = symmetric

    def _like(
        self, lazy: LazyTensor, size: tuple[int, ...], diagonal: Derived | None, symmetric: bool
    ) -> KernelOperator:  # fmt: skip
        new = object.__new__(KernelOperator)
        new._set(lazy, size, diagonal, symmetric)
        return new

    def _remade(self, lazy: LazyTensor) -> KernelOperator:
        """The same matrix, without what was added, of other data."""
        return self._like(lazy, self.shape[-2:], None, self.symmetric)

    # --- what it is made of ---------------------------------------------------------------------------------------
    @property
    def added(self) -> Any:
        """The diagonal that is added, a tensor (*b, N), or None."""
        return None if self._added is None else self._added.value

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        data = tuple(t for t in self.lazy.frame.tensors if isinstance(t, Tensor))
        added = self.added
        return data if added is None else (*data, added)

    def with_tensors(self, tensors: Sequence[Tensor]) -> KernelOperator:
        left = list(tensors)
        data = tuple(left.pop(0) if isinstance(t, Tensor) else t for t in self.lazy.frame.tensors)
        lazy = LazyTensor(self.lazy.formula, self.lazy.frame.replace(tensors=data))
        return self._like(
            lazy, self.shape[-2:], Derived.diagonal(left[0], self.shape[-1]) if left else None, self.symmetric
        )

    # --- products -------------------------------------------------------------------------------------------------
    def _matmul(self, v: Tensor) -> Tensor:
        out = self._kernel_product(v)
        added = self.added
        return out if added is None else torch.addcmul(out, added[..., None], v)

    def _kernel_product(self, v: Tensor) -> Tensor:
        width = v.shape[-1]
        if 0 in v.shape or 0 in self.shape:
            batch = torch.broadcast_shapes(self.lazy.frame.batch, v.shape[:-2])
            zero = v.new_zeros(*batch, self.shape[-2], width)
            return zero + 0 * v.sum() if v.requires_grad else zero
        outs = []
        for start in range(0, width, WIDTHS[-1]):
            part = v[..., start : start + WIDTHS[-1]]
            own = part.shape[-1]
            full = next(w for w in WIDTHS if w >= own)
            if full > own:
                part = torch.nn.functional.pad(part, (0, full - own))
            outs.append(self._reduced(part)[..., :own])
        return outs[0] if len(outs) == 1 else torch.cat(outs, -1)

    def _reduced(self, v: Tensor) -> Tensor:
        lazy = self.lazy
        if lazy.frame.n is None:  # a kernel of which no variable has columns
            lazy = LazyTensor(lazy.formula, lazy.frame.replace(n=self.shape[-1]))
        return lazy @ v

    def _transposed(self) -> KernelOperator:
        m, n = self.shape[-2:]
        return self._like(self.lazy.T, (n, m), self._added, self.symmetric)

    def _weighted(self, u: Tensor, v: Tensor) -> tuple[LazyTensor, Tensor]:
        """The formula of the product with v, of at most 128 columns, filled up, and u as its cotangent."""
        width = next(w for w in WIDTHS if w >= u.shape[-1])
        u, v = (torch.nn.functional.pad(t, (0, width - t.shape[-1])) for t in (u, v))
        lazy = self.lazy * _columns(v)
        m, n = self.shape[-2:]
        return LazyTensor(lazy.formula, lazy.frame.replace(m=m, n=n)), u

    def _bilinear(self, u: Tensor, v: Tensor, needed: Sequence[bool]) -> list[Tensor | None]:
        from .bilinear import bilinear_gradients

        data = [k for k, t in enumerate(self.lazy.frame.tensors) if isinstance(t, Tensor)]
        wanted = [k for k, need in zip(data, needed) if need]
        with torch.no_grad():
            grads = bilinear_gradients(self, u, v, wanted)
            out = [grads[k] for k in data]
            if self._added is not None:
                by_diagonal = (u * v).sum(-1).sum_to_size(self.added.shape) if needed[-1] else None
                out.append(by_diagonal)
        return out

    # --- entries --------------------------------------------------------------------------------------------------
    def _diagonal(self) -> Tensor:
        out = at_pairs(self.lazy, self.shape[-1])
        return (out if self._added is None else out + self.added).expand(self.shape[:-1])

    def _elements(self, i: Tensor, j: Tensor) -> Tensor:
        out = at_pairs(selected(self.lazy, i, j), len(i))
        if self._added is not None:
            out = out + torch.where(i == j, self.added[..., i], 0.0)
        return out

    def _row(self, index: Tensor) -> Tensor:
        frame = self.lazy.frame
        tensors = tuple(at_rows(t, index) if c == CAT_I else t for t, c in zip(frame.tensors, frame.cats))
        one = LazyTensor(self.lazy.formula, frame.replace(tensors=tensors, m=1)).T
        batch = torch.broadcast_shapes(frame.batch, index.shape)
        out = sum_over_columns(one, self.shape[-1], 1, tuple(batch))[..., 0].expand(*index.shape, self.shape[-1])
        if self._added is not None:
            own = self.added.expand(*index.shape, self.shape[-1]).gather(-1, index[..., None])
            out = out.scatter_add(-1, index[..., None], own)
        return out

    def _columns(self, index: Tensor) -> Tensor:
        return self._entries(torch.arange(self.shape[-2], device=self.device), index)

    def _principal(self, index: Tensor) -> Tensor:
        return self._entries(index, index)

    def _entries(self, rows: Tensor, columns: Tensor) -> Tensor:
        """The elements at these rows and columns, each computed once."""
        out = self._like(selected(self.lazy, rows, columns), (len(rows), len(columns)), None, False).to_dense()
        if self._added is None:
            return out.expand(*self.batch, len(rows), len(columns))
        same = rows[:, None] == columns
        return out + torch.where(same, self.added[..., rows, None], 0.0)

    def _block(self, rows: Tensor, columns: Tensor) -> LinearOperator:
        from .blocks import SelectedOperator
        from .structured import DiagonalOperator

        same = rows.shape == columns.shape and bool(torch.equal(rows, columns))
        lazy = selected(self.lazy, rows, rows if same else columns)
        if self._added is None or same:
            diagonal = (
                None if self._added is None else Derived(partial(_at_rows, self._added, rows), self._added.sources)
            )
            return self._like(lazy, (len(rows), len(columns)), diagonal, self.symmetric and same)
        part = self._like(lazy, (len(rows), len(columns)), None, False)
        return part + SelectedOperator(DiagonalOperator(self.added), rows, columns)

    def to_dense(self) -> Tensor:
        """The matrix as a tensor (*B, M, N), each entry computed once; differentiable."""
        m, n = self.shape[-2:]
        bare = self._like(self.lazy.T, (n, m), None, False)._kernel_dense().mT if m < n else self._kernel_dense()
        return (bare if self._added is None else bare + torch.diag_embed(self.added)).expand(self.shape)

    def _dense_into(self, out: Tensor) -> None:
        if self.batch or out.ndim > 2:
            return super()._dense_into(out)
        n = self.shape[-1]
        numbers = ROWS_NUMBERS.get(self.device.type, ROWS_NUMBERS["other"])
        step = UNITS * max(1, numbers // max(1, UNITS * n))
        for start in range(0, n, step):
            some = slice(start, min(start + step, n))
            out[some] = self._dense_columns(some, units=True).mT
        if self.added is not None:
            out.diagonal().add_(self.added)

    def _kernel_dense(self) -> Tensor:
        """The kernel's matrix; the fewer the columns, the better."""
        m, n = self.shape[-2:]
        frame = self.lazy.frame
        widest = max([1, *(t.shape[-1] for t in frame.tensors if isinstance(t, Tensor) and t.ndim)])
        step = max(1, DENSE_NUMBERS // max(1, m * widest * math.prod(frame.batch)))
        parts = [self._dense_columns(slice(k, min(k + step, n))) for k in range(0, n, step)]
        if not parts:
            parts = [torch.zeros(*frame.batch, m, 0, dtype=self.dtype, device=self.device)]
        return torch.cat(parts, -1) if len(parts) > 1 else parts[0]

    def _dense_columns(self, columns: slice, units: bool = False) -> Tensor:
        """Columns of the kernel's matrix; on a GPU, where it waits for a test, by ``units`` only if asked for."""
        count = columns.stop - columns.start
        if (units or self.device.type == "cpu") and count >= UNITS // 2:
            out = self._sums_of(columns, UNITS)
            if bool(torch.isfinite(out.detach()).all()):  # else an entry may have spoilt its neighbours: 0 · inf
                return out
        return self._sums_of(columns, 1)

    def _sums_of(self, columns: slice, width: int) -> Tensor:
        """Columns of the kernel's matrix: ``width`` at a time are a batch of its own, multiplied by unit vectors."""
        frame, n = self.lazy.frame, columns.stop - columns.start
        blocks = -(-n // width)
        index = torch.arange(columns.start, columns.start + blocks * width, device=self.device)
        index = index.clamp(max=columns.stop - 1)  # the last block is filled up
        tensors = []
        for t, c in zip(frame.tensors, frame.cats):
            if c == CAT_J:
                t = t[..., columns, :] if blocks * width == n else t.index_select(-2, index)
                t = t.reshape(*t.shape[:-2], blocks, width, t.shape[-1])
            elif isinstance(t, Tensor) and t.ndim > (2 if c == CAT_I else 1):
                t = t.unsqueeze(-3 if c == CAT_I else -2)
            tensors.append(t)
        lazy = LazyTensor(self.lazy.formula, frame.replace(tensors=tuple(tensors), n=width))
        if width > 1:
            lazy = lazy * _columns(torch.eye(width, dtype=self.dtype, device=self.device))
        out = sum_over_columns(lazy, self.shape[-2], width, (*frame.batch, blocks))
        out = out.expand(*frame.batch, blocks, self.shape[-2], width).movedim(-3, -2)
        return out.reshape(*frame.batch, self.shape[-2], blocks * width)[..., :n]

    # --- algebra --------------------------------------------------------------------------------------------------
    def _split(self) -> tuple[LinearOperator | None, Tensor | None]:
        if self._added is None:
            return self, None
        return self._like(self.lazy, self.shape[-2:], None, self.symmetric), self.added.expand(self.shape[:-1])

    def add_diagonal(self, diagonal: float | Tensor) -> KernelOperator:
        new = Derived.diagonal(self._diagonal_like(diagonal), self.shape[-1])
        return self._like(self.lazy, self.shape[-2:], new if self._added is None else self._added + new, self.symmetric)

    add_diagonal.__doc__ = LinearOperator.add_diagonal.__doc__

    def __add__(self, other: Any) -> LinearOperator:
        from .structured import DiagonalOperator

        if isinstance(other, DiagonalOperator):
            return self.add_diagonal(other.given)
        if isinstance(other, KernelOperator) and other.shape[-2:] == self.shape[-2:]:  # one pass for both
            added = [d for d in (self._added, other._added) if d is not None]
            diagonal = None if not added else added[0] if len(added) == 1 else added[0] + added[1]
            both = self.symmetric and other.symmetric
            return self._like(self.lazy + other.lazy, self.shape[-2:], diagonal, both)
        return super().__add__(other)

    def __mul__(self, other: Any) -> LinearOperator:
        """Also the elementwise product of two kernels' matrices."""
        if isinstance(other, KernelOperator) and other.shape[-2:] == self.shape[-2:]:
            diagonal = None
            if self._added is not None or other._added is not None:
                diagonal = _computed(_products, self, other)
            both = self.symmetric and other.symmetric
            return self._like(self.lazy * other.lazy, self.shape[-2:], diagonal, both)
        return super().__mul__(other)

    def __rmul__(self, other: Any) -> LinearOperator:
        return self.__mul__(other)


# --- diagonals ----------------------------------------------------------------------------------------------------
def _computed(compute: Callable[..., Tensor], *of: Any) -> Derived:
    """The diagonal ``compute(*of)``, where LazyTensors and operators tell what it is made of."""
    sources: list[Tensor] = []
    for part in of:
        added = part._added if isinstance(part, KernelOperator) else None
        lazy = part.lazy if isinstance(part, KernelOperator) else part
        if isinstance(lazy, LazyTensor):
            sources += [t for t in map(source, lazy.frame.given) if isinstance(t, Tensor)]
        sources += () if added is None else added.sources
    return Derived(partial(compute, *of), sources)


def _products(a: KernelOperator, b: KernelOperator) -> Tensor:
    """What the elementwise product of two matrices has on its diagonal beside the product of the kernels."""
    bare = at_pairs(a.lazy, a.shape[-1]) * at_pairs(b.lazy, a.shape[-1])
    return a._diagonal() * b._diagonal() - bare


def _at_rows(added: Derived, rows: Tensor) -> Tensor:
    return added.value[..., rows]


# --- points -------------------------------------------------------------------------------------------------------
def _points(name: str, x: Any) -> Tensor:
    if isinstance(x, Real) or x is None:
        raise TypeError(f"{name} must be a torch tensor of shape (..., N, D); got {x!r}")
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch tensor; got {type(x).__name__} (torch.from_numpy shares its memory)")
    x, _ = to_tensor(x, name)
    if x.ndim < 2 or x.shape[-1] == 0:
        raise ValueError(f"{name} must have shape (..., N, D) with D >= 1; got {tuple(x.shape)}")
    return x


def _rows(x: Tensor) -> LazyTensor:
    return LazyTensor(var(CAT_I, 0, x.shape[-1]), _frame(x, CAT_I))


def _columns(x: Tensor) -> LazyTensor:
    return LazyTensor(var(CAT_J, 0, x.shape[-1]), _frame(x, CAT_J))


def _frame(x: Tensor, cat: int) -> Frame:
    """Written out, since an array (..., 1, 1, D) of a single point would be taken for a parameter."""
    m, n = (x.shape[-2], None) if cat == CAT_I else (None, x.shape[-2])
    return Frame((x,), (cat,), m, n, tuple(x.shape[:-2]), to_tensor(x, "x")[1])


def _with_points(lazy: LazyTensor, x: Tensor, y: Tensor) -> LazyTensor:
    """``lazy`` with the points among its data, though its formula may not read them."""
    frame = lazy.frame
    for points in (_frame(x, CAT_I), _frame(y, CAT_J)):
        frame, _ = merge(frame, points, "KernelOperator")
    return LazyTensor(lazy.formula, frame)


def _same_points(frame: Frame) -> bool:
    """Whether the rows are made of the tensors that the columns are made of."""
    tensors = frame.tensors  # kept, so that no other tensor gets the identity of one
    of = {cat: {id(t) for t, c in zip(tensors, frame.cats) if c == cat} for cat in (CAT_I, CAT_J)}
    return of[CAT_I] == of[CAT_J]
