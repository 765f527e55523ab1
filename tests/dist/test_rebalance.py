"""Rows that move to other ranks while the store is open: the bits are those of a run in which none did."""

import contextlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tierstore
from tierstore import optim
from tierstore.cli import entry as cli
from tierstore.dist import Plan, ShardedStore, ShardedTieredEmbeddingBagCollection, Sharding, open_sharded
from tierstore.dist import rebalance as dist_rebalance
from tierstore.dist.lookup import RowsLookup
from tierstore.dist.parts import read_commits
from tierstore.errors import ReadOnlyError, TableError
from tierstore.exchange.rows import read_rows
from tierstore.ids import DynamicIds
from tierstore.system import killpoints
from tierstore.updates import apply_update, write_update

from .ranks import DIED, run

ROWS = 301
SMALL: dict[str, Any] = {"ddr": "2MiB", "threads": 1}
CONFIGS = [
    tierstore.TableConfig(name=name, num_embeddings=ROWS, embedding_dim=12, init=tierstore.init.Normal(), **options)
    for name, options in {
        "a": {"optimizer": optim.Adam(lr=0.1)},
        "b": {"optimizer": optim.RowWiseAdagrad(lr=0.1)},
        "c": {"optimizer": optim.Adam(lr=0.1), "dtype": "bfloat16"},
        "d": {"optimizer": optim.SGD(lr=0.1)},
        "e": {"optimizer": optim.SGD(lr=0.1)},
    }.items()
]  # fmt: skip
FIXED = {"d": Sharding("data_parallel", (0, 1)), "e": Sharding("column_wise", (0, 1))}
BEFORE = Plan(2, FIXED | {
    "a": Sharding("row_wise", (0, 1)), "b": Sharding("table_wise", (0,), "pooled"),
    "c": Sharding("table_wise", (1,)),
})  # fmt: skip
AFTER = Plan(2, {
    "a": Sharding("table_wise", (1,)), "b": Sharding("row_wise", (1, 0), "pooled"),
    "c": Sharding("table_row_wise", (1, 0)),
})  # fmt: skip


def batch(seed: int, rank: int) -> tierstore.KeyedJaggedTensor:
    """Of one id a bag where owners pool: sums of several depend on who owns them."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    lengths = torch.tensor([1 if each.name == "b" else 3 for each in CONFIGS]).repeat_interleave(12)
    ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
    return tierstore.KeyedJaggedTensor([each.name for each in CONFIGS], ids, lengths=lengths)


class Job:
    """A store with a module and, if gradients are collected, an optimizer that stay while rows move."""

    def __init__(self, store: ShardedStore, *, collected: bool = False) -> None:
        dist_rebalance.CHUNK_BYTES = 1 << 12  # type: ignore[misc]
        self.store = store
        for config in CONFIGS:
            store.create_table(config)
        self.module = ShardedTieredEmbeddingBagCollection(store)
        self.optimizer = store.optimizer() if collected else None

    def train(self, step: int) -> None:
        given = [batch(step, self.store.ranks.rank)]
        for each in tierstore.prefetch(given, self.module) if step % 2 else given:
            self.module(each).values().square().sum().backward()
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def shardings(self) -> dict[str, Sharding]:
        return {name: table.sharding for name, table in self.store.tables.items()}


def opened(folder: Path, **options: Any) -> ShardedStore:
    return open_sharded(folder, plan=BEFORE, **SMALL | options)


def train(folder: Path, plans: list[Plan | None], options: dict[str, Any], collected: bool) -> Any:
    """A step and a commit for each plan, which says where rows are to go with the commit, if anywhere."""
    with opened(folder, **options) as store:
        job = Job(store, collected=collected)
        for plan in plans:
            step = store.extra.get("steps", 0)
            job.train(step)
            extra = {"steps": step + 1}
            store.commit(extra=extra) if plan is None else store.rebalance(plan, extra=extra)
        return job.shardings(), [load.num_rows for load in store.balance()]


def contents(source: Path | Any, **options: Any) -> dict[str, tuple[bytes, bytes]]:
    """Bits of each table's rows and optimizer state, as one process reads them."""
    opened = tierstore.open(source, mode="r", **SMALL | options) if isinstance(source, Path) else None
    with contextlib.nullcontext(source) if opened is None else opened as store:
        rows = {each.name: read_rows(store[each.name], 0, ROWS) for each in CONFIGS}
        return {name: (each.weights.tobytes(), each.state.tobytes()) for name, each in rows.items()}


@pytest.fixture(scope="module")
def still(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[bytes, bytes]]]:
    """What tables hold after each number of steps."""
    folder = tmp_path_factory.mktemp("still")
    run(train, 2, folder, folder / "store", [None] * 5, {"keep": 9}, False)
    return [{}, *(contents(folder / "store", version=version) for version in range(1, 6))]


