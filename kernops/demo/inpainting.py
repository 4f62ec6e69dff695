"""Inpainting: a photograph without most of its pixels, restored by kernel ridge regression from place to colour."""

from __future__ import annotations

import numpy as np
import torch

from ..estimators import KernelRidge
from .jobs import SEED, Result, Setting
from .meter import Meter, Progress
from .pictures import Panel, side_by_side

PHOTO = "flower"
REMOVED = 0.7
#: Among Matérn, exponential and Gaussian kernels of several widths this one restored best for its iterations. Iterating
#: further than the tolerance changes the picture by less than 0.05 dB.
MODEL = {"kernel": "matern32", "kernel_params": {"length_scale": 2.0}, "alpha": 0.1, "solver": "cg", "tol": 1e-2}


class _Watched(KernelRidge):
    """Kernel ridge regression that shows its iterations."""

    def watch(self, progress: Progress) -> _Watched:
        self._progress = progress
        return self

    def _on_iteration(self, k: int, residuals: torch.Tensor) -> None:
        self._progress.title = f"inpainting: iteration {k}, residual {float(residuals.max()):.1e}"


def run(setting: Setting) -> Result:
    """Remove pixels at random, fit the rest, predict what was removed."""
    photo = setting.photo(PHOTO)
    shape = photo.shape[:2]
    known = np.random.default_rng(SEED).random(shape) >= REMOVED
    places = np.moveaxis(np.indices(shape), 0, -1).astype(np.float32)
    colours = photo.astype(np.float32)
    mean = colours[known].mean(axis=0)
    with Meter(setting.device) as meter, Progress("inpainting") as progress:
        model = _Watched(device=setting.device, **MODEL).watch(progress)
        model.fit(places[known], colours[known] - mean)
        progress.title = "inpainting: predicting"
        restored = colours.copy()
        restored[~known] = model.predict(places[~known]) + mean
    picture = np.clip(np.round(restored), 0, 255).astype(np.uint8)
    n, missing = int(known.sum()), int((~known).sum())
    quality = psnr(picture, photo)
    panels = [
        Panel(np.where(known[..., None], photo, 0), f"{n / known.size:.0%} of the pixels", f"{n:,} known"),
        Panel(picture, f"restored: {quality:.1f} dB", f"kernel ridge regression, {model.n_iter_} iterations"),
        Panel(photo, "original", f"{shape[1]} by {shape[0]} pixels"),
    ]
    side_by_side(panels).save(setting.out / "inpainting.png", optimize=True)
    pairs = n * n * (model.n_iter_ + 1) + missing * n  # one more product checks the residual
    result = Result(f"{PHOTO}: inpainting", pairs, n * n * 4, meter.seconds, meter.peak_bytes, setting.backend)
    result.checks = {"PSNR in dB": quality, "iterations": model.n_iter_, "relative residual": model.residual_}
    result.picture = "inpainting.png"
    return result


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    """Peak signal-to-noise ratio of two pictures in bytes, in decibels."""
    error = np.mean((a.astype(np.float64) - b.astype(np.float64)) ** 2)
    return float(10 * np.log10(255**2 / error)) if error else float("inf")
