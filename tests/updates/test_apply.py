"""An update holds the rows that changed and no others, and becomes the replica's version whole or not at all.

A number may be used again; a commit's identity is not, so no replica takes changes of rows that it has not."""

import errno
import json
import os
import shutil
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from safetensors import safe_open

import tierstore
from tests import children
from tests.children import run
from tests.updates.support import (
    ROWS,
    SMALL,
    assign,
    change,
    contents,
    edited,
    extra_of,
    make,
    same,
    source_of,
    table_config,
    version_of,
)
from tierstore import errors
from tierstore.exchange.rows import read_rows
from tierstore.io.lmdb import LmdbColdTier
from tierstore.kernels.jit import JIT_ENABLED
from tierstore.offline.compaction import compact_store
from tierstore.offline.salvage import salvage
from tierstore.store import version as payloads
from tierstore.store.version import MAX_ANCESTORS, NO_LINEAGE, ORIGIN_KEY, Ancestor, Lineage
from tierstore.updates import Applied, Origin, Update, apply_update, origin_of, roll_back_replica, write_update
from tierstore.updates.apply import answer
from tierstore.updates.update_file import MAX_CHUNK_BYTES, MAX_PAYLOAD_BYTES, UpdateFile, pack_chunk


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("source") / "store"
    for seed in (1, 2, 3):
        change(directory, seed, keep=3)
    return directory


@pytest.fixture(scope="module")
def updates(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Update]:
    folder = tmp_path_factory.mktemp("updates")
    return {since: write_update(source, folder / str(since), since=since) for since in (0, 1, 2)}


