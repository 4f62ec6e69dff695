"""What adapters are made of: gradients of bilinear forms, and entries, against dense matrices."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from kernops import backends
from kernops import kernels as k
from kernops.autograd.function import pull_back_sum
from kernops.formula.graph import CAT_I, CAT_J, var
from kernops.formula.plan import make_plan
from kernops.operators import KernelOperator
from kernops.operators.bilinear import bilinear_gradients, entries

from .cases import rand

Tensor = torch.Tensor
M, N = 7, 5


def lengths(*batch: int) -> Tensor:
    return rand(*batch, 3, seed=5) + 0.5


#: Name -> (points of rows, points of columns or None for the same, lengths).
CASES: dict[str, tuple[Tensor, Tensor | None, Tensor]] = {
    "square": (rand(M, 3, seed=1), None, lengths()),
    "rectangle": (rand(M, 3, seed=1), rand(N, 3, seed=2), lengths()),
    "batch of points": (rand(2, M, 3, seed=1), None, lengths()),
    "batch of rows": (rand(2, M, 3, seed=1), rand(N, 3, seed=2), lengths()),
    "batch of parameters": (rand(M, 3, seed=1), None, lengths(4)),
    "two batches": (rand(2, 1, M, 3, seed=1), rand(N, 3, seed=2), lengths(3)),
}


def gradients(x: Tensor, y: Tensor | None, ell: Tensor, u: Tensor, v: Tensor) -> list[Tensor]:
    """By x, y and the lengths, of the dense matrix; K is 1.5 times a Gaussian plus a linear kernel."""
    x, ell = x.clone().requires_grad_(), ell.clone().requires_grad_()
    z = x if y is None else y.clone().requires_grad_()
    dense = 1.5 * gaussian_of(x, z, ell) + x @ z.mT
    sources = [x, ell] if y is None else [x, z, ell]
    return list(torch.autograd.grad((u * (dense @ v)).sum(), sources))


def gaussian_of(x: Tensor, y: Tensor, ell: Tensor) -> Tensor:
    x, y = x / ell[..., None, :], y / ell[..., None, :]
    return (-(x[..., :, None, :] - y[..., None, :, :]).square().sum(-1) / 2).exp()


def operator(x: Tensor, y: Tensor | None, ell: Tensor) -> KernelOperator:
    return KernelOperator(1.5 * k.RBF(ell) + k.Linear(), x, y)


def collected(op: KernelOperator, grads: list[Tensor | None], sources: list[Tensor]) -> list[Tensor]:
    """One gradient for each source, of all variables that are that tensor."""
    values = op.lazy.frame.tensors
    out = []
    for s in sources:
        like = [g for t, g in zip(values, grads) if g is not None and t.data_ptr() == s.data_ptr()]
        out.append(torch.stack([g.reshape(s.shape) for g in like]).sum(0))
    return out


@pytest.mark.parametrize("width", [1, 5, 130])
@pytest.mark.parametrize("name", CASES)
def test_gradients_of_bilinear_forms(name, width):
    x, y, ell = CASES[name]
    op = operator(x, y, ell)
    u, v = rand(*op.batch, op.shape[-2], width, seed=7), rand(*op.batch, op.shape[-1], width, seed=8)
    wanted = [n for n, t in enumerate(op.lazy.frame.tensors) if isinstance(t, Tensor)]
    sources = [x, ell] if y is None else [x, y, ell]
    got = collected(op, bilinear_gradients(op, u, v, wanted), sources)
    for g, w in zip(got, gradients(x, y, ell, u, v), strict=True):
        torch.testing.assert_close(g, w)


def test_vectors_of_a_batch_that_the_matrix_has_not():
    x, y, ell = CASES["rectangle"]
    op = operator(x, y, ell)
    u, v = rand(4, M, 2, seed=7), rand(N, 2, seed=8)
    wanted = [n for n in range(len(op.lazy.frame.tensors)) if isinstance(op.lazy.frame.tensors[n], Tensor)]
    got = collected(op, bilinear_gradients(op, u, v, wanted), [x, y, ell])  # type: ignore[list-item]
    for g, w in zip(got, gradients(x, y, ell, u, v.expand(4, N, 2)), strict=True):
        torch.testing.assert_close(g, w)


def reductions(op: KernelOperator, wanted: list[int]) -> int:
    with patch("kernops.backends.reduce", wraps=backends.reduce) as reduce:
        bilinear_gradients(op, rand(op.shape[-2], 3), rand(op.shape[-1], 3), wanted)
    return reduce.call_count


def test_one_reduction_for_all_gradients():
    """Of points that are rows and columns, and of parameters; of two sets of points, one for each."""
    one = torch.ones(1).double()
    square = KernelOperator(k.RBF(one), rand(M, 3))
    assert reductions(square, [0, 1, 2]) == 1
    assert reductions(square, [2]) == 1
    assert reductions(KernelOperator(k.RBF(one), rand(M, 3), rand(N, 3)), [0, 1, 2]) == 2


def test_only_what_is_wanted():
    op = operator(*CASES["rectangle"])
    grads = bilinear_gradients(op, rand(M, 2), rand(N, 2), [1])
    assert [g is not None for g in grads] == [n == 1 for n in range(len(grads))]
    assert bilinear_gradients(op, rand(M, 0), rand(N, 0), [1])[1] is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_other_dtypes(dtype):
    x, y, ell = CASES["rectangle"]
    cast = [t.to(dtype) for t in (x, y, ell)]  # type: ignore[union-attr]
    u, v = rand(M, 2, seed=7).to(dtype), rand(N, 2, seed=8).to(dtype)
    op = KernelOperator(k.RBF(cast[2]), cast[0], cast[1])
    got = bilinear_gradients(op, u, v, [0, 1, 2])
    full = KernelOperator(k.RBF(cast[2].double()), cast[0].double(), cast[1].double())
    want = bilinear_gradients(full, u.double(), v.double(), [0, 1, 2])
    eps = torch.finfo(dtype).eps
    for g, w in zip(got, want, strict=True):
        assert g is not None and w is not None and g.dtype == dtype
        torch.testing.assert_close(g.double(), w, rtol=8 * eps, atol=8 * eps)


def test_other_reductions_have_no_gradient_without_their_value():
    plan = make_plan("LogSumExp", k.kernel("rbf", var(CAT_I, 0, 3), var(CAT_J, 1, 3)), n_vars=2)
    with pytest.raises(ValueError, match="gradient of LogSumExp needs its value"):
        pull_back_sum(plan, [rand(M, 3), rand(N, 3)], rand(M, 1), [0], M, N, "auto")


@pytest.mark.parametrize("name", CASES)
def test_entries(name):
    x, y, ell = (t if t is None else t.clone().requires_grad_() for t in CASES[name])
    op = operator(x, y, ell)  # type: ignore[arg-type]
    g = torch.Generator().manual_seed(0)
    for shape in ((), (6,), (2, 3)):
        index = [torch.randint(0, n, shape, generator=g) for n in op.shape]
        got = entries(op, index[-2], index[-1], index[:-2])
        want = op.to_dense()[tuple(index)]
        torch.testing.assert_close(got, want)
    sources = [t for t in (x, y, ell) if t is not None]
    for a, b in zip(*(torch.autograd.grad(t.sum(), sources) for t in (got, want)), strict=True):
        torch.testing.assert_close(a, b)
    rows = torch.arange(op.shape[-2])[:, None]
    every = [torch.zeros((), dtype=torch.int64) for _ in op.batch]
    torch.testing.assert_close(
        entries(op, rows, torch.arange(op.shape[-1]), every), op.to_dense()[(0,) * len(op.batch)]
    )


def test_entries_of_a_constant():
    op = KernelOperator(k.Constant(torch.tensor([2.0]).double()), rand(M, 3), rand(N, 3))
    assert entries(op, torch.tensor([0, 1]), torch.tensor([1, 2]), []).tolist() == [2.0, 2.0]
