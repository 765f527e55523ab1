"""Solvers and eigenvalues of matrices of which only products with vectors are known, [P] to [P].

A solver is a generator, which yields after each product; its caller bounds it, and ends it.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .curvature import Product


class Iterate(NamedTuple):
    """Of ``A x = b`` after a move: x; ``b - A x``; the move's direction, and A times it. Where the product of these two
    is not above 0, the move meant nothing to conjugate gradients; where one is NaN, the caller is to end."""

    solution: Tensor
    residual: Tensor
    direction: Tensor
    image: Tensor


def conjugate_gradients(product: Product, right: Tensor, start: Tensor) -> Iterator[Iterate]:
    """Of a positive definite matrix (Hestenes and Stiefel, 1952)."""
    solution, residual = start, right - product(start)
    direction, square = residual, residual @ residual
    while square != 0:
        image = product(direction)
        length = square / (direction @ image)
        solution, residual = solution + length * direction, residual - length * image
        yield Iterate(solution, residual, direction, image)
        square, before = residual @ residual, square
        direction = residual + square / before * direction


def bicgstab(product: Product, right: Tensor, start: Tensor) -> Iterator[Iterate]:
    """Stabilised bi-conjugate gradients, of indefinite matrices too (van der Vorst, "Bi-CGSTAB: a fast and smoothly
    converging variant of Bi-CG", 1992). An iteration is two moves: in its direction, and along the residual left."""
    solution, residual = start, right - product(start)
    shadow = direction = residual
    overlap = shadow @ residual
    while overlap != 0:
        image = product(direction)
        length = overlap / (shadow @ image)
        solution, left = solution + length * direction, residual - length * image
        yield Iterate(solution, left, direction, image)
        of_left = product(left)
        smoothing = (of_left @ left) / (of_left @ of_left)
        solution, residual = solution + smoothing * left, left - smoothing * of_left
        yield Iterate(solution, residual, left, of_left)
        overlap, before = shadow @ residual, overlap
        direction = residual + overlap / before * length / smoothing * (direction - smoothing * image)


class Eigenvalues(NamedTuple):
    """The ends of a spectrum."""

    smallest: float
    largest: float


def extreme_eigenvalues(product: Product, start: Tensor, *, iterations: int, tolerance: float) -> Eigenvalues:
    """Of a symmetric matrix, by Lanczos' iteration with full orthogonalization (Golub and Van Loan, "Matrix
    Computations", 10.3), whose vectors take P for each iteration. It begins with ``start``, a random [P], and ends when
    the residuals of both are within ``tolerance`` of the larger one's size. NaN where a product is not finite."""
    most = min(iterations, len(start))
    vectors_KP = start.new_empty(most + 1, len(start))
    vectors_KP[0] = start / start.norm()
    tridiagonal = torch.zeros(most + 1, most + 1, dtype=torch.float64)
    ends = torch.zeros(2)
    for step in range(most):
        image, known = product(vectors_KP[step]), vectors_KP[: step + 1]
        tridiagonal[step, step] = float(image @ vectors_KP[step])
        if not image.isfinite().all():
            return Eigenvalues(math.nan, math.nan)
        for _ in range(2):  # once leaves rounding errors that make copies of an eigenvalue
            image = image - known.T @ (known @ image)
        norm = float(image.norm())
        values, parts = torch.linalg.eigh(tridiagonal[: step + 1, : step + 1])
        ends = values[[0, -1]]
        if norm * float(parts[-1, [0, -1]].abs().max()) <= tolerance * float(ends.abs().max()):
            break
        tridiagonal[step, step + 1] = tridiagonal[step + 1, step] = norm
        vectors_KP[step + 1] = image / norm
    return Eigenvalues(*ends.tolist())
