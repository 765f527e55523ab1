"""Whole servers: of a training run, as replicas, warming up, behind a token and with TLS."""

import asyncio
import json
import os
import shutil
import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import tritonclient.grpc

import tierstore
from tests.following import Child
from tests.serve.clients import Client
from tests.serve.fronts import refused
from tests.serve.loops import wait_for
from tests.serve.replicas import publishing
from tests.serve.test_engine import ids_of
from tests.serve.whole import ADMIN, SMALL, InThread, make_certificate, serving
from tests.train.runs import TRAIN_ROWS, config_of
from tests.updates.support import ROWS, change, table_config
from tierstore.cli import entry as cli
from tierstore.serve import hot_rows
from tierstore.serve.config import ServeConfig
from tierstore.serve.messages import Status
from tierstore.serve.tls import Tls
from tierstore.train import train
from tierstore.train.build import open_data
from tierstore.train.config import RunConfig

pytestmark = pytest.mark.usefixtures("warm_writer")
BATCH = 32

TRAINER = """
import json, sys
from pathlib import Path
import torch
from tests.train.runs import TRAIN_ROWS, config_of
from tierstore.train.build import build_run, open_data, open_run_store
from tierstore.train.checkpoint import Position, commit_run, restore_run
config = config_of(Path(sys.argv[1]), "store", store__keep=4, store__threads=1)
reader, hasher = open_data(config)
batch = next(iter(reader.batches(hasher, batch_size=32, start_row=TRAIN_ROWS, stop_row=TRAIN_ROWS + 32)))
torch.set_num_threads(1)
with open_run_store(config) as store:
    run = build_run(config, store)
    restore_run(run)
    for line in sys.stdin:
        if line == "step\\n":  # dense weights and rows change together
            logits = run.model(batch.dense, batch.sparse)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
            run.optimizer.zero_grad()
            (loss * 100).backward()
            run.optimizer.step()
            commit_run(run, config, Position()).result()
        else:
            store.rollback(int(line))
            restore_run(run)
        with torch.no_grad():
            answer = torch.sigmoid(run.model(batch.dense, batch.sparse)).tolist()
        print(json.dumps([store.version, answer]), flush=True)
"""


class Trainer(Child):
    """Another process that trains the small run on, step by step."""

    def __init__(self, folder: Path) -> None:
        super().__init__(TRAINER, str(folder))

    def __call__(self, order: str = "step") -> tuple[str, Any]:
        """The version then, and the trainer's own answer for the first rows of the test data."""
        version, answer = json.loads(self.ask(order))
        return str(version), np.array(answer, np.float32)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunConfig]:
    folder = tmp_path_factory.mktemp("run")
    config = config_of(folder, "store", store__keep=4, store__threads=1)
    train(config)
    return folder, config


@pytest.fixture(scope="module")
def trainer(run: tuple[Path, RunConfig]) -> Iterator[Trainer]:
    made = Trainer(run[0])
    yield made
    made.end()


@pytest.fixture(scope="module")
def question(run: tuple[Path, RunConfig]) -> dict[str, Any]:
    """The first rows of the test data, as they are in the file."""
    reader, _ = open_data(run[1])
    raw = next(iter(reader.read_chunks(TRAIN_ROWS, TRAIN_ROWS + BATCH, BATCH)))
    has = np.diff(raw.categories.offsets)
    dense = np.nan_to_num(raw.dense, nan=0.0)
    return {"dense": dense, "values": np.concatenate(raw.categories.columns), "lengths": has.astype(np.int32)}


@pytest.mark.slow
def test_dense_weights_and_rows_of_a_run_move_together(
    run: tuple[Path, RunConfig], trainer: Trainer, question: dict[str, Any]
) -> None:
    expected = dict([trainer()])
    with serving(Path(run[1].store.path)) as server, ThreadPoolExecutor(2) as pool:

        def ask(last: str) -> list[tuple[str, Any]]:
            answers = []
            with Client(server.url) as client:
                while not answers or answers[-1][0] != last:
                    answer = client.infer("ranking", question)
                    answers.append((answer.version, answer.outputs["probabilities"]))
            return answers

        first = int(next(iter(expected)))
        asking = [pool.submit(ask, str(first + 6)) for _ in range(2)]
        for _ in range(6):
            version, answer = trainer()
            expected[version] = answer
            wait_for(lambda version=version: str(server.engine.version) == version)
        for each in asking:
            answers = each.result()
            for version, probabilities in answers:
                same = [each for each, wanted in expected.items() if wanted.tobytes() == probabilities.tobytes()]
                assert same == [version], f"{version}: {probabilities} {expected[version]}"
            assert len({version for version, _ in answers}) > 2
        assert len({answer.tobytes() for answer in expected.values()}) == len(expected)
        trainer(str(first + 4))
        wait_for(lambda: server.engine.version == first + 4)
        with Client(server.url) as client:
            back = client.infer("ranking", question)
        assert (back.version, back.outputs["probabilities"].tobytes()) == (
            str(first + 4),
            expected[str(first + 4)].tobytes(),
        )


