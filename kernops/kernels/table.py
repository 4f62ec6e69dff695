"""Covariance functions written as formulas: one table, one row each.

A row's function takes the two points as formulas, and its parameters as numbers or formulas, and returns the formula
of the kernel. ``kernel("rbf", x, y, gamma=0.5)`` picks a row by name. Nothing here computes anything: what a formula
is worth on data, back ends say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch

from .formula.graph import CAT_I, CAT_J, CAT_P, CAT_SCALAR, Node, var
from .formula.ops import add, apply, div, mul, neg, power, sub, total
from .lazy import LazyTensor

Number = Node | float


@dataclass(frozen=True)
class Kernel:
    """One row of the table.

    Attributes:
        name: the name used in messages and in the documentation.
        formula: ``formula(x, y, **params)``, the kernel of two points.
        doc: the kernel in one line; d is the Euclidean distance.
        params: name -> default; ``None`` stands for one divided by the number of features, as in scikit-learn.
        aliases: other names.
        static: parameters that shape the formula itself, so that each value is compiled on its own.
    """

    name: str
    formula: Callable[..., Node]
    doc: str
    params: Mapping[str, float | None] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    static: tuple[str, ...] = ()


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


def _matern(x: Node, y: Node, length_scale: Number, nu2: int) -> Node:
    """Matérn of ν = nu2 / 2: exp(-r) times a polynomial of r = sqrt(2ν) d / length_scale."""
    r = apply("Sqrt", mul(float(nu2), _scaled_sqdist(x, y, length_scale)))
    decay = apply("Exp", neg(r))
    if nu2 == 1:
        return decay
    poly = add(1.0, r) if nu2 == 3 else add(add(1.0, r), div(power(r, 2), 3.0))
    return mul(poly, decay)


def _rational_quadratic(x: Node, y: Node, length_scale: Number, alpha: Number) -> Node:
    ratio = div(_scaled_sqdist(x, y, length_scale), mul(2.0, alpha))
    return apply("Exp", neg(mul(alpha, apply("Log1p", ratio))))


def _periodic(x: Node, y: Node, length_scale: Number, periodicity: Number) -> Node:
    angle = mul(math.pi, apply("Sqrt", _scaled_sqdist(x, y, periodicity)))
    return apply("Exp", mul(-2.0, power(div(apply("Sin", angle), length_scale), 2)))


_GAMMA: dict[str, float | None] = {"gamma": None}
_SCALE: dict[str, float | None] = {"length_scale": 1.0}
KERNELS: dict[str, Kernel] = {
    k.name: k
    for k in (
        Kernel("linear", lambda x, y: apply("Dot", x, y), "x·y", aliases=("dot_product",)),
        Kernel("polynomial", _polynomial, "(gamma x·y + coef0)^degree", {**_GAMMA, "degree": 3.0, "coef0": 1.0},
               ("poly",), static=("degree",)),
        Kernel("sigmoid", _sigmoid, "tanh(gamma x·y + coef0)", {**_GAMMA, "coef0": 1.0}),
        Kernel("cosine", lambda x, y: apply("Dot", unit(x), unit(y)), "cosine of the angle between x and y"),
        Kernel("rbf", _rbf, "exp(-gamma d²)", _GAMMA, ("gaussian",)),
        Kernel("laplacian", _laplacian, "exp(-gamma Σ|x - y|)", _GAMMA),
        Kernel("chi2", _chi2, "exp(-gamma Σ(x - y)²/(x + y)), for features >= 0", {"gamma": 1.0}),
        Kernel("additive_chi2", _additive_chi2, "-Σ(x - y)²/(x + y), for features >= 0"),
        Kernel("matern12", lambda x, y, length_scale: _matern(x, y, length_scale, 1), "exp(-d/length_scale)", _SCALE,
               ("exponential",)),
        Kernel("matern32", lambda x, y, length_scale: _matern(x, y, length_scale, 3),
               "(1 + r) exp(-r), r = √3 d/length_scale", _SCALE),
        Kernel("matern52", lambda x, y, length_scale: _matern(x, y, length_scale, 5),
               "(1 + r + r²/3) exp(-r), r = √5 d/length_scale", _SCALE),
        Kernel("rational_quadratic", _rational_quadratic, "(1 + d²/(2 alpha length_scale²))^-alpha",
               {**_SCALE, "alpha": 1.0}, ("rq",)),
        Kernel("cauchy", lambda x, y, length_scale: apply("Inv", add(1.0, _scaled_sqdist(x, y, length_scale))),
               "1 / (1 + d²/length_scale²)", _SCALE),
        Kernel("periodic", _periodic, "exp(-2 sin²(π d/periodicity)/length_scale²)", {**_SCALE, "periodicity": 1.0},
               ("exp_sine_squared",)),
    )
}  # fmt: skip
#: Every accepted name -> canonical name.
KERNEL_NAMES: dict[str, str] = {n: k.name for k in KERNELS.values() for n in (k.name, *k.aliases)}


def lookup(name: str) -> Kernel:
    """The row called ``name``."""
    if not isinstance(name, str) or name not in KERNEL_NAMES:
        raise ValueError(f"kernel must be one of {', '.join(sorted(KERNEL_NAMES))}; got {name!r}")
    return KERNELS[KERNEL_NAMES[name]]


def complete(row: Kernel, given: Mapping[str, Any], n_features: int) -> dict[str, Any]:
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


# --- formulas with their data -----------------------------------------------------------------------------------------
class Slots:
    """Allots variable numbers, and remembers the value that each stands for.

    Numbers become scalar variables, which are passed by value: a new bandwidth compiles nothing.
    """

    def __init__(self, values: Sequence[Any] = ()) -> None:
        self.values: list[Any] = list(values)

    def _add(self, cat: int, dim: int, value: torch.Tensor | float) -> Node:
        self.values.append(value)
        return var(cat, len(self.values) - 1, dim)

    def rows(self, x: torch.Tensor) -> Node:
        """An i-variable (*B, M, D)."""
        return self._add(CAT_I, x.shape[-1], x)

    def columns(self, y: torch.Tensor) -> Node:
        """A j-variable (*B, N, D)."""
        return self._add(CAT_J, y.shape[-1], y)

    def parameter(self, value: Any, like: torch.Tensor) -> Node:
        """A number, or a vector that is the same for every pair."""
        if isinstance(value, Real):
            return self._add(CAT_SCALAR, 1, float(value))
        tensor = torch.as_tensor(value, dtype=like.dtype, device=like.device).reshape(-1)
        return self._add(CAT_P, tensor.numel(), tensor)

    def parameters(self, params: Mapping[str, Any], like: torch.Tensor, static: tuple[str, ...] = ()) -> dict[str, Any]:
        """``params`` with every value that is not static replaced by a variable."""
        return {k: v if k in static else self.parameter(v, like) for k, v in params.items()}

    def of_function(
        self, what: str, function: Callable[..., Any], x: torch.Tensor, y: torch.Tensor, params: Mapping[str, Any]
    ) -> Node:
        """The formula of a user's function of two LazyTensors (rows x, columns y). The slots must be unused."""
        out = function(LazyTensor(x.unsqueeze(-2)), LazyTensor(y.unsqueeze(-3)), **params)
        if not isinstance(out, LazyTensor):
            raise TypeError(
                f"{what} must return a LazyTensor, made of the two that it is given; got {type(out).__name__}"
            )
        if out.formula.dim != 1:
            raise ValueError(f"{what} must return one number a pair; got vectors of dimension {out.formula.dim}")
        self.values = list(out.frame.tensors)
        return out.formula
