"""The splat and its derivatives: what the operators ``bev_pool`` and ``bev_pool_backward`` compute."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from .calls import apply, call, run
from .kernels import Scale, choose, sum_levels
from .levels import unflatten

Tensor = torch.Tensor
Needs = Sequence[bool]


class How(NamedTuple):
    """The arguments of ``bev_pool`` that are no tensors."""

    shape: tuple[int, ...]
    variant: str
    backend: str
    depth_logits: bool


def _scale(kernels: Any, depth: Tensor, weight: Tensor | None, logits: bool) -> Scale:
    depth = depth.contiguous()
    lse = kernels.depth_lse(depth) if logits else None
    weight = None if weight is None else weight.contiguous()
    return Scale("runs", depth, weight, lse, depth.shape[2], depth.shape[3] * depth.shape[4])


def bev_pool(
    depth: Tensor, feat: Tensor, weight: Tensor | None, cells: Tensor, levels: Sequence[Tensor], shape: Sequence[int],
    variant: str, backend: str, depth_logits: bool,
) -> Tensor:  # fmt: skip
    channels, n_cells = feat.shape[-1], math.prod(shape)
    if n_cells == 0 or depth.numel() == 0 or channels == 0:
        return feat.new_zeros((*shape, channels))
    kernels = choose(backend, feat.device)
    scale = _scale(kernels, depth, weight, depth_logits)
    values = feat.contiguous().view(-1, channels)
    if variant == "atomic":
        out = kernels.splat_atomic(values, cells, scale, n_cells, values.dtype)
    else:
        out = sum_levels(kernels, values, unflatten(levels, n_cells), scale)
    return out.view(*shape, channels)


def bev_pool_backward(
    grad: Tensor, depth: Tensor, feat: Tensor, weight: Tensor | None, cells: Tensor, levels: Sequence[Tensor],
    shape: Sequence[int], variant: str, backend: str, depth_logits: bool, output_mask: Needs,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    by_depth, by_feat, by_weight = _masked(output_mask, weight)
    if grad.numel() == 0 or depth.numel() == 0:
        return shaped(depth, feat, weight, output_mask, torch.Tensor.new_zeros)
    kernels, channels = choose(backend, feat.device), feat.shape[-1]
    scale = _scale(kernels, depth, weight, depth_logits)
    rows, values = grad.contiguous().view(-1, channels), feat.contiguous().view(-1, channels)
    grad_w, grad_feat = kernels.splat_backward(rows, values, cells, scale, by_depth or by_weight, by_feat)
    grad_depth = grad_weight = nothing = feat.new_empty(0)
    if grad_w is not None:
        grad_depth, grad_weight = _chain(grad_w, depth, weight, depth_logits, by_depth, by_weight)
    return grad_depth, nothing if grad_feat is None else grad_feat.view(feat.shape), grad_weight


#: Derivatives in between are held of so many points at a time, and of no more than about a quarter of the cameras: in
#: half precision they would be an eighth of the tensor of all lifted points, which is not to be had.
CHUNK = 1 << 20


def _chain(
    grad_w: Tensor, depth: Tensor, weight: Tensor | None, logits: bool, by_depth: bool, by_weight: bool
) -> tuple[Tensor, Tensor]:
    """From the derivative by W, which is wide, to those by depth and weight, some cameras at a time."""
    if weight is None and not logits:
        return grad_w.to(depth.dtype), depth.new_empty(0)
    grad_depth, grad_weight = (depth.new_empty(depth.shape if need else 0) for need in (by_depth, by_weight))
    grads_w, depths = grad_w.flatten(0, 1), depth.flatten(0, 1)
    weights = None if weight is None else weight.flatten(0, 1)
    step = max(1, min(CHUNK // grads_w[0].numel(), -(-len(depths) // 4)))
    for some in (slice(k, k + step) for k in range(0, len(depths), step)):
        g = grads_w[some]
        p = torch.softmax(depths[some], 1, dtype=g.dtype) if logits else depths[some]
        if by_weight:
            grad_weight.view(depths.shape)[some] = g * p
        if by_depth:
            g = g if weights is None else g * weights[some]
            if logits:  # p * (g - sum of p * g)
                g = torch.ops.aten._softmax_backward_data(g, p, 1, g.dtype)
            grad_depth.view(depths.shape)[some] = g
    return grad_depth, grad_weight


def _masked(mask: Needs, weight: Tensor | None) -> tuple[bool, bool, bool]:
    return mask[0], mask[1], mask[2] and weight is not None


def shaped(depth: Tensor, feat: Tensor, weight: Tensor | None, mask: Needs, new: Callable) -> tuple:
    """Gradients made by ``new``; what is not asked for has no elements."""
    wanted = zip(_masked(mask, weight), (depth.shape, feat.shape, depth.shape))
    return tuple(new(feat, shape if need else (0,)) for need, shape in wanted)


def differentiable_pool(
    depth: Tensor, feat: Tensor, weight: Tensor | None, cells: Tensor, levels: Sequence[Tensor], shape: Sequence[int],
    *how: Any,
) -> Tensor:  # fmt: skip
    return apply(_Pool, depth, feat, weight, cells, How(tuple(shape), *how), *levels)  # type: ignore[no-any-return]


class _Pool(torch.autograd.Function):
    """The splat. Its plan is saved with it: torch notices when it is refreshed before the backward pass."""

    @staticmethod
    def forward(depth: Tensor, feat: Tensor, weight: Tensor | None, cells: Tensor, how: How, *levels: Tensor) -> Tensor:  # type: ignore[override]
        return run("bev_pool", depth, feat, weight, cells, levels, *how)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        depth, feat, weight, cells, ctx.how, *levels = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(depth, feat, weight, cells, *levels)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        needs = ctx.needs_input_grad[:3]
        grads: tuple[Tensor | None, ...] = (None, None, None)
        if grad is not None:
            depth, feat, weight, cells, *levels = ctx.saved_tensors
            found = call("bev_pool_backward", grad, depth, feat, weight, cells, levels, *ctx.how, needs)
            grads = tuple(g if need else None for g, need in zip(found, needs))
        return (*grads, *(None for _ in ctx.needs_input_grad[3:]))


def differentiable_backward(
    grad: Tensor, depth: Tensor, feat: Tensor, weight: Tensor | None, cells: Tensor, levels: Sequence[Tensor],
    shape: Sequence[int], variant: str, backend: str, depth_logits: bool, output_mask: Needs,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The derivatives of the splat by W (what multiplies the features), and the chain rule in operations of torch."""
    if feat.dtype in (torch.float16, torch.bfloat16):  # what comes in between is wide, as it is without a graph
        wide = None if weight is None else weight.float()
        rest = (cells, levels, shape, variant, backend, depth_logits, output_mask)
        found = differentiable_backward(grad.float(), depth.float(), feat.float(), wide, *rest)
        return tuple(g.to(feat.dtype) for g in found)  # type: ignore[return-value]
    by_depth, by_feat, by_weight = _masked(output_mask, weight)
    p = torch.softmax(depth, 2) if depth_logits else depth
    w = p if weight is None else p * weight
    how = How(tuple(shape), variant, backend, False)
    needs = (by_depth or by_weight, by_feat)
    grad_w, grad_feat = apply(_Gradients, grad, w, feat, cells, how, needs, *levels)
    grad_depth = grad_weight = feat.new_empty(0)
    if by_weight:
        grad_weight = grad_w * p
    if by_depth:
        grad_depth = grad_w if weight is None else grad_w * weight
        if depth_logits:
            grad_depth = p * (grad_depth - (p * grad_depth).sum(2, keepdim=True))
    return grad_depth, grad_feat, grad_weight


