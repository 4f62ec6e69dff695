"""Errors of the CPU back end's SIMD functions, in units in the last place, over their whole ranges."""

from __future__ import annotations

import ctypes
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path

import mpmath
import numpy as np
import pytest
import torch

from kernops.backends import cpu

REASON = cpu.available(torch.device("cpu"))
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

#: Function -> largest error allowed. The functions of the C library, lane by lane, are left to the tests of ops.
LIMITS = {
    "exp": 2.0, "exp2": 2.0, "expm1": 2.0, "log": 2.0, "log2": 2.0, "log1p": 2.0, "sin": 2.0, "cos": 2.0, "tanh": 2.5,
    "sqrt": 0.5001, "rsqrt": 2.0,
}  # fmt: skip
#: Flags that choose the width of vectors, by what they need.
BASELINE = {"x86_64": {"": "-march=x86-64", "avx2": "-march=x86-64 -mavx2 -mfma"}}
NATIVE = "native"
REALS = {"float": ("f32", np.float32), "double": ("f64", np.float64)}


def _variants() -> list[str]:
    known = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return [NATIVE, *(v for need, v in BASELINE.get(platform.machine(), {}).items() if need in known)]


@pytest.fixture(scope="module", params=_variants() if REASON is None else [NATIVE])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Each function applied to an array, at one width of vectors."""
    folder = tmp_path_factory.mktemp("math")
    lines = ['#include "host/functions.h"', "using namespace kn;"]
    for real, (vector, _) in REALS.items():
        for name in LIMITS:
            lines.append(
                f'extern "C" __attribute__((visibility("default"))) void {name}_{real}'
                f"(const {real}* x, {real}* y, int64_t n) {{ for (int64_t i = 0; i < n; i += LANES<{real}>)"
                f" store<{real}>(y + i, {name}(load<{real}>(x + i))); }}  // {vector}"
            )
    source, target = folder / "math.cpp", folder / "math.so"
    source.write_text("\n".join(lines))
    command, _ = cpu._compiler(None)  # type: ignore
    arch = cpu._NATIVE.get(platform.machine(), "") if request.param == NATIVE else request.param
    include = f"-I{Path(cpu.__file__).parent}"
    subprocess.run([*command, *cpu.FLAGS, *arch.split(), include, str(source), "-o", str(target)], check=True)
    return ctypes.CDLL(str(target))


def _call(library: ctypes.CDLL, name: str, x: np.ndarray) -> np.ndarray:
    real = {4: "float", 8: "double"}[x.itemsize]
    x = np.ascontiguousarray(np.resize(x, -(-len(x) // 16) * 16))  # full vectors: the array repeats
    y = np.empty_like(x)
    getattr(library, f"{name}_{real}")(x.ctypes.data_as(ctypes.c_void_p), y.ctypes.data_as(ctypes.c_void_p),
                                       ctypes.c_int64(len(x)))  # fmt: skip
    return y


def _ulps(got: np.ndarray, want: np.ndarray, lost: np.ndarray | None = None) -> np.ndarray:
    """Distance of ``got`` from ``want + lost`` in units in the last place of ``got``'s type.

    Results below the smallest normal number may be 0. What is not finite must be what it should be.
    """
    kind = np.finfo(got.dtype)
    rounded = want.astype(got.dtype)
    unit = np.spacing(np.maximum(np.abs(rounded), kind.tiny)).astype(want.dtype)
    with np.errstate(invalid="ignore"):
        error = np.abs((got.astype(want.dtype) - want) - (0 if lost is None else lost)) / unit
    error[(got == rounded) & ~np.isfinite(error)] = 0
    error[np.isnan(got) & np.isnan(want)] = 0
    error[(np.abs(want) < kind.tiny) & (got == 0)] = 0
    return np.where(np.isnan(error), np.inf, error)


def _bits(dtype: type, n: int) -> np.ndarray:
    """Numbers with random bits: all sizes and signs, NaN too."""
    words = {4: np.uint32, 8: np.uint64}[np.dtype(dtype).itemsize]
    rng = np.random.default_rng(0)
    return rng.integers(0, np.iinfo(words).max, size=n, dtype=words, endpoint=True).view(dtype)  # type: ignore


def _special(dtype: type) -> np.ndarray:
    kind = np.finfo(dtype)
    powers = [kind.maxexp, kind.minexp, kind.minexp - kind.nmant]
    turning = [*powers, *(p * np.log(2.0) for p in powers)]  # where exponentials overflow and vanish
    base = np.array([0.0, 1.0, np.inf, kind.max, kind.tiny, kind.tiny * kind.eps, *turning], dtype)  # type: ignore
    with np.errstate(over="ignore"):
        near = np.concatenate([base, np.nextafter(base, dtype(0)), np.nextafter(base, dtype(np.inf)), [dtype(np.nan)]])
    return np.concatenate([near, -near])


def _ranges(name: str, dtype: type, n: int) -> list[np.ndarray]:
    """Dense samples where the function's reduction or polynomial might be wrong."""
    kind = np.finfo(dtype)
    top = kind.maxexp * np.log(2.0)
    around_one = [(0.5, 2.0), (0.999, 1.001), (1e-3, 5.0)]
    spans = {
        "exp": [(-top, top), (-1, 1)], "exp2": [(kind.minexp, kind.maxexp), (-1, 1)],
        "expm1": [(-40, top), (-1, 1), (-1e-3, 1e-3)], "tanh": [(-20, 20), (-1, 1), (-1e-3, 1e-3)],
        "log": around_one, "log2": around_one, "log1p": [(-0.99, 4), (-1e-3, 1e-3)],
        "sin": [(-7, 7), (-1e5, 1e5), (-2e6, 2e6)], "cos": [(-7, 7), (-1e5, 1e5), (-2e6, 2e6)],
        "sqrt": [(0, 10)], "rsqrt": [(0, 10)],
    }[name]  # fmt: skip
    found = [np.linspace(a, b, n).astype(dtype) for a, b in spans]  # type: ignore
    if name in ("sin", "cos"):  # next to the zeros, where all leading digits cancel
        turns = np.arange(1, n, dtype=np.float64)
        zeros = (turns * (np.pi / 2) + turns * 6.123233995736766e-17).astype(dtype)  # type: ignore
        found += [zeros, np.nextafter(zeros, dtype(0))]
    return found


