"""What a call costs beside its computation, and that thousands of calls leave nothing behind."""

from __future__ import annotations

import gc
import resource
import timeit
import tracemalloc

import pytest
import torch

from kernops import backends
from kernops.autograd import reduce
from kernops.formula import graph
from kernops.formula.reductions import CORES
from tests.helpers.reductions import Case


class Instant:
    """A back end that computes nothing."""

    @staticmethod
    def run(plan, tensors, m, n, batch):
        outs = []
        for name in CORES[plan.core].outputs:
            shape = (*batch, m, *([plan.k] if plan.k else []), 1 if name == "lse" else plan.dim)
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
