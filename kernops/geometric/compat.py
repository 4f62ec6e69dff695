"""The pooling functions of public code under their own signatures, for models that call them: change the import.

Each computes what the function of that name does, with sums taken bucket by bucket, so that no row is the difference of
two long sums, and with checks in the place of undefined behaviour. Where the geometry is the same for many calls, a
:class:`~kernops.geometric.SplatPlan` and :func:`~kernops.geometric.splat` do the same work with the sorting done once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from .buckets import BucketPlan, bucketed_sum
from .kernels import Scale, choose

Tensor = torch.Tensor
#: Products held at a time by the derivative by depth.
_CHUNK = 1 << 22
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


# --- Lift-Splat-Shoot -------------------------------------------------------------------------------------------------
def cumsum_trick(x: Tensor, geom_feats: Tensor, ranks: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the rows of each rank, as ``cumsum_trick`` of Lift-Splat-Shoot, without its cancellation.

    Args:
        x: features (n, C) of float16, bfloat16, float32 or float64; float32 accumulates for the first two.
        geom_feats: (n, ...), of any dtype: what belongs to each row, as its cell (n, 4).
        ranks: integers (n,), equal for rows of one cell. Where they are not sorted, equal ones are still one cell.

    Returns:
        ``(sums, geom_feats)``, (m, C) and (m, ...): one row for each distinct rank, in the order in which ranks first
        appear (that of the ranks, where they are sorted), with the ``geom_feats`` of the last row of that rank.
        Differentiable by ``x``.

    Raises:
        TypeError: ``x`` is not of floating-point numbers, or ``ranks`` not of integers.
        ValueError: lengths, dimensions or devices disagree.

    Example:
        >>> import torch
        >>> x, cells = torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([[5, 0], [5, 0], [7, 1]])
        >>> sums, where = cumsum_trick(x, cells, torch.tensor([5, 5, 71]))
        >>> sums.tolist(), where.tolist()
        ([[3.0], [4.0]], [[5, 0], [7, 1]])

    Source: J. Philion and S. Fidler, "Lift, Splat, Shoot", ECCV 2020, section 4.2.
    """
    _check_floats("x", x, 2)
    _check_integers("ranks", ranks, 1)
    _check_same_length(x=x, geom_feats=geom_feats, ranks=ranks)
    _check_same_device(x=x, geom_feats=geom_feats, ranks=ranks)
    if not len(ranks):
        return x[:0], geom_feats[:0]
    buckets, last = _grouped(ranks)
    return bucketed_sum(x, BucketPlan(buckets, len(last))), geom_feats[last]


class QuickCumsum:
    """``QuickCumsum`` of Lift-Splat-Shoot: ``QuickCumsum.apply(x, geom_feats, ranks)`` is :func:`cumsum_trick`.

    Example:
        >>> import torch
        >>> x = torch.ones(3, 2, requires_grad=True)
        >>> sums, cells = QuickCumsum.apply(x, torch.tensor([[5], [5], [7]]), torch.tensor([5, 5, 7]))
        >>> sums.tolist(), cells.tolist()
        ([[2.0, 2.0], [1.0, 1.0]], [[5], [7]])
    """

    @staticmethod
    def apply(x: Tensor, geom_feats: Tensor, ranks: Tensor) -> tuple[Tensor, Tensor]:
        """See :func:`cumsum_trick`."""
        return cumsum_trick(x, geom_feats, ranks)


def _grouped(ranks: Tensor) -> tuple[Tensor, Tensor]:
    """Number the distinct ranks in the order in which they appear: each row's number, and each number's last row."""
    if not bool((ranks[1:] < ranks[:-1]).any()):
        ends = torch.ones_like(ranks, dtype=torch.bool)
        ends[:-1] = ranks[1:] != ranks[:-1]
        return ends.cumsum(0) - ends.long(), ends.nonzero().squeeze(1)
    distinct, buckets = torch.unique(ranks, return_inverse=True)
    rows = torch.arange(len(ranks), device=ranks.device)
    first = torch.full_like(distinct, len(ranks), dtype=torch.long).scatter_reduce(0, buckets, rows, "amin")
    last = torch.zeros_like(first).scatter_reduce(0, buckets, rows, "amax")
    order = first.argsort()
    number = torch.empty_like(order)
    number[order] = torch.arange(len(order), device=order.device)
    return number[buckets], last[order]


