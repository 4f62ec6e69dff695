"""From a formula, its data and the name of a reduction to numbers.

A ``Request`` says what is asked for and knows how; requests are cached, so that a repeated call finds its plan by one
look-up. Reductions that are more than one core (mean, var, weighted logsumexp ...) are requests made of requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ..autograd import reduce
from ..autograd.tracing import cached, make_plan
from ..formula.graph import CAT_I, CAT_J, CAT_SCALAR, Node
from ..formula.reductions import CORES, REDUCTION_NAMES, REDUCTIONS
from .arrays import Space, give_back
from .frame import VIEWS, Frame
from .nodes import ZERO, build, swapped, variable, weighted

Tensor = torch.Tensor
Result = Any  # a tensor or a tuple of tensors


class Request:
    """A reduction of one formula (and a weight), over j or over i, by one core."""

    __slots__ = ("plan", "over_i", "sign", "returns", "k", "squeeze", "name", "fixed_shape", "as_is")

    def __init__(self, name: str, f: Node, weight: Node | None, k: int, n_vars: int, over_i: bool) -> None:
        row = REDUCTIONS[name]
        if row.takes_k != (k > 0):
            raise ValueError(f"{name}: K must be a whole number >= 1" if row.takes_k else f"{name} takes no K; got {k}")
        if over_i:
            f, weight = swapped(f), None if weight is None else swapped(weight)
        self.name = name
        self.plan = make_plan(row.core, f if row.sign == 1 else build("Neg", (), f), weight, k, n_vars)
        self.over_i = over_i
        self.sign = row.sign
        outputs = CORES[row.core].outputs
        self.returns = tuple(outputs.index(o) for o in row.returns)
        self.k = k
        self.squeeze = k > 0 and self.plan.dim == 1
        self.fixed_shape = len(self.plan.variables) == n_vars
        #: Whether the result is what the back end gives.
        self.as_is = outputs == row.returns and row.sign == 1 and not self.squeeze and self.fixed_shape

    def rows(self, frame: Frame) -> tuple[int, int]:
        """Numbers of results and of terms; an axis without variables has length 1."""
        m, n = (frame.n, frame.m) if self.over_i else (frame.m, frame.n)
        return 1 if m is None else m, 1 if n is None else n

    def __call__(self, frame: Frame, backend: str) -> Result:
        m, n = (frame.n, frame.m) if self.over_i else (frame.m, frame.n)
        if m is None or n is None:
            m, n = self.rows(frame)
        if n < self.k or n == 0:
            self.check_length(m, n)
        tensors = frame.given if frame.form < VIEWS else frame.tensors
        outs = reduce(self.plan, tensors, m, n, backend, frame.batch, frame.fresh)
        if self.as_is:
            return outs[0] if len(outs) == 1 else outs
        if len(self.returns) == 1:
            return self.finish(outs[self.returns[0]], self.returns[0], frame)
        return tuple(self.finish(outs[r], r, frame) for r in self.returns)

    def finish(self, out: Tensor, output: int, frame: Frame) -> Tensor:
        if self.sign < 0 and output == 0:
            out = -out
        if self.squeeze:
            out = out.squeeze(-1)
        return out if self.fixed_shape or not frame.batch else self.spread(out, frame)

    def spread(self, out: Tensor, frame: Frame) -> Tensor:
        """Batch axes of variables that dropped out of the formula, as in the derivative of what is linear in them."""
        own = 3 if self.k and not self.squeeze else 2
        return out.expand(*frame.batch, *out.shape[out.ndim - own :])

    def check_length(self, m: int, n: int) -> None:
        what, size = ("i", "M") if self.over_i else ("j", "N")
        if n < self.k:
            raise ValueError(
                f"{self.name}: K must be at most the number of terms, {size} = {n} (over {what}); got K = {self.k}"
            )
        if n == 0 and m > 0 and CORES[self.plan.core].empty is None:
            raise ValueError(f"{self.name} over {what} has no value where there are no terms, {size} = 0")


Run = Callable[[Frame, str], Result]


class Composed:
    """A reduction that torch finishes. It is written for a reduction over j; over i the frame is turned first."""

    __slots__ = ("run", "over_i")

    def __init__(self, run: Run, over_i: bool) -> None:
        self.run = run
        self.over_i = over_i

    def __call__(self, frame: Frame, backend: str) -> Result:
        return self.run(frame.swapped() if self.over_i else frame, backend)


def _averaged(f: Node, n_vars: int) -> Request:
    """The sum of f times a scalar: divided before it is rounded to the data's dtype, which float16 could not hold."""
    return request("Sum", build("Mul", (), f, variable(CAT_SCALAR, 1, n_vars)), None, 0, n_vars + 1, False)


