"""Genred: formula strings called with arrays."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from kernops import Genred
from kernops.lazy import generic_argkmin, generic_argmin, generic_logsumexp, generic_sum

M, N = 5, 7


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, Y, B, P = rand(M, 3, seed=1), rand(N, 3, seed=2), rand(N, 2, seed=3), rand(2, seed=4)
SQUARES = ((X[:, None] - Y[None]) ** 2).sum(-1)
GAUSS = "Exp(-SqDist(X,Y)) * B"
ALIASES = ["X = Vi(3)", "Y = Vj(3)", "B = Vj(2)"]


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


def test_sums_over_both_axes():
    close(Genred(GAUSS, ALIASES, axis=1)(X, Y, B), (-SQUARES).exp() @ B)
    over_i = Genred("Exp(-SqDist(X,Y)) * A", ["X=Vi(3)", "Y=Vj(3)", "A=Vi(1)"], reduction_op="Sum", axis=0)
    close(over_i(X, Y, X[:, :1]), (-SQUARES).exp().T @ X[:, :1])
    assert Genred("Exp(-SqDist(X,Y))", ALIASES[:2])(X, Y).shape == (N, 1)  # axis = 0 is the default, as in pykeops


WRITINGS = [
    ("Exp(-SqDist(X,Y)) * B", ["X = Vi(0,3)", "Y = Vj(1,3)", "B = Vj(2,2)"], "xyb"),
    ("Exp(-SqDist(X,Y)) * B", ["B = Vj(2,2)", "Y = Vj(1,3)", "X = Vi(0,3)"], "xyb"),
    ("Exp(-SqNorm2(X - Y)) * B", ("B=Vj(2)", "X=Vi(3)", "Y=Vj(3)"), "bxy"),
    ("Exp(-SqDist(Var(0,3,0),Var(1,3,1))) * Var(2,2,1)", [], "xyb"),
    ("Exp(-SqDist(Vi(0,3),Y)) * B", ["Vi(3)", "Y = Vj(3)", "B = Vj(2)"], "xyb"),
    ("Exp(-SqDist(X,Y)) * B", ["X = Vx(3)", "Y = Vy(3)", "B = Var(2,2,1)"], "xyb"),
    ("Exp(-Sum((X-Y)**2)) * B", ALIASES, "xyb"),
    ("Exp(-(X-Y|X-Y)) * B", ALIASES, "xyb"),
]


@pytest.mark.parametrize(("formula", "aliases", "order"), WRITINGS)
def test_ways_to_write_it(formula, aliases, order):
    data = {"x": X, "y": Y, "b": B}
    close(Genred(formula, aliases, axis=1)(*(data[c] for c in order)), (-SQUARES).exp() @ B)


REDUCTIONS: dict[str, Any] = {
    "Sum": ({}, lambda s: s.sum(1, keepdim=True)),
    "LogSumExp": ({}, lambda s: s.logsumexp(1, keepdim=True)),
    "Min": ({}, lambda s: s.amin(1, keepdim=True)),
    "Max": ({}, lambda s: s.amax(1, keepdim=True)),
    "ArgMin": ({}, lambda s: s.argmin(1, keepdim=True)),
    "ArgMax": ({}, lambda s: s.argmax(1, keepdim=True)),
    "Min_ArgMin": ({}, lambda s: tuple(s.min(1, keepdim=True))),
    "MaxArgMax": ({}, lambda s: tuple(s.max(1, keepdim=True))),
    "KMin": ({"opt_arg": 3}, lambda s: s.sort(1).values[:, :3]),
    "ArgKMin": ({"opt_arg": 3}, lambda s: s.argsort(1)[:, :3]),
    "KMin_ArgKMin": ({"opt_arg": 2}, lambda s: tuple(t[:, :2] for t in s.sort(1))),
    "ArgKMax": ({"opt_arg": 2}, lambda s: s.argsort(1, descending=True)[:, :2]),
    "SumSoftMaxWeight": ({"formula2": "B"}, lambda s: s.softmax(1) @ B),
    "SoftMax": ({"formula2": "B"}, lambda s: s.softmax(1) @ B),
    "LogSumExpWeight": ({"formula2": "B"}, lambda s: (s.exp() @ B).log()),
    "Mean": ({}, lambda s: s.mean(1, keepdim=True)),
    "Var": ({}, lambda s: s.var(1, correction=0, keepdim=True)),
    "CountNonzero": ({}, lambda s: (s != 0).sum(1, keepdim=True)),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name):
    options, dense = REDUCTIONS[name]
    got = Genred("SqDist(X,Y) + 0 * Sum(B)", ALIASES, reduction_op=name, axis=1, **options)(X, Y, B)
    want = dense(SQUARES)
    for g, w in zip(got, want) if isinstance(want, tuple) else ((got, want),):
        assert g.dtype == w.dtype
        close(g, w)


def test_weight_for_logsumexp():
    close(Genred("SqDist(X,Y)", ALIASES, "LogSumExp", 1, formula2="B")(X, Y, B), (SQUARES.exp() @ B).log())


def test_kinds_and_parameters():
    k = Genred("Square(P | Elem(X,0) * P) * Y", ["X = Vi(3)", "Y = Vj(3)", "P = Pm(2)"], axis=1)
    want = (X[:, :1] * (P * P).sum()) ** 2 * Y.sum(0)
    close(k(X, Y, P), want)
    close(k(X, Y, P[None]), want)
    close(k(X, Y, P.tolist()), want)
    out = k(*(t.numpy() for t in (X, Y, P)))
    assert type(out) is np.ndarray
    close(torch.from_numpy(out), want)
    assert k(*(t.float() for t in (X, Y, P))).dtype == torch.float32
    close(k(X, Y[::2], P), (X[:, :1] * (P * P).sum()) ** 2 * Y[::2].sum(0))
    assert Genred("Exp(X) * S", ["X = Vi(3)", "S = Pm(1)"], axis=0)(X, 2.0).shape == (1, 3)
    close(Genred("X * S", ["X = Vi(3)", "S = Pm(1)"], axis=1)(X, torch.tensor(2.0).double()), 2 * X)


def test_gradients_in_strings():
    k = Genred("Grad(Exp(-SqDist(X,Y)), X, Elem(B,0))", ALIASES, axis=1)
    x = X.clone().requires_grad_()
    (want,) = torch.autograd.grad((-((x[:, None] - Y) ** 2).sum(-1)).exp() @ B[:, 0], x, torch.ones(M).double())
    close(k(X, Y, B), want)


def test_out_and_options():
    k = Genred(
        GAUSS, ALIASES, axis=1, sum_scheme="block_sum", dtype_acc="float64", enable_chunks=False, dtype="float64"
    )
    want = (-SQUARES).exp() @ B
    out = torch.zeros(M, 2).double()
    assert k(X, Y, B, out=out, backend="CPU", device_id=-1, ranges=None) is out
    close(out, want)
    array = np.zeros((M, 2))
    assert k(*(t.numpy() for t in (X, Y, B)), out=array, backend="tiled") is array
    with pytest.raises(ValueError, match=r"out must have shape \(5, 2\); got \(7, 2\)"):
        k(X, Y, B, out=torch.zeros(N, 2).double())
    with pytest.raises(ValueError, match="out must have dtype float64"):
        k(X, Y, B, out=torch.zeros(M, 2))
    assert repr(k).startswith("Genred('Exp(-SqDist(X,Y)) * B'")
    close(pickle.loads(pickle.dumps(k))(X, Y, B), want)


def test_short_forms():
    aliases = ("X = Vi(3)", "Y = Vj(3)")
    close(generic_sum(GAUSS, "a = Vi(2)", *aliases, "B = Vj(2)")(X, Y, B), (-SQUARES).exp() @ B)
    close(generic_logsumexp("SqDist(X,Y)", "a = Vj(1)", *aliases)(X, Y), SQUARES.logsumexp(0)[:, None])
    assert torch.equal(generic_argmin("SqDist(X,Y)", "a = Vi(1)", *aliases)(X, Y), SQUARES.argmin(1, keepdim=True))
    assert torch.equal(generic_argkmin("SqDist(X,Y)", "a = Vi(3)", *aliases)(X, Y), SQUARES.argsort(1)[:, :3])
    with pytest.raises(ValueError, match="output must be"):
        generic_sum(GAUSS, "a = Pm(2)", *aliases, "B = Vj(2)")


def gauss(*args, **options):
    return Genred(GAUSS, ALIASES, axis=1)(*args, **options)


BAD_CALLS: dict[str, Any] = {
    "count": (lambda: gauss(X, Y), ValueError, r"takes 3 argument\(s\).*got 2"),
    "components": (lambda: gauss(X, Y[:, :2], B), ValueError, r"argument 1: the j-variable .* N, 3\); got \(7, 2\)"),
    "one axis": (lambda: gauss(X, Y[:, 0], B), ValueError, r"argument 1: .* got \(7,\)"),
    "rows": (lambda: gauss(X, Y, B[:5]), ValueError, "argument 2: j-variables .* N = 7 and N = 5"),
    "dtype": (lambda: gauss(X, Y.float(), B), ValueError, "argument 1: .*one dtype; got float64 and float32"),
    "integers": (lambda: gauss(X, Y.long(), B), TypeError, "argument 1 must be of dtype float16.* of int64"),
    "kinds": (lambda: gauss(X, Y, B.numpy()), TypeError, "argument 2: all data must be of one kind"),
    "device": (lambda: gauss(X, Y, B.to("meta")), ValueError, "argument 2: .*one device; got cpu and meta"),
    "number for rows": (lambda: gauss(X, Y, 1.0), ValueError, r"argument 2: 2 number\(s\) for a parameter"),
    "no array": (lambda: gauss(1.0, 2.0, 3.0), ValueError, "at least one array"),
    "None": (lambda: gauss(X, Y, None), TypeError, "argument 2 must be a torch tensor.* got NoneType"),
    "ranges": (lambda: gauss(X, Y, B, ranges=(0,) * 6), NotImplementedError, "ranges.* not available yet"),
    "back end": (lambda: gauss(X, Y, B, backend="GPU"), ValueError, "computes on cuda; the data are on cpu"),
    "back end name": (lambda: gauss(X, Y, B, backend="gpu"), ValueError, "backend must be one of"),
    "parameter with rows": (lambda: Genred("X*S", ["X=Vi(3)", "S=Pm(1)"], axis=1)(X, X[:, :1]), ValueError,
                            r"argument 1: a parameter is one vector for all rows, \(1,\); got \(5, 1\)"),
    "K > N": (lambda: Genred("SqDist(X,Y)", ALIASES[:2], "KMin", 1, opt_arg=8)(X, Y), ValueError, "N = 7 .*got K = 8"),
    "batches and ranges": (lambda: gauss(X[None], Y[None], B[None], ranges=()), NotImplementedError, "not avail"),
    "batches": (lambda: gauss(X.expand(2, M, 3), Y.expand(3, N, 3), B), ValueError,
                r"argument 1: batch dimensions must be equal or 1; got shapes \(2,\) and \(3,\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls(name):
    call, error, message = BAD_CALLS[name]
    with pytest.raises(error, match=message):
        call()


BAD_MAKES: dict[str, Any] = {
    "unknown function": ({"formula": "Expp(-SqDist(X,Y))"}, ValueError, "position 0: unknown .* did you mean 'Exp'"),
    "unknown name": ({"formula": "X - Z"}, ValueError, "position 4: unknown variable 'Z'; known: B, X, Y"),
    "dimensions": ({"formula": "X - B"}, ValueError, "position 2: Sub: dimensions must be equal or 1; got 3, 2"),
    "no string": ({"formula": 3}, TypeError, "formula must be a string; got int"),
    "alias": ({"aliases": ["X = Vk(3)"]}, ValueError, "alias 'X = Vk.3.' is not of the form"),
    "alias without dimension": ({"aliases": ["X = Vi()"]}, ValueError, "alias 'X = Vi..'.*takes 2 whole"),
    "alias of dimension 0": ({"aliases": ["X = Vi(0)"]}, ValueError, "dim must be an integer >= 1; got 0"),
    "alias twice": ({"aliases": ["X = Vi(3)", "X = Vj(3)"]}, ValueError, "the name 'X' is given twice"),
    "place twice": ({"aliases": ["X = Vi(0,3)", "Y = Vj(0,3)"]}, ValueError, "argument number 0 is both"),
    "place in formula": ({"formula": "X - Vj(0,3)"}, ValueError, "formula: argument number 0 is both"),
    "place missing": ({"formula": "X", "aliases": ["X = Vi(1,3)"]}, ValueError, "argument number 0 of 2 is not"),
    "aliases as a string": ({"aliases": "X = Vi(3)"}, TypeError, "aliases must be a list of strings"),
    "alias no string": ({"aliases": [3]}, TypeError, "an alias must be a string"),
    "axis": ({"axis": 2}, ValueError, "axis must be 0 .*; got 2"),
    "reduction": ({"reduction_op": "Summ"}, ValueError, "reduction_op must be one of .*; got 'Summ'"),
    "no K": ({"reduction_op": "KMin"}, ValueError, "K must be a whole number >= 1"),
    "K = 0": ({"reduction_op": "KMin", "opt_arg": 0}, ValueError, "K must be a whole number >= 1; got 0"),
    "K as text": ({"reduction_op": "KMin", "opt_arg": "3"}, TypeError, "K"),
    "K for a sum": ({"opt_arg": 3}, ValueError, "Sum takes no K; got 3"),
    "no weight": ({"reduction_op": "SumSoftMaxWeight", "formula": "SqDist(X,Y)"}, ValueError, "needs a weight"),
    "weight": ({"formula2": "B"}, ValueError, "Sum takes no weight"),
    "option": ({"fast": True}, TypeError, "unexpected keyword argument 'fast'"),
    "two accumulators": ({"dtype_acc": "float64", "use_double_acc": True}, ValueError, "cannot both be set"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_MAKES)
def test_bad_definitions(name):
    changes, error, message = BAD_MAKES[name]
    with pytest.raises(error, match=message):
        Genred(**{"formula": "X - Y + 0 * Sum(B)", "aliases": ALIASES} | changes)
