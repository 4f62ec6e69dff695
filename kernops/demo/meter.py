"""Measuring a job: seconds, peak memory, and progress on a terminal."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Meter:
    """Times what runs inside ``with``, and takes the peak memory meanwhile.

    On a GPU that is the memory that torch allocated there. On a CPU it is the process's resident memory, imported
    libraries included; where the system cannot reset its peak, an earlier and higher one counts.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds = 0.0
        self.peak_bytes = 0

    def __enter__(self) -> Meter:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            _reset_peak()
        self._start = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self.peak_bytes = torch.cuda.max_memory_allocated(self.device)
        else:
            self.peak_bytes = resident_peak()
        self.seconds = time.perf_counter() - self._start


def _reset_peak() -> None:
    with contextlib.suppress(OSError):
        _RESET.write_text("5")  # Linux: forget the high-water mark of resident memory


def resident_peak() -> int:
    """Highest resident memory in bytes, since the last reset where there is one."""
    with contextlib.suppress(OSError):
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    if sys.platform == "win32":
        return 0  # not known there without further packages
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Progress:
    """One line on standard error that says what runs and how far it is; silent where that is no terminal."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.share: float | None = None
        self._start = time.perf_counter()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def chunks(self, n: int, size: int) -> Iterator[slice]:
        """Slices of up to ``size`` that cover 0 .. n - 1, each counted as done when the next is asked for."""
        self.share = 0.0
        for start in range(0, n, size):
            yield slice(start, min(start + size, n))
            self.share = min(start + size, n) / n

    def _run(self) -> None:
        while not self._stop.wait(0.2):
            sys.stderr.write("\r" + self.line() + "\x1b[K")
            sys.stderr.flush()

    def line(self, width: int = 24) -> str:
        seconds = time.perf_counter() - self._start
        if self.share is None:
            return f"{self.title}  {seconds:.0f} s"
        bar = "#" * round(self.share * width)
        left = f", {seconds / self.share - seconds:.0f} s left" if self.share > 0 else ""
        return f"{self.title}  [{bar:-<{width}}] {self.share:4.0%}  {seconds:.0f} s{left}"
