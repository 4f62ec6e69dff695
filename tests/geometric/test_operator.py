"""The operators in code that is traced: ``opcheck``, ``torch.compile``, ``torch.export``, ``torch.func``."""

from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kernops.geometric import BucketPlan, SplatPlan, bucketed_cumsum, bucketed_sum, splat, splat_features
from kernops.geometric import levels as front
from kernops.geometric.calls import TABLE, call
from kernops.geometric.levels import FIELDS, flatten, unflatten
from tests.geometric import cases
from tests.geometric.cases import VARIANTS, At, Case

Tensor = torch.Tensor
f64 = torch.float64
CASE = Case("small", (2, 2, 3, 2, 3), (2, 3, 5), 4)
HOW = [(variant, weighted, logits) for variant in VARIANTS for weighted, logits in ((False, False), (True, True))]


@pytest.fixture
def place() -> At:
    return cases.at("tiled")


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def problem(place: At, variant: str = "cumsum", dtype: torch.dtype = f64, grad: bool = True) -> tuple:
    """plan, depth, feat, weight"""
    plan = SplatPlan.from_cells(
        place.tensor(CASE.cells(), torch.int32), CASE.shape, variant=variant, backend=place.backend
    )
    given = cases.inputs(CASE, dtype)[:3]
    return (plan, *(place.tensor(a, dtype).requires_grad_(grad) for a in given))


def same(compiled, function, inputs: list[Tensor]) -> None:
    """Values and gradients."""
    got, want = compiled(*inputs), function(*inputs)
    torch.testing.assert_close(got, want)
    g = torch.randn_like(want)
    torch.testing.assert_close(torch.autograd.grad(got, inputs, g), torch.autograd.grad(want, inputs, g))


# --- the operators themselves -----------------------------------------------------------------------------------------
def arguments(name: str, place: At, variant: str = "cumsum", weighted: bool = True, logits: bool = False) -> tuple:
    if name.startswith("bev_pool"):
        plan, depth, feat, weight = problem(place, variant)
        how = (plan.cells, plan._flat, list(plan.shape), variant, place.backend, logits)
        args = (depth, feat, weight if weighted else None, *how)
        if name == "bev_pool":
            return args
        g = torch.randn((*plan.shape, CASE.channels), dtype=f64, device=place.device, requires_grad=True)
        return (g, *args, [True, True, weighted])
    plan = BucketPlan(torch.tensor([1, 0, -1, 1, 3], device=place.device), 4, backend=place.backend)
    n = 4 if name == "bucketed_gather" else 5
    rows = torch.randn((n, 3), dtype=f64, device=place.device, requires_grad=True)
    if name == "bucketed_cumsum":
        return rows, plan.order, plan.starts, True, place.backend
    return rows, plan.buckets, plan._flat, 4, place.backend


@pytest.mark.parametrize("variant, weighted, logits", HOW)
@pytest.mark.parametrize("name", ["bev_pool", "bev_pool_backward"])
def test_opcheck_of_the_splat(place: At, name: str, variant: str, weighted: bool, logits: bool):
    operator = getattr(torch.ops.kernops, name).default
    torch.library.opcheck(operator, arguments(name, place, variant, weighted, logits))


@pytest.mark.parametrize("name", [name for name in TABLE if not name.startswith("bev_pool")])
def test_opcheck_of_sums(place: At, name: str):
    torch.library.opcheck(getattr(torch.ops.kernops, name).default, arguments(name, place))


@pytest.mark.parametrize("name", TABLE)
def test_the_operator_is_the_call(place: At, name: str):
    """Numbers, and first and second derivatives."""
    args = arguments(name, place)
    inputs = [t for t in args if isinstance(t, Tensor) and t.requires_grad]
    found = []
    for function in (getattr(torch.ops.kernops, name), lambda *args: call(name, *args)):
        out = function(*args)
        outs = [out] if isinstance(out, Tensor) else [o for o in out if o.numel()]
        value = torch.stack([o.sin().sum() for o in outs]).sum()
        once = torch.autograd.grad(value, inputs, create_graph=True)
        found.append([*outs, *once, *torch.autograd.grad(torch.stack([g.sin().sum() for g in once]).sum(), inputs)])
    for a, b in zip(*found):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", ["bev_pool", "bev_pool_backward"])
