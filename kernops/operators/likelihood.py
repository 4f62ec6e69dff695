"""Quadratic forms and determinants of operators, and their derivatives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..solvers import LowRankPlusDiagonal, first_steps, implicit_solve, log_quadrature
from ..solvers.implicit import keep, kept, pull_back
from ..solvers.preconditioners import signs
from ..solvers.problems import check_count, check_floats, wide
from .base import LinearOperator
from .kernel import WIDTHS
from .solving import Report, Settings, System, factorize, is_dense, right_hand_side

Tensor = torch.Tensor

#: Most iterations of conjugate gradients whose Lanczos matrix is used.
QUADRATURE = 200
#: Steps of the probes that are not solved for.
SHORT = 3
#: Where what so few steps lack has more than this share of a probe's variance, they tell too little.
TELLING = 0.25
#: A standard error of a log-determinant, for each row, that more probes are not needed for.
ACCURACY = 2e-4
#: What more probes may cost: that share of the iterations that were done, where a product with so many columns costs
#: twice what one does; and for few points, where it is little, as many probes as this divided by the points.
SHARE, COLUMNS, SHORT_TIMES_POINTS = 1 / 3, 12, 2_000_000
#: So much of the probes is enough where the rest would have all columns computed in a wider width.
FILLED = 7 / 8
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
    check_count("n_probes", settings.n_probes, 1)
    check_count("n_short", settings.n_short, 0)
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
        """(bᵀ A⁻¹ b, log det A, A⁻¹ b, s, z, w) with E[s wᵀ] = A⁻¹: s and w are A⁻¹ z and P⁻¹ z, or of more probes."""
        count = b.shape[-1]
        z, w, base = self.probes(tuple(b.shape[:-2]))
        found = self.solve(values, torch.cat([b, z], -1), QUADRATURE)
        assert self.solution is not None
        u, s = found[..., :count], found[..., count:]
        # Of a residual r, (b + r)ᵀ u lacks rᵀ A⁻¹ r only.
        inv_quad = (wide(u) * wide(b + self.solution.rest[..., :count])).sum((-2, -1)).to(b.dtype)
        (alpha, beta), start = self.solution.steps, self.solution.start
        alpha, beta, start = alpha[..., count:], beta[..., count:], start[..., count:]
        full = log_quadrature(alpha, beta, start)
        self.short = self._more(full, log_quadrature(alpha[:SHORT], beta[:SHORT], start))
        if self.short:
            estimate, s, w = self._of_levels(values, z, full, s)
        else:
            estimate, m = full.mean(-1), full.shape[-1]
            self.standard_error = full.std(-1) / m**0.5 if m > 1 else None
        return inv_quad, (estimate + base).to(b.dtype), u, s, z, w

    def _of_levels(
        self, values: Sequence[Any], z: Tensor, full: Tensor, s: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """The trace of log P^-½ A P^-½, and s and w, from the probes z that were solved for and more of a few steps.

        A few steps tell nearly all of what differs between probes. The mean over many probes of what they give, and
        that over the ones that were solved for of what this lacks, have together the spread of many, at little of the
        cost (multilevel Monte Carlo: Giles, Multilevel Monte Carlo methods, 2015, section 1.2). So do gradients.
        """
        x, m = self.short, z.shape[-1]
        every, xs, ws = [], [], []
        for part in self._parts(z, x):
            made = self.preconditioner
            product = self.operator.with_tensors(values)._matmul
            steps = first_steps(product, part, None if made is None else made.solve, SHORT)
            every.append(log_quadrature(steps.alpha, steps.beta, steps.weight))
            xs.append(steps.x)
            ws.append(steps.z)
        short, leads, w = (torch.cat(t, -1) for t in (every, xs, ws))
        few, share = short[..., :m], (m + x) / m
        if m > 1:
            own = few / (m + x) + (full - few) / m
            self.standard_error = (x * short.var(-1) / (m + x) ** 2 + m * own.var(-1)).sqrt()
        s = torch.cat([share * s + (1 - share) * leads[..., :m], leads[..., m:]], -1)
        return short.mean(-1) + (full - few).mean(-1), s, w

    def _parts(self, z: Tensor, more: int) -> Iterator[Tensor]:
        """z and ``more`` probes, a part at a time; the first ones are the same for any number."""
        left = z.shape[-1] + more
        batch, room = tuple(z.shape[:-2]), min(WIDEST, max(AT_ONCE, ROOM // max(1, z.numel() // z.shape[-1])))
        part = z
        for _ in range(0, more, AT_ONCE):
            if part.shape[-1] + AT_ONCE > room:
                yield part
                left -= part.shape[-1]
                part = z[..., :0]
            part = torch.cat([part, self._drawn(AT_ONCE, batch)], -1)
        yield part[..., :left]

    def _more(self, full: Tensor, short: Tensor) -> int:
        """How many probes of a few steps there are to be beside: as few as accuracy asks for, as many as are cheap.

        None where a few steps are too few, as for matrices of large condition numbers without a preconditioner.
        """
        n, (m, least) = self.operator.shape[-1], (full.shape[-1], self.settings.n_short)
        target = ACCURACY * n
        if m > 1 and bool(((full - short).var(-1) > TELLING * full.var(-1)).any()):
            return 0
        if m == 1 or n <= 1 or not full.numel() or float(full.std(-1).max()) <= target * m**0.5:
            return least
        assert self.solution is not None
        solving = self.solution.iterations * (1 + self.solution.start.shape[-1] / COLUMNS)
        cheap = COLUMNS * (SHARE * solving / SHORT - 1)
        most = min(n, max(int(cheap), SHORT_TIMES_POINTS // n))
        wanted = min(most, int(min(float((short.std(-1).max() / target).square()), n)))
        return max(least, _filling(wanted // AT_ONCE * AT_ONCE, self.solution.start.shape[-1]))

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
        assert made is not None and made.pivots is not None and isinstance(made.matrix, LowRankPlusDiagonal)
        f, mean = made.weights, 1 / w.shape[-1]
        along = f.mT @ w
        solved = made.solve(f)
        by_rows = solved - mean * (w @ along.mT)
        square = f.mT @ solved - mean * (along @ along.mT)
        rows = (2 * by_rows).index_add(-2, made.pivots, -square)
        return [h * rows, h[..., 0] * (made.matrix.inverse_diagonal() - mean * w.square().sum(-1))]


def _filling(more: int, others: int) -> int:
    """``more`` vectors, or a few less where that spares a product of the gradient's columns a wider width."""
    total = more + others
    fitting = max((w for w in WIDTHS if w <= total), default=0)
    return fitting - others if total < WIDTHS[-1] and fitting > others and fitting >= FILLED * total else more


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
            w = w[..., : z.shape[-1]]
        vectors, seeds = torch.cat([u, w], -1), torch.cat([-g * u, h / w.shape[-1] * s], -1)
        needed, control = ctx.needs_input_grad[2:], system.control(w, h)
        if torch.is_grad_enabled():
            out = pull_back(system.outputs, values, vectors, [seeds, *control], needed)
        else:
            out = system.operator._bilinear(seeds, vectors, needed)
            more = pull_back(system.controls, values, vectors, control, needed)
            out = [a if b is None else b if a is None else a + b for a, b in zip(out, more)]
        return (None, 2 * g * u if ctx.needs_input_grad[1] else None, *out)
