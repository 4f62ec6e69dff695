"""What is particular to the CPU back end: how it cuts its work, neighbour lists, many components, compilers."""

from __future__ import annotations

import math
import os
import resource
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from kernops.backends import cpu, reduce
from kernops.codegen.host_schedule import Machine, schedule
from kernops.formula.graph import CAT_I, CAT_J, CAT_P, CAT_SCALAR, Node, var
from kernops.formula.ops import apply, mul, neg, sub
from kernops.formula.plan import Plan, make_plan

F32, F64 = torch.float32, torch.float64
REASON = cpu.available(torch.device("cpu"))
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


def _rand(*shape: int, seed: int = 0, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def _sqdist(dim: int = 3) -> Node:
    return apply("SqDist", var(CAT_I, 0, dim), var(CAT_J, 1, dim))


def _check(plan: Plan, tensors: list, m: int, n: int, rtol: float, batch: tuple[int, ...] | None = None) -> None:
    """Against the torch back end in float64."""
    got = reduce(plan, tensors, m, n, "cpu", batch)
    exact = [t.double() if isinstance(t, torch.Tensor) else t for t in tensors]
    for g, w in zip(got, reduce(plan, exact, m, n, "tiled", batch)):
        if g.is_floating_point():
            torch.testing.assert_close(g.double(), w, rtol=rtol, atol=rtol, equal_nan=True)
        else:
            assert torch.equal(g, w)


# --- how work is cut --------------------------------------------------------------------------------------------------
PLANS = {
    "sum": make_plan("Sum", mul(apply("Exp", neg(_sqdist())), var(CAT_J, 2, 1))),
    "lse": make_plan("LogSumExp", neg(_sqdist()), n_vars=3),
    "softmax": make_plan("SumSoftMaxWeight", neg(_sqdist()), var(CAT_J, 2, 1)),
    "argmin": make_plan("MinArgMin", _sqdist(), n_vars=3),
    "kmin": make_plan("KMin", _sqdist(), k=7, n_vars=3),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_shapes_around_the_sizes_of_blocks(plan: Plan) -> None:
    for m in (1, 2, 3, 4, 5, 31, 33, 130):
        for n in (7, 15, 16, 17, 32, 33, 1025):
            _check(plan, [_rand(m, 3), _rand(n, 3, seed=1), _rand(n, 1, seed=2)], m, n, 3e-6)


def test_few_columns_are_taken_one_vector_at_a_time() -> None:
    """Light formulas take several else, of which few columns would fill one."""
    for name, vectors in (("sum", 3), ("lse", 3), ("kmin", 2)):
        s, few = (schedule(PLANS[name], 4, Machine(64, 32), kind) for kind in ("", "columns"))
        assert s.vectors == vectors and few.vectors == (2 if name == "kmin" else 1)
        assert name == "kmin" or s.vectors * s.tile <= 64  # vectors that are summed plainly
    assert [cpu.variant(m, n, m * n) for m, n in ((5, 32), (5, 33), (1, 1 << 22))] == ["columns", "", "rows"]


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_few_rows_split_the_columns(plan: Plan) -> None:
    for m, n in ((1, 50_000), (13, 20_011), (63, 9000)):
        _check(plan, [_rand(m, 3), _rand(n, 3, seed=1), _rand(n, 1, seed=2)], m, n, 1e-5)


@pytest.mark.parametrize("name", ["sum", "lse", "kmin"])
def test_one_row_against_millions(name: str) -> None:
    """The variant that takes one row at a time."""
    n = 5_000_000
    _check(PLANS[name], [_rand(1, 3), _rand(n, 3, seed=1), _rand(n, 1, seed=2)], 1, n, 1e-5)


def test_more_pairs_than_32_bits_count() -> None:
    m, n = 70_000, 32_000
    y = torch.sort(_rand(n, 1, dtype=F64), 0).values
    x = _rand(m, 1, seed=1, dtype=F64)
    plan = make_plan("MinArgMin", _sqdist(1))
    value, index = reduce(plan, [x.float(), y.float()], m, n, "cpu")
    x, y = x.float().double(), y.float().double()
    right = torch.searchsorted(y[:, 0], x[:, 0]).clamp(1, n - 1)
    want = torch.minimum((x[:, 0] - y[right, 0]) ** 2, (x[:, 0] - y[right - 1, 0]) ** 2)
    torch.testing.assert_close(value[:, 0].double(), want, rtol=1e-5, atol=1e-12)
    torch.testing.assert_close((x[:, 0] - y[index[:, 0], 0]) ** 2, want, rtol=1e-5, atol=1e-12)


# --- batches ----------------------------------------------------------------------------------------------------------
def test_many_batch_axes() -> None:
    """Seven axes along which each operand broadcasts in its own way; a batched parameter, a scalar, a view."""
    batch = (2, 1, 3, 2, 1, 2, 2)
    f = apply("Exp", neg(mul(mul(var(CAT_P, 3, 1), var(CAT_SCALAR, 4, 1)), _sqdist())))
    plan = make_plan("Sum", mul(f, var(CAT_J, 2, 2)))
    x = _rand(2, 1, 1, 2, 1, 2, 1, 5, 3)
    y = _rand(3, 2, 1, 1, 1, 9, 3, seed=1)  # axes missing on the left
    w = _rand(1, 1, 1, 1, 1, 1, 2, 9, 2, seed=2).expand(*batch, 9, 2)
    p = _rand(2, 1, 1, 1, 1, 1, 1, 1, seed=3).abs()
    _check(plan, [x, y, w, p, 0.5], 5, 9, 1e-5, batch)
    _check(plan, [x[0, 0, 0, 0, 0, 0, 0], y, w[0, 0, 0, 0, 0, 0, 0], p[0, 0, 0, 0, 0, 0, 0], 0.5], 5, 9, 1e-5,
           (3, 2, 1, 1, 1))  # fmt: skip


def test_many_small_batches_and_few_large_ones() -> None:
    plan = PLANS["sum"]
    _check(plan, [_rand(3000, 4, 3), _rand(3000, 6, 3, seed=1), _rand(6, 1, seed=2)], 4, 6, 1e-5, (3000,))
    n = 900_000  # packed columns of more than one batch element exceed what is kept at once
    _check(plan, [_rand(2, 3), _rand(6, n, 3, seed=1), _rand(n, 1, seed=2)], 2, n, 1e-5, (6,))


def test_strides() -> None:
    m, n = 9, 40
    tensors = [_rand(3, m).T, _rand(n, 1, seed=1).expand(n, 3), _rand(2 * n, 2, seed=2)[::2, 1:]]
    for plan in PLANS.values():
        _check(plan, tensors, m, n, 3e-6)


# --- components -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("dim", "width"), [(3, 5), (3, 17), (2, 130), (40, 1), (700, 3), (4096, 1)])
def test_dimensions(dim: int, width: int) -> None:
    m, n = 37, 300
    f = mul(apply("Exp", mul(-1.0 / dim, _sqdist(dim))), var(CAT_J, 2, width))
    x, y, w = _rand(m, dim), _rand(n, dim, seed=1), _rand(n, width, seed=2)
    got = reduce(make_plan("Sum", f), [x, y, w], m, n, "cpu")[0]
    k = torch.exp(-(torch.cdist(x.double(), y.double(), compute_mode="donot_use_mm_for_euclid_dist") ** 2) / dim)
    want, scale = k @ w.double(), k @ w.double().abs()
    assert ((got - want).abs() / scale).max() < 2e-6


def test_many_components_that_depend_on_the_pair() -> None:
    """As in gradients: the shared kernel value times a difference, with row factors; components that share nothing."""
    m, n, dim = 21, 90, 45
    x, y = _rand(m, dim), _rand(n, dim, seed=1)
    difference = sub(var(CAT_I, 0, dim), var(CAT_J, 1, dim))
    kernel = apply("Exp", mul(-0.02, _sqdist(dim)))
    _check(
        make_plan("Sum", mul(mul(kernel, difference), var(CAT_I, 2, dim))), [x, y, _rand(m, dim, seed=3)], m, n, 1e-5
    )
    _check(make_plan("Sum", apply("Exp", neg(apply("Abs", difference)))), [x, y], m, n, 1e-5)
    _check(make_plan("SumSoftMaxWeight", mul(-0.1, _sqdist(dim)), mul(kernel, difference)), [x, y], m, n, 1e-5)
    _check(make_plan("MinArgMin", difference), [x, y], m, n, 1e-6)


def test_exponents_that_rise_and_fall() -> None:
    """The largest exponent changes from tile to tile, and is infinite in some rows."""
    n = 3000
    score = torch.cat([torch.linspace(-1e4, 1e4, n // 2), torch.linspace(1e4, -1e4, n // 2)])[:, None]
    w = _rand(n, 20, seed=2)
    x = torch.tensor([[1.0], [-1.0], [1e-3], [0.0], [3e34], [-3e34]])
    exponent = mul(var(CAT_I, 0, 1), var(CAT_J, 1, 1))
    _check(make_plan("SumSoftMaxWeight", exponent, var(CAT_J, 2, 20)), [x, score, w], 6, n, 1e-5)
    _check(make_plan("LogSumExp", exponent, n_vars=3), [x, score, w], 6, n, 1e-5)


# --- neighbours -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("k", [1, 16, 17, 200, 300])
def test_lists_of_every_length(k: int) -> None:
    """Sorted vectors, then a heap; in every order of the columns; with many ties, NaN and infinities."""
    n = 4000
    difference = sub(var(CAT_J, 1, 1), var(CAT_I, 0, 1))
    plan = make_plan("KMin", difference, k=k)
    rising = torch.arange(n, dtype=F32)[:, None]
    ties = _rand(n, 1).mul(3).round()
    odd = ties.clone()
    odd[::3], odd[1::7], odd[5::11] = math.nan, math.inf, -math.inf
    few = torch.full((n, 1), math.nan)
    few[n // 2 :: 100] = 1.0
    for y in (rising, -rising, rising % 1000, ties, odd, few, torch.zeros(n, 1)):
        for dtype in (F32, F64):
            _check(plan, [torch.tensor([[0.0], [2.0], [-1.0]], dtype=dtype), y.to(dtype)], 3, n, 1e-6)


# --- processes and threads --------------------------------------------------------------------------------------------
FORK = """
import os, sys, torch
from kernops.backends import reduce
from kernops.formula.graph import var
from kernops.formula.ops import apply, neg
from kernops.formula.plan import make_plan
plan = make_plan("Sum", apply("Exp", neg(apply("SqDist", var(0, 0, 3), var(1, 1, 3)))), n_vars=3)
x = torch.rand(2000, 3)
want, = reduce(plan, [x, x, x], 2000, 2000, "cpu")
child = os.fork()
got, = reduce(plan, [x, x, x], 2000, 2000, "cpu")
new = make_plan("Min", apply("SqDist", var(0, 0, 3), var(1, 1, 3)), n_vars=3)  # the child compiles too
zero, = reduce(new, [x, x, x], 2000, 2000, "cpu")
ok = torch.equal(got, want) and float(zero.max()) == 0
if child == 0:
    os._exit(0 if ok else 1)
_, status = os.waitpid(child, 0)
sys.exit(0 if ok and status == 0 else 1)
"""


def test_a_call_in_a_forked_child_returns() -> None:
    environment = {**os.environ, "KERNOPS_NUM_THREADS": "4"}
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=120, env=environment)


def test_threads_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several threads call a formula that none has compiled; all get the same bits as with one thread."""
    monkeypatch.setenv("KERNOPS_NUM_THREADS", "3")
    plan = make_plan("Sum", mul(apply("Exp", neg(_sqdist())), 1.25), n_vars=3)
    x, y = _rand(700, 3), _rand(900, 3, seed=1)
    outs: list[torch.Tensor] = []
    workers = [
        threading.Thread(target=lambda: [outs.append(reduce(plan, [x, y, y], 700, 900, "cpu")[0]) for _ in range(5)])  # type: ignore[func-returns-value]
        for _ in range(4)
    ]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    monkeypatch.setenv("KERNOPS_NUM_THREADS", "1")
    want = reduce(plan, [x, y, y], 700, 900, "cpu")[0]
    assert len(outs) == 20 and all(torch.equal(o, want) for o in outs)


def test_the_number_of_threads_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    for bad in ("0", "-1", "two", "1.5"):
        monkeypatch.setenv("KERNOPS_NUM_THREADS", bad)
        with pytest.raises(ValueError, match="KERNOPS_NUM_THREADS must be a whole number >= 1"):
            cpu.threads()
    monkeypatch.setenv("KERNOPS_NUM_THREADS", "3")
    assert cpu.threads() == 3
    monkeypatch.delenv("KERNOPS_NUM_THREADS")
    assert cpu.threads() == torch.get_num_threads()


def test_calls_leave_no_memory_behind() -> None:
    x, y, w = _rand(300, 3), _rand(500, 3, seed=1), _rand(500, 1, seed=2)

    def peak() -> int:
        for plan in PLANS.values():
            for _ in range(300):
                reduce(plan, [x, y, w], 300, 500, "cpu")
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    peak()
    before = peak()
    assert peak() - before < 2000  # kilobytes; one leaked buffer a call would be 10 MB


# --- compilers --------------------------------------------------------------------------------------------------------
def _fake_compiler(folder: Path, body: str) -> Path:
    path = folder / "c++-that-fails"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def _fresh_plan() -> Plan:
    """A plan that has not been called, so that it must be compiled."""
    return make_plan("Sum", mul(_sqdist(), 0.123), n_vars=2)


def test_a_failing_compiler_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_cache: Path) -> None:
    fake = _fake_compiler(tmp_path, '[ "$1" = --version ] && echo fake 1.0 && exit 0; echo "out of ideas" >&2; exit 3')
    monkeypatch.setenv("KERNOPS_CXX", str(fake))
    with pytest.raises(RuntimeError, match="(?s)exit status 3.*out of ideas.*kernel.cpp") as raised:
        cpu.run(_fresh_plan(), [_rand(3, 3), _rand(4, 3)], 3, 4, ())
    words = str(raised.value).split()
    source = next(Path(w.rstrip(",")) for w in words if w.rstrip(",").endswith("kernel.cpp"))
    assert "kernops_run" in source.read_text()


def test_why_there_is_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    for value, why in (
        (str(tmp_path / "nothing"), "was not found"),
        (str(_fake_compiler(tmp_path, "exit 9")), "exit status 9"),
    ):
        monkeypatch.setenv("KERNOPS_CXX", value)
        assert why in str(cpu.available(device))
    monkeypatch.delenv("KERNOPS_CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    cpu._compiler.cache_clear()
    try:
        assert "'g++' was not found, 'clang++' was not found, 'c++' was not found" in str(cpu.available(device))
    finally:
        cpu._compiler.cache_clear()
    assert "not on cuda" in str(cpu.available(torch.device("cuda")))


@pytest.mark.parametrize("compiler", ["clang++", "g++ -march=x86-64"])
def test_other_compilers(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other compiler, and the instructions that every machine has."""
    if compiler.startswith("g++"):
        monkeypatch.setattr(cpu, "_NATIVE", {"x86_64": "-march=x86-64"})
        monkeypatch.setattr(cpu, "_cpu", lambda: ("baseline", cpu.Machine(16, 16)))
    monkeypatch.setenv("KERNOPS_CXX", compiler.split()[0])
    reason = cpu.available(torch.device("cpu"))
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.setattr(cpu, "_bindings", {})
    for plan in PLANS.values():
        _check(plan, [_rand(33, 3), _rand(501, 3, seed=1), _rand(501, 1, seed=2)], 33, 501, 3e-6)
