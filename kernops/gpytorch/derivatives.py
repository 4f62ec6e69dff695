"""GPyTorch's kernels of derivatives: the covariances of a function and of its derivatives, for observations of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gpytorch
import torch

from ..operators import DerivativesOperator
from ..operators.bilinear import entries
from .base import KernopsKernel
from .kernels import MaternKernel, PolynomialKernel, RBFKernel
from .layout import Layout
from .operator import Index, KernopsLinearOperator, equal, is_all

Tensor = torch.Tensor


@dataclass(frozen=True)
class DerivativesLayout(Layout):
    """A formula whose derivatives make the matrix, and which tensor each of its variables is.

    Attributes:
        order: of the derivatives, 1 or 2.
    """

    order: int = 1

    def join(self, tensors: Sequence[Tensor]) -> DerivativesOperator:  # type: ignore[override]
        return DerivativesOperator.of(super().join(tensors), self.order)


class DerivativesLinearOperator(KernopsLinearOperator):
    """The matrix of a kernel of derivatives (*B, M P, N P), which is never stored; P rows for each point.

    Products, sums with others of its kind and multiples evaluate the kernel once for a pair of points. Parts that are
    whole points are of this kind again; others, and elementwise products, are ``KernopsLinearOperator`` of points and
    unit vectors of P components, which evaluate it for each pair of rows.

    Attributes:
        operator: the same matrix as a ``kernops.operators.DerivativesOperator``, with kernops' own solvers.
    """

    @classmethod
    def of(cls, operator: Any) -> DerivativesLinearOperator:
        """That of a ``DerivativesOperator``."""
        plain, tensors = Layout.split(operator.base)
        new = cls(*tensors, layout=DerivativesLayout(**vars(plain), order=operator.order))
        new._memo = operator
        return new

    def one_formula(self) -> KernopsLinearOperator:
        return KernopsLinearOperator.of(self._derivatives.entries())

    @property
    def _derivatives(self) -> DerivativesOperator:
        return self.operator  # type: ignore[return-value]

    def _getitem(self, row_index: Index, col_index: Index, *batch_indices: Index) -> KernopsLinearOperator:
        size = self._derivatives.outputs
        rows, columns = (_whole_points(index, size, n) for index, n in zip((row_index, col_index), self.matrix_shape))
        if rows is not None and columns is not None:
            return super()._getitem(rows, columns, *batch_indices)
        if not all(map(is_all, batch_indices)):
            whole = super()._getitem(slice(None), slice(None), *batch_indices)
            return whole._getitem(row_index, col_index, *[slice(None)] * len(whole.batch_shape))
        numbers = torch.arange(max(self.matrix_shape), device=self.device)
        i = numbers[: self.matrix_shape[0]][row_index]
        j = numbers[: self.matrix_shape[1]][col_index]
        same = self.layout.symmetric and equal(row_index, col_index)
        return KernopsLinearOperator.of(self._derivatives.entries(i, i if same else j))

    def _get_indices(self, row_index: Tensor, col_index: Tensor, *batch_indices: Tensor) -> Tensor:
        return entries(self._derivatives.entries(), row_index, col_index, batch_indices)

    def _mul_matrix(self, other: Any) -> Any:
        return self.one_formula()._mul_matrix(other)

    def _is_like(self, other: Any) -> bool:
        return super()._is_like(other) and self._derivatives.is_like(other.operator)


def _whole_points(index: Index, size: int, rows: int) -> slice | None:
    """The points whose rows a slice takes, if it takes all rows of each."""
    if not isinstance(index, slice):
        return None
    start, stop, step = index.indices(rows)
    if step != 1 or start % size or stop % size:
        return None
    return slice(None) if stop - start == rows else slice(start // size, max(start, stop) // size)


class _OfDerivatives(KernopsKernel):
    """A kernel whose matrix has rows and columns for the value and for derivatives at each point."""

    order = 1

    def num_outputs_per_input(self, x1: Tensor, x2: Tensor) -> int:
        """The number of rows for each point; in a sum, of points with all features, of which this reads its own."""
        return 1 + self.order * (x1.size(-1) if self.active_dims is None else len(self.active_dims))

    def forward(
        self, x1: Tensor, x2: Tensor, diag: bool = False, last_dim_is_batch: bool = False, **params: Any
    ) -> Any:  # fmt: skip
        """The matrix of points and points, (*B, M P, N P), as a ``DerivativesLinearOperator``.

        Args:
            x1, x2: (*B, M, D) and (*B, N, D).
            diag: return the diagonal (*B, N P) instead, of as many points x1 as x2.
            last_dim_is_batch: not for these kernels.

        Raises:
            ValueError: dtypes or devices differ, a parameter is out of its range, or ``last_dim_is_batch``.
        """
        if last_dim_is_batch:
            raise ValueError(f"{type(self).__name__}: last_dim_is_batch must be False: derivatives are by all features")
        kernel = self.covariance(x1.shape[-1])
        operator = DerivativesOperator(kernel, x1, None if x2 is x1 else x2, order=self.order)
        return operator.diagonal() if diag else DerivativesLinearOperator.of(operator)


class RBFKernelGrad(_OfDerivatives, RBFKernel, gpytorch.kernels.RBFKernelGrad):
    """Covariances of a function with ``RBFKernel`` and of its gradient: rows value, ∂/∂x_1, …, ∂/∂x_D of each point.

    A product with a vector evaluates the kernel once for a pair of points, with O(N D) memory. The matrix
    is that of Rasmussen and Williams (Gaussian Processes for Machine Learning, 2006, section 9.4).

    Args:
        kwargs: ``ard_num_dims, batch_shape, active_dims, lengthscale_prior, lengthscale_constraint`` of GPyTorch's.

    Raises:
        ValueError: a call with points of two dtypes or devices, or with ``last_dim_is_batch``; a length scale <= 0.

    Example:
        >>> kernel = ScaleKernel(RBFKernelGrad())
        >>> kernel(torch.zeros(10, 5)).evaluate_kernel().shape
        torch.Size([60, 60])
    """


class Matern52KernelGrad(_OfDerivatives, MaternKernel, gpytorch.kernels.Matern52KernelGrad):
    """Covariances of a function with ``MaternKernel(2.5)`` and of its gradient; as ``RBFKernelGrad``.

    Args:
        kwargs: ``ard_num_dims, batch_shape, active_dims, lengthscale_prior, lengthscale_constraint`` of GPyTorch's.

    Raises:
        ValueError: as for ``RBFKernelGrad``.

    Example:
        >>> Matern52KernelGrad()(torch.zeros(1, 2)).diagonal().detach()  # (1, 5/3 ℓ⁻², 5/3 ℓ⁻²), ℓ = log 2
        tensor([1.0000, 3.4690, 3.4690])
    """


class PolynomialKernelGrad(_OfDerivatives, PolynomialKernel, gpytorch.kernels.PolynomialKernelGrad):
    """Covariances of a function with ``PolynomialKernel`` and of its gradient; as ``RBFKernelGrad``.

    Args:
        power: a number.
        offset_prior, offset_constraint: of c.
        kwargs: ``batch_shape, active_dims`` of GPyTorch's.

    Raises:
        ValueError: a call with points of two dtypes or devices, or with ``last_dim_is_batch``.

    Example:
        >>> kernel = PolynomialKernelGrad(power=2)
        >>> kernel.offset = 1.0
        >>> kernel(torch.tensor([[1.0]]), torch.tensor([[2.0]])).to_dense().detach()  # of (x y + 1)²
        tensor([[ 9.,  6.],
                [12., 10.]])
    """


class RBFKernelGradGrad(_OfDerivatives, RBFKernel, gpytorch.kernels.RBFKernelGradGrad):
    """Covariances with the second derivatives too, without mixed ones: rows value, ∂/∂x_1, …, ∂²/∂x_1², … of a point.

    As ``RBFKernelGrad``, also for points x1 and x2 of which there are not equally many, where GPyTorch's (up to 1.15)
    raises an error.

    Args:
        kwargs: ``ard_num_dims, batch_shape, active_dims, lengthscale_prior, lengthscale_constraint`` of GPyTorch's.

    Raises:
        ValueError: as for ``RBFKernelGrad``.

    Example:
        >>> RBFKernelGradGrad()(torch.zeros(10, 5), torch.zeros(3, 5)).shape
        torch.Size([110, 33])
    """

    order = 2
