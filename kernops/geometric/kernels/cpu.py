"""The geometric kernels on a CPU: host C++ (``backends/host/*.h``), compiled at first use.

A call packs its arguments into one block of 64-bit words, the members of a ``...Call`` struct of the header, and hands
over its address. How work is cut depends on shapes and items alone: any number of threads gives the same bits. Rows may
have any stride from one to the next; other strides cost a copy. float16 and bfloat16 are read and written as they are,
and added up in float32. Subnormal numbers keep their values.

``tiled`` has the docstrings of the functions.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable

import torch

from ...backends import cpu as backend
from . import Scale, by_address

Tensor = torch.Tensor
Triple = tuple[float, float, float]
Function = Callable[[bytes], int]

available = backend.available

_TYPES = {torch.float16: "Float16", torch.bfloat16: "BFloat16", torch.float32: "float", torch.float64: "double"}
#: Formats by number, as in host/formats.h.
_FORMATS = {dtype: k for k, dtype in enumerate(_TYPES)}
#: Kinds of items, as in host/segments.h.
_ROWS, _RUNS, _PAIRS = range(3)
#: Header -> name -> the struct of its arguments, and the function.
_SOURCES = {
    "points": {
        "sort": ("SortCall", "sort"),
        "runs": ("RunsCall", "runs"),
        "gather": ("GatherCall", "gather"),
        "cells": ("CellsCall", "cells"),
    },
    "weights": {"weights": ("WeightCall", "Weights<{T}>::run"), "lse": ("LseCall", "log_sum_exp<{T}>")},
    "segments": {"sum": ("SumCall", "Sums<{T}>::run")},
    "running": {"running": ("RunningCall", "Running<{T}>::run")},
    "splat_backward": {"backward": ("BackwardCall", "Backward<{T}>::run")},
}
_HEADERS = {name: header for header, functions in _SOURCES.items() for name in functions}
#: Devices agree on the cell of a point because each operation is rounded by itself.
_FLAGS = {"points": ("-ffp-contract=off",)}

_loaded: dict[tuple[str, torch.dtype | None], Function] = {}


# --- calling ----------------------------------------------------------------------------------------------------------
def source(header: str, dtype: torch.dtype | None) -> str:
    """The translation unit that exports the functions of a header for a number type."""
    lines = [f'#include "host/{header}.h"', "namespace kn {"]
    for name, (call, function) in _SOURCES[header].items():
        text = function.format(T=_TYPES[dtype] if dtype else "")
        lines.append(
            f'extern "C" __attribute__((visibility("default"))) int kernops_{name}(const {call}* call) '
            f"{{ return {text}(*call); }}"
        )
    return "\n".join([*lines, "}  // namespace kn", ""])


def _call(name: str, dtype: torch.dtype | None, *words: float) -> None:
    """Call a function of :data:`_SOURCES`; a float is passed as a double, an int as a 64-bit integer."""
    function = _loaded.get((name, dtype)) or _load(name, dtype)
    if function(struct.pack("".join("d" if isinstance(w, float) else "q" for w in words), *words)):
        raise MemoryError(f"not enough memory for what {name!r} keeps while it runs")


def _load(name: str, dtype: torch.dtype | None) -> Function:
    header = _HEADERS[name]
    with backend.building((header, dtype)):
        if (name, dtype) not in _loaded:
            described = f"{header} of the geometric kernels" + (f", {_TYPES[dtype]}" if dtype else "")
            library = backend.library(source(header, dtype), described, _FLAGS.get(header, ()))
            for each in _SOURCES[header]:
                function = getattr(library, f"kernops_{each}")
                function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_int
                _loaded[each, dtype] = function
        return _loaded[name, dtype]


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _rows(tensor: Tensor) -> Tensor:
    """The matrix itself where its rows are contiguous, or a copy."""
    return tensor if tensor.stride(1) == 1 or tensor.shape[1] < 2 else tensor.contiguous()


def _real(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _check_count(name: str, n: int) -> None:
    if n >= 2**31:
        raise ValueError(f"{name} has {n} elements; fewer than 2**31 are accepted")


# --- grouping ---------------------------------------------------------------------------------------------------------
@by_address
def bucket_sort(buckets: Tensor, n_buckets: int) -> tuple[Tensor, Tensor]:
    """A stable counting sort: order int32 (n,), starts int32 (n_buckets + 1,)."""
    buckets, n = buckets.contiguous(), buckets.numel()
    _check_count("buckets", n)
    order = torch.empty_like(buckets)
    starts = buckets.new_empty(n_buckets + 1)
    _call("sort", None, buckets.data_ptr(), n, n_buckets, order.data_ptr(), starts.data_ptr(), backend.threads())
    return order, starts


@by_address
def make_runs(cells: Tensor, n_buckets: int, permutation: Tensor | None) -> tuple[Tensor, Tensor]:
    """Runs of one pixel in one cell, sorted by bucket: items int32 (n_points, 2), starts int32 (n_buckets + 1,)."""
    cells, n = cells.contiguous(), cells.numel()
    _check_count("cells", n)
    permutation = None if permutation is None else permutation.contiguous()
    depths, rows, columns = cells.shape[-3:]
    items = cells.new_empty((n, 2))
    starts = cells.new_empty(n_buckets + 1)
    _call("runs", None, cells.data_ptr(), n, depths, rows * columns, n_buckets, _pointer(permutation), items.data_ptr(),
          starts.data_ptr(), backend.threads())  # fmt: skip
    return items, starts


@by_address
def frustum_cells(
    projection: Tensor, u: Tensor, v: Tensor, d: Tensor, lower: Triple, step: Triple, counts: tuple[int, int, int],
    trunc: bool,
) -> Tensor:  # fmt: skip
    """The cell of every point of the frustums, or -1: int32 (B, N, D, h, w)."""
    batch, cameras = projection.shape[:2]
    shape = (batch, cameras, len(d), len(v), len(u))
    cells = torch.empty(shape, dtype=torch.int32, device=projection.device)
    tensors = [t.contiguous() for t in (projection, u, v, d)]
    _call("cells", None, *(t.data_ptr() for t in tensors), *shape, *map(float, lower), *map(float, step), *counts,
          int(trunc), cells.data_ptr(), backend.threads())  # fmt: skip
    return cells


@by_address
def gather(rows: Tensor, buckets: Tensor) -> Tensor:
    """``rows[buckets]``, zeros where a bucket is negative."""
    rows, buckets, size = _rows(rows), buckets.contiguous(), rows.element_size()
    out = rows.new_empty((buckets.numel(), rows.shape[1]))
    _call("gather", None, rows.data_ptr(), rows.stride(0) * size, rows.shape[1] * size, buckets.data_ptr(),
          buckets.numel(), out.data_ptr(), backend.threads())  # fmt: skip
    return out


# --- sums -------------------------------------------------------------------------------------------------------------
@by_address
def segment_work(starts: Tensor) -> Tensor:
    """Nothing: threads cut the segments when they sum them."""
    return starts.new_empty(0)


@by_address
def segment_sum(
    values: Tensor, items: Tensor, starts: Tensor, targets: Tensor | None, n_out: int, scale: Scale | None,
    out_dtype: torch.dtype, work: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """One row per segment: the weighted sum of the rows of ``values`` that its items name, (n_out, C)."""
    channels, segments = values.shape[1], starts.numel() - 1
    if segments != n_out:
        raise ValueError(f"n_out = {n_out} must be the number of segments, {segments}: each writes a row")
    out = values.new_empty((n_out, channels), dtype=out_dtype)
    if out.numel() == 0:
        return out
    values, items, starts = _rows(values), items.contiguous(), starts.contiguous()
    targets = None if targets is None else targets.contiguous()
    kind, weights, depths, pixels = _ROWS, None, 1, 1
    if scale is not None:
        kind = _RUNS if scale.mode == "runs" else _PAIRS
        weights = _weights(scale, _real(values.dtype))
        depths, pixels = scale.D, scale.hw
    _call("sum", values.dtype, values.data_ptr(), values.stride(0), channels, items.data_ptr(), kind, starts.data_ptr(),
          segments, _pointer(targets), _pointer(weights), depths, pixels, out.data_ptr(), _FORMATS[out_dtype],
          backend.threads())  # fmt: skip
    return out


@by_address
def segment_cumsum(values: Tensor, order: Tensor, starts: Tensor, reverse: bool, out_dtype: torch.dtype) -> Tensor:
    """Inclusive prefix sums inside each segment, at the items' own rows, (n, C); 0 for what is in no segment."""
    n, channels = values.shape
    everything = int(starts[-1]) == n
    make = values.new_empty if everything else values.new_zeros
    out = make((n, channels), dtype=out_dtype)
    if out.numel() == 0 or starts.numel() < 2:
        return out
    values, order, starts = _rows(values), order.contiguous(), starts.contiguous()
    _call("running", values.dtype, values.data_ptr(), values.stride(0), channels, order.data_ptr(), starts.data_ptr(),
          starts.numel() - 1, int(reverse), out.data_ptr(), _FORMATS[out_dtype], backend.threads())  # fmt: skip
    return out


