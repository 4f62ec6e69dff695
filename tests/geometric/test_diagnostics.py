"""Reports: counts against the published ones and by hand, sentences for wrong frames, the picture."""

from __future__ import annotations

import doctest
import importlib
import re
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from kernops.geometric import diagnostics
from kernops.geometric.cells import arguments, frustum_cells
from kernops.geometric.diagnostics import SIDES, Report, plot, report
from kernops.geometric.frustum import Frustum, frustum
from kernops.geometric.grid import BEVGrid
from kernops.geometric.rig import CameraRig, nuscenes_rig
from tests.geometric.test_rig import FORWARD, IDENTITY, pose

GRID = BEVGrid((-51.2, 51.2, 0.8), (-51.2, 51.2, 0.8), (-5.0, 3.0, 8.0))
BEVDET = frustum((256, 704), (16, 44), dbound=(1.0, 60.0, 1.0))


@dataclass
class Plan:
    """What a report looks at."""

    cells: torch.Tensor
    shape: tuple[int, int, int, int]
    rig: CameraRig | None = None
    frustum: Frustum | None = None
    grid: BEVGrid | None = None
    rounding: str | None = None


def plan_of(rig: CameraRig, points: Frustum = BEVDET, grid: BEVGrid = GRID, rounding: str = "floor") -> Plan:
    cells = frustum_cells(*arguments(rig, points, grid, rounding))
    return Plan(cells, (rig.shape[0], *grid.shape), rig, points, grid, rounding)


def bevdet_rig() -> CameraRig:
    return nuscenes_rig().resized(scale=0.44, crop=(140, 0))


def moved(change, rig: CameraRig | None = None) -> CameraRig:
    """BEVDet's rig with its 4x4 poses (B, N, 4, 4) changed by a function of an array."""
    rig = rig or bevdet_rig()
    poses = change(rig.cam_to_ego.numpy().copy())
    return CameraRig(rig.intrinsics, poses, rig.image_size, rig.post_rots, rig.post_trans, rig.bda, rig.names)


# --- counts -----------------------------------------------------------------------------------------------------------
def test_published_counts():
    found = report(plan_of(bevdet_rig()))
    assert (found.points, found.kept, found.cells, found.empty_cells) == (249_216, 139_087, 16_384, 16_384 - 10_786)
    assert (found.maximum, found.points_per_camera) == (464, 59 * 16 * 44)
    assert found.cameras == nuscenes_rig().names
    assert np.shape(found.kept_per_camera) == (1, 6)
    assert np.sum(found.kept_per_camera) == 139_087
    assert found.current
    assert found.warnings == ()


def test_published_counts_of_lss100():
    """The median is published too: 36 points a cell."""
    points = frustum((1024, 1024), (64, 64), dbound=(1.0, 51.0, 0.5))
    found = report(plan_of(nuscenes_rig().resized((1024, 1024)), points))
    assert (found.kept, found.median, found.maximum, found.warnings) == (1_130_849, 36, 3_316, ())


def test_truncation_is_reported_as_it_is():
    plan = plan_of(bevdet_rig(), rounding="trunc")
    found = report(plan)
    assert (found.kept, found.current, found.warnings) == (139_087 + 40_237, True, ())
    assert found.dropped is not None
    plan.rounding = "floor"
    assert report(plan).current is False


def test_counts_by_hand():
    """f = 1, c = 0, ego frame = camera frame: the point is (u·d, v·d, d)."""
    rig = CameraRig([IDENTITY], [pose(IDENTITY)], (3, 5))
    points = frustum((3, 5), (3, 5), depths=[1.0, 2.0])
    grid = BEVGrid((1.0, 4.0, 1.0), (-1.0, 3.0, 2.0), (0.0, 2.0, 2.0))
    found = report(plan_of(rig, points, grid))
    # d = 1: x = 0 … 4, y = 0, 1, 2: x 1, 2, 3 inside, one below, one above, in each of 3 rows.
    # d = 2: all above z; x = 0, 2, 4, 6, 8: one below, three above, in each of 3 rows; y = 0, 2, 4: one row above.
    expected = [3 + 3, 3 + 9, 0, 5, 0, 15, 0]
    assert found.dropped == dict(zip(SIDES, expected))
    assert (found.points, found.kept, found.kept_per_camera) == (30, 9, ((9,),))
    assert (found.cells, found.empty_cells) == (6, 0)  # y 0 -> 0; y 1, 2 -> 1: cells with 1, 1, 1, 2, 2, 2 points
    assert (found.median, found.maximum) == (1.5, 2)
    assert found.p99 == pytest.approx(2.0)


