"""The directory of a store: its files opened together, or the first of them made; new stores, made whole or not at all;
and backups, which are copied while others train and commit."""

import contextlib
import mmap
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from .. import system
from ..errors import DamagedError, FormatError, StoreNotFoundError, TierstoreError, TruncatedError
from ..io.base import VerifyReport
from ..io.files import (
    FILE_NAMES,
    MAX_PAGE_BYTES,
    ROW_FILE_NAME,
    copied_bytes,
    copy_rows_file,
    require_plain_files,
    rows_path,
)
from ..io.lmdb import LmdbColdTier
from ..io.log import DEFAULT_SLACK
from ..io.records import read_head
from ..system.files import (
    make_directory,
    names_in,
    output_errors,
    output_locked,
    require_parent,
    require_room,
    sync_directory,
)
from ..system.killpoints import reach
from ..system.signals import shielded
from .manifest import MANIFEST_NAME, Manifest, Part, parts_in
from .version import RANK_KEY, unpack

BACKUP_WORK_NAME: Final = "backup.partial"  # where in the target a backup is made; what is in it may be deleted


class Opened(NamedTuple):
    """A store's files."""

    manifest: Manifest  # of the tables that the version shows
    cold: Any  # LmdbColdTier, or what reads a sharded store; it knows no table yet, and is the caller's to close
    read_manifest: Callable[[], Manifest]  # of now; after the tier found a newer version, at least that one's


def open_files(directory: Path, *, readonly: bool, version: int | None = None, slack: float = DEFAULT_SLACK) -> Opened:
    """Open a store's files. A directory that holds no store becomes one, unless ``readonly``, which may ask for a kept
    version. A sharded store can only be read.

    Raises:
        StoreNotFoundError: there is no store, and it may not be made; or a sharded one, and not ``readonly``.
        FormatError, TruncatedError: the files do not belong together, or one is missing. TierstoreError: the folder has
            the name of one rank's part and holds another's. Others as ``Manifest.read`` and ``LmdbColdTier``.
    """
    if readonly and _is_sharded(directory):
        return Opened(*system.open_whole(directory, version))
    if not readonly:
        if directory.exists() and not directory.is_dir():
            raise StoreNotFoundError(f"{directory} is a file, and a store is a directory; give another path")
        make_directory(directory)
    manifest = _open_manifest(directory, readonly=readonly)
    options: dict[str, Any] = {"version": version, "slack": slack, "follow": version is None}
    cold = LmdbColdTier(directory, store_id=bytes.fromhex(manifest.store_id), readonly=readonly, **options)
    try:
        if cold.page_bytes != manifest.page_bytes:
            raise FormatError(
                f"{cold.path} has pages of {cold.page_bytes} bytes and its manifest says {manifest.page_bytes}; "
                "restore both from one copy of the store"
            )
        # Read again: another writer may have made tables before the lock was ours, or before the version was chosen.
        manifest = Manifest.read(directory)
        if not readonly and not manifest.has_rows:
            manifest = replace(manifest, has_rows=True)
            manifest.write(directory)
        shown = unpack(cold.version, cold.payload)
        if readonly:
            manifest = shown.manifest_of(manifest)
        shown.require_of(manifest)
        _require_own_part(directory, shown.extra.get(RANK_KEY))
    except BaseException:
        cold.close()
        raise
    return Opened(manifest, cold, partial(Manifest.read, directory))


def _require_own_part(directory: Path, section: Any) -> None:
    named = Part.named(directory.absolute())
    if named is None or not isinstance(section, dict) or "rank" not in section:  # an older release wrote no rank
        return
    own, held = f"{named.rank}-of-{named.size}", f"{section['rank']}-of-{section['ranks']}"
    if own != held:
        raise TierstoreError(
            f"{directory} holds the part {held}, not {own}: parts of the sharded store were exchanged or copied over "
            f"each other. Give it back the name {held}, and restore {own}"
        )


