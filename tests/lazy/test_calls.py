"""Reductions that are called later, and the options of calls."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from kernops import LazyTensor, Pm, Vi, Vj

M, N, D = 4, 6, 3


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, Y, B, P = rand(M, D, seed=1), rand(N, D, seed=2), rand(N, 2, seed=3), rand(1, seed=4)
WANT = (-((X[:, None] - Y[None]) ** 2).sum(-1) * P).exp() @ B


def kernel(x, y, p):
    return (-((x - y) ** 2).sum(-1) * p).exp()


def test_all_symbolic():
    call = (kernel(Vi(0, D), Vj(1, D), Pm(2, 1)) * Vj(3, 2)).sum(axis=1)
    torch.testing.assert_close(call(X, Y, P, B), WANT)
    torch.testing.assert_close(call(X, Y, P.item(), B), WANT)  # a number for a parameter
    torch.testing.assert_close(call(X, Y, [P.item()], B), WANT)
    out = call(X.numpy(), Y.numpy(), P.numpy(), B.numpy())
    assert type(out) is np.ndarray
    np.testing.assert_allclose(out, WANT.numpy())
    assert "Sum over j of Mul(Exp(" in repr(call) and "takes 4" in repr(call)
    torch.testing.assert_close(pickle.loads(pickle.dumps(call))(X, Y, P, B), WANT)


def test_partly_symbolic():
    call = (kernel(Vi(0, D), Vj(Y), 1.0 * P) * Vj(1, 2)).sum(dim=1)
    torch.testing.assert_close(call(X, B), WANT)
    with pytest.raises(ValueError, match=r"takes 2 argument\(s\), one for each symbolic variable; got 1"):
        call(X)
    with pytest.raises(ValueError, match="argument 1: j-variables must have equally many rows; got N = 6 and N = 4"):
        call(X, B[:4])
    with pytest.raises(ValueError, match=r"argument 0: the i-variable must have shape \(..., M, 3\); got \(4, 2\)"):
        call(X[:, :2], B)
    with pytest.raises(ValueError, match="argument 0: all data must have one dtype"):
        call(X.float(), B)
    with pytest.raises(TypeError, match="argument 0: all data must be of one kind .* got torch and numpy"):
        call(X.numpy(), B)
    with pytest.raises(TypeError, match="argument 0 must be a torch tensor"):
        call("x", B)


def test_numbers_of_symbols_are_places_of_arguments():
    call = (Vi(1, D) * Pm(0, 1) - Vj(2, D)).sum(axis=0)
    torch.testing.assert_close(call(P, X, Y), (X[:, None] * P - Y).sum(0))
    k = Vi(0, D) | Vj(0, D)  # one array as rows and as columns
    torch.testing.assert_close(k.sum(axis=1)(X), (X @ X.T).sum(1, keepdim=True))
    torch.testing.assert_close((k + k.T).sum(axis=1)(X), 2 * (X @ X.T).sum(1, keepdim=True))


def test_lists_wait_for_a_dtype():
    got = (Vi(X) * [1.0, 2.0, 3.0]).sum(axis=1)
    torch.testing.assert_close(got, X * torch.tensor([1.0, 2.0, 3.0]).double())
    got = (Vi(0, D) * LazyTensor([1.0, 2.0, 3.0])).sum(axis=1)(X.float())
    assert got.dtype == torch.float32


@pytest.mark.parametrize("reduction", ["sum", "logsumexp", "argmin", "mean", "std"])
def test_call_false(reduction):
    k = kernel(Vi(X), Vj(Y), P)
    waiting = getattr(k, reduction)(axis=1, call=False)
    want = getattr(k, reduction)(axis=1)
    assert torch.equal(waiting(), want)
    assert torch.equal(waiting(backend="tiled"), want)
    assert torch.equal(getattr(k, reduction)(axis=1, call=False, backend="CPU")(), want)


def test_symbols_with_k_and_weights():
    k = kernel(Vi(0, D), Vj(1, D), 1)
    dense = kernel(X[:, None], Y[None], 1)
    assert torch.equal(k.argKmin(2, axis=1)(X, Y), dense.argsort(1)[:, :2])
    torch.testing.assert_close(k.sumsoftmaxweight(Vj(2, 2), axis=1)(X, Y, B), dense.softmax(1) @ B)
    torch.testing.assert_close(k.logsumexp(1, weight=Vj(B))(X, Y), (dense.exp() @ B).log())


def test_options_of_pykeops_are_accepted():
    k = kernel(Vi(X), Vj(Y), P)
    for options in (
        {"backend": "auto"}, {"backend": "CPU"}, {"backend": "tiled"}, {"device_id": -1}, {"ranges": None},
        {"dtype_acc": "float64"}, {"use_double_acc": True}, {"sum_scheme": "kahan_scheme"}, {"enable_chunks": False},
    ):  # fmt: skip
        torch.testing.assert_close(k.__matmul__(B, **options), WANT)


def test_the_backend_attribute_goes_along():
    x = Vi(X)
    x.backend = "tiled"
    k = kernel(x, Vj(Y), P)
    assert k.backend == "tiled" and Vj(Y).backend is None
    torch.testing.assert_close(k @ B, WANT)
    x.backend = None
    x.ranges = None
    assert x.backend is None


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_out(kind):
    def of(t):
        return t if kind == "torch" else t.numpy()

    k = kernel(Vi(of(X)), Vj(of(Y)), of(P))
    out = of(torch.full((M, 1), 7.0).double())
    assert k.sum(axis=1, out=out) is out
    np.testing.assert_allclose(out, k.sum(axis=1))
    strided = of(torch.full((1, M), 7.0).double()).T
    k.sum(axis=1, out=strided)
    np.testing.assert_allclose(strided, out)
    index = of(torch.zeros((M, 2), dtype=torch.int64))
    values = of(torch.zeros((M, 2)).double())
    k.Kmin_argKmin(2, axis=1, out=(values, index))
    np.testing.assert_array_equal(index, k.argKmin(2, axis=1))
    for wrong, error, message in (
        (of(torch.zeros(M).double()), ValueError, r"out must have shape \(4, 1\); got \(4,\)"),
        (of(torch.zeros(M, 1)), ValueError, "out must have dtype float64; got float32"),
        ([0.0] * M, TypeError, "out must be a .*; got list"),
        (X.numpy() if kind == "torch" else X, TypeError, "out must be a"),
    ):
        with pytest.raises(error, match=message):
            k.sum(axis=1, out=wrong)
    with pytest.raises(ValueError, match="out must be a tuple of 2 arrays"):
        k.min_argmin(axis=1, out=out)


def test_inputs_are_never_written_to():
    x, y, b = (t.clone() for t in (X, Y, B))
    k = kernel(Vi(x), Vj(y), P)
    assert k.sum(axis=1).data_ptr() != x.data_ptr()
    k @ b, k.Kmin(2, axis=0), Vi(x).sum(axis=1).add_(1), (Vi(x) * 1).min(axis=1).add_(1)
    assert torch.equal(x, X) and torch.equal(y, Y) and torch.equal(b, B)


def test_the_same_call_gives_the_same_bits():
    x, y = rand(300, D, seed=8).float(), rand(500, D, seed=9).float()
    first = kernel(Vi(x), Vj(y), 0.3).sum(axis=1)
    assert all(torch.equal(kernel(Vi(x), Vj(y), 0.3).sum(axis=1), first) for _ in range(3))
