"""Rows that move to other ranks while the store is open: the bits are those of a run in which none did."""

import contextlib
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import tierstore
from tierstore import optim
from tierstore.cli import entry as cli
from tierstore.dist import Plan, ShardedStore, ShardedTieredEmbeddingBagCollection, Sharding, open_sharded
from tierstore.dist import rebalance as dist_rebalance
from tierstore.errors import ReadOnlyError, TableError
from tierstore.exchange.rows import read_rows
from tierstore.ids import DynamicIds
from tierstore.system import killpoints
from tierstore.updates import apply_update, write_update

from .ranks import DIED, run

ROWS = 301
SMALL: dict[str, Any] = {"ddr": "2MiB", "threads": 1}
CONFIGS = [
    tierstore.TableConfig(name=name, num_embeddings=ROWS, init=tierstore.init.Normal(), **options)
    for name, options in {
        "a": {"embedding_dim": 12, "optimizer": optim.Adam(lr=0.1)},
        "b": {"embedding_dim": 12, "optimizer": optim.RowWiseAdagrad(lr=0.1)},
        "c": {"embedding_dim": 6, "optimizer": optim.Adam(lr=0.1), "dtype": "bfloat16"},
        "d": {"embedding_dim": 5, "optimizer": optim.SGD(lr=0.1)},
        "e": {"embedding_dim": 12, "optimizer": optim.SGD(lr=0.1)},
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


def train(folder: Path, plans: list[Plan | None], options: dict[str, Any], collected: bool) -> list[Any]:
    """A step and a commit for each plan, which says where rows are to go with the commit, if anywhere."""
    with opened(folder, **options) as store:
        job = Job(store, collected=collected)
        for plan in plans:
            step = store.extra.get("steps", 0)
            job.train(step)
            store.commit(extra={"steps": step + 1}) if plan is None else store.rebalance(
                plan, extra={"steps": step + 1}
            )
        return [job.shardings(), [load.num_rows for load in store.balance()]]


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
    store = tmp_path / "store"
    found = run(train, 2, tmp_path, store, [None, AFTER, BEFORE, AFTER, None], options, collected)
    half = -(-ROWS // 2)
    assert (
        found == [[FIXED | AFTER.tables, [ROWS - half + ROWS - half + 2 * ROWS + 1, ROWS + half + half + 2 * ROWS]]] * 2
    )
    assert contents(store) == still[5]
    assert [run(train, 2, tmp_path, store, [], {}, False)[rank][0] for rank in (0, 1)] == [FIXED | AFTER.tables] * 2


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
    assert cli.main(["reshard", str(store), str(tmp_path / "plain"), "--plain"]) == 0
    assert contents(tmp_path / "plain") == still[steps]
    found = run(train, 2, tmp_path, store, [None] * (5 - steps), {}, False)
    assert [each[0] for each in found] == [FIXED | (AFTER if steps == 2 else BEFORE).tables] * 2
    assert contents(store) == still[5]


def go_back(folder: Path) -> list[Any]:
    """Two moves, which both are undone, then three steps again."""
    with opened(folder, keep=9) as store:
        job, numbers = Job(store), []
        for step, plan in enumerate([BEFORE, AFTER, BEFORE, AFTER]):
            job.train(step)
            numbers.append(store.rebalance(plan, extra={"steps": step + 1}))
        found = []
        for place in (2, 1):
            store.rollback(numbers[place])
            found.append((job.shardings(), [len(table.local.rows) for table in store.tables.values()]))
        for step in (2, 3, 4):
            job.train(step)
            store.commit(extra={"steps": step + 1})
        return found


def test_rollback_brings_the_owners_of_its_commit_back(tmp_path: Path, still: list[Any]) -> None:
    found = run(go_back, 2, tmp_path, tmp_path / "store")
    assert [[each[0] for each in rank] for rank in found] == [[FIXED | plan.tables for plan in (BEFORE, AFTER)]] * 2
    assert [[each[1][0] for each in rank] for rank in found] == [[151, 1], [150, ROWS]]
    assert contents(tmp_path / "store") == still[5]


def test_a_reader_goes_by_the_owners_of_the_version_that_it_shows(tmp_path: Path, still: list[Any]) -> None:
    folder = tmp_path / "store"
    run(train, 2, tmp_path, folder, [None], {"keep": 9}, False)
    with tierstore.open(folder, mode="r", **SMALL) as store:
        for steps, plan in zip(range(1, 5), (AFTER, BEFORE, None, AFTER), strict=True):
            assert contents(store) == still[steps]
            run(train, 2, tmp_path, folder, [plan], {"keep": 9}, False)
            newer = store.find_newer()
            assert newer is not None
            assert contents(store) == still[steps]
            assert newer.show() == steps + 1
        assert contents(store) == still[5]
    for version in range(1, 6):
        assert contents(folder, version=version) == still[version]


def reset(folder: Path, step: int) -> None:
    """Rows are written, get their first values again, and move to a rank that has these as they are."""
    with opened(folder) as store:
        Job(store)
        table, rows = store["a"].local, torch.arange(9)
        if step == 0:
            first = table.read(rows) if store.ranks.rank == 0 else torch.zeros(9, 12)
            if store.ranks.rank == 0:
                table.write(rows, first + 1)
            store.commit(tensors={"first": first})
        elif store.ranks.rank == 0:
            table.write(rows, store.tensors()["first"])
        if step:
            store.rebalance(AFTER)


def test_an_update_has_rows_that_moved_as_they_began(tmp_path: Path) -> None:
    folder, replica = tmp_path / "store", tmp_path / "replica"
    for step in (0, 1):
        run(reset, 2, tmp_path, folder, step)
        apply_update(replica, write_update(folder, tmp_path / f"update-{step}").path)
        assert [each[0] for each in contents(replica).values()] == [each[0] for each in contents(folder).values()]


def refuse(folder: Path) -> list[str]:
    """What each rank is told of what may not move, and when; then all goes on as before."""
    told = []
    with opened(folder) as store:
        ids = tierstore.TableConfig(name="ids", num_embeddings=64, embedding_dim=12, ids=DynamicIds())
        job, rank = Job(store), store.ranks.rank
        store.create_table(ids)
        job.train(0)
        store.commit(extra={"steps": 1})

        def ask(plan: Plan, **options: Any) -> None:
            with pytest.raises((TableError, ValueError, RuntimeError, TypeError)) as raised:
                store.rebalance(plan, **options)
            told.append(f"{type(raised.value).__name__}: {raised.value}")

        for name, sharding in {
            "a": Sharding("table_wise", (1,), "pooled"), "b": Sharding("data_parallel", (0, 1)),
            "e": Sharding("column_wise", (1, 0)), "ids": Sharding("row_wise", (1,)),
        }.items():  # fmt: skip
            ask(Plan(2, AFTER.tables | {name: sharding}))
        ask(Plan(3, {}))
        ask(Plan(2, {"a": Sharding("table_wise", (rank,))}))
        ask(AFTER, extra={"not": {1, 2}} if rank else {})  # when rows have moved
        job.train(1)
        store.commit(extra={"steps": 2})
        out = job.module(batch(2, rank)).values()
        ask(AFTER)
        out.square().sum().backward()
        with contextlib.closing(tierstore.prefetch([batch(9, rank)] * 3, job.module)) as given:
            next(iter(given))
            ask(AFTER)
        optimizer = store.optimizer()
        job.module(batch(3, rank)).values().square().sum().backward()
        ask(AFTER)
        optimizer.step()
        optimizer.zero_grad()
        assert store.rebalance(BEFORE) == store.version  # nothing moves
        assert job.shardings() == FIXED | BEFORE.tables | {"ids": Sharding("row_wise", (0, 1))}
        ahead, given = job.module.ahead(), batch(4, rank)
        ahead.prepare(given)
        ahead.end()
        store.rebalance(AFTER)
        with pytest.raises(RuntimeError, match="look the batch up again"):
            job.module(given)
    with open_sharded(folder, mode="r", **SMALL) as store, pytest.raises(ReadOnlyError):
        store.rebalance(BEFORE)
    return told


def test_what_cannot_move_is_refused_with_the_way_out(tmp_path: Path, still: list[Any]) -> None:
    store = tmp_path / "store"
    one, other = run(refuse, 2, tmp_path, store)
    wanted = [
        "table 'a' .*modules look it up as row_wise with .*rows.*tierstore reshard", "table 'b' .*table_wise.*reshard",
        "table 'e' .*columns.*reshard", "table 'ids' .*ids.*reshard", "plan is for 3 ranks", "plan of ranks 0 and 1",
        "rank 1 cannot take part", "rows are in use", "prefetch pass", r"step\(\) and zero_grad",
    ]  # fmt: skip
    assert all(re.search(*pair) for pair in zip(wanted, one, strict=True)), one
    assert other[6].startswith("TypeError: extra")
    assert [*other[:6], *other[7:]] == [*one[:6], *one[7:]]
    assert contents(store) == still[4]
