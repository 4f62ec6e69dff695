"""The CUDA kernels on the processor: their own sources, compiled by g++ (``intrinsics.h``), but for headers of PTX.

Each thread of a block is a fiber (``runtime.cpp``); lanes, warps and blocks run in random order. A launch raises
``RuntimeError`` where lanes or warps part at a barrier, where a kernel touches what is neither in a tensor of the call
nor a variable of its own, and where an index, an alignment or a sum of integers is undefined in C++.
"""

from __future__ import annotations

import ctypes
import platform
import re
import shutil
import struct
import subprocess
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kernops.backends import cache, driver, launch, pruned_cuda
from kernops.backends import cuda as reductions
from kernops.codegen import nearest
from kernops.codegen.instantiate import HEADERS
from kernops.codegen.matrix_source import MATRIX_HEADERS
from kernops.geometric.kernels import cuda
from kernops.geometric.kernels import source as geometric
from tests.geometric.cases import At

_HERE = Path(__file__).parent
_KERNELS = Path(cuda.__file__).parents[2] / "cuda"
_HEADERS = (
    "math.cuh",
    *geometric.HEADERS,
    *(name for name in HEADERS if name not in ("math.cuh", *geometric.HEADERS)),
    *nearest.HEADERS,
    *MATRIX_HEADERS,
)
_SONAME = "libkernops-emulated-cuda.so"

#: PTX in the headers -> the same in C++.
_PTX = {
    'asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));': "_Float16 h; memcpy(&h, &x.bits, 2); y = h;",
    'asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));': "const _Float16 h = x; memcpy(&y.bits, &h, 2);",
}

#: Header, PTX in it, and the same in C++, for sums on matrix units.
_MATRIX_PTX = (
    ("math.cuh", 'asm(instruction " %0, %1;" : "=f"(r) : "f"(a));  ', "r = emulated_unit(instruction, a);"),
    ("math.cuh", 'asm("div.full.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));', "r = a / b;"),
    ("halves.cuh", 'asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));', "const _Float16 g = x; memcpy(&h, &g, 2);"),
    ("halves.cuh", 'asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(static_cast<unsigned short>(h)));',
     "const unsigned short b = h; _Float16 g; memcpy(&g, &b, 2); x = g;"),
    *(("halves.cuh", f'asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"({to}) : "f"(b), "f"(a));',
       f"{to} = half_of(b) << 16 | half_of(a);") for to in ("high", "low")),
    ("matrix.cuh", 'asm volatile("" ::: "memory");', ""),
)  # fmt: skip

#: Shared memory of a size that the launch says.
_DYNAMIC = "extern __shared__ __align__(16) unsigned char shared[];", "unsigned char* const shared = emulated_shared;"

_COMMON = ("-std=c++17", "-w", "-shared", "-fPIC", f"-I{_HERE}")
_RUNTIME_FLAGS = ("-O2", f"-Wl,-soname,{_SONAME}")
# The libraries of the sanitizers are not wanted: the runtime answers the compiler's calls.
_KERNEL_FLAGS = (
    "-O1", "-ffp-contract=off", "-fvisibility=hidden", "-fno-gnu-unique", "-nostdinc++",
    "-fsanitize=kernel-address,bounds,alignment,integer-divide-by-zero,signed-integer-overflow",
    "-fno-sanitize-recover=all", "--param=asan-instrumentation-with-call-threshold=0", "--param=asan-stack=0",
    "--param=asan-globals=1", "-nodefaultlibs",
)  # fmt: skip

_LAUNCHER = """
extern "C" __attribute__((visibility("default"))) const char* emulate_{name}(const emulated::Call& call) {{
    static kn::{arguments} emulated_arguments;
    const auto kernel = [] {{ kn_{name}(emulated_arguments); }};
    return emulated::launch(call, &emulated_arguments, sizeof emulated_arguments, kernel);
}}
"""


class Call(ctypes.Structure):
    """``Call`` of ``intrinsics.h``."""

    _fields_ = [
        ("arguments", ctypes.c_char_p), ("size", ctypes.c_longlong), ("blocks", ctypes.c_longlong),
        ("threads", ctypes.c_longlong), ("ranges", ctypes.c_void_p), ("n_ranges", ctypes.c_longlong),
        ("seed", ctypes.c_ulonglong),
    ]  # fmt: skip


