"""A sampled trace of what a running trainer or server looks up: ``Store.record``.

Modules, ``Table.read`` and ``Table.pooled`` tell the store's recorder of each lookup after it, in the order of the
steps. Nothing else is recorded: neither prefetched rows, nor writes, nor a store's own reads. What is recorded are
rows: of dynamic ids those that they have, and nothing of ids without one, as caches and files see rows.
"""

import logging
import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from ..errors import TierstoreError
from ..kernels.arrays import Ids, Int32s, Int64s
from ..kernels.slots import copy_offsets
from ..layout import KEY_ROW_BITS
from ..pool.joined import Joined
from ..system.files import require_parent, require_room, translate_os_error
from ..system.processes import require_own
from ..system.signals import Flag, shielded, turns
from ..system.sizes import format_size, parse_size
from ..trace import write_trace
from ..trace.recorded import ALL, Recorded, is_sampled, select

_LOG: Final = logging.getLogger("tierstore")

_BYTES_MIN: Final = 1 << 16
_WRITE_SECONDS: Final = 60.0
_REST: Final = 100  # times as long as writing the file took, until it is written again: 1 % of a thread's time at most
_Sources = tuple[Ids, Int64s, Int64s, Int64s, int, Ids]  # as ``Joined.ids_of_bags``
_ZERO: Final = np.zeros(1, np.int64)
_ANY: Final = np.array([2**62], np.int64)


def require_recordable(path: str | os.PathLike[str], max_bytes: int | str = "64MiB") -> int:
    """The bytes meant by ``max_bytes``, if a file of as many can be made. ValueError: the name does not end in .npz, or
    a size that is none or too small. FileExistsError, FileNotFoundError, DiskFullError."""
    size_bytes, target = parse_size(max_bytes, name="max_bytes"), Path(path)
    if target.suffix != ".npz":
        raise ValueError(f"{target}: a recording is a .npz file; choose a name that ends so")
    if size_bytes < _BYTES_MIN:
        raise ValueError(f"max_bytes={max_bytes!r}: a recording takes {format_size(_BYTES_MIN)} at least")
    if os.path.lexists(target):
        raise FileExistsError(f"{target} exists; record to another name, or move it away")
    require_parent(target)
    require_room(target, size_bytes)
    return size_bytes


