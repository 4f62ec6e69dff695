"""The benchmark on a GPU: events, the allocator's peak, and the numbers themselves."""

from __future__ import annotations

import json

import pytest

from kernops.bench import __main__ as command
from kernops.bench import probe
from kernops.bench.problem import Config


@pytest.mark.parametrize("case", ["gaussian", "logsumexp", "argkmin"])
def test_a_run_on_the_gpu(case, tmp_path):
    file = tmp_path / "out.json"
    arguments = [case, "--n", "3000", "--device", "cuda", "--peer", "torch", "--repeats", "3", "--no-probes"]
    assert command.main([*arguments, "--json", str(file)]) == 0
    (result,) = json.loads(file.read_text(encoding="utf-8"))
    assert result["environment"]["gpu"]
    for row in result["results"]:
        assert row["missing"] == ""
        assert 0 < row["seconds"] < 10
        assert row["recall"] > 0.999 if case == "argkmin" else row["error"] < 1e-4


@pytest.mark.parametrize("options", [["--k", "50"], ["--k", "50", "--algorithm", "pruned"], ["--algorithm", "brute"]])
def test_neighbours_by_any_algorithm(options, tmp_path):
    file = tmp_path / "out.json"
    arguments = [
        "argkmin",
        "--n",
        "4000",
        "--device",
        "cuda",
        "--peer",
        "none",
        "--repeats",
        "3",
        "--no-probes",
        *options,
    ]
    assert command.main([*arguments, "--json", str(file)]) == 0
    (result,) = json.loads(file.read_text(encoding="utf-8"))
    assert [row["recall"] for row in result["results"]] == [1.0]


def test_memory_of_one_call():
    config = Config("gaussian", 4096, device="cuda")
    assert probe.ask("memory", "torch", config, choice=("matmul", 2048))["peak_bytes"] >= 2048 * 4096 * 4
    assert probe.ask("memory", "kernops", config)["peak_bytes"] < 4096 * 4096
