"""An update holds the rows that changed and no others, and a replica that took it has the source's bits.

A number may be used again; a commit's identity is not, so no replica takes changes of rows that it has not.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import tierstore
from tests import children
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
)
from tierstore import errors
from tierstore.exchange.rows import read_rows
from tierstore.offline.compaction import compact_store
from tierstore.offline.salvage import salvage
from tierstore.store import version as payloads
from tierstore.store.version import MAX_ANCESTORS, NO_LINEAGE, ORIGIN_KEY, Ancestor, Lineage
from tierstore.updates import Applied, Origin, Update, apply_update, origin_of
from tierstore.updates.update_file import UpdateFile


def sent_rows(update: Update) -> dict[str, set[int]]:
    """The rows in an update, each of them once."""
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
    """As a publisher does: what the replica lacks."""
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
