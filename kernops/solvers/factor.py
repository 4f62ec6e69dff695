"""Cholesky's factor of a stored matrix as an approximate inverse: as accurate as its dtype, and no more than that."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .preconditioners import signs
from .problems import wide

Tensor = torch.Tensor


class CholeskyFactor:
    """P = L Lᵀ for a triangular L, with its inverse, its logarithmic determinant and vectors of covariance P.

    Two triangular solutions rather than ``torch.cholesky_solve``, which copies the factor on a GPU.

    Args:
        factor: L (*B, N, N), lower triangular.
    """

    def __init__(self, factor: Tensor) -> None:
        self.factor, self.n = factor, factor.shape[-1]

    @property
    def like(self) -> Tensor:
        """A tensor of its dtype and device."""
        return self.factor

    @property
    def nbytes(self) -> int:
        """Bytes of the factor."""
        return self.factor.nbytes

    def solve(self, r: Tensor) -> Tensor:
        """P⁻¹ r for r (*B, N, E)."""
        return self._by_columns(self._solve, r)

    def _solve(self, r: Tensor) -> Tensor:
        half = torch.linalg.solve_triangular(self.factor, r, upper=False)
        return torch.linalg.solve_triangular(self.factor.mT, half, upper=True)

    def _by_columns(self, work: Callable[[Tensor], Tensor], r: Tensor) -> Tensor:
        """``work`` of the columns of one matrix, where a batch of vectors would have the factor copied for each."""
        if self.factor.ndim > 2 or r.ndim == 2:
            return work(r)
        flat = r.movedim(-2, 0)
        return work(flat.reshape(len(flat), -1)).reshape(flat.shape).movedim(0, -2)

    def logdet(self) -> Tensor:
        """log det P (*B,), in float64."""
        return 2 * wide(self.factor.diagonal(dim1=-2, dim2=-1)).log().sum(-1)

    def probes(self, count: int, batch: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """``count`` random vectors of mean 0 and covariance P, (*batch, N, count): the factor times random signs."""
        w = signs((*batch, self.factor.shape[-1], count), self.factor, generator)
        return self._by_columns(lambda v: self.factor @ v, w)


def factorized_in_place(table: Tensor) -> CholeskyFactor | None:
    """Cholesky's factor of symmetric matrices (*B, N, N), which it takes the place of; None where it breaks down.

    It does for numbers that are not finite, too.

    Args:
        table: the matrices, contiguous, of which nothing is left.
    """
    # Column-major, as LAPACK and cuSOLVER have it: of a symmetric matrix that is the transpose, without a copy.
    info = torch.empty(table.shape[:-2], dtype=torch.int32, device=table.device)
    factor, info = torch.linalg.cholesky_ex(table.mT, out=(table.mT, info))
    found = CholeskyFactor(factor)
    return found if not bool(info.any()) and bool(torch.isfinite(found.logdet()).all()) else None