def _is_sharded(directory: Path) -> bool:
    return not (directory / MANIFEST_NAME).exists() and bool(parts_in(directory))


def require_store(directory: Path) -> None:
    """What ``open_files`` raises where there is no store, or its manifest is damaged."""
    if not _is_sharded(directory):
        Manifest.read(directory)


def _open_manifest(directory: Path, *, readonly: bool) -> Manifest:
    require_plain_files(directory)
    rows_file = directory / ROW_FILE_NAME
    if not (directory / MANIFEST_NAME).exists():
        if work := next(filter(Path.is_dir, directory.glob("*.partial")), None):
            raise StoreNotFoundError(
                f"no store at {directory}: it holds {work.name}, of a copy that was cut short; make the copy again"
            )
        if rows_file.exists():
            raise FormatError(f"{directory} holds {ROW_FILE_NAME} but no {MANIFEST_NAME}; restore it from a copy")
        if not readonly:
            Manifest.new(min(mmap.PAGESIZE, MAX_PAGE_BYTES)).create(directory)
    manifest = Manifest.read(directory)
    if not rows_file.exists() and (manifest.has_rows or readonly):
        raise TruncatedError(f"{rows_file} is missing; restore it from a copy of the store")
    return manifest


def require_outside(target: Path, source: Path) -> None:
    """ValueError if the target is the store ``source``, or lies within it."""
    if target.resolve() == source.resolve():
        raise ValueError(f"{target} is the store itself; choose another directory")
    if target.resolve().is_relative_to(source.resolve()):
        raise ValueError(f"{target} is inside the store {source}; choose a directory outside")


@contextlib.contextmanager
def new_store(target: Path, work_name: str, names: Sequence[str] = (ROW_FILE_NAME, MANIFEST_NAME)) -> Iterator[Path]:
    """A directory to work in within the target. On leaving, its files move to the target; after an error nothing is
    left. The next call replaces what a killed process left.

    ``names`` are of the files or folders, synced, in the order in which they are moved. The last one makes the target
    whole: a store has no manifest before.

    Raises:
        FileExistsError: the target is a file, or holds something. FileNotFoundError: nor is there a directory for it.
        TierstoreError: the system refuses, or another process is at work there. DiskFullError: no free space.
    """
    work = target / work_name
    with output_errors(target):
        require_parent(target)
        is_made = not target.exists()
        if is_made:
            target.mkdir()
        elif not target.is_dir():
            raise FileExistsError(f"{target} is not a directory; choose another name")
        with output_locked(target, os.O_RDONLY | os.O_DIRECTORY):
            found = names_in(target)  # at most what a killed process leaves
            if found and not (work.is_dir() and found <= {work_name, *names[:-1]}):
                raise FileExistsError(
                    f"{target} is not empty (it holds {min(found - {work_name} or found)}); choose a directory that "
                    "is, or a new one"
                )
            try:
                _clear(target, work_name, names)
                work.mkdir()
                yield work
                for name in names[:-1]:
                    os.rename(work / name, target / name)
                sync_directory(target)
                reach("copy: rows in place")
                os.rename(work / names[-1], target / names[-1])
                sync_directory(target)
                sync_directory(target.parent)
                reach("copy: manifest in place")
                shutil.rmtree(work, ignore_errors=True)
                reach("copy: done")
            except BaseException:
                _clear(target, work_name, names)
                if is_made:
                    target.rmdir()
                raise


def _clear(target: Path, work_name: str, names: Sequence[str]) -> None:
    for path in (target / name for name in (*reversed(names), work_name)):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def kept_if_committed(directory: Path) -> Iterator[None]:
    """If the block raises, and made a store in the directory that has no commit yet, the store is removed again."""
    is_made, is_new = not directory.exists(), not (directory / MANIFEST_NAME).exists() and not parts_in(directory)
    try:
        yield
    except BaseException:
        if is_new and (directory / MANIFEST_NAME).exists():
            with contextlib.suppress(TierstoreError, OSError), contextlib.ExitStack() as files:
                tier = files.enter_context(contextlib.closing(open_files(directory, readonly=False).cold))
                if not tier.last_version:
                    (directory / MANIFEST_NAME).unlink()
                    files.close()  # first: the tier has them open
                    for name in FILE_NAMES:
                        (directory / name).unlink(missing_ok=True)
                    if is_made:
                        directory.rmdir()
        raise


