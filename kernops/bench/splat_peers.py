"""The table of contenders of the splat benchmark: who pools, and how each is called at its best."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from . import intervals
from .peers import synchronize
from .splat import Problem, Ranks, SplatConfig, Tensor

VARIANTS = ("cumsum", "atomic", "histogram")
#: How a plan of kernops comes about: it was there; it gets a new calibration in every call; it is made in every call.
PLANS = ("cached", "refreshed", "new")


@dataclass(frozen=True)
class Built:
    """A contender ready to run.

    Attributes:
        forward: the pooled cells.
        both: the same under ``"value"`` and gradients by ``"depth"`` and ``"feat"``, or by the lifted ``"points"``
            where those are what is given; None where it has no backward.
        note: shown in the table.
        choice: what a search found to be best; handed to another process, it saves the search there.
        blocking: why the call cannot be captured into a CUDA graph, if that is known.
    """

    forward: Callable[[], Tensor]
    both: Callable[[], dict[str, Tensor]] | None = None
    note: str = ""
    choice: str | None = None
    blocking: str = ""

    def results(self) -> dict[str, Tensor]:
        """One call's results by name."""
        return self.both() if self.both is not None else {"value": self.forward()}


@dataclass(frozen=True)
class Contender:
    """One row of the table.

    Attributes:
        build: ``build(problem, choice)``.
        module: what must be importable.
        devices, dtypes: what it runs on; empty for all.
        backward: whether it is measured with gradients.
        needs: gives the reason why it cannot run here, or None.
    """

    name: str
    build: Callable[[Problem, str | None], Built]
    module: str = "torch"
    devices: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    backward: bool = True
    needs: Callable[[], str | None] = lambda: None

    def missing(self, config: SplatConfig) -> str:
        """Why this contender cannot take part, in words; empty where it can."""
        if importlib.util.find_spec(self.module) is None:
            return "not installed"
        for have, want in ((self.devices, config.device), (self.dtypes, config.dtype)):
            if have and want not in have:
                return f"does not do {want}"
        if config.backward and not self.backward:
            return "measured without gradients only"
        return self.needs() or ""


def _leaves(problem: Problem) -> tuple[Tensor, Tensor]:
    return problem.depth.detach().requires_grad_(), problem.feat.detach().requires_grad_()


def _differentiated(pool: Callable[[Tensor, Tensor], Tensor], problem: Problem) -> Callable[[], dict[str, Tensor]]:
    """Value and gradients of ``pool(depth, feat)`` through autograd."""
    leaves = _leaves(problem)

    def both() -> dict[str, Tensor]:
        value = pool(*leaves)
        grad = problem.grad
        if value.ndim == 5:  # kernops' (B, C, Z, Y, X), a view of channels-last rows
            b, z, y, x = problem.geometry.shape
            grad = grad.view(b, z, y, x, -1).permute(0, 4, 1, 2, 3)
        by_depth, by_feat = torch.autograd.grad(value, leaves, grad)
        return {"value": value.detach(), "depth": by_depth, "feat": by_feat}

    return both


def _fused(pool: Callable[[Tensor, Tensor], Tensor], problem: Problem, **more: Any) -> Built:
    both = _differentiated(pool, problem) if problem.config.backward else None
    return Built(lambda: pool(problem.depth, problem.feat), both, **more)


# --- kernops ----------------------------------------------------------------------------------------------------------
def _kernops(variant: str, plan_is: str, problem: Problem, choice: str | None) -> Built:
    from kernops.geometric import SplatPlan, splat

    config, geometry = problem.config, problem.geometry
    options: dict[str, Any] = {"variant": variant, "backend": config.backend}
    rig, points, grid = geometry.rig, geometry.frustum, geometry.grid
    plan = SplatPlan(rig, points, grid, device=config.device, **options)
    if plan_is == "cached":
        return _fused(lambda depth, feat: splat(depth, feat, plan), problem)

    def refreshed(depth: Tensor, feat: Tensor) -> Tensor:
        plan.refresh(rig)
        return splat(depth, feat, plan)

    def new(depth: Tensor, feat: Tensor) -> Tensor:
        return splat(depth, feat, SplatPlan(rig, points, grid, device=config.device, **options))

    if plan_is == "refreshed":
        return _fused(refreshed, problem, note="cells and bucketing in every call")
    blocking = "" if variant == "atomic" else "making a plan waits for the GPU"
    return _fused(new, problem, note="SplatPlan(…) in every call", blocking=blocking)


