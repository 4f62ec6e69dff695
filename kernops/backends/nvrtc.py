"""Compiling CUDA C++ with NVRTC through CuPy: no nvcc, no host compiler, and, to compile only, no GPU and no driver."""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from . import cache

OPTIONS = ("-std=c++17",)
#: The CUDA sources: a folder of the package in a wheel, a link to the repository's ``cuda`` in a checkout.
HEADERS = Path(__file__).resolve().parents[1] / "cuda"
CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x", "cupy")


def missing() -> str | None:
    """Why nothing can be compiled here, or None. Cheap: the compiler is not loaded where its file is seen."""
    if not HEADERS.is_dir():
        return f"the CUDA sources are missing at {HEADERS}; was kernops checked out without symbolic links?"
    if find_spec("cupy") is None:
        return "CuPy is not installed; pip install 'kernops[cuda13]', or 'kernops[cuda12]' for CUDA 12"
    if _libraries():
        return None
    try:
        _nvrtc()
    except RuntimeError as error:
        return str(error)
    return None


def compile(source: str, arch: str, options: tuple[str, ...] = (), path: Path | None = None) -> bytes:
    """The cubin of a translation unit for an architecture such as ``"sm_90a"``.

    PTX for the newest architecture that NVRTC knows, if the one asked for is newer than NVRTC: the driver finishes it.
    A failure raises ``RuntimeError`` with the compiler's log and the path of the source, which is ``path`` if the
    caller has saved it and a temporary file otherwise.
    """
    return report(source, arch, options, path)[0]


def report(source: str, arch: str, options: tuple[str, ...] = (), path: Path | None = None) -> tuple[bytes, str]:
    """:func:`compile`, and the compiler's log (registers and spills with ``--ptxas-options=-v``)."""
    nvrtc, target = _nvrtc(), _target(arch)
    texts = headers()
    program = nvrtc.createProgram(source, "kernops.cu", list(texts.values()), list(texts))
    try:
        try:
            nvrtc.compileProgram(program, (f"-arch={target}", *OPTIONS, *options))
        except nvrtc.NVRTCError as error:
            path = path or _saved(source)
            raise RuntimeError(f"NVRTC could not compile {path} for {target} ({error}):\n"
                               f"{nvrtc.getProgramLog(program)}") from None  # fmt: skip
        log = nvrtc.getProgramLog(program)
        if target.startswith("compute_"):
            text = nvrtc.getPTX(program)  # bytes or str, by CuPy's version
            return (text.encode() if isinstance(text, str) else text).rstrip(b"\0") + b"\0", log
        # CuPy takes the last byte for a terminator and drops it; it belongs to the file.
        return nvrtc.getCUBIN(program) + b"\0", log
    finally:
        nvrtc.destroyProgram(program)


def cubin(source: str, arch: str, description: str = "") -> bytes:
    """:func:`compile` through the disk cache."""

    def build(folder: Path) -> None:
        path = folder / "kernops.cu"
        path.write_text(source)
        (folder / "kernops.cubin").write_bytes(compile(source, arch, path=path))

    key = (source, headers_digest(), toolchain(), " ".join(OPTIONS), arch)
    return cache.artifact("cuda", key, "kernops.cubin", build, description=description).read_bytes()


@lru_cache(maxsize=1)
def headers() -> dict[str, bytes]:
    """Our headers by name: NVRTC looks nowhere else."""
    return {path.name.encode(): path.read_bytes() for path in sorted(HEADERS.glob("*.cuh"))}  # type: ignore[misc]


@lru_cache(maxsize=1)
def headers_digest() -> str:
    return cache.headers_digest(sorted(HEADERS.glob("*.cuh")))


@lru_cache(maxsize=1)
def toolchain() -> str:
    """Text that changes when the compiler does; found without loading it, which takes a tenth of a second."""
    files = [f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in _libraries()]
    return "\n".join([*_cupy_versions(), *(files or [str(_nvrtc().getVersion())])])


def _cupy_versions() -> Iterator[str]:
    for name in CUPY:
        try:
            yield f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue


@lru_cache(maxsize=1)
def _libraries() -> list[Path]:
    """Files of NVRTC in NVIDIA's packages and the toolkit's usual places, of the CUDA that CuPy was built for."""
    cupy = next(_cupy_versions(), "")
    major = next((m for m in ("13", "12", "11") if f"cuda{m}x" in cupy), "*")
    spec = find_spec("nvidia")
    packages = [Path(p) for p in spec.submodule_search_locations or ()] if spec else []
    toolkits = [Path(p) for p in (os.environ.get("CUDA_PATH"), os.environ.get("CUDA_HOME"), "/usr/local/cuda") if p]
    found = [f for p in packages for pattern in (f"*/lib/libnvrtc.so.{major}*", f"*/bin/**/nvrtc64_{major}*.dll")
             for f in p.glob(pattern)]  # fmt: skip
    found += [f for p in toolkits for pattern in (f"lib64/libnvrtc.so.{major}*", f"bin/**/nvrtc64_{major}*.dll")
              for f in p.glob(pattern)]  # fmt: skip
    return sorted({f.resolve() for f in found})


@lru_cache(maxsize=1)
def _nvrtc() -> Any:
    """CuPy's binding of NVRTC, with the library loaded."""
    try:
        from cupy_backends.cuda.libs import nvrtc  # what cupy.cuda.nvrtc is, without the rest of CuPy
    except ImportError as error:
        raise RuntimeError(f"CuPy's binding of NVRTC cannot be imported: {error}") from error
    try:
        nvrtc.getVersion()
        return nvrtc
    except (RuntimeError, ImportError, OSError) as error:
        first = error
    for path in _libraries():  # older CuPy looks on the loader's path only, where pip's packages are not
        try:
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
    try:
        nvrtc.getVersion()
    except (RuntimeError, ImportError, OSError):
        hint = "pip install nvidia-cuda-nvrtc (CUDA 13) or nvidia-cuda-nvrtc-cu12"
        raise RuntimeError(f"CuPy cannot load NVRTC; {hint}: {first}") from first
    return nvrtc


def _target(arch: str) -> str:
    """``arch``, or the newest older one that NVRTC knows, as a virtual architecture."""
    wanted = int("".join(c for c in arch if c.isdigit()))
    known = _nvrtc().getSupportedArchs()
    if wanted in known:
        return arch
    older = [a for a in known if a < wanted]
    if not older:
        raise RuntimeError(f"NVRTC {_nvrtc().getVersion()} does not support {arch}; it supports {known}")
    return f"compute_{max(older)}"


def _saved(source: str) -> Path:
    with tempfile.NamedTemporaryFile("w", prefix="kernops-", suffix=".cu", delete=False) as file:
        file.write(source)
    return Path(file.name)
