"""Linear systems of operators, what they are preconditioned with, and their derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ..backends.layout import broadcast
from ..solvers import (
    ConvergenceWarning,
    LowRankPlusDiagonal,
    NotPositiveDefiniteError,
    NumericalWarning,
    Solution,
    block_pivoted_cholesky,
    conjugate_gradients,
    implicit_solve,
    memory_for,
    nystrom,
    pivoted_cholesky,
)
from ..solvers.problems import check_count, check_floats, check_number, warn
from .base import LinearOperator

Tensor = torch.Tensor

#: Up to this many rows a dense matrix is small, and Cholesky's decomposition both faster and more accurate.
SMALL = 2000
#: Rank of a preconditioner, where none is asked for: at least the first. More for few points, where it costs little and
#: makes determinants more accurate: the second divided by their number. And more for many, whose products cost so much
#: more than a preconditioner does, on a processor above all: one for so many points, up to the last.
RANK, RANK_TIMES_POINTS, POINTS_OF_RANK, MOST_RANK = 100, 1_500_000, {"cpu": 50, "other": 200}, 500
NOT_FINITE = "the operator has NaN or infinite entries; look at its inputs"
METHODS = ("auto", "cholesky", "cg")


@dataclass(frozen=True)
class Settings:
    """What ``solve`` and ``inv_quad_logdet`` are told."""

    tol: float
    max_iter: int | None
    preconditioner: Any
    method: str
    n_probes: int = 0
    seed: int = 0
    n_short: int = 0

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(map(repr, METHODS))}; got {self.method!r}")
        check_number("tol", self.tol)
        check_count("max_iter", self.max_iter, 0, or_none=True)
        check_count("seed", self.seed)
        kind = self.preconditioner
        if not (kind is None or kind == "auto" or kind in PRECONDITIONERS or isinstance(kind, Preconditioner)):
            raise ValueError(
                f"preconditioner must be 'auto', {', '.join(map(repr, PRECONDITIONERS))}, None or what "
                f"preconditioner() returns; got {kind!r}"
            )


@dataclass(frozen=True)
class Report:
    """What a solver did.

    Attributes:
        method: ``"cholesky"`` or ``"cg"``.
        iterations: products with the operator for the slowest right-hand side; 0 by Cholesky.
        residual: |b - A x| / |b| of each right-hand side (*B, E), computed from x; None by Cholesky.
        converged: whether all are within the tolerance.
        reason: in words, why not; else "".
        jitter: what was added to the diagonal.
        rank: of the preconditioner, as far as it was needed; 0 for none.
        standard_error: of a log-determinant (*B,), from the spread of the probes; None where it is exact.
        n_short: probes of a few steps, beside those that were solved for.
    """

    method: str
    iterations: int = 0
    residual: Tensor | None = None
    converged: bool = True
    reason: str = ""
    jitter: float = 0.0
    rank: int = 0
    standard_error: Tensor | None = None
    n_short: int = 0


# --- preconditioners ----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Preconditioner:
    """An approximate inverse of an operator, made by :func:`make_preconditioner`.

    Attributes:
        kind: its name.
        rank: how many columns its low-rank part has.
        matrix: the matrix P whose inverse it is.
        pivots: for pivoted Cholesky, the rows of the kernel in which P is exact, (*B, rank).
        low: for pivoted Cholesky, L with P = L Lᵀ + D, (*B, N, rank).
    """

    kind: str
    rank: int
    matrix: LowRankPlusDiagonal
    pivots: Tensor | None = None
    low: Tensor | None = None

    @cached_property
    def weights(self) -> Tensor:
        """For pivoted Cholesky, F (*B, N, rank) with P = F (the rows of the pivots) + D."""
        assert self.low is not None and self.pivots is not None
        return _weights(self.low, self.pivots)

    def solve(self, r: Tensor) -> Tensor:
        """The product with vectors (*B, N, E)."""
        return self.matrix.solve(r)

    def fits(self, operator: LinearOperator) -> bool:
        """Whether vectors of an operator can be multiplied."""
        root = self.matrix.root
        return (self.matrix.n, root.dtype, root.device) == (operator.shape[-1], operator.dtype, operator.device)


Parts = tuple[Tensor, Tensor, "Tensor | None"]


def _pivoted(
    kernel: LinearOperator, diagonal: Tensor, rank: int, enough: float, generator: torch.Generator
) -> Parts:  # fmt: skip
    if kernel.batch:
        low, pivots = pivoted_cholesky(kernel._row, diagonal, rank)
    else:
        steps = kernel._columns, kernel._principal
        low, pivots = block_pivoted_cholesky(*steps, diagonal, rank, generator, enough)
    left = (diagonal - low.square().sum(-1)).clamp(min=0.0).mean(-1)
    return low, left, pivots


def _nystrom(
    kernel: LinearOperator, diagonal: Tensor, rank: int, enough: float, generator: torch.Generator
) -> Parts:  # fmt: skip
    return *nystrom(kernel._matmul, kernel.shape[:-1], rank, diagonal, generator), None


#: Name -> (operator, its diagonal, rank, trace of what may be left, generator) -> (L, the level of what L Lᵀ lacks, the
#: rows that it was made of).
PRECONDITIONERS: dict[str, Callable[[LinearOperator, Tensor, int, float, torch.Generator], Parts]] = {
    "pivoted_cholesky": _pivoted,
    "nystrom": _nystrom,
}
#: What a decomposition may leave of the kernel, as a share of the least diagonal that is added: more columns would
#: change neither iterations nor determinants.
ENOUGH = 1e-3


@torch.no_grad()
def make_preconditioner(
    operator: LinearOperator, kind: str = "pivoted_cholesky", rank: int | None = None, seed: int = 0
) -> Preconditioner:
    """The inverse of L Lᵀ + D, for an operator K + D with a diagonal D that was added: what conjugate gradients use.

    Args:
        operator: symmetric positive definite.
        kind: ``"pivoted_cholesky"``, which evaluates ``rank`` columns of K, O(N rank) in all, with pivots that are
            drawn many at a time (one by one for a batch); or ``"nystrom"``, one product of K with ``rank`` random
            vectors.
        rank: most columns of L; None for 100, or 1.5·10⁶/N, or up to 500 N/200 (on a processor N/50), if more.
            There are fewer where nothing that matters is left of K: beside D, or beside rounding.
        seed: of what is random.

    Returns:
        The preconditioner; nothing is differentiated through it.

    Example:
        >>> from kernops.kernels import RBF
        >>> from kernops.operators import KernelOperator
        >>> K = KernelOperator(RBF(0.2), torch.rand(500, 2)).add_diagonal(0.01)
        >>> x = K.solve(torch.ones(500), method="cg", preconditioner=K.preconditioner(rank=30))
    """
    operator._need_symmetric("a preconditioner")
    check_floats("a preconditioner's operator", torch.empty(0, dtype=operator.dtype))
    if kind not in PRECONDITIONERS:
        raise ValueError(f"kind must be one of {', '.join(map(repr, PRECONDITIONERS))}; got {kind!r}")
    check_count("rank", rank, 1, or_none=True)
    check_count("seed", seed)
    kernel, diagonal = operator._split()
    if kernel is None:
        assert diagonal is not None
        floor = diagonal.abs().amax(-1, keepdim=True) * torch.finfo(operator.dtype).eps
        usable = torch.maximum(diagonal, torch.where(floor > 0, floor, 1.0))  # conjugate gradients tell of what is not
        return Preconditioner(kind, 0, LowRankPlusDiagonal(diagonal.new_zeros(*diagonal.shape, 1), usable))
    n = operator.shape[-1]
    rank = default_rank(n, operator.device) if rank is None else min(int(rank), n)
    generator = torch.Generator(operator.device).manual_seed(seed)
    own = kernel._diagonal()
    enough = 0.0 if diagonal is None else ENOUGH * float(diagonal.min())
    if not bool(torch.isfinite(own).all()):
        raise ValueError(NOT_FINITE)
    low, left, pivots = PRECONDITIONERS[kind](kernel, own, rank, enough, generator)
    size = own.abs().mean(-1)
    if not bool(torch.isfinite(low).all() & torch.isfinite(size).all()):
        raise ValueError(NOT_FINITE)
    floor = torch.where(size > 0, size, 1.0) * (10 * torch.finfo(operator.dtype).eps)
    rest = torch.zeros_like(left) if kind == "pivoted_cholesky" and diagonal is not None else left
    whole = rest[..., None] if diagonal is None else diagonal + rest[..., None]
    matrix = LowRankPlusDiagonal(low, torch.maximum(whole, floor[..., None]))
    return Preconditioner(kind, low.shape[-1], matrix, pivots, None if pivots is None else low)


def default_rank(n: int, device: torch.device) -> int:
    """The rank of a preconditioner for ``n`` rows, where none is asked for."""
    each = POINTS_OF_RANK.get(device.type, POINTS_OF_RANK["other"])
    return min(n, max(RANK, RANK_TIMES_POINTS // max(n, 1), min(n // each, MOST_RANK)))


def _weights(low: Tensor, pivots: Tensor) -> Tensor:
    """F = L R⁻¹, where R is the triangle of L in the rows ``pivots``: L Lᵀ = F (L Lᵀ)[pivots]."""
    triangle = low.gather(-2, pivots[..., None].expand(*pivots.shape, low.shape[-1])).tril()
    used = triangle.diagonal(dim1=-2, dim2=-1) > 0
    triangle = triangle + torch.diag_embed((~used).to(low.dtype))
    return torch.linalg.solve_triangular(triangle, low, upper=False, left=False)


# --- systems ------------------------------------------------------------------------------------------------------
class System:
    """An operator with settings, as the functions of data that ``implicit_solve`` is told."""

    def __init__(self, operator: LinearOperator, settings: Settings, x0: Tensor | None = None) -> None:
        self.operator, self.settings, self.x0 = operator, settings, x0
        self.made: Preconditioner | None = None
        self.solution: Solution | None = None
        kind = settings.preconditioner
        if isinstance(kind, Preconditioner) and not kind.fits(operator):
            raise ValueError(
                f"preconditioner is of {kind.matrix.n} rows, {kind.matrix.root.dtype}, {kind.matrix.root.device}; the "
                f"operator has {operator.shape[-1]}, {operator.dtype}, {operator.device}"
            )

    def product(self, values: Sequence[Any], v: Tensor) -> Tensor:
        return self.operator.with_tensors(values)._matmul(v)

    @property
    def preconditioner(self) -> Preconditioner | None:
        """Made at the first use, and used for derivatives again."""
        kind = self.settings.preconditioner
        if kind is None or isinstance(kind, Preconditioner):
            return kind
        if self.made is None:
            self.made = make_preconditioner(self.operator, "pivoted_cholesky" if kind == "auto" else kind)
        return self.made

    def solve(self, values: Sequence[Any], b: Tensor, history: int = 0) -> Tensor:
        """The solution, by conjugate gradients."""
        operator = self.operator.with_tensors(values)
        x0, self.x0 = self.x0, None  # derivatives start at 0
        settings, made = self.settings, self.preconditioner
        solution = conjugate_gradients(
            operator._matmul,
            b,
            tol=settings.tol,
            max_iter=settings.max_iter,
            x0=x0,
            preconditioner=None if made is None else made.solve,
            warn=False,
            history=history,
        )
        self.solution = solution
        judge(solution, settings, made)
        return solution.x

    def report(self) -> Report:
        s = self.solution
        assert s is not None
        rank = 0 if self.preconditioner is None else self.preconditioner.rank
        return Report("cg", s.iterations, s.residual, s.converged, s.reason, 0.0, rank)


def judge(solution: Solution, settings: Settings, preconditioner: Preconditioner | None) -> None:
    """Raise for an indefinite operator or for NaN, warn of a residual above the tolerance."""
    if solution.converged:
        return
    raise_for(solution)
    worst = float(solution.residual.max())
    rank = 0 if preconditioner is None else preconditioner.rank
    warn(
        f"conjugate gradients stopped at a relative residual of {worst:.1e} after {solution.iterations} iterations, "
        f"above tol={settings.tol:g}: {solution.reason}. A larger add_diagonal, a preconditioner of higher rank (now "
        f"{rank}), a larger tol or max_iter, or float64 helps",
        ConvergenceWarning,
        stacklevel=2,
    )


def raise_for(solution: Solution) -> None:
    """Raise for an indefinite operator, or for NaN."""
    if solution.indefinite:
        raise NotPositiveDefiniteError(
            "the operator is not positive definite: conjugate gradients met a direction along which it is negative. A "
            "kernel that is positive definite, or a larger add_diagonal, is needed"
        )
    if "not finite" in solution.reason:
        raise ValueError(NOT_FINITE)


def right_hand_side(operator: LinearOperator, b: Tensor) -> tuple[Tensor, bool]:
    b, vector = operator._vectors("b", b, operator.shape[-1])
    check_floats("b", b)
    if not bool(torch.isfinite(b).all()):
        raise ValueError("b has NaN or infinite entries")
    return b.expand(*broadcast([operator.batch, tuple(b.shape[:-2])]), *b.shape[-2:]), vector


def is_dense(operator: LinearOperator, method: str) -> bool:
    few = SMALL if method == "auto" else 0
    return method == "cholesky" or operator.shape[-1] <= few


def solve(operator: LinearOperator, b: Tensor, x0: Tensor | None, settings: Settings) -> tuple[Tensor, Report]:
    """``LinearOperator.solve``."""
    operator._need_symmetric("solve")
    b, vector = right_hand_side(operator, b)
    if x0 is not None:
        start, _ = operator._vectors("x0", x0, operator.shape[-1])
        x0 = start.expand(b.shape)
        if not bool(torch.isfinite(x0).all()):
            raise ValueError("x0 has NaN or infinite entries")
    if is_dense(operator, settings.method):
        factor, report = factorize(operator)
        x = torch.cholesky_solve(b, factor.expand(*b.shape[:-2], *factor.shape[-2:]))
    else:
        system = System(operator, settings, x0)
        x = implicit_solve(system.product, system.solve, b, operator.tensors, operator._bilinear)
        report = system.report()
    return (x[..., 0] if vector else x), report


def factorize(operator: LinearOperator) -> tuple[Tensor, Report]:
    """Cholesky's factor of the dense matrix, of a larger diagonal if need be, with a warning.

    Raises:
        NotPositiveDefiniteError: no small diagonal is enough.
        ValueError: the matrix has NaN or infinite entries.
        OutOfMemoryError: the matrix and its factor do not fit.
    """
    n = operator.shape[-1]
    like = torch.empty(0, dtype=operator.dtype, device=operator.device)
    advice = "Conjugate gradients (method='cg', of an estimator solver='cg') need memory for a few vectors only"
    with memory_for(f"Cholesky's decomposition of {n} x {n}", 2 * n * math.prod(operator.shape[:-1]), like, advice):
        return _factorized(operator.to_dense())


def _factorized(dense: Tensor) -> tuple[Tensor, Report]:
    factor, info = torch.linalg.cholesky_ex(dense)
    if not bool(info.any()):
        return factor, Report("cholesky")
    if not bool(torch.isfinite(dense).all()):
        raise ValueError(NOT_FINITE)
    n = dense.shape[-1]
    size = float(dense.detach().diagonal(dim1=-2, dim2=-1).abs().mean())
    jitter = 0.0
    for power in range(4):
        jitter = 10.0 ** (power + 1) * n**0.5 * torch.finfo(dense.dtype).eps * size
        factor, info = torch.linalg.cholesky_ex(dense + jitter * torch.eye(n, dtype=dense.dtype, device=dense.device))
        if not bool(info.any()):
            warn(
                f"the operator is singular to the accuracy of its dtype; {jitter:.1e} was added to its diagonal. "
                "Equal points without noise are one cause; add_diagonal is the cure",
                NumericalWarning,
                stacklevel=2,
            )
            return factor, Report("cholesky", jitter=jitter)
    smallest = float(torch.linalg.eigvalsh(dense.detach()).min())
    raise NotPositiveDefiniteError(
        f"the operator is not positive definite: its smallest eigenvalue is {smallest:.3g}, and {jitter:.1e} on the "
        "diagonal was not enough. A kernel that is positive definite, or a larger add_diagonal, is needed"
    )
