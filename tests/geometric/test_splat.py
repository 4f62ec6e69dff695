"""``splat`` and ``splat_features``: every variant on every back end against float64; derivatives, memory, bad input."""

from __future__ import annotations

import doctest
import importlib
import math
import pickle
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kernops.geometric import BEVGrid, SplatPlan, frustum, nuscenes_rig, splat, splat_features
from kernops.geometric.calls import TABLE
from kernops.geometric.kernels import tiled
from tests.geometric import cases
from tests.geometric.cases import CASES, DTYPES, VARIANTS, At, Case, close

Tensor = torch.Tensor
f64 = torch.float64


@pytest.fixture(params=cases.BACKENDS)
def place(request: pytest.FixtureRequest) -> At:
    return cases.at(request.param)


def plan_of(place: At, case: Case, variant: str = "cumsum") -> SplatPlan:
    cells = place.tensor(case.cells(), torch.int32)
    return SplatPlan.from_cells(cells, case.shape, variant=variant, backend=place.backend)


def tensors(place: At, case: Case, dtype: torch.dtype, grad: bool = False) -> list[Tensor]:
    """depth, feat, weight and the gradient by the result (B, C, Z, Y, X)."""
    *given, g = (place.tensor(a, dtype) for a in cases.inputs(case, dtype))
    return [*(t.requires_grad_(grad) for t in given), g.permute(0, 4, 1, 2, 3)]


def check(place: At, case: Case, variant: str, dtype: torch.dtype, weighted: bool, logits: bool) -> None:
    """The result and all gradients."""
    plan, (depth, feat, weight, g) = plan_of(place, case, variant), tensors(place, case, dtype, True)
    out = splat(depth, feat, plan, weight=weight if weighted else None, depth_logits=logits)
    values = cases.inputs(case, dtype)
    given = (case.cells(), values.depth, values.feat, values.weight if weighted else None, logits, values.grad)
    want, terms = (cases.splat(case, *given, magnitude=m) for m in (False, True))
    assert out.dtype == dtype and out.permute(0, 2, 3, 4, 1).is_contiguous()
    close(out.permute(0, 2, 3, 4, 1), want.out, terms.out)
    wanted = [depth, feat, weight] if weighted else [depth, feat]
    for name, t, got in zip(("depth", "feat", "weight"), wanted, torch.autograd.grad(out, wanted, g)):
        assert got.dtype == dtype and got.shape == t.shape
        # The kernels' dot products are rounded to the dtype before weights and the softmax's Jacobian act on them.
        rounded, factor = (None, 32) if name == "feat" else (dtype, 4 if dtype.itemsize == 2 else 32)
        close(got, getattr(want, name), getattr(terms, name), rounded, factor)


@pytest.mark.parametrize("weighted, logits", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_values_and_gradients(place: At, variant: str, dtype: torch.dtype, weighted: bool, logits: bool):
    for case in CASES:
        check(place, case, variant, dtype, weighted, logits)


@pytest.mark.parametrize("channels", [2, 3, 4, 7, 16, 17, 31, 33, 65, 96, 127, 128, 255, 300])
def test_channels(place: At, channels: int):
    case = Case("", (1, 2, 5, 3, 4), (1, 5, 6), channels)
    for dtype in (torch.float32, torch.float16):
        check(place, case, "cumsum", dtype, False, False)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_real_rig(place: At, variant: str):
    """Against torch's lift and index_add in float64."""
    rig = nuscenes_rig().resized(scale=0.44, crop=(140, 0))
    grid = BEVGrid((-51.2, 51.2, 0.8), (-51.2, 51.2, 0.8), (-5.0, 3.0, 8.0))
    points = frustum((256, 704), (8, 22), dbound=(1.0, 60.0, 1.0))
    plan = SplatPlan(rig, points, grid, variant=variant, backend=place.backend, device=place.device)
    generator = torch.Generator().manual_seed(0)
    depth = torch.rand(plan.cells.shape, generator=generator).to(place.device)
    feat = torch.randn((1, 6, 8, 22, 24), generator=generator).to(place.device)
    lifted = (depth[..., None].double() * feat[:, :, None].double()).reshape(-1, 24)
    kept = plan.cells.flatten() >= 0
    want = torch.zeros(128 * 128, 24, dtype=f64, device=place.device)
    want.index_add_(0, plan.cells.flatten()[kept].long(), lifted[kept])
    got = splat(depth, feat, plan)[0, :, 0].permute(1, 2, 0).reshape(-1, 24)
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=2e-5)


