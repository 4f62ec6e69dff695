"""Fixtures of the tests of derivatives."""

from __future__ import annotations

import pytest

from tests.helpers.backends import ON_CPU, need


@pytest.fixture(params=sorted(ON_CPU, key="tiled".__ne__))
def backend(request: pytest.FixtureRequest) -> str:
    """Every back end that runs here."""
    need(request.param)
    return request.param
