"""Reductions on matrix units against float64 torch: every kernel, layout and mode, and what plain kernels are left."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kernops.autograd import reduce as differentiable_reduce
from kernops.backends import cuda, launch
from kernops.backends.launch import Launch
from kernops.codegen import matrix_schedule as schedules
from kernops.codegen.matrix import matrix_form
from kernops.codegen.matrix_schedule import MatrixSchedule
from kernops.codegen.schedule import Device
from kernops.formula.graph import CAT_I, CAT_J, CAT_P, Node
from kernops.formula.ops import add, apply, mul, neg, sub, total
from kernops.formula.plan import Plan
from tests.gpu.problems import Problem, agree, dense, error, gaussian, gradient, inputs, problem, run, softmax, sqdist

EXACT, NEAR, PLAIN = range(3)


@pytest.fixture(autouse=True)
def forced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Matrix units for problems of any size."""

    def always(plan: Plan, m: int, n: int, batch: int, itemsize: int, device: Device) -> MatrixSchedule | None:
        form = matrix_form(plan) if itemsize == 4 else None
        return None if form is None else schedules.build(plan, form, m, n, batch, device)

    monkeypatch.setattr(cuda, "matrix_schedule", always)
    cuda._launches.clear()
    yield
    cuda._launches.clear()


def modes(p: Problem, values: list[Any], m: int, n: int, batch: tuple[int, ...] = ()) -> list[int]:
    """What the matrix kernels decided for each batch element."""
    found: list[int] = []
    submit = Launch.submit

    def watched(self: Launch, words: Any, results: Any, survey: int = 0) -> None:
        submit(self, words, results, survey)
        if self.survey:
            kept.append((survey, self.survey, self.survey_step))

    kept: list[tuple[int, int, int]] = []
    allocated: list[torch.Tensor] = []
    empty = launch.empty

    def keeping(*args: Any) -> torch.Tensor:
        allocated.append(empty(*args))
        return allocated[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Launch, "submit", watched)
        patch.setattr(launch, "empty", keeping)
        run(p, values, m, n)
    assert kept, "the matrix kernels were not asked"
    survey = next(t for t in allocated if t.data_ptr() == kept[0][0])
    step = kept[0][2]
    found += [int(survey[k : k + step].view(torch.int32)[5]) for k in range(0, kept[0][1], step)]
    return found


def squares(x: Node, y: Node) -> Node:
    return apply("SqDist", x, y)


def laplacian(d: int, e: int = 1) -> Problem:
    return problem(f"laplacian D={d} E={e}", "Sum", ((CAT_I, d), (CAT_J, d), (CAT_J, e)),
                   lambda x, y, b: mul(apply("Exp", neg(apply("Sqrt", apply("SqDist", x, y)))), b),
                   lambda x, y, b: torch.exp(-sqdist(x, y).sqrt()) * b)  # fmt: skip


def with_gamma(d: int, e: int) -> Problem:
    return problem(f"gamma D={d} E={e}", "Sum", ((CAT_I, d), (CAT_J, d), (CAT_J, e), (CAT_P, 1), (CAT_I, 1)),
                   lambda x, y, b, g, r: mul(mul(r, apply("Exp", mul(mul(-1 / d, mul(g, g)), squares(x, y)))), b),
                   lambda x, y, b, g, r: r * torch.exp(-g * g / d * sqdist(x, y)) * b)  # fmt: skip


def of_dot(d: int, build: Any, pairs: Any) -> Problem:
    return problem(f"dot D={d}", "Sum", ((CAT_I, d), (CAT_J, d), (CAT_J, 1)),
                   lambda x, y, b: mul(build(mul(1 / d, total(mul(x, y)))), b),
                   lambda x, y, b: pairs((x * y).sum(-1, keepdim=True) / d) * b)  # fmt: skip


def shifted(d: int) -> Problem:
    def root(x: Node, y: Node, b: Node) -> Node:
        return apply("Exp", add(b, mul(-1 / d, apply("SqDist", x, y))))

    return problem(f"shifted D={d}", "Sum", ((CAT_I, d), (CAT_J, d), (CAT_J, 1)), root,
                   lambda x, y, b: torch.exp(b - sqdist(x, y) / d))  # fmt: skip


