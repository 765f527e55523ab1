"""An update as a file: safetensors, each chunk a tensor of compressed bytes. docs/updates.md draws it.

A file is named by its XXH64, so one that is cut short or damaged on its way is not taken for the one that was sent.
"""

import contextlib
import hashlib
import io
import json
import os
import tempfile
import zlib
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from ..errors import (
    ChecksumError,
    DiskFullError,
    FormatError,
    StoreNotFoundError,
    TableError,
    TierstoreError,
    TruncatedError,
)
from ..exchange.tensor_files import METADATA_KEY, SafetensorsFile, TensorSpec
from ..layout import RowLayout
from ..store.version import Version, json_bytes, unpack
from ..system.checks import excerpt
from ..system.files import open_plain_file, output_errors, partial_file, require_parent, write_all
from ..system.sizes import format_size
from .header import (
    MAX_CHUNK_BYTES,
    MAX_PAYLOAD_BYTES,
    PAGE_BYTES,
    PAYLOAD,
    Chunk,
    UpdateHeader,
    decompress,
    pack_chunk,
    unpack_chunk,
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


class NoBaseError(UnfitError, StoreNotFoundError): ...


class UpdateFile:
    """An update, open for reading.

    Nothing in it is believed: a chunk is read whole, compared with its checksum and decompressed to the bytes that it
    says, at most ``MAX_CHUNK_BYTES``. Memory: the header's, one chunk, and the payload where it is asked for.

    Args:
        id: what it must be, the XXH64 of the whole in 16 hex digits; default: not checked.
        header_bytes: that its header may have; ``self.header_bytes`` is what it has.

    Raises:
        FileNotFoundError. FormatError, TruncatedError: no update, or damaged. ChecksumError: it is not ``id``.
        UnfitError: a larger header, as others take memory, too.
    """

    def __init__(
        self, path: Path, *, id: str | None = None, header_bytes: int = MAX_HEADER_BYTES,  # noqa: A002 - the word for it
    ) -> None:  # fmt: skip
        self.path = path
        self._file = open_plain_file(path)
        try:
            if id is not None and hashlib.file_digest(self._file, xxhash.xxh64).hexdigest() != id:  # type: ignore[arg-type]
                raise ChecksumError(f"{path} is not the update {id}: it was damaged on its way; send it again")
            self._file.seek(0)
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
        try:
            return decompress(data, chunk.raw_bytes)
        except FormatError as error:
            raise FormatError(f"{self.path}, chunk {number}: {error}") from error

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
