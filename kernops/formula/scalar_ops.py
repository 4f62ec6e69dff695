"""Rows of the table of ops: functions of single components.

``text`` is C that both compilers read. It uses the functions of namespace ``kn`` that each back end's header defines for
scalars and for SIMD vectors, and the conditional is ``kn::select(mask, a, b)``, never ``?:``.
"""

from __future__ import annotations

import functools
import math

from .graph import Node
from .ops import Op, add, apply, check_whole, div, mul, neg, power, register, sub

ANY = (-2.0, 2.0)
POSITIVE = (0.2, 3.0)
UNIT = (-0.9, 0.9)
V = "kn::splat<V>({})".format


def _f(name: str):
    return lambda *args: apply(name, *args)


_exp, _log, _sin, _cos, _sqrt, _inv = map(_f, ("Exp", "Log", "Sin", "Cos", "Sqrt", "Inv"))
_where = _f("Where")


def _row(name, doc, text, partials, ref, domain=(ANY,), methods=None, aliases=(), params=(),
         dim=None, examples=()):  # fmt: skip
    arity = len(domain)
    methods = (name.lower(),) if methods is None else methods
    register(
        Op(name, arity, doc, ref, text=text, partials=partials, domain=domain, methods=methods, aliases=aliases,
           params=params, dim=dim, examples=examples)
    )  # fmt: skip


def _dim_if_whole(name: str, low: int):
    """The dimension of an elementwise op of one argument, whose parameter n must be a whole number."""

    def dim(args, params):
        check_whole(name, "n", params[0], low)
        return args[0].dim

    return dim


def _none(*args):
    return (None,) * sum(isinstance(a, Node) for a in args)


# --- arithmetic -----------------------------------------------------------------------------------------------------
_row("Add", "a + b", "({0} + {1})", lambda a, b: (1.0, 1.0), lambda t, a, b: a + b, (ANY, ANY), ())
_row("Sub", "a - b", "({0} - {1})", lambda a, b: (1.0, -1.0), lambda t, a, b: a - b, (ANY, ANY), (), ("Subtract",))
_row("Mul", "a · b", "({0} * {1})", lambda a, b: (b, a), lambda t, a, b: a * b, (ANY, ANY), (), ("Mult",))
_row("Div", "a / b", "({0} / {1})", lambda a, b: (_inv(b), neg(div(div(a, b), b))),
     lambda t, a, b: a / b, (ANY, POSITIVE), (), ("Divide",))  # fmt: skip
_row("Neg", "-a", "(-{0})", lambda a: (-1.0,), lambda t, a: -a, methods=(), aliases=("Minus",))
_row("Inv", "1 / a", "kn::inv({0})", lambda a: (neg(power(a, -2)),), lambda t, a: 1 / a, (POSITIVE,),
     ("inv", "reciprocal"))  # fmt: skip
_row("Square", "a²", "({0} * {0})", lambda a: (mul(2.0, a),), lambda t, a: a * a, methods=("square",))
_row("PowInt", "aⁿ for a whole number n", "kn::powi<{1}>({0})", lambda a, n: (mul(float(n), power(a, n - 1)) if n else None,),
     lambda t, a, n: a**n, (POSITIVE,), (), params=("n",), dim=_dim_if_whole("PowInt", 1 - 2**31),
     examples=(((3,), (3,)), ((1,), (-2,)), ((3,), (7,)), ((3,), (0,))))  # fmt: skip
_row("Pow", "a to the power b, for a > 0, or for a whole b", "kn::pow({0}, {1})",
     lambda a, b: (mul(b, apply("Pow", a, sub(b, 1.0))), mul(apply("Pow", a, b), apply("Log0", a))),
     lambda t, a, b: t.pow(a, b), (POSITIVE, ANY), (), ("Powf",))  # fmt: skip
_row("Log0", "log a, and 0 at a = 0 (the factor of log in the derivative of a power)",
     "kn::select(kn::eq({0}, " + V("0") + "), " + V("0") + ", kn::log({0}))",
     lambda a: (_inv(a),), lambda t, a: t.where(a == 0, t.zeros_like(a), t.log(a)), (POSITIVE,), ())  # fmt: skip
_row("Mod", "a - b · floor(a / b), with the sign of b", "kn::mod({0}, {1})",
     lambda a, b: (1.0, neg(apply("Floor", div(a, b)))), lambda t, a, b: t.remainder(a, b),
     (ANY, POSITIVE), ())  # fmt: skip

# --- exponentials and logarithms ------------------------------------------------------------------------------------
_row("Exp", "exponential", "kn::exp({0})", lambda a: (_exp(a),), lambda t, a: t.exp(a))
_row("Exp2", "2 to the power a", "kn::exp2({0})", lambda a: (mul(math.log(2.0), apply("Exp2", a)),),
     lambda t, a: t.exp2(a))  # fmt: skip
