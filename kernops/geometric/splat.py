"""Lift-splat pooling: features of pixels, weighted by depth, summed into the cells of a bird's-eye-view grid."""

from __future__ import annotations

import numbers
import warnings
from typing import TYPE_CHECKING

import torch
from torch.compiler import is_compiling, is_dynamo_compiling

from .buckets import check_float
from .calls import call
from .plan import SplatPlan

if TYPE_CHECKING:
    from .rig import CameraRig

Tensor = torch.Tensor


def splat(
    depth: Tensor,
    feat: Tensor,
    plan: SplatPlan,
    *,
    weight: Tensor | None = None,
    depth_logits: bool = False,
    prescale: float | None = None,
    rig: CameraRig | None = None,
) -> Tensor:
    """Sum ``depth * weight * feat`` over the points of each cell, without building the points' features.

    ``out[b, :, z, y, x]`` is the sum over the points p of the cell of ``depth[p] * weight[p] * feat[pixel of p]``, and
    0 where there is none. Differentiable to any order by ``depth``, ``weight`` and ``feat``; neither pass holds a
    tensor of all points times C. float16 and bfloat16 are summed in float32.

    Args:
        depth: (B, N, D, h, w), one number per point: a probability, or a logit with ``depth_logits``.
        feat: (B, N, h, w, C), the pixels' features. Channels are last: of a network's output (B, N, C, h, w) in
            channels-last memory, ``.permute(0, 1, 3, 4, 2)`` is that without a copy.
        plan: where the points go.
        weight: like ``depth``: multiplies it point by point.
        depth_logits: ``depth`` holds logits, of which the softmax over D is taken on the way.
        prescale: multiply the features by this number before, and divide the result by it after, as pipelines do whose
            sums are formed in float16. Here products and sums are formed in float32 and subnormal features (below 6e-5
            in float16) are exact, so there is nothing to gain: a power of two changes no bit in float32 and float64,
            other numbers add a rounding, and a float16 result is rounded in its own range either way. What can be lost:
            ``prescale * feat`` beyond 65504 overflows, and the float16 gradient by the result is divided by it too.
        rig: the cameras that the data is from: a UserWarning if the plan is of another calibration. A plan that was
            made from cells has none to compare with.

    Returns:
        (B, C, Z, Y, X), of the dtype of the inputs: a view of contiguous memory (B, Z, Y, X, C), channels last.

    Raises:
        TypeError: an input is not a floating-point tensor, or ``plan`` not a :class:`SplatPlan`.
        ValueError: shapes, dtypes or devices disagree with each other or with the plan, or ``prescale`` is not a
            positive number.
        RuntimeError: the plan's back end cannot run here.

    Example:
        >>> import torch
        >>> plan = SplatPlan.from_cells(torch.tensor([3, -1, 3, 0]).reshape(1, 1, 2, 1, 2), (1, 1, 2, 2))
        >>> depth = torch.tensor([0.5, 0.9, 0.25, 1.0]).reshape(1, 1, 2, 1, 2)
        >>> feat = torch.tensor([[8.0], [3.0]]).reshape(1, 1, 1, 2, 1)
        >>> splat(depth, feat, plan).reshape(2, 2)
        tensor([[3., 0.],
                [0., 6.]])

    Source: J. Philion and S. Fidler, "Lift, Splat, Shoot", ECCV 2020, section 3; in this form J. Huang and G. Huang,
    "BEVPoolv2", 2022.
    """
    _check(depth, feat, plan, weight)
    if depth_logits is not True and depth_logits is not False:
        raise TypeError(f"depth_logits must be True or False; got {depth_logits!r}")
    if rig is not None and not is_dynamo_compiling():
        _compare(rig, plan)
    if prescale is not None:
        prescale = _positive(prescale, feat.dtype)
        feat = feat * prescale
    how = (plan.shape, plan.variant, plan.backend, depth_logits)
    out: Tensor = call("bev_pool", depth, feat, weight, plan.cells, plan._flat, *how)
    if prescale is not None:
        out = out / prescale
    return out.permute(0, 4, 1, 2, 3)


