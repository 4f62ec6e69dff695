"""The C texts of the table of ops, read by Python: ``kn::`` functions are numpy's and scipy's, in double precision.

It checks the text of a row against its torch reference without a compiler, and each against a third party.
"""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import scipy.special as sp

from kernops.formula.ops import OPS


def _polygamma(n: int):
    return lambda x: sp.polygamma(n, x)


#: The vocabulary of namespace kn. ``splat<V>(c)`` is read as ``splat(c)``, ``powi<3>(x)`` as ``powi(3)(x)``.
KN = SimpleNamespace(
    splat=np.float64, select=np.where, eq=np.equal, lt=np.less, le=np.less_equal,
    abs=np.abs, sign=np.sign, floor=np.floor, round=np.rint, mod=np.remainder, max_=np.maximum, min_=np.minimum,
    exp=np.exp, exp2=np.exp2, expm1=np.expm1, log=np.log, log2=np.log2, log1p=np.log1p,
    log_of_term=np.log, log_of_normal_term=np.log, inv=lambda x: 1 / x,
    sqrt=np.sqrt, rsqrt=lambda x: 1 / np.sqrt(x), rsqrt0=lambda x: np.where(x == 0, 0, 1 / np.sqrt(x)),
    pow=np.power, powi=lambda n: lambda x: np.power(x, float(n)),
    sin=np.sin, cos=np.cos, tan=np.tan, asin=np.arcsin, acos=np.arccos, atan=np.arctan, atan2=np.arctan2,
    sinh=np.sinh, cosh=np.cosh, tanh=np.tanh, erf=sp.erf, erfc=sp.erfc,
    lgamma=lambda x: np.where(np.isneginf(x), np.inf, sp.gammaln(x)),
    digamma=sp.digamma, polygamma=_polygamma,
)  # fmt: skip


def evaluate_text(name: str, args: list[np.ndarray], params: tuple = ()) -> np.ndarray:
    """The C text of op ``name`` on arrays."""
    text = OPS[name].text
    assert text is not None
    python = text.format(*(f"a[{k}]" for k in range(len(args))), *params)
    python = python.replace("splat<V>", "splat").replace("kn::", "kn.")
    python = re.sub(r"<(-?\d+)>\(", r"(\1)(", python)
    with np.errstate(all="ignore"):
        result = eval(python, {"kn": KN, "a": [np.asarray(x, dtype=float) for x in args]})  # noqa: S307 (a test's own)
    return np.asarray(result, dtype=float)
