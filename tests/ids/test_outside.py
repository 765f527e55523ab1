"""What leaves and enters a store with dynamic ids: updates, files, checkpoints of torch, recordings and copies.

The map from id to row, beside a dict."""

import contextlib
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException

import tierstore
from tests.ids.test_machine import BATCHES
from tests.ids.twin import RULES, SMALL, Twin, config, contents, make, read
from tests.updates.support import edited, table_config
from tests.updates.test_apply import with_chunks
from tierstore.errors import ChecksumError, DamagedError, FormatError, ReadOnlyError, TableError
from tierstore.exchange import export_store, import_files
from tierstore.ids import LFU, LRU, TTL, DynamicIds, Frequency, id_map
from tierstore.ids.id_map import IdMap, map_bytes
from tierstore.kernels.arrays import Bools, Int64s
from tierstore.kernels.threads import Workers
from tierstore.offline.compaction import compact_store
from tierstore.offline.inspection import describe_store, verify_store
from tierstore.offline.salvage import salvage
from tierstore.trace import read_trace
from tierstore.updates import apply_update, roll_back_replica, write_update
from tierstore.updates.update_file import pack_chunk

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
KEY = "embedding_bags.item."
MARK = 0x1122334455667788


@settings(max_examples=5, deadline=None)
@given(
    rules=RULES,
    versions=st.lists(st.tuples(st.lists(BATCHES, min_size=1, max_size=3), BATCHES), min_size=2, max_size=4),
)
def test_a_replica_has_the_ids_and_rows_of_each_version(rules, versions):
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as held:
        source, replica = Path(folder, "source"), Path(folder, "replica")
        twin, before = Twin(config(rules)), dict[int, list[float]]()
        for number, (batches, evicted) in enumerate(versions, 1):
            with tierstore.open(source, keep=2, **SMALL) as store:
                table = store.create_table(config(rules))
                for ids in batches:
                    twin.train(table, ids)
                twin.evict(table, evicted if number % 2 == 0 else [])
                store.commit()
            update = write_update(source, Path(folder, str(number)), since=number - 1)
            apply_update(replica, update.path)
            assert read(replica) == twin.rows
            if number == 1:
                follower = held.enter_context(tierstore.open(replica, mode="r", **SMALL))
            follower.refresh()
            assert contents(follower["item"]) == twin.rows
            if number == 2:
                roll_back_replica(replica)
                assert read(replica) == before
                apply_update(replica, update.path)
                assert read(replica) == twin.rows
            if number < len(versions):
                before = twin.rows
        with tierstore.open(source, keep=2, **SMALL) as store:
            store.rollback(len(versions) - 1)
            store.commit()
        apply_update(replica, write_update(source, Path(folder, "all")).path)
        assert read(replica) == before, "ids that the source has no more are gone"


def test_a_hostile_update_is_refused_or_read_as_damaged(tmp_path):
    make(tmp_path / "source", [1, 2, 3])
    update = write_update(tmp_path / "source", tmp_path / "update")

    def without_ids(own: Any, _parts: list[bytes]) -> None:
        own["tables"][1] |= {"num_embeddings": 5}

    def twice(own: Any, parts: list[bytes]) -> None:
        words = np.array([[7, 1 << 32], [7, 1 << 32]], np.uint64)
        layout = table_config("x", embedding_dim=4).layout(4096)
        with_chunks(2, own["chunks"][2][0], (2, pack_chunk(np.array([3, 8]), words, layout)))(own, parts)

    with pytest.raises(FormatError, match="dynamic ids"):
        apply_update(tmp_path / "replica", edited(update, tmp_path / "without", without_ids))
    apply_update(tmp_path / "replica", edited(update, tmp_path / "twice", twice))
    with pytest.raises(DamagedError, match="two rows have one id"):
        read(tmp_path / "replica")


