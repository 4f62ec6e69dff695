"""The CUDA back end: compiled templates, launched on torch's current stream.

A call allocates its results and scratch from torch's caching allocator on that stream, launches one to four kernels and
returns; nothing synchronises, so it can be captured into a CUDA graph. All decisions that depend on sizes only are made
once and kept (:class:`Launch`); a call then costs a few microseconds of Python.
"""

from __future__ import annotations

import math
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from ..codegen import instantiate, matrix_source
from ..codegen.facts import Facts, facts
from ..codegen.matrix import matrix_form
from ..codegen.matrix_schedule import POINTS, MatrixSchedule, matrix_schedule
from ..codegen.schedule import MAX_GRID, Device, Schedule, candidates, schedule
from ..formula.graph import CAT_I, CAT_J, CAT_P, CAT_SCALAR
from ..formula.plan import Plan
from . import driver, nearest, nvrtc, pruned_cuda, tune
from .layout import own_axes, strides

Tensor = torch.Tensor
Input = Tensor | float | None

#: What is called with tensors, strides of the plan's variables (None without batch dimensions) and the batch shape.
Call = Callable[[Sequence[Input], list | None, tuple[int, ...]], tuple[Tensor, ...]]

MAX_BATCH_DIMS = 6
OLDEST = (7, 5)  # what NVRTC of CUDA 13 still compiles for
TUNED = 4  # schedules that are measured where that is switched on
_KEPT = 4096  # launches kept; beyond, all are made anew (their kernels are kept)

_launches: dict[tuple, Call] = {}
_kernels: dict[tuple[str, int], dict[str, int]] = {}
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
    first: Tensor = tensors[plan.tensors[0]] if plan.tensors else next(t for t in tensors if isinstance(t, Tensor))  # type: ignore[assignment]
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


def _prepare(key: tuple) -> Call:
    """The launch of a key; called with the device current."""
    plan, dtype, index, m, n, sizes = key
    device = device_facts(index)
    pruned = pruned_cuda.wanted(key)
    search = nearest.search(plan, index, arch_of(device.arch), device, m, n, sizes) if dtype == torch.float32 else None
    by_matrix = matrix_schedule(plan, m, n, math.prod(sizes), dtype.itemsize, device)
    call: Call
    if pruned is not None:
        call = pruned_cuda.prepare(key, _model_schedule(key), pruned)
    elif search is not None:
        call = search
    else:  # what stands in for the matrix units is not worth measuring
        call = _built(key, _model_schedule(key) if by_matrix else _schedule(key), by_matrix)
    if len(_launches) >= _KEPT:
        _launches.clear()
    _launches[key] = call
    return call


def _built(key: tuple, s: Schedule, by_matrix: MatrixSchedule | None = None) -> Launch:
    """The launch of a key by a schedule, and by one of the matrix units before."""
    plan, dtype, index, _, _, sizes = key
    text = instantiate.source(plan, s, dtype.itemsize, len(sizes))
    shared = {instantiate.main_kernel(s): s.shared}
    functions = compiled(text, f"{plan.core} of {plan.formula}", index, shared, instantiate.compiled(s))
    first = None if by_matrix is None else _matrix_launch(key, by_matrix)
    return _launch(key, s, {name: functions[name] for name in instantiate.kernels(s)}, first)


def _asked(key: tuple) -> tuple[Facts, int, int, int, int, Device]:
    plan, dtype, index, m, n, sizes = key
    return _facts(plan), m, n, math.prod(sizes), dtype.itemsize, device_facts(index)


def _model_schedule(key: tuple) -> Schedule:
    return schedule(*_asked(key))


