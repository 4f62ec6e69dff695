"""Solutions, quadratic forms and determinants, and their derivatives, against Cholesky's decomposition in float64."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from kernops import kernels
from kernops.operators import (
    ConvergenceWarning,
    DiagonalOperator,
    KernelOperator,
    KroneckerOperator,
    NotPositiveDefiniteError,
    NumericalWarning,
    make_preconditioner,
)
from kernops.operators import likelihood as likelihood_module
from tests.operators.cases import OPERATORS, XB, N, X, Y, dense, kernel, rand
from tests.operators.test_algebra import SQUARE, anything, close

CG: dict[str, Any] = {"method": "cg", "tol": 1e-13}
WAYS: dict[str, dict[str, Any]] = {
    "cholesky": {"method": "cholesky"},
    "cg": {**CG, "preconditioner": None},
    "pivoted_cholesky": {**CG, "preconditioner": "pivoted_cholesky"},
    "nystrom": {**CG, "preconditioner": "nystrom"},
    "cholesky of the stored matrix": {**CG, "preconditioner": "cholesky"},
}


def cloud(n: int, dtype: torch.dtype = torch.float64, noise: float = 0.01) -> KernelOperator:
    return KernelOperator(kernels.RBF(0.3), rand(n, 2, seed=1).to(dtype)).add_diagonal(noise)


# --- solutions ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SQUARE)
def test_solutions(name, way):
    operator, want = OPERATORS[name]()
    n = want.shape[-1]
    b = rand(n, 2, seed=11)
    exact = torch.linalg.solve(want, b)
    x, report = operator.solve(b, **WAYS[way], return_report=True)
    close(x, exact, 1e-9)
    assert report.converged and report.reason == "" and report.jitter == 0
    assert report.method == ("cholesky" if way == "cholesky" else "cg")
    assert (report.rank == 0) == (way in ("cholesky", "cg") or name == "diagonal")
    if way != "cholesky":
        assert report.residual.shape == (*operator.batch, 2) and (report.residual < 1e-12).all()
    close(operator.solve(b[:, 0], **WAYS[way]), exact[..., 0], 1e-9)
    more = rand(2, n, 1, seed=12)
    close(operator.solve(more, **WAYS[way]), torch.linalg.solve(want, more.expand(2, n, 1)), 1e-9)


def test_preconditioners_and_starts_save_iterations():
    operator = cloud(300, noise=1e-4)
    b = rand(300, 2, seed=2)
    counts = {}
    for kind in (None, "pivoted_cholesky", "nystrom"):
        made = kind and operator.preconditioner(kind, rank=60)
        x, report = operator.solve(b, method="cg", preconditioner=made, return_report=True)
        assert report.rank == (60 if kind else 0)
        counts[kind] = report.iterations
    assert max(counts["pivoted_cholesky"], counts["nystrom"]) < counts[None] / 4, counts
    again, report = operator.solve(b, method="cg", x0=x, return_report=True)
    assert report.iterations == 0 and torch.equal(again, x)


@pytest.mark.parametrize("kind", ["pivoted_cholesky", "nystrom"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_preconditioner_is_the_inverse_of_what_it_says(kind, dtype):
    """Where L Lᵀ is 10⁶ times the noise, too, and in float32."""
    operator = KernelOperator(100 * kernels.RBF(0.5), X.to(dtype)).add_diagonal(1e-2)
    made = make_preconditioner(operator, kind, rank=N).matrix
    want = operator.to_dense().double()
    tol = 1e-8 if dtype == torch.float64 else 3e-3
    close(made.solve(operator.to_dense()), torch.eye(N), tol)
    close(made.logdet(), want.logdet(), 1e-9 if dtype == torch.float64 else 1e-4)
    samples = made.probes(40_000, (), torch.Generator().manual_seed(0)).double()
    assert (samples @ samples.mT / 40_000 - want).abs().max() < 5
    part = make_preconditioner(operator, kind, rank=4)
    assert part.rank == 4 and torch.linalg.eigvalsh(part.solve(torch.eye(N).to(dtype)).double()).min() > 0


def test_more_rank_than_rows_and_preconditioners_of_batches():
    assert make_preconditioner(kernel(), rank=1000).rank == N
    made = make_preconditioner(kernel(XB), rank=N).matrix
    close(made.solve(rand(2, N, 1)), torch.linalg.solve(dense(XB), rand(2, N, 1)), 1e-9)
    close(made.logdet(), dense(XB).logdet(), 1e-9)
    bare = make_preconditioner(KernelOperator(kernels.RBF(0.5), X), rank=N)  # nothing is added: up to rounding
    close(bare.solve(KernelOperator(kernels.RBF(0.5), X) @ X), X, 1e-3)


@pytest.mark.parametrize("noise", [1e-1, 1e-2, 1e-3])
def test_float32_does_not_stagnate(noise):
    """The residual that float32 leaves is that of a rounded solution, for any number of iterations to get there."""
    single, double = cloud(400, torch.float32, noise), cloud(400, noise=noise)
    b = rand(400, 1, seed=3) - 0.5
    exact = double.solve(b)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        x, report = single.solve(b.float(), method="cg", return_report=True)
    rounded = (double @ exact.float().double() - b).norm() / b.norm()
    assert report.residual.item() < max(1.2e-6, 10 * rounded.item())
    assert (x.double() - exact).norm() / exact.norm() < 1e-5 / noise


# --- determinants -------------------------------------------------------------------------------------------------
@pytest.fixture
def exact_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes whose mean of z zᵀ is P exactly, so that the estimates of determinants are exact."""

    def probes(self, batch):
        n, made = self.operator.shape[-1], self.preconditioner
        eye = torch.eye(n).double().expand(*batch, n, n)
        if made is None:
            return n**0.5 * eye, n**0.5 * eye, 0.0
        root = torch.linalg.cholesky(torch.linalg.inv(made.solve(eye)))
        return n**0.5 * root, made.solve(n**0.5 * root), made.matrix.logdet()

    monkeypatch.setattr(likelihood_module.Likelihood, "probes", probes)
    monkeypatch.setattr(likelihood_module, "ACCURACY", float("inf"))  # no other ones beside


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SQUARE)
def test_determinants(name, way, exact_probes):
    operator, want = OPERATORS[name]()
    b = rand(want.shape[-1], 2, seed=11)
    inv_quad, logdet = operator.inv_quad_logdet(b, **WAYS[way])
    close(inv_quad, (b * torch.linalg.solve(want, b)).sum((-2, -1)), 1e-9)
    close(logdet, want.logdet(), 1e-9)
    close(operator.logdet(**WAYS[way]), want.logdet(), 1e-9)


