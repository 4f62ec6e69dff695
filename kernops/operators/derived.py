"""What an operator has made of its tensors, such as the diagonal of a number, as a function of these."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch

from ..lazy.views import stamp

Tensor = torch.Tensor

_transformed = torch._C._are_functorch_transforms_active
_modes = torch._C._len_torch_dispatch_stack


class Derived:
    """Numbers that are computed again when a tensor that they are made of was written to or has other data.

    Args:
        compute: makes the numbers.
        sources: what they are made of.
    """

    __slots__ = ("compute", "sources", "_value", "_stamps", "_seen", "__weakref__")

    def __init__(self, compute: Callable[[], Tensor], sources: Sequence[Tensor]) -> None:
        self.compute, self.sources = compute, tuple(sources)
        self._make(self._now())

    @staticmethod
    def diagonal(diagonal: Tensor, n: int) -> Derived:
        """The diagonal (*B, N) that a tensor of one number, of (*B, 1) or of (*B, N) stands for."""
        return Derived(partial(_expanded, diagonal, n), (diagonal,))

    @property
    def value(self) -> Tensor:
        stamps = self._now()
        # A CUDA graph is to compute it anew at each replay.
        captured = any(t.is_cuda for t in self.sources) and torch.cuda.is_current_stream_capturing()
        if stamps is not None and stamps == self._stamps and not captured:
            return self._value
        if captured or torch.is_inference_mode_enabled() or _transformed() or _modes():
            return self._computed()  # is not to outlive what is going on
        self._make(stamps)
        return self._value

    def _computed(self) -> Tensor:
        with torch.set_grad_enabled(not torch.is_inference_mode_enabled()):  # it may be differentiated later
            return self.compute()

    def _make(self, stamps: list | None) -> None:
        self._value: Tensor = self._computed()
        if torch.is_inference_mode_enabled() or _transformed() or _modes():
            stamps = None
        elif self._value.grad_fn is not None:
            self._value.register_hook(partial(_used, weakref.ref(self)))
        # As long as the data that were seen are kept, no others can come to lie at their addresses.
        self._stamps, self._seen = stamps, None if stamps is None else [t.detach() for t in self.sources]

    def _now(self) -> list | None:
        stamps = [stamp(t, True) for t in self.sources]
        return None if None in stamps else stamps

    def __add__(self, other: Derived) -> Derived:
        return Derived(partial(_sum, self, other), (*self.sources, *other.sources))

    def __reduce__(self) -> tuple:
        return Derived, (self.compute, self.sources)


def _used(derived: weakref.ref, grad: Tensor) -> None:
    """A backward pass frees what the graph behind the value has saved: the next one needs another."""
    found = derived()
    if found is not None:
        found._stamps = None


def _expanded(diagonal: Tensor, n: int) -> Tensor:
    diagonal = diagonal if diagonal.ndim else diagonal[None]
    return diagonal.expand(*diagonal.shape[:-1], n)


def _sum(a: Derived, b: Derived) -> Tensor:
    return a.value + b.value
