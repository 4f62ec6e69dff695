"""The CUDA kernels without a GPU: compiled for the processor, with every barrier and every access to memory checked."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from kernops.geometric.kernels import Scale, source
from tests.geometric import cases, test_kernels
from tests.geometric.cases import CASES, DTYPES, At
from tests.helpers import emulated_cuda
from tests.helpers.emulated_cuda import Emulation

Tensor = torch.Tensor
int32, float32 = torch.int32, torch.float32
JUNK = 2**31 - 1

pytestmark = pytest.mark.skipif(emulated_cuda.missing() is not None, reason=str(emulated_cuda.missing()))


@pytest.fixture
def emulation(monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulation]:
    monkeypatch.setattr(source, "SUM_BLOCKS", 1)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # and so fills what `torch.empty` returns with NaN and the largest integer
    yield Emulation(monkeypatch)
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def place(emulation: Emulation) -> At:
    return emulated_cuda.place()


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Most of what is to be compiled, two at a time."""
    if emulated_cuda.missing() is not None:
        return
    with pytest.MonkeyPatch.context() as patch:
        emulation, kernels = Emulation(patch), emulated_cuda.place().kernels
        emulation.asked = set()
        cells = torch.zeros((1, 1, 1, 1, 1), dtype=int32)
        starts = torch.tensor([0, 1], dtype=int32)
        plain = [(float32, case.channels, False) for case in CASES]
        both = [(dtype, case.channels, True) for dtype in DTYPES for case in CASES[: 3 if dtype == float32 else 1]]
        for dtype, channels, factors in plain + both:
            rows, depth = torch.zeros((1, channels), dtype=dtype), cells.to(dtype)
            scale = Scale("runs", depth, depth if factors else None, depth if factors else None, 1, 1)
            kernels.segment_sum(rows, starts[None], starts, None, 1, scale, dtype)
            kernels.splat_atomic(rows, cells, scale, 1, dtype)
            for needs in ((True, True), (True, False), (False, True)):
                kernels.splat_backward(rows, rows, cells, scale, *needs)
        for channels in (1, 3, 8, 33, 64, 130):
            rows = torch.zeros((1, channels))
            kernels.segment_sum(rows, starts, starts, None, 1, None, float32)
            kernels.segment_cumsum(rows, starts[:1], starts, False, float32)
    emulated_cuda.compile_all(emulation.asked)


# --- the tests of all back ends ---------------------------------------------------------------------------------------
def _here(function: Callable[..., None]) -> Callable[..., None]:
    """The test with float32 alone; of weights and logits it has both or neither, both for a few cases.

    Every combination is another kernel, and has to be compiled.
    """

    @functools.wraps(function)
    def test(**given: Any) -> None:
        function(**given)

    marks = {mark.args[0]: mark for mark in getattr(function, "pytestmark", ())}
    if "dtype" in marks:
        marks["dtype"] = pytest.mark.parametrize("dtype", [float32], ids=str).mark
    if "weighted" in marks and "logits" in marks:
        names = ("case", "weighted", "logits")
        rows = [(case, both, both) for both in (False, True) for case in (CASES[:3] if both else CASES)]
        marks = {k: mark for k, mark in marks.items() if k not in names}
        marks["rows"] = pytest.mark.parametrize(names, rows, ids=str).mark
    test.pytestmark = list(marks.values())  # type: ignore[attr-defined]
    return test


for _name, _function in list(vars(test_kernels).items()):
    if _name.startswith("test_") and "place" in inspect.signature(_function).parameters:
        globals()[_name] = _here(_function)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_other_dtypes(place: At, dtype: torch.dtype) -> None:
    case = CASES[0]
    test_kernels.test_segment_sum_of_runs(place, case, dtype, weighted=True, logits=True)
    test_kernels.test_segment_cumsum(place, "sorted, with a long one", dtype, reverse=False)
    test_kernels.test_splat_atomic_and_backward(place, case, dtype, weighted=True, logits=True)
    test_kernels.test_depth_lse(place, dtype)


# --- how tensors lie and how work is shared out -----------------------------------------------------------------------
def whole(rng: np.random.Generator, *shape: int) -> Tensor:
    """Whole numbers, whose sums are exact in any order."""
    return torch.as_tensor(rng.integers(-9, 10, shape)).to(float32)


def shifted(tensor: Tensor, by: int) -> Tensor:
    """The same numbers, ``by`` numbers behind an address that is a multiple of 64 bytes, with NaN around them."""
    memory = torch.full((tensor.numel() + by + 5,), torch.nan)
    view = memory[by : by + tensor.numel()].view(tensor.shape)
    return view.copy_(tensor)


