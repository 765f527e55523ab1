"""An update's rows in a replica: all of them as one version, or none. And the process that writes them for a server.

A replica is a store that only updates write, and numbers its commits itself. Which version of the source a commit shows
stands in its ``extra`` (``update_file.Origin``). Two versions are kept; three if the second is urgent, the first with
some rows of the third: nobody goes back to a part of a version.
"""

import contextlib
import hashlib
import itertools
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import xxhash

from ..config import TableConfig
from ..errors import DamagedError, DiskFullError, TierstoreError, UnreadableError
from ..io.lmdb import LmdbColdTier
from ..kernels.arrays import Int64s, Words
from ..layout import KEY_ROW_BITS, RowLayout
from ..store import open_store
from ..store.manifest import MANIFEST_NAME, Manifest
from ..store.version import ORIGIN_KEY, TableState, repack, unpack, unpack_tensors
from ..system.files import open_plain_file, translate_os_error
from ..system.signals import end_with
from .update_file import MAX_HEADER_BYTES, Origin, UnfitError, UnfitTablesError, UpdateFile, origin_of

KEEP: Final = 2
_TRANSACTION_BYTES: Final = 16 << 20  # of segments, all of which LMDB holds in memory


class Applied(NamedTuple):
    version: int
    """Of the source, that the replica shows now."""
    rows: int
    was_there: bool
    """The replica had this version already; nothing was done."""


def apply_update(directory: str | os.PathLike[str], *files: str | os.PathLike[str], replaces: str = "") -> Applied:
    """Make the version in an update the current one of a replica, which is made if there is none.

    Several files are applied as one version, that of the last: each begins at the version of the one before it. Each
    is read once, and its rows are written as they are read. A process that ends on the way, or finds a file damaged,
    leaves the version before, and a later call goes through. Tables that no version of the replica names, as an update
    brought them that failed or was gone back from, give way to those of this one; nobody is shown them.

    Memory, whatever the files hold: 128 MiB, the map of the rows, twice the payload (at most ``MAX_PAYLOAD_BYTES``),
    and some 25 bytes for each byte of the files' headers, which have 32 MiB together at most.

    Args:
        replaces: identity of the source's commit that the replica has, so that it may go back to one of a lower number.

    Raises:
        FormatError, TruncatedError, ChecksumError: a file is no update, or damaged.
        TierstoreError: the replica is not at the version that the update is made from, has rows of another store, or is
            no replica.
        TableError: its tables are others. DiskFullError. StoreLockedError: another process writes it.
    """
    directory = Path(directory).absolute()
    with contextlib.ExitStack() as opened:
        updates, left = list[UpdateFile](), MAX_HEADER_BYTES
        for file in files:
            updates.append(opened.enter_context(UpdateFile(Path(file), header_bytes=left)))
            left -= updates[-1].header_bytes
        is_there = (directory / MANIFEST_NAME).exists()
        if not is_there:
            _require_base(directory, None, updates[0])
        if not is_there or not Manifest.read(directory).has_rows:  # or only begun
            open_store(directory, mode="w", ddr="64MiB", threads=1).close()
        with _open(directory) as tier:
            return _apply(directory, tier, updates, replaces)


@contextlib.contextmanager
def _open(directory: Path) -> Iterator[LmdbColdTier]:
    try:
        store_id = bytes.fromhex(Manifest.read(directory).store_id)
        with contextlib.closing(LmdbColdTier(directory, store_id=store_id, readonly=False, create=False)) as tier:
            yield tier
    except OSError as error:
        raise translate_os_error(error, error.filename or directory) from error


