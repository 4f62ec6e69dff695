"""Sums by bucket: items with integer labels, grouped once, summed as often as wanted."""

from __future__ import annotations

import operator
from types import ModuleType
from typing import Any

import torch

from .calls import call
from .kernels import Level, choose
from .levels import FIELDS, MOST, flatten, levels_of, unflatten

Tensor = torch.Tensor

_INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class BucketPlan:
    """n items grouped by an integer bucket: histogram, exclusive scan, stable scatter.

    Making one on a GPU waits for it once, to check the labels. Using it does not. It can be pickled and copied.

    Args:
        buckets: (n,), an integer tensor of labels in [0, n_buckets); an item with a negative label is left out.
        n_buckets: the number of buckets.
        backend: ``"auto"``, ``"cuda"``, ``"cpu"`` or ``"tiled"``.

    Attributes:
        buckets: int32 (n,), the labels; -1 for what is left out.
        order: int32 (n,), the items sorted by bucket, in their own order in each.
        starts: int32 (n_buckets + 1,): bucket k has the items ``order[starts[k] : starts[k + 1]]``. What is in
            ``order`` beyond ``starts[-1]`` means nothing.
        n, n_buckets: how many items and buckets.

    Raises:
        TypeError: ``buckets`` is not an integer tensor, or ``n_buckets`` no integer.
        ValueError: a label is n_buckets or more, a shape does not fit, or n or n_buckets is more than 2^31 - 2^13.
        RuntimeError: the back end that was asked for cannot run here.

    Example:
        >>> import torch
        >>> plan = BucketPlan(torch.tensor([2, 0, 2, -1, 2]), 3)
        >>> plan.counts().tolist()
        [1, 0, 3]
        >>> bucketed_sum(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), plan).tolist()
        [2.0, 0.0, 9.0]
    """

    def __init__(self, buckets: Tensor, n_buckets: int, *, backend: str = "auto") -> None:
        self.n_buckets = _count(n_buckets)
        labels = _labels(buckets)
        self.n = labels.numel()
        self.backend = backend
        kernels = choose(backend, labels.device)
        self.buckets = torch.where((labels < 0) | (labels >= self.n_buckets), -1, labels).to(torch.int32)
        self.order, self.starts = bucket_sort(kernels, self.buckets, self.n_buckets)
        largest, longest = _largest_and_longest(labels, self.starts)
        if largest >= self.n_buckets:
            raise ValueError(
                f"buckets must be less than n_buckets = {self.n_buckets} (negative: left out); the largest is {largest}"
            )
        self._flat = flatten(kernels, levels_of(Level(self.order, self.starts, None, self.n_buckets), longest))
        finished(self)

    @property
    def levels(self) -> tuple[Level, ...]:
        """The passes that sum it: one, or two where a bucket is long."""
        return unflatten(self._flat, self.n_buckets)

    @property
    def device(self) -> torch.device:
        """Where the plan is."""
        return self.buckets.device

    def counts(self) -> Tensor:
        """The number of items of each bucket: int64 (n_buckets,)."""
        return self.starts.diff().long()

    def to(self, device: torch.device | str) -> BucketPlan:
        """The plan on another device; itself if it is there."""
        return moved(self, device)

    def __repr__(self) -> str:
        return f"BucketPlan({self.n} items, {self.n_buckets} buckets, on {self.device})"


def bucketed_sum(values: Tensor, plan: BucketPlan) -> Tensor:
    """The sum of the values of each bucket; 0 for an empty one.

    float16 and bfloat16 are summed in float32. The same call gives the same bits. Differentiable to any order.

    Args:
        values: (n,) or (..., n, C), float16, bfloat16, float32 or float64, on the plan's device.
        plan: how the n items are grouped.

    Returns:
        (n_buckets,) or (..., n_buckets, C), of the values' dtype.

    Raises:
        TypeError: ``values`` is no floating-point tensor, or ``plan`` no :class:`BucketPlan`.
        ValueError: the number of items or the device is not the plan's.

    Example:
        >>> import torch
        >>> plan = BucketPlan(torch.tensor([1, 0, 1]), 2)
        >>> bucketed_sum(torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]]), plan)
        tensor([[ 2., 20.],
                [ 4., 40.]])
    """
    rows = _rows(values, plan)
    out = call("bucketed_sum", rows, plan.buckets, plan._flat, plan.n_buckets, plan.backend)
    return _like(out, values)


def bucketed_cumsum(values: Tensor, plan: BucketPlan, *, reverse: bool = False) -> Tensor:
    """Inclusive prefix sums inside each bucket, in the items' order; each at its item's own place.

    Sums are formed inside a bucket, never as a difference of sums over all items, which cancels. Otherwise as
    :func:`bucketed_sum`.

    Args:
        values: (n,) or (..., n, C), float16, bfloat16, float32 or float64, on the plan's device.
        plan: how the n items are grouped.
        reverse: sum from the end of each bucket.

    Returns:
        The shape and dtype of ``values``; 0 for an item that is left out.

    Raises:
        TypeError, ValueError: as :func:`bucketed_sum`.

    Example:
        >>> import torch
        >>> plan = BucketPlan(torch.tensor([1, 0, 1, -1, 1]), 2)
        >>> bucketed_cumsum(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), plan).tolist()
        [1.0, 2.0, 4.0, 0.0, 9.0]
    """
    rows = _rows(values, plan)
    return _like(call("bucketed_cumsum", rows, plan.order, plan.starts, bool(reverse), plan.backend), values)


