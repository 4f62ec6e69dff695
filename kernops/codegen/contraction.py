"""Long sums over components, such as a squared distance in 64 dimensions, set apart from the rest of a pair's formula.

A processor computes them fastest for a block of rows and vectors of columns at once, whose sums fill its registers; the
rest of the formula is then evaluated on that block, as an epilogue (``backends/host/contract.h``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..formula.graph import CAT_COL, PAIR, I, J, Node, rewrite, topological, var
from ..formula.plan import Plan
from .emit import Emitter

#: A sum over fewer components takes no longer than to store it and read it back for the rest of the formula.
LONG_SUM = 12
#: What may be summed: more work for each component would hide in itself what a block of pairs is there to hide.
SUMMED_OPS = {"Add", "Sub", "Mul", "Neg", "Square", "Abs", "Extract", "Var", "Const"}
SUMMED_NODES = 12
#: Fewest and most components of points whose distances have bounds by bytes; for fewer they take as long as distances.
BOUNDED = 24, 16384
#: Number of a column slot from which on it is a sum that is set apart.
SUM_SLOT = 1 << 25


@dataclass(frozen=True)
class Contraction:
    """A plan's formulas of a pair, taken apart.

    Attributes:
        slots: from every long sum, a node ``Sum(v)`` over slots, to the variable that stands for it.
        pair: the program's ``pair`` over these variables.
    """

    slots: dict[Node, Node]
    pair: tuple[Node, ...]

    @property
    def sums(self) -> tuple[Node, ...]:
        return tuple(self.slots)


@lru_cache(maxsize=1024)
def contraction(plan: Plan) -> Contraction:
    """The long sums of ``plan``; none where its formula has no such."""
    pair = plan.program.pair
    sums = tuple(n for n in topological(*pair) if _is_long_sum(n))
    slots: dict[Node, Node] = {n: var(CAT_COL, SUM_SLOT + k, 1) for k, n in enumerate(sums)}
    return Contraction(slots, tuple(rewrite(root, slots) for root in pair))


def _is_long_sum(node: Node) -> bool:
    if node.op != "Sum" or node.kind != PAIR or node.args[0].dim < LONG_SUM:
        return False
    summed = topological(node.args[0])
    return len(summed) <= SUMMED_NODES and all(n.op in SUMMED_OPS for n in summed)


def squares(plan: Plan) -> tuple[int, int, int]:
    """``(components, first row slot, first column slot)`` where the plan asks for the nearest points of all components,
    else zeros: the distances for which ``host/bytes.h`` has bounds."""
    root = plan.program.pair[-1]
    if plan.core != "KMin" or root.op != "Sum" or root.args[0].op != "Square" or root.args[0].args[0].op != "Sub":
        return 0, 0, 0
    x, y = sorted(root.args[0].args[0].args, key=lambda n: n.kind)
    if not (x.is_var and y.is_var and (x.kind, y.kind) == (I, J) and x.dim == y.dim):
        return 0, 0, 0
    return (x.dim, int(x.params[1]), int(y.params[1])) if BOUNDED[0] <= x.dim <= BOUNDED[1] else (0, 0, 0)  # type: ignore[arg-type]


class HostEmitter(Emitter):
    """Leaves loops of many functions as loops. Row and column terms are in memory on a processor, so that no array has
    to be taken apart for registers, and 64 logarithms one after the other, for four rows, take as long as a loop of
    them: but the compiler took 5 s for them, 8 s for 64 LogAddExp and minutes for longer formulas."""

    most_unrolled = 256


class SumsEmitter(HostEmitter):
    """Reads sums that are set apart from the column object."""

    def _compute(self, node: Node, index: int | str) -> str:
        if node.is_var and node.params[0] == CAT_COL and node.params[1] >= SUM_SLOT:  # type: ignore[operator]
            return self.let(f"y.sum({node.params[1] - SUM_SLOT})")  # type: ignore[operator]
        return super()._compute(node, index)


def sums_text(plan: Plan) -> str:
    """The members of a formula that ``host/contract.h`` and ``host/bytes.h`` ask for."""
    sums = contraction(plan).sums
    components, row, column = squares(plan)
    lengths = ", ".join(str(n.args[0].dim) for n in sums) or "0"
    cases = []
    for k, node in enumerate(sums):
        e = Emitter((node.args[0],))
        e.line(f"return {e.component(node.args[0], 'd')};")
        cases.append(f"  if constexpr (Q == {k}) {{\n{e.text()}\n  }}")
    body = "\n".join(cases)
    return f"""  static constexpr int SUMS = {len(sums)};
  static constexpr int LENGTH[] = {{{lengths}}};
  static constexpr int SQUARES = {components}, ROW_POINT = {row}, COLUMN_POINT = {column};
  template <int Q, class V, class X, class Y> KN_FN static V summand(const X& x, const Y& y, int d) {{
{body}
  }}
"""
