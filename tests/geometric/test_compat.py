"""The public pooling functions, against what their definitions say in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernops.geometric import compat
from kernops.geometric.compat import QuickCumsum, bev_pool, bev_pool_v2, cumsum_trick

Tensor = torch.Tensor
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
#: Of a result that was accumulated in float32, or rounded once to a half type.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.fixture(autouse=True, params=["tiled", "auto"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNOPS_BACKEND", request.param)


few = settings(max_examples=12, deadline=None)


def close(got: Tensor, want: Any, dtype: torch.dtype) -> None:
    assert got.dtype == dtype
    bound = TOLERANCE[dtype]
    torch.testing.assert_close(got.double(), torch.as_tensor(want).double(), rtol=bound, atol=bound)


# --- Lift-Splat-Shoot -------------------------------------------------------------------------------------------------
def lss(x: np.ndarray, geom_feats: np.ndarray, ranks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The published definition, for sorted ranks: a row ends where the next rank is another."""
    ends = np.flatnonzero(np.append(ranks[1:] != ranks[:-1], True))
    sums = np.cumsum(x, 0)[ends]
    return np.diff(sums, axis=0, prepend=np.zeros_like(sums[:1])), geom_feats[ends]


@few
@given(
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    channels=st.integers(1, 5),
    dtype=st.sampled_from(DTYPES),
    integer=st.sampled_from([torch.int64, torch.int32]),
    function=st.sampled_from([cumsum_trick, QuickCumsum.apply]),
    seed=st.integers(0, 2**32 - 1),
)
def test_lss_rows_for_sorted_ranks(
    counts: list[int], channels: int, dtype: torch.dtype, integer: torch.dtype, function: Callable, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    labels = np.sort(rng.choice(10_000, len(counts), replace=False))
    ranks = np.repeat(labels, counts)
    x = torch.from_numpy(rng.random((len(ranks), channels))).to(dtype)
    geom_feats = rng.integers(0, 100, (len(ranks), 4))
    sums, cells = function(x, torch.from_numpy(geom_feats), torch.from_numpy(ranks).to(integer))
    want_sums, want_cells = lss(x.double().numpy(), geom_feats, ranks)
    close(sums, want_sums, dtype)
    assert np.array_equal(cells.numpy(), want_cells)


def test_lss_unsorted_ranks_are_grouped_by_first_appearance() -> None:
    x = torch.tensor([[1.0], [2.0], [4.0], [8.0], [16.0], [32.0]])
    ranks = torch.tensor([7, -3, 7, 5, -3, 7])
    sums, rows = cumsum_trick(x, torch.arange(6), ranks)
    assert sums.tolist() == [[37.0], [18.0], [8.0]]
    assert rows.tolist() == [5, 4, 3]  # the last row of 7, of -3 and of 5


def test_lss_sums_do_not_cancel() -> None:
    """A prefix sum of float32 forgets the second cell here."""
    x = torch.tensor([[1e9], [1.0], [2.0]])
    assert cumsum_trick(x, torch.arange(3), torch.tensor([0, 1, 1]))[0].tolist() == [[1e9], [3.0]]


def test_lss_without_points() -> None:
    x = torch.ones(0, 3, requires_grad=True)
    sums, cells = QuickCumsum.apply(x, torch.ones(0, 4).long(), torch.ones(0).long())
    assert sums.shape == (0, 3) and cells.shape == (0, 4)
    sums.sum().backward()


@pytest.mark.parametrize("ranks", [[0, 0, 1, 4, 4], [4, 0, 4, 1, 0]])
def test_lss_gradients(ranks: list[int]) -> None:
    x = torch.rand(5, 2, dtype=torch.float64, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        return QuickCumsum.apply(x, torch.arange(5), torch.tensor(ranks))[0] ** 2

    assert torch.autograd.gradcheck(function, x)
    assert torch.autograd.gradgradcheck(function, x)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.ones(3, 2).int(), torch.ones(3), torch.ones(3).int()), TypeError, "x must be of float16.*got int32"),
        (
            (torch.ones(3), torch.ones(3), torch.ones(3).int()),
            ValueError,
            r"x must have 2 dimensions; got shape \(3,\)",
        ),
        ((torch.ones(3, 2), torch.ones(3), torch.ones(3)), TypeError, "ranks must be of an integer dtype; got float32"),
        ((torch.ones(3, 2), torch.ones(3), torch.ones(4).int()), ValueError, r"one length; got .*ranks \(4,\)"),
        ((torch.ones(3, 2), torch.ones(2), torch.ones(3).int()), ValueError, r"one length; got .*geom_feats \(2,\)"),
        ((torch.ones(3, 2), torch.ones(3), [0, 0, 1]), TypeError, "ranks must be a torch.Tensor; got list"),
        (
            (torch.ones(3, 2), torch.ones(3), torch.ones(3, device="meta").int()),
            ValueError,
            "one device; got .*ranks on meta",
        ),
    ],
)
def test_lss_bad_input(arguments: tuple, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        cumsum_trick(*arguments)


# --- BEVFusion --------------------------------------------------------------------------------------------------------
@few
@given(
    n=st.integers(0, 60),
    sizes=st.tuples(*[st.integers(1, 4)] * 4),
    channels=st.integers(1, 5),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**32 - 1),
)
def test_bev_pool(n: int, sizes: tuple[int, ...], channels: int, dtype: torch.dtype, seed: int) -> None:
    rng = np.random.default_rng(seed)
    B, D, H, W = sizes
    feats = torch.from_numpy(rng.random((n, channels))).to(dtype)
    coords = rng.integers(0, (H, W, D, B), (n, 4))
    want = np.zeros((B, channels, D, H, W))
    for row, (h, w, d, b) in zip(feats.double().numpy(), coords):
        want[b, :, d, h, w] += row
    got = bev_pool(feats, torch.from_numpy(coords), B, torch.tensor(D), np.int64(H), W)  # type: ignore[arg-type]
    close(got, want, dtype)
    assert got.is_contiguous()


