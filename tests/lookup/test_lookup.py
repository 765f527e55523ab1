"""A step that fails changes no row, and can be repeated; or it was part done, and nothing goes on until the store goes
back. Where values stopped being finite is told."""

import contextlib
import logging
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tierstore
from tests.hbm.stores import few_slots
from tierstore import errors
from tierstore.errors import NonFiniteError, PartlyTrainedError
from tierstore.io.base import MemoryColdTier
from tierstore.lookup import lookup as lookups
from tierstore.optim import SGD, Adagrad, Adam, RowWiseAdagrad
from tierstore.pool.leases import Pins
from tierstore.store import Store

ROWS, STEPS = 1500, 8
TABLES: dict[str, Any] = {"a": (24, "sum"), "b": (24, "mean"), "c": (40, "sum")}
"""Two pools, of which one has two updates in a step: dim and pooling."""
SHARES = {"small": 0.2, "near": 0.45, "over": 1.6}
"""Rows of a batch, of all slots of the smallest cache; two tables share one."""
PLACES: dict[str, Any] = {"ddr": {"ddr": "520KiB"}, "hbm": {"ddr": "700KiB", "hbm": "110KiB"}}
ERRORS = (errors.DiskFullError, errors.DamagedError, errors.BudgetError, MemoryError)