def test_sides_are_those_of_the_coordinates():
    """Counted in numpy from the points themselves; batch 2, Z 4, not square."""
    bda = np.stack([np.eye(3), np.diag([1.1, -1.1, 1.1])])
    rig = bevdet_rig().with_augmentation(bda=bda)
    grid = BEVGrid((-20.0, 44.0, 0.8), (-16.0, 16.0, 1.6), (-1.0, 3.0, 1.0))
    found = report(plan_of(rig, BEVDET, grid))
    projection = rig.projection().numpy()
    d, v, u = np.meshgrid(BEVDET.d, BEVDET.v, BEVDET.u, indexing="ij")
    rays = np.stack((u, v, np.ones_like(u)), 0).reshape(3, -1)
    ego = d.reshape(-1) * (projection[..., :3] @ rays) + projection[..., 3:]
    expected = []
    for axis, (lower, upper, _) in enumerate((grid.xbound, grid.ybound, grid.zbound)):
        expected += [(ego[:, :, axis] < lower).sum(), (ego[:, :, axis] >= upper).sum()]
    assert found.dropped == dict(zip(SIDES, [*expected, 0]))
    assert found.cells == 2 * 4 * 20 * 80
    assert found.current


def test_cells_without_a_rig():
    cells = torch.tensor([[[0, 0, 3], [-1, 3, 3]], [[5, -1, -1], [-1, -1, -1]]], dtype=torch.int32)
    found = report(Plan(cells.reshape(1, 2, 3, 1, 2), (1, 2, 1, 4)))
    assert (found.dropped, found.current) == (None, None)
    assert (found.points, found.kept, found.kept_per_camera) == (12, 6, ((5, 1),))
    assert (found.cells, found.empty_cells, found.median, found.maximum) == (8, 5, 2, 3)
    assert found.p99 == pytest.approx(2.98)  # between 2 and 3, by linear interpolation
    assert found.warnings == ()
    assert "below x" not in str(found)


@pytest.mark.parametrize("shape", [(1, 2, 0, 3, 4), (1, 0, 2, 3, 4), (0, 2, 2, 3, 4)])
def test_no_points(shape):
    found = report(Plan(torch.empty(shape, dtype=torch.int32), (shape[0], 1, 2, 2)))
    assert (found.points, found.kept, found.cells, found.empty_cells) == (0, 0, 4 * shape[0], 4 * shape[0])
    assert (found.warnings, str(found).split()[:2]) == ((), ["points", "0"])


def test_table():
    names = [f"camera {n}" for n in range(2)]
    counts = dict(zip(SIDES, [1, 2000, 3, 4, 5, 6, 7]))
    found = Report(10_000, 2_500, counts, tuple(names), ((500, 0), (1000, 1000)), 2_500, 64, 16, 36.5, 99, 1_234, True,
                   ("Something is odd.",))  # fmt: skip
    lines = [re.sub(" {2,}", " | ", line.strip()) for line in str(found).splitlines()]
    assert lines == [
        *("points | 10,000", "kept | 2,500 | 25.0 %", "dropped | 7,500 | 75.0 %", "below x | 1 | 0.0 %"),
        *("above x | 2,000 | 20.0 %", "below y | 3 | 0.0 %", "above y | 4 | 0.0 %", "below z | 5 | 0.1 %"),
        *("above z | 6 | 0.1 %", "not finite | 7 | 0.1 %", "kept of camera 0 | 1,500 | 30.0 %"),
        *("kept of camera 1 | 1,000 | 20.0 %", "cells | 64", "empty | 16 | 25.0 %"),
        *("points per occupied cell, median | 36.5", "points per occupied cell, 99th percentile | 99"),
        *("points per occupied cell, maximum | 1,234", "warning: Something is odd."),
    ]
    assert len({len(line) for line in str(found).splitlines() if line.endswith("%")}) == 1  # in columns


# --- numbers that look like a mistake ---------------------------------------------------------------------------------
def inverted(poses):
    return np.linalg.inv(poses)


def in_millimetres(poses):
    poses[..., :3, 3] *= 1000
    return poses


def in_the_world(poses):
    poses[..., :3, 3] += [600.0, 1600.0, 0.0]
    return poses


