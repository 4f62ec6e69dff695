"""Arrays of three libraries seen as torch tensors, without copies where memory allows it, and results going back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..autograd.tracing import cached, is_dynamo_compiling

Tensor = torch.Tensor

#: Accepted, in the words of error messages.
ARRAYS = "a torch tensor, a NumPy array or a CuPy array"
FLOATS = "float16, bfloat16, float32 or float64"
_FLOATS = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))


class Space:
    """Where data live: kind of array (``"torch"``, ``"numpy"`` or ``"cupy"``), dtype and device; one object each."""

    __slots__ = ("kind", "dtype", "device")

    def __init__(self, kind: str, dtype: torch.dtype, device: torch.device) -> None:
        self.kind, self.dtype, self.device = kind, dtype, device

    def same(self, other: Space) -> bool:
        """Whether the two are equal. (Code that ``torch.compile`` traces has several objects for one space.)"""
        return self.kind == other.kind and self.dtype == other.dtype and self.device == other.device

    def __reduce__(self) -> tuple:
        return space_of, (self.kind, self.dtype, self.device)

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


@cached(256)
def space_of(kind: str, dtype: torch.dtype, device: torch.device) -> Space:
    return Space(kind, dtype, device)


#: Of tensors seen before: a look-up here costs less than the checks and a call of ``space_of``.
_spaces: dict[tuple[torch.dtype, torch.device, torch.layout], Space] = {}


def kind_of(x: object) -> str | None:
    """The library of an array; None for anything else. CuPy is recognised without importing it."""
    if isinstance(x, Tensor):
        return "torch"
    if isinstance(x, np.ndarray):
        return "numpy"
    return "cupy" if type(x).__module__.partition(".")[0] == "cupy" and hasattr(x, "__dlpack__") else None


def to_tensor(x: Any, name: str) -> tuple[Tensor, Space]:
    """``x`` as a tensor that shares its memory, and its space.

    Raises:
        TypeError: ``x`` is not an array, or not of floating-point numbers.
    """
    if isinstance(x, Tensor):
        dtype, device = x.dtype, x.device
        known = None if is_dynamo_compiling() else _spaces.get((dtype, device, x.layout))
        if known is not None:
            return x, known
        if dtype not in _FLOATS or x.layout is not torch.strided:
            raise _unfit(name, "a torch tensor", dtype, x.layout)
        space = space_of("torch", dtype, device)
        if not is_dynamo_compiling():
            _spaces[dtype, device, x.layout] = space
        return x, space
    kind = kind_of(x)
    if kind is None:
        raise TypeError(f"{name} must be {ARRAYS}; got {type(x).__name__}")
    tensor = _from_numpy(x, name) if kind == "numpy" else _from_cupy(x)
    if tensor.dtype not in _FLOATS:
        raise _unfit(name, f"a {'NumPy' if kind == 'numpy' else 'CuPy'} array", tensor.dtype, torch.strided)
    return tensor, space_of(kind, tensor.dtype, tensor.device)


def _unfit(name: str, what: str, dtype: object, layout: torch.layout) -> TypeError:
    if layout is not torch.strided:
        return TypeError(f"{name} must be dense; got {what} of layout {str(layout).removeprefix('torch.')}")
    return TypeError(f"{name} must be of dtype {FLOATS}; got {what} of {str(dtype).removeprefix('torch.')}")


class _Writable:
    """The memory of a read-only array without its flag: torch warns about the flag, and back ends write to no input."""

    def __init__(self, x: np.ndarray) -> None:
        self.owner = x
        interface = dict(x.__array_interface__)
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def _from_numpy(x: np.ndarray, name: str) -> Tensor:
    if x.dtype.kind not in "fiubc":
        raise _unfit(name, "a NumPy array", x.dtype, torch.strided)
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{name} must be {ARRAYS}; got a masked array; fill its gaps first")
    if not x.dtype.isnative:
        x = x.astype(x.dtype.newbyteorder("="))
    if any(s < 0 or s % x.itemsize for s in x.strides):  # what torch cannot express
        x = np.ascontiguousarray(x)
    if not x.flags.writeable:
        x = np.asarray(_Writable(x))
    if type(x) is not np.ndarray:
        x = x.view(np.ndarray)
    try:
        return torch.from_numpy(x)
    except TypeError:  # float128 and the like
        raise _unfit(name, "a NumPy array", x.dtype, torch.strided) from None


def _from_cupy(x: Any) -> Tensor:
    if any(s < 0 or s % x.itemsize for s in getattr(x, "strides", ())):
        x = sys.modules["cupy"].ascontiguousarray(x)
    return torch.from_dlpack(x)  # which orders the streams of the two


def _to_numpy(t: Tensor) -> Any:
    return t.detach().numpy()


def _to_cupy(t: Tensor) -> Any:
    return sys.modules["cupy"].from_dlpack(t.detach())


#: Kind of array -> how a result of that kind is made of a tensor.
BACK: dict[str, Callable[[Tensor], Any] | None] = {"torch": None, "numpy": _to_numpy, "cupy": _to_cupy}


def give_back(out: Any, kind: str) -> Any:
    """A tensor, or a tuple of tensors, as arrays of the caller's kind."""
    back = BACK[kind]
    if back is None:
        return out
    return tuple(map(back, out)) if isinstance(out, tuple) else back(out)
