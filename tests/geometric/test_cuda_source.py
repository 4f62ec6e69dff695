"""The CUDA kernels without a GPU: how rows are shared out, divisions, and that all compiles for every architecture."""

from __future__ import annotations

import re
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernops.backends import nvrtc
from kernops.geometric.kernels import cuda, source
from kernops.geometric.kernels.source import TYPES, Shape

ARCHS = ("sm_75", "sm_80", "sm_90a", "sm_100")
#: Every dtype on one architecture, float32 on all, float64, which needs most memory, on one without Hopper's limits.
CASES = [
    (d, a) for a in ARCHS for d in sorted(TYPES) if a == "sm_90a" or d == "float32" or (d, a) == ("float64", "sm_80")
]
CHANNELS = st.integers(1, 2000)
DTYPES = st.sampled_from(sorted(TYPES))
ALIGNMENTS = st.sampled_from([2, 4, 8, 16])

needs_nvrtc = pytest.mark.skipif(nvrtc.missing() is not None, reason=str(nvrtc.missing()))


def covers(s: Shape, channels: int, itemsize: int, alignment: int) -> None:
    """Every channel has a thread, no slab is idle, packets are aligned and never cross the end of a row."""
    assert s.lanes in (1, 2, 4, 8, 16, 32)
    assert channels % s.vec == 0
    assert s.vec * itemsize <= max(alignment, itemsize) and s.vec * itemsize <= 16
    slab = s.lanes * s.chunks * s.vec
    assert (s.slabs - 1) * slab < channels <= s.slabs * slab


@given(CHANNELS, DTYPES, ALIGNMENTS, st.sampled_from([4, 8, 16]))
def test_share_covers_every_row(channels: int, dtype: str, alignment: int, lanes: int) -> None:
    itemsize = TYPES[dtype][2]
    s = source.share(channels, itemsize, max(alignment, itemsize), lanes)
    covers(s, channels, itemsize, max(alignment, itemsize))
    assert s.numbers <= source.MOST_NUMBERS


@given(CHANNELS, DTYPES, ALIGNMENTS)
def test_spread_covers_every_row_and_fits_shared_memory(channels: int, dtype: str, alignment: int) -> None:
    itemsize, wide = TYPES[dtype][2:]
    s = source.spread(channels, itemsize, max(alignment, itemsize))
    covers(s, channels, itemsize, max(alignment, itemsize))
    slab = s.lanes * s.chunks * s.vec
    entries = source.SUM_WARPS * 32 * 2 * wide
    assert 2 * source.SUM_WARPS * slab * wide + entries <= 48 << 10


@pytest.mark.parametrize(
    "channels, dtype, shape",
    [
        (64, "float32", Shape(4, 16, 1, 1)),  # two rows a warp
        (80, "float32", Shape(4, 32, 1, 1)),  # a row is one load of a whole warp
        (80, "float16", Shape(4, 32, 1, 1)),
        (256, "float32", Shape(4, 32, 1, 2)),
        (3, "float32", Shape(1, 4, 1, 1)),  # eight rows a warp
        (1, "float64", Shape(1, 1, 1, 1)),
    ],
)
def test_spread_of_common_rows(channels: int, dtype: str, shape: Shape) -> None:
    assert source.spread(channels, TYPES[dtype][2], 16) == shape


@given(st.integers(1, 2**31 - 1), st.data())
def test_division_by_multiplication(divisor: int, data: st.DataObject) -> None:
    d, multiplier, shift, _ = struct.unpack("=iIii", cuda.divider(divisor))
    assert d == divisor
    multiples = st.integers(0, (2**31 - 1) // divisor).map(lambda k: k * divisor)
    near = st.tuples(multiples, st.integers(-1, 1)).map(lambda t: min(max(t[0] + t[1], 0), 2**31 - 1))
    for n in [0, 2**31 - 1, data.draw(near), data.draw(st.integers(0, 2**31 - 1))]:
        got = n if divisor == 1 else ((n * multiplier) >> 32) >> shift
        assert multiplier < 2**32 and got == n // divisor


def test_rows_too_long_for_32_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="rows of 536870912 channels are too long"):
        source.spread(1 << 29, 4, 16)


def report(text: str, arch: str) -> tuple[int, int]:
    """The most registers and bytes of spills of the kernels of a text."""
    _, log = nvrtc.report(text, arch, ("--ptxas-options=-v",))
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", log)]
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill stores", log)]
    assert registers and len(spills) >= len(registers)
    return max(registers), max(spills)


@needs_nvrtc
@pytest.mark.parametrize("arch", ARCHS)
def test_sort_and_points_compile(arch: str) -> None:
    for text in (source.sort(), source.points(), source.work()):
        registers, spills = report(text, arch)
        assert registers <= 64 and spills == 0


@needs_nvrtc
@pytest.mark.parametrize("dtype, arch", CASES)
def test_sums_compile(dtype: str, arch: str) -> None:
    out = "float64" if dtype == "float64" else "float32"
    for channels, kind, to in ((64, "runs", dtype), (80, "runs", dtype), (3, "rows", dtype), (256, "pairs", out)):
        s = source.spread(channels, TYPES[dtype][2], 16)
        registers, spills = report(source.segments(dtype, to, kind, s), arch)
        # Two blocks of 512 threads must fit. What may spill with float64 and on sm_100 is the pipeline of items, once
        # for 32 of them; nothing of it lies in the loop over rows.
        assert registers <= 64 and spills <= (72 if arch == "sm_100" else 24 if dtype == "float64" else 0)
    registers, spills = report(source.prefixes(dtype, dtype, source.share(64, TYPES[dtype][2], 16, 4)), arch)
    assert spills == 0


@needs_nvrtc
@pytest.mark.parametrize("dtype, arch", CASES)
def test_splats_compile(dtype: str, arch: str) -> None:
    itemsize = TYPES[dtype][2]
    texts = [source.softmax(dtype)]
    for channels in (64, 80):
        texts += [source.backward(dtype, source.spread(channels, itemsize, 16, few=0), *which)
                  for which in ((True, True), (True, False), (False, True))]  # fmt: skip
        texts.append(source.atomic(dtype, source.share(channels, itemsize, 16, 4)))
    for channels in (1, 12):  # many columns and depths a block
        texts.append(source.atomic(dtype, source.share(channels, itemsize, 16, 4)))
    for text in texts:
        assert report(text, arch)[1] <= (16 if dtype == "float64" else 0)
