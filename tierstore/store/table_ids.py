"""The ids of a table that has dynamic ones: which have rows, admission, eviction, and how a commit keeps them.

They are rows of a table of their own (``stored_ids``), which the manifest has next to it and ``Store.tables`` has not.
So what makes rows durable, versioned and whole makes ids so. A commit writes those that changed.

A row that gets an id is written whole, with first values and state, and is dirty from then on. So the log has a newer
row for it than that of the id that had it before, in the version that has the new id.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Final

import numpy as np

from ..config import TableConfig
from ..errors import IdError, TableError
from ..ids.configs import LFU, TTL, Frequency, Probability
from ..ids.id_map import MAX_SCORE, IdMap, absent, are_scores, as_words, draws, give_rows, lowest, owners_of
from ..io.base import ColdTier, NewerVersion
from ..kernels.arrays import Bools, Ids, Int64s, Words
from ..kernels.hashing import SECRET
from ..kernels.threads import Workers
from ..layout import KEY_ROW_BITS
from ..lookup.base import Found, Hold, Use
from ..pool.stats import IdStats
from .stored_ids import Changed, TableOfIds, ids_bytes

EVICTED_SHARE: Final = 1 / 16
"""Of rows whose uses are counted, and of candidates, those that lose their ids at once when there are no more: new ones
have the lowest counts, so to find the lowest is to look at all."""
_CHUNK_ROWS: Final = 2**16
_SEEN_BITS: Final = 8
_SEEN: Final = 2**_SEEN_BITS - 1
_AGE: Final = 2**22 - 1
"""Of a candidate's score: how often it was seen, and above that the batch that had it last, modulo this plus one."""
Put = Callable[[Int64s, Int64s], None]
"""Overwrites whole rows with first values and state, given their keys and their ids."""
_Order = Callable[[Int64s], Sequence[Any]]


class Peers:
    """What the owners of a table's ids decide together when a batch is admitted: here for one, who has all of them. All
    owners make the same calls in the same order."""

    def excess(self, part: int, count: int, capacity: int) -> int:  # noqa: ARG002 - it is exact
        """By how many ids, which have rows (part 0) or are candidates (1) here or are to be, ``count`` of all owners is
        above the capacity; at most 0 if it is not."""
        return self.total(count) - capacity

    def total(self, count: int) -> int:
        return count

    def lowest(self, items: Int64s, words: Callable[[Int64s], Sequence[Any]], count: int) -> Bools:
        """bool [n]: which items of this owner, distinct, are among the ``count`` lowest of all owners.

        Args:
            words: of each of some items, unsigned, compared by the first, then the second, and so on.
        """
        found = np.full(len(items), len(items) <= count)
        if not found.all():
            found[np.lexsort(words(items)[::-1])[:count]] = True
        return found

    def positions(self, count: int) -> Words:
        """uint64 [count]: where the ids of the batch that this owner was given are in the batch of all."""
        return np.arange(count, dtype=np.uint64)