# --- derivatives ------------------------------------------------------------------------------------------------------
TINY = Case("tiny", (2, 1, 3, 1, 2), (2, 2, 2), 2)


@pytest.mark.parametrize("weighted, logits", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradcheck(place: At, variant: str, weighted: bool, logits: bool):
    plan, (depth, feat, weight, _) = plan_of(place, TINY, variant), tensors(place, TINY, f64, True)

    def function(depth: Tensor, feat: Tensor, *weight: Tensor) -> Tensor:
        return splat(depth, feat, plan, weight=weight[0] if weight else None, depth_logits=logits)

    given = (depth, feat, weight) if weighted else (depth, feat)
    assert torch.autograd.gradcheck(function, given, nondet_tol=1e-12)
    assert torch.autograd.gradgradcheck(function, given, nondet_tol=1e-12)


def test_third_derivatives(place: At):
    """Of a function of one number, through splats of its multiples: L(t) = (t^2 d) . (t^3 f) grows as t^5."""
    plan, (depth, feat, _, g) = plan_of(place, TINY), tensors(place, TINY, f64)
    t = torch.tensor(1.3, dtype=f64, device=place.device, requires_grad=True)
    value = (splat(t**2 * depth, t**3 * feat, plan) * g).sum()
    once = (splat(depth, feat, plan) * g).sum().item()
    for k in range(1, 5):
        (value,) = torch.autograd.grad(value, t, create_graph=True)
        assert value.item() == pytest.approx(once * math.prod(range(6 - k, 6)) * 1.3 ** (5 - k), rel=1e-10)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2), (0, 1)])
@pytest.mark.parametrize("create_graph", [False, True])
def test_only_what_is_asked_for(place: At, wanted: tuple[int, ...], create_graph: bool, monkeypatch):
    given = tensors(place, TINY, f64, True)[:3]
    plan, g = plan_of(place, TINY), tensors(place, TINY, f64)[3]
    full = torch.autograd.grad(splat(given[0], given[1], plan, weight=given[2]), given, g)
    for k in range(3):
        given[k].requires_grad_(k in wanted)
    asked = []
    real = place.kernels.splat_backward

    def watched(*args):
        asked.append(args[4:])
        return real(*args)

    monkeypatch.setattr(place.kernels, "splat_backward", watched)
    out = splat(given[0], given[1], plan, weight=given[2])
    found = torch.autograd.grad(out, [given[k] for k in wanted], g, create_graph=create_graph)
    assert asked == [(0 in wanted or 2 in wanted, 1 in wanted)]
    for k, got in zip(wanted, found):
        torch.testing.assert_close(got, full[k])


@pytest.mark.parametrize("logits", [False, True])
def test_first_derivatives_are_the_same_with_a_graph(place: At, logits: bool):
    plan, (depth, feat, weight, g) = plan_of(place, CASES[0]), tensors(place, CASES[0], f64, True)
    out = splat(depth, feat, plan, weight=weight, depth_logits=logits)
    fused = torch.autograd.grad(out, (depth, feat, weight), g, retain_graph=True)
    composed = torch.autograd.grad(out, (depth, feat, weight), g, create_graph=True)
    for a, b in zip(fused, composed):
        torch.testing.assert_close(a, b)


