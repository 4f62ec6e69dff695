"""KernelDensity against scikit-learn, and against integrals where scikit-learn is wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import integrate, stats
from scipy.special import gammaln
from sklearn import neighbors as reference
from sklearn.datasets import load_digits, load_iris

from kernops.estimators import KernelDensity
from kernops.estimators._shapes import SHAPES

X_IRIS = load_iris(return_X_y=True)[0]
QUERIES = X_IRIS[::5] + 0.05
WEIGHTS = np.random.default_rng(0).random(len(X_IRIS))
WEIGHTS[::10] = 0


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["plain", "weighted"])
@pytest.mark.parametrize("dim", [1, 2, 3, 4])
@pytest.mark.parametrize("kernel", SHAPES)
def test_log_densities_are_scikit_learns(kernel: str, dim: int, weights: np.ndarray | None) -> None:
    if kernel == "cosine" and dim % 2 == 0:
        pytest.skip("scikit-learn's normalisation of the cosine kernel holds in odd dimensions only")
    X, queries = X_IRIS[:, :dim], np.concatenate([QUERIES, QUERIES[:1] + 50])[:, :dim]
    options: dict[str, Any] = {"kernel": kernel, "bandwidth": 0.7}
    ours = KernelDensity(**options).fit(X, sample_weight=weights).score_samples(queries)
    with np.errstate(divide="ignore"):
        theirs = reference.KernelDensity(**options).fit(X, sample_weight=weights).score_samples(queries)
    np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kernel", ["gaussian", "exponential"])
def test_far_from_all_data_nothing_underflows(kernel: str) -> None:
    far = np.array([[1e3], [-1e5]])
    for dtype in (np.float64, np.float32):
        ours = KernelDensity(kernel=kernel).fit(X_IRIS[:, :1].astype(dtype)).score_samples(far.astype(dtype))
        theirs = reference.KernelDensity(kernel=kernel).fit(X_IRIS[:, :1]).score_samples(far)
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


@pytest.mark.parametrize("dim", [1, 2, 3, 10, 64, 200])
@pytest.mark.parametrize("kernel", SHAPES)
def test_kernels_integrate_to_one(kernel: str, dim: int) -> None:
    """The mass of a radial kernel: its value times the area of the sphere, integrated over the radius."""
    values = {
        "gaussian": lambda r: np.exp(-(r**2) / 2),
        "tophat": lambda r: np.ones_like(r),
        "epanechnikov": lambda r: 1 - r**2,
        "exponential": lambda r: np.exp(-r),
        "linear": lambda r: 1 - r,
        "cosine": lambda r: np.cos(np.pi * r / 2),
    }[kernel]
    peak = {"gaussian": (dim - 1) ** 0.5, "exponential": dim - 1.0}.get(kernel)
    limits = (0.0, 1.0) if peak is None else (max(0.0, peak - 12 * dim**0.5), peak + 12 * dim**0.5 + 40)
    shift = 0.0 if peak is None else (dim - 1) * np.log(max(peak, 1)) + np.log(values(np.array(peak)))

    def integrand(r: float) -> float:
        return np.exp((dim - 1) * np.log(r) - shift) * values(r) if r > 0 else float(dim == 1)

    mass = integrate.quad(integrand, *limits, points=None if peak is None else [peak], limit=500, epsabs=0)[0]
    log_area = np.log(2) + dim / 2 * np.log(np.pi) - gammaln(dim / 2)
    np.testing.assert_allclose(SHAPES[kernel].log_mass(dim), np.log(mass) + shift + log_area, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("bandwidth", ["scott", "silverman"])
def test_bandwidth_rules(bandwidth: str) -> None:
    ours = KernelDensity(bandwidth=bandwidth).fit(X_IRIS)
    theirs = reference.KernelDensity(bandwidth=bandwidth).fit(X_IRIS)
    assert ours.bandwidth_ == theirs.bandwidth_
    np.testing.assert_allclose(ours.score(QUERIES), theirs.score(QUERIES), rtol=1e-10)


def test_sixty_four_dimensions() -> None:
    X = load_digits(return_X_y=True)[0][:300]
    ours = KernelDensity(bandwidth=4.0).fit(X).score_samples(X[:50] + 0.5)
    theirs = reference.KernelDensity(bandwidth=4.0).fit(X).score_samples(X[:50] + 0.5)
    np.testing.assert_allclose(ours, theirs, rtol=1e-9)


@pytest.mark.parametrize("metric", ["manhattan", "chebyshev"])
def test_other_metrics(metric: str) -> None:
    ours = KernelDensity(metric=metric, kernel="exponential").fit(X_IRIS).score_samples(QUERIES)
    theirs = reference.KernelDensity(metric=metric, kernel="exponential").fit(X_IRIS).score_samples(QUERIES)
    np.testing.assert_allclose(ours, theirs, rtol=1e-9)


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["plain", "weighted"])
@pytest.mark.parametrize("kernel", ["gaussian", "tophat"])
def test_a_seed_draws_scikit_learns_samples(kernel: str, weights: np.ndarray | None) -> None:
    ours = KernelDensity(kernel=kernel).fit(X_IRIS, sample_weight=weights).sample(20, random_state=3)
    theirs = reference.KernelDensity(kernel=kernel).fit(X_IRIS, sample_weight=weights).sample(20, random_state=3)
    np.testing.assert_allclose(ours, theirs)


@pytest.mark.parametrize("dim", [1, 3])
@pytest.mark.parametrize("kernel", SHAPES)
def test_samples_follow_the_kernel(kernel: str, dim: int) -> None:
    """Distances from the only data point, against the kernel's distribution of radii."""
    centre = np.full((1, dim), 2.0)
    model = KernelDensity(kernel=kernel, bandwidth=0.5).fit(centre)
    radii = np.linalg.norm(model.sample(4000, random_state=0) - centre, axis=1)
    grid = np.linspace(0, 8 if kernel in ("gaussian", "exponential") else 0.5, 20001)
    line = np.zeros((len(grid), dim))
    line[:, 0] = grid
    density = np.exp(model.score_samples(line + centre)) * grid ** (dim - 1)
    cumulative = integrate.cumulative_trapezoid(density, grid, initial=0)
    p = stats.kstest(radii, lambda r: np.interp(r, grid, cumulative / cumulative[-1])).pvalue
    assert p > 1e-3


def test_bad_weights_and_metrics_for_sampling() -> None:
    with pytest.raises(ValueError, match="sample_weight"):
        KernelDensity().fit(X_IRIS, sample_weight=-np.ones(len(X_IRIS)))
    with pytest.raises(ValueError, match="metric='euclidean'; got 'manhattan'"):
        KernelDensity(metric="manhattan").fit(X_IRIS).sample()


def test_compiled_back_end_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = KernelDensity().fit(X_IRIS)
    expected = model.score_samples(QUERIES)
    monkeypatch.setenv("KERNOPS_BACKEND", "auto")
    np.testing.assert_allclose(model.score_samples(QUERIES), expected, rtol=1e-12)
