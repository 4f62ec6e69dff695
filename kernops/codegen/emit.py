"""From a hoisted plan to C++: one struct of inlined functions that both compilers instantiate their templates with.

The text uses only the vocabulary of namespace ``kn`` (scalar functions, ``select``, ``splat``) on a value type ``V``,
so that the same struct serves a CUDA thread (``V`` = float or double) and a SIMD lane group on a CPU. Its members:

* ``row<T>(in, out)``, ``col<T>(in, out)``: the hoisted terms of one row or column; ``in.at(k, d)`` is component d of
  tensor k, ``out[s]`` is slot s (a pointer, or an object that knows how slots are laid out).
* ``pair<C, V>(x, y, c0, out)``: components c0 .. c0 + C - 1 of the reduced formula for one pair (for a weighted core:
  the formula in ``out[0]``, components of the weight after it); ``x[s]`` and ``y[s]`` are row and column slots.
* ``finish<T>(x, c, value)``: component c of the result, given the matching component of the reduced value.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from typing import ClassVar

from ..formula.graph import CAT_COL, CAT_ROW, PAIR, Node, text, topological
from ..formula.ops import OPS
from ..formula.plan import Plan
from ..formula.signs import sign_of
from ..formula.vector_ops import einsum_parts

#: Loops up to this length are unrolled in full, so that arrays indexed by their variable can live in registers.
FULL_UNROLL = 64
#: Inlining a vector component twice is preferred to storing the vector while it costs at most this many operations.
CHEAP = 2
#: Vectors are stored after at most so many inlined operations: Python's recursion, and a compiler's, has an end.
DEEP = 64

Index = "int | str"


def number(value: float) -> str:
    """A double literal."""
    if math.isnan(value):
        return "KN_NAN"
    if math.isinf(value):
        return "KN_INF" if value > 0 else "(-KN_INF)"
    return repr(float(value))


def splat(value: float) -> str:
    return f"kn::splat<V>({number(value)})"


def plus(index: int | str, offset: int) -> int | str:
    if isinstance(index, int):
        return index + offset
    return index if offset == 0 else f"{index} + {offset}"


class Emitter:
    """Writes the statements of one function. Scalars get a name each; components of vectors are inlined in loops."""

    #: Operations that a loop may have when it is unrolled in full; a longer one is unrolled less. 0: any number.
    most_unrolled: ClassVar[int] = 0

    def __init__(self, roots: tuple[Node, ...]) -> None:
        self.blocks: list[tuple[list[str], dict[tuple, str]]] = [([], {})]
        self.count = 0
        order = topological(*roots)
        uses = Counter(a for n in order for a in n.args)
        random = {a for n in order if n.op == "Einsum" for a in n.args}
        self.begun = _begun(order, uses, roots)
        within = {total for total, _ in self.begun.values()}
        self.cost: dict[Node, int] = {}
        depth: dict[Node, int] = {}  # of inlining
        for node in order:
            self.cost[node] = self._cost(node)
            depth[node] = 1 + max((depth[a] for a in node.args), default=0)
            if node.dim == 1:
                if node not in within:
                    self.component(node, 0)
                depth[node] = 0
            elif node.args and (depth[node] > DEEP or self.cost[node] > CHEAP and (uses[node] > 1 or node in random)):
                self._store(node)
                depth[node] = self.cost[node] = 0

    def _cost(self, node: Node) -> int:
        if not node.args:
            return 0
        written = OPS[node.op].text or "kn::"
        own = 6 * (written.count("kn::") - written.count("kn::splat")) or 1
        if node.op in ("Extract", "Broadcast", "ExtractT", "Concat"):
            own = 1
        return own + sum(self.cost[a] for a in node.args if a.dim > 1)

    # -- writing ----------------------------------------------------------------------------------------------------
    def line(self, text: str) -> None:
        self.blocks[-1][0].append("  " * len(self.blocks) + text)

    def fresh(self, prefix: str = "t") -> str:
        self.count += 1
        return f"{prefix}{self.count}"

    def let(self, expression: str) -> str:
        name = self.fresh()
        self.line(f"const V {name} = {expression};")
        return name

    def loop(self, length: int | str, work: int = 0) -> str:
        """Open ``for (d = 0; d < length; ++d)``, of ``work`` operations for each d; returns the name of d. Close it
        with :meth:`end`."""
        d = self.fresh("d")
        unroll = length if isinstance(length, str) or length <= FULL_UNROLL else 8
        if isinstance(unroll, int) and self.most_unrolled:
            while unroll > 1 and unroll * work > self.most_unrolled:
                unroll = (unroll + 1) // 2
        self.line(f"KN_UNROLL({unroll})")
        self.begin(f"for (int {d} = 0; {d} < {length}; ++{d})")
        return d

    def begin(self, head: str) -> None:
        """Open a block; close it with :meth:`end`."""
        self.line(head + " {")
        self.blocks.append(([], {}))

    def end(self) -> None:
        lines, _ = self.blocks.pop()
        self.blocks[-1][0].extend(lines)
        self.line("}")

    def text(self) -> str:
        assert len(self.blocks) == 1, "a loop was left open"
        return "\n".join("  " + line for line in self.blocks[0][0])

    # -- values -----------------------------------------------------------------------------------------------------
    def component(self, node: Node, index: int | str) -> str:
        """The name of component ``index`` of ``node``."""
        if node.dim == 1:
            index = 0
        for _, names in reversed(self.blocks):
            if (node, index) in names:
                return names[node, index]
            if (node, None) in names:  # a stored vector
                return f"{names[node, None]}[{index}]"
        name = self._compute(node, index)
        self.blocks[-1][1][node, index] = name
        return name

    def _compute(self, node: Node, index: int | str) -> str:
        if node.op == "Const":
            return splat(node.params[0])  # type: ignore[arg-type]
        if node.op == "Var":
            cat, number_, _ = node.params
            if cat in (CAT_ROW, CAT_COL):
                return f"{'x' if cat == CAT_ROW else 'y'}[{plus(index, number_)}]"  # type: ignore[arg-type]
            return self.let(f"in.at({number_}, {index})")
        op = OPS[node.op]
        if node in self.begun:
            whole, first = self.begun[node]
            return self._fold(whole, self.component(first, 0), "{0} + {1}")
        if node.op == "Exp2" and sign_of(node.args[0]) < 0:
            return self.let(f"kn::exp2_of_negative({self.component(node.args[0], index)})")
        if op.text is not None:
            args = [self.component(a, index) for a in node.args]
            return self.let(op.text.format(*args, *node.params))
        return getattr(self, f"_emit_{op.emit}")(node, index)

    def _store(self, node: Node) -> None:
        name = self.fresh("v")
        self.line(f"V {name}[{node.dim}];")
        d = self.loop(node.dim, self.cost[node])
        self.line(f"{name}[{d}] = {self.component(node, d)};")
        self.end()
        self.blocks[-1][1][node, None] = name

    def write(self, root: Node, base: int) -> None:
        """Write components c0 .. c0 + C - 1 of ``root`` to ``out[base]`` and what follows it."""
        if root.dim == 1:
            self.line(f"out[{base}] = {self.component(root, 0)};")
            return
        pieces = self._pieces(root) if root.op == "Concat" and (root, None) not in self.blocks[0][1] else []
        if pieces:  # with all components at once, each piece has a loop of its own, and no component chooses among them
            self.begin("if constexpr (C == DIM)")
            for start, piece in pieces:
                self.write_all(piece, base + start)
            self.end()
            self.begin("else")
        c = self.loop("C")
        self.line(f"out[{plus(c, base)}] = {self.component(root, f'c0 + {c}')};")
        self.end()
        if pieces:
            self.end()

    def write_all(self, node: Node, base: int, work: int = 0) -> None:
        """Write all components of ``node`` to ``out[base]`` and what follows it; ``work`` is as for :meth:`loop`."""
        if node.dim == 1:
            self.line(f"out[{base}] = {self.component(node, 0)};")
            return
        d = self.loop(node.dim, work)
        self.line(f"out[{plus(d, base)}] = {self.component(node, d)};")
        self.end()

    # -- rules of the vector ops, named by Op.emit --------------------------------------------------------------------
    def _fold(self, node: Node, init: str, update: str) -> str:
        """Fold the components of the argument: ``update`` is formatted with the running value and a component."""
        acc, arg = self.fresh("s"), node.args[0]
        if arg.dim == 1:
            return self.component(arg, 0)
        self.line(f"V {acc} = {init};")
        d = self.loop(arg.dim, self.cost[arg] + 1)
        self.line(f"{acc} = {update.format(acc, self.component(arg, d))};")
        self.end()
        return acc

    def _emit_sum(self, node: Node, index: int | str) -> str:
        return self._fold(node, splat(0.0), "{0} + {1}")

    def _emit_max(self, node: Node, index: int | str) -> str:
        return self._fold(node, splat(-math.inf), "kn::max_({0}, {1})")

    def _emit_min(self, node: Node, index: int | str) -> str:
        return self._fold(node, splat(math.inf), "kn::min_({0}, {1})")

    def _emit_arg(self, node: Node, better: str) -> str:
        best, arg, where = self.fresh("s"), node.args[0], self.fresh("s")
        self.line(f"V {best} = {self.component(arg, 0)}, {where} = {splat(0.0)};")
        if arg.dim > 1:
            d = self.loop(arg.dim, self.cost[arg] + 4)
            value = self.component(arg, d)
            first_nan = f"kn::and_(kn::is_nan({value}), kn::eq({best}, {best}))"
            take = self.fresh("m")
            self.line(f"const auto {take} = kn::or_({better.format(value, best)}, {first_nan});")
            self.line(f"{where} = kn::select({take}, kn::splat<V>(double({d})), {where});")
            self.line(f"{best} = kn::select({take}, {value}, {best});")
            self.end()
        return where

    def _emit_argmax(self, node: Node, index: int | str) -> str:
        return self._emit_arg(node, "kn::lt({1}, {0})")

    def _emit_argmin(self, node: Node, index: int | str) -> str:
        return self._emit_arg(node, "kn::lt({0}, {1})")

    def _emit_extract(self, node: Node, index: int | str) -> str:
        return self.component(node.args[0], plus(index, node.params[0]))  # type: ignore[arg-type]

    def _emit_broadcast(self, node: Node, index: int | str) -> str:
        return self.component(node.args[0], 0)

    def _within(self, arg: Node, index: str, start: int) -> str:
        """Component ``index - start`` of ``arg``, or any component of it where there is no such: safe to evaluate."""
        if arg.dim == 1:
            return self.component(arg, 0)
        at = f"kn::within({index} - {start}, {arg.dim})"
        names = self.blocks[-1][1]
        if (at,) not in names:
            names[at,] = self.fresh("i")
            self.line(f"const int {names[at,]} = {at};")
        return self.component(arg, names[at,])

    def _emit_pad(self, node: Node, index: int | str) -> str:
        arg, start = node.args[0], int(node.params[0])
        end = start + arg.dim
        if isinstance(index, int):
            return self.component(arg, index - start) if start <= index < end else splat(0.0)
        return self.let(f"({index} >= {start} && {index} < {end}) ? {self._within(arg, index, start)} : {splat(0.0)}")

    def _emit_concat(self, node: Node, index: int | str) -> str:
        pieces = self._pieces(node)
        if isinstance(index, int):
            start, piece = max((p for p in pieces if p[0] <= index), key=lambda p: p[0])
            return self.component(piece, index - start)
        values = [(start, self._within(piece, index, start)) for start, piece in pieces]
        name = self.fresh()
        self.line(f"V {name} = {values[0][1]};")
        for start, value in values[1:]:
            self.line(f"{name} = {index} >= {start} ? {value} : {name};")
        return name

    def _pieces(self, node: Node) -> list[tuple[int, Node]]:
        """``(start, vector)`` of what a tree of concatenations is made of."""
        out: list[tuple[int, Node]] = []
        stack, start = list(reversed(node.args)), 0
        while stack:
            piece = stack.pop()
            if piece.op == "Concat" and not any((piece, None) in names for _, names in self.blocks):
                stack.extend(reversed(piece.args))
            else:
                out.append((start, piece))
                start += piece.dim
        return out

    def _emit_onehot(self, node: Node, index: int | str) -> str:
        position = f"kn::round({self.component(node.args[0], 0)})"
        return self.let(f"kn::select(kn::eq({position}, kn::splat<V>(double({index}))), {splat(1.0)}, {splat(0.0)})")

    def _emit_einsum(self, node: Node, index: int | str) -> str:
        la, lb, out, size = einsum_parts(node.params)
        at: dict[str, str] = {}
        stride = node.dim
        for letter in out:
            stride //= size[letter]
            at[letter] = f"(({index}) / {stride} % {size[letter]})"
        acc = self.fresh("s")
        self.line(f"V {acc} = {splat(0.0)};")
        inner = [x for x in size if x not in at]
        for letter in inner:
            at[letter] = self.loop(size[letter])
        a, b = (self.component(arg, _flat(letters, at, size)) for arg, letters in zip(node.args, (la, lb)))
        self.line(f"{acc} = {acc} + {a} * {b};")
        for _ in inner:
            self.end()
        return acc


def _begun(order: list[Node], uses: Mapping[Node, int], roots: Collection[Node]) -> dict[Node, tuple[Node, Node]]:
    """Sums of a sum over components and a term that is not computed per pair, such as 1 + |x - y|^2: the one may begin
    with the other. ``Add`` -> ``(Sum, term)``."""
    found = {}
    for node in order:
        if node.op == "Add" and node.dim == 1:
            for whole, first in (node.args, node.args[::-1]):
                alone = whole.op == "Sum" and whole.args[0].dim > 1 and uses[whole] == 1 and whole not in roots
                if alone and first.kind != PAIR and not first.args:
                    found[node] = whole, first
                    break
    return found


def _flat(letters: str, at: dict[str, str], size: dict[str, int]) -> str:
    """The C-order position of a multi-index."""
    text = "0"
    for x in letters:
        text = at[x] if text == "0" else f"({text}) * {size[x]} + {at[x]}"
    return text


def terms_text(terms: tuple[Node, ...], emitter: type[Emitter] = Emitter) -> str:
    """The statements that write the values of ``terms`` one after the other to ``out``."""
    e = emitter(terms)
    offset = 0
    for term in terms:
        e.write_all(term, offset, e.cost[term])
        offset += term.dim
    return e.text()


def pair_text(program_pair: tuple[Node, ...], emitter: type[Emitter] = Emitter) -> str:
    """The body of ``pair``."""
    e = emitter(program_pair)
    base = len(program_pair) - 1
    if base:
        e.line(f"out[0] = {e.component(program_pair[0], 0)};")
    e.write(program_pair[-1], base)
    return e.text()


def finish_text(factor: Node | None) -> str:
    """The body of ``finish``."""
    if factor is None:
        return "    return value;"
    e = Emitter((factor,))
    e.line(f"return value * {e.component(factor, 'c')};")
    return e.text()


def emit(plan: Plan, emitter: type[Emitter] = Emitter) -> str:
    """The C++ text of ``plan``'s formulas, written by ``emitter``; the struct is ``kn::Formula``."""
    p = plan.program
    core_dim = p.pair[-1].dim
    return f"""// {plan.core} over j of {text(plan.formula, 1000)}
namespace kn {{
struct Formula {{
  static constexpr int NVARS = {plan.n_vars};   // tensors
  static constexpr int NROW = {p.n_row}, NCOL = {p.n_col};  // slots of a row, of a column
  static constexpr int DIM = {core_dim};     // components that are reduced
  static constexpr int OUT = {plan.dim};     // components of the result; DIM, unless a row factor widens it
  static constexpr int FIRST = {plan.outputs[0][1]};   // those of the first result; the others are a second one
  static constexpr int K = {plan.k};       // columns kept by KMin

  template <class T, class In, class Out> KN_FN static void row(const In& in, Out out) {{
    typedef T V;
{terms_text(p.row_terms, emitter)}
  }}
  template <class T, class In, class Out> KN_FN static void col(const In& in, Out out) {{
    typedef T V;
{terms_text(p.col_terms, emitter)}
  }}
  template <int C, class V, class X, class Y> KN_FN static void pair(const X& x, const Y& y, int c0, V* out) {{
{pair_text(p.pair, emitter)}
  }}
  template <class T, class X> KN_FN static T finish(const X& x, int c, T value) {{
    typedef T V;
{finish_text(p.factor)}
  }}
}};
}}  // namespace kn
"""