def _average(total: Request, frame: Frame, backend: str, correction: float) -> Tensor:
    n = total.rows(frame)[1]
    scale = 1.0 / (n - correction) if n > correction else math.inf  # 0 · inf: the NaN of one term about its mean
    out = total(frame.replace(tensors=(*frame.tensors, scale), cats=(*frame.cats, CAT_SCALAR)), backend)
    return out if n else out * math.nan


def _mean(f: Node, weight: None, n_vars: int, option: float) -> Run:
    total = _averaged(f, n_vars)
    return lambda frame, backend: _average(total, frame, backend, 0)


def _var(f: Node, weight: None, n_vars: int, option: float) -> Run:
    """Two passes, the second about the mean that the first has found: no cancellation."""
    mean = _mean(f, None, n_vars, 0)
    deviation = build("Sub", (), f, variable(CAT_I, f.dim, n_vars))
    second = _averaged(build("Square", (), deviation), n_vars + 1)

    def run(frame: Frame, backend: str) -> Tensor:
        middle = mean(frame, backend)
        m, n = second.rows(frame)
        frame = frame.replace(tensors=(*frame.tensors, middle), cats=(*frame.cats, CAT_I), m=m, n=n)
        return _average(second, frame, backend, option)

    return run


def _std(f: Node, weight: None, n_vars: int, option: float) -> Run:
    variance = _var(f, None, n_vars, option)
    return lambda frame, backend: variance(frame, backend).sqrt()


def _weighted_lse(f: Node, weight: Node, n_vars: int, option: float) -> Run:
    """log Σ exp(f) g = log Σ exp(f) + log of the softmax-weighted mean of g."""
    both = request("SumSoftMaxWeight", f, weight, 0, n_vars, False)

    def run(frame: Frame, backend: str) -> Tensor:
        m, n = both.rows(frame)
        mean, lse = reduce(both.plan, frame.tensors, m, n, backend, frame.batch)
        mean = torch.where(lse == -torch.inf, torch.ones_like(mean), mean)  # no term: log 0, and not NaN
        return both.finish(lse + mean.log(), 0, frame)

    return run


#: float32 counts exactly up to here; longer ranges are counted in parts.
_EXACT = 1 << 24


def _count(f: Node, weight: None, n_vars: int, option: float) -> Run:
    """The number of terms that are not 0, exact whatever the dtype and the number of terms."""
    total = request("Sum", build("NotEqual", (), f, ZERO), None, 0, n_vars, False)

    def run(frame: Frame, backend: str) -> Tensor:
        n = total.rows(frame)[1]
        frame = frame.replace(tensors=tuple(_not_half(t) for t in frame.tensors))
        parts = (_columns(frame, j, min(_EXACT, n - j)) for j in range(0, max(n, 1), _EXACT))
        outs = [total(part, backend).round().to(torch.int64) for part in parts]
        return outs[0] if len(outs) == 1 else torch.stack(outs).sum(0)

    return run


def _not_half(t: Any) -> Any:
    return t.float() if isinstance(t, Tensor) and t.itemsize == 2 else t


