"""Formula strings: from text to graph. Nothing is evaluated as Python.

Two dialects in one grammar: the canonical text of a graph, for which ``parse(str(f)) is f``, and KeOps' strings, as
``"Exp(-SqDist(X,Y)) * B"`` with aliases ``X = Vi(3)``. An operator-precedence parser with explicit stacks, so that no
formula is too deep for it. Infix operators build with the obvious simplifications; function calls build what they name.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from .functions import FUNCTIONS, INFIX, NOT_YET
from .graph import CAT_COL, CAT_I, CAT_J, CAT_P, CAT_ROW, CAT_SCALAR, Node, const, make, var
from .ops import NAMES, OPS, neg

Literal = int | float | str | tuple | None

#: Operator -> (precedence, whether it groups to the right); as in Python.
_BINARY = {
    **dict.fromkeys(("==", "!=", "<", "<=", ">", ">="), (1, False)),
    "|": (2, False),
    **dict.fromkeys("+-", (3, False)),
    **dict.fromkeys("*/", (4, False)),
    "**": (6, True),
}
_UNARY = 5
_CLOSE = {"(": ")", "[": "]"}
_VARIABLES = {"Vi": CAT_I, "Vj": CAT_J, "Pm": CAT_P, "Scalar": CAT_SCALAR, "Row": CAT_ROW, "Col": CAT_COL,
              "Vx": CAT_I, "Vy": CAT_J}  # fmt: skip
_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<string>\"[^\"]*\"|'[^']*')|(?P<symbol>\*\*|==|!=|<=|>=|[-+*/|<>(),\[\]]))"
)
_ALIAS = re.compile(
    r"\s*(?:(?P<name>[A-Za-z_]\w*)\s*=)?\s*(?P<kind>Vi|Vj|Pm|Vx|Vy|Var)\s*\(\s*(?P<numbers>[\d\s,]*)\)\s*$"
)


@dataclass
class _Value:
    """An operand: a formula, and the literal that was written for it if it was one."""

    node: Node | None
    literal: Literal
    pos: int


@dataclass
class _Open:
    """What waits on the stack: an operator, or an opened bracket with the arguments read so far."""

    symbol: str
    pos: int
    precedence: int = 0
    name: str | None = None
    args: list[_Value] = field(default_factory=list)


class _Parser:
    def __init__(self, text: str, aliases: Mapping[str, Node]) -> None:
        self.text = text
        self.aliases = aliases
        self.values: list[_Value] = []
        self.stack: list[_Open] = []

    def fail(self, pos: int, message: str) -> ValueError:
        return ValueError(f"formula, position {pos}: {message}\n    {self.text}\n    {' ' * pos}^")

    # --- the scan -------------------------------------------------------------------------------------------------
    def tokens(self) -> list[tuple[str, str, int]]:
        out, pos = [], 0
        end = len(self.text.rstrip())
        while pos < end:
            match = _TOKEN.match(self.text, pos)
            if match is None or match.lastgroup is None:
                at = pos + len(self.text[pos:]) - len(self.text[pos:].lstrip())
                raise self.fail(at, f"unexpected character {self.text[at]!r}")
            out.append((match.lastgroup, match.group(match.lastgroup), match.start(match.lastgroup)))
            pos = match.end()
        return [*out, ("end", "", end)]

    def parse(self) -> Node:
        tokens = self.tokens()
        k, operand = 0, True
        while tokens[k][0] != "end" or operand:
            kind, text, pos = tokens[k]
            if operand:
                called = kind == "name" and tokens[k + 1][1] == "("
                operand = self.operand(kind, text, pos, called)
                k += 2 if called else 1
            else:
                operand = self.operator(text, pos)
                k += 1
        self.reduce(0)
        if self.stack:
            raise self.fail(self.stack[-1].pos, f"{self.stack[-1].symbol!r} is never closed")
        return self.node(self.values[-1])

    def operand(self, kind: str, text: str, pos: int, called: bool) -> bool:
        """Take a token where an operand may start; returns whether an operand is still to come."""
        if kind == "number":
            number = float(text) if re.search(r"[.eE]", text) else int(text)
            self.values.append(_Value(const(number), number, pos))
        elif kind == "string":
            self.values.append(_Value(None, text[1:-1], pos))
        elif called:
            self.known(text, pos)
            self.stack.append(_Open("(", pos, name=text))
            return True
        elif kind == "name":
            self.values.append(self.named(text, pos))
        elif text in ("(", "["):
            self.stack.append(_Open(text, pos, name="[" if text == "[" else None))
            return True
        elif text in ("-", "+"):
            self.stack.append(_Open(f"unary {text}", pos, _UNARY))
            return True
        elif text in _CLOSE.values() and self.stack and self.stack[-1].name and not self.stack[-1].args:
            return self.close(text, pos)
        else:
            found = f"{text!r}" if text else "the end"
            raise self.fail(pos, f"a value is expected; found {found}")
        return False

    def operator(self, text: str, pos: int) -> bool:
        """Take a token where an operand has just ended; returns whether an operand has to follow."""
        if text in _BINARY:
            precedence, to_right = _BINARY[text]
            self.reduce(precedence + to_right)
            self.stack.append(_Open(text, pos, precedence))
            return True
        self.reduce(0)
        opened = self.stack[-1] if self.stack else None
        if opened is None or text not in (",", ")", "]"):
            raise self.fail(pos, f"an operator is expected; found {text!r}")
        if text == ",":
            if opened.name is None:
                raise self.fail(pos, "',' separates the arguments of a function; here no function is open")
            opened.args.append(self.values.pop())
            return True
        if opened.name is not None:
            opened.args.append(self.values.pop())
        return self.close(text, pos)

    def reduce(self, precedence: int) -> None:
        """Apply the operators on the stack that bind at least as tightly, down to an open bracket."""
        while self.stack and self.stack[-1].precedence >= max(precedence, 1):
            op = self.stack.pop()
            b = self.values.pop()
            if op.symbol.startswith("unary"):
                minus = op.symbol.endswith("-")
                literal = b.literal if isinstance(b.literal, (int, float)) else None
                self.values.append(
                    _Value(neg(self.node(b)), None if literal is None else -literal, op.pos) if minus else b
                )
                continue
            a = self.values.pop()
            self.values.append(
                _Value(self.built(op.pos, op.symbol, INFIX[op.symbol], self.node(a), self.node(b)), None, a.pos)
            )

    def close(self, text: str, pos: int) -> bool:
        opened = self.stack.pop()
        if _CLOSE[opened.symbol] != text:
            raise self.fail(pos, f"{_CLOSE[opened.symbol]!r} is expected; found {text!r}")
        if opened.name is not None:
            self.values.append(self.call(opened))
        return False

    # --- meaning --------------------------------------------------------------------------------------------------
    def node(self, value: _Value) -> Node:
        if value.node is None:
            raise self.fail(value.pos, f"a formula is expected; found {value.literal!r}")
        return value.node

    def built(self, pos: int, name: str, build, *args) -> Node:
        try:
            return build(*args)
        except ValueError as error:
            raise self.fail(pos, str(error)) from None

    def unknown(self, name: str, pos: int, among: list[str], what: str) -> ValueError:
        close = difflib.get_close_matches(name, among, 1, 0.6) or [n for n in among if n.lower() == name.lower()]
        hint = f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(sorted(among))}" if among else ""
        return self.fail(pos, f"unknown {what} {name!r}{hint}")

    def known(self, name: str, pos: int) -> None:
        if name in NOT_YET or name.startswith("Complex"):
            raise NotImplementedError(f"formula, position {pos}: {name} is not available yet")
        if (
            name not in NAMES
            and name not in FUNCTIONS
            and name not in _VARIABLES
            and name not in ("Var", "Const", "Ind")
        ):
            raise self.unknown(name, pos, [*NAMES, *FUNCTIONS], "function")

    def named(self, name: str, pos: int) -> _Value:
        if name in self.aliases:
            return _Value(self.aliases[name], None, pos)
        if name in ("inf", "nan"):
            return _Value(const(float(name)), float(name), pos)
        if name in NAMES or name in FUNCTIONS:
            raise self.fail(pos, f"{name} is a function; write its arguments in brackets")
        raise self.unknown(name, pos, list(self.aliases), "variable")

    def call(self, opened: _Open) -> _Value:
        name, args, pos = opened.name or "", opened.args, opened.pos
        if name in ("Ind", "["):
            return _Value(None, tuple(self.whole(a, name) for a in args), pos)
        if name == "Const":
            if len(args) != 1 or not isinstance(args[0].literal, (int, float)):
                raise self.fail(pos, "Const takes one number")
            return _Value(const(args[0].literal), None, pos)
        if name in _VARIABLES or name == "Var":
            numbers = [self.whole(a, name) for a in args]
            return _Value(self.built(pos, name, _variable, name, numbers), None, pos)
        for form in FUNCTIONS.get(name, ()):
            taken = self.fit(form.kinds, args)
            if taken is not None:
                return _Value(self.built(pos, name, form.build, *taken), None, pos)
        if name not in NAMES or name in FUNCTIONS:
            forms = " or ".join(f"({', '.join(_KIND_WORDS[c] for c in f.kinds)})" for f in FUNCTIONS[name])
            raise self.fail(pos, f"{name} takes {forms}; got {len(args)} argument(s)")
        op = OPS[NAMES[name]]
        if len(args) != op.arity + len(op.params):
            what = ", ".join(op.params)
            extra = f" and the parameters {what}" if what else ""
            raise self.fail(pos, f"{name} takes {op.arity} formula(s){extra}; got {len(args)} argument(s)")
        nodes = tuple(self.node(a) for a in args[: op.arity])
        params = tuple(self.literal(a, name) for a in args[op.arity :])
        return _Value(self.built(pos, name, make, op.name, nodes, params), None, pos)

    def fit(self, kinds: str, args: list[_Value]) -> list | None:
        """The arguments of a form, or None where the ones written are not of its kinds."""
        if len(kinds) != len(args):
            return None
        taken: list = []
        for kind, a in zip(kinds, args):
            literal = (a.literal,) if kind == "t" and isinstance(a.literal, int) else a.literal
            fits = {"f": a.node is not None, "i": isinstance(literal, int), "t": isinstance(literal, tuple)}[kind]
            if not fits:
                return None
            taken.append(a.node if kind == "f" else literal)
        return taken

    def literal(self, value: _Value, name: str) -> Literal:
        if value.literal is None:
            raise self.fail(value.pos, f"{name} takes a literal here, not a formula")
        return value.literal

    def whole(self, value: _Value, name: str) -> int:
        if not isinstance(value.literal, int):
            raise self.fail(value.pos, f"{name} takes whole numbers")
        return value.literal


_KIND_WORDS = {"f": "formula", "i": "whole number", "t": "list of whole numbers"}


def _variable(name: str, numbers: list[int]) -> Node:
    """``Vi(ind,dim)``, ``Scalar(ind)``, or KeOps' ``Var(ind,dim,cat)``."""
    want = {"Var": 3, "Scalar": 1}.get(name, 2)
    if len(numbers) != want:
        raise ValueError(f"{name} takes {want} whole number(s); got {len(numbers)}")
    if name == "Var":
        if numbers[2] not in (CAT_I, CAT_J, CAT_P):
            raise ValueError(f"Var(ind, dim, cat) needs cat = 0 (i), 1 (j) or 2 (parameter); got {numbers[2]}")
        return var(numbers[2], numbers[0], numbers[1])
    return var(_VARIABLES[name], numbers[0], 1 if name == "Scalar" else numbers[1])


