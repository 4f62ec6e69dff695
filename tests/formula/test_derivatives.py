"""Derivatives where random data does not go: zeros, edges, whole powers, broadcasts, and the rules of reductions."""

from __future__ import annotations

import math

import pytest
import torch

from kernops.backends import reduce
from kernops.formula.autodiff import jvp, vjp
from kernops.formula.graph import (
    CAT_I,
    CAT_J,
    CAT_P,
    CAT_SCALAR,
    Node,
    check,
    const,
    swap_axes,
    topological,
    var,
)
from kernops.formula.ops import add, apply, broadcast, div, mul, power, sub, total
from kernops.formula.plan import make_plan
from kernops.formula.reductions import CORES, REDUCTION_NAMES, REDUCTIONS, gradient_formulas
from tests.helpers.backends import ON_CPU, need
from tests.helpers.cases import choice
from tests.helpers.program import compute

F64 = torch.float64
INF = math.inf
x = var(CAT_I, 0, 1)


def value_at(f: Node | None, *numbers: float, backend: str = "tiled", dtype: torch.dtype = F64) -> float:
    """The value of a formula of i-variables number 0, 1, ... of dimension 1."""
    if f is None:
        return 0.0
    tensors = [torch.tensor([[v]], dtype=dtype) for v in numbers]
    (out,) = reduce(make_plan("Sum", check(f), n_vars=len(numbers)), tensors, 1, 1, backend)
    return out.item()


def derivatives(f: Node, order: int, wrt: Node = x) -> list[Node | None]:
    out: list[Node | None] = [f]
    for _ in range(order):
        last = out[-1]
        out.append(None if last is None else vjp([(last, const(1.0))], [wrt])[0])
    return out


# --- single points --------------------------------------------------------------------------------------------------
#: formula, point, value and its derivatives there.
POINTS: list[tuple[Node, float, list[float]]] = [
    (apply("Sqrt", x), 0.0, [0.0, 0.0, 0.0]),
    (apply("Norm2", x), 0.0, [0.0, 0.0, 0.0]),
    (apply("Sqrt", apply("Square", x)), -3.0, [3.0, -1.0, 0.0]),
    (apply("Abs", x), 0.0, [0.0, 0.0, 0.0]),
    (apply("ReLU", x), 0.0, [0.0, 0.0, 0.0]),
    (apply("SinXDivX", x), 0.0, [1.0, 0.0, -1 / 3, 0.0]),
    (apply("SinXDivX", x), 1e-7, [1.0, -1e-7 / 3, -1 / 3]),
    (power(x, 3), 0.0, [0.0, 0.0, 0.0, 6.0]),
    (power(x, 2), 0.0, [0.0, 0.0, 2.0, 0.0]),
    (power(x, -2), -2.0, [0.25, 0.25, 0.375, 0.75]),
    (power(x, -1), -2.0, [-0.5, -0.25, -0.25, -0.375]),
    (apply("PowInt", x, params=(0,)), 0.0, [1.0, 0.0, 0.0]),
    (apply("PowInt", x, params=(1,)), 0.0, [0.0, 1.0, 0.0]),
    (apply("Pow", x, 3.0), -2.0, [-8.0, 12.0, -12.0, 6.0]),
    (apply("Pow", x, 2.0), 0.0, [0.0, 0.0, 2.0]),
    (apply("Pow", x, -2.0), -2.0, [0.25, 0.25, 0.375]),
    (apply("Pow", 2.0, x), 3.0, [8.0, 8 * math.log(2), 8 * math.log(2) ** 2]),
    (apply("Pow", 0.0, x), 2.0, [0.0, 0.0, 0.0]),
    (apply("XLogX", x), 1.0, [0.0, 1.0, 1.0, -1.0]),
    (apply("Exp", mul(-2.0, power(x, 2))), 0.0, [1.0, 0.0, -4.0, 0.0]),
    (apply("Matern", mul(5.0, power(x, 2)), params=(2,)), 0.0, [1.0, 0.0, -5 / 3, 0.0, 25.0]),
    (apply("Matern", mul(3.0, power(x, 2)), params=(1,)), 0.0, [1.0, 0.0, -3.0]),
    (apply("Where", x, power(x, 2), mul(3.0, x)), 0.0, [0.0, 3.0, 0.0]),
    (apply("IfElse", x, power(x, 2), mul(3.0, x)), 0.0, [0.0, 0.0, 2.0]),
    (apply("IfElse", x, power(x, 2), mul(3.0, x)), -1.0, [-3.0, 3.0, 0.0]),
    (apply("Heaviside", x, add(x, 5.0)), 0.0, [5.0, 1.0, 0.0]),
    (apply("Mod", x, 3.0), -1.0, [2.0, 1.0, 0.0]),
    (apply("Mod", 7.5, x), 2.0, [1.5, -3.0, 0.0]),
    (apply("Mod", -7.5, x), 2.0, [0.5, 4.0, 0.0]),
    (apply("Atan2", x, -1.0), 0.0, [math.pi, -1.0, 0.0]),
    (apply("Log", x), 2.0, [math.log(2), 0.5, -0.25, 0.25]),
    (apply("Lgamma", x), 1.0, [0.0, -0.5772156649015329, math.pi**2 / 6, -2.4041138063191885]),
    (apply("Erf", x), 0.0, [0.0, 2 / math.sqrt(math.pi), 0.0, -4 / math.sqrt(math.pi)]),
    (apply("Sigmoid", x), 800.0, [1.0, 0.0, 0.0]),
    (apply("Softplus", x), -800.0, [0.0, 0.0, 0.0]),
    (apply("LogAddExp", x, 1000.0), -1000.0, [1000.0, 0.0, 0.0]),
    (apply("Clamp", x, -1.0, 1.0), 1.0, [1.0, 1.0, 0.0]),
    (apply("Clamp", x, -1.0, 1.0), 5.0, [1.0, 0.0, 0.0]),
]


