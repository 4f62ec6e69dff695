"""Kernels of ours with their references: GPyTorch's own, or definitions written out in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gpytorch
import torch
from gpytorch.kernels import Kernel

from kernops import gpytorch as ours
from tests.operators.cases import squares, wendland2

Tensor = torch.Tensor
D = 3


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Written(Kernel):
    """GPyTorch's kernel of a definition in torch, of points divided by the length scale."""

    has_lengthscale = True

    def __init__(self, definition: Callable[[Tensor, Tensor], Tensor], **settings: Any) -> None:
        super().__init__(**settings)
        self.definition = definition

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, last_dim_is_batch: bool = False) -> Any:
        x1, x2 = x1 / self.lengthscale, x2 / self.lengthscale
        if last_dim_is_batch:
            x1, x2 = x1.mT[..., None], x2.mT[..., None]
        out = self.definition(x1, x2)
        return out.diagonal(dim1=-1, dim2=-2) if diag else out


def manhattan(x: Tensor, y: Tensor) -> Tensor:
    return (-(x[..., :, None, :] - y[..., None, :, :]).abs().sum(-1)).exp()


def cauchy(x: Tensor, y: Tensor) -> Tensor:
    return 1 / (1 + squares(x, y))


def smooth(x: Any, y: Any, scale: Any, tail: Any) -> Any:
    """A formula with a parameter for each feature and one for all."""
    return (
        (1 + ((x - y) / scale).sqnorm2()) ** (-tail)
        if hasattr(x, "formula")
        else (1 + squares(x / scale, y / scale)) ** -tail
    )


class Smooth(Kernel):
    """What ``FormulaKernel`` is to compute for ``smooth``, with its state dict."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, size in (("scale", D), ("tail", 1)):
            self.register_parameter(f"raw_{name}", torch.nn.Parameter(torch.zeros(*self.batch_shape, size)))
            self.register_constraint(f"raw_{name}", gpytorch.constraints.Positive())

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Any:
        scale = self.raw_scale_constraint.transform(self.raw_scale)[..., None, :]
        tail = self.raw_tail_constraint.transform(self.raw_tail)[..., None]
        out = (1 + squares(x1 / scale, x2 / scale)) ** -tail
        return out.diagonal(dim1=-1, dim2=-2) if diag else out


def same(name: str, **own: Any) -> tuple[Callable[..., Kernel], Callable[..., Kernel]]:
    """Ours and GPyTorch's of one name."""
    return (
        lambda **settings: getattr(ours, name)(**own, **settings),
        lambda **settings: getattr(gpytorch.kernels, name)(**own, **settings),
    )


Makers = tuple[Callable[..., Kernel], Callable[..., Kernel]]
#: Name -> (ours, the reference).
KERNELS: dict[str, Makers] = {
    "RBF": same("RBFKernel"),
    "Matern 1/2": same("MaternKernel", nu=0.5),
    "Matern 3/2": same("MaternKernel", nu=1.5),
    "Matern 5/2": same("MaternKernel", nu=2.5),
    "RQ": same("RQKernel"),
    "Periodic": same("PeriodicKernel"),
    "Cosine": same("CosineKernel"),
    "Linear": same("LinearKernel"),
    "Polynomial": same("PolynomialKernel", power=3),
    "Constant": same("ConstantKernel"),
    "PiecewisePolynomial 0": same("PiecewisePolynomialKernel", q=0),
    "PiecewisePolynomial 1": same("PiecewisePolynomialKernel", q=1),
    "PiecewisePolynomial 2": (
        lambda **settings: ours.PiecewisePolynomialKernel(q=2, **settings),
        lambda **settings: Written(lambda x, y: wendland2(2 * x, 2 * y), **settings),  # of the length scale 2
    ),
    "PiecewisePolynomial 3": same("PiecewisePolynomialKernel", q=3),
    "SpectralMixture": same("SpectralMixtureKernel", num_mixtures=3, ard_num_dims=D),
    "Laplacian": (ours.LaplacianKernel, lambda **settings: Written(manhattan, **settings)),
    "Cauchy": (ours.CauchyKernel, lambda **settings: Written(cauchy, **settings)),
    "formula": (
        lambda **settings: ours.FormulaKernel(smooth, {"scale": [1.0] * D, "tail": 1.0}, **settings),
        Smooth,
    ),
}  # fmt: skip
#: Those with a length, a variance or a period for each feature, where asked for.
ARD = tuple(
    k for k in KERNELS if k.split()[0] not in ("Cosine", "Polynomial", "Constant", "SpectralMixture", "formula")
)


def both(makers: Makers, seed: int = 0, **settings: Any) -> tuple[Kernel, Kernel]:
    """Ours with random parameters in float64, and the reference with the same ones."""
    mine, reference = (make(**settings).double() for make in makers)
    for k, p in enumerate(mine.parameters()):
        p.data = rand(*p.shape, seed=100 * seed + k) * 0.5
    reference.load_state_dict(mine.state_dict())
    return mine, reference