def _columns(frame: Frame, start: int, length: int) -> Frame:
    if frame.n in (None, length):
        return frame
    pairs = zip(frame.tensors, frame.cats)
    tensors = tuple(t.narrow(-2, start, length) if c == CAT_J and isinstance(t, Tensor) else t for t, c in pairs)
    return frame.replace(tensors=tensors, n=length)


def _truth(name: str) -> Callable[..., Run]:
    """``any`` or ``all`` as the largest or the smallest of 0 and 1; the identity of an empty range falls out right."""

    def compose(f: Node, weight: None, n_vars: int, option: float) -> Run:
        extreme = request(name, build("NotEqual", (), f, ZERO), None, 0, n_vars, False)
        return lambda frame, backend: extreme(frame, backend) > 0

    return compose


#: Name -> how the reduction is made of others.
COMPOSED: dict[str, Callable[..., Run]] = {
    "Mean": _mean,
    "Var": _var,
    "Std": _std,
    "LogSumExpWeight": _weighted_lse,
    "CountNonzero": _count,
    "Any": _truth("Max"),
    "All": _truth("Min"),
}
#: Other names of reductions in ``Genred``.
ALIASES = {"SoftMax": "SumSoftMaxWeight"}


@cached(maxsize=1 << 12)
def request(
    name: str, f: Node, weight: Node | None, k: int, n_vars: int, over_i: bool, option: float = 0.0
) -> Any:  # fmt: skip
    """The request for a reduction, the same object for the same reduction.

    Raises:
        ValueError: no such reduction, or its parts do not fit.
    """
    name = ALIASES.get(name, name)
    name = REDUCTION_NAMES.get(name, name)
    if name == "LogSumExp" and weight is not None:
        name = "LogSumExpWeight"
    if name in COMPOSED:
        if (name == "LogSumExpWeight") != (weight is not None):
            raise ValueError(f"{name} {'needs a' if weight is None else 'takes no'} weight formula")
        if k:
            raise ValueError(f"{name} takes no K; got {k}")
        if over_i:
            f, weight = swapped(f), None if weight is None else swapped(weight)
        return Composed(COMPOSED[name](f, weight, n_vars, option), over_i)
    if name not in REDUCTIONS:
        known = ", ".join(sorted({*REDUCTIONS, *COMPOSED}))
        raise ValueError(f"reduction_op must be one of {known}; got {name!r}")
    return Request(name, f, weight, k, n_vars, over_i)


@cached(maxsize=1 << 12)
def weighted_sum(f: Node, dim: int, number: int, n_vars: int) -> Any:
    """The request for the sum over j of ``f`` times variable ``number``, a vector of each column."""
    return request("Sum", weighted(f, dim, number), None, 0, n_vars, False)


def place(out: Any, result: Result, space: Space) -> Any:
    """Write ``result`` into the caller's ``out`` and return that."""
    if isinstance(result, tuple):
        if not isinstance(out, (tuple, list)) or len(out) != len(result):
            raise ValueError(
                f"out must be a tuple of {len(result)} arrays for this reduction; got {type(out).__name__}"
            )
        return tuple(place(o, r, space) for o, r in zip(out, result))
    back = give_back(result, space.kind)
    if type(out) is not type(back) and not (isinstance(out, Tensor) and isinstance(back, Tensor)):
        raise TypeError(f"out must be a {type(back).__name__}, as the data are; got {type(out).__name__}")
    for what in ("shape", "dtype", "device"):
        got, want = getattr(out, what, None), getattr(back, what, None)
        if got != want:
            raise ValueError(f"out must have {what} {_text(want)}; got {_text(got)}")
    if isinstance(out, Tensor):
        return out.copy_(back)
    out[...] = back
    return out


def _text(x: object) -> str:
    return str(tuple(x) if isinstance(x, tuple) else x).removeprefix("torch.")
