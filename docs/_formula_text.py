"""Formulas as a person writes them, for the reference."""

from __future__ import annotations

from kernops.formula.graph import Node

#: Op -> (precedence, text of the node given its arguments' texts, precedence that each argument needs).
_INFIX = {
    "Add": (1, "{} + {}", (1, 1)),
    "Sub": (1, "{} - {}", (1, 2)),
    "Mul": (2, "{}·{}", (2, 3)),
    "Div": (2, "{} / {}", (2, 3)),
    "Neg": (2, "-{}", (3,)),
    "Inv": (2, "1 / {}", (3,)),
    "Square": (4, "{}²", (5,)),
    "Equal": (0, "{} == {}", (1, 1)),
    "NotEqual": (0, "{} != {}", (1, 1)),
    "Less": (0, "{} < {}", (1, 1)),
    "LessEqual": (0, "{} <= {}", (1, 1)),
}
_ATOM = 9


def formula_text(node: Node, names: str = "abc") -> str:
    """``node`` with variable number k called ``names[k]``."""
    return _text(node, names)[0]


def _text(node: Node, names: str) -> tuple[str, int]:
    if node.is_var:
        return names[int(node.params[1])], _ATOM  # type: ignore[arg-type]
    if node.value is not None:
        return f"{node.value:.6g}", _ATOM if node.value >= 0 else 2
    parts = [_text(a, names) for a in node.args]
    if node.op == "PowInt":
        return f"{_wrapped(parts[0], 5)}^{node.params[0]}", 4
    if node.op in _INFIX:
        own, pattern, needs = _INFIX[node.op]
        return pattern.format(*(_wrapped(p, n) for p, n in zip(parts, needs))), own
    return f"{node.op}({', '.join([p[0] for p in parts] + [str(p) for p in node.params])})", _ATOM


def _wrapped(part: tuple[str, int], need: int) -> str:
    return part[0] if part[1] >= need else f"({part[0]})"
