"""CUDA graphs for the benchmark: many calls captured once and replayed, so that Python's own cost is not measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

#: A graph holds so many calls that a replay takes about this long, and never more than ``MOST_CALLS``.
REPLAY_SECONDS = 1e-3
MOST_CALLS = 20

#: Graphs whose capture failed. They are kept: torch's allocator may still ask them whose memory is whose.
_failed: list[Any] = []


@dataclass(frozen=True)
class Replay:
    """``calls`` captured calls; ``replay()`` runs them all, and ``result`` is then what the last one gave."""

    graph: Any
    calls: int
    result: Any

    def __call__(self) -> None:
        self.graph.replay()


def calls_for(seconds: float) -> int:
    """Calls of a graph whose one call takes so long."""
    return max(1, min(MOST_CALLS, round(REPLAY_SECONDS / max(seconds, 1e-9))))


def capture(call: Callable[[], Any], seconds: float) -> Replay:
    """Capture ``call``, which takes about ``seconds``, as often as :func:`calls_for` says.

    Raises:
        RuntimeError: the call does what cannot be captured, such as waiting for the GPU.
    """
    calls = calls_for(seconds)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # warm up where it will be captured, so that libraries have their workspaces there
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    first: BaseException | None = None
    result = None
    try:
        with torch.cuda.graph(graph, stream=stream):
            try:
                for _ in range(calls):
                    result = call()
            except RuntimeError as error:  # leaving the capture raises another one, which hides this
                first = error
                raise
    except RuntimeError as error:
        _failed.append(graph)
        torch.cuda.synchronize()
        raise RuntimeError(_line(first or error)) from error
    graph.replay()
    torch.cuda.synchronize()
    return Replay(graph, calls, result)


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
