"""Operators on a GPU against the same operators in main memory, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernops import kernels
from kernops.operators import KernelOperator, KroneckerOperator, posterior_variance

N = 3000  # above what is solved densely


def both(dtype: torch.dtype):
    """The matrix of one model on the CPU in float64 and on the GPU in ``dtype``, with their parameters and targets."""
    g = torch.Generator().manual_seed(0)
    x = torch.rand(N, 3, generator=g, dtype=torch.float64)
    y = torch.sin(6 * x.sum(-1, keepdim=True)) + 0.1 * torch.randn(N, 1, generator=g, dtype=torch.float64)
    for device, t in (("cpu", torch.float64), ("cuda", dtype)):
        lengths = torch.full((3,), 0.3, dtype=t, device=device).requires_grad_()
        noise = torch.full((1,), 0.1, dtype=t, device=device).requires_grad_()
        a = KernelOperator(kernels.RBF(lengths) + kernels.White(noise), x.to(device, t))
        yield a, (lengths, noise), y.to(device, t)


@pytest.mark.parametrize(("dtype", "tol"), [(torch.float64, 1e-6), (torch.float32, 2e-3)])
def test_solutions_and_likelihoods(dtype, tol):
    (a, parameters, y), (b, others, z) = both(dtype)
    for kind in ("pivoted_cholesky", "nystrom"):
        solution, report = b.solve(z, tol=1e-5, preconditioner=kind, return_report=True)
        assert solution.is_cuda and report.converged and 0 < report.rank <= 500
        exact = a.solve(y, method="cholesky")
        assert (solution.detach().cpu() - exact).norm() < 1e-3 * exact.norm()
    fit, logdet = a.inv_quad_logdet(y, method="cholesky")
    got = b.inv_quad_logdet(z, tol=1e-6 if dtype == torch.float64 else 1e-4, preconditioner=b.preconditioner(rank=500))
    assert abs(got[0].item() / fit.item() - 1) < tol and abs(got[1].item() / logdet.item() - 1) < tol
    want = torch.autograd.grad(-0.5 * (fit + logdet), parameters)
    for g, w in zip(torch.autograd.grad(-0.5 * sum(got), others), want):
        np.testing.assert_allclose(g.cpu(), w, rtol=0.02, atol=0.02 * float(w.abs().max()))


def test_entries_samples_and_eigenpairs():
    (a, _, y), (b, _, z) = both(torch.float64)
    index = torch.arange(0, N, 100)
    for got, want in (
        (b[index.cuda(), :5].to_dense(), a[index, :5].to_dense()),
        (b.diagonal(), a.diagonal()),
        (b._row(torch.tensor(7, device="cuda")), a._row(torch.tensor(7))),
        (b.sqrt_matmul(z, tol=1e-8), a.sqrt_matmul(y, tol=1e-8)),
        (b.eigsh(4)[0], a.eigsh(4)[0]),
        (KroneckerOperator(b, torch.eye(2).double().cuda()) @ torch.cat([z, z]),
         KroneckerOperator(a, torch.eye(2).double()) @ torch.cat([y, y])),
    ):  # fmt: skip
        assert got.is_cuda
        torch.testing.assert_close(got.detach().cpu(), want.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("d", "length"), [(3, 0.03), (32, 0.8)])
def test_many_right_hand_sides_store_the_matrix(d, length):
    """Where the rank of the default leaves too much; solutions and variances are those of the exact matrix."""
    g = torch.Generator().manual_seed(1)
    x, new = (torch.rand(n, d, generator=g, dtype=torch.float64).float() for n in (N, 200))
    kernel, noise = kernels.RBF(length), 0.1
    a = KernelOperator(kernel, x.cuda()).add_diagonal(noise)
    exact = KernelOperator(kernel, x.double()).add_diagonal(noise).to_dense()
    table = torch.empty(N, N, device="cuda")
    a._dense_into(table)
    torch.testing.assert_close(table.cpu().double(), exact, rtol=1e-5, atol=1e-6)
    made = a.preconditioner("cholesky")
    assert made.kind == "cholesky" and made.nbytes == 4 * N * N
    np.testing.assert_allclose(made.matrix.logdet().item(), exact.logdet().item(), rtol=1e-4)
    across = KernelOperator(kernel, new.cuda(), x.cuda())
    columns = KernelOperator(kernel, new.double(), x.double()).to_dense().mT
    want = torch.linalg.solve(exact, columns)
    got, report = a.solve(across.to_dense().mT, method="cg", tol=1e-4, return_report=True)
    assert report.preconditioner == "cholesky" and report.iterations <= 2 and report.nbytes == 4 * N * N
    assert (got.cpu() - want).norm() < 1e-3 * want.norm()
    found = posterior_variance(a, across, torch.ones(200, device="cuda"), accuracy=1e-3, method="cg")
    spread = 1 - (columns * want).sum(0)
    assert ((found.value.cpu() - spread).abs() / spread).max() < 2e-3 and found.iterations <= 2
    plain = a.solve(across.to_dense().mT, method="cg", tol=1e-4, preconditioner="pivoted_cholesky")
    assert (plain.cpu() - want).norm() < 1e-3 * want.norm()
