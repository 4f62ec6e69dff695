"""Variances and covariances of predictions, a few queries at a time."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import torch
from scipy import linalg
from sklearn.exceptions import ConvergenceWarning

from ..operators import KernelOperator, LinearOperator, OutOfMemoryError, Preconditioner
from ..operators.variance import Forms, at_once, quadratic_forms
from ..solvers.problems import ran_out_of_memory, size_of, wide
from ._base import array

Tensor = torch.Tensor

#: Queries that are computed at once, where memory is not short and the matrix is not stored.
QUERIES = 128
#: Variances are accurate to this many times ``tol``, of themselves; covariances, of the product of two deviations.
ACCURACY = 10.0


def in_tiles(count: int, size: int, work: Callable[[slice], None], what: str, each: int) -> None:
    """``work`` of all numbers below ``count``, so many at a time; fewer where it runs out of memory.

    Args:
        count, size: as above.
        work: of a slice of the numbers.
        what: the subject of an error's message.
        each: bytes that one number needs at the least.

    Raises:
        OutOfMemoryError: there is not enough memory for a single one.
    """
    start = 0
    while start < count:
        rows = slice(start, min(start + size, count))
        try:
            work(rows)
        except (MemoryError, RuntimeError) as error:
            if not ran_out_of_memory(error):
                raise
            if size == 1:
                raise OutOfMemoryError(f"{what} needs {size_of(each)} or more for a single query") from error
            size = max(1, size // 4)
        else:
            start = rows.stop


#: Of queries before: which ones, and their x of ``Iterative``, on the host.
Solutions = list[tuple[slice, Tensor]]


class Dense:
    """S A⁻¹ S of a matrix A whose Cholesky factor is at hand, and a diagonal S."""

    preconditioner = None

    def __init__(self, factor: np.ndarray, scale: np.ndarray | None = None) -> None:
        self.factor, self.scale = factor, scale

    def _half(self, columns: Tensor) -> np.ndarray:
        c = array(columns).astype(self.factor.dtype, copy=False)
        c = c if self.scale is None else self.scale[:, None] * c
        return linalg.solve_triangular(self.factor, c, lower=True, check_finite=False)

    def solve(self, columns: Tensor) -> Tensor:
        """S A⁻¹ S C."""
        out = linalg.solve_triangular(self.factor, self._half(columns), lower=True, trans=1, check_finite=False)
        return torch.as_tensor(out if self.scale is None else self.scale[:, None] * out).to(columns)

    def quadratic(self, columns: Tensor, prior: Tensor) -> Tensor:
        """The diagonal of Cᵀ S A⁻¹ S C."""
        return torch.as_tensor((self._half(columns) ** 2).sum(axis=0)).to(prior)

    def block(self, across: KernelOperator, rows: slice, prior: Tensor, known: Solutions) -> Tensor:
        """Columns ``rows`` of Cᵀ S A⁻¹ S C, in the rows before ``rows.stop``; C is the transpose of ``across``."""
        return wide(across[: rows.stop, :] @ self.solve(across[rows, :].to_dense().mT))

    def warn(self, name: str) -> None:
        """Nothing is amiss."""


class Iterative:
    """S A⁻¹ S of an operator A, by conjugate gradients.

    Variances are as accurate as ``kernops.operators.variance.quadratic_forms`` makes them. For two queries, with x and
    the residual r of each, the form is cᵢᵀ xⱼ + xᵢᵀ rⱼ + rᵢᵀ A⁻¹ rⱼ. The last term is at most the geometric mean of
    theirs; and a covariance without it is too large by a matrix that is positive semidefinite, so that it stays one.

    Args:
        operator: A.
        preconditioner: of A, or None.
        tol: of the estimator.
        max_iter: most iterations of a solution.
        scale: the diagonal of S, (N,); None for ones.
    """

    def __init__(
        self,
        operator: LinearOperator,
        preconditioner: Preconditioner | None,
        tol: float,
        max_iter: int | None,
        scale: Tensor | None = None,
    ) -> None:
        self.operator, self.preconditioner, self.scale = operator, preconditioner, scale
        self.accuracy, self.max_iter = ACCURACY * tol, max_iter
        self.error = 0.0  # the largest relative error that a variance may have

    def _scaled(self, c: Tensor) -> Tensor:
        return c if self.scale is None else self.scale[:, None] * c

    def quadratic(self, columns: Tensor, prior: Tensor) -> Tensor:
        """The diagonal of Cᵀ S A⁻¹ S C, so that the prior's variance less that is accurate to ``ACCURACY tol``."""
        return self._forms(self._scaled(columns), prior).value

    def block(self, across: KernelOperator, rows: slice, prior: Tensor, known: Solutions) -> Tensor:
        """As for ``Dense``, as accurate as ``quadratic``; ``known`` is of all queries before, and these are added."""
        columns = self._scaled(across[rows, :].to_dense().mT)
        found = self._forms(columns, prior)
        ends, parts = (wide(found.x), wide(found.rest)), []
        for before, other in known:
            c = self._scaled(across[before, :].to_dense().mT)
            parts.append(wide(c).mT @ ends[0] + wide(other.to(found.x)).mT @ ends[1])
        parts.append(wide(columns).mT @ ends[0] + ends[0].mT @ ends[1])
        known.append((rows, found.x.cpu()))
        return torch.cat(parts)

    def _forms(self, columns: Tensor, prior: Tensor) -> Forms:
        found = quadratic_forms(self.operator, columns, prior, self.accuracy, self.preconditioner, self.max_iter)
        self.error = max([self.error, *found.error.tolist()])
        return found

    def warn(self, name: str) -> None:
        """Warn of variances that are less accurate than they should be."""
        if self.error > 2 * self.accuracy:
            large = "at all" if self.error >= 1 else f"to better than {1 - (1 - self.error) ** 0.5:.1%}"
            warnings.warn(
                f"{name}: some standard deviations are not known {large}; they may be too large. More noise (alpha or "
                "WhiteKernel), a higher rank, a larger max_iter, or float64 helps",
                ConvergenceWarning,
                stacklevel=3,
            )


