"""The tests of ops must fail on a wrong row: each part of each row is broken in turn, a little, and must be noticed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from kernops.formula.ops import OPS, Op, apply, mul
from kernops.formula.plan import make_plan
from tests.backends.test_ops import test_reference_against_third_party as check_reference
from tests.backends.test_ops import test_text_and_reference_agree as check_text
from tests.helpers.backends import COMPILED, need
from tests.helpers.cases import cases, check_cases
from tests.helpers.third_party import THIRD_PARTY

OFF = 1.001


def _scaled(values, which: int):
    """``values`` with number ``which`` off by a factor."""
    return tuple(mul(OFF, v) if k == which and v is not None else v for k, v in enumerate(values))


#: What to break -> a copy of the row with that broken, for argument number ``which``.
BREAK: dict[str, Callable[[Op, int], Op]] = {
    "partials": lambda op, w: replace(op, partials=lambda *a: _scaled(op.partials(*a), w)),  # type: ignore[misc]
    "vjp": lambda op, w: replace(op, vjp=lambda node, g: _scaled(op.vjp(node, g), w)),  # type: ignore[misc]
    "jvp": lambda op, w: replace(op, jvp=lambda node, ts: _scaled((op.jvp(node, ts),), 0)[0]),  # type: ignore[misc]
    "lower": lambda op, w: replace(op, lower=lambda *a: apply("Add", op.lower(*a), 1e-6)),  # type: ignore[misc]
    "ref": lambda op, w: replace(op, ref=lambda *a: op.ref(*a) * OFF),
    "text": lambda op, w: replace(op, text=f"({op.text} + kn::splat<V>(1e-6))"),
}
#: Derivatives that are zero wherever tests draw.
ZERO = {"Sign", "Step", "Round", "Floor", "Equal", "NotEqual", "Less", "LessEqual", "ArgMax", "ArgMin", "OneHot"}
ZERO_OF = {("Heaviside", 0), ("Where", 0), ("IfElse", 0)}


@pytest.fixture(autouse=True)
def _no_plan_outlives_its_table() -> Iterator[None]:
    make_plan.cache_clear()  # plans keep what was made of a composite op
    yield
    make_plan.cache_clear()


def _breakages() -> list[tuple[str, str, int]]:
    out = []
    for name, op in OPS.items():
        for part in BREAK:
            if getattr(op, part) is None or part in ("partials", "vjp", "jvp") and name in ZERO:
                continue
            arguments = range(op.arity) if part in ("partials", "vjp") else [0]
            out += [(name, part, k) for k in arguments if (name, k) not in ZERO_OF or part in ("ref", "text")]
    return out


def _check(name: str) -> None:
    for backend in ("tiled", "program"):  # composites: the one calls their references, the other what they are made of
        check_cases(cases(OPS[name]), backend, vector=True)
    if OPS[name].scalar:
        check_text(name)
    if name in THIRD_PARTY:
        check_reference(name)


@pytest.mark.parametrize("name, part, which", _breakages())
def test_broken_row_is_noticed(name: str, part: str, which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPS, name, BREAK[part](OPS[name], which))
    with pytest.raises(AssertionError):
        _check(name)


@pytest.mark.parametrize("backend", COMPILED)
def test_broken_text_is_noticed_on_a_compiled_back_end(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    need(backend)
    monkeypatch.setitem(OPS, "Tanh", replace(OPS["Tanh"], text="kn::tan({0})"))
    with pytest.raises(AssertionError, match="Tanh"):
        check_cases(cases(OPS["Tanh"])[:1], backend)
