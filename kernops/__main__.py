"""The command line: `python -m kernops demo` and `python -m kernops cache`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from kernops import __version__
from kernops.backends import cache


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv[:1] == ["demo"]:  # it has its own options and its own --help
        from kernops import demo

        return demo.main(argv[1:])
    options = _parser().parse_args(argv)
    try:
        return CACHE_ACTIONS[options.action]()
    except OSError as error:
        print(f"kernops cache: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m kernops", description="Pairwise reductions without the table of pairs.")
    parser.add_argument("--version", action="version", version=f"kernops {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("demo", add_help=False, help="kernel jobs on photographs, with pictures and a table of results")
    command = commands.add_parser(
        "cache",
        help="show or clear the disk cache of compiled code",
        description="Show or clear the disk cache of compiled code. KERNOPS_CACHE_DIR names another directory.",
    )
    command.add_argument("action", nargs="?", choices=list(CACHE_ACTIONS), default="list", help="default: list")
    return parser


def _list() -> int:
    entries = cache.entries()
    if entries:
        print(f"{'kind':<8}{'digest':<14}{'size':>10}{'age':>8}  description")
    for entry in entries:
        size, age = _bytes(entry.size), _age(entry.age)
        print(f"{entry.kind:<8}{entry.digest[:12]:<14}{size:>10}{age:>8}  {entry.description}")
    print(_summary(len(entries), sum(entry.size for entry in entries), "in"))
    return 0


def _size() -> int:
    entries = cache.entries()
    print(_summary(len(entries), sum(entry.size for entry in entries), "in"))
    return 0


def _clear() -> int:
    print("removed", _summary(*cache.clear(), "from"))
    return 0


CACHE_ACTIONS = {"list": _list, "size": _size, "clear": _clear}


def _summary(count: int, size: int, preposition: str) -> str:
    return f"{count} {'entry' if count == 1 else 'entries'}, {_bytes(size)}, {preposition} {cache.root()}"


def _bytes(size: float) -> str:
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def _age(seconds: float) -> str:
    for name, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {name}"
    return f"{seconds:.0f} s"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:  # `... | head`
        sys.stderr.close()
        sys.exit(1)
