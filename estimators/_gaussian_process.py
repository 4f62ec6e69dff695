"""Gaussian process regression with scikit-learn's kernels, by Cholesky's decomposition or by conjugate gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from numbers import Integral
from typing import Any

import numpy as np
import torch
from scipy import linalg, optimize
from sklearn.base import BaseEstimator, MultiOutputMixin, RegressorMixin, clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, Kernel
from sklearn.utils import check_random_state
from sklearn.utils.optimize import _check_optimize_result
from sklearn.utils.validation import validate_data

from ..kernels import from_sklearn
from ..operators import ConvergenceWarning as ResidualWarning
from ..operators import KernelOperator, NotPositiveDefiniteError, NumericalWarning
from ..operators.solving import PRECONDITIONERS, SMALL, factorize
from ._base import FLOATS, OneOf, Within, array, check_parameters, tensors

Tensor = torch.Tensor

#: Queries whose variances are computed at once.
QUERIES = 128


@contextmanager
def _final_warnings_only() -> Iterator[None]:
    """Without the solvers' warnings: what holds at the end of ``fit`` is said at its end."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumericalWarning)
        warnings.simplefilter("ignore", ResidualWarning)
        yield


class GaussianProcessRegressor(MultiOutputMixin, RegressorMixin, BaseEstimator):
    """Gaussian process regression, as ``sklearn.gaussian_process.GaussianProcessRegressor``, beyond a dense matrix.

    Up to 2,000 samples everything is exact, by Cholesky's decomposition. Above, systems are solved by preconditioned
    conjugate gradients in memory that grows with the samples only, and the log-determinant of the likelihood and its
    gradient are estimated (``LinearOperator.inv_quad_logdet``).

    Args:
        kernel: a kernel object of ``sklearn.gaussian_process.kernels``; None for ``1.0 * RBF(1.0)`` with both numbers
            fixed.
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
        preconditioner: ``"auto"``, ``"pivoted_cholesky"``, ``"nystrom"`` or None.
        n_probes: random vectors that a log-determinant is estimated from.

    Attributes:
        X_train_, y_train_: the training data, the targets as they were normalized.
        kernel_: the kernel with its optimized parameters.
        alpha_: weights (n_samples,) or (n_samples, n_targets) of the kernels around the training samples.
        L_: by Cholesky, the factor (n_samples, n_samples).
        log_marginal_likelihood_value_: at ``kernel_.theta``.
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
        "optimizer": OneOf(("fmin_l_bfgs_b", None), functions=True),
        "n_restarts_optimizer": Within(0, kind=Integral),
        "normalize_y": OneOf((True, False)),
        "copy_X_train": OneOf((True, False)),
        "n_targets": Within(1, kind=Integral, or_none=True),
        "dtype": OneOf(("auto", "float32", "float64")),
        "solver": OneOf(("auto", "cholesky", "cg")),
        "tol": Within(0, closed=False),
        "max_iter": Within(1, kind=Integral, or_none=True),
        "preconditioner": OneOf(("auto", None, *PRECONDITIONERS)),
        "n_probes": Within(1, kind=Integral),
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
        n_probes=10,
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
        self.n_probes = n_probes

    # --- fitting --------------------------------------------------------------------------------------------------
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
        self.kernel_ = self._given_kernel()
        self._noise(len(X))
        y = y.astype(np.float64)
        self._y_mean, self._y_scale = np.zeros(y.shape[1:]), np.ones(y.shape[1:])
        if self.normalize_y:
            self._y_mean, scale = y.mean(axis=0), y.std(axis=0)
            self._y_scale = np.where(scale > 10 * np.finfo(np.float64).eps * np.abs(self._y_mean), scale, 1.0)
            y = (y - self._y_mean) / self._y_scale
        self.X_train_ = np.copy(X) if self.copy_X_train else X
        self.y_train_ = y
        random = check_random_state(self.random_state)
        optimized = self.optimizer is not None and self.kernel_.n_dims > 0
        starts = self._starts(random) if optimized else []  # first, so that they are those of scikit-learn
        self._seed = int(random.randint(2**31 - 1))
        if optimized:
            self._optimize(starts)
        else:
            with _final_warnings_only():
                self.log_marginal_likelihood_value_ = self._likelihood(self.kernel_.theta)
        self._solve()
        return self

    def _given_kernel(self) -> Any:
        if self.kernel is None:
            return ConstantKernel(1.0, constant_value_bounds="fixed") * RBF(1.0, length_scale_bounds="fixed")
        if not isinstance(self.kernel, Kernel):
            raise TypeError(
                f"kernel must be a kernel of sklearn.gaussian_process.kernels, or None; got {self.kernel!r}"
            )
        return clone(self.kernel)

    def _noise(self, n: int) -> np.ndarray:
        """``alpha``, of shape (1,) or (n,)."""
        alpha = np.atleast_1d(np.asarray(self.alpha, dtype=np.float64))
        if alpha.shape not in ((1,), (n,)):
            raise ValueError(f"alpha must be a number or one for each of {n} samples; got shape {alpha.shape}")
        if not (alpha >= 0).all():
            raise ValueError(f"alpha must be a number >= 0 or an array of such; got {self.alpha!r}")
        return alpha

    def _starts(self, random: np.random.RandomState) -> list[np.ndarray]:
        bounds = self.kernel_.bounds
        if self.n_restarts_optimizer and not np.isfinite(bounds).all():
            raise ValueError("n_restarts_optimizer > 0 needs finite bounds of all parameters of the kernel")
        return [self.kernel_.theta, *(random.uniform(*bounds.T) for _ in range(self.n_restarts_optimizer))]

    def _optimize(self, starts: list[np.ndarray]) -> None:
        found = [self._minimize(start, self.kernel_.bounds) for start in starts]
        theta, value = min(found, key=lambda pair: pair[1])
        self.kernel_.theta = theta
        self.kernel_._check_bounds_params()
        self.log_marginal_likelihood_value_ = -float(value)

    def _minimize(self, start: np.ndarray, bounds: np.ndarray) -> tuple[np.ndarray, float]:
        def objective(theta: np.ndarray, eval_gradient: bool = True) -> Any:
            if not eval_gradient:
                return -self._likelihood(theta)
            value, gradient = self._likelihood(theta, True)
            return -value, -gradient

        with _final_warnings_only():
            if callable(self.optimizer):
                return self.optimizer(objective, start, bounds=bounds)
            result = optimize.minimize(objective, start, method="L-BFGS-B", jac=True, bounds=bounds)
        if self._dense or result.status != 2:  # a line search ends where the noise of an estimate begins
            _check_optimize_result("lbfgs", result)
        return result.x, float(result.fun)

    def _solve(self) -> None:
        """``alpha_``, and by Cholesky ``L_``."""
        operator, targets = self._system()
        if self._dense:
            factor, _ = factorize(operator)
            weights = torch.cholesky_solve(targets, factor)
            self.L_, self.n_iter_, self.residual_ = array(factor), 1, 0.0
        else:
            with _final_warnings_only():
                weights, report = operator.solve(targets, return_report=True, **self._settings())
            self.n_iter_, self.residual_ = max(1, report.iterations), float(report.residual.max())
            if not report.converged:
                warnings.warn(
                    f"GaussianProcessRegressor stopped after {self.n_iter_} iterations at a relative residual of "
                    f"{self.residual_:.1e}, above tol={self.tol:g}: {report.reason}. A larger alpha, tol or max_iter "
                    "helps, or float64",
                    ConvergenceWarning,
                    stacklevel=3,
                )
        self.alpha_ = array(weights).reshape(self.y_train_.shape)

    # --- the system -----------------------------------------------------------------------------------------------
    @property
    def _dense(self) -> bool:
        return self.solver == "cholesky" or (self.solver == "auto" and len(self.X_train_) <= SMALL)

    def _points(self, *arrays: np.ndarray) -> tuple[Tensor, ...]:
        """Arrays on the device, in the dtype that is computed in."""
        auto = np.float64 if self._dense else self.X_train_.dtype
        dtype = auto if self.dtype == "auto" else self.dtype
        return tensors(self.device, *(a.astype(dtype, copy=False) for a in arrays))

    def _settings(self) -> dict[str, Any]:
        return {
            "method": "cholesky" if self._dense else "cg",
            "tol": float(self.tol),
            "max_iter": self.max_iter,
            "preconditioner": self.preconditioner,
        }

    def _system(self, theta: Tensor | None = None) -> tuple[KernelOperator, Tensor]:
        """The matrix with its noise, and the targets."""
        n = len(self.X_train_)
        x, y, noise = self._points(self.X_train_, self.y_train_.reshape(n, -1), self._noise(n))
        kernel = from_sklearn(self.kernel_, None if theta is None else theta.to(x))
        return KernelOperator(kernel, x).add_diagonal(noise), y

    def _likelihood(self, theta: np.ndarray, eval_gradient: bool = False) -> Any:
        parameters = torch.tensor(theta, dtype=torch.float64, requires_grad=eval_gradient)
        n, count = len(self.X_train_), self.y_train_.size // len(self.X_train_)
        try:
            operator, y = self._system(parameters)
            fit, logdet = operator.inv_quad_logdet(y, n_probes=self.n_probes, seed=self._seed, **self._settings())
        except NotPositiveDefiniteError:
            return (-np.inf, np.zeros_like(theta)) if eval_gradient else -np.inf
        value = -0.5 * (fit.double() + count * logdet.double() + count * n * np.log(2 * np.pi))
        if not eval_gradient:
            return float(value.detach())
        (gradient,) = torch.autograd.grad(value, parameters) if len(theta) else (torch.zeros(0),)
        return float(value.detach()), array(gradient).astype(np.float64)

    def log_marginal_likelihood(self, theta=None, eval_gradient=False, clone_kernel=True):
        """The logarithm of the probability of the training targets, summed over targets.

        Args:
            theta: logarithms of the kernel's parameters; None for those that ``fit`` found.
            eval_gradient: whether to return the gradient by theta, too.
            clone_kernel: False to give ``kernel_`` this theta.

        Returns:
            The value, or the value and its gradient.
        """
        if theta is None:
            if eval_gradient:
                raise ValueError("a gradient needs a theta to be evaluated at; got theta=None")
            return self.log_marginal_likelihood_value_
        theta = np.asarray(theta, dtype=np.float64)
        if not clone_kernel:
            self.kernel_.theta = theta
        return self._likelihood(theta, eval_gradient)

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
        n = len(self.X_train_)
        x, fit, weights = self._points(X, self.X_train_, self.alpha_.reshape(n, -1))
        kernel = from_sklearn(self.kernel_)
        across = KernelOperator(kernel, x, fit)
        mean = array(across @ weights).astype(X.dtype).reshape(len(X), *self.y_train_.shape[1:])
        mean = (mean * self._y_scale + self._y_mean).astype(X.dtype)
        mean = mean[:, 0] if mean.ndim > 1 and mean.shape[1] == 1 else mean
        if return_cov:
            return mean, self._spread(self._covariance(KernelOperator(kernel, x), across), 2).astype(X.dtype)
        if return_std:
            variance = self._spread(self._variance(KernelOperator(kernel, x), across), 1)
            if (variance < 0).any():
                warnings.warn("Predicted variances smaller than 0. Setting those variances to 0.", stacklevel=2)
            return mean, np.sqrt(np.maximum(variance, 0)).astype(X.dtype)
        return mean

    def _predict_prior(self, X: np.ndarray, return_std: bool, return_cov: bool) -> Any:
        kernel, count = self._given_kernel(), self.n_targets or 1
        mean = np.zeros((len(X), count)[: 1 if count == 1 else 2])
        if not (return_std or return_cov):
            return mean
        spread = kernel(X) if return_cov else np.sqrt(kernel.diag(X))
        return mean, (spread if count == 1 else np.repeat(spread[..., None], count, -1))

    def _spread(self, variance: np.ndarray, axes: int) -> np.ndarray:
        """A variance of normalized targets as that of each target."""
        scale = np.atleast_1d(self._y_scale) ** 2
        out = variance.reshape(*variance.shape, 1) * scale
        return out[..., 0] if out.shape[-1] == 1 else out

    def _parts(
        self, across: KernelOperator, tol: float
    ) -> Iterator[tuple[slice, np.ndarray, Callable[[np.ndarray], np.ndarray]]]:
        """A few queries at a time: which, their columns K(fit, x), and the function v -> A⁻¹ v, to ``tol``."""
        operator = None if self._dense else self._system()[0]
        settings = {**self._settings(), "tol": tol}
        if operator is not None:
            kind = () if self.preconditioner == "auto" else (self.preconditioner,)
            settings["preconditioner"] = self.preconditioner and operator.preconditioner(*kind)

        def solve(columns: np.ndarray) -> np.ndarray:
            if operator is None:
                return linalg.cho_solve((self.L_, True), columns)
            (b,) = self._points(columns)
            return array(operator.solve(b, **settings))

        for start in range(0, across.shape[0], QUERIES):
            rows = slice(start, start + QUERIES)
            yield rows, array(across[rows, :].to_dense()).T, solve

    def _variance(self, own: KernelOperator, across: KernelOperator) -> np.ndarray:
        variance = array(own.diagonal()).astype(np.float64)
        # The error of a quadratic form is that of the residual squared; what it is taken from is not much larger.
        for rows, columns, solve in self._parts(across, 0.1 * float(self.tol) ** 0.5):
            variance[rows] -= (columns * solve(columns)).sum(axis=0)
        return variance

    def _covariance(self, own: KernelOperator, across: KernelOperator) -> np.ndarray:
        covariance = array(own.to_dense()).astype(np.float64)
        for rows, columns, solve in self._parts(across, float(self.tol)):
            solved = solve(columns)
            (s,) = self._points(solved)
            covariance[:, rows] -= array(across @ s)
        return (covariance + covariance.T) / 2

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
