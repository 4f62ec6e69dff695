"""Kernel density estimation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.special import gammainc
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from ..backends import reduce
from ..formula.graph import Node
from ..formula.ops import apply
from ..formula.plan import make_plan
from ..kernels import Slots
from ..neighbors import METRIC_NAMES, complete, distance, lookup
from ._base import COUNT, FLOATS, TREES, OneOf, Within, array, check_parameters, tensors
from ._shapes import SHAPES

Tensor = torch.Tensor
Formula = Callable[[Node, Node], Node]

#: bandwidth rules, of the number of samples and of features
RULES: dict[str, Callable[[int, int], float]] = {
    "scott": lambda n, dim: n ** (-1 / (dim + 4)),
    "silverman": lambda n, dim: (n * (dim + 2) / 4) ** (-1 / (dim + 4)),
}


@dataclass(frozen=True)
class _Bandwidth:
    """The rule of the ``bandwidth`` parameter."""

    def holds(self, value: Any) -> bool:
        return value in RULES if isinstance(value, str) else Within(0, closed=False).holds(value)

    def __str__(self) -> str:
        return f"a number > 0 or one of {', '.join(map(repr, RULES))}"


class KernelDensity(BaseEstimator):
    """Kernel density estimation, as ``sklearn.neighbors.KernelDensity`` with every sum over all samples exact.

    Args:
        bandwidth: the kernel's width h, or ``"scott"`` or ``"silverman"`` for a rule.
        algorithm, breadth_first, leaf_size: accepted for scikit-learn's sake; all pairs are compared.
        kernel: ``"gaussian"``, ``"tophat"``, ``"epanechnikov"``, ``"exponential"``, ``"linear"`` or ``"cosine"``.
        metric: a name of ``kernops.neighbors.METRICS``; the normalisation is that of the Euclidean metric.
        atol, rtol: accepted; the sum is exact to rounding, within any tolerance.
        metric_params: further parameters of the metric.
        device: ``"auto"`` (a GPU where there is one), ``"cpu"``, ``"cuda"`` or another torch device.

    Attributes:
        bandwidth_: the width in use.
        n_features_in_, feature_names_in_: of the training data.
    """

    _rules = {
        "bandwidth": _Bandwidth(),
        "algorithm": TREES,
        "kernel": OneOf(tuple(SHAPES)),
        "metric": OneOf(tuple(sorted(METRIC_NAMES))),
        "atol": Within(0),
        "rtol": Within(0),
        "leaf_size": COUNT,
    }

    def __init__(
        self,
        *,
        bandwidth=1.0,
        algorithm="auto",
        kernel="gaussian",
        metric="euclidean",
        atol=0,
        rtol=0,
        breadth_first=True,
        leaf_size=40,
        metric_params=None,
        device="auto",
    ):
        self.bandwidth = bandwidth
        self.algorithm = algorithm
        self.kernel = kernel
        self.metric = metric
        self.atol = atol
        self.rtol = rtol
        self.breadth_first = breadth_first
        self.leaf_size = leaf_size
        self.metric_params = metric_params
        self.device = device

    def fit(self, X, y=None, sample_weight=None):
        """Keep the samples (n_samples, n_features) and their weights; ``y`` is ignored."""
        check_parameters(self, self._rules)
        X = validate_data(self, X, dtype=FLOATS, order="C")
        if sample_weight is not None:
            sample_weight = _check_sample_weight(sample_weight, X, dtype=X.dtype)
            if not (sample_weight.min() >= 0 and sample_weight.max() > 0):
                raise ValueError("sample_weight must not be negative, and not all 0")
        self.bandwidth_ = RULES[self.bandwidth](*X.shape) if isinstance(self.bandwidth, str) else float(self.bandwidth)
        self._fit_X, self._weights = X, sample_weight
        return self

    def score_samples(self, X):
        """The logarithm of the density at each sample."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=FLOATS, order="C", reset=False)
        weights = np.ones(1, X.dtype) if self._weights is None else self._weights / self._weights.max()
        total = len(self._fit_X) if self._weights is None else float(weights.sum(dtype=np.float64))
        x, y, w = tensors(self.device, X, self._fit_X, weights)
        log_mass = SHAPES[self.kernel].log_mass(X.shape[1]) + X.shape[1] * math.log(self.bandwidth_)
        sums = self._log_sums(x, y, None if self._weights is None else w.unsqueeze(-1))
        return array(sums - (math.log(total) + log_mass)).astype(X.dtype, copy=False)

    def _log_sums(self, x: Tensor, y: Tensor, w: Tensor | None) -> Tensor:
        """log of the sum of weight times kernel over the training samples, for each row of x."""
        shape = SHAPES[self.kernel]
        sums = self._reduce("Sum", shape.value, x, y, w)
        logs = sums.log()
        if shape.log is not None:
            # A sum below this may lack a relevant part by underflow. Few rows are that far from all data, and plain
            # sums are twice as fast as log-sum-exps.
            tiny = torch.finfo(x.dtype).tiny / torch.finfo(x.dtype).eps * len(y)
            far = torch.nonzero(sums < tiny).squeeze(-1)
            if len(far):
                log_w = None if w is None else w.log()
                logs[far] = self._reduce("LogSumExp", shape.log, x[far], y, log_w)
        return logs

    def _reduce(
        self, core: str, kernel: Callable[[Node, Node], Node], x: Tensor, y: Tensor, w: Tensor | None
    ) -> Tensor:
        """A reduction of the kernel times w (for its logarithm: plus w) over the training samples."""
        slots = Slots()
        a, b = slots.rows(x), slots.columns(y)
        row = lookup(self.metric)
        params = complete(row, self.metric_params or {})
        d = distance(row, a, b, slots.parameters(params, x, row.static))
        formula = kernel(d, slots.parameter(self.bandwidth_, x))
        if w is not None:
            formula = apply("Mul" if core == "Sum" else "Add", formula, slots.columns(w))
        return reduce(make_plan(core, formula), slots.values, len(x), len(y))[0].squeeze(-1)

    def score(self, X, y=None):
        """The logarithm of the likelihood of all samples together."""
        return np.sum(self.score_samples(X))

    def sample(self, n_samples=1, random_state=None):
        """Draw samples from the estimated density, (n_samples, n_features); Euclidean metric only.

        Gaussian and tophat samples are those that scikit-learn draws for the same ``random_state``.
        """
        check_is_fitted(self)
        if self.metric not in ("euclidean", "l2"):
            raise ValueError(f"sample needs metric='euclidean'; got {self.metric!r}")
        data, dim = self._fit_X, self.n_features_in_
        rng = check_random_state(random_state)
        u = rng.uniform(0, 1, size=n_samples)
        if self._weights is None:
            centres = data[(u * len(data)).astype(np.int64)]
        else:
            edges = np.cumsum(self._weights, dtype=np.float64)
            centres = data[np.searchsorted(edges, u * edges[-1])]
        if self.kernel == "gaussian":
            return np.atleast_2d(rng.normal(centres, self.bandwidth_)).astype(data.dtype, copy=False)
        steps = rng.normal(size=(n_samples, dim))
        squares = (steps**2).sum(axis=1)
        radii = SHAPES[self.kernel].radii
        r = gammainc(0.5 * dim, 0.5 * squares) ** (1 / dim) if radii is None else radii(rng, n_samples, dim)
        return (centres + steps * (r * self.bandwidth_ / np.sqrt(squares))[:, None]).astype(data.dtype, copy=False)
