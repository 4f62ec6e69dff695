"""Quadratic forms and determinants of operators, and their derivatives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..solvers import implicit_solve, log_quadrature
from ..solvers.implicit import keep, kept, pull_back
from ..solvers.problems import check_floats, wide
from .base import LinearOperator
from .solving import Report, Settings, System, factorize, is_dense, right_hand_side

Tensor = torch.Tensor

#: Most iterations of conjugate gradients whose Lanczos matrix is used.
QUADRATURE = 200


def inv_quad_logdet(
    operator: LinearOperator, b: Tensor | None, settings: Settings
) -> tuple[Tensor, Tensor, Report]:  # fmt: skip
    """``LinearOperator.inv_quad_logdet``."""
    operator._need_symmetric("logdet")
    check_floats("an operator with a determinant", torch.empty(0, dtype=operator.dtype))
    n = operator.shape[-1]
    if b is None:
        b = torch.zeros(*operator.batch, n, 0, dtype=operator.dtype, device=operator.device)
    b, _ = right_hand_side(operator, b)
    if is_dense(operator, settings.method):
        factor, report = factorize(operator)
        half = torch.linalg.solve_triangular(factor, b, upper=False)
        logdet = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return half.square().sum((-2, -1)), logdet.expand(b.shape[:-2]), report
    if settings.n_probes < 1:
        raise ValueError(f"n_probes must be a whole number >= 1; got {settings.n_probes}")
    system = Likelihood(operator, settings)
    inv_quad, logdet = _InvQuadLogdet.apply(system, b, *operator.tensors)
    report = system.report()
    return inv_quad, logdet, Report(**{**vars(report), "standard_error": system.standard_error})


class Likelihood(System):
    """A system that is solved for right-hand sides and for random probes."""

    standard_error: Tensor | None = None

    def probes(self, batch: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor | float]:
        """z of covariance P, P⁻¹ z, and log det P for the preconditioner P; for none, random signs, themselves, 0."""
        operator, made = self.operator, self.preconditioner
        generator = torch.Generator(operator.device).manual_seed(self.settings.seed)
        count = self.settings.n_probes
        if made is not None:
            z = made.matrix.sample(count, batch, generator)
            return z, made.solve(z), made.matrix.logdet()
        shape = (*batch, operator.shape[-1], count)
        z = torch.randint(0, 2, shape, generator=generator, device=operator.device).to(operator.dtype) * 2 - 1
        return z, z, 0.0

    def evaluate(self, values: Sequence[Any], b: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """(bᵀ A⁻¹ b, log det A, A⁻¹ b, A⁻¹ z, z, P⁻¹ z)."""
        z, w, base = self.probes(tuple(b.shape[:-2]))
        found = self.solve(values, torch.cat([b, z], -1), QUADRATURE)
        assert self.solution is not None
        count = b.shape[-1]
        (alpha, beta), start = self.solution.steps, self.solution.start
        each = log_quadrature(alpha[..., count:], beta[..., count:], start[..., count:])
        self.standard_error = each.std(-1) / each.shape[-1] ** 0.5 if each.shape[-1] > 1 else None
        logdet = (each.mean(-1) + base).to(b.dtype)
        u, s = found[..., :count], found[..., count:]
        inv_quad = (wide(u) * wide(b)).sum((-2, -1)).to(b.dtype)
        return inv_quad, logdet, u, s, z, w

    @property
    def controlled(self) -> bool:
        """Whether the preconditioner is differentiated to reduce the variance of gradients."""
        made = self.preconditioner
        return made is not None and made.pivots is not None and not self.operator.batch

    def outputs(self, values: Sequence[Any], v: Tensor) -> list[Tensor]:
        """What the gradient is made of: the product with ``v``, and what is controlled."""
        return [self.operator.with_tensors(values)._matmul(v), *self.controls(values, v)]

    def controls(self, values: Sequence[Any], v: Tensor) -> list[Tensor]:
        """Rows of the kernel, and the diagonal that was added; nothing where nothing is controlled."""
        if not self.controlled:
            return []
        assert self.preconditioner is not None and self.preconditioner.pivots is not None
        kernel, diagonal = self.operator.with_tensors(values)._split()
        assert kernel is not None
        rows = kernel._columns(self.preconditioner.pivots)
        return [rows] if diagonal is None else [rows, diagonal]

    def control(self, w: Tensor, h: Tensor) -> list[Tensor]:
        """The cotangents of the rows C of the kernel and of D that turn the estimate of tr(A⁻¹ dA) into a better one.

        tr(P⁻¹ dP) - mean(wᵀ dP w) has the mean 0, since w = P⁻¹ z, and nearly the fluctuations of the estimate where P
        is near A (Wenger, Pleiss, Hennig, Cunningham and Gardner, Preconditioning for scalable Gaussian process
        hyperparameter optimization, 2022, section 3). For P = C F ᵀ + D, with F = C Kₚₚ⁻¹ of the rows p,
        dP = dC Fᵀ + F dCᵀ - F dKₚₚ Fᵀ + dD.
        """
        if not self.controlled:
            return []
        made = self.preconditioner
        assert made is not None and made.pivots is not None
        f, mean = made.weights, 1 / w.shape[-1]
        along = f.mT @ w
        by_rows = made.solve(f) - mean * (w @ along.mT)
        square = f.mT @ made.solve(f) - mean * (along @ along.mT)
        rows = (2 * by_rows).index_add(-2, made.pivots, -square)
        return [h * rows, h[..., 0] * (made.matrix.inverse_diagonal() - mean * w.square().sum(-1))]


class _InvQuadLogdet(torch.autograd.Function):
    """bᵀ A⁻¹ b, with the derivative 2 uᵀ db - uᵀ dA u for u = A⁻¹ b; and log det A, with E[(A⁻¹ z)ᵀ dA (P⁻¹ z)]."""

    @staticmethod
    def forward(ctx: Any, system: Likelihood, b: Tensor, *values: Any) -> tuple[Tensor, Tensor]:
        inv_quad, logdet, *saved = system.evaluate(values, b)
        ctx.system = system
        keep(ctx, values, b, *saved)
        return inv_quad, logdet

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple:
        values, (b, u, s, z, w) = kept(ctx, 5)
        g, h = (x[..., None, None] for x in grads)
        system: Likelihood = ctx.system
        if torch.is_grad_enabled():  # the solutions depend on the data, too
            u = implicit_solve(system.product, system.solve, b, values)
            s = implicit_solve(system.product, system.solve, z, values)
        vectors, seeds = torch.cat([u, w], -1), torch.cat([-g * u, h / w.shape[-1] * s], -1)
        needed, control = ctx.needs_input_grad[2:], system.control(w, h)
        if torch.is_grad_enabled():
            out = pull_back(system.outputs, values, vectors, [seeds, *control], needed)
        else:
            out = system.operator._bilinear(seeds, vectors, needed)
            more = pull_back(system.controls, values, vectors, control, needed)
            out = [a if b is None else b if a is None else a + b for a, b in zip(out, more)]
        return (None, 2 * g * u if ctx.needs_input_grad[1] else None, *out)