def _apply(directory: Path, tier: LmdbColdTier, updates: Sequence[UpdateFile], replaces: str) -> Applied:
    last, manifest = updates[-1].header, Manifest.read(directory)
    before = unpack(tier.version, tier.payload)
    before = before if last.is_urgent else before._replace(tensors=b"")
    origin = origin_of(before.extra)
    if before.number and origin is None:
        raise TierstoreError(f"{directory} was written by others than updates; choose another directory for a replica")
    if origin is not None and origin in (last.origin, last.shown):
        return Applied(origin.version, 0, True)
    _require_base(directory, origin, updates[0])
    for one, other in itertools.pairwise(updates):
        _require_base(directory, one.header.origin, other)
    if origin is not None and origin.version > last.origin.version and origin.commit_id != replaces:
        raise TierstoreError(
            f"{directory} has {origin}, and the update is of version {last.origin.version}, before that; roll the "
            "replica back, or name the commit that it has as replaces="
        )
    _require_tables(directory, before.manifest_of(manifest).tables if origin is not None else (), updates[-1])
    sent = before if last.is_urgent else updates[-1].version()
    unpack_tensors(sent)
    shapes = ((each.layout(tier.page_bytes), 0 if each.is_dropped else each.num_embeddings) for each in last.tables)
    tier.set_tables(dict(enumerate(shapes)))
    rows = sum(_write_all(tier, last.tables, each) for each in updates)
    states = {config.name: TableState(0, config.optimizer.lr) for config in last.tables}
    version = sent._replace(tables=states, extra={**sent.extra, ORIGIN_KEY: last.shown._asdict()})
    payload = repack(version, before.lineage.following(before.number))
    # Last, as readers look for a version's tables here; until the commit they see those of the version before.
    if manifest.tables != last.tables:
        tier.require_in_place()
        replace(manifest, tables=last.tables).write(directory)
    tier.commit(payload, tier.last_version + 1, keep=KEEP + bool(origin and origin.urgent))
    return Applied(last.shown.version, rows, False)


def _require_base(directory: Path, origin: Origin | None, update: UpdateFile) -> None:
    header = update.header
    if origin is not None and origin.source != header.origin.source:
        raise UnfitError(
            f"{directory} has {origin}, and the update is {header.origin}. A replica takes updates of one store; to "
            "have another one's, start its server with a new, empty directory",
            update.path,
        )
    if not header.has_rows_of(origin) or (header.is_urgent and origin is not None and origin.urgent):
        has = "is empty" if origin is None else f"has {origin}"
        wants = f"goes from {header.base} to version {header.origin.version}"
        missing = "a full copy brings what is missing here"
        raise UnfitError(f"{directory} {has}, and the update {wants}; {missing}", update.path)


def _require_tables(directory: Path, tables: tuple[TableConfig, ...], update: UpdateFile) -> None:
    """TableError unless the update begins with the replica's tables: first values depend on their places."""
    header = update.header
    for index, config in enumerate(tables):
        sent = header.tables[index] if index < len(header.tables) else None
        if config != sent:
            raise UnfitTablesError(
                f"table {index} of {directory} is {config}, and of the update {sent}; to have tables that are others "
                "than they were, start the server with a new, empty directory",
                update.path,
            )
    if header.is_urgent and len(tables) != len(header.tables):
        lacked = f"{directory} lacks {header.tables[-1].name!r}: tables come with the whole update"
        raise UnfitTablesError(lacked, update.path)


def _write_all(tier: LmdbColdTier, tables: tuple[TableConfig, ...], update: UpdateFile) -> int:
    """Write all rows of an update; how many. TableError: its tables are not the first ones of the version's."""
    header = update.header
    if header.tables != tables[: len(header.tables)]:
        raise UnfitTablesError(f"{update.path} has other tables than the update after it", update.path)
    if not header.since and tier.version:  # a full copy: a row that it lacks has its first value again
        for index, config in enumerate(tables):
            layout = config.layout(tier.page_bytes)
            with tier.changes(0) as stored:
                for rows, _ in stored.rows(index):
                    keys = rows | (index << KEY_ROW_BITS)
                    _write(tier, layout, keys, config.init.rows(keys, layout))
    written = 0
    for index, config in enumerate(header.tables):
        layout = config.layout(tier.page_bytes)
        for rows, weights in update.rows(index):
            _write(tier, layout, rows | (index << KEY_ROW_BITS), weights)
            written += len(rows)
    return written


