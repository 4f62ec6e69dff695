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
from .frustum import numbers, pair
from .matrices import check_values, expanded, read

Tensor = torch.Tensor


class CameraRig:
    """Calibrated pinhole cameras and the augmentations of their images and of the BEV space.

    A pixel (u, v) of the network's input at depth d lies at ``bda @ cam_to_ego @ (d inv(K) inv(A) (u, v, 1))`` of the
    ego frame, where A is the image augmentation: ``A (u₀, v₀, 1) = (u, v, 1)`` for a pixel (u₀, v₀) of the camera.
    Tensors, arrays and nested lists are accepted; they are copied to float64 tensors on the device of the tensors, or
    on the CPU if there are none.

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
        TypeError: an argument is not made of real numbers.
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
        found = read(given)
        self.intrinsics: Tensor = found["intrinsics"]
        self.cam_to_ego: Tensor = found["cam_to_ego"]
        self.post_rots: Tensor | None = found.get("post_rots")
        self.post_trans: Tensor | None = found.get("post_trans")
        self.bda: Tensor | None = found.get("bda")
        self._named = names is not None
        self.names = _names(names, self.shape[1])
        self._digest: tuple[list[Tensor], list[Tensor], list[tuple], str] | None = None
        if check:
            check_values(found, self.names)

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

        Reading it waits for a GPU that the matrices are on. It is kept until one of the tensors gets other data or is
        changed in place (by an operation of torch: what the replay of a CUDA graph writes goes unnoticed).
        """
        tensors = [t for t in self._matrices().values() if t is not None]
        if any(t.is_inference() for t in tensors):  # torch does not count their changes
            return self._hash()
        now: list[tuple] = [(t._version, t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors]
        if self._digest is not None:
            seen, _, then, digest = self._digest
            if now == then and len(seen) == len(tensors) and all(map(operator.is_, seen, tensors)):
                return digest
        digest = self._hash()
        # Views of the data that were seen: as long as they are kept, no others can come to lie at the same address.
        self._digest = (tensors, [t.detach() for t in tensors], now, digest)
        return digest

    def _hash(self) -> str:
        batch, cameras = self.shape
        neutral = {"post_rots": torch.eye(3, device="cpu"), "post_trans": torch.zeros(3, device="cpu")}
        neutral["bda"] = torch.eye(4, device="cpu")
        digest = hashlib.sha256(repr((self.image_size, batch, cameras)).encode())
        for name, matrix in self._matrices().items():
            if matrix is None:  # the same digest as if it were given and did nothing
                matrix = expanded(name, neutral[name], batch, cameras)
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
            TypeError: neither ``size`` nor ``scale`` is given, ``crop`` without ``scale``, or one is not of numbers.
            ValueError: a factor is not positive, ``crop`` is not finite (without ``size``: not whole), or nothing is
                left.

        Example:
            >>> nuscenes_rig().resized(scale=0.44, crop=(140, 0)).image_size  # BEVDet's test-time transform
            (256, 704)
            >>> nuscenes_rig().resized((1024, 1024)).image_size
            (1024, 1024)
        """
        height, width = self.image_size
        top, left = _crop(crop)
        if scale is None:
            if size is None or (top, left) != (0, 0):
                raise TypeError(f"give scale, or size alone; got size={size!r}, scale=None, crop={crop!r}")
            rows, columns = pair("size", size)
            sy, sx = rows / height, columns / width
        else:
            sy, sx = _factors(scale)
            rows, columns = pair("size", _left_over(self.image_size, scale, crop) if size is None else size)
        factors = self.intrinsics.new_tensor((sx, sy, 1.0))
        cut = self.intrinsics.new_tensor((left, top, 0.0))
        before = torch.eye(3, dtype=factors.dtype, device=factors.device) if self.post_rots is None else self.post_rots
        rots = factors[:, None] * before
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


def _factors(scale: Any) -> tuple[float, float]:
    """The (vertical, horizontal) factors of a resize."""
    try:
        given, _ = scale, tuple(scale)
    except TypeError:
        given = (scale, scale)
    sy, sx = numbers("scale", given, "a number or two (vertical, horizontal)", 2)
    if not (0 < sy < math.inf and 0 < sx < math.inf):
        raise ValueError(f"scale must be positive and finite; got {scale!r}")
    return sy, sx


def _crop(crop: Any) -> tuple[float, float]:
    top, left = numbers("crop", crop, "two numbers (rows off the top, columns off the left)", 2)
    if not (math.isfinite(top) and math.isfinite(left)):
        raise ValueError(f"crop must be finite; got {crop!r}")
    return top, left


def _left_over(image_size: tuple[int, int], scale: Any, crop: Any) -> tuple[int, int]:
    """What a resize and a crop leave of an image."""
    resized = tuple(side * factor for side, factor in zip(image_size, _factors(scale)))
    if max(resized) >= 2**31:
        raise ValueError(f"scale={scale!r} makes {resized} of an image of {image_size}; less than 2**31 is accepted")
    cut = _crop(crop)
    if not all(map(float.is_integer, cut)):
        raise ValueError(f"crop must be whole numbers where size is not given; got {crop!r}")
    rows, columns = (_whole(side) - int(off) for side, off in zip(resized, cut))
    if min(rows, columns) < 1:
        raise ValueError(f"crop={crop!r} leaves {(rows, columns)} of an image of {image_size} by {scale!r}")
    return rows, columns


def _whole(size: float) -> int:
    """The integer part, as in the public transforms; what is a whole number up to float32's rounding is that number."""
    return round(size) if abs(size - round(size)) <= size * 2**-23 else math.floor(size)


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


def _names(names: Sequence[str] | None, cameras: int) -> tuple[str, ...]:
    if names is None:
        return tuple(f"camera {n}" for n in range(cameras))
    if isinstance(names, str) or len(names) != cameras:
        raise ValueError(f"names must be one name for each of the {cameras} cameras; got {names!r}")
    return tuple(map(str, names))
