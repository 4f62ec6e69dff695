"""Pages and figures of the goals, made from results that were never measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kernops.bench.problem import Config
from tests.docs.site import DOCS, module

generate, benchmarks, charts = module("generate"), module("_benchmarks"), module("_charts")

ENVIRONMENT = {"cpu": "A processor", "cores": 2, "torch_threads": 2, "python": "3.11", "packages": {"torch": "2.9"},
               "load_average": 0.1, "date": "2026-01-01"}  # fmt: skip


def result(key: str, config: Config, seconds: float, sweep: str = "", peer: float | None = None, **goal: Any) -> dict:
    row = {"contender": "kernops", "config": config.to_json(), "missing": "", "seconds": seconds, "ratio": 1.0,
           "floor": seconds / 2, "bound": "vector units", "peak_bytes": 1000 * config.n}  # fmt: skip
    rows = [row]
    if peer is not None:
        rows.append({"contender": "keops", "config": config.to_json(), "missing": "", "seconds": peer,
                     "ratio": peer / seconds, "peak_bytes": 0})  # fmt: skip
    return {"command": ["all", "--only", key], "environment": ENVIRONMENT, "results": rows,
            "goal": {"key": key, "sweep": sweep, "checks": [], "met": None, **goal}}  # fmt: skip


RESULTS = [
    result("gaussian 10k", Config("gaussian", 10_000), 0.01, peer=0.3, met=True,
           checks=[{"what": "× keops", "target": 20, "found": 30.0, "met": True}]),
    *(result(f"sweep N={n}", Config("gaussian", n), n**2 / 1e10, "points", peer=n**2 / 1e9) for n in (1000, 10_000)),
    *(result(f"sweep D={d}", Config("gaussian", 5000, d=d), d / 1e3, "dimensions") for d in (8, 64)),
]  # fmt: skip


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of pages in which the goals of a CPU were measured."""
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    (folder / "goals-cpu.json").write_text(json.dumps(RESULTS))
    monkeypatch.setattr(benchmarks, "FOLDER", folder)
    monkeypatch.setattr(generate, "DOCS", tmp_path)
    monkeypatch.setattr(generate, "flights_figures", dict)
    monkeypatch.setattr(generate, "PAGES", {"benchmarks/goals-cpu.md": lambda: benchmarks.goals_page("cpu")})
    return folder


def test_the_page_has_goals_sweeps_and_figures(measured: Path):
    page = benchmarks.goals_page("cpu")
    assert "| gaussian 10k | 10 ms | 5 ms, vector units | × keops 30 (target 20) | yes | keops 300 ms |" in page
    assert "Measured on A processor, 2 cores" in page
    assert "| 1,000 | kernops | 100 µs |" in page and "| 64 | kernops | 64 ms |" in page
    assert "![memory](goals-cpu-memory.svg)" in page
    assert "Not measured yet" in benchmarks.goals_page("cuda")


def test_curves_are_what_was_measured():
    points = charts.CHARTS["points"](RESULTS)
    assert {c.name: c.points for c in points.curves} == {
        "kernops": ((1000.0, 1e-4), (10_000.0, 1e-2)),
        "keops": ((1000.0, 1e-3), (10_000.0, 1e-1)),
        "least, by the model": ((1000.0, 5e-5), (10_000.0, 5e-3)),
    }
    (memory,) = charts.CHARTS["memory"](RESULTS).curves  # nothing is no point of a logarithmic axis
    assert memory.points == ((1000.0, 1e6), (10_000.0, 1e7))
    assert charts.CHARTS["dimensions"](RESULTS).title == "Gaussian sum, 5,000 points"


def test_figures_are_drawn_once_for_the_same_data(measured: Path, capsys):
    pytest.importorskip("matplotlib")
    assert generate.main(["--check"]) == 1
    assert generate.main([]) == 0
    written = capsys.readouterr().out
    for name in charts.CHARTS:
        text = (measured / f"goals-cpu-{name}.svg").read_text()
        assert f"written: docs/benchmarks/goals-cpu-{name}.svg" in written
        assert "kernops</text>" in text and "<dc:date>" not in text and len(text) < 60_000
    assert generate.main(["--check"]) == 0
    chart = charts.CHARTS["points"](RESULTS)
    assert charts.svg(chart) == charts.svg(chart)
    (measured / "goals-cpu.json").write_text(json.dumps(RESULTS[:-1]))
    assert "benchmarks/goals-cpu-dimensions.svg" in generate.outdated()
    assert "benchmarks/goals-cpu-points.svg" not in generate.outdated()


def test_without_matplotlib_the_page_is_written_and_the_figures_are_named(measured: Path, capsys, monkeypatch):
    monkeypatch.setattr(generate, "can_draw", lambda: False)
    assert generate.main([]) == 1
    printed = capsys.readouterr().out
    assert "written: docs/benchmarks/goals-cpu.md" in printed
    assert "not drawn, as matplotlib is missing: docs/benchmarks/goals-cpu-points.svg" in printed


def test_committed_figures_show_the_measured_data():
    for figure, chart in generate.charts().items():
        text = (DOCS / figure).read_text(encoding="utf-8")
        assert charts.shows(text, chart), f"{figure}: run `python docs/generate.py`"
