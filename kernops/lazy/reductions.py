"""The reductions of ``LazyTensor``: one method for each row of the table, and those that torch finishes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..autograd.tracing import is_dynamo_compiling
from ..formula.graph import CAT_I, CAT_J, Node
from ..formula.ops import OPS
from ..formula.reductions import CORES, REDUCTIONS
from . import options
from .arrays import give_back, to_tensor
from .engine import place, request
from .frame import Binder, Frame, merge
from .nodes import ZERO, build, moved, variable, whole

if TYPE_CHECKING:
    from .tensor import LazyTensor

I_AXIS, J_AXIS, VECTOR = 0, 1, 2


def execute(req: Any, frame: Frame, backend: str | None, out: Any = None, device_id: Any = -1) -> Any:
    """The result of a request on settled data, as arrays of the data's kind."""
    if frame.loose:
        frame = Binder(frame)(())
    space = frame.space
    if space is None:
        raise ValueError("a reduction needs at least one array; got only numbers")
    if device_id != -1:
        options.check_device(device_id, space.device)
    result = req(frame, "auto" if backend is None or backend == "auto" else options.backend_for(backend, space.device))
    if out is not None:
        return place(out, result, space)
    return result if space.kind == "torch" else give_back(result, space.kind)


class Reduced:
    """A reduction that waits for its call: what ``call=False``, or symbolic variables, make of a ``LazyTensor``.

    It is called with one array for each symbolic variable, in the order of their numbers.
    """

    __slots__ = ("parts", "frame", "settings", "request", "bind")

    def __init__(self, parts: tuple, frame: Frame, settings: dict[str, Any]) -> None:
        self.parts = parts
        self.frame = frame
        self.settings = settings
        name, f, weight, k, over_i, option = parts
        self.request = request(name, f, weight, k, len(frame.tensors), over_i, option)
        self.bind = Binder(frame)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        settings = self.settings
        if kwargs:
            options.check(kwargs)
            settings = {**settings, **kwargs}
        frame = self.bind(args)
        if not settings:
            return execute(self.request, frame, frame.backend)
        backend = settings.get("backend") or frame.backend
        return execute(self.request, frame, backend, settings.get("out"), settings.get("device_id", -1))

    def __reduce__(self) -> tuple:
        return Reduced, (self.parts, self.frame, self.settings)

    def __repr__(self) -> str:
        name, f, weight, k, over_i, _ = self.parts
        lines = [f"{name} over {'i' if over_i else 'j'} of {f}"]
        lines += [f"    weight: {weight}"] if weight is not None else []
        lines += [f"    K: {k}"] if k else []
        return "\n".join([*lines, f"    takes {self.bind.count} argument(s)"])


class Softmax:
    """Exponentials divided by their sum over one axis; ``@`` applies them to vectors in a single pass."""

    __slots__ = ("logits", "axis")

    def __init__(self, logits: LazyTensor, axis: int) -> None:
        self.logits = logits
        self.axis = axis

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """``torch.compile`` comes here for ``softmax @ tensor``, with its operands exchanged."""
        if func.__name__ == "matmul" and len(args) == 2 and is_dynamo_compiling():
            return args[1].__matmul__(args[0])
        raise TypeError(f"torch.{func.__name__} does not take a softmax of a LazyTensor; only softmax @ v is defined")

    @property
    def lazy(self) -> LazyTensor:
        """The same as a ``LazyTensor``, at the cost of a pass for the sums."""
        x = self.logits
        frame = x.frame
        lse, space = to_tensor(x._reduce("LogSumExp", self.axis, None, 0, {}), "logsumexp")
        m, n = (frame.m, None) if self.axis == J_AXIS else (None, frame.n)
        cat = CAT_I if self.axis == J_AXIS else CAT_J
        sums = x._new(variable(cat, 1), Frame((lse,), (cat,), m, n, frame.batch, space))
        return (x - sums).exp()  # type: ignore[operator]

    def __matmul__(self, v: Any) -> Any:
        if self.axis == I_AXIS:
            return self.lazy @ v
        weight, vector = self.logits._columns(v, "Softmax @ v")
        out = self.logits._reduce("SumSoftMaxWeight", J_AXIS, weight, 0, {})
        return out[..., 0] if vector else out


