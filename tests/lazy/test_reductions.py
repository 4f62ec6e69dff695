"""Reductions over rows, columns and the vector against dense float64 tensors."""

from __future__ import annotations

import math

import pytest
import torch

from kernops import LazyTensor, Vi, Vj
from kernops.formula.reductions import REDUCTIONS
from kernops.lazy import engine
from tests.helpers.backends import ON_CPU, need

M, N, D = 6, 9, 2


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, Y = rand(M, D, seed=1), rand(N, D, seed=2)
W = rand(N, 3, seed=3)
DENSE = (X[:, None] - Y[None]) * 3 + X[:, None] ** 2


def vector() -> LazyTensor:
    return (Vi(X) - Vj(Y)) * 3 + Vi(X) ** 2


def scalar() -> LazyTensor:
    return vector().sum(-1)


SCALAR = DENSE.sum(-1)


def check(got, want):
    assert got.shape == want.shape and got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12, equal_nan=True)


PLAIN = {
    "sum": lambda t, d: t.sum(d),
    "min": lambda t, d: t.amin(d),
    "max": lambda t, d: t.amax(d),
    "argmin": lambda t, d: t.argmin(d),
    "argmax": lambda t, d: t.argmax(d),
    "min_argmin": lambda t, d: tuple(t.min(d)),
    "max_argmax": lambda t, d: tuple(t.max(d)),
    "logsumexp": lambda t, d: t.logsumexp(d),
    "mean": lambda t, d: t.mean(d),
    "var": lambda t, d: t.var(d, correction=0),
    "std": lambda t, d: t.std(d, correction=0),
    "count_nonzero": lambda t, d: (t != 0).sum(d),
    "any": lambda t, d: (t != 0).any(d),
    "all": lambda t, d: (t != 0).all(d),
}


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("keyword", ["axis", "dim"])
@pytest.mark.parametrize("name", PLAIN)
def test_plain_reductions(name, keyword, axis):
    got = getattr(vector(), name)(**{keyword: axis})
    want = PLAIN[name](DENSE, axis)
    for g, w in zip(got, want) if isinstance(want, tuple) else ((got, want),):
        check(g, w)


@pytest.mark.parametrize("name", ["sum", "min", "max", "argmin", "argmax", "min_argmin", "max_argmax", "logsumexp"])
def test_reduction_suffix(name):
    got, want = getattr(vector(), f"{name}_reduction")(axis=1), getattr(vector(), name)(axis=1)
    for g, w in zip(got, want) if isinstance(want, tuple) else ((got, want),):
        assert torch.equal(g, w)


@pytest.mark.parametrize("axis", [0, 1])
def test_counts_of_comparisons(axis):
    close, dense = vector() < 0.2, DENSE < 0.2
    check(close.count_nonzero(axis), dense.sum(axis))
    check(close.any(axis), dense.any(axis))
    check(close.all(axis), dense.all(axis))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("k", [1, 4, 6])
@pytest.mark.parametrize("which", ["min", "max"])
def test_k_smallest_and_largest(axis, k, which):
    largest = which == "max"
    for lazy, dense in ((vector(), DENSE), (scalar(), SCALAR)):
        values, index = dense.topk(k, axis, largest=largest)
        if dense.ndim == 3:  # (rows, K, D); (rows, K) for scalars
            values, index = values.movedim(axis, 1), index.movedim(axis, 1)
        elif axis == 0:
            values, index = values.T, index.T
        both = getattr(lazy, f"K{which}_argK{which}")(k, axis=axis)
        check(both[0], values)
        check(both[1], index)
        check(getattr(lazy, f"K{which}")(K=k, dim=axis), values)
        check(getattr(lazy, f"argK{which}")(k, axis), index)
        check(getattr(lazy, f"argK{which}_reduction")(K=k, axis=axis), index)


@pytest.mark.parametrize("axis", [0, 1])
def test_softmax_weighted(axis):
    f, dense = scalar(), SCALAR
    w = rand(N, 3, seed=3) if axis == 1 else rand(M, 3, seed=4)
    weight = Vj(w) if axis == 1 else Vi(w)
    p = dense.softmax(axis)
    want = p @ w if axis == 1 else p.T @ w
    check(f.sumsoftmaxweight(weight, axis=axis), want)
    check(f.sumsoftmaxweight_reduction(weight=weight, dim=axis), want)
    log = (dense.exp() @ w if axis == 1 else dense.exp().T @ w).log()
    check(f.logsumexp(axis, weight=weight), log)
    check(f.logsumexp_reduction(dim=axis, weight=weight), log)
    check(f.reduction("SumSoftMaxWeight", other=weight, axis=axis), want)


