"""A measurement, small: complete, saved, and nothing left behind. Whether figures are high is not for tests to say."""

import contextlib
import errno
import os
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.plan.hosts import SHOP_HOST, run
from tierstore.plan import SoftwareCosts
from tierstore.plan import measure as measurement
from tierstore.plan.host import load_host
from tierstore.plan.measure import READ_BYTES, Lab, direct_reader, measure


@contextlib.contextmanager
def direct_reads() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        pytest.skip("the file system has no direct reads")


def test_a_whole_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of small loops, and little memory."""
    told, threads = list[float](), torch.get_num_threads()
    for name, size in {"_TABLE_BYTES": 1 << 20, "_MATRIX": 64, "_LOOKUPS": 256, "_FILE_BYTES": 8 << 20}.items():
        monkeypatch.setattr(measurement, name, size)
    monkeypatch.setattr(measurement, "Lab", lambda folder, processor, **_: Lab(folder, processor, 6000, 256, 64, 1))
    with direct_reads():
        host = measure(tmp_path, seconds=1.0, progress=lambda _, share: told.append(share))
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
    if Path("/dev/shm").is_dir():
        with pytest.raises(ValueError, match="which lives in memory; use --dir"):
            measurement.require_device(Path("/dev/shm"))


def test_direct_reads_bring_what_the_file_holds(tmp_path: Path) -> None:
    path, content, block_bytes = tmp_path / "data", np.random.default_rng(0).bytes(32 * READ_BYTES), 2 * READ_BYTES
    path.write_bytes(content)
    with direct_reads(), direct_reader(path, 3, block_bytes=block_bytes) as reader:
        offsets = reader.random_offsets(np.random.default_rng(1), 20)
        assert (offsets % block_bytes == 0).all()
        assert offsets.max() <= len(content) - block_bytes
        reader.read(offsets)
        # Contiguous parts of the offsets: each thread's buffer holds the last of its part.
        last = [part[-1] for part in np.array_split(offsets, 3)]
        assert bytes(reader.buffer) == b"".join(content[at : at + block_bytes] for at in last)
        with pytest.raises(OSError, match="1 of 2 direct reads failed"):
            reader.read(np.array([0, len(content)]))


def test_the_command_shows_and_saves_where_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measurement, "measure", lambda *_, **__: SHOP_HOST)
    path = tmp_path / "host.json"
    assert run("measure", "--dir", str(tmp_path), "--out", str(path)) == 0
    assert load_host(path) == SHOP_HOST
    shown = capsys.readouterr().out
    assert f"Saved as {path}" in shown
    assert all(each.name in shown and each.metadata["help"] in shown for each in fields(SoftwareCosts))
    monkeypatch.setattr(measurement, "measure", lambda *_, **__: pytest.fail("a minute for nothing"))
    errors = {"host.json": FileExistsError, "host.toml": ValueError, "none/host.json": FileNotFoundError}
    for name, error in errors.items():
        with pytest.raises(error):
            run("measure", "--out", str(tmp_path / name))
    assert load_host(path) == SHOP_HOST
