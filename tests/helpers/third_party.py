"""What numpy, scipy and mpmath say about ops, so that the torch references are not trusted blindly."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import scipy.special as sp


def _polygamma(x: np.ndarray, n: int) -> np.ndarray:
    return sp.polygamma(n, x)


def _one_hot(x: np.ndarray, n: int) -> np.ndarray:
    return np.eye(n)[int(np.rint(x[0]))] if 0 <= np.rint(x[0]) < n else np.zeros(n)


def _padded(x: np.ndarray, start: int, dim: int) -> np.ndarray:
    out = np.zeros(dim)
    out[start : start + len(x)] = x
    return out


def _weighted(s: np.ndarray, a: np.ndarray) -> float:
    matrix = s.reshape(len(a), len(a)) if s.size == a.size**2 else np.diag(np.broadcast_to(s, a.shape))
    return a @ matrix @ a


def _softplus(x: np.ndarray) -> np.ndarray:
    return np.log1p(np.exp(-np.abs(x))) + np.maximum(x, 0)


def _einsum(a: np.ndarray, b: np.ndarray, spec: str, sizes: tuple) -> np.ndarray:
    la, lb = spec.split("->")[0].split(",")
    size = dict(zip(dict.fromkeys(la + lb), sizes))
    return np.einsum(spec, a.reshape([size[x] for x in la]), b.reshape([size[x] for x in lb]))


def _sinc_prime(x: np.ndarray) -> list[float]:
    import mpmath

    with mpmath.workdps(40):
        return [float((mpmath.cos(v) - mpmath.sin(v) / v) / v) for v in map(mpmath.mpf, x.tolist())]


#: Op -> function of one vector per argument (and the params), giving the resulting vector.
THIRD_PARTY: dict[str, Callable] = {
    "Div": np.divide, "PowInt": lambda x, n: np.power(x, float(n)), "Pow": np.float_power, "Log0": np.log,
    "Mod": np.mod, "Exp": np.exp, "Exp2": np.exp2, "Expm1": np.expm1, "Log": np.log, "Log2": np.log2,
    "Log1p": np.log1p, "XLogX": lambda x: sp.xlogy(x, x), "Sigmoid": sp.expit, "Softplus": _softplus,
    "LogAddExp": np.logaddexp, "Sqrt": np.sqrt, "Rsqrt": lambda x: x**-0.5, "Rsqrt0": lambda x: x**-0.5,
    "Sin": np.sin, "Cos": np.cos, "Tan": np.tan, "Asin": np.arcsin, "Acos": np.arccos, "Atan": np.arctan,
    "Atan2": np.arctan2, "Sinh": np.sinh, "Cosh": np.cosh, "Tanh": np.tanh, "SinXDivX": lambda x: np.sinc(x / np.pi),
    "SinXDivXPrime": _sinc_prime, "Erf": sp.erf, "Erfc": sp.erfc, "Lgamma": sp.gammaln, "Digamma": sp.digamma,
    "Polygamma": _polygamma, "Abs": np.abs, "Sign": np.sign, "Step": lambda x: np.heaviside(x, 1.0),
    "Heaviside": np.heaviside, "Round": np.round, "Floor": np.floor, "Clamp": np.clip,
    "Minimum": np.minimum, "Maximum": np.maximum, "ReLU": lambda x: np.maximum(x, 0),
    "Where": np.where, "IfElse": lambda a, b, c: np.where(a >= 0, b, c),
    "Equal": np.equal, "NotEqual": np.not_equal, "Less": np.less, "LessEqual": np.less_equal,
    "Sum": np.sum, "Max": np.max, "Min": np.min, "ArgMax": np.argmax, "ArgMin": np.argmin,
    "Extract": lambda x, start, n: x[start : start + n], "ExtractT": _padded, "OneHot": _one_hot,
    "Concat": lambda a, b: np.concatenate([a, b]), "Broadcast": lambda x, n: np.repeat(x, n), "Einsum": _einsum,
    "Dot": np.dot, "SqNorm2": lambda x: x @ x, "Norm2": np.linalg.norm, "Normalize": lambda x: x / np.linalg.norm(x),
    "SqDist": lambda a, b: np.sum((a - b) ** 2), "WeightedSqNorm": _weighted,
    "WeightedSqDist": lambda s, a, b: _weighted(s, a - b), "Elem": lambda x, k: x[k],
    "ElemT": lambda x, dim, k: _padded(x, k, dim), "MatVecMult": lambda m, v: m.reshape(-1, len(v)) @ v,
    "VecMatMult": lambda v, m: v @ m.reshape(len(v), -1), "TensorProd": np.outer,
    "TensorDot": lambda a, b, sa, sb, aa, ab: np.tensordot(a.reshape(sa), b.reshape(sb), (aa, ab)),
    "Kron": lambda a, b, sa, sb: np.kron(a.reshape(sa), b.reshape(sb)),
}  # fmt: skip
