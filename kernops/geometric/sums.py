"""Sums and prefix sums by bucket, and what differentiates them: what the operators of these names compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .calls import call, run
from .kernels import choose, sum_levels
from .levels import unflatten

Tensor = torch.Tensor


def bucketed_sum(values: Tensor, buckets: Tensor, levels: Sequence[Tensor], n_buckets: int, backend: str) -> Tensor:
    if values.numel() == 0 or n_buckets == 0:
        return values.new_zeros((n_buckets, values.shape[1]))
    kernels = choose(backend, values.device)
    if not levels:
        order, starts = kernels.bucket_sort(buckets, n_buckets)
        levels = (order, starts, buckets.new_empty(0), buckets.new_empty(0))
    return sum_levels(kernels, values.contiguous(), unflatten(levels, n_buckets), None)


def bucketed_gather(rows: Tensor, buckets: Tensor, levels: Sequence[Tensor], n_buckets: int, backend: str) -> Tensor:
    if rows.numel() == 0 or buckets.numel() == 0:
        return rows.new_zeros((buckets.numel(), rows.shape[1]))
    return choose(backend, rows.device).gather(rows.contiguous(), buckets)


def bucketed_cumsum(values: Tensor, order: Tensor, starts: Tensor, reverse: bool, backend: str) -> Tensor:
    if values.numel() == 0:
        return torch.empty_like(values, memory_format=torch.contiguous_format)
    kernels = choose(backend, values.device)
    return kernels.segment_cumsum(values.contiguous(), order, starts, reverse, values.dtype)


class Sum(torch.autograd.Function):
    """The sum of each bucket's rows; its transpose is ``Gather``."""

    @staticmethod
    def forward(values: Tensor, buckets: Tensor, n_buckets: int, backend: str, *levels: Tensor) -> Tensor:  # type: ignore[override]
        return run("bucketed_sum", values, buckets, levels, n_buckets, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        _, buckets, ctx.n_buckets, ctx.backend, *levels = inputs
        ctx.save_for_backward(buckets, *levels)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        buckets, *levels = ctx.saved_tensors
        back = call("bucketed_gather", grad, buckets, levels, ctx.n_buckets, ctx.backend)
        return (back, None, None, None, *(None for _ in levels))


class Gather(torch.autograd.Function):
    """To each item the row of its bucket; its transpose is ``Sum``."""

    @staticmethod
    def forward(rows: Tensor, buckets: Tensor, n_buckets: int, backend: str, *levels: Tensor) -> Tensor:  # type: ignore[override]
        return run("bucketed_gather", rows, buckets, levels, n_buckets, backend)

    setup_context = Sum.setup_context

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        buckets, *levels = ctx.saved_tensors
        back = call("bucketed_sum", grad, buckets, levels, ctx.n_buckets, ctx.backend)
        return (back, None, None, None, *(None for _ in levels))


class Cumsum(torch.autograd.Function):
    """Prefix sums in each bucket; their transpose are those from the other end."""

    @staticmethod
    def forward(values: Tensor, order: Tensor, starts: Tensor, reverse: bool, backend: str) -> Tensor:  # type: ignore[override]
        return run("bucketed_cumsum", values, order, starts, reverse, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        _, order, starts, ctx.reverse, ctx.backend = inputs
        ctx.save_for_backward(order, starts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        order, starts = ctx.saved_tensors
        return call("bucketed_cumsum", grad, order, starts, not ctx.reverse, ctx.backend), None, None, None, None
