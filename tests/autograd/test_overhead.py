"""What a call costs beside its computation, and that thousands of calls leave nothing behind."""

from __future__ import annotations

import gc
import resource
import sys
import timeit
import tracemalloc

import pytest
import torch

from kernops import Genred, LazyTensor, backends
from kernops.autograd import reduce
from kernops.formula import graph
from tests.helpers.reductions import Case


class Instant:
    """A back end that computes nothing."""

    @staticmethod
    def run(plan, tensors, m, n, batch):
        outs = []
        for name, dim in plan.outputs:
            shape = (*batch, m, *([plan.k] if plan.k else []), dim)
            outs.append(torch.zeros(shape, dtype=torch.int64 if name == "index" else torch.float64))
        return tuple(outs)


def best(function) -> float:
    """Microseconds of a call, at the quietest moment."""
    return min(timeit.repeat(function, number=100, repeat=100)) / 100 * 1e6


def test_the_way_to_the_back_end_is_short(monkeypatch):
    monkeypatch.setattr(backends, "choose", lambda *args: Instant)
    case = Case("Sum", "gauss")
    values, plan = case.data(m=10, n=10, dtype=torch.float32), case.plan
    for _ in range(5):  # the machine may be busy with other things
        ours = best(lambda: reduce(plan, values, 10, 10, "auto", ()))
        extra = ours - best(lambda: backends.reduce(plan, values, 10, 10, "auto", ()))
        if extra < 2:
            break
    assert extra < 2, f"{extra:.1f} of {ours:.1f} µs"


def our_calls(function) -> int:
    """How many calls of kernops' functions a call of ``function`` makes."""
    count = 0

    def note(frame, event, _) -> None:
        nonlocal count
        count += event == "call" and "/kernops/" in frame.f_code.co_filename.replace("\\", "/")

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


#: Calls of our functions: a few more than there are. Whoever needs many more must have a reason.
CALLS = {"Genred": 15, "Genred with gradients": 33, "LazyTensor": 44, "LazyTensor with gradients": 62}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_takes_few_steps(name, monkeypatch):
    """What a call costs in Python, counted, which does not depend on the machine."""
    monkeypatch.setattr(backends, "choose", lambda *args: Instant)
    gradients = "gradients" in name
    x, y, b = (torch.rand(n, d, dtype=torch.float64).requires_grad_(gradients) for n, d in ((4, 3), (5, 3), (5, 1)))
    g = torch.ones(4, 1, dtype=torch.float64)
    sums = Genred("Exp(-SqDist(X,Y))*B", ["X=Vi(3)", "Y=Vj(3)", "B=Vj(1)"], axis=1)

    def call() -> None:
        if "Genred" in name:
            out = sums(x, y, b)
        else:
            out = (-((LazyTensor(x[:, None]) - LazyTensor(y[None])) ** 2).sum(-1)).exp() @ b
        if gradients:
            torch.autograd.grad(out, (x, y, b), g)

    for _ in range(3):
        call()
    assert our_calls(call) <= CALLS[name]


LOOPS = 300


@pytest.mark.parametrize("reduction", ["Sum", "SumSoftMaxWeight", "KMin"])
@pytest.mark.parametrize("gradients", [False, True])
def test_calls_leave_nothing_behind(reduction, gradients, monkeypatch):
    monkeypatch.setattr(backends, "choose", lambda *args: Instant)
    case = Case(reduction, "gauss")
    values = [t.requires_grad_(gradients) for t in case.data(m=3, n=4)]

    def call() -> None:
        out = case.ours(values)[0]
        if gradients:
            torch.autograd.grad(out.sum(), values)

    def grown() -> int:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(LOOPS):
            call()
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before

    call()
    nodes = len(graph._interned)
    tracemalloc.start()
    for _ in range(4):  # Python's and torch's pools fill up, the last of it over some thousand calls
        grown()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert min(grown(), grown()) < 10_000
    tracemalloc.stop()
    for _ in range(LOOPS):
        call()
    assert len(graph._interned) == nodes
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 8_000, "kilobytes"
