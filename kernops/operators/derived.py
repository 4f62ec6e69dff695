"""What an operator has made of its tensors, such as the diagonal of a number, as a function of these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from ..lazy.views import stamp

Tensor = torch.Tensor


class Derived:
    """Numbers that are computed again when a tensor that they are made of was written to or has other data.

    Args:
        compute: makes the numbers.
        sources: what they are made of.
    """

    __slots__ = ("compute", "sources", "_recorded", "_value", "_stamps", "_seen")

    def __init__(self, compute: Callable[[], Tensor], sources: Sequence[Tensor]) -> None:
        self.compute, self.sources = compute, tuple(sources)
        self._recorded = torch.is_grad_enabled()
        self._make(self._now())

    @staticmethod
    def diagonal(diagonal: Tensor, n: int) -> Derived:
        """The diagonal (*B, N) that a tensor of one number, of (*B, 1) or of (*B, N) stands for."""
        return Derived(partial(_expanded, diagonal, n), (diagonal,))

    @property
    def value(self) -> Tensor:
        stamps = self._now()
        if stamps is None or stamps != self._stamps:
            self._make(stamps)
        return self._value

    def _make(self, stamps: list | None) -> None:
        with torch.set_grad_enabled(self._recorded):
            self._value: Tensor = self.compute()
        # As long as the data that were seen are kept, no others can come to lie at their addresses.
        self._stamps, self._seen = stamps, None if stamps is None else [t.detach() for t in self.sources]

    def _now(self) -> list | None:
        stamps = [stamp(t, True) for t in self.sources]
        return None if None in stamps else stamps

    def __add__(self, other: Derived) -> Derived:
        return Derived(partial(_sum, self, other), (*self.sources, *other.sources))

    def __reduce__(self) -> tuple:
        return Derived, (self.compute, self.sources)


def _expanded(diagonal: Tensor, n: int) -> Tensor:
    diagonal = diagonal if diagonal.ndim else diagonal[None]
    return diagonal.expand(*diagonal.shape[:-1], n)


def _sum(a: Derived, b: Derived) -> Tensor:
    return a.value + b.value
