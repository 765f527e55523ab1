"""Targets: files of a store, damaged, or forged with the right checksums."""

import contextlib
import functools
import hashlib
import json
import struct
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import torch

import tierstore
from tierstore import TableConfig, init, optim
from tierstore.errors import DamagedError, TierstoreError
from tierstore.io import btree, records, segments
from tierstore.io.btree import Pages, find_entries, list_tree, new_walk
from tierstore.io.meta import META_READ_BYTES, bytes_checksum, parse_meta
from tierstore.io.places import TableArrays
from tierstore.io.row_map import RowMap
from tierstore.io.segments import COUNT, KEYS, Stored
from tierstore.io.snapshot import check_page_use
from tierstore.io.verify import Verifier
from tierstore.kernels.xxh64 import words_hash
from tierstore.offline import inspection
from tierstore.store.manifest import MANIFEST_NAME, Manifest, _digest
from tierstore.store.version import NO_LINEAGE, TableState, pack, unpack, unpack_tensors
from tierstore.updates.update_file import PAGE_BYTES as UPDATE_PAGE_BYTES
from tierstore.updates.update_file import Origin, UpdateFile, UpdateHeader, UpdateWriter

from .target import INTERESTING, FindingError, Target, scratch_folder

_FOLDER = scratch_folder()


# manifest.json, with the right checksum over whatever the body is, as one who means harm would have it.


def _sealed_manifest(data: bytes) -> bytes:
    try:
        body = json.loads(data)
        return json.dumps({"body": body, "sha256": _digest(body)}).encode()
    except (ValueError, RecursionError):
        return b'{"body": ' + data + b', "sha256": "' + hashlib.sha256(data).hexdigest().encode() + b'"}'


def _read_manifest(data: bytes) -> Manifest:
    """The bytes are the body; if the first is ``!``, the rest is the whole file."""
    (_FOLDER / MANIFEST_NAME).write_bytes(data[1:] if data[:1] == b"!" else _sealed_manifest(data))
    return Manifest.read(_FOLDER)


def _check_manifest(manifest: Manifest) -> None:
    manifest.write(_FOLDER)
    again = Manifest.read(_FOLDER)
    if again != manifest:
        raise FindingError(f"{manifest} is read back as {again}")


def _manifests() -> list[bytes]:
    table = TableConfig(
        name="u", num_embeddings=9, embedding_dim=8, dtype="bfloat16", rounding="stochastic", feature_names=("a", "b"),
        pooling="max", init=init.Normal(std=0.5, seed=3), optimizer=optim.Adam(betas=(0.8, 0.9)),
    )  # fmt: skip
    replace(Manifest.new(4096), tables=(table, replace(table, name="t", feature_names=()))).write(_FOLDER)
    whole = (_FOLDER / MANIFEST_NAME).read_bytes()
    return [json.dumps(json.loads(whole)["body"]).encode(), b"!" + whole]


# The records beside the segments, with the right checksum, and the payload of a commit.

_UNPACKERS = [getattr(records, name) for name in sorted(vars(records)) if name.startswith("unpack_")]


def _read_record(data: bytes) -> None:
    """The first byte chooses between the kinds of records and the payload; the rest is the content."""
    if not data:
        return
    choice, content = data[0] % (len(_UNPACKERS) + 1), data[1:]
    if choice == len(_UNPACKERS):
        for name, state in unpack(3, content).tables.items():
            if not isinstance(name, str) or [type(each) for each in state] != [int, float]:
                raise FindingError(f"table {name!r} has the state {state!r}")
        return
    with contextlib.suppress(ValueError, struct.error):
        _UNPACKERS[choice](content + struct.pack("<Q", bytes_checksum(content)))
    with contextlib.suppress(ValueError, struct.error):
        _UNPACKERS[choice](content)
        raise FindingError("a record without its checksum was taken")


