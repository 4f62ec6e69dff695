"""Reductions of a table that a test writes down, number by number, and what each core must make of it.

The expected results are spelled out with numpy on float64, one row at a time, independent of every back end.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from kernops.backends import reduce
from kernops.formula.graph import CAT_I, CAT_J, Node, check, var
from kernops.formula.ops import apply, const
from kernops.formula.plan import make_plan
from kernops.formula.reductions import CORES

#: Rows of every table, so that one compiled formula serves all of them.
ROWS = 8


def table_formula(components: int, first: int = 0) -> Node:
    """F with F_ij = table[i, j, :], given the number of the row as i-variable and the columns as j-variables."""
    here = apply("OneHot", var(CAT_I, 0, 1), params=(ROWS,))
    out: Node | None = None
    for c in range(components):
        column = var(CAT_J, 1 + first + c, ROWS)
        value = apply("Sum", apply("Where", here, column, const(0.0)))  # a sum of zeros and one entry is exact
        out = value if out is None else apply("Concat", out, value)
    assert out is not None
    return check(out)


def reduce_table(core: str, table: np.ndarray, backend: str, dtype, weight: np.ndarray | None = None, k: int = 0,
                 device: str = "cpu") -> list[np.ndarray]:  # fmt: skip
    """The core's outputs, of shape (ROWS, ...) each; ``table`` and ``weight`` are of shape (ROWS, N, components)."""
    assert table.shape[0] == ROWS
    formulas = [table_formula(table.shape[-1])]
    if weight is not None:
        formulas.append(table_formula(weight.shape[-1], first=table.shape[-1]))
        table = np.concatenate([table, weight], -1)
    columns = [torch.as_tensor(table[:, :, c].T.copy(), dtype=dtype, device=device) for c in range(table.shape[-1])]
    number = torch.arange(ROWS, dtype=dtype, device=device).unsqueeze(-1)
    plan = make_plan(core, *formulas, k=k)
    outs = reduce(plan, [number, *columns], ROWS, table.shape[1], backend)
    for name, out in zip(CORES[core].outputs, outs):
        assert out.dtype == (torch.int64 if name == "index" else dtype)
        assert out.shape == (ROWS, *((k,) if k else ()), 1 if name == "lse" else plan.dim)
    return [out.double().cpu().numpy() if out.is_floating_point() else out.cpu().numpy() for out in outs]


# --- what one row must give: (columns,) or (columns, weights) in, outputs out
def _lse(f: np.ndarray) -> float:
    if np.isnan(f).any():
        return math.nan
    top = f.max()
    return top if math.isinf(top) else top + math.log(np.exp(f - top).sum())


def _softmax(f: np.ndarray) -> np.ndarray:
    """Weights of softmax; where some f are +inf they share all of it; without any finite or +inf f there is none."""
    if np.isnan(f).any() or (f == -np.inf).all():
        return np.full_like(f, np.nan)
    if (f == np.inf).any():
        return (f == np.inf) / (f == np.inf).sum()
    p = np.exp(f - f.max())
    return p / p.sum()


def _k_smallest(f: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    order = [j for j in np.argsort(f, kind="stable") if not math.isnan(f[j])][:k]
    missing = k - len(order)
    return np.array([*f[order], *[math.nan] * missing]), np.array([*order, *[-1] * missing], dtype=np.int64)


def _min_argmin(f: np.ndarray) -> tuple[float, int]:
    value, index = _k_smallest(f, 1)
    return value[0], index[0]


#: Core -> function of one component of one row, giving the outputs.
ROW_RESULTS: dict[str, Callable] = {
    "Sum": lambda f: (f.sum(),),
    "LogSumExp": lambda f: (_lse(f),),
    "Min": lambda f: (f.min(),),
    "MinArgMin": _min_argmin,
    "KMin": _k_smallest,
}


def expect_table(core: str, table: np.ndarray, weight: np.ndarray | None = None, k: int = 0) -> list[np.ndarray]:
    """What :func:`reduce_table` must return."""
    with np.errstate(all="ignore"):
        if weight is not None:
            p = np.stack([_softmax(row[:, 0]) for row in table])
            mean = (np.where(p == 0, 0.0, p)[:, :, None] * weight).sum(1)
            return [mean, np.array([[_lse(row[:, 0])] for row in table])]
        extra = (k,) if k else ()
        results = [[ROW_RESULTS[core](row[:, c], *extra) for c in range(table.shape[-1])] for row in table]
    count = len(CORES[core].outputs)
    return [np.stack([np.stack([r[o] for r in row], -1) for row in results]) for o in range(count)]


def check_table(core: str, table: np.ndarray, backend: str, dtype=torch.float64, weight: np.ndarray | None = None,
                k: int = 0, device: str = "cpu", rtol: float | None = None) -> None:  # fmt: skip
    """Assert that ``backend`` gives what numpy says; indices exactly, values to rounding."""
    half = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
    rtol = rtol or {torch.float64: 1e-12, torch.float32: 3e-6, **half}[dtype]
    table = torch.as_tensor(table).to(dtype).double().numpy()
    rounded_weight = None if weight is None else torch.as_tensor(weight).to(dtype).double().numpy()
    got = reduce_table(core, table, backend, dtype, rounded_weight, k, device)
    want = expect_table(core, table, rounded_weight, k)
    for name, g, w in zip(CORES[core].outputs, got, want):
        if name == "index":
            np.testing.assert_array_equal(g, w, err_msg=f"{core} {name} on {backend}, {dtype}")
        else:
            np.testing.assert_allclose(g, w, rtol=rtol, atol=rtol, err_msg=f"{core} {name} on {backend}, {dtype}")
