"""Each kernel against GPyTorch's dense one, or against its definition: values, and gradients by everything."""

from __future__ import annotations

import pickle
from typing import Any

import gpytorch
import pytest
import torch
from gpytorch.kernels import Kernel
from linear_operator.operators import MatmulLinearOperator

from kernops import gpytorch as ours

from .cases import ARD, KERNELS, D, both, rand, smooth

Tensor = torch.Tensor
M, N = 7, 5


def results(kernel: Kernel, x: Tensor, y: Tensor, diagonal: bool = True, **settings: Any) -> list[Tensor]:
    """The matrices of x with y and with itself, the latter's diagonal, and the gradients of a function of all three."""
    x, y = x.clone().requires_grad_(), y.clone().requires_grad_()
    made = [kernel(x, y, **settings).to_dense(), kernel(x, **settings).to_dense()]
    made += [kernel(x, diag=True, **settings)] if diagonal else []
    value = sum((t * rand(*t.shape, seed=k)).sum() for k, t in enumerate(made))
    assert isinstance(value, Tensor)
    sources = [x, y, *kernel.parameters()]
    grads = torch.autograd.grad(value, sources, allow_unused=True)
    return made + [torch.zeros_like(s) if g is None else g for s, g in zip(sources, grads)]


def agree(kernels: tuple[Kernel, Kernel], x: Tensor, y: Tensor, **settings: Any) -> None:
    got, want = (results(k, x, y, **settings) for k in kernels)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-6, atol=1e-6)  # GPyTorch's distances are at least 1e-15, squared


X, Y = rand(M, D, seed=1), rand(N, D, seed=2)


@pytest.mark.parametrize("name", KERNELS)
def test_values_and_gradients(name):
    agree(both(KERNELS[name]), X, Y)


@pytest.mark.parametrize("name", ARD)
def test_one_parameter_for_each_feature(name):
    agree(both(KERNELS[name], ard_num_dims=D), X, Y)


@pytest.mark.parametrize("name", KERNELS)
def test_batches_of_kernels_and_of_points(name):
    kernels = both(KERNELS[name], batch_shape=torch.Size([2]))
    agree(kernels, rand(2, M, D, seed=1), rand(2, N, D, seed=2))
    agree(kernels, X, Y)
    agree(kernels, rand(4, 1, M, D, seed=1), Y)


@pytest.mark.parametrize("name", KERNELS)
def test_active_dims(name):
    columns = torch.tensor([4, 0, 2])
    kernels = both(KERNELS[name], active_dims=columns)
    agree(kernels, rand(M, 5, seed=1), rand(N, 5, seed=2))


@pytest.mark.filterwarnings("ignore:The last_dim_is_batch:DeprecationWarning")
@pytest.mark.parametrize("name", [k for k in KERNELS if k not in ("formula", "PiecewisePolynomial 2")])
def test_features_as_a_batch(name):
    # GPyTorch's own diagonal of a spectral mixture raises.
    agree(both(KERNELS[name]), X, Y, diagonal=name != "SpectralMixture", last_dim_is_batch=True)
    if name in ARD:
        agree(both(KERNELS[name], ard_num_dims=D), X, Y, last_dim_is_batch=True)


@pytest.mark.filterwarnings("ignore:The last_dim_is_batch:DeprecationWarning")
def test_features_as_a_batch_of_a_wendland_function():
    """Where GPyTorch's polynomial is not the published one: each is positive definite in as many features."""
    kernel = both(KERNELS["PiecewisePolynomial 2"])[0]
    got = kernel(X, last_dim_is_batch=True).to_dense()
    for d in range(D):
        r = (X[:, None, d] - X[None, :, d]).abs() / kernel.lengthscale
        j = D // 2 + 3
        want = (1 - r).clamp(min=0) ** (j + 2) * ((j**2 + 4 * j + 3) * r**2 + (3 * j + 6) * r + 3) / 3
        torch.testing.assert_close(got[d], want)


@pytest.mark.parametrize("name", KERNELS)
def test_no_matrix_is_stored(name):
    """Also of a few points: a formula, or the two factors of a linear kernel."""
    matrix = both(KERNELS[name])[0](X[:2], Y[:2]).evaluate_kernel()
    kinds = (ours.KernopsLinearOperator,) if name != "Linear" else (MatmulLinearOperator,)
    assert isinstance(matrix, kinds)


@pytest.mark.parametrize("name", KERNELS)
def test_state_dicts_are_gpytorchs(name):
    mine, reference = both(KERNELS[name], batch_shape=torch.Size([2]))
    assert list(mine.state_dict()) == list(reference.state_dict())
    again = KERNELS[name][0](batch_shape=torch.Size([2])).double()
    again.load_state_dict(reference.state_dict())
    assert torch.equal(again(X).to_dense(), mine(X).to_dense())
    assert torch.equal(pickle.loads(pickle.dumps(mine))(X).to_dense(), mine(X).to_dense())


