"""The data behind a formula: which tensor is variable number k, and what is common to all of them.

Frames are immutable and shared: every expression of the same data, however long, holds the same frame, so that a unary
operation costs nothing here. Two frames merge by identity of the tensors in them.
"""

from __future__ import annotations

import threading
from typing import Any, NoReturn

import torch

from ..autograd.tracing import cached, is_dynamo_compiling
from ..formula.graph import CAT_I, CAT_J, CAT_P
from .arrays import Space, kind_of, to_tensor
from .views import Late, View, Views, late, read

Tensor = torch.Tensor

_transformed = torch._C._are_functorch_transforms_active
_modes = torch._C._len_torch_dispatch_stack
_viewing = threading.RLock()

#: Words for categories in messages.
WORDS = {CAT_I: "i-variable", CAT_J: "j-variable", CAT_P: "parameter"}


class Symbol:
    """Stands for the argument number ``ind`` of a later call."""

    __slots__ = ("ind", "dim")

    def __init__(self, ind: int, dim: int) -> None:
        self.ind, self.dim = ind, dim

    def __reduce__(self) -> tuple:
        return symbol, (self.ind, self.dim)


@cached(1024)
def symbol(ind: int, dim: int) -> Symbol:
    """The same object for the same request, so that frames merge it."""
    return Symbol(ind, dim)


class Numbers(tuple):
    """A parameter written as a list of numbers; it becomes a tensor when dtype and device are known."""

    __slots__ = ()


Value = Tensor | float | Symbol | Numbers | None

#: What ``Frame.given`` may hold besides what ``Frame.tensors`` does: nothing; (m, 1, D) and (1, n, D); ``Late``, too.
PLAIN, PAIRS, VIEWS = range(3)


class Frame:
    """The data of an expression.

    Attributes:
        tensors: value of variable number k at position k: i-variables (*B, m, D), j-variables (*B, n, D), parameters
            (*B, D); a float for a scalar; a ``Symbol`` or ``Numbers`` for what becomes a tensor later; ``None`` for a
            number that no formula uses.
        cats: their categories.
        m, n: numbers of rows and columns; ``None`` where no variable has any.
        batch: broadcast batch shape.
        space: kind, dtype and device of the tensors; ``None`` if there is none yet.
        backend: back end asked for, or ``None``.
        loose: whether some value is a ``Symbol`` or ``Numbers``.
        given, form: ``tensors`` as the caller gave them; what may be among these, ``PLAIN``, ``PAIRS`` or ``VIEWS``.
            Without batch dimensions :func:`kernops.autograd.reduce` takes ``PAIRS`` as they are; with, there are none.
        fresh: whether the tensors came with this very call, so that they are as they were when they were looked at.
    """

    __slots__ = ("given", "cats", "m", "n", "batch", "space", "backend", "loose", "form", "_views", "_late")
    fresh = False

    def __init__(
        self,
        given: tuple[Any, ...] = (),
        cats: tuple[int, ...] = (),
        m: int | None = None,
        n: int | None = None,
        batch: tuple[int, ...] = (),
        space: Space | None = None,
        backend: str | None = None,
        loose: bool = False,
        form: int = PLAIN,
    ) -> None:
        self.given = given
        self.cats = cats
        self.m = m
        self.n = n
        self.batch = batch
        self.space = space
        self.backend = backend
        self.loose = loose
        self.form = form

    @property
    def tensors(self) -> tuple[Any, ...]:
        if self.form == PLAIN:
            return self.given
        batched = bool(self.batch)
        if is_dynamo_compiling() or _transformed() or _modes() or torch.is_inference_mode_enabled():
            return tuple([read(v, batched) for v in self.given])  # that are not to outlive what is going on
        with _viewing:  # the same views each time, also for another thread: whoever asks may know them by identity
            views = getattr(self, "_views", None)  # not set in __init__, which is called all the time
            if views is None:
                views = self._views = Views(len(self.given))
            with torch.enable_grad():  # they may be differentiated later
                return views.of(self.given, batched)

    @property
    def for_batch(self) -> tuple[Any, ...]:
        """``given`` as a frame with batch dimensions may hold it, the same objects each time."""
        if self.form == PLAIN or self.batch:
            return self.given
        with _viewing:
            made = getattr(self, "_late", None)
            if made is None:
                made = self._late = tuple([late(v) for v in self.given])
            return made

    def through(self, source: Tensor, *first: View) -> Frame:
        """The same frame, of one tensor that is such a view of ``source``; at each reading, the view is made anew."""
        (tensor,) = self.for_batch
        steps = tensor.steps if tensor.__class__ is Late else ()
        new = self.replace()
        new.given, new.form = (Late(source, *first, *steps),), VIEWS
        return new

    def replace(self, tensors: tuple[Any, ...] | None = None, **changes: Any) -> Frame:
        if tensors is None and changes.get("batch") and "given" not in changes:
            tensors = self.tensors
        if tensors is not None:
            changes.update(given=tensors, form=PLAIN)
        return Frame(**{name: changes.get(name, getattr(self, name)) for name in _FIELDS})

    def __reduce__(self) -> tuple:
        return _restored, tuple(getattr(self, name) for name in _FIELDS)

    def settled(self) -> Frame:
        """The frame with tensors for all values: what a reduction is given."""
        return Binder(self)(()) if self.loose else self

    def swapped(self) -> Frame:
        """Rows and columns exchanged."""
        cats = tuple(_SWAP.get(c, c) for c in self.cats)
        return self.replace(cats=cats, m=self.n, n=self.m)


