"""Whose parts ranks open: nothing is lost by a kill, a second run, exchanged parts or another number of ranks."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tierstore
from tierstore.cli import entry as cli
from tierstore.dist import reshard
from tierstore.dist.parts import SECTION
from tierstore.errors import ReadOnlyError, StoreLockedError, StoreNotFoundError, StoreReplacedError, TierstoreError
from tierstore.system import killpoints

from .ranks import DIED, run
from .stores import CONFIGS, SMALL, Bits, contents, opened, train


def step_of(folder: Path, expected: Bits | None = None) -> int:
    """That a store is at; the bits of whose rows are as expected."""
    with tierstore.open(folder, mode="r", **SMALL) as store:
        assert expected is None or contents(store) == expected
        step: int = store.extra["steps"]
        return step


def refused(work: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    try:
        work(*arguments, **options)
    except (TierstoreError, ValueError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def open_refused(folder: Path, mode: str = "w") -> str:
    return refused(lambda: opened(folder, mode=mode).close())


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file but locks and anchors, which an open for writing renews."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    kept = (path for path in files if not path.name.endswith(("lock", ".anchor")))
    return {str(path.relative_to(folder)): path.read_bytes() for path in kept}


def train_in(size: int, folder: Path, steps: int) -> None:
    run(train, size, folder.parent, folder, steps)


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
def test_ranks_killed_while_they_reshard_lose_nothing(point, rank, folder, tmp_path):
    before = contents(folder)
    with pytest.raises(AssertionError, match=str(DIED)):
        run(die, 3, tmp_path, folder, point, rank)
    for step, size in ((1, 3), (2, 2)):  # the new number goes on, then the old one, from its work
        assert step_of(folder, before) == step
        train_in(size, folder, 0)
        assert step_of(folder, before) == step
        train_in(size, folder, 1)
        before = contents(folder)
    assert step_of(folder) == 3
    assert step_of(folder / "replaced-at-1") == 1


def test_numbers_of_ranks_that_change_keep_every_set_of_parts(folder):
    before = contents(folder)
    with tierstore.open(folder, mode="r", **SMALL) as reader:
        for size, more in ((3, 1), (2, 0), (3, 0), (2, 1)):
            train_in(size, folder, more)
        with pytest.raises(StoreReplacedError):
            reader.refresh()
    steps = {"replaced-at-1": 1, "replaced-at-2": 2, "replaced-at-2.1": 2}
    assert sorted(path.name for path in folder.iterdir()) == ["0-of-2", "1-of-2", *sorted(steps)]
    assert {name: step_of(folder / name) for name in steps} == steps
    assert step_of(folder / "replaced-at-1", before) == 1
    train_in(2, folder / "replaced-at-1", 1)
    assert step_of(folder / "replaced-at-1") == 2


def test_a_newer_set_that_lacks_a_part_is_not_passed_over_for_an_older_one(folder, tmp_path):
    train_in(3, folder, 2)
    (folder / "1-of-3").rename(tmp_path / "lost")
    for part in (folder / "replaced-at-1").iterdir():
        part.rename(folder / part.name)
    before = files_of(folder)
    for size in (1, 2):
        assert all("1-of-3 is missing" in told for told in run(open_refused, size, tmp_path, folder))
    assert "1-of-3 is missing" in refused(step_of, folder)
    assert files_of(folder) == before
    (tmp_path / "lost").rename(folder / "1-of-3")
    train_in(2, folder, 0)
    assert step_of(folder) == 3


def test_another_number_of_ranks_is_refused_while_a_part_is_open_for_writing(folder, tmp_path):
    with tierstore.open(folder / "1-of-2", keep=2, **SMALL):
        before = files_of(folder)
        for told in run(open_refused, 3, tmp_path, folder):
            assert told.startswith(StoreLockedError.__name__)
            assert all(words in told for words in (f"process {os.getpid()}", "a part of 2 ranks", "1-of-2"))
        assert files_of(folder) == before
    train_in(3, folder, 0)
    assert step_of(folder) == 1


def read_only(folder: Path) -> list[str]:
    """What a rank that may only read finds, and is told of what it may not."""
    with opened(folder, mode="r") as store:
        assert store.readonly
        assert store.version == store.extra["steps"] == 1
        assert store.create_table(CONFIGS["a"]) is store["a"]
        calls = (
            store.commit,
            store.optimizer,
            lambda: store.create_table(tierstore.TableConfig(name="new", num_embeddings=1, embedding_dim=4)),
        )
        return [refused(call) for call in calls]


def test_ranks_that_only_read_do_so_beside_a_run_and_change_nothing(folder, tmp_path):
    with tierstore.open(folder / "0-of-2", keep=3, **SMALL) as store:  # one rank is ahead of the others
        extra = store.extra
        extra[SECTION] |= {"number": 2, "versions": extra[SECTION]["versions"] | {"1": store.version}}
        store.commit(extra=extra)
        before = files_of(folder)
        for told in run(read_only, 2, tmp_path, folder):
            assert [each.split(":")[0] for each in told] == [ReadOnlyError.__name__] * 3
        for told in run(open_refused, 3, tmp_path, folder, "r"):
            assert told.startswith(StoreNotFoundError.__name__)
            assert "start 2, or read whole tables in each process by tierstore.open" in told
        assert files_of(folder) == before
    assert StoreNotFoundError.__name__ in run(open_refused, 1, tmp_path, tmp_path / "nothing", "r")[0]


def swap(folder: Path) -> None:
    for before, after in (("0-of-2", "x"), ("1-of-2", "0-of-2"), ("x", "1-of-2")):
        (folder / before).rename(folder / after)


def back_up(folder: Path) -> None:
    with tierstore.open(folder / "0-of-2", mode="r") as store:
        store.backup(folder / "kept")
    (folder / "1-of-2").rename(folder.with_name("lost"))
    (folder / "kept").rename(folder / "1-of-2")


@pytest.mark.parametrize("spoil", [swap, back_up])
def test_parts_in_each_others_place_are_refused_by_all_that_open_them(spoil, folder, tmp_path, capsys):
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


@pytest.mark.parametrize("words", [["--ranks", "3"], ["--plain"]])
def test_the_command_that_was_killed_can_be_called_again(words, folder, tmp_path):
    target, expected = tmp_path / "new", contents(folder)
    run(die_in_command, 1, tmp_path, folder, target, 3 * (words != ["--plain"]), statuses=[DIED])
    assert list(target.glob("*.partial"))
    before = files_of(target)
    told = run(open_refused, 3, tmp_path, target) if words != ["--plain"] else [refused(step_of, target)]
    assert all("cut short" in each for each in told)
    assert files_of(target) == before
    assert cli.main(["reshard", str(folder), str(target), *words]) == 0
    assert step_of(target, expected) == 1
    assert not list(target.glob("*.partial"))


def die_in_command(folder: Path, target: Path, num_ranks: int) -> None:
    killpoints.hook = lambda name: os._exit(DIED) if name == "copy: rows in place" else None
    reshard.reshard(folder, target, plan=None, num_ranks=num_ranks, progress=lambda *_: None)
