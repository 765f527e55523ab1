"""A copy whose rows a trace has placed: the same rows in the same versions, side by side if they are read together."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import tierstore
from tests.placing import random_trace
from tierstore import errors
from tierstore.cli import main
from tierstore.compaction import compact_store
from tierstore.io.records import PLACEMENT_MAGIC
from tierstore.manifest import Manifest
from tierstore.salvage import salvage
from tierstore.trace import TableTrace, Trace, write_trace

ROWS = 1000
TABLES = {"a": "float32", "b": "float32", "c": "bfloat16"}
VERSIONS = (3, 4, 5)


def fill(store: tierstore.Store, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for table in store.tables.values():
        ids = torch.randperm(ROWS, generator=generator)[: ROWS // 3]
        bag = tierstore.TieredEmbeddingBag(table, mode="sum")
        (bag(ids, torch.arange(0, len(ids), 5)) * 0.5).square().sum().backward()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store and a trace of it. Version 6 was given up."""
    directory = tmp_path_factory.mktemp("made")
    with tierstore.open(directory / "source", ddr="600KiB", threads=1, keep=4) as store:
        for name, dtype in TABLES.items():
            store.create_table(
                tierstore.TableConfig(
                    name=name, num_embeddings=ROWS, embedding_dim=20, dtype=dtype,  # type: ignore[arg-type]
                    optimizer=tierstore.optim.Adagrad(lr=0.1),
                )
            )  # fmt: skip
        for step in range(6):
            fill(store, step)
            store.commit(extra={"step": step}, tensors={"w": torch.full((2,), float(step))})
        store.rollback(5)
        fill(store, 99)
    write_trace(random_trace(dict.fromkeys(TABLES, ROWS), seed=3, samples=200), directory / "trace.npz")
    return directory


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """With the store, the trace and a packed copy in it."""
    shutil.copytree(made, tmp_path / "work")
    compact_store(tmp_path / "work" / "source", tmp_path / "work" / "packed", trace=tmp_path / "work" / "trace.npz")
    return tmp_path / "work"


def contents(directory: Path, version: int | None = None) -> list[object]:
    with tierstore.open(directory, mode="r", ddr="8MiB", threads=1, version=version) as store:
        rows = {
            name: table.read(torch.arange(ROWS)).view(torch.uint8).numpy().tobytes()
            for name, table in store.tables.items()
        }
        states = [table.state for table in store.tables.values()]
        return [rows, states, store.extra, store.tensors()["w"].tolist(), store.version, store.versions]


def test_every_version_is_in_the_copy(folder: Path) -> None:
    for version in (None, *VERSIONS):
        assert contents(folder / "source", version) == contents(folder / "packed", version)
    with tierstore.open(folder / "packed", ddr="8MiB", keep=3) as store:
        store.verify()
        assert store.commit() == 7, "number 6 was used"
        store.rollback(4)
        assert store.extra == {"step": 3}


def test_the_copy_is_trained_on_as_the_source_is(folder: Path) -> None:
    for directory in (folder / "source", folder / "packed"):
        with tierstore.open(directory, ddr="600KiB", threads=1, keep=2) as store:
            for step in range(3):
                fill(store, 10 + step)
                store.commit(tensors={"w": torch.full((2,), float(step))})
            store.verify()
    assert contents(folder / "source") == contents(folder / "packed")


def test_a_plain_copy_and_a_second_packing_of_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compact", str(folder / "packed"), str(folder / "plain")]) == 0
    assert Manifest.read(folder / "plain").is_placed
    write_trace(random_trace(dict.fromkeys(TABLES, ROWS), seed=8), folder / "other.npz")
    flags = ["--trace", str(folder / "other.npz")]
    assert main(["compact", str(folder / "plain"), str(folder / "again"), *flags]) == 0
    assert "version 5" in capsys.readouterr().out
    for version in VERSIONS:
        assert contents(folder / "source", version) == contents(folder / "plain", version)
        assert contents(folder / "source", version) == contents(folder / "again", version)


def test_rows_read_together_lie_in_one_block(folder: Path) -> None:
    """Of two tables of one layout: what one sample looked up, alone, again and again, costs one page."""
    together = {"a": [3, 500, 903], "b": [1, 700]}
    samples = 50
    tables = {
        name: TableTrace(np.tile(ids, samples), np.arange(0, samples * len(ids) + 1, len(ids)))
        for name, ids in together.items()
    }
    write_trace(Trace(tables=tables, batch_samples=10), folder / "few.npz")
    compact_store(folder / "source", folder / "few", trace=folder / "few.npz")
    for directory, pages in ((folder / "source", 5), (folder / "few", 1)):
        with tierstore.open(directory, mode="r", ddr="8MiB") as store:
            collection = [
                store._cold.place(np.array(ids) + (index << 40)) for index, ids in enumerate(together.values())
            ]
            layout = store["a"].layout
            places = np.concatenate(collection)
            blocks = (places >> 40 << 40) + places % (1 << 40) // layout.rows_per_block
            assert len(set(blocks.tolist())) == pages
            for name, ids in together.items():
                store[name].read(torch.tensor(ids))
    assert contents(folder / "source") == contents(folder / "few")


