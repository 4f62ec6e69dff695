"""What our kernels for GPyTorch have in common."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import gpytorch
import torch
from gpytorch.lazy import LazyEvaluatedKernelTensor
from linear_operator import LinearOperator, to_linear_operator
from linear_operator.operators import ZeroLinearOperator

from ..formula.graph import Node
from ..kernels import Kernel
from ..kernels.kernel import as_parameter, combine, parameter
from ..lazy import LazyTensor
from ..operators import KernelOperator
from .operator import KernopsLinearOperator, as_ours

Tensor = torch.Tensor


class LazyMatrix(LazyEvaluatedKernelTensor):
    """What calling a kernel returns: points and a kernel, evaluated where it is needed.

    Its elementwise product with another, ``k(x).mul(tasks(i))``, is that of the evaluated matrices. GPyTorch's own has
    approximations of both by low rank in it, above ``max_cholesky_size``, unless one of them is dense.
    """

    def _mul_matrix(self, other: Any) -> LinearOperator:
        return _product(self.evaluate_kernel(), _evaluated(other))


class Composable(gpytorch.kernels.Kernel):
    """A kernel of GPyTorch whose sums and products with others are ours: those that never make a matrix dense."""

    def __call__(self, *args: Any, **params: Any) -> Any:
        """As GPyTorch's: a lazy matrix, or with ``diag=True`` a tensor."""
        out = super().__call__(*args, **params)
        if type(out) is not LazyEvaluatedKernelTensor:
            return out
        return LazyMatrix(out.x1, out.x2, kernel=out.kernel, last_dim_is_batch=out.last_dim_is_batch, **out.params)

    def __add__(self, other: gpytorch.kernels.Kernel) -> AdditiveKernel:
        return AdditiveKernel(*_parts(self, gpytorch.kernels.AdditiveKernel, other))

    def __mul__(self, other: gpytorch.kernels.Kernel) -> ProductKernel:
        return ProductKernel(*_parts(self, gpytorch.kernels.ProductKernel, other))


def _parts(a: gpytorch.kernels.Kernel, kind: type, b: gpytorch.kernels.Kernel) -> list[gpytorch.kernels.Kernel]:
    """The two, or their parts where they are of one ``kind`` already."""
    return [part for k in (a, b) for part in (k.kernels if isinstance(k, kind) else (k,))]  # type: ignore[attr-defined]


class _OfMany(Composable):
    """A kernel made of a list of others."""

    def expand_batch(self, *sizes: Any) -> _OfMany:
        """A copy with parameters expanded to a batch shape: GPyTorch's own leaves those of the parts as they are."""
        new = copy.deepcopy(self)
        new.kernels = torch.nn.ModuleList(kernel.expand_batch(*sizes) for kernel in self.kernels)  # type: ignore[union-attr]
        return new


class AdditiveKernel(_OfMany, gpytorch.kernels.AdditiveKernel):
    """The sum of kernels: ours are one formula, others are added to it.

    Args:
        kernels: ours and GPyTorch's.
    """

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Any:
        """The matrix of points and points as an operator; with ``diag`` its diagonal, a tensor."""
        parts = [kernel(x1, None if x2 is x1 else x2, diag=diag, **params) for kernel in self.kernels]
        if diag:
            return sum(parts)
        mats = sorted(map(_evaluated, parts), key=lambda m: not isinstance(m, KernopsLinearOperator))  # ours first
        total: Any = ZeroLinearOperator()
        for m in mats:
            total = total + m
        return total


class ProductKernel(_OfMany, gpytorch.kernels.ProductKernel):
    """The product of kernels. Ours are one formula, with others of low rank: ``LinearKernel`` and ``IndexKernel``.

    The product with a kernel that makes a dense matrix, or one of a rank above 128, is dense.

    Args:
        kernels: ours and GPyTorch's.
    """

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Any:
        """The matrix of points and points as an operator; with ``diag`` its diagonal, a tensor."""
        parts = [kernel(x1, None if x2 is x1 else x2, diag=diag, **params) for kernel in self.kernels]
        if diag:
            return torch.stack(torch.broadcast_tensors(*parts)).prod(0)
        out, *others = map(_evaluated, parts)
        for m in others:
            out = _product(out, m)
        return out