def _at_once(own: KernelOperator, inverse: Dense | Iterative) -> int:
    """Beside a stored matrix, more queries are little."""
    made = inverse.preconditioner
    return QUERIES if made is None or made.kind != "cholesky" else at_once(own.device, made)


def variance(own: KernelOperator, across: KernelOperator, inverse: Dense | Iterative) -> np.ndarray:
    """The posterior variance of queries, (n_queries,): the diagonal of K(x, x) - K(x, fit) S A⁻¹ S K(fit, x)."""
    prior = own.diagonal()
    out = np.empty(len(prior))

    def work(rows: slice) -> None:
        columns = across[rows, :].to_dense().mT
        out[rows] = array(wide(prior[rows]) - inverse.quadratic(columns, prior[rows]))

    in_tiles(len(out), _at_once(own, inverse), work, "a variance", 4 * across.shape[1] * across.dtype.itemsize)
    return out


def covariance(own: KernelOperator, across: KernelOperator, inverse: Dense | Iterative) -> np.ndarray:
    """The posterior covariance of queries, (n_queries, n_queries), which only NumPy stores as a whole."""
    count = own.shape[0]
    try:
        out = np.zeros((count, count))
    except MemoryError as error:
        raise OutOfMemoryError(
            f"a covariance of {count} queries needs {size_of(8 * count**2)}. return_std needs {size_of(8 * count)}"
        ) from error
    kernel, diagonal = own._split()
    prior = own.diagonal()
    known: Solutions = []

    def work(rows: slice) -> None:
        block = -inverse.block(across, rows, prior[rows], known)
        if kernel is not None:
            block = block + wide(kernel[rows, : rows.stop].to_dense().mT)
        out[: rows.stop, rows] = array(block)
        out[rows, : rows.start] = out[: rows.start, rows].T

    in_tiles(
        count, _at_once(own, inverse), work, "a covariance", (4 * across.shape[1] + 2 * count) * across.dtype.itemsize
    )
    if diagonal is not None:
        out[np.diag_indices(count)] += array(diagonal)
    return (out + out.T) / 2
