"""A server over real sockets while another process commits, and how its own process starts and ends."""

import contextlib
import dataclasses
import math
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import typing
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import numpy as np
import psutil
import pytest
import torch
import tritonclient.grpc
import tritonclient.http

import tierstore
from tests.following import Child, Writer
from tests.serve.clients import Client
from tests.serve.fronts import refused, tensor
from tests.serve.loops import WAIT_SECONDS, wait_for
from tests.serve.whole import ADMIN, FREE_PORTS, InThread, command, serving, summed
from tests.updates.support import change, contents, table_config
from tierstore.cli import entry as cli
from tierstore.kernels.jit import JIT_ENABLED
from tierstore.serve import program
from tierstore.serve.config import ServeConfig
from tierstore.serve.grpc.server import InferenceService
from tierstore.serve.messages import Status
from tierstore.serve.program import share_of
from tierstore.serve.rest.server import BoundedProtocol
from tierstore.settings.sections import described
from tierstore.system import sizes
from tierstore.trace import read_trace
from tierstore.updates.fetch import Source

ROWS, DIM = 500, 8


@pytest.fixture
def writer(writer_process: Writer, store_dir: Path) -> Iterator[Writer]:
    """Its store has a table "t" and one version, whose number is in every row."""
    writer_process("open", str(store_dir))
    writer_process("create", "t", ROWS, DIM)
    number(writer_process, 1)
    yield writer_process
    writer_process("close")


def number(writer: Writer, version: int, *tables: str) -> None:
    for table in tables or ("t",):
        writer("write", table, list(range(ROWS)), version)
    assert writer("commit", version) == version


NOTED = """
import sys
from pathlib import Path
from tests.serve.clients import Client
from tests.serve.loops import wait_for
from tests.serve.whole import serving
from tierstore.kernels import jit

compiled, compile_kernel = [], jit._Kernel.compile
jit._Kernel.compile = lambda *each: (compiled.append(each[0].py_func.__name__), compile_kernel(*each))[1]
with serving(Path(sys.argv[1]), ddr="440KiB") as server, Client(server.url) as client:
    for line in sys.stdin:
        wait_for(lambda: server.engine.version == int(line))
        print(client.rows(list(range(100)), table="t").min().item(), len(compiled), compiled[-20:], flush=True)
"""


@pytest.mark.skipif(not JIT_ENABLED, reason="nothing is compiled without the JIT")
def test_the_first_version_that_is_followed_compiles_nothing(writer, store_dir):
    """Not even rows that came in meanwhile, or did not fit, do."""
    child = Child(NOTED, str(store_dir))
    try:
        first, *before = child.ask("1").split(maxsplit=2)
        number(writer, 2)
        second, *after = child.ask("2").split(maxsplit=2)
        child.end()
    finally:
        child.kill()
    assert (first, second) == ("1.0", "2.0")
    assert int(before[0]) > 0
    assert after == before


@pytest.fixture
def server(writer: Writer, store_dir: Path) -> Iterator[InThread]:
    with serving(store_dir) as made:
        yield made


def ids_of(ids: Any) -> list[Any]:
    return [tensor("grpc", "ids", "INT64", np.array(ids))]


def ask_rows(server: InThread, ids: list[int], **options: Any) -> httpx.Response:
    inputs = [{"name": "ids", "datatype": "INT64", "shape": [len(ids)], "data": ids}]
    return httpx.post(f"{server.url}/v2/models/rows.t/infer", json={"inputs": inputs} | options, timeout=60)


def test_health_says_when_a_server_cannot_follow_any_more(server, monkeypatch):
    def health(name: str) -> int:
        return httpx.get(f"{server.url}/v2/health/{name}").status_code

    assert (health("live"), health("ready"), ask_rows(server, [1]).status_code) == (200, 200, 200)

    def fail() -> None:
        raise BaseException("beyond what is expected to go wrong")

    monkeypatch.setattr(server.engine, "refresh", fail)
    wait_for(lambda: health("live") == 503)
    assert ask_rows(server, [1]).status_code == 200


