"""Memory, cores, SSD and GPUs: figures of the right things. Whether they are high is not for tests to say."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tierstore.plan.measure import READ_BYTES, direct_reader, machine, storage

SMALL = machine.Sizes(1 << 16, 16, rows=256, copy_bytes=1 << 14)


@contextlib.contextmanager
def direct_reads() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        pytest.skip("the file system has no direct reads")


@pytest.mark.parametrize("unit", [1e-7, 1e-3, 5.0])
def test_rates_are_medians_of_enough_work(unit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = [0.0], list[int]()

    def work(units: int) -> None:
        calls.append(units)
        now[0] += units * unit * (10 if len(calls) % 5 == 0 else 1)  # one in five is held up

    monkeypatch.setattr(machine, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    assert machine.rate_of(work, seconds=1.0) == pytest.approx(1 / unit)
    assert calls[-1] * unit >= 0.01
    assert calls[-5:] == [calls[-1]] * 5


def test_memory_and_cores_and_the_same_code_for_devices() -> None:
    before = torch.get_num_threads()
    memory, processor = machine.measure_host(seconds=0.02, threads=2, sizes=SMALL)
    assert (processor.cores, torch.get_num_threads()) == (2, before)
    assert memory.capacity_bytes > 1 << 20
    gpu = machine.measure_accelerator(torch.device("cpu"), seconds=0.02, sizes=SMALL)
    assert gpu.hbm.capacity_bytes == 1 << 16
    rates = [each for part in (memory, gpu.hbm) for each in (part.bytes_per_s, part.row_bytes_per_s)]
    assert min(*rates, processor.flops, gpu.flops, gpu.pcie.bytes_per_s) > 1e4
    assert 0 < gpu.pcie.latency_us < 1e6


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.measure_accelerators("cpu", seconds=1) == ()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(machine, "measure_accelerator", lambda device, **_: device)
    for name, numbers in {"cuda": (0, 1), "cuda:1": (1,)}.items():
        assert machine.measure_accelerators(name, seconds=1) == tuple(torch.device("cuda", each) for each in numbers)
    refused = {"gpu": 'expected "cpu", "cuda" or', "meta": "torch sees 0 CUDA", "cuda:2": "torch sees 2 CUDA devices"}
    for name, said in refused.items():
        with pytest.raises(ValueError, match=said):
            machine.measure_accelerators(name, seconds=1)


@pytest.mark.gpu
def test_a_gpu() -> None:
    gpu = machine.measure_accelerator(torch.device("cuda", 0), seconds=1)
    assert gpu.hbm.capacity_bytes > 1 << 30
    assert gpu.hbm.bytes_per_s > gpu.pcie.bytes_per_s


def test_an_ssd(tmp_path: Path) -> None:
    with direct_reads():
        ssd = storage.measure_storage(tmp_path, seconds=0.5, file_bytes=8 << 20)
    assert not list(tmp_path.iterdir())
    assert 1 < ssd.read_latency_us < 1e6
    assert ssd.reads_per_s >= 1e6 / ssd.read_latency_us * (1 - 1e-9), "one in flight is one of the depths"
    assert ssd.capacity_bytes >= os.statvfs(tmp_path).f_bavail
    for rate in (ssd.read_bytes_per_s, ssd.write_bytes_per_s):
        assert 1e5 < rate < 1e12


def test_the_file_is_removed_whatever_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> float:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(storage, "_reads_per_s", fail)
    with pytest.raises(OSError, match="broken"):
        storage.measure_storage(tmp_path, seconds=0.1, file_bytes=8 << 20)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=100, f_frsize=4096, f_blocks=1000))
    with pytest.raises(ValueError, match=r"400.0 KiB are free, .*use --dir on another file system"):
        storage.measure_storage(tmp_path, seconds=0.1, file_bytes=64 << 20)
    assert not list(tmp_path.iterdir())


def test_memory_is_no_disk(tmp_path: Path) -> None:
    storage.require_device(tmp_path)
    with pytest.raises(ValueError, match="none is not a folder; make it first"):
        storage.require_device(tmp_path / "none")
    if Path("/dev/shm").is_dir():
        with pytest.raises(ValueError, match="which lives in memory; use --dir"):
            storage.require_device(Path("/dev/shm"))


@pytest.mark.kernel
@pytest.mark.parametrize("block_bytes", [READ_BYTES, 4 * READ_BYTES])
def test_direct_reads_bring_what_the_file_holds(tmp_path: Path, block_bytes: int) -> None:
    path, content = tmp_path / "data", np.random.default_rng(0).bytes(32 * READ_BYTES)
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