def _write(tier: LmdbColdTier, layout: RowLayout, keys: Int64s, weights: Words) -> None:
    slots, state = np.arange(len(keys), dtype=np.int32), np.zeros((len(keys), layout.state_words), np.uint64)
    step = layout.rows_within(_TRANSACTION_BYTES)
    for first in range(0, len(keys), step):
        part = slice(first, first + step)
        tier.write(keys[part], slots[part], weights, state, epoch=tier.last_version + 1)


def roll_back_replica(directory: str | os.PathLike[str], left: str = "") -> Origin:
    """Make the version before the current one of a replica; what it shows then. ``left``: the commit to go back from.
    StoreNotFoundError: no replica. TierstoreError: it has another, or keeps no version before. StoreLockedError."""
    directory = Path(directory).absolute()
    with _open(directory) as tier:
        if (origin := origin_of(unpack(tier.version, tier.payload).extra)) is None:
            raise UnfitError(f"{directory} is no replica; go back in it with tierstore rollback", directory)
        if left not in ("", origin.urgent or origin.commit_id):
            told = f"{directory} has {origin}, and the server shows commit {left}; go back again"
            raise UnfitError(told, directory)
        if len(tier.versions) < 2:
            raise UnfitError(f"{directory} keeps no version before this one", directory)
        tier.rollback(tier.versions[0])
        origin = origin_of(unpack(tier.version, tier.payload).extra)
        assert origin is not None, "a replica's kept version is no replica's"
        return origin


def answer_lines() -> None:
    """Write a replica for a server, which has it open for reading: a process may open a row file once. Each line of
    the input is answered with one. It ends with the process ``TIERSTORE_PARENT``, however that ends."""
    end_with(int(os.environ["TIERSTORE_PARENT"]))
    for line in sys.stdin:
        print(answer(line), flush=True)


def answer(line: str) -> str:
    """Of a line in JSON, ["apply", REPLACES, DIR, FILE, ...] or ["rollback", LEFT, DIR], what ``apply_update`` or
    ``roll_back_replica`` gives; or an error, and the files at fault."""
    action, commit_id, directory, *files = json.loads(line)
    outcome: dict[str, Any]
    try:
        if action == "rollback":
            outcome = roll_back_replica(directory, commit_id)._asdict()
        else:
            outcome = apply_update(directory, *files, replaces=commit_id)._asdict()
    except Exception as error:
        outcome = {
            "error": str(error) or type(error).__name__,
            "is_full": isinstance(error, DiskFullError),
            "is_refused": _is_of_content(error),
            "faults": _faults(error, files) if _is_of_content(error) else {},
        }
    return json.dumps(outcome)


def _is_of_content(error: Exception) -> bool:
    """Whether it is of what was read; else it passes, as a lock or a shortage does."""
    if isinstance(error, TierstoreError):
        return isinstance(error, UnfitError | DamagedError) and not isinstance(error, UnreadableError)
    return not isinstance(error, OSError | MemoryError)


def _faults(error: Exception, files: Sequence[str]) -> dict[str, str]:
    """Of files: "refused" if one is wrong as it was offered, "damaged" if this disk made it so. Each is read again by
    itself, as the replica may be what is damaged."""
    found, unfit = dict[str, str](), error.path if isinstance(error, UnfitError) else None
    for path in map(Path, files):
        is_wrong = path == unfit
        try:
            with open_plain_file(path) as file:
                digest = hashlib.file_digest(file, xxhash.xxh64).hexdigest()  # type: ignore[arg-type]
            if digest != path.name:
                found[str(path)] = "damaged"
                continue
            with UpdateFile(path) as update:
                unpack_tensors(update.version())
                for table in range(0 if unfit else len(update.header.tables)):
                    for _ in update.rows(table):
                        pass
        except Exception as fault:
            is_wrong = _is_of_content(fault)
        if is_wrong:
            found[str(path)] = "refused"
    return found
