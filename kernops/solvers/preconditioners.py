"""Approximations of A = K + D by a matrix of low rank plus a diagonal one, whose inverse is cheap to apply."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from .problems import wide

Tensor = torch.Tensor

#: Rows that are in float64 at a time.
ROWS = 1 << 16
#: Pivots that are chosen at once: half of those that are missing, and at least and at most so many. The host, which
#: chooses them, takes a time that grows like their number to the third power.
FEWEST_PIVOTS, MOST_PIVOTS = 32, 512
#: Candidates for them: twice as many, and at least so many.
FEWEST_CANDIDATES = 256


class LowRankPlusDiagonal:
    """P = L Lᵀ + D with its inverse, its logarithmic determinant and vectors of covariance P, in O(N rank) each.

    The inverse is applied as D^-½ (I - U Uᵀ + U (1 + S²)⁻¹ Uᵀ) D^-½, where U S Vᵀ = D^-½ L, with I - U Uᵀ applied
    twice: Woodbury's formula as it stands cancels in float32 where L Lᵀ is much larger than D. U and S are from the
    eigenvectors of Lᵀ D⁻¹ L in float64: what is lost are directions of S² below 10⁻¹² of the largest, along which P is
    D to rounding.

    Args:
        low: L (*B, N, rank).
        diagonal: D > 0, (*B, N) or (*B, 1).
    """

    def __init__(self, low: Tensor, diagonal: Tensor) -> None:
        dtype = low.dtype
        root = wide(diagonal).sqrt()[..., None]
        self.root, self.n = root.to(dtype), low.shape[-2]
        pieces = [slice(k, k + ROWS) for k in range(0, self.n, ROWS)]  # float64 of all rows would take much memory
        scaled = [lambda rows=rows: wide(low[..., rows, :]) / _rows(root, rows) for rows in pieces]  # type: ignore[misc]
        gram = sum(part.mT @ part for part in (make() for make in scaled))
        squares, v = torch.linalg.eigh(gram)
        least = 1e-12 * squares[..., -1:].clamp(min=torch.finfo(squares.dtype).tiny)
        kept = squares > least
        v = v * torch.where(kept, squares.clamp(min=least).rsqrt(), 0.0)[..., None, :]
        self.basis = torch.cat([(make() @ v).to(dtype) for make in scaled], -2)
        # Of small eigenvalues the eigenvectors are exact, their own digits are not.
        length = torch.linalg.vector_norm(self.basis, dim=-2, dtype=squares.dtype)
        self.basis /= torch.where(kept, length, 1.0).to(dtype)[..., None, :]
        #: (*B, rank), of D^-½ P D^-½ beside ones.
        self.eigenvalues = 1 + torch.where(kept, squares * length.square(), 0.0)
        self.inverse = (1 / self.eigenvalues).to(dtype)[..., None]

    @property
    def like(self) -> Tensor:
        """A tensor of its dtype and device."""
        return self.root

    @property
    def nbytes(self) -> int:
        """Bytes of what is stored."""
        return self.basis.nbytes + self.root.nbytes + self.eigenvalues.nbytes + self.inverse.nbytes

    def solve(self, r: Tensor) -> Tensor:
        """P⁻¹ r for r (*B, N, E)."""
        t = r / self.root
        along = self.basis.mT @ t
        rest = _minus(t, self.basis, along)
        return _minus(rest, self.basis, self.basis.mT @ rest - self.inverse * along) / self.root

    def inverse_diagonal(self) -> Tensor:
        """The diagonal of P⁻¹, (*B, N)."""
        share = self.basis.square() @ (1 - self.inverse)
        return ((1 - share) / self.root.square())[..., 0]

    def logdet(self) -> Tensor:
        """log det P (*B,), in float64."""
        diagonal = 2 * wide(self.root)[..., 0].log()
        scale = self.n // diagonal.shape[-1]
        return scale * diagonal.sum(-1) + self.eigenvalues.log().sum(-1)

    def probes(self, count: int, batch: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """``count`` random vectors of mean 0 and covariance P, (*batch, N, count): a root of P times random signs.

        Of all entries signs have the least spread of quadratic forms: diagonals add nothing to it (Hutchinson, A
        stochastic estimator of the trace of the influence matrix, 1990).
        """
        w = signs((*batch, self.n, count), self.root, generator)
        along = self.basis.mT @ w
        return self.root * (w + self.basis @ (((self.eigenvalues.sqrt() - 1).to(w.dtype))[..., None] * along))


def _rows(root: Tensor, rows: slice) -> Tensor:
    """These rows of (*B, N, 1), or of (*B, 1, 1), which stands for all."""
    return root if root.shape[-2] == 1 else root[..., rows, :]


def _minus(t: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """t - a b, in one pass where there is no batch."""
    return torch.addmm(t, a, b, alpha=-1) if t.ndim == a.ndim == b.ndim == 2 else t - a @ b


def normal(shape: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
    """Standard normal numbers of the dtype and device of ``like``."""
    return torch.randn(shape, dtype=like.dtype, device=like.device, generator=generator)


def signs(shape: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
    """Random 1 and -1 of the dtype and device of ``like``."""
    return torch.randint(0, 2, shape, generator=generator, device=like.device).to(like.dtype) * 2 - 1


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


def block_pivoted_cholesky(
    columns: Callable[[Tensor], Tensor],
    principal: Callable[[Tensor], Tensor],
    diagonal: Tensor,
    rank: int,
    generator: torch.Generator,
    enough: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """What :func:`pivoted_cholesky` gives, with pivots that are chosen many at a time: a few large steps.

    There are fewer than ``rank`` columns where what is left is small enough, or nothing but rounding.

    Candidates are drawn at random, in proportion to what is left of the diagonal (Chen, Epperly, Tropp and Webber,
    Randomly pivoted Cholesky, 2025, algorithm 2.1; without replacement by Efraimidis and Spirakis, Weighted random
    sampling with a reservoir, 2006). Among them the pivots are those of the greedy decomposition, so that no two of
    them tell the same.

    Args:
        columns: ``columns(index)``, for index (S,) of int64 the columns (N, S) of the positive semi-definite K.
        principal: ``principal(index)``, the entries (S, S) at these rows and columns.
        diagonal: the diagonal of K, (N,).
        rank: number of columns, at most N.
        generator: of the candidates, on that device.
        enough: the trace of what may be left.
    """
    n = len(diagonal)
    low, left = diagonal.new_zeros(n, 0), diagonal.clone()
    pivots = torch.zeros(0, dtype=torch.int64, device=diagonal.device)
    floor = float(diagonal.abs().max()) * 100 * torch.finfo(diagonal.dtype).eps
    while (missing := rank - len(pivots)) > 0:
        wanted = min(missing, max(FEWEST_PIVOTS, min(MOST_PIVOTS, -(-missing // 2))))
        count = min(n, max(2 * wanted, FEWEST_CANDIDATES))
        waiting = torch.empty_like(left).exponential_(generator=generator)
        candidates = (left / waiting).topk(count).indices
        # On the device: torch's threads on the host were found to take 0.1 s for it, beside other libraries' threads.
        known = wide(low[candidates])
        rest = (wide(principal(candidates)) - known @ known.mT).cpu().double()
        order, triangle = _greedy(rest.numpy(), floor, wanted)
        chosen = candidates[torch.from_numpy(order).to(candidates.device)]
        fresh = columns(chosen) - low @ low[chosen].mT
        right = torch.from_numpy(triangle).to(low.dtype).to(low.device)
        fresh = torch.linalg.solve_triangular(right.mT, fresh, upper=True, left=False)
        low, pivots = torch.cat([low, fresh], -1), torch.cat([pivots, chosen])
        left = (left - fresh.square().sum(-1)).clamp(min=0.0)
        left[chosen] = 0.0
        # Fewer pivots than wanted do not end it: where few points have many copies, the candidates are mostly these.
        if not len(order) or float(left.max()) <= floor or (enough and float(left.sum()) <= enough):
            break
    return low, pivots


def _greedy(matrix: np.ndarray, floor: float, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of the first pivots of a small matrix, as long as they are above ``floor``, and their lower triangle."""
    from scipy.linalg import lapack  # here, since the front end does without SciPy

    factor, order, rank, _ = lapack.dpstrf(matrix, tol=floor, lower=1)
    # LAPACK does not compare the first pivot with its tolerance.
    count = 0 if matrix.diagonal().max() <= floor else min(int(rank), most)
    return order[:count].astype(np.int64) - 1, np.tril(factor[:count, :count])


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