# --- values with leading axes -----------------------------------------------------------------------------------------
def _rows(values: Tensor, plan: BucketPlan) -> Tensor:
    """(n, all other axes)."""
    if not isinstance(plan, BucketPlan):
        raise TypeError(f"plan must be a BucketPlan; got {type(plan).__name__}")
    check_float("values", values)
    if values.device != plan.device:
        raise ValueError(f"values are on {values.device}, the plan on {plan.device}; move one with .to(...)")
    items = values.shape[-2 if values.ndim > 1 else 0] if values.ndim else 0
    if values.ndim == 0 or items != plan.n:
        raise ValueError(
            f"values must have shape ({plan.n},) or (..., {plan.n}, C) for a plan of {plan.n} items; got "
            f"{tuple(values.shape)}"
        )
    if values.ndim == 1:
        return values[:, None]
    return values if values.ndim == 2 else values.movedim(-2, 0).flatten(1)


def _like(rows: Tensor, values: Tensor) -> Tensor:
    if values.ndim == 1:
        return rows[:, 0]
    if values.ndim == 2:
        return rows
    return rows.reshape(rows.shape[0], *values.shape[:-2], values.shape[-1]).movedim(0, -2)


# --- checks -----------------------------------------------------------------------------------------------------------
def check_float(name: str, t: object) -> None:
    """TypeError unless ``t`` is a tensor of a dtype that is computed with."""
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor; got {type(t).__name__}")
    if t.dtype not in _FLOATS:
        raise TypeError(
            f"{name} must be float16, bfloat16, float32 or float64; got {str(t.dtype).removeprefix('torch.')}"
        )


def check_integer(name: str, t: object) -> None:
    """TypeError unless ``t`` is a tensor of integers."""
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor of integers; got {type(t).__name__}")
    if t.dtype not in _INTEGERS:
        raise TypeError(f"{name} must be a tensor of integers, int32 say; got {str(t.dtype).removeprefix('torch.')}")


def _count(n_buckets: Any) -> int:
    try:
        count = operator.index(n_buckets)
    except TypeError:
        raise TypeError(f"n_buckets must be an integer; got {n_buckets!r}") from None
    if not 0 <= count <= MOST:
        raise ValueError(f"n_buckets must be in [0, {MOST}]; got {count}")
    return count


def _labels(buckets: Tensor) -> Tensor:
    check_integer("buckets", buckets)
    if buckets.ndim != 1:
        raise ValueError(f"buckets must have shape (n,); got {tuple(buckets.shape)}")
    if buckets.numel() > MOST:
        raise ValueError(f"buckets has {buckets.numel()} items; at most {MOST} are accepted")
    return buckets.detach() if buckets.dtype == torch.int32 else buckets.detach().long()


def _largest_and_longest(labels: Tensor, starts: Tensor) -> tuple[int, int]:
    """The largest label and the length of the longest bucket, waiting for the device once."""
    if labels.numel() == 0:
        return -1, 0
    longest = starts.diff().max() if starts.numel() > 1 else starts[0]
    largest, length = torch.stack((labels.max().long(), longest.long())).tolist()
    return largest, length


def bucket_sort(kernels: ModuleType, buckets: Tensor, n_buckets: int) -> tuple[Tensor, Tensor]:
    """The kernel, and its result where there is nothing to sort."""
    if buckets.numel() and n_buckets:
        return kernels.bucket_sort(buckets, n_buckets)  # type: ignore[no-any-return]
    return torch.empty_like(buckets), buckets.new_zeros(n_buckets + 1)


# --- plans elsewhere --------------------------------------------------------------------------------------------------
def moved(plan: Any, device: torch.device | str) -> Any:
    """A copy of a plan with its tensors on another device; the plan itself if they are there."""
    device = torch.empty(0, device=device).device  # "cuda" becomes "cuda:0"
    if plan.device == device:
        return plan
    memo: dict[int, Tensor] = {}
    other = plan.__class__.__new__(plan.__class__)
    other.__dict__.update({name: _moved(value, device, memo) for name, value in plan.__dict__.items()})
    for flat in (other._flat, getattr(other, "_points", None) or []):
        flat[FIELDS - 1 :: FIELDS] = [_work(other.backend, starts) for starts in flat[1::FIELDS]]
    return finished(other)


def _work(backend: str, starts: Tensor) -> Tensor:
    """How the sums are shared out where ``starts`` is; nothing where the plan's back end cannot run anyway."""
    if starts.device.type == "meta":
        return starts.new_empty(0)
    try:
        return choose(backend, starts.device).segment_work(starts)  # type: ignore[no-any-return]
    except (ValueError, RuntimeError):  # a plan for "cuda" may rest on a CPU; a sum there says why it cannot be
        return starts.new_empty(0)


def finished(plan: Any) -> Any:
    """The plan, once a GPU is done with it: the next call may come on any stream."""
    if plan.device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream(plan.device).synchronize()
    return plan


def _moved(value: Any, device: torch.device, memo: dict[int, Tensor]) -> Any:
    if isinstance(value, list):
        return [_moved(x, device, memo) for x in value]
    if isinstance(value, Tensor):
        return memo.setdefault(id(value), value.to(device))
    return value
