"""Row keys in other programs' files: numpy's arrays, and libCacheSim's oracleGeneral traces.

An oracleGeneral file is records of 24 bytes without a header, little-endian: uint32 time, uint64 object, uint32 its
size in bytes, int64 the number, from 1 on, of the record that uses the object next, -1 (or the largest int64) if none
does.
Source: oracleGeneralBin.h and traceConv of github.com/1a1a11a/libCacheSim.
"""

from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray

from ...config import require_int
from ...kernels.jit import kernel
from ...rows import KEY_ROW_BITS
from ...system.excerpt import excerpt
from ..accesses import Accesses, numbered

__all__ = ["RECORD", "next_uses", "read_npy", "read_oracle_general", "write_npy", "write_oracle_general"]

RECORD: Final = np.dtype([("time", "<u4"), ("object", "<u8"), ("size", "<u4"), ("next", "<i8")])
_CHUNK: Final = 1 << 20
_NEVER: Final = -1
_MAX_BATCHES: Final = 1 << 32
_MAX_TABLES: Final = 4096
_MAX_NUMBERED: Final = (1 << 31) - 1
_SIZE: Final = 1
"""Rows of tables of different widths are not told apart; libCacheSim passes over objects of no size."""
_KINDS: Final = ("int32", "int64", "uint32", "uint64")


def _accesses(numbers: NDArray[np.uint64], batch_accesses: int) -> Accesses:
    """Accesses to what the numbers, uint64 [n], name.

    They are row keys, ``table index << 40 | row``, if no table's index is 4,096 or more; rows of one table are. All
    others, as hashes are, become rows of one table, numbered from 0 in order of first use. Tables are called t0, t1,
    ...

    Raises:
        ValueError, TypeError: there are too many to be numbered; ``batch_accesses`` is no number from 1.
    """
    require_int(batch_accesses, "batch_accesses", 1, 1 << 40)
    tables = (int(numbers.max()) >> KEY_ROW_BITS) + 1 if len(numbers) else 1
    keys: Any = numbers.view(np.int64)
    if tables > _MAX_TABLES:
        _require_numbered(len(keys))
        keys, tables = numbered(keys).numbers.astype(np.int64), 1
    starts = np.minimum(np.arange(0, len(keys) + batch_accesses, batch_accesses, dtype=np.int64), len(keys))
    return Accesses(keys, starts, tuple(f"t{index}" for index in range(tables)))


def _require_numbered(count: int) -> None:
    """ValueError where ``accesses.numbered`` has no numbers left."""
    if count > _MAX_NUMBERED:
        raise ValueError(f"{count:,} accesses; rows of at most {_MAX_NUMBERED:,} can be told apart: split the file")


def read_npy(path: Path, batch_accesses: int) -> Accesses:
    """Read the array: 8 bytes of memory a key, and 24 where they are no row keys.

    Raises:
        ValueError: it is no such array, is cut short, or has a negative number.
    """
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # whatever numpy lets out for one broken file or another
        raise ValueError(f"it is not one of numpy's arrays, or is cut short: {excerpt(str(error))}") from None
    if array.ndim != 1 or array.dtype.newbyteorder("=").name not in _KINDS:
        shape = list(array.shape)
        raise ValueError(f"it holds {array.dtype} {shape}; keys are one array of one dimension: {', '.join(_KINDS)}")
    negative = np.flatnonzero(array < 0)
    if len(negative):
        raise ValueError(
            f"number {int(negative[0])} is {array[negative[0]]}; keys are 0 or more. Hashes of 64 bits are kept as "
            "uint64"
        )
    return _accesses(array.astype(np.uint64), batch_accesses)


def write_npy(accesses: Accesses, file: IO[bytes]) -> None:
    """Write the row keys, int64; batches and names of tables are not in such a file."""
    np.lib.format.write_array(file, accesses.keys, allow_pickle=False)


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
    return _accesses(objects, batch_accesses)


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
    _require_numbered(len(accesses.keys))
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