@pytest.fixture(scope="module")
def first(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("first")
    shutil.copytree(source, folder / "source")
    with tierstore.open(folder / "source", **SMALL) as store:
        store.rollback(1)
    apply_update(folder / "replica", write_update(folder / "source", folder / "update").path)
    return folder / "replica"


@pytest.fixture
def replica(first: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(first, tmp_path / "replica"))


def test_the_same_update_again_does_nothing(replica, updates, source):
    assert apply_update(replica, updates[1].path) == (3, sum(updates[1].header.rows_of_tables().values()), False)
    for since in (1, 0, 2):
        assert apply_update(replica, updates[since].path) == (3, 0, True)
    with tierstore.open(replica, mode="r", **SMALL) as store:
        assert store.version == 2
    assert same(contents(replica), contents(source))


def test_what_is_no_replica_stays(tmp_path, updates):
    with pytest.raises(errors.TierstoreError, match="is empty, and the update goes from version 1"):
        apply_update(tmp_path / "new", updates[1].path)
    assert not (tmp_path / "new").exists()
    assert apply_update(tmp_path / "new", updates[0].path).version == 3
    change(tmp_path / "own", 5)
    with pytest.raises(errors.TierstoreError, match="written by others than updates"):
        apply_update(tmp_path / "own", updates[0].path)
    with pytest.raises(errors.TierstoreError, match="is no replica"):
        roll_back_replica(tmp_path / "own")
    with pytest.raises(errors.StoreNotFoundError):
        roll_back_replica(tmp_path / "none")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(updates[0].path)
    for name in ("pipe", "link"):
        with pytest.raises(errors.FormatError, match="not a plain file"), UpdateFile(tmp_path / name):
            pass


def test_a_bit_that_flips_in_a_chunk_is_found(replica, updates, tmp_path):
    data = updates[1].path.read_bytes()
    damaged = tmp_path / "damaged"
    for place in range(8 + int.from_bytes(data[:8], "little"), len(data), len(data) // 30):
        damaged.write_bytes(data[:place] + bytes([data[place] ^ 16]) + data[place + 1 :])
        with pytest.raises(errors.ChecksumError, match="send the update again"):
            apply_update(replica, damaged)
    for length in (0, 7, 8, 100, len(data) - 1):
        damaged.write_bytes(data[:length])
        with pytest.raises(errors.DamagedError):
            apply_update(replica, damaged)
    assert version_of(replica) == 1


def with_chunks(place: int, table: int, *chunks: tuple[int, bytes]) -> Any:
    def edit(own: Any, parts: list[bytes]) -> None:
        packed = {raw: zlib.compress(raw) for _, raw in chunks}
        told = [[table, rows, len(raw), xxhash.xxh64_hexdigest(packed[raw])] for rows, raw in chunks]
        own["chunks"][place : place + 1], parts[place : place + 1] = told, [packed[raw] for _, raw in chunks]

    return edit


def with_payload(*raws: bytes) -> Any:
    return with_chunks(0, -1, *((0, raw) for raw in raws))


def with_ids(ids: list[int]) -> Any:
    layout = table_config("item").layout(4096)
    rows = np.zeros((len(ids), layout.weight_words), np.uint64)
    return with_chunks(1, 0, (len(ids), pack_chunk(np.array(ids, np.int64), rows, layout)))


def twice(own: Any, parts: list[bytes]) -> None:
    own["chunks"].insert(1, own["chunks"][1])
    parts.insert(1, parts[1])


def bomb(own: Any, parts: list[bytes]) -> None:
    with_payload(bytes(MAX_CHUNK_BYTES))(own, parts)
    own["chunks"][0][2] = 100


HOSTILE = {
    "descending": with_ids([5, 3]),
    "outside": with_ids([5, ROWS]),
    "wrapped": with_ids([2**63 - 1, -(2**63), 7]),
    "twice": twice,
    "bomb": bomb,
    "huge chunk": assign("chunks", 1, 2, value=2**40),
    "no rows": assign("chunks", 1, 1, value=0),
    "no order": assign("chunks", 0, 0, value=1),
    "source": assign("source", value="../../x"),
    "since": assign("since", value=3),
    "version": assign("version", value="3"),
    "commit": assign("commit_id", value="0" * 15),
    "passed": assign("passed", value=["0" * 15]),
    "table": assign("tables", 0, value={"name": 3}),
    "wide": assign("tables", 0, "embedding_dim", value=1 << 20),
    "deep": with_payload(b"[" * 100000),
    "payload": with_payload(b"\x02\0\0\0\0\0\0\0{}"),
    "more": lambda own, parts: parts.append(b"more"),
}


def test_hostile_files_change_nothing(replica, updates, tmp_path, source):
    for name, edit in HOSTILE.items():
        with pytest.raises(errors.DamagedError):
            print(name, apply_update(replica, edited(updates[1], tmp_path / name, edit)))
    with tierstore.open(replica, mode="r", **SMALL) as store:
        assert (store.version, list(store.tables)) == (1, ["item", "user"])
    assert apply_update(replica, edited(updates[1], tmp_path / "same", lambda own, parts: None)).version == 3
    assert same(contents(replica), contents(source))


def named(file: Path) -> Path:
    return Path(shutil.copyfile(file, file.with_name(xxhash.xxh64_hexdigest(file.read_bytes()))))


SHORTAGES = [
    OSError(errno.EMFILE, "no handles"), MemoryError(), errors.TierstoreError("out of file descriptors"),
    errors.DiskFullError("full"), errors.UnreadableError("not now"),
]  # fmt: skip


@pytest.mark.parametrize("step", ["write", "commit"])
def test_what_is_at_fault_is_told(step, source, replica, tmp_path, monkeypatch):
    """A passing shortage says nothing of a file, nor does a damaged replica; and of several files one is at fault."""
    sound = [named(write_update(source, tmp_path / str(end), since=end - 1, version=end).path) for end in (2, 3)]
    told: dict[str, Any] = {}

    def apply(*files: Path) -> dict[str, str]:
        told.update(json.loads(answer(json.dumps(["apply", "", str(replica), *map(str, files)]))))
        faults: dict[str, str] = told["faults"]
        return faults

    for error in (*SHORTAGES, errors.ChecksumError("of the replica")):

        def fail(*_: Any, error: Any = error, **__: Any) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(LmdbColdTier, step, fail)
            assert apply(*sound) == {}
            assert told["is_refused"] == isinstance(error, errors.ChecksumError)
            assert told["is_full"] == isinstance(error, errors.DiskFullError)
    updates = [SimpleNamespace(path=each) for each in sound]
    for edit in (twice, assign("since_commit_id", value="0" * 16), assign("tables", 0, "name", value="another")):
        wrong: Any = named(edited(updates[1], tmp_path / "wrong", edit))
        assert apply(sound[0], wrong) == {str(wrong): "refused"}
        wrong.write_bytes(wrong.read_bytes()[:-1] + b"?")
        assert apply(sound[0], wrong) == {str(wrong): "damaged"}
    assert version_of(replica) == 1
    together = sum(int.from_bytes(each.read_bytes()[:8], "little") for each in sound)
    monkeypatch.setattr("tierstore.updates.apply.MAX_HEADER_BYTES", together - 1)
    assert apply(*sound) == {str(sound[1]): "refused"}, "headers take memory together"
    monkeypatch.setattr("tierstore.updates.apply.MAX_HEADER_BYTES", together)
    assert json.loads(answer(json.dumps(["apply", "", str(replica), *map(str, sound)])))["version"] == 3


MANY_ROWS, DENSE_MIB = 1_000_000, 64
APPLY = """
    from tierstore.updates import apply_update

    def limited(number, file, allowed_mib):
        limit_data(int(allowed_mib) << 20)
        return apply_update(work / f"replica-{number}", file)

    work = Path(sys.argv[1])
    apply_update(work / "tiny replica", sys.argv[2])  # after which everything is loaded and compiled
    for number in range(3, len(sys.argv), 2):
        forked(limited, number, *sys.argv[number : number + 2])
    """


def inflating(folder: Path) -> Path:
    with tierstore.open(folder / "source", ddr="256MiB") as store:
        table = store.create_table(tierstore.TableConfig(name="t", num_embeddings=MANY_ROWS, embedding_dim=16))
        for ids in torch.arange(MANY_ROWS).split(1 << 18):
            table.write(ids, torch.ones(len(ids), 16))
        store.commit(tensors={"w": torch.zeros(DENSE_MIB << 18)})
    update = write_update(folder / "source", folder / "inflating")
    assert update.size_bytes < 4 << 20 < sum(chunk.raw_bytes for chunk in update.header.chunks) >> 5
    return update.path


def with_extra_of(num_bytes: int) -> Any:
    raw = b'{"tables": {}, "extra": {"x": [%s{}]}}' % (b"{}," * (num_bytes // 3))
    raw = len(raw).to_bytes(8, "little") + raw
    return with_payload(*(raw[start : start + MAX_CHUNK_BYTES] for start in range(0, len(raw), MAX_CHUNK_BYTES)))


@pytest.mark.skipif(not JIT_ENABLED, reason="plain Python takes long for so many rows")
def test_an_update_takes_as_much_memory_as_it_may_or_is_refused(tmp_path):
    """As docs/updates.md says."""
    change(tmp_path / "store", 1)
    small = write_update(tmp_path / "store", tmp_path / "update")
    hostile = {
        "a payload of": with_payload(*[bytes(MAX_CHUNK_BYTES)] * (1 + MAX_PAYLOAD_BYTES // MAX_CHUNK_BYTES)),
        "extra of": with_extra_of(32 << 20),
    }
    files = [edited(small, tmp_path / name, edit) for name, edit in hostile.items()]
    assert max(file.stat().st_size for file in files) < 8 << 20
    cases = [inflating(tmp_path), 128 + 2 * DENSE_MIB, *(word for file in files for word in (file, 136))]
    applied, payload, extra = run(APPLY, tmp_path, small.path, *cases).splitlines()
    assert applied == f"ok Applied(version=1, rows={MANY_ROWS}, was_there=False)"
    for said, words in ((payload, "a payload of"), (extra, "extra of")):
        assert said.startswith("FormatError"), said
        assert words in said


def test_a_source_that_no_update_can_hold_is_told_before_its_rows_are_read(tmp_path):
    with tierstore.open(tmp_path / "source", ddr="4MiB") as store:
        store.create_table(table_config("item")).write(torch.tensor([1]), torch.ones(1, 6))
        store.commit(extra={"x": ["y" * 1000] * 5000})
    with pytest.raises(ValueError, match=r"a version with extra of 50.* bytes; an update holds at most"):
        write_update(tmp_path / "source", tmp_path / "update")


def test_several_files_are_applied_as_the_last_ones_version(source, replica, updates, tmp_path):
    second = write_update(source, tmp_path / "second", since=1, version=2)
    with pytest.raises(errors.TierstoreError, match="goes from version 2"):
        apply_update(replica, updates[2].path, second.path)
    assert version_of(replica) == 1
    assert apply_update(replica, second.path, updates[2].path).version == 3
    with tierstore.open(replica, mode="r", **SMALL) as store:
        assert store.version == 2
    assert same(contents(replica), contents(source))
    twin = tmp_path / "twin"
    first = write_update(source, tmp_path / "first", version=1)
    assert apply_update(twin, first.path, second.path, updates[2].path).version == 3
    assert same(contents(twin), contents(source))


def sent_rows(update: Update) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    with UpdateFile(update.path) as file:
        for index, config in enumerate(file.header.tables):
            rows = [row for ids, _ in file.rows(index) for row in ids.tolist()]
            assert rows == sorted(set(rows))
            found[config.name] = set(rows)
    return found


def test_a_replica_follows_version_by_version(tmp_path: Path) -> None:
    source, replica = tmp_path / "source", tmp_path / "replica"
    written: dict[str, set[int]] = {"item": set(), "user": set()}
    for version in (1, 2, 3):
        changed = change(source, version, keep=2)
        written = {name: written[name] | changed[name] for name in changed}
        update = make(source, version - 1)
        assert sent_rows(update) == changed
        assert update.header.rows_of_tables() == {name: len(rows) for name, rows in changed.items()}
        assert apply_update(replica, update.path) == (version, 120, False)
        assert same(contents(source), contents(replica))
    assert sent_rows(make(source)) == written
    extra, tensors = extra_of(replica)
    assert extra == {"step": 3, ORIGIN_KEY: update.header.origin._asdict()}
    assert tensors.keys() == {"model.w"}
    assert torch.equal(tensors["model.w"], torch.full((3,), 3.0))
    with tierstore.open(replica, mode="r", **SMALL) as store:
        store.verify()
        assert len(store.versions) == 2
        assert {table.config.optimizer.kind for table in store.tables.values()} == {"sgd"}


def test_rows_that_were_written_are_sent_whatever_bits_they_had(tmp_path: Path) -> None:
    source = tmp_path / "source"
    with tierstore.open(source, keep=2, **SMALL) as store:
        table = store.create_table(table_config("item"))
        first = table.read(torch.arange(ROWS))
        table.write(torch.arange(800), first[:800])
        store.commit()
        first[5] += 1.0
        written = torch.tensor([5, 700, 800])
        table.write(written, first[written])
        store.commit()
    assert sent_rows(make(source, 1)) == {"item": {5, 700, 800}}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8", "int4"])
def test_everything_has_the_bits_of_the_source_and_rows_it_lacks_their_first_values(tmp_path: Path, dtype: Any) -> None:
    """As when the source was put back from a copy of which nothing is left that the replica has."""
    replica, made = tmp_path / "replica", []
    for seed in (1, 2):
        source = tmp_path / f"source-{seed}"
        change(source, seed, names=("item",))
        if dtype != "float32":
            tierstore.quantize(source, source := tmp_path / f"{dtype}-{seed}", dtype=dtype)
        made.append(make(source))
        own = assign("source", value=made[0].header.origin.source)
        apply_update(replica, edited(made[-1], tmp_path / f"edited-{seed}", own))
        assert same(contents(source), contents(replica))
        stored = []
        for directory in (source, replica):
            with tierstore.open(directory, mode="r", **SMALL) as store:
                assert store["item"].config.dtype == dtype
                stored.append(torch.from_numpy(read_rows(store["item"], 0, ROWS).weights))
        assert torch.equal(*stored)


def test_the_file_is_safetensors_and_the_same_each_time(tmp_path: Path) -> None:
    with pytest.raises(errors.StoreNotFoundError):
        make(tmp_path / "none")
    tierstore.open(tmp_path / "new", **SMALL).close()
    with pytest.raises(errors.StoreNotFoundError, match="nothing was committed"):
        make(tmp_path / "new")
    change(source := tmp_path / "source", 1)
    with pytest.raises(ValueError, match="is at version 1"):
        make(source, 1)
    one, other = make(source), make(source)
    assert one.id == other.id
    assert one.path.read_bytes() == other.path.read_bytes()
    with safe_open(one.path, framework="pt") as file:
        sizes = [file.get_tensor(key).numel() for key in file.keys()]  # noqa: SIM118 - no mapping
    assert len(sizes) == len(one.header.chunks) == 3
    assert sum(sizes) < one.size_bytes


def test_where_a_commit_came_from_is_told_or_refused() -> None:
    assert origin_of({"step": 1}) is None
    told = {"source": "0" * 32, "version": 3, "commit_id": "0f" * 8}
    assert origin_of({ORIGIN_KEY: told}) == Origin("0" * 32, 3, "0f" * 8)
    for stored in (3, {}, {**told, "source": "x"}, {**told, "version": True}, {**told, "commit_id": "0F" * 8}):
        with pytest.raises(errors.FormatError):
            origin_of({ORIGIN_KEY: stored})


def has(replica: Path) -> Origin | None:
    return origin_of(extra_of(replica)[0])


def bring(source: Path, replica: Path) -> Applied:
    origin = has(replica) if replica.exists() else None
    is_ancestor = source_of(source).has_grown_from(origin)
    update = make(source, origin.version if is_ancestor and origin else 0)
    return apply_update(replica, update.path, replaces=origin.commit_id if origin else "")


KILLED = """
from tierstore.system import killpoints

def hook(name):
    if name == "commit: transaction committed":
        os.kill(os.getpid(), signal.SIGKILL)

def commit():
    with tierstore.open(sys.argv[1], keep=3, ddr="4MiB", threads=1) as store:
        store["item"].write(torch.arange(50), torch.full((50, 6), 9.0))
        killpoints.hook = hook
        store.commit()

forked(commit)
"""


def test_a_commit_that_was_seen_and_lost_is_not_gone_on_from(tmp_path: Path) -> None:
    """The next writer goes back to the anchored tree, where the number is free again."""
    source, replica = tmp_path / "source", tmp_path / "replica"
    change(source, 1, keep=3)
    assert children.run(KILLED, source) == "ended with -9\n"
    apply_update(replica, make(source).path)  # opens it read-only, before a writer does
    lost = has(replica)
    assert lost.version == 2
    change(source, 20, keep=3)
    found = source_of(source)
    assert found.origin.version == 2
    assert found.origin != lost
    change(source, 3, keep=3)
    before, update = contents(replica), make(source, 2)
    assert update.header.since == 2
    refused = r"has version 2 \(commit \w+\) .* goes from version 2 \(commit .* a full copy"
    with pytest.raises(errors.TierstoreError, match=refused):
        apply_update(replica, update.path)
    assert same(contents(replica), before)
    assert not bring(source, replica).was_there
    assert same(contents(replica), contents(source))


def test_each_commit_follows_from_the_one_before_it() -> None:
    made = NO_LINEAGE
    ids = []
    for number in range(1, MAX_ANCESTORS + 50):
        made = made.following(number - 1)
        ids.append(made.commit_id)
    assert len(set(ids)) == len(ids)
    first = len(ids) - MAX_ANCESTORS
    assert made.ancestors == tuple(Ancestor(number, ids[number - 1]) for number in range(first, len(ids)))
    assert made.id_of(first) == ids[first - 1]
    assert made.id_of(first - 1) == made.id_of(len(ids)) == ""
    assert Lineage.from_dict(made.to_dict()) == made


def test_what_an_earlier_release_wrote_is_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def framed(tables: Any, extra: Any, _lineage: Any, framed: Any = payloads._framed) -> bytes:
        return bytes(framed(tables, extra, NO_LINEAGE))

    with monkeypatch.context() as earlier:
        earlier.setattr(payloads, "_framed", framed)
        change(tmp_path / "source", 1)
    with pytest.raises(errors.TierstoreError, match="commit once more"):
        make(tmp_path / "source")
    change(tmp_path / "source", 2)
    assert not bring(tmp_path / "source", tmp_path / "replica").was_there
    assert same(contents(tmp_path / "replica"), contents(tmp_path / "source"))


def test_a_compacted_copy_is_of_the_same_commits_and_other_copies_are_not(tmp_path: Path) -> None:
    source, replica = tmp_path / "source", tmp_path / "replica"
    for seed in (1, 2):
        change(source, seed, keep=3)
    told = source_of(source)
    bring(source, replica)
    compact_store(source, tmp_path / "compact")
    assert source_of(tmp_path / "compact") == told
    change(tmp_path / "compact", 3, keep=3)
    assert bring(tmp_path / "compact", replica) == (3, 120, False)
    assert same(contents(replica), contents(tmp_path / "compact"))
    salvage(source, tmp_path / "saved")
    tierstore.quantize(source, tmp_path / "small", dtype="float16")
    for made in ("saved", "small"):
        other = source_of(tmp_path / made)
        assert other.origin.version == 2
        assert other.origin.commit_id not in ("", told.origin.commit_id)
        assert other.lineage.ancestors == ()
    assert extra_of(tmp_path / "saved")[0] == extra_of(source)[0]
    assert extra_of(tmp_path / "saved")[1].keys() == extra_of(source)[1].keys()


def test_a_full_copy_leaves_no_rows_of_tables_that_came_after_it(tmp_path: Path) -> None:
    """In a replica of a source that was put back from a copy."""
    source, fork, replica = tmp_path / "source", tmp_path / "fork", tmp_path / "replica"
    change(source, 1, keep=4, names=("item",))
    shutil.copytree(source, fork)
    copy = make(source)
    for seed, directory in ((2, fork), (3, source)):
        change(directory, seed, keep=4)
    lost = make(fork)
    apply_update(replica, lost.path)
    apply_update(replica, copy.path, make(source, 1).path, replaces=lost.header.origin.commit_id)
    assert same(contents(replica), contents(source))
