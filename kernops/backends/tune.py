"""Measuring schedules instead of trusting the model: off by default, switched by ``autotune`` or the environment.

What was fastest is remembered in the disk cache by device, plan, number type and rounded sizes, so that it is measured
once. A back end offers a few schedules of which its model thinks well; they give the same results up to rounding.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import kernops

from .. import environment
from ..formula.plan import Plan
from . import cache

T = TypeVar("T")
log = logging.getLogger("kernops.backends.tune")

#: Fewer pairs than this take too little time for a schedule to matter, or to be measured.
FEW_PAIRS = 1 << 20
#: A call that takes longer than this is timed once, others a few times.
LONG_SECONDS = 0.1
REPEATS = 5

_asked: list[bool] = []  # by the innermost autotune last
_chosen: dict[tuple[str, ...], int] = {}
_lock = threading.Lock()  # two threads that measure at once would disturb each other
#: Called whenever the switch is turned: back ends forget what they keep for calls to come.
on_switch: list[Callable[[], None]] = []


@contextlib.contextmanager
def autotune(enabled: bool = True) -> Iterator[None]:
    """Choose schedules by measuring a few of them, for the reductions within; or not to, whatever the environment says.

    The first reduction of its kind (formula, number type, device, sizes up to a factor of two) takes longer, as it runs
    several times; on a GPU it also waits for the device. Then the fastest schedule is remembered in the cache
    directory, for later processes too. Results are the same up to rounding. Nothing is measured for small problems, nor
    while a CUDA graph is captured. The switch is for the whole process; ``KERNOPS_AUTOTUNE=1`` sets it from outside.

    Args:
        enabled: whether to measure.

    Example:
        >>> with kernops.autotune():
        ...     a = K_ij @ b
    """
    _asked.append(bool(enabled))
    _switched()
    try:
        yield
    finally:
        _asked.pop()
        _switched()


def _switched() -> None:
    for forget in on_switch:
        forget()


def enabled() -> bool:
    """Whether to measure.

    Raises:
        ValueError: the environment variable is neither 0 nor 1.
    """
    if _asked:
        return _asked[-1]
    text = environment.get("KERNOPS_AUTOTUNE")
    if text not in ("0", "1"):
        raise ValueError(f"KERNOPS_AUTOTUNE must be 0 or 1; got {text!r}")
    return text == "1"


def key(device: str, code: str, plan: Plan, dtype: str, *sizes: int) -> tuple[str, ...]:
    """What a choice depends on: the device and what compiles for it, in words, the plan, and sizes up to two times."""
    rounded = [str(size.bit_length()) for size in sizes]
    return (kernops.__version__, device, code, plan.digest, plan.algorithm, dtype, *rounded)


def best(key: tuple[str, ...], candidates: Sequence[T], measure: Callable[[T], float], description: str) -> T:
    """The fastest of ``candidates``: as remembered, or by ``measure``, which gives seconds.

    A candidate whose measurement fails takes no part. The first one, which is the model's, is taken where all fail.

    Args:
        key: of :func:`key`.
        candidates: the same ones, in the same order, whenever the key is the same.
        measure: seconds of a candidate; raises ``RuntimeError`` or ``MemoryError`` where it cannot run.
        description: what ``python -m kernops cache list`` shows.
    """
    if len(candidates) == 1:
        return candidates[0]
    key = (*key, *map(repr, candidates))
    with _lock:
        found = _chosen.get(key)
        if found is None:
            build = lambda folder: _measure(folder, candidates, measure)  # noqa: E731
            path = cache.artifact("tuned", key, "choice.json", build, description=description[:200])
            found = _chosen[key] = int(json.loads(path.read_bytes())["choice"])
    return candidates[found]


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


# A lock that another thread held at the time of a fork would never be released in the child.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def _measure(folder: Path, candidates: Sequence[T], measure: Callable[[T], float]) -> None:
    seconds: list[float | None] = []
    for candidate in candidates:
        try:
            seconds.append(measure(candidate))
        except (RuntimeError, MemoryError) as error:
            log.info("%s cannot run: %s", candidate, error)
            seconds.append(None)
    choice = min(range(len(candidates)), key=lambda k: (seconds[k] is None, seconds[k] or 0.0, k))
    log.info("the fastest of %d schedules is number %d: %s", len(candidates), choice, seconds)
    found = {"choice": choice, "seconds": seconds, "candidates": list(map(repr, candidates))}
    (folder / "choice.json").write_text(json.dumps(found, indent=1), encoding="utf-8")


def seconds_of(call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of a call after one to warm up; the least of a few for a short one."""
    times = []
    for repeat in range(1 + REPEATS):
        start = clock()
        call()
        times.append(clock() - start)
        if repeat and times[-1] > LONG_SECONDS:
            break
    return min(times[1:])
