"""Pages of the reference that are tables of the package, written out."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from _formula_text import formula_text

from kernops.environment import VARIABLES
from kernops.formula.functions import FUNCTIONS, NOT_YET
from kernops.formula.graph import CAT_I, var
from kernops.formula.ops import OPS, Op, as_node
from kernops.formula.reductions import CORES, REDUCTIONS, Reduction
from kernops.kernels import KERNELS
from kernops.kernels.constructors import CONSTRUCTORS
from kernops.lazy import LazyTensor
from kernops.lazy.engine import COMPOSED
from kernops.neighbors import METRICS

#: A whole number for ops that take one, so that their derivative can be shown.
EXAMPLE_PARAM = 5


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _call(op: Op) -> str:
    return f"`{op.name}({', '.join([*'abc'[: op.arity], *op.params])})`"


def _derivatives(op: Op) -> str:
    """The elementwise derivative by each argument, as the table of ops has it."""
    if op.partials is None:
        return ""
    args = [var(CAT_I, k, 1) for k in range(op.arity)]
    found = op.partials(*args, *(EXAMPLE_PARAM for _ in op.params))
    texts = ["0" if p is None else formula_text(as_node(p)) for p in found]
    shown = code(texts)
    return f"{shown} (n = {EXAMPLE_PARAM})" if op.params else shown


OPS_PAGE = """# Operations

{generated}

Each row of the first two tables is one row of the table `kernops.formula.ops.OPS`; adding an operation means adding a
row there. The names are those of formula strings (`Genred`, `parse`); the methods are those of `LazyTensor`. Arguments
are called a, b, c; arguments of dimension 1 are broadcast.

## Of single components

Derivatives are those by a, by b and by c, as formulas, so that they can be differentiated again. Where a function has a
kink or a jump, the derivative is that of its smooth parts.

{scalar}

Operators of `LazyTensor`: `+ - * / **` and unary `-`; `== != < <= > >=` give 1 where they hold and 0 elsewhere; `|` is
the scalar product; `@` is a product with an array, summed over the other axis.

## Of whole vectors

{vector}

## Written with these

Names of formula strings that have no row of their own, because they are built from others:
{functions}.

Names of KeOps' formula strings that are not available yet: {not_yet}.
"""


def ops_page() -> str:
    scalar = [
        (_call(op), op.doc, _derivatives(op), code(op.methods), code(op.aliases)) for op in OPS.values() if op.scalar
    ]
    vector = [(_call(op), op.doc, code(op.methods), code(op.aliases)) for op in OPS.values() if not op.scalar]
    return OPS_PAGE.format(
        generated=GENERATED.format("`kernops/formula`"),
        scalar=table(("Operation", "Meaning", "Derivatives", "Methods", "Other names"), scalar),
        vector=table(("Operation", "Meaning", "Methods", "Other names"), vector),
        functions=code(name for name in FUNCTIONS if name not in OPS),
        not_yet=code(NOT_YET),
    )


GENERATED = "*This page is written by `python docs/generate.py` from {}; do not edit it by hand.*"

REDUCTIONS_PAGE = """# Reductions

{generated}

Every reduction is one row of the table `kernops.formula.reductions.REDUCTIONS`: a core with a sign. Over j, the results
have shape (…, M, D'), over i (…, N, D'); those that keep K values, (…, M, K), with a last axis D' only for formulas of
more than one component. Indices are int64; components are compared each on its own. How sums are rounded, and what
becomes of NaN, infinities and ties, is said in [Numerics](../guide/numerics.md).

{reductions}

"Gathered" derivatives: the value is that of the chosen pair, so its gradient is the gradient of the formula at that
pair. An index has no gradient.

## Made of these

{composed}
"""


def _empty(r: Reduction) -> str:
    """What a reduction over nothing gives."""
    values = CORES[r.core].empty
    if values is None:
        return "`ValueError`"
    value = r.sign * values[0] if not math.isnan(values[0]) else values[0]
    return f"`{value + 0.0:g}`"


def _derivative(r: Reduction) -> str:
    if "value" not in r.returns:
        return "–"
    return "a reduction" if CORES[r.core].cotangents else "gathered"


def reductions_page() -> str:
    rows = [
        (f"`{r.name}`", r.doc, ", ".join(r.returns), _empty(r), _derivative(r), code(r.methods), code(r.aliases))
        for r in REDUCTIONS.values()
    ]
    head = ("Reduction", "Meaning", "Returns", "Over nothing", "Derivative", "Methods", "Other names")
    return REDUCTIONS_PAGE.format(
        generated=GENERATED.format("`kernops/formula/reductions.py` and `kernops/lazy/engine.py`"),
        reductions=table(head, rows),
        composed=table(("Reduction", "Meaning", "Method"), map(_composed, COMPOSED)),
    )


def _composed(name: str) -> tuple[str, str, str]:
    """A reduction of ``engine.COMPOSED``; its method has the same name in small letters."""
    method = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.replace("LogSumExpWeight", "Logsumexp")).lower()
    doc = getattr(LazyTensor, method).__doc__.partition("\n")[0].rstrip(".")
    return f"`{name}`", doc, f"`{method}`"


ENVIRONMENT_PAGE = """# Environment variables

{generated}

All of them; each is read when it is needed, not at import.

{variables}
"""


def environment_page() -> str:
    rows = [(f"`{name}`", f"`{row.default}`" if row.default else "–", row.doc) for name, row in VARIABLES.items()]
    return ENVIRONMENT_PAGE.format(
        generated=GENERATED.format("`kernops/environment.py`"),
        variables=table(("Variable", "Default", "Meaning"), rows),
    )


KERNELS_PAGE = """# Kernels and metrics

{generated}

## Kernels

Covariance functions of two points x and y, for `kernops.kernels.kernel` and the estimators; d is the Euclidean distance
of x and y. A parameter without a number is one divided by the number of features.

{kernels}

## Constructors

Kernels as objects, for `kernops.operators.KernelOperator`: these rows with parameters, and `White`, `custom` and what
`+ * **` make of them ([Gaussian processes](../guide/gaussian-processes.md)).

{constructors}

## Metrics

Distances for `kernops.neighbors.knn` and the neighbour estimators; a parameter without a number has to be given. A
function of two `LazyTensor`s is accepted wherever a name is.

{metrics}
"""


def _params(params) -> str:
    return code(name if value is None else f"{name}={value:g}" for name, value in params.items())


def _constructor(name: str) -> tuple[str, str, str]:
    row, changed = CONSTRUCTORS[name]
    return f"`{name}`", f"`{row}`", _params({**KERNELS[row].params, **changed})


def kernels_page() -> str:
    kernels = [(f"`{k.name}`", k.doc, _params(k.params), code(k.aliases)) for k in KERNELS.values()]
    metrics = [(f"`{m.name}`", m.doc, _params(m.params), code(m.aliases)) for m in METRICS.values()]
    head = ("Name", "Meaning", "Parameters", "Other names")
    return KERNELS_PAGE.format(
        generated=GENERATED.format("`kernops/kernels/table.py` and `kernops/neighbors.py`"),
        kernels=table(head, kernels),
        constructors=table(("Constructor", "Row", "Parameters"), map(_constructor, CONSTRUCTORS)),
        metrics=table(head, metrics),
    )
