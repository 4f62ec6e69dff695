"""``reduce`` with derivatives.

The derivative of a sum, a logsumexp or a softmax-weighted sum is a sum again, so that one ``autograd.Function`` whose
backward and forward-mode rules call ``reduce`` has derivatives of every order. Minima are differentiated through the
columns that were chosen, see ``chosen``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from .. import backends
from ..backends import Input
from ..backends.layout import own_axes
from ..formula.plan import Plan, make_plan
from ..formula.reductions import CORES
from .chosen import reduce_chosen
from .derivatives import Call, Part, Pass, Slopes, call_of, fused_width, gradient_passes, slopes, tangent_passes

Tensor = torch.Tensor
Outs = tuple[Tensor, ...]

_transformed = torch._C._are_functorch_transforms_active
_modes = torch._C._len_torch_dispatch_stack
_unwrap = torch._C._functorch.unwrap_if_dead
_is_batched = torch._C._functorch.is_legacy_batchedtensor
_NUMBERS = frozenset((float, int, type(None)))
_PLAIN = _NUMBERS | {Tensor, torch.nn.Parameter}
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
        if not (torch.is_grad_enabled() and _moves(tensors)):
            return backends.reduce(plan, tensors, m, n, backend, batch)
        if plan.reads_all and plan.tensors and tensors[plan.tensors[0]].dtype not in _HALVES:  # type: ignore[union-attr]
            if batch is None:
                batch = backends.validate(plan, tensors, m, n)
            return _recorded(call_of(plan, m, n, backend, batch), tensors)
    return differentiable(plan, tensors, m, n, backend, batch)


def _is_plain(tensors: Sequence[Input]) -> bool:
    """Whether the back end could be called as it is: nothing is transformed or traced, and there is memory to read."""
    if _transformed() or _modes() or forward_ad._current_level >= 0:
        return False
    for t in tensors:  # noqa: SIM110 (a generator costs more than the rest)
        if t.__class__ not in _PLAIN:
            return False
    return True


def _moves(tensors: Sequence[Input]) -> bool:
    """Whether one of the tensors requires a gradient."""
    for t in tensors:  # noqa: SIM110
        if t.__class__ not in _NUMBERS and t.requires_grad:  # type: ignore[union-attr]
            return True
    return False


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
    outs = reduce_checked(call_of(plan, m, n, backend, batch), tensors)
    return tuple(o.to(first.dtype) if o.is_floating_point() else o for o in outs) if half else outs


def reduce_checked(call: Call, tensors: Sequence[Input]) -> Outs:
    """``reduce`` of float32 or float64 tensors that were checked already."""
    return _recorded(call, tensors) if records(tensors) else _forward(call, tensors)


def _recorded(call: Call, tensors: Sequence[Input]) -> Outs:
    if call.plan.first:  # autograd knows one result, and how to take it apart
        (out,) = _recorded(call.of(make_plan("Sum", call.plan.formula, n_vars=call.plan.n_vars)), tensors)
        return out.split([dim for _, dim in call.plan.outputs], -1)
    if CORES[call.plan.core].cotangents is None:
        return reduce_chosen(call, tensors, _apply, reduce_checked)
    return _apply(call, tensors)


def _apply(call: Call, tensors: Sequence[Input]) -> Outs:
    if _transformed():
        return _Transformed.apply(call, *tensors)  # type: ignore[no-any-return,no-untyped-call]
    alive = [t if t.__class__ in _NUMBERS else _unwrap(t) for t in tensors]  # type: ignore[arg-type]
    return _apply_reduce(call, *alive)  # type: ignore[no-any-return]


def pull_back_sum(
    plan: Plan, tensors: Sequence[Input], cotangent: Tensor, wanted: Collection[int], m: int, n: int, backend: str
) -> list[Tensor | None]:
    """The gradient of Σ cotangent · sum by the tensors with numbers ``wanted``; the sum itself is not computed.

    Args:
        plan: a sum.
        tensors, m, n, backend: as for :func:`reduce`, in float32 or float64.
        cotangent: (*B, m, plan.dim).

    Returns:
        One gradient for each of ``tensors``: ``None`` for those not wanted, and where the sum does not depend on it.
    """
    if plan.core != "Sum":
        raise ValueError(f"the gradient of {plan.core} needs its value")
    batch = torch.broadcast_shapes(backends.validate(plan, tensors, m, n), cotangent.shape[:-2])
    call = call_of(plan, m, n, backend, tuple(batch))
    grads: list[Tensor | None] = [None] * (1 + len(tensors))
    operands = [*tensors, cotangent]
    for step in gradient_passes(plan, tuple(sorted(wanted)), (True,), fused_width(cotangent.device)):
        for part, out in zip(step.parts, _run(call, step, operands)):
            _give(grads, tensors, part, out)
    return grads[1:]


def records(tensors: Sequence[Input]) -> bool:
    """Whether derivatives may be asked for."""
    if _transformed() or (forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled()):
        return True
    return torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors)


def _forward(call: Call, tensors: Sequence[Input]) -> Outs:
    """The numbers; nothing is recorded or transformed at this point."""
    traced = _modes() > 0
    batched = False
    for t in tensors:
        kind = t.__class__
        traced = traced or kind not in _PLAIN
        batched = batched or (kind not in _NUMBERS and _is_batched(t))  # type: ignore[arg-type]
    if traced:
        from .operator import call_operator

        return call_operator(call.plan, tensors, call.m, call.n, call.backend)
    if batched:
        return _forward_batched(call, tensors)
    return backends.reduce(call.plan, tensors, call.m, call.n, call.backend, call.batch)


def _keep(
    ctx: Any, call: Call, tensors: Sequence[Input], outs: Outs, both: Slopes | None = None, table: Tensor | None = None
) -> None:
    """Save what derivatives need; some of them may be known already, in a ``table``."""
    core = CORES[call.plan.core]
    if core.cotangents is None:
        ctx.mark_non_differentiable(*outs)
        return
    ctx.set_materialize_grads(False)
    ctx.call, ctx.slopes = call, both
    saved: list[Any] = list(tensors)
    ctx.numbers = None
    if len(call.plan.tensors) < len(saved):
        ctx.numbers = {k: t for k, t in enumerate(tensors) if t.__class__ in _NUMBERS and t is not None}
        saved = [None if t.__class__ in _NUMBERS else t for t in tensors]
    if core.name != "Sum":
        saved += outs
    elif both is not None:
        saved.append(table)
    ctx.save_for_backward(*saved)
    if forward_ad._current_level >= 0 or _transformed():
        ctx.save_for_forward(*saved)


class _Rules(torch.autograd.Function):
    """The derivatives of a reduction: reductions again."""

    @staticmethod
    def backward(ctx: Any, *gs: Tensor | None) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad
        grads: list[Tensor | None] = [None] * len(needed)
        given = tuple([g is not None for g in gs])
        if True not in given:
            return tuple(grads)
        call: Call = ctx.call
        tensors, outs, table = _saved(ctx)
        known: Collection[int] = ()
        if table is not None and not torch.is_grad_enabled():  # to autograd, the table does not depend on anything
            known = ctx.slopes.numbers
            for part in ctx.slopes.parts:
                slope = table if part.dim == table.shape[-1] else table.narrow(-1, part.start, part.dim)
                _give(grads, tensors, part, gs[0] * slope)  # type: ignore[operator]
        wanted = tuple([k for k, need in enumerate(needed[1:]) if need and k not in known])
        if wanted:
            operands = [*tensors, *gs, *outs]
            width = fused_width(gs[given.index(True)].device)  # type: ignore[union-attr]
            for step in gradient_passes(call.plan, wanted, given, width):
                for part, out in zip(step.parts, _run(call, step, operands)):
                    _give(grads, tensors, part, out)
        return tuple(grads)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        # torch has switched forward mode off, which would also hide the tangents of an outer transform.
        with forward_ad._set_fwd_grad_enabled(True):
            tensors, outs = _saved(ctx)[:2]
            tensors = [forward_ad.unpack_dual(t, level=0).primal if isinstance(t, Tensor) else t for t in tensors]
            moving = tuple(k for k, t in enumerate(tangents) if t is not None)
            some = next(t for t in tangents if t is not None)
            results: list[Tensor | None] = [None] * len(CORES[ctx.call.plan.core].outputs)
            for step in tangent_passes(ctx.call.plan, moving, fused_width(some.device)):
                found = _run(ctx.call, step, [*tensors, *tangents, *outs])
                for part, tangent in zip(step.parts, found):
                    results[part.number] = tangent
            return tuple(_zeros(ctx.call, k, some) if r is None else r for k, r in enumerate(results))


class _Reduce(_Rules):
    """One reduction of tensors that were checked."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Input) -> Outs:  # type: ignore[override]
        first: Any = tensors[call.plan.tensors[0]] if call.plan.tensors else None
        both = None if first is None else slopes(call.plan, ctx.needs_input_grad[1:], fused_width(first.device))
        if both is None:
            outs = _forward(call, tensors)
            _keep(ctx, call, tensors, outs)
            return outs
        value, table = _forward(call.of(both.plan), tensors)
        _keep(ctx, call, tensors, (value,), both, table)
        return (value,)


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
        new = call_of(call.plan, call.m, call.n, call.backend, (info.batch_size, *call.batch))
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
    whole = call_of(call.plan, call.m, call.n, call.backend, (size, *call.batch))
    outs = _forward(whole, align(call.plan, bare, dims, len(call.batch)))
    return tuple(torch._add_batch_dim(o, 0, level) for o in outs)


