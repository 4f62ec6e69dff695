"""Cholesky's factor of the stored matrix as a preconditioner: when it is taken, what it is, and what it costs."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from kernops import kernels
from kernops.operators import (
    BlockDiagonalOperator,
    KernelOperator,
    NumericalWarning,
    OutOfMemoryError,
    RescaledOperator,
    posterior_variance,
    preconditioning,
)
from kernops.solvers import CholeskyFactor, factorized_in_place
from tests.operators.cases import OPERATORS, XB, N, X, kernel, rand
from tests.operators.test_algebra import SQUARE, close

Tensor = torch.Tensor
POINTS = 600


@pytest.fixture
def many(monkeypatch):
    """As of many points: a rank that is small beside their number."""
    monkeypatch.setattr(preconditioning, "default_rank", lambda n, device: 20)


def rough(dtype: torch.dtype = torch.float32, noise: float = 0.05) -> KernelOperator:
    """Of points in so many dimensions that a low rank says little."""
    return KernelOperator(kernels.RBF(0.5), rand(POINTS, 6, seed=1).to(dtype)).add_diagonal(noise)


def exact(noise: float = 0.05) -> Tensor:
    x = rand(POINTS, 6, seed=1).float().double()
    table = torch.exp(-(x[:, None] - x).square().sum(-1) / (2 * 0.5**2))
    return table + noise * torch.eye(POINTS, dtype=torch.float64)


@pytest.mark.parametrize("name", SQUARE)
def test_matrices_are_written_into_tables(name):
    operator, want = OPERATORS[name]()
    out = torch.full(want.shape, float("nan"), dtype=operator.dtype)
    operator._dense_into(out)
    close(out, want, 1e-12)


def test_of_operators_made_of_others():
    scale = rand(N, seed=3) + 0.5
    for operator in (
        RescaledOperator(kernel(), scale).add_diagonal(1.0),
        2.0 * kernel().add_diagonal(0.1),
        torch.tensor([0.5, 2.0], dtype=torch.float64) * kernel(XB),
        BlockDiagonalOperator(kernel(), kernel(X[:5])).add_diagonal(0.1),
    ):
        out = torch.empty(operator.shape, dtype=torch.float64)
        operator._dense_into(out)
        close(out, operator.to_dense(), 1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_factor_is_the_inverse_of_what_it_says(dtype):
    for shape in ((30, 30), (2, 30, 30)):
        a = rand(*shape, seed=5).to(dtype)
        a = a @ a.mT + 0.5 * torch.eye(30, dtype=dtype)
        made = factorized_in_place(a.clone())
        assert isinstance(made, CholeskyFactor) and made.nbytes == a.nbytes
        tol = 1e-9 if dtype == torch.float64 else 1e-3
        for b in (rand(*shape[:-1], 3, seed=6), rand(2, 30, 3, seed=7)):
            close(made.solve(b.to(dtype)).double(), torch.linalg.solve(a.double(), b.to(dtype).double()), tol)
        close(made.logdet(), a.double().logdet(), 1e-5)
        samples = made.probes(40_000, shape[:-2], torch.Generator().manual_seed(0))
        assert (samples @ samples.mT / 40_000 - a).abs().max() < 0.05 * a.abs().max()


def test_no_factor_of_what_is_not_positive():
    assert factorized_in_place(-torch.eye(4)) is None
    assert factorized_in_place(torch.full((4, 4), float("nan"))) is None


def test_many_right_hand_sides_take_it_and_the_report_says_so(many):
    a, want = rough(), exact()
    b = rand(POINTS, 200, seed=2).float()
    x, report = a.solve(b, method="cg", tol=1e-5, return_report=True)
    assert (report.preconditioner, report.rank, report.nbytes) == ("cholesky", POINTS, 4 * POINTS**2)
    assert report.iterations <= 2 and report.converged and report.note == ""
    solved = torch.linalg.solve(want, b.double())
    assert (x - solved).norm() < 1e-4 * solved.norm()
    _, few = a.solve(b[:, :3], method="cg", return_report=True)
    assert few.preconditioner == "pivoted_cholesky" and few.nbytes > 0
    _, none = a.solve(b[:, :3], method="cg", tol=1e-3, preconditioner=None, return_report=True)
    assert (none.preconditioner, none.nbytes) == ("", 0)


def test_whoever_does_not_want_it_does_not_get_it(many, monkeypatch):
    monkeypatch.setattr(KernelOperator, "_dense_into", lambda self, out: pytest.fail("the matrix was stored"))
    a, b = rough(), rand(POINTS, 64, seed=2).float()
    for preconditioner in ("pivoted_cholesky", a.preconditioner("auto", rank=50, columns=64), None):
        _, report = a.solve(b, method="cg", tol=1e-3, preconditioner=preconditioner, return_report=True)
        assert report.preconditioner != "cholesky"
    a.logdet(method="cg", tol=1e-3)
    monkeypatch.setattr(preconditioning, "free_memory", lambda device: 1000.0)  # no room for it
    assert a.solve(b, method="cg", tol=1e-3, return_report=True)[1].preconditioner == "pivoted_cholesky"


def test_one_product_of_a_solution(monkeypatch):
    a, b = rough(), rand(POINTS, 40, seed=2).float()
    made = a.preconditioner("cholesky")
    counted: list[str] = []

    def watch(cls: Any, name: str) -> None:
        own = getattr(cls, name)

        def watched(self: Any, v: Tensor) -> Tensor:
            counted.append(f"{cls.__name__}.{name}")
            return own(self, v)

        monkeypatch.setattr(cls, name, watched)

    watch(KernelOperator, "_matmul")
    watch(CholeskyFactor, "solve")
    once = ["CholeskyFactor.solve", "KernelOperator._matmul"]
    a.solve(b, method="cg", tol=1e-4, preconditioner=made)
    assert sorted(counted) == once
    counted.clear()
    across = KernelOperator(kernels.RBF(0.5), rand(40, 6, seed=3).float(), rand(POINTS, 6, seed=1).float())
    found = posterior_variance(a, across, torch.ones(40), accuracy=1e-3, preconditioner=made, method="cg")
    assert sorted(counted) == once and found.iterations == 1


def test_variances_by_what_is_chosen(many, monkeypatch):
    a = rough()
    new = rand(150, 6, seed=4).float()
    across = KernelOperator(kernels.RBF(0.5), new, rand(POINTS, 6, seed=1).float())
    made: list[str] = []
    of = preconditioning.make_preconditioner

    def watched(*arguments: Any, **more: Any) -> Any:
        found = of(*arguments, **more)
        made.append(found.kind)
        return found

    monkeypatch.setattr("kernops.operators.solving.make_preconditioner", watched)
    found = posterior_variance(a, across, torch.ones(150), accuracy=1e-3, method="cg")
    far = torch.exp(-(new.double()[:, None] - rand(POINTS, 6, seed=1).float().double()).square().sum(-1) / 0.5)
    want = 1 - (far * torch.linalg.solve(exact(), far.T).T).sum(-1)
    assert made == ["cholesky"]
    assert ((found.value - want).abs() / want).max() <= 1e-3 and found.error <= 1e-3


@pytest.fixture
def singular() -> KernelOperator:
    """Smooth, and with so little noise that float32's decomposition breaks down."""
    return KernelOperator(kernels.RBF(1.0), rand(300, 1, seed=1).float()).add_diagonal(1e-9)