class _Gradients(torch.autograd.Function):
    """The derivatives of the splat by W and by the features.

    With L(W, f, g) = g . splat(W, f), linear in each, they are dL/dW and dL/df. Given cotangents (a, b) of the two, the
    derivatives of a . dL/dW + b . dL/df = L(a, f, g) + L(W, b, g) are splats and such gradients again.
    """

    @staticmethod
    def forward(
        grad: Tensor, w: Tensor, feat: Tensor, cells: Tensor, how: How, needs: Needs, *levels: Tensor
    ) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        mask = (*needs, False)
        by_w, by_feat, _ = run("bev_pool_backward", grad, w, feat, None, cells, levels, *how, mask)
        return by_w, by_feat

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        grad, w, feat, cells, ctx.how, ctx.needs, *levels = inputs
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(o for o, need in zip(output, ctx.needs) if not need))
        ctx.save_for_backward(grad, w, feat, cells, *levels)

    @staticmethod
    def backward(ctx: Any, a: Tensor | None, b: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grad, w, feat, cells, *levels = ctx.saved_tensors
        by_grad, by_w, by_feat = ctx.needs_input_grad[:3]
        a, b = (x if need else None for x, need in zip((a, b), ctx.needs))
        rest = (None, cells, levels, *ctx.how)
        grads: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        if by_grad:
            parts = [call("bev_pool", *pair, *rest) for pair in ((a, feat), (w, b)) if None not in pair]
            grads[0] = sum(parts[1:], parts[0]) if parts else None
        if by_w and b is not None:
            grads[1] = call("bev_pool_backward", grad, w, b, *rest, (True, False, False))[0]
        if by_feat and a is not None:
            grads[2] = call("bev_pool_backward", grad, a, feat, *rest, (False, True, False))[1]
        return tuple(grads)
