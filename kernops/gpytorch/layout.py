"""What the matrix of a kernel is beside its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..formula.graph import CAT_I, CAT_J, CAT_P, Node
from ..lazy import LazyTensor
from ..lazy.arrays import to_tensor
from ..lazy.frame import Frame
from ..operators import KernelOperator

Tensor = torch.Tensor

#: Axes of a variable after its batch axes.
OWN_AXES = {CAT_I: 2, CAT_J: 2, CAT_P: 1}


@dataclass(frozen=True)
class Layout:
    """A formula, and which tensor each of its variables is: the same for all data of the same kind.

    Attributes:
        formula: the kernel.
        cats: the variables' categories.
        sources: for each variable the number of its tensor, or its value if it is a number. Points that are both rows
            and columns are one tensor.
        symmetric: whether the matrix is.
        backend: what computes; ``None`` for the choice by device.
    """

    formula: Node
    cats: tuple[int, ...]
    sources: tuple[int | float | None, ...]
    symmetric: bool
    backend: str | None = None

    @staticmethod
    def split(operator: KernelOperator) -> tuple[Layout, list[Tensor]]:
        """An operator without an added diagonal as its layout and its tensors."""
        frame = operator.lazy.frame
        tensors: list[Tensor] = []
        sources: list[int | float | None] = []
        for t in frame.tensors:
            if not isinstance(t, Tensor):
                sources.append(t)
                continue
            known = next((k for k, mine in enumerate(tensors) if mine is t), None)
            if known is None:
                known = len(tensors)
                tensors.append(t)
            sources.append(known)
        layout = Layout(operator.lazy.formula, frame.cats, tuple(sources), operator.symmetric, frame.backend)
        return layout, tensors

    def join(self, tensors: Sequence[Tensor]) -> KernelOperator:
        """The operator of these tensors."""
        values = tuple(tensors[s] if isinstance(s, int) else s for s in self.sources)
        sizes: dict[int, int] = {}
        batches = []
        for t, cat in zip(values, self.cats):
            if isinstance(t, Tensor):
                own = OWN_AXES[cat]
                batches.append(t.shape[: t.ndim - own])
                if own == 2:
                    sizes[cat] = t.shape[-2]
        batch = tuple(torch.broadcast_shapes(*batches))
        space = to_tensor(tensors[0], "the operator's data")[1]
        frame = Frame(values, self.cats, sizes.get(CAT_I), sizes.get(CAT_J), batch, space, self.backend)
        return KernelOperator(LazyTensor(self.formula, frame), symmetric=self.symmetric)

    def owns(self) -> dict[int, int]:
        """Tensor -> its axes after the batch axes."""
        return {s: OWN_AXES[cat] for s, cat in zip(self.sources, self.cats) if isinstance(s, int)}
