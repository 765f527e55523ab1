"""The parts the benchmarks rest on. Whether they are fast is for them to say; here, whether they tell the truth."""

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import device, machine
from bench.common import Goal, Part, Report, Run, Table, program, run_parts
from bench.data import ROOT, criteo_keys
from bench.peers import rocksdb_rows
from bench.rowdata import Rows, TierReader, build_flat, build_store, open_flat
from tierstore.plan.measure import READ_BYTES, page_cache

ROWS = Rows(count=5000, dim=12, seed=3)
PROGRAMS = sorted(path.stem for path in (ROOT / "bench").glob("*.toml"))


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_configuration_has_its_program(name: str) -> None:
    module = importlib.import_module(f"bench.{name}.runner" if name == "gpu" else f"bench.{name}")
    assert hasattr(module, "run") or module.PARTS
    assert module.__doc__


def test_all_ways_read_the_same_rows(tmp_path: Path) -> None:
    expected = np.concatenate([chunk for _, chunk in ROWS.chunks()])
    ids = np.random.default_rng(0).permutation(ROWS.count)[:700]
    assert np.array_equal(open_flat(build_flat(tmp_path, ROWS), ROWS), expected)
    for verify in (True, False):
        reader = TierReader(build_store(tmp_path, ROWS), ROWS, len(ids), verify=verify)
        reader.read(ids[:300])
        reader.read(ids[300:], 300)
        assert np.array_equal(reader.rows(), expected[ids])
        reader.close()


@pytest.mark.skipif(not rocksdb_rows.is_there(), reason="make peers brings RocksDB")
def test_rocksdb_reads_the_same_rows(tmp_path: Path) -> None:
    expected = np.concatenate([chunk for _, chunk in ROWS.chunks()])
    ids = np.random.default_rng(0).integers(0, ROWS.count, 700)
    keyed = rocksdb_rows.RocksdbRows(tmp_path, ROWS, threads=3)
    assert np.array_equal(keyed.read(ids), expected[ids])
    keyed.close()


def test_bytes_of_the_disk_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(40 * READ_BYTES))
    page_cache.drop(path)
    if page_cache.resident_share(path):
        pytest.skip(f"{path} is on a file system that lives in memory")
    before = device.bytes_read_of_process()
    path.read_bytes()
    assert 40 * READ_BYTES <= device.bytes_read_of_process() - before < 60 * READ_BYTES


def test_page_cache_is_dropped_and_warmed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(40 * READ_BYTES))
    page_cache.warm(path)
    assert page_cache.resident_share(path) == 1
    flat = np.memmap(path, np.uint8, "r")
    assert flat[::READ_BYTES].sum() == 0
    assert page_cache.zap_maps(path) == 40 * READ_BYTES
    page_cache.drop(path)
    if page_cache.resident_share(path) == 1:
        pytest.skip(f"{path} is on a file system that lives in memory")
    assert page_cache.resident_share(path) == 0
    assert flat[0] == 0


def test_criteo_keys_skip_what_is_missing(tmp_path: Path) -> None:
    import gzip

    path = tmp_path / "rows.gz"
    dense = "\t".join(["1"] * 14)
    lines = [dense + "\t" + "\t".join(["000a", "", "0b"] + [""] * 23), dense + "\t" + "\t".join([""] * 25 + ["ff"])]
    path.write_bytes(gzip.compress(("\n".join(lines) + "\n").encode()))
    assert criteo_keys(path).tolist() == [10, (2 << 40) + 11, (25 << 40) + 255]


def answer(request: Run) -> Report:
    """A benchmark of nothing."""
    table = Table(title="t", columns=["size"], rows=[[str(request.config["size"])]])
    return Report(question="How large?", tables=[table], figures={}, goals=[Goal(name="g", value=1, at_least=2)])


@pytest.mark.parametrize(("flags", "size", "goals"), [([], 100, 1), (["--quick"], 1, 0)])
def test_program(flags: list[str], size: int, goals: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, target = tmp_path / "nothing.toml", tmp_path / "out" / "nothing.json"
    config.write_text("size = 100\n[quick]\nsize = 1\n")
    given = ["--config", str(config), "--dir", str(tmp_path / "work"), "--json", str(target), *flags]
    assert program("nothing", answer, given) == 0
    found: dict[str, Any] = json.loads(target.read_text())
    assert found["config"] == {"size": size}
    assert found["quick"] is bool(flags)
    assert len(found["goals"]) == goals
    assert found["machine"]["cores"] >= 1
    shown = capsys.readouterr().out
    assert "How large?" in shown
    assert machine.summary(found["machine"]) in shown


def test_a_part_that_fails_costs_none_before_it(tmp_path: Path) -> None:
    def fails(request: Run, figures: dict[str, Any]) -> dict[str, Any]:
        raise OSError(f"after {figures['first']['rows']} rows in {request.folder}")

    saved: list[Report] = []
    parts = {
        "first": Part(lambda *_: {"rows": 3}, lambda found: Report(tables=[], notes=[f"{found['rows']} rows"])),
        "second": Part(fails, lambda _: Report(tables=[])),
    }
    request = Run(config={}, quick=True, folder=tmp_path, save=saved.append)
    with pytest.raises(OSError, match="after 3 rows"):
        run_parts(request, "How many?", parts)
    (report,) = saved
    assert (report.figures["first"]["rows"], report.notes) == (3, ["3 rows"])
