"""Hosts and workloads: measured, shipped, read back from files, and errors that name the key."""

import dataclasses
import json
import os
import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bench.data import ROOT
from tests.plan.hosts import SHOP_HOST, run
from tierstore.errors import TierstoreError
from tierstore.plan import SoftwareCosts, TableShape, Workload
from tierstore.plan import measure as measurement
from tierstore.plan.host import example_hosts, load_host, with_parts, write_host
from tierstore.plan.measure import Lab, measure
from tierstore.plan.workload import (
    Assumed,
    describe_workload,
    load_workload,
    presets,
    scaled,
    workload_toml,
)
from tierstore.train.build import build_model
from tierstore.train.config import load as load_run

HOST = dataclasses.replace(example_hosts()["node-1xh100"], name='a "name" with \\ and \x7f and é\n', usd=0.1 + 0.2)


def test_files_give_back_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "host.json"
    for host in (*example_hosts().values(), HOST, dataclasses.replace(HOST, storage=(), accelerators=())):
        write_host(host, path, force=True)
        assert host == load_host(str(path)) == load_host(path)
        assert [each.name for each in tmp_path.iterdir()] == [path.name]
        assert host.costs != SoftwareCosts()


def test_examples_have_every_figure_and_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("hosts") == 0
    said = capsys.readouterr().out
    for name, host in example_hosts().items():
        assert f"\n{name} " in f"\n{said}"
        for part in (host.processor, host.ddr, host.network, *host.storage, *host.accelerators):
            assert all(value or figure == "watts" for figure, value in vars(part).items()), (name, part)
    assert run("hosts", "node-1xh100") == 0
    (tmp_path / "mine.json").write_text(capsys.readouterr().out)
    assert load_host(tmp_path / "mine.json") == load_host("node-1xh100")
    assert "$14,960, 828 W" in said
    assert "All prices are assumptions" in said
    half = with_parts(load_host("node-1xh100"), memory_share=0.5, drives=1, gpus=0)
    assert (half.name, half.ddr.usd, half.ddr.watts) == ("node-1xh100 with 0 of 1 GPUs", 840, 24)
    assert (half.ddr.capacity_bytes, len(half.storage), half.accelerators) == (192 * 2**30, 1, ())


