"""The tensors of a frame as formulas read them, made of those that the caller gave when they are read, not before.

A tensor may get other data at any time, ``x.data = ...``, as optimizers, ``load_state_dict(assign=True)`` and modules
do that move. torch reads what a tensor holds when it computes; a view that was made before still has the old data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..autograd.tracing import is_dynamo_compiling

Tensor = torch.Tensor
View = Callable[[Tensor], Tensor]

_modes = torch._C._len_torch_dispatch_stack
_is_batched = torch._C._functorch.is_legacy_batchedtensor
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_PLAIN = frozenset((Tensor, torch.nn.Parameter))


class Late:
    """A tensor that formulas read through a view of it: ``steps``, one after the other, functions of a module."""

    __slots__ = ("tensor", "steps")

    def __init__(self, tensor: Tensor, *steps: View) -> None:
        self.tensor, self.steps = tensor, steps

    def read(self) -> Tensor:
        view = self.tensor
        for step in self.steps:
            view = step(view)
        return view

    def __reduce__(self) -> tuple:
        return Late, (self.tensor, *self.steps)


# --- steps ------------------------------------------------------------------------------------------------------------
def without_columns(t: Tensor) -> Tensor:
    """Rows of (*B, m, 1, D)."""
    return t.squeeze(-2)


def without_rows(t: Tensor) -> Tensor:
    """Columns of (*B, 1, n, D)."""
    return t.squeeze(-3)


def vectors(t: Tensor) -> Tensor:
    """A parameter of (*B, 1, 1, D)."""
    return t.squeeze(-2).squeeze(-2)


def flat(t: Tensor) -> Tensor:
    """A parameter of all numbers."""
    return t.reshape(-1)


def flat_matrices(t: Tensor) -> Tensor:
    """A parameter of the rows of a matrix, one after the other."""
    return t.flatten(-2)


def single(t: Tensor) -> Tensor:
    """Vectors of one component."""
    return t.unsqueeze(-1)


def renamed(t: Tensor) -> Tensor:
    """The same under another identity."""
    return t.view_as(t)


def real_part(t: Tensor) -> Tensor:
    """Of complex numbers."""
    return t.real


def imaginary_part(t: Tensor) -> Tensor:
    """Of complex numbers."""
    return t.imag


# --- of a whole frame -------------------------------------------------------------------------------------------------
def late(value: Any) -> Any:
    """A value of an unbatched frame, whose rows may have an axis of length 1 beside them, for one with batch axes."""
    if isinstance(value, Tensor) and value.ndim == 3:
        return Late(value, without_columns if value.shape[-2] == 1 else without_rows)
    return value


def source(value: Any) -> Any:
    """What the caller gave for a value."""
    return value.tensor if value.__class__ is Late else value


def read(value: Any, batched: bool) -> Any:
    """A value as formulas read it."""
    value = value if batched else late(value)
    return value.read() if value.__class__ is Late else value


class Views:
    """The views of a frame's values, the same objects each time as long as the tensors hold what they held."""

    __slots__ = ("made", "stamps")

    def __init__(self, count: int) -> None:
        self.made: tuple[Any, ...] = (None,) * count
        self.stamps: list[Any] = [None] * count

    def of(self, given: Sequence[Any], batched: bool) -> tuple[Any, ...]:
        stamps = [stamp(source(v)) for v in given]
        if None in stamps or stamps != self.stamps:
            pairs = zip(given, self.made, stamps, self.stamps)
            self.made = tuple([view if s and s == old else read(v, batched) for v, view, s, old in pairs])
            self.stamps = [
                s if s and _is_view(view, source(v)) else None for v, view, s in zip(given, self.made, stamps)
            ]
        return self.made


def _is_view(view: Any, t: Any) -> bool:
    """Whether what was read is in the memory of ``t``: a view keeps it, so that no other data can come to lie there."""
    return view is t or view.untyped_storage().data_ptr() == t.untyped_storage().data_ptr()


def stamp(t: Any, written: bool = False) -> tuple | None:
    """What tells that a view of a tensor still is one, or, with ``written``, that what was computed of it still holds.

    Only as long as the memory is kept, so that no other data can come to lie at its address. ``None``: nothing tells.
    """
    if not isinstance(t, Tensor):
        return (t,)
    if is_dynamo_compiling() or _modes() or t.__class__ not in _PLAIN or _is_batched(t) or _is_wrapped(t):
        return None
    if written and t.is_inference():
        return None
    version = t._version if written else None
    bits = t.requires_grad, t.is_leaf, t.is_neg(), t.is_conj()
    return t.data_ptr(), t.shape, t.stride(), t.dtype, bits, version
