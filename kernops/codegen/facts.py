"""What a schedule needs to know of a plan: how much work a pair of points is, and what it reads."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from ..formula.graph import CAT_COL, CAT_ROW, PAIR, Node, topological
from ..formula.plan import Plan
from ..formula.vector_ops import einsum_parts
from .emit import Emitter

#: Instructions of an op that is not one instruction.
INSTRUCTIONS = {
    "Exp2": 2, "Exp": 9, "Expm1": 15, "Sigmoid": 12, "Div": 8, "Rsqrt0": 3, "Log": 18, "Log2": 18, "Log0": 19,
    "Log1p": 15, "LogTerm": 5, "LogTermOfNormal": 2, "XLogX": 20, "Softplus": 27, "LogAddExp": 29, "PowInt": 4,
    "Tanh": 15, "Step": 2, "Heaviside": 4, "Where": 2, "IfElse": 2, "Clamp": 2,
}  # fmt: skip
ONE_INSTRUCTION = {
    "Add", "Sub", "Mul", "Neg", "Square", "Abs", "Sign", "Minimum", "Maximum", "ReLU", "Equal", "Less", "LessEqual",
    "NotEqual", "Sqrt", "Rsqrt", "Inv", "Floor", "Round", "Max", "Min", "ArgMax", "ArgMin", "OneHot", "Concat",
    "ExtractT",
}  # fmt: skip
#: Operations of the exponential unit (the GPU's special functions) that an op takes.
SPECIAL = {
    "Exp2": 1, "Exp": 1, "Expm1": 1, "Sigmoid": 2, "Tanh": 2, "Softplus": 2, "LogAddExp": 2, "Log": 1, "Log2": 1,
    "Log0": 1, "Log1p": 1, "LogTerm": 1, "LogTermOfNormal": 1, "XLogX": 1, "Sqrt": 1, "Rsqrt": 1, "Rsqrt0": 1, "Inv": 1,
    "Div": 1, "Sin": 1, "Cos": 1,
}  # fmt: skip
#: The same for what a reduction does with each pair.
SPECIAL_OF_CORE = {"LogSumExp": 1, "SumSoftMaxWeight": 1}
FREE = {"Var", "Const", "Extract", "Broadcast"}
#: All others call a function of many instructions; inlining it for many pairs takes long to compile and gains nothing.
SLOW = 60


@dataclass(frozen=True)
class Work:
    """What one evaluation costs: instructions, numbers read of a row and of a column."""

    instructions: int = 0
    rows: int = 0
    cols: int = 0


@dataclass(frozen=True)
class Facts:
    """What the schedule needs to know of a plan.

    Attributes:
        core, k: as in the plan.
        dim: components that are reduced.
        n_row, n_col: slots of a row, of a column.
        fixed: the part of the pair formula that is the same for all components.
        each: the part that is computed for each component.
        rolled: instructions of the fixed part as written, with long loops unrolled by 8.
        stored: components of intermediate vectors that are kept while a pair is computed.
        slow: whether the pair formula calls functions of many instructions.
        row_by_component: whether a component of the result reads a row slot that depends on its number.
        special: operations of the exponential unit for a pair.
        powers: how many of these are powers of 2, which plain cores can compute, too.
        fused: products that are one instruction with the sum that they are part of.
    """

    core: str
    k: int
    dim: int
    n_row: int
    n_col: int
    fixed: Work
    each: Work
    rolled: int
    stored: int = 0
    slow: bool = False
    row_by_component: bool = False
    special: int = 0
    powers: int = 0
    fused: int = 0


def facts(plan: Plan) -> Facts:
    """The facts of a plan."""
    program = plan.program
    root = program.pair[-1]
    by_component = _by_component(root)
    fixed = [n for n in topological(*program.pair) if n not in by_component]
    nodes = topological(*program.pair)
    widened = () if program.factor is None else topological(program.factor)
    return Facts(
        core=plan.core,
        k=plan.k,
        dim=root.dim,
        n_row=program.n_row,
        n_col=program.n_col,
        fixed=_work(fixed, [n.dim for n in fixed]),
        each=_per_component(by_component, root.dim),
        rolled=_work(fixed, [min(n.dim, 8) for n in fixed]).instructions,
        stored=sum(node.dim for node, at in Emitter(program.pair).blocks[0][1] if at is None),
        slow=any(_instructions(n.op) >= SLOW for n in nodes),
        row_by_component=any(_is_slot(n, CAT_ROW) and n.dim > 1 for n in (*by_component, *widened)),
        special=special(plan),
        powers=sum(n.dim for n in nodes if n.op == "Exp2"),
        fused=sum(any(a.op == "Mul" and a.kind == PAIR for a in n.args) for n in nodes if n.op in ("Add", "Sub"))
        + (plan.core == "Sum" and root.op == "Mul"),
    )


def special(plan: Plan) -> int:
    """Operations of the exponential unit for a pair."""
    nodes = topological(*plan.program.pair)
    return sum(SPECIAL.get(n.op, 0) * n.dim for n in nodes) + SPECIAL_OF_CORE.get(plan.core, 0)


def _per_component(nodes: list[Node], dim: int) -> Work:
    """The work for one of ``dim`` components, on average: of a piece of a concatenation only its own are computed."""
    work = _work(nodes, [min(n.dim, dim) for n in nodes])
    return Work(*(-(-total // dim) for total in (work.instructions, work.rows, work.cols)))


def _by_component(root: Node) -> list[Node]:
    """The vectors below ``root`` of which component c is needed for component c of the result, or a few for each."""
    if root.dim == 1:
        return []
    found, stack = {root}, [root]
    while stack:
        new = [a for a in stack.pop().args if a.dim > 1 and a not in found]
        found.update(new)
        stack.extend(new)
    return [n for n in topological(root) if n in found]


def _is_slot(node: Node, cat: int) -> bool:
    return node.op == "Var" and node.params[0] == cat


def _instructions(op: str) -> int:
    if op in FREE or op in ("Sum", "Einsum"):
        return 0
    return 1 if op in ONE_INSTRUCTION else INSTRUCTIONS.get(op, SLOW)


def instructions(node: Node) -> int:
    """Instructions of all components of a node."""
    return _work([node], [node.dim]).instructions


def _work(nodes: list[Node], counts: list[int]) -> Work:
    """The work of evaluating ``counts[k]`` components of each node."""
    instructions = rows = cols = 0
    for node, count in zip(nodes, counts):
        instructions += _instructions(node.op) * count
        if node.op in ("Sum", "Max", "Min", "ArgMax", "ArgMin"):
            # a sum of products is a chain of fused multiply-adds
            instructions += 0 if node.args[0].op in ("Square", "Mul") else count * node.args[0].dim
        elif node.op == "Einsum":
            size = einsum_parts(node.params)[3]
            inner = prod(size.values()) // node.dim * count
            instructions += inner
            rows, cols = rows + inner * _reads(node, CAT_ROW), cols + inner * _reads(node, CAT_COL)
        rows += count * _is_slot(node, CAT_ROW)
        cols += count * _is_slot(node, CAT_COL)
    return Work(instructions, rows, cols)


def _reads(node: Node, cat: int) -> int:
    return sum(_is_slot(a, cat) for a in node.args)
