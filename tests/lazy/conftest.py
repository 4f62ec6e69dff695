"""The front end is tested on the pure torch back end, where no formula is compiled, unless a test names others."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _tiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNOPS_BACKEND", "tiled")