def _evaluated(matrix: Any) -> LinearOperator:
    return to_linear_operator(matrix).evaluate_kernel()


def _product(a: LinearOperator, b: LinearOperator) -> LinearOperator:
    mine, other = as_ours(a), as_ours(b)
    if mine is not None and other is not None:
        return mine * other
    if isinstance(b, KernopsLinearOperator):
        a, b = b, a  # so that ours, whose products are exact, multiplies
    if isinstance(a, KernopsLinearOperator) or a.shape[-1] == a.shape[-2]:
        return a * b
    return to_linear_operator(a.to_dense() * b.to_dense())  # linear_operator's products are of square matrices


class KernopsKernel(Composable):
    """What all kernels here are but those made of others: a formula of two points and of parameters.

    What GPyTorch calls a kernel with ends in ``forward``, which returns a matrix that is not stored. ``covariance`` is
    the way to kernops' own operators, solvers and estimators.
    """

    #: Parameters that may be zero or negative.
    free: tuple[str, ...] = ()

    def _formula_values(self, each_feature: bool) -> Mapping[str, Tensor]:
        """The formula's parameters, (*B, K) each.

        Args:
            each_feature: whether the features are a batch, the last of its axes: then (*B, features or 1, K).
        """
        values = self._formula_parameters()
        return {k: v[..., None] for k, v in values.items()} if each_feature else values

    def _formula_parameters(self) -> Mapping[str, Tensor]:
        """The formula's parameters, (*B, K) each."""
        raise NotImplementedError

    def _formula(self, x: Node, y: Node, features: int, **values: Node) -> Node:
        """The formula of two points, given as formulas; ``features`` is how many the data have."""
        raise NotImplementedError

    def covariance(self, features: int, each_feature: bool = False) -> Kernel:
        """The same as a kernel of ``kernops.kernels``, with this one's parameters as they are now.

        Args:
            features: how many features points have.
            each_feature: whether each feature is a point of its own, in a batch of matrices.

        Raises:
            ValueError: a parameter is not finite, or is not positive where it has to be.
        """
        values = {
            k: parameter(f"{k} of {type(self).__name__}", v, k not in self.free)
            for k, v in self._formula_values(each_feature).items()
        }
        return self._written(features, values)

    def _written(self, features: int, values: Mapping[str, Any]) -> Kernel:
        return _Written(self, features, values)

    def forward(
        self, x1: Tensor, x2: Tensor, diag: bool = False, last_dim_is_batch: bool = False, **params: Any
    ) -> Any:  # fmt: skip
        """The matrix of points and points, (*B, M, N), as a ``KernopsLinearOperator``.

        Args:
            x1, x2: (*B, M, D) and (*B, N, D).
            diag: return the diagonal (*B, N) instead, of as many points x1 as x2.
            last_dim_is_batch: one matrix for each feature, (*B, D, M, N).

        Raises:
            ValueError: dtypes or devices differ, or a parameter is out of its range.
        """
        kernel = self.covariance(x1.shape[-1], last_dim_is_batch)
        same = x2 is x1
        if last_dim_is_batch:
            x1 = x1.mT[..., None]
            x2 = x1 if same else x2.mT[..., None]
        operator = KernelOperator(kernel, x1, None if same else x2)
        return operator.diagonal() if diag else KernopsLinearOperator.of(operator)


class _Written(Kernel):
    """The formula of a kernel with its parameters."""

    def __init__(self, kernel: KernopsKernel, features: int, values: Mapping[str, Any]) -> None:
        self.kernel, self.features, self.params = kernel, features, values

    def formula(self, x: LazyTensor, y: LazyTensor) -> LazyTensor:
        names = list(self.params)

        def build(x: Node, y: Node, *nodes: Node) -> Node:
            return self.kernel._formula(x, y, self.features, **dict(zip(names, nodes)))

        given = [as_parameter(v, x, 1) for v in self.params.values()]
        return combine(type(self.kernel).__name__, build, x, y, *given)

    def __repr__(self) -> str:
        return repr(self.kernel)
