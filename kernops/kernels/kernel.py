"""Kernels as objects: rows of the table with their parameters, and sums, products and powers of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from operator import index
from typing import Any

import numpy as np
import torch

from ..autograd.tracing import is_dynamo_compiling
from ..formula.graph import CAT_P, CAT_SCALAR, Node
from ..lazy import LazyTensor
from ..lazy.arrays import to_tensor
from ..lazy.frame import PLAIN, VIEWS, Frame, merge
from ..lazy.nodes import SCALAR, moved, variable
from ..lazy.views import Late, flat, flat_matrices
from .slots import scalar_formula
from .table import Row, complete

Tensor = torch.Tensor


class Kernel:
    """A covariance function k(x, y), with the parameters that it was given.

    Kernels are made by the constructors of ``kernops.kernels`` (``RBF``, ``Matern``, ...), by :func:`custom` of any
    formula, and from one another: ``a + b``, ``a * b`` and ``a ** p``, where numbers count as ``Constant``. They hold
    no points; ``kernops.operators.KernelOperator(kernel, x, y)`` is the matrix of a kernel.
    """

    def formula(self, x: LazyTensor, y: LazyTensor) -> LazyTensor:
        """The kernel of rows ``x`` (..., M, 1, D) and columns ``y`` (..., 1, N, D), of one number a pair."""
        raise NotImplementedError

    def own(self, x: LazyTensor, y: LazyTensor) -> LazyTensor | None:
        """What a point has in common with itself only: the part of ``White``. ``None`` stands for 0."""
        return None

    def restrict(self, dims: Sequence[int]) -> Kernel:
        """The same kernel of the features ``dims`` only.

        Example:
            >>> from kernops.kernels import RBF, Periodic
            >>> RBF(0.5).restrict([0, 2]) * Periodic(periodicity=24.0).restrict([1])
            RBF(length_scale=0.5).restrict([0, 2]) * Periodic(length_scale=1.0, periodicity=24.0).restrict([1])
        """
        return Restricted(self, dims)

    def __add__(self, other: Any) -> Kernel:
        other = _lift(other)
        return NotImplemented if other is None else Sum(self, other)

    def __radd__(self, other: Any) -> Kernel:
        if isinstance(other, Real) and other == 0:  # what ``sum`` begins with
            return self
        other = _lift(other)
        return NotImplemented if other is None else Sum(other, self)

    def __mul__(self, other: Any) -> Kernel:
        other = _lift(other)
        return NotImplemented if other is None else Product(self, other)

    def __rmul__(self, other: Any) -> Kernel:
        other = _lift(other)
        return NotImplemented if other is None else Product(other, self)

    def __pow__(self, exponent: float) -> Kernel:
        return Power(self, exponent)


def _lift(x: Any) -> Kernel | None:
    """An operand as a kernel: a number, or a tensor of one, is a constant."""
    if isinstance(x, Kernel):
        return x
    if isinstance(x, (Real, Tensor)):
        from .constructors import Constant

        return Constant(x)  # type: ignore[arg-type]
    return None


class Basic(Kernel):
    """A row of the table with its parameters."""

    def __init__(self, name: str, row: Row, params: Mapping[str, Any]) -> None:
        self.name, self.row = name, row
        unknown = sorted(set(params) - set(row.params))
        if unknown:
            takes = ", ".join(row.params) or "no parameters"
            raise TypeError(f"{name} takes {takes}; got {', '.join(map(repr, unknown))}")
        self.params = {
            k: v if v is None or k in row.static else parameter(f"{k} of {name}", v, k not in row.free)
            for k, v in {**row.params, **params}.items()
        }

    def formula(self, x: LazyTensor, y: LazyTensor) -> LazyTensor:
        if x.formula.dim != y.formula.dim:
            features = f"{x.formula.dim} and {y.formula.dim}"
            raise ValueError(f"{self.name} is of points of one number of features; got {features}")
        params = complete(self.row, self.params, x.formula.dim)
        names = [k for k in params if k not in self.row.static]
        static = {k: params[k] for k in self.row.static}
        for k in names:
            check_length(k, self.name, self.row, params[k], x.formula.dim)

        def build(x: Node, y: Node, *values: Node) -> Node:
            return self.row.of(x, y, **dict(zip(names, values)), **static)

        given = [as_parameter(params[k], x, 2 if k in self.row.matrices else 1) for k in names]
        return combine(self.name, build, x, y, *given)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={_short(v)}' for k, v in self.params.items())})"


class White(Kernel):
    """Noise that is independent from point to point: ``noise_level`` where a point meets itself, else 0.

    Only the matrix of points with themselves, ``KernelOperator(kernel, x)``, has it, as in scikit-learn; two equal
    points are still two.

    Args:
        noise_level: variance > 0, a number or a tensor of one, (*B, 1) for batches.

    Example:
        >>> from kernops.kernels import RBF, White
        >>> from kernops.operators import KernelOperator
        >>> KernelOperator(RBF() + White(0.1), torch.zeros(2, 1)).to_dense()
        tensor([[1.1000, 1.0000],
                [1.0000, 1.1000]])
    """

    def __init__(self, noise_level: Any = 1.0) -> None:
        self.noise_level = parameter("noise_level of White", noise_level, True)

    def formula(self, x: LazyTensor, y: LazyTensor) -> LazyTensor:
        return as_parameter(0.0, x, 1)

    def own(self, x: LazyTensor, y: LazyTensor) -> LazyTensor | None:
        out = as_parameter(self.noise_level, x, 1)
        if out.formula.dim != 1:
            raise ValueError(
                f"noise_level of White must be one number (add_diagonal takes one a point); got {out.formula.dim}"
            )
        return out

    def __repr__(self) -> str:
        return f"White(noise_level={_short(self.noise_level)})"


class Custom(Kernel):
    """A kernel that a user's function of two LazyTensors writes; made by :func:`custom`."""

    def __init__(self, function: Callable[..., Any], params: Mapping[str, Any]) -> None:
        self.function, self.params = function, dict(params)

    def formula(self, x: LazyTensor, y: LazyTensor) -> LazyTensor:
        return scalar_formula("kernel", self.function(x, y, **self.params))

    def __repr__(self) -> str:
        name = getattr(self.function, "__name__", repr(self.function))
        return f"custom({', '.join([name, *(f'{k}={_short(v)}' for k, v in self.params.items())])})"


