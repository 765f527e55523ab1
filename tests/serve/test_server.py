"""``tierstore serve`` as a process: how it starts, and how it ends."""

import dataclasses
import math
import os
import random
import signal
import socket
import subprocess
import sys
import typing
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import torch

import tierstore
from tests.serve.clients import Client
from tests.serve.loops import WAIT_SECONDS, wait_for
from tests.serve.whole import FREE_PORTS, command
from tests.updates.support import ROWS, change, contents, table_config
from tierstore.cli import entry as cli
from tierstore.serve import program
from tierstore.serve.config import ServeConfig
from tierstore.serve.grpc.server import InferenceService
from tierstore.serve.rest.server import BoundedProtocol
from tierstore.serve.workers import share_of
from tierstore.settings.sections import described
from tierstore.system import sizes
from tierstore.trace import read_trace
from tierstore.updates.fetch import Source


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("served") / "store"
    change(directory, 1)
    return directory


def test_sigterm_answers_what_came_and_ends_well_and_kill_leaves_nothing_in_the_way(
    store: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    want = contents(store)["item"].view(torch.float32).numpy()
    ids = np.arange(ROWS)
    with command(log, "--store", str(store), *two_workers()) as server:
        with Client(server.url) as client:
            assert np.array_equal(client.rows(ids, table="item"), want)
        assert httpx.get(f"{server.admin}/status.json").json()["server"]["ready"]
        workers = psutil.Process(server.process.pid).children(recursive=True)
        assert workers
        server.end(signal.SIGKILL)
        assert not psutil.wait_procs(workers, timeout=WAIT_SECONDS)[1], "workers end with their parent"
    many = np.tile(ids, 1000)
    limits = ("--max-batch-samples", str(len(many)), "--max-queue-samples", str(2 * len(many)))
    with (
        command(log, "--store", str(store), *FREE_PORTS, *limits) as server,
        ThreadPoolExecutor(2) as pool,
        Client(server.url) as client,
    ):
        asked = [pool.submit(client.rows, many, table="item") for _ in range(2)]
        wait_for(lambda: queued(server.admin) or all(each.done() for each in asked))  # one waits while the other runs
        server.process.send_signal(signal.SIGTERM)
        for each in asked:
            assert np.array_equal(each.result(WAIT_SECONDS), np.tile(want, (1000, 1)))
        assert server.wait() == 0
        with pytest.raises(httpx.ConnectError):
            client.rows(ids, table="item")
    assert "stopping" in log.read_text()
    assert "Traceback" not in log.read_text()


def queued(admin: str) -> int:
    models = httpx.get(f"{admin}/status.json").json()["models"]
    return int(sum(model["queued_samples"] for model in models))


def test_sigterm_ends_a_start_that_takes_long(store: Path, tmp_path: Path) -> None:
    """The trace is a pipe that nobody writes to, or rows of which there are many: the signal comes while it starts."""
    big = tmp_path / "big"
    with tierstore.open(big, ddr="16MiB") as opened:
        table = opened.create_table(table_config("item", num_embeddings=2_000_000, embedding_dim=16))
        table.write(torch.tensor([1]), torch.ones(1, 16))
        opened.commit()
    from tierstore.serve.hot_rows import hot_rows_path, save_hot_rows

    save_hot_rows(hot_rows_path(big), np.arange(2_000_000))
    with command(tmp_path / "log", "--store", str(big), *FREE_PORTS[:-1], "1GiB", ready=False) as server:
        wait_for(lambda: "listening" in (tmp_path / "log").read_text())
        assert server.end() == 0
        assert "Traceback" not in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("held", "status"),
    [("engine.StoreEngine._open", 0), ("program.Server.__init__", -signal.SIGTERM)],
)
def test_sigterm_ends_a_start_that_sees_no_signal(store: Path, held: str, status: int) -> None:
    """As while kernels are compiled, in a thread or in the loop's."""
    code = f"""
import sys, time
from tierstore import cli
from tierstore.serve import engine, program
{held} = lambda *_, **__: (print("begun", flush=True), time.sleep(600))
sys.exit(cli.main(["serve", "--store", sys.argv[1], *sys.argv[2:]]))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-c", code, str(store), *FREE_PORTS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.terminate()
        assert process.wait(WAIT_SECONDS) == status


def said(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command says, in one line, as it refuses to start."""
    assert cli.main(["serve", *arguments]) not in (0, None)
    error = capfd.readouterr().err
    lines = [line for line in error.splitlines() if line.startswith("tierstore: ")]
    assert len(lines) == 1, error
    return lines[0]