def missing() -> str | None:
    """Why no kernel can be emulated here, or None."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return f"the emulation of CUDA needs Linux on x86-64, not {platform.system()} on {platform.machine()}"
    return None if shutil.which("g++") else "the emulation of CUDA needs g++"


# --- compiling --------------------------------------------------------------------------------------------------------
@lru_cache(maxsize=1)
def _version() -> str:
    return subprocess.run(["g++", "--version"], check=True, capture_output=True, text=True).stdout


@lru_cache(maxsize=1)
def _headers() -> dict[str, str]:
    """The headers, by name, in C++."""
    texts = {name: (_KERNELS / name).read_text(encoding="utf-8") for name in _HEADERS}
    for ptx, text in _PTX.items():
        assert ptx in texts["numbers.cuh"], f"numbers.cuh no longer has {ptx}"
        texts["numbers.cuh"] = texts["numbers.cuh"].replace(ptx, text)
    for name, ptx, text in _MATRIX_PTX:
        assert ptx in texts[name], f"{name} no longer has {ptx}"
        texts[name] = texts[name].replace(ptx, text)
    texts = {name: text.replace("__align__(128)", "__align__(16)").replace(*_DYNAMIC) for name, text in texts.items()}
    for name in ("nearest_ptx", "nearest_hopper", "mma"):
        texts[f"{name}.cuh"] = (_HERE / f"{name}.h").read_text(encoding="utf-8")
    return texts


def _compiled(text: str, files: dict[str, str], flags: tuple[str, ...], libraries: tuple[str, ...] = ()) -> Path:
    """The shared library of a C++ text and the files that it includes: from the cache of the tests, or compiled now."""

    def build(folder: Path) -> None:
        for name, content in {**files, "kernel.cpp": text}.items():
            (folder / name).write_text(content, encoding="utf-8")
        command = ["g++", *_COMMON, *flags, "kernel.cpp", "-o", "kernel.so", *libraries]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        assert done.returncode == 0, f"{done.stderr[:4000]}\n{' '.join(command)} in {folder}"

    key = (_version(), *_COMMON, *flags, _own(), *files.values(), text)
    return cache.artifact("emulated_cuda", key, "kernel.so", build, description="CUDA kernels on the processor")


@lru_cache(maxsize=1)
def _own() -> str:
    return cache.headers_digest([_HERE / "intrinsics.h", _HERE / "runtime.cpp"])


@lru_cache(maxsize=1)
def _runtime() -> str:
    """Path of the runtime. Once it is loaded, the kernels' libraries find it by its name."""
    path = str(_compiled((_HERE / "runtime.cpp").read_text(encoding="utf-8"), {}, _RUNTIME_FLAGS))
    ctypes.CDLL(path)
    return path


@lru_cache(maxsize=1024)
def library(text: str) -> ctypes.CDLL:
    """The kernels of a text that ``kernops`` gives to NVRTC, under ``emulate_`` and their names."""
    text = re.sub(r"__launch_bounds__\([^)]*\) ", "", text)  # which change nothing here
    kernels = re.findall(r" kn_(\w+)\(const __grid_constant__ kn::([\w:]+) \w\)", text)
    launchers = "".join(_LAUNCHER.format(name=name, arguments=arguments) for name, arguments in kernels)
    # Without a namespace of their own, the compiler knows of no bounds of variables in templates.
    whole = f'#include "intrinsics.h"\nnamespace {{\n{text}}}\n{launchers}'
    return ctypes.CDLL(str(_compiled(whole, _headers(), _KERNEL_FLAGS, (_runtime(), "-lm", "-lc", "-lgcc"))))


def compile_all(texts: Collection[str]) -> None:
    """Compiles texts on two processors, for those who know them beforehand."""
    _runtime()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(library, texts))


# --- launching --------------------------------------------------------------------------------------------------------
class Emulation:
    """What stands for a GPU: its number of multiprocessors, the memory that it knows, and the order that it runs in.

    Attributes:
        seed: of the order of blocks, warps and lanes, another one for each launch.
        asked: if not None, launches do nothing but add their texts to it.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.multiprocessors = 3
        self.seed = 0
        self.asked: set[str] | None = None
        self._sizes: dict[int, int] = {}  # bytes at the addresses that tensors said
        address = torch.Tensor.data_ptr

        def data_ptr(tensor: torch.Tensor) -> int:
            at = address(tensor)
            if tensor.numel():
                last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
                self._sizes[at] = (last + 1) * tensor.element_size()
            return at

        monkeypatch.setattr(torch.Tensor, "data_ptr", data_ptr, raising=False)
        monkeypatch.setattr(cuda, "_launch", self.launch)
        monkeypatch.setattr(cuda, "backend", SimpleNamespace(device_facts=lambda index: self))

    def launch(self, text: str, name: str, threads: int, blocks: int, device: torch.device, arguments: bytes) -> None:
        """What ``cuda._launch`` does on a GPU."""
        if self.asked is not None:
            self.asked.add(text)
            return
        words = struct.unpack(f"={len(arguments) // 8}Q", arguments)
        ranges = [edge for word in words if word in self._sizes for edge in (word, word + self._sizes[word])]
        packed = (ctypes.c_void_p * len(ranges))(*ranges)
        self.seed += 1
        run = getattr(library(text), f"emulate_{name}")
        run.restype = ctypes.c_char_p
        call = Call(arguments, len(arguments), blocks, threads, ctypes.addressof(packed), len(ranges) // 2, self.seed)
        problem = run(ctypes.byref(call))
        if problem is not None:
            raise RuntimeError(f"{name}: {problem.decode()}")


def emulate_reductions(monkeypatch: pytest.MonkeyPatch) -> Emulation:
    """An emulation in which the kernels of ``kernops.backends.cuda`` run on tensors of the processor."""
    emulation = Emulation(monkeypatch)

    def start(device: object, kernel: tuple[str, str], blocks: int, threads: int, *rest: object) -> None:
        text, name = kernel
        emulation.launch(text, name, threads, blocks, torch.device("cpu"), rest[-1])  # type: ignore[arg-type]

    monkeypatch.setattr(reductions, "compiled", lambda text, what, index, shared, names: {k: (text, k) for k in names})
    monkeypatch.setattr(driver, "launch", start)
    monkeypatch.setattr(launch, "_empty_strided", None)
    for module in (launch, pruned_cuda):
        monkeypatch.setattr(module, "stream_of", lambda index: 0)
    return emulation


class Emulated(At):
    """Where the kernels of ``kernops.geometric.kernels.cuda`` run on tensors of the processor, during an emulation."""

    @property
    def kernels(self):
        return cuda


def place() -> At:
    return Emulated("cuda", torch.device("cpu"))
