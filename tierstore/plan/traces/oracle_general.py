"""libCacheSim's oracleGeneral traces.

A file is records of 24 bytes without a header, little-endian: uint32 time, uint64 object, uint32 its size in bytes,
int64 the number, from 1 on, of the record that uses the object next, -1 (or the largest int64) if none does. Source:
oracleGeneralBin.h and traceConv of github.com/1a1a11a/libCacheSim.
"""

from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray

from ...kernels.jit import kernel
from ..accesses import Accesses, numbered
from .key_numbers import accesses_by_number, require_numbered

__all__ = ["RECORD", "next_uses", "read_oracle_general", "write_oracle_general"]

RECORD: Final = np.dtype([("time", "<u4"), ("object", "<u8"), ("size", "<u4"), ("next", "<i8")])
_CHUNK: Final = 1 << 20
_NEVER: Final = -1
_FOREVER: Final = np.iinfo(np.int64).max
_MAX_BATCHES: Final = 1 << 32
_SIZE: Final = 1
"""Rows of tables of different widths are not told apart; libCacheSim passes over objects of no size."""


def read_oracle_general(path: Path, batch_accesses: int) -> Accesses:
    """Read the objects, a chunk at a time: 8 bytes of memory a record, and 24 where objects are no row keys.

    Raises:
        ValueError: it ends within a record, or has one whose object was used next before itself.
    """
    size = path.stat().st_size
    if size % RECORD.itemsize:
        raise ValueError(
            f"it has {size:,} bytes, which are no whole records of {RECORD.itemsize}: it is cut short, or is of "
            "another format"
        )
    objects = np.empty(size // RECORD.itemsize, np.uint64)
    with path.open("rb") as file:
        for begin in range(0, len(objects), _CHUNK):
            records = np.fromfile(file, RECORD, min(_CHUNK, len(objects) - begin))
            if len(records) < min(_CHUNK, len(objects) - begin):
                raise ValueError("it became shorter while it was read")
            _require_possible(records["next"], begin)
            objects[begin : begin + len(records)] = records["object"]
    return accesses_by_number(objects, batch_accesses)


def _require_possible(nexts: NDArray[np.int64], begin: int) -> None:
    # Some programs number records from 0.
    bad = np.flatnonzero((nexts <= np.arange(begin, begin + len(nexts))) & (nexts != _NEVER))
    if len(bad):
        number = int(bad[0])
        raise ValueError(
            f"record {begin + number + 1:,} says that its object is used next by record {int(nexts[number]):,}: the "
            "file is damaged or of another format. The objects alone, saved by numpy as uint64, are read from a .npy"
        )


def write_oracle_general(accesses: Accesses, file: IO[bytes]) -> None:
    """Write records: the row's key as the object, its batch's number as the time, a size of 1.

    Raises:
        ValueError: there are more batches than times, or more accesses than ``numbered`` takes.
    """
    if accesses.num_batches > _MAX_BATCHES:
        raise ValueError(f"{accesses.num_batches:,} batches; an oracleGeneral trace has times below 2^32")
    require_numbered(len(accesses.keys))
    nexts = next_uses(accesses.keys)
    for begin in range(0, len(nexts), _CHUNK):
        part = slice(begin, min(begin + _CHUNK, len(nexts)))
        records = np.empty(part.stop - begin, RECORD)
        records["time"] = np.searchsorted(accesses.starts, np.arange(begin, part.stop), side="right") - 1
        records["object"] = accesses.keys[part]
        records["size"] = _SIZE
        records["next"] = nexts[part]
        file.write(records.tobytes())


def next_uses(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64 [n]: the number, from 1 on, of the next access to the same key; -1 if there is none."""
    numbers, num_rows = numbered(keys)
    out = np.empty(len(keys), np.int64)
    _next_uses(numbers, np.full(num_rows, _NEVER, np.int64), out)
    return out


@kernel
def _next_uses(numbers: Any, latest: Any, out: Any) -> None:
    for position in range(numbers.shape[0] - 1, -1, -1):
        out[position] = latest[numbers[position]]
        latest[numbers[position]] = position + 1
