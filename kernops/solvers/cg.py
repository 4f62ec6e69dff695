"""Conjugate gradients on many right-hand sides at once."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from .problems import ConvergenceWarning, check_count, check_floats, check_number, dot, magnitude, norm

Tensor = torch.Tensor
Operator = Callable[[Tensor], Tensor]
#: (x, r, rᵀ M r for the preconditioner M) -> for each right-hand side a number that is to be small, (*B, E).
Measure = Callable[[Tensor, Tensor, Tensor], Tensor]

log = logging.getLogger("kernops.solvers")

#: Iterations without a new smallest residual after which a column counts as stuck at its dtype's accuracy.
PATIENCE = 200
NOT_FINITE = "the residual is not finite"
SINGULAR = "the matrix is not positive definite to the accuracy of its dtype"
#: Successive residuals whose scalar product is more than this share of their size have lost their orthogonality.
LOSS = 0.5
#: Least number of iterations between two computations of the true residual.
RESTART = 20
#: Columns that a product takes at once, about: those that have converged are left out as soon as so many are left over.
TILE = {"cpu": 64, "other": 128}
#: A right-hand side is scaled up no further than to where its start has entries of one by so much.
FAR = 2.0**-40
#: Products with the matrix that tell its norm, where a direction along which it is negative was met.
POWERS = 3


@dataclass(frozen=True)
class Solution:
    """What :func:`conjugate_gradients` found.

    Attributes:
        x: the solution, of the shape of the right-hand side.
        residual: for each right-hand side, |b - A x| / |b| computed anew from x (0 where b = 0), of shape (*B, E).
        iterations: number of iterations that the slowest right-hand side took.
        converged: whether every residual is within the tolerance.
        reason: in words, why the iteration ended where it did not converge; else "".
        indefinite: whether a direction was met along which the matrix is negative beyond rounding.
        steps: (alpha, beta) of the first iterations, (k, *B, E) each in float64; alpha is 0 from where a column has
            converged on. They are the Lanczos matrix of A, see :func:`kernops.solvers.log_quadrature`.
        start: the scalar products of the first residuals with their preconditioned selves, (*B, E); 0 where all are
            small enough from the start.
        rest: the residuals b - A x, (*B, N, E).
    """

    x: Tensor
    residual: Tensor
    iterations: int
    converged: bool
    reason: str
    indefinite: bool
    steps: tuple[Tensor, Tensor]
    start: Tensor
    rest: Tensor


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
    history: int = 0,
    measure: Measure | None = None,
) -> Solution:
    """Solve A x = b for a symmetric positive definite A that is known by its products only.

    All right-hand sides share the products, each has its own step lengths, and each stops on its own: one that has
    converged is not changed by the others going on. Scalar products are accumulated in float64. The residual of the
    recurrence drifts away from the true one; when successive residuals lose their orthogonality, and at the end, the
    true one is computed and the iteration goes on from there (Saad, Iterative Methods for Sparse Linear Systems, 2003,
    algorithm 9.1).

    Args:
        matvec: the product of A with vectors (*B, N, E).
        b: right-hand sides (*B, N, E), float32 or float64.
        tol: a right-hand side has converged when |b - A x| <= tol |b|.
        max_iter: largest number of iterations; None for 10 N, and no more than 10 000.
        x0: where to start, of the shape of ``b``; None for 0.
        preconditioner: the product with an approximate inverse of A.
        callback: called after each iteration with its number and the relative residuals (*B, E); True ends it.
        warn: whether to emit a ``ConvergenceWarning`` if some right-hand side has not converged.
        history: how many iterations to keep the step lengths of.
        measure: what takes the place of |b - A x| / |b|, for callers that look at the result themselves: of less than
            ``RESTART`` iterations the recurrence's residual, which is as accurate as a product, is taken for the true
            one.

    Raises:
        ValueError: an argument is of the wrong shape, dtype or range.
    """
    _check(b, tol, max_iter, x0)
    limit = min(10 * b.shape[-2], 10_000) if max_iter is None else max_iter
    # A column's squares must neither overflow nor vanish; a measure looks at columns as they are.
    unit = _unit(b, x0) if measure is None else None
    start = x0 if x0 is None or unit is None else x0 / unit
    columns = b if unit is None else b / unit
    state = _State(matvec, columns, start, preconditioner or (lambda r: r), tol, history, measure)
    # No residual is smaller than what rounding leaves of it.
    allowed = max(1.1 * tol, 100 * torch.finfo(b.dtype).eps) if measure is None else tol
    k, before = 0, float("inf")
    while True:
        while k < limit and state.active:
            state.step()
            k += 1
            if callback is not None and callback(k, state.relative) is True:
                state.why = "the callback asked for the end"
                break
        # The recurrence drifts away from the truth: what counts, and where it goes on from, is the answer's residual.
        drifted = k > 0 if measure is None else k >= RESTART
        residual = state.refresh() if drifted else state.relative
        worst = float(residual.max()) if residual.numel() else 0.0
        if worst <= allowed or k >= limit or state.why:
            break
        if not worst <= before / 2:
            state.why = f"the rounding of {str(b.dtype).removeprefix('torch.')} leaves no smaller one"
            break
        before = worst
    residual = state.retreat(residual)
    worst = float(residual.max()) if residual.numel() else 0.0
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
    steps = state.history.stacked()
    x, weight, rest = state.x, state.first, state.r
    if unit is not None:
        x, weight, rest = x * unit, weight * unit.squeeze(-2).to(weight.dtype).square(), rest * unit
    return Solution(x, residual, k, converged, reason, state.indefinite, steps, weight, rest)


def _unit(b: Tensor, x0: Tensor | None) -> Tensor:
    """What columns are divided by: powers of two."""
    unit = magnitude(b)
    if x0 is None:
        return unit
    return torch.maximum(unit, torch.where((x0 != 0).any(-2, keepdim=True), magnitude(x0) * FAR, 0.0))


def _check(b: Tensor, tol: float, max_iter: int | None, x0: Tensor | None) -> None:
    check_floats("b", b)
    if b.ndim < 2:
        raise ValueError(f"b must have shape (..., N, E); got {tuple(b.shape)}")
    if x0 is not None and (x0.shape != b.shape or x0.dtype != b.dtype or x0.device != b.device):
        raise ValueError(
            f"x0 must be as b is, {tuple(b.shape)} of {b.dtype} on {b.device}; "
            f"got {tuple(x0.shape)} of {x0.dtype} on {x0.device}"
        )
    check_number("tol", tol)
    check_count("max_iter", max_iter, 0, or_none=True)


class _History:
    """Step lengths of the iterations before the first restart, as many as are wanted."""

    def __init__(self, wanted: int, like: Tensor) -> None:
        self.wanted, self.like = wanted, like
        self.alpha: list[Tensor] = []
        self.beta: list[Tensor] = []

    def add(self, alpha: Tensor, beta: Tensor) -> None:
        if len(self.alpha) < self.wanted:
            self.alpha.append(alpha)
            self.beta.append(beta)

    def close(self) -> None:
        self.wanted = 0

    def stacked(self) -> tuple[Tensor, Tensor]:
        if not self.alpha:
            return self.like.new_zeros(0, *self.like.shape), self.like.new_zeros(0, *self.like.shape)
        return torch.stack(self.alpha), torch.stack(self.beta)


class _State:
    """The iteration: x, its residual r, the direction p, and which columns are still going.

    What decides about a column is a handful of numbers, the same ones for every iteration. They are brought to main
    memory in one piece, the only wait for a device in an iteration, and looked at there, by NumPy, which is quicker
    than torch for a few.
    """

    def __init__(
        self,
        matvec: Operator,
        b: Tensor,
        x0: Tensor | None,
        preconditioner: Operator,
        tol: float,
        history: int,
        measure: Measure | None,
    ) -> None:
        self.matvec, self.preconditioner, self.b, self.tol = matvec, preconditioner, b, tol
        length = norm(b)
        scale = torch.where(length > 0, length, torch.ones_like(length))
        self.measure: Measure = measure or (lambda x, r, rz: norm(r) / scale)
        #: Whether a preconditioned residual is needed to judge one, or its start to be told.
        self.eager = measure is not None or history > 0
        self.why = ""
        self.indefinite = False
        self.x = torch.zeros_like(b) if x0 is None else x0.clone()
        self.x0 = x0
        self.count = 0
        self.start(b.clone() if x0 is None else b - matvec(x0))
        self.first, self.first_relative = self.rz, self.relative
        self.history = _History(history, self.rz)
        #: Residuals that are larger are those of a matrix that is singular to rounding.
        with np.errstate(over="ignore"):
            self.farthest = self.seen / torch.finfo(b.dtype).eps
        #: Columns that met a direction along which A is not positive.
        self.broken = np.zeros(self.seen.shape, dtype=bool)
        #: The smallest true residual so far, and when it was found.
        self.milestone, self.reached = self.seen, np.zeros(self.seen.shape, dtype=np.int64)

    def start(self, r: Tensor) -> None:
        """Begin anew at x, whose residual is ``r``."""
        self.r, self.rz = r, dot(r[..., :0, :], r[..., :0, :])
        if self.eager:
            self.aim()
        self.relative = self.measure(self.x, r, self.rz)
        self.going = self.relative > self.tol
        self.best = self.seen = self.relative.detach().cpu().numpy()
        self.since_best = np.zeros(self.seen.shape, dtype=np.int64)
        self.since_start = 0
        #: Numbers of the columns that are multiplied still; None for all.
        self.some: Tensor | None = None
        self.active = (self.seen > self.tol).any()  # columns that are not numbers stop, the others do not
        if self.active and not self.eager:
            self.aim()
        if not np.isfinite(self.seen).all():
            self.why = self.why or NOT_FINITE

    def aim(self) -> None:
        """The first direction, which takes a product with the preconditioner."""
        self.z = self.p = self.preconditioner(self.r)
        self.rz = dot(self.r, self.z)

    def refresh(self) -> Tensor:
        """Replace the recurrence's residual by the true one; returns it relative to b."""
        self.history.close()
        self.start(self.b - self.matvec(self.x))
        better = self.seen < 0.9 * self.milestone
        self.milestone = np.where(better, self.seen, self.milestone)
        self.reached = np.where(better, self.count, self.reached)
        return self.relative

    def retreat(self, residual: Tensor) -> Tensor:
        """Go back to the start in columns that diverged; returns the relative residuals after that.

        The error falls in A's norm while residuals may grow, by no more than the root of A's condition number. Where
        they grew by more than that of a matrix that is singular to rounding, it is rounding that grew; and at
        all, where A was found not to be positive.
        """
        growth = torch.full_like(self.first_relative, torch.finfo(self.b.dtype).eps ** -0.5)
        growth = growth.masked_fill(self.there(self.broken), 1.0)
        most = self.first_relative * growth
        worse = torch.isfinite(residual) & (residual > most)
        if bool(worse.any()):
            self.x = torch.where(worse[..., None, :], torch.zeros_like(self.x) if self.x0 is None else self.x0, self.x)
            self.r = self.b - self.matvec(self.x)
        return torch.where(worse, self.first_relative, residual)

    def applied(self, product: Operator, v: Tensor) -> Tensor:
        """A product of the columns that are going still, and 0 for others, which nothing of it changes."""
        if self.some is None:
            return product(v)
        out = torch.zeros_like(v)
        return out.index_copy_(-1, self.some, product(v.index_select(-1, self.some)))

    def there(self, mask: np.ndarray) -> Tensor:
        """A mask of columns on the device."""
        return torch.from_numpy(np.ascontiguousarray(mask)).to(self.r.device)

    def narrow(self, going: np.ndarray) -> None:
        """Leave columns out of products where that is a tile less."""
        tile = TILE.get(self.r.device.type, TILE["other"])
        width = self.r.shape[-1] if self.some is None else len(self.some)
        if going.ndim == 1 and 0 < -(-int(going.sum()) // tile) < -(-width // tile):
            self.some = self.there(np.flatnonzero(going))

    def step(self) -> None:
        ap = self.applied(self.matvec, self.p)
        curvature = dot(self.p, ap)
        before, self.going = self.going, self.going & (curvature > 0)
        alpha = torch.where(self.going, self.rz / curvature, 0.0)
        self.x.addcmul_(_each(alpha, ap), self.p)
        self.r = torch.addcmul(self.r, _each(alpha, ap), ap, value=-1)
        z, self.z = self.z, self.applied(self.preconditioner, self.r)
        rz = dot(self.r, self.z)
        # Successive residuals are orthogonal, in the preconditioner's scalar product, until rounding takes over.
        overlap = dot(self.r, z) if self.since_start + 1 >= RESTART else torch.zeros_like(rz)
        beta = torch.where(self.going & (self.rz > 0), rz / self.rz, 0.0)
        self.p = torch.addcmul(self.z, _each(beta, ap), direction := self.p)
        self.rz = rz
        self.relative = torch.where(before, self.measure(self.x, self.r, rz), self.relative)
        facts = torch.stack([before.to(rz.dtype), curvature, rz, overlap, self.relative.to(rz.dtype)]).detach().cpu()
        self.going = self.going & (self.relative > self.tol)
        self.count += 1
        self.since_start += 1
        self.history.add(alpha, beta)
        self._judge(facts, direction)

    def _judge(self, facts: Tensor, direction: Tensor) -> None:
        """Look at an iteration's numbers: (5, *B, E) in main memory."""
        before, curvature, rz, overlap, relative = facts.numpy()
        asked = before > 0
        good = asked & (curvature > 0)
        if good.sum() < asked.sum():
            self._broke_down(asked, curvature, direction)
        self.seen = relative.astype(self.seen.dtype)
        going = good & (self.seen > self.tol)
        away = going & (self.seen > self.farthest)
        if away.any():  # before its numbers overflow
            self.why = self.why or SINGULAR
            going = self._stop(going, away)
        tired = going & self._tired()
        if tired.any():
            self.why = self.why or f"no progress in {PATIENCE} iterations"
            going = self._stop(going, tired)
        self.active = going.any()
        self.narrow(going)
        if self.since_start >= RESTART and (going & (np.abs(overlap) > LOSS * np.abs(rz))).any():
            self.refresh()

    def _broke_down(self, asked: np.ndarray, curvature: np.ndarray, direction: Tensor) -> None:
        """Why curvatures are not positive."""
        negative = asked & (curvature <= 0)
        self.broken = self.broken | negative
        if (asked & np.isnan(curvature)).any():
            self.why = NOT_FINITE
            return
        self.why = SINGULAR
        if (negative & (curvature < -self._rounding(direction))).any():
            self.why, self.indefinite = "the matrix is not positive definite", True

    def _stop(self, going: np.ndarray, some: np.ndarray) -> np.ndarray:
        """The columns that go on, without some."""
        self.going = self.going & ~self.there(some)
        return going & ~some

    def _tired(self) -> np.ndarray:
        """Which columns have not come nearer for long."""
        better = self.seen < self.best
        self.best = np.minimum(self.best, self.seen)
        self.since_best = np.where(better, 0, self.since_best + 1)
        stuck = self.since_best >= PATIENCE
        if self.since_start == self.count:  # the milestone was never tested
            return stuck
        return stuck | (self.count - self.reached >= 2 * PATIENCE)

    def _rounding(self, direction: Tensor) -> np.ndarray:
        """What rounding may make of p·Ap, for a matrix whose norm a few powers of it tell."""
        v = self.b
        for _ in range(POWERS):
            length = norm(v)
            v = self.matvec(v / torch.where(length > 0, length, 1.0)[..., None, :])
        size = norm(v).amax(-1, keepdim=True) * (10 * self.b.shape[-2] ** 0.5 * torch.finfo(v.dtype).eps)
        return (size * dot(direction, direction)).detach().cpu().numpy()


def _each(scalars: Tensor, like: Tensor) -> Tensor:
    """One number for each column, ready to multiply columns."""
    return scalars.to(like.dtype)[..., None, :]
