"""What conditioning leaves of variances: quadratic forms of an inverse, and how certain they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..solvers import ConvergenceWarning, conjugate_gradients
from ..solvers.problems import check_floats, dot, norm, warn, wide
from .base import LinearOperator
from .preconditioning import Preconditioner
from .solving import Settings, System, factorize, is_dense, raise_for

Tensor = torch.Tensor

#: Columns that are solved for at once; and with Cholesky's factor, whose triangular solutions of 1,000 columns take 1.5
#: times those of 500 on a GPU.
COLUMNS, COLUMNS_OF_FACTOR = {"cpu": 128, "other": 512}, {"cpu": 128, "other": 1024}
#: What rounding makes of a quadratic form cᵀ x for A x = c, in units of the dtype's accuracy, of A's largest entry, and
#: of |x|² + 2 |x| + cᵀ x: where entries of A and of c are rounded on their own, their errors add up as random ones do,
#: to the Frobenius norm of x xᵀ and to the norm of x; where they are rounded alike, to a share of the form.
ROUNDING = 2.0
#: A share of a variance that rounding may spoil without being told: half of it in a standard deviation.
ROUNDED = 1e-2


def at_once(device: torch.device, preconditioner: Preconditioner | None) -> int:
    """Columns that are solved for at once, where memory is not short."""
    factor = preconditioner is not None and preconditioner.kind == "cholesky"
    table = COLUMNS_OF_FACTOR if factor else COLUMNS
    return table.get(device.type, table["other"])


@dataclass(frozen=True)
class Forms:
    """Quadratic forms cᵀ A⁻¹ c of columns c.

    Attributes:
        x: A⁻¹ c, as far as it is needed, (*B, N, E).
        rest: c - A x, (*B, N, E).
        value: the forms, (*B, E), in float64.
        error: what the prior's variance less the form may be off by, relative to itself, (*B, E).
        iterations: of the slowest column.
    """

    x: Tensor
    rest: Tensor
    value: Tensor
    error: Tensor
    iterations: int


def quadratic_forms(
    operator: LinearOperator,
    columns: Tensor,
    prior: Tensor,
    accuracy: float,
    preconditioner: Preconditioner | None,
    max_iter: int | None = None,
) -> Forms:
    """cᵀ A⁻¹ c by conjugate gradients, so that a variance less the form is accurate to ``accuracy`` of itself.

    A variance is what is left of a prior's when the form is taken away, and may be small beside both. For an x with the
    residual r = c - A x, the form is (c + r)ᵀ x + rᵀ A⁻¹ r. The last term is what is not known; it is at most rᵀ P⁻¹ r
    for a P with P ≤ A in the sense of quadratic forms, which holds for a pivoted Cholesky decomposition of a part of A
    (A - P is a Schur complement), and for the diagonal of a part that was added. Conjugate gradients with P know that
    number anyway. They go on until it is small beside what is left of the variance, or beside what rounding makes of
    the form, which ``Forms.error`` counts. With ``"cholesky"`` they begin at its solution, whose residual, by a product
    with A, mostly is small enough: one iteration.

    Args:
        operator: A, symmetric positive definite.
        columns: c, (*B, N, E).
        prior: what the forms are taken from, (*B, E).
        accuracy: see above.
        preconditioner: P, or None.
        max_iter: most iterations.
    """
    judged = _Judged(operator, columns, prior, accuracy, preconditioner)
    x = None
    if preconditioner is not None and preconditioner.kind == "cholesky" and max_iter != 0:
        x = preconditioner.solve(columns)  # as accurate as its dtype: the product with A itself tells how much
        found = judged.forms(x, columns - operator._matmul(x), None, 1)
        if bool((judged.measure(found.x, found.rest, None) <= 1).all()):
            return found
    solution = conjugate_gradients(
        operator._matmul,
        columns,
        tol=1.0,
        max_iter=max_iter if x is None or max_iter is None else max_iter - 1,
        x0=x,
        preconditioner=None if preconditioner is None else preconditioner.solve,
        warn=False,
        measure=judged.measure,
    )
    if not solution.converged:
        raise_for(solution)
    done = solution.iterations + (x is not None)
    r = solution.rest
    rz = dot(r, preconditioner.solve(r)) if preconditioner is not None and judged.by_part else None
    return judged.forms(solution.x, r, rz, done)


class _Judged:
    """How far quadratic forms are known; the arguments are those of :func:`quadratic_forms`."""

    def __init__(
        self,
        operator: LinearOperator,
        columns: Tensor,
        prior: Tensor,
        accuracy: float,
        preconditioner: Preconditioner | None,
    ) -> None:
        eps = torch.finfo(columns.dtype).eps
        self.columns, self.accuracy, self.total = columns, accuracy, wide(prior)
        #: Whether P ≤ A: not for Cholesky's factor, which rounding may have made larger.
        self.by_part = preconditioner is not None and preconditioner.kind == "pivoted_cholesky"
        diagonal = operator._split()[1]
        #: Below A, where it is positive.
        self.diagonal = diagonal if diagonal is not None and not self.by_part and bool((diagonal > 0).all()) else None
        self.least = self.total.abs().amax() * eps if prior.numel() else 0.0
        self.unit = wide(operator._diagonal().abs().amax(-1, keepdim=True)) * (ROUNDING * eps)

    def unknown(self, r: Tensor, rz: Tensor | None) -> Tensor:
        """What rᵀ A⁻¹ r is at most, of r and of its scalar product with P⁻¹ r."""
        if self.by_part:
            assert rz is not None
            return rz
        if self.diagonal is not None:
            return (wide(r).square() / wide(self.diagonal)[..., None]).sum(-2)
        # Nothing is known to be below A: a small residual, of a matrix whose condition number is not too large.
        return wide(norm(r)).square() * 1e3

    def parts(self, x: Tensor, r: Tensor, rz: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The form, what is left of the variance, what is unknown, and what rounding makes of it."""
        form, square = dot(self.columns + r, x), dot(x, x)
        rounding = self.unit * (square + 2 * square.sqrt() + form.abs())
        return form, (self.total - form).clamp(min=self.least), self.unknown(r, rz), rounding

    def measure(self, x: Tensor, r: Tensor, rz: Tensor | None) -> Tensor:
        """What is to be at most one."""
        _, left, unknown, rounding = self.parts(x, r, rz)
        return unknown / torch.maximum(self.accuracy * left, rounding)

    def forms(self, x: Tensor, r: Tensor, rz: Tensor | None, iterations: int) -> Forms:
        form, left, unknown, rounding = self.parts(x, r, rz)
        spoilt = rounding / left
        return Forms(x, r, form, unknown / left + torch.where(spoilt > ROUNDED, spoilt, 0.0), iterations)


