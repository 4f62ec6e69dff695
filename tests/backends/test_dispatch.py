"""The dispatcher: what it refuses, in which words, and which back end it takes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from kernops import backends
from kernops.backends import BACKENDS, choose, layout, reduce, tiled
from kernops.formula.graph import CAT_I, CAT_J, CAT_P, CAT_SCALAR, var
from kernops.formula.ops import add, apply, const, mul
from kernops.formula.plan import Plan, make_plan

F = add(mul(var(CAT_SCALAR, 3, 1), var(CAT_P, 2, 2)), apply("Sub", var(CAT_I, 0, 2), var(CAT_J, 1, 2)))
PLAN = make_plan("Sum", F)
GOOD: dict = {0: torch.zeros(3, 2), 1: torch.zeros(4, 2), 2: torch.zeros(2), 3: 1.5}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _fresh_choice(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("KERNOPS_BACKEND", raising=False)
    backends._module.cache_clear()
    yield
    backends._module.cache_clear()


def call(changes: dict, m: int = 3, n: int = 4, plan: Plan = PLAN, backend: str = "tiled"):
    return reduce(plan, [{**GOOD, **changes}[k] for k in range(4)], m, n, backend)


# --- bad input ------------------------------------------------------------------------------------------------------
BAD: list[tuple[dict, type[Exception], str]] = [
    ({0: torch.zeros(3, 3)}, ValueError, r"tensors\[0\] must have shape \(\.\.\., 3, 2\); got \(3, 3\)"),
    ({0: torch.zeros(5, 2)}, ValueError, r"tensors\[0\] must have shape \(\.\.\., 3, 2\); got \(5, 2\)"),
    ({0: torch.zeros(2)}, ValueError, r"tensors\[0\] must have shape \(\.\.\., 3, 2\); got \(2,\)"),
    ({1: torch.zeros(3, 2)}, ValueError, r"tensors\[1\] must have shape \(\.\.\., 4, 2\); got \(3, 2\)"),
    ({2: torch.zeros(3)}, ValueError, r"tensors\[2\] must have shape \(\.\.\., 2\); got \(3,\)"),
    ({2: torch.tensor(1.0)}, ValueError, r"tensors\[2\] must have shape \(\.\.\., 2\); got \(\)"),
    (
        {0: torch.zeros(5, 3, 2), 1: torch.zeros(6, 4, 2)},
        ValueError,
        r"batch shapes do not broadcast: .*\(5,\).*\(6,\)",
    ),
    ({0: torch.zeros(5, 3, 2), 2: torch.zeros(4, 2)}, ValueError, r"batch shapes do not broadcast"),
    ({1: torch.zeros(4, 2, dtype=torch.float64)}, ValueError, r"share one dtype; .*tensors\[1\] is torch\.float64"),
    ({2: torch.zeros(2, dtype=torch.float16)}, ValueError, r"tensors\[0\] is torch\.float32, tensors\[2\]"),
    ({0: torch.zeros(3, 2, dtype=torch.int64)}, TypeError, r"tensors\[0\] must be float16, .*float64; got int64"),
    ({0: torch.zeros(3, 2, dtype=torch.bool)}, TypeError, r"got bool"),
    ({0: torch.zeros(3, 2, dtype=torch.complex64)}, TypeError, r"got complex64"),
    ({1: torch.zeros(4, 2, device="meta")}, ValueError, r"one device; tensors\[0\] is on cpu, tensors\[1\] on meta"),
    ({1: [[0.0, 0.0]] * 4}, TypeError, r"tensors\[1\] must be a torch\.Tensor; got list"),
    ({1: None}, TypeError, r"tensors\[1\] must be a torch\.Tensor; got NoneType"),
    ({1: 2.0}, TypeError, r"tensors\[1\] must be a torch\.Tensor; got float"),
    ({3: torch.ones(1)}, TypeError, r"tensors\[3\] must be a number, as the formula says; got Tensor"),
    ({3: None}, TypeError, r"tensors\[3\] must be a number"),
    ({3: "1"}, TypeError, r"tensors\[3\] must be a number, .*got str"),
]


@pytest.mark.parametrize("changes, error, message", BAD)
def test_bad_tensors(changes: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(changes)


def test_wrong_number_of_tensors() -> None:
    with pytest.raises(ValueError, match="the plan has 4 variables; got 3"):
        reduce(PLAN, [GOOD[k] for k in range(3)], 3, 4)
    with pytest.raises(ValueError, match="at least one tensor"):
        reduce(make_plan("Sum", var(CAT_SCALAR, 0, 1)), [1.0], 3, 4)


def test_good_tensors() -> None:
    for changes in (
        {},
        {3: 2},
        {0: torch.zeros(5, 3, 2), 2: torch.zeros(1, 2)},
        {0: torch.zeros(3, 2).T.contiguous().T},
    ):
        (out,) = call(changes)
        assert out.shape[-2:] == (3, 2)


def test_what_a_formula_does_not_read_is_not_looked_at() -> None:
    """An unused tensor decides neither the dtype nor the device, nor must it be there."""
    plan = make_plan("Sum", mul(const(0.5), var(CAT_J, 1, 2)), n_vars=4)
    y = torch.ones(4, 2)
    for other in (None, torch.zeros(7, dtype=torch.int64), torch.zeros(1, dtype=torch.float16), "nothing"):
        (out,) = reduce(plan, [other, y, other, other], 3, 4, "tiled")  # type: ignore[list-item]
        assert out.dtype == torch.float32 and (out == 2).all() and out.shape == (3, 2)
    constant = make_plan("Sum", const(0.5), n_vars=1)
    assert reduce(constant, [torch.zeros(1, dtype=torch.float64)], 3, 4, "tiled")[0].dtype == torch.float64
    with pytest.raises(TypeError, match=r"tensors\[0\] must be float16"):
        reduce(constant, [torch.zeros(1, dtype=torch.int32)], 3, 4, "tiled")


def test_results_are_detached_and_inputs_untouched() -> None:
    x = torch.rand(3, 2, requires_grad=True)
    before = x.detach().clone()
    (out,) = call({0: x})
    assert not out.requires_grad and torch.equal(x, before)


@pytest.mark.parametrize("backend", ["auto", "tiled"])
@pytest.mark.parametrize("k", [0, 1, 2])
def test_negatives_that_are_but_a_bit(k: int, backend: str) -> None:
    """The imaginary part of a conjugate is a view of numbers of the other sign."""
    arrays = [torch.randn(3, 2), torch.randn(4, 2), torch.randn(2)]
    plain: list = [*arrays, 1.5]
    view = torch.complex(arrays[k], -arrays[k]).conj().imag
    assert view.is_neg()
    got = reduce(PLAN, [*plain[:k], view, *plain[k + 1 :]], 3, 4, backend)
    torch.testing.assert_close(got, reduce(PLAN, plain, 3, 4, backend), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_computed_in_single_precision(dtype: torch.dtype) -> None:
    plan = make_plan("Sum", var(CAT_J, 0, 1))
    (out,) = reduce(plan, [torch.full((4096, 1), 1.0, dtype=dtype)], 1, 4096, "tiled")
    assert out.dtype == dtype and out.item() == 4096  # a sum in the type itself stops at 256 or 2048
    (out,) = reduce(make_plan("LogSumExp", var(CAT_J, 0, 1)), [torch.zeros(0, 1, dtype=dtype)], 2, 0, "tiled")
    assert out.dtype == dtype and (out == -torch.inf).all()


# --- the choice of a back end ---------------------------------------------------------------------------------------
def _module(reason: str | None) -> SimpleNamespace:
    return SimpleNamespace(available=lambda device: reason, run=None)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str | None]], dict]:
    """Replace the modules of back ends by ones that are available, or not for a reason."""

    def install(reasons: dict[str, str | None]) -> dict:
        modules = {name: _module(reason) for name, reason in reasons.items()}
        real = backends.importlib.import_module

        def import_module(name: str):
            return modules.get(name.rpartition(".")[2]) or real(name)

        monkeypatch.setattr(backends, "importlib", SimpleNamespace(import_module=import_module))
        return modules

    return install


def test_auto_takes_the_first_that_can_run(fake) -> None:
    modules = fake({"cpu": None, "cuda": None})
    assert choose("auto", CPU) is modules["cpu"]
    assert choose("auto", torch.device("cuda", 0)) is modules["cuda"]
    assert choose("auto", torch.device("mps")) is tiled
    assert choose("tiled", CPU) is tiled


def test_falling_back_is_logged_once(fake, caplog: pytest.LogCaptureFixture) -> None:
    fake({"cpu": "there is no C++ compiler"})
    with caplog.at_level(logging.DEBUG, logger="kernops"):
        for _ in range(3):
            assert choose("auto", CPU) is tiled
    assert len(caplog.records) == 1
    assert "there is no C++ compiler" in caplog.text and "tiled" in caplog.text and "cpu" in caplog.text


def test_a_back_end_that_was_asked_for_and_cannot_run_is_an_error(fake) -> None:
    fake({"cpu": "there is no C++ compiler"})
    with pytest.raises(RuntimeError, match="backend: 'cpu' cannot run here: there is no C\\+\\+ compiler"):
        choose("cpu", CPU)
    with pytest.raises(ValueError, match="backend must be 'auto', 'cuda', 'cpu', 'tiled'; got 'gpu'"):
        choose("gpu", CPU)
    with pytest.raises(ValueError, match="backend: 'cuda' computes on cuda; the data is on cpu"):
        choose("cuda", CPU)


def test_environment_variable_says_what_auto_is(fake, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = fake({"cpu": None})
    assert choose("auto", CPU) is modules["cpu"]
    monkeypatch.setenv("KERNOPS_BACKEND", "tiled")
    assert choose("auto", CPU) is tiled
    assert choose("cpu", CPU) is modules["cpu"], "a call that names its back end gets it"
    monkeypatch.setenv("KERNOPS_BACKEND", "auto")
    assert choose("auto", CPU) is modules["cpu"]
    monkeypatch.setenv("KERNOPS_BACKEND", "")
    assert choose("auto", CPU) is modules["cpu"]
    monkeypatch.setenv("KERNOPS_BACKEND", "gpu")
    with pytest.raises(ValueError, match="KERNOPS_BACKEND must be 'auto'.*; got 'gpu'"):
        choose("auto", CPU)
    monkeypatch.setenv("KERNOPS_BACKEND", "cuda")
    with pytest.raises(ValueError, match="KERNOPS_BACKEND: 'cuda' computes on cuda; the data is on cpu"):
        choose("auto", CPU)


def test_every_back_end_of_the_table_can_be_imported() -> None:
    """Importing one must not need what it runs on."""
    for name in BACKENDS:
        module = __import__(f"kernops.backends.{name}", fromlist=["run"])
        reason = module.available(CPU)
        assert callable(module.run) and (reason is None or isinstance(reason, str))


# --- layout ---------------------------------------------------------------------------------------------------------
def test_strides_say_where_every_element_is() -> None:
    """Walking a buffer by the strides gives the broadcast tensor."""
    base = torch.arange(2.0 * 3 * 4 * 5 * 6).reshape(2, 3, 4, 5, 6)
    for t, cat, batch in [
        (base[0, 0], CAT_I, (4,)), (base[0, 0, :1], CAT_I, (7, 4)), (base[0, 0, 0], CAT_J, (3, 2)),
        (base, CAT_J, (2, 3, 4)), (base[:, :1, 0], CAT_I, (2, 3)), (base.transpose(-1, -3), CAT_I, (2, 3, 6)),
        (base[..., ::2, 1::2], CAT_J, (2, 3, 4)),
        (base[0, 0, 0, 0], CAT_P, (3,)), (base[0, 0], CAT_P, (4, 5)), (base[0, 0, 0].expand(9, 5, 6), CAT_I, (9,)),
    ]:  # fmt: skip
        own = layout.own_axes(cat)
        steps = layout.strides(t, cat, batch)
        assert len(steps) == len(batch) + 2
        rows, dim = (t.shape[-2] if own == 2 else 1), t.shape[-1]
        got = base.as_strided((*batch, rows, dim), steps, t.storage_offset())
        want = t if own == 2 else t.unsqueeze(-2)
        assert torch.equal(got, want.expand(*batch, rows, dim))
        assert layout.batch_of(t, cat) == tuple(t.shape[: t.ndim - own])
