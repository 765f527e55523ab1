"""A sharded store in one process: exported, served and published as the store is that resharding makes of it; and
copied for other numbers of ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import tierstore
from tierstore import checkpoint, errors
from tierstore.cli import entry as cli
from tierstore.dist import Plan, Sharding, open_sharded
from tierstore.dist.parts import SECTION, open_parts
from tierstore.dist.reshard import resized
from tierstore.exchange import rows as chunked
from tierstore.updates import apply_update, write_update
from tierstore.updates.publish import urgent_rows

from .ranks import run
from .stores import CONFIGS, ROWS, SMALL, Bits, contents, opened, train

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")


def plain(folder: Path) -> Path:
    made = folder.with_name("plain")
    assert cli.main(["reshard", str(folder), str(made), "--plain"]) == 0
    return made


def whole(folder: Path) -> tuple[Bits, dict[str, Any]]:
    with tierstore.open(folder, mode="r", **SMALL) as store:
        return contents(store), {name: table.state for name, table in store.tables.items()}


def test_an_export_has_the_bytes_of_the_resharded_stores(folder: Path) -> None:
    files = [folder.parent / "sharded.safetensors", folder.parent / "plain.safetensors"]
    for source, file in zip((folder, plain(folder)), files, strict=True):
        assert cli.main(["export", str(source), str(file), "--state", "--dense"]) == 0
    assert files[0].read_bytes() == files[1].read_bytes()


def test_versions_are_the_commits_that_all_ranks_have_and_a_reader_moves_on_to_them(folder: Path) -> None:
    with tierstore.open(folder, mode="r", **SMALL) as store:
        first = contents(store)
        assert store.find_newer() is None
        run(train, 2, folder.parent, folder)
        assert contents(store) == first
        assert store.refresh() == 2
        second = contents(store)
        assert second == contents(folder) != first
        assert (store.version, store.versions, store.extra) == (2, (1, 2), {"steps": 2, "rank": 0})
        assert store.verify().rows >= 5 * ROWS / 20
        with pytest.raises(errors.TierstoreError, match=r"tierstore reshard .* --plain"):
            store.backup(folder.parent / "backup")
        urgent = urgent_rows(folder, 1, 0.5, {})
        changed, sent = (
            sum(write_update(folder, folder.parent / name, since=1, only=only).header.rows_of_tables().values())
            for name, only in (("all", None), ("urgent", urgent))
        )
        assert sent == len(urgent) == changed // 2 > 0
        commit_alone(folder, 3)
        assert store.refresh() == 2
        assert contents(folder) == second
        run(train, 2, folder.parent, folder)  # in a number of its own
        assert store.refresh() == 4
        assert contents(store) == contents(folder) != second
    with tierstore.open(folder, mode="r", version=2, **SMALL) as store:
        assert contents(store) == second
        assert store.refresh() == 2
    with pytest.raises(errors.StoreNotFoundError, match="no version 3"):
        tierstore.open(folder, mode="r", version=3, **SMALL)


def commit_alone(folder: Path, number: int) -> None:
    """What a kill between the ranks' commits leaves."""
    with tierstore.open(folder / "0-of-2", keep=3, **SMALL) as store:
        extra = store.extra
        extra[SECTION] |= {"number": number, "versions": extra[SECTION]["versions"] | {str(number - 1): store.version}}
        store["a"].write(torch.arange(100), torch.zeros(100, 12))
        store.commit(extra=extra)