def _schedule(key: tuple) -> Schedule:
    """The model's schedule; where that is switched on, the fastest of a few. None is measured in a graph's capture."""
    plan, dtype, index, m, n, sizes = key
    count = math.prod(sizes)
    if m * n * count < tune.FEW_PAIRS or not tune.enabled() or torch.cuda.is_current_stream_capturing():
        return _model_schedule(key)

    def clock() -> float:
        torch.cuda.synchronize(index)
        return time.perf_counter()

    def seconds(s: Schedule) -> float:
        launch, (tensors, steps, batch) = _built(key, s), _samples(key)
        return tune.seconds_of(lambda: launch(tensors, steps, batch), clock)

    named = f"{torch.cuda.get_device_name(index)}, {device_facts(index)}"
    code = f"{nvrtc.headers_digest()} {nvrtc.toolchain()}"
    described = f"schedule of {plan.core} of {plan.formula}, float{8 * dtype.itemsize}"
    asked_for = tune.key(named, code, plan, str(dtype), m, n, count)
    return tune.best(asked_for, candidates(*_asked(key), count=TUNED), seconds, described)


tune.on_switch.append(lambda: _launches.clear())


def _samples(key: tuple) -> tuple[list, list | None, tuple[int, ...]]:
    """Arguments of a launch of this key, made up: a schedule's time hardly depends on the numbers."""
    plan, dtype, index, m, n, sizes = key
    batch = () if sizes == (1,) else sizes
    rows = {CAT_I: (m,), CAT_J: (n,), CAT_P: ()}
    tensors: list = [None] * plan.n_vars
    for v in plan.variables:
        cat, k, dim = v.params
        shape = () if cat == CAT_SCALAR else (*batch, *rows[cat], dim)
        tensors[k] = 1.0 if cat == CAT_SCALAR else torch.rand(shape, dtype=dtype, device=index)
    return tensors, _steps(plan, tensors, batch) if batch else None, batch


