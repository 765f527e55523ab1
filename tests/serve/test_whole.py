"""Whole servers: of a training run, as replicas, watched, warming up, behind a token, with TLS and a program."""

import asyncio
import copy
import itertools
import logging
import math
import os
import shutil
import socket
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import tritonclient.grpc
from torch import Tensor

import tierstore
from tests.serve.clients import Client
from tests.serve.fronts import refused
from tests.serve.fronts import tensor as front_tensor
from tests.serve.loops import wait_for
from tests.serve.models.stores import save, tensor
from tests.serve.replicas import publishing
from tests.serve.test_engine import ids_of
from tests.serve.whole import ADMIN, ADMIN_TOKEN, make_certificate, serving
from tests.train.runs import TRAIN_ROWS, commit_scaled
from tests.updates.support import ROWS, SMALL, change, make, table_config
from tierstore.cli import entry as cli
from tierstore.models import DLRM
from tierstore.serve import hot_rows
from tierstore.serve.config import ServeConfig
from tierstore.serve.credentials import Tls
from tierstore.serve.engine import StoreEngine
from tierstore.serve.messages import ServeError, Status
from tierstore.serve.watch import LabelledRows, Watch, WatchReading
from tierstore.train.build import build_run, open_data, open_run_store
from tierstore.train.checkpoint import Position, commit_run, restore_run
from tierstore.train.config import RunConfig
from tierstore.train.readers import DataError
from tierstore.updates.apply import apply_update

pytestmark = pytest.mark.usefixtures("warm_writer")
BATCH = 32


def go_on(config: RunConfig, back_to: int = 0) -> tuple[str, Any]:
    """Train a step, which changes dense weights and rows, or go back; the version then, and the trainer's own answer
    for the first rows of the test data."""
    reader, hasher = open_data(config)
    batch = next(iter(reader.batches(hasher, batch_size=BATCH, start_row=TRAIN_ROWS, stop_row=TRAIN_ROWS + BATCH)))
    with open_run_store(config) as store:
        if back_to:
            store.rollback(back_to)
        run = build_run(config, store)
        restore_run(run)
        if not back_to:
            logits = run.model(batch.dense, batch.sparse)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
            run.optimizer.zero_grad()
            (loss * 100).backward()
            run.optimizer.step()
            commit_run(run, Position()).result()
        with torch.no_grad():
            return str(store.version), torch.sigmoid(run.model(batch.dense, batch.sparse)).numpy().tobytes()


@pytest.fixture(scope="module")
def question(run: RunConfig) -> dict[str, Any]:
    raw = next(iter(open_data(run)[0].read_chunks(TRAIN_ROWS, TRAIN_ROWS + BATCH, BATCH)))
    lengths = np.diff(raw.categories.offsets).astype(np.int32)
    dense = np.nan_to_num(raw.dense, nan=0.0)
    return {"dense": dense, "values": np.concatenate(raw.categories.columns), "lengths": lengths}


def ranked(client: Client, question: dict[str, Any]) -> tuple[str, bytes]:
    answer = client.infer("ranking", question)
    return answer.version, answer.outputs["probabilities"].tobytes()


def test_dense_weights_and_rows_of_a_run_move_together(run: RunConfig, question: dict[str, Any]) -> None:
    expected, answers, done = dict([go_on(run)]), list[tuple[str, bytes]](), threading.Event()
    with serving(Path(run.store.path)) as server, ThreadPoolExecutor(1) as pool:

        def ask() -> None:
            grpc: Any = tritonclient.grpc.InferenceServerClient(server.grpc)
            kinds = {"dense": "FP32", "values": "INT64", "lengths": "INT32"}
            inputs = [front_tensor("grpc", name, kinds[name], each) for name, each in question.items()]
            with Client(server.url) as client, grpc:
                while not done.is_set():
                    answers.append(ranked(client, question))
                    found = grpc.infer("ranking", inputs)
                    bits = found.as_numpy("probabilities").tobytes()
                    answers.append((found.get_response().model_version, bits))

        asking = pool.submit(ask)
        try:
            for _ in range(4):
                version, bits = go_on(run)
                expected[version] = bits
                wait_for(lambda version=version: asking.done() or (answers and answers[-1][0] == version))
            *_, back, _, _ = expected
            assert go_on(run, int(back)) == (back, expected[back])
            wait_for(lambda: asking.done() or answers[-1][0] == back)
        finally:
            done.set()
        asking.result()
    assert set(answers) <= set(expected.items())
    assert len(set(answers)) >= 4
    assert len(set(expected.values())) == len(expected)


