"""Linear systems: LazyTensor.solve, KernelSolve, and the conjugate gradients below them, against torch.linalg.solve."""

from __future__ import annotations

import pickle
import warnings

import numpy as np
import pytest
import torch

from kernops import Genred, LazyTensor, Vi, Vj
from kernops.lazy import KernelSolve
from kernops.solvers import ConvergenceWarning, conjugate_gradients

N, D = 30, 2


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, B = rand(N, D, seed=1), rand(N, 3, seed=2)
ALPHA, EPS = 0.1, 1e-12
FORMULA = "Exp(-Norm2(X - Y)) * A"
ALIASES = ["X = Vi(2)", "Y = Vj(2)", "A = Vj(3)"]


def dense_kernel(x):
    d = x[..., :, None, :] - x[..., None, :, :]
    return (-d.square().sum(-1)).exp()


def dense_solve(x, b):
    k = dense_kernel(x)
    return torch.linalg.solve(k + ALPHA * torch.eye(k.shape[-1], dtype=k.dtype), b)


def lazy_kernel(x):
    return (-((LazyTensor(x[..., :, None, :]) - LazyTensor(x[..., None, :, :])) ** 2).sum(-1)).exp()


def close(got, want, rtol=1e-9):
    torch.testing.assert_close(got, want, rtol=rtol, atol=1e-9)