# --- BEVFusion --------------------------------------------------------------------------------------------------------
def bev_pool(feats: Tensor, coords: Tensor, B: int, D: int, H: int, W: int) -> Tensor:
    """Sums of features by cell, as ``bev_pool`` of BEVFusion.

    Args:
        feats: (n, C) of float16, bfloat16, float32 or float64; float32 accumulates for the first two.
        coords: integers (n, 4): the place of each row along H, W and D, and its sample.
        B, D, H, W: numbers of samples and of cells along each axis.

    Returns:
        (B, C, D, H, W), of the dtype of ``feats``, contiguous; 0 in empty cells. Differentiable by ``feats``.

    Raises:
        TypeError: ``feats`` is not of floating-point numbers, or ``coords`` or a size not of integers.
        ValueError: shapes or devices disagree, or a row lies outside the grid.

    Example:
        >>> import torch
        >>> coords = torch.tensor([[1, 2, 0, 0], [1, 2, 0, 0], [0, 0, 0, 1]])
        >>> pooled = bev_pool(torch.ones(3, 8), coords, B=2, D=1, H=4, W=5)
        >>> pooled.shape, pooled[0, 0, 0, 1, 2].item(), pooled.sum().item()
        (torch.Size([2, 8, 1, 4, 5]), 2.0, 24.0)

    Source: Z. Liu et al., "BEVFusion: Multi-Task Multi-Sensor Fusion with Unified Bird's-Eye View Representation", ICRA
    2023, section III-B.
    """
    _check_floats("feats", feats, 2)
    _check_integers("coords", coords, 2)
    _check_same_length(feats=feats, coords=coords)
    _check_same_device(feats=feats, coords=coords)
    if coords.shape[1] != 4:
        raise ValueError(f"coords must have shape (n, 4): along H, W, D, and the sample; got {tuple(coords.shape)}")
    b, d, h, w = _sizes("B, D, H, W", (B, D, H, W))
    along_h, along_w, along_d, sample = columns = coords.long().unbind(1)
    inside = torch.stack([(k >= 0) & (k < size) for k, size in zip(columns, (h, w, d, b))]).all(0)
    if not bool(inside.all()):
        row = int(inside.long().argmin())
        raise ValueError(
            f"coords must lie in the grid, 0 <= (h, w, d, sample) < {(h, w, d, b)}; coords[{row}] is "
            f"{tuple(coords[row].tolist())}"
        )
    cells = ((sample * d + along_d) * h + along_h) * w + along_w
    return (
        bucketed_sum(feats, BucketPlan(cells, b * d * h * w))
        .reshape(b, d, h, w, -1)
        .permute(0, 4, 1, 2, 3)
        .contiguous()
    )


# --- BEVDet -----------------------------------------------------------------------------------------------------------
def bev_pool_v2(
    depth: Tensor,
    feat: Tensor,
    ranks_depth: Tensor,
    ranks_feat: Tensor,
    ranks_bev: Tensor,
    bev_feat_shape: Sequence[int],
    interval_starts: Tensor,
    interval_lengths: Tensor,
) -> Tensor:
    """Sums of depth times feature by cell, as ``bev_pool_v2`` of BEVDet.

    Args:
        depth: (B, N, D, h, w), or of another shape: places count along the flattened tensor.
        feat: (B, N, h, w, C), or (..., C): rows count along the flattened leading axes.
        ranks_depth, ranks_feat, ranks_bev: integers (n,): the place in ``depth``, the row of ``feat`` and the cell,
            ((b Z + z) Y + y) X + x, of each point.
        bev_feat_shape: (B, Z, Y, X, C).
        interval_starts, interval_lengths: integers (m,): the points of a cell stand together. Points in no interval do
            not count; a cell that has several intervals gets the sum of all.

    Returns:
        (B, C, Z, Y, X), contiguous, of the common dtype of ``depth`` and ``feat`` (float32 accumulates for float16 and
        bfloat16); 0 in empty cells. Differentiable by ``depth`` and ``feat``, to any order.

    The values of ranks and intervals are read: that waits for a GPU that they are on, and cannot be traced by
    ``torch.compile(fullgraph=True)`` or ``torch.export``. ``torch.func.grad`` and ``torch.func.vjp`` work,
    ``torch.func.vmap`` and forward-mode derivatives do not.

    Raises:
        TypeError: an argument is not of floating-point numbers or of integers, as above.
        ValueError: shapes or devices disagree, a rank is out of range, intervals overlap or leave the list of points,
            or an interval has points of several cells. (Values are checked, except while a CUDA graph is captured;
            there, wrong points are left out.)

    Example:
        >>> import torch
        >>> depth = torch.tensor([0.3, 0.4, 0.2, 0.1, 0.7, 0.6, 0.8, 0.9]).reshape(1, 1, 2, 2, 2)
        >>> feat = torch.ones(1, 1, 2, 2, 2)
        >>> ranks = torch.tensor([[0, 4, 1, 6], [0, 0, 1, 2], [0, 0, 1, 1]])
        >>> bev = bev_pool_v2(depth, feat, *ranks, (1, 1, 2, 2, 2), torch.tensor([0, 2]), torch.tensor([2, 2]))
        >>> bev.shape, round(bev.sum().item(), 4)
        (torch.Size([1, 2, 1, 2, 2]), 4.4)

    Source: J. Huang and G. Huang, "BEVPoolv2: A Cutting-edge Implementation of BEVDet Toward Deployment", 2022.
    """
    _check_floats("depth", depth, None)
    _check_floats("feat", feat, None)
    sizes = _sizes("bev_feat_shape (B, Z, Y, X, C)", bev_feat_shape)
    if len(sizes) != 5:
        raise ValueError(f"bev_feat_shape must be (B, Z, Y, X, C); got {tuple(sizes)}")
    *grid, channels = sizes
    if feat.ndim < 2 or feat.shape[-1] != channels:
        raise ValueError(
            f"feat must have shape (..., C) with the C = {channels} of bev_feat_shape; got {tuple(feat.shape)}"
        )
    points = {"ranks_depth": ranks_depth, "ranks_feat": ranks_feat, "ranks_bev": ranks_bev}
    intervals = {"interval_starts": interval_starts, "interval_lengths": interval_lengths}
    for name, tensor in {**points, **intervals}.items():
        _check_integers(name, tensor, 1)
    _check_same_length(**points)
    _check_same_length(**intervals)
    _check_same_device(depth=depth, feat=feat, **points, **intervals)
    rows = feat.reshape(-1, channels)
    n_cells = math.prod(grid)
    ranges = {"ranks_depth": depth.numel(), "ranks_feat": len(rows), "ranks_bev": n_cells}
    links = _links(points, ranges, *(t.long() for t in intervals.values()))
    dtype = torch.promote_types(depth.dtype, feat.dtype)
    out = _Pool.apply(depth.reshape(-1).to(dtype), rows.to(dtype), *links, n_cells)
    return out.view(*grid, channels).permute(0, 4, 1, 2, 3).contiguous()


