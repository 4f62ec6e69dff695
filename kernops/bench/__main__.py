"""The command line: ``python -m kernops.bench gaussian --n 10000,30000 --peer torch,keops``."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..formula.plan import ALGORITHMS
from . import all_command, goals, gp_command, report, splat_command
from .cases import CASES
from .machine import environment
from .measure import PROBES, measure
from .overhead import measure_overhead
from .peers import CONTENDERS
from .probe import Failed
from .problem import DTYPES, FRONTS, Config
from .protocol import BUDGET_SECONDS
from .suites import SUITES

PEERS = tuple(name for name in CONTENDERS if name != "kernops")


def _numbers(text: str) -> list[int]:
    try:
        values = [int(float(part)) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        raise argparse.ArgumentTypeError(f"expected positive numbers, as in 10000,30000; got {text!r}")
    return values


def _names(allowed: tuple[str, ...]):
    def parse(text: str) -> list[str]:
        names = [part for part in text.split(",") if part and part != "none"]
        wrong = [name for name in names if name not in allowed]
        if wrong:
            raise argparse.ArgumentTypeError(f"{wrong[0]!r} is not one of {', '.join(allowed)}")
        return names

    return parse


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--d", type=_numbers, default=[3], metavar="D,…", help="dimensions of the points (3)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--backward", type=_names(("x", "y", "b")), nargs="?", const=["x"], default=[], metavar="x,y,b",
                        help="time the value and the gradients by these inputs (x where none is named)")  # fmt: skip
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--backend", choices=("auto", "cpu", "cuda", "tiled"), default="auto", help="of kernops")
    parser.add_argument("--peer", type=_names(PEERS), metavar="NAME,…",
                        help=f"whom to compare with: {', '.join(PEERS)}, or none (all that do the case)")  # fmt: skip
    parser.add_argument("--repeats", type=int, default=9, help="samples of each, of which the median counts (9)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample and the environment there")


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser("python -m kernops.bench", description="Measure kernops against other libraries.")
    commands = top.add_subparsers(dest="command", required=True)
    for case in CASES.values():
        sub = commands.add_parser(case.name, help=case.doc, description=case.doc)
        sub.add_argument("--n", type=_numbers, default=[10_000], metavar="N,…", help="numbers of points (10000)")
        sub.add_argument("--rhs", type=int, default=1, help="right-hand sides (1)")
        sub.add_argument("--k", type=int, default=10, help="neighbours (10)")
        if case.name == "argkmin":
            sub.add_argument("--algorithm", choices=ALGORITHMS, default="auto",
                             help="of kernops; auto calls argKmin, others kernops.neighbors.knn (auto)")  # fmt: skip
        fronts = FRONTS if case.estimator else FRONTS[:-1]
        sub.add_argument("--front", choices=fronts, default="LazyTensor",
                         help="of kernops and PyKeOps; estimator is of kernops alone (LazyTensor)")  # fmt: skip
        sub.add_argument("--offset", type=float, default=0.0, help="added to every coordinate (0)")
        if case.name == "kde":
            sub.add_argument("--rtol", type=float, default=0.0, help="tolerance that estimators are allowed (0)")
        sub.add_argument("--no-probes", action="store_true", help="measure neither first calls nor memory")
        sub.add_argument("--budget", type=float, default=BUDGET_SECONDS, metavar="S",
                         help="a contender that took S seconds gets fewer samples")  # fmt: skip
        _common(sub)
    _common(commands.add_parser("overhead", help="the cost of a call on ten points"))
    splat_command.add(commands, _names)
    gp_command.add(commands, _names, _numbers)
    all_command.add(commands, _names, PEERS)
    suite = commands.add_parser("suite", help="run the benchmarks of a page of the documentation")
    suite.add_argument("name", choices=tuple(SUITES))
    suite.add_argument("--json", type=Path, required=True, metavar="FILE")
    show = commands.add_parser("show", help="print the tables of JSON files")
    show.add_argument("files", nargs="+", type=Path)
    show.add_argument("--markdown", action="store_true")
    return top


def _say(text: str) -> None:
    """Progress, for a person who waits."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _device(options: argparse.Namespace) -> str:
    cuda = torch.cuda.is_available()
    if options.device == "cuda" and not cuda:
        raise ValueError("--device cuda: torch finds no CUDA device here")
    return {"auto": "cuda" if cuda else "cpu"}.get(options.device, options.device)


