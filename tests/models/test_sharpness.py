"""How sharp a minimum is, against the Hessian formed whole and every corner of the box."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tierstore
from tierstore.models import box_sharpness, hessian_eigenvalues, loss_along_line


class Small:
    """A net of two weights with 9 elements, its loss in three parts, and the loss as a function of the elements."""

    def __init__(self, steps: int) -> None:
        torch.manual_seed(0)
        self.inputs = torch.randn(30, 2, dtype=torch.float64)
        self.targets = torch.sin(self.inputs.sum(1)) + torch.randn(30, dtype=torch.float64) / 5
        self.weights = [nn.Parameter(torch.randn(size, dtype=torch.float64)) for size in (6, 3)]
        optimizer = torch.optim.Adam(self.weights, lr=0.03)
        for _ in range(steps):
            optimizer.zero_grad()
            self.loss_at(torch.cat(self.weights)).backward()
            optimizer.step()
        self.at = torch.cat(self.weights).detach()

    def errors_at(self, weights: Tensor) -> Tensor:
        return (torch.tanh(self.inputs @ weights[:6].view(2, 3)) @ weights[6:] - self.targets).square()

    def loss_at(self, weights: Tensor) -> Any:
        return self.errors_at(weights).mean()

    def losses(self) -> list[Tensor]:
        return [each.sum() / 30 for each in self.errors_at(torch.cat(self.weights)).split(10)]

    def highest_corner(self, axes: Tensor, bound: Tensor) -> float:
        signs = torch.tensor(list(itertools.product((-1, 1), repeat=len(bound))), dtype=torch.float64)
        base = float(self.loss_at(self.at))
        return 100 * (max(float(self.loss_at(self.at + axes @ (bound * each))) for each in signs) - base) / (1 + base)


@pytest.mark.parametrize("steps", [0, 600])
def test_eigenvalues_are_those_of_the_whole_hessian(steps: int) -> None:
    small = Small(steps)
    whole = np.linalg.eigvalsh(torch.autograd.functional.hessian(small.loss_at, small.at).numpy())
    found = hessian_eigenvalues(small.losses, small.weights)
    np.testing.assert_allclose(found, whole[[0, -1]], atol=1e-4 * abs(whole).max())


@pytest.mark.parametrize(("steps", "epsilon", "iterations"), [(0, 1e-3, 1), (600, 5e-4, 20)])
def test_sharpness_is_the_rise_to_the_highest_corner(steps: int, epsilon: float, iterations: int) -> None:
    """On a slope, and at a minimum, around which other corners are local maxima; in the whole space and a subspace."""
    small, options = Small(steps), {"epsilon": epsilon, "iterations": iterations, "seed": 10}
    expected = small.highest_corner(torch.eye(9, dtype=torch.float64), epsilon * (small.at.abs() + 1))
    assert box_sharpness(small.losses, small.weights, **options) == pytest.approx(expected, rel=1e-4)
    drawn = torch.randn(9, 4, generator=torch.Generator().manual_seed(10), dtype=torch.float64)
    axes = drawn / drawn.norm(dim=0)
    place = torch.from_numpy(np.linalg.pinv(axes.numpy())) @ small.at
    expected = small.highest_corner(axes, epsilon * (place.abs() + 1))
    assert box_sharpness(small.losses, small.weights, dims=4, **options) == pytest.approx(expected, rel=1e-4)


def test_a_hill_inside_the_box_is_climbed() -> None:
    """By the curvature that L-BFGS learns: corners are lower. One coordinate's top is out of the box."""
    at = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    top, bends = torch.tensor([[0.2e-3, -0.5e-3, 0.7e-3, 2e-3], [1e3, 1e4, 1e5, 2e3]], dtype=torch.float64)

    def losses() -> list[Tensor]:
        return [1 - (bends * (at - top).square()).sum()]

    base, highest = losses()[0].item(), 1 - float(bends[3]) * 1e-6
    found = box_sharpness(losses, [at])
    assert found == pytest.approx(100 * (highest - base) / (1 + base), rel=1e-4)


def test_the_loss_along_a_line_is_that_of_weights_on_it() -> None:
    small, other, at = Small(0), Small(9), [-1.0, 0.0, 0.5, 1.0, 2.0]
    found = loss_along_line(small.losses, small.weights, small.weights, other.weights, at)
    expected = [float(small.loss_at((1 - each) * small.at + each * other.at)) for each in at]
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert torch.equal(torch.cat(small.weights), small.at)
    with pytest.raises(ValueError, match="elements"):
        loss_along_line(small.losses, small.weights, small.weights[:1], other.weights, at)