def without_axes_turned(poses):
    poses[..., :3, :3] = np.eye(3)
    return poses


def one_under_ground(poses):
    poses[:, 2, 2, 3] -= 20
    poses[:, 2, :3, :3] = FORWARD
    return poses


def all_the_same(poses):
    poses[:] = poses[:, 1:2]
    return poses


@pytest.mark.parametrize(
    ("change", "sentences"),
    [
        (inverted, ["All 6 cameras look one way: are the poses sensor-to-ego, and not ego-to-sensor?"]),
        (
            in_millimetres,
            [
                "All 249,216 points are dropped",
                r"CAM_BACK_RIGHT stands 1924 m from .*\(and not to the world\), in metres",
            ],
        ),
        (
            in_the_world,
            [
                "All 249,216 points are dropped",
                r"All points lie above the x range \[-51.2, 51.2\): are the poses sensor-to-ego, in metres\?",
                r"All points lie above the y range \[-51.2, 51.2\)",
                "CAM_FRONT stands 1709 m from the ego frame's origin: is its pose sensor-to-ego",
            ],
        ),
        (without_axes_turned, ["All cameras look straight up or down: do the poses turn the camera frame"]),
        (one_under_ground, [r"^Not one point of CAM_FRONT_RIGHT is kept: is its pose in the frame of the others\?$"]),
        (all_the_same, ["CAM_FRONT_LEFT and CAM_BACK have the same pose: is one camera given twice", "look one way"]),
    ],
)
def test_wrong_poses(change, sentences):
    warnings = report(plan_of(moved(change))).warnings
    for sentence in sentences:
        assert len([w for w in warnings if re.search(sentence, w)]) == 1, warnings


def test_the_world_height():
    def high(poses):
        poses[..., 2, 3] += 25
        return poses

    found = report(plan_of(moved(high), frustum((256, 704), (16, 44), dbound=(1.0, 20.0, 1.0))))
    assert any(
        re.match(r"All points lie above the z range \[-5, 3\): are the poses sensor-to-ego, in m", w)
        for w in found.warnings
    )
    assert found.kept == 0
    assert (found.median, found.p99, found.maximum, found.empty_cells) == (0, 0, 0, found.cells)


def test_nearly_all_on_one_side_and_few_kept():
    grid = BEVGrid((0.0, 102.4, 0.8), (-51.2, 51.2, 0.8), (60.0, 68.0, 8.0))
    camera = CameraRig([[[100.0, 0, 50], [0, 100, 99], [0, 0, 1]]], [pose()], (100, 100))
    found = report(plan_of(camera, frustum((100, 100), (10, 10), dbound=(1.0, 65.0, 1.0)), grid))
    assert found.kept == 40  # the top row of 10 at 61 … 64 m, which is as high as 99 % of that
    assert re.match(r"Only \d\.\d+ % of the points are kept", found.warnings[0])
    assert any(re.match(r"(98|99|100) % of the points lie below the z range \[60, 68\)", w) for w in found.warnings)


def test_one_cell():
    coarse = BEVGrid((-51_200, 51_200, 800), (-51_200, 51_200, 800), (-5_000, 3_000, 8_000))
    shifted = moved(lambda poses: poses + np.pad([[10.0], [10.0], [0]], ((0, 1), (3, 0))))
    points = frustum((256, 704), (16, 44), dbound=(0.1, 3.0, 0.1))
    (warning,) = report(plan_of(shifted, points, coarse)).warnings
    assert re.match("All [0-9,]+ kept points fall into one cell: .* in one unit", warning)


def test_intrinsics_of_another_image_size():
    rig = nuscenes_rig()
    plain = CameraRig(rig.intrinsics, rig.cam_to_ego, (256, 704), names=rig.names)
    warnings = [w for w in report(plan_of(plain)).warnings if "optical axis" in w]
    assert len(warnings) == 6
    assert warnings[1].startswith(
        "The optical axis of CAM_FRONT meets its image at column 816, row 492, outside 256 x 704 pixels: are the "
        "intrinsics of another image size"
    )


def test_not_finite():
    rig = bevdet_rig()
    rig.intrinsics[:] = float("nan")
    found = report(plan_of(rig))
    assert found.dropped == {**dict.fromkeys(SIDES, 0), "not finite": 249_216}
    assert any(w.startswith("All points are not finite: are there NaN") for w in found.warnings)
    rig = bevdet_rig()
    rig.cam_to_ego[0, 1, :2, 3] = float("inf")  # of one camera: counted once, and not as above x and y too
    finite, all_counts = report(plan_of(bevdet_rig())), report(plan_of(rig))
    assert finite.dropped is not None and all_counts.dropped is not None
    assert all_counts.dropped["not finite"] == 249_216 // 6
    assert all_counts.dropped["above x"] <= finite.dropped["above x"]


