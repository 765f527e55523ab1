"""Hessian-free steps: out of saddles, on quadratics, resumed, and beside the rows of tables; Lookahead by hand."""

import copy
import itertools
import math
import pickle
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tierstore
from tierstore.optim import HessianFree, Lookahead
from tierstore.optim.curvature import conjugate_gradients
from tierstore.optim.dense import choose, search


def monkey_saddle() -> tuple[list[nn.Parameter], Any]:
    """x³ - 3xy² in a bowl: on the axis y = 0 the gradient leads into the saddle, where curvature is 0."""
    at = nn.Parameter(torch.tensor([0.3, 0.0]))
    return [at], lambda: (at[0] ** 3 - 3 * at[0] * at[1] ** 2 + at.square().sum().square() / 4, at)


def net_of_zeros() -> tuple[list[nn.Parameter], Any]:
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


def test_negative_curvature_is_followed_down_and_searched_as_far_as_the_loss_falls() -> None:
    gradient, bends = torch.tensor([2.0, 0.5]), torch.tensor([4.0, -3.0])
    iterates = conjugate_gradients(lambda vector: (bends + 0.1) * vector, -gradient, torch.zeros(2))
    way = choose(itertools.islice(iterates, 5), gradient, 0.1, 1e-6)
    negative = way.step - way.solution
    lengths = [float(gradient @ way.step), float(bends @ way.step.square()), float(negative.norm())]
    rayleigh = float(bends @ negative.square()) / lengths[2] ** 2
    assert lengths == pytest.approx([way.slope, way.bend, -rayleigh], rel=1e-4)
    assert max(way.slope, float(gradient @ negative)) < 0
    iterates = conjugate_gradients(lambda vector: (bends + 3.1) * vector, -gradient, torch.zeros(2))
    outweighed = choose(itertools.islice(iterates, 5), gradient, 3.1, 1e-6)
    torch.testing.assert_close(outweighed.step, -gradient / (bends + 3.1))
    assert not outweighed.is_negative
    for is_negative, first, length in ((True, 1.0, 4.0), (False, 1.0, 1.0), (True, 32.0, 4.0)):
        newton = way._replace(slope=-8.0, bend=2.0, is_negative=is_negative)
        found, ratio = search(lambda at: (at - 4) ** 2 - 16 if at < 20 else math.nan, newton, first)
        assert found == length
        assert ratio == pytest.approx(1.0) or first > 20
    assert search(lambda _: 0.0, way, 1.0) == (0.0, 0.0)


def test_wrong_arguments_are_errors_and_a_step_that_fails_changes_nothing() -> None:
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
    """A model over a bag that is trained by the optimizer, with the curvature of a part of each batch."""

    def __init__(self, bag: nn.Module, *, is_whole: bool = True, **options: Any) -> None:
        torch.manual_seed(0)
        self.dense = nn.Sequential(nn.Linear(DIM, 6), nn.Tanh(), nn.Linear(6, 1))
        self.model = nn.Sequential(bag, self.dense)
        self.optimizer = HessianFree((self.model if is_whole else self.dense).parameters(), products=8, **options)

    def train(self, batches: Iterable[Tensor], rows: Any = None, part: int = 8, share: float = 1.0) -> None:
        """With the optimizer of the rows, if they have one, and this rank's share of the mean."""
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
        """Rows and dense ones."""
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
def test_rows_are_trained_once_a_step_by_the_gradient_at_its_start(curvature: Any, *, is_whole: bool) -> None:
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
def test_prefetching_tiers_collected_gradients_and_a_loaded_state_change_no_bit(curvature: Any) -> None:
    found = []
    tiers: list[dict[str, Any]] = [{}, {"ddr": "430KiB"}, {"hbm": "300KiB", "device": "cpu", "ddr": "2MiB"}]
    for options, depth, is_fused in itertools.product(tiers, (0, 3), (True, False)):
        with tierstore.open(cold="memory", **{"ddr": "1MiB", **options}) as store:
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


def test_dynamic_ids_are_counted_once_a_step() -> None:
    with tierstore.open(cold="memory", ddr="1MiB") as store:
        job = Job(bag_of(store, tierstore.DynamicIds(admission=tierstore.ids.Frequency(3))))
        for admitted in (0, 0, 40, 40):
            job.train([torch.arange(40).view(8, 5)])
            assert store["t"].id_stats().admitted == admitted


def backward_of(loss: Tensor) -> Tensor:
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (backward_of, "called backward"),
        (Tensor.item, "a loss must be a tensor .*not float"),
        (Tensor.detach, "no_grad"),
        (lambda loss: loss.repeat(2), r"one element .* not a tensor \[2\]"),
        (lambda loss: (loss, loss, loss), "not tuple"),
        (lambda loss: loss * math.inf, None),
        (lambda loss: loss * math.nan, None),
        (lambda loss: loss + (0 * loss).sqrt(), None),
    ],
)
def test_a_closure_of_no_loss_and_one_that_is_not_finite_change_nothing(spoil: Any, match: Any, is_fused: bool) -> None:
    """Neither as the first nor as that of the curvature; and the steps that follow are those without it."""
    found = []
    for place in (None, 0) if match is None else (None, 0, 1):
        with tierstore.open(cold="memory", ddr="1MiB") as store:
            job = Job(bag_of(store))
            rows = None if is_fused else store.optimizer()
            job.train(batches(2), rows)
            if place is not None:
                step_that_changes_nothing(job, place, spoil, match)
            job.train(batches(2), rows)
            found.append(job.weights())
    assert all(torch.equal(one, other) for each in found for one, other in zip(each, found[0], strict=True))


