"""The linear algebra of operators that is written with products alone: what it is called with, and what it says.

Each method is computed by a module of its own, which is imported when it is called: those import operators.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .preconditioning import Preconditioner

Tensor = torch.Tensor


class LinearAlgebra:
    """What ``LinearOperator`` inherits: solutions, determinants, roots and eigenvalues."""

    def preconditioner(
        self, kind: str = "pivoted_cholesky", rank: int | None = None, seed: int = 0, columns: int = 1
    ) -> Preconditioner:
        """An approximate inverse, to be used for several calls: see :func:`kernops.operators.make_preconditioner`."""
        from .preconditioning import make_preconditioner

        return make_preconditioner(self, kind, rank, seed, columns)  # type: ignore[arg-type]

    def solve(
        self,
        b: Tensor,
        *,
        tol: float = 1e-6,
        max_iter: int | None = None,
        preconditioner: Any = "auto",
        x0: Tensor | None = None,
        method: str = "auto",
        return_report: bool = False,
    ) -> Any:
        """x with A x = b, differentiable to any order in b and in what A is made of.

        Up to 2,000 rows by Cholesky's decomposition of the dense matrix; above by preconditioned conjugate gradients,
        each right-hand side with its own step lengths and end. A derivative is one more solve.

        Args:
            b: right-hand sides (N,) or (..., N, E).
            tol: conjugate gradients end where |b - A x| <= tol |b|, for each right-hand side.
            max_iter: most iterations; None for 10 N, and no more than 10 000.
            preconditioner: ``"pivoted_cholesky"``, ``"nystrom"``, ``"cholesky"``, ``None``, or what
                ``preconditioner()`` made before; ``"auto"`` is pivoted Cholesky for fewer than 32 right-hand sides, and
                the quickest kind for more: it may store the matrix, in a quarter of a GPU's free memory, or on a
                processor in 128 MB.
            x0: where conjugate gradients start, of the shape of b; None for 0.
            method: ``"auto"``, ``"cholesky"`` or ``"cg"``.
            return_report: return ``(x, Report)``.

        Returns:
            x, of the shape of b with the broadcast batch; with ``return_report``, what was done, too.

        Raises:
            ValueError: the operator is not known to be symmetric, b does not fit, or there are NaN or infinite numbers.
            NotPositiveDefiniteError: A has a negative eigenvalue, beyond rounding.

        Warns:
            ConvergenceWarning: a residual is above ``tol``; the message says how large it is, and what to change.
            NumericalWarning: Cholesky's decomposition needed a larger diagonal; the message says by how much.

        Example:
            >>> from kernops.kernels import RBF
            >>> from kernops.operators import KernelOperator
            >>> x = torch.linspace(0, 1, 3, dtype=torch.float64)[:, None]
            >>> A = KernelOperator(RBF(), x).add_diagonal(1.0)
            >>> A @ A.solve(torch.ones(3, dtype=torch.float64))
            tensor([1.0000, 1.0000, 1.0000], dtype=torch.float64)
        """
        from .solving import Settings, solve

        settings = Settings(tol, max_iter, preconditioner, method)
        x, report = solve(self, b, x0, settings)  # type: ignore[arg-type]
        return (x, report) if return_report else x

    def inv_quad_logdet(
        self,
        b: Tensor | None = None,
        *,
        n_probes: int = 10,
        n_short: int = 0,
        seed: int = 0,
        tol: float = 1e-6,
        max_iter: int | None = None,
        preconditioner: Any = "auto",
        method: str = "auto",
        return_report: bool = False,
    ) -> Any:
        """Σ bᵀ A⁻¹ b over the right-hand sides, and log det A: what a Gaussian process' likelihood is made of.

        Above 2,000 rows both come from one run of conjugate gradients, on b and on ``n_probes`` random vectors z of
        covariance P, the preconditioner: log det A = log det P + E[log-quadratic form of P^-½ A P^-½] by stochastic
        Lanczos quadrature, and its derivative E[(A⁻¹z)ᵀ dA (P⁻¹z)] (Gardner, Pleiss, Bindel, Weinberger and Wilson,
        GPyTorch, 2018, sections 4 and 4.1), less E[(P⁻¹z)ᵀ dP (P⁻¹z)] - tr(P⁻¹ dP) = 0 for a pivoted Cholesky
        decomposition without batch, which takes most of the noise away (Wenger, Pleiss, Hennig, Cunningham and
        Gardner, 2022). Where the standard error of log det A is above 2·10⁻⁴ N, more vectors are taken three steps far
        (multilevel Monte Carlo: Giles, 2015): as many as a third of the work allows, or 2·10⁶/N. The random
        vectors depend on ``seed`` alone. Derivatives of every order.

        Args:
            b: (N,) or (..., N, E); None for the determinant alone.
            n_probes: how many random vectors; the error falls with its square root, and with the preconditioner.
            n_short: least number of vectors that are taken a few steps far, where these tell enough. An optimizer that
                passes on what ``Report.n_short`` said sees one function, of which no part comes and goes.
            seed: of the random vectors.
            tol, max_iter, preconditioner, method, return_report: as for :meth:`solve`. With ``"cholesky"`` the
                determinant is exact to its dtype, while its derivative is a plain estimate, of which ``standard_error``
                tells nothing.

        Returns:
            ``(inv_quad, logdet)``, each (*B,); with ``return_report`` a third, with the standard error of ``logdet``.
        """
        from .likelihood import inv_quad_logdet
        from .solving import Settings

        settings = Settings(tol, max_iter, preconditioner, method, n_probes, seed, n_short)
        inv_quad, logdet, report = inv_quad_logdet(self, b, settings)  # type: ignore[arg-type]
        return (inv_quad, logdet, report) if return_report else (inv_quad, logdet)

    def logdet(self, **settings: Any) -> Any:
        """log det A (*B,), with the arguments of :meth:`inv_quad_logdet`; with ``return_report`` and the report."""
        _, *out = self.inv_quad_logdet(None, **settings)
        return tuple(out) if len(out) > 1 else out[0]

    def sqrt_matmul(self, b: Tensor, *, tol: float = 1e-4, max_iter: int = 200) -> Tensor:
        """A^½ b: a sample of N(0, A) for each column of standard normal numbers b, (N,) or (..., N, E).

        By Lanczos' method with full orthogonalisation; memory for ``max_iter`` vectors for each column, a few columns
        at a time. Differentiable once, by the Krylov spaces of b and of the gradient (Kressner, A Krylov subspace
        method for the approximation of bivariate matrix functions, 2019).

        Args:
            b: (N,) or (..., N, E).
            tol: the iteration ends where the result changes by less than this share in 5 steps.
            max_iter: most products with A.

        Raises:
            NotPositiveDefiniteError: A has a negative eigenvalue, beyond rounding.

        Warns:
            ConvergenceWarning: the result still changed by more than ``tol``.
        """
        from .spectral import sqrt_matmul

        return sqrt_matmul(self, b, tol, max_iter)  # type: ignore[arg-type]

    def eigsh(
        self, k: int = 6, *, largest: bool = True, tol: float | None = None, max_iter: int = 500, seed: int = 0
    ) -> tuple[Tensor, Tensor]:
        """The k largest (or smallest) eigenvalues (*B, k), outermost first, and their eigenvectors (*B, N, k).

        Dense up to 2,000 rows, by block Lanczos above. Differentiable once: by the eigenvectors if the gradient does
        not depend on their signs, nor on the choice among equal eigenvalues.

        Args:
            k: how many.
            largest: False for the smallest; those of a kernel's matrix lie close together and are found slowly.
            tol: residual |A u - λ u| relative to the outermost eigenvalue; None for 1e-8, in float32 1e-4.
            max_iter: most products with A, of k + 4 vectors each.
            seed: of the vectors that it starts from.

        Warns:
            ConvergenceWarning: a residual is above ``tol``.
        """
        from .spectral import eigsh

        return eigsh(self, k, largest, tol, max_iter, seed)  # type: ignore[arg-type]
