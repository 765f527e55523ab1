"""The manifest and the payload of a version, where damage is told from absence and named.

Tables that are changed and dropped: killed at each step, copied, and in every tier.
"""

import errno
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import safetensors.torch
import torch

import tierstore
from tests.children import run
from tests.faults.training_run import watch_names
from tierstore import errors, optim
from tierstore.dist.reshard import reshard
from tierstore.errors import TableError
from tierstore.ids import DynamicIds, Frequency
from tierstore.io import lmdb as lmdb_module
from tierstore.offline.compaction import compact_store
from tierstore.offline.salvage import salvage
from tierstore.store import manifest as manifest_module
from tierstore.store.manifest import MANIFEST_NAME, Manifest, _digest
from tierstore.store.version import NO_LINEAGE, pack, unpack, unpack_tensors
from tierstore.system import killpoints
from tierstore.updates.apply import apply_update
from tierstore.updates.publish import write_update

CONFIG = tierstore.TableConfig(
    name="items", num_embeddings=100, embedding_dim=4, dtype="bfloat16", feature_names=("a", "b"), pooling="mean",
    init=tierstore.init.Normal(std=0.5, seed=2**70), optimizer=optim.Adam(betas=(0.8, 0.99), weight_decay=0.1),
)  # fmt: skip


@pytest.fixture
def path(store_dir: Path) -> Path:
    with tierstore.open(store_dir, ddr="1MiB") as store:
        store.create_table(CONFIG).write(torch.tensor([1]), torch.ones(1, 4, dtype=torch.bfloat16))
        store.commit()
    return store_dir / MANIFEST_NAME


def test_every_flipped_byte_is_found(path):
    text = path.read_bytes()
    for place in range(len(text)):
        path.write_bytes(text[:place] + bytes([text[place] ^ 1]) + text[place + 1 :])
        with pytest.raises(errors.DamagedError, match=r"manifest\.json"):
            Manifest.read(path.parent)
    path.write_bytes(text)
    with tierstore.open(path.parent, mode="r") as store:
        assert store["items"].config == CONFIG


def forge(path: Path, **fields: Any) -> None:
    """Change the body and make the checksum right, as an attacker can."""
    body = json.loads(path.read_text())["body"] | fields
    path.write_text(json.dumps({"body": body, "sha256": _digest(body)}))


TABLE = CONFIG.to_dict()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"store_id": "../../etc/passwd"}, "store_id='../../etc/passwd' is not 16 bytes in hex"),
        ({"page_bytes": 2**62}, "page_bytes=4611686018427387904 is no page size"),
        ({"has_rows": "yes"}, "has_rows='yes'"),
        ({"tables": {}}, "tables must be a list"),
        ({"tables": [{}]}, "no 'feature_names'"),
        ({"tables": [TABLE, TABLE]}, "two tables have one name"),
        ({"tables": [{**TABLE, "name": "a\ud800"}]}, "name='a.ud800' is no valid Unicode"),
        ({"tables": [{**TABLE, "feature_names": "ab"}]}, "feature_names must be a list"),
        ({"tables": [{**TABLE, "num_embeddings": 2**40 + 1}]}, "num_embeddings=1099511627777 must be in"),
        ({"tables": [{**TABLE, "embedding_dim": 1 << 20}]}, "Split the table by columns"),
        ({"tables": [{**TABLE, "init": {"kind": "uniform", "low": 10**400}}]}, "too large to convert"),
        ({"tables": [{**TABLE, "init": {"kind": "eval"}}]}, "initializer kind 'eval'"),
        ({"tables": [{**TABLE, "optimizer": {"kind": "sgd", "lr": "x"}}]}, "lr must be a number"),
        ({"format_version": "9" * 10**6}, "format version '999"),
    ],
)
def test_a_forged_manifest_is_refused_in_few_words(path, fields, message):
    forge(path, **fields)
    with pytest.raises(errors.FormatError, match=message) as raised:
        tierstore.open(path.parent, mode="r")
    assert str(path) in str(raised.value)
    assert len(str(raised.value)) < 1000


def test_a_manifest_that_cannot_be_read_back_is_not_written(store_dir, monkeypatch):
    monkeypatch.setattr(manifest_module, "_MAX_BYTES", 100_000)
    store_dir.mkdir()
    tables = tuple(replace(CONFIG, name=f"t{i}") for i in range(100))
    Manifest(store_id="0" * 32, page_bytes=4096, tables=tables).write(store_dir)
    more = Manifest(store_id="0" * 32, page_bytes=4096, tables=tables * 5)
    with pytest.raises(errors.TableError, match="500 tables take a manifest of"):
        more.write(store_dir)
    assert Manifest.read(store_dir).tables == tables
    assert [file.name for file in store_dir.iterdir()] == [MANIFEST_NAME]


