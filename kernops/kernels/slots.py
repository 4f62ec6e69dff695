"""Formulas of kernels together with their data, for callers that work on tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch

from ..formula.graph import CAT_I, CAT_J, CAT_P, CAT_SCALAR, Node, var
from ..lazy import LazyTensor


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
        out = scalar_formula(what, function(LazyTensor(x.unsqueeze(-2)), LazyTensor(y.unsqueeze(-3)), **params))
        self.values = list(out.frame.tensors)
        return out.formula


def scalar_formula(what: str, out: Any) -> LazyTensor:
    """What a user's function returned, if it is one number a pair."""
    if not isinstance(out, LazyTensor):
        raise TypeError(f"{what} must return a LazyTensor, made of the two that it is given; got {type(out).__name__}")
    if out.formula.dim != 1:
        raise ValueError(f"{what} must return one number a pair; got vectors of dimension {out.formula.dim}")
    return out
