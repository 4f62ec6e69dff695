"""Long sums over components, such as a squared distance in 64 dimensions, set apart from the rest of a pair's formula.

A processor computes them fastest for a block of rows and vectors of columns at once, whose sums fill its registers; the
rest of the formula is then evaluated on that block, as an epilogue (``backends/host/contract.h``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..formula.graph import CAT_COL, PAIR, Node, rewrite, topological, var
from ..formula.plan import Plan
from .emit import Emitter

#: A sum over fewer components takes no longer than to store it and read it back for the rest of the formula.
LONG_SUM = 12
#: What may be summed: more work for each component would hide in itself what a block of pairs is there to hide.
SUMMED_OPS = {"Add", "Sub", "Mul", "Neg", "Square", "Abs", "Extract", "Var", "Const"}
SUMMED_NODES = 12
#: Number of a column slot from which on it is a sum that is set apart.
_SUMS = 1 << 25


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
    slots: dict[Node, Node] = {n: var(CAT_COL, _SUMS + k, 1) for k, n in enumerate(sums)}
    return Contraction(slots, tuple(rewrite(root, slots) for root in pair))


def _is_long_sum(node: Node) -> bool:
    if node.op != "Sum" or node.kind != PAIR or node.args[0].dim < LONG_SUM:
        return False
    summed = topological(node.args[0])
    return len(summed) <= SUMMED_NODES and all(n.op in SUMMED_OPS for n in summed)


class SumsEmitter(Emitter):
    """Reads sums that are set apart from the column object."""

    def _compute(self, node: Node, index: int | str) -> str:
        if node.is_var and node.params[0] == CAT_COL and node.params[1] >= _SUMS:  # type: ignore[operator]
            return self.let(f"y.sum({node.params[1] - _SUMS})")  # type: ignore[operator]
        return super()._compute(node, index)


def sums_text(sums: tuple[Node, ...]) -> str:
    """The members of a formula that ``host/contract.h`` asks for."""
    lengths = ", ".join(str(n.args[0].dim) for n in sums) or "0"
    cases = []
    for k, node in enumerate(sums):
        e = Emitter((node.args[0],))
        e.line(f"return {e.component(node.args[0], 'd')};")
        cases.append(f"  if constexpr (Q == {k}) {{\n{e.text()}\n  }}")
    body = "\n".join(cases)
    return f"""  static constexpr int SUMS = {len(sums)};
  static constexpr int LENGTH[] = {{{lengths}}};
  template <int Q, class V, class X, class Y> KN_FN static V summand(const X& x, const Y& y, int d) {{
{body}
  }}
"""
