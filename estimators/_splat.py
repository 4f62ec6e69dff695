"""Pooling of camera features into a bird's-eye-view grid."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from ..geometric import BEVGrid, CameraRig, SplatPlan, frustum, splat
from ..lazy.arrays import give_back, to_tensor
from ._base import OneOf, check_parameters, device_of

#: The grid of ``grid=None``: the one of BEVDet's configurations for nuScenes.
NUSCENES_GRID = BEVGrid(xbound=(-51.2, 51.2, 0.8), ybound=(-51.2, 51.2, 0.8), zbound=(-5.0, 3.0, 8.0))
#: How many times smaller than the image the feature map of ``feature_size=None`` is.
STRIDE = 16

ARRAYS = ("depth", "features", "weight")
NEEDED = ("depth", "features")


class SplatPooling(TransformerMixin, BaseEstimator):
    """Lift-Splat-Shoot pooling: depth and features of cameras to features of a bird's-eye-view grid.

    ``fit`` takes the calibration of the cameras, finds the cell of every point and groups the points; ``transform``
    pools. Both take a mapping as well, so that the estimator can stand in a ``Pipeline``.

    Args:
        grid: a :class:`kernops.geometric.BEVGrid`; None: 128 x 128 cells of 0.8 m around the vehicle, z from -5 to 3 m.
        depth_bins: depths of the bins in metres, (D,), increasing; None: those of ``dbound``.
        dbound: (start, stop, step) of the depth bins in metres, unless ``depth_bins`` is given.
        feature_size: (h, w) of the feature maps; None: a sixteenth of the image, rounded down.
        variant: ``"cumsum"``, ``"atomic"``, ``"histogram"`` or ``"auto"``; see :class:`kernops.geometric.SplatPlan`.
        rounding: ``"floor"``, or ``"trunc"`` for weights that were trained with the public implementations.
        depth_logits: whether ``"depth"`` holds logits, whose softmax over the bins is meant.
        backend: ``"auto"``, ``"cuda"``, ``"cpu"`` or ``"tiled"``.
        device: ``"auto"`` or None (a GPU where there is one), ``"cpu"``, ``"cuda"`` or another torch device. NumPy
            arrays are pooled there; tensors must be there.

    Attributes:
        plan_: the :class:`kernops.geometric.SplatPlan`. ``plan_.report()`` says how many points fall where, and
            ``plan_.refresh(rig)`` takes another calibration of the same cameras.
        frustum_: the points of one camera.
        grid_: the grid in use.
        n_points_: number of points of all cameras.

    Raises:
        ValueError, TypeError: in ``fit``, a parameter is not one of those above, or the rig is none.

    Example:
        >>> import numpy as np
        >>> from kernops.geometric import nuscenes_rig
        >>> rig = nuscenes_rig().resized(scale=0.44, crop=(140, 0))  # images of 256 x 704 pixels
        >>> pooling = SplatPooling(dbound=(1.0, 60.0, 1.0), device="cpu").fit(rig)
        >>> pooling.n_points_, pooling.n_kept_
        (249216, 139087)
        >>> depth, features = np.full((1, 6, 59, 16, 44), 1 / 59), np.ones((1, 6, 16, 44, 2))
        >>> bev = pooling.transform({"depth": depth, "features": features})
        >>> bev.shape, round(bev[0, 0].sum() * 59)
        ((1, 2, 1, 128, 128), 139087)

    Source: J. Philion and S. Fidler, "Lift, Splat, Shoot", ECCV 2020.
    """

    _rules = {
        "variant": OneOf(("auto", "cumsum", "atomic", "histogram")),
        "rounding": OneOf(("floor", "trunc")),
        "depth_logits": OneOf((False, True)),
        "backend": OneOf(("auto", "cuda", "cpu", "tiled")),
    }

    def __init__(
        self,
        grid=None,
        depth_bins=None,
        *,
        dbound=(1.0, 60.0, 1.0),
        feature_size=None,
        variant="auto",
        rounding="floor",
        depth_logits=False,
        backend="auto",
        device="auto",
    ):
        self.grid = grid
        self.depth_bins = depth_bins
        self.dbound = dbound
        self.feature_size = feature_size
        self.variant = variant
        self.rounding = rounding
        self.depth_logits = depth_logits
        self.backend = backend
        self.device = device

    def fit(self, X, y=None):
        """Find the cells of the points.

        Args:
            X: a :class:`kernops.geometric.CameraRig`, or a mapping that has one as ``"rig"``.
            y: ignored.
        """
        check_parameters(self, self._rules)
        rig = X.get("rig") if isinstance(X, Mapping) else X
        if not isinstance(rig, CameraRig):
            raise TypeError(f"X must be a CameraRig, or a mapping with one as 'rig'; got {_what(X)}")
        if self.grid is not None and not isinstance(self.grid, BEVGrid):
            raise TypeError(f"grid must be a BEVGrid or None; got {self.grid!r}")
        self.grid_ = NUSCENES_GRID if self.grid is None else self.grid
        size = self.feature_size
        if size is None:
            size = tuple(side // STRIDE for side in rig.image_size)
        bins = {"dbound": self.dbound} if self.depth_bins is None else {"depths": self.depth_bins}
        self.frustum_ = frustum(rig.image_size, size, **bins)
        self.plan_ = SplatPlan(
            rig,
            self.frustum_,
            self.grid_,
            variant=self.variant,
            rounding=self.rounding,
            backend=self.backend,
            device=device_of("auto" if self.device is None else self.device),
        )
        self.n_points_ = self.plan_.n_points
        return self

    @property
    def n_kept_(self):
        """Number of points inside the grid."""
        return self.plan_.n_kept

    def transform(self, X):
        """Pool the features of each cell.

        Args:
            X: a mapping of arrays, all NumPy or all torch and of one floating-point dtype:
                ``"depth"`` (B, N, D, h, w), the share of each depth bin, or its logit; ``"features"`` (B, N, h, w, C);
                optionally ``"weight"`` (B, N, D, h, w), by which the shares are multiplied. ``"rig"`` may be there as
                well: one whose calibration is not that of the fit causes a warning. A rig that was fitted without a
                batch axis serves any number B of samples.

        Returns:
            (B, C, Z, Y, X), of the kind and dtype of the input; of tensors, differentiable.

        Raises:
            NotFittedError: ``fit`` was not called.
            ValueError: a key is missing or unknown, or shapes, kinds, dtypes or devices disagree.
            TypeError: ``X`` is not a mapping, or an array not of floating-point numbers.
        """
        check_is_fitted(self)
        arrays, kind = _arrays(X)
        if kind == "numpy":
            arrays = {name: t.to(self.plan_.device) for name, t in arrays.items()}
        rig = X.get("rig")
        if rig is not None and not isinstance(rig, CameraRig):
            raise TypeError(f"X['rig'] must be a CameraRig; got {type(rig).__name__}")
        if rig is not None and self.plan_.calibration != rig.calibration:
            warnings.warn(
                "SplatPooling was fitted to another calibration than that of X['rig']; plan_.refresh(rig) brings it up "
                "to date",
                UserWarning,
                stacklevel=_callers_level(),
            )
        out = self._pooled(arrays["depth"], arrays["features"], arrays.get("weight"))
        return give_back(out.detach().cpu() if kind == "numpy" else out, kind)

    def _pooled(self, depth: torch.Tensor, features: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if depth.shape[:1] != features.shape[:1]:
            raise ValueError(
                "depth and features must have one number B of samples; got shapes "
                f"depth {tuple(depth.shape)}, features {tuple(features.shape)}"
            )
        if weight is not None and weight.shape != depth.shape:
            raise ValueError(f"weight must have the shape of depth, {tuple(depth.shape)}; got {tuple(weight.shape)}")
        if self.plan_.shape[0] > 1 or not depth.ndim or len(depth) == 1:
            return self._splat(depth, features, weight)
        if not len(depth):  # one sample of zeros, so that all is checked and autograd sees the same operations
            one = None if weight is None else _with_zeros(weight)
            return self._splat(_with_zeros(depth), _with_zeros(features), one)[:0]
        weights = [None] * len(depth) if weight is None else weight.split(1)
        return torch.cat([self._splat(*sample) for sample in zip(depth.split(1), features.split(1), weights)])

    def _splat(self, depth: torch.Tensor, features: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return splat(depth, features, self.plan_, weight=weight, depth_logits=self.depth_logits)

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array = False
        tags.input_tags.dict = True
        tags.no_validation = True
        tags.transformer_tags.preserves_dtype = ["float64", "float32", "float16"]
        return tags


def _arrays(X: Any) -> tuple[dict[str, torch.Tensor], str]:
    """The arrays of a mapping as tensors, and what kind they are."""
    accepted = "'depth', 'features' and optionally 'weight' and 'rig'"
    if not isinstance(X, Mapping):
        raise TypeError(f"X must be a mapping with {accepted}; got {_what(X)}")
    unknown = [key for key in X if key not in (*ARRAYS, "rig")]
    missing = [key for key in NEEDED if X.get(key) is None]
    if unknown or missing:
        raise ValueError(f"X must have {accepted}; got {', '.join(map(repr, X)) or 'an empty mapping'}")
    tensors, spaces = {}, {}
    for name in ARRAYS:
        if X.get(name) is not None:
            tensors[name], spaces[name] = to_tensor(X[name], f"X[{name!r}]")
    kinds = {name: space.kind for name, space in spaces.items()}
    if len(set(kinds.values())) > 1:
        raise ValueError(f"the arrays of X must be of one kind; got {', '.join(f'{n}: {k}' for n, k in kinds.items())}")
    return tensors, kinds["depth"]


def _with_zeros(samples: torch.Tensor) -> torch.Tensor:
    """With one more sample, of zeros."""
    return torch.cat((samples, samples.new_zeros((1, *samples.shape[1:]))))


def _callers_level() -> int:
    """The ``stacklevel`` with which the caller of this function warns at the line outside of this package.

    scikit-learn's own frames are passed over too: it wraps ``transform``, and pipelines call it.
    """
    level, frame = 0, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("kernops", "sklearn"):
        level, frame = level + 1, frame.f_back
    return level + 1


def _what(X: Any) -> str:
    return f"a mapping with {', '.join(map(repr, X)) or 'nothing'}" if isinstance(X, Mapping) else type(X).__name__
