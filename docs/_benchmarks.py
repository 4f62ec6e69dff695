"""Pages of measured results: one for each suite, one for each device's goals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from _charts import CHARTS, Chart

from kernops.bench import report
from kernops.bench.goals import CLIFF, FIXED_FLOPS, REFERENCE_GPU
from kernops.bench.machine import describe

FOLDER = Path(__file__).resolve().parent / "benchmarks"
Row = dict[str, Any]

SUITE_PAGE = """# Benchmark: {name}

*This page is written by `python docs/generate.py` from `docs/benchmarks/{name}.json`, which
`python -m kernops.bench suite {name} --json docs/benchmarks/{name}.json` measures.*

How times, errors and memory are measured is said in [How it is measured](index.md).

{results}"""

GOALS_PAGE = """# Goals: {device}

*This page is written by `python docs/generate.py` from `docs/benchmarks/goals-{device}.json`, which
`python -m kernops.bench all --device {device} --json docs/benchmarks/goals-{device}.json` measures.*

What the engine is to reach, and what it reaches. `× peer` is the peer's time over that of kernops; of several peers the
fastest counts. Times in seconds are targets for an {gpu}. "at least" is the least time by the model of
`kernops.explain`, with the unit of the processor that bounds it. How times and errors are measured is said in
[How it is measured](index.md).

{results}"""

SWEEPS = """## Time and memory over the number of points

{points}

{points_table}

## Time over the number of dimensions

No step from one D to the next may raise the time per flop more than {cliff:g} times; a pair counts 2·D + {fixed} flops,
the exponential and the sum in them.

{dimensions}

{dimensions_table}
"""


def measured(name: str) -> list[Row]:
    """The results of a file; none where there is no such file."""
    file = FOLDER / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else []


def suite_page(name: str) -> str:
    """The results of a suite, as measured last."""
    results = measured(name)
    return SUITE_PAGE.format(name=name, results=report.markdown(results) if results else "Not measured yet.\n")


def goals_page(device: str) -> str:
    """What of the goals of a device was reached when they were measured last."""
    results = measured(f"goals-{device}")
    text = _goals(device, results) if results else "Not measured yet.\n"
    return GOALS_PAGE.format(device=device, gpu=REFERENCE_GPU, results=text)


def _goals(device: str, results: list[Row]) -> str:
    goals = [r for r in results if not r["goal"]["sweep"]]
    machine = f"Measured on {describe(results[0]['environment'])}.\n"
    table = report.markdown_cells(report.goal_table(goals)) if goals else "No row was measured."
    return "\n".join([machine, table, "", _sweeps(device, results)])


def _sweeps(device: str, results: list[Row]) -> str:
    rows = {sweep: [row for r in results if r["goal"]["sweep"] == sweep for row in r["results"]]
            for sweep in ("points", "dimensions")}  # fmt: skip
    if not all(rows.values()):
        return ""
    figures = {name: f"![{name}]({figure_name(device, name)})" for name in CHARTS}
    return SWEEPS.format(
        points=f"{figures['points']}\n{figures['memory']}",
        dimensions=figures["dimensions"],
        cliff=CLIFF,
        fixed=FIXED_FLOPS,
        **{f"{sweep}_table": report.markdown_table(found) for sweep, found in rows.items()},
    )


def figure_name(device: str, name: str) -> str:
    return f"goals-{device}-{name}.svg"


def figures(device: str) -> dict[str, Chart]:
    """File name -> what it shows, for a device whose goals were measured."""
    results = measured(f"goals-{device}")
    if not (results and _sweeps(device, results)):
        return {}
    return {figure_name(device, name): chart(results) for name, chart in CHARTS.items()}
