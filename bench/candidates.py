"""Which ids reach a count of k when not all can be counted: those seen longest ago are forgotten, or kept by a sketch?

A part of bench.ids. All ways but one have the same bytes: 20 for an id that is counted exactly, one for a counter of a
count-min sketch (G. Cormode, S. Muthukrishnan, An Improved Data Stream Summary, J. Algorithms 2005), which takes the
counts of ids that are forgotten and gives them back if these come again.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from tierstore.ids.id_map import IdMap, lowest
from tierstore.kernels.arrays import Int64s

from .common import Table, Told

FORGET: Final = "exact; those seen longest ago are forgotten"
TWICE: Final = "the same, with twice the bytes"
SKETCH: Final = "half as many exact, a count-min sketch for the others"
FADING: Final = "so too, the sketch halved after as many counts as it has counters in a row"
_HASHES: Final = 4
_ID_BYTES: Final = 20
_MOST: Final = 255


class _Sketch:
    """Count-min with saturating counters of a byte, updated conservatively."""

    def __init__(self, size_bytes: int, *, fades: bool) -> None:
        self._counters = np.zeros((_HASHES, size_bytes // _HASHES), np.uint8)
        self._factors = np.random.default_rng(0).integers(2**63, 2**64 - 1, _HASHES, np.uint64) | np.uint64(1)
        self._fades, self._added = fades, 0

    def _places(self, ids: Int64s) -> Int64s:
        width = np.uint64(self._counters.shape[1])
        mixed = (ids.astype(np.uint64) * self._factors[:, None]) >> np.uint64(32)
        return (mixed * width >> np.uint64(32)).astype(np.int64)

    def counts(self, ids: Int64s) -> Int64s:
        found: Int64s = np.take_along_axis(self._counters, self._places(ids), 1).min(0).astype(np.int64)
        return found

    def put(self, ids: Int64s, counts: Int64s) -> None:
        for row, places in zip(self._counters, self._places(ids), strict=True):
            np.maximum.at(row, places, np.minimum(counts, _MOST).astype(np.uint8))
        self._added += len(ids)
        if self._fades and self._added >= self._counters.shape[1]:
            self._counters >>= 1
            self._added = 0


class _Counter:
    """Counts ids until they have been seen ``times`` times; ``sketch`` has those of ids that were forgotten."""

    def __init__(self, capacity: int, times: int, sketch: _Sketch | None) -> None:
        self._ids, self._last = IdMap(capacity), np.zeros(capacity, np.uint32)
        self._times, self._sketch, self._step = times, sketch, 0

    def reached(self, ids: Int64s, counts: Int64s) -> Int64s:
        """Which of a batch's distinct ids now have the count."""
        self._step += 1
        rows, own = self._ids.find(ids), counts.copy()
        known = rows >= 0
        own[known] += self._ids.scores(rows[known])
        if self._sketch is not None:
            own[~known] += self._sketch.counts(ids[~known])
        is_over = own >= self._times
        self._ids.remove(rows[known & is_over])
        stays = rows[known & ~is_over]
        self._ids.set_scores(stays, own[known & ~is_over].astype(np.uint32))
        self._last[stays] = self._step
        self._add(ids[~known & ~is_over], own[~known & ~is_over])
        return ids[is_over]

    def _add(self, new: Int64s, counts: Int64s) -> None:
        ids = self._ids
        if len(new) > ids.num_free:
            used = ids.used_rows
            oldest = lowest(used, self._last[used], ids.ids_of, max(len(new) - ids.num_free, ids.capacity // 16))
            if self._sketch is not None:
                self._sketch.put(ids.ids_of(oldest), ids.scores(oldest).astype(np.int64))
            ids.remove(oldest)
        rows = ids.free_rows(len(new))
        ids.put(rows, new, counts.astype(np.uint32))
        self._last[rows] = self._step


def compare(stream: Iterator[Int64s], capacity: int, most_ids: int, times: int) -> dict[str, Any]:
    """Of each way: the shares of ids with the count that it finds, of those found that lack it, and of lookups."""
    half = capacity // 2
    ways = {
        FORGET: _Counter(capacity, times, None),
        TWICE: _Counter(2 * capacity, times, None),
        SKETCH: _Counter(half, times, _Sketch(_ID_BYTES * half, fades=False)),
        FADING: _Counter(half, times, _Sketch(_ID_BYTES * half, fades=True)),
    }
    truth, found = IdMap(most_ids), {name: IdMap(most_ids) for name in ways}
    lookups, served, too_early = 0, dict.fromkeys(ways, 0), dict.fromkeys(ways, 0)
    for batch in stream:
        ids, counts = np.unique(batch, return_counts=True)
        rows = truth.find(ids)
        truth.count_uses(np.repeat(rows[rows >= 0], counts[rows >= 0]))
        new = rows < 0
        truth.put(truth.free_rows(int(new.sum())), ids[new], counts[new].astype(np.uint32))
        lookups += len(batch)
        for name, way in ways.items():
            known = found[name].find(ids) >= 0
            served[name] += int(counts[known].sum())
            over = way.reached(ids[~known], counts[~known])
            too_early[name] += int((truth.scores(truth.find(over)) < times).sum())
            found[name].put(found[name].free_rows(len(over)), over, np.ones(len(over), np.uint32))
    wanted = truth.ids[truth.used_rows[truth.scores(truth.used_rows) >= times]]
    return {
        name: {
            "found": float((own.find(wanted) >= 0).mean()),
            "too_early": too_early[name] / own.num_used,
            "rows": own.num_used / len(wanted),
            "served": served[name] / lookups,
        }
        for name, own in found.items()
    }


def tell(found: Mapping[str, Any]) -> Told:
    ways = {name: each for name, each in found.items() if isinstance(each, dict)}
    rows = [
        [name, *(f"{100 * each[part]:.1f} %" for part in ("found", "too_early", "rows", "served"))]
        for name, each in ways.items()
    ]
    columns = ["ids counted", "of ids with the count", "admitted before it", "rows, of such ids", "lookups with rows"]
    return Told(tables=[Table(title="admission by frequency with bounded memory", columns=columns, rows=rows)])
