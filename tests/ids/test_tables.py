"""Tables with dynamic ids where the machine does not go: batches under way, readers, servers, options and refusals."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierstore
from tierstore.errors import IdError, TableError
from tierstore.ids import LFU, LRU, TTL, DynamicIds, Frequency, Probability
from tierstore.updates import write_update

BIG = 2**63 - 1


def config(name: str = "item", rows: int = 1000, **options: Any) -> tierstore.TableConfig:
    return tierstore.TableConfig(
        name=name, num_embeddings=rows, embedding_dim=8, optimizer=tierstore.optim.Adagrad(lr=0.1),
        init=tierstore.init.Uniform(0.5, 1.0, seed=3), ids=DynamicIds(**options),
    )  # fmt: skip


def listed(table: tierstore.Table) -> list[int]:
    return sorted(int(each) for part in table.written() for each in part)


def have_rows(table: tierstore.Table, *ids: int) -> list[bool]:
    found: list[bool] = table.read(torch.tensor(ids)).any(dim=1).tolist()
    return found


def train(module: Callable[..., torch.Tensor], *ids: int) -> torch.Tensor:
    out = module(torch.tensor([ids]))
    out.sum().backward()
    return out.detach()


def test_ids_of_a_batch_under_way_keep_their_rows() -> None:
    with tierstore.open(cold="memory", ddr="2MiB") as store:
        table = store.create_table(config(rows=4))
        module = tierstore.TieredEmbeddingBag(table)
        first = module(torch.tensor([[1, 2, BIG, -BIG]]))
        assert not train(module, 5, 6).any()
        assert table.id_stats().refused == 2
        assert table.evict(torch.tensor([1, 2])) == 0
        first.sum().backward()
        assert train(module, 5, 6).all()
        assert listed(table) == [2, 5, 6, BIG], "of equal scores the lowest ids went"
        second = module(torch.tensor([[7, 8]]))
        del second  # no backward will come
        train(module, 9, 10, 11, 12)
        assert listed(table) == [9, 10, 11, 12]


def test_a_newcomer_inherits_nothing() -> None:
    with tierstore.open(cold="memory", ddr="2MiB") as store:
        table = store.create_table(config(rows=1))
        module = tierstore.TieredEmbeddingBag(table)
        train(module, 1)
        first = table.first_values(torch.tensor([1, 2]))
        assert (table.read_state(torch.tensor([1])) > 0).all()
        assert torch.equal(module(torch.tensor([[2]])).detach(), first[1:])
        assert not table.read_state(torch.tensor([2])).any()
        assert torch.equal(train(module, 1), first[:1]), "and neither does one that comes back"


def test_a_reader_follows(tmp_path: Path) -> None:
    with tierstore.open(tmp_path / "s", ddr="2MiB", keep=2) as store:
        table = store.create_table(config(rows=4))
        module = tierstore.TieredEmbeddingBag(table)
        train(module, 1, 2)
        store.commit()
        with tierstore.open(tmp_path / "s", mode="r", ddr="2MiB") as reader:
            shown = reader["item"]
            with torch.enable_grad():
                tierstore.TieredEmbeddingBag(shown)(torch.tensor([[77]]))  # read-only: nothing is admitted
            assert have_rows(shown, 1, 2, 3, 77) == [True, True, False, False]
            train(module, 3, 4, 5)
            table.evict(torch.tensor([4]))
            store.commit()
            assert have_rows(shown, 1, 2, 3) == [True, True, False]
            reader.refresh()
            ids = torch.tensor([1, 2, 3, 4, 5])
            assert torch.equal(shown.read(ids), table.read(ids))
            assert listed(shown) == listed(table)
            assert shown.ids is not None
            shown.ids.check_integrity()
        with tierstore.open(tmp_path / "s", mode="r", version=1, ddr="2MiB") as earlier:
            assert listed(earlier["item"]) == [1, 2]


def batches(count: int) -> list[tierstore.KeyedJaggedTensor]:
    generator = np.random.default_rng(0)
    ranges = (-90, 90, 40), (0, 40, 20), (0, 9, 10)
    lengths = torch.tensor([10] * 4 + [5] * 4 + [2, 2, 3, 3])
    return [
        tierstore.KeyedJaggedTensor(
            ["item", "shop", "plain"],
            torch.from_numpy(np.concatenate([generator.integers(*each) for each in ranges])),
            lengths=lengths,
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("is_deferred", [False, True])
@pytest.mark.parametrize(("depth", "ddr"), [(0, "2MiB"), (3, "2MiB"), (3, "440KiB")])
def test_a_collection_gives_the_same_bits_prefetched_and_deferred(depth: int, ddr: str, is_deferred: bool) -> None:
    outputs = []
    for how in ((0, "4MiB", False), (depth, ddr, is_deferred)):
        with tierstore.open(cold="memory", ddr=how[1]) as store:
            store.create_table(config(rows=60, eviction=LFU(3)))
            store.create_table(config("shop", 30, admission=Frequency(2)))
            store.create_table(tierstore.TableConfig(name="plain", num_embeddings=9, embedding_dim=8))
            module = tierstore.TieredEmbeddingBagCollection(store)
            optimizer = store.optimizer() if how[2] else None
            found = []
            for batch in tierstore.prefetch(batches(20), module, depth=how[0]):
                out = module(batch).values()
                found.append(out.detach().clone())
                out.square().sum().backward()
                if optimizer is not None:
                    optimizer.step()
                    optimizer.zero_grad()
            assert store["item"].id_stats().evicted > 0
            outputs.append(torch.stack(found))
    assert torch.equal(*outputs)


def test_embeddings_weights_and_empty_bags() -> None:
    with tierstore.open(cold="memory", ddr="2MiB") as store:
        table = store.create_table(config(admission=Frequency(2)))
        rows = tierstore.TieredEmbedding(table)(torch.tensor([[5, 6], [5, 7]]))
        assert rows.any(dim=2).tolist() == [[True, False], [True, False]]
        rows.sum().backward()
        weights = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
        bag = tierstore.TieredEmbeddingBag(table)
        out = bag(torch.tensor([8, 5, 9]), torch.tensor([0, 2]), weights)
        value = table.read(torch.tensor([5]))[0]
        assert torch.equal(out.detach(), torch.stack([2 * value, torch.zeros(8)]))
        out.sum().backward()
        assert weights.grad is not None
        assert torch.allclose(weights.grad, torch.tensor([0.0, float(value.sum()), 0.0]))


def test_unseen_error_and_writes() -> None:
    with tierstore.open(cold="memory", ddr="2MiB") as store:
        table = store.create_table(config(unseen="error"))
        with pytest.raises(IdError, match="-4"):
            table.read(torch.tensor([-4]))
        assert table.admit(torch.tensor([-4, -4])) == 2
        table.write(torch.tensor([-4]), torch.full((1, 8), 2.0))
        assert table.pooled(torch.tensor([-4, -4]), torch.tensor([0, 2])).tolist() == [[4.0] * 8]
        with pytest.raises(IdError, match="admit"):
            store.create_table(config("other")).write(torch.tensor([1]), torch.ones(1, 8))


def test_probability_is_a_function_of_seed_id_and_batch() -> None:
    found = []
    for _ in range(2):
        with tierstore.open(cold="memory", ddr="2MiB") as store:
            table = store.create_table(config(rows=5000, admission=Probability(0.25, seed=4)))
            table.admit(torch.arange(4000))
            found.append(listed(table))
    assert found[0] == found[1]
    assert 850 < len(found[0]) < 1150


@pytest.mark.parametrize(
    "rules",
    [
        DynamicIds(),
        DynamicIds(admission=Frequency(3, 50), eviction=LFU(7), unseen="error"),
        DynamicIds(admission=Probability(0.5, 1), eviction=TTL(9)),
    ],
)
def test_a_configuration_is_read_back(rules: DynamicIds) -> None:
    made = replace(config(), ids=rules)
    assert tierstore.TableConfig.from_dict(made.to_dict()) == made
    assert "ids" not in replace(made, ids=None).to_dict(), "releases that do not know ids read all other tables"


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Frequency(1), "times"),
        (lambda: Frequency(2, 0), "candidates"),
        (lambda: Probability(1.0), "share"),
        (lambda: TTL(0), "steps"),
        (lambda: DynamicIds(unseen="init"), "unseen"),  # type: ignore[arg-type]
        (lambda: DynamicIds(eviction=Frequency(2)), "eviction"),  # type: ignore[arg-type]
        (lambda: replace(config(), ids=LRU()), "DynamicIds"),
    ],
)
def test_wrong_rules_are_refused(make: Callable[[], object], named: str) -> None:
    with pytest.raises((ValueError, TypeError), match=named):
        make()


def test_what_is_not_supported_says_so(tmp_path: Path) -> None:
    unsupported = re.escape("not supported by")
    with tierstore.open(tmp_path / "s", ddr="2MiB") as store:
        table = store.create_table(config())
        plain = store.create_table(tierstore.TableConfig(name="plain", num_embeddings=9, embedding_dim=8))
        train(tierstore.TieredEmbeddingBag(table), 1)
        store.commit()
        for action in (
            lambda: store.change_table("item", num_embeddings=2000),
            lambda: store.change_table("item", optimizer=tierstore.optim.Adam()),
            lambda: tierstore.TieredEmbeddingBag(table, padding_idx=3),
            lambda: tierstore.plain_model(tierstore.TieredEmbeddingBag(table)),
            lambda: tierstore.checkpoint.rows(store),
        ):
            with pytest.raises(TableError, match=unsupported):
                action()
        with pytest.raises(TableError, match="DynamicIds"):
            plain.admit(torch.tensor([1]))
        store.change_table("item", name="goods")
        assert have_rows(store["goods"], 1, 2) == [True, False]
    for action in (
        lambda: tierstore.open(tmp_path / "s", ddr="2MiB", hbm="1MiB"),
        lambda: write_update(tmp_path / "s", tmp_path / "u"),
        lambda: tierstore.quantize(tmp_path / "s", tmp_path / "q", dtype="int8"),
    ):
        with pytest.raises(TableError, match=unsupported):
            action()
    with tierstore.open(tmp_path / "s", ddr="2MiB") as store:
        store.drop_table("goods")
        store.commit()
        assert list(store.tables) == ["plain"]
