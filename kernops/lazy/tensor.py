"""``LazyTensor``: arrays of vectors for all pairs (i, j), written as a formula and never stored."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from ..autograd.tracing import resolve
from ..formula.graph import CAT_I, CAT_J, CAT_P, Node
from . import options
from .arrays import give_back, kind_of, to_tensor
from .data import from_array, from_number, from_python
from .engine import weighted_sum
from .frame import Frame, Numbers, Symbol, merge
from .methods import VectorMethods
from .nodes import swapped, variable, weighted
from .operators import Operators
from .reductions import ReductionMethods, execute
from .views import Late

Tensor = torch.Tensor


_J = (CAT_J,)


def _complex(x: Any) -> bool:
    """Whether an array is one of complex numbers."""
    return x.dtype.is_complex if isinstance(x, Tensor) else x.dtype.kind == "c"


class LazyTensor(Operators, VectorMethods, ReductionMethods):
    """Arrays of vectors for all pairs (i, j), as a formula of small arrays.

    Args:
        x: a torch tensor, NumPy array or CuPy array of shape (..., M, 1, D) for vectors of rows, (..., 1, N, D) for
            vectors of columns, (..., 1, 1, D) or (D,) for a parameter, (M, D) or (N, D) together with ``axis``; a
            number or a list of numbers, which are parameters; or (ind, dim, cat), a symbolic variable whose data a
            call will bring.
        axis: 0 (i) or 1 (j) for a 2D array; 2 for a parameter.
    """

    __slots__ = ("formula", "frame")
    formula: Node
    frame: Frame

    is_complex = False
    #: What makes another expression of a formula and its frame. (``torch.compile`` does not follow ``type(self)``
    #: everywhere, and a method would cost more than the look-up of the formula.)
    _new: ClassVar[type[LazyTensor]]
    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., Any]: ...  # methods made from the tables

    def __init__(self, x: Any, axis: Any = None) -> None:
        if axis.__class__ is Frame:  # from within: x is a formula, and these are its data
            self.formula, self.frame = x, axis
        elif isinstance(x, Tensor) and not x.dtype.is_complex:
            self.formula, self.frame = from_array(x, axis)
        elif kind_of(x) is not None:
            if _complex(x):
                self._become_complex(x, axis)
            else:
                self.formula, self.frame = from_array(x, axis)
        elif isinstance(x, (complex, np.complexfloating)) or (isinstance(x, list) and complex in map(type, x)):
            self._become_complex(x, axis)
        elif isinstance(x, LazyTensor) and axis is None:
            self.formula, self.frame, self.__class__ = x.formula, x.frame, x.__class__
        else:
            self.formula, self.frame = from_python(x, axis)

    def _become_complex(self, x: Any, axis: Any) -> None:
        from .complex import as_complex

        whole = as_complex(x, axis)
        self.formula, self.frame = whole.formula, whole.frame
        self.__class__ = type(whole)

    @staticmethod
    def _lift(x: Any, name: str) -> LazyTensor:
        """An operand as a ``LazyTensor``; ``name`` is whose operand it is."""
        kind = type(x)
        if kind is LazyTensor or isinstance(x, LazyTensor):
            return x
        if kind is float or kind is int:
            return LazyTensor(*from_number(x))
        if kind is np.ndarray and x.ndim == 0:
            x = x[()]
        try:
            return LazyTensor(x)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}: operand {error}") from None

    # --- what it is -----------------------------------------------------------------------------------------------
    @property
    def _shape(self) -> tuple[int, ...]:
        f = self.frame
        return (*f.batch, 1 if f.m is None else f.m, 1 if f.n is None else f.n, self.formula.dim)

    @property
    def shape(self) -> tuple[int, ...]:
        """(..., M, N, D), without the last where D = 1."""
        shape = self._shape
        return shape[:-1] if shape[-1] == 1 else shape

    def dim(self) -> int:
        """The number of axes, the vector's included."""
        return len(self.frame.batch) + 3

    @property
    def ndim(self) -> int:
        """The dimension D of the vectors (pykeops' meaning of the name)."""
        return self.formula.dim

    @property
    def dtype(self) -> str | None:
        """Name of the data's dtype; None if there are no data yet."""
        return None if self.frame.space is None else self.frame.space.dtype_name

    @property
    def device(self) -> torch.device | None:
        return None if self.frame.space is None else self.frame.space.device

    @property
    def nbatchdims(self) -> int:
        return len(self.frame.batch)

    @property
    def batchdims(self) -> tuple[int, ...] | None:
        return self.frame.batch or None

    @property
    def ni(self) -> int | None:
        return self.frame.m

    @property
    def nj(self) -> int | None:
        return self.frame.n

    @property
    def axis(self) -> int | None:
        """0, 1 or 2 for a variable of rows, of columns or a parameter; None for an expression."""
        return min(self.formula.params[0], CAT_P) if self.formula.is_var else None  # type: ignore[type-var,return-value]

    @property
    def variables(self) -> tuple[Any, ...]:
        """The data, in the order of the formula's variables."""
        kind = self.frame.space.kind if self.frame.space else "torch"
        return tuple(give_back(t, kind) if isinstance(t, Tensor) else t for t in self.frame.tensors)

    @property
    def symbolic_variables(self) -> tuple[tuple[int, int, int], ...]:
        """(ind, dim, cat) of the variables whose data the call will bring."""
        pairs = zip(self.frame.tensors, self.frame.cats)
        return tuple((t.ind, t.dim, c) for t, c in pairs if isinstance(t, Symbol))

    @property
    def backend(self) -> str | None:
        """Back end of the reductions of this and of what is made of it; None is the choice by device."""
        return self.frame.backend

    @backend.setter
    def backend(self, name: str | None) -> None:
        self.frame = self.frame.replace(backend=None if name is None else options.known_backend(name))

    @property
    def ranges(self) -> None:
        """Block-sparsity pattern of pykeops: not available yet."""
        return None

    @ranges.setter
    def ranges(self, ranges: Any) -> None:
        if ranges is not None:
            options.no_ranges()

    def __repr__(self) -> str:
        frame = self.frame
        lines = [f"LazyTensor of shape {self.shape}", f"    formula: {resolve(self.formula)}"]
        for k, (t, cat) in enumerate(zip(frame.tensors, frame.cats)):
            what = f"of shape {tuple(t.shape)}" if isinstance(t, Tensor) else _in_words(t)
            lines.append(f"    {('Vi', 'Vj', 'Pm', 'Scalar')[cat]}({k}): {what}")
        if frame.space is not None:
            lines.append(f"    {frame.space.kind}, {frame.space.dtype_name}, {frame.space.device}")
        return "\n".join(lines)

    __iter__ = None  # else Python would try x[0], x[1], ...

    def __reduce__(self) -> tuple:
        return LazyTensor, (resolve(self.formula), self.frame)

    def __copy__(self) -> LazyTensor:
        return LazyTensor(self.formula, self.frame)

    def __deepcopy__(self, memo: dict) -> LazyTensor:
        """Data are copied, except tensors in the middle of an autograd graph, which torch cannot copy."""

        def copied(value: Any) -> Any:
            if isinstance(value, Late):
                return Late(copied(value.tensor), *value.steps)
            return value if isinstance(value, Tensor) and not value.is_leaf else copy.deepcopy(value, memo)

        return LazyTensor(self.formula, self.frame.replace(given=tuple(map(copied, self.frame.given))))

    def __call__(self, *args: Any, **settings: Any) -> Any:
        """An error: what can be called is a reduction with symbolic variables or ``call=False``."""
        raise ValueError("a LazyTensor can be called after a reduction only, as in K.sum(axis=1, call=False)()")

    # --- as a matrix ----------------------------------------------------------------------------------------------
    def t(self) -> LazyTensor:
        """The same with i and j exchanged."""
        return LazyTensor(swapped(self.formula), self.frame.swapped())

    @property
    def T(self) -> LazyTensor:
        return self.t()

    def _columns(self, v: Any, name: str) -> tuple[LazyTensor, bool]:
        """The vectors that this matrix is applied to, as a j-variable, and whether it was one vector of shape (N,)."""
        right, vector = self._right_side(v, name)
        return LazyTensor(variable(CAT_J, right.given[0].shape[-1]), right), vector

    def _right_side(self, v: Any, name: str) -> tuple[Frame, bool]:
        """The same as the data of a j-variable."""
        tensor, space = to_tensor(v, "v")
        shape = tensor.shape
        vector = len(shape) == 1
        if vector:
            tensor = tensor.unsqueeze(-1)
            shape = tensor.shape
        frame = self.frame
        n = 1 if frame.n is None else frame.n
        if self.formula.dim != 1 or len(shape) < 2 or (shape[-2] != n and not frame.loose) or shape[-1] == 0:
            raise _no_product(self, name, tensor, vector)
        batch = () if len(shape) == 2 else tuple(shape[:-2])
        return Frame((tensor,), _J, None, shape[-2], batch, space), vector

    def __matmul__(self, v: Any, **settings: Any) -> Any:
        """The product with a vector (N,) or with vectors (..., N, E), an array of shape (..., M) or (..., M, E)."""
        if v.dtype.is_complex if isinstance(v, Tensor) else kind_of(v) is not None and _complex(v):
            return self.real2complex().__matmul__(v, **settings)
        right, vector = self._right_side(v, "K @ v")
        frame, numbers = merge(self.frame, right, "Mul")
        dim, number = right.given[0].shape[-1], 0 if numbers is None else numbers[0]
        if settings or frame.loose:
            out = LazyTensor(weighted(self.formula, dim, number), frame)._reduce("Sum", 1, None, 0, settings)
        else:
            out = execute(weighted_sum(self.formula, dim, number, len(frame.given)), frame, frame.backend)
        return out[..., 0] if vector else out

    def __rmatmul__(self, v: Any) -> Any:
        raise TypeError("v @ K is not defined for a LazyTensor K; write K.T @ v")

    def matvec(self, v: Any) -> Any:
        """``K @ v``, by the name that SciPy's linear operators use."""
        return self @ v

    def rmatvec(self, v: Any) -> Any:
        """``K.T @ v``."""
        return self.t() @ v

    def solve(self, other: Any, var: Any = None, call: bool = True, **settings: Any) -> Any:
        """Solve ``sum over j of self * a = other`` for a by conjugate gradients; options as of :class:`KernelSolve`."""
        from .solve import solve

        return solve(self, other, var, call, **settings)

    def explain(self, *args: Any, **settings: Any) -> Any:
        """How a reduction of this runs, and why: :func:`kernops.explain` of this."""
        from .explaining import explain

        return explain(self, *args, **settings)

    # --- pieces of the vector ---------------------------------------------------------------------------------------
    def __getitem__(self, key: Any) -> LazyTensor:
        """A component ``x[k]`` or a range of components ``x[k:l]``; full slices or ``...`` may stand before it."""
        if isinstance(key, tuple):
            head = key[:-1]
            full = (slice(None),) * (self.dim() - 1)
            if not key or (head != full and head != (Ellipsis,)):
                raise ValueError(
                    f"only the last axis, that of the vector, can be indexed; got {key} for shape {self._shape}"
                )
            key = key[-1]
        size = self.formula.dim
        if isinstance(key, slice):
            start, stop, step = key.indices(size)
            if step != 1 or stop <= start:
                raise ValueError(f"a slice of the vector needs step 1 and at least one of {size} components; got {key}")
            return self.extract(start, stop - start)
        return self.elem(key)


