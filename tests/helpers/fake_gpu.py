"""The CUDA back end without a GPU: nothing is compiled or computed, and every launch and allocation is counted.

Tensors live on the CPU; results are whatever the memory holds. What is left is what a call does around its kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from kernops import backends
from kernops.backends import cuda, driver, nearest, nvrtc, pruned_cuda
from kernops.backends import launch as prepared
from kernops.codegen.schedule import MAX_GRID, Device

#: Modules of the CUDA back end that allocate.
MODULES = (cuda, prepared, nearest, pruned_cuda)
H200 = Device(132, 232448, (9, 0))


@dataclass
class Calls:
    """What was done: names of launched kernels, bytes of each allocation, waits for the GPU."""

    kernels: list[str] = field(default_factory=list)
    allocations: list[int] = field(default_factory=list)
    waits: int = 0

    def clear(self) -> None:
        self.kernels.clear()
        self.allocations.clear()


def fake_gpu(patch: pytest.MonkeyPatch, device: Device = H200) -> Calls:
    """Put the fake in place of the driver, the compiler and the allocator; the counts begin at nothing."""
    calls = Calls()
    names: dict[str, int] = {}

    def function(module: int, name: str, shared: int) -> int:
        assert shared <= device.shared
        return names.setdefault(name, len(names) + 1)

    def launch(index: int, kernel: int, grid: int, threads: int, shared: int, stream: int, arguments: bytes) -> None:
        assert 1 <= grid <= MAX_GRID and 1 <= threads <= 1024
        calls.kernels.append(next(name for name, number in names.items() if number == kernel))

    def empty(*shape, device, dtype=None, **more):
        made = torch.empty(*shape, dtype=dtype, **more)
        calls.allocations.append(made.numel() * made.element_size())
        return made

    def rand(shape, device, **more):
        return torch.rand(shape, **more)

    def wait(*args: object) -> None:
        calls.waits += 1

    patch.setattr(driver, "bind", lambda index: None)
    patch.setattr(driver, "load", lambda image: 1)
    patch.setattr(driver, "function", function)
    patch.setattr(driver, "launch", launch)
    patch.setattr(nvrtc, "cubin", lambda *args: b"")
    patch.setattr(cuda, "device_facts", lambda index: device)
    patch.setattr(prepared, "stream_of", lambda index: 0)
    patch.setattr(prepared, "_empty_strided", None)
    patch.setattr(pruned_cuda, "stream_of", lambda index: 0)
    patch.setattr(cuda, "_current_device", lambda: -1)  # the "device" of tensors on the CPU
    patch.setattr(cuda, "_launches", {})
    patch.setattr(cuda, "_kernels", {})
    patch.setattr(torch.cuda, "synchronize", wait)
    patch.setattr(torch.cuda, "current_stream", lambda *args: SimpleNamespace(cuda_stream=0))
    for module in MODULES:
        patch.setattr(module, "torch", SimpleNamespace(**{**vars(torch), "empty": empty, "rand": rand}))
    patch.setattr(backends, "choose", lambda *args: cuda)
    return calls
