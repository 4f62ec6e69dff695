"""Conjugate gradients on many right-hand sides at once."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch

Tensor = torch.Tensor
Operator = Callable[[Tensor], Tensor]

log = logging.getLogger("kernops.solvers")

#: Iterations without a new smallest residual after which a column counts as stuck at its dtype's accuracy.
PATIENCE = 200


class ConvergenceWarning(UserWarning):
    """A linear system was solved less accurately than asked for."""


@dataclass(frozen=True)
class Solution:
    """What :func:`conjugate_gradients` found.

    Attributes:
        x: the solution, of the shape of the right-hand side.
        residual: for each right-hand side, |b - A x| / |b| computed anew from x (0 where b = 0), of shape (*B, E).
        iterations: number of products with the matrix that the slowest right-hand side took.
        converged: whether every residual is within the tolerance.
        reason: in words, why the iteration ended where it did not converge; else "".
    """

    x: Tensor
    residual: Tensor
    iterations: int
    converged: bool
    reason: str


def conjugate_gradients(
    matvec: Operator,
    b: Tensor,
    *,
    tol: float = 1e-6,
    max_iter: int | None = None,
    x0: Tensor | None = None,
    preconditioner: Operator | None = None,
    callback: Callable[[int, Tensor], object] | None = None,
    warn: bool = True,
) -> Solution:
    """Solve A x = b for a symmetric positive definite A that is known by its products only.

    All right-hand sides share the products, each has its own step lengths, and each stops on its own: one that has
    converged is not changed by the others going on.

    Args:
        matvec: the product of A with vectors (*B, N, E).
        b: right-hand sides (*B, N, E).
        tol: a right-hand side has converged when |b - A x| <= tol |b|.
        max_iter: largest number of iterations; None for 10 N, and no more than 10 000.
        x0: where to start; None for 0.
        preconditioner: the product with an approximate inverse of A.
        callback: called after each iteration with its number and the relative residuals (*B, E).
        warn: whether to emit a ``ConvergenceWarning`` if some right-hand side has not converged.
    """
    _check(b, tol, max_iter)
    limit = min(10 * b.shape[-2], 10_000) if max_iter is None else max_iter
    state = _State(matvec, b, x0, preconditioner or (lambda r: r), tol)
    # No residual is smaller than what rounding leaves of it.
    allowed = max(1.1 * tol, 100 * torch.finfo(b.dtype).eps)
    k, before = 0, float("inf")
    while True:
        while k < limit and state.active:
            state.step()
            k += 1
            if callback is not None:
                callback(k, state.relative)
        # The recurrence drifts away from the truth: what counts, and where it goes on from, is the answer's residual.
        residual = state.refresh()
        worst = float(residual.max()) if residual.numel() else 0.0
        if worst <= allowed or k >= limit or state.why:
            break
        if not worst <= before / 2:
            state.why = f"the rounding of {str(b.dtype).removeprefix('torch.')} leaves no smaller one"
            break
        before = worst
    converged = worst <= allowed
    reason = "" if converged else state.why or f"{limit} iterations were not enough"
    if not converged and warn:
        warnings.warn(
            f"conjugate gradients stopped at a relative residual of {worst:.1e} after {k} iterations, above the "
            f"tolerance {tol:.1e}: {reason}. A larger regularization (alpha) or float64 helps",
            ConvergenceWarning,
            stacklevel=3,
        )
    log.debug("conjugate gradients: %d iterations, residual %.2e", k, worst)
    return Solution(state.x, residual, k, converged, reason)


def _check(b: Tensor, tol: float, max_iter: int | None) -> None:
    if b.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"b must be float32 or float64, the dtypes that a linear system can be solved in; got {b.dtype}"
        )
    if b.ndim < 2:
        raise ValueError(f"b must have shape (..., N, E); got {tuple(b.shape)}")
    if not tol >= 0:
        raise ValueError(f"tol must be >= 0; got {tol}")
    if max_iter is not None and max_iter < 0:
        raise ValueError(f"max_iter must be None or >= 0; got {max_iter}")


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Scalar products of columns, accumulated in float64."""
    return (a.double() * b.double()).sum(-2) if a.dtype != torch.float64 and a.device.type != "mps" else (a * b).sum(-2)


def _norm(a: Tensor) -> Tensor:
    return torch.linalg.vector_norm(a, dim=-2)


class _State:
    """The iteration: x, its residual r, the direction p, and which columns are still going."""

    def __init__(self, matvec: Operator, b: Tensor, x0: Tensor | None, preconditioner: Operator, tol: float) -> None:
        self.matvec, self.preconditioner, self.b, self.tol = matvec, preconditioner, b, tol
        norm = _norm(b)
        self.scale = torch.where(norm > 0, norm, torch.ones_like(norm))
        self.why = ""
        self.x = torch.zeros_like(b) if x0 is None else x0.clone()
        self.start(b.clone() if x0 is None else b - matvec(x0))

    def start(self, r: Tensor) -> None:
        """Begin anew at x, whose residual is ``r``."""
        self.r = r
        self.z = self.preconditioner(r)
        self.p = self.z.clone()
        self.rz = _dot(r, self.z)
        self.relative = _norm(r) / self.scale
        finite = torch.isfinite(self.relative)
        if not bool(finite.all()):
            self.why = self.why or "the residual is not finite"
        self.going = (self.relative > self.tol) & finite
        self.best = self.relative
        self.since_best = torch.zeros_like(self.going, dtype=torch.int64)
        self.active = bool(self.going.any())

    def refresh(self) -> Tensor:
        """Replace the recurrence's residual by the true one; returns it relative to b."""
        self.start(self.b - self.matvec(self.x))
        return self.relative

    def step(self) -> None:
        ap = self.matvec(self.p)
        curvature = _dot(self.p, ap)
        positive = curvature > 0
        if bool((self.going & ~positive).any()):
            self.why = "the matrix is not positive definite to the accuracy of its dtype"
            self.going = self.going & positive
        zero = torch.zeros_like(curvature)
        alpha = torch.where(self.going, self.rz / torch.where(positive, curvature, zero + 1), zero).to(ap.dtype)[
            ..., None, :
        ]
        self.x = self.x + alpha * self.p
        self.r = self.r - alpha * ap
        self.z = self.preconditioner(self.r)
        rz = _dot(self.r, self.z)
        beta = torch.where(self.going, rz / torch.where(self.rz > 0, self.rz, zero + 1), zero).to(ap.dtype)[
            ..., None, :
        ]
        self.p = self.z + beta * self.p
        self.rz = rz
        self.relative = _norm(self.r) / self.scale
        self._retire()

    def _retire(self) -> None:
        better = self.relative < self.best
        self.best = torch.minimum(self.best, self.relative)
        self.since_best = torch.where(better, 0, self.since_best + 1)
        stuck = self.going & (self.since_best >= PATIENCE)
        if bool(stuck.any()):
            self.why = f"no progress in {PATIENCE} iterations"
        self.going = self.going & (self.relative > self.tol) & ~stuck
        self.active = bool(self.going.any())