def test_memory_is_told_with_the_directory(folder: Path) -> None:
    found = []
    for directory in (folder / "source", folder / "packed"):
        with tierstore.open(directory, mode="r", ddr="8MiB") as store:
            placement = store._cold.placement
            found.append((store.stats().ssd.bytes, 0 if placement is None else placement.size_bytes))
    assert found[0][1] == 0
    assert 0 < found[1][1] <= found[1][0] - found[0][0]


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def parts(path: Path) -> list[int]:
    """Where the copies of the placement's one part begin, in order of their pages."""
    data, found, at = path.read_bytes(), [], 0
    while (at := data.find(PLACEMENT_MAGIC, at + 1)) >= 0:
        found.append(at)
    return found


def error_of(directory: Path, mode: str) -> str:
    try:
        with tierstore.open(directory, mode=mode, ddr="8MiB") as store:  # type: ignore[arg-type]
            store.verify()
    except errors.DamagedError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("offset", [0, 9, 17, 40, 2000, 16390])
def test_a_flipped_bit_in_the_placement_is_an_error_and_repair_needs_one_copy_of_it(folder: Path, offset: int) -> None:
    rows = folder / "packed" / "rows.lmdb"
    places = parts(rows)
    assert len(places) == 2
    whole = rows.read_bytes()
    for damaged in ([places[0]], [places[1]]):
        rows.write_bytes(whole)
        for at in damaged:
            flip(rows, at + offset)
        for mode in ("r", "w"):
            found = error_of(folder / "packed", mode)
            assert "rows.lmdb" in found
            assert "part 0 of the record of where its rows lie is damaged" in found
            assert "tierstore repair DIR NEW_DIR" in found
        shutil.rmtree(folder / "saved", ignore_errors=True)
        assert salvage(folder / "packed", folder / "saved").is_whole
        assert contents(folder / "saved")[:4] == contents(folder / "source")[:4]
    for at in places:
        flip(rows, at + offset)
    rows.write_bytes(whole)
    for at in places:
        flip(rows, at + offset)
    shutil.rmtree(folder / "saved")
    report = salvage(folder / "packed", folder / "saved")
    assert not report.is_whole
    assert "the rows that were moved are lost" in report.describe()


def test_a_damaged_row_is_named_by_its_number(folder: Path) -> None:
    with tierstore.open(folder / "packed", mode="r", ddr="8MiB") as store:
        tier = store._cold
        area = tier.placement.areas[0]
        layout = store["a"].layout
        key = int(area.keys[5])
        with tier.lease() as (_, directory):
            block = (area.first + 5) // layout.rows_per_block
            page = int(directory.pages[directory.tables.bases[area.table] + block])
    at = page * 4096 + 32 + (area.first + 5) % layout.rows_per_block * layout.stored_row_words * 8
    flip(folder / "packed" / "rows.lmdb", at + 3)
    wanted = f"row {key % 2**40} of table {key >> 40} does not match its checksum"
    assert wanted in error_of(folder / "packed", "r")
    with tierstore.open(folder / "packed", ddr="8MiB") as store:
        table = list(store.tables.values())[key >> 40]
        with pytest.raises(errors.ChecksumError, match=wanted):
            table.read(torch.tensor([key % 2**40]))


def test_files_of_a_packed_and_a_plain_copy_do_not_mix(folder: Path) -> None:
    for name in ("rows.lmdb", "manifest.json"):
        shutil.rmtree(folder / "mixed", ignore_errors=True)
        compact_store(folder / "source", folder / "mixed")
        shutil.copy(folder / "packed" / name, folder / "mixed" / name)
        for mode in ("r", "w"):
            assert "restore both from one copy of the store" in error_of(folder / "mixed", mode)


def test_a_release_that_does_not_know_placements_is_told_by_both_files(folder: Path) -> None:
    body = json.loads((folder / "packed" / "manifest.json").read_text())["body"]
    assert body["format_version"] == 2
    assert json.loads((folder / "source" / "manifest.json").read_text())["body"]["format_version"] == 1
    for name, version in (("packed", 3), ("source", 2)):
        data = (folder / name / "rows.lmdb").read_bytes()
        assert data[data.index(b"tierrows") + 8] == version


@pytest.mark.parametrize(
    ("tables", "reason"),
    [
        ({"nosuch": 5}, "the trace has a table 'nosuch' and the store has none of that name"),
        ({"a": ROWS + 3000}, rf"of table 'a', which has {ROWS} rows"),
    ],
)
def test_a_trace_of_another_store(folder: Path, tables: dict[str, int], reason: str) -> None:
    write_trace(random_trace(tables, seed=1, samples=500), folder / "wrong.npz")
    with pytest.raises(ValueError, match=reason):
        compact_store(folder / "source", folder / "copy", trace=folder / "wrong.npz")
    assert not (folder / "copy").exists()


def test_a_trace_without_a_lookup(folder: Path) -> None:
    nothing = TableTrace(np.empty(0, np.int64), np.zeros(5, np.int64))
    write_trace(Trace(tables={"a": nothing}, batch_samples=2), folder / "nothing.npz")
    with pytest.raises(ValueError, match="the trace has no lookup"):
        compact_store(folder / "source", folder / "copy", trace=folder / "nothing.npz")
