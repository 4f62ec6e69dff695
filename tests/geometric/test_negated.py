"""Tensors whose numbers are not those in their memory: torch negates them by a bit, as in ``z.conj().imag``."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from kernops.geometric import BucketPlan, SplatPlan, bucketed_cumsum, bucketed_sum, splat, splat_features
from kernops.geometric.kernels import FUNCTIONS, Scale, by_address
from tests.geometric import cases
from tests.geometric.cases import VARIANTS, At

Tensor = torch.Tensor
CASE = cases.Case("", (2, 1, 3, 2, 4), (1, 3, 2), 5)


@pytest.fixture(params=cases.BACKENDS)
def place(request: pytest.FixtureRequest) -> At:
    return cases.at(request.param)


def negated(t: Tensor, contiguous: bool) -> Tensor:
    """Another tensor of the same numbers, with the bit."""
    if not contiguous:
        return torch.complex(torch.zeros_like(t), -t).conj().imag.detach().requires_grad_(t.requires_grad)
    out = torch._neg_view((-t).detach()).requires_grad_(t.requires_grad)
    assert out.is_contiguous()
    return out


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("logits", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_splat(place: At, variant: str, logits: bool, contiguous: bool) -> None:
    cells = place.tensor(CASE.cells(), torch.int32)
    plan = SplatPlan.from_cells(cells, CASE.shape, variant=variant, backend=place.backend)
    depth, feat, weight, g = (place.tensor(a, torch.float64) for a in cases.inputs(CASE, torch.float64))
    found: list[list[Tensor]] = []
    for change in (lambda t: t, lambda t: negated(t, contiguous)):
        given = [change(t).detach().requires_grad_() for t in (depth, feat, weight)]
        assert all(t.is_neg() for t in given) == (found != [])
        out = splat(given[0], given[1], plan, weight=given[2], depth_logits=logits)
        found.append([out, *torch.autograd.grad(out, given, change(g).permute(0, 4, 1, 2, 3))])
    for got, want in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("contiguous", [False, True])
def test_sums_by_bucket(place: At, contiguous: bool) -> None:
    labels = place.tensor([2, 0, 2, -1, 1, 2], torch.int64)
    plan = BucketPlan(labels, 3, backend=place.backend)
    values = place.tensor(
        [[1.0, 2.0], [3.0, 5.0], [7.0, 11.0], [13.0, 17.0], [19.0, 23.0], [29.0, 31.0]], torch.float64
    )
    other = negated(values, contiguous)
    assert other.is_neg() and torch.equal(bucketed_sum(other, plan), bucketed_sum(values, plan))
    assert bucketed_sum(other, plan).tolist() == [[3.0, 5.0], [19.0, 23.0], [37.0, 44.0]]
    assert bucketed_cumsum(other, plan).tolist() == bucketed_cumsum(values, plan).tolist()
    leaf = values.clone().requires_grad_()
    g = place.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], torch.float64)
    (grad,) = torch.autograd.grad(bucketed_sum(leaf, plan), leaf, negated(g, contiguous))
    assert grad.tolist() == [[5.0, 6.0], [1.0, 2.0], [5.0, 6.0], [0.0, 0.0], [3.0, 4.0], [5.0, 6.0]]
    turned = torch._neg_view(-labels)
    assert torch.equal(BucketPlan(turned, 3, backend=place.backend).buckets, plan.buckets)


def test_splat_of_features_that_are_there(place: At) -> None:
    cells = place.tensor(CASE.cells(), torch.int32)
    plan = SplatPlan.from_cells(cells, CASE.shape, backend=place.backend)
    x = torch.rand(*cells.shape, 3, dtype=torch.float64, device=place.device)
    torch.testing.assert_close(splat_features(negated(x, True), plan), splat_features(x, plan), rtol=1e-14, atol=0)


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_every_kernel_that_reads_addresses(backend: str) -> None:
    module = importlib.import_module(f"kernops.geometric.kernels.{backend}")
    for name in set(FUNCTIONS) - {"available"}:
        assert hasattr(getattr(module, name), "__wrapped__"), name


def test_arguments_of_every_kind() -> None:
    seen: list[Any] = []
    t = torch._neg_view(torch.ones(2))
    by_address(lambda *args, **named: seen.extend([*args, *named.values()]))(
        t, None, 3, Scale("runs", t, None, t, 1, 1), work=t
    )
    tensors = [seen[0], seen[3].depth, seen[3].lse, seen[4]]
    assert all(not x.is_neg() and x.tolist() == [-1.0, -1.0] for x in tensors)
    assert seen[1:3] == [None, 3] and seen[3].weight is None
