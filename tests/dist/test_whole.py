"""A sharded store in one process: exported, served and published as the store is that resharding makes of it; and
copied for other numbers of ranks."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import tierstore
from tierstore import checkpoint, errors, optim
from tierstore.cli import entry as cli
from tierstore.dist import Plan, ShardedTieredEmbeddingBagCollection, Sharding, open_sharded
from tierstore.dist.parts import SECTION, open_parts
from tierstore.dist.reshard import resized
from tierstore.exchange import rows as chunked
from tierstore.exchange.rows import read_rows
from tierstore.updates import apply_update, write_update
from tierstore.updates.delta import urgent_rows

from .ranks import run

ROWS = 301
SMALL: dict[str, Any] = {"ddr": "2MiB", "threads": 1}
TABLES: dict[str, tuple[str, dict[str, Any]]] = {
    "a": ("row_wise", {"embedding_dim": 12, "optimizer": optim.Adam(lr=0.1)}),
    "b": ("table_wise", {"embedding_dim": 12, "optimizer": optim.RowWiseAdagrad(lr=0.1)}),
    "c": ("column_wise", {"embedding_dim": 12, "optimizer": optim.RowWiseAdagrad(lr=0.1)}),
    "d": ("column_wise", {"embedding_dim": 6, "optimizer": optim.Adam(lr=0.1), "dtype": "bfloat16"}),
    "e": ("data_parallel", {"embedding_dim": 5, "optimizer": optim.Adagrad(lr=0.1)}),
}


def config_of(name: str) -> tierstore.TableConfig:
    return tierstore.TableConfig(name=name, num_embeddings=ROWS, init=tierstore.init.Normal(), **TABLES[name][1])


def train(folder: Path, seed: int, names: str = "abcde") -> None:
    """One step of some rows, and a commit."""
    with open_sharded(folder, **SMALL) as store:
        for name in names:
            if name not in store.tables:
                store.create_table(config_of(name), sharding_type=TABLES[name][0])  # type: ignore[arg-type]
        module = ShardedTieredEmbeddingBagCollection(store)
        generator = torch.Generator().manual_seed(100 * seed + store.ranks.rank)
        ids = torch.randint(0, ROWS, (len(store.tables) * 20,), generator=generator)
        lengths = torch.ones(len(ids), dtype=torch.int64)
        out = module(tierstore.KeyedJaggedTensor(list(store.tables), ids, lengths=lengths))
        out.values().square().sum().backward()
        store.commit(extra={"seed": seed, "rank": store.ranks.rank}, tensors={"w": torch.full((3,), float(seed))})


def contents(folder: Path) -> dict[str, tuple[bytes, bytes]]:
    """Bits of each table's rows and optimizer state."""
    with tierstore.open(folder, mode="r", **SMALL) as store:
        return rows_of(store)


def rows_of(store: Any) -> dict[str, tuple[bytes, bytes]]:
    rows = {name: read_rows(table, 0, ROWS) for name, table in store.tables.items()}
    return {name: (each.weights.tobytes(), each.state.tobytes()) for name, each in rows.items()}


def plain(folder: Path, name: str = "plain") -> Path:
    made = folder.with_name(name)
    assert cli.main(["reshard", str(folder), str(made), "--plain"]) == 0
    return made


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    run(train, 2, folder, folder / "store", 1)
    return folder / "store"


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "store"))


def ranks_train(folder: Path, seed: int, names: str = "abcde") -> None:
    run(train, 2, folder.parent, folder, seed, names)


def test_an_export_has_the_bytes_of_the_resharded_stores(folder: Path) -> None:
    files = [folder.parent / "sharded.safetensors", folder.parent / "plain.safetensors"]
    for source, file in zip((folder, plain(folder)), files, strict=True):
        assert cli.main(["export", str(source), str(file), "--state", "--dense"]) == 0
    assert files[0].read_bytes() == files[1].read_bytes()


def test_versions_are_the_commits_that_all_ranks_have(folder: Path) -> None:
    before = contents(folder)
    ranks_train(folder, 2)
    with tierstore.open(folder, mode="r", **SMALL) as store:
        assert (store.version, store.versions, store.extra) == (2, (1, 2), {"seed": 2, "rank": 0})
        assert store.verify().rows >= 5 * ROWS / 20
        with pytest.raises(errors.TierstoreError, match=r"tierstore reshard .* --plain"):
            store.backup(folder.parent / "backup")
    with tierstore.open(folder, mode="r", version=1, **SMALL) as store:
        assert rows_of(store) == before
        assert store.refresh() == 1
    with pytest.raises(errors.StoreNotFoundError, match="no version 3"):
        tierstore.open(folder, mode="r", version=3, **SMALL)
    urgent, changed = urgent_rows(folder, 1, 0.5, {}), write_update(folder, folder.parent / "all", since=1).header
    sent = write_update(folder, folder.parent / "urgent", since=1, only=urgent).header
    assert sent.num_rows == len(urgent) == changed.num_rows // 2 > 0


def test_a_reader_moves_on_when_all_ranks_have_a_commit(folder: Path) -> None:
    with tierstore.open(folder, mode="r", **SMALL) as store:
        first = rows_of(store)
        assert store.find_newer() is None
        ranks_train(folder, 2)
        newer = store.find_newer()
        assert rows_of(store) == first
        assert newer is not None
        assert newer.show() == 2
        second = rows_of(store)
        assert second == contents(folder) != first
        commit_alone(folder, 3)
        assert store.refresh() == 2
        assert contents(folder) == second
        ranks_train(folder, 4)  # in a number of its own
        assert store.refresh() == 4
        assert rows_of(store) == contents(folder) != second


