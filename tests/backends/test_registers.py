"""Registers and spills of the kernels that ship, as ptxas reports them, without a GPU.

``REGISTERS`` is a table of upper bounds, as NVRTC 13 gives them: more registers of a thread are fewer blocks of a
multiprocessor. A change that raises one has to say so here. Nothing spills.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernops import formula as _fill_the_table  # noqa: F401
from kernops.autograd.derivatives import gradient_passes
from kernops.codegen.facts import facts
from kernops.codegen.instantiate import main_kernel, source
from kernops.codegen.schedule import Device, schedule
from kernops.formula.graph import CAT_I, CAT_J, Node, var
from kernops.formula.ops import apply, mul, neg, sub
from kernops.formula.plan import Plan, make_plan

pytest.importorskip("cupy")
from kernops.backends import nvrtc  # noqa: E402
from kernops.backends.explained import Problem, explain_plan  # noqa: E402
from kernops.backends.explained.cuda import place, usage  # noqa: E402

if nvrtc.missing() is not None:
    pytest.skip(str(nvrtc.missing()), allow_module_level=True)

#: Between versions of the compiler.
SLACK = 8
ARCHS = ("sm_80", "sm_90a", "sm_100")
POINTS = 100_000


def _distance(d: int) -> Node:
    return apply("SqDist", var(CAT_I, 0, d), var(CAT_J, 1, d))


def gaussian(d: int, e: int = 1) -> Plan:
    return make_plan("Sum", mul(apply("Exp", neg(_distance(d))), var(CAT_J, 2, e)))


def laplacian(d: int) -> Plan:
    return make_plan("Sum", mul(apply("Exp", neg(apply("Sqrt", _distance(d)))), var(CAT_J, 2, 1)))


def gradient(d: int) -> Plan:
    difference = sub(var(CAT_I, 0, d), var(CAT_J, 1, d))
    return make_plan("Sum", mul(mul(apply("Exp", neg(_distance(d))), var(CAT_J, 2, 1)), difference))


def value_and_gradient(d: int) -> Plan:
    """What the first pass of a training step computes."""
    f = gaussian(d).formula
    return make_plan("Sum", apply("Concat", f, mul(f, sub(var(CAT_I, 0, d), var(CAT_J, 1, d)))), first=1)


def gradients_of_columns(d: int) -> Plan:
    """What the second does, for points and weights of the columns, which are its rows."""
    (both,) = gradient_passes(gaussian(d), (1, 2), (True,), d + 1)
    return both.apart


def softmax(d: int) -> Plan:
    return make_plan("SumSoftMaxWeight", neg(_distance(d)), var(CAT_J, 2, 1))


def nearest(d: int, k: int) -> Plan:
    return make_plan("KMin", _distance(d), k=k)


#: name -> (plan, bytes of a number, most registers of the reducing kernel on each of ARCHS, of any other kernel)
REGISTERS: dict[str, tuple[Callable[[], Plan], int, tuple[int, int, int], int]] = {
    "gaussian D=3": (lambda: gaussian(3), 4, (72, 72, 72), 26),
    "gaussian D=3 E=16": (lambda: gaussian(3, 16), 4, (156, 158, 158), 60),
    "gaussian D=16": (lambda: gaussian(16), 4, (80, 122, 124), 26),
    "gaussian D=64": (lambda: gaussian(64), 4, (128, 83, 83), 26),
    "gaussian D=3 float64": (lambda: gaussian(3), 8, (80, 120, 120), 32),
    "gradient D=3": (lambda: gradient(3), 4, (72, 80, 72), 32),
    "value and gradient D=3": (lambda: value_and_gradient(3), 4, (96, 96, 80), 32),
    "gradients by y and b D=3": (lambda: gradients_of_columns(3), 4, (87, 91, 72), 32),
    "logsumexp D=3": (lambda: make_plan("LogSumExp", neg(_distance(3))), 4, (79, 77, 77), 32),
    "softmax D=3": (lambda: softmax(3), 4, (64, 64, 64), 32),
    "laplacian D=3": (lambda: laplacian(3), 4, (64, 64, 64), 26),
    "min D=3": (lambda: make_plan("Min", _distance(3)), 4, (61, 63, 56), 26),
    "argmin D=3": (lambda: make_plan("MinArgMin", _distance(3)), 4, (61, 56, 64), 28),
    "nearest 10 D=3": (lambda: nearest(3, 10), 4, (114, 108, 108), 32),
    "nearest 50 D=3": (lambda: nearest(3, 50), 4, (84, 88, 96), 32),
}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", REGISTERS)
def test_kernels_stay_within_their_registers_and_spill_nothing(name: str, arch: str) -> None:
    build, itemsize, most, most_others = REGISTERS[name]
    plan = build()
    device: Device = place(arch)[0]
    s = schedule(facts(plan), POINTS, POINTS, 1, itemsize, device)
    found = usage(source(plan, s, itemsize, 0), arch)
    assert not [kernel for kernel, used in found.items() if used.spills], found
    reducing = found.pop(f"kn_{main_kernel(s)}").registers
    assert reducing <= most[ARCHS.index(arch)] + SLACK
    assert max(used.registers for used in found.values()) <= most_others + SLACK


#: The same of the templates for many pairs of a kind, by the beginning of their main kernels' names: name -> (template,
#: plan, registers of the main kernel, of any other).
OTHER_REGISTERS: dict[str, tuple[str, Callable[[], Plan], tuple[int, int, int], int]] = {
    "nearest 10 D=64": ("nearest_list", lambda: nearest(64, 10), (223, 110, 240), 226),
    "search 10 D=3": ("search", lambda: nearest(3, 10), (55, 55, 66), 114),
    "gaussian D=3": ("matrix", lambda: gaussian(3), (96, 96, 128), 76),
    "gaussian D=3 E=16": ("matrix", lambda: gaussian(3, 16), (126, 117, 115), 76),
    "value and gradient D=3": ("matrix", lambda: value_and_gradient(3), (94, 95, 90), 76),
    "gaussian D=16": ("matrix", lambda: gaussian(16), (168, 128, 200), 76),
    "gaussian D=64": ("matrix", lambda: gaussian(64), (174, 128, 226), 94),
    "gaussian D=64 E=16": ("matrix", lambda: gaussian(64, 16), (186, 192, 254), 101),
    "gaussian D=1000": ("matrix", lambda: gaussian(1000), (216, 168, 250), 86),
    "gradient D=64": ("matrix", lambda: gradient(64), (205, 194, 238), 103),
    "logsumexp D=64": ("matrix", lambda: make_plan("LogSumExp", neg(_distance(64))), (180, 218, 242), 92),
    "softmax D=64": ("matrix", lambda: softmax(64), (186, 190, 250), 94),
}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", OTHER_REGISTERS)
def test_kernels_of_other_templates(name: str, arch: str) -> None:
    main, build, most, most_others = OTHER_REGISTERS[name]
    points = 10 * POINTS if main == "search" else POINTS
    report = explain_plan(Problem(build(), points, points, 1, torch.float32, arch))
    assert not [kernel for kernel, used in report.kernels.items() if used.spills], report.kernels
    mains = {kernel for kernel in report.kernels if kernel.startswith(f"kn_{main}")}
    assert max(report.kernels[kernel].registers for kernel in mains) <= most[ARCHS.index(arch)] + SLACK
    assert max(report.kernels[kernel].registers for kernel in report.kernels.keys() - mains) <= most_others + SLACK
