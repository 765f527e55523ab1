"""Memory, cores, SSD and GPUs: figures of the right things. Whether they are high is not for tests to say."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tierstore.plan.measure import machine, storage

KIB = 1 << 10


class Clock:
    """Time passes when work is done, and a little at random."""

    def __init__(self, seconds_a_unit: float) -> None:
        self.now, self.unit, self.calls = 0.0, seconds_a_unit, []

    def __call__(self) -> float:
        return self.now

    def work(self, units: int) -> None:
        self.calls.append(units)
        # One in five is held up.
        self.now += units * self.unit * (10 if len(self.calls) % 5 == 0 else 1)


@pytest.mark.parametrize("unit", [1e-7, 1e-3, 5.0])
def test_rates_are_medians_of_enough_work(unit: float) -> None:
    clock = Clock(unit)
    assert machine.rate_of(clock.work, seconds=1.0, clock=clock) == pytest.approx(1 / unit)
    assert clock.calls[-1] * unit >= 0.01
    assert clock.calls[-5:] == [clock.calls[-1]] * 5


@pytest.mark.kernel
def test_kernels_read_every_word() -> None:
    words = np.random.default_rng(0).integers(-1000, 1000, 64 * 32)
    assert machine._sum_words(words, 5, 1000) == words[5:1000].sum()
    firsts = np.array([0, 3, 63, 3]) * 32
    rows = words.reshape(64, 32).sum(1)
    # From the third to the tenth, around the end of the four.
    assert machine._sum_rows(words, firsts, 2, 10) == 2 * (rows[0] + 2 * rows[3] + rows[63])


def test_memory_and_cores() -> None:
    found = machine.measure_memory(seconds=0.02, threads=2, array_bytes=256 * KIB)
    assert found.capacity_bytes > 1 << 20
    assert found.bytes_per_s > 1e6
    assert found.row_bytes_per_s > 1e6
    before = torch.get_num_threads()
    processor = machine.measure_processor(seconds=0.01, threads=2, size=64)
    assert processor.cores == 2
    assert processor.flops > 1e6
    assert torch.get_num_threads() == before
    assert machine._last_level_cache_bytes() >= 32 << 20


def skip_without_direct_reads(error: OSError) -> None:
    if error.errno != errno.EINVAL:
        raise error
    pytest.skip("the file system has no direct reads")


def test_an_ssd(tmp_path: Path) -> None:
    try:
        ssd = storage.measure_storage(tmp_path, seconds=0.5, file_bytes=8 << 20)
    except OSError as error:
        skip_without_direct_reads(error)
    assert not list(tmp_path.iterdir())
    assert 1 < ssd.read_latency_us < 1e6
    assert ssd.reads_per_s >= 1e6 / ssd.read_latency_us * (1 - 1e-9), "one under way is one of the depths"
    assert ssd.capacity_bytes >= os.statvfs(tmp_path).f_bavail
    for rate in (ssd.read_bytes_per_s, ssd.write_bytes_per_s):
        assert 1e5 < rate < 1e12


def test_the_file_is_removed_whatever_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> float:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(storage, "_reads_per_s", fail)
    with pytest.raises(OSError, match=r"broken|directly"):
        storage.measure_storage(tmp_path, seconds=0.1, file_bytes=8 << 20)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = SimpleNamespace(f_bavail=100, f_frsize=4096, f_blocks=1000)
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    with pytest.raises(ValueError, match=r"400.0 KiB are free, .*use --dir on another file system"):
        storage.measure_storage(tmp_path, seconds=0.1, file_bytes=64 << 20)
    assert not list(tmp_path.iterdir())


def test_memory_is_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert storage._file_system(tmp_path)
    assert storage._file_system(Path("/proc")) == "proc"
    storage.require_device(tmp_path)
    monkeypatch.setattr(storage, "_file_system", lambda _: "tmpfs")
    with pytest.raises(ValueError, match="is on tmpfs, which lives in memory; use --dir"):
        storage.require_device(tmp_path)
    with pytest.raises(ValueError, match="none is not a folder; make it first"):
        storage.require_device(tmp_path / "none")


SMALL = machine.DeviceSizes(memory_bytes=64 * KIB, copy_bytes=16 * KIB, rows=256, matrix=16)


def test_the_same_code_runs_in_host_memory() -> None:
    gpu = machine.measure_accelerator(torch.device("cpu"), seconds=0.02, sizes=SMALL)
    assert gpu.hbm.capacity_bytes == 64 * KIB
    assert min(gpu.hbm.bytes_per_s, gpu.hbm.row_bytes_per_s, gpu.pcie.bytes_per_s, gpu.flops) > 1e4
    assert 0 < gpu.pcie.latency_us < 1e6


def test_devices() -> None:
    assert machine.measure_accelerators("cpu", seconds=1) == ()
    with pytest.raises(ValueError, match='expected "cpu", "cuda" or "cuda:1"'):
        machine.measure_accelerators("gpu", seconds=1)
    with pytest.raises(ValueError, match="torch sees 0 CUDA devices"):
        machine.measure_accelerators("meta", seconds=1)


def test_all_devices_or_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, numbers in {"cuda": [0, 1], "cuda:1": [1]}.items():
        assert machine._devices(name) == [torch.device("cuda", number) for number in numbers]
    with pytest.raises(ValueError, match="torch sees 2 CUDA devices"):
        machine._devices("cuda:2")


@pytest.mark.gpu
def test_a_gpu() -> None:
    gpu = machine.measure_accelerator(torch.device("cuda", 0), seconds=1)
    assert gpu.hbm.capacity_bytes > 1 << 30
    assert gpu.hbm.bytes_per_s > gpu.pcie.bytes_per_s
