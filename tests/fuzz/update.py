"""An update's file, or the payload or the rows in one whose checksums are right."""

import contextlib
import struct
from pathlib import Path

import numpy as np

import tierstore
from tierstore.errors import DamagedError
from tierstore.store.version import NO_LINEAGE, pack
from tierstore.updates.header import PAGE_BYTES, Origin, UpdateHeader
from tierstore.updates.update_file import UpdateFile, UpdateWriter

from .target import FindingError, Target, scratch_folder

_PATH = scratch_folder() / "update"
_CONFIG = tierstore.TableConfig(name="t", num_embeddings=9, embedding_dim=2)
_LAYOUT = _CONFIG.layout(PAGE_BYTES)
_PAYLOAD = pack({}, {"step": 1}, {}, NO_LINEAGE)


def _write(payload: bytes, ids: bytes) -> Path:
    _PATH.unlink(missing_ok=True)
    rows = np.frombuffer(ids[: len(ids) // 8 * 8], np.int64)
    with contextlib.closing(UpdateWriter()) as writer:
        writer.add_payload(payload)
        if len(rows):
            writer.add_rows(0, _LAYOUT, rows, np.zeros((len(rows), _LAYOUT.weight_words), np.uint64))
        origin = Origin("0" * 32, 1, "1" * 16)
        fields = {"since": 0, "since_commit_id": "", "tables": (_CONFIG,)}
        writer.finish(_PATH, UpdateHeader(origin=origin, chunks=writer.chunks, **fields))
    return _PATH


def run(data: bytes) -> None:
    """The first byte says what the rest is."""
    try:
        if data[:1] == b"f":
            _PATH.write_bytes(data[1:])
        else:
            _write(*((data[1:], b"") if data[:1] == b"p" else (_PAYLOAD, data[1:])))
    except ValueError:  # what no update can hold
        return
    try:
        with UpdateFile(_PATH) as update:
            update.check()
            counts = update.header.rows_of_tables()
            for table, config in enumerate(update.header.tables):
                ids = [row for ids, _ in update.rows(table) for row in ids.tolist()]
                if ids != sorted(set(ids) & set(range(config.num_embeddings))) or len(ids) != counts[config.name]:
                    raise FindingError(f"{ids} are no rows of {config}")
    except DamagedError as error:
        if len(str(error)) > 1000:
            raise FindingError("an error without bound") from error


def seeds() -> list[bytes]:
    whole = _write(_PAYLOAD, np.arange(1, 8, 2).tobytes()).read_bytes()
    return [b"f" + whole, b"p" + _PAYLOAD, b"r" + struct.pack("<3q", 0, 3, 8)]


_WORDS = b'"chunk.0"|"chunk.1"|data_offsets|"U8"|[-1,0,|\\"tables\\"|"num_embeddings\\": |99999999999|\xff\xff\xff\xff'

TARGET = Target(run=run, seeds=seeds, dictionary=tuple(_WORDS.split(b"|")))
