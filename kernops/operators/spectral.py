"""Square roots and eigenpairs of operators, and their derivatives."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch

from ..backends.layout import broadcast
from ..solvers import ConvergenceWarning, conjugate_gradients, largest_eigenpairs, root_product
from ..solvers.implicit import keep, kept, only_once, pull_back
from ..solvers.lanczos import Krylov, safe_root
from ..solvers.problems import check_count, check_floats, check_number
from .base import LinearOperator
from .solving import NOT_FINITE, SMALL

Tensor = torch.Tensor

#: Numbers that the Krylov spaces of one pass may take.
KRYLOV_NUMBERS = 1 << 27


# --- square roots -------------------------------------------------------------------------------------------------
def sqrt_matmul(operator: LinearOperator, b: Tensor, tol: float, max_iter: int) -> Tensor:
    """``LinearOperator.sqrt_matmul``."""
    operator._need_symmetric("sqrt_matmul")
    b, vector = operator._vectors("b", b, operator.shape[-1])
    check_floats("b", b)
    check_number("tol", tol)
    check_count("max_iter", max_iter, 1)
    b = b.expand(*broadcast([operator.batch, tuple(b.shape[:-2])]), *b.shape[-2:])
    one = max_iter * max(1, math.prod(b.shape[:-1]))
    step = max(1, KRYLOV_NUMBERS // one)
    root = _RootSettings(operator, tol, max_iter)
    parts = [_Root.apply(root, part, *operator.tensors) for part in b.split(step, -1)]
    out = torch.cat(parts, -1)
    if not bool(torch.isfinite(out).all()):
        raise ValueError(NOT_FINITE if bool(torch.isfinite(b).all()) else "b has NaN or infinite entries")
    if root.change > tol:
        warnings.warn(
            f"sqrt_matmul: the result still changed by {root.change:.1e} of itself after {max_iter} products, above "
            f"tol={tol:g}. A larger max_iter or add_diagonal helps",
            ConvergenceWarning,
            stacklevel=3,
        )
    return out[..., 0] if vector else out


class _RootSettings:
    def __init__(self, operator: LinearOperator, tol: float, max_iter: int) -> None:
        self.operator, self.tol, self.max_iter = operator, tol, max_iter
        self.change = 0.0

    def products(self, values: Sequence[Any], v: Tensor) -> tuple[Tensor]:
        return (self.operator.with_tensors(values)._matmul(v),)

    def __call__(self, values: Sequence[Any], b: Tensor) -> tuple[Tensor, Krylov]:
        if not b.numel():
            raise ValueError("sqrt_matmul needs at least one row and one column")
        out, space, change = root_product(self.operator.with_tensors(values)._matmul, b, self.tol / 10, self.max_iter)
        self.change = max(self.change, change)
        return out, space


class _Root(torch.autograd.Function):
    """A^½ b. The derivative of <g, A^½ b> by A is Σ (uᵢᵀ g)(b ᵀuⱼ)/(√λᵢ + √λⱼ) uᵢ uⱼᵀ, in the Krylov spaces of g, b."""

    @staticmethod
    def forward(ctx: Any, settings: _RootSettings, b: Tensor, *values: Any) -> Tensor:
        out, ctx.space = settings(values, b)
        ctx.settings = settings
        keep(ctx, values)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple:
        values, _ = kept(ctx, 0)
        with torch.no_grad():
            found = _Root.pulled_back(ctx, values, grads[0])
        return (None, *only_once("sqrt_matmul", found, (grads[0], *values)))

    @staticmethod
    def pulled_back(ctx: Any, values: list[Any], g: Tensor) -> list[Tensor | None]:
        settings, space = ctx.settings, ctx.space
        out, other = settings(values, g)
        if not any(ctx.needs_input_grad[2:]):
            return [out, *[None] * len(values)]
        mine, theirs = (s.vectors[..., 0, :] * s.length[..., None].double() for s in (space, other))
        roots = safe_root(other.values)[..., :, None] + safe_root(space.values)[..., None, :]
        floor = torch.finfo(g.dtype).eps * roots.amax((-2, -1), keepdim=True).clamp(min=1e-300)
        weights = theirs[..., :, None] * mine[..., None, :] / torch.maximum(roots, floor)
        weights = other.vectors @ weights @ space.vectors.mT  # (*B, E, k of g, k of b)
        w = weights.to(g.dtype)
        left = torch.einsum("k...ne,...ekl->...nel", other.basis, w).flatten(-2)
        right = space.basis.movedim(0, -1).flatten(-2)
        return [out, *pull_back(settings.products, values, right, (left,), ctx.needs_input_grad[2:])]


# --- eigenpairs ---------------------------------------------------------------------------------------------------
def eigsh(
    operator: LinearOperator, k: int, largest: bool, tol: float | None, max_iter: int, seed: int
) -> tuple[Tensor, Tensor]:
    """``LinearOperator.eigsh``."""
    operator._need_symmetric("eigsh")
    check_floats("an operator with eigenpairs", torch.empty(0, dtype=operator.dtype))
    n = operator.shape[-1]
    if isinstance(k, bool) or not isinstance(k, Integral) or not 1 <= k <= n:
        raise ValueError(f"k must be a whole number from 1 to N = {n}; got {k!r}")
    if tol is None:
        tol = 1e-8 if operator.dtype == torch.float64 else 1e-4
    check_number("tol", tol)
    check_count("max_iter", max_iter, 1)
    check_count("seed", seed)
    settings = _Pairs(operator if largest else -operator, int(k), tol, max_iter, seed)
    values, vectors = _Eigsh.apply(settings, *settings.operator.tensors)
    return (values if largest else -values), vectors


class _Pairs:
    def __init__(self, operator: LinearOperator, k: int, tol: float, max_iter: int, seed: int) -> None:
        self.operator, self.k, self.tol, self.max_iter, self.seed = operator, k, tol, max_iter, seed

    def products(self, values: Sequence[Any], v: Tensor) -> tuple[Tensor]:
        return (self.operator.with_tensors(values)._matmul(v),)

    def __call__(self, tensors: Sequence[Any]) -> tuple[Tensor, Tensor]:
        operator, k = self.operator.with_tensors(tensors), self.k
        if operator.shape[-1] <= SMALL:
            values, vectors = torch.linalg.eigh(_finite(operator.to_dense()))
            return values[..., -k:].flip(-1), vectors[..., -k:].flip(-1)
        like = torch.empty(0, dtype=operator.dtype, device=operator.device)
        generator = torch.Generator(operator.device).manual_seed(self.seed)
        found = largest_eigenpairs(
            operator._matmul, operator.shape[:-1], k, like=like, tol=self.tol, max_iter=self.max_iter,
            generator=generator,
        )  # fmt: skip
        worst = float(_finite(found.residual).max())
        if not worst <= self.tol:
            warnings.warn(
                f"eigsh: a relative residual of {worst:.1e} is left after {self.max_iter} products, above "
                f"tol={self.tol:g}. A larger k, max_iter or tol helps",
                ConvergenceWarning,
                stacklevel=4,
            )
        return found.values, found.vectors


def _finite(t: Tensor) -> Tensor:
    if not bool(torch.isfinite(t).all()):
        raise ValueError(NOT_FINITE)
    return t


class _Eigsh(torch.autograd.Function):
    """λ and U. dλᵢ = uᵢᵀ dA uᵢ; duᵢ is what solves (λᵢ - A) duᵢ = dA uᵢ across uᵢ, beyond the pairs found by CG."""

    @staticmethod
    def forward(ctx: Any, settings: _Pairs, *tensors: Any) -> tuple[Tensor, Tensor]:
        values, vectors = settings(tensors)
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        keep(ctx, tensors, values, vectors)
        return values, vectors

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple:
        tensors, (values, u) = kept(ctx, 2)
        with torch.no_grad():
            cotangent = torch.zeros_like(u)
            if grads[0] is not None:
                cotangent = cotangent + u * grads[0][..., None, :]
            if grads[1] is not None:
                cotangent = cotangent + _of_vectors(ctx.settings, tensors, values, u, grads[1])
            found = pull_back(ctx.settings.products, tensors, u, (cotangent,), ctx.needs_input_grad[1:])
        return (None, *only_once("eigsh", found, (*grads, *tensors)))


def _of_vectors(settings: _Pairs, tensors: Sequence[Any], values: Tensor, u: Tensor, g: Tensor) -> Tensor:
    """The columns wᵢ with <g, dU> = Σ wᵢᵀ dA uᵢ."""
    gaps = values[..., None, :] - values[..., :, None]  # [j, i] = λᵢ - λⱼ
    scale = values.abs().amax(-1)[..., None, None] * (100 * torch.finfo(u.dtype).eps)
    inner = torch.where(gaps.abs() > scale, (u.mT @ g) / torch.where(gaps.abs() > scale, gaps, 1.0), 0.0)
    out = u @ inner
    if u.shape[-1] == u.shape[-2]:
        return out
    operator = settings.operator.with_tensors(tensors)

    def across(v: Tensor) -> Tensor:
        return v - u @ (u.mT @ v)

    solution = conjugate_gradients(
        lambda v: across(values[..., None, :] * v - operator._matmul(across(v))),
        across(g),
        tol=settings.tol,
        max_iter=settings.max_iter,
        warn=False,
    )
    if not solution.converged:
        warnings.warn(
            f"the gradient of eigenvectors has a relative residual of {float(solution.residual.max()):.1e}: "
            f"{solution.reason}",
            ConvergenceWarning,
            stacklevel=2,
        )
    return out + across(solution.x)
