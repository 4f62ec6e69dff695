"""Laplace's approximation of a Gaussian process behind a logistic function, with a matrix and without.

Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, sections 3.4 and 5.5.1; RW below. Labels y are 0
and 1, f is the latent function at the samples and π its logistic function; W = π (1 - π), and g = y - π are minus the
second and the first derivatives of the likelihood's logarithm by f. At the mode f = K a with a = g. Where the two
differ still, K a is near the mode, and K g is not: K is large. Everything is computed with B = I + W^½ K W^½, whose
eigenvalues are 1 and more, and R = W^½ B⁻¹ W^½ = (K + W⁻¹)⁻¹.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.functional import softplus

from ..operators import DenseOperator, KernelOperator, LinearOperator, Report, RescaledOperator
from ..operators.solving import factorize
from ..solvers.problems import wide
from ._gaussian_process_base import error_of

Tensor = torch.Tensor

#: Shortest part of a Newton step that is tried.
SHORTEST = 2.0**-20
#: Largest part of a gradient that a Newton step may leave of it; less, near the end, makes the steps quadratic.
FORCING = 0.1


@dataclass(frozen=True)
class Mode:
    """Where the posterior is largest, or where Newton's method was stopped.

    Attributes:
        a, f: (N,), f = K a.
        value: the posterior's logarithm there without constants, Ψ (RW 3.12).
        residual: |a - g| / |g|.
        change: the largest change of f in the last step, relative to the largest f, or to 1 where that is more.
        iterations: Newton steps.
        solves: iterations of conjugate gradients in all of them.
        report: what the last linear system took.
    """

    a: Tensor
    f: Tensor
    value: float
    residual: float
    change: float
    iterations: int
    solves: int
    report: Report


def curvature(f: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(W^½, g, 1 - 2 π); dW/df is W (1 - 2 π)."""
    pi, other = f.sigmoid(), (-f).sigmoid()  # 1 - π cancels where π is near 1
    return (pi * other).sqrt(), torch.where(y > 0, other, -pi), other - pi


def height(a: Tensor, f: Tensor, y: Tensor) -> Tensor:
    """Ψ = log p(y|f) - ½ aᵀf, in float64."""
    return -softplus(wide(torch.where(y > 0, -f, f))).sum() - 0.5 * (wide(a) * wide(f)).sum()


class Laplace(ABC):
    """The approximation for one kernel.

    Args:
        kernel: K, (N, N); differentiable in what it is made of.
        y: labels 0 and 1, (N,), of its dtype.
        tol: residual at which Newton's method ends.
    """

    def __init__(self, kernel: KernelOperator, y: Tensor, tol: float) -> None:
        self.kernel, self.y, self.tol = kernel, y, tol

    @abstractmethod
    def product(self, v: Tensor) -> Tensor:
        """K v."""

    @abstractmethod
    def inverse(self, root: Tensor) -> Callable[[Tensor, float], tuple[Tensor, Report]]:
        """The function (v, tol) -> B⁻¹ v, for this W^½, with a residual of at most tol |v|."""

    def across(self, root: Tensor, v: Tensor, tol: float) -> tuple[Tensor, Report]:
        """x = (I - R K) v, which solves (I + W K) x = v, with a residual of at most tol |v|; without a W⁻¹.

        For B u = W^½ K v with a residual e, and x = v - W^½ u, this residual is W^½ e, and W is at most 1/4.
        """
        b = root * self.product(v)
        size = float(b.norm())
        if size == 0.0:
            return v, Report("none")
        solved, report = self.inverse(root)(b, min(FORCING, 2 * tol * float(v.norm()) / size))
        return v - root * solved, report

    @torch.no_grad()
    def mode(self, start: Tensor | None, max_iter: int) -> Mode:
        """Newton's method (RW algorithm 3.1) for the step rather than the place, which may be solved less accurately.

        The step from a is (I - R K)(g - a); it is shortened where Ψ would fall.

        Args:
            start: a to begin with, (N,); None for 0.
            max_iter: most steps.
        """
        y = self.y
        a = torch.zeros_like(y) if start is None else start
        f = self.product(a)
        value, solves, k, report = float(height(a, f, y)), 0, 0, Report("none")
        before = change = float("inf")
        rounding = torch.finfo(y.dtype).eps ** 0.4
        while True:
            root, g, _ = curvature(f, y)
            rest = g - a
            residual = float(rest.norm() / g.norm())
            stuck = residual < rounding and residual > before / 2 and change < rounding
            # A small gradient may come from a large change of f, where K is large and W is small.
            done = residual == 0.0 or (residual <= self.tol and change <= 10 * self.tol)
            if done or k == max_iter or stuck or not math.isfinite(residual):
                return Mode(a, f, value, residual, change, k, solves, report)
            step, report = self.across(root, rest, min(FORCING, max(residual, 0.3 * self.tol / residual)))
            rise = self.product(step)
            length, value = self._length(a, f, step, rise, value)
            if length == 0.0:
                return Mode(a, f, value, residual, change, k, solves, report)
            a, f, before = a + length * step, f + length * rise, residual
            change = length * float(rise.abs().max()) / max(1.0, float(f.abs().max()))
            solves, k = solves + report.iterations, k + 1

    def _length(self, a: Tensor, f: Tensor, step: Tensor, rise: Tensor, value: float) -> tuple[float, float]:
        """The part of a step after which Ψ is not lower, and Ψ there; 0 if there is none."""
        length = 1.0
        while length > SHORTEST:
            new = float(height(a + length * step, f + length * rise, self.y))
            if new >= value - 1e-7 * abs(value) ** 0.5:
                return length, new
            length /= 2
        return 0.0, value

    @abstractmethod
    def likelihood(self, mode: Mode, parameters: Tensor | None) -> tuple[float, Tensor | None, float, Report]:
        """Its logarithm (RW 3.32), the gradient by ``parameters``, the value's standard error, and what was done."""


