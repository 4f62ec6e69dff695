"""Derivatives of reductions against finite differences and against dense torch in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from kernops.autograd import derivatives as derivatives_module
from kernops.autograd import reduce
from kernops.formula.graph import CAT_I, CAT_J, CAT_P, var
from kernops.formula.ops import add, apply, mul, neg, sub
from kernops.formula.plan import make_plan
from tests.helpers.reductions import CASES, FORMULAS, SMOOTH, Case

Tensor = torch.Tensor


def parameters(values: list) -> list:
    return [t.detach().requires_grad_() if isinstance(t, Tensor) else t for t in values]


def flat(values: list) -> list[Tensor]:
    return [t for t in values if isinstance(t, Tensor)]


def scalar(outs: tuple[Tensor, ...]) -> Tensor:
    """A number that depends on every entry in its own way."""
    return sum((o * torch.linspace(0.5, 1.5, o.numel(), dtype=o.dtype).reshape(o.shape)).sin().sum() for o in outs)  # type: ignore[return-value]


def derivatives(function, values: list, order: int = 2) -> list[Tensor]:
    """First derivatives of a function of the results by every tensor, then those of a function of the first ..."""
    inputs = flat(values)
    found: list[Tensor] = []
    value = scalar(function(values))
    for _ in range(order):
        grads = torch.autograd.grad(value, inputs, create_graph=True, materialize_grads=True)
        found += grads
        value = scalar(grads)
        if not value.requires_grad:
            break
    return found


def check_case(case: Case, values: list, backend: str, order: int = 2, rtol: float = 1e-9) -> None:
    ours, dense = parameters(values), parameters(values)
    for got, want in zip(case.ours(ours, backend), case.dense(dense), strict=True):
        torch.testing.assert_close(got, want, rtol=rtol, atol=rtol)
    got_all = derivatives(lambda v: case.ours(v, backend), ours, order)
    for got, want in zip(got_all, derivatives(case.dense, dense, order), strict=True):
        assert got.shape == want.shape and got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.reduction}-{c.formula}")
def test_gradients_are_those_of_dense_torch(case):
    check_case(case, case.data(), "tiled", order=3 if case.formula == "laplace" else 2)


@pytest.mark.parametrize(
    ("reduction", "formula", "order"),
    [
        ("Sum", "gauss", 1),
        ("Sum", "laplace", 2),
        ("LogSumExp", "laplace", 1),
        ("SumSoftMaxWeight", "gauss", 1),
        ("KMin", "gauss", 1),
    ],
)
def test_every_back_end_gives_the_gradients(reduction, formula, order, backend):
    """A few, as compilers are slow; what is differentiated is the same for all of them."""
    case = Case(reduction, formula)
    check_case(case, case.data(m=7, n=9), backend, order)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.reduction}-{c.formula}")
def test_finite_differences(case):
    values = parameters(case.data(m=2, n=3))

    def function(*inputs: Tensor):
        left = list(inputs)
        return case.ours([left.pop(0) if isinstance(t, Tensor) else t for t in values])

    inputs = flat(values)
    batched = {"check_batched_grad": True, "check_batched_forward_grad": True}
    assert gradcheck(function, inputs, fast_mode=True, check_forward_ad=True, **batched)
    assert gradgradcheck(function, inputs, fast_mode=True, check_fwd_over_rev=True, check_batched_grad=True)


#: Batch shapes of the variables of "gauss" (x, y, b, s).
BATCHES = {
    "parameter alone": ((), (), (), (3,)),
    "one operand each": ((2, 1, 1), (3, 1), (1,), (2,)),
    "adjacent singletons": ((1, 1, 2), (1, 1, 2), (4, 1, 1), (1, 1, 1)),
    "all": ((2, 3), (2, 3), (2, 3), (2, 3)),
    "one broadcasts over two": ((2, 3), (2, 1), (3,), ()),
    "length one": ((1,), (), (1, 1), ()),
}


@pytest.mark.parametrize("reduction", ["Sum", "LogSumExp", "SumSoftMaxWeight", "Min", "KMin"])
@pytest.mark.parametrize("batches", BATCHES.values(), ids=BATCHES)
def test_batches(reduction, batches):
    case = Case(reduction, "gauss")
    check_case(case, case.data(batches=batches), "tiled")


@pytest.mark.parametrize("batches", [BATCHES["parameter alone"], BATCHES["one operand each"]], ids=str)
def test_batches_on_every_back_end(batches, backend):
    case = Case("Sum", "gauss")
    check_case(case, case.data(batches=batches), backend, order=1)


LAYOUTS = {
    "transposed": lambda t: t.detach().transpose(-1, -2).contiguous().transpose(-1, -2),
    "every second row": lambda t: t.detach().repeat_interleave(2, 0)[::2],
    "expanded": lambda t: t.detach()[:1].expand(t.shape),
    "with an offset": lambda t: torch.cat([t.detach(), t.detach()])[t.shape[0] :],
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("reduction", ["Sum", "KMin"])
def test_layouts(layout, reduction):
    case = Case(reduction, "gauss")
    values = [layout(t) for t in case.data()[:3]] + case.data()[3:]
    values[1] = case.data(seed=1)[1].mT.contiguous().mT  # no two columns alike: else the minimum has no derivative
    check_case(case, values, "tiled")


def test_expanded_inputs_sum_up():
    """The gradient of what was expanded is the sum over the copies, through torch's own expand."""
    case = Case("Sum", "gauss")
    x, y, b, s = parameters(case.data())
    one = x.detach()[:1].requires_grad_()
    (got,) = torch.autograd.grad(scalar(case.ours([one.expand(4, 3), y, b, s])), one)
    (want,) = torch.autograd.grad(scalar(case.dense([one.expand(4, 3), y, b, s])), one)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("reduction", ["Sum", "LogSumExp", "KMin"])
