"""What every operator can do: algebra, products, and the linear algebra that is written with products alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch

from ..backends.layout import broadcast
from ..solvers.implicit import pull_back
from .indices import numbers, read

if TYPE_CHECKING:
    from .solving import Preconditioner

Tensor = torch.Tensor


class LinearOperator(ABC):
    """A matrix (*B, M, N) that is known by its products, and by what it is made of.

    Operators are immutable, and differentiable in the tensors that they were made of. ``+``, ``-``, ``*`` (with a
    number, a tensor of one, or of the batch's shape) and ``@`` give operators again; ``A @ v`` and ``A.matmul(v)`` for
    a tensor v give a tensor.

    Attributes:
        shape: (*B, M, N).
        dtype, device: of the tensors.
        symmetric: whether the matrix is known to be symmetric: what ``solve``, ``logdet`` and the like need.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    symmetric: bool
    __array_ufunc__ = None  # else NumPy's numbers would make an array of what they are multiplied with

    # --- what a class of operators defines ------------------------------------------------------------------------
    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """What the operator is made of, and can be differentiated by."""

    @abstractmethod
    def with_tensors(self, tensors: Sequence[Tensor]) -> LinearOperator:
        """The same operator of other tensors, of the same shapes."""

    @abstractmethod
    def _matmul(self, v: Tensor) -> Tensor:
        """The product with v (*B', N, E), whose batch shape broadcasts with ours."""

    @abstractmethod
    def _transposed(self) -> LinearOperator: ...

    @abstractmethod
    def _diagonal(self) -> Tensor:
        """The diagonal (*B, N) of a square matrix."""

    @abstractmethod
    def to_dense(self) -> Tensor:
        """The matrix as a tensor (*B, M, N)."""

    def _row(self, index: Tensor) -> Tensor:
        """Row ``index`` of each symmetric matrix, (*B', N) for an index (*B',) to whose shape B broadcasts."""
        one = torch.zeros(*index.shape, self.shape[-1], dtype=self.dtype, device=self.device)
        return self._matmul(one.scatter_(-1, index[..., None], 1.0)[..., None])[..., 0]

    def _split(self) -> tuple[LinearOperator | None, Tensor | None]:
        """A positive semi-definite part and a diagonal (*B, N), whose sum the operator is."""
        return self, None

    def _elements(self, i: Tensor, j: Tensor) -> Tensor:
        """The elements at rows ``i`` and columns ``j``, (S,) each: (*B, S)."""
        one = torch.zeros(self.shape[-1], len(j), dtype=self.dtype, device=self.device)
        one[j, torch.arange(len(j), device=self.device)] = 1.0
        columns = self._matmul(one)
        return columns.gather(-2, i.expand(*columns.shape[:-2], 1, len(i)))[..., 0, :]

    def _columns(self, index: Tensor) -> Tensor:
        """The columns (*B, M, S) of numbers (S,): by rows where these are known without a product."""
        if self.symmetric and type(self)._row is not LinearOperator._row:
            each = index.reshape(-1, *[1] * len(self.batch)).expand(-1, *self.batch)
            return self._row(each).movedim(0, -1)
        one = torch.zeros(self.shape[-1], len(index), dtype=self.dtype, device=self.device)
        return self._matmul(one.scatter_(0, index[None], 1.0)).expand(*self.shape[:-1], len(index))

    def _principal(self, index: Tensor) -> Tensor:
        """The elements (*B, S, S) at these rows and columns, of numbers (S,)."""
        return self._columns(index).index_select(-2, index)

    def _block(self, rows: Tensor, columns: Tensor) -> LinearOperator:
        """The rows and columns of these numbers."""
        from .blocks import SelectedOperator

        return SelectedOperator(self, rows, columns)

    def _bilinear(self, u: Tensor, v: Tensor, needed: Sequence[bool]) -> list[Tensor | None]:
        """The gradient of Σ uᵀ A v, over the columns of u and v, by each of ``tensors`` where it is ``needed``.

        Not to be differentiated. Classes that know it without the product A v say so.
        """

        def product(tensors: Sequence[Any], v: Tensor) -> tuple[Tensor]:
            return (self.with_tensors(tensors)._matmul(v),)

        return pull_back(product, self.tensors, v, (u,), needed)

    # --- what follows from that -----------------------------------------------------------------------------------
    @property
    def batch(self) -> tuple[int, ...]:
        """The batch shape *B."""
        return self.shape[:-2]

    @property
    def T(self) -> LinearOperator:
        """The transposed operator."""
        return self if self.symmetric else self._transposed()

    mT = T

    def matmul(self, v: Tensor) -> Tensor:
        """The product with a vector (N,), or with vectors (..., N, E): (..., M) or (..., M, E).

        Raises:
            TypeError: v is no tensor.
            ValueError: v has another number of rows, dtype or device than the operator has columns, dtype and device.
        """
        v, vector = self._vectors("v", v, self.shape[-1])
        out = self._matmul(v)
        return out[..., 0] if vector else out

    def rmatmul(self, v: Tensor) -> Tensor:
        """The transposed product: ``A.T @ v`` for v (M,) or (..., M, E)."""
        return self.T.matmul(v)

    def __matmul__(self, other: Any) -> Any:
        if isinstance(other, LinearOperator):
            from .structured import ProductOperator

            return ProductOperator(self, other)
        return self.matmul(other)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """``v @ A`` and ``2 * A`` of tensors."""
        name = getattr(func, "__name__", "").strip("_")
        if len(args) == 2 and isinstance(args[1], cls) and not isinstance(args[0], cls):
            v, operator = args
            if name in ("matmul", "rmatmul"):
                out = operator.T.matmul(v if v.ndim == 1 else v.mT)
                return out if v.ndim == 1 else out.mT
            if name in ("mul", "rmul"):
                return operator * v
        raise TypeError(f"torch.{name} does not take an operator; use its methods, or to_dense()")

    def diagonal(self) -> Tensor:
        """The diagonal, (*B, N)."""
        self._need_square("diagonal")
        return self._diagonal()

    def trace(self) -> Tensor:
        """The sum of the diagonal, (*B,): exact, in O(N)."""
        self._need_square("trace")
        return self._diagonal().sum(-1)

    def __mul__(self, other: Any) -> LinearOperator:
        from .structured import ScaledOperator

        if isinstance(other, (Real, Tensor)) and not isinstance(other, bool):
            return ScaledOperator(self, other)  # type: ignore[arg-type]
        return NotImplemented

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> LinearOperator:
        return self * (1.0 / other)

    def __neg__(self) -> LinearOperator:
        return self * -1.0

    def __add__(self, other: Any) -> LinearOperator:
        from .structured import SumOperator

        if isinstance(other, LinearOperator):
            return SumOperator(self, other)
        if isinstance(other, Real):
            raise TypeError("a number cannot be added to an operator: add_diagonal(number), or a Constant kernel")
        return NotImplemented

    def __radd__(self, other: Any) -> LinearOperator:
        """``sum`` of operators begins with 0."""
        return self if isinstance(other, Real) and other == 0 else self + other

    def __sub__(self, other: Any) -> LinearOperator:
        return self + (-other)

    def add_diagonal(self, diagonal: float | Tensor) -> LinearOperator:
        """A + D.

        Args:
            diagonal: a number or a tensor of one, for D = diagonal · I; or a tensor (*B, N), or (*B, 1) for a number
                that each matrix of a batch has for itself.

        Raises:
            ValueError: the operator is not square, or the diagonal does not fit.
        """
        from .structured import DiagonalOperator

        return self + DiagonalOperator(self._diagonal_like(diagonal))

    def _diagonal_like(self, diagonal: float | Tensor) -> Tensor:
        self._need_square("add_diagonal")
        if isinstance(diagonal, Real) and not isinstance(diagonal, bool):
            diagonal = torch.tensor(float(diagonal), dtype=self.dtype, device=self.device)
        if not isinstance(diagonal, Tensor):
            raise TypeError(f"diagonal must be a number or a tensor; got {type(diagonal).__name__}")
        self._need_like("diagonal", diagonal)
        n = self.shape[-1]
        if diagonal.ndim == 0:
            diagonal = diagonal[None]
        if diagonal.shape[-1] not in (1, n):
            raise ValueError(f"diagonal must be a number or have shape (..., {n}); got {tuple(diagonal.shape)}")
        return diagonal.expand(*diagonal.shape[:-1], n)

    # --- indexing -------------------------------------------------------------------------------------------------
    def __getitem__(self, key: Any) -> Any:
        """Rows and columns, ``A[rows, columns]``, also ``A[..., rows, columns]``; the batch axes stay.

        A slice, or numbers beside a slice (a tensor, an array or a list, or a mask), keeps its axis: an operator. One
        number takes one row or column: a tensor. Two tensors of numbers (S,) are elements, (*B, S), as with tensors.
        """
        sizes = self.shape[-2:]
        rows, columns = (read(k, size, self.device) for k, size in zip(self._key(key), sizes))
        if isinstance(rows, Tensor) and isinstance(columns, Tensor):
            if rows.shape != columns.shape:
                raise ValueError(f"two lists of indices must have one shape; got {(len(rows),)}, {(len(columns),)}")
            return self._elements(rows, columns)
        if rows == slice(None) and columns == slice(None):
            return self
        i, j = (numbers(k, size, self.device) for k, size in zip((rows, columns), sizes))
        one_row, one_column = (isinstance(k, int) for k in (rows, columns))
        if one_row and one_column:
            return self._elements(i, j)[..., 0]
        block = self._block(i, j)
        if one_row or one_column:
            return block.to_dense().squeeze(-2 if one_row else -1)
        return block

    def _key(self, key: Any) -> tuple[Any, Any]:
        key = key if isinstance(key, tuple) else (key,)
        lead = len(self.batch)
        if key and key[0] is Ellipsis:
            key = key[1:]
        elif lead:
            if len(key) < lead or any(not (isinstance(k, slice) and k == slice(None)) for k in key[:lead]):
                raise ValueError(f"an operator of batch shape {self.batch} is indexed as A[..., rows, columns]")
            key = key[lead:]
        if len(key) > 2:
            raise ValueError(f"an operator has rows and columns; got {len(key)} indices")
        rows, columns = [*key, slice(None), slice(None)][:2]
        return rows, columns

    # --- linear algebra -------------------------------------------------------------------------------------------
    def preconditioner(self, kind: str = "pivoted_cholesky", rank: int | None = None, seed: int = 0) -> Preconditioner:
        """An approximate inverse, to be used for several calls: see :func:`kernops.operators.make_preconditioner`."""
        from .solving import make_preconditioner

        return make_preconditioner(self, kind, rank, seed)

    def solve(
        self,
        b: Tensor,
        *,
        tol: float = 1e-6,
        max_iter: int | None = None,
        preconditioner: Any = "auto",
        x0: Tensor | None = None,
        method: str = "auto",
        return_report: bool = False,
    ) -> Any:
        """x with A x = b, differentiable to any order in b and in what A is made of.

        Up to 2,000 rows by Cholesky's decomposition of the dense matrix; above by preconditioned conjugate gradients,
        each right-hand side with its own step lengths and end. A derivative is one more solve.

        Args:
            b: right-hand sides (N,) or (..., N, E).
            tol: conjugate gradients end where |b - A x| <= tol |b|, for each right-hand side.
            max_iter: most iterations; None for 10 N, and no more than 10 000.
            preconditioner: ``"auto"`` and ``"pivoted_cholesky"``, ``"nystrom"``, ``None``, or what
                ``preconditioner()`` made before.
            x0: where conjugate gradients start, of the shape of b; None for 0.
            method: ``"auto"``, ``"cholesky"`` or ``"cg"``.
            return_report: return ``(x, Report)``.

        Returns:
            x, of the shape of b with the broadcast batch; with ``return_report``, what was done, too.

        Raises:
            ValueError: the operator is not known to be symmetric, b does not fit, or there are NaN or infinite numbers.
            NotPositiveDefiniteError: A has a negative eigenvalue, beyond rounding.

        Warns:
            ConvergenceWarning: a residual is above ``tol``; the message says how large it is, and what to change.
            NumericalWarning: Cholesky's decomposition needed a larger diagonal; the message says by how much.

        Example:
            >>> from kernops.kernels import RBF
            >>> from kernops.operators import KernelOperator
            >>> x = torch.linspace(0, 1, 3, dtype=torch.float64)[:, None]
            >>> A = KernelOperator(RBF(), x).add_diagonal(1.0)
            >>> A @ A.solve(torch.ones(3, dtype=torch.float64))
            tensor([1.0000, 1.0000, 1.0000], dtype=torch.float64)
        """
        from .solving import Settings, solve

        settings = Settings(tol, max_iter, preconditioner, method)
        x, report = solve(self, b, x0, settings)
        return (x, report) if return_report else x

    def inv_quad_logdet(
        self,
        b: Tensor | None = None,
        *,
        n_probes: int = 10,
        n_short: int = 0,
        seed: int = 0,
        tol: float = 1e-6,
        max_iter: int | None = None,
        preconditioner: Any = "auto",
        method: str = "auto",
        return_report: bool = False,
    ) -> Any:
        """Σ bᵀ A⁻¹ b over the right-hand sides, and log det A: what a Gaussian process' likelihood is made of.

        Above 2,000 rows both come from one run of conjugate gradients, on b and on ``n_probes`` random vectors z of
        covariance P, the preconditioner: log det A = log det P + E[log-quadratic form of P^-½ A P^-½] by stochastic
        Lanczos quadrature, and its derivative E[(A⁻¹z)ᵀ dA (P⁻¹z)] (Gardner, Pleiss, Bindel, Weinberger and Wilson,
        GPyTorch, 2018, sections 4 and 4.1), less E[(P⁻¹z)ᵀ dP (P⁻¹z)] - tr(P⁻¹ dP) = 0 for a pivoted Cholesky
        decomposition without batch, which takes most of the noise away (Wenger, Pleiss, Hennig, Cunningham and
        Gardner, 2022). Where the standard error of log det A is above 2·10⁻⁴ N, more vectors are taken three steps far
        (multilevel Monte Carlo: Giles, 2015): as many as a third of the work allows, or 2·10⁶/N. The random
        vectors depend on ``seed`` alone. Derivatives of every order.

        Args:
            b: (N,) or (..., N, E); None for the determinant alone.
            n_probes: how many random vectors; the error falls with its square root, and with the preconditioner.
            n_short: least number of vectors that are taken a few steps far, where these tell enough. An optimizer that
                passes on what ``Report.n_short`` said sees one function, of which no part comes and goes.
            seed: of the random vectors.
            tol, max_iter, preconditioner, method, return_report: as for :meth:`solve`.

        Returns:
            ``(inv_quad, logdet)``, each (*B,); with ``return_report`` a third, with the standard error of ``logdet``.
        """
        from .likelihood import inv_quad_logdet
        from .solving import Settings

        settings = Settings(tol, max_iter, preconditioner, method, n_probes, seed, n_short)
        inv_quad, logdet, report = inv_quad_logdet(self, b, settings)
        return (inv_quad, logdet, report) if return_report else (inv_quad, logdet)

    def logdet(self, **settings: Any) -> Any:
        """log det A (*B,), with the arguments of :meth:`inv_quad_logdet`; with ``return_report`` and the report."""
        _, *out = self.inv_quad_logdet(None, **settings)
        return tuple(out) if len(out) > 1 else out[0]

    def sqrt_matmul(self, b: Tensor, *, tol: float = 1e-4, max_iter: int = 200) -> Tensor:
        """A^½ b: a sample of N(0, A) for each column of standard normal numbers b, (N,) or (..., N, E).

        By Lanczos' method with full orthogonalisation; memory for ``max_iter`` vectors for each column, a few columns
        at a time. Differentiable once, by the Krylov spaces of b and of the gradient (Kressner, A Krylov subspace
        method for the approximation of bivariate matrix functions, 2019).

        Args:
            b: (N,) or (..., N, E).
            tol: the iteration ends where the result changes by less than this share in 5 steps.
            max_iter: most products with A.

        Raises:
            NotPositiveDefiniteError: A has a negative eigenvalue, beyond rounding.

        Warns:
            ConvergenceWarning: the result still changed by more than ``tol``.
        """
        from .spectral import sqrt_matmul

        return sqrt_matmul(self, b, tol, max_iter)

    def eigsh(
        self, k: int = 6, *, largest: bool = True, tol: float | None = None, max_iter: int = 500, seed: int = 0
    ) -> tuple[Tensor, Tensor]:
        """The k largest (or smallest) eigenvalues (*B, k), outermost first, and their eigenvectors (*B, N, k).

        Dense up to 2,000 rows, by block Lanczos above. Differentiable once: by the eigenvectors if the gradient does
        not depend on their signs, nor on the choice among equal eigenvalues.

        Args:
            k: how many.
            largest: False for the smallest; those of a kernel's matrix lie close together and are found slowly.
            tol: residual |A u - λ u| relative to the outermost eigenvalue; None for 1e-8, in float32 1e-4.
            max_iter: most products with A, of k + 4 vectors each.
            seed: of the vectors that it starts from.

        Warns:
            ConvergenceWarning: a residual is above ``tol``.
        """
        from .spectral import eigsh

        return eigsh(self, k, largest, tol, max_iter, seed)

    # --- checks ---------------------------------------------------------------------------------------------------
    def _vectors(self, name: str, v: Any, rows: int) -> tuple[Tensor, bool]:
        """An argument as vectors (..., rows, E), and whether it was a single vector."""
        if not isinstance(v, Tensor):
            raise TypeError(
                f"{name} must be a torch tensor; got {type(v).__name__} (kernops.scipy.aslinearoperator takes arrays)"
            )
        self._need_like(name, v)
        vector = v.ndim == 1
        if v.ndim == 0 or v.shape[-1 if vector else -2] != rows:
            raise ValueError(f"{name} must have shape ({rows},) or (..., {rows}, E); got {tuple(v.shape)}")
        try:
            broadcast([self.batch, tuple(v.shape[:-2])])
        except ValueError:
            raise ValueError(
                f"{name}: batch shapes {self.batch} of the operator and {tuple(v.shape[:-2])} do not broadcast"
            ) from None
        return v[:, None] if vector else v, vector

    def _need_like(self, name: str, t: Tensor) -> None:
        if t.dtype != self.dtype:
            raise ValueError(f"{name} must have the operator's dtype {self.dtype}; got {t.dtype}")
        if t.device != self.device:
            raise ValueError(f"{name} must be on the operator's device {self.device}; got {t.device}")

    def _need_square(self, what: str) -> None:
        if self.shape[-1] != self.shape[-2]:
            raise ValueError(f"{what} needs a square operator; this one has shape {self.shape}")

    def _need_symmetric(self, what: str) -> None:
        self._need_square(what)
        if not self.symmetric:
            raise ValueError(
                f"{what} needs an operator that is known to be symmetric, such as KernelOperator(kernel, x) of points "
                "with themselves"
            )

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{type(self).__name__} of shape {self.shape}, {dtype}, {self.device}"

    def __len__(self) -> int:
        return self.shape[0]

    __iter__ = None  # else Python would try A[0], A[1], ...