def lengths(rng: np.random.Generator, kind: str) -> np.ndarray:
    """Of segments whose ends meet those of warps and blocks, or do not."""
    return {
        "short": lambda: rng.integers(0, 3, 200),
        "few are not empty": lambda: np.where(rng.random(150) < 0.1, rng.integers(1, 300, 150), 0),
        "round": lambda: rng.choice([0, 16, 32, 64, 512], 40),
        "one": lambda: np.eye(1, 9, 4, dtype=int)[0] * 1537,
        "two and nothing": lambda: np.array([0, 0, 511, 0, 513, 0]),
        "ones": lambda: np.ones(1024, int),
        "single": lambda: np.array([32]),
    }[kind]()


KINDS = ("short", "few are not empty", "round", "one", "two and nothing", "ones", "single")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("channels", [3, 68])
def test_sums_in_any_number_of_blocks(place: At, emulation: Emulation, channels: int, kind: str) -> None:
    for count in (1, 2, 3, 7, 16, 40):
        rng = np.random.default_rng(count)
        each = lengths(rng, kind)
        n, n_out = int(each.sum()), len(each)
        values, rows, targets = whole(rng, 50, channels), rng.integers(0, 50, n), rng.permutation(n_out)
        items = torch.as_tensor(np.append(rows, [JUNK] * 40)).to(int32)
        starts = torch.as_tensor(np.append(0, np.cumsum(each))).to(int32)
        want = np.zeros((n_out, channels))
        np.add.at(want, targets[np.repeat(np.arange(n_out), each)], values.numpy()[rows])
        emulation.multiprocessors = count
        got = place.kernels.segment_sum(
            shifted(values, count % 2), items, starts, place.tensor(targets, int32), n_out, None, float32
        )
        assert np.array_equal(got.numpy(), want), count


@pytest.mark.parametrize("by", [1, 2, 3])
def test_sums_of_what_lies_anywhere(place: At, by: int) -> None:
    rng = np.random.default_rng(by)
    buckets, n_buckets = cases.labels("empty buckets")
    order, starts = place.kernels.bucket_sort(place.tensor(buckets, int32), n_buckets)
    values = whole(rng, len(buckets), 4)
    sums = place.kernels.segment_sum(shifted(values, by), order, starts, None, n_buckets, None, float32)
    assert np.array_equal(sums.numpy(), cases.bucket_sums(values.numpy(), buckets, n_buckets))
    for reverse in (False, True):
        prefixes = place.kernels.segment_cumsum(shifted(values, by), order, starts, reverse, float32)
        assert np.array_equal(prefixes.numpy(), cases.bucket_cumsums(values.numpy(), buckets, n_buckets, reverse))
    places, rows = rng.integers(0, 77, len(buckets)), rng.integers(0, len(buckets), len(buckets))
    depth, kept = whole(rng, 77), cases.sorted_order(buckets)
    items = place.tensor(np.stack([places, rows], 1)[kept], int32)
    scale = Scale("pairs", shifted(depth, by), None, None, 1, 1)
    pairs = place.kernels.segment_sum(shifted(values, by), items, starts, None, n_buckets, scale, float32)
    terms = depth.numpy()[places][:, None] * values.numpy()[rows]
    assert np.array_equal(pairs.numpy(), cases.bucket_sums(terms, buckets, n_buckets))


@pytest.mark.parametrize(
    "channels, grad_by, values_by, depth_by",
    [(1, 0, 1, 2), (2, 1, 0, 1), (2, 2, 2, 0), (3, 0, 0, 1), (4, 3, 1, 0), (4, 2, 0, 3), (68, 0, 2, 1), (132, 0, 0, 0)],
)
def test_splats_of_what_lies_anywhere(place: At, channels: int, grad_by: int, values_by: int, depth_by: int) -> None:
    """Columns and depths that fill no strip and no block, rows of images that come in two parts, any alignment."""
    case = cases.Case("", (1, 2, 37, 19, 9), (1, 5, 6), channels)
    rng, cells, n_cells = np.random.default_rng(channels), case.cells(), 30
    depth, feat, grad = whole(rng, *case.points), whole(rng, 1, 2, 19, 9, channels), whole(rng, 1, 1, 5, 6, channels)
    arrays = [t.double().numpy() for t in (depth, feat, grad)]
    want = cases.splat(case, cells, arrays[0], arrays[1], None, False, arrays[2])
    scale = Scale("runs", shifted(depth, depth_by), None, None, 37, 19 * 9)
    values, grads = shifted(feat.view(-1, channels), values_by), shifted(grad.view(-1, channels), grad_by)
    given = place.tensor(cells, int32)
    out = place.kernels.splat_atomic(values, given, scale, n_cells, float32)
    assert np.array_equal(out.numpy(), want.out.reshape(n_cells, channels))
    by_depth, by_values = place.kernels.splat_backward(grads, values, given, scale, True, True)
    assert np.array_equal(by_depth.numpy(), want.depth)
    assert np.array_equal(by_values.numpy(), want.feat.reshape(-1, channels))


