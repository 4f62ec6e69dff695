"""The CUDA kernels of the splat's peers, compiled for the processor and run thread by thread."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

from kernops.bench import intervals

SHIM = """
#include <cstring>
#define __global__
struct Index { int x; };
static Index blockIdx, blockDim, threadIdx;
template <class T> T __ldg(const T* p) { return *p; }
"""

RUN = """
extern "C" void run_%(name)s(const char* bytes, int blocks, int threads) {
    Pool p;
    static_assert(sizeof(p) == %(size)d, "the layout of the parameter");
    std::memcpy(&p, bytes, sizeof p);
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) %(name)s(p);
}
"""


def compiler() -> str | None:
    return shutil.which("g++") or shutil.which("clang++")


def build(folder: Path) -> ctypes.CDLL:
    """The kernels as a library of the host."""
    size = intervals.LAYOUT.size
    runs = "".join(RUN % {"name": name, "size": size} for name in intervals.KERNELS)
    source = folder / "intervals.cpp"
    source.write_text(SHIM + intervals.SOURCE.read_text(encoding="utf-8") + runs)
    library = folder / "intervals.so"
    subprocess.run([str(compiler()), "-O1", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return ctypes.CDLL(str(library))


class Kernels:
    """What ``intervals.Kernels`` is on a GPU."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def __call__(self, name: str, **tensors) -> None:
        channels = tensors["out"].shape[-1]
        blocks, threads = intervals.blocks_of(name, len(tensors["starts"]), channels), intervals.THREADS
        getattr(self.library, f"run_{name}")(intervals.packed(tensors, channels), blocks, threads)
