"""The command line, and what happens when a contender is missing, fails or crashes."""

from __future__ import annotations

import json
import signal

import pytest

from kernops.bench import __main__ as command
from kernops.bench import measure as measuring
from kernops.bench import peers, probe, protocol
from kernops.bench.peers import Built, Contender
from kernops.bench.problem import Config, Data
from kernops.bench.suites import SUITES

QUICK = ["--n", "200", "--repeats", "1", "--device", "cpu", "--no-probes"]


@pytest.fixture(autouse=True)
def short_samples(monkeypatch):
    monkeypatch.setattr(protocol, "SAMPLE_SECONDS", 0.0)
    monkeypatch.setitem(peers.TRY_PAIRS, "cpu", 1)
    monkeypatch.setattr(peers, "CHUNKS", (64,))


def add(monkeypatch, name: str, build=None, modules=("torch",), **more) -> None:
    monkeypatch.setitem(peers.CONTENDERS, name, Contender(name, modules, build or _never, **more))


def _never(case, config, data, choice):
    raise AssertionError("must not be called")


def test_a_run_prints_a_table_and_writes_json(tmp_path, capsys):
    file = tmp_path / "out.json"
    assert command.main(["gaussian", *QUICK, "--peer", "torch", "--d", "2,5", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "gaussian" in printed and "torch" in printed
    (result,) = json.loads(file.read_text())
    assert result["command"] == ["gaussian", *QUICK, "--peer", "torch", "--d", "2,5"]
    assert [(r["contender"], r["config"]["d"]) for r in result["results"]] == [
        ("kernops", 2), ("torch", 2), ("kernops", 5), ("torch", 5)]  # fmt: skip
    for row in result["results"]:
        assert row["error"] < 1e-5
        assert row["seconds"] > 0 and len(row["samples"]) == 1
    assert result["environment"]["packages"]["torch"]
    assert command.main(["show", str(file)]) == 0
    assert capsys.readouterr().out.split() == printed.split()


@pytest.mark.parametrize(
    "arguments", [["logsumexp", "--backward", "x,y"], ["argkmin", "--k", "3"], ["gaussian", "--backward"]]
)
def test_every_case_runs(arguments, capsys):
    assert command.main([*arguments, *QUICK, "--peer", "none"]) == 0
    assert "kernops" in capsys.readouterr().out


def test_overhead_runs(capsys):
    assert command.main(["overhead", "--repeats", "1", "--device", "cpu", "--peer", "none"]) == 0
    printed = capsys.readouterr().out
    assert "kernops LazyTensor" in printed and "kernops Genred" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gaussian", "--n", "many"], "expected positive numbers"),
        (["gaussian", "--n", "0"], "expected positive numbers"),
        (["gaussian", "--peer", "numpy"], "'numpy' is not one of torch"),
        (["gaussian", "--backward", "z"], "'z' is not one of x, y, b"),
    ],
)
def test_wrong_options(arguments, message, capsys):
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["argkmin", "--backward", "x"], "argkmin has no gradient"),
        (["logsumexp", "--backward", "b"], "logsumexp has no right-hand side"),
        (["argkmin", "--n", "5", "--k", "6"], "--k must be between 1 and the number of points, 5; got 6"),
    ],
)
def test_impossible_problems(arguments, message, capsys):
    assert command.main(arguments) == 2
    assert message in capsys.readouterr().err


def measure(name: str, **more) -> dict:
    rows = measuring.measure(Config("gaussian", 100), [name], repeats=1, **{"probes": (), **more})
    assert rows[0]["contender"] == "kernops" and rows[0]["seconds"] > 0
    return rows[1]


def test_a_peer_that_is_not_installed(monkeypatch):
    add(monkeypatch, "absent", modules=("no_such_library.torch",))
    assert measure("absent")["missing"] == "not installed"


def test_a_peer_that_lacks_the_case(monkeypatch):
    add(monkeypatch, "narrow", cases=("argkmin",))
    assert measure("narrow")["missing"] == "does not do gaussian"
    add(monkeypatch, "narrow", dtypes=("float64",))
    assert measure("narrow")["missing"] == "does not do float32"


