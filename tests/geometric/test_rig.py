"""Camera rigs: what is accepted, where pixels land, augmentation, hashes, and input that must be refused."""

from __future__ import annotations

import copy
import json
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.transform import Rotation
from torch._subclasses import FakeTensorMode

import kernops
from kernops.geometric.cells import inverse, product
from kernops.geometric.rig import CameraRig, nuscenes_rig

#: A camera that looks along ego x: its x (right) is -y of the ego frame, its y (down) is -z.
FORWARD = [[0.0, 0.0, 1.0], [-1.0, 0.0, 0.0], [0.0, -1.0, 0.0]]
K = [[100.0, 0.0, 64.0], [0.0, 100.0, 32.0], [0.0, 0.0, 1.0]]
IDENTITY = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]


def pose(rotation=FORWARD, shift=(0.0, 0.0, 0.0)) -> list[list[float]]:
    return [[*row, t] for row, t in zip(rotation, shift)] + [[0.0, 0.0, 0.0, 1.0]]


def rig(**changed) -> CameraRig:
    return CameraRig(**{"intrinsics": [K], "cam_to_ego": [pose()], "image_size": (64, 128), **changed})


def random_rig(seed: int, batch: int, cameras: int) -> dict[str, Any]:
    """Arguments of a rig with every kind of augmentation, from numpy's generator."""
    random = np.random.default_rng(seed)
    intrinsics = np.zeros((batch, cameras, 3, 3))
    intrinsics[..., 0, 0] = random.uniform(300, 1500, (batch, cameras))
    intrinsics[..., 1, 1] = random.uniform(300, 1500, (batch, cameras))
    intrinsics[..., 0, 1] = random.normal(0, 3, (batch, cameras))  # skew
    intrinsics[..., :2, 2] = random.uniform(100, 900, (batch, cameras, 2))
    intrinsics[..., 2, 2] = 1
    poses = np.tile(np.eye(4), (batch, cameras, 1, 1))
    poses[..., :3, :3] = Rotation.random(batch * cameras, random).as_matrix().reshape(batch, cameras, 3, 3)
    poses[..., :3, 3] = random.normal(0, 2, (batch, cameras, 3))
    rots = np.tile(np.eye(3), (batch, cameras, 1, 1))
    angle, scale = random.uniform(-0.3, 0.3, (batch, cameras)), random.uniform(0.3, 1.5, (batch, cameras))
    rots[..., 0, 0] = rots[..., 1, 1] = scale * np.cos(angle)
    rots[..., 0, 1], rots[..., 1, 0] = -scale * np.sin(angle), scale * np.sin(angle)
    trans = np.zeros((batch, cameras, 3))
    trans[..., :2] = random.uniform(-200, 200, (batch, cameras, 2))
    bda = np.tile(np.eye(4), (batch, 1, 1))
    bda[:, :3, :3] = Rotation.random(batch, random).as_matrix() * random.uniform(0.9, 1.1, (batch, 1, 1))
    bda[:, 1] *= random.choice([-1, 1])  # a flip
    bda[:, :3, 3] = random.normal(0, 1, (batch, 3))
    return {"intrinsics": intrinsics, "cam_to_ego": poses, "post_rots": rots, "post_trans": trans, "bda": bda}


# --- where pixels land ------------------------------------------------------------------------------------------------
def test_known_points():
    """100 pixels right of the optical axis at f = 100 are 45° to the right: as far to -y as ahead."""
    P = rig(cam_to_ego=[pose(shift=(1.5, 0.25, 2.0))]).projection()[0, 0].numpy()
    for (u, v, d), expected in {
        (64.0, 32.0, 10.0): (11.5, 0.25, 2.0),
        (164.0, 32.0, 4.0): (5.5, -3.75, 2.0),
        (64.0, 132.0, 4.0): (5.5, 0.25, -2.0),
        (39.0, 7.0, 8.0): (9.5, 2.25, 4.0),
    }.items():
        np.testing.assert_allclose(d * P[:, :3] @ [u, v, 1] + P[:, 3], expected, atol=1e-14)


