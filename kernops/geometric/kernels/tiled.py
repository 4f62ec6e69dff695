"""The geometric kernels in torch operations, for any device: the reference in tests and the fallback everywhere.

Each works on about 2^22 numbers at a time, so that its memory beyond inputs and output is bounded. Nothing here asks a
GPU for a value: a length that only the device knows is replaced by its bound, and what lies beyond goes to a row that
is thrown away. On the CPU the length itself is used.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..cells import frustum_cells as frustum_cells
from . import Scale

Tensor = torch.Tensor

#: Numbers held at a time.
CHUNK = 1 << 22


def available(device: torch.device) -> str | None:
    """None: it can run everywhere."""
    return None


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of ``dtype`` are added up."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# Grouping


def bucket_sort(buckets: Tensor, n_buckets: int) -> tuple[Tensor, Tensor]:
    """Group items by bucket, in their own order inside each.

    Args:
        buckets: int32 (n,), less than ``n_buckets``; negative: left out.

    Returns:
        ``order`` int32 (n,) and ``starts`` int32 (n_buckets + 1,): ``order[starts[k] : starts[k + 1]]`` are the items
        of bucket k; ``order[starts[-1] :]`` is unspecified.
    """
    keys = torch.where(buckets < 0, n_buckets, buckets)
    keys, order = torch.sort(keys, stable=True)
    return order.int(), _starts(keys, n_buckets)


def _starts(sorted_keys: Tensor, n_buckets: int) -> Tensor:
    """Where each bucket begins in ``sorted_keys``; the last entry is where they end."""
    edges = torch.arange(n_buckets + 1, device=sorted_keys.device, dtype=sorted_keys.dtype)
    return torch.searchsorted(sorted_keys, edges, out_int32=True)


def make_runs(cells: Tensor, n_buckets: int, permutation: Tensor | None) -> tuple[Tensor, Tensor]:
    """Group the points by cell, with consecutive depths of a pixel in one cell merged into a run.

    Args:
        cells: int32 (B, N, D, h, w), less than ``n_buckets``; negative: left out.
        permutation: int32 (n_buckets,): the bucket of each cell; None: its own number.

    Returns:
        ``items`` int32 (n_points, 2): the first point and the length of each run, sorted by bucket and in it by first
        point; ``starts`` int32 (n_buckets + 1,). Items beyond ``starts[-1]`` are unspecified.
    """
    depths = cells.shape[2]
    if cells.numel() == 0:
        return cells.new_empty((0, 2)), cells.new_zeros(n_buckets + 1)
    head = torch.ones_like(cells, dtype=torch.bool)
    head[:, :, 1:] = cells[:, :, 1:] != cells[:, :, :-1]
    depth = torch.arange(depths, device=cells.device, dtype=torch.int32).reshape(-1, 1, 1)
    end = torch.full_like(cells, depths)  # of the run at this point: where the next one begins
    end[:, :, :-1] = torch.where(head[:, :, 1:], depth[1:], depths)
    end = end.flip(2).cummin(2).values.flip(2)
    length = (end - depth).reshape(-1)
    buckets = cells if permutation is None else permutation[cells.clamp(min=0).long()]
    buckets = torch.where(head & (cells >= 0), buckets, -1).reshape(-1)
    order, starts = bucket_sort(buckets, n_buckets)
    return torch.stack((order, length[order.long()]), 1), starts


# Sums


def segment_work(starts: Tensor) -> Tensor:
    """What :func:`segment_sum` wants to know of ``starts`` beforehand, to be kept with it. Here: nothing."""
    return starts.new_empty(0)


def segment_sum(
    values: Tensor, items: Tensor, starts: Tensor, targets: Tensor | None, n_out: int, scale: Scale | None,
    out_dtype: torch.dtype, work: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """One row per segment: the weighted sum of the rows of ``values`` that its items name.

    Args:
        values: (R, C).
        items: int32 (m,): rows; or int32 (m, 2), which ``scale`` explains.
        starts: int32 (S + 1,): segment s has the items from ``starts[s]`` up to ``starts[s + 1]``.
        targets: int32 (S,): the row of the result for each segment, a permutation; None: the segment's number.
        n_out: rows of the result.
        work: ``segment_work(starts)``, or nothing.

    Returns:
        (n_out, C) of ``out_dtype``, accumulated in float32 (float64 for float64).
    """
    channels = values.shape[1]
    out = values.new_zeros((n_out + 1, channels), dtype=accumulator(values.dtype))
    if values.numel() and starts.numel() > 1:
        reach = 1 if scale is None or scale.mode == "pairs" else _longest(items, starts, scale.D)
        for part in _chunks(items.shape[0], max(channels, reach)):
            valid, segment = _segments(part, starts)
            rows, weights = _read_items(items[part], valid, scale, reach)
            contribution = values[rows].to(out.dtype)
            if weights is not None:
                contribution = contribution * weights[:, None]
            target = segment if targets is None else targets[segment.clamp(max=starts.numel() - 2)].long()
            _add_rows(out, torch.where(valid, target, n_out), contribution)
    return out[:n_out].to(out_dtype)


def _segments(part: slice, starts: Tensor) -> tuple[Tensor, Tensor]:
    """For the places of ``part``: whether there is an item, and its segment (S where there is none)."""
    places = torch.arange(part.start, part.stop, device=starts.device, dtype=torch.int32)
    segment = torch.searchsorted(starts, places, right=True) - 1
    return places < starts[-1], segment


def _longest(items: Tensor, starts: Tensor, bound: int) -> int:
    """The longest run; on a GPU, where it would have to be waited for, how long one can be."""
    if items.device.type != "cpu":
        return bound
    count = int(starts[-1])
    return max(int(items[:count, 1].max()), 1) if count else 1


def _read_items(items: Tensor, valid: Tensor, scale: Scale | None, reach: int) -> tuple[Tensor, Tensor | None]:
    """Rows of ``values`` and their weights; row 0 for what is no item."""
    items = torch.where(valid if items.ndim == 1 else valid[:, None], items, 0).long()
    if scale is None:
        return items, None
    first, second = items.unbind(1)
    if scale.mode == "pairs":
        return second, _weights(first, scale)
    steps = torch.arange(reach, device=items.device)
    inside = steps < second[:, None]
    points = first[:, None] + torch.where(inside, steps * scale.hw, 0)
    return _pixel(first, scale), torch.where(inside, _weights(points, scale), 0).sum(1)


def _pixel(points: Tensor, scale: Scale) -> Tensor:
    camera = torch.div(points, scale.D * scale.hw, rounding_mode="floor")
    return camera * scale.hw + points % scale.hw


def _weights(points: Tensor, scale: Scale) -> Tensor:
    """W of these points, in the accumulator's dtype."""
    w = scale.depth.reshape(-1)[points].to(accumulator(scale.depth.dtype))
    if scale.lse is not None:
        w = torch.exp(w - scale.lse[_pixel(points, scale)])
    return w if scale.weight is None else w * scale.weight.reshape(-1)[points]


