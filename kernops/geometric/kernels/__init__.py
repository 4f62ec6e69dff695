"""Where the geometric kernels run. Three modules with the same functions, and :func:`choose`, which picks one.

The functions, each in ``tiled`` (pure torch, any device), ``cpu`` (host C++) and ``cuda``; all tensors of a call are on
one device, and none of them synchronises the host with a GPU. ``tiled`` has their docstrings:

``available``, ``bucket_sort``, ``frustum_cells``, ``make_runs``, ``segment_work``, ``segment_sum``,
``segment_cumsum``, ``gather``, ``splat_atomic``, ``splat_backward``, ``depth_lse``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import torch

from ... import backends

#: What every module of this package offers.
FUNCTIONS = (
    "available", "bucket_sort", "frustum_cells", "make_runs", "segment_work", "segment_sum", "segment_cumsum", "gather",
    "splat_atomic", "splat_backward", "depth_lse",
)  # fmt: skip


F = TypeVar("F", bound=Callable[..., Any])


def by_address(function: F) -> F:
    """A kernel that is told where its tensors lie, given tensors whose numbers lie there.

    ``z.conj().imag`` and the like have other numbers than their memory: a bit of torch's says that they are negated.
    """

    @wraps(function)
    def kernel(*args: Any, **named: Any) -> Any:
        return function(*map(_as_in_memory, args), **{k: _as_in_memory(v) for k, v in named.items()})

    return kernel  # type: ignore[return-value]


def _as_in_memory(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.resolve_neg() if x.is_neg() else x
    return Scale(*map(_as_in_memory, x)) if isinstance(x, Scale) else x


class Scale(NamedTuple):
    """What items of two numbers mean, and the weights W that they have.

    ``W(p) = depth.flat[p] * weight.flat[p]``; with ``lse``, ``depth.flat[p]`` is a logit and
    ``exp(depth.flat[p] - lse[pixel of p])`` stands for it; without ``weight`` that factor is 1.

    * ``mode == "runs"``: the item (p0, length) is a run of points of one pixel, ``p0 + k * hw`` for k < length. It adds
      up their W and multiplies the row of the pixel, ``p0 // (D * hw) * hw + p0 % hw``.
    * ``mode == "pairs"``: the item (place, row) multiplies that row by W(place).
    """

    mode: str
    depth: torch.Tensor
    weight: torch.Tensor | None
    lse: torch.Tensor | None
    D: int
    hw: int


class Level(NamedTuple):
    """One pass of a sum by segments, the arguments of ``segment_sum`` of these names.

    A plan has one level or two: the rows that the first writes are the values of the second. ``work`` is what
    ``segment_work`` of the back end that made the plan says of ``starts``; None, or empty: found out at each call.
    """

    items: torch.Tensor
    starts: torch.Tensor
    targets: torch.Tensor | None
    n_out: int
    work: torch.Tensor | None = None


def sum_levels(kernels: ModuleType, values: torch.Tensor, levels: Sequence[Level], scale: Scale | None) -> torch.Tensor:
    """The levels one after the other: (R, C) to (n_out of the last, C), with sums in between in float32 or more."""
    wide = torch.float64 if values.dtype == torch.float64 else torch.float32
    dtype = values.dtype
    for k, level in enumerate(levels):
        last = k == len(levels) - 1
        values = kernels.segment_sum(
            values, level.items, level.starts, level.targets, level.n_out, scale, dtype if last else wide, level.work
        )
        scale = None
    return values


def choose(backend: str, device: torch.device) -> ModuleType:
    """The module of kernels for a request; an error where the one that was asked for cannot run.

    Args:
        backend: ``"auto"``, ``"cuda"``, ``"cpu"`` or ``"tiled"``. ``"auto"`` follows the environment variable
            ``KERNOPS_BACKEND``, and without it takes the fastest that can run.
        device: where the data is.

    Raises:
        ValueError: no such back end, or one that is for another kind of device.
        RuntimeError: the back end cannot run here; the message has the reason.
    """
    return backends.choose(backend, device, __name__)