@settings(deadline=None)
@given(seed=st.integers(0, 10**6), batch=st.integers(1, 3), cameras=st.integers(1, 4))
def test_projection_is_the_inverse_of_taking_pictures(seed, batch, cameras):
    """The other way round, step by step: from the ego point to the pixel, by solving and by products."""
    given_ = random_rig(seed, batch, cameras)
    projection = CameraRig(**given_, image_size=(256, 704)).projection().numpy()
    random = np.random.default_rng(seed + 1)
    u, v, d = random.uniform(0, 704), random.uniform(0, 256), random.uniform(1, 60)
    for b in range(batch):
        for n in range(cameras):
            ego = d * projection[b, n, :, :3] @ [u, v, 1] + projection[b, n, :, 3]
            before_bda = np.linalg.solve(given_["bda"][b], [*ego, 1])
            in_camera = np.linalg.solve(given_["cam_to_ego"][b, n], before_bda)[:3]
            assert in_camera[2] == pytest.approx(d, rel=1e-10)
            pixel = given_["intrinsics"][b, n] @ in_camera / in_camera[2]
            seen = given_["post_rots"][b, n] @ pixel + given_["post_trans"][b, n]
            np.testing.assert_allclose(seen, [u, v, 1], rtol=1e-9, atol=1e-8)


@settings(deadline=None)
@given(seed=st.integers(0, 10**6))
def test_small_matrices(seed):
    random = np.random.default_rng(seed)
    a, b = random.normal(size=(2, 2, 5, 3, 3))
    np.testing.assert_allclose(product(*map(torch.from_numpy, (a, b))), a @ b, rtol=1e-12, atol=1e-14)
    condition = np.linalg.cond(a)[..., None, None]
    error = np.abs(inverse(torch.from_numpy(a)).numpy() @ a - np.eye(3))
    assert (error <= 1e-14 * condition**2).all()


def test_no_augmentation_is_exact_for_a_plain_camera():
    """Powers of two: nothing is rounded."""
    simple = rig(intrinsics=[[[128.0, 0, 64], [0, 64.0, 32], [0, 0, 1]]], cam_to_ego=[pose(IDENTITY, (1, 2, 3))])
    assert simple.projection()[0, 0].tolist() == [[2**-7, 0, -0.5, 1], [0, 2**-6, -0.5, 2], [0, 0, 1, 3]]


def test_nothing_is_read_back_to_the_host():
    """So that making and projecting a rig can be part of a CUDA graph: a fake tensor has no value to read."""
    with FakeTensorMode(allow_non_fake_inputs=False):
        fakes: dict[str, Any] = {
            name: torch.empty(a.shape, dtype=torch.float64) for name, a in random_rig(0, 2, 3).items()
        }
        made = CameraRig(**fakes, image_size=(8, 8), check=False)
        assert made.projection().shape == (2, 3, 3, 4)
        with pytest.raises(Exception, match="aten"):  # and the test would notice
            CameraRig(**fakes, image_size=(8, 8))


@pytest.mark.gpu
def test_same_bits_on_a_gpu_and_in_a_graph():
    first, second = (CameraRig(**random_rig(seed, 2, 6), image_size=(256, 704)) for seed in (1, 2))
    moved = first.to("cuda")
    assert torch.equal(moved.projection().cpu(), first.projection())
    assert moved.calibration == first.calibration
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moved.projection()
    for name in ("intrinsics", "cam_to_ego", "post_rots", "post_trans", "bda"):
        getattr(moved, name).copy_(getattr(second, name))
    graph.replay()
    assert torch.equal(out.cpu(), second.projection())


# --- what is accepted -------------------------------------------------------------------------------------------------
def test_kinds_of_input_agree():
    given_ = random_rig(5, 2, 3)
    digests = set()
    for kind in (np.asarray, np.ndarray.tolist, torch.from_numpy, lambda a: [torch.from_numpy(x) for x in a]):
        converted: dict[str, Any] = {name: kind(value) for name, value in given_.items()}
        digests.add(CameraRig(**converted, image_size=(8, 8)).calibration)
    assert len(digests) == 1


