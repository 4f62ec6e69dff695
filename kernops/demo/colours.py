"""Colours of a photograph: the nearest ones of every pixel, and how common each pixel's colour is."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from sklearn import neighbors as reference

from ..estimators import KernelDensity, NearestNeighbors
from .jobs import SEED, Result, Setting
from .meter import Meter, Progress
from .pictures import Panel, in_colour, side_by_side

N_NEIGHBORS = 10
BANDWIDTH = 8.0  # of 255 levels: about what the eye still takes for the same colour
CHECKED = 50  # pixels compared with scikit-learn, which takes its time
TOLERANCE = 1e-4  # float32 against scikit-learn's float64


def run(setting: Setting, name: str) -> Iterator[Result]:
    """Both jobs on one photograph: every pixel against every pixel, as points (red, green, blue)."""
    photo = setting.photo(name)
    colours = photo.reshape(-1, 3).astype(np.float32)
    spread, nearest = _nearest(setting, name, colours)
    density, common = _density(setting, name, colours)
    nearest.picture = common.picture = f"{name}_colours.png"
    shape = photo.shape[:2]
    log_spread = np.log1p(spread).reshape(shape)
    panels = [
        Panel(photo, name, f"{shape[1]} by {shape[0]} pixels"),
        Panel(in_colour(density.reshape(shape), "inferno", *_range(density)), "how common each colour is",
              f"Gaussian density, bandwidth {BANDWIDTH:g}", "inferno", ("rare", "common")),
        Panel(in_colour(log_spread, "viridis", 0, float(log_spread.max())), "how alone each colour is",
              f"distance to the {N_NEIGHBORS}th nearest", "viridis", ("0", f"{spread.max():.0f}")),
    ]  # fmt: skip
    side_by_side(panels).save(setting.out / f"{name}_colours.png", optimize=True)
    yield nearest
    yield common


def _range(values: np.ndarray) -> tuple[float, float]:
    """Limits of a colour map that a few extreme pixels do not stretch."""
    low, high = np.percentile(values, (1, 99.5))
    return float(low), float(high)


def _nearest(setting: Setting, name: str, colours: np.ndarray) -> tuple[np.ndarray, Result]:
    model = NearestNeighbors(n_neighbors=N_NEIGHBORS, device=setting.device).fit(colours)
    title = f"{name}: {N_NEIGHBORS} nearest colours"
    spread, result = _measured(setting, title, colours, lambda x: model.kneighbors(x)[0][:, -1])
    theirs = reference.NearestNeighbors(n_neighbors=N_NEIGHBORS, algorithm="brute").fit(colours.astype(np.float64))
    some = _some(len(colours))
    error = np.abs(theirs.kneighbors(colours[some])[0][:, -1] - spread[some]).max()
    _check(result, "largest difference from scikit-learn's distances", float(error))
    return spread, result


def _density(setting: Setting, name: str, colours: np.ndarray) -> tuple[np.ndarray, Result]:
    model = KernelDensity(bandwidth=BANDWIDTH, device=setting.device).fit(colours)
    density, result = _measured(setting, f"{name}: colour density", colours, model.score_samples)
    some = _some(len(colours))
    theirs = reference.KernelDensity(bandwidth=BANDWIDTH).fit(colours).score_samples(colours[some])
    _check(result, "largest difference from scikit-learn's log-density", float(np.abs(theirs - density[some]).max()))
    return density, result


def _check(result: Result, what: str, error: float) -> None:
    result.checks[what] = error
    result.agrees = error < TOLERANCE


def _some(n: int) -> np.ndarray:
    return np.random.default_rng(SEED).choice(n, CHECKED, replace=False)


def _measured(
    setting: Setting, title: str, colours: np.ndarray, job: Callable[[np.ndarray], np.ndarray]
) -> tuple[np.ndarray, Result]:
    """A job over all colours, in some twenty pieces so that its progress can be shown."""
    n = len(colours)
    with Meter(setting.device) as meter, Progress(title) as progress:
        out = np.concatenate([job(colours[rows]) for rows in progress.chunks(n, -(-n // 20))])
    return out, Result(title, n * n, n * n * 4, meter.seconds, meter.peak_bytes, setting.backend)
