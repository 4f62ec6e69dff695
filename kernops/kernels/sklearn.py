"""scikit-learn's kernel objects as kernels of ours. scikit-learn itself is not imported: objects say what they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import constructors as c
from .kernel import Basic, Kernel, Power, Product, Sum, White
from .table import lookup

Tensor = torch.Tensor

#: scikit-learn's class -> ours; the parameters have the same names.
TRANSLATIONS: dict[str, Callable[..., Kernel]] = {
    "ConstantKernel": c.Constant,
    "WhiteKernel": White,
    "RBF": c.RBF,
    "Matern": c.Matern,
    "RationalQuadratic": c.RationalQuadratic,
    "ExpSineSquared": c.Periodic,
    "DotProduct": c.DotProduct,
}
_HOME = "sklearn.gaussian_process.kernels"


def is_sklearn(kernel: Any) -> bool:
    """Whether ``kernel`` is an object of scikit-learn's Gaussian process kernels, or of a class derived from them."""
    return any(base.__module__ == _HOME for base in type(kernel).__mro__)


def from_sklearn(kernel: Any, theta: Tensor | None = None) -> Kernel:
    """A kernel object of scikit-learn, translated as it is.

    Args:
        kernel: of ``sklearn.gaussian_process.kernels``: any but ``CompoundKernel`` and ``PairwiseKernel`` of a metric
            that ``kernops.kernels.KERNELS`` does not have.
        theta: logarithms of the hyper-parameters that are not fixed, (n,), in the order of ``kernel.theta``, by which
            what is computed with the kernel can be differentiated; ``kernel.bounds`` are theirs. ``None`` takes the
            values that the object has.

    Raises:
        TypeError: it is no such object, or of a class that scikit-learn does not define; or ``theta`` is no tensor.
        ValueError: ``theta`` has another length than ``kernel.theta``.

    Example:
        >>> from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
        >>> from kernops.kernels import from_sklearn
        >>> from_sklearn(ConstantKernel(2.0) * RBF([1.0, 0.5]) + WhiteKernel(0.1))
        Constant(constant_value=2.0) * RBF(length_scale=[1.0, 0.5]) + White(noise_level=0.1)
    """
    if not is_sklearn(kernel):
        raise TypeError(f"kernel must be a kernel object of scikit-learn; got {type(kernel).__name__}")
    if theta is not None and not isinstance(theta, Tensor):
        raise TypeError(f"theta must be a torch tensor, or None; got {type(theta).__name__}")
    if theta is not None and tuple(theta.shape) != kernel.theta.shape:
        raise ValueError(f"theta must have shape {kernel.theta.shape}, as kernel.theta has; got {tuple(theta.shape)}")
    return _translate(kernel, None if theta is None else _Reader(theta.exp()))


class _Reader:
    """Hands out values one after the other."""

    def __init__(self, values: Tensor) -> None:
        self.values, self.place = values, 0

    def take(self, count: int) -> Tensor:
        self.place += count
        return self.values[self.place - count : self.place]


def _translate(kernel: Any, values: _Reader | None) -> Kernel:
    name = type(kernel).__name__
    if type(kernel).__module__ != _HOME:
        raise TypeError(f"{name} is derived from a kernel of scikit-learn, and may compute something else than it does")
    if name in ("Sum", "Product"):
        left, right = _translate(kernel.k1, values), _translate(kernel.k2, values)
        return Sum(left, right) if name == "Sum" else Product(left, right)
    if name == "Exponentiation":
        return Power(_translate(kernel.kernel, values), kernel.exponent)
    params = _parameters(kernel, values)
    if name == "PairwiseKernel":
        return _pairwise(kernel, params)
    if name not in TRANSLATIONS:
        known = ", ".join((*TRANSLATIONS, "PairwiseKernel", "Sum", "Product", "Exponentiation"))
        raise TypeError(f"scikit-learn's {name} has no translation; there is one for {known}")
    return TRANSLATIONS[name](**params)


def _parameters(kernel: Any, values: _Reader | None) -> dict[str, Any]:
    """The parameters of a kernel that has no kernels in it, those that are not fixed from ``values``."""
    params = {k: v for k, v in kernel.get_params().items() if not k.endswith("_bounds")}
    if values is not None:
        for h in kernel.hyperparameters:  # in the order of theta
            if not h.fixed:
                params[h.name] = values.take(h.n_elements)
    return params


def _pairwise(kernel: Any, params: dict[str, Any]) -> Kernel:
    if callable(kernel.metric) or kernel.pairwise_kernels_kwargs:
        raise TypeError("PairwiseKernel with a function or pairwise_kernels_kwargs has no translation; use custom")
    row, gamma = lookup(kernel.metric), params["gamma"]
    if "gamma" in row.params:
        return Basic(row.name, row, {"gamma": gamma})
    out = Basic(row.name, row, {})
    return c.Constant(1 + 0 * gamma) * out if isinstance(gamma, Tensor) else out  # with a derivative of 0 by gamma
