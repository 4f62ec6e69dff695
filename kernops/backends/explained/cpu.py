"""What the templates of the cpu back end tell."""

from __future__ import annotations

import ctypes
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path

import torch

from ...codegen.contraction import contraction, squares
from ...codegen.floors import Rates, host, host_work
from ...codegen.host_schedule import Schedule, schedule
from ...codegen.products import products
from ...codegen.search import FEW_FEATURES, pruning_pays, worth
from .. import cpu
from . import Lines, Problem, Told, count

#: Cycles a second where the system does not tell.
_HERTZ = 3e9
#: Additions that wait for one another take a cycle each, whatever the system says of the clock.
_CLOCK = """#include <time.h>
extern "C" __attribute__((visibility("default"))) double kernops_hertz() {
  double best = 0;
  for (int trial = 0; trial < 9; ++trial) {
    timespec start, end;
    long sum = 0;
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (int k = 0; k < 20000; ++k)
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) {
        sum += 1;
        asm volatile("" : "+r"(sum));
      }
    clock_gettime(CLOCK_MONOTONIC, &end);
    const double hertz = sum / ((end.tv_sec - start.tv_sec) + 1e-9 * (end.tv_nsec - start.tv_nsec));
    if (hertz > best) best = hertz;
  }
  return best;
}
"""


@lru_cache(maxsize=1)
def _hertz() -> float:
    """The clock of a processor: measured where there is a compiler, else as the system has it."""
    if cpu.available(torch.device("cpu")) is None:
        clock = cpu.library(_CLOCK, "the clock of a processor").kernops_hertz
        clock.restype = ctypes.c_double
        return float(clock())
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return _HERTZ
    said = [float(line.partition(":")[2]) for line in lines if line.startswith("cpu MHz")]
    return 1e6 * said[0] if said else _HERTZ


def _rates() -> Rates:
    return host(cpu.threads(), _hertz(), cpu.machine().vector_bytes)


def pruned(p: Problem) -> Told | None:
    """Nearest neighbours with a look at few pairs; None where all are compared."""
    plan = p.plan
    if plan.core not in ("KMin", "MinArgMin") or plan.algorithm == "brute" or plan.points is None:
        return None
    dim, k = plan.variables[0].dim, plan.k or 1
    if plan.algorithm != "pruned" and not pruning_pays(p.m, p.n, dim, k):
        return None
    said = ["algorithm='pruned' was asked for"]
    if plan.algorithm == "auto":
        share = worth(p.n, dim, k)
        said = [
            f"squared distances in {dim} <= {FEW_FEATURES} dimensions, and enough points to repay an order",
            f"all pairs after all where a sample of the queries takes more work than {share:.0%} of the pairs",
        ]
    return Told(
        template="pruned: boxes of points, the near ones first (backends/host/pruned.h)",
        schedule=(("threads", str(cpu.threads())), ("neighbours", str(k))),
        reasons=tuple(said),
        values={"neighbours": k, "features": dim},
    )


def brute(p: Problem) -> Told:
    """All pairs."""
    few = cpu.variant(p.m, p.n, p.pairs)
    machine = cpu.machine()
    s = schedule(p.plan, p.itemsize, machine, few)
    return Told(
        template=f"{s.kernel.partition('<')[0]} (backends/host/{s.header}.h)",
        schedule=_lines(p, s),
        reasons=tuple(_reasons(p, s, few)),
        rates=_rates(),
        work=host_work(p.plan, p.itemsize, cpu.machine().adders),
        values=asdict(s),
    )


def _lines(p: Problem, s: Schedule) -> Lines:
    lanes = cpu.machine().vector_bytes // p.itemsize
    return (
        ("threads", str(cpu.threads() if p.pairs >= cpu.FEW_PAIRS else 1)),
        ("numbers of a vector", str(lanes)),
        ("rows, columns of a step", f"{s.rows}, {s.vectors * lanes}"),
        ("columns of a tile", f"{s.tile * s.vectors * lanes:,}"),
        ("rows that share a tile", str(s.blocks * s.rows)),
        ("components at a time", str(s.chunk)),
    )


def _reasons(p: Problem, s: Schedule, few: str) -> list[str]:
    room = cpu.machine().registers
    said = [f"{count(s.rows, 'row')} against {count(s.vectors, 'vector')}: as many sums as {room} registers hold, so "
            "that the latency of one is hidden by the others"]  # fmt: skip
    if few == "rows":
        said = [f"one row at a time: {count(p.m, 'row')} against {p.n:,} columns"]
    found = contraction(p.plan)
    if found.sums:
        lengths = ", ".join(str(n.args[0].dim) for n in found.sums)
        said.append(f"long sums over components ({lengths}) are computed for a block of pairs at once; the rest of the "
                    "formula is their epilogue")  # fmt: skip
    if products(p.plan)[0]:
        said.append("squared distances come from products of the points, those of near ones from differences "
                    "(backends/host/products.h)")  # fmt: skip
    if squares(p.plan)[0]:
        said.append("bounds of distances from bytes pass over columns that cannot be among the nearest")
    return said
