"""What is known of the sign of a formula's components, whatever the data."""

from __future__ import annotations

from .graph import Node

#: Ops whose results are never negative. (1 / a is -Inf where a is -0, which is not negative.)
_NEVER_NEGATIVE = {
    "Square", "Abs", "Sqrt", "Rsqrt0", "Exp", "Exp2", "Sigmoid", "Softplus", "ReLU", "Cosh", "Acos", "Erfc",
    "Equal", "Less", "LessEqual", "NotEqual", "Step", "OneHot",
}  # fmt: skip
#: Ops of one argument whose results have its sign.
_LIKE_THEIR_ARGUMENT = {
    "Sum", "Max", "Min", "Sinh", "Tanh", "Asin", "Atan", "Erf", "Expm1", "Sign", "Floor", "Round", "Extract",
    "Broadcast", "ExtractT",
}  # fmt: skip
#: Formulas are looked at down to this depth.
_DEEPEST = 8


def sign_of(node: Node, depth: int = _DEEPEST) -> int:
    """1 if no component of ``node`` is negative, -1 if none is positive, 0 if that is not known. NaN is neither."""
    if node.value is not None:
        return 1 if node.value >= 0 else -1
    if depth == 0 or node.is_var:
        return 0
    if node.op in _NEVER_NEGATIVE or node.op == "PowInt" and node.params[0] % 2 == 0:
        return 1
    if node.op in _LIKE_THEIR_ARGUMENT:
        return sign_of(node.args[0], depth - 1)
    signs = [sign_of(a, depth - 1) for a in node.args]
    if node.op == "Neg":
        return -signs[0]
    if node.op == "Mul" or node.op == "Div" and node.args[1].value:
        return signs[0] * signs[1]
    if node.op == "Add":
        return signs[0] if signs[0] == signs[1] else 0
    if node.op == "Sub":
        return signs[0] if signs[0] == -signs[1] else 0
    return 0
