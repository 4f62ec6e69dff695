"""Tensors that get other data, ``x.data = ...``, or are written to, after a LazyTensor or an operator was made of them.

torch reads what a tensor holds when it computes. So must what is made of it here, and where the new data do not fit, an
error has to say so: a kernel would read beyond their end.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernops import LazyTensor, Pm, Vi, Vj
from kernops.kernels import RBF, SpectralMixture, White
from kernops.operators import KernelOperator

Tensor = torch.Tensor
M, N, D = 5, 7, 3
torch.manual_seed(0)


def rand(*shape: int) -> Tensor:
    return torch.rand(shape, dtype=torch.float64) + 0.5


BESIDE = rand(N, 2)
#: What is made of a LazyTensor (..., M, N): of the tensors as they are, or of views of them.
REDUCTIONS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda k: k.sum(k.nbatchdims + 1),
    "mean": lambda k: k.mean(k.nbatchdims + 1),
    "std": lambda k: k.std(k.nbatchdims + 1),
    "over i": lambda k: k.mean(k.nbatchdims),
    "logsumexp": lambda k: k.logsumexp(k.nbatchdims + 1, weight=Vj(BESIDE)),
    "count": lambda k: (k - 0.5).relu().count_nonzero(k.nbatchdims + 1),
    "T": lambda k: k.T.mean(k.nbatchdims + 1),
    "matmul": lambda k: k @ BESIDE,
    "pickled": lambda k: pickle.loads(pickle.dumps(k)).mean(k.nbatchdims + 1),
    "variables": lambda k: torch.cat([v.reshape(-1) for v in k.variables if isinstance(v, Tensor)]),
}  # fmt: skip


def swap(t: Tensor, times: int) -> None:
    """Give a tensor other data; those of the second time may lie where the first ones lay."""
    for _ in range(times):
        t.data = rand(*t.shape)


def gaussian(x: Any, y: Any, p: Any = None) -> Any:
    d = (x - y) if p is None else (x - y) * p
    return (-(d**2).sum(-1)).exp()


#: What is made of x, y and p, whose shapes these are.
MADE: dict[str, tuple[tuple[tuple[int, ...], ...], Callable[..., Any]]] = {
    "3D": (((M, 1, D), (1, N, D), (D,)), lambda x, y, p: gaussian(LazyTensor(x), LazyTensor(y))),
    "2D": (((M, D), (N, D), (D,)), lambda x, y, p: gaussian(Vi(x), Vj(y))),
    "parameter": (((M, 1, D), (1, N, D), (D,)), lambda x, y, p: gaussian(LazyTensor(x), LazyTensor(y), Pm(p))),
    "parameter (1, D)": (((M, D), (N, D), (1, D)), lambda x, y, p: gaussian(Vi(x), Vj(y), Pm(p))),
    "parameter (1, 1, D)": (((M, 1, D), (1, N, D), (1, 1, D)),
                            lambda x, y, p: gaussian(LazyTensor(x), LazyTensor(y), LazyTensor(p))),
    "parameter ()": (((M, 1, D), (N, D), ()), lambda x, y, p: gaussian(LazyTensor(x), Vj(y), Pm(p))),
    "batch": (((2, M, 1, D), (2, 1, N, D), (2, 1, 1, D)),
              lambda x, y, p: gaussian(LazyTensor(x), LazyTensor(y), LazyTensor(p))),
    "batch of one": (((2, M, 1, D), (1, N, D), (D,)), lambda x, y, p: gaussian(LazyTensor(x), LazyTensor(y), Pm(p))),
    "with numbers": (((M, 1, D), (1, N, D), (D,)),
                     lambda x, y, p: gaussian(LazyTensor(x), LazyTensor(y), Pm([0.5, 1.5, 2.0]))),
}  # fmt: skip


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("made", MADE)
def test_data_of_the_time_of_the_reduction(made: str, name: str) -> None:
    shapes, make = MADE[made]
    reduction = REDUCTIONS[name]
    tensors = [torch.nn.Parameter(rand(*shape)) for shape in shapes]
    k = make(*tensors)
    reduction(k)  # what it keeps is of the old data
    for change in ("swapped", "written to", "swapped twice"):
        for t in tensors:
            with torch.no_grad():
                t.copy_(rand(*t.shape)) if change == "written to" else swap(t, change.count("twice") + 1)
        want = reduction(make(*(t.detach().clone() for t in tensors)))
        torch.testing.assert_close(reduction(k).detach(), want, rtol=1e-13, atol=0, msg=change)


def test_gradients_of_other_data() -> None:
    x, y = torch.nn.Parameter(rand(M, 1, D)), rand(1, N, D)
    k = gaussian(LazyTensor(x), LazyTensor(y))
    k.mean(1).sum().backward()
    x.data, x.grad = rand(M, 1, D), None
    k.mean(1).sum().backward()
    other = x.detach().clone().requires_grad_()
    want = torch.autograd.grad((-((other - y) ** 2).sum(-1)).exp().mean(1).sum(), other)[0]
    torch.testing.assert_close(x.grad, want, rtol=1e-13, atol=1e-15)


def test_gradients_that_are_asked_for_later() -> None:
    x, y = rand(M, 1, D), rand(1, N, D)
    k = gaussian(LazyTensor(x), LazyTensor(y))
    assert not k.mean(1).requires_grad
    x.requires_grad_()
    assert k.mean(1).requires_grad


def test_views_stay_the_same_objects() -> None:
    k = gaussian(LazyTensor(rand(M, 1, D)), LazyTensor(rand(1, N, D)))
    assert all(a is b for a, b in zip(k.frame.tensors, k.frame.tensors, strict=True))


def test_complex_data() -> None:
    z, y = torch.complex(rand(M, 1, D), rand(M, 1, D)), torch.complex(rand(1, N, D), rand(1, N, D))
    k = LazyTensor(z) * LazyTensor(y)
    k.sum(1)
    z.data = torch.complex(rand(M, 1, D), rand(M, 1, D))
    torch.testing.assert_close(k.sum(1), (z * y).sum(1), rtol=1e-13, atol=0)


def test_a_solver_that_waits() -> None:
    x, b = rand(N, 1), rand(N)
    k = (-((Vi(x) - Vj(x)) ** 2)).exp()
    solver = k.solve(b, alpha=1.0, call=False)
    b.data = rand(N)
    dense = (-((x - x.T) ** 2)).exp() + torch.eye(N, dtype=torch.float64)
    torch.testing.assert_close(solver()[:, 0], torch.linalg.solve(dense, b), rtol=1e-4, atol=1e-6)


def test_what_does_not_fit_is_refused() -> None:
    y = rand(1, N, D)
    for other in (rand(M - 1, 1, D), rand(M, 1, D + 1), rand(M, D), rand(1, M, D)[:, : M - 1], rand(M, 1, D).float()):
        x = rand(M, 1, D)
        k = gaussian(LazyTensor(x), LazyTensor(y))
        x.data = other
        if other.shape == (M, D):  # the same rows
            torch.testing.assert_close(k.sum(1), gaussian(Vi(other), LazyTensor(y)).sum(1))
            continue
        for reduction in ("sum", "mean"):
            with pytest.raises(ValueError, match="has other data than before|must have shape|one dtype"):
                REDUCTIONS[reduction](k)
    b = rand(2, 1, N, D)
    k = gaussian(LazyTensor(rand(M, 1, D)), LazyTensor(b))
    b.data = rand(3, 1, N, D)
    with pytest.raises(ValueError, match="has other data than before"):
        k.sum(2)


def test_a_backward_pass_of_tensors_that_do_not_fit_is_refused() -> None:
    x = torch.nn.Parameter(rand(M, 1, D))
    out = gaussian(LazyTensor(x), LazyTensor(rand(1, N, D))).logsumexp(1)
    x.data = rand(M - 2, 1, D)
    with pytest.raises(ValueError, match="has other data than before.*run the forward pass again"):
        out.sum().backward()


# --- operators --------------------------------------------------------------------------------------------------------
def of_all(x: Tensor, scale: Tensor, noise: Tensor, more: Tensor) -> Any:
    return (KernelOperator(RBF(scale) + White(more), x).add_diagonal(noise).add_diagonal(more) * noise).add_diagonal(
        more
    )


OPERATORS: dict[str, Callable[..., Any]] = {
    "points": lambda x, scale, noise, more: KernelOperator(RBF(0.5), x),
    "parameter": lambda x, scale, noise, more: KernelOperator(RBF(scale), x),
    "noise": lambda x, scale, noise, more: KernelOperator(RBF(0.5), x).add_diagonal(noise),
    "two noises": lambda x, scale, noise, more: KernelOperator(RBF(0.5), x).add_diagonal(noise).add_diagonal(more),
    "white": lambda x, scale, noise, more: KernelOperator(RBF(0.5) + White(noise), x),
    "product": lambda x, scale, noise, more: (
        KernelOperator(RBF(scale) + White(noise), x) * KernelOperator(RBF(0.7) + White(more), x)
    ),
    "scaled": lambda x, scale, noise, more: KernelOperator(RBF(0.5), x) * noise,
    "of a LazyTensor": lambda x, scale, noise, more: KernelOperator(
        (-(((Vi(x) - Vj(x)) / Pm(scale)) ** 2).sum(-1)).exp() * Pm([2.0])
    ),
    "all": of_all,
}


V = rand(N, 2)
USES: tuple[Callable[[Any], Tensor], ...] = (
    lambda a: a @ V, lambda a: a.to_dense(), lambda a: a.diagonal(), lambda a: a.T @ V, lambda a: a[:, :3].T @ V,
)  # fmt: skip


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_read_their_tensors_when_they_are_used(name: str) -> None:
    tensors = [torch.nn.Parameter(t) for t in (rand(N, D), rand(D), rand(1), rand())]
    operator = OPERATORS[name](*tensors)
    operator @ V
    for change in ("swapped", "written to", "swapped twice"):
        for t in tensors:
            with torch.no_grad():
                t.copy_(rand(*t.shape)) if change == "written to" else swap(t, change.count("twice") + 1)
        fresh = OPERATORS[name](*(t.detach().clone() for t in tensors))
        for use in USES:
            torch.testing.assert_close(use(operator).detach(), use(fresh), rtol=1e-12, atol=1e-15, msg=change)
    x = tensors[0]
    x.data = rand(N - 1, D)
    with pytest.raises((ValueError, RuntimeError), match="other data than before|must match|shape"):
        operator @ V


def test_matrices_of_which_no_view_is_a_vector() -> None:
    """Parameters with a row for each component: one after the other they are a copy here."""
    weights, means, scales, x = rand(2), rand(D, 2), rand(D, 2), rand(N, D)
    operator = KernelOperator(SpectralMixture(weights, means.T, scales.T), x)
    operator @ V
    means.copy_(rand(D, 2))
    fresh = KernelOperator(SpectralMixture(weights, means.T.contiguous(), scales.T.contiguous()), x)
    torch.testing.assert_close(operator @ V, fresh @ V, rtol=1e-12, atol=1e-14)


#: Operators whose numbers beside the kernel are made of a tensor of one number.
NOISY: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "white": lambda x, noise: KernelOperator(RBF(0.7) + White(noise), x),
    "added": lambda x, noise: KernelOperator(gaussian(Vi(x), Vj(x)), symmetric=True).add_diagonal(noise),
    "added twice": lambda x, noise: KernelOperator(RBF(0.7), x).add_diagonal(noise).add_diagonal(noise),
    "scaled": lambda x, noise: KernelOperator(RBF(0.7), x) * noise,
}


def slope(operator: Any, noise: Tensor) -> Tensor:
    return torch.autograd.grad((operator @ V).sum(), noise)[0]


@pytest.mark.parametrize("name", NOISY)
def test_operators_in_a_loop_of_training_and_validation(name: str) -> None:
    """A step of an optimizer, a product in inference mode, and a gradient again; each through one operator."""
    x, noise = rand(N, D), torch.nn.Parameter(rand())
    operator = NOISY[name](x, noise)
    for _ in range(3):
        with torch.no_grad():
            noise.mul_(0.9)
        fresh = NOISY[name](x, noise)
        with torch.inference_mode():
            found = operator @ V
        torch.testing.assert_close(found.clone(), (fresh @ V).detach(), rtol=1e-12, atol=1e-14)
        for _ in range(2):  # of which the first frees the graph
            torch.testing.assert_close(slope(operator, noise), slope(fresh, noise), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", NOISY)
def test_operators_made_without_gradients_have_them(name: str) -> None:
    x, noise = rand(N, D), torch.nn.Parameter(rand())
    with torch.no_grad():
        operator = NOISY[name](x, noise)
    torch.testing.assert_close(slope(operator, noise), slope(NOISY[name](x, noise), noise))


def test_conjugate_data_are_other_data() -> None:
    x, y = (torch.randn(*shape, dtype=torch.complex128) for shape in ((M, 1, D), (1, N, D)))
    product = (LazyTensor(x) * LazyTensor(y)).sum(-1)
    product.sum(1)
    x.data = x.data.conj()
    torch.testing.assert_close(product.sum(1), (x.resolve_conj() * y).sum(-1).sum(1, keepdim=True))


def test_a_tensor_that_becomes_a_leaf() -> None:
    w = torch.tensor(3.0, requires_grad=True)
    scale, x = w * 2, torch.randn(M, 1, D)
    lazy = LazyTensor(x) * LazyTensor(scale)
    lazy.sum(1)
    scale.detach_().requires_grad_()
    (found,) = torch.autograd.grad(lazy.sum(1).sum(), scale)
    torch.testing.assert_close(found, x.sum())


def test_deep_copies_are_of_the_copied_parameters() -> None:
    """As in a copied module, whose parameters are copied beside."""
    for shape in ((M, 1, D), (M, D)):
        x = torch.nn.Parameter(rand(*shape))
        lazy = (LazyTensor(x) if len(shape) == 3 else Vi(x)) * Pm(rand())
        own, copied = copy.deepcopy((x, lazy))
        want = copied.sum(1).detach()
        x.data.zero_()
        torch.testing.assert_close(copied.sum(1).detach(), want)
        own.data.mul_(2)
        torch.testing.assert_close(copied.sum(1).detach(), 2 * want)
