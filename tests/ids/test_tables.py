"""Tables with dynamic ids where the machine does not go: batches under way, readers, servers, options and refusals."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierstore
from tests.hbm.stores import few_slots
from tierstore.errors import IdError, TableError
from tierstore.ids import LFU, LRU, TTL, DynamicIds, Frequency, Probability
from tierstore.store.stored_ids import Changed
from tierstore.store.table_ids import TableIds

BIG = 2**63 - 1


def config(name: str = "item", rows: int = 1000, **options: Any) -> tierstore.TableConfig:
    return tierstore.TableConfig(
        name=name, num_embeddings=rows, embedding_dim=8, optimizer=tierstore.optim.Adagrad(lr=0.1),
        init=tierstore.init.Uniform(0.5, 1.0, seed=3), ids=DynamicIds(**options),
    )  # fmt: skip


@pytest.fixture(params=["ddr", "few in hbm", "all in hbm"])
def tiers(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """Arguments of ``tierstore.open``."""
    with few_slots(3) if request.param == "few in hbm" else contextlib.nullcontext():
        yield {"ddr": "2MiB"} | ({} if request.param == "ddr" else {"hbm": "1MiB", "device": "cpu"})


def listed(table: tierstore.Table) -> list[int]:
    return sorted(int(each) for part in table.written() for each in part)


def have_rows(table: tierstore.Table, *ids: int) -> list[bool]:
    found: list[bool] = table.read(torch.tensor(ids)).any(dim=1).tolist()
    return found


def train(module: Callable[..., torch.Tensor], *ids: int) -> torch.Tensor:
    out = module(torch.tensor([ids]))
    out.sum().backward()
    return out.detach()


def test_ids_of_a_batch_under_way_keep_their_rows(tiers: dict[str, Any]) -> None:
    with tierstore.open(cold="memory", **tiers) as store:
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


def test_a_reader_follows(tmp_path: Path, tiers: dict[str, Any]) -> None:
    with tierstore.open(tmp_path / "s", **tiers, keep=3) as store:
        table = store.create_table(config(rows=4))
        module = tierstore.TieredEmbeddingBag(table)
        train(module, 1, 2)
        store.commit()
        with tierstore.open(tmp_path / "s", mode="r", **tiers) as reader:
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
            train(tierstore.TieredEmbeddingBag(store.change_table("item", num_embeddings=6)), 6, 7, 8)
            store.commit()
            with tierstore.open(tmp_path / "s", mode="r", version=1, **tiers) as earlier:
                assert listed(earlier["item"]) == [1, 2]
            reader.refresh()
            assert listed(reader["item"]) == listed(store["item"]) == [2, 3, 5, 6, 7, 8]
            store.change_table("item", ids=DynamicIds(eviction=TTL(9), unseen="init"))
            train(tierstore.TieredEmbeddingBag(store["item"]), 9)
            store.commit()
            reader.refresh()
            assert torch.equal(reader["item"].read(ids), store["item"].read(ids))
            assert reader["item"].read(ids).any(dim=1).all()
            store.change_table("item", ids=DynamicIds())
            store.commit()
            reader.refresh()
            assert listed(reader["item"]) == listed(store["item"])
            train(tierstore.TieredEmbeddingBag(store.change_table("item", optimizer=tierstore.optim.Adam())), 1)
            store.commit()
            reader.refresh()
            assert torch.equal(reader["item"].read(ids), store["item"].read(ids))
            assert reader["item"].read_state(ids).any(dim=1).tolist() == [True, False, False, False, False]


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
@pytest.mark.parametrize("depth", [0, 3])
def test_a_collection_gives_the_same_bits_prefetched_and_deferred(
    depth: int, is_deferred: bool, tiers: dict[str, Any]
) -> None:
    outputs = []
    for how in ((0, {"ddr": "4MiB"}, False), (depth, {**tiers, "ddr": "512KiB"}, is_deferred)):
        with tierstore.open(cold="memory", **how[1]) as store:
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


@pytest.mark.parametrize("padding", [0, -1, -(2**63), BIG, 2**32 + 5])
@pytest.mark.parametrize("pooling", ["sum", "mean", "max"])
def test_a_padding_index_is_any_id_and_never_has_a_row(padding: int, pooling: Any, tiers: dict[str, Any]) -> None:
    ids = torch.tensor([[5, padding, 6], [padding, padding, padding], [7, 5, padding]])
    with tierstore.open(cold="memory", **tiers) as store:
        table = store.create_table(replace(config(unseen="error"), pooling=pooling))
        rows = tierstore.TieredEmbedding(table, padding_idx=padding)
        bag = tierstore.TieredEmbeddingBag(table, padding_idx=padding)
        out, pooled = rows(ids), bag(ids)
        own = torch.where(ids[..., None] == padding, torch.nan, table.first_values(ids.reshape(-1)).view(3, 3, 8))
        assert torch.equal(out, own.nan_to_num(0))
        kept = [each[~each.isnan().any(dim=1)] for each in own]
        expected = torch.nn.EmbeddingBag.from_pretrained(torch.cat(kept), mode=pooling, include_last_offset=True)
        assert torch.equal(pooled, expected(torch.arange(4), torch.tensor([0, 2, 2, 4])))
        (out.sum() + pooled.sum()).backward()
        assert listed(table) == [5, 6, 7]
        assert table.id_stats().refused == 0
        narrow = torch.tensor([5, 6], dtype=torch.int32)
        for found in (bag(narrow, torch.tensor([0, 1])), rows(narrow)):
            assert torch.equal(found.detach(), table.read(narrow))


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


@pytest.mark.parametrize(
    "rules",
    [
        DynamicIds(),
        DynamicIds(admission=Frequency(3, 50), eviction=LFU(7), unseen="error"),
        DynamicIds(admission=Probability(0.5, 1), eviction=TTL(9)),
        DynamicIds(admission=Frequency(np.int64(3), np.int64(9)), eviction=TTL(minutes=np.int64(9))),  # type: ignore[arg-type]
    ],
)
def test_a_configuration_is_read_back(rules: DynamicIds) -> None:
    made = replace(config(), ids=rules)
    assert tierstore.TableConfig.from_dict(json.loads(json.dumps(made.to_dict()))) == made
    assert "ids" not in replace(made, ids=None).to_dict(), "releases that do not know ids read all other tables"


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Frequency(1), "times"),
        (lambda: Frequency(2, 0), "candidates"),
        (lambda: Probability(1.0), "share"),
        (lambda: TTL(0), "steps"),
        (lambda: TTL(minutes=0), "minutes"),
        (lambda: TTL(3, minutes=3), "either"),
        (lambda: DynamicIds(unseen="ones"), "unseen"),  # type: ignore[arg-type]
        (lambda: DynamicIds(eviction=Frequency(2)), "eviction"),  # type: ignore[arg-type]
        (lambda: replace(config(), ids=LRU()), "DynamicIds"),
    ],
)
def test_wrong_rules_are_refused(make: Callable[[], object], named: str) -> None:
    with pytest.raises((ValueError, TypeError), match=named):
        make()


def test_a_table_is_renamed_and_dropped(tmp_path: Path) -> None:
    with tierstore.open(tmp_path / "s", ddr="2MiB") as store:
        table = store.create_table(config())
        plain = store.create_table(tierstore.TableConfig(name="plain", num_embeddings=9, embedding_dim=8))
        train(tierstore.TieredEmbeddingBag(table), 1)
        store.commit()
        with pytest.raises(TableError, match="DynamicIds"):
            plain.admit(torch.tensor([1]))
        store.change_table("item", name="goods")
        assert have_rows(store["goods"], 1, 2) == [True, False]
    with tierstore.open(tmp_path / "s", ddr="2MiB") as store:
        store.drop_table("goods")
        store.commit()
        assert list(store.tables) == ["plain"]


def test_what_was_prepared_is_looked_up_by_the_rows_of_now(tiers: dict[str, Any]) -> None:
    """Without gradients, too: a row that another id has by now is not that id's."""
    with tierstore.open(cold="memory", **tiers) as store:
        table = store.create_table(config(rows=1))
        module = tierstore.TieredEmbeddingBag(table)
        table.admit(torch.tensor([1]))
        batches = [torch.tensor([[1]]), torch.tensor([[1]]), torch.tensor([[1]])]
        with torch.no_grad():
            for step, batch in enumerate(tierstore.prefetch(batches, module, depth=3)):
                assert bool(module(batch).any()) == (step == 0)
                table.admit(torch.tensor([2]))  # takes the only row
        assert not store["item"].pool.in_use


