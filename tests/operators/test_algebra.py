"""Every operator against its dense matrix in float64."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernops import Vi, Vj, kernels
from kernops.operators import (
    BlockDiagonalOperator,
    DenseOperator,
    DiagonalOperator,
    KernelOperator,
    KroneckerOperator,
    LinearOperator,
    RescaledOperator,
)
from kernops.operators.blocks import SelectedOperator
from tests.helpers.backends import ON_CPU, need
from tests.operators.cases import KERNELS, NOISE, OPERATORS, ROWS, XB, N, X, Y, dense, kernel, rand

DTYPES = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 2e-2}


def close(got: torch.Tensor, want: torch.Tensor, tol: float = 1e-11) -> None:
    assert got.shape == want.shape
    torch.testing.assert_close(got.double(), want.double(), rtol=tol, atol=tol)


SQUARE = [name for name in OPERATORS if OPERATORS[name]()[0].symmetric]
OTHERS = {"rectangular", "rectangular of a batch", "product", "Kronecker of a rectangle", "rows and columns",
          "rows, then columns", "transposed", "rescaled rows", "derivatives of a rectangle"}  # fmt: skip


def test_symmetric_operators_are_known():
    assert set(OPERATORS) - set(SQUARE) == OTHERS


def anything(x: Any) -> Any:
    """``x`` without its type."""
    return x


# --- kernels ------------------------------------------------------------------------------------------------------
def test_every_constructor_has_a_case():
    from kernops.kernels.constructors import CONSTRUCTORS

    assert set(CONSTRUCTORS) <= {case.split()[0] for case in KERNELS}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_kernels(name, batch, dtype):
    k, definition = KERNELS[name]
    x, y = rand(*batch, 8, 3, seed=1).to(dtype), rand(5, 3, seed=2).to(dtype)
    v = (rand(5, 2, seed=3) - 0.5).to(dtype)
    tol = max(DTYPES[dtype], 3e-9 if name in ("Matern 0.7", "Matern 2", "Matern 40.1") else 0.0)
    want = definition(x.double(), y.double())
    operator = KernelOperator(k, x, y)
    assert operator.shape == (*batch, 8, 5) and operator.dtype == dtype and not operator.symmetric
    close(operator.to_dense(), want, tol)
    close(operator @ v, want @ v.double(), 2 * tol)
    close(operator.rmatmul(x[..., :1]), want.mT @ x[..., :1].double(), 4 * tol)
    own = KernelOperator(k, x)
    assert own.symmetric and own.T is own
    close(own.diagonal(), definition(x.double(), x.double()).diagonal(dim1=-2, dim2=-1), tol)


@pytest.mark.parametrize("backend", ON_CPU)
def test_back_ends(backend):
    need(backend)
    x = rand(9, 3, seed=1)
    operator = KernelOperator(kernels.RBF(0.5) + kernels.White(0.1), x, backend=backend)
    want = KERNELS["RBF of one length"][1](x * 0.8, x * 0.8) + 0.1 * torch.eye(9).double()
    close(operator.to_dense(), want)
    close(operator @ x[:, :2], want @ x[:, :2])
    close(operator._row(torch.tensor(3)), want[3])
    close(operator.diagonal(), want.diagonal())


def test_kernels_in_all_their_forms():
    from sklearn.gaussian_process.kernels import RBF

    want = KERNELS["RBF of one length"][1](X, X)
    forms = {
        "object": KernelOperator(kernels.RBF(0.4), X),
        "scikit-learn": KernelOperator(RBF(0.4), X),
        "name": KernelOperator("squared_exponential", X, length_scale=0.4),
        "name with scikit-learn's gamma": KernelOperator("rbf", X, gamma=1 / 0.32),
        "function": KernelOperator(lambda x, y, s: (-((x - y) ** 2).sum(-1) / s).exp(), X, s=0.32),
        "LazyTensor": KernelOperator((-((Vi(X) - Vj(X)) ** 2).sum(-1) / 0.32).exp()),
    }
    for name, operator in forms.items():
        assert operator.symmetric, name
        close(operator.to_dense(), want)
        close(pickle.loads(pickle.dumps(operator)).to_dense() if name != "function" else want, want)
    assert not KernelOperator((-((Vi(X) - Vj(X + 1)) ** 2).sum(-1)).exp()).symmetric


def test_products_with_many_columns_and_with_none():
    operator, want = kernel(), dense()
    v = rand(N, 300, seed=5)
    close(operator @ v, want @ v)
    assert (operator @ v[:, :0]).shape == (N, 0)
    assert (KernelOperator(kernels.RBF(), X[:0]) @ v[:0]).shape == (0, 300)
    assert KernelOperator(kernels.RBF(), X[:0]).to_dense().shape == (0, 0)
    close(KernelOperator(kernels.RBF(), X, X[:0]) @ v[:0], torch.zeros(N, 300))
    close(KernelOperator(kernels.RBF(), X[:1]).to_dense(), torch.ones(1, 1))
    close(KernelOperator(kernels.RBF(), X[:1], X[:1] + 0) @ v[:1], v[:1])


# --- all operators ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", OPERATORS)
def test_products_and_entries(name):
    operator, want = OPERATORS[name]()
    m, n = want.shape[-2:]
    assert operator.shape == tuple(want.shape) and operator.batch == tuple(want.shape[:-2])
    assert operator.dtype == torch.float64 and operator.device == torch.device("cpu")
    assert type(operator).__name__ in repr(operator)
    close(operator.to_dense(), want)
    v, w = rand(n, 3, seed=6), rand(m, 2, seed=7)
    close(operator @ v, want @ v)
    close(operator.matmul(v[:, 0]), want @ v[:, 0])
    close(operator.T @ w, want.mT @ w)
    close(operator.rmatmul(w[:, 0]), want.mT @ w[:, 0])
    close(w.T @ anything(operator), w.T @ want)
    close(w[:, 0] @ anything(operator), w[:, 0] @ want)
    batched = rand(2, n, 1, seed=8)
    close(operator @ batched, want @ batched)
    close(operator.T.to_dense(), want.mT)
    i, j = torch.tensor([0, 2, m - 1, 1]), torch.tensor([1, 2, -1, 1])
    close(operator[..., i, j], want[..., i, j])
    close(operator[..., 2, 1], want[..., 2, 1])
    close(operator[..., 1, :], want[..., 1, :])
    close(operator[..., :, -1], want[..., :, -1])
    close(operator[..., 1:6:2, :3].to_dense(), want[..., 1:6:2, :3])
    close(operator[..., i, :].to_dense(), want[..., i, :])
    assert operator[...] is operator


@pytest.mark.parametrize("name", SQUARE)
def test_diagonals(name):
    operator, want = OPERATORS[name]()
    n = want.shape[-1]
    eye = torch.eye(n).double()
    close(operator.diagonal(), want.diagonal(dim1=-2, dim2=-1))
    close(operator.trace(), want.diagonal(dim1=-2, dim2=-1).sum(-1))
    close(operator.add_diagonal(0.5).to_dense(), want + 0.5 * eye)
    d = rand(n, seed=9)
    close(operator.add_diagonal(d) @ d, (want + torch.diag(d)) @ d)
    each = rand(2, 1, seed=9)
    close(operator.add_diagonal(each).to_dense(), want + each[..., None] * eye)
    index = torch.full(operator.batch, 3)
    close(operator._row(index), want[..., 3, :])
    some = torch.tensor([3, 0, n - 1])
    close(operator._columns(some), want[..., some])
    close(operator._principal(some), want[..., some, :][..., some])
    rest, diagonal = operator._split()
    whole = torch.zeros_like(want) + (0 if rest is None else rest.to_dense())
    whole = whole + (0 if diagonal is None else torch.diag_embed(diagonal))
    close(whole.expand(want.shape), want)


def matrix_of(name, tensors):
    """The operator's matrix by products, as a function of what it is made of."""
    operator = OPERATORS[name]()[0].with_tensors(tensors)
    return operator @ torch.eye(operator.shape[-1]).double()


