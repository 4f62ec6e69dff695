"""Nearest neighbours in few dimensions on a GPU without a look at all pairs (``cuda/search.cuh`` has the algorithm).

A call makes keys of the points, sorts them with torch, makes boxes and searches them: eight launches or so, and none is
waited for. Unless pruning is demanded, a trial on the device decides whether the search or the kernels of brute force
do the work. It gives what comparing all pairs gives, bit for bit.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..codegen import searching as source
from ..codegen.instantiate import compiled, kernels, main_kernel
from ..codegen.schedule import Schedule
from ..codegen.search import MOST_NEIGHBOURS_ON_GPU, pruning_pays_on_gpu
from ..codegen.searching import Searching, Step, searching
from . import cuda, driver
from .launch import RANGE, Launch, pieces_of, stream_of
from .layout import compact
from .searches import checked_points

Tensor = torch.Tensor
Input = Tensor | float | None

_KEYS = {4: torch.int32, 8: torch.int64}
#: What follows the Arguments in a SearchArguments of cuda/boxes.cuh.
_REST = struct.Struct("=9Q5qQq")


def wanted(key: tuple) -> Searching | None:
    """The search that a call shall run, or None for brute force alone.

    Raises:
        ValueError: the plan demands to be pruned, and cannot be.
    """
    plan, _, _, m, n, sizes = key
    demanded, k, batch = plan.algorithm == "pruned", plan.k or 1, math.prod(sizes)
    if demanded:
        checked_points(plan, m, n)
        if k > MOST_NEIGHBOURS_ON_GPU:
            raise ValueError(f"algorithm 'pruned' is for at most {MOST_NEIGHBOURS_ON_GPU} neighbours on a GPU; got {k}")
    elif plan.core not in ("KMin", "MinArgMin") or plan.algorithm == "brute" or plan.points is None:
        return None
    dim = plan.variables[0].dim
    if not (demanded or pruning_pays_on_gpu(m, n, batch, dim, k)):
        return None
    return searching(k, dim, m, n, batch, not demanded)


def prepare(key: tuple, brute: Schedule, s: Searching) -> Search:
    """What is made once for all calls of the same sizes."""
    plan, dtype, index, m, n, sizes = key
    text = source.source(plan, brute, s, dtype.itemsize, len(sizes))
    steps = (*source.before_sort(s, m, n), *source.after_sort(s))
    names = (*(step.name for step in steps), *(compiled(brute) if s.trial else ()))
    shared = {main_kernel(brute): brute.shared}
    functions = cuda.compiled(text, f"pruned {plan.core} of {plan.formula}", index, shared, names)
    launch = cuda._launch(key, brute, {name: functions[name] for name in kernels(brute)} if s.trial else {})
    offsets, end = [], launch.scratch if s.trial else 0
    for size in source.scratch(s, dtype.itemsize):
        offsets.append(end)
        end += -(-size // 256) * 256
    return Search(launch, s, m, n, plan.points, functions, end, tuple(offsets))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Search:
    """Everything about a call but the addresses and strides of its tensors.

    Attributes:
        launch: of brute force, with its kernels where a trial may lead to it.
        s: the schedule.
        m, n: rows and columns of a batch element.
        points: numbers of the variables of rows and of columns.
        functions: the kernels' handles.
        scratch, offsets: bytes of scratch; where the buffers of the search begin.
    """

    launch: Launch
    s: Searching
    m: int
    n: int
    points: tuple[int, int]
    functions: dict[str, int]
    scratch: int
    offsets: tuple[int, ...]

    def __call__(self, tensors: Sequence[Input], steps: list | None, batch: tuple[int, ...]) -> tuple[Tensor, ...]:
        """``steps`` are the strides of ``plan.variables``, or None without batch dimensions."""
        s, launch, device = self.s, self.launch, self.launch.index
        if steps is None:
            tensors = compact(tensors)
        results = launch.results(batch)
        scratch = torch.empty(self.scratch, dtype=torch.uint8, device=device)
        head, tail = launch.head(tensors, steps), launch.tail(results, scratch.data_ptr())
        own = self._own_rows(tensors)
        sizes = [self.n] if own else [self.n, self.m]
        keys = [torch.empty((s.batch, size), dtype=_KEYS[s.key], device=device) for size in sizes]
        keyed = [k.data_ptr() for k in keys]
        rest = self._rest(scratch.data_ptr(), keyed, [0, 0])
        self._start(source.before_sort(s, 0 if own else self.m, self.n), head, tail + rest)
        orders = [torch.sort(k, dim=-1, stable=True).indices for k in keys]
        rest = self._rest(scratch.data_ptr(), keyed, [o.data_ptr() for o in orders])
        self._start(source.after_sort(s), head, tail + rest)
        if s.trial:
            launch.start(head, tail + rest)
        return results

    def _own_rows(self, tensors: Sequence[Input]) -> bool:
        """Whether the rows are the columns."""
        x, y = (tensors[k] for k in self.points)
        assert isinstance(x, Tensor) and isinstance(y, Tensor)
        return x.data_ptr() == y.data_ptr() and x.shape == y.shape and x.stride() == y.stride()

    def _rest(self, base: int, keys: list[int], orders: list[int]) -> bytes:
        s = self.s
        tables, points, index, corners, lowest, work = (base + at for at in self.offsets)
        return _REST.pack(
            tables, keys[0], keys[-1], orders[0], orders[-1], points, index, corners, lowest, s.batch, s.levels[0],
            sum(s.levels), s.stride, s.most_work, work if s.trial else 0, s.all_work,
        )  # fmt: skip

    def _start(self, steps: list[Step], head: bytes, tail: bytes) -> None:
        stream = stream_of(self.launch.index)
        for step in steps:
            for first, blocks in pieces_of(step.blocks):
                arguments = head + RANGE.pack(first, step.items) + tail
                driver.launch(self.launch.index, self.functions[step.name], blocks, step.threads, 0, stream, arguments)