def test_a_replica_of_a_run_ranks_as_its_source(
    run: tuple[Path, RunConfig], trainer: Trainer, question: dict[str, Any], tmp_path: Path
) -> None:
    source = run[1].store.path
    with (
        publishing(Path(source)) as publisher,
        serving(tmp_path / "replica", sources=(publisher.url,)) as server,
        Client(server.url) as client,
    ):
        assert not client.ready()
        with refused(Status.UNAVAILABLE):
            client.rank(**question)
        expected = dict([trainer()])
        for _ in range(2):
            publisher.step()
            wait_for(client.ready)
            version, wanted = list(expected.items())[-1]
            wait_for(lambda version=version: str(server.engine.version) == version)
            answer = client.infer("ranking", question)
            assert (answer.version, answer.outputs["probabilities"].tobytes()) == (version, wanted.tobytes())
            expected |= dict([trainer()])
        first, second, _ = expected
        back = httpx.post(f"{server.admin}/admin/rollback", headers=ADMIN, timeout=60)
        assert back.json() == {"version": int(first)}
        answer = client.infer("ranking", question)
        assert (answer.version, answer.outputs["probabilities"].tobytes()) == (first, expected[first].tobytes())
        assert httpx.post(f"{server.admin}/admin/rollback", headers=ADMIN, timeout=60).status_code in (422, 500)
        status = server.status()["version"]
        assert (status["served"], status["update_failures"]) == (int(first), 0)
        assert int(second) > int(first)


def test_hot_rows_are_there_after_a_restart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = tmp_path / "store"
    change(store, 1)
    ids = list(range(0, ROWS, 3))
    with serving(store, warm_up="auto") as server, Client(server.url) as client:
        want = client.rows(ids, table="item")
        client.rows(ids[:5], table="user")
    with serving(store, warm_up="auto") as server, Client(server.url) as client:
        before = server.engine.state().tiers.ddr
        assert before.misses == len(ids) + 5
        assert np.array_equal(client.rows(ids, table="item"), want)
        after = server.engine.state().tiers.ddr
        assert (after.misses - before.misses, after.hits - before.hits) == (0, len(ids))
    saved = hot_rows.hot_rows_path(store)
    saved.unlink()
    os.mkfifo(saved)
    with serving(store, warm_up="auto") as server, Client(server.url) as client:
        assert np.array_equal(client.rows(ids, table="item"), want)
    assert "store.hot is not used" in caplog.text
    assert saved.stat().st_size == 8 * (len(ids) + 1)  # and a row of the rehearsal


