"""Gradients on the GPU against float64 torch: several in one pass, of one or many components, in chunks and splits."""

from __future__ import annotations

import pytest
import torch

from kernops.autograd import reduce
from kernops.formula.graph import CAT_I, CAT_J, CAT_P, var
from kernops.formula.ops import apply, mul, neg
from kernops.formula.plan import Plan, make_plan

Tensor = torch.Tensor


def gaussian(d: int, e: int) -> Plan:
    square = apply("SqDist", var(CAT_I, 0, d), var(CAT_J, 1, d))
    return make_plan("Sum", mul(apply("Exp", neg(mul(var(CAT_P, 3, 1), square))), var(CAT_J, 2, e)))


def gradients(value: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    g = torch.linspace(0.5, 1.5, value.numel(), dtype=value.dtype, device=value.device).reshape(value.shape)
    return [value, *torch.autograd.grad(value, inputs, g)]


@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("d", "e"), [(3, 1), (7, 1), (3, 5), (16, 1), (3, 20), (1, 1)])
def test_value_and_all_gradients(d: int, e: int, dtype: torch.dtype, batch: tuple[int, ...]) -> None:
    plan = gaussian(d, e)
    for m, n in ((1, 3), (130, 257), (300, 5000), (6000, 1500)):
        generator = torch.Generator("cuda").manual_seed(m)
        shapes = ((*batch, m, d), (n, d), (*batch, n, e), (1,))
        values = [torch.rand(s, generator=generator, device="cuda", dtype=dtype).requires_grad_() for s in shapes]
        exact = [t.detach().double().requires_grad_() for t in values]
        got = gradients(reduce(plan, values, m, n)[0], values)
        x, y, b, s = exact
        distances = torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")
        want = gradients((-s * distances.square()).exp() @ b, exact)
        for first, second in zip(got, want, strict=True):
            assert first.shape == second.shape and first.is_contiguous()
            rounding = 2e-6 if dtype == torch.float32 else 1e-12
            assert (first.double() - second).norm() <= rounding * second.norm(), (m, n)
        again = gradients(reduce(plan, values, m, n)[0], values)
        assert all(map(torch.equal, got, again)), "the same call gives the same bits"


def test_batched_cotangents() -> None:
    """The backward pass runs on a thread of autograd's."""
    plan = gaussian(3, 1)
    values = [torch.rand(s, device="cuda").requires_grad_() for s in ((50, 3), (60, 3), (60, 1), (1,))]
    (out,) = reduce(plan, values, 50, 60)
    many = torch.rand(4, 50, 1, device="cuda")
    got = torch.autograd.grad(out, values, many, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(out, values, g, retain_graph=True) for g in many]
    for first, second in zip(got, map(torch.stack, zip(*each)), strict=True):
        torch.testing.assert_close(first, second)