@pytest.mark.parametrize("name", OPERATORS)
def test_derivatives_by_what_it_is_made_of(name):
    """Products, dense matrices and diagonals have the same derivatives; of products, the engine's tests hold them."""
    operator, want = OPERATORS[name]()
    tensors = [t.detach().clone().requires_grad_() for t in operator.tensors]
    weight = rand(*want.shape, seed=10)
    again = operator.with_tensors(tensors)
    by_product = torch.autograd.grad((matrix_of(name, tensors) * weight).sum(), tensors)
    by_entry = torch.autograd.grad((again.to_dense() * weight).sum(), tensors)
    for a, b in zip(by_product, by_entry):
        close(b, a)
    if name in SQUARE:
        close_grads(again.diagonal().sin().sum(), again.to_dense().diagonal(dim1=-2, dim2=-1).sin().sum(), tensors)


def close_grads(a, b, tensors):
    for g, h in zip(*(torch.autograd.grad(s, tensors, allow_unused=True, retain_graph=True) for s in (a, b))):
        if g is not None or h is not None:
            zero = torch.zeros(())
            torch.testing.assert_close(zero + (0 if g is None else g), zero + (0 if h is None else h))


@pytest.mark.parametrize("name", ["RBF", "Matern 3/2", "Matern 2", "SpectralMixture", "composed"])
def test_derivatives_of_kernels(name):
    k, definition = KERNELS[name]
    x, v = rand(5, 3, seed=1).requires_grad_(), rand(5, 2, seed=2).requires_grad_()
    if name != "Matern 2":  # whose definition here is NumPy's
        close_grads((KernelOperator(k, x) @ v).sin().sum(), (definition(x, x) @ v).sin().sum(), (x, v))
    w = rand(7, 2).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: KernelOperator(k, x, Y) @ w, (x, w), fast_mode=True)


