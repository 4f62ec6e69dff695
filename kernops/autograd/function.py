"""``reduce`` with derivatives.

The derivative of a sum, a logsumexp or a softmax-weighted sum is a sum again, so that one ``autograd.Function`` whose
backward and forward-mode rules call ``reduce`` has derivatives of every order. Minima are differentiated through the
columns that were chosen, see ``chosen``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter

from .. import backends
from ..backends import Input
from ..backends.layout import compact, own_axes
from ..formula.plan import Plan, make_plan
from .chosen import reduce_chosen
from .derivatives import Call, Part, Slopes, Step, call_of, fused_width, tangent_passes

Tensor = torch.Tensor
Outs = tuple[Tensor, ...]

_transformed = torch._C._are_functorch_transforms_active
_modes = torch._C._len_torch_dispatch_stack
_unwrap = torch._C._functorch.unwrap_if_dead
_is_batched = torch._C._functorch.is_legacy_batchedtensor
_NUMBERS = frozenset((float, int, type(None)))
_PLAIN = _NUMBERS | {Tensor, Parameter}
_HALVES = (torch.float16, torch.bfloat16)


def reduce(
    plan: Plan, tensors: Sequence[Input], m: int, n: int, backend: str = "auto", batch: tuple[int, ...] | None = None,
    fresh: bool = False,
) -> Outs:  # fmt: skip
    """Compute ``plan`` for ``m`` rows and ``n`` columns, differentiably to any order.

    Arguments, results and errors are those of :func:`kernops.backends.reduce`. Numbers have no gradients.

    * Gradients of float16 and bfloat16 tensors are computed in float32 and returned in their own dtype.
    * The gradient of ``Min``, ``MinArgMin`` and ``KMin`` goes to the columns that were chosen. Where there was none to
      choose, or the minimum is NaN, it is zero.
    * Where a logsumexp is -inf its gradient is zero.
    """
    if is_dynamo_compiling():
        from .operator import call_traced

        tensors = compact(tensors) if batch == () else tensors
        return call_traced(plan, tensors, m, n, backend)
    moves = _moves(tensors)
    if moves is not None:
        if not (moves and torch.is_grad_enabled()):
            return backends.reduce(plan, tensors, m, n, backend, batch, fresh)
        first: Tensor | None = tensors[plan.tensors[0]] if plan.reads_all and plan.tensors else None  # type: ignore[assignment]
        if first is not None and first.dtype not in _HALVES:
            if batch is None:
                batch = backends.validate(plan, tensors, m, n)
            call = call_of(plan, m, n, backend, batch, fused_width(first.device))
            return _apply_reduce(call, *map(_unwrap, tensors)) if call.direct else _recorded(call, tensors)  # type: ignore[no-any-return,arg-type]
    return differentiable(plan, tensors, m, n, backend, batch)


def _moves(tensors: Sequence[Input]) -> bool | None:
    """Whether one of the tensors requires a gradient; ``None`` where the back end cannot be called as it is: because
    something is transformed or traced, or has no memory to read."""
    if _transformed() or _modes() or forward_ad._current_level >= 0:
        return None
    moves = False
    for t in tensors:
        kind = t.__class__
        if kind is Tensor or kind is Parameter:
            moves = moves or t.requires_grad  # type: ignore[union-attr]
        elif kind not in _NUMBERS:
            return None
    return moves


def differentiable(
    plan: Plan, tensors: Sequence[Input], m: int, n: int, backend: str, batch: tuple[int, ...] | None = None
) -> Outs:
    """``reduce`` for tensors that are recorded, wrapped or traced."""
    if batch is None:
        batch = backends.validate(plan, tensors, m, n)
    if not batch:
        tensors = compact(tensors)
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
    outs = reduce_checked(call_of(plan, m, n, backend, batch, fused_width(first.device)), tensors)
    return tuple(o.to(first.dtype) if o.is_floating_point() else o for o in outs) if half else outs


def reduce_checked(call: Call, tensors: Sequence[Input]) -> Outs:
    """``reduce`` of float32 or float64 tensors that were checked already."""
    return _recorded(call, tensors) if records(tensors) else _forward(call, tensors)


def _recorded(call: Call, tensors: Sequence[Input]) -> Outs:
    if call.plan.first:  # autograd knows one result, and how to take it apart
        (out,) = _recorded(call.of(make_plan("Sum", call.plan.formula, n_vars=call.plan.n_vars)), tensors)
        return out.split([dim for _, dim in call.plan.outputs], -1)
    if call.rule.cotangents is None:
        return reduce_chosen(call, tensors if call.batch else compact(tensors), _apply, reduce_checked)
    return _apply(call, tensors)


def _apply(call: Call, tensors: Sequence[Input]) -> Outs:
    if _transformed():
        tensors = tensors if call.batch else compact(tensors)
        return _Transformed.apply(call, *tensors)  # type: ignore[no-any-return,no-untyped-call]
    alive = [t if t.__class__ in _NUMBERS else _unwrap(t) for t in tensors]  # type: ignore[arg-type]
    for t in alive:
        if t.__class__ not in _NUMBERS and _is_batched(t):  # type: ignore[arg-type]
            # autograd records what is inside of those
            return _batched(call, alive if call.batch else compact(alive), _apply)
    return _apply_reduce(call, *alive)  # type: ignore[no-any-return]


def pull_back_sum(
    plan: Plan,
    tensors: Sequence[Input],
    cotangent: Tensor,
    wanted: Collection[int],
    m: int,
    n: int,
    backend: str,
    fused: int = 0,
) -> list[Tensor | None]:
    """The gradient of Σ cotangent · sum by the tensors with numbers ``wanted``; the sum itself is not computed.

    Args:
        plan: a sum.
        tensors, m, n, backend: as for :func:`reduce`, in float32 or float64.
        cotangent: (*B, m, plan.dim).
        fused: components of gradients that are computed together at most, if more than ``fused_width`` says.

    Returns:
        One gradient for each of ``tensors``: ``None`` for those not wanted, and where the sum does not depend on it.
    """
    if plan.core != "Sum":
        raise ValueError(f"the gradient of {plan.core} needs its value")
    batch = torch.broadcast_shapes(backends.validate(plan, tensors, m, n), cotangent.shape[:-2])
    call = call_of(plan, m, n, backend, tuple(batch), max(fused, fused_width(cotangent.device)))
    grads: list[Tensor | None] = [None] * (1 + len(tensors))
    needed = (False, *(k in wanted for k in range(len(tensors))))
    for step in call.find_gradients((needed, (True,), None)):
        _give(call, grads, tensors, step.parts, _run(step, [*tensors, cotangent]))
    return grads[1:]


def records(tensors: Sequence[Input]) -> bool:
    """Whether derivatives may be asked for."""
    if _transformed() or (forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled()):
        return True
    return torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors)


def _forward(call: Call, tensors: Sequence[Input]) -> Outs:
    """The numbers; nothing is recorded or transformed at this point."""
    for t in tensors:
        kind = t.__class__
        if kind is Tensor or kind is Parameter:
            if _is_batched(t):  # type: ignore[arg-type]
                break
        elif kind not in _NUMBERS:
            break
    else:
        if not _modes():
            return backends.reduce(call.plan, tensors, call.m, call.n, call.backend, call.batch)
    if not call.batch:
        tensors = compact(tensors)
    if _modes() or any(t.__class__ not in _PLAIN for t in tensors):
        from .operator import call_operator

        return call_operator(call.plan, tensors, call.m, call.n, call.backend)
    return _batched(call, tensors, _forward)


def _keep(ctx: Any, call: Call, tensors: Sequence[Input], outs: Outs, both: Slopes | None = None) -> None:
    """Save what derivatives need: the operands, then the outputs; of a sum, its derivatives if some are known."""
    if call.rule.cotangents is None:
        ctx.mark_non_differentiable(*outs)
        return
    ctx.set_materialize_grads(False)
    numbers = None
    if len(call.plan.tensors) < len(tensors):
        numbers = {k: t for k, t in enumerate(tensors) if t.__class__ in _NUMBERS and t is not None}
        tensors = [None if t.__class__ in _NUMBERS else t for t in tensors]
    ctx.kept = call, both, numbers
    if call.plan.core == "Sum":
        outs = outs[1:]
    ctx.save_for_backward(*tensors, *outs)
    if forward_ad._current_level >= 0 or _transformed():
        ctx.save_for_forward(*tensors, *outs)


class _Rules(torch.autograd.Function):
    """The derivatives of a reduction: reductions again."""

    @staticmethod
    def backward(ctx: Any, *gs: Tensor | None) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad
        grads: list[Tensor | None] = [None] * len(needed)
        given = tuple([g is not None for g in gs])
        if True not in given:
            return tuple(grads)
        call, operands, outs, known = _saved(ctx)
        operands += gs
        if known is None:
            operands += outs
        elif torch.is_grad_enabled():  # to autograd, the table does not depend on anything
            known = None
        else:
            slopes = outs if len(known.parts) == 1 else outs[0].split([part.dim for part in known.parts], -1)
            _give(call, grads, operands, known.parts, [gs[0] * slope for slope in slopes])  # type: ignore[operator]
        asked = needed, given, known
        steps = call.gradients.get(asked)
        for step in call.find_gradients(asked) if steps is None else steps:
            _give(call, grads, operands, step.parts, _run(step, operands))
        return tuple(grads)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        # torch has switched forward mode off, which would also hide the tangents of an outer transform.
        with forward_ad._set_fwd_grad_enabled(True):
            call, tensors, outs, known = _saved(ctx)
            tensors = [forward_ad.unpack_dual(t, level=0).primal if isinstance(t, Tensor) else t for t in tensors]
            moving = tuple(k for k, t in enumerate(tangents) if t is not None)
            some = next(t for t in tangents if t is not None)
            results: list[Tensor | None] = [None] * len(call.rule.outputs)
            operands = [*tensors, *tangents, *(outs if known is None else ())]
            for step in call.steps(tangent_passes(call.plan, moving, call.width)):
                for part, tangent in zip(step.parts, _run(step, operands)):
                    results[part.number] = tangent
            return tuple(_zeros(call, k, some) if r is None else r for k, r in enumerate(results))


class _Reduce(_Rules):
    """One reduction of tensors that were checked."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Input) -> Outs:  # type: ignore[override]
        needed = ctx.needs_input_grad
        both, own = call.values.get(needed) or call.find_values(needed)
        outs = _forward(own, tensors)
        _keep(ctx, call, tensors, outs, both)
        return outs if both is None else outs[:1]


