"""Rows in Redis, by the keys in docs/online.md; the position, in JSON, has version 0 while a full copy is taken."""

import contextlib
import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch

from ..errors import TierstoreError
from ..kernels.arrays import Int64s
from ..store.changes import Change, ChangedBatch
from ..system.checks import excerpt, packages_for, require_choice, require_int
from ..system.places import shown
from .base import Position, Sink

_PREFIX: Final = re.compile(r"[A-Za-z0-9_.-]+")
_KEY: Final = re.compile(rb"(.*):(-?\d{1,19})", re.DOTALL)
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
        with packages_for(shown(url), "redis"):
            import redis
        if not _PREFIX.fullmatch(prefix):
            raise ValueError(f"prefix={excerpt(prefix)} may have letters, digits, '_', '.' and '-', as in 'shop'")
        require_choice(dtype, ("float32", "stored"), "dtype")
        self._ttl = None if ttl is None else require_int(ttl, "ttl", 1, 2**31)
        self._rows, self._position, self._dtype = f"{prefix}:", f"{prefix}#position", dtype
        self._seen: tuple[str, bytes | None] = "", None  # the server's process, and what the position was
        self._error, self.name = redis.RedisError, f"{shown(url)}, prefix {prefix}"
        if re.match(r"rediss?://[^/?]*/\d*[^\d?]", url):  # redis-py would take database 0
            raise ValueError(f"{self.name}: a database is a number, as in redis://localhost:6379/0")
        with self._errors():
            try:
                self._redis: Any = redis.Redis.from_url(url, socket_timeout=_SECONDS)
                is_new = not self._redis.exists(self._position)
            except (TypeError, ValueError) as error:  # what the URL asks for is not known
                raise ValueError(f"{self.name}: {error}; see redis.Redis.from_url") from None
            if is_new and next(self._redis.scan_iter(f"{self._rows}*", _PAGE), None):
                raise ValueError(f"{self.name}: there are keys that no feed wrote; choose another prefix")

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except self._error as error:
            reason = str(error).rpartition("of pipeline caused error: ")[2]  # what is before it has rows' bytes
            raise TierstoreError(f"{self.name}: {reason}; the same command goes on once Redis takes rows") from error

    def position(self) -> Position | None:
        """As ``Sink.position``. ValueError: the key is not a feed's."""
        with self._errors():
            # The process first: after a restart, what was read may be lost.
            self._seen = self._redis.info("server")["run_id"], self._redis.get(self._position)
        try:
            *found, options = [*(json.loads(self._seen[1] or b"null") or ()), ["float32", None]][:6]  # older: none
            if found and options != [self._dtype, self._ttl]:
                found[:2] = 0, ""  # all rows come again
            return Position(*found) if found else None
        except (ValueError, TypeError):
            raise ValueError(f"{self.name}: no feed wrote {self._position}; choose another prefix") from None

    def apply(self, change: Change, batches: Iterator[ChangedBatch], position: Position) -> None:
        """Write and delete keys. A full copy deletes what it did not write, for which it needs up to 24 bytes a row."""
        with self._errors():
            if change.is_full:
                self._set(position._replace(version=0, commit_id=""))
            if change.dropped:
                self._delete(change.dropped, {})
            kept = defaultdict[str, list[Int64s]](list)
            for batch in batches:
                self._put(batch)
                if change.is_full:
                    kept[batch.table].append(batch.ids)
            if change.is_full:
                self._delete(None, {table: np.sort(np.concatenate(ids)) for table, ids in kept.items()})
            self._set(position)

    def _set(self, position: Position) -> None:
        """Set the position, unless the process or the position is another than was seen last."""
        with self._redis.pipeline() as pipe:
            pipe.watch(self._position)  # a connection that breaks from here on is an error
            if (pipe.info("server")["run_id"], pipe.get(self._position)) != self._seen:
                raise TierstoreError(f"{self.name} was started again, or another feed writes there: take it once more")
            pipe.multi()
            pipe.set(self._position, text := json.dumps([*position, [self._dtype, self._ttl]]).encode())
            pipe.execute()
        self._seen = self._seen[0], text

    def _put(self, batch: ChangedBatch) -> None:
        head, values, rows = f"{self._rows}{batch.table}:".encode(), batch.values, list[bytes]()
        keys = [b"%b%d" % (head, each) for each in batch.ids.tolist()]
        if values is not None:
            raw = (values if self._dtype == "stored" else values.float()).contiguous().view(torch.uint8).numpy()
            rows = raw.view(f"V{raw.shape[1]}")[:, 0].tolist()
        pipe = self._redis.pipeline(transaction=False)
        for first in range(0, len(keys), _ROWS):
            some = slice(first, first + _ROWS)
            if values is None:
                pipe.delete(*keys[some])
            elif self._ttl is None:
                pipe.mset(dict(zip(keys[some], rows[some], strict=True)))
            else:
                for key, row in zip(keys[some], rows[some], strict=True):
                    pipe.set(key, row, ex=self._ttl)
        pipe.execute()

    def _delete(self, tables: Collection[str] | None, kept: Mapping[str, Int64s]) -> None:
        """Delete the rows of tables, None: of all, but for those whose ids, ascending, are kept."""
        cursor: Any = None
        while cursor != 0:
            cursor, keys = self._redis.scan(cursor or 0, match=f"{self._rows}*", count=_PAGE)
            found = defaultdict[str, list[int]](list)
            for match in filter(None, (_KEY.fullmatch(key, len(self._rows)) for key in keys)):
                found[match[1].decode(errors="replace")].append(int(match[2]))
            for table in found.keys() & (found.keys() if tables is None else tables):
                ids = np.array([each for each in found[table] if -(2**63) <= each < 2**63], np.int64)
                own = kept.get(table, ids[:0])
                stale = ids[np.searchsorted(own, ids) == np.searchsorted(own, ids, "right")]
                self._put(ChangedBatch(table, stale, None))

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()
