"""Linear systems of operators, and their derivatives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..backends.layout import broadcast
from ..solvers import (
    ConvergenceWarning,
    NotPositiveDefiniteError,
    NumericalWarning,
    Solution,
    conjugate_gradients,
    implicit_solve,
    memory_for,
)
from ..solvers.problems import check_count, check_floats, check_number, warn
from .base import LinearOperator
from .preconditioning import NOT_FINITE, PRECONDITIONERS, Preconditioner, make_preconditioner

Tensor = torch.Tensor

#: Up to this many rows a dense matrix is small, and Cholesky's decomposition both faster and more accurate.
SMALL = 2000
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
        rank: of the preconditioner, as far as it was needed; 0 for none, N for ``"cholesky"``.
        standard_error: of a log-determinant (*B,), from the spread of the probes; None where it is exact.
        n_short: probes of a few steps, beside those that were solved for.
        preconditioner: its kind; empty for none, and by Cholesky.
        nbytes: bytes that the preconditioner stores: of ``"cholesky"`` the whole table.
        note: in words, why the preconditioner is not what was asked for, or expected to be the quickest; else "".
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
    preconditioner: str = ""
    nbytes: int = 0
    note: str = ""


# --- systems ------------------------------------------------------------------------------------------------------
class System:
    """An operator with settings, as the functions of data that ``implicit_solve`` is told."""

    def __init__(self, operator: LinearOperator, settings: Settings, x0: Tensor | None = None) -> None:
        self.operator, self.settings, self.x0 = operator, settings, x0
        #: Right-hand sides that a preconditioner is for, all in all; one keeps the default.
        self.columns = 1
        self.made: Preconditioner | None = None
        self.solution: Solution | None = None
        kind = settings.preconditioner
        if isinstance(kind, Preconditioner) and not kind.fits(operator):
            raise ValueError(
                f"preconditioner is of {kind.matrix.n} rows, {kind.matrix.like.dtype}, {kind.matrix.like.device}; the "
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
            self.made = make_preconditioner(self.operator, kind, columns=self.columns)
        return self.made

    def solve(self, values: Sequence[Any], b: Tensor, history: int = 0) -> Tensor:
        """The solution, by conjugate gradients."""
        operator = self.operator.with_tensors(values)
        x0, self.x0 = self.x0, None  # derivatives start at 0
        settings, made = self.settings, self.preconditioner
        limit, before = settings.max_iter, 0
        if made is not None and made.kind == "cholesky" and x0 is None and not history and limit != 0:
            # As accurate as its dtype: one iteration, of which the first residual tells all that the next would ask.
            x0, before = made.solve(b), 1
        solution = conjugate_gradients(
            operator._matmul,
            b,
            tol=settings.tol,
            max_iter=None if limit is None else limit - before,
            x0=x0,
            preconditioner=None if made is None else made.solve,
            warn=False,
            history=history,
        )
        self.solution = replace(solution, iterations=before + solution.iterations)
        judge(self.solution, settings, made)
        return solution.x

    def report(self) -> Report:
        s = self.solution
        assert s is not None
        report = Report("cg", s.iterations, s.residual, s.converged, s.reason)
        made = self.preconditioner
        if made is None:
            return report
        return replace(report, rank=made.rank, preconditioner=made.kind, nbytes=made.nbytes, note=made.note)


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
        system.columns = max(1, b.numel() // max(1, b.shape[-2]))
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
