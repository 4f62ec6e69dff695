"""What a call costs on a GPU beside its time: launches, allocations, bytes, as driver and allocator count them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernops.backends import driver
from tests.backends.test_calls import CALLS, M, results_bytes

_COUNTS = ("allocation.all.allocated", "allocated_bytes.all.allocated")


def counted(call: Any) -> tuple[Any, list[int]]:
    before = [torch.cuda.memory_stats()[name] for name in _COUNTS]
    out = call()
    return out, [torch.cuda.memory_stats()[name] - b for name, b in zip(_COUNTS, before)]


@pytest.mark.parametrize("name", CALLS)
def test_launches_allocations_and_bytes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, d, e, cost = CALLS[name]
    arrays = [torch.rand(M, width, device="cuda") for width in (d, d, e)]
    call(*arrays)
    launches = []
    real = driver.launch

    def launch(*args: Any) -> None:
        launches.append(args[1])
        real(*args)

    monkeypatch.setattr(driver, "launch", launch)
    out, (allocations, size) = counted(lambda: call(*arrays))
    assert len(launches) <= cost.launches
    assert allocations <= cost.allocations
    rounding = (2 << 20) * allocations  # of the allocator's blocks
    assert size <= results_bytes(out) + cost.bytes_a_row * M + rounding


def test_the_profiler_sees_the_same_kernels() -> None:
    call, d, e, cost = CALLS["gaussian"]
    arrays = [torch.rand(M, width, device="cuda") for width in (d, d, e)]
    call(*arrays)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call(*arrays)
        torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if event.name.startswith("kn_")]
    assert 1 <= len(kernels) <= cost.launches
