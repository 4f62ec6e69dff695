"""What a job of the demo is given and gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_sample_image

from .. import backends

PHOTOS = ("flower", "china")
SEED = 0


@dataclass(frozen=True)
class Setting:
    """Where and how large the jobs run.

    Attributes:
        device: where to compute.
        quick: whether photographs are halved in both directions, which leaves a sixteenth of the pairs.
        out: folder of the pictures.
    """

    device: torch.device
    quick: bool
    out: Path

    @cached_property
    def backend(self) -> str:
        """Name of the back end that the engine chooses for this device."""
        return backends.choose("auto", self.device).__name__.rpartition(".")[-1]

    def photo(self, name: str) -> np.ndarray:
        """A photograph of scikit-learn as (h, w, 3) bytes."""
        pixels = load_sample_image(f"{name}.jpg")
        if not self.quick:
            return pixels
        h, w = (2 * (n // 2) for n in pixels.shape[:2])
        blocks = pixels[:h, :w].reshape(h // 2, 2, w // 2, 2, 3)
        return np.round(blocks.mean(axis=(1, 3))).astype(np.uint8)


@dataclass
class Result:
    """One line of the table.

    Attributes:
        job: what was done.
        pairs: how many pairs of points were compared; of a splat, its points.
        table_bytes: size of the table of pairs, or of all lifted points, that was not built, in the dtype of the
            computation.
        seconds, peak_bytes: time and peak memory.
        backend: name of the back end.
        checks: what was compared with scikit-learn or the truth: name -> number.
        agrees: whether the checks passed.
        picture: file name of the picture.
    """

    job: str
    pairs: int
    table_bytes: int
    seconds: float
    peak_bytes: int
    backend: str
    checks: dict[str, Any] = field(default_factory=dict)
    agrees: bool = True
    picture: str | None = None
