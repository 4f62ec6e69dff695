"""``python -m kernops.bench all``: every row of the goals of a device, measured and judged one after the other."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from . import goals
from .cases import CASES
from .goals import Goal, Row
from .machine import environment
from .measure import TROUBLE, measure
from .probe import Failed
from .problem import Config

log = logging.getLogger("kernops.bench")
DOC = "measure every row of the tables of goals (kernops/bench/goals.py), and say which are reached"
#: Seconds that a contender may take in a row before it gets fewer samples.
ROW_SECONDS = 20.0


def add(commands: argparse._SubParsersAction, names: Callable[[tuple[str, ...]], Callable[[str], list[str]]],
        peers: tuple[str, ...]) -> None:  # fmt: skip
    """Add the sub-command to those of ``__main__``; ``names`` makes the parser of a list of names."""
    sub = commands.add_parser("all", help=DOC, description=DOC)
    sub.add_argument("--only", type=lambda text: [t for t in text.split(",") if t], default=[], metavar="TEXT,…",
                     help="only rows whose name contains one of these")  # fmt: skip
    sub.add_argument("--peer", type=names(peers), default=list(peers), metavar="NAME,…",
                     help="only these peers, or none; what compares with the others is not judged then")  # fmt: skip
    sub.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    sub.add_argument("--repeats", type=int, default=5, help="samples of each, of which the median counts (5)")
    sub.add_argument("--budget", type=float, default=ROW_SECONDS, metavar="S",
                     help=f"a contender that took S seconds in a row gets fewer samples ({ROW_SECONDS:g}); one whose "
                          "single call takes longer, just one")  # fmt: skip
    sub.add_argument("--list", action="store_true", help="print the names of the rows and stop")
    sub.add_argument("--json", type=Path, metavar="FILE", help="write the results there, after each row")


def run(options: argparse.Namespace, device: str, say: Callable[[str], None]) -> Iterator[Row]:
    """The results of the rows, as they come; each is one result of the JSON file."""
    before: Row | None = None
    found = environment(device)
    for goal in goals.chosen(device, options.only):
        goal = goals.with_peers(goal, options.peer)
        say(goal.key)
        result = _measured(goal, found, options, say)
        ours = result["results"][0]
        if goal.sweep == "dimensions" and "seconds" in ours:
            if before is not None:
                result["goal"]["checks"].append(goals.cliff(ours, before).to_json())
            before = ours
        result["goal"]["met"] = goals.met(result["goal"]["checks"])
        yield result


def _floor(config: Config) -> Row:
    """The least time by the model of :func:`kernops.explain`, and the unit that bounds it; empty without a model."""
    if config.backward or config.front == "estimator":
        return {}
    from kernops import Genred

    formula, aliases, reduction, more = CASES[config.case].genred(config)
    report = Genred(formula, list(aliases), reduction, axis=1, **more).explain(
        shape=(config.n, config.n), dtype=config.dtype, device=config.device, backend=config.backend, compile=False
    )
    return {"floor": max(report.floors.values()), "bound": report.bound} if report.floors else {}


def _measured(goal: Goal, found: Row, options: argparse.Namespace, say: Callable[[str], None]) -> Row:
    """One row. A failure of ours is its result, and stops no other row."""
    try:
        rows = measure(goal.config, goal.peers, repeats=options.repeats, probes=goal.probes, budget=options.budget,
                       say=lambda text: say(f"{goal.key}: {text}"))  # fmt: skip
    except (*TROUBLE, Failed) as error:
        log.debug("%s failed", goal.key, exc_info=True)
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        rows = [{"contender": "kernops", "config": goal.config.to_json(), "missing": reason}]
    if "seconds" in rows[0]:
        try:
            rows[0].update(_floor(goal.config))
        except TROUBLE:  # a measurement is worth keeping, whatever the model says
            log.warning("%s: no floor", goal.key, exc_info=True)
    judged: list[Any] = [c.to_json() for c in goals.checks(goal, rows, found)]
    return {
        "command": ["all", "--only", goal.key, "--device", goal.config.device],
        "environment": found,
        "goal": {"key": goal.key, "sweep": goal.sweep, "checks": judged},
        "results": rows,
    }
