"""Functions of vectors as methods of ``LazyTensor``: one for each row of the table of ops that names some."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..formula.graph import CAT_SCALAR, Node
from ..formula.ops import OPS, Op
from .frame import Frame, Symbol
from .nodes import build, numbers_of, whole
from .operators import operate_all

if TYPE_CHECKING:
    from .tensor import LazyTensor


class VectorMethods:
    """What ``LazyTensor`` inherits: the methods made from the table, and those that a row cannot say."""

    __slots__ = ()
    formula: Node
    frame: Frame

    def _apply(self, op: str, args: tuple[Any, ...], params: tuple[Any, ...] = ()) -> LazyTensor:
        lift = self._lift  # type: ignore[attr-defined]
        lifted = tuple([lift(a, op) for a in args])
        if True in [a.is_complex for a in lifted]:
            raise NotImplementedError(f"{op} of a complex LazyTensor is not available yet")
        return operate_all(op, lifted, params)

    def power(self, other: Any) -> LazyTensor:
        """``x ** other``, of each component."""
        return self._apply("Power", (self, other))

    def mod(self, modulus: Any, offset: Any = 0) -> LazyTensor:
        """``x - modulus * floor((x - offset) / modulus)``, which lies in [offset, offset + modulus)."""
        return self._apply("ModOffset", (self, modulus, offset))

    def round(self, other: int = 0) -> LazyTensor:
        """Rounded to ``other`` decimals, halves to even."""
        return self._apply("Round", (self,), (whole("round", "the number of digits", other),))

    def sinc(self) -> LazyTensor:
        """sin(πx) / (πx), and 1 at 0."""
        return self._apply("Sinc", (self,))

    def norm(self, dim: int = -1) -> LazyTensor:
        """The Euclidean norm of the vector; ``dim`` is -1 or the number of the last axis."""
        if dim not in (-1, self.dim() - 1):  # type: ignore[attr-defined]
            raise ValueError(f"norm: dim must be -1 or {self.dim() - 1}, the axis of the vector; got {dim}")  # type: ignore[attr-defined]
        return self._apply("Norm2", (self,))

    def weightedsqnorm(self, other: Any) -> LazyTensor:
        """Σ s_k x_k² for one or D weights s, xᵀSx for D² weights."""
        return self._apply("WeightedSqNorm", (other, self))

    def weightedsqdist(self, g: Any, s: Any) -> LazyTensor:
        """The weighted squared norm of x - g."""
        return self._apply("WeightedSqDist", (s, self, g))

    def difference_matrix(self, other: Any) -> LazyTensor:
        """All differences ``x_k - y_l``, l running fastest."""
        return self._apply("DifferenceMatrix", (self, other))

    def elem(self, i: Any) -> LazyTensor:
        """Component ``i``; counted from the end if negative."""
        k, size = whole("elem", "the index", i), self.formula.dim
        if not -size <= k < size:
            raise ValueError(f"elem: the index must be in [0, {size}) for {size} components; got {k}")
        return self._apply("Elem", (self,), (k % size,))

    def concat(self, other: Any) -> LazyTensor:
        """The components of x, then those of ``other``."""
        return self._apply("Concat", (self, other))

    @staticmethod
    def concatenate(tuple_of_lt: Any, axis: int = -1) -> LazyTensor:
        """The components of all, one after the other."""
        if not isinstance(tuple_of_lt, (tuple, list)) or not tuple_of_lt:
            raise ValueError(f"concatenate takes a tuple of one or more LazyTensors; got {type(tuple_of_lt).__name__}")
        if not isinstance(tuple_of_lt[0], VectorMethods):
            raise TypeError(f"concatenate: the first must be a LazyTensor; got {type(tuple_of_lt[0]).__name__}")
        if axis not in (-1, tuple_of_lt[0].dim() - 1):  # type: ignore[attr-defined]
            raise ValueError(f"concatenate: axis must be -1 or the number of the last axis; got {axis}")
        first, *others = tuple_of_lt
        for x in others:
            first = first.concat(x)
        return first

    @staticmethod
    def cat(tuple_of_lt: Any, dim: int = -1) -> LazyTensor:
        """``concatenate``, by torch's name."""
        return VectorMethods.concatenate(tuple_of_lt, dim)

    def keops_tensordot(self, other: Any, dimfa: Any, dimfb: Any, contfa: Any, contfb: Any, *args: Any) -> LazyTensor:
        """The contraction of axes ``contfa`` and ``contfb`` of two arrays of shapes ``dimfa`` and ``dimfb`` in C order.

        A fifth sequence says to which place each axis of the result moves.
        """
        shapes = tuple(_whole_tuple("keops_tensordot", s) for s in (dimfa, dimfb, contfa, contfb, *args))
        if len(shapes) > 5:
            raise TypeError(
                f"keops_tensordot takes two shapes, two lists of axes and a permutation; got {len(shapes)} sequences"
            )
        return self._apply("TensorDot", (self, other), shapes)

    def keops_kron(self, other: Any, dimfself: Any, dimfother: Any) -> LazyTensor:
        """The Kronecker product of two arrays of shapes ``dimfself`` and ``dimfother`` in C order."""
        return self._apply("Kron", (self, other), tuple(_whole_tuple("keops_kron", s) for s in (dimfself, dimfother)))

    # --- complex vectors ------------------------------------------------------------------------------------------
    def real2complex(self) -> LazyTensor:
        """x as a complex LazyTensor."""
        return _pair(self, 0)

    def imag2complex(self) -> LazyTensor:
        """1j times x, a complex LazyTensor."""
        return _pair(0 * self, self)  # type: ignore[operator]

    def exp1j(self) -> LazyTensor:
        """exp(1j x), a complex LazyTensor."""
        return _pair(self.cos(), self.sin())  # type: ignore[attr-defined]

    # --- derivatives inside formulas ------------------------------------------------------------------------------
    def grad(self, other: Any, gradin: Any) -> LazyTensor:
        """The derivative of <x, gradin> by the variable ``other``."""
        return self._apply("Grad", (self, other, gradin))

    def diff(self, other: Any, diffin: Any) -> LazyTensor:
        """The derivative of x when the variable ``other`` moves along ``diffin``."""
        return self._apply("Diff", (self, other, diffin))

    def grad_matrix(self, other: Any) -> LazyTensor:
        """The gradients of all components of x by the variable ``other``, one after the other."""
        return self._apply("GradMatrix", (self, other))

    def divergence(self, var: Any) -> LazyTensor:
        """The sum of the derivatives of component k of x by component k of the variable."""
        return self._apply("Divergence", (self, var))

    def laplacian(self, var: Any) -> LazyTensor:
        """The divergence of the gradient of a scalar by the variable."""
        return self._apply("Laplacian", (self, var))

    def trace_operator(self, var: Any) -> LazyTensor:
        """The trace of x, which is linear in the variable; the variable itself is gone."""
        out = self._apply("TraceOperator", (self, var))
        used = numbers_of(out.formula)
        pairs = list(enumerate(out.frame.tensors))
        tensors = tuple(None if isinstance(t, Symbol) and k not in used else t for k, t in pairs)
        cats = tuple(CAT_SCALAR if t is None else c for t, c in zip(tensors, out.frame.cats))
        out.frame = out.frame.replace(tensors=tensors, cats=cats)
        return out

    def factorize(self, other: Any) -> LazyTensor:
        """x itself: equal parts of a formula are one node, and computed once."""
        return self  # type: ignore[return-value]

    def auto_factorize(self) -> LazyTensor:
        """x itself: equal parts of a formula are one node, and computed once."""
        return self  # type: ignore[return-value]