class Recorder:
    """Records what a store looks up, until it is stopped or the store is closed; made by ``Store.record``. A context
    manager that stops it.

    The file is written whole each time: empty at once, then every minute, and when recording ends; if nothing was
    looked up, it is removed then. A process that is killed loses the lookups since then. ``max_bytes`` bounds the file,
    and memory but while the file is written, which takes as much again.

    ValueError: the rate is none. TierstoreError: the file cannot be written. More as ``require_recordable``.
    """

    def __init__(
        self, tables: Mapping[int, str], path: str | os.PathLike[str], *, rate: float, max_bytes: int | str,
        store: "weakref.ref[Any]",
    ) -> None:  # fmt: skip
        self.path: Path = Path(os.path.abspath(path))
        names = [tables.get(index, "") for index in range(1 + max(tables))]
        self._recorded = Recorded(names, rate=rate, max_bytes=require_recordable(path, max_bytes))
        self._store = store
        self._lock = threading.RLock()
        self._is_over = self._is_written = False
        self._process_id = os.getpid()
        self._over = Flag()
        _compile()
        self._write(force=False)
        self._thread = threading.Thread(target=self._write_now_and_then, name="tierstore-record", daemon=True)
        self._thread.start()

    @property
    def rate(self) -> float:
        """The share of all rows that is recorded now."""
        return self._recorded.rate

    def describe(self) -> str:
        """What there is, in a line. ClosedError in a forked process."""
        require_own(self._process_id, "the recording", "ask for it there")
        with self._lock:
            found = self._recorded.snapshot()
        return (
            f"{self.path}: {len(found.keys):,} lookups of {100 * found.rate:g} % of the rows, "
            f"{sum(found.lookups):,} of all, in {found.num_batches:,} batches with {found.num_samples:,} samples"
        )

    def add_table(self, index: int, name: str) -> None:
        """The store has one more table. In the place of another it ends the recording: a trace has one name for what is
        looked up there."""
        with self._lock:
            known = self._recorded.tables
            for each in [""] * (index - len(known)) + [name] * (index >= len(known)):
                self._recorded.add_table(each)
            self._is_over |= known[index] != name

    @shielded
    def note_lookups(self, lookups: Sequence[Joined]) -> None:
        """One batch of a module."""
        if lookups:
            self._add([each.ids_of_bags(None) for each in lookups], lookups[0].batch)

    @shielded
    def note_bags(self, table_index: int, num_rows: int, ids: Int64s | Int32s, offsets: Int64s) -> None:
        """A batch of bags of one table with so many rows: int64 or int32 [n], int64 [bags + 1]."""
        bags, starts = len(offsets) - 1, np.empty_like(offsets)
        if copy_offsets(offsets, len(ids), starts):  # else the caller changed them since the lookup
            first, rows = np.array([table_index << KEY_ROW_BITS]), np.array([num_rows])
            self._add([(ids, _ZERO, first, rows, bags, starts)], bags)

    @shielded
    def note_rows(self, keys: Int64s) -> None:
        """Rows of one table read as they are, int64 [n], -1 of ids without a row: as many samples."""
        count, by_sample, has_row = len(keys), self._recorded.last == ALL, keys >= 0
        offsets = np.append(0, np.cumsum(has_row) if by_sample else np.count_nonzero(has_row))
        self._add([(keys[has_row], _ZERO, _ZERO, _ANY, len(offsets) - 1, offsets)], count)

    def _add(self, sources: Sequence[_Sources], num_samples: int) -> None:
        last, lookups = self._recorded.last, np.zeros(len(self._recorded.tables), np.int64)
        parts = [_select(each, last, lookups) for each in sources]
        keys, samples = parts[0] if len(parts) == 1 else map(np.concatenate, zip(*parts, strict=True))
        with self._lock:
            if num_samples and not self._is_over:
                self._recorded.add(keys, samples, num_samples, last, lookups)

    def _write(self, *, force: bool = True) -> None:
        with self._lock:
            found = self._recorded.snapshot()
        try:
            write_trace(found.trace(), self.path, force=force)
        except FileExistsError:
            raise
        except OSError as error:
            raise translate_os_error(error, self.path) from error

    def _write_now_and_then(self) -> None:
        seconds, is_logged = _WRITE_SECONDS, False
        while not self._over.wait(seconds):
            started = time.monotonic()
            try:
                self._write()
                is_logged = False
            except (TierstoreError, OSError) as error:
                if not is_logged:
                    _LOG.warning("the recording goes on, and is not on disk: %s", error)
                is_logged = True
            seconds = max(_WRITE_SECONDS, _REST * (time.monotonic() - started))

    def stop(self) -> None:
        """Record no more, and write the file. Again is fine, and in a forked process nothing happens. DiskFullError,
        TierstoreError: the file is as it was written before; make room, and call it again."""
        if self._process_id != os.getpid():
            return
        with self._lock:
            self._is_over = True
        store = self._store()
        if store is not None and store.recorder is self:
            store.recorder = None
        self._over.set()
        for seconds in turns():
            self._thread.join(seconds)
            if not self._thread.is_alive():
                break
        if not self._is_written:
            if self._recorded.num_batches:
                self._write()
            else:  # as of a run that failed before its first step: the next attempt finds its name free
                try:
                    self.path.unlink(missing_ok=True)
                except OSError as error:
                    raise translate_os_error(error, self.path) from error
            self._is_written = True

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _select(sources: _Sources, last: np.uint64, lookups: Int64s) -> tuple[Int64s, Int64s]:
    """The sampled rows' keys, int64 [n], and the sample in the batch of each, which is right if all are recorded."""
    *_, batch, bag_starts = sources
    found = np.empty((2, int(bag_starts[-1])), np.int64)
    keys, positions = found[:, : select(*sources, last, found, lookups)]
    if last != ALL or not len(keys):
        return keys, positions
    return keys, (np.searchsorted(bag_starts, positions, side="right") - 1) % batch


@shielded
def _compile() -> None:
    for id_type in ("int64", "int32"):
        sources = np.zeros(1, id_type), _ZERO, _ZERO, _ANY, 1, np.array([0, 1], np.int64)
        _select(sources, ALL, np.zeros(1, np.int64))
    is_sampled(_ZERO, 1.0)
    Recorded(["t"], rate=1.0, max_bytes=0).trace()