def test_bev_pool_gradients() -> None:
    feats = torch.rand(5, 2, dtype=torch.float64, requires_grad=True)
    coords = torch.tensor([[1, 2, 0, 1], [0, 0, 1, 0], [1, 2, 0, 1], [1, 2, 0, 0], [0, 0, 1, 0]])

    def function(feats: Tensor) -> Tensor:
        return bev_pool(feats, coords, 2, 2, 2, 3) ** 2

    assert torch.autograd.gradcheck(function, feats)
    assert torch.autograd.gradgradcheck(function, feats)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"coords": torch.tensor([[0, 0, 0, 0], [0, 3, 0, 0]])}, r"< \(2, 3, 1, 2\); coords\[1\] is \(0, 3, 0, 0\)"),
        ({"coords": torch.tensor([[0, -1, 0, 0], [0, 0, 0, 0]])}, r"coords\[0\] is \(0, -1, 0, 0\)"),
        ({"coords": torch.zeros(2, 3).long()}, r"coords must have shape \(n, 4\).*got \(2, 3\)"),
        ({"coords": torch.zeros(3, 4).long()}, r"one length; got shapes feats \(2, 5\), coords \(3, 4\)"),
        ({"coords": torch.zeros(2, 4)}, "coords must be of an integer dtype; got float32"),
        ({"feats": torch.zeros(2, 5).long()}, "feats must be of float16"),
        ({"B": 0}, r"B, D, H, W must be positive; got \(0, 1, 2, 3\)"),
        ({"W": 2.5}, "B, D, H, W must be integers"),
    ],
)
def test_bev_pool_bad_input(change: dict[str, Any], message: str) -> None:
    arguments = {"feats": torch.zeros(2, 5), "coords": torch.zeros(2, 4).long(), "B": 2, "D": 1, "H": 2, "W": 3}
    with pytest.raises((ValueError, TypeError), match=message):
        bev_pool(**{**arguments, **change})


