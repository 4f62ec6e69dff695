"""Gaussian process classification by Laplace's approximation, of two classes or more."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import numpy as np
from sklearn.base import ClassifierMixin, clone
from sklearn.gaussian_process.kernels import CompoundKernel
from sklearn.multiclass import OneVsOneClassifier, OneVsRestClassifier
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from ._base import FLOATS, OneOf, Within, check_parameters, forget
from ._binary_classifier import BinaryClassifier
from ._gaussian_process_base import GaussianProcess


class GaussianProcessClassifier(ClassifierMixin, GaussianProcess):
    """Gaussian process classification, as ``sklearn.gaussian_process.GaussianProcessClassifier``, of many samples.

    The posterior of the latent function is approximated by a normal distribution at its mode (Laplace's approximation;
    Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, algorithms 3.1, 3.2 and 5.1). Up to 2,000
    samples everything is exact, by Cholesky's decomposition. Above, Newton's method solves its systems by
    preconditioned conjugate gradients in memory that grows with the samples only, and the determinant in the likelihood
    and its gradient, that by the mode included, are estimated from random vectors.

    Args:
        kernel: a kernel object of ``sklearn.gaussian_process.kernels``; None for ``1.0 * RBF(1.0)`` with both numbers
            fixed.
        optimizer: ``"fmin_l_bfgs_b"``, a function ``optimizer(objective, theta, bounds)`` that returns the best theta
            and its value, or None to keep the kernel as it is.
        n_restarts_optimizer: how often the optimizer starts again, from a theta drawn within the bounds.
        max_iter_predict: most steps of Newton's method.
        warm_start: whether Newton's method starts at the mode that it found last.
        copy_X_train: whether the training data are copied.
        random_state: of restarts, and of the random vectors.
        multi_class: for more than two classes, ``"one_vs_rest"``, or ``"one_vs_one"``, which has no probabilities.
        n_jobs: how many of these problems are solved at once, by joblib; None for one after the other, each with all of
            torch's threads, which is best on a GPU.
        device: ``"auto"`` (a GPU where there is one), ``"cpu"``, ``"cuda"`` or another torch device.
        dtype: ``"float32"``, ``"float64"``, or ``"auto"``: float64 by Cholesky, the data's by conjugate gradients.
        solver: ``"cholesky"``, ``"cg"``, or ``"auto"``: Cholesky up to 2,000 samples.
        tol: residual, relative to the gradient of the labels' likelihood, at which Newton's method by conjugate
            gradients stops, and that of other systems.
        max_iter: most iterations of conjugate gradients in one solution; None leaves it to the solver.
        preconditioner: ``"auto"``, ``"pivoted_cholesky"``, ``"nystrom"``, ``"cholesky"`` or None, as for
            ``GaussianProcessRegressor``.
        rank: of the preconditioner; None for 100, or 1.5·10⁶/n_samples where that is more.
        n_probes: random vectors that a determinant is estimated from.
        verbose: 1 for a progress bar where tqdm is installed, and a line for each evaluation of the likelihood where it
            is not; 2 for the lines; to stderr. ``set_callbacks`` is there with scikit-learn 1.9 and later.

    Attributes:
        classes_, n_classes_: the labels.
        base_estimator_: the classifier of two classes, or scikit-learn's ``OneVsRestClassifier`` or
            ``OneVsOneClassifier`` with such ones in ``estimators_``. One has ``kernel_``, ``X_train_``, ``y_train_``,
            ``pi_`` and ``W_sr_``, (n_samples,), ``log_marginal_likelihood_error_`` (the estimate's standard error; nan
            for one random vector), and by Cholesky ``L_``.
        kernel_: the kernel with its optimized parameters; a ``CompoundKernel`` for more than two classes.
        log_marginal_likelihood_value_: at ``kernel_.theta``; the mean for more than two classes.
        n_iter_: steps of Newton's method, the most of all problems.
        residual_: what was left of the gradient, relative to that of the labels' likelihood, the largest of all.
        n_features_in_, feature_names_in_: of the training data.

    Example:
        >>> from sklearn.datasets import load_iris
        >>> from sklearn.gaussian_process.kernels import RBF
        >>> X, y = load_iris(return_X_y=True)
        >>> model = GaussianProcessClassifier(1.0 * RBF(1.0), random_state=0).fit(X, y)
        >>> model.predict_proba(X[:1]).round(2)
        array([[0.84, 0.03, 0.13]])
    """

    _rules = {
        **GaussianProcess._rules,
        "max_iter_predict": Within(1, kind=Integral),
        "warm_start": OneOf((True, False)),
        "multi_class": OneOf(("one_vs_rest", "one_vs_one")),
    }

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
        multi_class="one_vs_rest",
        n_jobs=None,
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
        self.multi_class = multi_class
        self.n_jobs = n_jobs
        self.device = device
        self.dtype = dtype
        self.solver = solver
        self.tol = tol
        self.max_iter = max_iter
        self.preconditioner = preconditioner
        self.rank = rank
        self.n_probes = n_probes
        self.verbose = verbose

    def fit(self, X, y):
        """Optimize the kernels' parameters, and find the posteriors' modes.

        Args:
            X: samples (n_samples, n_features).
            y: labels (n_samples,), of two classes or more.
        """
        check_parameters(self, self._rules)
        X, y = validate_data(self, X, y, dtype=FLOATS, order="C")
        check_classification_targets(y)
        self._given_kernel()
        self.classes_ = np.unique(y)
        self.n_classes_ = len(self.classes_)
        if self.n_classes_ == 1:
            raise ValueError(
                f"GaussianProcessClassifier needs samples of two classes or more; got 1 class: {self.classes_[0]}"
            )
        forget(self, "base_estimator_")
        made: Any = self._binary()
        if self.n_classes_ > 2:
            X = np.copy(X) if self.copy_X_train else X  # once for all
            kind = OneVsRestClassifier if self.multi_class == "one_vs_rest" else OneVsOneClassifier
            made = kind(made.set_params(copy_X_train=False), n_jobs=self.n_jobs)
        self.base_estimator_ = made.fit(X, y)
        each = self._estimators()
        self.log_marginal_likelihood_value_ = float(np.mean([e.log_marginal_likelihood_value_ for e in each]))
        self.n_iter_, self.residual_ = max(e.n_iter_ for e in each), max(e.residual_ for e in each)
        return self

    def _binary(self) -> BinaryClassifier:
        own = self.get_params(deep=False)
        binary = BinaryClassifier(
            **{k: clone(v, safe=False) for k, v in own.items() if k not in ("multi_class", "n_jobs")}
        )
        if hasattr(self, "_skl_callbacks"):
            binary.set_callbacks(*self._skl_callbacks)
        return binary

    def _estimators(self) -> list[BinaryClassifier]:
        return [self.base_estimator_] if self.n_classes_ == 2 else list(self.base_estimator_.estimators_)

    @property
    def kernel_(self):
        """The kernel with its optimized parameters; a ``CompoundKernel`` for more than two classes."""
        kernels = [each.kernel_ for each in self._estimators()]
        return kernels[0] if self.n_classes_ == 2 else CompoundKernel(kernels)

    def _queries(self, X: Any) -> np.ndarray:
        """Queries, checked; and what was changed of the parameters of predictions since ``fit``, such as the device."""
        check_is_fitted(self, "base_estimator_")
        own = {name: getattr(self, name) for name in ("device", "tol", "max_iter", "preconditioner", "rank")}
        for each in self._estimators():
            each.set_params(**own)
        return validate_data(self, X, dtype=FLOATS, order="C", reset=False)

    def predict(self, X):
        """The likeliest class of each query (n_queries, n_features)."""
        X = self._queries(X)
        return self.base_estimator_.predict(X)

    def predict_proba(self, X):
        """The probabilities of the classes, (n_queries, n_classes) in the order of ``classes_``.

        Raises:
            ValueError: there are more than two classes, and ``multi_class`` is ``"one_vs_one"``.
        """
        X = self._queries(X)
        if self.n_classes_ > 2 and self.multi_class == "one_vs_one":
            raise ValueError("multi_class='one_vs_one' has no probabilities; 'one_vs_rest' has")
        return self.base_estimator_.predict_proba(X)

    def latent_mean_and_variance(self, X):
        """The latent function's mean and variance at each query, (n_queries,) each; for two classes only."""
        X = self._queries(X)
        if self.n_classes_ > 2:
            raise ValueError(f"the latent function is one of two classes only; got {self.n_classes_} classes")
        return self.base_estimator_.latent_mean_and_variance(X)

    def log_marginal_likelihood(self, theta=None, eval_gradient=False, clone_kernel=True):
        """The logarithm of the labels' approximate probability; for more than two classes, the mean over the problems.

        Args:
            theta: logarithms of the kernel's parameters; for more than two classes also those of all kernels, one after
                the other. None for those that ``fit`` found.
            eval_gradient: whether to return the gradient by theta, too; for two classes only.
            clone_kernel: False to give ``kernel_`` this theta.

        Returns:
            The value, or the value and its gradient.
        """
        check_is_fitted(self, "base_estimator_")
        if theta is None:
            if eval_gradient:
                raise ValueError("a gradient needs a theta to be evaluated at; got theta=None")
            return self.log_marginal_likelihood_value_
        each = self._estimators()
        if self.n_classes_ == 2:
            return each[0].log_marginal_likelihood(theta, eval_gradient, clone_kernel)
        if eval_gradient:
            raise NotImplementedError("the gradient is there for two classes only")
        theta = np.asarray(theta, dtype=np.float64)
        count = each[0].kernel_.n_dims
        if len(theta) not in (count, count * len(each)):
            raise ValueError(f"theta must have {count} or {count * len(each)} entries; got {len(theta)}")
        parts = np.broadcast_to(theta.reshape(-1, count) if count else theta, (len(each), count))
        found = [e.log_marginal_likelihood(t, clone_kernel=clone_kernel) for e, t in zip(each, parts)]
        return float(np.mean(found))
