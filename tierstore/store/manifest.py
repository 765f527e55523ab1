"""manifest.json: what a store is, apart from its rows. Replaced atomically, checksummed, read before anything else."""

import contextlib
import hashlib
import json
import os
import re
import uuid
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..config import TableConfig
from ..errors import ChecksumError, FormatError, StoreNotFoundError, TableError
from ..layout import MAX_TABLES, RowLayout
from ..system.checks import excerpt
from ..system.files import directory_locked, names_in, read_plain_file, sync_directory, translate_os_error, was_url

FORMAT_VERSION: Final = 5
_FORMAT_BEFORE: Final = 4  # of the same content; see io/records.py
MANIFEST_NAME: Final = "manifest.json"
_BEFORE_IT: Final = (MANIFEST_NAME, "rows.", "incoming", ".")  # how names begin of what there may be before
_MAX_BYTES: Final = 16 * 2**20
"""Some 50,000 tables. Read as JSON, a hostile file of this size takes 20 times as much memory."""
_MAX_REASON: Final = 400
_PAGE_BYTES: Final = frozenset(2**n for n in range(9, 17))
_PART: Final = re.compile(r"(\d+)-of-(\d+)")
_STORE_ID: Final = re.compile("[0-9a-f]{32}")


class Part(NamedTuple):
    """A rank's store, in the folder of a sharded store of so many ranks."""

    size: int
    rank: int
    path: Path

    @classmethod
    def named(cls, path: Path) -> "Part | None":
        name = _PART.fullmatch(path.name)
        return None if name is None else cls(int(name[2]), int(name[1]), path)


def parts_in(directory: Path) -> list[Part]:
    """Of a sharded store, by size and rank; empty of another folder."""
    named = [part for path in directory.glob("*-of-*") if (part := Part.named(path)) is not None]
    return sorted(part for part in named if (part.path / MANIFEST_NAME).exists())


