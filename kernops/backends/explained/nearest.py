"""What the CUDA back end's search in many dimensions tells."""

from __future__ import annotations

from dataclasses import asdict

from ...codegen import nearest as schedules
from ...codegen.floors import MATRIX
from ..nearest import schedule
from . import Problem, Told, count
from .cuda import place, registers_of


def nearest(p: Problem) -> Told | None:
    """The nearest points in many dimensions, on the matrix units; None where all pairs are compared directly."""
    device, rates = place(p.device)
    s = schedule(p.plan, p.m, p.n, p.batch, device) if p.itemsize == 4 else None
    if s is None:
        return None
    products = -(-s.dim // 64) * 64
    return Told(
        template="nearest: products of half precision pass over far columns (cuda/nearest_*.cuh)",
        schedule=(
            ("kernels", ", ".join(f"kn_{name}" for name in schedules.KERNELS)),
            ("multiplied by", f"a {s.products}, {schedules.ROWS} x {schedules.COLUMNS} of {products} coordinates"),
            ("shared memory", f"{s.shared:,} bytes, {count(s.stages, 'stage')}"),
            ("blocks of rows, segments", f"{s.row_blocks:,}, {s.segments}"),
            ("list of a row", f"{s.room} columns that may be near"),
            ("scratch", f"{sum(schedules.scratch(s, p.batch).values()):,} bytes"),
        ),
        reasons=(
            f"{s.dim} coordinates: a product in half precision proves a bound of each distance",
            f"one column in {s.parts} is a sample, which says how near the {s.k} nearest are at least; what may be "
            "nearer is listed and compared by differences",
        ),
        rates=rates,
        work={MATRIX: products * (1 + 1 / s.parts)},
        compiled=lambda: registers_of(schedules.source(s, int(p.batch > 1)), device.arch),
        values=asdict(s),
    )