def _add_rows(out: Tensor, index: Tensor, rows: Tensor) -> None:
    """``out[index] += rows``, always in the same order: each device has one operation that promises that."""
    if out.device.type == "cuda":
        out.index_put_((index,), rows, accumulate=True)
    else:
        out.index_add_(0, index, rows)


def segment_cumsum(values: Tensor, order: Tensor, starts: Tensor, reverse: bool, out_dtype: torch.dtype) -> Tensor:
    """Inclusive prefix sums inside each segment.

    Args:
        values: (n, C).
        order, starts: of :func:`bucket_sort`.
        reverse: sum from the end of each segment.

    Returns:
        (n, C) of ``out_dtype``: the sum up to each item, at the item's own row; 0 for what is in no segment.
    """
    n, channels = values.shape
    out = values.new_zeros((n + 1, channels), dtype=out_dtype)
    if values.numel() == 0 or starts.numel() < 2:
        return out[:n]
    longest = int((starts[1:] - starts[:-1]).max()) if values.device.type == "cpu" else n
    parts = list(_chunks(n, channels))
    carry: tuple[Tensor, Tensor] | None = None
    for part in reversed(parts) if reverse else parts:
        valid, segment = _segments(part, starts)
        rows = torch.where(valid, order[part], n).long()
        if reverse:
            segment, rows = segment.flip(0), rows.flip(0)
        sums = values[rows.clamp(max=n - 1)].to(accumulator(values.dtype))
        shift = 1
        while shift < min(longest, len(rows)):  # after each round a row holds the sum of up to 2 * shift rows
            same = (segment[shift:] == segment[:-shift])[:, None]
            sums = torch.cat((sums[:shift], sums[shift:] + torch.where(same, sums[:-shift], 0)))
            shift *= 2
        if carry is not None:  # the segment that the last chunk was in the middle of
            sums = sums + torch.where((segment == carry[0])[:, None], carry[1], 0)
        carry = segment[-1], sums[-1]
        out[rows] = sums.to(out_dtype)
    return out[:n]


def gather(rows: Tensor, buckets: Tensor) -> Tensor:
    """``rows[buckets]``, (S, C) and int32 (n,) to (n, C); zeros where a bucket is negative."""
    if rows.numel() == 0:
        return rows.new_zeros((buckets.numel(), rows.shape[1]))
    out = rows.index_select(0, buckets.clamp(min=0))
    return out.masked_fill_((buckets < 0)[:, None], 0)


# Splat


