"""What was looked up, as far as it fits a bound: the fuller it gets, the fewer rows it is about.

A row is in it with all its lookups or with none: it is in the sample of rate r if the SplitMix64 output of its key, as
a number of 64 bits, is below r * 2^64. So a sample of a lower rate is part of one of a higher rate, and samples of
other machines and times agree. Once the bound is reached, the rate is halved, and rows that are no longer sampled are
dropped (C. Waldspurger, N. Park, A. Garthwaite, I. Ahmad: Efficient MRC Construction with SHARDS, FAST 2015).
"""

import copy
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..kernels.arrays import Bools, Ids, Int32s, Int64s
from ..kernels.hashing import mix64
from ..kernels.jit import kernel
from ..layout import KEY_ROW_BITS, ROW_MASK
from .trace import TableTrace, Trace

ALL: Final = np.uint64(2**64 - 1)
"""``last_hash`` of a sample of all rows."""
_BLOCK: Final = 32
"""Rows that ``select`` hashes together, at most 64: mostly none is in the sample. Of fewer the compiler unrolls the
loop rather than use the widest vectors, which takes three times as long."""
_FIRST_ITEMS: Final = 1 << 10
_NO_SAMPLES: Final = np.empty(0, np.int32)


def last_hash(rate: float) -> np.uint64:
    """The largest hash in the sample. ValueError: the rate is not in (0, 1], or so low that no row would be in it."""
    size = int(rate * 2.0**64) if 0 < rate <= 1 else 0
    if not size:
        raise ValueError(f"sampling rate {rate!r}: expected a number above 0, and at most 1")
    return np.uint64(size - 1)


def is_sampled(keys: Int64s, rate: float) -> Bools:
    """Which rows are in the sample, bool [n], by ``table index << 40 | row``, int64 [n]; errors as ``last_hash``."""
    chosen = np.empty(len(keys), np.bool_)
    _mark(keys, last_hash(rate), chosen)
    return chosen


@kernel
def _mark(keys: Int64s, last: np.uint64, chosen: Bools) -> None:
    for position in range(keys.shape[0]):
        chosen[position] = mix64(np.uint64(keys[position])) <= last


@kernel
def select(
    ids: Ids, starts: Int64s, firsts: Int64s, num_rows: Int64s, batch: int, bag_starts: Ids, last: np.uint64,
    found: Int64s, lookups: Int64s,
) -> int:  # fmt: skip
    """How many rows of a lookup are sampled, features laid end to end. Ids that are no rows are left out: the caller
    may have changed them since they were looked up.

    Args:
        ids: int64 or int32 [N]. starts: int64 [features], where each feature's ids begin in ``ids``.
        firsts: int64 [features], the key of row 0 of each feature's table; 0 where ids are keys, of one table.
        num_rows: int64 [features], what ids are below. batch: bags of each feature.
        bag_starts: int64 or int32 [features * batch + 1], where each bag begins in what is laid end to end.
        last: of the sample, see ``last_hash``.
        found: int64 [2, n], for all n ids: written to, the sampled rows' keys and their positions, ascending.
        lookups: int64 [tables], ids of each table: added to.
    """
    count = 0
    for feature in range(starts.shape[0]):
        begin, end = bag_starts[feature * batch], bag_starts[(feature + 1) * batch]
        # A slice, as its indexes are plainly not negative: else the compiler makes no vectors of them.
        own = ids[starts[feature] : starts[feature] + end - begin]
        first, limit, whole = firsts[feature], num_rows[feature], own.shape[0] - own.shape[0] % _BLOCK
        if own.shape[0]:
            row = own[0]
            if 0 <= row < limit:
                lookups[(first + row) >> KEY_ROW_BITS] += own.shape[0]
        for block in range(0, whole, _BLOCK):
            hits = np.uint64(0)
            for i in range(_BLOCK):
                hits |= np.uint64(mix64(np.uint64(first + own[block + i])) <= last) << np.uint64(i)
            i = block
            while hits:
                row = own[i]
                if hits & np.uint64(1) and 0 <= row < limit:
                    found[0, count], found[1, count] = first + row, begin + i
                    count += 1
                hits >>= np.uint64(1)
                i += 1
        for i in range(whole, own.shape[0]):
            row = own[i]
            if mix64(np.uint64(first + row)) <= last and 0 <= row < limit:
                found[0, count], found[1, count] = first + row, begin + i
                count += 1
    return count


class _Column:
    """An array that grows; what ``values`` gave stays as it is."""

    def __init__(self, values: NDArray[Any]) -> None:
        self.count = len(values)
        self._array = values

    @property
    def values(self) -> Any:
        return self._array[: self.count]

    def append(self, values: ArrayLike, count: int) -> None:
        """Add an array, or, with a count of 1, a number."""
        end = self.count + count
        if end > len(self._array):
            grown = np.empty(max(_FIRST_ITEMS, 2 * len(self._array), end), self._array.dtype)
            grown[: self.count] = self.values
            self._array = grown
        self._array[self.count : end] = values
        self.count = end


