"""Cameras on a vehicle: intrinsics, poses and augmentations, in the conventions of Lift-Splat-Shoot and BEVDet."""

from __future__ import annotations

import hashlib
import json
import math
import operator
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Any

import numpy as np
import torch

from .cells import inverse, product
from .frustum import pair

Tensor = torch.Tensor

#: Largest accepted entry of |R Rᵀ - 1|: calibrations kept in float32, or with four decimals, pass.
ORTHONORMAL = 1e-3
#: Smallest accepted |determinant|, relative to the product of the lengths of the rows.
SINGULAR = 1e-12


class CameraRig:
    """Calibrated pinhole cameras and the augmentations of their images and of the BEV space.

    A pixel (u, v) of the network's input at depth d lies at ``bda @ cam_to_ego @ (d inv(K) inv(A) (u, v, 1))`` of the
    ego frame, where A is the image augmentation: ``A (u₀, v₀, 1) = (u, v, 1)`` for a pixel (u₀, v₀) of the camera.
    Tensors, arrays and nested lists are accepted; they are copied to float64 tensors on the device that they are on.

    Args:
        intrinsics: K, (N, 3, 3) or (B, N, 3, 3), in pixels of the camera's image before augmentation.
        cam_to_ego: camera to ego poses in metres, (N, 4, 4) or (B, N, 4, 4); also (…, 3, 4). Camera: x right, y down, z
            forward; ego: x forward, y left, z up.
        image_size: (H, W) of the network's input, after augmentation.
        post_rots: rotation, scale and flip of the image, (…, 3, 3) with the 2x2 block in use; None: none.
        post_trans: shift of the image after ``post_rots``, in pixels, (…, 3) with 0 in the last place; None: none.
        bda: BEV augmentation of the ego frame, (3, 3), (B, 3, 3) or (…, 4, 4) with a shift in metres; None: none.
        names: N names of the cameras.
        check: whether to look at the values, which waits for a GPU that they are on. Shapes are always checked.

    Attributes:
        intrinsics: (B, N, 3, 3).
        cam_to_ego: (B, N, 4, 4).
        post_rots, post_trans: (B, N, 3, 3) and (B, N, 3); both None without image augmentation.
        bda: (B, 4, 4), or None.
        image_size: (H, W).
        names: names of the cameras, ``("camera 0", …)`` if none were given.

    Raises:
        TypeError: an argument is not made of numbers.
        ValueError: shapes or devices disagree, or (unless ``check=False``) a matrix is not finite, singular, or not of
            the kind that its argument is for.

    Example:
        >>> front = [[0, 0, 1, 1.5], [-1, 0, 0, 0], [0, -1, 0, 1.2]]  # looks along ego x, 1.5 m ahead and 1.2 m up
        >>> rig = CameraRig([[[800, 0, 400], [0, 800, 300], [0, 0, 1]]], [front], image_size=(600, 800))
        >>> rig
        CameraRig(1 camera, image 600 x 800, on cpu)
        >>> rig.projection()[0, 0] @ torch.tensor([400.0, 300.0, 1.0, 0.1], dtype=torch.float64) * 10  # 10 m ahead
        tensor([11.5000,  0.0000,  1.2000], dtype=torch.float64)

    Source: J. Philion and S. Fidler, "Lift, Splat, Shoot", ECCV 2020; J. Huang et al., "BEVDet", 2021 (``post_rots``,
    ``post_trans`` and ``bda``).
    """

    def __init__(
        self,
        intrinsics: Any,
        cam_to_ego: Any,
        image_size: Iterable[int],
        post_rots: Any = None,
        post_trans: Any = None,
        bda: Any = None,
        names: Sequence[str] | None = None,
        *,
        check: bool = True,
    ) -> None:
        self.image_size = pair("image_size", image_size)
        given = {
            "intrinsics": intrinsics,
            "cam_to_ego": cam_to_ego,
            "post_rots": post_rots,
            "post_trans": post_trans,
            "bda": bda,
        }
        tensors = _tensors({name: value for name, value in given.items() if value is not None})
        if intrinsics is None or cam_to_ego is None:
            raise TypeError("intrinsics and cam_to_ego must be given; got None")
        batch, cameras = _sizes(tensors)
        expanded = {name: _expanded(name, t, batch, cameras) for name, t in tensors.items()}
        self.intrinsics: Tensor = expanded["intrinsics"]
        self.cam_to_ego: Tensor = _with_last_row(expanded["cam_to_ego"])
        self.post_rots, self.post_trans = _augmentation(expanded, self.intrinsics)
        self.bda: Tensor | None = _homogeneous(expanded["bda"]) if "bda" in expanded else None
        self._named = names is not None
        self.names = _names(names, cameras)
        self._digest: tuple[list[Tensor], list[int], str] | None = None
        if check:
            _check_values(self)

    # --- sizes --------------------------------------------------------------------------------------------------------
    @property
    def shape(self) -> tuple[int, int]:
        """(B, N): the numbers of samples and of cameras."""
        return (self.intrinsics.shape[0], self.intrinsics.shape[1])

    @property
    def device(self) -> torch.device:
        """Where the matrices are."""
        return self.intrinsics.device

    def __repr__(self) -> str:
        (batch, cameras), (height, width) = self.shape, self.image_size
        parts = [f"{cameras} camera{'s' * (cameras > 1)}", f"image {height} x {width}"]
        parts = [f"batch {batch}", *parts] if batch > 1 else parts
        parts += ["image augmentation"] * (self.post_rots is not None) + ["BEV augmentation"] * (self.bda is not None)
        named = f": {', '.join(self.names)}" if self._named else ""
        return f"CameraRig({', '.join(parts)}, on {self.device}{named})"

    # --- geometry -----------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def projection(self) -> Tensor:
        """[P | T] of every camera, float64 (B, N, 3, 4): ego = d · P @ (u, v, 1) + T.

        P = bda_R @ R @ inv(A @ K) and T = bda_R @ t + bda_t. Each product and sum is rounded on its own, so the result
        is the same on every device, and a GPU is not waited for: the call can be captured in a CUDA graph, and what
        is copied into the rig's tensors afterwards is seen at replay.

        Example:
            >>> rig = nuscenes_rig()
            >>> rig.projection().shape
            torch.Size([1, 6, 3, 4])
        """
        poses = self.poses()
        rays = product(poses[..., :3], inverse(self.pixel_matrix()))
        return torch.cat((rays, poses[..., 3:]), -1)

    @torch.no_grad()
    def poses(self) -> Tensor:
        """Camera to augmented ego frame [R | t], float64 (B, N, 3, 4): ``cam_to_ego``, then ``bda``."""
        if self.bda is None:
            return self.cam_to_ego[..., :3, :]
        bda = self.bda[:, None, :3]
        moved = product(bda[..., :3], self.cam_to_ego[..., :3, :])
        return torch.cat((moved[..., :3], moved[..., 3:] + bda[..., 3:]), -1)

    @torch.no_grad()
    def pixel_matrix(self) -> Tensor:
        """A @ K, float64 (B, N, 3, 3): from the camera frame to homogeneous pixels of the network's input."""
        if self.post_rots is None or self.post_trans is None:
            return self.intrinsics
        return product(self.post_rots, self.intrinsics) + self.post_trans[..., None] * self.intrinsics[..., 2:, :]

    @property
    def calibration(self) -> str:
        """SHA-256 of the image size and of all matrices, in hexadecimal: rigs with the same one give the same cells.

        Reading it waits for a GPU that the matrices are on. It is kept until one of the tensors is changed in place (by
        an operation of torch: what the replay of a CUDA graph writes goes unnoticed).
        """
        tensors = [t for t in self._matrices().values() if t is not None]
        if any(t.is_inference() for t in tensors):  # torch does not count their changes
            return self._hash()
        versions = [t._version for t in tensors]
        if self._digest is not None:
            seen, seen_versions, digest = self._digest
            if versions == seen_versions and len(seen) == len(tensors) and all(map(operator.is_, seen, tensors)):
                return digest
        digest = self._hash()
        self._digest = (tensors, versions, digest)
        return digest

    def _hash(self) -> str:
        batch, cameras = self.shape
        neutral = {"post_rots": torch.eye(3), "post_trans": torch.zeros(3), "bda": torch.eye(4)}
        digest = hashlib.sha256(repr((self.image_size, batch, cameras)).encode())
        for name, matrix in self._matrices().items():
            if matrix is None:  # the same digest as if it were given and did nothing
                matrix = _expanded(name, neutral[name], batch, cameras)
            values = matrix.detach().to("cpu", torch.float64) + 0.0  # -0.0 becomes 0.0
            digest.update(values.numpy().astype("<f8").tobytes())
        return digest.hexdigest()

    # --- other rigs ---------------------------------------------------------------------------------------------------
    def to(self, device: torch.device | str) -> CameraRig:
        """The same rig on another device."""
        moved = {name: None if t is None else t.to(device) for name, t in self._matrices().items()}
        return self._made(**moved, check=False)

    def with_augmentation(
        self, *, post_rots: Any = None, post_trans: Any = None, bda: Any = None, image_size: Any = None
    ) -> CameraRig:
        """The same cameras with these augmentations; those that are not given stay as they are.

        Args:
            post_rots, post_trans, bda: as in the constructor. They take the place of the rig's own, and are not
                composed with them.
            image_size: (H, W) of the network's input, where the augmentation changes it.

        Raises:
            ValueError: as the constructor.

        Example:
            >>> flipped = nuscenes_rig().with_augmentation(bda=[[1, 0, 0], [0, -1, 0], [0, 0, 1]])  # left becomes right
        """
        given = {"post_rots": post_rots, "post_trans": post_trans, "bda": bda, "image_size": image_size}
        return self._made(**{name: value for name, value in given.items() if value is not None})

    def resized(
        self,
        size: Iterable[int] | None = None,
        *,
        scale: float | tuple[float, float] | None = None,
        crop: tuple[float, float] = (0, 0),
    ) -> CameraRig:
        """The same cameras with their images resized and cropped, after what is done to them already.

        Args:
            size: (H, W) of the new image. Without ``scale`` the whole image is squeezed into it.
            scale: factor of the resize, or (vertical, horizontal) factors; pixel (u, v) goes to (scale·u, scale·v).
            crop: (rows cut off at the top, columns cut off on the left) after the resize. Without ``size`` all that is
                left is kept.

        Raises:
            TypeError: neither ``size`` nor ``scale`` is given, or ``crop`` without ``scale``.
            ValueError: a factor is not positive, or nothing is left.

        Example:
            >>> nuscenes_rig().resized(scale=0.44, crop=(140, 0)).image_size  # BEVDet's test-time transform
            (256, 704)
            >>> nuscenes_rig().resized((1024, 1024)).image_size
            (1024, 1024)
        """
        height, width = self.image_size
        top, left = crop
        if scale is None:
            if size is None or (top, left) != (0, 0):
                raise TypeError(f"give scale, or size alone; got size={size!r}, scale=None, crop={crop!r}")
            rows, columns = pair("size", size)
            sy, sx = rows / height, columns / width
        else:
            sy, sx = (float(s) for s in (scale if isinstance(scale, (tuple, list)) else (scale, scale)))
            if not (0 < sy < math.inf and 0 < sx < math.inf):
                raise ValueError(f"scale must be positive; got {scale!r}")
            # As the public transforms: the integer part; 1e-9 for factors such as 0.29 that binary rounds down.
            left_over = (math.floor(height * sy + 1e-9) - top, math.floor(width * sx + 1e-9) - left)
            if size is None and min(left_over) < 1:
                raise ValueError(f"crop={crop!r} leaves {left_over} of an image of {self.image_size} by {scale!r}")
            rows, columns = pair("size", size if size is not None else left_over)
        factors = self.intrinsics.new_tensor((sx, sy, 1.0))
        cut = self.intrinsics.new_tensor((left, top, 0.0))
        rots = factors[:, None] * (self.post_rots if self.post_rots is not None else torch.eye(3).to(factors))
        trans = factors * self.post_trans - cut if self.post_trans is not None else -cut
        return self._made(post_rots=rots, post_trans=trans, image_size=(rows, columns))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_digest": None}

    def _matrices(self) -> dict[str, Tensor | None]:
        return {name: getattr(self, name) for name in ("intrinsics", "cam_to_ego", "post_rots", "post_trans", "bda")}

    def _made(self, **changed: Any) -> CameraRig:
        own: dict[str, Any] = {"image_size": self.image_size, "names": self.names if self._named else None}
        return CameraRig(**{**own, **self._matrices(), **changed})


