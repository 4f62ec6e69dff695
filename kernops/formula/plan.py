"""A reduction as data: what a back end is asked to compute, and how its work splits into rows, columns and pairs."""

from __future__ import annotations

import hashlib
import numbers
import threading
import weakref
from dataclasses import dataclass
from functools import cached_property, lru_cache

from .graph import CAT_COL, CAT_I, CAT_J, CAT_ROW, CAT_SCALAR, PAIR, J, Node, Param, check, rewrite, var, variables
from .ops import apply, lowered, total
from .reductions import CORES
from .simplify import pieces, row_factor, simplify, weighed_terms

#: How a minimum is found: as the back end sees fit, by comparing all pairs, or by leaving out those that cannot matter
#: (an error where that cannot be done).
ALGORITHMS = ("auto", "brute", "pruned")
#: Ops whose result has more components than their arguments: storing it per column would cost more than computing it.
_EXPANDING = {"Broadcast", "ExtractT", "OneHot", "Einsum"}


@dataclass(frozen=True)
class Program:
    """A plan's formulas after hoisting.

    Attributes:
        row_terms: computed once per row i, over the plan's variables; one after the other in the row's slots.
        col_terms: computed once per column j, likewise.
        pair: computed per pair, over slots (``CAT_ROW`` / ``CAT_COL`` variables, number = offset) and constants;
            the reduced formula, then the weight if the core has one.
        factor: multiplies the result of row i, over row slots; ``None`` for 1.
    """

    row_terms: tuple[Node, ...]
    col_terms: tuple[Node, ...]
    pair: tuple[Node, ...]
    factor: Node | None

    @property
    def n_row(self) -> int:
        return sum(t.dim for t in self.row_terms)

    @property
    def n_col(self) -> int:
        return sum(t.dim for t in self.col_terms)


@dataclass(frozen=True, eq=False)
class Plan:
    """A core reduction of a formula over the columns j, for every row i.

    Build it with :func:`make_plan`, which returns the same object for the same request, so that equality is identity.

    Attributes:
        core: name of the core, a key of ``CORES``.
        formula: what is reduced.
        weight: second formula of a weighted core, else ``None``.
        k: number of columns kept by ``KMin``, else 0.
        n_vars: number of tensors that ``reduce`` is given; variable number v of the formulas is tensor v.
        algorithm: one of ``ALGORITHMS``. The result is the same.
        first: of a sum, the number of components of the first of two results, if there shall be two; else 0.
    """

    core: str
    formula: Node
    weight: Node | None
    k: int
    n_vars: int
    algorithm: str = "auto"
    first: int = 0

    @cached_property
    def variables(self) -> tuple[Node, ...]:
        """The variables that occur, ordered by number."""
        return tuple(variables(*self.roots))

    @cached_property
    def tensors(self) -> tuple[int, ...]:
        """Numbers of the variables that occur and are tensors."""
        return tuple(v.params[1] for v in self.variables if v.params[0] != CAT_SCALAR)  # type: ignore[misc]

    @cached_property
    def reads(self) -> tuple[tuple[int, int, int], ...]:
        """Number, category and components of each variable that occurs and is a tensor."""
        used = (v.params for v in self.variables)
        return tuple((number, cat, dim) for cat, number, dim in used if cat != CAT_SCALAR)  # type: ignore[misc]

    @cached_property
    def reads_all(self) -> bool:
        """Whether the formula reads every tensor and number that it is given."""
        return len(self.variables) == self.n_vars

    @property
    def roots(self) -> tuple[Node, ...]:
        return (self.formula,) if self.weight is None else (self.formula, self.weight)

    @property
    def dim(self) -> int:
        """Number of components of the result."""
        return self.formula.dim if self.weight is None else self.weight.dim

    @cached_property
    def outputs(self) -> tuple[tuple[str, int], ...]:
        """Name (see ``Core.outputs``) and number of components of each result."""
        if self.first:
            return ("value", self.first), ("value", self.dim - self.first)
        return tuple((name, 1 if name == "lse" else self.dim) for name in CORES[self.core].outputs)

    @cached_property
    def program(self) -> Program:
        return hoist(self)

    @cached_property
    def points(self) -> tuple[int, int] | None:
        """Numbers of the i-variable and the j-variable whose squared distance the formula is, if it is one."""
        if len(self.variables) != 2:
            return None
        x, y = sorted(self.variables, key=lambda v: v.params[0])  # type: ignore[arg-type,return-value]
        if (x.params[0], y.params[0]) != (CAT_I, CAT_J) or x.dim != y.dim:
            return None
        ways = [lowered(apply("SqDist", *pair)) for pair in ((x, y), (y, x))]
        root = lowered(self.formula)
        if root.op == "Sum":
            root = total(root.args[0])  # which leaves out the sum over a single component
        return (x.params[1], y.params[1]) if root in ways else None  # type: ignore[return-value]

    @cached_property
    def digest(self) -> str:
        """A hash that is the same in every process."""
        text = repr((self.core, [r.digest for r in self.roots], self.k, self.n_vars, self.first))
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def __reduce__(self) -> tuple:
        return make_plan, (self.core, self.formula, self.weight, self.k, self.n_vars, self.algorithm, self.first)