class Restricted(Kernel):
    """A kernel of some of the features."""

    def __init__(self, kernel: Kernel, dims: Sequence[int]) -> None:
        given = dims
        try:
            if any(isinstance(d, bool) or getattr(d, "dtype", None) is torch.bool for d in dims):
                raise TypeError
            dims = [index(d) for d in dims]
        except TypeError:
            raise TypeError(f"dims must be whole numbers of features, such as [0, 2]; got {given!r}") from None
        if not dims or min(dims) < 0 or len(set(dims)) < len(dims):
            raise ValueError(f"dims must be different numbers >= 0 of features, at least one; got {dims}")
        self.kernel, self.dims = kernel, tuple(dims)

    def _part(self, x: LazyTensor) -> LazyTensor:
        if max(self.dims) >= x.formula.dim:
            raise ValueError(f"dims {list(self.dims)} of {self.kernel!r}: the points have {x.formula.dim} features")
        first, count = self.dims[0], len(self.dims)
        if self.dims == tuple(range(first, first + count)):
            return x[first : first + count] if count < x.formula.dim else x
        parts = [x[d] for d in self.dims]
        out = parts[0]
        for part in parts[1:]:
            out = out.concat(part)
        return out

    def formula(self, x: LazyTensor, y: LazyTensor) -> LazyTensor:
        return self.kernel.formula(self._part(x), self._part(y))

    def own(self, x: LazyTensor, y: LazyTensor) -> LazyTensor | None:
        return self.kernel.own(self._part(x), self._part(y))

    def __repr__(self) -> str:
        inner = repr(self.kernel)
        return f"{f'({inner})' if isinstance(self.kernel, (_Composite, Power)) else inner}.restrict({list(self.dims)})"


class _Composite(Kernel):
    """Kernels made of two."""

    sign = ""

    def __init__(self, a: Kernel, b: Kernel) -> None:
        self.a, self.b = a, b

    def __repr__(self) -> str:
        parts = (f"({k!r})" if self.sign == "*" and isinstance(k, Sum) else repr(k) for k in (self.a, self.b))
        return f" {self.sign} ".join(parts)


class Sum(_Composite):
    """``a + b``."""

    sign = "+"

    def formula(self, x: LazyTensor, y: LazyTensor) -> LazyTensor:
        parts = [k.formula(x, y) for k in (self.a, self.b) if not isinstance(k, White)]
        return parts[0] + parts[1] if len(parts) == 2 else parts[0] if parts else self.a.formula(x, y)

    def own(self, x: LazyTensor, y: LazyTensor) -> LazyTensor | None:
        parts = [p for p in (self.a.own(x, y), self.b.own(x, y)) if p is not None]
        return None if not parts else parts[0] if len(parts) == 1 else parts[0] + parts[1]


class Product(_Composite):
    """``a * b``."""

    sign = "*"

    def formula(self, x: LazyTensor, y: LazyTensor) -> LazyTensor:
        if isinstance(self.a, White) or isinstance(self.b, White):
            return as_parameter(0.0, x, 1)
        return self.a.formula(x, y) * self.b.formula(x, y)

    def own(self, x: LazyTensor, y: LazyTensor) -> LazyTensor | None:
        """(f + u) (g + v) - f g."""
        u, v = self.a.own(x, y), self.b.own(x, y)
        if u is None and v is None:
            return None
        f, g = self.a.formula(x, y), self.b.formula(x, y)
        if v is None:
            return u * g  # type: ignore[operator]
        return f * v if u is None else u * (g + v) + f * v