def test_priors_and_constraints_are_gpytorchs():
    settings = {
        "lengthscale_prior": gpytorch.priors.GammaPrior(3.0, 6.0),
        "lengthscale_constraint": gpytorch.constraints.Interval(0.1, 2.0),
    }
    kernel, reference = ours.RBFKernel(**settings), gpytorch.kernels.RBFKernel(**settings)
    assert [n for n, *_ in kernel.named_priors()] == [n for n, *_ in reference.named_priors()] != []
    kernel.lengthscale = reference.lengthscale = 0.7
    assert torch.equal(kernel.raw_lengthscale, reference.raw_lengthscale)


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_a_length_scale_that_is_not_positive(value):
    kernel = ours.RBFKernel()
    if value < 0:
        with pytest.raises(RuntimeError, match="out of bounds"):
            kernel.lengthscale = value
    else:  # GPyTorch takes it, as a raw value of -inf
        kernel.lengthscale = value
        with pytest.raises(ValueError, match="lengthscale of RBFKernel must be finite and > 0"):
            kernel(X.float()).to_dense()
    free = gpytorch.constraints.Interval(-2.0, 2.0)  # which lets it through
    kernel = ours.MaternKernel(lengthscale_constraint=free)
    kernel.lengthscale = value
    with pytest.raises(ValueError, match="lengthscale of MaternKernel must be finite and > 0"):
        kernel(X.float()).to_dense()


def test_points_that_do_not_fit():
    kernel = ours.RBFKernel()
    with pytest.raises(RuntimeError, match="same number of dimensions"):
        kernel(X.float(), Y[:, :2].float()).to_dense()
    with pytest.raises(ValueError, match="float64.*float32|float32.*float64"):
        kernel(X, Y).to_dense()
    with pytest.raises(ValueError, match="float64.*float32|float32.*float64"):
        kernel.double()(X, Y.float()).to_dense()
    with pytest.raises(ValueError, match="operator's dtype torch.float64; got torch.float32"):
        kernel(X, Y) @ torch.ones(N, 1)
    with pytest.raises(RuntimeError, match="ard_num_dims"):
        ours.RBFKernel(ard_num_dims=2)(X.float()).to_dense()
    with pytest.raises(RuntimeError, match="ard_num_dims=2 features; got 3"), gpytorch.settings.debug(False):
        ours.SpectralMixtureKernel(num_mixtures=2, ard_num_dims=2)(X.float()).to_dense()


def test_formulas_that_do_not_fit():
    with pytest.raises(TypeError, match="function of two LazyTensors; got str"):
        ours.FormulaKernel("rbf")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="function must return a LazyTensor"):
        ours.FormulaKernel(lambda x, y: 1.0)(X).to_dense()
    with pytest.raises(ValueError, match="one number a pair; got vectors of dimension 3"):
        ours.FormulaKernel(lambda x, y: x - y)(X).to_dense()
    with pytest.raises(ValueError, match="'forward' cannot be the name"):
        ours.FormulaKernel(smooth, {"forward": 1.0})
    with pytest.raises(ValueError, match="no parameter 'width'; there are scale"):
        ours.FormulaKernel(smooth, {"scale": 1.0}, constraints={"width": gpytorch.constraints.Positive()})
    with pytest.raises(ValueError, match=r"scale must be a number or numbers \(K,\); got shape \(2, 2\)"):
        ours.FormulaKernel(smooth, {"scale": torch.ones(2, 2)})


def test_a_formulas_parameters_are_set_and_constrained():
    bounds = {"tail": gpytorch.constraints.Interval(0.5, 3.0)}
    kernel = ours.FormulaKernel(smooth, {"scale": [1.0, 2.0, 3.0], "tail": 2.0}, constraints=bounds)
    assert {name for name, _ in kernel.named_parameters()} == {"raw_scale", "raw_tail"}
    torch.testing.assert_close(kernel.scale, torch.tensor([1.0, 2.0, 3.0]))
    kernel.tail = 1.0
    kernel.initialize(scale=torch.tensor([0.5, 0.5, 1.0]))
    torch.testing.assert_close(kernel.tail, torch.tensor([1.0]))
    torch.testing.assert_close(kernel.scale, torch.tensor([0.5, 0.5, 1.0]))
    with pytest.raises(RuntimeError, match="out of bounds"):
        kernel.tail = 4.0
    with pytest.raises(AttributeError, match="no attribute 'width'"):
        _ = kernel.width
