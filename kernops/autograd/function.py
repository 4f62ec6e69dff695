"""``reduce`` with derivatives.

The derivative of a sum, a logsumexp or a softmax-weighted sum is a sum again, so that one ``autograd.Function`` whose
backward and forward-mode rules call ``reduce`` has derivatives of every order. Minima are differentiated through the
columns that were chosen, see ``chosen``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from .. import backends
from ..backends import Input
from ..backends.layout import own_axes
from ..formula.plan import Plan
from ..formula.reductions import CORES
from .chosen import reduce_chosen
from .derivatives import Call, Pass, gradient_passes, tangent_passes

Tensor = torch.Tensor
Outs = tuple[Tensor, ...]

_transformed = torch._C._are_functorch_transforms_active
_modes = torch._C._len_torch_dispatch_stack
_is_batched = torch._C._functorch.is_legacy_batchedtensor
_PLAIN = frozenset((Tensor, torch.nn.Parameter, float, int, type(None)))
_HALVES = (torch.float16, torch.bfloat16)


def reduce(
    plan: Plan, tensors: Sequence[Input], m: int, n: int, backend: str = "auto", batch: tuple[int, ...] | None = None
) -> Outs:
    """Compute ``plan`` for ``m`` rows and ``n`` columns, differentiably to any order.

    Arguments, results and errors are those of :func:`kernops.backends.reduce`. Numbers have no gradients.

    * Gradients of float16 and bfloat16 tensors are computed in float32 and returned in their own dtype.
    * The gradient of ``Min``, ``MinArgMin`` and ``KMin`` goes to the columns that were chosen. Where there was none to
      choose, or the minimum is NaN, it is zero.
    * Where a logsumexp is -inf its gradient is zero.
    """
    if is_dynamo_compiling():
        from .operator import call_traced

        return call_traced(plan, tensors, m, n, backend)
    if _is_plain(tensors):
        return backends.reduce(plan, tensors, m, n, backend, batch)
    return differentiable(plan, tensors, m, n, backend, batch)


def _is_plain(tensors: Sequence[Input]) -> bool:
    """Whether the back end can be called as it is: memory to read, nothing to record."""
    if _transformed() or _modes() or forward_ad._current_level >= 0:
        return False
    grad = torch.is_grad_enabled()
    for t in tensors:
        if t.__class__ not in _PLAIN or (grad and t.__class__ not in _NUMBERS and t.requires_grad):  # type: ignore[union-attr]
            return False
    return True


_NUMBERS = frozenset((float, int, type(None)))


def differentiable(
    plan: Plan, tensors: Sequence[Input], m: int, n: int, backend: str, batch: tuple[int, ...] | None = None
) -> Outs:
    """``reduce`` for tensors that are recorded, wrapped or traced."""
    if batch is None:
        batch = backends.validate(plan, tensors, m, n)
    used = {v.params[1] for v in plan.variables}
    bare = [t if k in used else None for k, t in enumerate(tensors)]
    first = next((t for t in (*bare, *tensors) if isinstance(t, Tensor)), None)
    if first is None:
        return backends.reduce(plan, tensors, m, n, backend, batch)  # which says what is missing
    # A formula of numbers alone has its dtype and device from a tensor that it does not read.
    tensors = [t if k in used or t is first else None for k, t in enumerate(tensors)]
    half = first.dtype in _HALVES
    if half:  # here, and not in the back end, so that what is saved for backward is exact too
        tensors = [t.float() if isinstance(t, Tensor) else t for t in tensors]
    outs = reduce_checked(Call(plan, m, n, backend, batch), tensors)
    return tuple(o.to(first.dtype) if o.is_floating_point() else o for o in outs) if half else outs


def reduce_checked(call: Call, tensors: Sequence[Input]) -> Outs:
    """``reduce`` of float32 or float64 tensors that were checked already."""
    if not records(tensors):
        return _forward(call, tensors)
    if CORES[call.plan.core].cotangents is None:
        return reduce_chosen(call, tensors, _apply, reduce_checked)
    return _apply(call, tensors)


def _apply(call: Call, tensors: Sequence[Input]) -> Outs:
    function = _Transformed if _transformed() else _Reduce
    return function.apply(call, *tensors)  # type: ignore[no-any-return,no-untyped-call]


def records(tensors: Sequence[Input]) -> bool:
    """Whether derivatives may be asked for."""
    if _transformed() or (forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled()):
        return True
    return torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors)


def _forward(call: Call, tensors: Sequence[Input]) -> Outs:
    """The numbers; nothing is recorded or transformed at this point."""
    if _modes() or any(t.__class__ not in _PLAIN for t in tensors):
        from .operator import call_operator

        return call_operator(call.plan, tensors, call.m, call.n, call.backend)
    if any(isinstance(t, Tensor) and _is_batched(t) for t in tensors):
        return _forward_batched(call, tensors)
    return backends.reduce(call.plan, tensors, call.m, call.n, call.backend, call.batch)


def _keep(ctx: Any, call: Call, tensors: Sequence[Input], outs: Outs) -> None:
    """Save what derivatives need."""
    core = CORES[call.plan.core]
    if core.cotangents is None:
        ctx.mark_non_differentiable(*outs)
        return
    ctx.set_materialize_grads(False)
    ctx.call = call
    ctx.numbers = {k: t for k, t in enumerate(tensors) if t is not None and not isinstance(t, Tensor)}
    saved = [*(t if isinstance(t, Tensor) else None for t in tensors), *(outs if core.name != "Sum" else ())]
    ctx.save_for_backward(*saved)
    ctx.save_for_forward(*saved)


class _Rules(torch.autograd.Function):
    """The derivatives of a reduction: reductions again."""

    @staticmethod
    def backward(ctx: Any, *gs: Tensor | None) -> tuple[Tensor | None, ...]:
        grads: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        if all(g is None for g in gs):
            return tuple(grads)
        tensors, outs = _saved(ctx)
        wanted = tuple(k for k, need in enumerate(ctx.needs_input_grad[1:]) if need)
        operands = [*tensors, *gs, *outs]
        for step in gradient_passes(ctx.call.plan, wanted, tuple(g is not None for g in gs)):
            out = _run(ctx.call, step, operands)
            grads[step.number + 1] = sum_to(out.sum(-2) if step.over_rows else out, tensors[step.number].shape)
        return tuple(grads)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        # torch has switched forward mode off, which would also hide the tangents of an outer transform.
        with forward_ad._set_fwd_grad_enabled(True):
            tensors, outs = _saved(ctx)
            tensors = [forward_ad.unpack_dual(t, level=0).primal if isinstance(t, Tensor) else t for t in tensors]
            moving = tuple(k for k, t in enumerate(tangents) if t is not None)
            some = next(t for t in tangents if t is not None)
            results: list[Tensor | None] = [None] * len(CORES[ctx.call.plan.core].outputs)
            for step in tangent_passes(ctx.call.plan, moving):
                results[step.number] = _run(ctx.call, step, [*tensors, *tangents, *outs])
            return tuple(_zeros(ctx.call, k, some) if r is None else r for k, r in enumerate(results))


class _Reduce(_Rules):
    """One reduction of tensors that were checked."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Input) -> Outs:  # type: ignore[override]
        outs = _forward(call, tensors)
        _keep(ctx, call, tensors, outs)
        return outs


