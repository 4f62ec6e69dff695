"""Covariance functions against scikit-learn's."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.gaussian_process import kernels as gp
from sklearn.metrics.pairwise import pairwise_kernels

from kernops import kernels
from kernops.backends import reduce
from kernops.formula.graph import CAT_I, CAT_J, check, var
from kernops.formula.ops import mul
from kernops.formula.plan import make_plan
from kernops.kernels import KERNEL_NAMES, KERNELS, Slots, complete, kernel, lookup
from kernops.operators import KernelOperator

RNG = np.random.default_rng(0)
X, Y = RNG.random((12, 3)) + 0.1, RNG.random((9, 3)) + 0.1
X[0] = Y[0]
SCALES = np.array([0.5, 1.0, 2.0])


def table(name: str, x: np.ndarray, y: np.ndarray, params: dict[str, Any], backend: str = "tiled") -> np.ndarray:
    """The kernel of all pairs: its product with the identity."""
    slots = Slots()
    a, b = torch.as_tensor(x), torch.as_tensor(y)
    row = lookup(name)
    full = complete(row, params, x.shape[1])
    formula = row.formula(slots.rows(a), slots.columns(b), **slots.parameters(full, a, row.static))
    plan = make_plan("Sum", mul(check(formula), slots.columns(torch.eye(len(y), dtype=a.dtype))))
    return reduce(plan, slots.values, len(x), len(y), backend)[0].numpy()


def theirs(name: str, **params: Any) -> np.ndarray:
    return pairwise_kernels(X, Y, name, **params)


#: kernel, parameters, its table by scikit-learn; every row of KERNELS has a line
CASES: list[tuple[str, dict[str, Any], np.ndarray]] = [
    ("linear", {}, theirs("linear")),
    ("polynomial", {}, theirs("polynomial")),
    ("polynomial", {"degree": 2.5, "gamma": 0.7, "coef0": 0.1}, theirs("poly", degree=2.5, gamma=0.7, coef0=0.1)),
    ("sigmoid", {"gamma": 0.3, "coef0": -0.2}, theirs("sigmoid", gamma=0.3, coef0=-0.2)),
    ("cosine", {}, theirs("cosine")),
    ("rbf", {}, theirs("rbf")),
    ("rbf", {"gamma": 3.0}, theirs("rbf", gamma=3.0)),
    ("laplacian", {}, theirs("laplacian")),
    ("laplacian", {"gamma": 2.0}, theirs("laplacian", gamma=2.0)),
    ("chi2", {}, theirs("chi2")),
    ("chi2", {"gamma": 0.2}, theirs("chi2", gamma=0.2)),
    ("additive_chi2", {}, theirs("additive_chi2")),
    ("matern12", {"length_scale": 0.6}, gp.Matern(0.6, nu=0.5)(X, Y)),
    ("matern32", {"length_scale": 0.6}, gp.Matern(0.6, nu=1.5)(X, Y)),
    ("matern52", {"length_scale": 0.6}, gp.Matern(0.6, nu=2.5)(X, Y)),
    ("matern52", {"length_scale": SCALES}, gp.Matern(SCALES, nu=2.5)(X, Y)),
    ("rational_quadratic", {"length_scale": 0.6, "alpha": 0.3}, gp.RationalQuadratic(0.6, 0.3)(X, Y)),
    ("cauchy", {"length_scale": 0.6}, gp.RationalQuadratic(0.6 / 2**0.5, 1.0)(X, Y)),
    ("periodic", {"length_scale": 0.8, "periodicity": 0.5}, gp.ExpSineSquared(0.8, 0.5)(X, Y)),
    ("squared_exponential", {"length_scale": SCALES}, gp.RBF(SCALES)(X, Y)),
    ("matern", {"length_scale": 0.6, "nu": 1.5}, gp.Matern(0.6, nu=1.5)(X, Y)),
    ("matern", {"length_scale": 0.6, "nu": np.inf}, gp.RBF(0.6)(X, Y)),
    ("laplace", {"length_scale": 0.5}, theirs("laplacian", gamma=2.0)),
    ("harmonic", {"periodicity": 2.0}, np.cos(np.pi * np.linalg.norm(X[:, None] - Y, axis=-1) / 2)),
    ("piecewise_polynomial", {"q": 0}, np.maximum(1 - np.linalg.norm(X[:, None] - Y, axis=-1), 0) ** 2),
    ("weighted_linear", {"variance": SCALES}, X * SCALES @ Y.T),
    ("affine", {"sigma_0": 0.7}, gp.DotProduct(0.7)(X, Y)),
    ("constant", {"constant_value": 1.7}, gp.ConstantKernel(1.7)(X, Y)),
    ("spectral_mixture", {"weights": [0.5], "means": [0.0, 0.0, 0.0], "scales": [0.1, 0.2, 0.3]},
     0.5 * gp.RBF(1 / (2 * np.pi * np.array([0.1, 0.2, 0.3])))(X, Y)),
]  # fmt: skip


@pytest.mark.parametrize("backend", ["tiled", "auto"])
@pytest.mark.parametrize(
    ("name", "params", "expected"), CASES, ids=lambda v: str(v) if isinstance(v, (str, dict)) else ""
)
def test_values(name: str, params: dict[str, Any], expected: np.ndarray, backend: str) -> None:
    np.testing.assert_allclose(table(name, X, Y, params, backend), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("nu", [0.3, 0.9, 1.0, 3.3, 3.5, 9.0, 30.2])
def test_matern_of_any_smoothness(nu: float) -> None:
    """Where points are equal, near and far."""
    x = np.concatenate([[0.0], np.logspace(-12, 2, 200)])[:, None]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-learn's own: it overflows at small distances
        expected = gp.Matern(0.7, nu=nu)(x, np.zeros((1, 1)))
    got = table("matern", x, np.zeros((1, 1)), {"length_scale": 0.7, "nu": nu})
    close = np.isfinite(expected) & (expected <= 1)
    assert close.mean() > 0.6 and got[0] == pytest.approx(1, abs=1e-14)
    np.testing.assert_allclose(got[close], expected[close], rtol=0, atol=5e-9)
    assert np.all(np.diff(got[:, 0]) <= 1e-14)


def test_every_kernel_is_tested_and_found_by_all_its_names() -> None:
    assert {c[0] for c in CASES} == set(KERNELS)
    for name, row in KERNEL_NAMES.items():
        assert lookup(name) is KERNELS[row]
    assert lookup("gaussian") is lookup("rbf")


def test_zero_vectors_and_features() -> None:
    x = X.copy()
    x[1] = 0
    y = Y.copy()
    y[2] = 0
    x[:, 1] = y[:, 1] = 0
    for name in ("cosine", "chi2", "additive_chi2"):
        np.testing.assert_allclose(table(name, x, y, {}), pairwise_kernels(x, y, name), atol=1e-14)


def test_numbers_are_passed_by_value() -> None:
    """One formula, and so one compilation, for all values of a parameter."""
    x = torch.as_tensor(X)
    formulas = set()
    for gamma in (0.1, 0.2, np.float32(0.3), 4):
        slots = Slots()
        params = slots.parameters({"gamma": gamma}, x)
        formulas.add(kernel("rbf", slots.rows(x), slots.columns(x), **params))
        assert slots.values[0] == float(gamma)
    assert len(formulas) == 1


@pytest.mark.parametrize(
    ("name", "params", "error", "message"),
    [
        ("rbff", {}, ValueError, "kernel must be one of .*rbf.*; got 'rbff'"),
        (3, {}, ValueError, "kernel must be one of .*; got 3"),
        ("rbf", {"length_scale": 1.0}, TypeError, "'rbf' takes gamma; got 'length_scale'"),
        ("linear", {"gamma": 1.0}, TypeError, "'linear' takes no parameters; got 'gamma'"),
        ("matern", {"nu": 0.0}, ValueError, "nu must be a number > 0; got 0.0"),
        ("piecewise_polynomial", {"q": 4}, ValueError, "q must be 0, 1, 2 or 3; got 4"),
    ],
)
def test_bad_requests(name: Any, params: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        kernel(name, var(CAT_I, 0, 3), var(CAT_J, 1, 3), **params)


# --- kernels as objects -------------------------------------------------------------------------------------------
def matrix(kernel: kernels.Kernel, x: np.ndarray = X, y: np.ndarray | None = None) -> np.ndarray:
    a = torch.as_tensor(x)
    operator = KernelOperator(kernel, a, None if y is None else torch.as_tensor(y), backend="tiled")
    return operator.to_dense().detach().numpy()


COMPOSED: dict[str, Callable[[], gp.Kernel]] = {
    "one": lambda: gp.RBF(0.5),
    "lengths": lambda: gp.RBF(SCALES),
    "README": lambda: gp.ConstantKernel(2.0) * gp.RBF([1.0, 2.0, 0.5]) + gp.WhiteKernel(0.1),
    "numbers": lambda: 2.0 * gp.Matern(0.5, nu=0.5) + 3.0,
    "Matern": lambda: gp.Matern(SCALES, nu=2.5) * gp.Matern(0.9, nu=np.inf),
    "general Matern": lambda: gp.Matern(0.6, nu=1.2),
    "powers": lambda: (gp.DotProduct(0.3) + gp.WhiteKernel(0.2)) ** 2 * gp.RationalQuadratic(0.5, 1.2) ** 1.5,
    "white times white": lambda: gp.WhiteKernel(0.5) * gp.WhiteKernel(0.4) + gp.RBF() * gp.WhiteKernel(0.3),
    "white alone": lambda: gp.WhiteKernel(0.5),
    "CO2": lambda: 44.8**2 * gp.RBF(51.6) + 2.6**2 * gp.RBF(91.5) * gp.ExpSineSquared(1.5, 1.0)
    + 0.5**2 * gp.RationalQuadratic(0.9, 0.8) + 0.2**2 * gp.RBF(0.14) + gp.WhiteKernel(0.03),
    "fixed": lambda: gp.ConstantKernel(2.0, "fixed") * gp.RBF(SCALES) + gp.RBF(0.3, "fixed") + gp.WhiteKernel(0.1),
    "pairwise": lambda: gp.PairwiseKernel(0.7, metric="laplacian") + gp.PairwiseKernel(metric="linear"),
}  # fmt: skip


@pytest.mark.parametrize("name", COMPOSED)
def test_scikit_learn_kernels(name: str) -> None:
    """Values, and gradients by the logarithms of what is not fixed, in scikit-learn's order."""
    theirs = COMPOSED[name]()
    np.testing.assert_allclose(matrix(kernels.from_sklearn(theirs)), theirs(X), rtol=2e-9, atol=1e-9)
    np.testing.assert_allclose(matrix(kernels.as_kernel(theirs), X, Y), theirs(X, Y), rtol=2e-9, atol=1e-9)
    theta = torch.tensor(theirs.theta).requires_grad_()
    ours = KernelOperator(kernels.from_sklearn(theirs, theta), torch.as_tensor(X), backend="tiled")
    weight = torch.as_tensor(RNG.random((12, 12)))
    (got,) = torch.autograd.grad((ours.to_dense() * weight).sum(), theta)
    _, gradient = theirs(X, eval_gradient=True)
    expected = np.einsum("ijk,ij->k", gradient, weight.numpy())
    numeric = name in ("general Matern", "pairwise")  # which scikit-learn differentiates by differences
    np.testing.assert_allclose(got, expected, rtol=1e-3 if numeric else 1e-9, atol=1e-9)


