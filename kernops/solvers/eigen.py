"""A few eigenpairs of a symmetric matrix that is known by its products only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .preconditioners import normal

Tensor = torch.Tensor


@dataclass(frozen=True)
class Eigenpairs:
    """Eigenvalues (*B, k), largest first, eigenvectors (*B, N, k), and |A u - λ u| / |λ₁| (*B, k)."""

    values: Tensor
    vectors: Tensor
    residual: Tensor


def largest_eigenpairs(
    matvec: Callable[[Tensor], Tensor],
    shape: tuple[int, ...],
    k: int,
    *,
    like: Tensor,
    tol: float,
    max_iter: int,
    generator: torch.Generator,
) -> Eigenpairs:
    """The ``k`` algebraically largest eigenvalues of a symmetric A and their eigenvectors.

    Block Lanczos with full orthogonalisation and thick restarts: the matrix is projected on a basis that grows by one
    block for each product and shrinks to the best Ritz vectors when it is full (Zhou and Saad, Block Krylov-Schur
    method for large symmetric eigenvalue problems, 2008).

    Args:
        matvec: the product of A with vectors (*B, N, E).
        shape: (*B, N).
        k: how many, at most N.
        like: a tensor of the dtype and device.
        tol: residual, relative to the largest eigenvalue found, at which a pair counts as found.
        max_iter: most products with A, of a block of vectors each.
        generator: of the first block, on that device.
    """
    n = shape[-1]
    width = min(n, k + 4)
    room = min(n, 6 * width)
    block, _ = torch.linalg.qr(normal((*shape, width), like, generator))
    basis, image = block, matvec(block)
    for step in range(1, max_iter + 1):
        ritz, rotation = torch.linalg.eigh(_symmetric(basis.mT @ image))
        ritz, rotation = ritz.flip(-1)[..., :width], rotation.flip(-1)[..., :width]
        vectors, images = basis @ rotation, image @ rotation
        errors = images - vectors * ritz[..., None, :]
        scale = ritz.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(like.dtype).tiny)
        residual = torch.linalg.vector_norm(errors, dim=-2) / scale
        done = bool((residual[..., :k] <= tol).all())
        if done or step == max_iter or basis.shape[-1] >= n:
            break
        if basis.shape[-1] + width > room:
            basis, image = vectors, images
        block = _new_directions(errors, basis)[..., : n - basis.shape[-1]]
        basis, image = torch.cat([basis, block], -1), torch.cat([image, matvec(block)], -1)
    return Eigenpairs(ritz[..., :k], vectors[..., :k], residual[..., :k])


def _symmetric(a: Tensor) -> Tensor:
    return (a + a.mT) / 2


def _new_directions(w: Tensor, basis: Tensor) -> Tensor:
    """An orthonormal block of the directions of ``w`` that are orthogonal to ``basis``."""
    for _ in range(2):  # the second time for what rounding left
        w = w / torch.linalg.vector_norm(w, dim=-2, keepdim=True).clamp(min=torch.finfo(w.dtype).tiny)
        w = w - basis @ (basis.mT @ w)
        w, _ = torch.linalg.qr(w)
    w = w - basis @ (basis.mT @ w)
    return torch.linalg.qr(w)[0]
