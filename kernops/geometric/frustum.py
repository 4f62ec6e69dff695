"""Where a network samples its cameras: the pixels of the feature map and the depths of its bins."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Tensor = torch.Tensor

#: Depth bins that a ``dbound`` may have: beyond, its step is not in metres.
MOST_BINS = 1 << 20


@dataclass(frozen=True, eq=False)
class Frustum:
    """The points (u, v, d) of one camera: every depth of every pixel of the feature map.

    Attributes:
        u: (w,) columns, in pixels of the network's input; float64.
        v: (h,) rows, in pixels of the network's input; float64.
        d: (D,) depths along the optical axis, in metres; float64.
        image_size: (H, W) of the network's input.
        feature_size: (h, w) of the feature map.
    """

    u: Tensor
    v: Tensor
    d: Tensor
    image_size: tuple[int, int]
    feature_size: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int, int]:
        """(D, h, w)."""
        return (len(self.d), *self.feature_size)

    def to(self, device: torch.device | str) -> Frustum:
        """The same frustum on another device."""
        return Frustum(self.u.to(device), self.v.to(device), self.d.to(device), self.image_size, self.feature_size)

    def __repr__(self) -> str:
        (height, width), (h, w) = self.image_size, self.feature_size
        near, far = float(self.d[0]), float(self.d[-1])
        return f"Frustum({h} x {w} features of {height} x {width} pixels, {len(self.d)} depths {near:g} … {far:g} m)"


def frustum(
    image_size: Iterable[int],
    feature_size: Iterable[int],
    dbound: Iterable[float] | None = None,
    depths: object | None = None,
) -> Frustum:
    """The frustum of a network, as Lift-Splat-Shoot makes it.

    Args:
        image_size: (H, W) of the network's input, in pixels.
        feature_size: (h, w) of the feature map. Its columns look at linspace(0, W - 1, w), its rows at
            linspace(0, H - 1, h).
        dbound: (start, stop, step) of the depth bins in metres, as in ``grid_conf``: start, start + step, … below stop;
            the number of bins is that of ``torch.arange(start, stop, step)``, at most 2**20.
        depths: the depths themselves in metres, (D,), increasing, for bins that are not equally spaced; instead of
            ``dbound``.

    Returns:
        A :class:`Frustum` of float64 tensors on the CPU.

    Raises:
        TypeError: a size is not two integers, a depth is not a real number, or both or neither of ``dbound`` and
            ``depths`` are given.
        ValueError: a size is not positive, there are no depths or too many, or they are not finite, positive and
            increasing.

    Example:
        >>> frustum((256, 704), (16, 44), dbound=(1.0, 60.0, 1.0))
        Frustum(16 x 44 features of 256 x 704 pixels, 59 depths 1 … 59 m)
        >>> frustum((256, 704), (16, 44), depths=[1.0, 2.0, 4.0, 8.0]).shape
        (4, 16, 44)

    Source: J. Philion and S. Fidler, "Lift, Splat, Shoot", ECCV 2020, section 3.1.
    """
    height, width = pair("image_size", image_size)
    h, w = pair("feature_size", feature_size)
    if (dbound is None) == (depths is None):
        raise TypeError(f"give one of dbound and depths; got {'neither' if dbound is None else 'both'}")
    d = _arange(dbound) if dbound is not None else _given(depths)
    u = torch.linspace(0, width - 1, w, dtype=torch.float64, device="cpu")
    v = torch.linspace(0, height - 1, h, dtype=torch.float64, device="cpu")
    return Frustum(u, v, d, (height, width), (h, w))


def pair(name: str, size: object) -> tuple[int, int]:
    """A (height, width) of positive integers, or an error that names it."""
    try:
        given: tuple[Any, ...] = tuple(size)  # type: ignore[arg-type]
        rows, columns = map(int, given)
        whole = given == (rows, columns)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        whole = False
    if not whole:
        raise TypeError(f"{name} must be two integers (height, width); got {size!r}")
    if rows < 1 or columns < 1:
        raise ValueError(f"{name} must be positive; got {(rows, columns)}")
    return rows, columns


def numbers(name: str, given: object, accepted: str, count: int) -> tuple[float, ...]:
    """So many real numbers, or a TypeError that names them."""
    try:
        values: tuple[Any, ...] = tuple(given)  # type: ignore[arg-type]
        if len(values) == count and not any(isinstance(k, (str, bytes, np.complexfloating)) for k in values):
            return tuple(map(float, values))
    except (TypeError, ValueError, OverflowError, RuntimeError):
        pass
    raise TypeError(f"{name} must be {accepted}; got {given!r}")


def _arange(dbound: Iterable[float]) -> Tensor:
    start, stop, step = numbers("dbound", dbound, "three numbers (start, stop, step)", 3)
    given = f"dbound=({start:g}, {stop:g}, {step:g})"
    if not all(map(math.isfinite, (start, stop, step))):
        raise ValueError(f"{given} must be finite")
    if start <= 0 or step <= 0 or stop <= start:
        raise ValueError(f"{given}: 0 < start < stop and 0 < step are accepted")
    bins = (stop - start) / step
    if bins > MOST_BINS:
        raise ValueError(f"{given} has {bins:.10g} bins; at most 2**20 = {MOST_BINS} are accepted")
    return start + step * torch.arange(math.ceil(bins), dtype=torch.float64, device="cpu")


def _given(depths: object) -> Tensor:
    try:
        d = depths.detach() if isinstance(depths, Tensor) else torch.as_tensor(depths, device="cpu")
        if d.is_complex():
            raise TypeError
        d = d.to("cpu", torch.float64, copy=True)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"depths must be real numbers (D,); got {depths!r}") from None
    if d.ndim != 1 or not len(d):
        raise ValueError(f"depths must have shape (D,) with at least one depth; got shape {tuple(d.shape)}")
    if not bool(torch.isfinite(d).all()) or float(d[0]) <= 0 or not bool((d.diff() > 0).all()):
        raise ValueError(f"depths must be finite, positive and increasing; got {d.tolist()}")
    return d