def test_gradient_of_nothing(place: At):
    """A result that does not matter, and one that matters through another splat alone."""
    plan, (depth, feat, _, g) = plan_of(place, TINY), tensors(place, TINY, f64, True)
    out = splat(depth, feat, plan)
    (grad,) = torch.autograd.grad(out * 0, depth, g, retain_graph=True)
    assert (grad == 0).all()
    by_depth, by_feat = torch.autograd.grad(out, (depth, feat), g, create_graph=True)
    (second,) = torch.autograd.grad(by_depth.sum(), feat, retain_graph=True)
    assert second.abs().sum() > 0
    (second,) = torch.autograd.grad(by_feat.sum(), feat, allow_unused=True)
    assert second is None or (second == 0).all()


def test_splat_features(place: At):
    for case in CASES:
        for dtype in DTYPES:
            plan, values = plan_of(place, case, "atomic"), cases.inputs(case, dtype)
            lifted = (values.depth[..., None] * values.feat[:, :, None]).astype(np.float32)
            x = place.tensor(lifted, dtype).requires_grad_()
            out = splat_features(x, plan)
            rows = x.detach().double().cpu().numpy().reshape(-1, case.channels)
            flat, n_cells = case.cells().reshape(-1), math.prod(case.shape)
            want, terms = (cases.bucket_sums(v, flat, n_cells) for v in (rows, np.abs(rows)))
            assert out.dtype == dtype
            close(out.permute(0, 2, 3, 4, 1).reshape(n_cells, -1), want, terms)
            g = tensors(place, case, dtype)[3]
            (grad,) = torch.autograd.grad(out, x, g)
            kept = case.cells() >= 0
            assert (grad[~torch.as_tensor(kept)] == 0).all() if not kept.all() else True
            assert np.array_equal(
                grad.double().cpu().numpy()[kept], values.grad.reshape(n_cells, -1)[case.cells()[kept]]
            )


def test_splat_features_is_splat(place: At):
    plan, (depth, feat, _, _) = plan_of(place, CASES[0]), tensors(place, CASES[0], f64)
    torch.testing.assert_close(splat_features(depth[..., None] * feat[:, :, None], plan), splat(depth, feat, plan))
    x = torch.randn((*TINY.points, 2), dtype=f64, device=place.device, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: splat_features(x, plan_of(place, TINY)).sin(), x)


# --- invariances ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("variant", VARIANTS)
def test_same_bits_twice(place: At, variant: str):
    if variant == "atomic" and place.device.type == "cuda":
        pytest.skip("the order of atomic additions is not fixed")
    case = CASES[2]
    plan, (depth, feat, weight, g) = plan_of(place, case, variant), tensors(place, case, torch.float32, True)

    def everything() -> list[Tensor]:
        out = splat(depth, feat, plan, weight=weight, depth_logits=True)
        return [out, *torch.autograd.grad(out, (depth, feat, weight), g)]

    assert all(map(torch.equal, everything(), everything()))


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_order_of_cameras_does_not_matter(place: At, variant: str):
    case = CASES[0]
    depth, feat, _, _ = tensors(place, case, torch.float32)
    cells = place.tensor(case.cells(), torch.int32)
    order = torch.tensor([2, 0, 1], device=place.device)
    plans = [
        SplatPlan.from_cells(c, case.shape, variant=variant, backend=place.backend) for c in (cells, cells[:, order])
    ]
    want = splat(depth, feat, plans[0])
    torch.testing.assert_close(splat(depth[:, order], feat[:, order], plans[1]), want, rtol=1e-5, atol=1e-5)


