"""The graph: interning, immutability, texts, digests, pickles, threads, deep and shared formulas."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from kernops.codegen.emit import emit
from kernops.formula import graph
from kernops.formula.autodiff import jvp, vjp
from kernops.formula.graph import (
    CAT_I,
    CAT_J,
    CAT_P,
    CAT_SCALAR,
    PAIR,
    I,
    J,
    Node,
    P,
    check,
    const,
    make,
    relabel,
    rewrite,
    swap_axes,
    topological,
    var,
)  # fmt: skip
from kernops.formula.ops import add, apply, lowered, mul, neg, power
from kernops.formula.plan import hoist, make_plan
from kernops.formula.simplify import simplify

x, y, b = var(CAT_I, 0, 3), var(CAT_J, 1, 3), var(CAT_J, 2, 1)


def gaussian() -> Node:
    return mul(apply("Exp", neg(apply("SqDist", x, y))), b)


# --- identity -------------------------------------------------------------------------------------------------------
def test_equal_formulas_are_one_object() -> None:
    assert gaussian() is gaussian()
    assert gaussian() == gaussian() and hash(gaussian()) == hash(gaussian())
    assert apply("Add", x, y) is not apply("Add", y, x)
    assert copy.copy(x) is x and copy.deepcopy(gaussian()) is gaussian()


def test_constants_differ_in_sign_of_zero_and_nan_is_one() -> None:
    assert const(0.0) is not const(-0.0)
    assert const(1) is const(1.0) is const(True)
    assert const(float("nan")) is const(float("nan"))
    assert const(float("inf")) is not const(-float("inf"))
    assert const(0.1 + 0.2) is not const(0.3)


def test_parameters_are_plain_whatever_came_first() -> None:
    """numpy integers and booleans compare equal to integers, but have other texts."""
    for index in (np.int64(1), True, 1):
        node = apply("Extract", var(CAT_I, 77, 5), params=(index, np.int32(2)))  # type: ignore[arg-type]
        assert str(node) == "Extract(Vi(77,5),1,2)"
        assert [type(p) for p in node.params] == [int, int]
        del node
        gc.collect()
    assert [type(p) for p in var(CAT_J, *np.array([78, 2])).params] == [int, int, int]
    einsum = apply("Einsum", x, y, params=("i,i->", (np.int64(3),)))
    assert einsum.params == ("i,i->", (3,)) and type(einsum.params[1][0]) is int


def test_immutable() -> None:
    for change in (lambda: setattr(x, "dim", 4), lambda: setattr(x, "new", 4)):
        with pytest.raises(AttributeError, match="immutable"):
            change()
    with pytest.raises(TypeError):
        Node()


def test_unused_formulas_are_forgotten() -> None:
    before = len(graph._interned)
    f = var(CAT_I, 90, 3)
    for _ in range(20_000):
        f = make("Sin", (f,))
    assert len(graph._interned) > before + 20_000
    del f  # no recursion in the destructor either
    gc.collect()
    assert len(graph._interned) <= before


def test_kinds_and_dimensions() -> None:
    assert (x.kind, y.kind, var(CAT_P, 3, 2).kind, var(CAT_SCALAR, 4, 1).kind, const(1.0).kind) == (I, J, P, P, P)
    assert gaussian().kind == PAIR and gaussian().dim == 1
    assert apply("Add", x, b).dim == 3


BAD: dict[str, Callable[[], object]] = {
    "unknown operation 'Expp'": lambda: apply("Expp", x),
    r"Exp takes 1 argument\(s\); got 2": lambda: apply("Exp", x, y),
    "Add: dimensions must be equal or 1; got 3, 2": lambda: apply("Add", x, var(CAT_I, 3, 2)),
    r"PowInt takes the parameters \(n\); got \(\)": lambda: apply("PowInt", x),
    r"PowInt: n must be a whole number .*; got 0\.5": lambda: apply("PowInt", x, params=(0.5,)),
    "Polygamma: n must be a whole number >= 1; got 0": lambda: apply("Polygamma", x, params=(0,)),
    r"components 2\.\.4 are outside a vector of dimension 3": lambda: apply("Extract", x, params=(2, 3)),
    "start must be a whole number >= 0; got -1": lambda: apply("Extract", x, params=(-1, 3)),
    "do not fit in dimension 4": lambda: apply("ExtractT", x, params=(2, 4)),
    "OneHot takes a scalar; got dimension 3": lambda: apply("OneHot", x, params=(4,)),
    "SqDist: dimensions must be equal or 1; got 3 and 2": lambda: apply("SqDist", x, var(CAT_I, 3, 2)),
    "the weights have dimension 1, 3 or 9; got 2": lambda: apply("WeightedSqNorm", var(CAT_P, 3, 2), x),
    "MatVecMult: dimension 3 is not rows × 2": lambda: apply("MatVecMult", x, var(CAT_I, 3, 2)),
    "a letter occurs twice in 'ii'": lambda: apply("Einsum", var(CAT_I, 3, 9), x, params=("ii,i->i", (3,))),
    "each letter must occur in two": lambda: apply("Einsum", x, y, params=("i,j->i", (3, 3))),
    "must read like": lambda: apply("Einsum", x, y, params=("i,i", (3,))),
    "is not of shape": lambda: apply("Einsum", x, y, params=("i,i->", (4,))),
    "a size must be a whole number >= 1; got 0": lambda: apply("Einsum", x, y, params=("i,i->", (0,))),
    "cannot be contracted": lambda: apply("TensorDot", x, y, params=((3,), (3,), (0,), (1,))),
    "ind must be an integer >= 0; got -1": lambda: var(CAT_I, -1, 3),
    "dim must be an integer >= 1; got 0": lambda: var(CAT_I, 0, 0),
    r"dim must be an integer >= 1; got 2\.0": lambda: var(CAT_I, 0, 2.0),  # type: ignore[arg-type]
    "a scalar has dim 1; got 2": lambda: var(CAT_SCALAR, 0, 2),
    "cat must be": lambda: var(9, 0, 2),
    "core must be one of": lambda: make_plan("Summ", x),
    "SumSoftMaxWeight needs a weight": lambda: make_plan("SumSoftMaxWeight", b),
    "Sum takes no weight": lambda: make_plan("Sum", b, x),
    "the softmax formula must be scalar; got dimension 3": lambda: make_plan("SumSoftMaxWeight", x, x),
    "k must be a positive integer for KMin": lambda: make_plan("KMin", b, k=0),
    "0 otherwise; got 2 for Sum": lambda: make_plan("Sum", b, k=2),
    r"got 2\.5 for KMin": lambda: make_plan("KMin", b, k=2.5),  # type: ignore[arg-type]
    r"variable number 0 is used as Vi\(0,3\) and as Vj\(0,3\)": lambda: make_plan("Sum", add(x, var(CAT_J, 0, 3))),
    r"variable number 0 is used as .*Vi\(0,2\)": lambda: make_plan("Sum", apply("Concat", x, var(CAT_I, 0, 2))),
    "a cotangent of dimension 2": lambda: vjp([(x, var(CAT_I, 3, 2))], [x]),
    "a tangent of dimension 2": lambda: jvp(x, {x: var(CAT_I, 3, 2)}),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_formulas_are_refused_where_they_are_made(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BAD[message]()


# --- rewriting ------------------------------------------------------------------------------------------------------
def test_rewrite_relabel_swap() -> None:
    f = gaussian()
    assert check(rewrite(f, {x: y, y: x})) is mul(apply("Exp", neg(apply("SqDist", y, x))), b)
    assert rewrite(f, {}) is f
    assert str(check(relabel(f, (5, 6, 0)))) == "Mul(Exp(Neg(SqDist(Vi(5,3),Vj(6,3)))),Vj(0,1))"
    assert str(check(swap_axes(f))) == "Mul(Exp(Neg(SqDist(Vj(0,3),Vi(1,3)))),Vi(2,1))"
    assert swap_axes(swap_axes(f)) is f


def test_check_finds_a_bad_node() -> None:
    node = apply("Add", x, y)
    forged = object.__new__(Node)
    for name in Node.__slots__[:-1]:
        object.__setattr__(forged, name, getattr(node, name))
    with pytest.raises(AssertionError):
        check(forged)
    object.__setattr__(node, "dim", 7)
    try:
        with pytest.raises(AssertionError, match="dim 7"):
            check(node)
    finally:
        object.__setattr__(node, "dim", 3)
    with pytest.raises(AssertionError, match="two categories"):
        check(add(x, var(CAT_J, 0, 3)))


def test_a_length_scale_costs_two_multiplications_a_component() -> None:
    """Its derivative is g |x/l - y/l|² by components, divided by l after the sum; nothing of it is computed twice."""
    scale, g = var(CAT_P, 2, 3), var(CAT_I, 3, 1)
    f = apply("Exp", neg(apply("SqDist", apply("Div", x, scale), apply("Div", y, scale))))
    (by_scale,) = vjp([(f, g)], [scale])
    assert by_scale is not None
    program = hoist(make_plan("Sum", by_scale))
    difference = next(n.args[0] for n in topological(*program.pair) if n.op == "Square")
    assert difference.op == "Sub" and all(a.is_var for a in difference.args)
    root = program.pair[0]
    assert root.op == "Mul" and difference in root.args
    (rest,) = (a for a in root.args if a is not difference)
    assert rest.op == "Mul" and difference in rest.args and min(a.dim for a in rest.args) == 1
    assert program.n_col == 3 and program.factor is not None


@pytest.mark.parametrize("signs", [(1, 1), (1, -1), (-1, 1), (-1, -1)])
@pytest.mark.parametrize("divided", [False, True])
def test_a_common_factor_is_taken_out(signs: tuple[int, int], divided: bool) -> None:
    """f s ± f t for f of the pair, s and t of its points, in either order and with any signs."""
    scale = var(CAT_P, 3, 3)
    pair = apply("Exp", apply("Sub", x, y))

    def term(sign: int, v: Node, swap: bool) -> Node:
        v = apply("Div", v, scale) if divided else v
        out = mul(v, pair) if swap else mul(pair, v)
        return out if sign > 0 else neg(out)

    for first, second, swap in ((x, y, False), (y, x, True)):
        f = add(term(signs[0], first, swap), term(signs[1], second, not swap))
        root = simplify(f)
        root = root.args[0] if root.op == "Neg" else root
        assert root.op == "Mul" and pair in root.args
        values = {x: 0.3, y: -0.7, scale: 1.9}
        want = math.exp(1.0) * (signs[0] * values[first] + signs[1] * values[second]) / (1.9 if divided else 1.0)
        assert _value(simplify(f), values) == pytest.approx(want, rel=1e-12)


def _value(node: Node, values: dict[Node, float]) -> float:
    if node in values:
        return values[node]
    a = [_value(n, values) for n in node.args]
    return {"Add": lambda: a[0] + a[1], "Sub": lambda: a[0] - a[1], "Mul": lambda: a[0] * a[1], "Neg": lambda: -a[0],
            "Div": lambda: a[0] / a[1], "Exp": lambda: math.exp(a[0])}[node.op]()  # fmt: skip


def test_simplifying_powers_keeps_dimensions() -> None:
    assert power(x, 0).dim == 3 and power(x, 1) is x and power(x, -1).op == "Inv" and power(x, True) is x
    assert mul(1e-20, mul(1e-20, x)) is not mul(1e-40, x)  # 1e-40 is 0 in float32
    assert mul(2.0, mul(3.0, x)) is mul(6.0, x)


# --- between processes and threads ----------------------------------------------------------------------------------
SCRIPT = """
import sys, pickle
from kernops.formula.graph import *
from kernops.formula.ops import *
from kernops.formula.plan import make_plan
f = mul(apply("Exp", neg(apply("SqDist", var(0, 0, 3), var(1, 1, 3)))), var(1, 2, 1))
g = apply("TensorDot", var(0, 0, 6), var(1, 1, 6), params=((2, 3), (3, 2), (1,), (0,)))
plan = pickle.loads(bytes.fromhex(sys.argv[1]))
print(f.digest, g.digest, make_plan("KMin", f, k=3).digest, plan.digest, plan.formula is f)
"""


def test_digests_and_pickles_hold_in_another_process() -> None:
    f = gaussian()
    g = apply("TensorDot", var(CAT_I, 0, 6), var(CAT_J, 1, 6), params=((2, 3), (3, 2), (1,), (0,)))
    plan = make_plan("Sum", f, n_vars=5)
    command = [sys.executable, "-c", SCRIPT, pickle.dumps(plan).hex()]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert out == [f.digest, g.digest, make_plan("KMin", f, k=3).digest, plan.digest, "True"]


def test_digests_tell_formulas_apart() -> None:
    formulas = [x, y, b, const(0.0), const(-0.0), add(x, y), apply("Add", y, x), var(CAT_I, 0, 2), var(CAT_I, 1, 3),
                apply("Extract", x, params=(0, 2)), apply("Extract", x, params=(1, 2)),
                var(CAT_SCALAR, 0, 1)]  # fmt: skip
    assert len({f.digest for f in formulas}) == len(formulas)
    plans = [make_plan("Sum", b), make_plan("Min", b), make_plan("KMin", b, k=1), make_plan("KMin", b, k=2),
             make_plan("Sum", b, n_vars=7), make_plan("SumSoftMaxWeight", b, x),
             make_plan("SumSoftMaxWeight", b, y)]  # fmt: skip
    assert len({p.digest for p in plans}) == len(plans)


def test_pickle_gives_the_same_object() -> None:
    for f in (x, const(-0.0), const(float("nan")), gaussian()):
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
            assert pickle.loads(pickle.dumps(f, protocol)) is f
    plan = make_plan("KMin", gaussian(), k=3)
    assert pickle.loads(pickle.dumps(plan)) is plan
    assert make_plan("KMin", gaussian(), None, 3, 3) is plan and make_plan("KMin", gaussian(), k=np.int64(3)) is plan  # type: ignore[arg-type]


def test_threads_that_build_the_same_formula_get_the_same_object() -> None:
    count = 8
    for attempt in range(20):
        barrier, out = threading.Barrier(count), [None] * count

        def build(k: int, attempt: int = attempt, barrier=barrier, out=out) -> None:
            barrier.wait()
            f: Node = var(CAT_I, 100 + attempt, 3)
            for step in range(50):
                f = apply("SqDist", apply("Sin", add(f, float(step))), y)
            out[k] = (f, f.digest)

        threads = [threading.Thread(target=build, args=(k,)) for k in range(count)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert out[0] is not None and all(o is not None and o[0] is out[0][0] and o == out[0] for o in out)


# --- size -----------------------------------------------------------------------------------------------------------
a = var(CAT_I, 3, 1)
#: One more layer on top of a formula, of dimension 1 or 3.
LAYERS: dict[str, tuple[int, Callable[[Node, int], Node]]] = {
    "sums": (3, lambda f, k: make("Add", (make("Sin", (f,)), x))),
    "products": (3, lambda f, k: make("Mul", (f, (a, b, x, y)[k % 4]))),
    "signs": (3, lambda f, k: make("Neg", (f,))),
    "squares": (3, lambda f, k: make("Mul", (f, f))),
    "scalar squares": (1, lambda f, k: make("Mul", (f, f))),
    "scalar products": (1, lambda f, k: make("Mul", (f, b))),
    "composites": (3, lambda f, k: make("Add", (make("SqDist", (x, f)), y))),
    "pieces": (
        3,
        lambda f, k: make("Concat", (apply("Extract", f, params=(1, 2)), apply("Extract", f, params=(0, 1)))),
    ),
    "row terms": (1, lambda f, k: add(f, mul(apply("Sin", mul(a, float(k))), b))),
    "exponentials": (1, lambda f, k: make("Exp", (make("Neg", (make("Mul", (f, f)),)),))),
}


def _tower(name: str, height: int) -> Node:
    dim, layer = LAYERS[name]
    f = add(x, y) if dim == 3 else apply("SqDist", x, y)
    for k in range(height):
        f = layer(f, k)
    return f


@pytest.mark.parametrize("name", LAYERS)
def test_deep_and_shared_formulas(name: str) -> None:
    """1,200 layers are too many for a recursion, and 2**1200 paths for a walk along each."""
    f = _tower(name, 1200)
    start = time.process_time()
    for wrap in ("Neg", "Exp", "Sum"):
        f = make(wrap, (f,))
    plan = make_plan("Sum", f)
    check(simplify(lowered(f)))
    assert len(emit(plan)) < 5_000_000
    assert len(f.digest) == 32 and len(plan.digest) == 32
    assert len(repr(f)) < 1000
    assert pickle.loads(pickle.dumps(plan)) is plan
    cotangents = vjp([(f, const(1.0))], [x, y])
    tangent = jvp(f, {x: x, y: const(1.0)})
    for g in (*cotangents, tangent):
        if g is not None:
            check(g)
            assert len(topological(g)) < 40 * 1200
    emit(make_plan("Sum", tangent))
    assert time.process_time() - start < 30


def test_work_is_linear_in_the_size(request: pytest.FixtureRequest) -> None:
    """Ten times the layers take about ten times as long, not a hundred times."""

    def seconds(height: int) -> float:
        f = _tower("composites", height)
        start = time.process_time()
        plan = make_plan("Sum", f)
        hoist(plan)
        emit(plan)
        vjp([(f, const(1.0))], [x])
        return time.process_time() - start

    seconds(50)
    gc.collect()  # the collector's time depends on what other tests left
    gc.disable()
    request.addfinalizer(gc.enable)
    assert seconds(1000) < 40 * max(seconds(100), 0.005)


def test_text_of_a_shared_formula_is_cut() -> None:
    f = _tower("scalar squares", 60)
    start = time.perf_counter()
    assert str(f).endswith("…") and len(str(f)) <= graph.LONGEST_TEXT + 1
    assert repr(f).endswith("… of dimension 1>") and len(repr(f)) < 600
    assert time.perf_counter() - start < 60
    assert graph.text(f, 5) == "Mul(M…"
    assert graph.text(x, 100) == "Vi(0,3)"


def test_a_text_as_long_as_the_limit_is_whole() -> None:
    assert graph.text(x, 7) == "Vi(0,3)"
    assert graph.text(x, 6) == "Vi(0,3…"
    assert graph.text(apply("Extract", x, params=(0, 2)), 100) == "Extract(Vi(0,3),0,2)"
