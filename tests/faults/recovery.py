"""Opening what a power loss left, and holding it against what was promised."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import tierstore
from tierstore.errors import DamagedError, StoreNotFoundError

from .powerloss import Loss, losses, materialise, pending, state
from .syscalls import Recorder, Tree
from .training_run import other_boot
from .workload import DDR, Snapshot, Workload, copied, differences

__all__ = ["Counts", "check", "crash_points", "explore", "promised"]

_ANCHORS = 2
"""There are others before the one that makes a version durable, and after it, while what it superseded is deleted."""
_LOOKED_AT = 50  # instants, for the one at which most is in flight


@dataclass
class Counts:
    states: int = 0  # different states of the files, each opened and compared
    torn: int = 0  # states in which single sectors of writes arrived
    went_back: int = 0
    went_ahead: int = 0  # states that showed the version before, or the one, whose commit was under way
    seen: set[Any] = field(default_factory=set, repr=False)


def promised(recorder: Recorder, time: int, first: Snapshot) -> tuple[list[Snapshot], set[str]]:
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


def explore(
    recorder: Recorder,
    first: Snapshot,
    scratch: Path,
    *,
    points: int,
    states_each: int,
    generator: np.random.Generator,
    boots: int = 1,
) -> Counts:
    """Lose power at so many instants of a record, in about so many ways each, and check what opens."""
    counts = Counts()
    for time in _ordered(recorder, first, points, generator)[: points or None]:
        safe, unsafe = pending(recorder, time)
        versions, tables = promised(recorder, time, first)
        for loss in losses(recorder, unsafe, generator, states_each):
            tree = state(recorder, safe, loss, unsafe)
            key = _digest(tree), tuple(id(version) for version in versions), len(tables)
            if key not in counts.seen:
                counts.seen.add(key)
                place = scratch / f"time {time} state {counts.states}"
                with other_boot(boots):
                    _check_tree(tree, place, versions, tables, loss, counts)
    return counts


def _ordered(recorder: Recorder, first: Snapshot, points: int, generator: np.random.Generator) -> list[int]:
    """All crash points. Where only ``points`` of them are to be tried, these come first: in which the first and
    the last anchors since the last commit began are in flight; in which most is; some while a commit is under way.
    """
    times = crash_points(recorder)
    if not 0 < points < len(times):
        return times
    under_way = [time for time in times if len(promised(recorder, time, first)[0]) > 1]
    anchored = [
        operation.began + 1
        for operation in recorder.operations
        if operation.kind == "write" and recorder.name_of(operation.inode).startswith("rows.anchor")
    ]
    begun = max((mark.time for mark in recorder.marks if mark.label == "begun"), default=-1)
    some = times[:: len(times) // _LOOKED_AT + 1]  # each look passes over all operations
    fullest = max(some, key=lambda time: len(pending(recorder, time)[1]))
    last = [time for time in anchored if time > begun]
    chosen = [*last[:_ANCHORS], *last[-_ANCHORS:], fullest]
    drawn = generator.permutation(sorted({*under_way} - {*chosen}))[: points // 3].tolist()
    return list(
        dict.fromkeys([*generator.permutation([*chosen, *drawn]).tolist(), *generator.permutation(times).tolist()])
    )


def _digest(tree: Tree) -> bytes:
    """Of all files and entries but the lock files, which hold nothing that lasts."""
    digest = hashlib.blake2b(digest_size=16)
    for number, node in sorted(tree.items()):
        digest.update(repr((number, sorted(node.items()) if isinstance(node, dict) else len(node))).encode())
        if isinstance(node, bytes):
            digest.update(node)
    return digest.digest()


def _check_tree(
    tree: Tree, place: Path, versions: Sequence[Snapshot], tables: set[str], loss: Loss, counts: Counts
) -> None:
    """Check one state; an error says which it was."""
    materialise(tree, place)
    try:
        shown = check(place / "store", versions, tables, counts)
    except BaseException as error:
        error.add_note(f"state {place.name}: {loss}; promised {[version.extra for version in versions]}")
        raise
    counts.states += 1
    counts.torn += bool(loss.torn)
    if len(versions) > 1:
        counts.went_back += shown is versions[0]
        counts.went_ahead += shown is not versions[0]
    _remove(place)


def _remove(place: Path) -> None:
    for child in place.iterdir():
        if child.is_dir():
            _remove(child)
        else:
            child.unlink()
    place.rmdir()


def check(directory: Path, versions: Sequence[Snapshot], tables: set[str], counts: Counts) -> Snapshot:
    """Open a store, hold it against the versions it may show, go on with every other one; returns what is shown."""
    if counts.states % 4 == 0:
        _check_reader(directory, versions)
    with tierstore.open(directory, ddr=DDR, threads=1) as store:
        shown = _shown(store, versions)
        assert tables <= set(store.tables)
        assert differences(store, shown) == []
        store.verify()
    if counts.states % 4 == 1:
        _check_kept(directory, shown)
    if counts.states % 2 == 0:  # which takes as long as all the rest
        _go_on(directory, shown, everything=counts.states % 3 == 0)
    return shown


def _shown(store: Any, versions: Sequence[Snapshot]) -> Snapshot:
    known = [version for version in versions if version.extra == store.extra]
    assert known, f"{store.extra} is not one of {[version.extra for version in versions]}"
    return known[-1]


def _check_reader(directory: Path, versions: Sequence[Snapshot]) -> None:
    try:
        with tierstore.open(directory, mode="r", ddr=DDR, threads=1) as store:
            assert differences(store, _shown(store, versions)) == []
    except (DamagedError, StoreNotFoundError) as error:
        if 'open it once with mode="w"' not in str(error) and versions[0].version != 0:
            raise


def _check_kept(directory: Path, shown: Snapshot) -> None:
    with tierstore.open(directory, mode="r", ddr=DDR, threads=1) as store:
        assert len(store.versions) == len(shown.kept) or not shown.kept
        kept = store.versions
    for number, old in zip(kept, shown.kept, strict=False):
        with tierstore.open(directory, mode="r", version=number, ddr=DDR, threads=1) as store:
            assert differences(store, old) == []


def _go_on(directory: Path, shown: Snapshot, *, everything: bool) -> None:
    workload = Workload(copied(shown.tables), np.random.default_rng(0), serial=1000)
    workload.open(directory)
    workload.train_rows(np.arange(len(shown.tables["trained"].weights) if everything else 40))
    kept = workload.commit()
    workload.close()
    with tierstore.open(directory, mode="r", ddr=DDR, threads=1) as store:
        assert differences(store, kept) == []
