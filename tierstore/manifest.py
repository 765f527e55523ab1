"""manifest.json: what a store is, apart from its rows. Replaced atomically, checksummed, read before anything else."""

import contextlib
import hashlib
import json
import os
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from .config import TableConfig
from .durable import sync_directory
from .errors import ChecksumError, FormatError, StoreNotFoundError, TruncatedError
from .rows import MAX_TABLES

__all__ = ["FORMAT_VERSION", "MANIFEST_NAME", "Manifest"]

FORMAT_VERSION: Final = 1
MANIFEST_NAME: Final = "manifest.json"
_MAX_BYTES: Final = 64 * 2**20


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Identity, page size and tables of a store.

    Attributes:
        store_id: 16 random bytes in hex; the row file carries the same.
        page_bytes: page size of the row file.
        tables: configurations; a table's index is its place.
        has_rows: the row file was made; from then on its absence is damage.
    """

    store_id: str
    page_bytes: int
    tables: tuple[TableConfig, ...] = ()
    has_rows: bool = False

    @classmethod
    def new(cls, page_bytes: int) -> "Manifest":
        """A store without tables and with a new identity."""
        return cls(store_id=uuid.uuid4().hex, page_bytes=page_bytes)

    def with_table(self, config: TableConfig) -> "Manifest":
        """The manifest with one more table."""
        if any(config.name == table.name for table in self.tables):
            raise ValueError(f"there is a table {config.name!r} already")
        if len(self.tables) >= MAX_TABLES:
            raise ValueError(f"a store holds at most {MAX_TABLES} tables")
        return replace(self, tables=(*self.tables, config))

    def create(self, directory: Path) -> None:
        """Write the first manifest, unless another process was faster: then that one stands."""
        partial = self._write_partial(directory)
        with contextlib.suppress(FileExistsError):
            os.link(partial, directory / MANIFEST_NAME)
        partial.unlink()
        sync_directory(directory)

    def write(self, directory: Path) -> None:
        """Replace the manifest in ``directory``; after a crash there is the old one or the new one."""
        os.replace(self._write_partial(directory), directory / MANIFEST_NAME)
        sync_directory(directory)

    def _write_partial(self, directory: Path) -> Path:
        """The manifest under a name of this process's own, synced."""
        body = {
            "format_version": FORMAT_VERSION,
            "store_id": self.store_id,
            "page_bytes": self.page_bytes,
            "has_rows": self.has_rows,
            "tables": [config.to_dict() for config in self.tables],
        }
        text = json.dumps({"body": body, "sha256": _digest(body)}, indent=1) + "\n"
        partial = directory / f"{MANIFEST_NAME}.{os.getpid()}.partial"
        with open(partial, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        return partial

    @classmethod
    def read(cls, directory: Path) -> "Manifest":
        """Read and check the manifest.

        Raises:
            StoreNotFoundError: there is none.
            TruncatedError, ChecksumError, FormatError: it is damaged, or of another version.
        """
        path = directory / MANIFEST_NAME
        try:
            size = path.stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            raise StoreNotFoundError(f'no store at {directory}: {path} does not exist; mode="w" creates one') from None
        if size == 0:
            raise TruncatedError(f"{path} is empty; restore it from a copy of the store")
        if size > _MAX_BYTES:
            raise FormatError(f"{path} has {size} bytes, which no manifest has; restore it from a copy of the store")
        return cls._parse(path, path.read_bytes())

    @classmethod
    def _parse(cls, path: Path, text: bytes) -> "Manifest":
        try:
            envelope = json.loads(text)
            body, digest = envelope["body"], envelope["sha256"]
            version = body["format_version"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ChecksumError(f"{path} is not a complete manifest; restore it from a copy of the store") from None
        if digest != _digest(body):
            raise ChecksumError(f"{path} does not match its checksum; restore it from a copy of the store")
        if version != FORMAT_VERSION:
            raise FormatError(
                f"{path} is of format version {version}; this release reads version {FORMAT_VERSION}. "
                "Open it with the release that wrote it"
            )
        try:
            manifest = cls(
                store_id=str(body["store_id"]),
                page_bytes=int(body["page_bytes"]),
                has_rows=bool(body["has_rows"]),
            )
            for fields in body["tables"]:
                manifest = manifest.with_table(TableConfig.from_dict(fields))
            return manifest
        except (ValueError, KeyError, TypeError) as error:
            raise FormatError(f"{path} describes a table that this release does not know: {error}") from error


def _digest(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
