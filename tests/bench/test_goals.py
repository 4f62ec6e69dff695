"""The table of goals, how measurements are held against it, and the command that runs it."""

from __future__ import annotations

import json

import pytest

from kernops.bench import __main__ as command
from kernops.bench import all_command, goals, peers, protocol, report
from kernops.bench.cases import CASES
from kernops.bench.goals import GOALS, Goal, checks, chosen, cliff, met
from kernops.bench.peers import CONTENDERS
from kernops.bench.problem import Config

H200 = {"gpu": "NVIDIA H200, 132 multiprocessors"}
ROWS = [(device, goal) for device, table in GOALS.items() for goal in table]


@pytest.mark.parametrize(("device", "goal"), ROWS, ids=lambda x: getattr(x, "key", x))
def test_every_row_can_be_measured(device: str, goal: Goal):
    config = goal.config
    assert config.device == device and config.case in CASES
    assert not config.backward or CASES[config.case].differentiable
    assert config.front != "estimator" or CASES[config.case].estimator is not None
    for name in goal.peers:
        assert CONTENDERS[name].lacks(config) == "", f"{name} cannot do {config}"
    assert {name for group, _ in goal.ratios for name in group} <= set(goal.peers)
    assert "kernops" not in goal.peers


def test_rows_have_names_of_their_own():
    for table in GOALS.values():
        assert len({goal.key for goal in table}) == len(table)
        assert len({goal.config for goal in table if not goal.sweep}) == len([g for g in table if not g.sweep])


def test_choosing():
    assert [g.key for g in chosen("cpu", ["sweep N=1000"])] == ["sweep N=1000"]  # not N=10000: a whole name wins
    assert len(chosen("cpu", ["offset"])) == 2
    assert chosen("cuda") == list(GOALS["cuda"])
    with pytest.raises(ValueError, match="no row of cpu contains 'nothing'; the rows are gaussian 10k"):
        chosen("cpu", ["nothing"])


def row(name: str, seconds: float, ours: float = 1.0, **more) -> dict:
    return {"contender": name, "seconds": seconds, "ratio": seconds / ours, **more}


def verdicts(goal: Goal, rows: list[dict], environment=H200) -> dict[str, bool | None]:
    return {c.what: c.met for c in checks(goal, rows, environment)}


def test_times_are_for_one_gpu():
    goal = Goal("a", Config("gaussian", 10), seconds=1.5)
    assert verdicts(goal, [row("kernops", 1.0)]) == {"seconds": True}
    assert verdicts(goal, [row("kernops", 2.0)]) == {"seconds": False}
    assert verdicts(goal, [row("kernops", 1.0)], {"gpu": "another"}) == {"seconds": None}
    assert verdicts(goal, [{"contender": "kernops"}]) == {"seconds": None}


def test_ratios_to_one_peer_and_to_the_best_of_several():
    goal = Goal("a", Config("gaussian", 10), ratios=((("keops",), 10.0), (("faiss", "sklearn"), 2.0)))
    all_there = [row("kernops", 1.0), row("keops", 9.0), row("faiss", 3.0), row("sklearn", 2.5)]
    assert verdicts(goal, all_there) == {"× keops": False, "× faiss | sklearn": True}
    assert checks(goal, all_there, H200)[1].found == 2.5  # the fastest of them
    # the one that is missing might be the fastest, but cannot save a ratio that is too small
    assert verdicts(goal, [*all_there[:3], {"contender": "sklearn", "missing": "not installed"}]) == {
        "× keops": False, "× faiss | sklearn": None}  # fmt: skip
    assert verdicts(goal, [row("kernops", 1.0), row("faiss", 1.5)]) == {"× keops": None, "× faiss | sklearn": False}


def test_errors_of_value_and_gradient_and_recall():
    goal = Goal("a", Config("gaussian", 10), error=1e-6, recall=1.0)
    assert verdicts(goal, [row("kernops", 1.0, error=1e-7, error_grad_x=1e-5, recall=0.9999)]) == {
        "error": False, "recall": False}  # fmt: skip
    assert verdicts(goal, [row("kernops", 1.0, error=1e-7, error_grad_x=1e-7, recall=1.0)]) == {
        "error": True, "recall": True}  # fmt: skip


def test_a_goal_is_met_where_all_of_it_is():
    assert met([{"met": True}, {"met": True}]) is True
    assert met([{"met": True}, {"met": None}]) is None
    assert met([{"met": None}, {"met": False}]) is False
    assert met([]) is None


