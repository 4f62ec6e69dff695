"""Squared distances in many dimensions that a CPU computes from products of the points: of which plans, and their text.

``backends/host/products.h`` says how, and how much is lost.
"""

from __future__ import annotations

from functools import lru_cache

from ..formula.graph import I, J, topological
from ..formula.plan import Plan
from .contraction import contraction
from .matrix import CORES, JUMPS

#: Fewest components for which what a block of pairs needs besides its products is little of it.
FEWEST = 64


@lru_cache(maxsize=1024)
def products(plan: Plan) -> tuple[int, int, int]:
    """``(components, row slot, column slot)`` of a plan's long sum where it is one squared distance, and where its last
    digits may differ from those of differences; else zeros."""
    sums = contraction(plan).sums
    if plan.core not in CORES or len(sums) != 1:
        return 0, 0, 0
    inside = sums[0].args[0]
    if inside.op != "Square" or inside.args[0].op != "Sub" or inside.dim < FEWEST or _jumps(plan):
        return 0, 0, 0
    x, y = sorted(inside.args[0].args, key=lambda n: n.kind)
    if not (x.is_var and y.is_var and (x.kind, y.kind) == (I, J) and x.dim == y.dim == inside.dim):
        return 0, 0, 0
    return x.dim, int(x.params[1]), int(y.params[1])  # type: ignore[arg-type]


def _jumps(plan: Plan) -> bool:
    """Whether an op that jumps reads the sum."""
    found = contraction(plan)
    (slot,) = found.slots.values()
    return any(n.op in JUMPS and slot in topological(n) for root in found.pair for n in topological(root))


def products_text(plan: Plan, paired: bool) -> str:
    """The members of a formula that ``host/products.h`` asks for.

    ``paired`` is for machines where additions have units of their own.
    """
    components, row, column = products(plan)
    moved = (components + 1) // 2 * 2 + 4 if components else 0  # kn::Moved<Host>::SLOTS
    return f"""  static constexpr int PRODUCT = {components}, PRODUCT_ROW = {row}, PRODUCT_COLUMN = {column};
  static constexpr bool PAIRED = {"true" if paired else "false"};
  static constexpr int ROWS = NROW + {moved}, COLUMNS = NCOL + {moved};
"""
