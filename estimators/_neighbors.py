"""Unsupervised neighbour searches, and what neighbour-based estimators share."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Integral
from typing import Any

import numpy as np
from scipy import sparse
from sklearn import get_config
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted, validate_data

from ..neighbors import METRIC_NAMES, knn
from ._base import COUNT, FLOATS, TREES, OneOf, Within, array, check_parameters, tensors

#: Minkowski metrics with a formula of their own.
_OF_P = {1: "manhattan", 2: "euclidean", math.inf: "chebyshev"}


class KNeighborsMixin:
    """Fitting and searching; estimators add what they make of the neighbours."""

    n_neighbors: int
    metric: str | Callable[..., Any]
    metric_params: dict[str, Any] | None
    p: float | None
    device: Any
    _rules = {
        "n_neighbors": COUNT,
        "algorithm": TREES,
        "leaf_size": COUNT,
        "metric": OneOf(tuple(sorted(METRIC_NAMES)), functions=True),
        "p": Within(0, closed=False, or_none=True),
    }

    def _remember(self, X: np.ndarray) -> None:
        """Keep the data, and settle the metric as scikit-learn does."""
        check_parameters(self, self._rules)
        params = dict(self.metric_params or {})
        self.effective_metric_ = self.metric
        if self.metric == "minkowski":
            p = params.pop("p", 2 if self.p is None else self.p)
            if p in _OF_P:
                self.effective_metric_ = _OF_P[p]
            else:
                params["p"] = p
        self.effective_metric_params_ = params
        self._fit_X = X
        self.n_samples_fit_ = X.shape[0]

    def kneighbors(
        self, X: Any = None, n_neighbors: int | None = None, return_distance: bool = True
    ) -> tuple[np.ndarray, np.ndarray] | np.ndarray:
        """The nearest training samples of each sample.

        Args:
            X: samples (n_queries, n_features); if omitted, the training samples, of which none is its own neighbour.
            n_neighbors: how many; if omitted, the estimator's ``n_neighbors``.
            return_distance: whether to return distances as well.

        Returns:
            ``(distances, indices)`` or ``indices``, (n_queries, n_neighbors) each, the nearest first, the lowest index
            first among equals.
        """
        check_is_fitted(self)
        k = self.n_neighbors if n_neighbors is None else n_neighbors
        if not isinstance(k, Integral) or isinstance(k, bool):
            raise TypeError(f"n_neighbors does not take {type(k)} value, enter integer value")
        if k <= 0:
            raise ValueError(f"Expected n_neighbors > 0. Got {k}")
        own = X is None
        queries = self._fit_X if own else validate_data(self, X, dtype=FLOATS, order="C", reset=False)
        if k > self.n_samples_fit_ - own:
            raise ValueError(
                f"Expected n_neighbors {'<' if own else '<='} n_samples_fit, but n_neighbors = {k}, "
                f"n_samples_fit = {self.n_samples_fit_}, n_samples = {queries.shape[0]}"
            )
        distances, indices = knn(
            *tensors(self.device, queries, self._fit_X),
            int(k),
            self.effective_metric_,
            metric_params=self.effective_metric_params_,
            exclude_self=own,
            algorithm="brute" if self.algorithm == "brute" else "auto",
        )
        return (array(distances), array(indices)) if return_distance else array(indices)

    def kneighbors_graph(self, X: Any = None, n_neighbors: int | None = None, mode: str = "connectivity") -> Any:
        """The neighbours as a sparse matrix (n_queries, n_samples_fit) in CSR format.

        Args:
            X, n_neighbors: as in :meth:`kneighbors`.
            mode: ``"connectivity"`` for ones, ``"distance"`` for distances.
        """
        if mode not in ("connectivity", "distance"):
            raise ValueError(f'Unsupported mode, must be one of "connectivity", or "distance" but got "{mode}" instead')
        distances, indices = self.kneighbors(X, n_neighbors)
        n, k = indices.shape
        data = distances.ravel() if mode == "distance" else np.ones(n * k)
        kind = sparse.csr_array if get_config().get("sparse_interface") == "sparray" else sparse.csr_matrix
        return kind((data, indices.ravel(), np.arange(0, n * k + 1, k)), shape=(n, self.n_samples_fit_))


class NearestNeighbors(KNeighborsMixin, BaseEstimator):
    """Exact nearest neighbours, as ``sklearn.neighbors.NearestNeighbors`` with all pairs compared on the fly.

    Args:
        n_neighbors: how many neighbours :meth:`kneighbors` returns unless told otherwise.
        algorithm: ``"brute"`` compares all pairs; ``"auto"``, ``"kd_tree"`` and ``"ball_tree"`` prune the search where
            that pays, as ``algorithm="auto"`` of :func:`kernops.neighbors.knn` does. The neighbours are the same.
        leaf_size, n_jobs: accepted for scikit-learn's sake; searches use torch's threads.
        metric: a name of ``kernops.neighbors.METRICS``, or a function of two LazyTensors.
        p: power of the Minkowski metric.
        metric_params: further parameters of the metric.
        device: ``"auto"`` (a GPU where there is one), ``"cpu"``, ``"cuda"`` or another torch device.

    Attributes:
        effective_metric_, effective_metric_params_: the metric in use, Minkowski metrics under their own names.
        n_samples_fit_: number of training samples.
        n_features_in_, feature_names_in_: of the training data.
    """

    def __init__(
        self,
        *,
        n_neighbors=5,
        algorithm="auto",
        leaf_size=30,
        metric="minkowski",
        p=2,
        metric_params=None,
        n_jobs=None,
        device="auto",
    ):
        self.n_neighbors = n_neighbors
        self.algorithm = algorithm
        self.leaf_size = leaf_size
        self.metric = metric
        self.p = p
        self.metric_params = metric_params
        self.n_jobs = n_jobs
        self.device = device

    def fit(self, X, y=None):
        """Keep the samples that neighbours are searched among; ``y`` is ignored."""
        self._remember(validate_data(self, X, dtype=FLOATS, order="C"))
        return self