def _records() -> list[bytes]:
    extra: dict[str, Any] = {"step": 10, "list": [1, 2.5]}
    lineage = NO_LINEAGE.following(2).following(3)
    payload = pack({"t": TableState(9, 0.25)}, extra, {"w": torch.ones(3)}, lineage)
    record = records.CommitRecord(version=3, payload_bytes=100, payload_checksum=1)
    log = records.LogRecord(next_number=1 << 33, num_segments=3, hash=2**63)
    first = records.first_records(b"0123456789abcdef").values()
    whole = [*first, records.pack_words(*record), records.pack_words(*log)]
    found = [bytes([choice]) + packed[:-8] for packed in whole for choice in range(len(_UNPACKERS))]
    return [*found, bytes([len(_UNPACKERS)]) + payload]


# A small store, and edits of its files that lead somewhere: an input is a list of edits, not a whole file.

PAGE_BYTES = 4096


@functools.cache
def _store() -> tuple[Path, bytes]:
    """The folder and the row file of two tables: two levels of tree, freed pages, a payload with tensors, an anchor."""
    folder, sgd = scratch_folder() / "store", optim.SGD(lr=1.0)
    with tierstore.open(folder, ddr="4MiB", threads=1) as store:
        wide = store.create_table(TableConfig(name="wide", num_embeddings=700, embedding_dim=250, optimizer=sgd))
        narrow = store.create_table(TableConfig(name="narrow", num_embeddings=900, embedding_dim=8, dtype="bfloat16"))
        wide.write(torch.arange(560), torch.arange(560.0)[:, None].expand(560, 250).contiguous())
        narrow.write(torch.arange(900), torch.ones(900, 8, dtype=torch.bfloat16))
        store.commit()
        wide.write(torch.arange(0, 700, 7), torch.full((100, 250), -1.0))
        store.commit(extra={"step": 7}, tensors={"w": torch.arange(6.0).reshape(2, 3)})
    return folder, (folder / "rows.lmdb").read_bytes()


