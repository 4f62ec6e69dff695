"""The splat benchmark's problems: the reference, the errors that are reported, and the settings' numbers of points."""

from __future__ import annotations

import pytest
import torch

from kernops.bench import splat, splat_peers
from kernops.bench.splat import SETTINGS
from tests.bench.small_splat import TINY, loops, small_problem


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(SETTINGS, "tiny", TINY)


def test_the_reference_is_right(monkeypatch):
    monkeypatch.setattr(splat, "REFERENCE_POINTS", 17)
    problem = small_problem(backward=True)
    want = loops(problem)
    found = splat.reference(problem)
    assert set(found) == set(want)
    for name, tensor in found.items():
        torch.testing.assert_close(tensor.reshape(want[name].shape), want[name], rtol=1e-13, atol=1e-13)
    assert set(splat.reference(small_problem())) == {"value"}


def test_ranks_are_the_kept_points_in_the_order_of_the_cells():
    problem = small_problem()
    cells = problem.geometry.cells
    ranks = problem.ranks
    want = sorted((cell, p) for p, cell in enumerate(cells.flatten().tolist()) if cell >= 0)
    assert list(zip(ranks.cells.tolist(), ranks.points.tolist())) == want
    _, _, d, h, w = cells.shape
    assert ranks.pixels.tolist() == [p // (d * h * w) * h * w + p % (h * w) for _, p in want]
    for start, length, target in zip(ranks.starts.tolist(), ranks.lengths.tolist(), ranks.targets.tolist()):
        assert [cell for cell, _ in want[start : start + length]] == [target] * length
    assert sum(ranks.lengths.tolist()) == len(want)
    assert problem.sizes() == {
        "points": cells.numel(), "kept": len(want), "cells": len({c for c, _ in want}),
        "longest": int(ranks.lengths.max()), "frustum_bytes": cells.numel() * TINY.channels * 8,
    }  # fmt: skip


def test_points_sorted_by_pixel():
    ranks = small_problem().ranks
    found = splat_peers.by_pixel(ranks)
    assert found.pixels.tolist() == sorted(ranks.pixels.tolist())
    assert set(zip(found.points.tolist(), found.cells.tolist())) == set(
        zip(ranks.points.tolist(), ranks.cells.tolist())
    )
    for start, length in zip(found.starts.tolist(), found.lengths.tolist()):
        assert len(set(found.pixels[start : start + length].tolist())) == 1
    assert len(found.starts) == len(set(ranks.pixels.tolist()))


def test_data_is_the_same_in_every_precision_and_depth_is_a_probability():
    exact, half = small_problem(), small_problem(dtype="bfloat16")
    assert half.depth.dtype == half.feat.dtype == torch.bfloat16
    assert torch.equal(exact.feat.bfloat16(), half.feat)
    torch.testing.assert_close(exact.depth.sum(2), torch.ones_like(exact.depth[:, :, 0]))


#: The numbers of the kept points, of the cells that they fall into, and of the fullest cell's points.
PUBLISHED = {
    "lss100": (2_457_600, 1_130_849, 13_811, 3_316),
    "bevdet59": (249_216, 139_087, 10_786, 464),
    "bevdet118": (498_432, 276_154, 12_959, None),
}


@pytest.mark.parametrize("setting", PUBLISHED)
def test_settings_have_the_points_that_they_should(setting):
    geometry = splat.make_geometry(SETTINGS[setting], "cpu", "tiled")
    assert geometry.shape == (1, 1, 128, 128)
    kept = geometry.cells[geometry.cells >= 0]
    counts = torch.bincount(kept)
    points, n_kept, cells, longest = PUBLISHED[setting]
    assert (geometry.cells.numel(), len(kept), int((counts > 0).sum())) == (points, n_kept, cells)
    assert longest is None or int(counts.max()) == longest


# --- errors -----------------------------------------------------------------------------------------------------------
class TestErrors:
    @pytest.fixture(autouse=True)
    def make(self, tiny):
        self.problem = small_problem(backward=True)
        self.exact = splat.reference(self.problem)

    def found(self, **changed) -> dict[str, float]:
        return splat.errors(self.problem, {**self.exact, **changed}, self.exact)

    def test_right(self):
        assert self.found() == {"error": 0, "error_max": 0, "error_depth": 0, "error_feat": 0}

    def test_a_share_of_everything(self):
        found = self.found(value=self.exact["value"] * 1.01, feat=self.exact["feat"] * 0.9)
        assert found["error"] == pytest.approx(0.01)
        assert found["error_max"] == pytest.approx(0.01)
        assert found["error_feat"] == pytest.approx(0.1)

    def test_the_worst_cell_is_found(self):
        value = self.exact["value"].clone()
        cell = int(value.abs().amax(1).nonzero()[0])
        value[cell] += 0.5 * value[cell].abs().max()
        found = self.found(value=value)
        assert found["error_max"] == pytest.approx(0.5)
        assert found["error"] < 0.5

    def test_a_cell_that_must_be_empty(self):
        value = self.exact["value"].clone()
        empty = int((value.abs().amax(1) == 0).nonzero()[0])
        value[empty, 0] = 1e-30
        assert self.found(value=value)["error_max"] == float("inf")

    def test_the_layout_of_kernops(self):
        b, z, y, x = self.problem.geometry.shape
        value = self.exact["value"].view(b, z, y, x, -1).permute(0, 4, 1, 2, 3)
        assert self.found(value=value)["error"] == 0

    def test_the_gradient_of_lifted_points(self):
        right = self.problem.grad[self.problem.ranks.cells]
        found = splat.errors(self.problem, {"value": self.exact["value"], "points": right * 2}, self.exact)
        assert found["error_points"] == pytest.approx(1.0)
