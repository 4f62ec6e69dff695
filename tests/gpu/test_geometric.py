"""Sums by bucket and splats on a GPU: the tests of tests/geometric there, and what only a GPU has (streams, graphs)."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

from kernops.geometric import (
    BEVGrid,
    BucketPlan,
    CameraRig,
    SplatPlan,
    bucketed_cumsum,
    bucketed_sum,
    frustum,
    nuscenes_rig,
    splat,
)
from tests.geometric import cases, test_buckets, test_kernels, test_operator, test_plan, test_splat
from tests.geometric.cases import VARIANTS, At

Tensor = torch.Tensor


@pytest.fixture(params=["cuda", "tiled"])
def place(request: pytest.FixtureRequest) -> At:
    if request.param == "tiled" and request.function.__module__ != test_kernels.__name__:
        pytest.skip("what is made of the kernels is tested with those in torch on a CPU")
    return cases.at(request.param, "cuda:0")


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


# Every test of tests/geometric that runs at a place, under the name of its module and its own.
for _module in (test_kernels, test_buckets, test_plan, test_splat, test_operator):
    for _name, _function in list(vars(_module).items()):
        if _name.startswith("test_") and "place" in inspect.signature(_function).parameters:
            globals()[f"{_module.__name__.rpartition('.')[2]}_{_name.removeprefix('test_')}"] = _function


def test_more_numbers_than_int32_counts_here(place: At) -> None:
    test_splat.test_more_numbers_than_int32_counts(place)


# --- a problem of some size -------------------------------------------------------------------------------------------
POINTS = frustum((1024, 1024), (32, 32), dbound=(1.0, 51.0, 0.5))
GRID = BEVGrid((-51.2, 51.2, 0.8), (-51.2, 51.2, 0.8), (-5.0, 3.0, 8.0))
CHANNELS = 64


def rig_on(place: At, turn: float = 0.0) -> CameraRig:
    c, s = math.cos(turn), math.sin(turn)
    rig = nuscenes_rig().resized((1024, 1024)).with_augmentation(bda=[[c, -s, 0], [s, c, 0], [0, 0, 1]])
    return rig.to(place.device)


def plan_at(place: At, variant: str = "cumsum", turn: float = 0.0) -> SplatPlan:
    return SplatPlan(rig_on(place, turn), POINTS, GRID, variant=variant, backend=place.backend)


def inputs(plan: SplatPlan, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    b, n, _, h, w = plan.cells.shape
    generator = torch.Generator().manual_seed(seed)
    depth = torch.randn(plan.cells.shape, generator=generator)
    feat = torch.randn((b, n, h, w, CHANNELS), generator=generator)
    return depth.to(plan.device, dtype), feat.to(plan.device, dtype)


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)


def forward_and_backward(plan: SplatPlan, depth: Tensor, feat: Tensor) -> list[Tensor]:
    depth, feat = depth.detach().requires_grad_(), feat.detach().requires_grad_()
    out = splat(depth, feat, plan, depth_logits=True)
    return [out.detach(), *torch.autograd.grad(out, (depth, feat), torch.ones_like(out))]


# --- no waiting -------------------------------------------------------------------------------------------------------
@contextmanager
def no_waiting() -> Iterator[None]:
    """An operation of torch that waits for the GPU is an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_waits(place: At, variant: str) -> None:
    plan, rig = plan_at(place, variant), rig_on(place, 0.2)
    depth, feat = inputs(plan)
    forward_and_backward(plan, depth, feat)  # compiles
    with no_waiting():
        forward_and_backward(plan, depth, feat)
        if variant != "histogram":
            plan.refresh(rig)
    buckets = BucketPlan(plan.cells.flatten(), math.prod(plan.shape), backend=place.backend)
    values = torch.rand(plan.n_points, 3, device=plan.device, requires_grad=True)
    bucketed_sum(values, buckets), bucketed_cumsum(values, buckets)
    with no_waiting():
        for function in (bucketed_sum, bucketed_cumsum):
            function(values, buckets).sum().backward()


# --- launches ---------------------------------------------------------------------------------------------------------
def test_a_cached_plan_takes_one_launch(place: At) -> None:
    """Empty cells and all: no other kernel, no memset."""
    plan = plan_at(place, "cumsum")
    depth, feat = inputs(plan)
    splat(depth, feat, plan)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        splat(depth, feat, plan)
        torch.cuda.synchronize()
    launched = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(launched) == 1 and "segment_sum" in launched[0], launched


