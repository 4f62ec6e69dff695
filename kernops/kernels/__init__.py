"""Covariance functions written as formulas, and kernels made of them.

``table`` has the formulas, a row each; ``kernel`` the objects, with ``+ * **``; ``sklearn`` reads scikit-learn's.
"""

from .constructors import (
    RBF,
    Cauchy,
    Constant,
    Cosine,
    DotProduct,
    ExpSineSquared,
    Laplacian,
    Linear,
    Matern,
    Periodic,
    PiecewisePolynomial,
    Polynomial,
    RationalQuadratic,
    SpectralMixture,
    as_kernel,
    custom,
)
from .kernel import Kernel, White
from .sklearn import from_sklearn
from .slots import Slots
from .table import KERNEL_NAMES, KERNELS, complete, kernel, lookup, ratio_or_0, unit

__all__ = [
    "KERNELS",
    "KERNEL_NAMES",
    "RBF",
    "Cauchy",
    "Constant",
    "Cosine",
    "DotProduct",
    "ExpSineSquared",
    "Kernel",
    "Laplacian",
    "Linear",
    "Matern",
    "Periodic",
    "PiecewisePolynomial",
    "Polynomial",
    "RationalQuadratic",
    "Slots",
    "SpectralMixture",
    "White",
    "as_kernel",
    "complete",
    "custom",
    "from_sklearn",
    "kernel",
    "lookup",
    "ratio_or_0",
    "unit",
]
