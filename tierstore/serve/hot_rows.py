"""The rows that a server had in memory, for the next one to begin with.

They lie beside the store, in ``STORE.hot.npz``: int64 ids of each table by "table." and its name, those that
would leave first in front. The file is advice: one that is missing, damaged or of other tables costs time and no more.
"""

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from ..errors import ClosedError, DamagedError
from ..listing import resident_keys
from ..rows import KEY_ROW_BITS
from ..store import Store
from ..trace import read_trace

__all__ = ["hot_rows", "hot_rows_path", "load_hot_rows", "rows_of_trace", "save_hot_rows", "warm_up"]

_LOG: Final = logging.getLogger("tierstore.serve")
_ROW_MASK: Final = (1 << KEY_ROW_BITS) - 1
_PREFIX: Final = "table."
"""Before a table's name in the file: savez has arguments of its own that a table may be called like."""
_CHUNK_ROWS: Final = 1 << 16


def hot_rows_path(store: Path) -> Path:
    """Where those of a store lie."""
    return store.with_name(store.name + ".hot.npz")


def hot_rows(store: Store) -> dict[str, Any]:
    """int64 ids of the rows in host memory, by table, likely next victims first."""
    tables_by_name = list(store.tables.items())  # there may be more of them at any time
    names = {table.index: name for name, table in tables_by_name}
    found: dict[str, Any] = {}
    for pool in dict.fromkeys(table.pool for _, table in tables_by_name):
        keys = resident_keys(pool)
        tables = keys >> KEY_ROW_BITS
        for index in names.keys() & np.unique(tables).tolist():
            found[names[index]] = keys[tables == index] & _ROW_MASK
    return found


def save_hot_rows(path: Path, rows: Mapping[str, Any]) -> None:
    """Write them; a file that cannot be written is told of in the log."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            np.savez(file, **{_PREFIX + name: ids for name, ids in rows.items()})
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        _LOG.warning("the hot rows are not kept for the next start: %s", error)


def load_hot_rows(path: Path) -> dict[str, Any]:
    """What was saved; nothing, with a word in the log, if the file is of no use."""
    try:
        with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as file:
            return {name.removeprefix(_PREFIX): np.asarray(file[name], np.int64).reshape(-1) for name in file.files}
    except FileNotFoundError:
        return {}
    except Exception as error:  # what damaged bytes are taken for, nobody can tell
        _LOG.warning("%s is not used: %s", path, error)
        return {}


def rows_of_trace(path: Path) -> dict[str, Any]:
    """Ids by table, most frequent last; ValueError if it is no trace."""
    found = {}
    for name, table in read_trace(path).tables.items():
        ids, counts = np.unique(table.ids, return_counts=True)
        found[name] = ids[np.argsort(counts, kind="stable")]
    return found


def warm_up(store: Store, rows: Mapping[str, Any], stop: Callable[[], bool]) -> int:
    """Bring rows in, as many of the last ones as there is room for; returns how many.

    Args:
        rows: ids by table; what is no row of the store is passed over.
        stop: asked between chunks.
    """
    done = 0
    for pool in dict.fromkeys(table.pool for table in store.tables.values()):
        keys = [_keys(table.index, rows[name], table.config.num_embeddings) for name, table in store.tables.items()
                if name in rows and table.pool is pool]  # fmt: skip
        if not keys:
            continue
        chosen = _last_of_each(keys, pool.cache.capacity)
        step = max(1, min(_CHUNK_ROWS, pool.cache.capacity // 2))
        for first in range(0, len(chosen), step):
            if stop():
                return done
            part = chosen[first : first + step]
            try:
                for _, lease in pool.leases(part):
                    done += lease.num_unique
            except ClosedError:
                return done
            except DamagedError as error:  # whoever asks for such a row will be told
                _LOG.warning("some rows are not brought in: %s", error)
    return done


def _keys(index: int, ids: Any, num_rows: int) -> Any:
    return ids[(ids >= 0) & (ids < num_rows)] | (index << KEY_ROW_BITS)


def _last_of_each(lists: list[Any], count: int) -> Any:
    """The last ``count`` keys, each list giving its share, and within it its end, so that the likeliest come last."""
    total = sum(map(len, lists))
    kept = [keys[len(keys) - min(len(keys), -(-count * len(keys) // max(1, total))) :] for keys in lists]
    ranks = np.concatenate([np.arange(len(keys)) - len(keys) for keys in kept])
    return np.concatenate(kept)[np.argsort(ranks, kind="stable")][-count:]
