"""The ids of a table that has dynamic ones: which have rows, admission, eviction, and how a commit keeps them.

They are rows of a table of their own, which the manifest has next to it and ``Store.tables`` has not: row r + 1 has the
id and score of row r, but if there are candidates, they and rows come in turn, so that the table may grow; row 0 has
the count of batches, and where rows without ids are looked for next. So what makes
rows durable, versioned and whole makes ids so. A commit writes those that changed.

A row that gets an id is written whole, with first values and state, and is dirty from then on. So the log has a newer
row for it than that of the id that had it before, in the version that has the new id.
"""

import threading
import weakref
from collections.abc import Callable
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np

from ..config import TableConfig
from ..errors import DamagedError, IdError, TableError
from ..ids.configs import LFU, TTL, Frequency, Probability
from ..ids.id_map import MAX_SCORE, IdMap, absent, draws, give_rows, lowest, map_bytes
from ..io import ColdTier, NewerVersion
from ..kernels.arrays import Bools, Ids, Int64s, Words
from ..kernels.hashing import mix64
from ..kernels.threads import Workers
from ..layout import KEY_ROW_BITS, ROW_MASK
from ..lookup.tables import Use

EVICTED_SHARE: Final = 1 / 16
"""Of rows whose uses are counted, and of candidates, those that lose their ids at once when there are no more: new ones
have the lowest counts, so to find the lowest is to look at all."""
_CHUNK_ROWS: Final = 2**16
_HAS_ID: Final = np.uint64(1)
_HALF: Final = np.uint64(32)
_SEEN_BITS: Final = 8
_SEEN: Final = 2**_SEEN_BITS - 1
_AGE: Final = 2**22 - 1
"""Of a candidate's score: how often it was seen, and above that the batch that had it last, modulo this plus one."""
Put = Callable[[Int64s, Int64s], None]
"""Overwrites whole rows with first values and state, given their keys and their ids."""


