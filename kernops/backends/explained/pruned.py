"""What the CUDA back end's search in few dimensions tells."""

from __future__ import annotations

from dataclasses import asdict

from ...codegen import searching
from ...codegen.facts import facts
from ...codegen.schedule import schedule
from ..pruned_cuda import wanted
from . import Problem, Told, count
from .cuda import place, registers_of


def pruned(p: Problem) -> Told | None:
    """Nearest neighbours with a look at few pairs; None where all are compared."""
    s = wanted((p.plan, p.dtype, None, p.m, p.n, (p.batch,)))
    if s is None:
        return None
    device, _ = place(p.device)
    brute = schedule(facts(p.plan), p.m, p.n, p.batch, p.itemsize, device)
    steps = (*searching.before_sort(s, p.m, p.n), *searching.after_sort(s))
    said = [f"squared distances in {count(s.dim, 'dimension')}, and points enough to repay putting them in order"]
    if s.trial:
        said.append(f"one row in {s.stride} tries first: all pairs are compared if they look at too many boxes, which "
                    "the device decides")  # fmt: skip
    else:
        said.append("algorithm='pruned' was asked for")
    return Told(
        template="pruned: boxes of points, the near ones first (cuda/search.cuh)",
        schedule=(
            ("kernels", ", ".join(f"kn_{step.name}" for step in steps)),
            ("neighbours", str(s.k)),
            ("key of a point", f"{8 * s.key} bits"),
            ("boxes of each level", ", ".join(f"{boxes:,}" for boxes in s.levels)),
            ("scratch", f"{sum(searching.scratch(s, p.itemsize)):,} bytes"),
        ),
        reasons=tuple(said),
        compiled=lambda: registers_of(
            searching.source(p.plan, brute, s, p.itemsize, int(p.batch > 1)), device.arch
        ),
        values=asdict(s),
    )  # fmt: skip