def _links(points: dict[str, Tensor], ranges: dict[str, int], starts: Tensor, lengths: Tensor) -> list[Tensor]:
    """Place, row and cell of each point as int32, -1 for points that are left out."""
    if max(ranges.values()) >= 2**31:
        raise ValueError(f"depth, rows of feat and cells must be fewer than 2**31; got {tuple(ranges.values())}")
    # A number beyond a narrow integer dtype wraps around where it is compared with a tensor of that dtype.
    points = {name: t if t.dtype == torch.int64 else t.int() for name, t in points.items()}
    cells = points["ranks_bev"]
    n = len(cells)
    wrong_interval = (starts < 0) | (lengths < 0) | (lengths > n - starts)  # starts + lengths may overflow
    begins, kept_lengths = starts.masked_fill(wrong_interval, 0), lengths.masked_fill(wrong_interval, 0)
    steps = starts.new_zeros(n + 1)
    steps.index_add_(0, begins, torch.ones_like(starts))
    steps.index_add_(0, begins + kept_lengths, -torch.ones_like(starts))
    covered = steps.cumsum(0)[:n]
    begins = torch.where(kept_lengths > 0, begins, n)
    first = starts.new_zeros(n + 1).scatter_reduce(0, begins, begins, "amax")
    foreign = cells[first[:n].cummax(0).values] != cells if n else torch.zeros_like(cells, dtype=torch.bool)
    kept = covered == 1
    outside = {name: kept & ((t < 0) | (t >= ranges[name])) for name, t in points.items()}
    faults = [covered > 1, kept & foreign, *outside.values()]
    capturing = cells.is_cuda and torch.cuda.is_current_stream_capturing()  # then no value can be looked at
    if not capturing and bool(torch.cat([wrong_interval, *faults]).any()):
        _raise(points, ranges, starts, lengths, wrong_interval, faults)
    wrong = torch.stack(faults).any(0)
    return [torch.where(kept & ~wrong, t, -1).int() for t in points.values()]


def _raise(
    points: dict[str, Tensor],
    ranges: dict[str, int],
    starts: Tensor,
    lengths: Tensor,
    wrong_interval: Tensor,
    faults: list[Tensor],
) -> None:
    """Say which value is wrong."""
    n = len(points["ranks_bev"])
    if bool(wrong_interval.any()):
        k = int(wrong_interval.long().argmax())
        raise ValueError(
            f"intervals must lie in the list of {n} points; interval {k} has interval_starts {int(starts[k])} and "
            f"interval_lengths {int(lengths[k])}"
        )
    overlap, foreign, *outside = (int(f.long().argmax()) if bool(f.any()) else None for f in faults)
    if overlap is not None:
        raise ValueError(f"interval_starts, interval_lengths: several intervals hold point {overlap}; one must")
    for (name, tensor), at in zip(points.items(), outside):
        if at is not None:
            raise ValueError(f"{name} must be in [0, {ranges[name]}); {name}[{at}] is {int(tensor[at])}")
    raise ValueError(
        f"an interval must hold points of one cell; ranks_bev[{foreign}] = {int(points['ranks_bev'][foreign])} is not "
        "the cell of the first point of its interval: sort by ranks_bev first"
    )