def test_gradcheck_of_the_operator(place: At, name: str):
    small = Case("", (1, 1, 2, 1, 2), (1, 1, 3), 2)
    plan = SplatPlan.from_cells(
        place.tensor(small.cells(), torch.int32), small.shape, variant="cumsum", backend=place.backend
    )
    depth, feat, weight, g = (place.tensor(a, f64).requires_grad_() for a in cases.inputs(small, f64))
    rest = (plan.cells, plan._flat, list(plan.shape), "cumsum", place.backend, True)
    operator = getattr(torch.ops.kernops, name)
    if name == "bev_pool":
        assert torch.autograd.gradcheck(lambda *t: operator(*t, *rest), (depth, feat, weight))
    else:
        assert torch.autograd.gradcheck(lambda *t: operator(*t, *rest, [True] * 3), (g, depth, feat, weight))


def test_what_is_not_asked_for_is_empty(place: At):
    *args, mask = arguments("bev_pool_backward", place)
    assert mask == [True] * 3
    full = torch.ops.kernops.bev_pool_backward(*args, mask)
    for k in range(3):
        with torch.no_grad():
            got = torch.ops.kernops.bev_pool_backward(*args, [j == k for j in range(3)])
        assert [t.numel() for t in got] == [full[j].numel() if j == k else 0 for j in range(3)]
        torch.testing.assert_close(got[k], full[k])


def test_levels_as_a_list(place: At, monkeypatch):
    for long in (16384, 0):
        monkeypatch.setattr(front, "LONG", long)
        for variant in VARIANTS:
            plan, *_ = problem(place, variant)
            flat, n_out = flatten(place.kernels, plan.levels), math.prod(plan.shape)
            assert len(flat) == FIELDS * len(plan.levels) == len(plan._flat)
            for a, b in zip(unflatten(flat, n_out), plan.levels):
                assert a.n_out == b.n_out and (a.targets is None) == (b.targets is None)
            if plan.levels:
                assert plan.levels[-1].n_out == n_out


# --- fake tensors -----------------------------------------------------------------------------------------------------
def test_fake_tensors():
    mode = FakeTensorMode()
    with mode:
        depth, feat = torch.empty(2, 2, 3, 2, 3), torch.empty(2, 2, 2, 3, 4, dtype=torch.float32)
        cells = torch.empty(2, 2, 3, 2, 3, dtype=torch.int32)
        out = torch.ops.kernops.bev_pool(depth, feat, None, cells, [], [2, 2, 3, 5], "atomic", "auto", False)
        assert out.shape == (2, 2, 3, 5, 4) and out.is_contiguous()
        grads = torch.ops.kernops.bev_pool_backward(
            out, depth, feat, None, cells, [], [2, 2, 3, 5], "atomic", "auto", False, [True, True, False]
        )
        assert [tuple(g.shape) for g in grads] == [tuple(depth.shape), tuple(feat.shape), (0,)]


def test_meta_tensors_have_shapes():
    cells = torch.empty(1, 1, 3, 2, 3, dtype=torch.int32, device="meta")
    depth, feat = torch.empty(1, 1, 3, 2, 3, device="meta"), torch.empty(1, 1, 2, 3, 4, device="meta")
    out = torch.ops.kernops.bev_pool(depth, feat, None, cells, [], [1, 1, 3, 5], "atomic", "auto", False)
    assert out.shape == (1, 1, 3, 5, 4) and out.device.type == "meta"


# --- torch.compile ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("variant, weighted, logits", HOW)
def test_compile(place: At, variant: str, weighted: bool, logits: bool):
    plan, depth, feat, weight = problem(place, variant)

    def function(depth: Tensor, feat: Tensor, *weight: Tensor) -> Tensor:
        out = splat(depth * 2, feat, plan, weight=weight[0] if weight else None, depth_logits=logits, prescale=2.0)
        return out.sin()

    inputs = [depth, feat, weight] if weighted else [depth, feat]
    same(torch.compile(function, fullgraph=True, backend="aot_eager"), function, inputs)


class Model(torch.nn.Module):
    """A plan as an attribute, as models have it."""

    def __init__(self, plan: SplatPlan) -> None:
        super().__init__()
        self.plan = plan
        self.mix = torch.nn.Linear(CASE.channels, CASE.channels, dtype=f64)

    def forward(self, depth: Tensor, feat: Tensor) -> Tensor:
        return splat(depth, self.mix(feat), self.plan, depth_logits=True)