def test_softmax_applied():
    w = rand(N, 3, seed=3)
    for axis in (0, 1):
        check(scalar().softmax(axis) @ w, SCALAR.softmax(axis) @ w)
        check(scalar().softmax(dim=axis) @ w[:, 0], SCALAR.softmax(axis) @ w[:, 0])
        check(scalar().softmax(axis).lazy.sum(1), SCALAR.softmax(axis).sum(1, keepdim=True))


@pytest.mark.parametrize("correction", [0, 1, 2.5])
def test_variance_is_sound_far_from_zero(correction):
    y = (1e8 + rand(500, 1)).requires_grad_()
    got = (Vj(y) + 0 * Vi(X[:, :1])).var(axis=1, correction=correction)
    want = y.detach().var(0, correction=0).expand(M, 1) * 500 / (500 - correction)
    torch.testing.assert_close(got, want, rtol=1e-7, atol=0)
    got.sum().backward()
    expected = M * 2 * (y.detach() - y.detach().mean()) / (500 - correction)
    torch.testing.assert_close(y.grad, expected, rtol=1e-6, atol=1e-9)


def test_means_of_halves_do_not_overflow():
    y = torch.full((2000, 1), 100.0, dtype=torch.float16)
    x = torch.zeros(2, 1, dtype=torch.float16)
    mean = (Vi(x) + Vj(y)).mean(axis=1)
    assert mean.dtype == torch.float16 and (mean == 100).all()
    assert (Vi(x) + Vj(y)).std(axis=1).abs().max() == 0
    assert ((Vi(x) + Vj(y)) > 0).count_nonzero(1).tolist() == [[2000], [2000]]


def test_counts_are_exact_where_float32_is_not(monkeypatch):
    monkeypatch.setattr(engine, "_EXACT", 4)
    y = torch.arange(11, dtype=torch.float32)[:, None]
    x = torch.tensor([[3.0], [20.0]])
    assert (Vi(x) > Vj(y)).count_nonzero(axis=1).tolist() == [[3], [11]]
    assert (Vj(x) > Vi(y)).count_nonzero(axis=0).tolist() == [[3], [11]]


AXIS_ERRORS = [
    ("sum", 3, r"0 \(over i\), 1 \(over j\), 2 or -1 \(over the vector\).*got 3"),
    ("sum", -2, "got -2"),
    ("logsumexp", None, r"axis must be 0 \(over i\) or 1 \(over j\).*got None"),
    ("logsumexp", 2, "got 2"),
    ("logsumexp", -1, "got -1"),
    ("min_argmin", 2, "got 2"),
    ("sum_reduction", 2, "got 2"),
]


@pytest.mark.parametrize(("name", "axis", "message"), AXIS_ERRORS)
def test_the_axis_is_never_guessed(name, axis, message):
    with pytest.raises(ValueError, match=message):
        getattr(vector(), name)(axis)
    with pytest.raises(TypeError, match="whole number"):
        getattr(vector(), name)(axis="rows")


def test_axes_are_counted_after_the_batch():
    x = LazyTensor(rand(4, M, 1, D))
    assert x.sum(-1).shape == (4, M, 1) and x.sum(3)._shape == (4, M, 1, 1)
    assert x.sum(1).shape == (4, 1, D) and x.sum(2).shape == (4, M, D)
    for axis in (0, 4, -2):
        with pytest.raises(ValueError, match=r"axis must be 1 \(over i\), 2 \(over j\), 3 or -1"):
            x.sum(axis)


def test_max_over_the_vector_is_not_max_over_an_axis():
    got = vector().max(-1)
    assert isinstance(got, LazyTensor)
    check(got.max(axis=1), DENSE.amax(-1, keepdim=True).amax(1))
    check(vector().max(axis=1).amax(-1), DENSE.amax(1).amax(-1))


def test_an_axis_without_variables_has_length_one():
    x = Vi(X)
    assert torch.equal(x.sum(axis=1), X)
    torch.testing.assert_close(x.sum(axis=0), X.sum(0, keepdim=True))
    assert x.argmin(axis=1).tolist() == [[0, 0]] * M
    assert torch.equal(x[0] @ torch.ones(1).double(), X[:, 0])
    assert torch.equal((x * 0 + 1).sum(axis=0), torch.full((1, D), float(M)).double())


