"""What is particular to the geometric kernels in C++: cuts, channels, addresses, formats. Threads: test_cpu_calls.py.

Whole numbers small enough are added up exactly, so most results must be equal to numpy's.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from kernops.backends import cpu as backend
from kernops.geometric import cells as reference_cells
from kernops.geometric.kernels import Scale, cpu

REASON = cpu.available(torch.device("cpu"))
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
DTYPES = [F16, BF16, F32, F64]
#: Lengths of buckets around those of the chunks that work is cut into.
LENGTHS = [0, 0, 1, 2045, 0, 3, 2047, 2048, 2049, 0, 1, 4096, 10_000, 5, 0, 127, 128, 129, 0]


@pytest.fixture(params=["native", "baseline"])
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """This machine's instructions, and those that every x86-64 CPU has."""
    if request.param == "baseline":
        if "x86_64" not in backend._NATIVE or os.uname().machine != "x86_64":
            pytest.skip("not an x86-64 machine")
        monkeypatch.setattr(backend, "_NATIVE", {"x86_64": "-march=x86-64"})
        monkeypatch.setattr(backend, "_cpu", lambda: ("baseline", backend.Machine(16, 16)))
        monkeypatch.setattr(cpu, "_loaded", {})
    return request.param


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _whole(*shape: int, seed: int = 0, most: int = 3, dtype: torch.dtype = F32) -> torch.Tensor:
    """Whole numbers from -most to most."""
    return torch.randint(-most, most + 1, shape, generator=_generator(seed)).to(dtype)


