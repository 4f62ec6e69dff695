"""Formulas whose pairs meet in one sum over components - a dot product or a squared distance - as matrix products.

A GPU's matrix units compute such sums many times faster than its plain cores do, from numbers of half precision; each
number is split into two of them, so that a product loses little (``cuda/halves.cuh`` derives how much). What remains of
the formula, the *epilogue*, reads the sum as a number. This module takes a plan apart accordingly and writes the
formula's text; ``matrix_schedule.py`` decides when and how it is used.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache, reduce

from ..formula.graph import CAT_COL, CAT_ROW, PAIR, I, J, Node, P, const, rewrite, text, topological, var
from ..formula.ops import add, broadcast, concat, mul, neg, sub
from ..formula.plan import Plan, Program
from ..formula.simplify import pieces
from .contraction import SUM_SLOT, SumsEmitter
from .emit import finish_text, pair_text, terms_text

#: Reductions that weigh all pairs. Minima compare values whose last bits would differ from those of plain cores.
CORES = ("Sum", "LogSumExp", "SumSoftMaxWeight")
#: Slots of a row or column, apart from the vectors of the sum, that the epilogue may read.
MOST_SLOTS = 8
#: Components of a result that the epilogue sums itself; more are a second matrix product. Fewer of differences between
#: the vectors, each of which costs a plain core three instructions.
FEW_COMPONENTS, FEW_WITH_DIFFERENCES = 3, 2
#: What reads all components of a vector for each of its own: rows and columns are packed component by component.
WHOLE = {"Sum", "Einsum", "Max", "Min", "ArgMax", "ArgMin"}
#: Functions that jump: a sum that is off by its last bits could change them by a finite amount.
JUMPS = {"Step", "Heaviside", "Sign", "Floor", "Round", "Mod", "Equal", "NotEqual", "Less", "LessEqual", "Where",
         "IfElse", "ArgMin", "ArgMax", "OneHot"}  # fmt: skip


@dataclass(frozen=True)
class RightHandSides:
    """What a wide result sums, times a scalar of each pair, as terms of a column.

    Attributes:
        columns: for each component of the result; what stands for differences is not read.
        moment: 1 if some components are of differences, row vector minus column vector, -1 if of the reverse, else 0.
            The vectors are those of the sum.
        at: the first of those components.
        weight: what the differences are multiplied by.
        weight_at: the component whose column is ``weight``; that after the result's last if none is.
    """

    columns: Node
    moment: int = 0
    at: int = 0
    weight: Node | None = None
    weight_at: int = 0

    @property
    def count(self) -> int:
        """Numbers of a column."""
        return max(self.columns.dim, self.weight_at + 1 if self.moment else 0)


@dataclass(frozen=True)
class Form:
    """A plan's formulas around its one sum over components.

    Attributes:
        square: whether the sum is of squared differences, else of products.
        length: number of components summed.
        left, right: the vectors of the sum, as terms of a row and of a column.
        program: row and column terms without these vectors, the pair formula over the variable of the sum (``sum``),
            the factor. If ``wide``, the pair formula is the scalar that all right-hand sides are multiplied by.
        rhs: the right-hand sides of a wide result, else None.
        exponent: the slope of the exponent if the formula depends on the sum only as exp2(slope · sum + ...), with a
            slope that is the same for all pairs, as a node over row slots; else None. The pair formula then reads
            slope · sum.
        pure: whether that exponent is slope · sum and nothing else.
    """

    square: bool
    length: int
    left: Node
    right: Node
    program: Program
    rhs: RightHandSides | None = None
    exponent: Node | None = None
    pure: bool = False

    @property
    def wide(self) -> bool:
        return self.rhs is not None


SUM = var(CAT_COL, SUM_SLOT, 1)


@lru_cache(maxsize=1024)
def matrix_form(plan: Plan) -> Form | None:
    """``plan`` taken apart, or None where it does not have this form."""
    program = plan.program
    if plan.core not in CORES:
        return None
    sums = {n: s for n in topological(*program.pair) if (s := _product(n))}
    if len(sums) != 1:
        return None
    ((node, (square, x, y)),) = sums.items()
    pair = [rewrite(root, {node: SUM}) for root in program.pair]
    if any(n.op in JUMPS and _reads(n) for root in pair for n in topological(root)):
        return None
    terms = {n: t for table, terms in ((CAT_ROW, program.row_terms), (CAT_COL, program.col_terms))
             for n, t in _slots(table, terms).items()}  # fmt: skip
    rhs = None
    if plan.core == "Sum" and pair[0].dim > (FEW_WITH_DIFFERENCES if _differs(pair[0], x, y) else FEW_COMPONENTS):
        found = _weighted(pair[0], x, y, terms)
        if found is None:
            return None
        pair[0], rhs = found
    if any(n.dim > FEW_COMPONENTS for root in pair for n in topological(root)):
        return None
    rest = _without(program, pair, (x, y), program.factor)
    if rest is None or rest.n_row > MOST_SLOTS or rest.n_col > MOST_SLOTS:
        return None
    exponent = _exponent(plan.core, rest.pair) if square else None
    line = None if exponent is None else _slope(exponent)
    own = _slots(CAT_ROW, rest.row_terms)
    slope, pure = None, False
    if exponent is not None and line is not None and _uniform(line[0], own):
        slope, others = line
        pure = others.value == 0
        rest = replace(rest, pair=(rewrite(rest.pair[0], {exponent: add(SUM, others)}), *rest.pair[1:]))
    vectors = (terms[x], terms[y], *((rhs.columns,) if rhs else ()))
    if any(n.op in WHOLE for n in topological(*vectors)):
        return None
    return Form(square, x.dim, terms[x], terms[y], rest, rhs, slope, pure)


def _uniform(slope: Node, slots: dict[Node, Node]) -> bool:
    """Whether a slope is the same for all rows; one that is positive whatever the data is not an exponent's."""
    return all(slots[v].kind == P for v in topological(slope) if v.is_var) and not (slope.value or 0) > 0