def test_readers_meet_no_row_of_another_id(tiers: dict[str, Any]) -> None:
    """While ids move: a row is the id's own first value, or zeros."""
    with tierstore.open(cold="memory", **tiers) as store:
        table = store.create_table(config(rows=8))
        own = table.first_values(torch.arange(64))
        seen, is_over = [], threading.Event()

        def read() -> None:
            module = tierstore.TieredEmbedding(table)
            generator = torch.Generator().manual_seed(1)
            while not is_over.is_set():
                ids = torch.randint(64, (8,), generator=generator)
                with torch.no_grad():
                    for rows in (table.read(ids), module(ids), table.pooled(ids, torch.arange(9))):
                        has_row = rows.any(dim=1)
                        seen.append((torch.equal(rows[has_row], own[ids[has_row]]), int(has_row.sum())))

        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(read)
            for step in range(300):
                table.admit(torch.arange(8) + step * 5 % 56)
            is_over.set()
            reading.result()
        assert all(is_right for is_right, _ in seen)
        assert sum(count for _, count in seen) > 0


def test_what_step_will_train_keeps_its_rows(tiers: dict[str, Any]) -> None:
    """Micro-batches whose gradients are merged, and two lookups of one pass."""
    with tierstore.open(cold="memory", **tiers) as store:
        table = store.create_table(config(rows=4))
        module, optimizer = tierstore.TieredEmbeddingBag(table), store.optimizer()
        train(module, 1)
        (module(torch.tensor([[2]])) + module(torch.tensor([[3]]))).sum().backward()
        assert table.evict(torch.tensor([1, 2, 3])) == 0
        train(module, 7, 8)
        assert {1, 2, 3} <= set(listed(table))
        optimizer.step()
        before = table.first_values(torch.tensor([1, 2, 3]))
        assert (table.read(torch.tensor([1, 2, 3])) < before).all()
        optimizer.zero_grad()
        assert table.evict(torch.tensor([1, 2, 3])) == 3
        out = module(torch.tensor([[9]]))
        out.sum().backward()
        optimizer.zero_grad()
        assert table.evict(torch.tensor([9])) == 1


