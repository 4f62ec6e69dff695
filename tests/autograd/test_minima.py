"""Gradients of minima: they go to the columns that were chosen, and nowhere else."""

from __future__ import annotations

import math

import pytest
import torch

from kernops.autograd import reduce
from kernops.formula.graph import CAT_I, CAT_J, CAT_P, var
from kernops.formula.ops import add, apply, div, mul, sub
from kernops.formula.plan import make_plan
from tests.helpers.reductions import MINIMA, Case

Tensor = torch.Tensor
X, Y = var(CAT_I, 0, 1), var(CAT_J, 1, 1)
F64 = torch.float64


def column(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=F64).unsqueeze(-1).requires_grad_()


@pytest.mark.parametrize("reduction", MINIMA)
def test_values_and_indices_are_the_back_ends(reduction, backend):
    from kernops import backends

    case = Case(reduction, "gauss")
    values = [t.requires_grad_() for t in case.data(m=6, n=8)]
    with torch.no_grad():
        want = backends.reduce(case.plan, values, 6, 8, backend)
    for got, w in zip(reduce(case.plan, values, 6, 8, backend), want, strict=True):
        assert torch.equal(got, w)
        assert got.requires_grad == w.is_floating_point()


def test_ties_send_the_gradient_to_the_lowest_index():
    x, y = column(1.0), column(2.0, 0.0, 0.0, 5.0)
    (out,) = reduce(make_plan("Min", mul(X, Y)), [x, y], 1, 4, "tiled")
    gx, gy = torch.autograd.grad(out.sum(), [x, y])
    assert gx.tolist() == [[0.0]]
    assert gy.squeeze(-1).tolist() == [0.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("core", ["MinArgMin", "KMin"])
def test_nothing_found_has_value_nan_and_gradient_zero(core):
    """Columns that are NaN are never chosen; a row of nothing else chooses none, and no column gets its gradient."""
    x, y = column(1.0, math.nan, 2.0), column(3.0, math.nan, 1.0)
    plan = make_plan(core, mul(X, Y), k=3 if core == "KMin" else 0)
    value, index = reduce(plan, [x, y], 3, 3, "tiled")
    want = {
        "MinArgMin": ([1.0, math.nan, 2.0], [2, -1, 2]),
        "KMin": ([1.0, 3.0, math.nan] + [math.nan] * 3 + [2.0, 6.0, math.nan], [2, 0, -1] + [-1] * 3 + [2, 0, -1]),
    }[core]
    torch.testing.assert_close(value.flatten(), torch.tensor(want[0], dtype=F64), equal_nan=True)
    assert index.flatten().tolist() == want[1]
    gx, gy = torch.autograd.grad(value.nansum(), [x, y], create_graph=True)
    per_row, per_column = {
        "MinArgMin": ([1.0, 0.0, 1.0], [0.0, 0.0, 3.0]),
        "KMin": ([4.0, 0.0, 4.0], [3.0, 0.0, 3.0]),
    }[core]
    assert gx.squeeze(-1).tolist() == per_row
    assert gy.squeeze(-1).tolist() == per_column
    # A cotangent for what was not found is dropped, too, and so it is in second derivatives.
    gx, gy = torch.autograd.grad(value.sum(), [x, y], create_graph=True)
    assert gx.squeeze(-1).tolist() == per_row and gy.squeeze(-1).tolist() == per_column
    gxx, gxy = torch.autograd.grad(gx.sum() + gy.sum(), [x, y])
    assert not (gxx.isnan().any() or gxy.isnan().any())


def test_where_the_minimum_is_nan_its_gradient_is_zero():
    x, y = column(1.0, 2.0), column(3.0, math.nan, 1.0)
    (out,) = reduce(make_plan("Min", add(mul(X, 2.0), Y)), [x, y], 2, 3, "tiled")
    assert out.isnan().all()
    for g in torch.autograd.grad(out.sum(), [x, y]):
        assert not g.any()
    y = column(3.0, 1.0)
    x = column(1.0, math.nan)
    (out,) = reduce(make_plan("Min", add(mul(X, 2.0), Y)), [x, y], 2, 2, "tiled")
    gx, gy = torch.autograd.grad(out.sum(), [x, y])
    assert gx.squeeze(-1).tolist() == [2.0, 0.0] and gy.squeeze(-1).tolist() == [0.0, 1.0]


def test_infinite_values_are_legal():
    x, y = column(1.0), column(math.inf, 2.0, math.inf)
    value, index = reduce(make_plan("KMin", mul(X, Y), k=3), [x, y], 1, 3, "tiled")
    assert value.flatten().tolist() == [2.0, math.inf, math.inf] and index.flatten().tolist() == [1, 0, 2]
    (gy,) = torch.autograd.grad(value.sum(), y)
    assert gy.squeeze(-1).tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("core", MINIMA)
def test_each_component_has_its_own_column(core):
    x = torch.rand(3, 2, dtype=F64, requires_grad=True)
    y = torch.rand(5, 2, dtype=F64, requires_grad=True)
    p = torch.rand(2, dtype=F64, requires_grad=True)
    f = mul(apply("Square", sub(var(CAT_I, 0, 2), var(CAT_J, 1, 2))), var(CAT_P, 2, 2))
    value = reduce(make_plan(core, f, k=2 if core == "KMin" else 0), [x, y, p], 3, 5, "tiled")[0]
    dense = ((x[:, None] - y) ** 2 * p).sort(dim=1).values[:, : 2 if core == "KMin" else 1]
    dense = dense if core == "KMin" else dense.squeeze(1)
    g = torch.rand_like(dense)
    got = torch.autograd.grad(value, [x, y, p], g, create_graph=True)
    want = torch.autograd.grad(dense, [x, y, p], g, create_graph=True)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(
        torch.autograd.grad([t.square().sum() for t in got], [x, y, p]),
        torch.autograd.grad([t.square().sum() for t in want], [x, y, p]),
    )


def test_the_distance_to_oneself_has_gradient_zero():
    x = torch.randn(5, 2, dtype=F64, requires_grad=True)
    f = apply("Norm2", sub(var(CAT_I, 0, 2), var(CAT_J, 1, 2)))
    value, index = reduce(make_plan("KMin", f, k=2), [x, x], 5, 5, "tiled")
    assert index[:, 0, 0].tolist() == list(range(5))
    (got,) = torch.autograd.grad(value.sum(), x)
    nearest = x.detach()[index[:, 1, 0]]
    ours = x.detach().requires_grad_()
    distance = torch.linalg.vector_norm(ours - ours[index[:, 1, 0]], dim=1)
    assert torch.equal(value[:, 0, 0], torch.zeros(5, dtype=F64)) and nearest.shape == (5, 2)
    torch.testing.assert_close(got, torch.autograd.grad(distance.sum(), ours)[0])


def test_an_infinite_slope_stays_with_its_own_pair():
    x, y = column(0.0, 1.0), column(1.0, 2.0)
    value, _ = reduce(make_plan("MinArgMin", div(Y, X)), [x, y], 2, 2, "tiled")
    assert value.flatten().tolist() == [math.inf, 1.0]
    gx, gy = torch.autograd.grad(value[1].sum(), [x, y])
    assert gx[1].item() == -1.0 and gy.squeeze(-1)[1].item() == 0.0


def test_indices_have_no_gradient():
    x, y = column(1.0), column(2.0, 3.0)
    value, index = reduce(make_plan("MinArgMin", mul(X, Y)), [x, y], 1, 2, "tiled")
    assert value.requires_grad and not index.requires_grad


def test_no_rows(backend):
    case = Case("KMin", "gauss")
    values = [t.requires_grad_() for t in case.data(m=0, n=5)]
    value, index = reduce(case.plan, values, 0, 5, backend)
    assert value.shape == index.shape == (0, 3, 2)
    for t, g in zip(values, torch.autograd.grad(value.sum(), values)):
        assert g.shape == t.shape and not g.any()


def test_no_columns():
    case = Case("Min", "gauss")
    values = [t.requires_grad_() for t in case.data(m=3, n=0)]
    (value,) = reduce(case.plan, values, 3, 0, "tiled")
    assert (value == math.inf).all()
    for t, g in zip(values, torch.autograd.grad(value.sum(), values)):
        assert g.shape == t.shape and not g.any()
    with pytest.raises(ValueError, match="no columns"):
        reduce(Case("MinArgMin", "gauss").plan, values, 3, 0, "tiled")


def test_many_rows_choose_the_same_column():
    """The gradient of a popular column sums up over the rows, the same bits each time."""
    x = torch.rand(1000, 1, requires_grad=True)
    y = torch.cat([torch.zeros(1, 1), 5 + torch.rand(50, 1)]).requires_grad_()
    plan = make_plan("Min", apply("Square", sub(X, Y)))
    grads = [torch.autograd.grad(reduce(plan, [x, y], 1000, 51, "tiled")[0].sum(), y)[0] for _ in range(3)]
    torch.testing.assert_close(grads[0][0], (-2 * x.detach().double()).sum(0).float(), rtol=1e-4, atol=0)
    assert not grads[0][1:].any()
    assert torch.equal(grads[0], grads[1]) and torch.equal(grads[0], grads[2])
