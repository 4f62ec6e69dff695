"""The package is there on demand: with GPyTorch, and never by itself."""

from __future__ import annotations

import pytest

from kernops import gpytorch as ours
from tests.project.test_import import modules_after, run


def test_nothing_else_loads_it():
    loaded = modules_after("import kernops.operators, kernops.estimators, kernops.scipy")
    assert not {name for name in loaded if name.split(".")[0] in ("gpytorch", "linear_operator")}


@pytest.mark.parametrize("missing", ["gpytorch", "linear_operator"])
def test_the_extra_is_named_where_it_is_missing(missing):
    code = f"""
import sys
sys.modules[{missing!r}] = None
try:
    import kernops.gpytorch
except ImportError as error:
    print(error)
"""
    said = run(code)
    assert said.startswith("kernops.gpytorch needs GPyTorch (") and missing in said
    assert "pip install 'kernops[gpytorch]'" in said


def test_every_public_name_is_there():
    assert all(getattr(ours, name).__name__ == name for name in ours.__all__)
