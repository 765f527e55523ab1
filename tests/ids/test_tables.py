"""Tables with dynamic ids where the machine does not go: batches in flight, readers, callbacks, times and refusals."""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

import tierstore
from tests.hbm.stores import MODES, few_slots
from tests.ids.test_machine import INIT
from tests.io.support import flip, place_of
from tests.serve.models.stores import asked, tensor
from tierstore.errors import IdError, TableError
from tierstore.ids import LFU, LRU, TTL, DynamicIds, Frequency, Probability
from tierstore.offline.salvage import salvage
from tierstore.pool.writeback import WriteBack
from tierstore.serve.models import Models

BIG = 2**63 - 1


def config(name: str = "item", rows: int = 1000, **options: Any) -> tierstore.TableConfig:
    return tierstore.TableConfig(
        name=name, num_embeddings=rows, embedding_dim=8, optimizer=tierstore.optim.Adagrad(lr=0.1),
        init=tierstore.init.Uniform(0.5, 1.0, seed=3), ids=DynamicIds(**options),
    )  # fmt: skip


@pytest.fixture(params=["ddr", "few in hbm", "all in hbm"])
def tiers(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
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


def test_ids_of_a_batch_under_way_keep_their_rows(tiers):
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


def test_first_values_reach_the_rows_that_a_new_table_moved_meanwhile(monkeypatch):
    with tierstore.open(cold="memory", ddr="2MiB") as store:
        table, begin_update = store.create_table(config(rows=4)), WriteBack.begin_update
        table.admit(torch.arange(4))
        store.commit()
        assert table.evict(torch.tensor([1]))

        def begin_after_another(writeback, slots):  # which begins while this one waits for a full outbox
            monkeypatch.undo()
            store.create_table(config("new"))
            begin_update(writeback, slots)

        monkeypatch.setattr(WriteBack, "begin_update", begin_after_another)
        table.admit(torch.tensor([5]))
        assert torch.equal(table.read(torch.tensor([5])), table.first_values(torch.tensor([5])))


def test_a_reader_follows(tmp_path, tiers):
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


@pytest.mark.parametrize("padding", [0, -(2**63), 2**32 + 5])
@pytest.mark.parametrize("pooling", ["sum", "mean", "max"])
def test_a_padding_index_is_any_id_and_never_has_a_row(padding, pooling, tiers):
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


def test_what_was_prepared_is_looked_up_by_the_rows_of_now(tiers):
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


def test_readers_meet_no_row_of_another_id(tiers):
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
            for step in range(100):
                table.admit(torch.arange(8) + step * 5 % 56)
            is_over.set()
            reading.result()
        assert all(is_right for is_right, _ in seen)
        assert sum(count for _, count in seen) > 0


def test_what_step_will_train_keeps_its_rows(tiers):
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
        train(module, 9)
        optimizer.zero_grad()
        assert table.evict(torch.tensor([9])) == 1


def test_a_batch_is_trained_twice_only_while_its_ids_have_their_rows():
    with tierstore.open(cold="memory", ddr="2MiB") as store:
        table = store.create_table(config(rows=2))
        module = tierstore.TieredEmbeddingBag(table)
        out = module(torch.tensor([[1, 2]])).sum()
        out.backward(retain_graph=True)
        out.backward(retain_graph=True)
        train(module, 3)
        with pytest.raises(RuntimeError, match="retain_graph"):
            out.backward()


@pytest.mark.parametrize("steps", ["train", "step", "zero", "rollback"])
@pytest.mark.parametrize(("is_merged", "hbm"), [(False, 0), (True, "1MiB")])
def test_a_gradient_that_was_applied_trains_no_other_id(steps, is_merged, hbm):
    with tierstore.open(cold="memory", ddr="2MiB", hbm=hbm) as store:
        table = store.create_table(config(rows=2))
        module, optimizer = tierstore.TieredEmbeddingBag(table), store.optimizer()
        version = store.commit()
        train(module, 1, 2)
        if is_merged:
            optimizer.clip_grad_norm_(max_norm=1e9)
        optimizer.step()
        if steps == "rollback":
            store.rollback(version)
        if steps == "zero":
            optimizer.zero_grad(set_to_none=False)
        table.admit(torch.tensor([3, 4]))  # they get the rows of 1 and 2
        rows = table.read(torch.tensor([3, 4]))
        if steps in ("train", "rollback"):
            with pytest.warns(RuntimeWarning, match="zero_grad"):
                train(module, 3)
        if steps == "zero":
            optimizer.step()
        else:
            with pytest.raises(RuntimeError, match="zero_grad"):
                optimizer.step()
        assert torch.equal(table.read(torch.tensor([3, 4])), rows)
        optimizer.zero_grad()
        train(module, 3)
        optimizer.step()
        assert (table.read(torch.tensor([3, 4])) < rows).any(dim=1).tolist() == [True, False]


@pytest.mark.parametrize("minute", [0, 1, 50])
@pytest.mark.parametrize("way", ["admitted", "given", "given before"])
def test_any_minute_is_a_time(minute, way, tmp_path):
    """Also the first. Rows that were given before any time is known are of the first batch's."""
    with tierstore.open(tmp_path, ddr="2MiB") as store:
        table = store.create_table(config(eviction=TTL(minutes=16)))
        with pytest.raises(RuntimeError, match="set_time"):
            table.admit(torch.tensor([1]))
        if way == "given before":
            table.give_rows(np.array([1]))
        store.set_time(60 * minute)
        if way == "given":
            table.give_rows(np.array([1]))
        if way == "admitted":
            table.admit(torch.tensor([1]))
        store.commit()
        table = store.change_table("item", num_embeddings=2000)
        assert table.admit(torch.tensor([2])) == 1
        store.rollback(store.version)
        assert table.admit(torch.tensor([3])) == 1
        with pytest.raises(ValueError, match="back"):
            store.set_time(60 * minute - 1)
        store.set_time(60 * minute + 1000)
        table.admit(torch.tensor([2]))
        assert listed(table) == [1, 2, 3]
        store.set_time(60 * minute + 1020)
        table.admit(torch.tensor([2]))
        assert listed(table) == [2]


def test_a_clock_that_repair_has_lost_is_that_of_the_newest_id(tmp_path):
    with tierstore.open(tmp_path / "store", ddr="2MiB") as store:
        table = store.create_table(config(rows=3))
        for key in range(9):
            table.admit(torch.tensor([key]))
        store.commit()
        flip(tmp_path / "store", place_of(store._cold, table.index + 1, 0).row)
    assert len(salvage(tmp_path / "store", tmp_path / "saved").lost) == 1
    with tierstore.open(tmp_path / "saved", ddr="2MiB") as store:
        assert store["item"].admit(torch.tensor([20, 21])) == 2
        assert listed(store["item"]) == [8, 20, 21]


COUNTED = {"admission": Frequency(2, 40)}
REFUSED: list[tuple[Callable[[tierstore.Store], object], Any, str]] = [
    (lambda _: Frequency(1), ValueError, "times"),
    (lambda _: Probability(1.0), ValueError, "share"),
    (lambda _: TTL(minutes=0), ValueError, "minutes"),
    (lambda _: TTL(3, minutes=3), ValueError, "either"),
    (lambda _: DynamicIds(unseen="ones"), ValueError, "unseen"),  # type: ignore[arg-type]
    (lambda _: DynamicIds(eviction=Frequency(2)), TypeError, "eviction"),  # type: ignore[arg-type]
    (lambda _: replace(config(), ids=LRU()), TypeError, "DynamicIds"),
    (lambda store: store["item"].write(torch.tensor([1]), torch.ones(1, 8)), IdError, "admit"),
    (lambda store: store["error"].read(torch.tensor([-4])), IdError, "-4"),
    (lambda store: store["plain"].admit(torch.tensor([1])), TableError, "DynamicIds"),
    (lambda store: store.change_table("plain", ids=DynamicIds()), ValueError, r"cannot follow None .* import"),
    *(
        (lambda store, ids=ids: store.change_table("item", ids=ids), ValueError, r"cannot follow .* import")
        for ids in (
            DynamicIds(), DynamicIds(admission=Frequency(2, 39)), DynamicIds(admission=Probability(0.5)),
            DynamicIds(**COUNTED, eviction=LFU()), DynamicIds(**COUNTED, eviction=TTL(minutes=4)),  # type: ignore[arg-type]
        )
    ),
]  # fmt: skip


def test_wrong_rules_and_uses_are_refused():
    with tierstore.open(cold="memory", ddr="2MiB") as store:
        table = store.create_table(config(**COUNTED))
        store.create_table(config("error", unseen="error"))
        store.create_table(tierstore.TableConfig(name="plain", num_embeddings=9, embedding_dim=8))
        for call, error, message in REFUSED:
            with pytest.raises(error, match=message):
                call(store)
        assert store["item"] is table


SAMPLES, COUNT = 4, 40
IDS = (torch.arange(COUNT) * 0x1E3779B97F4A7C15).sort().values
WITH_UNSEEN = DynamicIds(admission=Frequency(2), unseen="init")
RULES = {"item": WITH_UNSEEN, "left": replace(WITH_UNSEEN, unseen="zeros"), "all": DynamicIds()}


def pooled(rows: Tensor, known: Tensor, mode: str) -> Tensor:
    """One bag of rows, float32 [n, dim]: float32 [dim]."""
    if not known.all() and known.any():
        one, other, share = *(pooled(rows[own], known[own], mode) for own in (known, ~known)), known.float().mean()
        if mode == "max":
            return torch.where(other > one, other, one)
        return one * share + other * (1 - share) if mode == "mean" else one + other
    if mode == "max" and len(rows):
        return rows.max(0).values
    total: Tensor = sum(rows, torch.zeros(rows.shape[1]))
    return total / len(rows) if mode == "mean" and len(rows) else total


@pytest.mark.parametrize(("mode", "is_weighted"), [("sum", True), *((mode, False) for mode in MODES)])
@settings(max_examples=6, deadline=None, phases=[Phase.generate])
@given(
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]), seed=st.integers(0, 2**16), is_deferred=st.booleans(),
    depth=st.sampled_from([0, 2]), hbm=st.sampled_from([0, 9, 500]),
)  # fmt: skip
def test_an_id_without_a_row_counts_as_the_row_it_would_get(mode, is_weighted, dtype, seed, is_deferred, depth, hbm):
    """In a lookup with a table whose unseen ids are left out."""
    random, seen, taken, batches = torch.Generator().manual_seed(seed), Counter[int](), [], []
    for _ in range(5):
        lengths = torch.randint(0, 6, (2 * SAMPLES,), generator=random)
        taken.append(torch.randint(0, COUNT, (int(lengths.sum()),), generator=random))
        given, names = torch.randn(len(taken[-1]), generator=random).repeat(2), ["item", "item2", "left", "left2"]
        weights = given.requires_grad_() if is_weighted else None
        batches.append(tierstore.KeyedJaggedTensor(names, IDS[taken[-1]].repeat(2), weights, lengths=lengths.repeat(2)))
    options: Any = {"hbm": "1MiB", "device": "cpu"} if hbm else {}
    few = few_slots(hbm) if hbm else contextlib.nullcontext()
    with few, tierstore.open(cold="memory", ddr="2MiB", **options) as store:
        for name, rules in RULES.items():
            made = replace(config(name), init=INIT, dtype=dtype, pooling=mode, optimizer=tierstore.optim.SGD(lr=0.5))
            store.create_table(replace(made, feature_names=(name, f"{name}2"), ids=rules))
        item, every = store["item"], store["all"]
        every.admit(IDS)
        start, module = every.read(IDS), tierstore.TieredEmbeddingBagCollection(store, tables=["item", "left"])
        optimizer = store.optimizer() if is_deferred else None
        for places, batch in zip(taken, tierstore.prefetch(batches, module, depth=depth), strict=True):
            out, weights = module(batch).values(), batch.weights_or_none()
            seen.update(places.tolist())
            known = torch.tensor([seen[place] > 1 for place in range(COUNT)])
            bags = torch.split(torch.arange(len(places)), batch.lengths()[: 2 * SAMPLES].tolist())
            scale = torch.ones(len(places)) if weights is None else weights.detach()[: len(places)].clone()
            leaves, expected = [scale.requires_grad_()], []
            for table in module.tables:
                leaves.append(torch.where(known[:, None], table.read(IDS), start).float().requires_grad_())
                values = leaves[-1][places] * scale[:, None]
                own = bags if table is item else [each[known[places[each]]] for each in bags]
                expected += [pooled(values[each], known[places[each]], mode) for each in own]
            whole = torch.stack(expected).view(4, SAMPLES, -1).transpose(0, 1).reshape(out.shape)
            assert torch.equal(out, whole)
            gradient = torch.randn(out.shape, generator=random)
            out.backward(gradient)
            of_scale, *found = torch.autograd.grad(whole, leaves, gradient, materialize_grads=True)
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
            for table, rows, each in zip(module.tables, leaves[1:], found, strict=True):
                torch.testing.assert_close(table.read(IDS)[known], (rows.detach() - 0.5 * each).to(start.dtype)[known])
            if weights is not None:
                torch.testing.assert_close(weights.grad.view(2, -1).sum(0), of_scale)
        rows, ids = torch.where(known[:, None], item.read(IDS), start).float(), tensor("INT64", IDS.tolist())
        models, lengths = Models(store).by_name, tensor("INT32", [COUNT])
        assert torch.equal(torch.from_numpy(asked(models["rows.item"], {"ids": ids})[0]["rows"]), rows)
        bag = asked(models["pooled.item"], {"ids": ids, "lengths": lengths})[0]["embeddings"][0]
        assert torch.equal(torch.from_numpy(bag), pooled(rows, known, mode))
        padding = int(torch.nonzero(~known)[0])
        rows[padding] = 0
        assert torch.equal(tierstore.TieredEmbedding(item, padding_idx=int(IDS[padding]))(IDS), rows)