def nuscenes_rig() -> CameraRig:
    """The six cameras of a nuScenes vehicle (n015, Singapore): images of 1600 x 900 pixels, poses in the ego frame.

    Example:
        >>> nuscenes_rig().names[:3]
        ('CAM_FRONT_LEFT', 'CAM_FRONT', 'CAM_FRONT_RIGHT')
    """
    text = resources.files(__package__).joinpath("data/nuscenes_rig.json").read_text(encoding="utf-8")
    data = json.loads(text)
    cameras = data["cameras"]
    poses = [np.column_stack((_rotation(c["sensor2ego_rotation_wxyz"]), c["sensor2ego_translation"])) for c in cameras]
    names = tuple(c["name"] for c in cameras)
    return CameraRig([c["K"] for c in cameras], poses, data["image_size_hw"], names=names)


def _rotation(quaternion: Sequence[float]) -> np.ndarray:
    """The rotation matrix of a quaternion (w, x, y, z)."""
    w, x, y, z = np.array(quaternion) / np.linalg.norm(quaternion)
    return np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
            [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
            [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
        ]
    )


# --- reading and checking what is given -------------------------------------------------------------------------------
#: Accepted shapes of an argument, without (B, N), and what may stand before them.
_ENDS: dict[str, tuple[tuple[int, ...], ...]] = {
    "intrinsics": ((3, 3),),
    "cam_to_ego": ((4, 4), (3, 4)),
    "post_rots": ((3, 3),),
    "post_trans": ((3,),),
    "bda": ((3, 3), (4, 4)),
}
_LEADS = {
    "intrinsics": ("N", "B, N"),
    "cam_to_ego": ("N", "B, N"),
    "post_rots": ("", "N", "B, N"),
    "post_trans": ("", "N", "B, N"),
    "bda": ("", "B"),
}


