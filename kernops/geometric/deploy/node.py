"""The node ``kernops::BevPool`` of ONNX files: its names, and the packages that read and write it.

The node, of domain ``kernops`` and version 1:

==============  ========================================================================================================
inputs          ``depth`` (B, N, D, h, w), ``feat`` (B, N, h, w, C), ``cells`` (B, N, D, h, w) of int32 or int64 with -1
                where a point is dropped, and optionally ``weight`` (B, N, D, h, w). All but ``cells`` are of one dtype.
output          ``pooled`` (B, Z, Y, X, C), of the dtype of ``feat``
``shape``       ints (B, Z, Y, X); -1 in the place of B stands for the B of ``depth``
``depth_logits``  int; 1: ``depth`` are logits, and their softmax over D is what counts
==============  ========================================================================================================
"""

from __future__ import annotations

import importlib
from typing import Any

DOMAIN, OP, VERSION = "kernops", "BevPool", 1
#: What makes an installation complete, in the words of error messages.
INSTALL = 'pip install "kernops[onnx]"'


def import_package(name: str) -> Any:
    """A module of the ``onnx`` extra, with what its users need of it."""
    try:
        module = importlib.import_module(name)
        if name == "onnx":
            importlib.import_module("onnx.parser")
    except ImportError as error:
        raise ImportError(f"ONNX export needs the package {name!r}, which cannot be imported: {INSTALL}") from error
    return module
