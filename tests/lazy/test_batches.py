"""Batch dimensions: values, first and second derivatives against dense float64 torch, on every back end."""

from __future__ import annotations

import pytest
import torch

from kernops import Genred, LazyTensor
from tests.helpers.backends import ON_CPU, need

M, N, D, E = 3, 4, 2, 2

#: Batch shapes of x_i, y_j, the parameter p, and b_j.
BATCHES = {
    "one for all": ((2,), (2,), (2,), (2,)),
    "only rows": ((2,), (), (), ()),
    "only columns": ((), (2,), (), ()),
    "only the parameter": ((), (), (2,), ()),
    "only the right-hand side": ((), (), (), (2,)),
    "singletons that broadcast": ((2, 1), (1, 3), (1, 1), (2, 3)),
    "adjacent singletons": ((2, 1, 1), (1, 1, 3), (), (1, 2, 1)),
    "missing and singletons": ((3,), (2, 1), (2, 3), (1,)),
    "three axes": ((2, 3, 2), (3, 1), (2,), ()),
}


def rand(*shape: int, seed: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def data(name: str) -> list[torch.Tensor]:
    bx, by, bp, bb = BATCHES[name]
    tensors = (
        rand(*bx, M, 1, D, seed=1),
        rand(*by, 1, N, D, seed=2),
        rand(*bp, 1, 1, D, seed=3),
        rand(*bb, N, E, seed=4),
    )
    return [t.requires_grad_() for t in tensors]


def lazy_kernel(x, y, p):
    return (-(p * (x - y) ** 2).sum(-1)).exp()


def dense_kernel(x, y, p):
    return (-(p * (x - y) ** 2).sum(-1)).exp()


def grads(out, inputs):
    """First derivatives, and the derivatives of a function of them."""
    weight = torch.linspace(0.5, 1.5, out.numel(), dtype=torch.float64).reshape(out.shape)
    first = torch.autograd.grad((out * weight).sum(), inputs, create_graph=True)
    second = torch.autograd.grad(sum((g**2).sum() for g in first), inputs)
    return (*first, *second)


def compare(got, want):
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("backend", ON_CPU)
def test_products(name, backend):
    need(backend)
    x, y, p, b = data(name)
    k = lazy_kernel(*map(LazyTensor, (x, y, p)))
    dense = dense_kernel(x, y, p)
    batch = dense.shape[:-2]
    assert k.batchdims == (tuple(batch) or None) and k.shape == dense.shape
    got, want = k.__matmul__(b, backend=backend), dense @ b
    compare(got, want)
    for g, w in zip(grads(got, (x, y, p, b)), grads(want, (x, y, p, b))):
        compare(g, w)


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("reduction", ["sum", "logsumexp", "min", "max", "Kmin", "var"])
@pytest.mark.parametrize("over", [0, 1])
def test_reductions(name, reduction, over):
    x, y, p, _ = data(name)
    k, dense = lazy_kernel(*map(LazyTensor, (x, y, p))), dense_kernel(x, y, p)
    axis = k.nbatchdims + over
    if reduction == "Kmin":
        got, want = k.Kmin(2, axis=axis), dense.sort(axis).values.narrow(axis, 0, 2)
        want = want.mT if over == 0 else want
    elif reduction in ("sum", "logsumexp"):
        got, want = getattr(k, reduction)(axis), getattr(dense, reduction)(axis)[..., None]
    elif reduction == "var":
        got, want = k.var(axis), dense.var(axis, correction=0)[..., None]
    else:
        got, want = getattr(k, reduction)(axis=axis), getattr(dense, "a" + reduction)(axis)[..., None]
    compare(got, want)
    for g, w in zip(grads(got, (x, y, p)), grads(want, (x, y, p))):
        compare(g, w)


@pytest.mark.parametrize("name", BATCHES)
def test_indices(name):
    x, y, p, _ = data(name)
    k, dense = lazy_kernel(*map(LazyTensor, (x, y, p))), dense_kernel(x, y, p)
    assert torch.equal(k.argmin(k.nbatchdims + 1), dense.argmin(-1)[..., None])
    assert torch.equal(k.argKmin(3, axis=k.nbatchdims + 1), dense.argsort(-1)[..., :3])


def test_vectors_of_one_dimension():
    x, y, p, _ = data("one for all")
    k, dense = lazy_kernel(*map(LazyTensor, (x, y, p))), dense_kernel(x, y, p)
    v = rand(N, seed=5)
    assert (k @ v).shape == (2, M)
    compare(k @ v, dense @ v)


def test_batches_that_drop_out_of_the_formula():
    x, y, p = map(LazyTensor, data("only the parameter")[:3])
    zero_power = ((x - y) * p) ** 0
    assert zero_power.sum(axis=2).shape == (2, M, D) and (zero_power.sum(axis=2) == N).all()
    gradient = ((x - y) * p).grad(x, 1)  # p: linear in x
    assert gradient.sum(axis=2).shape == (2, M, D)
    direction = (x * p + y).grad(y, p)  # p alone
    assert direction.argmin(axis=1).shape == (2, N, D)
    assert (x * p * 0).Kmin(2, axis=1).shape == (2, 1, 2, D)


def test_genred_with_batches():
    x, y, p, b = (t.detach() for t in data("one for all"))
    k = Genred("Exp(-Sum(P * Square(X - Y))) * B", ["X = Vi(2)", "Y = Vj(2)", "P = Pm(2)", "B = Vj(2)"], axis=1)
    want = dense_kernel(x, y, p) @ b
    compare(k(x[..., 0, :], y[:, 0], p[:, 0, 0], b), want)
    compare(k(x[..., 0, :], y[0, 0], p[0, 0, 0], b[0]), dense_kernel(x, y[0], p[0]) @ b[0])
    with pytest.raises(ValueError, match=r"argument 2: a parameter is one vector for all rows, \(2,\); got \(2, 2\)"):
        k(x[0, :, 0], y[0, 0], p[:, 0, 0], b[0])
