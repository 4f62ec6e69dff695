"""LazyTensor and Genred on CUDA data: CuPy arrays, pykeops' names of back ends, mixed devices."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernops import Genred, LazyTensor, Vi, Vj

RNG = np.random.default_rng(0)
X, Y, V = RNG.random((40, 3)), RNG.random((60, 3)), RNG.random((60, 2))
WANT = np.exp(-((X[:, None] - Y[None]) ** 2).sum(-1)) @ V


def gauss(x, y):
    return (-((Vi(x) - Vj(y)) ** 2).sum(-1)).exp()


def test_cupy_in_cupy_out_without_a_copy():
    cupy = pytest.importorskip("cupy")
    x, y, v = map(cupy.asarray, (X, Y, V))
    lazy = gauss(x, y)
    assert lazy.frame.tensors[0].data_ptr() == x.data.ptr
    out = lazy @ v
    assert type(out) is cupy.ndarray
    np.testing.assert_allclose(out.get(), WANT, rtol=1e-12)
    assert lazy.argKmin(3, axis=1).dtype == cupy.int64
    np.testing.assert_allclose((x[0] * Vi(x)).sum(axis=0).get(), (X[0] * X).sum(0, keepdims=True), rtol=1e-12)
    np.testing.assert_allclose(gauss(x[::-1], y[::2]).sum(axis=1).get()[:, 0], gauss(X[::-1], Y[::2]).sum(axis=1)[:, 0])
    z = Genred("Exp(-SqDist(X,Y)) * V", ["X = Vi(3)", "Y = Vj(3)", "V = Vj(2)"], axis=1)(x, y, v)
    np.testing.assert_allclose(z.get(), WANT, rtol=1e-12)
    with pytest.raises(TypeError, match="one kind .* got cupy and torch"):
        lazy @ torch.tensor(V, device="cuda")
    z = LazyTensor((x + 1j * x)[:, None]) * Vj(y)
    np.testing.assert_allclose(z.sum(axis=1).get(), (X * (1 + 1j))[:, None].repeat(60, 1).__mul__(Y).sum(1), rtol=1e-12)


def test_cupy_work_of_another_stream_is_waited_for():
    cupy = pytest.importorskip("cupy")
    with cupy.cuda.Stream(non_blocking=True):
        x = cupy.zeros((4000, 3))
        for _ in range(200):
            x += 1
        out = Vi(x).sum(axis=0)
    np.testing.assert_array_equal(out.get(), np.full((1, 3), 200.0 * 4000))


@pytest.mark.parametrize("backend", ["auto", "GPU", "GPU_1D", "GPU_2D", "cuda", "tiled"])
def test_names_of_back_ends(backend):
    x, y, v = (torch.tensor(t, device="cuda") for t in (X, Y, V))
    out = gauss(x, y).__matmul__(v, backend=backend, device_id=x.device.index)
    np.testing.assert_allclose(out.cpu().numpy(), WANT, rtol=1e-12)


def test_data_on_two_devices():
    x, y = torch.tensor(X, device="cuda"), torch.tensor(Y)
    with pytest.raises(ValueError, match="on one device; got cuda:0 and cpu"):
        gauss(x, y)
    with pytest.raises(ValueError, match="backend 'CPU' computes on cpu; the data are on cuda:0"):
        Vi(x).sum(axis=0, backend="CPU")
    assert gauss(x, y.cuda()).device == x.device


@pytest.mark.parametrize("d", [3, 64])
def test_arrays_of_pairs_give_the_same_bits(d):
    """(N, 1, D) and (1, N, D) are read as they are, by sums, gradients, searches pruned or on matrix units."""
    n = 20_000
    x, y, v = (torch.rand(n, k, device="cuda") for k in (d, d, 1))
    g = torch.rand(n, 1, device="cuda")

    def results(a, b, *inputs):
        squares = ((a - b) ** 2).sum(-1)
        out = (-squares).exp() @ v
        return [out, squares.argKmin(5, axis=1), squares.min(axis=0), *torch.autograd.grad(out, inputs, g)]

    flat = [t.clone().requires_grad_() for t in (x, y)]
    want = results(Vi(flat[0]), Vj(flat[1]), *flat)
    pairs = [x[:, None].clone().requires_grad_(), y.T.contiguous().T[None].requires_grad_()]
    got = results(LazyTensor(pairs[0]), LazyTensor(pairs[1]), *pairs)
    for first, second in zip(got, want, strict=True):
        assert torch.equal(first.reshape(second.shape), second)
    assert [t.shape for t in got[3:]] == [t.shape for t in pairs]
