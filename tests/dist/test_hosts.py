"""Hosts with disks of their own: each has the parts of its ranks and no others."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.train.runs import config_of
from tierstore.dist import Plan, Sharding
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
