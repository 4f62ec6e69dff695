"""What the splat's peers compute, against loops and published numbers; the CUDA ones compiled for the processor."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from kernops.backends import nvrtc
from kernops.bench import intervals, splat_peers
from kernops.bench.splat import SETTINGS, Geometry, Problem, SplatConfig
from tests.bench import host_kernels
from tests.bench.small_splat import TINY, loops, small_problem


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(SETTINGS, "tiny", TINY)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if host_kernels.compiler() is None:
        pytest.skip("needs a C++ compiler")
    return host_kernels.build(tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def peers_on_the_host(library, monkeypatch):
    """The peers that are CUDA kernels, and conch by what its documentation says, on the processor."""
    monkeypatch.setattr(intervals, "Kernels", lambda device: host_kernels.Kernels(library))

    def bev_pool(image_feats, geom_feats, interval_starts, interval_lengths, b, z, x, y):
        out = image_feats.new_zeros(b, z, x, y, image_feats.shape[1])
        for start, length in zip(interval_starts.tolist(), interval_lengths.tolist()):
            place = geom_feats[start].tolist()
            out[place[3], place[2], place[0], place[1]] = image_feats[start : start + length].sum(0)
        return out

    def bev_pool_backward(grad_output, geom_feats, interval_starts, interval_lengths):
        place = geom_feats.long().unbind(1)
        return grad_output[place[3], place[2], place[0], place[1]]

    module = ModuleType("conch.ops.vision.bev_pool")
    module.bev_pool, module.bev_pool_backward = bev_pool, bev_pool_backward  # type: ignore[attr-defined]
    for name in ("conch", "conch.ops", "conch.ops.vision"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)


def oracle() -> Problem:
    """BEVDet's published example of ``bev_pool_v2``."""
    depth = torch.tensor([0.3, 0.4, 0.2, 0.1, 0.7, 0.6, 0.8, 0.9]).view(1, 1, 2, 2, 2)
    cells = torch.full((8,), -1, dtype=torch.int32)
    cells[[0, 4, 1, 6]] = torch.tensor([0, 0, 1, 1], dtype=torch.int32)
    geometry = Geometry(cells.view(1, 1, 2, 2, 2), (1, 1, 2, 2))
    config = SplatConfig("tiny", backward=True)
    return Problem(config, geometry, depth, torch.ones(1, 1, 2, 2, 2), torch.ones(4, 2))


@pytest.mark.parametrize("name", splat_peers.PEERS)
def test_the_published_example(name, peers_on_the_host):
    got = splat_peers.build(name, oracle()).results()
    assert got["value"].sum().item() == pytest.approx(4.4)
    if "points" in got:
        torch.testing.assert_close(got["points"], torch.ones(4, 2))
    else:
        assert got["depth"].flatten().tolist() == [2, 2, 0, 0, 2, 0, 2, 0]
        want = torch.tensor([1, 1, 0.4, 0.4, 0.8, 0.8, 0, 0])
        torch.testing.assert_close(got["feat"].flatten(), want)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", splat_peers.PEERS)
def test_every_peer_pools(name, backward, peers_on_the_host):
    problem = small_problem(dtype="float32", backward=backward)
    built = splat_peers.build(name, problem)
    assert (built.both is not None) == backward
    got, want = built.results(), loops(problem)
    torch.testing.assert_close(got["value"].double(), want["value"], rtol=1e-4, atol=1e-5)
    assert torch.equal(built.forward(), got["value"])
    if "points" in got:
        assert torch.equal(got["points"], problem.grad[problem.ranks.cells])
    elif backward:
        for by in ("depth", "feat"):
            torch.testing.assert_close(got[by].double(), want[by], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", splat_peers.LIFTS)
def test_every_form_of_the_lift(form):
    problem = small_problem(backward=True)
    want = loops(problem)
    for name, tensor in splat_peers.build("torch", problem, form).results().items():
        torch.testing.assert_close(tensor, want[name], rtol=1e-12, atol=1e-12)


def test_the_fastest_lift_wins(monkeypatch):
    for order, want in (((1.0, 2.0), "kept points"), ((2.0, 1.0), "whole frustum")):
        times = iter(order)
        monkeypatch.setattr(splat_peers, "_seconds", lambda built, config, times=times: next(times))
        built = splat_peers.build("torch", small_problem())
        assert built.choice == want and want in built.note


def test_the_kernels_compile():
    if nvrtc.missing():
        pytest.skip(str(nvrtc.missing()))
    _, log = nvrtc.report(intervals.SOURCE.read_text(encoding="utf-8"), "sm_90a", ("--ptxas-options=-v",))
    for name in intervals.KERNELS:
        assert name in log


def test_the_kernels_refuse_what_they_cannot_read():
    with pytest.raises(ValueError, match="starts must be contiguous torch.int32; got torch.int64"):
        intervals.packed({"starts": torch.zeros(3, dtype=torch.int64)}, 4)
    with pytest.raises(ValueError, match=r"feat must be contiguous torch.float32; got torch.float32, strides \(1, 2\)"):
        intervals.packed({"feat": torch.zeros(2, 2).T}, 4)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"device": "cpu"}, "does not do cpu"),
        ({"device": "cuda", "dtype": "float16"}, "does not do float16"),
    ],
)
def test_peers_say_what_they_lack(config, reason):
    assert splat_peers.PEERS["bev_pool_v2"].missing(SplatConfig("tiny", **config)) == reason


def test_a_peer_that_is_not_installed():
    absent = replace(splat_peers.PEERS["conch"], module="no_such_library")
    assert absent.missing(SplatConfig("tiny", device="cuda")) == "not installed"