def test_a_batch_is_trained_twice_only_while_its_ids_have_their_rows() -> None:
    with tierstore.open(cold="memory", ddr="2MiB") as store:
        table = store.create_table(config(rows=2))
        module = tierstore.TieredEmbeddingBag(table)
        out = module(torch.tensor([[1, 2]])).sum()
        out.backward(retain_graph=True)
        out.backward(retain_graph=True)
        train(module, 3)
        with pytest.raises(RuntimeError, match="retain_graph"):
            out.backward()


def test_changes_wait_for_batches_under_way_and_for_commits(tmp_path: Path, tiers: dict[str, Any]) -> None:
    with tierstore.open(tmp_path / "s", **tiers) as store:
        table = store.create_table(config(rows=2))
        module = tierstore.TieredEmbeddingBag(table)
        train(module, 1, 2)
        store.commit()
        out = module(torch.tensor([[3]]))
        assert store.changed_tables == ("item",)
        with pytest.raises(TableError, match="in use"):
            store.rollback(1)
        del out
        with pytest.raises(TableError, match="commit or roll back"):
            store.change_table("item", name="goods")
        store.rollback(1)
        assert listed(table) == [1, 2]


def test_unseen_ids_are_an_error_where_they_are_looked_up_not_where_they_are_prepared() -> None:
    with tierstore.open(cold="memory", ddr="2MiB") as store:
        store.create_table(config(unseen="error"))
        bags, rows = tierstore.TieredEmbeddingBagCollection(store), tierstore.TieredEmbeddingCollection(store)
        batches = [
            tierstore.KeyedJaggedTensor(["item"], torch.tensor([step, step + 1]), lengths=torch.tensor([2]))
            for step in range(5)
        ]
        for batch in tierstore.prefetch(batches, bags, depth=2):
            bags(batch).values().sum().backward()
        with torch.no_grad():
            assert rows(batches[0])["item"].values().all()
            unknown = tierstore.KeyedJaggedTensor(["item"], torch.tensor([70]), lengths=torch.tensor([1]))
            with pytest.raises(IdError, match="70"):
                rows(unknown)