class _Bound(Frame):
    """The frame of a call whose tensors all came with it."""

    __slots__ = ()
    fresh = True


_FIELDS = tuple(name for name in Frame.__slots__ if not name.startswith("_"))


def _restored(*values: Any) -> Frame:
    return Frame(*values) if values[0] else EMPTY


_SWAP = {CAT_I: CAT_J, CAT_J: CAT_I}
EMPTY = Frame()


def merge(a: Frame, b: Frame, op: str) -> tuple[Frame, tuple[int, ...] | None]:
    """The frame of an expression of both, and the new numbers of the variables of ``b`` (None: unchanged).

    The variables of ``a`` keep their numbers. ``op`` is named in the message if the two do not fit.
    """
    if b is EMPTY:
        return a, None
    if a is EMPTY:
        return b, None
    space, other = a.space, b.space
    if space is not other and other is not None:
        if space is not None and not space.same(other):
            _clash(op, space, other)
        space = other
    m, n, batch, backend = a.m, a.n, a.batch, a.backend
    if m is None:
        m = b.m
    elif b.m is not None and b.m != m:
        raise ValueError(f"{op}: i-variables must have equally many rows; got M = {m} and M = {b.m}")
    if n is None:
        n = b.n
    elif b.n is not None and b.n != n:
        raise ValueError(f"{op}: j-variables must have equally many rows; got N = {n} and N = {b.n}")
    if batch != b.batch:
        batch = broadcast(batch, b.batch, op)
    if backend != b.backend and b.backend is not None:
        if backend is not None:
            raise ValueError(f"{op}: the operands ask for two back ends, {backend!r} and {b.backend!r}")
        backend = b.backend
    form = a.form if a.form > b.form else b.form
    given, cats, numbers, others = a.given, a.cats, [], b.given
    if form and batch:
        given, others, form = a.for_batch, b.for_batch, VIEWS
    own = len(given)
    for t, c in zip(others, b.cats):
        k = 0
        while k < own and not (given[k] is t and cats[k] == c):
            k += 1
        if k == own:
            k = len(given)
            given, cats = (*given, t), (*cats, c)
        numbers.append(k)
    merged = Frame(given, cats, m, n, batch, space, backend, a.loose or b.loose, form)
    return merged, tuple(numbers)


def _clash(op: str, a: Space, b: Space) -> NoReturn:
    if a.kind != b.kind:
        raise TypeError(f"{op}: all data must be of one kind (torch, numpy or cupy); got {a.kind} and {b.kind}")
    if a.dtype != b.dtype:
        raise ValueError(f"{op}: all data must have one dtype; got {a.dtype_name} and {b.dtype_name}")
    raise ValueError(f"{op}: all data must be on one device; got {a.device} and {b.device}")


@cached(1024)
def broadcast(a: tuple[int, ...], b: tuple[int, ...], op: str) -> tuple[int, ...]:
    """The common batch shape of two."""
    if len(a) < len(b):
        a, b = b, a
    shift = len(a) - len(b)
    out = list(a)
    for k, size in enumerate(b):
        mine = a[k + shift]
        if mine != size and 1 not in (mine, size):
            raise ValueError(f"{op}: batch dimensions must be equal or 1; got shapes {a} and {b}")
        out[k + shift] = size if mine == 1 else mine
    return tuple(out)