INF = math.inf


@pytest.mark.parametrize("backend", ON_CPU)
def test_streams_of_extremes(backend):
    """First term -inf, all -inf, +inf, NaN, and softmax of ±10⁴."""
    need(backend)
    f = torch.tensor([[-INF, 0.0, 1.0], [-INF, -INF, -INF], [INF, 0.0, 1.0], [math.nan, 0.0, 1.0], [1e4, -1e4, 9999.0]])
    f = f.double()
    # Column j of row i is picked by comparing: a product with 0 would make NaN of infinities.
    column = Vj(torch.arange(3).double()[:, None])
    lazy = (column == 0).where(Vi(f)[0], (column == 1).where(Vi(f)[1], Vi(f)[2]))
    w = torch.tensor([[1.0], [2.0], [4.0]]).double()
    options = {"backend": backend}
    check(lazy.logsumexp(1, **options), f.logsumexp(1, keepdim=True))
    soft = f.softmax(1) @ w
    check(
        lazy.sumsoftmaxweight(Vj(w), axis=1, **options)[[0, 1, 3, 4]], soft[[0, 1, 3, 4]]
    )  # torch: inf - inf in row 2
    weighted = lazy.logsumexp(1, weight=Vj(w), **options)
    for row, value in ((0, math.log(2 + 4 * math.e)), (1, -INF), (4, 1e4 + math.log(1 + 4 / math.e))):
        assert weighted[row].item() == pytest.approx(value, rel=1e-13)
    assert lazy.min(axis=1, **options)[:3].flatten().tolist() == [-INF, -INF, 0.0]
    assert lazy.min(axis=1, **options)[3].isnan().all()
    value, index = lazy.min_argmin(axis=1, **options)
    assert index.flatten().tolist() == [0, 0, 1, 1, 1]  # NaN is never chosen
    assert value.flatten().tolist() == [-INF, -INF, 0.0, 0.0, -1e4]
    values, index = lazy.Kmin_argKmin(3, axis=1, **options)
    assert index.tolist() == [[0, 1, 2], [0, 1, 2], [1, 2, 0], [1, 2, -1], [1, 2, 0]]
    assert values[3, 2].isnan() and values[2].tolist() == [0.0, 1.0, INF]


EMPTY = {
    "sum": 0.0,
    "min": INF,
    "max": -INF,
    "logsumexp": -INF,
    "mean": math.nan,
    "var": math.nan,
    "count_nonzero": 0,
    "any": False,
    "all": True,
}


@pytest.mark.parametrize("name", EMPTY)
@pytest.mark.parametrize("axis", [0, 1])
def test_empty_ranges_give_the_identity(name, axis):
    x, y = torch.zeros((3, 2)).double(), torch.zeros((0, 2)).double()
    lazy = Vi(x) - Vj(y) if axis == 1 else Vi(y) - Vj(x)
    got = getattr(lazy, name)(axis=axis)
    assert got.shape == (3, 2)
    want = torch.tensor(EMPTY[name], dtype=got.dtype).expand(3, 2)
    torch.testing.assert_close(got, want, equal_nan=True, rtol=0, atol=0)
    none = getattr(lazy.t(), name)(axis=axis)  # no result, of one term each ... of three
    assert none.shape == (0, 2)


def test_weighted_reductions_of_nothing():
    x, y = torch.zeros((3, 1)).double(), torch.zeros((0, 1)).double()
    assert (Vi(x) - Vj(y)).sumsoftmaxweight(Vj(y), axis=1).isnan().all()
    assert (Vi(x) - Vj(y)).logsumexp(1, weight=Vj(y)).tolist() == [[-INF]] * 3
    assert ((Vi(x) - Vj(y)) @ y).tolist() == [[0.0]] * 3


@pytest.mark.parametrize("name", ["argmin", "argmax", "min_argmin", "max_argmax"])
def test_arg_reductions_of_nothing_are_errors(name):
    x, y = torch.zeros((3, 1)).double(), torch.zeros((0, 1)).double()
    with pytest.raises(ValueError, match="over j has no value where there are no terms, N = 0"):
        getattr(Vi(x) - Vj(y), name)(axis=1)
    with pytest.raises(ValueError, match="over i has no value where there are no terms, M = 0"):
        getattr(Vi(y) - Vj(x), name)(axis=0)
    assert (Vi(y) - Vj(x)).argmin(axis=1).shape == (0, 1)


