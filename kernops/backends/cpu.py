"""The CPU back end: host C++ generated from the plan, compiled by the system's compiler at first use, called by ctypes.

The templates are in ``host/*.h``; ``codegen.host_schedule`` writes the few lines that instantiate them. A call packs
its arguments into one block of 64-bit words (``host/problem.h`` says which) and hands over its address.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import platform
import shlex
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from pathlib import Path

import torch

from .. import environment
from ..codegen.host_schedule import Machine, Schedule, candidates, source
from ..formula.graph import CAT_P, CAT_SCALAR
from ..formula.plan import Plan
from . import cache, tune
from .layout import compact, pair_steps, strides

Tensor = torch.Tensor
Inputs = Sequence["Tensor | float | None"]

log = logging.getLogger("kernops.backends.cpu")

COMPILERS = ("g++", "clang++", "c++")
#: NaN and infinities keep their meaning (no -ffast-math); fused multiply-add is welcome.
FLAGS = (
    "-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fno-exceptions", "-fno-rtti",
    "-fvisibility=hidden", "-fPIC", "-shared", "-pthread", "-w",
)  # fmt: skip
_NATIVE = {"x86_64": "-march=native", "AMD64": "-march=native", "aarch64": "-mcpu=native", "arm64": "-mcpu=native"}
_HEADERS = Path(__file__).parent / "host"
_SHARED_HEADER = Path(__file__).parent.parent / "cuda" / "reductions.cuh"
#: Fewer pairs than this are not worth asking how many threads there may be.
FEW_PAIRS = 10_000
#: One or two rows against at least this many pairs use the variant that takes one row at a time.
FEW_ROWS, MANY_PAIRS = 2, 1 << 22
#: As few columns use the variant that takes one vector of them at a time: of several, most would be of no column.
FEW_COLUMNS = 32


def available(device: torch.device) -> str | None:
    """None where the back end can run, else the reason why not."""
    if device.type != "cpu":
        return f"it computes on the CPU, not on {device}"
    if sys.platform == "win32":
        return "it does not support Windows"
    found = _compiler(environment.get("KERNOPS_CXX"))
    return found if isinstance(found, str) else None


def reads(plan: Plan, dtype: torch.dtype) -> bool:
    """Whether tensors of this type can be reduced as they are."""
    return dtype.itemsize >= 4


def run(plan: Plan, tensors: Inputs, m: int, n: int, batch: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Compute ``plan`` (see :func:`kernops.backends.reduce` for the contract)."""
    if plan.core in ("KMin", "MinArgMin") and plan.algorithm != "brute":
        from . import pruned  # which calls this module

        found = pruned.run(plan, tensors if batch else compact(tensors), m, n, batch)
        if found is not None:
            return found
    binding = _bindings.get(plan)
    if binding is None:
        binding = _bindings[plan] = _Binding(plan)
    return binding(tensors, m, n, batch)


