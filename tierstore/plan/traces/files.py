"""Accesses from files and to files: tierstore's own traces, numpy's arrays, and libCacheSim's oracleGeneral traces.

An oracleGeneral file is records of 24 bytes without a header, little-endian: uint32 time, uint64 object, uint32 its
size in bytes, int64 the number, from 1 on, of the record that uses the object next, -1 (or the largest int64) if none
does.
Source: oracleGeneralBin.h and traceConv of github.com/1a1a11a/libCacheSim.
"""

import contextlib
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ...config import require_int
from ...rows import KEY_ROW_BITS, ROW_MASK
from ...settings.names import nearest
from ...system.excerpt import excerpt
from ...system.output import partial_file
from ...trace import TableTrace, Trace, read_trace, write_trace
from ..accesses import Accesses, accesses_of, numbered
from ..curves.replays import times_of_next_use

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
    places = -times_of_next_use(numbered(keys))
    return np.where(places < len(keys), places + 1, _NEVER)


FormatName = Literal["npz", "npy", "oracleGeneral"]
FORMATS: Final[tuple[FormatName, ...]] = get_args(FormatName)

_SUFFIXES: Final[dict[str, FormatName]] = {
    ".npz": "npz",
    ".npy": "npy",
    ".oraclegeneral": "oracleGeneral",
    ".oraclegeneral.bin": "oracleGeneral",
}
_MAX_PADDING: Final = 64
_FREE_SAMPLES: Final = 1 << 20
_COMPRESSED: Final = {
    b"\x28\xb5\x2f\xfd": ("zstd", "zstd -d"),
    b"\x1f\x8b": ("gzip", "gunzip --keep"),
    b"\xfd7zXZ": ("xz", "xz --decompress --keep"),
}
_READERS: Final[dict[FormatName, Callable[[Path, int], Accesses]]] = {
    "npy": read_npy,
    "oracleGeneral": read_oracle_general,
}
_WRITERS: Final[dict[FormatName, Callable[[Accesses, IO[bytes]], None]]] = {
    "npy": write_npy,
    "oracleGeneral": write_oracle_general,
}


def read_accesses(
    path: str | os.PathLike[str],
    *,
    format: FormatName | None = None,  # noqa: A002 (as numpy and pyarrow name it)
    batch_accesses: int | None = None,
) -> Accesses:
    """Read a trace.

    Args:
        format: default: what the file's suffix says. "npz" is ``tierstore.trace``'s, with its tables' names, samples,
            batches and sampling rate. "npy" is one array of row keys (``table index << 40 | row``; rows of a single
            table are) or other numbers, "oracleGeneral" is libCacheSim's; both without batches.
        batch_accesses: accesses of a batch where the file has none; default: 1, each access by itself, as simulators
            of caches count.

    Raises:
        ValueError: it is no such file, is damaged, has no access, or is compressed; names it, says what is wrong and
            the way out. FileNotFoundError.
    """
    path = Path(path)
    kind = _format_of(path, format)
    _require_readable(path)
    if kind == "npz":
        if batch_accesses is not None:
            raise ValueError(f"{path} has batches of its own; leave batch_accesses out")
        with _naming(path):
            found = accesses_of(read_trace(path))
    else:
        with _naming(path):
            found = _READERS[kind](path, 1 if batch_accesses is None else batch_accesses)
    if not len(found.keys):
        raise ValueError(f"{path} has no access")
    return found


def write_accesses(
    accesses: Accesses,
    path: str | os.PathLike[str],
    *,
    format: FormatName | None = None,  # noqa: A002
    force: bool = False,
) -> None:
    """Write a trace, whole or not at all.

    "npz" has all that there is. "npy" has the row keys alone. "oracleGeneral" has the keys, batches as times, and
    the next use of each row.

    Args:
        format: default: what the file's suffix says.

    Raises:
        ValueError: the format cannot have such accesses. FileExistsError: there is such a file, and ``force`` is not
            given. FileNotFoundError: no such directory. DiskFullError.
    """
    path = Path(path)
    kind = _format_of(path, format)
    if kind == "npz":
        write_trace(trace_of(accesses), path, force=force)
        return
    if accesses.sampling_rate < 1:
        raise ValueError(
            f"{path}: the accesses are of a sample, {100 * accesses.sampling_rate:g} % of the rows, which {kind} files "
            "cannot say; write .npz"
        )
    with partial_file(path, force=force) as descriptor, os.fdopen(os.dup(descriptor), "wb") as file:
        _WRITERS[kind](accesses, file)