class _Pool(torch.autograd.Function):
    """Row ``target`` of the result is the sum of ``depth[place] * rows[source]`` over the links with that target."""

    @staticmethod
    def forward(  # type: ignore[override]
        depth: Tensor, rows: Tensor, place: Tensor, source: Tensor, target: Tensor, n_target: int
    ) -> Tensor:
        kernels = choose("auto", rows.device)
        order, starts = _bucket_sort(kernels, target, n_target)
        items = torch.stack((place[order], source[order]), 1)
        scale = Scale("pairs", depth.contiguous(), None, None, 1, 1)
        return kernels.segment_sum(rows.contiguous(), items, starts, None, n_target, scale, rows.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        depth, rows, place, source, target = ctx.saved_tensors
        need_depth, need_rows = ctx.needs_input_grad[:2]
        by_depth = _Dots.apply(rows, grad, place, source, target, len(depth)) if need_depth else None
        by_rows = _Pool.apply(depth, grad, place, target, source, len(rows)) if need_rows else None
        return by_depth, by_rows, None, None, None, None


class _Dots(torch.autograd.Function):
    """Place p of the result is the sum of ``a[of_a] . b[of_b]`` over the links with place p."""

    @staticmethod
    def forward(  # type: ignore[override]
        a: Tensor, b: Tensor, place: Tensor, of_a: Tensor, of_b: Tensor, n_places: int
    ) -> Tensor:
        accumulator = torch.float64 if a.dtype == torch.float64 else torch.float32
        dots = a.new_zeros((len(place), 1), dtype=accumulator)
        step = max(1, _CHUNK // max(1, a.shape[1]))
        for part in (slice(k, k + step) for k in range(0, len(place), step)):
            mine, other = a[of_a[part].clamp(min=0)], b[of_b[part].clamp(min=0)]
            dots[part] = (mine.to(accumulator) * other.to(accumulator)).sum(1, keepdim=True)
        kernels = choose("auto", a.device)
        order, starts = _bucket_sort(kernels, place, n_places)
        return kernels.segment_sum(dots, order, starts, None, n_places, None, a.dtype).squeeze(1)

    setup_context = _Pool.setup_context

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        a, b, place, of_a, of_b = ctx.saved_tensors
        by_a = _Pool.apply(grad, b, place, of_b, of_a, len(a)) if ctx.needs_input_grad[0] else None
        by_b = _Pool.apply(grad, a, place, of_a, of_b, len(b)) if ctx.needs_input_grad[1] else None
        return by_a, by_b, None, None, None, None


def _bucket_sort(kernels: Any, buckets: Tensor, n_buckets: int) -> tuple[Tensor, Tensor]:
    """``bucket_sort`` with an order that can be used as an index: what lies beyond the buckets is unspecified in it."""
    order, starts = kernels.bucket_sort(buckets, n_buckets)
    return order.clamp(0, max(0, len(buckets) - 1)), starts


# --- checks -----------------------------------------------------------------------------------------------------------
def _check_floats(name: str, tensor: object, ndim: int | None) -> None:
    _check(name, tensor, ndim, _FLOATS, "float16, bfloat16, float32 or float64")


def _check_integers(name: str, tensor: object, ndim: int) -> None:
    _check(name, tensor, ndim, _INTEGERS, "an integer dtype")


def _check(name: str, tensor: object, ndim: int | None, dtypes: tuple[torch.dtype, ...], accepted: str) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor; got {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} must be of {accepted}; got {str(tensor.dtype).removeprefix('torch.')}")
    if ndim is not None and tensor.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} dimension{'s' * (ndim > 1)}; got shape {tuple(tensor.shape)}")


def _check_same_length(**tensors: Tensor) -> None:
    if len({t.shape[:1] for t in tensors.values()}) > 1 or not all(t.ndim for t in tensors.values()):
        shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in tensors.items())
        raise ValueError(f"{', '.join(tensors)} must have one length; got shapes {shapes}")


def _check_same_device(**tensors: Tensor) -> None:
    if len({t.device for t in tensors.values()}) > 1:
        raise ValueError(
            "tensors must be on one device; got " + ", ".join(f"{name} on {t.device}" for name, t in tensors.items())
        )


def _sizes(name: str, sizes: Sequence[Any]) -> list[int]:
    """Sizes as integers: configurations have them as tensors and as NumPy numbers, too."""
    try:
        found = [size.__index__() for size in sizes]
    except (AttributeError, TypeError):
        raise TypeError(f"{name} must be integers; got {sizes!r}") from None
    if min(found, default=1) < 1:
        raise ValueError(f"{name} must be positive; got {tuple(found)}")
    return found