def whole(folder: Path) -> tuple[Any, Any]:
    return contents(folder), states(folder)


def test_commands_shard_and_join(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other, grid, joined, plan = (tmp_path / name for name in ("other", "grid", "joined", "plan.json"))
    before = whole(folder)
    unsharded = plain(folder)
    assert "not sharded" in capsys.readouterr().out
    assert whole(unsharded) == before
    Plan(3, {"a": Sharding("table_wise", (2,))}).save(plan)
    assert cli.main(["reshard", str(unsharded), str(other), "--ranks", "3", "--plan", str(plan)]) == 0
    assert whole(other) == before
    with open_parts(other) as parts:
        assert parts.store.extra == {"seed": 1, "rank": 0}
        assert parts.shardings["a"] == Sharding("table_wise", (2,))
        assert parts.shardings["b"] == Sharding("row_wise", (0, 1, 2))  # of no plan
    places = Sharding("grid_shard", (0, 3, 2, 1), "rows", 2)
    Plan(4, dict.fromkeys("abc", places)).save(plan)
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


@pytest.mark.parametrize("target", [["--plain"], ["--ranks", "2"]])
def test_quantized_rows_are_refused_at_once(
    target: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with tierstore.open(tmp_path / "exact", **SMALL) as store:
        store.create_table(tierstore.TableConfig(name="a", num_embeddings=ROWS, embedding_dim=8))
        store["a"].write(torch.arange(10), torch.ones(10, 8))
        store.commit()
    tierstore.quantize(tmp_path / "exact", tmp_path / "small", dtype="int8")
    assert cli.main(["reshard", str(tmp_path / "small"), str(tmp_path / "new"), *target]) == 1
    told = capsys.readouterr().err
    assert all(word in told for word in ("table 'a'", "int8 rows", "tierstore backup"))
    assert not (tmp_path / "new").exists()


def commit_alone(folder: Path, number: int) -> None:
    """What a kill between the ranks' commits leaves."""
    with tierstore.open(folder / "0-of-2", keep=3, **SMALL) as store:
        extra = store.extra
        extra[SECTION] |= {"number": number, "versions": extra[SECTION]["versions"] | {str(number - 1): store.version}}
        store["a"].write(torch.arange(100), torch.zeros(100, 12))
        store.commit(extra=extra)


def test_columns_of_a_row_that_only_one_rank_has_written(tmp_path: Path) -> None:
    source, folder, plan = tmp_path / "source", tmp_path / "store", tmp_path / "plan.json"
    with tierstore.open(source, **SMALL) as store:
        for name in "cd":
            table = store.create_table(config_of(name))
            rows = table.read(torch.arange(9))
            rows[3:6, :3], rows[6:, 3:] = 5.0, 7.0
            table.write(torch.arange(9), rows)
        store.commit()
    Plan(2, {name: Sharding("column_wise", (1, 0)) for name in "cd"}).save(plan)
    assert cli.main(["reshard", str(source), str(folder), "--ranks", "2", "--plan", str(plan)]) == 0
    assert contents(folder) == contents(source)
    update = write_update(folder, tmp_path / "update")
    apply_update(tmp_path / "replica", update.path)
    assert weights(tmp_path / "replica") == weights(source)


def weights(folder: Path) -> dict[str, bytes]:
    return {name: each[0] for name, each in contents(folder).items()}


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")


def states(folder: Path) -> dict[str, Any]:
    with tierstore.open(folder, mode="r", **SMALL) as store:
        return {name: table.state for name, table in store.tables.items()}


def save(folder: Path, path: Path) -> None:
    chunked.CHUNK_BYTES = 1 << 12  # type: ignore[misc]
    with open_sharded(folder, **SMALL) as store:
        dcp.save({"tables": checkpoint.rows(store)}, checkpoint_id=path)


def load(folder: Path, path: Path) -> None:
    chunked.CHUNK_BYTES = 1 << 12  # type: ignore[misc]
    with open_sharded(folder, **SMALL) as store:
        for name, (kind, _) in TABLES.items():
            store.create_table(config_of(name), sharding_type=kind)  # type: ignore[arg-type]
        dcp.load({"tables": checkpoint.rows(store)}, checkpoint_id=path)
        store.commit()


def test_other_numbers_of_ranks_load_what_ranks_saved(tmp_path: Path) -> None:
    first, path = tmp_path / "2", tmp_path / "saved"
    run(train, 2, tmp_path, first, 1)
    expected = whole(first)
    run(save, 2, tmp_path, first, path)
    for size in (3, 1):
        run(load, size, tmp_path, other := tmp_path / f"loaded-{size}", path)
        assert whole(other) == expected
    with tierstore.open(plain := tmp_path / "plain", **SMALL) as store:
        for name in TABLES:
            store.create_table(config_of(name))
        dcp.load({"tables": checkpoint.rows(store)}, checkpoint_id=path)
        store.commit()
        dcp.save({"tables": checkpoint.rows(store)}, checkpoint_id=tmp_path / "again")
    assert whole(plain) == expected
    run(load, 2, tmp_path, last := tmp_path / "last", tmp_path / "again")
    assert whole(last) == expected
