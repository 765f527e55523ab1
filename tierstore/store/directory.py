"""The directory of a store: its files opened together, or the first of them made."""

import mmap
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from .. import system
from ..errors import FormatError, StoreNotFoundError, TierstoreError, TruncatedError
from ..io.files import MAX_PAGE_BYTES, ROW_FILE_NAME, require_plain_files
from ..io.lmdb import LmdbColdTier
from ..io.log import DEFAULT_SLACK
from ..system.files import make_directory
from .manifest import MANIFEST_NAME, Manifest, Part, parts_in
from .version import RANK_KEY, unpack


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
