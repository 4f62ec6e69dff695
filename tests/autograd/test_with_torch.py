"""Reductions among torch's other features: checkpointing, modes, subclasses, tracing, autocast, threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from kernops.autograd.derivatives import call_of
from kernops.autograd.function import _batched, _forward
from tests.helpers.reductions import Case

Tensor = torch.Tensor


@pytest.fixture(params=["LogSumExp", "KMin"])
def case(request) -> Case:
    return Case(request.param, "gauss")


@pytest.fixture
def values(case) -> list[Tensor]:
    return [t.requires_grad_() for t in case.data()]


def gradients(out: Tensor, values: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out.sin().sum(), values)


def test_checkpointing(case, values):
    out = checkpoint(lambda *v: case.ours(list(v))[0], *values, use_reentrant=False)
    torch.testing.assert_close(gradients(out, values), gradients(case.dense(values)[0], values))


def test_a_dispatch_mode(case, values):
    with FlopCounterMode(display=False):
        got = gradients(case.ours(values)[0], values)
    torch.testing.assert_close(got, gradients(case.dense(values)[0], values))


class Named(Tensor):
    """A subclass that changes nothing."""


@pytest.mark.parametrize("recorded", [False, True])
def test_a_subclass(case, values, recorded):
    x = values[0].detach().as_subclass(Named).requires_grad_(recorded)
    others = [t.detach() for t in values[1:]]
    out = case.ours([x, *others])[0]
    assert type(out) is Named
    torch.testing.assert_close(out.as_subclass(Tensor), case.dense(values)[0])
    if recorded:
        (got,) = gradients(out, [x])
        torch.testing.assert_close(got.as_subclass(Tensor), gradients(case.dense(values)[0], values)[0])


def test_parameters_of_modules(case, values):
    got = [torch.nn.Parameter(t.detach()) for t in values]
    case.ours(got)[0].sin().sum().backward()
    want = gradients(case.dense(values)[0], values)
    for p, w in zip(got, want, strict=True):
        torch.testing.assert_close(p.grad, w)


def test_tracing_of_forward_and_backward(case, values):
    others = [t.detach() for t in values[1:]]

    def function(x: Tensor) -> Tensor:
        return gradients(case.ours([x, *others])[0], [x])[0]

    graph = make_fx(function)(values[0])
    assert "kernops.reduce" in graph.code
    torch.testing.assert_close(graph(values[0]), gradients(case.dense(values)[0], values)[0])


def test_autocast_changes_nothing(case, values):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = gradients(case.ours(values)[0], values)
    torch.testing.assert_close(got, gradients(case.dense(values)[0], values))


@pytest.mark.parametrize("levels", [1, 2])
def test_batched_cotangents_on_a_thread_of_autograd(levels):
    """Which runs the backward passes of a GPU, and knows the levels of tensors but not how many there are."""
    case = Case("Sum", "gauss")
    values = case.data()
    call = call_of(case.plan, *case.sizes(values), "tiled", (), 8)
    plain = [torch.stack([values[0] + k for k in range(3)]), torch.stack([values[1] * k for k in range(1, 3)])]
    for k in range(1, levels + 1):
        torch._C._vmapmode_increment_nesting()
        values[k - 1] = torch._add_batch_dim(plain[k - 1], 0, k)
    try:
        with ThreadPoolExecutor(1) as pool:
            (got,) = pool.submit(_batched, call, values, _forward).result()
        for k in range(levels, 0, -1):
            got = torch._remove_batch_dim(got, k, len(plain[k - 1]), 0)
    finally:
        for _ in range(levels):
            torch._C._vmapmode_decrement_nesting()
    x, y, *others = case.data()
    for i in range(3):
        if levels == 1:
            torch.testing.assert_close(got[i], case.dense([plain[0][i], y, *others])[0])
        for j in range(2) if levels == 2 else ():
            torch.testing.assert_close(got[i, j], case.dense([plain[0][i], plain[1][j], *others])[0])


def test_threads(case, values):
    want = gradients(case.dense(values)[0], values)
    problems: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(10):
                own = [t.detach().requires_grad_() for t in values]
                torch.testing.assert_close(gradients(case.ours(own)[0], own), want)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not problems