WAYS = {
    "array": lambda k, b: k.solve(b, alpha=ALPHA, eps=EPS),
    "variable": lambda k, b: k.solve(Vi(b), alpha=ALPHA, eps=EPS),
    "over i": lambda k, b: k.solve(Vj(b), alpha=ALPHA, eps=EPS),
    "called later": lambda k, b: k.solve(b, call=False)(alpha=ALPHA, eps=EPS),
    "symbolic": lambda k, b: k.solve(Vi(0, b.shape[1]), alpha=ALPHA, eps=EPS)(b),
    "unknown in the formula": lambda k, b: (k * Vj(0, b.shape[1])).solve(
        Vi(b), var=Vj(0, b.shape[1]), alpha=ALPHA, eps=EPS),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_solve(way):
    close(WAYS[way](lazy_kernel(X), B), dense_solve(X, B))


def test_vectors_batches_and_numpy():
    k = lazy_kernel(X)
    close(k.solve(B[:, 0], alpha=ALPHA, eps=EPS), dense_solve(X, B)[:, 0])
    x, b = rand(2, 1, N, D, seed=3), rand(3, N, 2, seed=4)
    got = lazy_kernel(x).solve(LazyTensor(b[..., None, :]), alpha=ALPHA, eps=EPS)
    close(got, dense_solve(x, b))
    n = (-((Vi(X.numpy()) - Vj(X.numpy())) ** 2).sum(-1)).exp().solve(B.numpy(), alpha=ALPHA, eps=EPS)
    assert type(n) is np.ndarray
    close(torch.from_numpy(n), dense_solve(X, B))


def test_right_hand_side_that_is_data_of_the_matrix():
    close(lazy_kernel(X).solve(Vi(X), alpha=ALPHA, eps=EPS), dense_solve(X, X))
    k = (-((Vi(X) - Vj(X)) ** 2).sum(-1)).exp()
    close(k.solve(Vi(X), alpha=ALPHA, eps=EPS), dense_solve(X, X))


def test_kernel_solve():
    solve = KernelSolve(FORMULA, ALIASES, "A", axis=1)
    d = (X[:, None] - X[None]).norm(dim=-1)
    want = torch.linalg.solve((-d).exp() + ALPHA * torch.eye(N).double(), B)
    close(solve(X, X, B, alpha=ALPHA, eps=EPS), want)
    close(pickle.loads(pickle.dumps(solve))(X, X, B, alpha=ALPHA, eps=EPS, backend="tiled"), want)
    product = Genred(FORMULA, ALIASES, axis=1)
    a = solve(X, X, B, alpha=ALPHA)  # the default accuracy
    assert ((ALPHA * a + product(X, X, a) - B).norm(dim=0) <= 1.1e-6 * B.norm(dim=0)).all()
    other = KernelSolve("Exp(-Norm2(X - Y)) * A", ["X = Vi(2)", "Y = Vj(2)", "A = Vi(3)"], "A", axis=0)
    close(other(X, X, B, alpha=ALPHA, eps=EPS), want)
    assert "KernelSolve('Exp" in repr(solve)


def test_gradients_of_solutions():
    results = []
    weight = rand(N, 2, seed=5)
    for solve in (lambda x, b: lazy_kernel(x).solve(b, alpha=ALPHA, eps=1e-14), dense_solve):
        x, b = X.clone().requires_grad_(), B[:, :2].clone().requires_grad_()
        out = solve(x, b)
        first = torch.autograd.grad((out * weight).sum(), (x, b), create_graph=True)
        second = torch.autograd.grad(first[0].square().sum() + first[1].sin().sum(), (x, b))
        results.append((out, *first, *second))
    for got, want in zip(*results):
        close(got, want, rtol=1e-7)


def test_a_matrix_that_is_too_hard_is_reported():
    k = lazy_kernel(X.float())
    with pytest.warns(ConvergenceWarning, match=r"relative residual of .* above the tolerance 1.0e-06: .*alpha"):
        k.solve(B.float(), alpha=0.0)
    with pytest.warns(ConvergenceWarning, match="after 3 iterations.*3 iterations were not enough"):
        lazy_kernel(X).solve(B, alpha=1e-6, max_iter=3)
    with pytest.warns(ConvergenceWarning, match="not positive definite"):
        (lazy_kernel(X) - 2).solve(B)


BAD = {
    "alpha": (lambda: lazy_kernel(X).solve(B, alpha=-1), ValueError, "alpha must be a number >= 0; got -1"),
    "eps": (lambda: lazy_kernel(X).solve(B, eps="small"), ValueError, "eps must be a number >= 0; got 'small'"),
    "option": (lambda: lazy_kernel(X).solve(B, tol=1), TypeError, "unexpected keyword argument 'tol'"),
    "ranges": (lambda: lazy_kernel(X).solve(B, ranges=()), NotImplementedError, "not available yet"),
    "not square": (lambda: (Vi(X[:5]) | Vj(X)).solve(Vi(X[:, :1])), ValueError, "must be square; got 5 rows and 30"),
    "rows of b": (lambda: lazy_kernel(X).solve(B[:7]), ValueError, "N = 30 and N = 7"),
    "number": (lambda: lazy_kernel(X).solve(1.0), TypeError, "must be an array or a variable; got float"),
    "parameter": (lambda: lazy_kernel(X).solve(LazyTensor(B[0])), ValueError, "a variable of rows or of columns"),
    "var": (lambda: lazy_kernel(X).solve(Vi(B), var=Vj(0, 3)), ValueError, "var must be a symbolic variable of"),
    "var with data": (lambda: lazy_kernel(X).solve(Vi(B), var=Vj(B)), ValueError, "var must be a symbolic variable"),
    "dtype": (lambda: lazy_kernel(X.half()).solve(B.half(), alpha=0.1), ValueError, "float32 or float64"),
    "KernelSolve unknown": (lambda: KernelSolve(FORMULA, ALIASES, "X", axis=1), ValueError, "summed over, Vj; got 'X'"),
    "KernelSolve name": (lambda: KernelSolve(FORMULA, ALIASES, "Z", axis=1), ValueError, "unknown variable 'Z'"),
    "KernelSolve columns": (lambda: KernelSolve("Exp(-Norm2(X-Y)) * Sum(A)", ALIASES, "A", axis=1)(X, X, B), ValueError,
                            "must have 1 column"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_systems(name):
    call, error, message = BAD[name]
    with pytest.raises(error, match=message):
        call()


# --- the solver --------------------------------------------------------------------------------------------------
def spd(n: int, condition: float) -> torch.Tensor:
    q, _ = torch.linalg.qr(torch.randn(n, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    return q @ torch.diag(torch.logspace(0, -np.log10(condition), n, dtype=torch.float64)) @ q.T


def test_columns_stop_on_their_own():
    a = spd(40, 1e4)
    b = torch.zeros(40, 4).double()
    b[:, 1] = a @ torch.ones(40).double()
    b[:, 2] = 1e-8 * rand(40, seed=1)
    b[:, 3] = 1e8 * rand(40, seed=2)
    seen = []
    solution = conjugate_gradients(lambda v: a @ v, b, tol=1e-10, callback=lambda k, r: seen.append(r))
    assert solution.converged and solution.reason == "" and solution.iterations == len(seen)
    close(solution.x, torch.linalg.solve(a, b), rtol=1e-4)
    assert (solution.residual <= 1.1e-10).all() and solution.residual.shape == (4,)
    assert (solution.x[:, 0] == 0).all()
    alone = conjugate_gradients(lambda v: a @ v, b[:, 2:3], tol=1e-10)
    torch.testing.assert_close(solution.x[:, 2:3], alone.x, rtol=1e-9, atol=0)  # the others going on changes nothing


def test_preconditioner_and_start():
    a = spd(60, 1e6)
    b = a @ rand(60, 2, seed=3)
    plain = conjugate_gradients(lambda v: a @ v, b, tol=1e-8)
    exact = torch.linalg.inv(a + 1e-5 * torch.eye(60).double())
    better = conjugate_gradients(lambda v: a @ v, b, tol=1e-8, preconditioner=lambda r: exact @ r)
    assert better.converged and better.iterations < plain.iterations / 2
    again = conjugate_gradients(lambda v: a @ v, b, tol=1e-8, x0=better.x)
    assert again.iterations == 0 and torch.equal(again.x, better.x)


@pytest.mark.parametrize(("condition", "converges"), [(1e2, True), (1e5, False)])
def test_the_residual_is_that_of_the_answer(condition, converges):
    a = spd(50, condition).float()
    b = rand(50, 1, seed=4).float()
    solution = conjugate_gradients(lambda v: a @ v, b, tol=1e-6, warn=False)
    torch.testing.assert_close(solution.residual[0], (b - a @ solution.x).norm() / b.norm())
    assert solution.converged == converges == (solution.reason == "")
    assert converges == (float(solution.residual) <= 1.2e-5)


def test_what_is_not_finite():
    a = spd(5, 10)
    b = rand(5, 2, seed=1)
    b[0, 0] = torch.nan
    with pytest.warns(ConvergenceWarning, match="not finite"):
        solution = conjugate_gradients(lambda v: a @ v, b)
    close(solution.x[:, 1], torch.linalg.solve(a, b[:, 1]), rtol=1e-5)


def test_nothing_to_solve():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert conjugate_gradients(lambda v: v, torch.zeros(4, 0)).x.shape == (4, 0)
        assert conjugate_gradients(lambda v: v, torch.zeros(0, 2)).converged
        assert conjugate_gradients(lambda v: v, torch.zeros(4, 2)).iterations == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [({"tol": -1.0}, "tol must be >= 0"), ({"max_iter": -1}, "max_iter must be"), ({"b": torch.zeros(3)}, "shape"),
     ({"b": torch.zeros(3, 1, dtype=torch.float16)}, "float32 or float64")],
)  # fmt: skip
def test_bad_arguments(options, message):
    b = options.pop("b", torch.zeros(3, 1))
    with pytest.raises(ValueError, match=message):
        conjugate_gradients(lambda v: v, b, **options)