def test_a_rig_changed_after_the_plan():
    plan = plan_of(bevdet_rig())
    assert plan.rig is not None
    plan.rig.cam_to_ego[0, 0, 0, 3] += 0.5
    found = report(plan)
    assert found.current is False
    assert [w for w in found.warnings if "plan.refresh(rig) brings them up to date" in w]


def test_samples_are_named_where_they_differ():
    shift = np.tile(np.eye(4), (3, 1, 1))
    shift[1, 0, 3] = 500.0
    warnings = report(plan_of(bevdet_rig().with_augmentation(bda=shift))).warnings
    assert "Not one point of CAM_BACK is kept in sample 1: is its pose in the frame of the others?" in warnings
    assert len([w for w in warnings if "stands" in w and "origin in sample 1:" in w]) == 6
    far = report(plan_of(bevdet_rig().with_augmentation(bda=shift[[1, 1]]))).warnings
    assert len([w for w in far if "stands" in w and "sample" not in w]) == 6


@pytest.mark.parametrize("cameras", [1, 2])
def test_one_camera_or_a_stereo_pair_may_look_one_way(cameras):
    poses = [pose(FORWARD, (0.0, 0.4 * n, 1.5)) for n in range(cameras)]
    rig = CameraRig([[[500.0, 0, 352], [0, 500, 128], [0, 0, 1]]] * cameras, poses, (256, 704))
    assert report(plan_of(rig)).warnings == ()


def test_blocks_do_not_change_a_report(monkeypatch):
    plan = plan_of(bevdet_rig())
    expected = report(plan)
    monkeypatch.setattr("kernops.geometric.cells.BLOCK", 5000)
    assert report(plan) == expected


# --- the picture ------------------------------------------------------------------------------------------------------
@pytest.fixture
def axes():
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure  # without pyplot: no window and no global state

    return Figure().subplots()


def test_picture(axes):
    rig = bevdet_rig().with_augmentation(bda=np.stack([np.eye(3)] * 2))
    plan = plan_of(rig, grid=BEVGrid((-40.0, 24.0, 0.8), (-16.0, 32.0, 1.6), (-5.0, 3.0, 2.0)))
    assert plot(plan, axes) is axes
    (image,) = axes.get_images()
    shown = image.get_array()
    kept = plan.cells[plan.cells >= 0].long() % (30 * 80)
    expected = torch.bincount(kept, minlength=30 * 80).view(30, 80).numpy()
    assert np.array_equal(shown.filled(0), expected)
    assert np.array_equal(shown.mask, expected == 0)
    assert tuple(image.get_extent()) == (-40.0, 24.0, -16.0, 32.0)
    assert image.origin == "lower"
    x, y = axes.get_lines()[0].get_data()
    np.testing.assert_array_equal(np.stack((x, y), 1), np.tile(rig.cam_to_ego[0, :, :2, 3], (2, 1)))
    axes.figure.canvas.draw()


def test_picture_without_rig_or_points(axes):
    plot(Plan(torch.full((1, 1, 2, 1, 1), -1, dtype=torch.int32), (1, 1, 2, 3)), axes)
    assert axes.get_xlabel() == "x (cells)"
    assert axes.get_title() == "0 of 2 points kept"
    assert tuple(axes.get_images()[0].get_extent()) == (0, 3, 0, 2)
    axes.figure.canvas.draw()


def test_new_axes(monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    from matplotlib import pyplot

    axes = plot(plan_of(bevdet_rig()))
    assert axes.get_title() == "139,087 of 249,216 points kept"
    pyplot.close(axes.figure)


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="plot needs matplotlib, which is not installed: pip install matplotlib"):
        plot(plan_of(bevdet_rig()))


@pytest.mark.parametrize("name", ["cells", "diagnostics", "frustum", "grid", "rig"])
def test_examples(name):
    done = doctest.testmod(importlib.import_module(f"kernops.geometric.{name}"))
    assert done.attempted and not done.failed


def test_matplotlib_is_not_imported_for_a_report():
    assert "matplotlib" not in vars(diagnostics)