def test_made_on_the_cpu_whatever_the_default_device():
    given_ = random_rig(5, 2, 3)
    want = CameraRig(**given_, image_size=(8, 8))
    mixed: dict[str, Any] = {k: [torch.from_numpy(v[0]), v[1].tolist()] for k, v in given_.items()}
    with torch.device("meta"):
        for arguments in (given_, {k: v.tolist() for k, v in given_.items()}, mixed):
            assert CameraRig(**arguments, image_size=(8, 8)).calibration == want.calibration
        assert nuscenes_rig().device.type == "cpu"


def test_changed_on_its_device_whatever_the_default_device():
    flip, given_ = np.diag([1.0, -1.0, 1.0]), random_rig(5, 1, 6)
    plain = CameraRig(given_["intrinsics"], given_["cam_to_ego"], (64, 128))
    short = given_["cam_to_ego"][..., :3, :]

    def digests() -> list[str]:
        made = [plain.resized(scale=0.5), plain.resized((8, 8)).resized(scale=2.0), plain.with_augmentation(bda=flip)]
        made += [plain.with_augmentation(post_trans=[1.0, 2.0, 0.0]), CameraRig(given_["intrinsics"], short, (64, 128))]
        return [r.calibration for r in made]

    want = digests()
    with torch.device("meta"):
        assert digests() == want


def test_single_precision_is_kept_as_it_is():
    given_: dict[str, Any] = {k: v.astype(np.float32) for k, v in random_rig(5, 1, 6).items()}
    made = CameraRig(**given_, image_size=(8, 8))
    assert made.intrinsics.dtype == torch.float64
    assert np.array_equal(made.cam_to_ego, given_["cam_to_ego"].astype(np.float64))


def test_leading_axes():
    full = random_rig(7, 2, 3)
    one = {k: v[0] for k, v in full.items()}
    assert CameraRig(**one, image_size=(8, 8)).shape == (1, 3)
    assert CameraRig(**{**one, "cam_to_ego": full["cam_to_ego"]}, image_size=(8, 8)).shape == (2, 3)
    assert CameraRig(**{**one, "bda": full["bda"]}, image_size=(8, 8)).shape == (2, 3)
    shared = CameraRig(one["intrinsics"], one["cam_to_ego"], (8, 8), post_rots=one["post_rots"][0])
    assert shared.post_rots is not None and shared.post_trans is not None
    assert np.array_equal(shared.post_rots, np.tile(one["post_rots"][0], (1, 3, 1, 1)))
    assert not shared.post_trans.any()
    shifted = CameraRig(one["intrinsics"], one["cam_to_ego"], (8, 8), post_trans=[3.0, 4.0, 0.0])
    assert shifted.post_rots is not None
    assert np.array_equal(shifted.post_rots, np.tile(np.eye(3), (1, 3, 1, 1)))


def test_poses_and_bda_without_their_last_row_or_shift():
    given_ = random_rig(8, 2, 3)
    given_["bda"][:, :3, 3] = 0
    short = {**given_, "cam_to_ego": given_["cam_to_ego"][..., :3, :], "bda": given_["bda"][:, :3, :3]}
    assert CameraRig(**short, image_size=(8, 8)).calibration == CameraRig(**given_, image_size=(8, 8)).calibration


def test_tensors_are_copied_and_need_no_gradient():
    intrinsics = torch.tensor([K], dtype=torch.float64, requires_grad=True)
    made = rig(intrinsics=intrinsics)
    with torch.no_grad():
        intrinsics.zero_()
    assert made.intrinsics.tolist() == [[K]]
    assert not made.projection().requires_grad


# --- augmentation -----------------------------------------------------------------------------------------------------
def test_bevdet_test_transform():
    """post_rots and post_trans of BEVDet's test pipeline: resize by 0.44, 140 rows cut off."""
    made = nuscenes_rig().resized(scale=0.44, crop=(140, 0))
    assert made.image_size == (256, 704)
    assert made.post_rots is not None and made.post_trans is not None
    assert np.array_equal(made.post_rots, np.tile(np.diag([0.44, 0.44, 1.0]), (1, 6, 1, 1)))
    assert np.array_equal(made.post_trans, np.tile([0.0, -140.0, 0.0], (1, 6, 1)))


