"""Curvature of a loss at weights: products with vectors by automatic differentiation, which form no matrix.

Shape legend: P, the elements of all parameters laid end to end.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]
"""A matrix as what it does to a vector, [P] to [P]."""


def dense_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Those that are trained and have elements. One without stands for rows of tables."""
    return [each for each in parameters if each.requires_grad and each.numel()]


@contextlib.contextmanager
def constant_rows(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Within, lookups are constants, which train no rows: those of modules whose parameter is among these."""
    rows = [each for each in parameters if each.requires_grad and not each.numel()]
    try:
        for each in rows:
            each.requires_grad_(False)
        yield
    finally:
        for each in rows:
            each.requires_grad_(True)


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """A copy of all elements, [P]."""
    return torch.cat([each.detach().reshape(-1) for each in tensors])


def split(vector_P: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Views of a vector in the parameters' shapes."""
    parts = torch.split(vector_P, [each.numel() for each in parameters])
    return [part.view(each.shape) for part, each in zip(parts, parameters, strict=True)]


@torch.no_grad()
def put(vector_P: Tensor, parameters: Sequence[Tensor]) -> None:
    """Set the parameters' values, unseen by autograd: a graph made before holds once the old values are back."""
    for part, each in zip(split(vector_P, parameters), parameters, strict=True):
        each.data.copy_(part)


def hessian_product(loss: Tensor, parameters: Sequence[Tensor]) -> Product:
    """The Hessian of a loss, float [], by a second backward pass through the first (Pearlmutter, "Fast exact
    multiplication by the Hessian", 1994). The loss's graph stays."""
    gradients = torch.autograd.grad(loss, parameters, create_graph=True, materialize_grads=True)
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