@pytest.mark.parametrize("rank", [0, 5, 20])
def test_probes_are_unbiased_and_say_how_accurate_they_are(rank):
    operator = cloud(60)
    exact = operator.to_dense().logdet()
    made = operator.preconditioner(rank=rank) if rank else None
    found, said = [], []
    for seed in range(30):
        logdet, report = operator.logdet(method="cg", preconditioner=made, seed=seed, return_report=True)
        found.append(logdet - exact)
        said.append(report.standard_error)
    errors = torch.stack(found)
    assert errors.mean().abs() < 3 * errors.std() / 30**0.5
    assert 0.7 < errors.std() / torch.stack(said).mean() < 1.4
    again = operator.logdet(method="cg", preconditioner=made, seed=29)
    assert torch.equal(again, logdet)


def test_probes_of_a_few_steps_make_estimates_better():
    """Of a kernel of no low rank: values and gradients, at the same seeds, by what the standard error says."""
    x, n = rand(500, 20, seed=1), 500
    noise = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    operator = KernelOperator(kernels.RBF(1.0), x).add_diagonal(noise)
    exact = operator.logdet(method="cholesky")
    (slope,) = torch.autograd.grad(exact, noise)
    made = operator.preconditioner(rank=100)
    errors: dict[str, list[tuple[float, float, float]]] = {"few": [], "many": []}
    for seed in range(12):
        for name, accuracy in (("few", float("inf")), ("many", likelihood_module.ACCURACY)):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(likelihood_module, "ACCURACY", accuracy)
                found, report = operator.logdet(method="cg", preconditioner=made, seed=seed, return_report=True)
                (g,) = torch.autograd.grad(found, noise)
            assert (report.n_short > 100) == (name == "many") and report.n_short < n
            errors[name].append(((found - exact).item(), ((g - slope) / slope).item(), report.standard_error.item()))
    few, many = (torch.tensor(e).square().mean(0).sqrt() for e in errors.values())
    assert (many[:2] < 0.4 * few[:2]).all(), (few, many)
    assert 0.6 < many[0] / many[2] < 1.6 and 0.6 < few[0] / few[2] < 1.6
    kept, report = operator.logdet(method="cg", preconditioner=made, n_short=40, n_probes=1, return_report=True)
    assert report.n_short == 40 and report.standard_error is None and (kept - exact).abs() < 20 * many[0]
    with pytest.raises(ValueError, match="n_short must be a whole number >= 0; got -1"):
        operator.logdet(method="cg", n_short=-1)


