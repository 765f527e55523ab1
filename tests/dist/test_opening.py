"""Whose parts ranks open: nothing is lost by a kill, a second run, exchanged parts or another number of ranks."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tierstore
from tierstore.cli import entry as cli
from tierstore.dist import ShardedTieredEmbeddingBagCollection, open_sharded, reshard
from tierstore.dist.parts import SECTION, Commits, in_common
from tierstore.errors import (
    ClosedError,
    DiskFullError,
    RankError,
    ReadOnlyError,
    StoreLockedError,
    StoreNotFoundError,
    StoreReplacedError,
    TableError,
    TierstoreError,
)
from tierstore.system import killpoints

from .ranks import DIED, run
from .stores import CONFIGS, ROWS, SMALL, Bits, Job, batch, contents, opened, train


def step_of(folder: Path, expected: Bits | None = None) -> int:
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


@pytest.fixture(scope="module")
def still(tmp_path_factory: pytest.TempPathFactory) -> list[Bits]:
    folder = tmp_path_factory.mktemp("still")
    run(train, 2, folder, folder / "store", 5, 9)
    return [{}, *(contents(folder / "store", version=version) for version in range(1, 6))]


def no_room(**_: Any) -> int:
    raise DiskFullError("no room left")


def die_of(folder: Path, dying: int, point: str) -> None:
    """In the third step's commit, which one rank first has no room for."""
    with opened(folder) as store:
        job, is_dying = Job(store), store.ranks.rank == dying
        job.train(2)
        with pytest.MonkeyPatch.context() as patch:
            if is_dying:
                patch.setattr(store.local, "commit", no_room)
            with pytest.raises((RuntimeError, DiskFullError)):
                store.commit(extra={"steps": 2.5})
        if is_dying:
            killpoints.hook = lambda name: os._exit(DIED) if name == point else None
        with pytest.raises(RuntimeError):
            store.commit(extra={"steps": 3})


@pytest.mark.parametrize(
    ("point", "dying"),
    [
        ("commit: rows frozen", 1), ("commit: transaction committed", 0), ("commit: durable", 0),
        ("commit: durable", 1),
    ],
)  # fmt: skip
def test_ranks_that_are_killed_are_all_at_the_last_commit_or_all_at_the_new_one(point, dying, tmp_path, still):
    store = tmp_path / "store"
    run(train, 2, tmp_path, store, 2)
    run(die_of, 2, tmp_path, store, dying, point, statuses=[DIED, 0] if not dying else [0, DIED])
    if point == "commit: transaction committed":  # readers see it, until ranks go back from what is not durable
        run(train, 2, tmp_path, store, 0)
    with tierstore.open(store, mode="r", **SMALL) as reader:
        steps = reader.extra["steps"]
        assert steps in ((2, 3) if "durable" in point else (2,))
        assert contents(reader) == still[steps]
    run(train, 2, tmp_path, store, 5 - steps)
    assert contents(store) == still[5]


def go_back(folder: Path, dying: int | None) -> None:
    with opened(folder, keep=9) as store:
        assert "a" not in store
        job, numbers = Job(store), []
        with pytest.raises(TableError, match="only a part here"):
            tierstore.TieredEmbeddingBag(store.local["a"])(torch.arange(2), torch.tensor([0]))
        for step in range(4):
            job.train(step)
            numbers.append(store.commit(extra={"steps": step + 1}))
        assert store.versions[-4:] == tuple(numbers)
        job.train(4)
        with pytest.raises(ValueError, match=r"version=99 is not kept by all ranks, but .*\d\. Open with keep=N"):
            store.rollback(99)
        with pytest.raises(RankError, match="different calls"):
            store.rollback(numbers[store.ranks.rank])
        if dying is not None:
            if store.ranks.rank == dying:
                killpoints.hook = lambda name: os._exit(DIED) if name == "rollback: head put" else None
            with pytest.raises(RuntimeError):
                store.rollback(numbers[0])
            return
        for place in (2, 1):
            store.rollback(numbers[place])
            assert (store.version, store.extra) == (numbers[place], {"steps": place + 1})
            assert store.versions[-place - 1 :] == tuple(numbers[: place + 1])
        for step in (2, 3, 4):
            job.train(step)
            assert store.commit(extra={"steps": step + 1}) > numbers[-1]


def go_back_to_other_owners(folder: Path) -> None:
    """Those that a commit names, as if rows had moved since; ranks then open that commit."""
    with opened(folder, keep=9) as store:
        number, table = store.version, store["c"]
        with tierstore.open(folder, mode="r", **SMALL) as reader:
            table.sharding = table.sharding._replace(ranks=(0,))
            store.commit()
            store.ranks.gather(number, "all have committed")
            with pytest.raises(StoreReplacedError, match="other owners now; open the store again"):
                reader.refresh()
        with pytest.raises(ClosedError, match=f"other owners in commit {number}: open the store again"):
            store.rollback(number)
        with pytest.raises(ClosedError):
            store.commit()


