"""An update holds the rows that changed and no others, and a replica that took it has the source's bits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import tierstore
from tests.updates.support import ROWS, SMALL, assign, change, contents, edited, extra_of, make, same, table_config
from tierstore import errors
from tierstore.exchange.rows import read_rows
from tierstore.store.version import ORIGIN_KEY
from tierstore.updates import Origin, Update, apply_update, origin_of
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
        applied = apply_update(replica, update.path, id=update.id)
        assert applied == (version, 120, False)
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
def test_everything_has_the_bits_of_the_source_and_rows_that_it_lacks_their_first_values(
    tmp_path: Path, dtype: Any
) -> None:
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
    told = {"source": "0" * 32, "version": 3}
    for commit_id in ("", "0f" * 8):
        assert origin_of({ORIGIN_KEY: {**told, "commit_id": commit_id}}) == Origin("0" * 32, 3, commit_id)
    assert origin_of({ORIGIN_KEY: told}) == Origin("0" * 32, 3)
    for stored in (3, {}, {**told, "source": "x"}, {**told, "version": True}, {**told, "commit_id": "0F" * 8}):
        with pytest.raises(errors.FormatError):
            origin_of({ORIGIN_KEY: stored})
