"""Python's operators on ``LazyTensor``, and torch's names for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..autograd.tracing import is_dynamo_compiling
from ..formula.graph import Node
from ..formula.ops import OPS
from .frame import Frame, merge
from .nodes import build, joined, moved, with_number

_joined = joined.known  # type: ignore[attr-defined]

if TYPE_CHECKING:
    from .tensor import LazyTensor


def operate(op: str, a: LazyTensor, b: LazyTensor) -> LazyTensor:
    """``op(a, b)``."""
    frame, other, f, g = a.frame, b.frame, a.formula, b.formula
    numbers = None
    if frame is not other:
        frame, numbers = merge(frame, other, op)
    node = None if is_dynamo_compiling() else _joined.get((op, f, g, numbers))
    return a._new(joined(op, f, g, numbers) if node is None else node, frame)


def operate_all(op: str, args: tuple[LazyTensor, ...], params: tuple[Any, ...] = ()) -> LazyTensor:
    """``op(*args, *params)``."""
    frame = args[0].frame
    nodes = [args[0].formula]
    for x in args[1:]:
        frame, numbers = merge(frame, x.frame, op)
        nodes.append(x.formula if numbers is None else moved(x.formula, numbers))
    return args[0]._new(build(op, params, *nodes), frame)


Method = Callable[[Any, Any], "LazyTensor"]


def _operator(op: str, exchanged: str, reflected: bool = False) -> Method:
    """An operator, or a ``reflected`` one; ``exchanged`` is the one that gives the same with the operands exchanged."""

    def method(self: Any, other: Any) -> LazyTensor:
        kind = type(other)
        if kind is not type(self):
            if kind is int or kind is float:
                node = with_number(op, self.formula, other, reflected)
                if node is not None:
                    return self._new(node, self.frame)  # type: ignore[no-any-return]
            other = self._lift(other, op)
            if other.is_complex:
                return getattr(other, exchanged)(self)
        return operate(op, other, self) if reflected else operate(op, self, other)

    return method


def _both(op: str, name: str, reflected: str = "") -> tuple[Method, Method]:
    return _operator(op, f"__{reflected or 'r' + name}__"), _operator(op, f"__{name}__", True)


class Operators:
    """What ``LazyTensor`` inherits: arithmetic and comparisons, each component alone."""

    __slots__ = ()
    formula: Node
    frame: Frame

    __array_ufunc__ = None  # so that NumPy and CuPy leave ``array + lazy`` to us

    __add__, __radd__ = _both("Add", "add")
    __sub__, __rsub__ = _both("Sub", "sub")
    __mul__, __rmul__ = _both("Mul", "mul")
    __truediv__, __rtruediv__ = _both("Div", "truediv")
    __mod__, __rmod__ = _both("Mod", "mod")
    __pow__, __rpow__ = _both("Power", "pow")
    __or__, __ror__ = _both("Dot", "or")
    __eq__ = _operator("Equal", "__eq__")  # type: ignore[assignment]
    __ne__ = _operator("NotEqual", "__ne__")  # type: ignore[assignment]
    __lt__, __gt__ = _both("Less", "lt", "gt")
    __le__, __ge__ = _both("LessEqual", "le", "ge")

    def __hash__(self) -> int:
        return object.__hash__(self)  # == is elementwise, so that identity is what is left

    def __bool__(self) -> bool:
        raise TypeError("a LazyTensor has no truth value; reduce it with any(axis) or all(axis)")

    def __neg__(self) -> LazyTensor:
        return self._new(build("Neg", (), self.formula), self.frame)  # type: ignore[attr-defined]

    def __pos__(self) -> LazyTensor:
        return self  # type: ignore[return-value]

    def __abs__(self) -> LazyTensor:
        return self._new(build("Abs", (), self.formula), self.frame)  # type: ignore[attr-defined]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """``tensor + lazy`` and the like, and torch's elementwise functions of LazyTensors.

        ``torch.compile`` comes here for every operator between a LazyTensor and a tensor.
        """
        name = _PYTHON_NAMES.get(func.__name__, func.__name__)
        if name in _EXCHANGED or name == "__neg__":
            if not isinstance(args[0], cls):
                args, name = args[::-1], _EXCHANGED[name]
                if name == "__rmatmul__" and is_dynamo_compiling():
                    name = "__matmul__"  # Dynamo hands over K @ v with its operands exchanged, like all operators
            return getattr(cls, name)(*args, **(kwargs or {}))
        if name in _ELEMENTWISE:
            first, *others = args
            return getattr(cls._lift(first, name), name)(*others, **(kwargs or {}))  # type: ignore[attr-defined]
        raise TypeError(f"torch.{name} does not take a LazyTensor; use its methods")


_WITH_REFLECTION = ("add", "sub", "mul", "truediv", "mod", "pow", "or", "matmul")
#: Operator -> the one that gives the same when its operands are exchanged.
_EXCHANGED = {
    **{f"__{n}__": f"__r{n}__" for n in _WITH_REFLECTION},
    **{f"__r{n}__": f"__{n}__" for n in _WITH_REFLECTION},
    "__eq__": "__eq__",
    "__ne__": "__ne__",
    "__lt__": "__gt__",
    "__gt__": "__lt__",
    "__le__": "__ge__",
    "__ge__": "__le__",
}
#: What torch calls an operator, where not by Python's name.
_PYTHON_NAMES = {
    **{n: f"__{n}__" for n in ("add", "sub", "mul", "pow", "matmul", "eq", "ne", "lt", "gt", "le", "ge", "neg")},
    "subtract": "__sub__",
    "multiply": "__mul__",
    "divide": "__truediv__",
    "negative": "__neg__",
    "div": "__truediv__",
    "true_divide": "__truediv__",
    "__div__": "__truediv__",
    "__rdiv__": "__rtruediv__",
    "rsub": "__rsub__",
    "remainder": "__mod__",
    "bitwise_or": "__or__",
    "absolute": "abs",
}
_ELEMENTWISE = {name for op in OPS.values() if op.scalar for name in op.methods}