def test_stochastic_rounding_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    """It draws by a row's number, so a store that is opened again gives new ids the rows that they would have got."""
    found = []
    for reopens in (False, True):
        path = tmp_path / str(reopens)
        store = tierstore.open(path, ddr="2MiB")
        made = replace(config(rows=30), dtype="bfloat16", rounding="stochastic", optimizer=tierstore.optim.SGD(lr=0.01))
        store.create_table(made)
        for step in range(12):
            train(tierstore.TieredEmbeddingBag(store["item"]), *range(7 * step, 7 * step + 10))
            if step % 4 == 3:
                store.commit()
                if reopens:
                    store.close()
                    store = tierstore.open(path, ddr="2MiB")
        ids = torch.tensor(listed(store["item"]))
        found.append((ids, store["item"].read(ids)))
        store.close()
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_a_call_that_refuses_what_goes_keeps_it_and_may_not_use_the_store() -> None:
    with tierstore.open(cold="memory", ddr="2MiB") as store:
        table = store.create_table(config(rows=3))

        def refuse(ids: torch.Tensor, rows: torch.Tensor) -> None:
            raise MemoryError(f"{ids.tolist()}, {len(rows)}")

        table.admit(torch.tensor([7, 8, 9]))
        rows = table.read(torch.tensor([7, 8, 9]))
        table.on_evict(refuse)
        for call, key in ((table.evict, 7), (table.admit, 6)):
            with pytest.raises(MemoryError, match="7"):
                call(torch.tensor([key]))
            assert torch.equal(table.read(torch.tensor([7, 8, 9])), rows)
        for use in (lambda: table.evict(torch.tensor([8])), lambda: table.admit(torch.tensor([1])), store.commit):
            table.on_evict(lambda ids, rows, use=use: use())  # type: ignore[misc]
            with pytest.raises(TableError, match="on_evict"):
                table.evict(torch.tensor([7]))
        assert listed(table) == [7, 8, 9]
        table.on_evict(None)
        table.admit(torch.tensor([6]))
        assert table.id_stats().evicted == 1
        assert not table.read(torch.tensor([7])).any()


def test_rows_that_were_imported_before_any_time_is_known_are_of_the_first_batch() -> None:
    with tierstore.open(cold="memory", ddr="2MiB") as store:
        table = store.create_table(replace(config(), ids=DynamicIds(eviction=TTL(minutes=5))))
        table.give_rows(np.arange(50))
        store.set_time(1e9)
        for later in range(0, 301, 60):
            store.set_time(1e9 + later)
            table.admit(torch.tensor([99]))
            assert len(listed(table)) == 51
        store.set_time(1e9 + 400)
        table.admit(torch.tensor([99]))
        assert listed(table) == [99]
    assert len({rule.scores for rule in (LFU(), LRU(), TTL(minutes=5))}) == 3
    assert TTL(5).scores == LRU().scores


def test_a_lost_clock_is_that_of_the_newest_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As repair leaves a store whose row 0 of ids was damaged."""
    with tierstore.open(tmp_path, ddr="2MiB") as store:
        table = store.create_table(replace(config(), num_embeddings=3))
        for key in range(9):
            table.admit(torch.tensor([key]))
        with monkeypatch.context() as patch:
            patch.setattr(TableIds, "_of_all", Changed(np.zeros(1, np.int64), np.zeros((1, 2), np.uint64)))
            store.commit()
    with tierstore.open(tmp_path, ddr="2MiB") as store:
        assert store["item"].admit(torch.tensor([20, 21])) == 2
        assert listed(store["item"]) == [8, 20, 21]


def test_a_commit_and_a_rollback_in_two_threads_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with tierstore.open(cold="memory", ddr="2MiB", keep=3) as store:
        table = store.create_table(config())
        version = store.commit()
        table.admit(torch.tensor([1]))
        require_unused = store._pools.require_unused

        def slow(action: str) -> None:
            committing.start()
            committing.join(0.3)  # it gets as far as it can
            require_unused(action)

        monkeypatch.setattr(store._pools, "require_unused", slow)
        committing = threading.Thread(target=store.commit, daemon=True)
        rolling_back = threading.Thread(target=store.rollback, args=(version,), daemon=True)
        rolling_back.start()
        for each in (rolling_back, committing):
            each.join(30)
            assert not each.is_alive()


def test_the_clock_is_kept_though_the_newest_ids_went(tmp_path: Path) -> None:
    """By which batches look for ids whose time is over: here one in four minutes."""
    old, new = torch.tensor([1]), torch.tensor([2])
    with tierstore.open(tmp_path, ddr="2MiB") as store:
        table = store.create_table(replace(config(), ids=DynamicIds(eviction=TTL(minutes=64))))
        for minute, ids in ((1, old), (65, new)):
            store.set_time(60 * minute)
            table.admit(ids)
        table.evict(new)
        store.commit()
    for minute, left in ((66, [1, 2]), (67, [2])):
        with tierstore.open(tmp_path, ddr="2MiB") as store:
            store.set_time(60 * minute)
            store["item"].admit(new)
            assert listed(store["item"]) == left
