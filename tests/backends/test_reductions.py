"""Every core on every back end: random data, ties, NaN, infinities, empties, batches, accuracy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kernops.backends import reduce
from kernops.formula.graph import CAT_I, CAT_J, CAT_P, CAT_SCALAR, Node, var
from kernops.formula.ops import add, apply, const, mul, neg, total
from kernops.formula.plan import make_plan
from kernops.formula.reductions import CORES
from tests.helpers.backends import COMPILED, ON_CPU, need
from tests.helpers.program import compute
from tests.helpers.tables import ROWS, check_table, expect_table, reduce_table

F32, F64 = torch.float32, torch.float64
INF, NAN = math.inf, math.nan
PLAIN = [name for name, core in CORES.items() if not core.weighted and name != "KMin"]
#: Shorter than a tile of any back end, about one, and several.
LENGTHS = (1, 7, 300, 2500)


@pytest.fixture(params=ON_CPU)
def backend(request: pytest.FixtureRequest) -> str:
    need(request.param)
    return request.param


def _random(n: int, components: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(ROWS, n, components))


# --- values ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [F32, F64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n", LENGTHS)
def test_random_data(backend: str, n: int, dtype: torch.dtype) -> None:
    for core in PLAIN:
        check_table(core, _random(n, 2), backend, dtype)
    if n >= 3:
        check_table("KMin", _random(n, 2), backend, dtype, k=3)
    check_table("SumSoftMaxWeight", _random(n, 1), backend, dtype, weight=_random(n, 2, seed=1))


@pytest.mark.parametrize("n", LENGTHS)
def test_ties_go_to_the_lowest_index(backend: str, n: int) -> None:
    rng = np.random.default_rng(3)
    table = rng.integers(0, 3, size=(ROWS, n, 2)).astype(float)
    table[0] = 1.0  # all equal
    table[1, : n // 2] = 5.0  # the smallest in the second half
    table[2] = np.where(rng.random((n, 2)) < 0.5, 0.0, -0.0)  # the two zeros are equal
    for dtype in (F32, F64):
        check_table("MinArgMin", table, backend, dtype)
        check_table("KMin", table, backend, dtype, k=min(n, 3))


def _with(n: int, places: dict[int, float], base: float | None = None) -> np.ndarray:
    row = np.linspace(2.0, -1.0, n) if base is None else np.full(n, base)
    for j, value in places.items():
        row[j] = value
    return row


def _non_finite(n: int) -> np.ndarray:
    """One row for each way in which a column is not finite."""
    rows = [
        _with(n, {0: NAN}), _with(n, {n - 1: NAN}), _with(n, {}, NAN), _with(n, {n // 2: INF}),
        _with(n, {0: -INF, n - 1: NAN}), _with(n, {0: -INF}), _with(n, {}, INF), _with(n, {}, -INF),
        _with(n, {n // 2: 0.5}, NAN), _with(n, {n // 2: 0.5}, -INF), _with(n, {0: INF, n - 1: -INF}),
        _with(n, {n - 1: 1.0}, INF), _with(n, {0: INF, n // 3: INF}), _with(n, {n // 3: NAN, n // 2: INF}),
        _with(n, {0: NAN}, INF), _with(n, {n - 1: NAN}, -INF),
    ]  # fmt: skip
    return np.stack(rows)[:, :, None]


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("n", [5, 37, 600])
def test_nan_and_infinities(backend: str, n: int, dtype: torch.dtype) -> None:
    """NaN propagates, but is never chosen; infinities are values like others."""
    for table in np.split(_non_finite(n), 2):
        two = np.concatenate([table, table[::-1]], -1)
        for core in PLAIN:
            check_table(core, two, backend, dtype)
        check_table("KMin", two, backend, dtype, k=3)
        check_table("SumSoftMaxWeight", table, backend, dtype, weight=_random(n, 2))


@pytest.mark.parametrize("n", [3, 37, 600])
def test_non_finite_weights(backend: str, n: int) -> None:
    weight = _random(n, 2)
    weight[0, n // 2, 0], weight[1, 0, 1], weight[2, n - 1, 0] = NAN, INF, -INF
    check_table("SumSoftMaxWeight", _random(n, 1), backend, F64, weight=weight)


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("n", [37, 2500])
def test_exponentials_do_not_overflow(backend: str, n: int, dtype: torch.dtype) -> None:
    table = 1e4 * _random(n, 1)
    table[0] = 1e4 * np.where(np.arange(n)[:, None] % 2, 1.0, -1.0)
    table[1] = np.linspace(-1e4, 1e4, n)[:, None]  # the largest comes last
    table[2] = np.linspace(1e4, -1e4, n)[:, None]
    table[3, : n - 1] = -INF  # only the last counts
    table[4, 0] = -INF  # the first term is -inf
    table[5] = -1e4
    table[6] = 1e38
    check_table("LogSumExp", np.concatenate([table, table[::-1]], -1), backend, dtype)
    check_table("SumSoftMaxWeight", table, backend, dtype, weight=_random(n, 2))


@pytest.mark.parametrize("k", [1, 16, 100])
def test_k_smallest(backend: str, k: int) -> None:
    check_table("KMin", _random(100, 1), backend, F32, k=k)
    check_table("KMin", np.round(_random(400, 1)), backend, F32, k=k)
    sorted_down = -np.arange(300.0)[None, :, None] * np.ones((ROWS, 1, 1))  # every column is a new smallest
    check_table("KMin", sorted_down, backend, F32, k=k)


def test_slots_that_nothing_fills(backend: str) -> None:
    table = np.full((ROWS, 20, 1), NAN)
    table[0, 7], table[1, 3:5], table[2, 19], table[3, 2] = 1.0, INF, -INF, 0.0
    values, index = reduce_table("KMin", table, backend, F64, k=4)
    np.testing.assert_array_equal(index[:3, :, 0], [[7, -1, -1, -1], [3, 4, -1, -1], [19, -1, -1, -1]])
    np.testing.assert_array_equal(values[:3, :, 0], [[1, NAN, NAN, NAN], [INF, INF, NAN, NAN], [-INF, NAN, NAN, NAN]])
    assert (index[4:] == -1).all() and np.isnan(values[4:]).all()


def test_the_expected_values_are_right_on_an_example() -> None:
    """The oracle of this file, checked by hand."""
    row = np.array([2.0, NAN, -1.0, -1.0])
    table = np.broadcast_to(row[None, :, None], (ROWS, 4, 1))
    value, index = expect_table("KMin", table, k=4)
    assert index[0, :, 0].tolist() == [2, 3, 0, -1] and value[0, :3, 0].tolist() == [-1, -1, 2]
    mean, lse = expect_table("SumSoftMaxWeight", np.zeros((ROWS, 2, 1)), weight=np.ones((ROWS, 2, 3)))
    assert mean.shape == (ROWS, 3) and (mean == 1).all() and np.allclose(lse, math.log(2))


# --- accuracy -------------------------------------------------------------------------------------------------------
def test_a_million_terms_in_single_precision(backend: str) -> None:
    g = torch.Generator().manual_seed(0)
    x, y = torch.rand(2, 3, generator=g), torch.rand(1_000_000, 3, generator=g)
    exact = [(-((y.double() - row.double()) ** 2).sum(-1)).exp().sum() for row in x]
    d = neg(apply("SqDist", var(CAT_I, 0, 3), var(CAT_J, 1, 3)))
    (got,) = reduce(make_plan("Sum", apply("Exp", d)), [x, y], 2, 1_000_000, backend)
    torch.testing.assert_close(got[:, 0].double(), torch.stack(exact), rtol=1e-6, atol=0)
    (got,) = reduce(make_plan("LogSumExp", d), [x, y], 2, 1_000_000, backend)
    torch.testing.assert_close(got[:, 0].double(), torch.stack(exact).log(), rtol=1e-6, atol=0)


def test_a_million_ones_and_a_cancelling_sum(backend: str) -> None:
    ones = torch.full((1_000_000, 1), 0.1)
    big = torch.tensor([[3e7], [1.0], [-3e7]]).repeat(1000, 1)
    x = torch.ones(1, 1)
    plan = make_plan("Sum", mul(var(CAT_I, 0, 1), var(CAT_J, 1, 1)))
    (got,) = reduce(plan, [x, ones], 1, len(ones), backend)
    assert abs(got.item() / (1e6 * ones[0].double().item()) - 1) < 1e-6
    (got,) = reduce(plan, [x.double(), big.double()], 1, len(big), backend)
    assert got.item() == 1000.0


# --- shapes ---------------------------------------------------------------------------------------------------------
def _pairs(core: str, dim: int) -> tuple[Node, Node | None]:
    """A formula of an i-variable, a j-variable, a parameter and a scalar, and a weight."""
    x, y, p = var(CAT_I, 0, dim), var(CAT_J, 1, dim), var(CAT_P, 2, dim)
    s = var(CAT_SCALAR, 3, 1)
    f = mul(s, apply("Sin", add(mul(x, p), y)))
    return (apply("Sum", f), mul(p, apply("Cos", apply("Sub", x, y)))) if core == "SumSoftMaxWeight" else (f, None)


def _dense(core: str, x, y, p, s: float, k: int) -> tuple[torch.Tensor, ...]:
    x, y, p = x.double().unsqueeze(-2), y.double().unsqueeze(-3), p.double()[..., None, None, :]
    f = s * torch.sin(x * p + y)
    if core == "SumSoftMaxWeight":
        f, w = f.sum(-1, keepdim=True), p * torch.cos(x - y)
        return (f.softmax(-2) * w).sum(-2), f.logsumexp(-2)
    if core == "KMin":
        value, index = f.sort(dim=-2, stable=True)
        return value.narrow(-2, 0, k), index.narrow(-2, 0, k)
    return {"Sum": lambda: (f.sum(-2),), "LogSumExp": lambda: (f.logsumexp(-2),), "Min": lambda: (f.amin(-2),),
            "MinArgMin": lambda: (f.amin(-2), f.argmin(-2))}[core]()  # fmt: skip


def _check_dense(core: str, backend: str, x, y, p, s: float = 1.5, k: int = 2) -> None:
    k = k if core == "KMin" else 0
    plan = make_plan(core, *_pairs(core, x.shape[-1]), k=k)
    got = reduce(plan, [x, y, p, s], x.shape[-2], y.shape[-2], backend)
    for g, w in zip(got, _dense(core, x, y, p, s, k)):
        assert g.shape == w.shape and g.is_floating_point() == w.is_floating_point()
        torch.testing.assert_close(g.to(w.dtype), w, rtol=1e-10, atol=1e-10)


#: Batch shapes of i-variable, j-variable and parameter.
BATCHES = [((), (), ()), ((2,), (2,), (2,)), ((2,), (), ()), ((), (3,), ()), ((), (), (4,)), ((2, 1), (3,), ()),
           ((1, 1, 2), (3, 1, 1), (1,)), ((1, 1), (1, 1), (2, 3)), ((2, 1, 1, 3), (1, 1, 1), (2, 1)),
           ((0,), (1,), ())]  # fmt: skip


@pytest.mark.parametrize("core", CORES)
def test_batches(backend: str, core: str) -> None:
    for bx, by, bp in BATCHES:
        g = torch.Generator().manual_seed(5)
        x, y, p = (torch.randn(*s, generator=g, dtype=F64) for s in ((*bx, 4, 2), (*by, 5, 2), (*bp, 2)))
        _check_dense(core, backend, x, y, p)


@pytest.mark.parametrize("m, n", [(1, 1), (1, 3000), (3000, 1), (2, 257), (257, 2), (130, 70)])
def test_rows_and_columns_are_not_mixed_up(backend: str, m: int, n: int) -> None:
    g = torch.Generator().manual_seed(5)
    x, y, p = (torch.randn(*s, generator=g, dtype=F64) for s in ((m, 2), (n, 2), (2,)))
    for core in CORES:
        _check_dense(core, backend, x, y, p, k=1)


def test_strides(backend: str) -> None:
    """Transposed, expanded, stepped and overlapping tensors, and one tensor in two places."""
    g = torch.Generator().manual_seed(5)
    base = torch.randn(40, 40, generator=g, dtype=F64)
    p = base[3, ::7][:2]
    for x, y in [(base[:2].T, base[5:7].T), (base[0, :2].expand(6, 2), base[::3, 1::20]),
                 (base[:9, :2], base[:9, :2]), (base.as_strided((10, 2), (1, 1)), base.as_strided((7, 2), (40, 0))),
                 (base[None, :5, :2].expand(3, 5, 2), base.reshape(4, 10, 40)[0:3, :, 3:5])]:  # fmt: skip
        for core in ("Sum", "KMin"):
            _check_dense(core, backend, x, y, p)


def test_empty_ranges(backend: str) -> None:
    x, none, p = torch.zeros(3, 2), torch.zeros(0, 2), torch.zeros(2)
    for name, core in CORES.items():
        k = 2 if name == "KMin" else 0
        plan = make_plan(name, *_pairs(name, 2), k=k)
        outs = reduce(plan, [none, x, p, 1.0], 0, 3, backend)  # no row: nothing to compute
        assert [o.shape[0] for o in outs] == [0] * len(outs)
        assert [o.dtype == torch.int64 for o in outs] == [o == "index" for o in core.outputs]
        if core.empty is None:
            with pytest.raises(ValueError, match="n = 0"):
                reduce(plan, [x, none, p, 1.0], 3, 0, backend)
        else:
            for out, value in zip(reduce(plan, [x, none, p, 1.0], 3, 0, backend), core.empty):
                assert torch.equal(out.nan_to_num(7.0), torch.full_like(out, value).nan_to_num(7.0))


def test_more_than_there_are(backend: str) -> None:
    plan = make_plan("KMin", *_pairs("KMin", 2), k=4)
    tensors: list = [torch.zeros(5, 2), torch.zeros(3, 2), torch.zeros(2), 1.0]
    with pytest.raises(ValueError, match=r"k = 4.*n = 3"):
        reduce(plan, tensors, 5, 3, backend)


@pytest.mark.parametrize("dim", [1, 512])
def test_softmax_weights_of_many_dimensions(backend: str, dim: int) -> None:
    g = torch.Generator().manual_seed(2)
    x, y, w = (torch.randn(*s, generator=g, dtype=F64) for s in ((6, 3), (50, 3), (50, dim)))
    f = neg(apply("SqDist", var(CAT_I, 0, 3), var(CAT_J, 1, 3)))
    mean, lse = reduce(make_plan("SumSoftMaxWeight", f, var(CAT_J, 2, dim)), [x, y, w], 6, 50, backend)
    table = -(torch.cdist(x, y) ** 2)
    torch.testing.assert_close(mean, table.softmax(-1) @ w, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(lse[:, 0], table.logsumexp(-1), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dim", [17, 4096])
def test_dimensions(backend: str, dim: int) -> None:
    """Long vectors in the formula, and in the result."""
    g = torch.Generator().manual_seed(2)
    x, y = torch.randn(5, dim, generator=g) / dim**0.5, torch.randn(9, dim, generator=g) / dim**0.5
    kernel = apply("Exp", neg(apply("SqDist", var(CAT_I, 0, dim), var(CAT_J, 1, dim))))
    want = (-(torch.cdist(x.double(), y.double()) ** 2)).exp()
    (got,) = reduce(make_plan("Sum", kernel), [x, y], 5, 9, backend)
    torch.testing.assert_close(got.double(), want.sum(1, keepdim=True), rtol=2e-6, atol=0)
    (got,) = reduce(make_plan("Sum", mul(kernel, var(CAT_J, 2, min(dim, 512)))), [x, y, y[:, :512]], 5, 9, backend)
    torch.testing.assert_close(got.double(), want @ y[:, :512].double(), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("backend", COMPILED)
def test_more_than_two_to_the_31_pairs(backend: str) -> None:
    """2.3e9 pairs, and more than 2**31 numbers in one tensor."""
    need(backend)
    n = 48_000
    x, y = torch.arange(n, dtype=F64)[:, None], torch.arange(n, dtype=F64)[:, None]
    distance = apply("Abs", apply("Sub", var(CAT_I, 0, 1), var(CAT_J, 1, 1)))
    (total,) = reduce(make_plan("Sum", distance), [x, y], n, n, backend)
    want = (x * (x + 1) + (n - 1 - x) * (n - x)) / 2
    assert torch.equal(total, want)
    _, index = reduce(make_plan("MinArgMin", distance), [x, y.flip(0)], n, n, backend)
    assert torch.equal(index[:, 0], torch.arange(n).flip(0))
    long = torch.zeros(2**31 // 16 + 1, 16, dtype=torch.float32)
    long[-1] = 1.0
    (best,) = reduce(make_plan("Min", neg(apply("Sum", var(CAT_J, 0, 16)))), [long], 1, len(long), backend)
    assert best.item() == -16


# --- what a formula may depend on -----------------------------------------------------------------------------------
@pytest.mark.parametrize("backend", ["program", *ON_CPU])
def test_formulas_of_few_variables(backend: str) -> None:
    """Only rows, only columns, only parameters, only constants; variables that do not occur may be None."""
    need(backend)
    x, y, p = torch.rand(3, 2, dtype=F64), torch.rand(4, 2, dtype=F64), torch.rand(2, dtype=F64)
    vi, vj, vp, s = var(CAT_I, 0, 2), var(CAT_J, 1, 2), var(CAT_P, 2, 2), var(CAT_SCALAR, 3, 1)
    one = torch.ones(3, 4, 1, dtype=F64)
    table: dict[Node, tuple[torch.Tensor, list]] = {
        vi: (x[:, None] * one, [x, None, None, None]),
        vj: (y * one, [None, y, None, None]),
        vp: (p * one, [None, None, p, None]),
        mul(s, vp): (2.5 * p * one, [None, None, p, 2.5]),
        apply("Exp", const(0.5)): (math.exp(0.5) * one, [x.float().double(), None, None, None]),
        apply("Broadcast", const(2.0), params=(2,)): (2.0 * one.expand(3, 4, 2), [None, y, None, None]),
        mul(apply("Sqrt", const(3.0)), mul(vi, vj)): (3**0.5 * x[:, None] * y, [x, y, None, None]),
        add(vi, s): (x[:, None] * one + 2.5, [x, None, None, 2.5]),
    }
    for f, (dense, tensors) in table.items():
        results = {"Sum": dense.sum(1), "LogSumExp": dense.logsumexp(1), "Min": dense.amin(1)}
        for core, want in results.items():
            if backend in COMPILED and core != "Sum":  # a second or so for each formula
                continue
            (got,) = compute(make_plan(core, f, n_vars=4), tensors, 3, 4, backend)
            torch.testing.assert_close(got, want.expand_as(got), rtol=1e-13, atol=1e-13, msg=f"{f} {core}")
        if backend not in COMPILED or f in (vi, add(vi, s)):
            value, index = compute(make_plan("MinArgMin", f, n_vars=4), tensors, 3, 4, backend)
            assert torch.equal(index, dense.argmin(1).expand_as(index)), f


@pytest.mark.parametrize("backend", ["program", *ON_CPU])
def test_row_factors(backend: str) -> None:
    """A factor that only depends on the row leaves the sum, and may widen it; zeros and infinities stay right."""
    need(backend)
    a, b, w = var(CAT_I, 0, 3), var(CAT_J, 1, 1), var(CAT_I, 2, 1)
    x = torch.tensor([[0.0, 1.0, -2.0], [3.0, INF, 0.5]], dtype=F64)
    y, z = torch.tensor([[1.0], [2.0], [4.0]], dtype=F64), torch.tensor([[2.0], [4.0]], dtype=F64)
    kernel = apply("Exp", mul(w, neg(b)))
    dense = torch.exp(-z[:, None] * y)
    for f, want in (
        (mul(a, kernel), x * dense.sum(1)),
        (neg(mul(kernel, a)), -x * dense.sum(1)),
        (apply("Div", kernel, w), (dense / z[:, None]).sum(1)),
        (mul(2.0, mul(b, mul(a, mul(w, kernel)))), 2 * x * z * (y * dense).sum(1)),
        (mul(a, b), x * 7.0),
        (mul(a, w), 3 * x * z),
        (  # each piece of a concatenation has a factor of its own
            apply("Concat", mul(a, kernel), apply("Concat", kernel, apply("Concat", mul(2.0, mul(a, b)), a))),
            torch.cat([x * dense.sum(1), dense.sum(1), x * 14.0, 3 * x], 1),
        ),
    ):
        (got,) = compute(make_plan("Sum", f, n_vars=3), [x, y, z], 2, 3, backend)
        torch.testing.assert_close(got, want, rtol=1e-13, atol=0, equal_nan=True)


@pytest.mark.parametrize("backend", ON_CPU)
@pytest.mark.parametrize("first", [1, 2, 4])
def test_two_results(backend: str, first: int) -> None:
    """The components of a sum in two tensors without gaps, also where there is nothing to add up."""
    need(backend)
    a, b, w = var(CAT_I, 0, 3), var(CAT_J, 1, 2), var(CAT_I, 2, 1)
    f = apply("Concat", mul(w, mul(a, total(b))), b)
    x, y, z = (torch.rand(*shape, dtype=F64) for shape in ((2, 5, 3), (6, 2), (5, 1)))
    plan, whole = make_plan("Sum", f, first=first), make_plan("Sum", f)
    assert plan.digest != whole.digest and plan.outputs == (("value", first), ("value", 5 - first))
    for n in (6, 0):
        (want,) = compute(whole, [x, y[:n], z], 5, n, backend)
        got = compute(plan, [x, y[:n], z], 5, n, backend)
        for part, expected in zip(got, want.split([first, 5 - first], -1), strict=True):
            assert part.is_contiguous() and part.untyped_storage().nbytes() == part.numel() * 8
            torch.testing.assert_close(part, expected, rtol=1e-13, atol=0)
    for core, number in (("Min", 1), ("Sum", 5), ("Sum", -1)):
        with pytest.raises(ValueError, match="first: a Sum of dimension > 1 can have two results"):
            make_plan(core, f, first=number)
