"""What conditioning leaves of variances: quadratic forms of an inverse, and how certain they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..solvers import ConvergenceWarning, conjugate_gradients
from ..solvers.problems import check_floats, dot, norm, warn, wide
from .base import LinearOperator
from .solving import Preconditioner, Settings, System, factorize, is_dense, raise_for

Tensor = torch.Tensor

#: Columns that are solved for at once.
COLUMNS = {"cpu": 128, "other": 512}
#: What rounding makes of a quadratic form cᵀ x for A x = c, in units of the dtype's accuracy, of A's largest entry, and
#: of |x|² + 2 |x| + cᵀ x: where entries of A and of c are rounded on their own, their errors add up as random ones do,
#: to the Frobenius norm of x xᵀ and to the norm of x; where they are rounded alike, to a share of the form.
ROUNDING = 2.0
#: A share of a variance that rounding may spoil without being told: half of it in a standard deviation.
ROUNDED = 1e-2


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
    the form, which ``Forms.error`` counts.

    Args:
        operator: A, symmetric positive definite.
        columns: c, (*B, N, E).
        prior: what the forms are taken from, (*B, E).
        accuracy: see above.
        preconditioner: P, or None.
        max_iter: most iterations.
    """
    eps = torch.finfo(columns.dtype).eps
    below = _part_below(operator, preconditioner)
    total = wide(prior)
    least = total.abs().amax() * eps if prior.numel() else 0.0
    size = wide(operator._diagonal().abs().amax(-1, keepdim=True))
    unit = size * (ROUNDING * eps)

    def parts(x: Tensor, r: Tensor, rz: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        form = dot(columns + r, x)
        square = dot(x, x)
        return form, (total - form).clamp(min=least), below(r, rz), unit * (square + 2 * square.sqrt() + form.abs())

    def measure(x: Tensor, r: Tensor, rz: Tensor) -> Tensor:
        _, left, unknown, rounding = parts(x, r, rz)
        return (unknown / torch.maximum(accuracy * left, rounding)).to(rz.dtype)

    solution = conjugate_gradients(
        operator._matmul,
        columns,
        tol=1.0,
        max_iter=max_iter,
        preconditioner=None if preconditioner is None else preconditioner.solve,
        warn=False,
        measure=measure,
    )
    if not solution.converged:
        raise_for(solution)
    x, r = solution.x, solution.rest
    z = r if preconditioner is None else preconditioner.solve(r)
    form, left, unknown, rounding = parts(x, r, dot(r, z))
    spoilt = rounding / left
    return Forms(x, r, form, unknown / left + torch.where(spoilt > ROUNDED, spoilt, 0.0), solution.iterations)


def _part_below(
    operator: LinearOperator, preconditioner: Preconditioner | None
) -> Callable[[Tensor, Tensor], Tensor]:  # fmt: skip
    """What rᵀ A⁻¹ r is at most, of r and of its scalar product with P⁻¹ r."""
    if preconditioner is not None and preconditioner.kind == "pivoted_cholesky":
        return lambda r, rz: rz
    diagonal = operator._split()[1]
    if diagonal is not None:
        weight = wide(diagonal)[..., None]
        return lambda r, rz: (wide(r).square() / weight).sum(-2)
    # Nothing is known to be below A: a small residual, of a matrix whose condition number is not too large.
    return lambda r, rz: wide(norm(r)).square() * 1e3


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
    made = None if dense else System(operator, settings).preconditioner
    errors, iterations = [out.new_zeros(1)], 0
    step = COLUMNS.get(operator.device.type, COLUMNS["other"])
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