def test_probes_of_a_few_steps_are_left_out_where_these_tell_too_little():
    """Without a preconditioner, and with a large condition number: more of them would make it worse."""
    operator = cloud(400, noise=1e-3)
    for least in (0, 64):
        found, report = operator.logdet(method="cg", preconditioner=None, n_short=least, return_report=True)
        assert report.n_short == 0 and report.iterations > 50
        assert abs(found - operator.logdet(method="cholesky")) < 5 * report.standard_error


@pytest.mark.parametrize("preconditioner", ["nystrom", None])
def test_probes_of_a_few_steps_in_batches_and_by_second_derivatives(preconditioner):
    x = rand(2, 40, 3, seed=1)
    noise = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    operator = KernelOperator(kernels.RBF(1.0), x).add_diagonal(noise)
    settings = {**CG, "preconditioner": preconditioner, "n_probes": 20, "n_short": 600, "return_report": True}
    found, report = operator.logdet(**settings)
    exact = operator.logdet(method="cholesky")
    assert report.n_short == 600 and ((found - exact).abs() < 5 * report.standard_error).all()
    (g,) = torch.autograd.grad(found.sum(), noise, create_graph=True)
    (h,) = torch.autograd.grad(g, noise)
    (w,) = torch.autograd.grad(exact.sum(), noise, create_graph=True)
    (v,) = torch.autograd.grad(w, noise)
    assert abs(g - w) < 0.2 * abs(w) and abs(h - v) < 0.5 * abs(v)


@pytest.mark.filterwarnings("ignore::kernops.solvers.ConvergenceWarning")
def test_determinants_in_float32():
    single, double = cloud(200, torch.float32), cloud(200)
    b = rand(200, 1, seed=3)
    want = double.inv_quad_logdet(b, method="cholesky")
    got = single.inv_quad_logdet(b.float(), method="cg", tol=1e-5)
    close(got[0], want[0], 1e-3)
    assert (got[1] - want[1]).abs() < 1


# --- derivatives --------------------------------------------------------------------------------------------------
def model(way, x, ell, scale, noise, b):
    k = scale * kernels.RBF(ell) + kernels.White(noise)
    operator = KernelOperator(k, x)
    return operator.solve(b, **WAYS[way]), *operator.inv_quad_logdet(b, **WAYS[way])


def inputs(n: int = 6):
    return [t.double().requires_grad_() for t in (rand(n, 2, seed=1), torch.tensor([0.4, 0.6]), torch.tensor([1.5]),
                                                  torch.tensor([0.3]), rand(n, 2, seed=2))]  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_derivatives(way, exact_probes):
    assert torch.autograd.gradcheck(lambda *t: model(way, *t), inputs(), fast_mode=True, atol=1e-6)
    assert torch.autograd.gradgradcheck(lambda *t: model(way, *t), inputs(), fast_mode=True, atol=1e-5)


