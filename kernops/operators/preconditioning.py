"""Approximate inverses of operators: which there are, and how they are made."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from ..solvers import (
    CholeskyFactor,
    LowRankPlusDiagonal,
    NumericalWarning,
    block_pivoted_cholesky,
    factorized_in_place,
    memory_for,
    nystrom,
    pivoted_cholesky,
)
from ..solvers.problems import check_count, check_floats, ran_out_of_memory, size_of, warn, wide
from .base import LinearOperator
from .choice import FEWEST, Choice, choose, default_rank, free_memory

Tensor = torch.Tensor

log = logging.getLogger("kernops.operators")

NOT_FINITE = "the operator has NaN or infinite entries; look at its inputs"


@dataclass(frozen=True)
class Preconditioner:
    """An approximate inverse of an operator, made by :func:`make_preconditioner`.

    Attributes:
        kind: its name.
        rank: how many columns its low-rank part has; N for ``"cholesky"``.
        matrix: the matrix P whose inverse it is.
        pivots: for pivoted Cholesky, the rows of the kernel in which P is exact, (*B, rank).
        low: for pivoted Cholesky, L with P = L Lᵀ + D, (*B, N, rank).
        note: in words, why it is not what was asked for or what would be quicker; else "".
    """

    kind: str
    rank: int
    matrix: LowRankPlusDiagonal | CholeskyFactor
    pivots: Tensor | None = None
    low: Tensor | None = None
    note: str = ""

    @cached_property
    def weights(self) -> Tensor:
        """For pivoted Cholesky, F (*B, N, rank) with P = F (the rows of the pivots) + D."""
        assert self.low is not None and self.pivots is not None
        return _weights(self.low, self.pivots)

    @property
    def nbytes(self) -> int:
        """Bytes that it stores."""
        return self.matrix.nbytes + sum(t.nbytes for t in (self.pivots, self.low) if t is not None)

    def solve(self, r: Tensor) -> Tensor:
        """The product with vectors (*B, N, E)."""
        return self.matrix.solve(r)

    def fits(self, operator: LinearOperator) -> bool:
        """Whether vectors of an operator can be multiplied."""
        like = self.matrix.like
        return (self.matrix.n, like.dtype, like.device) == (operator.shape[-1], operator.dtype, operator.device)


# --- of low rank --------------------------------------------------------------------------------------------------
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
LOW_RANK: dict[str, Callable[[LinearOperator, Tensor, int, float, torch.Generator], Parts]] = {
    "pivoted_cholesky": _pivoted,
    "nystrom": _nystrom,
}
#: Names of all kinds.
PRECONDITIONERS = (*LOW_RANK, "cholesky")
#: What a decomposition may leave of the kernel, as a share of the least diagonal that is added: more columns would
#: change neither iterations nor determinants.
ENOUGH = 1e-3


@torch.no_grad()
def make_preconditioner(
    operator: LinearOperator,
    kind: str = "pivoted_cholesky",
    rank: int | None = None,
    seed: int = 0,
    columns: int = 1,
) -> Preconditioner:
    """The inverse of L Lᵀ + D, for an operator K + D with a diagonal D that was added: what conjugate gradients use.

    Args:
        operator: symmetric positive definite.
        kind: ``"pivoted_cholesky"``, which evaluates ``rank`` columns of K, O(N rank) in all, with pivots that are
            drawn many at a time (one by one for a batch); ``"nystrom"``, one product of K with ``rank`` random
            vectors; ``"cholesky"``, the factor of the stored matrix in the operator's dtype, N² numbers and N³/3
            operations, which leaves one iteration or two; or ``"auto"``: pivoted Cholesky for fewer than 32
            right-hand sides, and otherwise what :func:`kernops.operators.choice.choose` expects to be the quickest of
            pivoted Cholesky of some rank and, within a share of the memory that is free, ``"cholesky"``.
        rank: most columns of L; None for 100, or 1.5·10⁶/N, or N/200 up to 2,000 (on a processor N/50 up to 500), if
            more. There are fewer where nothing that matters is left of K: beside D, or beside rounding. With a rank
            ``"auto"`` is ``"pivoted_cholesky"``; ``"cholesky"`` has none.
        seed: of what is random.
        columns: how many right-hand sides it is for, all in all; what ``"auto"`` goes by.

    Returns:
        The preconditioner; nothing is differentiated through it.

    Raises:
        OutOfMemoryError: ``"cholesky"`` was asked for, and N² numbers do not fit.

    Warns:
        NumericalWarning: ``"cholesky"`` was asked for and broke down; it is a pivoted Cholesky decomposition then.

    Example:
        >>> from kernops.kernels import RBF
        >>> from kernops.operators import KernelOperator
        >>> K = KernelOperator(RBF(0.2), torch.rand(500, 2)).add_diagonal(0.01)
        >>> x = K.solve(torch.ones(500), method="cg", preconditioner=K.preconditioner(rank=30))
    """
    operator._need_symmetric("a preconditioner")
    check_floats("a preconditioner's operator", torch.empty(0, dtype=operator.dtype))
    if kind != "auto" and kind not in PRECONDITIONERS:
        raise ValueError(f"kind must be 'auto' or one of {', '.join(map(repr, PRECONDITIONERS))}; got {kind!r}")
    check_count("rank", rank, 1, or_none=True)
    check_count("columns", columns, 1)
    check_count("seed", seed)
    kernel, diagonal = operator._split()
    if kernel is None:
        assert diagonal is not None
        name = "pivoted_cholesky" if kind == "auto" else kind
        floor = diagonal.abs().amax(-1, keepdim=True) * torch.finfo(operator.dtype).eps
        usable = torch.maximum(diagonal, torch.where(floor > 0, floor, 1.0))  # conjugate gradients tell of what is not
        return Preconditioner(name, 0, LowRankPlusDiagonal(diagonal.new_zeros(*diagonal.shape, 1), usable))
    if kind == "cholesky":
        return _asked_for(operator, kernel, diagonal, seed)
    made = _of_low_rank(kernel, diagonal, "pivoted_cholesky" if kind == "auto" else kind, rank, seed)
    if kind != "auto" or rank is not None or columns < FEWEST or operator.batch or diagonal is None:
        return made
    # Nothing is left to be estimated, or there are no numbers for it beside a diagonal that is not positive.
    if not made.rank or not float(diagonal.min()) > 0:
        return made
    return _chosen(operator, kernel, diagonal, made, seed, columns)


def _of_low_rank(
    kernel: LinearOperator, diagonal: Tensor | None, kind: str, rank: int | None, seed: int
) -> Preconditioner:  # fmt: skip
    n = kernel.shape[-1]
    rank = default_rank(n, kernel.device) if rank is None else min(int(rank), n)
    generator = torch.Generator(kernel.device).manual_seed(seed)
    own = kernel._diagonal()
    enough = 0.0 if diagonal is None else ENOUGH * float(diagonal.min())
    if not bool(torch.isfinite(own).all()):
        raise ValueError(NOT_FINITE)
    low, left, pivots = LOW_RANK[kind](kernel, own, rank, enough, generator)
    size = own.abs().mean(-1)
    if not bool(torch.isfinite(low).all() & torch.isfinite(size).all()):
        raise ValueError(NOT_FINITE)
    floor = torch.where(size > 0, size, 1.0) * (10 * torch.finfo(kernel.dtype).eps)
    rest = torch.zeros_like(left) if kind == "pivoted_cholesky" and diagonal is not None else left
    whole = rest[..., None] if diagonal is None else diagonal + rest[..., None]
    matrix = LowRankPlusDiagonal(low, torch.maximum(whole, floor[..., None]))
    return Preconditioner(kind, low.shape[-1], matrix, pivots, None if pivots is None else low)


def _weights(low: Tensor, pivots: Tensor) -> Tensor:
    """F = L R⁻¹, where R is the triangle of L in the rows ``pivots``: L Lᵀ = F (L Lᵀ)[pivots]."""
    triangle = low.gather(-2, pivots[..., None].expand(*pivots.shape, low.shape[-1])).tril()
    used = triangle.diagonal(dim1=-2, dim2=-1) > 0
    triangle = triangle + torch.diag_embed((~used).to(low.dtype))
    return torch.linalg.solve_triangular(triangle, low, upper=False, left=False)


# --- of the stored matrix -----------------------------------------------------------------------------------------
def _stored(operator: LinearOperator) -> CholeskyFactor | None:
    """Cholesky's factor of the matrix, one table of N² numbers; None where it breaks down."""
    table = torch.empty(operator.shape, dtype=operator.dtype, device=operator.device)
    operator._dense_into(table)
    return factorized_in_place(table)


