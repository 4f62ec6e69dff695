"""Covariances of several tasks at all points: Kronecker products whose factor of the points is never stored."""

from __future__ import annotations

from typing import Any

import torch
from linear_operator import LinearOperator, settings
from linear_operator.operators import KroneckerProductLinearOperator

from .operator import KernopsLinearOperator, differentiable_derivative

Tensor = torch.Tensor


class TasksLinearOperator(KroneckerProductLinearOperator):
    """The Kronecker product of matrices, one of which is ours.

    linear_operator solves with Kronecker products by the eigenvectors of the dense factors, of any size. That is what
    this does up to ``linear_operator.settings.max_cholesky_size`` rows of a factor; above, as for other matrices, what
    is added makes an operator whose solves and determinants are iterative.
    """

    def _is_large(self) -> bool:
        return max(m.shape[-1] for m in self.linear_ops) > settings.max_cholesky_size.value()

    def __add__(self, other: Any) -> Any:
        return LinearOperator.__add__(self, other) if self._is_large() else super().__add__(other)

    def add_diagonal(self, diag: Tensor) -> LinearOperator:
        """The sum with a diagonal matrix: of numbers (*B, N), or of one, (*B, 1) or ()."""
        return LinearOperator.add_diagonal(self, diag) if self._is_large() else super().add_diagonal(diag)

    def _logdet(self) -> Tensor:
        if not self._is_large():
            return super()._logdet()
        return sum((self.shape[-1] // m.shape[-1] * m.logdet() for m in self.linear_ops), torch.zeros(()))

    def _bilinear_derivative(self, left_vecs: Tensor, right_vecs: Tensor) -> tuple[Tensor | None, ...]:
        """As linear_operator's, which cannot be differentiated itself."""
        if not torch.is_grad_enabled():
            return super()._bilinear_derivative(left_vecs, right_vecs)
        if left_vecs.ndim == 1:
            left_vecs, right_vecs = left_vecs[:, None], right_vecs[:, None]
        return differentiable_derivative(self, left_vecs, right_vecs)


def holds_ours(matrix: LinearOperator) -> bool:
    """Whether a matrix is ours, or is made of one that is."""
    parts = (a for a in matrix._args if isinstance(a, LinearOperator))
    return isinstance(matrix, KernopsLinearOperator) or any(map(holds_ours, parts))


def of_tasks(product: Any) -> Any:
    """A Kronecker product of GPyTorch's as one of ours, if a factor is; else what was given."""
    if type(product) is KroneckerProductLinearOperator and holds_ours(product):
        return TasksLinearOperator(*product.linear_ops)
    return product
