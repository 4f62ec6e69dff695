"""Where a plan runs. One function, :func:`reduce`, in front of three back ends that give the same numbers."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType

import torch

from .. import environment
from ..formula.graph import CAT_I, CAT_J, CAT_P, CAT_SCALAR
from ..formula.plan import Plan
from ..formula.reductions import CORES
from .layout import batch_of, broadcast, own_axes

Tensor = torch.Tensor
Input = Tensor | float | None

#: Name -> the device types that the back end is for, in the order in which "auto" tries them.
BACKENDS: dict[str, tuple[str, ...]] = {"cuda": ("cuda",), "cpu": ("cpu",), "tiled": ("cpu", "cuda", "mps", "xpu")}
_FLOATS = (torch.float32, torch.float64)
_HALVES = (torch.float16, torch.bfloat16)
_NUMBERS = frozenset((float, int, type(None)))


def choose(backend: str, device: torch.device, package: str = __name__) -> ModuleType:
    """The back end's module for a request; an error where the one that was asked for cannot run.

    ``package`` is where the modules of the back ends are: what is not a reduction has its own.
    """
    if backend == "auto":
        asked = environment.get("KERNOPS_BACKEND") or "auto"
        return _module(asked, device, "the environment variable KERNOPS_BACKEND", package)
    return _module(backend, device, "backend", package)


@lru_cache(maxsize=64)
def _module(backend: str, device: torch.device, asker: str, package: str) -> ModuleType:
    if backend != "auto":
        if backend not in BACKENDS:
            raise ValueError(f"{asker} must be 'auto', {', '.join(map(repr, BACKENDS))}; got {backend!r}")
        if backend != "tiled" and device.type not in BACKENDS[backend]:
            raise ValueError(f"{asker}: {backend!r} computes on {BACKENDS[backend][0]}; the data is on {device}")
        module = importlib.import_module(f"{package}.{backend}")
        reason = module.available(device)
        if reason is not None:
            raise RuntimeError(f"{asker}: {backend!r} cannot run here: {reason}")
        return module
    for name, devices in BACKENDS.items():
        if device.type in devices and name != "tiled":
            module = importlib.import_module(f"{package}.{name}")
            reason = module.available(device)
            if reason is None:
                return module
            logging.getLogger(package).warning(
                "backend %r cannot run (%s); using the slower 'tiled' back end on %s", name, reason, device
            )
    return importlib.import_module(f"{package}.tiled")


def reduce(
    plan: Plan, tensors: Sequence[Input], m: int, n: int, backend: str = "auto", batch: tuple[int, ...] | None = None,
    fresh: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute ``plan`` for ``m`` rows and ``n`` columns.

    Args:
        plan: what to compute.
        tensors: value of variable number k at position k: i-variables (*B, m, D), j-variables (*B, n, D), parameters
            (*B, D), of one dtype on one device, with any strides, negated by torch's bit or not; scalars
            as Python floats. Batch shapes broadcast.
        m, n: numbers of rows and columns.
        backend: ``"auto"``, ``"cuda"``, ``"cpu"`` or ``"tiled"``.
        batch: the broadcast batch shape, if the caller knows it. If that is ``()``, rows may have an axis of length 1
            beside them, as in the arrays of a ``LazyTensor``: (m, 1, D) or (1, n, D).
        fresh: whether the caller has just checked the tensors against all that.

    Returns:
        The plan's outputs, (*B, m, D') each; (*B, m, K, D') for ``KMin``. Indices are int64. float16 and bfloat16 are
        computed in float32 and returned in their own dtype.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, there are too few columns for a reduction without an
            identity, or the plan's algorithm cannot compute it.
        TypeError: a tensor is not of a floating-point dtype.
    """
    if batch is None:
        batch, fresh = validate(plan, tensors, m, n), True
    if plan.k > n:
        raise ValueError(f"k: {plan.core} keeps the k = {plan.k} smallest of n = {n} columns; k must be at most n")
    if plan.reads_all and plan.tensors:
        first: Tensor = tensors[plan.tensors[0]]  # type: ignore[assignment]
    else:
        first, tensors = _only_used(plan, tensors)
    dtype = first.dtype
    if fresh or batch:
        if not fresh:
            _check_data(plan, tensors, m, n, batch, first)
        negative = False
        for t in tensors:
            negative = negative or (t.__class__ not in _NUMBERS and t.is_neg())  # type: ignore[union-attr]
    else:
        negative = _look_at_data(plan, tensors, m, n, first)
    if negative:
        tensors = [t.resolve_neg() if isinstance(t, Tensor) else t for t in tensors]
    if m == 0 or n == 0 or 0 in batch:
        outs = _empty(plan, first, m, n, batch)
    else:
        module = choose(backend, first.device)
        if dtype in _HALVES and not module.reads(plan, dtype):
            tensors = [t.float() if isinstance(t, Tensor) else t for t in tensors]
        if plan.algorithm == "pruned" and module.__name__.endswith(".tiled"):
            raise ValueError(
                f"algorithm 'pruned' is of the cpu and cuda back ends; this is tiled, with data on {first.device}"
            )
        outs = module.run(plan, tensors, m, n, batch)
    if dtype in _HALVES:
        outs = tuple(o.to(dtype) if o.is_floating_point() else o for o in outs)
    return outs