def test_compile_of_a_model_and_refreshed_plans(place: At):
    """The plan is read at each call, so that what refresh wrote, or another plan, counts."""
    plan, depth, feat, _ = problem(place)
    model = Model(plan).to(place.device)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    same(compiled, model, [depth, feat])
    moved = SplatPlan.from_cells(plan.cells.flip(2), plan.shape, variant="cumsum", backend=place.backend)
    for old, new in zip((plan.cells, *plan._flat), (moved.cells, *moved._flat)):
        old.copy_(new)
    same(compiled, model, [depth, feat])
    model.plan = problem(place, "atomic")[0]
    same(compiled, model, [depth, feat])


def test_compile_with_the_plan_as_an_argument(place: At):
    compiled = torch.compile(lambda d, f, plan: splat(d, f, plan), fullgraph=True, backend="aot_eager")
    for variant in VARIANTS:
        plan, depth, feat, _ = problem(place, variant, grad=False)
        torch.testing.assert_close(compiled(depth, feat, plan), splat(depth, feat, plan))


def test_compile_says_what_is_wrong(place: At):
    plan, depth, feat, _ = problem(place, grad=False)
    compiled = torch.compile(lambda d, f: splat(d, f, plan), backend="aot_eager")
    with pytest.raises(ValueError, match="depth must have the plan's shape"):
        compiled(depth[:1], feat)


def test_compile_of_sums(place: At):
    plan = BucketPlan(torch.tensor([1, 0, -1, 1, 3], device=place.device), 4, backend=place.backend)
    for function in (bucketed_sum, bucketed_cumsum):
        for shape in ((5,), (5, 2), (3, 5, 2)):
            values = torch.randn(shape, dtype=f64, device=place.device, requires_grad=True)

            def apply(v: Tensor, function=function) -> Tensor:
                return function(v.sin(), plan)

            same(torch.compile(apply, fullgraph=True, backend="aot_eager"), apply, [values])


@pytest.mark.parametrize("kept", [False, True])
def test_compile_of_splat_features(place: At, kept: bool):
    """Whether an earlier call has sorted the points or not."""
    plan, depth, feat, _ = problem(place)
    x = (depth[..., None] * feat[:, :, None]).detach().requires_grad_()

    def function(x: Tensor) -> Tensor:
        return splat_features(x.sin(), plan)

    if kept:
        function(x)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    got = compiled(x)
    assert (plan._points is not None) == kept
    torch.testing.assert_close(got, function(x))
    g = torch.randn_like(got)
    torch.testing.assert_close(torch.autograd.grad(got, x, g), torch.autograd.grad(function(x), x, g))


def test_compile_with_sizes_that_change(place: At):
    """No recompilation for another number of channels."""
    plan, depth, feat, _ = problem(place, grad=False)
    compiled = torch.compile(lambda d, f: splat(d, f, plan), fullgraph=True, backend="aot_eager", dynamic=True)
    torch._dynamo.utils.counters.clear()
    for channels in (7, 8, 11, 10):  # not another axis' size, which would be taken for the same
        f = torch.randn((*feat.shape[:-1], channels), dtype=f64, device=place.device)
        torch.testing.assert_close(compiled(depth, f), splat(depth, f, plan))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


# --- torch.export -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("strict", [False, True])
def test_export(place: At, strict: bool):
    plan, depth, feat, _ = problem(place, grad=False)
    program = torch.export.export(Model(plan).to(place.device).eval(), (depth, feat), strict=strict)
    nodes = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert nodes.count(torch.ops.kernops.bev_pool.default) == 1
    model = Model(plan).to(place.device)
    model.load_state_dict(program.state_dict, strict=False)
    with torch.no_grad():
        torch.testing.assert_close(program.module()(depth, feat), model(depth, feat))


# --- torch.func -------------------------------------------------------------------------------------------------------
def test_func_grad(place: At):
    plan, depth, feat, _ = problem(place)

    def loss(depth: Tensor, feat: Tensor) -> Tensor:
        return splat(depth, feat, plan, depth_logits=True).sin().sum()

    got = torch.func.grad(loss, argnums=(0, 1))(depth.detach(), feat.detach())
    want = torch.autograd.grad(loss(depth, feat), (depth, feat))
    torch.testing.assert_close(got, want)
    second = torch.func.grad(lambda d: torch.func.grad(loss)(d, feat.detach()).sin().sum())(depth.detach())
    (once,) = torch.autograd.grad(loss(depth, feat.detach()), depth, create_graph=True)
    torch.testing.assert_close(second, torch.autograd.grad(once.sin().sum(), depth)[0])


