"""Kernel ridge regression by conjugate gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from numbers import Integral

import numpy as np
import torch
from scipy import linalg
from sklearn.base import BaseEstimator, MultiOutputMixin, RegressorMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from ..backends import reduce
from ..backends.layout import pair_view
from ..backends.tiled import evaluate
from ..formula.graph import CAT_I, Node, topological
from ..formula.ops import mul
from ..formula.plan import make_plan
from ..kernels import KERNEL_NAMES, Kernel, Slots, as_kernel, complete, lookup
from ..kernels.kernel import check_length, parameter
from ..kernels.sklearn import is_sklearn
from ..solvers import NumericalWarning, OutOfMemoryError, conjugate_gradients, memory_for
from ._base import FLOATS, OneOf, Within, array, check_features, check_parameters, device_of, forget, numbers, tensors
from ._progress import VERBOSE, CallbackSupportMixin, Progress, Stopped, with_callbacks

#: Up to this many samples the table is small (32 MB) and Cholesky is both faster and more accurate than any iteration.
SMALL = 2000


class KernelRidge(MultiOutputMixin, RegressorMixin, CallbackSupportMixin, BaseEstimator):
    """Kernel ridge regression, as ``sklearn.kernel_ridge.KernelRidge``, in memory that grows with the samples only.

    Args:
        alpha: regularisation, a number or one for each target.
        kernel: a name of ``kernops.kernels.KERNELS``; a function of two LazyTensors that returns one, as
            ``lambda x, y: (-((x - y) ** 2).sum(-1)).exp()``; or a kernel object of ``kernops.kernels`` or of
            ``sklearn.gaussian_process.kernels``, whose noise, if it has any, is left out as by scikit-learn.
        gamma, degree, coef0: parameters of the kernels that have them.
        kernel_params: further parameters of a name or a function, such as ``{"length_scale": 2.0}``.
        solver: ``"cg"``, ``"cholesky"`` (which stores the table of all pairs of training samples), or ``"auto"``:
            Cholesky up to 2,000 samples.
        tol: conjugate gradients stop where the residual is below ``tol`` times the right-hand side, for every target.
        max_iter: most iterations of conjugate gradients; None leaves it to the solver.
        device: ``"auto"`` (a GPU where there is one), ``"cpu"``, ``"cuda"`` or another torch device.
        verbose: 1 for a progress bar where tqdm is installed, and a line for each iteration where it is not; 2 for the
            lines; to stderr. ``set_callbacks`` is there with scikit-learn 1.9 and later.

    Attributes:
        dual_coef_: weights (n_samples,) or (n_samples, n_targets) of the kernels around the training samples.
        X_fit_: the training samples.
        n_iter_: iterations done; 1 by Cholesky.
        residual_: the norm of the residual divided by that of the right-hand side, for the worst target.
        n_features_in_, feature_names_in_: of the training data.
    """

    _rules = {
        "kernel": OneOf(tuple(sorted(KERNEL_NAMES)), functions=True, kinds=(Kernel,)),
        "gamma": Within(0, or_none=True),
        "degree": Within(0),
        "coef0": Within(-np.inf),
        "solver": OneOf(("auto", "cg", "cholesky")),
        "tol": Within(0, closed=False),
        "max_iter": Within(1, kind=Integral, or_none=True),
        "verbose": VERBOSE,
    }

    def __init__(
        self,
        alpha=1,
        *,
        kernel="linear",
        gamma=None,
        degree=3,
        coef0=1,
        kernel_params=None,
        solver="auto",
        tol=1e-6,
        max_iter=None,
        device="auto",
        verbose=0,
    ):
        self.alpha = alpha
        self.kernel = kernel
        self.gamma = gamma
        self.degree = degree
        self.coef0 = coef0
        self.kernel_params = kernel_params
        self.solver = solver
        self.tol = tol
        self.max_iter = max_iter
        self.device = device
        self.verbose = verbose

    @with_callbacks
    def fit(self, X, y, sample_weight=None):
        """Solve ``(K + alpha) dual_coef = y``.

        Args:
            X: samples (n_samples, n_features).
            y: targets (n_samples,) or (n_samples, n_targets).
            sample_weight: weight of each sample's error, a number or (n_samples,).
        """
        check_parameters(self, self._rules)
        device_of(self.device)
        X, y = validate_data(self, X, y, dtype=FLOATS, order="C", multi_output=True, y_numeric=True)
        check_features(X, self.kernel)
        targets = y.astype(X.dtype, copy=False).reshape(len(X), -1)
        alpha = self._alphas(targets.shape[1], X.dtype)
        root = None
        if sample_weight is not None:
            weight = _check_sample_weight(sample_weight, X, dtype=X.dtype)
            if (weight < 0).any():
                raise ValueError(f"sample_weight must be >= 0; got {weight.min():g}")
            root = np.sqrt(weight)[:, None]
            targets = targets * root
        forget(self, "dual_coef_")
        self.X_fit_ = X
        dense = self.solver == "cholesky" or (self.solver == "auto" and len(X) <= SMALL)
        with Progress(self, X, y, None if dense else self.max_iter) as progress:
            dual = self._solve(targets, alpha, root, dense, progress)
            self.dual_coef_ = (dual if root is None else dual * root).reshape(y.shape)
        return self

    def _solve(
        self, targets: np.ndarray, alpha: np.ndarray, root: np.ndarray | None, dense: bool, progress: Progress
    ) -> np.ndarray:  # fmt: skip
        if dense:
            n = len(targets)
            advice = "Conjugate gradients (solver='cg') need memory for a few vectors only"
            like = torch.empty(0, dtype=torch.float64 if targets.dtype == np.float64 else torch.float32)
            try:
                with memory_for(f"KernelRidge of {n} samples by Cholesky's decomposition", 3 * n * n, like, advice):
                    return self._solve_dense(targets, alpha, root, progress)
            except OutOfMemoryError as error:
                if self.solver != "auto":
                    raise
                warnings.warn(f"{error}; they are used", NumericalWarning, stacklevel=4)
        return self._solve_iteratively(targets, alpha, root, progress)

    def predict(self, X):
        """The regression at each sample, (n_queries,) or (n_queries, n_targets)."""
        check_is_fitted(self, "dual_coef_")
        X = validate_data(self, X, dtype=FLOATS, order="C", reset=False)
        check_features(X, self.kernel)
        x, fit, dual = tensors(self.device, X, self.X_fit_, self.dual_coef_.reshape(len(self.X_fit_), -1))
        values = array(self._product(x, fit)(dual)).astype(X.dtype, copy=False)
        return values.reshape(len(X), *self.dual_coef_.shape[1:])

    def _alphas(self, n_targets: int, dtype: np.dtype) -> np.ndarray:
        """One penalty, or one for each target."""
        alpha = numbers("alpha", self.alpha, dtype)
        if alpha.shape not in ((1,), (n_targets,)):
            raise ValueError(f"alpha must be a number or one for each of {n_targets} targets; got shape {alpha.shape}")
        if not ((alpha >= 0) & np.isfinite(alpha)).all():
            raise ValueError(f"alpha must be a number >= 0 or an array of such; got {self.alpha!r}")
        return alpha

    def _formula(self, slots: Slots, x: torch.Tensor, y: torch.Tensor) -> Node:
        """The kernel of rows x and columns y."""
        given = dict(self.kernel_params or {})
        if isinstance(self.kernel, Kernel) or is_sklearn(self.kernel):
            return slots.of_function("kernel", as_kernel(self.kernel, **given).formula, x, y, {})
        if callable(self.kernel):
            return slots.of_function("kernel", self.kernel, x, y, given)
        row = lookup(self.kernel)
        for name in ("gamma", "degree", "coef0"):
            if name in row.params:
                given.setdefault(name, getattr(self, name))
        for name in set(row.params) - set(row.static) - set(row.free) - {"gamma"}:
            if given.get(name) is not None:
                what = f"kernel {row.name!r}"
                check_length(name, what, row, parameter(f"{name} of {what}", given[name], True), x.shape[-1])
        params = complete(row, given, x.shape[-1])
        return row.of(slots.rows(x), slots.columns(y), **slots.parameters(params, x, row.static))

    def _product(self, x: torch.Tensor, y: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """The function v -> K(x, y) v."""
        slots = Slots()
        formula = self._formula(slots, x, y)

        def product(v: torch.Tensor) -> torch.Tensor:
            own = Slots(slots.values)
            plan = make_plan("Sum", mul(formula, own.columns(v)))
            return reduce(plan, own.values, len(x), len(y))[0]

        return product

    def _solve_iteratively(
        self, targets: np.ndarray, alpha: np.ndarray, root: np.ndarray | None, progress: Progress
    ) -> np.ndarray:  # fmt: skip
        one = np.ones(1, targets.dtype)
        x, b, a, r = tensors(self.device, self.X_fit_, targets, alpha, one if root is None else root)
        product = self._product(x, x)

        def told(k: int, residuals: torch.Tensor) -> bool:
            """Whether a callback asks for the end."""
            try:
                progress.end(f"residual {float(residuals.max()):.1e}")
            except Stopped:
                return True
            if k != self.max_iter:
                progress.begin("iteration")
            return False

        progress.begin("iteration")
        solution = conjugate_gradients(
            lambda v: r * product(r * v) + a * v, b, tol=float(self.tol), max_iter=self.max_iter, warn=False,
            callback=told if progress.listening else None,
        )  # fmt: skip
        self.n_iter_, self.residual_ = max(1, solution.iterations), float(solution.residual.max())
        if not solution.converged:
            warnings.warn(
                f"KernelRidge stopped after {self.n_iter_} iterations at a relative residual of {self.residual_:.1e}, "
                f"above tol={self.tol:g}: {solution.reason}. A larger alpha, tol or max_iter helps, or float64",
                ConvergenceWarning,
                stacklevel=5,
            )
        return array(solution.x)

    def _solve_dense(
        self, targets: np.ndarray, alpha: np.ndarray, root: np.ndarray | None, progress: Progress
    ) -> np.ndarray:  # fmt: skip
        progress.begin("solution")
        table = self._table()
        if root is not None:
            table *= root * root.T
        dual = np.empty_like(targets)
        for value in np.unique(alpha):
            columns = np.flatnonzero(np.broadcast_to(alpha == value, targets.shape[1:]))
            dual[:, columns] = _solve_symmetric(table, value, targets[:, columns])
        residual = np.linalg.norm(table @ dual + alpha * dual - targets, axis=0)
        size = np.linalg.norm(targets, axis=0)
        self.n_iter_, self.residual_ = 1, float(np.max(residual / np.where(size > 0, size, 1)))
        with suppress(Stopped):
            progress.end(f"Cholesky to a residual of {self.residual_:.1e}")
        return dual

    def _table(self) -> np.ndarray:
        """The kernel of all pairs of training samples, computed by blocks of rows."""
        (x,) = tensors("cpu", self.X_fit_)
        slots = Slots()
        formula = self._formula(slots, x, x)
        width = max(node.dim for node in topological(formula))
        step = max(1, 2**22 // (len(x) * width))

        def block(start: int) -> torch.Tensor:
            def leaf(v: Node) -> torch.Tensor:
                cat, ind, _ = v.params
                value = slots.values[ind]  # type: ignore[index]
                if not isinstance(value, torch.Tensor):
                    return torch.full((1,), value, dtype=x.dtype)
                return pair_view(value[start : start + step] if cat == CAT_I else value, cat)  # type: ignore[arg-type]

            rows = len(x[start : start + step])
            return evaluate((formula,), leaf, x)[0].squeeze(-1).expand(rows, len(x))  # a constant has no axes

        return array(torch.cat([block(start) for start in range(0, len(x), step)]))


def _solve_symmetric(table: np.ndarray, alpha: float, b: np.ndarray) -> np.ndarray:
    """The solution of ``(table + alpha) x = b``; by least squares, with a warning, where that is singular."""
    shifted = table + alpha * np.eye(len(table), dtype=table.dtype)
    try:
        return linalg.solve(shifted, b, assume_a="pos")
    except np.linalg.LinAlgError:
        warnings.warn("Singular matrix in solving dual problem. Using least-squares solution instead.", stacklevel=6)
        return linalg.lstsq(shifted, b)[0]
