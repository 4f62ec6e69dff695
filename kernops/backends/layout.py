"""How tensors are laid out for the back ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..formula.graph import CAT_I, CAT_J

Tensor = torch.Tensor
Input = Tensor | float | None

#: Axes of a variable after its batch axes: rows and components, or components alone for a parameter.
OWN_AXES = {CAT_I: 2, CAT_J: 2}


def own_axes(cat: int) -> int:
    return OWN_AXES.get(cat, 1)


def batch_of(tensor: Tensor, cat: int) -> tuple[int, ...]:
    """The batch shape of a variable."""
    return tuple(tensor.shape[: tensor.ndim - own_axes(cat)])


def broadcast(shapes: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """The common shape; raises ``ValueError`` where there is none.

    ``torch.broadcast_shapes`` imports its symbolic shapes at the first call, which takes seconds.
    """
    out: list[int] = []  # the last axis first
    for shape in shapes:
        for k, size in enumerate(reversed(shape)):
            if k == len(out):
                out.append(size)
            elif out[k] == 1:
                out[k] = size
            elif size not in (1, out[k]):
                raise ValueError(f"sizes {out[k]} and {size} do not broadcast")
    return tuple(reversed(out))


def compact(tensors: Sequence[Input]) -> list[Any]:
    """Unbatched tensors without the axis of length 1 that rows may have beside them, (m, 1, D) or (1, m, D)."""
    return [t.squeeze(-2 if t.shape[-2] == 1 else -3) if isinstance(t, Tensor) and t.ndim == 3 else t for t in tensors]


def pair_steps(t: Tensor) -> tuple[int, int]:
    """Strides of rows and of components of (m, 1, D) or (1, m, D)."""
    first, second, components = t.stride()
    return (first if first == second or t.shape[1] == 1 else second), components


def strides(tensor: Tensor, cat: int, batch: tuple[int, ...]) -> tuple[int, ...]:
    """Element strides of ``tensor``: one for each axis of ``batch`` (0 where it broadcasts), of rows, of components.

    The stride of rows is 0 for a parameter.
    """
    own = own_axes(cat)
    lead = tensor.ndim - own
    step = tensor.stride()
    missing = (0,) * (len(batch) - lead)
    outer = tuple(0 if tensor.shape[a] == 1 else step[a] for a in range(lead))
    return missing + outer + ((0,) if own == 1 else ()) + step[lead:]


def pair_view(tensor: Tensor, cat: int) -> Tensor:
    """The variable with an axis for rows, one for columns and one for components, ready to broadcast over pairs."""
    if cat == CAT_I:
        return tensor.unsqueeze(-2)
    if cat == CAT_J:
        return tensor.unsqueeze(-3)
    return tensor[..., None, None, :]
