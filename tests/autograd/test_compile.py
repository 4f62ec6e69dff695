"""``torch.compile(fullgraph=True)`` and ``torch.export`` of reductions and LazyTensors: the same numbers, no break."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.func import grad, hessian, jvp, vmap

from kernops.autograd import reduce, tracing
from kernops.autograd.operator import _arguments
from kernops.autograd.text import plan_text, read_plan
from kernops.formula.graph import CAT_I, CAT_J, CAT_SCALAR, topological
from kernops.formula.plan import make_plan
from kernops.lazy import Genred, LazyTensor, Vi, Vj
from tests.helpers.reductions import CASES, REDUCTIONS, Case

Tensor = torch.Tensor
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Each test compiles anew, and on the back end that is quickest to start."""
    monkeypatch.setenv("KERNOPS_BACKEND", "tiled")
    torch._dynamo.reset()


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def close(got, want) -> None:
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def check(function, *args, gradients: bool = True, backend: str = "aot_eager"):
    """The compiled function gives the values and gradients of the function itself."""
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    args = tuple(a.detach().clone().requires_grad_(gradients) if isinstance(a, Tensor) else a for a in args)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lru_cache")
        got = compiled(*args)
    want = function(*args)
    close(got, want)
    if gradients:
        inputs = [a for a in args if isinstance(a, Tensor)]
        g = torch.rand_like(want)
        close(torch.autograd.grad(got, inputs, g), torch.autograd.grad(want, inputs, g))
    return compiled


def of_case(case: Case):
    plan = case.plan
    return lambda x, y, b, s: reduce(plan, [x, y, b, s], x.shape[-2], y.shape[-2], "tiled")[0].sin()


# --- reductions -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_values_and_gradients(reduction):
    case = Case(reduction, "gauss")
    check(of_case(case), *case.data())


def test_batches():
    case = Case("Sum", "gauss")
    check(of_case(case), *case.data(batches=((2, 1), (3,), (), (1, 1))))


def test_half_precision():
    case = Case("LogSumExp", "gauss")
    check(of_case(case), *case.data(dtype=torch.bfloat16))


def test_sizes_that_change():
    """Nothing is compiled for the third size, where sizes were marked dynamic or have become so."""
    for marked in (True, False):
        torch._dynamo.reset()
        case = Case("LogSumExp", "gauss")
        function = of_case(case)
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        for step, (m, n) in enumerate([(4, 5), (6, 7), (9, 8)]):
            values = case.data(m=m, n=n)
            if marked:
                for t in values[:3]:
                    torch._dynamo.mark_dynamic(t, 0)
            values = [t.requires_grad_() for t in values]
            before = graphs()
            got = compiled(*values)
            close(got, function(*values))
            close(torch.autograd.grad(got.sum(), values), torch.autograd.grad(function(*values).sum(), values))
            assert step < 2 or graphs() == before


def test_numbers_that_change():
    case = Case("Sum", "laplace")
    plan = case.plan
    x, y, _ = case.data()
    function = lambda x, y, s: reduce(plan, [x, y, s], 4, 5, "tiled")[0]  # noqa: E731
    compiled = check(function, x, y, 0.7)
    for s in (0.3, 2, 1.5):
        close(compiled(x, y, s), function(x, y, s))


def test_a_plan_made_in_the_compiled_function():
    def function(x: Tensor, y: Tensor) -> Tensor:
        X = tracing.var(CAT_I, 0, x.shape[1])
        Y = tracing.var(CAT_J, 1, y.shape[1])
        f = tracing.apply("Exp", tracing.neg(tracing.mul(0.5, tracing.apply("SqDist", X, Y))))
        plan = tracing.make_plan("Sum", f)
        assert plan.dim == 1 and plan.core == "Sum" and f.dim == 1 and len(plan.variables) == 2
        return reduce(plan, [x, y], x.shape[0], y.shape[0], "tiled")[0]

    x, y, *_ = Case("Sum", "gauss").data()
    compiled = check(function, x, y)
    close(compiled(x[:, :2], y[:, :2]), function(x[:, :2], y[:, :2]))
    dynamic = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    close(dynamic(x, y), function(x, y))