@settings(max_examples=5, deadline=None)
@given(
    batches=st.lists(BATCHES, max_size=4), later=st.lists(BATCHES, min_size=1, max_size=4), other=BATCHES,
    form=st.sampled_from(["safetensors", "dcp"]), eviction=st.sampled_from([LRU(), LFU()]), rules=RULES,
)  # fmt: skip
def test_training_goes_on_with_what_a_file_has(batches, later, other, form, eviction, rules):
    """To the same rows and evictions; of a checkpoint, which has candidates, too, by any rules."""
    rules = rules if form == "dcp" else DynamicIds(eviction=eviction)
    with tempfile.TemporaryDirectory() as folder:
        source, copy, file = (Path(folder, name) for name in ("source", "copy", "file"))
        twin, _ = make(source, *batches, rules=rules)
        with tierstore.open(source, **SMALL) as store:
            store.commit()
            if form == "dcp":
                dcp.save(tierstore.checkpoint.rows(store), checkpoint_id=file)
        if form == "dcp":
            make(copy, other, rules=rules)
            with tierstore.open(copy, **SMALL) as store:
                dcp.load(tierstore.checkpoint.rows(store), checkpoint_id=file)
                assert contents(store["item"]) == twin.rows
                store.commit()
        else:
            report = export_store(source, file, state=True, ddr="2MiB")
            assert (report.rows, report.keys) == (len(twin.rows), (f"{KEY}weight", f"{KEY}ids", f"{KEY}scores"))
            import_files(copy, [file], ddr="2MiB")
        assert read(copy) == twin.rows
        with tierstore.open(copy, **SMALL) as store:
            for ids in later:
                twin.train(store["item"], ids)
            assert contents(store["item"]) == twin.rows
            assert store["item"].id_stats().candidates == len(twin.model.candidates)


def test_an_import_into_a_table_of_other_rules_gives_rows_state_and_nothing_else(tmp_path):
    adam, ids = tierstore.optim.Adam(), torch.tensor([-3, 5, 9])
    with tierstore.open(tmp_path / "source", **SMALL) as store:
        table = store.create_table(config(optimizer=adam))
        tierstore.TieredEmbeddingBag(table)(torch.tensor([[9, -3, 9, 5]])).square().sum().backward()
        expected = [table.read(ids), table.read_state(ids)]
        store.commit()
    export_store(tmp_path / "source", tmp_path / "file", state=True)
    loaded = safetensors.torch.load_file(tmp_path / "file")
    assert torch.equal(loaded[f"{KEY}ids"], ids)
    assert torch.equal(loaded[f"{KEY}weight"], expected[0])
    rules = DynamicIds(admission=Frequency(2), eviction=TTL(5))
    with tierstore.open(tmp_path / "copy", **SMALL) as store:
        table = store.create_table(config(rules, rows=100, optimizer=adam))
        table.admit(torch.tensor([5, 5, 7, 7, -3]))
        own = contents(table)[7]
        store.commit()
    import_files(tmp_path / "copy", [tmp_path / "file"])
    with tierstore.open(tmp_path / "copy", mode="r", **SMALL) as store:
        table = store["item"]
        assert contents(table) == {7: own} | dict(zip(ids.tolist(), expected[0].tolist(), strict=True))
        assert torch.equal(table.read_state(ids), expected[1])
        assert table.id_stats().candidates == 0


def test_rows_of_others_come_with_ids_or_their_numbers_are_ids(tmp_path):
    rows, ids = torch.rand(3, 6), torch.tensor([2**62, -1, 0])
    safetensors.torch.save_file({"w.weight": rows, "w.ids": ids}, tmp_path / "file")
    import_files(tmp_path / "new", [tmp_path / "file"], mapping={"w.weight": "item"})
    assert read(tmp_path / "new") == dict(zip(ids.tolist(), rows.tolist(), strict=True))
    _, (before,) = make(tmp_path / "store", [0, 8])
    safetensors.torch.save_file({f"{KEY}weight": rows}, tmp_path / "numbered")
    import_files(tmp_path / "store", [tmp_path / "numbered"])
    assert read(tmp_path / "store") == {8: before[8]} | dict(enumerate(rows.tolist()))


