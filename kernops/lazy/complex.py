"""Complex vectors: a formula of twice the dimension, real parts first, whose operations are written with real ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..autograd.tracing import is_dynamo_compiling
from .frame import Frame
from .nodes import build
from .operators import operate_all
from .reductions import VECTOR
from .tensor import LazyTensor
from .views import imaginary_part, real_part

Tensor = torch.Tensor
_COMPLEX_NAMES = {"float16": "complex32", "float32": "complex64", "float64": "complex128"}


class ComplexLazyTensor(LazyTensor):
    """What ``LazyTensor(x)`` is for complex data, and what ``x.real2complex()``, ``x.exp1j()`` and ``1j * x`` give.

    It has arithmetic, ``exp``, ``abs``, ``angle``, ``conj``, ``real``, ``imag``, ``@``, and ``sum``.
    """

    __slots__ = ()
    is_complex = True

    def __init__(self, x: Any, axis: Any = None) -> None:
        if type(axis) is Frame:
            self.formula, self.frame = x, axis
        else:
            whole = as_complex(x, axis)
            self.formula, self.frame = whole.formula, whole.frame

    @property
    def real(self) -> LazyTensor:
        """The real part."""
        return LazyTensor(build("Half", (0,), self.formula), self.frame)

    @property
    def imag(self) -> LazyTensor:
        """The imaginary part."""
        return LazyTensor(build("Half", (1,), self.formula), self.frame)

    @property
    def _shape(self) -> tuple[int, ...]:
        *lead, dim = super()._shape
        return (*lead, dim // 2)

    @property
    def ndim(self) -> int:
        return self.formula.dim // 2

    @property
    def dtype(self) -> str | None:
        name = super().dtype
        return None if name is None else _COMPLEX_NAMES[name]

    def __deepcopy__(self, memo: dict) -> LazyTensor:
        copied = LazyTensor(self.formula, self.frame).__deepcopy__(memo)
        return ComplexLazyTensor(copied.formula, copied.frame)

    def __copy__(self) -> LazyTensor:
        return self

    def __reduce__(self) -> tuple:
        return ComplexLazyTensor, super().__reduce__()[1]

    def t(self) -> LazyTensor:
        turned = super().t()
        return ComplexLazyTensor(turned.formula, turned.frame)

    def conj(self) -> ComplexLazyTensor:
        """The complex conjugate."""
        return pair(self.real, -self.imag)

    def angle(self) -> LazyTensor:
        """The argument, in (-π, π]."""
        return self.imag.atan2(self.real)

    def abs(self) -> LazyTensor:
        """The modulus."""
        return (self.real**2 + self.imag**2).sqrt()

    __abs__ = abs

    def exp(self) -> ComplexLazyTensor:
        """The exponential."""
        size = self.real.exp()
        return pair(size * self.imag.cos(), size * self.imag.sin())

    def __neg__(self) -> ComplexLazyTensor:
        return pair(-self.real, -self.imag)

    def sum(self, axis: Any = -1, dim: Any = None, **settings: Any) -> Any:
        """The sum over i, j or the vector."""
        own = self._axis("sum", axis, dim, True)
        return pair(self.real.sum(), self.imag.sum()) if own == VECTOR else self._reduce("Sum", own, None, 0, settings)

    def _reduce(self, name: str, axis: int, weight: Any, k: int, settings: dict[str, Any], option: float = 0.0) -> Any:
        if name != "Sum" or self.symbolic_variables or {"out", "call"} & settings.keys():
            raise NotImplementedError(
                "complex LazyTensors have sums of data, without out= and call=; more is not available yet"
            )
        out = super()._reduce(name, axis, weight, k, settings, option)
        half = out.shape[-1] // 2
        if isinstance(out, Tensor):
            return torch.complex(out[..., :half].contiguous(), out[..., half:].contiguous())
        return out[..., :half] + 1j * out[..., half:]

    def __matmul__(self, v: Any, **settings: Any) -> Any:
        columns, vector = self.real._columns(v.real, "K @ v")
        if is_complex(v):
            columns = pair(columns, self.real._columns(v.imag, "K @ v")[0])
        out = (self * columns)._reduce("Sum", 1, None, 0, settings)
        return out[..., 0] if vector else out


ComplexLazyTensor._new = ComplexLazyTensor


def is_complex(x: Any) -> bool:
    """Whether an array, a number or a list is complex."""
    if isinstance(x, list):
        return any(map(is_complex, x))
    if isinstance(x, Tensor):
        return x.is_complex()
    return isinstance(x, (complex, np.complexfloating)) or getattr(getattr(x, "dtype", None), "kind", "") == "c"


def pair(real: LazyTensor, imag: LazyTensor) -> ComplexLazyTensor:
    whole = operate_all("Pair", (real, imag))
    return ComplexLazyTensor(whole.formula, whole.frame)


def as_complex(x: Any, axis: Any = None) -> ComplexLazyTensor:
    """A LazyTensor, an array, a number or a list as a complex LazyTensor."""
    if isinstance(x, ComplexLazyTensor):
        return x
    if isinstance(x, list):
        return pair(LazyTensor([complex(v).real for v in x], axis), LazyTensor([complex(v).imag for v in x], axis))
    if not is_complex(x):
        return pair(x if isinstance(x, LazyTensor) else LazyTensor(x, axis), LazyTensor(0))
    parts = (x.real, x.imag) if not isinstance(x, np.ndarray) or x.ndim else (float(x.real), float(x.imag))
    halves = [LazyTensor(part, axis) for part in parts]
    if isinstance(x, Tensor) and not is_dynamo_compiling():
        for half, part in zip(halves, (real_part, imaginary_part)):
            half.frame = half.frame.through(x, part)
    return pair(*halves)


def _times(a: ComplexLazyTensor, b: ComplexLazyTensor) -> ComplexLazyTensor:
    return pair(a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real)


def _inverse(a: ComplexLazyTensor) -> ComplexLazyTensor:
    size = a.real**2 + a.imag**2
    return pair(a.real / size, -a.imag / size)


#: Operator -> (for two complex operands; for a complex and a real one, in this order; and in the other order).
_OPERATIONS: dict[str, tuple[Callable[[Any, Any], ComplexLazyTensor], ...]] = {
    "add": (
        lambda a, b: pair(a.real + b.real, a.imag + b.imag),
        lambda a, r: pair(a.real + r, a.imag),
        lambda a, r: pair(r + a.real, a.imag),
    ),
    "sub": (
        lambda a, b: pair(a.real - b.real, a.imag - b.imag),
        lambda a, r: pair(a.real - r, a.imag),
        lambda a, r: pair(r - a.real, -a.imag),
    ),
    "mul": (
        _times,
        lambda a, r: pair(a.real * r, a.imag * r),
        lambda a, r: pair(r * a.real, r * a.imag),
    ),
    "truediv": (
        lambda a, b: _times(a, _inverse(b)),
        lambda a, r: pair(a.real / r, a.imag / r),
        lambda a, r: pair(r * _inverse(a).real, r * _inverse(a).imag),
    ),
}
#: What is inherited as it is.
_KEPT = {
    *("T", "matvec", "rmatvec", "shape", "dim", "device", "nbatchdims", "batchdims", "ni", "nj", "axis", "variables"),
    *("symbolic_variables", "backend", "ranges", "formula", "frame", "is_complex"),
}


def _method(name: str, reverse: bool) -> Callable[..., Any]:
    both, with_real, from_real = _OPERATIONS[name]

    def method(self: ComplexLazyTensor, other: Any) -> ComplexLazyTensor:
        other = self._lift(other, name)
        if other.is_complex:
            return both(other, self) if reverse else both(self, other)
        return from_real(self, other) if reverse else with_real(self, other)

    return method


def _not_yet(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **settings: Any) -> Any:
        raise NotImplementedError(f"{name} of a complex LazyTensor is not available yet")

    return method


def _generate() -> None:
    """Arithmetic, and an error for every method and operator that would take the two parts for one real vector."""
    for name in _OPERATIONS:
        setattr(ComplexLazyTensor, f"__{name}__", _method(name, False))
        setattr(ComplexLazyTensor, f"__r{name}__", _method(name, True))
    operators = [f"__{r}{n}__" for n in ("mod", "pow", "or") for r in ("", "r")]
    operators += [f"__{n}__" for n in ("eq", "ne", "lt", "gt", "le", "ge", "getitem")]
    public = [n for n in dir(LazyTensor) if not n.startswith("_") and n not in _KEPT]
    for name in (*operators, *public):
        if name not in vars(ComplexLazyTensor):
            setattr(ComplexLazyTensor, name, _not_yet(name))


_generate()
