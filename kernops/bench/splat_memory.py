"""What one call of a splat takes beyond its inputs and its results, at most."""

from __future__ import annotations

import ctypes
import gc
import logging
import sys
from dataclasses import replace
from typing import Any

import torch

from . import probe
from .splat import SETTINGS, SplatConfig, make_geometry, make_problem
from .splat_peers import Built, Tensor, build

log = logging.getLogger("kernops.bench")


def peak(name: str, built: Built, config: SplatConfig) -> int | None:
    """Bytes; on a GPU as torch's allocator counts them, else the growth of the resident set in a process of its own
    (None where the system does not tell)."""
    if config.device == "cuda":
        return _allocated(built)
    try:
        return probe.ask("splat", name, config, choice=built.choice)["peak_bytes"]
    except probe.Failed as error:
        log.warning("%s: its peak of memory is not known: %s", name, error)
        return None


def _allocated(built: Built) -> int:
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = built.results()
    torch.cuda.synchronize()
    return max(0, torch.cuda.max_memory_allocated() - before - _bytes(results))


def _bytes(results: dict[str, Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in results.values())


def resident(name: str, config: SplatConfig, choice: str | None) -> dict[str, Any]:
    """The growth of this process's resident set during one call, less the results."""
    few = replace(SETTINGS[config.setting], features=(4, 6), depth=(1.0, 9.0, 1.0))
    build(name, make_problem(config, make_geometry(few, config.device, config.backend)), choice).results()
    built = build(name, make_problem(config), choice)
    gc.collect()
    if sys.platform == "linux":  # what was freed goes back to the system, or the call would reuse it unseen
        getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: 0)(0)
    size = 0

    def call() -> None:
        nonlocal size
        size = _bytes(built.results())

    grown = probe.resident_peak(call)
    return {"peak_bytes": None if grown is None else max(0, grown - size)}