WRONG = [
    ({"ids": torch.tensor([5, 6, 5])}, ValueError, "has id 5 twice"),
    ({"ids": torch.tensor([5, 6])}, ValueError, r"is torch.int64 \[2\], not int64 \[3\]"),
    ({"ids": torch.tensor([5.0, 6.0, 7.0])}, ValueError, "is torch.float32"),
    ({"weight": torch.rand(3, 7)}, TableError, "is 3 x 7"),
    ({"weight": torch.rand(13, 6), "ids": torch.arange(13)}, TableError, r"13 x 6 .* another table"),
    ({"weight": torch.rand(12, 6), "ids": torch.arange(12)}, TableError, "id 10 gets no row"),
    ({"plain.ids": torch.arange(3), "plain.weight": torch.rand(3, 6)}, TableError, "'plain' numbers them"),
]


@pytest.mark.parametrize(("tensors", "error", "named"), WRONG)
def test_what_does_not_fit_is_refused_and_changes_nothing(tmp_path, tensors, error, named):
    _, (before,) = make(tmp_path / "store", [-1, -2])
    with tierstore.open(tmp_path / "store", **SMALL) as store:
        store.create_table(config(None, name="plain"))
    right = {} if "plain.ids" in tensors else {f"{KEY}weight": torch.rand(3, 6), f"{KEY}ids": torch.arange(3)}
    content = right | {f"embedding_bags.{'' if '.' in name else 'item.'}{name}": each for name, each in tensors.items()}
    safetensors.torch.save_file(content, tmp_path / "file")
    with pytest.raises(error, match=named):
        import_files(tmp_path / "store", [tmp_path / "file"])
    assert read(tmp_path / "store") == before


def test_a_checkpoint_is_not_loaded_under_a_batch(tmp_path):
    twin, _ = make(tmp_path / "store", [1, 2, 3])
    with tierstore.open(tmp_path / "store", **SMALL) as store:
        rows = tierstore.checkpoint.rows(store)
        dcp.save(rows, checkpoint_id=tmp_path / "saved")
        waiting = tierstore.TieredEmbeddingBag(store["item"])(torch.tensor([[1, 2]]))
        with pytest.raises(CheckpointException, match="run its backward"):
            dcp.load(rows, checkpoint_id=tmp_path / "saved")
        assert (len(waiting), contents(store["item"])) == (1, twin.rows)


def test_a_recording_has_the_rows_of_ids_and_nothing_of_others(tmp_path):
    with tierstore.open(cold="memory", **SMALL) as store:
        table = store.create_table(config())
        table.admit(torch.tensor([-7, 8]))  # rows 0 and 1
        bag, rows = tierstore.TieredEmbeddingBag(table), tierstore.TieredEmbedding(table)
        with store.record(tmp_path / "t.npz", rate=1.0):
            late = store.create_table(config(name="late"))
            with torch.no_grad():
                bag(torch.tensor([[8, 9], [9, 9], [-7, 8]]))
                rows(torch.tensor([5, -7]))
                table.read(torch.tensor([3, 8]))
                table.pooled(torch.tensor([8, 8, 4]), torch.tensor([0, 1, 3]))
                assert table.rows_in_memory(np.array([-7])) is not None
                assert table.rows_in_memory(np.array([0])) is None, "0 is a row, and no id"
                late.read(torch.tensor([1]))
            bag(torch.tensor([[11, 8]])).sum().backward()
    trace = read_trace(tmp_path / "t.npz").tables
    assert trace["item"].ids.tolist() == [1, 0, 1, 0, 1, 1, 1, 0, 2, 1]
    assert np.diff(trace["item"].offsets).tolist() == [1, 0, 2, 0, 1, 0, 1, 1, 1, 1, 0, 2]
    assert not len(trace["late"].ids)