def test_the_same_tensor_as_rows_and_as_columns(reduction):
    case = Case(reduction, "gauss")
    _, _, b, s = case.data(m=5, n=5)

    def both(function):
        x = case.data(m=5, n=5)[0].requires_grad_()
        return derivatives(lambda v: function([v[0], v[0], b, s]), [x])

    for got, want in zip(both(case.ours), both(case.dense), strict=True):
        torch.testing.assert_close(got, want)


@pytest.fixture
def passes(monkeypatch) -> list:
    """The plans of the passes over the pairs, in order."""
    import kernops.backends

    calls: list = []
    original = kernops.backends.reduce

    def spy(plan, *rest):
        calls.append(plan)
        return original(plan, *rest)

    monkeypatch.setattr(kernops.backends, "reduce", spy)
    return calls


def test_only_what_is_asked_for_is_computed(passes):
    """One pass over the pairs for the gradients over each axis, and none for what needs none."""
    case = Case("Sum", "gauss")
    for wanted, count in (({0}, 1), ({1}, 1), ({0, 3}, 1), ({1, 2}, 1), ({0, 1, 2, 3}, 2)):
        values = [t.requires_grad_(k in wanted) for k, t in enumerate(case.data())]
        (out,) = case.ours(values)
        passes.clear()
        out.sum().backward()
        assert len(passes) == count
        assert [t.grad is not None for t in values] == [k in wanted for k in range(4)]


#: exp(-s |x - y|²) b, whose b has one component.
ONE_COLUMN = make_plan("Sum", FORMULAS["gauss"].node(*(var(c, k, d) for k, (c, d) in enumerate(
    zip((CAT_I, CAT_J, CAT_J, CAT_P), (3, 3, 1, 1))))))  # fmt: skip
SCALAR_BATCHES = {"plain": ((), (), (), ()), "batches": ((2, 1), (3,), (), (2, 3))}


