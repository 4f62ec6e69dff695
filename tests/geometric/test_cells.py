"""Cells of frustum points: published counts, exact small rigs, independent references, invariances, refused input."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from kernops.geometric import cells as module
from kernops.geometric.cells import Arguments, arguments, cells_like_points, frustum_cells
from kernops.geometric.frustum import Frustum, frustum
from kernops.geometric.grid import BEVGrid
from kernops.geometric.kernels import choose
from kernops.geometric.rig import CameraRig, nuscenes_rig
from tests.geometric.test_rig import FORWARD, IDENTITY, pose, random_rig

PUBLISHED_GRID = BEVGrid((-51.2, 51.2, 0.8), (-51.2, 51.2, 0.8), (-5.0, 3.0, 8.0))


def bevdet(step: float) -> tuple[CameraRig, Frustum]:
    rig = nuscenes_rig().resized(scale=0.44, crop=(140, 0))
    return rig, frustum((256, 704), (16, 44), dbound=(1.0, 60.0, step))


def lss100() -> tuple[CameraRig, Frustum]:
    return nuscenes_rig().resized((1024, 1024)), frustum((1024, 1024), (64, 64), dbound=(1.0, 51.0, 0.5))


def cells_of(rig: CameraRig, points: Frustum, grid: BEVGrid, rounding: str = "floor") -> torch.Tensor:
    return frustum_cells(*arguments(rig, points, grid, rounding))


def occupancy(cells: torch.Tensor) -> torch.Tensor:
    return torch.bincount(cells[cells >= 0].long())


# --- published counts -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("setting", "points", "kept", "occupied", "maximum"),
    [
        (bevdet(1.0), 249_216, 139_087, 10_786, 464),
        (bevdet(0.5), 498_432, 276_154, 12_959, None),
        (lss100(), 2_457_600, 1_130_849, 13_811, 3_316),
    ],
    ids=["bevdet59", "bevdet118", "lss100"],
)
def test_counts_on_the_nuscenes_rig(setting, points, kept, occupied, maximum):
    rig, frustum_ = setting
    cells = cells_of(rig, frustum_, PUBLISHED_GRID)
    assert (cells.dtype, cells.numel()) == (torch.int32, points)
    numbers = occupancy(cells)
    assert (int(numbers.sum()), int((numbers > 0).sum())) == (kept, occupied)
    assert maximum is None or int(numbers.max()) == maximum


def test_truncation_keeps_more():
    floor, trunc = (cells_of(*bevdet(1.0), PUBLISHED_GRID, rounding) for rounding in ("floor", "trunc"))
    assert int((trunc >= 0).sum()) == 139_087 + 40_237
    assert torch.equal(trunc[floor >= 0], floor[floor >= 0])


# --- exact references -------------------------------------------------------------------------------------------------
def exact_cells(rig: CameraRig, points: Frustum, grid: BEVGrid, rounding: str) -> np.ndarray:
    """In rational numbers, from the definition; for rigs without rounding."""
    projection = rig.projection().tolist()
    step, lower = [Fraction(s) for s in grid.step], [Fraction(s) for s in grid.lower]
    found = np.empty((*rig.shape, *points.shape), dtype=np.int32)
    for b, n, k, r, c in np.ndindex(found.shape):
        ray = [Fraction(float(x)) for x in (points.u[c], points.v[r], 1.0)]
        d = Fraction(float(points.d[k]))
        index = []
        for axis in range(3):
            *p, t = map(Fraction, projection[b][n][axis])
            f = (d * sum(x * y for x, y in zip(p, ray)) + t - lower[axis]) / step[axis]
            index.append(int(f) if rounding == "trunc" else f.numerator // f.denominator)
        x, y, z = index
        inside = all(0 <= i < count for i, count in zip(index, grid.counts))
        found[b, n, k, r, c] = ((b * grid.counts[2] + z) * grid.counts[1] + y) * grid.counts[0] + x if inside else -1
    return found


def short_binary(lowest: int, highest: int, places: int) -> st.SearchStrategy[float]:
    """Multiples of 2**-places: their products and sums are exact."""
    return st.integers(lowest << places, highest << places).map(lambda k: k / 2**places)


@st.composite
def exact_settings(draw: st.DrawFn) -> tuple[CameraRig, Frustum, BEVGrid]:
    """Any batch, cameras and non-square grids, with steps that are powers of two."""
    batch, cameras = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    intrinsics, poses = np.tile(np.eye(3), (batch, cameras, 1, 1)), np.tile(np.eye(4), (batch, cameras, 1, 1))
    for b, n in np.ndindex(batch, cameras):
        intrinsics[b, n, [0, 1], [0, 1]] = [2.0 ** draw(st.integers(1, 5)) for _ in range(2)]
        intrinsics[b, n, :2, 2] = [draw(short_binary(0, 16, 1)) for _ in range(2)]
        rotation = np.eye(3)[draw(st.permutations(range(3)))]
        rotation[0] *= np.linalg.det(rotation)
        poses[b, n, :3, :3] = rotation
        poses[b, n, :3, 3] = [draw(short_binary(-4, 4, 3)) for _ in range(3)]
    depths = sorted(draw(st.sets(short_binary(1, 16, 2), min_size=1, max_size=4)))
    points = frustum((9, 17), (draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 5]))), depths=depths)
    bounds = []
    for _ in range(3):
        lower, step = draw(short_binary(-8, 2, 2)), 2.0 ** draw(st.integers(-1, 2))
        bounds.append((lower, lower + step * draw(st.integers(1, 9)), step))
    return CameraRig(intrinsics, poses, (9, 17)), points, BEVGrid(*bounds)


@settings(deadline=None)
@given(setting=exact_settings(), rounding=st.sampled_from(["floor", "trunc"]))
def test_rational_arithmetic(setting, rounding):
    rig, points, grid = setting
    assert np.array_equal(cells_of(rig, points, grid, rounding), exact_cells(rig, points, grid, rounding))


def test_identity_camera():
    """f = 1, c = 0, ego frame = camera frame: the point is (u·d, v·d, d), checked by hand."""
    rig = CameraRig([IDENTITY], [pose(IDENTITY)], (3, 5))
    points = frustum((3, 5), (3, 5), depths=[1.0, 2.0])
    grid = BEVGrid((0.0, 4.0, 1.0), (-1.0, 5.0, 2.0), (1.0, 3.0, 1.0))  # X 4, Y 3, Z 2
    near = [[0, 1, 2, 3, -1], [4, 5, 6, 7, -1], [4, 5, 6, 7, -1]]  # y 0, 1, 2 in rows 0, 1, 1; z = 1: level 0
    far = [[12, 14, -1, -1, -1], [16, 18, -1, -1, -1], [20, 22, -1, -1, -1]]  # x 0, 2, 4 …; y 0, 2, 4; z = 2: level 1
    assert cells_of(rig, points, grid).tolist() == [[[near, far]]]


def test_bordering_points():
    """A cell holds its lower end and not its upper one; rounding toward zero adds the cell before the first."""
    grid = BEVGrid((-2.0, 2.0, 2.0), (0.0, 1.0, 1.0), (0.0, 1.0, 1.0))
    x = torch.tensor([-4.0, -3.999, -2.001, -2.0, -0.001, 0.0, 1.999, 2.0, 2.001], dtype=torch.float64)
    points = torch.stack((x, torch.zeros_like(x), torch.zeros_like(x)), -1)[None]
    assert cells_like_points(points, grid).tolist() == [[-1, -1, -1, 0, 0, 1, 1, -1, -1]]
    assert cells_like_points(points, grid, "trunc").tolist() == [[-1, 0, 0, 0, 0, 1, 1, -1, -1]]


# --- against the textbook way, in numpy -------------------------------------------------------------------------------
def coordinates_in_numpy(given_: dict[str, np.ndarray], points: Frustum) -> np.ndarray:
    """Ego coordinates (B, N, D, h, w, 3) by undoing one thing after the other, as the papers describe it."""
    d, v, u = np.meshgrid(points.d, points.v, points.u, indexing="ij")
    pixels = np.stack((u, v, np.ones_like(u)), -1)[..., None]
    wide = {k: a.reshape(*a.shape[:2], 1, 1, 1, *a.shape[2:]) for k, a in given_.items() if k != "bda"}
    there = np.linalg.inv(wide["post_rots"]) @ (pixels - wide["post_trans"][..., None])
    there = np.linalg.inv(wide["intrinsics"]) @ (there * d[..., None, None])
    ego = wide["cam_to_ego"][..., :3, :3] @ there + wide["cam_to_ego"][..., :3, 3:]
    bda = given_["bda"][:, None, None, None, None]
    return (bda[..., :3, :3] @ ego + bda[..., :3, 3:])[..., 0]


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10**6), batch=st.integers(1, 2), rounding=st.sampled_from(["floor", "trunc"]))
def test_against_undoing_one_after_the_other(seed, batch, rounding):
    """Batch, four levels, a grid that is not square. Points within 1e-9 cells of a border may go either way."""
    given_ = random_rig(seed, batch, 3)
    points = frustum((256, 704), (5, 7), dbound=(1.0, 40.0, 1.5))
    grid = BEVGrid((-40.0, 24.0, 0.8), (-16.0, 48.0, 1.6), (-6.0, 10.0, 4.0))
    assert grid.shape == (4, 40, 80)
    got = cells_of(CameraRig(**given_, image_size=(256, 704)), points, grid, rounding).numpy()
    f = (coordinates_in_numpy(given_, points) - grid.lower) / grid.step
    index = np.trunc(f) if rounding == "trunc" else np.floor(f)
    inside = ((index >= 0) & (index < grid.counts)).all(-1)
    b = np.arange(batch).reshape(-1, 1, 1, 1, 1)
    expected = np.where(inside, ((b * 4 + index[..., 2]) * 40 + index[..., 1]) * 80 + index[..., 0], -1)
    clear = (np.abs(f - np.round(f)) > 1e-9).all(-1)
    assert clear.mean() > 0.99
    assert np.array_equal(got[clear], expected[clear])
    assert 0 < (got >= 0).sum() < got.size


def in_order(arguments_: Arguments) -> np.ndarray:
    """The documented operations, one by one, which numpy rounds one by one as well: for one sample."""
    projection, u, v, d = (x.numpy() for x in arguments_[:4])
    lower, step, counts, trunc = arguments_[4:]
    indices = []
    for a in range(3):
        p0, p1, p2, t = (projection[0, :, a, k, None, None, None] for k in range(4))
        q = (p0 * u + p1 * v[:, None]) + p2
        f = ((d[:, None, None] * q + t) - lower[a]) / step[a]
        indices.append(np.trunc(f) if trunc else np.floor(f))
    x, y, z = indices
    inside = np.logical_and.reduce([(i >= 0) & (i < count) for i, count in zip(indices, counts)])
    return np.where(inside, (z * counts[1] + y) * counts[0] + x, -1)[None]


def microscopic(axis: int, trunc: bool) -> Arguments:
    """Cells of 1.5e-14 m along one axis, a few rounding errors wide, so that the order of the operations shows."""
    projection = bevdet(1.0)[0].projection()[:, 1:2]
    u, v, d = (x + torch.arange(n, dtype=torch.float64) * 1e-10 for x, n in ((333.3, 37), (99.9, 31), (7.0, 23)))
    P, T = projection[0, 0, axis, :3], projection[0, 0, axis, 3]
    middle = float(d[0] * (P @ torch.stack((u[0], v[0], torch.ones_like(u[0])))) + T)
    lower, step, counts = [-1e3] * 3, [2e3] * 3, [1] * 3
    lower[axis], step[axis], counts[axis] = middle - 1e-6, 2e-6 / 2**27, 2**27
    return Arguments(projection, u, v, d, tuple(lower), tuple(step), tuple(counts), trunc)  # type: ignore[arg-type]


@pytest.mark.parametrize("trunc", [False, True])
def test_order_of_operations(trunc):
    given_ = arguments(*bevdet(0.5), PUBLISHED_GRID, "trunc" if trunc else "floor")
    assert np.array_equal(frustum_cells(*given_), in_order(given_))


@pytest.mark.parametrize("backend", ["tiled", "cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("trunc", [False, True])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_same_bits_of_every_back_end(backend, trunc, axis):
    device = torch.device("cuda", 0) if backend == "cuda" else torch.device("cpu")
    kernels = choose(backend, device)
    given_ = microscopic(axis, trunc)
    expected = in_order(given_)
    assert len(np.unique(expected)) > 500
    moved = [x.to(device) if isinstance(x, torch.Tensor) else x for x in given_]
    assert np.array_equal(kernels.frustum_cells(*moved).cpu(), expected)


@pytest.mark.parametrize("backend", ["tiled", "cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_quotient_is_no_product_with_the_reciprocal(backend):
    """0.3 / 0.1 is just below 3, and 0.3 · (1 / 0.1) is 3."""
    device = torch.device("cuda", 0) if backend == "cuda" else torch.device("cpu")
    identity = torch.eye(3, 4, dtype=torch.float64)[None, None]
    for step, count in ((0.1, 10), (0.8, 1.25)):
        x = [k / count for k in range(1, 200)]
        expected = [int(e / step) for e in x]
        assert expected != [int(e * (1 / step)) for e in x]
        tensors = (t.to(device) for t in (identity, *(torch.tensor(t, dtype=torch.float64) for t in (x, [0.0], [1.0]))))
        got = choose(backend, device).frustum_cells(*tensors, (0.0,) * 3, (step, 2.0, 2.0), (300, 1, 1), False)
        assert got.flatten().tolist() == expected


# --- invariances ------------------------------------------------------------------------------------------------------
def test_an_augmentation_undone_changes_nothing():
    rig, points = bevdet(1.0)
    there = rig.resized(scale=0.5, crop=(16, -8), size=(100, 300))
    back = there.resized(scale=2.0, crop=(-32, 16), size=(256, 704))
    assert torch.equal(cells_of(back, points, PUBLISHED_GRID), cells_of(rig, points, PUBLISHED_GRID))


def test_a_mirrored_image_has_mirrored_cells():
    """Column u of the mirrored image is column W - 1 - u of the image."""
    camera = [[128.0, 0.0, 60.0], [0.0, 128.0, 16.0], [0.0, 0.0, 1.0]]
    rig = CameraRig([camera], [pose(FORWARD, (0.25, 0.5, 0.125))], (33, 129))
    mirrored = rig.with_augmentation(post_rots=np.diag([-1.0, 1.0, 1.0]), post_trans=[128.0, 0.0, 0.0])
    points = frustum((33, 129), (5, 9), dbound=(1.0, 30.0, 1.0))
    grid = BEVGrid((0.0, 32.0, 0.5), (-16.0, 16.0, 0.25), (-2.0, 4.0, 1.0))
    plain = cells_of(rig, points, grid)
    assert torch.equal(cells_of(mirrored, points, grid), plain.flip(-1))
    assert not torch.equal(plain, plain.flip(-1))


def test_bev_augmentation_moves_cells():
    """Mirrored in y; turned by a quarter; shifted by three cells: of a symmetric grid with no point on a border."""
    rig, points = bevdet(1.0)
    _, y_count, x_count = PUBLISHED_GRID.shape
    plain = cells_of(rig, points, PUBLISHED_GRID)
    x, y, kept = plain % x_count, plain // x_count, plain >= 0
    shifted = torch.where(kept & (x < x_count - 3), plain + 3, -1)
    for bda, expected in {
        ((1, 0, 0), (0, -1, 0), (0, 0, 1)): torch.where(kept, (y_count - 1 - y) * x_count + x, -1),
        ((0, -1, 0), (1, 0, 0), (0, 0, 1)): torch.where(kept, x * x_count + (y_count - 1 - y), -1),
        ((1, 0, 0, 2.4), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)): shifted,
    }.items():
        got = cells_of(rig.with_augmentation(bda=bda), points, PUBLISHED_GRID)
        moved_in = (got >= 0) & (got % x_count < 3) if len(bda) == 4 else torch.zeros_like(kept)
        assert torch.equal(got[~moved_in], expected[~moved_in])


def test_samples_of_a_batch_do_not_mix():
    given_ = random_rig(21, 2, 3)
    points = frustum((256, 704), (4, 6), dbound=(1.0, 30.0, 1.0))
    grid = BEVGrid((-40.0, 40.0, 1.0), (-20.0, 20.0, 1.0), (-8.0, 8.0, 4.0))
    both = cells_of(CameraRig(**given_, image_size=(256, 704)), points, grid)
    for b in range(2):
        alone = cells_of(CameraRig(**{k: a[b : b + 1] for k, a in given_.items()}, image_size=(256, 704)), points, grid)
        assert torch.equal(both[b], torch.where(alone[0] >= 0, alone[0] + b * 4 * 40 * 80, -1))
        assert int((alone >= 0).sum()) > 100


@pytest.mark.parametrize("block", [1, 100, 16 * 44 * 7])
def test_the_size_of_a_block_changes_nothing(block, monkeypatch):
    rig, points = bevdet(2.0)
    expected = cells_of(rig, points, PUBLISHED_GRID)
    monkeypatch.setattr(module, "BLOCK", block)
    assert torch.equal(cells_of(rig, points, PUBLISHED_GRID), expected)
    own = torch.from_numpy(np.random.default_rng(0).normal(0, 30, (2, 70, 2, 3)))
    few = cells_like_points(own, PUBLISHED_GRID)
    monkeypatch.undo()
    assert torch.equal(cells_like_points(own, PUBLISHED_GRID), few)


# --- what is not a number, and what is refused ------------------------------------------------------------------------
def test_points_that_are_not_finite_are_dropped():
    values = [float("nan"), float("inf"), -float("inf"), 1e300, -1e300, 0.5]
    points = torch.full((1, 3, len(values), 3), 0.5)
    for axis in range(3):
        points[0, axis, :, axis] = torch.tensor(values)
    unit = (0.0, 1.0, 1.0)
    for rounding in ("floor", "trunc"):
        cells = cells_like_points(points, BEVGrid(unit, unit, unit), rounding)
        assert cells.tolist() == [[[-1, -1, -1, -1, -1, 0]] * 3]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 0.0])
def test_a_broken_camera_drops_its_own_points_only(value):
    """Without check, the values are the caller's affair: no crash, and no cell."""
    rig, points = bevdet(1.0)
    expected = cells_of(rig, points, PUBLISHED_GRID)
    expected[0, 2] = -1
    intrinsics = rig.intrinsics.clone()
    intrinsics[0, 2, 0, 0] = value
    given_ = (intrinsics, rig.cam_to_ego, rig.image_size, rig.post_rots, rig.post_trans)
    assert torch.equal(cells_of(CameraRig(*given_, check=False), points, PUBLISHED_GRID), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_own_points_of_any_dtype_and_shape(dtype):
    grid = BEVGrid((-8.0, 8.0, 1.0), (-4.0, 4.0, 2.0), (0.0, 2.0, 0.5))
    random = np.random.default_rng(3)
    points = torch.from_numpy(random.normal(0, 4, (3, 2, 5, 4, 3))).to(dtype).transpose(1, 2)  # not contiguous
    got = cells_like_points(points, grid)
    f = np.floor((points.double().numpy() - grid.lower) / grid.step).astype(int)
    inside = ((f >= 0) & (f < grid.counts)).all(-1)
    b = np.arange(3).reshape(-1, 1, 1, 1)
    assert got.dtype == torch.int32
    assert np.array_equal(got, np.where(inside, ((b * 4 + f[..., 2]) * 4 + f[..., 1]) * 16 + f[..., 0], -1))
    assert cells_like_points(points[:0], grid).shape == (0, 5, 2, 4)


def test_own_points_of_a_frustum():
    given_ = random_rig(4, 2, 2)
    points = frustum((256, 704), (3, 4), dbound=(1.0, 20.0, 1.0))
    grid = BEVGrid((-20.0, 20.0, 1.0), (-20.0, 20.0, 1.0), (-20.0, 20.0, 10.0))
    own = torch.from_numpy(coordinates_in_numpy(given_, points))
    expected = cells_of(CameraRig(**given_, image_size=(256, 704)), points, grid)
    assert torch.equal(cells_like_points(own, grid), expected)  # no point of this rig is near a border


@pytest.mark.parametrize(
    ("points", "rounding", "error", "message"),
    [
        (torch.zeros(1, 4, 3, dtype=torch.int64), "floor", TypeError, "floating-point tensor; got torch.int64"),
        (np.zeros((1, 4, 3)), "floor", TypeError, "floating-point tensor; got float64"),
        (torch.zeros(1, 4, 2), "floor", ValueError, r"shape \(B, …, 3\); got \(1, 4, 2\)"),
        (torch.zeros(3), "floor", ValueError, r"shape \(B, …, 3\); got \(3,\)"),
        (torch.zeros(1, 4, 3), "round", ValueError, "rounding must be 'floor' or 'trunc'; got 'round'"),
    ],
)
def test_own_points_that_are_refused(points, rounding, error, message):
    with pytest.raises(error, match=message):
        cells_like_points(points, PUBLISHED_GRID, rounding)


def test_images_of_two_sizes():
    points = frustum((256, 704), (16, 44), dbound=(1.0, 60.0, 1.0))
    with pytest.raises(ValueError, match=r"\(900, 1600\), the frustum for \(256, 704\); CameraRig.resized"):
        arguments(nuscenes_rig(), points, PUBLISHED_GRID)
    with pytest.raises(ValueError, match="rounding must be"):
        arguments(*bevdet(1.0), PUBLISHED_GRID, "nearest")


def bad(**changed):
    given_ = arguments(*bevdet(1.0), PUBLISHED_GRID)._asdict()
    return {**given_, **changed}


@pytest.mark.parametrize(
    ("given_", "error", "message"),
    [
        (bad(u=torch.zeros(44)), TypeError, "u must be float64; got torch.float32"),
        (bad(v=torch.zeros(16, 1, dtype=torch.float64)), ValueError, r"v must have one axis; got shape \(16, 1\)"),
        (
            bad(d=torch.zeros(5, device="meta", dtype=torch.float64)),
            ValueError,
            "one device; got d on meta and u on cpu",
        ),
        (bad(projection=torch.zeros(6, 3, 4).double()), ValueError, r"projection must have shape \(B, N, 3, 4\)"),
        (bad(projection=torch.zeros(1, 6, 4, 4).double()), ValueError, r"projection must have shape \(B, N, 3, 4\)"),
        (bad(counts=(2**11, 2**10, 2**10)), ValueError, r"2147483648 cells; fewer than 2\*\*31"),
        (bad(d=torch.zeros(1).double().expand(2**21)), ValueError, r"points; fewer than 2\*\*31"),
    ],
)
def test_refused(given_, error, message):
    with pytest.raises(error, match=message):
        frustum_cells(**given_)


def test_nothing_is_read_back_to_the_host():
    given_ = arguments(*bevdet(20.0), PUBLISHED_GRID)
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fakes: list[Any] = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in given_]
        assert frustum_cells(*fakes).shape == (1, 6, 3, 16, 44)


@pytest.mark.gpu
@pytest.mark.parametrize("rounding", ["floor", "trunc"])
def test_same_cells_on_a_gpu_and_in_a_graph(rounding):
    rig, points = bevdet(0.5)
    given_ = arguments(rig.to("cuda"), points.to("cuda"), PUBLISHED_GRID, rounding)
    expected = cells_of(rig, points, PUBLISHED_GRID, rounding)
    assert torch.equal(frustum_cells(*given_).cpu(), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = frustum_cells(*given_)
    graph.replay()
    assert torch.equal(out.cpu(), expected)
