"""Frustums: columns, rows and depths as Lift-Splat-Shoot samples them."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernops.geometric.frustum import frustum


def test_bevdet():
    made = frustum((256, 704), (16, 44), dbound=(1.0, 60.0, 1.0))
    assert made.shape == (59, 16, 44)
    assert (made.image_size, made.feature_size) == ((256, 704), (16, 44))
    np.testing.assert_allclose(made.u, np.linspace(0, 703, 44), rtol=1e-15)
    np.testing.assert_allclose(made.v, np.linspace(0, 255, 16), rtol=1e-15)
    assert made.d.tolist() == list(range(1, 60))
    assert {t.dtype for t in (made.u, made.v, made.d)} == {torch.float64}


@pytest.mark.parametrize(
    ("dbound", "count", "last"),
    [((1.0, 60.0, 0.5), 118, 59.5), ((1, 51, 0.5), 100, 50.5), ((4.0, 45.0, 1.0), 41, 44.0), ((2, 3, 5), 1, 2)],
)
def test_depths(dbound, count, last):
    d = frustum((8, 8), (2, 2), dbound=dbound).d
    assert (len(d), d[0], d[-1]) == (count, dbound[0], last)


@settings(deadline=None)
@given(start=st.floats(0.01, 10), length=st.floats(0.1, 100), step=st.floats(0.05, 10))
def test_number_of_depths_is_that_of_arange(start, length, step):
    """A network was trained with so many channels, whatever rounding does to the quotient."""
    expected = torch.arange(start, start + length, step, dtype=torch.float64)
    torch.testing.assert_close(frustum((8, 8), (2, 2), dbound=(start, start + length, step)).d, expected)


@pytest.mark.parametrize("depths", [[1, 2, 4.5], (1.0, 2.0, 4.5), np.array([1, 2, 4.5]), torch.tensor([1, 2, 4.5])])
def test_depths_of_ones_own(depths):
    made = frustum((8, 8), (2, 2), depths=depths)
    assert made.d.tolist() == [1.0, 2.0, 4.5]
    assert made.d.dtype == torch.float64


def test_own_depths_are_copied():
    depths = torch.tensor([1.0, 2.0], dtype=torch.float64)
    made = frustum((8, 8), (2, 2), depths=depths)
    depths.zero_()
    assert made.d.tolist() == [1.0, 2.0]


def test_one_row_and_one_column_look_at_the_first_pixel():
    made = frustum((256, 704), (1, 1), depths=[3.0])  # linspace(0, 703, 1) is 0
    assert (made.u.tolist(), made.v.tolist(), made.shape) == ([0.0], [0.0], (1, 1, 1))


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"image_size": (256,)}, TypeError, r"image_size must be two integers \(height, width\)"),
        ({"image_size": (256.5, 704)}, TypeError, "image_size must be two integers"),
        ({"image_size": 256}, TypeError, "image_size must be two integers"),
        ({"image_size": (0, 704)}, ValueError, r"image_size must be positive; got \(0, 704\)"),
        ({"feature_size": (16, -1)}, ValueError, "feature_size must be positive"),
        ({"feature_size": (16, 44, 3)}, TypeError, "feature_size must be two integers"),
        ({"image_size": (math.inf, 704)}, TypeError, r"image_size must be two integers .*; got \(inf, 704\)"),
        ({"feature_size": (math.nan, 2)}, TypeError, "feature_size must be two integers"),
        ({"feature_size": (16, 0.5, 44)}, TypeError, "feature_size must be two integers"),
        ({"dbound": (1, 60, 1 + 1j)}, TypeError, "dbound must be three numbers"),
        ({"dbound": np.array([1, 60, 1 + 1j], np.complex64)}, TypeError, "dbound must be three numbers"),
        ({"dbound": "123"}, TypeError, "dbound must be three numbers"),
        ({"dbound": (1, 2, 1e-12)}, ValueError, r"dbound=\(1, 2, 1e-12\) has 1e\+12 bins; at most 2\*\*20 = 1048576"),
        ({"dbound": (1, 2, 5e-324)}, ValueError, "has inf bins"),
        ({"dbound": (1, 2**20 + 1.5, 1)}, ValueError, "has 1048576.5 bins"),
        ({"dbound": None, "depths": np.array([1.0, 2 + 1j])}, TypeError, "depths must be real numbers"),
        ({"dbound": None, "depths": torch.tensor([1.0, 2 + 1j])}, TypeError, "depths must be real numbers"),
        ({"dbound": None}, TypeError, "one of dbound and depths; got neither"),
        ({"depths": [1.0]}, TypeError, "one of dbound and depths; got both"),
        ({"dbound": (1, 60)}, TypeError, r"dbound must be three numbers \(start, stop, step\)"),
        ({"dbound": (0, 60, 1)}, ValueError, "0 < start < stop and 0 < step"),
        ({"dbound": (1, 60, 0)}, ValueError, "0 < start < stop and 0 < step"),
        ({"dbound": (60, 1, 1)}, ValueError, "0 < start < stop and 0 < step"),
        ({"dbound": (1, float("nan"), 1)}, ValueError, "finite"),
        ({"dbound": (1, float("inf"), 1)}, ValueError, "finite"),
        ({"dbound": None, "depths": []}, ValueError, r"depths must have shape \(D,\) with at least one"),
        ({"dbound": None, "depths": [[1.0]]}, ValueError, r"depths must have shape \(D,\)"),
        ({"dbound": None, "depths": [2.0, 1.0]}, ValueError, "finite, positive and increasing"),
        ({"dbound": None, "depths": [1.0, 1.0]}, ValueError, "finite, positive and increasing"),
        ({"dbound": None, "depths": [0.0, 1.0]}, ValueError, "finite, positive and increasing"),
        ({"dbound": None, "depths": [1.0, float("inf")]}, ValueError, "finite, positive and increasing"),
        ({"dbound": None, "depths": [float("nan")]}, ValueError, "finite, positive and increasing"),
        ({"dbound": None, "depths": "far"}, TypeError, "depths must be real numbers"),
    ],
)
def test_bad_input(changed, error, message):
    with pytest.raises(error, match=message):
        frustum(**{"image_size": (256, 704), "feature_size": (16, 44), "dbound": (1, 60, 1), **changed})


def test_copies():
    made = frustum((256, 704), (16, 44), dbound=(1.0, 60.0, 1.0))
    for other in (pickle.loads(pickle.dumps(made)), made.to("cpu")):
        assert repr(other) == repr(made) == "Frustum(16 x 44 features of 256 x 704 pixels, 59 depths 1 … 59 m)"
        assert torch.equal(other.d, made.d)


def test_as_many_bins_as_are_accepted():
    assert len(frustum((8, 8), (2, 2), dbound=(1, 2**20 + 1, 1)).d) == 2**20


@pytest.mark.parametrize("bins", [{"dbound": (1, 3, 1)}, {"depths": [1, 2]}, {"depths": np.array([1.0, 2.0])}])
def test_made_on_the_cpu_whatever_the_default_device(bins):
    with torch.device("meta"):
        made = frustum((256, 704), (16, 44), **bins)
    assert {t.device.type for t in (made.u, made.v, made.d)} == {"cpu"}
    assert made.d.tolist() == [1.0, 2.0]