@pytest.mark.parametrize("batches", SCALAR_BATCHES.values(), ids=SCALAR_BATCHES)
def test_a_scalar_sum_takes_two_passes_for_its_value_and_all_gradients(passes, batches, backend):
    """The value with the row's derivatives, whose cotangent is a factor; then those of the column."""
    x, y, b, s = FORMULAS["gauss"].data(batches=batches)
    values = [x, y, b[..., :1].contiguous(), s]
    (x, y, b, s), dense = parameters(values), parameters(values)
    (out,) = reduce(ONE_COLUMN, [x, y, b, s], 4, 5, backend)
    want = FORMULAS["gauss"].pairs(dense).sum(-2)
    torch.testing.assert_close(out, want, rtol=1e-9, atol=1e-9)
    assert out.is_contiguous()
    g = torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).reshape(out.shape)
    expected = torch.autograd.grad(want, dense, g)
    got = torch.autograd.grad(out, [x, y, b, s], g)
    assert len(passes) == 2
    for first, second in zip(got, expected, strict=True):
        assert first.is_contiguous() and first.shape == second.shape
        torch.testing.assert_close(first, second, rtol=1e-9, atol=1e-9)
    (out,) = reduce(ONE_COLUMN, [x, y, b, s], 4, 5, "tiled")
    passes.clear()
    torch.autograd.grad(out, y, g)  # the others are there, but nothing asks for them
    assert len(passes) == 1
    (out,) = reduce(ONE_COLUMN, [x.detach(), y, b.detach(), s.detach()], 4, 5, "tiled")
    assert passes[-1].dim == 1, "no derivative is computed where none can be asked for"


def test_a_gpu_shares_passes_of_few_components_only():
    """More are left to its matrix units."""
    gpu, cpu = (derivatives_module.fused_width(torch.device(name)) for name in ("cuda", "cpu"))
    assert gpu < cpu
    for dim, together in ((gpu - 1, True), (gpu, False)):
        square = apply("SqDist", var(CAT_I, 0, dim), var(CAT_J, 1, dim))
        plan = make_plan("Sum", mul(apply("Exp", neg(square)), var(CAT_J, 2, 1)))
        assert (derivatives_module.slopes(plan, (True, True, True), gpu) is not None) == together
        assert len(derivatives_module.gradient_passes(plan, (1, 2), (True,), gpu)) == (1 if together else 2)
        assert derivatives_module.slopes(plan, (False, True, True), gpu) is None


