"""Commits of a sharded store: one version of all ranks, whoever ends when; the bits are those of a run in which nothing
failed or was killed."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tierstore
from tierstore.dist import ShardedTieredEmbeddingBagCollection, open_sharded
from tierstore.dist.parts import Commits, in_common
from tierstore.errors import ClosedError, DiskFullError, RankError, StoreReplacedError, TableError, TierstoreError
from tierstore.system import killpoints

from .ranks import DIED, run
from .stores import CONFIGS, ROWS, SMALL, Bits, Job, batch, contents, opened, train


@pytest.fixture(scope="module")
def still(tmp_path_factory: pytest.TempPathFactory) -> list[Bits]:
    """What tables hold after each number of steps."""
    folder = tmp_path_factory.mktemp("still")
    run(train, 2, folder, folder / "store", 5, 9)
    return [{}, *(contents(folder / "store", version=version) for version in range(1, 6))]


def no_room(**_: Any) -> int:
    raise DiskFullError("no room left")


def die(folder: Path, dying: int, point: str) -> None:
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
    run(die, 2, tmp_path, store, dying, point, statuses=[DIED, 0] if not dying else [0, DIED])
    if point == "commit: transaction committed":  # readers see it, until ranks go back from what is not durable
        run(train, 2, tmp_path, store, 0)
    with tierstore.open(store, mode="r", **SMALL) as reader:
        steps = reader.extra["steps"]
        assert steps in ((2, 3) if "durable" in point else (2,))
        assert contents(reader) == still[steps]
    run(train, 2, tmp_path, store, 5 - steps)
    assert contents(store) == still[5]


def go_back(folder: Path, dying: int | None) -> None:
    """To the second of four commits, on with the steps; or a rank ends itself on the way back to the first."""
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


def open_refused(folder: Path) -> str:
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
    assert all("rank 1 has none at all" in told for told in run(open_refused, 2, tmp_path, one))
    shutil.rmtree(one / "1-of-2")
    (other / "1-of-2").rename(one / "1-of-2")
    with tierstore.open(one, mode="r", **SMALL) as whole:
        assert (whole.version, contents(whole)) == (1, still[1])
    run(train, 2, tmp_path, one)
    assert contents(one) == still[2]
    run(train, 2, tmp_path, tmp_path / "third")
    shutil.rmtree(one / "1-of-2")
    (tmp_path / "third" / "1-of-2").rename(one / "1-of-2")
    assert all("of 2 different runs" in told for told in run(open_refused, 2, tmp_path, one))


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
