"""An update as a file: safetensors, each chunk a tensor of compressed bytes. docs/updates.md draws it.

A file is named by its XXH64, so one that is cut short or damaged on its way is not taken for the one that was sent. Its
header and its chunks are read without trusting a word of them.

Neighbouring ids differ by little, and the first bytes of neighbouring floats are alike. So a chunk has ids as
differences, and of both ids and rows first all elements' first bytes, then all their second bytes, and so on.
"""

import contextlib
import io
import json
import os
import tempfile
import zlib
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from ..config import TableConfig
from ..errors import (
    ChecksumError,
    DiskFullError,
    FormatError,
    TableError,
    TierstoreError,
    TruncatedError,
)
from ..exchange.tensor_files import METADATA_KEY, SafetensorsFile, TensorSpec
from ..io.reads import CHUNK_BYTES
from ..layout import MAX_ROWS, MAX_TABLES, RowLayout
from ..store.manifest import is_store_id
from ..store.version import ORIGIN_KEY, Version, is_commit_id, json_bytes, unpack
from ..system.checks import excerpt, require_int
from ..system.files import open_plain_file, output_errors, partial_file, require_parent, write_all
from ..system.sizes import format_size


class Origin(NamedTuple):
    """A version of another store, whose id is ``source``, in hex."""

    source: str
    version: int
    """Its number there, which a server tells its clients."""
    commit_id: str
    """The commit's identity (``store.version.Lineage``)."""
    urgent: str = ""
    """The identity of a later commit of which some rows are shown already; "" for none."""

    def __str__(self) -> str:
        some = f" with urgent rows of commit {self.urgent}" if self.urgent else ""
        return f"version {self.version} (commit {self.commit_id}){some} of store {self.source}"


def origin_of(extra: Mapping[str, Any]) -> Origin | None:
    """Where the rows of a commit with this ``extra`` come from; None if the store is no replica. FormatError: it is not
    what ``apply_update`` wrote."""
    stored = extra.get(ORIGIN_KEY)
    if stored is None:
        return None
    try:
        found = Origin(**stored)
    except TypeError:
        found = Origin("", 0, "")
    is_version = is_store_id(found.source) and type(found.version) is int and found.version >= 1
    if not is_version or not is_commit_id(found.commit_id) or not (found.urgent == "" or is_commit_id(found.urgent)):
        raise FormatError(
            f"extra[{ORIGIN_KEY!r}] is {excerpt(stored)}, not the source of a replica's rows; start the server with a "
            "new, empty directory"
        )
    return found


MAX_CHUNK_BYTES: Final = 2 * CHUNK_BYTES
"""A chunk before it was compressed: what a reader holds in memory, some times over, for a few bytes of a file. A
publisher reads ``CHUNK_BYTES`` of rows at a time, and a row of 8 bytes comes with an id of as many."""
_ID_BYTES: Final = 8


def _planes(values: NDArray[Any]) -> bytes:
    flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return flat.reshape(-1, values.dtype.itemsize).T.tobytes()


def _from_planes(raw: bytes, dtype: "np.dtype[Any]") -> NDArray[Any]:
    planes = np.frombuffer(raw, np.uint8).reshape(dtype.itemsize, -1)
    return np.ascontiguousarray(planes.T).view(dtype).reshape(-1)


def chunk_bytes(num_rows: int, layout: RowLayout) -> int:
    return num_rows * (_ID_BYTES + layout.stored_columns * layout.numpy_dtype.itemsize)


def pack_chunk(ids: NDArray[np.int64], weights: NDArray[np.uint64], layout: RowLayout) -> bytes:
    """A chunk, not compressed yet, of ascending ids [n] and weights [n, weight words], without what pads a row."""
    rows = weights.view(layout.numpy_dtype)[:, : layout.stored_columns]
    return _planes(np.diff(ids, prepend=np.int64(0))) + _planes(rows)