def test_layouts_of_the_inputs(place: At):
    """Any strides; features in channels-last memory are used where they lie."""
    case = CASES[2]
    b, n, d, h, w = case.points
    plan, (depth, feat, _, _) = plan_of(place, case), tensors(place, case, torch.float32)
    want = splat(depth, feat, plan)
    net_output = feat.permute(0, 1, 4, 2, 3).reshape(b * n, -1, h, w).contiguous(memory_format=torch.channels_last)
    view = net_output.view(b, n, -1, h, w).permute(0, 1, 3, 4, 2)
    assert view.is_contiguous() and view.data_ptr() == net_output.data_ptr()
    layouts = [view, feat.transpose(2, 3).contiguous().transpose(2, 3), torch.stack([feat, feat], -1)[..., 0]]
    deep = depth.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    for f in layouts:
        assert torch.equal(splat(depth, f, plan), want)
        assert torch.equal(splat(deep, f, plan, weight=torch.ones_like(deep)), want)
    ones = torch.ones(1, device=place.device).expand(case.points)
    assert torch.equal(splat(ones, feat, plan), splat(ones.contiguous(), feat, plan))


def test_threads(place: At):
    """Many splats of several plans at once, forward and backward, give what they give one by one."""
    plans = [plan_of(place, case) for case in CASES[:3]]
    given = [tensors(place, case, torch.float32, True) for case in CASES[:3]]

    def one(k: int) -> list[Tensor]:
        depth, feat, weight, g = given[k % 3]
        out = splat(depth, feat, plans[k % 3], weight=weight, depth_logits=True)
        return [out, *torch.autograd.grad(out, (depth, feat, weight), g)]

    want = [one(k) for k in range(3)]
    with ThreadPoolExecutor(2) as pool:
        for k, found in enumerate(pool.map(one, range(18))):
            assert all(map(torch.equal, found, want[k % 3]))


# --- special values ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("variant", VARIANTS)
def test_nan_depth_reaches_its_cells_alone(place: At, variant: str):
    case = CASES[0]
    plan, (depth, feat, _, _) = plan_of(place, case, variant), tensors(place, case, torch.float32)
    want = splat(depth, feat, plan)
    kept, dropped = (int(mask.nonzero()[5]) for mask in (plan.cells.flatten() >= 0, plan.cells.flatten() < 0))
    depth.view(-1)[[kept, dropped]] = torch.nan
    got = splat(depth, feat, plan).permute(0, 2, 3, 4, 1).reshape(-1, case.channels)
    touched = torch.zeros(len(got), dtype=torch.bool, device=place.device)
    touched[plan.cells.flatten()[kept]] = True
    assert torch.equal(torch.isnan(got).all(1), touched)
    others = got[~touched], want.permute(0, 2, 3, 4, 1).reshape(-1, case.channels)[~touched]
    if variant == "atomic" and place.device.type == "cuda":  # the order of its additions is not the same twice
        torch.testing.assert_close(*others)
    else:
        assert torch.equal(*others)


def test_masked_logits(place: At):
    """-inf is a depth that is not possible: no weight, no gradient, no NaN."""
    case = CASES[0]
    plan, (logits, feat, _, g) = plan_of(place, case), tensors(place, case, f64)
    logits[:, :, 1:3] = -torch.inf
    logits.requires_grad_()
    out = splat(logits, feat, plan, depth_logits=True)
    torch.testing.assert_close(out, splat(logits.softmax(2), feat, plan))
    (grad,) = torch.autograd.grad(out, logits, g)
    (want,) = torch.autograd.grad(splat(logits.softmax(2), feat, plan), logits, g)
    assert (grad[:, :, 1:3] == 0).all()
    torch.testing.assert_close(grad, want)


