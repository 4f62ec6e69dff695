"""Batches and strides on the GPU, and the ways a call meets torch: streams, graphs, devices, memory."""

from __future__ import annotations

import gc

import pytest
import torch

from kernops.backends import cuda
from tests.gpu.problems import CORES, Problem, agree, distances, gaussian, inputs, run, with_parameters

BATCHES = [
    ((2,), (2,), (2,)),
    ((3,), (), ()),
    ((), (3,), ()),
    ((1,), (4,), ()),
    ((2, 1), (1, 3), (3,)),
    ((2, 1, 3), (4, 1), (1, 1, 1)),
    ((2, 1, 1, 1, 2), (1, 2, 1, 3, 1), (3, 1)),
    ((1, 2, 1, 2, 1, 2, 1), (2, 1, 2, 1, 2, 1, 2), ()),  # does not collapse to six dimensions
]


def _of_batches(p: Problem, batches: tuple) -> tuple:
    own = [batches[k % len(batches)] for k in range(len(p.cats))]
    return tuple(own)


@pytest.mark.parametrize("batches", BATCHES, ids=str)
@pytest.mark.parametrize("p", [gaussian(3), with_parameters(), distances("KMin", 2, 3), distances("KMin", 2, 20),
                               distances("MinArgMin", 3), gaussian(70), gaussian(2, 40)], ids=str)  # fmt: skip
def test_batches(p: Problem, batches: tuple) -> None:
    m, n = 33, 300
    values = inputs(p, m, n, torch.float64, _of_batches(p, batches))
    agree(p, run(p, values, m, n), values)


@pytest.mark.parametrize("p", [gaussian(3), gaussian(70)], ids=str)
def test_many_small_batches(p: Problem) -> None:
    values = inputs(p, 3, 5, torch.float32, ((70_000,),) * 3)
    agree(p, run(p, values, 3, 5), values)


def test_strides() -> None:
    p, m, n = gaussian(3), 200, 300
    x, y, b = inputs(p, m, n, torch.float32)
    assert isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) and isinstance(b, torch.Tensor)
    (want,) = run(p, [x, y, b], m, n)
    wide = torch.zeros(n, 7, device="cuda")
    wide[:, 1:7:2] = y
    for other in (wide[:, 1:7:2], y.t().contiguous().t(), torch.stack([y, y], 1)[:, 1]):
        assert not other.is_contiguous() and torch.equal(run(p, [x, other, b], m, n)[0], want)
    one = x[:1].expand(m, 3)
    assert torch.equal(run(p, [one, y, b], m, n)[0], run(p, [one.contiguous(), y, b], m, n)[0])
    batch = torch.randn(3, 4, m, 3, device="cuda").transpose(0, 1)
    assert torch.equal(run(p, [batch, y, b], m, n)[0], run(p, [batch.contiguous(), y, b], m, n)[0])


def test_graph_capture() -> None:
    """Captured calls replay, also when the very first call of a plan comes while capturing."""
    for p in (gaussian(3), distances("KMin", 3, 7), gaussian(70), distances("Min", 19)):
        values = inputs(p, 500, 20_000, torch.float32)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = run(p, values, 500, 20_000)
        for seed in (1, 2):
            for old, new in zip(values, inputs(p, 500, 20_000, torch.float32, seed=seed)):
                old.copy_(new)
            graph.replay()
            torch.cuda.synchronize()
            agree(p, outs, values)


def test_two_streams() -> None:
    """Calls on two streams at once do not share scratch."""
    p, m, n = gaussian(3), 1000, 30_000
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    data = [inputs(p, m, n, torch.float32, seed=s) for s in range(2)]
    want = [run(p, values, m, n)[0] for values in data]
    torch.cuda.synchronize()
    got: list[list[torch.Tensor]] = [[], []]
    for _ in range(20):
        for k, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                got[k].append(run(p, data[k], m, n)[0])
    torch.cuda.synchronize()
    for k in range(2):
        assert all(torch.equal(g, want[k]) for g in got[k])


def test_calls_grow_no_memory() -> None:
    p = gaussian(3)
    values = inputs(p, 100, 5000, torch.float32)
    run(p, values, 100, 5000)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(2000):
        run(p, values, 100, 5000)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


def test_scratch_is_linear_in_rows_and_columns() -> None:
    p, n = gaussian(3), 200_000
    values = inputs(p, n, n, torch.float32)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(p, values, n, n)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 200 * n


def test_threads_call_at_once() -> None:
    import threading

    p, m, n = gaussian(3), 100, 1000
    data = [inputs(p, m, n, torch.float32, seed=s) for s in range(4)]
    want = [run(p, values, m, n)[0] for values in data]
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work(k: int) -> None:
        for _ in range(200):
            if not torch.equal(run(p, data[k], m, n)[0], want[k]):
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_available() -> None:
    assert cuda.available(torch.device("cuda")) is None and cuda.available("cuda:0") is None
    assert "not a CUDA GPU" in str(cuda.available("cpu"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_types_are_computed_in_single_precision(dtype: torch.dtype) -> None:
    p = gaussian(3)
    values = [v.to(dtype) for v in inputs(p, 100, 3000, torch.float32)]
    (got,) = run(p, values, 100, 3000)
    (want,) = run(p, [v.float() for v in values], 100, 3000)
    assert got.dtype == dtype and torch.equal(got, want.to(dtype))


def test_results_are_written_in_full() -> None:
    """Freed memory full of NaN is reused for results and scratch; none of it may show."""
    for p in CORES:
        values = inputs(p, 300, 1200, torch.float32)
        for size in (1 << 12, 1 << 16, 1 << 20, 1 << 24):
            junk = torch.full((size,), float("nan"), device="cuda")
            del junk
        agree(p, run(p, values, 300, 1200), values)
