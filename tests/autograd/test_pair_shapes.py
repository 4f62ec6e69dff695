"""Variables with an axis of length 1 beside their rows, as in the arrays of a LazyTensor: (m, 1, D) and (1, n, D)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import jacrev, jvp, vjp, vmap

from kernops import LazyTensor, Vi, Vj
from kernops.autograd import reduce
from kernops.lazy.frame import PAIRS, PLAIN, VIEWS
from tests.helpers.reductions import REDUCTIONS, Case

Tensor = torch.Tensor
M, N = 4, 5


@pytest.fixture(params=REDUCTIONS)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param, "gauss")


def wide(values: list[Any]) -> list[Any]:
    """x, y, b, s with these axes; the layouts of memory differ, and b keeps its shape."""
    x, y, b, s = values
    return [x[:, None], y.T.contiguous().T[None], b, s]


def ours(case: Case, values: list[Any], backend: str) -> tuple[Tensor, ...]:
    outs = reduce(case.plan, values, M, N, backend, ())
    return tuple(o for o in outs if o.is_floating_point())


def leaves(values: list[Any]) -> list[Any]:
    return [t.detach().clone().requires_grad_() for t in values]


def close(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def test_values_and_gradients(case: Case, backend: str) -> None:
    dense = leaves(case.data(m=M, n=N))
    inputs = [t.detach().requires_grad_() for t in wide(dense)]
    out, want = ours(case, inputs, backend), case.dense(dense)
    for first, second in zip(out, want, strict=True):
        close(first, second)
    got = torch.autograd.grad([o.sin().sum() for o in out], inputs)
    expected = torch.autograd.grad([w.sin().sum() for w in want], dense)
    for first, second, x in zip(got, expected, inputs, strict=True):
        assert first.shape == x.shape
        close(first, second.reshape(x.shape))


@pytest.mark.parametrize("reduction", ["Sum", "SumSoftMaxWeight", "KMin"])
def test_derivatives_of_every_kind(reduction: str) -> None:
    case = Case(reduction, "gauss")
    inputs = leaves(wide(case.data(m=M, n=N)))

    def function(*values: Tensor) -> Any:
        return ours(case, list(values), "tiled")[0]

    assert gradcheck(function, inputs, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(function, inputs, check_fwd_over_rev=True, check_batched_grad=True)


def test_derivatives_of_a_scalar_sum() -> None:
    """What the forward pass has found of them serves first derivatives alone."""
    x, y = leaves([torch.rand(M, 1, 3).double(), torch.rand(1, N, 3).double()])

    def function(x: Tensor, y: Tensor) -> Any:
        return (-((LazyTensor(x) - LazyTensor(y)) ** 2).sum(-1)).exp().sum(dim=1, backend="tiled")

    assert gradcheck(function, (x, y), check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(function, (x, y), check_fwd_over_rev=True, check_batched_grad=True)


def test_transforms(case: Case) -> None:
    values = case.data(m=M, n=N)
    inputs = wide(values)
    x, v = inputs[0], torch.rand_like(inputs[0])

    def function(t: Tensor) -> Tensor:
        return ours(case, [t, *inputs[1:]], "tiled")[0]

    def dense(t: Tensor) -> Tensor:
        return case.dense([t[:, 0], *values[1:]])[0]

    close(jvp(function, (x,), (v,)), jvp(dense, (x,), (v,)))
    want, pull = vjp(dense, x)[:2]
    close(vjp(function, x)[1](want.cos()), pull(want.cos()))
    close(jacrev(function)(x), jacrev(dense)(x))
    many = torch.stack([x, v, x + v], 1)
    close(vmap(function, 1)(many), vmap(dense, 1)(many))


def test_a_transform_of_gradients_of_a_graph_from_outside() -> None:
    case = Case("Sum", "gauss")
    dense = leaves(case.data(m=M, n=N))
    inputs = [t.detach().requires_grad_() for t in wide(dense)]
    (out,), (want,) = ours(case, inputs, "tiled"), case.dense(dense)
    cotangents = torch.rand(3, *out.shape).double()
    got = vmap(lambda g: torch.autograd.grad(out, inputs, g, retain_graph=True))(cotangents)
    expected = vmap(lambda g: torch.autograd.grad(want, dense, g, retain_graph=True))(cotangents)
    for first, second in zip(got, expected, strict=True):
        close(first, second.reshape(first.shape))
    with forward_ad.dual_level():  # forward over reverse
        g, t = cotangents[0], cotangents[1]
        (moved,) = torch.autograd.grad(out, inputs[:1], forward_ad.make_dual(g, t), retain_graph=True)
        (other,) = torch.autograd.grad(want, dense[:1], forward_ad.make_dual(g, t), retain_graph=True)
        close(forward_ad.unpack_dual(moved).tangent[:, 0], forward_ad.unpack_dual(other).tangent)


def test_lazy_tensors_of_such_arrays() -> None:
    """Whoever asks a frame for its tensors gets them without these axes, and the same ones each time."""
    x, y = torch.rand(M, 1, 3).double(), torch.rand(1, N, 3).double()
    k, row = LazyTensor(x) - LazyTensor(y), LazyTensor(x)
    first, second = k.frame.tensors, k.frame.tensors
    assert [t.shape for t in first] == [(M, 3), (N, 3)]
    assert all(s is t for s, t in zip(first, second))
    like, like_row = Vi(x[:, 0]) - Vj(y[0]), Vi(x[:, 0])
    k.backend = like.backend = "tiled"
    for axis in (0, 1):
        close(k.sum(axis=axis), like.sum(axis=axis))
        close(k.T.sum(axis=axis), like.T.sum(axis=axis))
        close((k**2).sum(-1).std(axis=axis), (like**2).sum(-1).std(axis=axis))
        close((k**2).sum(-1).argKmin(2, axis=axis), (like**2).sum(-1).argKmin(2, axis=axis))
    close((k * row).sum(axis=1), (like * like_row).sum(axis=1))


@pytest.mark.parametrize("where", ["no_grad", "inference_mode", "vmap"])
def test_a_use_without_gradients_takes_none_from_later_ones(where: str) -> None:
    """Those that are kept without the axis are kept for all uses of a frame."""
    (x,) = leaves([torch.rand(M, 1, 3).double()])
    k = LazyTensor(x) - LazyTensor(torch.rand(1, N, 3).double())
    k.backend = "tiled"

    def value() -> Tensor:
        return k.std(axis=0)

    if where == "vmap":
        want = vmap(lambda t: value() + t)(torch.zeros(2))[0].detach()
    else:
        with getattr(torch, where)():
            want = value()
    assert k.frame.tensors[0].requires_grad
    got = value()
    close(got.detach(), want.clone())
    dense = (x - k.frame.given[1]).std(0, correction=0)
    close(torch.autograd.grad(got.sum(), x), torch.autograd.grad(dense.sum(), x))


def test_batched_data_beside_them() -> None:
    """(M, 1, D) of no batch among data with batch dimensions, with as many batch elements as rows."""
    x, y, b = torch.rand(3, 1, 2).double(), torch.rand(3, 1, 4, 2).double(), torch.rand(3, 4, 1).double()
    x.requires_grad_()
    got = (-((LazyTensor(x) - LazyTensor(y)) ** 2).sum(-1)).exp() @ b
    want = (-((x - y) ** 2).sum(-1)).exp() @ b
    close(got, want)
    close(torch.autograd.grad(got.sin().sum(), x), torch.autograd.grad(want.sin().sum(), x))


@pytest.mark.parametrize("shape", [(4, 1, 1, 1, 3), (1, 4, 1, 1, 3)])
def test_batched_parameters_beside_them(shape: tuple[int, ...]) -> None:
    """Two batch axes of which one has length 1 are not rows with an axis beside them."""
    (x, p), y = leaves([torch.rand(M, 1, 3).double(), torch.rand(shape).double()]), torch.rand(1, N, 3).double()
    got, want = (LazyTensor(x) * LazyTensor(p) * LazyTensor(y)).sum(-1).sum(axis=3), (x * p * y).sum(-1).sum(-1)
    close(got[..., 0], want)
    for first, second in zip(*(torch.autograd.grad(out.sin().sum(), (x, p)) for out in (got, want)), strict=True):
        close(first, second)


def test_batched_vectors_of_one_column_beside_them() -> None:
    """(4, 1, E) are four batch elements of one column."""
    (x, b) = leaves([torch.rand(M, 1, 3).double(), torch.rand(4, 1, 2).double()])
    got, want = LazyTensor(x).sum(-1) @ b, x.sum(-1) @ b
    close(got, want)
    for first, second in zip(*(torch.autograd.grad(out.sin().sum(), (x, b)) for out in (got, want)), strict=True):
        close(first, second)


def test_only_frames_without_batch_axes_hold_them() -> None:
    k = LazyTensor(torch.rand(M, 1, 3)) - LazyTensor(torch.rand(1, N, 3))
    assert k.frame.form == PAIRS and k.frame.replace(batch=(2,)).form == PLAIN
    merged = (k * LazyTensor(torch.rand(2, 1, N, 3))).frame
    assert merged.form == VIEWS and [t.ndim for t in merged.tensors] == [2, 2, 3]
    assert [t is again for t, again in zip(merged.tensors, merged.tensors)] == [True] * 3
    assert len((k * LazyTensor(torch.rand(2, 1, N, 3)) + k).frame.given) == 3


def test_graphs_have_no_nodes_but_the_reduction() -> None:
    x, y, b = (torch.rand(*shape).requires_grad_() for shape in ((M, 1, 3), (1, N, 3), (N, 1)))
    out = (-((LazyTensor(x) - LazyTensor(y)) ** 2).sum(-1)).exp() @ b
    assert out.grad_fn is not None
    behind = [type(node).__name__ for node, _ in out.grad_fn.next_functions if node is not None]
    assert behind == ["AccumulateGrad"] * 3