def test_derivatives_by_parameters():
    ell = torch.tensor([0.5, 0.7, 0.9]).double().requires_grad_()
    scale, noise = (torch.tensor([s]).double().requires_grad_() for s in (1.5, 0.2))

    def matrix(ell, scale, noise):
        return KernelOperator(scale * kernels.Matern(ell, nu=2.5) + kernels.White(noise), X) @ X

    assert torch.autograd.gradcheck(matrix, (ell, scale, noise))
    assert torch.autograd.gradgradcheck(matrix, (ell, scale, noise), fast_mode=True)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 4), st.integers(1, 3),
       st.lists(st.integers(1, 3), max_size=2), st.data())  # fmt: skip
def test_shapes(m, n, dim, columns, batch, data):
    """Batch shapes broadcast, whichever operand has them."""

    def some(shape):
        kept = [s if data.draw(st.booleans()) else 1 for s in shape]
        return kept[data.draw(st.integers(0, len(kept))) :] if all(s == 1 for s in kept) else kept

    bx, by, bv = some(batch), some(batch), some(batch)
    x, y, v = rand(*bx, m, dim, seed=1), rand(*by, n, dim, seed=2), rand(*bv, n, columns, seed=3)
    operator = KernelOperator(kernels.Laplacian(0.5), x, y)
    want = (-(x[..., :, None, :] - y[..., None, :, :]).abs().sum(-1) / 0.5).exp()
    assert operator.shape == tuple(want.shape)
    close(operator @ v, want @ v)
    close(operator.to_dense(), want)
    small = rand(2, 2, seed=4)
    both = torch.einsum("...ij,kl->...ikjl", want, small).reshape(*want.shape[:-2], 2 * m, 2 * n)
    close(KroneckerOperator(operator, small).to_dense(), both)


@pytest.mark.parametrize("name", OPERATORS)
def test_columns(name):
    operator, want = OPERATORS[name]()
    m, n = want.shape[-2:]
    index = torch.tensor([2, 0, n - 1, 1, 2])
    close(operator._columns(index), want[..., index])
    if m == n:
        close(operator._principal(index), want[..., index, :][..., index])


