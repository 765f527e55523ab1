"""What may be on the device when the power goes: every state that the recorded writes and syncs allow.

The rules are POSIX's, not those of one file system. A write is safe once a sync of its file that began after it has
returned well. An entry of a directory is safe once a sync of that directory has. Of everything else any part may have
arrived, in any order, and of a write any of its sectors.

A sync that failed makes nothing safe. For the data that it was about nor does a later one: the system may have dropped
what it could not write. Entries of directories are otherwise: a file system that cannot write those takes no more.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .syscalls import Operation, Recorder

SECTOR_BYTES = 512
State = dict[int, Any]
"""Files (bytearray) and directories (dict of entries), as in ``syscalls.Tree``."""


@dataclass(frozen=True, slots=True)
class Loss:
    """What survives of the changes that no sync made safe.

    Attributes:
        survivors: indices into ``Recorder.operations``.
        torn: (operation, a mask of its sectors that arrived as an integer) of writes that arrived in part.
        grown: files have the length of all that was written to them, with zeros where it did not arrive.
    """

    survivors: frozenset[int]
    torn: tuple[tuple[int, int], ...] = ()
    grown: bool = False


def pending(recorder: Recorder, time: int) -> tuple[list[int], list[int]]:
    """Changes begun before ``time`` that are safe then, and those that are not; indices into the operations."""
    safe: list[int] = []
    unsafe: list[int] = []
    syncs: dict[int, list[Operation]] = {}
    for operation in recorder.operations:
        if operation.kind == "sync" and 0 <= operation.ended < time:
            syncs.setdefault(operation.inode, []).append(operation)
    for index, operation in enumerate(recorder.operations):
        if operation.kind != "sync" and operation.began < time and not operation.failed:
            (safe if _is_safe(operation, syncs) else unsafe).append(index)
    return safe, unsafe


def _is_safe(operation: Operation, syncs: dict[int, list[Operation]]) -> bool:
    if operation.ended < 0:
        return False
    is_entry = operation.directory >= 0
    syncs_of_it = syncs.get(operation.directory if is_entry else operation.inode, ())
    later = [sync for sync in syncs_of_it if sync.began > operation.ended and not (is_entry and sync.failed)]
    return bool(later) and not later[0].failed


def state(recorder: Recorder, safe: Sequence[int], loss: Loss, unsafe: Sequence[int]) -> State:
    torn = dict(loss.torn)
    tree: State = {
        number: dict(node) if isinstance(node, dict) else bytearray(node) for number, node in recorder.before.items()
    }
    for index in sorted({*safe, *loss.survivors}):
        operation = recorder.operations[index]
        if operation.kind in ("write", "truncate"):
            _apply_data(tree.setdefault(operation.inode, bytearray()), operation, torn.get(index))
        else:
            _apply_entry(tree, operation)
    for index in unsafe if loss.grown else ():
        operation = recorder.operations[index]
        if operation.kind == "write":
            _lengthen(tree.setdefault(operation.inode, bytearray()), operation.offset + len(operation.data))
    return tree


def _lengthen(image: bytearray, size: int) -> None:
    if len(image) < size:
        image.extend(bytes(size - len(image)))


def _apply_data(image: bytearray, operation: Operation, sectors: int | None) -> None:
    start, end = operation.offset, operation.offset + len(operation.data)
    if operation.kind == "truncate":
        del image[start:]
        _lengthen(image, start)
        return
    if sectors is None:
        _lengthen(image, end)
        image[start:end] = operation.data
        return
    for number, part in enumerate(range(start // SECTOR_BYTES * SECTOR_BYTES, end, SECTOR_BYTES)):
        first, last = max(part, start), min(part + SECTOR_BYTES, end)
        if sectors >> number & 1:
            _lengthen(image, last)
            image[first:last] = operation.data[first - start : last - start]


def _apply_entry(tree: State, operation: Operation) -> None:
    directory = tree.setdefault(operation.directory, {})
    if operation.kind == "mkdir":
        tree.setdefault(operation.inode, {})
    elif operation.kind == "create":
        tree.setdefault(operation.inode, bytearray())
    if operation.old_name:
        directory.pop(operation.old_name, None)
    if operation.name:
        directory[operation.name] = operation.inode


def materialise(tree: State, target: Path, number: int = 0) -> None:
    target.mkdir()
    entries = tree.get(number, {})
    for name, child in entries.items():
        node = tree.get(child, bytearray())
        if isinstance(node, dict):
            materialise(tree, target / name, child)
        else:
            (target / name).write_bytes(node)


def losses(recorder: Recorder, unsafe: Sequence[int], generator: np.random.Generator, most: int) -> Iterator[Loss]:
    """Losses of a set of changes: all subsets where there are few, else some that are drawn; then torn writes."""
    if 2 ** len(unsafe) <= most:
        for count in range(len(unsafe) + 1):
            yield from (Loss(frozenset(some)) for some in itertools.combinations(unsafe, count))
    else:
        yield from (Loss(_drawn(unsafe, generator)) for _ in range(most))
    for grown in (False, True):
        yield Loss(frozenset(unsafe), tuple(_tears(recorder, unsafe, generator)), grown)
    yield Loss(frozenset(), grown=True)


def _drawn(unsafe: Sequence[int], generator: np.random.Generator) -> frozenset[int]:
    """The first ones, the last ones, one, all but one, or any."""
    everything, place = frozenset(unsafe), int(generator.integers(len(unsafe) + 1))
    kept = generator.random(len(unsafe)) < generator.choice([0.1, 0.5, 0.9])
    one, some = frozenset(unsafe[place : place + 1]), frozenset(np.array(unsafe)[kept].tolist())
    kinds = [frozenset(unsafe[:place]), frozenset(unsafe[place:]), one, everything - one, some, some]
    return kinds[generator.integers(len(kinds))]


def _tears(recorder: Recorder, unsafe: Sequence[int], generator: np.random.Generator) -> Iterator[tuple[int, int]]:
    for index in unsafe:
        operation = recorder.operations[index]
        if operation.kind == "write":
            sectors = len(operation.data) // SECTOR_BYTES + 2
            yield index, int.from_bytes(generator.bytes(sectors // 8 + 1), "little")
