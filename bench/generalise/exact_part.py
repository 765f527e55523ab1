"""Part "exact": solver, eigenvalues and sharpness beside matrices formed whole; saddles, with and without negative
curvature."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.functional import hessian

from tierstore.models import box_sharpness, hessian_eigenvalues
from tierstore.optim import HessianFree
from tierstore.optim.krylov import bicgstab

from ..common import Goal, Part, Run, Table, Told

__all__ = ["PART", "Saddle", "monkey_saddle", "net_of_zeros"]

Saddle = tuple[Sequence[nn.Parameter], Callable[[], Any]]
"""Weights, and a closure for ``HessianFree``."""
_WITHIN: Final = 1e-4
_SHARPNESS, _OF_PAPER = "sharpness, 50 iterations", "sharpness, 10 iterations as in the paper"
_HIDDEN: Final = 3
_SADDLE_STEPS: Final = 30


class _Small:
    """A trained net of 9 or more weights in two layers, and its loss as a function of all of them."""

    def __init__(self, inputs: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        self.inputs = drawn(200, inputs)
        self.targets = torch.sin(self.inputs.sum(1)) + drawn(200) / 5
        self.weights: list[Tensor] = [nn.Parameter(drawn(inputs * _HIDDEN)), nn.Parameter(drawn(_HIDDEN))]
        optimizer = torch.optim.Adam(self.weights, lr=0.03)
        for _ in range(600):
            optimizer.zero_grad()
            self.loss_at(torch.cat(self.weights)).backward()
            optimizer.step()
        self.at = torch.cat(self.weights).detach()
        self.whole = hessian(self.loss_at, self.at).numpy()  # type: ignore[no-untyped-call]

    def loss_at(self, weights: Tensor) -> Any:
        hidden = torch.tanh(self.inputs @ weights[:-_HIDDEN].view(-1, _HIDDEN))
        return (hidden @ weights[-_HIDDEN:] - self.targets).square().mean()

    def losses(self) -> list[Tensor]:
        return [self.loss_at(torch.cat(self.weights))]

    def highest_corner(self, epsilon: float) -> float:
        bound, base = epsilon * (self.at.abs() + 1), float(self.loss_at(self.at))
        signs = itertools.product((-1.0, 1.0), repeat=len(bound))
        highest = max(float(self.loss_at(self.at + bound * torch.tensor(each, dtype=torch.float64))) for each in signs)
        return 100 * (highest - base) / (1 + base)


def _off(found: Any, expected: Any) -> float:
    """By how much of the largest that is expected."""
    return float(np.abs(np.subtract(found, expected)).max() / np.abs(expected).max())


def _solved(small: _Small) -> float:
    """Of the Hessian less a tenth of its largest eigenvalue, which is indefinite."""
    right = np.random.default_rng(0).standard_normal(len(small.at))
    matrix = small.whole - np.linalg.eigvalsh(small.whole).max() / 10 * np.eye(len(small.at))
    product = torch.from_numpy(matrix).mv
    iterates = bicgstab(product, torch.from_numpy(right), torch.zeros(len(right), dtype=torch.float64))
    found = min(itertools.islice(iterates, 40 * len(right)), key=lambda each: float(each.residual.norm()))
    return _off(found.solution.numpy(), np.linalg.solve(matrix, right))


def monkey_saddle() -> Saddle:
    """x³ - 3xy² in a bowl: on the axis y = 0 the gradient leads into the saddle, where curvature is 0."""
    at = nn.Parameter(torch.tensor([0.3, 0.0]))
    return [at], lambda: (at[0] ** 3 - 3 * at[0] * at[1] ** 2 + at.square().sum().square() / 4, at)


def net_of_zeros() -> Saddle:
    """Two layers, where the gradient is 0 and the loss is not."""
    first, last = nn.Parameter(torch.zeros(3, 4)), nn.Parameter(torch.zeros(4))
    inputs = torch.randn(32, 3, generator=torch.Generator().manual_seed(0))

    def evaluate() -> Any:
        outputs = torch.tanh(inputs @ first) @ last
        return (outputs - torch.sin(inputs.sum(1))).square().mean(), outputs

    return [first, last], evaluate


_SADDLES: Final = {"monkey saddle": monkey_saddle, "two layers at zero": net_of_zeros}


def _left(saddle: Callable[[], Any], curvature: str) -> list[float]:
    weights, evaluate = saddle()
    optimizer = HessianFree(weights, curvature=curvature, damping=0.1)  # type: ignore[arg-type]
    return [float(optimizer.step(evaluate)) for _ in range(_SADDLE_STEPS)]


def _measure(request: Run, _: dict[str, Any]) -> dict[str, Any]:
    exact: dict[str, float] = {}
    for seed in range(request.config["exact_nets"]):
        small = _Small(inputs=8, seed=seed)
        found, ends = hessian_eigenvalues(small.losses, small.weights), np.linalg.eigvalsh(small.whole)[[0, -1]]
        scale = abs(ends).max()
        tiny = _Small(inputs=2, seed=seed)
        corner = tiny.highest_corner(1e-3)
        sharp = {count: box_sharpness(tiny.losses, tiny.weights, iterations=count) for count in (10, 50)}
        off = {
            "largest eigenvalue": abs(found.largest - ends[1]) / scale,
            "smallest eigenvalue": abs(found.smallest - ends[0]) / scale,
            _SHARPNESS: _off(sharp[50], corner),
            _OF_PAPER: _off(sharp[10], corner),
            "Bi-CGSTAB's solution": _solved(tiny),
        }
        exact = {name: max(float(value), exact.get(name, 0.0)) for name, value in off.items()}
    saddles = {
        name: {curvature: _left(saddle, curvature) for curvature in ("hessian", "gauss-newton")}
        for name, saddle in _SADDLES.items()
    }
    return {"off": exact, "saddles": saddles, "nets": request.config["exact_nets"]}


def _tell(figures: dict[str, Any]) -> Told:
    rows = [[name, f"{value:.1e}"] for name, value in figures["off"].items()]
    goals = [
        Goal(name=f"{name}, off by, of {figures['nets']} nets", value=value, at_most=_WITHIN)
        for name, value in figures["off"].items()
        if name != _OF_PAPER
    ]
    left = [
        [name, *(f"{losses[at]:.4f}" for losses in own.values() for at in (0, 9, -1))]
        for name, own in figures["saddles"].items()
    ]
    columns = [
        "saddle",
        *(f"{way}, step {at}" for way in ("Bi-CGSTAB", "Gauss-Newton") for at in (0, 9, _SADDLE_STEPS - 1)),
    ]
    title = (
        f"Largest errors over {figures['nets']} trained nets, beside matrices formed whole and every corner of the box"
    )
    tables = [
        Table(title=title, columns=["", "off by"], rows=rows),
        Table(title="Loss at saddles", columns=columns, rows=left),
    ]
    return Told(tables=tables, goals=goals)


PART: Final = Part(_measure, _tell)
