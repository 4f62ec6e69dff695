"""``torch.func`` over reductions, against the same transforms of dense torch in float64."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from kernops.autograd import reduce
from kernops.formula.graph import CAT_I, CAT_J, var
from kernops.formula.ops import apply, neg
from kernops.formula.plan import make_plan
from tests.helpers.reductions import REDUCTIONS, Case

Tensor = torch.Tensor


def close(got, want) -> None:
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def pair(case: Case, k: int, values: list):
    """The reduction and its dense counterpart as functions of variable number k."""

    def function(run):
        return lambda t: run([*values[:k], t, *values[k + 1 :]])[0]

    return function(case.ours), function(case.dense)


@pytest.fixture(params=REDUCTIONS)
def case(request) -> Case:
    return Case(request.param, "gauss")


@pytest.mark.parametrize("k", range(4))
def test_each_transform(case, k):
    values = case.data(m=3, n=4)
    ours, dense = pair(case, k, values)
    x, v = values[k], torch.randn_like(values[k])
    close(grad(lambda t: ours(t).sin().sum())(x), grad(lambda t: dense(t).sin().sum())(x))
    close(jvp(ours, (x,), (v,)), jvp(dense, (x,), (v,)))
    (out, pull), (want, dense_pull) = vjp(ours, x)[:2], vjp(dense, x)[:2]
    close(out, want)
    close(pull(want.cos()), dense_pull(want.cos()))
    close(jacrev(ours)(x), jacrev(dense)(x))
    close(jacfwd(ours)(x), jacfwd(dense)(x))


@pytest.mark.parametrize("k", [0, 1, 3])
def test_hessians(case, k):
    """Forward over reverse, reverse over forward, reverse over reverse, forward over forward."""
    values = case.data(m=2, n=3)
    ours, dense = pair(case, k, values)
    want = hessian(lambda t: dense(t).square().sum())(values[k])

    def total(t):
        return ours(t).square().sum()

    for outer, inner in (jacfwd, jacrev), (jacrev, jacfwd), (jacrev, jacrev), (jacfwd, jacfwd):
        close(outer(inner(total))(values[k]), want)


#: Axis of each variable of "gauss" (x, y, b, s) that vmap maps over.
IN_DIMS: list[tuple[int | None, ...]] = [
    (0, None, None, None),
    (None, 1, None, None),
    (2, None, 0, None),
    (None, None, None, 0),
    (0, 1, 2, 1),
    (-1, -2, -3, 0),
]


def stacked(case: Case, in_dims: tuple) -> list:
    """Three sets of values, those that are mapped over stacked along their axis."""
    sets = [case.data(m=3, n=4, seed=seed) for seed in range(3)]
    return [sets[0][k] if d is None else torch.stack([s[k] for s in sets], dim=d) for k, d in enumerate(in_dims)]


@pytest.mark.parametrize("in_dims", IN_DIMS, ids=str)
def test_vmap_over_every_axis(case, in_dims):
    values = stacked(case, in_dims)
    got = vmap(lambda *v: case.ours(list(v)), in_dims=in_dims)(*values)
    want = vmap(lambda *v: case.dense(list(v)), in_dims=in_dims)(*values)
    for g, w in zip(got, want, strict=True):
        close(g, w)


@pytest.mark.parametrize("in_dims", IN_DIMS[:4], ids=str)
def test_vmap_of_gradients_and_gradients_of_vmap(case, in_dims):
    values = stacked(case, in_dims)

    def total(run):
        return lambda *v: sum(o.sin().sum() for o in run(list(v)))

    every = tuple(range(4))
    got = vmap(grad(total(case.ours), every), in_dims)(*values)
    want = vmap(grad(total(case.dense), every), in_dims)(*values)
    for g, w in zip(got, want, strict=True):
        close(g, w)

    def mapped(run):
        return lambda *v: vmap(total(run), in_dims)(*v).square().sum()

    for g, w in zip(grad(mapped(case.ours), every)(*values), grad(mapped(case.dense), every)(*values), strict=True):
        close(g, w)


def test_vmap_with_batches_and_out_dims():
    case = Case("Sum", "gauss")
    values = case.data(m=3, n=4, batches=((2,), (), (5, 1), ()))
    values[0] = torch.stack([values[0], values[0] + 0.5], 1)  # (2, 2, 3, 3): the second axis is mapped over
    values[3] = torch.stack([values[3], values[3] + 0.5], 0)
    got = vmap(lambda x, s: case.ours([x, *values[1:3], s])[0], (1, 0), 2)(values[0], values[3])
    want = vmap(lambda x, s: case.dense([x, *values[1:3], s])[0], (1, 0), 2)(values[0], values[3])
    close(got, want)


def test_nested_vmap():
    case = Case("LogSumExp", "gauss")
    x, y, b, s = case.data(m=3, n=4)
    xs, ys = torch.stack([x, x + 1]), torch.stack([y, y - 1, y + 2])

    def nested(run):
        return vmap(lambda x: vmap(lambda y: run([x, y, b, s])[0])(ys))(xs)

    close(nested(case.ours), nested(case.dense))
    close(
        vmap(vmap(lambda x, y: case.ours([x, y, b, s])[0], (None, 0)), (0, None))(xs, ys),
        nested(case.dense),
    )


def test_indices_under_vmap():
    case = Case("KMin", "gauss")
    values = stacked(case, (0, 1, None, None))
    index = vmap(lambda x, y: reduce(case.plan, [x, y, *values[2:]], 3, 4, "tiled")[1], (0, 1))(*values[:2])
    want = vmap(lambda x, y: case_order(case, [x, y, *values[2:]]), (0, 1))(*values[:2])
    assert index.dtype == torch.int64
    assert torch.equal(index, want)


def case_order(case: Case, values: list) -> Tensor:
    from tests.helpers.reductions import FORMULAS

    return FORMULAS[case.formula].pairs(values).argsort(dim=-2, stable=True).narrow(-2, 0, 3)


def test_three_levels():
    """The third derivative of one number, by forward, reverse and forward mode."""
    case = Case("Sum", "gauss")
    values = case.data(m=2, n=3)

    def third(run):
        inner = lambda s: run([*values[:3], s])[0].sin().sum()  # noqa: E731
        return jacfwd(jacrev(jacfwd(inner)))(values[3])

    close(third(case.ours), third(case.dense))


def test_forward_mode_without_functorch():
    case = Case("SumSoftMaxWeight", "gauss")
    values = case.data()
    tangents = [torch.randn_like(t) for t in values]
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(t, v) for t, v in zip(values, tangents)]
        for got, want in zip(case.ours(duals), case.dense(duals), strict=True):
            close(forward_ad.unpack_dual(got).tangent, forward_ad.unpack_dual(want).tangent)
        with torch.no_grad():  # which is about reverse mode
            got, want = case.ours(duals)[0], case.dense(duals)[0]
        close(forward_ad.unpack_dual(got).tangent, forward_ad.unpack_dual(want).tangent)


def test_functional_jacobians_that_batch_gradients(backend):
    """torch.autograd.functional and is_grads_batched use another vmap, to which no library can add rules."""
    case = Case("LogSumExp", "gauss")
    values = case.data(m=3, n=4)
    x = values[0]
    dense = pair(case, 0, values)[1]

    def ours(t):
        return case.ours([t, *values[1:]], backend)[0]

    want = jacrev(dense)(x)
    for strategy in "reverse-mode", "forward-mode":
        close(torch.autograd.functional.jacobian(ours, x, vectorize=True, strategy=strategy), want)
    got = torch.autograd.functional.hessian(lambda t: ours(t).sum(), x, vectorize=True)
    close(got, hessian(lambda t: dense(t).sum())(x))


@pytest.mark.parametrize("reduction", ["Sum", "LogSumExp", "SumSoftMaxWeight", "KMin"])
def test_derivatives_of_batched_gradients(reduction):
    """Gradients of many cotangents at once can be differentiated, and so can those."""
    case = Case(reduction, "gauss")

    def outer(run):
        values = [t.requires_grad_() for t in case.data(m=3, n=4)]
        out = run(values)[0]
        many = torch.rand(5, *out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(0)).requires_grad_()
        grads = torch.autograd.grad(out, values, many, is_grads_batched=True, create_graph=True)
        inputs = (*values, many)
        second = torch.autograd.grad([g.sin().sum() for g in grads], inputs, create_graph=True)
        return *grads, *second, *torch.autograd.grad([g.square().sum() for g in second], inputs)

    for got, want in zip(outer(case.ours), outer(case.dense), strict=True):
        close(got, want)


@pytest.mark.parametrize("level", [1, 2, 16, 17, 40, 63])
def test_batched_gradients_in_a_thread_that_does_not_know_their_level(level):
    """Those of autograd that run the backward pass of another one on a GPU; torch allows 63 levels."""
    x, y = torch.rand(4, 3, 2).double(), torch.rand(5, 2).double().requires_grad_()
    plan = make_plan("Sum", apply("Exp", neg(apply("SqDist", var(CAT_I, 0, 2), var(CAT_J, 1, 2)))))
    hidden = torch._add_batch_dim(torch.stack([x, x + 1]), 0, level - 1) if level > 1 else x
    hidden = torch._add_batch_dim(hidden, 0, level)
    (got,) = reduce(plan, [hidden, y], 3, 5, "tiled")
    got = torch._remove_batch_dim(got, level, 4, 0)
    if level > 1:
        got = torch._remove_batch_dim(got, level - 1, 2, 0)[0]
    torch.testing.assert_close(got, (-(torch.cdist(x, y[None]) ** 2)).exp().sum(-1, keepdim=True))


def test_gradients_in_a_transform_of_what_is_recorded_outside():
    """An outer backward pass through torch.func.grad."""
    case = Case("Sum", "gauss")

    def outer(run):
        x, y, b, s = case.data(m=3, n=4)
        s.requires_grad_()
        g = grad(lambda t: run([t, y, b, s])[0].sum())(x)
        (g2,) = torch.autograd.grad(g.square().sum(), s)
        return g2

    close(outer(case.ours), outer(case.dense))


def test_vmap_over_what_the_formula_ignores():
    plan = make_plan("Sum", apply("Exp", neg(apply("SqDist", var(CAT_I, 0, 2), var(CAT_J, 1, 2)))), n_vars=3)
    x, y, z = torch.rand(3, 2), torch.rand(4, 2), torch.rand(5, 7)
    (want,) = reduce(plan, [x, y, None], 3, 4, "tiled")
    got = vmap(lambda z: reduce(plan, [x, y, z], 3, 4, "tiled")[0])(z)
    assert got.shape == (5, 3, 1)
    torch.testing.assert_close(got, want.expand(5, 3, 1))
