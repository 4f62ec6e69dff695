"""Covariance functions against scikit-learn's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.gaussian_process import kernels as gp
from sklearn.metrics.pairwise import pairwise_kernels

from kernops.backends import reduce
from kernops.formula.graph import CAT_I, CAT_J, check, var
from kernops.formula.ops import mul
from kernops.formula.plan import make_plan
from kernops.kernels import KERNEL_NAMES, KERNELS, Slots, complete, kernel, lookup

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
]


@pytest.mark.parametrize("backend", ["tiled", "auto"])
@pytest.mark.parametrize(
    ("name", "params", "expected"), CASES, ids=lambda v: str(v) if isinstance(v, (str, dict)) else ""
)
def test_values(name: str, params: dict[str, Any], expected: np.ndarray, backend: str) -> None:
    np.testing.assert_allclose(table(name, X, Y, params, backend), expected, rtol=1e-12, atol=1e-14)


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
    ],
)
def test_bad_requests(name: Any, params: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        kernel(name, var(CAT_I, 0, 3), var(CAT_J, 1, 3), **params)
