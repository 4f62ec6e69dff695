"""What the tiled back end tells."""

from __future__ import annotations

import math

import torch

from ...formula.graph import topological
from ..tiled import MIN_COLUMNS, TILE_NUMBERS
from . import Problem, Told


def tiles(p: Problem) -> Told:
    """Formulas by torch functions, tile by tile."""
    device = p.device
    assert isinstance(device, torch.device)
    width = max(node.dim for node in topological(*p.plan.roots))
    numbers = TILE_NUMBERS.get(device.type, TILE_NUMBERS["other"])
    budget = max(1, numbers // width)
    columns = min(p.n, max(MIN_COLUMNS, math.isqrt(max(1, budget // p.batch))))
    rows = max(1, min(p.m, budget // (p.batch * columns)))
    return Told(
        template="torch functions, tile by tile (backends/tiled.py)",
        schedule=(("rows, columns of a tile", f"{rows:,}, {columns:,}"),),
        reasons=(
            f"the widest intermediate of the formula has {width} components; a tile of it ≤ {numbers:,} numbers",
            "nothing is compiled: this back end runs wherever torch does",
        ),
        values={"rows": rows, "columns": columns},
    )
