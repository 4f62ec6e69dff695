"""Scalar ops at the corners of floating point: infinities, NaN, both zeros, halves, whole numbers, large values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import torch

from kernops.backends import reduce
from kernops.formula.graph import CAT_I, CAT_J, Node, check, var
from kernops.formula.ops import OPS, apply, const
from kernops.formula.plan import make_plan

_INF, _NAN = math.inf, math.nan
_FINE = (
    -_INF,
    -1e4,
    -20.5,
    -2.5,
    -2.0,
    -1.0,
    -0.5,
    -1e-3,
    -0.0,
    0.0,
    1e-3,
    0.5,
    1.0,
    1.5,
    2.0,
    2.5,
    20.0,
    1e4,
    _INF,
    _NAN,
)
_COARSE = (-_INF, -1.5, -0.0, 0.0, 0.5, 1.0, _INF, _NAN)
#: Values of each argument, by arity.
GRID = {1: _FINE, 2: _FINE, 3: _COARSE}
#: Where an op is not defined on all numbers: from here on.
LOWEST = {"Polygamma": 1e-3}


def grid(name: str) -> list[tuple[float, ...]]:
    """Every combination of arguments that the op is defined on."""
    low = LOWEST.get(name, -_INF)
    return [c for c in product(GRID[OPS[name].arity], repeat=OPS[name].arity) if not any(x < low for x in c)]


def groups() -> list[tuple[int, list[str]]]:
    """``(arity, names)``: ops that share one formula."""
    out = []
    for arity in GRID:
        names = [n for n, op in OPS.items() if op.scalar and op.arity == arity]
        out += [(arity, names[start : start + 20]) for start in range(0, len(names), 20)]
    return out


def check_special(arity: int, names: Sequence[str], backend: str, device: str = "cpu", dtype=torch.float64) -> None:
    """Assert that ``backend`` gives the ops' values on the grid, computed per pair.

    Row i and column j both stand for a combination of arguments; a sum over j picks the value of combination j = i.
    """
    combos = list(product(GRID[arity], repeat=arity))
    here = apply("Equal", var(CAT_I, 0, 1), var(CAT_J, 1, 1))
    args = [apply("Where", here, var(CAT_J, 2 + k, 1), 1.0) for k in range(arity)]
    root: Node | None = None
    todo = [(name, params) for name in names for params in ([p for _, p in OPS[name].examples] or [()])]
    for name, params in todo:
        value = apply("Where", here, apply(name, *args, params=params), const(0.0))
        root = value if root is None else apply("Concat", root, value)
    assert root is not None
    number = torch.arange(len(combos), dtype=dtype).unsqueeze(-1)
    inputs = torch.tensor(combos, dtype=dtype).split(1, -1)
    (got,) = reduce(make_plan("Sum", check(root)), [t.to(device) for t in (number, number, *inputs)],
                    len(combos), len(combos), backend)  # fmt: skip
    wrong = []
    tolerance = {"rtol": 1e-12, "atol": 1e-13} if dtype == torch.float64 else {"rtol": 2e-5, "atol": 1e-6}
    for column, (name, params) in zip(got.cpu().unbind(-1), todo):
        want = OPS[name].ref(torch, *(t[:, 0].double() for t in inputs), *params).to(dtype)
        defined = torch.tensor([c in set(grid(name)) or any(map(math.isnan, c)) for c in combos])
        bad = ~torch.isclose(column, want, equal_nan=True, **tolerance) & defined
        wrong += [
            f"{name}{combos[k]} {params}: got {column[k]}, expected {want[k]}" for k in bad.nonzero()[:5, 0].tolist()
        ]
    assert not wrong, f"{backend} {dtype}:\n" + "\n".join(wrong)
