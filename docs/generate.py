"""Writes the generated pages: ``python docs/generate.py``. With ``--check`` it only says which are out of date."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS), str(DOCS.parent)]

from _api import api_page  # noqa: E402
from _compat import compatibility_page  # noqa: E402
from _tables import environment_page, kernels_page, ops_page, reductions_page  # noqa: E402

from kernops.bench import report  # noqa: E402
from kernops.bench.suites import SUITES  # noqa: E402

BENCHMARK_PAGE = """# Benchmark: {name}

*This page is written by `python docs/generate.py` from `docs/benchmarks/{name}.json`, which
`python -m kernops.bench suite {name} --json docs/benchmarks/{name}.json` measures.*

How times, errors and memory are measured is said in [How it is measured](index.md).

{results}"""


def benchmark_page(name: str) -> str:
    """The results of a suite, as measured last."""
    file = DOCS / "benchmarks" / f"{name}.json"
    results = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    return BENCHMARK_PAGE.format(name=name, results=report.markdown(results) if results else "Not measured yet.\n")


#: Page -> what writes it.
PAGES: dict[str, Callable[[], str]] = {
    "reference/ops.md": ops_page,
    "reference/reductions.md": reductions_page,
    "reference/kernels.md": kernels_page,
    "reference/environment.md": environment_page,
    "reference/api.md": api_page,
    "compatibility.md": compatibility_page,
    **{f"benchmarks/{name}.md": (lambda name=name: benchmark_page(name)) for name in SUITES},
}


def outdated() -> list[str]:
    """Pages whose committed text is not what would be written now."""
    return [page for page, write in PAGES.items() if not _has(DOCS / page, write())]


def _has(path: Path, text: str) -> bool:
    return path.exists() and path.read_text(encoding="utf-8") == text


def main(arguments: list[str]) -> int:
    old = outdated()
    for page in old:
        print(f"{'out of date' if '--check' in arguments else 'written'}: docs/{page}")
        if "--check" not in arguments:
            (DOCS / page).write_text(PAGES[page](), encoding="utf-8")
    return int(bool(old) and "--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