def splat_atomic(values: Tensor, cells: Tensor, scale: Scale, n_out: int, out_dtype: torch.dtype) -> Tensor:
    """The splat without a plan: every point adds its row to its cell.

    Args:
        values: (B * N * h * w, C), the pixels' features.
        cells: int32 (B, N, D, h, w), less than ``n_out``; negative: left out.
        scale: with mode "runs".

    Returns:
        (n_out, C) of ``out_dtype``, accumulated in float32 (float64 for float64).
    """
    out = values.new_zeros((n_out + 1, values.shape[1]), dtype=accumulator(values.dtype))
    flat = cells.reshape(-1)
    if values.numel():
        for part in _chunks(flat.numel(), values.shape[1]):
            points = torch.arange(part.start, part.stop, device=values.device)
            rows = values[_pixel(points, scale)].to(out.dtype) * _weights(points, scale)[:, None]
            _add_rows(out, torch.where(flat[part] < 0, n_out, flat[part]).long(), rows)
    return out[:n_out].to(out_dtype)


def splat_backward(
    grad: Tensor, values: Tensor, cells: Tensor, scale: Scale, need_depth: bool, need_feat: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The derivatives of the splat by W and by the features.

    Args:
        grad: (n_buckets, C), by the result.
        values, cells, scale: as they were given to the splat.
        need_depth, need_feat: which of the two to compute.

    Returns:
        ``grad[cells[p]] . values[pixel of p]``, (B, N, D, h, w), 0 for a point left out, and the sum over a pixel's
        depths of ``W(p) * grad[cells[p]]``, (B * N * h * w, C); the first in float32 (float64 for float64), because
        the chain rule goes on from there, the second of the dtype of ``values``.
    """
    batch, cameras, depths, height, width = cells.shape
    channels, hw, acc = values.shape[1], height * width, accumulator(values.dtype)
    shape = (batch * cameras, depths, hw)
    grad_w = torch.zeros_like(cells, dtype=acc).reshape(shape) if need_depth else None
    grad_values = values.new_zeros((shape[0], hw, channels)) if need_feat else None
    if grad.numel() and cells.numel():
        flat, pixels = cells.reshape(shape), values.reshape(shape[0], hw, channels)
        points = torch.arange(cells.numel(), device=cells.device).reshape(shape)
        for some, across in _pixel_blocks(*shape, channels):
            total: Tensor | None = None
            mine = pixels[some, None, across].to(acc)
            step = max(1, CHUNK // max(1, mine.numel()))
            for deep in (slice(k, min(k + step, depths)) for k in range(0, depths, step)):
                there = flat[some, deep, across]
                kept = there >= 0
                g = torch.where(kept[..., None], grad[there.clamp(min=0).long()], 0).to(acc)
                if grad_w is not None:
                    grad_w[some, deep, across] = torch.where(kept, (g * mine).sum(-1), 0)
                if grad_values is not None:
                    w = torch.where(kept, _weights(points[some, deep, across], scale), 0)
                    part = (g * w[..., None]).sum(1)
                    total = part if total is None else total + part
            if grad_values is not None and total is not None:
                grad_values[some, across] = total.to(grad_values.dtype)
    return (
        None if grad_w is None else grad_w.reshape(cells.shape),
        None if grad_values is None else grad_values.reshape(-1, channels),
    )


def depth_lse(logits: Tensor) -> Tensor:
    """logsumexp over D of (B, N, D, h, w), as (B * N * h * w,) in float32 (float64 for float64).

    Where it is infinite the softmax is NaN for all depths, as infinity / infinity is: so the result is NaN there.
    """
    batch, cameras, depths, height, width = logits.shape
    flat = logits.reshape(batch * cameras, depths, height * width)
    out = flat.new_empty((batch * cameras, height * width), dtype=accumulator(logits.dtype))
    for some, across in _pixel_blocks(batch * cameras, depths, height * width, 1):
        out[some, across] = torch.logsumexp(flat[some, :, across].to(out.dtype), 1)
    return out.masked_fill_(out == torch.inf, torch.nan).reshape(-1)


# Pieces of about CHUNK numbers


def _chunks(rows: int, width: int) -> Iterator[slice]:
    step = max(1, CHUNK // max(1, width))
    return (slice(k, min(k + step, rows)) for k in range(0, rows, step))


def _pixel_blocks(cameras: int, depths: int, pixels: int, channels: int) -> Iterator[tuple[slice, slice]]:
    """Cameras and pixels of a block; all its depths, unless one camera's pixels are too many already."""
    across = min(pixels, max(1, CHUNK // max(1, channels)))
    some = max(1, CHUNK // max(1, channels * across * depths))
    for first in range(0, cameras, some):
        for left in range(0, pixels, across):
            yield slice(first, min(first + some, cameras)), slice(left, min(left + across, pixels))
