"""Linear systems of kernels: ``LazyTensor.solve`` and ``KernelSolve``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..formula.graph import CAT_I, CAT_J, CAT_P, Node
from ..solvers import conjugate_gradients, implicit_solve
from . import options
from .arrays import give_back, kind_of
from .engine import reduce, request
from .frame import VIEWS, Binder, Frame, Symbol, broadcast, merge
from .genred import over_i as _over_i
from .genred import read
from .nodes import build, variable
from .views import renamed, single, source

Tensor = torch.Tensor
_SOLVER_OPTIONS = ("alpha", "eps", "max_iter")


class Solver:
    """The system ``alpha a + sum of f = b`` for a formula f that is linear in a, with a symmetric positive matrix.

    The value that the frame has for the unknown's number is the right-hand side.
    """

    __slots__ = ("formula", "frame", "unknown", "over_i", "settings", "request", "bind")

    def __init__(self, formula: Node, frame: Frame, unknown: int, over_i: bool, settings: dict[str, Any]) -> None:
        options.check(settings, _SOLVER_OPTIONS)
        self.formula, self.frame, self.unknown, self.over_i, self.settings = formula, frame, unknown, over_i, settings
        self.request = request("Sum", formula, None, 0, len(frame.tensors), over_i)
        self.bind = Binder(frame)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        options.check(kwargs, _SOLVER_OPTIONS)
        settings = {**self.settings, **kwargs}
        frame = self.bind(args) if self.frame.loose or args else self.frame
        assert frame.space is not None  # the right-hand side is an array
        options.check_device(settings.get("device_id", -1), frame.space.device)
        backend = options.backend_for(settings.get("backend") or frame.backend, frame.space.device)
        system = _System(self.request, frame, self.unknown, backend, settings)
        x = implicit_solve(system.product, system.solve, system.right_hand_side(), frame.tensors)
        return give_back(x, frame.space.kind)

    def __reduce__(self) -> tuple:
        return Solver, (self.formula, self.frame, self.unknown, self.over_i, self.settings)

    def __repr__(self) -> str:
        return f"solve for variable {self.unknown}: sum over {'i' if self.over_i else 'j'} of {self.formula}"


class _System:
    """A linear system with its data."""

    def __init__(self, req: Any, frame: Frame, unknown: int, backend: str, settings: dict[str, Any]) -> None:
        self.plan, self.frame, self.unknown, self.backend = req.plan, frame, unknown, backend
        self.alpha = _not_negative("alpha", settings.get("alpha", 1e-10))
        self.eps = _not_negative("eps", settings.get("eps", 1e-6))
        self.max_iter = settings.get("max_iter")
        self.m, self.n = req.rows(frame)
        if self.m != self.n:
            raise ValueError(f"solve: the matrix must be square; got {self.m} rows and {self.n} columns")

    def right_hand_side(self) -> Tensor:
        b = self.frame.tensors[self.unknown]
        if not isinstance(b, Tensor):
            raise TypeError(f"solve: the right-hand side must be an array; got {type(b).__name__}")
        if b.shape[-1] != self.plan.dim:
            raise ValueError(
                f"solve: the right-hand side must have {self.plan.dim} column(s), as the formula has; got {b.shape[-1]}"
            )
        return b.expand(*self.frame.batch, *b.shape[-2:])

    def product(self, values: Sequence[Any], v: Tensor) -> Tensor:
        """The matrix applied to ``v``."""
        data = [*values[: self.unknown], v, *values[self.unknown + 1 :]]
        out = reduce(self.plan, data, self.m, self.n, self.backend, self.frame.batch)[0]
        return out + self.alpha * v if self.alpha else out

    def solve(self, values: Sequence[Any], b: Tensor) -> Tensor:
        """The solution for the right-hand side ``b``, by conjugate gradients."""
        return conjugate_gradients(lambda v: self.product(values, v), b, tol=self.eps, max_iter=self.max_iter).x


def _not_negative(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise ValueError(f"{name} must be a number >= 0; got {value!r}")
    return float(value)


def solve(k: Any, other: Any, unknown: Any, call: bool, **settings: Any) -> Any:
    """``LazyTensor.solve``."""
    from .tensor import LazyTensor

    if not isinstance(other, LazyTensor):
        if kind_of(other) is None:
            raise TypeError(f"solve: the right-hand side must be an array or a variable; got {type(other).__name__}")
        vector = other.ndim == 1
        right = LazyTensor(other[:, None] if vector else other, 0)
        if vector and isinstance(other, Tensor):
            right.frame = right.frame.through(other, single)
        found = solve(k, right, unknown, call, **settings)
        return found[..., 0] if vector and call and not isinstance(found, Solver) else found
    cat = other.axis
    if cat not in (CAT_I, CAT_J):
        raise ValueError("solve: the right-hand side must be a variable of rows or of columns, Vi(b) or Vj(b)")
    # The unknown is summed over: it lies along the other axis than the result.
    own, rows = 1 - cat, other.frame.m if cat == CAT_I else other.frame.n
    ends: dict[str, Any] = {"m": None, "n": rows} if own == CAT_J else {"m": rows, "n": None}
    if unknown is None:
        data = other.frame.replace(cats=(own,), **ends)
        frame, numbers = merge(k.frame, data, "solve")
        # A right-hand side that is also data of the matrix must not be exchanged there with the unknown.
        if numbers is None or numbers[0] < len(k.frame.tensors):
            data = _renamed(data)
            frame, numbers = merge(k.frame, data, "solve")
        place = numbers[0] if numbers is not None else 0
        formula = build("Mul", (), k.formula, variable(own, other.ndim, place))
    else:
        if not isinstance(unknown, LazyTensor) or not unknown.symbolic_variables or not unknown.formula.is_var:
            raise ValueError("solve: var must be a symbolic variable that the formula contains, such as Vj(0, dim)")
        symbol = unknown.frame.tensors[0]
        pairs = list(zip(k.frame.tensors, k.frame.cats))
        place = next((p for p, pair in enumerate(pairs) if pair == (symbol, own)), -1)
        if place < 0:
            raise ValueError(
                "solve: var must be a symbolic variable of the formula, along the axis that is summed over"
            )
        given = list(k.frame.for_batch)
        given[place] = other.frame.for_batch[0]
        loose, batch = any(isinstance(t, Symbol) for t in given), broadcast(k.frame.batch, other.frame.batch, "solve")
        frame = k.frame.replace(given=tuple(given), form=VIEWS, batch=batch, loose=loose)
        frame, _ = merge(frame, Frame(batch=other.frame.batch, space=other.frame.space, **ends), "solve")
        formula = k.formula
    solver = Solver(formula, frame, place, own == CAT_I, settings)
    return solver() if call and not solver.bind.count else solver


def _renamed(data: Frame) -> Frame:
    """The same data, not to be known for the same."""
    value = source(data.given[0])
    return data.through(value, renamed) if isinstance(value, Tensor) else data


class KernelSolve:
    """Solves ``alpha a + sum of formula(a) = b`` for a by conjugate gradients.

    Args:
        formula: linear in the variable ``varinvalias``, with a symmetric positive definite matrix.
        aliases: what the names are, as for :class:`Genred`.
        varinvalias: name of the unknown; at the call, the right-hand side b is given in its place.
        axis: 0 if the formula is summed over i, 1 if it is summed over j.
        options: pykeops' keyword arguments about accumulation, as for :class:`Genred`.

    The call takes the arrays and ``alpha`` (ridge regularization, default 1e-10), ``eps`` (relative residual at which a
    column of b is solved, default 1e-6), ``max_iter`` and ``backend``. Columns that do not converge are reported by a
    ``kernops.solvers.ConvergenceWarning``.
    """

    def __init__(
        self, formula: str, aliases: Sequence[str], varinvalias: str, axis: int = 0, **settings: Any
    ) -> None:  # fmt: skip
        options.check(settings)
        over_i = _over_i(axis)
        names, (f, v), frame = read(formula, aliases, varinvalias)
        assert f is not None and v is not None
        if not v.is_var or v.params[0] == CAT_P or v.params[0] != (CAT_I if over_i else CAT_J):
            raise ValueError(
                f"varinvalias must name a variable along the axis that is summed over, {'Vi' if over_i else 'Vj'}; "
                f"got {varinvalias!r}, {v}"
            )
        self._solver = Solver(f, frame, v.params[1], over_i, {})  # type: ignore[arg-type]
        self._text = (formula, tuple(aliases), varinvalias, axis)

    def __call__(self, *args: Any, **settings: Any) -> Any:
        """The solution for these arrays, as an array of their kind."""
        return self._solver(*args, **settings)

    def __repr__(self) -> str:
        formula, aliases, unknown, axis = self._text
        return f"KernelSolve({formula!r}, {list(aliases)!r}, {unknown!r}, axis={axis})"

    def __reduce__(self) -> tuple:
        return KernelSolve, self._text