def test_a_replica_of_a_run_ranks_as_its_source(run: RunConfig, question: dict[str, Any], tmp_path: Path) -> None:
    with (
        publishing(Path(run.store.path)) as publisher,
        serving(tmp_path / "replica", sources=(publisher.url,)) as server,
        Client(server.url) as client,
    ):
        assert not client.ready()
        with refused(Status.UNAVAILABLE):
            client.rank(**question)
        expected = []
        for _ in range(2):
            expected.append(go_on(run))
            publisher.step()
            wait_for(client.ready)
            wait_for(lambda: str(server.engine.version) == expected[-1][0])
            assert ranked(client, question) == expected[-1]
        back = httpx.post(f"{server.admin}/admin/rollback", headers=ADMIN, timeout=60)
        assert back.json() == {"version": int(expected[0][0])}
        assert ranked(client, question) == expected[0]
        assert httpx.post(f"{server.admin}/admin/rollback", headers=ADMIN, timeout=60).status_code in (422, 500)
        assert server.metric("tierstore_version") == int(expected[0][0])
        assert server.metric("tierstore_update_failures_total") == 0


def test_hot_rows_are_kept_while_serving_and_over_a_restart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They are not written through a name that another made, and not read from what is no plain file."""
    store, other = tmp_path / "store", tmp_path / "other"
    change(store, 1)
    ids = list(range(0, ROWS, 3))
    other.write_bytes(b"mine")
    hot_rows.hot_rows_path(store).with_name(f"store.hot.{os.getpid()}.partial").symlink_to(other)
    with serving(store, warm_up="auto") as server, Client(server.url) as client:
        want = client.rows(ids, table="item")
        client.rows([5, 8], table="user")
        keeping = asyncio.run_coroutine_threadsafe(server.engine.keep_hot_rows(0.01), server.loop)
        wait_for(hot_rows.hot_rows_path(store).exists)
        keeping.cancel()
        kept = np.fromfile(hot_rows.hot_rows_path(store), "<i8")
        assert (kept[kept >> 40 == 1] - (1 << 40)).tolist() == [0, 5, 8]  # row 0 of the rehearsal
    assert other.read_bytes() == b"mine"
    with serving(store, warm_up="auto") as server, Client(server.url) as client:
        before = server.engine.state().tiers.ddr
        assert before.misses == len(ids) + 3
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
        assert hot_rows.warm_up(store, found, lambda: True) == 0, "it is stopped, as by a signal"
        assert 0 < hot_rows.warm_up(store, found, lambda: False) <= room


def test_warm_up_from_a_trace(run: RunConfig, tmp_path: Path) -> None:
    trace, run_file = tmp_path / "run.npz", tmp_path / "run.toml"
    run_file.write_text(
        f'[data]\npath = "{run.data.path}"\ntrain_rows = 200\ntest_rows = 50\n'
        "[embedding]\ndim = 4\nnum_embeddings = 150\n[train]\nbatch_size = 32\nepochs = 1\n"
        f'[store]\npath = "{run.store.path}"\n'
    )
    assert cli.main(["trace", str(run_file), str(trace)]) == 0
    with serving(Path(run.store.path), warm_up=str(trace), ddr="8MiB") as server, Client(server.url) as client:
        misses = server.engine.state().tiers.ddr.misses
        assert misses > 500
        client.rows(hot_rows.rows_of_trace(trace)["C1"], table="C1")
        assert server.engine.state().tiers.ddr.misses == misses
    with pytest.raises(ValueError, match=r"run\.toml"), serving(run.store.path, warm_up=str(run_file)):
        pass


def test_an_event_time_reaches_a_replica_its_server_and_the_metrics(tmp_path: Path) -> None:
    source, replica, begin = tmp_path / "source", tmp_path / "replica", time.time() - 200
    change(source, 1)

    def commit(event_time: float) -> None:
        with tierstore.open(source, **SMALL) as store:
            store.commit(extra={"event_time": event_time}, tensors={})
            assert store.stats().event_time == event_time
        apply_update(replica, make(source).path)

    commit(begin)
    with serving(replica) as server:
        assert server.metric("tierstore_event_time_seconds") == pytest.approx(begin)
        assert 200 <= (to_served := server.metric("tierstore_event_to_served_seconds")) < 260
        commit(begin + 190)
        wait_for(lambda: server.engine.state().event_time_seconds == begin + 190)
        assert 10 <= server.engine.state().event_to_served_seconds < to_served - 100


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
        for token in ("", ADMIN_TOKEN):
            with Client(server.url, token=token) as client, refused(Status.UNAUTHENTICATED):
                client.rows([1], table="item")
        with Client(server.url, token="s3cret") as client:
            assert client.rows([1], table="item").shape == (1, 6)
        with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
            with refused(Status.UNAUTHENTICATED):
                client.infer("rows.item", ids_of([1]))
            found = client.infer("rows.item", ids_of([1]), headers={"authorization": "Bearer s3cret"})
            assert found.as_numpy("rows").shape == (1, 6)
        shown = [httpx.get(f"{server.admin}/metrics", headers=headers).status_code for headers in ({}, bearer, ADMIN)]
        assert shown == [401, 401, 200]
        refresh = f"{server.admin}/admin/refresh"
        assert httpx.post(refresh, headers=ADMIN | bearer).status_code == 401
        assert httpx.post(refresh, headers=ADMIN).json() == {"version": 1}
    with pytest.raises(ValueError, match="holds the token of clients"):
        _ = ServeConfig(store=str(plain), token_file=str(token_file), admin_token_file=str(token_file)).admin_token


def test_without_an_admin_token_nothing_is_changed_whoever_asks(plain: Path) -> None:
    """A proxy on this machine may ask as the machine itself does."""
    with serving(plain, admin_token_file="") as server:
        assert httpx.get(f"{server.admin}/metrics").status_code == 200
        for call in ("refresh", "rollback"):
            refused = httpx.post(f"{server.admin}/admin/{call}", headers=ADMIN)
            assert refused.status_code == 403
            assert "--admin-token-file" in refused.json()["error"]
        assert httpx.get(f"{server.url}/v2/health/ready").status_code == 200


def shown_certificate(port: int) -> bytes:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2", "http/1.1"])
    with context.wrap_socket(socket.create_connection(("127.0.0.1", port), 20)) as secured:
        return secured.getpeercert(binary_form=True) or b""


def test_a_renewed_certificate_is_shown_on_all_ports(plain, tls, tmp_path, caplog):
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    make_certificate("first", certificate, key)
    with serving(plain, tls_certificate=str(certificate), tls_key=str(key)) as server:
        ports = (server.ports.rest, server.ports.grpc, server.ports.admin)

        def shown() -> set[bytes]:
            return {shown_certificate(port) for port in ports}

        renew = server.server.tls.renew
        (first,) = shown()
        for port, path in ((server.ports.rest, "/v2/health/ready"), (server.ports.admin, "/metrics")):
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


WATCHED = 230  # rows: more than one request, and no whole number of them


def commit_and_evaluate(run: RunConfig, factor: float) -> tuple[int, float]:
    reader, hasher = open_data(run)
    (batch,) = reader.batches(hasher, batch_size=WATCHED, stop_row=WATCHED)

    def loss_of(model: DLRM) -> float:
        logits = model(batch.dense, batch.sparse)
        return torch.nn.functional.binary_cross_entropy_with_logits(logits.double(), batch.labels.double()).item()

    return commit_scaled(run, factor, loss_of)


def test_each_version_is_measured_and_a_worse_one_is_told_of(run: RunConfig, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"watch": run.data.path, "watch_rows": WATCHED, "watch_loss": 0.02}
    caplog.set_level(logging.INFO)
    first = None
    with serving(Path(run.store.path), **settings) as server:
        for factor, holds in ((1.0, True), (1.01, True), (-1.0, False)):
            version, loss = commit_and_evaluate(run, factor)
            first = first or loss
            assert (loss <= 1.02 * first) == holds
            wait_for(lambda version=version: server.metric("tierstore_watch_version") == version)
            assert server.metric("tierstore_watch_log_loss") == pytest.approx(loss, rel=1e-5)
            assert 0 < server.metric("tierstore_watch_auc") < 1
            assert server.metric("tierstore_watch_rows") == WATCHED
            said = [each for each in caplog.records if f"version {version} has a log loss of" in each.message]
            assert [each.levelname for each in said] == ["INFO" if holds else "WARNING"]
        assert server.metric("tierstore_request_seconds_count") == 0, "they are not a client's requests"


@pytest.mark.parametrize("changes", [False, True])
def test_a_reading_ends_and_bears_its_first_version(changes: bool, caplog: pytest.LogCaptureFixture) -> None:
    """However fast versions come: the last one is then measured next."""
    caplog.set_level(logging.INFO)
    asked = iter(range(9))

    async def score(inputs: Any) -> tuple[Any, int]:
        return inputs["dense"].data[:, 0], 7 + changes * next(asked)

    rows = [LabelledRows({"dense": tensor("FP32", [[p]])}, np.array([label]), (None, np.array([group])))
            for p, label, group in ((0.9, True, 5), (0.2, False, 5), (1.0, False, 6))]  # fmt: skip
    commits = iter("abaa")
    watch = Watch(score, rows, bound=0.1, store="store", commit_id=lambda: next(commits))
    with pytest.raises(ServeError, match="the version changed as") as caught:
        asyncio.run(watch.measure())
    assert (caught.value.status, watch.last) == (Status.UNAVAILABLE, None)
    asked = iter(range(9))
    found = asyncio.run(watch.measure())
    assert found.commit_id == "a"
    want = -np.log([0.9, 0.8, 2.0**-24]).mean()
    assert (found.version, found.rows, found.log_loss) == (7, 3, pytest.approx(want, rel=1e-6))
    assert (found.auc, found.gauc, found.calibration) == (0.5, 1, pytest.approx(2.1))
    assert ("version 7 (to 9 in the end) has" if changes else "version 7 has") in caplog.text
    rows[1] = rows[1]._replace(inputs={"dense": tensor("FP32", [[math.nan]])})
    commits, asked = iter("bb"), iter(range(9))
    found = asyncio.run(watch.measure())
    assert (found, found.commit_id, found.rows, found.holds) == (watch.last, "b", 3, False)
    assert math.isnan(found.log_loss)
    holds, commits = [], itertools.repeat("c")
    watch = Watch(score, rows, bound=0.1, store="store", commit_id=lambda: next(commits))
    for chance in (math.nan, 0.2, math.nan, 0.2, 0.9):
        rows[1] = rows[1]._replace(inputs={"dense": tensor("FP32", [[chance]])})
        asked = itertools.count()
        holds.append(asyncio.run(watch.measure()).holds)
    assert holds == [False, True, False, True, False], "the first that is a number is the bound's"


def test_another_commit_of_the_same_number_is_measured() -> None:
    """A source restored from a copy uses numbers again."""
    engine: Any = SimpleNamespace(_config=SimpleNamespace(watch="rows"), _is_ready=True, version=3, commit_id="a")
    measured = []

    async def measure() -> None:
        measured.append(engine.commit_id)
        engine.watched.last = WatchReading(3, 0.5, 9, True, engine.commit_id)
        engine.commit_id = {"a": "b"}.get(engine.commit_id, "c")

    engine.watched = SimpleNamespace(last=None, measure=measure)
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(StoreEngine.watch_loss(engine), 1))
    assert measured == ["a", "b", "c"]


def test_what_cannot_be_watched_is_said_before_the_server_is_ready(run: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "empty.tsv").write_text("")
    for name, error, says in (("none", DataError, "does not exist"), ("empty.tsv", ValueError, "no rows")):
        with pytest.raises(error, match=says), serving(run.store.path, watch=str(tmp_path / name)):
            pass


class Scored(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = torch.nn.Linear(6, 1)

    def forward(self, item: Tensor) -> Tensor:
        return self.out(item)


class Trained(torch.nn.Module):
    """Of which ``Scored`` is a part."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Scored()
        self.other = torch.nn.Linear(6, 1)