# --- CUDA graphs ------------------------------------------------------------------------------------------------------
def capture(function: Callable[[], list[Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = function()
    return graph, outs


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_graph_of_a_splat(place: At, variant: str) -> None:
    plan = plan_at(place, variant)
    depth, feat = inputs(plan)
    graph, outs = capture(lambda: forward_and_backward(plan, depth, feat))
    for seed in (1, 2):
        new = inputs(plan, seed)
        depth.copy_(new[0])
        feat.copy_(new[1])
        graph.replay()
        for got, want in zip(outs, forward_and_backward(plan, *new)):
            close(got, want)


@pytest.mark.parametrize("variant", ["cumsum", "atomic"])
def test_a_graph_of_refresh_and_splat(place: At, variant: str) -> None:
    """A calibration that changes in place: cells, order and sums follow at replay."""
    plan, rig = plan_at(place, variant), rig_on(place)
    depth, feat = inputs(plan)

    def step() -> list[Tensor]:
        plan.refresh(rig)
        return [splat(depth, feat, plan)]

    graph, (out,) = capture(step)
    for turn in (0.1, -0.7):
        old, new = rig.bda, rig_on(place, turn).bda
        assert old is not None and new is not None
        old.copy_(new)
        graph.replay()
        want = plan_at(place, variant, turn)
        assert torch.equal(plan.cells, want.cells)
        close(out, splat(depth, feat, want))


def test_a_histogram_cannot_be_refreshed_in_a_graph(place: At) -> None:
    plan, rig = plan_at(place, "histogram"), rig_on(place)
    plan.refresh(rig)
    with pytest.raises(RuntimeError, match="cannot be captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        plan.refresh(rig)
    torch.cuda.synchronize()


# --- streams and threads ----------------------------------------------------------------------------------------------
def test_two_streams_at_once(place: At) -> None:
    plans = [plan_at(place, variant) for variant in VARIANTS]
    given = [inputs(plan, k) for k, plan in enumerate(plans)]
    want = [forward_and_backward(plan, *g) for plan, g in zip(plans, given)]
    streams = [torch.cuda.Stream() for _ in range(3)]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    found = []
    for k in range(12):
        with torch.cuda.stream(streams[k % 3]):
            found.append(forward_and_backward(plans[(k + k // 3) % 3], *given[(k + k // 3) % 3]))
    torch.cuda.synchronize()
    for k, outs in enumerate(found):
        for a, b in zip(outs, want[(k + k // 3) % 3]):
            close(a, b)


def test_two_threads_on_their_own_streams(place: At) -> None:
    plans = [plan_at(place, variant) for variant in VARIANTS]
    given = [inputs(plan, k) for k, plan in enumerate(plans)]
    want = [forward_and_backward(plan, *g) for plan, g in zip(plans, given)]
    torch.cuda.synchronize()

    def one(k: int) -> list[Tensor]:
        with torch.cuda.stream(torch.cuda.Stream()):
            outs = forward_and_backward(plans[k % 3], *given[k % 3])
            torch.cuda.current_stream().synchronize()
        return outs

    with ThreadPoolExecutor(2) as pool:
        for k, outs in enumerate(pool.map(one, range(12))):
            for a, b in zip(outs, want[k % 3]):
                close(a, b)


def test_the_callers_stream(place: At) -> None:
    """Work waits for what stands before it on the stream, and not for the default stream."""
    plan = plan_at(place)
    depth, feat = inputs(plan)
    want = splat(depth, feat, plan)
    late, stream = torch.zeros_like(feat), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(feat)
        out = splat(depth, late, plan)
    torch.cuda.synchronize()
    assert torch.equal(out, want)


# --- memory -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("logits", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_memory(place: At, variant: str, logits: bool, dtype: torch.dtype) -> None:
    """Beyond inputs and results less than a tenth of the tensor of all points times C, forward and backward."""
    plan = plan_at(place, variant)
    depth, feat = (t.requires_grad_() for t in inputs(plan, dtype=dtype))
    g = torch.ones_like(splat(depth, feat, plan, depth_logits=logits))
    allowed = plan.n_points * CHANNELS * dtype.itemsize / 10

    def peak(function: Callable[[], tuple[Tensor, ...]]) -> float:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        outs = function()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before - sum(t.numel() * t.itemsize for t in outs)

    out: list[Tensor] = []
    torch.autograd.grad(splat(depth, feat, plan, depth_logits=logits), (depth, feat), g)  # compiles
    assert peak(lambda: (out.append(splat(depth, feat, plan, depth_logits=logits)), out[0])[1:]) < allowed  # type: ignore[func-returns-value]
    assert peak(lambda: torch.autograd.grad(out[0], (depth, feat), g)) < allowed


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_of_a_real_rig(place: At, dtype: torch.dtype) -> None:
    plan = plan_at(place)
    depth, feat = inputs(plan, dtype=dtype)
    want = splat(depth.double(), feat.double(), plan)
    error = (splat(depth, feat, plan).double() - want).abs()
    assert (error <= torch.finfo(dtype).eps * want.abs() + 1e-3).all()
