"""A store's optimizer against ``torch.nn.EmbeddingBag(sparse=True)`` with torch's own, and against the fused update."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.state_dict
from torch import Tensor, nn

import tierstore
from tierstore import errors
from tierstore.optim import SGD, Adagrad, Adam, Optimizer

ROWS, DIM = 300, 20
TIERS: dict[str, dict[str, Any]] = {
    "in place": {"ddr": "1MiB"},
    "evicting": {"ddr": "460KiB"},
    "hbm": {"ddr": "2MiB", "hbm": "300KiB", "device": "cpu"},
}
RULES: list[tuple[Optimizer, Callable[[Any], torch.optim.Optimizer]]] = [
    (SGD(lr=0.5), lambda parameters: torch.optim.SGD(parameters, lr=0.5)),
    (Adagrad(lr=0.5), lambda parameters: torch.optim.Adagrad(parameters, lr=0.5)),
    # eps is beside a smaller root in SparseAdam than in Adam.
    (Adam(lr=0.05, eps=1e-15), lambda parameters: torch.optim.SparseAdam(parameters, lr=0.05, eps=1e-15)),
]


@contextlib.contextmanager
def opened(rule: Optimizer, **tiers: Any) -> Iterator[tierstore.Store]:
    with tierstore.open(cold="memory", **(tiers or TIERS["in place"])) as store:
        store.create_table(tierstore.TableConfig(name="t", num_embeddings=ROWS, embedding_dim=DIM, optimizer=rule))
        yield store


def rows_of(store: tierstore.Store) -> Tensor:
    return store["t"].read(torch.arange(ROWS))


def batches(count: int) -> list[Tensor]:
    return list(torch.randint(0, ROWS, (count, 8, 5), generator=torch.Generator().manual_seed(1)))


class Twins:
    def __init__(self, store: tierstore.Store, reference: Callable[[Any], torch.optim.Optimizer]) -> None:
        torch.manual_seed(0)
        self.store, dense = store, nn.Linear(DIM, 1)
        self.ours = nn.Sequential(tierstore.TieredEmbeddingBag(store["t"]), dense)
        rows = nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True, _weight=rows_of(store))
        self.weight, self.theirs = rows.weight, nn.Sequential(rows, copy.deepcopy(dense))
        self.row_optimizers: list[Any] = [store.optimizer(), reference([rows.weight])]
        self.dense_optimizers = [torch.optim.SGD(model[1].parameters(), lr=0.1) for model in (self.ours, self.theirs)]

    def backward(self, ids: Tensor) -> None:
        for model in (self.ours, self.theirs):
            model(ids).square().mean().backward()

    def step(self) -> None:
        for optimizer in (*self.row_optimizers, *self.dense_optimizers):
            optimizer.step()
            optimizer.zero_grad()

    def check(self) -> None:
        torch.testing.assert_close(rows_of(self.store), self.weight.detach())
        torch.testing.assert_close(self.ours[1].weight, self.theirs[1].weight)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # by torch's own optimizers
@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize(("rule", "reference"), RULES, ids=lambda each: getattr(each, "kind", ""))
def test_micro_batches_accumulate_as_torchs_do(rule: Optimizer, reference: Any, tiers: str) -> None:
    with opened(rule, **TIERS[tiers]) as store:
        twins, first = Twins(store, reference), rows_of(store)
        for number, ids in enumerate(batches(6)):
            twins.backward(ids)
            if number % 3 == 2:
                twins.step()
        twins.check()
        assert not torch.equal(first, rows_of(store))


@pytest.mark.parametrize("is_read", [True, False])
def test_a_gradient_stays_until_zero_grad_and_is_of_its_pass(is_read: bool) -> None:
    with opened(SGD(lr=0.5)) as store:
        optimizer, bag, first = store.optimizer(), tierstore.TieredEmbeddingBag(store["t"]), rows_of(store)
        [stand_in] = optimizer.param_groups[0]["params"]
        ids, gradient = torch.tensor([[1, 2, 2]]), torch.ones(1, DIM)
        bag(ids).backward(gradient)
        if is_read:
            assert stand_in.grad.coalesce().indices().tolist() == [[1, 2]]
        gradient.zero_()
        ids.zero_()
        optimizer.step()
        optimizer.step()
        with pytest.warns(RuntimeWarning, match=r"call zero_grad\(\) of store.optimizer\(\)"):
            bag(torch.tensor([[2]])).backward(torch.ones(1, DIM))
        optimizer.step()
        steps = torch.tensor([0, 3, 7])
        torch.testing.assert_close(first[:3] - rows_of(store)[:3], 0.5 * steps[:, None].expand(3, DIM).float())
        optimizer.zero_grad(set_to_none=False)
        assert not stand_in.grad.to_dense().any()
        with pytest.raises(TypeError, match="cannot be pickled or copied"):
            copy.deepcopy(optimizer)


def test_rows_are_pinned_until_step_or_zero_grad() -> None:
    with opened(SGD(lr=0.5), ddr="460KiB") as store:
        optimizer, bag = store.optimizer(), tierstore.TieredEmbeddingBag(store["t"])
        version = store.commit()
        for end in (optimizer.step, optimizer.zero_grad):
            bag(batches(1)[0]).sum().backward()
            assert store["t"].pool.pins.num_held == 1
            with pytest.raises(errors.TableError, match=r"zero_grad\(\) of store.optimizer\(\) releases"):
                store.rollback(version)
            end()
            assert store["t"].pool.pins.num_held == 0
            optimizer.zero_grad()
        store.rollback(version)


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_clipping_is_by_the_norm_over_rows_and_dense_weights(norm_type: float) -> None:
    with opened(SGD(lr=0.5)) as store:
        twins = Twins(store, RULES[0][1])
        for ids in batches(3):
            twins.backward(ids)
            theirs = list(twins.theirs.parameters())
            twins.weight.grad = twins.weight.grad.to_dense()  # type: ignore[union-attr]
            expected = torch.nn.utils.clip_grad_norm_(theirs, 0.1, norm_type)
            norm = twins.row_optimizers[0].clip_grad_norm_(twins.ours.parameters(), 0.1, norm_type)
            torch.testing.assert_close(norm, expected)
            assert norm > 0.1
            twins.step()
        twins.check()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_a_grad_scaler_unscales_rows_and_skips_steps_that_overflow() -> None:
    with opened(Adagrad(lr=0.5)) as store:
        twins = Twins(store, RULES[1][1])
        scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10) for _ in range(2)]
        for number, ids in enumerate(batches(4)):
            before = rows_of(store)
            for model, scaler, own in zip((twins.ours, twins.theirs), scalers, (0, 1), strict=True):
                loss = model(ids).square().mean() * (float("inf") if number == 1 else 1.0)
                scaler.scale(loss).backward()
                for optimizer in (twins.row_optimizers[own], twins.dense_optimizers[own]):
                    scaler.step(optimizer)
                    optimizer.zero_grad()
                scaler.update()
            assert torch.equal(before, rows_of(store)) == (number == 1)
        assert scalers[0].get_scale() == scalers[1].get_scale() == 2.0**9
        twins.check()


def test_rates_are_loaded_by_the_names_of_tables() -> None:
    def made(names: str) -> Any:
        store = tierstore.open(cold="memory", ddr="2MiB")
        for name in names:
            store.create_table(tierstore.TableConfig(name=name, num_embeddings=9, embedding_dim=4))
        return store.optimizer()

    def rates(optimizer: torch.optim.Optimizer) -> dict[str, float]:
        return {group["name"]: group["lr"] for group in optimizer.param_groups}

    first, second, third = made("abc"), made("cdba"), made("ab")
    for group in first.param_groups:
        group["lr"] = {"a": 0.1, "b": 0.2, "c": 0.3}[group["name"]]
    second.load_state_dict(first.state_dict())
    assert rates(second) == {"a": 0.1, "b": 0.2, "c": 0.3, "d": 0.01}
    with pytest.raises(ValueError, match=r"a group of the name 'c', none of the tables \['a', 'b'\]"):
        third.load_state_dict(first.state_dict())
    assert rates(third) == {"a": 0.01, "b": 0.01}


def test_one_optimizer_of_rows_and_dense_parameters(caplog: pytest.LogCaptureFixture) -> None:
    """Steps, schedules, clips, saves and loads as two do."""

    def trained(store: tierstore.Store, steps: range, state: Any = None, *, joined: bool) -> tuple[list[Tensor], Any]:
        torch.manual_seed(0)
        model = nn.Sequential(tierstore.TieredEmbeddingBag(store["t"]), nn.Linear(DIM, 4), nn.Linear(4, 1))
        dense = torch.optim.Adam(model[1].parameters(), lr=0.02)
        optimizers: list[Any] = [store.optimizer(dense)] if joined else [store.optimizer(), dense]
        optimizers[-1].add_param_group({"params": list(model[2].parameters()), "lr": 0.3})
        schedules = [torch.optim.lr_scheduler.StepLR(each, 2, gamma=0.5) for each in optimizers]
        if state is not None:
            model.load_state_dict(state[0])
            for each, saved in zip([*optimizers, *schedules], state[1:], strict=True):
                each.load_state_dict(saved)
        for number in steps:
            (model(batches(9)[number]) - 1).square().mean().backward()
            optimizers[0].clip_grad_norm_(model.parameters(), 0.5)
            for each in (*optimizers, *schedules):
                each.step()
            for each in optimizers:
                each.zero_grad()
        assert all(each.grad is None for each in model.parameters())
        saved = [each.state_dict() for each in (model, *optimizers, *schedules)]
        return [rows_of(store), *(each.detach().clone() for each in model.parameters())], copy.deepcopy(saved)

    rule = Adagrad(lr=0.5)
    with opened(rule) as store, opened(rule) as other:
        expected, _ = trained(store, range(6), joined=False)
        _, state = trained(other, range(3), joined=True)
        found, _ = trained(other, range(3, 6), state, joined=True)
        assert all(map(torch.equal, found, expected))
        assert not caplog.records
        with pytest.raises(ValueError, match="takes no group of other parameters: give it their optimizer"):
            store.optimizer().add_param_group({"params": [nn.Parameter(torch.zeros(2))], "lr": 0.1})


def test_a_new_optimizer_begins_at_the_configured_rate(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    config = tierstore.TableConfig(name="t", num_embeddings=9, embedding_dim=4, optimizer=SGD(lr=0.5))

    def day(*, resumes: bool = False, rate: float | None = None) -> list[float]:
        with tierstore.open(tmp_path) as store:
            if "t" not in store:
                store.create_table(config)
            if rate is not None:
                store["t"].learning_rate = rate
            bag, optimizer = tierstore.TieredEmbeddingBag(store["t"]), store.optimizer()
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            if resumes:
                tierstore.checkpoint.load(store, bag, [optimizer], [schedule])
            rates = []
            for _ in range(3):
                bag(torch.tensor([[1, 2]])).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                rates.append(store["t"].learning_rate)
                schedule.step()
            tierstore.checkpoint.save(store, bag, [optimizer], [schedule])
            return rates

    assert day() == [0.5, 0.25, 0.125]
    assert day(resumes=True) == [0.0625, 0.03125, 0.015625]
    assert not caplog.records
    assert day() == [0.5, 0.25, 0.125]
    (record,) = caplog.records
    assert "'t' was last trained at learning rate 0.015625, and this optimizer begins at 0.5" in record.getMessage()
    assert day(rate=0.75) == [0.75, 0.375, 0.1875]
    assert len(caplog.records) == 1, "a rate that was set is asked for"


def test_gradients_that_are_assigned_are_applied() -> None:
    with opened(SGD(lr=0.5)) as store:
        optimizer, before = store.optimizer(), rows_of(store)
        [stand_in] = optimizer.param_groups[0]["params"]
        dense = torch.randn(ROWS, DIM)
        indices, values = torch.tensor([[3, 1, 3]]), torch.ones(3, DIM)
        repeated = torch.sparse_coo_tensor(indices, values, (ROWS, DIM), check_invariants=True)
        for gradient in (dense, repeated):
            stand_in.grad = gradient
            optimizer.step()
            before -= 0.5 * (gradient.to_dense() if gradient.is_sparse else gradient)
            torch.testing.assert_close(rows_of(store), before)


def test_only_the_newest_optimizer_of_a_writable_store_steps(tmp_path: Any) -> None:
    with tierstore.open(tmp_path / "s") as store:
        store.create_table(tierstore.TableConfig(name="t", num_embeddings=ROWS, embedding_dim=DIM))
        first = store.optimizer()
        store.optimizer().step()
        with pytest.raises(RuntimeError, match="another optimizer"):
            first.step()
    with tierstore.open(tmp_path / "s", mode="r") as store, pytest.raises(errors.ReadOnlyError):
        store.optimizer()


@pytest.mark.parametrize(
    "make",
    [
        lambda _, model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        lambda store, model: store.optimizer(torch.optim.Adam(model.parameters(), lr=0.1)),
        lambda store, _: store.optimizer(),
    ],
)
def test_torchs_tools_get_and_set_the_state_of_optimizers(make: Any) -> None:
    tools = torch.distributed.checkpoint.state_dict
    with tierstore.open(cold="memory", ddr="2MiB") as one, tierstore.open(cold="memory", ddr="2MiB") as other:
        made = []
        for store in (one, other):
            torch.manual_seed(0)
            for name in "ab":
                store.create_table(tierstore.TableConfig(name=name, num_embeddings=9, embedding_dim=4))
            model = nn.Sequential(tierstore.TieredEmbeddingBag(store["a"]), nn.Linear(4, 1))
            made.append((model, make(store, model)))
        (model, optimizer), (second, loaded) = made

        for _ in range(2):
            optimizer.zero_grad()
            model(torch.arange(9)[None]).square().sum().backward()
            rows, state = one["a"].read(torch.arange(9)), one["a"].state
            for group in optimizer.param_groups[: "name" in optimizer.param_groups[0]]:
                assert not group["params"][0].requires_grad, "it would make a gradient of zeros as large as the table"
            _ = tools.get_optimizer_state_dict(model, optimizer)  # before its first step, too; steps at rate 0
            assert torch.equal(one["a"].read(torch.arange(9)), rows)
            assert one["a"].state == state
            optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] = 0.025
        state = copy.deepcopy(tools.get_optimizer_state_dict(model, optimizer))
        tools.set_optimizer_state_dict(second, loaded, state)
        rates = [(group.get("name"), group["lr"]) for group in loaded.param_groups]
        assert rates == [(group.get("name"), 0.025) for group in optimizer.param_groups]
        saved = tools.get_optimizer_state_dict(second, loaded)["state"]
        assert str(sorted(saved.items())) == str(sorted(state["state"].items()))
