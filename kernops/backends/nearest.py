"""The nearest points in many dimensions on a GPU's matrix units: bit for bit what comparing all pairs gives."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..codegen import nearest
from ..codegen.nearest import Nearest
from ..codegen.schedule import Device
from ..formula.plan import Plan
from . import driver, nvrtc
from .layout import compact

Tensor = torch.Tensor
#: Address and element strides of points: of batch dimensions, rows and components.
Points = tuple[int, ...]

_functions: dict[tuple[str, int], dict[str, int]] = {}
_building = threading.Lock()
_ALIGNED = 16  # bytes of four floats


@dataclass(frozen=True)
class Search:
    """Everything about a call but the addresses and strides of its tensors.

    Attributes:
        index: number of the device.
        arch: its architecture, as NVRTC names it.
        device: what the schedule needs to know of it.
        plan: what is asked for.
        sizes: batch sizes as the kernels see them.
        m, n: rows and columns of a batch element.
    """

    index: int
    arch: str
    device: Device
    plan: Plan
    sizes: tuple[int, ...]
    m: int
    n: int

    def __call__(self, tensors: Sequence, steps: list | None, batch: tuple[int, ...]) -> tuple[Tensor, ...]:
        """See ``Launch`` of ``cuda.py``: ``steps`` are the strides of ``plan.variables``, None without batches."""
        x, y = self._points(tensors, steps)
        s = schedule(self.plan, self.m, self.n, math.prod(self.sizes), self.device, aligned(x) and aligned(y))
        assert s is not None  # as `search` has seen
        functions = self._loaded(s)
        shape = (*batch, self.m, *((s.k,) if self.plan.k else ()), 1)
        value = torch.empty(shape, dtype=torch.float32, device=self.index)
        index = torch.empty(shape, dtype=torch.int64, device=self.index)
        memory = scratch(s, math.prod(self.sizes), self.index)
        stream = torch.cuda.current_stream(self.index).cuda_stream
        for name, blocks, arguments in launches(s, x, y, self.sizes, self.m, self.n, memory, value, index):
            shared = s.shared if name in nearest.FILTERS else 0
            threads = nearest.threads(s, name)
            driver.launch(self.index, functions[name], blocks, threads, shared, stream, arguments)
        return value, index

    def _points(self, tensors: Sequence, steps: list | None) -> tuple[Points, Points]:
        pair = self.plan.points
        numbers = [v.params[1] for v in self.plan.variables]
        assert pair is not None
        if steps is None:
            x, y = ((t.data_ptr(), 0, *t.stride()) for t in compact([tensors[v] for v in pair]))
        else:
            x, y = ((tensors[v].data_ptr(), *steps[numbers.index(v)]) for v in pair)
        return x, y

    def _loaded(self, s: Nearest) -> dict[str, int]:
        text = nearest.source(s, len(self.sizes))
        found = _functions.get((text, self.index))
        if found is not None:
            return found
        with _building:
            if (text, self.index) not in _functions:
                driver.bind(self.index)
                module = driver.load(nvrtc.cubin(text, self.arch, f"the nearest points of {self.plan.formula}"))
                _functions[text, self.index] = {
                    name: driver.function(module, "kn_" + name, s.shared if name in nearest.FILTERS else 0)
                    for name in nearest.KERNELS
                }
            return _functions[text, self.index]


def aligned(points: Points) -> bool:
    """Whether four neighbouring coordinates can be read at once."""
    address, *steps, component = points
    return component == 1 and address % _ALIGNED == 0 and all(4 * step % _ALIGNED == 0 for step in steps)


def schedule(plan: Plan, m: int, n: int, batch: int, device: Device, aligned: bool = True) -> Nearest | None:
    """The schedule of a plan; ``None`` where it asks for something else, or all pairs are better compared directly."""
    if plan.core not in ("KMin", "MinArgMin") or plan.points is None:
        return None
    return nearest.schedule(plan.variables[0].dim, plan.k or 1, m, n, batch, device, aligned)


def search(plan: Plan, index: int, arch: str, device: Device, m: int, n: int, sizes: tuple[int, ...]) -> Search | None:
    """How the plan's neighbours are found on matrix units, or ``None`` where they had better not be."""
    if schedule(plan, m, n, math.prod(sizes), device) is None:
        return None
    return Search(index, arch, device, plan, sizes, m, n)


def scratch(s: Nearest, batch: int, device: int | torch.device) -> dict[str, Tensor]:
    """Memory of a call. It must live until all kernels are launched; what comes later on the same stream may use it."""
    parts = {name: -(-size // 256) * 256 for name, size in nearest.scratch(s, batch).items()}
    memory = torch.empty(sum(parts.values()), dtype=torch.uint8, device=device)
    return dict(zip(parts, memory.split(list(parts.values()))))


def launches(
    s: Nearest, x: Points, y: Points, sizes: tuple[int, ...], m: int, n: int, memory: dict[str, Tensor], value: Tensor,
    index: Tensor,
) -> list[tuple[str, int, bytes]]:  # fmt: skip
    """Names, blocks and arguments of the kernels of a call, in order."""
    batch, layout = math.prod(sizes), nearest.layout(len(sizes))
    at = {name: t.data_ptr() for name, t in memory.items()}
    names = list(at)
    names.insert(names.index("lists"), "lists")  # first as the maxima of groups
    addresses = [*(at[name] for name in names), value.data_ptr(), index.data_ptr()]
    packed = batch * (s.row_blocks * nearest.ROWS + s.tiles * nearest.COLUMNS)
    found, all_blocks = [], batch * s.row_blocks
    for first in range(0, all_blocks, s.slab):
        slab = min(s.slab, all_blocks - first)
        arguments = layout.pack(
            *x, *y, *sizes, batch, m, n, s.row_blocks, s.part, s.tiles, s.sample_tiles, s.sample_segments, s.segments,
            first, slab, packed, *addresses,
        )  # fmt: skip
        blocks = nearest.blocks(s, batch, slab)
        found += [(name, blocks[name], arguments) for name in nearest.KERNELS[nearest.SLAB_KERNELS if first else 0 :]]
    return found
