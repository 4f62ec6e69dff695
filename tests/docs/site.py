"""The generator of the documentation, for the tests here."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(
    p.relative_to(ROOT).as_posix() for p in [*DOCS.rglob("*.md"), ROOT / "README.md"] if "_build" not in p.parts
)


def module(name: str) -> ModuleType:
    """A module of ``docs/``, which is no package."""
    if str(DOCS) not in sys.path:
        sys.path.append(str(DOCS))
    return importlib.import_module(name)