def _tensors(given: dict[str, Any]) -> dict[str, Tensor]:
    """Copies in float64, all on the device of those that are tensors."""
    devices = {name: value.device for name, value in given.items() if isinstance(value, Tensor)}
    if len(set(devices.values())) > 1:
        raise ValueError(
            f"all tensors must be on one device; got {', '.join(f'{k} on {v}' for k, v in devices.items())}"
        )
    device = next(iter(devices.values()), torch.device("cpu"))
    if device.type == "mps":
        raise ValueError("mps has no float64, which calibrations are kept in; give the matrices on the CPU")
    found = {}
    for name, value in given.items():
        if isinstance(value, (list, tuple)) and any(isinstance(v, Tensor) for v in value):
            value = torch.stack([torch.as_tensor(v) for v in value])
        try:
            tensor = value if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value, dtype=np.float64))
        except (TypeError, ValueError):
            raise TypeError(f"{name} must be a tensor, an array or nested lists of numbers; got {value!r}") from None
        if tensor.is_complex():
            raise TypeError(f"{name} must be real; got {tensor.dtype}")
        found[name] = tensor.detach().to(device, torch.float64, copy=True)
    return found


def _sizes(tensors: dict[str, Tensor]) -> tuple[int, int]:
    """(B, N) that all shapes agree on."""
    sizes: dict[str, dict[str, int]] = {"B": {}, "N": {}}
    for name, tensor in tensors.items():
        shape, ends, leads = tuple(tensor.shape), _ENDS[name], _LEADS[name]
        end = next((e for e in ends if shape[len(shape) - len(e) :] == e), None)
        lead = next(
            (k for k in leads if end is not None and len(shape) - len(end) == len(k.split(", ")) * bool(k)), None
        )
        if lead is None:
            accepted = [f"({', '.join([k] * bool(k) + [*map(str, e)])})" for e in ends for k in leads]
            raise ValueError(f"{name} must have shape {' or '.join(accepted)}; got {shape}")
        for letter, size in zip(lead.split(", ") if lead else (), shape):
            sizes[letter][name] = size
    (cameras, *others), batches = set(sizes["N"].values()), set(sizes["B"].values()) - {1}
    if others or len(batches) > 1:
        what, found = ("cameras", sizes["N"]) if others else ("samples", sizes["B"])
        raise ValueError(f"the numbers of {what} disagree: {', '.join(f'{k} has {v}' for k, v in found.items())}")
    batch = batches.pop() if batches else 1
    if not batch or not cameras:
        raise ValueError(f"at least one sample and one camera are needed; got B={batch}, N={cameras}")
    return batch, cameras


