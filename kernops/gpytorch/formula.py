"""A kernel of any formula, with parameters that GPyTorch learns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gpytorch
import torch

from ..kernels import Kernel
from ..kernels.kernel import as_parameter
from ..kernels.slots import scalar_formula
from ..lazy import LazyTensor
from .base import KernopsKernel

Tensor = torch.Tensor


class FormulaKernel(KernopsKernel):
    """A kernel that a function of two LazyTensors writes.

    Args:
        function: ``function(x, y, **parameters)`` of rows x (..., M, 1, D), columns y (..., 1, N, D) and parameters,
            LazyTensors all, that returns one number a pair. That it is symmetric and positive semi-definite is taken
            for granted. For kernels that are to be pickled, a function of a module.
        parameters: names and first values: a number, or numbers (K,) such as one for each feature. Each is learnt under
            the name ``raw_<name>``, and read and set as an attribute, as GPyTorch's own are.
        constraints: name -> constraint of GPyTorch's; without one a parameter is positive.
        batch_shape: shape of a batch of kernels, each of which has its own parameters.
        active_dims: features that the kernel reads; None for all.

    Raises:
        TypeError: ``function`` cannot be called, or returns no LazyTensor.
        ValueError: a parameter has more than one axis, the name of an attribute, or a constraint but no value.

    Example:
        >>> def laplace(x, y, scale):
        ...     return (-(x - y).abs().sum(-1) / scale).exp()
        >>> kernel = FormulaKernel(laplace, {"scale": 0.5})
        >>> kernel.scale = 2.0
        >>> round(kernel(torch.zeros(1, 1), torch.ones(1, 1)).to_dense().item(), 4)
        0.6065
    """

    def __init__(
        self,
        function: Callable[..., Any],
        parameters: Mapping[str, Any] | None = None,
        *,
        constraints: Mapping[str, Any] | None = None,
        batch_shape: torch.Size | None = None,
        active_dims: Any = None,
    ) -> None:
        super().__init__(batch_shape=batch_shape, active_dims=active_dims)
        if not callable(function):
            raise TypeError(f"function must be a function of two LazyTensors; got {type(function).__name__}")
        parameters, constraints = dict(parameters or {}), dict(constraints or {})
        unknown = sorted(set(constraints) - set(parameters))
        if unknown:
            raise ValueError(f"constraints: there is no parameter {unknown[0]!r}; there are {', '.join(parameters)}")
        self.function = function
        self.names: tuple[str, ...] = ()
        self.free = tuple(parameters)  # constraints alone say what is in their range
        for name, value in parameters.items():
            if not isinstance(name, str) or not name.isidentifier() or hasattr(self, name):
                raise ValueError(f"parameters: {name!r} cannot be the name of a parameter, it has a meaning already")
            start = torch.as_tensor(value, dtype=torch.get_default_dtype())
            if start.ndim > 1:
                raise ValueError(f"{name} must be a number or numbers (K,); got shape {tuple(start.shape)}")
            start = start.reshape(-1).expand(*self.batch_shape, start.numel())
            self.register_parameter(f"raw_{name}", torch.nn.Parameter(torch.zeros(start.shape)))
            self.register_constraint(f"raw_{name}", constraints.get(name) or gpytorch.constraints.Positive())
            self.names += (name,)
            setattr(self, name, start)

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("names", ()):
            return getattr(self, f"raw_{name}_constraint").transform(getattr(self, f"raw_{name}"))
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dict__.get("names", ()):
            super().__setattr__(name, value)
            return
        raw = getattr(self, f"raw_{name}")
        value = torch.as_tensor(value, dtype=raw.dtype, device=raw.device)
        self.initialize(**{f"raw_{name}": getattr(self, f"raw_{name}_constraint").inverse_transform(value)})

    def _formula_parameters(self) -> Mapping[str, Tensor]:
        return {name: getattr(self, name) for name in self.names}

    def _written(self, features: int, values: Mapping[str, Any]) -> Kernel:
        return _Function(self.function, values)


class _Function(Kernel):
    """A function of LazyTensors, of the points and of parameters."""

    def __init__(self, function: Callable[..., Any], params: Mapping[str, Tensor]) -> None:
        self.function, self.params = function, params

    def formula(self, x: LazyTensor, y: LazyTensor) -> LazyTensor:
        given = {k: as_parameter(v, x, 1) for k, v in self.params.items()}
        return scalar_formula("function", self.function(x, y, **given))
