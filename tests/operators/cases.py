"""Kernels with their definitions written out in torch, and operators with their dense matrices."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from kernops import kernels as k
from kernops.operators import (
    BlockDiagonalOperator,
    DenseOperator,
    DerivativesOperator,
    DiagonalOperator,
    KernelOperator,
    KroneckerOperator,
    LinearOperator,
    RescaledOperator,
)

Tensor = torch.Tensor
ELL = (0.5, 0.8, 1.3)


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def differences(x: Tensor, y: Tensor) -> Tensor:
    return x[..., :, None, :] - y[..., None, :, :]


def squares(x: Tensor, y: Tensor, ell: Any = 1.0) -> Tensor:
    return (differences(x, y) / torch.as_tensor(ell, dtype=x.dtype)).square().sum(-1)


def distances(x: Tensor, y: Tensor, ell: Any = 1.0) -> Tensor:
    s = squares(x, y, ell)
    return torch.where(s > 0, torch.where(s > 0, s, 1.0).sqrt(), 0.0)


def lengths(x: Tensor) -> Tensor:
    return torch.as_tensor(ELL, dtype=x.dtype)


def gaussian(x: Tensor, y: Tensor, ell: Any = ELL) -> Tensor:
    return (-squares(x, y, ell) / 2).exp()


def wendland2(x: Tensor, y: Tensor) -> Tensor:
    r = distances(x, y, 2.0)
    j = x.shape[-1] // 2 + 3
    return (1 - r).clamp(min=0) ** (j + 2) * ((j**2 + 4 * j + 3) * r**2 + (3 * j + 6) * r + 3) / 3


def mixture(x: Tensor, y: Tensor) -> Tensor:
    t = differences(x, y)
    out = torch.zeros(t.shape[:-1], dtype=x.dtype)
    for w, mu, sd in zip(WEIGHTS, MEANS, SCALES):
        a, b = (t * torch.as_tensor(s, dtype=x.dtype) for s in (mu, sd))
        out = out + w * (-2 * math.pi**2 * b.square()).exp().prod(-1) * (2 * math.pi * a).cos().prod(-1)
    return out


WEIGHTS, MEANS, SCALES = (0.7, 0.4), ((0.3, 0.1, 0.5), (1.0, 0.2, 0.0)), ((0.2, 0.3, 0.1), (0.5, 0.2, 0.4))


def matern(x: Tensor, y: Tensor, nu: float) -> Tensor:
    from scipy.special import gamma, kv

    r = (math.sqrt(2 * nu) * distances(x, y, ELL)).numpy()
    away = np.where(r > 0, r, 1.0)
    return torch.from_numpy(np.where(r > 0, 2 ** (1 - nu) / gamma(nu) * away**nu * kv(nu, away), 1.0))


#: Name -> (kernel, its matrix). All that ``kernops.kernels`` constructs, with one length scale for each feature.
KERNELS: dict[str, tuple[k.Kernel, Callable[[Tensor, Tensor], Tensor]]] = {
    "RBF": (k.RBF(ELL), gaussian),
    "RBF of one length": (k.RBF(0.4), lambda x, y: (-squares(x, y, 0.4) / 2).exp()),
    "Matern 1/2": (k.Matern(ELL, nu=0.5), lambda x, y: (-distances(x, y, ELL)).exp()),
    "Matern 3/2": (k.Matern(ELL), lambda x, y: (1 + (r := 3**0.5 * distances(x, y, ELL))) * (-r).exp()),
    "Matern 7/2": (k.Matern(ELL, nu=3.5), lambda x, y: matern(x, y, 3.5)),
    "Matern 0.7": (k.Matern(ELL, nu=0.7), lambda x, y: matern(x, y, 0.7)),
    "Matern 2": (k.Matern(ELL, nu=2.0), lambda x, y: matern(x, y, 2.0)),
    "Matern 40.1": (k.Matern(ELL, nu=40.1), lambda x, y: matern(x, y, 40.1)),
    "RationalQuadratic": (k.RationalQuadratic(ELL, 0.7), lambda x, y: (1 + squares(x, y, ELL) / 1.4) ** -0.7),
    "Periodic": (k.Periodic(0.9, 1.3), lambda x, y: (-2 * (math.pi * distances(x, y) / 1.3).sin() ** 2 / 0.81).exp()),
    "Cosine": (k.Cosine(2.2), lambda x, y: (math.pi * distances(x, y) / 2.2).cos()),
    "Linear": (k.Linear(ELL), lambda x, y: (x * lengths(x)) @ y.mT),
    "DotProduct": (k.DotProduct(0.4), lambda x, y: 0.16 + x @ y.mT),
    "Polynomial": (k.Polynomial(degree=2, coef0=0.5), lambda x, y: (x @ y.mT + 0.5) ** 2),
    "Constant": (k.Constant(1.7), lambda x, y: torch.full((*x.shape[:-1], y.shape[-2]), 1.7, dtype=x.dtype)),
    "Laplacian": (k.Laplacian(ELL), lambda x, y: (-(differences(x, y) / lengths(x)).abs().sum(-1)).exp()),
    "Cauchy": (k.Cauchy(ELL), lambda x, y: 1 / (1 + squares(x, y, ELL))),
    "PiecewisePolynomial": (k.PiecewisePolynomial(2.0), wendland2),
    "SpectralMixture": (k.SpectralMixture(WEIGHTS, MEANS, SCALES), mixture),
    "custom": (k.custom(lambda x, y, s: (-(x - y).abs().sum(-1) / s).exp(), s=0.5),
               lambda x, y: (-differences(x, y).abs().sum(-1) / 0.5).exp()),
    "by features": (k.RBF(0.4).restrict([2, 0]) + k.Linear().restrict([1]),
                    lambda x, y: gaussian(x[..., [0, 2]], y[..., [0, 2]], 0.4) + x[..., [1]] @ y[..., [1]].mT),
    "composed": ((2.0 * k.RBF(ELL) + k.Cauchy() * k.DotProduct(0.1)) ** 2 + 0.5,
                 lambda x, y: (2 * gaussian(x, y) + (0.01 + x @ y.mT) / (1 + squares(x, y))) ** 2 + 0.5),
}  # fmt: skip

N = 12
X = rand(N, 3, seed=1)
SPD = torch.eye(3).double() + 0.3
NOISE = rand(N, seed=2) + 0.1


def kernel(x: Tensor = X, noise: float | Tensor = 0.3) -> KernelOperator:
    return KernelOperator(1.5 * k.RBF(ELL), x).add_diagonal(noise)


def dense(x: Tensor = X, noise: float | Tensor = 0.3) -> Tensor:
    d = torch.as_tensor(noise, dtype=x.dtype).expand(*x.shape[:-1])
    return 1.5 * gaussian(x, x) + torch.diag_embed(d)


def with_derivatives(definition: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor, order: int = 1) -> Tensor:
    """The matrix of a kernel's derivatives at points x (M, D) and y (N, D), which torch takes of its definition."""

    def jet(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def all_of(z: Tensor) -> Tensor:
            parts = [f(z)[..., None], torch.func.jacfwd(f)(z)]
            if order == 2:
                parts.append(torch.func.jacfwd(torch.func.jacfwd(f))(z).diagonal(dim1=-2, dim2=-1))
            return torch.cat(parts, -1)

        return all_of

    def block(a: Tensor, b: Tensor) -> Tensor:
        return jet(lambda v: jet(lambda u: definition(u[None], v[None])[0, 0])(a))(b)

    blocks = torch.func.vmap(torch.func.vmap(block, (None, 0)), (0, None))(x, y)
    return blocks.transpose(-3, -2).flatten(-4, -3).flatten(-2)


XB = rand(2, N, 3, seed=3)
Y = rand(7, 3, seed=4)
FACTOR = torch.tensor([2.0, 3.0]).double()
ROWS = torch.tensor([4, 0, 7, 3])

#: Name -> (operator, its matrix); all square ones are symmetric positive definite.
OPERATORS: dict[str, Callable[[], tuple[LinearOperator, Tensor]]] = {
    "kernel": lambda: (kernel(), dense()),
    "kernel of a LazyTensor": lambda: (KernelOperator(kernel().lazy).add_diagonal(1.0), dense(noise=1.0)),
    "rescaled": lambda: (RescaledOperator(kernel(), NOISE), NOISE[:, None] * dense() * NOISE),
    "rescaled, and a diagonal": lambda: (
        RescaledOperator(kernel(), NOISE).add_diagonal(1.0),
        NOISE[:, None] * dense() * NOISE + torch.eye(N, dtype=torch.float64),
    ),
    "rescaled, of a batch": lambda: (
        RescaledOperator(kernel(), torch.stack([NOISE, 2 * NOISE])),
        torch.stack([f * f * NOISE[:, None] * dense() * NOISE for f in (1, 2)]),
    ),
    "rescaled rows": lambda: (
        RescaledOperator(KernelOperator(k.RBF(ELL), Y, X), rand(7, seed=5), NOISE),
        rand(7, seed=5)[:, None] * gaussian(Y, X) * NOISE,
    ),
    "kernel of a batch": lambda: (kernel(XB), dense(XB)),
    "noise of a batch": lambda: (
        kernel(noise=torch.stack([NOISE, 2 * NOISE])),
        torch.stack([dense(noise=NOISE), dense(noise=2 * NOISE)]),
    ),
    "parameters of a batch": lambda: (
        KernelOperator(k.RBF(torch.tensor([[0.5], [1.0]]).double()), X).add_diagonal(0.2),
        torch.stack([(-squares(X, X, s) / 2).exp() + 0.2 * torch.eye(N).double() for s in (0.5, 1.0)]),
    ),
    "kernel with noise by point": lambda: (kernel(noise=NOISE), dense(noise=NOISE)),
    "white": lambda: (KernelOperator(k.RBF() * (1 + k.White(0.1)) + k.White(0.2), X),
                      (-squares(X, X) / 2).exp() + 0.3 * torch.eye(N).double()),
    "rectangular": lambda: (KernelOperator(k.Matern(ELL, nu=0.5), X, Y), (-distances(X, Y, ELL)).exp()),
    "rectangular of a batch": lambda: (KernelOperator(k.Matern(ELL, nu=0.5), XB, Y), (-distances(XB, Y, ELL)).exp()),
    "dense": lambda: (DenseOperator(dense(), symmetric=True), dense()),
    "diagonal": lambda: (DiagonalOperator(NOISE), torch.diag(NOISE)),
    "sum": lambda: (kernel() + DenseOperator(dense(XB), symmetric=True), dense() + dense(XB)),
    "sum of kernels": lambda: (kernel() + kernel(noise=NOISE), 2 * dense(noise=(NOISE + 0.3) / 2)),
    "product of kernels": lambda: (kernel() * kernel(noise=NOISE), dense() * dense(noise=NOISE)),
    "scaled": lambda: (2.5 * kernel(), 2.5 * dense()),
    "scaled by a tensor": lambda: (kernel() * torch.tensor(2.0).double(), 2 * dense()),
    "scaled batch": lambda: (kernel(XB) * FACTOR, dense(XB) * FACTOR[:, None, None]),
    "difference": lambda: (3 * kernel() - DenseOperator(dense(), symmetric=True) / 2, 2.5 * dense()),
    "product": lambda: (KernelOperator(k.RBF(), Y, X) @ kernel(), (-squares(Y, X) / 2).exp() @ dense()),
    "block-diagonal": lambda: (BlockDiagonalOperator(kernel(), DenseOperator(SPD, True), kernel(Y)),
                               torch.block_diag(dense(), SPD, dense(Y))),
    "block-diagonal batch": lambda: (BlockDiagonalOperator(kernel(XB), DenseOperator(SPD, True)),
                                     torch.stack([torch.block_diag(d, SPD) for d in dense(XB)])),
    "Kronecker": lambda: (KroneckerOperator(kernel(), SPD).add_diagonal(0.2),
                          torch.kron(dense(), SPD) + 0.2 * torch.eye(3 * N).double()),
    "Kronecker batch": lambda: (KroneckerOperator(kernel(XB), SPD),
                                torch.stack([torch.kron(d, SPD) for d in dense(XB)])),
    "Kronecker batch of tasks": lambda: (KroneckerOperator(kernel(), FACTOR[:, None, None] * SPD),
                                         torch.stack([torch.kron(dense(), f * SPD) for f in FACTOR])),
    "Kronecker of a rectangle": lambda: (KroneckerOperator(KernelOperator(k.RBF(), X, Y), SPD[:2]),
                                         torch.kron((-squares(X, Y) / 2).exp(), SPD[:2])),
    "derivatives": lambda: (
        DerivativesOperator(1.5 * k.RBF(ELL), X[:3]).add_diagonal(0.1),
        1.5 * with_derivatives(gaussian, X[:3], X[:3]) + 0.1 * torch.eye(12).double(),
    ),
    "derivatives of a batch": lambda: (
        DerivativesOperator(k.RBF(ELL), XB[:, :3]).add_diagonal(0.1),
        torch.stack([with_derivatives(gaussian, x[:3], x[:3]) + 0.1 * torch.eye(12).double() for x in XB]),
    ),
    "second derivatives": lambda: (
        (DerivativesOperator(k.RBF(), X[:2], order=2) + DerivativesOperator(k.RBF(ELL), X[:2], order=2)).add_diagonal(
            0.1
        ),
        with_derivatives(lambda x, y: gaussian(x, y) + gaussian(x, y, 1.0), X[:2], X[:2], 2)
        + 0.1 * torch.eye(14).double(),
    ),
    "derivatives of a rectangle": lambda: (
        DerivativesOperator(k.RBF(ELL), X[:2], Y[:3]),
        with_derivatives(gaussian, X[:2], Y[:3]),
    ),
    "rows and columns": lambda: (kernel(noise=NOISE)[2:9, 1:5], dense(noise=NOISE)[2:9, 1:5]),
    "principal part": lambda: (kernel(noise=NOISE)[2:9, 2:9], dense(noise=NOISE)[2:9, 2:9]),
    "rows, then columns": lambda: (kernel(noise=NOISE)[ROWS, :][:, ROWS], dense(noise=NOISE)[ROWS][:, ROWS]),
    "transposed": lambda: (KernelOperator(k.RBF(), X, Y).T, (-squares(X, Y) / 2).exp().mT),
}  # fmt: skip
