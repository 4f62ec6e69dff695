"""What comes in: kinds of arrays, memory layouts, and every kind of wrong argument."""

from __future__ import annotations

import copy
import pickle
import sys
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from kernops import LazyTensor, Pm, Vi, Vj

M, N, D = 4, 6, 3
RNG = np.random.default_rng(0)
X, Y, V = RNG.random((M, D)), RNG.random((N, D)), RNG.random((N, 2))


def gauss(x, y):
    return (-((Vi(x) - Vj(y)) ** 2).sum(-1)).exp()


def dense(x, y):
    return np.exp(-((x[:, None] - y[None]) ** 2).sum(-1))


# --- shapes say what an array is ---------------------------------------------------------------------------------
T = torch.zeros
SHAPES = [
    (T(M, 1, D), None, (M, 1, D), 0),
    (T(1, N, D), None, (1, N, D), 1),
    (T(1, 1, D), None, (1, 1, D), 2),
    (T(M, 1, 1), None, (M, 1), 0),
    (T(0, 1, D), None, (0, 1, D), 0),
    (T(1, 0, D), None, (1, 0, D), 1),
    (T(5, M, 1, D), None, (5, M, 1, D), 0),
    (T(2, 1, 1, N, D), None, (2, 1, 1, N, D), 1),
    (T(5, 1, 1, D), None, (5, 1, 1, D), 2),
    (T(M, D), 0, (M, 1, D), 0),
    (T(N, D), 1, (1, N, D), 1),
    (T(1, D), 2, (1, 1, D), 2),
    (T(D), None, (1, 1, D), 2),
    (T(D), 2, (1, 1, D), 2),
    (T(()), None, (1, 1), 2),
    (0.3, None, (1, 1), 2),
    (7, None, (1, 1), None),
    ([0.1, 0.2], None, (1, 1, 2), 2),
    ((0, 3, 1), None, (1, 1, 3), 1),
]


@pytest.mark.parametrize(("x", "axis", "shape", "cat"), SHAPES, ids=lambda v: str(getattr(v, "shape", v)))
def test_shapes(x, axis, shape, cat):
    lazy = LazyTensor(x, axis)
    assert lazy.shape == shape and lazy.axis == cat
    assert lazy.dim() == len(lazy._shape) and lazy.ndim == lazy._shape[-1]
    assert lazy.nbatchdims == len(lazy._shape) - 3 and (lazy.batchdims or ()) == lazy._shape[:-3]


def test_attributes():
    k = gauss(torch.tensor(X), torch.tensor(Y))
    assert (k.shape, k._shape, k.dtype, k.ndim, k.dim()) == ((M, N), (M, N, 1), "float64", 1, 3)
    assert (k.ni, k.nj, k.nbatchdims, k.batchdims, k.ranges, k.is_complex) == (M, N, 0, None, None, False)
    assert k.T.shape == (N, M) and k.device == torch.device("cpu") and len(k.variables) == 2
    assert LazyTensor(1.5).dtype is None and LazyTensor(1.5).device is None
    assert Vi(0, 3).symbolic_variables == ((0, 3, 0),)


def test_repr_shows_formula_and_shapes():
    text = repr(gauss(torch.tensor(X), torch.tensor(Y)) * 0.37 + Pm(1, 1))
    for part in (
        "(4, 6)",
        "Exp(Neg(Sum(Square(Sub(Vi(0,3),Vj(1,3))))))",
        "(6, 3)",
        "0.37",
        "argument 1",
        "float64, cpu",
    ):
        assert part in text
    assert repr(Vi(X)) == str(Vi(X))


# --- kinds of arrays ---------------------------------------------------------------------------------------------
def test_numpy_in_numpy_out():
    k = gauss(X, Y)
    out = k @ V
    assert type(out) is np.ndarray and out.dtype == np.float64
    np.testing.assert_allclose(out, dense(X, Y) @ V, rtol=1e-13)
    assert k.argKmin(2, axis=1).dtype == np.int64
    assert all(type(t) is np.ndarray for t in k.min_argmin(axis=0))
    np.testing.assert_allclose((X[0] * Vi(X)).sum(axis=0), (X[0] * X).sum(0, keepdims=True))  # NumPy leaves it to us
    assert (np.float64(2) * k).shape == k.shape


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_numpy_dtypes_are_kept(dtype):
    out = gauss(X.astype(dtype), Y.astype(dtype)) @ V.astype(dtype)
    assert out.dtype == dtype
    np.testing.assert_allclose(out.astype("float64"), dense(X, Y) @ V, rtol=5 * float(np.finfo(dtype).eps))


