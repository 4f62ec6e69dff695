"""The cpu back end among compilers, processes and threads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from kernops.backends import reduce
from kernops.formula.graph import CAT_I, CAT_J, var
from kernops.formula.ops import apply, mul, neg
from kernops.formula.plan import Plan, make_plan
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


def gaussian() -> Plan:
    x, y, b = var(CAT_I, 0, 3), var(CAT_J, 1, 3), var(CAT_J, 2, 1)
    return make_plan("Sum", mul(apply("Exp", neg(apply("SqDist", x, y))), b))


def data(m: int, n: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=g) for shape in ((m, 3), (n, 3), (n, 1))]


def in_new_process(backend: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    code = SMALL.format(backend=backend)
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)


def compiler_that_fails(folder: Path) -> str:
    script = folder / "broken-cxx"
    script.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo broken 1.0 && exit 0\necho "line 7: no such thing" >&2\nexit 3\n'
    )
    script.chmod(0o755)
    return str(script)


def test_no_compiler_falls_back_with_one_line_of_log(empty_cache: Path) -> None:
    done = in_new_process("auto", KERNOPS_CXX="/no/such/compiler")
    assert done.stdout == EXPECTED, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("kernops.backends")]
    assert len(lines) == 1 and "/no/such/compiler" in lines[0] and "tiled" in lines[0]


def test_no_compiler_is_an_error_where_the_back_end_was_named(empty_cache: Path) -> None:
    done = in_new_process("cpu", KERNOPS_CXX="/no/such/compiler")
    assert done.returncode != 0 and done.stdout == ""
    assert "RuntimeError: backend: 'cpu' cannot run here" in done.stderr and "/no/such/compiler" in done.stderr


def test_a_compiler_failure_shows_its_message_and_the_source(empty_cache: Path, tmp_path: Path) -> None:
    done = in_new_process("cpu", KERNOPS_CXX=compiler_that_fails(tmp_path))
    assert "RuntimeError: the C++ compiler failed with exit status 3" in done.stderr
    assert "line 7: no such thing" in done.stderr
    (source,) = [line for line in done.stderr.splitlines() if line.startswith("The source is ")]
    path = Path(source.removeprefix("The source is ").split(",")[0])
    assert "struct Formula" in path.read_text()


def test_a_compiler_with_arguments(empty_cache: Path) -> None:
    need("cpu")
    done = in_new_process("cpu", KERNOPS_CXX="g++ -O1")
    assert done.stdout == EXPECTED, done.stderr


def test_a_forked_child_computes_after_its_parent_did() -> None:
    need("cpu")
    tensors = data(3000, 3000)
    before = reduce(gaussian(), tensors, 3000, 3000, "cpu")[0]
    child = os.fork()
    if child == 0:  # no assert here: pytest's own clean-up must not run twice
        same = torch.equal(reduce(gaussian(), tensors, 3000, 3000, "cpu")[0], before)
        os._exit(0 if same else 1)
    for _ in range(600):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        time.sleep(0.1)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        pytest.fail("the forked child hangs")
    assert os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0
    assert torch.equal(reduce(gaussian(), tensors, 3000, 3000, "cpu")[0], before)


def test_two_threads_at_once() -> None:
    need("cpu")
    problems = [data(2000 + 10 * k, 1500) for k in range(4)]
    alone = [reduce(gaussian(), t, len(t[0]), 1500, "cpu")[0] for t in problems]
    wrong: list[int] = []

    def work(k: int) -> None:
        for _ in range(20):
            if not torch.equal(reduce(gaussian(), problems[k], len(problems[k][0]), 1500, "cpu")[0], alone[k]):
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []


@pytest.mark.parametrize("count", ["0", "-1", "two"])
def test_a_wrong_number_of_threads_is_named(count: str, monkeypatch: pytest.MonkeyPatch) -> None:
    need("cpu")
    monkeypatch.setenv("KERNOPS_NUM_THREADS", count)
    with pytest.raises(ValueError, match=f"KERNOPS_NUM_THREADS.*got '{count}'"):
        reduce(gaussian(), data(400, 400), 400, 400, "cpu")


def test_many_calls_keep_no_memory() -> None:
    need("cpu")
    resource = pytest.importorskip("resource")
    tensors = data(10, 5000)

    def peak() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    for _ in range(500):
        reduce(gaussian(), tensors, 10, 5000, "cpu")
    before = peak()
    for _ in range(10_000):
        reduce(gaussian(), tensors, 10, 5000, "cpu")
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
