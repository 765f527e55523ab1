"""Triton's model configuration and statistics, as its own client reads them over REST and gRPC."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from google.protobuf.json_format import MessageToDict
from tritonclient.utils import InferenceServerException

from tests.serve.whole import InThread, serving
from tests.updates.support import change
from tierstore.serve.messages import Status
from tierstore.serve.monitoring.metrics import Metrics


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InThread]:
    store = tmp_path_factory.mktemp("triton") / "store"
    change(store, 1)
    with serving(store) as running:
        yield running


@contextmanager
def connected(server: InThread, protocol: str) -> Iterator[tuple[Any, Any]]:
    """A client and its module."""
    module = tritonclient.http if protocol == "http" else tritonclient.grpc
    address = server.url.removeprefix("http://") if protocol == "http" else server.grpc
    with module.InferenceServerClient(address) as client:
        yield client, module


def as_dict(answer: Any) -> Any:
    """What gRPC's message says, as REST has it: with its zeros, numbers as numbers."""
    if isinstance(answer, dict):
        return answer
    return numbers(MessageToDict(answer, preserving_proto_field_name=True))


def numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: numbers(each) for name, each in value.items()}
    if isinstance(value, list):
        return [numbers(each) for each in value]
    return int(value) if isinstance(value, str) and value.lstrip("-").isdecimal() else value


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_models_configuration(server: InThread, protocol: str) -> None:
    with connected(server, protocol) as (client, _):
        about = as_dict(client.get_server_metadata())
        assert {"model_configuration", "statistics"} <= set(about["extensions"])
        found = as_dict(client.get_model_config("pooled"))
        config = found if protocol == "http" else found["config"]
        assert (config["name"], config["platform"], config["backend"]) == ("pooled", "tierstore", "tierstore")
        assert config.get("max_batch_size", 0) == 0
        assert config["input"] == [
            {"name": "values", "data_type": "TYPE_INT64", "dims": [-1]},
            {"name": "lengths", "data_type": "TYPE_INT32", "dims": [2, -1]},
        ]
        assert config["output"] == [{"name": "embeddings", "data_type": "TYPE_FP32", "dims": [-1, 11]}]
        assert config["parameters"] == {"features": {"string_value": "item,user"}}
        for name, version in (("nobody", ""), ("pooled", "99")):
            with pytest.raises(InferenceServerException, match=r"'nobody'|'99'"):
                client.get_model_config(name, version)


def ask(client: Any, module: Any, ids: list[int]) -> None:
    tensor = module.InferInput("ids", [len(ids)], "INT64")
    tensor.set_data_from_numpy(np.array(ids))
    client.infer("rows.item", [tensor])


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_statistics_grow_by_what_was_asked(server: InThread, protocol: str) -> None:
    with connected(server, protocol) as (client, module):

        def of(name: str = "rows.item", version: str = "") -> Any:
            (found,) = as_dict(client.get_inference_statistics(name, version))["model_stats"]
            return found

        def duration(found: Any, what: str) -> tuple[int, int]:
            told = found["inference_stats"][what]
            return told.get("count", 0), told.get("ns", 0)

        before = of()
        for ids in ([1], [2, 3], [4]):
            ask(client, module, ids)
        with pytest.raises(InferenceServerException):
            ask(client, module, [-1])
        after = of(version="1")
        assert (after["name"], str(after["version"])) == ("rows.item", "1")
        assert after["last_inference"] > 1.7e12
        for what in ("inference_count", "execution_count"):
            assert after[what] - before.get(what, 0) == 3
        for what, count in (("success", 3), ("fail", 1), ("queue", 3), ("compute_infer", 3)):
            counted, ns = map(int.__sub__, duration(after, what), duration(before, what))
            assert (counted, (what == "queue" or ns > 0) and 0 <= ns < 60e9) == (count, True), what  # at once: no queue
        spent = [duration(after, what)[1] for what in ("success", "queue", "compute_infer")]
        assert spent[0] >= spent[1] + spent[2]
        everything = as_dict(client.get_inference_statistics())["model_stats"]
        assert [each["name"] for each in everything] == [each.name for each in server.engine.models()]
        with pytest.raises(InferenceServerException, match="nobody"):
            client.get_inference_statistics("nobody")


def test_a_batchs_time_counts_for_each_of_its_requests() -> None:
    metrics = Metrics(["a", "b"])
    metrics.batched("a", 3, 50, [0.25, 0.5, 1.0], 2.0)
    metrics.batched("a", 1, 7, [0.25], 4.0)
    metrics.answered("a", "http", None, 3.0)
    metrics.answered("a", "grpc", None, 5.0)
    metrics.answered("a", "grpc", Status.DEADLINE, 7.0)
    found = metrics.statistics("a")
    assert found._replace(last_ms=0) == (0, 2, 8.0, 1, 7.0, 2, 4, 2.0, 10.0)
    assert metrics.statistics("b") == (0,) * 9
