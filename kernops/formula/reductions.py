"""The table of reductions.

Back ends implement the few *cores* (see ``cuda/reductions.cuh`` for the C++ states and ``backends/tiled`` for the torch
ones); every public reduction is a core with a sign and a choice of outputs. Derivatives of the differentiable cores are
written as cotangents and tangents of what is reduced, so that the derivative of a reduction is a ``Sum`` again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .autodiff import jvp, vjp
from .graph import Node
from .ops import add, apply, mul, sub, total

Outs = tuple[Node, ...]


@dataclass(frozen=True)
class Core:
    """What a back end computes.

    Attributes:
        name: name of the C++ state and of the torch one.
        outputs: names of the results; ``"index"`` is int64, all others have the computation's dtype.
        weighted: whether a second formula is read.
        empty: value of every output where there is no column; ``None`` where that is an error.
        cotangents: ``(formula, weight, outs, gs) -> [(formula, cotangent), ...]``; ``None`` where it is done by
            gathering the chosen columns instead.
        tangents: ``(formula, weight, outs, tangents) -> (summand of each output's tangent, ...)``.
    """

    name: str
    outputs: tuple[str, ...]
    weighted: bool = False
    empty: tuple[float, ...] | None = None
    cotangents: Callable[..., list[tuple[Node, Node]]] | None = None
    tangents: Callable[..., tuple[Node | None, ...]] | None = None


def _softmax(f: Node, lse: Node) -> Node:
    return apply("Exp", sub(f, lse))


def _sum_cotangents(f: Node, w: None, outs: Outs, gs: Outs) -> list[tuple[Node, Node]]:
    return [(f, gs[0])]


def _sum_tangents(f: Node, w: None, outs: Outs, ts: dict[Node, Node]) -> tuple[Node | None, ...]:
    return (jvp(f, ts),)


def _lse_cotangents(f: Node, w: None, outs: Outs, gs: Outs) -> list[tuple[Node, Node]]:
    return [(f, mul(gs[0], _softmax(f, outs[0])))]


def _lse_tangents(f: Node, w: None, outs: Outs, ts: dict[Node, Node]) -> tuple[Node | None, ...]:
    df = jvp(f, ts)
    return (None if df is None else mul(_softmax(f, outs[0]), df),)


def _softmax_cotangents(f: Node, w: Node, outs: Outs, gs: Outs) -> list[tuple[Node, Node]]:
    mean, lse = outs
    p = _softmax(f, lse)
    return [(f, mul(p, add(total(mul(gs[0], sub(w, mean))), gs[1]))), (w, mul(p, gs[0]))]


def _softmax_tangents(f: Node, w: Node, outs: Outs, ts: dict[Node, Node]) -> tuple[Node | None, ...]:
    mean, lse = outs
    p, df, dw = _softmax(f, lse), jvp(f, ts), jvp(w, ts)
    parts = ([] if df is None else [mul(df, sub(w, mean))]) + ([] if dw is None else [dw])
    d_mean = None if not parts else mul(p, parts[0] if len(parts) == 1 else add(*parts))
    return d_mean, (None if df is None else mul(p, df))


_INF = float("inf")
CORES: dict[str, Core] = {
    c.name: c
    for c in (
        Core("Sum", ("value",), empty=(0.0,), cotangents=_sum_cotangents, tangents=_sum_tangents),
        Core("LogSumExp", ("value",), empty=(-_INF,), cotangents=_lse_cotangents, tangents=_lse_tangents),
        Core("SumSoftMaxWeight", ("value", "lse"), weighted=True, empty=(float("nan"), -_INF),
             cotangents=_softmax_cotangents, tangents=_softmax_tangents),
        Core("Min", ("value",), empty=(_INF,)),
        Core("MinArgMin", ("value", "index")),
        Core("KMin", ("value", "index")),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Reduction:
    """A public reduction: ``sign * core(sign * formula)``, returning the outputs named in ``returns``.

    ``takes_k``: the K smallest are kept; results gain an axis of length K before the vector's.
    """

    name: str
    core: str
    doc: str
    returns: tuple[str, ...] = ("value",)
    sign: int = 1
    takes_k: bool = False
    methods: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()


REDUCTIONS: dict[str, Reduction] = {}
#: Formula-string name -> canonical name.
REDUCTION_NAMES: dict[str, str] = {}
_BOTH = ("value", "index")
for _r in (
    Reduction("Sum", "Sum", "sum of F", methods=("sum",)),
    Reduction("LogSumExp", "LogSumExp", "log of the sum of exp(F), never overflowing", methods=("logsumexp",),
              aliases=("LogSumExpReduction",)),
    Reduction("SumSoftMaxWeight", "SumSoftMaxWeight", "sum of exp(F) G divided by sum of exp(F)",
              methods=("sumsoftmaxweight",)),
    Reduction("Min", "Min", "smallest F; NaN if one is NaN", methods=("min",)),
    Reduction("Max", "Min", "largest F; NaN if one is NaN", sign=-1, methods=("max",)),
    Reduction("ArgMin", "MinArgMin", "index of the smallest F, the lowest of equals; never that of a NaN", ("index",),
              methods=("argmin",)),
    Reduction("ArgMax", "MinArgMin", "index of the largest F, the lowest of equals; never that of a NaN", ("index",),
              -1, methods=("argmax",)),
    Reduction("Min_ArgMin", "MinArgMin", "smallest F that is not NaN, and its index", _BOTH,
              methods=("min_argmin",), aliases=("MinArgMin",)),
    Reduction("Max_ArgMax", "MinArgMin", "largest F that is not NaN, and its index", _BOTH, -1,
              methods=("max_argmax",), aliases=("MaxArgMax",)),
    Reduction("KMin", "KMin", "the K smallest F in increasing order", takes_k=True, methods=("Kmin",),
              aliases=("Kmin",)),
    Reduction("ArgKMin", "KMin", "indices of the K smallest F", ("index",), takes_k=True, methods=("argKmin",),
              aliases=("ArgKmin", "argKmin")),
    Reduction("KMin_ArgKMin", "KMin", "the K smallest F and their indices", _BOTH, takes_k=True,
              methods=("Kmin_argKmin",), aliases=("Kmin_argKmin", "KMinArgKMin")),
    Reduction("KMax", "KMin", "the K largest F in decreasing order", sign=-1, takes_k=True, methods=("Kmax",),
              aliases=("Kmax",)),
    Reduction("ArgKMax", "KMin", "indices of the K largest F", ("index",), -1, True, ("argKmax",), ("argKmax",)),
    Reduction("KMax_ArgKMax", "KMin", "the K largest F and their indices", _BOTH, -1, True, ("Kmax_argKmax",)),
):  # fmt: skip
    REDUCTIONS[_r.name] = _r
    for _n in (_r.name, *_r.aliases):
        REDUCTION_NAMES[_n] = _r.name


def gradient_formulas(core: str, f: Node, w: Node | None, outs: Outs, gs: Outs, wrt: list[Node]) -> list[Node | None]:
    """Summands whose sum over pairs is the gradient by each of ``wrt``; ``outs`` and ``gs`` are row variables."""
    rule = CORES[core].cotangents
    if rule is None:
        raise ValueError(f"{core} has no cotangent rule; gather its columns instead")
    return vjp(rule(f, w, outs, gs), wrt)
