"""``explain``: how a reduction of a ``LazyTensor`` or of a formula string runs, and why."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..backends import BACKENDS
from ..backends.explained import Explanation, Problem, explain_plan
from ..formula.reductions import REDUCTIONS
from . import options
from .engine import COMPOSED, Request
from .frame import Frame
from .genred import Genred
from .nodes import whole
from .operators import operate
from .reductions import J_AXIS, Reduced
from .tensor import LazyTensor


def explain(
    what: Any,
    *args: Any,
    reduction: str = "sum",
    axis: int | None = None,
    K: int | None = None,
    weight: Any = None,
    shape: tuple[int, int] | None = None,
    dtype: torch.dtype | str | None = None,
    device: Any = None,
    backend: str | None = None,
    compile: bool = True,
) -> Explanation:
    """How a reduction runs here, or would run on another GPU: nothing is computed, nothing is printed.

    The result's text (``print(explain(...))``) has the formula, what of it is computed once per row and once per
    column, the back end, the kernel template, its tile, rows and columns of a thread, splits, blocks and shared memory,
    registers and spills of the compiled kernels (CUDA), the least time by a model of the machine and the unit that
    bounds it, and the reasons of the choices. Its attributes hold the same for programs.

    Args:
        what: a ``LazyTensor``; a ``Genred``; or a reduction that waits for its call, ``K.sum(axis=1, call=False)``.
        args: the arrays that a call would be given. For a ``LazyTensor``, an array v stands for ``K @ v``.
        reduction: for a ``LazyTensor``, a method's name or a name of ``Genred``'s table.
        axis: for a ``LazyTensor``, the axis to reduce as its methods count them; over j if omitted.
        K: of the reductions that keep the K smallest or largest.
        weight: of the reductions that have one.
        shape: (M, N) instead of arrays, where the data are symbolic.
        dtype: instead of the data's.
        device: instead of the data's: a torch device, or the architecture of a GPU that need not be there, ``"sm_90"``.
        backend: as in a call.
        compile: whether to compile CUDA kernels for their registers; it takes about a second.

    Raises:
        TypeError: ``what`` is no reduction, or a size is no whole number.
        ValueError: sizes are missing, or the arguments do not fit.
        RuntimeError: the back end cannot run here.

    Example:
        >>> K = (-Vi(x).sqdist(Vj(y))).exp()
        >>> print(explain(K, b))  # of K @ b
        >>> print(explain(K, reduction="logsumexp", device="sm_90"))
    """
    if isinstance(what, LazyTensor):
        what, args = _reduced(what, args, reduction, axis, K, weight), ()
    elif not isinstance(what, (Genred, Reduced)):
        raise TypeError(f"what: expected a LazyTensor, a Genred or a reduction; got {type(what).__name__}")
    request, frame = _parts(what, args)
    if not isinstance(request, Request):
        raise ValueError("this reduction is made of others, which torch puts together; explain those, as 'sum'")
    m, n = _sizes(request, frame, shape)
    space = frame.space
    own = torch.device("cpu") if space is None else space.device
    where = own if device is None else _device(device)
    number = _number(dtype if dtype is not None else torch.float32 if space is None else space.dtype_name)
    named = backend if backend is not None else frame.backend
    name = "auto" if named in (None, "auto") else named
    if isinstance(where, torch.device):
        name = options.backend_for(name, where)
    return explain_plan(Problem(request.plan, m, n, math.prod(frame.batch), number, where, compile), name)  # type: ignore[arg-type]


def _reduced(lazy: LazyTensor, args: tuple, reduction: str, axis: int | None, k: int | None, weight: Any) -> Reduced:
    """The reduction of a ``LazyTensor`` before its call."""
    if args:
        if len(args) > 1 or reduction != "sum":
            raise ValueError(f"args: a LazyTensor K takes one array v, for K @ v; got {len(args)} and {reduction!r}")
        lazy = operate("Mul", lazy, lazy._columns(args[0], "K @ v")[0])
    own = J_AXIS if axis is None else lazy._axis("explain", axis, None, False)
    lifted = None if weight is None else lazy._weight(weight, "explain")
    name = _NAMES.get(reduction.lower(), reduction)
    count = 0 if k is None else whole("explain", "K", k)
    return lazy._reduce(name, own, lifted, count, {"call": False})  # type: ignore[no-any-return]


def _parts(what: Genred | Reduced, args: tuple) -> tuple[Any, Frame]:
    """The request, and the data with which it would be called; as they are where none are given."""
    request, bind = (what._request, what._bind) if isinstance(what, Genred) else (what.request, what.bind)
    frame = bind.frame if bind.count and not args else bind(args)
    return request, frame


def _device(device: Any) -> torch.device | str:
    """A device that torch knows and a back end computes on, or the name of an architecture."""
    if isinstance(device, str) and device.lower().startswith("sm_"):
        return device.lower()
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        found = None
    if found is None or all(found.type not in types for types in BACKENDS.values()):
        raise ValueError(f"device: expected a torch device or an architecture such as 'sm_90'; got {device!r}")
    return found


def _number(dtype: Any) -> torch.dtype:
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if found not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(f"dtype: expected float16, bfloat16, float32 or float64; got {dtype!r}")
    return found  # type: ignore[no-any-return]


def _sizes(request: Request, frame: Frame, shape: tuple[int, int] | None) -> tuple[int, int]:
    """Rows of the result, and terms of each."""
    if shape is not None:
        if not isinstance(shape, (tuple, list)) or len(shape) != 2:
            raise ValueError(f"shape: expected (M, N); got {shape!r}")
        m, n = (whole("explain", "shape", size) for size in shape)
        if min(m, n) < 1:
            raise ValueError(f"shape: expected at least one row and one column; got {shape!r}")
        return (n, m) if request.over_i else (m, n)
    if frame.loose and frame.m is None and frame.n is None:
        raise ValueError("shape: the data are symbolic; give their arrays, or shape=(M, N)")
    return request.rows(frame)


#: Method's name in small letters -> name of the reduction.
_NAMES = {
    **{name.lower(): name for name in COMPOSED},
    **{method.lower(): row.name for row in REDUCTIONS.values() for method in row.methods},
}
