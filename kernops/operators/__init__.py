"""Matrices of kernels as operators: products, solutions, determinants, samples, and derivatives of all of them."""

from ..solvers import ConvergenceWarning, NotPositiveDefiniteError, NumericalWarning, OutOfMemoryError
from .base import LinearOperator
from .blocks import BlockDiagonalOperator, KroneckerOperator
from .derivatives import DerivativesOperator
from .kernel import KernelOperator
from .preconditioning import Preconditioner, make_preconditioner
from .rescaled import RescaledOperator
from .solving import Report
from .structured import DenseOperator, DiagonalOperator
from .variance import Variances, posterior_variance

__all__ = [
    "BlockDiagonalOperator",
    "ConvergenceWarning",
    "DenseOperator",
    "DerivativesOperator",
    "DiagonalOperator",
    "KernelOperator",
    "KroneckerOperator",
    "LinearOperator",
    "NotPositiveDefiniteError",
    "NumericalWarning",
    "OutOfMemoryError",
    "Preconditioner",
    "Report",
    "RescaledOperator",
    "Variances",
    "make_preconditioner",
    "posterior_variance",
]