def _slots(cat: int, terms: tuple[Node, ...]) -> dict[Node, Node]:
    """Slot variables of hoisted terms -> the terms."""
    out, offset = {}, 0
    for term in terms:
        out[var(cat, offset, term.dim)] = term
        offset += term.dim
    return out


def _product(node: Node) -> tuple[bool, Node, Node] | None:
    """``(whether of squared differences, row slot, column slot)`` of a sum of the form wanted."""
    if node.op != "Sum" or node.kind != PAIR:
        return None
    inside = node.args[0]
    square = inside.op == "Square" and inside.args[0].op == "Sub"
    if not square and inside.op != "Mul":
        return None
    x, y = sorted(inside.args[0].args if square else inside.args, key=lambda n: n.kind)
    fits = x.is_var and y.is_var and (x.kind, y.kind) == (I, J) and x.dim == y.dim == inside.dim
    return (square, x, y) if fits else None


def _differs(root: Node, x: Node, y: Node) -> bool:
    """Whether a part of ``root`` is a multiple of x - y."""
    return any(n.op == "Sub" and set(n.args) == {x, y} for n in topological(root))


def _weighted(root: Node, x: Node, y: Node, terms: dict[Node, Node]) -> tuple[Node, RightHandSides] | None:
    """``(scalar, right-hand sides)`` with root = scalar · those, each a column or, some of them, x - y up to its sign.

    ``terms`` are the columns' terms by their slots.
    """
    scalars: set[Node] = set()
    columns: list[Node] = []
    weights: list[Node | None] = []  # where they are all of a component
    moment, at, weight, start = 0, 0, None, 0
    for piece in pieces(root, ("Concat",)):
        found = _factors(piece, x, y)
        if found is None:
            return None
        scalar, column, vector = found
        scalars.add(scalar)
        column = rewrite(column, terms)
        if vector is not None and vector.op == "Sub":
            if moment:
                return None
            moment, at, weight = (1 if vector.args[0] is x else -1), start, column
        columns.append(broadcast(column, piece.dim) if vector is None else terms[y] if vector.op == "Sub"
                       else mul(column, rewrite(vector, terms)))  # fmt: skip
        weights += [column if vector is None else None] * piece.dim
        start += piece.dim
    if len(scalars) != 1 or not _reads(*scalars):
        return None
    weight_at = weights.index(weight) if moment and weight in weights else start
    return scalars.pop(), RightHandSides(concat(*columns), moment, at, weight, weight_at)