def test_a_decomposition_that_breaks_down_is_told(singular):
    with pytest.warns(NumericalWarning, match="broke down in float32: the preconditioner is a pivoted"):
        made = singular.preconditioner("cholesky")
    assert made.kind == "pivoted_cholesky" and "broke down" in made.note
    with pytest.raises(ValueError, match="NaN or infinite"), warnings.catch_warnings():
        warnings.simplefilter("error")
        KernelOperator(kernels.RBF(1.0), torch.full((5, 1), float("nan"))).add_diagonal(1.0).preconditioner("cholesky")


def test_a_choice_that_fails_leaves_the_default(many, singular, monkeypatch):
    chosen = preconditioning.Choice("cholesky", 300, 1.0, 1.0, 360_000.0)
    monkeypatch.setattr(preconditioning, "choose", lambda *arguments: chosen)
    b = rand(300, 40, seed=2).float()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, report = singular.solve(b, method="cg", max_iter=3, return_report=True)
    assert report.preconditioner == "pivoted_cholesky" and "broke down" in report.note

    def too_large(operator: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(preconditioning, "_stored", too_large)
    _, report = rough().solve(rand(POINTS, 40).float(), method="cg", tol=1e-3, return_report=True)
    assert report.preconditioner == "pivoted_cholesky" and "memory was too short" in report.note
    with pytest.raises(OutOfMemoryError, match=r"'cholesky' of 600 x 600 needs 1\.44 MB"):
        rough().preconditioner("cholesky")


def test_derivatives_through_a_wide_solution():
    """An approximate inverse has no derivative of its own."""
    x = rand(50, 2, seed=1)
    length = torch.tensor([0.3, 0.4], dtype=torch.float64)

    def solved(way: str, x: Tensor, length: Tensor, b: Tensor) -> Tensor:
        a = KernelOperator(kernels.RBF(length), x).add_diagonal(0.1)
        settings: dict[str, Any] = {"method": "cg", "tol": 1e-12, "preconditioner": "cholesky"}
        return a.solve(b, **(settings if way == "cg" else {"method": way})).sin()

    leaves = [t.clone().requires_grad_() for t in (x, length, rand(50, 40, seed=2))]
    grads = [torch.autograd.grad(solved(way, *leaves).sum(), leaves) for way in ("cg", "cholesky")]
    for g, h in zip(*grads):
        close(g, h, 1e-8)


def test_batches_by_name():
    a = kernel(XB)
    made = a.preconditioner("cholesky")
    close(made.solve(rand(2, N, 1)), torch.linalg.solve(a.to_dense(), rand(2, N, 1)), 1e-9)
    close(a.logdet(method="cg", tol=1e-12, preconditioner=made), a.to_dense().logdet(), 1e-9)


@pytest.mark.parametrize("preconditioner", ["auto", "cholesky", None])
def test_diagonals_that_are_not_positive_everywhere(many, preconditioner):
    """No bound is to be had of them, and no share of a trace: a kernel that is positive by itself."""
    x = torch.arange(100, dtype=torch.float64)[:, None]
    one = torch.arange(100) == 5
    for added in (torch.where(one, 0.0, 0.1).double(), torch.full((100,), -0.1, dtype=torch.float64)):
        operator = KernelOperator(kernels.RBF(0.5), x).add_diagonal(added)
        table, across = operator.to_dense(), KernelOperator(kernels.RBF(0.5), x[:40] + 0.3, x)
        found = operator.solve(torch.eye(100, dtype=torch.float64), method="cg", preconditioner=preconditioner)
        close(found, table.inverse(), 1e-5)
        prior = torch.ones(40, dtype=torch.float64)
        variances = posterior_variance(operator, across, prior, method="cg", preconditioner=preconditioner)
        rows = across.to_dense()
        close(variances.value, prior - (rows @ table.inverse() * rows).sum(-1), 2e-3)


def test_of_a_kernel_that_is_zero():
    operator = (kernel() * 0.0).add_diagonal(2.0)
    close(operator.solve(torch.ones(N, 40, dtype=torch.float64), method="cg"), torch.full((N, 40), 0.5), 1e-12)


def test_a_batch_of_diagonals_alone():
    scale, added = rand(N, seed=3) + 0.5, rand(2, N, seed=4) + 1.0
    for part in (kernel(), RescaledOperator(kernel(), scale)):
        operator = part.add_diagonal(added)
        out = torch.empty(2, N, N, dtype=torch.float64)
        operator._dense_into(out)
        close(out, operator.to_dense(), 1e-12)
        close(operator.preconditioner("cholesky").solve(operator.to_dense()), torch.eye(N).expand(2, N, N), 1e-9)
