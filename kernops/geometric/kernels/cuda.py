"""The kernels of buckets and splats on a GPU: compiled by NVRTC, launched on torch's current stream.

Nothing here synchronises or reads a number from the device, so every function can be captured into a CUDA graph;
scratch comes from torch's allocator on the caller's stream, so calls on other streams and threads share nothing.
"""

from __future__ import annotations

import struct
import threading
from functools import lru_cache

import torch

from ...backends import cuda as backend
from ...backends import driver, nvrtc
from ...backends.launch import stream_of
from . import Scale, by_address, source

Tensor = torch.Tensor

available = backend.available
_LANES = 4  # threads of a group that are wished for: measured
_PIECE = 64  # places of a piece of a prefix sum

_functions: dict[tuple[str, int], dict[str, int]] = {}
_building = threading.Lock()


# --- launching --------------------------------------------------------------------------------------------------------
def _launch(text: str, name: str, threads: int, blocks: int, device: torch.device, arguments: bytes) -> None:
    """Start the kernel ``name`` of a source text on the device's current stream."""
    index = device.index
    if index != backend._current_device():
        with torch.cuda.device(index):
            return _launch(text, name, threads, blocks, device, arguments)
    functions = _functions.get((text, index)) or _load(text, index)
    if blocks:
        driver.launch(index, functions[name], blocks, threads, 0, stream_of(index), arguments)


