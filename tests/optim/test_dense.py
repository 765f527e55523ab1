"""Hessian-free steps: out of saddles, on quadratics, resumed, and beside the rows of tables."""

import copy
import itertools
import math
import pickle
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.functional import hessian, jacobian

import tierstore
from tierstore.optim import HessianFree
from tierstore.optim.curvature import (
    bicgstab,
    conjugate_gradients,
    dense_of,
    extreme_eigenvalues,
    flat,
    gauss_newton_product,
    hessian_product,
)


@pytest.mark.parametrize(("curvature", "low", "high"), [("hessian", -9.0, -1.0), ("gauss-newton", -0.01, 9.0)])
def test_negative_curvature_leaves_a_saddle_that_stalls_conjugate_gradients(curvature, low, high):
    """Of x³ - 3xy² in a bowl: on the axis y = 0 the gradient leads into the saddle, where curvature is 0."""
    at = nn.Parameter(torch.tensor([0.3, 0.0]))
    optimizer = HessianFree([at], curvature=curvature, damping=0.1)
    for _ in range(30):
        loss = optimizer.step(lambda: (at[0] ** 3 - 3 * at[0] * at[1] ** 2 + at.square().sum().square() / 4, at))
    assert low < float(loss) < high


@pytest.mark.parametrize("curvature", ["hessian", "gauss-newton"])
def test_a_step_is_newtons_with_damping_and_damping_follows_the_ratio(curvature):
    at = nn.Parameter(torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64))
    before, bends = at.detach().clone(), torch.tensor([1.0, 5.0, 0.5], dtype=torch.float64)
    optimizer = HessianFree([at], curvature=curvature, damping=0.5, tolerance=1e-12)
    loss = optimizer.step(lambda: ((bends * at.square()).sum() / 2, at))
    assert float(loss) == float((bends * before.square()).sum() / 2)
    torch.testing.assert_close(at.detach(), before - bends * before / (bends + 0.5), rtol=1e-6, atol=0)
    torch.testing.assert_close(at.grad, bends * before)
    assert float(optimizer.state[at]["damping"]) == pytest.approx(0.5 / 1.5)


