"""Many processes on one store: a writer and followers that copy its directory, are killed, and lose power.

Each version's payload says what each of its rows holds, so whoever reads rows knows whether they are right.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Final

import numpy as np
import torch

import tierstore
from tierstore.io import ROW_FILE_NAME
from tierstore.io.anchor import ANCHOR_NAME

from .life import other_boot
from .processes import Process, may_make_namespaces

__all__ = ["Tally", "main", "share"]

ROWS: Final = 12_000
DIM: Final = 16
DDR: Final = "448KiB"
"""Half of the rows: the others are written back, and read, while the processes run."""
FOLLOWERS: Final = 2
MAX_FAILURES: Final = 10
_SECTOR_BYTES: Final = 512
_META_SECTORS: Final = 16
_LIFE_SERIALS: Final = 10_000
"""Numbers of the writes of one life of a writer; float32 holds those of 1,600."""
Report = Callable[..., None]


@dataclass
class Tally:
    """What was done, and what went wrong.

    Attributes:
        lost: commits that had returned and were not there at the next open.
        rows_differ: rows that held something else than their version says.
        false_errors: errors of a process that used a sound store.
        failures: the last two in words, and whatever else was not as it must be.
    """

    rounds: int = 0
    commits: int = 0
    opened: int = 0
    writers_killed: int = 0
    followers_killed: int = 0
    killed_while_opening: int = 0
    power_losses: int = 0
    restarts: int = 0
    namespaces: int = 0
    copies_by_writers: int = 0
    copies_by_readers: int = 0
    refreshes: int = 0
    rows_read: int = 0
    lost: int = 0
    rows_differ: int = 0
    false_errors: int = 0
    failures: list[str] = field(default_factory=list)


def _ids(generator: random.Random) -> torch.Tensor:
    drawn = np.random.default_rng(generator.getrandbits(32)).choice(ROWS, generator.choice([50, 800, 6000]), False)
    return torch.from_numpy(np.sort(drawn))


def _rows(serials: torch.Tensor) -> torch.Tensor:
    return serials.to(torch.float32)[:, None].expand(-1, DIM)


def _digest(serials: torch.Tensor) -> int:
    return zlib.crc32(serials.numpy().tobytes())


def _shown(store: "tierstore.Store") -> torch.Tensor:
    """int32 [ROWS]: the write that each row of the version is of."""
    return store.tensors()["serials"] if store.version else torch.zeros(ROWS, dtype=torch.int32)


def _num_wrong(store: "tierstore.Store", serials: torch.Tensor, ids: torch.Tensor) -> int:
    return int((store["t"].read(ids) != _rows(serials[ids])).any(1).sum())


def _copy(directory: Path, scratch: Path) -> None:
    """What nobody should do, and many do: copy the files of a store that is open, from inside."""
    target = scratch / f"copy {os.urandom(4).hex()}"
    shutil.copytree(directory, target)
    shutil.rmtree(target)


def _keep_synced(directory: Path, scratch: Path) -> None:
    """Right after a commit: what the device surely holds."""
    target, work = scratch / "synced", scratch / "synced.new"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    for name in (ROW_FILE_NAME, ANCHOR_NAME):
        shutil.copyfile(directory / name, work / name)
    shutil.rmtree(target, ignore_errors=True)
    work.rename(target)


def write_on(directory: Path, scratch: Path, life: int, boot: int, seed: int, report: Report) -> None:
    """Write, commit and copy until the process is killed."""
    generator = random.Random(seed)
    config = tierstore.TableConfig(name="t", num_embeddings=ROWS, embedding_dim=DIM, init=tierstore.init.Constant(0.0))
    with other_boot(boot), tierstore.open(directory, ddr=DDR, keep=generator.choice([1, 3]), threads=1) as store:
        table = store.create_table(config)
        serials = _shown(store).clone()
        wrong = _num_wrong(store, serials, torch.arange(ROWS))
        report("opened", serial=store.extra.get("serial", 0), digest=_digest(serials), wrong=wrong)
        first = life * _LIFE_SERIALS + 1
        for serial in count(first):
            ids = _ids(generator)
            serials[ids] = serial
            table.write(ids, _rows(serials[ids]))
            if serial == first or generator.random() < 0.2:
                report("begin", serial=serial, digest=_digest(serials))
                store.commit(extra={"serial": serial}, tensors={"serials": serials.clone()})
                report("durable", serial=serial)
                _keep_synced(directory, scratch)
            if generator.random() < 0.1:
                _copy(directory, scratch)
                report("copied")


def follow(directory: Path, scratch: Path, boot: int, seed: int, report: Report, *, opens: int = 1 << 30) -> None:
    """Open for reading, check rows and look for newer versions, copy, close, and again."""
    generator = random.Random(seed)
    for _ in range(opens):
        with other_boot(boot), tierstore.open(directory, mode="r", ddr=DDR, threads=1) as store:
            if opens < 10:
                store.verify()
            for _ in range(generator.choice([1, 5, 30])):
                ids = _ids(generator)
                report("read", rows=len(ids), wrong=_num_wrong(store, _shown(store), ids))
                if generator.random() < 0.2:
                    _copy(directory, scratch)
                    report("copied")
                if generator.random() < 0.4:
                    before = store.version
                    report("refreshed", moved=store.refresh() != before)


class _Sharing:
    """One store, and who is at it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._directory, self._scratch = folder / "store", folder / "scratch"
        self._scratch.mkdir(parents=True)
        self._generator = random.Random(seed)
        self._may_make_namespaces = may_make_namespaces()
        self._followers: list[Process] = []
        self._promised: dict[int, int] = {0: _digest(torch.zeros(ROWS, dtype=torch.int32))}
        self._boot = 1
        self.tally = Tally()

    def _start(self, name: str, body: Callable[[Report], None]) -> Process:
        in_namespace = self._may_make_namespaces and self._generator.random() < 0.7
        self.tally.namespaces += in_namespace
        return Process(name, body, in_namespace=in_namespace)

    def _writer(self, life: int) -> Process:
        seed, boot = self._generator.getrandbits(32), self._boot
        return self._start(
            f"writer {life}", lambda report: write_on(self._directory, self._scratch, life, boot, seed, report)
        )

    def _reader(self, name: str, opens: int = 1 << 30) -> Process:
        seed, boot = self._generator.getrandbits(32), self._boot
        return self._start(name, lambda report: follow(self._directory, self._scratch, boot, seed, report, opens=opens))

    def round(self, life: int) -> None:
        """One life of a writer, which ends by SIGKILL."""
        self.tally.rounds += 1
        writer = self._writer(life)
        if life and self._generator.random() < 0.1:
            time.sleep(self._generator.uniform(0.0, 0.1))
            self.tally.killed_while_opening += not writer.of("opened")
        else:
            writer.wait_for("opened")
            if not life:
                writer.wait_for("durable")  # else there is nothing to follow yet
            self._change_followers(life)
            opener = self._reader(f"opener {life}", opens=2)
            time.sleep(self._generator.uniform(0.02, 0.8))
            if self._generator.random() < 0.5:
                opener.join()
            self._end(opener)
        writer.kill()
        self.tally.writers_killed += 1
        self._take_in_writer(writer)
        if self._generator.random() < 0.25:
            self._lose_power()

    def _change_followers(self, life: int) -> None:
        if self._followers and self._generator.random() < 0.3:
            self._end(self._followers.pop(0))
        while len(self._followers) < FOLLOWERS:
            self._followers.append(self._reader(f"follower since {life}"))

    def _end(self, reader: Process) -> None:
        reader.kill()
        self.tally.followers_killed += 1
        for report in reader.of("read"):
            self.tally.rows_read += report["rows"]
            self._count_wrong(reader.name, report["wrong"])
        self.tally.copies_by_readers += len(reader.of("copied"))
        self.tally.refreshes += sum(report["moved"] for report in reader.of("refreshed"))
        self._count_failed(reader)

    def _count_failed(self, peer: Process) -> None:
        for report in peer.of("failed"):
            self.tally.false_errors += 1
            self.tally.failures.append(f"{peer.name}: {report['words']}")

    def _count_wrong(self, name: str, wrong: int) -> None:
        if wrong:
            self.tally.rows_differ += wrong
            self.tally.failures.append(f"{name}: {wrong} rows differ")

    def _take_in_writer(self, writer: Process) -> None:
        for report in writer.reports:
            if report["label"] == "opened":
                self.tally.opened += 1
                self._count_wrong(writer.name, report["wrong"])
                if self._promised.get(report["serial"]) != report["digest"]:
                    self.tally.lost += 1
                    self.tally.failures.append(f"{writer.name} opened {report}, promised were {self._promised}")
                self._promised = {report["serial"]: report["digest"]}
            elif report["label"] == "begin":
                self._promised[report["serial"]] = report["digest"]
            elif report["label"] == "durable":
                self.tally.commits += 1
                self._promised = {report["serial"]: self._promised[report["serial"]]}
        self.tally.copies_by_writers += len(writer.of("copied"))
        self._count_failed(writer)

    def _lose_power(self) -> None:
        """All processes end, and of what was written since the last commit any sectors are on the device."""
        while self._followers:
            self._end(self._followers.pop())
        self._boot += 1
        synced = self._scratch / "synced"
        names = [folder / ANCHOR_NAME for folder in (synced, self._directory)]
        if not synced.exists() or len({path.read_bytes() for path in names}) != 1:
            self.tally.restarts += 1  # more was synced since, nobody knows what
            return
        self.tally.power_losses += 1
        paths = [folder / ROW_FILE_NAME for folder in (synced, self._directory)]
        old, new = (np.fromfile(path, np.uint8) for path in paths)
        size = max(len(old), len(new))
        old, new = (np.pad(image, (0, size - len(image))).reshape(-1, _SECTOR_BYTES) for image in (old, new))
        draws = np.random.default_rng(self._generator.getrandbits(32)).random(len(new))
        is_meta = np.arange(len(new)) < _META_SECTORS
        survives = self._generator.choice([draws < 0.1, draws < 0.5, draws < 0.9, is_meta, ~is_meta])
        np.where(survives[:, None], new, old).tofile(paths[1])
        with contextlib.suppress(FileNotFoundError):
            (self._directory / f"{ROW_FILE_NAME}-lock").unlink()

    def finish(self, life: int) -> None:
        """One more writer finds the last commit."""
        writer = self._writer(life)
        writer.wait_for("opened")
        writer.kill()
        self._take_in_writer(writer)
        while self._followers:
            self._end(self._followers.pop())