def _look_at_data(plan: Plan, tensors: Sequence, m: int, n: int, first: Tensor) -> bool:
    """``_check_data`` without batch dimensions, in a fifth of its time; whether a tensor is negated by torch's bit."""
    dtype, index = first.dtype, first.get_device()  # -1 is the CPU
    negative = False
    for k, cat, dim in plan.reads:
        t = tensors[k]
        shape, rows = t.shape, n if cat else m
        other = (
            shape != (dim,)
            if cat == CAT_P
            else shape != (rows, 1, dim) and shape != (1, rows, dim) and shape != (rows, dim)
        )
        if other or t.dtype is not dtype or t.get_device() != index:
            _check_data(plan, tensors, m, n, (), first)
        if t.is_neg():
            negative = True
    return negative


def _check_data(
    plan: Plan, tensors: Sequence[Input], m: int, n: int, batch: tuple[int, ...], first: Tensor
) -> None:  # fmt: skip
    """An error unless every tensor has the data that the caller meant: a tensor may get others at any time, as by
    ``x.data = ...``, and a kernel would read beyond their end."""
    dtype, device = first.dtype, first.device
    for k, cat, dim in plan.reads:
        t: Tensor = tensors[k]  # type: ignore[assignment]
        shape, whole = t.shape, (dim,) if cat == CAT_P else (n if cat == CAT_J else m, dim)
        if (shape == whole or shape == batch + whole) and t.dtype is dtype and t.device == device:
            continue  # quickly, as nearly always
        own = {CAT_I: (m, dim), CAT_J: (n, dim)}.get(cat, (dim,))
        beside = not batch and cat != CAT_P and t.shape in ((own[0], 1, dim), (1, own[0], dim))
        if not (beside or _fits(t.shape, own, batch)) or t.dtype != dtype or t.device != device:
            raise ValueError(
                f"tensors[{k}] has other data than before: {t.dtype} of shape {tuple(t.shape)} on {t.device}, where "
                f"{first.dtype} of shape {(*batch, *own)} on {first.device} was expected. After `x.data = ...` or a "
                "module's .to(...), make again what was made of x: the LazyTensor or operator; before a backward pass, "
                "run the forward pass again"
            )


def _fits(shape: tuple[int, ...], own: tuple[int, ...], batch: tuple[int, ...]) -> bool:
    """Whether a shape ends with ``own``, after batch axes that broadcast to ``batch``."""
    lead = len(shape) - len(own)
    if not 0 <= lead <= len(batch) or shape[lead:] != own:
        return False
    return all(size in (1, whole) for size, whole in zip(shape[:lead], batch[len(batch) - lead :]))


