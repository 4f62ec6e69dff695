"""Checks of the operators' arguments, for those who call them by name; ``splat`` and ``BucketPlan`` have their own."""

from __future__ import annotations

import math
from typing import Any

import torch

Tensor = torch.Tensor

#: Ways of forming the sums of a splat.
VARIANTS = ("cumsum", "atomic", "histogram")


def check_pool(depth: Tensor, feat: Tensor, weight: Tensor | None, cells: Tensor, *rest: Any) -> tuple:
    """The arguments of ``bev_pool``, with int32 cells; a ValueError where one does not fit. Cells may be anything."""
    points = tuple(cells.shape)
    if len(points) != 5 or cells.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"cells must be int32 or int64 (B, N, D, h, w); got {cells.dtype} {points}")
    wanted = {"depth": (depth, points), "weight": (weight, points), "feat": (feat, (*points[:2], *points[3:]))}
    for name, (t, shape) in wanted.items():
        if t is None:
            continue
        got = tuple(t.shape[:4]) if name == "feat" and t.ndim == 5 else tuple(t.shape)
        if got != shape or not t.is_floating_point() or t.dtype != feat.dtype or t.device != cells.device:
            raise ValueError(
                f"{name} must have shape {shape}{' and C' if name == 'feat' else ''}, the floating-point dtype of feat "
                f"and the device of cells, {cells.device}; got {t.dtype} {tuple(t.shape)} on {t.device}"
            )
    levels, shape, variant = rest[:3]
    if len(shape) != 4 or shape[0] != points[0]:
        raise ValueError(f"shape must be (B, Z, Y, X) with the B = {points[0]} of cells; got {tuple(shape)}")
    if variant not in VARIANTS or (variant != "atomic" and not levels and cells.numel() and math.prod(shape)):
        raise ValueError(f"variant must be one of {VARIANTS}, and all but 'atomic' need levels; got {variant!r}")
    return (depth, feat, weight, cells.to(torch.int32), *rest)


def check_pool_backward(grad: Tensor, depth: Tensor, feat: Tensor, weight: Tensor | None, cells: Tensor,
                         *rest: Any) -> tuple:  # fmt: skip
    checked = check_pool(depth, feat, weight, cells, *rest)
    want = (*rest[1], feat.shape[-1])
    if tuple(grad.shape) != want or grad.dtype != feat.dtype or grad.device != feat.device:
        raise ValueError(
            f"grad must be {feat.dtype} {want} on {feat.device}; got {grad.dtype} {tuple(grad.shape)} on {grad.device}"
        )
    return (grad, *checked)


def check_rows(rows: int, t: Tensor, buckets: Tensor, *rest: Any) -> tuple:
    if t.ndim != 2 or not t.is_floating_point() or t.device != buckets.device or t.shape[0] != rows:
        raise ValueError(
            f"values must be a floating-point tensor ({rows}, C) on {buckets.device}; got {t.dtype} "
            f"{tuple(t.shape)} on {t.device}"
        )
    if buckets.ndim != 1 or buckets.dtype != torch.int32:
        raise ValueError(f"buckets or order must be int32 (n,); got {buckets.dtype} {tuple(buckets.shape)}")
    return (t, buckets, *rest)