def test_higher_derivatives_of_a_scalar_sum():
    """They do not come from what the first pass has computed, which autograd takes for a number."""
    case = Case("Sum", "gauss")
    x, y, b, s = case.data(m=3, n=4)
    values = parameters([x, y, b[:, :1], s])

    def function(*inputs: Tensor) -> Tensor:
        return reduce(ONE_COLUMN, inputs, 3, 4, "tiled")[0]

    assert gradcheck(function, values, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(function, values, check_fwd_over_rev=True, check_batched_grad=True)
    got = derivatives(lambda v: (function(*v),), values, order=3)
    dense = derivatives(lambda v: (FORMULAS["gauss"].pairs(v).sum(-2),), values, order=3)
    for first, second in zip(got, dense, strict=True):
        torch.testing.assert_close(first, second)


def test_a_value_that_is_changed_in_place_does_not_change_its_gradient():
    x, y = (torch.rand(n, 2, dtype=torch.float64) for n in (3, 4))
    plan = make_plan("Sum", apply("Exp", neg(apply("SqDist", var(CAT_I, 0, 2), var(CAT_J, 1, 2)))))
    x.requires_grad_()
    (out,) = reduce(plan, [x, y], 3, 4, "tiled")
    (want,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
    out.mul_(2.0)
    (got,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(got, 2 * want)


def test_one_output_of_two():
    """Either output of a softmax-weighted sum may be left unused."""
    case = Case("SumSoftMaxWeight", "gauss")
    for which in (0, 1):
        ours, dense = parameters(case.data()), parameters(case.data())
        got = derivatives(lambda v, k=which: case.ours(v)[k : k + 1], ours)
        want = derivatives(lambda v, k=which: case.dense(v)[k : k + 1], dense)
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w)


def test_what_the_formula_does_not_depend_on_has_no_gradient():
    x, y, z = (torch.rand(3, 1, dtype=torch.float64, requires_grad=True) for _ in range(3))
    plan = make_plan("Sum", add(apply("Floor", var(CAT_I, 0, 1)), var(CAT_J, 1, 1)), n_vars=3)
    (out,) = reduce(plan, [x, y, z], 3, 3, "tiled")
    gx, gy, gz = torch.autograd.grad(out.sum(), [x, y, z], allow_unused=True)
    assert gx is None and gz is None
    torch.testing.assert_close(gy, torch.full_like(y, 3.0))


@pytest.mark.parametrize("reduction", ["Sum", "LogSumExp", "SumSoftMaxWeight"])
@pytest.mark.parametrize(("m", "n"), [(0, 3), (3, 0), (0, 0)])
def test_no_rows_or_no_columns(reduction, m, n):
    case = Case(reduction, "gauss")
    values = parameters(case.data(m=m, n=n))
    outs = case.ours(values)
    first = torch.autograd.grad([o.sum() for o in outs], values, create_graph=True)
    for t, g in zip(values, first):
        assert g.shape == t.shape
        assert not g.nan_to_num().any()
    if reduction == "Sum":
        assert not any(g.isnan().any() for g in first)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["Sum", "LogSumExp", "MinArgMin"])
def test_half_precision(dtype, reduction):
    """Computed in float32, so that only inputs and results are rounded."""
    case = Case(reduction, "gauss")
    values = parameters(case.data(m=20, n=30, dtype=dtype))
    exact = parameters([t.double() for t in values])
    (out,), (want,) = case.ours(values), case.dense(exact)
    assert out.dtype == dtype
    rtol = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    torch.testing.assert_close(out.double(), want, rtol=rtol, atol=0)
    got = torch.autograd.grad(out.sum(), values)
    for g, w in zip(got, torch.autograd.grad(want.sum(), exact), strict=True):
        assert g.dtype == dtype
        torch.testing.assert_close(g.double(), w, rtol=rtol, atol=rtol * w.abs().max().item())


@pytest.mark.parametrize("scale", [1.0, 1e4, -1e4])
def test_logsumexp_gradients_in_float32_against_float64(scale):
    """Also where exp(F) overflows or underflows. On a coarse grid F itself is exact; the logarithm is rounded."""
    plan = make_plan("LogSumExp", mul(var(CAT_P, 2, 1), neg(apply("SqDist", var(CAT_I, 0, 2), var(CAT_J, 1, 2)))))
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randint(-16, 16, (rows, 2), generator=generator) / 8 for rows in (20, 30))
    values = parameters([x, y, torch.tensor([scale])])
    exact = parameters([t.double() for t in values])
    want = (-exact[2] * ((exact[0][:, None] - exact[1]) ** 2).sum(-1)).logsumexp(1)
    got = torch.autograd.grad(reduce(plan, values, 20, 30, "tiled")[0].sum(), values)
    rounding = 2e-6 + 2**-23 * want.abs().max().item()
    for g, w in zip(got, torch.autograd.grad(want.sum(), exact), strict=True):
        torch.testing.assert_close(g.double(), w, rtol=rounding, atol=rounding * abs(scale))


def test_logsumexp_of_nothing_but_minus_infinity():
    x = torch.tensor([[-math.inf], [1.0]], dtype=torch.float64, requires_grad=True)
    y = torch.rand(3, 1, dtype=torch.float64, requires_grad=True)
    (out,) = reduce(make_plan("LogSumExp", add(var(CAT_I, 0, 1), var(CAT_J, 1, 1))), [x, y], 2, 3, "tiled")
    gx, gy = torch.autograd.grad(out[1].sum() + out[0].sum(), [x, y])
    torch.testing.assert_close(gx, torch.tensor([[0.0], [1.0]], dtype=torch.float64))
    torch.testing.assert_close(gy, torch.softmax(y.detach(), 0))