def test_any_order_of_threads_gives_the_same_bits(place: At, emulation: Emulation) -> None:
    case = CASES[0]
    values, n_cells = cases.inputs(case, float32), 2 * 4 * 9 * 17
    scale = cases.scale(place, case, values, True, True, float32)
    cells = place.tensor(case.cells(), int32)
    feat, grad = (place.tensor(a.reshape(-1, case.channels), float32) for a in (values.feat, values.grad))
    buckets, n_buckets = cases.labels("few")
    long = torch.randn((1537, 3), generator=torch.Generator().manual_seed(0))
    order, one = torch.arange(1537, dtype=int32), torch.tensor([0, 1537], dtype=int32)

    def everything() -> list[Tensor]:
        items, starts = place.kernels.make_runs(cells, n_cells, None)
        return [
            starts,
            items[: starts[-1]],
            place.kernels.bucket_sort(place.tensor(buckets, int32), n_buckets)[1],
            place.kernels.segment_sum(feat, items, starts, None, n_cells, scale, float32),
            place.kernels.segment_sum(long, order, one, None, 1, None, float32),
            place.kernels.segment_cumsum(long, order, one, False, float32),
            *place.kernels.splat_backward(grad, feat, cells, scale, True, True),
            place.kernels.depth_lse(scale.depth),
        ]

    want = everything()
    for seed in (100, 200, 300, 400):
        emulation.seed = seed
        assert all(torch.equal(a, b) for a, b in zip(everything(), want))


# --- the emulation itself ---------------------------------------------------------------------------------------------
#: Kernels, where `a.p` is a tensor of ten numbers and `a.n` is 2 -> what is wrong with them.
WRONG = {
    "if (threadIdx.x % 64 < 32) __syncthreads();": "32 of 64 threads wait for the block; the others ended",
    "if (threadIdx.x % 2) __syncthreads(); else __syncwarp();": "lanes of warp . are at an operation of the warp",
    "if (threadIdx.x != 5) __ballot_sync(~0u, true);": "31 lanes of warp 0",
    "if (threadIdx.x < 7) __syncwarp(); else __shfl_xor_sync(~0u, 1.0f, 1);": "an operation of the warp",
    "__ballot_sync(1u, true);": "the mask of a warp's operation is 0x1",
    "a.p[threadIdx.x] = 1;": r"a store of 4 bytes at byte \d+ of a tensor of 40",
    "a.p[0] = a.p[-1];": "a load of 4 bytes at byte -4 of a tensor of 40",
    "a.p[0] = *a.null;": "outside of all tensors",
    "__shared__ float s[9]; float* const q = s + 9 * (a.n / 2); *q = 1;": "outside of all tensors and variables",
    "__shared__ float s[9]; s[a.n * 5] = 1;": "an index beyond its array",
    "float r[4]; r[a.n * 3] = 1; a.p[0] = r[a.n];": "an index beyond its array",
    "struct alignas(16) V { float v[4]; }; *reinterpret_cast<V*>(a.p) = V();": "a misaligned address",
    "a.p[0] = 2147483647 + static_cast<int>(a.n);": "overflow: add",
    # What was never written is NaN.
    "__shared__ float s[9]; if (a.n > 9) s[a.n] = a.n; a.p[0] = s[0] == s[0] ? 0 : a.p[-1];": "a load .* at byte -4",
}


@pytest.mark.parametrize("body", WRONG)
def test_what_is_wrong_raises(emulation: Emulation, body: str) -> None:
    kernels = "".join(
        f'extern "C" __global__ void kn_wrong_{k}(const __grid_constant__ kn::X a) {{ {text} }}\n'
        for k, text in enumerate(["a.p[0] = 1;", *WRONG])
    )
    text = (
        f'#include "rows.cuh"\nnamespace kn {{ struct X {{ float* p; const float* null; long long n; }}; }}\n{kernels}'
    )
    numbers = shifted(torch.zeros(10), 1)
    arguments = np.array([numbers.data_ptr(), 0, 2]).tobytes()
    with pytest.raises(RuntimeError, match=WRONG[body]):
        emulation.launch(text, f"wrong_{1 + list(WRONG).index(body)}", 64, 1, numbers.device, arguments)
    emulation.launch(text, "wrong_0", 64, 1, numbers.device, arguments)
    assert numbers[0] == 1