TRANSFORMS: dict[str, Callable] = {
    "grad": lambda f, s: grad(lambda t: f(t).sum())(s),
    "vmap": lambda f, s: vmap(f)(torch.stack([s, s + 1])),
    "jvp": lambda f, s: jvp(f, (s,), (s.cos(),)),
    "hessian": lambda f, s: hessian(lambda t: f(t).sum())(s),
    "grad of grad": lambda f, s: grad(lambda r: grad(lambda t: f(t).sum())(r).square().sum())(s),
    "vmap of grad": lambda f, s: vmap(grad(lambda t: f(t).sum()))(torch.stack([s, s + 1])),
}


@pytest.mark.parametrize(
    ("reduction", "transform"),
    [*(("LogSumExp", t) for t in TRANSFORMS), ("MinArgMin", "grad of grad"), ("KMin", "jvp")],
)
def test_transforms_in_the_compiled_function(reduction, transform):
    case = Case(reduction, "gauss")
    plan = case.plan
    x, y, b, s = case.data(m=3, n=4)

    def function(s: Tensor):
        return TRANSFORMS[transform](lambda t: reduce(plan, [x, y, b, t], 3, 4, "tiled")[0].sin(), s)

    close(torch.compile(function, fullgraph=True, backend="aot_eager")(s), function(s))


# --- the operator -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("reduction", "formula", "gradients"),
    [
        ("Sum", "laplace", True),
        ("SumSoftMaxWeight", "gauss", True),
        ("KMin", "gauss", True),
        ("KMin", "laplace", False),
    ],
)
def test_the_operator_is_registered_as_torch_wants_it(reduction, formula, gradients):
    case = Case(reduction, formula)
    values = case.data()
    tensors = [t.requires_grad_(gradients) if isinstance(t, Tensor) else None for t in values]
    numbers = [t for t in values if not isinstance(t, Tensor)]
    torch.library.opcheck(torch.ops.kernops.reduce.default, (tensors, numbers, plan_text(case.plan), 4, 5, "tiled"))


def test_the_operator_under_transforms():
    """As no operator of torch.library.custom_op can be: torch cuts those off from forward mode and nesting."""
    case = Case("LogSumExp", "gauss")
    x, y, b, s = case.data()
    text = plan_text(case.plan)

    def ours(t: Tensor) -> Tensor:
        return torch.ops.kernops.reduce([x, y, b, t], [], text, 4, 5, "tiled")[0].sin()

    def dense(t: Tensor) -> Tensor:
        return case.dense([x, y, b, t])[0].sin()

    for transform in TRANSFORMS.values():
        close(transform(ours, s), transform(dense, s))


def test_plans_as_text():
    for case in CASES:
        assert read_plan(plan_text(case.plan)) is case.plan
    plan = make_plan("KMin", CASES[0].plan.formula, k=2, algorithm="brute")
    assert read_plan(plan_text(plan)) is plan


def test_a_plan_with_two_results_as_an_operator():
    """Values, shapes, and derivatives."""
    case = Case("Sum", "gauss")
    plan = make_plan("Sum", case.plan.formula, first=1)
    assert read_plan(plan_text(plan)) is plan is not case.plan
    values = [t.requires_grad_() for t in case.data()]
    got = torch.ops.kernops.reduce(values, [], plan_text(plan), 4, 5, "tiled")
    (want,) = case.ours(values)
    for parts in zip(got, want.split([1, 1], -1), strict=True):
        for g, w in zip(*(torch.autograd.grad(p.sin().sum(), values, retain_graph=True) for p in parts), strict=True):
            torch.testing.assert_close(g, w)
    torch.library.opcheck(torch.ops.kernops.reduce.default, (values, [], plan_text(plan), 4, 5, "tiled"))