#: ``_Reduce.apply`` without the wrapper that looks, once more, for transforms and for ``setup_context``.
_apply_reduce = super(torch.autograd.Function, _Reduce).apply


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
        new = call_of(call.plan, call.m, call.n, call.backend, (info.batch_size, *call.batch), call.width)
        outs = _apply(new, align(call.plan, tensors, in_dims[1:], len(call.batch)))
        return outs, 0


def _batched(call: Call, tensors: Sequence[Input], run: Callable[[Call, Sequence[Input]], Outs]) -> Outs:
    """``run`` for tensors with the hidden batch axis of ``torch.autograd.grad(..., is_grads_batched=True)``.

    Those are not functorch's, and have no rules that a library could register.
    """
    level = _level(tensors)
    bare, size = list(tensors), 1
    dims: list[int | None] = [None] * len(tensors)
    for k, t in enumerate(tensors):
        if isinstance(t, Tensor) and _is_batched(t):
            t = torch._remove_batch_dim(t, level, 1, 0)  # of length 1 if only another level batches it
            bare[k], dims[k], size = t, 0, max(size, t.shape[0])
    whole = call_of(call.plan, call.m, call.n, call.backend, (size, *call.batch), call.width)
    outs = run(whole, align(call.plan, bare, dims, len(call.batch)))
    return tuple(torch._add_batch_dim(o, 0, level) for o in outs)


