"""The autotuner: off unless asked for, measures once, remembers, and changes no result beyond rounding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import kernops
from kernops import LazyTensor, Pm, Vi, Vj
from kernops.backends import cache, cpu, tune
from kernops.codegen.facts import facts
from kernops.codegen.host_schedule import Machine, candidates
from kernops.codegen.host_schedule import schedule as host_schedule
from kernops.codegen.schedule import Device
from kernops.codegen.schedule import candidates as gpu_candidates
from kernops.codegen.schedule import schedule as gpu_schedule
from kernops.formula.graph import CAT_I, CAT_J, var
from kernops.formula.ops import apply, mul, neg
from kernops.formula.plan import Plan, make_plan
from tests.helpers.fake_gpu import fake_gpu

needs_compiler = pytest.mark.skipif(cpu.available(torch.device("cpu")) is not None, reason="no C++ compiler")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, empty_cache: Path) -> None:
    """Nothing is remembered, and everything is large enough to be measured."""
    monkeypatch.delenv("KERNOPS_AUTOTUNE", raising=False)
    monkeypatch.setattr(tune, "_chosen", {})
    monkeypatch.setattr(tune, "FEW_PAIRS", 1)
    monkeypatch.setattr(tune, "REPEATS", 1)
    monkeypatch.setattr(cpu, "_bindings", {})


def gaussian(d: int = 3, e: int = 1, core: str = "Sum") -> Plan:
    distance = apply("SqDist", var(CAT_I, 0, d), var(CAT_J, 1, d))
    if core == "Sum":
        return make_plan("Sum", mul(apply("Exp", neg(distance)), var(CAT_J, 2, e)))
    if core == "SumSoftMaxWeight":
        return make_plan(core, neg(distance), var(CAT_J, 2, e))
    return make_plan(core, distance, k=5 if core == "KMin" else 0, algorithm="brute")


# --- the switch -----------------------------------------------------------------------------------------------------
def test_it_is_off_and_can_be_switched(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not tune.enabled()
    with kernops.autotune():
        assert tune.enabled()
        with kernops.autotune(False):
            assert not tune.enabled()
        assert tune.enabled()
    assert not tune.enabled()
    monkeypatch.setenv("KERNOPS_AUTOTUNE", "1")
    assert tune.enabled()
    with kernops.autotune(False):
        assert not tune.enabled()
    monkeypatch.setenv("KERNOPS_AUTOTUNE", "yes")
    with pytest.raises(ValueError, match="KERNOPS_AUTOTUNE must be 0 or 1; got 'yes'"):
        tune.enabled()


def test_it_can_decorate() -> None:
    @kernops.autotune()
    def inside() -> bool:
        return tune.enabled()

    assert inside() and not tune.enabled()


# --- choosing -------------------------------------------------------------------------------------------------------
KEY = ("a device", "a plan")


def test_the_fastest_is_taken_and_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def measure(candidate: str) -> float:
        measured.append(candidate)
        return {"a": 2.0, "b": 1.0, "c": 3.0}[candidate]

    assert tune.best(KEY, ["a", "b", "c"], measure, "a test") == "b"
    assert tune.best(KEY, ["a", "b", "c"], measure, "a test") == "b"
    monkeypatch.setattr(tune, "_chosen", {})  # another process
    assert tune.best(KEY, ["a", "b", "c"], measure, "a test") == "b"
    assert measured == ["a", "b", "c"]
    (entry,) = cache.entries()
    assert (entry.kind, entry.description) == ("tuned", "a test")
    assert json.loads((entry.path / "choice.json").read_text())["seconds"] == [2.0, 1.0, 3.0]
    tune.best((*KEY, "more"), ["a", "b", "c"], measure, "")
    tune.best(KEY, ["a", "b"], measure, "")  # other candidates are another question
    assert measured == ["a", "b", "c", "a", "b", "c", "a", "b"]


def test_a_single_candidate_needs_no_measurement() -> None:
    assert tune.best(KEY, ["a"], lambda c: pytest.fail("measured"), "") == "a"


def test_what_cannot_run_takes_no_part() -> None:
    def measure(candidate: str) -> float:
        if candidate != "c":
            raise RuntimeError("too large")
        return 9.0

    assert tune.best(KEY, ["a", "b", "c"], measure, "") == "c"
    assert tune.best(("other",), ["a", "b"], measure, "") == "a"  # the model's, which will say what is wrong


def test_what_a_choice_depends_on() -> None:
    plan, other = gaussian(3), gaussian(4)
    keys = {
        tune.key("gpu", "code", plan, "float32", 1000, 1000, 1),
        tune.key("gpu", "code", plan, "float32", 1023, 513, 1),  # of about the same size
        tune.key("gpu", "code", plan, "float32", 1024, 1000, 1),
        tune.key("another", "code", plan, "float32", 1000, 1000, 1),
        tune.key("gpu", "newer", plan, "float32", 1000, 1000, 1),
        tune.key("gpu", "code", plan, "float64", 1000, 1000, 1),
        tune.key("gpu", "code", other, "float32", 1000, 1000, 1),
    }
    assert len(keys) == 6 and all(kernops.__version__ in key for key in keys)


def test_short_calls_are_timed_a_few_times_and_long_ones_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "REPEATS", 4)
    now = [0.0]
    calls: list[float] = []
    for length, count in ((0.001, 5), (1.0, 2)):
        calls.clear()

        def call(length: float = length) -> None:
            calls.append(length)
            now[0] += length

        assert tune.seconds_of(call, lambda: now[0]) == pytest.approx(length)
        assert len(calls) == count


# --- candidates -----------------------------------------------------------------------------------------------------
PLANS = [gaussian(), gaussian(3, 16), gaussian(64), gaussian(core="KMin"), gaussian(core="LogSumExp"),
         gaussian(core="SumSoftMaxWeight", e=20), gaussian(core="MinArgMin")]  # fmt: skip


@pytest.mark.parametrize("plan", PLANS, ids=lambda p: f"{p.core} {p.formula}"[:50])
def test_the_model_s_schedule_is_the_first_candidate(plan: Plan) -> None:
    machine = Machine()
    found = candidates(plan, 4, machine)
    assert found[0] == host_schedule(plan, 4, machine) and len(set(found)) == len(found) >= 3
    device = Device(132, 232448, (9, 0))
    f = facts(plan)
    gpu = gpu_candidates(f, 50_000, 50_000, 1, 4, device, 4)
    assert gpu[0] == gpu_schedule(f, 50_000, 50_000, 1, 4, device) and 1 <= len(gpu) <= 4


@needs_compiler
@pytest.mark.parametrize("plan", [PLANS[k] for k in (0, 2, 3, 5)], ids=lambda p: f"{p.core} {p.formula}"[:50])
def test_every_candidate_gives_the_same_result(plan: Plan) -> None:
    tensors = [torch.rand(*((700, 900, 900)[v.params[1]], v.dim)) for v in plan.variables]  # type: ignore[index]
    want = cpu.run(plan, tensors, 700, 900, ())
    real = tune.best
    for k in range(len(candidates(plan, 4, cpu.machine()))):
        with pytest.MonkeyPatch.context() as patch, kernops.autotune():
            patch.setattr(tune, "best", lambda key, variants, measure, said, k=k: variants[k])
            cpu._bindings.clear()
            got = cpu.run(plan, tensors, 700, 900, ())
        for a, b in zip(got, want):
            torch.testing.assert_close(a, b, rtol=2e-6, atol=1e-6)
    assert tune.best is real


# --- in the back ends -----------------------------------------------------------------------------------------------
@needs_compiler
def test_the_cpu_back_end_measures_once_and_only_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, b = torch.rand(500, 3), torch.rand(600, 3), torch.rand(600, 1)
    K = (-Vi(x).sqdist(Vj(y))).exp()
    kinds = lambda: [e.kind for e in cache.entries()]  # noqa: E731
    want = K.__matmul__(b, backend="cpu")
    assert "tuned" not in kinds()
    with kernops.autotune():
        got = K.__matmul__(b, backend="cpu")
        assert kinds().count("tuned") == 1
        monkeypatch.setattr(tune, "seconds_of", lambda *args: pytest.fail("measured again"))
        again = K.__matmul__(b[:], backend="cpu")
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    assert torch.equal(got, again)
    assert torch.equal(K.__matmul__(b, backend="cpu"), want)  # switched off, it is what it was
    cpu._bindings.clear()
    monkeypatch.setattr(tune, "_chosen", {})
    monkeypatch.setenv("KERNOPS_AUTOTUNE", "1")  # another process: the choice comes from the disk
    torch.testing.assert_close(K.__matmul__(b, backend="cpu"), want, rtol=1e-6, atol=1e-6)


@needs_compiler
def test_small_problems_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "FEW_PAIRS", 1000)
    with kernops.autotune():
        Vi(torch.rand(20, 3)).sqdist(Vj(torch.rand(30, 3))).min(dim=1, backend="cpu")
    assert "tuned" not in [e.kind for e in cache.entries()]


def test_the_cuda_back_end_measures_but_not_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_gpu(monkeypatch)
    capturing = [True]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    x, y = torch.rand(5000, 3), torch.rand(5000, 3)
    with kernops.autotune():
        Vi(x).sqdist(Vj(y)).min(dim=1)
        assert calls.waits == 0 and cache.entries() == []
    capturing[0] = False
    with kernops.autotune():
        calls.clear()
        Vi(x).sqdist(Vj(y)).min(dim=1)
        assert calls.waits > 0 and [e.kind for e in cache.entries()] == ["tuned"]
        once = len(calls.kernels)
        waits = calls.waits
        calls.clear()
        Vi(x).sqdist(Vj(y)).min(dim=1)
        assert len(calls.kernels) <= 2 < once and calls.waits == waits
    calls.clear()
    Vi(x).sqdist(Vj(y)).min(dim=1)
    assert calls.waits == waits


def test_batches_and_parameters_are_measured_on_the_cuda_back_end(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    x, y, p = LazyTensor(torch.rand(3, 2, 50, 1, 3)), LazyTensor(torch.rand(2, 1, 60, 3)), Pm(torch.rand(3))
    with kernops.autotune():
        (p * (x - y) ** 2 * 2.5).sum(-1).min(dim=3)
    assert [e.kind for e in cache.entries()] == ["tuned"]
