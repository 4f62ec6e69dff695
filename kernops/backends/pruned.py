"""Nearest neighbours in few dimensions on a CPU without a look at all pairs: host C++, compiled at first use.

``host/pruned.h`` has the algorithm, for squared Euclidean distances. It gives what comparing all pairs gives, bit for
bit, with any number of threads.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from itertools import product

import torch

from ..codegen.search import MOST_FEATURES, MOST_POINTS
from . import cpu
from .layout import broadcast

Tensor = torch.Tensor
#: number type, features, neighbours
Key = tuple[torch.dtype, int, int]

_TYPES = {torch.float32: "float", torch.float64: "double"}
#: The words of a ``PrunedCall`` of host/pruned.h, and what the function returns.
_WORDS = struct.Struct("11qd")
_DONE, _NO_MEMORY, _GAVE_UP = range(3)
_functions: dict[Key, Callable[[bytes], int]] = {}


def limits(x: Tensor, y: Tensor) -> str | None:
    """None where :func:`nearest` takes the tensors, else the reason why not."""
    if not 1 <= x.shape[-1] <= MOST_FEATURES:
        return f"is for 1 to {MOST_FEATURES} features; got {x.shape[-1]}"
    most = max(x.shape[-2], y.shape[-2])
    return f"is for at most {MOST_POINTS} queries or points; got {most}" if most > MOST_POINTS else None


def nearest(x: Tensor, y: Tensor, k: int, worth: float = 1.0) -> tuple[Tensor, Tensor] | None:
    """The ``k`` nearest rows of ``y`` for every row of ``x``, as ``KMin`` of ``SqDist`` gives them.

    Args:
        x, y: (*B, M, D) and (*B, N, D), float32 or float64, with any strides; batch shapes broadcast.
        k: how many, at most N.
        worth: a share of all pairs. The search is given up where a sample of the queries takes more work than that.

    Returns:
        Squared distances and indices, (*B, M, k) each; or ``None`` where it was given up.

    Raises:
        MemoryError: what it keeps while it runs, O(M + N), cannot be had.
    """
    batch = broadcast([tuple(x.shape[:-2]), tuple(y.shape[:-2])])
    x, y = (t.expand(*batch, *t.shape[-2:]) for t in (x, y))
    values = x.new_empty((*batch, x.shape[-2], k))
    index = torch.empty(values.shape, dtype=torch.int64)
    key = (x.dtype, x.shape[-1], k)
    function = _functions.get(key) or _function(key)
    for place in product(*map(range, batch)):
        status = function(_WORDS.pack(*_matrix(x[place]), *_matrix(y[place]), values[place].data_ptr(),
                                      index[place].data_ptr(), cpu.threads(), worth))  # fmt: skip
        if status == _GAVE_UP:
            return None
        if status != _DONE:
            raise MemoryError(f"not enough memory to put {x.shape[-2]} queries and {y.shape[-2]} points in order")
    return values, index


def _matrix(t: Tensor) -> tuple[int, ...]:
    """The words of a ``Matrix`` of host/tree.h."""
    return t.data_ptr(), len(t), *t.stride()


def source(key: Key) -> str:
    """The translation unit for a number type, a number of features and a number of neighbours."""
    dtype, dim, k = key
    kind = _TYPES[dtype]
    return (
        '#include "host/pruned.h"\n'
        f'extern "C" __attribute__((visibility("default"))) int kernops_nearest(const kn::PrunedCall<{kind}>* call) '
        f"{{ return kn::Pruned<{kind}, {dim}, {k}>::run(*call); }}\n"
    )


def _function(key: Key) -> Callable[[bytes], int]:
    with cpu.building(("nearest", key)):
        if key not in _functions:
            described = f"the {key[2]} nearest in {key[1]} dimensions, pruned, {_TYPES[key[0]]}"
            function = cpu.library(source(key), described).kernops_nearest
            function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_int
            _functions[key] = function
        return _functions[key]
