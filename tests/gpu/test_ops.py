"""Every op of the table on the GPU: value, first, second and forward derivative, against float64 torch."""

from __future__ import annotations

import pytest
import torch

from kernops.formula.ops import OPS
from tests.helpers.cases import check_cases, few_cases
from tests.helpers.special import check_special, groups

_FEW = [case for op in OPS.values() for case in few_cases(op)]
GROUP = 12
DTYPES = [torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("start", range(0, len(_FEW), GROUP))
def test_ops(start: int, dtype: torch.dtype) -> None:
    check_cases(_FEW[start : start + GROUP], "cuda", "cuda", dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", groups(), ids=lambda g: f"{g[0]}-{g[1][0]}")
def test_ops_at_corners(group: tuple[int, list[str]], dtype: torch.dtype) -> None:
    check_special(*group, backend="cuda", device="cuda", dtype=dtype)