def is_store_id(value: object) -> bool:
    return isinstance(value, str) and _STORE_ID.fullmatch(value) is not None


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Identity, page size and tables of a store."""

    store_id: str  # 16 random bytes in hex; the row file carries the same
    page_bytes: int  # page size of the row file
    tables: tuple[TableConfig, ...] = ()
    """A table's index is its place; one that was dropped keeps it (``TableConfig.is_dropped``)."""
    has_rows: bool = False  # the row file was made; from then on its absence is damage

    @cached_property
    def shapes(self) -> dict[int, tuple[RowLayout, int]]:
        """Layout and number of rows of each table, by its index; no rows of one that was dropped. To be read only."""
        return {
            index: (each.layout(self.page_bytes), 0 if each.is_dropped else each.num_rows)
            for index, each in enumerate(self.tables)
        }

    @classmethod
    def new(cls, page_bytes: int) -> "Manifest":
        return cls(store_id=uuid.uuid4().hex, page_bytes=page_bytes)

    def create(self, directory: Path) -> None:
        """Write the first manifest, unless another process was faster: then that one stands. StoreNotFoundError: ranks'
        stores, or other files, are there. Others as of ``write``."""
        _require_not_sharded(directory)
        with directory_locked(directory):
            if (directory / MANIFEST_NAME).exists():
                return
            if others := [name for name in names_in(directory) if not name.startswith(_BEFORE_IT)]:
                raise StoreNotFoundError(
                    f"no store at {directory}, which holds other files ({excerpt(min(others))}); to make one, give a "
                    "new directory or an empty one"
                )
            self.write(directory)

    def write(self, directory: Path) -> None:
        """Replace the manifest in ``directory``; after a crash there is the old one or the new one. TableError: more
        tables than a manifest can hold. DiskFullError, ReadOnlyError, TierstoreError: the system refused; the old one
        stands, or, if the directory could not be synced, this one."""
        text = self._text()
        partial = directory / f"{MANIFEST_NAME}.{os.getpid()}.partial"  # no other process writes it
        try:
            partial.unlink(missing_ok=True)
            # A new file only: a link under this name would lead out of the directory.
            with open(partial, "x", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, directory / MANIFEST_NAME)
            sync_directory(directory)
        except BaseException as error:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise translate_os_error(error, directory / MANIFEST_NAME) from error
            raise

    def with_table(self, config: TableConfig) -> "Manifest":
        """One with one table more. Of the others nothing is done again, so many may be made one by one."""
        other = replace(self, tables=(*self.tables, config))
        other.__dict__["_texts"] = (*self._texts, _canonical(config.to_dict()))
        return other

    def with_place(self, index: int, config: TableConfig) -> "Manifest":
        return replace(self, tables=(*self.tables[:index], config, *self.tables[index + 1 :]))

    @cached_property
    def _texts(self) -> tuple[str, ...]:
        return tuple(_canonical(config.to_dict()) for config in self.tables)

    def _text(self) -> str:
        fields = {"has_rows": self.has_rows, "page_bytes": self.page_bytes, "store_id": self.store_id}
        head = {"format_version": FORMAT_VERSION, **fields}
        digest = hashlib.sha256(f'{_canonical(head)[:-1]},"tables":[{",".join(self._texts)}]}}'.encode()).hexdigest()
        tables = ",\n".join(self._texts)
        text = f'{{"body": {json.dumps(head, indent=1)[:-2]},\n "tables": [\n{tables}\n]}},\n"sha256": "{digest}"}}\n'
        if len(text) > _MAX_BYTES:
            raise TableError(
                f"{len(self.tables)} tables take a manifest of {len(text)} bytes; it holds at most {_MAX_BYTES}. "
                "Make fewer tables, with shorter names"
            )
        return text

    @classmethod
    def read(cls, directory: Path) -> "Manifest":
        """Read and check the manifest. StoreNotFoundError: there is none. TruncatedError, ChecksumError, FormatError:
        it is damaged, of another version, or no plain file. TierstoreError: it cannot be read."""
        path = directory / MANIFEST_NAME
        try:
            text = read_plain_file(path, _MAX_BYTES)
        except FileNotFoundError:
            if directory.exists() and not directory.is_dir():
                raise StoreNotFoundError(
                    f"{directory} is a file, and a store is a directory; give another path"
                ) from None
            if was_url(directory):
                way = "bring it here by tierstore backup URL DIR, and open DIR"
                raise StoreNotFoundError(
                    f"{directory} is a URL, and a store is a folder of this machine: {way}"
                ) from None
            _require_not_sharded(directory)
            raise StoreNotFoundError(
                f"no store at {directory}: {path} does not exist; check the path, or make a store: train "
                'one, import one, or open with mode="w"'
            ) from None
        return cls._parse(path, text)

    @classmethod
    def _parse(cls, path: Path, text: bytes) -> "Manifest":
        try:
            envelope = json.loads(text)
            body, digest = envelope["body"], envelope["sha256"]
            version = body["format_version"]
            intact = digest == _digest(body)
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ChecksumError(f"{path} is not a complete manifest; restore it from a copy of the store") from None
        if not intact:
            raise ChecksumError(f"{path} does not match its checksum; restore it from a copy of the store")
        if version not in (FORMAT_VERSION, _FORMAT_BEFORE):
            raise FormatError(
                f"{path} is of format version {excerpt(version)}; this release reads {_FORMAT_BEFORE} and "
                f"{FORMAT_VERSION}. Open it with the release that wrote it"
            )
        try:
            return cls._from_body(body)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            reason = f"no {excerpt(error.args[0])}" if isinstance(error, KeyError) else str(error)
            reason = reason if len(reason) <= _MAX_REASON else f"{reason[:_MAX_REASON]}..."
            raise FormatError(
                f"{path} describes what this release does not know: {reason}. "
                "Open it with the release that wrote it, or restore it from a copy of the store"
            ) from error

    @classmethod
    def _from_body(cls, body: dict[str, Any]) -> "Manifest":
        """ValueError, TypeError, KeyError or OverflowError for anything that ``_text`` did not write."""
        page_bytes, store_id, has_rows = body["page_bytes"], body["store_id"], body["has_rows"]
        if type(page_bytes) is not int or page_bytes not in _PAGE_BYTES:
            raise ValueError(f"page_bytes={excerpt(page_bytes)} is no page size")
        if not is_store_id(store_id):
            raise ValueError(f"store_id={excerpt(store_id)} is not 16 bytes in hex")
        if not isinstance(has_rows, bool):
            raise TypeError(f"has_rows={excerpt(has_rows)} is not true or false")
        if not isinstance(body["tables"], list) or len(body["tables"]) > MAX_TABLES:
            raise ValueError(f"tables must be a list of at most {MAX_TABLES}")
        tables = tuple(TableConfig.from_dict(fields) for fields in body["tables"])
        if len({table.name for table in tables}) < len(tables):
            raise ValueError("two tables have one name")
        for layout in {table.layout(page_bytes) for table in tables}:
            layout.pages_per_block  # noqa: B018 - ValueError for rows too wide
        return cls(store_id=store_id, page_bytes=page_bytes, has_rows=has_rows, tables=tables)


def _require_not_sharded(directory: Path) -> None:
    if parts := parts_in(directory):
        size = parts[-1].size
        raise StoreNotFoundError(
            f"{directory} was written by {size} ranks: start ranks, as by torchrun --nproc-per-node {size}, which open "
            "it by tierstore.dist.open_sharded, or make a store of theirs that is not sharded, by tierstore reshard "
            f"{directory} NEW_DIR --plain"
        ) from None


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _digest(body: Any) -> str:
    return hashlib.sha256(_canonical(body).encode()).hexdigest()