def test_what_of_scikit_learn_is_not_translated() -> None:
    class Mine(gp.RBF):
        pass

    for bad, error, message in (
        (Mine(), TypeError, "Mine is derived from a kernel of scikit-learn"),
        (gp.CompoundKernel([gp.RBF(), gp.RBF()]), TypeError, "CompoundKernel has no translation; there is one for"),
        (gp.PairwiseKernel(metric=lambda x, y: 1.0), TypeError, "use custom"),
        ("RBF", TypeError, "must be a kernel object of scikit-learn; got str"),
    ):
        with pytest.raises(error, match=message):
            kernels.from_sklearn(bad)
    with pytest.raises(ValueError, match=r"theta must have shape \(1,\)"):
        kernels.from_sklearn(gp.RBF(), torch.zeros(2))
    with pytest.raises(TypeError, match="theta must be a torch tensor, or None; got ndarray"):
        kernels.from_sklearn(gp.RBF(), np.zeros(1))  # type: ignore[arg-type]


def test_algebra_and_text() -> None:
    k = (2.0 * kernels.RBF([1.0, 2.0, 0.5]) + kernels.White(0.1)) ** 2 * (kernels.Cauchy() + 0.5)
    assert repr(k) == (
        "(Constant(constant_value=2.0) * RBF(length_scale=[1.0, 2.0, 0.5]) + White(noise_level=0.1)) ** 2 * "
        "(Cauchy(length_scale=1.0) + Constant(constant_value=0.5))"
    )
    assert repr(((kernels.Cauchy() ** 2) ** 3).restrict([0])) == "((Cauchy(length_scale=1.0) ** 2) ** 3).restrict([0])"
    x = torch.as_tensor(X)
    part = (kernels.Cauchy() + 1.0 * kernels.Linear()).restrict([2, 0])
    np.testing.assert_allclose(matrix(part), matrix(kernels.Cauchy() + kernels.Linear(), X[:, [2, 0]]))
    np.testing.assert_allclose(matrix(kernels.RBF().restrict([1, 2])), matrix(kernels.RBF(), X[:, 1:]))
    scale = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    (g,) = torch.autograd.grad(KernelOperator(scale * kernels.RBF(), x, backend="tiled").trace(), scale)
    assert float(g) == pytest.approx(12)
    chosen = torch.tensor([1, 2])
    np.testing.assert_allclose(matrix(kernels.RBF().restrict(chosen.tolist())), matrix(kernels.RBF(), X[:, 1:]))
    np.testing.assert_allclose(matrix(kernels.PiecewisePolynomial(q=2.0)), matrix(kernels.PiecewisePolynomial(q=2)))
    assert matrix(kernels.Constant(2.0) ** 3)[0, 1] == 8 and matrix(kernels.ExpSineSquared() * 2)[0, 0] == 2


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: kernels.RBF(0.0), ValueError, "length_scale of RBF must be finite and > 0; got 0.0"),
        (lambda: kernels.RBF([1.0, -1.0]), ValueError, r"length_scale of RBF must be .*got \[1.0, -1.0\]"),
        (lambda: kernels.RBF(torch.tensor([-0.5])), ValueError, r"must be finite and > 0; got \[-0.5\]"),
        (lambda: kernels.Matern(np.nan), ValueError, "length_scale of Matern must be finite"),
        (lambda: kernels.White(-1.0), ValueError, "noise_level of White must be finite and > 0"),
        (lambda: kernels.Constant(np.inf), ValueError, "constant_value of Constant must be finite"),
        (lambda: kernels.RBF("long"), TypeError, "length_scale of RBF must be a number, numbers or a tensor; got str"),
        (lambda: kernels.RBF(gamma=1.0), TypeError, "RBF takes length_scale; got 'gamma'"),
        (lambda: kernels.RBF(1.0, 2.0), TypeError, "RBF takes length_scale; got 2 arguments"),
        (lambda: kernels.RBF(1.0, length_scale=2.0), TypeError, "length_scale was given twice"),
        (lambda: matrix(kernels.RBF([1.0, 2.0])), ValueError, "one for each of 3 features; got 2"),
        (lambda: matrix(kernels.SpectralMixture([1.0, 2.0], [[0.1]], [[0.1]])), ValueError, "a row of 3 numbers"),
        (lambda: matrix(kernels.Constant([1.0, 2.0, 3.0])), ValueError, "constant_value of kernel 'constant' must"),
        (lambda: matrix(kernels.Periodic([1.0] * 3)), ValueError, "length_scale of kernel 'periodic' must be one"),
        (lambda: matrix(kernels.White([1.0] * 3)), ValueError, "noise_level of White must be one number.*; got 3"),
        (lambda: matrix(kernels.Matern(nu="a")), TypeError, "nu of kernel 'matern' must be a number; got 'a'"),
        (lambda: matrix(kernels.Matern(nu=np.nan)), ValueError, "nu must be a number > 0; got nan"),
        (lambda: matrix(kernels.Polynomial(degree=np.nan)), ValueError, "degree must be a number >= 0; got nan"),
        (lambda: matrix(kernels.Polynomial(degree=-1)), ValueError, "degree must be a number >= 0; got -1"),
        (lambda: kernels.RBF(torch.ones(3).long()), TypeError, "length_scale of RBF must be .*got one of torch.int64"),
        (lambda: kernels.RBF() ** np.inf, ValueError, "exponent of a kernel must be a number > 0; got inf"),
        (lambda: kernels.RBF().restrict(1), TypeError, "dims must be whole numbers of features, .*; got 1"),  # type: ignore[arg-type]
        (lambda: kernels.RBF().restrict([0.5]), TypeError, r"dims must be whole numbers of features, .*; got \[0.5\]"),  # type: ignore[list-item]
        (lambda: kernels.RBF().restrict([True, False]), TypeError, "dims must be whole numbers"),
        (lambda: kernels.RBF() ** 0, ValueError, "exponent of a kernel must be a number > 0; got 0"),
        (lambda: kernels.RBF() + "RBF", TypeError, "unsupported operand"),
        (lambda: kernels.RBF().restrict([]), ValueError, "at least one"),
        (lambda: kernels.RBF().restrict([1, 1]), ValueError, "different numbers"),
        (lambda: matrix(kernels.RBF().restrict([3])), ValueError, r"dims \[3\] of RBF.*the points have 3 features"),
        (lambda: kernels.custom(None), TypeError, "function must be a function of two LazyTensors; got NoneType"),  # type: ignore[arg-type]
        (lambda: matrix(kernels.custom(lambda x, y: 1.0)), TypeError, "kernel must return a LazyTensor"),
        (lambda: matrix(kernels.custom(lambda x, y: x - y)), ValueError, "one number a pair"),
        (lambda: kernels.as_kernel(kernels.RBF(), s=1), TypeError, "takes no parameters"),
        (lambda: kernels.as_kernel(None), TypeError, "must be a kernel of kernops.kernels or of scikit-learn"),
        (lambda: matrix(kernels.RBF(torch.ones(1))), ValueError, "one dtype; got float64 and float32"),
    ],
)  # fmt: skip
def test_bad_kernels(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