@pytest.mark.parametrize("k", range(len(POINTS)), ids=lambda k: f"{str(POINTS[k][0])[:40]}@{POINTS[k][1]:g}")
def test_derivatives_at_points(k: int) -> None:
    f, at, want = POINTS[k]
    got = [value_at(d, at) for d in derivatives(f, len(want) - 1)]
    assert got == pytest.approx(want, rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("backend", ON_CPU)
def test_derivatives_at_points_on_every_back_end(backend: str) -> None:
    """The first derivatives of all of the above in one formula, in single precision."""
    need(backend)
    which = var(CAT_I, 1, 1)
    root = choice([derivatives(f, 1)[1] or const(0.0) for f, _, _ in POINTS], which)
    tensors = [torch.tensor([[at] for _, at, _ in POINTS]), torch.arange(float(len(POINTS)))[:, None]]
    (out,) = reduce(make_plan("Sum", root), tensors, len(POINTS), 1, backend)
    torch.testing.assert_close(out[:, 0], torch.tensor([want[1] for _, _, want in POINTS]), rtol=2e-5, atol=1e-5)


def test_second_derivative_of_sinc_in_single_precision() -> None:
    """(cos a - sin(a) / a) / a, computed as it is written, is off by more than its size near 0."""
    for at in (1e-6, 1e-4, 1e-2, 0.5, 0.999, 1.001, 3.0):
        a = torch.tensor(at, dtype=F64)
        exact = [(a.cos() - a.sin() / a) / a if at > 0.1 else -a / 3 + a**3 / 30 - a**5 / 840]
        exact.append(-(a.sin() / a + 2 * exact[0] / a))
        for order, want in enumerate(exact, 1):
            got = value_at(derivatives(apply("SinXDivX", x), order)[order], at, dtype=torch.float32)
            assert got == pytest.approx(want.item(), rel=3e-6)


def test_gaussian_hessian_trace_by_hand() -> None:
    """Two reverse passes over exp(-|x - y|²) against the closed form."""
    a, b = var(CAT_I, 0, 3), var(CAT_J, 1, 3)
    f = apply("Exp", mul(-1.0, apply("SqDist", a, b)))
    (g,) = vjp([(f, const(1.0))], [a])
    assert g is not None
    trace: Node = const(0.0)
    for k in range(3):
        (h,) = vjp([(apply("Elem", g, params=(k,)), const(1.0))], [a])
        assert h is not None
        trace = add(trace, apply("Elem", h, params=(k,)))
    u, v = torch.rand(2, 3, dtype=F64), torch.rand(5, 3, dtype=F64)
    (got,) = reduce(make_plan("Sum", check(trace)), [u, v], 2, 5, "tiled")
    d2 = torch.cdist(u, v) ** 2
    torch.testing.assert_close(got[:, 0], ((4 * d2 - 6) * torch.exp(-d2)).sum(1))


# --- dimensions -----------------------------------------------------------------------------------------------------
VECTOR = var(CAT_I, 0, 3)
LINEAR = {
    "Sum": apply("Sum", VECTOR),
    "Extract": apply("Extract", VECTOR, params=(1, 2)),
    "ExtractT": apply("ExtractT", VECTOR, params=(1, 5)),
    "Concat": apply("Concat", VECTOR, var(CAT_J, 1, 2)),
    "Concat of a broadcast": apply("Concat", broadcast(var(CAT_J, 1, 1), 2), VECTOR),
    "Einsum": apply("Einsum", VECTOR, var(CAT_J, 1, 3), params=("i,i->", (3,))),
    "Add": add(VECTOR, var(CAT_J, 1, 1)),
    "Max": apply("Max", VECTOR),
    "Dot": apply("Dot", VECTOR, var(CAT_J, 1, 1)),
    "MatVecMult": apply("MatVecMult", var(CAT_J, 1, 6), VECTOR),
}


@pytest.mark.parametrize("name", LINEAR)
def test_a_tangent_of_dimension_one_means_all_components(name: str) -> None:
    f = LINEAR[name]
    one, three = (jvp(f, {VECTOR: t}) for t in (var(CAT_I, 2, 1), var(CAT_I, 2, 3)))
    assert one is not None and three is not None and check(one).dim == check(three).dim == f.dim
    dim = next((n.dim for n in topological(f) if n.is_var and n.params[1] == 1), 1)
    u, v, t = torch.rand(2, 3, dtype=F64), torch.rand(4, dim, dtype=F64), torch.rand(2, 1, dtype=F64)
    (a,) = reduce(make_plan("Sum", one, n_vars=3), [u, v, t], 2, 4, "tiled")
    (b,) = reduce(make_plan("Sum", three, n_vars=3), [u, v, t.expand(2, 3)], 2, 4, "tiled")
    torch.testing.assert_close(a, b)


def test_zero_tangent_of_an_infinite_value_is_zero() -> None:
    f = apply("Concat", VECTOR, var(CAT_J, 1, 1))
    df = jvp(f, {VECTOR: const(1.0)})
    assert df is not None
    (out,) = reduce(make_plan("Sum", df, n_vars=2), [torch.zeros(1, 3), torch.tensor([[INF]])], 1, 1, "tiled")
    assert out.tolist() == [[1.0, 1.0, 1.0, 0.0]]


def test_what_does_not_depend_has_no_derivative() -> None:
    y = var(CAT_J, 1, 3)
    f = apply("SqDist", VECTOR, y)
    assert vjp([(f, const(1.0))], [var(CAT_P, 5, 3)]) == [None]
    assert jvp(f, {var(CAT_P, 5, 3): const(1.0)}) is None
    assert vjp([(apply("Floor", VECTOR), const(1.0))], [VECTOR]) == [None]
    assert jvp(apply("ArgMax", VECTOR), {VECTOR: const(1.0)}) is None
    assert vjp([(VECTOR, const(1.0))], [VECTOR])[0] is broadcast(const(1.0), 3)


def test_the_same_variable_twice_and_several_pairs() -> None:
    f = mul(x, add(x, apply("Sin", x)))
    assert value_at(vjp([(f, const(1.0)), (power(x, 2), const(3.0)), (f, const(2.0))], [x])[0], 0.7) == pytest.approx(
        3 * (0.7 + math.sin(0.7) + 0.7 * (1 + math.cos(0.7))) + 6 * 0.7
    )


def test_scalars_are_differentiated_like_parameters() -> None:
    s, y = var(CAT_SCALAR, 1, 1), var(CAT_J, 0, 3)
    (g,) = vjp([(mul(s, power(y, 2)), const(1.0))], [s])
    data = torch.rand(4, 3, dtype=F64)
    (out,) = reduce(make_plan("Sum", g, n_vars=2), [data, 2.0], 1, 4, "tiled")
    torch.testing.assert_close(out[0, 0], (data**2).sum())


# --- derivatives of reductions --------------------------------------------------------------------------------------
def _formulas(core: str) -> tuple[Node, Node | None]:
    a, b, p = var(CAT_I, 0, 2), var(CAT_J, 1, 2), var(CAT_P, 2, 2)
    f = mul(p, apply("Sin", sub(mul(2.0, a), b)))
    return (total(f), mul(p, apply("Cos", add(a, b)))) if core == "SumSoftMaxWeight" else (f, None)


def _torch_result(core: str, a, b, p) -> tuple[torch.Tensor, ...]:
    a, b = a[:, None], b[None]
    f = p * torch.sin(2 * a - b)
    if core == "SumSoftMaxWeight":
        s, w = f.sum(-1, keepdim=True), p * torch.cos(a + b)
        return (s.softmax(1) * w).sum(1), s.logsumexp(1)
    return (f.sum(1) if core == "Sum" else f.logsumexp(1),)


@pytest.mark.parametrize("core", [name for name, c in CORES.items() if c.cotangents])
def test_derivative_rules_of_cores(core: str, backend: str = "tiled") -> None:
    """Cotangents and tangents of a reduction are sums of formulas; torch.autograd on the dense table says which."""
    m, n = 3, 5
    tensors = [torch.rand(s, dtype=F64) for s in ((m, 2), (n, 2), (2,))]
    leaves = [t.clone().requires_grad_() for t in tensors]
    want_outs = _torch_result(core, *leaves)
    gs = [torch.rand_like(o) for o in want_outs]
    want = torch.autograd.grad(want_outs, leaves, gs)

    f, w = _formulas(core)
    outs = reduce(make_plan(core, f, w), tensors, m, n, backend)
    out_vars = tuple(var(CAT_I, 3 + k, o.shape[-1]) for k, o in enumerate(outs))
    g_vars = tuple(var(CAT_I, 6 + k, o.shape[-1]) for k, o in enumerate(outs))
    wrt = [var(CAT_I, 0, 2), var(CAT_J, 1, 2), var(CAT_P, 2, 2)]
    values = [*tensors, *outs, *[None] * (3 - len(outs)), *gs, *[None] * (3 - len(gs))]
    for v, formula, expected in zip(wrt, gradient_formulas(core, f, w, out_vars, g_vars, wrt), want):
        assert formula is not None
        over_rows = v.params[0] == CAT_J
        formula = swap_axes(formula) if over_rows else formula
        moved = [values[k] for k in range(9)]
        (got,) = reduce(make_plan("Sum", check(formula), n_vars=9), moved, *((n, m) if over_rows else (m, n)), backend)
        torch.testing.assert_close(got.sum(0) if v.params[0] == CAT_P else got, expected)

    along = [torch.rand_like(t) for t in tensors]
    want_forward = sum((a * t).sum() for a, t in zip(want, along))  # forward and reverse mode are adjoint
    tangents = {v: var(v.params[0], 6 + k, 2) for k, v in enumerate(wrt)}  # type: ignore[arg-type]
    summands = CORES[core].tangents(f, w, out_vars, tangents)  # type: ignore[misc]
    got_forward = 0.0
    for summand, g in zip(summands, gs):
        assert summand is not None
        (got,) = reduce(make_plan("Sum", check(summand), n_vars=9), [*values[:6], *along], m, n, backend)
        got_forward += (got * g).sum().item()
    assert got_forward == pytest.approx(float(want_forward), rel=1e-11)


def test_cores_without_a_rule_say_so() -> None:
    with pytest.raises(ValueError, match="gather"):
        gradient_formulas("KMin", x, None, (x,), (x,), [x])


def test_softmax_tangent_of_the_weight_alone() -> None:
    f, w = _formulas("SumSoftMaxWeight")
    only = var(CAT_J, 4, 2)
    outs = (var(CAT_I, 5, 2), var(CAT_I, 6, 1))
    d_mean, d_lse = CORES["SumSoftMaxWeight"].tangents(f, mul(w, only), outs, {only: const(1.0)})  # type: ignore[misc,arg-type]
    assert d_mean is not None and check(d_mean).dim == 2 and d_lse is None


# --- the table of reductions ----------------------------------------------------------------------------------------
def test_table_of_reductions() -> None:
    for name, r in REDUCTIONS.items():
        assert r.name == name and REDUCTION_NAMES[name] == name and r.doc
        assert set(r.returns) <= set(CORES[r.core].outputs)
        assert r.takes_k == (r.core == "KMin") and r.sign in (1, -1)
        assert all(REDUCTION_NAMES[alias] == name for alias in r.aliases)
    for name in ("Sum", "LogSumExp", "SumSoftMaxWeight", "Min", "ArgMin", "Min_ArgMin", "Max", "ArgMax", "Max_ArgMax",
                 "KMin", "ArgKMin", "KMin_ArgKMin", "KMax", "ArgKMax", "Kmin", "ArgKmin", "Kmin_argKmin"):  # fmt: skip
        assert name in REDUCTION_NAMES


# --- constants keep double precision --------------------------------------------------------------------------------
@pytest.mark.parametrize("backend", ["program", *ON_CPU])
def test_constants_keep_double_precision(backend: str) -> None:
    """x / 3, x ** 1.7, x + 16777217, and constants that rewrites fold, right to 1e-15."""
    need(backend)
    a, b = var(CAT_I, 0, 1), var(CAT_J, 1, 1)
    u = torch.tensor([[1.1], [2.7], [0.3]], dtype=F64)
    v = torch.tensor([[0.9]], dtype=F64)
    p = u * v
    table = {
        div(mul(a, b), 3.0): p / 3,
        apply("Pow", mul(a, b), 1.7): p**1.7,
        add(mul(a, b), 16777217.0): p + 16777217,
        mul(1 / 3, mul(3.3, mul(a, b))): p * (1 / 3 * 3.3),
        apply("Exp", div(mul(a, b), -0.7)): (p / -0.7).exp(),
        apply("Exp", mul(-1 / 7, mul(a, b))): (p * (-1 / 7)).exp(),
        sub(mul(a, b), apply("Sqrt", const(2.0))): p - 2**0.5,
        mul(apply("Exp", const(1.0)), mul(a, b)): math.e * p,
        add(mul(a, b), 1e-17): p + 1e-17,
        mul(mul(a, b), 1e300): p * 1e300,
        mul(mul(a, b), 1e-300): p * 1e-300,
        apply("Maximum", mul(a, b), -math.inf): p,
        apply("Minimum", mul(a, b), math.inf): p,
        apply("Maximum", mul(a, b), math.inf): p + math.inf,
        mul(mul(a, b), math.nan): p * math.nan,
        div(1.0, mul(-0.0, mul(a, b))): torch.full_like(p, -math.inf),
    }
    root: Node | None = None
    for f in table:
        root = f if root is None else apply("Concat", root, f)
    assert root is not None
    (got,) = compute(make_plan("Sum", check(root)), [u, v], 3, 1, backend)
    want = torch.cat(list(table.values()), -1)
    assert torch.equal(got.isnan(), want.isnan())
    for k, f in enumerate(table):
        torch.testing.assert_close(
            got[:, k], want[:, k], rtol=1e-15, atol=0, equal_nan=True, msg=f"{f}: {got[:, k]}, not {want[:, k]}"
        )