def test_bfloat16():
    x, y, v = (torch.tensor(t).bfloat16() for t in (X, Y, V))
    out = gauss(x, y) @ v
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), torch.tensor(dense(X, Y) @ V).float(), rtol=0.03, atol=0)


LAYOUTS: dict[str, Any] = {
    "fortran": np.asfortranarray,
    "every other row": lambda a: np.repeat(a, 2, axis=0)[::2],
    "reversed rows": lambda a: np.ascontiguousarray(a[::-1])[::-1],
    "reversed components": lambda a: np.ascontiguousarray(a[:, ::-1])[:, ::-1],
    "transposed": lambda a: np.ascontiguousarray(a.T).T,
    "byte order": lambda a: a.astype(a.dtype.newbyteorder("S")),
    "field of a structure": lambda a: _structured(a),
    "subclass": lambda a: a.view(type("Sub", (np.ndarray,), {})),
    "offset": lambda a: np.concatenate([np.zeros((3, D)), a])[3:],
    "read-only": lambda a: _locked(a.copy()),
    "read-only reversed": lambda a: _locked(np.ascontiguousarray(a[::-1]))[::-1],
}


def _structured(a):
    out = np.zeros(a.shape, dtype=[("pad", "i1"), ("value", "f8")])
    out["value"] = a
    return out["value"]


def _locked(a):
    a.flags.writeable = False
    return a


@pytest.mark.parametrize("name", LAYOUTS)
def test_memory_layouts_of_numpy(name):
    change = LAYOUTS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = gauss(change(X), change(Y)) @ (change(V) if "components" not in name and "offset" not in name else V)
    np.testing.assert_allclose(out, dense(X, Y) @ V, rtol=1e-13)


def test_no_copy_is_made():
    for a in (X, np.asfortranarray(X), X[::2], _locked(X.copy()), X[:, None].squeeze(1)):
        assert Vi(a).frame.tensors[0].data_ptr() == a.__array_interface__["data"][0]
    t = torch.tensor(X)
    assert Vi(t).frame.tensors[0] is t


def test_read_only_memory_maps(tmp_path):
    np.save(tmp_path / "x.npy", X)
    x = np.load(tmp_path / "x.npy", mmap_mode="r")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        k = (-((LazyTensor(x[:, None]) - Vj(Y)) ** 2).sum(-1)).exp()
        np.testing.assert_allclose(k @ V, dense(X, Y) @ V, rtol=1e-13)
        np.testing.assert_allclose(Vi(x[::-1]).sum(axis=0)[0], X.sum(0), rtol=1e-13)
    del x, k  # Windows removes no file that is mapped


def test_non_contiguous_tensors():
    x, y, v = torch.tensor(X), torch.tensor(Y), torch.tensor(V)
    want = torch.tensor(dense(X, Y) @ V)
    strided = [t.T.contiguous().T for t in (x, y, v)]
    torch.testing.assert_close(gauss(*strided[:2]) @ strided[2], want)
    one = x[:1].expand(5, D)
    torch.testing.assert_close(gauss(one, y) @ v, torch.tensor(dense(X[:1], Y) @ V).expand(5, 2))
    torch.testing.assert_close((gauss(torch.nn.Parameter(x), y) @ v).detach(), want)


def test_cupy_is_imported_by_its_users_alone(monkeypatch):
    assert "cupy" not in sys.modules or "cupy" in repr(sys.modules["cupy"])  # nothing above has imported it

    class FakeArray:  # what a CuPy array shows of itself, on the CPU
        dtype, itemsize, strides = np.dtype("float64"), 8, (8,)

        def __init__(self, tensor):
            self.tensor = tensor

        def __dlpack__(self, **kwargs):
            return self.tensor.__dlpack__()

        def __dlpack_device__(self):
            return self.tensor.__dlpack_device__()

    FakeArray.__module__ = "cupy._core.core"
    fake: Any = type(sys)("cupy")
    fake.from_dlpack = FakeArray
    monkeypatch.setitem(sys.modules, "cupy", fake)
    x, y, v = (torch.tensor(t) for t in (X, Y, V))
    k = gauss(FakeArray(x), FakeArray(y))
    assert k.frame.tensors[0].data_ptr() == x.data_ptr()
    out = k @ FakeArray(v)
    assert type(out) is FakeArray
    torch.testing.assert_close(out.tensor, torch.tensor(dense(X, Y) @ V))