# --- splat ------------------------------------------------------------------------------------------------------------
@by_address
def splat_atomic(values: Tensor, cells: Tensor, scale: Scale, n_out: int, out_dtype: torch.dtype) -> Tensor:
    """The splat without a plan, (n_out, C). Sorting the runs is cheap on a CPU, and keeps the result deterministic."""
    items, starts = make_runs(cells, n_out, None)
    return segment_sum(values, items, starts, None, n_out, scale, out_dtype)


@by_address
def splat_backward(
    grad: Tensor, values: Tensor, cells: Tensor, scale: Scale, need_depth: bool, need_feat: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The derivatives of the splat by W, (B, N, D, h, w) in the wide dtype, and by the features, (pixels, C)."""
    depths, pixels = cells.shape[2], cells.shape[3] * cells.shape[4]
    nothing = values.numel() == 0 or cells.numel() == 0
    make = values.new_zeros if nothing else values.new_empty
    grad_weights = make(cells.shape, dtype=_real(values.dtype)) if need_depth else None
    grad_values = make(values.shape) if need_feat else None
    if nothing:
        return grad_weights, grad_values
    grad, values, cells = _rows(grad.to(values.dtype)), _rows(values), cells.contiguous()
    weights = _weights(scale, _real(values.dtype)) if need_feat else None
    _call("backward", values.dtype, grad.data_ptr(), grad.stride(0), grad.shape[0], values.data_ptr(), values.stride(0),
          values.shape[1], cells.data_ptr(), _pointer(weights), cells.shape[0] * cells.shape[1], depths, pixels,
          _pointer(grad_weights), _pointer(grad_values), backend.threads())  # fmt: skip
    return grad_weights, grad_values


@by_address
def depth_lse(logits: Tensor) -> Tensor:
    """logsumexp over D of (B, N, D, h, w), as (B * N * h * w,) in float32 (float64 for float64); NaN for infinity."""
    logits = logits.contiguous()
    batch, cameras, depths, rows, columns = logits.shape
    out = logits.new_empty(batch * cameras * rows * columns, dtype=_real(logits.dtype))
    _call("lse", logits.dtype, logits.data_ptr(), batch * cameras, depths, rows * columns, out.data_ptr(),
          backend.threads())  # fmt: skip
    return out


def _weights(scale: Scale, dtype: torch.dtype) -> Tensor:
    """W of all points, in the number type of the computation."""
    depth, weight, lse = scale.depth.contiguous(), scale.weight, scale.lse
    if weight is None and lse is None and depth.dtype == dtype:
        return depth
    real = _real(depth.dtype)
    weight = None if weight is None else weight.to(depth.dtype).contiguous()
    lse = None if lse is None else lse.to(real).contiguous()
    planes = (1, depth.numel()) if lse is None else (scale.D, scale.hw)
    out = depth.new_empty(depth.numel(), dtype=real)
    _call("weights", depth.dtype, depth.data_ptr(), _pointer(weight), _pointer(lse),
          depth.numel() // max(1, planes[0] * planes[1]), *planes, out.data_ptr(), backend.threads())  # fmt: skip
    return out.to(dtype)