class Faults:
    """Fails a read or write of the cold tier, after ``left`` more calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
        self.random, self.left = random.Random(seed), -1
        for name in ("read", "write"):
            monkeypatch.setattr(MemoryColdTier, name, self._failing(getattr(MemoryColdTier, name)))

    def _failing(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                raise self.random.choice(ERRORS)("drawn")
            return work(*arguments, **named)

        return call


def _open(**where: Any) -> Store:
    store = tierstore.open(cold="memory", policy="lru", **where)
    for name, (dim, pooling) in TABLES.items():
        config = tierstore.TableConfig(
            name=name, num_embeddings=ROWS, embedding_dim=dim, pooling=pooling,
            optimizer=tierstore.optim.Adam(lr=0.1), init=tierstore.init.Uniform(-1, 1),
        )  # fmt: skip
        store.create_table(config)
    return store


def _loss(store: Store, ids: torch.Tensor) -> torch.Tensor:
    losses = [tierstore.TieredEmbeddingBag(table)(ids).square().sum() for table in store.tables.values()]
    return torch.stack(losses).sum()


def _train(
    store: Store, batches: list[torch.Tensor], *, has_optimizer: bool, faults: Faults | None = None
) -> tuple[int, int]:
    optimizer = store.optimizer() if has_optimizer else None
    repeated = gone_back = committed = done = 0

    def until_done(work: Callable[[], Any]) -> None:
        """Twice a fault may be drawn."""
        nonlocal repeated
        for turn in range(3):
            if faults is not None and turn < 2 and faults.random.random() < 0.6:
                faults.left = faults.random.randrange(1, 16)
            try:
                work()
                return
            except ERRORS as error:
                assert str(error) == "drawn"  # noqa: PT017 - others are faults of ours
                repeated += 1
            finally:
                if faults is not None:
                    faults.left = -1

    def step(ids: torch.Tensor) -> None:
        if optimizer is None:
            until_done(lambda: _loss(store, ids).backward())  # type: ignore[no-untyped-call]
        else:
            optimizer.zero_grad()
            _loss(store, ids).backward()  # type: ignore[no-untyped-call]
            until_done(optimizer.step)

    store.commit()
    while done < len(batches):
        try:
            step(batches[done])
        except errors.PartlyTrainedError:
            for forbidden in (store.commit, lambda: step(batches[0])):
                with pytest.raises(errors.PartlyTrainedError, match=rf"rollback\({store.version}\)"):
                    forbidden()
            if optimizer is not None:
                optimizer.zero_grad()
            store.rollback(store.version)
            done, gone_back = committed, gone_back + 1
            continue
        done += 1
        if done % 2 == 0:
            store.commit()
            committed = done
    return repeated, gone_back


@pytest.mark.parametrize(
    ("has_optimizer", "place", "share"),
    [
        (False, "ddr", "small"), (False, "ddr", "over"), (False, "hbm", "near"), (True, "ddr", "small"),
        (True, "ddr", "over"), (True, "hbm", "small"),
    ],
)  # fmt: skip
def test_a_step_is_done_once(monkeypatch, place, share, has_optimizer):
    faults = Faults(monkeypatch, 5)
    with _open(**PLACES[place]) as store, _open(ddr="8MiB") as reference:
        pools: list[Any] = [table.pool for table in store.tables.values()]
        capacity = min(pool.tier.capacity_rows if pool.tier.on_device else pool.cache.capacity for pool in pools)
        assert capacity < ROWS
        generator = torch.Generator().manual_seed(1)
        size = int(capacity * SHARES[share]) // 2 * 2
        batches = [torch.randperm(ROWS, generator=generator)[:size].view(-1, 2) for _ in range(STEPS)]
        repeated, gone_back = _train(store, batches, has_optimizer=has_optimizer, faults=faults)
        _train(reference, batches, has_optimizer=has_optimizer)
        for name, table in store.tables.items():
            assert torch.equal(table.read(torch.arange(ROWS)), reference[name].read(torch.arange(ROWS)))
            assert table.state == reference[name].state
        assert repeated or gone_back or share == "small"
        assert (gone_back > 0) == (share == "over")


FEW, DIM = 100, 4
IDS, OFFSETS = torch.tensor([3, 5, 3]), torch.tensor([0, 2, 3])


@pytest.mark.parametrize("ddr", ["4MiB", "440KiB"])
def test_what_was_staged_in_a_pool_that_a_new_table_replaced_is_staged_anew(tmp_path, monkeypatch, ddr):
    """A prefetch thread has brought rows in and not yet said that it holds them, when the pool is replaced."""
    with tierstore.open(tmp_path / "store", ddr=ddr) as store:
        made: dict[str, Any] = {"num_embeddings": FEW, "embedding_dim": DIM, "optimizer": tierstore.optim.SGD(lr=1.0)}
        table = store.create_table(tierstore.TableConfig(name="t", **made))
        table.write(torch.arange(FEW), torch.arange(FEW * DIM, dtype=torch.float32).reshape(FEW, DIM))
        expected = table.pooled(IDS, OFFSETS)
        lookup = table.lookup(table.jagged(IDS, OFFSETS, mode="sum"), mode="sum")
        with monkeypatch.context() as patch:
            patch.setattr(Pins, "hold", lambda _self, lease: lease.release() is None)
            lookup.stage()
        store.create_table(tierstore.TableConfig(name="u", **made))
        out = torch.empty(2, DIM)
        lookup.forward(out, keep=True)
        assert torch.equal(out, expected)
        lookup.readied(torch.ones(2, DIM)).train()
        table.pool.cache.check_integrity()
        assert torch.equal(table.pooled(IDS, OFFSETS), expected - torch.tensor([[3.0], [2.0]]))
        assert not table.pool.in_use


NUM_ROWS, WIDTH, SAMPLES, FEATURES = 300, 4, 3, ["u", "clicked", "bought"]
TIERS = {
    "in place": {"ddr": "1MiB"},
    "evicting": {"ddr": "430KB"},
    "hbm": {"hbm": "1MiB"},
    "hbm cache": {"hbm": "1MiB"},
}
NAN, HUGE, DYNAMIC = float("nan"), 1e30, tierstore.DynamicIds()


@contextlib.contextmanager
def opened(tier="in place", ids=None, rule=None, pooling="sum", check_finite="error"):
    options = {"cold": "memory", "ddr": "2MiB", "threads": 1, "check_finite": check_finite} | TIERS[tier]
    fields = {"num_embeddings": NUM_ROWS, "embedding_dim": WIDTH, "pooling": pooling, "optimizer": rule or SGD(lr=0.5)}
    with few_slots(64) if tier == "hbm cache" else contextlib.nullcontext(), tierstore.open(**options) as store:
        store.create_table(tierstore.TableConfig(name="user", feature_names=FEATURES[:1], **fields))
        store.create_table(tierstore.TableConfig(name="item", feature_names=FEATURES[1:], ids=ids, **fields))
        store.commit()
        yield Batch(store)


class Batch:
    def __init__(self, store):
        self.store, self.module = store, tierstore.TieredEmbeddingBagCollection(store)
        self.ids = torch.randint(0, NUM_ROWS, (3, SAMPLES, 2), generator=torch.Generator().manual_seed(0))
        self.ids[1:] = self.ids[1:] if store["item"].ids is None else self.ids[1:] * 2**40 - 7
        self.gradient = torch.zeros(SAMPLES, 3, WIDTH)

    def train(self, weights=None):
        lengths = torch.full((3 * SAMPLES,), 2)
        batch = tierstore.KeyedJaggedTensor(FEATURES, self.ids.reshape(-1), weights, lengths=lengths)
        self.module(batch).values().backward(self.gradient.view(SAMPLES, -1))

    def rows(self):
        return self.store["item"].read(self.ids[1:].flatten())

    def ends(self, feature, sample, update=1, source="gradient", place=0, train=None):
        with pytest.raises(NonFiniteError) as caught:
            (train or self.train)()
        named = {"table": "item" if feature else "user", "id": int(self.ids[feature, sample, place]), "source": source}
        assert caught.value.found == named | {"feature": FEATURES[feature], "sample": sample, "update": update}


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("ids", [None, DYNAMIC], ids=["fixed", "dynamic"])
@pytest.mark.parametrize(("pooling", "value"), [("sum", NAN), ("mean", float("inf")), ("max", -float("inf"))])
def test_gradients_change_no_row_and_rows_that_were_so_before_are_their_cause(tier, ids, pooling, value):
    with opened(tier, ids, Adam(lr=0.1), pooling) as batch:
        batch.gradient.fill_(0.5)
        batch.train()
        before = batch.rows()
        for sample, feature in enumerate(range(3)):
            rows = batch.store["item" if feature else "user"].read(batch.ids[feature, sample])
            batch.gradient[sample, feature, 1] = value
            batch.ends(feature, sample, update=2, place=int(rows[:, 1].argmax()) if pooling == "max" else 0)
            batch.gradient[sample, feature, 1] = 0.5
        assert torch.equal(before, batch.rows())
        batch.train()
        assert [table.state.step for table in batch.store.tables.values()] == [2, 2]
        batch.store.commit()
        batch.store["item"].write(batch.ids[2, 2, 1:], torch.full((1, WIDTH), NAN))
        batch.gradient[2] = NAN
        batch.ends(2, 2, 3, "row", place=1)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("rule", [SGD(lr=HUGE), Adagrad(), RowWiseAdagrad(), Adam()])
def test_what_an_update_makes_so_is_named_and_not_committed(tier, rule):
    for ids in (None, DYNAMIC):
        with opened(tier, ids, rule) as batch:
            before, batch.gradient[1, 2, 2] = batch.rows(), HUGE
            batch.ends(2, 1, source="row" if isinstance(rule, SGD) else "state")
            with pytest.raises(PartlyTrainedError, match="not finite"):
                batch.store.commit()
            batch.store.rollback(1)
            assert torch.equal(before, batch.rows())


def test_weights_bags_without_ids_several_lookups_of_a_table_and_no_pooling():
    with opened() as batch:
        weights = torch.ones(3 * SAMPLES * 2).index_fill(0, torch.tensor([17]), NAN)
        batch.ends(2, 2, place=1, train=lambda: batch.train(weights))
        bag, rows = (kind(batch.store["user"]) for kind in (tierstore.TieredEmbeddingBag, tierstore.TieredEmbedding))
        bag(torch.tensor([5, 6]), torch.tensor([0, 0])).backward(torch.tensor([[NAN], [0.0]]).expand(2, WIDTH))
        batch.ids = torch.arange(9, 18).view(1, 9, 1)  # of "user", each a bag of its own
        scale = torch.zeros(9, 1, 1).index_fill(0, torch.tensor([5]), NAN)
        loss = bag(torch.arange(6).view(2, 3)).sum() + (rows(batch.ids[0]) * scale).sum()
        batch.ends(0, 5, 2, train=loss.backward)


def test_an_optimizer_of_its_own_looks_in_step_and_names_ids_of_added_gradients():
    with opened(ids=DYNAMIC) as batch:
        optimizer, batch.gradient[2, 1] = batch.store.optimizer(), NAN
        batch.train()
        batch.ends(1, 2, train=optimizer.step)
        batch.train()
        with pytest.raises(NonFiniteError) as caught:
            optimizer.step()
        assert (found := caught.value.found).pop("id") in batch.ids[1, 2].tolist()
        assert found == {"source": "gradient", "table": "item", "feature": None, "sample": None, "update": 1}


def test_a_row_is_the_cause_of_gradients_of_tables_before_it():
    with tierstore.open(cold="memory", ddr="2MiB", threads=1, check_finite="error") as store:
        for name, dim in (("sound", 4), ("bad", 8)):
            store.create_table(tierstore.TableConfig(name=name, num_embeddings=NUM_ROWS, embedding_dim=dim))
        store["bad"].write(torch.tensor([3]), torch.full((1, 8), NAN))
        batch = tierstore.KeyedJaggedTensor(["sound", "bad"], torch.tensor([1, 3]), lengths=torch.ones(2).long())
        values = tierstore.TieredEmbeddingBagCollection(store)(batch).values()
        with pytest.raises(NonFiniteError) as caught:
            values.prod().backward()
        assert caught.value.found.items() >= {"source": "row", "table": "bad", "id": 3, "feature": "bad"}.items()


def test_log_warns_of_the_first_once_and_none_looks_at_nothing(monkeypatch, caplog):
    with opened(check_finite="log") as batch, caplog.at_level(logging.WARNING, "tierstore"):
        batch.gradient[0] = NAN
        for _ in range(3):
            batch.train()
        (told,) = [record.getMessage() for record in caplog.records]
        assert f"source 'gradient', table 'user', id {batch.ids[0, 0, 0]}, feature 'u', sample 0, update 1" in told
        assert batch.rows().isnan().any()
    for name in ("check_gradient", "check_rows"):
        monkeypatch.setattr(lookups, name, None)  # which cannot be called
    with opened(check_finite=None) as batch:
        batch.gradient[0] = NAN
        batch.train()
        batch.store.commit()
