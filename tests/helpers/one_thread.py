"""A fixture of folders that test on the back end that needs no compiler; a few tests take the compiled one as well."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def tiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("KERNOPS_BACKEND", "tiled")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # thousands of small calls: threads would only wait for one another
    yield
    torch.set_num_threads(threads)
