"""kernops: reductions over all pairs of points, on GPU and CPU, without ever storing the table of pairs.

Importing it imports nothing else: the public names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .backends.tune import autotune as autotune
    from .lazy import Genred as Genred
    from .lazy import KernelSolve as KernelSolve
    from .lazy import LazyTensor as LazyTensor
    from .lazy import Pm as Pm
    from .lazy import Vi as Vi
    from .lazy import Vj as Vj
    from .lazy.explaining import explain as explain

#: Where each public name lives.
_HOMES = {
    "LazyTensor": "lazy",
    "Vi": "lazy",
    "Vj": "lazy",
    "Pm": "lazy",
    "Genred": "lazy",
    "KernelSolve": "lazy",
    "explain": "lazy.explaining",
    "autotune": "backends.tune",
}
#: Modules that `import kernops` alone makes reachable.
_MODULES = (
    "backends",
    "estimators",
    "formula",
    "geometric",
    "kernels",
    "lazy",
    "neighbors",
    "operators",
    "scipy",
    "solvers",
)

__all__ = ["__version__", *_HOMES]

if not os.path.isdir(os.path.join(os.path.dirname(__file__), "cuda")):
    raise ImportError(
        f"{os.path.dirname(__file__)} has no folder 'cuda' with the kernels' sources: this kernops was checked out or "
        "packaged without symbolic links (kernops/cuda and kernops/estimators are links to folders of the repository). "
        "Set `git config core.symlinks true`, check out again and reinstall."
    )


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value  # the next use finds it without this function
        return value
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_MODULES})