def test_resizing_moves_pixels():
    made = rig().resized(scale=(0.5, 2.0), crop=(3, 10))
    assert made.image_size == (29, 246)  # 64 · 0.5 - 3, 128 · 2 - 10
    pixels = made.pixel_matrix()[0, 0].numpy() @ np.linalg.inv(K) @ [[10.0], [20.0], [1.0]]
    np.testing.assert_allclose(pixels[:, 0], [10 * 2 - 10, 20 * 0.5 - 3, 1])
    squeezed = rig().resized((32, 512))
    pixels = squeezed.pixel_matrix()[0, 0].numpy() @ np.linalg.inv(K) @ [[10.0], [20.0], [1.0]]
    np.testing.assert_allclose(pixels[:, 0], [40, 10, 1])


def test_resizing_composes_with_what_is_there():
    given_ = random_rig(3, 2, 4)
    before = CameraRig(**given_, image_size=(200, 300))
    after = before.resized(scale=0.5, crop=(20, 10), size=(90, 150))
    step = np.array([[0.5, 0, -10], [0, 0.5, -20], [0, 0, 1]])
    np.testing.assert_allclose(after.pixel_matrix(), step @ before.pixel_matrix().numpy(), rtol=1e-12, atol=1e-9)
    assert after.image_size == (90, 150)


@pytest.mark.parametrize(
    "kind", [np.float32, torch.tensor, lambda s: (np.float32(s), s), lambda s: torch.tensor([s, s])]
)
def test_bevdets_transform_in_single_precision(kind):
    """0.44 of float32 is 0.43999999761581421: 395.9999979 rows of 900 are 396."""
    assert nuscenes_rig().resized(scale=kind(0.44), crop=(140, 0)).image_size == (256, 704)


def test_a_part_of_a_pixel_is_cut_off():
    assert rig(image_size=(100, 1000)).resized(scale=0.9999).image_size == (99, 999)
    assert rig(image_size=(100, 1000)).resized(scale=1 - 1e-6).image_size == (99, 999)


@pytest.mark.parametrize("scale", [0.29, 0.57, 0.1])
def test_integer_part_of_a_product_that_binary_rounds_down(scale):
    assert rig(image_size=(100, 1000)).resized(scale=scale).image_size == (round(100 * scale), round(1000 * scale))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, TypeError, "give scale, or size alone"),
        ({"crop": (3, 0), "size": (8, 8)}, TypeError, "give scale, or size alone"),
        ({"scale": 0.0}, ValueError, "scale must be positive and finite; got 0.0"),
        ({"scale": math.inf}, ValueError, "scale must be positive and finite; got inf"),
        ({"scale": 1e308}, ValueError, r"scale=1e\+308 makes .*less than 2\*\*31 is accepted"),
        ({"scale": (1, 2, 3)}, TypeError, r"scale must be a number or two .vertical, horizontal.; got \(1, 2, 3\)"),
        ({"scale": "a"}, TypeError, "scale must be a number or two .*; got 'a'"),
        ({"scale": 1j}, TypeError, "scale must be a number or two"),
        ({"scale": 1.0, "crop": 3}, TypeError, "crop must be two numbers .*; got 3"),
        ({"scale": 1.0, "crop": (1, "a")}, TypeError, r"crop must be two numbers .*; got \(1, 'a'\)"),
        ({"size": (8, 8), "crop": (1, 2, 3)}, TypeError, "crop must be two numbers"),
        ({"scale": 1.0, "crop": (math.nan, 0)}, ValueError, r"crop must be finite; got \(nan, 0\)"),
        ({"scale": 1.0, "crop": (0.5, 0)}, ValueError, r"crop must be whole numbers .*; got \(0.5, 0\)"),
        ({"scale": math.nan}, ValueError, "scale must be positive"),
        ({"scale": (1.0, -1.0)}, ValueError, "scale must be positive"),
        ({"scale": 0.5, "crop": (32, 0)}, ValueError, r"crop=\(32, 0\) leaves \(0, 64\) of"),
        ({"size": (0, 8)}, ValueError, "size must be positive"),
    ],
)
def test_resizes_that_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        rig().resized(**arguments)


