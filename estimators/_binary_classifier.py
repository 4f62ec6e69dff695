"""Gaussian process classification of two classes, by Laplace's approximation."""

from __future__ import annotations

import warnings
from functools import lru_cache

import numpy as np
import torch
from scipy.special import erf, expit
from sklearn.base import ClassifierMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted

from ..kernels import from_sklearn
from ..operators import KernelOperator, NotPositiveDefiniteError, RescaledOperator
from ..solvers.problems import without_warnings
from ._base import array
from ._gaussian_process_base import Evaluation, GaussianProcess, note_of
from ._laplace import DenseLaplace, IterativeLaplace, Laplace, Mode, curvature
from ._posterior import Dense, Iterative, variance
from ._progress import with_callbacks

Tensor = torch.Tensor

#: Residual of the mode where it costs nothing, by Cholesky's decomposition.
EXACT = 1e-10
#: Widths of the error functions that a logistic function is fitted by, and where it is.
WIDTHS = np.array([0.41, 0.4, 0.37, 0.44, 0.39])
FITTED_AT = np.array([0.0, 0.6, 2.0, 3.5, 4.5, np.inf])


@lru_cache
def _weights() -> np.ndarray:
    return np.linalg.lstsq((erf(FITTED_AT[:, None] * WIDTHS) + 1) / 2, expit(FITTED_AT), rcond=None)[0]


def averaged(mean: np.ndarray, variance: np.ndarray) -> np.ndarray:
    """The expectation of the logistic function of normal variables.

    The function is taken for a combination of error functions, whose expectations are error functions again (Williams
    and Barber, Bayesian Classification with Gaussian Processes, 1998, appendix A), with scikit-learn's widths: within
    2e-4 of the logistic function.
    """
    scaled = WIDTHS * mean[:, None] / np.sqrt(1 + 2 * WIDTHS**2 * variance[:, None])
    return (0.5 * erf(scaled) + 0.5) @ _weights()


