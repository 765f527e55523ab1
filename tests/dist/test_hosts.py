"""Hosts with disks of their own: each has the parts of its ranks and no others."""

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from bench.data import ROOT
from tests.train.runs import config_of
from tierstore.dist import Plan, Sharding
from tierstore.settings.sections import to_toml
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


def start_host(folder: Path, host: int, port: int) -> "subprocess.Popen[bytes]":
    """torchrun of one host, in a folder of its own."""
    own = folder / f"host-{host}"
    own.mkdir(exist_ok=True)
    words = [
        f"--nnodes={RANKS // LOCAL}",
        f"--local-addr=127.0.0.{host + 1}",
        f"--nproc-per-node={LOCAL}",
        "--max-restarts=3",
    ]
    words += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=drill"]
    command = [sys.executable, "-m", "torch.distributed.run", *words, "-m", "tierstore", "train", "../run.toml"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    options = ["--resume", "--store", "run", "--json", "summary.json", "--digest"]
    with (own / "log").open("ab") as log:
        return subprocess.Popen([*command, *options], cwd=own, env=environment, stdout=log, stderr=log)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port: int = free.getsockname()[1]
        return port


@pytest.mark.soak
def test_torchrun_on_two_hosts_survives_kills_of_a_rank_and_of_a_host(tmp_path: Path) -> None:
    made = config(tmp_path, train__commit_every=1, train__epochs=30)
    expected = run(train_on_hosts, RANKS, tmp_path, made, None, timeout_s=600)
    (tmp_path / "run.toml").write_text(to_toml(made))
    for kill in ("rank", "host", ""):
        port = free_port()
        hosts = [start_host(tmp_path, host, port) for host in range(RANKS // LOCAL)]
        if kill:
            wait_for_commits(tmp_path, 3)
            children = psutil.Process(hosts[1].pid).children()
            if kill == "rank":
                os.kill(children[0].pid, signal.SIGKILL)
                wait_for_commits(tmp_path, 3)
            for host in hosts:  # the whole of it
                for process in [*psutil.Process(host.pid).children(recursive=True), host]:
                    os.kill(process.pid, signal.SIGKILL)
        statuses = [host.wait(timeout=200) for host in hosts]
        logs = "".join((tmp_path / f"host-{host}" / "log").read_text() for host in range(2))
        assert statuses == ([-signal.SIGKILL] * 2 if kill else [0, 0]), logs
    summary = json.loads((tmp_path / "host-0" / "summary.json").read_text())
    assert summary["bits"] == expected[0].bits
    assert not (tmp_path / "host-1" / "summary.json").exists()


def wait_for_commits(folder: Path, more: int) -> None:
    """Of the first host's progress, so many more."""
    log = folder / "host-0" / "log"
    seen = log.read_text().count("committed version")
    while log.read_text().count("committed version") < seen + more:
        time.sleep(0.1)
