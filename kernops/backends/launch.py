"""A prepared call of the CUDA back end: its kernels, what they are given, and how they are started."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import torch

from ..codegen.instantiate import ITEM_THREADS
from ..codegen.schedule import MAX_GRID
from ..formula.graph import CAT_P, CAT_SCALAR
from . import driver
from .layout import pair_steps

Tensor = torch.Tensor
Input = Tensor | float | None

#: The short ways of torch's own compiler: they skip wrappers that cost more than the rest of a call.
stream_of = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream)
_empty_strided = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None) if torch.version.cuda else None


def empty(shape: tuple[int, ...], steps: tuple[int, ...], dtype: torch.dtype, index: int) -> Tensor:
    """Memory for a contiguous tensor, whose strides are ``steps``, on the current device, whose number is ``index``."""
    if _empty_strided is None:
        return torch.empty(shape, dtype=dtype, device=index)
    return _empty_strided(shape, steps, dtype)  # type: ignore[no-any-return]


_ONE = (1,)


def _bytes(count: int, index: int) -> Tensor:
    return empty((count,), _ONE, torch.uint8, index)


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    steps, step = [], 1
    for size in reversed(shape):
        steps.append(step)
        step *= max(1, size)
    return tuple(reversed(steps))


#: Of an ``Arguments`` after the batch sizes: m, n, row_blocks, splits, span, and two reciprocals.
OWN_SIZES = 7
RANGE, _ADDRESSES = struct.Struct("=qq"), struct.Struct("=7Qq")


def pieces_of(blocks: int) -> tuple[tuple[int, int], ...]:
    """``(first block, blocks)`` of the launches that so many blocks take."""
    return tuple((first, min(MAX_GRID, blocks - first)) for first in range(0, blocks, MAX_GRID))


@dataclass(frozen=True)
class Kernel:
    """One kernel of a call.

    Attributes:
        function: the driver's handle.
        threads, shared: threads of a block, bytes of dynamic shared memory.
        total: number of its work items, for the kernels that are not ``reduce``.
        pieces: ``(first block, blocks)`` of each launch.
    """

    function: int
    threads: int
    shared: int
    total: int
    pieces: tuple[tuple[int, int], ...]

    def starts(self) -> list[tuple[int, int, int, int, bytes]]:
        """What ``driver.launch`` is told for each piece, and the part of the arguments that says which one it is."""
        return [
            (self.function, blocks, self.threads, self.shared, RANGE.pack(first, self.total))
            for first, blocks in self.pieces
        ]


@dataclass(frozen=True)
class Launch:
    """Everything about a call but the addresses and strides of its tensors.

    Attributes:
        dtype, index: of the call; number of the device.
        variables: ``(number, category, place in plan.variables)`` of each variable number; -1 for the last two if the
            formula does not have it.
        sizes: batch sizes as the kernels see them, rows, columns, how they are cut, reciprocals.
        layout: packs variables (address or number, strides) and sizes.
        kernels: in order.
        shape, second: shapes after the batch dimensions of the results; ``second`` with its dtype, or None.
        scratch, offsets: bytes of scratch; where its four buffers begin.
        survey, survey_step: bytes of the survey of all and of one batch element, if there is one (``cuda/halves.cuh``).
        first: the launch on matrix units that is tried first, or None. It leaves a survey, and the batch elements that
            it cannot compute, to this one, whose blocks return at once for the others: nothing waits for the GPU.
    """

    dtype: torch.dtype
    index: int
    variables: tuple[tuple[int, int, int], ...]
    sizes: tuple[int, ...]
    layout: struct.Struct
    kernels: tuple[Kernel, ...]
    shape: tuple[int, ...]
    second: tuple[tuple[int, ...], torch.dtype] | None
    scratch: int
    offsets: tuple[int, ...]
    survey: int = 0
    survey_step: int = 0
    first: Launch | None = None

    @cached_property
    def starts(self) -> list[tuple[int, int, int, int, bytes]]:
        """The launches, in order."""
        return [start for k in self.kernels for start in k.starts()]

    @cached_property
    def results_of(self) -> list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]:
        """Shape, strides and dtype of each result, without batch dimensions."""
        results = [(self.shape, self.dtype), *([] if self.second is None else [self.second])]
        return [(shape, _contiguous(shape), dtype) for shape, dtype in results]

    def __call__(self, tensors: Sequence[Input], steps: list | None, batch: tuple[int, ...]) -> tuple[Tensor, ...]:
        """``steps`` are the strides of ``plan.variables``, or None without batch dimensions."""
        results = self.results(batch)
        words = self._words(tensors, steps)
        if self.first is None:
            self.submit(words, results)
            return results
        survey = _bytes(self.first.survey, self.index)
        self.first.submit(words, results, survey.data_ptr())
        self.submit(words, results, survey.data_ptr())
        return results

    def submit(self, words: Sequence[float], results: tuple[Tensor, ...], survey: int = 0) -> None:
        """Launch the kernels for tensors of these addresses and strides, with scratch of their own.

        Scratch is given back to the allocator on return: later work on this stream may use it, no other.
        """
        base = 0
        if self.scratch:
            scratch = _bytes(self.scratch, self.index)
            base = scratch.data_ptr()
        self.start(self.layout.pack(*words, *self.sizes), self.tail(results, base, survey))

    def results(self, batch: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Empty results."""
        if batch:
            whole = [((*batch, *shape), dtype) for shape, _, dtype in self.results_of]
            return tuple([empty(shape, _contiguous(shape), dtype, self.index) for shape, dtype in whole])
        index = self.index
        return tuple([empty(shape, steps, dtype, index) for shape, steps, dtype in self.results_of])

    def head(self, tensors: Sequence[Input], steps: list | None) -> bytes:
        """The arguments' variables and sizes."""
        return self.layout.pack(*self._words(tensors, steps), *self.sizes)

    def tail(self, results: tuple[Tensor, ...], base: int, survey: int = 0) -> bytes:
        """The arguments' addresses; scratch begins at ``base``, and the survey, if there is one, at ``survey``."""
        a, b, c, d = self.offsets
        return _ADDRESSES.pack(
            results[0].data_ptr(), results[-1].data_ptr(), base + a, base + b, base + c, base + d, survey,
            self.survey_step,
        )  # fmt: skip

    def start(self, head: bytes, tail: bytes) -> None:
        """Launch the kernels."""
        index = self.index
        stream = stream_of(index)
        for function, blocks, threads, shared, which in self.starts:
            driver.launch(index, function, blocks, threads, shared, stream, head + which + tail)

    def _words(self, tensors: Sequence, steps: list | None) -> list[float]:
        words: list[float] = []
        none = (0,) * (len(self.sizes) - OWN_SIZES + 2)
        for number, cat, place in self.variables:
            if place < 0:
                words += (0, *none)
            elif cat == CAT_SCALAR:
                words += (tensors[number], *none)
            elif steps is not None:
                words += (tensors[number].data_ptr(), *steps[place])
            elif cat == CAT_P:
                words += (tensors[number].data_ptr(), 0, 0, *tensors[number].stride())
            else:
                t = tensors[number]
                step = t.stride()
                words += (t.data_ptr(), 0, *(step if len(step) == 2 else pair_steps(t)))
        return words


