"""Why a reduction runs as it does: formula, hoisted terms, kernel, schedule, registers, and the least time it can take.

:func:`explain_plan` asks the same pure functions that the back ends ask. Each back end has a list of templates; the
first whose function knows the problem tells about it. A new template is a new row of :data:`TEMPLATES`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ...codegen.floors import Rates, floors
from ...formula.graph import CAT_P, CAT_SCALAR
from ...formula.plan import Plan
from ...formula.reductions import CORES
from .. import choose, tune

Lines = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Problem:
    """A reduction with its sizes, as a back end is given it.

    Attributes:
        plan: what is reduced.
        m, n, batch: numbers of rows, of columns, of batch elements.
        dtype: of the data; ``itemsize`` is that of the arithmetic, 4 for half precision.
        device: a torch device, or the name of a GPU's architecture such as ``"sm_90"``.
        compile: whether compilers may be asked for registers.
    """

    plan: Plan
    m: int
    n: int
    batch: int
    dtype: torch.dtype
    device: torch.device | str
    compile: bool = True

    @property
    def itemsize(self) -> int:
        return max(4, self.dtype.itemsize)

    @property
    def pairs(self) -> int:
        return self.m * self.n * self.batch

    @property
    def moved(self) -> int:
        """Bytes of inputs and results."""
        sizes = {0: self.m, 1: self.n, CAT_P: 1}
        arrays = [v for v in self.plan.variables if v.params[0] != CAT_SCALAR]
        numbers = sum(sizes[v.params[0]] * v.dim for v in arrays)  # type: ignore[index]
        results = self.m * self.plan.dim * max(1, self.plan.k) * self.dtype.itemsize
        results *= 1 + 2 * ("index" in CORES[self.plan.core].outputs)
        return self.batch * (numbers * self.dtype.itemsize + results)


@dataclass(frozen=True)
class Told:
    """What a template tells about a problem.

    Attributes:
        template: its name, and where it is.
        schedule: what was chosen, as (what, how much).
        reasons: why.
        rates, work: of the machine; operations of its units for a pair. None where there is no model.
        compiled: asks the compiler about its kernels: lines, and numbers by the kernel's name.
        values: the schedule for programs.
    """

    template: str
    schedule: Lines
    reasons: tuple[str, ...]
    rates: Rates | None = None
    work: Mapping[str, float] = field(default_factory=dict)
    compiled: Callable[[], tuple[Lines, dict[str, Any]]] | None = None
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Explanation:
    """How a reduction runs and why; ``str`` of it, or ``print``, is the report.

    Attributes:
        backend: ``"cuda"``, ``"cpu"`` or ``"tiled"``.
        template: name of the kernel template.
        schedule: what was chosen, by name.
        reasons: why, in sentences.
        floors: seconds that each unit of the machine takes at least, the longest first; empty without a model.
        kernels: registers and spills of compiled kernels by name; empty where they were not compiled.
        sections: the report's parts: titles, and lines of a label and a text.
    """

    backend: str
    template: str
    schedule: Mapping[str, Any]
    reasons: tuple[str, ...]
    floors: Mapping[str, float]
    kernels: Mapping[str, Any]
    sections: tuple[tuple[str, Lines], ...]

    @property
    def bound(self) -> str | None:
        """The unit that bounds the time, or None."""
        return next(iter(self.floors), None)

    @property
    def floor_ms(self) -> float | None:
        """The least time in milliseconds by the model, or None."""
        return 1000 * max(self.floors.values()) if self.floors else None

    def __str__(self) -> str:
        width = max(len(label) for _, lines in self.sections for label, _ in lines)
        blocks = []
        for title, lines in self.sections:
            blocks.append(title)
            blocks += [f"    {label:<{width}}  {text}".rstrip() for label, text in lines]
        return "\n".join(blocks)

    def __repr__(self) -> str:
        return str(self)


#: Back end -> its templates, in the order in which it tries them: functions ``(problem) -> Told | None``, by module and
#: name, so that asking about one back end loads no other.
TEMPLATES: dict[str, list[str]] = {
    "cuda": ["pruned:pruned", "nearest:nearest", "matrix:matrix", "cuda:tile"],
    "cpu": ["cpu:pruned", "cpu:brute"],
    "tiled": ["tiled:tiles"],
}


def explain_plan(problem: Problem, backend: str = "auto") -> Explanation:
    """How ``problem`` runs.

    Raises:
        ValueError: the back end is unknown, or not for the device.
        RuntimeError: the back end cannot run here.
    """
    if isinstance(problem.device, str):
        if backend not in ("auto", "cuda"):
            raise ValueError(f"backend {backend!r} does not run on {problem.device}; that is the architecture of a GPU")
        name, why = "cuda", "for an architecture"
    else:
        name = choose(backend, problem.device).__name__.rpartition(".")[2]
        why = "chosen for the device" if backend == "auto" else "as asked for"
    for row in TEMPLATES[name]:
        module, _, function = row.partition(":")
        told = getattr(importlib.import_module(f"{__name__}.{module}"), function)(problem)
        if told is not None:
            return _explanation(problem, name, why, told)
    raise AssertionError(f"no template of {name} knows {problem.plan.core} of {problem.plan.formula}")


def _explanation(p: Problem, backend: str, why: str, told: Told) -> Explanation:
    reasons = told.reasons
    if tune.enabled():
        reasons += ("autotune is on: the first call of its kind measures other schedules too, and may prefer one",)
    least = floors(told.work, p.pairs, p.moved, told.rates, p.itemsize) if told.rates else {}
    compiled, kernels = told.compiled() if told.compiled and p.compile else ((), {})
    chosen = (("back end", f"{backend}, {why}"), ("template", told.template), *told.schedule)
    sections = [
        ("what", _what(p)),
        ("hoisted", _hoisted(p.plan)),
        ("how", chosen),
        ("compiled", compiled),
        ("at least" if told.rates is None else f"at least, on {told.rates.name}", _least(least)),
        ("why", tuple((f"{k}.", reason) for k, reason in enumerate(reasons, 1))),
    ]
    kept = tuple((title, lines) for title, lines in sections if lines)
    return Explanation(backend, told.template, told.values, reasons, least, kernels, kept)


def _what(p: Problem) -> Lines:
    plan = p.plan
    sizes = f"{p.m:,} rows, {p.n:,} columns" + (f", {p.batch:,} batch elements" if p.batch > 1 else "")
    lines = [("reduction", f"{plan.core} over the columns j for every row i"), ("formula", str(plan.formula))]
    lines += [("weight", str(plan.weight))] if plan.weight is not None else []
    lines += [("K", str(plan.k))] if plan.k else []
    arithmetic = "" if p.itemsize == p.dtype.itemsize else ", computed in float32"
    return (*lines, ("sizes", sizes), ("numbers", f"{str(p.dtype).removeprefix('torch.')}{arithmetic}, on {p.device}"))


def _hoisted(plan: Plan) -> Lines:
    """What is computed once per row, once per column, and for every pair."""
    program = plan.program
    lines = [("once a row", str(term)) for term in program.row_terms]
    lines += [("once a column", str(term)) for term in program.col_terms]
    lines += [("for every pair", str(root)) for root in program.pair]
    if program.factor is not None:
        lines.append(("times, in the end", str(program.factor)))
    return tuple(lines)


def _least(least: Mapping[str, float]) -> Lines:
    texts = [milliseconds(s) for s in least.values()]
    texts[:1] = [f"{text}, which bounds it" for text in texts[:1]]
    return tuple(zip(least, texts))


def milliseconds(seconds: float) -> str:
    """A time in milliseconds with three digits."""
    ms = 1000 * seconds
    return f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.3g} ms"


def count(number: int, what: str) -> str:
    """A number of things, in the plural unless it is one."""
    plural = "es" if what.endswith("s") else "s"
    return f"{number:,} {what}" + (plural if number != 1 else "")
