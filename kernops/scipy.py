"""Matrices of kernels for SciPy: ``scipy.sparse.linalg.cg``, ``eigsh``, ``svds`` and the like run on them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scipy.sparse import linalg

from .lazy import LazyTensor
from .lazy.arrays import to_tensor
from .operators import KernelOperator, LinearOperator

Tensor = torch.Tensor

#: dtypes that SciPy's solvers compute in.
DTYPES = {torch.float32: np.dtype(np.float32), torch.float64: np.dtype(np.float64)}


def aslinearoperator(a: Any, x: Any = None, y: Any = None, **settings: Any) -> linalg.LinearOperator:
    """A matrix as a ``scipy.sparse.linalg.LinearOperator``; it is never stored.

    Args:
        a: an operator of ``kernops.operators``; a LazyTensor of one number a pair, of torch or NumPy data; or, together
            with points, a kernel in any of the forms that ``KernelOperator`` takes.
        x: points of the rows (M, D), NumPy or torch.
        y: points of the columns (N, D); None for x itself.
        settings: passed on to ``KernelOperator``.

    Returns:
        An operator of shape (M, N) on NumPy arrays, with ``matvec``, ``matmat``, ``rmatvec``, ``rmatmat`` and ``T``.
        Vectors are converted to the data's dtype, complex ones part by part; data on a GPU stay there, and vectors
        travel.

    Raises:
        ValueError: the matrix has batch dimensions, or is neither float32 nor float64.
        TypeError: ``a`` is none of these.

    Example:
        >>> from scipy.sparse.linalg import eigsh
        >>> from kernops.kernels import RBF
        >>> from kernops.scipy import aslinearoperator
        >>> eigsh(aslinearoperator(RBF(), np.zeros((4, 2))), k=1, return_eigenvectors=False)
        array([4.])
    """
    if isinstance(a, LinearOperator):
        if x is not None or y is not None or settings:
            raise TypeError("an operator has its points already; x, y and settings must not be given")
        return _Adapter(a)
    if isinstance(a, LazyTensor):
        return _Adapter(KernelOperator(_as_torch(a), **settings))
    x, y = (t if t is None or isinstance(t, Tensor) else to_tensor(t, name)[0] for name, t in (("x", x), ("y", y)))
    return _Adapter(KernelOperator(a, x, y, **settings))


def _as_torch(lazy: LazyTensor) -> LazyTensor:
    """The same formula with its arrays seen as tensors."""
    frame = lazy.frame.settled()
    some = next((t for t in frame.tensors if isinstance(t, Tensor)), None)
    space = frame.space if some is None else to_tensor(some, "a")[1]
    return LazyTensor(lazy.formula, frame.replace(space=space))


class _Adapter(linalg.LinearOperator):
    def __init__(self, operator: LinearOperator) -> None:
        if operator.batch:
            raise ValueError(f"SciPy's operators have no batch dimensions; this one has shape {operator.shape}")
        if operator.dtype not in DTYPES:
            raise ValueError(f"SciPy computes in float32 and float64; the operator is {operator.dtype}")
        self.operator = operator
        super().__init__(DTYPES[operator.dtype], operator.shape)

    @torch.no_grad()
    def _matmat(self, v: np.ndarray) -> np.ndarray:
        if np.iscomplexobj(v):
            return self._matmat(np.real(v)) + 1j * self._matmat(np.imag(v))
        op = self.operator
        return (op @ torch.as_tensor(np.asarray(v, dtype=self.dtype), device=op.device)).cpu().numpy()

    def _matvec(self, v: np.ndarray) -> np.ndarray:
        return self._matmat(np.reshape(v, -1))

    def _adjoint(self) -> linalg.LinearOperator:
        return _Adapter(self.operator.T)

    _transpose = _adjoint