def changed(part: str, key: str, value: Any = None) -> str:
    document = json.loads(json.dumps(dataclasses.asdict(HOST)))
    inner = document[part][0] if isinstance(document[part], list) else document[part]
    inner.pop(key, None)
    inner |= {} if value is None else {key: value}
    return json.dumps(document)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("./host.txt", "", "a host's file is JSON"),
        ("mine.toml", "", "a host's file is JSON"),
        ("host.json", "{", "is not valid JSON"),
        ("host.json", "[" * 100_000, "is not valid JSON"),
        ("host.json", changed("processor", "flops"), 'processor: key "flops" is missing'),
        ("host.json", changed("costs", "write_ns", 9), 'unknown key "write_ns".*tierstore plan measure'),
        ("host.json", changed("storage", "reads_per_s", 0), r"storage\[0\]: reads_per_s=0.0: expected a number from 1"),
        ("host.json", changed("storage", "drive_writes_a_day", 0), "drive_writes_a_day=0.0: expected a number"),
        ("host.json", changed("storage", "capacity_bytes", 0), "capacity_bytes=0.0: expected a number from 1"),
        ("host.json", changed("ddr", "bytes_per_s", 0), "ddr: bytes_per_s=0.0: expected a number from 1"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(name: str, text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        load_host(path)
    assert str(caught.value).startswith(f"{path}: ")
    with pytest.raises(ValueError, match="cannot be read: No such"):
        load_host(tmp_path / "none.json")
    with pytest.raises(ValueError, match="there is no host named 'server-2'; did you mean 'server-2s'"):
        load_host("server-2")


def test_the_figures_in_the_documentation() -> None:
    text = (ROOT / "docs" / "planning" / "traces.md").read_text()
    published = list(map(load_workload, presets()))
    rows = {workload.name: sum(table.num_embeddings for table in workload.tables) for workload in published}
    assert rows == {
        "rmc1": 32_000_000, "rmc2": 16_000_000, "rmc3": 20_000_000, "criteo-kaggle": 33_762_577,
        "mlperf-dlrm-v2": 204_184_588,
    }  # fmt: skip
    for workload in published:
        assert re.search(rf"`{workload.name}`.* {int(workload.dense_flops):,} \| {workload.batch_samples:,}", text)


WHOLE = """
[workload]
batch_samples = 512
dtype = "float16"
dense_flops = 2_000_000
tables = [
    { name = "user", num_embeddings = 1_000, embedding_dim = 64 },
    { name = "tag", count = 3, num_embeddings = 50, embedding_dim = 8, pooling_factor = 12.5, exponent = 0.9 },
]
"""


def test_workloads_are_written_as_they_are_read(tmp_path: Path) -> None:
    for workload in map(load_workload, presets()):
        path = tmp_path / "workload.toml"
        path.write_text(workload_toml(workload))
        assert load_workload(path) == workload
        assert f"{len(workload.tables)} tables" in describe_workload(workload)
    with pytest.raises(ValueError, match="a number above 0"):
        scaled(load_workload("rmc1"), 0)


def test_a_workload_file(tmp_path: Path) -> None:
    path = tmp_path / "feed.toml"
    path.write_text(WHOLE)
    shape: dict[str, Any] = {"num_embeddings": 50, "embedding_dim": 8, "pooling_factor": 12.5, "exponent": 0.9}
    found, dense = load_workload(path), ("dense_products", "dense_values")
    assert found == Workload(
        name="feed",
        tables=(
            TableShape(name="user", num_embeddings=1000, embedding_dim=64),
            *(TableShape(name=f"tag{number}", **shape) for number in range(3)),
        ),
        batch_samples=512,
        dtype="float16",
        dense_flops=2_000_000,
        dense_products=found.dense_products,
        dense_values=found.dense_values,
        assumed=(Assumed("pooling_factor", ("user",)), Assumed("exponent", ("user",)), *map(Assumed, dense)),
    )


@pytest.mark.parametrize("interaction", ["dot", "dcn"])
def test_a_run_file_brings_its_tables_and_its_dense_model(tmp_path: Path, interaction: str) -> None:
    text = (ROOT / "examples" / "criteo.toml").read_text()
    (tmp_path / "run.toml").write_text(text.replace('interaction = "dot"', f'interaction = "{interaction}"'))
    found, run = load_workload(tmp_path / "run.toml"), load_run(tmp_path / "run.toml")
    assert [(each.name, each.num_embeddings, each.embedding_dim) for each in found.tables] == [
        (name, rows, 16) for name, rows in zip(run.data.sparse_columns, run.table_sizes, strict=True)
    ]
    assert (found.batch_samples, found.optimizer, found.dtype) == (32, "adagrad", "float32")
    model = build_model(run, torch.nn.Identity())  # type: ignore[arg-type]
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.dense_part(torch.zeros(4, 13), torch.zeros(4, 26 * 16))
    assert found.dense_flops == counter.get_total_flops() / 4
    # By hand: a layer of a inputs and b outputs, with its ReLU, a + 3 b; 13-256-16 and 367-128-64-1 or 432-128-64-1.
    crossing = {"dot": 4 * 27 * 16 + 2 * 27 * 27 + 351 + 2 * 367, "dcn": 2 * 432 + 2 * (2 * (432 + 32) + 6 * 432)}
    assert found.dense_values == crossing[interaction] + 1085 + {"dot": 1138, "dcn": 1203}[interaction]
    linears = [each for each in model.modules() if isinstance(each, torch.nn.Linear)]
    assert found.dense_products == len(linears) + (interaction == "dot")
    assert [each.figure for each in found.assumed] == ["pooling_factor", "exponent"]
    dynamic = load_workload(ROOT / "examples" / "criteo-dynamic.toml").tables
    assert {(each.ids, each.num_embeddings, each.candidates) for each in dynamic} == {("dynamic", 50_000, 50_000)}


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (
            "batch_samples",
            "batch_sample",
            r'unknown key "batch_sample" in \[workload\]; did you mean \'batch_samples\'',
        ),
        ("count = 3, ", "", "the workload has two tables 'user'"),
        (WHOLE, "[[table]]", r"write \[\[workload.tables\]\] in place of each \[\[table\]\]"),
        (WHOLE, "", r"or workload.file, or \[\[workload.tables\]\]"),
        (WHOLE, '[workload]\nfile = "x"', "give that file instead"),
        ("12.5", "-0.5", "pooling_factor=-0.5: expected a number from 0 to "),
    ],
)
def test_workload_files_that_cannot_be(tmp_path: Path, old: str, new: str, reason: str) -> None:
    path = tmp_path / "feed.toml"
    path.write_text(WHOLE.replace(old, new).replace('"tag"', '"user"'))
    with pytest.raises(ValueError, match=reason) as raised:
        load_workload(path)
    assert str(raised.value).startswith(str(path))


