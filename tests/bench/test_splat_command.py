"""Measuring splats: the command line, the rows of the table, and what happens when a contender fails."""

from __future__ import annotations

import json

import pytest
import torch

from kernops.bench import __main__ as command
from kernops.bench import graphs, protocol, report, splat_command, splat_measure, splat_peers
from kernops.bench.splat import SETTINGS, SplatConfig
from kernops.bench.splat_peers import Built, Contender
from kernops.bench.suites import SUITES
from tests.bench.small_splat import TINY, small_problem

QUICK = ["splat", "--setting", "tiny", "--repeats", "1", "--device", "cpu", "--backend", "tiled", "--no-probes"]


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setattr(protocol, "SAMPLE_SECONDS", 0.0)
    monkeypatch.setitem(SETTINGS, "tiny", TINY)


def test_a_run_prints_a_table_and_writes_json(tmp_path, capsys):
    file = tmp_path / "out.json"
    assert command.main([*QUICK, "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    (result,) = json.loads(file.read_text())
    rows = {row["contender"]: row for row in result["results"]}
    assert list(rows) == [*splat_peers.OURS, "torch", "lss"]  # the others need a GPU
    for name, row in rows.items():
        assert name in printed
        assert row["error"] < 1e-6
        assert row["error_max"] < (1e-2 if name == "lss" else 1e-5)
        assert row["seconds"] > 0 and row["eager"]["seconds_min"] > 0 and "graph" not in row
        assert row["how"] == "eager"
    assert rows["kernops cumsum"]["ratio"] == 1.0
    assert rows["torch"]["ratio"] == rows["torch"]["seconds"] / rows["kernops cumsum"]["seconds"]
    assert command.main(["show", str(file)]) == 0
    assert capsys.readouterr().out.split() == printed.split()
    assert "| kernops cumsum |" in report.markdown([result])


def test_a_run_with_gradients():
    result = command.run([*QUICK, "--backward", "--peer", "torch", "--variant", "atomic,cumsum"])
    rows = result["results"]
    assert [row["contender"] for row in rows] == ["kernops atomic", "kernops cumsum", "torch"]
    for row in rows:
        assert max(row["error"], row["error_depth"], row["error_feat"]) < 1e-6
        assert row["forward_eager"]["seconds"] == row["forward_seconds"]
        difference = row["seconds"] - row["forward_seconds"]
        assert row["backward_by_forward"] == pytest.approx(difference / row["forward_seconds"])
    assert "value and gradients" in report.title(result)
    assert "ratio: time over that of kernops atomic" in report.text(result)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--setting", "kitti"], "invalid choice: 'kitti'"),
        (["--peer", "keops"], "'keops' is not one of torch, lss"),
        (["--variant", "auto"], "'auto' is not one of cumsum, atomic, histogram"),
        (["--plan", "old"], "'old' is not one of cached, refreshed, new"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
    ],
)
def test_wrong_options(arguments, message, capsys):
    with pytest.raises(SystemExit):
        command.main(["splat", *arguments])
    assert message in capsys.readouterr().err


def test_no_variant(capsys):
    assert command.main(["splat", "--device", "cpu", "--variant", "none"]) == 2
    assert "--variant: at least one of cumsum" in capsys.readouterr().err


@pytest.fixture
def own_problem(monkeypatch):
    """Cells that need no rig."""
    monkeypatch.setattr(splat_measure, "make_problem", lambda config: small_problem(dtype=config.dtype))


def measured(monkeypatch, built) -> dict:
    """The row of a peer that is ``built(problem)``."""
    monkeypatch.setitem(splat_peers.CONTENDERS, "other", Contender("other", lambda problem, choice: built(problem)))
    (row,) = splat_measure.measure_splat(SplatConfig("tiny"), ["other"], repeats=1, probes=False)
    return row


def test_a_peer_that_is_wrong_shows_it(monkeypatch, own_problem):
    row = measured(monkeypatch, lambda problem: Built(lambda: problem.grad * 0))
    assert row["error"] == row["error_max"] == 1.0
    assert row["ratio"] is None  # there is nothing of ours to compare with


def test_a_peer_that_raises(monkeypatch, own_problem):
    def build(problem):
        raise RuntimeError("no kernel for this\nsecond line")

    assert measured(monkeypatch, build)["missing"] == "RuntimeError: no kernel for this"


def test_a_failure_of_ours_is_not_hidden(monkeypatch, own_problem):
    def fail(problem, choice):
        raise RuntimeError("ours")

    monkeypatch.setitem(splat_peers.CONTENDERS, "kernops cumsum", Contender("kernops cumsum", fail))
    with pytest.raises(RuntimeError, match="ours"):
        splat_measure.measure_splat(SplatConfig("tiny"), ["kernops cumsum"], repeats=1, probes=False)


def test_an_unknown_contender(own_problem):
    with pytest.raises(ValueError, match="contender must be one of kernops cumsum.*got 'numpy'"):
        splat_measure.measure_splat(SplatConfig("tiny"), ["numpy"])


def test_replays_count_for_the_calls_in_them(monkeypatch):
    """A graph's time is that of its calls together; who has no graph is compared with eager calls."""
    clock = {"call": 8.0, "replay": 20.0}
    monkeypatch.setitem(protocol.CLOCKS, "cpu", lambda call, count: clock[call()])
    monkeypatch.setattr(protocol, "PAUSE_SECONDS", 0.0)
    replay = graphs.Replay(None, 10, None)
    monkeypatch.setattr(graphs.Replay, "__call__", lambda self: "replay")
    calls = {"kernops cumsum": {"value": lambda: "call"}, "torch": {"value": lambda: "call"}}
    timings = splat_measure._time(calls, {("kernops cumsum", "value"): replay}, SplatConfig("tiny"), 2, 100.0)
    assert timings["kernops cumsum", "value", "graph"].samples == [2.0, 2.0]
    rows: dict = {name: {} for name in calls}
    splat_measure._fill(rows, timings)
    assert (rows["kernops cumsum"]["seconds"], rows["kernops cumsum"]["how"]) == (2.0, "graph")
    assert (rows["torch"]["seconds"], rows["torch"]["ratio"]) == (8.0, 1.0)


def test_what_blocks_the_gpu_is_not_captured_and_says_why(own_problem):
    problem = small_problem()
    built = splat_peers.build("lss", problem)
    row: dict = {"missing": "", "note": built.note}
    assert splat_measure._capture("lss", built, {"value": built.forward}, row, problem, {}) == {}
    assert row["not_captured"] == "its selections wait for the GPU"
    assert report.SPLAT_COLUMNS["note"](row).endswith("difference; not captured: its selections wait for the GPU")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torch", "kernops cumsum"])
def test_memory_in_a_process_of_its_own(name):
    """Lifting all points takes the frustum tensor; splatting does not."""
    choice = "whole frustum" if name == "torch" else None
    peak = splat_measure.peak(name, Built(lambda: torch.empty(0), choice=choice), SplatConfig("bevdet59"))
    if peak is None:
        pytest.skip("this system does not reset the peak of memory")
    frustum = 249_216 * 80 * 4
    assert peak >= 0.9 * frustum if name == "torch" else peak < 0.5 * frustum


@pytest.mark.parametrize("line", [line for name in SUITES if name.startswith("splat") for line in SUITES[name]])
def test_lines_of_the_suites_are_accepted(line):
    options = command.parser().parse_args(line.split())
    assert options.command == "splat" and options.setting in SETTINGS


def test_the_whole_command_line(monkeypatch):
    seen: dict = {}

    def measure(config, names, **more):
        seen.update(config=config, names=list(names), **more)
        return []

    monkeypatch.setattr(splat_command, "measure_splat", measure)
    line = "splat --setting bevdet118 --variant histogram,atomic --plan new,cached --peer lss --dtype bfloat16"
    options = command.parser().parse_args([*line.split(), "--repeats", "3", "--budget", "5", "--no-probes"])
    assert splat_command.run(options, "cpu", print) == []
    assert seen["config"] == SplatConfig("bevdet118", "bfloat16", False, "cpu")
    ours = ["kernops histogram, plan new", "kernops atomic, plan new", "kernops histogram", "kernops atomic"]
    assert seen["names"] == [*ours, "lss"]
    assert (seen["repeats"], seen["budget"], seen["probes"]) == (3, 5.0, False)