# --- torch ------------------------------------------------------------------------------------------------------------
def _lift_all(problem: Problem) -> Callable[[Tensor, Tensor], Tensor]:
    """The whole frustum tensor; points outside go to one more row, which is dropped."""
    cells = problem.geometry.cells.reshape(-1).long()
    cells = torch.where(cells < 0, problem.n_cells, cells)

    def pool(depth: Tensor, feat: Tensor) -> Tensor:
        lifted = (depth.unsqueeze(-1) * feat.unsqueeze(2)).view(-1, problem.channels)
        rows = feat.new_zeros(problem.n_cells + 1, problem.channels)
        return rows.index_add_(0, cells, lifted)[:-1]

    return pool


def _lift_kept(problem: Problem) -> Callable[[Tensor, Tensor], Tensor]:
    """Only the points that fall into the grid, sorted by cell beforehand."""
    ranks = problem.ranks

    def pool(depth: Tensor, feat: Tensor) -> Tensor:
        rows = feat.view(-1, problem.channels).index_select(0, ranks.pixels)
        lifted = rows * depth.view(-1).index_select(0, ranks.points).unsqueeze(1)
        return feat.new_zeros(problem.n_cells, problem.channels).index_add_(0, ranks.cells, lifted)

    return pool


LIFTS = {"kept points": _lift_kept, "whole frustum": _lift_all}


def _torch(problem: Problem, choice: str | None) -> Built:
    """Lift and ``index_add_``, in the form that turns out fastest for this very problem."""
    if choice is None:
        choice = min(LIFTS, key=lambda form: _seconds(_fused(LIFTS[form](problem), problem), problem.config))
    return _fused(LIFTS[choice](problem), problem, note=f"lift and index_add_, {choice}", choice=choice)


def _seconds(built: Built, config: SplatConfig) -> float:
    call = built.both or built.forward
    times = []
    for _ in range(3):
        synchronize(config.device)
        start = time.perf_counter()
        call()
        synchronize(config.device)
        times.append(time.perf_counter() - start)
    return min(times)