class Power(Kernel):
    """``kernel ** exponent``."""

    def __init__(self, kernel: Kernel, exponent: float) -> None:
        if isinstance(exponent, bool) or not isinstance(exponent, Real) or not 0 < exponent < math.inf:
            raise ValueError(f"the exponent of a kernel must be a number > 0; got {exponent!r}")
        self.kernel: Kernel = kernel
        self.exponent: float = int(exponent) if float(exponent).is_integer() else float(exponent)

    def formula(self, x: LazyTensor, y: LazyTensor) -> LazyTensor:
        return self.kernel.formula(x, y) ** self.exponent

    def own(self, x: LazyTensor, y: LazyTensor) -> LazyTensor | None:
        u = self.kernel.own(x, y)
        if u is None:
            return None
        f = self.kernel.formula(x, y)
        return (f + u) ** self.exponent - f**self.exponent

    def __repr__(self) -> str:
        inner = repr(self.kernel)
        return f"{f'({inner})' if isinstance(self.kernel, (_Composite, Power)) else inner} ** {self.exponent}"


# --- parameters ---------------------------------------------------------------------------------------------------
def parameter(name: str, value: Any, positive: bool) -> float | tuple | Tensor:
    """A checked parameter: a float, numbers that take the data's dtype later (nested tuples), or a tensor as it is.

    Raises:
        TypeError: it is no number, array or tensor.
        ValueError: it is not finite, or is <= 0 and must not be.
    """
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            raise TypeError(f"{name} must be a tensor of floating-point numbers; got one of {value.dtype}")
        if value.is_cuda and torch.cuda.is_current_stream_capturing():
            return value
        good: Any = torch.isfinite(value).all() and (not positive or (value > 0).all())
        kept: float | tuple | Tensor = value
    else:
        if isinstance(value, (bool, str)) or not isinstance(value, (Real, np.ndarray, list, tuple)):
            raise TypeError(f"{name} must be a number, numbers or a tensor; got {type(value).__name__}")
        array = np.asarray(value, dtype=np.float64)
        good = np.isfinite(array).all() and (not positive or (array > 0).all())
        kept = float(array) if array.ndim == 0 else _tuples(array.tolist())
    if not is_dynamo_compiling() and not bool(good):
        raise ValueError(f"{name} must be finite{' and > 0' if positive else ''}; got {_short(value)}")
    return kept


def check_length(name: str, kernel: str, row: Row, value: Any, dim: int) -> None:
    """Raise ``ValueError`` unless what :func:`parameter` returned is one number, or one for each feature."""
    if name in row.matrices or name == "weights" or isinstance(value, float):
        return
    got = len(value) if isinstance(value, tuple) else value.shape[-1] if value.ndim else 1
    if got not in (1, dim):
        raise ValueError(f"{name} of {kernel} must be one number or one for each of {dim} features; got {got}")


def _tuples(x: Any) -> Any:
    return tuple(map(_tuples, x)) if isinstance(x, list) else x


def as_parameter(value: Any, like: LazyTensor, rank: int) -> LazyTensor:
    """A parameter's value as a LazyTensor: a number by value, so that a new one compiles nothing.

    Args:
        value: a float, numbers, or a tensor of ``rank`` axes after its batch axes.
        like: a LazyTensor that says dtype and device.
        rank: 1, or 2 for a matrix, whose rows become one vector.
    """
    if isinstance(value, float):
        return LazyTensor(SCALAR, Frame((value,), (CAT_SCALAR,)))
    if isinstance(value, tuple):
        space = like.frame.space
        assert space is not None
        value = torch.tensor(value, dtype=space.dtype, device=space.device)
    tensor, space = to_tensor(value, "a parameter")
    given: Any = tensor
    if tensor.ndim == 0:
        given = Late(tensor, flat)
    elif rank == 2 and tensor.ndim >= 2:
        given = Late(tensor, flat_matrices)
    shape = tuple(tensor.shape) if given is tensor else tuple(given.read().shape)
    frame = Frame((given,), (CAT_P,), None, None, shape[:-1], space, form=PLAIN if given is tensor else VIEWS)
    return LazyTensor(variable(CAT_P, shape[-1]), frame)


def combine(name: str, build: Callable[..., Node], *parts: LazyTensor) -> LazyTensor:
    """``build`` applied to the formulas of ``parts``, with the data of all of them."""
    frame, nodes = parts[0].frame, [parts[0].formula]
    for part in parts[1:]:
        frame, numbers = merge(frame, part.frame, name)
        nodes.append(part.formula if numbers is None else moved(part.formula, numbers))
    return LazyTensor(build(*nodes), frame)


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        value = value.detach().tolist() if value.numel() <= 8 else f"tensor of shape {tuple(value.shape)}"
    return str(list(value) if isinstance(value, tuple) else value)