def _load(text: str, index: int) -> dict[str, int]:
    with _building:
        if (text, index) not in _functions:
            driver.bind(index)
            names = [line.split(" kn_")[1].split("(")[0] for line in text.splitlines() if " kn_" in line]
            arch = backend.arch_of(backend.device_facts(index).arch)
            module = driver.load(nvrtc.cubin(text, arch, f"buckets: {', '.join(names)}"))
            _functions[text, index] = {name: driver.function(module, "kn_" + name, 0) for name in names}
        return _functions[text, index]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _blocks(items: int, threads: int) -> int:
    return -(-items // threads)


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _alignment(*tensors: Tensor) -> int:
    """Bytes, up to 16, that the addresses of all tensors are multiples of."""
    address = 16
    for t in tensors:
        address |= t.data_ptr()
    return address & -address


@lru_cache(maxsize=1024)
def divider(divisor: int) -> bytes:
    """``Divider`` of rows.cuh: a multiplier and a shift that divide numbers below 2^31."""
    if divisor == 1:
        return struct.pack("=4i", 1, 0, 0, 0)
    bits = (divisor - 1).bit_length()
    multiplier = -(-(1 << (31 + bits)) // divisor)
    return struct.pack("=iIii", divisor, multiplier, bits - 1, 0)


def _scale(scale: Scale | None) -> bytes:
    """``Scale`` of rows.cuh."""
    if scale is None:
        return struct.pack("=3q", 0, 0, 0) + divider(1) + divider(1)
    pointers = struct.pack("=3Q", _pointer(scale.depth), _pointer(scale.weight), _pointer(scale.lse))
    if scale.mode == "runs":
        return pointers + divider(max(1, scale.D * scale.hw)) + divider(max(1, scale.hw))
    return pointers + divider(1) + divider(1)


def _weights(scale: Scale | None) -> source.Weights:
    if scale is None:
        return source.PLAIN
    return source.Weights(int(scale.lse is not None), int(scale.weight is not None))


# --- sorting ----------------------------------------------------------------------------------------------------------
@by_address
def bucket_sort(buckets: Tensor, n_buckets: int) -> tuple[Tensor, Tensor]:
    """See the contract of the package: a stable sort, in passes over digits of 8 bits."""
    n, device = buckets.numel(), buckets.device
    starts = torch.zeros(n_buckets + 1, dtype=torch.int32, device=device)
    if n == 0 or n_buckets == 0:
        return torch.empty(n, dtype=torch.int32, device=device), starts
    text, threads = source.sort(), source.SORT_THREADS
    tiles, digits = -(-n // source.SORT_TILE), 1 << source.DIGIT_BITS
    counts = torch.empty(digits * tiles + digits + 1, dtype=torch.int32, device=device)
    totals, remaining = counts[digits * tiles :], counts[digits * tiles + digits :]
    passes = max(1, -(-(n_buckets - 1).bit_length() // source.DIGIT_BITS))
    keys, items = buckets.contiguous(), None
    for k in range(passes):
        keys_out, items_out = torch.empty_like(keys), torch.empty_like(keys)  # apart: the keys of the last go
        arguments = source.pack(
            "SortArguments", keys.data_ptr(), _pointer(items), keys_out.data_ptr(), items_out.data_ptr(),
            counts.data_ptr(), totals.data_ptr(), remaining.data_ptr() if k else 0, n, tiles, k * source.DIGIT_BITS,
        )  # fmt: skip
        _launch(text, "sort_count", threads, tiles, device, arguments)
        _launch(text, "sort_scan", threads, digits, device, arguments)
        _launch(text, "sort_scatter", threads, tiles, device, arguments)
        keys, items = keys_out, items_out
        if k == 0 and passes > 1:
            number = source.pack("StartArguments", 0, totals.data_ptr(), 0, remaining.data_ptr(), 0)
            _launch(text, "bucket_starts", threads, 1, device, number)
    arguments = source.pack("StartArguments", keys.data_ptr(), totals.data_ptr(), starts.data_ptr(), 0, n_buckets)
    _launch(text, "bucket_starts", threads, _blocks(n_buckets + 1, threads), device, arguments)
    return items, starts  # type: ignore[return-value]


# --- points and runs --------------------------------------------------------------------------------------------------
@by_address
def frustum_cells(
    projection: Tensor, u: Tensor, v: Tensor, d: Tensor, lower: tuple[float, float, float],
    step: tuple[float, float, float], counts: tuple[int, int, int], trunc: bool,
) -> Tensor:  # fmt: skip
    """The cell of every point of a frustum, or -1."""
    batch, cameras = projection.shape[:2]
    shape = (batch, cameras, d.numel(), v.numel(), u.numel())
    cells = torch.empty(shape, dtype=torch.int32, device=projection.device)
    tensors = [t.contiguous() for t in (projection, u, v, d)]
    arguments = source.pack(
        "FrustumArguments", *(t.data_ptr() for t in tensors), cells.data_ptr(), *lower, *step, *counts, cells.numel(),
        cameras, d.numel(), v.numel(), u.numel(), int(trunc),
    )  # fmt: skip
    _launch(source.points(), "frustum_cells", 256, _blocks(cells.numel(), 256), cells.device, arguments)
    return cells


@by_address
def make_runs(cells: Tensor, n_buckets: int, permutation: Tensor | None) -> tuple[Tensor, Tensor]:
    """Runs of consecutive depths of a pixel in a cell, sorted by bucket."""
    cells = cells.contiguous()
    n, device, (depths, rows, columns) = cells.numel(), cells.device, cells.shape[-3:]
    keys = torch.empty(n, dtype=torch.int32, device=device)
    items = torch.empty((n, 2), dtype=torch.int32, device=device)
    if n == 0:
        return items, torch.zeros(n_buckets + 1, dtype=torch.int32, device=device)
    tail = divider(depths * rows * columns) + divider(rows * columns)
    arguments = (
        source.pack("RunArguments", cells.data_ptr(), _pointer(permutation), keys.data_ptr(), 0, 0, 0, n, n_buckets)
        + tail
    )
    _launch(source.points(), "run_keys", 256, _blocks(n, 256), device, arguments)
    first, starts = bucket_sort(keys, n_buckets)
    arguments = (
        source.pack(
            "RunArguments", cells.data_ptr(), 0, 0, first.data_ptr(), starts.data_ptr(), items.data_ptr(), n, n_buckets
        )
        + tail
    )
    _launch(source.points(), "run_items", 256, _blocks(n, 256), device, arguments)
    return items, starts


# --- sums of segments -------------------------------------------------------------------------------------------------
@by_address
def segment_work(starts: Tensor) -> Tensor:
    """How the blocks and warps of :func:`segment_sum` share out segments that begin at ``starts``."""
    blocks = backend.device_facts(starts.device.index).multiprocessors * source.SUM_BLOCKS
    work = torch.empty((blocks, 4 + source.SUM_WARPS), dtype=torch.int32, device=starts.device)
    if starts.numel() > 1:
        arguments = source.pack("WorkArguments", starts.data_ptr(), work.data_ptr(), starts.numel() - 1)
        _launch(source.work(), "segment_work", 32 * source.SUM_WARPS, blocks, starts.device, arguments)
    return work


@by_address
def segment_sum(
    values: Tensor, items: Tensor, starts: Tensor, targets: Tensor | None, n_out: int, scale: Scale | None,
    out_dtype: torch.dtype, work: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Weighted sums of rows of values, segment by segment, in one launch; in two without ``work``."""
    channels, device = values.shape[1], values.device
    out = torch.empty((n_out, channels), dtype=out_dtype, device=device)
    if starts.numel() < 2 or not channels:
        return out
    if work is None or work.shape[1:] != (4 + source.SUM_WARPS,):  # of another back end, or of an older version
        work = segment_work(starts)
    s = source.spread(channels, values.element_size(), _alignment(values))
    arguments = source.pack(
        "SegmentArguments", values.data_ptr(), items.data_ptr(), starts.data_ptr(), _pointer(targets), work.data_ptr(),
        out.data_ptr(), channels, s.slabs,
    ) + _scale(scale)  # fmt: skip
    kind = "rows" if scale is None else scale.mode
    text = source.segments(_name(values.dtype), _name(out_dtype), kind, s, _weights(scale))
    _launch(text, "segment_sum", 32 * source.SUM_WARPS, work.shape[0] * s.slabs, device, arguments)
    return out


@by_address
def segment_cumsum(values: Tensor, order: Tensor, starts: Tensor, reverse: bool, out_dtype: torch.dtype) -> Tensor:
    """Inclusive prefix sums inside each segment, written at the items' own rows; zero at items left out."""
    out = torch.zeros(values.shape, dtype=out_dtype, device=values.device)
    n = order.numel()
    if not values.numel() or not n or starts.numel() < 2:
        return out
    if reverse:  # place k becomes place total - 1 - k; what lies beyond the total is never read
        total = starts[-1:]
        places = (total - 1 - torch.arange(n, dtype=torch.int32, device=order.device)).clamp_(min=0)
        order, starts = order[places.long()], (total - starts).flip(0).contiguous()
    _prefix(values, order, starts, n, out)
    return out


def _prefix(values: Tensor, order: Tensor | None, starts: Tensor, n: int, out: Tensor) -> None:
    """Prefix sums of ``n`` places at most: each piece adds what the piece before hands on, which is again a prefix sum,
    over the pieces."""
    carry = None
    channels, device = values.shape[1], values.device
    s = source.share(channels, values.element_size(), _alignment(values), _LANES)
    text = source.prefixes(_name(values.dtype), _name(out.dtype), s)
    pieces = -(-n // _PIECE)
    blocks = _blocks(pieces * s.slabs * s.lanes, 256)

    def arguments(to: Tensor) -> bytes:
        return source.pack(
            "PrefixArguments", values.data_ptr(), _pointer(order), starts.data_ptr(), _pointer(carry), to.data_ptr(),
            starts.numel() - 1, channels, s.slabs, _PIECE,
        )  # fmt: skip

    if pieces > 1:
        handed = torch.empty((pieces, channels), dtype=_wide(values.dtype), device=device)
        _launch(text, "prefix_carry", 256, blocks, device, arguments(handed))
        carry = torch.empty_like(handed)
        _prefix(handed, None, starts // _PIECE, pieces, carry)
    _launch(text, "prefix_write", 256, blocks, device, arguments(out))


@by_address
def gather(rows: Tensor, buckets: Tensor) -> Tensor:
    """``rows[buckets]``, zero where a bucket is negative."""
    if not rows.shape[0]:
        return rows.new_zeros((buckets.numel(), rows.shape[1]))
    return rows[buckets.clamp(min=0).long()].masked_fill_((buckets < 0)[:, None], 0)


# --- the splat without a sort, and its derivatives --------------------------------------------------------------------
def _splat_arguments(values: Tensor, cells: Tensor, grad: int, out: int, grad_values: int, slabs: int,
                     scale: Scale) -> bytes:  # fmt: skip
    batch, cameras, depths, rows, columns = cells.shape
    return source.pack(
        "SplatArguments", values.data_ptr(), cells.data_ptr(), grad, out, grad_values, batch * cameras, depths, rows,
        columns, values.shape[1], slabs,
    ) + _scale(scale)  # fmt: skip


@by_address
def splat_atomic(values: Tensor, cells: Tensor, scale: Scale, n_out: int, out_dtype: torch.dtype) -> Tensor:
    """The splat with additions in memory: no plan, but neither the same bits in every call."""
    cells = cells.contiguous()
    out = torch.zeros((n_out, values.shape[1]), dtype=_wide(values.dtype), device=values.device)
    if values.numel() and cells.numel() and n_out:
        # Added in memory in the wide type: the packets of both types are aligned.
        s = source.share(values.shape[1], values.element_size(), _alignment(values), _LANES)
        threads = source.atomic_threads(s)
        batch, cameras, depths, _, columns = cells.shape
        own = threads // s.lanes // source.STRIP * source.atomic_depths(s)
        blocks = batch * cameras * -(-columns // source.STRIP) * -(-depths // own) * s.slabs
        arguments = _splat_arguments(values, cells, 0, out.data_ptr(), 0, s.slabs, scale)
        text = source.atomic(_name(values.dtype), s, _weights(scale))
        _launch(text, "splat_atomic", threads, blocks, values.device, arguments)
    return out.to(out_dtype)


@by_address
def splat_backward(
    grad: Tensor, values: Tensor, cells: Tensor, scale: Scale, need_depth: bool, need_feat: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Derivatives by the weights of points and by the values of pixels, without additions in memory."""
    grad, cells = grad.to(values.dtype), cells.contiguous()
    dots = torch.empty(cells.shape, dtype=_wide(values.dtype), device=values.device) if need_depth else None
    grad_values = torch.empty_like(values) if need_feat else None
    if not values.numel() or not cells.numel():
        dots = None if dots is None else dots.zero_()
        grad_values = None if grad_values is None else grad_values.zero_()
    elif need_depth or need_feat:
        tensors = [t for t in (grad, values, grad_values) if t is not None]
        s = source.spread(values.shape[1], values.element_size(), _alignment(*tensors), few=0)
        batch, cameras, _, rows, columns = cells.shape
        blocks = batch * cameras * -(-columns // source.STRIP) * rows
        arguments = _splat_arguments(
            values, cells, grad.data_ptr(), _pointer(dots), _pointer(grad_values), s.slabs, scale
        )
        text = source.backward(_name(values.dtype), s, need_depth, need_feat, _weights(scale))
        _launch(text, "splat_backward", source.BACKWARD_THREADS, blocks, values.device, arguments)
    return dots, grad_values


@by_address
def depth_lse(logits: Tensor) -> Tensor:
    """Log of the sum of exponentials over the depths, one number a pixel."""
    logits = logits.contiguous()
    batch, cameras, depths, rows, columns = logits.shape
    pixels = batch * cameras * rows * columns
    out = torch.empty(pixels, dtype=_wide(logits.dtype), device=logits.device)
    arguments = source.pack(
        "SplatArguments", logits.data_ptr(), 0, 0, out.data_ptr(), 0, batch * cameras, depths, rows, columns, 1, 1
    ) + _scale(None)  # fmt: skip
    _launch(source.softmax(_name(logits.dtype)), "depth_lse", 256, _blocks(pixels, 32), logits.device, arguments)
    return out
