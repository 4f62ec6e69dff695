"""What can go wrong with a linear system, and the precision that inner products are accumulated in."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from numbers import Integral, Real
from typing import Any

import torch

Tensor = torch.Tensor


class ConvergenceWarning(UserWarning):
    """An iteration ended less accurately than asked for."""


class NumericalWarning(UserWarning):
    """A matrix was changed, by as much as the message says, to make a computation possible."""


class NotPositiveDefiniteError(torch.linalg.LinAlgError):
    """A matrix that has to be positive definite has a negative eigenvalue."""


class OutOfMemoryError(torch.cuda.OutOfMemoryError, MemoryError):
    """There is not as much memory as a computation needs; the message says how much that is, and what needs less."""


#: Whether ``warn`` is silent: in this thread alone, which the filters of ``warnings`` are not.
_silent: ContextVar[bool] = ContextVar("silent", default=False)


@contextmanager
def without_warnings() -> Iterator[None]:
    """Without the solvers' warnings, for a caller that looks at their reports; of this thread only."""
    before = _silent.set(True)
    try:
        yield
    finally:
        _silent.reset(before)


def warn(message: str, category: type[Warning], stacklevel: int = 1) -> None:
    """``warnings.warn``, except within ``without_warnings``."""
    if not _silent.get():
        warnings.warn(message, category, stacklevel=stacklevel + 1)


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether an error is the allocator's, of a GPU, of torch or of NumPy; not one that is explained already."""
    if isinstance(error, OutOfMemoryError):
        return False
    known = isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError))
    return known or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))


@contextmanager
def memory_for(what: str, numbers: int, like: Tensor, instead: str) -> Iterator[None]:
    """Explains a run out of memory within: ``what`` needs so many ``numbers`` of ``like``'s dtype at least.

    Args:
        what: what is computed, the subject of the message.
        numbers: how many of them are stored at once, at the least.
        like: a tensor of the dtype and device.
        instead: what needs less.

    Raises:
        OutOfMemoryError: instead of the allocator's error.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not ran_out_of_memory(error):
            raise
        free = ""
        if like.is_cuda:
            left, whole = torch.cuda.mem_get_info(like.device)
            free = f", where {size_of(left)} of {size_of(whole)} are free"
        size, dtype = size_of(numbers * like.element_size()), str(like.dtype).removeprefix("torch.")
        raise OutOfMemoryError(f"{what} needs {size} or more of {dtype} on {like.device}{free}. {instead}") from error


def size_of(count: float) -> str:
    """A number of bytes, in words."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def check_number(name: str, value: Any, least: float = 0.0) -> None:
    """Raise unless an argument is a finite number of at least so much."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number >= {least:g}; got {value!r}")
    if not least <= float(value) < math.inf:
        raise ValueError(f"{name} must be >= {least:g} and finite; got {value}")


def check_count(name: str, value: Any, least: int | None = None, or_none: bool = False) -> None:
    """Raise unless an argument is a whole number, of at least so much."""
    if value is None and or_none:
        return
    what = "None or " * or_none + "a whole number" + (f" >= {least}" if least is not None else "")
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be {what}; got {value!r}")
    if least is not None and int(value) < least:
        raise ValueError(f"{name} must be {what}; got {value}")


def check_floats(name: str, b: Tensor) -> None:
    """Raise ``ValueError`` unless ``b`` has a dtype that linear systems can be solved in."""
    if b.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"{name} must be float32 or float64, the dtypes that a linear system can be solved in; got {b.dtype}"
        )


def wide(a: Tensor) -> Tensor:
    """``a`` in float64, where the device has it."""
    return a if a.dtype == torch.float64 or a.device.type == "mps" else a.double()


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Scalar products of columns, accumulated in float64: (*B, N, E), (*B, N, E) -> (*B, E)."""
    return (a * b).sum(-2, dtype=torch.float64 if a.device.type != "mps" else None)


def norm(a: Tensor) -> Tensor:
    """Euclidean norms of columns, (*B, N, E) -> (*B, E)."""
    return torch.linalg.vector_norm(a, dim=-2)


def magnitude(a: Tensor) -> Tensor:
    """The power of two below the largest entry of each column, (*B, N, E) -> (*B, 1, E); 1 for zeros and NaN.

    Columns divided by it have squares that neither overflow nor vanish, and lose no digit.
    """
    largest = a.abs().amax(-2, keepdim=True) if a.shape[-2] else a.new_ones(*a.shape[:-2], 1, a.shape[-1])
    usable = (largest > 0) & torch.isfinite(largest)
    return torch.where(usable, torch.where(usable, largest, 1.0).log2().floor().exp2(), 1.0)
