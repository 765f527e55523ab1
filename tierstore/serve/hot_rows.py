"""The rows that a server had in memory, for the next one to begin with.

They lie next to the store, in ``STORE.hot``: row keys (table index << 40 | row), little-endian int64, next victims in
front. The file is advice, and may be anybody's: of a plain file as many of the last keys are read as the
caches can hold, and what is no row of the store is passed over. Anything else costs a word in the log.

How often rows are looked up is counted by ``RowCounts``, for a publisher that sends urgent rows first.
"""

import contextlib
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from ..errors import ClosedError, DamagedError, FormatError, TierstoreError
from ..layout import KEY_ROW_BITS, ROW_MASK
from ..pool.pool import Pool
from ..store import Store, Table
from ..store.refresh import resident_keys
from ..system.files import open_plain_file
from ..trace import read_trace

_LOG: Final = logging.getLogger("tierstore.serve")
_SAVING: Final = threading.Lock()

_KEY: Final = np.dtype("<i8")
_CHUNK_ROWS: Final = 1 << 16
COUNTED_ROWS: Final = 16_384
_SAMPLE_SECONDS: Final = 0.05
_SAMPLE_IDS: Final = 4096
"""Counted of a query, 20 times a second: less than a hundredth of a thread's time."""


class RowCounts:
    """How often the hottest rows were looked up, in a sample of the queries; for one thread.

    Once there are twice ``COUNTED_ROWS``, the rarest go, and all counts are halved, so that old ones fade.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts: Counter[int] = Counter()
        self._next = -1.0

    def note(self, tables: Sequence[Table], lengths: Any, ids: Any, outside: Any = None) -> None:
        """A query of ids, int64 [n], of features with these tables, lengths int64 [F, B]; none ``outside``."""
        if (now := self._clock()) < self._next:
            return
        self._next = now + _SAMPLE_SECONDS
        firsts = [-1 if table.config.ids else table.index << KEY_ROW_BITS for table in tables]
        ids = ids if outside is None else np.where(outside, -1, ids)
        keys = (np.repeat(firsts, lengths.sum(1)) | ids)[:: -(-len(ids) // _SAMPLE_IDS) or 1]
        self._counts.update(keys[keys >= 0].tolist())
        if len(self._counts) > 2 * COUNTED_ROWS:
            self._counts = Counter({key: (count + 1) // 2 for key, count in self.top()})

    def top(self) -> list[tuple[int, int]]:
        """Keys and counts of up to ``COUNTED_ROWS`` rows, most first; for any thread."""
        counted = self._counts.copy()  # by one call of C: the thread that counts does not change it meanwhile
        keys, counts = (np.fromiter(each, np.int64, len(counted)) for each in (counted.keys(), counted.values()))
        order = np.argsort(-counts, kind="stable")[:COUNTED_ROWS]
        return list(zip(keys[order].tolist(), counts[order].tolist(), strict=True))


def hot_rows_path(store: Path) -> Path:
    return store.with_name(store.name + ".hot")


def _pools(store: Store) -> list[Pool]:
    return list(dict.fromkeys(table.pool for table in list(store.tables.values())))  # there may be more at any time


def hot_rows(store: Store) -> Any:
    """int64 keys of the rows in host memory, likely next victims first."""
    keys = [np.empty(0, np.int64), *(resident_keys(pool) for pool in _pools(store))]
    return _last_of_each(keys, sum(map(len, keys)))


def save_hot_rows(path: Path, keys: Any) -> None:
    """Write them; a file that cannot be written is logged."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with _SAVING:  # two stores of a server may be of one folder
        try:
            partial.unlink(missing_ok=True)
            with open(partial, "xb") as file:  # a new one only: a link under this name would lead elsewhere
                file.write(np.ascontiguousarray(keys, _KEY).data)
            os.replace(partial, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            _LOG.warning("the hot rows are not kept for the next start: %s", error)


def load_hot_rows(path: Path, store: Store) -> dict[str, Any]:
    """int64 ids by table, next victims first, of what was saved; nothing, with a word in the log, if it is of no
    use."""
    room_bytes = _KEY.itemsize * sum(pool.cache.capacity for pool in _pools(store))
    try:
        with open_plain_file(path) as file:
            size_bytes = file.seek(0, os.SEEK_END)
            if size_bytes % _KEY.itemsize:
                raise FormatError(f"{size_bytes} bytes are no keys")
            file.seek(max(0, size_bytes - room_bytes))
            keys = np.frombuffer(file.read(room_bytes), _KEY)
    except FileNotFoundError:
        return {}
    except (TierstoreError, OSError) as error:
        _LOG.warning("%s is not used: %s", path, error)
        return {}
    keys = keys[np.argsort(keys >> KEY_ROW_BITS, kind="stable")]
    tables, starts = np.unique(keys >> KEY_ROW_BITS, return_index=True)
    rows = dict(zip(tables.tolist(), np.split(keys & ROW_MASK, starts[1:]), strict=False))
    return {name: rows[table.index] for name, table in store.tables.items() if table.index in rows}


def rows_of_trace(path: Path) -> dict[str, Any]:
    """Ids by table, most frequent last; ValueError if it is no trace."""
    found = {}
    for name, table in read_trace(path).tables.items():
        ids, counts = np.unique(table.ids, return_counts=True)
        found[name] = ids[np.argsort(counts, kind="stable")]
    return found


def warm_up(store: Store, rows: Mapping[str, Any], stop: Callable[[], bool]) -> int:
    """Bring rows in, ids by table, as many of the last ones as fit, until ``stop``; returns how many. Other ids are
    passed over."""
    done = 0
    for pool in _pools(store):
        keys = []
        for name, table in store.tables.items():
            if name in rows and table.pool is pool:
                ids = rows[name]
                keys.append(ids[(ids >= 0) & (ids < table.config.num_embeddings)] | (table.index << KEY_ROW_BITS))
        if not keys:
            continue
        chosen = _last_of_each(keys, pool.cache.capacity)
        step = max(1, min(_CHUNK_ROWS, pool.cache.capacity // 2))
        for first in range(0, len(chosen), step):
            if stop():
                return done
            part = chosen[first : first + step]
            try:
                for _, lease in pool.leases.parts(part):
                    done += len(lease.slots)
            except ClosedError:
                return done
            except DamagedError as error:  # a request for such a row gets the error
                _LOG.warning("some rows are not brought in: %s", error)
    return done


def _last_of_each(lists: list[Any], count: int) -> Any:
    """The last ``count`` keys, each list giving its share, and within it its end, so that the likeliest come last."""
    total = sum(map(len, lists))
    kept = [keys[len(keys) - min(len(keys), -(-count * len(keys) // max(1, total))) :] for keys in lists]
    ranks = np.concatenate([np.arange(len(keys)) - len(keys) for keys in kept])
    return np.concatenate(kept)[np.argsort(ranks, kind="stable")][-count:]