class TableIds:
    """See the module's docstring. One thread at a time may admit. ``num_changes``: of admissions and evictions;
    ``num_moves``: how often rows lost their ids. ``time``: in minutes, of the batches from now on, from 1 on; 0 if it
    was not set."""

    def __init__(
        self, config: TableConfig, index: int, cold: ColdTier, workers: Workers, time: Callable[[], int]
    ) -> None:
        assert config.ids is not None
        self.lock = threading.RLock()
        self.num_admitted = self.num_refused = self.num_evicted = 0
        self.num_changes = self.num_moves = 0
        self.peers = Peers()
        self.first_key = config.rows.start | (index << KEY_ROW_BITS)
        self._config = config
        self._rules = rules = config.ids
        self._counts_uses = isinstance(rules.eviction, LFU)
        self.goes_by_time = isinstance(rules.eviction, TTL) and rules.eviction.minutes is not None
        self._num_candidates = rules.num_candidates(config.num_embeddings)
        self._stored = TableOfIds(config)
        self._index = index
        self._cold = cold
        self._workers = workers
        self._time = time
        self._holds: set[weakref.ref[Hold]] = set()
        self._frozen: Changed | None = None
        self._version = 0
        self.forget()

    def forget(self) -> None:
        """The store shows another version: ids are read again when they are needed."""
        with self.lock:
            self.__dict__.pop("_known", None)
            self._step = self._clock = 0
            self._frozen = None
            self._holds.clear()
            self.num_moves += 1

    @property
    def counts(self) -> tuple[int, int]:
        """Ids with rows, and candidates."""
        with self.lock:
            return self._rows.num_used, self._candidates.num_used

    def stats(self) -> IdStats:
        """Takes no lock: a batch may be admitted meanwhile."""
        known = self.__dict__.get("_known")
        if known is None:
            return IdStats()
        totals = self.num_admitted, self.num_refused, self.num_evicted
        return IdStats(known[0].num_used, known[1].num_used, *totals, ids_bytes(self._config))

    @property
    def clock(self) -> int:
        """Number of the last batch, or its time in minutes; 0 before the first."""
        with self.lock:
            _ = self._known
            return self._clock

    def find(self, ids: Int64s, use: Use = Use.READ) -> Found:
        """IdError for an id without a row, if the table asks for it and they are not only prepared."""
        with self.lock:
            found = self._found(self._rows.find(ids), is_held=use is Use.KEEP)
        if use is not Use.PREPARE:
            self._require_seen(ids, found.keys)
        return found

    def _found(self, rows: Int64s, *, is_held: bool) -> Found:
        hold = Hold(rows, lambda: self.num_moves) if is_held else None
        if hold is not None:
            self._holds.add(weakref.ref(hold, self._holds.discard))
        return Found(np.where(rows < 0, rows, rows + self.first_key), hold)

    @property
    def in_use(self) -> bool:
        return any(map(len, self._held))

    def _require_seen(self, ids: Int64s, rows: Int64s) -> None:
        if self._rules.unseen == "error":
            way = 'With DynamicIds(unseen="zeros") such ids give zeros, with "init" their first values'
            self.require_rows(ids, rows, f"it was never admitted, or was evicted. {way}")

    def require_rows(self, ids: Ids, rows: Int64s, way: str) -> None:
        """IdError, which ends with the way out, if one of these has no row: -1."""
        if (rows < 0).any():
            raise IdError(f"id {int(ids[int(np.argmax(rows < 0))])} has no row in table {self._config.name!r}: {way}")

    def listed(self) -> Int64s:
        with self.lock:
            return np.sort(self._rows.ids[self._rows.used_rows])

    def id_of(self, key: int) -> int:
        """The id that has the row of a key."""
        with self.lock:
            return int(self._rows.ids[key - self.first_key])

    def scores_of(self, ids: Int64s) -> Int64s:
        with self.lock:
            return self._rows.scores(self._rows.find(ids)).astype(np.int64)

    def give(self, ids: Int64s, scores: Int64s | None, put: Put) -> Int64s:
        """Keys of ids' rows, distinct; no rule of admission counts. ``scores``: int64 [n]; default: as if used now.
        TableError: there are too few rows. ValueError: no scores."""
        if scores is not None and not are_scores(scores):
            raise ValueError(f"scores of ids are in [{scores.min()}, {scores.max()}], not in [1, {MAX_SCORE}]")
        with self.lock:
            own, candidates = self._rows, self._candidates
            rows = own.find(ids)
            missing = np.flatnonzero(rows < 0)
            if len(missing) > own.num_free:
                raise TableError(
                    f"id {ids[missing[own.num_free]]} gets no row in table {self._config.name!r}: other ids have all "
                    f"{own.capacity}; evict some before, or choose a table with more num_embeddings"
                )
            self.num_changes += 1
            self.num_admitted += len(missing)
            self._keep_up(max(self._clock, self._time() if self.goes_by_time else 1))  # as if a batch had used them
            rows[missing] = own.free_rows(len(missing))
            self._insert(rows[missing], ids[missing], np.ones(len(missing), np.int64), put)
            counted = candidates.find(ids)
            candidates.remove(counted[counted >= 0])
            if scores is not None:
                own.set_scores(rows, scores.astype(np.uint32))
                self._keep_up(int(scores.max(initial=0)))
            return rows + self.first_key

    def admit(self, ids: Int64s, put: Put) -> Found:
        """``find`` for a batch that trains: counts uses, gives ids rows by the rules; none if ``put`` fails."""
        with self.lock:
            self.num_changes += 1
            rows, expired = self._rows, self._next_step()
            step, were = self._step, (rows.ids[expired], rows.scores(expired))
            if len(expired):
                rows.remove(expired)

            def order(chosen: Int64s) -> Sequence[Any]:
                """Where these of the new ids first are in the batch of all owners."""
                first, places = np.full(len(new), 2**64 - 1, np.uint64), np.flatnonzero(found < -1)
                np.minimum.at(first, -2 - found[places], self.peers.positions(len(ids))[places])
                return [first[chosen]]

            try:
                found = rows.find(ids, score=0 if self._counts_uses else self._clock)
                new, counts = absent(ids, found, SECRET)
                seen, are_admitted = self._admitted(new, counts, step)
                chosen, free = self._with_rows(np.flatnonzero(are_admitted), found, order)
            except BaseException:
                rows.put(expired, *were)  # nobody has their rows yet
                raise
            if len(expired):
                self._note_evicted(expired)
            given, those = np.full(len(new), -1, np.int64), chosen if len(chosen) < len(new) else slice(None)
            given[those] = free
            self._insert(free, new[those], counts[those], put)
            self._count(new, seen, given >= 0, step, order)
            self.num_admitted += len(chosen)
            self.num_refused += len(new) - len(chosen)
            if self._counts_uses:
                rows.count_uses(found[found >= 0])
            give_rows(found, given)
            result = self._found(found, is_held=True)
        self._require_seen(ids, found)
        return result

    def evict(self, ids: Int64s) -> int:
        """Take the rows from these ids, but from those that an in-flight batch uses; returns how many had one."""
        with self.lock:
            rows = self._rows.find(np.unique(ids))
            self.num_changes += 1
            rows = self._not_held(rows[rows >= 0])
            self._rows.remove(rows)
            return self._note_evicted(rows)

    def _next_step(self) -> Int64s:
        """Number this batch, and halve counts, as the rules say; returns rows whose ids have expired."""
        minutes = self._time()
        if self.goes_by_time and minutes < max(1, self._clock):
            raise RuntimeError(f"table {self._config.name!r} has TTL(minutes=): call Store.set_time before a batch")
        if self._step >= MAX_SCORE:
            raise OverflowError(f"table {self._config.name!r} has seen {self._step} batches; ids cannot count more")
        rows, rule = self._rows, self._rules.eviction
        self._step += 1
        if isinstance(rule, LFU) and rule.half_life_steps is not None and self._step % rule.half_life_steps == 0:
            used = rows.used_rows
            rows.set_scores(used, np.maximum(rows.scores(used) >> np.uint32(1), np.uint32(1)))
        before, self._clock = self._clock, minutes if self.goes_by_time else self._step
        if isinstance(rule, TTL):
            if not before:  # of rows that were imported no time is known
                rows.set_scores(rows.used_rows, np.full(rows.num_used, self._clock, np.uint32))
            every = max(1, rule.span // 16)
            if self._clock > rule.span and self._clock // every > before // every:
                used = rows.used_rows
                return self._not_held(used[rows.scores(used) < self._clock - rule.span])
        return np.empty(0, np.int64)

    def _admitted(self, ids: Int64s, counts: Int64s, step: int) -> tuple[Int64s, Bools]:
        """Of ids without rows, distinct: how often they have been seen, this batch's ``counts`` included, and which are
        to get rows."""
        rule = self._rules.admission
        if isinstance(rule, Frequency):
            known = self._candidates.find(ids)
            seen = counts + np.where(known >= 0, self._candidates.scores(known) & _SEEN, 0)
            return seen, seen >= rule.times
        if isinstance(rule, Probability):
            return counts, draws(ids, np.uint64(rule.seed % 2**64), step) < rule.share
        return counts, np.ones(len(ids), np.bool_)

    def _count(self, ids: Int64s, seen: Int64s, has_row: Bools, step: int, order: _Order) -> None:
        """Count those that have got no row; the others are counted no more."""
        if not isinstance(self._rules.admission, Frequency):
            return
        candidates = self._candidates
        known = candidates.find(ids)
        scores = (np.minimum(seen, _SEEN) | (step & _AGE) << _SEEN_BITS).astype(np.uint32)
        candidates.remove(known[has_row & (known >= 0)])
        stays = ~has_row & (known >= 0)
        candidates.set_scores(known[stays], scores[stays])
        new, most = np.flatnonzero(~has_row & (known < 0)), self._num_candidates
        lacking = self.peers.excess(1, candidates.num_used + len(new), most)
        if lacking > 0:
            too_many = max(0, self.peers.total(len(new)) - most)
            if too_many:
                new = new[~self.peers.lowest(new, order, too_many)]
            wanted = max(lacking - too_many, int(most * EVICTED_SHARE))
            oldest = lowest(used := candidates.used_rows, self._seen_at(used, step), candidates.ids_of, wanted)

            candidates.remove(oldest[self.peers.lowest(
                oldest, lambda rows: (self._seen_at(rows, step), as_words(candidates.ids[rows])), wanted
            )])  # fmt: skip
        new = new[: candidates.num_free]
        candidates.put(candidates.free_rows(len(new)), ids[new], scores[new])

    def _seen_at(self, candidates: Int64s, step: int) -> Any:
        """uint32 [n]: in which batch these were seen last, ascending."""
        scores = self._candidates.scores(candidates)
        return (scores >> np.uint32(_SEEN_BITS)) - np.uint32(step + 1) & np.uint32(_AGE)

    def _insert(self, rows: Int64s, ids: Int64s, counts: Int64s, put: Put) -> None:
        scores = counts.astype(np.uint32) if self._counts_uses else np.full(len(ids), max(1, self._clock), np.uint32)
        put(rows + self.first_key, ids)
        self._rows.put(rows, ids, scores)  # not before its row is whole

    @property
    def _held(self) -> list[Int64s]:
        return [hold.rows[hold.rows >= 0] for known in list(self._holds) if (hold := known()) is not None]

    def _not_held(self, rows: Int64s) -> Int64s:
        return rows[~np.isin(rows, np.concatenate([rows[:0], *self._held]))]

    def _with_rows(self, chosen: Int64s, batch: Int64s, order: _Order) -> tuple[Int64s, Int64s]:
        """Which chosen ids can have rows, and free rows for them; others lose theirs. ``batch``: its rows, or < 0."""
        rows, victims, capacity = self._rows, chosen[:0], self._config.num_embeddings
        lacking = self.peers.excess(0, rows.num_used + len(chosen), capacity)
        if lacking > 0:
            wanted, kept, most = lacking, self._held, self._clock - 1  # all of this batch have its number
            if self._counts_uses:
                wanted = max(wanted, int(capacity * EVICTED_SHARE))
            if self._counts_uses or self.goes_by_time:  # others may have scores as high
                most = MAX_SCORE
                kept.append(batch[batch >= 0])

            def choose(some: Int64s) -> Bools:
                return self.peers.lowest(some, lambda some: (rows.scores(some), as_words(rows.ids[some])), wanted)

            victims = rows.evict(wanted, kept, choose, most=most)
            lacking -= self.peers.total(self._note_evicted(victims))
            if lacking > 0:
                chosen = chosen[self.peers.lowest(chosen, order, self.peers.total(len(chosen)) - lacking)]
        chosen = chosen[: rows.num_free]
        if len(victims) == rows.num_free == len(chosen):
            return chosen, victims  # in this order wherever the run was resumed: there were no other free rows
        return chosen, rows.free_rows(len(chosen))

    def _note_evicted(self, rows: Int64s) -> int:
        self.num_evicted += len(rows)
        self.num_moves += 1
        return len(rows)

    def freeze(self, version: int) -> None:
        with self.lock:
            self.abandon()
            self._version = version
            if "_known" not in self.__dict__:
                return
            dirty = [each.dirty_rows for each in self._known]
            parts = [self._of_all, *map(self._stored.of, self._known, (0, 1), dirty)]
            self._frozen = Changed(*map(np.concatenate, zip(*parts, strict=True)))
            for each, rows in zip(self._known, dirty, strict=True):
                each.clean(rows)

    @property
    def _of_all(self) -> Changed:
        starts = np.array(self._stored.owned) * self._stored.section_rows
        words = self._step | self._clock << 32, self._rows.cursor
        return Changed(starts, np.full((len(starts), 2), words, np.uint64))

    def write_frozen(self) -> None:
        if (frozen := self._frozen) is None:
            return
        for first in range(0, len(frozen.rows), _CHUNK_ROWS):
            part = slice(first, first + _CHUNK_ROWS)
            rows, words = frozen.rows[part], frozen.words[part]
            slots, state = np.arange(len(rows), dtype=np.int32), np.empty((len(rows), 0), np.uint64)
            self._cold.write(self._keys(rows), slots, words, state, epoch=self._version)
        self._frozen = None  # what is written is of the next version if this one fails

    def abandon(self) -> None:
        with self.lock:
            frozen, self._frozen = self._frozen, None
            if frozen is not None:
                for part, known in enumerate(self._known):
                    known.soil(self._stored.within(frozen.rows, part)[1])

    def check_integrity(self) -> None:
        """AssertionError unless each id leads to its row, and the counts agree."""
        with self.lock:
            for part in self._known:
                part.check_integrity()

    @property
    def _rows(self) -> IdMap:
        return self._known[0]

    @property
    def _candidates(self) -> IdMap:
        return self._known[1]

    @cached_property
    def _known(self) -> tuple[IdMap, IdMap]:
        """Of rows and of candidates, read from the version that the cold tier shows."""
        known = self._new_maps()
        for stored in self._cold.stored_rows(self._index + 1):
            for first in range(0, len(stored), _CHUNK_ROWS):
                self._enter(Changed.read(self._cold.read, self._keys(stored[first : first + _CHUNK_ROWS])), known)
        self._keep_up(int(known[0].scores(known[0].used_rows).max(initial=0)))  # a repaired store may have lost it
        if self.goes_by_time and self._clock == 1 and not self._step:
            self._clock = 0  # all were imported, when no time was known
        return known

    def _new_maps(self) -> tuple[IdMap, IdMap]:
        rows, candidates = (IdMap(len(self._stored.owned) * share, self._workers) for share in self._stored.shares)
        return rows, candidates

    def _keep_up(self, score: int) -> None:
        if not self._counts_uses:
            self._clock = max(self._clock, score)
            self._step = self._step if self.goes_by_time else max(self._step, score)

    def _enter(self, changed: Changed, known: tuple[IdMap, IdMap]) -> None:
        for part, each in enumerate(known):
            self._stored.enter(changed, each, part)
        for words in changed.words[changed.rows % self._stored.section_rows == 0]:
            (self._clock, self._step), known[0].cursor = divmod(int(words[0]), 2**32), int(words[1])

    def take_over(self, other: "TableIds") -> Int64s:
        """Have another table's ids that this one's owners have, in a table without any. Returns the keys of their rows
        there, ascending, to which rows here belong from the first on."""
        owners, (first, stop) = self._rules.owners, self._rules.owned
        keys = []
        for own, given in zip(self._known, other._known, strict=True):
            rows = given.used_rows
            owner = owners_of(given.ids[rows], owners)
            rows = rows[(owner >= first) & (owner < stop)]
            own.put(own.free_rows(len(rows)), given.ids[rows], given.scores(rows))
            keys.append(rows + other.first_key)
        self._step, self._clock = other._step, other._clock
        self.num_changes += 1
        return keys[0]

    def changed(self, newer: NewerVersion) -> Callable[[], None]:
        """What has a newer version's ids shown, to call once the store shows it."""
        changed = None
        if "_known" in self.__dict__:
            first, stop = (np.searchsorted(newer.changed, (self._index + after) << KEY_ROW_BITS) for after in (1, 2))
            changed = Changed.read(newer.read, newer.changed[first:stop])

        def show() -> None:
            with self.lock:
                known = self.__dict__.pop("_known", None)
                if changed is not None and known is not None:
                    self._enter(changed, known)
                    self._known = known

        return show

    def rehearse(self) -> None:
        """Compile what ``changed`` uses."""
        made, rows = IdMap(1, self._workers), np.zeros(1, np.int64)
        made.put(rows, rows, rows.astype(np.uint32))
        made.remove(rows)

    @property
    def shape(self) -> tuple[int, int]:
        return self._stored.num_rows, 2

    def words(self) -> Words:
        """uint64 ``shape``: all that the table of ids would hold after a commit."""
        words = np.zeros(self.shape, np.uint64)
        with self.lock:
            every = [np.arange(each.capacity) for each in self._known]
            for each in (self._of_all, *map(self._stored.of, self._known, (0, 1), every)):
                words[each.rows] = each.words
        return words

    def restore(self, words: Words) -> None:
        """TableError, nothing changed: rows are in use. ValueError: not of ``shape``. DamagedError."""
        if words.shape != self.shape:
            raise ValueError(f"ids of table {self._config.name!r} are {list(self.shape)}, not {list(words.shape)}")
        with self.lock:
            if self.in_use:
                raise TableError(f"a batch uses rows of table {self._config.name!r}: run its backward, or drop it")
            known = self._new_maps()
            self._enter(Changed(np.arange(len(words)), words), known)
            for part in known:
                part.soil(np.arange(part.capacity))
            self._known = known
            self.num_changes += 1
            self.num_moves += 1

    def _keys(self, rows: Int64s) -> Int64s:
        return rows | ((self._index + 1) << KEY_ROW_BITS)
