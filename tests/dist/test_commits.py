"""Commits of a sharded store, with rows that move to other ranks or stay: one version of all ranks, whoever ends when;
the bits are those of a run in which nothing moved, failed or was killed."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tierstore
from tierstore.cli import entry as cli
from tierstore.dist import Plan, ShardedTieredEmbeddingBagCollection, Sharding, open_sharded
from tierstore.dist.lookup import RowsLookup
from tierstore.dist.parts import Commits, in_common, read_commits
from tierstore.errors import DiskFullError, RankError, ReadOnlyError, TableError, TierstoreError
from tierstore.ids import DynamicIds
from tierstore.system import killpoints
from tierstore.updates import apply_update, write_update

from .ranks import DIED, run
from .stores import BEFORE, CONFIGS, FIXED, ROWS, SMALL, Bits, Job, batch, contents, opened, train

AFTER = Plan(2, {
    "a": Sharding("table_wise", (1,)), "b": Sharding("row_wise", (1, 0), "pooled"),
    "c": Sharding("table_row_wise", (1, 0)),
})  # fmt: skip


@pytest.fixture(scope="module")
def still(tmp_path_factory: pytest.TempPathFactory) -> list[Bits]:
    """What tables hold after each number of steps."""
    folder = tmp_path_factory.mktemp("still")
    run(train, 2, folder, folder / "store", [None] * 5, {"keep": 9}, False)
    return [{}, *(contents(folder / "store", version=version) for version in range(1, 6))]


@pytest.mark.parametrize(("options", "collected"), [({}, False), ({"ddr": "600KiB"}, True), ({"hbm": "100%"}, True)])
def test_rows_that_move_have_the_bits_of_rows_that_stay(
    options: dict[str, Any], collected: bool, tmp_path: Path, still: list[Bits]
) -> None:
    found = run(train, 2, tmp_path, tmp_path / "store", [None, AFTER, BEFORE, AFTER, None], options, collected)
    names = [name for name in CONFIGS if name != "f" or not collected]
    assert contents(tmp_path / "store") == {name: still[5][name] for name in names}
    rows = [150 + 150 + (len(names) - 3) * ROWS, ROWS + 151 + 151 + (len(names) - 3) * ROWS]
    assert found == [({name: (FIXED | AFTER.tables)[name] for name in names}, rows)] * 2


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
            store.rebalance(BEFORE, extra={"steps": 3})


@pytest.mark.parametrize(
    ("point", "dying"),
    [
        ("rebalance: rows written", 1), ("commit: rows frozen", 1), ("commit: transaction committed", 0),
        ("commit: durable", 0), ("commit: durable", 1),
    ],
)  # fmt: skip
def test_ranks_that_are_killed_have_all_rows_at_the_last_commit_or_all_at_the_new_one(
    point: str, dying: int, tmp_path: Path, still: list[Bits]
) -> None:
    """With what rows were before at the ranks that they go back to."""
    store, copy = tmp_path / "store", tmp_path / "copy"
    run(train, 2, tmp_path, store, [None, AFTER], {}, False)
    run(die, 2, tmp_path, store, dying, point, statuses=[DIED, 0] if not dying else [0, DIED])
    if point == "commit: transaction committed":  # readers see it, until ranks go back from what is not durable
        run(train, 2, tmp_path, store, [], {}, False)
    with tierstore.open(store, mode="r", **SMALL) as reader:
        steps = reader.extra["steps"]
        assert steps in ((2, 3) if "durable" in point else (2,))
        assert contents(reader) == still[steps]
    owners = (BEFORE if steps == 3 else AFTER).tables
    assert cli.main(["reshard", str(store), str(copy), "--ranks", "2"]) == 0
    assert contents(copy) == still[steps]
    assert read_commits(copy / "0-of-2").shardings["a"] == owners["a"].to_json()
    found = run(train, 2, tmp_path, store, [None] * (5 - steps), {}, False)
    assert [each[0] for each in found] == [FIXED | owners] * 2
    assert contents(store) == still[5]


def go_back(folder: Path, dying: int | None) -> list[Any]:
    """Two moves are undone, then the steps made again; or a rank ends itself on the way back to the first."""
    with opened(folder, keep=9) as store:
        assert "a" not in store
        job, numbers, found = Job(store), [], []
        for step, plan in enumerate([BEFORE, AFTER, BEFORE, AFTER]):
            job.train(step)
            numbers.append(store.rebalance(plan, extra={"steps": step + 1}))
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
            return []
        for place in (2, 1):
            store.rollback(numbers[place])
            assert (store.version, store.extra) == (numbers[place], {"steps": place + 1})
            assert store.versions[-place - 1 :] == tuple(numbers[: place + 1])
            found.append((job.shardings(), len(store["a"].local.rows)))
        for step in (2, 3, 4):
            job.train(step)
            assert store.commit() > numbers[-1]
        return found


def test_rollback_brings_the_owners_of_its_commit_back(tmp_path: Path, still: list[Bits]) -> None:
    found = run(go_back, 2, tmp_path, tmp_path / "store", None)
    before, after = FIXED | BEFORE.tables, FIXED | AFTER.tables
    assert found == [[(before, 151), (after, 1)], [(before, 150), (after, ROWS)]]
    assert contents(tmp_path / "store") == still[5]
    run(go_back, 2, tmp_path, tmp_path / "killed", 1, statuses=[0, DIED])
    run(train, 2, tmp_path, tmp_path / "killed", [], {}, False)
    assert contents(tmp_path / "killed") == still[1]


def test_a_reader_goes_by_the_owners_of_the_version_that_it_shows(tmp_path: Path, still: list[Bits]) -> None:
    folder = tmp_path / "store"
    run(train, 2, tmp_path, folder, [None], {"keep": 9}, False)
    with tierstore.open(folder, mode="r", **SMALL) as store, tierstore.open(folder, mode="r", **SMALL) as idle:
        for steps, plan in ((1, AFTER), (3, BEFORE)):
            assert contents(store) == still[steps]
            run(train, 2, tmp_path, folder, [plan, None], {"keep": 9}, False)  # trained at the new owners, too
            newer = store.find_newer()
            assert newer is not None
            assert contents(store) == still[steps]
            assert newer.show() == idle.refresh() == steps + 2
            assert contents(idle) == still[steps + 2]  # from files, the first time
    for version in range(1, 6):
        assert contents(folder, version=version) == still[version]


def reset(folder: Path, step: int) -> None:
    """Rank 0 writes rows, then their first values, and they move to a rank that has these as they are."""
    with opened(folder) as store:
        Job(store)
        tensors, local = store.tensors(), store["a"].local
        if not store.ranks.rank:
            first = tensors.setdefault("first", local.read(torch.arange(9)))
            local.write(torch.arange(9), first if step else first + 1)
        store.rebalance(AFTER if step else BEFORE, tensors=tensors)


def test_an_update_has_rows_that_moved_as_they_began(tmp_path: Path) -> None:
    folder, replica, since = tmp_path / "store", tmp_path / "replica", 0
    for step in (0, 1):
        run(reset, 2, tmp_path, folder, step)
        made = write_update(folder, tmp_path / f"update-{step}", since=since)
        assert made.header.since == since
        since = made.header.origin.version
        apply_update(replica, made.path)
        assert [each[0] for each in contents(replica).values()] == [each[0] for each in contents(folder).values()]


def refuse(folder: Path) -> None:
    """Moves of what may not move, or not now; all goes on as before."""
    with opened(folder) as store:
        job, rank = Job(store), store.ranks.rank
        store.create_table(replace(CONFIGS["a"], name="ids", ids=DynamicIds()))
        with pytest.raises(TableError, match="only a part here"):
            tierstore.TieredEmbeddingBag(store.local["a"])(torch.arange(2), torch.tensor([0]))

        def refused(told: str, plan: Plan = AFTER, **options: Any) -> None:
            with pytest.raises((TableError, ValueError, RuntimeError, TypeError), match=told):
                store.rebalance(plan, **options)

        for told, sharding in {
            "'a' .*look it up as row_wise with .*rows.*reshard": Sharding("table_wise", (1,), "pooled"),
            "'b' .*table_wise.*reshard": Sharding("data_parallel", (0, 1)),
            "'e' .*columns.*reshard": Sharding("column_wise", (1, 0)),
            "'ids' .*dynamic.*reshard": Sharding("row_wise", (1,)),
        }.items():
            refused(told, Plan(2, AFTER.tables | {told.split("'")[1]: sharding}))
        refused("plan is for 3 ranks", Plan(3, {}))
        refused("plan of ranks 0 and 1", Plan(2, {"a": Sharding("table_wise", (rank,))}))
        refused("is a set" if rank else "rank 1 cannot take part", extra={"not": {1, 2}} if rank else {})  # rows moved
        job.train(0)
        out = job.module(batch(1, rank, job.names)).values()
        refused("rows are in use")
        out.square().sum().backward()
        with contextlib.closing(tierstore.prefetch([batch(9, rank, job.names)] * 3, job.module)) as given:
            next(iter(given))
            refused("prefetch pass")
        assert store.rebalance(BEFORE) == store.version  # nothing moves
        assert job.shardings() == FIXED | BEFORE.tables | {"ids": Sharding("row_wise", (0, 1))}
        found = RowsLookup._find_route

        def overtaken(lookup: Any, ranks: Any) -> Any:
            route = found(lookup, ranks)
            store.owners.epoch += 1  # as by a rollback in another thread
            return route

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RowsLookup, "_find_route", overtaken)
            with pytest.raises(RuntimeError, match="look the batch up again"):
                job.module(batch(5, rank, job.names))
        ahead, last = job.module.ahead(), batch(4, rank, job.names)
        ahead.prepare(last)
        ahead.end()
        store.rebalance(AFTER)
        with pytest.raises(RuntimeError, match="look the batch up again"):
            job.module(last)
    with opened(folder) as store:
        job = Job(store, collected=True)
        job.module(batch(2, rank, job.names)).values().square().sum().backward()
        with pytest.raises(TableError, match=r"step\(\) and zero_grad"):
            store.rebalance(BEFORE)
    with open_sharded(folder, mode="r", **SMALL) as store, pytest.raises(ReadOnlyError):
        store.rebalance(BEFORE)


def test_what_cannot_move_is_refused_with_the_way_out(tmp_path: Path, still: list[Bits]) -> None:
    run(refuse, 2, tmp_path, tmp_path / "store")
    found = contents(tmp_path / "store")
    assert {name: found[name] for name in CONFIGS} == still[2]


def open_refused(folder: Path) -> str:
    with pytest.raises((TierstoreError, RuntimeError)) as raised:
        opened(folder)
    return str(raised.value)


def test_ranks_pair_by_the_commit_and_not_by_its_number_and_those_of_other_runs_not_at_all(
    tmp_path: Path, still: list[Bits]
) -> None:
    """Ranks' parts that went on from one commit each for itself have its number in common, and no later one."""
    one, other = tmp_path / "one", tmp_path / "other"
    run(train, 2, tmp_path, one, [None], {}, False)
    shutil.copytree(one, other)
    for folder in (one, other):
        run(train, 2, tmp_path, folder, [None], {}, False)
    (one / "1-of-2").rename(tmp_path / "kept")
    assert all("rank 1 has none at all" in told for told in run(open_refused, 2, tmp_path, one))
    shutil.rmtree(one / "1-of-2")
    (other / "1-of-2").rename(one / "1-of-2")
    with tierstore.open(one, mode="r", **SMALL) as whole:
        assert (whole.version, contents(whole)) == (1, still[1])
    run(train, 2, tmp_path, one, [None], {}, False)
    assert contents(one) == still[2]
    run(train, 2, tmp_path, tmp_path / "third", [None], {}, False)
    shutil.rmtree(one / "1-of-2")
    (tmp_path / "third" / "1-of-2").rename(one / "1-of-2")
    assert all("of 2 different runs" in told for told in run(open_refused, 2, tmp_path, one))


def test_commits_of_earlier_releases_pair_by_number() -> None:
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


def test_ranks_that_train_differently_are_told(tmp_path: Path) -> None:
    one, other = run(train_differently, 2, tmp_path)
    assert one == other
    wanted = "cpu:gloo,cuda:nccl", "precision", "rate 0.1; rank 1: backward of d, ", "rate is 0.1 and 0.5", "updates"
    assert all(words in told for words, told in zip(wanted, one, strict=True))