class Binder:
    """Puts the arguments of a call in the place of a frame's symbols."""

    __slots__ = ("frame", "slots", "count", "plain")

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        #: (variable's number, argument's number, category, dimension, name in messages)
        self.slots = [
            (k, t.ind, c, t.dim, f"argument {t.ind}")
            for k, (t, c) in enumerate(zip(frame.tensors, frame.cats))
            if isinstance(t, Symbol)
        ]
        self.count = 1 + max([-1, *[s[1] for s in self.slots]])
        own = [t for t in frame.tensors if not isinstance(t, (Symbol, float))]
        self.plain = not own and not frame.batch

    def __call__(self, args: tuple[Any, ...]) -> Frame:
        return (self._quickly(args) if self.plain and len(args) == self.count else None) or self._carefully(args)

    def _quickly(self, args: tuple[Any, ...]) -> Frame | None:
        """The frame if all arguments are unbatched arrays that fit, else None: ``_carefully`` says what is wrong."""
        frame = self.frame
        tensors = list(frame.tensors)
        m = n = space = None
        for k, ind, cat, dim, name in self.slots:
            x = args[ind]
            if x.__class__ is not Tensor and kind_of(x) is None:
                return None
            x, own = to_tensor(x, name)
            if own is not space:
                if space is not None:
                    return None
                space = own
            shape = x.shape
            if cat == CAT_P:
                if len(shape) != 1 or shape[0] != dim:
                    return None
            elif len(shape) != 2 or shape[1] != dim:
                return None
            elif cat == CAT_I:
                if m is not None and m != shape[0]:
                    return None
                m = shape[0]
            else:
                if n is not None and n != shape[0]:
                    return None
                n = shape[0]
            tensors[k] = x
        return None if space is None else _Bound(tuple(tensors), frame.cats, m, n, (), space, frame.backend)

    def _carefully(self, args: tuple[Any, ...]) -> Frame:
        frame = self.frame
        if len(args) != self.count:
            raise ValueError(
                f"the call takes {self.count} argument(s), one for each symbolic variable; got {len(args)}"
            )
        known = Frame(m=frame.m, n=frame.n, batch=frame.batch, space=frame.space)
        bound: dict[int, Tensor] = {}
        for k, ind, cat, dim, name in self.slots:
            if not isinstance(args[ind], (int, float, list, tuple)):
                bound[k], part = variable(args[ind], cat, dim, name)
                known, _ = merge(known, part, name)
        space = known.space
        if space is None:
            raise ValueError("a reduction needs at least one array; got only numbers")
        for k, t in enumerate(frame.tensors):
            if isinstance(t, Numbers):
                bound[k] = torch.tensor(t, dtype=space.dtype, device=space.device)
        for k, ind, cat, dim, name in self.slots:
            if k not in bound:
                bound[k] = _written_out(args[ind], cat, dim, name, space)
        batch = known.batch
        self._check_parameters(tuple(bound.get(k, t) for k, t in enumerate(frame.tensors)))
        given = tuple(bound.get(k, t) for k, t in enumerate(frame.for_batch if batch else frame.given))
        form = VIEWS if batch and frame.form else frame.form
        return Frame(given, frame.cats, known.m, known.n, batch, space, frame.backend, False, form)

    def _check_parameters(self, tensors: tuple[Value, ...]) -> None:
        """No parameter has an axis which only looks like one of a batch: rows."""
        pairs = list(zip(tensors, self.frame.cats))
        rank = max([0] + [t.ndim - 2 for t, c in pairs if c in _SWAP and isinstance(t, Tensor)])
        for k, _, cat, dim, name in self.slots:
            t = tensors[k]
            if cat == CAT_P and isinstance(t, Tensor) and t.ndim - 1 > rank:
                raise ValueError(
                    f"{name}: a parameter is one vector for all rows, ({dim},); got {tuple(t.shape)}. "
                    f"Data with a row for each i or j are variables, Vi({dim}) or Vj({dim})"
                )


def variable(x: Any, cat: int, dim: int, name: str) -> tuple[Tensor, Frame]:
    """An array given for a variable of known category and dimension, and its frame."""
    tensor, space = to_tensor(x, name)
    own = 1 if cat == CAT_P else 2
    if cat == CAT_P and (tensor.ndim == 0 or (tensor.ndim == 2 and tensor.shape[0] == 1)):
        tensor = tensor.reshape(-1)
    shape = tuple(tensor.shape)
    if len(shape) < own or shape[-1] != dim:
        want = f"(..., {dim})" if own == 1 else f"(..., {'M' if cat == CAT_I else 'N'}, {dim})"
        raise ValueError(f"{name}: the {WORDS[cat]} must have shape {want}; got {shape}")
    m = shape[-2] if cat == CAT_I else None
    n = shape[-2] if cat == CAT_J else None
    return tensor, Frame(m=m, n=n, batch=shape[: len(shape) - own], space=space)


def _written_out(x: Any, cat: int, dim: int, name: str, space: Space) -> Tensor:
    """A number or a list of numbers given for a parameter."""
    values = [float(v) for v in x] if isinstance(x, (list, tuple)) else [float(x)]
    if cat != CAT_P or len(values) != dim:
        raise ValueError(
            f"{name}: {dim} number(s) for a parameter, or an array for a variable, are accepted; got {x!r}"
        )
    return torch.tensor(values, dtype=space.dtype, device=space.device)