def _level(tensors: Sequence[Input]) -> int:
    """The innermost level that batches one of ``tensors``, of those that are not functorch's."""
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    if level:
        return level
    # A thread of autograd's, which runs the backward pass of another one on a GPU, does not know that one's level.
    return max(_innermost(t) for t in tensors if isinstance(t, Tensor))


def _innermost(t: Tensor) -> int:
    """The innermost level that batches a tensor, 0 if none does: torch does not tell, so one after the other is
    taken off."""
    level = found = 0
    while _is_batched(t):
        level += 1
        if _has_level(t, level):
            t, found = torch._remove_batch_dim(t, level, 1, 0), level
    return found


def _has_level(t: Tensor, level: int) -> bool:
    """Whether ``level`` batches a tensor; the axis of one that it does not batch would have the length given here."""
    return torch._remove_batch_dim(t, level, 2, 0).shape[0] == torch._remove_batch_dim(t, level, 3, 0).shape[0]


def _saved(ctx: Any) -> tuple[Call, list[Any], Sequence[Tensor], Slopes | None]:
    """The call, its operands, the outputs if derivatives need them (or the table of the slopes), the known slopes."""
    call, known, numbers = ctx.kept
    saved = ctx.saved_tensors  # once: checkpointing computes them anew at each access
    count = call.plan.n_vars
    tensors, outs = list(saved[:count]), saved[count:]
    if numbers is not None:
        for k, number in numbers.items():
            tensors[k] = number
    if outs and known is None:  # exp(F - lse) is to be 0 and not NaN in a row without any finite F
        outs = (*outs[:-1], torch.where(outs[-1] == -torch.inf, 0.0, outs[-1]))
    return call, tensors, outs, known


def _zeros(call: Call, output: int, like: Tensor) -> Tensor:
    """The tangent of an output that does not move."""
    dim = 1 if call.rule.outputs[output] == "lse" else call.plan.dim
    return like.new_zeros((*call.batch, call.m, dim))


def _run(step: Step, operands: Sequence[Input]) -> Sequence[Tensor]:
    """The parts of a pass."""
    tensors = [operands[k] for k in step.inputs]
    outs = _recorded(step.whole, tensors) if records(tensors) else _forward(step.apart, tensors)
    return outs if len(outs) == len(step.parts) else outs[0].split(step.sizes, -1)


def _give(
    call: Call, grads: list[Tensor | None], tensors: Sequence[Any], parts: Sequence[Part], outs: Sequence[Tensor]
) -> None:
    """Put gradients in their places."""
    for part, out in zip(parts, outs):
        if part.over_rows:
            out = out.sum(-2)
        like = tensors[part.number]
        if call.batch:
            out = sum_to(out, like.shape)
        elif like.ndim == 3:  # rows with an axis of length 1 beside them
            out = out.unsqueeze(-2 if like.shape[-2] == 1 else -3)
        grads[part.number + 1] = out


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