# --- BEVDet -----------------------------------------------------------------------------------------------------------
PUBLISHED: dict[str, Any] = {
    "ranks_depth": torch.tensor([0, 4, 1, 6], dtype=torch.int32),
    "ranks_feat": torch.tensor([0, 0, 1, 2], dtype=torch.int32),
    "ranks_bev": torch.tensor([0, 0, 1, 1], dtype=torch.int32),
    "bev_feat_shape": (1, 1, 2, 2, 2),
    "interval_starts": torch.tensor([0, 2], dtype=torch.int32),
    "interval_lengths": torch.tensor([2, 2], dtype=torch.int32),
}


def published_inputs() -> tuple[Tensor, Tensor]:
    depth = torch.tensor([0.3, 0.4, 0.2, 0.1, 0.7, 0.6, 0.8, 0.9]).reshape(1, 1, 2, 2, 2)
    return depth.requires_grad_(), torch.ones(1, 1, 2, 2, 2).requires_grad_()


def test_bev_pool_v2_gives_the_published_numbers() -> None:
    depth, feat = published_inputs()
    bev = bev_pool_v2(depth, feat, **PUBLISHED)
    assert bev.shape == (1, 2, 1, 2, 2) and bev.is_contiguous()
    bev.sum().backward()
    assert depth.grad is not None and feat.grad is not None
    torch.testing.assert_close(bev.sum(), torch.tensor(4.4))
    assert depth.grad.flatten().tolist() == [2, 2, 0, 0, 2, 0, 2, 0]
    torch.testing.assert_close(feat.grad.flatten(), torch.tensor([1.0, 1.0, 0.4, 0.4, 0.8, 0.8, 0.0, 0.0]))


