"""Operators, methods and indexing against the same expression of dense float64 tensors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from kernops import LazyTensor, Pm, Vi, Vj
from kernops.formula.ops import OPS
from kernops.lazy.methods import NOT_YET
from tests.helpers.backends import ON_CPU, need
from tests.helpers.cases import examples

M, N, D = 5, 7, 3
TOLERANCE: dict[str, Any] = {"rtol": 1e-13, "atol": 1e-13}


def rand(*shape: int, seed: int = 0, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
    g = torch.Generator().manual_seed(1000 * seed + sum(shape))
    return low + (high - low) * torch.rand(*shape, generator=g, dtype=torch.float64)


def same(lazy: LazyTensor, dense: torch.Tensor) -> None:
    """Compare through sums weighted with random numbers that depend on the column: no value can hide."""
    dense = dense.broadcast_to(lazy._shape)
    for axis, rows in ((lazy.dim() - 2, -2), (lazy.dim() - 3, -3)):
        w = rand(dense.shape[rows], 1, low=0.5, seed=7)
        weight = LazyTensor(w[None] if rows == -2 else w[:, None])
        got = (lazy * weight).sum(axis=axis)
        want = (dense * (w if rows == -2 else w[:, None])).sum(rows)
        torch.testing.assert_close(got, want, **TOLERANCE)


X, Y, P = rand(M, D, seed=1, low=0.2), rand(N, D, seed=2, low=0.2), rand(D, seed=3, low=0.2)
A, B = rand(M, 1, seed=4, low=0.2), rand(N, 1, seed=5, low=0.2)
DENSE = (X[:, None], Y[None], P, A[:, None], B[None])


def lazies() -> tuple[LazyTensor, ...]:
    return (LazyTensor(X[:, None]), Vj(Y), Pm(P), Vi(A), LazyTensor(B[None]))


EXPRESSIONS = {
    "sub": lambda x, y, p, a, b: x - y,
    "chain": lambda x, y, p, a, b: (x - y) * p / (a + b) - (x + 2) / 3,
    "numbers on the left": lambda x, y, p, a, b: 2 - x + (1 / y) * 3 + 0.1 * p - (0.3 - x),
    "powers": lambda x, y, p, a, b: x**2 + y**-1 + x**0.5 + y**-0.5 + x**1.7 + x**3.0 + x**0 + 2**y + 1.5**x + a**b,
    "array operands": lambda x, y, p, a, b: x * P + P * y - x / P + P**x,
    "a list": lambda x, y, p, a, b: x * (p * 0 + 1) + y,
    "neg abs pos": lambda x, y, p, a, b: -abs(x - y) + (+p),
    "used twice": lambda x, y, p, a, b: (x - y) * (x - y) + x * x - y,
    "deep": lambda x, y, p, a, b: ((x - y) ** 2 * p + (a * b)) * ((x + y) - a) + (b - p),
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_arithmetic(name):
    f = EXPRESSIONS[name]
    same(f(*lazies()), f(*DENSE))


COMPARISONS = {
    "==": lambda x, y: x == y,
    "!=": lambda x, y: x != y,
    "<": lambda x, y: x < y,
    "<=": lambda x, y: x <= y,
    ">": lambda x, y: x > y,
    ">=": lambda x, y: x >= y,
}


@pytest.mark.parametrize("name", COMPARISONS)
@pytest.mark.parametrize("other", ["lazy", "number", "reflected number", "reflected tensor"])
def test_comparisons(name, other):
    f = COMPARISONS[name]
    x, y = X.clone().round(decimals=1), Y.clone().round(decimals=1)
    if other == "lazy":
        got, want = f(Vi(x), Vj(y)), f(x[:, None], y[None])
    elif other == "number":
        got, want = f(Vi(x) - 0.5, 0.1), f(x[:, None] - 0.5, 0.1)
    elif other == "reflected number":
        got, want = f(0.5, Vj(y)), f(torch.tensor(0.5, dtype=torch.float64), y[None])
    else:
        got, want = f(P, Vj(y)), f(P, y[None])
    same(got, want.double())


def test_scalar_product_and_modulo():
    x, y, p, a, b = lazies()
    same(x | y, (X[:, None] * Y[None]).sum(-1, keepdim=True))
    same(P | y, (P * Y[None]).sum(-1, keepdim=True))
    same(x % 0.3, X[:, None] % 0.3)
    same(0.7 % x, 0.7 % X[:, None])


def methods():
    for op in OPS.values():
        for method in op.methods:
            for dims, params in examples(op):
                yield pytest.param(method, op.name, dims, params, id=f"{method}-{dims}-{params}")


@pytest.mark.parametrize(("method", "name", "dims", "params"), list(methods()))
def test_every_method_of_the_table(method, name, dims, params):
    op = OPS[name]
    args, dense = [], []
    for k, (dim, (low, high)) in enumerate(zip(dims, op.domain)):
        rows = (M, N, None)[k]
        data = rand(*(() if rows is None else (rows,)), dim, seed=k, low=low, high=high)
        args.append((Vi, Vj, Pm)[k](data))
        dense.append((data[:, None], data[None], data)[k])
    got = getattr(args[0], method)(*args[1:], *params)
    want = op.ref(torch, *dense, *params)
    same(got, want)
    if op.params and method != "elem":  # pykeops calls it i
        same(getattr(args[0], method)(*args[1:], **dict(zip(op.params, params))), want)


WRITTEN_OUT = {
    "power": (lambda x, y, p: x.power(3), lambda x, y, p: x**3),
    "mod": (lambda x, y, p: x.mod(0.25), lambda x, y, p: x % 0.25),
    "mod offset": (lambda x, y, p: x.mod(0.25, 0.1), lambda x, y, p: x - 0.25 * torch.floor((x - 0.1) / 0.25)),
    "round": (lambda x, y, p: (10 * x).round(), lambda x, y, p: (10 * x).round()),
    "round digits": (lambda x, y, p: x.round(2), lambda x, y, p: x.round(decimals=2)),
    "round tens": (lambda x, y, p: (100 * x).round(-1), lambda x, y, p: (100 * x).round(decimals=-1)),
    "sinc": (lambda x, y, p: x.sinc(), lambda x, y, p: torch.sinc(x)),
    "norm": (lambda x, y, p: (x - y).norm(-1) + x.norm(2), lambda x, y, p: (x - y).norm(dim=-1, keepdim=True)
             + x.norm(dim=-1, keepdim=True)),
    "weightedsqnorm": (lambda x, y, p: x.weightedsqnorm(p), lambda x, y, p: (p * x * x).sum(-1, keepdim=True)),
    "weightedsqdist": (lambda x, y, p: x.weightedsqdist(y, p),
                       lambda x, y, p: (p * (x - y) ** 2).sum(-1, keepdim=True)),
    "difference_matrix": (lambda x, y, p: x.difference_matrix(y[:2]),
                          lambda x, y, p: (x[..., :, None] - y[..., None, :2]).flatten(-2)),
    "concat": (lambda x, y, p: x.concat(y), lambda x, y, p: torch.cat([x.expand(M, N, D), y.expand(M, N, D)], -1)),
    "concatenate": (lambda x, y, p: LazyTensor.concatenate((x, y, p), -1) + LazyTensor.cat((x, y, p), dim=2),
                    lambda x, y, p: 2 * torch.cat([t.expand(M, N, D) for t in (x, y, p)], -1)),
    "elem": (lambda x, y, p: x.elem(1) + x.elem(-1) + y[0] + y[-3],
             lambda x, y, p: x[..., 1:2] + x[..., 2:] + 2 * y[..., :1]),
    "slices": (lambda x, y, p: x[1:] + y[:2] + p[:, :, 0:2] + x[..., 1:3] + x[:, :, -2:] + x[:2],
               lambda x, y, p: 3 * x[..., 1:] + y[..., :2] + p[:2] + x[..., :2]),
    "sum": (lambda x, y, p: x.sum() + x.sum(-1) + y.sum(2) + (x - y).sum(dim=2),
            lambda x, y, p: (3 * x).sum(-1, keepdim=True)),
    "max": (lambda x, y, p: (x - y).max() + (x - y).max(dim=2), lambda x, y, p: 2 * (x - y).amax(-1, keepdim=True)),
    "min": (lambda x, y, p: (x - y).min(-1), lambda x, y, p: (x - y).amin(-1, keepdim=True)),
    "argmax": (lambda x, y, p: (x - y).argmax(-1), lambda x, y, p: (x - y).argmax(-1, keepdim=True).double()),
    "argmin": (lambda x, y, p: (x - y).argmin(2), lambda x, y, p: (x - y).argmin(-1, keepdim=True).double()),
    "mean": (lambda x, y, p: (x - y).mean(), lambda x, y, p: (x - y).mean(-1, keepdim=True)),
    "var": (lambda x, y, p: (x - y).var(-1), lambda x, y, p: (x - y).var(-1, correction=0, keepdim=True)),
    "std": (lambda x, y, p: (x - y).std(2, correction=1), lambda x, y, p: (x - y).std(-1, keepdim=True)),
    "any": (lambda x, y, p: (x > y).any(-1), lambda x, y, p: (x > y).any(-1, keepdim=True).double()),
    "all": (lambda x, y, p: (x > y).all(), lambda x, y, p: (x > y).all(-1, keepdim=True).double()),
    "count_nonzero": (lambda x, y, p: (x > y).count_nonzero(), lambda x, y, p: (x > y).sum(-1, keepdim=True).double()),
    "clamp": (lambda x, y, p: (x - y).clamp(-0.1, 0.2), lambda x, y, p: (x - y).clamp(-0.1, 0.2)),
    "clamp by whole numbers": (lambda x, y, p: (9 * (x - y)).clamp(-1, 2), lambda x, y, p: (9 * (x - y)).clamp(-1, 2)),
    "ifelse": (lambda x, y, p: (x - y).ifelse(x, 0), lambda x, y, p: torch.where(x >= y, x, 0.0)),
    "factorize": (lambda x, y, p: (x - y).factorize(y).auto_factorize(), lambda x, y, p: x - y),
    "torch functions": (lambda x, y, p: torch.exp(x) + torch.maximum(x, y),
                        lambda x, y, p: torch.exp(x) + torch.maximum(x, y)),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_methods_written_out(name):
    lazy, dense = WRITTEN_OUT[name]
    same(lazy(*lazies()[:3]), dense(*DENSE[:3]).double())


def test_list_operands():
    p, q = (torch.tensor(t, dtype=torch.float64) for t in ([0.1, 0.2, 0.3], [1.0, 2.0, 0.7]))
    same(Vi(X) * [0.1, 0.2, 0.3] + Vj(Y), X[:, None] * p + Y[None])
    same(Vi(X) * LazyTensor([0.1]) + Pm([1.0, 2.0, 0.7]) * Vj(Y), X[:, None] * 0.1 + Y * q)


@pytest.mark.parametrize(
    ("shape_a", "shape_b", "axes_a", "axes_b", "order"),
    [([2, 3], [3, 2], [1], [0], None), ([2, 3], [2, 3, 2], [0, 1], [0, 1], None), ([6], [2, 2], [], [], None),
     ([2, 3, 2], [3, 2], [1], [0], (1, 2, 0)), ([2, 3], [2, 2], [0], [1], (1, 0))],
)  # fmt: skip
def test_tensordot(shape_a, shape_b, axes_a, axes_b, order):
    x, y = rand(M, math.prod(shape_a)), rand(N, math.prod(shape_b))
    got = Vi(x).keops_tensordot(Vj(y), shape_a, shape_b, axes_a, axes_b, *([] if order is None else [order]))
    want = torch.empty(M, N, got.ndim).double()
    for i in range(M):
        for j in range(N):
            t = np.tensordot(x[i].reshape(shape_a), y[j].reshape(shape_b), (axes_a, axes_b))
            if order is not None:  # axis k of the product moves to place order[k]
                t = np.moveaxis(t, range(t.ndim), order)
            want[i, j] = torch.tensor(t).flatten()
    same(got, want)


def test_kron():
    x, y = rand(M, 6), rand(N, 8)
    got = Vi(x).keops_kron(Vj(y), [2, 3], [4, 2])
    want = torch.stack([torch.stack([torch.kron(a.view(2, 3), b.view(4, 2)).flatten() for b in y]) for a in x])
    same(got, want)


def test_derivatives_inside_formulas():
    x, y, p, a, b = lazies()
    xd = X[:, None].expand(M, N, D).clone().requires_grad_()
    f, fd = ((x - y) ** 2 * p).sin(), ((xd - Y) ** 2 * P).sin()
    (g,) = torch.autograd.grad(fd, xd, (B[None] * P).expand(M, N, D))
    same(f.grad(x, b * p), g)

    def components(v):
        return ((v - Y) ** 2 * P).sin() * v.sum(-1, keepdim=True)

    full = (((x - y) ** 2 * p).sin() * x.sum()).grad_matrix(x)
    want = torch.stack([torch.autograd.grad(components(xd)[..., k].sum(), xd)[0] for k in range(D)], -2)
    same(full, want.flatten(-2))
    divergence = (((x - y) ** 2 * p).sin() * x.sum()).divergence(x)
    same(divergence, want.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True))
    direction = ((x - y) ** 2 * p).sin().diff(x, y)
    dense = torch.func.jvp(lambda v: ((v - Y) ** 2 * P).sin(), (xd.detach(),), (Y.expand(M, N, D),))[1]
    same(direction, dense)
    laplacian = (-((x - y) ** 2).sum()).exp().laplacian(x)
    r = ((X[:, None] - Y) ** 2).sum(-1, keepdim=True)
    same(laplacian, (4 * r - 2 * D) * (-r).exp())


def test_trace_operator_drops_its_variable():
    x, y = Vi(0, 3), Vj(1, 3)
    v = Vi(2, 3)
    matrix = v * (x * y) + v.sum() * y  # diag(x y) + y 1ᵀ
    reduction = matrix.trace_operator(v).sum(axis=1)
    got = reduction(X, Y)
    torch.testing.assert_close(got, ((X[:, None] * Y) + Y).sum(-1, keepdim=True).sum(1))


CONSTANTS = {
    "x / 3": lambda x: x / 3,
    "x ** 1.7": lambda x: x**1.7,
    "x + 16777217": lambda x: x + 16777217,
    "x * 0.1": lambda x: x * 0.1,
    "0.7 / x": lambda x: 0.7 / x,
    "x - 1e-17": lambda x: (x - x) - 1e-17,
    "pi": lambda x: x * math.pi + math.e,
    "numpy numbers": lambda x: x * np.float64(1 / 3) + np.int64(7),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_keep_double_precision(name):
    f = CONSTANTS[name]
    got, want = (f(Vi(X)) + 0 * Vj(Y[:1])).sum(axis=1), f(X)
    assert ((got - want) / want).abs().max() < 1e-15


@pytest.mark.parametrize("backend", ON_CPU)
def test_constants_keep_double_precision_compiled(backend):
    """All of them in one formula, which is one compilation."""
    need(backend)
    lazy = LazyTensor.concatenate(tuple(f(Vi(X)) + 0 * Vj(Y[:1]) for f in CONSTANTS.values()))
    got, want = lazy.sum(axis=1, backend=backend), torch.cat([f(X) for f in CONSTANTS.values()], -1)
    assert ((got - want) / want).abs().max() < 1e-15


def test_times_zero_is_lazy():
    x = Vi(X)
    for zero in (x * 0, 0 * x, x * 0.0, 0 / x, x**0, x - x):
        assert isinstance(zero, LazyTensor) and zero._shape == x._shape
    same(x**0 + Vj(Y), 1 + Y[None] + 0 * X[:, None])
    assert str((x * -0.0).formula) == "Mul(Const(-0.0),Vi(0,3))"


def test_scalars_do_not_change_the_formula():
    x, y = Vi(X), Vj(Y)
    with_sigma = {str((-((x - y) ** 2).sum() / s).exp().formula) for s in (0.1, 0.3, 7.77)}
    assert len(with_sigma) == 1
    assert str((x * 2).formula) != str((x * 4).formula)  # small whole numbers are part of the formula


def test_the_same_tensor_is_one_variable():
    x = Vi(X)
    assert len(((x - Vj(Y)) * x).frame.tensors) == 2
    assert len((Vi(X) * Vi(X)).frame.tensors) == 1
    assert len((Vi(X) - Vj(X)).frame.tensors) == 2  # rows and columns of it
    k = Vi(X) | Vj(X)
    assert len((k + k.T).frame.tensors) == 2


@pytest.mark.parametrize("name", NOT_YET)
def test_what_is_not_there_says_so(name):
    with pytest.raises(NotImplementedError, match="not available yet"):
        getattr(Vi(X), name)(Vj(Y))