def test_dense_weights_are_those_of_the_version_if_it_has_them_and_without_its_table_no_model(tmp_path, caplog):
    """Else they are the file's, also after another version had them; the metadata and the log tell which."""
    directory, model = tmp_path / "store", Trained()
    program = save(model.part, tmp_path / "scored.pt2", torch.zeros(2, 6))
    of_file = copy.deepcopy(model.part)

    def commit(scale: float, way: str) -> None:
        with torch.no_grad():
            model.part.out.weight.fill_(scale)
        with tierstore.open(directory, **SMALL) as store:
            if way == "no table":
                store.change_table("item", name="gone")
            elif "gone" in store.tables:
                store.change_table("gone", name="item")
            if way != "no table":
                store["item"].write(torch.arange(2), torch.full((2, 6), scale))
            if way == "checkpoint":
                tierstore.checkpoint.save(store, model)
            else:
                weights = {f"model.{name}": each for name, each in model.state_dict().items()}
                store.commit(tensors=weights if way == "tensors" else {})

    caplog.set_level(logging.INFO, "tierstore")
    change(directory, 1, names=("item",))
    inputs = {"values": np.array([0, 1]), "lengths": np.array([[1, 1]], np.int32)}
    with serving(directory, model=str(program)) as server, Client(server.url) as client:
        for version, way in enumerate(("checkpoint", "tensors", "", "no table", "checkpoint"), 2):
            commit(float(version), way)
            wait_for(lambda version=version: server.engine.version == version)
            if way == "no table":
                with refused(Status.NOT_FOUND, "no model 'scored'"):
                    client.infer("scored", inputs)
                assert f"version {version} is served without the model of" in caplog.text
                continue
            answer = client.infer("scored", inputs)
            with torch.no_grad():
                want = (model.part if way else of_file)(torch.full((2, 6), float(version)))
            assert answer.outputs["output"].tobytes() == want.numpy().tobytes(), way
            assert answer.version == str(version)
            told = "of the version" if way else "of the file"
            assert client.get("/v2/models/scored").json()["parameters"]["dense_weights"] == told
            where = "the version" if way else "its file"
            assert f"model scored: version {version} with the dense weights of {where}" in caplog.text
