"""Keyword arguments of reductions: ours, and those of pykeops that mean something here or can be granted."""

from __future__ import annotations

from typing import Any

import torch

from ..autograd.tracing import cached
from ..backends import BACKENDS

#: Names of pykeops -> the device that the data have to be on; which back end computes there is our choice.
_KEOPS_BACKENDS = {
    "CPU": "cpu",
    **dict.fromkeys(
        ("GPU", "GPU_1D", "GPU_1D_device", "GPU_1D_host", "GPU_2D", "GPU_2D_device", "GPU_2D_host"), "cuda"
    ),
}
_DTYPES = ("auto", "float16", "bfloat16", "float32", "float64")
_SCHEMES = ("auto", "direct_sum", "block_sum", "kahan_scheme")
#: Options that are accepted and change nothing: sums are always accumulated in blocks with compensation, and large
#: dimensions need no special mode.
_GRANTED: dict[str, tuple[Any, ...] | None] = {
    "dtype_acc": _DTYPES,
    "use_double_acc": (False, True, 0, 1),
    "sum_scheme": _SCHEMES,
    "enable_chunks": (False, True, 0, 1),
    "use_fast_math": (False, True, 0, 1),
    "optional_flags": None,
    "rec_multVar_highdim": None,
    "dtype": None,
    "cuda_type": None,
}
_OWN = ("backend", "device_id", "out", "ranges", "call")


def check(options: dict[str, Any], also: tuple[str, ...] = ()) -> None:
    """Raise for an option that is unknown, has a value that is not accepted, or is not available yet."""
    for name, value in options.items():
        if name in _OWN or name in also:
            continue
        if name not in _GRANTED:
            known = ", ".join((*_OWN, *also, *_GRANTED))
            raise TypeError(f"unexpected keyword argument {name!r}; accepted are {known}")
        accepted = _GRANTED[name]
        if accepted is not None and value not in accepted:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, accepted))}; got {value!r}")
    if options.get("ranges") is not None:
        no_ranges()
    if options.get("backend") is not None:
        known_backend(options["backend"])
    if "dtype_acc" in options and options.get("use_double_acc") and options["dtype_acc"] != "auto":
        raise ValueError("dtype_acc and use_double_acc cannot both be set")


def no_ranges() -> None:
    raise NotImplementedError("ranges: block-sparse reductions are not available yet, with or without batch dimensions")


def known_backend(name: Any) -> str:
    if name != "auto" and name not in BACKENDS and name not in _KEOPS_BACKENDS:
        known = ", ".join(map(repr, ("auto", *BACKENDS, *_KEOPS_BACKENDS)))
        raise ValueError(f"backend must be one of {known}; got {name!r}")
    return name


@cached(256)
def backend_for(name: str | None, device: torch.device) -> str:
    """The back end for data on ``device``, by our own name."""
    if name is None:
        return "auto"
    wanted = _KEOPS_BACKENDS.get(known_backend(name))
    if wanted is None:
        return name
    if device.type != wanted:
        raise ValueError(
            f"backend {name!r} computes on {wanted}; the data are on {device}. Nothing is copied to another device"
        )
    return "auto"


def check_device(device_id: Any, device: torch.device) -> None:
    """``device_id`` of pykeops: -1, or the number of the GPU that the data are on."""
    if not isinstance(device_id, int):
        raise TypeError(f"device_id must be a whole number; got {type(device_id).__name__}")
    if device_id >= 0 and (device.type != "cuda" or device_id != (device.index or 0)):
        raise ValueError(
            f"device_id must be -1 or the number of the CUDA device with the data; got {device_id} for data on {device}"
        )
