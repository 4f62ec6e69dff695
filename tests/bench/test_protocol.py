"""Timing: contenders take turns, a slow one gets fewer samples, and the numbers are those of the clock."""

from __future__ import annotations

import time

import pytest

from kernops.bench import protocol
from kernops.bench.protocol import Timing, interleave


@pytest.fixture
def clock(monkeypatch):
    """A clock that believes what a call says it takes: no test waits, none depends on the machine."""
    log: list[tuple[str, int]] = []

    def seconds(call, count):
        name, length = call()
        log.append((name, count))
        return length

    monkeypatch.setitem(protocol.CLOCKS, "cpu", seconds)
    monkeypatch.setattr(protocol, "PAUSE_SECONDS", 0.0)
    return log


def test_contenders_take_turns(clock):
    timings = interleave({"a": lambda: ("a", 1.0), "b": lambda: ("b", 2.0)}, "cpu", repeats=3)
    assert [name for name, _ in clock] == ["a", "b"] + ["a", "b"] * 3  # warm-up, then A B A B A B
    assert timings["a"].samples == [1.0] * 3
    assert timings["b"].median == 2.0


def test_short_calls_are_settled_and_repeated(clock):
    interleave({"short": lambda: ("short", 1e-3)}, "cpu", repeats=2)
    assert clock == [("short", 1)] + [("short", 1), ("short", 20)] * 2


def test_a_slow_contender_gets_fewer_samples_and_never_too_few(clock):
    timings = interleave({"slow": lambda: ("slow", 30.0), "fast": lambda: ("fast", 1.0)}, "cpu", repeats=9, budget=100)
    assert len(timings["slow"].samples) == 4
    assert len(timings["fast"].samples) == 9
    timings = interleave({"slow": lambda: ("slow", 99.0)}, "cpu", repeats=9, budget=100)
    assert len(timings["slow"].samples) == protocol.MIN_SAMPLES


def test_a_call_beyond_the_budget_is_made_once(clock):
    timings = interleave({"slow": lambda: ("slow", 101.0), "fast": lambda: ("fast", 1.0)}, "cpu", repeats=9, budget=100)
    assert timings["slow"].samples == [101.0]
    assert [name for name, _ in clock].count("slow") == 1
    assert len(timings["fast"].samples) == 9


def test_median_and_json():
    timing = Timing([3.0, 1.0, 2.0])
    assert timing.to_json() == {"seconds": 2.0, "seconds_min": 1.0, "samples": [3.0, 1.0, 2.0]}


def test_the_clock_measures_seconds():
    timings = interleave({"sleep": lambda: time.sleep(0.02)}, "cpu", repeats=3)
    assert 0.02 <= timings["sleep"].median < 0.5
