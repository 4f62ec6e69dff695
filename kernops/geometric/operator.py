"""The operators of this package, for autograd and for what looks into a program instead of running it.

A row of ``_TABLE`` is an operator: its schema in ``torch.ops.kernops``, what computes it, the shape of its result, and
the same with derivatives. :func:`call` is the way in. Code that runs goes straight to the kernels, through an
``autograd.Function`` where derivatives may be asked for; code that ``torch.compile`` or ``torch.export`` traces gets
the operator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from .arguments import check_pool, check_pool_backward, check_rows
from .kernels import Level, Scale, choose, sum_levels

Tensor = torch.Tensor
Needs = Sequence[bool]

_transformed = torch._C._are_functorch_transforms_active
_modes = torch._C._len_torch_dispatch_stack
_is_batched = torch._C._functorch.is_legacy_batchedtensor
_PLAIN = frozenset((Tensor, torch.nn.Parameter))


# --- ways in ----------------------------------------------------------------------------------------------------------
def call(name: str, *args: Any) -> Any:
    """The operator ``name`` of ``_TABLE``, differentiably to any order."""
    if is_dynamo_compiling():
        return getattr(torch.ops.kernops, name)(*args)
    if _records(args):
        return _TABLE[name].differentiable(*args)
    return _run(name, *args)


def _records(args: tuple) -> bool:
    """Whether derivatives may be asked for."""
    if _transformed() or (forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled()):
        return True
    return torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in args)


def _run(name: str, *args: Any) -> Any:
    """The numbers; nothing is to be recorded at this point."""
    if _modes() or any(isinstance(t, Tensor) and (t.__class__ not in _PLAIN or _is_batched(t)) for t in args):
        return getattr(torch.ops.kernops, name)(*args)
    return _TABLE[name].compute(*args)


def _apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    return (function if _transformed() else _eager(function)).apply(*args)  # type: ignore[no-untyped-call]


@cache
def _eager(function: Any) -> type[torch.autograd.Function]:
    """The same for autograd alone. functorch asks for ``setup_context``, which costs torch 30 us more a call."""

    def forward(ctx: Any, *args: Any) -> Any:
        out = function.forward(*args)
        function.setup_context(ctx, args, out)
        return out

    rules = {"forward": staticmethod(forward), "backward": staticmethod(function.backward)}
    return type(function.__name__, (torch.autograd.Function,), rules)


# --- levels as a list of tensors --------------------------------------------------------------------------------------
FIELDS = 4  # tensors of a level


def flatten(kernels: ModuleType, levels: Sequence[Level]) -> list[Tensor]:
    """Items, starts, targets and work of each level; an empty tensor for targets that are None."""
    flat: list[Tensor] = []
    for level in levels:
        targets = level.starts.new_empty(0) if level.targets is None else level.targets
        flat += [level.items, level.starts, targets, kernels.segment_work(level.starts)]
    return flat


def unflatten(flat: Sequence[Tensor], n_out: int) -> tuple[Level, ...]:
    """The levels again; ``n_out`` is of the last, in the others each segment has its own row."""
    levels: list[Level] = []
    for items, starts, targets, work in zip(*(flat[k::FIELDS] for k in range(FIELDS))):
        last = len(levels) == len(flat) // FIELDS - 1
        rows = n_out if last else starts.shape[0] - 1
        levels.append(Level(items, starts, targets if targets.shape[0] else None, rows, work))
    return tuple(levels)


# --- sums by bucket ---------------------------------------------------------------------------------------------------
def _bucketed_sum(values: Tensor, buckets: Tensor, levels: Sequence[Tensor], n_buckets: int, backend: str) -> Tensor:
    if values.numel() == 0 or n_buckets == 0:
        return values.new_zeros((n_buckets, values.shape[1]))
    kernels = choose(backend, values.device)
    if not levels:
        order, starts = kernels.bucket_sort(buckets, n_buckets)
        levels = (order, starts, buckets.new_empty(0), buckets.new_empty(0))
    return sum_levels(kernels, values.contiguous(), unflatten(levels, n_buckets), None)


def _bucketed_gather(rows: Tensor, buckets: Tensor, levels: Sequence[Tensor], n_buckets: int, backend: str) -> Tensor:
    if rows.numel() == 0 or buckets.numel() == 0:
        return rows.new_zeros((buckets.numel(), rows.shape[1]))
    return choose(backend, rows.device).gather(rows.contiguous(), buckets)


def _bucketed_cumsum(values: Tensor, order: Tensor, starts: Tensor, reverse: bool, backend: str) -> Tensor:
    if values.numel() == 0:
        return torch.empty_like(values, memory_format=torch.contiguous_format)
    kernels = choose(backend, values.device)
    return kernels.segment_cumsum(values.contiguous(), order, starts, reverse, values.dtype)


class _Sum(torch.autograd.Function):
    """The sum of each bucket's rows; its transpose is ``_Gather``."""

    @staticmethod
    def forward(values: Tensor, buckets: Tensor, n_buckets: int, backend: str, *levels: Tensor) -> Tensor:  # type: ignore[override]
        return _run("bucketed_sum", values, buckets, levels, n_buckets, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        _, buckets, ctx.n_buckets, ctx.backend, *levels = inputs
        ctx.save_for_backward(buckets, *levels)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        buckets, *levels = ctx.saved_tensors
        back = call("bucketed_gather", grad, buckets, levels, ctx.n_buckets, ctx.backend)
        return (back, None, None, None, *(None for _ in levels))


class _Gather(torch.autograd.Function):
    """To each item the row of its bucket; its transpose is ``_Sum``."""

    @staticmethod
    def forward(rows: Tensor, buckets: Tensor, n_buckets: int, backend: str, *levels: Tensor) -> Tensor:  # type: ignore[override]
        return _run("bucketed_gather", rows, buckets, levels, n_buckets, backend)

    setup_context = _Sum.setup_context

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        buckets, *levels = ctx.saved_tensors
        back = call("bucketed_sum", grad, buckets, levels, ctx.n_buckets, ctx.backend)
        return (back, None, None, None, *(None for _ in levels))


class _Cumsum(torch.autograd.Function):
    """Prefix sums in each bucket; their transpose are those from the other end."""

    @staticmethod
    def forward(values: Tensor, order: Tensor, starts: Tensor, reverse: bool, backend: str) -> Tensor:  # type: ignore[override]
        return _run("bucketed_cumsum", values, order, starts, reverse, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        _, order, starts, ctx.reverse, ctx.backend = inputs
        ctx.save_for_backward(order, starts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        order, starts = ctx.saved_tensors
        return call("bucketed_cumsum", grad, order, starts, not ctx.reverse, ctx.backend), None, None, None, None


# --- splat ------------------------------------------------------------------------------------------------------------
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


def _bev_pool(
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


def _bev_pool_backward(
    grad: Tensor, depth: Tensor, feat: Tensor, weight: Tensor | None, cells: Tensor, levels: Sequence[Tensor],
    shape: Sequence[int], variant: str, backend: str, depth_logits: bool, output_mask: Needs,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    by_depth, by_feat, by_weight = _masked(output_mask, weight)
    if grad.numel() == 0 or depth.numel() == 0:
        return _shaped(depth, feat, weight, output_mask, torch.Tensor.new_zeros)
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


def _shaped(depth: Tensor, feat: Tensor, weight: Tensor | None, mask: Needs, new: Callable) -> tuple:
    """Gradients made by ``new``; what is not asked for has no elements."""
    wanted = zip(_masked(mask, weight), (depth.shape, feat.shape, depth.shape))
    return tuple(new(feat, shape if need else (0,)) for need, shape in wanted)


def _differentiable_pool(
    depth: Tensor, feat: Tensor, weight: Tensor | None, cells: Tensor, levels: Sequence[Tensor], shape: Sequence[int],
    *how: Any,
) -> Tensor:  # fmt: skip
    return _apply(_Pool, depth, feat, weight, cells, How(tuple(shape), *how), *levels)  # type: ignore[no-any-return]


class _Pool(torch.autograd.Function):
    """The splat. Its plan is saved with it: torch notices when it is refreshed before the backward pass."""

    @staticmethod
    def forward(depth: Tensor, feat: Tensor, weight: Tensor | None, cells: Tensor, how: How, *levels: Tensor) -> Tensor:  # type: ignore[override]
        return _run("bev_pool", depth, feat, weight, cells, levels, *how)

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


def _differentiable_backward(
    grad: Tensor, depth: Tensor, feat: Tensor, weight: Tensor | None, cells: Tensor, levels: Sequence[Tensor],
    shape: Sequence[int], variant: str, backend: str, depth_logits: bool, output_mask: Needs,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The derivatives of the splat by W (what multiplies the features), and the chain rule in operations of torch."""
    if feat.dtype in (torch.float16, torch.bfloat16):  # what comes in between is wide, as it is without a graph
        wide = None if weight is None else weight.float()
        rest = (cells, levels, shape, variant, backend, depth_logits, output_mask)
        found = _differentiable_backward(grad.float(), depth.float(), feat.float(), wide, *rest)
        return tuple(g.to(feat.dtype) for g in found)  # type: ignore[return-value]
    by_depth, by_feat, by_weight = _masked(output_mask, weight)
    p = torch.softmax(depth, 2) if depth_logits else depth
    w = p if weight is None else p * weight
    how = How(tuple(shape), variant, backend, False)
    needs = (by_depth or by_weight, by_feat)
    grad_w, grad_feat = _apply(_Gradients, grad, w, feat, cells, how, needs, *levels)
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
        by_w, by_feat, _ = _run("bev_pool_backward", grad, w, feat, None, cells, levels, *how, mask)
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


# --- the table --------------------------------------------------------------------------------------------------------
class _Row(NamedTuple):
    schema: str
    check: Callable[..., tuple]
    compute: Callable[..., Any]
    fake: Callable[..., Any]
    differentiable: Callable[..., Any]


_BUCKETS = "Tensor buckets, Tensor[] levels, SymInt n_buckets, str backend"
_POOL = (
    "Tensor depth, Tensor feat, Tensor? weight, Tensor cells, Tensor[] levels, SymInt[] shape, str variant, "
    "str backend, bool depth_logits"
)

_TABLE = {
    "bucketed_sum": _Row(
        f"(Tensor values, {_BUCKETS}) -> Tensor",
        lambda t, b, *rest: check_rows(b.shape[0], t, b, *rest), _bucketed_sum,
        lambda values, buckets, levels, n, backend: values.new_empty((n, values.shape[1])),
        lambda values, buckets, levels, n, backend: _apply(_Sum, values, buckets, n, backend, *levels),
    ),
    "bucketed_gather": _Row(
        f"(Tensor rows, {_BUCKETS}) -> Tensor",
        lambda t, b, *rest: check_rows(rest[1], t, b, *rest), _bucketed_gather,
        lambda rows, buckets, levels, n, backend: rows.new_empty((buckets.shape[0], rows.shape[1])),
        lambda rows, buckets, levels, n, backend: _apply(_Gather, rows, buckets, n, backend, *levels),
    ),
    "bucketed_cumsum": _Row(
        "(Tensor values, Tensor order, Tensor starts, bool reverse, str backend) -> Tensor",
        lambda t, order, *rest: check_rows(order.shape[0], t, order, *rest), _bucketed_cumsum,
        lambda values, order, starts, reverse, backend: values.new_empty(values.shape),
        lambda *args: _apply(_Cumsum, *args),
    ),
    "bev_pool": _Row(
        f"({_POOL}) -> Tensor", check_pool, _bev_pool,
        lambda depth, feat, weight, cells, levels, shape, *how: feat.new_empty((*shape, feat.shape[-1])),
        _differentiable_pool,
    ),
    "bev_pool_backward": _Row(
        f"(Tensor grad, {_POOL}, bool[3] output_mask) -> (Tensor grad_depth, Tensor grad_feat, Tensor grad_weight)",
        check_pool_backward, _bev_pool_backward,
        lambda grad, depth, feat, weight, *rest: _shaped(depth, feat, weight, rest[-1], torch.Tensor.new_empty),
        _differentiable_backward,
    ),
}  # fmt: skip

_library = torch.library.Library("kernops", "FRAGMENT")


def _register(name: str, row: _Row) -> None:
    _library.define(f"{name}{row.schema}", tags=(torch.Tag.pt2_compliant_tag,))

    def checked(function: Callable[..., Any]) -> Callable[..., Any]:
        # Shapes of fake tensors are not compared: that would say something about dynamic sizes.
        return lambda *args: function(*(row.check(*args) if args[0].__class__ in _PLAIN else args))

    def record(*args: Any) -> Any:
        if _records(args):
            return row.differentiable(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return getattr(torch.ops.kernops, name)(*args)

    _library.impl(name, checked(row.compute), "CompositeExplicitAutograd")
    _library.impl(name, checked(record), "Autograd")
    torch.library.register_fake(f"kernops::{name}", row.fake, lib=_library)
    # Under torch.func, before it takes the call apart: for a library's operator it has no derivatives.
    _library.impl(name, checked(row.differentiable), "FuncTorchDynamicLayerFrontMode")


for _name, _row in _TABLE.items():
    _register(_name, _row)
