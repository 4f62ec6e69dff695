"""The CUDA back end: compiled templates, launched on torch's current stream.

A call allocates its results and scratch from torch's caching allocator on that stream, launches a few kernels and
returns; nothing synchronises, so it can be captured into a CUDA graph. All decisions that depend on sizes only are made
once and kept (:class:`Launch`); a call then costs a few microseconds of Python.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache

import torch

from ..codegen import instantiate, matrix_source
from ..codegen.facts import Facts, facts
from ..codegen.matrix import matrix_form
from ..codegen.matrix_schedule import POINTS, MatrixSchedule, matrix_schedule
from ..codegen.schedule import Device, Schedule, candidates, schedule
from ..formula.graph import CAT_I, CAT_J, CAT_P, CAT_SCALAR
from ..formula.plan import Plan
from . import driver, nearest, nvrtc, pruned_cuda, tune
from .launch import Kernel, Launch, assemble, item_kernel, pieces_of
from .layout import own_axes, strides

Tensor = torch.Tensor
Input = Tensor | float | None

#: What is called with tensors, strides of the plan's variables (None without batch dimensions) and the batch shape.
Call = Callable[[Sequence[Input], list | None, tuple[int, ...]], tuple[Tensor, ...]]

MAX_BATCH_DIMS = 6
#: Half types, which kernels of these reductions read and write; for others tensors are converted before.
_HALVES = (torch.float16, torch.bfloat16)
_OF_HALVES = ("Sum", "LogSumExp", "SumSoftMaxWeight", "Min")
OLDEST = (7, 5)  # what NVRTC of CUDA 13 still compiles for
TUNED = 4  # schedules that are measured where that is switched on
_KEPT = 4096  # launches kept; beyond, all are made anew (their kernels are kept)

_NO_BATCH = (1,)
_launches: dict[tuple, Call] = {}
_kernels: dict[tuple[str, int], dict[str, int]] = {}
_building = threading.Lock()
#: The short way of torch's own compiler: it skips wrappers that cost more than the rest of a call.
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


def reads(plan: Plan, dtype: torch.dtype) -> bool:
    """Whether tensors of this type can be reduced as they are. Half types are computed in float32."""
    return dtype not in _HALVES or plan.core in _OF_HALVES


def _itemsize(dtype: torch.dtype) -> int:
    """Bytes of the numbers that are computed with."""
    return max(4, dtype.itemsize)


def _stored(dtype: torch.dtype) -> str:
    """The C++ type of numbers in memory."""
    return instantiate.STORED.get(str(dtype).removeprefix("torch."), "T")


def run(plan: Plan, tensors: Sequence[Input], m: int, n: int, batch: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Reduce; see :func:`kernops.backends.reduce` for the contract."""
    first: Tensor = tensors[plan.tensors[0]] if plan.tensors else next(t for t in tensors if isinstance(t, Tensor))  # type: ignore[assignment]
    index = first.get_device()
    if index != _current_device():
        with torch.cuda.device(index):
            return run(plan, tensors, m, n, batch)
    sizes: tuple[int, ...] = _NO_BATCH
    steps = None
    if batch:
        sizes, steps = collapse(batch, _steps(plan, tensors, batch))
        if len(sizes) > MAX_BATCH_DIMS:
            results = run(plan, _flat(plan, tensors, batch), m, n, (math.prod(batch),))
            return tuple(t.reshape(*batch, *t.shape[1:]) for t in results)
    key = (plan, first.dtype, index, m, n, sizes)
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
    by_matrix = matrix_schedule(plan, m, n, math.prod(sizes), _itemsize(dtype), device)
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
    text = instantiate.source(plan, s, _itemsize(dtype), len(sizes), _stored(dtype))
    shared = {instantiate.main_kernel(s): s.shared}
    functions = compiled(text, f"{plan.core} of {plan.formula}", index, shared, instantiate.compiled(s))
    first = None if by_matrix is None else _matrix_launch(key, by_matrix)
    return _launch(key, s, {name: functions[name] for name in instantiate.kernels(s)}, first)


def _asked(key: tuple) -> tuple[Facts, int, int, int, int, Device]:
    plan, dtype, index, m, n, sizes = key
    return _facts(plan), m, n, math.prod(sizes), _itemsize(dtype), device_facts(index)


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
    described = f"schedule of {plan.core} of {plan.formula}, {dtype}"
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


def _matrix_launch(key: tuple, s: MatrixSchedule) -> Launch:
    """The launch of a key on matrix units."""
    plan, dtype, index, m, n, sizes = key
    form, batch = matrix_form(plan), math.prod(sizes)
    assert form is not None, "a schedule for matrix units is of a formula that fits them"
    text = matrix_source.source(plan, form, s, len(sizes), _stored(dtype))
    main = next(name for name in matrix_source.kernels(s, form) if name.startswith("matrix"))
    shared = {name: s.shared if name == main else 0 for name in matrix_source.compiled(s, form)}
    functions = compiled(text, f"{plan.core} of {plan.formula}", index, shared, matrix_source.compiled(s, form))
    items: dict[str, tuple[int, int | Fraction]] = {  # work items, and threads for each
        "survey": (batch * (m + n + matrix_source.sampled(s, form)), matrix_source.surveyors(s, form)),
        "pack": (batch * (s.row_blocks + s.tiles) * POINTS, matrix_source.packers(s)),
        "merge": (batch * s.pieces * m, s.lanes),
        "finish_wide": (batch * m * plan.dim, 1),
    }
    eights = s.width // 8 * s.pieces  # of components of right-hand sides
    own = {main: s.blocks, "centre": batch * -(-form.length // 32), "pack_rhs": batch * s.tiles * eights}
    kernels = tuple(
        item_kernel(functions[name], *items[name]) if name in items
        else Kernel(functions[name], matrix_source.threads(name, s), shared[name], 0, pieces_of(own[name]))
        for name in matrix_source.kernels(s, form)
    )  # fmt: skip
    words = (*sizes, m, n, s.row_blocks, s.splits, s.span)
    return assemble(key, words, kernels, (s.partial, 0, s.rows, s.cols), s.survey, s.survey // batch)


def _launch(key: tuple, s: Schedule, functions: dict[str, int], first: Launch | None = None) -> Launch:
    """The launch of a key, given its schedule and kernels, and the launch that is tried before."""
    plan, dtype, index, m, n, sizes = key
    batch, item = math.prod(sizes), _itemsize(dtype)
    items = {  # work items, and threads for each
        "pack_rows": (batch * s.row_blocks * s.threads * s.rows, 1),
        "pack_cols": (batch * n, 1),
        "merge": (batch * s.chunks * m, s.lanes),
        "merge_lists": (s.scratch, 1),
    }
    kernels = tuple(
        Kernel(function, s.threads, s.shared, 0, pieces_of(s.blocks)) if name == instantiate.main_kernel(s)
        else item_kernel(function, *items[name])
        for name, function in functions.items()
    )  # fmt: skip
    scratch = (s.scratch * item, s.scratch * 8 if s.list else 0, s.packed_rows * item, s.packed_cols * item)
    step = 0 if first is None else first.survey_step
    return assemble(key, (*sizes, m, n, s.row_blocks, s.splits, s.span), kernels, scratch, 0, step, first)
