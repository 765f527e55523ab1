"""Compaction: the same rows in the same versions, in the order asked, in less room; and never half a store."""

import dataclasses
import itertools
import shutil

import numpy as np
import pytest
import torch

import tierstore
from tests import children
from tests.recordings import random_trace
from tests.stored import offset_of, segment_offset, segments_of
from tierstore import errors
from tierstore.exchange.rows import read_rows
from tierstore.io.files import read_stamp
from tierstore.offline import compaction
from tierstore.offline.compaction import compact_store, keys_by_frequency
from tierstore.store.manifest import Manifest
from tierstore.trace import TableTrace, Trace, write_trace

ROWS = 6000
TABLES = {"a": "float32", "b": "bfloat16", "c": "float32"}
VERSIONS = (11, 12, 13)


def table_config(name, dtype="float32"):
    return tierstore.TableConfig(
        name=name, num_embeddings=ROWS, embedding_dim=9, dtype=dtype, optimizer=tierstore.optim.RowWiseAdagrad(lr=0.1)
    )


def fill(store, seed, rows=ROWS // 2):
    generator = torch.Generator().manual_seed(seed)
    for table in store.tables.values():
        ids = torch.randperm(ROWS, generator=generator)[:rows]
        table.write(ids, torch.randn(rows, 9, generator=generator).to(table.layout.torch_dtype))
        bag = tierstore.TieredEmbeddingBag(table, mode="sum")
        bag(ids[::16], torch.arange(0, len(ids[::16]), 3)).square().sum().backward()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A store that was cleaned while it kept versions, gave version 14 up, and has rows beyond its last commit; and a
    trace of it."""
    directory = tmp_path_factory.mktemp("made")
    counts = [ROWS, ROWS // 2, *[2] * 8, ROWS // 3, ROWS // 3, ROWS // 6, ROWS // 6]
    """Rows that are written; where they are few, segments of the versions before are cleaned together."""
    for keep, steps in ((1, range(10)), (4, range(10, 14))):
        with tierstore.open(directory / "source", ddr="700KiB", threads=1, keep=keep) as store:
            for name, dtype in TABLES.items():
                store.create_table(table_config(name, dtype))
            for step in steps:
                fill(store, step, counts[step])
                store.commit(extra={"step": step}, tensors={"w": torch.full((2,), float(step))})
    with tierstore.open(directory / "source", ddr="700KiB", threads=1, keep=3) as store:
        store.rollback(13)
        fill(store, 99)
    write_trace(random_trace(dict.fromkeys(TABLES, ROWS), seed=3, samples=300), directory / "trace.npz")
    return directory


@pytest.fixture
def source(made, tmp_path):
    return shutil.copytree(made / "source", tmp_path / "source")


def rows(directory, version=None):
    with tierstore.open(directory, mode="r", ddr="8MiB", threads=1, version=version) as store:
        found = {}
        for name, table in store.tables.items():
            weights, state = read_rows(table, 0, ROWS)
            found[name] = weights.tobytes(), state.tobytes(), table.state
        return found, store.tensors()["w"].tolist(), store.extra, store.version, store.versions


def changed(before, after):
    weights = [np.frombuffer(each[name][0], np.uint8).reshape(ROWS, -1) for name in TABLES for each in (before, after)]
    return sum((old != new).any(axis=1).sum() for old, new in zip(weights[::2], weights[1::2], strict=True))


def names(directory):
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("by_trace", [False, True])
def test_the_copy_holds_every_version_in_less_room_and_is_trained_on_as_the_source_is(made, source, tmp_path, by_trace):
    segments, trace = segments_of(source).segments, made / "trace.npz" if by_trace else None
    assert (segments["newest"] != segments["oldest"]).any(), "nothing was cleaned"
    before, shown = (source / "rows.lmdb").read_bytes(), []
    report = compact_store(source, tmp_path / "copy", trace=trace, progress=lambda *pair: shown.append(pair))
    assert (source / "rows.lmdb").read_bytes() == before
    for version in (None, *VERSIONS):
        assert rows(source, version) == rows(tmp_path / "copy", version)
    assert names(tmp_path / "copy") == ["manifest.json", "rows.lmdb"]
    manifest = Manifest.read(tmp_path / "copy")
    assert read_stamp(tmp_path / "copy" / "rows.lmdb", manifest.page_bytes) == bytes.fromhex(manifest.store_id)
    assert manifest == Manifest.read(source)
    copy, tables = segments_of(tmp_path / "copy"), [rows(source, version)[0] for version in VERSIONS]
    assert report.target == tmp_path / "copy"
    assert (report.version, report.rows, report.segments) == (13, 3 * ROWS, len(copy.keys))
    assert sum(map(len, copy.keys)) == 3 * ROWS + sum(itertools.starmap(changed, itertools.pairwise(tables)))
    assert len(copy.partial()) <= 2 * len(VERSIONS), "of each version and layout all segments but one are full"
    assert report.bytes_after < 0.8 * report.bytes_before
    assert len({total for _, total in shown}) == 2, "of copying, and of verifying"
    assert shown[-1][0] == shown[-1][1]
    for directory in (source, tmp_path / "copy"):
        with tierstore.open(directory, ddr="700KiB", threads=1, keep=3) as store:
            fill(store, 7)
            assert store.commit(tensors={"w": torch.zeros(2)}) == 15, "number 14 was used"
            store.verify()
            store.rollback(12)
            fill(store, 8)
            assert store.commit(tensors={"w": torch.ones(2)}) == 16
    assert rows(source) == rows(tmp_path / "copy")


def test_rows_of_a_trace_come_first_and_those_of_one_sample_lie_in_one_block(source, tmp_path):
    together = {"a": [3, 500, 903], "c": [1, 5000]}
    tables = {name: TableTrace(np.tile(ids, 50), np.arange(51) * len(ids)) for name, ids in together.items()}
    write_trace(Trace(tables=tables, batch_samples=10), tmp_path / "few.npz")
    with tierstore.open(source, ddr="8MiB") as store:  # one version, which has them all
        fill(store, 1, ROWS)
        store.commit(tensors=store.tensors())
    compact_store(source, tmp_path / "few", trace=tmp_path / "few.npz")
    copy, layout = segments_of(tmp_path / "few"), table_config("a").layout(4096)
    keys = copy.of_layout(layout)
    wanted = [row + (index << 40) for index, name in enumerate(TABLES) for row in together.get(name, ())]
    assert sorted(keys[:5].tolist()) == wanted
    assert len(keys) == len(set(keys.tolist())) == 2 * ROWS
    assert (np.diff(keys[5:]) > 0).all()
    assert sorted(copy.partial(), key=str) == sorted({layout, table_config("b", "bfloat16").layout(4096)}, key=str)
    assert rows(source) == rows(tmp_path / "few")
    with tierstore.open(tmp_path / "few", mode="r", ddr="8MiB") as store:
        for name, ids in together.items():
            store[name].read(torch.tensor(ids))
        assert store._cold.counters().pages_read == 2  # one for each call


@pytest.mark.parametrize("version", [VERSIONS[0], VERSIONS[-1], 0])
def test_damage_of_a_row_that_a_version_shows_or_of_an_index_leaves_nothing(source, tmp_path, version):
    data = bytearray((source / "rows.lmdb").read_bytes())
    data[offset_of(source, 0, 17, version) if version else segment_offset(source) + 80] ^= 4
    (source / "rows.lmdb").write_bytes(data)
    wanted = "row 17 of table 0 does not match its checksum" if version else r"segment \d+ is damaged"
    with pytest.raises(errors.DamagedError, match=rf"source/rows\.lmdb: {wanted}.*tierstore repair DIR NEW_DIR"):
        compact_store(source, tmp_path / "copy")
    assert names(tmp_path) == ["source"]


def test_damage_of_the_copy_is_found_and_leaves_nothing(source, tmp_path, monkeypatch):
    def damaged(directory, progress):
        with (directory / "rows.lmdb").open("r+b") as file:
            file.seek(segment_offset(directory) + 5000)
            file.write(bytes(300))
        return verify_copy(directory, progress)

    verify_copy = compaction.verify_copy
    monkeypatch.setattr(compaction, "verify_copy", damaged)
    with pytest.raises(errors.DamagedError, match=r"did not keep what was written to it; try again \(.*row"):
        compact_store(source, tmp_path / "copy")
    assert names(tmp_path) == ["source"]


def test_rows_of_tables_that_the_manifest_lost_are_not_left_behind(source, tmp_path):
    manifest = Manifest.read(source)
    dataclasses.replace(manifest, tables=manifest.tables[:2]).write(source)
    with pytest.raises(errors.DamagedError, match=r"lmdb has [\d,]+ rows of tables that its manifest does not have"):
        compact_store(source, tmp_path / "copy")
    assert names(tmp_path) == ["source"]


def test_killed_at_any_step_it_leaves_no_store_or_a_whole_one(tmp_path):
    children.make_store(tmp_path / "source")
    code = """
        import itertools, shutil
        from tierstore.offline.compaction import compact_store

        source, target = map(Path, sys.argv[1:])

        def compact(last):
            steps = iter(range(1, last))
            def stepping(call):
                return lambda *given, **named: call(*given, **named) if next(steps, 0) else os._exit(9)
            for name in ("rename", "fsync", "fdatasync"):
                setattr(os, name, stepping(getattr(os, name)))
            compact_store(source, target, progress=stepping(lambda *_: None))

        compact_store(source, target.with_name("first"))  # loads what the forks share
        for last in itertools.count(1):
            forked(compact, last)
            try:
                with tierstore.open(target, mode="r", ddr="8MiB", threads=1) as store:
                    print("whole", store["t"].read(torch.arange(2000)).sum().item(), store.extra, flush=True)
            except errors.StoreNotFoundError:
                print("none", flush=True)
            else:
                if not (target / "compact.partial").exists():
                    break
                shutil.rmtree(target)
        """
    out = children.run(code, tmp_path / "source", tmp_path / "copy").splitlines()
    killed, none, whole = "ended with 9", "none", "whole 96000.0 {'step': 1}"
    tries = list(zip(out[::2], out[1::2], strict=True))
    assert tries[:14] == [(killed, none)] * 14
    assert set(tries[14:-3]) <= {(killed, none), (killed, whole)}
    assert tries[-3:] == [(killed, whole)] * 2 + [("ok None", whole)], "once the manifest was in place, and at last not"


def test_keys_of_some_tables_by_frequency_then_by_first_lookup_entry_by_entry():
    samples, far = {"a": [[1, 2], [], [3, 3]], "b": [[7], [8, 2], [8]], "c": [[5], [5], [5]]}, 4 << 40
    tables = {
        name: TableTrace(np.concatenate(ids).astype(np.int64), np.cumsum([0, *map(len, ids)]))
        for name, ids in samples.items()
    }
    trace = Trace(tables=tables, batch_samples=2)
    assert keys_by_frequency(trace, {"a": 0, "b": 4, "nosuch": 9}).tolist() == [far + 8, 3, 1, 2, far + 7, far + 2]
    assert not len(keys_by_frequency(trace, {}))