def _factors(piece: Node, x: Node, y: Node) -> tuple[Node, Node, Node | None] | None:
    """``(scalar of pairs, scalar of columns, vector)`` with the product ``piece``; the vector of columns, or x - y."""
    of_pair: list[Node] = []
    of_column: list[Node] = []
    vector, stack = None, [piece]
    while stack:
        node = stack.pop()
        columns = node.kind in (0, J) and not _reads(node)
        if node.op in ("Broadcast", "Mul"):
            stack.extend(reversed(node.args))
        elif node.op == "Neg":
            of_column.append(const(-1.0))
            stack.append(node.args[0])
        elif node.dim > 1:
            if vector is not None or not (columns or node.op == "Sub" and set(node.args) == {x, y}):
                return None
            vector = node
        else:
            (of_column if columns else of_pair).append(node)
    if not of_pair:
        return None
    of_pair.sort(key=lambda n: n.digest)
    return reduce(mul, of_pair), reduce(mul, of_column, const(1.0)), vector


def _without(program: Program, pair: list[Node], vectors: tuple, factor: Node | None) -> Program | None:
    """The program without the slots of ``vectors``, renumbered; None if a vector is read apart from the sum."""
    needed = {n for root in (*pair, *([factor] if factor else [])) for n in topological(root) if n.is_var}
    if any(v in needed for v in vectors):
        return None
    new: dict[Node, Node] = {}
    kept: dict[int, list[Node]] = {CAT_ROW: [], CAT_COL: []}
    for cat, terms in ((CAT_ROW, program.row_terms), (CAT_COL, program.col_terms)):
        offset = 0
        for slot, term in _slots(cat, terms).items():
            if slot in needed:
                new[slot] = var(cat, offset, term.dim)
                kept[cat].append(term)
                offset += term.dim
    pair = [rewrite(root, new) for root in pair]
    return Program(tuple(kept[CAT_ROW]), tuple(kept[CAT_COL]), tuple(pair), factor and rewrite(factor, new))


# --- what an error of the sum does to the result ---------------------------------------------------------------------
def _exponent(core: str, pair: tuple[Node, ...]) -> Node | None:
    """The node that is an exponent, if SUM is read by it alone; else None."""
    root = pair[0]
    if any(_reads(other) for other in pair[1:]):
        return None
    if core != "Sum":
        return root
    powers = [n for n in topological(root) if _reads(n) and n.op in ("Exp2", "Exp")]
    if len(powers) != 1 or not _only_through(root, powers[0]):
        return None
    return powers[0].args[0]


@lru_cache(maxsize=4096)
def _reads(node: Node) -> bool:
    return SUM in topological(node)


def _only_through(node: Node, gate: Node) -> bool:
    """Whether SUM, and so an error of it, reaches ``node`` through ``gate`` alone and as one factor."""
    if node is gate:
        return True
    if node.op in ("Mul", "Neg"):
        reading = [a for a in node.args if _reads(a)]
        return len(reading) == 1 and _only_through(reading[0], gate)
    return False