def soft_minimum(d: int) -> Problem:
    """As in Sinkhorn's iterations: the sign of the sum is that of a difference."""
    return problem(f"soft minimum D={d}", "LogSumExp", ((CAT_I, d), (CAT_J, d), (CAT_J, 1)),
                   lambda x, y, b: mul(2.0, sub(b, mul(1 / d, squares(x, y)))),
                   lambda x, y, b: 2 * (b - sqdist(x, y) / d))  # fmt: skip


def logsumexp(d: int) -> Problem:
    return problem(f"logsumexp D={d}", "LogSumExp", ((CAT_I, d), (CAT_J, d)),
                   lambda x, y: mul(-1 / d, apply("SqDist", x, y)), lambda x, y: -sqdist(x, y) / d)  # fmt: skip


def scaled_softmax(d: int, e: int) -> Problem:
    return problem(f"softmax D={d} E={e}", "SumSoftMaxWeight", ((CAT_I, d), (CAT_J, d), (CAT_J, e)),
                   lambda x, y, w: (mul(-1 / d, squares(x, y)), w), lambda x, y, w: (-sqdist(x, y) / d, w))  # fmt: skip


PROBLEMS = [
    *(gaussian(d, e) for d in (2, 3, 5, 8, 11, 12, 16, 31, 64, 128, 129, 200, 513) for e in (1, 3)),
    *(gaussian(d, e) for d in (3, 11, 16, 64, 128, 300) for e in (4, 16, 33, 70, 300)),
    *(gradient(d) for d in (3, 8, 16, 64, 200)), *(laplacian(d, e) for d in (16, 64, 200) for e in (1, 16)),
    *(with_gamma(d, e) for d in (3, 40) for e in (1, 5)), *(shifted(d) for d in (3, 30)), logsumexp(40), logsumexp(300),
    *(soft_minimum(d) for d in (20, 64)),
    scaled_softmax(16, 1), scaled_softmax(64, 3), of_dot(100, lambda s: apply("Exp", s), torch.exp),
    of_dot(20, lambda s: mul(add(s, 1.0), add(s, 1.0)), lambda s: (s + 1) ** 2),
]  # fmt: skip


@pytest.mark.parametrize("p", PROBLEMS, ids=str)
def test_every_kernel(p: Problem) -> None:
    for m, n in ((1, 129), (130, 1000), (300, 2500)):
        values = inputs(p, m, n, torch.float32)
        agree(p, run(p, values, m, n), values)
        if m > 1:
            assert modes(p, values, m, n) != [PLAIN]


def test_large_exponents() -> None:
    """Of 130 in the mean: float32 holds them to 8e-6 only, and results to a few parts in a million."""
    p = softmax(64, 3)
    values = inputs(p, 500, 3000, torch.float32)
    for got, want in zip(run(p, values, 500, 3000), dense(p, values)):
        assert error(got, want) < 5e-6


@pytest.mark.parametrize("p", [gaussian(3), gaussian(64), gaussian(40, 16), laplacian(64), gaussian(200)], ids=str)
@pytest.mark.parametrize("offset", [100.0, 1e4])
def test_data_far_from_the_origin(p: Problem, offset: float) -> None:
    values = inputs(p, 500, 3000, torch.float32)
    values[0] += offset
    values[1] += offset
    assert modes(p, values, 500, 3000) != [PLAIN]
    agree(p, run(p, values, 500, 3000), values)


@pytest.mark.parametrize("p", [gaussian(3), gaussian(20), laplacian(20), laplacian(64, 16), gaussian(150)], ids=str)
@pytest.mark.parametrize("size", [1e-6, 1e-2, 30.0, 1e6, 1e15])
def test_scales(p: Problem, size: float) -> None:
    """From all distances being nothing to all kernel values being nothing."""
    values = inputs(p, 300, 2000, torch.float32)
    values[0] *= size
    values[1] *= size
    values[1][:300] = values[0]  # the nearest points are equal, and count alone where the scale is large
    got, want = run(p, values, 300, 2000)[0], dense(p, values)[0]
    assert error(got, want) < 3e-6


@pytest.mark.parametrize("p", [laplacian(16), laplacian(64), laplacian(64, 5), gaussian(64), gaussian(300)], ids=str)
def test_near_pairs(p: Problem) -> None:
    """Pairs that are nearer than the split numbers resolve, a few of each row: they are computed anew."""
    values = inputs(p, 2000, 2000, torch.float32)
    values[1] = values[0] + 1e-4 * values[1]
    assert modes(p, values, 2000, 2000) != [PLAIN]
    values[2] *= 1e-3
    values[2][:500] *= 1e6  # rows of which a near pair is the largest term
    agree(p, run(p, values, 2000, 2000), values)