def _format_of(path: Path, named: str | None) -> FormatName:
    if named is not None:
        found = next((each for each in FORMATS if each == named), None)
        if found is None:
            raise ValueError(f"format {excerpt(named)}; {nearest(named, FORMATS, all_are='formats are')}")
        return found
    name = path.name.lower()
    by_suffix = next((kind for suffix, kind in _SUFFIXES.items() if name.endswith(suffix)), None)
    if by_suffix is not None:
        return by_suffix
    inner = name.removesuffix(".zst").removesuffix(".gz").removesuffix(".xz")
    if inner != name:
        _require_readable(path)
    raise ValueError(
        f"{path}: its suffix says no format of traces; name one ({', '.join(FORMATS)}), or give a file that ends in "
        ".npz, .npy, .oracleGeneral or .oracleGeneral.bin"
    )


def _require_readable(path: Path) -> None:
    """A file with something in it that is not compressed."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give a trace's file")
    if not path.exists():
        raise FileNotFoundError(f"{path}: there is no such trace; a run or a server with --record writes one")
    with path.open("rb") as file:
        head = file.read(8)
    if not head:
        raise ValueError(f"{path} is empty")
    for magic, (name, command) in _COMPRESSED.items():
        if head.startswith(magic):
            raise ValueError(f"{path} is compressed with {name}; decompress it first: {command} {path}")


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Errors that name the file."""
    try:
        yield
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        text = str(error)
        raise ValueError(text if text.startswith(str(path)) else f"{path}: {text}") from None


def trace_of(accesses: Accesses) -> Trace:
    """A trace that ``accesses_of`` turns into the same accesses.

    A sample ends where the tables' order begins anew. That may join samples of the trace that the accesses were made
    of, where a table's lookups are missing, and samples of a single table. All batches of a trace have the same
    samples, so that empty ones are added to those that have fewer. What a recording counted of all rows is kept.

    Raises:
        ValueError: there is no table, a key is of none, or batches differ so much in size that most samples would be
            empty.
    """
    tables, starts = accesses.keys >> KEY_ROW_BITS, accesses.starts
    if len(tables) and int(tables.max()) >= len(accesses.tables):
        raise ValueError(f"a key is of table {int(tables.max())}, and there are {len(accesses.tables)} tables")
    begins = np.ones(len(tables), np.bool_)
    begins[1:] = tables[1:] < tables[:-1]
    own_starts = starts[:-1][np.diff(starts) > 0]
    begins[own_starts] = True
    samples_before = np.append(0, np.cumsum(begins))
    each = max(1, int(np.diff(samples_before[starts]).max(initial=0)))
    count = each * accesses.num_batches
    if count > _MAX_PADDING * (len(tables) + accesses.num_batches) + _FREE_SAMPLES:
        raise ValueError(
            f"one batch has {each:,} samples, most have far fewer: a trace would be made of empty ones. Write .npy"
        )
    batches = np.repeat(np.arange(accesses.num_batches), np.diff(starts))
    samples = samples_before[1:] - 1 - samples_before[starts[batches]] + each * batches
    found = {}
    for index, name in enumerate(accesses.tables):
        own = tables == index
        lengths = np.bincount(samples[own], minlength=count)
        offsets = np.append(0, np.cumsum(lengths)).astype(np.int64)
        found[name] = TableTrace(accesses.keys[own] & ROW_MASK, offsets)
    return Trace(
        tables=found,
        batch_samples=each,
        sampling_rate=accesses.sampling_rate,
        all_lookups=accesses.all_lookups,
        all_batches=accesses.all_batches if accesses.unlisted else None,
    )