class RowIds(NamedTuple):
    """int64 [n], rows of a table; each one's id, int64 [n], and whether it still has it, bool [n]."""

    rows: Int64s
    ids: Int64s
    has_id: Bools

    @classmethod
    def of(cls, rows: Int64s, words: Words) -> "RowIds":
        """As ``words`` of the companion, uint64 [n, 2], have them: id; whether the row has it << 32 | score."""
        return cls(rows, words[:, 0].view(np.int64), words[:, 1] >> _HALF & _HAS_ID != 0)

    @classmethod
    def of_table(cls, config: TableConfig, rows: Int64s, words: Words) -> "RowIds":
        """Of the table's own rows, among some of its companion's."""
        own = rows % config.step_of_ids == 1 % config.step_of_ids
        own &= rows > 0
        return cls.of((rows[own] - 1) // config.step_of_ids, words[own])


class _Changed(NamedTuple):
    """Rows of the companion, int64 [n], and what they hold, uint64 [n, 2], as ``RowIds.of`` reads it."""

    rows: Int64s
    words: Words

    @classmethod
    def of(cls, part: IdMap, places: slice) -> "_Changed":
        """What changed of a part, whose rows are in these places of the companion."""
        return cls.of_rows(part, places, part.dirty_rows)

    @classmethod
    def of_rows(cls, part: IdMap, places: slice, rows: Int64s) -> "_Changed":
        """What these rows of it hold."""
        words = np.empty((len(rows), 2), np.uint64)
        words[:, 0] = part.ids[rows].view(np.uint64)
        words[:, 1] = part.has_id(rows).astype(np.uint64) << _HALF | part.scores(rows)
        return cls(rows * places.step + places.start, words)

    def of_part(self, part: IdMap, places: slice) -> "_Changed":
        """What is of that part, in terms of its rows."""
        rows, rest = np.divmod(self.rows - places.start, places.step)
        own = (rest == 0) & (rows >= 0) & (rows < part.capacity)
        return _Changed(rows[own], self.words[own])

    def enter(self, part: IdMap, places: slice) -> None:
        """Have that part hold what this says of it, as it is stored. DamagedError: nobody wrote this."""
        own = self.of_part(part, places)
        rows, ids, used = RowIds.of(*own)
        part.remove(rows[part.has_id(rows)])
        ids, scores = ids[used], own.words[used, 1].astype(np.uint32)
        is_sound = 0 < scores.min(initial=1) <= scores.max(initial=1) <= MAX_SCORE
        if is_sound:
            part.put(rows[used], ids, scores)
        if not is_sound or not np.array_equal(part.find(ids), rows[used]):
            raise DamagedError(
                "two rows have one id, or a wrong score: restore the store from a copy, or publish all of it again"
            )
        part.clean(rows)


class ChangedIds(NamedTuple):
    """What a newer version has of a table's ids; None if they were not looked at yet, and are read when they are."""

    ids: "TableIds"
    changed: _Changed | None

    def show(self) -> None:
        """The store shows that version now."""
        self.ids.show(self.changed)


class IdsHold:
    """See ``Hold``. ``rows``: that keep their ids, and -1."""

    def __init__(self, ids: "TableIds", rows: Int64s) -> None:
        self.rows = rows
        self._ids = ids
        self._moves = -1

    def let_go(self) -> None:
        self.rows, self._moves = self.rows[:0], self._ids.num_moves

    def require(self) -> None:
        if 0 <= self._moves < self._ids.num_moves:
            raise RuntimeError(
                "a batch is trained a second time (retain_graph=True), and some ids have lost their rows since the "
                "first: run the backward passes of a batch before the next batch's forward"
            )


class FoundRows(NamedTuple):
    """int64 [n]: rows of some ids, -1 of one that has none."""

    rows: Int64s
    hold: IdsHold | None = None


class IdStats(NamedTuple):
    """Of a table with dynamic ids.

    Attributes:
        rows: ids that have rows now; candidates: ids that are counted.
        admitted, refused, evicted: totals since the store was opened; refused ids count once a batch.
        bytes: memory for all this.
    """

    rows: int
    candidates: int
    admitted: int
    refused: int
    evicted: int
    bytes: int


class TableIds:
    """See the module's docstring. One thread at a time may admit.

    Attributes:
        lock: held while ids are looked up or change.
        num_changes: how often ids were admitted or evicted; num_moves: how often rows lost their ids.
        num_admitted, num_refused, num_evicted: ids, since the store was opened.
    """

    def __init__(self, config: TableConfig, index: int, cold: ColdTier, workers: Workers) -> None:
        assert config.ids is not None
        self.lock = threading.RLock()
        self.num_admitted = self.num_refused = self.num_evicted = 0
        self.num_changes = self.num_moves = 0
        self._config = config
        self._rules = config.ids
        self._index = index
        self._cold = cold
        self._workers = workers
        self._holds: weakref.WeakSet[IdsHold] = weakref.WeakSet()
        self._frozen: _Changed | None = None
        self._version = 0
        self.forget()

    def forget(self) -> None:
        """The store shows another version: what is known of ids is read again when it is needed."""
        with self.lock:
            self.__dict__.pop("_known", None)
            self._step = 0
            self._frozen = None
            self._holds.clear()
            self.num_moves += 1

    @property
    def size_bytes(self) -> int:
        """Of all that is known of ids, once they are looked at."""
        num_rows = self._config.num_embeddings
        return map_bytes(num_rows) + map_bytes(self._rules.num_candidates(num_rows))

    def stats(self) -> IdStats:
        with self.lock:
            counts = self._rows.num_used, self._candidates.num_used
        return IdStats(*counts, self.num_admitted, self.num_refused, self.num_evicted, self.size_bytes)

    # Looking ids up

    def find(self, ids: Int64s, use: Use = Use.READ) -> FoundRows:
        """The rows of ids; not to admit them. IdError for one without a row, if the table asks for it, unless they are
        only prepared."""
        with self.lock:
            found = self._found(self._rows.find(ids, self._workers), is_held=use is Use.KEEP)
        if use is not Use.PREPARE:
            self._require_seen(ids, found.rows)
        return found

    def _found(self, rows: Int64s, *, is_held: bool) -> FoundRows:
        if not is_held:
            return FoundRows(rows)
        hold = IdsHold(self, rows)
        self._holds.add(hold)
        return FoundRows(rows, hold)

    @property
    def in_use(self) -> bool:
        """Whether a batch under way keeps rows."""
        return any(map(len, self._held))

    def _require_seen(self, ids: Int64s, rows: Int64s) -> None:
        if self._rules.unseen == "error":
            self.require_rows(
                ids, rows, 'it was never admitted, or was evicted. With DynamicIds(unseen="zeros") such ids give zeros'
            )

    def require_rows(self, ids: Ids, rows: Int64s, way: str) -> None:
        """IdError, which ends with the way out, if one of these has no row: -1."""
        if (rows < 0).any():
            raise IdError(f"id {int(ids[int(np.argmax(rows < 0))])} has no row in table {self._config.name!r}: {way}")

    def listed(self) -> Int64s:
        """All ids that have rows, int64, ascending."""
        with self.lock:
            return np.sort(self._rows.ids[self._rows.used_rows])

    def scores_of(self, ids: Int64s) -> Int64s:
        """Of ids that have rows, int64 [n]."""
        with self.lock:
            return self._rows.scores(self._rows.find(ids)).astype(np.int64)

    def give(self, ids: Int64s, scores: Int64s | None, put: Put) -> Int64s:
        """Rows of ids, distinct; those without one get one whatever the rules of admission. TableError: there are too
        few. ValueError: no scores.

        Args:
            scores: int64 [n], of all of them; default: as of those used now, and what the others have.
        """
        if scores is not None and not 0 < scores.min(initial=1) <= scores.max(initial=1) <= MAX_SCORE:
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
            self._step = max(self._step, 1)  # as if a batch had used them
            rows[missing] = own.free_rows(len(missing))
            self._insert(rows[missing], ids[missing], np.ones(len(missing), np.int64), self._step, put)
            counted = candidates.find(ids)
            candidates.remove(counted[counted >= 0])
            if scores is not None:
                own.set_scores(rows, scores.astype(np.uint32))
                if not isinstance(self._rules.eviction, LFU):
                    self._step = max(self._step, int(scores.max(initial=1)))
            return rows

    def admit(self, ids: Int64s, put: Put) -> FoundRows:
        """``find`` for a batch that trains: it counts uses, gives ids rows by the rules, and takes rows from others. If
        ``put`` fails, no id has got a row, though some may have lost theirs."""
        with self.lock:
            self.num_changes += 1
            rows, step = self._rows, self._next_step()
            is_counted = isinstance(self._rules.eviction, LFU)
            found = rows.find(ids, self._workers, score=0 if is_counted else step)
            new, counts = absent(ids, found)
            seen = self._seen(new, counts)
            chosen = np.flatnonzero(self._are_admitted(new, seen, step))
            free = self._free_rows(len(chosen), found)
            chosen = chosen[: len(free)]
            given = np.full(len(new), -1, np.int64)
            given[chosen] = free
            self._insert(free, new[chosen], counts[chosen], step, put)
            self._count(new, seen, given >= 0, step)
            self.num_admitted += len(chosen)
            self.num_refused += len(new) - len(chosen)
            if is_counted:
                rows.count_uses(found[found >= 0])
            give_rows(found, given)
            result = self._found(found, is_held=True)
        self._require_seen(ids, found)
        return result

    def evict(self, ids: Int64s) -> int:
        """Take the rows from these ids, but from those that a batch under way uses; returns how many had one."""
        with self.lock:
            rows = self._rows.find(np.unique(ids))
            rows = rows[rows >= 0]
            self.num_changes += 1
            return self._remove(self._not_held(rows))

    # The rules

    def _next_step(self) -> int:
        """Number this batch; forget counts, and ids that were not used for long, as the rules say."""
        if self._step >= MAX_SCORE:
            raise OverflowError(f"table {self._config.name!r} has seen {self._step} batches; ids cannot count more")
        rows, rule = self._rows, self._rules.eviction
        self._step += 1
        if isinstance(rule, LFU) and rule.half_life_steps is not None and self._step % rule.half_life_steps == 0:
            used = rows.used_rows
            rows.set_scores(used, np.maximum(rows.scores(used) >> np.uint32(1), np.uint32(1)))
        if isinstance(rule, TTL) and self._step > rule.steps and self._step % max(1, rule.steps // 16) == 0:
            used = rows.used_rows
            self._remove(self._not_held(used[rows.scores(used) < self._step - rule.steps]))
        return self._step

    def _seen(self, ids: Int64s, counts: Int64s) -> Int64s:
        """How often ids without rows, distinct, have been seen, this batch's ``counts`` included."""
        if not isinstance(self._rules.admission, Frequency):
            return counts
        known = self._candidates.find(ids)
        return counts + np.where(known >= 0, self._candidates.scores(known) & _SEEN, 0)

    def _are_admitted(self, ids: Int64s, seen: Int64s, step: int) -> Bools:
        """Which of them may get a row."""
        rule = self._rules.admission
        if isinstance(rule, Frequency):
            return seen >= rule.times
        if isinstance(rule, Probability):
            return draws(ids, mix64(np.uint64(rule.seed % 2**64) ^ mix64(np.uint64(step)))) < rule.share
        return np.ones(len(ids), np.bool_)

    def _count(self, ids: Int64s, seen: Int64s, has_row: Bools, step: int) -> None:
        """Count those that have got no row; the others are counted no more."""
        if not isinstance(self._rules.admission, Frequency):
            return
        candidates = self._candidates
        known = candidates.find(ids)
        scores = (np.minimum(seen, _SEEN) | (step & _AGE) << _SEEN_BITS).astype(np.uint32)
        candidates.remove(known[has_row & (known >= 0)])
        stays = ~has_row & (known >= 0)
        candidates.set_scores(known[stays], scores[stays])
        new = np.flatnonzero(~has_row & (known < 0))[-candidates.capacity :]
        if len(new) > candidates.num_free:
            used = candidates.used_rows
            seen_at = (candidates.scores(used) >> np.uint32(_SEEN_BITS)) - np.uint32(step + 1) & np.uint32(_AGE)
            wanted = max(len(new) - candidates.num_free, int(candidates.capacity * EVICTED_SHARE))
            candidates.remove(lowest(used, seen_at, candidates.ids, wanted))
        candidates.put(candidates.free_rows(len(new)), ids[new], scores[new])

    def _insert(self, rows: Int64s, ids: Int64s, counts: Int64s, step: int, put: Put) -> None:
        is_counted = isinstance(self._rules.eviction, LFU)
        scores = counts.astype(np.uint32) if is_counted else np.full(len(ids), step, np.uint32)
        put(rows | (self._index << KEY_ROW_BITS), ids)
        self._rows.put(rows, ids, scores, self._workers)  # not before its row is whole

    # Eviction

    @property
    def _held(self) -> list[Int64s]:
        """The rows of batches under way."""
        return [hold.rows[hold.rows >= 0] for hold in self._holds]

    def _not_held(self, rows: Int64s) -> Int64s:
        return rows[~np.isin(rows, np.concatenate([rows[:0], *self._held]))]

    def _free_rows(self, count: int, batch: Int64s) -> Int64s:
        """Rows without ids, int64 [n <= count]; others lose theirs, if need be. ``batch``: rows of this batch, or less
        than 0."""
        rows = self._rows
        if count > rows.num_free:
            wanted, kept, most = count - rows.num_free, self._held, self._step - 1  # all of this batch have its number
            if isinstance(self._rules.eviction, LFU):
                wanted, most = max(wanted, int(rows.capacity * EVICTED_SHARE)), MAX_SCORE
                kept.append(batch[batch >= 0])
            victims = rows.evict(wanted, kept, lambda each: np.ones(len(each), np.bool_), self._workers, most=most)
            self._note_evicted(victims)
            if len(victims) == rows.num_free <= count:
                return victims  # in this order wherever the run was resumed: there were no other free rows
        return rows.free_rows(min(count, rows.num_free))

    def _remove(self, rows: Int64s) -> int:
        self._rows.remove(rows, self._workers)
        return self._note_evicted(rows)

    def _note_evicted(self, rows: Int64s) -> int:
        self.num_evicted += len(rows)
        self.num_moves += 1
        return len(rows)

    # Commits

    def freeze(self, version: int) -> None:
        """What is known now is of that version."""
        with self.lock:
            self.abandon()
            self._version = version
            if "_known" not in self.__dict__:
                return
            parts = [self._of_all, *(_Changed.of(part, places) for places, part in self._parts(self._known))]
            self._frozen = _Changed(*map(np.concatenate, zip(*parts, strict=True)))
            for _, part in self._parts(self._known):
                part.clean(slice(None))

    @property
    def _of_all(self) -> _Changed:
        """Row 0."""
        return _Changed(np.zeros(1, np.int64), np.array([[self._step, self._rows.cursor]], np.uint64))

    def write_frozen(self) -> None:
        """See ``Frozen``."""
        frozen = self._frozen
        if frozen is None:
            return
        keys = self._keys(frozen.rows)
        state = np.empty((len(keys), 0), np.uint64)
        for first in range(0, len(keys), _CHUNK_ROWS):
            part = slice(first, first + _CHUNK_ROWS)
            slots = np.arange(len(keys[part]), dtype=np.int32)
            self._cold.write(keys[part], slots, frozen.words[part], state[part], epoch=self._version)
        self._frozen = None  # what is written is of the next version if this one fails

    def abandon(self) -> None:
        """See ``Frozen``."""
        with self.lock:
            frozen, self._frozen = self._frozen, None
            if frozen is not None:
                for places, part in self._parts(self._known):
                    part.soil(frozen.of_part(part, places).rows)

    def check_integrity(self) -> None:
        """AssertionError unless each id leads to its row, and the counts agree."""
        with self.lock:
            for _, part in self._parts(self._known):
                part.check_integrity()

    # What is known

    @property
    def _rows(self) -> IdMap:
        return self._known[0]

    @property
    def _candidates(self) -> IdMap:
        return self._known[1]

    @cached_property
    def _known(self) -> tuple[IdMap, IdMap]:
        """Of rows and of candidates, read from the version that the cold tier shows."""
        num_rows = self._config.num_embeddings
        known = IdMap(num_rows), IdMap(self._rules.num_candidates(num_rows))
        for stored in self._cold.stored_rows(self._index + 1):
            for first in range(0, len(stored), _CHUNK_ROWS):
                rows = stored[first : first + _CHUNK_ROWS]
                slots = np.arange(len(rows), dtype=np.int32)
                words, state = np.empty((len(rows), 2), np.uint64), np.empty((len(rows), 0), np.uint64)
                self._cold.read(self._keys(rows), slots, words, state, np.empty(len(rows), np.bool_))
                self._enter(_Changed(rows, words), known)
        return known

    @staticmethod
    def _parts(known: tuple[IdMap, IdMap]) -> list[tuple[slice, IdMap]]:
        """Each with the companion's rows that it has."""
        step = 2 if known[1].capacity else 1
        return [(slice(first, None, step), part) for first, part in enumerate(known, 1)]

    def _enter(self, changed: _Changed, known: tuple[IdMap, IdMap]) -> None:
        for places, part in self._parts(known):
            changed.enter(part, places)
        if len(changed.rows) and changed.rows[0] == 0:
            self._step, known[0].cursor = map(int, changed.words[0])

    def changed(self, newer: NewerVersion) -> ChangedIds:
        """What a newer version has of them."""
        if "_known" not in self.__dict__:
            return ChangedIds(self, None)
        first, stop = (np.searchsorted(newer.changed, (self._index + after) << KEY_ROW_BITS) for after in (1, 2))
        keys = newer.changed[first:stop]
        words, state = np.zeros((len(keys), 2), np.uint64), np.empty((len(keys), 0), np.uint64)
        newer.read(keys, np.arange(len(keys), dtype=np.int32), words, state, np.empty(len(keys), np.bool_))
        return ChangedIds(self, _Changed(keys & ROW_MASK, words))

    def rehearse(self) -> None:
        """Compile what ``changed`` and ``show`` use."""
        made, rows = IdMap(1), np.zeros(1, np.int64)
        made.put(rows, rows, rows.astype(np.uint32))
        made.remove(rows)

    def show(self, changed: _Changed | None) -> None:
        with self.lock:
            known = self.__dict__.pop("_known", None)
            if changed is not None and known is not None:
                self._enter(changed, known)
                self._known = known

    @property
    def shape(self) -> tuple[int, int]:
        """Of ``words``."""
        return self._config.table_of_ids(self._index).num_embeddings, 2

    def words(self) -> Words:
        """All that the companion's rows would hold after a commit, uint64."""
        words = np.zeros(self.shape, np.uint64)
        with self.lock:
            parts = [_Changed.of_rows(part, at, np.arange(part.capacity)) for at, part in self._parts(self._known)]
            for each in (self._of_all, *parts):
                words[each.rows] = each.words
        return words

    def restore(self, words: Words) -> None:
        """Have ids as ``words`` has them. TableError, nothing changed: a batch under way uses rows. ValueError: not of
        ``shape``. DamagedError."""
        if words.shape != self.shape:
            raise ValueError(f"ids of table {self._config.name!r} are {list(self.shape)}, not {list(words.shape)}")
        with self.lock:
            if self.in_use:
                raise TableError(f"a batch uses rows of table {self._config.name!r}: run its backward, or drop it")
            known = IdMap(self._rows.capacity), IdMap(self._candidates.capacity)
            self._enter(_Changed(np.arange(len(words)), words), known)
            for part in known:
                part.soil(np.arange(part.capacity))
            self._known = known
            self.num_changes += 1
            self.num_moves += 1

    def _keys(self, rows: Int64s) -> Int64s:
        """Of rows of the companion."""
        return rows | ((self._index + 1) << KEY_ROW_BITS)
