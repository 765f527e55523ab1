"""The serving benchmark: whether its load, its checks and its search tell the truth, and that each part runs."""

import asyncio
import time
import tomllib
from pathlib import Path

import numpy as np
import pytest

from bench.common import Run
from bench.data import ROOT
from bench.peers import redis_rows
from bench.serving import queries
from bench.serving.clients import Answer, Done, RestClient
from bench.serving.http2 import GrpcClient
from bench.serving.load import open_loop
from bench.serving.zoo import OPERATORS, ZooModel, by_operator
from tests.serve import fronts
from tierstore.serve.rest.infer_body import parse_infer


class Echo:
    """Answers each request after some seconds, or at once and holding the loop up all the while."""

    def __init__(self, seconds: float = 0.0, *, is_blocking: bool = False, error: str = "") -> None:
        self.seconds, self.is_blocking, self.error = seconds, is_blocking, error

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    def ask(self, request: bytes, done: Done) -> None:
        if self.is_blocking:
            time.sleep(self.seconds)
            done(Answer(request))
        else:
            asyncio.get_running_loop().call_later(self.seconds, done, Answer(request, self.error))


def test_latency_counts_from_when_a_request_was_due() -> None:
    load = open_loop(Echo(0.05, is_blocking=True), [b"x"] * 5, np.zeros(5))
    assert (np.diff(load.latency) >= 0.05).all()
    assert load.latency[-1] >= 0.25
    assert load.late[-1] >= 0.2
    assert load.num_failed == 0


def test_queries_are_what_the_server_reads() -> None:
    law = queries.Ranking([3, 1000], 1.05)
    drawn = law.draw(np.random.default_rng(0), 20)
    assert sorted(len(query.inputs["dense"]) for query in drawn) == sorted(queries.QUERY_SIZES)
    query = drawn[0]
    head, _, body = queries.encoded_rest(query).partition(b"\r\n\r\n")
    headers = dict(line.split(": ") for line in head.decode().splitlines()[1:])
    assert len(body) == int(headers["Content-Length"])
    call = parse_infer(
        body, json_bytes=int(headers["Inference-Header-Content-Length"]), json_bytes_max=10_000, model="ranking"
    )
    assert {name: tensor.data.tolist() for name, tensor in call.request.inputs.items()} == {
        name: array.tolist() for name, array in query.inputs.items()
    }
    samples = len(query.inputs["dense"])
    assert query.inputs["values"][:samples].max() < 3
    assert query.inputs["values"][samples:].max() >= 3


def test_answers_are_whole_only_at_their_end() -> None:
    client = RestClient("", 0, 0)
    text = b"HTTP/1.1 200 OK\r\nInference-Header-Content-Length: 1\r\nContent-Length: 3\r\n\r\nabc"
    assert [client.whole(bytearray(text[:size])) for size in range(len(text))] == [None] * len(text)
    assert client.whole(bytearray(text)) == Answer(b"abc")
    failed = client.whole(bytearray(text.replace(b"200 OK", b"503 No")))
    assert failed is not None
    assert failed.error == "503: abc"


def test_calls_over_sockets_are_grpcs() -> None:
    """Several after each other, longer than any window at first, both ways; and one that fails."""
    arrays = [np.arange(size, dtype=np.int64) for size in (1, 300_000, 0, 1_000_000, 20)]
    requests = [queries.encoded_grpc(queries.Query("echo", {"x": each})) for each in arrays]
    answers: list[tuple[int, Answer]] = []
    with fronts.serving("grpc") as served:
        failing = queries.encoded_grpc(queries.Query("full", {"x": arrays[0]}))
        client = GrpcClient("127.0.0.1", served.port, 2)
        load = open_loop(client, [*requests, failing], np.zeros(6), lambda *each: answers.append(each))
    bodies = {index: answer.body for index, answer in answers}
    for index, (request, array) in enumerate(zip(requests, arrays, strict=True)):
        assert bodies[index].endswith(array.tobytes())
        assert len(bodies[index]) == pytest.approx(len(request), abs=20)
    assert load.num_failed == 1
    assert "the queue is full" in load.errors[0]


def test_every_operator_takes_time_and_torch_agrees(tmp_path: Path) -> None:
    config = tomllib.loads((ROOT / "bench" / "plan.toml").read_text())
    request = Run(config=config | config["quick"], quick=True, folder=tmp_path)
    for seconds in by_operator(ZooModel(request, "rmc1"))["sizes"].values():
        assert min(seconds.values()) > 0
        assert sum(seconds[name] for name in OPERATORS) == seconds["all"]


@pytest.mark.skipif(not redis_rows.is_there(), reason="there is no redis-server")
def test_redis_gives_the_rows_it_was_given(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).random((5000, 16), np.float32)
    ids = np.array([0, 4999, 17, 17])
    answers: list[bytes] = []
    with redis_rows.RedisServer([rows[:3000], rows[3000:]], log=tmp_path / "log") as server:
        client = redis_rows.RedisClient(server.port, 2, commands=3, dim=16)
        request = redis_rows.encoded_mget(ids, 3)
        open_loop(client, [request], np.zeros(1), lambda _, answer: answers.append(answer.body))
    assert redis_rows.rows_of(answers[0], 16) == rows[ids].tobytes()
