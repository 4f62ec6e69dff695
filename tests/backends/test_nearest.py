"""The search of nearest points on matrix units, without a GPU: its kernels on the processor, and its bounds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from kernops.backends import nearest
from kernops.codegen import nearest as sizes
from kernops.codegen.nearest import Nearest
from kernops.codegen.schedule import Device
from tests.helpers import emulated_cuda
from tests.helpers.emulated_cuda import Emulation

Array = np.ndarray
emulated = pytest.mark.skipif(emulated_cuda.missing() is not None, reason=str(emulated_cuda.missing()))


# --- what is right ----------------------------------------------------------------------------------------------------
def squared_distances(x: Array, y: Array) -> Array:
    """In float32, with fused additions: squares of float32 are exact in float64, and so are most of their sums."""
    sums = np.zeros((len(x), len(y)), np.float32)
    with np.errstate(all="ignore"):
        for d in range(x.shape[1]):
            t = (x[:, None, d] - y[None, :, d]).astype(np.float64)
            sums = (sums + t * t).astype(np.float32)
    return sums


def neighbours(x: Array, y: Array, k: int) -> tuple[Array, Array]:
    """Values and columns, ties to the lowest; NaN and -1 where there are none."""
    if x.ndim == 3:
        values, columns = zip(*(neighbours(a, b, k) for a, b in zip(x, y)))
        return np.stack(values), np.stack(columns)
    all_values = squared_distances(x, y)
    order = np.argsort(all_values, 1, kind="stable")[:, :k]
    values = np.take_along_axis(all_values, order, 1)
    return values, np.where(np.isnan(values), -1, order)


# --- the kernels ------------------------------------------------------------------------------------------------------
class Found:
    """The result of a search, and what became of it on the way."""

    def __init__(self, emulation: Emulation, s: Nearest, x: Array, y: Array) -> None:
        px, py = torch.as_tensor(x), torch.as_tensor(y)
        batch, m, n = tuple(px.shape[:-2]), px.shape[-2], py.shape[-2]
        points = [(t.data_ptr(), *(() if batch else (0,)), *t.stride()) for t in (px, py)]
        value, index = torch.zeros((*batch, m, s.k)), torch.zeros((*batch, m, s.k), dtype=torch.int64)
        memory = nearest.scratch(s, math.prod(batch), px.device)
        memory["rows"].fill_(0xFF)  # NaN, which no product may meet
        memory["columns"].fill_(0xFF)
        made = nearest.launches(s, points[0], points[1], batch or (1,), m, n, memory, value, index)
        for name, blocks, arguments in made:
            emulation.launch(sizes.source(s, len(batch)), name, sizes.threads(s, name), blocks, px.device, arguments)
            if name == "nearest_rank":
                self.again = int(memory["again"].view(torch.int32)[: s.slab].sum())
        self.value, self.index = value.numpy(), index.numpy()
        self.rest = int(memory["rest"].view(torch.int32)[0])
        self.slabs = sum(name == "nearest_list" for name, _, _ in made)


def small(dim: int, k: int, m: int, n: int, batch: int = 1, products: str = "warp") -> Nearest:
    """A schedule for few points: the lists, groups and segments are as small as the case allows."""
    device = Device(1, 232448, (9, 0))
    large = sizes.schedule(dim, k, 10**5, 10**5, 1, device)
    assert large is not None
    stages = sizes.stages(dim, products, device) - (dim == 70)  # one time less than there is room for
    ahead = min(sizes.MOST_AHEAD, stages - 1)
    part, groups = -(-n // sizes.PARTS[0]), 16
    room, blocks = max(96, 4 * k), -(-m // sizes.ROWS)
    return dataclasses.replace(
        large, products=products, stages=stages, ahead=ahead, shared=sizes.shared_bytes(dim, products, stages),
        groups=groups, room=room, space=room, rest_blocks=3, part=part, tiles=-(-large.parts * part // sizes.COLUMNS),
        sample_tiles=-(-part // sizes.COLUMNS), sample_segments=2, segments=2, row_blocks=blocks, slab=blocks * batch,
    )  # fmt: skip


@pytest.fixture
def emulation(monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulation]:
    yield Emulation(monkeypatch)


M, N, D, K = 70, 1300, 20, 3


def cloud(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def agree(found: Found, x: Array, y: Array, k: int) -> None:
    values, columns = neighbours(x, y, k)
    np.testing.assert_array_equal(found.index, columns)
    np.testing.assert_array_equal(found.value, values)


@emulated
@pytest.mark.parametrize("products", sizes.PRODUCTS)
def test_clouds_anywhere_and_of_any_size(emulation: Emulation, products: str) -> None:
    for move, scale in ((0, 1), (1000, 1), (1e4, 1), (0, 1e-6), (0, 1e6), (1e-3, 1e-18), (0, 1e18), (0, 1e-23)):
        x, y = (np.float32(scale) * (cloud(seed, n, D) + np.float32(move)) for seed, n in ((0, M), (1, N)))
        found = Found(emulation, small(D, K, M, N, products=products), x, y)
        agree(found, x, y, K)
        assert found.rest == 0 or scale == 1e-23, (move, scale)  # there, squares are subnormal


@emulated
@pytest.mark.parametrize("products", sizes.PRODUCTS)
def test_many_equal_points(emulation: Emulation, products: str) -> None:
    x, y = cloud(2, M, D), cloud(3, N, D)
    cases = {
        "all": (np.ones_like(x), np.ones_like(y)),
        "repeated": (x, np.repeat(y[:13], 100, 0)),
        "padded": (np.vstack([x[:50], 0 * x[50:]]), np.vstack([y[:700], 0 * y[700:]])),
        "the same": (y[:M], y),
    }
    rest = {}
    for name, (a, b) in cases.items():
        found = Found(emulation, small(D, K, M, N, products=products), a, b)
        agree(found, a, b, K)
        rest[name] = found.rest
    assert rest["all"] == rest["repeated"] == M and rest["the same"] == 0


@emulated
def test_numbers_that_are_none_or_huge(emulation: Emulation) -> None:
    rng = np.random.default_rng(4)
    x, y = cloud(5, M, D), cloud(6, N, D)
    y[7, 3], x[5, 2] = 1e30, 1e6
    few = Found(emulation, small(D, K, M, N), x, y)
    agree(few, x, y, K)
    assert few.rest <= 1
    y[rng.random(y.shape) < 0.01] = np.nan
    y[3], x[8, 2], x[6, 1], y[11, 0] = np.inf, np.inf, np.nan, -np.inf
    some = Found(emulation, small(D, K, M, N), x, y)
    agree(some, x, y, K)
    assert some.rest <= 3
    for z in (np.full_like(y, np.nan), np.full_like(y, np.inf), 1e30 * cloud(6, N, D)):
        agree(Found(emulation, small(D, K, M, N), x, z), x, z, K)


@emulated
def test_clusters_get_a_second_list(emulation: Emulation) -> None:
    """Clusters that are small against their distance from the centre: the bounds of the sample are too coarse."""
    centres = 10 * cloud(7, 13, D)
    x, y = (np.repeat(centres, 100, 0)[:n] + np.float32(0.1) * cloud(seed, n, D) for seed, n in ((8, N), (9, N)))
    x = x[:: N // M][:M]
    s = dataclasses.replace(small(D, K, M, N), room=32)
    found = Found(emulation, s, x, y)
    agree(found, x, y, K)
    assert found.again == 1 and found.rest < M


@emulated
def test_batches_in_slabs_of_rows(emulation: Emulation) -> None:
    x, y = cloud(10, 3, 140, D), cloud(11, 3, N, D) * np.array([1, 1e3, 1e-5], np.float32)[:, None, None]
    y[1] = np.repeat(y[1, :13], 100, 0)  # whose rows are compared with all columns
    s = dataclasses.replace(small(D, K, 140, N, batch=3), slab=2)
    found = Found(emulation, s, x, y)
    agree(found, x, y, K)
    assert found.slabs == 3


@emulated
@pytest.mark.parametrize(
    "dim, k, products", [(33, 40, "warp"), (70, 3, "warp"), (150, 2, "warp"), (70, 3, "group"), (150, 2, "group")]
)
def test_other_dimensions(emulation: Emulation, dim: int, k: int, products: str) -> None:
    """Odd numbers of coordinates, several chunks, rows that stay and that come again, more places than lanes."""
    x, y = cloud(12, 130, dim), cloud(13, N, dim)
    s = small(dim, k, 130, N, products=products)
    found = Found(emulation, s, x, y)
    agree(found, x, y, k)
    assert found.rest == 0 or k > s.groups


@emulated
def test_any_order_of_threads_gives_the_same_bits(emulation: Emulation) -> None:
    x, y = cloud(14, M, D), np.vstack([cloud(15, N // 2, D)] * 2)
    for seed in (0, 100, 200):
        emulation.seed = seed
        agree(Found(emulation, small(D, K, M, N), x, y), x, y, K)


# --- the bounds -------------------------------------------------------------------------------------------------------
# The arithmetic of cuda/nearest_data.cuh again, in float64, with the matrix unit as wrong as it is allowed to be.
LIMIT, ETA = 32768.0, 1 / 1024


def epsilon(dim: int) -> float:
    return 1.01 * 25 * -(-dim // 16) / 2**23


def above(x: float) -> float:
    return float(np.float32(x * (1 + 2**-22) + 2.0**-100))


def below(x: float, size: float) -> float:
    return float(np.float32(x - size / 2**22 - 2.0**-100))


def rounded(p: Array, centre: Array, scale: float) -> tuple[Array, float, bool]:
    """A point in half precision, the length of what was rounded away, and whether it was moved to the cube."""
    z = (p.astype(np.float64) - centre) * scale
    clamped = np.clip(z, -LIMIT, LIMIT)
    half = clamped.astype(np.float32).astype(np.float16).astype(np.float64)
    return (
        half,
        above(float(np.linalg.norm(clamped - half) + np.linalg.norm(clamped) * 2**-50)),
        bool((clamped != z).any()),
    )


def tau_and_least(bound: float, square: float, error: float, dim: int, scale: float) -> tuple[float, float]:
    gamma, tiny = 1.01 * (dim + 3) / 2**24, dim * 2.0**-149
    tau = above(scale * math.sqrt((bound + tiny) / (1 - gamma)) + error)
    return tau, below((square - tau**2 - epsilon(dim) * (square + tau**2)) / 2, square + tau**2)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Array, Array, Array, float]:
    """Two points, near or far, a centre and a scale, none of which need to suit the others."""
    dim = draw(st.integers(1, 40))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    size, away, near = (10.0 ** draw(st.integers(*ends)) for ends in ((-20, 15), (-3, 4), (-7, 2)))
    kind = draw(st.sampled_from(["normal", "one huge", "whole numbers"]))
    x = rng.standard_normal(dim) + away
    y = x + near * rng.standard_normal(dim)
    if kind == "one huge":
        x[0], y[-1] = 1e6 * x[0], 1e5 * y[-1]
    if kind == "whole numbers":
        x, y = np.round(x), np.round(y)
    centre = rng.standard_normal(dim) + away * draw(st.sampled_from([0, 1]))
    points = [(size * p).astype(np.float32) for p in (x, y, centre)]
    scale = 2.0 ** (4 - math.floor(math.log2(size)) + draw(st.integers(-6, 6)))
    return points[0], points[1], points[2], scale


@given(pairs())
def test_no_pair_below_its_bound_is_passed_over(given: tuple[Array, Array, Array, float]) -> None:
    x, y, centre, scale = given
    value = float(squared_distances(x[None], y[None])[0, 0])
    assume(value < 3e38)  # other bounds are not used
    (a, e, _), (b, f, _) = rounded(x, centre, scale), rounded(y, centre, scale)
    square, eps = float(np.float32(a @ a)), epsilon(len(x))
    tau, least = tau_and_least(value, square, e, len(x), scale)
    low = below((b @ b - f * f) / 2 - eps * (b @ b + f * f), b @ b + f * f)
    start = float(np.float32(tau * f - low))
    worst = start + a @ b - eps / 1.01 * (abs(tau * f - low) + np.linalg.norm(a) * np.linalg.norm(b))
    assert worst >= least


@given(pairs())
def test_the_sample_gives_upper_bounds(given: tuple[Array, Array, Array, float]) -> None:
    x, y, centre, scale = given
    (a, e, moved_x), (b, f, moved_y) = rounded(x, centre, scale), rounded(y, centre, scale)
    assume(not (moved_x or moved_y))  # such rows get no bound, and such columns are no part of the sample
    square, eps, dim = float(np.float32(a @ a)), epsilon(len(x)), len(x)
    size = (b @ b) / 2 + f * f / (2 * ETA) + eps * (b @ b + f * f / ETA)
    start = below(-size, size)
    best = start + a @ b + eps / 1.01 * (abs(start) + np.linalg.norm(a) * np.linalg.norm(b))
    r2 = (1 + ETA) * (square * (1 + eps + 2**-22) - 2 * best)
    distance = (math.sqrt(max(r2, 0)) + e) / scale
    assume(distance**2 < 3e38)
    gamma, tiny = 1.01 * (dim + 3) / 2**24, dim * 2.0**-149
    assert float(squared_distances(x[None], y[None])[0, 0]) <= (1 + gamma) * distance**2 + tiny
