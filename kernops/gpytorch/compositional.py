"""GPyTorch's kernels of kernels; those whose matrices are ours when their parts' are."""

from __future__ import annotations

import operator
from functools import reduce
from typing import Any

import gpytorch
import torch

from .base import Composable
from .tasks import of_tasks

Tensor = torch.Tensor


class ScaleKernel(Composable, gpytorch.kernels.ScaleKernel):
    """A kernel times a number: the matrix of ours is one formula, with the number outside the sum.

    Args:
        base_kernel: ours or GPyTorch's.
        outputscale_prior, outputscale_constraint: of the number.
        kwargs: ``batch_shape``.
    """


class MultitaskKernel(Composable, gpytorch.kernels.MultitaskKernel):
    """Kronecker product of a kernel of points and a covariance of tasks: products with it use both as they are.

    Args:
        data_covar_module: ours or GPyTorch's.
        num_tasks, rank, task_covar_prior: of the covariance of tasks.
        kwargs: ``batch_shape, active_dims``.
    """

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Any:
        """The matrix of points and tasks, tasks within points, as an operator; with ``diag`` its diagonal."""
        return of_tasks(super().forward(x1, x2, diag=diag, **params))


class LCMKernel(Composable, gpytorch.kernels.LCMKernel):
    """The linear model of coregionalisation: a sum of multi-task kernels.

    Args:
        base_kernels, num_tasks, rank, task_covar_prior: those of GPyTorch's.
    """

    def forward(self, x1: Tensor, x2: Tensor, **params: Any) -> Any:
        """The matrix of points and tasks, tasks within points, as an operator; with ``diag`` its diagonal."""
        parts = [of_tasks(part.forward(x1, x2, **params)) for part in self.covar_module_list]
        return reduce(operator.add, parts)


class IndexKernel(Composable, gpytorch.kernels.IndexKernel):
    """The covariance of tasks by their numbers; its product with one of ours is one formula.

    Args:
        num_tasks, rank, prior, var_constraint: those of GPyTorch's.
        kwargs: ``batch_shape, active_dims``.
    """


class AdditiveStructureKernel(Composable, gpytorch.kernels.AdditiveStructureKernel):
    """The sum of one kernel's values for each feature.

    Args:
        base_kernel, num_dims, active_dims: those of GPyTorch's.
    """


class ProductStructureKernel(Composable, gpytorch.kernels.ProductStructureKernel):
    """The product of one kernel's values for each feature: one formula, where GPyTorch decomposes matrices.

    Args:
        base_kernel, num_dims, active_dims: those of GPyTorch's.
    """