def _configs(options: argparse.Namespace, device: str) -> list[Config]:
    """One problem for each size and dimension asked for."""
    name = "gaussian" if options.command == "overhead" else options.command
    case = CASES[name]
    if options.backward and not case.differentiable:
        raise ValueError(f"--backward: {name} has no gradient")
    if not case.uses_b and "b" in options.backward:
        raise ValueError(f"--backward b: {name} has no right-hand side")
    sizes = getattr(options, "n", [1])
    k = getattr(options, "k", 10)
    if name == "argkmin" and not 1 <= k <= min(sizes):
        raise ValueError(f"--k must be between 1 and the number of points, {min(sizes)}; got {k}")
    rhs = getattr(options, "rhs", 1) if case.uses_b else 1
    return [
        Config(name, n, d, options.dtype, rhs, k, "".join(options.backward), device, options.backend,
               getattr(options, "front", "LazyTensor"), getattr(options, "algorithm", "auto"),
               getattr(options, "offset", 0.0), getattr(options, "rtol", 0.0))
        for d in options.d for n in sizes
    ]  # fmt: skip


def run(arguments: list[str]) -> dict[str, Any]:
    """Measure what a command line asks for; the JSON file is a list of these."""
    options = parser().parse_args(arguments)
    device = _device(options)
    found = environment(device)
    rows: list[dict[str, Any]] = []
    own = {"splat": splat_command.run, "gp": gp_command.run}.get(options.command)
    if own is not None:
        rows += own(options, device, _say)
    for config in _configs(options, device) if own is None else ():
        if options.command == "overhead":
            rows += measure_overhead(config, PEERS if options.peer is None else options.peer, options.repeats, _say)
        else:
            asked = options.peer
            if asked is None:
                asked = [p for p in PEERS if not CONTENDERS[p].lacks(config)]
            peers = [p for p in asked if not CONTENDERS[p].cases or config.case in CONTENDERS[p].cases]
            rows += measure(config, peers, repeats=options.repeats, probes=() if options.no_probes else PROBES,
                            budget=options.budget, say=_say)  # fmt: skip
    _say("")
    return {"command": _without_json(arguments), "environment": found, "results": rows}


def _without_json(arguments: list[str]) -> list[str]:
    """The command line without the file, which is nobody else's business."""
    drop = {k + shift for k, a in enumerate(arguments) if a == "--json" for shift in (0, 1)}
    return [a for k, a in enumerate(arguments) if k not in drop and not a.startswith("--json=")]


def _results(options: argparse.Namespace, arguments: list[str]) -> Iterator[dict[str, Any]]:
    """What a command measures, result by result."""
    if options.command == "all":
        yield from all_command.run(options, _device(options), _say)
    elif options.command == "suite":
        yield from (run(shlex.split(line)) for line in SUITES[options.name])
    else:
        yield run(arguments)


def main(arguments: list[str]) -> int:
    options = parser().parse_args(arguments)
    if options.command == "show":
        results = [one for file in options.files for one in json.loads(file.read_text(encoding="utf-8"))]
        print(report.markdown(results) if options.markdown else "\n\n".join(report.texts(results)))
        return 0
    results = []
    try:
        if options.command == "all" and options.list:
            print("\n".join(g.key for g in goals.chosen(_device(options), options.only)))
            return 0
        for result in _results(options, arguments):
            results.append(result)
            _say("")
            print(report.text(result), end="\n\n", flush=True)
            if options.json:  # after each, so that a broken run leaves what it has
                options.json.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        if options.command == "all":
            print(report.summary(results))
    except (ValueError, ImportError) as error:
        print(f"python -m kernops.bench: {error}", file=sys.stderr)
        return 2
    except Failed as error:
        print(f"python -m kernops.bench: kernops: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
