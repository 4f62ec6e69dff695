"""The model of the least time: what a pair needs, what a machine delivers, and the figures that are known by hand."""

from __future__ import annotations

import pytest

from kernops.codegen import floors
from kernops.codegen.facts import facts
from kernops.codegen.floors import EXP, FMA, GPUS, MEMORY, VECTOR, gpu, gpu_work, host, host_work, special
from kernops.formula.graph import CAT_I, CAT_J, var
from kernops.formula.ops import apply, mul, neg
from kernops.formula.plan import Plan, make_plan


def gaussian(d: int, core: str = "Sum") -> Plan:
    distance = apply("SqDist", var(CAT_I, 0, d), var(CAT_J, 1, d))
    if core == "Sum":
        return make_plan("Sum", mul(apply("Exp", neg(distance)), var(CAT_J, 2, 1)))
    return make_plan(core, neg(distance), k=10 if core == "KMin" else 0)


def least(plan: Plan, pairs: float, arch=(9, 0), itemsize: int = 4) -> dict[str, float]:
    work = gpu_work(plan, facts(plan), 2, itemsize)
    return floors.floors(work, pairs, 1e6, gpu(arch), itemsize)


def test_an_exponential_a_pair_bounds_a_gaussian_in_three_dimensions():
    """100k x 100k points on an H200: 1e10 exponentials at 16 a cycle and multiprocessor take 2.4 ms."""
    found = least(gaussian(3), 1e10)
    assert next(iter(found)) == EXP
    assert found[EXP] == pytest.approx(2.4e-3, rel=0.01)
    assert found[FMA] <= found[EXP]


def test_many_dimensions_are_bound_by_multiply_adds():
    found = least(gaussian(64), 1e10)
    assert next(iter(found)) == FMA
    assert found[FMA] == pytest.approx((64 + 64 + 2) * 1e10 / (132 * 128 * 1.98e9), rel=0.01)


def test_double_precision_has_no_exponential_unit():
    found = least(gaussian(3), 1e10, itemsize=8)
    assert next(iter(found)) == FMA and EXP not in found
    assert found[FMA] > 4 * least(gaussian(3), 1e10)[FMA]


def test_the_floor_grows_with_pairs_and_memory_with_bytes():
    one, ten = least(gaussian(3), 1e9), least(gaussian(3), 1e10)
    assert ten[EXP] == pytest.approx(10 * one[EXP])
    assert ten[MEMORY] == one[MEMORY] == pytest.approx(1e6 / 4.1e12)


def test_special_functions_are_counted_by_components_and_core():
    assert special(gaussian(3)) == 1
    assert special(gaussian(3, "LogSumExp")) == 1  # the core's own
    assert special(gaussian(3, "KMin")) == 0
    x, y = var(CAT_I, 0, 5), var(CAT_J, 1, 5)
    assert special(make_plan("Sum", apply("Exp", mul(x, y)))) == 5


def test_a_processor_is_bound_by_its_vectors():
    work = host_work(gaussian(3), 4)
    assert set(work) == {VECTOR} and work[VECTOR] > 10
    slow, fast = (floors.floors(work, 1e8, 0, host(cores, 3e9, 64), 4)[VECTOR] for cores in (1, 2))
    assert slow == pytest.approx(2 * fast)
    assert floors.floors(work, 1e8, 0, host(1, 3e9, 64), 8)[VECTOR] == pytest.approx(2 * slow)


def test_products_take_fewer_instructions_than_differences():
    work = [host_work(gaussian(dim), 4, paired)[VECTOR] for dim, paired in ((784, True), (784, False), (32, True))]
    assert work[0] - work[1] == 784 / 2
    assert work[0] < 1.6 * 784 and work[2] > 2 * 32


def test_unknown_architectures_are_taken_for_older_ones():
    assert gpu((9, 9)) == GPUS[9, 0]
    assert gpu((1, 0)) == GPUS[7, 5]
    half = gpu((9, 0)).of(66, 1e9, "half")
    assert (half.processors, half.hertz, half.name) == (66, 1e9, "half")
