"""A device that really fails: a disk image that outgrows the small file system that it lies in."""

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import tierstore
from tierstore.errors import TierstoreError

from .workload import DDR, Snapshot, Trained, Workload, copied, differences

SOME, MANY = 30, 600  # ids a batch: a store of few rows first, then one that must grow


def _run(*command: str | Path) -> None:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"{command[0]} is not permitted here: {done.stderr.strip()}")


@contextlib.contextmanager
def mounted(place: Path, *options: str | Path) -> Iterator[Path]:
    place.mkdir(exist_ok=True)
    _run("mount", *options, place)
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def fill_up(place: Path, left_bytes: int) -> Path:
    room = os.statvfs(place)
    ballast = place / "ballast"
    ballast.write_bytes(bytes(room.f_bavail * room.f_frsize - left_bytes))
    return ballast


def error_of(step: Callable[[], object]) -> TierstoreError | None:
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