class BinaryClassifier(ClassifierMixin, GaussianProcess):
    """The classifier of two classes; parameters as for ``GaussianProcessClassifier``."""

    _title = "GaussianProcessClassifier"

    def __init__(
        self,
        kernel=None,
        *,
        optimizer="fmin_l_bfgs_b",
        n_restarts_optimizer=0,
        max_iter_predict=100,
        warm_start=False,
        copy_X_train=True,
        random_state=None,
        device="auto",
        dtype="auto",
        solver="auto",
        tol=1e-4,
        max_iter=None,
        preconditioner="auto",
        rank=None,
        n_probes=10,
        verbose=0,
    ):
        self.kernel = kernel
        self.optimizer = optimizer
        self.n_restarts_optimizer = n_restarts_optimizer
        self.max_iter_predict = max_iter_predict
        self.warm_start = warm_start
        self.copy_X_train = copy_X_train
        self.random_state = random_state
        self.device = device
        self.dtype = dtype
        self.solver = solver
        self.tol = tol
        self.max_iter = max_iter
        self.preconditioner = preconditioner
        self.rank = rank
        self.n_probes = n_probes
        self.verbose = verbose

    @with_callbacks
    def fit(self, X, y):
        """Optimize the kernel's parameters, and find the posterior's mode."""
        self.kernel_ = self._given_kernel()
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) != 2:
            raise ValueError(f"y must have two classes; got {len(self.classes_)}: {self.classes_}")
        self.X_train_ = np.copy(X) if self.copy_X_train else X
        self.y_train_ = codes
        random = check_random_state(self.random_state)
        starts = self._starts(random)
        self._seed = int(random.randint(2**31 - 1))
        self._recent = None
        try:
            self._learn(starts, X, y)
        finally:
            del self._recent
        return self

    # --- the approximation ----------------------------------------------------------------------------------------
    def _laplace(self, theta: Tensor | None = None) -> Laplace:
        x, y = self._points(self.X_train_, self.y_train_.astype(self.X_train_.dtype))
        kernel = KernelOperator(from_sklearn(self.kernel_, None if theta is None else theta.to(x)), x)
        if self._dense:
            return DenseLaplace(kernel, y, EXACT)
        return IterativeLaplace(kernel, y, float(self.tol), self._settings, self.n_probes, self._seed)

    def _mode(self, laplace: Laplace, start: np.ndarray | None = None, done: int = 0) -> Mode:
        """The mode, from where ``done`` steps have led to."""
        if self.warm_start and start is None:
            start = getattr(self, "_last", None)
        usable = start is not None and start.shape == self.y_train_.shape
        begin = torch.as_tensor(start).to(laplace.y) if usable else None
        mode = laplace.mode(begin, self.max_iter_predict - done)
        if self.warm_start:
            self._last = array(mode.a)
        return mode

    def _evaluate(self, theta: np.ndarray, eval_gradient: bool) -> Evaluation:
        parameters = torch.tensor(theta, dtype=torch.float64, requires_grad=eval_gradient and len(theta) > 0)
        try:
            laplace = self._laplace(parameters)
            mode = self._mode(laplace)
            if hasattr(self, "_recent"):  # within fit
                self._recent = theta.copy(), array(mode.a), mode.iterations
            value, gradient, error, report = laplace.likelihood(mode, parameters if parameters.requires_grad else None)
        except NotPositiveDefiniteError as failure:
            return Evaluation(-np.inf, np.zeros_like(theta), note=str(failure))
        note = f"{mode.iterations} Newton steps with {mode.solves} iterations in all, {note_of(report)}"
        if not eval_gradient:
            return Evaluation(value, None, error, note, report)
        slope = np.zeros(0) if gradient is None else array(gradient).astype(np.float64)
        return Evaluation(value, slope, error, note, report)

    def _finish(self) -> str:
        laplace = self._laplace()
        recent = getattr(self, "_recent", None)  # the mode is known where the last likelihood is that of this kernel
        start, done = None, 0
        if recent is not None and np.array_equal(recent[0], self.kernel_.theta):
            _, start, done = recent
        with without_warnings():
            mode = self._mode(laplace, start, done)
            root, _, _ = curvature(mode.f, laplace.y)
            if isinstance(laplace, DenseLaplace):
                self.L_ = array(laplace.factor(root)[0])
        self.pi_, self.W_sr_, self._weights = array(mode.f.sigmoid()), array(root), array(mode.a)
        self.n_iter_, self.residual_ = max(1, done + mode.iterations), mode.residual
        if not mode.residual <= max(self.tol, 1e-6):
            why = f"{self.n_iter_} steps were not enough" if self.n_iter_ >= self.max_iter_predict else (
                f"{str(mode.f.dtype).removeprefix('torch.')} leaves no better one, or max_iter={self.max_iter} is small"
            )  # fmt: skip
            warnings.warn(
                f"GaussianProcessClassifier: Newton's method stopped at a relative residual of {mode.residual:.1e}, "
                f"above tol={self.tol:g}: {why}. A larger tol, max_iter_predict or max_iter helps, or float64",
                ConvergenceWarning,
                stacklevel=7,
            )
        return f"{self.n_iter_} Newton steps to a residual of {mode.residual:.1e}"

    # --- predicting -----------------------------------------------------------------------------------------------
    def _mean(self, X: np.ndarray) -> tuple[np.ndarray, Tensor, KernelOperator]:
        """The latent mean, the queries and their matrix with the samples."""
        x, fit, weights = self._points(X, self.X_train_, self._weights)
        across = KernelOperator(from_sklearn(self.kernel_), x, fit)
        return array(across @ weights), x, across

    def latent_mean_and_variance(self, X):
        """As for ``GaussianProcessClassifier``."""
        mean, x, across = self._mean(X)
        kernel = from_sklearn(self.kernel_)
        if self._dense:
            inverse: Dense | Iterative = Dense(self.L_, self.W_sr_)
        else:
            fit, root = self._points(self.X_train_, self.W_sr_)
            matrix = RescaledOperator(KernelOperator(kernel, fit), root).add_diagonal(1.0)
            inverse = Iterative(matrix, self._preconditioner(matrix, len(X)), float(self.tol), self.max_iter, root)
        squares = variance(KernelOperator(kernel, x), across, inverse)
        inverse.warn("GaussianProcessClassifier")
        return mean.astype(X.dtype), squares.astype(X.dtype)

    def predict(self, X):
        """The likelier class of each query: that of the sign of the latent mean."""
        check_is_fitted(self)
        return self.classes_[(self._mean(X)[0] > 0).astype(int)]

    def predict_proba(self, X):
        """The probabilities of both classes, (n_queries, 2)."""
        check_is_fitted(self)
        mean, squares = self.latent_mean_and_variance(X)
        p = averaged(mean.astype(np.float64), np.maximum(squares, 0).astype(np.float64))
        return np.stack([1 - p, p], axis=1).astype(X.dtype)