def test_wrong_arguments_are_errors_and_a_step_that_fails_changes_nothing():
    at = nn.Parameter(torch.tensor([1.0]))
    for wrong in ({"curvature": "newton"}, {"damping": 0.0}, {"products": 1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            HessianFree([at], **wrong)  # type: ignore[arg-type]
    for match, closures in (("closure", ()), ("return", (lambda: at.square().sum(),))):
        with pytest.raises(TypeError, match=match):
            HessianFree([at], curvature="gauss-newton").step(*closures)
    trials = iter([at.square().sum()])
    with pytest.raises(ZeroDivisionError):
        HessianFree([at]).step(lambda: next(trials, None) or 1 / 0)
    assert at.item() == 1.0


ROWS, DIM = 200, 8


class Job:
    def __init__(self, bag: nn.Module, *, is_whole: bool = True, **options: Any) -> None:
        torch.manual_seed(0)
        self.dense = nn.Sequential(nn.Linear(DIM, 6), nn.Tanh(), nn.Linear(6, 1))
        self.model = nn.Sequential(bag, self.dense)
        self.optimizer = HessianFree((self.model if is_whole else self.dense).parameters(), products=8, **options)

    def train(self, batches: Iterable[Tensor], rows: Any = None, part: int = 8, share: float = 1.0) -> None:
        for ids in batches:
            if rows is not None:
                rows.zero_grad()
            self.optimizer.step(lambda ids=ids: self.loss(ids, share), lambda ids=ids: self.loss(ids[:part], share))
            if rows is not None:
                rows.step()

    def loss(self, ids: Tensor, share: float = 1.0, bag: Any = None) -> tuple[Tensor, Tensor]:
        outputs = self.model(ids) if bag is None else self.dense(bag(ids))
        return (outputs[:, 0] - ids.float().mean(1) / ROWS).square().mean() * share, outputs

    @torch.no_grad()
    def weights(self) -> list[Tensor]:
        return [self.model[0](torch.arange(ROWS)[:, None]), *(each.detach() for each in self.dense.parameters())]


def batches(count: int) -> list[Tensor]:
    return list(torch.randint(0, ROWS, (count, 16, 5), generator=torch.Generator().manual_seed(1)))


def table(ids: Any = None) -> tierstore.TableConfig:
    rule = tierstore.optim.SGD(lr=0.5)
    return tierstore.TableConfig(name="t", num_embeddings=ROWS, embedding_dim=DIM, optimizer=rule, ids=ids)


def bag_of(store: tierstore.Store, ids: Any = None) -> nn.Module:
    return tierstore.TieredEmbeddingBag(store.create_table(table(ids)))


@pytest.mark.parametrize("is_whole", [True, False], ids=["all parameters", "dense ones"])
@pytest.mark.parametrize("curvature", ["hessian", "gauss-newton"])
def test_rows_are_trained_once_a_step_by_the_gradient_at_its_start(curvature, *, is_whole):
    """The oracle: torch's own bag and SGD, with the dense weights that each step began with."""
    with tierstore.open(cold="memory", ddr="1MiB") as store:
        job, losses = Job(bag_of(store), curvature=curvature, is_whole=is_whole), []
        weight = store["t"].read(torch.arange(ROWS)).requires_grad_()
        for step, ids in enumerate(batches(5), 1):
            loss, _ = job.loss(ids, bag=lambda ids: nn.functional.embedding_bag(ids, weight, mode="sum"))
            (gradient,) = torch.autograd.grad(loss, weight)
            job.train([ids])
            weight.data -= 0.5 * gradient
            torch.testing.assert_close(job.weights()[0], weight.detach())
            assert store["t"].state.step == step
            losses.append(loss.item())
        assert losses[-1] < losses[0] / 2
        assert job.model[0].rows.requires_grad


@pytest.mark.parametrize("curvature", ["hessian", "gauss-newton"])
def test_prefetching_tiers_collected_gradients_and_a_loaded_state_change_no_bit(curvature):
    found = []
    settings: list[tuple[dict[str, Any], int, bool]] = [
        ({"ddr": "1MiB"}, 0, True),
        ({"ddr": "430KiB"}, 3, False),
        ({"hbm": "300KiB", "device": "cpu", "ddr": "2MiB"}, 3, True),
        ({"hbm": "300KiB", "device": "cpu", "ddr": "2MiB"}, 0, False),
    ]
    for tiers, depth, is_fused in settings:
        with tierstore.open(cold="memory", **tiers) as store:
            job = Job(bag_of(store), curvature=curvature)
            rows = None if is_fused else store.optimizer()
            job.train(tierstore.prefetch(batches(6)[:3], job.model, depth=depth), rows)
            if depth:
                saved = copy.deepcopy(job.optimizer.state_dict())
                job.optimizer = HessianFree(job.model.parameters(), damping=7.0)
                job.optimizer.load_state_dict(saved)
            job.train(tierstore.prefetch(batches(6)[3:], job.model, depth=depth), rows)
            found.append(job.weights())
            assert store["t"].state.step == 6
    assert all(torch.equal(one, other) for each in found for one, other in zip(each, found[0], strict=True))


def test_dynamic_ids_are_counted_once_a_step():
    with tierstore.open(cold="memory", ddr="1MiB") as store:
        job = Job(bag_of(store, tierstore.DynamicIds(admission=tierstore.ids.Frequency(3))))
        for admitted in (0, 0, 40, 40):
            job.train([torch.arange(40).view(8, 5)])
            assert store["t"].id_stats().admitted == admitted


def backward_of(loss: Tensor) -> Tensor:
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


NO_LOSSES: list[tuple[Any, str]] = [
    (backward_of, "called backward"),
    (Tensor.item, "a loss must be a tensor .*not float"),
    (Tensor.detach, "no_grad"),
    (lambda loss: loss.repeat(2), r"one element .* not a tensor \[2\]"),
    (lambda loss: (loss, loss, loss), "not tuple"),
]
NOT_FINITE: list[Any] = [lambda loss: loss * math.inf, lambda loss: loss + (0 * loss).sqrt()]


@pytest.mark.parametrize("is_fused", [True, False])
def test_a_closure_of_no_loss_and_one_that_is_not_finite_change_nothing(is_fused):
    """Neither as the first nor as that of the curvature; and the steps that follow are those without them."""
    found = []
    for is_spoilt in (False, True):
        with tierstore.open(cold="memory", ddr="1MiB") as store:
            job = Job(bag_of(store))
            rows = None if is_fused else store.optimizer()
            job.train(batches(2), rows)
            before, state = job.weights(), copy.deepcopy(job.optimizer.state_dict())

            def good() -> Tensor:
                return job.loss(batches(1)[0])[0]  # noqa: B023 - called at once

            for spoil, match in NO_LOSSES if is_spoilt else ():
                for closures in ((lambda: spoil(good()), good), (good, lambda: spoil(good()))):  # noqa: B023
                    with pytest.raises((TypeError, ValueError, RuntimeError), match=match):
                        job.optimizer.step(*closures)
            for spoil in NOT_FINITE if is_spoilt else ():
                job.optimizer.step(lambda: spoil(good()), good)  # noqa: B023
            assert all(map(torch.equal, job.weights(), before))
            assert str(job.optimizer.state_dict()) == str(state)
            job.train(batches(2), rows)
            found.append(job.weights())
    assert all(map(torch.equal, *found))


def test_a_curvature_that_is_not_finite_moves_no_weight_and_trains_rows():
    with tierstore.open(cold="memory", ddr="1MiB") as store:
        job = Job(bag_of(store))
        rows, *dense = job.weights()
        ids = batches(1)[0]
        job.optimizer.step(lambda: job.loss(ids)[0], lambda: job.loss(ids)[0] * math.nan)
        after, *dense_after = job.weights()
        assert all(map(torch.equal, dense, dense_after))
        assert not torch.equal(rows, after)
        job.train(batches(2))
        assert all(each.isfinite().all() for each in job.weights())


def test_rows_are_trained_where_all_else_is_frozen_and_sparse_gradients_are_refused():
    with tierstore.open(cold="memory", ddr="1MiB") as store:
        job = Job(bag_of(store))
        job.dense.requires_grad_(False)
        before = job.weights()
        job.train(batches(1))
        assert [torch.equal(*pair) for pair in zip(before, job.weights(), strict=True)] == [False] + [True] * 4
    sparse = nn.EmbeddingBag(5, 1, mode="sum", sparse=True)
    with pytest.raises(ValueError, match=r"\[5, 1\] are sparse.*sparse=False"):
        HessianFree(sparse.parameters()).step(lambda: sparse(torch.tensor([[1, 2]])).square().mean())


def test_what_is_loaded_copied_or_pickled_goes_on_as_it_would_have():
    class Net:
        def __init__(self) -> None:
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
            self.optimizer = HessianFree(self.net.parameters())

        def step(self, number: int) -> None:
            inputs = torch.randn(16, 3, generator=torch.Generator().manual_seed(number)).double()
            self.optimizer.step(lambda: (self.net(inputs)[:, 0] - inputs.sum(1)).square().mean())

    ours, loaded, others = Net(), Net(), list[Net]()
    for number in range(6):
        for each in (ours, *others):
            each.step(number)
        if number == 3:
            loaded.net.load_state_dict(ours.net.state_dict())
            loaded.optimizer.load_state_dict(copy.deepcopy(ours.optimizer.state_dict()))
            copied = copy.deepcopy(ours)
            pickled = copy.copy(ours)
            pickled.net, pickled.optimizer = pickle.loads(pickle.dumps((ours.net, ours.optimizer)))
            others = [loaded, copied, pickled]
    for other in others:
        assert all(map(torch.equal, other.net.parameters(), ours.net.parameters()))


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def symmetric(values: Any) -> Tensor:
    axes = torch.linalg.qr(randn(len(values), len(values), seed=3)).Q
    return axes @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ axes.T


DEFINITE, INDEFINITE = symmetric(np.linspace(0.1, 4, 12)), symmetric(np.linspace(-2, 3, 12))
LOPSIDED = DEFINITE + torch.triu(torch.ones(12, 12, dtype=torch.float64), 1) / 9


@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize(
    ("solver", "matrix"),
    [(conjugate_gradients, DEFINITE), (bicgstab, DEFINITE), (bicgstab, INDEFINITE), (bicgstab, LOPSIDED)],
)
def test_solvers_solve(solver, matrix, *, is_warm):
    right, start = randn(2, 12, seed=1)
    iterates = itertools.islice(solver(matrix.mv, right, start * is_warm), 72)
    found = next(each for each in iterates if each.residual.norm() < 1e-8)
    np.testing.assert_allclose(found.solution, np.linalg.solve(matrix.numpy(), right.numpy()), atol=1e-4)
    torch.testing.assert_close(found.image, matrix @ found.direction)


@pytest.mark.parametrize("matrix", [DEFINITE, INDEFINITE, -DEFINITE, symmetric([2.0] * 5 + [-1.0] * 5)])
def test_the_ends_of_a_spectrum_are_found(matrix):
    found = extreme_eigenvalues(matrix.mv, randn(len(matrix), seed=2), iterations=50, tolerance=1e-6)
    np.testing.assert_allclose(found, np.linalg.eigvalsh(matrix.numpy())[[0, -1]], rtol=1e-4)


def test_products_are_those_of_matrices_formed_whole():
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