@pytest.mark.parametrize(("options", "collected"), [({}, False), ({"ddr": "600KiB"}, True), ({"hbm": "100%"}, True)])
def test_rows_that_move_have_the_bits_of_rows_that_stay(
    options: dict[str, Any], collected: bool, tmp_path: Path, still: list[Any]
) -> None:
    found = run(train, 2, tmp_path, tmp_path / "store", [None, AFTER, BEFORE, AFTER, None], options, collected)
    assert contents(tmp_path / "store") == still[5]
    rows = [150 + 150 + 2 * ROWS, ROWS + 151 + 151 + 2 * ROWS]
    assert found == [(FIXED | AFTER.tables, rows)] * 2


def die_in_rebalance(folder: Path, dying: int, point: str) -> None:
    with opened(folder) as store:
        job = Job(store)
        job.train(2)
        if store.ranks.rank == dying:
            killpoints.hook = lambda name: os._exit(DIED) if name == point else None
        with pytest.raises(RuntimeError):
            store.rebalance(BEFORE, extra={"steps": 3})


@pytest.mark.parametrize(
    ("point", "dying"),
    [("rebalance: rows written", 1), ("commit: rows frozen", 1), ("commit: durable", 0), ("commit: durable", 1)],
)
def test_ranks_that_are_killed_have_all_rows_at_old_or_all_at_new_owners(
    point: str, dying: int, tmp_path: Path, still: list[Any]
) -> None:
    """With what rows were before at the ranks that they go back to."""
    store = tmp_path / "store"
    run(train, 2, tmp_path, store, [None, AFTER], {}, False)
    run(die_in_rebalance, 2, tmp_path, store, dying, point, statuses=[DIED, 0] if not dying else [0, DIED])
    with tierstore.open(store, mode="r", **SMALL) as reader:
        steps = reader.extra["steps"]
        assert steps in ((2,) if "durable" not in point else (2, 3))
        assert contents(reader) == still[steps]
    owners, copy = (AFTER if steps == 2 else BEFORE).tables, tmp_path / "copy"
    assert cli.main(["reshard", str(store), str(copy), "--ranks", "2"]) == 0
    assert contents(copy) == still[steps]
    assert read_commits(copy / "0-of-2").shardings["a"] == owners["a"].to_json()
    found = run(train, 2, tmp_path, store, [None] * (5 - steps), {}, False)
    assert [each[0] for each in found] == [FIXED | owners] * 2
    assert contents(store) == still[5]


def go_back(folder: Path) -> list[Any]:
    """Two moves are undone, then the steps made again."""
    with opened(folder, keep=9) as store:
        job, numbers, found = Job(store), [], []
        for step, plan in enumerate([BEFORE, AFTER, BEFORE, AFTER]):
            job.train(step)
            numbers.append(store.rebalance(plan, extra={"steps": step + 1}))
        for number in (numbers[2], numbers[1]):
            store.rollback(number)
            found.append((job.shardings(), len(store["a"].local.rows)))
        for step in (2, 3, 4):
            job.train(step)
            store.commit()
        return found


def test_rollback_brings_the_owners_of_its_commit_back(tmp_path: Path, still: list[Any]) -> None:
    found, before, after = run(go_back, 2, tmp_path, tmp_path / "store"), FIXED | BEFORE.tables, FIXED | AFTER.tables
    assert found == [[(before, 151), (after, 1)], [(before, 150), (after, ROWS)]]
    assert contents(tmp_path / "store") == still[5]


def test_a_reader_goes_by_the_owners_of_the_version_that_it_shows(tmp_path: Path, still: list[Any]) -> None:
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
        assert contents(store) == still[5]
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
    folder, replica = tmp_path / "store", tmp_path / "replica"
    since = 0
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
        store.create_table(replace(CONFIGS[0], name="ids", ids=DynamicIds()))

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
        out = job.module(batch(1, rank)).values()
        refused("rows are in use")
        out.square().sum().backward()
        with contextlib.closing(tierstore.prefetch([batch(9, rank)] * 3, job.module)) as given:
            next(iter(given))
            refused("prefetch pass")
        optimizer = store.optimizer()
        job.module(batch(2, rank)).values().square().sum().backward()
        refused(r"step\(\) and zero_grad")
        optimizer.step()
        optimizer.zero_grad()
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
                job.module(batch(5, rank))
        ahead, last = job.module.ahead(), batch(4, rank)
        ahead.prepare(last)
        ahead.end()
        store.rebalance(AFTER)
        with pytest.raises(RuntimeError, match="look the batch up again"):
            job.module(last)
    with open_sharded(folder, mode="r", **SMALL) as store, pytest.raises(ReadOnlyError):
        store.rebalance(BEFORE)


def test_what_cannot_move_is_refused_with_the_way_out(tmp_path: Path, still: list[Any]) -> None:
    run(refuse, 2, tmp_path, tmp_path / "store")
    assert contents(tmp_path / "store") == still[3]
