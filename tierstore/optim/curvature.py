"""Curvature of a loss at weights: products with vectors by automatic differentiation, which form no matrix, and solvers
and eigenvalues by such products alone.

A solver is a generator, which yields after each product; its caller bounds it, and ends it.

Shape legend: P, the elements of all parameters laid end to end.
"""

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]
"""A matrix as what it does to a vector, [P] to [P]."""


def dense_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Those that are trained and have elements. One without stands for rows of tables. TypeError: not of tensors."""
    given = list(parameters)
    if isinstance(parameters, Tensor) or not all(isinstance(each, Tensor) for each in given):
        raise TypeError("parameters must be a list of tensors, as model.parameters()")
    return [each for each in given if each.requires_grad and each.numel()]


class Evaluation:
    """Of a loss, by a closure: within, lookups of this thread are for it. Rows that they look up are not trained before
    it is over; if they ``are_constant``, never: such lookups train, admit, count and write nothing."""

    def __init__(self, *, are_constant: bool, is_over: bool = False) -> None:
        self.are_constant, self.is_over = are_constant, is_over

    def __enter__(self) -> "Evaluation":
        self._before, OF_THREAD.evaluation = OF_THREAD.evaluation, self
        return self

    def __exit__(self, *_: object) -> None:
        OF_THREAD.evaluation, self.is_over = self._before, True

    def require(self, *, is_over: bool) -> None:
        """RuntimeError unless so: a closure called backward."""
        if not is_over:
            raise RuntimeError("the closure of HessianFree called backward, which the step does: return the loss alone")


class _OfThread(threading.local):
    evaluation = Evaluation(are_constant=False, is_over=True)


OF_THREAD: Final = _OfThread()


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """A copy of all elements, [P]."""
    return torch.cat([each.detach().reshape(-1) for each in tensors])


def split(vector_P: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Views in the parameters' shapes."""
    parts = torch.split(vector_P, [each.numel() for each in parameters])
    return [part.view(each.shape) for part, each in zip(parts, parameters, strict=True)]


@torch.no_grad()
def put(vector_P: Tensor, parameters: Sequence[Tensor]) -> None:
    """Set the parameters' values, unseen by autograd: a graph made before holds once the old values are back."""
    for part, each in zip(split(vector_P, parameters), parameters, strict=True):
        each.data.copy_(part)


def require_loss(loss: object) -> Tensor:
    """float []; TypeError: it is none that gradients can be taken of."""
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
        return loss.reshape(())
    found = f"a tensor {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
    raise TypeError(
        f"a loss must be a tensor of one element that depends on what is trained, not {found}: take its mean() or "
        "sum(), and leave out item(), detach() and no_grad()"
    )


def slopes(loss: Tensor, parameters: Sequence[Tensor], *, create_graph: bool = False) -> Sequence[Tensor]:
    """Gradients of a loss, whose graph stays. ValueError: one is sparse."""
    found = torch.autograd.grad(loss, parameters, retain_graph=True, create_graph=create_graph, materialize_grads=True)
    if sparse := [list(each.shape) for each in found if each.is_sparse]:
        raise ValueError(
            f"gradients of a parameter {sparse[0]} are sparse, and torch has no second ones: make its module with "
            "sparse=False, or convert it into a table"
        )
    return found


def hessian_product(loss: Tensor, parameters: Sequence[Tensor]) -> Product:
    """The Hessian of a loss, float [], by a second backward pass through the first (Pearlmutter, "Fast exact
    multiplication by the Hessian", 1994). The loss's graph stays."""
    gradients = slopes(loss, parameters, create_graph=True)
    return lambda vector_P: flat(_pulled_back(gradients, parameters, split(vector_P, parameters)))


def gauss_newton_product(loss: Tensor, outputs: Tensor, parameters: Sequence[Tensor]) -> Product:
    """The generalized Gauss-Newton matrix ``J' L J``: J the Jacobian of a model's outputs, L the Hessian by the outputs
    (Schraudolph, "Fast curvature matrix-vector products", 2002). ``J v`` is the derivative of ``J' u`` by u, so that
    backward passes suffice. ValueError: the loss, float [], does not depend on ``outputs``."""
    (slope,) = torch.autograd.grad(loss, outputs, create_graph=True, allow_unused=True)
    if slope is None:
        raise ValueError("outputs: the loss does not depend on them; return the tensor it was computed from")
    covector = torch.zeros_like(outputs, requires_grad=True)
    pulled = torch.autograd.grad(outputs, parameters, covector, create_graph=True, materialize_grads=True)

    def product(vector_P: Tensor) -> Tensor:
        pushed = _pulled_back(pulled, [covector], split(vector_P, parameters))
        return flat(_pulled_back([outputs], parameters, _pulled_back([slope], [outputs], pushed)))

    return product


def _pulled_back(outputs: Sequence[Tensor], inputs: Sequence[Tensor], vectors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The sum of products of vectors with the outputs' Jacobians; constants, as slopes of what is linear, add 0."""
    pairs = [pair for pair in zip(outputs, vectors, strict=True) if pair[0].requires_grad]
    if not pairs:
        return [torch.zeros_like(each) for each in inputs]
    of, by = zip(*pairs, strict=True)
    return torch.autograd.grad(of, inputs, by, retain_graph=True, materialize_grads=True)


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
