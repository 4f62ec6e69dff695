"""The splat benchmark on a GPU: captured calls, CUDA peers, and the allocator's peak."""

from __future__ import annotations

import json

import pytest

from kernops.bench import __main__ as command
from kernops.bench.splat import SplatConfig
from kernops.bench.splat_peers import PEERS

RUN = ["splat", "--setting", "bevdet59", "--device", "cuda", "--repeats", "2"]


@pytest.mark.parametrize("more", [[], ["--backward"], ["--dtype", "float16"]])
def test_a_run_on_the_gpu(more, tmp_path):
    file = tmp_path / "out.json"
    assert command.main([*RUN, *more, "--json", str(file)]) == 0
    (result,) = json.loads(file.read_text(encoding="utf-8"))
    rows = {row["contender"]: row for row in result["results"]}
    half = "float16" in more
    for name, row in rows.items():
        if row["missing"]:
            assert name in PEERS and PEERS[name].missing(SplatConfig(**row["config"])), row["missing"]
            continue
        if not (half and name == "lss"):  # sums of 10,000 points in float16, and their differences: no digit is left
            assert row["error"] < (1e-2 if half or name == "lss" else 1e-5), name
        assert 0 < row["seconds"] < 10
        if name.startswith("kernops"):
            assert row["peak_bytes"] < 0.5 * row["sizes"]["frustum_bytes"]
    for name in ("kernops cumsum", "kernops atomic", "kernops histogram", "torch"):
        assert rows[name]["how"] == "graph", rows[name].get("not_captured")
    assert rows["lss"]["how"] == "eager" and rows["lss"]["not_captured"]
    if not half:
        assert rows["bev_pool"]["how"] == rows["bev_pool_v2"]["how"] == "graph"
