"""The kernels by name: one line each, for a row of the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .kernel import Basic, Custom, Kernel
from .table import KERNELS, lookup

#: Constructor -> (row, defaults that differ from the row's). Arguments are called as in scikit-learn.
CONSTRUCTORS: dict[str, tuple[str, dict[str, Any]]] = {
    "RBF": ("squared_exponential", {}),
    "Matern": ("matern", {}),
    "RationalQuadratic": ("rational_quadratic", {}),
    "Periodic": ("periodic", {}),
    "Cosine": ("harmonic", {}),
    "Linear": ("weighted_linear", {}),
    "DotProduct": ("affine", {}),
    "Polynomial": ("polynomial", {"gamma": 1.0}),
    "Constant": ("constant", {}),
    "Laplacian": ("laplace", {}),
    "Cauchy": ("cauchy", {}),
    "PiecewisePolynomial": ("piecewise_polynomial", {}),
    "SpectralMixture": ("spectral_mixture", {}),
}

_DOC = """The kernel {formula}; a row of ``kernops.kernels.KERNELS``.

Args:
{args}

Lengths, variances and the like are positive numbers, lists or arrays of one for each feature, or tensors, by which
what is computed with the kernel can be differentiated: (1,) or (D,), with batch axes (*B, 1) or (*B, D).

Raises:
    ValueError: a parameter is not finite, is not positive where it has to be, or has not one number for each feature.
    TypeError: the kernel has no such parameter.
"""


def _constructor(name: str) -> Callable[..., Kernel]:
    row_name, changed = CONSTRUCTORS[name]
    row = KERNELS[row_name]
    names = tuple(row.params)

    def construct(*args: Any, **params: Any) -> Kernel:
        if len(args) > len(names):
            raise TypeError(f"{name} takes {', '.join(names)}; got {len(args)} arguments")
        twice = sorted(set(names[: len(args)]) & set(params))
        if twice:
            raise TypeError(f"{name}: {twice[0]} was given twice")
        return Basic(name, row, {**changed, **dict(zip(names, args)), **params})

    defaults = {**row.params, **changed}
    args = "\n".join(
        f"    {k}: default {v:g}{'; not differentiable' if k in row.static else ''}." for k, v in defaults.items()
    )
    construct.__name__ = construct.__qualname__ = name
    construct.__doc__ = _DOC.format(formula=row.doc, args=args)
    return construct


RBF = _constructor("RBF")
Matern = _constructor("Matern")
RationalQuadratic = _constructor("RationalQuadratic")
Periodic = _constructor("Periodic")
ExpSineSquared = Periodic  # scikit-learn's name
Cosine = _constructor("Cosine")
Linear = _constructor("Linear")
DotProduct = _constructor("DotProduct")
Polynomial = _constructor("Polynomial")
Constant = _constructor("Constant")
Laplacian = _constructor("Laplacian")
Cauchy = _constructor("Cauchy")
PiecewisePolynomial = _constructor("PiecewisePolynomial")
SpectralMixture = _constructor("SpectralMixture")


def custom(function: Callable[..., Any], **params: Any) -> Kernel:
    """A kernel of any formula.

    Args:
        function: ``function(x, y, **params)`` of two LazyTensors, rows (..., M, 1, D) and columns (..., 1, N, D),
            that returns a LazyTensor of one number a pair. Solvers take for granted that it is symmetric and positive
            semi-definite.
        params: passed on as they are: numbers, tensors of shape (D,), ...

    Example:
        >>> from kernops.kernels import Constant, custom
        >>> Constant(2.0) * custom(lambda x, y, s: (-(x - y).abs().sum(-1) / s).exp(), s=0.5)
        Constant(constant_value=2.0) * custom(<lambda>, s=0.5)
    """
    if not callable(function):
        raise TypeError(f"function must be a function of two LazyTensors; got {type(function).__name__}")
    return Custom(function, params)


def as_kernel(kernel: Any, **params: Any) -> Kernel:
    """What users call a kernel as a :class:`Kernel`.

    Args:
        kernel: a ``Kernel``, a scikit-learn kernel, the name of a row of ``KERNELS`` or a function of two LazyTensors.
        params: parameters, for a name or a function.
    """
    from .sklearn import from_sklearn, is_sklearn

    made = isinstance(kernel, Kernel) or is_sklearn(kernel)
    if made and params:
        raise TypeError(f"{', '.join(params)}: a kernel that is made already takes no parameters")
    if made:
        return kernel if isinstance(kernel, Kernel) else from_sklearn(kernel)
    if isinstance(kernel, str):
        row = lookup(kernel)
        return Basic(row.name, row, params)
    if callable(kernel):
        return custom(kernel, **params)
    raise TypeError(
        "kernel must be a kernel of kernops.kernels or of scikit-learn, the name of one, or a function of two "
        f"LazyTensors; got {type(kernel).__name__}"
    )