class _Binding:
    """What calling a plan needs: where its tensors go, and its compiled variants."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        cats = {v.params[1]: v.params[0] for v in plan.variables}
        self.variables = [(k, cats.get(k)) for k in range(plan.n_vars)]
        self.first = next((k for k, cat in self.variables if cat not in (None, CAT_SCALAR)), None)
        self.packers: dict[int, Callable[..., bytes]] = {}
        self.functions: dict[tuple[torch.dtype, str], Callable[[bytes], int]] = {}
        self.variants: dict[tuple[torch.dtype, Schedule], Callable[[bytes], int]] = {}
        self.tuned: dict[tuple, Callable[[bytes], int]] = {}
        self.tails = [(plan.k, dim) if plan.k else (dim,) for _, dim in plan.outputs]
        self.second = plan.outputs[-1][0] if len(plan.outputs) == 2 else ""

    def __call__(self, tensors: Inputs, m: int, n: int, batch: tuple[int, ...]) -> tuple[Tensor, ...]:
        like = self._like(tensors)
        pairs = m * n * math.prod(batch)
        key = (like.dtype, variant(m, n, pairs))
        function = self.functions.get(key) or self._function(key)
        value = like.new_empty((*batch, m, *self.tails[0]))
        outs: tuple[Tensor, ...] = (value,)
        second = 0
        if self.second:
            dtype = torch.int64 if self.second == "index" else like.dtype
            other = value.new_empty((*batch, m, *self.tails[1]), dtype=dtype)
            outs, second = (value, other), other.data_ptr()
        words = [m, n, len(batch), 1 if pairs < FEW_PAIRS else threads(), value.data_ptr(), second, *batch]
        for k, cat in self.variables:
            t = tensors[k]
            if cat is None or cat == CAT_SCALAR:
                words += (t if cat is not None else 0, *(0,) * (len(batch) + 2))  # type: ignore[arg-type]
            elif batch:
                words += (t.data_ptr(), *strides(t, cat, batch))  # type: ignore[union-attr,arg-type]
            elif cat == CAT_P:
                words += (t.data_ptr(), 0, t.stride(-1))  # type: ignore[union-attr]
            else:
                step = t.stride()  # type: ignore[union-attr]
                words += (t.data_ptr(), *(step if len(step) == 2 else pair_steps(t)))  # type: ignore[union-attr,arg-type]
        pack = self.packers.get(len(batch)) or self._packer(len(batch))
        packed = pack(*words)
        if pairs >= tune.FEW_PAIRS and tune.enabled():
            kind = (key, m.bit_length(), n.bit_length(), batch, words[3])
            if kind not in self.tuned:
                self.tuned[kind] = self._fastest(key, m, n, math.prod(batch), packed)
            function = self.tuned[kind]
        if function(packed):
            raise MemoryError(
                f"not enough memory for the column terms of {n} columns and {math.prod(batch)} batch elements"
            )
        return outs

    def _like(self, tensors: Inputs) -> Tensor:
        if self.first is not None:
            return tensors[self.first]  # type: ignore[return-value]
        return next(t for t in tensors if isinstance(t, Tensor))  # a formula of numbers alone

    def _packer(self, axes: int) -> Callable[..., bytes]:
        each = "".join(("d" if cat == CAT_SCALAR else "q") + f"{axes + 2}q" for _, cat in self.variables)
        self.packers[axes] = struct.Struct(f"{6 + axes}q{each}").pack
        return self.packers[axes]

    def _fastest(self, key: tuple[torch.dtype, str], m: int, n: int, batch: int, packed: bytes) -> Callable:
        """The variant that is fastest for such sizes, by a measurement on this very call."""
        dtype, few = key
        variants = candidates(self.plan, dtype.itemsize, machine(), few)

        def seconds(s: Schedule) -> float:
            function = self._variant(dtype, s)
            if function(packed):
                raise MemoryError("no memory for this schedule")
            return tune.seconds_of(lambda: function(packed))

        device = f"{_cpu()[0]}, {threads()} threads"
        described = f"schedule of {self.plan.core} of {self.plan.formula}, float{8 * dtype.itemsize}"
        best = tune.best(tune.key(device, _headers(), self.plan, str(dtype), m, n, batch), variants, seconds, described)
        return self._variant(dtype, best)

    def _variant(self, dtype: torch.dtype, s: Schedule) -> Callable[[bytes], int]:
        with building(self.plan):
            if (dtype, s) not in self.variants:
                self.variants[dtype, s] = _load(self.plan, dtype.itemsize, "", s)
            return self.variants[dtype, s]

    def _function(self, key: tuple[torch.dtype, str]) -> Callable[[bytes], int]:
        with building(self.plan):
            if key not in self.functions:
                self.functions[key] = _load(self.plan, key[0].itemsize, key[1])
            return self.functions[key]


_bindings: dict[Plan, _Binding] = {}
_locks: dict[Hashable, threading.Lock] = {}


def building(key: Hashable) -> threading.Lock:
    """Two threads do not compile the same: the lock to hold for ``key``, a plan or what else is compiled."""
    return _locks.setdefault(key, threading.Lock())


# A lock that another thread held at the time of a fork would never be released in the child.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_locks.clear)


def variant(m: int, n: int, pairs: int) -> str:
    """Which variant of the schedule a call uses: that for few ``"rows"``, few ``"columns"``, or ``""``."""
    if m <= FEW_ROWS and pairs >= MANY_PAIRS:
        return "rows"
    return "columns" if n <= FEW_COLUMNS else ""


def threads() -> int:
    """The number of threads of a call."""
    given = environment.get("KERNOPS_NUM_THREADS")
    if given is None:
        return torch.get_num_threads()
    if not (given.isdecimal() and int(given) > 0):
        raise ValueError(f"KERNOPS_NUM_THREADS must be a whole number >= 1; got {given!r}")
    return int(given)


def machine() -> Machine:
    """What matters of this processor."""
    return _cpu()[1]


# --- compiling --------------------------------------------------------------------------------------------------------
def _load(plan: Plan, itemsize: int, few: str, tuned: Schedule | None = None) -> Callable[[bytes], int]:
    text = source(plan, itemsize, _cpu()[1], few, tuned)
    function = library(text, f"{plan.core} of {plan.formula}, float{8 * itemsize}").kernops_run
    function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_int
    return function


def library(text: str, description: str, flags: tuple[str, ...] = ()) -> ctypes.CDLL:
    """The shared library of a C++ source text, which may include ``host/*.h``: from the disk cache, or compiled now.

    Args:
        text: the source text.
        description: what ``python -m kernops cache list`` shows.
        flags: for the compiler, after its usual ones.

    Raises:
        RuntimeError: there is no compiler, or it fails; the message quotes it.
    """
    compiler = _compiler(environment.get("KERNOPS_CXX"))
    if isinstance(compiler, str):
        raise RuntimeError(f"backend 'cpu' cannot run here: {compiler}")
    command, version = compiler
    native = (_NATIVE[platform.machine()],) if platform.machine() in _NATIVE else ()
    flags = (*FLAGS, *native, *flags)
    key = (text, _headers(), version, *command, *flags, _cpu()[0])
    path = cache.artifact(
        "cpu", key, "kernel.so", lambda folder: _compile(command, flags, text, folder), description=description[:200]
    )
    return ctypes.CDLL(str(path))


def _compile(command: tuple[str, ...], flags: tuple[str, ...], text: str, folder: Path) -> None:
    """Compile ``text`` to ``folder / kernel.so``; the source stays beside it."""
    file = folder / "kernel.cpp"
    file.write_text(text, encoding="utf-8")
    full = [*command, *flags, f"-I{_HEADERS.parent}", str(file), "-o", str(folder / "kernel.so")]
    log.info("compiling: %s", shlex.join(full))
    done = subprocess.run(full, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    if done.returncode:
        said = done.stderr[-4000:] or done.stdout[-4000:]
        raise RuntimeError(
            f"the C++ compiler failed with exit status {done.returncode}:\n{said}\n"
            f"The source is {file}, the command was: {shlex.join(full)}\n"
            "(KERNOPS_CXX names another compiler; backend='tiled' needs none)"
        )


@lru_cache(maxsize=16)
def _compiler(given: str | None) -> tuple[tuple[str, ...], str] | str:
    """The compiler's command and version, or the reason why there is none."""
    if given is not None:
        commands = [(given,) if shutil.which(given) else tuple(shlex.split(given))]
    else:
        commands = [(name,) for name in COMPILERS]
    reasons = []
    for command in commands:
        path = shutil.which(command[0]) if command else None
        if path is None:
            reasons.append(f"{command[0] if command else given!r} was not found")
            continue
        try:
            done = subprocess.run(
                [path, *command[1:], "--version"], capture_output=True, text=True, errors="replace",
                stdin=subprocess.DEVNULL, timeout=60,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            reasons.append(f"{path} does not run ({error})")
            continue
        if done.returncode == 0:
            return (path, *command[1:]), f"{os.path.realpath(path)} {done.stdout}"
        reasons.append(f"{path} --version ends with exit status {done.returncode}")
    where = "KERNOPS_CXX" if given is not None else "PATH"
    return f"no C++ compiler ({where}: {', '.join(reasons)})"


@lru_cache(maxsize=1)
def _headers() -> str:
    return cache.headers_digest([_HEADERS, _SHARED_HEADER])


@lru_cache(maxsize=1)
def _cpu() -> tuple[str, Machine]:
    """What ``-march=native`` depends on, and what the schedule does."""
    lines = []
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            lines = file.read(1 << 14).split("\n\n")[0].splitlines()  # the first processor
    except OSError:
        pass  # not Linux
    facts = dict(line.split(":", 1) for line in lines if ":" in line)
    known = {k.strip(): v.strip() for k, v in facts.items()}
    named = [
        known.get(k, "") for k in ("model name", "cpu family", "model", "stepping", "CPU part", "flags", "Features")
    ]
    text = " ".join([platform.machine(), platform.processor(), platform.system(), *named])
    flags = set(known.get("flags", "").split())
    adders = known.get("vendor_id") == "AuthenticAMD"  # since Zen
    if {"avx512f", "avx512dq", "avx512bw", "avx512vl"} <= flags:
        return text, Machine(64, 32, adders)
    if platform.machine() in ("aarch64", "arm64"):
        return text, Machine(16, 32)
    return text, Machine(32 if "avx2" in flags else 16, 16, adders)
