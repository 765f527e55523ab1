"""Whose parts ranks open: nothing is lost by a kill, a second run, exchanged parts or another number of ranks."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tierstore
from tierstore.cli import entry as cli
from tierstore.dist import ShardedStore, open_sharded, reshard
from tierstore.dist.parts import SECTION
from tierstore.errors import (
    ReadOnlyError,
    StoreLockedError,
    StoreNotFoundError,
    StoreReplacedError,
    TierstoreError,
)
from tierstore.system import killpoints

from .ranks import DIED, run

ROWS, DIM = 40, 6
TABLES = {"a": "row_wise", "b": "column_wise", "c": "table_wise"}


def config_of(name: str, **changes: Any) -> tierstore.TableConfig:
    return tierstore.TableConfig(name=name, num_embeddings=ROWS, embedding_dim=DIM, **changes)


def values_of(step: int) -> torch.Tensor:
    """Of every table, after a step."""
    return torch.arange(ROWS * DIM, dtype=torch.float32).reshape(ROWS, DIM) + 1000 * step


def opened(folder: Path, **options: Any) -> ShardedStore:
    return open_sharded(folder, ddr="1MiB", threads=1, **options)


def own_values(table: Any, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and values of the rows that this rank owns, after a step."""
    rows, columns = table.rows, table.columns
    values = values_of(step)[rows.start : rows.stop, columns.start : columns.stop]
    return torch.arange(rows.start, rows.stop), values.contiguous()


def train(folder: Path, steps: int) -> int:
    """So many commits; the step at the start."""
    with opened(folder) as store:
        first: int = store.extra.get("step", 0)
        for name, kind in TABLES.items():
            if name not in store.tables:
                store.create_table(config_of(name), sharding_type=kind)  # type: ignore[arg-type]
        for step in range(first + 1, first + 1 + steps):
            for table in store.tables.values():
                if table.rows:
                    table.local.write(*own_values(table, step))
            store.commit(extra={"step": step})
        return first


def step_of(folder: Path, version: int | None = None) -> int:
    """That a store is at, each row of which must be of it."""
    with tierstore.open(folder, mode="r", version=version, ddr="1MiB", threads=1) as store:
        step: int = store.extra["step"]
        assert sorted(store.tables) == sorted(TABLES)
        for table in store.tables.values():
            assert torch.equal(table.read(torch.arange(ROWS)), values_of(step))
        return step


def refused(work: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    try:
        work(*arguments, **options)
    except (TierstoreError, ValueError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def open_refused(folder: Path, mode: str = "w", **options: Any) -> str:
    return refused(lambda: opened(folder, mode=mode, **options).close())


def contents(folder: Path) -> dict[str, bytes]:
    """Every file but locks and anchors, which an open for writing renews."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    kept = (path for path in files if not path.name.endswith(("lock", ".anchor")))
    return {str(path.relative_to(folder)): path.read_bytes() for path in kept}


def parts_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of two ranks with three commits."""
    folder = tmp_path_factory.mktemp("trained") / "store"
    run(train, 2, folder.parent, folder, 3)
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "store"))


# Kills


def die(folder: Path, point: str, rank: int) -> None:
    """Open as so many ranks, one or, with -1, all of which end at a named step."""
    if rank in (-1, torch.distributed.get_rank()):
        killpoints.hook = lambda name: os._exit(DIED) if name == point else None
    try:
        opened(folder).close()
    except RuntimeError:
        os._exit(DIED)


@pytest.mark.parametrize(
    ("point", "rank"),
    [
        ("commit: transaction committed", -1),
        ("copy: manifest in place", 0),
        ("reshard: replaced part set aside", -1),  # by whichever ranks hold the parts
    ],
)
def test_ranks_killed_while_they_reshard_lose_nothing(point: str, rank: int, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=str(DIED)):
        run(die, 3, tmp_path, folder, point, rank)
    assert step_of(folder) == 3
    for size in (3, 2):  # the new number goes on, then the old one, from its work
        before = step_of(folder)
        assert run(train, size, tmp_path, folder, 1) == [before] * size
        assert step_of(folder) == before + 1
    assert step_of(folder / "replaced-at-3") == 3


def test_numbers_of_ranks_that_change_keep_every_set_of_parts(folder: Path, tmp_path: Path) -> None:
    steps = {"replaced-at-3": 3, "replaced-at-4": 4, "replaced-at-4.1": 4}
    with tierstore.open(folder, mode="r", ddr="1MiB") as reader:
        for size, more in ((3, 1), (2, 0), (3, 0), (2, 1)):
            run(train, size, tmp_path, folder, more)
        with pytest.raises(StoreReplacedError):
            reader.refresh()
    assert parts_of(folder) == ["0-of-2", "1-of-2", *sorted(steps)]
    assert {name: step_of(folder / name) for name in steps} == steps
    assert step_of(folder / "replaced-at-3", version=2) == 2, "older versions are there too"
    assert run(train, 2, tmp_path, folder / "replaced-at-3", 1) == [3, 3]


