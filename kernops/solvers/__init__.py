"""Linear algebra of matrices that are known by their products only: torch functions, and nothing of kernels."""

from .cg import Solution, conjugate_gradients
from .eigen import Eigenpairs, largest_eigenpairs
from .factor import CholeskyFactor, factorized_in_place
from .implicit import implicit_solve
from .lanczos import Krylov, first_steps, krylov, log_quadrature, root_product
from .preconditioners import LowRankPlusDiagonal, block_pivoted_cholesky, nystrom, pivoted_cholesky
from .problems import ConvergenceWarning, NotPositiveDefiniteError, NumericalWarning, OutOfMemoryError, memory_for

__all__ = [
    "CholeskyFactor",
    "ConvergenceWarning",
    "Eigenpairs",
    "Krylov",
    "LowRankPlusDiagonal",
    "NotPositiveDefiniteError",
    "NumericalWarning",
    "OutOfMemoryError",
    "Solution",
    "block_pivoted_cholesky",
    "conjugate_gradients",
    "factorized_in_place",
    "first_steps",
    "implicit_solve",
    "krylov",
    "largest_eigenpairs",
    "log_quadrature",
    "memory_for",
    "nystrom",
    "pivoted_cholesky",
    "root_product",
]
