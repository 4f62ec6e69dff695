"""One benchmark: every contender checked, probed, timed against the others, and compared with float64."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from typing import Any

from . import probe
from .cases import CASES
from .peers import CONTENDERS, Built, start
from .problem import Config, make_data, sample_rows
from .protocol import BUDGET_SECONDS, interleave

log = logging.getLogger("kernops.bench")
Row = dict[str, Any]
Say = Callable[[str], None]

#: What is measured in processes of its own, unless told otherwise.
PROBES = ("first", "memory")
#: What a library may raise where it cannot do a case; anything else is a fault of ours and shall be seen.
TROUBLE = (RuntimeError, ValueError, TypeError, NotImplementedError, ImportError, OSError)


def measure(
    config: Config,
    peers: Iterable[str],
    *,
    repeats: int = 7,
    probes: Collection[str] = PROBES,
    budget: float = BUDGET_SECONDS,
    say: Say = lambda text: None,
) -> list[Row]:
    """Measure kernops and ``peers`` on one problem.

    Args:
        config: the problem.
        peers: names of contenders.
        repeats: samples of each.
        probes: which of ``PROBES`` to measure, in processes of their own.
        budget: seconds that a contender may take before it gets fewer samples.
        say: told what is being done.

    Returns:
        One row a contender, in the order given, kernops first; ready for JSON. A peer that cannot take part has its
        reason under ``"missing"``.

    Raises:
        ValueError: there is no such peer.
        probe.Failed: kernops itself gave no answer in a process of its own.
    """
    names = ["kernops", *(p for p in peers if p != "kernops")]
    rows: dict[str, Row] = {
        name: {"contender": name, "config": config.to_json(), "missing": _missing(name, config)} for name in names
    }
    for name, row in rows.items():
        if "first" in probes and not row["missing"] and CONTENDERS[name].compiles:
            say(f"{name}: first call, cold and warm cache")
            _probe(row, lambda n=name: probe.first_calls(n, config, CONTENDERS[n].cache_variable))  # type: ignore[misc]
    together = {name: row for name, row in rows.items() if name not in CONTENDERS or not CONTENDERS[name].environment}
    built = _build_all(together, config, say)
    say("timing " + ", ".join(built))
    for name, timing in interleave({n: b.call for n, b in built.items()}, config.device, repeats, budget).items():
        rows[name].update(timing.to_json())
        if "memory" in probes:
            say(f"{name}: peak memory")
            _probe(rows[name], lambda n=name: _memory(n, config, built[n]))  # type: ignore[misc]
    for name in rows.keys() - together.keys():
        _alone(rows[name], config, {"repeats": repeats, "budget": budget}, say)
    ours = rows["kernops"].get("seconds")
    for row in rows.values():
        if ours and "seconds" in row:
            row["ratio"] = row["seconds"] / ours
    return list(rows.values())


def _memory(name: str, config: Config, built: Built) -> Row:
    """The peak of a call: on a GPU the allocator tells it, on a CPU only the system, about a process of its own."""
    if config.device == "cuda":
        return {"peak_bytes": probe.cuda_peak(built.call)}
    return probe.ask("memory", name, config, choice=built.choice)


def _alone(row: Row, config: Config, limits: dict[str, Any], say: Say) -> None:
    """Time a contender in a process of its own, with the variables that its libraries read when they are loaded."""
    if row["missing"]:
        return
    name = row["contender"]
    say(f"{name}: in a process of its own")
    variables = dict(CONTENDERS[name].environment)
    _probe(row, lambda: probe.ask("time", name, config, variables, choice=limits))
    said = ", ".join(f"{k}={v}" for k, v in variables.items())
    row["note"] = f"{row.get('note', '')}, in a process of its own with {said}"


def _missing(name: str, config: Config) -> str:
    if name not in CONTENDERS:
        raise ValueError(f"peer must be one of {', '.join(CONTENDERS)}; got {name!r}")
    return CONTENDERS[name].missing(config)


def _probe(row: Row, ask: Callable[[], dict]) -> None:
    """Run a probe. A peer whose process crashed is left out of the timing: it would take this process along."""
    try:
        row.update(ask())
    except probe.Failed as error:
        row["missing"] = str(error)
        if row["contender"] == "kernops":
            raise


def _build_all(rows: dict[str, Row], config: Config, say: Say) -> dict[str, Built]:
    """The contenders that run, each called once on data of its own and compared with float64."""
    data = make_data(config)
    sample = sample_rows(config)
    exact = data.double_rows(sample)
    ready = {}
    for name, row in rows.items():
        if row["missing"]:
            continue
        say(f"{name}: preparing")
        try:
            built, got = start(name, config, data)
        except TROUBLE as error:
            log.debug("%s cannot do %s", name, config, exc_info=True)
            row["missing"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            if name == "kernops":  # a peer may fail, we may not
                raise
            continue
        row["note"] = built.note
        row.update(CASES[config.case].error([t.detach()[sample] for t in got], exact, config))
        ready[name] = built
    return ready