@pytest.mark.parametrize("p", [laplacian(32), of_dot(32, lambda s: mul(s, s), lambda s: s * s)], ids=str)
def test_points_that_dwarf_the_others_are_left_to_the_plain_kernels(p: Problem) -> None:
    values = inputs(p, 500, 3000, torch.float32)
    values[0][3] *= 1e6
    assert modes(p, values, 500, 3000) == [PLAIN]
    got, want = run(p, values, 500, 3000)[0], dense(p, values)[0]
    keep = torch.arange(500, device="cuda") != 3
    assert error(got[keep], want[keep]) < 2e-6


def test_exponents_that_grow_are_left_to_the_plain_kernels() -> None:
    p = with_gamma(20, 1)
    grows = problem("grows", "Sum", p.cats, lambda x, y, b, g, r: mul(b, apply("Exp", mul(mul(g, g), squares(x, y)))),
                    lambda x, y, b, g, r: b * torch.exp(g * g * sqdist(x, y)))  # fmt: skip
    values = inputs(grows, 300, 2000, torch.float32)
    values[3] *= 0.1
    assert modes(grows, values, 300, 2000) == [PLAIN]
    agree(grows, run(grows, values, 300, 2000), values)


def test_clusters_are_left_to_the_plain_kernels() -> None:
    p = laplacian(32)
    values = inputs(p, 2000, 3000, torch.float32)
    for k in (0, 1):
        values[k] *= 1e-3
        values[k][::2] += 10
    assert modes(p, values, 2000, 3000) == [PLAIN]
    agree(p, run(p, values, 2000, 3000), values)


@pytest.mark.parametrize("d", [3, 40])
@pytest.mark.parametrize("e", [1, 16])
def test_rows_of_tiny_values_keep_their_accuracy(d: int, e: int) -> None:
    p = gaussian(d, e)
    values = inputs(p, 256, 3000, torch.float32)
    values[0][:, 0] += (60.0 * d) ** 0.5  # kernel values of exp(-60), about 1e-26
    got, want = run(p, values, 256, 3000)[0].double(), dense(p, values)[0]
    scale = dense(p, [*values[:2], values[2].abs()])[0]
    assert want.abs().median() < 1e-12
    assert ((got - want).abs() / scale).max() < 2e-5  # exponents of 90 in float32: 90 * 2^-23 at best


@pytest.mark.parametrize("p", [gaussian(3, 9), gaussian(40, 5), gaussian(64, 16), laplacian(16, 5)], ids=str)
def test_rows_whose_values_grow(p: Problem) -> None:
    """Rows of tiny values until the last columns bring some that are millions of times as large."""
    d = p.cats[0][1]
    far, spread = (2.2, 0.2 if d == 3 else 1.0) if p.name.startswith("gaussian") else (18.0, 20.0)
    x, y, b = inputs(p, 500, 3000, torch.float32)
    if far == 18.0:
        x, y = x / d**0.5, y / d**0.5  # whose formula does not divide by D
        far /= d**0.5
    x, y = far + spread * x, spread * y - far
    y[1600:] += 2 * far
    assert modes(p, [x, y, b], 500, 3000) != [PLAIN]
    got, want, early = run(p, [x, y, b], 500, 3000)[0], dense(p, [x, y, b])[0], dense(p, [x, y[:1600], b[:1600]])[0]
    assert (early.norm(dim=1) / want.norm(dim=1)).median() < 1e-6
    # float32's exponents of some tens, of points far from the mean, are what limits both
    assert ((got.double() - want).norm(dim=1) / want.norm(dim=1)).max() < 1e-4
    assert error(got, want) < 1e-5 and error(run(p, [x, y.flip(0), b.flip(0)], 500, 3000)[0], want) < 1e-5


@pytest.mark.parametrize("p", [gaussian(3, 9), gaussian(64, 9)], ids=str)
def test_right_hand_sides_of_very_different_sizes(p: Problem) -> None:
    x, y, b = inputs(p, 300, 2000, torch.float32)
    b *= torch.logspace(-30, 30, 9, device="cuda")
    b[128:256, 0] *= 1e-6
    b[:, 4] = 0
    got, want = run(p, [x, y, b], 300, 2000)[0], dense(p, [x, y, b])[0]
    assert (got[:, 4] == 0).all()
    keep = torch.arange(9, device="cuda") != 4
    assert ((got.double() - want).norm(dim=0) / want.norm(dim=0))[keep].max() < 2e-6


