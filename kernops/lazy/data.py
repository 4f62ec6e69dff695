"""What an array, a number or a list of numbers is as a variable: by its shape, and by what the caller says."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np
import torch

from ..autograd.tracing import is_dynamo_compiling
from ..formula.graph import CAT_I, CAT_J, CAT_P, CAT_SCALAR, Node
from .arrays import ARRAYS, Space, to_tensor
from .frame import EMPTY, PAIRS, VIEWS, Frame, Numbers, symbol
from .nodes import SCALAR, constant, variable
from .views import Late, View, flat, vectors, without_columns, without_rows

Tensor = torch.Tensor

_variables = variable.known  # type: ignore[attr-defined]
_I, _J, _P, _SCALAR = (CAT_I,), (CAT_J,), (CAT_P,), (CAT_SCALAR,)


def from_array(x: Any, axis: int | None) -> tuple[Node, Frame]:
    """The variable that an array is, by its shape and ``axis``."""
    tensor, space = to_tensor(x, "x")
    shape = tensor.shape
    rank = len(shape)
    if rank and shape[-1] == 0:
        raise ValueError(f"x: vectors need at least one component; got shape {tuple(shape)}")
    if rank >= 3:
        if axis is None:
            return _from_shape(tensor, space, shape)
        raise ValueError(f"axis is for 2D arrays; an array of shape {tuple(shape)} says by its shape what it is")
    if rank == 2 and axis in (0, 1):
        rows = shape[0]
        if axis == 0:
            return variable(CAT_I, shape[1]), Frame((tensor,), _I, rows, None, (), space)
        return variable(CAT_J, shape[1]), Frame((tensor,), _J, None, rows, (), space)
    if rank == 2 and axis == 2:
        if shape[0] != 1:
            raise ValueError(
                f"x: a parameter has one vector for all rows, of shape (D,) or (..., 1, 1, D); got {tuple(shape)}. "
                "Data with a row for each i or j are variables, axis 0 or 1"
            )
    elif rank == 2:
        raise ValueError(f"axis must be 0 (i) or 1 (j) for an array of shape {tuple(shape)}; got {axis!r}")
    elif axis not in (None, 2):
        raise ValueError(f"axis must be None or 2 (parameter) for an array of shape {tuple(shape)}; got {axis!r}")
    node = variable(CAT_P, shape[-1] if rank else 1)
    return node, _viewed(tensor, _P, None, None, (), space, flat) if rank != 1 else Frame((tensor,), _P, space=space)


def _viewed(
    t: Tensor, cats: tuple[int], m: int | None, n: int | None, batch: tuple[int, ...], space: Space, view: View
) -> Frame:
    """The frame of a tensor that is read through a view; traced code makes it at once."""
    if is_dynamo_compiling():
        return Frame((view(t),), cats, m, n, batch, space)
    return Frame((Late(t, view),), cats, m, n, batch, space, None, False, VIEWS)


def _from_shape(tensor: Tensor, space: Space, shape: torch.Size) -> tuple[Node, Frame]:
    """(..., M, 1, D), (..., 1, N, D) or (..., 1, 1, D)."""
    batch: tuple[int, ...] = ()
    if len(shape) > 3:
        batch, shape = tuple(shape[:-3]), shape[-3:]
    rows, columns, dim = shape
    if columns != 1 and rows != 1:
        raise ValueError(
            "x: a 3D or larger array has shape (..., M, 1, D), (..., 1, N, D) or (..., 1, 1, D); "
            f"got {tuple(tensor.shape)}"
        )
    if columns == rows:
        return variable(CAT_P, dim), _viewed(tensor, _P, None, None, batch, space, vectors)
    traced = is_dynamo_compiling()
    if rows != 1:
        node = None if traced else _variables.get((CAT_I, dim))
        if batch or traced:
            frame = _viewed(tensor, _I, rows, None, batch, space, without_columns)
        else:  # kept as it is: a view, and its node in autograd's graph, take long
            frame = Frame((tensor,), _I, rows, None, batch, space, None, False, PAIRS)
        return variable(CAT_I, dim) if node is None else node, frame
    node = None if traced else _variables.get((CAT_J, dim))
    if batch or traced:
        frame = _viewed(tensor, _J, None, columns, batch, space, without_rows)
    else:
        frame = Frame((tensor,), _J, None, columns, batch, space, None, False, PAIRS)
    return variable(CAT_J, dim) if node is None else node, frame


def from_python(x: Any, axis: int | None) -> tuple[Node, Frame]:
    """A number, a list of numbers, or (ind, dim, cat)."""
    if isinstance(x, tuple):
        if len(x) != 3 or not all(isinstance(n, int) and not isinstance(n, bool) for n in x) or axis is not None:
            raise ValueError(
                f"x as a tuple is (ind, dim, cat), three whole numbers, without axis; got {x!r}, axis {axis!r}"
            )
        ind, dim, cat = x
        if cat not in (CAT_I, CAT_J, CAT_P) or ind < 0:
            raise ValueError(f"x = (ind, dim, cat) needs ind >= 0 and cat 0 (i), 1 (j) or 2 (parameter); got {x!r}")
        return variable(cat, dim), Frame((symbol(ind, dim),), (cat,), loose=True)
    if axis not in (None, 2):
        raise ValueError(f"axis must be None or 2 (parameter) for numbers; got {axis!r}")
    if isinstance(x, list):
        if not x:
            raise ValueError("x: a parameter needs at least one number; got an empty list")
        values = Numbers(_number(v, "x") for v in x)
        return variable(CAT_P, len(values)), Frame((values,), _P, loose=True)
    return from_number(_number(x, "x"))


def _number(x: Any, name: str) -> float:
    """A real number of Python or NumPy as it is; anything else is an error."""
    if isinstance(x, (bool, np.bool_)) or not isinstance(x, (numbers.Real, np.integer, np.floating)):
        raise TypeError(
            f"{name} must be a LazyTensor, {ARRAYS}, a real number or a list of numbers; got {type(x).__name__}"
        )
    return x if isinstance(x, (int, float)) else float(x)


def from_number(x: float) -> tuple[Node, Frame]:
    node = constant(x)
    return (SCALAR, Frame((float(x),), _SCALAR)) if node is None else (node, EMPTY)
