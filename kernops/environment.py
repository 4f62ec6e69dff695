"""Every environment variable that kernops reads, in one table; nothing else in the package touches `os.environ`
for a setting of its own. The documentation's table is generated from this one."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Variable:
    """`default` is the text used when the variable is unset or empty (None: the library decides)."""

    default: str | None
    doc: str


VARIABLES: dict[str, Variable] = {
    "KERNOPS_AUTOTUNE": Variable(
        "0",
        "`1`: the first reduction of its kind measures a few schedules, and the fastest is remembered in the cache "
        "(see `kernops.autotune`).",
    ),
    "KERNOPS_BACKEND": Variable(
        "auto",
        "Back end used where the call names none: `auto`, `cuda`, `cpu` or `tiled`.",
    ),
    "KERNOPS_CACHE_DIR": Variable(
        None,
        "Directory of compiled code. Unset: `kernops` under the platform's user cache directory "
        "(`$XDG_CACHE_HOME` or `~/.cache`, `~/Library/Caches`, `%LOCALAPPDATA%`).",
    ),
    "KERNOPS_CXX": Variable(
        None,
        "C++ compiler of the `cpu` back end (a name or a path). Unset: the first found of `g++`, `clang++`, `c++`.",
    ),
    "KERNOPS_NUM_THREADS": Variable(
        None,
        "Threads of the `cpu` back end. Unset: torch's number of threads.",
    ),
}


def get(name: str) -> str | None:
    """The value of a variable of the table, read anew at every call; an empty value counts as unset."""
    variable = VARIABLES.get(name)
    if variable is None:
        raise ValueError(f"name={name!r} is not a variable of kernops; the variables are {', '.join(VARIABLES)}")
    if _set is not None and _encoded[name] not in _set:
        return variable.default
    return os.environ.get(name) or variable.default


#: What ``os.environ`` looks into, where it is a dict of encoded names: whether a variable is set costs a look-up there,
#: and ten times as much through ``os.environ``, which encodes the name at every call. ``None`` where it has no such.
_set = getattr(os.environ, "_data", None)
_encoded = {name: getattr(os.environ, "encodekey", str)(name) for name in VARIABLES}