def test_entries_of_a_square_kronecker_product_of_rectangles():
    a, small = rand(4, 6, seed=1), rand(3, 2, seed=2)
    index = torch.tensor([0, 7, 11, 4])
    operator = KroneckerOperator(DenseOperator(a), small)
    close(operator._principal(index), torch.kron(a, small)[index][:, index])
    empty = BlockDiagonalOperator(DenseOperator(a[:0, :0]), DenseOperator(a[:, :4]))
    close(empty._columns(index[:1]), a[:, :1])


SELECTED = torch.cat([torch.arange(3, N), torch.arange(3)])


@pytest.mark.parametrize("name", ["Kronecker", "Kronecker batch", "block-diagonal", "block-diagonal batch", "selected"])
def test_columns_need_no_product(name, monkeypatch):
    """Not even with columns of the identity: entries are computed as such, in O(N) for a column, and no others."""
    operator, want = OPERATORS["Kronecker" if name == "selected" else name]()
    if name == "selected":
        operator, want = operator._block(SELECTED, SELECTED), want[SELECTED][:, SELECTED]
    rest, diagonal = operator._split()
    assert rest is not None
    want = want if diagonal is None else want - torch.diag_embed(diagonal).expand(want.shape)

    def refuse(*_: Any) -> None:
        raise AssertionError("a product of the whole operator")

    for part in (KernelOperator, KroneckerOperator, BlockDiagonalOperator, SelectedOperator, type(rest)):
        monkeypatch.setattr(part, "_matmul", refuse)
    index = torch.tensor([3, 0, 7, 11, 4])
    close(rest._row(torch.full(rest.batch, 5)), want[..., 5, :])
    monkeypatch.setattr(KernelOperator, "_row", refuse)
    close(rest._columns(index), want[..., index])
    monkeypatch.setattr(KernelOperator, "_columns", refuse)
    close(rest._principal(index), want[..., index, :][..., index])


def test_columns_by_rows_where_only_these_are_known():
    """An operator of a user's own, symmetric and with rows, has columns without a product."""

    class Rows(DenseOperator):
        _columns = LinearOperator._columns

        def _row(self, index: torch.Tensor) -> torch.Tensor:
            whole = self.matrix.expand(*index.shape, *self.matrix.shape[-2:])
            return whole.gather(-2, index[..., None, None].expand(*index.shape, 1, whole.shape[-1]))[..., 0, :]

        def _matmul(self, v: torch.Tensor) -> torch.Tensor:
            raise AssertionError("a product of the whole operator")

    index = torch.tensor([3, 0, 7, 11, 4])
    for matrix in (dense(), dense(XB)):
        close(Rows(matrix, symmetric=True)._columns(index), matrix[..., index])
        close(Rows(matrix, symmetric=True)._principal(index), matrix[..., index, :][..., index])


BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "rows of v": (lambda: kernel() @ X[:5], ValueError, r"v must have shape \(12,\) or \(..., 12, E\); got \(5, 3\)"),
    "dtype of v": (lambda: kernel() @ X.float(), ValueError, "operator's dtype torch.float64; got torch.float32"),
    "kind of v": (lambda: kernel() @ X.numpy(), TypeError, "v must be a torch tensor; got ndarray"),
    "batch of v": (lambda: kernel(XB) @ rand(3, N, 1), ValueError, "do not broadcast"),
    "kind of x": (lambda: KernelOperator("rbf", anything(X.numpy())), TypeError, "must be a torch tensor; got ndarray"),
    "no x": (lambda: KernelOperator(kernels.RBF()), TypeError, "x must be a torch tensor of shape"),
    "whole numbers": (lambda: KernelOperator(kernels.RBF(), torch.ones(3, 2).long()), TypeError, "dtype float16"),
    "one axis": (lambda: KernelOperator(kernels.RBF(), X[:, 0]), ValueError, r"x must have shape \(..., N, D\)"),
    "dtypes": (lambda: KernelOperator(kernels.RBF(), X, Y.float()), ValueError, "float64 and float32"),
    "features": (lambda: KernelOperator(kernels.RBF(), X, Y[:, :2]), ValueError, "dimensions must be equal or 1"),
    "points twice": (lambda: KernelOperator(kernel().lazy, X), TypeError, "has its points and parameters already"),
    "kernel": (lambda: KernelOperator(3, X), TypeError, "kernel must be a kernel of kernops.kernels"),
    "vectors": (lambda: KernelOperator(Vi(X) - Vj(X)), ValueError, "one real number a pair"),
    "arrays": (lambda: KernelOperator(Vi(X.numpy()) | Vj(X.numpy())), TypeError, "torch tensors; got data of numpy"),
    "not square": (lambda: KernelOperator(kernels.RBF(), X, Y, symmetric=True), ValueError, "cannot be symmetric"),
    "number": (lambda: kernel() + 1.0, TypeError, "add_diagonal"),
    "sum": (lambda: kernel() + DenseOperator(X), ValueError, "cannot be added"),
    "dtype of a sum": (lambda: kernel() + DenseOperator(torch.ones(N, N)), ValueError, "must have one dtype"),
    "product": (lambda: DenseOperator(X) @ kernel(), ValueError, "cannot be multiplied"),
    "factor": (lambda: kernel() * NOISE, ValueError, "scaled by a number or by a tensor of that shape"),
    "diagonal": (lambda: kernel().add_diagonal(NOISE[:5]), ValueError, r"must be a number or have shape \(..., 12\)"),
    "diagonal's dtype": (lambda: kernel().add_diagonal(NOISE.float()), ValueError, "operator's dtype"),
    "diagonal's kind": (lambda: kernel().add_diagonal(anything([0.1] * N)), TypeError, "must be a number or a tensor"),
    "no diagonal": (lambda: KernelOperator(kernels.RBF(), X, Y).diagonal(), ValueError, "needs a square operator"),
    "index": (lambda: kernel()[0, 30], IndexError, "out of range"),
    "indices": (lambda: kernel()[0, 1, 2], ValueError, "rows and columns; got 3"),
    "kind of index": (lambda: kernel()["a"], TypeError, "an index is a number"),
    "index of a batch": (lambda: kernel(XB)[0, 1], ValueError, "is indexed as A"),
    "pairs": (lambda: kernel()[ROWS, ROWS[:2]], ValueError, "must have one shape"),
    "mask": (lambda: kernel()[torch.ones(3, dtype=torch.bool), :], IndexError, "12 entries; got 3"),
    "torch's functions": (lambda: torch.exp(anything(kernel())), TypeError, "does not take an operator"),
    "blocks": (lambda: BlockDiagonalOperator(), TypeError, "at least one"),
    "block": (lambda: BlockDiagonalOperator(DenseOperator(X)), ValueError, "needs a square operator"),
    "Kronecker": (lambda: KroneckerOperator(kernel(), anything(2.0)), TypeError, "small must be a tensor"),
    "matrix": (lambda: DenseOperator(X[0]), TypeError, "matrix must be a tensor"),
    "rescaled by what": (lambda: RescaledOperator(kernel(), anything(2.0)), TypeError, "rows must be a tensor"),
    "rescaled by how many": (lambda: RescaledOperator(kernel(), NOISE[:5]), ValueError, r"must have shape \(..., 12\)"),
    "rescaled columns": (lambda: RescaledOperator(kernel(), NOISE, NOISE.float()), ValueError, "columns must have the"),
    "diagonal's values": (lambda: DiagonalOperator(torch.ones(3).long()), TypeError, "values must be a tensor"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_requests(name):
    call, error, message = BAD[name]
    with pytest.raises(error, match=message):
        call()


def test_an_operator_is_abstract():
    with pytest.raises(TypeError):
        LinearOperator()  # type: ignore[abstract]


def test_an_entry_that_is_not_finite_spoils_no_other():
    """Dense columns are products with unit vectors on a processor, where 0 · inf would be NaN."""
    x = torch.arange(20.0)[:, None]
    operator = KernelOperator(kernels.custom(lambda x, y: 1 / (x - y).abs().sum(-1)), x)
    want = 1 / (x - x.T).abs()
    assert want.isinf().sum() == 20
    torch.testing.assert_close(operator.to_dense(), want)
