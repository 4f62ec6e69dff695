"""``Genred``: a reduction written as a formula string, called with arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..autograd.tracing import traceable
from ..formula.graph import CAT_I, CAT_J, Node, variables
from ..formula.parser import parse, parse_alias
from ..formula.reductions import REDUCTIONS
from . import options
from .engine import request
from .frame import Binder, Frame, symbol
from .nodes import whole
from .reductions import execute


def read(formula: str, aliases: Sequence[str], *more: str | None) -> tuple[dict[str, Node], list[Node | None], Frame]:
    """The names, the formulas (``None`` for ``None``) and the frame of symbols of formula strings with aliases."""
    if isinstance(aliases, str) or not isinstance(aliases, Sequence):
        raise TypeError(
            f"aliases must be a list of strings such as ['X = Vi(3)', 'Y = Vj(3)']; got {type(aliases).__name__}"
        )
    names, nodes, order = _parsed(tuple(aliases), (formula, *more))
    frame = Frame(
        tuple([symbol(k, v.dim) for k, v in enumerate(order)]),
        tuple([v.params[0] for v in order]),
        loose=True,
    )
    return dict(names), list(nodes), frame


@traceable
def _parsed(aliases: tuple[str, ...], formulas: tuple[str | None, ...]) -> tuple[tuple, tuple, tuple]:
    """``(name, variable)`` of each alias with a name, the formulas, and the variables in the order of their numbers."""
    names: dict[str, Node] = {}
    places: dict[int, Node] = {}
    for position, text in enumerate(aliases):
        name, node = parse_alias(text, position)
        if name in names:
            raise ValueError(f"aliases: the name {name!r} is given twice")
        if name is not None:
            names[name] = node
        _put(places, node, f"alias {text!r}")
    nodes = tuple(None if text is None else parse(text, names) for text in formulas)
    for f in nodes:
        for v in variables(f) if f is not None else ():
            _put(places, v, "formula")
    count = 1 + max(places, default=-1)
    missing = [k for k in range(count) if k not in places]
    if missing:
        raise ValueError(f"aliases: argument number {missing[0]} of {count} is not described by any alias")
    return tuple(names.items()), nodes, tuple(places[k] for k in range(count))


def _put(places: dict[int, Node], v: Node, where: str) -> None:
    known = places.setdefault(v.params[1], v)  # type: ignore[arg-type]
    if known is not v:
        raise ValueError(f"{where}: argument number {v.params[1]} is both {known} and {v}")


def over_i(axis: Any) -> bool:
    if axis not in (0, 1) or isinstance(axis, bool):
        raise ValueError(f"axis must be 0 (reduce over i) or 1 (reduce over j); got {axis!r}")
    return axis == 0


class Genred:
    """A reduction of a formula of named variables, to be called with their arrays.

    Args:
        formula: the formula, such as ``"Exp(-SqDist(X,Y)) * B"``.
        aliases: what the names are, in the order of the arguments: ``"X = Vi(3)"`` for arrays (M, 3), ``"Y = Vj(3)"``
            for arrays (N, 3), ``"P = Pm(2)"`` for parameters (2,). Arrays may have batch axes before these.
        reduction_op: a reduction of the table, such as ``"Sum"``, ``"LogSumExp"`` or ``"ArgKMin"``.
        axis: 0 to reduce over i, 1 to reduce over j.
        opt_arg: K, for the reductions that keep the K smallest or largest.
        formula2: the weight, for the reductions that have one.
        options: pykeops' keyword arguments about accumulation; sums are always compensated, whatever they say.

    Example:
        >>> gaussian = Genred("Exp(-SqDist(X,Y)) * B", ["X = Vi(3)", "Y = Vj(3)", "B = Vj(1)"], axis=1)
        >>> a = gaussian(x, y, b)  # a_i = sum over j of exp(-|x_i - y_j|²) b_j, of shape (M, 1)
    """

    def __init__(
        self,
        formula: str,
        aliases: Sequence[str],
        reduction_op: str = "Sum",
        axis: int = 0,
        dtype: Any = None,
        opt_arg: int | None = None,
        formula2: str | None = None,
        cuda_type: Any = None,
        **settings: Any,
    ) -> None:
        options.check(settings, ())
        _, (f, weight), frame = read(formula, aliases, formula2)
        k = 0 if opt_arg is None else whole("Genred", "opt_arg (K)", opt_arg)
        if k < 0 or (opt_arg is not None and k == 0):
            raise ValueError(f"opt_arg: K must be a whole number >= 1; got {opt_arg}")
        assert f is not None
        self._request = request(reduction_op, f, weight, k, len(frame.tensors), over_i(axis))
        self._bind = Binder(frame)
        self._text = (formula, tuple(aliases), reduction_op, axis, None, opt_arg, formula2)

    def __call__(
        self, *args: Any, backend: str = "auto", device_id: int = -1, ranges: Any = None, out: Any = None
    ) -> Any:
        """The reduction of these arrays, as an array of their kind.

        Args:
            args: an array for each alias; all of one kind, dtype and device. Numbers are taken for parameters.
            backend: ``"auto"``, ``"cuda"``, ``"cpu"``, ``"tiled"``, or a name of pykeops'.
            device_id: -1, or the number of the GPU that holds the data.
            ranges: not available yet.
            out: an array of the result's shape, dtype and device to write the result to.
        """
        if ranges is not None:
            options.no_ranges()
        return execute(self._request, self._bind(args), backend, out, device_id)

    def explain(self, *args: Any, **settings: Any) -> Any:
        """How the call with these arrays runs, and why: :func:`kernops.explain` of this."""
        from .explaining import explain

        return explain(self, *args, **settings)

    def __repr__(self) -> str:
        formula, aliases, name, axis, *_ = self._text
        return f"Genred({formula!r}, {list(aliases)!r}, reduction_op={name!r}, axis={axis})"

    def __reduce__(self) -> tuple:
        return Genred, self._text


def _generic(reduction_op: str) -> Any:
    def generic(formula: str, output: str, *aliases: str, **settings: Any) -> Genred:
        _, out = parse_alias(output, 0)
        if out.params[0] not in (CAT_I, CAT_J):
            raise ValueError(f"output must be 'a = Vi(dim)' (reduce over j) or 'a = Vj(dim)' (over i); got {output!r}")
        if REDUCTIONS[reduction_op].takes_k:
            settings["opt_arg"] = out.dim
        return Genred(formula, aliases, reduction_op, 1 if out.params[0] == CAT_I else 0, **settings)

    generic.__name__ = generic.__qualname__ = f"generic_{reduction_op.lower()}"
    generic.__doc__ = f"``Genred`` with reduction {reduction_op} along the axis that the alias ``output`` leaves."
    return generic


generic_sum, generic_logsumexp, generic_argmin, generic_argkmin = map(
    _generic, ("Sum", "LogSumExp", "ArgMin", "ArgKMin")
)
