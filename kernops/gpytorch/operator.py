"""The matrix of a kernel as a ``linear_operator.LinearOperator``."""

from __future__ import annotations

import operator as python
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from numbers import Real
from typing import Any

import torch
from linear_operator import LinearOperator
from linear_operator.operators import DenseLinearOperator, DiagLinearOperator, RootLinearOperator, SumLinearOperator

from ..formula.graph import CAT_I, CAT_J
from ..kernels.kernel import as_parameter
from ..operators import DerivativesOperator, KernelOperator
from ..operators.bilinear import bilinear_gradients, entries
from .layout import OWN_AXES, Layout

Tensor = torch.Tensor
Index = Any  # a slice, a tensor of numbers, or a number for a batch axis

#: Matrices of a batch that a sum over it makes one formula of; more are multiplied one by one and added.
MOST_SUMMED = 8


class KernopsLinearOperator(LinearOperator):
    """The matrix of a kernel (*B, M, N) that GPyTorch and linear_operator compute with; memory O(M + N).

    Products with right-hand sides of any width are one pass over the pairs for 128 columns, and the gradient of a
    bilinear form, from which linear_operator makes all others, is another: by points, train and test, and by
    parameters. Sums and elementwise products of such operators, and products with numbers, are operators of one
    formula again. Nothing is stored, except where linear_operator asks for the dense matrix: where it takes Cholesky's
    decomposition, up to ``linear_operator.settings.max_cholesky_size`` rows.

    Kernels make them; ``as_linear_operator`` makes one of a ``kernops.operators.KernelOperator``.

    Args:
        tensors: points (*B, M, D) and (*B, N, D), and parameters (*B, D).
        layout: what is computed with them.

    Attributes:
        operator: the same matrix as a ``KernelOperator``, with kernops' own solvers.

    Example:
        >>> from kernops.gpytorch import RBFKernel
        >>> K = RBFKernel()(torch.zeros(3, 2), torch.ones(4, 2)).evaluate_kernel()
        >>> K @ torch.ones(4, 1) / 4 - K[0, 0]
        tensor([[0.],
                [0.],
                [0.]], grad_fn=<SubBackward0>)
    """

    def __init__(self, *tensors: Tensor, layout: Layout) -> None:
        super().__init__(*tensors, layout=layout)
        self.layout = layout
        self._memo: KernelOperator | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_memo": None}

    @classmethod
    def of(cls, operator: Any) -> KernopsLinearOperator:
        """That of a ``KernelOperator`` without an added diagonal."""
        layout, tensors = Layout.split(operator)
        new = cls(*tensors, layout=layout)
        new._memo = operator
        return new

    @property
    def operator(self) -> KernelOperator:
        """The same matrix as a ``KernelOperator``."""
        if self._memo is None:
            self._memo = self.layout.join(self._args)  # type: ignore[arg-type]
        return self._memo

    # --- what linear_operator asks for ------------------------------------------------------------------------------
    def _size(self) -> torch.Size:
        return torch.Size(self.operator.shape)

    def _matmul(self, rhs: Tensor) -> Tensor:
        return self.operator.matmul(rhs)

    def _t_matmul(self, rhs: Any) -> Any:
        return self.operator.T.matmul(rhs) if isinstance(rhs, Tensor) else super()._t_matmul(rhs)

    def _transpose_nonbatch(self) -> KernopsLinearOperator:
        return self if self.layout.symmetric else self.of(self.operator.T)

    def _diagonal(self) -> Tensor:
        return self.operator.diagonal()

    def to_dense(self) -> Tensor:
        """The matrix as a tensor (*B, M, N); differentiable."""
        return self.operator.to_dense()

    def evaluate_kernel(self) -> KernopsLinearOperator:
        """Itself: nothing is left to evaluate."""
        return self

    def _bilinear_derivative(self, left_vecs: Tensor, right_vecs: Tensor) -> tuple[Tensor | None, ...]:
        tensors: tuple[Tensor, ...] = self._args  # type: ignore[assignment]
        needed = [t.requires_grad for t in tensors]
        grads: list[Tensor | None] = [None] * len(tensors)
        if not any(needed):
            return tuple(grads)
        if left_vecs.ndim == 1:
            left_vecs, right_vecs = left_vecs[:, None], right_vecs[:, None]
        if torch.is_grad_enabled():  # autograd's ``create_graph``: these gradients are to be differentiated themselves
            return differentiable_derivative(self, left_vecs, right_vecs)
        sources = self.layout.sources
        wanted = [k for k, s in enumerate(sources) if isinstance(s, int) and needed[s]]
        with torch.no_grad():
            for s, g in zip(sources, bilinear_gradients(self.operator, left_vecs, right_vecs, wanted)):
                if g is not None:
                    assert isinstance(s, int)
                    grads[s] = g if grads[s] is None else grads[s] + g  # type: ignore[operator]
        return tuple(grads)

    # --- indices ----------------------------------------------------------------------------------------------------
    def _getitem(self, row_index: Index, col_index: Index, *batch_indices: Index) -> KernopsLinearOperator:
        operator, shape = self.operator, self.batch_shape
        made: dict[tuple[int, int], Tensor] = {}
        indices = {CAT_I: row_index, CAT_J: col_index}
        same = equal(row_index, col_index)

        def pick(t: Any, cat: int) -> Any:
            if not isinstance(t, Tensor):
                return t
            which = CAT_I if cat == CAT_J and same else cat
            key = (id(t), which)  # what rows and columns share, they still share
            if key not in made:
                t = _batch_indexed(t, OWN_AXES[cat], shape, batch_indices)
                index = indices.get(which, slice(None))
                made[key] = t if is_all(index) else t[..., index, :]
            return made[key]

        frame = operator.lazy.frame
        values = [pick(t, c) for t, c in zip(frame.tensors, frame.cats)]
        return self._replaced(values, self.layout.symmetric and same)

    def _get_indices(self, row_index: Tensor, col_index: Tensor, *batch_indices: Tensor) -> Tensor:
        return entries(self.operator, row_index, col_index, batch_indices)

    def _replaced(self, values: Sequence[Any], symmetric: bool) -> KernopsLinearOperator:
        """The same formula of other values of its variables."""
        old = self.layout
        tensors: list[Tensor] = []
        sources: list[Any] = []
        for t in values:
            if isinstance(t, Tensor) and not any(t is mine for mine in tensors):
                tensors.append(t)
            sources.append(next(k for k, mine in enumerate(tensors) if mine is t) if isinstance(t, Tensor) else t)
        return type(self)(*tensors, layout=replace(old, sources=tuple(sources), symmetric=symmetric))

    # --- batch axes -------------------------------------------------------------------------------------------------
    def _mapped(self, change: Callable[[Tensor, int], Tensor]) -> KernopsLinearOperator:
        """The same layout with ``change(tensor, axes after its batch axes)`` of each tensor."""
        own = self.layout.owns()
        return type(self)(*(change(t, own[k]) for k, t in enumerate(self._args)), layout=self.layout)  # type: ignore[arg-type]

    def _expand_batch(self, batch_shape: Any) -> KernopsLinearOperator:
        shape = torch.Size(batch_shape)
        if shape == self.batch_shape:
            return self
        # One tensor carries the batch, the smallest: the others broadcast as they are.
        own = self.layout.owns()
        smallest = min(own, key=lambda k: self._args[k].numel())  # type: ignore[union-attr]
        args = list(self._args)
        t: Tensor = args[smallest]  # type: ignore[assignment]
        args[smallest] = t.expand(*shape, *t.shape[t.ndim - own[smallest] :])
        return type(self)(*args, layout=self.layout)  # type: ignore[arg-type]

    def _unsqueeze_batch(self, dim: int) -> KernopsLinearOperator:
        lead = len(self.batch_shape)

        def change(t: Tensor, own: int) -> Tensor:
            place = dim - (lead - (t.ndim - own))
            return t.unsqueeze(place) if place > 0 or (place == 0 and t.ndim - own == lead) else t

        return self._mapped(change)

    def _permute_batch(self, *dims: int) -> KernopsLinearOperator:
        lead = len(dims)

        def change(t: Tensor, own: int) -> Tensor:
            t = t.reshape(*[1] * (lead + own - t.ndim), *t.shape)
            return t.permute(*dims, *range(lead, lead + own))

        return self._mapped(change)

    def _along(self, dim: int) -> list[KernopsLinearOperator]:
        """The operators of a batch along one of its axes."""
        every: list[Index] = [slice(None)] * len(self.batch_shape)
        return [
            self._getitem(slice(None), slice(None), *every[:dim], k, *every[dim + 1 :])
            for k in range(self.batch_shape[dim])
        ]

    def _prod_batch(self, dim: int) -> Any:
        return reduce(python.mul, self._along(dim))

    def _sum_batch(self, dim: int) -> Any:
        if self.batch_shape[dim] > MOST_SUMMED:
            return super()._sum_batch(dim)
        return reduce(python.add, self._along(dim))

    # --- algebra ----------------------------------------------------------------------------------------------------
    def mul(self, other: Any) -> Any:
        """The product with a number, with a tensor of one for each matrix, or elementwise with another matrix."""
        if isinstance(other, Real) and not isinstance(other, bool):
            return self._scaled(float(other))
        if isinstance(other, Tensor) and (other.numel() == 1 or other.shape[-2:] == (1, 1)):
            factor = other.reshape(()) if other.numel() == 1 else other[..., 0, 0]
            return self._scaled(factor)
        return super().mul(other)

    def _mul_constant(self, other: Any) -> KernopsLinearOperator:
        return self._scaled(other)

    def _scaled(self, factor: float | Tensor) -> KernopsLinearOperator:
        operator = self.operator
        if isinstance(factor, Tensor):
            if factor.ndim == 0:
                factor = factor.to(operator.dtype)  # as torch's own operations take a tensor of one number
            else:
                operator._need_like("the factor", factor)
            factor = factor[..., None]
        lazy = operator.lazy * as_parameter(factor, operator.lazy, 1)
        return self.of(operator._remade(lazy))

    def one_formula(self) -> KernopsLinearOperator:
        """The same matrix as a formula of each row and each column."""
        return self

    def _mul_matrix(self, other: Any) -> Any:
        other = other.evaluate_kernel()
        if isinstance(other, DiagLinearOperator):
            return DiagLinearOperator(self._diagonal() * other._diagonal())
        mine = as_ours(other)
        if mine is None:  # exact, where linear_operator would take approximations of both by low rank
            return DenseLinearOperator(self.to_dense() * other.to_dense())
        return self.of(self.operator * mine.operator)

    def __add__(self, other: Any) -> Any:
        if self._is_like(other):
            return self.of(self.operator + other.operator)
        if isinstance(other, RootLinearOperator):  # without the decompositions of ``add_low_rank``
            return SumLinearOperator(self, other)
        return super().__add__(other)

    def _is_like(self, other: Any) -> bool:
        """Whether the sum with another is one formula."""
        return type(other) is type(self) and other.matrix_shape == self.matrix_shape


