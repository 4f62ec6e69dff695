"""The examples of docstrings run."""

from __future__ import annotations

import doctest
import importlib

import numpy as np
import pytest
import torch

MODULES = (
    "kernops.estimators._gaussian_process",
    "kernops.kernels.constructors",
    "kernops.kernels.kernel",
    "kernops.kernels.sklearn",
    "kernops.operators.base",
    "kernops.operators.blocks",
    "kernops.operators.kernel",
    "kernops.operators.choice",
    "kernops.operators.preconditioning",
    "kernops.operators.structured",
    "kernops.operators.variance",
    "kernops.scipy",
)


@pytest.mark.parametrize("module", MODULES)
def test_examples_of_docstrings(module, monkeypatch):
    monkeypatch.setenv("KERNOPS_BACKEND", "tiled")
    found = doctest.testmod(
        importlib.import_module(module),
        extraglobs={"torch": torch, "np": np},
        optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE,
    )
    assert found.failed == 0
