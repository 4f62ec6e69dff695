"""Solvers on matrices that are given as functions: restarts, what they tell, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernops.solvers import (
    ConvergenceWarning,
    LowRankPlusDiagonal,
    block_pivoted_cholesky,
    conjugate_gradients,
    first_steps,
    krylov,
    largest_eigenpairs,
    log_quadrature,
    pivoted_cholesky,
    root_product,
)
from kernops.solvers import cg as cg_module
from kernops.solvers.preconditioners import _greedy


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
    if indefinite:
        assert (solution.residual <= 1).all()  # no farther away than x = 0


@pytest.mark.parametrize("start", [0.0, 0.5])
def test_a_column_that_diverges_goes_back_to_the_start(start):
    """An indefinite matrix that no step shows to be one; the other column is solved."""
    a = torch.ones(30, dtype=torch.float64)
    a[0] = -1 + 1e-10  # of b = 1, 1: p·Ap is 1e-10 in the first step, and x goes 2e10 far along p
    b = torch.zeros(30, 2, dtype=torch.float64)
    b[:2, 0] = b[1, 1] = 1.0
    x0 = torch.full_like(b, start)
    moved = b + a[:, None] * x0
    with pytest.warns(ConvergenceWarning, match="residual of [1-9].[0-9]e(-01|[+]00) after 1 iterations"):
        found = conjugate_gradients(lambda v: a[:, None] * v, moved, max_iter=1, x0=x0 if start else None)
    assert torch.equal(found.x[:, 0], x0[:, 0]) and not found.converged
    torch.testing.assert_close(found.x[:, 1], x0[:, 1] + b[:, 1])
    want = torch.linalg.vector_norm(b[:, 0]) / torch.linalg.vector_norm(moved[:, 0])
    torch.testing.assert_close(found.residual, torch.stack([want, 0 * want]))


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


def blocks(k: torch.Tensor, rank: int, seed: int = 0, enough: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Many pivots at a time."""
    principal = lambda p: k[p][:, p]  # noqa: E731
    return block_pivoted_cholesky(
        lambda p: k[:, p], principal, k.diagonal(), rank, torch.Generator().manual_seed(seed), enough
    )