LazyTensor._new = LazyTensor


def _no_product(k: LazyTensor, name: str, v: Tensor, vector: bool) -> ValueError:
    got = tuple(v.shape[:1] if vector else v.shape)
    if k.formula.dim != 1:
        return ValueError(
            f"{name}: K must be scalar for each pair (i, j); it has {k.formula.dim} components, shape {k.shape}"
        )
    if v.shape[-1] == 0:
        return ValueError(f"{name}: v must have at least one column; got shape {got}")
    return ValueError(
        f"{name}: v must have shape (N,) or (..., N, E) with N = {k._shape[-2]}, as K has columns; got {got}"
    )


def _in_words(t: Any) -> str:
    return f"argument {t.ind} of the call" if isinstance(t, Symbol) else repr(list(t) if isinstance(t, Numbers) else t)


# --- constructors by category ---------------------------------------------------------------------------------------
def Var(x_or_ind: Any, dim: int | None = None, cat: int | None = None) -> LazyTensor:
    """An array as a variable of category ``cat``, or the symbolic variable (ind, dim, cat)."""
    return LazyTensor(x_or_ind, cat) if dim is None else LazyTensor((x_or_ind, dim, cat))


def Vi(x_or_ind: Any, dim: int | None = None) -> LazyTensor:
    """Vectors of rows: ``Vi(x)`` for an array (M, D), ``Vi(ind, dim)`` for the argument ``ind`` of a later call."""
    return Var(x_or_ind, dim, CAT_I)


def Vj(x_or_ind: Any, dim: int | None = None) -> LazyTensor:
    """Vectors of columns: ``Vj(x)`` for an array (N, D), ``Vj(ind, dim)`` for the argument ``ind`` of a later call."""
    return Var(x_or_ind, dim, CAT_J)


def Pm(x_or_ind: Any, dim: int | None = None) -> LazyTensor:
    """A parameter: ``Pm(x)`` for an array (D,) or numbers, ``Pm(ind, dim)`` for argument ``ind`` of a later call."""
    return Var(x_or_ind, dim, CAT_P)