def test_augmentation_takes_the_place_of_the_old_one():
    first = rig(post_trans=[1.0, 2.0, 0.0], bda=IDENTITY, names=["front"])
    second = first.with_augmentation(post_trans=[5.0, 6.0, 0.0], image_size=(32, 32))
    assert second.post_trans is not None and second.bda is not None
    assert second.post_trans.tolist() == [[[5.0, 6.0, 0.0]]]
    assert second.bda.shape == (1, 4, 4)
    assert (second.image_size, second.names) == ((32, 32), ("front",))
    batched = first.with_augmentation(bda=np.stack([np.eye(3)] * 4))
    assert batched.shape == (4, 1)
    with pytest.raises(ValueError, match="bda of sample 0 must be invertible"):
        first.with_augmentation(bda=np.zeros((3, 3)))


# --- hash, copies, text -----------------------------------------------------------------------------------------------
def test_calibration_of_a_matrix_that_gets_other_data():
    changed = rig()
    before = changed.calibration
    old = changed.cam_to_ego.clone()
    changed.cam_to_ego.data = torch.tensor([[pose(shift=(1.0, 2.0, 3.0))]], dtype=torch.float64)
    assert changed.calibration == rig(cam_to_ego=[pose(shift=(1.0, 2.0, 3.0))]).calibration != before
    changed.cam_to_ego.data = old
    assert changed.calibration == before


def test_calibration_changes_with_every_matrix():
    given_ = random_rig(11, 2, 3)
    made = CameraRig(**given_, image_size=(8, 8))
    digests = [made.calibration, CameraRig(**given_, image_size=(8, 9)).calibration]
    for name, place in {
        "intrinsics": (1, 2, 0, 0),
        "cam_to_ego": (1, 2, 0, 3),
        "post_rots": (0, 1, 0, 1),
        "post_trans": (1, 0, 1),
        "bda": (1, 2, 3),
    }.items():
        value = given_[name].copy()
        value[place] = np.nextafter(value[place], np.inf)
        digests.append(CameraRig(**{**given_, name: value}, image_size=(8, 8)).calibration)
    assert len(set(digests)) == 7
    assert all(len(d) == 64 and int(d, 16) for d in digests)


def test_augmentation_that_does_nothing_is_none():
    digests = {
        rig().calibration,
        rig(post_rots=IDENTITY).calibration,
        rig(post_trans=[0.0, -0.0, 0.0]).calibration,
        rig(bda=IDENTITY).calibration,
        rig(names=["front"]).calibration,
    }
    assert len(digests) == 1


def test_calibration_follows_changes_in_place():
    made = rig(post_trans=[1.0, 0.0, 0.0])
    before = made.calibration
    assert made.calibration is before  # kept
    made.cam_to_ego[0, 0, 0, 3] = 7.0
    assert made.calibration != before
    made.cam_to_ego[0, 0, 0, 3] = 0.0
    assert made.calibration == before
    made.post_trans = torch.zeros_like(made.intrinsics[..., 0])
    assert made.calibration == rig().calibration
    with torch.inference_mode():
        inferred = rig()
        first = inferred.calibration
        inferred.cam_to_ego[0, 0, 0, 3] = 7.0
        assert (first, inferred.calibration) == (rig().calibration, rig(cam_to_ego=[pose(shift=(7, 0, 0))]).calibration)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda r: pickle.loads(pickle.dumps(r)), lambda r: r.to("cpu")])
def test_copies(duplicate):
    made = CameraRig(**random_rig(12, 2, 3), image_size=(8, 9), names=["a", "b", "c"])
    digest = made.calibration
    other = duplicate(made)
    assert (other.calibration, other.names, other.image_size) == (digest, ("a", "b", "c"), (8, 9))
    other.intrinsics.zero_()
    assert made.calibration == digest != other.calibration


