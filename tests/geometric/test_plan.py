"""Plans of splats: variants, the order of their sums, refresh, copies, bad input."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any, cast

import numpy as np
import pytest
import torch

from kernops.geometric import BEVGrid, CameraRig, SplatPlan, frustum, nuscenes_rig, splat, splat_features
from kernops.geometric import levels as front
from kernops.geometric.levels import FIELDS
from kernops.geometric.plan import VARIANTS, choose_variant
from tests.geometric import cases
from tests.geometric.cases import CASES, At

Tensor = torch.Tensor
GRID = BEVGrid((-51.2, 51.2, 3.2), (-25.6, 25.6, 1.6), (-5.0, 3.0, 4.0))
POINTS = frustum((256, 704), (4, 11), dbound=(1.0, 60.0, 3.0))


@pytest.fixture(params=cases.BACKENDS)
def place(request: pytest.FixtureRequest) -> At:
    return cases.at(request.param)


def rigs() -> tuple[CameraRig, CameraRig]:
    """A rig and the same one turned by 0.3 rad and shifted."""
    rig = nuscenes_rig().resized(scale=0.44, crop=(140, 0))
    c, s = math.cos(0.3), math.sin(0.3)
    return rig, rig.with_augmentation(bda=[[c, -s, 0, 1.0], [s, c, 0, -2.0], [0, 0, 1, 0.1], [0, 0, 0, 1]])


def made(place: At, rig: CameraRig, variant: str = "cumsum", **options) -> SplatPlan:
    return SplatPlan(rig, POINTS, GRID, variant=variant, backend=place.backend, device=place.device, **options)


def values(plan: SplatPlan, channels: int = 5) -> tuple[Tensor, Tensor]:
    b, n, d, h, w = plan.cells.shape
    generator = torch.Generator().manual_seed(0)
    depth, feat = (
        torch.rand(plan.cells.shape, generator=generator),
        torch.rand((b, n, h, w, channels), generator=generator),
    )
    return depth.to(plan.device), feat.to(plan.device)


def agree(a: SplatPlan, b: SplatPlan) -> None:
    assert torch.equal(a.cells, b.cells)
    torch.testing.assert_close(splat(*values(a), a), splat(*values(b), b), rtol=1e-5, atol=1e-5)


# --- which variant ----------------------------------------------------------------------------------------------------
def test_choose_variant():
    """Geometry that is used once goes to atomic."""
    assert choose_variant(True) == "cumsum" and choose_variant(False) == "atomic"


def test_auto_becomes_a_variant():
    rig, _ = rigs()
    plan = SplatPlan(rig, POINTS, GRID)
    assert plan.variant == choose_variant(True) == "cumsum"
    assert plan.backend == "auto"
    assert SplatPlan.from_cells(plan.cells, plan.shape).variant == "cumsum"


# --- what it holds ----------------------------------------------------------------------------------------------------
def test_attributes(place: At):
    rig, _ = rigs()
    plan = made(place, rig)
    assert plan.shape == (1, 2, 32, 32) and plan.cells.shape == (1, 6, 20, 4, 11) and plan.cells.dtype == torch.int32
    assert plan.device == place.device and plan.n_points == 5280
    assert plan.n_kept == int((plan.cells >= 0).sum()) > 2000
    assert plan.calibration == rig.calibration
    assert plan.rig is rig and plan.grid is GRID and plan.rounding == "floor"
    assert "5280" not in repr(plan) and "1 x 6 cameras of 20 x 4 x 11 points" in repr(plan)
    assert made(place, rig, rounding="trunc").n_kept > plan.n_kept
    other = SplatPlan.from_cells(plan.cells, plan.shape, backend=place.backend)
    assert other.calibration is None and other.rig is None and other.n_kept == plan.n_kept


def test_report_and_plot_are_at_hand():
    plan = made(cases.at("tiled"), rigs()[0])
    assert plan.report().kept == plan.n_kept
    pytest.importorskip("matplotlib").use("Agg")
    assert plan.plot() is not None


@pytest.mark.parametrize("shape", [(1, 1, 8, 8), (2, 3, 9, 17), (1, 1, 1, 5), (1, 2, 20, 3)])
def test_cells_are_summed_tile_by_tile(shape: tuple[int, int, int, int]):
    """Squares of 8 x 8 cells, row by row, samples and heights outermost."""
    n_cells = math.prod(shape)
    plan = SplatPlan.from_cells(torch.full((shape[0], 1, 1, 1, 1), -1), shape, variant="cumsum")
    places = np.argwhere(np.ones(shape))
    in_order = sorted(range(n_cells), key=lambda k: (*places[k][:2], *(places[k][2:] // 8), *(places[k][2:] % 8)))
    (level,) = plan.levels
    assert level.targets is not None and level.targets.tolist() == in_order and level.n_out == n_cells


@pytest.mark.parametrize("case", CASES, ids=str)
def test_levels_hold_every_kept_point_once(place: At, case: cases.Case):
    cells, hw = case.cells(), case.points[3] * case.points[4]
    for variant in ("cumsum", "histogram"):
        given = place.tensor(cells, torch.int32)
        plan = SplatPlan.from_cells(given, case.shape, variant=variant, backend=place.backend)
        seen = np.full(cells.size, -1)
        first, last = plan.levels[0], plan.levels[-1]
        items, starts = first.items.tolist(), first.starts.tolist()
        of_segment = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
        if variant == "histogram":  # from pairs to their cells
            pair = np.zeros(first.n_out, int)
            rows, ends = last.items.cpu().numpy(), last.starts.cpu().numpy()
            pair[rows[: ends[-1]]] = np.repeat(np.arange(len(ends) - 1), np.diff(ends))
            of_segment = pair[of_segment]
        if last.targets is not None:
            of_segment = last.targets.cpu().numpy()[of_segment]
        for (p0, length), cell in zip(items, of_segment):
            points = p0 + hw * np.arange(length)
            assert (seen[points] == -1).all()
            seen[points] = cell
        assert np.array_equal(seen, cells.reshape(-1))


def test_a_long_cell_is_split(place: At, monkeypatch):
    monkeypatch.setattr(front, "LONG", 64)
    monkeypatch.setattr(front, "PIECE", 16)
    case = CASES[-1]
    assert case.name == "all in one cell"
    plan = SplatPlan.from_cells(
        place.tensor(case.cells(), torch.int32), case.shape, variant="cumsum", backend=place.backend
    )
    assert len(plan.levels) == 2
    depth, feat = values(plan, case.channels)
    want = torch.einsum("bndhw,bnhwc->c", depth.double(), feat.double())
    torch.testing.assert_close(splat(depth, feat, plan).double().sum((0, 2, 3, 4)), want, rtol=1e-5, atol=1e-5)


# --- refresh ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("variant", VARIANTS)
def test_refresh(place: At, variant: str):
    old, new = rigs()
    plan = made(place, old, variant)
    splat_features(torch.zeros(*plan.cells.shape, 1, device=plan.device), plan)
    storage = [t.data_ptr() for t in (plan.cells, *plan._flat, *plan.by_point())]
    kept = plan.n_kept
    if variant == "histogram":  # has not so much room by chance
        plan.refresh(old)
    else:
        plan.refresh(new)
        agree(plan, made(place, new, variant))
        assert plan.n_kept != kept and plan.calibration == new.calibration and plan.rig is new
        x = torch.rand(*plan.cells.shape, 3, device=plan.device)
        assert torch.equal(splat_features(x, plan), splat_features(x, made(place, new, variant)))
        plan.refresh(old)
    agree(plan, made(place, old, variant))
    assert storage == [t.data_ptr() for t in (plan.cells, *plan._flat, *plan.by_point())]


def test_refresh_of_a_histogram(place: At):
    """In place where the pairs of columns and cells fit; else an error, and the plan stays as it is."""
    old, _ = rigs()
    near = old.with_augmentation(bda=[[1, 0, 0, 0.05], [0, 1, 0, -0.1], [0, 0, 1, 0], [0, 0, 0, 1]])
    plan = made(place, old, "histogram")
    plan.refresh(near)
    agree(plan, made(place, near, "histogram"))
    far = old.with_augmentation(bda=[[1, 0, 0, 500.0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
    empty = made(place, far, "histogram")
    assert empty.n_kept == 0
    with pytest.raises(
        RuntimeError, match="has .* pairs of image columns and cells, and this .* room for 8; make a new"
    ):
        empty.refresh(old)
    agree(empty, made(place, far, "histogram"))


def test_refresh_keeps_pieces(place: At, monkeypatch):
    """A plan that was split stays split, and one that was not stays whole, whatever the new lengths are."""
    old, new = rigs()
    whole = made(place, old)
    monkeypatch.setattr(front, "LONG", 4)
    monkeypatch.setattr(front, "PIECE", 3)
    split = made(place, old)
    assert (len(whole.levels), len(split.levels)) == (1, 2)
    for plan in (whole, split):
        plan.refresh(new)
        agree(plan, made(place, new, "atomic"))
    assert (len(whole.levels), len(split.levels)) == (1, 2)


def test_refresh_with_another_number_of_anything():
    rig, _ = rigs()
    plan = made(cases.at("tiled"), rig)
    five = CameraRig(rig.intrinsics[:, :5], rig.cam_to_ego[:, :5], rig.image_size)
    with pytest.raises(ValueError, match=r"rig has \(B, N\) = \(1, 5\) samples and cameras, the plan \(1, 6\)"):
        plan.refresh(five)
    with pytest.raises(ValueError, match=r"\(900, 1600\).*\(256, 704\)"):
        plan.refresh(nuscenes_rig())
    with pytest.raises(ValueError, match="made from cells has no frustum to refresh"):
        SplatPlan.from_cells(plan.cells, plan.shape).refresh(rig)
    agree(plan, made(cases.at("tiled"), rig))


def test_refresh_between_forward_and_backward_is_noticed(place: At):
    """The gradient would be of other cells than the result."""
    old, new = rigs()
    plan = made(place, old)
    depth, feat = values(plan)
    out = splat(depth.requires_grad_(), feat, plan)
    plan.refresh(new)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


# --- copies -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("variant", VARIANTS)
def test_copies(place: At, variant: str):
    rig, new = rigs()
    plan = made(place, rig, variant)
    for other in (pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan), plan.to("cpu")):
        assert torch.equal(other.cells.cpu(), plan.cells.cpu()) and other.calibration == plan.calibration
        assert (other.shape, other.variant, other.backend) == (plan.shape, plan.variant, plan.backend)
        if other.device == plan.device:
            agree(other, plan)
    other = copy.deepcopy(plan)
    if variant != "histogram":
        other.refresh(new)
        assert not torch.equal(other.cells, plan.cells)
    assert plan.to(place.device) is plan
    meta = plan.to("meta")
    assert meta.device.type == "meta" and meta.frustum is not None and meta.frustum.u.device.type == "meta"
    assert all(t.device.type == "meta" for t in (*meta._flat, *meta._order))


# --- bad input --------------------------------------------------------------------------------------------------------
def cells(*numbers: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(numbers, dtype=dtype).reshape(1, 1, -1, 1, 1)


BAD = {
    "variant": (lambda: SplatPlan(rigs()[0], POINTS, GRID, variant="sorted"), ValueError,
                "variant must be 'auto', 'cumsum', 'atomic', 'histogram'; got 'sorted'"),
    "rounding": (lambda: SplatPlan(rigs()[0], POINTS, GRID, rounding="nearest"), ValueError, "got 'nearest'"),
    "back end": (lambda: SplatPlan(rigs()[0], POINTS, GRID, backend="sycl"), ValueError, "backend must be"),
    "image size": (lambda: SplatPlan(nuscenes_rig(), POINTS, GRID), ValueError, r"\(900, 1600\)"),
    "float cells": (lambda: SplatPlan.from_cells(cells(0).float(), (1, 1, 1, 1)), TypeError, "cells must be .*float32"),
    "flat cells": (lambda: SplatPlan.from_cells(cells(0).flatten(), (1, 1, 1, 1)), ValueError, r"\(B, N, D, h, w\)"),
    "three sizes": (lambda: SplatPlan.from_cells(cells(0), (1, 1, 1)), TypeError, r"four integers \(B, Z, Y, X\)"),
    "float sizes": (lambda: SplatPlan.from_cells(cells(0), (1, 1, cast(Any, 1.5), 1)), TypeError, "four integers"),
    "negative size": (lambda: SplatPlan.from_cells(cells(0), (1, -1, 1, 1)), ValueError, "must not be negative"),
    "other batch": (lambda: SplatPlan.from_cells(cells(0), (2, 1, 1, 1)), ValueError, "with the B = 2 of shape"),
    "beyond": (lambda: SplatPlan.from_cells(cells(0, 6), (1, 1, 2, 3)), ValueError, r"sample 0 .* in \[0, 6\).*got 6"),
    "other sample's": (lambda: SplatPlan.from_cells(torch.zeros((2, 1, 1, 1, 1), dtype=torch.int32), (2, 1, 2, 3)),
                       ValueError, r"cells of sample 1 must be in \[6, 12\).*got 0"),
    "beyond int32": (lambda: SplatPlan.from_cells(cells(2**32), (1, 1, 2, 3)), ValueError, "got 4294967296"),
    "too many points": (lambda: SplatPlan.from_cells(cells(0).expand(1, 2**11, 2**10, 2**10, 1), (1, 1, 2, 3)),
                        ValueError, "are 2147483648 points; at most 2147475456"),
    "too many cells": (lambda: SplatPlan.from_cells(cells(0), (1, 1, 2**16, 2**16)), ValueError, "4294967296 cells"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str):
    call, error, message = BAD[name]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
def test_cells_of_any_integer_dtype(dtype: torch.dtype):
    numbers = (0, 5, 3) if dtype == torch.uint8 else (0, 5, -2)
    plan = SplatPlan.from_cells(cells(*numbers, dtype=dtype), (1, 1, 2, 3))
    assert plan.cells.dtype == torch.int32 and plan.cells.flatten().tolist() == [max(k, -1) for k in numbers]


def test_given_cells_are_copied():
    given = cells(0, 1, dtype=torch.int32)
    plan = SplatPlan.from_cells(given, (1, 1, 2, 3))
    given.fill_(5)
    assert plan.cells.flatten().tolist() == [0, 1]


# --- copies, and plans of other devices -------------------------------------------------------------------------------
def test_a_copy_is_its_own(place: At):
    rig, turned = rigs()
    plan = made(place, rig)
    before = plan.cells.clone()
    other = copy.copy(plan)
    other.refresh(turned)
    assert torch.equal(plan.cells, before) and not torch.equal(other.cells, before)
    assert plan.calibration == rig.calibration != other.calibration


@pytest.mark.parametrize("variant", VARIANTS)
def test_work_that_was_shared_out_elsewhere(place: At, variant: str):
    """As a pickled plan's that comes from another GPU: sums are right before and after a refresh."""
    rig, turned = rigs()
    plan = made(place, rig, variant)
    plan._flat[FIELDS - 1 :: FIELDS] = [t.new_zeros(3) for t in plan._flat[FIELDS - 1 :: FIELDS]]
    given = values(plan)
    for now in (rig, turned):
        plan.refresh(now)
        torch.testing.assert_close(splat(*given, plan), splat(*given, made(place, now, variant)))


def test_more_cells_than_32_bits_count():
    rig, _ = rigs()
    three = CameraRig(rig.intrinsics.repeat(3, 1, 1, 1), rig.cam_to_ego.repeat(3, 1, 1, 1), rig.image_size)
    grid = BEVGrid((-16_000.0, 16_000.0, 1.0), (-16_000.0, 16_000.0, 1.0), (-5.0, 3.0, 8.0))
    with pytest.raises(ValueError, match=r"\(3, 1, 32000, 32000\) are 3072000000 cells; at most"):
        SplatPlan(three, POINTS, grid)


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_what_a_plan_is_made_of(wrong: int):
    given: list = [rigs()[0], POINTS, GRID]
    given[wrong] = (1, 2)
    with pytest.raises(TypeError, match="(rig|frustum|grid) must be a (CameraRig|Frustum|BEVGrid); got tuple"):
        SplatPlan(*given)