def compiled(text: str, what: str, index: int, shared: dict[str, int], names: Sequence[str]) -> dict[str, int]:
    """The kernels of a source text on a device: name -> handle.

    ``what`` describes it in the cache; ``shared`` are the bytes of dynamic shared memory of those that use some.
    """
    driver.bind(index)
    with _building:
        if (text, index) not in _kernels:
            module = driver.load(nvrtc.cubin(text, arch_of(device_facts(index).arch), what))
            _kernels[text, index] = {k: driver.function(module, "kn_" + k, shared.get(k, 0)) for k in names}
        return _kernels[text, index]


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

    def __call__(self, tensors: Sequence[Input], steps: list | None, batch: tuple[int, ...]) -> tuple[Tensor, ...]:
        """``steps`` are the strides of ``plan.variables``, or None without batch dimensions."""
        results = self.results(batch)
        words = self._words(tensors, steps)
        if self.first is None:
            self.submit(words, results)
            return results
        survey = torch.empty(self.first.survey, dtype=torch.uint8, device=self.index)
        self.first.submit(words, results, survey.data_ptr())
        self.submit(words, results, survey.data_ptr())
        return results

    def submit(self, words: Sequence[float], results: tuple[Tensor, ...], survey: int = 0) -> None:
        """Launch the kernels for tensors of these addresses and strides, with scratch of their own.

        Scratch is given back to the allocator on return: later work on this stream may use it, no other.
        """
        base = 0
        if self.scratch:
            scratch = torch.empty(self.scratch, dtype=torch.uint8, device=self.index)
            base = scratch.data_ptr()
        self.start(self.layout.pack(*words, *self.sizes), self.tail(results, base, survey))

    def results(self, batch: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Empty results."""
        results: tuple[Tensor, ...] = (torch.empty((*batch, *self.shape), dtype=self.dtype, device=self.index),)
        if self.second is not None:
            results += (torch.empty((*batch, *self.second[0]), dtype=self.second[1], device=self.index),)
        return results

    def head(self, tensors: Sequence[Input], steps: list | None) -> bytes:
        """The arguments' variables and sizes."""
        return self.layout.pack(*self._words(tensors, steps), *self.sizes)

    def tail(self, results: tuple[Tensor, ...], base: int, survey: int = 0) -> bytes:
        """The arguments' addresses; scratch begins at ``base``, and the survey, if there is one, at ``survey``."""
        buffers = [base + at for at in self.offsets]
        return _ADDRESSES.pack(results[0].data_ptr(), results[-1].data_ptr(), *buffers, survey, self.survey_step)

    def start(self, head: bytes, tail: bytes) -> None:
        """Launch the kernels."""
        stream = _stream(self.index)
        for k in self.kernels:
            for first, blocks in k.pieces:
                arguments = head + RANGE.pack(first, k.total) + tail
                driver.launch(self.index, k.function, blocks, k.threads, k.shared, stream, arguments)

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


RANGE, _ADDRESSES = struct.Struct("=qq"), struct.Struct("=7Qq")


def _matrix_launch(key: tuple, s: MatrixSchedule) -> Launch:
    """The launch of a key on matrix units."""
    plan, _, index, m, n, sizes = key
    form, batch = matrix_form(plan), math.prod(sizes)
    assert form is not None, "a schedule for matrix units is of a formula that fits them"
    text = matrix_source.source(plan, form, s, len(sizes))
    main = next(name for name in matrix_source.kernels(s, form) if name.startswith("matrix"))
    shared = {name: s.shared if name == main else 0 for name in matrix_source.compiled(s, form)}
    functions = compiled(text, f"{plan.core} of {plan.formula}", index, shared, matrix_source.compiled(s, form))
    lanes = matrix_source.lanes(s, form)
    items = {  # work items, and threads for each
        "survey": (batch * (m + n + matrix_source.sampled(s, form)), lanes),
        "pack": (batch * (s.row_blocks + s.tiles) * POINTS, lanes),
        "merge": (batch * s.pieces * m, instantiate.LANES),
        "finish_wide": (batch * m * plan.dim, 1),
    }
    own = {main: s.blocks, "centre": batch * -(-form.length // 32)}
    kernels = tuple(
        _item_kernel(functions[name], *items[name]) if name in items
        else Kernel(functions[name], matrix_source.threads(name, s), shared[name], 0, _pieces(own[name]))
        for name in matrix_source.kernels(s, form)
    )  # fmt: skip
    words = (*sizes, m, n, s.row_blocks, s.splits, s.span)
    return _assemble(key, words, kernels, (s.partial, 0, s.rows, s.cols), s.survey, s.survey // batch)


def _launch(key: tuple, s: Schedule, functions: dict[str, int], first: Launch | None = None) -> Launch:
    """The launch of a key, given its schedule and kernels, and the launch that is tried before."""
    plan, dtype, index, m, n, sizes = key
    batch, item = math.prod(sizes), dtype.itemsize
    items = {  # work items, and threads for each
        "pack_rows": (batch * s.row_blocks * s.threads * s.rows, 1),
        "pack_cols": (batch * n, 1),
        "merge": (batch * s.chunks * m, instantiate.LANES),
        "merge_lists": (s.scratch, 1),
    }
    kernels = tuple(
        Kernel(function, s.threads, s.shared, 0, _pieces(s.blocks)) if name == instantiate.main_kernel(s)
        else _item_kernel(function, *items[name])
        for name, function in functions.items()
    )  # fmt: skip
    scratch = (s.scratch * item, s.scratch * 8 if s.list else 0, s.packed_rows * item, s.packed_cols * item)
    step = 0 if first is None else first.survey_step
    return _assemble(key, (*sizes, m, n, s.row_blocks, s.splits, s.span), kernels, scratch, 0, step, first)


def _item_kernel(function: int, total: int, each: int) -> Kernel:
    """A kernel with ``each`` threads for each of ``total`` work items."""
    blocks = -(-total * each // instantiate.ITEM_THREADS)
    return Kernel(function, instantiate.ITEM_THREADS, 0, total, _pieces(blocks))


def _assemble(
    key: tuple, sizes: tuple[int, ...], kernels: tuple[Kernel, ...], scratch: tuple[int, ...], survey: int, step: int,
    first: Launch | None = None,
) -> Launch:  # fmt: skip
    """A launch from its parts; ``scratch`` are the bytes of its buffers."""
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