@pytest.mark.parametrize(
    ("k", "error", "message"),
    [(0, ValueError, "K must be a whole number >= 1; got 0"), (-1, ValueError, "got -1"), (2.5, TypeError, "float"),
     (True, TypeError, "got True"), (N + 1, ValueError, f"N = {N} .over j.; got K = {N + 1}"), ("3", TypeError, "str")],
)  # fmt: skip
@pytest.mark.parametrize("name", ["Kmin", "argKmin", "Kmin_argKmin", "Kmax"])
def test_wrong_k(name, k, error, message):
    with pytest.raises(error, match=message):
        getattr(vector(), name)(k, axis=1)


def test_ties_go_to_the_lowest_index():
    y = torch.tensor([[1.0], [0.0], [0.0], [1.0]]).double()
    lazy = Vj(y) + 0 * Vi(X[:, :1])
    assert lazy.argmin(axis=1).unique().tolist() == [1]
    assert lazy.argmax(axis=1).unique().tolist() == [0]
    assert lazy.argKmin(4, axis=1).unique(dim=0).tolist() == [[1, 2, 0, 3]]
    assert lazy.argKmax(4, axis=1).unique(dim=0).tolist() == [[0, 3, 1, 2]]


def test_every_row_of_the_table_has_its_method():
    for row in REDUCTIONS.values():
        for method in row.methods:
            assert callable(getattr(LazyTensor, method)) and getattr(LazyTensor, method).__doc__


# --- products ----------------------------------------------------------------------------------------------------
def gauss() -> tuple[LazyTensor, torch.Tensor]:
    return (-((Vi(X) - Vj(Y)) ** 2).sum(-1)).exp(), (-((X[:, None] - Y[None]) ** 2).sum(-1)).exp()


@pytest.mark.parametrize("width", [1, 2, 17, 512])
@pytest.mark.parametrize("backend", ON_CPU)
def test_products_with_wide_right_hand_sides(width, backend):
    need(backend)
    k, dense = gauss()
    v = rand(N, width, seed=9)
    check(k.__matmul__(v, backend=backend), dense @ v)


def test_products():
    k, dense = gauss()
    v, u = rand(N, 3, seed=5), rand(M, 3, seed=6)
    check(k @ v, dense @ v)
    check(k @ v[:, 0], dense @ v[:, 0])
    check(k.T @ u, dense.T @ u)
    check(k.t() @ u[:, 1], dense.T @ u[:, 1])
    check(k.matvec(v[:, 0]), dense @ v[:, 0])
    check(k.rmatvec(u), dense.T @ u)
    check(k.T.T @ v, dense @ v)
    check((k + k.T.T) @ v, 2 * dense @ v)
    check((k * 2 + 0.3) @ v, (dense * 2 + 0.3) @ v)


def test_products_that_do_not_fit():
    k, _ = gauss()
    with pytest.raises(ValueError, match=rf"v must have shape \(N,\) or .* with N = {N}.*got \({N + 1},\)"):
        k @ torch.zeros(N + 1).double()
    with pytest.raises(ValueError, match=rf"got \({M}, 2\)"):
        k @ torch.zeros(M, 2).double()
    with pytest.raises(ValueError, match="K must be scalar for each pair .* 2 components"):
        (Vi(X) - Vj(Y)) @ torch.zeros(N).double()
    with pytest.raises(ValueError, match="at least one column"):
        k @ torch.zeros(N, 0).double()
    with pytest.raises(TypeError, match="v must be a torch tensor"):
        k @ [1.0] * N
    with pytest.raises(TypeError, match="write K.T @ v"):
        torch.zeros(M).double() @ k
    with pytest.raises(TypeError, match="write K.T @ v"):
        torch.zeros(M).double().numpy() @ k


def test_scipy_linear_operator():
    scipy_linalg = pytest.importorskip("scipy.sparse.linalg")
    x = X.numpy()
    k = (-((Vi(x) - Vj(x)) ** 2).sum(-1)).exp()
    operator = scipy_linalg.aslinearoperator(k)
    values = scipy_linalg.eigsh(operator, k=2, return_eigenvectors=False)
    dense = torch.linalg.eigvalsh((-((X[:, None] - X[None]) ** 2).sum(-1)).exp())
    assert sorted(values) == pytest.approx(dense[-2:].tolist(), rel=1e-10)
