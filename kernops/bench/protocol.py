"""How calls are timed: warmed up, synchronised, interleaved, and the median taken."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

#: A sample repeats the call until it lasts this long, so that the clock's and the launch's own cost do not count.
SAMPLE_SECONDS = 0.02
#: Before each sample, so that the threads of the contender before it have stopped spinning.
PAUSE_SECONDS = 0.005
#: A call shorter than this is run once more, untimed, before each sample: caches and threads are then its own.
SETTLE_SECONDS = 0.05
#: A contender that has used this much time stops after ``MIN_SAMPLES`` samples.
BUDGET_SECONDS = 60.0
MIN_SAMPLES = 3


@dataclass
class Timing:
    """Seconds per call, one number a sample."""

    samples: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    def to_json(self) -> dict[str, Any]:
        return {"seconds": self.median, "seconds_min": min(self.samples), "samples": self.samples}


def _cpu_seconds(call: Callable[[], Any], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


def _cuda_seconds(call: Callable[[], Any], count: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000 / count


CLOCKS: dict[str, Callable[[Callable[[], Any], int], float]] = {"cpu": _cpu_seconds, "cuda": _cuda_seconds}


@contextmanager
def _without_collector() -> Iterator[None]:
    """As ``timeit`` does: how often Python looks for cycles depends on what else was imported, not on what is timed."""
    was = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def interleave(
    calls: Mapping[str, Callable[[], Any]], device: str, repeats: int, budget: float = BUDGET_SECONDS
) -> dict[str, Timing]:
    """Time ``calls`` in turn, A B C A B C ..., so that a drift of the machine hits all of them alike.

    Args:
        calls: name -> what to run, called at least once before.
        device: ``"cpu"`` (wall clock) or ``"cuda"`` (events on the current stream).
        repeats: samples of each; fewer, but at least ``MIN_SAMPLES``, for one that has used up ``budget`` seconds. One
            whose call alone takes longer than that has its warm-up for its only sample.
        budget: seconds.
    """
    clock = CLOCKS[device]
    once = {name: clock(call, 1) for name, call in calls.items()}  # the warm-up, and the length of a sample
    counts = {name: max(1, round(SAMPLE_SECONDS / max(t, 1e-9))) for name, t in once.items()}
    timings = {name: Timing() for name in calls}
    with _without_collector():
        for k in range(max(repeats, 1)):
            for name, call in calls.items():
                spent = once[name] * counts[name] * k
                if once[name] > budget:
                    timings[name].samples = [once[name]]
                    continue
                if k >= min(MIN_SAMPLES, repeats) and spent > budget:
                    continue
                time.sleep(PAUSE_SECONDS)
                if once[name] < SETTLE_SECONDS:
                    clock(call, 1)
                timings[name].samples.append(clock(call, counts[name]))
    return timings
