"""Functions of a symmetric matrix, by Lanczos' method and quadrature."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from .problems import NotPositiveDefiniteError, dot, magnitude, norm, wide

Tensor = torch.Tensor
Operator = Callable[[Tensor], Tensor]

#: Steps between two tests of convergence.
EVERY = 5


def log_quadrature(alpha: Tensor, beta: Tensor, weight: Tensor) -> Tensor:
    """zᵀ log(A) z for vectors z that conjugate gradients were started from, (*B, E) in float64.

    The step lengths of conjugate gradients are the Lanczos matrix T of A (of P^-½ A P^-½ with a preconditioner P), and
    weight · (log T)₁₁ is Gauss quadrature of the logarithm (Ubaru, Chen and Saad, Fast estimation of tr(f(A)) via
    stochastic Lanczos quadrature, 2017, section 3; Saad 2003, equation 6.82, for T).

    Args:
        alpha, beta: (k, *B, E), ``Solution.steps``.
        weight: (*B, E), ``Solution.start``.
    """
    if len(alpha) == 0:
        return torch.zeros_like(weight)
    going = alpha > 0
    inverse = torch.where(going, 1 / torch.where(going, alpha, 1.0), 0.0)
    main = inverse.clone()
    main[1:] += torch.where(going[1:], beta[:-1] * inverse[:-1], 0.0)
    main = torch.where(going, main, 1.0)
    off = torch.where(going[1:], beta[:-1].clamp(min=0).sqrt() * inverse[:-1], 0.0)
    values, vectors = torch.linalg.eigh(tridiagonal(main, off))
    first = vectors[..., 0, :].square()
    tiny = torch.finfo(values.dtype).tiny
    return weight * (first * values.clamp(min=tiny).log()).sum(-1)


@dataclass(frozen=True)
class Steps:
    """The first steps of conjugate gradients.

    Attributes:
        alpha, beta, weight: for :func:`log_quadrature`.
        x: where they lead, (*B, N, E).
        z: the preconditioned vectors that they started from, (*B, N, E).
    """

    alpha: Tensor
    beta: Tensor
    weight: Tensor
    x: Tensor
    z: Tensor


def first_steps(matvec: Operator, b: Tensor, preconditioner: Operator | None, count: int) -> Steps:
    """``count`` steps of conjugate gradients from 0, with as many products.

    Args:
        matvec: the product of a symmetric positive definite A with vectors (*B, N, E).
        b: right-hand sides (*B, N, E).
        preconditioner: the product with an approximate inverse of A; None for none.
        count: how many.
    """
    inverse = preconditioner or (lambda r: r)
    x, r, z = torch.zeros_like(b), b, inverse(b)
    first = p = z
    weight = rz = dot(b, z)
    least = weight * (100 * torch.finfo(b.dtype).eps) ** 2
    alphas, betas = [], []
    for k in range(count):
        product = matvec(p)
        curvature = dot(p, product)
        going = (curvature > 0) & (rz > least)
        alphas.append(torch.where(going, rz / curvature, 0.0))
        length = alphas[-1].to(r.dtype)[..., None, :]
        x = torch.addcmul(x, length, p)
        if k + 1 < count:  # what would come after the last step is not asked for
            r = torch.addcmul(r, length, product, value=-1)
            z, before = inverse(r), rz
            rz = torch.where(going, dot(r, z), 0.0)
            betas.append(torch.where(going, rz / before, 0.0))
            p = torch.addcmul(z, betas[-1].to(r.dtype)[..., None, :], p)
    betas.append(torch.zeros_like(weight))
    return Steps(torch.stack(alphas), torch.stack(betas), weight, x, first)


def tridiagonal(main: Tensor, off: Tensor) -> Tensor:
    """The matrices (..., k, k) with diagonals ``main`` (k, ...) and ``off`` (k - 1, ...)."""
    main, off = main.movedim(0, -1), off.movedim(0, -1)
    return torch.diag_embed(main) + torch.diag_embed(off, 1) + torch.diag_embed(off, -1)


@dataclass(frozen=True)
class Krylov:
    """Orthonormal bases of Krylov spaces, and the matrix in them.

    Attributes:
        basis: (k, *B, N, E); vector number 0 of each column is the normalised start. Rows after a column's space is
            exhausted are 0.
        values, vectors: eigenvalues (*B, E, k) and eigenvectors (*B, E, k, k) of the matrix in the basis, in float64.
        length: norms of the starts (*B, E).
    """

    basis: Tensor
    values: Tensor
    vectors: Tensor
    length: Tensor

    def coefficients(self, f: Callable[[Tensor], Tensor]) -> Tensor:
        """f(A) b in the basis, (*B, E, k)."""
        inner = f(self.values) * self.vectors[..., 0, :]
        return wide(self.length)[..., None] * (self.vectors @ inner[..., None])[..., 0]

    def expand(self, coefficients: Tensor) -> Tensor:
        """Vectors (*B, N, E) from coefficients (*B, E, k)."""
        weights = coefficients.movedim(-1, 0).to(self.basis.dtype)[..., None, :]
        return (self.basis * weights).sum(0)


def krylov(
    matvec: Operator, b: Tensor, f: Callable[[Tensor], Tensor], tol: float, max_iter: int
) -> tuple[Krylov, float]:
    """The Krylov spaces of ``b`` that are large enough for f(A) b, and the last relative change of f(A) b.

    Every vector is orthogonalised against all before it, twice.

    Args:
        matvec: the product of a symmetric A with vectors (*B, N, E).
        b: vectors (*B, N, E).
        f: a function of eigenvalues.
        tol: the iteration stops where f(A) b changes by less than ``tol`` of itself in ``EVERY`` steps.
        max_iter: most products with A; memory grows with it.
    """
    unit = magnitude(b)
    q = b / unit
    length = norm(q)
    q = q / torch.where(length > 0, length, 1.0)[..., None, :]
    basis = _Basis(q)
    main: list[Tensor] = []
    off: list[Tensor] = []
    size = torch.zeros_like(wide(length))
    previous: Tensor | None = None
    limit = min(max_iter, b.shape[-2])
    change = float("inf")
    while True:
        q = basis.vectors[-1]
        w = matvec(q)
        main.append(dot(q, w))
        size = torch.maximum(size, wide(norm(w)))
        last = len(main) >= limit
        if last or len(main) % EVERY == 0:
            found = _space(basis.vectors, main, off, length)
            now = found.coefficients(f)
            change = _change(previous, now)
            previous = now
            if last or change <= tol:
                return replace(found, length=length * unit[..., 0, :]), 0.0 if len(main) >= b.shape[-2] else change
        w = basis.rest(basis.rest(w))
        beta = wide(norm(w))
        fresh = beta > 100 * torch.finfo(b.dtype).eps * size
        beta = torch.where(fresh, beta, 0.0)
        basis.append(torch.where(fresh, 1 / torch.where(fresh, beta, 1.0), 0.0).to(w.dtype)[..., None, :] * w)
        off.append(beta)


class _Basis:
    """Vectors (k, *B, N, E), in memory that doubles when it is full."""

    def __init__(self, first: Tensor) -> None:
        self.room = first.new_empty(EVERY, *first.shape)
        self.count = 0
        self.append(first)

    @property
    def vectors(self) -> Tensor:
        return self.room[: self.count]

    def append(self, q: Tensor) -> None:
        if self.count == len(self.room):
            self.room = torch.cat([self.room, torch.empty_like(self.room)])
        self.room[self.count] = q
        self.count += 1

    def rest(self, w: Tensor) -> Tensor:
        """``w`` without its part along the vectors."""
        along = torch.einsum("k...ne,...ne->k...e", self.vectors, w)
        return w - torch.einsum("k...e,k...ne->...ne", along, self.vectors)


def _space(basis: Tensor, main: list[Tensor], off: list[Tensor], length: Tensor) -> Krylov:
    k = len(main)
    edges = torch.stack(off[: k - 1]) if k > 1 else main[0].new_zeros(0, *main[0].shape)
    values, vectors = torch.linalg.eigh(tridiagonal(torch.stack(main), edges))
    return Krylov(basis, values, vectors, length)


def _change(before: Tensor | None, now: Tensor) -> float:
    if before is None or not now.numel():
        return float("inf") if now.numel() else 0.0
    difference = now.clone()
    difference[..., : before.shape[-1]] -= before
    size = torch.linalg.vector_norm(now, dim=-1)
    ratio = torch.linalg.vector_norm(difference, dim=-1) / torch.where(size > 0, size, 1.0)
    return float(ratio.max())


def safe_root(values: Tensor) -> Tensor:
    """The square root of eigenvalues, those that are 0 up to rounding as 0."""
    return values.clamp(min=0.0).sqrt()


def root_product(matvec: Operator, b: Tensor, tol: float, max_iter: int) -> tuple[Tensor, Krylov, float]:
    """A^½ b for a positive semi-definite A, the Krylov spaces that it was found in, and its last relative change.

    Raises:
        NotPositiveDefiniteError: A has an eigenvalue that is negative beyond rounding.
    """
    space, change = krylov(matvec, b, safe_root, tol, max_iter)
    smallest, largest = space.values[..., 0], space.values.abs().amax(-1)
    rounding = 10 * b.shape[-2] ** 0.5 * torch.finfo(b.dtype).eps
    if bool((smallest < -rounding * largest).any()):
        raise NotPositiveDefiniteError(
            f"the matrix has no square root: it has an eigenvalue of at most {float(smallest.min()):.3g}"
        )
    return space.expand(space.coefficients(safe_root)), space, change