def test_repr():
    assert repr(rig()) == "CameraRig(1 camera, image 64 x 128, on cpu)"
    assert repr(rig().to("cpu")) == repr(rig())
    full = CameraRig(**random_rig(0, 4, 2), image_size=(8, 9), names=["left", "right"])
    assert repr(full) == (
        "CameraRig(batch 4, 2 cameras, image 8 x 9, image augmentation, BEV augmentation, on cpu: left, right)"
    )


# --- the rig of the package -------------------------------------------------------------------------------------------
#: Directions in which the cameras of nuScenes look, counter-clockwise from straight ahead, from its documentation.
DIRECTIONS = {
    "CAM_FRONT": 0,
    "CAM_FRONT_LEFT": 55,
    "CAM_FRONT_RIGHT": -55,
    "CAM_BACK": 180,
    "CAM_BACK_LEFT": 110,
    "CAM_BACK_RIGHT": -110,
}


def test_nuscenes():
    made = nuscenes_rig()
    assert (made.shape, made.image_size) == ((1, 6), (900, 1600))
    assert set(made.names) == set(DIRECTIONS)
    for name, axis in zip(made.names, made.poses()[0, :, :, 2].tolist()):
        off = math.degrees(math.atan2(axis[1], axis[0])) - DIRECTIONS[name]
        assert abs((off + 180) % 360 - 180) < 3
        assert abs(axis[2]) < 0.03


def test_nuscenes_quaternions():
    path = Path(kernops.__file__).parent / "geometric" / "data" / "nuscenes_rig.json"
    cameras = json.loads(path.read_text(encoding="utf-8"))["cameras"]
    w_first = np.array([c["sensor2ego_rotation_wxyz"] for c in cameras])
    expected = Rotation.from_quat(np.roll(w_first, -1, axis=1)).as_matrix()  # scipy: x, y, z, w
    np.testing.assert_allclose(nuscenes_rig().cam_to_ego[0, :, :3, :3], expected, atol=1e-15)


# --- refused ----------------------------------------------------------------------------------------------------------
def with_entry(matrix, row, column, value):
    return [[value if (i, j) == (row, column) else x for j, x in enumerate(r)] for i, r in enumerate(matrix)]


