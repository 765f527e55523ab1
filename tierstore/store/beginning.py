"""The first thing that is read of a store, or written of a new one."""

import mmap
from pathlib import Path

from ..errors import FormatError, StoreNotFoundError, TruncatedError
from ..io import MAX_PAGE_BYTES, ROW_FILE_NAME, MemoryColdTier, require_plain_files
from .manifest import MANIFEST_NAME, Manifest

__all__ = ["open_manifest"]


def open_manifest(directory: Path | None, *, readonly: bool) -> Manifest:
    """Read a store's manifest; with a directory that may be written and holds no store, write the first one. Without a
    directory, a new one.

    Raises:
        StoreNotFoundError: no store, and it may not be made, or a copy that was cut short.
        FormatError, TruncatedError: one of manifest and row file is missing. Others as ``Manifest.read``.
    """
    if directory is None:
        return Manifest.new(MemoryColdTier.page_bytes)
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