def _edited(content: bytes, pages: list[int], data: bytes) -> bytearray:
    """``content`` after the edits in ``data``, eight bytes each: kind, place in ``pages`` (or anywhere), value."""
    image = bytearray(content)
    for kind, page, offset, value in struct.iter_unpack("<BBHI", data[: len(data) // 8 * 8]):
        at = pages[page % len(pages)] * PAGE_BYTES + offset % PAGE_BYTES
        if kind & 0x80:
            at = (page << 16 | offset) * 16 % len(image)
        kind = (kind & 0x7F) % 6
        width = (1, 1, 2, 4, 8, 8)[kind]
        at = min(at, len(image) - width)
        if kind == 0:
            image[at] ^= 1 << value % 8
        else:
            value = INTERESTING[value % len(INTERESTING)] if kind == 5 else value % 2 ** (8 * width)
            image[at : at + width] = value.to_bytes(width, "little")
    return image


class GuardedArray(np.ndarray):
    """An array whose elements are used only within its bounds: an index below 0 would be read from the end."""

    def __getitem__(self, at: Any) -> Any:
        return super().__getitem__(self._inside(at))

    def __setitem__(self, at: Any, value: Any) -> None:
        super().__setitem__(self._inside(at), value)

    def _inside(self, at: Any) -> Any:
        if isinstance(at, int | np.integer) and not 0 <= at < len(self):
            raise IndexError(f"element {at} of {len(self)} was used")
        return at


# The kernels that follow LMDB's pages, on a damaged image, as plain Python: nothing is read outside the image.


@functools.cache
def _trees() -> list[int]:
    """Pages of trees and of what LMDB says of itself."""
    content = _store()[1]
    heads = (struct.unpack_from("<QHH", content, at) for at in range(0, len(content), PAGE_BYTES))
    return [page for page, (number, _, flags) in enumerate(heads) if number == page and flags & 0x0B]


def _walk(data: bytes) -> None:
    btree._CHUNK_ENTRIES = 50
    image = _edited(_store()[1], _trees(), data)
    halves = np.frombuffer(bytes(image), np.uint16).view(GuardedArray)
    for start in (0, PAGE_BYTES):
        meta = parse_meta(bytes(image[start : start + META_READ_BYTES]))
        if isinstance(meta, str):
            continue
        pages = Pages(halves, meta.page_bytes // 2, len(image) // meta.page_bytes, 0)
        check_page_use(pages, meta)
        for tolerant in (False, True):
            used = np.zeros((pages.limit >> 6) + 1, np.uint64) if tolerant else None
            entries = list_tree(pages, meta.main, new_walk(pages.page_halves, used), tolerant=tolerant)
            if len(entries) > len(image) // 8:
                raise FindingError("more entries than the file has room for")
            ends = entries["page"] * meta.page_bytes + np.where(entries["page"] > 0, 16 + entries["size"], 0)
            if not tolerant and (ends > len(image)).any():
                raise FindingError("a value beyond the end of the file")
        keys = np.array([0, 5, 1 << 40, (1 << 64) - 1], np.uint64)
        find_entries(pages, meta.main, keys, keys, new_walk(pages.page_halves))


def _look(data: bytes) -> None:
    """What ``inspect`` reads by plain code, where an open would follow."""
    (_FOLDER / "rows.lmdb").write_bytes(_edited(_store()[1], _trees(), data))
    for name in (MANIFEST_NAME, "rows.anchor"):
        (_FOLDER / name).write_bytes((_store()[0] / name).read_bytes())
    with patch("tierstore.store.directory.open_files", side_effect=DamagedError("an open")):
        inspection.describe_store(_FOLDER)


def _edits_of_trees() -> list[bytes]:
    """At the places where LMDB's pages and meta pages keep what they say of themselves."""
    places = [(page, offset) for page in range(len(_trees())) for offset in (10, 12, 14, 16, 20, 40, 80, 88, 128, 144)]
    return [struct.pack("<BBHI", (2, 5)[page % 2], page, offset, 3 + page) for page, offset in places[:: len(_trees())]]


# Segments whose indexes say anything, with the right checksum, as plain Python: nothing is read or written outside the
# image and the map of rows.


@functools.cache
def _segments() -> tuple[Stored, dict[int, Any]]:
    with tierstore.open(_store()[0], mode="r", ddr="4MiB", threads=1) as store, store._cold.lease() as (tree, rows):
        stored = segments.stored_segments(tree)
        return stored[np.unique(stored["pages"], return_index=True)[1]], rows.shapes


def _enter_segments(data: bytes) -> None:
    """By edits, after which checksums are right."""
    stored, shapes = _segments()
    end = int((stored["first_page"] + stored["pages"]).max()) * PAGE_BYTES
    words: Any = np.frombuffer(_edited(_store()[1][:end], stored["first_page"].tolist(), data), np.uint64)
    for number, first, pages in stored[["number", "first_page", "pages"]].tolist():
        at = first * PAGE_BYTES // 8 + 2
        count = int(words[at + COUNT] & segments.COUNT_MASK) * (2 if words[at + COUNT] & segments.MIXED else 1)
        if count < pages * PAGE_BYTES // 8 - 2 - KEYS:
            words[at + segments.CHECKSUM] = words_hash(
                words, at + segments.MAGIC, KEYS - segments.MAGIC + count, np.uint64(number)
            )
    words = words.view(GuardedArray)
    num_pages = len(words) * 8 // PAGE_BYTES
    no_refusals = Mock(**{"begin.return_value": 0, "refused.return_value": None})
    tree: Any = SimpleNamespace(
        path="rows.lmdb", page_bytes=PAGE_BYTES, txn_id=1, limit_pages=lambda: num_pages,
        file_map=SimpleNamespace(rows=SimpleNamespace(words=words, address=0, guard=no_refusals)),
    )  # fmt: skip
    for last, kept in ((records.MAX_VERSION, (1, 2)), (1, ())):
        rows = RowMap(shapes)
        rows.places = rows.places.view(GuardedArray)
        rows.tables = TableArrays(*(column.view(GuardedArray) for column in rows.tables))
        with contextlib.suppress(DamagedError):
            rows.enter(tree, segments.read_indexes(tree, stored), last, kept)
            rows.written_since(tree, 1)
    check = Verifier(tree, rows)
    check.look_at(stored.copy())
    with contextlib.suppress(DamagedError):
        check.require_sound()


def _edits_of_indexes() -> list[bytes]:
    places = [
        (page, word)
        for page in range(len(_segments()[0]))
        for word in (COUNT, segments.NEWEST, segments.OLDEST, KEYS, KEYS + 1)
    ]
    return [struct.pack("<BBHI", (1, 2, 4, 5)[page % 4], page, 16 + 8 * word, 7 + word) for page, word in places[::2]]


# An update's file, or the payload or the rows in one whose checksums are right.

_UPDATE = _FOLDER / "update"
_CONFIG = TableConfig(name="t", num_embeddings=9, embedding_dim=2)
_LAYOUT = _CONFIG.layout(UPDATE_PAGE_BYTES)
_PAYLOAD = pack({}, {"step": 1}, {}, NO_LINEAGE)


def _write_update(payload: bytes, ids: bytes) -> Path:
    _UPDATE.unlink(missing_ok=True)
    rows = np.frombuffer(ids[: len(ids) // 8 * 8], np.int64)
    with closing(UpdateWriter(_UPDATE)) as writer:
        writer.add_payload(payload)
        if len(rows):
            writer.add_rows(0, _LAYOUT, rows, np.zeros((len(rows), _LAYOUT.weight_words), np.uint64))
        origin = Origin("0" * 32, 1, "1" * 16)
        fields: dict[str, Any] = {"since": 0, "since_commit_id": "", "tables": (_CONFIG,)}
        writer.finish(UpdateHeader(origin=origin, chunks=tuple(writer.chunks), **fields))
    return _UPDATE


def _read_update(data: bytes) -> None:
    try:
        if data[:1] == b"f":
            _UPDATE.write_bytes(data[1:])
        else:
            _write_update(*((data[1:], b"") if data[:1] == b"p" else (_PAYLOAD, data[1:])))
    except ValueError:  # what no update can hold
        return
    with UpdateFile(_UPDATE) as update:
        unpack_tensors(update.version())
        counts = update.header.rows_of_tables()
        for table, config in enumerate(update.header.tables):
            ids = [row for ids, _ in update.rows(table) for row in ids.tolist()]
            if ids != sorted(set(ids) & set(range(config.num_embeddings))) or len(ids) != counts[config.name]:
                raise FindingError(f"{ids} are no rows of {config}")


def _updates() -> list[bytes]:
    whole = _write_update(_PAYLOAD, np.arange(1, 8, 2).tobytes()).read_bytes()
    return [b"f" + whole, b"p" + _PAYLOAD, b"r" + struct.pack("<3q", 0, 3, 8)]


TARGETS = {
    "manifest": Target(
        read=_read_manifest, check=_check_manifest, seeds=_manifests, errors=(TierstoreError,),
        words=b'NaN|Infinity|-1|1e999|null|true|[]|{}|"\\ud800"|[|{"a":|"kind"|"init"|"lr"|"seed"|9999999999999999999'
        b'|"tables"',
    ),
    "records": Target(
        read=_read_record, seeds=_records, errors=(TierstoreError,),
        words=b'NaN|Infinity|1e999|null|[]|{}|{"extra":|"tables"|[1,2]|[[|9999999999999999999999',
    ),
    "walk": Target(read=_walk, seeds=_edits_of_trees, cost=13),
    "look": Target(read=_look, seeds=_edits_of_trees, errors=(DamagedError,)),
    "segments": Target(read=_enter_segments, seeds=_edits_of_indexes, cost=10),
    "update": Target(
        read=_read_update, seeds=_updates, errors=(DamagedError,),
        words=b'"chunk.0"|"chunk.1"|data_offsets|"U8"|[-1,0,|\\"tables\\"|"num_embeddings\\": |99999999999|'
        b"\xff\xff\xff\xff",
    ),
}  # fmt: skip
