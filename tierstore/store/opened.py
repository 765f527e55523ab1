"""What a store is opened from: the manifest, the cold tier and the version that they hold."""

import mmap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ..errors import FormatError, StoreNotFoundError, TruncatedError
from ..io import MAX_PAGE_BYTES, ROW_FILE_NAME, ColdTier, LmdbColdTier, MemoryColdTier, require_plain_files
from ..io.cleaning import DEFAULT_SLACK
from ..system.durable import make_directory
from .manifest import MANIFEST_NAME, Manifest
from .version import Version, unpack

__all__ = ["Opened", "open_files", "open_in_memory"]


class Opened(NamedTuple):
    """What a store is made of; whoever opened it closes ``cold``.

    Attributes:
        manifest: of the tables that ``version`` shows.
        cold: knows no table yet.
        version: the part of the commit that is not rows.
        files: the cold tier, if it is in files.
        save: makes a manifest the store's, durably if it is in files.
    """

    manifest: Manifest
    cold: ColdTier
    version: Version
    files: LmdbColdTier | None
    save: Callable[[Manifest], None]


def open_files(directory: Path, *, readonly: bool, version: int | None = None, slack: float = DEFAULT_SLACK) -> Opened:
    """Open the files of a store, and check that they belong together.

    Args:
        directory: becomes a store if it holds none, unless ``readonly``.
        version: with ``readonly``, the kept version to show; default: the newest.

    Raises:
        StoreNotFoundError: there is no store, and it may not be made, or a copy that was cut short.
        FormatError, TruncatedError: the files do not belong together, or one is missing. Others as ``Manifest.read``
        and ``LmdbColdTier``.
    """
    if not readonly:
        make_directory(directory)
    manifest = _open_manifest(directory, readonly=readonly)
    cold = LmdbColdTier(
        directory, store_id=bytes.fromhex(manifest.store_id), readonly=readonly, version=version, slack=slack
    )
    try:
        manifest.require_row_file(cold.path, cold.page_bytes)
        if not readonly:
            # Another writer may have made tables before the lock was ours.
            manifest = Manifest.read(directory)
            if not manifest.has_rows:
                manifest = replace(manifest, has_rows=True)
                manifest.write(directory)
        shown = unpack(cold.version, cold.payload)
        if readonly:
            # A writer may have made tables, and committed, after the manifest was read.
            manifest = shown.manifest_of(Manifest.read(directory))
        shown.require_of(manifest)
    except BaseException:
        cold.close()
        raise
    return Opened(manifest, cold, shown, cold, lambda manifest: manifest.write(directory))


def open_in_memory() -> Opened:
    """A store without files, which ends with the process."""
    cold = MemoryColdTier()
    version = unpack(cold.version, cold.payload)
    return Opened(Manifest.new(cold.page_bytes), cold, version, None, lambda _: None)


def _open_manifest(directory: Path, *, readonly: bool) -> Manifest:
    """Read a store's manifest. Write the first one where there is no store, unless ``readonly``."""
    require_plain_files(directory)
    path, rows_path = directory / MANIFEST_NAME, directory / ROW_FILE_NAME
    if not path.exists():
        _require_no_remains(directory)
        if not readonly:
            Manifest.new(min(mmap.PAGESIZE, MAX_PAGE_BYTES)).create(directory)
    manifest = Manifest.read(directory)
    if not rows_path.exists() and (manifest.has_rows or readonly):
        raise TruncatedError(f"{rows_path} is missing; restore it from a copy of the store")
    return manifest


def _require_no_remains(directory: Path) -> None:
    """StoreNotFoundError, FormatError if a directory without a manifest holds other parts of a store."""
    if work := next(filter(Path.is_dir, directory.glob("*.partial")), None):
        raise StoreNotFoundError(
            f"no store at {directory}: it holds {work.name}, of a copy that was cut short; make the copy again"
        )
    if (directory / ROW_FILE_NAME).exists():
        raise FormatError(f"{directory} holds {ROW_FILE_NAME} but no {MANIFEST_NAME}; restore it from a copy")
