"""GPyTorch's own test case of a kernel, for each of ours."""

from __future__ import annotations

from typing import Any
from unittest import TestCase

import torch
from gpytorch.kernels import Kernel
from gpytorch.test.base_kernel_test_case import BaseKernelTestCase

from kernops import gpytorch as ours
from tests.operators.cases import squares

#: Name -> (kernel, whether it takes ``ard_num_dims``).
CASES: dict[str, tuple[Any, bool]] = {
    "RBF": (ours.RBFKernel, True),
    "Matern12": (lambda **k: ours.MaternKernel(nu=0.5, **k), True),
    "Matern32": (lambda **k: ours.MaternKernel(nu=1.5, **k), True),
    "Matern52": (ours.MaternKernel, True),
    "RQ": (ours.RQKernel, True),
    "Periodic": (ours.PeriodicKernel, True),
    "Cosine": (ours.CosineKernel, False),
    "Linear": (ours.LinearKernel, True),
    "Polynomial": (lambda **k: ours.PolynomialKernel(2, **k), False),
    "Constant": (ours.ConstantKernel, False),
    "PiecewisePolynomial": (ours.PiecewisePolynomialKernel, True),
    "Laplacian": (ours.LaplacianKernel, True),
    "Cauchy": (ours.CauchyKernel, True),
    "Scale": (lambda **k: ours.ScaleKernel(ours.RBFKernel(**k), batch_shape=k.get("batch_shape")), True),
    "Sum": (lambda **k: ours.RBFKernel(**k) + ours.CauchyKernel(**k), True),
    "Product": (lambda **k: ours.RBFKernel(**k) * ours.LinearKernel(**k), True),
    "RBFGrad": (ours.RBFKernelGrad, True),
    "Matern52Grad": (ours.Matern52KernelGrad, True),
    "PolynomialGrad": (lambda **k: ours.PolynomialKernelGrad(2, **k), False),
    "RBFGradGrad": (ours.RBFKernelGradGrad, True),
    "SumOfGrads": (lambda **k: ours.RBFKernelGrad(**k) + ours.Matern52KernelGrad(**k), True),
    "Formula": (lambda **k: ours.FormulaKernel(tail, {"scale": 0.7}, **k), False),
}


def tail(x: Any, y: Any, scale: Any) -> Any:
    return 1 / (1 + (x - y).sqnorm2() / scale)


def case(name: str) -> type:
    make, ard = CASES[name]

    class Case(BaseKernelTestCase, TestCase):
        seed = 0

        def create_kernel_no_ard(self, **kwargs: Any) -> Kernel:
            return make(**kwargs)

        def create_kernel_ard(self, num_dims: int, **kwargs: Any) -> Kernel:
            if not ard:
                raise NotImplementedError
            return make(ard_num_dims=num_dims, **kwargs)

    Case.__name__ = Case.__qualname__ = f"Test{name}"
    return Case


for name in CASES:
    globals()[f"Test{name}"] = case(name)


class TestSpectralMixture(BaseKernelTestCase, TestCase):
    """A kernel that needs to know how many features there are."""

    seed = 0

    def create_kernel_no_ard(self, **kwargs: Any) -> Kernel:
        dims = kwargs.get("active_dims")
        return ours.SpectralMixtureKernel(num_mixtures=3, ard_num_dims=len(dims) if dims else self.dims, **kwargs)

    dims = 2

    def test_active_dims_list(self) -> None:
        self.dims = 4
        super().test_active_dims_list()

    def test_active_dims_range(self) -> None:
        self.dims = 6
        super().test_active_dims_range()


def test_references_are_what_they_say():
    x = torch.rand(4, 2)
    kernel = CASES["Formula"][0]()
    torch.testing.assert_close(kernel(x).to_dense(), 1 / (1 + squares(x, x) / 0.7))
