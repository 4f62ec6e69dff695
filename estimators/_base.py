"""What the estimators share: checks of parameters and data, and the way to the engine and back."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np
import torch

from ..kernels import KERNEL_NAMES, KERNELS
from ..lazy.arrays import to_tensor

#: dtypes that are computed as they come; anything else is converted to the first.
FLOATS = (np.float64, np.float32)


class OneOf(NamedTuple):
    """A parameter that is one of a few values, a function if ``functions`` are allowed, or of one of ``kinds``."""

    values: tuple[Any, ...]
    functions: bool = False
    kinds: tuple[type, ...] = ()

    def holds(self, value: Any) -> bool:
        value = value.item() if isinstance(value, np.generic) else value  # out of a grid of parameters
        known = value in self.values if isinstance(value, str) else any(value is v for v in self.values)
        return known or (self.functions and callable(value)) or isinstance(value, self.kinds)

    def __str__(self) -> str:
        more = (["a callable"] if self.functions else []) + [f"a {kind.__name__}" for kind in self.kinds]
        return " or ".join(["one of " + ", ".join(map(repr, self.values)), *more])


class Within(NamedTuple):
    """A parameter that is a number (a whole one for ``kind=Integral``) of at least or above ``low``."""

    low: float
    closed: bool = True
    kind: type = Real
    or_none: bool = False

    def holds(self, value: Any) -> bool:
        if value is None:
            return self.or_none
        if not isinstance(value, Real) or not isinstance(value, self.kind) or isinstance(value, bool):
            return False
        number = float(value)
        return np.isfinite(number) and (number >= self.low if self.closed else number > self.low)

    def __str__(self) -> str:
        what = "an integer" if self.kind is Integral else "a number"
        return f"{what} {'>=' if self.closed else '>'} {self.low:g}" + (" or None" if self.or_none else "")


COUNT = Within(1, kind=Integral)
#: What scikit-learn takes, so that its code runs unchanged; the results are exact whatever is said.
TREES = OneOf(("auto", "brute", "kd_tree", "ball_tree"))


def check_parameters(estimator: Any, rules: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for a parameter that breaks its rule; ``TypeError`` where a number is of the wrong type."""
    for name, rule in rules.items():
        value = getattr(estimator, name)
        if not rule.holds(value):
            wrong_type = isinstance(rule, Within) and not (isinstance(value, rule.kind) and not isinstance(value, bool))
            error = TypeError if wrong_type else ValueError
            raise error(f"{name} of {type(estimator).__name__} must be {rule}; got {value!r}")


def numbers(name: str, value: Any, dtype: Any) -> np.ndarray:
    """A parameter that is a number or numbers, with at least one axis."""
    try:
        return np.atleast_1d(np.asarray(value, dtype=dtype))
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be a number or an array of numbers; got {value!r}") from error


def check_features(X: np.ndarray, kernel: Any) -> None:
    """Raise ``ValueError`` for features that are below what a kernel, if it is called by its name, is defined for."""
    least = KERNELS[KERNEL_NAMES[kernel]].least if isinstance(kernel, str) else -np.inf
    if (least > X).any():
        raise ValueError(f"kernel {kernel!r} is of features >= {least:g}; X has {X.min():g}")


def forget(estimator: Any, *names: str) -> None:
    """Drop what an earlier ``fit`` found, so that one that fails leaves no mixture of both."""
    for name in names:
        vars(estimator).pop(name, None)


def device_of(device: Any) -> torch.device:
    """The torch device that a ``device`` parameter names; "auto" is the GPU where there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device must be 'auto', 'cpu', 'cuda' or another torch device; got {device!r}") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={device!r}: torch finds no CUDA device here; use 'auto' or 'cpu'")
    return chosen


def tensors(device: Any, *arrays: np.ndarray) -> tuple[torch.Tensor, ...]:
    """The arrays as tensors of their common dtype on a device."""
    dtype = np.result_type(*arrays)
    where = device_of(device)
    return tuple(to_tensor(a.astype(dtype, copy=False), "X")[0].to(where) for a in arrays)


def array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy()
