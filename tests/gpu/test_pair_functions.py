"""Errors of the functions that are the hardware's own where a GPU computes a formula for pairs, over their ranges."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from kernops.backends import reduce
from kernops.formula.graph import CAT_I, CAT_J, Node, var
from kernops.formula.ops import add, apply, div, mul, neg, sub
from kernops.formula.plan import make_plan

Tensor = torch.Tensor
INF, NAN = math.inf, math.nan

#: Argument of a pair: that of the row, since that of the column is 0.
A = add(var(CAT_I, 0, 1), var(CAT_J, 1, 1))

#: Name -> (formula, the same in float64, interval of the argument, largest error, whether it is relative to the value;
#: else to 1 + |value|).
FUNCTIONS: dict[str, tuple[Node, Callable[[Tensor], Tensor], tuple[float, float], float, bool]] = {
    "log": (apply("Log", A), torch.log, (1e-37, 1e38), 4.5e-7, True),
    "log near 1": (apply("Log", A), torch.log, (0.4, 2.5), 4.5e-7, True),
    "log2 near 1": (apply("Log2", A), torch.log2, (0.4, 2.5), 5e-7, True),
    "log1p": (apply("Log1p", A), torch.log1p, (1e-30, 1e38), 4.5e-7, True),
    "log1p near 0": (apply("Log1p", A), torch.log1p, (-0.9, 2.0), 4.5e-7, True),
    "log1p very near 0": (apply("Log1p", A), torch.log1p, (-1e-4, 1e-4), 4.5e-7, True),
    "1 - log1p": (sub(1.0, apply("Log1p", A)), lambda a: 1 - a.log1p(), (0.0, 100.0), 6e-7, False),
    "2 + log": (add(2.0, apply("Log", A)), lambda a: 2 + a.log(), (1e-3, 100.0), 6e-7, False),
    "sqrt": (apply("Sqrt", A), torch.sqrt, (2e-38, 1e38), 1.3e-7, True),
    "rsqrt": (apply("Rsqrt", A), torch.rsqrt, (2e-38, 1e38), 1.6e-7, True),
    "rsqrt0": (apply("Rsqrt0", A), torch.rsqrt, (2e-38, 1e38), 1.6e-7, True),
    "inv": (div(1.0, A), torch.reciprocal, (2e-38, 8e37), 1.3e-7, True),
    "quotient": (div(mul(A, 0.7), add(A, 1.0)), lambda a: 0.7 * a / (a + 1), (0.0, 1e6), 4e-7, True),
    "exp2": (apply("Exp2", A), torch.exp2, (-125.0, 127.0), 2.4e-7, True),
    # two of the exponential unit's functions for each pair: some powers of 2 are polynomials
    "exp2 of sqrt": (apply("Exp2", neg(apply("Sqrt", A))), lambda a: torch.exp2(-a.sqrt()), (0.0, 49.0), 8e-7, True),
}  # fmt: skip


def arguments(low: float, high: float) -> Tensor:
    """Numbers of an interval, and those near its ends on a logarithmic scale."""
    even = torch.linspace(low, high, 40_000, dtype=torch.float64)
    if low > 0:
        even = torch.cat((even, torch.logspace(math.log10(low), math.log10(high), 40_000, dtype=torch.float64)))
    return even.clamp(low, high).float()


def values(node: Node, a: Tensor, columns: int, backend: str, device: str) -> Tensor:
    """The formula at each argument, by a sum over columns of which only the last is not multiplied by 0."""
    rows, zeros = a[:, None].to(device), torch.zeros(columns, 1, device=device)
    weight = torch.zeros(columns, 1, device=device)
    weight[-1] = 1
    plan = make_plan("Sum", mul(node, var(CAT_J, 2, 1)))
    return reduce(plan, [rows, zeros, weight], len(a), columns, backend)[0][:, 0].cpu()


@pytest.mark.parametrize("columns", [1, 13, 16])  # so that the pair is one of the loop's, or of its rest
@pytest.mark.parametrize("name", FUNCTIONS)
def test_errors(name: str, columns: int, backend: str = "cuda", device: str = "cuda") -> None:
    node, exact, (low, high), most, relative = FUNCTIONS[name]
    a = arguments(low, high)
    want = exact(a.double())
    error = (values(node, a, columns, backend, device).double() - want).abs()
    error = error / (want.abs() if relative else 1 + want.abs())
    error[(want == 0) & (error != error)] = 0  # 0 / 0
    worst = int(error.argmax())
    assert error[worst] <= most, f"{name}({a[worst]}): error {error[worst]:.3g}"


@pytest.mark.parametrize("columns", [1, 16])
def test_what_is_not_finite(columns: int) -> None:
    a = torch.tensor([-INF, -1.0, -0.0, 0.0, INF, NAN])
    expected = {
        "log": [NAN, NAN, -INF, -INF, INF, NAN], "log1p": [NAN, -INF, 0.0, 0.0, INF, NAN],
        "sqrt": [NAN, NAN, 0.0, 0.0, INF, NAN], "rsqrt0": [NAN, NAN, 0.0, 0.0, 0.0, NAN],
        "exp2": [0.0, 0.5, 1.0, 1.0, INF, NAN], "1 - log1p": [NAN, INF, 1.0, 1.0, -INF, NAN],
        "exp2 of sqrt": [NAN, NAN, 1.0, 1.0, 0.0, NAN],
    }  # fmt: skip
    for name, want in expected.items():
        node = FUNCTIONS[name][0]
        plan = make_plan("Sum", node)
        zeros = torch.zeros(columns, 1, device="cuda")
        (got,) = reduce(plan, [a[:, None].cuda(), zeros], len(a), columns, "cuda")
        torch.testing.assert_close(got[:, 0].cpu() / columns, torch.tensor(want), equal_nan=True, msg=name)
