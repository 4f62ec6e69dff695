"""Every op of the table: value, first, second and forward derivative, on every back end, against float64 torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernops.formula.ops import OPS
from tests.helpers.backends import COMPILED, ON_CPU, need
from tests.helpers.cases import cases, check_cases, few_cases
from tests.helpers.ctext import evaluate_text
from tests.helpers.special import check_special, grid, groups
from tests.helpers.third_party import THIRD_PARTY

SCALAR = [name for name, op in OPS.items() if op.scalar]


@pytest.mark.parametrize("backend", ["tiled", "program"])
@pytest.mark.parametrize("name", OPS)
def test_op(name: str, backend: str) -> None:
    check_cases(cases(OPS[name]), backend, vector=True)


@pytest.mark.parametrize("name", OPS)
def test_op_in_single_precision(name: str) -> None:
    check_cases(cases(OPS[name]), "tiled", dtype=torch.float32)


# Compiled back ends take a second or so for a formula, so that many ops share one. A failure names the ops.
_FEW = [case for op in OPS.values() for case in few_cases(op)]
_ALL = [case for op in OPS.values() for case in cases(op)]
GROUP = 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("start", range(0, len(_FEW), GROUP))
@pytest.mark.parametrize("backend", COMPILED)
def test_ops_compiled(backend: str, start: int, dtype: torch.dtype) -> None:
    need(backend)
    check_cases(_FEW[start : start + GROUP], backend, dtype=dtype)


@pytest.mark.parametrize("backend", COMPILED)
def test_vectors_compiled(backend: str) -> None:
    """Ops that move components, as results that are computed in a loop over components."""
    need(backend)
    moving = ["Extract", "ExtractT", "Concat", "OneHot", "Broadcast", "Einsum", "MatVecMult", "TensorProd", "Kron"]
    check_cases([case for name in moving for case in few_cases(OPS[name])], backend, vector=True)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("start", range(0, len(_ALL), GROUP))
@pytest.mark.parametrize("backend", COMPILED)
def test_ops_compiled_with_every_source(backend: str, start: int, dtype: torch.dtype) -> None:
    need(backend)
    check_cases(_ALL[start : start + GROUP], backend, dtype=dtype, vector=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("group", groups(), ids=lambda g: f"{g[0]}-{g[1][0]}")
@pytest.mark.parametrize("backend", ON_CPU)
def test_ops_at_corners(backend: str, group: tuple[int, list[str]], dtype: torch.dtype) -> None:
    need(backend)
    check_special(*group, backend=backend, dtype=dtype)


# --- the rows themselves, each part of a row against another --------------------------------------------------------
def _draws(name: str, count: int, shape_of=lambda k: ()) -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    return [rng.uniform(*OPS[name].domain[k], size=(count, *shape_of(k))) for k in range(OPS[name].arity)]


def _ref(name: str, args: list[np.ndarray], params: tuple) -> np.ndarray:
    tensors = torch.broadcast_tensors(*(torch.as_tensor(a, dtype=torch.float64) for a in args))
    return OPS[name].ref(torch, *tensors, *params).numpy()


def _params(name: str) -> list[tuple]:
    return [params for _, params in OPS[name].examples] or [()]


@pytest.mark.parametrize("name", SCALAR)
def test_text_and_reference_agree(name: str) -> None:
    """The C text, read with numpy's and scipy's functions, against torch, on the domain and on corners."""
    for args in (_draws(name, 200), [np.array(c) for c in zip(*grid(name))]):
        for params in _params(name):
            with np.errstate(all="ignore"):
                text, ref = evaluate_text(name, args, params), _ref(name, args, params)
            np.testing.assert_allclose(text, ref, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", THIRD_PARTY)
def test_reference_against_third_party(name: str) -> None:
    """The torch reference against numpy, scipy or mpmath, vector by vector."""
    own = OPS[name].examples or [((3,) * OPS[name].arity, ())]
    for dims, params in own:
        args = _draws(name, 20, lambda k, dims=dims: (dims[k],))
        got = OPS[name].ref(torch, *map(torch.from_numpy, args), *params)
        want = np.stack([np.ravel(THIRD_PARTY[name](*row, *params)) for row in zip(*args)])
        np.testing.assert_allclose(got.numpy(), want, rtol=1e-13, atol=1e-14)
