"""Properties that hold for every formula, tried on random ones: rewrites keep the value, derivatives are torch's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kernops.backends import reduce
from kernops.codegen.emit import emit
from kernops.formula.autodiff import jvp, vjp
from kernops.formula.graph import CAT_SCALAR, Node, check, const, swap_axes, topological, var
from kernops.formula.ops import OPS, apply, lowered, mul, total
from kernops.formula.plan import make_plan
from kernops.formula.simplify import simplify
from tests.helpers.backends import COMPILED, need
from tests.helpers.cases import TORCH_ERROR
from tests.helpers.program import run_program
from tests.helpers.random_formulas import TENSORS, VARIABLES, M, N, dense, formulas, largest

F64 = torch.float64
LIMIT = 1e4  # where intermediates are larger, cancellation hides what is tested
common = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def _tame(f: Node) -> torch.Tensor:
    """The value of ``f``; gives the example up where an intermediate is not a moderate number."""
    assume(largest(f) < LIMIT)
    return dense(f)


def _close(got: torch.Tensor, want: torch.Tensor, f: Node, tensors=TENSORS) -> None:
    size = 1 + largest(f, tensors)
    torch.testing.assert_close(got, want.expand_as(got), rtol=0, atol=1e-12 * size**2, msg=lambda m: f"{f}\n{m}")


@settings(common, max_examples=120)
@given(formulas())
def test_rewrites_keep_the_value(f: Node) -> None:
    want = _tame(check(f))
    _close(dense(check(lowered(f))), want, f)
    _close(dense(check(simplify(lowered(f)))), want, f)
    assert simplify(lowered(f)).dim == f.dim


@settings(common, max_examples=60)
@given(formulas(), formulas(1))
def test_hoisted_program_gives_the_same(f: Node, w: Node) -> None:
    want = _tame(f)
    plans = {
        "Sum": (make_plan("Sum", f, n_vars=len(TENSORS)), want.sum(1)),
        "Min": (make_plan("Min", f, n_vars=len(TENSORS)), want.amin(1)),
        "LogSumExp": (make_plan("LogSumExp", f, n_vars=len(TENSORS)), want.logsumexp(1)),
    }
    s = _tame(w)
    plans["SumSoftMaxWeight"] = (make_plan("SumSoftMaxWeight", w, f, n_vars=len(TENSORS)), (s.softmax(1) * want).sum(1))
    for plan, expected in plans.values():
        out = run_program(plan, TENSORS, M, N)[0]
        assert out.shape == expected.shape
        _close(out, expected, f if plan.weight is None else mul(w, f))
        assert emit(plan) == emit(plan)


@settings(common, max_examples=60)
@given(formulas(), st.randoms(use_true_random=False))
def test_derivatives_are_those_of_torch(f: Node, random) -> None:
    """Reverse mode, forward mode and their agreement, for every variable at once."""
    _tame(f)
    assume(not any(node.op in TORCH_ERROR for node in topological(f)))
    g = torch.Generator().manual_seed(random.randrange(2**31))
    leaves = [t.clone().requires_grad_() if isinstance(t, torch.Tensor) else t for t in TENSORS]
    tensors = [t for t in leaves if isinstance(t, torch.Tensor)]
    along = [torch.rand(t.shape, generator=g, dtype=F64) - 0.5 for t in tensors]
    weight = torch.rand(M, N, f.dim, generator=g, dtype=F64)
    value = dense(f, leaves)
    if not value.requires_grad:
        return
    grads = torch.autograd.grad((value * weight).sum(), tensors, allow_unused=True, materialize_grads=True)
    assume(all(bool((x.abs() < LIMIT).all()) for x in grads))

    wrt = [v for v in VARIABLES if v.params[0] != CAT_SCALAR]
    # the weight of a pair is a table: one-hot of the row against a j-variable
    n_vars = len(VARIABLES)
    pick = apply("OneHot", var(0, n_vars, 1), params=(M,))
    parts = [apply("Dot", pick, var(1, n_vars + 1 + c, M)) for c in range(f.dim)]
    w = parts[0]
    for part in parts[1:]:
        w = apply("Concat", w, part)
    extra = [torch.arange(float(M), dtype=F64)[:, None], *(weight[:, :, c].T for c in range(f.dim))]
    cotangents = vjp([(f, w)], wrt)
    for v, c, want in zip(wrt, cotangents, grads):
        if c is None:
            assert not want.any(), f"{f}: no cotangent for {v}"
            continue
        assert check(c).dim == v.dim
        per_pair = dense(c, [*TENSORS, *extra])
        got = {0: lambda t: t.sum(1), 1: lambda t: t.sum(0), 2: lambda t: t.sum((0, 1))}[v.params[0]](per_pair)
        _close(got, want, c, [*TENSORS, *extra])

    tangents = {v: var(v.params[0], n_vars + k, v.dim) for k, v in enumerate(wrt)}  # type: ignore[arg-type]
    df = jvp(f, tangents)
    forward = torch.zeros(()) if df is None else (dense(check(df), [*TENSORS, *along]) * weight).sum()
    reverse = sum((a * b).sum() for a, b in zip(along, grads))
    torch.testing.assert_close(forward.double(), reverse, rtol=1e-8, atol=1e-8, msg=lambda m: f"{f}\n{m}")


@settings(common, max_examples=20)
@given(formulas())
def test_reduction_over_rows_is_that_over_columns_of_the_swapped(f: Node) -> None:
    want = _tame(f).sum(0)
    (got,) = reduce(make_plan("Sum", check(swap_axes(f)), n_vars=len(TENSORS)), TENSORS, N, M, "tiled")
    _close(got, want, f)


@pytest.mark.parametrize("backend", COMPILED)
def test_compiled_back_ends_agree(backend: str) -> None:
    """Many random formulas in few compilations: each contributes its sum of components to one long vector."""
    need(backend)

    @settings(common, max_examples=4)
    @given(st.lists(formulas(depth=2), min_size=12, max_size=12))
    def run(many: list[Node]) -> None:
        root: Node = const(0.0)
        for f in many:
            if largest(f) < LIMIT:
                root = apply("Concat", root, total(f))
        want = dense(root).sum(1)
        (got,) = reduce(make_plan("Sum", root, n_vars=len(TENSORS)), TENSORS, M, N, backend)
        _close(got, want, root)

    run()


def test_random_formulas_reach_most_ops() -> None:
    """The generator is worth something: it meets most ops that it may draw."""
    seen: set[str] = set()

    @settings(common, max_examples=150)
    @given(formulas())
    def run(f: Node) -> None:
        seen.update(node.op for node in topological(f))

    run()
    assert len(seen & set(OPS)) > 0.5 * sum(1 for op in OPS.values() if not op.params)
