"""GPyTorch's kernels as formulas: their names, arguments, constraints, priors and state dicts."""

from __future__ import annotations

import math
from collections.abc import Mapping

import gpytorch
import torch

from ..formula.graph import Node
from ..formula.ops import add, apply, as_node, div, mul, power, sub, total
from ..kernels import KERNELS
from ..kernels.table import wendland
from .base import Composable, KernopsKernel

Tensor = torch.Tensor


class _WithLengthscale(KernopsKernel):
    """A kernel of one row of the table whose only parameter is a length scale."""

    row = ""

    def _formula_parameters(self) -> Mapping[str, Tensor]:
        return {"lengthscale": self.lengthscale.squeeze(-2)}

    def _formula(self, x: Node, y: Node, features: int, **values: Node) -> Node:
        return KERNELS[self.row].formula(x, y, values["lengthscale"])


class RBFKernel(_WithLengthscale, gpytorch.kernels.RBFKernel):
    """exp(-|x - y|²/2), of points divided by the length scale.

    Args:
        kwargs: ``ard_num_dims, batch_shape, active_dims, lengthscale_prior, lengthscale_constraint`` of GPyTorch's.

    Example:
        >>> kernel = RBFKernel(ard_num_dims=2)
        >>> x = torch.zeros(5, 2)
        >>> kernel(x).evaluate_kernel().shape
        torch.Size([5, 5])
    """

    row = "squared_exponential"


class MaternKernel(_WithLengthscale, gpytorch.kernels.MaternKernel):
    """Matérn's kernel of ν = 1/2, 3/2 or 5/2.

    Args:
        nu: 0.5, 1.5 or 2.5.
        kwargs: ``ard_num_dims, batch_shape, active_dims, lengthscale_prior, lengthscale_constraint`` of GPyTorch's.
    """

    def _formula(self, x: Node, y: Node, features: int, **values: Node) -> Node:
        return KERNELS["matern"].formula(x, y, values["lengthscale"], nu=self.nu)


class RQKernel(_WithLengthscale, gpytorch.kernels.RQKernel):
    """(1 + |x - y|²/(2α))^-α, of points divided by the length scale.

    Args:
        alpha_constraint: of α; ``Positive`` without it.
        kwargs: ``ard_num_dims, batch_shape, active_dims, lengthscale_prior, lengthscale_constraint`` of GPyTorch's.
    """

    def _formula_parameters(self) -> Mapping[str, Tensor]:
        return {**super()._formula_parameters(), "alpha": self.alpha}

    def _formula(self, x: Node, y: Node, features: int, **values: Node) -> Node:
        return KERNELS["rational_quadratic"].formula(x, y, values["lengthscale"], values["alpha"])


class PeriodicKernel(KernopsKernel, gpytorch.kernels.PeriodicKernel):
    """exp(-2 Σ_d sin²(π (x_d - y_d)/p_d)/ℓ_d): a period and a length scale, not squared, for each feature.

    Args:
        period_length_prior, period_length_constraint: of p.
        kwargs: ``ard_num_dims, batch_shape, active_dims, lengthscale_prior, lengthscale_constraint`` of GPyTorch's.
    """

    def _formula_parameters(self) -> Mapping[str, Tensor]:
        return {"lengthscale": self.lengthscale.squeeze(-2), "period_length": self.period_length.squeeze(-2)}

    def _formula(self, x: Node, y: Node, features: int, **values: Node) -> Node:
        period = div(values["period_length"], math.pi)
        waves = power(apply("Sin", apply("Sub", div(x, period), div(y, period))), 2)
        # As many as there are features, also where one length scale is for all of them.
        return apply("Exp", mul(-2.0, total(div(waves, values["lengthscale"]))))


class CosineKernel(KernopsKernel, gpytorch.kernels.CosineKernel):
    """cos(π |x - y|/p).

    Args:
        period_length_prior, period_length_constraint: of p.
        kwargs: ``batch_shape, active_dims`` of GPyTorch's.
    """

    def _formula_parameters(self) -> Mapping[str, Tensor]:
        return {"period_length": self.period_length.squeeze(-2)}

    def _formula(self, x: Node, y: Node, features: int, **values: Node) -> Node:
        return KERNELS["harmonic"].formula(x, y, values["period_length"])


class LinearKernel(Composable, gpytorch.kernels.LinearKernel):
    """Σ_d v_d x_d y_d. Its matrix is of two thin ones, as GPyTorch makes it; a product with ours is a formula.

    Args:
        ard_num_dims, variance_prior, variance_constraint: of v.
        kwargs: ``batch_shape, active_dims`` of GPyTorch's.
    """


