"""What an update says of itself: JSON in the file's header, read without trusting a word of it."""

import re
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from ..config import TableConfig, require_int
from ..layout import MAX_ROWS, MAX_TABLES
from ..store.manifest import is_store_id
from ..store.version import is_commit_id
from ..system.excerpt import excerpt
from .chunks import MAX_CHUNK_BYTES, chunk_bytes
from .origin import Origin

_FORMAT: Final = 2
PAYLOAD: Final = -1
"""Stands for a table's index in chunks of the version's own payload."""
MAX_PAYLOAD_BYTES: Final = 256 << 20
"""Dense tensors and ``extra`` of an update: each server that applies it holds them in memory several times."""
PAGE_BYTES: Final = 4096
"""Of the layouts by which rows are packed, which have nothing of a page in them."""
_BASES: Final = ("nothing", "rows")
"""What a file says that its rows are: every row ever written, or those written since a version."""
_CHECKSUM: Final = re.compile("[0-9a-f]{16}")
_MAX_VERSION: Final = 2**40


class Chunk(NamedTuple):
    """One chunk, in the order of the file."""

    table: int
    """Index of its table, or ``PAYLOAD``."""
    rows: int
    """0 in the payload."""
    raw_bytes: int
    """Before it was compressed."""
    checksum: str
    """XXH64 of the compressed bytes, hex."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateHeader:
    """Attributes:
    origin: what the rows are of.
    since: the version of the same store that they are changes of; 0 for none, when every row that is not in the update
        has its first value.
    since_commit_id: that version's identity; "" for none.
    tables: all tables of the store, in its order, as a replica has them.
    chunks: those of one table neighbours, tables ascending, ids ascending; the payload's come first.
    """

    origin: Origin
    since: int
    since_commit_id: str
    tables: tuple[TableConfig, ...]
    chunks: tuple[Chunk, ...]

    def __post_init__(self) -> None:
        require_int(self.since, "since", 0, _MAX_VERSION)
        require_int(self.origin.version, "version", 1, _MAX_VERSION)
        if not is_store_id(self.origin.source):
            raise ValueError(f"source={excerpt(self.origin.source)} is not the id of a store")
        for name, commit_id in (("commit_id", self.origin.commit_id), ("since_commit_id", self.since_commit_id)):
            if commit_id != "" and not is_commit_id(commit_id):
                raise ValueError(f"{name}={excerpt(commit_id)} is not the identity of a commit")
        if (self.since_commit_id == "") != (self.since == 0):
            raise ValueError(f"since={self.since} without an identity, or an identity without it")
        if self.since >= self.origin.version:
            raise ValueError(f"since={self.since} is not below version {self.origin.version}")
        if len({config.name for config in self.tables}) < len(self.tables) or len(self.tables) > MAX_TABLES:
            raise ValueError("two tables have one name, or there are too many")
        self._check_chunks()
        order = [chunk.table for chunk in self.chunks]
        if order != sorted(order) or PAYLOAD not in order:
            raise ValueError("its chunks are in no order, or there is no payload")
        payload_bytes = sum(chunk.raw_bytes for chunk in self.chunks if chunk.table == PAYLOAD)
        if payload_bytes > MAX_PAYLOAD_BYTES:
            raise ValueError(f"a payload of {payload_bytes} bytes; at most {MAX_PAYLOAD_BYTES} are taken")

    def _check_chunks(self) -> None:
        """ValueError or TypeError unless each has the size that its rows have, and no table more rows than it can."""
        layouts = [config.layout(PAGE_BYTES) for config in self.tables]
        for chunk in self.chunks:
            require_int(chunk.table, "table", PAYLOAD, len(self.tables) - 1)
            require_int(chunk.rows, "rows", 0 if chunk.table == PAYLOAD else 1, MAX_ROWS)
            require_int(chunk.raw_bytes, "raw_bytes", 1, MAX_CHUNK_BYTES)
            if chunk.table != PAYLOAD and chunk.raw_bytes != chunk_bytes(chunk.rows, layouts[chunk.table]):
                raise ValueError(f"{chunk.rows} rows of table {chunk.table} in {chunk.raw_bytes} bytes")
            if not isinstance(chunk.checksum, str) or not _CHECKSUM.fullmatch(chunk.checksum):
                raise ValueError(f"checksum={excerpt(chunk.checksum)}")
        for config, rows in zip(self.tables, self.rows_of_tables().values(), strict=True):
            if rows > config.num_embeddings:
                raise ValueError(f"{rows} rows of table {excerpt(config.name)}, which has {config.num_embeddings}")

    @property
    def base(self) -> Origin | None:
        """The version that the receiver must have; None if it needs none."""
        return Origin(self.origin.source, self.since, self.since_commit_id) if self.since else None

    @property
    def num_rows(self) -> int:
        return sum(chunk.rows for chunk in self.chunks)

    def rows_of_tables(self) -> dict[str, int]:
        """How many rows of each table are sent."""
        counts = dict.fromkeys((config.name for config in self.tables), 0)
        for chunk in self.chunks:
            if chunk.table != PAYLOAD:
                counts[self.tables[chunk.table].name] += chunk.rows
        return counts

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form; ``from_dict`` reads it back."""
        return {
            "update_format_version": _FORMAT,
            "source": self.origin.source,
            "version": self.origin.version,
            "commit_id": self.origin.commit_id,
            "since": self.since,
            "since_commit_id": self.since_commit_id,
            "basis": _BASES[self.since > 0],
            "tables": [config.to_dict() for config in self.tables],
            "chunks": [list(chunk) for chunk in self.chunks],
        }

    @classmethod
    def from_dict(cls, fields: Any) -> "UpdateHeader":
        """Inverse of ``to_dict``. ValueError, TypeError, KeyError or OverflowError for anything it did not write."""
        if fields["update_format_version"] != _FORMAT:
            raise ValueError(
                f"format version {excerpt(fields['update_format_version'])}; this release reads version {_FORMAT}: "
                "publish with the same release"
            )
        made = cls(
            origin=Origin(fields["source"], fields["version"], fields["commit_id"]),
            since=fields["since"],
            since_commit_id=fields["since_commit_id"],
            tables=tuple(TableConfig.from_dict(config) for config in fields["tables"]),
            chunks=tuple(Chunk(*chunk) for chunk in fields["chunks"]),
        )
        if fields["basis"] != _BASES[made.since > 0]:
            raise ValueError(f"basis={excerpt(fields['basis'])} does not go with since={made.since}")
        return made
