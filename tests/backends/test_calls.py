"""What a call costs that does not depend on the machine: launches, allocations and bytes, by fakes that count.

The tables are upper bounds. A change that raises a number has to say so here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernops import LazyTensor, Vi, Vj, backends
from kernops.backends import cpu
from tests.helpers.fake_gpu import Calls, fake_gpu


@dataclass(frozen=True)
class Cost:
    """Of one call: launches, allocations, and bytes beyond the results for each row."""

    launches: int
    allocations: int
    bytes_a_row: int


def gaussian(x, y, b):
    return (-Vi(x).sqdist(Vj(y))).exp() @ b


#: name -> (how to call it, D, right-hand sides, cost at 20,000 points)
CALLS = {
    "gaussian": (gaussian, 3, 1, Cost(2, 2, 168)),
    "gaussian D=64": (gaussian, 64, 1, Cost(8, 4, 1200)),  # matrix units, and the plain kernels that stand by
    "gaussian E=16": (gaussian, 3, 16, Cost(8, 4, 3600)),
    "logsumexp": (lambda x, y, b: (-Vi(x).sqdist(Vj(y))).logsumexp(dim=1), 3, 1, Cost(2, 2, 560)),
    "min": (lambda x, y, b: Vi(x).sqdist(Vj(y)).min(dim=1), 3, 1, Cost(2, 2, 56)),
    "argKmin": (lambda x, y, b: Vi(x).sqdist(Vj(y)).argKmin(10, dim=1), 3, 1, Cost(2, 3, 280)),
}
M = N = 20_000


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return fake_gpu(monkeypatch)


def data(d: int, e: int, n: int = N):
    return torch.rand(n, d), torch.rand(n, d), torch.rand(n, e)


def results_bytes(out) -> int:
    outs = out if isinstance(out, tuple) else (out,)
    return sum(o.numel() * o.element_size() for o in outs)


@pytest.mark.parametrize("name", CALLS)
def test_launches_allocations_and_bytes_on_a_gpu(name: str, calls: Calls) -> None:
    call, d, e, cost = CALLS[name]
    arrays = data(d, e)
    call(*arrays)  # what is made once for all calls of these sizes
    calls.clear()
    out = call(*arrays)
    assert len(calls.kernels) <= cost.launches, calls.kernels
    assert len(calls.allocations) <= cost.allocations
    scratch = sum(calls.allocations) - results_bytes(out)
    assert scratch <= M * cost.bytes_a_row
    assert calls.waits == 0


@pytest.mark.parametrize("name", CALLS)
def test_memory_grows_with_the_points_and_not_with_their_pairs(name: str, calls: Calls) -> None:
    """From where there are rows enough for as many blocks as a GPU is given: the states of splits are then as many."""
    call, d, e, _ = CALLS[name]
    used = []
    for n in (100_000, 200_000):
        calls.clear()
        call(*data(d, e, n))
        used.append(sum(calls.allocations))
    assert used[1] <= 2.2 * used[0] + 4096


def test_a_call_again_is_prepared_no_more(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    from kernops.backends import cuda

    arrays = data(3, 1)
    gaussian(*arrays)
    monkeypatch.setattr(cuda, "_prepare", lambda key: pytest.fail("prepared again"))
    gaussian(*arrays)


@pytest.mark.parametrize(
    ("n", "main", "launches", "allocations"), [(10_000, "kn_reduce", 2, 3), (M, "kn_matrix_wide", 8, 5)]
)
def test_value_and_gradients_take_two_passes(calls: Calls, n: int, main: str, launches: int, allocations: int) -> None:
    """One for the value and the derivatives by x, one for the gradients by y and b; of many pairs on matrix units."""
    arrays = [t.requires_grad_() for t in data(3, 1, n)]
    torch.autograd.grad(gaussian(*arrays), arrays, torch.rand(n, 1))
    calls.clear()
    torch.autograd.grad(gaussian(*arrays), arrays, torch.rand(n, 1))
    assert calls.kernels.count(main) == 2
    assert len(calls.kernels) <= 2 * launches and len(calls.allocations) <= 2 * allocations  # results, and scratch
    assert sum(calls.allocations) <= 2700 * n


def operations(call: Callable[[], object]) -> list[str]:
    """What torch is asked for in a call, on any thread. A mode of dispatch would change the call's way."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    skipped = ("aten::empty", "aten::as_strided")  # memory, counted above; and inside of views
    return sorted(event.name for event in profile.events() if "aten::" in event.name and event.name not in skipped)


def test_torch_is_asked_for_memory_only(calls: Calls) -> None:
    """And with gradients for the product with the cotangent, and for gradients of the shapes of the arrays."""
    x, y, b = torch.rand(100, 1, 3), torch.rand(1, 100, 3), torch.rand(100, 1)
    g = torch.rand(100, 1)

    def call() -> torch.Tensor:
        return (-((LazyTensor(x) - LazyTensor(y)) ** 2).sum(-1)).exp() @ b

    assert call().shape == (100, 1)
    assert operations(call) == []
    arrays = [t.requires_grad_() for t in (x, y, b)]
    torch.autograd.grad(call(), arrays, g)
    assert operations(lambda: torch.autograd.grad(call(), arrays, g)) == ["aten::mul", *["aten::unsqueeze"] * 2]


def test_batches_are_one_call(calls: Calls) -> None:
    x, y = LazyTensor(torch.rand(8, 300, 1, 3)), LazyTensor(torch.rand(8, 1, 400, 3))
    for _ in range(2):
        calls.clear()
        (-((x - y) ** 2).sum(-1)).exp().sum(dim=2)
    assert len(calls.kernels) <= 2 and len(calls.allocations) <= 2


# --- the cpu back end -------------------------------------------------------------------------------------------------
class Allocations(TorchDispatchMode):
    """Bytes of every new tensor that torch is asked for. Views cost nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []
        self.others: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if "empty" in func.__name__:
            self.bytes.append(out.numel() * out.element_size())
        elif not func.is_view:
            self.others.append(func.__name__)
        return out


class Watched:
    """The cpu back end, seen by ``Allocations``: inside of the operator, which would hide it."""

    __name__ = cpu.__name__

    def __init__(self, seen: Allocations) -> None:
        self.seen = seen

    def run(self, *args):
        with self.seen:
            return cpu.run(*args)


@pytest.mark.parametrize("name", CALLS)
def test_the_cpu_back_end_allocates_its_results_and_nothing_else(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, d, e, _ = CALLS[name]
    seen = Allocations()
    monkeypatch.setattr(backends, "choose", lambda *args: Watched(seen))
    out = call(*data(d, e, 3000))
    most = 2 if name == "argKmin" else 1  # distances, which are not asked for
    assert 1 <= len(seen.bytes) <= most, seen.bytes
    assert sum(seen.bytes) <= most * results_bytes(out)
    assert seen.others == [], "an operation of torch beside the call"
