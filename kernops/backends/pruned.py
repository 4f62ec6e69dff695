"""Nearest neighbours in few dimensions on a CPU without a look at all pairs: host C++, compiled at first use.

``host/pruned.h`` has the algorithm, for squared Euclidean distances. It gives what comparing all pairs gives, bit for
bit, with any number of threads.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from itertools import product

import torch

from ..codegen.search import pruning_pays, worth
from ..formula.plan import Plan
from . import cpu
from .searches import checked_points

Tensor = torch.Tensor
Outs = tuple[Tensor, ...]
#: number type, features, neighbours
Key = tuple[torch.dtype, int, int]

_TYPES = {torch.float32: "float", torch.float64: "double"}
#: The words of a ``PrunedCall`` of host/pruned.h, and what the function returns.
_WORDS = struct.Struct("11qd")
_DONE, _NO_MEMORY, _GAVE_UP = range(3)
_functions: dict[Key, Callable[[bytes], int]] = {}


def run(plan: Plan, tensors: Sequence[Tensor | float | None], m: int, n: int, batch: tuple[int, ...]) -> Outs | None:
    """The outputs of ``plan``, a ``KMin`` or ``MinArgMin``; ``None`` where comparing all pairs is the better way.

    Raises:
        ValueError: the plan demands to be pruned, and cannot be.
    """
    demanded, k = plan.algorithm == "pruned", plan.k or 1
    pair = checked_points(plan, m, n) if demanded else plan.points
    if pair is None or not (demanded or pruning_pays(m, n, plan.variables[0].dim, k)):
        return None
    dim = plan.variables[0].dim
    x, y = (tensors[v] for v in pair)
    found = nearest(x, y, k, batch, 1.0 if demanded else worth(n, dim, k))  # type: ignore[arg-type]
    return found and (tuple(t.unsqueeze(-1) for t in found) if plan.k else found)


def nearest(
    x: Tensor, y: Tensor, k: int, batch: tuple[int, ...] = (), most: float = 1.0
) -> tuple[Tensor, Tensor] | None:
    """The ``k`` nearest rows of ``y`` for every row of ``x``, as ``KMin`` of ``SqDist`` gives them.

    Args:
        x, y: (*B, M, D) and (*B, N, D), float32 or float64, with any strides.
        k: how many, at most N.
        batch: the batch shape to which those of ``x`` and ``y`` are broadcast.
        most: a share of all pairs. The search is given up where a sample of the queries takes more work than that.

    Returns:
        Squared distances and indices, (*B, M, k) each; or ``None`` where it was given up.

    Raises:
        MemoryError: what it keeps while it runs, O(M + N), cannot be had.
    """
    x, y = (t.expand(*batch, *t.shape[-2:]) for t in (x, y))
    values = x.new_empty((*batch, x.shape[-2], k))
    index = torch.empty(values.shape, dtype=torch.int64)
    key = (x.dtype, x.shape[-1], k)
    function = _functions.get(key) or _function(key)
    for place in product(*map(range, batch)):
        status = function(_WORDS.pack(*_matrix(x[place]), *_matrix(y[place]), values[place].data_ptr(),
                                      index[place].data_ptr(), cpu.threads(), most))  # fmt: skip
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
