"""The parts the benchmarks rest on. Whether they are fast is for them to say; here, whether they tell the truth."""

import importlib
import json
import time
from typing import Any

import numpy as np
import pytest

from bench import common, machine
from bench.common import Goal, Report, Run, Table, program
from bench.data import ROOT
from bench.peers import rocksdb_rows
from bench.rowdata import Rows, TierReader, build_flat, build_store, open_flat
from bench.serving import queries
from bench.serving.clients import Answer, Done
from bench.serving.http2 import GrpcClient
from bench.serving.load import open_loop
from tests.serve import fronts

ROWS = Rows(count=5000, dim=12, seed=3)


def test_each_configuration_has_its_program():
    for name in sorted(path.stem for path in (ROOT / "bench").glob("*.toml")):
        module = importlib.import_module(f"bench.{name}")
        assert hasattr(module, "run") or module.PARTS
        assert module.__doc__
        assert common.load_config(ROOT / "bench" / f"{name}.toml", quick=True)


def test_all_ways_read_the_same_rows(tmp_path):
    expected = np.concatenate([chunk for _, chunk in ROWS.chunks()])
    ids = np.random.default_rng(0).permutation(ROWS.count)[:700]
    assert np.array_equal(open_flat(build_flat(tmp_path, ROWS), ROWS), expected)
    for verify in (True, False):
        reader = TierReader(build_store(tmp_path, ROWS), ROWS, len(ids), verify=verify)
        reader.read(ids[:300])
        reader.read(ids[300:], 300)
        assert np.array_equal(reader.rows(), expected[ids])
        reader.close()
    if rocksdb_rows.is_there():  # make peers brings it
        keyed = rocksdb_rows.RocksdbRows(tmp_path, ROWS, threads=3)
        assert np.array_equal(keyed.read(ids), expected[ids])
        keyed.close()


@pytest.mark.parametrize(("flags", "size", "goals"), [([], 100, 1), (["--quick"], 1, 0)])
def test_program(flags, size, goals, tmp_path, capsys, monkeypatch):
    def answer(request: Run) -> Report:
        table = Table(title="t", columns=["size"], rows=[[str(request.config["size"])]])
        return Report(question="How large?", tables=[table], figures={}, goals=[Goal(name="g", value=1, at_least=2)])

    config, target = tmp_path / "nothing.toml", tmp_path / "out" / "nothing.json"
    config.write_text("size = 100\n[quick]\nsize = 1\n")
    monkeypatch.setattr(common, "RESULTS", tmp_path / "results")
    given = ["--config", str(config), "--dir", str(tmp_path / "work"), *flags]
    assert program("nothing", answer, given) == 0
    assert (tmp_path / "results" / "nothing.json").exists() is not bool(flags)
    assert program("nothing", answer, [*given, "--json", str(target)]) == 0
    found: dict[str, Any] = json.loads(target.read_text())
    assert found["config"] == {"size": size}
    assert found["quick"] is bool(flags)
    assert len(found["goals"]) == goals
    assert found["machine"]["cores"] >= 1
    shown = capsys.readouterr().out
    assert "How large?" in shown
    assert machine.summary(found["machine"]) in shown


class Slow:
    """Holds the loop up before it answers each request."""

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    def ask(self, request: bytes, done: Done) -> None:
        time.sleep(0.05)
        done(Answer(request))


def test_latency_counts_from_when_a_request_was_due():
    load = open_loop(Slow(), [b"x"] * 5, np.zeros(5))
    assert (np.diff(load.latency) >= 0.05).all()
    assert load.latency[-1] >= 0.25
    assert load.late[-1] >= 0.2
    assert load.num_failed == 0


def test_calls_over_sockets_are_grpcs():
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
