"""Compiling the CUDA templates, without a GPU: every header, core, layout and op, for the architectures that matter."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

from kernops import formula as _fill_the_table  # noqa: F401
from kernops.codegen import matrix_schedule, matrix_source, nearest
from kernops.codegen.facts import facts
from kernops.codegen.instantiate import source
from kernops.codegen.matrix import matrix_form
from kernops.codegen.schedule import STATES, Device, schedule
from kernops.codegen.searching import searching
from kernops.codegen.searching import source as search_source
from kernops.formula.graph import CAT_I, CAT_J, Node, var
from kernops.formula.ops import OPS, add, apply, mul, neg, sub
from kernops.formula.plan import Plan, make_plan
from tests.helpers.cases import examples

pytest.importorskip("cupy")
from kernops.backends import nvrtc  # noqa: E402

if nvrtc.missing() is not None:
    pytest.skip(str(nvrtc.missing()), allow_module_level=True)

ARCHS = {"sm_80": (8, 0), "sm_90a": (9, 0), "sm_100": (10, 0)}
MULTIPROCESSORS, SHARED = 132, {(8, 0): 166912, (9, 0): 232448, (10, 0): 232448}


def compiled(
    plan: Plan, arch: str = "sm_90a", itemsize: int = 4, size: int = 100_000, batch_dims: int = 0
) -> dict[str, tuple]:
    """Compile a plan as it would run at a size; (registers, stack, spill stores, spill loads) of each kernel."""
    s = schedule(facts(plan), size, size, 1, itemsize, Device(MULTIPROCESSORS, SHARED[ARCHS[arch]], ARCHS[arch]))
    cubin, log = nvrtc.report(source(plan, s, itemsize, batch_dims), arch, ("--ptxas-options=-v",))
    assert cubin.startswith(b"\x7fELF")
    assert "warning" not in log, log
    return resources(log)


_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")


def resources(log: str) -> dict[str, tuple]:
    found = {}
    for part in log.split("Compiling entry function '")[1:]:
        name = part[: part.index("'")]
        spills = _SPILLS.search(part)
        registers = _REGISTERS.search(part)
        assert spills and registers, part
        stack, stores, loads = map(int, spills.groups())
        found[name] = (int(registers.group(1)), stack, stores, loads)
    assert found, f"no report in {log!r}"
    return found


# --- plans ----------------------------------------------------------------------------------------------------------
def sqdist(d: int) -> Node:
    return apply("SqDist", var(CAT_I, 0, d), var(CAT_J, 1, d))


def of_core(core: str, d: int = 3, e: int = 1, k: int = 10) -> Plan:
    b = var(CAT_J, 2, e)
    if core == "SumSoftMaxWeight":
        return make_plan(core, neg(sqdist(d)), b)
    if core == "Sum":
        return make_plan(core, mul(apply("Exp", neg(sqdist(d))), b))
    return make_plan(core, sqdist(d), k=k if core == "KMin" else 0)


def gradient(d: int) -> Plan:
    x, y = var(CAT_I, 0, d), var(CAT_J, 1, d)
    return make_plan("Sum", mul(mul(apply("Exp", neg(sqdist(d))), var(CAT_J, 2, 1)), sub(x, y)))


def of_ops(names: list[str]) -> Plan:
    """The sum of the components of an example of each op, applied to what depends on the pair."""
    root: Node | None = None
    for name in names:
        for dims, params in examples(OPS[name])[-1:]:  # of scalar ops the one in one dimension, quick to compile
            args = [mul(var(CAT_I, 30 * a + d, d), var(CAT_J, 500 + 30 * a + d, d)) for a, d in enumerate(dims)]
            value = apply(name, *args, params=params)
            value = value if value.dim == 1 else apply("Sum", value)
            root = value if root is None else add(root, value)
    assert root is not None
    from kernops.formula.graph import relabel, variables

    number = {v.params[1]: k for k, v in enumerate(variables(root))}
    return make_plan("Sum", relabel(root, tuple(number.get(k, 0) for k in range(1000))))  # type: ignore[call-overload]


# --- tests ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("core", sorted(STATES))
def test_every_core(core: str, arch: str) -> None:
    """Float on all architectures; what runs per pair of points in three dimensions spills nothing."""
    for name, (registers, stack, stores, loads) in compiled(of_core(core), arch).items():
        assert (stack, stores, loads) == (0, 0, 0), f"{name} of {core} on {arch}"
        assert registers <= 168


@pytest.mark.parametrize("core", sorted(STATES))
def test_every_core_in_double_precision(core: str) -> None:
    assert "kn_reduce" in compiled(of_core(core), itemsize=8)


@pytest.mark.parametrize("plan", [gradient(3), of_core("Sum", 3, 16), of_core("Sum", 16), of_core("KMin", k=17),
                                  of_core("Sum", 64), of_core("Sum", 4096), gradient(100), of_core("Sum", 3, 512)],
                         ids=lambda p: str(p.formula)[:60])  # fmt: skip
def test_larger_plans_do_not_spill(plan: Plan) -> None:
    """Scratch for rows and columns, chunks of components, heaps."""
    for name, (_, stack, stores, loads) in compiled(plan, size=20_000).items():
        assert (stack, stores, loads) == (0, 0, 0), name


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("k", "size"), [(10, 10_000), (50, 100_000), (200, 100_000)])
def test_lists_of_warps_do_not_spill(k: int, size: int, arch: str) -> None:
    for name, (registers, stack, stores, loads) in compiled(of_core("KMin", k=k), arch, size=size).items():
        assert (stack, stores, loads) == (0, 0, 0), name
        assert registers <= 168


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("d", "k", "size"), [(3, 10, 10**6), (2, 50, 10**5), (8, 10, 10**5), (16, 300, 2000)])
def test_searches_do_not_spill(d: int, k: int, size: int, arch: str) -> None:
    """Boxes of two to four levels; brute force behind it is compiled with it."""
    plan = of_core("KMin", d, k=k)
    brute = schedule(facts(plan), size, size, 1, 4, Device(MULTIPROCESSORS, SHARED[ARCHS[arch]], ARCHS[arch]))
    text = search_source(plan, brute, searching(k, d, size, size, 1, True), 4, 1)
    _, log = nvrtc.report(text, arch, ("--ptxas-options=-v",))
    assert "warning" not in log, log
    for name, (registers, *spilled) in resources(log).items():
        assert spilled == [0, 0, 0], name
        assert registers <= 128 or "reduce" in name


def test_searches_in_double_precision() -> None:
    plan = of_core("MinArgMin")
    brute = schedule(facts(plan), 9999, 9999, 1, 8, Device(MULTIPROCESSORS, SHARED[9, 0], (9, 0)))
    assert nvrtc.compile(search_source(plan, brute, searching(1, 3, 9999, 9999, 6, True), 8, 2), "sm_90a")


@pytest.mark.parametrize("arch, dim, k", [("sm_80", 64, 10), ("sm_90a", 64, 10), ("sm_100", 64, 10), ("sm_80", 100, 64),
                                          ("sm_90a", 1000, 33), ("sm_100", 12, 1), ("sm_89", 1000, 10)])  # fmt: skip
def test_nearest_points_in_many_dimensions(arch: str, dim: int, k: int) -> None:
    version = {**ARCHS, "sm_89": (8, 9)}[arch]
    s = nearest.schedule(dim, k, 10**5, 10**5, 1, Device(MULTIPROCESSORS, SHARED.get(version, 101376), version))
    assert s is not None
    _, log = nvrtc.report(nearest.source(s, 0), arch, ("--ptxas-options=-v",))
    assert "warning" not in log, log
    found = resources(log)
    assert found.keys() == {f"kn_{name}" for name in nearest.KERNELS}
    for name, (registers, *spills) in found.items():
        assert spills == [0, 0, 0], name
        blocks = nearest.AT_A_TIME.get(name.removeprefix("kn_"), 1)
        assert registers * blocks * nearest.threads(s, name.removeprefix("kn_")) <= 65536


def test_batch_dimensions_and_small_problems() -> None:
    assert compiled(of_core("Sum"), size=10, batch_dims=6)
    assert compiled(of_core("KMin"), size=2000, batch_dims=2)


SCALAR = [name for name, op in OPS.items() if op.scalar]
VECTOR = [name for name, op in OPS.items() if not op.scalar]


@pytest.mark.parametrize("arch", ARCHS)
def test_every_scalar_op(arch: str) -> None:
    assert compiled(of_ops(SCALAR), arch, 4)


def test_every_scalar_op_in_double_precision() -> None:
    assert compiled(of_ops(SCALAR), "sm_90a", 8)


def test_every_vector_op() -> None:
    assert compiled(of_ops(VECTOR))


def matrix_plans() -> list[Plan]:
    b = var(CAT_J, 2, 1)
    laplacian = [mul(apply("Exp", neg(apply("Sqrt", sqdist(d)))), b) for d in (64, 128)]
    return [
        *(of_core("Sum", d, e) for d, e in ((3, 1), (11, 3), (16, 1), (64, 1), (128, 1), (1000, 1))),
        *(of_core("Sum", d, e) for d, e in ((3, 16), (3, 64), (64, 16), (200, 32))), gradient(64),
        *(make_plan("Sum", root) for root in laplacian), of_core("LogSumExp", 64), of_core("SumSoftMaxWeight", 64, 3),
    ]  # fmt: skip


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("plan", matrix_plans(), ids=lambda p: f"{p.core} {p.formula}"[:80])
def test_matrix_units(plan: Plan, arch: str) -> None:
    """The kernels as they would run at 100,000 points: nothing spills, and there are registers for all blocks."""
    form = matrix_form(plan)
    assert form is not None
    s = matrix_schedule.build(
        plan, form, 100_000, 100_000, 1, Device(MULTIPROCESSORS, SHARED[ARCHS[arch]], ARCHS[arch])
    )
    assert s is not None
    cubin, log = nvrtc.report(matrix_source.source(plan, form, s, 0), arch, ("--ptxas-options=-v",))
    assert cubin.startswith(b"\x7fELF")
    assert "C7510" not in log and "C7514" not in log, log  # products of warpgroups one after the other
    for name, (registers, stack, stores, loads) in resources(log).items():
        assert (stack, stores, loads) == (0, 0, 0), f"{name} on {arch}"
        if name.startswith("kn_matrix"):
            assert registers * matrix_source.threads(name.removeprefix("kn_"), s) * s.per_multiprocessor <= 65536


def test_headers_are_all_used_and_all_known() -> None:
    from kernops.codegen.instantiate import HEADERS
    from kernops.codegen.matrix_source import MATRIX_HEADERS
    from kernops.geometric.kernels import source as geometric

    names = {p.name for p in nvrtc.HEADERS.glob("*.cuh")}
    assert names == {*HEADERS, *MATRIX_HEADERS, *geometric.HEADERS, *nearest.HEADERS}
    for path in nvrtc.HEADERS.glob("*.cuh"):
        included = set(re.findall(r"#\s*include\s*(\S+)", path.read_text()))
        allowed = {f'"{name}"' for name in names} if path.name in geometric.HEADERS else set()
        assert included <= allowed, f"{path.name} includes {included}; NVRTC finds no headers but those it is given"


def test_the_cubin_is_whole() -> None:
    """The file must hold all that its ELF header promises (CuPy drops the last byte)."""
    data = nvrtc.compile('extern "C" __global__ void k() {}', "sm_90a")
    phoff, shoff = struct.unpack_from("<QQ", data, 0x20)
    phentsize, phnum, shentsize, shnum = struct.unpack_from("<4H", data, 0x36)
    assert len(data) >= max(phoff + phentsize * phnum, shoff + shentsize * shnum)


def test_a_failure_shows_the_log_and_the_source() -> None:
    with pytest.raises(RuntimeError, match="no_such_name") as failure:
        nvrtc.compile('extern "C" __global__ void k() { no_such_name(); }', "sm_90a")
    path = Path(re.search(r"/\S+\.cu", str(failure.value)).group(0))  # type: ignore[union-attr]
    assert "no_such_name();" in path.read_text()
    path.unlink()


def test_architectures_newer_than_the_compiler_get_ptx() -> None:
    text = nvrtc.compile('extern "C" __global__ void k() {}', "sm_999")
    assert b".target sm_" in text and text.endswith(b"\0")


def test_architectures_older_than_the_compiler_are_refused() -> None:
    with pytest.raises(RuntimeError, match="does not support sm_30"):
        nvrtc.compile("", "sm_30")


def test_the_cache_is_used(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'extern "C" __global__ void k() {}'
    first = nvrtc.cubin(text, "sm_90a")
    monkeypatch.setattr(nvrtc, "compile", lambda *a, **k: pytest.fail("compiled again"))
    assert nvrtc.cubin(text, "sm_90a") == first
    with pytest.raises(pytest.fail.Exception):
        nvrtc.cubin(text, "sm_80")


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "find_spec", lambda name: None)
    assert "CuPy is not installed" in str(nvrtc.missing())
    monkeypatch.setattr(nvrtc, "HEADERS", Path("/nonexistent"))
    assert "/nonexistent" in str(nvrtc.missing())
