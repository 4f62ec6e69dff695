"""The matrix of a kernel's derivatives: covariances of a function's values and derivatives, never stored."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from ..formula.graph import CAT_I, CAT_J, Node, var
from ..formula.jets import applied, check_smooth, components, jet
from ..formula.ops import apply, concat
from ..kernels.constructors import as_kernel
from ..kernels.kernel import Basic, Kernel
from ..lazy import LazyTensor
from ..lazy.frame import merge
from .base import LinearOperator
from .bilinear import bilinear_gradients
from .kernel import KernelOperator, _at, _at_pairs, _columns, _rows, _selected, _sum

Tensor = torch.Tensor

#: Right-hand sides that share one evaluation of the kernel, and most components that they have together: as many as
#: a compiled loop keeps in registers.
WIDTHS, MOST_COMPONENTS = (4, 2, 1), 16


class DerivativesOperator(LinearOperator):
    """The covariances of a function f with kernel k, and of its derivatives, at points x and y; memory O(M + N).

    With P = D + 1, or 2 D + 1 for ``order=2``, row i P + p and column j P + q have L_p L_q k(x_i, y_j), where L_p for
    the first and L_q for the second point is what follows: L_0 is the value, L_1 … L_D are the derivatives by each
    feature, L_(D + 1) … L_2D the second ones, without mixed ones (Rasmussen and Williams, Gaussian Processes for
    Machine Learning, 2006, section 9.4). A product with a vector evaluates the kernel once for a pair of points, and
    costs O(D) for it.

    Args:
        kernel, x, y, symmetric, backend, params: as for ``KernelOperator``: points (*B, M, D) and (*B, N, D). The
            kernel is to be a function of sums over features, such as distances and scalar products, and differentiable
            ``order`` times in each of the points: RBF, rational quadratic, polynomials, Matérn of ν = p + 1/2 above
            ``order`` or of any ν from 4 ``order`` on.
        order: 1 or 2.

    Raises:
        TypeError: as for ``KernelOperator``.
        ValueError: the same, ``order`` is another number, or the kernel is none of those described.

    Example:
        >>> from kernops.kernels import RBF
        >>> from kernops.operators import DerivativesOperator
        >>> x = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
        >>> DerivativesOperator(RBF(), x).to_dense()
        tensor([[ 1.0000,  0.0000,  0.6065,  0.6065],
                [ 0.0000,  1.0000, -0.6065,  0.0000],
                [ 0.6065, -0.6065,  1.0000,  0.0000],
                [ 0.6065,  0.0000,  0.0000,  1.0000]], dtype=torch.float64)
    """

    def __init__(
        self, kernel: Any, x: Tensor | None = None, y: Tensor | None = None, *, order: int = 1, **settings: Any
    ) -> None:
        if order not in (1, 2) or isinstance(order, bool):
            raise ValueError(f"order must be 1 or 2; got {order!r}")
        base = KernelOperator(kernel, x, y, **settings)
        if not isinstance(kernel, LazyTensor):
            params = {k: v for k, v in settings.items() if k not in ("symmetric", "backend")}
            _check_mixtures(as_kernel(kernel, **params), order)
        self._set(base, order)

    def _set(self, base: KernelOperator, order: int) -> None:
        if base.added is not None:
            raise ValueError("noise of single points has no derivatives: leave out White and use add_diagonal")
        points = {c: {t.shape[-1] for t, k in _pairs(base) if k == c} for c in (CAT_I, CAT_J)}
        if len(points[CAT_I] | points[CAT_J]) != 1:
            raise ValueError(f"rows and columns must be points of one number of features; got {points}")
        (self.features,) = points[CAT_I]
        self.base, self.order, self.lazy, self.symmetric = base, order, base.lazy, base.symmetric
        self.dtype, self.device = base.dtype, base.device
        m, n = base.shape[-2:]
        self.shape = (*base.batch, m * self.outputs, n * self.outputs)
        rows, columns = self._variables()
        check_smooth(base.lazy.formula, {*rows, *columns}, order)
        _product(base.lazy.formula, rows, columns, order, 1, 1 << 20)  # which says what has no jet

    @classmethod
    def of(cls, base: KernelOperator, order: int) -> DerivativesOperator:
        """That of a kernel's matrix, which all rows' and columns' variables are points of."""
        new = object.__new__(cls)
        new._set(base, order)
        return new

    @property
    def outputs(self) -> int:
        """P, the number of rows for each point."""
        return components(self.features, self.order)

    def _variables(self) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
        """The variables of the points of rows, and of columns."""
        cats = self.lazy.frame.cats
        rows, columns = (
            tuple(var(c, k, self.features) for k, own in enumerate(cats) if own == c) for c in (CAT_I, CAT_J)
        )
        return rows, columns

    # --- what an operator defines ---------------------------------------------------------------------------------
    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.base.tensors

    def with_tensors(self, tensors: Sequence[Tensor]) -> DerivativesOperator:
        return self.of(self.base.with_tensors(tensors), self.order)

    def _matmul(self, v: Tensor) -> Tensor:
        width, batch = v.shape[-1], torch.broadcast_shapes(self.batch, v.shape[:-2])
        if 0 in v.shape or 0 in self.shape:
            zero = v.new_zeros(*batch, self.shape[-2], width)
            return zero + 0 * v.sum() if v.requires_grad else zero
        lazy = self._weighted_by(v)
        m, n = self.base.shape[-2:]
        return self._unpacked(_sum(lazy, m, n, lazy.frame.batch), width).expand(*batch, -1, -1)

    def _transposed(self) -> DerivativesOperator:
        return self.of(self.base._transposed(), self.order)

    def _diagonal(self) -> Tensor:
        return _at_pairs(self.entries().lazy, self.shape[-1]).expand(self.shape[:-1])

    def to_dense(self) -> Tensor:
        """The matrix as a tensor (*B, M P, N P), each entry computed once; differentiable."""
        return self.entries().to_dense()

    def _row(self, index: Tensor) -> Tensor:
        point, output = index // self.outputs, index % self.outputs
        frame = self.lazy.frame
        tensors = tuple(_at(t, point) if c == CAT_I else t for t, c in zip(frame.tensors, frame.cats))
        batch = tuple(torch.broadcast_shapes(frame.batch, index.shape))
        lazy = LazyTensor(self.lazy.formula, frame.replace(tensors=tensors, m=1, batch=batch)).T
        row = self.of(KernelOperator(lazy, symmetric=False), self.order)
        return row._matmul(self._unit_vectors(output)[..., None])[..., 0]

    def _elements(self, i: Tensor, j: Tensor) -> Tensor:
        return _at_pairs(self.entries(i, j).lazy, len(i))

    def _columns(self, index: Tensor) -> Tensor:
        return self.entries(None, index).to_dense().expand(*self.batch, -1, -1)

    def _principal(self, index: Tensor) -> Tensor:
        return self.entries(index, index).to_dense().expand(*self.batch, -1, -1)

    def _block(self, rows: Tensor, columns: Tensor) -> LinearOperator:
        same = rows.shape == columns.shape and bool(torch.equal(rows, columns))
        return self.entries(rows, rows if same else columns)

    def _bilinear(self, u: Tensor, v: Tensor, needed: Sequence[bool]) -> list[Tensor | None]:
        data = [k for k, t in enumerate(self.lazy.frame.tensors) if isinstance(t, Tensor)]
        with torch.no_grad():
            grads = bilinear_gradients(self, u, v, [k for k, need in zip(data, needed) if need])
        return [grads[k] for k in data]

    def __add__(self, other: Any) -> LinearOperator:
        if isinstance(other, DerivativesOperator) and self.is_like(other):  # one pass for both
            return self.of(self.base + other.base, self.order)  # type: ignore[arg-type]
        return super().__add__(other)

    def is_like(self, other: DerivativesOperator) -> bool:
        """Whether the sum with another is one pass."""
        return (self.order, self.features, self.shape[-2:]) == (other.order, other.features, other.shape[-2:])

    # --- entries --------------------------------------------------------------------------------------------------
    def entries(self, rows: Tensor | None = None, columns: Tensor | None = None) -> KernelOperator:
        """Some rows and columns as a kernel's matrix, whose points are a point and a unit vector of P components.

        Each pair of rows evaluates the kernel by itself: products with this one take P² times as many evaluations.

        Args:
            rows, columns: numbers (S,); ``None`` for all. The matrix is symmetric if both are the same tensor and this
                one is.
        """
        same = self.symmetric and rows is columns
        rows = torch.arange(self.shape[-2], device=self.device) if rows is None else rows
        columns = rows if same else torch.arange(self.shape[-1], device=self.device) if columns is None else columns
        of_rows = rows // self.outputs
        points = _selected(self.lazy, of_rows, of_rows if same else columns // self.outputs)
        left = self._unit_vectors(rows % self.outputs)
        right = left if same else self._unit_vectors(columns % self.outputs)
        frame, a = merge(points.frame, _rows(left).frame, "DerivativesOperator")
        frame, b = merge(frame, _columns(right).frame, "DerivativesOperator")
        assert a is not None and b is not None
        formula = _entry(self.lazy.formula, *self._variables(), self.order, a[0], b[0])
        return KernelOperator(LazyTensor(formula, frame), symmetric=same)

    def _unit_vectors(self, outputs: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(outputs, self.outputs).to(self.dtype)

    def _remade(self, lazy: LazyTensor) -> DerivativesOperator:
        return self.of(self.base._remade(lazy), self.order)

    # --- right-hand sides -----------------------------------------------------------------------------------------
    def _weighted(self, u: Tensor, v: Tensor) -> tuple[LazyTensor, Tensor]:
        """The formula of the product with v, and u as its cotangent."""
        return self._weighted_by(v), self._packed(u, self.base.shape[-2])

    def _weighted_by(self, v: Tensor) -> LazyTensor:
        v = self._packed(v, self.base.shape[-1])
        frame, number = merge(self.lazy.frame, _columns(v).frame, "DerivativesOperator")
        assert number is not None
        width = v.shape[-1] // self.outputs
        formula = _product(self.lazy.formula, *self._variables(), self.order, width, number[0])
        return LazyTensor(formula, frame.replace(m=self.base.shape[-2], n=self.base.shape[-1]))

    def _packed(self, v: Tensor, points: int) -> Tensor:
        """Right-hand sides (*B, points P, E) as vectors of points: (*B, points, E P), or (G, *B, points, W P) of groups
        of W."""
        count = v.shape[-1]
        width = next(w for w in WIDTHS if w == 1 or w * self.outputs <= MOST_COMPONENTS and w < 2 * count)
        groups = -(-count // width)
        v = torch.nn.functional.pad(v, (0, groups * width - count))
        v = v.reshape(*[1] * (len(self.batch) + 2 - v.ndim), *v.shape)  # so that groups are an axis before all others
        v = v.unflatten(-1, (groups, width)).unflatten(-3, (points, self.outputs))
        v = v.movedim(-2, 0).mT.flatten(-2)
        return v[0] if groups == 1 else v

    def _unpacked(self, out: Tensor, count: int) -> Tensor:
        """The inverse of that."""
        out = out.unflatten(-1, (-1, self.outputs)).mT.flatten(-3, -2)
        groups = -(-count // out.shape[-1])
        if groups > 1:
            out = out.movedim(0, -2).flatten(-2)
        return out[..., :count]


def _check_mixtures(kernel: Kernel, order: int) -> None:
    """Raise ``ValueError`` for a Matérn kernel that is a sum of Gaussians, whose narrowest, which it leaves out, would
    matter: they have a share of 1e-10^(1 - order/ν) of the derivatives' variance."""
    for part in (getattr(kernel, name, None) for name in ("a", "b", "kernel")):
        if isinstance(part, Kernel):
            _check_mixtures(part, order)
    nu: Any = kernel.params.get("nu", 0.5) if isinstance(kernel, Basic) else 0.5
    if nu % 1 != 0.5 and nu < 4 * order:
        raise ValueError(
            f"derivatives of order {order} need Matérn's nu = {order + 0.5}, {order + 1.5} or the like, or nu >= "
            f"{4 * order}; got nu = {nu}"
        )


def _pairs(operator: KernelOperator) -> list[tuple[Tensor, int]]:
    frame = operator.lazy.frame
    return list(zip(frame.tensors, frame.cats))


@lru_cache(maxsize=1024)
def _product(f: Node, rows: tuple[Node, ...], columns: tuple[Node, ...], order: int, width: int, number: int) -> Node:
    """The jets of Σ_q v_q L_q f for each of ``width`` vectors v, which are variable ``number`` of the columns."""
    p = components(rows[0].dim, order)
    v = var(CAT_J, number, width * p)
    each = (apply("Extract", v, params=(k * p, p)) for k in range(width))
    return concat(*(jet(applied(f, columns, one, order), rows, order) for one in each))


@lru_cache(maxsize=1024)
def _entry(f: Node, rows: tuple[Node, ...], columns: tuple[Node, ...], order: int, a: int, b: int) -> Node:
    """Σ_pq a_p b_q L_p L_q f of variables a of the rows and b of the columns."""
    p = components(rows[0].dim, order)
    inner = applied(f, columns, var(CAT_J, b, p), order)
    return applied(inner, rows, var(CAT_I, a, p), order)