def test_norms_at_zero_have_gradient_zero(backend):
    """The distance of a point to itself; torch's own sqrt has an infinite slope there."""
    x = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    X, Y = var(CAT_I, 0, 2), var(CAT_J, 1, 2)
    away = 1.0 - torch.eye(6, dtype=torch.float64).unsqueeze(-1)

    def dense(x):
        d2 = ((x[:, None] - x) ** 2).sum(-1, keepdim=True)
        return ((d2 + 1 - away).sqrt() * away).sum()

    nodes = [apply("Norm2", sub(X, Y)), apply("Sqrt", apply("SqDist", X, Y))]
    for node in nodes if backend == "tiled" else nodes[:1]:
        (out,) = reduce(make_plan("Sum", node), [x, x], 6, 6, backend)
        (got,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (want,) = torch.autograd.grad(dense(x), x, create_graph=True)
        torch.testing.assert_close(got, want)
        (got2,) = torch.autograd.grad(scalar((got,)), x)
        (want2,) = torch.autograd.grad(scalar((want,)), x)
        torch.testing.assert_close(got2, want2)


def test_gradients_are_off_where_torch_says_so():
    case = Case("Sum", "gauss")
    values = parameters(case.data())
    with torch.no_grad():
        assert not case.ours(values)[0].requires_grad
    with torch.inference_mode():
        assert not case.ours(values)[0].requires_grad
    assert case.ours(values)[0].requires_grad


def test_a_third_derivative():
    case = Case("Sum", "gauss")
    check_case(case, case.data(m=3, n=2), "tiled", order=3)


def test_numbers_have_no_gradient_and_may_change():
    f = FORMULAS["laplace"]
    case = Case("Sum", "laplace")
    for width in (0.5, 2, 3.0):
        values = parameters([*f.data()[:2], width])
        for got, want in zip(derivatives(case.ours, values), derivatives(case.dense, values), strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("reduction", SMOOTH)
@pytest.mark.parametrize(("dim", "numbers"), [(5, [[0], [1, 2]]), (7, [[0], [1], [2]])])
def test_gradients_over_an_axis_share_a_pass_while_they_are_few(reduction, dim, numbers):
    x, y, b = (torch.rand(r, d, dtype=torch.float64) for r, d in ((3, dim), (4, dim), (4, 2)))
    f = apply("Exp", neg(apply("SqDist", var(CAT_I, 0, dim), var(CAT_J, 1, dim))))
    weight = var(CAT_J, 2, 2)
    plan = make_plan(reduction, f, weight) if reduction == "SumSoftMaxWeight" else make_plan(reduction, mul(f, weight))

    def dense(v):
        k = (-((v[0][:, None] - v[1]) ** 2).sum(-1, keepdim=True)).exp()
        if reduction == "SumSoftMaxWeight":
            return (torch.softmax(k, 1) * v[2]).sum(1), k.logsumexp(1)
        return ((k * v[2]).sum(1) if reduction == "Sum" else (k * v[2]).logsumexp(1),)

    values = parameters([x, y, b])
    passes = derivatives_module.gradient_passes(plan, (0, 1, 2), (True,) * len(dense(values)), 8)
    assert [[part.number for part in step.parts] for step in passes] == numbers
    got = derivatives(lambda v: reduce(plan, v, 3, 4, "tiled"), values)
    for g, w in zip(got, derivatives(dense, values), strict=True):
        torch.testing.assert_close(g, w)
    tangents = tuple(torch.rand_like(t) for t in values)
    got = torch.func.jvp(lambda *v: reduce(plan, list(v), 3, 4, "tiled"), tuple(values), tangents)[1]
    for g, w in zip(got, torch.func.jvp(lambda *v: dense(list(v)), tuple(values), tangents)[1], strict=True):
        torch.testing.assert_close(g, w)
