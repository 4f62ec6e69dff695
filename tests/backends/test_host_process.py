"""The cpu back end in new processes, over many calls, and with long lists of neighbours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernops.backends import reduce
from kernops.formula.graph import CAT_I, CAT_J, var
from kernops.formula.ops import apply, mul, neg
from kernops.formula.plan import make_plan
from tests.helpers.backends import need

ROOT = Path(__file__).resolve().parents[2]
SMALL = """
import logging, torch
from kernops.backends import reduce
from kernops.formula.graph import var
from kernops.formula.ops import apply
from kernops.formula.plan import make_plan
logging.basicConfig(level=logging.WARNING, format="%(name)s %(levelname)s %(message)s")
x = torch.arange(12.0).reshape(4, 3)
plan = make_plan("Sum", apply("SqDist", var(0, 0, 3), var(1, 1, 3)))
for _ in range(2):
    print(reduce(plan, [x, x], 4, 4, {backend!r})[0].flatten().tolist())
"""
EXPECTED = "[378.0, 162.0, 162.0, 378.0]\n" * 2  # 27 · (1 + 4 + 9), 27 · (1 + 1 + 4)


def in_new_process(backend: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    code = SMALL.format(backend=backend)
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)


def test_no_compiler_falls_back_with_one_line_of_log(empty_cache: Path) -> None:
    done = in_new_process("auto", KERNOPS_CXX="/no/such/compiler")
    assert done.stdout == EXPECTED, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("kernops.backends")]
    assert len(lines) == 1 and "/no/such/compiler" in lines[0] and "tiled" in lines[0]


def test_no_compiler_is_an_error_where_the_back_end_was_named(empty_cache: Path) -> None:
    done = in_new_process("cpu", KERNOPS_CXX="/no/such/compiler")
    assert done.returncode != 0 and done.stdout == ""
    assert "RuntimeError: backend: 'cpu' cannot run here" in done.stderr and "/no/such/compiler" in done.stderr


def test_a_compiler_with_arguments(empty_cache: Path) -> None:
    need("cpu")
    done = in_new_process("cpu", KERNOPS_CXX="g++ -O1")
    assert done.stdout == EXPECTED, done.stderr


def test_many_calls_keep_no_memory() -> None:
    need("cpu")
    resource = pytest.importorskip("resource")
    x, y, b = var(CAT_I, 0, 3), var(CAT_J, 1, 3), var(CAT_J, 2, 1)
    plan = make_plan("Sum", mul(apply("Exp", neg(apply("SqDist", x, y))), b))
    tensors = [torch.rand(10, 3), torch.rand(5000, 3), torch.rand(5000, 1)]

    def peak() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    for _ in range(500):
        reduce(plan, tensors, 10, 5000, "cpu")
    before = peak()
    for _ in range(10_000):
        reduce(plan, tensors, 10, 5000, "cpu")
    assert peak() - before < 2048  # KiB; one leaked block of columns a call would be 800 MB


@pytest.mark.parametrize("k", [1, 3, 16, 17, 100, 700])
def test_many_neighbours_with_ties(k: int) -> None:
    need("cpu")
    g = torch.Generator().manual_seed(1)
    x, y = (torch.randint(0, 4, (n, 2), generator=g).float() for n in (60, 900))
    plan = make_plan("KMin", apply("SqDist", var(CAT_I, 0, 2), var(CAT_J, 1, 2)), k=k)
    values, index = reduce(plan, [x, y], 60, 900, "cpu")
    table = ((x[:, None] - y[None]) ** 2).sum(-1)
    order = table.sort(dim=1, stable=True).indices[:, :k]
    assert torch.equal(index[..., 0], order)
    assert torch.equal(values[..., 0], table.gather(1, order))