_plans: weakref.WeakValueDictionary[tuple, Plan] = weakref.WeakValueDictionary()
_lock = threading.Lock()


@lru_cache(maxsize=4096)
def make_plan(
    core: str,
    formula: Node,
    weight: Node | None = None,
    k: int = 0,
    n_vars: int | None = None,
    algorithm: str = "auto",
    first: int = 0,
) -> Plan:
    """The plan of a reduction over j; raises ``ValueError`` where the parts do not fit."""
    if core not in CORES:
        raise ValueError(f"core must be one of {', '.join(CORES)}; got {core!r}")
    if CORES[core].weighted != (weight is not None):
        raise ValueError(f"{core} {'needs a' if weight is None else 'takes no'} weight formula")
    if core == "SumSoftMaxWeight" and formula.dim != 1:
        raise ValueError(f"the softmax formula must be scalar; got dimension {formula.dim}")
    if not isinstance(k, numbers.Integral) or (k < 1 if core == "KMin" else k != 0):
        raise ValueError(f"k must be a positive integer for KMin and 0 otherwise; got {k!r} for {core}")
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {', '.join(map(repr, ALGORITHMS))}; got {algorithm!r}")
    if first and not (core == "Sum" and 0 < first < formula.dim):
        raise ValueError(f"first: a Sum of dimension > 1 can have two results; got {first} for {core} of {formula.dim}")
    one_meaning: dict[Param, Node] = {}
    for v in variables(formula, *([weight] if weight else [])):
        if one_meaning.setdefault(v.params[1], v) is not v:
            raise ValueError(f"variable number {v.params[1]} is used as {one_meaning[v.params[1]]} and as {v}")
    top = 1 + max(map(int, one_meaning), default=-1)  # type: ignore[arg-type]
    key = (core, formula, weight, int(k), max(top, n_vars or 0), algorithm, first)
    with _lock:  # the cache above knows requests, of which several may mean one plan
        plan = _plans.get(key)
        if plan is None:
            plan = _plans[key] = Plan(*key)
    return plan


def hoist(plan: Plan) -> Program:
    """Split the plan's formulas by what each term depends on."""
    roots = [simplify(lowered(r)) for r in plan.roots]
    factor = None
    if plan.core == "Sum" and (not plan.first or roots[0].op == "Concat"):  # else a factor could take components away
        factor, roots[0] = row_factor(roots[0])
        roots[0] = weighed_terms(roots[0])
    rows: dict[Node, Node] = {}
    cols: dict[Node, Node] = {}
    for piece in [] if factor is None else pieces(factor):
        if piece.value is None:
            _slot(piece, rows, CAT_ROW)
    pair = tuple(_pair_part(r, rows, cols) for r in roots)
    slot_factor = None if factor is None else rewrite(factor, rows)
    for r in pair:
        check(r)
    return Program(tuple(rows), tuple(cols), pair, slot_factor)


def _slot(node: Node, table: dict[Node, Node], cat: int) -> Node:
    """The slot that holds ``node``, allotted on first use."""
    if node not in table:
        last = next(reversed(table.values()), None)
        offset = 0 if last is None else last.params[1] + last.dim  # type: ignore[operator]
        table[node] = var(cat, offset, node.dim)  # type: ignore[arg-type]
    return table[node]


def _pair_part(root: Node, rows: dict[Node, Node], cols: dict[Node, Node]) -> Node:
    """``root`` over slots: every largest part that needs only the row or only the column becomes a slot."""
    replace: dict[Node, Node] = {}
    stack, seen = [root], {root}
    while stack:
        node = stack.pop()
        if node.kind == PAIR or _expands(node):
            new = [a for a in node.args if a not in seen]
            seen.update(new)
            stack.extend(new)
        elif node.op != "Const":  # what is made of constants only is computed once per row, too
            table, cat = (cols, CAT_COL) if node.kind == J else (rows, CAT_ROW)
            replace[node] = _slot(node, table, cat)
    return rewrite(root, replace)


def _expands(node: Node) -> bool:
    return node.op in _EXPANDING and node.dim > sum(a.dim for a in node.args)