def differentiable_derivative(matrix: LinearOperator, left: Tensor, right: Tensor) -> tuple[Tensor | None, ...]:
    """The gradient of Σ leftᵀ A right by what A is represented by, as a function of that and of both vectors."""
    # By names of their own: ``left`` and ``right`` may be made of the same tensors, and are held fixed here.
    own = [t.view_as(t) for t in matrix.representation()]
    wanted = [t for t in own if t.requires_grad]
    value = (left * matrix.representation_tree()(*own)._matmul(right)).sum()
    found = iter(torch.autograd.grad(value, wanted, create_graph=True, allow_unused=True))
    return tuple(next(found) if t.requires_grad else None for t in own)


def as_ours(matrix: Any) -> KernopsLinearOperator | None:
    """A matrix of linear_operator as one formula, if it can be one."""
    from .factors import low_rank

    if isinstance(matrix, KernopsLinearOperator):
        return matrix.one_formula()
    if type(matrix) is SumLinearOperator:
        parts = [as_ours(m.evaluate_kernel()) for m in matrix.linear_ops]
        return None if any(p is None for p in parts) else reduce(python.add, parts)
    factors = low_rank(matrix)
    return None if factors is None else KernopsLinearOperator.of(KernelOperator("linear", *factors))


def as_linear_operator(operator: KernelOperator | DerivativesOperator) -> LinearOperator:
    """A matrix of ``kernops.operators`` for linear_operator, with its added diagonal.

    Args:
        operator: of any kernel, also of a scikit-learn kernel or of a formula.

    Raises:
        TypeError: it is no ``KernelOperator`` and no ``DerivativesOperator``.

    Example:
        >>> from kernops.kernels import RBF, White
        >>> from kernops.operators import KernelOperator
        >>> as_linear_operator(KernelOperator(RBF() + White(0.1), torch.zeros(2, 1))).to_dense()
        tensor([[1.1000, 1.0000],
                [1.0000, 1.1000]])
    """
    if isinstance(operator, DerivativesOperator):
        from .derivatives import DerivativesLinearOperator

        return DerivativesLinearOperator.of(operator)
    if not isinstance(operator, KernelOperator):
        raise TypeError(f"operator must be a KernelOperator; got {type(operator).__name__}")
    kernel, diagonal = operator._split()
    out = KernopsLinearOperator.of(kernel)
    return out if diagonal is None else out.add_diagonal(diagonal)


def is_all(index: Index) -> bool:
    return isinstance(index, slice) and index == slice(None)


def equal(a: Index, b: Index) -> bool:
    """Whether two indices are known to be equal, without a look at numbers on a GPU."""
    return a is b or (isinstance(a, slice) and isinstance(b, slice) and a == b)


def _batch_indexed(t: Tensor, own: int, shape: Sequence[int], index: Sequence[Index]) -> Tensor:
    if t.ndim == own or all(map(is_all, index)):
        return t
    t = t.expand(*shape, *t.shape[t.ndim - own :])
    return t[(*index, *[slice(None)] * own)]
