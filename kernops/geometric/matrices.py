"""The matrices of a camera rig: read from what is given, brought to one shape, and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

Tensor = torch.Tensor

#: Largest accepted entry of |R Rᵀ - 1|: calibrations kept in float32, or with four decimals, pass.
ORTHONORMAL = 1e-3
#: Smallest accepted |determinant|, relative to the product of the lengths of the rows.
SINGULAR = 1e-12

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


def read(given: Mapping[str, Any]) -> dict[str, Tensor]:
    """The matrices of a rig of B samples and N cameras, as its attributes have them, without those that it has not.

    Args:
        given: the arguments ``intrinsics``, ``cam_to_ego``, ``post_rots``, ``post_trans`` and ``bda``, or None.

    Raises:
        TypeError: an argument is not made of real numbers, or one of the first two is None.
        ValueError: shapes or devices disagree.
    """
    found = _tensors({name: value for name, value in given.items() if value is not None})
    if not {"intrinsics", "cam_to_ego"} <= set(found):
        raise TypeError("intrinsics and cam_to_ego must be given; got None")
    batch, cameras = _sizes(found)
    found = {name: expanded(name, t, batch, cameras) for name, t in found.items()}
    found["cam_to_ego"] = _with_last_row(found["cam_to_ego"])
    if "bda" in found:
        found["bda"] = _homogeneous(found["bda"])
    return _augmentation(found)


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
    return {name: _real(name, value).detach().to(device, torch.float64, copy=True) for name, value in given.items()}


def _real(name: str, value: Any) -> Tensor:
    """As a tensor of real numbers; on the CPU unless it is one already."""
    try:
        if isinstance(value, (list, tuple)) and any(isinstance(v, Tensor) for v in value):
            value = torch.stack([_real(name, v) for v in value])
        if not isinstance(value, Tensor):
            array = np.asarray(value)
            value = torch.from_numpy(array if np.iscomplexobj(array) else np.array(array, dtype=np.float64))
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name} must be a tensor, an array or nested lists of real numbers; got {value!r}") from None
    if value.is_complex():
        raise TypeError(f"{name} must be real; got {value.dtype}")
    return value  # type: ignore[no-any-return]


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


def expanded(name: str, tensor: Tensor, batch: int, cameras: int) -> Tensor:
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


def _augmentation(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """With both post_rots and post_trans, if one of them is given."""
    like = found["intrinsics"]
    if "post_rots" in found:
        found.setdefault("post_trans", torch.zeros_like(found["post_rots"][..., 0]))
    elif "post_trans" in found:
        found["post_rots"] = torch.eye(3, dtype=like.dtype, device=like.device).expand_as(like).contiguous()
    return found


def check_values(matrices: Mapping[str, Tensor], cameras: Sequence[str]) -> None:
    """Raise for the first matrix that is not what its argument is for; the cameras have these names."""
    found = {name: t.cpu() for name, t in matrices.items()}
    for name, t in found.items():
        _refuse(cameras, name, t, ~torch.isfinite(t).flatten(1 if name == "bda" else 2).all(-1), "must be finite")
    bottom = torch.eye(4, dtype=torch.float64, device="cpu")[3]
    K, pose = found["intrinsics"], found["cam_to_ego"]
    _refuse(cameras, "intrinsics", K, (K[..., 2, :] != bottom[1:]).any(-1), "must have the last row (0, 0, 1)")
    _refuse(cameras, "intrinsics", K, _singular(K), "must be invertible")
    hint = "; its last column is (0, 0, 0, 1): is it transposed?" if bool((pose[..., 3] == bottom).all()) else ""
    _refuse(
        cameras, "cam_to_ego", pose, (pose[..., 3, :] != bottom).any(-1), f"must have the last row (0, 0, 0, 1){hint}"
    )
    R = pose[..., :3, :3]
    error = (R @ R.mT - torch.eye(3, dtype=torch.float64, device="cpu")).abs().amax((-2, -1))
    accepted = "its 3x3 block must be a rotation (give scales and flips of the ego frame as bda): "
    _refuse(cameras, "cam_to_ego", pose, error > ORTHONORMAL, f"{accepted}no entry of |R Rᵀ - 1| above {ORTHONORMAL:g}")
    _refuse(cameras, "cam_to_ego", pose, torch.linalg.det(R) < 0, f"{accepted}this one mirrors")
    if "post_rots" in found:
        rots, trans = found["post_rots"], found["post_trans"]
        mixed = (rots[..., 2, :] != bottom[1:]).any(-1) | (rots[..., :2, 2] != 0).any(-1)
        _refuse(cameras, "post_rots", rots, mixed, "must act on (u, v) alone: third row and column (0, 0, 1)")
        _refuse(cameras, "post_rots", rots, _singular(rots), "must be invertible")
        _refuse(cameras, "post_trans", trans, trans[..., 2] != 0, "must act on (u, v) alone: 0 in the last place")
    if "bda" in found:
        bda = found["bda"]
        _refuse(cameras, "bda", bda, (bda[..., 3, :] != bottom).any(-1), "must have the last row (0, 0, 0, 1)")
        _refuse(cameras, "bda", bda, _singular(bda[..., :3, :3]), "must be invertible")


def _refuse(cameras: Sequence[str], name: str, tensor: Tensor, bad: Tensor, accepted: str) -> None:
    if not bool(bad.any()):
        return
    place = [int(k) for k in bad.nonzero()[0]]
    where = f"sample {place[0]}" if len(tensor) > 1 or name == "bda" else ""
    whose = ", ".join([where] * bool(where) + [cameras[n] for n in place[1:]])
    raise ValueError(f"{name} of {whose} {accepted}; got {tensor[tuple(place)].tolist()}")


def _singular(matrix: Tensor) -> Tensor:
    """|det| against Hadamard's bound: a number without units."""
    return torch.linalg.det(matrix).abs() <= SINGULAR * torch.linalg.vector_norm(matrix, dim=-1).prod(-1)