def step_that_changes_nothing(job: Job, place: int, spoil: Any, match: str | None) -> None:
    before, state = job.weights(), copy.deepcopy(job.optimizer.state_dict())
    closures: list[Any] = [lambda: job.loss(batches(1)[0])[0]] * 2
    good = closures[0]
    closures[place] = lambda: spoil(good())
    with pytest.raises((TypeError, ValueError, RuntimeError), match=match) if match else nullcontext():
        job.optimizer.step(*closures)
    assert all(map(torch.equal, job.weights(), before))
    assert str(job.optimizer.state_dict()) == str(state)


def test_a_curvature_that_is_not_finite_moves_no_weight_and_trains_rows() -> None:
    with tierstore.open(cold="memory", ddr="1MiB") as store:
        job = Job(bag_of(store))
        rows, *dense = job.weights()
        ids = batches(1)[0]
        job.optimizer.step(lambda: job.loss(ids)[0], lambda: job.loss(ids)[0] * math.nan)
        after, *dense_after = job.weights()
        assert all(map(torch.equal, dense, dense_after))
        assert not torch.equal(rows, after)
        assert all(each["direction"].count_nonzero() == 0 for each in job.optimizer.state.values() if each)
        job.train(batches(2))
        assert all(each.isfinite().all() for each in job.weights())


def test_rows_are_trained_where_all_else_is_frozen_and_sparse_gradients_are_refused() -> None:
    with tierstore.open(cold="memory", ddr="1MiB") as store:
        job = Job(bag_of(store))
        job.dense.requires_grad_(False)
        before = job.weights()
        job.train(batches(1))
        assert [torch.equal(*pair) for pair in zip(before, job.weights(), strict=True)] == [False] + [True] * 4
    sparse = nn.EmbeddingBag(5, 1, mode="sum", sparse=True)
    with pytest.raises(ValueError, match=r"\[5, 1\] are sparse.*sparse=False"):
        HessianFree(sparse.parameters()).step(lambda: sparse(torch.tensor([[1, 2]])).square().mean())


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"]
)
@pytest.mark.parametrize(
    "make",
    [
        lambda net: HessianFree(net.parameters(), seed=3),
        lambda net: Lookahead(torch.optim.Adam(net.parameters(), lr=0.1), k=3, alpha=0.3),
    ],
    ids=["hessian-free", "lookahead"],
)
def test_a_copy_goes_on_as_the_optimizer_does(make: Any, copied: Any) -> None:
    torch.manual_seed(0)
    net, inputs = nn.Linear(3, 1), torch.rand(8, 3)

    def step(net: nn.Module, optimizer: Any) -> None:
        def closure() -> Tensor:
            loss: Tensor = (net(inputs) - 1).square().mean()
            return loss if isinstance(optimizer, HessianFree) else backward_of(loss)

        optimizer.zero_grad()
        optimizer.step(torch.enable_grad()(closure))

    optimizer = make(net)
    step(net, optimizer)
    other = copied((net, optimizer))
    for _ in range(5):
        step(net, optimizer)
        step(*other)
    assert torch.equal(net.weight, other[0].weight)


RULES: dict[str, Any] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.05),
    "hessian-free": HessianFree,
}


class Net:
    """A net, and a weight that has gradients from the third step on."""

    def __init__(self, rule: str, **options: Any) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        self.weights = [*self.net.parameters(), nn.Parameter(torch.ones(1).double())]
        self.inner = self.optimizer = RULES[rule](self.weights)
        if options:
            self.optimizer = Lookahead(self.inner, **options)

    def step(self, number: int) -> None:
        inputs = torch.randn(16, 3, generator=torch.Generator().manual_seed(number)).double()

        def loss() -> Any:
            outputs = self.net(inputs)[:, 0] * (self.weights[-1] if number > 2 else 1)
            return (outputs - inputs.sum(1)).square().mean()

        is_called = isinstance(self.inner, HessianFree)
        self.optimizer.zero_grad()
        if not is_called:
            loss().backward()
        self.optimizer.step(*[loss] * is_called)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("k", "alpha"), [(3, 0.5), (1, 0.3), (4, 1.0)])
def test_weights_go_back_a_share_of_the_way_as_by_hand(rule: str, k: int, alpha: float) -> None:
    plain, ours, resumed = Net(rule), Net(rule, k=k, alpha=alpha), Net(rule, k=k, alpha=alpha)
    slow = [each.detach().clone() for each in plain.weights]
    for number in range(1, 8):
        plain.step(number)
        for before, each in zip(slow, plain.weights, strict=True):
            if number % k == 0:
                before += alpha * (each.detach() - before)
                each.data.copy_(before)
        ours.step(number)
        close = 1e-3 if rule == "hessian-free" else 1e-12  # Bi-CGSTAB may make much of the last bit
        torch.testing.assert_close(ours.weights, plain.weights, rtol=close, atol=close)
        if number > 4:
            resumed.step(number)
        elif number == 4:
            for one, other in zip(resumed.weights, ours.weights, strict=True):
                one.data.copy_(other)
            resumed.optimizer.load_state_dict(copy.deepcopy(ours.optimizer.state_dict()))
    assert all(torch.equal(one, other) for one, other in zip(resumed.weights, ours.weights, strict=True))
