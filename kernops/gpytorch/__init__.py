"""Kernels for GPyTorch: its names, arguments, priors, constraints and state dicts; matrices that are never stored.

A model changes by one line, ``from kernops.gpytorch import RBFKernel, ScaleKernel``. Needs the extra
``kernops[gpytorch]``.
"""

from __future__ import annotations

try:
    from gpytorch.kernels import InducingPointKernel, Kernel
except ImportError as error:
    raise ImportError(f"kernops.gpytorch needs GPyTorch ({error}): pip install 'kernops[gpytorch]'") from error

from .base import AdditiveKernel, KernopsKernel, ProductKernel  # noqa: E402
from .compositional import (  # noqa: E402
    AdditiveStructureKernel,
    IndexKernel,
    LCMKernel,
    MultitaskKernel,
    ProductStructureKernel,
    ScaleKernel,
)
from .derivatives import (  # noqa: E402
    DerivativesLinearOperator,
    Matern52KernelGrad,
    PolynomialKernelGrad,
    RBFKernelGrad,
    RBFKernelGradGrad,
)
from .formula import FormulaKernel  # noqa: E402
from .kernels import (  # noqa: E402
    CauchyKernel,
    ConstantKernel,
    CosineKernel,
    LaplacianKernel,
    LinearKernel,
    MaternKernel,
    PeriodicKernel,
    PiecewisePolynomialKernel,
    PolynomialKernel,
    RBFKernel,
    RQKernel,
    SpectralMixtureKernel,
)
from .operator import KernopsLinearOperator, as_linear_operator  # noqa: E402

__all__ = [
    "AdditiveKernel",
    "AdditiveStructureKernel",
    "CauchyKernel",
    "ConstantKernel",
    "CosineKernel",
    "DerivativesLinearOperator",
    "FormulaKernel",
    "IndexKernel",
    "InducingPointKernel",
    "Kernel",
    "KernopsKernel",
    "KernopsLinearOperator",
    "LCMKernel",
    "LaplacianKernel",
    "LinearKernel",
    "Matern52KernelGrad",
    "MaternKernel",
    "MultitaskKernel",
    "PeriodicKernel",
    "PiecewisePolynomialKernel",
    "PolynomialKernel",
    "PolynomialKernelGrad",
    "ProductKernel",
    "ProductStructureKernel",
    "RBFKernel",
    "RBFKernelGrad",
    "RBFKernelGradGrad",
    "RQKernel",
    "ScaleKernel",
    "SpectralMixtureKernel",
    "as_linear_operator",
]