class ReductionMethods:
    """What ``LazyTensor`` inherits: reductions, over rows, columns or the vector as ``axis`` says."""

    __slots__ = ()
    formula: Node
    frame: Frame

    def _axis(self, name: str, axis: Any, dim: Any, vector: bool) -> int:
        """0 (over i), 1 (over j) or 2 (over the vector) for the axis that the caller wrote, batch axes first."""
        if dim is not None:
            axis = dim
        batch = len(self.frame.batch)
        if axis is not None:
            axis = axis if type(axis) is int else whole(name, "axis", axis)
            own = VECTOR if axis == -1 else axis - batch
            if own in (I_AXIS, J_AXIS) or (vector and own == VECTOR):
                return own
        accepted = f"{batch} (over i) or {batch + 1} (over j)"
        if vector:
            accepted = f"{batch} (over i), {batch + 1} (over j), {batch + 2} or -1 (over the vector)"
        shape = self._shape  # type: ignore[attr-defined]
        raise ValueError(f"{name}: axis must be {accepted} for shape {shape}; got {axis!r}")

    def _reduce(
        self, name: str, axis: int, weight: LazyTensor | None, k: int, settings: dict[str, Any], option: float = 0.0
    ) -> Any:
        """The reduction over i (axis 0) or j (axis 1)."""
        frame, g = self.frame, None
        if weight is not None:
            frame, numbers = merge(frame, weight.frame, name)
            g = weight.formula if numbers is None else moved(weight.formula, numbers)
        if settings:
            options.check(settings)
        if frame.loose or frame.space is None or settings.get("call") is False:
            kept = {key: v for key, v in settings.items() if key != "call"}
            waiting = Reduced((name, self.formula, g, k, axis == I_AXIS, option), frame, kept)
            return waiting if settings.get("call") is False or waiting.bind.count or frame.space is None else waiting()
        req = request(name, self.formula, g, k, len(frame.given), axis == I_AXIS, option)
        if not settings:
            return execute(req, frame, frame.backend)
        backend = settings.get("backend") or frame.backend
        return execute(req, frame, backend, settings.get("out"), settings.get("device_id", -1))

    def _weight(self, weight: Any, name: str) -> LazyTensor:
        lifted = self._lift(weight, name)  # type: ignore[attr-defined]
        if lifted.is_complex:
            raise NotImplementedError(f"{name}: complex weights are not available yet")
        return lifted

    def reduction(
        self,
        reduction_op: str,
        other: Any = None,
        opt_arg: Any = None,
        axis: Any = None,
        dim: Any = None,
        **settings: Any,
    ) -> Any:
        """The reduction named as in ``Genred``: ``other`` is the weight and ``opt_arg`` is K where there is one."""
        weight = None if other is None else self._weight(other, reduction_op)
        k = 0 if opt_arg is None else _count(reduction_op, opt_arg)
        return self._reduce(reduction_op, self._axis(reduction_op, axis, dim, False), weight, k, settings)

    def logsumexp(self, axis: Any = None, dim: Any = None, weight: Any = None, **settings: Any) -> Any:
        """log of the sum of exp(x), or of exp(x) times ``weight``, over i or j; never overflowing."""
        g = None if weight is None else self._weight(weight, "logsumexp")
        return self._reduce("LogSumExp", self._axis("logsumexp", axis, dim, False), g, 0, settings)

    logsumexp_reduction = logsumexp

    def softmax(self, axis: Any = None, dim: Any = None) -> Softmax:
        """exp(x) divided by its sum over j or i; to be applied with ``@``."""
        return Softmax(self, self._axis("softmax", axis, dim, False))  # type: ignore[arg-type]

    def mean(self, axis: Any = -1, dim: Any = None, **settings: Any) -> Any:
        """The mean over i, j or the vector."""
        own = self._axis("mean", axis, dim, True)
        return self._reduce("Mean", own, None, 0, settings) if own != VECTOR else self._vector("VectorMean")

    def var(self, axis: Any = -1, dim: Any = None, correction: float = 0.0, **settings: Any) -> Any:
        """The variance over i, j or the vector: the sum of squared deviations by their number - ``correction``."""
        own = self._axis("var", axis, dim, True)
        if own != VECTOR:
            return self._reduce("Var", own, None, 0, settings, float(correction))
        return self._vector("VectorVar", float(correction))

    def std(self, axis: Any = -1, dim: Any = None, correction: float = 0.0, **settings: Any) -> Any:
        """The standard deviation, the square root of ``var``."""
        own = self._axis("std", axis, dim, True)
        if own != VECTOR:
            return self._reduce("Std", own, None, 0, settings, float(correction))
        return self._vector("VectorVar", float(correction)).sqrt()

    def count_nonzero(self, axis: Any = -1, dim: Any = None, **settings: Any) -> Any:
        """How many values are not 0: int64 over i or j, a ``LazyTensor`` over the vector."""
        own = self._axis("count_nonzero", axis, dim, True)
        return self._reduce("CountNonzero", own, None, 0, settings) if own != VECTOR else self._nonzero("Sum")

    def any(self, axis: Any = -1, dim: Any = None, **settings: Any) -> Any:
        """Whether some value is not 0: bool over i or j, a ``LazyTensor`` of 0 and 1 over the vector."""
        own = self._axis("any", axis, dim, True)
        return self._reduce("Any", own, None, 0, settings) if own != VECTOR else self._nonzero("Max")

    def all(self, axis: Any = -1, dim: Any = None, **settings: Any) -> Any:
        """Whether no value is 0: bool over i or j, a ``LazyTensor`` of 0 and 1 over the vector."""
        own = self._axis("all", axis, dim, True)
        return self._reduce("All", own, None, 0, settings) if own != VECTOR else self._nonzero("Min")

    def _vector(self, op: str, *params: Any) -> Any:
        return self._new(build(op, params, self.formula), self.frame)  # type: ignore[attr-defined]

    def _nonzero(self, op: str) -> Any:
        return self._new(build(op, (), build("NotEqual", (), self.formula, ZERO)), self.frame)  # type: ignore[attr-defined]