def test_a_manifest_is_not_written_through_a_link(path, tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("mine")
    (path.parent / f"{MANIFEST_NAME}.{os.getpid()}.partial").symlink_to(outside)
    manifest = Manifest.read(path.parent)
    manifest.write(path.parent)
    assert outside.read_text() == "mine"
    assert Manifest.read(path.parent) == manifest
    assert not list(path.parent.glob("*.partial"))


@pytest.mark.parametrize(
    ("call", "code", "error", "message"),
    [
        ("fsync", errno.ENOSPC, errors.DiskFullError, "no space left"),
        ("replace", errno.EROFS, errors.ReadOnlyError, 'read-only; open the store with mode="r"'),
        ("fsync", errno.EMFILE, errors.TierstoreError, "raise `ulimit -n`"),
        ("replace", errno.EIO, errors.TierstoreError, "Input/output error"),
        ("fsync", errno.EINVAL, errors.TierstoreError, "file system, or this system, lacks"),
        ("replace", errno.ESTALE, errors.TierstoreError, "gone from the network file system's server"),
    ],
)
def test_a_refused_write_leaves_the_old_manifest(path, monkeypatch, call, code, error, message):
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    before = path.read_bytes()
    manifest = replace(Manifest.read(path.parent), tables=(replace(CONFIG, name="another"),))
    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(error, match=rf"manifest\.json: .*{message}"):
        manifest.write(path.parent)
    assert path.read_bytes() == before
    assert not list(path.parent.glob("*.partial"))


def test_tables_are_those_on_disk_when_the_manifest_was_in_place_before_an_error(path, monkeypatch):
    real, kinds = os.replace, iter([MemoryError, OSError, KeyboardInterrupt])

    def replace_and_fail(*names: Any) -> None:
        real(*names)
        raise next(kinds)(errno.EIO, "emulated")

    monkeypatch.setattr(os, "replace", replace_and_fail)
    with tierstore.open(path.parent, ddr="1MiB") as store:
        store.create_table(replace(CONFIG, name="more"))
        store.change_table("more", name="other")
        store.drop_table("items")
        assert [table.name for table in Manifest.read(path.parent).tables if not table.is_dropped] == ["other"]
        assert [*store.tables] == ["other"]
        assert store.commit() == 2


def test_a_store_stops_if_its_directory_cannot_be_synced(path, monkeypatch):
    """A power loss may bring the manifest of before back: no commit may be of the new one."""

    def refuse(_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with tierstore.open(path.parent, ddr="1MiB") as store:
        with monkeypatch.context() as patch:
            for module in (manifest_module, lmdb_module):
                patch.setattr(module, "sync_directory", refuse)
            with pytest.raises(errors.TierstoreError):
                store.drop_table("items")
        with pytest.raises(errors.TierstoreError, match="close it and open it again"):
            store.commit()
    with tierstore.open(path.parent, ddr="1MiB") as store:
        assert not store.tables


def test_a_store_is_made_beside_hidden_files_and_bears_others(tmp_path):
    (tmp_path / ".gitkeep").touch()
    for _ in range(2):
        tierstore.open(tmp_path, ddr="1MiB").close()
        (tmp_path / "notes.txt").touch()


def payload(commit: Any) -> bytes:
    header = json.dumps({"extra": {}, "tables": {}, "commit": commit}).encode()
    return len(header).to_bytes(8, "little") + header


UNREADABLE = [
    b"x", b"\xff" * 8, b"\x02" + b"\0" * 7 + b"[]", b"\x02" + b"\0" * 7 + b"{}",
    *map(payload, (3, {"id": "x", "ancestors": []}, {"id": "0" * 16, "ancestors": 3})),
    *(
        payload({"id": "0" * 16, "ancestors": [list(ancestor) for ancestor in ancestors]})
        for ancestors in (
            [(1, "0" * 15)], [(2, "0" * 16), (2, "1" * 16)], [(1000, "0" * 16)],
            [(number, "0" * 16) for number in range(1, 258)],
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize("content", UNREADABLE)
def test_a_payload_or_lineage_that_no_commit_has(content):
    with pytest.raises(errors.DamagedError, match="payload of version 1000"):
        unpack(1000, content)


def test_a_table_that_could_not_be_created_leaves_no_trace(path, monkeypatch):
    """Its name and number are free for another, and rows written back before it belong to the next commit."""
    ids, shown = torch.arange(100), torch.full((100, 4), 2.0, dtype=torch.bfloat16)
    with tierstore.open(path.parent, ddr="1MiB", keep=3) as store:
        store.commit()
        store["items"].write(ids, shown)
        with monkeypatch.context() as patch:
            patch.setattr(Manifest, "write", Mock(side_effect=errors.DiskFullError("no room left")))
            with pytest.raises(errors.DiskFullError):
                store.create_table(replace(CONFIG, name="late"))
        assert list(store.tables) == ["items"]
        assert torch.equal(store["items"].read(ids), shown)
        late = store.create_table(replace(CONFIG, name="late", num_embeddings=7, embedding_dim=64))
        late.write(ids[:7], torch.ones(7, 64, dtype=torch.bfloat16))
        assert store.commit() == 3
    for version in (2, 3):
        with tierstore.open(path.parent, mode="r", version=version) as store:
            assert torch.equal(store["items"].read(ids), shown) == (version == 3)
            assert (store["late"].read(ids[:7]) == 1).all() == (version == 3)
            store.verify()


def test_a_commit_takes_memory_for_its_tensors_once(store_dir):
    code = """
    dense = {"w": torch.arange(16 << 20, dtype=torch.float32), "half": torch.ones(3, dtype=torch.bfloat16)}
    with tierstore.open(sys.argv[1], ddr="2MiB", threads=1) as store:
        store.create_table(table_config()).write(torch.arange(10), torch.ones(10, 16))
        store.commit(tensors={"w": torch.ones(3)})
        limit_data(100 << 20)  # for 64 MiB of tensors
        print(store.commit(tensors=dense))
    """
    assert run(code, store_dir) == "2\n"
    with tierstore.open(store_dir, mode="r") as store:
        assert store.verify().rows == 10
        found = store.tensors()
        assert torch.equal(found["w"], torch.arange(16 << 20, dtype=torch.float32))
        assert torch.equal(found["half"], torch.ones(3, dtype=torch.bfloat16))


def test_tensors_are_stored_as_safetensors_stores_them():
    shapes: list[tuple[int, ...]] = [(), (0,), (3,), (2, 3), (2, 0, 4)]
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.uint8, torch.int64, torch.bool]
    tensors = {f"{dtype} é {shape}": torch.ones(shape, dtype=dtype) for dtype in dtypes for shape in shapes}
    tensors |= {
        "slice": torch.arange(10)[::3],
        "t": torch.arange(6).view(2, 3).t(),
        "same": tensors["torch.int64 é (3,)"],
    }
    version = unpack(1, pack({}, {}, tensors, NO_LINEAGE))
    expected = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    assert bytes(version.tensors) == safetensors.torch.save(expected)
    assert all(torch.equal(found, tensors[name]) for name, found in unpack_tensors(version).items())


DIM, DDR = 4, "1MiB"
RULES = [optim.SGD(), optim.Adagrad(), optim.RowWiseAdagrad(), optim.SGD()]

CHANGES: dict[str, tuple[int, Callable[[tierstore.Store], Any]]] = {
    "grow": (2, lambda store: store.change_table("a", num_embeddings=500, name="c")),
    "drop": (2, lambda store: store.drop_table("a")),
    "optimizer": (2, lambda store: store.change_table("a", optimizer=optim.SGD(lr=0.5, weight_decay=0.1))),
    "ids": (2, lambda store: store.change_table("d", num_embeddings=70)),
    "rules": (2, lambda store: store.change_table("d", ids=DynamicIds(admission=Frequency(3, 90)))),
}
"""Each with the least number of its steps."""


@pytest.mark.parametrize(("steps", "change"), CHANGES.values(), ids=CHANGES)
def test_a_change_that_is_killed_at_any_step_leaves_the_old_table_or_the_new_one(tmp_path, monkeypatch, steps, change):
    """A copy of the directory, made at a step, is what a process leaves that is killed there."""
    config, every = tierstore.TableConfig(name="a", num_embeddings=200, embedding_dim=DIM), torch.arange(200)
    copies, ends, folder = list[Path](), set[Any](), tmp_path / "store"

    def copy(_: str) -> None:
        copies.append(shutil.copytree(folder, tmp_path / str(len(copies))))

    with tierstore.open(folder, ddr=DDR, keep=3) as store:
        tables = [store.create_table(replace(config, name=name, feature_names=())) for name in ("a", "b")]
        ids = DynamicIds(admission=Frequency(2))
        dynamic = store.create_table(replace(config, name="d", feature_names=(), num_embeddings=60, ids=ids))
        for _ in range(2):
            for table in tables:
                table.write(torch.arange(50), torch.randn(50, DIM))
            dynamic.admit(torch.arange(-20, 30))
            store.commit(extra={"k": 1}, tensors={"w": torch.ones(3)})
        before = [table.read(every) for table in (*tables, dynamic)]
        with monkeypatch.context() as patch:
            for name in ("link", "rename", "replace"):
                patch.setattr(os, name, getattr(os, name))  # puts back what is watched
            watch_names(copy)
            patch.setattr(killpoints, "hook", copy)
            change(store)
        copy("the end")
    for path in copies:
        with tierstore.open(path, ddr=DDR, keep=3) as store:
            shown = [each.config for each in store.tables.values()]
            ends.add(tuple((each.name, each.num_embeddings, each.optimizer, each.ids) for each in shown))
            for name, rows in (("b", before[1]), ("d", before[2])):
                assert torch.equal(store[name].read(every), rows)
            for name in {"a", "c"} & store.tables.keys():
                assert torch.equal(store[name].read(every), before[0])
                assert torch.equal(torch.cat([*store[name].written()]), torch.arange(50))
            assert (store.extra, store.tensors()["w"].tolist()) == ({"k": 1}, [1, 1, 1])
            store["b"].write(torch.tensor([7]), torch.ones(1, DIM))
            store.commit()
            store.verify()
    assert len(ends) == 2
    assert len(copies) > steps


def test_every_copy_of_a_store_whose_tables_changed_has_their_rows(tmp_path):
    """Also rows never written, whose first values are those of the place that the table was in first."""
    source = tmp_path / "store"
    with tierstore.open(source, ddr=DDR) as store:
        for name, rule in zip("abcd", RULES, strict=True):
            config = tierstore.TableConfig(name=name, num_embeddings=90, embedding_dim=DIM, optimizer=rule)
            store.create_table(config).write(torch.arange(30), torch.randn(30, DIM))
        store.commit()
        store.change_table("c", name="e", num_embeddings=120)
        store.change_table("b", optimizer=optim.Adagrad(eps=1e-6))
        store.drop_table("a")
        with store.record(tmp_path / "trace.npz", rate=1) as recorder:
            rows = {name: table.read(torch.arange(90)) for name, table in store.tables.items()}
        store.commit()
    assert set(recorder._recorded.trace().tables) == {"e", "b", "d"}
    update = write_update(source, tmp_path / "update")
    apply_update(tmp_path / "replica", update.path)
    compact_store(source, tmp_path / "compact", trace=tmp_path / "trace.npz")
    salvage(source, tmp_path / "repaired")
    reshard(source, tmp_path / "ranks", plan=None, num_ranks=2, progress=lambda _done, _total: None)
    reshard(tmp_path / "ranks", tmp_path / "plain", plan=None, num_ranks=0, progress=lambda _done, _total: None)
    half = tierstore.quantize(source, tmp_path / "half", dtype="float16")
    assert {table.name for table in half.tables} == rows.keys()
    for name in ("store", "replica", "compact", "repaired", "ranks", "plain", "half"):
        with tierstore.open(tmp_path / name, mode="r", ddr=DDR) as store:
            assert store.tables.keys() == rows.keys()
            for table, shown in rows.items():
                assert torch.equal(store[table].read(torch.arange(90)), shown.half() if name == "half" else shown)
                assert torch.equal(torch.cat([*store[table].written()]), torch.arange(30))
            store.verify()
    with tierstore.open(source, ddr=DDR) as store:
        store.change_table("b", num_embeddings=91)
        store.commit()
    with pytest.raises(TableError, match=r"new, empty directory"):
        apply_update(
            tmp_path / "replica", write_update(source, tmp_path / "next", since=update.header.origin.version).path
        )
    for name in ("replica", "ranks/0-of-2"):
        with tierstore.open(tmp_path / name, ddr=DDR) as store, pytest.raises(TableError, match=r"reshard|published"):
            store.drop_table("d")


def test_a_table_in_use_does_not_change_and_those_of_before_are_refused():
    with tierstore.open(cold="memory", ddr="8MiB") as store:
        bag = tierstore.TieredEmbeddingBag(
            store.create_table(tierstore.TableConfig(name="a", num_embeddings=9, embedding_dim=DIM))
        )
        with pytest.raises(ValueError, match="must be at least 9"):
            store.change_table("a", num_embeddings=8)
        with pytest.raises(TableError, match="have the state of sgd, not of adam: import what"):
            store.change_table("a", optimizer=optim.Adam())
        held = bag(torch.tensor([[1, 2]]))
        with pytest.raises(TableError, match="in use"):
            store.change_table("a", num_embeddings=15)
        del held
        store.change_table("a", num_embeddings=15)
        with pytest.raises(TableError, match="take it again"):
            bag(torch.tensor([[1, 2]]))