@pytest.mark.parametrize("points", [(1, 0, 3, 2, 2), (1, 2, 0, 2, 2), (1, 2, 3, 0, 2), (0, 2, 3, 2, 2)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_no_points(place: At, variant: str, points: tuple[int, int, int, int, int]):
    b, n, _, h, w = points
    cells = torch.zeros(points, dtype=torch.int32, device=place.device)
    plan = SplatPlan.from_cells(cells, (b, 1, 4, 3), variant=variant, backend=place.backend)
    depth = torch.rand(points, device=place.device, requires_grad=True)
    feat = torch.rand((b, n, h, w, 6), device=place.device, requires_grad=True)
    for logits in (False, True):
        out = splat(depth, feat, plan, depth_logits=logits)
        assert out.shape == (b, 6, 1, 4, 3) and (out == 0).all()
        grads = torch.autograd.grad(out.sum(), (depth, feat))
        assert grads[0].shape == depth.shape and grads[1].shape == feat.shape and not grads[1].any()
    assert splat_features(depth[..., None], plan).shape == (b, 1, 1, 4, 3)


def test_no_channels_and_no_cells(place: At):
    plan = plan_of(place, TINY)
    b, n, _, h, w = TINY.points
    assert (
        splat(torch.ones(TINY.points).to(place.device), torch.ones((b, n, h, w, 0)).to(place.device), plan).numel() == 0
    )
    none = torch.full((1, 1, 2, 2, 2), -1).to(place.device)
    plan = SplatPlan.from_cells(none, (1, 0, 4, 4), backend=place.backend)
    out = splat(torch.ones((1, 1, 2, 2, 2)).to(place.device), torch.ones((1, 1, 2, 2, 3)).to(place.device), plan)
    assert out.shape == (1, 3, 0, 4, 4)


def test_prescale(place: At):
    """A power of two changes no bit of a float32 result; in float16 it is right too, and loses nothing."""
    case = CASES[2]
    plan, (depth, feat, _, _) = plan_of(place, case), tensors(place, case, torch.float32)
    assert torch.equal(splat(depth, feat, plan, prescale=2.0**10), splat(depth, feat, plan))
    torch.testing.assert_close(splat(depth, feat, plan, prescale=3), splat(depth, feat, plan), rtol=1e-5, atol=1e-5)
    small = (feat * 2.0**-14).half()  # half of them subnormal
    want = splat(depth.half().double(), small.double(), plan_of(place, case))
    for prescale in (None, 2.0**10):
        got = splat(depth.half(), small, plan, prescale=prescale)
        assert (
            got.dtype == torch.float16 and (got.double() - want).abs().max() <= 2.0**-24 + want.abs().max() * 2.0**-11
        )


# --- memory -----------------------------------------------------------------------------------------------------------
class Largest(TorchDispatchMode):
    """The most numbers of a tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers, self.operation = 0, ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and t.untyped_storage().nbytes() // t.itemsize > self.numbers:
                self.numbers, self.operation = t.untyped_storage().nbytes() // t.itemsize, str(func)
        return out


@pytest.mark.parametrize("logits", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_no_frustum_sized_tensor(place: At, variant: str, logits: bool, monkeypatch):
    monkeypatch.setattr(tiled, "CHUNK", 1 << 12)
    case = Case("", (1, 2, 40, 8, 8), (1, 16, 16), 64)
    plan, (depth, feat, weight, g) = plan_of(place, case, variant), tensors(place, case, torch.float32)
    how = (weight, plan.cells, plan._flat, plan.shape, variant, place.backend, logits)
    grad = g.permute(0, 2, 3, 4, 1)
    with Largest() as seen:
        TABLE["bev_pool"].compute(depth, feat, *how)
        TABLE["bev_pool_backward"].compute(grad, depth, feat, *how, (True, True, True))
    # A histogram keeps a row for each column's cells: here, where neighbours share none, a third of the points' number.
    share = 2 if variant == "histogram" else 10
    assert seen.numbers < math.prod(case.points) * case.channels / share, seen.operation


# --- the rig ----------------------------------------------------------------------------------------------------------
def test_another_calibration_warns():
    rig = nuscenes_rig().resized(scale=0.44, crop=(140, 0))
    other = rig.with_augmentation(bda=[[1, 0, 0], [0, -1, 0], [0, 0, 1]])
    points, grid = frustum((256, 704), (2, 3), dbound=(1.0, 9.0, 2.0)), BEVGrid((-8, 8, 1), (-8, 8, 1), (-5, 3, 8))
    plan = SplatPlan(rig, points, grid, backend="tiled")
    depth, feat = torch.rand(1, 6, 4, 2, 3), torch.rand(1, 6, 2, 3, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        splat(depth, feat, plan, rig=rig)
        splat(depth, feat, plan, rig=pickle.loads(pickle.dumps(rig)))
        splat(depth, feat, SplatPlan.from_cells(plan.cells, plan.shape), rig=other)
    with pytest.warns(UserWarning, match="another calibration than the rig") as caught:
        splat(depth, feat, plan, rig=other)
    assert caught[0].filename == __file__
    plan.refresh(other)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        splat(depth, feat, plan, rig=other)


@pytest.mark.parametrize("name", ["buckets", "plan", "splat"])
def test_examples(name: str):
    done = doctest.testmod(importlib.import_module(f"kernops.geometric.{name}"))
    assert done.attempted and not done.failed


# --- bad input --------------------------------------------------------------------------------------------------------
def bad_calls() -> dict[str, tuple]:
    case, none, text = TINY, cast(Any, None), cast(Any, "8")
    array = cast(Any, np.zeros(case.points))
    plan, (depth, feat, weight, _) = plan_of(cases.at("tiled"), case), tensors(cases.at("tiled"), case, torch.float32)
    return {
        "no plan": (lambda: splat(depth, feat, none), TypeError, "plan must be a SplatPlan; got NoneType"),
        "array": (lambda: splat(array, feat, plan), TypeError, "depth must be a torch.Tensor; got ndarray"),
        "integer depth": (lambda: splat(depth.int(), feat, plan), TypeError, "depth must be float16, .* got int32"),
        "integer feat": (lambda: splat(depth, feat.long(), plan), TypeError, "feat must be float16, .* got int64"),
        "complex": (lambda: splat(depth, feat.to(torch.complex64), plan), TypeError, "got complex64"),
        "mixed": (lambda: splat(depth, feat.half(), plan), ValueError, "depth is torch.float32, feat is torch.float16"),
        "mixed weight": (lambda: splat(depth, feat, plan, weight=weight.double()), ValueError,
                         "weight is torch.float64, feat is torch.float32"),
        "depth shape": (lambda: splat(depth[:, :, 1:], feat, plan), ValueError,
                        r"depth must have the plan's shape .* \(2, 1, 3, 1, 2\); got \(2, 1, 2, 1, 2\)"),
        "channels first": (lambda: splat(depth, torch.rand(2, 1, 5, 1, 2), plan), ValueError,
                           r"\(B, N, h, w, C\) = \(2, 1, 1, 2, C\), channels last; got \(2, 1, 5, 1, 2\)"),
        "flat feat": (lambda: splat(depth, feat.flatten(1), plan), ValueError, "channels last"),
        "weight shape": (lambda: splat(depth, feat, plan, weight=weight[0]), ValueError, "weight must have the shape"),
        "device": (lambda: splat(depth.to("meta"), feat, plan), ValueError, "depth is on meta, the plan on cpu"),
        "both elsewhere": (lambda: splat(depth.to("meta"), feat.to("meta"), plan), ValueError, "is on meta"),
        "feat elsewhere": (lambda: splat(depth, feat.to("meta"), plan), ValueError, "feat is on meta, the plan on cpu"),
        "prescale 0": (lambda: splat(depth, feat, plan, prescale=0), ValueError, "prescale must be .*; got 0"),
        "prescale text": (lambda: splat(depth, feat, plan, prescale=text), ValueError, "prescale must be .*; got '8'"),
        "prescale nan": (lambda: splat(depth, feat, plan, prescale=math.nan), ValueError, "got nan"),
        "x shape": (lambda: splat_features(torch.rand(2, 1, 3, 1, 2), plan), ValueError,
                    r"x must have shape .* \(2, 1, 3, 1, 2\); got \(2, 1, 3, 1, 2\)"),
        "x dtype": (lambda: splat_features(torch.ones(2, 1, 3, 1, 2, 4).long(), plan), TypeError, "x must be float16"),
        "x device": (lambda: splat_features(torch.rand(2, 1, 3, 1, 2, 4, device="meta"), plan), ValueError, "x is on"),
    }  # fmt: skip


@pytest.mark.parametrize("name", bad_calls())
def test_bad_input(name: str):
    call, error, message = bad_calls()[name]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.slow
def test_more_numbers_than_int32_counts(place: At):
    """Points times channels beyond 2^31, and points times bytes too."""
    points = (1, 1, 2**18, 16, 8)
    cells = torch.arange(2**25, dtype=torch.int32, device=place.device).remainder_(97).reshape(points)
    plan = SplatPlan.from_cells(cells, (1, 1, 1, 97), backend=place.backend, variant="cumsum")
    depth = torch.ones(points, dtype=torch.float32, device=place.device)
    feat = torch.arange(128.0, device=place.device).reshape(1, 1, 16, 8, 1).expand(1, 1, 16, 8, 70).contiguous()
    got = splat(depth, feat, plan)
    assert math.prod(points) * 70 > 2**31
    want = torch.zeros(97, dtype=f64, device=place.device)
    want.index_add_(0, cells.flatten().long(), feat[..., 0].double().expand(1, 1, 2**18, 16, 8)[0].flatten())
    torch.testing.assert_close(got[0, 69, 0, 0].double(), want, rtol=1e-5, atol=0)
    assert torch.equal(got[0, 0], got[0, 69])


# --- where softmax and halves are delicate ----------------------------------------------------------------------------
def test_an_infinite_logit_is_not_silent(place: At):
    """As torch.softmax has it: NaN for all depths of the pixel, wherever the infinite one falls."""
    cells = place.tensor([0, 1, -1], torch.int32).view(1, 1, 3, 1, 1)
    logits = place.tensor([0.0, 1.0, math.inf], torch.float32).view(1, 1, 3, 1, 1)
    for variant in VARIANTS:
        plan = SplatPlan.from_cells(cells, (1, 1, 1, 2), variant=variant, backend=place.backend)
        feat = torch.ones((1, 1, 1, 1, 1), device=place.device)
        assert splat(logits, feat, plan, depth_logits=True).isnan().all()


@pytest.mark.parametrize("create_graph", [False, True])
def test_half_precision_gradients_are_wide_in_between(place: At, create_graph: bool):
    """depth * weight is beyond float16, and so is the derivative by W; the gradients are not."""
    plan = SplatPlan.from_cells(
        torch.zeros((1, 1, 2, 1, 1), dtype=torch.int32, device=place.device), (1, 1, 1, 1), backend=place.backend
    )
    half = lambda *v: torch.tensor(v, dtype=torch.float16, device=place.device)  # noqa: E731
    depth, weight = (half(300, 300).view(1, 1, 2, 1, 1).requires_grad_() for _ in range(2))
    feat = half(1e-3).view(1, 1, 1, 1, 1).requires_grad_()
    out = splat(depth, feat, plan, weight=weight)
    got = torch.autograd.grad(out, (depth, weight, feat), torch.full_like(out, 0.1), create_graph=create_graph)
    for grad, want in zip(got, (0.03, 0.03, 18000.0)):
        torch.testing.assert_close(grad.double(), torch.full_like(grad, want).double(), rtol=2e-3, atol=0)
    logits = half(20, 20).view(1, 1, 2, 1, 1).requires_grad_()
    large = half(300).view(1, 1, 1, 1, 1)
    out = splat(logits, large, plan, depth_logits=True)
    (grad,) = torch.autograd.grad(out, logits, torch.full_like(out, 300), create_graph=create_graph)  # 90,000 by W
    assert grad.flatten().tolist() == [0.0, 0.0]
