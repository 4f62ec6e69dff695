"""``explain``: what it says of each back end, of every way to write a reduction, and where it cannot."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kernops
from kernops import Genred, LazyTensor, Vi, Vj, explain
from kernops.backends import explained
from kernops.backends.explained import TEMPLATES, Told
from kernops.backends.explained.cuda import Usage, usages

X, Y, B = torch.rand(3000, 3), torch.rand(4000, 3), torch.rand(4000, 2)
K = (-Vi(X).sqdist(Vj(Y)) / 2).exp()
GAUSSIAN = Genred("Exp(-SqDist(X,Y)) * B", ["X = Vi(3)", "Y = Vj(3)", "B = Vj(2)"], axis=1)


def test_a_product_on_the_data_s_device():
    report = explain(K, B)
    assert report.backend == kernops.backends.choose("auto", X.device).__name__.rpartition(".")[2]
    text = str(report)
    assert repr(report) == text
    assert "3,000 rows, 4,000 columns" in text and "float32, on cpu" in text
    assert "once a row" in text and "once a column" in text and "for every pair" in text
    assert "Exp2(" in text, "hoisted formulas are the ones that run"


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_90a", "sm_100"])
def test_a_gpu_that_need_not_be_there(arch):
    report = explain(K, B, device=arch, compile=False)
    assert report.backend == "cuda" and report.template.startswith("tile")
    assert report.kernels == {}
    schedule = report.schedule
    for name in ("threads", "rows", "cols", "tile", "splits", "blocks", "shared"):
        assert schedule[name] >= 1
    assert f"{schedule['shared']:,} bytes of shared memory" in str(report)
    assert report.bound is not None and report.floor_ms == 1000 * report.floors[report.bound]
    assert f"{report.bound} " in str(report) and "which bounds it" in str(report)
    assert len(report.reasons) >= 2


def test_registers_and_spills_of_the_compiled_kernels():
    pytest.importorskip("cupy")
    from kernops.backends import nvrtc

    if nvrtc.missing() is not None:
        pytest.skip(str(nvrtc.missing()))
    report = explain(K, B, device="sm_90")
    assert {"kn_reduce", "kn_merge"} <= set(report.kernels)
    used = report.kernels["kn_reduce"]
    assert 16 < used.registers <= 255 and not used.spills
    assert f"{used.registers} registers, no spills" in str(report)


def test_without_a_compiler_registers_are_not_known(monkeypatch):
    from kernops.backends import nvrtc

    monkeypatch.setattr(nvrtc, "missing", lambda: "CuPy is not installed")
    assert "not known: CuPy is not installed" in str(explain(K, B, device="sm_80"))


def test_the_compiler_s_log_is_read():
    log = """ptxas info : Compiling entry function 'a' for 'sm_90a'
        8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
        Used 40 registers
        Compiling entry function 'b' for 'sm_90a'
        0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
        Used 16 registers"""
    found = usages(log)
    assert found == {"a": Usage(40, 8, 4, 12), "b": Usage(16, 0, 0, 0)}
    assert str(found["a"]) == "40 registers, spills 4 bytes out, 12 in" and not found["b"].spills
    with pytest.raises(ValueError, match="reports no kernel"):
        usages("nothing")


REDUCTIONS = [("sum", {}), ("logsumexp", {}), ("argKmin", {"K": 7}), ("ArgKMin", {"K": 7}), ("min", {}), ("argmin", {}),
              ("sumsoftmaxweight", {"weight": Vj(B)})]  # fmt: skip


@pytest.mark.parametrize(("name", "more"), REDUCTIONS)
@pytest.mark.parametrize("backend", ["cpu", "tiled"])
def test_every_reduction_by_its_name(name, more, backend):
    report = explain(K, reduction=name, backend=backend, **more)
    assert report.backend == backend and report.schedule and report.template
    assert (report.floor_ms is None) == (backend == "tiled")


def test_reductions_over_rows_and_with_batches():
    assert "4,000 rows, 3,000 columns" in str(explain(K, axis=0))
    x = torch.rand(5, 30, 1, 3)
    batched = ((LazyTensor(x) - LazyTensor(torch.rand(5, 1, 40, 3))) ** 2).sum(-1)
    assert "30 rows, 40 columns, 5 batch elements" in str(explain(batched, axis=2))
    with pytest.raises(ValueError, match="axis must be 1"):
        explain(batched, axis=0)


def test_the_pruned_search():
    d = Vi(torch.rand(20_000, 3)).sqdist(Vj(torch.rand(20_000, 3)))
    report = explain(d, reduction="argKmin", K=5, backend="cpu")
    assert report.template.startswith("pruned") and report.schedule == {"neighbours": 5, "features": 3}
    assert explain(d, reduction="min", backend="cpu").template.startswith("Direct")
    few = Vi(torch.rand(20, 3)).sqdist(Vj(torch.rand(30, 3)))
    assert not explain(few, reduction="argKmin", K=5, backend="cpu").template.startswith("pruned")


@pytest.mark.parametrize(("d", "e", "bound"), [(3, 1, "exponential unit"), (64, 1, "matrix unit"),
                                               (64, 16, "matrix unit"), (3, 16, "exponential unit")])  # fmt: skip
def test_sums_on_matrix_units(d, e, bound):
    names = [f"X = Vi({d})", f"Y = Vj({d})", f"B = Vj({e})"]
    gaussian = Genred("Exp(-SqDist(X,Y)) * B", names, axis=1)
    report = gaussian.explain(shape=(100_000, 100_000), device="sm_90", compile=False)
    assert report.template.startswith("matrix") and report.bound == bound
    assert report.schedule["groups"] is (d == 64) and ("warpgroups multiply" in str(report)) is (d == 64)
    assert ("the right-hand sides are a second product" in str(report)) is (e == 16)
    for other in ({"shape": (100, 100_000)}, {"dtype": "float64"}, {"device": "sm_75"}):
        plain = gaussian.explain(**{"shape": (100_000, 100_000), "device": "sm_90", "compile": False, **other})
        assert plain.template.startswith("tile"), other


def test_the_pruned_search_on_a_gpu():
    search = Genred("SqDist(X,Y)", ["X = Vi(3)", "Y = Vj(3)"], "ArgKMin", axis=1, opt_arg=10)
    report = search.explain(shape=(1_000_000, 1_000_000), device="sm_90", compile=False)
    assert report.template.startswith("pruned") and report.schedule["k"] == 10
    assert "tries first" in str(report) and report.floor_ms is None
    assert not search.explain(shape=(1000, 1000), device="sm_90", compile=False).template.startswith("pruned")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_the_search_on_matrix_units(arch):
    search = Genred("SqDist(X,Y)", ["X = Vi(64)", "Y = Vj(64)"], "ArgKMin", axis=1, opt_arg=10)
    report = search.explain(shape=(100_000, 100_000), device=arch, compile=False)
    assert report.template.startswith("nearest") and report.bound == "matrix unit"
    assert report.schedule["k"] == 10 and "half precision" in str(report)
    for other in ({"shape": (100, 100_000)}, {"dtype": "float64"}):
        plain = search.explain(**{"shape": (100_000, 100_000), "device": arch, "compile": False, **other})
        assert plain.template.startswith(("tile", "ranked")), other


def test_long_sums_are_told():
    x = torch.rand(100, 64)
    assert "long sums over components (64)" in str(explain((-Vi(x).sqdist(Vj(x))).exp(), backend="cpu"))


def test_formula_strings_with_arrays_and_with_sizes():
    with_arrays = explain(GAUSSIAN, X, Y, B, device="sm_90", compile=False)
    with_sizes = GAUSSIAN.explain(shape=(3000, 4000), device="sm_90", compile=False)
    assert with_arrays.schedule == with_sizes.schedule
    assert str(with_arrays) == str(with_sizes)
    with pytest.raises(ValueError, match=r"shape: the data are symbolic; give their arrays, or shape=\(M, N\)"):
        explain(GAUSSIAN)
    with pytest.raises(ValueError, match="3 argument"):
        explain(GAUSSIAN, X)


def test_reductions_that_wait_and_numpy():
    waiting = K.sum(axis=1, call=False)
    assert str(explain(waiting)) == str(explain(K))
    x = np.random.rand(50, 3)
    report = Vi(x).sqdist(Vj(x)).explain(reduction="min")
    assert "float64" in str(report)


def test_dtypes():
    halves = explain(K, dtype="float16", device="sm_90", compile=False)
    assert "float16, computed in float32" in str(halves)
    single, double = (explain(K, dtype=dtype, device="sm_90", compile=False) for dtype in (None, torch.float64))
    assert {**halves.floors, "memory": 0} == {**single.floors, "memory": 0}
    assert halves.floor_ms is not None and double.floor_ms is not None
    assert double.floor_ms > 3 * halves.floor_ms


def test_what_cannot_be_explained():
    with pytest.raises(TypeError, match="expected a LazyTensor, a Genred or a reduction; got Tensor"):
        explain(X)
    with pytest.raises(ValueError, match="made of others"):
        explain(K, reduction="mean")
    with pytest.raises(ValueError, match="takes one array v"):
        explain(K, B, reduction="min")
    with pytest.raises(ValueError, match="reduction_op must be one of"):
        explain(K, reduction="median")
    with pytest.raises(ValueError, match="does not run on sm_90"):
        explain(K, device="sm_90", backend="cpu")
    with pytest.raises(ValueError, match="an architecture such as 'sm_90'"):
        explain(K, device="sm_x")


def test_the_choice_of_the_back_end_and_the_autotuner_are_told():
    assert "tiled, as asked for" in str(explain(K, backend="tiled"))
    assert "chosen for the device" in str(explain(K)) and "autotune" not in str(explain(K))
    assert "cuda, for an architecture" in str(explain(K, device="sm_80", compile=False))
    with kernops.autotune():
        assert "autotune is on" in str(explain(K)) and explain(K).reasons[-1].startswith("autotune is on")


def test_nothing_is_computed_or_compiled(empty_cache, capsys):
    for backend in ("cpu", "tiled"):
        explain(K, B, backend=backend)
    assert capsys.readouterr().out == "" and not empty_cache.exists()


def test_the_first_template_that_knows_the_problem_tells(monkeypatch):
    """How another template is added: a row before the general one, whose function may decline."""
    from kernops.backends.explained import tiled

    def special(p):
        return Told("special", (("a", "b"),), ("because",)) if p.n > 10 else None

    monkeypatch.setattr(tiled, "special", special, raising=False)
    monkeypatch.setitem(TEMPLATES, "tiled", ["tiled:special", "tiled:tiles"])
    assert explain(K, backend="tiled").template == "special"
    small = Vi(X[:5]).sqdist(Vj(X[:5]))
    assert explain(small, backend="tiled").template != "special"
    monkeypatch.setitem(TEMPLATES, "tiled", [])
    with pytest.raises(AssertionError, match="no template of tiled"):
        explain(K, backend="tiled")


def test_every_row_of_the_table_is_a_function():
    for rows in explained.TEMPLATES.values():
        for row in rows:
            module, _, name = row.partition(":")
            assert callable(getattr(__import__(f"kernops.backends.explained.{module}", fromlist=["x"]), name))


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"shape": (-5, 3)}, ValueError, "shape: expected at least one row"),
        ({"shape": (3,)}, ValueError, r"shape: expected \(M, N\)"),
        ({"shape": (2.5, 3)}, TypeError, "shape must be a whole number"),
        ({"dtype": "int32"}, ValueError, "dtype: expected float16"),
        ({"dtype": float}, ValueError, "dtype: expected float16"),
        ({"device": 90}, ValueError, "device: expected a torch device or an architecture"),
        ({"device": "meta"}, ValueError, "device: expected a torch device or an architecture"),
    ],
)
def test_what_makes_no_sense_is_refused(given, error, text):
    x, y = torch.rand(5, 3), torch.rand(4, 3)
    with pytest.raises(error, match=text):
        kernops.explain((-Vi(x).sqdist(Vj(y))).exp(), **given)


def test_the_clock_of_a_processor_is_measured() -> None:
    """What floors are computed with is what a processor does, not what it is sold as."""
    from kernops.backends.explained.cpu import _hertz

    assert 3e8 < _hertz() < 1e10