def test_weights_come_back_after_an_error() -> None:
    small = Small(0)

    def losses() -> list[Tensor]:
        assert torch.equal(torch.cat(small.weights), small.at), "moved"
        return small.losses()

    with pytest.raises(AssertionError, match="moved"):
        box_sharpness(losses, small.weights)
    assert torch.equal(torch.cat(small.weights), small.at)


RULES = [
    tierstore.DynamicIds(eviction=tierstore.ids.TTL(steps=2), unseen="init"),
    tierstore.DynamicIds(admission=tierstore.ids.Frequency(2), eviction=tierstore.ids.LFU(half_life_steps=2)),
    None,
]
MEASURES: list[Any] = [
    lambda losses, dense, _: hessian_eigenvalues(losses, dense, iterations=3),
    lambda losses, dense, _: box_sharpness(losses, dense, iterations=2),
    lambda losses, dense, _: loss_along_line(losses, dense, dense, dense, [0.0, 0.5]),
    lambda losses, dense, known: tierstore.optim.HessianFree(dense).step(known, lambda: losses()[0]),
]


@pytest.mark.parametrize("measure", MEASURES, ids=["eigenvalues", "box", "line", "curvature"])
@pytest.mark.parametrize("rules", RULES, ids=str)
def test_what_measures_trains_admits_counts_evicts_and_writes_nothing(rules: Any, measure: Any) -> None:
    """It is given the dense weights alone, and ids that were not trained; its lookups are those of modules with
    ``padding_idx``, too, which write that row where they train."""
    with tierstore.open(cold="memory", ddr="4MiB") as store:
        table = store.create_table(tierstore.TableConfig(name="t", num_embeddings=8, embedding_dim=4, ids=rules))
        torch.manual_seed(0)
        bag, dense = tierstore.TieredEmbeddingBag(table), nn.Linear(4, 1)
        both = [bag, tierstore.TieredEmbedding(table, padding_idx=7)]

        def loss(ids: Tensor, modules: Any) -> Tensor:
            return sum(dense(module(ids)).square().mean() for module in modules)  # type: ignore[return-value]

        for _ in range(3):
            loss(torch.arange(6)[None], [bag]).backward()
        if table.ids is not None:
            store.commit()

        def state() -> list[Any]:
            own = [] if table.ids is None else [table.ids.words().tolist(), table.id_stats()]
            read = table.read(torch.arange(8)).tolist()
            return [own, read, [part.tolist() for part in table.written()], table.state, store.changed_tables]

        before, ids = state(), (torch.arange(6, 8) if table.ids is None else torch.arange(100, 108))[None]
        measure(lambda: [loss(ids, both)], list(dense.parameters()), lambda: dense(torch.ones(1, 4)).sum())
        assert state() == before
        loss(ids, both).backward()
        assert state() != before, "rows are trained again"


def test_measures_of_no_loss_are_errors_and_of_nan_are_nan() -> None:
    weight = nn.Parameter(torch.ones(3))
    wrong: list[tuple[Any, Any, str]] = [
        (lambda: [weight.sum().item()], [weight], "a loss must be a tensor .*not float"),
        (lambda: [weight], [weight], r"one element .* not a tensor \[3\]"),
        (lambda: [weight.detach().sum()], [weight], "no_grad"),
        (lambda: [weight.sum()], [], "none that is trained"),
        (lambda: [weight.sum()], weight, "a list of tensors"),
    ]
    for losses, parameters, match in wrong:
        for measure in (box_sharpness, hessian_eigenvalues):
            with pytest.raises((TypeError, ValueError), match=match):
                measure(losses, parameters)
    with pytest.raises(ValueError, match="iterations"):
        hessian_eigenvalues(lambda: [weight.sum()], [weight], iterations=0)
    for losses in (lambda: [weight.square().sum() * np.nan], lambda: [weight.square().sum() * np.inf]):
        assert np.isnan([*hessian_eigenvalues(losses, [weight]), box_sharpness(losses, [weight])]).all()
    assert np.isnan(box_sharpness(lambda: [(weight - 1).sum().sqrt() + weight.sum()], [weight])), "NaN beside it"