def _count(name: str, k: Any) -> int:
    k = whole(name, "K", k)
    if k < 1:
        raise ValueError(f"{name}: K must be a whole number >= 1; got {k}")
    return k


# --- one method for each row of the table ---------------------------------------------------------------------------
def _plain(name: str, method: str) -> Callable:
    def reduce_(self: Any, axis: Any = None, dim: Any = None, **settings: Any) -> Any:
        return self._reduce(name, self._axis(method, axis, dim, False), None, 0, settings)

    return reduce_


def _or_vector(name: str, method: str) -> Callable:
    def reduce_(self: Any, axis: Any = -1, dim: Any = None, **settings: Any) -> Any:
        last = type(axis) is int and axis == -1 and dim is None
        own = VECTOR if last else self._axis(method, axis, dim, True)
        return self._vector(name) if own == VECTOR else self._reduce(name, own, None, 0, settings)

    return reduce_


def _with_k(name: str, method: str) -> Callable:
    def reduce_(self: Any, K: Any, axis: Any = None, dim: Any = None, **settings: Any) -> Any:
        return self._reduce(name, self._axis(method, axis, dim, False), None, _count(method, K), settings)

    return reduce_


def _weighted(name: str, method: str) -> Callable:
    def reduce_(self: Any, weight: Any, axis: Any = None, dim: Any = None, **settings: Any) -> Any:
        return self._reduce(name, self._axis(method, axis, dim, False), self._weight(weight, method), 0, settings)

    return reduce_


def _generate() -> None:
    for row in REDUCTIONS.values():
        on_vector = not row.takes_k and row.name in OPS  # the op of the same name is the reduction of the vector
        shape = (
            _with_k if row.takes_k else _weighted if CORES[row.core].weighted else _or_vector if on_vector else _plain
        )
        for method in row.methods:
            if method in vars(ReductionMethods):
                continue
            axes = "over i, j or the vector" if on_vector else "over i or j"
            for own, maker in ((method, shape), (f"{method}_reduction", _plain if shape is _or_vector else shape)):
                function = maker(row.name, own)
                function.__name__, function.__qualname__ = own, f"LazyTensor.{own}"
                function.__doc__ = f"{row.doc[0].upper()}{row.doc[1:]}, {axes}."
                setattr(ReductionMethods, own, function)


_generate()