def test_a_full_queue_refuses(writer, store_dir):
    with serving(store_dir, max_batch_samples=4, max_queue_samples=4) as server, ThreadPoolExecutor(1) as pool:
        with server.held():
            waiting = pool.submit(ask_rows, server, [1] * 3 * 16)
            wait_for(lambda: server.engine.state().queued_samples["rows.t"] == 3)
            full = ask_rows(server, [4] * 2 * 16)
        too_large = ask_rows(server, [1] * 5 * 16)
        assert [each.status_code for each in (waiting.result(), full, too_large)] == [200, 503, 400]
        assert "max_queue_samples is 4; try again later" in full.json()["error"]
        assert "start the server with a larger --max-batch-samples" in too_large.json()["error"]
        assert server.metric("tierstore_request_seconds_count", status="overloaded") == 1
        assert server.metric("tierstore_request_seconds_count", status="invalid", model="rows.t") == 1


def test_tables_that_change_are_served_as_they_are_with_the_next_commit(writer, server):
    writer("create", "u", ROWS, DIM)
    number(writer, 2, "t", "u")
    wait_for(lambda: server.engine.version == 2)
    with Client(server.url) as client:
        writer("change", "t", {"num_embeddings": 2 * ROWS})
        writer("write", "t", [ROWS + 7], 3)
        number(writer, 3, "t", "u")
        wait_for(lambda: server.engine.version == 3)
        assert (client.rows([7, ROWS + 7], table="t") == 3.0).all()
        assert (client.rows([7], table="u") == 3.0).all()
        writer("change", "u", {"name": "v"})
        assert (client.rows([7], table="u") == 3.0).all(), "until a commit is shown"
        number(writer, 4, "t", "v")
        wait_for(lambda: server.engine.version == 4)
        assert (client.rows([7], table="v") == 4.0).all()
        writer("drop", "v")
        number(writer, 5)
        wait_for(lambda: server.engine.version == 5)
        assert (client.rows([7], table="t") == 5.0).all()
        for gone in "uv":
            with refused(Status.NOT_FOUND):
                client.rows([7], table=gone)
    names = ("version", "newest_version", "update_failures_total", "staleness_seconds")
    assert [server.metric(f"tierstore_{name}") for name in names] == [5, 5, 0, 0]
    assert server.metric("tierstore_update_seconds_count") >= 4


