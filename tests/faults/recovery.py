"""Opening what a crash left, and holding it against what was promised."""

import copy
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import tierstore
from tierstore.errors import DamagedError, StoreNotFoundError

from .syscalls import Recorder
from .workload import DDR, Snapshot, Workload, differences

__all__ = ["check", "crash_point", "crash_points", "promised"]


def promised(recorder: Recorder, time: int, first: Snapshot) -> tuple[list[Snapshot], set[str]]:
    """Versions that may be shown after a crash, and tables that must be there."""
    versions, tables = [first], set()
    for mark in recorder.marks:
        if mark.time >= time:
            break
        if mark.label == "begun":
            versions.append(mark.value)
        elif mark.label == "returned":
            del versions[: next(i for i, known in enumerate(versions) if known is mark.value)]
        elif mark.label == "table":
            tables.add(mark.value)
    return versions, tables


def crash_points(recorder: Recorder) -> list[int]:
    """An instant after each change of what is in flight, what is safe, and what is promised."""
    times = {mark.time for mark in recorder.marks}
    for operation in recorder.operations:
        times.add(operation.ended if operation.kind == "sync" else operation.began)
    return sorted(time + 1 for time in times if time >= 0)


def crash_point(recorder: Recorder, first: Snapshot, generator: np.random.Generator) -> int:
    """One of these: any, one while a commit is in flight, or one while a superblock is."""
    times = crash_points(recorder)
    committing = [time for time in times if len(promised(recorder, time, first)[0]) > 1]
    anchoring = [
        operation.began + 1
        for operation in recorder.operations
        if operation.kind == "write" and recorder.name_of(operation.inode).startswith("rows.anchor")
    ]
    kinds = [each for each in (times, committing, anchoring) if each]
    return int(generator.choice(kinds[generator.integers(len(kinds))]))


def check(directory: Path, versions: Sequence[Snapshot], tables: set[str], *, goes_on: bool) -> Snapshot:
    """Open a store, hold it against the versions it may show, and train on; returns what is shown."""
    try:
        with tierstore.open(directory, mode="r", ddr=DDR, threads=1) as store:
            assert differences(store, _shown(store, versions)) == []
    except (DamagedError, StoreNotFoundError) as error:
        if 'open it once with mode="w"' not in str(error) and versions[0].version != 0:
            raise
    with tierstore.open(directory, ddr=DDR, threads=1) as store:
        shown = _shown(store, versions)
        assert tables <= set(store.tables)
        assert differences(store, shown) == []
        store.verify()
    with tierstore.open(directory, mode="r", ddr=DDR, threads=1) as store:
        kept = store.versions
    assert len(kept) == len(shown.kept) or not shown.kept
    for number, old in zip(kept, shown.kept, strict=False):
        with tierstore.open(directory, mode="r", version=number, ddr=DDR, threads=1) as store:
            assert differences(store, old) == []
    if goes_on:
        workload = Workload(copy.deepcopy(shown.tables), np.random.default_rng(0), serial=1000).open(directory)
        workload.train_rows(np.arange(len(shown.tables["trained"].weights)))
        made = workload.commit()
        workload.store.close()
        with tierstore.open(directory, mode="r", ddr=DDR, threads=1) as store:
            assert differences(store, made) == []
    return shown


def _shown(store: tierstore.Store, versions: Sequence[Snapshot]) -> Snapshot:
    known = [version for version in versions if version.extra == store.extra]
    assert known, f"{store.extra} is not one of {[version.extra for version in versions]}"
    return known[-1]