def _buckets(lengths: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Items in random order, and starts of buckets of these lengths."""
    starts = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    return torch.randperm(int(starts[-1]), generator=_generator(seed)).int(), starts


def _sums(rows: np.ndarray, starts: torch.Tensor) -> np.ndarray:
    """Sums of rows that lie bucket by bucket, in float64."""
    total = np.concatenate([np.zeros((1, rows.shape[1])), np.cumsum(rows.astype(np.float64), 0)])
    return total[starts[1:].numpy()] - total[starts[:-1].numpy()]


def _same(got: torch.Tensor, want: np.ndarray) -> None:
    np.testing.assert_array_equal(got.double().numpy(), want)


# --- sums by segment --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels", [*range(1, 20), 31, 32, 33, 64, 65, 80, 127, 128, 129, 144, 145, 257])
def test_any_number_of_channels(dtype: torch.dtype, channels: int) -> None:
    """One vector or several, the last one overlapping the one before, and more than are summed at a time."""
    lengths = [3, 0, 1, 17, 130]
    order, starts = _buckets(lengths)
    values, weights = _whole(151, channels, dtype=dtype), _whole(151, seed=1, dtype=dtype)
    targets = torch.tensor([2, 0, 4, 1, 3], dtype=torch.int32)
    pairs = torch.stack((torch.arange(151).flip(0).int(), order), 1)
    scale = Scale("pairs", weights, None, None, 1, 151)
    got = cpu.segment_sum(values, pairs, starts, targets, 5, scale, F64 if dtype == F64 else F32)
    rows = (values[order.long()].double() * weights.flip(0)[:, None].double()).numpy()
    _same(got[targets.long()], _sums(rows, starts))


@pytest.mark.parametrize("channels", [1, 5, 64])
def test_buckets_of_every_length(channels: int) -> None:
    order, starts = _buckets(LENGTHS)
    values = _whole(len(order), channels)
    got = cpu.segment_sum(values, order, starts, None, len(LENGTHS), None, F32)
    _same(got, _sums(values[order.long()].numpy(), starts))


@pytest.mark.parametrize("lengths", [[1_000_000], [0] * 30_000, [0] * 9000 + [70_000] + [0] * 9000, [1] * 50_000])
def test_one_long_bucket_and_many_short_ones(lengths: list[int]) -> None:
    order, starts = _buckets(lengths)
    values = _whole(len(order), 3)
    got = cpu.segment_sum(values, order, starts, None, len(lengths), None, F32)
    _same(got, _sums(values[order.long()].numpy(), starts))


def test_a_long_bucket_is_summed_in_pieces() -> None:
    """One by one in float32, a million times 0.1 is 958 too much."""
    order, starts = _buckets([1_000_000])
    for dtype in (F16, F32):
        values = torch.full((1_000_000, 2), 0.1, dtype=dtype)
        got = cpu.segment_sum(values, order, starts, None, 1, None, F32)
        torch.testing.assert_close(got.double(), values[:1].double() * 1_000_000, rtol=1e-5, atol=0)


def test_every_row_of_the_result_has_a_segment() -> None:
    with pytest.raises(ValueError, match="n_out = 4 must be the number of segments, 1"):
        cpu.segment_sum(torch.ones(2, 2), torch.zeros(2).int(), torch.tensor([0, 2]).int(), None, 4, None, F32)


def test_rows_anywhere_in_memory() -> None:
    """Rows with a stride, at odd addresses, repeated, or transposed; items and starts that are views."""
    order, starts = _buckets([5, 0, 70, 25])
    base = _whole(40_000)
    views = {
        "stride": base[: 100 * 23].view(100, 23)[:, 3:20],
        "odd address": base[1 : 1 + 100 * 17].view(100, 17),
        "repeated": base[:17].expand(100, 17),
        "transposed": base[: 17 * 100].view(17, 100).T,
        "every second channel": base[: 100 * 34].view(100, 34)[:, ::2],
        "overlapping": base.as_strided((100, 17), (1, 1)),
    }
    long_order = torch.stack((order, order), 1)[:, 1]
    long_starts = torch.stack((starts, starts), 1)[:, 0]
    for name, values in views.items():
        want = _sums(values[order.long()].numpy(), starts)
        got = cpu.segment_sum(values, long_order, long_starts, None, 4, None, F32)
        np.testing.assert_array_equal(got.double().numpy(), want, err_msg=name)
        places = cpu.segment_cumsum(values, long_order, long_starts, False, F32)
        _same(places[order[starts[1:].long() - 1].long()][[0, 2, 3]], want[[0, 2, 3]])


def test_places_that_32_bits_do_not_count() -> None:
    """A matrix of 2.5e9 numbers, of which only a few are ever touched."""
    values = torch.empty(300_000, 8192, dtype=F16)
    rows = torch.tensor([299_999, 1, 280_000], dtype=torch.int32)
    values[rows.long()] = _whole(3, 8192, dtype=F16)
    starts = torch.tensor([0, 1, 3], dtype=torch.int32)
    want = values[rows.long()].double()
    got = cpu.segment_sum(values, rows, starts, None, 2, None, F32)
    _same(got, torch.stack((want[0], want[1] + want[2])).numpy())
    _same(cpu.gather(values, rows), want.numpy())


# --- formats ----------------------------------------------------------------------------------------------------------
def _identity(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    n = len(values)
    rows = torch.arange(n + 1, dtype=torch.int32)
    return cpu.segment_sum(values, rows[:n], rows, None, n, None, dtype)


@pytest.mark.parametrize("half", [F16, BF16], ids=str)
@pytest.mark.parametrize("channels", [1, 4, 64])
def test_every_half_is_read_and_written(half: torch.dtype, channels: int, instructions: str) -> None:
    values = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(half).reshape(-1, channels)
    wide = _identity(values, F32)
    torch.testing.assert_close(wide, values.float(), rtol=0, atol=0, equal_nan=True)
    back = _identity(values, half)
    torch.testing.assert_close(back, values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("half", [F16, BF16], ids=str)
@pytest.mark.parametrize("channels", [1, 64])
def test_rounding_to_the_nearest_half(half: torch.dtype, channels: int, instructions: str) -> None:
    """Middles between two halves, their neighbours in float32, and random bits; ties go to the even one."""
    exact = torch.arange(-(1 << 15), (1 << 15) - 1).to(torch.int16).view(half).float()
    middle = (exact + exact.roll(-1)) / 2
    bits = torch.randint(-(1 << 31), 1 << 31, (1 << 17,), generator=_generator()).int().view(F32)
    inf = torch.tensor(torch.inf)
    some = torch.cat((middle, middle.nextafter(inf), middle.nextafter(-inf), bits))
    some = some[: len(some) // channels * channels].view(-1, channels)
    torch.testing.assert_close(_identity(some, half), some.to(half), rtol=0, atol=0, equal_nan=True)


def test_small_large_and_no_numbers() -> None:
    """Subnormal numbers are kept; infinities and NaN stay in their own channel and bucket."""
    tiny = torch.tensor([[1e-45, -3e-42], [2e-45, 1e-44]])
    assert torch.equal(cpu.gather(tiny, torch.tensor([1, 0], dtype=torch.int32)), tiny.flip(0))
    starts = torch.tensor([0, 2, 3, 5], dtype=torch.int32)
    order = torch.tensor([0, 1, 1, 0, 1], dtype=torch.int32)
    got = cpu.segment_sum(tiny, order, starts, None, 3, None, F32)
    assert torch.equal(got, torch.stack((tiny.sum(0), tiny[1], tiny.sum(0)))) and (got != 0).all()
    odd = torch.ones(2, 40)
    odd[0, 3], odd[0, 39], odd[1, 39], odd[1, 20] = torch.nan, torch.inf, -torch.inf, torch.inf
    got = cpu.segment_sum(odd, order, starts, None, 3, None, F32)
    want = torch.stack((odd.sum(0), odd[1], odd.sum(0)))
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


# --- running sums -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels", [1, 3, 16, 37])
def test_running_sums(channels: int, dtype: torch.dtype, reverse: bool) -> None:
    """Of buckets that many chunks share, with rows that are in none."""
    lengths = [*LENGTHS, 9000]
    order, starts = _buckets(lengths)
    n = len(order) + 50
    order = torch.randperm(n, generator=_generator(3)).int()
    values = _whole(n, channels, dtype=dtype)
    got = cpu.segment_cumsum(values, order, starts, reverse, F64 if dtype == F64 else F32)
    want = np.zeros((n, channels))
    rows = values.double().numpy()
    for begin, end in zip(starts[:-1].tolist(), starts[1:].tolist()):
        at = order[begin:end].numpy()
        at = at[::-1] if reverse else at
        want[at] = np.cumsum(rows[at], 0)
    _same(got, want)


def test_running_sums_are_rounded_once() -> None:
    values = torch.full((1, 3000, 5), 0.1, dtype=F16)[0]
    order, starts = torch.arange(3000, dtype=torch.int32), torch.tensor([0, 3000], dtype=torch.int32)
    got = cpu.segment_cumsum(values, order, starts, False, F16)
    want = values.double().cumsum(0)
    assert ((got.double() - want).abs() <= want * 2.0**-10).all()


# --- grouping ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("n", "buckets"), [(0, 3), (1, 1), (15, 4), (1000, 7), (500_000, 300), (3000, 100_000)])
def test_bucket_sort(n: int, buckets: int, instructions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets that are negative or too large are left out."""
    given = torch.randint(-2, buckets + 2, (n,), generator=_generator(), dtype=torch.int32)
    valid = (given >= 0) & (given < buckets)
    keys = torch.where(valid, given, buckets).numpy()
    want = np.argsort(keys, kind="stable")
    want_starts = np.searchsorted(keys[want], np.arange(buckets + 1))
    for threads in ("1", "2", "5"):
        monkeypatch.setenv("KERNOPS_NUM_THREADS", threads)
        order, starts = cpu.bucket_sort(given, buckets)
        np.testing.assert_array_equal(starts.numpy(), want_starts)
        np.testing.assert_array_equal(order[: starts[-1]].numpy(), want[: int(valid.sum())])


def _runs(cells: np.ndarray, buckets: int, permutation: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Runs found point by point."""
    images, depths, pixels = cells.shape
    found = []
    for image in range(images):
        for d in range(depths):
            for r in range(pixels):
                cell = cells[image, d, r]
                if cell < 0 or (d and cells[image, d - 1, r] == cell):
                    continue
                end = d
                while end < depths and cells[image, end, r] == cell:
                    end += 1
                found.append((permutation[cell], (image * depths + d) * pixels + r, end - d))
    found.sort()
    starts = np.searchsorted([bucket for bucket, _, _ in found], np.arange(buckets + 1))
    return np.array([item[1:] for item in found], dtype=np.int32).reshape(-1, 2), starts


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1, 1), (2, 3, 9, 3, 5), (1, 2, 40, 4, 33), (2, 1, 1, 7, 9), (1, 2, 700, 1, 3)]
)
def test_runs(shape: tuple[int, ...], instructions: str) -> None:
    cells = torch.randint(-1, 3, shape, generator=_generator(), dtype=torch.int32)
    permutation = torch.tensor([2, 0, 1], dtype=torch.int32)
    flat = cells.numpy().reshape(shape[0] * shape[1], shape[2], -1)
    for given in (cells, cells.permute(0, 1, 4, 3, 2).contiguous().permute(0, 1, 4, 3, 2)):
        for p in (None, permutation):
            items, starts = cpu.make_runs(given, 3, p)
            want, want_starts = _runs(flat, 3, np.arange(3) if p is None else p.numpy())
            np.testing.assert_array_equal(starts.numpy(), want_starts)
            np.testing.assert_array_equal(items[: starts[-1]].numpy(), want)


def test_cells_are_those_of_the_torch_operations(instructions: str) -> None:
    """Bit by bit, for points on borders, far away, behind the camera, and not finite."""
    projection = torch.randn(2, 3, 3, 4, generator=_generator(), dtype=F64)
    projection[0, 0] = torch.tensor([[1.0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, -1]])  # points on borders of cells
    projection[1, 1, 0, 0], projection[1, 2, 2, 3], projection[1, 0] = torch.inf, torch.nan, projection[1, 0] * 1e300
    u, v = torch.linspace(-3, 3, 13, dtype=F64), torch.linspace(-3, 3, 7, dtype=F64)
    d = torch.tensor([0.0, 0.1, 0.5, 1, 2, 3, 1e308], dtype=F64)
    for trunc in (False, True):
        arguments = (projection, u, v, d, (-2.0, -1.5, -1.0), (0.1, 0.3, 0.5), (40, 10, 4), trunc)
        got, want = cpu.frustum_cells(*arguments), reference_cells.frustum_cells(*arguments)
        assert got.shape == (2, 3, 7, 7, 13) and torch.equal(got, want)
        assert (got >= 0).float().mean() > 0.05


# --- splat ------------------------------------------------------------------------------------------------------------
def _dense(depth: torch.Tensor, values: torch.Tensor, cells: torch.Tensor, n_out: int) -> torch.Tensor:
    """Every point's row is made and added, in float64 and differentiable."""
    batch, cameras, depths, rows, columns = cells.shape
    features = values.view(batch, cameras, 1, rows, columns, -1)
    points = (depth[..., None] * features).flatten(0, 4)
    target = torch.where(cells < 0, n_out, cells).flatten().long()
    return points.new_zeros(n_out + 1, points.shape[1]).index_add(0, target, points)[:n_out]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels", [1, 6, 17, 64, 141])
def test_splat_and_its_gradients(dtype: torch.dtype, channels: int) -> None:
    """Images that are no multiple of any block, with runs; weights are whole numbers, so results are exact."""
    shape, n_out = (2, 1, 13, 5, 7), 11
    cells = torch.randint(-4, n_out, shape, generator=_generator(), dtype=torch.int32)
    cells[:, :, 1::2] = torch.where(torch.rand(2, 1, 6, 5, 7, generator=_generator()) < 0.7, cells[:, :, :-1:2],
                                    cells[:, :, 1::2])  # fmt: skip
    depth, weight = _whole(*shape, seed=1, dtype=dtype), _whole(*shape, seed=2, most=1, dtype=dtype)
    values, grad = _whole(70, channels, seed=4, dtype=dtype), _whole(n_out, channels, seed=5, most=1, dtype=dtype)
    scale = Scale("runs", depth, weight, None, 13, 35)
    product = (depth.double() * weight.double()).requires_grad_()
    features = values.double().requires_grad_()
    want = _dense(product, features, cells, n_out)
    _same(cpu.splat_atomic(values, cells, scale, n_out, _wide(dtype)), want.detach().numpy())
    by_depth, by_values = torch.autograd.grad(want, (product, features), grad.double())
    got = cpu.splat_backward(grad, values, cells, scale, True, True)
    for g, w, kept in zip(got, (by_depth, by_values), (_wide(dtype), dtype)):
        assert g is not None and g.dtype == kept
        _same(g, w.to(kept).double().numpy())
    only_depth, only_values = (cpu.splat_backward(grad, values, cells, scale, k == 0, k == 1) for k in range(2))
    assert only_depth[1] is None and only_values[0] is None
    assert torch.equal(only_depth[0], got[0]) and torch.equal(only_values[1], got[1])  # type: ignore[arg-type]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return F64 if dtype == F64 else F32


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 1, 13, 5, 7), (1, 1, 1, 1, 1), (1, 3, 200, 2, 16), (1, 1, 60, 33, 20)])
def test_softmax_over_depth(dtype: torch.dtype, shape: tuple[int, ...], instructions: str) -> None:
    logits = (torch.randn(*shape, generator=_generator(), dtype=F64) * 10).to(dtype)
    lse = cpu.depth_lse(logits)
    assert lse.dtype == _wide(dtype)
    want = torch.logsumexp(logits.double(), 2)
    tolerance = 1e-14 if dtype == F64 else 5e-7
    torch.testing.assert_close(lse.double(), want.flatten(), rtol=tolerance, atol=2 * tolerance)
    _, _, depths, rows, columns = shape
    values = _whole(shape[0] * shape[1] * rows * columns, 9, dtype=dtype)
    cells = torch.randint(-1, 6, shape, generator=_generator(), dtype=torch.int32)
    scale = Scale("runs", logits, None, lse, depths, rows * columns)
    got = cpu.splat_atomic(values, cells, scale, 6, _wide(dtype))
    torch.testing.assert_close(got.double(), _dense(logits.double().softmax(2), values.double(), cells, 6),
                               rtol=20 * tolerance, atol=100 * tolerance)  # fmt: skip


def test_log_sum_exp_of_what_is_not_finite() -> None:
    inf, nan = torch.inf, torch.nan
    columns = [
        [-inf, -inf, -inf], [inf, 1, 2], [nan, 1, 2], [1, -inf, nan], [inf, -inf, 0], [inf, inf, 1], [-inf, 5, -inf],
        [3e38, 3e38, 0], [-3e38, -3e38, -3e38], [0, 0, 0],
    ]  # fmt: skip
    logits = torch.tensor(columns).T.reshape(1, 1, 3, 2, 5)
    want = torch.logsumexp(logits.double(), 2).float().flatten()
    want = torch.where(want == inf, nan, want)  # what softmax makes of it
    torch.testing.assert_close(cpu.depth_lse(logits), want, rtol=2e-7, atol=0, equal_nan=True)
