"""What the engine is to reach: one row a problem, with whom to compare and what to reach there.

``python -m kernops.bench all`` measures the rows of a device, one after the other, and says which are reached.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from .problem import Config

Row = dict[str, Any]

#: The GPU that times in seconds are for; ratios hold for any.
REFERENCE_GPU = "H200"
#: What an exponential, the sum and the rest of a Gaussian take beside its D differences and squares, in their measure:
#: time per flop counts pairs * (2 D + FIXED_FLOPS).
FIXED_FLOPS = 32
#: In a sweep over D, a step to the next D must not raise the time per flop above this many times.
CLIFF = 2.0


@dataclass(frozen=True)
class Goal:
    """One row.

    Attributes:
        key: its name on the command line.
        config: the problem, its device included.
        peers: names of contenders.
        seconds: to reach, on ``REFERENCE_GPU``.
        ratios: ``(peers, ratio)``: the fastest of these peers shall take at least so many times as long.
        error: largest relative L2 error, of the value and of the gradient by x.
        recall: least share of right neighbours.
        sweep: name of the curve that the row is a point of; ``"dimensions"`` are held against ``CLIFF``.
        probes: what is measured in processes of its own.
    """

    key: str
    config: Config
    peers: tuple[str, ...] = ()
    seconds: float | None = None
    ratios: tuple[tuple[tuple[str, ...], float], ...] = ()
    error: float | None = None
    recall: float | None = None
    sweep: str = ""
    probes: tuple[str, ...] = ()


def _gpu(key: str, case: str, n: int, peers: str = "keops", **more: Any) -> Goal:
    return _goal(key, "cuda", case, n, peers, **more)


def _cpu(key: str, case: str, n: int, peers: str, **more: Any) -> Goal:
    return _goal(key, "cpu", case, n, peers, **more)


def _goal(key: str, device: str, case: str, n: int, peers: str, *, ms: float | None = None,
          to_reach: dict[str, float] | None = None, **more: Any) -> Goal:  # fmt: skip
    """``to_reach`` maps a peer, or several with ``|`` between them for the best of these, to a ratio; ``more`` are
    fields of ``Goal`` and of ``Config``."""
    ratios = tuple((tuple(names.split("|")), ratio) for names, ratio in (to_reach or {}).items())
    names = tuple(dict.fromkeys((*filter(None, peers.split(",")), *(p for group, _ in ratios for p in group))))
    own = {name: more.pop(name) for name in ("error", "recall", "sweep", "probes") if name in more}
    config = Config(case, n, device=device, **more)
    return Goal(key, config, names, None if ms is None else ms / 1000, ratios, **own)


_KEOPS_HALF_MORE = {"keops": 1.5}
#: Ratio of what takes as long, but for the noise of a measurement.
AS_LONG = 0.95

GPU_GOALS: tuple[Goal, ...] = (
    _gpu("gaussian 10k Genred", "gaussian", 10_000, front="Genred", ms=0.09, error=1e-6),
    _gpu("gaussian 10k LazyTensor", "gaussian", 10_000, ms=0.12, error=1e-6),
    _gpu("gaussian 100k", "gaussian", 100_000, ms=2.7, error=1e-6),
    _gpu("gaussian 1M", "gaussian", 1_000_000, ms=260, error=1e-6),
    _gpu("gaussian E=16 100k", "gaussian", 100_000, rhs=16, ms=4.5, error=2e-6),
    _gpu("gaussian D=16 100k", "gaussian", 100_000, d=16, ms=4.0, error=2e-6),
    _gpu("gaussian D=64 100k", "gaussian", 100_000, d=64, ms=6.5, error=2e-6),
    _gpu("gaussian D=128 50k", "gaussian", 50_000, d=128, ms=3.2, error=2e-6),
    _gpu("gaussian D=64 E=16 50k", "gaussian", 50_000, d=64, rhs=16, ms=3.0, error=2e-6),
    _gpu("gradients 10k", "gaussian", 10_000, backward="xyb", ms=0.5, error=2e-6),
    _gpu("gradients 100k", "gaussian", 100_000, backward="xyb", ms=8, error=2e-6),
    _gpu("logsumexp 100k", "logsumexp", 100_000, error=2e-6, to_reach=_KEOPS_HALF_MORE),
    _gpu("softmax 100k", "softmax", 100_000, error=2e-6, to_reach=_KEOPS_HALF_MORE),
    _gpu("matern32 100k", "matern32", 100_000, error=2e-6, to_reach=_KEOPS_HALF_MORE),
    _gpu("laplacian 100k", "laplacian", 100_000, error=2e-6, to_reach=_KEOPS_HALF_MORE),
    _gpu("user 100k", "user", 100_000, error=2e-6, to_reach=_KEOPS_HALF_MORE),
    _gpu("argkmin 100k", "argkmin", 100_000, ms=2.2, recall=1),
    _gpu("argkmin 1M", "argkmin", 1_000_000, ms=110, recall=1),
    _gpu("argkmin K=50 100k", "argkmin", 100_000, k=50, ms=7, recall=1),
    _gpu("argkmin D=64 100k", "argkmin", 100_000, "keops,flashlib", d=64, ms=5.5, recall=1),
    _gpu("argkmin D=128 100k", "argkmin", 100_000, "keops,flashlib", d=128, ms=8, recall=1),
    _gpu("argkmin offset 1000", "argkmin", 30_000, "keops,torch,flashlib", d=64, offset=1000.0, recall=1),
    _gpu("gaussian float64 100k", "gaussian", 100_000, dtype="float64", error=1e-12, to_reach={"keops": 1.3}),
    _gpu("gaussian float16 100k", "gaussian", 100_000, dtype="float16", error=1e-3,
         to_reach={"keops": 1.3, "kernops-float32": AS_LONG}),
    # rounding the result to the 8 bits of bfloat16 alone makes an error of 1.7e-3
    _gpu("gaussian bfloat16 100k", "gaussian", 100_000, "", dtype="bfloat16", error=2e-3,
         to_reach={"kernops-float32": AS_LONG}),
)  # fmt: skip

CPU_GOALS: tuple[Goal, ...] = (
    *(_cpu(f"gaussian {n // 1000}k", "gaussian", n, "", error=1e-6, to_reach={"keops": 20, "torch": 10})
      for n in (10_000, 30_000, 100_000)),
    _cpu("gaussian float64 10k", "gaussian", 10_000, "", dtype="float64", error=1e-12,
         to_reach={"keops": 8, "torch": 6}),
    _cpu("gradients 10k", "gaussian", 10_000, "", backward="x", error=2e-6, to_reach={"keops": 15, "torch": 7}),
    _cpu("logsumexp 10k", "logsumexp", 10_000, "", error=2e-6, to_reach={"keops": 15, "torch": 6}),
    _cpu("gaussian D=64 10k", "gaussian", 10_000, "", d=64, error=2e-6, to_reach={"keops": 20, "torch": 1.5}),
    _cpu("gaussian D=784 10k", "gaussian", 10_000, "", d=784, error=2e-6, to_reach={"keops": 20, "torch": 1.5}),
    _cpu("kde 30k", "kde", 30_000, "", front="estimator", dtype="float64", error=1e-12, to_reach={"sklearn": 100}),
    _cpu("kde 30k rtol=1e-4", "kde", 30_000, "", front="estimator", dtype="float64", rtol=1e-4, error=1e-4,
         to_reach={"sklearn": 30}),
    _cpu("argkmin 30k", "argkmin", 30_000, "", recall=1, to_reach={"keops": 20, "faiss": 3, "sklearn": 3}),
    # every pair computed, as these peers do: what formulas get that are not distances
    _cpu("argkmin 30k brute", "argkmin", 30_000, "keops", algorithm="brute", recall=1,
         to_reach={"faiss": 3, "sklearn": 3}),
    _cpu("argkmin 100k", "argkmin", 100_000, "", recall=1, to_reach={"ckdtree": 1, "sklearn-tree": 3}),
    _cpu("argkmin D=64 30k", "argkmin", 30_000, "", d=64, recall=1,
         to_reach={"keops": 10, "torch": 2, "faiss|faiss-haswell|sklearn": 1.4}),
    _cpu("argkmin D=784 30k", "argkmin", 30_000, "", d=784, recall=1,
         to_reach={"faiss|faiss-haswell|sklearn": 1.3}),
    *(_cpu(f"argkmin D={d} offset 1000", "argkmin", 10_000, "torch,keops,faiss,sklearn", d=d, offset=1000.0, recall=1)
      for d in (3, 64)),
)  # fmt: skip

DIMENSIONS = (8, 32, 100, 112, 200, 512, 1000, 4096)
#: Device -> numbers of points of the curve over N, with those up to which torch and PyKeOps are measured; points of the
#: curve over D.
_SWEEPS = {
    "cuda": ((1000, 3000, 10_000, 30_000, 100_000, 300_000, 1_000_000), 100_000, 1_000_000, 20_000),
    "cpu": ((1000, 3000, 10_000, 30_000, 100_000), 30_000, 30_000, 5000),
}


def _sweeps(device: str) -> Iterable[Goal]:
    sizes, most_torch, most_keops, points = _SWEEPS[device]
    for n in sizes:
        peers = [name for name, most in (("torch", most_torch), ("keops", most_keops)) if n <= most]
        yield _goal(f"sweep N={n}", device, "gaussian", n, ",".join(peers), sweep="points", probes=("memory",))
    for d in DIMENSIONS:
        yield _goal(f"sweep D={d}", device, "gaussian", points, "keops" if d <= 200 else "", d=d, sweep="dimensions")


GOALS: dict[str, tuple[Goal, ...]] = {
    "cuda": (*GPU_GOALS, *_sweeps("cuda")),
    "cpu": (*CPU_GOALS, *_sweeps("cpu")),
}


def chosen(device: str, only: Iterable[str] = ()) -> list[Goal]:
    """The goals of a device whose key is one of ``only``, or contains it where none is; all where ``only`` is empty.

    Raises:
        ValueError: a text of ``only`` is part of no key.
    """
    goals = GOALS[device]
    wanted: set[str] = set()
    for text in only:
        keys = [g.key for g in goals if g.key == text] or [g.key for g in goals if text in g.key]
        if not keys:
            known = ", ".join(g.key for g in goals)
            raise ValueError(f"--only: no row of {device} contains {text!r}; the rows are {known}")
        wanted.update(keys)
    return [g for g in goals if not only or g.key in wanted]


# --- judging --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Check:
    """One thing to reach: what, how much was wanted, how much was found (None: not measured), and whether it was met.

    ``met`` is None where nobody can tell: the peer is missing, or the GPU is another one.
    """

    what: str
    target: float
    found: float | None
    met: bool | None

    def to_json(self) -> Row:
        return {"what": self.what, "target": self.target, "found": self.found, "met": self.met}


def checks(goal: Goal, rows: list[Row], environment: Row) -> list[Check]:
    """What a goal asks for, held against its measured rows, of which the first is that of kernops."""
    ours, by_name = rows[0], {row["contender"]: row for row in rows}
    found: list[Check] = []
    if goal.seconds is not None:
        seconds = ours.get("seconds")
        same = REFERENCE_GPU in environment.get("gpu", "")
        found.append(Check("seconds", goal.seconds, seconds, seconds <= goal.seconds if same and seconds else None))
    for group, target in goal.ratios:
        ratios = [by_name[name]["ratio"] for name in group if by_name.get(name, {}).get("ratio")]
        ratio = min(ratios, default=None)
        met = None if ratio is None else ratio >= target
        if met and len(ratios) < len(group):
            met = None  # the best of them may be one that is missing
        found.append(Check(f"× {' | '.join(group)}", target, ratio, met))
    if goal.error is not None:
        error = max((v for name, v in ours.items() if name.startswith("error")), default=None)
        found.append(Check("error", goal.error, error, None if error is None else error <= goal.error))
    if goal.recall is not None:
        recall = ours.get("recall")
        found.append(Check("recall", goal.recall, recall, None if recall is None else recall >= goal.recall))
    return found


def met(found: Iterable[Row]) -> bool | None:
    """Whether all of a goal's checks are; False as soon as one is not."""
    verdicts = [check["met"] for check in found]
    return False if False in verdicts else None if None in verdicts or not verdicts else True


def time_per_flop(row: Row) -> float:
    """Seconds per flop of a Gaussian's row."""
    config = row["config"]
    return float(row["seconds"]) / (config["n"] ** 2 * (2 * config["d"] + FIXED_FLOPS))


def cliff(row: Row, before: Row) -> Check:
    """A row of the sweep over D against that of the next smaller D."""
    step = time_per_flop(row) / time_per_flop(before)
    return Check(f"time per flop over that of D={before['config']['d']}", CLIFF, step, step <= CLIFF)


def with_peers(goal: Goal, peers: Iterable[str]) -> Goal:
    """The goal with these peers alone."""
    return replace(goal, peers=tuple(p for p in goal.peers if p in set(peers)))