def parse(text: str, aliases: Mapping[str, Node] | None = None) -> Node:
    """The formula that ``text`` writes.

    Args:
        text: the canonical text of a graph, or a KeOps formula string.
        aliases: names of variables and the nodes that they stand for.

    Raises:
        ValueError: the text is not a formula; the message has the position in the text and, for an unknown name, a
            suggestion.
        NotImplementedError: a function of KeOps that is not available yet.
    """
    if not isinstance(text, str):
        raise TypeError(f"formula must be a string; got {type(text).__name__}")
    return _Parser(text, aliases or {}).parse()


def parse_alias(text: str, position: int) -> tuple[str | None, Node]:
    """``(name, variable)`` of ``"X = Vi(3)"``, ``"X = Vi(0,3)"``, ``"Vi(3)"`` or ``"X = Var(0,3,1)"``.

    Where no number of the variable is written, it is ``position``.
    """
    if not isinstance(text, str):
        raise TypeError(f"an alias must be a string such as 'X = Vi(3)'; got {type(text).__name__}")
    match = _ALIAS.match(text)
    if match is None:
        raise ValueError(f"alias {text!r} is not of the form 'X = Vi(3)', with Vi (i), Vj (j) or Pm (parameter)")
    kind = match["kind"]
    numbers = [int(n) for n in match["numbers"].split(",") if n.strip()]
    if kind != "Var" and len(numbers) == 1:
        numbers.insert(0, position)
    try:
        return match["name"], _variable(kind, numbers)
    except ValueError as error:
        raise ValueError(f"alias {text!r}: {error}") from None