@dataclass(frozen=True)
class Variances:
    """What :func:`posterior_variance` found.

    Attributes:
        value: the variances, (M,).
        error: what they may be off by at most, relative to themselves; 0 by Cholesky's decomposition.
        iterations: of conjugate gradients; 0 by Cholesky's decomposition.
    """

    value: Tensor
    error: float
    iterations: int


@torch.no_grad()
def posterior_variance(
    operator: LinearOperator,
    across: LinearOperator,
    prior: Tensor,
    *,
    accuracy: float = 1e-3,
    max_iter: int | None = None,
    preconditioner: Any = "auto",
    method: str = "auto",
) -> Variances:
    """What is left of the variances of new points when those that A is of are known: prior - diag(C A⁻¹ Cᵀ).

    Conjugate gradients end where a bound of the error is below ``accuracy`` of the variance itself, see
    :func:`kernops.operators.variance.quadratic_forms`, rather than at a residual. Not differentiable.

    Args:
        operator: A (N, N), with its noise.
        across: C (M, N), the kernel of new points with those of A.
        prior: variances of the new points, (M,).
        accuracy: how accurate variances are to be, relative to themselves.
        max_iter: most iterations.
        preconditioner, method: as for :meth:`LinearOperator.solve`.

    Raises:
        ValueError: shapes do not fit, or A is not known to be symmetric.
        NotPositiveDefiniteError: A has a negative eigenvalue.

    Warns:
        ConvergenceWarning: a variance may be off by more than twice ``accuracy``; the message says by how much.

    Example:
        >>> from kernops.kernels import RBF
        >>> from kernops.operators import KernelOperator
        >>> x, new = torch.linspace(0, 1, 5)[:, None], torch.tensor([[0.5], [9.0]])
        >>> A = KernelOperator(RBF(0.3), x).add_diagonal(0.1)
        >>> posterior_variance(A, KernelOperator(RBF(0.3), new, x), torch.ones(2)).value
        tensor([0.0666, 1.0000])
    """
    operator._need_symmetric("posterior_variance")
    check_floats("an operator", torch.empty(0, dtype=operator.dtype))
    m, n = across.shape[-2:]
    if n != operator.shape[-1] or prior.shape != (m,) or across.batch or operator.batch:
        raise ValueError(
            f"operator, across and prior must have shapes (N, N), (M, N) and (M,); got {operator.shape}, "
            f"{across.shape} and {tuple(prior.shape)}"
        )
    if not accuracy > 0:
        raise ValueError(f"accuracy must be > 0; got {accuracy}")
    settings = Settings(0.0, max_iter, preconditioner, method)
    out = wide(prior).clone()
    dense = is_dense(operator, method)
    factor = factorize(operator)[0] if dense else None
    made = None
    if not dense:
        system = System(operator, settings)
        system.columns = max(1, m)
        made = system.preconditioner
    errors, iterations = [out.new_zeros(1)], 0
    step = at_once(operator.device, made)
    for start in range(0, m, step):
        rows = slice(start, min(start + step, m))
        columns = across[rows, :].to_dense().mT
        if factor is not None:
            form = wide(torch.linalg.solve_triangular(factor, columns, upper=False)).square().sum(-2)
        else:
            found = quadratic_forms(operator, columns, prior[rows], accuracy, made, max_iter)
            form, iterations = found.value, max(iterations, found.iterations)
            errors.append(found.error)
        out[rows] -= form
    error = float(torch.cat(errors).max())
    if error > 2 * accuracy:
        warn(
            f"some variances are known to {error:.1e} of themselves only, above accuracy={accuracy:g}; they may be too "
            "large. More noise, a preconditioner of higher rank, a larger max_iter or float64 helps",
            ConvergenceWarning,
            stacklevel=2,
        )
    return Variances(out.clamp(min=0.0).to(prior.dtype), error, iterations)
