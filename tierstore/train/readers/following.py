"""A folder that grows: its files are read in order as they come, each once."""

import contextlib
import logging
import math
import os
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, filterfalse, takewhile
from pathlib import Path
from typing import Any, Final, Literal, get_args

import numpy as np

from ...system.checks import require_choice
from .arrow import ParquetReader, is_data, names_below
from .base import CRITEO_SCHEMA, Batch, DataError, RawRows, Reader, Schema
from .categories import FeatureHasher
from .csv import CsvReader
from .npy import NpyReader

_LOG: Final = logging.getLogger("tierstore")
END_MARKER: Final = "_END"
_TEMPORARY: Final = re.compile(r"(\.part(\.[a-z].*)?|[._]tmp(\..*)?)$", re.IGNORECASE)
_POLL_SECONDS, _STALL_SECONDS = 0.1, 60.0
_LIST_SHARE: Final = 10  # a folder is listed again after so many times what listing it took
_REMEMBERED: Final = 100  # files that were read last, by which a run that goes on knows which came late
_Key = tuple[float, str]
FollowOrder = Literal["name", "time"]
LateFiles = Literal["error", "skip"]


class FollowingReader(Reader):
    """Reads the Parquet and CSV files below a folder, and its folders of npy arrays, and waits for more. Batches go on
    from one file to the next. While nothing comes, it gives a batch without rows ten times a second. Each batch has the
    ``position`` after it, where ``seek`` goes on. DataError: a file is late, broken, or grows while it is read.

    Args:
        order: "name": of paths below the folder; "time": of the event times in the files' first rows. Files wait for
            one before them that is not whole. By time its place is not known: all that came with it or later wait.
        late: what becomes of a file that comes after one that is behind it in that order, and of a Parquet file that
            has not changed for a minute and has no footer: "error", or "skip" with a warning.
        settle_seconds: CSV files and arrays are read once they have not changed for so long.
        until: Unix seconds. From then on, or once there is a file ``_END``, it ends after the files that are there.
        checks_files: the file of a position must have the size that it had.
    """

    def __init__(
        self, path: str | Path, *, schema: Schema = CRITEO_SCHEMA, quoting: bool = True, order: FollowOrder = "name",
        late: LateFiles = "error", settle_seconds: float = 1.0, until: float = math.inf, checks_files: bool = True,
    ) -> None:  # fmt: skip
        require_choice(order, get_args(FollowOrder), "order")
        require_choice(late, get_args(LateFiles), "late")
        self.path, self.schema, self.files = Path(path), schema, ()
        if not self.path.is_dir():
            raise DataError(f"{path} is no folder: make it, or name the one that files come to")
        if order == "time" and not schema.event_time:
            raise ValueError("order='time' goes by event times: name their column (data.time_column)")
        self._by_time, self._skips, self._settle_seconds = order == "time", late == "skip", settle_seconds
        self._quoting, self._until, self._checks_files = quoting, until, checks_files
        self._left_out = set[str]()  # endings of which one was logged
        self.seek({"file": "", "row": 0, "size_bytes": 0, "is_done": True, "recent": [], "is_cut": False})

    def seek(self, position: dict[str, Any]) -> None:
        """Go on at a position, as it is or as JSON gives it back."""
        self._position, self._is_cut = position, position["is_cut"]  # whether more were read than the recent ones
        self._recent: list[_Key] = [(seconds, name) for seconds, name in position["recent"]]
        self._read, self._keys = {name for _, name in self._recent}, dict[str, _Key]()
        self._unread, self._listing = dict[str, int](), 0  # with the listing that had each first
        self._waited_for = "", 0.0  # the file that others wait for, and since when
        self._earlier = set[str]()  # an earlier process read these, if they come before the recent ones
        self._list()
        self._earlier = self._sure if self._is_cut else set[str]()

    def place(self, row: int) -> str:
        return f"{self.path / self._position['file']} (to row {self._position['row']:,}) or before: row {row:,} of all"

    def batches(self, hasher: FeatureHasher, **options: Any) -> Iterator[Batch]:
        """As of any reader; ``start_row`` is the number of the next row, wherever it lies."""
        return (replace(batch, position=self._position) for batch in super().batches(hasher, **options))

    def read_chunks(self, start_row: int, stop_row: int | None, chunk_rows: int) -> Iterator[RawRows]:  # noqa: ARG002
        if stop_row is not None:
            raise ValueError(f"stop_row={stop_row}: a folder that is followed ends by {END_MARKER} or a time")
        held, count, here = list[RawRows](), 0, self._position
        for name, row in chain(self._begun(), self._coming()):
            if not name:
                yield self._no_rows()
                continue
            path, rest = self.path / name, -count % chunk_rows
            reader, (size, _) = self._open(path), _size_and_age(path)
            here = {"file": name, "size_bytes": size, "recent": [*map(list, self._recent)], "is_cut": self._is_cut}
            to_fill = reader.read_chunks(row, row + rest, rest) if rest else ()
            for part in chain(to_fill, reader.read_chunks(row + rest, None, chunk_rows)):
                held.append(part)
                count, row = count + len(part.labels), row + len(part.labels)
                if count == chunk_rows:
                    self._position = {**here, "row": row, "is_done": row == reader.num_rows}
                    yield RawRows.joined(held)
                    held, count = [], 0
            if _size_and_age(path)[0] not in (0, size):
                raise DataError(f"{path} grew while it was read: write files elsewhere, and rename them")
            here |= {"row": row, "is_done": True}
            self._position = self._position if held else here
        if held:
            self._position = here
            yield RawRows.joined(held)

    def _begun(self) -> Iterator[tuple[str, int]]:
        """The file that the position is in, and its next row."""
        name, row, before, is_done = (self._position[key] for key in ("file", "row", "size_bytes", "is_done"))
        size = 0 if is_done else _size_and_age(self.path / name)[0]
        if size != before and self._checks_files and not is_done:
            found = f"{self.path / name} has {size:,} bytes, and had {before:,} when the run stood at its row {row:,}"
            raise DataError(f"{found}: put it back, or go on with what is there with --set data.check_files=false")
        if size:
            yield name, row

    def _coming(self) -> Iterator[tuple[str, int]]:
        """Files from their first rows on, and "" as long as none is whole."""
        while True:
            is_over = time.time() >= self._until or (self.path / END_MARKER).exists()
            if time.monotonic() >= self._list_at or (is_over and not self._unread):
                self._list()
            name = self._next()
            if not name and is_over and not self._unread:
                return
            yield name, 0
            if not name:
                time.sleep(_POLL_SECONDS)

    def _list(self) -> None:
        begun, endings = time.monotonic(), (*ParquetReader.endings, *CsvReader.endings, "label.npy")
        listings = [names_below(self.path) for _ in "12"]  # the second has all that came before a file of the first
        self._sure, names = (
            {name.removesuffix("/label.npy") for name in listed if is_data(name, endings)} for listed in listings
        )
        others = [name for name in listings[1] if not name.lower().endswith((*endings, ".npy"))]
        for name in filterfalse(_TEMPORARY.search, others):
            if is_data(name, ("",)) and (ending := Path(name).suffix) not in self._left_out:
                self._left_out.add(ending)
                _LOG.warning("%s and what ends like it is left out: it is no Parquet, CSV or array", self.path / name)
        self._read, self._earlier = self._read & names, self._earlier & names
        self._listing += 1
        found = filterfalse(_TEMPORARY.search, names - self._read)
        came = {name: self._unread.get(name, self._listing) for name in found}
        self._unread = dict(sorted(came.items(), key=lambda each: (each[1] if self._by_time else 0, each[0])))
        self._list_at = time.monotonic() + max(_POLL_SECONDS, _LIST_SHARE * (time.monotonic() - begun))

    def _next(self) -> str:
        """The next file, which counts as read from here on; "" as long as none is whole."""
        for key in self._keys_by_time() if self._by_time else ((0.0, name) for name in self._whole()):
            self._mark(name := key[1])
            if not self._recent or key > self._recent[-1]:
                self._is_cut |= len(self._recent) == _REMEMBERED
                self._recent = [*self._recent, key][-_REMEMBERED:]
                return name
            if key > self._recent[0] or name not in self._earlier:
                self._refuse(name, f"came late: {self._recent[-1][1]}, which is behind it in order, was read")
        return ""

    def _whole(self) -> Iterator[str]:
        """Unread files, up to the first that others wait for; it is logged after a minute."""
        for name in takewhile(self._sure.__contains__, list(self._unread)):
            if name in self._keys or self._is_whole(name):
                yield name
                continue
            if is_data(name, ParquetReader.endings) and (age := _size_and_age(self.path / name)[1]) >= _STALL_SECONDS:
                self._mark(name)
                self._refuse(name, f"has no Parquet footer, and has not changed for {age:.0f} s")
                continue
            if name != self._waited_for[0]:
                self._waited_for = name, time.monotonic()
            elif time.monotonic() - self._waited_for[1] >= _STALL_SECONDS:
                self._waited_for = name, math.inf
                _LOG.warning("%s is not whole, or of a future time: finish or touch it; others wait", self.path / name)
            return

    def _is_whole(self, name: str) -> bool:
        path = self.path / name
        if not is_data(name, ParquetReader.endings):
            return _size_and_age(path)[1] >= self._settle_seconds
        with contextlib.suppress(OSError), path.open("rb") as file:  # it has gone, or is shorter
            file.seek(-8, os.SEEK_END)
            return file.read()[4:] in (b"PAR1", b"PARE")
        return False

    def _keys_by_time(self) -> list[_Key]:
        """Of whole files. One that is not whole may come before those of its listing, of later ones, and of the one
        before, which may have missed it. A file without rows has no key, and counts as read."""
        whole = {*self._whole()}
        first = min((listing for name, listing in self._unread.items() if name not in whole), default=math.inf)
        names = {name for name in whole if self._unread[name] < first - 1}
        for name in names - self._keys.keys():
            rows: Any = next(self._open(self.path / name).read_chunks(0, 1, 1), None)
            if rows is None:
                self._mark(name)
                continue
            if math.isnan(seconds := float(rows.event_times[0])):
                raise DataError(f"{self.path / name}, row 0: no event time, by which files are ordered")
            self._keys[name] = seconds, name
        return sorted(self._keys[name] for name in names & self._keys.keys())

    def _mark(self, name: str) -> None:
        self._read.add(name)
        del self._unread[name]
        self._keys.pop(name, None)

    def _refuse(self, name: str, why: str) -> None:
        if not self._skips:
            raise DataError(f'{self.path / name} {why}: take it away, or pass over such: late="skip" (data.late_files)')
        _LOG.warning("%s %s: it is left out", self.path / name, why)

    def _open(self, path: Path) -> Reader:
        if is_data(path.name, CsvReader.endings):
            return CsvReader(path, schema=self.schema, quoting=self._quoting)
        return (ParquetReader if is_data(path.name, ParquetReader.endings) else NpyReader)(path, schema=self.schema)

    def _no_rows(self) -> RawRows:
        labels = np.empty((0, len(self.schema.labels))[: len(self.schema.labels)], np.float32)
        bags = [(np.empty(0, np.int64), 1)] * len(self.schema.categorical)
        return RawRows.of_bags(labels, np.empty((0, len(self.schema.dense)), np.float32), bags, ())


def _size_and_age(path: Path) -> tuple[int, float]:
    """Bytes of a file, or of those in a folder, and seconds since they last changed; 0 and -infinity: it has gone."""
    found: list[os.stat_result] = []
    with contextlib.suppress(FileNotFoundError):
        found = [each.stat() for each in (path.iterdir() if path.is_dir() else [path])]
    return sum(each.st_size for each in found), time.time() - max((each.st_mtime for each in found), default=math.inf)
