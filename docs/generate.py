"""Writes the generated pages and figures: ``python docs/generate.py``. With ``--check`` it only says which are old."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS), str(DOCS.parent)]

from _api import api_page  # noqa: E402
from _benchmarks import figures, goals_page, suite_page  # noqa: E402
from _charts import Chart, can_draw, shows, svg  # noqa: E402
from _compat import compatibility_page  # noqa: E402
from _gallery import flights_figures, flights_page  # noqa: E402
from _tables import environment_page, kernels_page, ops_page, reductions_page  # noqa: E402

from kernops.bench.goals import GOALS  # noqa: E402
from kernops.bench.suites import SUITES  # noqa: E402

#: Page -> what writes it.
PAGES: dict[str, Callable[[], str]] = {
    "reference/ops.md": ops_page,
    "reference/reductions.md": reductions_page,
    "reference/kernels.md": kernels_page,
    "reference/environment.md": environment_page,
    "reference/api.md": api_page,
    "compatibility.md": compatibility_page,
    "gallery/flights.md": flights_page,
    **{f"benchmarks/{name}.md": (lambda name=name: suite_page(name)) for name in SUITES},
    **{f"benchmarks/goals-{device}.md": (lambda device=device: goals_page(device)) for device in GOALS},
}


def charts() -> dict[str, Chart]:
    """Figure -> what it shows."""
    goals = {f"benchmarks/{file}": chart for device in GOALS for file, chart in figures(device).items()}
    return {**goals, **{f"gallery/{file}": chart for file, chart in flights_figures().items()}}


def outdated() -> list[str]:
    """Pages whose committed text is not what would be written now, and figures of other data."""
    pages = [page for page, write in PAGES.items() if _text(DOCS / page) != write()]
    return pages + [figure for figure, chart in charts().items() if not shows(_text(DOCS / figure), chart)]


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def main(arguments: list[str]) -> int:
    old, check = outdated(), "--check" in arguments
    left = 0
    for name in old:
        drawn = name.endswith(".svg")
        if check:
            print(f"out of date: docs/{name}")
        elif drawn and not can_draw():
            print(f"not drawn, as matplotlib is missing: docs/{name}")
            left = 1
        else:
            (DOCS / name).write_text(svg(charts()[name]) if drawn else PAGES[name](), encoding="utf-8")
            print(f"written: docs/{name}")
    return int(bool(old)) if check else left


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