def reciprocal(divisor: int) -> int:
    """What ``BlockNumber::quotient`` (cuda/data.cuh) divides by a number with, as the bits of a signed one; 0 for 1."""
    whole = 0 if divisor == 1 else (1 << 64) // divisor + 1
    return whole - (1 << 64 if whole >> 63 else 0)


def item_kernel(function: int, total: int, each: int | Fraction) -> Kernel:
    """A kernel with ``each`` threads for each of ``total`` work items."""
    blocks = math.ceil(Fraction(total) * each / ITEM_THREADS)
    return Kernel(function, ITEM_THREADS, 0, total, pieces_of(blocks))


def assemble(
    key: tuple, sizes: tuple[int, ...], kernels: tuple[Kernel, ...], scratch: tuple[int, ...], survey: int, step: int,
    first: Launch | None = None,
) -> Launch:  # fmt: skip
    """A launch from its parts; ``scratch`` are its buffers' bytes, ``sizes`` end with row blocks, splits and span."""
    sizes = (*sizes, reciprocal(sizes[-3]), reciprocal(sizes[-2]))
    plan, dtype, index, m, _, batch_sizes = key
    place = {v.params[1]: (v.params[0], k) for k, v in enumerate(plan.variables)}
    variables = tuple((k, *place.get(k, (-1, -1))) for k in range(max(1, plan.n_vars)))
    fields = "".join(("d" if cat == CAT_SCALAR else "Q") + "q" * (len(batch_sizes) + 2) for _, cat, _ in variables)
    offsets, end = [], 0
    for size in scratch:
        offsets.append(end)
        end += -(-size // 256) * 256
    (_, dim), *others = plan.outputs
    shape, second = ((m, plan.k, dim) if plan.k else (m, dim)), None
    for name, dim in others:
        second = ((m, plan.k, dim) if plan.k else (m, dim)), torch.int64 if name == "index" else dtype
    return Launch(
        dtype, index, variables, sizes, struct.Struct("=" + fields + "q" * len(sizes)), kernels, shape,
        second, end, tuple(offsets), survey, step, first,
    )  # fmt: skip
