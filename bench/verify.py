"""Does verify check every row at the rate at which the device reads the file from end to end?

Two stores of the same rows: one written in order, and one whose rows were then all rewritten in random order, so that
segments lie where others were before. Before each measurement the file is put out of the page cache. The limit is a
plain read of the same file from its first byte to its last, in turns with verify.
"""

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from tierstore.io import LmdbColdTier, VerifyReport

from . import oscache
from .common import Goal, Report, Run, Spread, Table, measure, program
from .rowdata import Rows, build_once, build_store

__all__ = ["run"]

_STORE_ID = bytes(16)


def _rewrite(folder: Path, rows: Rows, batch: int) -> None:
    """Write all rows again as they are, a random set at a time, and commit."""
    tier = LmdbColdTier(folder, store_id=_STORE_ID, readonly=False)
    layout = rows.layout(tier.page_bytes)
    tier.add_table(0, layout, rows.count)
    version = tier.version + 1
    order = np.random.default_rng(rows.seed).permutation(rows.count)
    for ids in np.array_split(order, max(1, rows.count // batch)):
        slots = np.arange(len(ids), dtype=np.int32)
        weights = np.zeros((len(ids), layout.weight_words), np.uint64)
        state = np.zeros((len(ids), layout.state_words), np.uint64)
        tier.read(ids, slots, weights, state, np.zeros(len(ids), np.bool_))
        tier.write(ids, slots, weights, state, epoch=version)
    tier.commit(b"", version)
    tier.close()


def _build_rewritten(parent: Path, rows: Rows, batch: int) -> Path:
    source = build_store(parent, rows)

    def build(target: Path) -> None:
        for file in source.iterdir():
            if file.name != "rows.json":
                shutil.copyfile(file, target / file.name)
        _rewrite(target, rows, batch)

    return build_once(parent, "rewritten", rows, build)


def _read_through(path: Path, size_bytes: int) -> None:
    """The whole file, one read after another, with the system told that it will be so."""
    buffer = memoryview(bytearray(size_bytes))
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while os.readv(descriptor, [buffer]):
            pass
    finally:
        os.close(descriptor)


class _Store:
    """One of the two, opened for reading, with what is measured on it."""

    def __init__(self, name: str, folder: Path, rows: Rows, limit_bytes: int) -> None:
        self.name = name
        self.tier = LmdbColdTier(folder, store_id=_STORE_ID, readonly=True)
        self.tier.add_table(0, rows.layout(self.tier.page_bytes), rows.count)
        self.path = self.tier.path
        self.file_bytes = self.path.stat().st_size
        self.report = self.tier.verify()  # compiles, and makes the map
        self._limit_bytes = limit_bytes

    def actions(self) -> dict[str, Callable[[], object]]:
        return {
            f"drop {self.name} 1": self.drop,
            f"read {self.name}": lambda: _read_through(self.path, self._limit_bytes),
            f"drop {self.name} 2": self.drop,
            f"verify {self.name}": self._verify,
            f"warm {self.name}": self._verify,
        }

    def drop(self) -> None:
        oscache.drop(self.path)
        assert oscache.resident_share(self.path) < 0.01, f"{self.path} stays in the page cache"

    def _verify(self) -> VerifyReport:
        report = self.tier.verify()
        assert report == self.report
        return report


def _report(stores: list[_Store], seconds: dict[str, list[float]], config: dict[str, Any]) -> Report:
    figures: dict[str, Any] = {}
    shown = []
    goals = []
    for store in stores:
        limit = Spread.of([store.file_bytes / 1e6 / each for each in seconds[f"read {store.name}"]])
        own = Spread.of([store.report.bytes / 1e6 / each for each in seconds[f"verify {store.name}"]])
        warm = Spread.of([store.report.bytes / 1e6 / each for each in seconds[f"warm {store.name}"]])
        # Each verify against the read right before it: a device shared with others has good and bad moments.
        pairs = zip(seconds[f"read {store.name}"], seconds[f"verify {store.name}"], strict=True)
        shares = Spread.of([store.report.bytes / own / (store.file_bytes / read) for read, own in pairs])
        for what, rate, share in (
            ("plain read of the file", limit, "1.00"),
            ("verify", own, f"{shares.median:.2f}"),
            ("verify, file in memory", warm, ""),
        ):
            shown.append(
                [f"{store.name}: {what}", *(f"{x:,.0f}" for x in (rate.median, rate.lowest, rate.highest)), share]
            )
        figures[store.name] = {
            "file_bytes": store.file_bytes,
            "segment_bytes": store.report.bytes,
            "segments": store.report.segments,
            "rows": store.report.rows,
            "read_mb_per_s": asdict(limit),
            "verify_mb_per_s": asdict(own),
            "verify_warm_mb_per_s": asdict(warm),
            "share_of_limit": asdict(shares),
        }
        goals.append(Goal(name=f"verify over a plain read, {store.name}", value=round(shares.median, 3), at_least=0.8))
    return Report(
        question="Does verify check every row at the rate at which the device reads the file from end to end?",
        tables=[
            Table(
                title=f"verify of {config['rows']:,} rows of {config['dim']} float32",
                columns=["read by", "MB/s", "lowest", "highest", "of the limit"],
                rows=shown,
            )
        ],
        figures=figures,
        goals=goals,
        notes=[
            f"{config['repetitions']} repetitions; plain reads of {config['limit_kib']} KiB. verify counts bytes of "
            "segments it checked, the plain read those of the file. Before each of the two the file was put out of every "
            "map and out of the page cache (mincore: less than 1 % stayed)."
        ],
    )


def run(request: Run) -> Report:
    config = request.config
    rows = Rows.of(config)
    folders = {
        "in order": build_store(request.folder, rows),
        "rewritten at random": _build_rewritten(request.folder, rows, config["rewrite_rows"]),
    }
    stores = [_Store(name, folder, rows, config["limit_kib"] * 1024) for name, folder in folders.items()]
    actions = {name: action for store in stores for name, action in store.actions().items()}
    seconds = measure(actions, repetitions=config["repetitions"])
    for store in stores:
        store.tier.close()
    return _report(stores, seconds, config)


if __name__ == "__main__":
    sys.exit(program("verify", run))
