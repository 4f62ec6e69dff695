"""What must not change the answer: tile lengths, threads, splits (beyond rounding); a second call (not one bit)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernops.backends import layout, reduce, tiled
from kernops.formula.graph import CAT_I, CAT_J, Node, var
from kernops.formula.ops import OPS, apply, neg
from kernops.formula.plan import make_plan
from kernops.formula.reductions import CORES
from tests.helpers.backends import ON_CPU, need

M, N = 23, 1500


def _problem(core: str, dtype: torch.dtype) -> tuple:
    g = torch.Generator().manual_seed(4)
    x, y, w = (torch.randn(*s, generator=g, dtype=torch.float64).to(dtype) for s in ((M, 3), (N, 3), (N, 2)))
    y[::50] = y[0]  # ties
    f: Node = neg(apply("SqDist", var(CAT_I, 0, 3), var(CAT_J, 1, 3)))
    if core == "Sum":
        f = apply("Exp", f)
    weight = var(CAT_J, 2, 2) if core == "SumSoftMaxWeight" else None
    return make_plan(core, f, weight, k=5 if core == "KMin" else 0, n_vars=3), [x, y, w]


def _same(got: tuple, want: tuple, rtol: float) -> None:
    for g, w in zip(got, want):
        if g.is_floating_point():
            torch.testing.assert_close(g, w, rtol=rtol, atol=rtol)
        else:
            assert torch.equal(g, w)


@pytest.mark.parametrize("core", CORES)
def test_tile_length(core: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype, rtol in ((torch.float64, 1e-14), (torch.float32, 1e-6)):
        plan, tensors = _problem(core, dtype)
        want = reduce(plan, tensors, M, N, "tiled")
        for columns, numbers in ((7, 500), (256, 1), (333, 1 << 14), (N + 1, 1 << 22)):
            monkeypatch.setattr(tiled, "MIN_COLUMNS", columns)
            monkeypatch.setattr(tiled, "TILE_NUMBERS", {"cpu": numbers, "other": numbers})
            _same(reduce(plan, tensors, M, N, "tiled"), want, rtol)


@pytest.mark.parametrize("core", ["Sum", "KMin"])
def test_batches_in_pieces(core: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that does not fit one tile is halved along its axes, also where tensors broadcast."""
    plan, (x, y, w) = _problem(core, torch.float64)
    y, w = y[:300], w[:300]
    tensors = [torch.stack([x + k for k in range(5)])[:, None], torch.stack([y, 2 * y, 3 * y]), w]
    want = reduce(plan, tensors, M, 300, "tiled")
    assert want[0].shape[:2] == (5, 3)
    for numbers in (1, 300, 5000, 20_000):
        monkeypatch.setattr(tiled, "TILE_NUMBERS", {"cpu": numbers, "other": numbers})
        _same(reduce(plan, tensors, M, 300, "tiled"), want, 1e-14)
    one = reduce(plan, [x + 3, 2 * y, w], M, 300, "tiled")
    _same(one, tuple(o[3, 1] for o in want), 1e-14)


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("backend", ON_CPU)
def test_the_same_call_gives_the_same_bits(backend: str, core: str) -> None:
    need(backend)
    plan, tensors = _problem(core, torch.float32)
    first = reduce(plan, tensors, M, N, backend)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, reduce(plan, tensors, M, N, backend)))
    moved = [t.clone() for t in tensors]  # another address, another alignment
    moved[1] = torch.cat([torch.zeros(1), moved[1].flatten()])[1:].view(N, 3)
    assert all(torch.equal(a, b) for a, b in zip(first, reduce(plan, moved, M, N, backend)))


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("backend", ON_CPU)
def test_threads(backend: str, core: str, monkeypatch: pytest.MonkeyPatch) -> None:
    need(backend)
    plan, tensors = _problem(core, torch.float32)
    before = torch.get_num_threads()
    outs = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            monkeypatch.setenv("KERNOPS_NUM_THREADS", str(count))
            outs.append(reduce(plan, tensors, M, N, backend))
    finally:
        torch.set_num_threads(before)
    for out in outs[1:]:
        _same(out, outs[0], 1e-6)


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("backend", ON_CPU)
def test_few_rows_are_part_of_many(backend: str, core: str) -> None:
    """One row alone, where a back end splits over columns, against the same row among others."""
    need(backend)
    plan, tensors = _problem(core, torch.float32)
    many = reduce(plan, tensors, M, N, backend)
    for i in (0, M - 1):
        one = reduce(plan, [tensors[0][i : i + 1], *tensors[1:]], 1, N, backend)
        _same(one, tuple(o[i : i + 1] for o in many), 1e-6)


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("backend", ON_CPU)
def test_order_of_columns(backend: str, core: str) -> None:
    """Columns in another order: the same values, and indices that name the same points."""
    need(backend)
    plan, tensors = _problem(core, torch.float64)
    want = reduce(plan, tensors, M, N, backend)
    order = torch.randperm(N, generator=torch.Generator().manual_seed(0))
    got = reduce(plan, [tensors[0], tensors[1][order], tensors[2][order]], M, N, backend)
    for name, g, w in zip(CORES[core].outputs, got, want):
        if name != "index":
            torch.testing.assert_close(g, w, rtol=1e-13, atol=1e-13)
        else:
            assert torch.equal(tensors[1][order][g[..., 0]], tensors[1][w[..., 0]])


def test_tiled_frees_what_is_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long formula does not hold a tile of every intermediate."""
    f: Node = apply("Sub", var(CAT_I, 0, 1), var(CAT_J, 1, 1))
    for _ in range(200):
        f = apply("Sin", f)
    live, most = 0, 0

    class Counted:
        def __init__(self) -> None:
            nonlocal live, most
            live += 1
            most = max(most, live)

        def __del__(self) -> None:
            nonlocal live
            live -= 1

    sine = replace(OPS["Sin"], ref=lambda t, a: Counted())
    monkeypatch.setitem(OPS, "Sin", sine)
    tiled.evaluate((f,), lambda v: layout.pair_view(torch.zeros(2, 1), v.params[0]), torch.zeros(1))  # type: ignore[arg-type]
    assert most <= 3
