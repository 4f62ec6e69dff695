"""What can go wrong with a linear system, and the precision that inner products are accumulated in."""

from __future__ import annotations

import torch

Tensor = torch.Tensor


class ConvergenceWarning(UserWarning):
    """An iteration ended less accurately than asked for."""


class NumericalWarning(UserWarning):
    """A matrix was changed, by as much as the message says, to make a computation possible."""


class NotPositiveDefiniteError(torch.linalg.LinAlgError):
    """A matrix that has to be positive definite has a negative eigenvalue."""


def check_floats(name: str, b: Tensor) -> None:
    """Raise ``ValueError`` unless ``b`` has a dtype that linear systems can be solved in."""
    if b.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"{name} must be float32 or float64, the dtypes that a linear system can be solved in; got {b.dtype}"
        )


def wide(a: Tensor) -> Tensor:
    """``a`` in float64, where the device has it."""
    return a if a.dtype == torch.float64 or a.device.type == "mps" else a.double()


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Scalar products of columns, accumulated in float64: (*B, N, E), (*B, N, E) -> (*B, E)."""
    return (wide(a) * wide(b)).sum(-2)


def norm(a: Tensor) -> Tensor:
    """Euclidean norms of columns, (*B, N, E) -> (*B, E)."""
    return torch.linalg.vector_norm(a, dim=-2)
