"""Devices that really fill up and really fail: a small file system in memory, and a disk image that outgrows one."""

import contextlib
import fcntl
import mmap
import os
import struct
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierstore
from tests.following import Writer
from tierstore.errors import TierstoreError, UnreadableError
from tierstore.io.mapped import _libc
from tierstore.kernels.jit import JIT_ENABLED
from tierstore.plan.measure.page_cache import drop

from .workload import DDR, Snapshot, Trained, Workload, copied, differences

SOME, MANY = 30, 600  # ids a batch: a store of few rows first, then one that must grow


def _run(*command: str | Path) -> None:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"{command[0]} is not permitted here: {done.stderr.strip()}")


@contextlib.contextmanager
def mounted(place: Path, *options: str | Path) -> Iterator[Path]:
    """A file system at ``place``, gone afterwards."""
    place.mkdir(exist_ok=True)
    _run("mount", *options, place)
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def fill_up(place: Path, left_bytes: int) -> Path:
    """A file that takes all room but so much."""
    room = os.statvfs(place)
    ballast = place / "ballast"
    ballast.write_bytes(bytes(room.f_bavail * room.f_frsize - left_bytes))
    return ballast


def error_of(step: Callable[[], object]) -> TierstoreError | None:
    """The error that a step raises, if it does."""
    try:
        step()
    except TierstoreError as error:
        return error
    return None


def test_a_disk_whose_writes_fail_when_they_are_synced(tmp_path: Path, initial: dict[str, Trained]) -> None:
    """The image of the disk lies in a small file system: writes are taken, and lost when that is full.

    The machine is not started again: what it still held in memory is gone when the disk is mounted again.
    """
    with mounted(tmp_path / "backing", "-t", "tmpfs", "-o", "size=12m", "tmpfs") as backing:
        image = backing / "disk.img"
        with image.open("wb") as file:
            file.truncate(64 << 20)
        _run("mkfs.ext4", "-q", "-E", "nodiscard", image)
        begun: list[Snapshot] = []
        workload = Workload(
            copied(initial),
            np.random.default_rng(0),
            lambda label, value: begun.append(value) if label == "begun" else None,
        )
        with contextlib.ExitStack() as stack:
            disk = stack.enter_context(mounted(tmp_path / "disk", "-o", "loop", image))
            workload.open(disk / "store")
            stack.callback(lambda: error_of(workload.close))
            workload.train(1, SOME)
            workload.commit()
            ballast = fill_up(backing, 64 << 10)
            steps = (step for _ in range(100) for step in (lambda: workload.train(1, MANY), workload.commit))
            error = next(error for error in map(error_of, steps) if error is not None)
            assert str(disk / "store") in str(error)
            last = workload.last
        ballast.unlink()
        subprocess.run(["e2fsck", "-fy", str(image)], capture_output=True, check=False)
        with contextlib.ExitStack() as stack:
            disk = stack.enter_context(mounted(tmp_path / "disk", "-o", "loop", image))
            workload.open(disk / "store")
            stack.callback(workload.close)
            shown = next(version for version in begun if version.extra == workload.store.extra)
            assert last is not None
            assert shown.extra["serial"] >= last.extra["serial"]
            assert differences(workload.store, shown) == []
            workload.store.verify()
            workload.show(shown)
            workload.train(2)
            kept = workload.commit()
            workload.close()
            with tierstore.open(disk / "store", mode="r", ddr=DDR, threads=1) as store:
                assert differences(store, kept) == []


pytestmark = pytest.mark.skipif(not JIT_ENABLED, reason="without compiled code a refused page ends the process")

PAGE = 4096
ROWS, DIM = 3000, 8
_FIBMAP = 1  # ioctl: which block of the disk a block of a file is