def test_text_is_as_long_as_the_graph_is_large():
    """``str`` would write a formula that squares itself thirty times 2**30 times."""
    f = tracing.var(CAT_I, 0, 1)
    for _ in range(30):
        f = tracing.apply("Mul", f, f)
    plan = tracing.make_plan("Sum", f)
    assert len(plan_text(plan)) < 1000
    assert read_plan(plan_text(plan)) is plan
    assert len(topological(f)) == 31


@pytest.mark.parametrize("text", ["", "[]", '["Sum",0,1,[[["Evil",[]]],[0]]]', '["Sum",0,1,[[["Var",[],0,0,3]],[7]]]'])
def test_text_that_is_no_plan(text):
    with pytest.raises((ValueError, IndexError, json.JSONDecodeError)):
        read_plan(text)


# --- building formulas in traced code ---------------------------------------------------------------------------------
def test_traceable_functions_pass_constants_of_all_kinds():
    @tracing.traceable
    def mixed(x, pair, number, name, nothing=None, flag=True):
        assert type(pair) is tuple and type(number) is float and name == "a" and nothing is None and flag is True
        return x, (pair[0], 2), number, name, None

    def function(t: Tensor) -> Tensor:
        X = tracing.var(CAT_I, 0, 2)
        node, (one, two), number, name, nothing = mixed(X, [1, (X,)], 0.5, "a", flag=True)
        assert node.dim == 2 and node.is_var and node.params == (CAT_I, 0, 2) and node.value is None
        assert nothing is None and name == "a"
        return t * (one + two) * number

    t = torch.rand(3)
    torch.testing.assert_close(torch.compile(function, fullgraph=True, backend="eager")(t), t * 1.5)


def test_traceable_costs_nothing_outside():
    X = tracing.var(CAT_I, 0, 2)
    assert tracing.seen(X) is X
    assert tracing.apply("Exp", X) is tracing.apply("Exp", X)


# --- the front end ----------------------------------------------------------------------------------------------------
def points() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.rand(n, d, generator=generator, dtype=torch.float64) for n, d in ((6, 3), (7, 3), (7, 2)))


def gaussian(x: Tensor, y: Tensor, b: Tensor) -> Tensor:
    return (-Vi(x).sqdist(Vj(y)) / 1.7).exp() @ b


FRONT: dict[str, tuple[Callable, int]] = {
    "LazyTensor": (gaussian, 3),
    "reshaped": (
        lambda x, y, b: ((-((LazyTensor(x[:, None]) - LazyTensor(y[None])) ** 2).sum(-1)).exp() * Vj(b)).sum(1),
        3,
    ),
    "logsumexp": (lambda x, y, b: (-Vi(x).sqdist(Vj(y))).logsumexp(1), 2),
    "Kmin": (lambda x, y, b: Vi(x).sqdist(Vj(y)).Kmin(3, dim=1), 2),
    "over i": (lambda x, y, b: (Vi(x) | Vj(y)).square().sum(0), 2),
    "variance": (lambda x, y, b: (Vi(x) | Vj(y)).var(1), 2),
    "softmax": (lambda x, y, b: (-Vi(x).sqdist(Vj(y))).sumsoftmaxweight(Vj(b), 1), 3),
}


@functools.cache
def dynamo_negates() -> bool:
    """Whether this torch can trace ``-x`` of an object; 2.5 cannot."""

    class Negative:
        def __neg__(self) -> int:
            return -1

    try:
        torch.compile(lambda t: t * -Negative(), fullgraph=True, backend="eager")(torch.ones(1))
    except torch._dynamo.exc.Unsupported:
        return False
    return True


@pytest.fixture
def negation() -> None:
    if not dynamo_negates():
        pytest.skip(f"Dynamo of torch {torch.__version__} cannot trace the negation of an object")


