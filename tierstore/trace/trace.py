"""A trace: which rows of which table were looked up, sample by sample.

The file is a numpy ``.npz``. For each table it has ``NAME.ids``, int64 [n], the rows in the order of access, and
``NAME.offsets``, int64 [entries + 1]: entry e looks up ``ids[offsets[e]:offsets[e + 1]]``. An entry is a sample, and
all tables have the same. ``batch_samples``, one int64, is how many samples a batch had. These may be missing:

- ``sampling_rate``, one float64: the share of all rows that is in it.
- ``batch_starts``, int64 [batches + 1], where batches differ in size: batch b has the samples from ``batch_starts[b]``
  to ``batch_starts[b + 1]``, and ``batch_samples`` is their mean. With it an entry may be a whole batch, as the number
  of entries shows: at low rates next to nothing is left of a sample.
- ``all_lookups``, int64 [tables], the ids looked up in each table, sampled or not, and ``all_batches``, one int64, all
  batches: those without a sampled row are not listed. A sample's own counts depend on which popular rows are in it.
"""

import os
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..kernels.arrays import Int64s
from ..layout import MAX_ROWS
from ..system.checks import excerpt
from ..system.files import partial_file

ALL_BATCHES: Final = "all_batches"
ALL_LOOKUPS: Final = "all_lookups"
BATCH_SAMPLES: Final = "batch_samples"
BATCH_STARTS: Final = "batch_starts"
SAMPLING_RATE: Final = "sampling_rate"
_IDS: Final = ".ids"
_OFFSETS: Final = ".offsets"
_OPTIONAL: Final = frozenset({ALL_BATCHES, ALL_LOOKUPS, BATCH_STARTS, SAMPLING_RATE})
_HEADS: Final = (b"\x93NUMPY", b"PK")


class TableTrace(NamedTuple):
    """Of one table; see the module."""

    ids: Int64s
    offsets: Int64s


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What was looked up; attributes as the module's docstring says. ``sampling_rate`` 1: every row. None:
    ``batch_starts`` where all batches but the last are of one size; counts of all rows where they are not known, or
    those in the trace are all. ValueError: ids, offsets, starts or counts cannot be; names the table."""

    tables: Mapping[str, TableTrace]
    batch_samples: int
    sampling_rate: float = 1.0
    batch_starts: Int64s | None = None
    all_lookups: tuple[int, ...] | None = None
    all_batches: int | None = None

    def __post_init__(self) -> None:
        if not self.tables:
            raise ValueError("the trace has no table")
        if self.batch_samples < 1:
            raise ValueError(f"batch_samples is {self.batch_samples}; a batch has a sample at least")
        if not 0 < self.sampling_rate <= 1:
            raise ValueError(f"sampling_rate is {self.sampling_rate}; it is more than 0, and at most 1")
        for name, table in self.tables.items():
            _check(name, table)
        counts = {name: len(table.offsets) - 1 for name, table in self.tables.items()}
        if len(set(counts.values())) > 1:
            fewest, most = min(counts, key=counts.__getitem__), max(counts, key=counts.__getitem__)
            raise ValueError(
                f"table {excerpt(fewest)} has {counts[fewest]} samples, table {excerpt(most)} has {counts[most]}; "
                "all have the same, a sample that looks up nothing being an empty one"
            )
        if (starts := self.batch_starts) is not None:
            _require_ints(BATCH_STARTS, starts)
            if not len(starts) or starts[0] != 0 or (np.diff(starts) < 0).any():
                raise ValueError(f"{BATCH_STARTS} must ascend from 0 to the number of samples")
            if self.num_entries not in (starts[-1], len(starts) - 1):
                raise ValueError(
                    f"{BATCH_STARTS} are of {starts[-1]} samples in {len(starts) - 1} batches; there are "
                    f"{self.num_entries} entries, neither one a sample nor one a batch"
                )
        if self.all_lookups is not None:
            if len(self.all_lookups) != len(self.tables):
                raise ValueError(f"{ALL_LOOKUPS} are of {len(self.all_lookups)} tables; there are {len(self.tables)}")
            for (name, table), count in zip(self.tables.items(), self.all_lookups, strict=True):
                if count < len(table.ids):
                    raise ValueError(
                        f"{ALL_LOOKUPS} has {count} of table {excerpt(name)}, of which {len(table.ids)} are listed"
                    )
        if self.all_batches is not None and self.all_batches < len(self.batch_bounds) - 1:
            raise ValueError(f"{ALL_BATCHES} is {self.all_batches}; {len(self.batch_bounds) - 1} are listed")

    @property
    def num_entries(self) -> int:
        """Of each table's offsets: samples or, in a sampled recording, batches."""
        return len(next(iter(self.tables.values())).offsets) - 1

    @property
    def num_samples(self) -> int:
        """Samples that were looked up."""
        return self.num_entries if self.batch_starts is None else int(self.batch_starts[-1])

    @property
    def batch_bounds(self) -> Int64s:
        """int64 [batches + 1]: batch b has the entries from ``[b]`` to ``[b + 1]``."""
        if self.batch_starts is None:
            starts = np.arange(0, self.num_entries + self.batch_samples, self.batch_samples)
            return np.minimum(starts, self.num_entries)
        return self.batch_starts if self.num_entries == self.num_samples else np.arange(len(self.batch_starts))

    @property
    def num_lookups(self) -> int:
        """Ids that were looked up, of all tables."""
        return sum(len(table.ids) for table in self.tables.values())


