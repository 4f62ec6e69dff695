"""`python -m kernops demo`: kernel jobs on real data without the table of pairs, with pictures and figures."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from .. import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    options = _parser().parse_args(argv)
    started = time.perf_counter()
    # Here, so that --help answers at once.
    from ..estimators._base import device_of
    from .jobs import Setting

    try:
        setting = Setting(device_of(options.device), options.quick, options.out)
        setting.out.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        print(f"kernops demo: {error}", file=sys.stderr)
        return 2
    if setting.backend == "tiled":
        print(
            "kernops demo: no compiled back end can run here (see the warning above). The plain torch one gives the "
            "same numbers, but takes " + ("minutes" if setting.quick else "hours: try --quick"),
            file=sys.stderr,
        )
    results = []
    for job in _jobs():
        for result in job(setting):
            results.append(asdict(result))
    seconds = time.perf_counter() - started
    print(table(results))
    print()
    for result in results:
        print(f"{result['job']}: " + ", ".join(f"{what} {value:.4g}" for what, value in result["checks"].items()))
    print(f"\n{seconds:.0f} s in all; pictures and results.json are in {setting.out}")
    report = {
        "kernops": __version__,
        "machine": platform.platform(),
        "device": str(setting.device),
        "quick": setting.quick,
        "seconds": seconds,
        "jobs": results,
    }
    (setting.out / "results.json").write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    wrong = [result["job"] for result in results if not result["agrees"]]
    if wrong:
        print(f"kernops demo: unlike scikit-learn's: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m kernops demo",
        description="Colours of two photographs (every pixel against every pixel), a photograph restored from 30 % of "
        "its pixels, handwritten digits, and the road around a car from its six cameras. Writes pictures and "
        "results.json, and prints a table.",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("kernops-demo"), help="folder for pictures (default: %(default)s)"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="photographs at half size: seconds instead of minutes")
    return parser


def _jobs() -> Iterator[Callable]:
    from . import bev, colours, digits, inpainting
    from .jobs import PHOTOS

    for name in PHOTOS:
        yield lambda setting, name=name: colours.run(setting, name)
    yield lambda setting: [inpainting.run(setting)]
    yield lambda setting: [digits.run(setting)]
    yield lambda setting: [bev.run(setting)]


#: Columns of the table: heading, and the text of a result.
COLUMNS: dict[str, Callable[[dict], str]] = {
    "job": lambda r: r["job"],
    "pairs": lambda r: f"{r['pairs']:.2g}",
    "time": lambda r: f"{r['seconds']:.1f} s",
    "peak memory": lambda r: _gigabytes(r["peak_bytes"]),
    "table never built": lambda r: _gigabytes(r["table_bytes"]),
    "back end": lambda r: r["backend"],
}


def table(results: Sequence[dict]) -> str:
    """The results as text, a line each."""
    lines = [list(COLUMNS), *([text(r) for text in COLUMNS.values()] for r in results)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    texts = ["  ".join([a.ljust(widths[0]), *(c.rjust(w) for c, w in zip(rest, widths[1:]))]) for a, *rest in lines]
    return "\n".join([texts[0], "-" * len(texts[0]), *texts[1:]])


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size < 1e10 else f"{size / 1e9:.0f} GB"
