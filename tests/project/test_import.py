"""`import kernops` does nothing: it loads no other package, compiles nothing, and costs no time that anyone notices."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

import kernops

ROOT = Path(__file__).parents[2]


def run(code: str, *options: str, **kwargs) -> str:
    done = subprocess.run([sys.executable, *options, "-c", code], capture_output=True, text=True, cwd=ROOT, **kwargs)
    assert done.returncode == 0, done.stderr
    return done.stdout


def modules_after(code: str) -> set[str]:
    return set(json.loads(run(f"{code}\nimport json, sys\nprint(json.dumps(list(sys.modules)))").splitlines()[-1]))


def test_import_loads_only_itself():
    loaded = modules_after("import kernops")
    assert not loaded & {"torch", "numpy", "cupy", "sklearn", "gpytorch", "pykeops", "scipy", "pandas", "matplotlib"}
    assert {name for name in loaded if name.startswith("kernops")} == {"kernops"}


def test_the_front_end_loads_no_optional_package(empty_cache):
    loaded = modules_after("from kernops import *")
    assert "torch" in loaded
    assert not loaded & {"cupy", "sklearn", "gpytorch", "pykeops", "scipy", "pandas", "matplotlib", "PIL"}
    assert not empty_cache.exists(), "something was compiled"


def test_every_public_name_is_there():
    for name in kernops.__all__:
        assert getattr(kernops, name) is not None
    for name in kernops._MODULES:
        assert getattr(kernops, name).__name__ == f"kernops.{name}"
    assert set(kernops.__all__) | set(kernops._MODULES) <= set(dir(kernops))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Lazytensor'"):
        _ = kernops.Lazytensor


def test_the_front_end_adds_little_to_torch():
    """Less than 0.2 s beside `import torch`: measured within one process, the best of a few, on CPU time."""
    code = "import time, torch, numpy; t = time.process_time(); from kernops import *; print(time.process_time() - t)"
    times = [float(run(code)) for _ in range(3)]
    assert min(times) < 0.2, f"median {statistics.median(times):.3f} s"


def test_a_package_without_its_cuda_sources_says_so(tmp_path):
    """What a checkout without symbolic links gives: a small text file in the folder's place."""
    (tmp_path / "kernops").mkdir()
    shutil.copy(ROOT / "kernops" / "__init__.py", tmp_path / "kernops")
    (tmp_path / "kernops" / "cuda").write_text("../cuda")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nimport kernops"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True)
    assert done.returncode != 0
    assert "symbolic links" in done.stderr and "core.symlinks" in done.stderr