def test_copies_have_the_ids_of_every_version(tmp_path):
    steps = [-1, -1, 5, 5, 7, MARK, MARK], [each // 2 for each in range(20, 50)], [7, 5]
    twin, versions = make(tmp_path / "store", *steps, rules=DynamicIds(admission=Frequency(2), eviction=LFU()))
    assert not versions[0].keys() <= versions[1].keys(), "some were evicted"
    with tierstore.open(tmp_path / "store", keep=9, **SMALL) as store:
        store.backup(tmp_path / "backup")
    compact_store(tmp_path / "store", tmp_path / "compact")
    assert salvage(tmp_path / "store", tmp_path / "repaired").is_whole
    for copy in ("backup", "compact", "repaired"):
        kept = versions if copy != "repaired" else versions[-1:]
        assert [read(tmp_path / copy, version=number) for number in (1, 2, 3)[-len(kept) :]] == kept
        said = describe_store(tmp_path / copy)
        assert "item  12 x 6 float32, sgd, dynamic ids" in said
        assert "\0" not in said + verify_store(tmp_path / copy)
    with tierstore.open(tmp_path / "compact", **SMALL) as store:
        twin.train(store["item"], [7, 7, MARK, MARK, 99, 99])
        assert contents(store["item"]) == twin.rows


def test_a_quantized_store_has_the_ids_and_takes_no_others(tmp_path):
    _, (rows,) = make(tmp_path / "store", [-1, 5, MARK, 8])
    assert len(tierstore.quantize(tmp_path / "store", tmp_path / "small", dtype="int8").tables) == 1
    with tierstore.open(tmp_path / "small", **SMALL) as store:
        with pytest.raises(ReadOnlyError):
            tierstore.TieredEmbeddingBag(store["item"])(torch.tensor([[9, 9]]))
        found = contents(store["item"])
    assert found.keys() == rows.keys()
    assert all(np.allclose(found[key], row, rtol=0, atol=0.01) for key, row in rows.items())


@pytest.mark.parametrize("what", ["id", "row"])
def test_damage_is_reported_and_repaired_without_wrong_rows(tmp_path, what):
    _, (rows,) = make(tmp_path / "store", [-1, 5, MARK, 8])
    value = MARK.to_bytes(8, "little") if what == "id" else np.array(rows[MARK], np.float32).tobytes()
    data = (path := tmp_path / "store" / "rows.lmdb").read_bytes()  # may have copies in pages of before
    assert value in data
    path.write_bytes(data.replace(value, value[:2] + bytes([value[2] ^ 4]) + value[3:]))
    for look in (verify_store, read):
        with pytest.raises(ChecksumError):
            look(tmp_path / "store")
    with tierstore.open(tmp_path / "store", **SMALL) as store, pytest.raises(ChecksumError):
        tierstore.TieredEmbeddingBag(store["item"])(torch.tensor([[MARK]]))
    with pytest.raises(TableError, match="stale_ok"):
        salvage(tmp_path / "store", tmp_path / "stale", stale_ok=True)
    report = salvage(tmp_path / "store", tmp_path / "repaired")
    assert [loss.table for loss in report.lost] == ["of ids of item" if what == "id" else "item"]
    del rows[MARK]
    assert read(tmp_path / "repaired") == rows
    with tierstore.open(tmp_path / "repaired", **SMALL) as store:
        (twin := Twin(config())).train(store["item"], [MARK])
        assert contents(store["item"]) == rows | twin.rows


EDGES = [-(2**63), -1, 0, 1, 2**63 - 1]


class EveryThread(Workers):
    """However little there is to do; one range of places after another, each of which alone may change."""

    index: Any = None

    def run(self, work: Callable[[int, int], Any], bounds: Sequence[int]) -> None:
        for begin, end in pairwise(bounds):
            before, size = self.index.copy(), len(self.index)
            work(begin, end)
            changed = np.flatnonzero(self.index != before)
            assert all(begin <= place + (size if place < begin else 0) < end for place in changed.tolist())

    def parts(self, work: int) -> int:
        return self.threads


@given(
    capacity=st.integers(1, 300), seed=st.integers(0, 2**32 - 1), spread=st.sampled_from([4, 1000, 2**62]),
    threads=st.sampled_from([1, 2, 5]),
)  # fmt: skip
def test_finds_what_was_inserted_and_not_removed(capacity: int, seed: int, spread: int, threads: int) -> None:
    generator = np.random.default_rng(seed)
    ids = np.unique(np.append(generator.integers(-spread, spread, 2 * capacity), EDGES))
    workers, known = EveryThread(threads), dict[int, int]()
    made = IdMap(capacity, workers)
    workers.index = made._index
    for step in range(1, 20):
        score = step * int(generator.integers(0, 2))
        found = made.find(ids, score=score)
        assert found.tolist() == [known.get(each, -1) for each in ids.tolist()]
        assert not score or (made.scores(found[found >= 0]) == score).all()
        new = generator.permutation(ids[found < 0])[: generator.integers(0, made.num_free + 1)]
        rows = made.free_rows(len(new))
        made.put(rows, new, np.ones(len(new), np.uint32))
        known |= dict(zip(new.tolist(), rows.tolist(), strict=True))
        assert len(set(known.values())) == len(known) == made.num_used
        gone = generator.permutation(made.used_rows)[: generator.integers(0, made.num_used + 1)]
        for each in made.ids[gone].tolist():
            del known[each]
        made.remove(gone)
        made.check_integrity()
    workers.close()


def _chosen(made: IdMap, spared: set[int], rows: Int64s) -> Bools:
    return np.array([each not in spared for each in made.ids[rows].tolist()], np.bool_)


@given(
    capacity=st.integers(1, 400), seed=st.integers(0, 2**32 - 1), highest=st.sampled_from([1, 3, 400, 2**30 - 1]),
    is_rising=st.booleans(),
)  # fmt: skip
def test_evicted_are_the_lowest_that_are_not_kept(capacity: int, seed: int, highest: int, is_rising: bool) -> None:
    generator = np.random.default_rng(seed)
    made, known, most = IdMap(capacity), dict[int, int](), 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(id_map, "_SAMPLED_ROWS", 16)
        patch.setattr(id_map, "_BUCKETS", 5)
        for step in range(12):
            new = generator.integers(0, 2**62, int(generator.integers(0, made.num_free + 1)))
            lowest_new = 2 + step if is_rising else 1
            scores = generator.integers(lowest_new, max(lowest_new, highest), len(new), endpoint=True).astype(np.uint32)
            made.put(made.free_rows(len(new)), new, scores)
            known |= dict(zip(new.tolist(), scores.tolist(), strict=True))
            used = generator.permutation(made.used_rows)[: made.num_used // 3]
            if not is_rising:
                made.count_uses(used)
                known |= {each: min(known[each] + 1, 2**30 - 1) for each in made.ids[used].tolist()}
            if len(used) and generator.integers(0, 2):
                raised = made.ids[used[: len(used) // 2]]
                made.find(raised, score=2**29 + step)
                known |= dict.fromkeys(raised.tolist(), 2**29 + step)
            kept = generator.permutation(made.used_rows)[: generator.integers(0, made.num_used + 1)]
            most = max(most, int(generator.choice([1, highest, 2**30 - 1])))
            wanted = int(generator.integers(1, capacity // 8 + 2 if is_rising else capacity + 1))
            may_go = set(known) - set(made.ids[kept].tolist())
            lowest_first = sorted((known[each], each) for each in may_go if known[each] <= most)
            spared = {each for _, each in lowest_first[:: int(generator.integers(1, 5))]}
            chosen = partial(_chosen, made, spared if step % 3 else set())
            rows = made.evict(wanted, [kept, kept], chosen, most=most)
            gone = made.ids[rows].tolist()
            by_score = [(known[each], row) for each, row in zip(gone, rows.tolist(), strict=True)]
            assert by_score == sorted(by_score)
            expected = [each for _, each in lowest_first[:wanted] if not step % 3 or each not in spared]
            assert sorted(gone) == sorted(expected)
            for each in gone:
                del known[each]
            made.check_integrity()


def test_a_queue_that_memory_was_short_for_is_no_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    made, everyone = IdMap(5000), lambda rows: np.ones(len(rows), np.bool_)
    made.put(made.free_rows(5000), np.arange(5000), np.repeat(np.arange(1, 51, dtype=np.uint32), 100))
    assert len(made.evict(3, [], everyone)) == 3
    with monkeypatch.context() as patch:
        patch.setattr(id_map, "queue_up_to", Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            made.evict(2000, [], everyone)
    assert made.ids[made.evict(2000, [], everyone)].tolist() == list(range(3, 2003))
    made.check_integrity()


def test_bytes_an_id() -> None:
    made = IdMap(1000)
    rows = made.free_rows(1000)
    made.put(rows, rows, np.arange(1, 1001, dtype=np.uint32))
    made.evict(1, [], partial(_chosen, made, set()))
    assert made._records.nbytes + made._index.nbytes + 4 * 250 == map_bytes(1000) <= 20 * 1000
    assert abs(len(made._queue) - 250) < 4