def share(folder: Path, *, rounds: int, seed: int) -> Tally:
    """So many lives of writers of one store, with followers beside them; in a process without other threads."""
    sharing = _Sharing(folder, seed)
    life = 0
    try:
        while life < rounds and len(sharing.tally.failures) < MAX_FAILURES:
            sharing.round(life)
            life += 1
        sharing.finish(life)
    except RuntimeError as error:
        sharing.tally.failures.append(str(error))
    return sharing.tally


def _warm(folder: Path) -> None:
    """Here, before anything is forked: what is loaded and compiled now is so in every process."""

    class EnoughError(Exception):
        pass

    def stop(label: str, **_: object) -> None:
        if label == "durable":
            raise EnoughError

    with contextlib.suppress(EnoughError):
        write_on(folder / "warm", folder, 0, 1, 1, stop)
    follow(folder / "warm", folder, 1, 1, lambda *_, **__: None, opens=1)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.crash.sharing", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20, help="lives of a writer")
    parser.add_argument("--dir", type=Path, help="where the store is made; one that failed stays [a temporary folder]")
    given = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="sharing-", dir=given.dir))
    _warm(folder)
    tally = share(folder, rounds=given.rounds, seed=given.seed)
    if not tally.failures:
        shutil.rmtree(folder)
    print(json.dumps(vars(tally)))


if __name__ == "__main__":
    main()