_row("Expm1", "exp(a) - 1, accurate near 0", "kn::expm1({0})", lambda a: (_exp(a),), lambda t, a: t.expm1(a))
_row("Log", "natural logarithm", "kn::log({0})", lambda a: (_inv(a),), lambda t, a: t.log(a), (POSITIVE,))
_row("Log2", "logarithm to base 2", "kn::log2({0})", lambda a: (_inv(mul(math.log(2.0), a)),), lambda t, a: t.log2(a),
     (POSITIVE,))  # fmt: skip
_row("Log1p", "log(1 + a), accurate near 0", "kn::log1p({0})", lambda a: (_inv(add(1.0, a)),),
     lambda t, a: t.log1p(a), (UNIT,))  # fmt: skip
_row("LogTerm", "log a where a number of size 1 or more is added: with an error that is small against that number",
     "kn::log_of_term({0})", lambda a: (_inv(a),), lambda t, a: t.log(a), (POSITIVE,), ())  # fmt: skip
_row("LogTermOfNormal", "the same for a that is not a subnormal number, such as 1 + b",
     "kn::log_of_normal_term({0})", lambda a: (_inv(a),), lambda t, a: t.log(a), (POSITIVE,), ())  # fmt: skip
_row("XLogX", "a · log a, and 0 at 0", "kn::select(kn::eq({0}, " + V("0") + "), " + V("0") + ", {0} * kn::log({0}))",
     lambda a: (add(_log(a), 1.0),), lambda t, a: t.xlogy(a, a), (POSITIVE,))  # fmt: skip
_row("Sigmoid", "1 / (1 + exp(-a))", "kn::inv(" + V("1") + " + kn::exp(-{0}))",
     lambda a: (mul(apply("Sigmoid", a), apply("Sigmoid", neg(a))),), lambda t, a: t.sigmoid(a))  # fmt: skip
_row("Softplus", "log(1 + exp(a)), never overflowing",
     "(kn::max_({0}, " + V("0") + ") + kn::log1p(kn::exp(-kn::abs({0}))))",
     lambda a: (apply("Sigmoid", a),), lambda t, a: t.logaddexp(a, t.zeros_like(a)))  # fmt: skip
_row("LogAddExp", "log(exp(a) + exp(b)), never overflowing",
     "(kn::max_({0}, {1}) + kn::select(kn::eq({0}, {1}), " + V(repr(math.log(2.0)))
     + ", kn::log1p(kn::exp(-kn::abs({0} - {1})))))",
     lambda a, b: (apply("Sigmoid", sub(a, b)), apply("Sigmoid", sub(b, a))),
     lambda t, a, b: t.logaddexp(a, b), (ANY, ANY))  # fmt: skip

# --- roots ----------------------------------------------------------------------------------------------------------
_row("Sqrt", "square root; its derivative at 0 is taken as 0, so that norms have gradients there", "kn::sqrt({0})",
     lambda a: (mul(0.5, apply("Rsqrt0", a)),), lambda t, a: t.sqrt(a), (POSITIVE,))  # fmt: skip
_row("Rsqrt", "1 / sqrt(a)", "kn::rsqrt({0})", lambda a: (mul(-0.5, div(apply("Rsqrt", a), a)),),
     lambda t, a: t.rsqrt(a), (POSITIVE,))  # fmt: skip
_row("Rsqrt0", "1 / sqrt(a), and 0 at 0 (twice the derivative of the square root)",
     "kn::rsqrt0({0})", lambda a: (mul(-0.5, power(apply("Rsqrt0", a), 3)),),
     lambda t, a: t.where(a == 0, t.zeros_like(a), t.rsqrt(t.where(a == 0, t.ones_like(a), a))), (POSITIVE,), ())  # fmt: skip

# --- trigonometry ---------------------------------------------------------------------------------------------------
_row("Sin", "sine", "kn::sin({0})", lambda a: (_cos(a),), lambda t, a: t.sin(a))
_row("Cos", "cosine", "kn::cos({0})", lambda a: (neg(_sin(a)),), lambda t, a: t.cos(a))
_row(
    "Tan",
    "tangent",
    "kn::tan({0})",
    lambda a: (add(1.0, power(apply("Tan", a), 2)),),
    lambda t, a: t.tan(a),
    ((-1.0, 1.0),),
)
_row(
    "Asin",
    "arc sine",
    "kn::asin({0})",
    lambda a: (apply("Rsqrt", sub(1.0, power(a, 2))),),
    lambda t, a: t.asin(a),
    (UNIT,),
)
_row("Acos", "arc cosine", "kn::acos({0})", lambda a: (neg(apply("Rsqrt", sub(1.0, power(a, 2)))),),
     lambda t, a: t.acos(a), (UNIT,))  # fmt: skip
