"""What one call costs where there is next to nothing to compute: LazyTensor and Genred on ten points."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from .peers import CONTENDERS, start
from .problem import Config, make_data
from .protocol import interleave

POINTS = 10
FRONTS = ("LazyTensor", "Genred")


def measure_overhead(
    config: Config, peers: Iterable[str], repeats: int, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Seconds per call of both front ends of kernops and of each symbolic peer, one row each.

    Thousands of calls follow one another, so that on a GPU what is measured is the time until the call returns.
    """
    rows: list[dict[str, Any]] = []
    calls = {}
    for name in ("kernops", *(p for p in peers if p == "keops")):
        for front in FRONTS:
            own = replace(config, case="gaussian", n=POINTS, front=front)
            row: dict[str, Any] = {"contender": f"{name} {front}", "config": own.to_json()}
            row["missing"] = CONTENDERS[name].missing(own)
            rows.append(row)
            if not row["missing"]:
                say(f"{name} {front}: first call")
                calls[row["contender"]] = start(name, own, make_data(own))[0].call
    say("timing")
    timings = interleave(calls, config.device, repeats)
    for row in rows:
        if row["contender"] in timings:
            timing = timings[row["contender"]]
            ours = timings["kernops " + row["config"]["front"]].median
            row.update(timing.to_json(), ratio=timing.median / ours)
    return rows