def test_a_newer_set_that_lacks_a_part_is_not_passed_over_for_an_older_one(folder: Path, tmp_path: Path) -> None:
    run(train, 3, tmp_path, folder, 2)
    (folder / "1-of-3").rename(tmp_path / "lost")
    for part in (folder / "replaced-at-3").iterdir():
        part.rename(folder / part.name)
    before = contents(folder)
    for size in (1, 2):
        assert all("1-of-3 is missing" in told for told in run(open_refused, size, tmp_path, folder))
    assert "1-of-3 is missing" in refused(step_of, folder)
    assert contents(folder) == before
    (tmp_path / "lost").rename(folder / "1-of-3")
    assert run(train, 2, tmp_path, folder, 0) == [5, 5]


# Other runs


def test_another_number_of_ranks_is_refused_while_a_part_is_open_for_writing(folder: Path, tmp_path: Path) -> None:
    with tierstore.open(folder / "1-of-2", keep=2, ddr="1MiB"):
        before = contents(folder)
        for told in run(open_refused, 3, tmp_path, folder):
            assert told.startswith(StoreLockedError.__name__)
            assert all(words in told for words in (f"process {os.getpid()}", "a part of 2 ranks", "1-of-2"))
        assert contents(folder) == before
    assert run(train, 3, tmp_path, folder, 0) == [3] * 3


def read_only(folder: Path) -> list[str]:
    """What a rank that may only read finds, and is told of what it may not."""
    with opened(folder, mode="r") as store:
        assert store.readonly
        assert store.version == store.extra["step"] == 3
        for name in TABLES:
            table = store.create_table(config_of(name))
            if table.rows:
                ids, values = own_values(table, 3)
                assert torch.equal(table.local.read(ids), values)
        calls = store.commit, store.optimizer, lambda: store.create_table(config_of("new"))
        return [refused(call) for call in calls]


def test_ranks_that_only_read_do_so_beside_a_run_and_change_nothing(folder: Path, tmp_path: Path) -> None:
    with tierstore.open(folder / "0-of-2", keep=3, ddr="1MiB") as store:  # one rank is ahead of the others
        extra = store.extra
        extra[SECTION] |= {"number": 4, "versions": extra[SECTION]["versions"] | {"3": store.version}}
        store.commit(extra=extra)
        before = contents(folder)
        for told in run(read_only, 2, tmp_path, folder):
            assert [each.split(":")[0] for each in told] == [ReadOnlyError.__name__] * 3
        for told in run(open_refused, 3, tmp_path, folder, "r"):
            assert told.startswith(StoreNotFoundError.__name__)
            assert "start 2, or read whole tables in each process by tierstore.open" in told
        assert contents(folder) == before
    assert StoreNotFoundError.__name__ in run(open_refused, 1, tmp_path, tmp_path / "nothing", "r")[0]


# Whose part it is


def swap(folder: Path) -> None:
    for before, after in (("0-of-2", "x"), ("1-of-2", "0-of-2"), ("x", "1-of-2")):
        (folder / before).rename(folder / after)


def back_up(folder: Path) -> None:
    with tierstore.open(folder / "0-of-2", mode="r") as store:
        store.backup(folder / "kept")
    shutil.rmtree(folder / "1-of-2")
    (folder / "kept").rename(folder / "1-of-2")


@pytest.mark.parametrize("spoil", [swap, back_up])
def test_parts_in_each_others_place_are_refused_by_all_that_open_them(
    spoil: Callable[[Path], None], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(folder)
    told = [refused(step_of, folder)]
    for words in (["inspect"], ["verify"], ["reshard"], ["export"]):
        target = [str(tmp_path / "out")] if words[0] in ("reshard", "export") else []
        assert cli.main([*words, str(folder), *target]) == 1
        told.append(capsys.readouterr().err)
    for size in (2, 3):
        told += [each for each in run(open_refused, size, tmp_path, folder) if "RankError" not in each]
    assert all("1-of-2 holds the part 0-of-2" in each or "0-of-2 holds the part 1-of-2" in each for each in told)
    assert len(told) >= 7


# Interruptions


@pytest.mark.parametrize("words", [["--ranks", "3"], ["--plain"]])
def test_the_command_that_was_killed_can_be_called_again(words: list[str], folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "new"
    run(die_in_command, 1, tmp_path, folder, target, 3 * (words != ["--plain"]), statuses=[DIED])
    assert list(target.glob("*.partial"))
    before = contents(target)
    told = run(open_refused, 3, tmp_path, target) if words != ["--plain"] else [refused(step_of, target)]
    assert all("cut short" in each for each in told)
    assert contents(target) == before
    assert cli.main(["reshard", str(folder), str(target), *words]) == 0
    assert step_of(target) == 3
    assert not list(target.glob("*.partial"))


def die_in_command(folder: Path, target: Path, num_ranks: int) -> None:
    killpoints.hook = lambda name: os._exit(DIED) if name == "copy: rows in place" else None
    reshard.reshard(folder, target, plan=None, num_ranks=num_ranks, progress=lambda *_: None)
