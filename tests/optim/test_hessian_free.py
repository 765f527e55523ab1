"""Hessian-free steps: out of saddles, on quadratics, resumed, and beside the rows of tables."""

import copy
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tierstore
from tierstore.optim import HessianFree
from tierstore.optim.hessian_free import choose, search
from tierstore.optim.krylov import conjugate_gradients

Saddle = tuple[list[nn.Parameter], Callable[[], Any]]


def monkey_saddle() -> Saddle:
    """In a bowl. On the axis y = 0 the gradient leads into the saddle, and curvature across is negative."""
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


@pytest.mark.parametrize(("saddle", "stalled", "left"), [(monkey_saddle, -0.01, -1.0), (net_of_zeros, 0.35, 0.2)])
def test_negative_curvature_leaves_saddles_that_stall_conjugate_gradients(saddle: Any, stalled: Any, left: Any) -> None:
    losses = []
    for curvature in ("hessian", "gauss-newton"):
        parameters, evaluate = saddle()
        optimizer = HessianFree(parameters, curvature=curvature, damping=0.1)
        losses.append([float(optimizer.step(evaluate)) for _ in range(30)][-1])
    assert losses[0] < left < stalled < losses[1]


@pytest.mark.parametrize("curvature", ["hessian", "gauss-newton"])
def test_a_step_is_newtons_with_damping_and_damping_follows_the_ratio(curvature: Any) -> None:
    at = nn.Parameter(torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64))
    before, bends = at.detach().clone(), torch.tensor([1.0, 5.0, 0.5], dtype=torch.float64)
    optimizer = HessianFree([at], curvature=curvature, damping=0.5, tolerance=1e-12)
    loss = optimizer.step(lambda: ((bends * at.square()).sum() / 2, at))
    assert float(loss) == float((bends * before.square()).sum() / 2)
    torch.testing.assert_close(at.detach(), before - bends * before / (bends + 0.5), rtol=1e-6, atol=0)
    torch.testing.assert_close(at.grad, bends * before)
    assert float(optimizer.state[at]["damping"]) == pytest.approx(0.5 / 1.5)


def test_steps_halve_until_the_loss_falls_and_none_is_taken_if_it_never_does() -> None:
    for lowest in (-2.0, 1.0):  # the loss is NaN below
        at = nn.Parameter(torch.tensor([1.0]))
        optimizer = HessianFree([at], damping=1e-3, lr=8.0)
        optimizer.step(lambda at=at, lowest=lowest: torch.where(at < lowest, torch.nan, at.square()).sum())
        assert (at.item() != 1.0) == (lowest < 0)
        assert float(optimizer.state[at]["damping"]) == pytest.approx(1.5e-3)


def test_negative_curvature_is_followed_down_and_as_far_as_the_loss_falls() -> None:
    gradient, bends = torch.tensor([2.0, 0.5]), torch.tensor([4.0, -3.0])
    iterates = conjugate_gradients(lambda vector: (bends + 0.1) * vector, -gradient, torch.zeros(2))
    way = choose(itertools.islice(iterates, 5), gradient, 0.1, 1e-6)
    negative = way.step - way.solution
    lengths = [float(gradient @ way.step), float(bends @ way.step.square()), float(negative.norm())]
    rayleigh = float(bends @ negative.square()) / lengths[2] ** 2
    assert lengths == pytest.approx([way.slope, way.bend, -rayleigh], rel=1e-4)
    assert max(way.slope, float(gradient @ negative)) < 0
    for is_negative, length in ((True, 4.0), (False, 1.0)):
        assert search(lambda at: (at - 4) ** 2 - 16, way._replace(is_negative=is_negative), 1.0)[0] == length