class _DifferenceOfSums(torch.autograd.Function):
    """Sums of stretches as differences of one prefix sum over all points; a point's gradient is its stretch's."""

    @staticmethod
    def forward(ctx: Any, lifted: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(ends)
        totals = lifted.cumsum(0)[ends]
        return torch.cat((totals[:1], totals[1:] - totals[:-1]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (ends,) = ctx.saved_tensors
        return grads[0][ends.int().cumsum(0) - ends.int()], None


def _lss(problem: Problem, choice: str | None) -> Built:
    """What Lift-Splat-Shoot describes: lift, drop what is outside, sort by cell, prefix sum, difference at the ends."""
    cells = problem.geometry.cells.reshape(-1).long()

    def pool(depth: Tensor, feat: Tensor) -> Tensor:
        lifted = (depth.unsqueeze(-1) * feat.unsqueeze(2)).view(-1, problem.channels)
        kept = cells >= 0
        ranks, lifted = cells[kept], lifted[kept]
        order = ranks.argsort()
        ranks, lifted = ranks[order], lifted[order]
        ends = torch.ones_like(ranks, dtype=torch.bool)
        ends[:-1] = ranks[1:] != ranks[:-1]
        rows = feat.new_zeros(problem.n_cells, problem.channels)
        return rows.index_put((ranks[ends],), _DifferenceOfSums.apply(lifted, ends))

    blocking = "its selections wait for the GPU"
    return _fused(pool, problem, note="sort, cumsum over all points, difference", blocking=blocking)


# --- one thread an (interval, channel) --------------------------------------------------------------------------------
def _lifted_points(problem: Problem) -> Tensor:
    """The frustum tensor's kept rows in the order of the cells: what ``bev_pool`` is given."""
    ranks = problem.ranks
    return problem.feat.view(-1, problem.channels)[ranks.pixels] * problem.depth.view(-1)[ranks.points, None]


_GIVEN = "given the lifted points, sorted"


def _bev_pool(problem: Problem, choice: str | None) -> Built:
    ranks, lifted, channels = problem.ranks, _lifted_points(problem), problem.channels
    cells = ranks.cells.int()
    kernels = intervals.Kernels(problem.config.device)

    def forward() -> Tensor:
        out = lifted.new_zeros(problem.n_cells, channels)
        kernels("pool_lifted", feat=lifted, ranks_bev=cells, starts=ranks.starts, lengths=ranks.lengths, out=out)
        return out

    def both() -> dict[str, Tensor]:
        value, out = forward(), torch.zeros_like(lifted)
        kernels(
            "pool_lifted_backward",
            grad=problem.grad,
            ranks_bev=cells,
            starts=ranks.starts,
            lengths=ranks.lengths,
            out=out,
        )
        return {"value": value, "points": out}

    return Built(forward, both if problem.config.backward else None, _GIVEN)


def by_pixel(ranks: Ranks) -> Ranks:
    """The same points sorted by pixel, with the stretch of each pixel that has any: what ``bev_pool_v2``'s backward
    is given."""
    pixels, order = ranks.pixels.sort(stable=True)
    lengths = pixels.unique_consecutive(return_counts=True)[1]
    starts = lengths.cumsum(0) - lengths
    return Ranks(ranks.points[order], pixels, ranks.cells[order], starts.int(), lengths.int())


def _given(ranks: Ranks) -> dict[str, Tensor]:
    """The arrays by the names that the kernels know them by."""
    return {
        "ranks_depth": ranks.points.int(),
        "ranks_feat": ranks.pixels.int(),
        "ranks_bev": ranks.cells.int(),
        "starts": ranks.starts,
        "lengths": ranks.lengths,
    }


def _bev_pool_v2(problem: Problem, choice: str | None) -> Built:
    depth, feat = problem.depth, problem.feat
    arrays = _given(problem.ranks)
    kernels = intervals.Kernels(problem.config.device)

    def forward() -> Tensor:
        out = feat.new_zeros(problem.n_cells, problem.channels)
        kernels("pool_fused", depth=depth, feat=feat, out=out, **arrays)
        return out

    if not problem.config.backward:
        return Built(forward, None, "given ranks and intervals")
    backward = _given(by_pixel(problem.ranks))

    def both() -> dict[str, Tensor]:
        value, by_depth, by_feat = forward(), torch.zeros_like(depth), torch.zeros_like(feat)
        kernels(
            "pool_fused_backward",
            depth=depth,
            feat=feat,
            grad=problem.grad,
            out=by_feat,
            grad_depth=by_depth,
            **backward,
        )
        return {"value": value, "depth": by_depth, "feat": by_feat}

    return Built(forward, both, "given ranks and intervals, of both directions")


def _conch(problem: Problem, choice: str | None) -> Built:
    """``conch-triton-kernels``: its ``bev_pool`` takes lifted points and their coordinates."""
    from conch.ops.vision.bev_pool import bev_pool, bev_pool_backward

    ranks, lifted = problem.ranks, _lifted_points(problem)
    b, z, y, x = problem.geometry.shape
    cells = ranks.cells
    # Its output is (B, Z, X, Y, C), its columns are x, y, z, b; with x and y exchanged the output is (B, Z, Y, X, C).
    coordinates = torch.stack((cells // x % y, cells % x, cells // (x * y) % z, cells // (x * y * z)), 1).int()
    coordinates = coordinates.contiguous()
    five = problem.grad.view(b, z, y, x, -1)

    def forward() -> Tensor:
        pooled = bev_pool(lifted, coordinates, ranks.starts, ranks.lengths, b, z, y, x)
        return pooled.view(problem.n_cells, -1)

    def both() -> dict[str, Tensor]:
        value = forward()
        return {"value": value, "points": bev_pool_backward(five, coordinates, ranks.starts, ranks.lengths)}

    return Built(forward, both if problem.config.backward else None, _GIVEN)


PEERS: dict[str, Contender] = {
    c.name: c
    for c in (
        Contender("torch", _torch),
        Contender("lss", _lss),
        Contender("bev_pool", _bev_pool, devices=("cuda",), dtypes=("float32",), needs=intervals.missing),
        Contender("bev_pool_v2", _bev_pool_v2, devices=("cuda",), dtypes=("float32",), needs=intervals.missing),
        Contender("conch", _conch, module="conch", devices=("cuda",)),
    )
}


def ours(variant: str, plan_is: str) -> str:
    """The name of a contender of ours: with a plan that is there, or with the plan's cost in every call."""
    return f"kernops {variant}" + ("" if plan_is == "cached" else f", plan {plan_is}")


OURS: dict[str, Contender] = {
    ours(variant, plan_is): Contender(
        ours(variant, plan_is), partial(_kernops, variant, plan_is), backward=plan_is == "cached"
    )
    for plan_is in PLANS
    for variant in VARIANTS
}

CONTENDERS: dict[str, Contender] = {**OURS, **PEERS}


def build(name: str, problem: Problem, choice: str | None = None) -> Built:
    """Contender ``name`` ready to run on ``problem``."""
    return CONTENDERS[name].build(problem, choice)