def _slope(node: Node) -> tuple[Node, Node] | None:
    """``(slope, rest)`` with node = slope · SUM + rest and a slope that is the same for all columns, or None."""
    if node is SUM:
        return const(1.0), const(0.0)
    reading = [a for a in node.args if _reads(a)]
    if len(reading) != 1:
        return None
    inner = _slope(reading[0])
    if inner is None:
        return None
    (slope, rest), others = inner, [a for a in node.args if a is not reading[0]]
    if node.op == "Neg":
        return neg(slope), neg(rest)
    if node.op == "Add":
        return slope, add(rest, others[0])
    if node.op == "Sub":
        return (slope, sub(rest, others[0])) if reading[0] is node.args[0] else (neg(slope), sub(others[0], rest))
    if node.op == "Mul" and len(others) == 1 and others[0].kind in (0, I) and others[0].dim == 1:
        return mul(others[0], slope), rest if rest.value == 0 else mul(others[0], rest)
    return None


# --- text ------------------------------------------------------------------------------------------------------------
def emit_matrix(plan: Plan, form: Form) -> str:
    """The C++ text of a plan of this form; the struct is ``kn::Formula``.

    Its members, apart from those of ``emit.emit``: ``left(in, d)`` and ``right(in, d)`` are components of the vectors,
    ``rhs(in, d)`` and ``weight(in)`` those of right-hand sides; ``slope(x)`` is the exponent's slope; ``pair`` reads
    the sum, times the slope if there is one, as ``y.sum(0)``.
    """
    p = form.program
    rhs = form.rhs or RightHandSides(const(0.0))
    pair = pair_text(p.pair, SumsEmitter)
    slope = "return T(0);" if form.exponent is None else _value(form.exponent)
    return f"""// {plan.core} over j of {text(plan.formula, 1000)}
namespace kn {{
struct Formula {{
  static constexpr int NVARS = {plan.n_vars};   // tensors
  static constexpr int NROW = {p.n_row}, NCOL = {p.n_col};  // slots besides the vectors of the sum
  static constexpr int LENGTH = {form.length};  // components of these vectors
  static constexpr int DIM = {plan.dim if form.wide else p.pair[-1].dim};     // components that are reduced
  static constexpr int OUT = {plan.dim};     // components of the result
  static constexpr int FIRST = {plan.outputs[0][1]};   // those of the first result; the others are a second one
  static constexpr int K = 0;
  static constexpr int MOMENT = {rhs.moment};   // 1: some are of differences row - column; -1: column - row; 0: none
  static constexpr int MOMENT_AT = {rhs.at}, WEIGHT_AT = {rhs.weight_at};  // the first of those; what weighs them
  static constexpr bool SQUARE = {_bool(form.square)};     // whether squared differences are summed, else products
  static constexpr bool EXPONENT = {_bool(form.exponent is not None)};   // whether slope * sum is an exponent, only

  template <class T, class In, class Out> KN_FN static void row(const In& in, Out out) {{
    typedef T V;
{terms_text(p.row_terms)}
  }}
  template <class T, class In, class Out> KN_FN static void col(const In& in, Out out) {{
    typedef T V;
{terms_text(p.col_terms)}
  }}
{_vector("left", form.left)}{_vector("right", form.right)}{_vector("rhs", rhs.columns)}\
  template <class T, class In> KN_FN static T weight(const In& in) {{
    typedef T V;
    {_value(rhs.weight or const(1.0))}
  }}
  template <class T, class X> KN_FN static T slope(const X& x) {{
    typedef T V;
    {slope}
  }}
  template <int C, class V, class X, class Y> KN_FN static void pair(const X& x, const Y& y, int c0, V* out) {{
{pair}
  }}
  template <class T, class X> KN_FN static T finish(const X& x, int c, T value) {{
    typedef T V;
{finish_text(p.factor)}
  }}
}};
}}  // namespace kn
"""


def _value(node: Node) -> str:
    e = SumsEmitter((node,))
    e.line(f"return {e.component(node, 0)};")
    return e.text()


def _vector(name: str, term: Node) -> str:
    e = SumsEmitter((term,))
    e.line(f"return {e.component(term, 'd' if term.dim > 1 else 0)};")
    return f"""  template <class T, class In> KN_FN static T {name}(const In& in, int d) {{
    typedef T V;
{e.text()}
  }}
"""


def _bool(value: bool) -> str:
    return "true" if value else "false"