def test_wrong_arguments_are_errors_and_a_step_that_fails_changes_nothing() -> None:
    at = nn.Parameter(torch.tensor([1.0]))
    for wrong in ({"curvature": "newton"}, {"damping": 0.0}, {"lr": float("inf")}, {"products": 1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            HessianFree([at], **wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one group"):
        HessianFree([{"params": [at]}, {"params": [nn.Parameter(torch.ones(1))]}])
    for match, closures in (("closure", ()), ("return", (lambda: at.square().sum(),))):
        with pytest.raises(TypeError, match=match):
            HessianFree([at], curvature="gauss-newton").step(*closures)
    trials = iter([at.square().sum()])
    with pytest.raises(ZeroDivisionError):
        HessianFree([at]).step(lambda: next(trials, None) or 1 / 0)
    assert at.item() == 1.0


ROWS, DIM = 200, 8


class Job:
    """A model over a table that is trained by the optimizer, with the curvature of half a batch."""

    def __init__(self, store: Any, *, is_fused: bool = True, is_whole: bool = True, **options: Any) -> None:
        torch.manual_seed(0)
        self.dense = nn.Sequential(nn.Linear(DIM, 6), nn.Tanh(), nn.Linear(6, 1))
        self.model = nn.Sequential(tierstore.TieredEmbeddingBag(store["t"]), self.dense)
        self.optimizer = HessianFree((self.model if is_whole else self.dense).parameters(), products=8, **options)
        self.rows = None if is_fused else store.optimizer()

    def train(self, batches: Iterable[Tensor]) -> None:
        for ids in batches:
            if self.rows is not None:
                self.rows.zero_grad()
            self.optimizer.step(lambda ids=ids: loss_of(self.model, ids), lambda ids=ids: loss_of(self.model, ids[:8]))
            if self.rows is not None:
                self.rows.step()


def loss_of(model: Callable[[Tensor], Tensor], ids: Tensor) -> tuple[Tensor, Tensor]:
    outputs = model(ids)
    return (outputs[:, 0] - ids.float().mean(1) / ROWS).square().mean(), outputs


def batches(count: int) -> list[Tensor]:
    return list(torch.randint(0, ROWS, (count, 16, 5), generator=torch.Generator().manual_seed(1)))


def opened(*, ids: Any = None, **options: Any) -> tierstore.Store:
    store = tierstore.open(cold="memory", **{"ddr": "1MiB", **options})
    rule = tierstore.optim.SGD(lr=0.5)
    store.create_table(tierstore.TableConfig(name="t", num_embeddings=ROWS, embedding_dim=DIM, optimizer=rule, ids=ids))
    return store


@pytest.mark.parametrize("is_whole", [True, False], ids=["all parameters", "dense ones"])
@pytest.mark.parametrize("curvature", ["hessian", "gauss-newton"])
def test_rows_are_trained_once_a_step_by_the_gradient_at_its_start(curvature: Any, *, is_whole: bool) -> None:
    """The oracle: torch's own bag and SGD, with the dense weights that each step began with."""
    with opened() as store:
        job, losses = Job(store, curvature=curvature, is_whole=is_whole), []
        weight = store["t"].read(torch.arange(ROWS)).requires_grad_()
        for step, ids in enumerate(batches(5), 1):
            loss, _ = loss_of(lambda ids: job.dense(nn.functional.embedding_bag(ids, weight, mode="sum")), ids)
            (gradient,) = torch.autograd.grad(loss, weight)
            job.train([ids])
            weight.data -= 0.5 * gradient
            torch.testing.assert_close(store["t"].read(torch.arange(ROWS)), weight.detach())
            assert store["t"].state.step == step
            losses.append(loss.item())
        assert losses[-1] < losses[0] / 2
        assert job.model[0].rows.requires_grad


@pytest.mark.parametrize("curvature", ["hessian", "gauss-newton"])
def test_prefetching_tiers_collected_gradients_and_a_loaded_state_change_no_bit(curvature: Any) -> None:
    found = []
    tiers: list[dict[str, Any]] = [{}, {"ddr": "430KiB"}, {"hbm": "300KiB", "device": "cpu", "ddr": "2MiB"}]
    for options, depth, is_fused in itertools.product(tiers, (0, 3), (True, False)):
        with opened(**options) as store:
            job = Job(store, curvature=curvature, is_fused=is_fused)
            job.train(tierstore.prefetch(batches(6)[:3], job.model, depth=depth))
            if depth:
                saved = copy.deepcopy(job.optimizer.state_dict())
                job.optimizer = HessianFree(job.model.parameters(), damping=7.0)
                job.optimizer.load_state_dict(saved)
            job.train(tierstore.prefetch(batches(6)[3:], job.model, depth=depth))
            found.append([store["t"].read(torch.arange(ROWS)), *(each.detach() for each in job.dense.parameters())])
            assert store["t"].state.step == 6
    for each in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(each, found[0], strict=True))


def test_dynamic_ids_are_counted_once_a_step() -> None:
    with opened(ids=tierstore.DynamicIds(admission=tierstore.ids.Frequency(3))) as store:
        job, admitted = Job(store), []
        for _ in range(4):
            job.train([torch.arange(40).view(8, 5)])
            admitted.append(store["t"].id_stats().admitted)
        assert admitted == [0, 0, 40, 40]
