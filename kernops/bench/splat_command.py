"""``python -m kernops.bench splat``: its options, and what they ask for."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from .measure import Row, Say
from .protocol import BUDGET_SECONDS
from .splat import SETTINGS, SplatConfig
from .splat_measure import measure_splat
from .splat_peers import PEERS, PLANS, VARIANTS, ours

DOC = "depth × features of every point of the frustum, summed in the cells of a bird's-eye-view grid"
DTYPES = ("float16", "bfloat16", "float32", "float64")


def add(commands: argparse._SubParsersAction, names: Callable[[tuple[str, ...]], Callable[[str], list[str]]]) -> None:
    """Add the sub-command to those of ``__main__``; ``names`` makes the parser of a list of names."""
    sub = commands.add_parser("splat", help=DOC, description=DOC)
    sub.add_argument("--setting", choices=tuple(SETTINGS), default="lss100",
                     help="; ".join(f"{name}: {s.doc}" for name, s in SETTINGS.items()))  # fmt: skip
    sub.add_argument("--variant", type=names(VARIANTS), default=list(VARIANTS), metavar="NAME,…",
                     help=f"of kernops: {', '.join(VARIANTS)} (all)")  # fmt: skip
    sub.add_argument("--plan", type=names(PLANS), default=list(PLANS), metavar="NAME,…",
                     help="cached: made before; refreshed: plan.refresh(rig) in every call; new: SplatPlan(…) in every "
                          "call (all; with --backward, cached)")  # fmt: skip
    sub.add_argument("--peer", type=names(tuple(PEERS)), metavar="NAME,…",
                     help=f"whom to compare with: {', '.join(PEERS)}, or none (all of the device)")  # fmt: skip
    sub.add_argument("--dtype", choices=DTYPES, default="float32", help="of depth and features (float32)")
    sub.add_argument("--backward", action="store_true", help="time the gradients by depth and features too")
    sub.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    sub.add_argument("--backend", choices=("auto", "cpu", "cuda", "tiled"), default="auto", help="of kernops")
    sub.add_argument("--repeats", type=int, default=9, help="samples of each, of which the median counts (9)")
    sub.add_argument("--budget", type=float, default=BUDGET_SECONDS, metavar="S",
                     help="a contender that took S seconds gets fewer samples")  # fmt: skip
    sub.add_argument("--no-probes", action="store_true", help="do not measure memory")
    sub.add_argument("--json", type=Path, metavar="FILE", help="write every sample and the environment there")


def run(options: argparse.Namespace, device: str, say: Say) -> list[Row]:
    """Measure what the options ask for."""
    if not options.variant:
        raise ValueError("--variant: at least one of " + ", ".join(VARIANTS))
    plans = ["cached"] if options.backward else options.plan
    names = [ours(variant, plan) for plan in plans for variant in options.variant]
    peers = options.peer
    if peers is None:
        peers = [name for name, peer in PEERS.items() if not peer.devices or device in peer.devices]
    config = SplatConfig(options.setting, options.dtype, options.backward, device, options.backend)
    return measure_splat(config, [*names, *peers], repeats=options.repeats, probes=not options.no_probes,
                         budget=options.budget, say=say)  # fmt: skip