def _asked_for(operator: LinearOperator, kernel: LinearOperator, diagonal: Tensor | None, seed: int) -> Preconditioner:
    n, like = operator.shape[-1], torch.empty(0, dtype=operator.dtype, device=operator.device)
    advice = "preconditioner='pivoted_cholesky' needs memory for some vectors only"
    with memory_for(f"the preconditioner 'cholesky' of {n} x {n}", math.prod(operator.shape), like, advice):
        factor = _stored(operator)
    if factor is not None:
        return Preconditioner("cholesky", n, factor)
    made = _of_low_rank(kernel, diagonal, "pivoted_cholesky", None, seed)
    note = _broke_down(operator)
    helps = "More noise (add_diagonal)" + " or float64" * (operator.dtype == torch.float32)
    warn(f"{note}, of rank {made.rank}. {helps} helps", NumericalWarning, stacklevel=2)
    return replace(made, note=note)


def _broke_down(operator: LinearOperator) -> str:
    dtype = str(operator.dtype).removeprefix("torch.")
    return f"Cholesky's decomposition broke down in {dtype}: the preconditioner is a pivoted Cholesky decomposition"


def _chosen(
    operator: LinearOperator, kernel: LinearOperator, diagonal: Tensor, made: Preconditioner, seed: int, columns: int
) -> Preconditioner:  # fmt: skip
    """What is the quickest for so many right-hand sides, where ``made`` is the default for few of them."""
    device, size = operator.device, operator.dtype.itemsize
    rest, decay = _left_by(made, kernel, diagonal)
    n = operator.shape[-1]
    choice = choose(n, columns, device.type, size, free_memory(device), made.rank, rest, decay)
    log.debug("preconditioner of %d points for %d right-hand sides: %s", n, columns, choice)
    if (choice.kind, choice.rank) == (made.kind, made.rank):
        return made
    return _of_choice(operator, kernel, diagonal, made, seed, choice)


