"""What the back ends that prune have in common: which plans they take."""

from __future__ import annotations

from ..codegen.search import MOST_FEATURES, MOST_POINTS
from ..formula.plan import Plan


def checked_points(plan: Plan, m: int, n: int) -> tuple[int, int]:
    """Numbers of the variables whose squared distance a plan that demands to be pruned is of.

    Raises:
        ValueError: it cannot be pruned.
    """
    pair = plan.points
    if pair is None or plan.core not in ("KMin", "MinArgMin"):
        raise ValueError(f"algorithm 'pruned' is for squared distances of two variables; got {plan.formula}")
    dim = plan.variables[0].dim
    if dim > MOST_FEATURES or max(m, n) > MOST_POINTS:
        raise ValueError(
            f"algorithm 'pruned' is for at most {MOST_FEATURES} features and {MOST_POINTS} rows and columns; "
            f"got {dim} features, {m} rows and {n} columns"
        )
    return pair
