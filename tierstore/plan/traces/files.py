"""Accesses from files and to files, by format."""

import contextlib
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Final, Literal, get_args

import numpy as np

from ...rows import KEY_ROW_BITS, MAX_ROWS
from ...settings.names import nearest
from ...system.excerpt import excerpt
from ...system.output import partial_file
from ...trace import TableTrace, Trace, read_trace, write_trace
from ..accesses import Accesses, accesses_of
from .foreign import read_npy, read_oracle_general, write_npy, write_oracle_general

__all__ = ["FORMATS", "FormatName", "read_accesses", "trace_of", "write_accesses"]

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
        found[name] = TableTrace(accesses.keys[own] & (MAX_ROWS - 1), offsets)
    return Trace(
        tables=found,
        batch_samples=each,
        sampling_rate=accesses.sampling_rate,
        all_lookups=accesses.all_lookups,
        all_batches=accesses.all_batches if accesses.unlisted else None,
    )