@pytest.mark.parametrize("way", ["cg", "pivoted_cholesky"])
def test_derivatives_by_all_that_operators_are_made_of(way, exact_probes):
    for name in SQUARE:
        operator, _ = OPERATORS[name]()
        b = rand(operator.shape[-1], 1, seed=11)
        grads = []
        for settings in (WAYS[way], WAYS["cholesky"]):
            # The points of rows and of columns are one tensor: what a symmetric matrix determines is their sum.
            fresh = {id(t): t.detach().clone().requires_grad_() for t in operator.tensors}
            tensors = [fresh[id(t)] for t in operator.tensors]
            again = operator.with_tensors(tensors)
            inv_quad, logdet = again.inv_quad_logdet(b, **settings)
            out = again.solve(b, **settings).sin().sum() + (2 * inv_quad + 3 * logdet).sum()
            grads.append(torch.autograd.grad(out, tensors))
        for g, h in zip(*grads):
            if g.ndim > 1 and g.shape[-1] == g.shape[-2]:  # of a dense matrix only the symmetric part is determined
                g, h = g + g.mT, h + h.mT
            close(g, h, 1e-7)


def test_gradients_of_determinants_by_probes():
    """Without exact probes the gradient is an estimate, and a better one with a preconditioner that is near A."""
    x, ell, scale, noise, _ = inputs(30)
    by = (ell, scale, noise, x)
    want = torch.autograd.grad(model("cholesky", x, ell, scale, noise, x.detach())[2], by)
    cases: list[tuple[Any, int, float]] = [
        (None, 500, 0.1),
        (("nystrom", 10), 500, 0.1),
        (("pivoted_cholesky", 10), 10, 0.1),
        (("pivoted_cholesky", 30), 1, 1e-7),
    ]
    for preconditioner, probes, tol in cases:
        operator = KernelOperator(scale * kernels.RBF(ell) + kernels.White(noise), x)
        made = preconditioner and operator.preconditioner(*preconditioner)
        logdet = operator.logdet(**CG, preconditioner=made, n_probes=probes)
        for g, w, t in zip(torch.autograd.grad(logdet, by), want, by):
            if t is not x or tol < 1e-3:  # a gradient of as many numbers as there are points has as many errors
                assert (g - w).norm() <= tol * w.norm(), preconditioner


def test_gradients_of_likelihoods_take_no_product(monkeypatch):
    """Bilinear forms have gradients of their own; a product would be as expensive as one more iteration."""
    x, ell, scale, noise, b = inputs(30)
    operator = KernelOperator(scale * kernels.RBF(ell), x).add_diagonal(noise)
    inv_quad, logdet = operator.inv_quad_logdet(b, **CG)
    products: list[int] = []
    monkeypatch.setattr(KernelOperator, "_matmul", lambda self, v: products.append(1))
    assert all(g.isfinite().all() for g in torch.autograd.grad(inv_quad.sum() + logdet.sum(), (x, ell, scale, noise)))
    assert not products


