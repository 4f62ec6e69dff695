"""The SIMD functions of the cpu back end, in units in the last place of the result's dtype."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernops.backends import reduce
from kernops.formula.graph import CAT_I, CAT_J, var
from kernops.formula.ops import apply, sub
from kernops.formula.plan import make_plan
from tests.helpers.backends import need

#: op -> points over its whole range; the reference is NumPy in twice the precision (long double for float64).
RANGES = {
    "Exp": np.concatenate([np.linspace(-87, 88, 20_001), np.linspace(-1e-3, 1e-3, 2001)]),
    "Exp2": np.linspace(-125.9, 127.9, 20_001),
    "Log": np.concatenate([np.geomspace(1.2e-38, 3e38, 20_001), np.linspace(0.5, 2, 20_001)]),
    "Log2": np.concatenate([np.geomspace(1.2e-38, 3e38, 20_001), np.linspace(0.5, 2, 20_001)]),
    "Sin": np.concatenate([np.linspace(-50, 50, 20_001), np.geomspace(50, 1e6, 2001)]),
    "Cos": np.concatenate([np.linspace(-50, 50, 20_001), np.geomspace(50, 1e6, 2001)]),
}
#: The largest error allowed.
ULPS = {torch.float32: 2.0, torch.float64: 2.5}


def over_pairs(op: str, x: torch.Tensor) -> np.ndarray:
    """``op`` computed per pair, and so by SIMD: of x_i - 0, summed over a single column."""
    plan = make_plan("Sum", apply(op, sub(var(CAT_I, 0, 1), var(CAT_J, 1, 1))))
    (out,) = reduce(plan, [x[:, None], torch.zeros(1, 1, dtype=x.dtype)], len(x), 1, "cpu")
    return out[:, 0].numpy()


@pytest.mark.parametrize("dtype", ULPS, ids=str)
@pytest.mark.parametrize("op", RANGES)
def test_error(op: str, dtype: torch.dtype) -> None:
    need("cpu")
    x = torch.tensor(RANGES[op]).to(dtype)
    exact = getattr(np, op.lower())(x.numpy().astype(np.longdouble))
    unit = np.spacing(np.abs(exact).astype(x.numpy().dtype)).astype(np.longdouble)
    error = np.abs(over_pairs(op, x).astype(np.longdouble) - exact) / unit
    worst = int(np.argmax(error))
    assert error[worst] <= ULPS[dtype], f"{op}({x[worst]!r}) is wrong by {float(error[worst]):.2f} ulp"


@pytest.mark.parametrize("dtype", ULPS, ids=str)
def test_values_that_are_not_finite(dtype: torch.dtype) -> None:
    need("cpu")
    x = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -1.0], dtype=dtype)
    for op in RANGES:
        with np.errstate(all="ignore"):
            expected = getattr(np, op.lower())(x.numpy())
        np.testing.assert_allclose(over_pairs(op, x), expected, rtol=3e-7, err_msg=op)