def test_commands_shard_and_join(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other, grid, joined, plan = (tmp_path / name for name in ("other", "grid", "joined", "plan.json"))
    before, unsharded = whole(folder), plain(folder)
    assert "not sharded" in capsys.readouterr().out
    assert whole(unsharded) == before
    Plan(3, {"a": Sharding("table_wise", (2,))}).save(plan)
    assert cli.main(["reshard", str(unsharded), str(other), "--ranks", "3", "--plan", str(plan)]) == 0
    assert whole(other) == before
    with open_parts(other) as parts:
        assert parts.store.extra == {"steps": 1, "rank": 0}
        assert parts.shardings["a"] == Sharding("table_wise", (2,))
        assert parts.shardings["b"] == Sharding("row_wise", (0, 1, 2))  # of no plan
    places = Sharding("grid_shard", (0, 3, 2, 1), "rows", 2)
    Plan(4, dict.fromkeys("aef", places)).save(plan)
    for source, target, words in ((other, grid, ["--ranks", "4", "--plan", str(plan)]), (grid, joined, ["--plain"])):
        assert cli.main(["reshard", str(source), str(target), *words]) == 0
        assert whole(target) == before
    with open_parts(grid) as parts:
        assert parts.shardings["a"] == places
        assert resized(parts, 2, {}).tables["a"] == places._replace(ranks=(0, 1))
        assert resized(parts, 3, {}).tables["a"] == Sharding("row_wise", (0, 1, 2))
    assert cli.main(["reshard", str(unsharded), str(other), "--ranks", "3"]) == 1
    assert "is not empty" in capsys.readouterr().err
    for command in ("inspect", "verify"):
        assert cli.main([command, str(other)]) == 0
        told = capsys.readouterr().out
        assert all(f"{rank}-of-3" in told for rank in range(3))
    assert cli.main(["compact", str(other), str(tmp_path / "compact")]) == 1
    assert f"tierstore reshard {other} NEW_DIR --plain" in capsys.readouterr().err
    tierstore.quantize(unsharded, tmp_path / "small", dtype="int8")
    for words in (["--plain"], ["--ranks", "2"]):
        assert cli.main(["reshard", str(tmp_path / "small"), str(tmp_path / "new"), *words]) == 1
        told = capsys.readouterr().err
        assert all(word in told for word in ("table 'a'", "int8 rows", "tierstore backup"))
        assert not (tmp_path / "new").exists()


def test_columns_of_a_row_that_only_one_rank_has_written(tmp_path: Path) -> None:
    source, folder, plan = tmp_path / "source", tmp_path / "store", tmp_path / "plan.json"
    with tierstore.open(source, **SMALL) as store:
        for name in "ef":
            table = store.create_table(CONFIGS[name])
            rows = table.read(torch.arange(9))
            rows[3:6, :6], rows[6:, 6:] = 5.0, 7.0
            table.write(torch.arange(9), rows)
        store.commit()
    Plan(2, {name: Sharding("column_wise", (1, 0)) for name in "ef"}).save(plan)
    assert cli.main(["reshard", str(source), str(folder), "--ranks", "2", "--plan", str(plan)]) == 0
    assert contents(folder) == contents(source)
    apply_update(tmp_path / "replica", write_update(folder, tmp_path / "update").path)
    found, expected = ([each[0] for each in contents(path).values()] for path in (tmp_path / "replica", source))
    assert found == expected


def save(folder: Path, path: Path) -> None:
    chunked.CHUNK_BYTES = 1 << 12  # type: ignore[misc]
    with opened(folder) as store:
        dcp.save({"tables": checkpoint.rows(store)}, checkpoint_id=path)


def load(folder: Path, path: Path) -> None:
    chunked.CHUNK_BYTES = 1 << 12  # type: ignore[misc]
    with open_sharded(folder, **SMALL) as store:
        for name, config in CONFIGS.items():
            store.create_table(config, sharding_type="column_wise" if name in "ef" else None)
        dcp.load({"tables": checkpoint.rows(store)}, checkpoint_id=path)
        store.commit()


def test_other_numbers_of_ranks_load_what_ranks_saved(folder: Path, tmp_path: Path) -> None:
    path, expected = tmp_path / "saved", whole(folder)
    run(save, 2, tmp_path, folder, path)
    run(load, 3, tmp_path, tmp_path / "loaded", path)
    assert whole(tmp_path / "loaded") == expected
    with tierstore.open(alone := tmp_path / "plain", **SMALL) as store:
        for config in CONFIGS.values():
            store.create_table(config)
        dcp.load({"tables": checkpoint.rows(store)}, checkpoint_id=path)
        store.commit()
        dcp.save({"tables": checkpoint.rows(store)}, checkpoint_id=tmp_path / "again")
    assert whole(alone) == expected
    run(load, 2, tmp_path, last := tmp_path / "last", tmp_path / "again")
    assert whole(last) == expected
