"""The CUDA back end: compiled templates, launched on torch's current stream.

A call allocates its results and scratch from torch's caching allocator on that stream, launches one to four kernels and
returns; nothing synchronises, so it can be captured into a CUDA graph. All decisions that depend on sizes only are made
once and kept (:class:`Launch`); a call then costs a few microseconds of Python.
"""

from __future__ import annotations

import math
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from ..codegen import instantiate
from ..codegen.facts import Facts, facts
from ..codegen.schedule import MAX_GRID, Device, Schedule, schedule
from ..formula.graph import CAT_P, CAT_SCALAR
from ..formula.plan import Plan
from ..formula.reductions import CORES
from . import driver, nearest, nvrtc
from .layout import own_axes, strides

Tensor = torch.Tensor
Input = Tensor | float | None

MAX_BATCH_DIMS = 6
OLDEST = (7, 5)  # what NVRTC of CUDA 13 still compiles for
_KEPT = 4096  # launches kept; beyond, all are made anew (their kernels are kept)

_launches: dict[tuple, Launch | nearest.Search] = {}
_kernels: dict[tuple, int] = {}
_building = threading.Lock()
#: The short ways of torch's own compiler: they skip wrappers that cost more than the rest of a call.
_stream = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream)
_current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def available(device: torch.device | str) -> str | None:
    """None if tensors on ``device`` can be reduced here, else the reason."""
    device = torch.device(device)
    if device.type != "cuda":
        return f"the device is {device.type}, not a CUDA GPU"
    if torch.version.cuda is None:
        return "this PyTorch was built without CUDA"
    if not torch.cuda.is_available():
        return "PyTorch finds no usable CUDA GPU"
    return _available(torch.cuda.current_device() if device.index is None else device.index)


@lru_cache(maxsize=64)
def _available(index: int) -> str | None:
    capability = torch.cuda.get_device_capability(index)
    if capability < OLDEST:
        return f"the GPU's compute capability is {capability[0]}.{capability[1]}; 7.5 is the oldest supported"
    return nvrtc.missing()


