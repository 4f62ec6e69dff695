"""What users get: a wheel built from the checkout and from the sdist, installed elsewhere and used from elsewhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOP = ("pyproject.toml", "README.md", "LICENSE", "kernops", "estimators", "cuda", "tests", "docs", ".gitignore")
IGNORED = shutil.ignore_patterns("__pycache__", ".*_cache", "_build")


def call(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy, links kept, so that nothing that lies about in the working tree is packaged, nor anything left in it."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in TOP:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=IGNORED)
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, folder / name)
    return folder


def build(target: str, source: Path, out: Path) -> Path:
    call("-m", "hatchling", "build", "-t", target, "-d", out, cwd=source)
    (made,) = out.iterdir()
    return made


@pytest.fixture(scope="module")
def wheel(checkout, tmp_path_factory) -> Path:
    return build("wheel", checkout, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(checkout, tmp_path_factory) -> Path:
    return build("sdist", checkout, tmp_path_factory.mktemp("sdist"))


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def package_files() -> set[str]:
    """Every file of the package as it lies in the working tree, the linked folders included."""
    found = set()
    for folder, subfolders, names in os.walk(ROOT / "kernops", followlinks=True):
        subfolders[:] = [name for name in subfolders if name != "__pycache__" and not name.endswith("_cache")]
        found |= {(Path(folder) / name).relative_to(ROOT).as_posix() for name in names}
    return found


def test_wheel_holds_the_whole_package_and_nothing_else(wheel):
    names = {name for name in names_in(wheel) if ".dist-info/" not in name}
    assert names == package_files()
    assert "kernops/estimators/__init__.py" in names
    assert [name for name in names if name.startswith("kernops/cuda/") and name.endswith(".cuh")]
    assert [name for name in names if name.startswith("kernops/backends/host/") and name.endswith(".h")]


def test_wheel_carries_the_license(wheel):
    assert [name for name in names_in(wheel) if ".dist-info/licenses/" in name and name.endswith("LICENSE")]


def test_sdist_builds_the_same_wheel(wheel, sdist, tmp_path):
    with tarfile.open(sdist) as archive:
        if hasattr(tarfile, "data_filter"):
            archive.extractall(tmp_path / "source", filter="data")
        else:
            archive.extractall(tmp_path / "source")
    (source,) = (tmp_path / "source").iterdir()
    assert (source / "tests" / "constraints-cpu.txt").is_file()
    assert names_in(build("wheel", source, tmp_path / "out")) == names_in(wheel)


USE = """
import torch, kernops, kernops.estimators
print(kernops.__file__)
x, y = torch.rand(20, 3, dtype=torch.float64), torch.rand(30, 3, dtype=torch.float64)
got = (-kernops.Vi(x).sqdist(kernops.Vj(y))).exp().sum(1)
expected = (-torch.cdist(x, y) ** 2).exp().sum(1, keepdim=True)
torch.testing.assert_close(got, expected)
"""


def test_wheel_works_installed_elsewhere(wheel, tmp_path):
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    options = ("--quiet", "--no-deps", "--no-index", "--no-compile", "--target", site)
    call("-m", "pip", "install", *options, wheel, cwd=elsewhere)
    shown = call("-c", USE, cwd=elsewhere, PYTHONPATH=str(site), KERNOPS_CACHE_DIR=str(tmp_path / "cache"))
    assert shown.splitlines()[0].startswith(str(site))
    assert call("-m", "kernops", "--version", cwd=elsewhere, PYTHONPATH=str(site)).startswith("kernops ")


def test_installed_command_says_where_the_cache_is(tmp_path):
    shown = call("-m", "kernops", "cache", cwd=ROOT, KERNOPS_CACHE_DIR=str(tmp_path))
    assert shown == f"0 entries, 0 B, in {tmp_path}\n"
