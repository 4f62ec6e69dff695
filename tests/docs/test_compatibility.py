"""The compatibility page tells the truth: statuses against the package, and the package's peer against the table."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.docs.site import ROOT, module

compat = module("_compat")
ROWS = list(compat.rows())


@pytest.mark.parametrize("row", [r for r in ROWS if r.names], ids=lambda r: r.feature)
def test_statuses_are_those_of_the_package(row):
    missing = row.missing
    expected = compat.NOT_YET if len(missing) == len(row.paths) else compat.PARTLY if missing else compat.YES
    assert row.status == expected, f"missing: {missing or 'nothing'}"


@pytest.mark.parametrize("row", [r for r in ROWS if not r.names], ids=lambda r: r.feature)
def test_what_no_name_shows_is_shown_by_a_test(row):
    if row.status == compat.NOT_YET:
        assert not row.test
    else:
        assert row.test and (ROOT / "tests" / row.test).exists(), row.test


def test_features_are_listed_once():
    features = [row.feature for row in ROWS]
    assert len(set(features)) == len(features)


def test_existence():
    assert compat.exists("LazyTensor.exp")
    assert compat.exists("backends.tiled.run")
    assert not compat.exists("LazyTensor.no_such_method")
    assert not compat.exists("no_such_module.name")
    assert not compat.exists("LazyTensor.bspline")  # exists, and says that it is not available


#: Attributes of PyKeOps' class that are its own machinery and no feature.
INTERNAL = {
    *("addop", "binary", "divop", "mulop", "subop", "ternary", "unary"),
    *("fixvariables", "formula", "formula2", "get_tools", "init", "is_complex", "join", "lt_constructor", "tools"),
    *("new_variable_index", "promote", "separate_kwargs", "reduction", "Genred", "variables", "symbolic_variables"),
    *("axis", "backend", "batchdims", "ni", "nj"),
    "ranges",  # block sparsity is a row of its own
}


def test_every_feature_of_pykeops_is_listed():
    pytest.importorskip("pykeops")
    listed = {path.rpartition(".")[2] for row in ROWS for path in row.paths}
    # In a process of its own: its import compiles and prints.
    code = "import pykeops.torch as k; print(); print(*[n for n in dir(k.LazyTensor) if n[0] != '_'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = {n.removesuffix("_reduction") for n in done.stdout.splitlines()[-1].split()}
    assert names - INTERNAL - listed == set()