@pytest.mark.parametrize("d", [2, 3, 16])
def test_values_and_gradients_of_many_pairs(d: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two passes on matrix units, of which one has two results, against float64 torch for some rows and columns."""
    monkeypatch.undo()
    n, g = 20_000, torch.Generator("cuda").manual_seed(0)
    x, y, b, up = (torch.randn(n, dim, generator=g, device="cuda") for dim in (d, d, 1, 1))
    some = [t.requires_grad_() for t in (x, y, b)]
    (value,) = differentiable_reduce(gaussian(d).plan, some, n, n, "cuda")
    value.backward(up)
    x64, y64, b64, up64 = (t.detach().double() for t in (x, y, b, up))
    w = torch.exp(-sqdist(x64[:300, None], y64).squeeze(-1) / d) * b64[:, 0]
    assert error(value[:300].detach(), w.sum(1, keepdim=True)) < 2e-6
    assert x.grad is not None and y.grad is not None and b.grad is not None
    assert error(x.grad[:300], -2 / d * up64[:300] * (x64[:300] * w.sum(1, keepdim=True) - w @ y64)) < 2e-6
    w = torch.exp(-sqdist(y64[:300, None], x64).squeeze(-1) / d) * up64[:, 0]
    assert error(b.grad[:300], w.sum(1, keepdim=True)) < 2e-6
    assert error(y.grad[:300], -2 / d * b64[:300] * (y64[:300] * w.sum(1, keepdim=True) - w @ x64)) < 2e-6


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", [0, 1, 2])
@pytest.mark.parametrize("p", [gaussian(3), gaussian(64), gaussian(64, 16), logsumexp(40)], ids=str)
def test_what_is_not_finite_is_left_to_the_plain_kernels(p: Problem, where: int, bad: float,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    if where >= len(p.cats):
        return
    values = inputs(p, 300, 1500, torch.float32)
    values[where][7, 0] = bad
    assert modes(p, values, 300, 1500) == [PLAIN]
    got = run(p, values, 300, 1500)[0]
    cuda._launches.clear()
    monkeypatch.setattr(cuda, "matrix_schedule", lambda *_: None)
    want = run(p, values, 300, 1500)[0]
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf())
    assert torch.allclose(got, want, equal_nan=True)


@pytest.mark.parametrize("p", [gaussian(3), gaussian(40), gaussian(40, 20), softmax(20, 2)], ids=str)
def test_batches_and_strides(p: Problem) -> None:
    """Batch elements decide for themselves: one of them has a NaN, one is far from the others."""
    batches = ((4, 1), (3,), (4, 3))[: len(p.cats)]
    values = inputs(p, 260, 1300, torch.float32, batches)
    values[0] = values[0].transpose(-1, -2).contiguous().transpose(-1, -2)
    values[0][1] += 1000
    values[1] = values[1].repeat(1, 1, 2)[..., ::2][..., : p.cats[1][1]] if p.cats[1][1] == 1 else values[1]
    agree(p, run(p, values, 260, 1300), values)
    values[0][2, 0, 5, 1] = float("nan")
    got = run(p, values, 260, 1300)[0]
    assert got[2, :, 5].isnan().all() and got[[0, 1, 3]].isfinite().all()
    assert got[2].isnan().sum() == got[2, :, 5].numel()


@pytest.mark.parametrize("p", [gaussian(3), gaussian(64), gaussian(64, 16), laplacian(200)], ids=str)
def test_the_same_bits_and_a_graph(p: Problem) -> None:
    values = inputs(p, 1500, 5000, torch.float32)
    first = run(p, values, 1500, 5000)[0].clone()
    assert all(torch.equal(first, run(p, values, 1500, 5000)[0]) for _ in range(5))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(p, values, 1500, 5000)[0]
    captured.zero_()
    graph.replay()
    assert torch.equal(captured, first)


def test_large_problems_choose_it_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for p in (gaussian(64), gaussian(16, 16)):
        values = inputs(p, 20_000, 20_000, torch.float32)
        assert modes(p, values, 20_000, 20_000) == [EXACT]
        got = run(p, values, 20_000, 20_000)[0]
        some = [values[0][:200], *values[1:]]
        assert error(got[:200], dense(p, some)[0]) < 2e-6
