"""Where values stopped being finite: source, table, id, feature, sample and update, in each tier and way to train."""

import contextlib
import logging

import pytest
import torch

import tierstore
from tests.hbm.stores import few_slots
from tierstore.errors import NonFiniteError, PartlyTrainedError
from tierstore.lookup import lookup as lookups
from tierstore.optim import SGD, Adagrad, Adam, RowWiseAdagrad

ROWS, DIM, SAMPLES, FEATURES = 300, 4, 3, ["u", "clicked", "bought"]
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
    fields = {"num_embeddings": ROWS, "embedding_dim": DIM, "pooling": pooling, "optimizer": rule or SGD(lr=0.5)}
    with few_slots(64) if tier == "hbm cache" else contextlib.nullcontext(), tierstore.open(**options) as store:
        store.create_table(tierstore.TableConfig(name="user", feature_names=FEATURES[:1], **fields))
        store.create_table(tierstore.TableConfig(name="item", feature_names=FEATURES[1:], ids=ids, **fields))
        store.commit()
        yield Batch(store)


class Batch:
    def __init__(self, store):
        self.store, self.module = store, tierstore.TieredEmbeddingBagCollection(store)
        self.ids = torch.randint(0, ROWS, (3, SAMPLES, 2), generator=torch.Generator().manual_seed(0))
        self.ids[1:] = self.ids[1:] if store["item"].ids is None else self.ids[1:] * 2**40 - 7
        self.gradient = torch.zeros(SAMPLES, 3, DIM)

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
        batch.store["item"].write(batch.ids[2, 2, 1:], torch.full((1, DIM), NAN))
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
        bag(torch.tensor([5, 6]), torch.tensor([0, 0])).backward(torch.tensor([[NAN], [0.0]]).expand(2, DIM))
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
            store.create_table(tierstore.TableConfig(name=name, num_embeddings=ROWS, embedding_dim=dim))
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