def test_ranks_go_back_to_a_commit_and_on_to_the_same_bits(tmp_path, still):
    run(go_back, 2, tmp_path, tmp_path / "store", None)
    assert contents(tmp_path / "store") == still[5]
    run(go_back_to_other_owners, 2, tmp_path, tmp_path / "store")
    run(train, 2, tmp_path, tmp_path / "store", 0)
    assert contents(tmp_path / "store") == still[5]
    run(go_back, 2, tmp_path, tmp_path / "killed", 1, statuses=[0, DIED])
    run(train, 2, tmp_path, tmp_path / "killed", 0)
    assert contents(tmp_path / "killed") == still[1]


def open_is_refused(folder: Path) -> str:
    with pytest.raises((TierstoreError, RuntimeError)) as raised:
        opened(folder)
    return str(raised.value)


def test_ranks_pair_by_the_commit_and_not_by_its_number_and_those_of_other_runs_not_at_all(tmp_path, still):
    """Ranks' parts that went on from one commit each for itself have its number in common, and no later one."""
    one, other = tmp_path / "one", tmp_path / "other"
    run(train, 2, tmp_path, one)
    shutil.copytree(one, other)
    for folder in (one, other):
        run(train, 2, tmp_path, folder)
    (one / "1-of-2").rename(tmp_path / "kept")
    assert all("rank 1 has none at all" in told for told in run(open_is_refused, 2, tmp_path, one))
    shutil.rmtree(one / "1-of-2")
    (other / "1-of-2").rename(one / "1-of-2")
    with tierstore.open(one, mode="r", **SMALL) as whole:
        assert (whole.version, contents(whole)) == (1, still[1])
    run(train, 2, tmp_path, one)
    assert contents(one) == still[2]
    run(train, 2, tmp_path, tmp_path / "third")
    shutil.rmtree(one / "1-of-2")
    (tmp_path / "third" / "1-of-2").rename(one / "1-of-2")
    assert all("of 2 different runs" in told for told in run(open_is_refused, 2, tmp_path, one))


def test_commits_of_earlier_releases_pair_by_number():
    """They have no identities; one that has none is not one that has."""
    old, new = ({"run": "r", "number": 2, "versions": {"1": 1}, "shardings": {}} for _ in range(2))
    assert in_common([Commits.read(old, 2), Commits.read(old, 3)]) == [1, 2]
    assert in_common([Commits.read(old, 2), Commits.read(new | {"ids": {"2": "some"}}, 2)]) == [1]


def train_differently() -> list[str]:
    """Opens, steps and commits of ranks that differ in what they train by. What each rank was told."""
    told, rank = [], dist.get_rank()

    @contextlib.contextmanager
    def raising(kind: type[Exception]) -> Iterator[None]:
        with pytest.raises(kind) as raised:
            yield
        told.append(str(raised.value))

    with raising(ValueError):
        open_sharded(None, group=dist.new_group(backend="cuda:gloo"), cold="memory", ddr="1MiB")
    with raising(ValueError):
        open_sharded(None, cold="memory", ddr="500KiB", backward_precision="bf16" if rank else "fp32")
    with open_sharded(None, cold="memory", ddr="500KiB", threads=1) as store:
        copied = store.create_table(CONFIGS["d"], sharding_type="data_parallel").local
        module = ShardedTieredEmbeddingBagCollection(store)
        optimizer, before = store.optimizer(), copied.read(torch.arange(ROWS))
        (group,) = optimizer.param_groups
        group["lr"] = 0.5 if rank else 0.1  # as a scheduler does that goes by each rank's own loss
        module(batch(0, rank, ["d"])).values().sum().backward()
        with raising(RankError):
            optimizer.step()
        assert torch.equal(copied.read(torch.arange(ROWS)), before)
        with raising(TableError):
            store.commit()
        group["lr"] = 0.1
        optimizer.step()
        assert store.commit() == 1
        if rank:
            copied.next_hyper()  # as if a step had been skipped elsewhere
        with raising(TableError):
            store.commit()
        assert store.version == 1
    return told


def test_ranks_that_train_differently_are_told(tmp_path):
    one, other = run(train_differently, 2, tmp_path)
    assert one == other
    wanted = "cpu:gloo,cuda:nccl", "precision", "rate 0.1; rank 1: backward of d, ", "rate is 0.1 and 0.5", "updates"
    assert all(words in told for words, told in zip(wanted, one, strict=True))