def smooth(n: int) -> torch.Tensor:
    x = torch.rand(n, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return torch.exp(-10 * torch.cdist(x, x).square())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_many_pivots_at_a_time(dtype):
    """K is exact in the rows of the pivots, and little is left of the others: no more than with single pivots."""
    k = smooth(600).to(dtype)
    low, pivots = blocks(k, 80)
    assert low.shape == (600, 80) and len(set(pivots.tolist())) == 80
    exact = {torch.float32: 1e-4, torch.float64: 1e-10}[dtype]
    torch.testing.assert_close(low @ low[pivots].T, k[:, pivots], rtol=0, atol=exact)
    single, _ = pivoted_cholesky(lambda p: k[p], k.diagonal(), 80)
    left = [float((k.diagonal() - f.square().sum(-1)).clamp(min=0).sum()) for f in (low, single)]
    assert left[0] < 1.5 * left[1] and left[0] < 1e-2 * 600
    again, other = blocks(k, 80), blocks(k, 80, seed=1)
    assert torch.equal(again[1], pivots) and not torch.equal(other[1], pivots)


def test_pivots_end_where_nothing_is_left():
    low = A[:, :4] @ A[:, :4].T
    factor, pivots = blocks(low, 60)
    assert len(pivots) == 4
    torch.testing.assert_close(factor @ factor.T, low, rtol=0, atol=1e-13)
    assert blocks(torch.zeros(9, 9).double(), 5)[0].shape == (9, 0)
    k = smooth(600)
    counts = [len(blocks(k, 200, enough=enough)[1]) for enough in (0.0, 1e-3, 1.0)]
    assert counts == sorted(counts, reverse=True) and counts[0] == 200 > counts[1], counts
    factor, _ = blocks(k, 200, enough=1e-3)
    assert float((k.diagonal() - factor.square().sum(-1)).sum()) <= 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_copies_of_a_few_points_do_not_end_the_pivots(dtype):
    """The candidates are nearly all copies of one point: one pivot of them, and the others are still to come."""
    generator = torch.Generator().manual_seed(0)
    x = torch.zeros(2000, 3, dtype=dtype)
    x[:100] = 4 * torch.rand(100, 3, generator=generator, dtype=dtype)
    x = x[torch.randperm(2000, generator=generator)]
    k = torch.exp(-2 * torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist").square())
    noise, counts = torch.full((1,), 0.1, dtype=dtype), []
    b = torch.randn(2000, 1, generator=generator, dtype=dtype)
    for rank in (50, 100):
        low, pivots = blocks(k, rank)
        assert len(pivots) == rank and len(set(pivots.tolist())) == rank
        single, _ = pivoted_cholesky(lambda p: k[p], k.diagonal(), rank)
        for f in (low, single):
            solve = LowRankPlusDiagonal(f, noise).solve
            found = conjugate_gradients(lambda v: k @ v + 0.1 * v, b, tol=1e-3, preconditioner=solve)
            assert found.converged
            counts.append(found.iterations)
        assert counts[-2] <= 1.5 * counts[-1] + 2, counts
    assert len(set(blocks(k, 200)[1].tolist())) == 101  # points that differ: nothing but rounding is left beside them


def test_what_is_below_rounding_gives_no_pivot():
    """Not even the first, in whose place a block has nothing but the rounding of pivots before."""
    assert len(_greedy(1e-9 * np.eye(3), 1e-8, 3)[0]) == 0
    order, triangle = _greedy(np.diag([1e-9, 4.0, 1.0]), 1e-8, 3)
    assert order.tolist() == [1, 2] and triangle.tolist() == [[2, 0], [0, 1]]


def test_outliers_are_pivots_too():
    """A few points with all of what is left are drawn, however many others there are."""
    k = torch.diag(torch.cat([torch.full((990,), 1e-6), torch.ones(10)])).double()
    _, pivots = blocks(k, 32)
    assert set(range(990, 1000)) <= set(pivots.tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_low_rank_plus_diagonal(dtype, scale, monkeypatch):
    """Solutions, determinants and the diagonal of the inverse, of an L with equal and with empty columns."""
    from kernops.solvers import preconditioners

    monkeypatch.setattr(preconditioners, "ROWS", 17)
    generator = torch.Generator().manual_seed(4)
    low = scale * torch.randn(50, 6, generator=generator, dtype=torch.float64)
    low = torch.cat([low, low[:, :2], torch.zeros(50, 1).double()], -1)
    for diagonal in (torch.rand(50, generator=generator, dtype=torch.float64) + 0.5, torch.tensor([0.7]).double()):
        p = low @ low.T + torch.diag(diagonal.expand(50))
        made = LowRankPlusDiagonal(low.to(dtype), diagonal.to(dtype))
        tol = {torch.float32: 2e-5, torch.float64: 1e-10 * max(10, scale)}[dtype]  # as exact as what it is held against
        r = torch.randn(50, 3, generator=generator, dtype=torch.float64)
        torch.testing.assert_close(made.solve(r.to(dtype)).double(), torch.linalg.solve(p, r), rtol=0, atol=tol)
        assert float(made.logdet()) == pytest.approx(float(torch.logdet(p)), rel=10 * tol, abs=10 * tol)
        inverse = torch.linalg.inv(p).diagonal()
        torch.testing.assert_close(made.inverse_diagonal().double(), inverse, rtol=0, atol=10 * tol)


def test_the_device_is_asked_once_an_iteration(monkeypatch):
    """Each look at a number of the device is a wait for it."""
    looks: list[tuple] = []
    plain = torch.Tensor.cpu

    def cpu(self, *args, **kwargs):
        looks.append(tuple(self.shape))
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "cpu", cpu)
    solution = conjugate_gradients(lambda v: A @ v, B, tol=1e-8)
    assert solution.converged and len(looks) == solution.iterations + 2  # the first residual, and the true one


def test_first_steps_are_those_of_conjugate_gradients():
    a, b = spd(30, 100.0), B[:30]
    for preconditioner in (None, lambda r: r / a.diagonal()[:, None]):
        steps = first_steps(lambda v: a @ v, b, preconditioner, 4)
        want = conjugate_gradients(
            lambda v: a @ v, b, tol=0.0, max_iter=4, preconditioner=preconditioner, warn=False, history=4
        )
        torch.testing.assert_close(steps.x, want.x)
        torch.testing.assert_close(steps.alpha, want.steps[0])
        torch.testing.assert_close(steps.beta[:-1], want.steps[1][:-1])
        torch.testing.assert_close(steps.weight, want.start)
        torch.testing.assert_close(want.rest, b - a @ want.x)
    done = first_steps(lambda v: 2 * v, b, None, 3)  # solved by the first step
    torch.testing.assert_close(done.x, b / 2)
    assert (done.alpha[1:] == 0).all() and done.x.isfinite().all()


def test_columns_that_have_converged_are_multiplied_no_more(monkeypatch):
    """Tile by tile; solutions and what is left of residuals are as without that."""
    a = spd(60, 1e3)
    vectors = torch.linalg.eigh(a)[1]
    b = torch.cat([vectors[:, :7], torch.eye(60, dtype=torch.float64)[:, :5]], -1)  # one iteration, and many
    widths: list[int] = []

    def product(v):
        widths.append(v.shape[-1])
        return a @ v

    found = {}
    for tile in (100, 4):
        monkeypatch.setitem(cg_module.TILE, "cpu", tile)
        widths.clear()
        found[tile] = conjugate_gradients(product, b, tol=1e-8, preconditioner=lambda r: 2 * r)
        assert (min(widths) < 12) == (tile == 4)
    # products of fewer columns are rounded otherwise
    assert found[4].iterations == pytest.approx(found[100].iterations, rel=0.1)
    torch.testing.assert_close(found[4].x, found[100].x, rtol=1e-5, atol=1e-6)
    rest = b - a @ found[4].x
    torch.testing.assert_close(found[4].rest, rest, rtol=1e-6, atol=1e-14)
    torch.testing.assert_close(found[4].residual, rest.norm(dim=0) / b.norm(dim=0), rtol=1e-6, atol=1e-14)
    assert found[4].converged and float(found[4].residual.max()) <= 1.1e-8


SIZES = {torch.float32: (1e-30, 1e-22, 1e22, 1e35), torch.float64: (1e-250, 1e-170, 1e170, 1e290)}


@pytest.mark.parametrize("dtype", SIZES)
def test_right_hand_sides_of_any_size(dtype):
    """Whose squares are no numbers of the dtype; beside others, with a start, and to the same bits as others."""
    a, b = spd(60, 100.0).to(dtype), B[:60].to(dtype)
    x0 = torch.ones_like(b)
    for start in (None, x0):
        plain = conjugate_gradients(lambda v: a @ v, b, x0=start, tol=1e-5, history=9)
        for size in SIZES[dtype]:
            unit = torch.tensor([1.0, 2.0 ** round(np.log2(size)), 1.0], dtype=dtype)
            moved = None if start is None else start * unit
            found = conjugate_gradients(lambda v: a @ v, b * unit, x0=moved, tol=1e-5, history=9)
            assert found.converged and found.iterations == plain.iterations
            assert torch.equal(found.x, plain.x * unit) and torch.equal(found.rest, plain.rest * unit)
            assert torch.equal(found.residual, plain.residual) and torch.equal(found.steps[0], plain.steps[0])
    torch.testing.assert_close(a @ plain.x, b, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("size", "start"), [(1e-35, 0.0), (1e-20, 1.0), (1e30, 1e-3), (1e-3, 1e30)])
def test_starts_of_any_size(size, start):
    b, x0 = torch.full((3, 1), size), torch.full((3, 1), start)
    found = conjugate_gradients(lambda v: 2 * v, b, x0=x0)
    torch.testing.assert_close(found.x, b / 2, rtol=1e-5, atol=2e-7 * start)


@pytest.mark.parametrize("dtype", SIZES)
def test_square_roots_of_vectors_of_any_size(dtype):
    a = spd(60, 100.0)
    values, vectors = torch.linalg.eigh(a)
    want = (vectors * values.sqrt()) @ vectors.T @ B[:60]
    for size in SIZES[dtype]:
        found, _, _ = root_product(lambda v: a.to(dtype) @ v, (B[:60] * size).to(dtype), 1e-6, 60)
        torch.testing.assert_close(found.double() / size, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", SIZES)
def test_a_singular_matrix_without_a_solution_is_no_matter_of_nan(dtype):
    """Each step makes the residual larger by as much as the preconditioner is wrong, up to no number at all."""
    twice = torch.arange(40) % 20
    a = torch.eye(20, dtype=dtype)[twice][:, twice]
    low = torch.eye(20, dtype=dtype)[twice]
    inverse = LowRankPlusDiagonal(low, torch.full((1,), 10 * torch.finfo(dtype).eps, dtype=dtype)).solve
    b = torch.stack([torch.ones(40, dtype=dtype), torch.arange(40, dtype=dtype)], -1)
    found = conjugate_gradients(lambda v: a @ v, b, preconditioner=inverse, warn=False)
    assert "not positive definite to the accuracy" in found.reason and not found.indefinite
    assert torch.isfinite(found.x).all() and (found.residual <= 1).all()
    torch.testing.assert_close(a @ found.x[:, :1], b[:, :1])


def test_a_matrix_of_nan_is_one():
    found = conjugate_gradients(lambda v: v * float("nan"), B, warn=False)
    assert "not finite" in found.reason and not found.converged