def test_what_has_no_rule_says_so(place: At):
    plan, depth, feat, _ = problem(place, grad=False)
    with pytest.raises(RuntimeError, match="vmap"):
        torch.func.vmap(lambda f: splat(depth, f, plan))(feat[None])
    with pytest.raises(RuntimeError, match="jvp|forward"):
        torch.func.jvp(lambda f: splat(depth, f, plan), (feat,), (feat,))
    out = splat(depth, feat.requires_grad_(), plan)
    with pytest.raises(RuntimeError, match="[Bb]atching rule not implemented"):
        torch.autograd.grad(out, feat, torch.ones((2, *out.shape), dtype=f64).to(out.device), is_grads_batched=True)


# --- called by name ---------------------------------------------------------------------------------------------------
def pool(**changed: object) -> Tensor:
    """``torch.ops.kernops.bev_pool`` of two points of one pixel, with some arguments changed."""
    given: dict[str, object] = {
        "depth": torch.tensor([1.0, 2.0]).view(1, 1, 2, 1, 1), "feat": torch.full((1, 1, 1, 1, 3), 5.0), "weight": None,
        "cells": torch.tensor([1, 0], dtype=torch.int32).view(1, 1, 2, 1, 1), "levels": [], "shape": (1, 1, 1, 2),
        "variant": "atomic", "backend": "auto", "depth_logits": False,
    }  # fmt: skip
    return torch.ops.kernops.bev_pool(*{**given, **changed}.values())


def test_an_operator_by_its_name():
    want = torch.tensor([[10.0] * 3, [5.0] * 3]).view(1, 1, 1, 2, 3)
    assert torch.equal(pool(), want)
    assert torch.equal(pool(cells=torch.tensor([1, 0]).view(1, 1, 2, 1, 1)), want)  # int64
    depth = torch.tensor([1.0, 2.0]).view(1, 1, 2, 1, 1).requires_grad_()
    (grad,) = torch.autograd.grad(pool(depth=depth, cells=torch.tensor([1, -1]).view(1, 1, 2, 1, 1)).sum(), depth)
    assert grad.flatten().tolist() == [15.0, 0.0]


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"depth": torch.ones(1, 1, 3, 1, 1)}, r"depth must have shape \(1, 1, 2, 1, 1\)"),
        ({"depth": torch.ones(1, 1, 2, 1, 1, dtype=torch.int32)}, "depth must have .* floating-point dtype"),
        ({"feat": torch.ones(1, 1, 3, 1, 1)}, r"feat must have shape \(1, 1, 1, 1\) and C"),
        ({"feat": torch.ones(1, 1, 1, 1, 3, dtype=f64)}, "depth must have .* dtype of feat"),
        ({"weight": torch.ones(1, 1, 1, 1, 1)}, "weight must have shape"),
        ({"cells": torch.ones(1, 1, 2, 1, 1)}, "cells must be int32 or int64"),
        ({"shape": (2, 1, 1, 2)}, r"shape must be \(B, Z, Y, X\) with the B = 1"),
        ({"variant": "cumsum"}, "need levels; got 'cumsum'"),
        ({"variant": "sorted"}, "variant must be one of"),
    ],
)
@pytest.mark.parametrize("grad", [False, True])
def test_an_operator_checks_what_it_is_given(changed: dict, message: str, grad: bool):
    if grad and "feat" not in changed:
        changed = {**changed, "feat": torch.ones(1, 1, 1, 1, 3, requires_grad=True)}
    with pytest.raises(ValueError, match=message):
        pool(**changed)


def test_sums_by_bucket_by_name():
    buckets = torch.tensor([0, 1, 0], dtype=torch.int32)
    op = torch.ops.kernops.bucketed_sum
    assert op(torch.tensor([[1.0], [2.0], [4.0]]), buckets, [], 2, "auto").flatten().tolist() == [5.0, 2.0]
    with pytest.raises(ValueError, match=r"values must be a floating-point tensor \(3, C\)"):
        op(torch.ones(4, 1), buckets, [], 2, "auto")
    with pytest.raises(ValueError, match="buckets or order must be int32"):
        op(torch.ones(3, 1), buckets.long(), [], 2, "auto")


@pytest.mark.parametrize("strict", [True, False])
def test_export_of_the_splat_of_features(place: At, strict: bool):
    plan, *_ = problem(place)

    class Pool(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return splat_features(x, plan)

    x = torch.rand(*plan.cells.shape, CASE.channels, dtype=f64, device=place.device)
    program = torch.export.export(Pool(), (x,), strict=strict)
    assert plan._points is None
    torch.testing.assert_close(program.module()(x), splat_features(x, plan))
