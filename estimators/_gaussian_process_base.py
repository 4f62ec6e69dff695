"""What the Gaussian process estimators share: parameters, the search for the kernel's, and the way to operators."""

from __future__ import annotations

import copy
import warnings
from contextlib import suppress
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import optimize
from sklearn.base import BaseEstimator, clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, Kernel, PairwiseKernel
from sklearn.utils.optimize import _check_optimize_result

from ..kernels import from_sklearn
from ..operators import LinearOperator, NumericalWarning, OutOfMemoryError, Preconditioner, Report
from ..operators.choice import RANK
from ..operators.preconditioning import PRECONDITIONERS
from ..operators.solving import SMALL
from ..solvers import memory_for
from ..solvers.problems import size_of, without_warnings
from ._base import OneOf, Within, check_features, tensors
from ._progress import VERBOSE, CallbackSupportMixin, Progress, Stopped

Tensor = torch.Tensor


class Evaluation(NamedTuple):
    """A likelihood.

    Attributes:
        value: its logarithm.
        gradient: by the logarithms of the kernel's parameters, if asked for.
        error: standard error of the value; 0 where it is exact, nan where it is not known.
        note: how it was computed, in words.
        report: of the solver; None where there is none.
    """

    value: float
    gradient: np.ndarray | None = None
    error: float = 0.0
    note: str = ""
    report: Report | None = None

    def __str__(self) -> str:
        slope = "" if self.gradient is None else f", gradient {np.abs(self.gradient).max(initial=0.0):.1e}"
        error = f" ± {self.error:.1g}" if self.error > 0 else ""
        return f"{self.value:.7g}{error}{slope}{self.note and ', '}{self.note}"


def note_of(report: Report) -> str:
    """What a solver did, in words."""
    if report.method == "cholesky":
        return "Cholesky" + (f" with {report.jitter:.1e} on the diagonal" if report.jitter else "")
    worst = 0.0 if report.residual is None or not report.residual.numel() else float(report.residual.max())
    stored = f"Cholesky's factor ({size_of(report.nbytes)})"
    way = f"with {stored}" if report.preconditioner == "cholesky" else f"at rank {report.rank}"
    return f"{report.iterations} iterations {way} to a residual of {worst:.1e}"


def _slope(theta: np.ndarray, gradient: np.ndarray, bounds: np.ndarray) -> float:
    """The largest entry of an objective's gradient, without those that lead out of the bounds."""
    low, high = bounds.T
    inside = ((gradient > 0) & (theta > low)) | ((gradient < 0) & (theta < high))
    return float(np.abs(gradient[inside]).max(initial=0.0))


def _slope_of_noise(found: Evaluation) -> float:
    """A gradient that is within an estimate's noise.

    A tenth of it, the gain from changing a parameter by a tenth, is within three standard errors of the likelihood,
    or too little to matter: a tenth in the logarithm of a probability, or 10⁻⁴ of it.
    """
    known = found.error if np.isfinite(found.error) else 0.0
    return max(30 * known, 1.0, 1e-3 * abs(found.value))


def _best_of(found: Any, start: np.ndarray) -> tuple[np.ndarray, float]:
    """What an optimizer of the user's returned, if it is a theta and its value."""
    try:
        theta, value = found
        theta, value = np.asarray(theta, dtype=np.float64), float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"optimizer must return the best theta and its value; got {found!r}") from error
    if theta.shape != start.shape or not np.isfinite(theta).all():
        raise ValueError(f"optimizer must return a theta of {len(start)} finite numbers; got {theta}")
    return theta, value


def error_of(report: Report) -> float:
    """The standard error of half a log-determinant: 0 where it is exact, nan where one random vector has no spread."""
    if report.standard_error is None:
        return 0.0 if report.method == "cholesky" else float("nan")
    return 0.5 * float(report.standard_error)