def unpack_chunk(raw: bytes, num_rows: int, layout: RowLayout) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """Inverse of ``pack_chunk``; ids may be anything. FormatError for another length than so many rows have."""
    if len(raw) != chunk_bytes(num_rows, layout):
        raise FormatError(f"a chunk has {len(raw)} bytes, and {num_rows} rows have {chunk_bytes(num_rows, layout)}")
    split = num_rows * _ID_BYTES
    with np.errstate(over="ignore"):
        ids = np.cumsum(_from_planes(raw[:split], np.dtype("<i8")))
    values = _from_planes(raw[split:], layout.numpy_dtype).reshape(num_rows, layout.stored_columns)
    weights = np.zeros((num_rows, layout.weight_words), np.uint64)
    weights.view(layout.numpy_dtype)[:, : layout.stored_columns] = values
    return ids, weights


_FORMAT: Final = 3
PAYLOAD: Final = -1  # in place of a table's index
MAX_PAYLOAD_BYTES: Final = 256 << 20  # which a server that applies the update holds in memory several times
PAGE_BYTES: Final = 4096  # of the layouts by which rows are packed, which have nothing of a page in them
_MAX_VERSION: Final = 2**40


class Chunk(NamedTuple):
    table: int  # its index, or PAYLOAD
    rows: int  # 0 in the payload
    raw_bytes: int  # before it was compressed
    checksum: str  # XXH64 of the compressed bytes, hex


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateHeader:
    """Attributes:
    origin: what the rows are of.
    since: the version of the same store that they are changes of; 0 for none, when every row that is not in the update
        has its first value.
    since_commit_id: that version's identity; "" for none.
    tables: all tables of the store, in its order, as a replica has them.
    chunks: those of one table neighbours, tables ascending, ids ascending; the payload's come first.
    passed: identities of the commits between ``since`` and the origin, whose rows are in the update, too.
    is_urgent: there are only some of the changed rows, and a payload without ``extra`` and tensors.
    """

    origin: Origin
    since: int
    since_commit_id: str
    tables: tuple[TableConfig, ...]
    chunks: tuple[Chunk, ...]
    passed: tuple[str, ...] = ()
    is_urgent: bool = False

    def __post_init__(self) -> None:
        require_int(self.since, "since", 0, _MAX_VERSION)
        require_int(self.origin.version, "version", 1, _MAX_VERSION)
        if not is_store_id(self.origin.source):
            raise ValueError(f"source={excerpt(self.origin.source)} is not the id of a store")
        for commit_id in (self.origin.commit_id, *([self.since_commit_id] if self.since else []), *self.passed):
            if not is_commit_id(commit_id):
                raise ValueError(f"{excerpt(commit_id)} is not the identity of a commit")
        if not self.since and (self.is_urgent or self.since_commit_id != ""):
            raise ValueError("urgent rows for no commit, or the identity of none")
        if self.since >= self.origin.version:
            raise ValueError(f"since={self.since} is not below version {self.origin.version}")
        if len({config.name for config in self.tables}) < len(self.tables) or len(self.tables) > MAX_TABLES:
            raise ValueError("two tables have one name, or there are too many")
        for place, config in enumerate(self.tables):
            wanted = config.with_ids(place)[1:]
            if wanted != tuple(replace(each, init=wanted[0].init) for each in self.tables[place + 1 :][: len(wanted)]):
                raise ValueError(f"table {excerpt(config.name)} has dynamic ids, and the next table does not hold them")
        layouts = [config.layout(PAGE_BYTES) for config in self.tables]
        for chunk in self.chunks:
            require_int(chunk.table, "table", PAYLOAD, len(self.tables) - 1)
            require_int(chunk.rows, "rows", 0 if chunk.table == PAYLOAD else 1, MAX_ROWS)
            require_int(chunk.raw_bytes, "raw_bytes", 1, MAX_CHUNK_BYTES)
            if chunk.table != PAYLOAD and chunk.raw_bytes != chunk_bytes(chunk.rows, layouts[chunk.table]):
                raise ValueError(f"{chunk.rows} rows of table {chunk.table} in {chunk.raw_bytes} bytes")
            if not is_commit_id(chunk.checksum):  # 16 hex digits, as well
                raise ValueError(f"checksum={excerpt(chunk.checksum)}")
        for config, rows in zip(self.tables, self.rows_of_tables().values(), strict=True):
            if rows > config.num_embeddings:
                raise ValueError(f"{rows} rows of table {excerpt(config.name)}, which has {config.num_embeddings}")
        order = [chunk.table for chunk in self.chunks]
        if order != sorted(order) or PAYLOAD not in order:
            raise ValueError("its chunks are in no order, or there is no payload")
        payload_bytes = sum(chunk.raw_bytes for chunk in self.chunks if chunk.table == PAYLOAD)
        if payload_bytes > MAX_PAYLOAD_BYTES:
            raise ValueError(f"a payload of {payload_bytes} bytes; at most {MAX_PAYLOAD_BYTES} are taken")

    @property
    def base(self) -> Origin | None:
        """The version that the receiver must have; None if it needs none."""
        return Origin(self.origin.source, self.since, self.since_commit_id) if self.since else None

    @property
    def shown(self) -> Origin:
        """What the receiver shows then."""
        base = self.base
        return base._replace(urgent=self.origin.commit_id) if self.is_urgent and base else self.origin

    def has_rows_of(self, origin: Origin | None) -> bool:
        """Whether the receiver has the base, and at most urgent rows that are in the update, too."""
        urgent = "" if origin is None else origin.urgent
        is_in = urgent == self.origin.commit_id or urgent in self.passed
        return self.base is None or (self.base._replace(urgent=urgent) == origin and (not urgent or is_in))

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
            "basis": "rows" if self.since else "nothing",
            "tables": [config.to_dict() for config in self.tables],
            "chunks": [list(chunk) for chunk in self.chunks],
            "passed": list(self.passed),
            "is_urgent": self.is_urgent,
        }

    @classmethod
    def from_dict(cls, fields: Any) -> "UpdateHeader":
        """Inverse of ``to_dict``. ValueError, TypeError, KeyError or OverflowError for anything it did not write."""
        if fields["update_format_version"] != _FORMAT:
            found = excerpt(fields["update_format_version"])
            raise ValueError(f"format version {found}, this release reads {_FORMAT}: publish with the same release")
        if fields["basis"] != ("rows" if fields["since"] else "nothing"):
            raise ValueError(f"basis={excerpt(fields['basis'])} does not go with since={excerpt(fields['since'])}")
        return cls(
            origin=Origin(fields["source"], fields["version"], fields["commit_id"]),
            since=fields["since"],
            since_commit_id=fields["since_commit_id"],
            tables=tuple(TableConfig.from_dict(config) for config in fields["tables"]),
            chunks=tuple(Chunk(*chunk) for chunk in fields["chunks"]),
            passed=tuple(fields["passed"]),
            is_urgent=fields["is_urgent"] is True,
        )


