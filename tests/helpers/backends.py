"""Which back ends tests run on."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from kernops.backends import BACKENDS, choose

#: Back ends for data on the CPU; tests in tests/gpu name the others themselves.
ON_CPU = [name for name, devices in BACKENDS.items() if "cpu" in devices]
COMPILED = [name for name in ON_CPU if name != "tiled"]


def need(backend: str, device: str = "cpu") -> None:
    """Skip the test where ``backend`` cannot run, with its own reason; ``"program"`` is an interpreter of tests."""
    if backend == "program":
        return
    if importlib.util.find_spec(f"kernops.backends.{backend}") is None:
        pytest.skip(f"there is no back end {backend!r}")
    try:
        choose(backend, torch.device(device))
    except RuntimeError as error:
        pytest.skip(str(error))
