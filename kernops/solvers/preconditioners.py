"""Approximations of A = K + D by a matrix of low rank plus a diagonal one, whose inverse is cheap to apply."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .problems import wide

Tensor = torch.Tensor


class LowRankPlusDiagonal:
    """P = L Lᵀ + D with its inverse, its logarithmic determinant and samples of N(0, P), in O(N rank) each.

    The inverse is applied as D^-½ (I - U Uᵀ + U (1 + S²)⁻¹ Uᵀ) D^-½, where U S Vᵀ = D^-½ L, with I - U Uᵀ applied
    twice: Woodbury's formula as it stands cancels in float32 where L Lᵀ is much larger than D.

    Args:
        low: L (*B, N, rank).
        diagonal: D > 0, (*B, N) or (*B, 1).
    """

    def __init__(self, low: Tensor, diagonal: Tensor) -> None:
        dtype = low.dtype
        root = wide(diagonal).sqrt()[..., None]
        q, r = torch.linalg.qr(wide(low) / root)
        u, s, _ = torch.linalg.svd(r)
        self.root = root.to(dtype)
        self.basis = (q @ u).to(dtype)
        self.eigenvalues = 1 + s**2  # (*B, rank), of D^-½ P D^-½ beside ones
        self.inverse = (1 / self.eigenvalues).to(dtype)[..., None]
        self.n = low.shape[-2]

    def solve(self, r: Tensor) -> Tensor:
        """P⁻¹ r for r (*B, N, E)."""
        t = r / self.root
        along = self.basis.mT @ t
        rest = t - self.basis @ along
        rest = rest - self.basis @ (self.basis.mT @ rest)
        return (rest + self.basis @ (self.inverse * along)) / self.root

    def inverse_diagonal(self) -> Tensor:
        """The diagonal of P⁻¹, (*B, N)."""
        share = self.basis.square() @ (1 - self.inverse)
        return ((1 - share) / self.root.square())[..., 0]

    def logdet(self) -> Tensor:
        """log det P (*B,), in float64."""
        diagonal = 2 * wide(self.root)[..., 0].log()
        scale = self.n // diagonal.shape[-1]
        return scale * diagonal.sum(-1) + self.eigenvalues.log().sum(-1)

    def sample(self, count: int, batch: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """``count`` samples of N(0, P), (*batch, N, count)."""
        w = normal((*batch, self.n, count), self.root, generator)
        along = self.basis.mT @ w
        return self.root * (w + self.basis @ (((self.eigenvalues.sqrt() - 1).to(w.dtype))[..., None] * along))


def normal(shape: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
    """Standard normal numbers of the dtype and device of ``like``."""
    return torch.randn(shape, dtype=like.dtype, device=like.device, generator=generator)


def pivoted_cholesky(
    row: Callable[[Tensor], Tensor], diagonal: Tensor, rank: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """L (*B, N, rank) with L Lᵀ ≈ K, exact in ``rank`` rows of K, of O(N rank²) cost and ``rank`` rows evaluated.

    Also the numbers of these rows, (*B, rank).

    The pivot is the largest entry of the diagonal that is left (Harbrecht, Peters and Schneider, On the low-rank
    approximation by the pivoted Cholesky decomposition, 2012, algorithm 1). Where nothing is left but rounding, the
    remaining columns are 0.

    Args:
        row: ``row(index)``, for index (*B,) of int64 the rows (*B, N) of the positive semi-definite K.
        diagonal: the diagonal of K, (*B, N).
        rank: number of columns, at most N.
    """
    left = diagonal.clone()
    low = diagonal.new_zeros(*diagonal.shape, rank)
    floor = diagonal.abs().amax(-1) * (100 * torch.finfo(diagonal.dtype).eps)
    pivots = []
    for k in range(rank):
        largest, pivot = left.max(-1)
        pivots.append(pivot)
        fresh = largest > floor
        root = torch.where(fresh, largest, 1.0).sqrt()
        done = low[..., :k]
        at_pivot = done.gather(-2, pivot[..., None, None].expand(*pivot.shape, 1, k))
        column = (row(pivot) - (done @ at_pivot.mT)[..., 0]) / root[..., None]
        column = torch.where(fresh[..., None], column, 0.0)
        low[..., k] = column
        left = left - column.square()
        left.scatter_(-1, pivot[..., None], 0.0)
    return low, torch.stack(pivots, -1)


def nystrom(
    matvec: Callable[[Tensor], Tensor], shape: tuple[int, ...], rank: int, like: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """(L, tail): L Lᵀ + tail I ≈ K from one product of K with ``rank`` random vectors.

    L (*B, N, rank) and tail (*B,), the smallest eigenvalue that was found (Frangella, Tropp and Udell, Randomized
    Nyström Preconditioning, 2023, algorithm 2.1 and equation 1.3).

    Args:
        matvec: the product of the positive semi-definite K with vectors (*B, N, E).
        shape: (*B, N).
        rank: number of columns, at most N.
        like: a tensor of the dtype and device.
        generator: of the random vectors, on that device.
    """
    omega, _ = torch.linalg.qr(normal((*shape, rank), like, generator))
    y = wide(matvec(omega))
    eps = torch.finfo(like.dtype).eps
    shift = shape[-1] ** 0.5 * eps * torch.linalg.matrix_norm(y)[..., None, None]
    y = y + shift * wide(omega)
    gram = wide(omega).mT @ y
    values, vectors = torch.linalg.eigh((gram + gram.mT) / 2)
    # gram^-½ rather than its Cholesky factor: rounding, or a K that is not semi-definite, may leave gram indefinite.
    good = values > values[..., -1:].abs() * (10 * eps)
    scale = torch.where(good, torch.where(good, values, 1.0).rsqrt(), 0.0)
    half = y @ (vectors * scale[..., None, :])
    q, r = torch.linalg.qr(half)
    u, s, _ = torch.linalg.svd(r)
    found = (s**2 - shift[..., 0]).clamp(min=0.0)
    tail = found[..., -1]
    low = (q @ u) * (found - tail[..., None]).clamp(min=0.0).sqrt()[..., None, :]
    return low.to(like.dtype), tail.to(like.dtype)
