"""Captured calls, with a stand-in for the GPU: what is captured how often, and what an error says."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from kernops.bench import graphs


class Gpu:
    """Records what happens; ``broken`` makes leaving a capture fail, as CUDA does after a forbidden call."""

    def __init__(self, broken: bool = False) -> None:
        self.log: list[str] = []
        self.broken = broken
        stream = SimpleNamespace(wait_stream=lambda other: None)
        self.cuda = SimpleNamespace(
            Stream=lambda: stream, current_stream=lambda: stream, synchronize=lambda: self.log.append("wait"),
            CUDAGraph=lambda: SimpleNamespace(replay=lambda: self.log.append("replay")),
            stream=self.stream, graph=self.graph,
        )  # fmt: skip

    @contextmanager
    def stream(self, stream):
        self.log.append("warm up")
        yield

    @contextmanager
    def graph(self, graph, stream):
        self.log.append("capture")
        try:
            yield
        finally:
            if self.broken:
                raise RuntimeError("the capture was invalidated")


def test_calls_are_captured_after_a_warm_up(monkeypatch):
    gpu = Gpu()
    monkeypatch.setattr(graphs, "torch", gpu)
    calls = iter(range(100))

    def call() -> int:
        gpu.log.append("call")
        return next(calls)

    replay = graphs.capture(call, graphs.REPLAY_SECONDS / 4)
    assert gpu.log == ["warm up", *["call"] * 3, "wait", "capture", *["call"] * 4, "replay", "wait"]
    assert (replay.calls, replay.result) == (4, 6)
    replay()
    assert gpu.log[-1] == "replay"


def test_the_first_error_is_the_one_that_is_told(monkeypatch):
    gpu = Gpu(broken=True)
    monkeypatch.setattr(graphs, "torch", gpu)

    def call() -> None:
        if "capture" in gpu.log:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    with pytest.raises(RuntimeError, match="^operation not permitted when stream is capturing$"):
        graphs.capture(call, 1.0)
    with pytest.raises(RuntimeError, match="^the capture was invalidated$"):
        graphs.capture(lambda: None, 1.0)
    assert "replay" not in gpu.log


def test_how_many_calls_a_graph_has():
    assert graphs.calls_for(1e-6) == graphs.MOST_CALLS
    assert graphs.calls_for(graphs.REPLAY_SECONDS / 4) == 4
    assert graphs.calls_for(0.3) == 1