def test_nan_propagates_and_is_never_a_neighbour():
    y = Y.copy()
    y[2, 1] = np.nan
    d = ((Vi(X) - Vj(y)) ** 2).sum(-1)
    assert np.isnan(d.sum(axis=1)).all() and np.isnan(d.min(axis=1)).all()
    assert (d.argKmin(N - 1, axis=1) != 2).all() and (d.argmin(axis=1) != 2).all()


# --- bad input ---------------------------------------------------------------------------------------------------
x, y, p = torch.zeros(M, D), torch.zeros(N, D), torch.zeros(D)
BAD: dict[str, Any] = {
    "int data": (lambda: Vi(torch.zeros(M, D, dtype=torch.int64)), TypeError, "x must be of dtype float16.* of int64"),
    "int NumPy data": (lambda: Vi(np.zeros((M, D), dtype=int)), TypeError, "got a NumPy array of int64"),
    "bool data": (lambda: Vj(torch.zeros(M, D, dtype=torch.bool)), TypeError, "got a torch tensor of bool"),
    "object data": (lambda: Vi(np.array([[None]])), TypeError, "got a NumPy array of object"),
    "text data": (lambda: Vi(np.array([["a"]])), TypeError, "NumPy array of <U1"),
    "longdouble": (lambda: Vi(np.zeros((2, 2), dtype=np.clongdouble)), TypeError, "must be of dtype float16"),
    "masked data": (lambda: Vi(np.ma.masked_array(X, X > 0.5)), TypeError, "masked array; fill its gaps"),
    "sparse data": (lambda: Vi(torch.eye(3).to_sparse()), TypeError, "must be dense.* sparse_coo"),
    "a string": (lambda: LazyTensor("x"), TypeError, "x must be a LazyTensor, a torch tensor, a NumPy array.* got str"),
    "None": (lambda: LazyTensor(None), TypeError, "got NoneType"),
    "a set": (lambda: LazyTensor({1.0}), TypeError, "got set"),
    "a bool": (lambda: Vi(x) * True, TypeError, "operand x must be .* got bool"),
    "list of text": (lambda: Vi(x) * ["a"], TypeError, "got str"),
    "empty list": (lambda: LazyTensor([]), ValueError, "at least one number"),
    "2D without axis": (lambda: LazyTensor(x), ValueError, r"axis must be 0 \(i\) or 1 \(j\).*\(4, 3\); got None"),
    "2D with axis 3": (lambda: LazyTensor(x, axis=3), ValueError, "got 3"),
    "3D with axis": (lambda: LazyTensor(x[:, None], axis=0), ValueError, r"axis is for 2D arrays.*\(4, 1, 3\)"),
    "3D full": (lambda: LazyTensor(torch.zeros(M, N, D)), ValueError, r"\(..., M, 1, D\).*got \(4, 6, 3\)"),
    "1D with axis": (lambda: Vi(p), ValueError, "axis must be None or 2"),
    "list with axis": (lambda: LazyTensor([1.0], axis=0), ValueError, "axis must be None or 2"),
    "no components": (lambda: Vi(torch.zeros(M, 0)), ValueError, r"at least one component; got shape \(4, 0\)"),
    "parameter with rows": (lambda: Pm(x), ValueError, r"a parameter has one vector for all rows.*got \(4, 3\)"),
    "bad triple": (lambda: LazyTensor((0, 3)), ValueError, r"\(ind, dim, cat\)"),
    "bad category": (lambda: LazyTensor((0, 3, 7)), ValueError, "cat 0"),
    "bad dimension": (lambda: Vi(0, 0), ValueError, "dim must be an integer >= 1; got 0"),
    "components": (lambda: Vi(x) - Vj(y)[:2], ValueError, "Sub: dimensions must be equal or 1; got 3, 2"),
    "rows": (lambda: Vi(x) - Vi(y), ValueError, "Sub: i-variables must have equally many rows; got M = 4 and M = 6"),
    "columns": (lambda: Vj(x) * Vj(y), ValueError, "Mul: j-variables .* N = 4 and N = 6"),
    "batches": (lambda: LazyTensor(torch.zeros(2, M, 1, D)) + LazyTensor(torch.zeros(3, 1, N, D)), ValueError,
                r"Add: batch dimensions must be equal or 1; got shapes \(2,\) and \(3,\)"),
    "dtypes": (lambda: Vi(x) - Vj(y.double()), ValueError, "Sub: .*one dtype; got float32 and float64"),
    "half and bfloat16": (lambda: Vi(x.half()) - Vj(y.bfloat16()), ValueError, "float16 and bfloat16"),
    "devices": (lambda: Vi(x) - Vj(y.to("meta")), ValueError, "Sub: all data must be on one device; got cpu and meta"),
    "kinds": (lambda: Vi(x.double()) - Vj(Y), TypeError, r"Sub: all data must be of one kind .*got torch and numpy"),
    "kinds in @": (lambda: gauss(x.double(), y.double()) @ V, TypeError, "one kind"),
    "dtypes in @": (lambda: gauss(x, y) @ torch.tensor(V), ValueError, "Mul: all data must have one dtype"),
    "2D operand": (lambda: Vi(x) * y, ValueError, "Mul: operand axis must be 0"),
    "object operand": (lambda: Vi(x) + object(), TypeError, "Add: operand x must be .* got object"),
    "compared with None": (lambda: Vi(x) == None, TypeError, "got NoneType"),  # noqa: E711
    "elem": (lambda: Vi(x).elem(3), ValueError, r"index must be in \[0, 3\).*got 3"),
    "elem of a float": (lambda: Vi(x).elem(float(D)), TypeError, "must be a whole number; got float"),
    "extract": (lambda: Vi(x).extract(2, 2), ValueError, r"components 2\.\.3 are outside a vector of dimension 3"),
    "slice step": (lambda: Vi(x)[::2], ValueError, "step 1"),
    "empty slice": (lambda: Vi(x)[2:2], ValueError, "at least one of 3 components"),
    "index of rows": (lambda: Vi(x)[0, :, 1], ValueError, "only the last axis"),
    "index by list": (lambda: Vi(x)[[0, 1]], TypeError, "whole number"),
    "one_hot of a vector": (lambda: Vi(x).one_hot(4), ValueError, "OneHot takes a scalar; got dimension 3"),
    "one_hot of no length": (lambda: Vi(x)[0].one_hot(0), ValueError, ">= 1; got 0"),
    "one_hot of a float": (lambda: Vi(x)[0].one_hot(2.0), TypeError, "whole number"),
    "concatenate nothing": (lambda: LazyTensor.concatenate(()), ValueError, "one or more"),
    "concatenate on axis 0": (lambda: LazyTensor.cat((Vi(x), Vi(x)), 0), ValueError, "axis must be -1"),
    "norm of rows": (lambda: Vi(x).norm(0), ValueError, "dim must be -1 or 2"),
    "weights": (lambda: Vi(x).weightedsqnorm(Vj(y)[:2]), ValueError, "dimension 1, 3 or 9; got 2"),
    "matvecmult": (lambda: Vi(x).matvecmult(Vj(y)[:2]), ValueError, "3 is not rows × 2"),
    "tensordot shapes": (lambda: Vi(x).keops_tensordot(Vj(y), [2], [3], [], []), ValueError, r"not of shape \(2,\)"),
    "tensordot order": (lambda: Vi(x).keops_tensordot(Vj(y), [3], [3], [], [], [0, 0]), ValueError, "permutation"),
    "kron": (lambda: Vi(x).keops_kron(Vj(y), [3, 1], [3]), ValueError, "equally many axes"),
    "grad by an expression": (lambda: Vi(x).grad(Vj(y) * 2, 1), ValueError, "needs a variable"),
    "divergence": (lambda: Vi(x).sum().divergence(Vi(x)), ValueError, "must have one dimension; got 1 and 3"),
    "laplacian": (lambda: Vi(x).laplacian(Vi(x)), ValueError, "that of a scalar; got a formula of dimension 3"),
    "truth": (lambda: bool(Vi(x) == Vi(x)), TypeError, "no truth value"),
    "iteration": (lambda: [*iter(Vi(x))], TypeError, "not iterable"),
    "too many arguments": (lambda: Vi(x).clamp(0), TypeError, r"clamp takes \(other1, other2\)"),
    "unknown parameter": (lambda: Vi(x).extract(0, size=2), TypeError, r"extract takes \(start, length\)"),
    "call": (lambda: Vi(x)(y), ValueError, "after a reduction only"),
    "no data": (lambda: LazyTensor(0.3).exp().sum(axis=1)(), ValueError, "at least one array"),
    "ranges": (lambda: Vi(x).sum(axis=0, ranges=(0,) * 6), NotImplementedError, "ranges.* not available yet"),
    "ranges attribute": (lambda: setattr(Vi(x), "ranges", ()), NotImplementedError, "not available yet"),
    "ranges and batches": (lambda: LazyTensor(torch.zeros(2, M, 1, D)).sum(1, ranges=(0,) * 6), NotImplementedError,
                           "with or without batch dimensions"),
    "unknown option": (lambda: Vi(x).sum(axis=0, blocks=3), TypeError, "unexpected keyword argument 'blocks'"),
    "scheme": (lambda: Vi(x).sum(axis=0, sum_scheme="fast"), ValueError, "sum_scheme must be one of 'auto'"),
    "accumulator": (lambda: Vi(x).sum(axis=0, dtype_acc="int8"), ValueError, "dtype_acc must be one of"),
    "back end": (lambda: Vi(x).sum(axis=0, backend="TPU"), ValueError, "backend must be one of 'auto', .*got 'TPU'"),
    "GPU for CPU data": (lambda: Vi(x).sum(axis=0, backend="GPU_1D"), ValueError, "on cuda; the data are on cpu"),
    "cuda for CPU data": (lambda: Vi(x).sum(axis=0, backend="cuda"), ValueError, "cuda"),
    "device": (lambda: Vi(x).sum(axis=0, device_id=3), ValueError, "device_id must be -1"),
    "two back ends": (lambda: _with("CPU", Vi(x)) - _with("auto", Vj(y)), ValueError, "two back ends"),
    "back end attribute": (lambda: _with("abacus", Vi(x)), ValueError, "got 'abacus'"),
    "weight": (lambda: Vi(x).sumsoftmaxweight(Vj(y), axis=1), ValueError, "softmax formula must be scalar"),
    "weight of another length": (lambda: gauss(x, y).logsumexp(1, weight=Vj(x)), ValueError, "LogSumExp: j-variables"),
    "unknown reduction": (lambda: Vi(x).reduction("Median", axis=0), ValueError, "must be one of .*'Median'"),
    "K for a sum": (lambda: Vi(x).reduction("Sum", opt_arg=3, axis=0), ValueError, "Sum takes no K; got 3"),
    "no K": (lambda: Vi(x).reduction("KMin", axis=0), ValueError, "K must be"),
}  # fmt: skip


