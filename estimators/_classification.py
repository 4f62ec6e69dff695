"""Classification by a vote of the nearest neighbours."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.exceptions import DataConversionWarning
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from ._base import FLOATS, OneOf
from ._neighbors import KNeighborsMixin


class KNeighborsClassifier(KNeighborsMixin, ClassifierMixin, BaseEstimator):
    """Classification by the vote of the exact nearest neighbours, as ``sklearn.neighbors.KNeighborsClassifier``.

    Args:
        n_neighbors: how many neighbours vote.
        weights: ``"uniform"`` (or ``None``), ``"distance"`` for votes that weigh 1 / distance, or a function that maps
            distances to weights.
        algorithm: ``"brute"`` compares all pairs; ``"auto"``, ``"kd_tree"`` and ``"ball_tree"`` prune the search where
            that pays, as ``algorithm="auto"`` of :func:`kernops.neighbors.knn` does. The neighbours are the same.
        leaf_size, n_jobs: accepted for scikit-learn's sake; searches use torch's threads.
        p: power of the Minkowski metric.
        metric: a name of ``kernops.neighbors.METRICS``, or a function of two LazyTensors.
        metric_params: further parameters of the metric.
        device: ``"auto"`` (a GPU where there is one), ``"cpu"``, ``"cuda"`` or another torch device.

    Attributes:
        classes_: the labels; a list of arrays where there are several outputs.
        outputs_2d_: whether there are several outputs.
        effective_metric_, effective_metric_params_, n_samples_fit_, n_features_in_, feature_names_in_: as in
            ``NearestNeighbors``.
    """

    _rules = {**KNeighborsMixin._rules, "weights": OneOf(("uniform", "distance", None), functions=True)}

    def __init__(
        self,
        n_neighbors=5,
        *,
        weights="uniform",
        algorithm="auto",
        leaf_size=30,
        p=2,
        metric="minkowski",
        metric_params=None,
        n_jobs=None,
        device="auto",
    ):
        self.n_neighbors = n_neighbors
        self.weights = weights
        self.algorithm = algorithm
        self.leaf_size = leaf_size
        self.p = p
        self.metric = metric
        self.metric_params = metric_params
        self.n_jobs = n_jobs
        self.device = device

    def fit(self, X, y):
        """Keep samples (n_samples, n_features) and their labels, (n_samples,) or (n_samples, n_outputs)."""
        X, y = validate_data(self, X, y, dtype=FLOATS, order="C", multi_output=True)
        if y.ndim == 2 and y.shape[1] == 1:
            warnings.warn(
                "A column-vector y was passed when a 1d array was expected. Please change the shape of y to "
                "(n_samples,), for example using ravel().",
                DataConversionWarning,
                stacklevel=2,
            )
            y = y.ravel()
        check_classification_targets(y)
        self._remember(X)
        self.outputs_2d_ = y.ndim == 2
        found = [np.unique(column, return_inverse=True) for column in (y.T if self.outputs_2d_ else [y])]
        self.classes_ = [classes for classes, _ in found] if self.outputs_2d_ else found[0][0]
        self._y = np.stack([codes.ravel() for _, codes in found], axis=1)
        return self

    def _votes(self, X: Any) -> list[np.ndarray]:
        """For each output, the weight (n_queries, n_classes) of the votes for each class."""
        check_is_fitted(self)
        distances, indices = self.kneighbors(X)
        weights = _vote_weights(distances, self.weights)
        if (weights == 0).all(axis=1).any():
            raise ValueError(
                "All neighbors of some sample is getting zero weights. Please modify 'weights' to avoid this case if "
                "you are using a user-defined function."
            )
        rows = np.arange(len(indices))
        votes = []
        for classes, codes in zip(self._class_list(), self._y.T):
            count = np.zeros((len(indices), len(classes)), dtype=weights.dtype)
            for neighbour in range(indices.shape[1]):
                count[rows, codes[indices[:, neighbour]]] += weights[:, neighbour]
            votes.append(count)
        return votes

    def _class_list(self) -> list[Any]:
        return list(self.classes_) if self.outputs_2d_ else [self.classes_]

    def predict(self, X):
        """The most voted label of each sample, the first of ``classes_`` among equals.

        ``X=None`` stands for the training samples, each without itself as a neighbour.
        """
        votes = self._votes(X)
        labels = [classes[v.argmax(axis=1)] for classes, v in zip(self._class_list(), votes)]
        return np.stack(labels, axis=1) if self.outputs_2d_ else labels[0]

    def predict_proba(self, X):
        """The share of the votes for each class, (n_queries, n_classes); a list of these for several outputs.

        ``X=None`` stands for the training samples, each without itself as a neighbour.
        """
        shares = [v / v.sum(axis=1, keepdims=True) for v in self._votes(X)]
        return shares if self.outputs_2d_ else shares[0]

    def score(self, X, y, sample_weight=None):
        """Mean accuracy; for ``X=None`` that of leave-one-out cross-validation on the training samples."""
        return super().score(X, y, sample_weight)

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_label = True
        tags.target_tags.multi_output = True
        return tags


def _vote_weights(distances: np.ndarray, weights: Any) -> np.ndarray:
    """The weight of each neighbour's vote."""
    if callable(weights):
        return np.asarray(weights(distances))
    if weights in (None, "uniform"):
        return np.ones_like(distances)
    with np.errstate(divide="ignore"):
        inverse = 1 / distances
    same = np.isinf(inverse)  # a sample at distance 0 alone decides
    return np.where(same.any(axis=1, keepdims=True), same, inverse)
