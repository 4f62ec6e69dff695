"""The way into the operators of this package, for autograd and for what looks into a program instead of running it.

Code that runs goes straight to the kernels, through an ``autograd.Function`` where derivatives may be asked for; code
that ``torch.compile`` or ``torch.export`` traces gets the operator of ``torch.ops.kernops``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

Tensor = torch.Tensor

_transformed = torch._C._are_functorch_transforms_active
_modes = torch._C._len_torch_dispatch_stack
_is_batched = torch._C._functorch.is_legacy_batchedtensor
#: Classes of tensors that the kernels read.
PLAIN = frozenset((Tensor, torch.nn.Parameter))


class Row(NamedTuple):
    """An operator: its schema in ``torch.ops.kernops``, a check of its arguments, what computes it, the shape of its
    result, and the same with derivatives."""

    schema: str
    check: Callable[..., tuple]
    compute: Callable[..., Any]
    fake: Callable[..., Any]
    differentiable: Callable[..., Any]


#: Operators by name; ``operator.py`` writes them down.
TABLE: dict[str, Row] = {}


def call(name: str, *args: Any) -> Any:
    """The operator ``name`` of ``TABLE``, differentiably to any order."""
    if is_dynamo_compiling():
        return getattr(torch.ops.kernops, name)(*args)
    if records(args):
        return TABLE[name].differentiable(*args)
    return run(name, *args)


def records(args: tuple) -> bool:
    """Whether derivatives may be asked for."""
    if _transformed() or (forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled()):
        return True
    return torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in args)


def run(name: str, *args: Any) -> Any:
    """The numbers; nothing is to be recorded at this point."""
    if _modes() or any(isinstance(t, Tensor) and (t.__class__ not in PLAIN or _is_batched(t)) for t in args):
        return getattr(torch.ops.kernops, name)(*args)
    return TABLE[name].compute(*args)


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
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
