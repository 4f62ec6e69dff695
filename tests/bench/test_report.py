"""Tables of results."""

from __future__ import annotations

import pytest

from kernops.bench import report
from kernops.bench.problem import Config

ENVIRONMENT = {
    "cpu": "A processor", "cores": 2, "torch_threads": 2, "python": "3.11", "packages": {"torch": "2.9"},
    "load_average": 0.1, "date": "2026-01-01",
}  # fmt: skip


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (1.5, "1.5 s"),
        (0.0214, "21.4 ms"),
        (3.2e-5, "32 µs"),
        (4e-8, "0.04 µs"),
        (12345.0, "12345 s"),
        (0, "0 s"),
    ],
)
def test_seconds(value, text):
    assert report.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(None, "–"), (0, "0 B"), (999, "999 B"), (2.5e6, "2.5 MB"), (3.2e10, "32 GB")]
)
def test_size(value, text):
    assert report.size(value) == text


def rows(*more: dict, **config) -> list[dict]:
    base = {"config": Config("gaussian", 10_000, **config).to_json(), "missing": ""}
    ours: dict = {"contender": "kernops", "seconds": 0.01, "ratio": 1.0, "error": 2e-7, "note": "LazyTensor",
            "first_call_cold": 1.2, "first_call_warm": 0.02, "peak_bytes": 40_000}  # fmt: skip
    peer: dict = {
        "contender": "torch",
        "seconds": 0.139,
        "ratio": 13.9,
        "error": 5e-7,
        "peak_bytes": 8e7,
        "note": "matmul",
    }
    absent: dict = {"contender": "keops", "missing": "not installed"}
    return [{**base, **row} for row in (ours, peer, absent, *more)]


def result(*more: dict, command=("gaussian", "--n", "10000"), **config) -> dict:
    return {"command": list(command), "environment": ENVIRONMENT, "results": rows(*more, **config)}


def test_text():
    lines = report.text(result()).splitlines()
    assert lines[0].startswith("gaussian, D=3, float32, cpu: a_i = ")
    assert " ".join(lines[1].split()) == "points by time ratio error first call cold / warm peak memory note"
    assert " ".join(lines[3].split()) == "10,000 kernops 10 ms 1.00 2.0e-07 1.2 s / 20 ms 40 kB LazyTensor"
    assert lines[4].split()[2:5] == ["139", "ms", "13.90"]
    assert lines[5].endswith("not installed")
    assert "A processor, 2 cores" in lines[6]


def test_the_dimension_is_a_column_where_there_are_several():
    other = {"contender": "kernops", "config": Config("gaussian", 10_000, d=64).to_json(), "seconds": 0.1}
    assert report.text(result(other)).splitlines()[1].split()[:2] == ["points", "D"]


def test_titles():
    assert "value and gradient by x, y" in report.title(result(backward="xy"))
    assert "rhs=4" in report.title(result(rhs=4))
    assert report.title(result(command=("overhead",))).startswith("a call on")


def test_markdown_names_the_machine_once():
    text = report.markdown([result(), result(dtype="float64")])
    assert text.count("A processor") == 1
    assert text.count("### gaussian") == 2
    assert "```\npython -m kernops.bench gaussian --n 10000\n```" in text
    assert "| 10,000 | kernops | 10 ms | 1.00 |" in text
    assert text.endswith("|\n")
