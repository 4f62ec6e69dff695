"""The geometric kernels in C++ among threads, processes and compilers, and at the end of memory that may be read."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from kernops.geometric.kernels import Scale, choose, cpu

REASON = cpu.available(torch.device("cpu"))
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

F16, F32, F64 = torch.float16, torch.float32, torch.float64
ROOT = Path(__file__).resolve().parents[2]


def _environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


GUARDED = """
import ctypes, mmap, sys
import torch
from kernops.geometric.kernels import Scale, cpu
libc = ctypes.CDLL(None, use_errno=True)
SIZE = 1 << 16
memory = mmap.mmap(-1, SIZE + mmap.PAGESIZE)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
assert libc.mprotect(ctypes.c_void_p(address + SIZE), mmap.PAGESIZE, 0) == 0
bytes_ = torch.frombuffer((ctypes.c_char * SIZE).from_address(address), dtype=torch.uint8)
for dtype in (torch.float16, torch.float32, torch.float64):
    for channels in (*range(1, 40), 80, 150):
        size = 7 * channels * dtype.itemsize
        values = bytes_[SIZE - size :].view(dtype).view(7, channels)
        values.fill_(1)
        order = torch.arange(7, dtype=torch.int32)
        starts = torch.tensor([0, 7], dtype=torch.int32)
        assert (cpu.segment_sum(values, order, starts, None, 1, None, torch.float32) == 7).all()
        assert cpu.segment_cumsum(values, order, starts, False, torch.float32).sum() == 28 * channels
        cells = torch.zeros((1, 1, 2, 1, 7), dtype=torch.int32)
        scale = Scale("runs", torch.ones(1, 1, 2, 1, 7, dtype=dtype), None, None, 2, 7)
        by_depth, by_values = cpu.splat_backward(values[6:], values, cells, scale, True, True)
        assert (by_depth == channels).all() and (by_values == 2).all()
print("done")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="uses mprotect")
def test_nothing_is_read_behind_the_last_row() -> None:
    """The last row ends where the memory that may be read does."""
    done = subprocess.run([sys.executable, "-c", GUARDED], capture_output=True, text=True, env=_environment())
    assert done.stdout == "done\n", (done.returncode, done.stderr)


# --- threads and processes --------------------------------------------------------------------------------------------
def _everything(seed: int = 0) -> list[torch.Tensor]:
    """Results of all kernels, of sizes that are worth several threads."""
    shape, n_out = (1, 2, 30, 20, 50), 700
    generator = torch.Generator().manual_seed(seed)
    cells = torch.randint(-100, n_out, shape, generator=generator, dtype=torch.int32)
    cells[:, :, 10:20] = 5  # a long bucket of long runs
    logits, values = torch.randn(*shape, generator=generator), torch.randn(2000, 37, generator=generator)
    scale = Scale("runs", logits, None, cpu.depth_lse(logits), 30, 1000)
    items, starts = cpu.make_runs(cells, n_out, None)
    order, places = cpu.bucket_sort(cells.flatten(), n_out)
    rows = torch.randn(cells.numel(), 20, generator=generator)
    grad = torch.randn(n_out, 37, generator=generator)
    projection = torch.randn(1, 6, 3, 4, generator=generator, dtype=F64)
    line = torch.linspace(-1, 1, 40, dtype=F64)
    found = [
        scale.lse, items[: starts[-1]], starts, order[: places[-1]], places,
        cpu.splat_atomic(values, cells, scale, n_out, F32),
        cpu.segment_sum(rows, order, places, None, n_out, None, F32),
        cpu.segment_cumsum(rows, order, places, False, F32), cpu.segment_cumsum(rows, order, places, True, F16),
        cpu.gather(grad, cells.flatten()), *cpu.splat_backward(grad, values, cells, scale, True, True),
        cpu.frustum_cells(projection, line, line, line, (-1, -1, -1), (0.1, 0.1, 2), (20, 20, 1), False),
    ]  # fmt: skip
    return found  # type: ignore[return-value]


def test_threads_do_not_change_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNOPS_NUM_THREADS", "1")
    want = _everything()
    for threads in ("2", "3", "7", "64"):
        monkeypatch.setenv("KERNOPS_NUM_THREADS", threads)
        for got, w in zip(_everything(), want):
            assert torch.equal(got, w)


def test_calls_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """From several threads, none of which has compiled anything."""
    want = {seed: _everything(seed) for seed in range(3)}
    monkeypatch.setattr(cpu, "_loaded", {})
    monkeypatch.setenv("KERNOPS_NUM_THREADS", "2")
    wrong: list[int] = []

    def work(seed: int) -> None:
        for _ in range(3):
            wrong.extend(seed for got, w in zip(_everything(seed), want[seed]) if not torch.equal(got, w))

    workers = [threading.Thread(target=work, args=(seed,)) for seed in want]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == []


FORK = """
import os, sys, torch
from kernops.geometric.kernels import cpu
order = torch.arange(100_000, dtype=torch.int32)
starts = torch.tensor([0, 70_000, 100_000], dtype=torch.int32)
values = torch.ones(100_000, 30)
cpu.segment_sum(values, order, starts, None, 2, None, torch.float32)
child = os.fork()
sums = cpu.segment_sum(values, order, starts, None, 2, None, torch.float32)
running = cpu.segment_cumsum(values, order, starts, False, torch.float32)  # the child compiles, too
ok = sums[:, 0].tolist() == [70_000, 30_000] and running[69_999, 0] == 70_000 and running[70_000, 29] == 1
if child == 0:
    os._exit(0 if ok else 1)
_, status = os.waitpid(child, 0)
sys.exit(0 if ok and status == 0 else 1)
"""


def test_a_call_in_a_forked_child_returns() -> None:
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=120, env=_environment(KERNOPS_NUM_THREADS="4"))


# --- compilers --------------------------------------------------------------------------------------------------------
def test_no_compiler(tmp_path: Path) -> None:
    code = """
import torch
from kernops.geometric.kernels import choose, cpu
print(cpu.available(torch.device("cpu")))
print(choose("auto", torch.device("cpu")).__name__)
try:
    choose("cpu", torch.device("cpu"))
except RuntimeError as error:
    print(error)
"""
    environment = _environment(KERNOPS_CXX=str(tmp_path / "none"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    reason, chosen, error = done.stdout.splitlines()
    assert "no C++ compiler (KERNOPS_CXX" in reason and "was not found" in reason
    assert chosen == "kernops.geometric.kernels.tiled"
    assert error == f"backend: 'cpu' cannot run here: {reason}"


def test_a_failing_compiler_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_cache: Path) -> None:
    fake = tmp_path / "c++-that-fails"
    fake.write_text('#!/bin/sh\n[ "$1" = --version ] && echo fake 1.0 && exit 0; echo "out of ideas" >&2; exit 3\n')
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("KERNOPS_CXX", str(fake))
    monkeypatch.setattr(cpu, "_loaded", {})
    with pytest.raises(RuntimeError, match="(?s)exit status 3.*out of ideas.*kernel.cpp"):
        cpu.depth_lse(torch.zeros(1, 1, 2, 1, 1))


def test_what_it_computes_on() -> None:
    assert "not on cuda" in str(cpu.available(torch.device("cuda")))
    assert choose("cpu", torch.device("cpu")) is cpu