def test_a_whole_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told, threads = list[float](), torch.get_num_threads()
    for name, size in {"_TABLE_BYTES": 1 << 20, "_MATRIX": 64, "_LOOKUPS": 256, "_FILE_BYTES": 8 << 20}.items():
        monkeypatch.setattr(measurement, name, size)
    monkeypatch.setattr(measurement, "Lab", lambda folder, processor, **_: Lab(folder, processor, 6000, 256, 64, 1))
    try:
        host = measure(tmp_path, seconds=1.0, progress=lambda _, share: told.append(share))
    except TierstoreError as error:
        if "direct reads" not in str(error):
            raise
        pytest.skip(str(error))
    assert not list(tmp_path.iterdir())
    assert torch.get_num_threads() == threads
    with pytest.raises(ValueError, match=r"seconds=nan: expected a number from 1 to 3,600"):
        measure(tmp_path, seconds=float("nan"))
    assert told == sorted(told)
    (ssd,) = host.storage
    assert (host.accelerators, host.watts, host.usd, host.processor.usd) == ((), 0, 0, 0)
    assert min(host.ddr.bytes_per_s, host.ddr.row_bytes_per_s, host.processor.flops) > 1e4
    assert 1 < ssd.read_latency_us < 1e6
    assert ssd.reads_per_s >= 1e6 / ssd.read_latency_us * (1 - 1e-9), "one in flight is one of the depths"
    assert ssd.capacity_bytes >= os.statvfs(tmp_path).f_bavail
    for rate in (ssd.read_bytes_per_s, ssd.write_bytes_per_s):
        assert 1e5 < rate < 1e12
    assert 1 < host.costs.batch_us < 1e6
    assert host.costs.append_ns + host.costs.append_ns_per_byte + host.costs.transaction_us > 0
    assert all(0 <= value < 1e9 for value in vars(host.costs).values())


def test_nothing_is_left_where_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Path, *_: object, **__: object) -> None:
        (folder / "half").write_bytes(b"of it")
        raise KeyboardInterrupt

    measure_storage = measurement.measure_storage
    monkeypatch.setattr(measurement, "measure_storage", fail)
    monkeypatch.setattr(measurement, "measure_cores", lambda **_: (None, None))
    with pytest.raises(KeyboardInterrupt):
        measure(tmp_path, seconds=1)
    monkeypatch.setattr(measurement, "_reads_per_s", lambda path, *_: fail(path.parent))
    with pytest.raises(KeyboardInterrupt):
        measure_storage(tmp_path, seconds=0.1, file_bytes=8 << 20)
    assert [each.name for each in tmp_path.iterdir()] == ["half"]
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=100, f_frsize=4096, f_blocks=1000))
    with pytest.raises(ValueError, match=r"400.0 KiB are free, .*use --dir on another file system"):
        measure_storage(tmp_path, seconds=0.1, file_bytes=64 << 20)


def test_memory_is_no_disk(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="none is not a folder; make it first"):
        measurement.require_device(tmp_path / "none")
    with pytest.raises(ValueError, match="which lives in memory; use --dir"):
        measurement.require_device(Path("/dev/shm"))


def test_the_command_shows_and_saves_where_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measurement, "measure", lambda *_, **__: SHOP_HOST)
    path = tmp_path / "host.json"
    assert run("measure", "--dir", str(tmp_path), "--out", str(path)) == 0
    assert load_host(path) == SHOP_HOST
    shown = capsys.readouterr().out
    assert f"Saved as {path}" in shown
    assert all(each.name in shown for each in fields(SoftwareCosts))
    monkeypatch.setattr(measurement, "measure", lambda *_, **__: pytest.fail("a minute for nothing"))
    errors = {"host.json": FileExistsError, "host.toml": ValueError, "none/host.json": FileNotFoundError}
    for name, error in errors.items():
        with pytest.raises(error):
            run("measure", "--out", str(tmp_path / name))
    assert load_host(path) == SHOP_HOST
