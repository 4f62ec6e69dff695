"""Gaussian process regression with scikit-learn's kernels, by Cholesky's decomposition or by conjugate gradients."""

from __future__ import annotations

import warnings
from numbers import Integral
from typing import Any

import numpy as np
import torch
from sklearn.base import MultiOutputMixin, RegressorMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process.kernels import RBF, ConstantKernel
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from ..kernels import from_sklearn
from ..operators import KernelOperator, NotPositiveDefiniteError
from ..operators.solving import factorize
from ..solvers.problems import without_warnings
from ._base import FLOATS, OneOf, Within, array, check_parameters, forget, numbers
from ._gaussian_process_base import Evaluation, GaussianProcess, error_of, note_of
from ._posterior import Dense, Iterative, covariance, variance
from ._progress import with_callbacks

Tensor = torch.Tensor


class GaussianProcessRegressor(MultiOutputMixin, RegressorMixin, GaussianProcess):
    """Gaussian process regression, as ``sklearn.gaussian_process.GaussianProcessRegressor``, beyond a dense matrix.

    Up to 2,000 samples everything is exact, by Cholesky's decomposition. Above, systems are solved by preconditioned
    conjugate gradients in memory that grows with the samples only, and the log-determinant of the likelihood and its
    gradient are estimated (``LinearOperator.inv_quad_logdet``).

    Args:
        kernel: a kernel object of ``sklearn.gaussian_process.kernels``; None for ``ConstantKernel() * RBF()``, whose
            two numbers are optimized, as in scikit-learn 1.9.
        alpha: variance of the noise, added to the diagonal; a number or one for each sample.
        optimizer: ``"fmin_l_bfgs_b"``, a function ``optimizer(objective, theta, bounds)`` that returns the best theta
            and its value, or None to keep the kernel as it is.
        n_restarts_optimizer: how often the optimizer starts again, from a theta drawn within the bounds.
        normalize_y: whether targets are brought to mean 0 and variance 1; predictions are brought back.
        copy_X_train: whether the training data are copied.
        n_targets: number of targets for predictions before ``fit``; None for 1.
        random_state: of restarts, and of the probes of log-determinants.
        device: ``"auto"`` (a GPU where there is one), ``"cpu"``, ``"cuda"`` or another torch device.
        dtype: ``"float32"``, ``"float64"``, or ``"auto"``: float64 by Cholesky, where it costs little and float32 is
            often singular; the data's by conjugate gradients.
        solver: ``"cholesky"``, ``"cg"``, or ``"auto"``: Cholesky up to 2,000 samples.
        tol: residual, relative to the targets', at which conjugate gradients stop.
        max_iter: most iterations of conjugate gradients; None leaves it to the solver.
        preconditioner: ``"pivoted_cholesky"``, ``"nystrom"``, ``"cholesky"`` (which stores the matrix), None, or
            ``"auto"``: pivoted Cholesky, but for predictions with deviations of 32 queries and more what is expected to
            be the quickest; that may store the matrix, within a quarter of a GPU's free memory, or 128 MB on a
            processor.
        rank: of the preconditioner; None for 100, or 1.5·10⁶/n_samples where that is more. A higher one takes fewer
            iterations and makes likelihoods and their gradients more accurate.
        n_probes: random vectors that a log-determinant is estimated from.
        verbose: 1 for a progress bar where tqdm is installed, and a line for each evaluation of the likelihood where it
            is not; 2 for the lines; to stderr. ``set_callbacks`` is there with scikit-learn 1.9 and later.

    Attributes:
        X_train_, y_train_: the training data, the targets as they were normalized.
        kernel_: the kernel with its optimized parameters.
        alpha_: weights (n_samples,) or (n_samples, n_targets) of the kernels around the training samples.
        L_: by Cholesky, the factor (n_samples, n_samples).
        log_marginal_likelihood_value_: at ``kernel_.theta``.
        log_marginal_likelihood_error_: its standard error, from the spread of the random vectors; 0 by Cholesky,
            nan where there is one vector only.
        n_iter_: iterations for ``alpha_``; 1 by Cholesky.
        residual_: the largest relative residual of ``alpha_``; 0 by Cholesky.
        n_features_in_, feature_names_in_: of the training data.

    Example:
        >>> from sklearn.gaussian_process.kernels import RBF, WhiteKernel
        >>> X = np.linspace(0, 6, 30)[:, None]
        >>> model = GaussianProcessRegressor(RBF() + WhiteKernel(0.1)).fit(X, np.sin(X[:, 0]))
        >>> model.predict([[1.5]]).round(2)
        array([1.])
    """

    _rules = {
        **GaussianProcess._rules,
        "normalize_y": OneOf((True, False)),
        "n_targets": Within(1, kind=Integral, or_none=True),
    }

    def __init__(
        self,
        kernel=None,
        *,
        alpha=1e-10,
        optimizer="fmin_l_bfgs_b",
        n_restarts_optimizer=0,
        normalize_y=False,
        copy_X_train=True,
        n_targets=None,
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
        self.alpha = alpha
        self.optimizer = optimizer
        self.n_restarts_optimizer = n_restarts_optimizer
        self.normalize_y = normalize_y
        self.copy_X_train = copy_X_train
        self.n_targets = n_targets
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

    # --- fitting --------------------------------------------------------------------------------------------------
    @with_callbacks
    def fit(self, X, y):
        """Optimize the kernel's parameters, and solve for the weights.

        Args:
            X: samples (n_samples, n_features).
            y: targets (n_samples,) or (n_samples, n_targets).
        """
        check_parameters(self, self._rules)
        X, y = validate_data(self, X, y, dtype=FLOATS, order="C", multi_output=True, y_numeric=True)
        count = y.shape[1] if y.ndim > 1 else 1
        if self.n_targets is not None and count != self.n_targets:
            raise ValueError(
                f"n_targets is {self.n_targets}, but y has {count} target(s): n_targets must be None or that"
            )
        forget(self, "alpha_", "L_")
        self.kernel_, self._noise = self._given_kernel(), self._given_noise(len(X))
        given, y = y, y.astype(np.float64)
        self._y_mean, self._y_scale = np.zeros(y.shape[1:]), np.ones(y.shape[1:])
        if self.normalize_y:
            self._y_mean, scale = y.mean(axis=0), y.std(axis=0)
            self._y_scale = np.where(scale > 10 * np.finfo(np.float64).eps * np.abs(self._y_mean), scale, 1.0)
            y = (y - self._y_mean) / self._y_scale
        self.X_train_ = np.copy(X) if self.copy_X_train else X
        self.y_train_ = y
        random = check_random_state(self.random_state)
        starts = self._starts(random)  # first, so that they are those of scikit-learn
        self._seed, self._short = int(random.randint(2**31 - 1)), 0
        self._learn(starts, X, given)
        return self

    def _default_kernel(self) -> Any:
        return ConstantKernel() * RBF()

    def _given_noise(self, n: int) -> np.ndarray:
        """``alpha``, of shape (1,) or (n,)."""
        alpha = numbers("alpha", self.alpha, np.float64)
        if alpha.shape not in ((1,), (n,)):
            raise ValueError(f"alpha must be a number or one for each of {n} samples; got shape {alpha.shape}")
        if not ((alpha >= 0) & np.isfinite(alpha)).all():
            raise ValueError(f"alpha must be a number >= 0 or an array of such; got {self.alpha!r}")
        return alpha

    def _finish(self) -> str:
        """``alpha_``, and by Cholesky ``L_``."""
        operator, targets = self._system()
        if self._dense:
            factor, report = factorize(operator)
            weights = torch.cholesky_solve(targets, factor)
            self.L_, self.n_iter_, self.residual_ = array(factor), 1, 0.0
        else:
            with without_warnings():
                weights, report = operator.solve(targets, return_report=True, **self._settings(operator))
            self.n_iter_, self.residual_ = max(1, report.iterations), float(report.residual.max())
            if not report.converged:
                warnings.warn(
                    f"GaussianProcessRegressor stopped after {self.n_iter_} iterations at a relative residual of "
                    f"{self.residual_:.1e}, above tol={self.tol:g}: {report.reason}. A larger alpha, tol, rank or "
                    "max_iter helps, or float64",
                    ConvergenceWarning,
                    stacklevel=6,
                )
        self.alpha_ = array(weights).reshape(self.y_train_.shape)
        return note_of(report)

    # --- the likelihood -------------------------------------------------------------------------------------------
    def _system(self, theta: Tensor | None = None) -> tuple[KernelOperator, Tensor]:
        """The matrix with its noise, and the targets."""
        n = len(self.X_train_)
        x, y, noise = self._points(self.X_train_, self.y_train_.reshape(n, -1), self._noise)
        kernel = from_sklearn(self.kernel_, None if theta is None else theta.to(x))
        return KernelOperator(kernel, x).add_diagonal(noise), y

    def _evaluate(self, theta: np.ndarray, eval_gradient: bool) -> Evaluation:
        parameters = torch.tensor(theta, dtype=torch.float64, requires_grad=eval_gradient)
        n, count = len(self.X_train_), self.y_train_.size // len(self.X_train_)
        try:
            operator, y = self._system(parameters)
            fit, logdet, report = operator.inv_quad_logdet(
                y, n_probes=self.n_probes, n_short=self._short, seed=self._seed, return_report=True,
                **self._settings(operator, likelihood=True),
            )  # fmt: skip
            self._short = max(self._short, report.n_short)
        except NotPositiveDefiniteError as error:
            return Evaluation(-np.inf, np.zeros_like(theta), note=str(error))
        value = -0.5 * (fit.double() + count * logdet.double() + count * n * np.log(2 * np.pi))
        found = Evaluation(float(value.detach()), None, count * error_of(report), note_of(report), report)
        if not eval_gradient:
            return found
        (gradient,) = torch.autograd.grad(value, parameters) if len(theta) else (torch.zeros(0),)
        return found._replace(gradient=array(gradient).astype(np.float64))

    # --- predicting -----------------------------------------------------------------------------------------------
    def predict(self, X, return_std=False, return_cov=False):
        """The mean at each query, and on request its standard deviation or the covariance of all queries.

        Before ``fit``, those of the prior.

        Args:
            X: queries (n_queries, n_features).
            return_std: return the standard deviations, (n_queries,) or (n_queries, n_targets), too.
            return_cov: return the covariance, (n_queries, n_queries) or (n_queries, n_queries, n_targets), too.
        """
        if return_std and return_cov:
            raise RuntimeError("At most one of return_std or return_cov can be requested.")
        X = validate_data(self, X, dtype=FLOATS, order="C", reset=False)
        if not hasattr(self, "X_train_"):
            return self._predict_prior(X, return_std, return_cov)
        check_is_fitted(self, "alpha_")  # an attempt to fit it may have failed
        n = len(self.X_train_)
        x, fit, weights = self._points(X, self.X_train_, self.alpha_.reshape(n, -1))
        kernel = from_sklearn(self.kernel_)
        across = KernelOperator(kernel, x, fit)
        mean = array(across @ weights).astype(X.dtype).reshape(len(X), *self.y_train_.shape[1:])
        mean = (mean * self._y_scale + self._y_mean).astype(X.dtype)
        mean = mean[:, 0] if mean.ndim > 1 and mean.shape[1] == 1 else mean
        if not (return_cov or return_std):
            return mean
        own, inverse = KernelOperator(kernel, x), self._inverse(len(x))
        if return_cov:
            both = self._spread(covariance(own, across, inverse)).astype(X.dtype)
            inverse.warn("GaussianProcessRegressor.predict")
            return mean, both
        squares = self._spread(variance(own, across, inverse))
        inverse.warn("GaussianProcessRegressor.predict")
        if (squares < 0).any():
            warnings.warn("Predicted variances smaller than 0. Setting those variances to 0.", stacklevel=2)
        return mean, np.sqrt(np.maximum(squares, 0)).astype(X.dtype)

    def _inverse(self, queries: int) -> Dense | Iterative:
        if self._dense:
            return Dense(self.L_)
        operator, _ = self._system()
        return Iterative(operator, self._preconditioner(operator, queries), float(self.tol), self.max_iter)

    def _predict_prior(self, X: np.ndarray, return_std: bool, return_cov: bool) -> Any:
        kernel, count = self._given_kernel(), self.n_targets or 1
        mean = np.zeros((len(X), count)[: 1 if count == 1 else 2])
        if not (return_std or return_cov):
            return mean
        spread = kernel(X) if return_cov else np.sqrt(kernel.diag(X))
        return mean, (spread if count == 1 else np.repeat(spread[..., None], count, -1))

    def _spread(self, variance: np.ndarray) -> np.ndarray:
        """A variance of normalized targets as that of each target."""
        scale = np.atleast_1d(self._y_scale) ** 2
        out = variance.reshape(*variance.shape, 1) * scale
        return out[..., 0] if out.shape[-1] == 1 else out

    def sample_y(self, X, n_samples=1, random_state=0):
        """Samples of the process at the queries, (n_queries, n_samples) or (n_queries, n_targets, n_samples).

        The covariance of the queries is stored.
        """
        random = check_random_state(random_state)
        mean, covariance = self.predict(X, return_cov=True)
        if mean.ndim == 1:
            return random.multivariate_normal(mean, covariance, n_samples).T
        each = (
            random.multivariate_normal(mean[:, k], covariance[..., k], n_samples).T[:, None]
            for k in range(mean.shape[1])
        )
        return np.hstack(list(each))

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.requires_fit = False
        return tags