_PAYLOAD_CHUNK_BYTES: Final = 8 << 20
MAX_HEADER_BYTES: Final = 32 << 20
"""Some 200,000 chunks, of all files that are applied together. As JSON it takes up to 20 times as much memory."""
_LENGTH_BYTES: Final = 8
_STEP_BYTES: Final = 1 << 20
_MAX_JSON_BYTES: Final = 4 << 20  # of extra, and of the tensors' names: as JSON, 25 times as much memory


def _require_small(payload: "bytes | memoryview") -> None:
    extra_bytes, names_bytes = json_bytes(payload)
    for what, size, limit in (
        ("tensors and extra", len(payload), MAX_PAYLOAD_BYTES),
        ("extra", extra_bytes, _MAX_JSON_BYTES),
        ("tensors' names", names_bytes, _MAX_JSON_BYTES),
    ):
        if size > limit:
            raise ValueError(f"a version with {what} of {size} bytes; an update holds at most {limit}")


class UpdateWriter:
    """Takes chunks into a temporary file in the folder of ``path``; ``finish`` makes the update of them, there.
    DiskFullError, TierstoreError: the system has no space for it, or refuses it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.chunks: list[Chunk] = []
        self._sizes: list[int] = []
        with self._room():
            require_parent(path)
            self._spool = tempfile.TemporaryFile(buffering=0, dir=path.parent)  # noqa: SIM115 - closed by close

    def add_payload(self, payload: bytes) -> None:
        """Before any rows. ValueError if it is larger than an update can have it."""
        _require_small(payload)
        for start in range(0, len(payload), _PAYLOAD_CHUNK_BYTES):
            self._add(PAYLOAD, 0, payload[start : start + _PAYLOAD_CHUNK_BYTES])

    def add_rows(self, table: int, layout: RowLayout, rows: NDArray[np.int64], weights: NDArray[np.uint64]) -> None:
        """Rows of a table, above those added before; tables ascending."""
        self._add(table, len(rows), pack_chunk(rows, weights, layout))

    def _add(self, table: int, rows: int, raw: bytes) -> None:
        data = zlib.compress(raw, 1)
        with self._room():
            write_all(self._spool.fileno(), data, sum(self._sizes))
        self._sizes.append(len(data))
        self.chunks.append(Chunk(table, rows, len(raw), xxhash.xxh64_hexdigest(data)))

    @contextlib.contextmanager
    def _room(self) -> Iterator[None]:
        try:
            with output_errors(self._path):
                yield
        except DiskFullError as error:
            raise DiskFullError(
                f"{error}: an update takes twice its size as it is made, {format_size(sum(self._sizes))} so far"
            ) from error

    def finish(self, header: UpdateHeader) -> str:
        """Write the file; its id. FileExistsError if there is one; DiskFullError: nothing is left of it."""
        specs = [TensorSpec(f"chunk.{number}", torch.uint8, (size,)) for number, size in enumerate(self._sizes)]
        head = SafetensorsFile(specs, header.to_dict()).head
        if len(head) > MAX_HEADER_BYTES:
            raise ValueError(
                f"an update with a header of {len(head)} bytes; publish more often, or fewer rows at a time"
            )
        digest = xxhash.xxh64(head)
        with self._room(), partial_file(self._path, force=False) as descriptor, open(os.dup(descriptor), "wb") as file:
            file.write(head)
            while part := self._spool.read(_STEP_BYTES):
                digest.update(part)
                file.write(part)
        return digest.hexdigest()

    def close(self) -> None:
        self._spool.close()


class UnfitError(TierstoreError):
    """What is at ``path``, as it was offered, does not fit the replica or what is applied with it."""

    def __init__(self, message: str, path: Path) -> None:
        super().__init__(message)
        self.path = path


class UnfitTablesError(UnfitError, TableError): ...


class UpdateFile:
    """An update, open for reading.

    Nothing in it is believed: a chunk is read whole, compared with its checksum and decompressed to the bytes that it
    says, at most ``MAX_CHUNK_BYTES``. Memory: the header's, one chunk, and the payload where it is asked for.

    Args:
        header_bytes: that its header may have; ``self.header_bytes`` is what it has.

    Raises:
        FileNotFoundError. FormatError, TruncatedError: no update, or damaged.
        UnfitError: a larger header, as others take memory, too.
    """

    def __init__(self, path: Path, *, header_bytes: int = MAX_HEADER_BYTES) -> None:
        self.path = path
        self._file = open_plain_file(path)
        try:
            self._read_header(header_bytes)
        except BaseException:
            self.close()
            raise

    def _read_header(self, limit: int) -> None:
        size = os.fstat(self._file.fileno()).st_size
        length = int.from_bytes(self._file.read(_LENGTH_BYTES), "little")
        if not 0 < length <= min(MAX_HEADER_BYTES, size - _LENGTH_BYTES):
            raise TruncatedError(f"{self.path} is no update, or cut short: its header would have {length} bytes")
        if length > limit:
            said = f"has a header of {length} bytes, and {limit} are left for files applied together; take a full copy"
            raise UnfitError(f"{self.path} {said}", self.path)
        self.header_bytes = length
        try:
            fields = json.loads(self._file.read(length))
            self.header = UpdateHeader.from_dict(json.loads(fields["__metadata__"][METADATA_KEY]))
            sizes = [_size(fields[f"chunk.{number}"]) for number in range(len(self.header.chunks))]
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise FormatError(f"{self.path} is no update that can be read: {excerpt(str(error), 200)}") from error
        self._starts = np.cumsum([_LENGTH_BYTES + length, *sizes]).tolist()
        if self._starts[-1] != size:
            raise TruncatedError(f"{self.path} has {size} bytes, and {self._starts[-1]} by its header")

    def version(self) -> Version:
        """What is sent besides rows, without tables. Raises FormatError, ChecksumError, DamagedError."""
        joined = io.BytesIO()
        for number in self._numbers(PAYLOAD):
            joined.write(self._raw(number))
        try:
            _require_small(joined.getbuffer())
        except ValueError as error:
            raise FormatError(f"{self.path}: {error}") from error
        return unpack(self.header.origin.version, joined.getvalue())

    def _numbers(self, table: int) -> range:
        first, stop = (bisect_left(self.header.chunks, (each,)) for each in (table, table + 1))
        return range(first, stop)

    def rows(self, table: int) -> Iterator[tuple[NDArray[np.int64], NDArray[np.uint64]]]:
        """Row numbers of a table, ascending from chunk to chunk, and their weights, uint64 [n, weight words].
        FormatError or ChecksumError for what ``UpdateWriter`` did not write."""
        config = self.header.tables[table]
        layout, last = config.layout(PAGE_BYTES), -1
        for number in self._numbers(table):
            ids, weights = unpack_chunk(self._raw(number), self.header.chunks[number].rows, layout)
            # Differences, not only ends: a sum that wrapped around is found by them.
            if ids[0] <= last or ids[-1] >= config.num_embeddings or (np.diff(ids) <= 0).any():
                raise FormatError(f"{self.path}: chunk {number} has ids that are not rows of {excerpt(config.name)}")
            last = int(ids[-1])
            yield ids, weights

    def _raw(self, number: int) -> bytes:
        start, stop = self._starts[number], self._starts[number + 1]
        self._file.seek(start)
        data = self._file.read(stop - start)
        chunk = self.header.chunks[number]
        if len(data) != stop - start or xxhash.xxh64_hexdigest(data) != chunk.checksum:
            raise ChecksumError(f"{self.path}: chunk {number} does not match its checksum; send the update again")
        inflater = zlib.decompressobj()
        try:
            raw = inflater.decompress(data, chunk.raw_bytes + 1)  # and never more memory than that
        except zlib.error as error:
            raise FormatError(f"{self.path}: chunk {number} cannot be decompressed ({error})") from error
        if len(raw) != chunk.raw_bytes or not inflater.eof or inflater.unused_data:
            said = f"does not decompress to the {chunk.raw_bytes} bytes that its header says"
            raise FormatError(f"{self.path}: chunk {number} {said}")
        return raw

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "UpdateFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _size(entry: Any) -> int:
    (size,) = entry["shape"]
    if entry["dtype"] != "U8" or type(size) is not int or not 0 < size <= 2 * MAX_CHUNK_BYTES:
        raise ValueError(f"a chunk of shape {excerpt(entry['shape'])}")
    return size