@pytest.mark.parametrize("name", LIMITS)
def test_float(library: ctypes.CDLL, name: str) -> None:
    reference: Callable = {"rsqrt": lambda x: 1 / np.sqrt(x)}.get(name) or getattr(np, name)
    for x in [_bits(np.float32, 400_000), _special(np.float32), *_ranges(name, np.float32, 100_000)]:
        got = _call(library, name, x)[: len(x)]
        with np.errstate(all="ignore"):
            error = _ulps(got, reference(x.astype(np.float64)))
        worst = int(np.argmax(error))
        assert error[worst] <= LIMITS[name], (name, x[worst], got[worst], error[worst])


@pytest.mark.parametrize("name", LIMITS)
def test_double(library: ctypes.CDLL, name: str) -> None:
    """Against mpmath, of which the result is kept as the sum of two doubles."""
    if name == "rsqrt":
        reference = lambda v: 1 / mpmath.sqrt(v)  # noqa: E731
    elif name == "exp2":
        reference = lambda v: mpmath.power(2, v)  # noqa: E731
    elif name == "log2":
        reference = lambda v: mpmath.log(v) / mpmath.log(2)  # noqa: E731
    else:
        reference = getattr(mpmath, name)
    inside: Callable = {"log": np.signbit, "log2": np.signbit, "sqrt": np.signbit, "rsqrt": np.signbit}.get(
        name, lambda v: name == "log1p" and v <= -1
    )
    for x in [_bits(np.float64, 300), *(r[:: max(1, len(r) // 300)] for r in _ranges(name, np.float64, 40_000))]:
        keep = [v for v in x if np.isfinite(v) and v != 0 and not inside(v) and _representable(name, v)]
        x = np.array(keep)
        want, lost = np.empty_like(x), np.empty_like(x)
        with mpmath.workprec(1200 if name in ("sin", "cos") else 150):
            for k, v in enumerate(x):
                exact = reference(mpmath.mpf(float(v)))
                want[k] = float(exact)
                lost[k] = float(exact - want[k]) if np.isfinite(want[k]) else 0.0
        error = _ulps(_call(library, name, x)[: len(x)], want, lost)
        worst = int(np.argmax(error))
        assert error[worst] <= LIMITS[name], (name, x[worst], error[worst])


def _representable(name: str, v: float) -> bool:
    """Whether the result is a finite double; numpy's answer is enough for that."""
    function = {"rsqrt": lambda x: 1 / np.sqrt(x)}.get(name) or getattr(np, name)
    with np.errstate(all="ignore"):
        return bool(np.isfinite(function(v)))


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_special_values(library: ctypes.CDLL, name: str, dtype: type) -> None:
    """Infinities, NaN, zeros with their signs, the ends of the ranges: what numpy has."""
    reference = {"rsqrt": lambda x: 1 / np.sqrt(x)}.get(name) or getattr(np, name)
    x = _special(dtype)
    got = _call(library, name, x)[: len(x)]
    with np.errstate(all="ignore"):
        want = reference(x)
    assert np.array_equal(np.isnan(got), np.isnan(want))
    assert np.array_equal(got[np.isinf(want)], want[np.isinf(want)])
    zero = want == 0
    assert (got[zero] == 0).all()
    if name not in ("exp", "exp2", "cos"):  # where the result underflows there is one sign only
        assert np.array_equal(np.signbit(got[zero]), np.signbit(want[zero]))
