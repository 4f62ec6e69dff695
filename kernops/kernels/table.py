"""Covariance functions written as formulas: one table, one row each.

A row's function takes the two points as formulas, and its parameters as numbers or formulas, and returns the formula
of the kernel. ``kernel("rbf", x, y, gamma=0.5)`` picks a row by name. Nothing here computes anything: what a formula
is worth on data, back ends say.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..formula.graph import Node
from ..formula.ops import add, apply, as_node, div, mul, neg, power, sub, total
from ..formula.vector_ops import polynomial

Number = Node | float

#: Matérn of ν = p + 1/2 is a polynomial of degree p times an exponential; above this p it is computed otherwise.
MOST_TERMS = 8
#: Mass below which the general Matérn leaves out its narrowest Gaussians.
SMALLEST_WEIGHT = 1e-10
#: How many exponentials of it are squares of one another.
SQUARES = 5


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        name: the name used in messages and in the documentation.
        formula: ``formula(x, y, **params)``, the kernel of two points.
        doc: the kernel in one line; d is the Euclidean distance.
        params: name -> default; ``None`` stands for one divided by the number of features, as in scikit-learn.
        aliases: other names.
        static: parameters that shape the formula itself, so that each value is compiled on its own.
        free: parameters that may be 0 or negative; all others are lengths, variances and the like, and positive.
        matrices: parameters with a row for each component of a mixture.
    """

    name: str
    formula: Callable[..., Node]
    doc: str
    params: Mapping[str, float | None] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    static: tuple[str, ...] = ()
    free: tuple[str, ...] = ()
    matrices: tuple[str, ...] = ()


# --- pieces -----------------------------------------------------------------------------------------------------------
def unit(x: Node) -> Node:
    """``x`` divided by its Euclidean norm; 0 stays 0."""
    return mul(x, apply("Rsqrt0", apply("SqNorm2", x)))


def ratio_or_0(a: Node, b: Node) -> Node:
    """``a / b``, and 0 where b is 0."""
    return apply("Where", b, div(a, b), 0.0)


def _scaled_sqdist(x: Node, y: Node, length_scale: Number) -> Node:
    """d² in units of the length scale, a number or one for each feature. Scaling points, not pairs, is free."""
    return apply("SqDist", div(x, length_scale), div(y, length_scale))


def _manhattan(x: Node, y: Node) -> Node:
    return total(apply("Abs", sub(x, y)))


def _whole_power(a: Node, degree: float) -> Node:
    return power(a, int(degree)) if float(degree).is_integer() else apply("Pow", a, float(degree))


# --- rows -------------------------------------------------------------------------------------------------------------
def _polynomial(x: Node, y: Node, gamma: Number, degree: float, coef0: Number) -> Node:
    return _whole_power(add(mul(gamma, apply("Dot", x, y)), coef0), degree)


def _sigmoid(x: Node, y: Node, gamma: Number, coef0: Number) -> Node:
    return apply("Tanh", add(mul(gamma, apply("Dot", x, y)), coef0))


def _rbf(x: Node, y: Node, gamma: Number) -> Node:
    return apply("Exp", neg(mul(gamma, apply("SqDist", x, y))))


def _laplacian(x: Node, y: Node, gamma: Number) -> Node:
    return apply("Exp", neg(mul(gamma, _manhattan(x, y))))


def _additive_chi2(x: Node, y: Node) -> Node:
    return neg(total(ratio_or_0(power(sub(x, y), 2), add(x, y))))


def _chi2(x: Node, y: Node, gamma: Number) -> Node:
    return apply("Exp", mul(gamma, _additive_chi2(x, y)))


def _squared_exponential(x: Node, y: Node, length_scale: Number) -> Node:
    return apply("Exp", mul(-0.5, _scaled_sqdist(x, y, length_scale)))


def _laplace(x: Node, y: Node, length_scale: Number) -> Node:
    return apply("Exp", neg(_manhattan(div(x, length_scale), div(y, length_scale))))


def _matern(x: Node, y: Node, length_scale: Number, nu: float) -> Node:
    """Matérn of any ν (Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, equations 4.14, 4.16)."""
    if not nu > 0:
        raise ValueError(f"nu must be a number > 0; got {nu!r}")
    if math.isinf(nu):
        return _squared_exponential(x, y, length_scale)
    square = mul(2.0 * nu, _scaled_sqdist(x, y, length_scale))
    order = nu - 0.5
    if not order.is_integer() or order > MOST_TERMS:
        return _scale_mixture(square, nu)
    return apply("Matern", square, params=(int(order),))