class _Transformed(_Rules):
    """The same for functorch, in the form that it asks for: torch takes twice as long to call it."""

    @staticmethod
    def forward(call: Call, *tensors: Input) -> Outs:  # type: ignore[override]
        return _forward(call, tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Outs) -> None:
        _keep(ctx, inputs[0], inputs[1:], output)

    @staticmethod
    def vmap(info: Any, in_dims: tuple, call: Call, *tensors: Input) -> tuple[Outs, int]:  # type: ignore[override]
        new = Call(call.plan, call.m, call.n, call.backend, (info.batch_size, *call.batch))
        outs = _apply(new, align(call.plan, tensors, in_dims[1:], len(call.batch)))
        return outs, 0


def _forward_batched(call: Call, tensors: Sequence[Input]) -> Outs:
    """``_forward`` of tensors with the hidden batch axis of ``torch.autograd.grad(..., is_grads_batched=True)``.

    Those are not functorch's, and have no rules that a library could register.
    """
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    bare, size = list(tensors), 1
    dims: list[int | None] = [None] * len(tensors)
    for k, t in enumerate(tensors):
        if isinstance(t, Tensor) and _is_batched(t):
            t = torch._remove_batch_dim(t, level, 1, 0)  # of length 1 if only another level batches it
            bare[k], dims[k], size = t, 0, max(size, t.shape[0])
    whole = Call(call.plan, call.m, call.n, call.backend, (size, *call.batch))
    outs = _forward(whole, align(call.plan, bare, dims, len(call.batch)))
    return tuple(torch._add_batch_dim(o, 0, level) for o in outs)


def _saved(ctx: Any) -> tuple[list[Any], tuple[Tensor, ...]]:
    saved = ctx.saved_tensors  # once: checkpointing computes them anew at each access
    count = ctx.call.plan.n_vars
    tensors, outs = list(saved[:count]), saved[count:]
    for k, number in ctx.numbers.items():
        tensors[k] = number
    if outs:  # exp(F - lse) is to be 0 and not NaN in a row without any finite F
        outs = (*outs[:-1], torch.where(outs[-1] == -torch.inf, 0.0, outs[-1]))
    return tensors, outs


def _zeros(call: Call, output: int, like: Tensor) -> Tensor:
    """The tangent of an output that does not move."""
    dim = 1 if CORES[call.plan.core].outputs[output] == "lse" else call.plan.dim
    return like.new_zeros((*call.batch, call.m, dim))


def _run(call: Call, step: Pass, operands: Sequence[Input]) -> Tensor:
    (out,) = reduce_checked(call.derivative(step), [operands[k] for k in step.inputs])
    return out


def sum_to(t: Tensor, shape: Sequence[int]) -> Tensor:
    """``t`` summed over the axes along which a tensor of ``shape`` was broadcast to it."""
    if t.shape == shape:
        return t
    lead = t.ndim - len(shape)
    axes = [a for a in range(t.ndim) if a < lead or (shape[a - lead] == 1 and t.shape[a] != 1)]
    return t.sum(axes, keepdim=True).reshape(shape) if axes else t


def align(plan: Plan, tensors: Sequence[Input], in_dims: Sequence[int | None], batch_axes: int) -> list[Input]:
    """``tensors`` with the axis that vmap maps over put before ``batch_axes`` batch axes."""
    cats = {v.params[1]: v.params[0] for v in plan.variables}
    aligned: list[Input] = []
    for k, (t, d) in enumerate(zip(tensors, in_dims)):
        if d is not None and isinstance(t, Tensor) and k in cats:
            t = t.movedim(d, 0)
            missing = batch_axes + 1 + own_axes(cats[k]) - t.ndim  # type: ignore[arg-type]
            t = t.reshape(t.shape[0], *[1] * missing, *t.shape[1:])
        aligned.append(t)
    return aligned
