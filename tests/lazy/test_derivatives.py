"""Derivatives through LazyTensor and Genred: autograd, torch.func and torch.compile, against dense float64 tensors."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import pytest
import torch

from kernops import Genred, LazyTensor, Pm, Vi, Vj
from kernops.lazy import nodes
from tests.helpers.backends import ON_CPU, need

M, N, D = 4, 5, 3


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def kernel(x, y, s):
    """exp(-s |x_i - y_j|²), of lazy or of dense x (M, 1, D) and y (1, N, D)."""
    return (-s * ((x - y) ** 2).sum(-1)).exp()


def lazy_product(x, y, b):
    return kernel(LazyTensor(x[..., :, None, :]), LazyTensor(y[..., None, :, :]), 0.7) @ b


def dense_product(x, y, b):
    return kernel(x[..., :, None, :], y[..., None, :, :], 0.7) @ b


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


def same_derivatives(lazy, dense, inputs):
    """Values, first and second derivatives of two functions of tensors."""
    results = []
    for f in (lazy, dense):
        own = [t.detach().clone().requires_grad_() if t.is_contiguous() else t for t in inputs]
        out = f(*own)
        weight = torch.linspace(0.5, 1.5, out.numel(), dtype=torch.float64).reshape(out.shape)
        leaves = [t for t in own if t.requires_grad]
        first = torch.autograd.grad((out * weight).sum(), leaves, create_graph=True)
        second = torch.autograd.grad(torch.stack([(g**2).sum() for g in first]).sum(), leaves)
        results.append((out, *first, *second))
    for got, want in zip(*results):
        close(got, want)


X, Y, B = rand(M, D, seed=1), rand(N, D, seed=2), rand(N, 2, seed=3)


@pytest.mark.parametrize("backend", ON_CPU)
def test_products(backend, monkeypatch):
    need(backend)
    monkeypatch.setenv("KERNOPS_BACKEND", backend)
    same_derivatives(lazy_product, dense_product, (X, Y, B))


USES = {
    "rows and columns of one tensor": (
        lambda x: kernel(Vi(x), Vj(x), 0.5) @ x,
        lambda x: kernel(x[:, None], x[None], 0.5) @ x,
    ),
    "used twice": (
        lambda x: (Vi(x) * Vi(x) - LazyTensor(x[:, None]) + Vj(x)).sum(axis=1),
        lambda x: (x[:, None] * x[:, None] - x[:, None] + x[None]).sum(1),
    ),
    "rows, columns and parameter": (
        lambda x: ((Vi(x) - Vj(x)) * Pm(x[0]) * x[1]).exp().sum(axis=0),
        lambda x: ((x[:, None] - x[None]) * x[0] * x[1]).exp().sum(0),
    ),
    "expanded": (
        lambda x: kernel(Vi(x[:1].expand(5, D)), Vj(x.expand(M, D)), 0.5).sum(axis=1),
        lambda x: kernel(x[:1].expand(5, D)[:, None], x[None], 0.5).sum(1)[..., None],
    ),
    "transposed": (
        lambda x: kernel(Vi(x.T), Vj(x.T * 2), 0.5).sum(axis=1),
        lambda x: kernel(x.T[:, None], 2 * x.T[None], 0.5).sum(1)[..., None],
    ),
    "strided and reversed": (
        lambda x: kernel(Vi(x[::2]), Vj(x.flip(0)[:, :]), 0.5).logsumexp(1),
        lambda x: kernel(x[::2][:, None], x.flip(0)[None], 0.5).logsumexp(1)[..., None],
    ),
    "transpose of a kernel": (
        lambda x: kernel(Vi(x), Vj(x[:2]), 0.5).T @ x,
        lambda x: kernel(x[:, None], x[None, :2], 0.5).T @ x,
    ),
    "minima": (
        lambda x: kernel(Vi(x), Vj(x * x), 0.5).Kmin(3, axis=1),
        lambda x: kernel(x[:, None], (x * x)[None], 0.5).sort(1).values[:, :3],
    ),
    "softmax": (
        lambda x: kernel(Vi(x), Vj(x * x), 0.5).sumsoftmaxweight(Vj(x), axis=1),
        lambda x: kernel(x[:, None], (x * x)[None], 0.5).softmax(1) @ x,
    ),
    "softmax @": (
        lambda x: kernel(Vi(x), Vj(x * x), 0.5).softmax(0) @ x,
        lambda x: kernel(x[:, None], (x * x)[None], 0.5).softmax(0) @ x,
    ),
    "weighted logsumexp": (
        lambda x: kernel(Vi(x), Vj(x * x), 0.5).logsumexp(1, weight=Vj(x)),
        lambda x: (kernel(x[:, None], (x * x)[None], 0.5).exp() @ x).log(),
    ),
    "standard deviation": (
        lambda x: kernel(Vi(x), Vj(x * x), 0.5).std(axis=0),
        lambda x: kernel(x[:, None], (x * x)[None], 0.5).std(0, correction=0)[..., None],
    ),
    "gradient in the formula": (
        lambda x: (lambda v: kernel(v, Vj(x * x), 0.5).grad(v, Vj(x)[0]).sum(axis=1))(Vi(x)),
        lambda x: (kernel(x[:, None], (x * x)[None], 0.5)[..., None] * (x * x - x[:, None]) * x[None, :, :1]).sum(1),
    ),
    "through Genred": (
        lambda x: Genred("Exp(-SqDist(X,Y)) * B", ["X = Vi(3)", "Y = Vj(3)", "B = Vj(1)"], axis=1)(x, x * x, x[:, :1]),
        lambda x: kernel(x[:, None], (x * x)[None], 1.0) @ x[:, :1],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", USES)
def test_uses_of_one_tensor(name):
    same_derivatives(*USES[name], (X,))


def test_norms_at_zero_have_gradients():
    x = X.clone().requires_grad_()
    (Vi(x) - Vj(x)).norm2().sum(axis=1).sum().backward()
    y = X.clone().requires_grad_()
    d = y[:, None] - y[None] + torch.eye(M, dtype=torch.float64)[..., None]  # keeps torch's own away from 0
    off = (1 - torch.eye(M, dtype=torch.float64)) * d.norm(dim=-1)
    off.sum().backward()
    close(x.grad, y.grad)


def test_torch_func():
    g = torch.func.grad(lambda x: lazy_product(x, Y, B).square().sum())(X)
    close(g, torch.func.grad(lambda x: dense_product(x, Y, B).square().sum())(X))
    t = rand(M, D, seed=9)
    for got, want in zip(
        *(torch.func.jvp(lambda x, f=f: f(x, Y, B), (X,), (t,)) for f in (lazy_product, dense_product))
    ):
        close(got, want)
    w = rand(M, 2, seed=8)
    close(*(torch.func.vjp(lambda y, f=f: f(X, y, B), Y)[1](w)[0] for f in (lazy_product, dense_product)))
    got = torch.func.hessian(lambda x: lazy_product(x, Y, B).sin().sum())(X)
    close(got, torch.autograd.functional.hessian(lambda x: dense_product(x, Y, B).sin().sum(), X))
    close(torch.func.jacfwd(lambda b: lazy_product(X, Y, b))(B), torch.func.jacrev(lambda b: dense_product(X, Y, b))(B))


@pytest.mark.parametrize("in_dims", [d for d in itertools.product((0, 1, -1, None), (0, None, 2), (None, 0, -1)) if any(
    v is not None for v in d)])  # fmt: skip
def test_vmap(in_dims):
    sizes = ((M, D), (N, D), (N, 2))
    inputs = []
    for k, (size, d) in enumerate(zip(sizes, in_dims)):
        shape = list(size)
        if d is not None:
            shape.insert(d % 3, 6)
        inputs.append(rand(*shape, seed=k))
    close(*(torch.func.vmap(f, in_dims)(*inputs) for f in (lazy_product, dense_product)))


@pytest.mark.parametrize("out_dims", [0, 1, -1])
def test_vmap_of_gradients(out_dims):
    x = rand(6, M, D, seed=1)
    close(*(
        torch.func.vmap(torch.func.grad(lambda x, f=f: f(x, Y, B).sin().sum()), out_dims=out_dims)(x)
        for f in (lazy_product, dense_product)
    ))  # fmt: skip


def test_calls_leave_nothing_behind():
    def alive():
        gc.collect()
        return sum(type(o) is torch.Tensor for o in gc.get_objects())

    def call(n):
        for k in range(n):
            x = X.clone().requires_grad_()
            (lazy_product(x, Y, B) * (0.5 + k)).sum().backward()
            kernel(Vi(X + k), Vj(Y), 0.1 * k + 0.03).argKmin(2, axis=1)
            GENRED(X + k, Y, B)

    known: Any = nodes.build.known  # type: ignore[attr-defined]
    call(20)
    before, kept = alive(), len(known)
    call(200)
    assert alive() == before and len(known) == kept > 0


# --- torch.compile -----------------------------------------------------------------------------------------------
def by_genred(x, y, b):
    return GENRED(x, y, b)


GENRED = Genred("Exp(-SqDist(X,Y)) * B", ["X = Vi(3)", "Y = Vj(3)", "B = Vj(2)"], axis=1)
OUTSIDE = kernel(Vi(X), Vj(Y), 0.7)


def many(x, y, b):
    k = kernel(Vi(x), Vj(y), 0.7)
    top, index = (k * 2 + 0.25).max_argmax(axis=1)
    mixed = (
        (2 - x[0] * Vi(x)).round(1).clamp(0, 1.5) + (x[0] < Vj(y)) + (x[0] - Vi(x)) / (Vi(x) | y[0]) - Vj(y)[1] / 3.3
    )
    return [
        k.T @ x, k.logsumexp(1), top, index, k.var(axis=1), k.softmax(1) @ b, k.argKmin(2, axis=0),
        (k > 0.5).count_nonzero(1), k.logsumexp(1, weight=Vj(b)), mixed.sum(axis=0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "function", [lazy_product, by_genred, many, lambda x, y, b: OUTSIDE @ b], ids=lambda f: f.__name__
)
def test_compiled_without_a_break(function):
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="eager")
    got, want = compiled(X, Y, B), function(X, Y, B)
    for g, w in zip(*(([t] if isinstance(t, torch.Tensor) else t) for t in (got, want))):
        assert g.dtype == w.dtype and g.shape == w.shape
        close(g, w)


def test_compiled_gradients_and_new_numbers():
    torch._dynamo.reset()

    def f(x, y, b, sigma):
        return (kernel(Vi(x), Vj(y), 1.0 / sigma) @ b).sin().sum()

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    for sigma in (0.3, 0.45):
        x = X.clone().requires_grad_()
        compiled(x, Y, B, sigma).backward()
        z = X.clone().requires_grad_()
        (kernel(z[:, None], Y[None], 1.0 / sigma) @ B).sin().sum().backward()
        close(x.grad, z.grad)


def test_compiled_code_can_return_a_lazy_tensor():
    torch._dynamo.reset()
    made = torch.compile(lambda x, y: kernel(Vi(x), Vj(y), 0.7), fullgraph=True, backend="eager")(X, Y)
    close((made * 2) @ B, 2 * dense_product(X, Y, B))
    assert made.shape == (M, N) and "Exp" in repr(made)
