"""What holds for every test: where compiled code is kept, and which tests need what."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Tests never touch the user's cache. Their own one, in .pytest_cache, makes a second run quick."""
    if "KERNOPS_CACHE_DIR" not in os.environ:
        own = getattr(config, "cache", None)
        folder = own.mkdir("kernops") if own is not None else Path(tempfile.mkdtemp(prefix="kernops-tests-"))
        folder.chmod(0o700)
        os.environ["KERNOPS_CACHE_DIR"] = str(folder)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    needing = [item for item in items if "gpu" in item.path.relative_to(config.rootpath).parts or _marked(item)]
    if not needing:
        return
    import torch  # not at the top: collecting a few tests of formulas must stay quick

    if not torch.cuda.is_available():
        for item in needing:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _marked(item: pytest.Item) -> bool:
    return item.get_closest_marker("gpu") is not None


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory for one test, and for the processes that it starts."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("KERNOPS_CACHE_DIR", str(folder))
    return folder