def test_hot_rows_are_kept_while_serving_and_not_through_a_name_that_another_made(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change(tmp_path / "store", 1)
    path, other = hot_rows.hot_rows_path(tmp_path / "store"), tmp_path / "other"
    partial = path.with_name(f"store.hot.{os.getpid()}.partial")
    other.write_bytes(b"mine")
    partial.symlink_to(other)
    with serving(tmp_path / "store", warm_up="auto") as server, Client(server.url) as client:
        client.rows([5, 8], table="user")
        keeping = asyncio.run_coroutine_threadsafe(server.engine.keep_hot_rows(0.01), server.loop)
        wait_for(path.exists)
        keeping.cancel()
        kept = np.fromfile(path, "<i8")
        assert (kept[kept >> 40 == 1] - (1 << 40)).tolist() == [0, 5, 8]  # row 0 of the rehearsal
        assert other.read_bytes() == b"mine"
    partial.unlink(missing_ok=True)
    partial.mkdir()
    hot_rows.save_hot_rows(path, np.array([4]))
    assert "not kept" in caplog.text


def test_with_less_memory_the_last_hot_rows_of_each_table_are_loaded(tmp_path: Path) -> None:
    with tierstore.open(tmp_path / "store", ddr="4MiB") as store:
        for name, dim in (("wide", 64), ("slim", 8)):
            config = table_config(name, embedding_dim=dim, num_embeddings=20_000)
            store.create_table(config).write(torch.arange(20_000), torch.ones(20_000, dim))
        store.commit()
    keys = np.stack([np.arange(20_000), np.arange(20_000) + (1 << 40)], axis=1).reshape(-1)
    hot_rows.save_hot_rows(tmp_path / "x.hot", keys)
    with tierstore.open(tmp_path / "store", mode="r", ddr="2MiB") as store:
        room = sum(store[name].pool.cache.capacity for name in store.tables)
        found = hot_rows.load_hot_rows(tmp_path / "x.hot", store)
        assert sum(map(len, found.values())) == room < 40_000
        for ids in found.values():
            assert ids.tolist() == list(range(20_000 - len(ids), 20_000))
        assert 0 < hot_rows.warm_up(store, found, lambda: False) <= room


def test_warm_up_from_a_trace(run: tuple[Path, RunConfig], tmp_path: Path) -> None:
    trace = tmp_path / "run.npz"
    run_file = tmp_path / "run.toml"
    config = run[1]
    run_file.write_text(
        f'[data]\npath = "{config.data.path}"\ntrain_rows = 200\ntest_rows = 50\n'
        "[embedding]\ndim = 4\nnum_embeddings = 150\n[train]\nbatch_size = 32\nepochs = 1\n"
        f'[store]\npath = "{config.store.path}"\n'
    )
    assert cli.main(["trace", str(run_file), str(trace)]) == 0
    with serving(Path(config.store.path), warm_up=str(trace), ddr="8MiB") as server:
        ddr = server.engine.state().tiers.ddr
        assert ddr.misses > 500
        with Client(server.url) as client:
            ids = hot_rows.rows_of_trace(trace)["C1"]
            client.rows(ids, table="C1")
        assert server.engine.state().tiers.ddr.misses == ddr.misses
    with pytest.raises(ValueError, match=r"run\.toml"):
        InThread(config_with(config.store.path, warm_up=str(run_file)))


def config_with(store: Any, **settings: Any) -> ServeConfig:
    return ServeConfig(**(SMALL | {"store": str(store)} | settings))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("plain") / "store"
    change(directory, 1)
    return directory


def test_clients_and_operators_have_a_token_each(plain: Path, tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("s3cret\n")
    bearer = {"Authorization": "Bearer s3cret"}
    with serving(plain, token_file=str(token_file)) as server:
        with Client(server.url) as client, refused(Status.UNAUTHENTICATED):
            client.rows([1], table="item")
        with Client(server.url, token="s3cret") as client:
            assert client.rows([1], table="item").shape == (1, 6)
        assert httpx.get(f"{server.url}/v2/health/ready").status_code == 200
        with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
            inputs = ids_of([1])
            with refused(Status.UNAUTHENTICATED):
                client.infer("rows.item", inputs)
            found = client.infer("rows.item", inputs, headers={"authorization": "Bearer s3cret"})
            assert found.as_numpy("rows").shape == (1, 6)
        for path in ("/", "/metrics", "/status.json"):
            assert httpx.get(server.admin + path).status_code == 401
            assert httpx.get(server.admin + path, headers=bearer).status_code == 401
            assert httpx.get(server.admin + path, headers=ADMIN).status_code == 200
        refresh = f"{server.admin}/admin/refresh"
        assert httpx.post(refresh, headers=ADMIN | bearer).status_code == 401
        assert httpx.post(refresh, headers=ADMIN).json() == {"version": 1}
        with pytest.raises(httpx.HTTPStatusError, match="401"):
            httpx.get(f"{server.url}/v2", headers=ADMIN).raise_for_status()
    with pytest.raises(ValueError, match="holds the token of clients"):
        _ = config_with(plain, token_file=str(token_file), admin_token_file=str(token_file)).admin_token


def test_without_an_admin_token_nothing_is_changed_whoever_asks(plain: Path) -> None:
    """A proxy on this machine may ask as the machine itself does."""
    with serving(plain, admin_token_file="") as server:
        for path in ("/", "/metrics", "/status.json"):
            assert httpx.get(server.admin + path).status_code == 200
        calls = [("POST", "drain"), ("POST", "refresh"), ("POST", "rollback")]
        for method, call in calls:
            refused = httpx.request(method, f"{server.admin}/admin/{call}", headers=ADMIN)
            assert refused.status_code == 403
            assert "--admin-token-file" in refused.json()["error"]
        assert httpx.get(f"{server.url}/v2/health/ready").status_code == 200


def shown_certificate(port: int) -> bytes:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2", "http/1.1"])
    with context.wrap_socket(socket.create_connection(("127.0.0.1", port), 20)) as secured:
        return secured.getpeercert(binary_form=True) or b""


def test_a_renewed_certificate_is_shown_on_all_ports(
    plain: Path, tls: Tls, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    make_certificate("first", certificate, key)
    with serving(plain, tls_certificate=str(certificate), tls_key=str(key)) as server:
        ports = (server.ports.rest, server.ports.grpc, server.ports.admin)

        def shown() -> set[bytes]:
            return {shown_certificate(port) for port in ports}

        renew = server.server.tls.renew
        (first,) = shown()
        for port, path in ((server.ports.rest, "/v2/health/ready"), (server.ports.admin, "/status.json")):
            assert httpx.get(f"https://127.0.0.1:{port}{path}", verify=False, headers=ADMIN).status_code == 200
            with pytest.raises(httpx.HTTPError):
                httpx.get(f"http://127.0.0.1:{port}{path}")
        make_certificate("second", certificate, tmp_path / "second.pem")
        renew()
        assert shown() == {first}, "its key has not come yet"
        assert "the certificate is not renewed: no certificate" in caplog.text
        shutil.move(tmp_path / "second.pem", key)
        renew()
        (second,) = shown()
        assert second != first
    make_certificate("third", certificate, key, "-passout", "pass:secret")
    with pytest.raises(ValueError, match="has a pass phrase"):
        Tls(certificate, key)
