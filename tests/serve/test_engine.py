"""The whole server over real sockets, asked by independent clients, while another process commits."""

import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import tritonclient.grpc
import tritonclient.http

import tierstore
from tests.following import Child, Writer
from tests.serve.clients import Client
from tests.serve.fronts import refused, tensor
from tests.serve.loops import wait_for
from tests.serve.whole import ADMIN, InThread, serving
from tierstore.kernels.jit import JIT_ENABLED
from tierstore.serve.messages import Status

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
    """Write the version's number into every row and commit it."""
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
def test_the_first_version_that_is_followed_compiles_nothing(writer: Writer, store_dir: Path) -> None:
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
    """Rows of "t" as JSON."""
    inputs = [{"name": "ids", "datatype": "INT64", "shape": [len(ids)], "data": ids}]
    return httpx.post(f"{server.url}/v2/models/rows.t/infer", json={"inputs": inputs} | options, timeout=60)


def test_answers_are_of_one_version_while_another_process_commits(writer: Writer, server: InThread) -> None:
    """The number of the version is in all its rows, so rows of two versions in one answer would show."""
    done = threading.Event()

    def ask(use_grpc: bool) -> list[int]:
        seen = []
        client: Any = tritonclient.grpc.InferenceServerClient(server.grpc) if use_grpc else Client(server.url)
        generator = np.random.default_rng(use_grpc)
        with client:
            while not done.is_set():
                ids = generator.integers(0, ROWS, 100)
                if use_grpc:
                    answer = client.infer("rows.t", ids_of(ids))
                    version, rows = answer.get_response().model_version, answer.as_numpy("rows")
                else:
                    answer = client.infer("rows.t", {"ids": ids})
                    version, rows = answer.version, answer.outputs["rows"]
                assert (rows == float(version)).all(), f"version {version} holds {np.unique(rows)}"
                seen.append(int(version))
        return seen

    with ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(ask, use_grpc) for use_grpc in (True, False)]
        try:
            for version in range(2, 10):
                number(writer, version)
                wait_for(lambda version=version: server.engine.version == version)
        finally:
            done.set()
        for each in asking:
            assert each.result() == sorted(each.result())
            assert len({*each.result()}) > 2
    status = server.status()["version"]
    assert (status["served"], status["newest"], status["updates"], status["update_failures"]) == (9, 9, 8, 0)
    assert (status["staleness_seconds"], server.metric("tierstore_version")) == (0, 9)


def test_health_says_when_a_server_drains_or_cannot_follow_any_more(
    server: InThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    def health(name: str) -> int:
        return httpx.get(f"{server.url}/v2/health/{name}").status_code

    for call, status in (("drain", 503), ("resume", 200)):
        answer = httpx.post(f"{server.admin}/admin/{call}", headers=ADMIN)
        assert answer.json() == {"draining": call == "drain"}
        assert (health("live"), health("ready"), ask_rows(server, [1]).status_code) == (200, status, status)

    def fail() -> None:
        raise BaseException("beyond what is expected to go wrong")

    monkeypatch.setattr(server.engine, "refresh", fail)
    wait_for(lambda: health("live") == 503)
    assert ask_rows(server, [1]).status_code == 200


def test_a_full_queue_refuses(writer: Writer, store_dir: Path) -> None:
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


def test_tables_that_change_are_served_as_they_are_with_the_next_commit(writer: Writer, server: InThread) -> None:
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


def damage(store_dir: Path, version: int) -> None:
    """Flip a byte in each row that holds the version's number."""
    row, path = np.full(DIM, version, np.float32).tobytes(), store_dir / "rows.lmdb"
    data = path.read_bytes()
    assert data.count(row) >= ROWS
    with open(path, "r+b") as file:  # in place: the server has it mapped
        file.write(data.replace(row, bytes([row[0] ^ 1]) + row[1:]))


def test_a_damaged_version_is_not_served(
    writer: Writer, store_dir: Path, server: InThread, caplog: pytest.LogCaptureFixture
) -> None:
    assert ask_rows(server, list(range(ROWS))).status_code == 200
    with server.held(server.engine._looker):
        number(writer, 2)
        damage(store_dir, 2)
    wait_for(lambda: server.status()["version"]["update_failures"] >= 2)
    status = server.status()["version"]
    assert (status["served"], status["updates"], status["staleness_seconds"] > 0) == (1, 0, True)
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
    assert server.status()["version"]["staleness_seconds"] == 0


def test_a_store_that_is_replaced_goes_on_to_be_served(
    writer: Writer, store_dir: Path, server: InThread, caplog: pytest.LogCaptureFixture
) -> None:
    writer("close")
    shutil.rmtree(store_dir)
    wait_for(lambda: server.metric("tierstore_update_failures_total") >= 2)
    status = server.status()["version"]
    assert (status["served"], status["staleness_seconds"] > 0) == (1, True)
    (said,) = [line for line in caplog.messages if "version 1 goes on to be served until" in line]
    assert "until this server is started again; to move on failed" in said
    assert "rows.lmdb was deleted" in said
    writer("open", str(store_dir))
    writer("create", "t", ROWS, DIM)
    number(writer, 1)
    wait_for(lambda: "is another file than when" in "".join(caplog.messages))
    assert ask_rows(server, [5]).json()["outputs"][0]["data"] == [1.0] * DIM


def test_metrics_and_status_agree_with_what_was_asked(server: InThread) -> None:
    rehearsed = server.engine.state().tiers.ddr.unique
    with Client(server.url) as client:
        for _ in range(3):
            client.rows([1, 2, 3], table="t")
        client.pooled([1, 2], [1, 1], table="t")
        with refused(Status.INVALID):
            client.rows([ROWS], table="t")
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        client.infer("rows.t", ids_of([4]))
    status = server.status()
    by_name = {model["name"]: model for model in status["models"]}
    assert (by_name["rows.t"]["total"], by_name["rows.t"]["failed"], status["requests"]["total"]) == (5, 1, 6)
    assert by_name["pooled.t"]["by_status"] == {"ok": 1}
    assert by_name["pooled.t"]["batch_samples_mean"] == 2
    for count, labels in ((3, {"protocol": "http", "status": "ok"}), (1, {"protocol": "grpc"})):
        assert server.metric("tierstore_request_seconds_count", model="rows.t", **labels) == count
    assert [each["name"] for each in status["tables"]] == ["t"]
    (ddr,) = [tier for tier in status["tiers"] if tier["name"] == "ddr"]
    assert ddr["unique"] - rehearsed == 3 * 3 + 2 + 1
    assert 0 < ddr["bytes"] <= 4 << 20


@pytest.mark.parametrize("dtype", ["float16", "int4"])
def test_fewer_bits_are_those_of_a_quantized_store(writer: Writer, store_dir: Path, tmp_path: Path, dtype: Any) -> None:
    tierstore.quantize(store_dir, tmp_path / "less", dtype=dtype)
    every = torch.arange(ROWS)
    with tierstore.open(tmp_path / "less", mode="r", ddr="4MiB") as less:
        want = less["t"].read(every).float().numpy()
        pooled = less["t"].pooled(every, torch.arange(0, ROWS + 1, 4)).numpy()
    with serving(store_dir, dtype=dtype, ddr="412KiB") as server, Client(server.url) as client:
        assert np.array_equal(client.rows(every, table="t"), want)
        assert np.array_equal(client.pooled(every, [4] * (ROWS // 4), table="t"), pooled)
        assert server.status()["tables"][0]["dtype"] == dtype
        assert server.engine.state().tiers.ddr.bytes <= 412 << 10
