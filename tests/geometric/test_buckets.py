"""Sums by bucket from the front: values of any shape, bad input, gradients, copies."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernops.geometric import BucketPlan, bucketed_cumsum, bucketed_sum
from kernops.geometric import levels as front
from tests.geometric import cases
from tests.geometric.cases import DTYPES, At, close

Tensor = torch.Tensor


@pytest.fixture(params=cases.BACKENDS)
def place(request: pytest.FixtureRequest) -> At:
    return cases.at(request.param)


def make(place: At, buckets: np.ndarray, n_buckets: int) -> BucketPlan:
    return BucketPlan(torch.as_tensor(buckets, device=place.device), n_buckets, backend=place.backend)


# --- values -----------------------------------------------------------------------------------------------------------
def check(
    place: At, buckets: np.ndarray, n_buckets: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int
) -> None:
    """Both functions on values of a shape whose items stand in axis -2 (or alone), against NumPy."""
    plan = make(place, buckets, n_buckets)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    items = np.moveaxis(values.double().numpy(), -2 if len(shape) > 1 else 0, 0)
    there = values.to(place.device)

    def axes(a: np.ndarray) -> np.ndarray:
        return np.moveaxis(a, 0, -2 if len(shape) > 1 else 0)

    sums, terms = (axes(cases.bucket_sums(v, buckets, n_buckets)) for v in (items, np.abs(items)))
    got = bucketed_sum(there, plan)
    assert got.dtype == dtype and got.device == there.device
    close(got, sums, terms)
    for reverse in (False, True):
        prefixes, terms = (axes(cases.bucket_cumsums(v, buckets, n_buckets, reverse)) for v in (items, np.abs(items)))
        got = bucketed_cumsum(there, plan, reverse=reverse)
        assert got.dtype == dtype and got.shape == there.shape
        close(got, prefixes, terms)


@settings(deadline=None, max_examples=60)
@given(
    data=st.data(),
    n=st.integers(0, 40),
    n_buckets=st.integers(0, 12),
    lead=st.lists(st.integers(0, 3), max_size=2),
    channels=st.one_of(st.none(), st.integers(0, 9)),
    dtype=st.sampled_from(DTYPES),
    index=st.sampled_from([torch.int8, torch.int16, torch.int32, torch.int64]),
)
@pytest.mark.parametrize("backend", ["tiled", "cpu"])
def test_shapes(backend, data, n, n_buckets, lead, channels, dtype, index):
    place = cases.at(backend)
    buckets = np.array(data.draw(st.lists(st.integers(-3, n_buckets - 1), min_size=n, max_size=n)), int)
    shape = (n,) if channels is None else (*lead, n, channels)
    plan = BucketPlan(torch.as_tensor(buckets).to(index), n_buckets, backend=backend)
    assert plan.counts().tolist() == np.bincount(buckets[buckets >= 0], minlength=n_buckets).tolist()
    assert plan.buckets.tolist() == np.maximum(buckets, -1).tolist()
    kept = cases.sorted_order(buckets).tolist()
    assert plan.order[: len(kept)].tolist() == kept
    check(place, buckets, n_buckets, shape, dtype, n)


@pytest.mark.parametrize("name", cases.LABELS)
def test_labels(place: At, name: str):
    buckets, n_buckets = cases.labels(name)
    check(place, buckets, n_buckets, (len(buckets), 3), torch.float32, 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_buckets_are_split(place: At, dtype: torch.dtype, monkeypatch):
    """In pieces whatever their number; and the default kicks in where one bucket is very long."""
    buckets, n_buckets = cases.labels("sorted, with a long one")
    assert len(make(place, buckets, n_buckets).levels) == 2
    assert len(make(place, *cases.labels("few")).levels) == 1
    monkeypatch.setattr(front, "LONG", 2)
    monkeypatch.setattr(front, "PIECE", 3)
    for name in ("few", "one bucket", "all left out", "empty buckets"):
        buckets, n_buckets = cases.labels(name)
        assert len(make(place, buckets, n_buckets).levels) == (1 if name == "all left out" else 2)
        check(place, buckets, n_buckets, (len(buckets), 4), dtype, 1)


def test_a_million_ones_in_float16(place: At):
    """Float32 accumulates: a float16 sum would stop at 2048."""
    plan = make(place, np.zeros(60_000, int), 2)
    ones = torch.ones(60_000, device=place.device, dtype=torch.float16)
    assert bucketed_sum(ones, plan).tolist() == [60_000, 0]
    assert bucketed_cumsum(ones, plan)[[0, 4095, 59_999]].tolist() == [1, 4096, 60_000]


@pytest.mark.parametrize("layout", ["transposed", "step 2", "expanded", "batch last"])
def test_strides(place: At, layout: str):
    buckets, n_buckets = cases.labels("few")
    n, plan = len(buckets), make(place, *cases.labels("few"))
    values = {
        "transposed": lambda: torch.rand(6, n).T,
        "step 2": lambda: torch.rand(2 * n, 12)[::2, ::2],
        "expanded": lambda: torch.rand(n, 1).expand(n, 6),
        "batch last": lambda: torch.rand(n, 6, 3).permute(2, 0, 1),
    }[layout]()
    assert not values.is_contiguous()
    values = values.to(place.device)
    assert torch.equal(bucketed_sum(values, plan), bucketed_sum(values.contiguous(), plan))
    assert torch.equal(bucketed_cumsum(values, plan), bucketed_cumsum(values.contiguous(), plan))


def test_a_batch_is_its_elements(place: At):
    plan, values = make(place, *cases.labels("few")), torch.rand(2, 3, 40, 5).to(place.device)
    for function in (bucketed_sum, bucketed_cumsum):
        want = torch.stack([torch.stack([function(v, plan) for v in vs]) for vs in values])
        torch.testing.assert_close(function(values, plan), want, rtol=1e-6, atol=1e-6)


# --- gradients --------------------------------------------------------------------------------------------------------
def test_gradients(place: At):
    plan = make(place, np.array([2, 0, -1, 2, 2, 0]), 4)
    for shape in ((6,), (6, 3), (2, 6, 2)):
        values = torch.randn(shape, dtype=torch.float64, device=place.device, requires_grad=True)
        for function in (
            lambda v: bucketed_sum(v, plan),
            lambda v: bucketed_cumsum(v, plan),
            lambda v: bucketed_cumsum(v, plan, reverse=True),
        ):
            assert torch.autograd.gradcheck(function, values)
            assert torch.autograd.gradgradcheck(lambda v, f=function: f(v).sin(), values)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_have_the_dtype_of_the_values(place: At, dtype: torch.dtype):
    plan = make(place, np.array([2, 0, -1, 2]), 3)
    values = torch.ones((4, 2), dtype=dtype, device=place.device, requires_grad=True)
    (grad,) = torch.autograd.grad(bucketed_sum(values, plan).sum(), values)
    assert grad.dtype == dtype and grad[:, 0].tolist() == [1, 1, 0, 1]
    (grad,) = torch.autograd.grad(bucketed_cumsum(values, plan).sum(), values)
    assert grad.dtype == dtype and grad[:, 0].tolist() == [2, 1, 0, 1]


# --- the plan ---------------------------------------------------------------------------------------------------------
def test_copies(place: At):
    plan = make(place, *cases.labels("sorted, with a long one"))
    values = torch.rand(plan.n, 2).to(place.device)
    want = bucketed_sum(values, plan)
    for other in (pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan), copy.copy(plan)):
        assert torch.equal(bucketed_sum(values, other), want)
    assert plan.to(place.device) is plan
    meta = plan.to("meta")
    assert meta.device.type == "meta" and all(t.device.type == "meta" for level in meta.levels for t in level[:2])
    assert repr(plan).startswith("BucketPlan(40104 items, 6 buckets, on ")


def test_the_labels_are_copied_or_left_alone():
    labels = torch.tensor([0, 5, -4], dtype=torch.int32)
    plan = BucketPlan(labels, 6)
    labels.zero_()
    assert plan.buckets.tolist() == [0, 5, -1]


def test_threads(place: At):
    """Many calls of several plans at once give what they give one by one."""
    plans = [make(place, *cases.labels(name)) for name in ("few", "many", "sorted, with a long one", "each its own")]
    values = [torch.rand(plan.n, 7).to(place.device) for plan in plans]

    def both(k: int) -> list[Tensor]:
        return [f(values[k % 4], plans[k % 4]) for f in (bucketed_sum, bucketed_cumsum)]

    want = [both(k) for k in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for k, found in enumerate(pool.map(both, range(24))):
            assert all(map(torch.equal, found, want[k % 4]))


# --- bad input --------------------------------------------------------------------------------------------------------
BAD_PLANS = {
    "float labels": (lambda: BucketPlan(torch.zeros(3), 3), TypeError, "buckets must be a tensor of integers.*float32"),
    "bool labels": (lambda: BucketPlan(torch.zeros(3, dtype=torch.bool), 3), TypeError, "integers.*got bool"),
    "a list": (lambda: BucketPlan(cast(Any, [0, 1]), 3), TypeError, "must be a torch.Tensor of integers; got list"),
    "a matrix": (lambda: BucketPlan(torch.zeros(3, 2).int(), 3), ValueError, r"shape \(n,\); got \(3, 2\)"),
    "too large": (lambda: BucketPlan(torch.tensor([0, 7, 2]), 7), ValueError, "less than n_buckets = 7 .*largest is 7"),
    "beyond int32": (lambda: BucketPlan(torch.tensor([2**32]), 7), ValueError, "the largest is 4294967296"),
    "far beyond int8": (lambda: BucketPlan(torch.tensor([200], dtype=torch.uint8), 7), ValueError, "largest is 200"),
    "a float number": (lambda: BucketPlan(torch.tensor([0]), cast(Any, 7.0)), TypeError, "must be an integer; got 7.0"),
    "a negative number": (lambda: BucketPlan(torch.tensor([0]), -1), ValueError, "n_buckets must be in .*got -1"),
    "too many buckets": (lambda: BucketPlan(torch.tensor([0]), 2**31), ValueError, "n_buckets must be in"),
    "too many items": (
        lambda: BucketPlan(torch.zeros(1, dtype=torch.int64).expand(2**31), 1), ValueError, "has 2147483648 items",
    ),
    "no such back end": (lambda: BucketPlan(torch.tensor([0]), 1, backend="sycl"), ValueError, "got 'sycl'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_PLANS)
def test_bad_plans(name: str):
    call, error, message = BAD_PLANS[name]
    with pytest.raises(error, match=message):
        call()


BAD_VALUES = {
    "integers": (torch.zeros(3, 2, dtype=torch.int64), TypeError, "values must be float16, .* got int64"),
    "a list": ([1.0, 2.0, 3.0], TypeError, "values must be a torch.Tensor; got list"),
    "too few": (torch.zeros(2), ValueError, r"\(3,\) or \(..., 3, C\) for a plan of 3 items; got \(2,\)"),
    "items in front": (torch.zeros(3, 5, 2), ValueError, r"got \(3, 5, 2\)"),
    "a number": (torch.tensor(1.0), ValueError, r"got \(\)"),
    "elsewhere": (torch.zeros(3, device="meta"), ValueError, "values are on meta, the plan on cpu"),
}


@pytest.mark.parametrize("function", [bucketed_sum, bucketed_cumsum])
@pytest.mark.parametrize("name", BAD_VALUES)
def test_bad_values(name: str, function):
    values, error, message = BAD_VALUES[name]
    with pytest.raises(error, match=message):
        function(values, BucketPlan(torch.tensor([0, 1, 0]), 2))


def test_a_plan_of_another_kind():
    with pytest.raises(TypeError, match="plan must be a BucketPlan; got Tensor"):
        bucketed_sum(torch.zeros(3), cast(Any, torch.zeros(3)))