class GaussianProcess(CallbackSupportMixin, BaseEstimator):
    """A process with one of scikit-learn's kernels, by Cholesky's decomposition or by conjugate gradients.

    A class that is derived from it has the parameters that ``_rules`` names, sets ``X_train_`` and ``kernel_``, and
    defines ``_evaluate`` and ``_finish``.
    """

    _dense: bool  # whether ``fit`` was by Cholesky's decomposition

    _rules: dict[str, Any] = {
        "optimizer": OneOf(("fmin_l_bfgs_b", None), functions=True),
        "n_restarts_optimizer": Within(0, kind=Integral),
        "copy_X_train": OneOf((True, False)),
        "dtype": OneOf(("auto", "float32", "float64")),
        "solver": OneOf(("auto", "cholesky", "cg")),
        "tol": Within(0, closed=False),
        "max_iter": Within(1, kind=Integral, or_none=True),
        "preconditioner": OneOf(("auto", None, *PRECONDITIONERS)),
        "rank": Within(1, kind=Integral, or_none=True),
        "n_probes": Within(1, kind=Integral),
        "verbose": VERBOSE,
    }

    def _evaluate(self, theta: np.ndarray, eval_gradient: bool) -> Evaluation:
        """The likelihood at logarithms of the kernel's parameters."""
        raise NotImplementedError

    def _likelihood(self, theta: np.ndarray, eval_gradient: bool) -> Evaluation:
        """``_evaluate``, whatever torch is told to do with gradients where ``fit`` is called."""
        with torch.inference_mode(False), torch.enable_grad():
            return self._evaluate(theta, eval_gradient)

    def _finish(self) -> str:
        """What predictions need is computed for ``kernel_``; returns how, in words."""
        raise NotImplementedError

    # --- the kernel -----------------------------------------------------------------------------------------------
    def _default_kernel(self) -> Any:
        """That of ``kernel=None``, as scikit-learn's."""
        return ConstantKernel(1.0, constant_value_bounds="fixed") * RBF(1.0, length_scale_bounds="fixed")

    def _given_kernel(self) -> Any:
        """A copy of ``kernel``, checked."""
        if self.kernel is None:
            return self._default_kernel()
        if not isinstance(self.kernel, Kernel):
            raise TypeError(
                f"kernel must be a kernel of sklearn.gaussian_process.kernels, or None; got {self.kernel!r}"
            )
        from_sklearn(self.kernel)  # raises for what has no translation, and for parameters out of their range
        return clone(self.kernel)

    def _starts(self, random: np.random.RandomState) -> list[np.ndarray]:
        """Where optimizers begin: at the kernel that was given, and at random ones."""
        if self.optimizer is None or self.kernel_.n_dims == 0:
            return []
        bounds = self.kernel_.bounds
        if self.n_restarts_optimizer and not np.isfinite(bounds).all():
            raise ValueError("n_restarts_optimizer > 0 needs finite bounds of all parameters of the kernel")
        return [self.kernel_.theta, *(random.uniform(*bounds.T) for _ in range(self.n_restarts_optimizer))]

    def _learn(self, starts: list[np.ndarray], X: np.ndarray, y: np.ndarray) -> None:
        """The best kernel, its likelihood, and what predictions need; by iteration where memory is too small."""
        for part in (self.kernel_, *self.kernel_.get_params().values()):
            if isinstance(part, PairwiseKernel):
                check_features(self.X_train_, part.metric)
        self._dense = self.solver == "cholesky" or (self.solver == "auto" and len(self.X_train_) <= SMALL)
        with Progress(self, X, y) as progress:
            try:
                with self._memory():
                    return self._search(starts, progress)
            except OutOfMemoryError as error:
                if self.solver != "auto" or not self._dense:
                    raise
                warnings.warn(f"{error}; they are used", NumericalWarning, stacklevel=4)
            self._dense = False
            with self._memory():
                self._search(starts, progress)

    def _memory(self) -> Any:
        """Explains a run out of memory within."""
        (few,) = self._points(self.X_train_[:1])
        n, name = len(self.X_train_), getattr(self, "_title", type(self).__name__)
        if self._dense:
            advice = "Conjugate gradients (solver='cg') need memory for a few vectors only"
            return memory_for(f"{name} of {n} samples by Cholesky's decomposition", 4 * n * n, few, advice)
        columns = 8 * (self.n_probes + 1) + 4 * (self.rank or RANK)
        advice = "A smaller n_probes or rank, dtype='float32' or device='cpu' helps"
        return memory_for(f"{name} of {n} samples by conjugate gradients", n * columns, few, advice)

    def _search(self, starts: list[np.ndarray], progress: Progress) -> None:
        if starts:
            found = [self._minimize(start, self.kernel_.bounds, progress) for start in starts]
            theta, kept = min(found, key=lambda each: -each[1].value)
            self.kernel_.theta = theta
            self.kernel_._check_bounds_params()
        else:
            progress.begin("likelihood")
            with without_warnings():
                kept = self._likelihood(self.kernel_.theta, False)
            self._told(progress, self.kernel_.theta, kept)
        self.log_marginal_likelihood_value_, self.log_marginal_likelihood_error_ = kept.value, kept.error
        progress.begin("solution")
        text = self._finish()
        self._warn_of(kept)
        with suppress(Stopped):
            progress.end(text, lambda: vars(self))

    def _warn_of(self, kept: Evaluation) -> None:
        """Warn of a likelihood that is no number, or whose systems were not solved."""
        if not np.isfinite(kept.value):
            warnings.warn(
                f"{getattr(self, '_title', type(self).__name__)}: the log marginal likelihood of the kernel is "
                f"{kept.value}, and none that was tried has a finite one: targets or features of another scale help",
                ConvergenceWarning,
                stacklevel=6,
            )
        report = kept.report
        if report is None or report.converged:
            return
        worst = float("nan") if report.residual is None else float(report.residual.max())
        warnings.warn(
            f"{getattr(self, '_title', type(self).__name__)}: the log marginal likelihood comes from systems that were "
            f"solved to a relative residual of {worst:.1e} only, above tol={self.tol:g}: {report.reason}. It, its "
            "gradient and the kernel that was found by them may be less accurate than log_marginal_likelihood_error_ "
            "says. A larger max_iter, rank, tol or noise helps, or float64",
            ConvergenceWarning,
            stacklevel=6,
        )

    def _minimize(self, start: np.ndarray, bounds: np.ndarray, progress: Progress) -> tuple[np.ndarray, Evaluation]:
        """The best parameters, and their likelihood."""
        best = start, Evaluation(-np.inf)
        seen: dict[bytes, Evaluation] = {}

        def objective(theta: np.ndarray, eval_gradient: bool = True) -> Any:
            nonlocal best
            progress.begin("likelihood")
            with without_warnings():  # what holds at the end of ``fit`` is said at its end
                found = self._likelihood(theta, eval_gradient)
            if not (np.isfinite(found.value) and np.isfinite(0.0 if found.gradient is None else found.gradient).all()):
                # An optimizer that is told so goes elsewhere, or ends; one that is told of NaN goes there.
                nothing = None if found.gradient is None else np.zeros_like(found.gradient)
                found = found._replace(value=-np.inf, gradient=nothing)
            seen[np.asarray(theta, dtype=np.float64).tobytes()] = found
            if found.value > best[1].value:
                best = np.array(theta), found
            if self._told(progress, theta, found):
                raise Stopped
            return -found.value if found.gradient is None else (-found.value, -found.gradient)

        def evaluated(theta: Any, value: Any) -> tuple[np.ndarray, Evaluation]:
            found = seen.get(np.asarray(theta, dtype=np.float64).tobytes(), best[1])
            return theta, found._replace(value=-float(value))

        try:
            if callable(self.optimizer):
                return evaluated(*_best_of(self.optimizer(objective, start, bounds=bounds), start))
            result = optimize.minimize(objective, start, method="L-BFGS-B", jac=True, bounds=bounds)
        except Stopped:
            return best
        theta, found = evaluated(result.x, result.fun)
        if self._dense or result.status != 2:  # a line search ends where the noise of an estimate begins
            _check_optimize_result("lbfgs", result)
        elif (slope := _slope(theta, result.jac, bounds)) > _slope_of_noise(found):
            warnings.warn(
                f"{getattr(self, '_title', type(self).__name__)}: the optimizer stopped in a line search where the "
                f"gradient is {slope:.1e} still: estimates of the likelihood and of its gradient do not agree. A "
                "higher rank, more n_probes or a smaller tol helps",
                ConvergenceWarning,
                stacklevel=6,
            )
        return theta, found

    def _told(self, progress: Progress, theta: np.ndarray, found: Evaluation) -> bool:
        """Report an evaluation; whether a callback asks for the end."""

        def fitted() -> dict[str, Any]:
            """The attributes of this estimator, were it fitted with this theta."""
            other = copy.copy(self)
            other.kernel_, other.log_marginal_likelihood_value_ = self.kernel_.clone_with_theta(theta), found.value
            with without_warnings():
                other._finish()
            return dict(vars(other))

        try:
            progress.end(str(found), fitted)
        except Stopped:
            return True
        return False

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
        found = self._likelihood(theta, eval_gradient)
        return (found.value, found.gradient) if eval_gradient else found.value

    # --- the system -----------------------------------------------------------------------------------------------
    def _points(self, *arrays: np.ndarray) -> tuple[Tensor, ...]:
        """Arrays on the device, in the dtype that is computed in."""
        auto = np.float64 if self._dense else self.X_train_.dtype
        dtype = auto if self.dtype == "auto" else self.dtype
        return tensors(self.device, *(a.astype(dtype, copy=False) for a in arrays))

    def _settings(
        self, operator: LinearOperator, kept: Preconditioner | None = None, likelihood: bool = False
    ) -> dict[str, Any]:  # fmt: skip
        """For ``solve`` and, if ``likelihood``, for ``inv_quad_logdet`` of an operator.

        With Cholesky's factor a determinant is exact, but its gradient by few random vectors is a poor one: a
        decomposition of low rank controls these.
        """
        if self._dense:
            return {"method": "cholesky"}
        if likelihood and self.preconditioner == "cholesky":
            kept = operator.preconditioner("pivoted_cholesky", self.rank)
        made = kept or self._preconditioner(operator)
        return {"method": "cg", "tol": float(self.tol), "max_iter": self.max_iter, "preconditioner": made}

    def _preconditioner(self, operator: LinearOperator, columns: int = 1) -> Preconditioner | None:
        """For so many right-hand sides, all in all."""
        if self.preconditioner is None:
            return None
        return operator.preconditioner(self.preconditioner, self.rank, columns=columns)
