"""Tested on the back end that needs no compiler; a few tests take the compiled one as well."""

import pytest

from tests.helpers.one_thread import tiled  # noqa: F401

pytest.importorskip("gpytorch")