def test_what_cannot_be_served_is_told_in_a_line(
    store: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert "no store is named" in said(capfd)
    assert cli.main(["serve", "--store", str(tmp_path / "none"), *FREE_PORTS]) == 1
    told = capfd.readouterr().err
    assert told.startswith(f"tierstore: no store at {tmp_path / 'none'}")
    assert told.count("\n") == 1, "nothing listened"
    with tierstore.open(tmp_path / "empty", ddr="4MiB") as opened:
        opened.create_table(table_config("item"))
    assert "no commit yet" in said(capfd, "--store", str(tmp_path / "empty"), *FREE_PORTS)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for flag in ("--port", "--grpc-port", "--admin-port"):
            line = said(capfd, "--store", str(store), *FREE_PORTS, flag, port)
            assert port in line, line


OF_KINDS: dict[Any, list[Any]] = {int: [True, "x", 1.5], float: [True, "x", math.nan], bool: ["yes", 5], str: [5, True]}


@pytest.mark.parametrize("field", dataclasses.fields(ServeConfig), ids=lambda field: field.name)
def test_values_that_a_setting_cannot_have_are_named(field: Any) -> None:
    """Of another kind, and out of its range."""
    wrong = list(OF_KINDS.get(typing.get_type_hints(ServeConfig)[field.name], ["much", 1.5]))
    if field.metadata["low"] is not None:
        wrong += [field.metadata["low"] - 1, field.metadata["high"] + 1]
    for value in wrong:
        with pytest.raises(ValueError, match=rf"^{field.name} ?="):
            described(ServeConfig, {"store": "x"} | {field.name: value})


@pytest.mark.parametrize("text", ["", "  \n", "größe", "s3cret\ns3cret", "s3cret s3cret", "s3cret\0"])
def test_a_token_must_be_one_and_is_not_shown(tmp_path: Path, text: str) -> None:
    (tmp_path / "token").write_text(text)
    with pytest.raises(ValueError, match=r"token_file=.*: the token must be one line") as of_file:
        _ = ServeConfig(store="x", token_file=str(tmp_path / "token")).token
    with pytest.raises(ValueError, match=r"^token must be one line") as raised:
        Source("http://localhost", token=text)
    assert "s3cret" not in str(raised.value) + str(of_file.value)


@pytest.mark.parametrize("url", ["http://me:s3cret@host:8002", "ftp://me:s3cret@host/", "http://s3cret@host/path?q"])
def test_a_password_in_a_url_is_not_shown(url: str) -> None:
    with pytest.raises(ValueError, match="host") as raised:
        Source(url)
    assert "s3cret" not in str(raised.value)


def test_shares_of_budgets() -> None:
    for size, share in {"2GiB": 1 << 30, "1000001": 500_000, "50%": None, 7: 3, "0": 0}.items():
        part = share_of(size, 2)
        parsed = sizes.parse_size(part, name="ddr", memory_bytes=1000)
        assert parsed == (250 if share is None else share)
    assert share_of("5% of tables", 2) == "2.500000% of tables"


def free_ports(count: int) -> list[int]:
    """Ports that are free now, one after another, below those that Linux gives to whoever asks for any: a worker leaves
    its own when it is killed, and the one in its place needs them again."""
    while True:
        first = random.randrange(10_000, 32_000)
        try:
            for port in range(first, first + count):
                with socket.socket() as tried:
                    tried.bind(("127.0.0.1", port))
        except OSError:
            continue
        return list(range(first, first + count))


def two_workers() -> list[str]:
    """Flags; the second worker's admin port follows the one that is named."""
    rest, grpc, admin, _ = free_ports(4)
    ports = ["--port", str(rest), "--grpc-port", str(grpc), "--admin-port", str(admin), "--threads", "1"]
    return [*ports, "--workers", "2", "--ddr", "8MiB"]


@pytest.mark.slow
def test_workers_share_the_ports_and_end_together(store: Path, tmp_path: Path) -> None:
    log, record = tmp_path / "log", ["--record", str(tmp_path / "lookups.npz"), "--record-rate", "1"]
    with command(log, "--store", str(store), *two_workers(), *record) as server:
        address, _, port = server.admin.rpartition(":")
        admins = [server.admin, f"{address}:{int(port) + 1}"]

        def served() -> list[int]:
            statuses = [httpx.get(f"{each}/status.json", timeout=WAIT_SECONDS).json() for each in admins]
            return [status["requests"]["total"] for status in statuses]

        def ask() -> bool:
            with Client(server.url) as client:  # a new connection each time
                assert client.rows([1, 2], table="item").shape == (2, 6)
            return all(served())

        wait_for(ask)
        workers = psutil.Process(server.process.pid).children(recursive=True)
        # Beside the workers there may be a compiler of kernels that has just ended.
        running = [each for each in workers if each.status() != psutil.STATUS_ZOMBIE]
        names = [each for each in running if "spawn_main" in " ".join(each.cmdline())]
        assert len(names) == 2
        names[0].kill()
        assert server.wait() == 1
    assert "all are stopped" in log.read_text()
    assert "Traceback" not in log.read_text()
    for each in workers:
        each.wait(WAIT_SECONDS)
    # A worker that was killed leaves what it had written.
    lookups = [read_trace(tmp_path / f"lookups.{worker}.npz").tables["item"].ids for worker in (0, 1)]
    assert max(map(len, lookups)) > 0
    assert all(set(ids.tolist()) <= {1, 2} for ids in lookups)


def test_two_servers_do_not_share_a_port(store: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Though the workers of one do."""
    flags = two_workers()
    for port in (flags[1], flags[3]):
        with socket.socket() as taken:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            taken.bind(("127.0.0.1", int(port)))
            taken.listen()
            assert f"cannot listen on 127.0.0.1 port {port}" in said(capfd, "--store", str(store), *flags)


def test_a_server_that_does_not_answer_is_never_ready(
    store: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with another version of what it uses the private parts of."""
    monkeypatch.setattr(program, "_ANSWER_SECONDS", 0.2)
    for place, name in ((InferenceService, "_check"), (BoundedProtocol, "on_headers_complete")):
        with monkeypatch.context() as patched:
            patched.setattr(place, name, lambda *_: 1 // 0)
            assert "the server does not answer itself" in said(capfd, "--store", str(store), *FREE_PORTS)
