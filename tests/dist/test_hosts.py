"""Hosts with disks of their own have the parts of their ranks alone; ranks that die or hang are named to the others."""

import dataclasses
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tierstore
from tests.train.runs import config_of
from tierstore.dist import Plan, ShardedTieredEmbeddingBagCollection, Sharding, open_sharded
from tierstore.train import RunConfig, Summary, train, trainer

from .ranks import DIED, run

RANKS, LOCAL = 4, 2
SHARDINGS: list[Any] = [
    *(("table_row_wise", (0, 1)), ("table_row_wise", (3, 2)), ("table_wise", (3,)), ("data_parallel", (0, 1, 2, 3))),
    *(("column_wise", (0, 2)), ("row_wise", (0, 1, 2, 3))),
]


def config(folder: Path, **changes: object) -> RunConfig:
    plan = Plan(RANKS, {f"C{number + 1}": Sharding(kind, ranks) for number, (kind, ranks) in enumerate(SHARDINGS)})
    plan.save(folder / "plan.json")
    options = {"train__batch_size": 23, "train__commit_every": 3, "train__epochs": 1} | changes
    return config_of(folder, "one", ranks__plan=str(folder / "plan.json"), **options)


def train_on_hosts(made: RunConfig, folder: Path | None, dying: int = -1) -> Summary:
    """As rank, on a host that has a folder, or all in one folder; rank ``dying`` ends in the seventh step."""
    os.environ["LOCAL_WORLD_SIZE"] = f"{LOCAL}"
    trainer.warm_up = lambda _: None
    steps, real = iter(range(1, 1_000_000)), trainer.train_step

    def step(*arguments: Any) -> Any:
        if next(steps) == 7 and dist.get_rank() == dying:
            os._exit(DIED)
        return real(*arguments)

    trainer.train_step = step
    if folder is not None:
        path = str(folder / f"host-{dist.get_rank() // LOCAL}" / "run")
        made = dataclasses.replace(made, store=dataclasses.replace(made.store, path=path))
    return train(made, resume=True, bits=True)


def parts_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*-of-*"))


def test_hosts_lose_a_rank_and_go_on_to_the_bits_of_ranks_on_one_disk(tmp_path: Path) -> None:
    made = config(tmp_path)
    expected = run(train_on_hosts, RANKS, tmp_path, made, None)
    with pytest.raises(AssertionError, match=r"RankError: ranks? [\d, ]*2[\d, ]* ended, or did not answer"):
        run(train_on_hosts, RANKS, tmp_path, made, tmp_path, 2)
    found = run(train_on_hosts, RANKS, tmp_path, made, tmp_path)
    assert {each.bits for each in found} == {expected[0].bits}
    assert 0 < found[0].rows < expected[0].rows
    for host in range(RANKS // LOCAL):
        own = [f"{rank}-of-{RANKS}" for rank in range(host * LOCAL, (host + 1) * LOCAL)]
        assert parts_of(tmp_path / f"host-{host}" / "run") == own
    assert [each.store for each in found[0].ranks] == [
        str(tmp_path / f"host-{rank // LOCAL}" / "run" / f"{rank}-of-{RANKS}") for rank in range(RANKS)
    ]


TABLE = tierstore.TableConfig(name="t", num_embeddings=100, embedding_dim=8)
TIMEOUT_S, SIZE, LOST = 2, 3, 1
IDS = tierstore.KeyedJaggedTensor(["t"], torch.arange(100), lengths=torch.ones(100, dtype=torch.int64))


def lose_one(folder: Path, *, hangs: bool) -> tuple[str, float]:
    """(the error, seconds until it came)."""
    store = open_sharded(folder, ddr="500KiB", threads=1)
    store.create_table(TABLE)
    module = ShardedTieredEmbeddingBagCollection(store)
    module(IDS).values().sum().backward()
    store.commit()
    begun = time.monotonic()
    if store.ranks.rank == LOST:
        if not hangs:
            os._exit(DIED)
        time.sleep(3 * TIMEOUT_S)
    with pytest.raises(RuntimeError) as caught:
        module(IDS)
    store.close()
    return str(caught.value), time.monotonic() - begun


def lose_hanging(folder: Path) -> tuple[str, float]:
    return lose_one(folder, hangs=True)


def lose_dying(folder: Path) -> tuple[str, float]:
    return lose_one(folder, hangs=False)


def reopen(folder: Path) -> int:
    with open_sharded(folder, ddr="500KiB", threads=1) as store:
        ShardedTieredEmbeddingBagCollection(store)(IDS)
        return store.version


@pytest.mark.parametrize(
    ("lose", "status", "limit_s"), [(lose_dying, DIED, 3 * TIMEOUT_S), (lose_hanging, 0, 3 * TIMEOUT_S)]
)
def test_a_lost_rank_is_named(lose: object, status: int, limit_s: float, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    statuses = [status if rank == LOST else 0 for rank in range(SIZE)]
    found = run(lose, SIZE, tmp_path, folder, statuses=statuses, timeout_s=TIMEOUT_S)  # type: ignore[arg-type]
    for told, seconds in (found[rank] for rank in range(SIZE) if rank != LOST):
        assert told.startswith(f"rank {LOST} ended, or did not answer")
        assert seconds < limit_s
    assert run(reopen, SIZE, tmp_path, folder) == [1] * SIZE