def _with(backend, lazy):
    lazy.backend = backend
    return lazy


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    call, error, message = BAD[name]
    with pytest.raises(error, match=message):
        call()


# --- copies ------------------------------------------------------------------------------------------------------
def test_pickle_copy_and_hash():
    for a, b in ((X, Y), (torch.tensor(X), torch.tensor(Y))):
        k = gauss(a, b) * 0.3 + 2
        want = k.sum(axis=1)
        for again in (pickle.loads(pickle.dumps(k)), copy.deepcopy(k), copy.copy(k)):
            assert again.formula is k.formula and again.shape == k.shape and again.dtype == k.dtype
            got = again.sum(axis=1)
            assert type(got) is type(want) and (got == want).all()
        assert LazyTensor(k).formula is k.formula and LazyTensor(k).frame is k.frame
        assert copy.deepcopy(k).frame.tensors[0] is not k.frame.tensors[0]
        assert {k: 1}[k] == 1 and hash(k) == hash(k) and len({k, k + 0}) == 2
    constant = copy.deepcopy(LazyTensor(2)) * Vi(X)
    assert constant.frame.tensors[0] is not None and pickle.loads(pickle.dumps(Vi(0, 3))).symbolic_variables == (
        (0, 3, 0),
    )


def test_deepcopy_of_what_has_gradients():
    leaf = torch.tensor(X, requires_grad=True)
    for lazy in (Vi(leaf), LazyTensor(leaf[:, None]), Vi(leaf * 2)):
        again = copy.deepcopy(lazy)
        torch.testing.assert_close(again.sum(axis=0), lazy.sum(axis=0))
    assert copy.deepcopy(Vi(leaf)).frame.tensors[0].requires_grad