@dataclass
class Disk:
    """A mounted image that can lose sectors and get them back."""

    place: Path
    image: Path
    cut: int = 0
    end: bytes = b""

    def lose(self, path: Path, pages: Iterable[int]) -> None:
        """Have these pages of a file refused. Nothing of the file may be unsynced."""
        bad = set(pages)
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no reading ahead
            for _ in range(100):
                drop(path)
                for page in range(path.stat().st_size // PAGE):
                    if page not in bad:
                        os.pread(file.fileno(), PAGE, page * PAGE)
                if not self._cached(file.fileno(), bad):
                    break
            assert not self._cached(file.fileno(), bad), "somebody keeps the pages in memory"
            places = [fcntl.ioctl(file, _FIBMAP, struct.pack("i", page)) for page in bad]
        self.cut = PAGE * min(struct.unpack("i", place)[0] for place in places)
        with self.image.open("r+b") as image:
            image.seek(self.cut)
            self.end = image.read()
            image.truncate(self.cut)

    def _cached(self, descriptor: int, pages: set[int]) -> list[int]:
        """Those of the pages that the page cache has."""
        with mmap.mmap(descriptor, 0, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
            flags = np.empty(-(-len(mapped) // PAGE), np.uint8)
            start = np.frombuffer(mapped, np.uint8).ctypes.data
            assert _libc.mincore(start, len(mapped), flags.ctypes.data) == 0
        return [page for page in pages if flags[page] & 1]

    def heal(self) -> None:
        """Have all be read again."""
        with self.image.open("r+b") as image:
            image.seek(self.cut)
            image.write(self.end)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    if os.geteuid() != 0:
        pytest.skip("mounting a disk image needs root")
    image = tmp_path / "disk.img"
    with image.open("wb") as file:
        file.truncate(64 << 20)
    _run("mkfs.ext4", "-q", "-b", str(PAGE), "-O", "^has_journal", "-E", "nodiscard,lazy_itable_init=0", image)
    with mounted(tmp_path / "disk", "-o", "loop,noatime", image) as place:
        yield Disk(place, image)


def pages_of(store: Any, name: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Of each row the page of the row file that it lies on; 0 of such that were never written."""
    base, count = list(store.tables).index(name), store[name].config.num_embeddings
    with store._cold.lease() as (_, rows):
        segments, base = rows.segments[store[name].layout], int(rows.tables.bases[base])
        assert segments.geo.pages_per_block == 1
        places = rows.places[base : base + count].astype(np.int64)
        slots, indexes = np.divmod(places, 1 << segments.geo.place_bits)
        return np.where(places > 0, segments.arrays.data_pages[slots] + indexes // segments.geo.rows_per_block, 0)


def refused(call: Any) -> None:
    """The call raises the error of a row that cannot be read."""
    with pytest.raises(UnreadableError, match=r"rows\.lmdb: .*cannot be read.* log .*tierstore repair"):
        call()


def test_readers_of_a_bad_disk(disk: Disk, writer_process: Writer) -> None:
    """Rows, pooled lookups, verify and a follower; and when the disk is well again, in the same store."""
    directory = disk.place / "store"
    writer_process("open", str(directory))
    writer_process("create", "t", ROWS, DIM)
    writer_process("write", "t", list(range(ROWS)), 1)
    writer_process("commit", 1)
    writer_process("close")
    every = torch.arange(ROWS)
    with tierstore.open(directory, mode="r", ddr="1MiB", threads=2) as store:
        table = store["t"]
        assert (table.read(every[:1]) == 1).all()
        pages = pages_of(store, "t")
        page = np.unique(pages)[len(np.unique(pages)) // 2]
        bad, good = every[pages == page], every[pages != page]
        disk.lose(directory / "rows.lmdb", [int(page)])
        bag = tierstore.TieredEmbeddingBag(table, mode="sum")
        refused(lambda: table.read(every))
        refused(lambda: bag(bad[:3], torch.tensor([0, 1])))
        assert (table.read(good) == 1).all()
        assert (bag(good, torch.arange(len(good))) == 1).all()
        with pytest.raises(UnreadableError, match=r"rows\.lmdb: .*segment \d+ cannot be read.* in all.*repair"):
            store.verify()
        disk.heal()
        assert (table.read(every) == 1).all()
        assert (bag(bad, torch.arange(len(bad))) == 1).all()
        store.verify()

        writer_process("open", str(directory))
        writer_process("write", "t", list(range(ROWS)), 2)
        writer_process("commit", 2)
        writer_process("close")
        path = directory / "rows.lmdb"
        disk.lose(path, range(2, path.stat().st_size // PAGE))
        with pytest.raises(UnreadableError, match=r"rows\.lmdb: the device refuses to read bytes .*tierstore repair"):
            store.refresh()
        assert (table.read(every) == 1).all()
        disk.heal()
        assert store.refresh()
        assert (table.read(every) == 2).all()
