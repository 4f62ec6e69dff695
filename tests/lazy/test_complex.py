"""Complex LazyTensors against complex128 torch."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from kernops import LazyTensor, Vi, Vj
from kernops.lazy import ComplexLazyTensor

M, N, D = 4, 5, 3


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.complex128)


X, Y, P = rand(M, D, seed=1), rand(N, D, seed=2), rand(D, seed=3)
R = X.real.contiguous()

EXPRESSIONS = {
    "add": lambda x, y, r: x + y,
    "sub": lambda x, y, r: x - y + r - (r - y),
    "mul": lambda x, y, r: x * y * r,
    "real on the left": lambda x, y, r: r * x / y - r,
    "div": lambda x, y, r: x / y + r / y + y / (r * r + 1),
    "numbers": lambda x, y, r: 2 * x + 1j * y - x / 3 + (0.1 + 0.2j) * r - 1j + r / 2j,
    "neg, conj": lambda x, y, r: -(x * y.conj()),
    "exp": lambda x, y, r: ((x - y) * 0.3).exp(),
    "vector sum": lambda x, y, r: (x * y).sum(-1) if isinstance(x, LazyTensor) else (x * y).sum(-1, keepdim=True),
    "parameter": lambda x, y, r: x * P + y,
}


def same(lazy, dense):
    dense = dense.expand(M, N, dense.shape[-1])
    for axis in (0, 1):
        got = lazy.sum(axis=axis)
        torch.testing.assert_close(got, dense.sum(axis), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_arithmetic(name):
    f = EXPRESSIONS[name]
    zero = 0 * Vi(R)[0] + 0 * Vj(Y.real)[0]  # so that every expression has rows and columns
    same(f(Vi(X), LazyTensor(Y[None]), Vi(R)) + zero, f(X[:, None], Y[None], R[:, None]))


def test_parts():
    x, y = Vi(X), Vj(Y)
    z, d = x * y, X[:, None] * Y[None]
    parts: list[Any] = [
        (z.real, d.real),
        (z.imag, d.imag),
        (abs(z), d.abs()),
        (z.abs(), d.abs()),
        (z.angle(), d.angle()),
    ]
    for lazy, dense in parts:
        assert not lazy.is_complex
        torch.testing.assert_close(lazy.sum(axis=1), dense.sum(1), rtol=1e-12, atol=1e-12)
    assert z.is_complex and isinstance(z, ComplexLazyTensor) and type(Vi(X)) is ComplexLazyTensor
    assert (z.shape, z.ndim, z.dtype, z.T.shape) == ((M, N, D), D, "complex128", (N, M, D))
    assert LazyTensor(X.to(torch.complex64)[:, None]).dtype == "complex64"


def test_made_from_real():
    r, d = Vi(R) - Vj(Y.real), R[:, None] - Y.real
    same(r.real2complex(), d + 0j)
    same(r.imag2complex(), 1j * d)
    same(r.exp1j(), (1j * d).exp())
    same(r * [1j, 2, 0.5], d * torch.tensor([1j, 2, 0.5]))
    same(r + 1j, d + 1j)


@pytest.mark.parametrize("complex_kernel", [True, False])
@pytest.mark.parametrize("complex_vector", [True, False])
def test_products(complex_kernel, complex_vector):
    k = (Vi(R) - Vj(Y.real)).sum(-1)
    dense = (R[:, None] - Y.real).sum(-1)
    if complex_kernel:
        k, dense = k.exp1j(), (1j * dense).exp()
    v = rand(N, 2, seed=5) if complex_vector else rand(N, 2, seed=5).real
    want = dense.to(torch.complex128) @ v.to(torch.complex128)
    got = k @ v
    assert got.is_complex() == (complex_kernel or complex_vector)
    torch.testing.assert_close(got.to(torch.complex128), want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close((k @ v[:, 0]).to(torch.complex128), want[:, 0], rtol=1e-12, atol=1e-12)


def test_numpy_and_gradients():
    out = (Vi(X.numpy()) * Vj(Y.numpy())).sum(axis=1)
    assert out.dtype == np.complex128
    np.testing.assert_allclose(out, (X[:, None] * Y).sum(1).numpy())
    x, z = X.clone().requires_grad_(), X.clone().requires_grad_()
    (Vi(x) / Vj(Y)).exp().sum(axis=1).abs().sum().backward()
    (z[:, None] / Y).exp().sum(1).abs().sum().backward()
    torch.testing.assert_close(x.grad, z.grad, rtol=1e-10, atol=1e-12)


def test_copies():
    z = Vi(X) * Vj(Y)
    for again in (copy.copy(z), copy.deepcopy(z), pickle.loads(pickle.dumps(z))):
        assert again.is_complex
        assert torch.equal(again.sum(axis=1), z.sum(axis=1))


NOT_YET = {
    "sin": lambda z: z.sin(),
    "power": lambda z: z**2,
    "comparison": lambda z: z < 1,
    "real compared with complex": lambda z: z.real < z,
    "scalar product": lambda z: z | z,
    "component": lambda z: z[0],
    "sqdist": lambda z: z.sqdist(z),
    "real sqdist complex": lambda z: z.real.sqdist(z),
    "logsumexp": lambda z: z.logsumexp(1),
    "argmin": lambda z: z.argmin(axis=1),
    "mean": lambda z: z.mean(axis=1),
    "complex weight": lambda z: z.real.sum(-1).logsumexp(1, weight=z),
    "out": lambda z: z.sum(axis=1, out=X),
    "solve": lambda z: z.solve(X),
}


@pytest.mark.parametrize("name", NOT_YET)
def test_what_is_not_there_says_so(name):
    with pytest.raises(NotImplementedError, match="not available yet"):
        NOT_YET[name](Vi(X) * Vj(Y))
