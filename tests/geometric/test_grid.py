"""Grids: bounds as configurations give them, counts of cells, centres, and bounds that do not fit."""

from __future__ import annotations

import pickle
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernops.geometric.grid import BEVGrid

UNIT = (0.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("bound", "count"),
    [
        ((-51.2, 51.2, 0.8), 128),  # BEVDet
        ((-50.0, 50.0, 0.5), 200),  # Lift-Splat-Shoot
        ((-54.0, 54.0, 0.3), 360),  # BEVFusion
        ((-5.0, 3.0, 8.0), 1),
        ((-1.0, 5.4, 0.4), 16),  # occupancy
        ((0.1, 0.4, 0.1), 3),  # (0.4 - 0.1) / 0.1 is 3.0000000000000004
    ],
)
def test_bounds_of_the_field(bound, count):
    assert BEVGrid(bound, UNIT, UNIT).counts == (count, 1, 1)
    assert BEVGrid(UNIT, UNIT, bound).shape == (count, 1, 1)


def test_axes_are_kept_apart():
    grid = BEVGrid((-4, 4, 0.5), [0, 6, 2], (-1, 1, 0.25))  # type: ignore[arg-type]
    assert grid.counts == (16, 3, 8)
    assert grid.shape == (8, 3, 16)
    assert grid.lower == (-4.0, 0.0, -1.0)
    assert grid.step == (0.5, 2.0, 0.25)
    assert grid.ybound == (0.0, 6.0, 2.0)


def test_centres():
    grid = BEVGrid((-1.0, 2.0, 1.0), (0.0, 1.0, 0.5), (2.0, 6.0, 4.0))
    expected = [[[[-0.5, 0.25, 4.0], [0.5, 0.25, 4.0], [1.5, 0.25, 4.0]],
                 [[-0.5, 0.75, 4.0], [0.5, 0.75, 4.0], [1.5, 0.75, 4.0]]]]  # fmt: skip
    assert grid.cell_centers().tolist() == expected
    assert grid.cell_centers().dtype == torch.float64
    assert grid.cell_centers(dtype=torch.float32).dtype == torch.float32
    with torch.device("meta"):
        assert grid.cell_centers().tolist() == expected
        assert grid.cell_centers(device="meta").device.type == "meta"


@settings(deadline=None)
@given(
    lower=st.decimals(-100, 100, places=2),
    step=st.decimals("0.01", 10, places=2),
    count=st.integers(1, 2000),
    moved=st.decimals("0.02", "0.98", places=2),
)
def test_whole_numbers_of_steps_and_no_others(lower, step, count, moved):
    lower_f, upper, step_f = float(lower), float(lower + step * count), float(step)
    assert BEVGrid((lower_f, upper, step_f), UNIT, UNIT).counts[0] == count
    with pytest.raises(ValueError, match="xbound") as error:
        BEVGrid((lower_f, float(lower + step * (count + moved)), step_f), UNIT, UNIT)
    named = re.findall(r"upper ends are (\S+) and (\S+)$", str(error.value))[0]
    assert [BEVGrid((lower_f, float(end), step_f), UNIT, UNIT).counts[0] for end in named] == [count, count + 1]


@pytest.mark.parametrize(
    ("bound", "message"),
    [
        ((-51.2, 51.5, 0.8), "128.375 steps apart.*nearest accepted upper ends are 51.2 and 52$"),
        ((0.0, 0.3, 1.0), "nearest accepted upper end is 1$"),
        ((0.0, 1.0, 0.0), "step must be positive"),
        ((0.0, 1.0, -1.0), "step must be positive"),
        ((1.0, 1.0, 1.0), "upper end must be above"),
        ((1.0, -1.0, 1.0), "upper end must be above"),
        ((0.0, float("inf"), 1.0), "finite"),
        ((0.0, float("nan"), 1.0), "finite"),
        ((0.0, 1.0, 5e-324), r"inf steps apart; fewer than 2\*\*31 are accepted"),
        ((-1e308, 1e308, 1.0), "inf steps apart"),
    ],
)
@pytest.mark.parametrize("name", ["xbound", "ybound", "zbound"])
def test_bounds_that_do_not_fit(name, bound, message):
    with pytest.raises(ValueError, match=f"^{name}=.*{message}"):
        BEVGrid(**{"xbound": UNIT, "ybound": UNIT, "zbound": UNIT, name: bound})


@pytest.mark.parametrize(
    "bound", [(0.0, 1.0), 3.0, None, "abc", "011", (0, 1, 1, 1), (0, 1, 1j), np.array([0, 1, 1 + 1j])]
)
def test_bounds_that_are_none(bound):
    with pytest.raises(TypeError, match=r"ybound must be three numbers \(lower, upper, step\)"):
        BEVGrid(UNIT, bound, UNIT)


def test_too_many_cells():
    with pytest.raises(ValueError, match=r"fewer than 2\*\*31"):
        BEVGrid((0.0, 65536.0, 1.0), (0.0, 32768.0, 1.0), UNIT)


def test_a_grid_is_a_value():
    grid = BEVGrid((-4, 4, 0.5), (0, 6, 2), (-1, 1, 0.25))
    assert pickle.loads(pickle.dumps(grid)) == grid == BEVGrid((-4.0, 4.0, 0.5), (0.0, 6.0, 2.0), (-1.0, 1.0, 0.25))
    assert len({grid, pickle.loads(pickle.dumps(grid))}) == 1
    with pytest.raises(AttributeError):
        grid.xbound = UNIT  # type: ignore[misc]