def run(plan: Plan, tensors: Sequence[Input], m: int, n: int, batch: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Reduce; see :func:`kernops.backends.reduce` for the contract."""
    first = next(t for t in tensors if isinstance(t, Tensor))
    index = first.get_device()
    if index != _current_device():
        with torch.cuda.device(index):
            return _run(plan, tensors, m, n, batch, first.dtype, index)
    return _run(plan, tensors, m, n, batch, first.dtype, index)


def _run(plan: Plan, tensors: Sequence[Input], m: int, n: int, batch: tuple[int, ...], dtype: torch.dtype,
         index: int) -> tuple[Tensor, ...]:  # fmt: skip
    sizes: tuple[int, ...] = (1,)
    steps = None
    if batch:
        sizes, steps = collapse(batch, _steps(plan, tensors, batch))
        if len(sizes) > MAX_BATCH_DIMS:
            results = _run(plan, _flat(plan, tensors, batch), m, n, (math.prod(batch),), dtype, index)
            return tuple(t.reshape(*batch, *t.shape[1:]) for t in results)
    key = (plan, dtype, index, m, n, sizes)
    launch = _launches.get(key)
    if launch is None:
        launch = _prepare(key)
    return launch(tensors, steps, batch)


def _steps(plan: Plan, tensors: Sequence, batch: tuple[int, ...]) -> list[tuple[int, ...] | None]:
    """Strides of each of the plan's variables, None for a number."""
    pairs = ((v.params[0], tensors[v.params[1]]) for v in plan.variables)
    return [None if cat == CAT_SCALAR else strides(t, cat, batch) for cat, t in pairs]


def collapse(batch: tuple[int, ...], steps: list) -> tuple[tuple[int, ...], list]:
    """Batch sizes and strides in fewer dimensions: those of size 1 dropped, neighbours joined where strides allow it.

    ``steps`` holds one tuple of strides for each tensor (None for a number): batch dimensions, then row and component.
    """
    sizes: list[int] = []
    kept: list[list[int]] = [[] for _ in steps]
    for axis, size in enumerate(batch):
        if size == 1:
            continue
        pairs = [(k, s[axis]) for k, s in zip(kept, steps) if s is not None]
        if sizes and all(k[-1] == step * size for k, step in pairs):
            sizes[-1] *= size
            for k, step in pairs:
                k[-1] = step
        else:
            sizes.append(size)
            for k, step in pairs:
                k.append(step)
    if not sizes:
        sizes, kept = [1], [[0] for _ in steps]
    return tuple(sizes), [None if s is None else (*k, *s[-2:]) for k, s in zip(kept, steps)]


def _flat(plan: Plan, tensors: Sequence, batch: tuple[int, ...]) -> list:
    """The tensors with batch dimensions expanded and flattened into one; copies."""
    flat = list(tensors)
    for v in plan.variables:
        cat, k, _ = v.params
        if cat != CAT_SCALAR:
            own = flat[k].shape[flat[k].ndim - own_axes(cat) :]
            flat[k] = flat[k].expand(*batch, *own).reshape(-1, *own)
    return flat


# --- what is made once for all calls of the same sizes ----------------------------------------------------------------
@lru_cache(maxsize=64)
def device_facts(index: int) -> Device:
    p = torch.cuda.get_device_properties(index)
    shared = getattr(p, "shared_memory_per_block_optin", p.shared_memory_per_block)
    return Device(p.multi_processor_count, shared, (p.major, p.minor))


@lru_cache(maxsize=4096)
def _facts(plan: Plan) -> Facts:
    return facts(plan)


def arch_of(capability: tuple[int, int]) -> str:
    """NVRTC's name of an architecture; with Hopper's own instructions on Hopper."""
    return "sm_{}{}".format(*capability) + ("a" if capability == (9, 0) else "")


def _prepare(key: tuple) -> Launch | nearest.Search:
    """The launch of a key; called with the device current."""
    plan, dtype, index, m, n, sizes = key
    if len(_launches) >= _KEPT:
        _launches.clear()
    device = device_facts(index)
    search = nearest.search(plan, index, arch_of(device.arch), device, m, n, sizes) if dtype == torch.float32 else None
    if search is not None:
        _launches[key] = search
        return search
    s = schedule(_facts(plan), m, n, math.prod(sizes), dtype.itemsize, device)
    driver.bind(index)
    with _building:
        functions = {name: _kernel(plan, s, dtype.itemsize, len(sizes), index, name) for name in instantiate.kernels(s)}
    launch = _launches[key] = _launch(key, s, functions)
    return launch


def _kernel(plan: Plan, s: Schedule, itemsize: int, batch_dims: int, index: int, name: str) -> int:
    text = instantiate.source(plan, s, itemsize, batch_dims)
    if (text, index, name) not in _kernels:
        image = nvrtc.cubin(text, arch_of(device_facts(index).arch), f"{plan.core} of {plan.formula}")
        module = driver.load(image)
        for other in instantiate.compiled(s):
            shared = s.shared if other == "reduce" else 0
            _kernels[text, index, other] = driver.function(module, "kn_" + other, shared)
    return _kernels[text, index, name]


def _pieces(blocks: int) -> tuple[tuple[int, int], ...]:
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


@dataclass(frozen=True)
class Launch:
    """Everything about a call but the addresses and strides of its tensors.

    Attributes:
        dtype, index: of the call; number of the device.
        variables: ``(number, category, place in plan.variables)`` of each variable number; -1 for the last two if the
            formula does not have it.
        sizes: batch sizes as the kernels see them, rows, columns, and how they are cut.
        layout: packs variables (address or number, strides) and sizes.
        kernels: in order.
        shape, second: shapes after the batch dimensions of the results; ``second`` with its dtype, or None.
        scratch, offsets: bytes of scratch; where its four buffers begin.
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

    def __call__(self, tensors: Sequence[Input], steps: list | None, batch: tuple[int, ...]) -> tuple[Tensor, ...]:
        """``steps`` are the strides of ``plan.variables``, or None without batch dimensions."""
        device = self.index
        words = self._words(tensors, steps)
        results: tuple[Tensor, ...] = (torch.empty((*batch, *self.shape), dtype=self.dtype, device=device),)
        if self.second is not None:
            results += (torch.empty((*batch, *self.second[0]), dtype=self.second[1], device=device),)
        base = 0
        if self.scratch:  # given back to the allocator on return: later work on this stream may use it, no other
            scratch = torch.empty(self.scratch, dtype=torch.uint8, device=device)
            base = scratch.data_ptr()
        head = self.layout.pack(*words, *self.sizes)
        tail = _ADDRESSES.pack(results[0].data_ptr(), results[-1].data_ptr(), *[base + at for at in self.offsets])
        stream = _stream(device)
        for k in self.kernels:
            for first, blocks in k.pieces:
                arguments = head + _RANGE.pack(first, k.total) + tail
                driver.launch(device, k.function, blocks, k.threads, k.shared, stream, arguments)
        return results

    def _words(self, tensors: Sequence, steps: list | None) -> list[float]:
        words: list[float] = []
        none = (0,) * (len(self.sizes) - 5 + 2)
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
                words += (tensors[number].data_ptr(), 0, *tensors[number].stride())
        return words


_RANGE, _ADDRESSES = struct.Struct("=qq"), struct.Struct("=6Q")


def _launch(key: tuple, s: Schedule, functions: dict[str, int]) -> Launch:
    """The launch of a key, given its schedule and kernels."""
    plan, dtype, index, m, n, sizes = key
    place = {v.params[1]: (v.params[0], k) for k, v in enumerate(plan.variables)}
    variables = tuple((k, *place.get(k, (-1, -1))) for k in range(max(1, plan.n_vars)))
    fields = "".join(("d" if cat == CAT_SCALAR else "Q") + "q" * (len(sizes) + 2) for _, cat, _ in variables)
    batch, item = math.prod(sizes), dtype.itemsize
    items = {  # work items, and threads for each
        "pack_rows": (batch * s.row_blocks * s.threads * s.rows, 1),
        "pack_cols": (batch * n, 1),
        "merge": (batch * s.chunks * m, instantiate.LANES),
        "merge_lists": (s.scratch, 1),
    }
    kernels = []
    for name, function in functions.items():
        if name == "reduce":
            kernels.append(Kernel(function, s.threads, s.shared, 0, _pieces(s.blocks)))
        else:
            total, each = items[name]
            blocks = -(-total * each // instantiate.ITEM_THREADS)
            kernels.append(Kernel(function, instantiate.ITEM_THREADS, 0, total, _pieces(blocks)))
    offsets, end = [], 0
    for size in (s.scratch * item, s.scratch * 8 if s.list else 0, s.packed_rows * item, s.packed_cols * item):
        offsets.append(end)
        end += -(-size // 256) * 256
    shape = (m, plan.k, plan.dim) if plan.k else (m, plan.dim)
    second = {"value": None, "lse": ((m, 1), dtype), "index": (shape, torch.int64)}
    return Launch(
        dtype, index, variables, (*sizes, m, n, s.row_blocks, s.splits, s.span),
        struct.Struct("=" + fields + "q" * (len(sizes) + 5)), tuple(kernels), shape,
        second[CORES[plan.core].outputs[-1]], end, tuple(offsets),
    )  # fmt: skip