class PolynomialKernel(KernopsKernel, gpytorch.kernels.PolynomialKernel):
    """(x·y + c)^power.

    Args:
        power: a number.
        offset_prior, offset_constraint: of c.
        kwargs: ``batch_shape, active_dims`` of GPyTorch's.
    """

    free = ("offset",)

    def _formula_parameters(self) -> Mapping[str, Tensor]:
        return {"offset": self.offset}

    def _formula(self, x: Node, y: Node, features: int, **values: Node) -> Node:
        return KERNELS["polynomial"].formula(x, y, 1.0, degree=float(self.power), coef0=values["offset"])


class ConstantKernel(KernopsKernel, gpytorch.kernels.ConstantKernel):
    """One number for all pairs.

    Args:
        batch_shape, constant_prior, constant_constraint, active_dims: those of GPyTorch's.
    """

    free = ("constant",)

    def _formula_parameters(self) -> Mapping[str, Tensor]:
        return {"constant": self.constant}

    def _formula(self, x: Node, y: Node, features: int, **values: Node) -> Node:
        return as_node(values["constant"])


class PiecewisePolynomialKernel(_WithLengthscale, gpytorch.kernels.PiecewisePolynomialKernel):
    """Wendland's functions, which are 0 from one length scale on.

    Polynomials are those of Rasmussen and Williams (2006, equation 4.21), which GPyTorch documents. For ``q=2`` it
    computes (up to 1.15) with j + 4j + 3 in the place of j² + 4j + 3: its values differ then, and its kernel is twice
    and not four times differentiable.

    Args:
        q: 0, 1, 2 or 3; the kernel is 2q times differentiable.
        kwargs: ``ard_num_dims, batch_shape, active_dims, lengthscale_prior, lengthscale_constraint`` of GPyTorch's.
    """

    def _formula(self, x: Node, y: Node, features: int, **values: Node) -> Node:
        return wendland(x, y, values["lengthscale"], self.q, features)


class SpectralMixtureKernel(KernopsKernel, gpytorch.kernels.SpectralMixtureKernel):
    """Π_d Σ_q w_q exp(-2π² (s_qd (x_d - y_d))²) cos(2π μ_qd (x_d - y_d)).

    For one feature that is the kernel of Wilson and Adams (2013, equation 12). For more, GPyTorch's kernel is a product
    of one for each feature, and so is this; ``kernops.kernels.SpectralMixture`` has products inside the sum.

    Args:
        num_mixtures: how many terms.
        kwargs: ``ard_num_dims, batch_shape, active_dims, mixture_scales_constraint, mixture_means_constraint,
            mixture_weights_constraint`` of GPyTorch's.
    """

    free = ("means",)

    def _formula_values(self, each_feature: bool) -> Mapping[str, Tensor]:
        weights = self.mixture_weights
        both = {"means": self.mixture_means.squeeze(-2), "scales": self.mixture_scales.squeeze(-2)}  # (*B, Q, D)
        if each_feature:
            return {"weights": weights[..., None, :], **{k: v.mT for k, v in both.items()}}
        return {"weights": weights, **{k: v.flatten(-2) for k, v in both.items()}}

    def _formula(self, x: Node, y: Node, features: int, **values: Node) -> Node:
        if features != self.ard_num_dims:
            raise RuntimeError(
                f"SpectralMixtureKernel was made for ard_num_dims={self.ard_num_dims} features; got {features}"
            )
        weights, means, scales = values["weights"], values["means"], values["scales"]
        tau, terms = sub(x, y), as_node(0.0)
        for q in range(weights.dim):
            at = (q * x.dim, x.dim)
            width = power(mul(tau, apply("Extract", scales, params=at)), 2)
            wave = apply("Cos", mul(2 * math.pi, mul(tau, apply("Extract", means, params=at))))
            term = mul(apply("Exp", mul(-2 * math.pi**2, width)), wave)
            terms = add(terms, mul(apply("Elem", weights, params=(q,)), term))
        out = apply("Elem", terms, params=(0,))
        for d in range(1, x.dim):
            out = mul(out, apply("Elem", terms, params=(d,)))
        return out


class LaplacianKernel(_WithLengthscale):
    """exp(-Σ_d |x_d - y_d|/ℓ_d).

    Args:
        kwargs: ``ard_num_dims, batch_shape, active_dims, lengthscale_prior, lengthscale_constraint`` of GPyTorch's.
    """

    has_lengthscale = True
    row = "laplace"


class CauchyKernel(_WithLengthscale):
    """1/(1 + |x - y|²), of points divided by the length scale.

    Args:
        kwargs: ``ard_num_dims, batch_shape, active_dims, lengthscale_prior, lengthscale_constraint`` of GPyTorch's.
    """

    has_lengthscale = True
    row = "cauchy"
