"""The manifest and the payload of a version: damage is told from absence, and named."""

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import tierstore
from tests.children import run
from tierstore import errors, optim
from tierstore.io import lmdb as lmdb_module
from tierstore.pool.pool import Pool
from tierstore.store import manifest as manifest_module
from tierstore.store.manifest import MANIFEST_NAME, Manifest, _digest
from tierstore.store.version import NO_LINEAGE, pack, unpack, unpack_tensors

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


def test_every_flipped_byte_is_found(path: Path) -> None:
    text = path.read_bytes()
    for place in range(len(text)):
        damaged = bytearray(text)
        damaged[place] ^= 0x01
        path.write_bytes(damaged)
        if json_or_none(damaged) == json_or_none(text):
            assert Manifest.read(path.parent).tables == (CONFIG,), "white space may change"
        else:
            with pytest.raises(errors.DamagedError, match=r"manifest\.json"):
                Manifest.read(path.parent)
    path.write_bytes(text)
    with tierstore.open(path.parent, mode="r") as store:
        assert store["items"].config == CONFIG


def json_or_none(text: bytes | bytearray) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None


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
def test_a_forged_manifest_is_refused_in_few_words(path: Path, fields: dict[str, Any], message: str) -> None:
    forge(path, **fields)
    with pytest.raises(errors.FormatError, match=message) as raised:
        tierstore.open(path.parent, mode="r")
    assert str(path) in str(raised.value)
    assert len(str(raised.value)) < 1000


def test_a_manifest_that_could_not_be_read_back_is_not_written(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest_module, "_MAX_BYTES", 100_000)
    store_dir.mkdir()
    tables = tuple(replace(CONFIG, name=f"t{i}") for i in range(100))
    Manifest(store_id="0" * 32, page_bytes=4096, tables=tables).write(store_dir)
    more = Manifest(store_id="0" * 32, page_bytes=4096, tables=tables * 5)
    with pytest.raises(errors.TableError, match="500 tables take a manifest of"):
        more.write(store_dir)
    assert Manifest.read(store_dir).tables == tables
    assert [file.name for file in store_dir.iterdir()] == [MANIFEST_NAME]