_row("Atan", "arc tangent", "kn::atan({0})", lambda a: (_inv(add(1.0, power(a, 2))),), lambda t, a: t.atan(a))
_row("Atan2", "angle of the point (b, a)", "kn::atan2({0}, {1})",
     lambda a, b: (div(b, add(power(a, 2), power(b, 2))), neg(div(a, add(power(a, 2), power(b, 2))))),
     lambda t, a, b: t.atan2(a, b), (POSITIVE, ANY))  # fmt: skip
_row("Sinh", "hyperbolic sine", "kn::sinh({0})", lambda a: (apply("Cosh", a),), lambda t, a: t.sinh(a))
_row("Cosh", "hyperbolic cosine", "kn::cosh({0})", lambda a: (apply("Sinh", a),), lambda t, a: t.cosh(a))
_row("Tanh", "hyperbolic tangent", "kn::tanh({0})", lambda a: (sub(1.0, power(apply("Tanh", a), 2)),),
     lambda t, a: t.tanh(a))  # fmt: skip
_row("SinXDivX", "sin(a) / a, and 1 at 0", "kn::select(kn::eq({0}, " + V("0") + "), " + V("1") + ", kn::sin({0}) / {0})",
     lambda a: (apply("SinXDivXPrime", a),), lambda t, a: t.sinc(a / math.pi), (POSITIVE,), ("sinxdivx",))  # fmt: skip
# (cos a - sin(a) / a) / a cancels near 0, where the series -a/3 + a³/30 - ... takes over; terms to a¹⁹ serve |a| < 1.
_SERIES = [(-1.0) ** k * 2 * k / math.factorial(2 * k + 1) for k in range(1, 11)]


def _sinc_prime_ref(t, a):
    far = t.where(t.abs(a) < 1, t.ones_like(a), a)
    series = functools.reduce(lambda p, c: p * (a * a) + c, reversed(_SERIES), 0.0) * a
    return t.where(t.abs(a) < 1, series, (t.cos(far) - t.sin(far) / far) / far)


def _sinc_second(a: Node) -> Node:
    zero = apply("Equal", a, 0.0)
    return _where(
        zero, -1.0 / 3.0, neg(add(apply("SinXDivX", a), mul(2.0, div(apply("SinXDivXPrime", a), _where(zero, 1.0, a)))))
    )


_row("SinXDivXPrime", "derivative of sin(a) / a",
     "kn::select(kn::lt(kn::abs({0}), " + V("1") + "), {0} * "
     + functools.reduce(lambda p, c: f"({V(repr(c))} + {{0}} * {{0}} * {p})", reversed(_SERIES[:-1]), V(repr(_SERIES[-1])))
     + ", (kn::cos({0}) - kn::sin({0}) / {0}) / {0})",
     lambda a: (_sinc_second(a),), _sinc_prime_ref, (POSITIVE,), ())  # fmt: skip

# --- special functions ----------------------------------------------------------------------------------------------
_TWO_OVER_SQRT_PI = 2.0 / math.sqrt(math.pi)
_row("Erf", "error function", "kn::erf({0})", lambda a: (mul(_TWO_OVER_SQRT_PI, _exp(neg(power(a, 2)))),),
     lambda t, a: t.erf(a))  # fmt: skip
_row("Erfc", "1 - erf(a), accurate for large a", "kn::erfc({0})",
     lambda a: (mul(-_TWO_OVER_SQRT_PI, _exp(neg(power(a, 2)))),), lambda t, a: t.erfc(a))  # fmt: skip
_row("Lgamma", "logarithm of the gamma function's absolute value", "kn::lgamma({0})",
     lambda a: (apply("Digamma", a),), lambda t, a: t.lgamma(a), (POSITIVE,))  # fmt: skip
_row("Digamma", "derivative of lgamma", "kn::digamma({0})", lambda a: (apply("Polygamma", a, params=(1,)),),
     lambda t, a: t.digamma(a), (POSITIVE,))  # fmt: skip


def _polygamma_ref(t, a, n):
    """(-1)ⁿ⁺¹ n! ζ(n + 1, a): torch.polygamma(1, a) is right to nine digits only."""
    value = (-1.0) ** (n + 1) * math.factorial(n) * t.special.zeta(t.full_like(a, n + 1), a)
    return t.where(a == math.inf, t.zeros_like(a), value)


_row("Polygamma", "n-th derivative of digamma, for a > 0 and n >= 1", "kn::polygamma<{1}>({0})",
     lambda a, n: (apply("Polygamma", a, params=(n + 1,)),), _polygamma_ref, (POSITIVE,), (),
     params=("n",), dim=_dim_if_whole("Polygamma", 1), examples=(((3,), (1,)), ((1,), (2,))))  # fmt: skip