def _scale_mixture(square: Node, nu: float) -> Node:
    """Matérn as the mixture of Gaussians that it is, r² = ``square``: no Bessel function, and positive definite so.

    k(r) = 1/Γ(ν) ∫ exp(νs - eˢ - r² e⁻ˢ/4) ds. The trapezoidal rule of step h converges like exp(-π²/h), once h is
    small beside the integrand's width of 1/√ν. With h = log(2)/n the exponents double every n nodes, so that most
    exponentials are squares of others.
    """
    every = max(2, math.ceil(math.log(2.0) * math.sqrt(nu) / 0.85))
    step, peak = math.log(2.0) / every, math.log(nu)
    top = next(
        s for s in itertools.count(math.ceil(peak / step)) if nu * (s * step - peak + 1) < math.exp(s * step) - 36
    )
    bottom = math.ceil(math.log(SMALLEST_WEIGHT) / nu / step)
    nodes = [s * step for s in range(top, bottom, -1)]
    weights = [math.exp(nu * (s - peak + 1) - math.exp(s)) for s in nodes]
    terms: list[Node] = []
    for k, s in enumerate(nodes):
        fresh = k % (every * SQUARES) < every  # else rounding would double too often
        terms.append(apply("Exp", mul(-math.exp(-s) / 4, square)) if fresh else power(terms[k - every], 2))
    out = mul(weights[0] / sum(weights), terms[0])
    for w, t in zip(weights[1:], terms[1:]):
        out = add(out, mul(w / sum(weights), t))
    return out


def _rational_quadratic(x: Node, y: Node, length_scale: Number, alpha: Number) -> Node:
    ratio = div(_scaled_sqdist(x, y, length_scale), mul(2.0, alpha))
    return apply("Exp", neg(mul(alpha, apply("Log1p", ratio))))


def _periodic(x: Node, y: Node, length_scale: Number, periodicity: Number) -> Node:
    angle = mul(math.pi, apply("Sqrt", _scaled_sqdist(x, y, periodicity)))
    return apply("Exp", mul(-2.0, power(div(apply("Sin", angle), length_scale), 2)))


def _harmonic(x: Node, y: Node, periodicity: Number) -> Node:
    return apply("Cos", mul(math.pi, apply("Sqrt", _scaled_sqdist(x, y, periodicity))))


def wendland(x: Node, y: Node, length_scale: Number, q: int, features: int | None = None) -> Node:
    """Wendland's functions (Rasmussen and Williams 2006, equation 4.21), positive definite in up to so many features.

    Args:
        features: None for those of the points.
    """
    if q not in (0, 1, 2, 3):
        raise ValueError(f"q must be 0, 1, 2 or 3; got {q!r}")
    r = apply("Sqrt", _scaled_sqdist(x, y, length_scale))
    j = (x.dim if features is None else features) // 2 + q + 1
    coefficients = {
        0: (1.0,),
        1: (j + 1, 1.0),
        2: ((j**2 + 4 * j + 3) / 3, j + 2, 1.0),
        3: ((j**3 + 9 * j**2 + 23 * j + 15) / 15, (2 * j**2 + 12 * j + 15) / 5, j + 3, 1.0),
    }[q]
    return mul(power(apply("ReLU", sub(1.0, r)), j + q), polynomial(r, coefficients))


def _spectral_mixture(x: Node, y: Node, weights: Number, means: Number, scales: Number) -> Node:
    """Wilson and Adams, Gaussian Process Kernels for Pattern Discovery and Extrapolation, 2013, equation 12."""
    w, mu, sd = as_node(weights), as_node(means), as_node(scales)
    count, dim, tau = w.dim, x.dim, sub(x, y)
    if mu.dim != count * dim or sd.dim != count * dim:
        raise ValueError(
            f"means and scales must have a row of {dim} numbers for each of the {count} weights; "
            f"got {mu.dim} and {sd.dim} numbers"
        )
    out: Number = 0.0
    for q in range(count):
        at = (q * dim, dim)
        width = apply("SqNorm2", mul(tau, apply("Extract", sd, params=at)))
        angle = mul(2 * math.pi, mul(tau, apply("Extract", mu, params=at)))
        term = mul(apply("Elem", w, params=(q,)), apply("Exp", mul(-2 * math.pi**2, width)))
        for d in range(dim):
            term = mul(term, apply("Cos", apply("Elem", angle, params=(d,))))
        out = add(out, term)
    return as_node(out)


def _dot(x: Node, y: Node) -> Node:
    return apply("Dot", x, y)