REFUSED = [
    ({"intrinsics": K}, ValueError, r"intrinsics must have shape \(N, 3, 3\) or \(B, N, 3, 3\); got \(3, 3\)"),
    ({"intrinsics": np.zeros((1, 4, 4))}, ValueError, r"intrinsics must have shape.*got \(1, 4, 4\)"),
    ({"cam_to_ego": np.zeros((1, 3, 3))}, ValueError, r"cam_to_ego must have shape .*\(N, 3, 4\)"),
    ({"cam_to_ego": [pose()] * 2}, ValueError, "cameras disagree: intrinsics has 1, cam_to_ego has 2"),
    ({"post_trans": [1.0, 2.0]}, ValueError, "post_trans must have shape"),
    ({"post_rots": np.zeros((2, 2))}, ValueError, "post_rots must have shape"),
    ({"post_rots": [IDENTITY] * 2}, ValueError, "cameras disagree: .*post_rots has 2"),
    ({"bda": np.eye(2)}, ValueError, "bda must have shape"),
    ({"bda": np.stack([np.eye(3)] * 2), "intrinsics": [[K]] * 3}, ValueError, "samples disagree: .*has 3, bda has 2"),
    ({"intrinsics": np.zeros((0, 3, 3)), "cam_to_ego": np.zeros((0, 4, 4))}, ValueError, "at least one sample and one"),
    ({"intrinsics": None}, TypeError, "intrinsics and cam_to_ego must be given"),
    ({"intrinsics": "K"}, TypeError, "intrinsics must be a tensor, an array or nested lists"),
    ({"intrinsics": [[K[0], K[1][:2], K[2]]]}, TypeError, "intrinsics must be a tensor"),
    ({"intrinsics": torch.ones(1, 3, 3, dtype=torch.complex64)}, TypeError, "intrinsics must be real"),
    ({"intrinsics": np.array([K]) + 1j}, TypeError, "intrinsics must be real; got torch.complex128"),
    ({"intrinsics": [[[100 + 1j, 0, 64], *K[1:]]]}, TypeError, "intrinsics must be real"),
    ({"bda": np.eye(3).astype(np.complex64)}, TypeError, "bda must be real; got torch.complex64"),
    ({"intrinsics": [torch.eye(3), torch.eye(2)]}, TypeError, "intrinsics must be a tensor, an array or nested lists"),
    ({"image_size": (64,)}, TypeError, "image_size must be two integers"),
    ({"image_size": (0, 128)}, ValueError, "image_size must be positive"),
    ({"names": ["a", "b"]}, ValueError, "one name for each of the 1 cameras"),
    ({"names": "a"}, ValueError, "one name for each of the 1 cameras"),
    ({"intrinsics": [with_entry(K, 0, 0, math.nan)]}, ValueError, "intrinsics of camera 0 must be finite"),
    ({"cam_to_ego": [with_entry(pose(), 0, 3, math.inf)]}, ValueError, "cam_to_ego of camera 0 must be finite"),
    ({"post_trans": [math.nan, 0, 0]}, ValueError, "post_trans of camera 0 must be finite"),
    ({"bda": np.full((3, 3), np.nan)}, ValueError, "bda of sample 0 must be finite"),
    ({"intrinsics": [with_entry(K, 0, 0, 0.0)]}, ValueError, r"intrinsics of camera 0 must be invertible; got \[\[0.0"),
    ({"intrinsics": [np.transpose(K)]}, ValueError, r"intrinsics of camera 0 must have the last row \(0, 0, 1\)"),
    ({"cam_to_ego": [with_entry(pose(), 3, 3, 2.0)]}, ValueError, r"must have the last row \(0, 0, 0, 1\); got"),
    ({"cam_to_ego": [np.transpose(pose(shift=(1, 2, 3)))]}, ValueError, "is it transposed"),
    (
        {"cam_to_ego": [pose(np.array(FORWARD) * 1.01)]},
        ValueError,
        "must be a rotation .*give scales and flips.*as bda",
    ),
    ({"cam_to_ego": [pose(np.array(FORWARD) * -1)]}, ValueError, "must be a rotation.*this one mirrors"),
    ({"post_rots": with_entry(IDENTITY, 0, 2, 5.0)}, ValueError, r"post_rots of camera 0 must act on \(u, v\) alone"),
    ({"post_rots": with_entry(IDENTITY, 2, 2, 0.44)}, ValueError, r"post_rots of camera 0 must act on \(u, v\) alone"),
    ({"post_rots": with_entry(IDENTITY, 1, 1, 0.0)}, ValueError, "post_rots of camera 0 must be invertible"),
    ({"post_trans": [0, 0, 1.0]}, ValueError, r"post_trans of camera 0 must act on \(u, v\) alone"),
    ({"bda": np.diag([1.0, 0.0, 1.0])}, ValueError, "bda of sample 0 must be invertible"),
    ({"bda": np.diag([1.0, 1.0, 1.0, 2.0])}, ValueError, r"bda of sample 0 must have the last row \(0, 0, 0, 1\)"),
]


@pytest.mark.parametrize(("changed", "error", "message"), REFUSED)
def test_refused(changed, error, message):
    with pytest.raises(error, match=message):
        rig(**changed)


def test_the_message_names_sample_and_camera():
    given_ = random_rig(0, 3, 2)
    given_["intrinsics"][2, 1, 0, 0] = 0
    given_["intrinsics"][2, 1, 0, 1] = 0
    with pytest.raises(ValueError, match="intrinsics of sample 2, right must be invertible"):
        CameraRig(**given_, image_size=(8, 8), names=["left", "right"])


def test_devices_must_agree():
    with pytest.raises(ValueError, match="one device; got intrinsics on cpu, cam_to_ego on meta"):
        rig(intrinsics=torch.tensor([K]), cam_to_ego=torch.zeros(1, 4, 4, device="meta"))


def test_nearly_orthonormal_is_accepted():
    """Four decimals, as calibration files have them."""
    rotation = np.round(Rotation.from_euler("zyx", [10, 20, 30], degrees=True).as_matrix(), 4)
    assert rig(cam_to_ego=[pose(rotation)]).shape == (1, 1)