def test_answers_name_the_version_of_their_rows_after_a_move_that_failed_half_way(writer, server, monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr(type(server.engine._models), "_made", Mock(side_effect=MemoryError))
        writer("create", "u", ROWS, DIM)
        number(writer, 2, "t", "u")
        wait_for(lambda: server.engine.version == 2)
        answer = ask_rows(server, [1]).json()
        assert (answer["model_version"], answer["outputs"][0]["data"][0]) == ("2", 2.0)
    number(writer, 3, "t", "u")
    wait_for(lambda: server.engine.version == 3)
    with Client(server.url) as client:
        assert (client.rows([7], table="u") == 3.0).all(), "models are made at the next move"


def damage(store_dir: Path, version: int) -> None:
    row, path = np.full(DIM, version, np.float32).tobytes(), store_dir / "rows.lmdb"
    data = path.read_bytes()
    assert data.count(row) >= ROWS
    with open(path, "r+b") as file:  # in place: the server has it mapped
        file.write(data.replace(row, bytes([row[0] ^ 1]) + row[1:]))


def test_a_damaged_version_is_not_served(writer, store_dir, server, caplog):
    assert ask_rows(server, list(range(ROWS))).status_code == 200
    with server.held(server.engine._looker):
        number(writer, 2)
        damage(store_dir, 2)
    wait_for(lambda: server.metric("tierstore_update_failures_total") >= 2)
    assert [server.metric(f"tierstore_{name}") for name in ("version", "update_seconds_count")] == [1, 0]
    assert server.metric("tierstore_staleness_seconds") > 0
    answer = ask_rows(server, list(range(ROWS))).json()
    assert (answer["model_version"], set(answer["outputs"][0]["data"])) == ("1", {1.0})
    refused = httpx.post(f"{server.admin}/admin/refresh", headers=ADMIN, timeout=60)
    assert (refused.status_code, "checksum" in refused.json()["error"]) == (500, True)
    (said,) = [line for line in caplog.messages if "version 1 goes on to be served; to move on failed" in line]
    assert "rows.lmdb" in said
    writer("rollback", 1)
    number(writer, 3)
    wait_for(lambda: server.engine.version == 3)
    assert ask_rows(server, [5]).json()["outputs"][0]["data"] == [3.0] * DIM
    assert server.metric("tierstore_staleness_seconds") == 0


def test_a_store_that_is_replaced_goes_on_to_be_served(writer, store_dir, server, caplog):
    writer("close")
    shutil.rmtree(store_dir)
    wait_for(lambda: server.metric("tierstore_update_failures_total") >= 2)
    assert server.metric("tierstore_version") == 1
    assert server.metric("tierstore_staleness_seconds") > 0
    (said,) = [line for line in caplog.messages if "version 1 goes on to be served until" in line]
    assert "until this server is started again; to move on failed" in said
    assert "rows.lmdb was deleted" in said
    writer("open", str(store_dir))
    writer("create", "t", ROWS, DIM)
    number(writer, 1)
    wait_for(lambda: "is another file than when" in "".join(caplog.messages))
    assert ask_rows(server, [5]).json()["outputs"][0]["data"] == [1.0] * DIM


def test_metrics_agree_with_what_was_asked(server):
    rehearsed = server.engine.state().tiers.ddr.unique
    with Client(server.url) as client:
        for _ in range(3):
            client.rows([1, 2, 3], table="t")
        client.pooled([1, 2], [1, 1], table="t")
        with refused(Status.INVALID):
            client.rows([ROWS], table="t")
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        client.infer("rows.t", ids_of([4]))
    for count, labels in ((3, {"protocol": "http", "status": "ok"}), (1, {"protocol": "grpc"}), (5, {})):
        assert server.metric("tierstore_request_seconds_count", model="rows.t", **labels) == count
    assert server.metric("tierstore_request_seconds_count", model="pooled.t", status="ok") == 1
    assert server.metric("tierstore_batch_samples_sum", model="pooled.t") == 2
    found = sum(server.metric(f"tierstore_tier_{name}_total", tier="ddr") for name in ("hits", "misses"))
    assert found - rehearsed == 3 * 3 + 2 + 1
    assert 0 < server.metric("tierstore_tier_bytes", tier="ddr") <= 4 << 20


@pytest.mark.parametrize("dtype", ["float16", "int4"])
def test_fewer_bits_are_those_of_a_quantized_store(writer, store_dir, tmp_path, dtype):
    tierstore.quantize(store_dir, tmp_path / "less", dtype=dtype)
    every = torch.arange(ROWS)
    with tierstore.open(tmp_path / "less", mode="r", ddr="4MiB") as less:
        want = less["t"].read(every).float().numpy()
        pooled = less["t"].pooled(every, torch.arange(0, ROWS + 1, 4)).numpy()
    with serving(store_dir, dtype=dtype, ddr="412KiB") as server, Client(server.url) as client:
        assert np.array_equal(client.rows(every, table="t"), want)
        assert np.array_equal(client.pooled(every, [4] * (ROWS // 4), table="t"), pooled)
        assert server.engine.state().tiers.ddr.bytes <= 412 << 10


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("served") / "store"
    change(directory, 1)
    return directory


def test_sigterm_answers_what_came_and_ends_well_and_kill_leaves_nothing_behind(store, tmp_path):
    log = tmp_path / "log"
    want = contents(store)["item"].view(torch.float32).numpy()
    ids = np.arange(len(want))
    file = tmp_path / "serve.toml"
    file.write_text(f'workers = 2\n[[stores]]\npath = "{store}"\n')
    with command(log, str(file), *two_workers()) as server:
        with Client(server.url) as client:
            assert np.array_equal(client.rows(ids, table="item"), want)
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
    return int(summed(admin, "tierstore_queued_samples"))


@pytest.mark.parametrize(
    ("held", "status"), [("engine.StoreEngine._open", 0), ("program.Server.__init__", -signal.SIGTERM)]
)
def test_sigterm_ends_a_start_that_sees_no_signal(store, held, status):
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
        process.stdout.readline()
        process.terminate()
        assert process.wait(WAIT_SECONDS) == status


def said(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["serve", *arguments]) not in (0, None)
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("tierstore: ")]
    return line


def test_what_cannot_be_served_is_told(store, tmp_path, capfd):
    assert "no store is named" in said(capfd)
    assert cli.main(["serve", "--store", str(tmp_path / "none"), *FREE_PORTS]) == 1
    told = capfd.readouterr().err
    assert told.startswith(f"tierstore: no store at {tmp_path / 'none'}")
    assert told.count("\n") == 1, "nothing listened"
    with tierstore.open(tmp_path / "empty", ddr="4MiB") as opened:
        opened.create_table(table_config("item"))
    assert "no commit yet" in said(capfd, "--store", str(tmp_path / "empty"), *FREE_PORTS)
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for flag in ("--port", "--grpc-port", "--admin-port"):
            assert port in said(capfd, "--store", str(store), *FREE_PORTS, flag, port)
        for flag in ("--port", "--grpc-port"):  # though the workers of one server share theirs
            line = said(capfd, "--store", str(store), *two_workers(), flag, port)
            assert f"cannot listen on 127.0.0.1 port {port}" in line


def test_a_server_that_does_not_answer_is_never_ready(store, capfd, monkeypatch):
    """As with another version of what it uses the private parts of."""
    monkeypatch.setattr(program, "_ANSWER_SECONDS", 0.2)
    for place, name in ((InferenceService, "_check"), (BoundedProtocol, "on_headers_complete")):
        with monkeypatch.context() as patched:
            patched.setattr(place, name, lambda *_: 1 // 0)
            assert "the server does not answer itself" in said(capfd, "--store", str(store), *FREE_PORTS)


OF_KINDS: dict[Any, list[Any]] = {int: [True, "x", 1.5], float: [True, "x", math.nan], bool: ["yes", 5], str: [5, True]}


def test_values_that_a_setting_cannot_have_are_named():
    hints = typing.get_type_hints(ServeConfig)
    for field in dataclasses.fields(ServeConfig):
        wrong = list(OF_KINDS.get(hints[field.name], ["much", 1.5]))
        if field.metadata["low"] is not None:
            wrong += [field.metadata["low"] - 1, field.metadata["high"] + 1]
        for value in wrong:
            with pytest.raises(ValueError, match=rf"^{field.name} ?="):
                described(ServeConfig, {"store": "x"} | {field.name: value})


@pytest.mark.parametrize("text", ["", "  \n", "größe", "s3cret\ns3cret", "s3cret s3cret", "s3cret\0"])
def test_a_token_must_be_one_and_is_not_shown(tmp_path, text):
    (tmp_path / "token").write_text(text)
    with pytest.raises(ValueError, match=r"token_file=.*: the token must be one line") as of_file:
        _ = ServeConfig(store="x", token_file=str(tmp_path / "token")).token
    with pytest.raises(ValueError, match=r"^token must be one line") as raised:
        Source("http://localhost", token=text)
    assert "s3cret" not in str(raised.value) + str(of_file.value)


def test_shares_of_budgets():
    for size, share in {"2GiB": 1 << 30, "1000001": 500_000, "50%": 250, 7: 3, "0": 0}.items():
        assert sizes.parse_size(share_of(size, 2), name="ddr", memory_bytes=1000) == share
    assert share_of("5% of tables", 2) == "2.500000% of tables"


def free_ports(count: int) -> list[int]:
    """Ports that are free now, one after another, below those that Linux gives to whoever asks for any: a worker leaves
    its own when it is killed, and the one in its place needs them again."""
    while True:
        first = random.randrange(10_000, 32_000)
        with contextlib.suppress(OSError):
            for port in range(first, first + count):
                socket.create_server(("127.0.0.1", port)).close()
            return list(range(first, first + count))


def two_workers() -> list[str]:
    """Flags; the second worker's admin port follows the one that is named."""
    rest, grpc, admin, _ = free_ports(4)
    ports = ["--port", str(rest), "--grpc-port", str(grpc), "--admin-port", str(admin), "--threads", "1"]
    return [*ports, "--workers", "2", "--ddr", "8MiB"]


@pytest.mark.slow
def test_workers_share_the_ports_and_end_together(store, tmp_path):
    log, record = tmp_path / "log", ["--record", str(tmp_path / "lookups.npz"), "--record-rate", "1"]
    with command(log, "--store", str(store), *two_workers(), *record) as server:
        address, _, port = server.admin.rpartition(":")
        admins = [server.admin, f"{address}:{int(port) + 1}"]

        def served() -> list[int]:
            return [int(summed(each, "tierstore_request_seconds_count")) for each in admins]

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