def test_a_peer_that_raises(monkeypatch):
    def build(case, config, data, choice):
        raise RuntimeError("no kernel for this\nsecond line")

    add(monkeypatch, "broken", build)
    assert measure("broken")["missing"] == "RuntimeError: no kernel for this"


def test_a_peer_whose_process_crashes_is_left_out(monkeypatch):
    def crash(name, config, variable):
        if name == "kernops":
            return {}
        raise probe.Failed("crashed (SIGSEGV)")

    monkeypatch.setattr(probe, "first_calls", crash)
    monkeypatch.setattr(probe, "ask", lambda *args, **more: {"peak_bytes": 1})
    add(monkeypatch, "deadly", compiles=True)
    assert measure("deadly", probes=measuring.PROBES)["missing"] == "crashed (SIGSEGV)"


def test_a_failure_of_ours_is_not_hidden(monkeypatch, capsys):
    def fail(*args, **more):
        raise probe.Failed("NameError: name 'x' is not defined")

    monkeypatch.setattr(probe, "first_calls", fail)
    assert command.main(["gaussian", "--n", "100", "--device", "cpu", "--peer", "none"]) == 1
    assert "kernops: NameError" in capsys.readouterr().err


def test_an_unknown_peer():
    with pytest.raises(ValueError, match="peer must be one of kernops, torch.*got 'numpy'"):
        measuring.measure(Config("gaussian", 10), ["numpy"])


def test_a_peer_that_is_wrong_shows_it(monkeypatch):
    def build(case, config, data: Data, choice):
        return Built(lambda: [data.b * 0], "zeros")

    add(monkeypatch, "wrong", build)
    assert measure("wrong")["error"] == 1.0


def test_a_crash_is_reported_with_its_signal(monkeypatch):
    real = probe.subprocess.run
    monkeypatch.setattr(
        probe.subprocess, "run", lambda command, **more: real(["/bin/sh", "-c", "kill -SEGV $$"], **more)
    )
    with pytest.raises(probe.Failed, match=signal.SIGSEGV.name):
        probe.ask("first", "keops", Config("gaussian", 10))


def test_a_failing_probe_gives_its_last_line():
    with pytest.raises(probe.Failed, match="KeyError: 'nobody'"):
        probe.ask("first", "nobody", Config("gaussian", 10))


def test_first_calls_and_memory_of_another_process():
    found = probe.first_calls("kernops", Config("gaussian", 50), "KERNOPS_CACHE_DIR")
    assert set(found) == {f"{name}_{state}" for name in ("import", "first_call", "first_call_total")
                          for state in ("cold", "warm")}  # fmt: skip
    peak = probe.ask("memory", "torch", Config("gaussian", 3000), choice=("direct", 1500))["peak_bytes"]
    if peak is None:
        pytest.skip("this system does not reset the peak of memory")
    assert 1500 * 3000 * 3 * 4 < peak < 20 * 1500 * 3000 * 3 * 4


def test_the_cache_of_a_cold_call_is_empty_and_kept_for_the_warm_one(monkeypatch):
    seen = []

    def ask(what, name, config, environment):
        (folder,) = environment.values()
        path = probe.Path(folder)
        seen.append((sorted(p.name for p in path.iterdir()), folder))
        (path / "compiled").touch()
        return {"first_call": 1.0}

    monkeypatch.setattr(probe, "ask", ask)
    assert probe.first_calls("x", Config("gaussian", 10), "A_CACHE") == {"first_call_cold": 1.0, "first_call_warm": 1.0}
    assert [names for names, _ in seen] == [[], ["compiled"]]
    assert seen[0][1] == seen[1][1] and not probe.Path(seen[0][1]).exists()


@pytest.mark.parametrize("line", [line for suite in SUITES.values() for line in suite])
def test_suites_are_command_lines(line):
    options = command.parser().parse_args(line.split())
    assert options.device in ("cpu", "cuda")