def _only_used(plan: Plan, tensors: Sequence[Input]) -> tuple[Tensor, Sequence[Input]]:
    """A tensor that says dtype and device, and the tensors without those that the formula does not read."""
    used = {v.params[1] for v in plan.variables}
    of_used = [tensors[k] for k in plan.tensors]
    first = next((t for t in of_used or tensors if isinstance(t, Tensor)), None)
    if first is None:
        raise ValueError("a reduction needs at least one tensor; got only numbers")
    if len(used) < len(tensors):
        if not of_used:
            _check_like(next(k for k, t in enumerate(tensors) if t is first), first, 0, first)
        tensors = [t if k in used or t is first else None for k, t in enumerate(tensors)]
    return first, tensors


def validate(plan: Plan, tensors: Sequence[Input], m: int, n: int) -> tuple[int, ...]:
    """Check ``tensors`` against ``plan``; returns the broadcast batch shape."""
    if len(tensors) != plan.n_vars:
        raise ValueError(f"tensors: the plan has {plan.n_vars} variables; got {len(tensors)}")
    batches = []
    first: tuple[int, Tensor] | None = None
    for v in plan.variables:
        cat, k, dim = v.params
        t = tensors[k]  # type: ignore[index]
        if cat == CAT_SCALAR:
            if not isinstance(t, (int, float)):
                raise TypeError(f"tensors[{k}] must be a number, as the formula says; got {type(t).__name__}")
            continue
        if not isinstance(t, Tensor):
            raise TypeError(f"tensors[{k}] must be a torch.Tensor; got {type(t).__name__}")
        first = first or (k, t)  # type: ignore[assignment]
        _check_like(k, t, *first)  # type: ignore[arg-type,misc]
        own = own_axes(cat)  # type: ignore[arg-type]
        want = {CAT_I: (m, dim), CAT_J: (n, dim)}.get(cat, (dim,))  # type: ignore[arg-type]
        if t.ndim < own or tuple(t.shape[t.ndim - own :]) != want:
            raise ValueError(f"tensors[{k}] must have shape (..., {', '.join(map(str, want))}); got {tuple(t.shape)}")
        batches.append(batch_of(t, cat))  # type: ignore[arg-type]
    try:
        return broadcast(batches)
    except ValueError:
        raise ValueError(f"batch shapes do not broadcast: {', '.join(map(str, batches))}") from None


def _check_like(k: int, t: Tensor, k0: int, first: Tensor) -> None:
    if t.dtype not in _FLOATS + _HALVES:
        raise TypeError(
            f"tensors[{k}] must be float16, bfloat16, float32 or float64; got {str(t.dtype).removeprefix('torch.')}"
        )
    if t.dtype != first.dtype:
        raise ValueError(f"tensors must share one dtype; tensors[{k0}] is {first.dtype}, tensors[{k}] is {t.dtype}")
    if t.device != first.device:
        raise ValueError(
            f"tensors must be on one device; tensors[{k0}] is on {first.device}, tensors[{k}] on {t.device}"
        )


def _empty(plan: Plan, like: Tensor, m: int, n: int, batch: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Results where there is nothing to reduce over, or no row."""
    core = CORES[plan.core]
    if m > 0 and 0 not in batch and core.empty is None:
        raise ValueError(f"{plan.core} over no columns (n = 0) has no value")
    outs = []
    for k, (name, dim) in enumerate(plan.outputs):
        shape = (*batch, m, *((plan.k,) if plan.k else ()), dim)
        if name == "index":
            outs.append(torch.empty(shape, dtype=torch.int64, device=like.device))
        else:
            dtype = torch.float32 if like.dtype in _HALVES else like.dtype
            fill = 0.0 if plan.first or core.empty is None else core.empty[k]
            outs.append(torch.full(shape, fill, dtype=dtype, device=like.device))
    return tuple(outs)
