"""Launches the kernels of ``intervals.cu``: pooling as the public operators do it, for the benchmark to compare."""

from __future__ import annotations

import struct
from functools import lru_cache
from pathlib import Path

import torch

from ..backends import driver, nvrtc
from ..backends.cuda import arch_of

Tensor = torch.Tensor

SOURCE = Path(__file__).with_name("intervals.cu")
#: Pointers of the kernels' parameter, in its order; two integers follow.
POINTERS = (
    *("depth", "feat", "ranks_depth", "ranks_feat", "ranks_bev"),
    *("starts", "lengths", "grad", "out", "grad_depth"),
)
#: Kernel -> whether it has a thread for each channel of an interval, or one for all of them.
KERNELS = {"pool_lifted": True, "pool_lifted_backward": True, "pool_fused": True, "pool_fused_backward": False}
THREADS = 256
LAYOUT = struct.Struct(f"={len(POINTERS)}Q2i")


def missing() -> str | None:
    """Why the kernels cannot be compiled here, or None."""
    return nvrtc.missing()


@lru_cache(maxsize=16)
def _functions(index: int) -> dict[str, int]:
    image = nvrtc.compile(SOURCE.read_text(encoding="utf-8"), arch_of(torch.cuda.get_device_capability(index)))
    driver.bind(index)
    module = driver.load(image)
    return {name: driver.function(module, name, 0) for name in KERNELS}


class Kernels:
    """The kernels on one device: ``kernels(name, **tensors)``, with tensors by the names of ``POINTERS``, starts one on
    the current stream."""

    def __init__(self, device: str | torch.device) -> None:
        index = torch.device(device).index
        self.index = torch.cuda.current_device() if index is None else index
        self.functions = _functions(self.index)

    def __call__(self, name: str, **tensors: Tensor) -> None:
        channels = tensors["out"].shape[-1]
        blocks = blocks_of(name, len(tensors["starts"]), channels)
        if blocks:
            stream = torch.cuda.current_stream(self.index).cuda_stream
            arguments = packed(tensors, channels)
            driver.launch(self.index, self.functions[name], blocks, THREADS, 0, stream, arguments)


def blocks_of(name: str, intervals: int, channels: int) -> int:
    """Blocks of ``THREADS`` threads that a kernel needs."""
    return -(-intervals * (channels if KERNELS[name] else 1) // THREADS)


def packed(tensors: dict[str, Tensor], channels: int) -> bytes:
    """The kernels' parameter. Everything must be contiguous: 32-bit integers, and float32 for the rest."""
    for name, tensor in tensors.items():
        want = torch.int32 if name in ("ranks_depth", "ranks_feat", "ranks_bev", "starts", "lengths") else torch.float32
        if tensor.dtype != want or not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous {want}; got {tensor.dtype}, strides {tensor.stride()}")
    addresses = [tensors[name].data_ptr() if name in tensors else 0 for name in POINTERS]
    return LAYOUT.pack(*addresses, len(tensors["starts"]), channels)