class DenseLaplace(Laplace):
    """By Cholesky's decomposition."""

    def __init__(self, kernel: KernelOperator, y: Tensor, tol: float) -> None:
        super().__init__(kernel, y, tol)
        self.table = kernel.to_dense()
        self.fixed = self.table.detach()

    def product(self, v: Tensor) -> Tensor:
        return self.fixed @ v

    def factor(self, root: Tensor) -> tuple[Tensor, Report]:
        """Cholesky's factor of B."""
        return factorize(RescaledOperator(DenseOperator(self.fixed, symmetric=True), root).add_diagonal(1.0))

    def inverse(self, root: Tensor) -> Callable[[Tensor, float], tuple[Tensor, Report]]:
        factor, report = self.factor(root)
        return lambda v, tol: (torch.cholesky_solve(v[:, None], factor)[:, 0], report)

    def likelihood(self, mode: Mode, parameters: Tensor | None) -> tuple[float, Tensor | None, float, Report]:
        """RW algorithm 5.1: the derivative by the entries of K is ½ a aᵀ - ½ R + (I - R K) s₂ aᵀ."""
        root, _, bend = curvature(mode.f, self.y)
        factor, report = self.factor(root)
        value = mode.value - float(factor.diagonal().log().sum())
        if parameters is None:
            return value, None, 0.0, report
        r = root[:, None] * torch.cholesky_inverse(factor) * root
        half = torch.linalg.solve_triangular(factor, root[:, None] * self.fixed, upper=False)
        s2 = -0.5 * (self.fixed.diagonal() - half.square().sum(0)) * root.square() * bend
        q = s2 - r @ (self.fixed @ s2)
        by_entries = 0.5 * torch.outer(mode.a, mode.a) - 0.5 * r + torch.outer(q, mode.a)
        (gradient,) = torch.autograd.grad(self.table, parameters, by_entries)
        return value, gradient, 0.0, report


class IterativeLaplace(Laplace):
    """By conjugate gradients and random probes, in memory for vectors.

    Args:
        settings: the function of an operator that gives the arguments of its ``solve``; with ``likelihood=True`` those
            of its ``logdet``.
        n_probes, seed: of the determinant's estimate.
    """

    def __init__(
        self,
        kernel: KernelOperator,
        y: Tensor,
        tol: float,
        settings: Callable[..., dict[str, Any]],
        n_probes: int,
        seed: int,
    ) -> None:
        super().__init__(kernel, y, tol)
        self.settings, self.n_probes, self.seed = settings, n_probes, seed

    def matrix(self, root: Tensor) -> LinearOperator:
        """B."""
        return RescaledOperator(self.kernel, root).add_diagonal(1.0)

    def product(self, v: Tensor) -> Tensor:
        with torch.no_grad():
            return self.kernel @ v

    def inverse(self, root: Tensor) -> Callable[[Tensor, float], tuple[Tensor, Report]]:
        matrix = self.matrix(root)
        settings = self.settings(matrix)

        def solve(v: Tensor, tol: float) -> tuple[Tensor, Report]:
            with torch.no_grad():
                return matrix.solve(v, **{**settings, "tol": tol}, return_report=True)

        return solve

    def likelihood(self, mode: Mode, parameters: Tensor | None) -> tuple[float, Tensor | None, float, Report]:
        """The derivative of log det B by its own parameters and by f comes from the same probes (RW 5.23).

        By K at a fixed W it is tr(R dK), by W the diagonal of (K⁻¹ + W)⁻¹: both are derivatives of one estimate. What
        f contributes, s₂ᵀ df with df = (I - K R) dK a, is the derivative of qᵀ K a for q = (I - R K) s₂.
        """
        root, _, bend = curvature(mode.f, self.y)
        scale = root.clone().requires_grad_(parameters is not None)
        matrix = self.matrix(scale)
        settings = self.settings(matrix, likelihood=True)
        logdet, report = matrix.logdet(n_probes=self.n_probes, seed=self.seed, return_report=True, **settings)
        value = mode.value - 0.5 * float(logdet.detach())
        error = error_of(report)
        if parameters is None:
            return value, None, error, report
        by_kernel, by_root = torch.autograd.grad(-0.5 * logdet, [parameters, scale], retain_graph=True)
        q, other = self.across(root, by_root * (0.5 * root * bend), self.tol)  # dW^½/df = ½ W^½ (1 - 2 π)
        (rest,) = torch.autograd.grad(self.kernel @ mode.a, parameters, 0.5 * mode.a + q)
        if report.converged and not other.converged:
            report = replace(report, converged=False, reason=other.reason, residual=other.residual)
        return value, rest + by_kernel, error, report
