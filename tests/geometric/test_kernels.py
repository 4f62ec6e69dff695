"""Each kernel of each back end against plain loops in float64. tests/gpu runs the same tests on a GPU."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kernops import backends
from kernops.geometric import kernels
from kernops.geometric.kernels import Level, Scale, choose, sum_levels, tiled
from tests.geometric import cases
from tests.geometric.cases import CASES, DTYPES, At, Case, close

Tensor = torch.Tensor
int32 = torch.int32
JUNK = (-7, 2**31 - 1)  # what may stand where a plan means nothing


@pytest.fixture(params=cases.BACKENDS)
def place(request: pytest.FixtureRequest) -> At:
    return cases.at(request.param)


def rows(n: int, channels: int, dtype: torch.dtype, seed: int = 0) -> np.ndarray:
    """Random numbers that the dtype holds, in float64."""
    t = torch.randn((n, channels), generator=torch.Generator().manual_seed(seed + n), dtype=torch.float64)
    return t.to(dtype).double().numpy()


def with_junk(order: np.ndarray, n: int) -> np.ndarray:
    """Items, and after them what means nothing."""
    junk = np.resize(JUNK, (n - len(order), *order.shape[1:]))
    return np.concatenate([order, junk])


# --- choosing ---------------------------------------------------------------------------------------------------------
def test_every_back_end_has_every_function():
    for name in cases.BACKENDS:
        module = __import__(f"kernops.geometric.kernels.{name}", fromlist=["x"])
        assert all(callable(getattr(module, function)) for function in kernels.FUNCTIONS), name


def test_choose():
    cpu = torch.device("cpu")
    assert choose("tiled", cpu) is tiled
    with pytest.raises(ValueError, match="backend must be 'auto', 'cuda', 'cpu', 'tiled'; got 'gpu'"):
        choose("gpu", cpu)
    with pytest.raises(ValueError, match="backend: 'cuda' computes on cuda; the data is on cpu"):
        choose("cuda", cpu)
    with pytest.raises(ValueError, match="backend: 'cpu' computes on cpu; the data is on cuda:0"):
        choose("cpu", torch.device("cuda:0"))
    assert choose("auto", torch.device("mps")) is tiled


def test_choose_follows_the_environment(monkeypatch):
    monkeypatch.setenv("KERNOPS_BACKEND", "tiled")
    assert choose("auto", torch.device("cpu")) is tiled
    monkeypatch.setenv("KERNOPS_BACKEND", "sycl")
    with pytest.raises(ValueError, match="the environment variable KERNOPS_BACKEND must be .* got 'sycl'"):
        choose("auto", torch.device("cpu"))


def test_a_back_end_that_cannot_run_says_why(monkeypatch, caplog):
    from kernops.geometric.kernels import cpu

    monkeypatch.setattr(cpu, "available", lambda device: "there is no compiler")
    backends._module.cache_clear()
    with pytest.raises(RuntimeError, match="backend: 'cpu' cannot run here: there is no compiler"):
        choose("cpu", torch.device("cpu"))
    with caplog.at_level("WARNING", "kernops.geometric.kernels"):
        assert choose("auto", torch.device("cpu")) is tiled
    assert "there is no compiler" in caplog.text
    backends._module.cache_clear()


# --- grouping ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", cases.LABELS)
def test_bucket_sort(place: At, name: str):
    buckets, n_buckets = cases.labels(name)
    order, starts = place.kernels.bucket_sort(place.tensor(buckets, int32), n_buckets)
    assert order.dtype == starts.dtype == int32 and order.shape == buckets.shape
    want = cases.sorted_order(buckets)
    assert starts.tolist() == cases.starts_of(buckets, n_buckets).tolist()
    assert order[: len(want)].tolist() == want.tolist()


def runs_by_loop(cells: np.ndarray, permutation: np.ndarray) -> list[tuple[int, int, int]]:
    """(bucket, first point, length) of every run, sorted."""
    numbers = np.arange(cells.size).reshape(cells.shape)
    found = []
    for b, n, r, c in np.ndindex(cells.shape[0], cells.shape[1], *cells.shape[3:]):
        ray, point = cells[b, n, :, r, c], numbers[b, n, :, r, c]
        k = 0
        while k < len(ray):
            end = k + 1
            while end < len(ray) and ray[end] == ray[k]:
                end += 1
            if ray[k] >= 0:
                found.append((int(permutation[ray[k]]), int(point[k]), end - k))
            k = end
    return sorted(found)


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_make_runs(place: At, case: Case, permuted: bool):
    cells, n_cells = case.cells(), math.prod(case.shape)
    order = np.random.default_rng(0).permutation(n_cells) if permuted else np.arange(n_cells)
    given = place.tensor(order, int32) if permuted else None
    items, starts = place.kernels.make_runs(place.tensor(cells, int32), n_cells, given)
    want = runs_by_loop(cells, order)
    assert items.shape == (cells.size, 2) and items.dtype == starts.dtype == int32
    assert starts.tolist() == cases.starts_of(np.array([k for k, _, _ in want], int), n_cells).tolist()
    assert items[: len(want)].tolist() == [[p, length] for _, p, length in want]


@pytest.mark.parametrize("trunc", [False, True])
def test_frustum_cells(place: At, trunc: bool):
    rng = np.random.default_rng(0)
    projection = rng.normal(size=(2, 3, 3, 4))
    u, v, d = np.linspace(-1, 1, 7), np.linspace(-0.6, 0.6, 5), np.arange(1.0, 7.0)
    projection[1, 2] = np.nan
    projection[0, 1, :, 3] = np.inf
    lower, step, counts = (-3.0, -4.0, -1.5), (0.5, 0.4, 1.5), (12, 20, 2)
    tensors = [place.tensor(a, torch.float64) for a in (projection, u, v, d)]
    got = place.kernels.frustum_cells(*tensors, lower, step, counts, trunc)
    assert got.dtype == int32 and got.shape == (2, 3, 6, 5, 7)
    with np.errstate(invalid="ignore"):
        px, py, pz, t = (projection[..., k].reshape(2, 3, 3, 1, 1, 1) for k in range(4))
        ray = (px * u + (py * v[:, None])) + pz
        ego = d[:, None, None] * ray + t
        place_in = (ego - np.reshape(lower, (3, 1, 1, 1))) / np.reshape(step, (3, 1, 1, 1))
        index = np.trunc(place_in) if trunc else np.floor(place_in)
        inside = ((index >= 0) & (index < np.reshape(counts, (3, 1, 1, 1)))).all(2)
        x, y, z = np.moveaxis(np.where(inside[:, :, None], index, 0), 2, 0)
        number = ((np.arange(2).reshape(2, 1, 1, 1, 1) * counts[2] + z) * counts[1] + y) * counts[0] + x
    want = np.where(inside, number, -1)
    assert (want >= 0).sum() > 100
    assert np.array_equal(got.cpu().numpy(), want)


# --- sums -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", cases.LABELS)
def test_segment_sum_of_rows(place: At, name: str, dtype: torch.dtype):
    buckets, n_buckets = cases.labels(name)
    order = with_junk(cases.sorted_order(buckets), len(buckets))
    plan = place.tensor(order, int32), place.tensor(cases.starts_of(buckets, n_buckets), int32)
    for channels in (1, 3, 8, 33, 64, 130) if len(buckets) < 1000 else (4,):
        values = rows(len(buckets), channels, dtype)
        given = place.tensor(values, dtype)
        got = place.kernels.segment_sum(given, *plan, None, n_buckets, None, dtype)
        assert got.dtype == dtype
        want, terms = (cases.bucket_sums(v, buckets, n_buckets) for v in (values, np.abs(values)))
        close(got, want, terms)
        again = place.kernels.segment_sum(given, *plan, None, n_buckets, None, dtype)
        assert torch.equal(got, again)


def test_segment_sum_with_targets_and_another_dtype(place: At):
    buckets, n_buckets = cases.labels("few")
    targets = np.random.default_rng(0).permutation(n_buckets)
    plan = [place.tensor(a, int32) for a in (cases.sorted_order(buckets), cases.starts_of(buckets, n_buckets), targets)]
    values = rows(len(buckets), 6, torch.float16)
    got = place.kernels.segment_sum(place.tensor(values, torch.float16), *plan, n_buckets, None, torch.float32)
    want = np.empty((n_buckets, 6))
    want[targets] = cases.bucket_sums(values, buckets, n_buckets)
    assert got.dtype == torch.float32
    close(got, want, 10.0)


def test_whole_numbers_are_summed_exactly(place: At):
    buckets, n_buckets = cases.labels("many")
    order, starts = place.kernels.bucket_sort(place.tensor(buckets, int32), n_buckets)
    values = np.random.default_rng(0).integers(-1000, 1000, (len(buckets), 5)).astype(float)
    given = place.tensor(values, torch.float32)
    got = place.kernels.segment_sum(given, order, starts, None, n_buckets, None, torch.float32)
    assert np.array_equal(got.cpu().numpy(), cases.bucket_sums(values, buckets, n_buckets))
    got = place.kernels.segment_cumsum(given, order, starts, False, torch.float32)
    assert np.array_equal(got.cpu().numpy(), cases.bucket_cumsums(values, buckets, n_buckets))


@pytest.mark.parametrize("logits", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_segment_sum_of_runs(place: At, case: Case, dtype: torch.dtype, weighted: bool, logits: bool):
    values, cells, n_cells = cases.inputs(case, dtype), case.cells(), math.prod(case.shape)
    runs = runs_by_loop(cells, np.arange(n_cells))
    starts = cases.starts_of(np.array([k for k, _, _ in runs], int), n_cells)
    items = with_junk(np.array([run[1:] for run in runs], int).reshape(-1, 2), cells.size)
    plan = place.tensor(items, int32), place.tensor(starts, int32)
    feat = place.tensor(values.feat.reshape(-1, case.channels), dtype)
    scale = cases.scale(place, case, values, weighted, logits, dtype)
    got = place.kernels.segment_sum(feat, *plan, None, n_cells, scale, dtype)
    given = (cells, values.depth, values.feat, values.weight if weighted else None, logits, values.grad)
    want, terms = (cases.splat(case, *given, magnitude=m).out.reshape(n_cells, -1) for m in (False, True))
    close(got, want, terms)


@pytest.mark.parametrize("weighted", [False, True])
def test_segment_sum_of_pairs(place: At, weighted: bool):
    rng = np.random.default_rng(0)
    buckets, n_buckets = cases.labels("empty buckets")
    depth, weight, values = rng.normal(size=90), rng.normal(size=90), rng.normal(size=(40, 7))
    places, sources = rng.integers(0, 90, len(buckets)), rng.integers(0, 40, len(buckets))
    order = cases.sorted_order(buckets)
    items = with_junk(np.stack([places, sources], 1)[order], len(buckets))
    plan = place.tensor(items, int32), place.tensor(cases.starts_of(buckets, n_buckets), int32)
    tensors = [place.tensor(a, torch.float32) for a in (values, depth, weight)]
    scale = Scale("pairs", tensors[1], tensors[2] if weighted else None, None, 1, 1)
    got = place.kernels.segment_sum(tensors[0], *plan, None, n_buckets, scale, torch.float32)
    w = depth * weight if weighted else depth
    terms = w[places][:, None] * values[sources]
    close(got, cases.bucket_sums(terms, buckets, n_buckets), cases.bucket_sums(np.abs(terms), buckets, n_buckets))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", cases.LABELS)
def test_segment_cumsum(place: At, name: str, dtype: torch.dtype, reverse: bool):
    buckets, n_buckets = cases.labels(name)
    order = with_junk(cases.sorted_order(buckets), len(buckets))
    plan = place.tensor(order, int32), place.tensor(cases.starts_of(buckets, n_buckets), int32)
    for channels in (1, 3, 8, 70) if len(buckets) < 1000 else (2,):
        values = rows(len(buckets), channels, dtype)
        got = place.kernels.segment_cumsum(place.tensor(values, dtype), *plan, reverse, dtype)
        assert got.dtype == dtype
        want, terms = (cases.bucket_cumsums(v, buckets, n_buckets, reverse) for v in (values, np.abs(values)))
        close(got, want, terms)
        assert torch.equal(got, place.kernels.segment_cumsum(place.tensor(values, dtype), *plan, reverse, dtype))


def test_no_bucket_feels_another_ones_numbers(place: At):
    """A difference of prefix sums over all items would: 1e30, inf and NaN in one bucket, ones in the next."""
    buckets = np.array([0, 1, 1, 2, 0, 2, 1, -1])
    values = np.array([1e30, 1, 1, np.inf, 1e30, np.nan, 1, np.nan])[:, None]
    order = with_junk(cases.sorted_order(buckets), len(buckets))
    plan = place.tensor(order, int32), place.tensor(cases.starts_of(buckets, 3), int32)
    given = place.tensor(values, torch.float32)
    sums = place.kernels.segment_sum(given, *plan, None, 3, None, torch.float32)[:, 0].tolist()
    assert sums[:2] == [float(np.float32(2e30)), 3.0] and math.isnan(sums[2])
    for reverse, of_bucket_1 in ((False, [1.0, 2.0, 3.0]), (True, [3.0, 2.0, 1.0])):
        prefixes = place.kernels.segment_cumsum(given, *plan, reverse, torch.float32)[:, 0]
        assert prefixes[[1, 2, 6]].tolist() == of_bucket_1 and prefixes[7] == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gather(place: At, dtype: torch.dtype):
    for channels in (1, 5, 64):
        values, buckets = rows(9, channels, dtype), np.random.default_rng(0).integers(-3, 9, 100)
        got = place.kernels.gather(place.tensor(values, dtype), place.tensor(buckets, int32))
        assert got.dtype == dtype
        assert np.array_equal(got.double().cpu().numpy(), np.where(buckets[:, None] < 0, 0, values[buckets]))


@pytest.mark.parametrize("split", [1, 3, 4096])
def test_two_levels_are_one(place: At, split: int, monkeypatch):
    from kernops.geometric import levels as front

    monkeypatch.setattr(front, "PIECE", split)
    for name in ("few", "all left out", "sorted, with a long one"):
        buckets, n_buckets = cases.labels(name)
        order, starts = place.kernels.bucket_sort(place.tensor(buckets, int32), n_buckets)
        targets = np.random.default_rng(0).permutation(n_buckets)
        level = Level(order, starts, place.tensor(targets, int32), n_buckets)
        values = np.random.default_rng(0).integers(-9, 9, (len(buckets), 3)).astype(float)
        got = sum_levels(place.kernels, place.tensor(values, torch.float32), front.split(level), None)
        want = np.empty((n_buckets, 3))
        want[targets] = cases.bucket_sums(values, buckets, n_buckets)
        assert np.array_equal(got.cpu().numpy(), want)


# --- splat ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("logits", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_splat_atomic_and_backward(place: At, case: Case, dtype: torch.dtype, weighted: bool, logits: bool):
    values, n_cells = cases.inputs(case, dtype), math.prod(case.shape)
    cells = case.cells()
    given = (cells, values.depth, values.feat, values.weight if weighted else None, logits, values.grad)
    want, terms = (cases.splat(case, *given, magnitude=m) for m in (False, True))
    scale = cases.scale(place, case, values, weighted, logits, dtype)
    flat = place.tensor(cells, int32)
    feat, grad = (place.tensor(a.reshape(-1, case.channels), dtype) for a in (values.feat, values.grad))
    out = place.kernels.splat_atomic(feat, flat, scale, n_cells, dtype)
    assert out.dtype == dtype
    close(out, want.out.reshape(n_cells, -1), terms.out.reshape(n_cells, -1))
    by_w, by_feat = place.kernels.splat_backward(grad, feat, flat, scale, True, True)
    assert by_w.dtype == (torch.float64 if dtype == torch.float64 else torch.float32) and by_feat.dtype == dtype
    close(by_feat, want.feat.reshape(-1, case.channels), terms.feat.reshape(-1, case.channels))
    plain = (cells, values.depth, values.feat, None, False, values.grad)
    dots, sizes = (cases.splat(case, *plain, magnitude=m).depth for m in (False, True))
    close(by_w, dots, sizes)
    alone = place.kernels.splat_backward(grad, feat, flat, scale, True, False)
    assert alone[1] is None and torch.equal(alone[0], by_w)
    alone = place.kernels.splat_backward(grad, feat, flat, scale, False, True)
    assert alone[0] is None and torch.equal(alone[1], by_feat)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_depth_lse(place: At, dtype: torch.dtype):
    for points in ((2, 3, 5, 4, 7), (1, 1, 1, 1, 1), (1, 2, 118, 3, 3)):
        depth = (rows(math.prod(points), 1, dtype).reshape(points) * 16 + 100).astype(np.float32)
        given = place.tensor(depth, dtype)
        exact = given.double().cpu().numpy()
        top = exact.max(2)
        want = np.log(np.exp(exact - top[:, :, None]).sum(2)) + top
        got = place.kernels.depth_lse(given)
        assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        close(got, want.reshape(-1), np.abs(want).reshape(-1), factor=4)


def test_depth_lse_of_masked_bins(place: At):
    depth = torch.zeros((1, 1, 3, 1, 3))
    depth[0, 0, :, 0, 0] = torch.tensor([-torch.inf, 2.0, -torch.inf])
    depth[0, 0, :, 0, 1] = -torch.inf
    depth[0, 0, 1, 0, 2] = torch.nan
    got = place.kernels.depth_lse(depth.to(place.device)).tolist()
    assert got[0] == 2.0 and got[1] == -math.inf and math.isnan(got[2])


def test_nan_stays_with_its_points(place: At):
    """A dropped point's NaN is in no result; a kept one's is in its cell and in its own gradients alone."""
    case = CASES[0]
    values, n_cells, cells = cases.inputs(case, torch.float32), math.prod(case.shape), case.cells()
    ray = cells[0, 0, :, 0, 0]
    ray[:3] = -1, 4, 5
    values.depth[0, 0, :2, 0, 0] = np.nan
    scale = cases.scale(place, case, values, False, False, torch.float32)
    flat, feat, grad = (
        place.tensor(cells, int32),
        *(place.tensor(a.reshape(-1, case.channels), torch.float32) for a in (values.feat, values.grad)),
    )
    items, starts = place.kernels.make_runs(flat, n_cells, None)
    for out in (
        place.kernels.segment_sum(feat, items, starts, None, n_cells, scale, torch.float32),
        place.kernels.splat_atomic(feat, flat, scale, n_cells, torch.float32),
    ):
        assert torch.isnan(out).any(1).nonzero().flatten().tolist() == [4]
    by_w, by_feat = place.kernels.splat_backward(grad, feat, flat, scale, True, True)
    assert not torch.isnan(by_w).any() and torch.isnan(by_feat).any(1).nonzero().flatten().tolist() == [0]
    feat[0] = torch.nan  # of a pixel with dropped depths: their gradients stay 0
    by_w, _ = place.kernels.splat_backward(grad, feat, flat, scale, True, True)
    assert by_w[0, 0, 0, 0, 0] == 0 and torch.isnan(by_w[0, 0, 1, 0, 0])


def test_tiled_in_small_pieces(monkeypatch):
    """Chunks of a few rows and of one row give what one chunk gives."""
    case = CASES[0]
    values, n_cells = cases.inputs(case, torch.float64), math.prod(case.shape)
    here = cases.at("tiled")
    scale = cases.scale(here, case, values, True, True, torch.float64)
    feat, grad = (here.tensor(a.reshape(-1, case.channels), torch.float64) for a in (values.feat, values.grad))
    cells = here.tensor(case.cells(), int32)
    items, starts = tiled.make_runs(cells, n_cells, None)
    order, ends = tiled.bucket_sort(cells.reshape(-1), n_cells)
    long = torch.randn(cells.numel(), 3, dtype=torch.float64)

    def everything() -> list[Tensor]:
        by_w, by_feat = tiled.splat_backward(grad, feat, cells, scale, True, True)
        assert by_w is not None and by_feat is not None
        return [
            tiled.segment_sum(feat, items, starts, None, n_cells, scale, torch.float64),
            tiled.splat_atomic(feat, cells, scale, n_cells, torch.float64),
            by_w,
            by_feat,
            tiled.segment_cumsum(long, order, ends, False, torch.float64),
            tiled.segment_cumsum(long, order, ends, True, torch.float64),
            tiled.depth_lse(scale.depth),
        ]

    whole = everything()
    for chunk in (40, 600):
        monkeypatch.setattr(tiled, "CHUNK", chunk)
        for got, want in zip(everything(), whole):
            torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