@pytest.mark.parametrize("name", ["Kronecker", "sum of kernels", "scaled", "kernel with noise by point"])
def test_gradients_of_determinants_need_no_dense_matrix(name, monkeypatch):
    """Not even for the rows that the preconditioner is made of, in operators made of others."""
    operator, _ = OPERATORS[name]()
    tensors = [t.clone().requires_grad_() for t in operator.tensors]
    operator = operator.with_tensors(tensors)
    made = operator.preconditioner(rank=N // 2)
    assert made.rank == N // 2
    plain = KernelOperator.to_dense

    def parts_only(self):
        assert self.shape[-1] < N, "the whole matrix"
        return plain(self)

    monkeypatch.setattr(KernelOperator, "to_dense", parts_only)
    monkeypatch.setattr(KroneckerOperator, "to_dense", parts_only)
    logdet = operator.logdet(**CG, preconditioner=made)
    assert all(g.isfinite().all() for g in torch.autograd.grad(logdet, tensors, allow_unused=True) if g is not None)


def test_rank_follows_what_matters():
    """What is left of the kernel beside the noise, not what is asked for; and by default the number of points."""
    x = torch.linspace(0, 1, 300).double()[:, None]
    for noise, most in ((1e-2, 40), (1e-8, 60)):
        operator = KernelOperator(kernels.RBF(0.3), x).add_diagonal(noise)
        made = operator.preconditioner(rank=200)
        assert 3 <= made.rank <= most
        _, report = operator.solve(rand(300), method="cg", preconditioner=made, return_report=True)
        assert report.rank == made.rank and report.iterations <= 6


def test_a_few_vectors_less_where_that_spares_a_width():
    """Of those in ``WIDTHS``, and never all of them."""
    filling = likelihood_module._filling
    assert [filling(x, 11) for x in (96, 85, 80, 56, 16, 0)] == [85, 85, 80, 53, 13, 0]
    assert filling(664, 11) == 664 and filling(8, 120) == 8


def test_batches_are_solved_each_on_their_own():
    x = XB.clone().requires_grad_()
    b = rand(2, N, 1, seed=4)
    whole = kernel(x).solve(b, **CG)
    parts = torch.stack([kernel(x[k]).solve(b[k], **CG) for k in range(2)])
    close(whole, parts, 1e-9)
    g, h = (torch.autograd.grad(t.sin().sum(), x)[0] for t in (whole, parts))
    close(g, h, 1e-8)


# --- bad input ----------------------------------------------------------------------------------------------------
def test_equal_points_without_noise():
    """The right answer of a slightly larger diagonal, with a warning that says how much larger."""
    x = torch.cat([X, X[:3]])
    operator = KernelOperator(kernels.RBF(0.3), x)
    b = operator @ rand(N + 3, 1, seed=1)  # in the range of the matrix
    with pytest.warns(NumericalWarning, match=r"singular to the accuracy.*e-1\d was added to its diagonal"):
        answer, report = operator.solve(b, return_report=True)
    assert 0 < report.jitter < 1e-11
    close(operator @ answer, b, 1e-8)
    close(operator @ operator.solve(b, method="cg", tol=1e-10), b, 1e-8)
    with pytest.warns(NumericalWarning):
        assert operator.logdet() < -60


@pytest.mark.parametrize("way", WAYS)
def test_an_indefinite_operator_raises(way):
    operator = KernelOperator(kernels.custom(lambda x, y: (x - y).square().sum(-1)), X)
    with pytest.raises(NotPositiveDefiniteError, match="not positive definite"):
        operator.solve(rand(N), **WAYS[way])
    with pytest.raises(NotPositiveDefiniteError, match="not positive definite"):
        operator.inv_quad_logdet(rand(N), **WAYS[way])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite(way, value):
    x = X.clone()
    x[3, 1] = value
    with pytest.raises(ValueError, match="NaN or infinite"):
        (KernelOperator(kernels.DotProduct(), x).add_diagonal(1.0)).solve(rand(N), **WAYS[way])
    b = rand(N)
    b[2] = value
    with pytest.raises(ValueError, match="b has NaN or infinite entries"):
        kernel().solve(b, **WAYS[way])


def test_too_few_iterations_are_reported():
    with pytest.warns(ConvergenceWarning, match=r"residual of .*after 3 iterations, above tol=1e-06: 3 iterations were "
                      r"not enough. A larger add_diagonal, a preconditioner of higher rank \(now 0\)"):  # fmt: skip
        _, report = cloud(100).solve(rand(100), method="cg", preconditioner=None, max_iter=3, return_report=True)
    assert not report.converged and report.iterations == 3 and report.residual.item() > 1e-6


def test_one_point_and_none():
    operator = KernelOperator(2.0 * kernels.RBF(), X[:1])
    for way in WAYS:
        close(operator.solve(torch.ones(1).double(), **WAYS[way]), torch.tensor([0.5]))
        inv_quad, logdet = operator.inv_quad_logdet(torch.ones(1).double(), **WAYS[way])
        close(torch.stack([inv_quad, logdet.exp()]), torch.tensor([0.5, 2.0]), 1e-9)
    none = KernelOperator(kernels.RBF(), X[:0])
    assert none.solve(rand(0, 2)).shape == (0, 2) and none.logdet() == 0
    assert kernel().solve(rand(N, 0), method="cg").shape == (N, 0)


def test_a_diagonal_is_solved_in_one_step():
    x, report = DiagonalOperator(rand(N) + 0.1).solve(rand(N), method="cg", return_report=True)
    assert report.iterations <= 1


BAD = {
    "not symmetric": (lambda: KernelOperator(kernels.RBF(), X, X + 1).solve(X), "known to be symmetric"),
    "not square": (lambda: KernelOperator(kernels.RBF(), X, Y).logdet(), "logdet needs a square operator"),
    "rows of b": (lambda: kernel().solve(X[:4]), r"b must have shape \(12,\)"),
    "half": (lambda: kernel(X.half()).solve(X.half()), "b must be float32 or float64"),
    "half's determinant": (lambda: kernel(X.half()).logdet(), "float32 or float64"),
    "method": (lambda: kernel().solve(X, method="lu"), "method must be one of 'auto', 'cholesky', 'cg'; got 'lu'"),
    "tol": (lambda: kernel().solve(X, tol=-1), "tol must be >= 0"),
    "max_iter": (lambda: kernel().solve(X, max_iter=-1), "max_iter must be None or a whole number >= 0"),
    "preconditioner": (lambda: kernel().solve(X, preconditioner="jacobi"), "preconditioner must be 'auto'"),
    "kind": (lambda: kernel().preconditioner("jacobi"), "kind must be 'auto' or one of"),
    "columns": (lambda: kernel().preconditioner(columns=0), "columns must be a whole number >= 1"),
    "rank": (lambda: kernel().preconditioner(rank=0), "rank must be None or a whole number >= 1"),
    "x0": (lambda: kernel().solve(X, x0=X[:3]), r"x0 must have shape \(12,\)"),
    "x0's numbers": (lambda: kernel().solve(X, method="cg", x0=X * torch.nan), "x0 has NaN or infinite entries"),
    "rows of a preconditioner": (
        lambda: kernel().solve(X, method="cg", preconditioner=kernel(X[:5]).preconditioner()),
        "preconditioner is of 5 rows, torch.float64, cpu; the operator has 12, torch.float64, cpu",
    ),
    "dtype of a preconditioner": (
        lambda: kernel().logdet(method="cg", preconditioner=kernel(X.float()).preconditioner()),
        "preconditioner is of 12 rows, torch.float32",
    ),
    "tol of letters": (lambda: kernel().solve(X, tol=anything("small")), "tol must be a number >= 0; got 'small'"),
    "no tol": (lambda: kernel().solve(X, tol=float("inf")), "tol must be >= 0 and finite; got inf"),
    "half an iteration": (
        lambda: kernel().solve(X, max_iter=anything(1.5)),
        "max_iter must be None or a whole number >= 0; got",
    ),
    "seed": (lambda: kernel().logdet(method="cg", seed="a"), "seed must be a whole number; got 'a'"),
    "half a probe": (lambda: kernel().logdet(method="cg", n_probes=2.5), "n_probes must be a whole number >= 1; got"),
    "n_probes": (lambda: kernel().logdet(method="cg", n_probes=0), "n_probes must be a whole number >= 1"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name):
    call, message = BAD[name]
    with pytest.raises((TypeError, ValueError), match=message):
        call()


@pytest.mark.parametrize("method", ["cholesky", "cg"])
def test_no_rows(method):
    empty = kernel(X[:0]).add_diagonal(0.1)
    assert empty.solve(X[:0], method=method).shape == (0, 3) and empty.logdet(method=method) == 0


def test_a_diagonal_of_zeros_is_singular_rather_than_nan():
    zeros = torch.zeros(N, dtype=torch.float64)
    with pytest.warns(ConvergenceWarning, match="not positive definite to the accuracy"):
        DiagonalOperator(zeros).solve(X, method="cg")
    with pytest.raises(NotPositiveDefiniteError):
        DiagonalOperator(zeros - 1).solve(X, method="cg")
    b = torch.ones(N, dtype=torch.float64)
    b[0] = zeros[0] = 0.0
    part = (zeros + 2).index_fill(0, torch.tensor([0]), 0.0)
    close(DiagonalOperator(part).solve(b, method="cg"), b / 2)


def test_ranks_of_numpy():
    assert kernel().preconditioner(rank=np.int64(5)).rank == 5  # type: ignore[arg-type]
    close(kernel().eigsh(np.int64(2))[0], kernel().eigsh(2)[0])  # type: ignore[arg-type]
