"""The symbolic front end: ``LazyTensor`` and ``Genred`` over NumPy, torch and CuPy arrays."""

from .complex import ComplexLazyTensor
from .genred import Genred, generic_argkmin, generic_argmin, generic_logsumexp, generic_sum
from .solve import KernelSolve
from .tensor import LazyTensor, Pm, Var, Vi, Vj

__all__ = [
    "ComplexLazyTensor",
    "Genred",
    "KernelSolve",
    "LazyTensor",
    "Pm",
    "Var",
    "Vi",
    "Vj",
    "generic_argkmin",
    "generic_argmin",
    "generic_logsumexp",
    "generic_sum",
]
