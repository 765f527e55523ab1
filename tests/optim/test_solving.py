"""Solvers, eigenvalues and products of curvature against matrices that are formed whole."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.functional import hessian, jacobian

from tierstore.optim.curvature import (
    bicgstab,
    conjugate_gradients,
    dense_of,
    extreme_eigenvalues,
    flat,
    gauss_newton_product,
    hessian_product,
)


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def symmetric(values: Any) -> Tensor:
    """With these eigenvalues, and random vectors."""
    axes = torch.linalg.qr(randn(len(values), len(values), seed=3)).Q
    return axes @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ axes.T


DEFINITE, INDEFINITE = symmetric(np.linspace(0.1, 4, 12)), symmetric(np.linspace(-2, 3, 12))
LOPSIDED = DEFINITE + torch.triu(torch.ones(12, 12, dtype=torch.float64), 1) / 9


@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize(
    ("solver", "matrix"),
    [(conjugate_gradients, DEFINITE), (bicgstab, DEFINITE), (bicgstab, INDEFINITE), (bicgstab, LOPSIDED)],
)
def test_solvers_solve(solver: Any, matrix: Tensor, *, is_warm: bool) -> None:
    right, start = randn(2, 12, seed=1)
    iterates = itertools.islice(solver(matrix.mv, right, start * is_warm), 72)
    found = next(each for each in iterates if each.residual.norm() < 1e-8)
    np.testing.assert_allclose(found.solution, np.linalg.solve(matrix.numpy(), right.numpy()), atol=1e-4)
    torch.testing.assert_close(found.image, matrix @ found.direction)


@pytest.mark.parametrize("matrix", [DEFINITE, INDEFINITE, -DEFINITE, symmetric([2.0] * 5 + [-1.0] * 5)])
def test_the_ends_of_a_spectrum_are_found(matrix: Tensor) -> None:
    found = extreme_eigenvalues(matrix.mv, randn(len(matrix), seed=2), iterations=50, tolerance=1e-6)
    np.testing.assert_allclose(found, np.linalg.eigvalsh(matrix.numpy())[[0, -1]], rtol=1e-4)


def test_products_are_those_of_matrices_formed_whole() -> None:
    """Also of a weight that is not used, and of one that the loss is linear in."""
    others = [nn.Parameter(torch.ones(n).double(), requires_grad=n != 4) for n in (2, 1, 0, 4)]
    dense = dense_of([nn.Parameter(randn(3, 4, seed=0)), nn.Parameter(randn(4, 2, seed=1)), *others])
    inputs, labels, vector = randn(7, 3, seed=4), torch.arange(7) % 2, randn(23, seed=5)

    def outputs_at(weights: Tensor) -> Tensor:
        return torch.tanh(inputs @ weights[:12].view(3, 4)) @ weights[12:20].view(4, 2)

    def loss_of(outputs: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs.view(7, 2), labels)

    outputs = torch.tanh(inputs @ dense[0]) @ dense[1]
    loss = loss_of(outputs) + 3 * others[1].sum()
    whole = hessian(lambda each: loss_of(outputs_at(each)) + 3 * each[22], flat(dense))
    torch.testing.assert_close(hessian_product(loss, dense)(vector), whole @ vector)
    slopes = jacobian(outputs_at, flat(dense)).reshape(14, 23)
    whole = slopes.T @ hessian(loss_of, outputs.detach().reshape(-1)) @ slopes
    torch.testing.assert_close(gauss_newton_product(loss, outputs, dense)(vector), whole @ vector)
    with pytest.raises(ValueError, match="does not depend on them"):
        gauss_newton_product(loss, outputs.clone(), dense)