@pytest.mark.usefixtures("negation")
@pytest.mark.parametrize("name", FRONT)
def test_lazy_tensors(name):
    function, count = FRONT[name]
    data = points()
    check(lambda *v: function(*v, *data[len(v) :]), *data[:count])


def test_neighbours():
    x, y, _ = points()
    compiled = check(lambda x, y: Vi(x).sqdist(Vj(y)).argKmin(2, dim=1), x, y, gradients=False)
    assert compiled(x, y).dtype == torch.int64


def test_genred():
    text = "Exp(-SqDist(X,Y))*B", ["X=Vi(3)", "Y=Vj(3)", "B=Vj(2)"]
    call = Genred(*text, axis=1)
    check(lambda x, y, b: call(x, y, b), *points())
    check(lambda x, y, b: Genred(*text, axis=1)(x, y, b), *points())


@pytest.mark.usefixtures("negation")
def test_a_lazy_tensor_from_outside_and_one_that_leaves():
    x, y, b = points()
    outside = Vi(x)
    check(lambda y, b: (-outside.sqdist(Vj(y))).exp() @ b, y, b)
    left = torch.compile(lambda x, y: -Vi(x).sqdist(Vj(y)), fullgraph=True, backend="aot_eager")(x, y)
    close(left.exp() @ b, (-Vi(x).sqdist(Vj(y))).exp() @ b)


@pytest.mark.usefixtures("negation")
def test_lazy_tensors_of_sizes_that_change():
    compiled = torch.compile(gaussian, fullgraph=True, backend="aot_eager", dynamic=True)
    for m, n in (4, 5), (6, 7), (8, 9):
        x, y, b = torch.rand(m, 3), torch.rand(n, 3), torch.rand(n, 2)
        torch.testing.assert_close(compiled(x, y, b), gaussian(x, y, b))


@pytest.mark.slow
@pytest.mark.usefixtures("negation")
@pytest.mark.parametrize("name", FRONT)
def test_inductor(name):
    function, count = FRONT[name]
    data = points()
    check(lambda *v: function(*v, *data[len(v) :]).sin() * 2, *data[:count], backend="inductor")


# --- export -----------------------------------------------------------------------------------------------------------
class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.width = torch.nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor, y: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        kernel = (-Vi(x / self.width).sqdist(Vj(y / self.width))).exp()
        return (kernel * Vj(b)).sum(1), Vi(x).sqdist(Vj(y)).argKmin(2, dim=1)


LOAD = """
import sys, torch
import kernops.autograd
program, data = torch.export.load(sys.argv[1]), torch.load(sys.argv[2])
torch.testing.assert_close(tuple(program.module()(*data[:3])), data[3:])
"""


def exported(model: Model, strict: bool):
    x, y, b = (t.float() for t in points())
    m, n = torch.export.Dim("m", min=3), torch.export.Dim("n", min=3)
    program = torch.export.export(
        model, (x, y, b), dynamic_shapes={"x": {0: m}, "y": {0: n}, "b": {0: n}}, strict=strict
    )
    assert "kernops.reduce" in str(program.graph)
    torch.testing.assert_close(program.module()(x[:4], y, b), model(x[:4], y, b))
    return program, (x[:5], y, b)


@pytest.mark.usefixtures("negation")
def test_export():
    exported(Model(), strict=True)


def test_export_to_another_process(tmp_path):
    model = Model()
    program, data = exported(model, strict=False)
    torch.export.save(program, tmp_path / "model.pt2")
    torch.save((*data, *(t.detach() for t in model(*data))), tmp_path / "data.pt")
    command = [sys.executable, "-c", LOAD, str(tmp_path / "model.pt2"), str(tmp_path / "data.pt")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_numbers_of_a_plan_travel_apart():
    """Two widths, one text."""
    case = Case("Sum", "laplace")
    assert _arguments(case.plan.variables, [*case.data()[:2], 0.25])[1] == [0.25]
    assert any(v.params[0] == CAT_SCALAR for v in case.plan.variables)