_GAMMA: dict[str, float | None] = {"gamma": None}
_SCALE: dict[str, float | None] = {"length_scale": 1.0}
KERNELS: dict[str, Row] = {
    k.name: k
    for k in (
        Row("linear", _dot, "x·y", aliases=("dot_product",)),
        Row("polynomial", _polynomial, "(gamma x·y + coef0)^degree", {**_GAMMA, "degree": 3.0, "coef0": 1.0},
            ("poly",), static=("degree",), free=("coef0",)),
        Row("sigmoid", _sigmoid, "tanh(gamma x·y + coef0)", {**_GAMMA, "coef0": 1.0}, free=("coef0",)),
        Row("cosine", lambda x, y: apply("Dot", unit(x), unit(y)), "cosine of the angle between x and y"),
        Row("rbf", _rbf, "exp(-gamma d²)", _GAMMA, ("gaussian",)),
        Row("laplacian", _laplacian, "exp(-gamma Σ|x - y|)", _GAMMA),
        Row("chi2", _chi2, "exp(-gamma Σ(x - y)²/(x + y)), for features >= 0", {"gamma": 1.0}),
        Row("additive_chi2", _additive_chi2, "-Σ(x - y)²/(x + y), for features >= 0"),
        Row("matern12", lambda x, y, length_scale: _matern(x, y, length_scale, 0.5), "exp(-d/length_scale)", _SCALE,
            ("exponential",)),
        Row("matern32", lambda x, y, length_scale: _matern(x, y, length_scale, 1.5),
            "(1 + r) exp(-r), r = √3 d/length_scale", _SCALE),
        Row("matern52", lambda x, y, length_scale: _matern(x, y, length_scale, 2.5),
            "(1 + r + r²/3) exp(-r), r = √5 d/length_scale", _SCALE),
        Row("rational_quadratic", _rational_quadratic, "(1 + d²/(2 alpha length_scale²))^-alpha",
            {**_SCALE, "alpha": 1.0}, ("rq",)),
        Row("cauchy", lambda x, y, length_scale: apply("Inv", add(1.0, _scaled_sqdist(x, y, length_scale))),
            "1 / (1 + d²/length_scale²)", _SCALE),
        Row("periodic", _periodic, "exp(-2 sin²(π d/periodicity)/length_scale²)", {**_SCALE, "periodicity": 1.0},
            ("exp_sine_squared",)),
        Row("squared_exponential", _squared_exponential, "exp(-d²/(2 length_scale²))", _SCALE),
        Row("matern", _matern, "Matérn of any nu; exp(-d/length_scale) for nu = 0.5, rougher below, smoother above",
            {**_SCALE, "nu": 1.5}, static=("nu",)),
        Row("laplace", _laplace, "exp(-Σ|x - y|/length_scale)", _SCALE),
        Row("harmonic", _harmonic, "cos(π d/periodicity); positive definite for one feature", {"periodicity": 1.0}),
        Row("piecewise_polynomial", wendland,
            "(1 - r)₊^(j+q) times a polynomial of degree q of r = d/length_scale, j = ⌊D/2⌋ + q + 1; 0 from r = 1 on",
            {**_SCALE, "q": 2}, static=("q",)),
        Row("weighted_linear", lambda x, y, variance: _dot(mul(x, variance), y), "Σ variance x y", {"variance": 1.0}),
        Row("affine", lambda x, y, sigma_0: add(mul(sigma_0, sigma_0), _dot(x, y)), "sigma_0² + x·y", {"sigma_0": 1.0},
            free=("sigma_0",)),
        Row("constant", lambda x, y, constant_value: as_node(constant_value), "constant_value",
            {"constant_value": 1.0}),
        Row("spectral_mixture", _spectral_mixture,
            "Σ_q weights_q exp(-2π² Σ(scales_q (x - y))²) Π cos(2π means_q (x - y))",
            {"weights": 1.0, "means": 1.0, "scales": 1.0}, free=("means",), matrices=("means", "scales")),
    )
}  # fmt: skip
#: Every accepted name -> canonical name.
KERNEL_NAMES: dict[str, str] = {n: k.name for k in KERNELS.values() for n in (k.name, *k.aliases)}


def lookup(name: str) -> Row:
    """The row called ``name``."""
    if not isinstance(name, str) or name not in KERNEL_NAMES:
        raise ValueError(f"kernel must be one of {', '.join(sorted(KERNEL_NAMES))}; got {name!r}")
    return KERNELS[KERNEL_NAMES[name]]


def complete(row: Row, given: Mapping[str, Any], n_features: int) -> dict[str, Any]:
    """``given`` with the defaults of what is missing; raises ``TypeError`` for what the kernel does not take."""
    unknown = sorted(set(given) - set(row.params))
    if unknown:
        takes = ", ".join(row.params) or "no parameters"
        raise TypeError(f"kernel {row.name!r} takes {takes}; got {', '.join(map(repr, unknown))}")
    params = {**row.params, **{k: v for k, v in given.items() if v is not None}}
    return {k: 1.0 / n_features if v is None else v for k, v in params.items()}


def kernel(name: str, x: Node, y: Node, **params: Number | None) -> Node:
    """The formula of a kernel of the table, for two points given as formulas.

    Parameters are numbers, or formulas such as a scalar variable; where one is missing or ``None``, it takes its
    default.

    Raises:
        ValueError: there is no such kernel.
        TypeError: the kernel has no such parameter.
    """
    row = lookup(name)
    return row.formula(x, y, **complete(row, params, x.dim))
