"""Quadratic forms and determinants of operators, and their derivatives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..solvers import first_steps, implicit_solve, log_quadrature
from ..solvers.implicit import keep, kept, pull_back
from ..solvers.preconditioners import signs
from ..solvers.problems import check_floats, wide
from .base import LinearOperator
from .solving import Report, Settings, System, factorize, is_dense, right_hand_side

Tensor = torch.Tensor

#: Most iterations of conjugate gradients whose Lanczos matrix is used.
QUADRATURE = 200
#: Steps of the probes that are not solved for.
SHORT = 3
#: A standard error of a log-determinant, for each row, that more probes are not needed for.
ACCURACY = 2e-4
#: What more probes may cost: that share of the iterations that were done, where a product with so many columns costs
#: twice what one does; and for few points, where it is little, as many probes as this divided by the points.
SHARE, COLUMNS, SHORT_TIMES_POINTS = 1 / 3, 12, 1_000_000
#: Probes that are drawn at once, that are multiplied at once, and numbers of theirs that are stored at once.
AT_ONCE, WIDEST, ROOM = 8, 128, 1 << 26


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
    if settings.n_short < 0:
        raise ValueError(f"n_short must be a whole number >= 0; got {settings.n_short}")
    system = Likelihood(operator, settings)
    inv_quad, logdet = _InvQuadLogdet.apply(system, b, *operator.tensors)
    report = system.report()
    return inv_quad, logdet, replace(report, standard_error=system.standard_error, n_short=system.short)


class Likelihood(System):
    """A system that is solved for right-hand sides and for random probes."""

    standard_error: Tensor | None = None
    short = 0

    def probes(self, batch: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor | float]:
        """z of covariance P, P⁻¹ z, and log det P for the preconditioner P; for none, random signs, themselves, 0."""
        self.generator = torch.Generator(self.operator.device).manual_seed(self.settings.seed)
        z, made = self._drawn(self.settings.n_probes, batch), self.preconditioner
        return (z, z, 0.0) if made is None else (z, made.solve(z), made.matrix.logdet())

    def _drawn(self, count: int, batch: tuple[int, ...]) -> Tensor:
        operator, made = self.operator, self.preconditioner
        if made is not None:
            return made.matrix.probes(count, batch, self.generator)
        like = torch.empty(0, dtype=operator.dtype, device=operator.device)
        return signs((*batch, operator.shape[-1], count), like, self.generator)

    def evaluate(self, values: Sequence[Any], b: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """(bᵀ A⁻¹ b, log det A, A⁻¹ b, A⁻¹ z, z, P⁻¹ z)."""
        batch, count = tuple(b.shape[:-2]), b.shape[-1]
        z, w, base = self.probes(batch)
        found = self.solve(values, torch.cat([b, z], -1), QUADRATURE)
        assert self.solution is not None
        (alpha, beta), start = self.solution.steps, self.solution.start
        steps = alpha[..., count:], beta[..., count:]
        estimate, self.standard_error = self.trace(values, *steps, start[..., count:], batch)
        u, s = found[..., :count], found[..., count:]
        # Of a residual r, (b + r)ᵀ u lacks rᵀ A⁻¹ r only.
        inv_quad = (wide(u) * wide(b + self.solution.rest[..., :count])).sum((-2, -1)).to(b.dtype)
        return inv_quad, (estimate + base).to(b.dtype), u, s, z, w

    def trace(
        self, values: Sequence[Any], alpha: Tensor, beta: Tensor, weight: Tensor, batch: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]:
        """The trace of log P^-½ A P^-½ and its standard error, from the steps of the probes, and of more probes.

        A few steps tell nearly all of what differs between probes. The mean over many probes of what ``SHORT`` steps
        give, and that over the ones that were solved for of what this lacks, have together the spread of many, at
        little of the cost (multilevel Monte Carlo: Giles, Multilevel Monte Carlo methods, 2015, section 1.2).
        """
        full = log_quadrature(alpha, beta, weight)
        m = full.shape[-1]
        short = log_quadrature(alpha[:SHORT], beta[:SHORT], weight)
        self.short = x = self._more(full, short)
        if x == 0:
            return full.mean(-1), full.std(-1) / m**0.5 if m > 1 else None
        more = self._of_more(values, x, batch)
        every = torch.cat([short, more], -1)
        mean = every.mean(-1) + (full - short).mean(-1)
        if m == 1:
            return mean, None
        own = short / (m + x) + (full - short) / m
        return mean, (x * every.var(-1) / (m + x) ** 2 + m * own.var(-1)).sqrt()

    def _more(self, full: Tensor, short: Tensor) -> int:
        """How many probes of a few steps there are to be beside: as few as accuracy asks for, as many as are cheap."""
        n, (m, least) = self.operator.shape[-1], (full.shape[-1], self.settings.n_short)
        target = ACCURACY * n
        if m == 1 or n <= 1 or not full.numel() or float(full.std(-1).max()) <= target * m**0.5:
            return least
        assert self.solution is not None
        solving = self.solution.iterations * (1 + self.solution.start.shape[-1] / COLUMNS)
        cheap = COLUMNS * (SHARE * solving / SHORT - 1)
        most = min(n, max(int(cheap), SHORT_TIMES_POINTS // n))
        wanted = min(most, int(min(float((short.std(-1).max() / target).square()), n)))
        return max(least, wanted // AT_ONCE * AT_ONCE)

    def _of_more(self, values: Sequence[Any], count: int, batch: tuple[int, ...]) -> Tensor:
        """What a few steps give for more probes, (*B, count); the first ones are the same for any count."""
        operator, made = self.operator.with_tensors(values), self.preconditioner
        found, room = [], max(1, ROOM // (AT_ONCE * operator.shape[-1]))
        blocks = -(-count // AT_ONCE)
        for start in range(0, blocks, min(room, WIDEST // AT_ONCE)):
            stop = min(blocks, start + min(room, WIDEST // AT_ONCE))
            z = torch.cat([self._drawn(AT_ONCE, batch) for _ in range(start, stop)], -1)
            steps = first_steps(operator._matmul, z, None if made is None else made.solve, SHORT)
            found.append(log_quadrature(*steps))
        return torch.cat(found, -1)[..., :count]

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
        solved = made.solve(f)
        by_rows = solved - mean * (w @ along.mT)
        square = f.mT @ solved - mean * (along @ along.mT)
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
