"""linear_operator's own test cases of an operator, for ours: square and rectangular, alone and in batches."""

from __future__ import annotations

from unittest import TestCase

import torch
from linear_operator.test.linear_operator_test_case import LinearOperatorTestCase, RectangularLinearOperatorTestCase

from kernops.gpytorch import DerivativesLinearOperator, KernopsLinearOperator
from kernops.kernels import RBF, Constant
from kernops.operators import DerivativesOperator, KernelOperator

Tensor = torch.Tensor


def squared_exponential(x: Tensor, y: Tensor, scale: Tensor, length: Tensor) -> Tensor:
    """The reference; parameters have shapes (*B, 1) and (*B, 1) or (*B, D)."""
    d = (x[..., :, None, :] - y[..., None, :, :]) / length[..., None, None, :]
    return scale[..., None] * (-d.square().sum(-1) / 2).exp()


def points(*shape: int) -> Tensor:
    """Points at distances of about the length scale, so that matrices are well conditioned."""
    grid = torch.arange(shape[-2], dtype=torch.float32)[:, None] * torch.tensor([1.0, 0.3, -0.5])[: shape[-1]]
    return grid + 0.2 * torch.randn(*shape)


class TestSquare(LinearOperatorTestCase, TestCase):
    """One matrix of points with themselves, which are one tensor."""

    seed = 0
    should_test_sample = True
    batch: tuple[int, ...] = ()

    def parameters(self) -> tuple[Tensor, Tensor]:
        return torch.tensor([2.5]), torch.tensor([0.9])

    def create_linear_op(self) -> KernopsLinearOperator:
        scale, length = self.parameters()
        x = points(*self.batch, 6, 2)
        scale, length, x = (t.requires_grad_() for t in (scale, length, x))
        return KernopsLinearOperator.of(KernelOperator(Constant(scale) * RBF(length), x))

    def evaluate_linear_op(self, linear_op: KernopsLinearOperator) -> Tensor:
        x, scale, length = linear_op.representation()
        return squared_exponential(x, x, scale, length)


class TestSquareBatch(TestSquare):
    batch = (2,)

    def parameters(self) -> tuple[Tensor, Tensor]:
        return torch.tensor([[2.5], [4.0]]), torch.tensor([0.9])


class TestSquareDoubleBatch(TestSquare):
    batch = (3, 2)
    skip_slq_tests = True  # their tolerances are for a few matrices
    should_test_sample = False


class TestBatchOfParameters(TestSquare):
    """One set of points for three models."""

    def parameters(self) -> tuple[Tensor, Tensor]:
        return torch.tensor([2.5]), torch.tensor([[0.6], [0.9], [1.1]])


class TestEqualTensors(TestSquare):
    """Rows and columns that are equal, and not the same tensor."""

    should_test_sample = False

    def create_linear_op(self) -> KernopsLinearOperator:
        scale, length = self.parameters()
        x = points(6, 2)
        tensors = (t.requires_grad_() for t in (scale, length, x, x.clone()))
        scale, length, x, y = tensors
        return KernopsLinearOperator.of(KernelOperator(Constant(scale) * RBF(length), x, y))

    def evaluate_linear_op(self, linear_op: KernopsLinearOperator) -> Tensor:
        x, y, scale, length = linear_op.representation()
        return squared_exponential(x, y, scale, length)


class TestRectangle(RectangularLinearOperatorTestCase, TestCase):
    seed = 0
    shapes: tuple[tuple[int, ...], tuple[int, ...]] = ((5, 2), (7, 2))
    length: tuple = (0.9, 1.2)

    def create_linear_op(self) -> KernopsLinearOperator:
        values = torch.tensor([1.5]), torch.tensor(self.length), *(points(*s) for s in self.shapes)
        scale, length, x, y = (t.requires_grad_() for t in values)
        return KernopsLinearOperator.of(KernelOperator(Constant(scale) * RBF(length), x, y))

    def evaluate_linear_op(self, linear_op: KernopsLinearOperator) -> Tensor:
        x, y, scale, length = linear_op.representation()
        return squared_exponential(x, y, scale, length)


class TestRectangularBatch(TestRectangle):
    shapes = ((2, 5, 2), (7, 2))


class TestRectangularDoubleBatch(TestRectangle):
    shapes = ((3, 1, 5, 2), (2, 7, 2))


def with_gradients(x: Tensor, y: Tensor, scale: Tensor, length: Tensor) -> Tensor:
    """The covariances of values and gradients by the squared exponential above, value first at each point."""
    d = (x[..., :, None, :] - y[..., None, :, :]) / length.square()[..., None, None, :]
    each = d.shape[-1]
    ones = torch.eye(each, dtype=x.dtype) / length.square()[..., None, None, None, :].expand(*d.shape, -1)
    top = torch.cat([torch.ones_like(d[..., :1]), d], -1)[..., None, :]
    rest = torch.cat([-d[..., None], ones - d[..., :, None] * d[..., None, :]], -1)
    blocks = squared_exponential(x, y, scale, length)[..., None, None] * torch.cat([top, rest], -2)
    return blocks.transpose(-3, -2).flatten(-4, -3).flatten(-2)


class TestDerivatives(LinearOperatorTestCase, TestCase):
    """Six rows: the value and two derivatives at each of two points."""

    seed = 0
    should_test_sample = True
    batch: tuple[int, ...] = ()

    def create_linear_op(self) -> DerivativesLinearOperator:
        values = torch.tensor([2.5]), torch.tensor([0.9]), 1.5 * points(*self.batch, 2, 2)
        scale, length, x = (t.requires_grad_() for t in values)
        return DerivativesLinearOperator.of(DerivativesOperator(Constant(scale) * RBF(length), x))

    def evaluate_linear_op(self, linear_op: DerivativesLinearOperator) -> Tensor:
        x, scale, length = linear_op.representation()
        return with_gradients(x, x, scale, length)


class TestDerivativesBatch(TestDerivatives):
    batch = (2,)


class TestDerivativesRectangularBatch(RectangularLinearOperatorTestCase, TestCase):
    seed = 0

    def create_linear_op(self) -> DerivativesLinearOperator:
        values = torch.tensor([1.5]), torch.tensor([0.9, 1.2]), points(2, 2, 2), points(3, 2)
        scale, length, x, y = (t.requires_grad_() for t in values)
        return DerivativesLinearOperator.of(DerivativesOperator(Constant(scale) * RBF(length), x, y))

    def evaluate_linear_op(self, linear_op: DerivativesLinearOperator) -> Tensor:
        x, y, scale, length = linear_op.representation()
        return with_gradients(x, y, scale, length)
