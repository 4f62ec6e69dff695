"""What stands for rows and columns of an operator: numbers, slices, lists, arrays, tensors and masks."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import numpy as np
import torch

Tensor = torch.Tensor


def read(key: Any, size: int, device: torch.device) -> int | slice | Tensor:
    """An index as a number, a slice, or numbers (S,) that count from 0; checked where that needs no synchronisation."""
    if isinstance(key, slice):
        return key
    given = key
    if isinstance(key, (list, range, np.ndarray)):
        array = np.asarray(key) if np.size(key) else np.zeros(0, np.int64)
        array = array.astype(np.int64) if array.dtype.kind in "iu" else array
        key = torch.from_numpy(array) if array.dtype.kind in "bi" else None
    if isinstance(key, Integral) and not isinstance(key, bool):
        one = int(key)
        if not -size <= one < size:
            raise IndexError(f"an index is out of range for an axis of length {size}; got {one}")
        return one % size
    if not isinstance(key, Tensor) or key.ndim != 1 or key.is_floating_point():
        raise TypeError(f"an index is a number, a slice, or whole numbers or a mask (S,); got {given!r}")
    if key.dtype == torch.bool:
        if len(key) != size:
            raise IndexError(f"a mask must have {size} entries; got {len(key)}")
        key = key.nonzero()[:, 0]
    key = key.to(device, torch.int64)
    if not key.is_cuda and len(key) and not -size <= int(key.min()) <= int(key.max()) < size:
        raise IndexError(f"an index is out of range for an axis of length {size}")
    return torch.where(key < 0, key + size, key)


def numbers(index: int | slice | Tensor, size: int, device: torch.device) -> Tensor:
    """What :func:`read` returned, as numbers (S,)."""
    if isinstance(index, Tensor):
        return index
    every = range(*index.indices(size)) if isinstance(index, slice) else range(index, index + 1)
    return torch.arange(every.start, every.start + len(every) * every.step, every.step, device=device)