@contextlib.contextmanager
def new_tier(work: Path, manifest: Manifest) -> Iterator[LmdbColdTier]:
    """A row file to be written, with the store's tables; synced at the end of the block, so that it needs no anchor."""
    tier = LmdbColdTier(work, store_id=bytes.fromhex(manifest.store_id), readonly=False)
    with contextlib.closing(tier):
        tier.set_tables(manifest.shapes)
        yield tier
    with rows_path(work).open("rb") as file:
        os.fsync(file.fileno())


def bytes_on_device(directory: Path) -> int:
    return rows_path(directory).stat().st_blocks * 512


def verify_copy(
    directory: Path, progress: Callable[[int, int], None] | None = None
) -> tuple[tuple[int, ...], VerifyReport]:
    """Open a new store and check all rows of it: the versions that it keeps, and what was found sound. DamagedError."""
    manifest, cold, _ = open_files(directory, readonly=True)
    with contextlib.closing(cold):
        cold.set_tables(manifest.shapes)
        return cold.versions, cold.verify(progress)


class BackupReport(NamedTuple):
    """What was copied, to the directory ``target``."""

    target: Path
    version: int  # the last commit in it; 0 if there is none
    versions: tuple[int, ...]  # all that it keeps, ascending
    size_bytes: int  # length of its row file


def back_up(
    tier: LmdbColdTier, directory: Path, target: str | os.PathLike[str], *,
    progress: Callable[[int, int], None] | None = None,
) -> BackupReport:  # fmt: skip
    """Copy a store as it is on SSD, with all versions that it keeps, into another directory.

    Any thread may call it while others train and commit. Rows that were not committed are not in the backup. A store
    open for reading is copied as it was when it was opened or last refreshed. The backup is the same store at an
    earlier time, with the same identity. It is synced, and its files were opened once.

    Meanwhile the writer reuses no page of what is copied: the store's file grows by what is written.

    Args:
        target: must not exist, or be empty, or hold only what an interrupted backup left.
        progress: called as ``progress(done_bytes, total_bytes)``.

    Raises, and nothing is left of the backup:
        ClosedError. ValueError: the target is inside the store's directory. FileExistsError: it holds something.
        FileNotFoundError: there is no directory to make it in. DiskFullError: no free space for it.
        StoreReplacedError: the store was moved. DamagedError: it is not sound. TierstoreError: the system refused, or
            another process writes the target.
    """
    source, target = directory.resolve(), Path(target).resolve()
    require_outside(target, source)
    with contextlib.ExitStack() as stack:
        snapshot = shielded(stack.enter_context)(tier.lease_tree())
        work = stack.enter_context(new_store(target, BACKUP_WORK_NAME))
        path = rows_path(work)
        require_room(path, copied_bytes(snapshot))
        copy_rows_file(snapshot, path, progress or (lambda *_: None))
        # Read after the snapshot was taken: a writer makes a table before it commits rows of it.
        Manifest.read(source).write(work)
        try:
            kept, opened = read_head(snapshot).kept, open_files(work, readonly=True)  # which walks its trees
            with contextlib.closing(opened.cold) as cold:
                if cold.versions != kept:
                    raise DamagedError(f"{work} keeps versions {cold.versions}, not {kept}")
        except DamagedError as error:
            raise DamagedError(
                "the backup is not sound, most likely because the store is not: check it with tierstore verify "
                f"({error})"
            ) from error
        size_bytes = path.stat().st_size
    return BackupReport(target, kept[-1] if kept else 0, kept, size_bytes)
