"""Solvers on matrices that are given as functions: restarts, what they tell, and what they refuse."""

from __future__ import annotations

import pytest
import torch

from kernops.solvers import cg as cg_module
from kernops.solvers import conjugate_gradients, krylov, largest_eigenpairs, log_quadrature, pivoted_cholesky


def spd(n: int, condition: float, seed: int = 0) -> torch.Tensor:
    q, _ = torch.linalg.qr(torch.randn(n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))
    values = torch.logspace(0, -torch.tensor(condition).log10().item(), n, dtype=torch.float64)
    return q @ torch.diag(values) @ q.T


A = spd(100, 1e4)
B = torch.randn(100, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Counted:
    """A product that counts its calls, and is wrong once."""

    def __init__(self, wrong_at: int = -1) -> None:
        self.calls, self.wrong_at = 0, wrong_at

    def __call__(self, v: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return A @ v + (0.1 * v.flip(0) if self.calls == self.wrong_at else 0)


def test_the_true_residual_is_computed_when_orthogonality_is_lost(monkeypatch):
    """After a wrong product the recurrence knows nothing of it, and goes astray; a restart finds the way back."""
    faulty = Counted(wrong_at=30)
    solution = conjugate_gradients(faulty, B, tol=1e-8)
    assert solution.converged and faulty.calls > solution.iterations + 1
    torch.testing.assert_close(A @ solution.x, B, rtol=0, atol=1e-6)
    plain = Counted()
    assert conjugate_gradients(plain, B, tol=1e-8).iterations + 1 == plain.calls  # none where there is no need
    monkeypatch.setattr(cg_module, "LOSS", float("inf"))
    assert not conjugate_gradients(Counted(wrong_at=30), B, tol=1e-8, warn=False).converged


@pytest.mark.parametrize(("shift", "indefinite"), [(-0.5, True), (1e-12, False)])
def test_negative_directions_are_told_from_rounding(shift, indefinite):
    low = A[:, :5] @ A[:, :5].T  # of rank 5
    a = low + shift * torch.eye(100).double()
    solution = conjugate_gradients(lambda v: a @ v, B, max_iter=200, warn=False)
    assert solution.indefinite == indefinite and not solution.converged
    assert ("not positive definite" in solution.reason) or not indefinite


def test_a_callback_sees_iterations_and_ends_them():
    seen = []

    def callback(k, residuals):
        seen.append((k, residuals.clone()))
        return k == 4

    matrix = spd(80, 1e4)
    b = torch.ones(80, 2, dtype=torch.float64)
    found = conjugate_gradients(lambda v: matrix @ v, b, tol=1e-10, callback=callback, warn=False)
    assert [k for k, _ in seen] == [1, 2, 3, 4] and found.iterations == 4 and not found.converged
    assert found.reason == "the callback asked for the end"
    torch.testing.assert_close(found.residual, seen[-1][1])
    torch.testing.assert_close(found.residual, (b - matrix @ found.x).norm(dim=0) / b.norm(dim=0))


def test_steps_are_the_lanczos_matrix():
    solution = conjugate_gradients(lambda v: A @ v, B, tol=1e-10, history=1000)
    alpha, beta = solution.steps
    assert len(alpha) == len(beta) and alpha.shape[1:] == (3,) and (alpha[:5] > 0).all()
    values, vectors = torch.linalg.eigh(A)
    exact = ((vectors.T @ B).square() * values.log()[:, None]).sum(0)
    torch.testing.assert_close(log_quadrature(alpha, beta, solution.start), exact, rtol=1e-6, atol=0)
    short = conjugate_gradients(lambda v: A @ v, B, tol=1e-10, history=7)
    assert torch.equal(short.steps[0], alpha[:7])
    none = conjugate_gradients(lambda v: A @ v, B, max_iter=0, warn=False)
    assert len(none.steps[0]) == 0 and (log_quadrature(*none.steps, none.start) == 0).all()


def test_krylov_spaces_are_orthonormal_and_end():
    low = A[:, :4] @ A[:, :4].T
    space, change = krylov(lambda v: low @ v, B, torch.exp, 1e-12, 80)
    k = len(space.basis)
    assert k < 20 and change <= 1e-12
    for e in range(3):
        gram = space.basis[:, :, e] @ space.basis[:, :, e].T
        kept = gram.diagonal() > 0
        torch.testing.assert_close(gram, torch.diag(kept.double()), rtol=0, atol=1e-10)
    torch.testing.assert_close(space.expand(space.coefficients(torch.exp)), torch.linalg.matrix_exp(low) @ B)


def test_eigenpairs_that_are_equal():
    values = torch.cat([torch.full((6,), 3.0), torch.linspace(0, 2, 94)]).double()
    q, _ = torch.linalg.qr(torch.randn(100, 100, generator=torch.Generator().manual_seed(2), dtype=torch.float64))
    a = q @ torch.diag(values) @ q.T
    generator = torch.Generator().manual_seed(0)
    found = largest_eigenpairs(lambda v: a @ v, (100,), 8, like=a, tol=1e-10, max_iter=200, generator=generator)
    torch.testing.assert_close(found.values, values.sort(descending=True).values[:8])
    assert (found.residual <= 1e-10).all()


def test_pivoted_cholesky_of_a_matrix_of_low_rank():
    low = A[:, :4] @ A[:, :4].T
    factor, pivots = pivoted_cholesky(lambda p: low[p], low.diagonal(), 10)
    torch.testing.assert_close(factor @ factor.T, low, rtol=0, atol=1e-13)
    assert (factor[:, 4:] == 0).all() and len(set(pivots[:4].tolist())) == 4