def _expanded(name: str, tensor: Tensor, batch: int, cameras: int) -> Tensor:
    """With its own (B, N), or (B,) for bda, in front, and memory of its own."""
    if name == "bda":
        return tensor.expand(batch, *tensor.shape[-2:]).contiguous()
    rank = 1 if name == "post_trans" else 2
    return tensor.expand(batch, cameras, *tensor.shape[tensor.ndim - rank :]).contiguous()


def _with_last_row(poses: Tensor) -> Tensor:
    if poses.shape[-2] == 4:
        return poses
    last = torch.eye(4, dtype=poses.dtype, device=poses.device)[3:]
    return torch.cat((poses, last.expand(*poses.shape[:-2], 1, 4)), -2)


def _homogeneous(bda: Tensor) -> Tensor:
    if bda.shape[-1] == 4:
        return bda
    return _with_last_row(torch.cat((bda, torch.zeros_like(bda[..., :1])), -1))


def _augmentation(expanded: dict[str, Tensor], like: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """post_rots and post_trans: both, if one of them is given."""
    rots, trans = expanded.get("post_rots"), expanded.get("post_trans")
    if rots is None and trans is not None:
        rots = torch.eye(3, dtype=like.dtype, device=like.device).expand_as(like).contiguous()
    if trans is None and rots is not None:
        trans = torch.zeros_like(rots[..., 0])
    return rots, trans


def _names(names: Sequence[str] | None, cameras: int) -> tuple[str, ...]:
    if names is None:
        return tuple(f"camera {n}" for n in range(cameras))
    if isinstance(names, str) or len(names) != cameras:
        raise ValueError(f"names must be one name for each of the {cameras} cameras; got {names!r}")
    return tuple(map(str, names))


def _check_values(rig: CameraRig) -> None:
    """Raise for the first matrix that is not what its argument is for."""
    found = {name: t.cpu() for name, t in rig._matrices().items() if t is not None}
    for name, t in found.items():
        _refuse(rig, name, t, ~torch.isfinite(t).flatten(1 if name == "bda" else 2).all(-1), "must be finite")
    bottom = torch.eye(4, dtype=torch.float64)[3]
    K, pose = found["intrinsics"], found["cam_to_ego"]
    _refuse(rig, "intrinsics", K, (K[..., 2, :] != bottom[1:]).any(-1), "must have the last row (0, 0, 1)")
    _refuse(rig, "intrinsics", K, _singular(K), "must be invertible")
    hint = "; its last column is (0, 0, 0, 1): is it transposed?" if bool((pose[..., 3] == bottom).all()) else ""
    _refuse(rig, "cam_to_ego", pose, (pose[..., 3, :] != bottom).any(-1), f"must have the last row (0, 0, 0, 1){hint}")
    R = pose[..., :3, :3]
    error = (R @ R.mT - torch.eye(3, dtype=torch.float64)).abs().amax((-2, -1))
    accepted = "its 3x3 block must be a rotation (give scales and flips of the ego frame as bda): "
    _refuse(rig, "cam_to_ego", pose, error > ORTHONORMAL, f"{accepted}no entry of |R Rᵀ - 1| above {ORTHONORMAL:g}")
    _refuse(rig, "cam_to_ego", pose, torch.linalg.det(R) < 0, f"{accepted}this one mirrors")
    if "post_rots" in found:
        rots, trans = found["post_rots"], found["post_trans"]
        mixed = (rots[..., 2, :] != bottom[1:]).any(-1) | (rots[..., :2, 2] != 0).any(-1)
        _refuse(rig, "post_rots", rots, mixed, "must act on (u, v) alone: third row and column (0, 0, 1)")
        _refuse(rig, "post_rots", rots, _singular(rots), "must be invertible")
        _refuse(rig, "post_trans", trans, trans[..., 2] != 0, "must act on (u, v) alone: 0 in the last place")
    if "bda" in found:
        bda = found["bda"]
        _refuse(rig, "bda", bda, (bda[..., 3, :] != bottom).any(-1), "must have the last row (0, 0, 0, 1)")
        _refuse(rig, "bda", bda, _singular(bda[..., :3, :3]), "must be invertible")


def _refuse(rig: CameraRig, name: str, tensor: Tensor, bad: Tensor, accepted: str) -> None:
    if not bool(bad.any()):
        return
    place = [int(k) for k in bad.nonzero()[0]]
    where = f"sample {place[0]}" if rig.shape[0] > 1 or name == "bda" else ""
    whose = ", ".join([where] * bool(where) + [rig.names[n] for n in place[1:]])
    raise ValueError(f"{name} of {whose} {accepted}; got {tensor[tuple(place)].tolist()}")


def _singular(matrix: Tensor) -> Tensor:
    """|det| against Hadamard's bound: a number without units."""
    return torch.linalg.det(matrix).abs() <= SINGULAR * torch.linalg.vector_norm(matrix, dim=-1).prod(-1)
