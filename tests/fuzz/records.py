"""The records beside the segments, with the right checksum, and the payload of a commit."""

import contextlib
import struct

import torch

from tierstore.errors import TierstoreError
from tierstore.io import records
from tierstore.io.checksum import bytes_checksum
from tierstore.store.version import NO_LINEAGE, TableState, pack, unpack

from .target import FindingError, Target

_UNPACKERS = [getattr(records, name) for name in sorted(vars(records)) if name.startswith("unpack_")]


def run(data: bytes) -> None:
    """The first byte chooses between the kinds of records and the payload; the rest is the content."""
    if not data:
        return
    choice, content = data[0] % (len(_UNPACKERS) + 1), data[1:]
    if choice == len(_UNPACKERS):
        _run_payload(content)
        return
    sealed = content + struct.pack("<Q", bytes_checksum(content))
    with contextlib.suppress(ValueError, struct.error):
        _UNPACKERS[choice](sealed)
    try:
        _UNPACKERS[choice](content)
    except (ValueError, struct.error):
        return
    raise FindingError("a record without its checksum was taken")


def _run_payload(content: bytes) -> None:
    try:
        version = unpack(3, content)
    except TierstoreError:
        return
    for name, state in version.tables.items():
        if not isinstance(name, str) or not isinstance(state.step, int) or not isinstance(state.learning_rate, float):
            raise FindingError(f"table {name!r} has the state {state!r}")


def seeds() -> list[bytes]:
    payload = pack(
        {"t": TableState(9, 0.25)},
        {"step": 10, "list": [1, 2.5]},
        {"w": torch.ones(3)},
        NO_LINEAGE.following(2).following(3),
    )
    record = records.CommitRecord(version=3, payload_bytes=100, payload_checksum=1)
    log = records.LogRecord(next_number=1 << 33, num_segments=3, hash=2**63)
    first = records.first_records(b"0123456789abcdef").values()
    whole = [*first, records.pack_words(*record), records.pack_words(*log)]
    found = [bytes([choice]) + packed[:-8] for packed in whole for choice in range(len(_UNPACKERS))]
    return [*found, bytes([len(_UNPACKERS)]) + payload]


_WORDS = b'NaN|Infinity|1e999|null|[]|{}|{"extra":|"tables"|[1,2]|[[|9999999999999999999999'

TARGET = Target(run=run, seeds=seeds, dictionary=tuple(_WORDS.split(b"|")), mutations=1000)
