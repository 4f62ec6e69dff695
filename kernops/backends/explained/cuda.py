"""What the templates of the CUDA back end tell."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import torch

from ...codegen import instantiate
from ...codegen.facts import Facts, facts
from ...codegen.floors import Rates, gpu, gpu_work
from ...codegen.schedule import REGISTER_LIST, Device, Schedule, schedule
from .. import nvrtc
from . import Lines, Problem, Told, count

#: Compute capability -> bytes of shared memory that a block may have; others have the least of these.
SHARED = {arch: kilobytes << 10 for arch, kilobytes in
          (((7, 5), 64), ((8, 0), 163), ((8, 6), 99), ((8, 9), 99), ((9, 0), 227), ((10, 0), 227))}  # fmt: skip
_ARCH = re.compile(r"sm_(\d+)(\d)[af]?")


def place(device: torch.device | str) -> tuple[Device, Rates]:
    """What the schedule and the model of the floor know of a GPU, or of one of an architecture.

    Raises:
        ValueError: the text is no architecture.
    """
    if isinstance(device, str):
        found = _ARCH.fullmatch(device)
        if found is None:
            raise ValueError(f"device must be a torch device or an architecture such as 'sm_90'; got {device!r}")
        arch = (int(found[1]), int(found[2]))
        rates = gpu(arch)
        return Device(rates.processors, SHARED.get(arch, min(SHARED.values())), arch), rates
    from ..cuda import device_facts

    index = torch.cuda.current_device() if device.index is None else device.index
    known, properties = device_facts(index), torch.cuda.get_device_properties(index)
    kilohertz = getattr(properties, "clock_rate", 0)  # torch tells since 2.8
    rates = gpu(known.arch).of(known.multiprocessors, 1e3 * kilohertz or None, properties.name)
    return known, rates


# --- registers --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Usage:
    """What ptxas says of a kernel: registers of a thread; bytes of its stack, of spilled stores and loads."""

    registers: int
    stack: int
    stores: int
    loads: int

    @property
    def spills(self) -> bool:
        return (self.stack, self.stores, self.loads) != (0, 0, 0)

    def __str__(self) -> str:
        spilled = f"spills {self.stores} bytes out, {self.loads} in" if self.spills else "no spills"
        return f"{self.registers} registers, {spilled}"


_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")


def usages(log: str) -> dict[str, Usage]:
    """What the compiler's log (with ``--ptxas-options=-v``) says of each kernel.

    Raises:
        ValueError: the log has no such report.
    """
    found = {}
    for part in log.split("Compiling entry function '")[1:]:
        spills, registers = _SPILLS.search(part), _REGISTERS.search(part)
        if spills and registers:
            found[part[: part.index("'")]] = Usage(int(registers[1]), *map(int, spills.groups()))
    if not found:
        raise ValueError(f"the compiler's log reports no kernel: {log!r}")
    return found


@lru_cache(maxsize=256)
def usage(source: str, arch: str) -> dict[str, Usage]:
    """The same of a translation unit, compiled for an architecture now."""
    return usages(nvrtc.report(source, arch, ("--ptxas-options=-v",))[1])


def registers_of(source: str, arch: tuple[int, int]) -> tuple[Lines, dict[str, Any]]:
    """Lines and numbers of a translation unit's kernels, or why there are none."""
    from ..cuda import arch_of

    reason = nvrtc.missing()
    if reason is not None:
        return (("registers", f"not known: {reason}"),), {}
    found = usage(source, arch_of(arch))
    return tuple((name, str(used)) for name, used in found.items()), dict(found)


#: Name of the template, by whether a warp keeps the lists of its rows.
_TEMPLATES = {
    False: "tile: rows in threads, tiles of columns in shared memory (cuda/tile.cuh)",
    True: "ranked: rows and their lists in warps, tiles of columns in shared memory (cuda/ranked.cuh)",
}
_LISTS = {
    "": "",
    "registers": "in registers of a thread",
    "heap": "a heap of a thread",
    "warp": "in registers of a warp",
}


# --- cuda/tile.cuh ----------------------------------------------------------------------------------------------------
def tile(p: Problem) -> Told:
    """The template of all reductions: a thread has a few rows, and a block shares tiles of columns."""
    f = facts(p.plan)
    device, rates = place(p.device)
    s = schedule(f, p.m, p.n, p.batch, p.itemsize, device)
    return Told(
        template=_TEMPLATES[s.list == "warp"],
        schedule=_lines(s),
        reasons=tuple(_reasons(p, f, s, device)),
        rates=rates,
        work=gpu_work(p.plan, f, s.rows, p.itemsize, s.plain / (s.rows * s.cols)),
        compiled=lambda: registers_of(instantiate.source(p.plan, s, p.itemsize, int(p.batch > 1)), device.arch),
        values=asdict(s),
    )


def _lines(s: Schedule) -> Lines:
    columns = f"{s.tile}, {count(s.tiles, 'tile')} at a time, {s.shared:,} bytes of shared memory"
    columns = "from global scratch, packed before" if s.cols_in_memory else columns
    lines = [
        ("kernels", ", ".join(f"kn_{name}" for name in instantiate.kernels(s))),
        ("threads of a block", str(s.threads)),
        (f"rows, columns of a {'warp, lane' if s.list == 'warp' else 'thread'}", f"{s.rows}, {s.cols} at a time"),
        ("columns of a tile", columns),
        ("row terms", "in global scratch, packed before" if s.rows_in_memory else "in registers"),
        ("components at a time", f"{s.chunk}, in {s.chunks} passes" if s.chunks > 1 else str(s.chunk)),
        ("list of a row", _LISTS[s.list]),
        ("powers of 2", f"of {s.plain} of {s.rows * s.cols} pairs by the plain cores" if s.plain else ""),
        ("splits of the columns", f"{s.splits}, of {s.span:,} columns"),
        ("blocks", f"{s.blocks:,}"),
        ("scratch", f"{s.scratch:,} numbers of partial results" if s.scratch else ""),
    ]
    return tuple((label, text) for label, text in lines if text)


def _reasons(p: Problem, f: Facts, s: Schedule, device: Device) -> list[str]:
    said = [
        f"{count(s.rows, 'row')} and {count(s.cols, 'column')} of a thread, {count(s.chunk, 'component')} at a "
        "time: the fewest cycles a pair by the model in codegen/schedule.py, for "
        f"{count(f.fixed.instructions, 'instruction')} a pair and {f.each.instructions} a component"
    ]
    blocks = s.row_blocks * s.chunks * p.batch
    if s.splits > 1:
        said.append(f"{s.splits} splits: {blocks:,} blocks alone would not fill {device.multiprocessors} "
                    "multiprocessors evenly; a second kernel merges the partial results in a fixed order")  # fmt: skip
    else:
        said.append(f"no split: {blocks:,} blocks for {device.multiprocessors} multiprocessors, or few columns")
    if s.plain:
        said.append(
            f"powers of 2 of {count(s.plain, 'pair')} of {s.rows * s.cols} by a polynomial: the exponential unit, with "
            f"{f.special} results for each pair, would take longer than the plain cores"
        )
    if s.rows_in_memory:
        said.append(f"row terms in memory: {f.n_row} numbers a row are too many for registers")
    if s.cols_in_memory:
        said.append(f"columns from memory: {f.n_col} numbers a column do not fit in shared memory")
    if s.list:
        said.append(f"K = {f.k}: a thread has registers for {REGISTER_LIST} places of a list; a warp keeps "
                    "longer ones, and those of few rows")  # fmt: skip
    return said