# --- pieces: derivatives are those of the smooth parts --------------------------------------------------------------
_row("Abs", "absolute value", "kn::abs({0})", lambda a: (apply("Sign", a),), lambda t, a: t.abs(a))
_row("Sign", "-1, 0 or 1; NaN of NaN", "kn::select(kn::lt({0}, " + V("0") + "), " + V("-1")
     + ", kn::select(kn::lt(" + V("0") + ", {0}), " + V("1") + ", {0}))", _none, lambda t, a: t.where(t.isnan(a), a, t.sign(a)))  # fmt: skip
_row("Step", "0 for a < 0, 1 for a >= 0; NaN of NaN", "kn::select(kn::lt({0}, " + V("0") + "), " + V("0")
     + ", kn::select(kn::le(" + V("0") + ", {0}), " + V("1") + ", {0}))", _none,
     lambda t, a: t.where(t.isnan(a), a, (a >= 0).to(a.dtype)))  # fmt: skip
_row("Heaviside", "0 for a < 0, 1 for a > 0, b at a = 0; NaN of NaN",
     "kn::select(kn::eq({0}, " + V("0") + "), {1}, kn::select(kn::lt({0}, " + V("0") + "), " + V("0")
     + ", kn::select(kn::lt(" + V("0") + ", {0}), " + V("1") + ", {0})))",
     lambda a, b: (None, apply("Equal", a, 0.0)),
     lambda t, a, b: t.where(a == 0, b, t.where(t.isnan(a), a, (a > 0).to(a.dtype))), (ANY, ANY))  # fmt: skip
_row("ReLU", "max(a, 0)", "kn::max_({0}, " + V("0") + ")", lambda a: (apply("Less", 0.0, a),), lambda t, a: t.relu(a))
_row("Round", "nearest whole number, halves to even", "kn::round({0})", _none, lambda t, a: t.round(a), methods=())
_row("Floor", "largest whole number not above a", "kn::floor({0})", _none, lambda t, a: t.floor(a))
_row("Minimum", "the smaller of a and b; NaN if either is", "kn::min_({0}, {1})",
     lambda a, b: (apply("LessEqual", a, b), apply("Less", b, a)), lambda t, a, b: t.minimum(a, b), (ANY, ANY))  # fmt: skip
_row("Maximum", "the larger of a and b; NaN if either is", "kn::max_({0}, {1})",
     lambda a, b: (apply("LessEqual", b, a), apply("Less", a, b)), lambda t, a, b: t.maximum(a, b), (ANY, ANY))  # fmt: skip
_row("Clamp", "a limited to [b, c]", "kn::min_(kn::max_({0}, {1}), {2})",
     lambda a, b, c: (mul(apply("LessEqual", b, a), apply("LessEqual", a, c)),
                      mul(apply("Less", a, b), apply("LessEqual", b, c)),
                      apply("Less", c, apply("Maximum", a, b))),
     lambda t, a, b, c: t.minimum(t.maximum(a, b), c), (ANY, (-1.0, -0.5), (0.5, 1.0)))  # fmt: skip
_row("Where", "b where a is not 0, else c", "kn::select(kn::eq({0}, " + V("0") + "), {2}, {1})",
     lambda a, b, c: (None, apply("NotEqual", a, 0.0), apply("Equal", a, 0.0)),
     lambda t, a, b, c: t.where(a != 0, b, c), (ANY, ANY, ANY))  # fmt: skip
_row("IfElse", "b where a >= 0, else c", "kn::select(kn::le(" + V("0") + ", {0}), {1}, {2})",
     lambda a, b, c: (None, apply("LessEqual", 0.0, a), apply("Less", a, 0.0)),
     lambda t, a, b, c: t.where(a >= 0, b, c), (ANY, ANY, ANY))  # fmt: skip

# --- comparisons: 1 where true, else 0 ------------------------------------------------------------------------------
for _name, _c, _doc, _ref in (
    ("Equal", "eq({0}, {1})", "a == b", lambda t, a, b: (a == b).to(t.result_type(a, b))),
    ("Less", "lt({0}, {1})", "a < b", lambda t, a, b: (a < b).to(t.result_type(a, b))),
    ("LessEqual", "le({0}, {1})", "a <= b", lambda t, a, b: (a <= b).to(t.result_type(a, b))),
):
    _row(_name, f"1 where {_doc}, else 0", f"kn::select(kn::{_c}, " + V("1") + ", " + V("0") + ")", _none, _ref,
         (ANY, ANY), ())  # fmt: skip
_row("NotEqual", "1 where a != b, else 0", "kn::select(kn::eq({0}, {1}), " + V("0") + ", " + V("1") + ")", _none,
     lambda t, a, b: (a != b).to(t.result_type(a, b)), (ANY, ANY), ())  # fmt: skip
