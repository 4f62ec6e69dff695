"""One Gaussian process benchmark: every contender run, timed against the others, and compared with float64."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from .gp import GPConfig, accuracy, exact, make_problem
from .gp_peers import CONTENDERS, Found
from .measure import TROUBLE, Row, Say
from .probe import cuda_peak, resident_peak
from .protocol import CLOCKS, interleave

log = logging.getLogger("kernops.bench")

#: Points of a first run on a CPU, which compiles.
SMALL = 1000


def measure_gp(
    config: GPConfig,
    names: Iterable[str],
    *,
    repeats: int = 5,
    budget: float = 20.0,
    full: bool = False,
    say: Say = lambda text: None,
) -> list[Row]:
    """Measure contenders on one problem, in one process and in turns.

    Args:
        config: the problem.
        names: keys of ``gp_peers.CONTENDERS``; ratios are to kernops.
        repeats: samples of each.
        budget: seconds that a contender may take before it gets fewer samples: one, if a single call takes longer.
        full: whether peers take part that take minutes.
        say: told what is being done.

    Returns:
        One row a contender, in the order given; ready for JSON.
    """
    problem = make_problem(config)
    rows: dict[str, Row] = {}
    calls: dict[str, Callable[[], Found]] = {}
    found: dict[str, Found] = {}
    for name in names:
        contender = CONTENDERS[name]
        rows[name] = {"contender": name, "config": config.to_json(), "note": contender.note}
        rows[name]["missing"] = contender.missing(config, full)
        if rows[name]["missing"]:
            continue
        say(f"{name}: first run")
        try:
            small = SMALL if config.device == "cpu" else contender.small
            if config.task != "regressor":
                contender.build(make_problem(replace(config, n=min(config.n, small))))()
            calls[name] = _kept(contender.build(problem), found, name)
            rows[name].update(_first(calls[name], config.device))
        except TROUBLE as error:
            if name == "kernops":
                raise
            log.debug("%s cannot do %s", name, config, exc_info=True)
            rows[name]["missing"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            calls.pop(name, None)
    say("timing " + ", ".join(calls))
    _time(rows, calls, config.device, repeats, budget)
    gc.collect()
    say("comparing")
    reference = exact(problem)
    for name in calls:
        rows[name].update({**CONTENDERS[name].check(problem), **accuracy(problem, found[name], reference)})
    if reference.get("loss") is not None:
        rows["exact"] = {"contender": "exact", "config": config.to_json(), "missing": "", "loss": reference["loss"],
                         "note": "Cholesky in float64, not timed"}  # fmt: skip
    return list(rows.values())


def _kept(call: Callable[[], Found], found: dict[str, Found], name: str) -> Callable[[], Found]:
    """``call``, whose last result stays."""

    def kept() -> Found:
        found[name] = call()
        return found[name]

    return kept


def _first(call: Callable[[], Any], device: str) -> Row:
    """Seconds and peak memory of one call: the only ones of a contender that takes long."""
    seconds = 0.0

    def clocked() -> None:
        nonlocal seconds
        seconds = CLOCKS[device](call, 1)

    gc.collect()
    if device == "cpu":
        _trim()
    peak = cuda_peak(clocked) if device == "cuda" else resident_peak(clocked)
    if device == "cuda":
        torch.cuda.empty_cache()
    return {"first": seconds, "peak_bytes": peak}


def _trim() -> None:
    """Give memory that is free back to the system, where the C library can: else its use anew would not be seen."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _time(
    rows: dict[str, Row], calls: dict[str, Callable[[], Found]], device: str, repeats: int, budget: float
) -> None:
    """Times and ratios."""
    once = {name: rows[name].pop("first") for name in calls}
    for name, seconds in once.items():
        if seconds > budget:
            rows[name].update(seconds=seconds, seconds_min=seconds, samples=[seconds])
    again = {name: call for name, call in calls.items() if once[name] <= budget}
    for name, timing in interleave(again, device, repeats, budget).items():
        rows[name].update(timing.to_json())
    ours = rows.get("kernops", {}).get("seconds")
    for name in calls:
        rows[name]["ratio"] = rows[name]["seconds"] / ours if ours else None