def intervals(ranks_bev: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of sorted ranks: where each run starts, and its length."""
    starts = np.flatnonzero(np.append(True, ranks_bev[1:] != ranks_bev[:-1]))[: len(ranks_bev)]
    return starts, np.diff(np.append(starts, len(ranks_bev)))


class Problem:
    """Random points of a random grid, with the intervals in a random order."""

    def __init__(self, n: int, grid: tuple[int, ...], channels: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        depth_shape = (2, 1, 3, 2, 2)
        n_depth, n_feat, n_cells = 24, 8, int(np.prod(grid))
        cells = np.sort(rng.integers(0, n_cells, n))
        self.ranks = rng.integers(0, n_depth, n), rng.integers(0, n_feat, n), cells
        self.grid, self.channels = grid, channels
        self.depth = torch.from_numpy(rng.random(depth_shape))
        self.feat = torch.from_numpy(rng.random((2, 1, 2, 2, channels)))
        starts, lengths = intervals(cells)
        order = rng.permutation(len(starts))
        self.intervals = starts[order], lengths[order]

    def pooled(self, depth: Tensor, feat: Tensor) -> Tensor:
        ranks = [torch.from_numpy(r) for r in self.ranks]
        bounds = [torch.from_numpy(k) for k in self.intervals]
        return bev_pool_v2(depth, feat, *ranks, (*self.grid, self.channels), *bounds)  # type: ignore[call-arg,arg-type]

    def dense(self, depth: Tensor, feat: Tensor) -> Tensor:
        """The definition in float64, with one matrix (cells, places, rows)."""
        links = torch.zeros(int(np.prod(self.grid)), depth.numel(), feat.numel() // self.channels, dtype=torch.float64)
        for place, row, cell in zip(*self.ranks):
            links[cell, place, row] += 1
        flat = torch.einsum("kpr,p,rc->kc", links, depth.double().flatten(), feat.double().reshape(-1, self.channels))
        return flat.reshape(*self.grid, self.channels).permute(0, 4, 1, 2, 3)


problems = st.builds(
    Problem,
    n=st.integers(0, 40),
    grid=st.tuples(*[st.integers(1, 3)] * 4),
    channels=st.integers(1, 4),
    seed=st.integers(0, 2**32 - 1),
)


@few
@given(problem=problems, dtype=st.sampled_from(DTYPES))
def test_bev_pool_v2(problem: Problem, dtype: torch.dtype) -> None:
    depth, feat = (t.to(dtype).requires_grad_() for t in (problem.depth, problem.feat))
    wide = [t.detach().double().requires_grad_() for t in (depth, feat)]
    got, want = problem.pooled(depth, feat), problem.dense(*wide)
    close(got.detach(), want.detach(), dtype)
    cotangent = torch.linspace(0.5, 1.5, want.numel(), dtype=torch.float64).reshape(want.shape).to(dtype)
    for mine, other in zip(
        torch.autograd.grad(got, (depth, feat), cotangent), torch.autograd.grad(want, wide, cotangent.double())
    ):
        close(mine, other, dtype)


@settings(max_examples=4, deadline=None)
@given(problem=problems)
def test_bev_pool_v2_second_derivatives(problem: Problem) -> None:
    inputs = (problem.depth.clone().requires_grad_(), problem.feat.clone().requires_grad_())
    assert torch.autograd.gradcheck(problem.pooled, inputs)
    assert torch.autograd.gradgradcheck(problem.pooled, inputs)


def test_bev_pool_v2_under_torch_func() -> None:
    """The same derivatives as autograd's, of the first and of the second order."""
    problem = Problem(40, (2, 1, 3, 3), 4, seed=0)

    def loss(depth: Tensor, feat: Tensor) -> Tensor:
        return problem.pooled(depth, feat).sin().sum()

    def slope(depth: Tensor, feat: Tensor) -> Tensor:
        return torch.func.grad(loss)(depth, feat).sin().sum()

    depth, feat = (t.clone().requires_grad_() for t in (problem.depth, problem.feat))
    first = torch.autograd.grad(problem.dense(depth, feat).sin().sum(), (depth, feat), create_graph=True)
    second = torch.autograd.grad(first[0].sin().sum(), (depth, feat))
    for function, want in ((loss, first), (slope, second)):
        got = torch.func.grad(function, (0, 1))(problem.depth, problem.feat)
        torch.testing.assert_close(got, tuple(w.detach() for w in want))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_bev_pool_v2_integers_of_any_width(dtype: torch.dtype) -> None:
    """With more places, rows and cells than the narrow ones can count."""
    links = [torch.tensor([3, 100], dtype=dtype)] * 3
    bounds = [torch.tensor(k, dtype=dtype) for k in ([0, 1], [1, 1])]
    depth, feat = torch.arange(256.0), torch.arange(512.0).reshape(256, 2)
    bev = bev_pool_v2(depth, feat, *links, (1, 1, 2, 128, 2), *bounds)  # type: ignore[call-arg,arg-type]
    want = torch.zeros(256, 2)
    want[3], want[100] = 3 * torch.tensor([6.0, 7.0]), 100 * torch.tensor([200.0, 201.0])
    assert torch.equal(bev.permute(0, 2, 3, 4, 1).reshape(256, 2), want)


def test_bev_pool_v2_mixed_dtypes_are_promoted() -> None:
    depth, feat = (t.detach() for t in published_inputs())
    bev = bev_pool_v2(depth.half(), feat, **PUBLISHED)
    assert bev.dtype == torch.float32
    torch.testing.assert_close(bev.sum(), 2 * depth.half().float().flatten()[[0, 4, 1, 6]].sum())


def test_bev_pool_v2_points_in_no_interval_do_not_count() -> None:
    depth, feat = (t.detach() for t in published_inputs())
    out_of_range = torch.tensor([0, 4, 99, -5], dtype=torch.int32)  # never read
    first = {"interval_starts": torch.tensor([0]), "interval_lengths": torch.tensor([2]), "ranks_depth": out_of_range}
    bev = bev_pool_v2(depth, feat, **{**PUBLISHED, **first})
    torch.testing.assert_close(bev[0, :, 0].flatten(1), torch.tensor([[1.0, 0, 0, 0]] * 2))


def test_bev_pool_v2_adds_several_intervals_of_a_cell() -> None:
    depth, feat = (t.detach() for t in published_inputs())
    ranks_bev = torch.tensor([1, 0, 0, 1])
    split = {"interval_starts": torch.tensor([0, 1, 3]), "interval_lengths": torch.tensor([1, 2, 1])}
    bev = bev_pool_v2(depth, feat, **{**PUBLISHED, **split, "ranks_bev": ranks_bev})
    torch.testing.assert_close(bev[0, 0, 0].flatten(), torch.tensor([0.7 + 0.4, 0.3 + 0.8, 0, 0]))


def test_bev_pool_v2_in_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The derivative by depth holds a bounded number of products at a time; how many changes nothing."""
    problem = Problem(40, (2, 1, 3, 3), 4, seed=0)
    depth = problem.depth.clone().requires_grad_()
    whole = torch.autograd.grad(problem.pooled(depth, problem.feat).square().sum(), depth)[0]
    monkeypatch.setattr(compat, "_CHUNK", 12)
    pieces = torch.autograd.grad(problem.pooled(depth, problem.feat).square().sum(), depth)[0]
    torch.testing.assert_close(pieces, whole)


BAD = [
    ({"ranks_depth": torch.tensor([0, 4, 1, 8])}, r"ranks_depth must be in \[0, 8\); ranks_depth\[3\] is 8"),
    ({"ranks_feat": torch.tensor([0, -1, 1, 2])}, r"ranks_feat must be in \[0, 4\); ranks_feat\[1\] is -1"),
    ({"ranks_bev": torch.tensor([0, 0, 4, 4])}, r"ranks_bev must be in \[0, 4\); ranks_bev\[2\] is 4"),
    ({"ranks_bev": torch.tensor([0, 1, 0, 1])}, r"ranks_bev\[1\] = 1 is not the cell of the first.*sort"),
    ({"ranks_bev": torch.tensor([0, 0, 1])}, r"one length; got shapes .*ranks_bev \(3,\)"),
    ({"ranks_bev": torch.tensor([0.0, 0, 1, 1])}, "ranks_bev must be of an integer dtype; got float32"),
    ({"ranks_feat": torch.zeros(4, 1).int()}, r"ranks_feat must have 1 dimension; got shape \(4, 1\)"),
    ({"interval_starts": torch.tensor([0])}, r"one length; got shapes interval_starts \(1,\)"),
    ({"interval_lengths": torch.tensor([3, 2])}, "several intervals hold point 2"),
    ({"interval_lengths": torch.tensor([2, 3])}, "list of 4 points; interval 1 has interval_starts 2 and.* 3"),
    ({"interval_starts": torch.tensor([-1, 2])}, "interval 0 has interval_starts -1"),
    (
        {"interval_starts": torch.tensor([0, 2**63 - 1])},
        "interval 1 has interval_starts 9223372036854775807 and interval_lengths 2",
    ),
    (
        {"interval_starts": torch.tensor([0, 2**62]), "interval_lengths": torch.tensor([2, 2**62])},
        "list of 4 points; interval 1 has interval_starts 4611686018427387904",
    ),
    ({"interval_lengths": torch.tensor([2**63 - 1, 2])}, "interval 0 has interval_starts 0 and .* 9223372036854775807"),
    ({"bev_feat_shape": None}, r"bev_feat_shape \(B, Z, Y, X, C\) must be integers; got None"),
    ({"bev_feat_shape": ()}, r"bev_feat_shape must be \(B, Z, Y, X, C\); got \(\)"),
    ({"bev_feat_shape": (1, 2, 2, 2)}, r"bev_feat_shape must be \(B, Z, Y, X, C\); got \(1, 2, 2, 2\)"),
    ({"bev_feat_shape": (1, 1, 2, 2, 3)}, r"feat must have shape \(..., C\) with the C = 3"),
    ({"bev_feat_shape": (1, 0, 2, 2, 2)}, "bev_feat_shape .* must be positive"),
    ({"feat": torch.ones(1, 1, 2, 2, 2).int()}, "feat must be of float16.*got int32"),
    ({"depth": torch.ones(8, device="meta")}, "one device; got depth on meta"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message[:24] for _, message in BAD])
def test_bev_pool_v2_bad_input(change: dict[str, Any], message: str) -> None:
    depth, feat = published_inputs()
    with pytest.raises((ValueError, TypeError), match=message):
        bev_pool_v2(**{"depth": depth, "feat": feat, **PUBLISHED, **change})
