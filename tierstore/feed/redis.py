"""Rows in Redis: the value of the key ``PREFIX:TABLE:ID`` is the row's bytes, little-endian.

``PREFIX#position`` is the sink's position in JSON; null while a full copy is taken.
"""

import contextlib
import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch

from ..errors import TierstoreError
from ..kernels.arrays import Int64s
from ..store.changes import Change, ChangedBatch
from ..system.checks import excerpt, require_choice, require_int
from .base import Position, Sink, needed

_PREFIX: Final = re.compile(r"[A-Za-z0-9_.-]+")
_KEY: Final = re.compile(rb"(.*):(-?\d+)", re.DOTALL)
_SECONDS: Final = 60.0  # for an answer
_ROWS: Final = 256  # of a command: while it runs, others wait
_PAGE: Final = 10_000  # keys that are looked at, at a time


class RedisSink(Sink):
    """One Redis server, not a cluster.

    Args:
        url: ``redis://HOST:PORT/DB``, ``rediss://`` or ``unix://PATH``, as redis-py has them.
        prefix: of all keys; each store has its own. Letters, digits, ``_``, ``.`` and ``-``.
        dtype: "float32", or "stored": the table's (of quantized rows float32).
        ttl: seconds after which a row that was not written again is gone.

    Raises:
        ImportError: redis-py is not installed. ValueError: a wrong argument, or keys of others have the prefix.
        TierstoreError: the server cannot be reached or refuses; by all methods.
    """

    def __init__(self, url: str, *, prefix: str = "tierstore", dtype: str = "float32", ttl: int | None = None) -> None:
        self._place = url.partition("?")[0].rpartition("@")[2]  # without secrets
        redis = needed("redis", self._place)
        if not _PREFIX.fullmatch(prefix):
            raise ValueError(f"prefix={excerpt(prefix)} may have letters, digits, '_', '.' and '-', as in 'shop'")
        require_choice(dtype, ("float32", "stored"), "dtype")
        self._expires = [] if ttl is None else ["EX", require_int(ttl, "ttl", 1, 2**31)]
        self._prefix, self._is_stored = prefix, dtype == "stored"
        self._position, self._run_id = f"{prefix}#position", ""
        self._error, self._redis = redis.RedisError, redis.Redis.from_url(url, socket_timeout=_SECONDS)
        with self._errors():
            if not self._redis.exists(self._position) and next(self._keys(), None):
                raise ValueError(f"{self._place} has keys {prefix}:... that no feed wrote: choose another prefix")

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except self._error as error:
            raise TierstoreError(f"{self._place}: {error}; the same command goes on once Redis takes rows") from error

    def position(self) -> Position | None:
        """As ``Sink.position``. ValueError: the key is not a feed's."""
        with self._errors():
            self._run_id = self._redis.info("server")["run_id"]  # first: after a restart, what was read may be lost
            found = self._redis.get(self._position) or b"null"
        try:
            return None if found == b"null" else Position(*json.loads(found))
        except (ValueError, TypeError):
            raise ValueError(f"{self._place}: no feed wrote {self._position}; choose another prefix") from None

    def apply(self, change: Change, batches: Iterator[ChangedBatch], position: Position) -> None:
        """Write and delete keys. A full copy deletes what it did not write, for which it needs up to 24 bytes a row."""
        with self._errors():
            if change.is_full:
                self._redis.set(self._position, "null")
            if change.dropped:
                self._delete((rows for rows in self._keys() if rows[0] in change.dropped), {})
            kept = defaultdict[str, list[Int64s]](list)
            for batch in batches:
                self._put(batch)
                if change.is_full:
                    kept[batch.table].append(batch.ids)
            if change.is_full:
                self._delete(self._keys(), {table: np.sort(np.concatenate(ids)) for table, ids in kept.items()})
            self._set(position)

    def _set(self, position: Position) -> None:
        """Set the position, in the process that ``position`` read it from, or not at all."""
        with self._redis.pipeline() as pipe:
            pipe.watch(self._position)  # a connection that breaks from here on is an error
            if pipe.info("server")["run_id"] != self._run_id:
                raise TierstoreError(f"{self._place} was started again meanwhile: the change must be taken once more")
            pipe.multi()
            pipe.set(self._position, json.dumps(position))
            pipe.execute()

    def _put(self, batch: ChangedBatch) -> None:
        pipe, keys, values = self._redis.pipeline(transaction=False), self._named(batch.table, batch.ids), batch.values
        if values is None:
            for first in range(0, len(keys), _ROWS):
                pipe.delete(*keys[first : first + _ROWS])
        else:
            raw = (values if self._is_stored else values.float()).contiguous().view(torch.uint8).numpy().tobytes()
            size = len(raw) // len(keys)
            pairs = zip(keys, (raw[at : at + size] for at in range(0, len(raw), size)), strict=True)
            for pair in pairs if self._expires else ():
                pipe.execute_command("SET", *pair, *self._expires)
            while part := [*itertools.chain.from_iterable(itertools.islice(pairs, _ROWS))]:
                pipe.execute_command("MSET", *part)
        pipe.execute()

    def _named(self, table: str, ids: Int64s) -> list[bytes]:
        head = f"{self._prefix}:{table}:".encode()
        return [b"%b%d" % (head, each) for each in ids.tolist()]

    def _keys(self) -> Iterator[tuple[str, Int64s]]:
        """Tables and ids of all rows that are there, in parts."""
        cursor: Any = None
        while cursor != 0:
            cursor, keys = self._redis.scan(cursor or 0, match=f"{self._prefix}:*", count=_PAGE)
            found = defaultdict[bytes, list[int]](list)
            for match in filter(None, (_KEY.fullmatch(key, len(self._prefix) + 1) for key in keys)):
                found[match[1]].append(int(match[2]))
            yield from ((table.decode(), np.array(ids, np.int64)) for table, ids in found.items())

    def _delete(self, rows: Iterable[tuple[str, Int64s]], kept: Mapping[str, Int64s]) -> None:
        """Delete rows but for those whose ids, ascending, are kept."""
        for table, ids in rows:
            own = kept.get(table, ids[:0])
            stale = ids[np.searchsorted(own, ids) == np.searchsorted(own, ids, "right")]
            if len(stale):
                self._put(ChangedBatch(table, stale, None))

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()