def test_a_cliff_is_a_step_of_the_time_per_flop():
    flops = [2 * d + goals.FIXED_FLOPS for d in (64, 128)]
    small, large = ({"config": {"n": 10, "d": d}, "seconds": f * s} for d, f, s in zip((64, 128), flops, (1, 1.9)))
    assert cliff(large, small).found == pytest.approx(1.9)
    assert cliff(large, small).met and not cliff({**large, "seconds": 2.1 * flops[1]}, small).met


@pytest.fixture
def small(monkeypatch):
    """Rows that take no time."""
    monkeypatch.setattr(protocol, "SAMPLE_SECONDS", 0.0)
    monkeypatch.setitem(peers.TRY_PAIRS, "cpu", 1)
    monkeypatch.setattr(peers, "CHUNKS", (64,))
    table = (
        Goal("first", Config("gaussian", 100), ("torch", "keops"), ratios=((("torch",), 1e-9), (("keops",), 1.0))),
        Goal("second", Config("argkmin", 100, offset=1000.0), recall=1.0),
        Goal("D=8", Config("gaussian", 100, d=8), sweep="dimensions"),
        Goal("D=16", Config("gaussian", 100, d=16), sweep="dimensions"),
    )
    monkeypatch.setitem(goals.GOALS, "cpu", table)


def run(*arguments: str) -> int:
    return command.main(["all", "--device", "cpu", "--repeats", "1", *arguments])


def test_the_command_measures_judges_and_writes(small, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(
        peers.CONTENDERS, "keops", peers.Contender("keops", ("no_such_library",), lambda *_: pytest.fail())
    )
    file = tmp_path / "all.json"
    assert run("--json", str(file)) == 0
    printed = capsys.readouterr().out
    results = json.loads(file.read_text())
    assert [r["goal"]["key"] for r in results] == ["first", "second", "D=8", "D=16"]
    assert [r["goal"]["met"] for r in results[:3]] == [None, True, None]
    assert results[0]["goal"]["checks"][0]["met"] is True and results[0]["results"][2]["missing"] == "not installed"
    assert results[0]["results"][0]["floor"] > 0 and results[0]["results"][0]["bound"] in printed
    assert results[3]["goal"]["checks"][0]["what"] == "time per flop over that of D=8"
    assert "keops: not installed" in printed and "of 3 met" in printed
    assert command.main(["show", str(file)]) == 0
    assert capsys.readouterr().out.split() == printed.split()
    assert "| first | " in report.markdown_cells(report.goal_table(results))


def test_rows_and_peers_can_be_chosen(small, capsys):
    assert run("--only", "first", "--peer", "none") == 0
    printed = capsys.readouterr().out
    assert "× torch – (target" in printed and "D=8" not in printed
    assert "0 of 1 met, 1 not judged" in printed
    assert run("--list") == 0
    assert capsys.readouterr().out.split("\n")[:2] == ["first", "second"]
    assert run("--only", "third") == 2
    assert "no row of cpu contains 'third'" in capsys.readouterr().err


def test_a_failure_of_ours_stops_no_other_row(small, capsys, monkeypatch):
    real = all_command.measure

    def measure(config, *args, **more):
        if config.case == "argkmin":
            raise RuntimeError("no kernel for this\nsecond line")
        return real(config, *args, **more)

    monkeypatch.setattr(all_command, "measure", measure)
    assert run("--peer", "none") == 0
    printed = capsys.readouterr().out
    assert "RuntimeError: no kernel for this" in printed and "D=16" in printed


def test_a_peer_with_variables_of_its_own_is_timed_in_another_process(small, capsys, monkeypatch):
    monkeypatch.setitem(
        peers.CONTENDERS, "torch", peers.Contender("torch", ("torch",), lambda *_: pytest.fail(),
                                                   environment=(("SOME_VARIABLE", "7"),)))  # fmt: skip
    asked = []

    def ask(what, name, config, environment=None, choice=None):
        asked.append((what, name, environment, choice["repeats"]))
        return {"note": "blocks", "seconds": 5.0, "error": 1e-7}

    monkeypatch.setattr("kernops.bench.probe.ask", ask)
    assert run("--only", "first", "--peer", "torch") == 0
    assert asked == [("time", "torch", {"SOME_VARIABLE": "7"}, 1)]
    assert "blocks, in a process of its own with SOME_VARIABLE=7" in capsys.readouterr().out


def test_the_probe_of_another_process_times_and_compares():
    from kernops.bench import probe

    found = probe.ask("time", "torch", Config("gaussian", 200), choice={"repeats": 1, "budget": 5.0})
    assert found["seconds"] > 0 and found["error"] < 1e-5 and found["note"]