def _saved(ctx: Any) -> tuple[list[Any], Sequence[Tensor], Tensor | None]:
    """The operands, the outputs if derivatives need them, and the table of known derivatives."""
    saved = ctx.saved_tensors  # once: checkpointing computes them anew at each access
    count = ctx.call.plan.n_vars
    tensors, outs = list(saved[:count]), saved[count:]
    if ctx.numbers is not None:
        for k, number in ctx.numbers.items():
            tensors[k] = number
    if ctx.slopes is not None:
        return tensors, (), outs[0]
    if outs:  # exp(F - lse) is to be 0 and not NaN in a row without any finite F
        outs = (*outs[:-1], torch.where(outs[-1] == -torch.inf, 0.0, outs[-1]))
    return tensors, outs, None


def _zeros(call: Call, output: int, like: Tensor) -> Tensor:
    """The tangent of an output that does not move."""
    dim = 1 if CORES[call.plan.core].outputs[output] == "lse" else call.plan.dim
    return like.new_zeros((*call.batch, call.m, dim))


def _run(call: Call, step: Pass, operands: Sequence[Input]) -> Sequence[Tensor]:
    """The parts of a pass."""
    tensors = [operands[k] for k in step.inputs]
    if records(tensors):
        outs = _recorded(call.derivative(step.plan, step.swapped), tensors)
    else:
        outs = _forward(call.derivative(step.apart, step.swapped), tensors)
    return outs if len(outs) == len(step.parts) else outs[0].split(step.sizes, -1)


def _give(grads: list[Tensor | None], tensors: Sequence[Any], part: Part, out: Tensor) -> None:
    """Put a gradient in its place."""
    if part.over_rows:
        out = out.sum(-2)
    grads[part.number + 1] = sum_to(out, tensors[part.number].shape)


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
