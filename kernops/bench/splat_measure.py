"""One splat benchmark: every contender checked against float64, captured, timed against the others, and its memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from . import graphs
from .measure import TROUBLE, Row, Say
from .protocol import BUDGET_SECONDS, CLOCKS, Timing, interleave
from .splat import Problem, SplatConfig, Tensor, errors, make_problem, reference
from .splat_memory import peak
from .splat_peers import CONTENDERS, OURS, Built, build

log = logging.getLogger("kernops.bench")

#: What is timed of a contender: the value alone, or the value and the gradients.
Calls = dict[str, Callable[[], Any]]


def measure_splat(
    config: SplatConfig,
    names: Iterable[str],
    *,
    repeats: int = 9,
    probes: bool = True,
    budget: float = BUDGET_SECONDS,
    say: Say = lambda text: None,
) -> list[Row]:
    """Measure contenders on one problem, in one process and in turns.

    Args:
        config: the problem.
        names: keys of ``splat_peers.CONTENDERS``; ratios are to the first of kernops'.
        repeats: samples of each.
        probes: whether to measure memory too.
        budget: seconds that a contender may take before it gets fewer samples.
        say: told what is being done.

    Returns:
        One row a contender, in the order given; ready for JSON. A peer that cannot take part has its reason under
        ``"missing"``.

    Raises:
        ValueError: there is no such contender.
    """
    say("making the problem")
    problem = make_problem(config)
    rows = {name: _row(name, config, problem) for name in names}
    exact = reference(problem)
    built = _build_all(rows, problem, exact, say)
    if probes:
        for name in built:
            say(f"{name}: peak memory")
            rows[name]["peak_bytes"] = peak(name, built[name], config)
    calls = {name: _calls(b) for name, b in built.items()}
    replays: dict[tuple[str, str], graphs.Replay] = {}
    if config.device == "cuda":
        for name, b in built.items():
            say(f"{name}: capturing")
            replays.update(_capture(name, b, calls[name], rows[name], problem, exact))
    say("timing " + ", ".join(built))
    timings = _time(calls, replays, config, repeats, budget)
    _fill(rows, timings)
    return list(rows.values())


def _row(name: str, config: SplatConfig, problem: Problem) -> Row:
    if name not in CONTENDERS:
        raise ValueError(f"contender must be one of {', '.join(CONTENDERS)}; got {name!r}")
    return {
        "contender": name,
        "config": config.to_json(),
        "sizes": problem.sizes(),
        "missing": CONTENDERS[name].missing(config),
    }


def _calls(built: Built) -> Calls:
    """``"value"``, and with gradients ``"both"``."""
    calls: Calls = {"value": built.forward}
    if built.both is not None:
        calls["both"] = built.both
    return calls


def _build_all(rows: dict[str, Row], problem: Problem, exact: dict[str, Tensor], say: Say) -> dict[str, Built]:
    """The contenders that run, each called once and compared with float64."""
    ready = {}
    for name, row in rows.items():
        if row["missing"]:
            continue
        say(f"{name}: preparing")
        try:
            built = build(name, problem)
            row.update(errors(problem, built.results(), exact))
        except TROUBLE as error:
            log.debug("%s cannot do %s", name, problem.config, exc_info=True)
            row["missing"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            if name in OURS:  # a peer may fail, we may not
                raise
            continue
        row["note"] = built.note
        ready[name] = built
    return ready


# --- time -------------------------------------------------------------------------------------------------------------
def _capture(
    name: str, built: Built, calls: Calls, row: Row, problem: Problem, exact: dict[str, Tensor]
) -> dict[tuple[str, str], graphs.Replay]:
    """Graphs of a contender's calls; none, with the reason in the row's note, where it cannot be captured."""
    found = {}
    try:
        if built.blocking:
            raise RuntimeError(built.blocking)
        for what, call in calls.items():
            seconds = CLOCKS["cuda"](call, 3)
            found[name, what] = graphs.capture(call, seconds)
    except RuntimeError as error:
        log.debug("%s cannot be captured", name, exc_info=True)
        row["not_captured"] = str(error)
        return {}
    result = found[name, "both" if "both" in calls else "value"].result  # a replay must be as right as a call
    again = errors(problem, result if isinstance(result, dict) else {"value": result}, exact)
    for key, value in again.items():
        row[key] = max(row[key], value)
    return found


def _time(
    calls: dict[str, Calls], replays: dict[tuple[str, str], graphs.Replay], config: SplatConfig, repeats: int,
    budget: float,
) -> dict[tuple[str, str, str], Timing]:  # fmt: skip
    """``(contender, "value" or "both", "eager" or "graph")`` -> seconds a call; all of them in turns."""
    jobs: dict[str, tuple[tuple[str, str, str], Callable[[], Any], int]] = {}
    for name, own in calls.items():
        for what, call in own.items():
            jobs[f"{name}/{what}/eager"] = ((name, what, "eager"), call, 1)
            if (name, what) in replays:
                replay = replays[name, what]
                jobs[f"{name}/{what}/graph"] = ((name, what, "graph"), replay, replay.calls)
    timings = interleave({job: call for job, (_, call, _) in jobs.items()}, config.device, repeats, budget)
    return {jobs[job][0]: Timing([s / jobs[job][2] for s in timing.samples]) for job, timing in timings.items()}


def _fill(rows: dict[str, Row], timings: dict[tuple[str, str, str], Timing]) -> None:
    """Times and ratios, to the first of ours. Graphs are compared with graphs, and eager calls with eager calls."""
    first = next((name for name, what, _ in timings if name in OURS), None)
    for name, row in rows.items():
        measured = {key[1:]: timing for key, timing in timings.items() if key[0] == name}
        if not measured:
            continue
        top = "both" if ("both", "eager") in measured else "value"
        how = "graph" if (top, "graph") in measured else "eager"
        for (what, manner), timing in measured.items():
            row[manner if what == top else f"forward_{manner}"] = timing.to_json()
        row.update(measured[top, how].to_json(), how=how)
        ours = timings.get((first, top, how)) if first else None
        row["ratio"] = measured[top, how].median / ours.median if ours else None
        if top == "both":
            forward = measured["value", how].median
            row["forward_seconds"] = forward
            row["backward_by_forward"] = (measured["both", how].median - forward) / forward