@kernel
def _lay_out(keys: Int64s, key_ends: Int64s, firsts: Int64s, samples: Int32s, offsets: Int64s, ids: Int64s) -> None:
    """Write rows table by table, entry by entry, in the order of access, to ``ids``, [n], and where entries begin
    within each table to ``offsets``, [tables, entries + 1], zeros. ``firsts`` [batches]: the first entry of each batch;
    ``samples`` [n]: which entry of its batch each key is of; or empty: the first."""
    for step in range(2):
        begin = 0
        for batch in range(key_ends.shape[0]):
            for i in range(begin, key_ends[batch]):
                table = keys[i] >> KEY_ROW_BITS
                entry = firsts[batch] + (samples[i] if samples.shape[0] else 0)
                if step == 0:
                    offsets[table, entry + 1] += 1
                else:
                    ids[offsets[table, entry]] = keys[i] & ROW_MASK
                    offsets[table, entry] += 1
            begin = key_ends[batch]
        if step == 0:
            end = 0
            for table in range(offsets.shape[0]):
                offsets[table, 0] = end
                for entry in range(1, offsets.shape[1]):
                    end += offsets[table, entry]
                    offsets[table, entry] = end
    # Each is now where its entry ends in ``ids``, which is where the next begins.
    end = 0
    for table in range(offsets.shape[0]):
        first = end
        for entry in range(offsets.shape[1] - 1):
            end, offsets[table, entry] = offsets[table, entry], end - first
        offsets[table, -1] = end - first


class Recorded:
    """Lookups, batch by batch, of tables with these names, by index ("": there is no table); ``size_bytes`` is at most
    ``max_bytes`` between two batches. For one thread at a time.

    Attributes:
        rate: the share of all rows that is in it. last: its ``last_hash``.
        keys: int64 [n], of the sampled rows, batch by batch.
        num_samples, num_batches, lookups: of all rows; lookups by table.
    """

    def __init__(self, tables: list[str], *, rate: float, max_bytes: int) -> None:
        self.last = last_hash(rate)
        self.tables = list(tables)
        self.rate = rate
        self._max_bytes = max_bytes
        self.num_samples = self.num_batches = 0
        self.lookups = np.zeros(len(tables), np.int64)
        nothing = np.empty(0, np.int64)
        self._keys = _Column(nothing)
        self._key_ends, self._sample_ends = _Column(nothing), _Column(nothing)
        """Where each batch ends in ``keys`` and among all samples. One without a sampled row is not listed: its samples
        count to the one after it."""
        self._samples = _Column(_NO_SAMPLES) if self.last == ALL else None
        """The sample within its batch that each key is of."""

    @property
    def keys(self) -> Int64s:
        found: Int64s = self._keys.values
        return found

    @property
    def size_bytes(self) -> int:
        """What the lookups take in memory or, if that is more, in the file."""
        entry_bytes = 8 * (len(self.tables) + 1)
        if self._samples is not None:
            return 12 * self._keys.count + entry_bytes * self.num_samples
        return 8 * self._keys.count + entry_bytes * self._key_ends.count

    def add_table(self, name: str) -> None:
        self.tables.append(name)
        self.lookups = np.append(self.lookups, 0)

    def add(self, keys: Int64s, samples: Int64s, num_samples: int, last: np.uint64, lookups: Int64s) -> None:
        """One batch of ``num_samples``, 1 or more: its sampled rows, int64 [n], and the sample that each is of, which
        counts at rate 1 only. ``last``: of the rate that they were sampled at, this one or an earlier one; ``lookups``,
        int64 [tables]: of all rows; tables that came since may be missing."""
        if last != self.last:
            keys = keys[is_sampled(keys, self.rate)]
        self.num_samples += num_samples
        self.num_batches += 1
        self.lookups[: len(lookups)] += lookups
        if self._samples is not None:
            self._samples.append(samples, len(keys))
        elif not len(keys):
            return
        self._keys.append(keys, len(keys))
        self._key_ends.append(self._keys.count, 1)
        self._sample_ends.append(self.num_samples, 1)
        while self.size_bytes > self._max_bytes:
            self._halve()

    def _halve(self) -> None:
        self.rate /= 2
        self.last = last_hash(self.rate)
        keep = is_sampled(self.keys, self.rate)
        # Running sums would take 8 bytes of memory a key, besides those of the keys.
        ends = np.searchsorted(np.flatnonzero(keep), self._key_ends.values)
        is_filled = np.diff(ends, prepend=0) > 0
        self._keys = _Column(self.keys[keep])
        self._key_ends, self._sample_ends = _Column(ends[is_filled]), _Column(self._sample_ends.values[is_filled])
        self._samples = None

    def snapshot(self) -> "Recorded":
        """What there is, for another thread; it shares memory."""
        made = copy.copy(self)
        made.tables, made.lookups = [*self.tables], self.lookups.copy()
        for name in ("_keys", "_key_ends", "_sample_ends", "_samples"):
            if (column := getattr(self, name)) is not None:
                setattr(made, name, _Column(column.values))
        return made

    def trace(self) -> Trace:
        """As a trace: an entry a sample where all rows are in it, else an entry a batch."""
        starts: Int64s = np.append(0, self._sample_ends.values)
        if len(starts) > 1:
            starts[-1] = self.num_samples
        by_sample = self._samples is not None
        firsts = starts if by_sample else np.arange(len(starts))
        samples = _NO_SAMPLES if self._samples is None else self._samples.values
        offsets = np.zeros((len(self.tables), int(firsts[-1]) + 1), np.int64)
        ids = np.empty(len(self.keys), np.int64)
        _lay_out(self.keys, self._key_ends.values, firsts, samples, offsets, ids)
        ends = np.cumsum(offsets[:, -1])
        named = [place for place, name in enumerate(self.tables) if name]
        return Trace(
            tables={self.tables[i]: TableTrace(ids[ends[i] - offsets[i, -1] : ends[i]], offsets[i]) for i in named},
            batch_samples=max(1, round(self.num_samples / max(1, self.num_batches))),
            sampling_rate=self.rate,
            batch_starts=starts,
            all_lookups=None if by_sample else tuple(self.lookups[named].tolist()),
            all_batches=None if by_sample else self.num_batches,
        )