def test_a_manifest_is_not_written_through_a_link(path: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("mine")
    (path.parent / f"{MANIFEST_NAME}.{os.getpid()}.partial").symlink_to(outside)
    manifest = Manifest.read(path.parent)
    manifest.write(path.parent)
    assert outside.read_text() == "mine"
    assert Manifest.read(path.parent) == manifest
    assert not list(path.parent.glob("*.partial"))


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        (errno.ENOSPC, errors.DiskFullError, "no space left"),
        (errno.EROFS, errors.ReadOnlyError, 'read-only; open the store with mode="r"'),
        (errno.EMFILE, errors.TierstoreError, "raise `ulimit -n`"),
        (errno.EIO, errors.TierstoreError, "Input/output error"),
        (errno.EINVAL, errors.TierstoreError, "file system, or this system, lacks"),
        (errno.ESTALE, errors.TierstoreError, "gone from the network file system's server"),
    ],
)
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_refused_write_leaves_the_old_manifest(
    path: Path, monkeypatch: pytest.MonkeyPatch, code: int, error: type[Exception], message: str, call: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    before = path.read_bytes()
    manifest = replace(Manifest.read(path.parent), tables=(replace(CONFIG, name="another"),))
    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(error, match=rf"manifest\.json: .*{message}"):
        manifest.write(path.parent)
    assert path.read_bytes() == before
    assert not list(path.parent.glob("*.partial"))


@pytest.mark.parametrize("kind", [MemoryError, OSError, KeyboardInterrupt])
def test_tables_are_those_on_disk_when_the_manifest_was_in_place_before_an_error(
    path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    real = os.replace

    def replace_and_fail(*names: Any) -> None:
        real(*names)
        raise kind(errno.EIO, "emulated")

    monkeypatch.setattr(os, "replace", replace_and_fail)
    with tierstore.open(path.parent, ddr="1MiB") as store:
        for call in (
            lambda: store.create_table(replace(CONFIG, name="more")),
            lambda: store.change_table("more", name="other"),
            lambda: store.drop_table("items"),
        ):
            call()
            names = [table.name for table in Manifest.read(path.parent).tables if not table.is_dropped]
            assert names == list(store.tables)
        assert names == ["other"]
        assert store.commit() == 2


def test_a_store_stops_if_its_directory_cannot_be_synced(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_creation_that_was_cut_short_is_taken_up(store_dir: Path) -> None:
    store_dir.mkdir()
    Manifest.new(4096).write(store_dir)
    with tierstore.open(store_dir, ddr="1MiB") as store:
        assert store.commit() == 1


def test_no_store_is_made_among_other_files(tmp_path: Path) -> None:
    (tmp_path / ".gitkeep").touch()
    (tmp_path / "notes.txt").touch()
    with pytest.raises(errors.StoreNotFoundError, match=r"'notes\.txt'"):
        tierstore.open(tmp_path, ddr="1MiB")
    assert {each.name for each in tmp_path.iterdir()} == {".gitkeep", "notes.txt"}
    (tmp_path / "notes.txt").unlink()
    for _ in range(2):
        tierstore.open(tmp_path, ddr="1MiB").close()
        (tmp_path / "notes.txt").touch()  # into one that is there anything may be put


@pytest.mark.parametrize("payload", [b"x", b"\xff" * 8, b"\x02" + b"\0" * 7 + b"[]", b"\x02" + b"\0" * 7 + b"{}"])
def test_a_payload_that_cannot_be_read(payload: bytes) -> None:
    with pytest.raises(errors.DamagedError, match="payload of version 3"):
        unpack(3, payload)


@pytest.mark.parametrize(
    "commit",
    [
        3,
        {},
        {"id": "x", "ancestors": []},
        {"id": "0" * 16, "ancestors": 3},
        {"id": "0" * 16, "ancestors": [[1, "0" * 15]]},
        {"id": "0" * 16, "ancestors": [[2, "0" * 16], [2, "1" * 16]]},
        {"id": "0" * 16, "ancestors": [[3, "0" * 16]]},
        {"id": "0" * 16, "ancestors": [[number, "0" * 16] for number in range(1, 258)]},
    ],
)
def test_a_lineage_that_no_commit_has(commit: Any) -> None:
    number = 3 if commit != {} and len(str(commit)) < 1000 else 1000
    header = json.dumps({"extra": {}, "tables": {}, "commit": commit}).encode()
    with pytest.raises(errors.DamagedError, match="payload of version"):
        unpack(number, len(header).to_bytes(8, "little") + header)


def test_a_table_that_could_not_be_created_leaves_no_trace(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name and number are free for another, and rows written back before it belong to the next commit."""

    def refuse(*_: object) -> None:
        raise errors.DiskFullError("no room left")

    failed, other = replace(CONFIG, name="late"), replace(CONFIG, name="late", num_embeddings=7, embedding_dim=64)
    ids = torch.arange(100)
    with tierstore.open(path.parent, ddr="1MiB", keep=3) as store:
        for value in (2, 3):
            store["items"].write(ids, torch.full((100, 4), float(value), dtype=torch.bfloat16))
            if value == 2:
                store.commit()
        with monkeypatch.context() as patch:
            patch.setattr(Manifest, "write", refuse)
            with pytest.raises(errors.DiskFullError):
                store.create_table(failed)
        assert list(store.tables) == ["items"]
        assert (store["items"].read(ids) == 3).all()
        late = store.create_table(other)
        late.write(ids[:7], torch.ones(7, 64, dtype=torch.bfloat16))
        store["items"].write(ids[:50], torch.full((50, 4), 4.0, dtype=torch.bfloat16))
        assert store.commit() == 3
        store.verify()
    for version, value in ((2, 2), (3, 3)):
        with tierstore.open(path.parent, mode="r", version=version) as store:
            assert (store["items"].read(ids[50:]) == value).all()
            assert (store["items"].read(ids[:50]) == (4 if version == 3 else value)).all()
            assert (store["late"].read(ids[:7]) == 1).all() == (version == 3)
            store.verify()


def test_a_commit_takes_memory_for_its_tensors_once(store_dir: Path) -> None:
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


def test_tensors_are_stored_as_safetensors_stores_them() -> None:
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


@pytest.mark.parametrize("place", [1, 2, 3])
def test_pools_that_refuse_use_as_an_error_comes_are_made_again(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    """``place``: before the first of two pools refuses, before the second, or behind both."""
    with tierstore.open(store_dir, ddr="4MiB") as store:
        configs = [tierstore.TableConfig(name=f"t{dim}", num_embeddings=9, embedding_dim=dim) for dim in (4, 8, 16)]
        tables = [store.create_table(config) for config in configs[:2]]
        for table in tables:
            table.write(torch.arange(9), torch.ones(9, table.config.embedding_dim))
        calls = [0]

        def fail(known: Any) -> Any:
            def run(*arguments: Any) -> Any:
                calls[0] += 1
                if calls[0] == place:
                    raise MemoryError
                return known(*arguments)

            return run

        with monkeypatch.context() as patch:
            patch.setattr(Pool, "refuse", fail(Pool.refuse))
            patch.setattr(Pool, "close", fail(Pool.close))
            with pytest.raises(MemoryError):
                store.create_table(configs[2])
        assert list(store) == ["t4", "t8"]
        assert all(bool((table.read(torch.arange(9)) == 1).all()) for table in tables)
        assert store.create_table(configs[2]).read(torch.arange(9)).shape == (9, 16)