def splat_features(x: Tensor, plan: SplatPlan) -> Tensor:
    """Sum the features of the points of each cell, for a frustum tensor that is there already.

    What ``voxel_pooling`` of Lift-Splat-Shoot does. Where the tensor is depth times features, :func:`splat` does not
    need it. Differentiable to any order, deterministic, whatever the plan's variant.

    Args:
        x: (B, N, D, h, w, C), float16, bfloat16, float32 or float64.
        plan: where the points go.

    Returns:
        (B, C, Z, Y, X), of the dtype of ``x``: a view of contiguous memory (B, Z, Y, X, C).

    Raises:
        TypeError, ValueError: as :func:`splat`.

    Example:
        >>> import torch
        >>> plan = SplatPlan.from_cells(torch.tensor([3, -1, 3, 0]).reshape(1, 1, 2, 1, 2), (1, 1, 2, 2))
        >>> splat_features(torch.tensor([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 2, 1, 2, 1), plan).reshape(2, 2)
        tensor([[4., 0.],
                [0., 4.]])
    """
    check_float("x", x)
    _check_plan(plan)
    if x.ndim != 6 or x.shape[:-1] != plan.cells.shape:
        raise ValueError(
            f"x must have shape (B, N, D, h, w, C) with the plan's {tuple(plan.cells.shape)}; got {tuple(x.shape)}"
        )
    _check_device("x", x, plan)
    if is_compiling():  # also in an export that runs Python: the plan must not keep what it makes
        levels = [] if plan._points is None else plan._points
    else:
        levels = plan.by_point()
    b, z, y, width = plan.shape
    n_cells = b * z * y * width
    rows = x.reshape(plan.cells.numel(), x.shape[-1])
    out: Tensor = call("bucketed_sum", rows, plan.cells.reshape(-1), levels, n_cells, plan.backend)
    return out.reshape(*plan.shape, x.shape[-1]).permute(0, 4, 1, 2, 3)


# --- checks -----------------------------------------------------------------------------------------------------------
def _check(depth: Tensor, feat: Tensor, plan: SplatPlan, weight: Tensor | None) -> None:
    _check_plan(plan)
    check_float("depth", depth)
    check_float("feat", feat)
    batch, cameras, depths, height, width = points = plan.cells.shape
    if depth.shape != points:
        raise ValueError(
            f"depth must have the plan's shape (B, N, D, h, w) = {tuple(points)}; got {tuple(depth.shape)}"
        )
    if feat.ndim != 5 or feat.shape[:4] != (batch, cameras, height, width):
        raise ValueError(
            f"feat must have shape (B, N, h, w, C) = ({batch}, {cameras}, {height}, {width}, C), channels last; got "
            f"{tuple(feat.shape)}"
        )
    _check_like("depth", depth, feat, plan)
    if weight is not None:
        check_float("weight", weight)
        if weight.shape != points:
            raise ValueError(f"weight must have the shape of depth, {tuple(points)}; got {tuple(weight.shape)}")
        _check_like("weight", weight, feat, plan)
    _check_device("feat", feat, plan)


def _check_like(name: str, t: Tensor, feat: Tensor, plan: SplatPlan) -> None:
    if t.dtype != feat.dtype:
        raise ValueError(f"{name} and feat must have one dtype; {name} is {t.dtype}, feat is {feat.dtype}")
    _check_device(name, t, plan)


def _check_device(name: str, t: Tensor, plan: SplatPlan) -> None:
    if t.device != plan.cells.device:
        raise ValueError(f"{name} is on {t.device}, the plan on {plan.cells.device}; move one with .to(...)")


def _check_plan(plan: SplatPlan) -> None:
    if not isinstance(plan, SplatPlan):
        raise TypeError(f"plan must be a SplatPlan; got {type(plan).__name__}")


def _compare(rig: object, plan: SplatPlan) -> None:
    from .rig import CameraRig

    if not isinstance(rig, CameraRig):
        raise TypeError(f"rig must be a CameraRig or None; got {type(rig).__name__}")
    if plan.calibration is not None and plan.calibration != rig.calibration:
        warnings.warn(
            "splat: the plan is of another calibration than the rig that was given; plan.refresh(rig) brings it up to "
            "date",
            UserWarning,
            stacklevel=3,
        )


def _positive(prescale: float, dtype: torch.dtype) -> float:
    """``prescale`` as a float; an error unless multiplying and dividing by it leave numbers of ``dtype`` finite."""
    limits = torch.finfo(dtype)
    if (
        isinstance(prescale, bool)
        or not isinstance(prescale, numbers.Real)
        or not (limits.smallest_normal <= prescale <= limits.max)
    ):
        raise ValueError(
            f"prescale must be None or a positive number from {limits.smallest_normal:.3g} to {limits.max:.3g}, the "
            f"range of {dtype}; got {prescale!r}"
        )
    return float(prescale)