def _check(name: str, table: TableTrace) -> None:
    for what, array in (("ids", table.ids), ("offsets", table.offsets)):
        _require_ints(f"{what} of table {excerpt(name)}", array)
    offsets = table.offsets
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(table.ids) or (np.diff(offsets) < 0).any():
        raise ValueError(
            f"offsets of table {excerpt(name)} must ascend from 0 to the number of its ids, {len(table.ids)}"
        )
    if len(table.ids) and not 0 <= int(table.ids.min()) <= int(table.ids.max()) < MAX_ROWS:
        raise ValueError(f"ids of table {excerpt(name)} are no rows: they must be from 0 to 2^40 - 1")


def _require_ints(what: str, array: NDArray[Any]) -> None:
    if array.dtype != np.int64 or array.ndim != 1:
        raise ValueError(f"{what} are {array.dtype}, {array.ndim}-d; int64, 1-d wanted")


def write_trace(trace: Trace, path: str | os.PathLike[str], *, force: bool = False) -> None:
    """Write the file, whole or not at all. FileExistsError: there is one, and ``force`` is not given. DiskFullError."""
    arrays: dict[str, NDArray[Any]] = {BATCH_SAMPLES: np.array(trace.batch_samples, np.int64)}
    if trace.sampling_rate < 1:
        arrays[SAMPLING_RATE] = np.array(trace.sampling_rate)
    given = {BATCH_STARTS: trace.batch_starts, ALL_LOOKUPS: trace.all_lookups, ALL_BATCHES: trace.all_batches}
    arrays |= {name: np.array(value, np.int64) for name, value in given.items() if value is not None}
    for name, table in trace.tables.items():
        arrays |= {name + _IDS: table.ids, name + _OFFSETS: table.offsets}
    with partial_file(Path(path), force=force) as descriptor, os.fdopen(os.dup(descriptor), "wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Read the whole file into memory. ValueError: it is no trace; says why. FileNotFoundError."""
    try:
        with open(path, "rb") as raw:
            if not raw.read(len(_HEADS[0])).startswith(_HEADS):  # numpy would advise to load it unsafely
                raise ValueError("it is not one of numpy's files")
            raw.seek(0)
            file = np.load(raw, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise ValueError("a single array; a trace is a .npz file")
            with file:
                return _parse(file)
    except (ValueError, EOFError, KeyError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:
        way = "tierstore trace record RUN.toml OUT.npz makes one"
        raise ValueError(f"{os.fspath(path)} is no trace: {error}. {way}") from error


def _parse(file: "np.lib.npyio.NpzFile") -> Trace:
    names = [name.removesuffix(_IDS) for name in file.files if name.endswith(_IDS)]
    wanted = {BATCH_SAMPLES, *(name + end for name in names for end in (_IDS, _OFFSETS))}
    found = set(file.files) - _OPTIONAL
    unknown = [name for name in found - wanted if not name.endswith((_IDS, _OFFSETS))]
    if unknown:
        raise ValueError(
            f"it has {excerpt(min(unknown))}, which this version of tierstore does not know; read it with the version "
            "that wrote it, or a newer one"
        )
    if wanted != found:
        raise ValueError(
            f"it has {excerpt(min(wanted ^ found))} alone; wanted are NAME.ids and NAME.offsets for each "
            f"table, and {BATCH_SAMPLES}"
        )
    lookups = file.get(ALL_LOOKUPS)
    if lookups is not None:
        _require_ints(ALL_LOOKUPS, lookups)
    return Trace(
        tables={name: TableTrace(file[name + _IDS], file[name + _OFFSETS]) for name in names},
        batch_samples=int(_one(file[BATCH_SAMPLES], BATCH_SAMPLES, np.int64)),
        sampling_rate=float(_one(file[SAMPLING_RATE], SAMPLING_RATE, np.float64)) if SAMPLING_RATE in file else 1.0,
        batch_starts=file.get(BATCH_STARTS),
        all_lookups=None if lookups is None else tuple(lookups.tolist()),
        all_batches=int(_one(file[ALL_BATCHES], ALL_BATCHES, np.int64)) if ALL_BATCHES in file else None,
    )


def _one(array: NDArray[Any], name: str, dtype: type) -> Any:
    if array.dtype != dtype or array.ndim:
        raise ValueError(f"{name} must be one {np.dtype(dtype).name}")
    return array
