"""Several stores in one server: named, and apart from each other."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.serve.fronts import MODULES, PROTOCOLS, refused, tensor
from tests.serve.loops import wait_for
from tests.serve.test_fronts import as_dict
from tests.serve.whole import ADMIN, InThread, serving
from tests.updates.support import ROWS, change
from tierstore.serve import batching
from tierstore.serve.config import ServeConfig, StoreConfig
from tierstore.serve.messages import Status
from tierstore.serve.program import recording_paths, worker_config
from tierstore.serve.repository import configs_of
from tierstore.settings.sections import described

IDS = np.arange(0, ROWS, 7)
LENGTHS, WEIGHTS = np.full(1, len(IDS), np.int32), np.linspace(-1, 1, len(IDS), dtype=np.float32)
INPUTS = {"ids": IDS, "lengths": LENGTHS, "weights": WEIGHTS}


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("stores")
    for seed, name in enumerate("ab"):
        change(folder / name, seed)
    return {name: folder / name for name in "ab"}


def named(stores: dict[str, Path], **settings: Any) -> dict[str, Any]:
    own = [StoreConfig(name=name, path=str(path), **settings.pop(name, {})) for name, path in stores.items()]
    return {"stores": tuple(own)} | settings


@pytest.fixture(scope="module")
def both(stores: dict[str, Path]) -> Iterator[InThread]:
    with serving(**named(stores)) as server:
        yield server


def triton(server: InThread, protocol: str) -> Any:
    address = server.grpc if protocol == "grpc" else server.url.removeprefix("http://")
    return MODULES[protocol].InferenceServerClient(address)


def ask(server: InThread, protocol: str, model: str, **inputs: Any) -> tuple[str, bytes]:
    kinds = {"int64": "INT64", "int32": "INT32", "float32": "FP32"}
    given = [tensor(protocol, name, kinds[str(each.dtype)], each) for name, each in inputs.items()]
    with triton(server, protocol) as client:
        answer = client.infer(model, given)
        about = as_dict(answer.get_response())
        return about["model_version"], answer.as_numpy(about["outputs"][0]["name"]).tobytes()


def rows(server: InThread, protocol: str, store: str) -> tuple[str, bytes]:
    return ask(server, protocol, f"{store}.rows.item", ids=IDS)


def listed(server: InThread, protocol: str = "http") -> list[str]:
    with triton(server, protocol) as client:
        index = as_dict(client.get_model_repository_index())
    models = index if isinstance(index, list) else index["models"]
    assert {each["state"] for each in models} == {"READY"}
    return [each["name"] for each in models]


def test_answers_are_those_of_two_servers_to_the_bit(stores, both):
    names = []
    for store, path in stores.items():
        with serving(path) as single:
            for model in listed(single):
                names.append(f"{store}.{model}")
                wanted = {name: INPUTS[name] for name in (["ids"] if model.startswith("rows") else INPUTS)}
                if "." not in model:
                    wanted = {"values": np.tile(IDS, 2), "lengths": np.full((2, 1), len(IDS), np.int32)}
                for protocol in PROTOCOLS:
                    assert ask(both, protocol, names[-1], **wanted) == ask(single, protocol, model, **wanted)
    for protocol in PROTOCOLS:
        assert listed(both, protocol) == names
        with triton(both, protocol) as client:
            assert client.get_model_metadata("b.rows.item", "1")
        with refused(Status.NOT_FOUND, "did you mean 'a.rows.item'"):
            ask(both, protocol, "aa.rows.item", ids=IDS)
    assert rows(both, "http", "a") != rows(both, "http", "b")


def test_clients_metrics_and_logs_have_the_stores(both, caplog):
    ok = {"model": "a.rows.item", "status": "ok"}
    before = both.metric("tierstore_request_seconds_count", **ok)
    assert rows(both, "http", "a") == rows(both, "grpc", "a")
    with refused(Status.INVALID):
        ask(both, "http", "a.rows.item", ids=np.array([ROWS]))
    (failed,) = [each for each in caplog.records if "request failed" in each.message]
    assert failed.__dict__["model"] == "a.rows.item"
    assert both.metric("tierstore_request_seconds_count", **ok) == before + 2
    assert both.metric("tierstore_ready", store="b") == both.metric("tierstore_version", store="b") == 1
    assert httpx.post(f"{both.admin}/admin/refresh", headers=ADMIN).json() == {"version": {"a": 1, "b": 1}}


def test_the_queue_of_one_store_keeps_nobody_from_another(stores, protocol, monkeypatch):
    """Not by its batch that runs on and on, its full queue, nor by the connections and calls of those who wait."""
    monkeypatch.setattr(batching, "MAX_QUEUE_REQUESTS", 2)
    with serving(**named(stores, connections=8)) as server, ThreadPoolExecutor(4) as pool:
        engine = server.engine
        with server.held(engine._executor):
            waiting = [pool.submit(rows, server, protocol, "a") for _ in range(2)]
            wait_for(lambda: len(engine._served["a.rows.item"].batcher._present) == 2)
            with refused(Status.OVERLOADED, "2 requests wait already"):
                rows(server, protocol, "a")
            waiting.append(pool.submit(ask, server, protocol, "a.rows.user", ids=IDS))
            wait_for(lambda: engine._served["a.rows.user"].batcher._present)
            assert rows(server, protocol, "b")
            assert ask(server, protocol, "b.pooled.item", **INPUTS)
            if protocol == "http":
                with refused(Status.OVERLOADED, "store 'a' has its part"):
                    ask(server, protocol, "a.pooled.item", **INPUTS)
        assert len({each.result() for each in waiting[:2]}) == 1


def test_stores_share_memory_by_their_size(stores, tmp_path):
    change(tmp_path / "item", 3, names=("item",))
    given = named(stores | {"c": tmp_path / "item"}, a={"ddr": "1MiB"}, ddr=7000)
    config = ServeConfig(**given)
    assert {name: each.ddr for name, each in configs_of(config).items()} == {"a": "1MiB", "b": 4156, "c": 2843}
    of_tables = configs_of(replace(config, ddr="5% of tables"))
    assert [each.ddr for each in of_tables.values()] == ["1MiB", "5% of tables", "5% of tables"]
    stored = tuple(replace(each, record=f"{each.name}.npz") for each in config.stores)
    config = replace(config, stores=stored, workers=2, ddr="50%")
    assert [each.ddr for each in worker_config(config, 1).by_store().values()] == ["0.500000MiB"] + ["25.000000%"] * 2
    assert [os.path.basename(each) for each in recording_paths(config)] == [
        f"{name}.{index}.npz" for index in (0, 1) for name in "abc"
    ]


A, B = {"path": "x/a"}, {"path": "x/b"}
WRONG: dict[str, dict[str, Any]] = {
    "TLS wants both": {"store": "x", "tls_key": "key.pem"},
    "admin_host='0.0.0.0' lets other machines in": {"store": "x", "admin_host": "0.0.0.0"},
    "several workers share given ports": {"store": "x", "workers": 2, "port": 0},
    "max_queue_samples=100 is below max_batch_samples=4096": {"store": "x", "max_queue_samples": 100},
    "admin_port=65535 + 1": {"store": "x", "workers": 2, "admin_port": 65_535},
    "a canary is a replica": {"store": "x", "canary": True},
    "store and stores are both named": {"store": "x", "stores": [A]},
    "'a': a store has a name of its own": {"stores": [A, {"path": "y/a"}]},
    "'a.b': a store has a name": {"stores": [A, {"path": "x/a.b"}]},
    "model is of one store, and there are 2": {"stores": [A, B], "model": "m.pt2"},
    "watch is of one store": {"stores": [A, B], "watch": "d.tsv"},
    "start a server for each replica": {"stores": [A, B], "sources": ["http://a"]},
    'unknown key "dddr"': {"stores": [A, B | {"dddr": "1"}]},
    "stores: a: max_queue_samples=5 is below": {"stores": [A | {"max_queue_samples": 5}, B]},
}


def test_settings_that_cannot_be():
    for message, given in WRONG.items():
        with pytest.raises(ValueError) as caught:
            described(ServeConfig, given)
        assert message in str(caught.value)
