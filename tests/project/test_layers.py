"""Who may import whom (downwards only), what the lower rooms must not import, and what the top level holds."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "kernops"

#: From the bottom up; a module may import its own layer and those below it. `environment` stands below `backends`.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("formula",),
    ("codegen",),
    ("environment",),
    ("backends",),
    ("lazy", "autograd", "solvers"),
    ("operators", "neighbors", "kernels", "geometric"),
    ("estimators",),
    ("gpytorch", "scipy"),
    ("demo", "bench", "__main__"),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}

#: What a layer must not import from outside, wherever in the file it tries to.
FORBIDDEN = {name: {"torch", "cupy", "sklearn", "numpy", "scipy", "gpytorch"} for name in ("formula", "codegen")}
#: Packages that only their users load: an import of them at the top of a module is an error, except in these layers.
ON_DEMAND = {
    "cupy": (),
    "sklearn": ("estimators", "demo"),
    "gpytorch": ("gpytorch",),
    "linear_operator": ("gpytorch",),
    "pykeops": (),
    "matplotlib": (),
    "onnx": (),
    "onnx_ir": (),
    "onnxscript": (),
    "onnxruntime": (),
    "PIL": ("demo",),
}


def layer_of(path: Path, package: Path = PACKAGE) -> str:
    """The first name under the package: `lazy` for lazy.py and for the files of a folder lazy/."""
    return path.relative_to(package).parts[0].removesuffix(".py")


def sources(package: Path = PACKAGE) -> Iterator[Path]:
    for folder, _, names in os.walk(package, followlinks=True):  # rglob follows no links before Python 3.13
        yield from (Path(folder) / name for name in names if name.endswith(".py"))


def imports(path: Path, package: Path = PACKAGE) -> Iterator[tuple[str, int, bool]]:
    """`(absolute dotted name, line, whether it runs when the module is imported)` of every import of a file.

    `from a.b import c` counts as `a.b.c`, so that `from kernops import lazy` is seen as an import of `kernops.lazy`.
    """
    here = (package.name, *path.relative_to(package).parts[:-1])
    tree = ast.parse(path.read_text(encoding="utf-8"))
    at_import = set(_top_level(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno, node in at_import) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else ()
            prefix = ".".join((*base, *([node.module] if node.module else [])))
            yield from ((f"{prefix}.{alias.name}", node.lineno, node in at_import) for alias in node.names)


def _top_level(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes that run at import: everything outside functions and outside `if TYPE_CHECKING:`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from _top_level(child)


def complaints(package: Path = PACKAGE) -> list[str]:
    found = []
    for path in sources(package):
        layer = layer_of(path, package)
        if layer == "__init__":  # the public names: lazily, which test_import.py holds
            continue
        where = path.relative_to(package)
        if layer not in LEVEL:
            found.append(f"{where}: the layer of {layer!r} is not declared")
            continue
        for name, line, at_import in imports(path, package):
            top, _, rest = name.partition(".")
            target = rest.partition(".")[0]
            if top == package.name and target in LEVEL and LEVEL[target] > LEVEL[layer]:
                found.append(f"{where}:{line}: {layer} imports {name}, which stands above it")
            if top in FORBIDDEN.get(layer, ()):
                found.append(f"{where}:{line}: {layer} must not import {top}")
            if at_import and top in ON_DEMAND and layer not in ON_DEMAND[top]:
                found.append(f"{where}:{line}: {top} must be imported only where it is used")
    return found


def test_nobody_imports_upwards():
    assert complaints() == []


def test_the_linked_folders_are_looked_at():
    assert {layer_of(path) for path in sources()} >= {"formula", "codegen", "backends", "estimators"}


BAD = {
    "formula/a.py": ("from ..lazy import LazyTensor", "formula imports kernops.lazy.LazyTensor, which stands above it"),
    "formula/b.py": ("def f():\n    import torch.nn", "formula must not import torch"),
    "codegen/c.py": ("from kernops import backends", "codegen imports kernops.backends, which stands above it"),
    "backends/d.py": ("from .. import estimators", "backends imports kernops.estimators, which stands above it"),
    "backends/e.py": ("try:\n    import cupy\nexcept ImportError:\n    pass", "cupy must be imported only where"),
    "unheard_of/f.py": ("", "the layer of 'unheard_of' is not declared"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_import_is_found(name, tmp_path):
    path = tmp_path / "kernops" / name
    path.parent.mkdir(parents=True)
    text, message = BAD[name]
    path.write_text(text)
    (complaint,) = complaints(tmp_path / "kernops")
    assert message in complaint


GOOD = {
    "lazy/a.py": "from ..backends import reduce\nfrom ..formula.graph import Node\nfrom . import b",
    "backends/b.py": "def f():\n    import cupy",
    "backends/c.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import cupy",
}


@pytest.mark.parametrize("name", GOOD)
def test_a_right_import_passes(name, tmp_path):
    path = tmp_path / "kernops" / name
    path.parent.mkdir(parents=True)
    path.write_text(GOOD[name])
    assert complaints(tmp_path / "kernops") == []


def test_estimators_import_relatively():
    """So that a stray `import estimators` from the repository's root fails loudly instead of giving a second copy."""
    for path in (ROOT / "estimators").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                assert node.level or (node.module or "").partition(".")[0] != "kernops", f"{path}:{node.lineno}"
            elif isinstance(node, ast.Import):
                assert "kernops" not in {alias.name.partition(".")[0] for alias in node.names}, f"{path}:{node.lineno}"


def test_top_level_is_fixed():
    allowed = {"pyproject.toml", "kernops", "estimators", "cuda", "tests", "docs", "README.md", "LICENSE"}
    ignored = {"build", "dist", "kernops-demo"}  # made by tools, and in .gitignore
    assert {name for name in os.listdir(ROOT) if not name.startswith(".")} - ignored <= allowed


def test_cuda_is_no_python_package():
    """A module called `cuda` would hide NVIDIA's namespace package of that name, which CuPy imports."""
    assert not list((ROOT / "cuda").rglob("*.py"))
