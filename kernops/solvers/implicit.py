"""The derivative of what solves a linear system, by solving the same system once more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Tensor = torch.Tensor
#: (data of the matrix, vectors) -> product, differentiable in both.
Product = Callable[[Sequence[Any], Tensor], Tensor]
#: (data of the matrix, right-hand side) -> solution, of which nothing is recorded.
Solver = Callable[[Sequence[Any], Tensor], Tensor]
#: (u, v, where it is needed) -> the gradient of Σ uᵀ A v by the data of the matrix; of which nothing is recorded.
Bilinear = Callable[[Tensor, Tensor, Sequence[bool]], Sequence["Tensor | None"]]


def implicit_solve(
    product: Product, solver: Solver, b: Tensor, values: Sequence[Any], bilinear: Bilinear | None = None
) -> Tensor:
    """x with A x = b, differentiable to any order in ``b`` and in the data of the symmetric matrix A.

    The derivative is another solve: db = A⁻¹ dx, and dA = -db xᵀ pulled back through the product.

    Args:
        product: ``product(values, v)``, A applied to ``v``.
        solver: ``solver(values, b)``, the solution.
        b: right-hand sides (*B, N, E).
        values: the data that A is made of; what is no tensor is passed on as it is.
        bilinear: ``bilinear(u, v, needed)``, the derivative of the product where it is not to be differentiated
            itself; None to pull it back through the product.
    """
    return _Solve.apply((product, solver, bilinear), b, *values)


class _Solve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, functions: tuple[Product, Solver, Bilinear | None], b: Tensor, *values: Any) -> Tensor:
        x = functions[1](values, b)
        ctx.functions = functions
        keep(ctx, values, x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple:
        values, (x,) = kept(ctx, 1)
        product, _, bilinear = ctx.functions
        u = _Solve.apply(ctx.functions, grads[0], *values)
        needed = ctx.needs_input_grad[2:]
        if bilinear is not None and not torch.is_grad_enabled():
            return (None, u, *bilinear(-u, x, needed))
        return (None, u, *pull_back(lambda data, v: (product(data, v),), values, x, (-u,), needed))


def keep(ctx: Any, values: Sequence[Any], *results: Tensor) -> None:
    """Save the data of a matrix, and results, for :func:`kept`."""
    ctx.numbers = [None if isinstance(v, Tensor) else v for v in values]
    ctx.places = [k for k, v in enumerate(values) if isinstance(v, Tensor)]
    ctx.save_for_backward(*results, *(values[k] for k in ctx.places))


def kept(ctx: Any, count: int) -> tuple[list[Any], tuple[Tensor, ...]]:
    """What :func:`keep` saved: the data, and ``count`` results."""
    saved = ctx.saved_tensors
    values = list(ctx.numbers)
    for k, t in zip(ctx.places, saved[count:]):
        values[k] = t
    return values, saved[:count]


def pull_back(
    outputs: Callable[[Sequence[Any], Tensor], Sequence[Tensor]],
    values: Sequence[Any],
    v: Tensor,
    cotangents: Sequence[Tensor],
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """The gradient of Σ <cotangent, output> by each of the data where it is ``needed``; recorded if the caller records.

    The outputs, such as a product of the matrix with ``v``, are functions of the data and of ``v``.
    """
    values = list(values)
    wanted = [k for k, need in enumerate(needed) if need and isinstance(values[k], Tensor)]
    out: list[Tensor | None] = [None] * len(values)
    if not wanted:
        return out
    again = torch.is_grad_enabled()  # the caller wants a derivative of this derivative
    with torch.enable_grad():
        # Views, so that v, which depends on the same tensors, is not differentiated through a second time.
        parts = [values[k].view_as(values[k]) if again else values[k].detach().requires_grad_() for k in wanted]
        for k, t in zip(wanted, parts):
            values[k] = t
        made = outputs(values, v if again else v.detach())
        pairs = [(o, c) for o, c in zip(made, cotangents) if o.requires_grad]
        if not pairs:
            return out
        heads, seeds = zip(*pairs)
        grads = torch.autograd.grad(heads, parts, seeds, create_graph=again, allow_unused=True)
    for k, g in zip(wanted, grads):
        out[k] = g
    return out


def only_once(what: str, grads: Sequence[Tensor | None], sources: Sequence[Any]) -> tuple[Tensor | None, ...]:
    """Gradients that cannot be differentiated: an attempt raises ``NotImplementedError`` instead of giving zeros.

    Args:
        what: whose gradients they are.
        grads: the gradients.
        sources: what they depend on.
    """
    if not torch.is_grad_enabled():
        return tuple(grads)
    anchors = [t for t in sources if isinstance(t, Tensor) and t.requires_grad]
    return tuple(None if g is None else _Once.apply(what, g.detach(), *anchors) for g in grads)


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, what: str, g: Tensor, *anchors: Tensor) -> Tensor:
        ctx.what = what
        return g.view_as(g)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple:
        raise NotImplementedError(f"{ctx.what} has first derivatives only; its gradient cannot be differentiated")