def _left_by(made: Preconditioner, kernel: LinearOperator, diagonal: Tensor) -> tuple[float, float]:
    """The trace of D^-½ (K - L Lᵀ) D^-½, and the p of r⁻ᵖ by which it fell over the last half of the columns of L."""
    assert made.low is not None
    half = made.rank // 2
    left = kernel._diagonal() - made.low[:, :half].square().sum(-1)
    after = left - made.low[:, half:].square().sum(-1)
    before, rest = (float(wide(t.clamp(min=0.0) / diagonal).sum()) for t in (left, after))
    return rest, math.log2(before / rest) if half and 0 < rest < before else 0.0


def _of_choice(
    operator: LinearOperator,
    kernel: LinearOperator,
    diagonal: Tensor,
    made: Preconditioner,
    seed: int,
    choice: Choice,
) -> Preconditioner:
    note = ""
    try:
        if choice.kind != "cholesky":
            return _of_low_rank(kernel, diagonal, choice.kind, choice.rank, seed)
        factor = _stored(operator)
        if factor is not None:
            return Preconditioner("cholesky", choice.rank, factor)
        note = _broke_down(operator)
    except (MemoryError, RuntimeError) as error:
        if not ran_out_of_memory(error):
            raise
        note = f"memory was too short for {choice.kind} of rank {choice.rank} ({size_of(choice.nbytes)})"
    log.debug("%s", note)
    return replace(made, note=note)