def _pair(real: Any, imag: Any) -> LazyTensor:
    from .complex import pair  # a subclass of what inherits this

    return pair(real, real._lift(imag, "complex"))


def _whole_tuple(name: str, values: Any) -> tuple[int, ...]:
    return tuple(whole(name, "an entry", v) for v in (values if isinstance(values, (tuple, list)) else (values,)))


# --- one method for each row of the table -----------------------------------------------------------------------------
def _unary(op: Op) -> Callable:
    name = op.name

    def method(self: Any) -> Any:
        return self._new(build(name, (), self.formula), self.frame)

    return method


def _general(op: Op, own: str) -> Callable:
    """``x.method(*others, *params)``; parameters may be given by name."""
    op_name, others, names = op.name, op.arity - 1, op.params
    takes = ", ".join((*("other" if others == 1 else f"other{k + 1}" for k in range(others)), *names))

    def method(self: Any, *args: Any, **named: Any) -> Any:
        given = args[others:]
        rest = [named.pop(n) for n in names[len(given) :] if n in named]
        if named or len(args) + len(rest) != others + len(names):
            raise TypeError(
                f"{own} takes ({takes}); got {len(args)} positional argument(s) and {sorted(named) or 'no others'}"
            )
        return self._apply(
            op_name, (self, *args[:others]), tuple(whole(own, n, v) for n, v in zip(names, (*given, *rest)))
        )

    return method


def _not_yet(name: str) -> Callable:
    def method(self: Any, *args: Any, **named: Any) -> Any:
        raise NotImplementedError(f"LazyTensor.{name} is not available yet")

    return method


#: Methods of pykeops that do not exist here yet.
NOT_YET = ("bspline", "softdtw_sqdist")


def _generate() -> None:
    made: dict[str, tuple[Callable, str]] = {n: (_not_yet(n), "Not available yet.") for n in NOT_YET}
    for op in OPS.values():
        for own in op.methods:
            plain = op.arity == 1 and not op.params
            doc = (
                f"{op.doc[0].upper()}{op.doc[1:]}, where a is x and b, c are the arguments." if op.arity > 1 else op.doc
            )
            made[own] = (_unary(op) if plain else _general(op, own), doc)
    for own, (function, doc) in made.items():
        if own not in vars(VectorMethods):
            function.__name__, function.__qualname__, function.__doc__ = own, f"LazyTensor.{own}", doc
            setattr(VectorMethods, own, function)


_generate()
